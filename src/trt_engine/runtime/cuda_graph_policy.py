"""`GraphPolicy`: which shapes get a CUDA graph; shared by all executors of a pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.config.profiles import Profile
from trt_engine.errors import UsageError
from trt_engine.runtime.batch_rows import DEFAULT_MAX_BATCH, BatchLayout
from trt_engine.tensors import Signature

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Graph counters of one pool."""

    captured: int = 0
    replayed: int = 0
    evicted: int = 0
    """Graphs evicted for another shape or because a buffer moved."""
    disabled_reason: str | None = None
    """Why graphs are disabled; inference runs without."""


def graph_sizes(
    max_batch: int, batch_ranges: Sequence[tuple[int, int]] = (), *, max_graphs: int = 16
) -> tuple[int, ...]:
    """Batch sizes to capture for batches of 1 to `max_batch`: powers of two, 1.5 times these, and `max_batch`.

    At most a third of a padded batch is padding. Sizes outside `batch_ranges` are left out. Of more than `max_graphs`, which
    is above 256 rows, the smallest between two powers of two are left out, then the smallest.
    """
    powers = [1 << power for power in range(max_batch.bit_length())]
    sizes = [
        size
        for size in sorted({*powers, *(3 * power // 2 for power in powers[1:]), max_batch})
        if size <= max_batch and (not batch_ranges or any(low <= size <= high for low, high in batch_ranges))
    ]
    by_use = sorted(sizes, key=lambda size: (size == max_batch, size in powers, size))
    return tuple(sorted(by_use[-max_graphs:]))


def joined_graph_sizes(
    signature: Signature, profiles: Sequence[Profile], max_batch: int | None, *, max_graphs: int = 16
) -> tuple[int, ...]:
    """`graph_sizes` of an engine whose requests are joined to `max_batch` rows, None for what it takes.

    Empty where requests cannot be joined, and where another dimension varies: each of its sizes needs graphs of its own.
    """
    try:
        layout = BatchLayout.from_signature(signature, profiles)
    except UsageError:
        return ()
    for spec in signature.inputs:
        spans = [profile.ranges[spec.name] for profile in profiles if spec.name in profile.ranges]
        fixed = all(span.min[1:] == span.max[1:] == spans[0].max[1:] for span in spans) if spans else False
        if not fixed and any(size < 0 for size in spec.shape[1:]):
            return ()
    return graph_sizes(max_batch or layout.max_rows or DEFAULT_MAX_BATCH, layout.batch_ranges, max_graphs=max_graphs)


class GraphPolicy:
    """`graphs=True`: a graph for every shape, batches padded to the next power of two; sizes: only these batches.

    Batches are padded if every output has a row per input row, and never beyond the profile.
    """

    def __init__(
        self,
        graphs: bool | Sequence[int] | None = False,
        max_graphs: int = 16,
        *,
        signature: Signature,
        profiles: Sequence[Profile] = (),
    ) -> None:
        """Raises `UsageError` for batch sizes that the engine does not take."""
        graphs = graphs or False
        self.enabled = bool(graphs)
        self.max_graphs = max_graphs
        self.generation = 0
        self._disabled_reason: str | None = None
        self._lock = threading.Lock()
        self._captured = self._evicted = 0
        self._batch_sizes: tuple[int, ...] | None = None
        self._layout: BatchLayout | None = None
        try:
            self._layout = BatchLayout.from_signature(signature, profiles)
        except UsageError as error:
            if self.enabled and not isinstance(graphs, bool):
                raise UsageError(
                    f"graphs cannot be captured for batches of {', '.join(map(str, graphs))}: {error.message}",
                    hint="`graphs=True` captures one for each shape",
                ) from error
        if not isinstance(graphs, bool):
            self._batch_sizes = tuple(sorted(set(graphs)))
            for size in self._batch_sizes:
                self._check_batch_size(size)

    @property
    def pads_batches(self) -> bool:
        """Whether batches may be padded."""
        return self._layout is not None and (
            not self._layout.batch_ranges or self._layout.batch_ranges[0][0] != self._layout.batch_ranges[0][1]
        )

    def bucket_for(self, rows: int) -> int:
        """The padded batch for `rows`."""
        if not self.enabled or self._disabled_reason is not None or not self.pads_batches or self._layout is None:
            return rows
        if self._batch_sizes is not None:
            return next((size for size in self._batch_sizes if size >= rows), rows)
        size = 1 << (rows - 1).bit_length() if rows else rows
        return (
            size
            if not self._layout.batch_ranges or any(low <= size <= high for low, high in self._layout.batch_ranges)
            else rows
        )

    def should_capture(self, key: tuple[Any, ...]) -> bool:
        """Whether to capture a graph for shapes without one."""
        if not self.enabled or self._disabled_reason is not None:
            return False
        return self._batch_sizes is None or (bool(key) and bool(key[0]) and key[0][0] in self._batch_sizes)

    def disable(self, reason: str) -> None:
        """Disable capture until `reset`; logs the first reason."""
        with self._lock:
            first, self._disabled_reason = self._disabled_reason is None, self._disabled_reason or reason
        if first:
            log.warning("no graph could be captured (%s); inference runs without", reason)

    def reset(self) -> None:
        """Drop all graphs and enable capture again."""
        with self._lock:
            self.generation += 1
            self._disabled_reason = None

    def count_captured(self) -> None:
        with self._lock:
            self._captured += 1

    def count_evicted(self) -> None:
        with self._lock:
            self._evicted += 1

    def stats(self, replayed: int = 0) -> GraphStats:
        """The counters, with the replays that the executors counted."""
        with self._lock:
            return GraphStats(self._captured, replayed, self._evicted, self._disabled_reason)

    def _check_batch_size(self, size: int) -> None:
        spans = self._layout.batch_ranges if self._layout is not None else ()
        if spans and not any(low <= size <= high for low, high in spans):
            ranges = ", ".join(f"{low} to {high}" for low, high in spans)
            raise UsageError(f"graphs for batches of {size}, the engine takes {ranges}", hint="leave that size out")
