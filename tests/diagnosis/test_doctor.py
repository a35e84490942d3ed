"""`doctor`: what is wrong is found and comes with what to type; what is merely absent is a note."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trt_engine.verbs.doctor.machine_checks as checks
from tensorrt_machines import write
from trt_engine.environment import Environment
from trt_engine.installed_from import installable
from trt_engine.limits import LIMITS, RECORD_SIZE
from trt_engine.records.diagnosis import BackendState, Diagnosis, DoctorReport
from trt_engine.reporting.results import result_text
from trt_engine.verbs.doctor.import_probe import identity_model
from trt_engine.verbs.doctor.machine import Machine
from trt_engine.verbs.doctor.run import doctor


def install(folder: Path, name: str, version: str, files: list[str], requires: tuple[str, ...] = ()) -> None:
    """What an installer leaves behind of a package."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    write(folder, f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n")
    write(folder, f"{info}/RECORD", "".join(f"{file},,\n" for file in files))


def look(check: Callable[[Machine], object], machine: Machine) -> list[Diagnosis]:
    return list(check(machine))  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def here() -> DoctorReport:
    return doctor()


def test_this_machine_has_no_problem_and_its_backend_runs(here: DoctorReport) -> None:
    assert not [item for item in here.diagnoses if item.status == "problem"]
    assert here.problems == 0
    state = next(item for item in here.backends if item.name == "onnxruntime")
    assert state.runs and "cpu" in state.devices
    assert "fake" not in [item.name for item in here.backends]


def test_the_newest_opset_onnx_writes_and_onnx_runtime_reads_are_both_found_out(here: DoctorReport) -> None:
    import onnx.defs
    import onnxruntime

    line = next(item for item in here.diagnoses if item.name == "onnx-opset")
    assert f"writes opset {onnx.defs.onnx_opset_version()} " in line.message
    limit = int(line.message.rpartition("up to opset ")[2].split()[0])
    onnxruntime.InferenceSession(identity_model(limit, 7), providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match=f"till opset {limit}"):
        onnxruntime.InferenceSession(identity_model(limit + 1, 7), providers=["CPUExecutionProvider"])


# ------------------------------------------------------------------------------------------------ ONNX Runtime


def test_two_onnx_runtimes_in_one_folder_are_a_problem_with_the_swap_that_ends_it(tmp_path: Path) -> None:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        install(tmp_path, name, "1.31.1", ["onnxruntime/__init__.py"])
    (item,) = look(checks.onnxruntime_packages, Machine(packages=(str(tmp_path),)))
    assert (item.name, item.status) == ("onnxruntime-twice", "problem")
    assert "`onnxruntime` 1.31.1 and `onnxruntime-gpu` 1.31.1 share the folder" in item.message
    assert item.fix == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime"


def test_a_hollow_onnx_runtime_is_a_problem_though_it_imports(tmp_path: Path) -> None:
    write(tmp_path, "onnxruntime/__init__.py", "")
    machine = Machine(packages=(str(tmp_path),))
    (item,) = look(checks.onnxruntime, machine)
    assert item.status == "problem" and "has no attribute 'InferenceSession'" in item.message
    assert item.fix and item.fix.startswith("pip uninstall -y onnxruntime onnxruntime-gpu && pip install")


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        pytest.param(
            "raise ImportError('libfoo.so.1: cannot open shared object file')",
            "pip install --force-reinstall onnxruntime",
            marks=pytest.mark.slow,
        ),
        ("raise ModuleNotFoundError(\"No module named 'onnxruntime'\")", "pip install onnxruntime"),
        pytest.param(  # illegal instruction
            "import os; os.kill(os.getpid(), 4)", "pip install --force-reinstall onnxruntime", marks=pytest.mark.slow
        ),
    ],
)
def test_an_onnx_runtime_that_cannot_be_imported_is_a_problem_and_no_backend_runs(
    source: str, fix: str, tmp_path: Path
) -> None:
    write(tmp_path, "onnxruntime/__init__.py", source)
    report = doctor(Machine(packages=(str(tmp_path),), working_folder=tmp_path, store=tmp_path))
    item = next(item for item in report.diagnoses if item.name == "onnxruntime")
    ((installed, _),) = Machine().owners("onnxruntime", ("onnxruntime",))  # `onnxruntime-gpu` is not replaced
    assert (item.status, item.fix) == ("problem", fix.replace("onnxruntime", installed))
    assert report.problems == 1
    state = next(item for item in report.backends if item.name == "onnxruntime")
    assert not state.runs and state.reason == item.message and state.fix


