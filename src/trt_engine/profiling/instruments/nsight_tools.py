"""Finds Nsight's programs, their versions and the reasons why one cannot run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trt_engine.profiling.instruments.capture import ProfilerUnavailable

log = logging.getLogger(__name__)

ToolName = Literal["nsys", "ncu"]
_VARIABLES: dict[ToolName, str] = {"nsys": "TRT_ENGINE_NSYS", "ncu": "TRT_ENGINE_NCU"}
"""The environment variables that name the programs, searched before PATH and NVIDIA's folders."""
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
"""Where NVIDIA's packages and installers put them, under the root; the version is in the folder's name."""
_VERSION = re.compile(r"[Vv]ersion:?\s+(\d+(?:\.\d+)+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class Tool:
    """One profiler of one version."""

    name: ToolName
    path: Path
    version: tuple[int, ...]

    @property
    def label(self) -> str:
        """`nsys 2024.6.2`, as in records."""
        return f"{self.name} {'.'.join(map(str, self.version[:3]))}"

    def options(self, *command: str) -> frozenset[str]:
        """Options listed by `TOOL COMMAND --help`, with dashes; empty if none."""
        return _tool_options(self.path, self.path.stat().st_mtime_ns, command)

    def has_option(self, option: str, *command: str) -> bool:
        """Whether that version has the option; True if it lists none."""
        known = self.options(*command)
        return not known or option in known

    def require_options(self, options: Iterable[str], *command: str) -> None:
        """`ProfilerUnavailable` unless that version has the options."""
        for option in options:
            if not self.has_option(option, *command):
                raise too_old_error(self, option)


def find_tool(name: ToolName, *, root: Path = Path("/"), path: str | None = None) -> Tool:
    """The tool named by its variable; else that of PATH; else the newest in NVIDIA's folders.

    A tool that does not start (CUDA's launcher without its target) is skipped. `ProfilerUnavailable` lists what was found.
    """
    variable, install = _VARIABLES[name], install_hint(name)
    if named := os.environ.get(variable):
        place = Path(named)
        if place.is_dir():
            place = place / name
        if not place.is_file() or not os.access(place, os.X_OK):
            raise ProfilerUnavailable(f"`{named}` is not an executable", hint=f"{variable} names it; {install}")
        return _probe_tool(name, place.absolute(), place.stat().st_mtime_ns)
    broken: ProfilerUnavailable | None = None
    for place in _candidates(name, root, path):
        try:
            return _probe_tool(name, place, place.stat().st_mtime_ns)
        except ProfilerUnavailable as error:
            log.debug("passed over: %s", error.message)
            broken = broken or error
    if broken is not None:
        raise broken
    raise ProfilerUnavailable(f"{name} is not installed: it is neither on PATH nor in NVIDIA's folders", hint=install)


def install_hint(name: ToolName) -> str:
    return (
        f"install {_TITLES[name]} (`{_PACKAGES[name]}` of NVIDIA's CUDA repository), or put the path of {name} "
        f"in {_VARIABLES[name]}"
    )


def _candidates(name: ToolName, root: Path, path: str | None) -> Iterator[Path]:
    if (on_path := shutil.which(name, path=path)) is not None:
        yield Path(on_path).absolute()
    found = {place for pattern in _FOLDERS[name] for place in root.glob(pattern) if os.access(place, os.X_OK)}
    numbered = [(_path_version(place.relative_to(root)), str(place), place) for place in found if place.is_file()]
    yield from (place for _, _, place in sorted(numbered, reverse=True))


def _path_version(place: Path) -> tuple[int, ...]:
    """The version in a path, links not resolved: `opt/nvidia/nsight-compute/2025.3.1/ncu` is 2025.3.1."""
    found = re.findall(r"\d{4}(?:\.\d+)+", str(place))
    return tuple(map(int, found[-1].split("."))) if found else ()


@lru_cache(maxsize=16)
def _probe_tool(name: ToolName, path: Path, mtime_ns: int) -> Tool:
    said = _query_tool(name, path, "--version")
    version = _VERSION.search(said)
    if version is None:
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        raise ProfilerUnavailable(
            f"`{path}` does not start as {name} does: it prints `{first}`", hint=install_hint(name)
        )
    return Tool(name, path, tuple(map(int, version[1].split("."))))


@lru_cache(maxsize=32)
def _tool_options(path: Path, mtime_ns: int, command: tuple[str, ...]) -> frozenset[str]:
    with contextlib.suppress(ProfilerUnavailable):  # the run itself will fail
        return frozenset(_OPTION.findall(_query_tool("nsys" if command else "ncu", path, *command, "--help")))
    return frozenset()


def _query_tool(name: ToolName, path: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            [str(path), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_PROBE_S, check=False, env=tool_environment(),
        )  # fmt: skip
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ProfilerUnavailable(f"`{path}` cannot be run: {reason}", hint=install_hint(name)) from error
    except subprocess.TimeoutExpired as error:
        asked = shlex.join([str(path), *words])
        raise ProfilerUnavailable(f"`{asked}` did not respond within {_PROBE_S:.0f} s", hint="`nvidia-smi`") from error
    return done.stdout.decode(errors="replace")


def tool_environment() -> dict[str, str]:
    """The environment with the C locale for numbers and messages; child interpreters still use UTF-8."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LANGUAGE", "LANG")}
    if places := kept.get("PYTHONPATH"):  # the profiled interpreter starts in another folder
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places.split(os.pathsep)))
    return kept | {"LC_ALL": "C", "PYTHONUTF8": "1"}


def too_old_error(tool: Tool, option: str) -> ProfilerUnavailable:
    """The error of a version that lacks the option."""
    return ProfilerUnavailable(
        f"{tool.label} is too old: it does not know `{option}`",
        hint=f"install a newer {_TITLES[tool.name]} (2022.1 or later), or name one with {_VARIABLES[tool.name]}",
    )


@dataclass(frozen=True, slots=True)
class Permission:
    """Whether this process may read a GPU's performance counters."""

    restricted: bool | None
    """`RmProfilingAdminOnly` of the driver; None if unknown."""
    privileged: bool
    """This process has CAP_SYS_ADMIN or CAP_PERFMON."""

    @property
    def is_refused(self) -> bool:
        """True if the driver will certainly refuse."""
        return self.restricted is True and not self.privileged


def read_permission(root: Path = Path("/")) -> Permission:
    """The permission according to driver and kernel."""
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


_PERMISSION_HINT = (
    "one of: (1) once: run it with `sudo`, or with CAP_SYS_ADMIN (CAP_PERFMON from driver R565); "
    "(2) in a container: start it with `docker run --cap-add=SYS_ADMIN`; "
    "(3) for good, on the host: `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d, "
    "`update-initramfs -u` or `dracut -f`, reboot; then `grep RmProfilingAdminOnly /proc/driver/nvidia/params` prints 0"
)


def permission_error() -> ProfilerUnavailable:
    """ERR_NVGPUCTRPERM with its three fixes, and the driver's setting."""
    states = {
        True: "; RmProfilingAdminOnly is 1",
        False: "; RmProfilingAdminOnly is 0, so a container may be the limit",
    }
    restricted = read_permission().restricted
    return ProfilerUnavailable(
        "the driver lets administrators alone read GPU performance counters (ERR_NVGPUCTRPERM"
        f"{'' if restricted is None else states[restricted]})",
        hint=_PERMISSION_HINT,
    )
