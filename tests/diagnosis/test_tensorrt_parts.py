"""`doctor` on made-up machines with TensorRT: what belongs together, what does not, and what to type for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import tensorrt_machines as made
import trt_engine.verbs.doctor.machine_checks as checks
from trt_engine.device.info import Gpu
from trt_engine.records.diagnosis import Diagnosis
from trt_engine.verbs.doctor.machine import Machine
from trt_engine.verbs.doctor.run import doctor

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "doctor.json"


def said(where: Machine) -> dict[str, Diagnosis]:
    """What the checks of TensorRT, its tools and containers say, by name."""
    looks = (checks.container, checks.tensorrt, checks.tensorrt_together, checks.tools)
    return made.said(where, *looks)


# ------------------------------------------------------------------------------------------------ what belongs together


def test_a_machine_where_all_is_of_one_release_is_told_in_full(tmp_path: Path) -> None:
    made.wheels(tmp_path / "site", "10.16.1.11")
    made.write(tmp_path, "site/tensorrt_libs/libnvinfer_plugin.so.10", "\x7fELF")
    made.debian(tmp_path, "10.16.1.11-1+cuda13.0", "libnvinfer-bin")
    made.trtexec(tmp_path, "101601", 11)
    found = said(made.machine(tmp_path))
    assert found["tensorrt"].status == "ok" and "10.16.1.11, for CUDA 13" in found["tensorrt"].message
    together = found["tensorrt-versions"]
    assert together.status == "ok"
    for part in ("`tensorrt-cu13-bindings`", "the libnvinfer under them", "trtexec", "the package `libnvinfer-bin`"):
        assert f"{part} 10.16.1.11" in together.message
    assert found["tensorrt-driver"].status == found["tensorrt-gpu-0"].status == found["tensorrt-plugins"].status == "ok"
    assert found["trtexec"].status == "ok" and "10.16.1.11" in found["trtexec"].message


def test_bindings_and_trtexec_of_two_releases_are_a_warning_with_the_wheel_of_trtexec(tmp_path: Path) -> None:
    made.wheels(tmp_path / "site", "11.4.0.106")
    made.trtexec(tmp_path, "101601", 11)
    item = said(made.machine(tmp_path))["tensorrt-versions"]
    assert item.status == "warning" and "11.4.0.106" in item.message and "10.16.1.11" in item.message
    assert item.fix and item.fix.startswith('pip install "tensorrt-cu13==10.16.1.*"')


def test_wheels_of_two_cudas_in_one_folder_are_a_problem_with_the_swap(tmp_path: Path) -> None:
    for cuda in (12, 13):
        made.wheels(tmp_path / "site", "10.16.1.11", cuda)
    item = said(made.machine(tmp_path))["tensorrt-cuda"]
    assert item.status == "problem" and "CUDA 12 and 13" in item.message
    assert item.fix and item.fix.endswith('pip install "tensorrt-cu13==10.16.1.*"')
    assert all(f"tensorrt-cu{cuda}-{part}" in item.fix for cuda in (12, 13) for part in ("bindings", "libs"))


# ------------------------------------------------------------------------------------------------ what is missing


def test_without_tensorrt_the_line_that_brings_the_one_for_this_gpu_is_named(tmp_path: Path) -> None:
    for board, wanted in (
        (made.H100, 'pip install "tensorrt-cu13>=10.13.2"'),
        (made.V100, 'pip install "tensorrt-cu12<10.5"'),
        (replace(made.RTX5090, driver="570.86.10"), 'pip install "tensorrt-cu12>=10.8"'),
        (None, None),
    ):
        item = said(made.machine(tmp_path, board))["tensorrt"]
        assert (item.status, item.fix) == ("absent", wanted)


def test_libraries_without_bindings_get_the_bindings_of_their_release(tmp_path: Path) -> None:
    made.library(tmp_path, "usr/lib/x86_64-linux-gnu", "10.16.1")
    item = said(made.machine(tmp_path))["tensorrt"]
    assert "the library 10.16.1 is in" in item.message and item.fix == 'pip install "tensorrt-cu13==10.16.1.*"'


def test_bindings_that_miss_a_library_which_lies_off_the_path_get_the_export(tmp_path: Path) -> None:
    made.package(tmp_path / "site", "tensorrt-cu13-bindings", "11.4.0.106")
    missing = "raise ImportError('libnvonnxparser.so.11: cannot open shared object file: No such file or directory')"
    made.write(tmp_path, "site/tensorrt/__init__.py", missing)
    assert said(made.machine(tmp_path))["tensorrt"].fix == (
        'pip install "tensorrt-cu13==11.4.0.*", or put the folder of `libnvonnxparser.so.11` on LD_LIBRARY_PATH'
    )
    place = made.library(tmp_path, "usr/local/TensorRT-11.4.0/lib", "11.4.0", "nvonnxparser")
    item = said(made.machine(tmp_path))["tensorrt"]
    assert item.status == "warning" and item.fix == f"export LD_LIBRARY_PATH={place.parent}:$LD_LIBRARY_PATH"


def test_a_trtexec_that_misses_its_library_gets_the_package_or_the_export(tmp_path: Path) -> None:
    made.trtexec(tmp_path, "trtexec: error while loading shared libraries: libnvinfer_plugin.so.10: cannot open")
    item = said(made.machine(tmp_path))["trtexec"]
    assert item.status == "warning" and item.fix == "sudo apt-get install libnvinfer-plugin10"
    made.library(tmp_path, "opt/tensorrt/lib", "10.16.1", "nvinfer_plugin")
    assert (
        said(made.machine(tmp_path))["trtexec"].fix
        == f"export LD_LIBRARY_PATH={tmp_path}/opt/tensorrt/lib:$LD_LIBRARY_PATH"
    )


def test_the_plugin_library_is_looked_for_beside_libnvinfer(tmp_path: Path) -> None:
    made.library(tmp_path, "usr/lib/x86_64-linux-gnu", "10.16.1")
    item = said(made.machine(tmp_path))["tensorrt-plugins"]
    assert item.status == "warning" and "could not find plugin" in item.message
    assert item.fix == "sudo apt-get install libnvinfer-plugin10"
    made.library(tmp_path, "opt/old/lib", "10.3.0", "nvinfer_plugin")
    item = said(made.machine(tmp_path, library_path="/opt/old/lib"))["tensorrt-plugins"]
    assert item.status == "warning" and "libnvinfer_plugin is 10.3.0" in item.message and "10.16.1" in item.message
    made.library(tmp_path, "usr/lib/x86_64-linux-gnu", "10.16.1", "nvinfer_plugin")
    item = said(made.machine(tmp_path))["tensorrt-plugins"]
    assert item.status == "ok" and "-O plugins=" in item.message


# ------------------------------------------------------------------------------------------------ GPUs and drivers


@pytest.mark.parametrize(
    ("board", "version", "status", "words", "fix"),
    [
        (made.H100, "10.16.1.11", "ok", "fp8, int4; not nvfp4, mxfp8", None),
        (made.A10, "10.16.1.11", "ok", "int8, int4; not fp8, nvfp4, mxfp8", None),
        (made.RTX5090, "10.16.1.11", "ok", "nvfp4, mxfp8", None),
        (made.RTX5090, "10.8.0.43", "ok", "nvfp4; not mxfp8", None),
        (
            made.RTX5090,
            "10.7.0.23",
            "problem",
            "does not run on NVIDIA GeForce RTX 5090",
            'pip install "tensorrt-cu12>=10.8"',
        ),
        (made.V100, "10.4.0.26", "ok", "fp16, int8; not tf32, bf16", None),
        (made.V100, "10.16.1.11", "problem", "does not run on Tesla V100", 'pip install "tensorrt-cu12<10.5"'),
        (
            replace(made.H100, compute_capability="15.0"),
            "11.4.0.106",
            "note",
            "NVIDIA does not list this GPU",
            "trt-engine build",
        ),
    ],
)
def test_each_gpu_is_held_against_this_tensorrt_and_every_precision(
    board: Gpu, version: str, status: str, words: str, fix: str | None, tmp_path: Path
) -> None:
    made.wheels(tmp_path / "site", version, 12)
    item = said(made.machine(tmp_path, board))["tensorrt-gpu-0"]
    assert item.status == status and words in item.message
    assert (item.fix is None) if fix is None else (item.fix or "").startswith(fix)


def test_a_driver_below_the_floor_of_the_wheels_cuda_is_a_problem(tmp_path: Path) -> None:
    made.wheels(tmp_path / "site", "10.16.1.11", 13)
    item = said(made.machine(tmp_path, replace(made.H100, driver="550.54.15")))["tensorrt-driver"]
    assert item.status == "problem" and "needs driver 580" in item.message
    assert item.fix and item.fix.startswith("pip uninstall -y tensorrt-cu13-bindings tensorrt-cu13-libs && pip install")
    assert '"tensorrt-cu12==10.16.1.*"' in item.fix
    item = said(made.machine(tmp_path, replace(made.H100, driver="470.1")))["tensorrt-driver"]
    assert item.fix == "sudo apt-get install nvidia-driver-580 (or newer)"


def test_debians_cuda_is_held_against_the_driver_too(tmp_path: Path) -> None:
    made.library(tmp_path, "usr/lib/x86_64-linux-gnu", "10.16.1")
    made.debian(tmp_path, "10.16.1.11-1+cuda13.0", "libnvinfer10")
    made.write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1.2  Tue\n")
    item = said(made.machine(tmp_path, None))["tensorrt-driver"]
    assert item.status == "problem" and "for CUDA 13 needs driver 580, here is 535.1.2" in item.message


# ------------------------------------------------------------------------------------------------ the loader's path


def test_two_tensorrts_on_one_path_name_the_winner_and_the_symptom(tmp_path: Path) -> None:
    made.library(tmp_path, "opt/a", "10.3.0")
    made.library(tmp_path, "opt/b", "10.16.1")
    item = said(made.machine(tmp_path, library_path="/opt/a:/opt/b"))["tensorrt-twice"]
    assert item.status == "warning" and "10.3.0 in" in item.message.split("wins")[0] and "0 % GPU" in item.message
    assert item.fix and item.fix.startswith(f"export LD_LIBRARY_PATH={tmp_path}/opt/a ")


def test_stubs_and_folders_that_are_gone_are_taken_out_of_the_path(tmp_path: Path) -> None:
    made.write(tmp_path, "usr/local/cuda/lib64/stubs/libcuda.so", "stub")
    made.write(tmp_path, "opt/lib/some.so", "")
    found = said(made.machine(tmp_path, library_path="/usr/local/cuda/lib64/stubs:/opt/lib:/none"))
    assert found["library-path-stubs"].status == "problem"
    assert found["library-path-stubs"].fix == "export LD_LIBRARY_PATH=/opt/lib:/none"
    assert found["library-path"].status == "note" and "`/none`, which is not there" in found["library-path"].message
    assert said(made.machine(tmp_path, library_path="/none"))["library-path"].fix == "unset LD_LIBRARY_PATH"
    assert said(made.machine(tmp_path, library_path="/opt/lib"))["library-path"].status == "ok"
    assert "library-path" not in said(made.machine(tmp_path))


def install_parts(folder: Path, stem: str, parts: str, cuda: int = 13) -> None:
    """The packages of a product and its modules: without the libraries the bindings fail to import."""
    product, version = stem.replace("-", "_"), "1.7.1.116" if stem.endswith("rtx") else "11.4.0.106"
    name = {"tensorrt": "nvinfer", "tensorrt_rtx": "tensorrt_rtx"}.get(product, product.replace("tensorrt", "nvinfer"))
    file = f"lib{name}.so.{version.partition('.')[0]}"
    for part in parts.split():
        made.package(folder, f"{stem}-cu{cuda}" if part == "all" else f"{stem}-cu{cuda}-{part}", version)
    imports = f"from {product}_bindings import *\nfrom {product}_bindings import __version__\n"
    missing = f"raise ModuleNotFoundError(\"No module named '{product}'\")\n"  # this environment may have the real one
    made.write(folder, f"{product}/__init__.py", imports if "all" in parts else missing)
    if "libs" in parts:
        made.write(folder, f"{product}_libs/{file}", "\x7fELF")
    if "bindings" in parts:
        text = f"__version__ = '{version}'\nclass Builder: pass\n"
        text += "" if "libs" in parts else f"raise ImportError('{file}: cannot open shared object file')\n"
        made.write(folder, f"{product}_bindings/__init__.py", text)


@pytest.mark.parametrize("parts", ["", "libs", "bindings", "bindings libs", "all bindings", "all bindings libs"])
@pytest.mark.parametrize("stem", ["tensorrt", "tensorrt-lean", "tensorrt-dispatch", "tensorrt-rtx"])
def test_an_installation_is_known_for_what_it_is_and_completed_by_what_it_lacks(
    stem: str, parts: str, tmp_path: Path
) -> None:
    install_parts(tmp_path / "site", stem, parts)
    here = made.machine(tmp_path, None)
    found = said(here) | {item.name: item for item in checks.tensorrt_rtx(here)}
    small = stem in ("tensorrt-lean", "tensorrt-dispatch")
    if not parts and small:
        assert stem not in found
        return
    item = found[stem]
    complete = parts in ("bindings libs", "all bindings libs") if small else parts == "all bindings libs"
    assert item.status == ("ok" if complete else "warning" if "bindings" in parts else "note" if parts else "absent")
    if complete or not parts:
        assert "pip install --force-reinstall" not in (item.fix or "")
    else:
        release = "1.7.1" if stem.endswith("rtx") else "11.4.0"
        assert (item.fix or "").startswith(f'pip install "{stem}-cu13=={release}.*"')
    others = {"tensorrt", "tensorrt-lean", "tensorrt-dispatch", "tensorrt-rtx"} & set(found) - {stem}
    assert all(found[name].status in ("note", "absent") for name in others) and f"{stem}-cuda" not in found


@pytest.mark.parametrize("stem", ["tensorrt-lean", "tensorrt-dispatch"])
def test_a_smaller_runtime_beside_tensorrt_is_held_against_its_own_packages(stem: str, tmp_path: Path) -> None:
    site = made.wheels(tmp_path / "site", "10.16.1.11", 13)
    install_parts(site, stem, "bindings libs", cuda=12)
    found = said(made.machine(tmp_path))
    assert found["tensorrt"].status == found["tensorrt-versions"].status == found[f"{stem}-versions"].status == "ok"
    assert "tensorrt-cuda" not in found and "11.4.0.106 for CUDA 12" in found[stem].message
    made.package(site, f"{stem}-cu13-libs", "11.4.0.106")
    item = said(made.machine(tmp_path))[f"{stem}-cuda"]
    assert item.status == "problem" and f"`{stem.replace('-', '_')}_bindings/`" in item.message
    assert item.fix == (
        f'pip uninstall -y {stem}-cu12-bindings {stem}-cu12-libs {stem}-cu13-libs && pip install "{stem}-cu13==11.4.0.*"'
    )


# ------------------------------------------------------------------------------------------------ ONNX Runtime's provider


def test_the_provider_is_held_against_the_tensorrt_it_links(tmp_path: Path) -> None:
    site = made.onnxruntime_gpu(tmp_path / "site")
    item = said(made.machine(tmp_path))["onnxruntime-tensorrt"]
    assert (item.status, item.fix) == ("absent", 'pip install "tensorrt-cu12==10.*"')
    made.wheels(site, "11.4.0.106", 12)
    item = said(made.machine(tmp_path))["onnxruntime-tensorrt"]
    assert item.status == "warning" and "links `libnvinfer.so.10`, and the TensorRT here is 11.4.0.106" in item.message
    assert item.fix and 'pip install "tensorrt-cu12==10.*"' in item.fix


@pytest.mark.parametrize(("cuda", "status"), [(12, "ok"), (13, "warning")])
def test_a_wheel_the_provider_can_use_comes_with_the_export_or_the_right_cuda(
    cuda: int, status: str, tmp_path: Path
) -> None:
    made.wheels(made.onnxruntime_gpu(tmp_path / "site"), "10.16.1.11", cuda)
    item = said(made.machine(tmp_path))["onnxruntime-tensorrt"]
    assert item.status == status and item.fix
    if status == "ok":
        assert f"export LD_LIBRARY_PATH={tmp_path}/site/tensorrt_libs:$LD_LIBRARY_PATH" in item.fix
    else:
        assert "CUDA 12, and the wheel here is TensorRT 10.16.1.11 for CUDA 13" in item.message
        assert item.fix.endswith('pip install "tensorrt-cu12==10.16.1.*"')


# ------------------------------------------------------------------------------------------------ containers


def test_a_container_lists_what_it_already_has(tmp_path: Path) -> None:
    made.write(tmp_path, ".dockerenv", "")
    made.wheels(tmp_path / "site", "10.11.0.33", 12)
    program = made.trtexec(tmp_path, "101100")
    found = said(made.machine(tmp_path, CUDA_VERSION="12.9.1.010", NVIDIA_PYTORCH_VERSION="25.06"))
    item = found["container"]
    assert item.status == "note" and item.message.endswith(
        f"it has TensorRT 10.11.0.33, `{program}`, CUDA 12.9.1.010, NVIDIA's PyTorch 25.06"
    )
    assert "container-gpu" not in found


@pytest.mark.parametrize("variables", [{"NVIDIA_VISIBLE_DEVICES": "all"}, {}])
def test_a_container_started_without_its_gpu_says_how_to_start_it(tmp_path: Path, variables: dict[str, str]) -> None:
    made.write(tmp_path, ".dockerenv", "")
    if not variables:
        made.write(
            tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Mon\n"
        )
    item = said(made.machine(tmp_path, None, **variables))["container-gpu"]
    assert item.status == "warning" and item.fix and item.fix.startswith("docker run --gpus all")


def test_a_host_with_docker_needs_the_toolkit_and_its_configuration(tmp_path: Path) -> None:
    made.write(tmp_path, "bin/docker", "#!/bin/sh\n", 0o755)
    host = replace(made.machine(tmp_path), path=str(tmp_path / "bin"))
    item = said(host)["container-toolkit"]
    assert item.status == "warning" and item.fix and "apt-get install nvidia-container-toolkit" in item.fix
    made.write(tmp_path, "bin/nvidia-ctk", "#!/bin/sh\n", 0o755)
    item = said(host)["container-toolkit"]
    assert item.status == "note" and item.fix and "nvidia-ctk runtime configure" in item.fix
    made.write(tmp_path, "etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
    assert said(host)["container-toolkit"].status == "ok"
    assert "container-toolkit" not in said(made.machine(tmp_path))


# ------------------------------------------------------------------------------------------------ the verb


def _many(root: Path) -> Machine:
    """A machine with nearly everything wrong."""
    made.wheels(made.onnxruntime_gpu(root / "site", cuda=13), "10.16.1.11", 13)
    made.wheels(root / "site", "10.16.1.11", 12)
    made.trtexec(root, "110400", 106)
    made.library(root, "opt/a", "10.3.0")
    made.library(root, "opt/b", "10.7.0")
    made.write(root, "bin/docker", "#!/bin/sh\n", 0o755)
    return replace(made.machine(root, made.V100, "/opt/a:/opt/b:/none"), path=str(root / "bin"))


@pytest.mark.slow
def test_doctor_json_holds_to_its_schema_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trt_engine.cli.main import run

    schema = json.loads(SCHEMA.read_text())
    makers: tuple[Callable[[Path], Machine], ...] = (_many, lambda root: made.machine(root, None))
    for number, make in enumerate(makers):
        (tmp_path / str(number)).mkdir()
        report = doctor(make(tmp_path / str(number)))
        monkeypatch.setattr("trt_engine.verbs.doctor.run.doctor", lambda report=report: report)
        assert run(["doctor", "--json"]) == (3 if report.problems else 0)
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        jsonschema.validate(told, schema)
        names = {item["name"] for item in told["diagnoses"]}
        assert len(names) == len(told["diagnoses"])
        if number == 0:
            assert {"tensorrt-cuda", "tensorrt-driver", "tensorrt-gpu-0", "tensorrt-twice", "tensorrt-versions",
                    "container-toolkit", "library-path", "onnxruntime-cuda"} <= names  # fmt: skip
            problems = {item["name"] for item in told["diagnoses"] if item["status"] == "problem"}
            assert problems == {"tensorrt-cuda", "tensorrt-gpu-0", "onnxruntime-cuda"}


@pytest.mark.slow
def test_a_backend_says_what_it_lacks_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    made.wheels(tmp_path / "site", "10.16.1.11")
    states = {item.name: item for item in doctor(made.machine(tmp_path, None)).backends}
    assert not states["tensorrt"].runs and "NVIDIA GPU" in (states["tensorrt"].reason or "") and states["tensorrt"].fix
    assert not states["trtexec"].runs and "`trtexec` was not found" in (states["trtexec"].reason or "")
    made.trtexec(tmp_path, "trtexec: error while loading shared libraries: libnvinfer.so.10")
    states = {item.name: item for item in doctor(made.machine(tmp_path)).backends}
    assert states["tensorrt"].runs and states["tensorrt"].devices == ("cuda",)
    assert "does not start" in (states["trtexec"].reason or "")


def test_onnx_runtimes_cuda_is_held_against_the_driver(tmp_path: Path) -> None:
    made.onnxruntime_gpu(tmp_path / "site", cuda=13)
    assert said(made.machine(tmp_path))["onnxruntime-cuda"].status == "ok"
    item = said(made.machine(tmp_path, made.V100))["onnxruntime-cuda"]
    assert item.status == "problem" and "CUDA 13, which needs driver 580; here is 550.54.15" in item.message
