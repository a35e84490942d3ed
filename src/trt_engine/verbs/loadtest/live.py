"""What a load test does right now: the rate and latency of the last moments, as one line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from trt_engine.format import format_ms
from trt_engine.verbs.loadtest.samples import LoadWindow, Samples

INTERVAL_NS = 500_000_000
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 16


class Moment(msgspec.Struct, tag="moment"):
    """The last interval of one process."""

    at: int
    """`perf_counter_ns`."""
    answered_per_s: float
    failed: int
    """Since the beginning."""
    p50_ms: float | None
    p99_ms: float | None


class MomentMeter:
    """An `OnProgress` that reports a `Moment` twice a second."""

    def __init__(self, report: Callable[[Moment], None]) -> None:
        self._report = report
        self._at = 0
        self._counts: list[int] = []

    def __call__(self, now: int, *samples: Samples) -> None:
        self._at = self._at or now
        if now - self._at < INTERVAL_NS:
            return
        elapsed_ns, self._at = now - self._at, now
        before, self._counts = self._counts or [0] * len(samples), [len(part.ends) for part in samples]
        fresh = [
            (np.array(part.ends[old:new]) - np.array(part.intended[old:new])) / 1e6
            for part, old, new in zip(samples, before, self._counts, strict=True)
        ]
        latency_ms = np.concatenate(fresh)
        failed = sum(len(part.failed_kinds) for part in samples)
        middle, late = np.quantile(latency_ms, (0.5, 0.99)).tolist() if latency_ms.size else (None, None)
        self._report(Moment(now, latency_ms.size / (elapsed_ns / 1e9), failed, middle, late))


class LiveText:
    """The moments of all processes as a line of text: rate, latency, failures, the last p99s as bars."""

    def __init__(self, window: LoadWindow, report: Callable[[float, float, str], None]) -> None:
        self._window, self._report = window, report
        self._latest: dict[int, Moment] = {}
        self._history: deque[float] = deque(maxlen=_HISTORY)

    def update(self, process: int, moment: Moment) -> None:
        """Report seconds done, seconds planned and the line."""
        self._latest[process] = moment
        if process != min(self._latest):
            return
        moments = list(self._latest.values())
        late = max((one.p99_ms for one in moments if one.p99_ms is not None), default=None)
        self._history.append(late or 0.0)
        window = self._window
        done_s = min(moment.at, window.end) - window.start
        self._report(done_s / 1e9, (window.end - window.start) / 1e9, self._describe(moments, late))

    def _describe(self, moments: list[Moment], late: float | None) -> str:
        parts = [f"{sum(one.answered_per_s for one in moments):,.0f} requests/s"]
        middle = [one.p50_ms for one in moments if one.p50_ms is not None]
        if middle and late is not None:
            parts += [f"p50 {format_ms(max(middle))}", f"p99 {format_ms(late)} {draw_bars(list(self._history))}"]
        if failed := sum(one.failed for one in moments):
            parts.append(f"{failed} failed")
        return ", ".join(parts)


def draw_bars(values: list[float]) -> str:
    """One sign for each value, from the lowest to the highest bar."""
    top = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(int(value / top * len(_BARS)), len(_BARS) - 1)] for value in values)
