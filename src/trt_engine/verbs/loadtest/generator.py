"""Run a load: in this process, or its shares in several that start at the same time. `Samples` are what it writes down.

The requests of an open loop arrive as a Poisson process, constantly, in bursts, or as recorded.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.format import format_ms
from trt_engine.reporting.document import clean_text
from trt_engine.verbs.loadtest.config import Arrivals
from trt_engine.verbs.loadtest.target import Target
from trt_engine.workers.crash import restore_error
from trt_engine.workers.messages import ErrorMessage, LogMessage
from trt_engine.workers.process import ChildProcess, spawn_worker

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


OnProgress = Callable[[float, float, str], None]
"""Called twice a second with seconds done, seconds planned and a line of text."""
_LEAD_S = 0.02
"""From the decision to start to the first request."""
_READY_S = 60.0
_STOP_S = 2.0
_GRACE_S = 5.0
_SILENCE_S = 30.0


class Loop(Protocol):
    """A load generator of one process; it runs once."""

    def run(self, window: LoadWindow, schedule: Sequence[int] | None, on_tick: OnTick) -> None: ...

    def collect(self) -> SampleArrays: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to send, and when: arrivals in s from the start (warm-up included), None for a closed loop."""

    warmup_s: float
    duration_s: float
    arrivals_s: npt.NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The samples of a run, warm-up included."""

    window: LoadWindow
    samples: SampleArrays
    interrupted: bool


def run_loop(loop: Loop, timing: Timing, on_progress: OnProgress) -> LoadRun:
    """Run a load in this process; Ctrl-C ends it early."""
    window = LoadWindow.beginning(time.perf_counter_ns() + round(_LEAD_S * 1e9), timing.warmup_s, timing.duration_s)
    live = LiveText(window, on_progress)
    interrupted = False
    try:
        loop.run(window, absolute_times(timing.arrivals_s, window), MomentMeter(lambda moment: live.update(0, moment)))
    except KeyboardInterrupt:
        interrupted = True
    return LoadRun(window, SampleArrays.join([loop.collect()]), interrupted)


def absolute_times(arrivals_s: npt.NDArray[np.float64] | None, window: LoadWindow) -> Sequence[int] | None:
    """The arrivals as times in ns."""
    if arrivals_s is None:
        return None
    return array("q", (np.round(arrivals_s * 1e9).astype(np.int64) + window.start).tobytes())


# ------------------------------------------------------------------------------------------- several processes


class LoadJob(msgspec.Struct, frozen=True):
    """The share of one process. `request` and `arrivals` are files; the samples are written to `out`."""

    target: Target
    request: str
    concurrency: int
    timeout_s: float
    out: str
    arrivals: str | None
    token: str | None
    ca_file: str | None


class ReadyMessage(msgspec.Struct, tag="ready"):
    """The process waits for its `LoadWindow`."""


class DoneMessage(msgspec.Struct, tag="done"):
    """The samples are written."""


Message = ReadyMessage | DoneMessage | Moment | LogMessage | ErrorMessage
_decoder = msgspec.json.Decoder(Message)


def run_processes(
    jobs: Callable[[Path, int], dict[str, Any]], processes: int, timing: Timing, on_progress: OnProgress
) -> LoadRun:
    """Run a load in several processes; `jobs` gives the fields of a `LoadJob` but `out` and `arrivals`.

    Raises the error of a process that failed. Ctrl-C ends all early.
    """
    children: list[ChildProcess] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="trt-engine-load-") as folder, tempfile.TemporaryFile() as output:
        try:
            for index in range(processes):
                job = _write_job(Path(folder), index, processes, jobs(Path(folder), index), timing)
                children.append(spawn_worker("trt_engine.verbs.loadtest.worker", msgspec.json.encode(job), output))
            for child in children:
                _next_message(child, ReadyMessage, _READY_S, lambda moment: None)
            start = time.perf_counter_ns() + round(_LEAD_S * 1e9)
            window = LoadWindow.beginning(start, timing.warmup_s, timing.duration_s)
            live = LiveText(window, on_progress)
            for child in children:
                child.send(msgspec.json.encode(window))
            try:
                _wait_until_done(children, live, _SILENCE_S)
            except KeyboardInterrupt:
                interrupted = True
                for child in children:
                    child.interrupt()
                with contextlib.suppress(KeyboardInterrupt, TrtEngineError):
                    _wait_until_done(children, live, _STOP_S)
            places = [Path(folder) / f"samples-{index}" for index in range(processes)]
            parts = [place.read_bytes() for place in places if place.exists()]
        finally:
            for child in children:
                child.close(0.0 if interrupted else _GRACE_S)
    return LoadRun(window, SampleArrays.join(map(SampleArrays.from_bytes, parts)), interrupted)


def _write_job(folder: Path, index: int, processes: int, fields: dict[str, Any], timing: Timing) -> LoadJob:
    arrivals: Path | None = None
    if timing.arrivals_s is not None:
        arrivals = folder / f"arrivals-{index}"
        arrivals.write_bytes(timing.arrivals_s[index::processes].tobytes())
    return LoadJob(**fields, out=str(folder / f"samples-{index}"), arrivals=None if arrivals is None else str(arrivals))


def _wait_until_done(children: Sequence[ChildProcess], live: LiveText, timeout_s: float) -> None:
    """Take the messages of all children in turn; each sends two a second."""
    for index, child in enumerate(children):
        _next_message(child, DoneMessage, timeout_s, lambda moment, index=index: live.update(index, moment))  # type: ignore[misc]


def _next_message(child: ChildProcess, kind: type, timeout_s: float, on_moment: Callable[[Moment], None]) -> None:
    """Wait for a message of that kind. Raises the child's error."""
    while True:
        try:
            line = child.read_line(timeout_s)
        except TimeoutError:
            raise TrtEngineError(f"a load process was silent for {timeout_s:g} s") from None
        message = None if line is None else _decoder.decode(line)
        if isinstance(message, kind):
            return
        if isinstance(message, Moment):
            on_moment(message)
        elif isinstance(message, ErrorMessage):
            raise restore_error(message.kind, message.message, message.hint)
        elif message is None:
            raise TrtEngineError("a load process ended without its samples", hint="`-v` for its output")


