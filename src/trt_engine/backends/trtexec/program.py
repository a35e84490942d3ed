"""The trtexec program: path, version, options, and running it.

Each run is a separate process group, because 11.1's tuner starts children, and is terminated as a whole. stdout and stderr
are read as one stream, in order.
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
from trt_engine.trt.failure_causes import find_cause
from trt_engine.trt.installation import TRTEXEC_HELP_S, TRTEXEC_VARIABLE, banner_version, find_trtexec, trtexec_help
from trt_engine.trt.trtexec_log import LogLine, parse_line, split_lines
from trt_engine.workers.process import open_raw_log

log = logging.getLogger(__name__)

_SILENCE_S = 60.0
_GRACE_S = 2.5
_INSTALL = (
    "install TensorRT's `libnvinfer-bin` (Debian) or its tar file, and put trtexec on PATH or its path in "
    f"{TRTEXEC_VARIABLE}"
)
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][A-Za-z0-9]*")
_PROGRESS_LINE = re.compile(
    r"^(?:Start parsing|Finished parsing|Engine built in|Created engine|Loaded engine|Engine deserialized|"
    r"Starting inference|Warmup completed|Throughput:|Engine generation completed|Local timing cache|"
    r"Successfully captured CUDA graph)"
)
"""Lines logged as progress; others are logged at debug level."""
_MIN_HELP_OPTIONS = 40
"""A complete help lists at least twice as many options."""
_NO_END = (99,)
_OPTION_VERSIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "skipInference": ((8, 6), _NO_END), "builderOptimizationLevel": ((8, 6), _NO_END), "maxAuxStreams": ((8, 6), _NO_END),
    "staticPlugins": ((8, 6), _NO_END), "setPluginsToSerialize": ((8, 6), _NO_END), "versionCompatible": ((8, 6), _NO_END),
    "excludeLeanRuntime": ((8, 6), _NO_END), "leanDLLPath": ((8, 6), _NO_END),
    "hardwareCompatibilityLevel": ((8, 6), _NO_END), "dumpRawBindingsToFile": ((8, 6), _NO_END),
    "preview": ((8, 5), _NO_END), "infStreams": ((8, 6), _NO_END), "noTF32": ((8, 5), _NO_END),
    "profile": ((9,), _NO_END), "useProfile": ((9,), _NO_END), "errorOnTimingCacheMiss": ((9,), _NO_END),
    "noCompilationCache": ((9,), _NO_END), "stronglyTyped": ((9,), _NO_END), "bf16": ((9,), (11,)), "fp8": ((8, 6), (11,)),
    "fp16": ((8, 5), (11,)), "int8": ((8, 5), (11,)), "int4": ((10, 1), (11,)), "weightless": ((9, 3), (11,)),
    "stripWeights": ((10,), _NO_END), "allowWeightStreaming": ((10,), _NO_END), "weightStreamingBudget": ((10,), _NO_END),
    "allocationStrategy": ((10,), _NO_END), "runtimePlatform": ((10, 2), _NO_END), "maxTactics": ((10, 4), _NO_END),
    "tilingOptimizationLevel": ((10, 8), _NO_END), "l2LimitForTiling": ((10, 8), _NO_END),
    "distributiveIndependence": ((10, 12), _NO_END), "setBuildRoute": ((11, 1), _NO_END),
}  # fmt: skip
"""First version with an option, first version without it."""
_EXPECTED_ERRORS = ("Could not read cache from", "Could not read timing cache from")


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Exit code and output of one run."""

    command: str
    exit_code: int
    """Negative for a signal, as in `subprocess`."""
    lines: tuple[str, ...]
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether an external signal ended it, such as the OOM killer."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM, 137, 143)


@dataclass(frozen=True, slots=True)
class Program:
    """trtexec of one version."""

    path: Path
    version: tuple[int, ...]
    build: int | None
    options: frozenset[str]
    """Options listed by its help, with dashes."""

    @property
    def version_text(self) -> str:
        """The version in the banner: `10.16.1.11`, `8.5.2`."""
        return ".".join(map(str, (*self.version, *(() if self.build is None else (self.build,)))))

    def has(self, option: str) -> bool:
        """Whether its help lists `--option`; decided by version if the help is incomplete."""
        if f"--{option}" in self.options or len(self.options) >= _MIN_HELP_OPTIONS:
            return f"--{option}" in self.options
        first, end = _OPTION_VERSIONS.get(option, ((99,), (99,)))
        return first <= self.version < end

    def run(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        raw_log: Path | None = None,
        on_line: Callable[[LogLine], None] | None = None,
        quiet: bool = False,
    ) -> ProcessResult:
        """Run it in `folder` to completion. `on_line` is called with each line and stops the run by raising.

        The command line and the raw output are appended to `raw_log` unbuffered.
        """
        words = [str(self.path), *arguments]
        command = shlex.join(words)
        log.debug("running: %s", command)
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            sink = None if raw_log is None else stack.enter_context(open_raw_log(raw_log, command))
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
                    start_new_session=True, bufsize=0,
                )  # fmt: skip
            except OSError as error:
                raise SetupError(f"`{words[0]}` cannot be run: {error.strerror or error}", hint=_INSTALL) from error
            stack.callback(_terminate, process)
            reader = _OutputReader(on_line, sink, quiet=quiet)
            _read_output(process, reader)
            process.wait()
        return ProcessResult(command, process.returncode, tuple(reader.lines), time.monotonic() - started)


