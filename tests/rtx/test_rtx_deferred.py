"""Engines of TensorRT-RTX's real builder for GPUs that are elsewhere: what goes with them, and what is said of them here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its builder is not tried")

import onnx_models as models
import trt_engine as te
from trt_engine.config.build import BuildConfig
from trt_engine.device import info
from trt_engine.engine import Engine, passport_path
from trt_engine.errors import EngineError
from trt_engine.plan_header import plan_header
from trt_engine.records.build import BuildEachReport
from trt_engine.records.passport import NOT_VALIDATED
from trt_engine.store import Store
from trt_engine.trt.gpu_targets import RTX_TARGETS
from trt_engine.verbs.build.each import execute_builds, plan_builds

elsewhere = pytest.mark.skipif(
    any(board.compute_capability in RTX_TARGETS for board in info.gpus()),
    reason="an RTX GPU is here: nothing is deferred",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[BuildEachReport]:
    """Engines in fp16 for two GPUs, in a store of their own."""
    model = models.conv_net(folder / "net.onnx")
    config = BuildConfig(backend="tensorrt-rtx", batch=(1, 2, 4), precision="fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRT_ENGINE_STORE", str(folder / "store"))
        yield execute_builds(model, plan_builds(model, ["RTX 5090", "sm89"], config=config, out=f"{folder}/net.engine"))


def engines(fleet: BuildEachReport) -> list[Engine]:
    return [Engine.open(str(item.report.engine)) for item in fleet.targets if item.report is not None]


def test_each_gpu_has_a_plan_of_its_own_in_a_file_that_says_so(fleet: BuildEachReport) -> None:
    assert (fleet.built, fleet.failed) == (2, 0) and [item.gpu for item in fleet.targets] == ["8.9", "12.0"]
    for engine, (label, target) in zip(engines(fleet), (("sm89", "8.9"), ("sm120", "12.0")), strict=True):
        header = plan_header(engine.path)
        assert engine.path.name == f"net.{label}.engine"
        assert header is not None and header.compute_capabilities == (target,)
        assert engine.passport.requirements.compute_capabilities == (target,)
        assert f"--gpus {target} -o" in engine.passport.build.command


@elsewhere
def test_its_check_is_deferred_with_all_that_it_needs(fleet: BuildEachReport) -> None:
    for engine in engines(fleet):
        validation = engine.passport.validation
        assert validation is not None and validation.state == "deferred" and engine.validation == NOT_VALIDATED
        assert (
            validation.checks == ("precision", "parity")
            and validation.graph is not None
            and validation.graph.meets_request
        )
        assert validation.tolerance is not None and validation.tolerance.rounding == "fp16"
        with np.load(engine.verify_reference()) as file:
            names = {"input/images", "output/scores", "given/scores", "macs/nodes", "macs/counts"}
            assert set(file) == names and file["input/images"].dtype == np.float32


@elsewhere
def test_without_its_gpu_it_is_neither_loaded_nor_validated_and_stays_as_it_is(
    fleet: BuildEachReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(fleet)[0].copy_to(tmp_path / "away.engine")
    before = passport_path(engine.path).read_bytes()
    for use in (te.validate, te.load, te.bench):
        with pytest.raises(EngineError) as refused, caplog.at_level(logging.WARNING, "trt_engine"):
            use(engine.path)  # type: ignore[operator]
        assert refused.value.exit_code == 10 and "8.9" in refused.value.message and refused.value.hint
    assert passport_path(engine.path).read_bytes() == before
    report = te.inspect(engine.path)
    assert report.passport.validation.summary == NOT_VALIDATED  # type: ignore[union-attr]


def test_order_and_spelling_of_gpus_make_no_other_plan(fleet: BuildEachReport, folder: Path) -> None:
    store = Store(folder / "store")
    both = te.build(folder / "net.onnx", backend="tensorrt-rtx", gpus="sm120,L4", batch=2, store=store)
    again = te.build(folder / "net.onnx", backend="tensorrt-rtx", gpus=["8.9", "rtx5090", "sm89"], batch=2, store=store)
    assert again == both and again.passport.requirements.compute_capabilities == ("8.9", "12.0")
