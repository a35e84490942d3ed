"""The doubling: one engine, two measurements, and twice the batch while more streams would fit than the batch holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Generic, Literal, TypeVar

from trt_engine.errors import MemoryExhausted
from trt_engine.records import BenchRecord

__all__ = ["Doubling", "images_per_s", "peak_streams", "queries_per_s"]

E = TypeVar("E")
Stop = Literal["peak_within_batch", "max_batch", "out_of_memory"]
log = logging.getLogger(__name__)


def _exact(value: float) -> Fraction:
    """The number that is written: 0.1 is a tenth here, so that a count is not lost to binary rounding at the boundary."""
    return Fraction(repr(float(value)))


def queries_per_s(record: BenchRecord) -> Fraction:
    """Queries per second, exactly; 0 for a record without a measured part."""
    return record.queries / _exact(record.wall_s) if record.wall_s > 0 else Fraction(0)


def images_per_s(record: BenchRecord) -> Fraction:
    """`qps x batch`, exactly."""
    return queries_per_s(record) * record.batch


def peak_streams(record: BenchRecord, fps: float) -> int:
    """`floor(images/s / fps)`: the upper bound of streams this measurement sustains."""
    return math.floor(images_per_s(record) / _exact(fps))


@dataclass
class Doubling(Generic[E]):
    """The search for N as far as it got; an interruption leaves it readable.

    k engines give k + 1 measurements: batch 1 on the first engine, and the largest batch of each. (An engine whose largest
    batch is 1 needs only one: it is latency and throughput at once.)
    """

    build: Callable[[int], E]
    """The engine whose largest batch is the number given; `MemoryExhausted` when there is no room for it."""
    measure: Callable[[E, int], BenchRecord]
    fps: float = 30.0
    latency: BenchRecord | None = None
    """Batch 1, on the first engine that could be measured at all."""
    good: list[tuple[E, BenchRecord]] = field(default_factory=list)
    """Every engine that was measured at its largest batch, in order; the last one is the answer."""
    engines: int = 0
    measurements: int = 0
    exhausted: list[int] = field(default_factory=list)
    """Batch sizes that did not fit."""
    stopped_because: Stop | None = None

    def run(self, start: int, limit: int) -> None:
        """Search from `start` (from `limit` when that is lower), strictly doubling, never beyond `limit`.

        Out of memory keeps the last good answer; before there is one, the batch is halved until something fits.
        `MemoryExhausted` only when not even batch 1 does.
        """
        batch = min(start, limit)
        while self.stopped_because is None:
            try:
                engine, record = self._try(batch)
            except MemoryExhausted as error:
                self.exhausted.append(batch)
                if self.good:
                    log.warning("batch %d is out of memory: the answer of batch %d stands", batch, self._batch)
                    self.stopped_because = "out_of_memory"
                elif batch == 1:
                    raise
                else:
                    log.warning("batch %d is out of memory (%s): trying batch %d", batch, error.message, batch // 2)
                    batch //= 2
                continue
            self.good.append((engine, record))
            peak = peak_streams(record, self.fps)
            log.info("%.1f images/s / %g fps = %d streams", float(images_per_s(record)), self.fps, peak)
            if peak <= batch:
                log.info("PEAK %d <= N %d: the engine is large enough", peak, batch)
                self.stopped_because = "peak_within_batch"
            elif self.exhausted:
                log.warning("PEAK %d > N %d, but batch %d is out of memory", peak, batch, self.exhausted[-1])
                self.stopped_because = "out_of_memory"
            elif batch * 2 > limit:
                log.warning("PEAK %d > N %d, but twice N is beyond `--max-batch %d`", peak, batch, limit)
                self.stopped_because = "max_batch"
            else:
                log.info("PEAK %d > N %d: doubling to %d", peak, batch, batch * 2)
                batch *= 2

    def _try(self, batch: int) -> tuple[E, BenchRecord]:
        engine = self.build(batch)
        self.engines += 1
        if self.latency is None:
            self.latency = self._measured(engine, 1)
            if batch == 1:
                return engine, self.latency
        return engine, self._measured(engine, batch)

    def _measured(self, engine: E, batch: int) -> BenchRecord:
        record = self.measure(engine, batch)
        self.measurements += 1
        return record

    @property
    def _batch(self) -> int:
        return self.good[-1][1].batch
