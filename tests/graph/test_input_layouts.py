"""Inputs of four dimensions by the operators that read them, and what each verb says of them."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnx.parser
import pytest

from trt_engine.config.profiles import profile_for
from trt_engine.errors import ShapeError
from trt_engine.graph.lint import lint_model
from trt_engine.graph.load import open_graph
from trt_engine.verbs.nvinfer_keys import nvinfer_config

NCHW = {
    "conv": "y = Conv(x, w)",
    "normalised": "a = Sub(x, mean) b = Div(a, mean) y = Conv(b, w)",
    "uint8 range": "a = Cast<to=1>(x) b = Mul(a, s) y = Conv(b, w)",
    "colours in another order": "a = Gather<axis=1>(x, order) y = Conv(a, w)",
    "focus":
        "a = Slice(x, i0, i9, i2, i2) b = Slice(x, i1, i9, i2, i2) c = Concat<axis=1>(a, b) y = "
        "MaxPool<kernel_shape=[2,2]>(c)",
    "resize": "y = Resize<mode=\"nearest\">(x, , scales)",
    "optimised graph of a CPU": "a = com.microsoft.nchwc.ReorderInput(x) y = Relu(a)",
    "pool": "y = GlobalAveragePool(x)",
    "padded": "a = Pad(x, pads) y = Conv(a, w)",
    "blocks": "y = SpaceToDepth<blocksize=2>(x)",
    "beside its own features":
        "f = Conv(x, w) g = Sigmoid(f) r = ReduceMean<axes=[1]>(x) c = Concat<axis=1>(x, r) y = "
        "AveragePool<kernel_shape=[2,2]>(c)",
    "residual": "f = Conv<pads=[1,1,1,1]>(x, w3) y = Add(x, f)",
    "coordinates": "s = Shape(x) a = ConstantOfShape(s) c = Concat<axis=1>(x, a) y = MaxPool<kernel_shape=[2,2]>(c)",
}  # fmt: skip
NHWC = {
    "transposed": "a = Transpose<perm=[0,3,1,2]>(x) y = Conv(a, w)",
    "scaled, transposed": "b = Mul(x, s) a = Transpose<perm=[0,3,1,2]>(b) y = GlobalAveragePool(a)",
}
OTHER = {
    "keys": "t = Transpose<perm=[0,1,3,2]>(x) y = MatMul(q, t)",
    "values": "y = MatMul(p, x)",
    "cache": "c = Concat<axis=2>(x, n) t = Transpose<perm=[0,1,3,2]>(c) y = MatMul(q, t)",
    "cache that is returned alone": "c = Concat<axis=2>(x, n) y = Identity(c)",
    "cache of fewer heads":
        "u = Unsqueeze(x, i2) e = Expand(u, five) r = Reshape(e, four) t = Transpose<perm=[0,1,3,2]>(r) y "
        "= MatMul(q, t)",
    "cache of beams": "g = Gather<axis=0>(x, ids) c = Concat<axis=2>(g, n) y = MatMul(p, c)",
    "cache that is written": "c = ScatterND(x, ids4, rows) t = Transpose<perm=[0,1,3,2]>(c) y = MatMul(q, t)",
    "weights": "y = Conv(n, x)",
    "looked up": "y = Gather<axis=2>(x, ids)",
    "mask": "a = MatMul(q, k) b = Add(a, x) y = Softmax<axis=-1>(b)",
    "mask of booleans": "a = MatMul(q, k) b = Where(flags, a, x) y = Softmax<axis=-1>(b)",
    "linear": "y = MatMul(x, rows64)",
    "state of a streaming convolution": "f = Conv<pads=[1,1,1,1]>(n, w3) c = Concat<axis=2>(x, f) y = Conv(c, w)",
    "state of features": "f = Conv<pads=[1,1,1,1]>(n, w3) c = Concat<axis=1>(x, f) y = MaxPool<kernel_shape=[2,2]>(c)",
    "normalised, attended":
        "l = LayerNormalization<axis=-1>(x, gamma) t = Transpose<perm=[0,1,3,2]>(l) y = MatMul(q, t)",
}  # fmt: skip
CASES = [("NCHW", name) for name in NCHW] + [("NHWC", name) for name in NHWC] + [("other", name) for name in OTHER]
NAMES = {"NCHW": ("images", "state"), "NHWC": ("pixels", "query_image"), "other": ("k0", "image_features")}


def write(path: Path, kind: str, case: str, name: str) -> Path:
    body = {"NCHW": NCHW, "NHWC": NHWC, "other": OTHER}[kind][case]
    shape = {"NCHW": "B,3,H,W", "NHWC": "B,H,W,3", "other": "B,3,T,64"}[kind]
    others = {
        "q": "float[B,3,Q,64] q", "p": "float[B,3,Q,T] p", "n": "float[B,3,U,64] n", "ids": "int64[J] ids",
        "k": "float[B,3,64,64] k", "flags": "bool[B,3,Q,64] flags", "ids4": "int64[J,3] ids4", "rows": "float[J,64] rows",
    }  # fmt: skip
    words = body.replace(",", " ").replace("(", " ").replace(")", " ").split()
    inputs = ", ".join([f"float[{shape}] {name}", *(text for key, text in others.items() if key in words)])
    constants = (
        "float[1] s={0.5}, float[1,3,1,1] mean={0.4,0.5,0.6}, float[4] scales={1,1,2,2}, int64[8] pads={0,0,1,1,0,0,1,1}, "
        "int64[3] order={2,1,0}, int64[2] i0={0,0}, int64[2] i1={1,1}, int64[2] i9={99,99}, int64[2] i2={2,3}, "
        "int64[5] five={1,3,2,1,64}, int64[4] four={0,6,-1,64}, "
        f"float[64] gamma={{{','.join(['1'] * 64)}}}, float[64,2] rows64={{{','.join(['1'] * 128)}}}, "
        f"float[4,3,3,3] w={{{','.join(['1'] * 108)}}}, float[3,3,3,3] w3={{{','.join(['1'] * 81)}}}"
    )
    body = " ".join(re.sub(r"\bx\b", name, body).split())
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft.nchwc": 1]> g ({inputs}) => (float y) <{constants}>'
        f" {{ {body} }}"
    )
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("channels", "is_image"), [("1", True), ("3", True), ("C", True), ("2", False), ("64", False)])
def test_a_map_of_features_is_read_like_an_image_and_is_none(channels: str, is_image: bool, tmp_path: Path) -> None:
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> g (float[B,{channels},H,W] x) => (float y) {{ y = GlobalMaxPool(x) }}'
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    spec = open_graph(tmp_path / "net.onnx").model.signature.input("x")
    assert (spec.layout, spec.image_layout) == ("NCHW", "NCHW" if is_image else None)
    assert spec.suggested_shape() == (
        (1, 3, 640, 640) if channels == "C" else (1, int(channels), *[640 if is_image else 128] * 2)
    )


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_an_input_is_an_image_by_what_reads_it(kind: str, case: str, tmp_path: Path) -> None:
    for name in NAMES[kind]:
        opened = open_graph(write(tmp_path / "net.onnx", kind, case, name))
        signature = opened.model.signature
        spec = signature.input(name)
        assert spec.layout == kind and spec.image_layout == (None if kind == "other" else kind)
        with pytest.raises(ShapeError) as refused:
            profile_for(signature, batch=(1, 2, 4))
        is_image = kind != "other"
        assert ("(height)" in str(refused.value)) == is_image
        assert (f"{name}:1x3x640x640" in refused.value.hint or f"{name}:1x640x640x3" in refused.value.hint) == is_image
        findings = lint_model(opened).findings
        assert any((item.code, item.location) == ("dynamic-height-width", name) for item in findings) == is_image
        keys = nvinfer_config(signature, {}, None, onnx_file=None, engine_file="e", batch=1, precision="fp16").keys
        assert bool(keys) == any(item.image_layout for item in signature.inputs)
