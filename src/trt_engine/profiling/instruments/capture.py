"""In-process captures of device activity: by CUPTI, or by PyTorch's profiler.

A capture slows the host, so latency is always measured without one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import re
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_engine.config.bench import ProfilerName
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.records.profile import Activity, InstrumentStatus

PROBE_INFERENCES = 2
"""Uncounted inferences with the profiler on, as its first records are slow."""


class ProfilerUnavailable(SetupError):
    """A profiler is unavailable here: the message has the reason, the hint the fix."""


BUSY_HINT = "end the other one (Nsight, another tool around this process), or use another profiler"
"""The hint for two profilers at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One CUDA call of the host that launches work or waits for it. Times in ns of the capture's clock."""

    name: str
    """Without its version: `cudaLaunchKernel`."""
    start_ns: int
    end_ns: int
    correlation: int
    """The correlation id of its activities in the same capture."""
    thread: int = 0


@dataclass(frozen=True, slots=True)
class HostSpan:
    """A host interval: an NVTX range or an operator. Times in ns of the capture's clock."""

    name: str
    start_ns: int
    end_ns: int
    thread: int | None = None
    """None: it contains launches of every thread."""


@dataclass(frozen=True, slots=True)
class Capture:
    """All device activity of some inferences, and the host calls that launched it, on one clock."""

    activities: tuple[Activity, ...]
    """Sorted by start."""
    launch_ns: int | None
    """Host time in launching calls, in ns, over all inferences; None if unknown."""
    inferences: tuple[tuple[int, int], ...]
    """Host windows on the same clock, one per inference."""
    instrument: str
    """`cupti 13.4.0`, `torch.profiler 2.11.0`, `nsys 2024.6.2`."""
    warnings: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    """Sorted by start; empty if unknown."""


# ------------------------------------------------------------------------------------------------ in-process profilers

_MODULES: dict[ProfilerName, str] = {
    "cupti": "trt_engine.profiling.instruments.cupti",
    "torch": "trt_engine.profiling.instruments.torch_profiler",
}
_CAPTURE_LOCK = threading.Lock()
_EXTRA = "`pip install 'trt-engine[profile]'`"


def instrument_status() -> tuple[InstrumentStatus, ...]:
    """The profilers of this process, best first: `used` is true if it works here, `reason` its library or why not."""
    return tuple(_probe_instrument(name) for name in _MODULES)


def _probe_instrument(name: ProfilerName) -> InstrumentStatus:
    try:
        return InstrumentStatus(name, True, _probe_torch() if name == "torch" else _probe_cupti())
    except ProfilerUnavailable as error:
        return InstrumentStatus(name, False, error.message, error.hint)


def _probe_cupti() -> str:
    if importlib.util.find_spec("cupti") is None:
        raise ProfilerUnavailable("cupti-python is not installed", hint=_EXTRA)
    _require_driver()
    try:
        return f"cupti-python {importlib.metadata.version('cupti-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "cupti-python"


def _probe_torch() -> str:
    """The installed PyTorch's version, without its slow import."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ProfilerUnavailable("PyTorch is not installed", hint=f"{_EXTRA} brings CUPTI, which needs no PyTorch")
    try:
        text = (Path(found.origin).parent / "version.py").read_text(errors="replace")
    except OSError:
        text = ""
    version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    if not re.search(r"^cuda\b[^=\n]*=\s*['\"]\d", text, re.MULTILINE):
        raise ProfilerUnavailable("the PyTorch that is installed is built without CUDA", hint=_EXTRA)
    _require_driver()
    return f"torch {version[1]}" if version else "torch"


def _require_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ProfilerUnavailable(
            "no NVIDIA driver (libcuda.so.1) was found", hint="`trt-engine doctor` lists what a GPU needs here"
        ) from error


def capture(
    run: Callable[[], None], *, inferences: int, warmup: int, instrument: ProfilerName | None = None
) -> Capture:
    """Device activity of `inferences` calls of `run`, after `warmup` uncaptured calls.

    `run` must synchronize. `ProfilerUnavailable` if no profiler, or not the requested one, works here. CUPTI allows one
    capture at a time per process.
    """
    if inferences < 1:
        raise UsageError(f"a capture of {inferences} inferences", hint="capture at least one")
    if instrument is not None and instrument not in _MODULES:
        raise UsageError(f"`{instrument}` does not profile this process", hint=f"one of {', '.join(_MODULES)}")
    if not _CAPTURE_LOCK.acquire(blocking=False):
        raise ProfilerUnavailable(
            "another capture is under way in this process", hint="CUPTI serves one at a time: wait for it"
        )
    try:
        for _ in range(warmup):
            run()
        return _capture_first_available(run, inferences, (instrument,) if instrument else tuple(_MODULES))
    finally:
        _CAPTURE_LOCK.release()


_active_instrument: ProfilerName | None = None
"""The profiler already used in this process; no other may follow: CUPTI and then PyTorch's profiler in one process ended
with glibc's `free(): invalid pointer`."""


