"""NVIDIA's profilers as programs: their location and version, one run of an engine under them, why a run failed.

Nsight Systems (`nsys`) and Nsight Compute (`ncu`) print in the user's locale by default, start child processes, and
return the exit code of the profiled program. So a run has `LC_ALL=C`, a separate process group, and an outcome file
written by the profiled program (`trt_engine.profiling.instruments.target`), which separates its failure from the tool's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from trt_engine.atomic_io import ensure_folder, os_errors, write_atomic
from trt_engine.backend import list_backends, runtime_backend
from trt_engine.benchmark.bench_inputs import feeds_for
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import Explained, UsageError
from trt_engine.profiling.instruments import nsight_tools
from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.target import Stage, TargetOutcome, TargetRequest, encode, read_outcome
from trt_engine.workers.crash import restore_error
from trt_engine.workers.process import extend_shutdown

log = logging.getLogger(__name__)

_SILENCE_S = 60.0
_GRACE_S = 60.0
"""Seconds for a tool to write its report once its program was interrupted."""
_END_S = 5.0
_UNKNOWN_OPTION = re.compile(r"unrecogni[sz]ed option '?(-{1,2}[\w-]+)", re.IGNORECASE)
_INVALID_ARGUMENT = re.compile(r"argument (?:\('[^']*'\) )?for option '(-{1,2}[\w-]+)' is invalid", re.IGNORECASE)
_METRIC = re.compile(
    r"(?:Failed to find metric|Unknown metric|metrics? (?:was|were) not found:?)\s+(\S+)", re.IGNORECASE
)
_KNOWN_FAILURES: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), reason, fix)
    for pattern, reason, fix in (
        (
            r"driver resource (?:was|is) unavailable|CUPTI_ERROR_MULTIPLE_SUBSCRIBERS|another (?:tool|profiler) is",
            "a driver resource is unavailable: another profiler holds the GPU's counters, DCGM most likely",
            "`dcgmi profile --pause`, and `dcgmi profile --resume` afterwards; or end the other profiler",
        ),
        (
            r"LibraryNotLoaded|failed to initialize the profiler",
            "the driver's part of the profiler cannot be loaded here",
            "in a container: `--gpus all` with NVIDIA_DRIVER_CAPABILITIES=all; a sandboxed machine may have none at all",
        ),
        (
            r"QdstrmImporter|Importer (?:binary|executable) (?:was )?not found|cannot find the importer",
            "nsys recorded, and has no importer to make a report of it: its host part is not installed",
            "install the whole Nsight Systems, not its target part alone",
        ),
        (
            r"no space left on device|disk (?:is )?full",
            "the disk is full",
            "free some space, or name another disk with `-o`; TMPDIR moves the tool's own files",
        ),
        (
            r"profiling is not supported on|device is not supported|unsupported (?:gpu|device)",
            "this version does not support the GPU",
            "a newer version for newer GPUs, an older one for older ones",
        ),
    )
)


def find_known_failure(output: str, tool: nsight_tools.Tool) -> ProfilerUnavailable | None:
    """The known reason in a failed tool's output, or None."""
    if "ERR_NVGPUCTRPERM" in output or "permission to access NVIDIA GPU Performance Counters" in output:
        return nsight_tools.permission_error()
    if found := _UNKNOWN_OPTION.search(output) or _INVALID_ARGUMENT.search(output):
        return nsight_tools.too_old_error(tool, found[1])
    if found := _METRIC.search(output):
        return ProfilerUnavailable(
            f"{tool.label} has no metric `{found[1]}` for this GPU",
            hint=f"`{tool.path} --query-metrics` lists what it has",
        )
    for pattern, reason, fix in _KNOWN_FAILURES:
        if pattern.search(output):
            return ProfilerUnavailable(f"{tool.label}: {reason}", hint=fix)
    return None


