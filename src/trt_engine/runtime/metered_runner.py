"""`MeteredRunner`: another runner with the times of its batches, as `size` and clips measure them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batch_rows import row_count
from trt_engine.tensors import Tensors


class MeteredRunner(RunnerBase):
    """Another runner, kept open, that notes when each thread starts a batch, and what it takes."""

    def __init__(self, runner: RunnerBase) -> None:
        self._runner = runner
        self.signature, self.profiles, self.device = runner.signature, runner.profiles, runner.device
        self.width, self.can_batch = runner.width, runner.can_batch
        self.starts: dict[int, list[tuple[float, int]]] = {}
        """Start times in s and rows of the batches, by thread."""
        self.batches: list[tuple[int, float, float]] = []
        """Rows, seconds, and CPU seconds of the calling thread of each batch, in the order of their ends."""
        self.failure: BaseException | None = None
        """The first error of a batch."""

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The runner's outputs: feeds and outputs `[rows, ...]` in the dtypes of its signature.

        Raises what the runner raises, as `FeedError` for feeds without rows.
        """
        return self._timed(row_count(feeds), lambda: self._runner.run(feeds))

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        """The same for the rows `[rows, ...]` of several requests, dtypes as there, in a batch of `size`."""
        return self._timed(sum(map(row_count, parts)), lambda: self._runner.run_batched(parts, size))

    def _timed(self, rows: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        self.starts.setdefault(threading.get_ident(), []).append((start_s, rows))
        try:
            found = run()
            self.batches.append((rows, time.perf_counter() - start_s, time.thread_time() - cpu_s))
            return found
        except BaseException as error:
            self.failure = self.failure or error  # the batcher would split the batch and go on
            raise

    def cycles_ms(self, rows: int) -> list[float]:
        """Times between the starts of two batches of `rows` rows on one thread."""
        return [
            (after - before) * 1e3
            for starts in self.starts.values()
            for (before, size), (after, _) in pairwise(starts)
            if size == rows
        ]

    def close(self) -> None:
        """Nothing: the runner has another owner."""