FAKE_ORT = """
__version__ = "1.31.1"
def get_available_providers(): return ["CUDAExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]
class InferenceSession:  # as the real one does, it falls back without raising
    def __init__(self, model, providers): pass
    def get_providers(self): return ["CPUExecutionProvider"]
"""


def test_a_provider_that_is_in_the_package_and_does_not_run_is_told_with_the_loaders_reason(tmp_path: Path) -> None:
    write(tmp_path, "onnxruntime/__init__.py", FAKE_ORT)
    write(tmp_path, "onnxruntime/capi/libonnxruntime_providers_cuda.so", "not a library")
    first, second = look(checks.onnxruntime, Machine(packages=(str(tmp_path),), root=tmp_path))
    assert (first.status, first.message) == ("ok", "1.31.1, runs on CPUExecutionProvider")
    assert second.name == "provider-cuda" and second.status == "note"
    assert "CUDAExecutionProvider is installed but does not run: " in second.message
    assert "capi/libonnxruntime_providers_cuda.so" in second.message and str(tmp_path) not in second.message
    assert second.fix


# ------------------------------------------------------------------------------------------------ packages


def test_a_missing_and_a_too_new_requirement_are_one_problem_with_one_line_to_type(tmp_path: Path) -> None:
    install(
        tmp_path,
        "trt-engine",
        "0.1.0",
        [],
        ("click<9,>=8.1", "numpy<1.0", "no-such-thing>=2", 'pillow>=11; extra == "x"'),
    )
    first, *_ = look(checks.packages, Machine(packages=(str(tmp_path),)))
    assert (
        first.status == "problem" and "`no-such-thing` is missing" in first.message and "`numpy` is " in first.message
    )
    assert first.fix == 'pip install "numpy<1.0" "no-such-thing>=2"'


@pytest.mark.parametrize(("cuda", "noted"), [(None, "rtx, ort-rtx"), (12, "ort-rtx"), (13, "ort-rtx")])
def test_of_an_extra_for_two_cudas_one_is_enough(tmp_path: Path, cuda: int | None, noted: str) -> None:
    needs = [f'no-such-rtx-cu{number}; extra == "rtx{suffix}"' for number, suffix in ((13, ""), (12, "-cu12"))]
    needs += [f'onnxruntime; extra == "ort-rtx{suffix}"' for suffix in ("", "-cu12")]
    needs += [f'no-such-ort-rtx-cu{number}; extra == "ort-rtx{suffix}"' for number, suffix in ((13, ""), (12, "-cu12"))]
    install(tmp_path, "trt-engine", "0.1.0", [], tuple(needs))
    if cuda is not None:
        install(tmp_path, f"no-such-rtx-cu{cuda}", "1.7.1", [])
    _, note = look(checks.packages, Machine(packages=(str(tmp_path),)))
    assert note.name == "extras" and f"in part: {noted} (" in note.message


def test_bindings_without_their_libraries_name_the_library(tmp_path: Path) -> None:
    install(tmp_path, "tensorrt_cu13_bindings", "11.4.0", ["tensorrt_bindings/__init__.py"])
    missing = "raise ImportError('libnvonnxparser.so.11: cannot open shared object file: No such file or directory')"
    write(tmp_path, "tensorrt_bindings/__init__.py", missing)
    (item,) = look(checks.tensorrt, Machine(packages=(str(tmp_path),)))
    assert item.status == "warning" and "libnvonnxparser.so.11" in item.message
    assert item.fix and "`libnvonnxparser.so.11` on LD_LIBRARY_PATH" in item.fix


