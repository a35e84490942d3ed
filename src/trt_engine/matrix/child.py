"""A cell in a process of its own: a crash, a hang or an out-of-memory kill there is that cell's result, and no other's.

The child gets one job on its stdin and answers on a pipe of its own, one JSON message a line. What it and its libraries
print goes to the cell's log. It never outlives its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from trt_engine.cells import CellResult
from trt_engine.errors import EngineError, Interrupted, MemoryExhausted, TrtEngineError
from trt_engine.files import ensure_folder
from trt_engine.matrix.work import LOGS, Job, carry_out, reason_of
from trt_engine.processes import Ended, Mouth, die_with_parent, read_line, reap, spawned

__all__ = ["Ending", "in_child"]

log = logging.getLogger("trt_engine.matrix.child")  # in the child this module is `__main__`

_GRACE_S = 10.0
"""How long a child that was asked to stop may take: a measurement writes what it has."""
_BEAT_S = 30.0


class Begun(msgspec.Struct, tag="step"):
    """A step of the cell began."""

    step: str


class Said(msgspec.Struct, tag="log"):
    """A warning of the child."""

    text: str


class Answer(msgspec.Struct, tag="result"):
    """What became of the cell."""

    result: CellResult


_answers = msgspec.json.Decoder(Begun | Said | Answer)
_jobs = msgspec.json.Decoder(Job)


class Ending(Exception):
    """The run was told to stop while a cell was at work; `result` is that cell's."""

    def __init__(self, result: CellResult) -> None:
        super().__init__("interrupted")
        self.result = result


# ------------------------------------------------------------------------------------------------ the parent's side


def in_child(
    job: Job, *, timeout_s: float | None = None, on_step: Callable[[str, float], None] = lambda step, seconds: None
) -> CellResult:
    """The result of the job, done in a child; `Ending` when Ctrl-C ended it.

    `on_step` hears each step as it begins, and every half minute that it is still at it, with the seconds until then.
    """
    place = Path(job.run) / LOGS / f"{job.spec.label}.log"
    ensure_folder(place.parent)
    began = time.monotonic()
    with place.open("wb") as noise:
        child = _Child(job, noise.fileno())
        told: TrtEngineError | None = None
        try:
            result = child.listen(timeout_s, on_step)
        except msgspec.DecodeError as error:  # a number that JSON does not have, deep in a result
            result = None
            told = EngineError(
                f"the cell's result cannot be read: {error}", hint=f"`{LOGS}/{place.name}` has what it said"
            )
        except TimeoutError:
            result = None
            told = EngineError(
                f"the cell took longer than {timeout_s:g} s in `{child.step}` and was stopped",
                hint="`timeout:` in the plan allows more",
            )
            child.grace_s = 0.0
        except KeyboardInterrupt:
            child.ask_to_stop()
            result = None
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):  # a second Ctrl-C, or no answer: end it now
                result = child.listen(_GRACE_S, on_step)
            child.grace_s = 1.0
            result = result or CellResult(
                job.spec, "interrupted", reason="interrupted", exit_code=Interrupted.exit_code
            )
            raise Ending(_with_log(result, job, began)) from None
        finally:
            ended = child.close()
    if result is None:
        why = told or _crash(ended, child.step, place)
        result = CellResult(job.spec, "failed", reason=reason_of(why, job), exit_code=why.exit_code)
    return _with_log(result, job, began)


def _with_log(result: CellResult, job: Job, began: float) -> CellResult:
    seconds = result.seconds or round(time.monotonic() - began, 3)
    return replace(result, seconds=seconds, files={"log": f"{LOGS}/{job.spec.label}.log", **result.files})


def _crash(ended: Ended, step: str, place: Path) -> TrtEngineError:
    """The error behind a child that ended without an answer."""
    name = signal.Signals(-ended.code).name if ended.code < 0 else f"exit code {ended.code}"
    tail = place.read_bytes()[-4000:].decode(errors="replace").lower()
    if ended.code == -signal.SIGKILL or any(
        word in tail for word in ("bad_alloc", "out of memory", "cannot allocate memory")
    ):
        return MemoryExhausted(
            f"the cell's process ended by {name} in `{step}`, with {ended.peak_bytes >> 20} MiB in use",
            hint="a smaller batch, or a machine with more memory",
        )
    return EngineError(
        f"the cell's process ended by {name} in `{step}`", hint=f"`{LOGS}/{place.name}` has what it printed"
    )


class _Child:
    """The process and the pipe it answers on."""

    def __init__(self, job: Job, noise: int) -> None:
        self.step = "start"
        self.grace_s = _GRACE_S
        self._buffer = b""
        self._process, self._pipe = spawned("trt_engine.matrix.child", msgspec.json.encode(job), noise)

    def listen(self, patience_s: float | None, on_step: Callable[[str, float], None]) -> CellResult | None:
        """The child's result, None when it ended without one; `TimeoutError` when neither comes."""
        now = time.monotonic()
        deadline = None if patience_s is None else now + patience_s
        since, beat = now, now + _BEAT_S
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN | select.POLLHUP)
        while True:
            while (end := self._buffer.find(b"\n")) >= 0:
                line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
                match _answers.decode(line):
                    case Answer(result=result):
                        return result
                    case Begun(step=step):
                        self.step, since = step, time.monotonic()
                        beat = since + _BEAT_S
                        on_step(step, 0.0)
                    case Said(text=text):
                        log.debug("%s", text)  # its result has it too
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError
            wait_s = beat - now if deadline is None else min(beat, deadline) - now
            if not poll.poll(max(wait_s, 0.0) * 1000):
                if time.monotonic() >= beat:
                    on_step(self.step, time.monotonic() - since)
                    beat = time.monotonic() + _BEAT_S
                continue
            chunk = os.read(self._pipe, 1 << 20)
            if not chunk:
                return None
            self._buffer += chunk

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> Ended:
        """Let it end by itself if it is about to, end it otherwise, and reap it."""
        try:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()  # the child ends when this does
            return reap(self._process, self.grace_s)
        finally:
            os.close(self._pipe)


# ------------------------------------------------------------------------------------------------ the child's side


def _asked_to_stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """The child: one job, one answer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _asked_to_stop)
    mouth = Mouth(int(sys.argv[1]), lambda record: Said(record.getMessage()), logging.WARNING)
    job = _jobs.decode(read_line())
    die_with_parent()
    package = logging.getLogger("trt_engine")
    package.setLevel(min(job.log_level, logging.INFO))
    package.addHandler(mouth)
    kept = logging.StreamHandler(sys.stderr)  # the cell's log
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package.addHandler(kept)
    package.propagate = False
    try:
        result = carry_out(job, lambda step: mouth.say(Begun(step)))
    except Interrupted as stop:
        result = _partial(stop.partial, job)
    except KeyboardInterrupt:
        result = _partial(None, job)
    mouth.say(Answer(result))


def _partial(partial: Any, job: Job) -> CellResult:
    if isinstance(partial, CellResult):
        return partial
    return CellResult(job.spec, "interrupted", reason="interrupted", exit_code=Interrupted.exit_code)


if __name__ == "__main__":
    main()
