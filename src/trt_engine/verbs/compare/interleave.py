"""Interleaved measurement of engines on the same input, and each against the base."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.interleaving import EngineOpener, Schedule, measure_interleaved
from trt_engine.benchmark.measurement_warnings import machine_warnings, row_warnings
from trt_engine.benchmark.query_trace import Progress
from trt_engine.benchmark.speed_difference import (
    METHOD,
    MIN_RESTARTS,
    UNPAIRED_METHOD,
    Difference,
    Restart,
    paired_differences,
    unpaired_differences,
)
from trt_engine.device import parse_device
from trt_engine.device.info import Clocks, clocks
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.compare import CompareSide, Comparison
from trt_engine.tensors import dtype
from trt_engine.verbs.candidates import (
    Candidate,
    OutputComparison,
    compare_engine_outputs,
    compare_structure,
    loader_for,
    make_candidates,
    probe,
)
from trt_engine.verbs.compare.baseline import require_same_conditions, resampling_blocks, unpaired_warnings
from trt_engine.verbs.compare.report import CompareRun, PairResult, find_doubt, require_record
from trt_engine.verbs.compare.request import CompareRequest, unique_labels

log = logging.getLogger(__package__)


@dataclass(frozen=True, slots=True)
class _Conditions:
    """Conditions common to all engines."""

    protocol: Protocol
    batch: int
    shapes: dict[str, tuple[int, ...]]
    inputs: str
    """Where they come from."""
    gpu: int | None


@dataclass(frozen=True, slots=True)
class _Samples:
    """Measured blocks, and the machine's clocks before and after."""

    restarts: Sequence[Restart]
    clocks: tuple[Clocks, Clocks]
    started: str
    complete: bool
    """False after Ctrl-C."""


def measure_candidates(
    request: CompareRequest, engines: Sequence[Engine], base: CompareSide | None, on_progress: Progress | None
) -> CompareRun:
    """All engines measured interleaved, and their differences from the first one, or from an earlier `base`."""
    config = dataclasses.replace(request.config, streams=1, warmup_s=0.0, duration_s=request.duration_s)
    feeds, inputs = feeds_for(engines[0], config)
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    batch = batch_of(engines[0].signature, shapes)
    items = make_candidates(engines, unique_labels(request.labels), request.runtime, feeds)
    warnings: list[str] = []
    protocol = probe(items, config, warnings)
    kind, number = parse_device(items[0].device)
    terms = _Conditions(protocol, batch, shapes, inputs, number if kind == "cuda" else None)
    if base is not None:
        require_same_conditions(base.label, require_record(base), items[0].label, _empty_record(items[0], terms))
    schedule = Schedule(
        request.duration_s,
        request.options.restarts,
        seed=config.seed,
        **({"burst_queries": config.iterations} if config.iterations else {}),
        separate_processes=any(item.out_of_process for item in items),
    )
    log.info(
        "comparing %s at batch %d on %s: %g s, reloaded %d times, protocol %s",
        ", ".join(f"`{item.label}`" for item in items), batch, items[0].device, schedule.duration_s, schedule.restarts,
        protocol.name,
    )  # fmt: skip
    if (least_s := _min_duration_s(items, schedule)) > 1.2 * schedule.duration_s + 1:
        log.warning(
            "this takes about %.0f s, not %g s: each of %d loads takes %.1f s at least (`--restarts 6` is the fewest)",
            least_s, schedule.duration_s, schedule.restarts, least_s / schedule.restarts,
        )  # fmt: skip
    warnings += dict.fromkeys(text for item in items for text in row_warnings(item.engine.signature, batch))
    taken = _measure_blocks(
        [loader_for(item, config, protocol) for item in items], schedule, terms.gpu, warnings, on_progress
    )
    sides = tuple(_make_side(item, index, terms, taken) for index, item in enumerate(items))
    if base is None:
        found = [
            _compare_pair(
                items[0], items[index], sides[0], sides[index], paired_differences(taken.restarts, index, batch=batch)
            )
            for index in range(1, len(items))
        ]
    else:
        warnings += unpaired_warnings(base)
        found = [
            _compare_pair(
                None, item, base, side, unpaired_differences(resampling_blocks(base), resampling_blocks(side))
            )
            for item, side in zip(items, sides, strict=True)
        ]
    return CompareRun(
        sides=sides,
        results=tuple(found),
        blocks=sum(map(len, taken.restarts)),
        order=_order_text(len(items), schedule),
        method=METHOD if base is None else UNPAIRED_METHOD,
        warnings=tuple(warnings),
        base=base,
    )


