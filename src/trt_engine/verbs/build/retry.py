"""Retries of a build after a known failure: which changes, in which order; each step is logged.

1. A failure for want of scratch memory raises the workspace, to 32 GiB first (8 GiB is too little for deformable attention)
   and then by doubling up to the GPU's memory. The optimisation level is never lowered before that.
2. `Could not find any implementation for node {ForeignNode[...]}`, on mask subgraphs of DETR-style detectors: an export by
   the dynamo exporter with a bounded batch builds; it needs the source, so the command is printed.
3. The same graph at fixed shapes, its mask folded to constants: one ONNX and one engine for each batch.
4. Optimisation level 2, which still loads everywhere; then 3 and 4 together.

The steps, their order and the numbers come from builds of detectors for video that failed without them.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trt_engine.atomic_io import ensure_folder, staged_copy
from trt_engine.backend import BackendSpec, get_backend
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.config.settings import settings
from trt_engine.device import info, parse_device
from trt_engine.errors import BuildError, PrecisionError, TrtEngineError
from trt_engine.graph.static_shapes import set_static_shapes
from trt_engine.model import Model
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import Precision, Requirements
from trt_engine.tensors import TensorSpec
from trt_engine.verbs.build.precision import PreparedModel, require_precision

if TYPE_CHECKING:
    from trt_engine.verbs.build.run import BuildPlan

log = logging.getLogger(__name__)

Made = TypeVar("Made")

LOG_HINT = "the builder's own words are in "
"""Begins the end of a failed build's hint; the log's path follows."""
_SUFFICIENT_MIB = 32 << 10
"""What the source's detectors with deformable attention build in; 8 GiB is too little."""
_MAX_MIB = 128 << 10
"""The largest workspace on a GPU whose memory size is unknown."""
_WORKSPACE_CAUSES = ("insufficient_workspace", "no_implementation")
"""A workspace that is too small shows as skipped tactics and, when nothing is left, as no implementation."""
_PORTABLE_LEVEL = "2"
_LEVEL = "optimization_level"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try: the graph and the settings it is built with, and the steps that led to them."""

    model: Model
    config: BuildConfig
    steps: tuple[str, ...] = ()
    change: str = ""
    """What this try changes, in words."""

    @property
    def has_static_shapes(self) -> bool:
        """True when no size of the graph's inputs is open; a profile that does not move leaves its shape arithmetic in."""
        return not any(spec.dynamic for spec in self.model.signature.inputs)


def build_with_retries(
    first: Attempt, spec: BackendSpec, folder: Path, build: Callable[[Attempt], BuildOutcome], *, path: Path
) -> tuple[Attempt, BuildOutcome]:
    """The attempt that succeeded and what it built; otherwise an error of the first failure's type.

    With `config.retry` off, or for a failure without a known cause, the first error is raised as it is; where the profile
    has one size alone, the graph with these sizes in it (which `lint --shapes` parses) is tried before. `folder` takes
    graphs that are made on the way; `path` is the model as its owner knows it, for the commands that are printed.
    """
    attempt = first
    started = time.monotonic()
    try:
        return first, build(first)
    except BuildError as error:
        failure = error
    if failure.cause not in _WORKSPACE_CAUSES and not _may_need_sizes(first, spec, failure):
        raise failure
    if not first.config.retry:
        raise _failure_text(failure, "leave `--no-retry` out to try what is known to help", failure.hint)
    steps, failures = [f"as requested: {_failure_line(failure, started)}"], [failure]
    for attempt in _next_attempts(first, spec, failures, folder, steps, path):
        log.warning("%s: trying %s", failures[-1].message, attempt.change)
        started = time.monotonic()
        try:
            outcome = build(attempt)
        except TrtEngineError as error:
            line = _failure_line(error, started).replace(str(attempt.model.path), str(path))
            steps.append(f"{attempt.change}: {line}")
            if isinstance(error, BuildError):
                failures.append(error)
            if not isinstance(error, BuildError) or error.cause is None:
                log.warning("%s did not help: %s", attempt.change, error.message)
            continue
        steps.append(f"{attempt.change}: built ({time.monotonic() - started:.1f} s)")
        log.warning("built with %s", attempt.change)
        return replace(attempt, steps=tuple(steps)), replace(
            outcome,
            retries=(*outcome.retries, *steps),
            notes=outcome.notes | {"retry": attempt.change},
            warnings=(*outcome.warnings, *_restrict_profile(first, attempt)),
        )
    if failure.cause not in _WORKSPACE_CAUSES:
        raise _failure_text(
            failure,
            _control_flow(first),
            *(f"with {step}" for step in steps[1:] if failure.message not in step),
            failure.hint,
        )
    if len(steps) == 1 and not _has_optimization_level(
        spec
    ):  # nothing could be tried: the failure's own hint is the best
        raise failure
    for step in steps:
        log.warning("tried %s", step)
    _, lead, place = (failure.hint or "").rpartition(LOG_HINT)  # its other advice was already followed
    raise _failure_text(failure, _final_error(first, failures[-1], path), lead + place if lead else "")


