"""Engines measured in turns on the same input, and each against the base."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trt_engine.api.comparing.asked import Asked, numbered
from trt_engine.api.comparing.engines import Contestant, contestants, looked_at, way
from trt_engine.api.comparing.outputs import Outputs, compared_outputs, compared_structure
from trt_engine.api.comparing.records import of_another_time, refuse_different, units
from trt_engine.api.comparing.report import Found, Measured, record_of
from trt_engine.benchmark.loop import Progress, about_the_machine, batch_of, feeds_for
from trt_engine.benchmark.paired import (
    LEAST_LOADS,
    METHOD,
    UNPAIRED,
    Difference,
    Load,
    Opened,
    Schedule,
    interleave,
    paired,
    unpaired,
)
from trt_engine.comparisons import Compared, CompareSide
from trt_engine.device import parse_device
from trt_engine.device.info import Clocks, clocks
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.records import BenchRecord, Protocol
from trt_engine.tensors import dtype

__all__ = ["in_turns", "weights_bytes"]

log = logging.getLogger(__package__)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What holds for all engines alike."""

    protocol: Protocol
    batch: int
    shapes: dict[str, tuple[int, ...]]
    inputs: str
    """Where they come from."""
    gpu: int | None


@dataclass(frozen=True, slots=True)
class _Taken:
    """The turns that were taken, and the machine before and after them."""

    loads: Sequence[Load]
    clocks: tuple[Clocks, Clocks]
    started: str
    complete: bool
    """False after Ctrl-C."""


def in_turns(
    asked: Asked, engines: Sequence[Engine], base: CompareSide | None, on_progress: Progress | None
) -> Measured:
    """All engines measured in turns, and how they differ from the first one, or from the `base` of another time."""
    config = dataclasses.replace(asked.config, streams=1, warmup_s=0.0, duration_s=asked.duration_s)
    feeds, inputs = feeds_for(engines[0], config)
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    batch = batch_of(engines[0].signature, shapes)
    items = contestants(engines, numbered(asked.names), asked.runtime, feeds)
    warnings: list[str] = []
    protocol = looked_at(items, config, warnings)
    kind, number = parse_device(items[0].device)
    terms = _Terms(protocol, batch, shapes, inputs, number if kind == "cuda" else None)
    if base is not None:
        refuse_different(base.label, record_of(base), items[0].label, _blank(items[0], terms))
    schedule = Schedule(
        asked.duration_s, asked.loads, seed=config.seed, **({"queries": config.iterations} if config.iterations else {}),
        alone=any(item.apart for item in items),
    )  # fmt: skip
    log.info(
        "comparing %s at batch %d on %s: %g s, loaded anew %d times, protocol %s",
        ", ".join(f"`{item.label}`" for item in items), batch, items[0].device, schedule.duration_s, schedule.loads,
        protocol.name,
    )  # fmt: skip
    taken = _take([way(item, config, protocol) for item in items], schedule, terms.gpu, warnings, on_progress)
    sides = tuple(_side(item, index, terms, taken) for index, item in enumerate(items))
    if base is None:
        found = [
            _found(items[0], items[index], sides[0], sides[index], paired(taken.loads, index, batch=batch))
            for index in range(1, len(items))
        ]
    else:
        warnings += of_another_time(base)
        found = [
            _found(None, item, base, side, unpaired(units(base), units(side)))
            for item, side in zip(items, sides, strict=True)
        ]
    return Measured(
        sides=sides,
        found=tuple(found),
        blocks=sum(map(len, taken.loads)),
        order=_order(len(items), schedule),
        method=METHOD if base is None else UNPAIRED,
        warnings=tuple(warnings),
        base=base,
    )


