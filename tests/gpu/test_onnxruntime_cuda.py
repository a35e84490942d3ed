"""What only a GPU can show of the onnxruntime backend: that FP32 is FP32, that TF32 is said, that copies are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import trt_engine as te
from trt_engine.backend import backend
from trt_engine.backends.onnxruntime import providers
from trt_engine.backends.onnxruntime.providers import choose
from trt_engine.benchmark.log import render
from trt_engine.benchmark.loop import feeds_for, measure
from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.device import info
from trt_engine.engine import Engine
from trt_engine.errors import PrecisionError, SetupError, TrtEngineError, UsageError

pytestmark = pytest.mark.gpu

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"
SHORT = BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=20, batch=4)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Digits engines on `cuda:0`, each built once; skipped where the CUDA provider does not start."""
    try:
        choice = choose((), "cuda:0")
        if (dead := providers.unstarted(choice)) is not None:
            raise dead
    except TrtEngineError as error:
        pytest.skip(f"no GPU for ONNX Runtime here: {error.message}")
    store = te.Store(tmp_path_factory.mktemp("store"))
    made: dict[str | None, Engine] = {}

    def engine(precision: str | None = None) -> Engine:
        if precision not in made:
            made[precision] = te.build(DIGITS, device="cuda:0", precision=precision, batch=(1, 4, 8), store=store)
        return made[precision]

    return engine


def worst(engine: Engine) -> float:
    assert engine.passport.parity is not None
    return max(item.max_rel for item in engine.passport.parity.outputs.values())


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_an_fp32_graph_runs_in_fp32_on_a_gpu(cuda: Callable[..., Engine], precision: str | None) -> None:
    engine = cuda(precision)
    assert engine.passport.precision.main == "fp32"
    assert "tf32" not in engine.passport.precision.found
    assert engine.passport.build.notes["tf32"] == "off"
    assert worst(engine) <= 1e-3
    with te.load(engine) as runner:
        assert (runner.facts["precision"], runner.facts["tf32"], runner.facts["device"]) == ("fp32", "off", "cuda:0")


def test_tf32_is_asked_for_found_and_told(cuda: Callable[..., Engine]) -> None:
    engine = cuda("tf32")
    assert engine.passport.precision.main == "tf32"
    assert engine.passport.parity is not None and engine.passport.parity.tolerance == 1e-2
    assert worst(engine) > worst(cuda("fp32"))  # it did cut mantissas
    with te.load(engine) as runner:
        assert (runner.facts["precision"], runner.facts["tf32"]) == ("tf32", "on")
    with te.load(engine, options={"cuda.use_tf32": "0"}) as runner:
        assert runner.facts["precision"] == "fp32"


def test_tf32_by_an_option_breaks_a_contract_on_fp32(cuda: Callable[..., Engine], tmp_path: Path) -> None:
    cuda()
    store, options = te.Store(tmp_path / "store"), {"cuda.use_tf32": "1"}
    with pytest.raises(PrecisionError, match="found tf32"):
        te.build(DIGITS, device="cuda:0", precision="fp32", options=options, store=store)
    free = te.build(DIGITS, device="cuda:0", options=options, store=store)
    assert free.passport.precision.main == "tf32"


def test_the_passport_names_the_gpu_and_not_the_processor(cuda: Callable[..., Engine]) -> None:
    passport, board = cuda().passport, info.gpus()[0]
    assert f"sm_{board.compute_capability.replace('.', '')}" in passport.build.identity
    assert not any(feature in passport.build.identity for feature in info.cpu().features)
    assert (passport.needs.gpu, passport.needs.compute_capability) == (board.name, board.compute_capability)
    assert passport.needs.cpu_features == ()
    assert te.inspect(cuda().path).verdict.verdict == "loads"


@pytest.mark.parametrize("graph", [False, True])
def test_a_resident_run_gives_what_a_run_with_copies_gives(cuda: Callable[..., Engine], graph: bool) -> None:
    engine = cuda()
    session = backend("onnxruntime").half("runtime")().load(engine, RuntimeConfig())
    feeds, _ = feeds_for(engine, SHORT)
    expected = session.run(feeds)
    run = session.resident(feeds, graph=graph)
    for _ in range(3):
        run()
        for name, value in run.outputs().items():
            np.testing.assert_allclose(np.sort(value, axis=1), np.sort(expected[name], axis=1), rtol=1e-3, atol=1e-3)
    session.close()


@pytest.mark.parametrize(("config", "transfers", "graph"), [
    ({}, False, True), ({"graph": False}, False, False), ({"transfers": True}, True, False),
    ({"protocol": "trtexec10"}, True, False), ({"protocol": "trtexec11"}, False, True),
])  # fmt: skip
def test_a_record_of_a_gpu_says_what_was_inside(
    cuda: Callable[..., Engine], config: dict[str, object], transfers: bool, graph: bool
) -> None:
    engine = cuda()
    session = backend("onnxruntime").half("runtime")().load(engine, RuntimeConfig())
    record = measure(session, engine, dataclasses.replace(SHORT, **config))  # type: ignore[arg-type]
    session.close()
    assert (record.device, record.protocol.clock, record.queries) == ("cuda:0", "host", 20)
    assert (record.protocol.transfers, record.protocol.graph) == (transfers, graph)
    assert record.environment.gpu == info.gpus()[0].name
    first = render(record).splitlines()[0]
    assert record.environment.gpu in first and ("no copies" in first) is not transfers


def test_a_graph_that_cannot_be_captured_is_said(cuda: Callable[..., Engine], tmp_path: Path) -> None:
    cuda()
    x, y = (helper.make_tensor_value_info(*item) for item in (("x", 1, ["n", 3, 3]), ("y", 1, ["n"])))
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Det", ["r"], ["y"])]  # Det has no kernel on CUDA
    proto = helper.make_model(
        helper.make_graph(nodes, "det", [x], [y]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save(proto, tmp_path / "det.onnx")
    store = te.Store(tmp_path / "store")
    with pytest.raises(SetupError, match="would fall back to the CPU"):
        te.build(tmp_path / "det.onnx", device="cuda:0", store=store)
    engine = te.build(tmp_path / "det.onnx", device="cuda:0", providers=("cuda", "cpu"), store=store)
    session = backend("onnxruntime").half("runtime")().load(engine, RuntimeConfig())
    record = measure(session, engine, dataclasses.replace(SHORT, batch=None))
    session.close()
    assert not record.protocol.graph and "graph" in record.protocol.not_applicable
    assert any("could not be captured" in text for text in record.warnings)


def test_a_gpu_that_is_not_there_is_a_usage_error_that_names_those_that_are(cuda: Callable[..., Engine]) -> None:
    with pytest.raises(UsageError, match="no device `cuda:63`, here is `cuda:0`"):
        te.build(DIGITS, device="cuda:63")
    with pytest.raises(UsageError, match="no device `cuda:63`"):
        te.load(cuda(), device="cuda:63")


def test_a_provider_whose_libraries_are_missing_is_an_error_of_the_machine(cuda: Callable[..., Engine]) -> None:
    cuda()
    if providers.broken("tensorrt") is None:
        pytest.skip("TensorRT's libraries are here")
    with pytest.raises(SetupError, match=r"`tensorrt` was asked for and does not run: lib\S+"):
        te.build(DIGITS, device="cuda:0", providers=("tensorrt",))
