"""Ctrl-C at random moments of a build: what each press ended, how soon, and what was left behind.

`benchmarks/interrupted_builds.py` runs many of them; tests/rtx/test_rtx_interrupted.py a few.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patience import HANG_S
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError

_BEGUN = "] building `"
"""What a build prints as its backend takes over."""
ONE_PRESS_S, TWO_PRESSES_S = 5.0, 1.0
"""How long a command may take to end after one press of Ctrl-C, and after a second one."""
_KEPT = (".cache", ".lock", ".log")
"""Of the store, after an interrupted build: timing caches, locks and raw logs."""
_FOREIGN = (".ses",)
"""In the temporary folder: ONNX Runtime's own, of every process that has imported it."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """One build that got SIGINT as a terminal sends it: to the whole process group."""

    at_s: float
    """Seconds from the beginning of the build to the first press."""
    gap_s: float | None
    """Seconds from the first press to the second; None for one press."""
    code: int
    ended_s: float
    """Seconds from the last press that was sent to the end of the process."""
    left: tuple[str, ...]
    """Files that should not be there."""
    stderr: str

    @property
    def finished(self) -> bool:
        """Whether the build was done before the press came."""
        return self.code == 0

    def faults(self, slower: float = 1.0) -> list[str]:
        """What is wrong; a machine that is `slower` by a factor may take so much longer."""
        found = [f"left {name}" for name in self.left]
        if self.finished:
            return found
        if self.code != 130:
            found.append(f"exit code {self.code}")
        if "Traceback" in self.stderr:
            found.append("a stack trace")
        if [line for line in self.stderr.splitlines() if "error: " in line] != ["error: interrupted"]:
            found.append("not one error message")
        limit_s = slower * (ONE_PRESS_S if self.gap_s is None else TWO_PRESSES_S)
        if self.ended_s > limit_s:
            found.append(f"ended after {self.ended_s:.1f} s, {limit_s:g} s allowed")
        return found


class _Build:
    """A running command, its messages read as they come."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        (folder / "tmp").mkdir()
        self.process = subprocess.Popen(
            [*command, "-o", str(folder / "out" / "net.engine")],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=_default_sigint,
            env=os.environ | {"TRT_ENGINE_STORE": str(folder / "store"), "TMPDIR": str(folder / "tmp")},
        )  # fmt: skip
        self._lines: list[str] = []
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._begun.wait(HANG_S), "the build never begins"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if _BEGUN in line:
                self._begun.set()
        self._begun.set()

    def press(self) -> float:
        """Press Ctrl-C; the time of it."""
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        return at

    def ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> str:
        """Its messages, once it has ended; it is killed if it has not."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return "".join(self._lines)


def build_length(command: Sequence[str]) -> float:
    """Seconds from the beginning of a whole build to the end of the command, which has to succeed."""
    with tempfile.TemporaryDirectory() as folder:
        build, begun = _Build(command, Path(folder)), time.monotonic()
        build.ends_within(HANG_S)
        length_s, stderr = time.monotonic() - begun, build.end()
    assert build.process.returncode == 0, stderr
    return length_s


def interrupt_builds(command: Sequence[str], length_s: float, count: int, seed: int = 0) -> Iterator[Interrupted]:
    """Interrupt that many runs of `command`, a build of `length_s` seconds; every other one gets a second press.

    `-o` is added to the command. Each run has its own folder, store and temporary folder. Runs that were over before the
    press came are not counted.
    """
    draw, interrupted = random.Random(seed), 0
    while interrupted < count:
        # every other second press comes before even a quick end: otherwise one press may have been enough each time
        at_s, gap_s = (
            draw.uniform(0, length_s),
            draw.uniform(0.02, 0.1) if interrupted % 4 == 1 else draw.uniform(0.3, 2),
        )
        with tempfile.TemporaryDirectory() as folder:
            found = _interrupt(command, Path(folder), at_s, gap_s if interrupted % 2 else None)
        yield found
        if found.finished:
            length_s = min(length_s, at_s)
        else:
            interrupted += 1


def _interrupt(command: Sequence[str], folder: Path, at_s: float, gap_s: float | None) -> Interrupted:
    build = _Build(command, folder)
    try:
        build.ends_within(at_s)
        pressed = build.press()
        if gap_s is not None and build.ends_within(gap_s):
            gap_s = None  # one press was enough
        elif gap_s is not None:
            pressed = build.press()
        build.ends_within(HANG_S)
        ended_s = time.monotonic() - pressed
    finally:
        stderr = build.end()
    code = build.process.returncode
    return Interrupted(at_s, gap_s, code, ended_s, _left(folder, code), stderr)


def _default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it


def _left(folder: Path, code: int) -> tuple[str, ...]:
    """What should not be there after the command."""
    found = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    if code == 0 or _is_delivered(folder / "out" / "net.engine"):
        return tuple(name for name in found if name.endswith(".tmp") or _temporary(name))
    whole = {path.parent for path in (folder / "store" / "engines").glob("*/*.engine") if _is_delivered(path)}
    found = [name for name in found if (folder / name).parent not in whole]
    return tuple(name for name in found if _temporary(name) or not name.startswith(("store/", "tmp/")) or _half(name))


def _is_delivered(engine: Path) -> bool:
    """Whether the press came after a whole engine was there, in the store or where it was wanted: it stays."""
    try:
        Engine.open(engine).verify()
    except TrtEngineError:
        return False
    return True


def _temporary(name: str) -> bool:
    return name.startswith("tmp/") and not name.endswith(_FOREIGN)


def _half(name: str) -> bool:
    return name.startswith("store/") and not name.endswith(_KEPT)
