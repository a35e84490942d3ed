"""Read-only view of one machine: packages, tools, files and libraries."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from trt_engine.device import info
from trt_engine.trt.installation import Installation, detect_installation, find_program, find_trtexec
from trt_engine.verbs.doctor.import_probe import RESULT_MARK

_PROBE = Path(__file__).with_name("import_probe.py")
_PROBE_TIMEOUT_S = 180
_TOOL_FOLDERS = ("usr/local/cuda/bin", "opt/nvidia/nsight-systems/*/bin", "opt/nvidia/nsight-compute/*")


@dataclass(frozen=True)
class Machine:
    """A machine seen through its files; `root` and `packages` select another than this one."""

    root: Path = Path("/")
    packages: tuple[str, ...] = ()
    """Package folders searched before this interpreter's."""
    path: str = field(default_factory=lambda: os.environ.get("PATH", ""))
    working_folder: Path = field(default_factory=Path.cwd)
    store: Path | None = None
    library_path: str = field(default_factory=lambda: os.environ.get("LD_LIBRARY_PATH", ""))
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Other environment variables."""
    boards: tuple[info.Gpu, ...] | None = None
    """The GPUs; None for those NVML reports."""
    _probed: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def gpus(self) -> tuple[info.Gpu, ...]:
        return info.gpus() if self.boards is None else self.boards

    @cached_property
    def tensorrt(self) -> Installation:
        """The TensorRT of this machine."""
        return detect_installation(self.root, packages=self.packages, environ=self._environ, known_gpus=self.gpus)

    @cached_property
    def tensorrt_rtx(self) -> Installation:
        """The TensorRT-RTX of this machine."""
        return detect_installation(
            self.root, packages=self.packages, environ=self._environ, known_gpus=self.gpus, product="TensorRT-RTX"
        )

    @property
    def _environ(self) -> dict[str, str]:
        return {**self.variables, "PATH": self.path, "LD_LIBRARY_PATH": self.library_path}

    def environ(self, name: str) -> str | None:
        """The value of a variable, None where unset or empty."""
        return self.variables.get(name) or None

    def under(self, path: str) -> Path:
        """An absolute path under the root of the machine."""
        return Path(path) if self.root == Path("/") else self.root / path.lstrip("/")

    def package_folders(self) -> list[Path]:
        """Folders of Python packages, in import order."""
        return [Path(place) for place in (*self.packages, *(sys.path if self.root == Path("/") else ())) if place]

    @cached_property
    def distributions(self) -> dict[str, metadata.Distribution]:
        """Installed distributions by canonical name, the first on the path."""
        found: dict[str, metadata.Distribution] = {}
        for item in metadata.distributions(path=[*self.packages, *sys.path]):
            with contextlib.suppress(KeyError, TypeError):  # a dist-info without METADATA has no name
                found.setdefault(_canonical(item.metadata["Name"]), item)
        return found

    def version(self, name: str) -> str | None:
        """The installed version of a distribution, or None."""
        found = self.distributions.get(_canonical(name))
        return found.version if found is not None else None

    def owners(self, package: str, prefixes: tuple[str, ...]) -> list[tuple[str, str]]:
        """Name and version of the distributions with these name prefixes that own the folder `package`."""
        return sorted(
            (name, item.version)
            for name, item in self.distributions.items()
            if name.startswith(prefixes)
            and any(str(file).startswith(f"{package}/__init__.py") for file in item.files or ())
        )

    def library_info(self, library: str) -> dict[str, Any]:
        """`probe_import` of a library, once."""
        if library not in self._probed:
            self._probed[library] = self.probe_import(library)
        return self._probed[library]

    @property
    def onnxruntime(self) -> dict[str, Any]:
        return self.library_info("onnxruntime")

    def ort_usable(self) -> bool:
        return "error" not in self.onnxruntime and not self.onnxruntime["hollow"]

    @property
    def driver_loaded(self) -> str | None:
        """Version of the loaded kernel driver, independent of NVML."""
        found = re.search(r"Module\s+([\d.]+)", self.read("/proc/driver/nvidia/version") or "")
        return found[1] if found else None

    def probe_import(self, library: str) -> dict[str, Any]:
        """Import a library in a separate process and return its report; `{"error": ...}` on failure."""
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
            return {
                "error": f"`import {library}` could not be tested: cannot start a process ({error.strerror or error})"
            }
        for line in reversed(done.stdout.splitlines()):
            if line.startswith(RESULT_MARK):
                report: dict[str, Any] = json.loads(line.removeprefix(RESULT_MARK))
                return report
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return {"error": f"`import {library}` ended the process with {how}"}

    def tool(self, name: str) -> Path | None:
        """Path of a program on PATH or in NVIDIA's folders; trtexec also by environment variable."""
        if name == "trtexec":
            return find_trtexec(self.root, self._environ)
        return find_program(name, self.root, self.path, _TOOL_FOLDERS)

    def read(self, path: str) -> str | None:
        """Text of a file under the root, or None."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def memory_mib(self) -> tuple[int, int]:
        """Total and available memory in MiB."""
        values = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            if rest.split():
                values[name] = int(rest.split()[0]) >> 10
        total = values.get("MemTotal", 0)
        return total, values.get("MemAvailable", total)

    def memory_limit_mib(self) -> int | None:
        """Memory limit in MiB of this process's cgroup (v2, then v1); None without limit."""
        limits = [int(text) >> 20 for path in self._limit_files() if (text := self.read(path) or "").isdecimal()]
        total, _ = self.memory_mib()
        return min((limit for limit in limits if not total or limit < total), default=None)

    def _limit_files(self) -> Iterator[str]:
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if not controllers:
                for folder in (Path(path), *Path(path).parents):  # limits of parent groups apply too
                    yield f"/sys/fs/cgroup/{str(folder).strip('/')}/memory.max"
            elif "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory/{path.strip('/')}/memory.limit_in_bytes"
        yield "/sys/fs/cgroup/memory.max"
        yield "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def requirement_holds(version: str, specifier: str) -> bool:
    """Whether a version satisfies a specifier such as `>=1.2,<3` (operators >=, >, <=, <, ==, !=)."""
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
