"""Small valid ONNX models of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_models import FLOAT, INT64, STRING, conv_net, int8_qdq, node, save, two_inputs

Maker = Callable[[Path], Path]


def _transformer(path: Path) -> Path:
    rng = np.random.default_rng(1)
    nodes = [
        node("LayerNormalization", "x scale bias", "n", axis=-1),
        node("MatMul", "n wq", "q"),
        node("MatMul", "n wk", "k"),
        node("Transpose", "k", "kt", perm=[0, 2, 1]),
        node("MatMul", "q kt", "s"),
        node("Add", "s mask", "m"),
        node("Softmax", "m", "p", axis=-1),
        node("MatMul", "p n", "y"),
    ]
    square = rng.standard_normal((4, 4)).astype(np.float32)
    weights = {"scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32), "wq": square, "wk": square.T.copy(),
               "mask": np.float32([-1e9])}  # fmt: skip
    return save(path, nodes, {"x": (FLOAT, ["batch", 3, 4])}, {"y": (FLOAT, ["batch", 3, 4])}, weights)


def _shapes(path: Path) -> Path:
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows"),
        node("Unsqueeze", "rows axes", "rows1"),
        node("Concat", "rows1 rest", "wanted", axis=0),
        node("Reshape", "x wanted", "flat"),
        node("Range", "start limit delta", "steps"),
        node("Cast", "steps", "steps_f", to=FLOAT),
        node("Expand", "one size", "wide"),
        node("Add", "flat steps_f", "sum"),
        node("Add", "sum wide", "t"),
        node("Slice", "t begin end", "y"),
    ]
    weights = {"zero": np.int64(0), "axes": np.int64([0]), "rest": np.int64([-1]), "start": np.int64(0),
    "limit": np.int64(4),
               "delta": np.int64(1), "one": np.float32([1]), "size": np.int64([4]), "begin": np.int64([0]),
               "end": np.int64([9])}  # fmt: skip
    return save(path, nodes, {"x": (FLOAT, ["batch", 2, 2])}, {"y": (FLOAT, None)}, weights)


def _branches(path: Path) -> Path:
    def branch(name: str, op: str) -> Any:
        inside = [node(op, "x", f"{name}_y")]
        return helper.make_graph(inside, name, [], [helper.make_tensor_value_info(f"{name}_y", FLOAT, None)])

    nodes = [
        node("ReduceMax", "x", "top", keepdims=0),
        node("Greater", "top limit", "is_large"),
        node("If", "is_large", "y", then_branch=branch("a", "Relu"), else_branch=branch("b", "Tanh")),
    ]
    return save(path, nodes, {"x": (FLOAT, [2, 3])}, {"y": (FLOAT, [2, 3])}, {"limit": np.float32(0)})


def _loop(path: Path) -> Path:
    body = helper.make_graph(
        [node("Identity", "go", "go_on"), node("Add", "state step", "next")],
        "body",
        [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, []),
         helper.make_tensor_value_info("state", FLOAT, [2])],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), helper.make_tensor_value_info("next", FLOAT, [2])],
    )  # fmt: skip
    nodes = [node("Loop", "trips yes x", "y", body=body)]
    weights = {"trips": np.int64(3), "yes": np.bool_(True), "step": np.float32([1, 2])}
    return save(path, nodes, {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}, weights)


def _functions(path: Path) -> Path:
    save(path, [node("Twice", "x", "h", domain="own"), node("Relu", "h", "y")], {"x": (FLOAT, ["n", 4])},
         {"y": (FLOAT, ["n", 4])}, domains={"own": 1})  # fmt: skip
    model = onnx.load(path)
    inner = helper.make_function(
        "own", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 20)], []
    )
    model.functions.append(inner)
    onnx.save(model, path)
    return path


def _lstm(path: Path) -> Path:
    rng = np.random.default_rng(2)
    weights = {
        "w": rng.standard_normal((1, 8, 3)).astype(np.float32),
        "r": rng.standard_normal((1, 8, 2)).astype(np.float32),
    }
    nodes = [node("LSTM", "x w r", "y", hidden_size=2)]
    return save(path, nodes, {"x": (FLOAT, [4, "batch", 3])}, {"y": (FLOAT, [4, 1, "batch", 2])}, weights)


def _kinds(path: Path) -> Path:
    text = helper.make_tensor("words", STRING, [2], [b"a", b"b"])
    half = numpy_helper.from_array(np.float16([1, 2, 3, 4]), "half")
    long = helper.make_tensor("long", FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    sparse_values = helper.make_tensor("v", FLOAT, [1], [3.0])
    nodes = [
        helper.make_node("Constant", [], ["c"], value=long),
        helper.make_node("Constant", [], ["s"], value=text),
        helper.make_node("Constant", [], ["z"], sparse_value=helper.make_sparse_tensor(
            sparse_values, helper.make_tensor("i", INT64, [1], [2]), [4])),
        helper.make_node("ConstantOfShape", ["size"], ["zeros"], value=helper.make_tensor("one", FLOAT, [1], [1.0])),
        node("Cast", "half", "wide", to=FLOAT),
        node("Add", "x c", "a"),
        node("Add", "a z", "b"),
        node("Add", "b wide", "d"),
        node("Add", "d zeros", "y"),
        node("Identity", "s", "words_out"),
    ]  # fmt: skip
    sides = {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, ["batch", 4]), "words_out": (STRING, [2])}
    return save(path, nodes, *sides, {"half": half, "size": np.int64([4])})


def _gemm(path: Path) -> Path:
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((4, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    nodes = [node("Gemm", "x w b", "h"), node("Clip", "h", "c"), node("MatMul", "c w", "y")]
    return save(path, nodes, {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, ["batch", 4])}, weights)


NETWORKS: dict[str, Maker] = {
    "conv": lambda path: conv_net(path, width=2, size=4),
    "half": lambda path: conv_net(path, width=2, size=4, half=True),
    "side_file": lambda path: conv_net(path, width=2, size=4, location="weights.bin"),
    "two_inputs": two_inputs,
    "int8": int8_qdq,
    "gemm": _gemm,
    "transformer": _transformer,
    "shapes": _shapes,
    "branches": _branches,
    "functions": _functions,
    "lstm": _lstm,
    "kinds": _kinds,
    "loop": _loop,
}
"""By name; `loop` is a program that may run for ever once it is mutated, and is never run."""
