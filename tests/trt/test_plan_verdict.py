"""Whether a plan can be used here: the verdict, the one reason, and a command that can be typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_machines import (
    A10,
    H100,
    H200,
    L4,
    RTX5090,
    V100,
    header,
    library,
    package,
    passport,
    plan_bytes,
    trtexec,
    wheels,
    write,
)
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device.info import Gpu
from trt_engine.engine import Engine, payload_files
from trt_engine.records.passport import Compatibility
from trt_engine.trt.compatibility import check_compatibility, check_plan
from trt_engine.trt.installation import Installation, Library, Package, detect_installation
from trt_engine.trt.settings import PlanSettings
from trt_engine.trt.versions import Version

BUILT = (10, 16, 1, 11)
T4 = Gpu(0, "Tesla T4", "GPU-7", 15360, "7.5", "580.159.03")


def bindings(version: str = "10.16.1.11", board: Gpu | None = H100, **more: Any) -> Installation:
    """A machine with pip's TensorRT and one GPU."""
    parsed = Version.parse(version)
    assert parsed is not None
    found = Installation(
        packages=(Package("tensorrt-cu12-bindings", parsed), Package("tensorrt-cu12-libs", parsed)),
        bundled=(Library("nvinfer", Path("/site/tensorrt_libs/libnvinfer.so"), parsed, "pip"),),
        gpus=(board,) if board else (),
        driver=board.driver if board else None,
    )
    return replace(found, **more)


def judged(here: Installation, given: Any = None, **more: Any) -> Compatibility:
    return check_plan(header(BUILT), given, here, path=Path("model.engine"), **more)


def test_the_same_tensorrt_and_the_same_gpu_load() -> None:
    found = judged(bindings(), passport())
    assert found.status == "loads" and "10.16.1.11" in found.reason
    assert found.command == "trt-engine bench model.engine"


def test_a_bare_plan_loads_and_says_what_it_cannot_know() -> None:
    found = judged(bindings())
    assert found.status == "loads" and "does not state its GPU" in found.reason
    assert found.command == "trt-engine inspect model.engine --run"


@pytest.mark.parametrize("here", ["10.16.1.12", "10.16.2.3", "10.3.0.26", "11.4.0.106", "8.6.1.6"])
def test_another_tensorrt_means_to_build_again_with_the_command_that_does(here: str) -> None:
    found = judged(bindings(here), passport())
    assert found.status == "rebuild"
    assert "10.16.1.11" in found.reason and here in found.reason
    assert found.command == "trt-engine build model.onnx --backend tensorrt"


@pytest.mark.parametrize("version", [(8, 5, 3, 1), (0, 0, 0, 0), (7, 2, 3, 4), (255, 0, 0, 0)])
def test_a_header_no_tensorrt_writes_is_damage_whatever_is_installed(version: tuple[int, int, int, int]) -> None:
    found = check_plan(header(version), None, bindings(".".join(map(str, version))))
    assert found.status == "refuse" and "damaged, or of TensorRT 8.5 or older" in found.reason


def test_without_tensorrt_the_command_installs_the_plans_own() -> None:
    found = judged(Installation(gpus=(H100,), driver=H100.driver), passport())
    assert found.status == "refuse" and "not installed" in found.reason
    assert found.command == 'pip install "tensorrt-cu13==10.16.1.*"'
    old = judged(Installation(gpus=(V100,), driver=V100.driver))
    assert old.command == 'pip install "tensorrt-cu12==10.16.1.*"'


# ------------------------------------------------------------------------------------------------ trtexec


def test_trtexec_of_the_plans_version_beside_other_bindings_is_a_penalty_with_the_way_out() -> None:
    here = bindings("11.4.0.106", trtexec=Path("/t/trtexec"), trtexec_version=Version((10, 16, 1)))
    found = judged(here, passport(backend="trtexec"))
    assert found.status == "penalty" and "Python bindings are 11.4.0.106" in found.reason
    assert found.command and found.command.startswith("pip install")


def test_a_trtexec_that_does_not_start_is_quoted() -> None:
    here = Installation(trtexec=Path("/t/trtexec"), trtexec_message="libnvinfer.so.10: cannot open", gpus=(H100,))
    found = judged(here)
    assert found.status == "refuse" and "cannot open" in found.reason and found.command == "trt-engine doctor"


# ------------------------------------------------------------------------------------------------ two on one path


