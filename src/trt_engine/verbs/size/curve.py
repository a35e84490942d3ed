"""The latency curve of an engine: measured in a child process, kept in `curve.jsonl`, reused for the same engine;
and its cliffs, batch sizes that are much slower than neighbouring ones predict."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from trt_engine.atomic_io import read_bounded
from trt_engine.benchmark.isolated import measure_isolated
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.streams import BatchPolicy
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, Interrupted, MemoryExhausted, UsageError
from trt_engine.records.base import append_record
from trt_engine.records.size import CliffPoint
from trt_engine.records.streams import CurvePoint, CurveSummary, FrameMemory
from trt_engine.verbs.size import stream_worker
from trt_engine.verbs.size.capacity import TurnTimes
from trt_engine.verbs.size.simulation import ServiceTimes
from trt_engine.workers.crash import exit_name, restore_error
from trt_engine.workers.messages import ErrorMessage, LogMessage
from trt_engine.workers.process import ChildProcess, spawn_worker

log = logging.getLogger(__name__)

TURNS = 4
_DEVICE_TURNS = 3
"""Each loads the engine again."""
_SILENCE_S = 600.0
_SHUTDOWN_S, _GRACE_S = 0.5, 15.0
_message_decoder = msgspec.json.Decoder(stream_worker.Message)


@dataclasses.dataclass(frozen=True, slots=True)
class CurveGrid:
    """What to measure: batches ascending, up to the first that takes longer than `longest_ms`."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    duration_s: float
    """Duration of one point, all turns together."""
    longest_ms: float
    graphs: bool = False
    """Whether `batches` are captured as CUDA graphs and other batches padded to them."""


def grid_batches(largest: int) -> tuple[int, ...]:
    """Powers of two up to `largest`, which is included."""
    return (*(1 << power for power in range(largest.bit_length()) if 1 << power < largest), largest)


def uses_graphs(runtime: RuntimeConfig, device: str) -> bool:
    """Whether batches are captured as CUDA graphs: on a GPU, unless `graphs` is false or names no size."""
    return (runtime.graphs is None or bool(runtime.graphs)) and parse_device(device)[0] != "cpu"


def measure_host_curve(engine: Engine, grid: CurveGrid, runtime: RuntimeConfig, device: str) -> list[CurvePoint]:
    """Frames in host memory, through the batcher. Raises the child's error."""
    request = stream_worker.CurveRequest(grid.batches, grid.contexts, TURNS, grid.duration_s / TURNS, grid.longest_ms)
    graphs = grid.batches if grid.graphs else False
    runtime = dataclasses.replace(runtime, contexts=max(grid.contexts), batching=None, graphs=graphs)
    answer = call_worker(stream_worker.WorkerRequest(str(engine.path), runtime, log.getEffectiveLevel(), curve=request))
    assert isinstance(answer, stream_worker.CurveMessage)
    return [
        _point(engine, device, "host", cell.batch, cell.contexts, cell.turns_ms, answer.graphs if grid.graphs else "")
        for cell in answer.cells
    ]


def measure_device_curve(engine: Engine, grid: CurveGrid, runtime: RuntimeConfig, device: str) -> list[CurvePoint]:
    """Frames already on the device: the inference alone, each turn in a process of its own."""
    found = []
    for contexts in grid.contexts:
        for batch in grid.batches:
            config = BenchConfig(
                batch=batch, streams=contexts, transfers=False, duration_s=grid.duration_s / _DEVICE_TURNS,
                warmup_s=min(0.5, grid.duration_s),
            )  # fmt: skip
            try:
                records = [measure_isolated(engine, config, runtime) for _ in range(_DEVICE_TURNS)]
            except MemoryExhausted as error:
                log.warning("the curve ends before batch %d with contexts %d: %s", batch, contexts, error.message)
                break
            if records[0].protocol.streams != contexts:
                log.info("frames on the device: this backend measures one inference at once")
                break
            turns = [record.compute_ms for record in records]
            found.append(_point(engine, device, "device", batch, contexts, turns))
            if float(np.median(turns[0])) > grid.longest_ms:
                break
    return found


def _point(
    engine: Engine,
    device: str,
    frames: FrameMemory,
    batch: int,
    contexts: int,
    turns_ms: Sequence[Sequence[float]],
    graphs: str = "",
) -> CurvePoint:
    return CurvePoint(
        engine_digest=engine.passport.payload[0].digest,
        device=device,
        batch=batch,
        contexts=contexts,
        frames=frames,
        turns_ms=tuple(tuple(round(time_ms, 5) for time_ms in turn) for turn in turns_ms),
        environment=detect_environment(device),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        graphs=graphs,
    )


