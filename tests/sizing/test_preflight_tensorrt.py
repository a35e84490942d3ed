"""What the pre-flight says of TensorRT before anything is spent: its parts, the driver, the GPU, the precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tensorrt_machines import H100, RTX5090, V100, debian, library, trtexec, wheels
from trt_engine.backend import BackendSpec
from trt_engine.config.build import BuildConfig
from trt_engine.device.info import Gpu
from trt_engine.errors import SetupError
from trt_engine.graph.load import open_model
from trt_engine.records.size import PreflightCheck
from trt_engine.trt.installation import detect_installation
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.output_layout import output_layout
from trt_engine.verbs.size.preflight import Preflight, doubling_batches

BY_BINDINGS = BackendSpec(
    name="bindings",
    summary="a backend over the bindings",
    payload_suffix=".engine",
    modules=("tensorrt",),
    install="pip install it",
    builder=None,
    runtime=None,
    devices=("cuda",),
)
BY_TOOL = replace(BY_BINDINGS, name="tool", modules=(), tools=("trtexec",))

Look = Callable[..., dict[str, PreflightCheck]]


@pytest.fixture
def look(tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Look:
    """The checks by name, of a machine under `tmp_path`."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = make_model()

    def checks(
        backend_spec: BackendSpec = BY_BINDINGS,
        board: Gpu | None = H100,
        precision: str = "fp16",
        library_path: str = "",
    ) -> dict[str, PreflightCheck]:
        environ = {"PATH": str(tmp_path / "bin"), "LD_LIBRARY_PATH": library_path}
        monkeypatch.setenv("PATH", environ["PATH"])
        here = detect_installation(
            tmp_path, packages=[tmp_path / "site"], environ=environ, known_gpus=() if board is None else (board,)
        )
        config = SizeConfig()
        build = BuildConfig(device="cuda:0", precision=precision)  # type: ignore[arg-type]
        layout = output_layout(path, tmp_path / "out", ".engine")
        flight = Preflight(
            open_model(path), layout, config, build, backend_spec, doubling_batches(config), installation=here
        )
        try:
            flight.run()
        except SetupError as error:
            assert error is flight.failures[0] and error.hint
        assert not {check.name for check in flight.checks if check.status == "fail" and not check.hint}
        return {check.name: check for check in flight.checks}

    return checks


def test_a_machine_that_fits_has_a_line_for_every_part(look: Look, tmp_path: Path) -> None:
    wheels(tmp_path / "site", "10.16.1.11")
    debian(tmp_path, "10.16.1.11-1+cuda13.0", "libnvinfer-bin")
    trtexec(tmp_path, "101601", 11, folder="bin")
    found = look()
    assert {check.status for check in found.values()} == {"ok"}
    assert "trtexec 10.16.1.11" in found["tensorrt-versions"].text
    assert "(minimum 580)" in found["tensorrt-driver"].text and "fp8" in found["tensorrt-gpu-0"].text


def test_parts_of_two_releases_and_two_on_one_path_are_warnings(look: Look, tmp_path: Path) -> None:
    wheels(tmp_path / "site", "10.16.1.11")
    trtexec(tmp_path, "110400", 106, folder="bin")
    for folder, version in (("opt/a", "10.3.0"), ("opt/b", "10.7.0")):
        library(tmp_path, folder, version)
    found = look(library_path="/opt/a:/opt/b")
    assert found["tensorrt-versions"].status == found["tensorrt-twice"].status == "warn"
    assert "11.4.0.106" in found["tensorrt-versions"].text


@pytest.mark.parametrize(
    ("version", "board", "precision", "failed", "words"),
    [
        ("10.16.1.11", V100, "fp16", "tensorrt-gpu-0", "does not run on Tesla V100"),
        ("10.16.1.11", replace(H100, driver="550.54.15"), "fp16", "tensorrt-driver", "needs driver 580"),
        (
            "10.8.0.43",
            RTX5090,
            "mxfp8",
            "precision-tensorrt",
            "mxfp8 needs TensorRT 10.12 or newer, installed is 10.8.0.43",
        ),
        ("10.16.1.11", H100, "nvfp4", "precision", "needs compute capability 10.0"),
    ],
)
def test_what_cannot_work_fails_before_a_minute_is_spent(
    version: str, board: Gpu, precision: str, failed: str, words: str, look: Look, tmp_path: Path
) -> None:
    wheels(tmp_path / "site", version)
    check = look(board=board, precision=precision)[failed]
    assert check.status == "fail" and words in check.text


def test_trtexec_is_judged_by_its_own_version_and_without_nvml_too(look: Look, tmp_path: Path) -> None:
    wheels(tmp_path / "site", "11.4.0.106")
    trtexec(tmp_path, "100700", 23, folder="bin")
    assert look(BY_TOOL, RTX5090)["tensorrt-gpu-0"].status == "fail"
    assert look(BY_BINDINGS, RTX5090)["tensorrt-gpu-0"].status == "ok"
    blind = look(BY_TOOL, None)
    assert blind["device"].status == "warn" and blind["tensorrt-versions"].status == "warn"
