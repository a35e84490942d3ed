"""A bundle as one model: its components run in the order they feed each other."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError
from trt_engine.protocols import RunnerBase
from trt_engine.records.bundle import BundleConnection
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Signature, Tensors, TensorSpec
from trt_engine.verbs.bundle_chain import prefix_errors, topological_order
from trt_engine.verbs.bundle_folder import open_component, read_report
from trt_engine.verbs.load import load

Tensor = tuple[str, str]
"""A component and one of its inputs or outputs."""


class BundleRunner(RunnerBase):
    """Runs all components, each fed with the outputs that are connected to it.

    Inputs of the bundle are those that nothing earlier feeds, also states, which a component feeds itself; its outputs
    are those that feed nothing later. A name that several components have is `component.tensor`.
    """

    def __init__(self, runners: Mapping[str, InferenceEngine], links: Sequence[BundleConnection]) -> None:
        self._runners = runners
        self._order = topological_order([*runners], links)
        place = {name: number for number, name in enumerate(self._order)}
        self._links = {
            (link.consumer, link.input): link for link in links if place[link.producer] < place[link.consumer]
        }
        consumed = {(link.producer, link.output) for link in self._links.values()}
        inputs = self._tensors("inputs")
        self._inputs = {tensor: spec for tensor, spec in inputs.items() if tensor not in self._links}
        outputs = self._tensors("outputs")
        self._outputs = {tensor: spec for tensor, spec in outputs.items() if tensor not in consumed}
        self._input_names, self._output_names = _names(self._inputs), _names(self._outputs)
        self.signature = Signature(
            tuple(_named(spec, self._input_names[tensor]) for tensor, spec in self._inputs.items()),
            tuple(_named(spec, self._output_names[tensor]) for tensor, spec in self._outputs.items()),
        )
        self.profiles = (self._profile(),)
        self.width = min(runner.runner.width for runner in runners.values())

    def _tensors(self, side: str) -> dict[Tensor, TensorSpec]:
        return {
            (name, spec.name): spec for name in self._order for spec in getattr(self._runners[name].signature, side)
        }

    def _profile(self) -> Profile:
        """The ranges of the bundle's inputs, of components with one profile; the others check their feeds themselves."""
        ranges = {}
        for (component, tensor), name in self._input_names.items():
            profiles = self._runners[component].profiles
            if len(profiles) == 1 and tensor in profiles[0].ranges:
                ranges[name] = profiles[0].ranges[tensor]
        return Profile(ranges)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        given: dict[Tensor, Any] = {}
        for component in self._order:
            runner = self._runners[component]
            taken = {spec.name: self._feed((component, spec.name), feeds, given) for spec in runner.signature.inputs}
            with prefix_errors(component):
                given |= {(component, name): value for name, value in runner.infer(taken).items()}
        return {name: given[tensor] for tensor, name in self._output_names.items()}

    def _feed(self, tensor: Tensor, feeds: Tensors, given: Mapping[Tensor, Any]) -> Any:
        link = self._links.get(tensor)
        if link is None:
            return feeds[self._input_names[tensor]]
        value = given[link.producer, link.output]
        return np.ascontiguousarray(np.transpose(value, link.transpose)) if link.transpose else value

    def runtime_info(self) -> dict[str, str]:
        """What runs, by fact; by component where they differ."""
        found: dict[str, dict[str, str]] = {}
        for component, runner in self._runners.items():
            for key, value in runner.runtime_info.items():
                found.setdefault(key, {})[component] = value
        return {key: join_facts(values) for key, values in found.items() if key != "engine"}

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()


def join_facts(by_component: Mapping[str, str]) -> str:
    """One text of a fact that each component has: itself where all agree."""
    if len({*by_component.values()}) == 1:
        return next(iter(by_component.values()))
    return ", ".join(f"{component} {value}" for component, value in by_component.items())


def _names(tensors: Mapping[Tensor, TensorSpec]) -> dict[Tensor, str]:
    count = Counter(tensor for _, tensor in tensors)
    return {
        (component, tensor): tensor if count[tensor] == 1 else f"{component}.{tensor}" for component, tensor in tensors
    }


def _named(spec: TensorSpec, name: str) -> TensorSpec:
    """The spec under its name in the bundle; equal symbols of different components need not be equal sizes."""
    return replace(spec, name=name, symbols=())


def open_bundle(folder: Path, *, verify: bool) -> tuple[dict[str, Engine], tuple[BundleConnection, ...]]:
    """Engines by component, and how they feed each other. Raises `ModelError`, `EngineError` unless all are there.

    With `verify`, they must be those of the bundle's report.
    """
    report = read_report(folder)
    engines: dict[str, Engine] = {}
    for item in report.components:
        engine, problems = open_component(folder, item)
        if engine is None or (problems and verify):
            raise EngineError(problems[0], hint="run the `trt-engine bundle` command again")
        engines[item.name] = engine
    if not engines:
        raise EngineError(f"the bundle `{folder.name}` has no component", hint="`trt-engine bundle model_meta.json`")
    return engines, report.connections


def load_bundle(
    engines: Mapping[str, Engine], links: Sequence[BundleConnection], config: RuntimeConfig, *, verify: bool
) -> InferenceEngine:
    """The components loaded, as one engine."""
    with contextlib.ExitStack() as stack:
        runners = {}
        for name, engine in engines.items():
            with prefix_errors(name):
                runners[name] = stack.enter_context(load(engine, config=config, verify=verify))
        runner = BundleRunner(runners, links)
        stack.pop_all()
    return InferenceEngine(runner, next(iter(engines.values())))


def bundle_digest(engines: Mapping[str, Engine]) -> str:
    """A digest that changes with each of the engines."""
    digests = "".join(f"{name} {engine.passport.payload[0].digest}\n" for name, engine in engines.items())
    return f"sha256:{hashlib.sha256(digests.encode()).hexdigest()}"
