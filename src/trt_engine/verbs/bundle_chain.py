"""Chains of engines: whether outputs fit the inputs they feed, and a run in topological order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import FeedError, ModelError, TrtEngineError
from trt_engine.records.bundle import BundleStep
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Shape, TensorSpec, format_shape
from trt_engine.verbs.load import load

log = logging.getLogger(__name__)

FixedInputs = Mapping[str, Mapping[str, int | tuple[str, int]]]
"""By component and input: a number, or the input and position whose size it is."""


class Connection(Protocol):
    """An output that feeds an input."""

    @property
    def producer(self) -> str: ...
    @property
    def output(self) -> str: ...
    @property
    def consumer(self) -> str: ...
    @property
    def input(self) -> str: ...
    @property
    def transpose(self) -> tuple[int, ...]: ...


def mismatch(output: TensorSpec, taken: TensorSpec, transpose: Sequence[int] = ()) -> str | None:
    """Why the output cannot feed the input: type, rank, a dimension that both fix; None when it can."""
    if output.dtype != taken.dtype:
        return f"the output is {output.dtype}, the input {taken.dtype}"
    if len(output.shape) != len(taken.shape):
        return f"the output has {len(output.shape)} dimensions, the input {len(taken.shape)}"
    if transpose and len(transpose) != len(output.shape):
        return f"the transposition is of {len(transpose)} dimensions, the output has {len(output.shape)}"
    for position, axis in enumerate(transpose or range(len(output.shape))):
        given, want = output.shape[axis], taken.shape[position]
        if given >= 0 and want >= 0 and given != want:
            return f"dimension {position} is {given} in the output and {want} in the input"
    return None


def topological_order(names: Sequence[str], links: Iterable[Connection]) -> list[str]:
    """The components, each behind those that feed it; where they feed each other, in the order given."""
    feeds = {name: {link.producer for link in links if link.consumer == name} - {name} for name in names}
    ordered: list[str] = []
    while len(ordered) < len(names):
        ready = [name for name in names if name not in ordered and feeds[name] <= set(ordered)]
        ordered.append(ready[0] if ready else next(name for name in names if name not in ordered))
    return ordered


def run_chain(
    engines: Mapping[str, Engine],
    links: Sequence[Connection],
    fixed_inputs: FixedInputs,
    *,
    seed: int = 0,
    config: RuntimeConfig | None = None,
) -> tuple[dict[str, dict[str, Any]], tuple[BundleStep, ...]]:
    """Run every engine alone on seeded inputs, then all in a chain, each fed with the others' outputs.

    All are loaded at once, as the application has them. The chain runs at the usual sizes (and at the largest, with a
    warning if it does not), else at the largest or smallest that the next component's profile takes; `ModelError` when
    there are none. An error names its component.
    """
    with contextlib.ExitStack() as stack:
        runners: dict[str, InferenceEngine] = {}
        smokes: dict[str, dict[str, Any]] = {}
        for name, engine in engines.items():
            with prefix_errors(name):
                started = time.perf_counter()
                runners[name] = stack.enter_context(load(engine, config=config, verify=False))
                load_ms = (time.perf_counter() - started) * 1e3
                smokes[name] = {"load_ms": load_ms} | run_alone(runners[name], seed, fixed_inputs.get(name))
        whole = [link for link in links if link.producer in runners and link.consumer in runners]
        steps = _run_connected(runners, whole, fixed_inputs, seed) if whole else ()
    return smokes, steps


@contextlib.contextmanager
def prefix_errors(component: str) -> Iterator[None]:
    """Errors inside begin with the component's name."""
    try:
        yield
    except TrtEngineError as error:
        prefix_error(error, component)
        raise


def prefix_error(error: TrtEngineError, component: str) -> None:
    """The error begins with the component's name, once."""
    start = f"component `{component}`"
    if not error.message.startswith(start):
        error.message = f"{start}: {error.message}"
        error.args = (error.message,)


def run_alone(
    runner: InferenceEngine,
    seed: int,
    fixed_inputs: Mapping[str, int | tuple[str, int]] | None = None,
    sizes: Mapping[str, Shape] | None = None,
) -> dict[str, Any]:
    """Two runs on seeded inputs, at `sizes` where given, else the usual ones: what went in, what came out, how long."""
    profile = runner.profiles[0] if runner.profiles else None
    shapes = shapes_of(runner.signature, profile, overrides=sizes)
    feeds = _set_fixed_inputs(random_feeds(runner.signature, shapes, seed), fixed_inputs or {})
    started = time.perf_counter()
    outputs = runner.infer(feeds)
    first = time.perf_counter()
    runner.infer(feeds)
    return {
        "seed": seed,
        "first_ms": (first - started) * 1e3,
        "second_ms": (time.perf_counter() - first) * 1e3,
        "inputs": _summarize_each(feeds),
        "outputs": _summarize_each(outputs),
        "facts": runner.runtime_info,
    }


