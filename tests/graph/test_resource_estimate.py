"""What a small file may ask for: memory, work and nodes are estimated before anything computes, and refused by the limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import FunctionProto, TensorProto, helper, numpy_helper

from trt_engine import limits
from trt_engine.errors import ModelError
from trt_engine.graph.load import open_model
from trt_engine.graph.shape_inference import trace

from . import models
from .models import graph, ints, model, node, value

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def ones(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def number(name: str, value: int) -> TensorProto:
    return numpy_helper.from_array(np.array(value, np.int64), name)


def summed(nodes: list[onnx.NodeProto], stored: list[TensorProto]) -> onnx.ModelProto:
    """The tensor `giant` summed and added to the input, into an output without a stated shape."""
    ends = [
        node("Cast", ["giant"], ["floats"], to=FLOAT),
        node("ReduceSum", ["floats"], ["total"], keepdims=0),
        node("Add", ["x", "total"], ["y"]),
    ]
    return model([*nodes, *ends], [value("x", [1, 4])], [value("y", None)], stored)


def doubled(first: TensorProto | None, times: int) -> list[onnx.NodeProto]:
    start = first.name if first is not None else "t0"
    names = [start, *(f"t{at}" for at in range(1, times)), "giant"]
    return [node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]


def _range() -> onnx.ModelProto:
    stored = [number("a", 0), number("b", 1 << 40), number("c", 1)]
    return summed([node("Range", ["a", "b", "c"], ["giant"])], stored)


def _concat() -> onnx.ModelProto:
    return summed(doubled(ones("t0", 4), 46), [ones("t0", 4)])


def _shape_concat_expand() -> onnx.ModelProto:
    names = ["s", *(f"t{at}" for at in range(29))]
    nodes = [node("Shape", ["x"], ["s"])]
    nodes += [node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]
    nodes += [node("Gather", [names[-1], "at"], ["n"]), node("Expand", ["x", "n"], ["giant"])]
    return summed(nodes, [ints("at", 1)])


def _constant_of_shape() -> onnx.ModelProto:
    return summed([node("ConstantOfShape", ["n"], ["giant"])], [ints("n", 800_000_000)])


def _expand() -> onnx.ModelProto:
    return summed([node("Expand", ["one", "n"], ["giant"])], [ones("one", 1), ints("n", 1 << 16, 1 << 15)])


def _tile() -> onnx.ModelProto:
    return summed([node("Tile", ["one", "n"], ["giant"])], [ones("one", 1, 1), ints("n", 1 << 16, 1 << 15)])


def _tile_that_wraps() -> onnx.ModelProto:
    """2^32 x 2^32 repeats are 0 in 64 bits."""
    return summed([node("Tile", ["one", "n"], ["giant"])], [ones("one", 1, 1), ints("n", 1 << 32, 1 << 32)])


def _pad() -> onnx.ModelProto:
    return summed([node("Pad", ["one", "n"], ["giant"])], [ones("one", 1), ints("n", 0, 1 << 31)])


def _resize() -> onnx.ModelProto:
    stored = [ones("one", 1, 1, 1, 1), ints("n", 1, 1, 1 << 16, 1 << 15)]
    return summed([node("Resize", ["one", "", "", "n"], ["giant"], mode="nearest")], stored)


def _one_hot() -> onnx.ModelProto:
    return summed(
        [node("OneHot", ["at", "n", "v"], ["giant"])], [ints("at", *range(64)), number("n", 1 << 25), ones("v", 2)]
    )


LETTERS = "abcdefghijklmnopqrst"


def _einsum() -> onnx.ModelProto:
    made = node("Einsum", list(LETTERS), ["giant"], equation=",".join(LETTERS) + "->" + LETTERS)
    return summed([made], [ones(letter, 3) for letter in LETTERS])


def _einsum_to_a_number() -> onnx.ModelProto:
    made = node("Einsum", list(LETTERS), ["giant"], equation=",".join(LETTERS) + "->")
    return summed([made], [ones(letter, 3) for letter in LETTERS])


def _outer_products() -> onnx.ModelProto:
    nodes = []
    for at in range(4):
        nodes += [node("Reshape", [f"t{at}", "row"], [f"r{at}"]), node("Reshape", [f"t{at}", "column"], [f"c{at}"])]
        nodes += [node("Mul", [f"r{at}", f"c{at}"], [f"m{at}"]), node("Reshape", [f"m{at}", "flat"], [f"t{at + 1}"])]
    stored = [ones("t0", 8), ints("row", 1, -1), ints("column", -1, 1), ints("flat", -1)]
    return summed([*nodes, node("Identity", ["t4"], ["giant"])], stored)


def _known_by_computing() -> onnx.ModelProto:
    """NonZero of more elements than are followed decides the size."""
    nodes = [
        node("ConstantOfShape", ["n"], ["filled"], value=ints("", 1)), node("NonZero", ["filled"], ["found"]),
        node("Shape", ["found"], ["sizes"]), node("Mul", ["sizes", "times"], ["more"]),
        node("Expand", ["one", "more"], ["giant"]),
    ]  # fmt: skip
    return summed(nodes, [ints("n", 100_000), ints("times", 10_000, 1), ones("one", 1, 1)])


def _products() -> onnx.ModelProto:
    """Little memory, much work."""
    nodes = [node("ConstantOfShape", ["n"], ["t0"])]
    nodes += [node("MatMul", [f"t{at}", f"t{at}"], [f"t{at + 1}"]) for at in range(20)]
    return summed([*nodes, node("Identity", ["t20"], ["giant"])], [ints("n", 1000, 1000)])


def _inside_a_body() -> onnx.ModelProto:
    inner = [node("ConstantOfShape", ["n"], ["i"]), node("ReduceSum", ["i"], ["t"], keepdims=0)]
    then = graph(inner, [], [value("t", [])])
    other = graph([node("ReduceSum", ["x"], ["e"], keepdims=0)], [], [value("e", [])])
    made = node("If", ["c"], ["giant"], then_branch=then, else_branch=other)
    proto = summed([made], [ints("n", 800_000_000)])
    proto.graph.input.append(value("c", [], TensorProto.BOOL))
    return proto


def _loop_with_a_trip_count() -> onnx.ModelProto:
    """What a Loop stacks: one row for each of 2^62 trips."""
    body = graph(
        [node("Identity", ["going"], ["on"]), node("Neg", ["x"], ["row"])],
        [value("i", [], INT64), value("going", [], TensorProto.BOOL)],
        [value("on", [], TensorProto.BOOL), value("row", [1, 4])],
    )
    return summed([node("Loop", ["n", "true"], ["giant"], body=body)],
                  [number("n", 1 << 62), numpy_helper.from_array(np.array(True), "true")])  # fmt: skip


def _random() -> onnx.ModelProto:
    return summed([node("RandomNormal", [], ["giant"], shape=[1 << 16, 1 << 15])], [])


def _sizes_by_chance() -> onnx.ModelProto:
    nodes = [
        node("RandomUniform", [], ["chance"], shape=[2], high=1e9), node("Cast", ["chance"], ["n"], to=INT64),
        node("ConstantOfShape", ["n"], ["giant"]),
    ]  # fmt: skip
    return summed(nodes, [])


def _where_by_chance() -> onnx.ModelProto:
    """Two vectors of unknown length, as a table."""
    nodes = [
        node("NonZero", ["many"], ["row"]), node("Reshape", ["row", "turn"], ["column"]),
        node("Cast", ["column"], ["c"], to=TensorProto.BOOL), node("Where", ["c", "row", "column"], ["giant"]),
    ]  # fmt: skip
    return summed(nodes, [ones("many", 1 << 17), ints("turn", -1, 1)])


def _input(*sizes: int) -> onnx.ModelProto:
    return model([node("Relu", ["x"], ["y"])], [value("x", sizes)], [value("y", None)])


def _einsum_of_inputs() -> onnx.ModelProto:
    made = node("Einsum", list(LETTERS), ["giant"], equation=",".join(LETTERS) + "->" + LETTERS)
    proto = summed([made], [])
    proto.graph.input.extend(value(letter, [3]) for letter in LETTERS)
    return proto


def doubling_functions(levels: int) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    made: list[FunctionProto] = [helper.make_function("f", "F0", ["a"], ["b"], [node("Neg", ["a"], ["b"])], imports)]
    for at in range(1, levels):
        call = f"F{at - 1}"
        inner = [helper.make_node(call, ["a"], ["h"], domain="f"), helper.make_node(call, ["h"], ["b"], domain="f")]
        made.append(helper.make_function("f", f"F{at}", ["a"], ["b"], inner, imports))
    last = helper.make_node(f"F{levels - 1}", ["x"], ["y"], domain="f")
    return model([last], [value("x", [1, 4])], [value("y", None)], domains={"f": 1}, functions=made)


BOMBS: dict[str, tuple[Callable[[], onnx.ModelProto], limits.Limit]] = {
    "Range": (_range, limits.CONSTANT_SIZE),
    "Concat, 46 times": (_concat, limits.CONSTANT_SIZE),
    "Shape, Concat, Expand": (_shape_concat_expand, limits.CONSTANT_SIZE),
    "ConstantOfShape": (_constant_of_shape, limits.CONSTANT_SIZE),
    "Expand": (_expand, limits.CONSTANT_SIZE),
    "Tile": (_tile, limits.CONSTANT_SIZE),
    "Tile, 2^64": (_tile_that_wraps, limits.CONSTANT_SIZE),
    "Pad": (_pad, limits.CONSTANT_SIZE),
    "Resize": (_resize, limits.CONSTANT_SIZE),
    "OneHot": (_one_hot, limits.CONSTANT_SIZE),
    "Einsum": (_einsum, limits.CONSTANT_SIZE),
    "Einsum to a number": (_einsum_to_a_number, limits.CONSTANT_SIZE),
    "outer products": (_outer_products, limits.CONSTANT_SIZE),
    "a size known by computing": (_known_by_computing, limits.CONSTANT_SIZE),
    "inside a body": (_inside_a_body, limits.CONSTANT_SIZE),
    "products": (_products, limits.CONSTANT_WORK),
    "Loop that stacks": (_loop_with_a_trip_count, limits.RUN_SIZE),
    "random numbers": (_random, limits.RUN_SIZE),
    "sizes by chance": (_sizes_by_chance, limits.CONSTANT_SIZE),
    "Where": (_where_by_chance, limits.CONSTANT_SIZE),
    "inputs": (lambda: _input(50_000, 50_000), limits.RUN_SIZE),
    "inputs, 2^124": (lambda: _input(1 << 62, 1 << 62), limits.RUN_SIZE),
    "Einsum of inputs": (_einsum_of_inputs, limits.RUN_SIZE),
    "functions": (lambda: doubling_functions(14), limits.FUNCTION_NODES),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_that_asks_for_too_much_is_refused_with_the_limit_to_raise(tmp_path: Path, case: str) -> None:
    made, limit = BOMBS[case]
    path = models.save(made(), tmp_path)
    assert path.stat().st_size < (1 << 20)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert limit.variable in str(caught.value.hint)


N = 1 << 31
MS, NCHW, NHWC, ML = "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.ml"
MAP = ones("a", 1, 1, 2, 2)
GROWING: list[tuple[str, str, list[TensorProto], dict[str, object]]] = [
    ("Range", MS, [number("a", 0), number("b", N), number("c", 1)], {}),
    ("Pad", MS, [ones("a", 4), ints("b", 0, N)], {"mode": "constant"}),
    ("CropAndResize", MS, [MAP, ones("b", 1, 4), ints("c", 0), ints("d", 1 << 16, 1 << 15)], {}),
    ("ConvTransposeWithDynamicPads", MS, [MAP, ones("b", 1, 1, 2, 2), ints("c", 0, 0, 0, 0)],
     {"strides": [1 << 16, 1 << 15]}),
    ("Rfft", MS, [ones("a", 1, 4)], {"normalized": 0, "onesided": 1, "signal_ndim": 1}),
    ("Irfft", MS, [ones("a", 1, 4, 2)], {"normalized": 0, "onesided": 1, "signal_ndim": 1}),
    ("RelativePositionBias", MS, [ones("a", 32, 8), number("b", 1 << 16), number("c", 1 << 15)], {"max_distance": 128}),
    ("RestorePadding", MS, [ones("a", 1, 8), ints("b", 0, N)], {}),
    ("SampleOp", MS, [MAP], {}),
    ("GridSample", MS, [MAP, ones("b", 1, 1, 1, 2)], {}),
    ("CDist", MS, [ones("a", 9, 2), ones("b", 9, 2)], {"metric": "euclidean"}),
    ("QLinearWhere", MS, [ones(name, 1) for name in "abcdefghi"], {}),
    ("ExpandDims", MS, [ones("a", 9), number("b", 0)], {}),
    ("GatherND", MS, [ones("a", 9), ints("b", 0)], {}),
    ("MatMulFpQ4", MS, [ones("a", 9, 9), ints("b", 1), ints("c", 1 << 16, 1 << 15)], {}),
    ("SparseToDenseMatMul", MS, [ones("a", 9, 9), ones("b", 9, 9)], {}),
    ("NGramRepeatBlock", MS, [ints("a", 1), ones("b", 1, 1)], {"ngram_size": 2}),
    ("GreedySearch", MS, [ints("a", 1), number("b", N)], {"eos_token_id": 0, "pad_token_id": 0}),
    ("Upsample", NCHW, [ones("a", 1, 8, 2, 2)], {"scales": [1, 1, 1 << 15, 1 << 14]}),
    ("Conv", NCHW, [ones("a", 1, 8, 2, 2), ones("b", 8, 8, 1, 1)], {"pads": [1 << 15, 1 << 15, 0, 0]}),
    ("ConvTranspose", NHWC, [ones("a", 1, 2, 2, 1), ones("b", 1, 1, 2, 2)], {"strides": [1 << 16, 1 << 15]}),
    ("Resize", NHWC, [ones("a", 1, 2, 2, 1)], {"sizes": [1, 1 << 16, 1 << 15, 1]}),
    ("FromNowhere", "of.mine", [ones("a", 1)], {}),
    ("HannWindow", "", [number("a", N)], {}),
    ("HammingWindow", "", [number("a", N)], {}),
    ("BlackmanWindow", "", [number("a", N)], {}),
    ("MelWeightMatrix", "", [number("a", 1 << 15), number("b", 1 << 17), number("c", 16000), ones("d"), ones("e")], {}),
    ("AffineGrid", "", [ones("a", 1, 2, 3), ints("b", 1, 1, 1 << 16, 1 << 15)], {}),
    ("CenterCropPad", "", [ones("a", 1), ints("b", N)], {}),
    ("Col2Im", "", [ones("a", 1, 1, 1), ints("b", 1 << 16, 1 << 15), ints("c", 1, 1)], {}),
    ("DFT", "", [ones("a", 1, 4, 1), number("b", N), number("c", 1)], {}),
    ("MaxUnpool", "", [MAP, ones("b", 1, 1, 2, 2), ints("c", 1, 1, 1 << 16, 1 << 15)], {"kernel_shape": [2, 2]}),
    ("ConvTranspose", "", [MAP, ones("b", 1, 1, 2, 2)], {"strides": [1 << 16, 1 << 15]}),
    ("Upsample", "", [MAP, ones("b", 4)], {}),
    ("GatherND", "", [ones("a", 9), ints("b", 0)], {}),
]  # fmt: skip
"""Operators whose result may be large though their constants are small, with numbers that make it so, or none."""


@pytest.mark.parametrize(("op", "domain", "stored", "given"), GROWING, ids=[f"{d}.{o}" for o, d, *_ in GROWING])
def test_constants_of_any_domain_that_may_be_large_are_refused(
    tmp_path: Path, op: str, domain: str, stored: list[TensorProto], given: dict[str, object]
) -> None:
    made = helper.make_node(op, [item.name for item in stored], ["giant"], domain=domain, **given)
    proto = summed([made], stored)
    if domain:
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(ModelError, match=r"from constants alone|constant tensor of unknown size") as caught:
        open_model(models.save(proto, tmp_path))
    assert limits.CONSTANT_SIZE.variable in str(caught.value.hint)


@pytest.mark.parametrize("count", [30, 8000, 100_000])
def test_any_number_of_sizes_of_any_size_is_refused_in_a_sentence(tmp_path: Path, count: int) -> None:
    sizes = [1 << 62] * count
    shaped = summed([node("ConstantOfShape", ["n"], ["giant"])], [ints("n", *sizes)])
    drawn = summed([node("RandomNormal", [], ["giant"], shape=sizes)], [])
    sparse = model([node("Relu", ["x"], ["y"])], [value("x", [1])], [value("y", None)])
    sparse.graph.sparse_initializer.add(dims=sizes).values.CopyFrom(ones("s", 1))
    for proto in (drawn, sparse) if count > 8192 else (shaped, drawn, sparse):
        with pytest.raises(ModelError) as caught:
            open_model(models.save(proto, tmp_path))
        assert len(str(caught.value)) < 1000


def test_a_limit_that_is_raised_lets_the_file_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.save(_constant_of_shape(), tmp_path)
    monkeypatch.setenv(limits.CONSTANT_SIZE.variable, "8GiB")
    monkeypatch.setenv(limits.RUN_SIZE.variable, "8GiB")
    assert open_model(path).signature.outputs


@pytest.mark.parametrize(
    ("limit", "made"),
    [
        (limits.MODEL_NODES, models.detector),
        (limits.MODEL_INPUTS, models.detector),
    ],
    ids=["nodes", "inputs"],
)
def test_a_model_of_more_parts_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: limits.Limit, made: Callable[[], onnx.ModelProto]
) -> None:
    path = models.save(made(), tmp_path)
    assert open_model(path)
    monkeypatch.setenv(limit.variable, "1")
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert limit.variable in str(caught.value.hint)


def test_weights_that_are_stored_small_and_computed_large_are_let_in(tmp_path: Path) -> None:
    """An embedding in INT8, dequantised, transposed and cast: 20 times what is stored."""
    table = numpy_helper.from_array(np.ones((4096, 2048), np.int8), "table")
    nodes = [
        node("DequantizeLinear", ["table", "scale"], ["wide"]), node("Transpose", ["wide"], ["turned"]),
        node("Cast", ["turned"], ["double"], to=TensorProto.DOUBLE), node("MatMul", ["x", "double"], ["y"]),
    ]  # fmt: skip
    scale = numpy_helper.from_array(np.array(0.1, np.float32), "scale")
    proto = model(nodes, [value("x", [1, 2048], TensorProto.DOUBLE)], [value("y", [1, 4096])], [table, scale])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert open_model(models.save(proto, tmp_path))


def test_values_that_are_followed_take_bounded_memory() -> None:
    count = 3000
    nodes = [node("ConstantOfShape", ["n"], ["t0"], value=ints("", 1))]
    nodes += [node("Neg", [f"t{at}"], [f"t{at + 1}"]) for at in range(count)]
    traced = trace(model(nodes, [], [value(f"t{count}", None)], [ints("n", 8000)]), {})
    held = sum(fact.value.nbytes for fact in traced.tensors.values() if fact.value is not None)
    assert held <= 65 << 20
    assert traced.tensors[f"t{count}"].shape == (8000,)


@pytest.mark.parametrize("op", ["Concat", "Max"])
def test_one_node_with_many_inputs_is_not_followed_beyond_the_largest_value(op: str) -> None:
    given = {"axis": 0} if op == "Concat" else {}
    nodes = [node("ConstantOfShape", ["n"], ["t"], value=ints("", 1)), node(op, ["t"] * 5000, ["y"], **given)]
    traced = trace(model(nodes, [], [value("y", None)], [ints("n", 8000)]), {})
    assert traced.tensors["y"].shape == ((8000 * 5000,) if op == "Concat" else (8000,))


def test_equal_nodes_with_other_constants_get_shapes_of_their_own() -> None:
    """What is kept for repeated layers counts the values of the inputs, not their shapes alone."""
    nodes = [node("Reshape", ["x", "one"], ["a"]), node("Reshape", ["x", "two"], ["b"])]
    proto = model(
        nodes, [value("x", [4])], [value("a", None), value("b", None)], [ints("one", 2, 2), ints("two", 4, 1)]
    )
    facts = trace(proto, {}).tensors
    assert (facts["a"].shape, facts["b"].shape) == ((2, 2), (4, 1))


def test_vectors_that_are_large_are_not_followed_by_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's inference keeps about 150 bytes for each element."""
    asked: list[bool] = []
    real = onnx.shape_inference.infer_shapes

    def infer(proto: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto:
        asked.append(data_prop)
        return real(proto, data_prop=False)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", infer)
    for elements in (1000, 10_000_000):
        open_model(models.save(summed([node("ConstantOfShape", ["n"], ["giant"])], [ints("n", elements)]), tmp_path))
    assert asked == [True, False]


# ------------------------------------------------------------------------------------------------ the file itself


def test_a_large_file_that_is_whole_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_engine.graph import load

    path = models.save(models.detector(), tmp_path)
    monkeypatch.setattr(load, "_MAX_SINGLE_READ_NBYTES", 10)
    assert open_model(path).nbytes == path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelError, match="truncated or damaged"):
        open_model(path)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_over_an_empty_input_is_refused_as_onnx_runtime_aborts_on_it(op: str, tmp_path: Path) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    stored = [ones("w", 1, 2 * gates, 3), ones("r", 1, 2 * gates, 2)]
    nodes = [node(op, ["x", "w", "r"], ["y"], hidden_size=2)]
    empty = model(nodes, [value("x", [2, 0, 3])], [value("y", [2, 1, 0, 2])], stored)
    with pytest.raises(ModelError, match="no elements"):
        open_model(models.save(empty, tmp_path))
    whole = model(nodes, [value("x", [2, 1, 3])], [value("y", [2, 1, 1, 2])], stored)
    assert open_model(models.save(whole, tmp_path)).signature.inputs