def drive_sources(
    engine: Engine, request: stream_worker.DriveRequest, runtime: RuntimeConfig, graphs: tuple[int, ...] = ()
) -> stream_worker.DriveMessage:
    """Paced frames through the batcher, with graphs of these batch sizes. Raises the child's error."""
    runtime = dataclasses.replace(runtime, contexts=request.policy.contexts, batching=None, graphs=graphs or False)
    answer = call_worker(stream_worker.WorkerRequest(str(engine.path), runtime, log.getEffectiveLevel(), drive=request))
    assert isinstance(answer, stream_worker.DriveMessage)
    return answer


def call_worker(
    request: stream_worker.WorkerRequest,
) -> stream_worker.CurveMessage | stream_worker.DriveMessage | stream_worker.VideoMessage:
    """The reply of `stream_worker`. Raises its error, `EngineError` when it crashed or hung, `Interrupted` on Ctrl-C."""
    grace_s = _GRACE_S
    with tempfile.TemporaryFile() as output:
        child = spawn_worker("trt_engine.verbs.size.stream_worker", msgspec.json.encode(request, enc_hook=str), output)
        try:
            answer = _read_answer(child, _SILENCE_S + _planned_s(request))
        except KeyboardInterrupt:
            grace_s = _SHUTDOWN_S
            child.interrupt()
            raise Interrupted(stream_worker.INTERRUPTED[0], hint=stream_worker.INTERRUPTED[1]) from None
        except TimeoutError:
            raise EngineError(f"`{request.engine}` did not reply and was stopped", hint="a smaller batch") from None
        finally:
            ended = child.close(grace_s)
            output.seek(0)
            log.debug("child: %s", output.read().decode(errors="replace"))
    match answer:
        case ErrorMessage(kind=kind, message=message, hint=hint):
            raise restore_error(kind, message, hint)
        case None:
            hint = "`-v` shows its output; `trt-engine doctor` checks the installation"
            raise EngineError(f"the process that drove `{request.engine}` ended by {exit_name(ended.code)}", hint=hint)
    return answer


def _planned_s(request: stream_worker.WorkerRequest) -> float:
    if request.curve is not None:
        return request.curve.turns * request.curve.turn_s * len(request.curve.batches) * len(request.curve.contexts)
    if request.video is not None:
        return 4 * request.video.duration_s  # a run, whose end is a line of the log
    return request.drive.times_s[-1] if request.drive is not None and request.drive.times_s else 0.0


def _read_answer(
    child: ChildProcess, silence_s: float
) -> stream_worker.CurveMessage | stream_worker.DriveMessage | stream_worker.VideoMessage | ErrorMessage | None:
    while (line := child.read_line(silence_s)) is not None:
        message: stream_worker.Message = _message_decoder.decode(line)
        if not isinstance(message, LogMessage):
            return message
        logging.getLogger(message.name).log(message.level, "%s", message.text)
    return None


# ------------------------------------------------------------------------------------------------ kept and reused


def read_curve(path: Path) -> list[CurvePoint]:
    """The points of a `curve.jsonl`; `UsageError` for another file."""
    decoder = msgspec.json.Decoder(CurvePoint)
    try:
        return [decoder.decode(line) for line in read_bounded(path).splitlines() if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"cannot read the latency curve `{path}`: {error}", hint="`curve.jsonl` of an earlier run of `size`"
        ) from error


def usable_points(
    points: Iterable[CurvePoint], engine: Engine, device: str, frames: FrameMemory, grid: CurveGrid
) -> list[CurvePoint]:
    """Points measured on this engine, device and machine that cover the grid; empty if one is missing.

    Frames on the device may lack the points of several contexts, which not every backend measures.
    """
    digest, here = engine.passport.payload[0].digest, detect_environment(device)
    by_cell = {
        (point.batch, point.contexts): point
        for point in points
        if (point.engine_digest, point.device, point.frames) == (digest, device, frames)
        and bool(point.graphs) == grid.graphs
        and _same_machine(point.environment, here)
    }
    found = []
    for contexts in grid.contexts:
        for batch in grid.batches:
            if (point := by_cell.get((batch, contexts))) is None:
                if frames == "device" and contexts > 1:
                    break
                return []
            found.append(point)
            if float(np.median(point.turns_ms[0])) > grid.longest_ms:
                break
    return found


def detect_environment(device: str) -> Environment:
    kind, number = parse_device(device)
    return Environment.detect(number if kind == "cuda" else None)