# ------------------------------------------------------------------------------------------------ room and tools


@pytest.mark.parametrize(
    ("available_mib", "limit_mib", "status", "fix"),
    [
        (16384, None, "ok", None),
        (1024, None, "warning", "stop other programs, or measure with `--max-batch 16`"),
        (16384, 1024, "warning", "raise the container's or job's memory limit, or measure with `--max-batch 16`"),
        (16384, 8192, "ok", None),
    ],
)
def test_little_memory_is_a_warning_whether_the_machine_or_a_limit_is_small(
    available_mib: int, limit_mib: int | None, status: str, fix: str | None, tmp_path: Path
) -> None:
    write(tmp_path, "/proc/meminfo", f"MemTotal: {32768 << 10} kB\nMemAvailable: {available_mib << 10} kB\n")
    if limit_mib:
        write(tmp_path, "/sys/fs/cgroup/memory.max", str(limit_mib << 20))
    (item,) = look(checks.memory, Machine(root=tmp_path))
    assert (item.status, item.fix) == (status, fix)


@pytest.mark.parametrize(
    ("banner", "found"),
    [
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v101600] [b1] # trtexec --help", "TensorRT 10.16.0"),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v110400] # trtexec --help", "TensorRT 11.4.0"),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec --help", "TensorRT 8.6.1"),
        ("trtexec: error while loading shared libraries: libnvinfer.so.10", "reports no version"),
    ],
)
def test_trtexec_is_found_off_the_path_with_the_version_of_its_banner(banner: str, found: str, tmp_path: Path) -> None:
    write(tmp_path, "usr/src/tensorrt/bin/trtexec", f"#!/bin/sh\necho '{banner}'\n", 0o755)
    first, *_ = look(checks.tools, Machine(root=tmp_path, path=""))
    assert first.name == "trtexec" and found in first.message
    assert first.status == ("ok" if "TensorRT v" in banner else "warning")


def test_the_trtexec_that_is_named_comes_before_path_and_folders(tmp_path: Path) -> None:
    for folder, number in (("usr/src/tensorrt/bin", 8601), ("path", 101600), ("mine", 110400)):
        write(tmp_path, f"{folder}/trtexec", f"#!/bin/sh\necho '&&&& RUNNING x [TensorRT v{number}] # x'\n", 0o755)
    named = tmp_path / "mine/trtexec"
    machine = Machine(root=tmp_path, path=str(tmp_path / "path"), variables={"TRT_ENGINE_TRTEXEC": str(named)})
    assert look(checks.tools, machine)[0].message == f"`{named}`, TensorRT 11.4.0"
    assert machine.tool("trtexec") == named
    gone = look(checks.tools, Machine(root=tmp_path, variables={"TRT_ENGINE_TRTEXEC": str(tmp_path / "gone")}))[0]
    assert gone.status == "warning" and str(tmp_path / "gone") in gone.message


def test_a_driver_without_a_gpu_to_be_seen_is_a_warning_and_no_driver_a_note(tmp_path: Path) -> None:
    if Machine().gpus:
        pytest.skip("this machine has a GPU")
    (none,) = look(checks.gpu, Machine(root=tmp_path))
    assert none.status == "note"
    write(tmp_path, "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Mon\n")
    (hidden,) = look(checks.gpu, Machine(root=tmp_path))
    assert hidden.status == "warning" and "driver 580.65.06" in hidden.message and hidden.fix


# ------------------------------------------------------------------------------------------------ the verb


