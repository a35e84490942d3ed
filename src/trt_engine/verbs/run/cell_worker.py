"""Runs a cell in a worker process, so that a crash, a hang or an out-of-memory kill affects that cell only.

The worker reads one job from stdin and reports on a pipe, one JSON message per line. Its output and that of its libraries
goes to the cell's log. It exits with its parent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from trt_engine.atomic_io import ensure_folder
from trt_engine.errors import EngineError, Interrupted, MemoryExhausted, TrtEngineError
from trt_engine.records.sweep import CellResult
from trt_engine.verbs.run.cell_runner import LOGS, CellJob, failure_reason, run_cell
from trt_engine.workers.crash import exit_name, ran_out_of_memory
from trt_engine.workers.messages import LogMessage, receive_request
from trt_engine.workers.process import ChildProcess, ExitStatus, StopSignal, spawn_worker

log = logging.getLogger("trt_engine.verbs.run.cell_worker")  # in the child this module is `__main__`

_GRACE_S = 10.0
"""Seconds for a worker to exit after its result."""
_STOP_TIMEOUT_S, _EXIT_TIMEOUT_S = 2.6, 0.4
"""Seconds for an interrupted worker to report its partial result, and then to exit: a command ends within 5 s of Ctrl-C."""
_HEARTBEAT_S = 30.0


class StepStarted(msgspec.Struct, tag="step"):
    """A step of the cell started."""

    step: str


class Result(msgspec.Struct, tag="result"):
    """The result of the cell."""

    result: CellResult


_message_decoder = msgspec.json.Decoder(StepStarted | LogMessage | Result)
_job_decoder = msgspec.json.Decoder(CellJob)


class CellInterrupted(Exception):
    """The run was interrupted during a cell; `result` is that cell's."""

    def __init__(self, result: CellResult) -> None:
        super().__init__("interrupted")
        self.result = result


# ------------------------------------------------------------------------------------------------ parent


def run_in_worker(
    job: CellJob, *, timeout_s: float | None = None, on_step: Callable[[str, float], None] = lambda step, seconds: None
) -> CellResult:
    """Run the job in a worker process and return its result; raises `CellInterrupted` on Ctrl-C.

    `on_step` is called with each step and 0 when it starts, and every 30 s with the elapsed seconds.
    """
    place = Path(job.run_folder) / LOGS / f"{job.spec.label}.log"
    ensure_folder(place.parent)
    began = time.monotonic()
    step, grace_s = _CurrentStep(on_step), _GRACE_S
    failure: TrtEngineError | None = None
    result = None
    with place.open("wb") as output:
        child = spawn_worker("trt_engine.verbs.run.cell_worker", msgspec.json.encode(job), output)
        try:
            result = _wait_for_result(child, timeout_s, step)
        except msgspec.DecodeError as error:  # such as a NaN in a result
            failure = EngineError(f"the cell's result cannot be read: {error}", hint=f"see `{LOGS}/{place.name}`")
        except TimeoutError:
            failure = EngineError(
                f"the cell took longer than {timeout_s:g} s in `{step.name}` and was stopped",
                hint="`timeout:` in the plan allows more",
            )
            grace_s = 0.0
        except KeyboardInterrupt:
            child.interrupt()
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):  # a second Ctrl-C, or no result: kill it
                result = _wait_for_result(child, _STOP_TIMEOUT_S, step)
            grace_s = _EXIT_TIMEOUT_S
            raise CellInterrupted(_add_log(result or _interrupted_result(job), job, began)) from None
        finally:
            ended = child.close(grace_s)
    if result is None:
        why = failure or _crash_error(ended, step.name, place)
        result = CellResult(job.spec, "failed", reason=failure_reason(why, job), exit_code=why.exit_code)
    return _add_log(result, job, began)


def _add_log(result: CellResult, job: CellJob, began: float) -> CellResult:
    seconds = result.seconds or round(time.monotonic() - began, 3)
    return replace(result, seconds=seconds, files={"log": f"{LOGS}/{job.spec.label}.log", **result.files})


def _crash_error(ended: ExitStatus, step: str, log_path: Path) -> TrtEngineError:
    """The error for a worker that exited without a result."""
    name = exit_name(ended.code)
    tail = log_path.read_bytes()[-4000:].decode(errors="replace")
    if ran_out_of_memory(ended, tail):
        return MemoryExhausted(
            f"the cell's process ended by {name} in `{step}`, with {ended.peak_bytes >> 20} MiB in use",
            hint="use a smaller batch, or a machine with more memory",
        )
    return EngineError(f"the cell's process ended by {name} in `{step}`", hint=f"see `{LOGS}/{log_path.name}`")


class _CurrentStep:
    """The step that the worker is in, and how long."""

    def __init__(self, on_step: Callable[[str, float], None]) -> None:
        self._on_step = on_step
        self.name = "start"
        self._since = self.reported = time.monotonic()

    def report(self, started: str | None = None) -> None:
        self.reported = time.monotonic()
        if started is not None:
            self.name, self._since = started, self.reported
        self._on_step(self.name, self.reported - self._since)


def _wait_for_result(child: ChildProcess, timeout_s: float | None, step: _CurrentStep) -> CellResult | None:
    """The worker's result, None if it exited without one; raises `TimeoutError`."""
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    while (now := time.monotonic()) < deadline:
        try:
            line = child.read_line(min(step.reported + _HEARTBEAT_S, deadline) - now)
        except TimeoutError:
            if time.monotonic() < deadline:
                step.report()
            continue
        if line is None:
            return None
        match _message_decoder.decode(line):
            case Result(result=result):
                return result
            case StepStarted(step=name):
                step.report(name)
            case LogMessage(text=text):
                log.debug("%s", text)  # also in its result
    raise TimeoutError


# ------------------------------------------------------------------------------------------------ worker


def main() -> None:
    """Worker entry point: run one job and send its result."""
    StopSignal()
    pipe, raw = receive_request()
    job = _job_decoder.decode(raw)
    pipe.setLevel(logging.WARNING)
    package = logging.getLogger("trt_engine")
    package.setLevel(min(job.log_level, logging.INFO))
    kept = logging.StreamHandler(sys.stderr)  # the cell's log
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package.addHandler(kept)
    package.propagate = False
    try:
        result = run_cell(job, lambda step: pipe.send(StepStarted(step)))
    except Interrupted as stop:
        result = stop.partial if isinstance(stop.partial, CellResult) else _interrupted_result(job)
    except KeyboardInterrupt:
        result = _interrupted_result(job)
    pipe.send(Result(result))


def _interrupted_result(job: CellJob) -> CellResult:
    return CellResult(job.spec, "interrupted", reason="interrupted", exit_code=Interrupted.exit_code)


if __name__ == "__main__":
    main()
