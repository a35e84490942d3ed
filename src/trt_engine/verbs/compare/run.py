"""`compare`: interleaved measurement of engines, their outputs on the same input, and the differences."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import all_or_nothing, ensure_folder
from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.interleaving import EngineOpener, Schedule, measure_interleaved
from trt_engine.benchmark.measured_engine import machine_warnings, row_warnings
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
from trt_engine.config.bench import BenchConfig, CompareConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.device.info import Clocks, clocks
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.environment import Environment
from trt_engine.errors import AccuracyError, Interrupted, SpeedError, TrtEngineError, UnstableError
from trt_engine.graph import walk
from trt_engine.graph.load import open_model, read_proto
from trt_engine.progress import ProgressOption, progress_counter
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.compare import CompareReport, CompareSide, Comparison
from trt_engine.records.dry_run import DryRun
from trt_engine.reporting.report import REPORT_FILES, write_reports
from trt_engine.tensors import dtype
from trt_engine.verbs.bench.run import open_or_build, planned_inputs
from trt_engine.verbs.candidates import (
    Candidate,
    OutputComparison,
    compare_engine_outputs,
    compare_structure,
    loader_for,
    make_candidates,
    probe,
)
from trt_engine.verbs.compare.baseline import (
    compare_records,
    read_baseline,
    require_same_conditions,
    resampling_blocks,
    unpaired_warnings,
    write_baseline,
)
from trt_engine.verbs.compare.report import CompareRun, PairResult, find_doubt, make_report, require_record
from trt_engine.verbs.compare.request import CompareRequest, parse_request, unique_labels
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.load import merge_run_settings

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import CompareSettings


log = logging.getLogger(__name__)


@public_function
@takes_model("engines")
def compare(
    *engines: Engine | AnyModel,
    compare: CompareConfig | None = None,
    config: BenchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[CompareSettings],
) -> CompareReport:
    """Compare engines with the first one: speed difference with a confidence interval, and output differences.

    Engines (or bare models, which are built into the store first) are measured interleaved, on the same input. `values`
    are settings of `CompareConfig` (`fail_if=["slower:3%", "p99-slower:5%", "maybe-slower:3%", "error:1e-3"]`,
    `baseline`, a file that `save_baseline` wrote, in place of the first engine, ...), `BenchConfig`, `RuntimeConfig`
    and (for models) `BuildConfig`; `duration_s` is for everything together. Paths of two `records.jsonl` compare
    earlier measurements, which are unpaired.

    Raises `AccuracyError` or `SpeedError` when a rule fails and `UnstableError` with `strict=True`, after everything is
    written; `UsageError` for measurements under different protocols or conditions. `Interrupted` after Ctrl-C has the
    incomplete report as `partial`.
    """
    settings = merge_run_settings(values, runtime, build, compare or CompareConfig(), config or BenchConfig())
    report = run(parse_request(on_disk(engines), *settings), named=values)
    gate(report, strict=settings[1].strict)
    return report


def run(request: CompareRequest, *, named: Container[str] = (), command: str = "") -> CompareReport:
    """The same without the gates; `named` are the explicit settings, which an engine must match."""
    for name, target in request.writes.items():  # tried before minutes are spent
        ensure_folder(target.parent, by="--save-baseline" if name == "baseline" else "-o")
    if any(request.from_records):
        measured = compare_records(request)
    else:
        for item in request.engines:
            if isinstance(item, Path) and not item.exists():
                Engine.open(item)  # raises before minutes are spent on building the others
        build = _at_first_profile(request)
        opened = [open_or_build(item, request.config, request.runtime, build, named) for item in request.engines]
        for engine in opened:
            engine.verify()
        measured = measure_candidates(request, opened, _read_base(request), progress_counter("comparing", "s"))
    report = dataclasses.replace(make_report(request, measured), artifacts=_artifact_paths(request))
    with all_or_nothing():
        if (place := request.writes.get("baseline")) is not None and report.complete:
            write_baseline(place, measured.sides[0], report)
        if (place := request.writes.get("compare")) is not None:
            write_document(place, "compare", report, command=command)
            write_reports(place.parent)
    for text in report.warnings:
        log.warning("%s", text)
    if not report.complete:
        raise Interrupted(
            f"interrupted after {report.blocks} turns of each engine",
            hint="the same command compares again",
            partial=report,
        )
    return report


def _at_first_profile(request: CompareRequest) -> BuildConfig:
    """Build settings of bare models: where no sizes are given, the profiles of the first engine if all models take them."""
    config, build = request.config, request.build
    engine = next((item for item in request.engines if not is_onnx_model(item)), None)
    if engine is None or any((build.profiles, build.batch, build.shapes, config.batch, config.shapes, config.inputs)):
        return build
    first = engine if isinstance(engine, Engine) else Engine.open(engine)
    found = dataclasses.replace(build, profiles=first.passport.profiles)
    try:
        for model in request.engines:
            if not isinstance(model, Engine) and is_onnx_model(model):
                found.resolve(open_model(model).signature)
    except TrtEngineError:  # of fixed sizes, or another model: compared where both can run, or refused as such
        return build
    return found


def _artifact_paths(request: CompareRequest) -> dict[str, str]:
    """The files that are written, by what they are."""
    place = request.writes.get("compare")
    pages = {} if place is None else {name.replace(".", "_"): str(place.with_name(name)) for name in REPORT_FILES}
    return {name: str(path) for name, path in request.writes.items()} | pages


def _read_base(request: CompareRequest) -> CompareSide | None:
    return None if request.options.baseline is None else read_baseline(request.options.baseline)


def plan(request: CompareRequest, *, named: Container[str] = ()) -> DryRun:
    """The plan of `run`; raises its early errors. Writes and measures nothing."""
    _read_base(request)
    builds = []
    if any(request.from_records):
        compare_records(request)
    else:
        builds = [str(item) for item in request.engines if is_onnx_model(item)]
        for item in request.engines:
            if not isinstance(item, Engine) and is_onnx_model(item):
                open_model(item)
            else:
                planned_inputs(item, request.config, request.runtime, request.build, named)
    base = request.options.baseline
    named = ", ".join([*([] if base is None else [str(base)]), *request.labels])
    return DryRun(
        does=f"compare {named}: {request.duration_s:g} s in all, reloaded {request.options.restarts} times",
        builds=tuple(builds),
        writes=tuple(_artifact_paths(request).values()),
        settings={"rules": [rule.text for rule in request.rules], "restarts": request.options.restarts},
    )


def gate(report: CompareReport, *, strict: bool = False) -> None:
    """Raise the error of a failed rule: `AccuracyError` before `SpeedError`; `UnstableError` with `strict`."""
    failed = [item for item in report.gates if item.failed]
    outputs = [item.text for item in failed if item.rule.startswith("error")]
    if outputs:
        raise AccuracyError("; ".join(outputs), hint="`trt-engine evaluate` measures the effect on the task's metric")
    if failed:
        text = "; ".join(item.text for item in failed)
        raise SpeedError(text, hint="`trt-engine profile` of both engines shows where the time goes")
    if strict and not report.stable:
        raise UnstableError(
            f"the comparison is not stable: {'; '.join(report.instability)}",
            hint=next((text for text in report.warnings if text.startswith("for a stable")), "a longer `--duration`"),
        )


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
