"""Runs inputs in worker processes under a watchdog, and keeps each distinct fault with an input that shows it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fuzz.checks import Fault, place_of
from fuzz.inputs import Input
from fuzz.worker import CPU_S

WALL_S = 240.0
"""Time one input may take on a machine that others use too; its processor time is bounded by `CPU_S`."""
TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    passed: int = 0
    """Inputs of which a call ended with 0: the parser took them."""
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, Found] = field(default_factory=dict)
    """By kind and place."""

    @property
    def share(self) -> float:
        """The part of the inputs that passed the parser."""
        return self.passed / self.inputs if self.inputs else 0.0


@dataclass
class Found:
    """One distinct fault: how often it came, and the smallest input that showed it."""

    fault: Fault
    input: Input
    count: int = 1


class Died(Exception):
    """The worker ended while it ran an input, or was ended because the input took too long."""

    def __init__(self, fault: Fault, index: int) -> None:
        super().__init__(fault.key)
        self.fault, self.index = fault, index
        self.add_note(fault.text)


class Watched:
    """A worker process that is started when it is needed and again when an input ended it."""

    def __init__(self, python: str = sys.executable, cpu_s: float = 1.5 * CPU_S) -> None:
        self._python, self._cpu_limit_s = python, cpu_s
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: dict[str, Any], hear: Callable[[dict[str, Any]], None] = lambda message: None) -> dict[str, Any]:
        """Give the worker a job and wait; `Died` when an input ended it."""
        if self._process is None:
            self._start()
        self._send(job)
        index = -1
        while True:
            message = self._next(index)
            if "begin" in message:
                index = message["begin"]
                self._begin()
            elif message.get("done"):
                return message
            else:
                hear(message)

    def _start(self) -> None:
        in_memory = (
            os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30
        )  # a container has 64 MiB
        place = "/dev/shm" if in_memory else None
        self._root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=place)).resolve()
        self._log = self._root.with_suffix(".log")
        read, write = os.pipe()
        path = os.pathsep.join([str(TESTS), *(item for item in sys.path if item and "zip" not in item)])
        self._process = subprocess.Popen(
            [self._python, "-m", "fuzz.worker", str(write), str(self._root), str(self._log)], stdin=subprocess.PIPE,
            pass_fds=[write],
            cwd=self._root, env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read, "rb")
        os.set_blocking(read, False)
        self._buffer = b""
        self._begin()
        if not self._next(-1).get("ready"):
            raise RuntimeError("the worker did not start")

    def _send(self, job: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def _begin(self) -> None:
        self._since, self._cpu = time.monotonic(), self._cpu_s()

    def _cpu_s(self) -> float:
        assert self._process is not None
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system + times.children_user + times.children_system)

    def _next(self, index: int) -> dict[str, Any]:
        """The next message; `Died` when there is none and there will be none."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if selector.select(0.5):
                    more = self._answers.read()
                    if more == b"":
                        raise self._dead(index)
                    self._buffer += more or b""
                elif time.monotonic() - self._since > WALL_S or self._cpu_s() - self._cpu > self._cpu_limit_s:
                    raise self._hanging(index)
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _hanging(self, index: int) -> Died:
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)  # the worker writes where it is
        time.sleep(0.5)
        trace = self._trace()
        self.close(kill=True)
        return Died(Fault("hang", place_of(trace), "still running"), index)

    def _dead(self, index: int) -> Died:
        assert self._process is not None and self._process.stderr is not None
        code = self._process.wait()
        text = self._trace() or self._process.stderr.read().decode(errors="replace")[-2000:]
        self.close(kill=True)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Died(Fault("process ended", f"{name} in {place_of(text)}", text[-300:]), index)

    def _trace(self) -> str:
        """The innermost frames last, as Python prints an exception; faulthandler has them first."""
        with contextlib.suppress(OSError):
            text = self._log.read_text()
            if text.startswith("Traceback"):
                return text
            newest = text[max(text.rfind("Current thread"), text.rfind("Fatal Python error"), 0) :]
            lines = [line.strip() for line in newest.splitlines() if line.strip().startswith("File")]
            return "\n".join(reversed(lines))
        return ""

    def close(self, kill: bool = False) -> None:
        """End the worker, and everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if not kill:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                assert process.stdin is not None
                process.stdin.close()
                process.wait(20)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stderr, self._answers):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self._root, ignore_errors=True)
        self._log.unlink(missing_ok=True)


def fuzz(worker: Watched, target: str, seed: int, count: int, *, start: int = 0, until: float | None = None) -> Result:
    """Run `count` inputs of a target, or as many as there is time for until that moment of `time.monotonic`."""
    result = Result(target)
    began, at = time.monotonic(), start

    def hear(message: dict[str, Any]) -> None:
        nonlocal at
        if "end" not in message:
            return
        at = message["end"] + 1
        result.inputs += 1
        result.passed += 0 in message["codes"]
        result.codes.update(str(code) for code in message["codes"])
        for found in message["faults"]:
            key = found.pop("key")
            _keep(result, key, Fault(**found), Input.from_json(message["input"]))

    while at < start + count and (until is None or time.monotonic() < until):
        stop = min(start + count, at + 200) if until is not None else start + count
        try:
            worker.ask({"target": target, "seed": seed, "start": at, "stop": stop}, hear)
        except Died as death:
            if death.index < 0:
                raise
            result.inputs += 1
            at = death.index + 1
            _keep(result, death.fault.key, death.fault, made(worker, target, seed, death.index))
    result.seconds = time.monotonic() - began
    return result


def _keep(result: Result, key: str, fault: Fault, item: Input) -> None:
    old = result.faults.get(key)
    if old is None:
        result.faults[key] = Found(fault, item)
        return
    old.count += 1
    if sum(map(len, item.files.values())) < sum(map(len, old.input.files.values())):
        old.input = item


def made(worker: Watched, target: str, seed: int, index: int) -> Input:
    """The input itself, without running it."""
    found: list[Input] = []
    worker.ask(
        {"make": True, "target": target, "seed": seed, "start": index},
        lambda message: found.append(Input.from_json(message["input"])),
    )
    return found[0]


def replay(worker: Watched, item: Input) -> list[Fault]:
    """The faults of one input, run alone."""
    found: list[Fault] = []

    def hear(message: dict[str, Any]) -> None:
        for fault in message.get("faults", ()):
            fault.pop("key")
            found.append(Fault(**fault))

    try:
        worker.ask({"input": item.to_json()}, hear)
    except Died as death:
        found.append(death.fault)
    return found
