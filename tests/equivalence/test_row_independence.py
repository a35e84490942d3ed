"""Whether the rows of a batch are independent, by graphs that are known to be one or the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

import trt_engine as te
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.equivalence.row_independence import row_dependence, wrong_rows
from trt_engine.equivalence.sorted_outputs import sorted_outputs
from trt_engine.equivalence.tolerance import coarsest_dtype, select_tolerance
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.runtime.batch_rows import BatchLayout
from trt_engine.runtime.feeds import random_feeds
from trt_engine.verbs.deploy.triton import _max_batch

_WEIGHTS = ", ".join(f"{(7 * i % 11 - 5) / 5:.1f}" for i in range(36))
W = f"w = Constant<value = float[6, 6] {{{_WEIGHTS}}}>()\n"
C = "c = Constant<value_float = 0.5>() zero = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>()\n"
DEPENDENT = {
    "only the first row": "s = Shape(x) n = Gather(s, f) i = Range(f, n, g) t = Equal(i, f) m = Cast<to = 1>(t)"
    " u = Unsqueeze(m, one) v = MatMul(x, w) y = Mul(v, u)",
    "only the second row": "s = Shape(x) n = Gather(s, f) i = Range(f, n, g) t = Equal(i, g) m = Cast<to = 1>(t)"
    " u = Unsqueeze(m, one) y = Mul(x, u)",
    "only the last row": "s = Shape(x) n = Gather(s, f) l = Sub(n, g) i = Range(f, n, g) t = Equal(i, l)"
    " m = Cast<to = 1>(t) u = Unsqueeze(m, one) y = Mul(x, u)",
    "mean of the batch": "m = ReduceMean<keepdims = 1>(x, zero) y = Sub(x, m)",
    "largest of the batch": "m = ReduceMax<keepdims = 1>(x) y = Div(x, m)",
    "softmax over the batch": "y = Softmax<axis = 0>(x)",
    "norm over the batch": "m = ReduceL2<keepdims = 1>(x, zero) y = Div(x, m)",
    "training BatchNorm": "k = Constant<value_floats = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]>() o = Sub(k, k)"
    " e = Sub(k, k) r = Add(k, o) y, a, b = BatchNormalization<training_mode = 1>(x, k, o, e, r)",
    "cumsum over the batch": "y = CumSum(x, f)",
    "sorted over the batch": "s = Shape(x) n = Slice(s, zero, one) y, i = TopK<axis = 0>(x, n)",
    "arg of the largest row": "i = ArgMax<axis = 0, keepdims = 1>(x) j = Cast<to = 1>(i) y = Add(x, j)",
    "reversed rows": "n = Constant<value_ints = [-1]>() e = Constant<value_ints = [-99]>() y = Slice(x, n, e, zero, n)",
    "rows mixed by a product": "t = Transpose(x) g2 = MatMul(x, t) s2 = Softmax(g2) y = MatMul(s2, x)",
    "next row added": "h = Slice(x, zero, one, zero) e = Constant<value_ints = [99]>() r = Slice(x, one, e, zero)"
    " z = Concat<axis = 0>(r, h) y = Add(x, z)",
    "pairs of neighbours": "p = Constant<value_ints = [-1, 2, 6]>() h = Reshape(x, p) m = ReduceMean<keepdims = 1>(h, one)"
    " z = Sub(h, m) q = Constant<value_ints = [-1, 6]>() y = Reshape(z, q)",
    "halves of the batch": "a, b = Split<axis = 0, num_outputs = 2>(x) d = Sub(a, b) y = Concat<axis = 0>(d, d)",
    "row number added": "s = Shape(x) n = Gather(s, f) i = Range(f, n, g) m = Cast<to = 1>(i) u = Unsqueeze(m, one)"
    " y = Add(x, u)",
}
INDEPENDENT = {
    "product": "y = MatMul(x, w)",
    "activation": "v = MatMul(x, w) y = Sigmoid(v)",
    "softmax of a row": "y = Softmax<axis = -1>(x)",
    "mean of a row": "m = ReduceMean<keepdims = 1>(x, one) y = Sub(x, m)",
    "largest of a row": "m = ReduceMax<keepdims = 1>(x, one) y = Div(x, m)",
    "LayerNorm": "k = Constant<value_floats = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]>() y = LayerNormalization(x, k)",
    "BatchNorm": "k = Constant<value_floats = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]>() o = Sub(k, k)"
    " y = BatchNormalization(x, k, o, o, k)",
    "cumsum of a row": "y = CumSum(x, g)",
    "sorted row": "k = Constant<value_ints = [6]>() y, i = TopK<axis = 1>(x, k)",
    "arg of a row": "i = ArgMax<axis = 1, keepdims = 1>(x) j = Cast<to = 1>(i) y = Add(x, j)",
    "reversed columns": "n = Constant<value_ints = [-1]>() e = Constant<value_ints = [-99]>()"
    " y = Slice(x, n, e, one, n)",
    "logarithm that is NaN elsewhere": "v = Log(x) y = Add(v, x)",
    "mask by value": "t = Greater(x, c) m = Cast<to = 1>(t) y = Mul(x, m)",
    "fake quantisation": "z = Constant<value = int8 {0}>() q = Constant<value_float = 0.01>()"
    " a = QuantizeLinear(x, q, z) y = DequantizeLinear(a, q, z)",
    # the scale is that of the whole batch: the rounding of a row depends on it, within what quantised models are allowed
    "dynamic quantisation": "a, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(a, s, z)",
}


def graph(path: Path, body: str, x: str = "float[batch, 6] x", y: str = "float[batch, 6] y") -> Path:
    scalars = "f = Constant<value_int = 0>() g = Constant<value_int = 1>()\n"
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> net ({x}) => ({y}) {{{C}{scalars}{W}{body}}}')
    onnx.save(made, path)
    return path


def dependence(path: Path, rows: int = 4, **shapes: tuple[int, ...]) -> str | None:
    model = open_model(path)
    feeds: Mapping[str, Any] = random_feeds(model.signature, shapes or {"x": (rows, 6)})
    run = reference_session(path, model.signature).run
    tolerance = select_tolerance(coarsest_dtype(model.graph))
    outputs = run(feeds)
    assert wrong_rows(model.signature, {name: value.shape for name, value in feeds.items()}, outputs) is None
    return row_dependence(run, model.signature, feeds, outputs, sorted_outputs(model.proto), tolerance)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_each_other_are_found(name: str, rows: int, tmp_path: Path):
    found = dependence(graph(tmp_path / "net.onnx", DEPENDENT[name]), rows)
    assert found is not None and "output `y`" in found


@pytest.mark.parametrize(
    "body", ["m = ReduceMean<keepdims = 1>(x) y = Sub(x, m)", "m = ReduceMax<keepdims = 1>(x) y = Div(x, m)"]
)
def test_a_statistic_of_many_values_is_found_though_batches_of_equal_distribution_share_it(body: str, tmp_path: Path):
    path = graph(tmp_path / "net.onnx", body, "float[batch, 60000] x", "float[batch, 60000] y")
    assert dependence(path, x=(8, 60000)) is not None


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_left_to_be_joined(name: str, rows: int, tmp_path: Path):
    assert dependence(graph(tmp_path / "net.onnx", INDEPENDENT[name]), rows) is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("t = Constant<value_ints = [2, 6]>() e = Expand(c, t) y = Add(x, e)", "2x6 for 1 row of input (`x` 1x6)"),
        ("y = ReduceMean<keepdims = 1>(x, zero)", "1x6 for 2 rows of input"),
        ("t = Constant<value_ints = [128, 6]>() e = Expand(c, t) y = Add(x, e)", "does not run at x:2x6"),
    ],
    ids=["a constant of two rows", "the batch reduced", "no batch of the profile"],
)
def test_a_model_that_loses_the_batch_makes_no_engine(body: str, text: str, tmp_path: Path):
    path = graph(tmp_path / "net.onnx", body)
    with pytest.raises(ModelError) as error:
        te.build(path, out=tmp_path / "engine.onnx", batch=(1, 2, 4))
    assert text in error.value.message and not (tmp_path / "engine.onnx").exists()


@pytest.mark.parametrize(
    "profiles", [["x:2x6,2x6,2x6", "x:2x5,2x5,2x5"], ["x:1x6", "x:1x5"], ["x:1x5,1x6,1x6"], ["x:1x6", "x:1x5,1x5,1x6"]]
)
def test_every_profile_runs_at_its_ends_before_an_engine_is_written(profiles: list[str], tmp_path: Path):
    path = graph(tmp_path / "net.onnx", "y = MatMul(x, w)", "float[batch, n] x")
    with pytest.raises(ModelError, match=r"does not run at x:[12]x5"):
        te.build(path, out=tmp_path / "engine.onnx", profiles=profiles)
    assert not (tmp_path / "engine.onnx").exists()


def test_an_engine_keeps_that_its_rows_depend_on_each_other_and_nothing_joins_them(tmp_path: Path):
    path = graph(tmp_path / "net.onnx", DEPENDENT["largest of the batch"])
    engine = te.build(path, out=tmp_path / "engine.onnx", batch=(1, 2, 4))
    opened = te.Engine.open(engine.path)
    assert "depends on the other rows" in (opened.signature.row_dependence or "")
    assert any("must not be joined" in text for text in opened.passport.build.warnings)
    with pytest.raises(UsageError, match="depends on the other rows"):
        te.load(engine, batching=te.Batching(max_batch=4))
    assert _max_batch(opened)[0] == 0


def test_the_batch_is_followed_by_its_symbol_wherever_it_stands(tmp_path: Path):
    path = graph(
        tmp_path / "net.onnx", "y = Add(x, x) new_state = Add(state, state)",
        "float[N, 6] x, float[8, N, 2] state", "float[N, 6] y, float[8, N, 2] new_state",
    )  # fmt: skip
    engine = te.build(path, batch=(1, 2, 4))
    assert engine.passport.profiles[0].ranges["state"].shapes == ((8, 1, 2), (8, 2, 2), (8, 4, 2))
    assert engine.signature.row_dependence is None
    with te.load(engine) as runner:
        assert (
            runner.infer(random_feeds(engine.signature, {"x": (3, 6), "state": (8, 3, 2)}))["new_state"].shape[1] == 3
        )
    with pytest.raises(UsageError, match="its batch is dimension 1"):
        BatchLayout.from_signature(engine.signature, engine.passport.profiles)