def _measure_blocks(
    loaders: Sequence[EngineOpener],
    schedule: Schedule,
    gpu: int | None,
    warnings: list[str],
    on_progress: Progress | None,
) -> _Samples:
    """The blocks of all loads; after Ctrl-C the completed ones, where they are enough."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    before, loads, complete, began = clocks(gpu), list[Restart](), True, time.perf_counter()
    try:
        measure_interleaved(loaders, schedule, on_progress=on_progress, partial=loads)
    except KeyboardInterrupt:
        complete = False
        if len(loads) < MIN_RESTARTS:
            raise Interrupted(
                f"interrupted after {len(loads)} of {schedule.restarts} loads: too few for a result",
                hint="the same command compares again",
            ) from None
    states = (before, clocks(gpu))
    warnings += machine_warnings(*states, gpu, before.load_average)
    if (took_s := time.perf_counter() - began) > 1.2 * schedule.duration_s + 1:
        warnings.append(
            f"the fewest rounds took {took_s:.1f} s, {schedule.duration_s:g} s were requested (reduce `--restarts`)"
        )
    return _Samples(loads, states, started, complete)


def _min_duration_s(items: Sequence[Candidate], schedule: Schedule) -> float:
    """Estimated seconds of the fewest rounds: each load reads every engine, warms it up and runs its rounds."""
    queries = 0 if schedule.separate_processes else 2 + schedule.min_rounds + 1
    return schedule.restarts * sum(item.load_s + queries * item.query_s for item in items)


def _order_text(count: int, schedule: Schedule) -> str:
    if count == 1:
        return f"alone, loaded {schedule.restarts} times"
    dealt = "each turn a separate process" if schedule.separate_processes else "random in rounds"
    return f"{dealt}, reloaded {schedule.restarts} times in rotated random order, seed {schedule.seed}"


# ------------------------------------------------------------------------------------------------ report


def _empty_record(item: Candidate, conditions: _Conditions) -> BenchRecord:
    """The record of a measurement on these terms, before it has samples."""
    return BenchRecord(
        engine=str(item.engine.path),
        backend=item.engine.passport.backend,
        device=item.device,
        batch=conditions.batch,
        shapes=conditions.shapes,
        protocol=conditions.protocol,
        environment=Environment.detect(conditions.gpu),
        compute_ms=(),
        wall_s=0.0,
        started="",
        queries=0,
        warmup_queries=0,
        runtime_info=item.runtime_info | {"measured": "interleaved"},
        validation=item.engine.validation,
        engine_digest=item.engine.passport.payload_digest,
    )


def _make_side(item: Candidate, index: int, conditions: _Conditions, turn_samples: _Samples) -> CompareSide:
    turns = [rounds[index] for load in turn_samples.restarts for rounds in load]
    samples = tuple(value for turn in turns for value in turn.samples_ms)
    passport = item.engine.passport
    return CompareSide(
        label=item.label,
        engine=str(item.engine.path),
        backend=passport.backend,
        device=item.device,
        precision=item.runtime_info.get("precision") or passport.precision.main_dtype or "unknown",
        engine_bytes=sum(part.nbytes for part in passport.payload),
        weights_bytes=weights_bytes(item.engine),
        memory_bytes=item.memory_bytes,
        runtime_info=item.runtime_info,
        record=dataclasses.replace(
            _empty_record(item, conditions),
            compute_ms=samples,
            wall_s=sum(turn.wall_s for turn in turns),
            started=turn_samples.started,
            queries=len(samples),
            clocks=turn_samples.clocks,
            inputs=conditions.inputs,
            complete=turn_samples.complete,
        ),
        blocks_ms=tuple(turn.samples_ms for turn in turns),
        restart_blocks=tuple(map(len, turn_samples.restarts)),
        graph_dtype=passport.build.graph_dtype,
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


def _compare_pair(
    first: Candidate | None,
    other: Candidate,
    base: CompareSide,
    side: CompareSide,
    speed: tuple[Sequence[Difference], Sequence[str]],
) -> PairResult:
    """One side against the base; `first` is None where the base is a file."""
    differences, said = speed
    made = (
        OutputComparison(note="the base is a file, which holds no outputs")
        if first is None
        else compare_engine_outputs(first, other)
    )
    compared = Comparison(
        label=side.label,
        speed=tuple(item.to_record() for item in differences),
        outputs=tuple(made.by_output.values()),
        outputs_note=made.note,
        structure=None if first is None else compare_structure(first.engine, other.engine),
        size_ratio=side.engine_bytes / base.engine_bytes if base.engine_bytes else None,
        output_names=tuple(made.by_output),
        outputs_differ=made.differ,
        top1_agreement=made.top1_agreement,
    )
    return PairResult(compared, differences, said, *find_doubt(base, side, by_turns=first is not None))