def test_two_tensorrts_on_one_loader_path_are_refused_where_the_wrong_one_wins(tmp_path: Path) -> None:
    package(tmp_path / "site", "tensorrt-cu12-bindings", "10.16.1.11")
    for folder, version in (("opt/old", "10.3.0"), ("opt/new", "10.16.1")):
        library(tmp_path, folder, version)

    def found(order: str) -> Compatibility:
        here = detect_installation(
            tmp_path, packages=[tmp_path / "site"], environ={"LD_LIBRARY_PATH": order}, known_gpus=(H100,)
        )
        return judged(here, passport())

    wrong = found("/opt/old:/opt/new")
    assert wrong.status == "refuse" and "two TensorRTs" in wrong.reason and "0 % GPU" in wrong.reason
    assert wrong.command == f"export LD_LIBRARY_PATH={tmp_path}/opt/new:$LD_LIBRARY_PATH"
    assert found("/opt/new:/opt/old").status == "loads"


def test_pips_own_libraries_are_not_disturbed_by_the_loader_path(tmp_path: Path) -> None:
    site = wheels(tmp_path / "site", "10.16.1.11")
    for folder, version in (("opt/a", "10.3.0"), ("opt/b", "10.7.0")):
        library(tmp_path, folder, version)
    here = detect_installation(
        tmp_path, packages=[site], environ={"LD_LIBRARY_PATH": "/opt/a:/opt/b"}, known_gpus=(H100,)
    )
    assert here.conflicting_libraries and judged(here, passport()).status == "loads"


# ------------------------------------------------------------------------------------------------ containers


@pytest.mark.parametrize(
    ("made", "now", "words"),
    [
        ("docker", None, "built in a container (docker) and this is the host"),
        (None, "docker", "built on a host and this is a container (docker)"),
    ],
)
def test_a_plan_of_a_container_on_the_host_is_told_with_the_symptom(
    made: str | None, now: str | None, words: str
) -> None:
    found = judged(bindings("10.3.0.26", container=now), passport(container=made))
    assert found.status == "rebuild" and words in found.reason and "0 % GPU" in found.reason
    same = judged(bindings("10.3.0.26", container=made), passport(container=made))
    assert "container" not in same.reason
    assert judged(bindings(container=now), passport(container=made)).status == "loads"


# ------------------------------------------------------------------------------------------------ version-compatible


def test_a_version_compatible_plan_needs_a_yes_and_then_runs_on_later_versions_with_a_penalty() -> None:
    plan = passport(version_compatible=True)
    for here in ("10.16.1.11", "11.4.0.106"):
        refused = judged(bindings(here), plan)
        assert refused.status == "refuse" and "carries host code" in refused.reason
        assert refused.command == "trt-engine bench model.engine -O allow_host_code=on"
    allowed = PlanSettings(allow_host_code=True)
    assert judged(bindings("10.16.1.11"), plan, settings=allowed).status == "loads"
    later = judged(bindings("11.4.0.106"), plan, settings=allowed)
    assert later.status == "penalty" and "slower" in later.reason
    earlier = judged(bindings("10.3.0.26"), plan, settings=allowed)
    assert earlier.status == "rebuild" and "10.x, 11.x" in earlier.reason


def test_a_plan_without_its_lean_runtime_wants_that_of_its_own_version(tmp_path: Path) -> None:
    plan = passport(version_compatible=True, lean_runtime=True)
    here = bindings("11.4.0.106")
    refused = judged(here, plan)
    assert refused.status == "refuse" and "lean" in refused.reason
    assert refused.command == 'pip install "tensorrt-lean-cu12==10.16.1.*"'
    own, other = library(tmp_path, "a", "10.16.1", "nvinfer_lean"), library(tmp_path, "b", "10.3.0", "nvinfer_lean")
    there = tuple(
        Library("nvinfer_lean", path, Version(parts), "default")
        for path, parts in ((other, (10, 3, 0)), (own, (10, 16, 1)))
    )
    named = judged(replace(here, libraries=there), plan)
    assert named.command == f"trt-engine bench model.engine -O lean_runtime={own}"
    assert judged(here, plan, settings=PlanSettings(lean_runtime=str(own))).status == "penalty"
    gone = judged(here, plan, settings=PlanSettings(lean_runtime="/nowhere/lib.so"))
    assert gone.status == "refuse" and "/nowhere/lib.so" in gone.reason
    assert judged(bindings("10.16.1.11"), plan).status == "loads"