_SIZE_CAUSES = (None, "shape_mismatch", "operator_not_supported", "onnx_parse_error")
"""Failures that open sizes alone may have."""


def _may_need_sizes(first: Attempt, spec: BackendSpec, failure: BuildError) -> bool:
    """Whether the only sizes that the engine takes are still open in the graph, and may be why its build failed."""
    fixed = len(first.config.profiles) == 1 and all(
        span.min == span.max for span in first.config.profiles[0].ranges.values()
    )
    return fixed and not first.has_static_shapes and spec.writes_log and failure.cause in _SIZE_CAUSES


def _control_flow(first: Attempt) -> str | None:
    """What decides the branches of the graph, the usual reason of a failure without one; None without branches."""
    count = sum(place.node.op_type == "If" for place in first.model.graph.nodes)
    switches = ", ".join(f"`{spec.name}`" for spec in first.model.signature.inputs if spec.choices)
    if not count:
        return None
    return f"the graph has {count} If" + (
        f", which {switches} decides: export the model for one value of it, which leaves one branch"
        if switches
        else ": export with an example that lets the exporter drop them"
    )


def _restrict_profile(first: Attempt, attempt: Attempt) -> Iterator[str]:
    if attempt.config.profiles != first.config.profiles:
        yield (
            "a retry fixed the shapes: this engine takes "
            f"{', '.join(map(str, attempt.config.profiles))} and nothing else; other sizes need another engine"
        )


def _next_attempts(
    first: Attempt, spec: BackendSpec, failures: Sequence[BuildError], folder: Path, steps: list[str], path: Path
) -> Iterator[Attempt]:
    """The attempts in order. `failures` grows with each that fails; `steps` gets a line for what cannot be made here."""
    config = first.config
    if failures[0].cause not in _WORKSPACE_CAUSES:
        yield _with_static_shapes(first, folder)
        return
    for mib in _larger_workspaces(config, failures[0].cause == "insufficient_workspace"):
        config = replace(first.config, workspace_mib=mib)
        yield replace(first, config=config, change=f"workspace {mib} MiB (was {first.config.workspace_mib} MiB)")
    # with memory enough another reason can come to light
    foreign = any("ForeignNode" in (failure.node or failure.message) for failure in failures)
    fixed: Attempt | None = None
    if foreign:
        steps.append(
            f"an export by the dynamo exporter: not done, no source is named (`{_convert_command(first, path)}` makes one)"
        )
        if not first.has_static_shapes:
            fixed = _with_static_shapes(replace(first, config=config), folder)
            yield fixed
    level = config.options.get(_LEVEL)
    if _has_optimization_level(spec) and (level is None or int(level) > int(_PORTABLE_LEVEL)):
        options = config.options | {_LEVEL: _PORTABLE_LEVEL}
        yield replace(
            first,
            config=replace(config, options=options),
            change=f"optimisation level {_PORTABLE_LEVEL} (was {level or 'the default'})",
        )
        if fixed is not None:
            yield replace(
                fixed,
                config=replace(fixed.config, options=options),
                change=f"{fixed.change} and optimisation level {_PORTABLE_LEVEL}",
            )


