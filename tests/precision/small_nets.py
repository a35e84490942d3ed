"""Small models for the tests of calibration and ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save(
    path: Path,
    nodes: list[Any],
    stored: dict[str, Any],
    *,
    inputs: dict[str, list[Any]] | None = None,
    outputs: list[str] | None = None,
    opset: int = 17,
    external: bool = False,
) -> Path:
    """A model of these nodes with float inputs, `x` of [N, 3, 8, 8] unless said, and the last node's output."""
    inputs = inputs or {"x": ["N", 3, 8, 8]}
    outputs = outputs or [nodes[-1].output[0]]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, str(path), save_as_external_data=external, size_threshold=0, location=f"{path.stem}.data")
    return path


def convnet(path: Path, *, gain: float = 1.0, external: bool = False, seed: int = 0, batch: Any = "N") -> Path:
    """Conv, Relu, a scaling by `gain`, Conv, pooling; its tensors are c1, r1, scaled, c2, y."""
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu"),
        helper.make_node("Mul", ["r1", "gain"], ["scaled"], name="scaling"),
        helper.make_node("Div", ["scaled", "gain"], ["back"], name="unscaling"),
        helper.make_node("Conv", ["back", "w2"], ["c2"], name="second"),
        helper.make_node("GlobalAveragePool", ["c2"], ["y"], name="pool"),
    ]
    stored = {
        "w1": rng.normal(size=(8, 3, 3, 3)).astype(np.float32) * 0.2,
        "w2": rng.normal(size=(4, 8, 3, 3)).astype(np.float32) * 0.2,
        "gain": np.array(gain, np.float32),
    }
    return save(path, nodes, stored, inputs={"x": [batch, 3, 8, 8]}, external=external)


def images(count: int = 12, seed: int = 1, shape: tuple[int, ...] = (3, 8, 8)) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(1, *shape)).astype(np.float32) for _ in range(count)]
