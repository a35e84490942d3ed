"""Measurements with a throughput that was planted: records as `bench` writes them, without a clock."""

from __future__ import annotations

import datetime

from trt_engine.environment import Environment
from trt_engine.records.bench import BenchRecord, Protocol

HERE = Environment(
    tool="0", python="3.11.0", platform="Linux x86_64", cpu="a processor", cpu_cores=2, cpu_features=(), memory_mib=1024
)


def protocol(duration_s: float = 1.0) -> Protocol:
    return Protocol(
        name="trt-engine",
        loop="closed",
        clock="host",
        transfers=False,
        graph=False,
        spin=False,
        streams=1,
        warmup_s=0.2,
        duration_s=duration_s,
        min_iterations=10,
        idle_s=0.0,
        percentile_rule="trtexec",
    )


def record(
    batch: int, *, queries: int = 100, wall_s: float = 1.0, device: str = "cpu", engine: str = "e", stable: bool = True
) -> BenchRecord:
    """One measurement: `queries` of the same length in `wall_s`."""
    return BenchRecord(
        engine=engine,
        backend="fake",
        device=device,
        batch=batch,
        shapes={"images": (batch, 3, 8, 8)},
        protocol=protocol(),
        environment=HERE,
        compute_ms=(1000 * wall_s / max(queries, 1),) * min(queries, 200),
        wall_s=wall_s,
        started=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).isoformat(),
        queries=queries,
        warmup_queries=3,
        stable=stable,
        instability=() if stable else ("the mean drifts by 9 %",),
    )


def at(images_per_s: int, batch: int) -> BenchRecord:
    """A measurement of exactly this many images per second: one query of the batch in batch / images_per_s seconds."""
    return record(batch, queries=images_per_s, wall_s=float(batch))
