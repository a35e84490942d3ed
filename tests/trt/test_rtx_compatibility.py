"""Whether a plan of TensorRT-RTX can be used here: the library's report wins, without it nothing is a yes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorrt_machines import A10, H100, L4, RTX5090, V100, passport, plan_bytes, rtx_header, rtx_plan_bytes, rtx_wheels
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device.info import Gpu
from trt_engine.engine import Engine
from trt_engine.records.passport import Compatibility, Passport, Validation
from trt_engine.trt.compatibility import check_compatibility, check_plan
from trt_engine.trt.installation import Installation, Library, Package, detect_installation
from trt_engine.trt.rtx_compatibility import DIAGNOSTICS, ValidityReport, format_diagnostics
from trt_engine.trt.settings import PlanSettings
from trt_engine.trt.versions import Version

COMMAND = "trt-engine build model.onnx --backend tensorrt-rtx --gpus sm89,sm120"


def machine(version: str = "1.7.1.116", board: Gpu | None = L4, **more: Any) -> Installation:
    """A machine with pip's TensorRT-RTX and one GPU."""
    parsed = Version.parse(version)
    assert parsed is not None
    found = Installation(
        packages=(Package("tensorrt-rtx-cu13-bindings", parsed), Package("tensorrt-rtx-cu13-libs", parsed)),
        bundled=(Library("tensorrt_rtx", Path("/site/tensorrt_rtx_libs/libtensorrt_rtx.so.1"), parsed, "pip"),),
        gpus=(board,) if board else (),
        driver=board.driver if board else None,
        product="TensorRT-RTX",
    )
    return replace(found, **more)


def sealed(**needs: Any) -> Passport:
    made = passport("1.7.1.116", None, backend="tensorrt-rtx", command=COMMAND, compute_capabilities=("8.9", "12.0"))
    return replace(made, requirements=replace(made.requirements, library="tensorrt-rtx", **needs))


def judged(
    here: Installation, report: ValidityReport | None = None, given: Passport | None = None, **more: Any
) -> Compatibility:
    def ask(_: Path) -> ValidityReport:
        assert report is not None, "the library was asked"
        return report

    bits = more.pop("gpu_bits", 0x18)
    return check_plan(rtx_header(gpu_bits=bits), given, here, path=Path("x y.engine"), query_validity=ask, **more)


# ------------------------------------------------------------------------------------------------ the library's report


@pytest.mark.parametrize(
    ("bit", "kind", "words", "command"),
    [
        (1, "rebuild", "plans do not move between releases", COMMAND),
        (2, "rebuild", "it was built for 8.9 and 12.0, and here is NVIDIA L4 (8.9)", COMMAND),
        (4, "refuse", "the driver 580.159.03 is too old", "trt-engine doctor"),
        (8, "rebuild", "a newer CUDA than the TensorRT-RTX here brings", COMMAND),
        (
            16,
            "rebuild",
            "weights (1.0 KiB) do not fit the GPU's memory (22.5 GiB)",
            f"{COMMAND} -O weight_streaming=on",
        ),
        (32, "refuse", "damaged, or of another library", COMMAND),
        (64, "refuse", "CUDA does not work here, the plan is not to blame; cudaError 999", "nvidia-smi"),
        (128, "refuse", "does not load", COMMAND),
    ],
)
def test_each_bit_of_invalid_has_its_meaning_and_its_command(bit: int, kind: str, words: str, command: str) -> None:
    found = judged(machine(), ValidityReport("INVALID", bit, ("first", "cudaError 999")), sealed())
    assert found.status == kind and words in found.reason and found.command == command
    assert f"TensorRT-RTX 1.7.1.116 reports INVALID ({format_diagnostics(bit)})" in found.reason


def test_every_bit_of_the_library_has_a_meaning() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    assert {item.value: name for name, item in trt.EngineInvalidityDiagnostics.__members__.items()} == DIAGNOSTICS


