"""The ladder: what is tried after a known failure of a builder, in which order, each step said.

1. A failure for want of scratch memory raises the workspace, to 32 GiB first (8 GiB is too little for deformable attention)
   and then by doubling up to the GPU's memory. The optimisation level is never lowered before that.
2. `Could not find any implementation for node {ForeignNode[...]}`, on mask subgraphs of DETR-style detectors: an export by
   the dynamo exporter with a bounded batch builds; it needs the source, so the command is printed.
3. The same graph at fixed shapes, its mask folded to constants: one ONNX and one engine for each batch.
4. Optimisation level 2, which still loads everywhere; then 3 and 4 together.

The steps, their order and the numbers come from builds of detectors for video that failed without them.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.backend import Backend
from trt_engine.config import BuildConfig, Profile, ShapeRange, settings
from trt_engine.device import info, parse_device
from trt_engine.errors import BuildError, TrtEngineError
from trt_engine.graph.fixed import fix_shapes
from trt_engine.model import Model
from trt_engine.protocols import BuildOutcome
from trt_engine.tensors import TensorSpec

__all__ = ["WORDS_ARE_IN", "Attempt", "climb"]

log = logging.getLogger(__name__)

WORDS_ARE_IN = "the builder's own words are in "
"""Begins the end of a failed build's hint; the log's path follows."""

_ENOUGH_MIB = 32 << 10
"""What the source's detectors with deformable attention build in; 8 GiB is too little."""
_MOST_MIB = 128 << 10
"""Where raising ends on a GPU whose memory cannot be asked for."""
_WORKSPACE_CAUSES = ("insufficient_workspace", "no_implementation")
"""A workspace that is too small shows as skipped tactics and, when nothing is left, as no implementation."""
_LOADS_EVERYWHERE = "2"
_LEVEL = "optimization_level"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try: the graph and the settings it is built with, and the steps that led to them."""

    model: Model
    config: BuildConfig
    steps: tuple[str, ...] = ()
    rung: str = ""
    """What this try changes, in words."""

    @property
    def fixed(self) -> bool:
        """True when no size of the graph's inputs is open; a profile that does not move leaves its shape arithmetic in."""
        return not any(spec.dynamic for spec in self.model.signature.inputs)


def climb(
    first: Attempt, card: Backend, folder: Path, build: Callable[[Attempt], BuildOutcome], *, source: Path
) -> tuple[Attempt, BuildOutcome]:
    """The attempt that succeeded and what it built; the first failure's kind of error when none did.

    With `config.ladder` off, or for a failure without a known cause, the first error is raised as it is. `folder` takes
    graphs that are made on the way; `source` is the model as its owner knows it, for the commands that are printed.
    """
    attempt = first
    started = time.monotonic()
    try:
        return first, build(first)
    except BuildError as error:
        failure = error
    if failure.cause not in _WORKSPACE_CAUSES or not _has_level(card):
        raise failure
    if not first.config.ladder:
        raise _said(failure, "leave `--no-ladder` out to try what is known to help", failure.hint)
    steps, failures = [f"as asked: {_told(failure, started)}"], [failure]
    for attempt in _rungs(first, failures, folder, steps, source):
        log.warning("%s: trying %s", failures[-1].message, attempt.rung)
        started = time.monotonic()
        try:
            outcome = build(attempt)
        except TrtEngineError as error:
            steps.append(f"{attempt.rung}: {_told(error, started)}")
            if isinstance(error, BuildError):
                failures.append(error)
            if not isinstance(error, BuildError) or error.cause is None:
                log.warning("%s did not help: %s", attempt.rung, error.message)
            continue
        steps.append(f"{attempt.rung}: built ({time.monotonic() - started:.1f} s)")
        log.warning("built with %s", attempt.rung)
        return replace(attempt, steps=tuple(steps)), outcome
    for step in steps:
        log.warning("tried %s", step)
    raise _said(failure, _last_word(first, failures[-1], source), _log_of(failure))


