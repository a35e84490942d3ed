"""What a load generator writes down: times of each answered request, and each failed one with its kind.

All times are `time.perf_counter_ns`, which on Linux is one clock for all processes.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.format import format_ms
from trt_engine.reporting.document import clean_text

Int64Array = npt.NDArray[np.int64]
STATUS, TIMEOUT, REFUSED, CONNECTION = "status", "timeout", "refused", "connection"
"""Kinds of failures: an answer with an error status (`status 503`), none in time, no connection, a broken one."""
_MAX_TEXT = 300


class Samples:
    """Times in ns of one generator: parallel arrays of answered requests, lists of the failed ones."""

    __slots__ = ("ends", "failed_at", "failed_kinds", "intended", "request_waits", "sent", "texts")

    def __init__(self) -> None:
        self.intended, self.sent, self.ends = array("q"), array("q"), array("q")
        self.failed_at, self.failed_kinds = array("q"), list[str]()
        self.texts: dict[str, str] = {}
        """The first message of each kind of failure."""
        self.request_waits = 0
        """Arrivals that found every connection busy."""

    def fail(self, intended: int, kind: str, text: str = "") -> None:
        self.failed_at.append(intended)
        self.failed_kinds.append(kind)
        if kind not in self.texts:
            self.texts[kind] = clean_text(text[:_MAX_TEXT])

    def pack(self) -> SampleArrays:
        count = min(len(self.intended), len(self.sent), len(self.ends))  # Ctrl-C may come between two of them
        failed = _as_array(self.failed_at, len(self.failed_kinds))
        return SampleArrays(
            _as_array(self.intended, count), _as_array(self.sent, count), _as_array(self.ends, count), failed,
            tuple(self.failed_kinds[: len(failed)]), dict(self.texts), self.request_waits,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """The samples of one or several generators, as arrays of ns."""

    intended: Int64Array
    sent: Int64Array
    ends: Int64Array
    failed_at: Int64Array
    failed_kinds: tuple[str, ...]
    texts: dict[str, str]
    request_waits: int

    @classmethod
    def join(cls, parts: Iterable[SampleArrays]) -> SampleArrays:
        """All samples in order of their intended time."""
        found = list(parts)
        intended, sent, ends, failed = (
            np.concatenate([_EMPTY, *(getattr(part, name) for part in found)])
            for name in ("intended", "sent", "ends", "failed_at")
        )
        order = np.argsort(intended, kind="stable")
        texts: dict[str, str] = {}
        for part in found:
            texts = part.texts | texts
        kinds = tuple(kind for part in found for kind in part.failed_kinds)
        waits = sum(part.request_waits for part in found)
        return cls(intended[order], sent[order], ends[order], failed, kinds, texts, waits)

    def since(self, start: int) -> SampleArrays:
        """The requests meant for that time or later."""
        keep, failed = self.intended >= start, self.failed_at >= start
        kinds = tuple(kind for kind, kept in zip(self.failed_kinds, failed, strict=True) if kept)
        texts = {kind: text for kind, text in self.texts.items() if kind in kinds}
        return SampleArrays(
            self.intended[keep], self.sent[keep], self.ends[keep], self.failed_at[failed], kinds, texts,
            self.request_waits,
        )  # fmt: skip

    def count_errors(self) -> dict[str, int]:
        """Failed requests by kind, the most frequent first."""
        return dict(Counter(self.failed_kinds).most_common())

    def to_bytes(self) -> bytes:
        arrays = {name: getattr(self, name).tobytes() for name in ("intended", "sent", "ends", "failed_at")}
        kinds = list(dict.fromkeys(self.failed_kinds))
        numbers = [kinds.index(kind) for kind in self.failed_kinds]
        own = {"kinds": kinds, "numbers": numbers, "texts": self.texts, "waits": self.request_waits}
        return msgspec.msgpack.encode(arrays | own)

    @classmethod
    def from_bytes(cls, data: bytes) -> SampleArrays:
        found = msgspec.msgpack.decode(data)
        intended, sent, ends, failed = (
            np.frombuffer(found[name], np.int64) for name in ("intended", "sent", "ends", "failed_at")
        )
        kinds = tuple(found["kinds"][number] for number in found["numbers"])
        return cls(intended, sent, ends, failed, kinds, found["texts"], found["waits"])


_EMPTY: Int64Array = np.zeros(0, np.int64)


def _as_array(times: array[int], count: int) -> Int64Array:
    """A copy of the first `count` times: an array that grows cannot be shared."""
    return np.array(times[:count], np.int64)


class LoadWindow(msgspec.Struct, frozen=True):
    """The times of one run in ns: its first request, its first measured one, the end of sending."""

    start: int
    measured: int
    end: int

    @classmethod
    def beginning(cls, start: int, warmup_s: float, duration_s: float) -> LoadWindow:
        measured = start + round(warmup_s * 1e9)
        return cls(start, measured, measured + round(duration_s * 1e9))


OnTick = Callable[..., None]
"""Called about ten times a second with the time in ns and the `Samples` of each thread; what it raises ends the run."""
TICK_NS = 100_000_000


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