def _capture_first_available(run: Callable[[], None], inferences: int, instruments: Sequence[ProfilerName]) -> Capture:
    global _active_instrument
    passed: list[ProfilerUnavailable] = []
    for name in instruments:
        found = _probe_instrument(name)
        try:
            if not found.used:
                raise ProfilerUnavailable(found.reason, hint=found.fix)
            if _active_instrument not in (None, name):
                raise ProfilerUnavailable(
                    f"{_active_instrument} has profiled this process already, and two profilers in one process conflict",
                    hint=f"stay with {_active_instrument}, or start another process",
                )
            made: Capture = _load_instrument(name).capture(run, inferences)
        except ProfilerUnavailable as error:
            passed.append(error)
            continue
        except BaseException:  # raised by the inference
            _active_instrument = name
            raise
        _active_instrument = name
        stated = tuple(
            f"{where} was skipped: {error.message}" for where, error in zip(instruments, passed, strict=False)
        )
        return dataclasses.replace(made, warnings=(*stated, *made.warnings)) if stated else made
    if len(passed) == 1:
        raise passed[0]
    raise ProfilerUnavailable(
        "no profiler is available for the GPU: " + "; ".join(error.message for error in passed), hint=passed[0].hint
    ) from passed[0]


def _load_instrument(name: ProfilerName) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except (ImportError, OSError) as error:  # a package with a missing library, or for another Python
        raise ProfilerUnavailable(f"{name} does not load: {library_reason(error)}", hint=_EXTRA) from error


def subscribe_nvtx() -> bool:
    """Subscribe to NVTX ranges of libraries in this process, before they are loaded; True if ranges will be recorded.

    NVTX looks for its injection library once, at a library's first range. An existing one is not replaced.
    """
    if importlib.util.find_spec("cupti") is None:
        return False
    try:
        return bool(importlib.import_module("trt_engine.profiling.instruments.cupti").subscribe_nvtx())
    except (ImportError, OSError):
        return False


# ------------------------------------------------------------------------------------------------ putting together

_LAUNCHES = re.compile(
    r"cu(?:da)?(?:Launch(?!HostFunc)\w*|GraphLaunch|Mem(?:cpy|set)\w*Async\w*|MemPrefetchAsync)(?:_ptsz|_ptds)?(?:_v\d+)*$"
)


def is_async_launch(name: str) -> bool:
    """Whether a CUDA call enqueues work and returns before it is done."""
    return _LAUNCHES.match(name[:200]) is not None


