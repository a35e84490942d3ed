"""What the device did while an engine ran, caught in this process: by CUPTI, or by PyTorch's profiler.

Neither measures an engine: a capture costs time of its own on the host. What it is held against is measured without one.
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

from trt_engine.errors import SetupError, UsageError
from trt_engine.traces import Activity, Rung, RungName

__all__ = [
    "BUSY",
    "PERMIT",
    "Capture",
    "Covered",
    "HostSpan",
    "Innermost",
    "Launch",
    "ProfilerUnavailable",
    "assemble",
    "capture",
    "hear_ranges",
    "instruments",
    "launches_work",
    "window_of",
]

PROBING = 2
"""Inferences run with the instrument on before those that count: its first records cost most."""


class ProfilerUnavailable(SetupError):
    """A rung of the ladder cannot be had here: the message says why, the hint what would help."""


BUSY = "end the other one (Nsight, another tool around this process), or take another rung"
"""What helps where two profilers meet."""
PERMIT = (
    "one of: (1) once: run it with `sudo`, or with CAP_SYS_ADMIN (CAP_PERFMON from driver R565); "
    "(2) in a container: start it with `docker run --cap-add=SYS_ADMIN`; "
    "(3) for good, on the host: `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d, "
    "`update-initramfs -u` or `dracut -f`, reboot; then `grep RmProfilingAdminOnly /proc/driver/nvidia/params` says 0"
)
"""What helps against ERR_NVGPUCTRPERM."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of the host's into CUDA, that asks for work or waits for it. Times in ns of the capture's clock."""

    name: str
    """Without its version: `cudaLaunchKernel`."""
    start_ns: int
    end_ns: int
    correlation: int
    """The number that what it launched has in the same capture."""
    thread: int = 0


@dataclass(frozen=True, slots=True)
class HostSpan:
    """What the host was at: a range somebody marked, an operator. Times in ns of the capture's clock."""

    name: str
    start_ns: int
    end_ns: int
    thread: int | None = None
    """None: whatever thread launches meanwhile belongs to it."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Everything the device did in some inferences, and when the host asked for it, on one clock."""

    activities: tuple[Activity, ...]
    """By start."""
    launch_ns: int | None
    """The host's time inside calls that launch work, in all inferences; None where that is not told."""
    inferences: tuple[tuple[int, int], ...]
    """The host's windows on the same clock, one for each inference."""
    instrument: str
    """`cupti 13.4.0`, `torch.profiler 2.11.0`, `nsys 2024.6.2`."""
    warnings: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    """By start; empty where they are not told."""


# ------------------------------------------------------------------------------------------------ the ladder

_MODULES: dict[RungName, str] = {
    "cupti": "trt_engine.profiling.cupti",
    "torch": "trt_engine.profiling.torch_trace",
}
_HELD = threading.Lock()
_EXTRA = "`pip install 'trt-engine[profile]'`"


def instruments() -> tuple[Rung, ...]:
    """The rungs of this process, best first: `used` says whether it works here, `reason` with what or why not."""
    return tuple(_rung(name) for name in _MODULES)


def _rung(name: RungName) -> Rung:
    try:
        return Rung(name, True, _torch() if name == "torch" else _cupti())
    except ProfilerUnavailable as error:
        return Rung(name, False, error.message, error.hint)


def _cupti() -> str:
    if importlib.util.find_spec("cupti") is None:
        raise ProfilerUnavailable("cupti-python is not installed", hint=_EXTRA)
    _driver()
    try:
        return f"cupti-python {importlib.metadata.version('cupti-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "cupti-python"


def _torch() -> str:
    """The PyTorch that is installed, without the seconds its import takes."""
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
    _driver()
    return f"torch {version[1]}" if version else "torch"


def _driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ProfilerUnavailable(
            "there is no NVIDIA driver (libcuda.so.1)", hint="`trt-engine doctor` says what a GPU needs here"
        ) from error


def capture(run: Callable[[], None], *, inferences: int, warmup: int, rung: RungName | None = None) -> Capture:
    """What the device does in `inferences` calls of `run`, after `warmup` that are not looked at.

    `run` returns when the device is done. `ProfilerUnavailable` where no instrument, or not the one asked for, works here.
    One capture at a time in a process: CUPTI serves one.
    """
    if inferences < 1:
        raise UsageError(f"a capture of {inferences} inferences", hint="ask for one at least")
    if rung is not None and rung not in _MODULES:
        raise UsageError(f"`{rung}` does not watch this process", hint=f"one of {', '.join(_MODULES)}")
    if not _HELD.acquire(blocking=False):
        raise ProfilerUnavailable(
            "another capture is under way in this process", hint="CUPTI serves one at a time: wait for it"
        )
    try:
        for _ in range(warmup):
            run()
        return _first_that_works(run, inferences, (rung,) if rung else tuple(_MODULES))
    finally:
        _HELD.release()


_watched: RungName | None = None
"""What watched this process before. It stays the only one: a process that CUPTI and then PyTorch's profiler had watched was
seen to end with glibc's `free(): invalid pointer`."""