# ------------------------------------------------------------------------------------------------ GPUs


@pytest.mark.parametrize(
    ("built", "here", "level", "expected", "words"),
    [
        (H100, H200, "none", "penalty", "same architecture"),
        (H100, H200, "same_compute_capability", "loads", ""),
        (H100, A10, "none", "rebuild", "between architectures"),
        (H100, A10, "same_compute_capability", "rebuild", "one compute capability"),
        (H100, A10, "ampere_plus", "penalty", "Ampere"),
        (A10, RTX5090, "ampere_plus", "penalty", "Ampere"),
        (H100, V100, "none", "refuse", "before 10.5"),
        (H100, T4, "ampere_plus", "rebuild", "between architectures"),
    ],
)
def test_a_plan_is_held_against_the_gpu(built: Gpu, here: Gpu, level: str, expected: str, words: str) -> None:
    found = judged(bindings(board=here), passport(board=built, hardware_compatibility=level))
    assert found.status == expected and words in found.reason
    assert found.command


def test_a_type_the_other_gpu_does_not_have_means_to_build_again() -> None:
    plan = passport(board=H100, found=("fp16", "fp8"), hardware_compatibility="ampere_plus")
    assert judged(bindings(board=L4), plan).status == "penalty"
    found = judged(bindings(board=A10), plan)
    assert found.status == "rebuild" and "fp8" in found.reason


def test_a_gpu_newer_than_the_tensorrt_is_refused_for_a_bare_plan_too() -> None:
    here = bindings("10.7.0.23", RTX5090)
    found = check_plan(header((10, 7, 0, 23)), None, here)
    assert found.status == "refuse" and "10.8 or newer" in found.reason


def test_no_gpu_is_refused_a_gpu_nobody_can_see_is_not_and_another_number_names_those_that_are() -> None:
    assert "neither driver nor GPU" in judged(bindings(board=None), passport()).reason
    assert judged(bindings(board=None, driver="580.1"), passport()).status == "loads"
    assert judged(bindings(board=None), passport(), device=None).status == "loads"
    found = judged(bindings(), passport(), device=1)
    assert found.status == "refuse" and "0: NVIDIA H100" in found.reason


def test_a_driver_below_the_floor_is_refused_with_the_wheels_it_can_serve() -> None:
    board = replace(H100, driver="550.54.15")
    here = bindings(board=board, packages=(Package("tensorrt-cu13-bindings", Version((10, 16, 1, 11))),))
    found = judged(here, passport())
    assert found.status == "refuse" and "driver 580" in found.reason
    assert found.command == 'pip uninstall -y tensorrt-cu13-bindings && pip install "tensorrt-cu12==10.16.1.*"'


def test_bindings_with_libraries_of_their_own_do_not_care_for_two_on_the_loaders_path() -> None:
    two = tuple(
        Library("nvinfer", Path(f"/{place}/libnvinfer.so.10"), Version(parts), "default")
        for place, parts in (("a", (10, 3, 0, 26)), ("b", BUILT))
    )
    assert judged(bindings(libraries=two), passport()).status == "loads"
    assert "wins over" in judged(bindings(libraries=two, bundled=()), passport()).reason


def test_a_driver_too_old_for_debians_tensorrt_is_told_before_trtexec_finds_out() -> None:
    board = replace(H100, driver="550.54.15")
    debian = (Package("libnvinfer-bin", Version((10, 16, 1, 11)), built_for=13),)
    tool = {"trtexec": Path("/usr/src/tensorrt/bin/trtexec"), "trtexec_version": Version((10, 16, 1, 11))}
    here = Installation(gpus=(board,), driver=board.driver, debian=debian, **tool)
    found = judged(here, passport(backend="trtexec"))
    assert found.status == "refuse" and "driver 580" in found.reason
    assert found.command == "sudo apt-get install nvidia-driver-580"
    assert judged(replace(here, driver="580.65.06"), passport(backend="trtexec")).status == "loads"


# ------------------------------------------------------------------------------------------------ what else it needs


