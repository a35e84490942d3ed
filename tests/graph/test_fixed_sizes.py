"""Arithmetic of sizes that a profile fixes, folded: what stays, and equal outputs in ONNX Runtime."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from trt_engine.config.profiles import Profile, ShapeRange, fixed_shapes
from trt_engine.graph.static_shapes import fold_fixed_sizes

SIZES = {
    "of one axis":
        "s = Shape(x) h = Gather(s, two) t = Gather(s, three) n = Add(h, t) k = ConstantOfShape(s) a = "
        "Cast<to=1>(n) y = Add(k, a)",
    "of a slice": "s = Shape(x) h = Slice(s, i2, i4) t = Concat<axis=0>(i1, i1, h) z = Expand(one, t) y = Add(x, z)",
    "for Resize":
        "s = Shape(x) b = Slice(s, i0, i2) h = Slice(s, i2, i4) d = Mul(h, i2) t = Concat<axis=0>(b, d) y = "
        "Resize(x, , , t)",
    "squeezed":
        "s = Shape(x) b = Slice(s, i0, i1) q = Squeeze(b) u = Unsqueeze(q, i0) t = Concat<axis=0>(u, i3, m1) "
        "y = Reshape(x, t)",
    "of positions":
        "s = Shape(x) w = Gather(s, three) c = Cast<to=1>(w) d = Div(c, half) f = Floor(d) k = Cast<to=7>(f) "
        "r = Range(zero, k, two) q = Cast<to=1>(r) m = ReduceSum(q) y = Mul(x, m)",
    "of a part": "s = Shape<start=2>(x) h = ReduceProd<keepdims=1>(s) t = Concat<axis=0>(i1, m1, h) y = Reshape(x, t)",
    "in an If":
        "s = Shape(x) h = Gather(s, two) c = Equal(h, two) y = If(c) <then_branch = a () => (float[N,C,H,W] "
        "p) { p = Relu(x) }, else_branch = b () => (float[N,C,H,W] q) { g = Cast<to=1>(h) q = Mul(x, g) }>",
    "as an output": "s = Shape(x) h = Gather(s, two) y = Cast<to=1>(h)",
    "of data": "n = NonZero(x) s = Shape(n) k = Gather(s, i1) c = Cast<to=1>(k) y = Mul(x, c)",
    "nothing": "y = Relu(x)",
}  # fmt: skip
"""Graphs that use sizes of x [N, 3, H, W]; `i2` is [2], `two` is 2."""


def graph(name: str) -> onnx.ModelProto:
    body = SIZES[name]
    constants = [
        "int64 zero={0}",
        "int64 two={2}",
        "int64 three={3}",
        "float[1] one={1.0}",
        "float half={0.5}",
        "int64[1] m1={-1}",
    ]
    constants += [f"int64[1] i{size}={{{size}}}" for size in range(5)]
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[N,3,H,W] x) => (float y) <{", ".join(constants)}> {{ {body} }}'
    )


ARITHMETIC = {"Gather", "Slice", "Range", "Floor", "ReduceProd", "Equal", "ConstantOfShape", "Squeeze", "If"}


def session(model: onnx.ModelProto, optimised: Path) -> ort.InferenceSession:
    model.graph.output[0].type.tensor_type.ClearField("shape")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(optimised)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("varying", ["", "N", "NHW"])
@pytest.mark.parametrize("name", SIZES)
def test_folding_fixed_sizes_changes_no_output_at_any_shape_of_the_profile(
    name: str, varying: str, tmp_path: Path
) -> None:
    spans = [(1, 3) if "N" in varying else (2, 2), (3, 3), *((4, 6) if axis in varying else (4, 4) for axis in "HW")]
    low, high = zip(*spans, strict=True)
    fixed = fixed_shapes([Profile({"x": ShapeRange(low, low, high)}), Profile({"x": ShapeRange(low, high, high)})])
    made = graph(name)
    count = fold_fixed_sizes(made, fixed)
    folded, plain = session(made, tmp_path / "folded.onnx"), session(graph(name), tmp_path / "plain.onnx")
    for shape in itertools.product(*({*span} for span in spans)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_array_equal(folded.run(None, {"x": x})[0], plain.run(None, {"x": x})[0])
    left = {node.op_type for node in onnx.load(tmp_path / "folded.onnx").graph.node}
    if varying == "N" and name not in ("of data", "of one axis", "squeezed", "for Resize"):
        assert not left & ARITHMETIC, "what follows from the other axes is constant"
    if not varying and name != "of data":
        assert not left & (ARITHMETIC | {"Shape", "Concat"}) and (count > 0) == (name != "nothing")
        with pytest.raises(Exception, match="invalid dimensions") if count else nullcontext():
            folded.run(None, {"x": np.zeros((3, 3, 4, 4), np.float32)})
