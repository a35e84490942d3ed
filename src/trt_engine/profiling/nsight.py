"""NVIDIA's profilers as programs: where they are, which version, one run of an engine under them, why a run gave nothing.

Nsight Systems (`nsys`) and Nsight Compute (`ncu`) print in the user's language and number format unless told otherwise,
start processes of their own, and end with the exit code of the program they watched. So a run has `LC_ALL=C`, a process
group of its own, and an answer that the watched program writes itself (`trt_engine.profiling.child`): its failure is not
the tool's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from trt_engine import errors
from trt_engine.backend import backends, runner_of
from trt_engine.benchmark.loop import feeds_for
from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.files import ensure_folder, explain, write_whole
from trt_engine.profiling.capture import PERMIT, ProfilerUnavailable
from trt_engine.profiling.child import Outcome, Request, Stage, encode, read_outcome
from trt_engine.tensors import Shape

__all__ = [
    "NCU_VARIABLE",
    "NSYS_VARIABLE",
    "Permission",
    "Ran",
    "Tool",
    "ToolName",
    "decimal_mark",
    "diagnose",
    "find",
    "number",
    "permission",
    "profiled",
    "request_for",
    "run",
]

log = logging.getLogger(__name__)

ToolName = Literal["nsys", "ncu"]

NSYS_VARIABLE, NCU_VARIABLE = "TRT_ENGINE_NSYS", "TRT_ENGINE_NCU"
"""The environment variables that name the programs, before PATH and NVIDIA's folders are looked at."""

