"""The trtexec program: where it is, which version, which options it has, and one run of it.

A run has a process group of its own, because 11.1's tuner starts children: Ctrl-C, an error here and a time limit end all of
it. Both its streams are read as one, in the order they were written: information goes to stdout, errors to stderr.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trt_engine.errors import SetupError
from trt_engine.files import explain
from trt_engine.plans.causes import cause_of
from trt_engine.plans.installed import TRTEXEC_VARIABLE, find_trtexec
from trt_engine.plans.trtexec_log import Line, read_line, split
from trt_engine.plans.versions import Version

__all__ = ["Program", "Ran", "find"]

log = logging.getLogger(__name__)

_PROBE_S = 60.0
_SILENCE_S = 60.0
_GRACE_S = 5.0
_INSTALL = (
    "install TensorRT's `libnvinfer-bin` (Debian) or its tar file, and put trtexec on PATH or its path in "
    f"{TRTEXEC_VARIABLE}"
)
_BANNER = re.compile(r"\[TensorRT v(?P<version>\d+)\](?: \[b(?P<build>\d+)\])?")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][A-Za-z0-9]*")
_TOLD = re.compile(
    r"^(?:Start parsing|Finished parsing|Engine built in|Created engine|Loaded engine|Engine deserialized|"
    r"Starting inference|Warmup completed|Throughput:|Engine generation completed|Local timing cache|"
    r"Successfully captured CUDA graph)"
)
"""What is worth saying while it runs; the rest is debugging's."""
_WHOLE_HELP = 40
"""Options in the shortest help of any version are twice as many."""
_LATER = (99,)
_SINCE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "skipInference": ((8, 6), _LATER), "builderOptimizationLevel": ((8, 6), _LATER), "maxAuxStreams": ((8, 6), _LATER),
    "staticPlugins": ((8, 6), _LATER), "setPluginsToSerialize": ((8, 6), _LATER), "versionCompatible": ((8, 6), _LATER),
    "excludeLeanRuntime": ((8, 6), _LATER), "leanDLLPath": ((8, 6), _LATER),
    "hardwareCompatibilityLevel": ((8, 6), _LATER), "dumpRawBindingsToFile": ((8, 6), _LATER),
    "preview": ((8, 5), _LATER), "infStreams": ((8, 6), _LATER), "noTF32": ((8, 5), _LATER),
    "profile": ((9,), _LATER), "useProfile": ((9,), _LATER), "errorOnTimingCacheMiss": ((9,), _LATER),
    "noCompilationCache": ((9,), _LATER), "stronglyTyped": ((9,), _LATER), "bf16": ((9,), (11,)), "fp8": ((8, 6), (11,)),
    "fp16": ((8, 5), (11,)), "int8": ((8, 5), (11,)), "int4": ((10, 1), (11,)), "weightless": ((9, 3), (11,)),
    "stripWeights": ((10,), _LATER), "allowWeightStreaming": ((10,), _LATER), "weightStreamingBudget": ((10,), _LATER),
    "allocationStrategy": ((10,), _LATER), "runtimePlatform": ((10, 2), _LATER), "maxTactics": ((10, 4), _LATER),
    "tilingOptimizationLevel": ((10, 8), _LATER), "l2LimitForTiling": ((10, 8), _LATER),
    "distributiveIndependence": ((10, 12), _LATER), "setBuildRoute": ((11, 1), _LATER),
}  # fmt: skip
"""The first version with an option, and the first without it again."""
_EXPECTED = ("Could not read cache from", "Could not read timing cache from")


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: how it ended and what it said."""

    command: str
    exit_code: int
    """Negative for a signal, as Python has it."""
    lines: tuple[str, ...]
    seconds: float

    @property
    def killed(self) -> bool:
        """True when a signal ended it that it did not send itself: the kernel out of memory, a person."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM, 137, 143)


@dataclass(frozen=True, slots=True)
class Program:
    """trtexec of one version."""

    path: Path
    version: tuple[int, ...]
    build: int | None
    options: frozenset[str]
    """What its help lists, with the dashes."""

    @property
    def text(self) -> str:
        """The version as far as the banner tells it: `10.16.1.11`, `8.5.2`."""
        return ".".join(map(str, (*self.version, *(() if self.build is None else (self.build,)))))

    def has(self, option: str) -> bool:
        """True when its help lists `--option`; of a help too short to be whole the version decides."""
        if f"--{option}" in self.options or len(self.options) >= _WHOLE_HELP:
            return f"--{option}" in self.options
        first, end = _SINCE.get(option, ((99,), (99,)))
        return first <= self.version < end

    def run(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        raw_log: Path | None = None,
        heard: Callable[[Line], None] | None = None,
        quiet: bool = False,
    ) -> Ran:
        """Run it in `folder` until it ends. `heard` gets every line as it is said, and ends the run by raising.

        `raw_log` gets the command line and then all that is said, at once; what was in it stays above.
        """
        command = shlex.join([str(self.path), *words])
        log.debug("running: %s", command)
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            sink = None
            if raw_log is not None:
                try:
                    sink = stack.enter_context(raw_log.open("ab", buffering=0))
                    sink.write(f"# {command}\n".encode(errors="replace"))
                except OSError as error:
                    raise explain(error, raw_log) from error
            process = _started([str(self.path), *words], folder)
            stack.callback(_end, process)
            ears = _Ears(heard, quiet=quiet)
            _listen(process, ears, _kept(sink, raw_log) if sink is not None else None)
            process.wait()
        return Ran(command, process.returncode, tuple(ears.lines), time.monotonic() - started)