FloatArray = npt.NDArray[np.float64]
_MAX_REQUESTS = 50_000_000
_MAX_SPAN_S = 366 * 86400.0


def arrival_times(kind: Arrivals, rate: float, duration_s: float, *, seed: int = 0, burst: int = 16) -> FloatArray:
    """Times in s, ascending, in [0, `duration_s`), at `rate` requests/s on average; equal seeds give equal times.

    `poisson`: independent exponential gaps, as of many independent clients. `constant`: equal gaps. `bursts`: `burst`
    requests at once, the bursts Poisson.
    """
    if rate * duration_s > _MAX_REQUESTS:
        raise UsageError(
            f"{rate:g} requests/s for {duration_s:g} s are more than {_MAX_REQUESTS}", hint="a shorter `--duration`"
        )
    if kind == "constant":
        return np.arange(int(np.ceil(rate * duration_s)), dtype=np.float64) / rate
    rng = np.random.default_rng(seed)
    if kind == "bursts":
        return np.repeat(_poisson(rng, rate / burst, duration_s), burst)
    return _poisson(rng, rate, duration_s)


def _poisson(rng: np.random.Generator, rate: float, duration_s: float) -> FloatArray:
    """A Poisson process: its number of events is Poisson, their times are uniform."""
    return np.sort(rng.uniform(0.0, duration_s, int(rng.poisson(rate * duration_s))))


def read_arrivals(path: Path) -> FloatArray:
    """Recorded times in s from the first one on: a text file with one number a line, or a loadtest.jsonl (its last record).

    Raises `UsageError` for a file that is neither.
    """
    try:
        data = read_bounded(path)
        values = _recorded_times(data) if path.suffix == ".jsonl" else _text_times(data)
    except OSError as error:
        raise UsageError(f"cannot read the arrivals `{path}`: {error}", hint="seconds, one a line") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise UsageError(f"`{path}` is not a recording of arrivals: {error}", hint="seconds, one a line") from error
    times: FloatArray = np.sort(np.asarray(values, np.float64))
    if not times.size or not np.isfinite(times).all():
        raise UsageError(f"`{path}` has {times.size} times, expected finite ones", hint="seconds, one a line")
    times -= times[0]
    if times[-1] > _MAX_SPAN_S:
        raise UsageError(f"`{path}` spans {times[-1]:.3g} s, expected a year at most", hint="times in seconds")
    return times


def _text_times(data: bytes) -> list[float]:
    lines = (line.partition("#")[0].strip() for line in data.decode().splitlines())
    return [float(line) for line in lines if line]


def _recorded_times(data: bytes) -> list[float]:
    lines = [line for line in data.split(b"\n") if line.strip()]
    record: Any = decode_json(lines[-1]) if lines else {}
    times = record.get("sent_s") if isinstance(record, dict) else None
    if not isinstance(times, list) or not all(isinstance(value, int | float) for value in times):
        raise ValueError("the last line has no `sent_s`")
    return times
