"""The builds that are worth measuring for a model: backends that run here x precisions x the settings that matter."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trt_engine.backend import BackendSpec, get_backend, list_backends
from trt_engine.config.build import BuildConfig
from trt_engine.device import info, parse_device
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.graph.dtype_breakdown import main_precision
from trt_engine.model import Model

if TYPE_CHECKING:
    from trt_engine.verbs.build.run import BuildPlan

_BUDGET_S = 300.0
_TUNING_BUDGET_S = 20.0
"""Where only settings of one backend are measured."""
_LOSSLESS = ("fp32", "tf32", "fp16", "bf16")
"""Precisions whose engines are held to the parity tolerance alone."""


@dataclass(frozen=True, slots=True)
class PlannedCandidate:
    """A candidate and its build, or the reason why it is left out."""

    config: BuildConfig
    options: dict[str, str]
    """Settings besides the requested ones."""
    plan: BuildPlan | None = None
    reason: str | None = None


def without_search(config: BuildConfig) -> BuildConfig:
    """The settings of one build alone."""
    plain = BuildConfig()
    return replace(
        config,
        precisions=plain.precisions,
        time_budget_s=plain.time_budget_s,
        optimize_for=plain.optimize_for,
        max_p99_ms=plain.max_p99_ms,
        accuracy_data=plain.accuracy_data,
        accuracy_drop=plain.accuracy_drop,
    )


def unused_settings(config: BuildConfig) -> str | None:
    """Warning for settings of a search where there is nothing to choose between."""
    plain = without_search(config)
    names = {"precisions": "--precisions", "optimize_for": "--optimize-for", "accuracy_data": "--accuracy-data"}
    unused = [flag for name, flag in names.items() if getattr(config, name) != getattr(plain, name)]
    return f"{', '.join(unused)}: not used, there is one candidate; `--backend auto` measures all" if unused else None


def resolve_budget(config: BuildConfig) -> BuildConfig:
    """The settings with the time budget filled in; `UsageError` for settings of a search that contradict each other."""
    if (config.optimize_for == "deadline") != (config.max_p99_ms is not None):
        raise UsageError(
            "`--optimize-for deadline` and `--deadline-ms` belong together",
            hint="`--optimize-for deadline --deadline-ms 20`",
        )
    if config.time_budget_s is not None:
        return config
    wide = get_backend(config.backend).selects or config.precisions
    return replace(config, time_budget_s=_BUDGET_S if wide else _TUNING_BUDGET_S)


def plan_candidates(
    model: Model, config: BuildConfig, plan: Callable[[BuildConfig], BuildPlan]
) -> tuple[PlannedCandidate, ...]:
    """The candidates, simpler ones first; empty where there is nothing to choose between. `plan` plans one build.

    Of a backend that was named the first candidate is the build as requested: what its plan raises is raised.
    """
    named = get_backend(config.backend)
    if named.selects:
        known = (item for item in list_backends().values() if item.provides("builder") and not item.hidden)
        return tuple(
            item
            for spec in sorted(known, key=lambda spec: (spec.preference, spec.name))
            for item in _of_backend(model, config, spec, plan)
        )
    found = [] if config.time_budget_s == 0 else list(_settings(model, config, named))
    if len(found) < 2:
        return ()
    requested = PlannedCandidate(found[0][0], {}, plan(found[0][0]))
    return (requested, *(_planned(one, options, config, plan) for one, options in found[1:]))


def _of_backend(
    model: Model, config: BuildConfig, spec: BackendSpec, plan: Callable[[BuildConfig], BuildPlan]
) -> Iterator[PlannedCandidate]:
    config = replace(config, backend=spec.name, time_budget_s=_BUDGET_S)
    if (reason := _unavailable(spec, config)) is not None:
        yield PlannedCandidate(without_search(config), {}, reason=reason)
        return
    for one, options in _settings(model, config, spec):
        yield _planned(one, options, config, plan)


def _settings(model: Model, config: BuildConfig, spec: BackendSpec) -> Iterator[tuple[BuildConfig, dict[str, str]]]:
    """The builds of one backend: the requested precision first, then those that are allowed besides."""
    same = (config.precision or main_precision(model.graph)) if config.precisions else None
    for precision in (config.precision, *(name for name in config.precisions if name != same)):
        asked = replace(config, precision=precision)
        more: Sequence[dict[str, str]] = spec.load_function("tuning")(model, asked) if spec.provides("tuning") else ()
        for options in ({}, *more):
            yield replace(without_search(asked), options=asked.options | options), options


def _planned(
    one: BuildConfig, options: dict[str, str], config: BuildConfig, plan: Callable[[BuildConfig], BuildPlan]
) -> PlannedCandidate:
    reduced = one.precision != config.precision and one.precision not in _LOSSLESS
    if reduced and not (one.calib_data and config.accuracy_data):
        needs = "calibration data (`--calib-data`) and an accuracy gate (`--accuracy-data`)"
        return PlannedCandidate(one, options, reason=f"{one.precision} needs {needs}")
    try:
        return PlannedCandidate(one, options, plan(one))
    except TrtEngineError as error:
        return PlannedCandidate(one, options, reason=error.message)


def _unavailable(spec: BackendSpec, config: BuildConfig) -> str | None:
    """Why this backend has no candidate here, as far as known without building; None where it has."""
    kind, number = parse_device(config.device)
    if kind not in spec.devices:
        return f"builds for {' or '.join(spec.devices)}, requested is `{config.device}`"
    if kind == "cuda" and number >= len(info.gpus()):
        if importlib.util.find_spec("pynvml") is None:
            return "`nvidia-ml-py`, which lists GPUs, is not installed: pip install 'trt-engine[gpu]'"
        return f"there is no `{config.device}` here"
    if missing := (*spec.missing_modules(), *spec.missing_modules("runtime")):
        return f"{', '.join(f'`{name}`' for name in dict.fromkeys(missing))} is not installed: {spec.install}"
    if missing_tools := [name for name in spec.tools if shutil.which(name) is None]:
        return f"`{missing_tools[0]}` is not on PATH: {spec.install}"
    if spec.provides("measure"):
        return "is measured in a separate process, by other rules: `trt-engine compare` measures it"
    if not spec.provides("runtime"):
        return "only builds: nothing here can run its engines"
    return None