def test_a_missing_plugin_library_is_refused_and_one_beside_the_engine_is_found(tmp_path: Path) -> None:
    plan = passport(plugins=("libmine.so",))
    path = tmp_path / "model.engine"
    refused = check_plan(header(), plan, bindings(), path=path)
    assert refused.status == "refuse" and "`libmine.so`" in refused.reason
    assert refused.command and "-O plugins=" in refused.command
    given = write(tmp_path, "other/libmine.so", "x")
    asked = PlanSettings(plugins=(str(given),))
    assert check_plan(header(), plan, bindings(), path=path, settings=asked).status == "loads"
    write(tmp_path, "libmine.so", "x")
    assert check_plan(header(), plan, bindings(), path=path).status == "loads"


def test_a_stripped_plan_wants_the_model_its_weights_are_in(tmp_path: Path) -> None:
    plan = passport(stripped=True)
    path = tmp_path / "model.engine"
    refused = check_plan(header(), plan, bindings(), path=path)
    assert refused.status == "refuse" and "`model.onnx`" in refused.reason
    assert refused.command and "-O refit_from=" in refused.command
    write(tmp_path, "model.onnx", "x")
    assert check_plan(header(), plan, bindings(), path=path).status == "loads"
    elsewhere = PlanSettings(refit_from=str(tmp_path / "gone.onnx"))
    assert check_plan(header(), plan, bindings(), path=path, settings=elsewhere).status == "refuse"


# ------------------------------------------------------------------------------------------------ engines


def sealed(folder: Path, **more: Any) -> Engine:
    path = folder / "model.engine"
    path.write_bytes(plan_bytes())
    return Engine.seal(path, passport(payload=payload_files(path), **more))


def test_an_engine_is_judged_with_its_own_settings_and_those_it_is_loaded_with(tmp_path: Path) -> None:
    engine = sealed(tmp_path, options={"runtime_platform": "windows_amd64"})
    assert "Windows" in check_compatibility(engine, RuntimeConfig(), installation=bindings()).reason
    compatible = sealed(tmp_path, version_compatible=True)
    assert check_compatibility(compatible, RuntimeConfig(), installation=bindings()).status == "refuse"
    allowed = RuntimeConfig(options={"allow_host_code": "on"})
    assert check_compatibility(compatible, allowed, installation=bindings()).status == "loads"


def test_trtexec_is_asked_where_it_has_to_be(tmp_path: Path) -> None:
    trtexec(tmp_path, "101601", 11)
    here = detect_installation(tmp_path, environ={"PATH": ""}, known_gpus=(H100,))
    assert judged(here).status == "loads"


@given(
    version=st.tuples(*[st.integers(0, 255)] * 4),
    here=st.sampled_from(["8.6.1.6", "10.0.1", "10.16.1.11", "11.4.0.106", None]),
    board=st.sampled_from([None, H100, A10, V100, RTX5090]),
    compatible=st.booleans(),
    level=st.sampled_from(["none", "ampere_plus", "same_compute_capability"]),
    own=st.booleans(),
)
def test_every_header_on_every_machine_has_one_verdict_with_reason_and_command(
    version: tuple[int, int, int, int], here: str | None, board: Gpu | None, compatible: bool, level: str, own: bool
) -> None:
    given = passport(version_compatible=compatible, hardware_compatibility=level) if own else None
    machine = bindings(here, board) if here else Installation(gpus=(board,) if board else ())
    found = check_plan(header(version), given, machine)
    assert found.status in ("loads", "penalty", "rebuild", "refuse")
    assert found.reason and found.command


def test_parts_of_tensorrt_that_load_no_plan_are_named(tmp_path: Path) -> None:
    def reason() -> str:
        environ = {"LD_LIBRARY_PATH": "/opt/a:/opt/b"}
        here = detect_installation(tmp_path, packages=[tmp_path / "site"], environ=environ, known_gpus=(H100,))
        found = judged(here, passport())
        assert found.status == "refuse" and (found.command or "").startswith("pip install ")
        return found.reason

    assert "TensorRT is not installed here" in reason()
    package(tmp_path / "site", "tensorrt-lean-cu13-bindings", "10.16.1.11")
    assert "the lean bindings 10.16.1.11 alone are here" in reason()
    library(tmp_path, "opt/b", "10.16.1")
    assert f"only the library 10.16.1 is here (`{tmp_path}/opt/b/libnvinfer.so.10`)" in reason()
    library(tmp_path, "opt/a", "10.3.0")
    assert "10.3.0 in" in reason().partition("wins over")[0] and "neither Python bindings nor trtexec" in reason()
