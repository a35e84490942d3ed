"""The trace's shapes are those that plain ONNX Runtime computes, also where ONNX's own inference has others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import trt_engine as te
from trt_engine.graph.shape_inference import trace

from . import models

Case = tuple[str, dict[str, Any], dict[str, Any], int]
"""Operator, inputs (arrays), attributes, opset."""


def _sizes(rng: random.Random, rank: int, low: int, high: int) -> list[int]:
    return [rng.randint(low, high) for _ in range(rank)]


def _pool(rng: random.Random) -> Case:
    rank, kind = rng.choice([1, 2]), rng.choice(["MaxPool", "AveragePool", "LpPool"])
    kernel = _sizes(rng, rank, 1, 3)
    given: dict[str, Any] = {"kernel_shape": kernel, "ceil_mode": rng.randint(0, 1), "strides": _sizes(rng, rank, 1, 3)}
    if rng.random() < 0.5:
        given["auto_pad"] = rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    else:
        given["pads"] = [rng.randint(0, size // 2) for size in kernel] * 2
    if kind == "MaxPool" and rng.random() < 0.4:
        given["dilations"] = _sizes(rng, rank, 1, 2)
    return kind, {"x": np.ones([1, 2, *_sizes(rng, rank, 5, 9)], np.float32)}, given, 19


def _transposed(rng: random.Random) -> Case:
    given = {
        "auto_pad": rng.choice(["SAME_UPPER", "SAME_LOWER"]),
        "strides": [2, 3],
        "output_padding": [rng.randint(0, 1), 1],
    }
    feeds = {
        "x": np.ones([1, 2, *_sizes(rng, 2, 3, 6)], np.float32),
        "w": np.ones([2, 1, *_sizes(rng, 2, 1, 4)], np.float32),
    }
    return "ConvTranspose", feeds, given, 11


def _stft(rng: random.Random) -> Case:
    given = rng.choice([{}, {"onesided": 0}, {"onesided": 1}])
    feeds = {
        "x": np.ones((2, rng.choice([64, 100]), 1), np.float32),
        "step": np.array(rng.choice([4, 10]), np.int64),
        "window": np.ones(rng.choice([16, 31]), np.float32),
    }
    return "STFT", feeds, given, 17


def _nonzero(rng: random.Random) -> Case:
    return "NonZero", {"x": np.ones(_sizes(rng, rng.randint(0, 2), 1, 3), np.float32)}, {}, 13


def _scan(rng: random.Random) -> Case:
    kind = TensorProto.FLOAT
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Concat", ["x", "s"], ["y"], axis=-1)],
        "body",
        [helper.make_tensor_value_info("s", kind, None), helper.make_tensor_value_info("x", kind, None)],
        [helper.make_tensor_value_info("t", kind, None), helper.make_tensor_value_info("y", kind, None)],
    )
    axis = rng.choice([0, 1, 2, -1])
    sizes = [2, 3, 4]
    rest = [size for at, size in enumerate(sizes) if at != axis % 3]
    feeds = {"state": np.ones(rest, np.float32), "xs": np.ones(sizes, np.float32)}
    given = {
        "body": body,
        "num_scan_inputs": 1,
        "scan_input_axes": [axis],
        "scan_output_axes": [rng.choice([0, 1, 2, -1, -2])],
    }
    return "Scan", feeds, given, 16


@pytest.mark.parametrize("make", [_pool, _transposed, _stft, _nonzero, _scan])
def test_shapes_are_those_of_onnx_runtime_where_onnx_infers_others(make: Callable[[random.Random], Case]) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    rng, ran = random.Random(7), 0
    for _ in range(40):
        kind, feeds, given, opset = make(rng)
        outputs = ["a", "b"] if kind == "Scan" else ["a"]
        made = helper.make_model(
            helper.make_graph(
                [helper.make_node(kind, list(feeds), outputs, **given)],
                "g",
                [
                    helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(item.dtype), item.shape)
                    for name, item in feeds.items()
                ],
                [helper.make_empty_tensor_value_info(name) for name in outputs],
            ),
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=8,
        )
        try:
            computed = ort.InferenceSession(made.SerializeToString(), options).run(None, feeds)
        except Exception:  # of many types
            continue
        ran += 1
        traced = trace(made, {name: item.shape for name, item in feeds.items()})
        assert not traced.failures
        for name, array in zip(outputs, computed, strict=True):
            shape = traced.tensors[name].shape
            if shape is not None:
                assert len(shape) == array.ndim, (made.graph.node[0], shape, array.shape)
                assert all(one in (-1, two) for one, two in zip(shape, array.shape, strict=True)), made.graph.node[0]
    assert ran > 20


def _branches(second: int) -> onnx.ModelProto:
    """`x` times a matrix of 3 rows, or of another number, as the input `flag` has it."""

    def branch(rows: int, name: str) -> onnx.GraphProto:
        weight = onnx.numpy_helper.from_array(np.ones((rows, 2), np.float32), f"w{name}")
        made = helper.make_node("MatMul", ["x", f"w{name}"], [name], f"times_{name}")
        return helper.make_graph(
            [made], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)], [weight]
        )

    choice = helper.make_node("If", ["flag"], ["y"], then_branch=branch(3, "a"), else_branch=branch(second, "b"))
    graph = helper.make_graph(
        [choice],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "k"]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_branch_that_the_given_shapes_do_not_fit_is_no_conflict(tmp_path: Path) -> None:
    report = te.lint(models.save(_branches(5), tmp_path), shapes="x:4x3", support_from="static")
    assert "shape-conflict" not in {item.code for item in report.findings}


def test_branches_of_other_shapes_are_refused_for_the_releases_that_refuse_them(tmp_path: Path) -> None:
    proto = _branches(3)
    (weight,) = proto.graph.node[0].attribute[1].g.initializer
    weight.CopyFrom(onnx.numpy_helper.from_array(np.ones((3, 5), np.float32), weight.name))
    path = models.save(proto, tmp_path)
    for release, refused in (("10.0", True), ("10.13", True), ("11.4", False)):
        found = te.lint(path, tensorrt=release, target="tensorrt", support_from="static", shapes="x:4x3").findings
        assert any("its branches give `y` as 4x2 and 4x5" in item.message for item in found) == refused


def test_sizes_that_were_given_and_sizes_in_time_are_not_asked_for(tmp_path: Path) -> None:
    def codes(sizes: list[str | int], shapes: str | None) -> set[str]:
        graph = helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes)],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return {item.code for item in te.lint(models.save(proto, tmp_path), shapes=shapes).findings}

    assert "dynamic-height-width" in codes(["n", 3, "h", "w"], None)
    assert not {"dynamic-height-width", "dynamic-sizes"} & codes(["n", 3, "h", "w"], "x:1x3x64x64")
    assert "dynamic-height-width" not in codes(["n", 3, "frames", 160], None)


def test_a_conflict_that_plain_onnx_runtime_does_not_have_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_engine.graph import ort_contrib_shapes

    feeds = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64, 1]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, ["k", 2]),
    ]
    step, frame = (
        onnx.numpy_helper.from_array(np.array(size, np.int64), name) for size, name in ((16, "s"), (32, "f"))
    )
    nodes = [
        helper.make_node("STFT", ["x", "s", "", "f"], ["y"]),
        helper.make_node("Transpose", ["y"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["t", "w"], ["z"], "product"),
    ]
    graph = helper.make_graph(nodes, "g", feeds, [helper.make_empty_tensor_value_info("z")], [step, frame])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    monkeypatch.delitem(ort_contrib_shapes._CORRECTIONS, "STFT")  # inference is wrong then
    for rows, conflicts in ((17, False), (5, True)):
        found = te.lint(models.save(proto, tmp_path), shapes=f"x:1x64x1,w:{rows}x2", support_from="static").findings
        assert any(item.code == "shape-conflict" for item in found) == conflicts


_WEIGHTED = {  # operator -> attributes, shapes of its inputs
    "Conv": ({"group": 2, "kernel_shape": [3, 3]}, [(1, 4, 8, 8), (6, 2, 3, 3), (6,)]),
    "ConvTranspose": ({"group": 2}, [(1, 4, 8, 8), (4, 3, 3, 3), (6,)]),
    "BatchNormalization": ({}, [(1, 4, 8), (4,), (4,), (4,), (4,)]),
    "InstanceNormalization": ({}, [(1, 4, 8), (4,), (4,)]),
    "Gemm": ({"transB": 1}, [(2, 4), (3, 4)]),
    "LSTM": ({"hidden_size": 3}, [(5, 1, 4), (1, 12, 4), (1, 12, 3)]),
    "GRU": ({"hidden_size": 3}, [(5, 1, 4), (1, 9, 4), (1, 9, 3)]),
    "RNN": ({"hidden_size": 3}, [(5, 1, 4), (1, 3, 4), (1, 3, 3)]),
}


@pytest.mark.parametrize("operator", _WEIGHTED)
def test_weights_that_are_not_for_their_data_are_a_conflict_exactly_where_onnx_runtime_refuses_them(
    operator: str, tmp_path: Path
) -> None:
    given, shapes = _WEIGHTED[operator]
    random, wrong = np.random.default_rng(0), []
    for at, axis in [(0, None), *((at, axis) for at, sizes in enumerate(shapes) for axis in range(len(sizes)))]:
        changed = [list(sizes) for sizes in shapes]
        if axis is not None:
            changed[at][axis] += 1
        arrays = [random.random(sizes, np.float32) for sizes in changed]
        weights = [onnx.numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(arrays) if i]
        data = helper.make_tensor_value_info("x", TensorProto.FLOAT, changed[0])
        node = helper.make_node(operator, ["x", *(item.name for item in weights)], ["y"], "node", **given)
        graph = helper.make_graph(
            [node], "g", [data], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], weights
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        path = models.save(proto, tmp_path)
        try:
            ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": arrays[0]})
            runs = True
        except Exception:
            runs = False
        found = {item.code for item in te.lint(path, support_from="static").findings}
        if ("shape-conflict" not in found) != runs:
            wrong.append((at, axis, runs, found))
    assert not wrong


@pytest.mark.parametrize("place", ["between nodes", "output"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT16])
def test_a_result_declared_in_another_type_is_wrong_exactly_where_onnx_runtime_refuses_it(
    place: str, kind: int, tmp_path: Path
) -> None:
    data = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    between, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("t", "y"))
    (between if place == "between nodes" else made).type.tensor_type.elem_type = kind
    nodes = [helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Abs", ["t"], ["y"])]
    graph = helper.make_graph(nodes, "g", [data], [made], value_info=[between])
    path = models.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path)
    try:
        ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        runs = True
    except Exception:
        runs = False
    found = {item.code for item in te.lint(path, support_from="static").findings}
    assert ("wrong-type" not in found) == runs == (kind == TensorProto.FLOAT)