def _same_machine(one: Environment, other: Environment) -> bool:
    names = ("cpu", "cpu_cores", "gpu", "driver", "libraries")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def keep_points(path: Path, points: Iterable[CurvePoint]) -> None:
    for point in points:
        append_record(path, point)


# ------------------------------------------------------------------------------------------------ use


def turn_times(points: Iterable[CurvePoint]) -> TurnTimes:
    return {(point.batch, point.contexts): point.turns_ms for point in points}


def captured_sizes(points: Iterable[CurvePoint]) -> tuple[int, ...]:
    """Batch sizes that replayed a CUDA graph, ascending; other batches are padded to them."""
    return tuple(sorted({point.batch for point in points if point.graphs == "on"}))


def service_times(points: Sequence[CurvePoint]) -> ServiceTimes:
    times = {key: np.concatenate(turns) for key, turns in turn_times(points).items()}
    return ServiceTimes(times, padded=bool(captured_sizes(points)))


def summarize_curve(points: Iterable[CurvePoint]) -> tuple[CurveSummary, ...]:
    found = []
    for point in points:
        times = np.concatenate(point.turns_ms)
        found.append(
            CurveSummary(
                batch=point.batch,
                contexts=point.contexts,
                frames=point.frames,
                samples=point.samples,
                median_ms=float(np.median(times)),
                p99_ms=float(np.quantile(times, 0.99)),
                rows_per_s=point.contexts * point.batch * 1e3 / float(times.mean()),
            )
        )
    return tuple(found)


def queue_limit(policy: BatchPolicy, service: ServiceTimes, deadline_s: float) -> int:
    """`max_rows_waiting` that refuses only frames that would be late: what is served within the deadline."""
    served = service.rows_per_s(policy) * deadline_s
    return max(64 * policy.max_batch, int(served) + policy.max_batch)


THRESHOLD = 0.8
"""Fraction of the expected throughput below which a size, measured twice, is a cliff."""


def scan_sizes(batch: int, width: int) -> tuple[int, ...]:
    """The batch sizes to scan: `batch - width` to `batch + width`, at least 1."""
    return tuple(range(max(1, batch - width), batch + width + 1))


def expected_rate(batch: int, images_per_s: Mapping[int, float]) -> float | None:
    """Throughput (images/s) predicted by the other sizes; None without others.

    Without cliffs a larger batch gives at least as many images/s, and a smaller one takes no longer. So a smaller size
    predicts its own throughput, a larger one its own times the ratio of the sizes. The second highest prediction counts
    (the highest of fewer than three): one outlier does not matter.
    """
    suggestions = sorted(
        (rate if other < batch else rate * batch / other for other, rate in images_per_s.items() if other != batch),
        reverse=True,
    )
    if not suggestions:
        return None
    return suggestions[1] if len(suggestions) > 2 else suggestions[0]


def find_cliffs(sizes: Sequence[int], measure: Callable[[int], float | None]) -> tuple[CliffPoint, ...]:
    """Measure every size once, slow ones twice, and mark the cliffs.

    `measure` returns images/s, or None for a size that is out of memory, which is omitted.
    """
    rates = {size: rate for size in sizes if (rate := measure(size)) is not None}
    times = dict.fromkeys(rates, 1)
    for size in [size for size in rates if _is_slow(size, rates)]:
        log.info("batch %d delivers %.1f images/s, less than expected: measuring it again", size, rates[size])
        again = measure(size)
        if again is not None:
            times[size] += 1
            rates[size] = max(rates[size], again)
    return tuple(
        CliffPoint(
            batch=size,
            images_per_s=rates[size],
            expected_images_per_s=expected_rate(size, rates),
            cliff=times[size] > 1 and _is_slow(size, rates),
            measured=times[size],
        )
        for size in rates
    )


def _is_slow(size: int, rates: Mapping[int, float]) -> bool:
    suggested = expected_rate(size, rates)
    return suggested is not None and rates[size] < THRESHOLD * suggested


def advice(points: Sequence[CliffPoint]) -> str:
    """One sentence: which sizes to avoid, which to prefer."""
    good = [point.batch for point in points if not point.cliff and point.batch & (point.batch - 1) == 0]
    prefer = f"prefer powers of two ({', '.join(map(str, good))})" if good else "prefer powers of two"
    cliffs = [point.batch for point in points if point.cliff]
    if not points:
        return "the scan measured nothing"
    if not cliffs:
        return f"no cliff from batch {points[0].batch} to {points[-1].batch}; {prefer}"
    return f"avoid batch {_format_ranges(cliffs)}; {prefer}"


def _format_ranges(sizes: Sequence[int]) -> str:
    """`17-19, 23`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