def _set_fixed_inputs(feeds: dict[str, Array], fixed_inputs: Mapping[str, int | tuple[str, int]]) -> dict[str, Array]:
    """The feeds with the inputs that are lengths (or constants) set to what they stand for."""
    for name, fill in fixed_inputs.items():
        if name in feeds:
            value = fill if isinstance(fill, int) else feeds[fill[0]].shape[fill[1]]
            feeds[name] = np.full(feeds[name].shape, value, feeds[name].dtype)
    return feeds


# ------------------------------------------------------------------------------------------------ the chain


class _OutOfProfile(Exception):
    """An output of one component is outside the next one's profile."""


def _run_connected(
    runners: Mapping[str, InferenceEngine], links: Sequence[Connection], fixed_inputs: FixedInputs, seed: int
) -> tuple[BundleStep, ...]:
    """The chain at the first of opt, max and min at which it runs; after opt also at max, whose failure is a warning."""
    reasons = []
    for which in ("opt", "max", "min"):
        try:
            steps = _run_connected_at(which, runners, links, fixed_inputs, seed)
        except _OutOfProfile as error:
            reasons.append(str(error))
            continue
        if which == "opt":
            try:
                _run_connected_at("max", runners, links, fixed_inputs, seed)
            except (_OutOfProfile, TrtEngineError) as error:
                log.warning("the chain runs at the usual sizes, and not at the largest: %s", error)
        return steps
    raise ModelError(
        f"the components cannot feed each other at any size of their profiles: {'; '.join(dict.fromkeys(reasons))}",
        hint="move the range of the component that is fed, as `--dim joint.T=2:8:32`",
    )


def _run_connected_at(
    which: Literal["min", "opt", "max"],
    runners: Mapping[str, InferenceEngine],
    links: Sequence[Connection],
    fixed_inputs: FixedInputs,
    seed: int,
) -> tuple[BundleStep, ...]:
    given: dict[str, Mapping[str, Array]] = {}
    steps = []
    order = topological_order(list(runners), links)
    states = [link.consumer for link in links if link.consumer == link.producer]
    for name in [*order, *dict.fromkeys(name for name in order if name in states)]:  # states: once more, fed back
        taken = {link.input: link for link in links if link.consumer == name and link.producer in given}
        arrived = {target: _connected_output(link, given[link.producer]) for target, link in taken.items()}
        with prefix_errors(name):
            feeds = _component_feeds(name, runners[name], arrived, which, fixed_inputs.get(name, {}), seed)
            started = time.perf_counter()
            outputs = runners[name].infer(feeds)
            wall_ms = (time.perf_counter() - started) * 1e3
        given[name] = outputs
        steps.append(
            BundleStep(
                component=name,
                sources={target: f"{link.producer}.{link.output}" for target, link in taken.items()},
                inputs=_summarize_each(feeds),
                outputs=_summarize_each(outputs),
                wall_ms=wall_ms,
            )
        )
    return tuple(steps)


def _connected_output(link: Connection, outputs: Mapping[str, Array]) -> Array:
    value = np.asarray(outputs[link.output])
    return np.ascontiguousarray(np.transpose(value, link.transpose)) if link.transpose else value


def _component_feeds(
    name: str,
    runner: InferenceEngine,
    received: Mapping[str, Array],
    which: Literal["min", "opt", "max"],
    fixed_inputs: Mapping[str, int | tuple[str, int]],
    seed: int,
) -> dict[str, Array]:
    """Received tensors, and seeded inputs for the rest in matching sizes."""
    profile = runner.profiles[0] if runner.profiles else None
    shapes: dict[str, Shape] = shapes_of(runner.signature, profile, which=which if not received else "opt")
    sizes: dict[str, int] = {}
    for spec in runner.signature.inputs:
        if spec.name in received:
            shape = tuple(received[spec.name].shape)
            span = profile.ranges.get(spec.name) if profile else None
            if span is not None and not span.contains(shape):
                raise _OutOfProfile(
                    f"`{name}.{spec.name}` gets {format_shape(shape)}, its profile spans {format_shape(span.min)} to "
                    f"{format_shape(span.max)}"
                )
            shapes[spec.name] = shape
            sizes |= {symbol: size for symbol, size in zip(spec.symbols, shape, strict=False) if symbol}
    for spec in runner.signature.inputs:
        if spec.name not in received and spec.symbols:
            moved = zip(spec.symbols, shapes[spec.name], strict=True)
            shapes[spec.name] = tuple(sizes.get(symbol, size) if symbol else size for symbol, size in moved)
    feeds = _set_fixed_inputs(random_feeds(runner.signature, shapes, seed) | dict(received), fixed_inputs)
    try:
        runner.signature.check(feeds)
    except FeedError as error:
        raise ModelError(
            f"what arrives does not fit: {error.message}", hint="correct `connections`, or export both again together"
        ) from error
    return feeds


def _summarize_each(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _summarize(np.asarray(value)) for name, value in arrays.items()}


def _summarize(array: Any) -> dict[str, Any]:
    """Type, shape and range of an array; counts of what is not finite."""
    summary: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if array.size and (array.dtype.kind in "fiub" or "float" in array.dtype.name):
        values = array.astype(np.float64)
        finite = values[np.isfinite(values)]
        summary["not_finite"] = int(values.size - finite.size)
        if finite.size:
            summary |= {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean())}
    return summary