def find() -> Program:
    """The trtexec of this machine; `SetupError` where there is none or it does not start."""
    path = find_trtexec(Path("/"), os.environ)
    if path is None:
        raise SetupError("no trtexec was found on PATH or in NVIDIA's folders", hint=_INSTALL)
    if not path.is_file() or not os.access(path, os.X_OK):
        raise SetupError(f"`{path}` is no program that can be run", hint=f"{TRTEXEC_VARIABLE} names it; {_INSTALL}")
    return _probed(path.absolute(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _probed(path: Path, mtime_ns: int) -> Program:
    """Version and options from `--help`: there is no `--version`, and the help prints the banner."""
    try:
        done = subprocess.run(
            [str(path), "--help"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_PROBE_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise SetupError(f"`{path}` cannot be run: {os.strerror(error.errno or 0).lower()}", hint=_INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"`{path} --help` did not answer within {_PROBE_S:.0f} s", hint="`nvidia-smi`") from error
    said = done.stdout.decode(errors="replace")
    banner = _BANNER.search(said)
    if banner is None:
        cause = cause_of(said.splitlines())
        first = next((line for line in said.splitlines() if line.strip()), f"nothing (exit code {done.returncode})")
        raise SetupError(
            f"`{path}` does not start as trtexec does: {cause.text if cause else first.strip()}",
            hint=cause.hint if cause else _INSTALL,
        )
    return Program(
        path,
        Version.of_number(int(banner["version"])).parts,
        int(banner["build"]) if banner["build"] else None,
        frozenset(_OPTION.findall(said)),
    )


# ------------------------------------------------------------------------------------------------ one run


def _started(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
            start_new_session=True, bufsize=0,
        )  # fmt: skip
    except OSError as error:
        raise SetupError(f"`{words[0]}` cannot be run: {error.strerror or error}", hint=_INSTALL) from error


def _kept(sink: io.RawIOBase, path: Path | None) -> Callable[[bytes], object]:
    """Writes all of what it is given; a disk that is full costs the log, not an hour of building."""
    lost = False

    def keep(chunk: bytes) -> None:
        nonlocal lost
        rest = memoryview(chunk)
        try:
            while rest and not lost:
                rest = rest[sink.write(rest) or 0 :]
        except OSError as error:
            lost = True
            log.warning("the rest of the raw log `%s` is lost: %s", path, error.strerror or error)

    return keep


class _Ears:
    """Keeps the lines, says what is worth saying, passes each on."""

    def __init__(self, heard: Callable[[Line], None] | None, *, quiet: bool) -> None:
        self.lines: list[str] = []
        self.last = ""
        self._heard = heard
        self._level = logging.DEBUG if quiet else logging.INFO
        self._warned: set[str] = set()
        self._rest = b""

    def take(self, chunk: bytes) -> None:
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for raw in whole:
            self._line(raw.decode(errors="replace"))

    def finish(self) -> None:
        if self._rest:
            self._line(self._rest.decode(errors="replace"))
            self._rest = b""

    def _line(self, raw: str) -> None:
        for part in split(raw) or [""]:
            self.lines.append(part)
            line = read_line(part)
            if line.text.strip():
                self.last = line.text.strip()
            self._say(line)
            if self._heard is not None:
                self._heard(line)

    def _say(self, line: Line) -> None:
        text = line.text.strip()
        if line.severity == "I" and _TOLD.match(text):
            log.log(self._level, "trtexec: %s", text)
        elif line.severity in ("W", "E", "F") and text not in self._warned and not text.startswith(_EXPECTED):
            self._warned.add(text)  # TensorRT repeats itself for every tactic
            log.log(
                logging.WARNING if line.severity == "W" and not line.from_library else self._level, "trtexec: %s", text
            )
        else:
            log.debug("trtexec: %s", text)


def _listen(process: subprocess.Popen[bytes], ears: _Ears, keep: Callable[[bytes], object] | None) -> None:
    """Read until both streams are closed, or the program is gone and only a child of it holds them."""
    assert process.stdout is not None
    pipe, heard_at, told_at = process.stdout.fileno(), time.monotonic(), time.monotonic()
    while True:
        ready, _, _ = select.select([pipe], [], [], min(1.0, _SILENCE_S))
        now = time.monotonic()
        if ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                break
            heard_at = told_at = now
            if keep is not None:
                keep(chunk)
            ears.take(chunk)
        elif process.poll() is not None:
            break
        elif now - told_at >= _SILENCE_S:
            told_at = now
            log.info("trtexec is alive and has said nothing for %.0f s; its last words: %s", now - heard_at, ears.last)
    ears.finish()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the group is left; asked to end first, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # nobody is left
            break
        until = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if process.poll() is not None and number == signal.SIGTERM:
            continue  # the leader is gone; whoever of its children did not listen is made to
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
