"""Run a load: in this process, or its shares in several that start at the same time."""

from __future__ import annotations

import contextlib
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.errors import TrtEngineError
from trt_engine.verbs.loadtest.live import LiveText, Moment, MomentMeter
from trt_engine.verbs.loadtest.samples import LoadWindow, OnTick, SampleArrays
from trt_engine.verbs.loadtest.target import Target
from trt_engine.workers.crash import restore_error
from trt_engine.workers.messages import ErrorMessage, LogMessage
from trt_engine.workers.process import ChildProcess, spawn_worker

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