def _first_that_works(run: Callable[[], None], inferences: int, rungs: Sequence[RungName]) -> Capture:
    global _watched
    passed: list[ProfilerUnavailable] = []
    for name in rungs:
        found = _rung(name)
        try:
            if not found.used:
                raise ProfilerUnavailable(found.reason, hint=found.fix)
            if _watched not in (None, name):
                raise ProfilerUnavailable(
                    f"{_watched} has watched this process already, and two profilers do not get on in one",
                    hint=f"stay with {_watched}, or start another process",
                )
            made: Capture = _module(name).record(run, inferences)
        except ProfilerUnavailable as error:
            passed.append(error)
            continue
        except BaseException:  # the inference's own, in the middle of it
            _watched = name
            raise
        _watched = name
        told = tuple(f"{where} was passed over: {error.message}" for where, error in zip(rungs, passed, strict=False))
        return dataclasses.replace(made, warnings=(*told, *made.warnings)) if told else made
    if len(passed) == 1:
        raise passed[0]
    raise ProfilerUnavailable(
        "nothing here can watch the GPU: " + "; ".join(error.message for error in passed), hint=passed[0].hint
    ) from passed[0]


def _module(name: RungName) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except (ImportError, OSError) as error:  # a package without a library it needs, or for another Python
        raise ProfilerUnavailable(f"{name} does not load: {_line(error)}", hint=_EXTRA) from error


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def hear_ranges() -> bool:
    """Whether NVTX ranges of libraries in this process will be heard; to be called before they are loaded.

    NVTX looks for its listener once, when a library marks its first range. Somebody else's listener stays.
    """
    if importlib.util.find_spec("cupti") is None:
        return False
    try:
        return bool(importlib.import_module("trt_engine.profiling.cupti").hear_ranges())
    except (ImportError, OSError):
        return False


# ------------------------------------------------------------------------------------------------ putting together

_LAUNCHES = re.compile(
    r"cu(?:da)?(?:Launch(?!HostFunc)\w*|GraphLaunch|Mem(?:cpy|set)\w*Async\w*|MemPrefetchAsync)(?:_ptsz|_ptds)?(?:_v\d+)*$"
)


def launches_work(name: str) -> bool:
    """Whether a call of CUDA's puts work on a stream and returns before it is done."""
    return _LAUNCHES.match(name) is not None


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
    """A capture of what an instrument wrote down, in whatever order: what belongs to the inferences, by time.

    An activity belongs to the inference whose window its launch lies in, or, where no launch is told, its own start. It gets
    the innermost of `spans` its launch lies in as its range. What is missing or cannot be is said in the warnings.
    """
    told = list(warnings)
    windows = tuple(sorted(windows))
    calls: dict[int, Launch] = {}
    for launch in launches or ():
        other = calls.get(launch.correlation)
        if launch.correlation and (other is None or launch.start_ns < other.start_ns):  # the outermost speaks for all
            calls[launch.correlation] = launch
    kept, impossible, outside, late = [], 0, 0, 0
    innermost = Innermost(spans)
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
        if call and activity.range is None and (name := innermost.at(call.start_ns, call.thread)):
            activity = dataclasses.replace(activity, range=name)
        kept.append(activity)
    kept.sort(key=lambda item: (item.start_ns, item.end_ns))
    served = {item.correlation for item in kept}
    asked = tuple(
        sorted(
            (
                item
                for item in calls.values()
                if window_of(windows, item.start_ns) is not None
                and (item.correlation in served or launches_work(item.name) or "Synchronize" in item.name)
            ),
            key=lambda item: (item.start_ns, -item.end_ns),
        )
    )
    if dropped:
        told.append(
            f"{dropped} records were dropped for want of buffers: kernels are missing, capture fewer inferences"
        )
    if impossible:
        told.append(f"{impossible} records without a start or an end were left out: the device was not done with them")
    if late:
        told.append(f"{late} activities ended after the call that asked for them had returned")
    if not kept:
        told.append(f"the device did nothing in these {len(windows)} inferences ({outside} activities lie outside)")
    return Capture(
        activities=tuple(kept),
        launch_ns=None if launches is None else _inside(asked),
        inferences=windows,
        instrument=instrument,
        warnings=tuple(told),
        launches=asked,
    )


def window_of(windows: Sequence[tuple[int, int]], moment: int) -> int | None:
    """The number of the window the moment lies in; the windows are sorted and do not overlap."""
    number = bisect_right(windows, (moment, 1 << 63)) - 1
    return number if number >= 0 and moment <= windows[number][1] else None


def _inside(calls: Sequence[Launch]) -> int:
    """The time inside launching calls, each thread for itself: a call of the runtime contains one of the driver."""
    by_thread: Mapping[int, list[tuple[int, int]]] = defaultdict(list)
    for call in calls:
        if launches_work(call.name):
            by_thread[call.thread].append((call.start_ns, call.end_ns))
    total = 0
    for intervals in by_thread.values():
        reached = 0
        for start, end in sorted(intervals):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total


class Covered:
    """Whether a moment lies in any of many intervals."""

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def at(self, moment: int) -> bool:
        number = bisect_right(self._starts, moment) - 1
        return number >= 0 and moment <= self._ends[number]


class Innermost:
    """The innermost span at a moment, of spans that nest within their thread."""

    def __init__(self, spans: Iterable[HostSpan]) -> None:
        by_thread: dict[int | None, list[HostSpan]] = defaultdict(list)
        for span in spans:
            by_thread[span.thread].append(span)
        self._threads = {
            thread: _steps(sorted(found, key=lambda span: (span.start_ns, -span.end_ns)))
            for thread, found in by_thread.items()
        }

    def at(self, moment: int, thread: int) -> str | None:
        for where in (thread, None):
            if where in self._threads:
                starts, names = self._threads[where]
                number = bisect_right(starts, moment) - 1
                if number >= 0 and names[number] is not None:
                    return names[number]
        return None


def _steps(spans: Sequence[HostSpan]) -> tuple[list[int], list[str | None]]:
    """What is innermost from which moment on."""
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