def test_of_several_bits_the_one_to_be_mended_first_decides_and_all_are_named() -> None:
    order = [64, 32, 1, 2, 4, 8, 16]
    for index, bit in enumerate(order):
        report = ValidityReport("INVALID", sum(order[index:]))
        alone = judged(machine(), ValidityReport("INVALID", bit), sealed())
        found = judged(machine(), report, sealed())
        assert (found.status, found.command) == (alone.status, alone.command)
        assert all(DIAGNOSTICS[other] in found.reason for other in order[index:])


def test_valid_loads_and_says_what_only_loading_shows() -> None:
    bare, whole = judged(machine(), ValidityReport("VALID")), judged(machine(), ValidityReport("VALID"), sealed())
    assert bare.status == whole.status == "loads"
    assert "reports VALID for its header on NVIDIA L4 (8.9)" in whole.reason and "the rest of the file" in bare.reason
    assert (bare.command, whole.command) == ("trt-engine inspect 'x y.engine' --run", "trt-engine bench 'x y.engine'")


def test_the_check_that_the_build_put_off_comes_next() -> None:
    deferred = replace(sealed(), validation=Validation("deferred", "no GPU"))
    assert judged(machine(), ValidityReport("VALID"), deferred).command == "trt-engine validate 'x y.engine'"
    assert judged(machine(board=None), None, deferred).command == "trt-engine validate 'x y.engine'"
    done = replace(
        sealed(), validation=Validation("passed", "no GPU", validated_at="2026-01-01T00:00:00+00:00", device="cuda:0")
    )
    assert judged(machine(), ValidityReport("VALID"), done).command == "trt-engine bench 'x y.engine'"
    assert judged(machine(board=None), None, done).command == "trt-engine doctor"


def test_the_report_wins_over_version_and_gpu() -> None:
    other = machine("1.9.0.1", H100)
    assert judged(other, ValidityReport("VALID"), sealed()).status == "loads"
    assert judged(other, None, sealed(), device=None).status == "rebuild"


@pytest.mark.parametrize(
    ("board", "names"), [(A10, "sm86,sm89,sm120"), (replace(L4, compute_capability="12.1"), "sm89,sm120,sm121")]
)
def test_the_command_for_another_gpu_adds_it_to_those_the_plan_is_for(board: Gpu, names: str) -> None:
    report = ValidityReport("INVALID", 2)
    found = judged(machine(board=board), report, sealed())
    assert found.command == f"trt-engine build model.onnx --backend tensorrt-rtx --gpus {names}"
    bare = judged(machine(board=board), report)
    assert bare.command == f"trt-engine build MODEL.onnx --backend tensorrt-rtx -o 'x y.engine' --gpus {names}"


def test_a_gpu_that_is_not_one_of_tensorrt_rtx_gets_an_engine_of_tensorrt() -> None:
    for board in (H100, V100):
        found = judged(machine(board=board), ValidityReport("INVALID", 2), sealed())
        assert found.status == "refuse" and f"not on {board.name} ({board.compute_capability})" in found.reason
        assert found.command == "trt-engine build model.onnx --backend tensorrt -o 'x y.engine'"


# ------------------------------------------------------------------------------------------------ without its report


def test_without_a_driver_the_library_is_not_asked_and_the_text_says_what_was_judged() -> None:
    bare, whole = judged(machine(board=None)), judged(machine(board=None), given=sealed())
    assert bare.status == whole.status == "refuse"
    assert "a plan of TensorRT-RTX 1.7.1.116 for 8.9 and 12.0, and neither an NVIDIA GPU nor its driver" in bare.reason
    assert "judged from its header alone" in bare.reason and "from its header and passport alone" in whole.reason


def test_what_fits_by_its_header_is_unknown_and_not_a_yes() -> None:
    found = check_plan(rtx_header(), sealed(), machine())
    assert found.status == "unknown" and "TensorRT-RTX itself was not queried" in found.reason
    second = replace(L4, index=1)
    both = machine(gpus=(A10, second))
    found = judged(both, None, sealed(), device=1)
    assert found.status == "unknown" and "it looks at GPU 0, a NVIDIA A10 (8.6)" in found.reason


