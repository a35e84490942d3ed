"""Where a diagnosis looks: packages, tools, files and libraries of one machine, read and never changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from trt_engine.device import info
from trt_engine.diagnosis.probe import MARK
from trt_engine.plans.installed import Installed, find_trtexec, installed

__all__ = ["Machine", "requirement_holds"]

_PROBE = Path(__file__).with_name("probe.py")
_PROBE_TIMEOUT_S = 180
_TOOL_TIMEOUT_S = 60
_TOOL_FOLDERS = (
    "usr/local/cuda/bin",
    "opt/nvidia/nsight-systems/*/bin",
    "opt/nvidia/nsight-compute/*",
)


@dataclass(frozen=True)
class Machine:
    """One machine as its paths show it; the default is this one. Another `root` or `packages` is for looking elsewhere."""

    root: Path = Path("/")
    packages: tuple[str, ...] = ()
    """Folders of installed packages that come before this interpreter's own."""
    path: str = field(default_factory=lambda: os.environ.get("PATH", ""))
    folder: Path = field(default_factory=Path.cwd)
    store: Path | None = None
    library_path: str = field(default_factory=lambda: os.environ.get("LD_LIBRARY_PATH", ""))
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The environment's other variables."""
    boards: tuple[info.Gpu, ...] | None = None
    """The GPUs to speak of; None for those NVML shows."""

    @cached_property
    def gpus(self) -> tuple[info.Gpu, ...]:
        return info.gpus() if self.boards is None else self.boards

    @cached_property
    def tensorrt(self) -> Installed:
        """The TensorRT of this machine."""
        return installed(self.root, packages=self.packages, environ=self._environ, boards=self.gpus)

    @property
    def _environ(self) -> dict[str, str]:
        return {**self.variables, "PATH": self.path, "LD_LIBRARY_PATH": self.library_path}

    @cached_property
    def container(self) -> str | None:
        return self.tensorrt.container

    def environ(self, name: str) -> str | None:
        """The value of a variable, or None where it is unset or empty."""
        return self.variables.get(name) or None

    def under(self, path: str) -> Path:
        """An absolute path of that machine, under its root."""
        return Path(path) if self.root == Path("/") else self.root / path.lstrip("/")

    def package_folders(self) -> list[Path]:
        """Where its Python packages lie, in the order Python looks."""
        return [Path(place) for place in (*self.packages, *(sys.path if self.root == Path("/") else ())) if place]

    @cached_property
    def distributions(self) -> tuple[metadata.Distribution, ...]:
        """Everything installed, each once, in the order Python finds it."""
        found: dict[str, metadata.Distribution] = {}
        for item in metadata.distributions(path=[*self.packages, *sys.path]):
            with contextlib.suppress(KeyError, TypeError):  # a dist-info without METADATA has no name
                found.setdefault(_canonical(item.metadata["Name"]), item)
        return tuple(found.values())

    def version(self, name: str) -> str | None:
        """The installed version of a distribution, or None."""
        return next((d.version for d in self.distributions if _canonical(d.metadata["Name"]) == _canonical(name)), None)

    def owners(self, package: str, prefixes: tuple[str, ...]) -> list[tuple[str, str]]:
        """Name and version of the distributions that put files in the folder `package`, of names with these prefixes."""
        found = []
        for item in self.distributions:
            name = _canonical(item.metadata["Name"])
            if name.startswith(prefixes) and any(
                str(file).startswith(f"{package}/__init__.py") for file in item.files or ()
            ):
                found.append((name, item.version))
        return sorted(found)

    def probe(self, library: str) -> dict[str, Any]:
        """What a library says of itself in a process of its own; `{"error": ...}` when it cannot be imported."""
        before = os.environ.get("PYTHONPATH", "")
        packages = [*self.packages, *([before] if before else [])]
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(_PROBE), library],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PROBE_TIMEOUT_S,
                env=os.environ | ({"PYTHONPATH": os.pathsep.join(packages)} if packages else {}),
            )
        except subprocess.TimeoutExpired:
            return {"error": f"`import {library}` did not end within {_PROBE_TIMEOUT_S} s"}
        except OSError as error:
            return {"error": f"`import {library}` could not be tried: no process starts ({error.strerror or error})"}
        for line in reversed(done.stdout.splitlines()):
            if line.startswith(MARK):
                told: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return told
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return {"error": f"`import {library}` ended the process with {how}"}

    def tool(self, name: str) -> Path | None:
        """A program on PATH or in the folders NVIDIA's packages use; trtexec may be named by a variable."""
        if name == "trtexec":
            return find_trtexec(self.root, self._environ)
        if found := shutil.which(name, path=self.path):
            return Path(found)
        for pattern in _TOOL_FOLDERS:
            for place in sorted(self.root.glob(f"{pattern}/{name}"), reverse=True):
                if os.access(place, os.X_OK) and place.is_file():
                    return place
        return None

    def said(self, program: Path, *arguments: str) -> str:
        """Everything a program prints, or nothing if it cannot be run."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [str(program), *arguments], capture_output=True, text=True, errors="replace", timeout=_TOOL_TIMEOUT_S
            )
            return done.stdout + done.stderr
        return ""

    def read(self, path: str) -> str | None:
        """The text of a file under the root, or None."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def memory_mib(self) -> tuple[int, int]:
        """Memory of the machine, and what is available now, in MiB."""
        values = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            if rest.split():
                values[name] = int(rest.split()[0]) >> 10
        total = values.get("MemTotal", 0)
        return total, values.get("MemAvailable", total)

    def memory_limit_mib(self) -> int | None:
        """The memory limit of this process's control group (version 2, then 1); None for no limit."""
        limits = [int(text) >> 20 for path in self._limit_files() if (text := self.read(path) or "").isdecimal()]
        total, _ = self.memory_mib()
        return min((limit for limit in limits if not total or limit < total), default=None)

    def _limit_files(self) -> Iterator[str]:
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if not controllers:
                for folder in (Path(path), *Path(path).parents):  # a limit of any folder above holds too
                    yield f"/sys/fs/cgroup/{str(folder).strip('/')}/memory.max"
            elif "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory/{path.strip('/')}/memory.limit_in_bytes"
        yield "/sys/fs/cgroup/memory.max"
        yield "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def requirement_holds(version: str, specifier: str) -> bool:
    """Whether a version meets `>=1.2,<3` (the operators our own requirements use: >=, >, <=, <, ==, !=)."""
    have = _release(version)
    for part in filter(None, (piece.strip() for piece in specifier.split(","))):
        sign = part.rstrip("0123456789.abcrdevpost*+")
        want = _release(part[len(sign) :])
        width = max(len(have), len(want))
        left, right = (side + (0,) * (width - len(side)) for side in (have, want))
        holds = {">=": left >= right, ">": left > right, "<=": left <= right, "<": left < right}
        if not holds.get(sign, (left == right) != (sign == "!=")):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `1.31.1+cu12` is (1, 31, 1)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