def last_error_line(output: str) -> str:
    """The most likely error line of a tool's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    blamed = [line for line in lines if re.search(r"==ERROR==|\berror\b|\bfatal\b|fail", line, re.IGNORECASE)]
    return re.sub(r"^==\w+==\s*", "", (blamed or lines or ["nothing"])[0 if blamed else -1])


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """One run of a tool: its exit status, and the output of the tool and its program."""

    command: str
    exit_code: int
    """Negative for a signal, as in Python; else that of the profiled program, or of the tool."""
    output: str
    raw_log: Path
    ended_by: Literal["", "timeout", "interrupted"] = ""
    """Why it was ended early."""

    @property
    def signal(self) -> str | None:
        """The signal that ended the profiled program, from output and exit code: `SIGKILL`. For a run without an outcome.

        `ncu` returns the signal number as exit code (observed with 2025.3.1).
        """
        stated = re.search(r"(?:terminated|killed|exited)\b[^\n]*?\bsignal:? (\d+)", self.output, re.IGNORECASE)
        stated = stated or re.search(r"application returned an error code \((\d+)\)", self.output)
        code = int(stated[1]) if stated else abs(self.exit_code)
        for number in (code, code - 128):
            if number in _FATAL_SIGNALS:
                return signal.Signals(number).name
        return None


_FATAL_SIGNALS = frozenset({
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL,
    signal.SIGSEGV, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS,
})  # fmt: skip
"""Signals that end a program; without SIGHUP, as 1 is a common exit code."""


def run_tool(
    tool: nsight_tools.Tool, arguments: Sequence[str], folder: Path, *, timeout_s: float, target: Path | None = None
) -> ProcessResult:
    """Run the tool in `folder` until it ends; `NAME.log` there receives the command line and all output, unbuffered.

    Pass file names without the folder: both tools expand `%` in paths.

    On Ctrl-C or timeout the profiled program (its pid is in `target`) is interrupted, so that the tool can write its
    report; what is still running then is killed. A second Ctrl-C kills everything at once.
    """
    command = f"cd {shlex.quote(str(folder))} && {shlex.join([str(tool.path), *arguments])}"
    raw_log = folder / f"{tool.name}.log"
    log.debug("running: %s", command)
    with contextlib.ExitStack() as stack:
        with os_errors(raw_log):
            sink = stack.enter_context(raw_log.open("ab", buffering=0))
            sink.write(f"# {command}\n".encode(errors="replace"))
        try:
            process = subprocess.Popen(
                [str(tool.path), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                cwd=folder, start_new_session=True, bufsize=0, env=nsight_tools.tool_environment(),
            )  # fmt: skip
        except OSError as error:
            raise ProfilerUnavailable(
                f"`{tool.path}` cannot be run: {error.strerror or error}", hint=nsight_tools.install_hint(tool.name)
            ) from error
        stack.callback(_kill_tree, process, target)
        heard: list[bytes] = []

        def listen(until: float) -> bool:
            return _read_output(process, heard, sink.write, until, tool.name)

        ended: Literal["", "timeout", "interrupted"] = ""
        try:
            if not listen(time.monotonic() + timeout_s):
                ended = "timeout"
        except KeyboardInterrupt:
            ended = "interrupted"
        if ended:
            if ended == "interrupted":
                log.info("%s writes its report, for up to %.0f s (Ctrl-C again ends it now)", tool.name, _GRACE_S)
                extend_shutdown(_GRACE_S + 2 * _END_S)
            with contextlib.suppress(psutil.Error):
                if (running := _open_target(target)) is not None:
                    running.send_signal(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: kill it
                listen(time.monotonic() + _GRACE_S)
            _kill_tree(process, target)
        process.wait()
    said = b"".join(heard).decode(errors="replace")
    return ProcessResult(command, process.returncode, said, raw_log, ended)


def _read_output(
    process: subprocess.Popen[bytes], on_output: list[bytes], write: Callable[[bytes], object], until: float, name: str
) -> bool:
    """Read until both streams are closed, or only a child of the exited tool holds them; False on timeout."""
    assert process.stdout is not None
    pipe, told_at, lost = process.stdout.fileno(), time.monotonic(), False
    while (now := time.monotonic()) < until:
        ready, _, _ = select.select([pipe], [], [], min(0.5, until - now))
        if ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, until - time.monotonic()))
                    return True
                return False
            on_output.append(chunk)
            told_at = now
            try:
                if not lost:
                    write(chunk)
            except OSError as error:  # the disk is full: only the log is lost
                lost = True
                log.warning("the rest of %s's output is not logged: %s", name, error.strerror or error)
        elif process.poll() is not None:
            return True
        elif now - told_at >= _SILENCE_S:
            told_at = now
            log.info("%s is running, without output for %.0f s", name, _SILENCE_S)
    return False


def _open_target(target: Path | None) -> psutil.Process | None:
    """A handle of the profiled program, unless its pid was reused."""
    outcome = read_outcome(target) if target is not None else None
    if outcome is None:
        return None
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(outcome.pid)
        if any("trt_engine.profiling.instruments.target" in word for word in found.cmdline()):
            return found
    return None


def _kill_tree(process: subprocess.Popen[bytes], target: Path | None) -> None:
    """End the tool, its group and its helpers in other sessions: SIGTERM first, then SIGKILL."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        if process.poll() is None:
            family += psutil.Process(process.pid).children(recursive=True)
    if (watched := _open_target(target)) is not None:
        family.append(watched)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.send_signal(number)
        until = time.monotonic() + _END_S
        while time.monotonic() < until and (process.poll() is None or any(map(_group_alive, family))):
            time.sleep(0.02)
        if process.poll() is not None and not any(map(_group_alive, family)) and number == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # group members that ignored SIGTERM
            break
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _group_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def make_request(
    engine: Path, config: BenchConfig | None, runtime: RuntimeConfig | None, *, inferences: int, warmup: int
) -> TargetRequest:
    """The request for the profiled process; fails early for engines that no GPU profiler can see."""
    opened, config, runtime = Engine.open(engine), config or BenchConfig(), runtime or RuntimeConfig()
    where = runtime.device or opened.passport.device
    if parse_device(where)[0] == "cpu":
        raise ProfilerUnavailable(
            f"`{opened.path}` runs on `{where}`, and Nsight watches GPUs",
            hint="`--profiler layers` reports the times of its layers",
        )
    known = list_backends()
    backend_spec = known.get(opened.passport.backend)
    runs = None if backend_spec is None else runtime_backend(backend_spec)
    if runs is not None and runs.provides("measure"):
        raise ProfilerUnavailable(
            f"`{opened.path}` runs in another program (`{runs.name}`), whose inferences cannot be separated",
            hint=" or ".join(known[name].install for name in runs.runtimes if name in known) or runs.install,
        )
    if inferences < 1 or warmup < 0:
        raise UsageError(f"cannot profile {inferences} inferences after {warmup}", hint="`--inferences 20 --warmup 5`")
    if config.inputs is not None:
        config = replace(config, inputs=config.inputs.absolute())
    feeds_for(opened, config)  # fails early for a shape that does not fit
    return TargetRequest(str(opened.path.absolute()), config, replace(runtime, device=where), inferences, warmup)