def _take(
    ways: Sequence[Opened], schedule: Schedule, gpu: int | None, warnings: list[str], on_progress: Progress | None
) -> _Taken:
    """The turns of all loads, and after Ctrl-C those there are, where they are enough to say anything."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    before, loads, complete, began = clocks(gpu), list[Load](), True, time.perf_counter()
    try:
        interleave(ways, schedule, on_progress=on_progress, kept=loads)
    except KeyboardInterrupt:
        complete = False
        if len(loads) < LEAST_LOADS:
            raise Interrupted(
                f"interrupted after {len(loads)} of {schedule.loads} loads: too few to say anything",
                hint="the same command compares again",
            ) from None
    states = (before, clocks(gpu))
    warnings += about_the_machine(*states, gpu, before.load_average)
    if (took_s := time.perf_counter() - began) > 1.2 * schedule.duration_s + 1:
        warnings.append(
            f"the fewest rounds took {took_s:.1f} s, {schedule.duration_s:g} s were asked for (`--loads` asks for fewer)"
        )
    return _Taken(loads, states, started, complete)


def _order(count: int, schedule: Schedule) -> str:
    if count == 1:
        return f"alone, loaded {schedule.loads} times"
    dealt = "each turn a process of its own" if schedule.alone else "random in rounds"
    return f"{dealt}, loaded anew {schedule.loads} times in rotated random order, seed {schedule.seed}"


# ------------------------------------------------------------------------------------------------ what is told


def _blank(item: Contestant, terms: _Terms) -> BenchRecord:
    """The record of a measurement on these terms, before it has samples."""
    return BenchRecord(
        engine=str(item.engine.path),
        backend=item.engine.passport.backend,
        device=item.device,
        batch=terms.batch,
        shapes=terms.shapes,
        protocol=terms.protocol,
        environment=Environment.here(terms.gpu),
        compute_ms=(),
        wall_s=0.0,
        started="",
        queries=0,
        warmup_queries=0,
        facts=item.facts | {"measured": "in turns"},
    )


def _side(item: Contestant, index: int, terms: _Terms, taken: _Taken) -> CompareSide:
    turns = [rounds[index] for load in taken.loads for rounds in load]
    samples = tuple(value for turn in turns for value in turn.samples_ms)
    passport = item.engine.passport
    return CompareSide(
        label=item.label,
        engine=str(item.engine.path),
        backend=passport.backend,
        device=item.device,
        precision=item.facts.get("precision") or passport.precision.main or "unknown",
        engine_bytes=sum(part.nbytes for part in passport.payload),
        weights_bytes=weights_bytes(item.engine),
        memory_bytes=item.memory_bytes,
        facts=item.facts,
        record=dataclasses.replace(
            _blank(item, terms),
            compute_ms=samples,
            wall_s=sum(turn.wall_s for turn in turns),
            started=taken.started,
            queries=len(samples),
            clocks=taken.clocks,
            inputs=terms.inputs,
            complete=taken.complete,
        ),
        blocks_ms=tuple(turn.samples_ms for turn in turns),
        loads=tuple(map(len, taken.loads)),
        written=passport.build.written,
        not_fused=passport.build.not_fused,
    )


def weights_bytes(engine: Engine) -> int | None:
    """Bytes of the weights, of a payload that is an ONNX file."""
    if engine.path.suffix.lower() != ".onnx":
        return None
    try:
        return sum(dtype(tensor.data_type).nbytes(tensor.dims) for tensor in walk.tensors(read_proto(engine.path)))
    except TrtEngineError:
        return None


def _found(
    first: Contestant | None,
    other: Contestant,
    base: CompareSide,
    side: CompareSide,
    speed: tuple[Sequence[Difference], Sequence[str]],
) -> Found:
    """One side against the base; `first` is None where the base is a file."""
    differences, said = speed
    made = (
        Outputs(note="the base is a file, which holds no outputs") if first is None else compared_outputs(first, other)
    )
    compared = Compared(
        label=side.label,
        speed=tuple(item.record() for item in differences),
        outputs=tuple(made.errors.values()),
        outputs_note=made.note,
        structure=None if first is None else compared_structure(first.engine, other.engine),
        size_ratio=side.engine_bytes / base.engine_bytes if base.engine_bytes else None,
        output_names=tuple(made.errors),
        outputs_differ=made.differ,
        top1_same=made.top1_same,
    )
    return Found(compared, differences, said)