def assemble(
    activities: Iterable[Activity],
    launches: Iterable[Launch] | None,
    windows: Sequence[tuple[int, int]],
    instrument: str,
    *,
    spans: Iterable[HostSpan] = (),
    dropped: int = 0,
    warnings: Sequence[str] = (),
) -> Capture:
    """A capture from an instrument's records in any order, limited to the inference windows.

    An activity belongs to the inference whose window contains its launch, or its own start if the launch is unknown. Its
    range is the innermost of `spans` around its launch. Missing or impossible records are reported in the warnings.
    """
    windows = tuple(sorted(windows))
    calls: dict[int, Launch] = {}
    for launch in sorted(launches or (), key=lambda item: item.start_ns):
        if launch.correlation:
            calls.setdefault(launch.correlation, launch)  # the outermost represents all
    kept, impossible, outside, late = [], 0, 0, 0
    innermost = SpanIndex(spans)
    for activity in activities:
        if not 0 < activity.start_ns <= activity.end_ns:
            impossible += 1
            continue
        call = calls.get(activity.correlation)
        number = window_of(windows, call.start_ns if call else activity.start_ns)
        if number is None:
            outside += 1
            continue
        late += activity.end_ns > windows[number][1]
        if call and activity.range is None and (name := innermost.innermost(call.start_ns, call.thread)):
            activity = dataclasses.replace(activity, range=name)
        kept.append(activity)
    kept.sort(key=lambda item: (item.start_ns, item.end_ns))
    served = {item.correlation for item in kept}
    inside = [item for item in calls.values() if window_of(windows, item.start_ns) is not None]
    relevant = [
        item
        for item in inside
        if item.correlation in served or is_async_launch(item.name) or "Synchronize" in item.name
    ]
    relevant.sort(key=lambda item: (item.start_ns, -item.end_ns))
    losses = (
        (dropped, "records were dropped for lack of buffers: kernels are missing, capture fewer inferences"),
        (impossible, "records without a start or an end were left out: the device was not done with them"),
        (late, "activities ended after their launching call had returned"),
    )
    problems = [f"{count} {text}" for count, text in losses if count]
    if not kept:
        problems.append(f"the device did nothing in these {len(windows)} inferences ({outside} activities are outside)")
    return Capture(
        activities=tuple(kept),
        launch_ns=None if launches is None else _launch_time(relevant),
        inferences=windows,
        instrument=instrument,
        warnings=(*warnings, *problems),
        launches=tuple(relevant),
    )


def window_of(windows: Sequence[tuple[int, int]], moment: int) -> int | None:
    """Index of the window that contains the moment; windows are sorted and do not overlap."""
    number = bisect_right(windows, (moment, 1 << 63)) - 1
    return number if number >= 0 and moment <= windows[number][1] else None


def _launch_time(calls: Sequence[Launch]) -> int:
    """Time in launching calls, in ns, merged per thread: a runtime call contains a driver call."""
    by_thread: Mapping[int, list[tuple[int, int]]] = defaultdict(list)
    for call in calls:
        if is_async_launch(call.name):
            by_thread[call.thread].append((call.start_ns, call.end_ns))
    total = 0
    for intervals in by_thread.values():
        reached = 0
        for start, end in sorted(intervals):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total


class IntervalSet:
    """Tests whether a moment is in any of many intervals."""

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def contains(self, moment: int) -> bool:
        number = bisect_right(self._starts, moment) - 1
        return number >= 0 and moment <= self._ends[number]


class SpanIndex:
    """The innermost span at a moment, of spans that nest within their thread."""

    def __init__(self, spans: Iterable[HostSpan]) -> None:
        by_thread: dict[int | None, list[HostSpan]] = defaultdict(list)
        for span in spans:
            by_thread[span.thread].append(span)
        self._threads = {
            thread: _innermost_steps(sorted(found, key=lambda span: (span.start_ns, -span.end_ns)))
            for thread, found in by_thread.items()
        }

    def innermost(self, moment: int, thread: int) -> str | None:
        for where in (thread, None):
            if where in self._threads:
                starts, names = self._threads[where]
                number = bisect_right(starts, moment) - 1
                if number >= 0 and names[number] is not None:
                    return names[number]
        return None


def _innermost_steps(spans: Sequence[HostSpan]) -> tuple[list[int], list[str | None]]:
    """The moments at which the innermost span changes, and that span."""
    starts: list[int] = []
    names: list[str | None] = []

    def step(moment: int, name: str | None) -> None:
        if starts and starts[-1] == moment:
            names[-1] = name
        else:
            starts.append(moment)
            names.append(name)

    open_: list[HostSpan] = []

    def close(until: int | None) -> None:
        while open_ and (until is None or open_[-1].end_ns < until):
            ended = open_.pop()
            while open_ and open_[-1].end_ns <= ended.end_ns:  # overlaps that do not nest end together
                open_.pop()
            step(ended.end_ns + 1, open_[-1].name if open_ else None)

    for span in spans:
        close(span.start_ns)
        open_.append(span)
        step(span.start_ns, span.name)
    close(None)
    return starts, names