def prepare_folder(folder: Path, *names: str) -> Path:
    """The folder of a run by its absolute path, without the files of an earlier run."""
    folder = ensure_folder(folder).absolute()
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return folder


def run_target(
    tool: nsight_tools.Tool, arguments: Sequence[str], request: TargetRequest, out: Path, *, timeout_s: float
) -> tuple[ProcessResult, TargetOutcome | None]:
    """Run the engine of the request under the tool in a separate process; return the results of both.

    `NAME.request.json` in `out` is the request, so the logged command can be run again; `NAME.run.json` the outcome.
    """
    asked, answer = out / f"{tool.name}.request.json", out / f"{tool.name}.run.json"
    answer.unlink(missing_ok=True)
    request.outcome_path, request.parent = str(answer), os.getpid()
    write_atomic(asked, msgspec.json.format(encode(request), indent=2) + b"\n")
    program = [sys.executable, "-P", "-m", "trt_engine.profiling.instruments.target", str(asked)]
    ran = run_tool(tool, [*arguments, *program], out, timeout_s=timeout_s, target=answer)
    return ran, read_outcome(answer)


_STAGE_TEXTS: dict[Stage, str] = {
    "starting": "as it started",
    "loading": "while it loaded the engine",
    "warming": "during the warm-up",
    "range": "before the capture range began",
    "capturing": "before the end of the capture range",
    "ending": "as it closed the engine",
    "done": "after its work was done",
}


def check_result(
    tool: nsight_tools.Tool, ran: ProcessResult, outcome: TargetOutcome | None, engine: Path, timeout_s: float
) -> None:
    """Raise the error of the profiled program or of the tool; return if the program completed."""
    if outcome is not None and outcome.error is not None:
        raise _target_error(tool, outcome)
    if ran.ended_by == "timeout":
        raise ProfilerUnavailable(
            f"`{engine}` under {tool.label} did not end within {timeout_s:g} s and was stopped"
            f"{'' if outcome is None else f' {_STAGE_TEXTS[outcome.stage]}'}",
            hint=f"fewer inferences, a smaller batch, or a longer `timeout_s`; `{ran.raw_log}` has the output",
        )
    if outcome is not None and (outcome.stage == "done" or ran.ended_by):
        return
    if (known := find_known_failure(ran.output, tool)) is not None:
        raise known
    if outcome is None:
        raise ProfilerUnavailable(
            f"{tool.label} did not start the program to profile: {last_error_line(ran.output)} (exit code {ran.exit_code})",
            hint=f"`{ran.raw_log}` has the command and the output",
        )
    name = ran.signal
    if name == "SIGKILL":
        raise ProfilerUnavailable(
            f"the process that ran `{engine}` under {tool.label} was killed (SIGKILL) {_STAGE_TEXTS[outcome.stage]}",
            hint="the kernel kills what takes too much memory: see `dmesg | tail`; a smaller batch, or more memory",
        )
    ending = f"by {name}" if name else f"with exit code {ran.exit_code}"
    raise ProfilerUnavailable(
        f"the process that ran `{engine}` under {tool.label} died {ending} {_STAGE_TEXTS[outcome.stage]}",
        hint=f"`{ran.raw_log}` has its output; `trt-engine bench {engine}` shows whether it runs without the profiler",
    )


def _target_error(tool: nsight_tools.Tool, outcome: TargetOutcome) -> Explained:
    """The profiled program's error, as an exception."""
    assert outcome.error is not None
    kind, message, hint = outcome.error.kind, outcome.error.message, outcome.error.hint
    if outcome.stage == "range":
        return ProfilerUnavailable(f"the capture range of {tool.label} never started: {message}", hint=hint)
    return restore_error(kind, message, hint)
