"""Looking at a machine: packages, tools, limits, versions, as files and processes show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorrt_machines import write
from trt_engine.verbs.doctor.machine import Machine, requirement_holds

MEMINFO = "MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\n"


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        ("1.31.1", ">=1.24.2,<1.32", True),
        ("1.32.0", ">=1.24.2,<1.32", False),
        ("1.24.1", ">=1.24.2,<1.32", False),
        ("1.24.2", ">=1.24.2", True),
        ("2", "<3", True),
        ("3.0.0", "<3", False),
        ("13.580", ">=13.580", True),
        ("1.31.1+cu12", "==1.31.1", True),
        ("1.31.1", "!=1.31.1", False),
        ("1.31.2", "!=1.31.1", True),
        ("1.32.0rc1", "<=1.32", True),
        ("5", "", True),
        ("8.5.1", "<9,>=8.1", True),
    ],
)
def test_a_version_meets_a_requirement_or_not(version: str, specifier: str, holds: bool) -> None:
    assert requirement_holds(version, specifier) is holds


def test_the_owners_of_a_folder_are_found_by_what_they_installed(tmp_path: Path) -> None:
    for name, files in (
        ("onnxruntime", ["onnxruntime/__init__.py"]),
        ("onnxruntime_gpu", ["onnxruntime/__init__.py", "onnxruntime/capi/x.so"]),
        ("onnxruntime_extensions", ["onnxruntime_extensions/__init__.py"]),
        ("other", ["onnxruntime/__init__.py"]),
    ):
        write(tmp_path, f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        write(tmp_path, f"{name}-1.0.dist-info/RECORD", "".join(f"{file},,\n" for file in files))
    machine = Machine(packages=(str(tmp_path),))
    assert machine.owners("onnxruntime", ("onnxruntime",)) == [("onnxruntime", "1.0"), ("onnxruntime-gpu", "1.0")]
    assert machine.version("OnnxRuntime.GPU") == "1.0"
    assert machine.version("no-such-package") is None


def test_a_tool_is_found_on_the_path_and_where_nvidias_packages_put_it(tmp_path: Path) -> None:
    write(tmp_path, "usr/src/tensorrt/bin/trtexec", "#!/bin/sh\n", 0o755)
    write(tmp_path, "opt/nvidia/nsight-systems/2025.1/bin/nsys", "#!/bin/sh\n", 0o755)
    newer = write(tmp_path, "opt/nvidia/nsight-systems/2025.6/bin/nsys", "#!/bin/sh\n", 0o755)
    write(tmp_path, "usr/local/cuda/bin/ncu", "not a program", 0o644)
    own = write(tmp_path, "own/nvcc", "#!/bin/sh\n", 0o755)
    machine = Machine(root=tmp_path, path=str(tmp_path / "own"))
    assert machine.tool("trtexec") == tmp_path / "usr/src/tensorrt/bin/trtexec"
    assert machine.tool("nsys") == newer
    assert machine.tool("nvcc") == own
    assert machine.tool("ncu") is None


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": f"{4 << 30}\n"}, 4096),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/memory.max": f"{2 << 30}\n"}, 2048),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/memory.max": f"{2 << 30}\n",
                "/sys/fs/cgroup/a/b/memory.max": f"{1 << 30}\n",
            },
            1024,
        ),
        ({"/proc/self/cgroup": "4:memory:/j\n", "/sys/fs/cgroup/memory/j/memory.limit_in_bytes": f"{1 << 30}\n"}, 1024),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),  # version 1's "no limit"
    ],
)
def test_the_memory_limit_is_the_smallest_of_the_control_groups_above(
    files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    write(tmp_path, "/proc/meminfo", MEMINFO)
    for path, text in files.items():
        write(tmp_path, path, text)
    machine = Machine(root=tmp_path)
    assert machine.memory_mib() == (32768, 16384)
    assert machine.memory_limit_mib() == limit


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('libnvinfer.so.10: cannot open shared object file')", "ImportError: libnvinfer.so.10"),
        ("import os; os.kill(os.getpid(), 11)", "`import broken_library` ended the process with signal 11"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "`import broken_library` ended the process with exit code 7"),
    ],
)
def test_a_library_that_breaks_its_process_breaks_nothing_here(source: str, error: str, tmp_path: Path) -> None:
    write(tmp_path, "broken_library.py", source)
    told = Machine(packages=(str(tmp_path),)).probe_import("broken_library")
    assert told["error"].startswith(error)


def test_a_library_that_talks_while_it_is_imported_is_still_heard(tmp_path: Path) -> None:
    write(tmp_path, "talks.py", "print('hello'); __version__ = '3.1'\nimport atexit; atexit.register(print, 'bye')")
    assert Machine(packages=(str(tmp_path),)).probe_import("talks") == {"version": "3.1"}
