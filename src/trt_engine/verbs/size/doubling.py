"""Doubles the batch until it holds the number of streams that the measured throughput sustains."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Generic, Literal, TypeVar

from trt_engine.errors import MemoryExhausted
from trt_engine.records.bench import BenchRecord

E = TypeVar("E")
StopReason = Literal["peak_within_batch", "max_batch", "out_of_memory"]
log = logging.getLogger(__name__)


def _as_fraction(value: float) -> Fraction:
    """The decimal value as an exact fraction, so that binary rounding does not change a count."""
    return Fraction(repr(float(value)))


def queries_per_s(record: BenchRecord) -> Fraction:
    """Exact queries per second; 0 without a measured duration."""
    return record.queries / _as_fraction(record.wall_s) if record.wall_s > 0 else Fraction(0)


def images_per_s(record: BenchRecord) -> Fraction:
    """Exact `qps x batch`."""
    return queries_per_s(record) * record.batch


def peak_streams(record: BenchRecord, fps: float) -> int:
    """`floor(images/s / fps)`: upper bound of the streams sustained."""
    return math.floor(images_per_s(record) / _as_fraction(fps))


@dataclass
class Doubling(Generic[E]):
    """State of the search for N, readable after an interruption.

    k engines give k + 1 measurements: batch 1 on the first engine, and the largest batch of each. An engine whose largest
    batch is 1 needs one.
    """

    build: Callable[[int], E]
    """Builds an engine with the given largest batch; raises `MemoryExhausted`."""
    measure: Callable[[E, int], BenchRecord]
    fps: float = 30.0
    batch1_record: BenchRecord | None = None
    """Batch 1 on the first engine that fit."""
    succeeded: list[tuple[E, BenchRecord]] = field(default_factory=list)
    """Engines measured at their largest batch, in order; the last one is the result."""
    engines: int = 0
    measurements: int = 0
    oom_batches: list[int] = field(default_factory=list)
    """Batch sizes out of memory."""
    stop_reason: StopReason | None = None

    def run(self, start: int, limit: int) -> None:
        """Search from `min(start, limit)`, doubling up to `limit`.

        Out of memory keeps the last result; before the first result the batch is halved until it fits. Raises
        `MemoryExhausted` if batch 1 does not fit.
        """
        batch = min(start, limit)
        while self.stop_reason is None:
            try:
                engine, record = self._build_and_measure(batch)
            except MemoryExhausted as error:
                self.oom_batches.append(batch)
                if self.succeeded:
                    log.warning(
                        "batch %d is out of memory: keeping the result of batch %d", batch, self.succeeded[-1][1].batch
                    )
                    self.stop_reason = "out_of_memory"
                elif batch == 1:
                    raise
                else:
                    log.warning("batch %d is out of memory (%s): trying batch %d", batch, error.message, batch // 2)
                    batch //= 2
                continue
            self.succeeded.append((engine, record))
            peak = peak_streams(record, self.fps)
            log.info("%.1f images/s / %g fps = %d streams", float(images_per_s(record)), self.fps, peak)
            if peak <= batch:
                log.info("PEAK %d <= N %d: the engine is large enough", peak, batch)
                self.stop_reason = "peak_within_batch"
            elif self.oom_batches:
                log.warning("PEAK %d > N %d, but batch %d is out of memory", peak, batch, self.oom_batches[-1])
                self.stop_reason = "out_of_memory"
            elif batch * 2 > limit:
                log.warning("PEAK %d > N %d, but twice N exceeds `--max-batch %d`", peak, batch, limit)
                self.stop_reason = "max_batch"
            else:
                log.info("PEAK %d > N %d: doubling to %d", peak, batch, batch * 2)
                batch *= 2

    def _build_and_measure(self, batch: int) -> tuple[E, BenchRecord]:
        engine = self.build(batch)
        self.engines += 1
        if self.batch1_record is None:
            self.batch1_record = self._measure(engine, 1)
            if batch == 1:
                return engine, self.batch1_record
        return engine, self._measure(engine, batch)

    def _measure(self, engine: E, batch: int) -> BenchRecord:
        record = self.measure(engine, batch)
        self.measurements += 1
        return record