def find_program() -> Program:
    """The installed trtexec; `SetupError` if there is none or it does not start."""
    path = find_trtexec(Path("/"), os.environ)
    if path is None:
        raise SetupError("no trtexec was found on PATH or in NVIDIA's folders", hint=_INSTALL)
    if not path.is_file() or not os.access(path, os.X_OK):
        raise SetupError(f"`{path}` is not an executable program", hint=f"{TRTEXEC_VARIABLE} names it; {_INSTALL}")
    return _probe(path.absolute(), path.stat().st_mtime_ns)


def missing_program() -> str | None:
    """Why there is no trtexec to run; None where there is one."""
    try:
        find_program()
    except SetupError as error:
        return error.message
    return None


@lru_cache(maxsize=8)
def _probe(path: Path, mtime_ns: int) -> Program:
    """Version and options from `--help`."""
    try:
        said = trtexec_help(path, os.environ)
    except OSError as error:
        raise SetupError(f"`{path}` cannot be run: {os.strerror(error.errno or 0).lower()}", hint=_INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"`{path} --help` did not finish within {TRTEXEC_HELP_S:.0f} s", hint="`nvidia-smi`"
        ) from error
    if (version := banner_version(said)) is None:
        cause = find_cause(said.splitlines())
        first = next((line for line in said.splitlines() if line.strip()), "nothing")
        raise SetupError(
            f"`{path}` does not start as trtexec does: {cause.text if cause else first.strip()}",
            hint=cause.hint if cause else _INSTALL,
        )
    return Program(path, version.release.parts, (*version.parts, None)[3], frozenset(_OPTION.findall(said)))


# ------------------------------------------------------------------------------------------------ one run


class _OutputReader:
    """Splits output into lines, logs them, and passes them to a callback; the raw output goes to `sink`."""

    def __init__(self, on_line: Callable[[LogLine], None] | None, sink: io.FileIO | None, *, quiet: bool) -> None:
        self.lines: list[str] = []
        self.last = ""
        self._on_line = on_line
        self._sink = sink
        self._level = logging.DEBUG if quiet else logging.INFO
        self._warned: set[str] = set()
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        self._keep(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for raw in whole:
            self._line(raw.decode(errors="replace"))

    def finish(self) -> None:
        if self._rest:
            self._line(self._rest.decode(errors="replace"))
            self._rest = b""

    def _keep(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        try:
            while rest and self._sink is not None:
                rest = rest[self._sink.write(rest) or 0 :]
        except OSError as error:  # such as a full disk
            log.warning(
                "the rest of the raw log `%s` is lost: %s", self._sink and self._sink.name, error.strerror or error
            )
            self._sink = None

    def _line(self, raw: str) -> None:
        for part in split_lines(raw) or [""]:
            self.lines.append(part)
            line = parse_line(part)
            if line.text.strip():
                self.last = line.text.strip()
            self._log_line(line)
            if self._on_line is not None:
                self._on_line(line)

    def _log_line(self, line: LogLine) -> None:
        text = line.text.strip()
        if line.severity == "I" and _PROGRESS_LINE.match(text):
            log.log(self._level, "trtexec: %s", text)
        elif line.severity in ("W", "E", "F") and text not in self._warned and not text.startswith(_EXPECTED_ERRORS):
            self._warned.add(text)  # repeated for every tactic
            log.log(
                logging.WARNING if line.severity == "W" and not line.from_library else self._level, "trtexec: %s", text
            )
        else:
            log.debug("trtexec: %s", text)


def _read_output(process: subprocess.Popen[bytes], reader: _OutputReader) -> None:
    """Read until end of file, or until the program has exited and only a child keeps the pipe open."""
    assert process.stdout is not None
    pipe, heard_at, reported_at = process.stdout.fileno(), time.monotonic(), time.monotonic()
    while True:
        ready, _, _ = select.select([pipe], [], [], min(1.0, _SILENCE_S))
        now = time.monotonic()
        if ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                break
            heard_at = reported_at = now
            reader.feed(chunk)
        elif process.poll() is not None:
            break
        elif now - reported_at >= _SILENCE_S:
            reported_at = now
            log.info("trtexec is running without output for %.0f s; last line: %s", now - heard_at, reader.last)
    reader.finish()


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # all have exited
            break
        until = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if process.poll() is not None and number == signal.SIGTERM:
            continue  # the leader has exited; kill remaining children
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
