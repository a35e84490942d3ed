"""The fake backend: what it builds, refuses and enforces, and the time of each operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_models as models
import trt_engine as te
from sealed import seal_model
from trt_engine.backend import get_backend
from trt_engine.backends.fake.build import FakeBuilder
from trt_engine.backends.fake.run import FakeContext, FakeRuntime, FakeSession, check_compatibility
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Stream
from trt_engine.device.fake import FakeBuffer, FakeDevice
from trt_engine.engine import Engine
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.protocols import BuildPaths
from trt_engine.records.passport import Precision

Seal = Callable[..., Engine]


def model(path: Path, op: str, kind: int = TensorProto.FLOAT, domain: str = "") -> Path:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], domain=domain)],
        "g",
        [value("x", kind, ["n", 3])],
        [value("y", TensorProto.INT64, [2, "found"]) if op == "NonZero" else value("y", kind, ["n", 3])],
    )
    opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.fixture
def seal(tmp_path: Path) -> Seal:
    def sealed(op: str = "Neg") -> Engine:
        config = BuildConfig(backend="fake", device="fake:0", batch=(1, 2, 4))
        return seal_model(model(tmp_path / "m.onnx", op), tmp_path / "m.fake", config)

    return sealed


@pytest.fixture
def session(seal: Seal) -> FakeSession:
    return FakeRuntime().load(seal(), RuntimeConfig())


def buffers(device: FakeDevice, rows: int) -> dict[str, FakeBuffer]:
    return {"x": device.allocate(rows * 12), "y": device.allocate(rows * 12)}


X = np.array([[1, 2, 3]], np.float32)


# ------------------------------------------------------------------------------------------------ building


def test_its_card_is_hidden_and_complete() -> None:
    backend_spec = get_backend("fake")
    assert backend_spec.hidden
    assert backend_spec.missing_modules() == ()
    for half in ("builder", "runtime", "options", "compatibility"):
        assert backend_spec.load_component(half)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"precision": "fp16"}, "cannot compute in fp16"),
        ({"device": "cpu"}, "cannot build for `cpu`"),
        ({"options": {"memroy": "1"}}, "unknown setting `memroy`"),
        ({"options": {"memory": "lots"}}, "cannot read the size"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, settings: dict[str, object], says: str) -> None:
    opened = open_model(model(tmp_path / "m.onnx", "Neg"))
    config = BuildConfig(**({"backend": "fake", "device": "fake"} | settings))
    with pytest.raises(UsageError, match=says):
        FakeBuilder().build(opened, config, BuildPaths(tmp_path / "m.fake"))
    assert not (tmp_path / "m.fake").exists()


@pytest.mark.parametrize(
    ("made", "says"),
    [(("Mystery", TensorProto.FLOAT, "nowhere"), "nowhere"), (("Identity", TensorProto.STRING), "is a string tensor")],
)
def test_a_model_it_cannot_run_is_refused(tmp_path: Path, made: tuple, says: str) -> None:
    opened = open_model(model(tmp_path / "m.onnx", *made))
    with pytest.raises(ModelError, match=says):
        FakeBuilder().build(opened, BuildConfig(backend="fake", device="fake"), BuildPaths(tmp_path / "m.fake"))
    assert not (tmp_path / "m.fake").exists()


# ------------------------------------------------------------------------------------------------ loading


def test_it_runs_on_no_other_device(seal: Seal) -> None:
    with pytest.raises(UsageError, match="cannot run on `cpu`"):
        FakeRuntime().load(seal(), RuntimeConfig(device="cpu"))


def test_another_version_of_its_library_is_a_penalty(seal: Seal) -> None:
    engine = seal()
    assert check_compatibility(engine, RuntimeConfig()).status == "loads"
    old = replace(
        engine, passport=replace(engine.passport, requirements=replace(engine.passport.requirements, version="1.0"))
    )
    assert check_compatibility(old, RuntimeConfig()).status == "penalty"


# ------------------------------------------------------------------------------------------------ contexts


def test_an_inference_happens_on_its_streams_turn(session: FakeSession) -> None:
    context, bound = session.create_context(), buffers(session.device, 1)
    assert context.prepare({"x": (1, 3)}) == {"y": (1, 3)}
    context.bind(bound)
    stream, y = session.device.stream(), np.zeros((1, 3), np.float32)
    session.device.upload(X, bound["x"], stream)
    context.enqueue(stream)
    session.device.download(bound["y"], y, stream)
    assert not y.any()
    stream.synchronize()
    assert y.tolist() == [[-1, -2, -3]]


def test_an_input_nobody_uploaded_is_garbage_and_not_zero(session: FakeSession) -> None:
    context, bound = session.create_context(), buffers(session.device, 1)
    context.prepare({"x": (1, 3)})
    context.bind(bound)
    stream, y = session.device.stream(), np.zeros((1, 3), np.uint32)
    context.enqueue(stream)
    session.device.download(bound["y"], y, stream)
    stream.synchronize()
    assert set(y.ravel().tolist()) == {0xCDCDCDCD ^ 0x80000000}


def test_there_are_as_many_profiles_as_were_built(session: FakeSession) -> None:
    with pytest.raises(UsageError, match="no profile 1"):
        session.create_context(1)


# ------------------------------------------------------------------------------------------------ late outputs, graphs


def captured(session: FakeSession, rows: int = 1) -> tuple[FakeContext, dict[str, FakeBuffer], Stream, object]:
    context, bound, stream = session.create_context(), buffers(session.device, rows), session.device.stream()
    context.prepare({"x": (rows, 3)})
    context.bind(bound)
    return context, bound, stream, stream.capture(context.enqueue)


def test_a_graph_refuses_after_its_context_was_closed(session: FakeSession) -> None:
    context, _, stream, graph = captured(session)
    context.close()
    with pytest.raises(UsageError, match="its context is closed"):
        graph.replay(stream)


def test_precision_is_told_as_asked_and_nothing_is_invented(seal: Seal) -> None:
    assert seal().passport.precision == Precision(None)


def test_each_operator_has_its_time_by_the_hosts_clock(tmp_path: Path) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    engine = te.build(net, backend="fake", device="fake:0", batch=(1, 2, 4), out=tmp_path / "net.fake", parity=False)
    feeds = {"images": np.random.default_rng(0).random((2, 3, 8, 8), np.float32)}
    call = get_backend("fake").load_function("profile")
    found = call(engine, feeds, RuntimeConfig(), inferences=3, warmup=1, keep=tmp_path / "kept")
    assert [row.kind for row in found.rows] == ["Conv", "Relu", "Conv", "Relu", "GlobalAveragePool", "Flatten"]
    assert all(row.mean_ms > 0 for row in found.rows) and found.clock == "host" and found.inferences == 3
    assert found.rows[-1].shapes == ((2, 16),) and found.rows[-1].dtypes == ("float32",)
    assert len(json.loads(Path(found.raw).read_text())) == 3