def test_the_verb_prints_every_line_and_ends_with_zero(
    here: DoctorReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trt_engine.cli.main import run

    monkeypatch.setattr("trt_engine.verbs.doctor.run.doctor", lambda: here)
    monkeypatch.setattr(sys, "argv", ["trt-engine", "doctor"])
    assert run() == 0
    text = capsys.readouterr().out
    shown = [item for item in here.diagnoses if item.status != "absent"]
    fixes = [f"fix: {installable(item.fix)}" for item in shown if item.fix]
    assert all(item.message in text for item in shown) and all(fix in text for fix in fixes)
    assert re.search(r"backends here:\n(  .*\n)*  onnxruntime +runs on cpu\n", text) and "\x1b" not in text
    assert run(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "trt-engine/doctor" and told["problems"] == 0
    assert [item["name"] for item in told["diagnoses"]] == [item.name for item in here.diagnoses]


@pytest.mark.parametrize("gpu", [Diagnosis("gpu", "note", "no NVIDIA GPU"), Diagnosis("gpu-0", "ok", "an L4")])
def test_without_a_gpu_what_is_absent_for_one_is_one_row(gpu: Diagnosis) -> None:
    absent = [Diagnosis(name, "absent", "not found", "pip install it") for name in ("tensorrt", "trtexec")]
    states = [BackendState(name, "", name == "onnxruntime", reason="no module") for name in ("tensorrt", "onnxruntime")]
    text = result_text(DoctorReport((gpu, *absent), tuple(states), Environment.detect(None), 0, 0))
    folded = gpu.status == "note"
    assert ("note  for a GPU  absent: tensorrt, trtexec (`--json`: their fixes)" in text) == folded
    assert all((part in text) != folded for part in ("fix: pip install it", "not found", "cannot run"))


@pytest.mark.slow
def test_the_verb_ends_with_three_when_there_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trt_engine.cli.main import run

    write(tmp_path, "onnxruntime/__init__.py", "")
    report = doctor(Machine(packages=(str(tmp_path),), working_folder=tmp_path, store=tmp_path))
    monkeypatch.setattr("trt_engine.verbs.doctor.run.doctor", lambda: report)
    assert run(["doctor"]) == 3
    text = capsys.readouterr().out
    assert "PROBLEM  onnxruntime" in text and "cannot run: `onnxruntime` is hollow" in text
    assert text.rstrip().splitlines()[-1].startswith("1 problem")
    assert run(["doctor", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["warnings"][0].startswith("onnxruntime: the package is hollow")


def test_a_check_that_fails_is_a_finding_and_the_others_still_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def odd_check(found: Machine) -> Iterator[Diagnosis]:
        yield Diagnosis("before", "ok", "seen")
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(checks, "CHECKS", [odd_check, checks.python])
    report = doctor(Machine(root=tmp_path))
    assert [item.name for item in report.diagnoses] == ["before", "odd-check", "python"]
    failed = report.diagnoses[1]
    assert failed.status == "warning" and failed.fix
    assert failed.message == "could not be checked: OSError: [Errno 24] Too many open files"
    assert report.warnings_found == 1


@pytest.mark.slow
def test_a_probe_that_cannot_start_is_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    report = doctor(Machine(root=tmp_path))
    found = {item.name: item for item in report.diagnoses}
    assert "could not be tested" in found["onnxruntime"].message and found["onnxruntime"].status == "problem"
    assert {"disk-here", "memory", "gpu", "trtexec"} <= set(found)
    assert all(not state.runs for state in report.backends)


def test_the_limits_in_force_are_printed_and_a_variable_that_holds_none_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for limit in LIMITS:
        monkeypatch.delenv(limit.variable, raising=False)
    machine = Machine(tmp_path)
    (line,) = look(checks.limits, machine)
    assert line.status == "ok" and line.message == f"all {len(LIMITS)} at their defaults: `trt-engine docs limits`"
    monkeypatch.setenv(RECORD_SIZE.variable, "2GiB")
    (line,) = look(checks.limits, machine)
    assert (line.status, line.message) == ("note", "TRT_ENGINE_MAX_RECORD_SIZE=2GiB (default 256MiB)")
    monkeypatch.setenv(RECORD_SIZE.variable, "plenty")
    problem, _ = look(checks.limits, machine)
    assert problem.status == "problem" and "`plenty`" in problem.message and problem.fix