def _larger_workspaces(config: BuildConfig, causes: bool) -> Iterator[int]:
    """Larger workspaces in order: enough for what is known, then (when it is the known cause) up to the GPU's memory."""
    mib = config.workspace_mib
    if mib < _SUFFICIENT_MIB:
        mib = min(_SUFFICIENT_MIB, _gpu_mib(config))
        if mib > config.workspace_mib:
            yield mib
    while causes and mib * 2 <= _gpu_mib(config):
        mib *= 2
        yield mib


def _gpu_mib(config: BuildConfig) -> int:
    kind, number = parse_device(config.device)
    board = info.gpu(number) if kind == "cuda" else None
    return board.memory_mib if board is not None else _MAX_MIB


def _with_static_shapes(attempt: Attempt, folder: Path) -> Attempt:
    """The graph at the optimum of the first profile, every size written in."""
    best = {name: span.opt for name, span in attempt.config.profiles[0].ranges.items()}
    folder.mkdir(parents=True, exist_ok=True)
    made = set_static_shapes(attempt.model, best, folder / f"{attempt.model.name}.onnx")
    profile = Profile({name: ShapeRange(shape, shape, shape) for name, shape in best.items()})
    return replace(
        attempt,
        model=made,
        config=replace(attempt.config, profiles=(profile,)),
        change=f"the graph at fixed shapes {profile}",
    )


def _has_optimization_level(spec: BackendSpec) -> bool:
    """Whether the backend has an optimisation level to lower."""
    return spec.provides("options") and any(item.name == _LEVEL for item in settings(spec.load_component("options")))


def _failure_line(error: TrtEngineError, started: float) -> str:
    return f"{error.message} ({time.monotonic() - started:.1f} s)"


def _convert_command(first: Attempt, path: Path) -> str:
    """The command that exports the source again, each open size within the first profile's."""
    out = str(path.with_name(f"{path.stem}.dynamo.onnx"))
    words = ["trt-engine", "convert", "SOURCE", "-o", out, "--exporter", "dynamo"]
    ranges = first.config.profiles[0].ranges if first.config.profiles else {}
    for spec in first.model.signature.inputs:
        span = ranges.get(spec.name)
        axes = [axis for axis in spec.dynamic if span is not None and span.min[axis] < span.max[axis]]
        if span is not None and axes:
            named = (f"{axis}={_axis_argument(spec, axis)}@{span.min[axis]}..{span.max[axis]}" for axis in axes)
            words += ["--dynamic", f"{spec.name}:{','.join(named)}"]
    return shlex.join(words if "--dynamic" in words else [*words, "--static"])


def _axis_argument(spec: TensorSpec, axis: int) -> str:
    """Name of the dynamic size, from the model if it has one."""
    symbol = spec.symbols[axis] if axis < len(spec.symbols) else None
    return symbol if symbol is not None and symbol.isidentifier() else "batch" if axis == 0 else f"size_{axis}"


def _final_error(first: Attempt, failure: BuildError, path: Path) -> str:
    if failure.cause == "insufficient_workspace":
        return "every retry failed: a GPU with more memory, or a smaller batch"
    if "ForeignNode" in (failure.node or failure.message):
        return f"every retry failed: export again with the dynamo exporter, `{_convert_command(first, path)}`"
    return "every retry failed: another TensorRT version may have a kernel for it"


def _failure_text(failure: BuildError, *hints: str | None) -> BuildError:
    hint = "; ".join(part for part in hints if part)
    made = BuildError(failure.message, hint=hint, cause=failure.cause, node=failure.node)
    made.__cause__ = failure
    return made


