"""`Gauge`: measures peaks one by one, each the best of several runs, within a time budget; records skipped ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError
from trt_engine.records.profile import DevicePeak

_MAX_RUNS = 30
_MIN_RUNS = 3

Unit = Literal["TFLOP/s", "TOP/s", "GB/s", "us"]
_SCALE: dict[str, float] = {"TFLOP/s": 1e12, "TOP/s": 1e12, "GB/s": 1e9}


@dataclass(frozen=True)
class TimedWork:
    """A prepared workload to run and time."""

    run_seconds: Callable[[int], Sequence[float]]
    """Runs it `n` times in sequence: the seconds of each run."""
    close: Callable[[], None] = lambda: None


@dataclass
class PeakProbe:
    """Peaks of one device measured so far."""

    budget_s: float
    """Total time budget; measurements not begun by then are skipped and reported."""
    slot_s: float = 0.6
    """Time budget of one peak."""
    clock: Callable[[], float] = time.perf_counter
    peaks: list[DevicePeak] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends = self.clock() + self.budget_s

    def measure_rate(
        self,
        name: str,
        unit: Unit,
        sizes: Sequence[int],
        make: Callable[[int], TimedWork],
        amount: Callable[[int], float],
        how: Callable[[int], str],
    ) -> None:
        """`amount` per second of the largest of the ascending `sizes` that memory and time allow."""
        with self._skip_on_error(name):
            size, best_s, runs = self._best_run(sizes, make, amount)
            stated = f"{how(size)}, best of {runs}"
            self.peaks.append(DevicePeak(name, amount(size) / best_s / _SCALE[unit], unit, "measured", stated))

    def measure_cost(self, name: str, count: int, make: Callable[[int], TimedWork], how: str) -> None:
        """Microseconds per item of a run with `count` equal items."""
        with self._skip_on_error(name):
            _, best_s, runs = self._best_run((count,), make, float)
            self.peaks.append(DevicePeak(name, best_s / count * 1e6, "us", "measured", f"{how}, best of {runs}"))

    def skip(self, name: str, why: str) -> None:
        self.skipped.append(f"{name}: {why}")

    @contextlib.contextmanager
    def _skip_on_error(self, name: str) -> Iterator[None]:
        """Report a failed measurement under its name and continue."""
        try:
            yield
        except DeviceLost:  # no later measurement is possible
            raise
        except (SetupError, MemoryExhausted) as error:
            self.skip(name, error.message)

    def _best_run(
        self, sizes: Sequence[int], make: Callable[[int], TimedWork], amount: Callable[[int], float]
    ) -> tuple[int, float, int]:
        """The size that was run, the seconds of its shortest run, and the number of runs."""
        if self.clock() >= self._ends:
            raise SetupError(f"the {self.budget_s:.0f} s for all peaks were over")
        smaller: int | None = None
        for index, size in enumerate(sizes):
            try:
                work = make(size)
                try:
                    once_s = min(_positive_times(work.run_seconds(1)) for _ in range(2))  # the first one warms up
                    more = sizes[index + 1 : index + 2]
                    if more and once_s * amount(more[0]) / amount(size) * _MIN_RUNS < self.slot_s:
                        smaller = size
                        continue
                    runs = max(_MIN_RUNS, min(_MAX_RUNS, int(self.slot_s / once_s)))
                    return size, min(once_s, _positive_times(work.run_seconds(runs))), runs + 2
                finally:
                    work.close()
            except MemoryExhausted:
                if smaller is None:
                    raise
                return self._best_run((smaller,), make, amount)
        raise SetupError("no size fits")


def time_calls(call: Callable[[], object], runs: int) -> list[float]:
    """The seconds of each of `runs` calls, by the host's clock."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _positive_times(seconds: Sequence[float]) -> float:
    best = min(seconds)
    if not best > 0:
        raise SetupError(f"a run took {best:g} s by its clock, too short to measure")
    return best
