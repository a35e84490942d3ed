"""Every backend that works here, and small models built with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from trt_engine.backend import BackendSpec, list_backends
from trt_engine.engine import Engine
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.store import Store
from trt_engine.verbs.build.run import build
from trt_engine.verbs.load import load

HERE = ("cpu", "fake")
"""Kinds of device that are on every machine."""


def _works_here(backend_spec: BackendSpec) -> bool:
    return (
        backend_spec.builder is not None
        and backend_spec.runtime is not None
        and not backend_spec.missing_modules()
        and backend_spec.devices[0] in HERE
    )


WORKING = [backend_spec for backend_spec in list_backends().values() if _works_here(backend_spec)]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def _param(backend_spec: BackendSpec) -> object:
    """A backend over PyTorch compiles for half a minute: `make test-full` runs it, where PyTorch is."""
    marks = [pytest.mark.full, pytest.mark.slow] if "torch" in backend_spec.modules else []
    return pytest.param(backend_spec, id=backend_spec.name, marks=marks)


@pytest.fixture(params=[_param(backend_spec) for backend_spec in WORKING])
def backend_spec(request: pytest.FixtureRequest) -> BackendSpec:
    return request.param


def _save(path: Path, nodes: list, inputs: dict, outputs: dict, weights: list = ()) -> Path:
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *values, initializer=list(weights))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`net`: a small convolution with a moving batch. `pair`: two inputs of one symbol, two outputs. `open`: an output
    whose size depends on the data."""
    tmp_path = tmp_path_factory.mktemp("models")
    weights = [
        helper.make_tensor("w", FLOAT, [4, 3, 3, 3], [((7 * i) % 13 - 6) / 13 for i in range(108)]),
        helper.make_tensor("axes", INT64, [2], [2, 3]),
    ]
    return {
        "net": _save(
            tmp_path / "net.onnx",
            [
                helper.make_node("Conv", ["images", "w"], ["c"], pads=[1, 1, 1, 1]),
                helper.make_node("Relu", ["c"], ["r"]),
                helper.make_node("ReduceMean", ["r", "axes"], ["scores"], keepdims=0),
            ],
            {"images": (FLOAT, ["batch", 3, 8, 8])},
            {"scores": (FLOAT, ["batch", 4])},
            weights,
        ),
        "pair": _save(
            tmp_path / "pair.onnx",
            [helper.make_node("Mul", ["a", "b"], ["product"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
            {"a": (FLOAT, ["batch", 2]), "b": (FLOAT, ["batch", 2])},
            {"product": (FLOAT, ["batch", 2]), "difference": (FLOAT, ["batch", 2])},
        ),
        "open": _save(
            tmp_path / "open.onnx",
            [helper.make_node("NonZero", ["x"], ["where"])],
            {"x": (FLOAT, ["batch", 3])},
            {"where": (INT64, [2, "found"])},
        ),
    }


@pytest.fixture(scope="session")
def shelf() -> dict[tuple[str, str], Engine]:
    """Engines built before, by backend and model."""
    return {}


@pytest.fixture
def built(
    backend_spec: BackendSpec,
    models: dict[str, Path],
    shelf: dict[tuple[str, str], Engine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Engine]:
    """`built("net")`: that model built by the backend, for batches of 1 to 4. Shared: change a copy, not the thing."""

    def make(name: str) -> Engine:
        if (backend_spec.name, name) not in shelf:
            folder = tmp_path_factory.mktemp(backend_spec.name)
            shelf[backend_spec.name, name] = build(
                models[name],
                backend=backend_spec.name,
                device=backend_spec.devices[0],
                batch=(1, 2, 4),
                out=folder / f"{name}.engine{backend_spec.payload_suffix}",
                store=Store(folder / "store"),
            )
        return shelf[backend_spec.name, name]

    return make


@pytest.fixture
def loaded(built: Callable[[str], Engine]) -> Iterator[Callable[..., InferenceEngine]]:
    """`loaded("net", contexts=2)`: the same, ready to answer; closed afterwards."""
    opened: list[InferenceEngine] = []

    def make(name: str, **settings: object) -> InferenceEngine:
        opened.append(load(built(name), **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
