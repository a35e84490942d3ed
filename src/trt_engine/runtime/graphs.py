"""Which shapes get a graph: `GraphPolicy`, shared by the lanes of a pool, and what became of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.config import Profile
from trt_engine.errors import UsageError
from trt_engine.runtime.batches import Rows
from trt_engine.tensors import Signature

__all__ = ["GraphPolicy", "GraphStats"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Graphs of one pool."""

    captured: int = 0
    replayed: int = 0
    dropped: int = 0
    """To make room for another, or because what they held had changed."""
    refused: str | None = None
    """Why no graph can be captured; inference goes on without."""


class GraphPolicy:
    """`graphs=True`: a graph for every shape, batches filled up to the next power of two; sizes: graphs for these alone.

    Batches are filled up where every output has a row for each row of input, and never beyond the profile.
    """

    def __init__(
        self,
        graphs: bool | Sequence[int] = False,
        max_graphs: int = 16,
        *,
        signature: Signature,
        profiles: Sequence[Profile] = (),
    ) -> None:
        self.on = bool(graphs)
        self.max_graphs = max_graphs
        self.generation = 0
        self._refused: str | None = None
        self._lock = threading.Lock()
        self._captured = self._replayed = self._dropped = 0
        self._sizes: tuple[int, ...] | None = None
        self._rows: Rows | None = None
        try:
            self._rows = Rows.of(signature, profiles)
        except UsageError as error:
            if self.on and not isinstance(graphs, bool):
                raise UsageError(
                    f"graphs cannot be captured for batches of {', '.join(map(str, graphs))}: {error.message}",
                    hint="`graphs=True` captures one for each shape",
                ) from error
        if not isinstance(graphs, bool):
            self._sizes = tuple(sorted(set(graphs)))
            for size in self._sizes:
                self._check(size)

    @property
    def by_rows(self) -> bool:
        """Whether batches may be filled up."""
        return self._rows is not None and (not self._rows.spans or self._rows.spans[0][0] != self._rows.spans[0][1])

    def bucket(self, rows: int) -> int:
        """The batch so many rows run as."""
        if not self.on or self._refused is not None or not self.by_rows or self._rows is None:
            return rows
        if self._sizes is not None:
            return next((size for size in self._sizes if size >= rows), rows)
        size = 1 << (rows - 1).bit_length() if rows else rows
        return size if not self._rows.spans or any(low <= size <= high for low, high in self._rows.spans) else rows

    def wants(self, key: tuple[Any, ...]) -> bool:
        """Whether shapes that were not captured yet are to be."""
        if not self.on or self._refused is not None:
            return False
        return self._sizes is None or (bool(key) and bool(key[0]) and key[0][0] in self._sizes)

    def refuse(self, reason: str) -> None:
        """A capture failed: say it once, and capture no more until `reset`."""
        with self._lock:
            first, self._refused = self._refused is None, self._refused or reason
        if first:
            log.warning("no graph could be captured (%s); inference goes on without", reason)

    def reset(self) -> None:
        """Forget all graphs, and what stood against them; they are captured again as shapes come."""
        with self._lock:
            self.generation += 1
            self._refused = None

    def captured(self) -> None:
        with self._lock:
            self._captured += 1

    def replayed(self) -> None:
        with self._lock:
            self._replayed += 1

    def dropped(self) -> None:
        with self._lock:
            self._dropped += 1

    def read(self) -> GraphStats:
        with self._lock:
            return GraphStats(self._captured, self._replayed, self._dropped, self._refused)

    def _check(self, size: int) -> None:
        spans = self._rows.spans if self._rows is not None else ()
        if spans and not any(low <= size <= high for low, high in spans):
            told = ", ".join(f"{low} to {high}" for low, high in spans)
            raise UsageError(f"graphs for batches of {size}, the engine takes {told}", hint="leave that size out")
