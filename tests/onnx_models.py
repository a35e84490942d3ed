"""Small models, written to disk for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

FLOAT, HALF, BF16, INT64, STRING = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.STRING,
)  # fmt: skip
FP8, INT4 = TensorProto.FLOAT8E4M3FN, TensorProto.INT4


def reference_outputs(model: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    """What onnx's reference evaluator computes."""
    evaluator = ReferenceEvaluator(onnx.load(model))
    return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[Any]]],
    outputs: Mapping[str, tuple[int, list[Any]]],
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 20,
    domains: Mapping[str, int] | None = None,
    ir_version: int = 10,
    location: str | None = None,
) -> Path:
    """A model of these nodes; with `location` its weights go to that file beside it."""
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    stored = [
        value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        for name, value in (weights or {}).items()
    ]
    model = helper.make_model(
        helper.make_graph(list(nodes), path.stem, *values, stored),
        opset_imports=[
            helper.make_opsetid("", opset),
            *(helper.make_opsetid(*item) for item in (domains or {}).items()),
        ],
        ir_version=ir_version,
    )
    if location:
        onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def conv_net(path: Path, *, width: int = 16, size: int = 8, half: bool = False, location: str | None = None) -> Path:
    """`images` (batch x 3 x size x size) through two convolutions to `scores` (batch x width)."""
    rng = np.random.default_rng(0)
    kind, elem = (np.float16, HALF) if half else (np.float32, FLOAT)
    weights = {
        "w0": (rng.standard_normal((width, 3, 3, 3)) / 5).astype(kind),
        "b0": np.zeros(width, kind),
        "w1": (rng.standard_normal((width, width, 3, 3)) / (3 * width**0.5)).astype(kind),
        "b1": np.zeros(width, kind),
    }
    nodes = [
        node("Conv", "images w0 b0", "c0", pads=[1, 1, 1, 1]),
        node("Relu", "c0", "r0"),
        node("Conv", "r0 w1 b1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("GlobalAveragePool", "r1", "g"),
        node("Flatten", "g", "scores"),
    ]
    sides = {"images": (elem, ["batch", 3, size, size])}, {"scores": (elem, ["batch", width])}
    return save(path, nodes, *sides, weights, location=location)


def two_inputs(path: Path) -> Path:
    """`total` = `a` + `b`, rows of four floats under one batch."""
    row = (FLOAT, ["batch", 4])
    return save(path, [node("Add", "a b", "total")], {"a": row, "b": row}, {"total": row})


def empty_input(path: Path) -> Path:
    """An input without elements joined to one with."""
    sides = {"none": (FLOAT, [0, 4]), "some": (FLOAT, ["batch", 4])}, {"all": (FLOAT, ["batch", 4])}
    return save(path, [node("Concat", "none some", "all", axis=0)], *sides)


def int8_qdq(path: Path, limit: int = 63) -> Path:
    """A convolution between QuantizeLinear and DequantizeLinear, weights and activations in INT8.

    Weights have 7 bits: ONNX Runtime's kernels for x86 without VNNI overflow with more (`limit` is their largest value).
    """
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.integers(-limit, limit + 1, (8, 3, 3, 3), dtype=np.int8),
        "sx": np.float32(0.01),
        "sw": np.float32(0.005),
        "sy": np.float32(0.02),
        "z": np.int8(0),
    }
    nodes = [
        node("QuantizeLinear", "x sx z", "xq"),
        node("DequantizeLinear", "xq sx z", "xd"),
        node("DequantizeLinear", "w sw z", "wd"),
        node("Conv", "xd wd", "c", pads=[1, 1, 1, 1]),
        node("QuantizeLinear", "c sy z", "cq"),
        node("DequantizeLinear", "cq sy z", "y"),
    ]
    return save(path, nodes, {"x": (FLOAT, ["batch", 3, 8, 8])}, {"y": (FLOAT, ["batch", 8, 8, 8])}, weights)


def fp8_qdq(path: Path) -> Path:
    """The same in FP8, with a MaxPool behind it: what full optimisation turns into operators without FP8."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "s": np.float32(0.02),
        "z": helper.make_tensor("z", FP8, [], [0.0]),
    }
    nodes = [
        node("QuantizeLinear", "x s z", "xq"),
        node("DequantizeLinear", "xq s z", "xd"),
        node("QuantizeLinear", "w s z", "wq"),
        node("DequantizeLinear", "wq s z", "wd"),
        node("Conv", "xd wd", "c", pads=[1, 1, 1, 1]),
        node("QuantizeLinear", "c s z", "cq"),
        node("DequantizeLinear", "cq s z", "cd"),
        node("MaxPool", "cd", "y", kernel_shape=[2, 2], strides=[2, 2]),
    ]
    return save(path, nodes, {"x": (FLOAT, ["batch", 3, 8, 8])}, {"y": (FLOAT, ["batch", 8, 4, 4])}, weights)


def casts(path: Path) -> Path:
    """A bfloat16 input, rectified, as bfloat16, FP8 and INT4."""
    nodes = [
        node("Cast", "x", "f", to=FLOAT),
        node("Relu", "f", "r"),
        node("Cast", "r", "brain", to=BF16),
        node("Cast", "r", "eight", to=FP8),
        node("Cast", "r", "four", to=INT4),
    ]
    row = ["batch", 3]
    return save(
        path, nodes, {"x": (BF16, row)}, {"brain": (BF16, row), "eight": (FP8, row), "four": (INT4, row)}, opset=21
    )


def words(path: Path) -> Path:
    """Strings in, strings out."""
    return save(path, [node("Identity", "a", "b")], {"a": (STRING, ["n"])}, {"b": (STRING, ["n"])})


def reshaped(path: Path) -> Path:
    """`x` (batch x 6), doubled, in the sizes that the values of `sizes` say."""
    sides = {"x": (FLOAT, ["batch", 6]), "sizes": (INT64, [2])}, {"y": (FLOAT, ["rows", "columns"])}
    return save(path, [node("Add", "x x", "twice"), node("Reshape", "twice sizes", "y")], *sides)


def measured(path: Path) -> Path:
    """The sizes of `x` (batch x 3), and minus x."""
    sides = {"x": (FLOAT, ["batch", 3])}, {"size": (INT64, [2]), "minus": (FLOAT, ["batch", 3])}
    return save(path, [node("Shape", "x", "size"), node("Neg", "x", "minus")], *sides)


def positions(path: Path) -> Path:
    """Where x is not zero (a size the data decides), and minus x (a size the input decides)."""
    nodes = [node("NonZero", "x", "where"), node("Neg", "x", "minus")]
    sides = {"x": (FLOAT, ["batch", 3])}, {"where": (INT64, [2, "found"]), "minus": (FLOAT, ["batch", 3])}
    return save(path, nodes, *sides)


def quantize_statically(model: Path, out: Path, **settings: Any) -> None:
    """ONNX Runtime's own QDQ model of unsigned activations and signed weights, from four random digits as `images`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    left = [{"images": np.random.default_rng(0).random((4, 1, 32, 32), np.float32)}]

    class Pictures(CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:
            return left.pop() if left else None

    quantize_static(
        model, out, Pictures(), **{"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8} | settings
    )
