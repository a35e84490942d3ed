"""One measurement of an engine: its inputs, its device and the machine's state, and the record of its times."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.query_trace import QueryTrace
from trt_engine.benchmark.stability import instability
from trt_engine.config.bench import BenchConfig
from trt_engine.device import parse_device
from trt_engine.device.info import Clocks, clocks, cpu
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.percentiles import percentile
from trt_engine.tensors import Signature

log = logging.getLogger(__name__)


class MeasuredEngine:
    """What a measurement knows before it begins; `after` is the machine's state at its end."""

    def __init__(self, engine: Engine, config: BenchConfig, device: str, protocol: Protocol, *, by: str = "") -> None:
        self.engine, self.config, self.device = engine, config, device
        kind, number = parse_device(device)
        self.gpu = number if kind == "cuda" else None
        self.feeds, self.inputs = feeds_for(engine, config)
        self.shapes = {name: tuple(int(size) for size in value.shape) for name, value in self.feeds.items()}
        self.batch = batch_of(engine.signature, self.shapes)
        log.info(
            "measuring `%s` at batch %d on %s%s: warm-up: %g s, then %g s, protocol %s",
            engine.path.name, self.batch, device, by, protocol.warmup_s, protocol.duration_s, protocol.name,
        )  # fmt: skip
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.before = self.after = clocks(self.gpu)

    def finish(self) -> None:
        self.after = clocks(self.gpu)

    def record(self, protocol: Protocol, compute_ms: Sequence[float], **measured: Any) -> BenchRecord:
        """The record of the compute times and what else was measured, by its fields."""
        reasons = instability(compute_ms, protocol, (*self.before.throttled, *self.after.throttled))
        common: dict[str, Any] = {
            "engine": str(self.engine.path),
            "backend": self.engine.passport.backend,
            "device": self.device,
            "batch": self.batch,
            "shapes": self.shapes,
            "protocol": protocol,
            "environment": Environment.detect(self.gpu),
            "compute_ms": tuple(compute_ms),
            "started": self.started,
            "queries": len(compute_ms),
            "clocks": (self.before, self.after),
            "stable": not reasons,
            "instability": reasons,
            "percentiles": self.config.percentiles,
            "inputs": self.inputs,
            "validation": self.engine.validation,
            "engine_digest": self.engine.passport.payload_digest,
        }
        warnings = (*measured.pop("warnings", ()), *row_warnings(self.engine.signature, self.batch))
        return BenchRecord(**common | measured, warnings=warnings)


def ignored_option_warnings(config: BenchConfig, protocol: Protocol, device: str) -> list[str]:
    """Warnings for requested options without effect."""
    warnings = []
    for name in ("transfers", "graph", "spin"):
        if getattr(config, name) and not getattr(protocol, name):
            warnings.append(f"`--{name}` has no effect on `{device}`")
    if config.streams != protocol.streams:
        warnings.append(f"`--streams {config.streams}` has no effect on `{device}`: one query at a time")
    if "compute only" in protocol.not_applicable:
        warnings.append(f"times on `{device}` are host-clock times around a call, including its copies")
    return warnings


def row_warnings(signature: Signature, rows: int) -> list[str]:
    """A warning where images/s counts rows of a batch that have no result of their own."""
    if rows <= 1 or (reason := signature.row_dependence) is None:
        return []
    return [f"the {rows} rows of a query have no result each ({reason}): queries/s count, or `--batch 1`"]


def machine_warnings(before: Clocks, after: Clocks, gpu: int | None, load: float | None) -> list[str]:
    """Warnings about throttled or unlocked clocks, and about a machine that was busy before."""
    warnings = []
    if held := sorted({*before.throttled, *after.throttled}):
        warnings.append(f"GPU clocks were held down: {', '.join(held)}")
    if gpu is not None and before.sm_mhz and after.sm_mhz and before.sm_mhz != after.sm_mhz:
        warnings.append(
            f"GPU clocks are not locked ({before.sm_mhz} MHz before, {after.sm_mhz} MHz after); to lock them: "
            f"`sudo nvidia-smi -i {gpu} -lgc {after.sm_mhz}` (this tool never does)"
        )
    if load is not None and load > (cores := cpu().cores):
        warnings.append(f"the machine was busy before the measurement: load average {load:g} on {cores} cores")
    return warnings


def sample_warnings(trace: QueryTrace, protocol: Protocol, config: BenchConfig) -> list[str]:
    count = len(trace.compute_ms)
    warnings = []
    highest = max(config.percentiles, default=0.0)
    if count and highest < 100 and percentile(range(count), highest) == count - 1:
        warnings.append(f"{count} queries are too few for the {highest:g} % percentile: it is the largest value")
    if protocol.clock == "device events" and count and protocol.streams == 1:
        compute = float(np.median(trace.compute_ms))
        for name, values in (("enqueue", trace.enqueue_ms), ("h2d", trace.h2d_ms), ("d2h", trace.d2h_ms)):
            limit = 0.8 * compute if name == "enqueue" else compute
            if values and float(np.median(values)) > limit:
                warnings.append(_BOUND_WARNINGS[name])
    if protocol.streams > 1:
        warnings.append("several streams run side by side: throughput counts, the times of single queries overlap")
    return warnings


_BOUND_WARNINGS = {
    "enqueue": "the host takes longer to enqueue than 80 % of the compute time: the device waits for it (try `--graph`)",
    "h2d": "copying inputs takes longer than computing (try `--no-transfers`)",
    "d2h": "copying outputs takes longer than computing (try `--no-transfers`)",
}
