"""Measures or reuses the latency curve of a sized engine, and finds the streams within the deadline."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.records.bench import BenchRecord
from trt_engine.records.streams import CurvePoint, FrameMemory, StreamCapacity, VideoCapacity
from trt_engine.runtime.cuda_graph_policy import graph_sizes
from trt_engine.verbs.size import curve, stream_capacity, video_search
from trt_engine.verbs.size.output_layout import output_layout
from trt_engine.verbs.size.size_plan import SizeJob, accepts_batch
from trt_engine.verbs.size.stream_worker import VideoMessage, VideoRequest, WorkerRequest

log = logging.getLogger(__name__)


def find_streams(
    job: SizeJob, engine: Engine, record: BenchRecord, step: Callable[[str], AbstractContextManager[None]]
) -> StreamCapacity:
    """Streams within the deadline on the measured engine; `record` is its largest batch."""
    config, device = job.config, record.device
    assert config.deadline_ms is not None
    if config.policy is not None and config.policy.max_batch > record.batch:
        raise UsageError(
            f"the policy has batches of {config.policy.max_batch}, the engine takes {record.batch}",
            hint="a larger `--max-batch`, or a smaller policy",
        )
    largest = record.batch if config.policy is None else config.policy.max_batch
    batches = curve.grid_batches(largest) if job.dynamic and accepts_batch(engine, 1) else (record.batch,)
    longest_ms = config.deadline_ms if config.policy is None else 1e9  # the policy's batch is measured, however slow
    grid = curve.CurveGrid(batches, config.contexts, config.duration_s, longest_ms)
    points = list(_measured_curve(job, engine, device, grid, step))
    with step("search policy"):
        images_per_s = max(record.images_per_s, 0.0)
        answer = stream_capacity.find_capacity(points, config, images_per_s, record.environment.gpu)
    found = answer.capacity
    log.info(
        "%d streams (%d to %d) within %g ms: %s", found.streams, found.low, found.high, found.deadline_ms, found.policy
    )
    if config.verify_s is not None and found.streams:
        with step("verify"):
            request = stream_capacity.drive_request(answer, config.verify_s)
            driven = curve.drive_sources(engine, request, job.runtime, answer.graphs)
        found = stream_capacity.verify(answer, request, driven, config.verify_s)
    return found


def find_cameras(job: SizeJob, engine: Engine, simulated: StreamCapacity) -> VideoCapacity:
    """The clips played as more and more cameras, with the policy of the simulation. Raises the child's error."""
    config = job.config
    assert config.deadline_ms is not None
    second = None
    if config.then is not None:
        known = output_layout(job.model.path, config.then, job.backend_spec.payload_suffix).previous_document() or {}
        if not known.get("engine"):
            raise UsageError(f"`{config.then}` has no run of `size` with an engine", hint="`--then MODEL` measures it")
        second = str(config.then / "engines" / Path(str(known["engine"])).name)  # the folder may have moved
    request = VideoRequest(
        simulated.policy, job.clips, config.deadline_ms, config.allowed_late, config.duration_s, second, config.crops
    )
    graphs: tuple[int, ...] | bool = False
    if curve.uses_graphs(job.runtime, job.build.device):
        graphs = _graph_sizes(job, engine, (1, request.policy.max_batch))
    runtime = dataclasses.replace(job.runtime, contexts=request.policy.contexts, batching=None, graphs=graphs)
    driven = curve.call_worker(WorkerRequest(str(engine.path), runtime, log.getEffectiveLevel(), video=request))
    assert isinstance(driven, VideoMessage)
    on_cpu = parse_device(job.build.device)[0] == "cpu"
    return video_search.conclude(
        request, driven.runs, simulated, on_cpu=on_cpu, rates=driven.rates, processes=driven.processes
    )


def _measured_curve(
    job: SizeJob,
    engine: Engine,
    device: str,
    grid: curve.CurveGrid,
    step: Callable[[str], AbstractContextManager[None]],
) -> list[CurvePoint]:
    """The curve of each kind of frames: from a kept file where that covers the grid, else measured and kept.

    On a GPU the batches of frames in host memory are those that are captured as CUDA graphs.
    """
    kinds: tuple[FrameMemory, ...] = ("host",) if parse_device(device)[0] == "cpu" else ("host", "device")
    if job.config.frames not in kinds:
        raise UsageError(f"frames are in host memory on `{device}`", hint="leave `--frames device` out")
    path = job.layout.curve
    known = curve.read_curve(path) if path.exists() else []
    known += curve.read_curve(job.config.curve) if job.config.curve is not None else []
    grids = dict.fromkeys((job.config.frames,) if job.clips else kinds, grid)  # the clips show what uploads cost
    if "host" in grids and curve.uses_graphs(job.runtime, device):
        sizes = _graph_sizes(job, engine, grid.batches)
        grids["host"] = dataclasses.replace(grid, batches=sizes, graphs=True)
    found = []
    for frames, grid in grids.items():
        points = curve.usable_points(known, engine, device, frames, grid)
        if points:
            log.info("the latency curve of frames on the %s is from an earlier run", frames)
        elif job.config.curve is not None:
            raise UsageError(
                f"`{job.config.curve}` does not cover this engine on this machine at batch "
                f"{', '.join(map(str, grid.batches))} and {', '.join(map(str, grid.contexts))} contexts",
                hint="leave `--curve` out to measure",
            )
        else:
            measure = curve.measure_host_curve if frames == "host" else curve.measure_device_curve
            with step(f"measure curve, {frames}"):
                points = measure(engine, grid, job.runtime, device)
            curve.keep_points(path, points)
        found += points
    return found


def _graph_sizes(job: SizeJob, engine: Engine, batches: tuple[int, ...]) -> tuple[int, ...]:
    """Batch sizes to capture as CUDA graphs: those of the runtime's `graphs`, or up to the largest of `batches`."""
    batches = tuple(size for size in batches if job.dynamic and accepts_batch(engine, size)) or batches[-1:]
    graphs, policy = job.runtime.graphs, job.config.policy
    if graphs is None or isinstance(graphs, bool):
        return graph_sizes(batches[-1], max_graphs=job.runtime.max_graphs) if len(batches) > 1 else batches
    sizes = tuple(sorted(set(graphs)))
    if refused := [size for size in sizes if not accepts_batch(engine, size)]:
        raise UsageError(
            f"graphs for batches of {', '.join(map(str, refused))}, which the engine does not take",
            hint="leave these sizes out",
        )
    if policy is not None and policy.max_batch > sizes[-1]:
        raise UsageError(
            f"the policy has batches of {policy.max_batch}, the largest graph is of {sizes[-1]}",
            hint=f"add {policy.max_batch} to `graphs`",
        )
    return sizes
