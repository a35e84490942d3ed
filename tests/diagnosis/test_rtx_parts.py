"""`doctor` on TensorRT-RTX: made-up machines, and the real packages where they are installed."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tensorrt_machines
import trt_engine.verbs.doctor.machine_checks as checks
from tensorrt_machines import H100, L4, RTX5090, library, rtx_provider, rtx_wheels, write
from trt_engine.command_line.output import result_text as text
from trt_engine.device.info import Gpu
from trt_engine.environment import Environment
from trt_engine.records.diagnosis import BackendState, Diagnosis, DoctorReport
from trt_engine.verbs.doctor.import_probe import tensorrt_rtx_info
from trt_engine.verbs.doctor.machine import Machine
from trt_engine.verbs.doctor.run import _backend_state


def machine(root: Path, board: Gpu | None = L4, library_path: str = "") -> Machine:
    return tensorrt_machines.machine(root, board, library_path)


def said(where: Machine) -> dict[str, Diagnosis]:
    return tensorrt_machines.said(where, checks.tensorrt_rtx)


def state(where: Machine) -> BackendState:
    from trt_engine.backend import list_backends

    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its backend has no builder to look at")
    where._probed.update({"onnx": {}, "numpy": {}})  # they import, which takes a second to find out
    return _backend_state(list_backends()["tensorrt-rtx"], where)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="no packages for this platform")
def test_without_its_packages_the_line_that_brings_them_is_named(tmp_path: Path) -> None:
    for driver, extra in ((L4.driver, "rtx"), ("550.54.15", "rtx-cu12")):
        found = said(machine(tmp_path, replace(L4, driver=driver)))
        assert found["tensorrt-rtx"].status == "absent"
        assert found["tensorrt-rtx"].fix == f'pip install "trt-engine[{extra}]"'
    assert list(said(machine(tmp_path, None))) == ["tensorrt-rtx"]


def test_a_machine_with_a_gpu_of_tensorrt_rtx_runs_engines(tmp_path: Path) -> None:
    rtx_wheels(tmp_path / "site")
    found = said(machine(tmp_path, RTX5090))
    assert found["tensorrt-rtx"].status == "ok"
    for words in (
        "1.7.1.116 for CUDA 13",
        "tensorrt_rtx_libs",
        "builds for 8.9, 12.0",
        f"runs engines on {RTX5090.name}",
    ):
        assert words in found["tensorrt-rtx"].message
    for name in ("tensorrt-rtx-versions", "tensorrt-rtx-driver", "tensorrt-rtx-gpu-0"):
        assert found[name].status == "ok"
    assert found["onnxruntime-rtx"].fix == 'pip install "trt-engine[ort-rtx]"'
    licence = found["tensorrt-rtx-licence"]
    assert licence.status == "note" and "tensorrt_rtx_cu13-1.7.1.116.dist-info/licenses/LICENSE.txt" in licence.message
    assert state(machine(tmp_path, RTX5090)).devices == ("cuda",)


def test_a_gpu_that_is_not_one_of_tensorrt_rtx_leaves_building(tmp_path: Path) -> None:
    rtx_wheels(tmp_path / "site")
    found = said(machine(tmp_path, H100))
    assert "built here and run elsewhere (no RTX GPU)" in found["tensorrt-rtx"].message
    item = found["tensorrt-rtx-gpu-0"]
    assert item.status == "note" and "does not run TensorRT-RTX engines" in item.message and item.fix
    judged = state(machine(tmp_path, H100))
    assert (judged.runs, judged.builds) == (False, True) and "NVIDIA H100 80GB HBM3 (9.0)" in (judged.reason or "")


def test_bindings_over_libraries_of_another_release_are_a_problem(tmp_path: Path) -> None:
    rtx_wheels(tmp_path / "site", libraries="1.6.0.42")
    item = said(machine(tmp_path))["tensorrt-rtx-versions"]
    assert item.status == "problem" and "`tensorrt-rtx-cu13-libs` 1.6.0.42" in item.message
    assert item.fix == 'pip install --force-reinstall "tensorrt-rtx-cu13==1.7.1.*"'


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            "raise ImportError('libtensorrt_rtx.so.1: cannot open shared object file')",
            "libtensorrt_rtx.so.1: cannot open",
        ),
        ("", "is hollow"),
    ],
)
def test_packages_that_cannot_be_imported_are_installed_again(tmp_path: Path, module: str, words: str) -> None:
    rtx_wheels(tmp_path / "site")
    write(tmp_path, "site/tensorrt_rtx/__init__.py", module)
    item = said(machine(tmp_path))["tensorrt-rtx"]
    assert item.status == "warning" and words in item.message
    assert item.fix == 'pip install --force-reinstall "tensorrt-rtx-cu13==1.7.1.*"'


def test_two_libraries_on_the_loaders_path_are_a_warning(tmp_path: Path) -> None:
    rtx_wheels(tmp_path / "site")
    for folder, version in (("opt/old", "1.6.0"), ("opt/new", "1.7.1")):
        library(tmp_path, folder, version, "tensorrt_rtx")
    item = said(machine(tmp_path, library_path="/opt/old:/opt/new"))["tensorrt-rtx-twice"]
    assert item.status == "warning" and "two TensorRT-RTXs on one loader path: 1.6.0" in item.message


def test_the_provider_of_onnx_runtime_has_libraries_of_its_own(tmp_path: Path) -> None:
    site = rtx_provider(rtx_wheels(tmp_path / "site"))
    item = said(machine(tmp_path))["onnxruntime-rtx"]
    assert (
        item.status == "ok"
        and "`onnxruntime-ep-nv-tensorrt-rtx-cu13` 0.5.0 with bundled TensorRT-RTX 1.7.1" in item.message
    )
    assert "needs the libraries of NVIDIA's driver" in said(machine(tmp_path, None))["onnxruntime-rtx"].message
    rtx_provider(tmp_path / "other", "1.6.0")
    rtx_wheels(tmp_path / "other")
    where = replace(machine(tmp_path), packages=(str(tmp_path / "other"),))
    item = said(where)["onnxruntime-rtx"]
    assert item.status == "warning" and "the bindings load 1.7.1.116" in item.message and site.is_dir()


# ------------------------------------------------------------------------------------------------ the real packages


def test_the_real_library_says_its_version_and_its_gpus() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    told = tensorrt_rtx_info()
    assert told["version"] == trt.__version__ and not told["hollow"]
    assert trt.__version__.startswith(f"{told['library']}.")
    assert {"8.0", "8.9", "12.0"} <= set(told["gpus"]) and "9.0" not in told["gpus"]


def test_a_backend_that_builds_and_does_not_run_is_shown_as_such() -> None:
    made = BackendState("tensorrt-rtx", "", False, reason="no GPU", builds=True)
    report = DoctorReport((Diagnosis("python", "ok", "3.11"),), (made,), Environment.detect(), 0, 0)
    assert "tensorrt-rtx  builds engines, cannot run them: no GPU" in text(report)
