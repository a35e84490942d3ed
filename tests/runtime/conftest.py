"""Small models, sealed as engines of the fake backend, and sessions on a fake device one can look into."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from sealed import seal_model
from trt_engine.backends.fake.run import FakeRuntime, FakeSession
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.runtime.assemble import assemble
from trt_engine.runtime.inference_engine import InferenceEngine

Seal = Callable[..., Engine]


def save(path: Path, nodes: list[onnx.NodeProto], inputs: dict, outputs: dict) -> Path:
    """A model of these nodes; tensors are `name: (element type, shape)`."""
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path)
    return path


RUNTIME = [item.name for item in dataclasses.fields(RuntimeConfig)]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.fixture
def seal(tmp_path: Path) -> Seal:
    """`seal(model, profiles=..., batch=...)`: the model as an engine of the fake backend."""

    def sealed(path: Path, **settings: object) -> Engine:
        config = BuildConfig(backend="fake", device="fake:0", **settings)
        return seal_model(path, tmp_path / f"{path.stem}.fake", config)

    return sealed


@pytest.fixture
def double(tmp_path: Path) -> Path:
    """y = x + x, rows of three floats."""
    return save(
        tmp_path / "double.onnx",
        [helper.make_node("Add", ["x", "x"], ["y"])],
        {"x": (FLOAT, ["batch", 3])},
        {"y": (FLOAT, ["batch", 3])},
    )


@pytest.fixture
def weighted(tmp_path: Path) -> Path:
    """total = a * b and its row sums: two inputs, two outputs, one symbol for the batch."""
    return save(
        tmp_path / "weighted.onnx",
        [
            helper.make_node("Mul", ["a", "b"], ["product"]),
            helper.make_node("ReduceMax", ["product"], ["largest"], keepdims=0),
        ],
        {"a": (FLOAT, ["batch", 2]), "b": (FLOAT, ["batch", 2])},
        {"product": (FLOAT, ["batch", 2]), "largest": (FLOAT, [])},
    )


@pytest.fixture
def positions(tmp_path: Path) -> Path:
    """Where x is not zero: an output whose size depends on the data, and one whose size does not."""
    return save(
        tmp_path / "positions.onnx",
        [helper.make_node("NonZero", ["x"], ["where"]), helper.make_node("Neg", ["x"], ["minus"])],
        {"x": (FLOAT, ["batch", 3])},
        {"where": (INT64, [2, "found"]), "minus": (FLOAT, ["batch", 3])},
    )


@pytest.fixture
def load(seal: Seal) -> Iterator[Callable[..., InferenceEngine]]:
    """`load(model, batch=(1, 2, 4), contexts=2, memory="64MiB", graphs=True)`: the model, ready to answer; closed
    afterwards."""
    opened: list[InferenceEngine] = []

    def loaded(path: Path, *, memory: str = "64MiB", **given: object):
        runtime = {name: given.pop(name) for name in list(given) if name in RUNTIME}
        engine = seal(path, **({"batch": (1, 2, 4)} | given))
        config = RuntimeConfig(**runtime, options={"memory": memory})
        runner = assemble([FakeRuntime().load(engine, config)], engine.passport.profiles, config)
        opened.append(InferenceEngine(runner, engine))
        return opened[-1]

    yield loaded
    for engine in opened:
        engine.close()


def session_of(engine: InferenceEngine) -> FakeSession:
    """The fake session under a loaded engine."""
    assert engine._pool is not None
    session = engine._pool._session
    assert isinstance(session, FakeSession)
    return session