def _rungs(
    first: Attempt, failures: Sequence[BuildError], folder: Path, steps: list[str], source: Path
) -> Iterator[Attempt]:
    """The attempts in order. `failures` grows with each that fails; `steps` gets a line for what cannot be made here."""
    config = first.config
    for mib in _workspaces(config, failures[0].cause == "insufficient_workspace"):
        config = replace(first.config, workspace_mib=mib)
        yield replace(first, config=config, rung=f"workspace {mib} MiB (was {first.config.workspace_mib} MiB)")
    # with memory enough another reason can come to light
    foreign = any("ForeignNode" in (failure.node or failure.message) for failure in failures)
    fixed: Attempt | None = None
    if foreign:
        steps.append(
            f"an export by the dynamo exporter: not done, no source is named (`{_convert(first, source)}` makes one)"
        )
        if not first.fixed:
            fixed = _at_fixed_shapes(replace(first, config=config), folder)
            yield fixed
    level = config.options.get(_LEVEL)
    if level is None or int(level) > int(_LOADS_EVERYWHERE):
        options = config.options | {_LEVEL: _LOADS_EVERYWHERE}
        yield replace(
            first,
            config=replace(config, options=options),
            rung=f"optimisation level {_LOADS_EVERYWHERE} (was {level or 'the default'})",
        )
        if fixed is not None:
            yield replace(
                fixed,
                config=replace(fixed.config, options=options),
                rung=f"{fixed.rung} and optimisation level {_LOADS_EVERYWHERE}",
            )


def _workspaces(config: BuildConfig, wanting: bool) -> Iterator[int]:
    """Larger workspaces in order: enough for what is known, then (when it is the known cause) up to the GPU's memory."""
    mib = config.workspace_mib
    if mib < _ENOUGH_MIB:
        mib = min(_ENOUGH_MIB, _gpu_mib(config))
        if mib > config.workspace_mib:
            yield mib
    while wanting and mib * 2 <= _gpu_mib(config):
        mib *= 2
        yield mib


def _gpu_mib(config: BuildConfig) -> int:
    kind, number = parse_device(config.device)
    board = info.gpu(number) if kind == "cuda" else None
    return board.memory_mib if board is not None else _MOST_MIB


def _at_fixed_shapes(attempt: Attempt, folder: Path) -> Attempt:
    """The graph at the optimum of the first profile, every size written in."""
    best = {name: span.opt for name, span in attempt.config.profiles[0].ranges.items()}
    folder.mkdir(parents=True, exist_ok=True)
    made = fix_shapes(attempt.model, best, folder / f"{attempt.model.name}.onnx")
    profile = Profile({name: ShapeRange(shape, shape, shape) for name, shape in best.items()})
    return replace(
        attempt,
        model=made,
        config=replace(attempt.config, profiles=(profile,)),
        rung=f"the graph at fixed shapes {profile}",
    )


def _has_level(card: Backend) -> bool:
    """Whether the backend builds as TensorRT does: it has an optimisation level to lower."""
    return card.has("options") and any(item.name == _LEVEL for item in settings(card.half("options")))


def _told(error: TrtEngineError, started: float) -> str:
    return f"{error.message} ({time.monotonic() - started:.1f} s)"


def _convert(first: Attempt, source: Path) -> str:
    """The command that exports the source again, each open size within the first profile's."""
    out = str(source.with_name(f"{source.stem}.dynamo.onnx"))
    words = ["trt-engine", "convert", "SOURCE", "-o", out, "--exporter", "dynamo"]
    ranges = first.config.profiles[0].ranges if first.config.profiles else {}
    for spec in first.model.signature.inputs:
        span = ranges.get(spec.name)
        axes = [axis for axis in spec.dynamic if span is not None and span.min[axis] < span.max[axis]]
        if span is not None and axes:
            named = (f"{axis}={_axis(spec, axis)}@{span.min[axis]}..{span.max[axis]}" for axis in axes)
            words += ["--dynamic", f"{spec.name}:{','.join(named)}"]
    return shlex.join(words if "--dynamic" in words else [*words, "--fixed"])


def _axis(spec: TensorSpec, axis: int) -> str:
    """What the open size is called: as the model does where it does so with a name."""
    symbol = spec.symbols[axis] if axis < len(spec.symbols) else None
    return symbol if symbol is not None and symbol.isidentifier() else "batch" if axis == 0 else f"size_{axis}"


def _last_word(first: Attempt, failure: BuildError, source: Path) -> str:
    if failure.cause == "insufficient_workspace":
        return "every step of the ladder failed: a GPU with more memory, or a smaller batch"
    if "ForeignNode" in (failure.node or failure.message):
        return f"every step of the ladder failed: export again with the dynamo exporter, `{_convert(first, source)}`"
    return "every step of the ladder failed: another TensorRT version may have a kernel for it"


def _log_of(failure: BuildError) -> str:
    """Where the builder's log is, of a hint whose other advice was followed and did not help."""
    _, told, place = (failure.hint or "").rpartition(WORDS_ARE_IN)
    return told + place if told else ""


def _said(failure: BuildError, *hints: str | None) -> BuildError:
    hint = "; ".join(part for part in hints if part)
    made = BuildError(failure.message, hint=hint, cause=failure.cause, node=failure.node)
    made.__cause__ = failure
    return made
