"""`Gauge`: ceilings taken one by one, each the best of several runs, within a time, and what could not be taken."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError
from trt_engine.records import Ceiling

__all__ = ["Gauge", "Work"]

_MOST_RUNS = 30
_LEAST_RUNS = 3

Unit = Literal["TFLOP/s", "TOP/s", "GB/s", "us"]
_SCALE: dict[str, float] = {"TFLOP/s": 1e12, "TOP/s": 1e12, "GB/s": 1e9}


@dataclass(frozen=True)
class Work:
    """Something prepared to be run and timed."""

    seconds: Callable[[int], Sequence[float]]
    """Runs it that often, one after another: the seconds of each."""
    close: Callable[[], None] = lambda: None


@dataclass
class Gauge:
    """What was taken of one device so far."""

    budget_s: float
    """For everything: what has not begun by then is skipped, and said."""
    slot_s: float = 0.6
    """For the runs of one ceiling."""
    clock: Callable[[], float] = time.perf_counter
    items: list[Ceiling] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends = self.clock() + self.budget_s

    def rate(
        self,
        name: str,
        unit: Unit,
        sizes: Sequence[int],
        make: Callable[[int], Work],
        amount: Callable[[int], float],
        how: Callable[[int], str],
    ) -> None:
        """`amount` per second of the largest of the ascending `sizes` that memory and time allow."""
        with self._said(name):
            size, best_s, runs = self._best(sizes, make, amount)
            told = f"{how(size)}, best of {runs}"
            self.items.append(Ceiling(name, amount(size) / best_s / _SCALE[unit], unit, "measured", told))

    def cost(self, name: str, count: int, make: Callable[[int], Work], how: str) -> None:
        """Microseconds of one of `count` equal things that one run does."""
        with self._said(name):
            _, best_s, runs = self._best((count,), make, float)
            self.items.append(Ceiling(name, best_s / count * 1e6, "us", "measured", f"{how}, best of {runs}"))

    def skip(self, name: str, why: str) -> None:
        self.skipped.append(f"{name}: {why}")

    @contextlib.contextmanager
    def _said(self, name: str) -> Iterator[None]:
        """What cannot be taken is said under its name, and the next one has its turn."""
        try:
            yield
        except DeviceLost:  # nothing after it could be taken
            raise
        except (SetupError, MemoryExhausted) as error:
            self.skip(name, error.message)

    def _best(
        self, sizes: Sequence[int], make: Callable[[int], Work], amount: Callable[[int], float]
    ) -> tuple[int, float, int]:
        """The size that was run, the seconds of its shortest run, and the number of runs."""
        if self.clock() >= self._ends:
            raise SetupError(f"the {self.budget_s:.0f} s for all ceilings were over")
        smaller: int | None = None
        for index, size in enumerate(sizes):
            try:
                work = make(size)
                try:
                    once_s = min(_positive(work.seconds(1)), _positive(work.seconds(1)))  # the first one warms up
                    more = sizes[index + 1 : index + 2]
                    if more and once_s * amount(more[0]) / amount(size) * _LEAST_RUNS < self.slot_s:
                        smaller = size
                        continue
                    runs = max(_LEAST_RUNS, min(_MOST_RUNS, int(self.slot_s / once_s)))
                    return size, min(once_s, _positive(work.seconds(runs))), runs + 2
                finally:
                    work.close()
            except MemoryExhausted:
                if smaller is None:
                    raise
                return self._best((smaller,), make, amount)
        raise SetupError("no size fits")


def _positive(seconds: Sequence[float]) -> float:
    best = min(seconds)
    if not best > 0:
        raise SetupError(f"a run took {best:g} s by its clock, which tells nothing")
    return best
