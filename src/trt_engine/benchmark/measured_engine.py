"""One measurement of an engine: its inputs, its device and the machine's state, and the record of its times."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from typing import Any

from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.measurement_warnings import row_warnings
from trt_engine.benchmark.stability import instability
from trt_engine.config.bench import BenchConfig
from trt_engine.device import parse_device
from trt_engine.device.info import clocks
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.records.bench import BenchRecord, Protocol

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