_VARIABLES: dict[ToolName, str] = {"nsys": NSYS_VARIABLE, "ncu": NCU_VARIABLE}
_TITLES: dict[ToolName, str] = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
_PACKAGES: dict[ToolName, str] = {"nsys": "nsight-systems", "ncu": "nsight-compute"}
_FOLDERS: dict[ToolName, tuple[str, ...]] = {
    "nsys": (
        "opt/nvidia/nsight-systems/*/bin/nsys",
        "opt/nvidia/nsight-systems-cli/*/bin/nsys",
        "opt/nvidia/nsight-systems/*/target-linux-*/nsys",
        "usr/local/cuda*/bin/nsys",
    ),
    "ncu": (
        "opt/nvidia/nsight-compute/*/ncu",
        "usr/local/cuda*/nsight-compute*/ncu",
        "usr/local/NVIDIA-Nsight-Compute*/ncu",
        "usr/local/cuda*/bin/ncu",
    ),
}
"""Where NVIDIA's packages and installers put them, under the root; the version stands in the folder's name."""
_VERSION = re.compile(r"[Vv]ersion:?\s+(\d+(?:\.\d+)+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PROBE_S = 60.0
_SILENCE_S = 60.0
_GRACE_S = 60.0
"""How long a tool whose program was asked to stop may take to write its report."""
_END_S = 5.0


# ------------------------------------------------------------------------------------------------ the programs


@dataclass(frozen=True, slots=True)
class Tool:
    """One profiler of one version."""

    name: ToolName
    path: Path
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        """`nsys 2024.6.2`: as it stands in a record."""
        return f"{self.name} {'.'.join(map(str, self.version[:3]))}"

    def options(self, *command: str) -> frozenset[str]:
        """What `TOOL COMMAND --help` lists, with the dashes; empty where it lists nothing."""
        return _options(self.path, self.path.stat().st_mtime_ns, command)

    def needs(self, option: str, *command: str) -> None:
        """`ProfilerUnavailable` unless that version has the option."""
        known = self.options(*command)
        if known and option not in known:
            raise too_old(self, option)


def find(name: ToolName, *, root: Path = Path("/"), path: str | None = None) -> Tool:
    """The tool that its variable names; else that of PATH; else the newest in NVIDIA's folders.

    One that does not start (the launcher CUDA brings, without what it launches) is passed over. `ProfilerUnavailable` says
    what was found.
    """
    variable, install = _VARIABLES[name], _install(name)
    if named := os.environ.get(variable):
        place = Path(named)
        if place.is_dir():
            place = place / name
        if not place.is_file() or not os.access(place, os.X_OK):
            raise ProfilerUnavailable(
                f"`{named}` is no program that can be run", hint=f"{variable} names it; {install}"
            )
        return _probed(name, place.absolute(), place.stat().st_mtime_ns)
    broken: ProfilerUnavailable | None = None
    for place in _candidates(name, root, path):
        try:
            return _probed(name, place, place.stat().st_mtime_ns)
        except ProfilerUnavailable as error:
            log.debug("passed over: %s", error.message)
            broken = broken or error
    if broken is not None:
        raise broken
    raise ProfilerUnavailable(f"{name} is not installed: it is neither on PATH nor in NVIDIA's folders", hint=install)


def _install(name: ToolName) -> str:
    return (
        f"install {_TITLES[name]} (`{_PACKAGES[name]}` of NVIDIA's CUDA repository), or put the path of {name} "
        f"in {_VARIABLES[name]}"
    )


def _candidates(name: ToolName, root: Path, path: str | None) -> Iterator[Path]:
    if (on_path := shutil.which(name, path=path)) is not None:
        yield Path(on_path).absolute()
    found = {place for pattern in _FOLDERS[name] for place in root.glob(pattern) if os.access(place, os.X_OK)}
    numbered = [(_numbers(place.relative_to(root)), str(place), place) for place in found if place.is_file()]
    yield from (place for _, _, place in sorted(numbered, reverse=True))


def _numbers(place: Path) -> tuple[int, ...]:
    """The version in a path, links of CUDA followed by nobody: `opt/nvidia/nsight-compute/2025.3.1/ncu` is 2025.3.1."""
    found = re.findall(r"\d{4}(?:\.\d+)+", str(place))
    return tuple(map(int, found[-1].split("."))) if found else ()


@lru_cache(maxsize=16)
def _probed(name: ToolName, path: Path, mtime_ns: int) -> Tool:
    said = _ask(name, path, "--version")
    version = _VERSION.search(said)
    if version is None:
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        raise ProfilerUnavailable(f"`{path}` does not start as {name} does: it says `{first}`", hint=_install(name))
    return Tool(name, path, tuple(map(int, version[1].split("."))))


@lru_cache(maxsize=32)
def _options(path: Path, mtime_ns: int, command: tuple[str, ...]) -> frozenset[str]:
    with contextlib.suppress(ProfilerUnavailable):  # the run itself will say
        return frozenset(_OPTION.findall(_ask("nsys" if command else "ncu", path, *command, "--help")))
    return frozenset()


def _ask(name: ToolName, path: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            [str(path), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_PROBE_S, check=False, env=_environment(),
        )  # fmt: skip
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ProfilerUnavailable(f"`{path}` cannot be run: {reason}", hint=_install(name)) from error
    except subprocess.TimeoutExpired as error:
        asked = shlex.join([str(path), *words])
        raise ProfilerUnavailable(f"`{asked}` did not answer within {_PROBE_S:.0f} s", hint="`nvidia-smi`") from error
    return done.stdout.decode(errors="replace")


def _environment() -> dict[str, str]:
    """Numbers and messages as the C locale writes them; the interpreter below keeps to UTF-8 all the same."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LANGUAGE", "LANG")}
    if places := kept.get("PYTHONPATH"):  # the watched interpreter starts in another folder
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places.split(os.pathsep)))
    return kept | {"LC_ALL": "C", "PYTHONUTF8": "1"}


def too_old(tool: Tool, option: str) -> ProfilerUnavailable:
    """The error of a version that lacks the option."""
    return ProfilerUnavailable(
        f"{tool.text} is too old: it does not know `{option}`",
        hint=f"install a newer {_TITLES[tool.name]} (2022.1 or later), or name one with {_VARIABLES[tool.name]}",
    )


# ------------------------------------------------------------------------------------------------ permission


@dataclass(frozen=True, slots=True)
class Permission:
    """Whether this process may read a GPU's performance counters."""

    restricted: bool | None
    """`RmProfilingAdminOnly` of the driver; None where it is not told."""
    privileged: bool
    """This process has CAP_SYS_ADMIN or CAP_PERFMON."""

    @property
    def refused(self) -> bool:
        """True when it is known beforehand that the driver will refuse."""
        return self.restricted is True and not self.privileged


def permission(root: Path = Path("/")) -> Permission:
    """What the driver and the kernel tell about it."""
    restricted: bool | None = None
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/driver/nvidia/params").read_text(errors="replace").splitlines():
            if line.startswith("RmProfilingAdminOnly:"):
                restricted = int(line.partition(":")[2]) != 0
    privileged = False
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/status").read_text(errors="replace").splitlines():
            if line.startswith("CapEff:"):
                held = int(line.partition(":")[2], 16)
                privileged = bool(held & (1 << 21 | 1 << 38))  # linux/capability.h: CAP_SYS_ADMIN, CAP_PERFMON
    return Permission(restricted, privileged)


def not_permitted(found: Permission | None = None) -> ProfilerUnavailable:
    """ERR_NVGPUCTRPERM with its three fixes, and what the driver's own setting says."""
    found = permission() if found is None else found
    state = {True: "; RmProfilingAdminOnly is 1", False: "; RmProfilingAdminOnly is 0, so a container may be the limit"}
    return ProfilerUnavailable(
        "the driver lets administrators alone read GPU performance counters (ERR_NVGPUCTRPERM"
        f"{state.get(found.restricted, '') if found.restricted is not None else ''})",
        hint=PERMIT,
    )


# ------------------------------------------------------------------------------------------------ why it gave nothing

_OLD = re.compile(r"unrecogni[sz]ed option '?(-{1,2}[\w-]+)", re.IGNORECASE)
_ILLEGAL = re.compile(r"argument (?:\('[^']*'\) )?for option '(-{1,2}[\w-]+)' is invalid", re.IGNORECASE)
_METRIC = re.compile(
    r"(?:Failed to find metric|Unknown metric|metrics? (?:was|were) not found:?)\s+(\S+)", re.IGNORECASE
)
_SAID: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
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


def diagnose(said: str, tool: Tool) -> ProfilerUnavailable | None:
    """The known reason in what the tool said; None where there is none. For a run that gave nothing."""
    if "ERR_NVGPUCTRPERM" in said or "permission to access NVIDIA GPU Performance Counters" in said:
        return not_permitted()
    if found := _OLD.search(said) or _ILLEGAL.search(said):
        return too_old(tool, found[1])
    if found := _METRIC.search(said):
        return ProfilerUnavailable(
            f"{tool.text} has no metric `{found[1]}` for this GPU",
            hint=f"`{tool.path} --query-metrics` lists what it has",
        )
    for pattern, reason, fix in _SAID:
        if pattern.search(said):
            return ProfilerUnavailable(f"{tool.text}: {reason}", hint=fix)
    return None


def last_words(said: str) -> str:
    """The line of a tool's output that most likely tells what went wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    blamed = [line for line in lines if re.search(r"==ERROR==|\berror\b|\bfatal\b|fail", line, re.IGNORECASE)]
    return re.sub(r"^==\w+==\s*", "", (blamed or lines or ["nothing"])[0 if blamed else -1])


# ------------------------------------------------------------------------------------------------ one run


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a tool: how it ended and what it and its program said."""

    command: str
    exit_code: int
    """Negative for a signal, as Python has it; else that of the program it watched, or its own."""
    said: str
    seconds: float
    ended: Literal["", "timeout", "interrupted"] = ""
    """What ended it before its time."""

    @property
    def signal(self) -> str | None:
        """The signal that ended the watched program, as tool and exit code tell: `SIGKILL`. For a program without an answer.

        `ncu` gives the number of the signal for an exit code (seen with 2025.3.1).
        """
        told = re.search(r"(?:terminated|killed|exited)\b[^\n]*?\bsignal:? (\d+)", self.said, re.IGNORECASE)
        told = told or re.search(r"application returned an error code \((\d+)\)", self.said)
        code = int(told[1]) if told else abs(self.exit_code)
        for number in (code, code - 128):
            if number in _DEADLY:
                return signal.Signals(number).name
        return None


_DEADLY = frozenset({
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL,
    signal.SIGSEGV, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS,
})  # fmt: skip
"""What a program is ended by; SIGHUP is not among them: 1 is every program's exit code for an error."""


def run(
    tool: Tool,
    words: Sequence[str],
    *,
    folder: Path,
    raw_log: Path,
    timeout_s: float,
    target: Path | None = None,
) -> Ran:
    """Run it in `folder` until it ends; `raw_log` gets the command line and then all that is said, at once.

    File names for the tool are best without the folder: a `%` in a path means something to both tools.

    On Ctrl-C, and when `timeout_s` are over, the watched program (which tells its number in `target`) is asked to stop, so
    that the tool can write what it has; whoever does not end then is ended. A second Ctrl-C ends everything now.
    """
    command = f"cd {shlex.quote(str(folder))} && {shlex.join([str(tool.path), *words])}"
    log.debug("running: %s", command)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            sink = stack.enter_context(raw_log.open("ab", buffering=0))
            sink.write(f"# {command}\n".encode(errors="replace"))
        except OSError as error:
            raise explain(error, raw_log) from error
        try:
            process = subprocess.Popen(
                [str(tool.path), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                cwd=folder, start_new_session=True, bufsize=0, env=_environment(),
            )  # fmt: skip
        except OSError as error:
            raise ProfilerUnavailable(
                f"`{tool.path}` cannot be run: {error.strerror or error}", hint=_install(tool.name)
            ) from error
        stack.callback(_end, process, target)
        heard: list[bytes] = []

        def listen(until: float) -> bool:
            return _listen(process, heard, sink.write, until, tool.name)

        ended: Literal["", "timeout", "interrupted"] = ""
        try:
            if not listen(started + timeout_s):
                ended = "timeout"
        except KeyboardInterrupt:
            ended = "interrupted"
        if ended:
            _ask_to_stop(target)
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: end it now
                listen(time.monotonic() + _GRACE_S)
            _end(process, target)
        process.wait()
    said = b"".join(heard).decode(errors="replace")
    return Ran(command, process.returncode, said, time.monotonic() - started, ended)


def _listen(
    process: subprocess.Popen[bytes], heard: list[bytes], keep: Callable[[bytes], object], until: float, name: str
) -> bool:
    """Read until both streams are closed, or the tool is gone and only a child of it holds them; False when time is up."""
    assert process.stdout is not None
    pipe, told_at, lost = process.stdout.fileno(), time.monotonic(), False
    while (now := time.monotonic()) < until:
        ready, _, _ = select.select([pipe], [], [], min(0.5, until - now))
        if ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return _gone(process, until)
            heard.append(chunk)
            told_at = now
            try:
                if not lost:
                    keep(chunk)
            except OSError as error:  # the disk is full: that costs the log, not the profile
                lost = True
                log.warning("the rest of what %s says is not kept: %s", name, error.strerror or error)
        elif process.poll() is not None:
            return True
        elif now - told_at >= _SILENCE_S:
            told_at = now
            log.info("%s is alive and has said nothing for %.0f s", name, _SILENCE_S)
    return False


def _gone(process: subprocess.Popen[bytes], until: float) -> bool:
    """Whether it ends in time after it closed its streams."""
    try:
        process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _target(target: Path | None) -> psutil.Process | None:
    """The watched program, if it is that one: numbers are given again."""
    outcome = read_outcome(target) if target is not None else None
    if outcome is None:
        return None
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(outcome.pid)
        if any("trt_engine.profiling.child" in word for word in found.cmdline()):
            return found
    return None


def _ask_to_stop(target: Path | None) -> None:
    with contextlib.suppress(psutil.Error):
        if (found := _target(target)) is not None:
            found.send_signal(signal.SIGINT)


def _end(process: subprocess.Popen[bytes], target: Path | None) -> None:
    """Nothing of it is left: the tool, its group, its helpers in sessions of their own; asked first, then made to."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        if process.poll() is None:
            family += psutil.Process(process.pid).children(recursive=True)
    if (watched := _target(target)) is not None:
        family.append(watched)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.send_signal(number)
        until = time.monotonic() + _END_S
        while time.monotonic() < until and (process.poll() is None or any(map(_alive, family))):
            time.sleep(0.02)
        if process.poll() is not None and not any(map(_alive, family)) and number == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever of the group did not listen
            break
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


# ------------------------------------------------------------------------------------------------ an engine under a tool


def request_for(
    engine: Path,
    *,
    config: BenchConfig | None,
    runtime: RuntimeConfig | None,
    batch: int | None,
    shapes: Mapping[str, Shape] | None,
    device: str | None,
    inferences: int,
    warmup: int,
) -> Request:
    """What the process is asked to do; refuses what no GPU profiler can see, before one is started."""
    opened = Engine.open(engine)
    where = device or (runtime.device if runtime is not None else None) or opened.passport.device
    if parse_device(where)[0] == "cpu":
        raise ProfilerUnavailable(
            f"`{opened.path}` runs on `{where}`, and Nsight watches GPUs",
            hint="`--rung layers` tells the times of its layers",
        )
    known = backends()
    card = known.get(opened.passport.backend)
    runs = None if card is None else runner_of(card)
    if runs is not None and runs.has("measure"):
        raise ProfilerUnavailable(
            f"`{opened.path}` runs in another program (`{runs.name}`), whose inferences cannot be told apart",
            hint=" or ".join(known[name].install for name in runs.run_by if name in known) or runs.install,
        )
    if inferences < 1 or warmup < 0:
        raise UsageError(f"cannot profile {inferences} inferences after {warmup}", hint="`--inferences 20 --warmup 5`")
    asked = config or BenchConfig()
    if batch is not None:
        asked = replace(asked, batch=batch)
    if shapes is not None:
        asked = replace(asked, shapes=dict(shapes))
    if asked.inputs is not None:
        asked = replace(asked, inputs=asked.inputs.absolute())
    feeds_for(opened, asked)  # a shape that does not fit is said before a minute is spent
    return Request(
        engine=str(opened.path.absolute()),
        config=asked,
        runtime=replace(runtime or RuntimeConfig(), device=where),
        inferences=inferences,
        warmup=warmup,
    )


def profiled(
    tool: Tool, words: Sequence[str], request: Request, *, out: Path, raw_log: Path, timeout_s: float
) -> tuple[Ran, Outcome | None]:
    """Run the engine of the request under the tool, in a process of its own, and hand back what both told.

    `NAME.request.json` in `out` is what the process is asked, so the command in the log can be typed again;
    `NAME.run.json` is its answer.
    """
    ensure_folder(out)
    asked, answer = out / f"{tool.name}.request.json", out / f"{tool.name}.run.json"
    answer.unlink(missing_ok=True)
    request.answer, request.parent = str(answer), os.getpid()
    write_whole(asked, msgspec.json.format(encode(request), indent=2) + b"\n")
    program = [sys.executable, "-P", "-m", "trt_engine.profiling.child", str(asked)]
    ran = run(tool, [*words, *program], folder=out, raw_log=raw_log, timeout_s=timeout_s, target=answer)
    return ran, read_outcome(answer)


_AT: dict[Stage, str] = {
    "starting": "as it started",
    "loading": "while it loaded the engine",
    "warming": "during the warm-up",
    "range": "before the capture range began",
    "capturing": "before the end of the capture range",
    "ending": "as it closed the engine",
    "done": "after its work was done",
}


def judge(tool: Tool, ran: Ran, outcome: Outcome | None, *, raw_log: Path, engine: Path, timeout_s: float) -> None:
    """Raises what went wrong with the watched program or with the tool; returns when the program did all of its work."""
    if outcome is not None and outcome.error is not None:
        raise _of_the_target(tool, outcome)
    if ran.ended == "timeout":
        raise ProfilerUnavailable(
            f"`{engine}` under {tool.text} did not end within {timeout_s:g} s and was stopped"
            f"{'' if outcome is None else f' {_AT[outcome.stage]}'}",
            hint=f"fewer inferences, a smaller batch, or a longer `timeout_s`; `{raw_log}` has what was said",
        )
    if outcome is not None and (outcome.stage == "done" or ran.ended):
        return
    if (known := diagnose(ran.said, tool)) is not None:
        raise known
    if outcome is None:
        raise ProfilerUnavailable(
            f"{tool.text} did not start the program it was to watch: {last_words(ran.said)} (exit code {ran.exit_code})",
            hint=f"`{raw_log}` has the command and all that was said",
        )
    name = ran.signal
    if name == "SIGKILL":
        raise ProfilerUnavailable(
            f"the process that ran `{engine}` under {tool.text} was killed (SIGKILL) {_AT[outcome.stage]}",
            hint="the kernel kills what takes too much memory: `dmesg | tail` tells; a smaller batch, or more memory",
        )
    ending = f"by {name}" if name else f"with exit code {ran.exit_code}"
    raise ProfilerUnavailable(
        f"the process that ran `{engine}` under {tool.text} died {ending} {_AT[outcome.stage]}",
        hint=f"`{raw_log}` has what it said; `trt-engine bench {engine}` shows whether it runs without the profiler",
    )


def _of_the_target(tool: Tool, outcome: Outcome) -> TrtEngineError:
    """The error the watched program ended in, as if it had been raised here."""
    assert outcome.error is not None
    kind, message, hint = outcome.error.kind, outcome.error.message, outcome.error.hint
    if outcome.stage == "range":
        return ProfilerUnavailable(f"the capture range of {tool.text} never started: {message}", hint=hint)
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, TrtEngineError):
        return found(message, hint=hint)
    return TrtEngineError(message, hint=hint)


# ------------------------------------------------------------------------------------------------ numbers of any locale

_NUMBER = re.compile(r"[-+]?(?:\d[\d.,'\u2019\u00a0\u202f ]*|\.\d+)(?:[eE][-+]?\d+)?")
_BLANKS = re.compile(r"(?<=\d)['\u2019\u00a0\u202f ](?=\d{3}(?!\d))")


def decimal_mark(texts: Iterable[str]) -> str | None:
    """The decimal mark of whoever wrote these numbers, `.` or `,`; None where none of them tells, or they contradict."""
    marks = set()
    for text in texts:
        if _NUMBER.fullmatch(text.strip()) is None:
            continue
        plain = re.sub(r"[eE].*", "", _BLANKS.sub("", text.strip())).lstrip("+-")
        dots, commas = plain.count("."), plain.count(",")
        if dots and commas:
            marks.add(max(".,", key=plain.rfind))
        elif dots + commas > 1:
            marks.add("," if dots else ".")
        elif dots + commas == 1:
            mark = "." if dots else ","
            head, _, tail = plain.partition(mark)
            if len(tail) != 3 or len(head) > 3 or head in ("", "0"):
                marks.add(mark)
    return marks.pop() if len(marks) == 1 else None


def number(text: str, mark: str | None = None, *, whole: bool = False) -> int | float | None:
    """The number in a text that may have thousands separators; None for what is none (`n/a`, words).

    `mark` is the decimal mark of the document. Without one, a single `.` or `,` before three digits separates thousands
    where the number is known to be `whole`; else it is read as the C locale writes it.
    """
    plain = text.strip()
    if _NUMBER.fullmatch(plain) is None:
        return None
    plain = _BLANKS.sub("", plain)
    dots, commas = plain.count("."), plain.count(",")
    if mark is None:
        mark = decimal_mark([plain])
    if mark is None and dots + commas == 1:
        separator = "." if dots else ","
        mark = {".": ",", ",": "."}[separator] if whole else "."
    mark = mark or "."
    grouped = {".": ",", ",": "."}[mark]
    if plain.count(mark) > 1:
        return None
    head, _, tail = plain.partition(mark)
    if grouped in head:
        first, *groups = head.lstrip("+-").split(grouped)
        if not 1 <= len(first) <= 3 or any(len(group) != 3 or not group.isdigit() for group in groups):
            return None
    if grouped in tail:
        return None
    plain = plain.replace(grouped, "").replace(mark, ".")
    try:
        return float(plain) if set(plain) & set(".eE") else int(plain)
    except ValueError:
        return None