def without_failing_fusion(
    attempt: Attempt, failure: BuildError, fusions: Sequence[str], rebuild: Callable[[Attempt], Made]
) -> tuple[Attempt, Made]:
    """The attempt whose engine runs, and what `rebuild` made of it, for an engine with these fusions that does not run:
    without any, which shows whether they are at fault, then without each alone. Raises `failure` where they are not."""
    config = attempt.config
    plain = replace(attempt, config=replace(config, fuse=False), change="no fusions")
    log.warning("%s: trying %s", failure.message, plain.change)
    try:
        made = rebuild(plain)
    except BuildError:
        raise failure from None
    if len(fusions) == 1:
        return plain, made
    for name in fusions:
        left_out = ",".join(filter(None, [config.options.get("no_fusion"), name]))
        less = replace(config, options=config.options | {"no_fusion": left_out})
        with contextlib.suppress(BuildError):
            tried = replace(attempt, config=less, change=f"no fusion {name}")
            return tried, rebuild(tried)
    return plain, rebuild(plain)


# ------------------------------------------------------------------------------------------------ one attempt


def run_builder(
    attempt: Attempt, prepared: PreparedModel, plan: BuildPlan, payload: Path, on_status: Callable[[str], None]
) -> BuildOutcome:
    """Result of the builder and of the steps before it; `PrecisionError` when it is not in the requested precision."""
    spec, asked = get_backend(plan.config.backend), attempt.config.precision

    def prove(outcome: BuildOutcome) -> str | None:
        return require_precision(spec, replace(prepared, model=attempt.model), plan, payload, outcome)

    try:
        with _build_paths(spec, plan, payload, on_status) as places:
            outcome: BuildOutcome = spec.load_component("builder")().build(attempt.model, attempt.config, places)
    except PrecisionError:
        if asked is not None and payload.is_file():  # the backend's own count; with its graph the nodes can be named
            prove(BuildOutcome(plan.model.signature, Precision(asked), Requirements("", "")))
        raise
    if not payload.is_file() or not payload.stat().st_size:
        raise BuildError(f"the backend `{spec.name}` wrote no payload", hint="`-v` shows its log")
    if asked is not None and (doubt := prove(outcome)):
        log.warning("%s", doubt)
        outcome = replace(outcome, warnings=(*outcome.warnings, doubt))
    return replace(outcome, retries=(*prepared.steps, *outcome.retries), notes=outcome.notes | prepared.notes)


@contextlib.contextmanager
def _build_paths(
    spec: BackendSpec, plan: BuildPlan, payload: Path, on_status: Callable[[str], None]
) -> Iterator[BuildPaths]:
    """Output paths of the build; errors name the log, and new timings are shared afterwards."""
    if not spec.writes_log:
        cache = plan.store.compiler_cache(plan.identity) if spec.keeps_cache else None
        yield BuildPaths(payload, on_status=on_status, cache=cache)
        return
    shared = plan.store.timing_cache(plan.identity)
    named = plan.config.timing_cache or shared
    assert plan.log is not None
    for place in (plan.log, named, shared):
        ensure_folder(place.parent)
    seeded = named != shared and _copy_timing_cache(shared, named)
    try:
        yield BuildPaths(payload, plan.log, named, on_status)
    except TrtEngineError as error:
        if plan.log.exists():
            error.hint = f"{error.hint}; " if error.hint else ""
            error.hint += f"{LOG_HINT}`{plan.log}`"
        raise
    if named != shared and (seeded or not shared.exists()):
        _copy_timing_cache(named, shared, overwrite=True)  # what the store had is in it


def _copy_timing_cache(source: Path, target: Path, *, overwrite: bool = False) -> bool:
    """Whether `target` is now a copy of a timing cache; one that is there already is left alone unless `again`."""
    if not source.is_file() or (target.exists() and not overwrite):
        return False
    with contextlib.suppress(OSError), staged_copy(source, target) as copy:
        copy.replace(target)
        return True
    return False