@pytest.mark.parametrize(
    ("here", "more", "kind", "words"),
    [
        (machine("1.6.0.42"), {}, "rebuild", "1.6.0.42 is installed here: plans do not move between releases"),
        (machine("1.7.1.99"), {}, "unknown", "not queried"),
        (machine(board=replace(L4, driver="550.54.15")), {}, "refuse", "needs driver 580 or newer, here is 550.54.15"),
        (machine(board=A10), {}, "rebuild", "built for 8.9 and 12.0, and here is NVIDIA A10 (8.6)"),
        (machine(board=H100), {}, "refuse", "not on NVIDIA H100"),
        (machine(board=H100), {"gpu_bits": 0x7E}, "refuse", "not on NVIDIA H100"),
        (machine(board=replace(RTX5090, compute_capability="13.0")), {"gpu_bits": 0x7E}, "unknown", "not queried"),
        (machine(board=replace(RTX5090, compute_capability="13.0")), {}, "rebuild", "here is"),
        (machine(), {"device": 3}, "refuse", "GPU 3 does not exist here (0: NVIDIA L4)"),
        (machine(), {"device": None}, "unknown", "not queried"),
        (machine(board=None, driver="580.1"), {"device": None}, "unknown", "not queried"),
    ],
)
def test_header_and_machine_alone(here: Installation, more: dict[str, Any], kind: str, words: str) -> None:
    bits = more.pop("gpu_bits", 0x18)
    found = check_plan(rtx_header(gpu_bits=bits), sealed(), here, **more)
    assert found.status == kind and words in found.reason, found


def test_without_the_library_the_command_installs_the_plans_own(tmp_path: Path) -> None:
    nothing = Installation(product="TensorRT-RTX", gpus=(L4,), driver=L4.driver)
    found = judged(nothing, None, sealed())
    assert found.status == "refuse" and found.command == 'pip install "tensorrt-rtx-cu13==1.7.1.*"'
    old = judged(replace(nothing, driver="550.54.15"))
    assert old.command == 'pip install "tensorrt-rtx-cu12==1.7.1.*"'
    half = judged(machine(bundled=()), None, sealed())
    assert half.status == "refuse" and "`libtensorrt_rtx.so.1` is not" in half.reason


def test_the_weights_of_a_stripped_plan_have_to_be_here(tmp_path: Path) -> None:
    report, stripped = ValidityReport("VALID"), sealed(stripped=True)
    found = judged(machine(), report, stripped)
    assert found.status == "refuse" and "weights were left out" in found.reason
    (tmp_path / "model.onnx").write_bytes(b"")
    given = PlanSettings(refit_from=str(tmp_path / "model.onnx"))
    assert judged(machine(), report, stripped, settings=given).status == "loads"


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (rtx_plan_bytes()[:3000], "its header states 4096 bytes and the file has 3000"),
        (rtx_plan_bytes() + b"\n", "something follows the plan"),
        (rtx_plan_bytes(version=(0, 0, 0, 0)), "its header states TensorRT-RTX 0.0.0.0"),
        (rtx_plan_bytes(version=(255, 1, 1, 1)), "its header states TensorRT-RTX 255.1.1.1"),
        (
            plan_bytes(),
            "its passport is that of a plan for `tensorrt-rtx`, and the file is a plan of TensorRT 10.16.1.11",
        ),
        (b"vtrt", "does not begin as a plan"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_before_the_library_is_asked(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(content)
    found = check_compatibility(
        Engine(path, sealed()), RuntimeConfig(), installation=machine(), query_validity=pytest.fail
    )  # type: ignore[arg-type]
    assert found.status == "refuse" and words in found.reason and found.command == COMMAND


# ------------------------------------------------------------------------------------------------ packages


def test_pips_wheels_are_found_apart_from_those_of_tensorrt(tmp_path: Path) -> None:
    site = rtx_wheels(tmp_path / "site", libraries="1.6.0.42")
    found = detect_installation(tmp_path, packages=[site], environ={}, known_gpus=(), product="TensorRT-RTX")
    assert found.bindings is not None and str(found.bindings.version) == "1.7.1.116" and found.cuda_major == 13
    below = found.library()
    assert below is not None and below.name == "tensorrt_rtx" and str(below.version) == "1.6.0.42"
    assert str(found.python_version) == "1.6.0.42"
    assert not detect_installation(tmp_path, packages=[site], environ={}, known_gpus=()).is_present
