"""Small valid ONNX models of many kinds, and mutations of the messages they are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto, helper, numpy_helper

from fuzz.mutate import hostile_text, mutate_bytes
from onnx_models import FLOAT, INT64, STRING, conv_net, int8_qdq, node, save, two_inputs

__all__ = ["NETWORKS", "mutate_network"]

Maker = Callable[[Path], Path]

# ------------------------------------------------------------------------------------------------ valid models


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

# ------------------------------------------------------------------------------------------------ mutations

_INTS = (0, 1, -1, 2, 3, 4, 7, 9, 10, 13, 16, 17, 21, 22, 23, 24, 99, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 40,
         (1 << 62), (1 << 63) - 1, -(1 << 31), -(1 << 63))  # fmt: skip
_OPS = (
    "Relu", "Conv", "LayerNormalization", "Range", "Concat", "Expand", "Tile", "ConstantOfShape", "Pad", "Resize", "OneHot",
    "Loop", "If", "Scan", "Einsum", "TopK", "NonMaxSuppression", "QuantizeLinear", "DequantizeLinear", "BatchNormalization",
    "GroupNormalization", "Attention", "RandomNormal", "Dropout", "NoSuchOp", "Reshape", "Split", "Constant",
    "Identity", "Where",
    "GridSample", "StringNormalizer", "SequenceConstruct", "Optional", "ArgMax", "CumSum", "GatherND", "ScatterND",
    "MaxPool", "LSTM",
)  # fmt: skip


def mutate_network(rng: random.Random, raw: bytes) -> bytes:
    """The model with messages, fields or bytes changed."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, raw)
    model = ModelProto.FromString(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        try:
            _change(rng, model)
        except (ValueError, TypeError, OverflowError, IndexError):  # what this model has not, or this field cannot hold
            continue
    try:
        made = model.SerializeToString()
    except ValueError:  # a text that UTF-8 has no bytes for
        return mutate_bytes(rng, raw)
    return mutate_bytes(rng, made, 1) if rng.random() < 0.05 else made


def _change(rng: random.Random, model: ModelProto) -> None:
    if rng.random() < 0.35:
        _rewire(rng, model)
        return
    messages = list(_messages(model))
    message = rng.choice(messages)
    present = message.ListFields()
    field, value = (
        (rng.choice(present)) if present and rng.random() < 0.8 else (rng.choice(message.DESCRIPTOR.fields), None)
    )
    if _is_repeated(field):
        _change_list(rng, getattr(message, field.name), field, messages)
    elif rng.random() < 0.12:
        message.ClearField(field.name)
    elif field.message_type is not None:
        others = [one for one in messages if one.DESCRIPTOR is field.message_type]
        if others:
            getattr(message, field.name).CopyFrom(_copy(rng.choice(others)))
    else:
        setattr(message, field.name, _scalar(rng, field, value))


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if _is_repeated(field) else (value,):
                yield from _messages(item)


def _is_repeated(field: Any) -> bool:
    known = getattr(field, "is_repeated", None)
    return bool(known) if known is not None else field.label == field.LABEL_REPEATED


def _copy(message: Message) -> Message:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _change_list(rng: random.Random, items: Any, field: Any, messages: list[Message]) -> None:
    act = rng.randrange(6)
    if act == 0 and len(items):
        del items[rng.randrange(len(items))]
    elif act == 1 and len(items):
        again = items[rng.randrange(len(items))]
        items.extend([_copy(again) if field.message_type is not None else again])
    elif act == 2 and len(items) > 1:
        order = [_copy(item) if field.message_type is not None else item for item in items]
        rng.shuffle(order)
        del items[:]
        items.extend(order)
    elif field.message_type is not None:
        others = [one for one in messages if one.DESCRIPTOR is field.message_type]
        if others:
            items.extend([_copy(rng.choice(others))])
    elif act == 3 or not len(items):
        items.extend([_scalar(rng, field, None)])
    else:
        at = rng.randrange(len(items))
        items[at] = _scalar(rng, field, items[at])


def _scalar(rng: random.Random, field: Any, old: Any) -> Any:
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            raw = old if isinstance(old, bytes) else b""
            return rng.choice((b"", raw[:-1], raw + b"\0", raw * 2, b"\xff\x1b[31m", mutate_bytes(rng, raw)))
        return hostile_text(rng).encode("utf-8", "replace").decode()
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e38, 1e-45, float("inf"), float("nan")))
    if kind == field.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 6, 7, 10, 16, 17, 22, 99))
    if kind == field.CPPTYPE_BOOL:
        return not old
    return rng.choice(_INTS) if rng.random() < 0.8 or not isinstance(old, int) else old + rng.choice((-1, 1))


def _rewire(rng: random.Random, model: ModelProto) -> None:
    """A change that keeps every message whole: wires, operators, constants, dimensions."""
    graphs = [one for one in _messages(model) if isinstance(one, onnx.GraphProto)]
    graph = rng.choice(graphs)
    names = [*(item.name for item in graph.input), *(item.name for item in graph.initializer),
             *(name for item in graph.node for name in item.output), ""]  # fmt: skip
    act = rng.randrange(10)
    nodes = list(graph.node)
    if act <= 1 and nodes:
        pick = rng.choice(nodes)
        if pick.input:
            pick.input[rng.randrange(len(pick.input))] = rng.choice(names)  # may close a cycle
    elif act == 2 and nodes:
        rng.choice(nodes).op_type = rng.choice(_OPS)
    elif act == 3 and nodes:
        pick = rng.choice(nodes)
        made = _copy(pick)
        if pick.output:
            made.output[0] = f"{pick.output[0]}_more"
            graph.node.insert(rng.randrange(len(nodes) + 1), made)
    elif act == 4 and graph.initializer:
        pick = rng.choice(graph.initializer)
        if pick.data_type == INT64:
            shape = [rng.choice((1, 1, 2, 4))] if pick.dims else []
            value = np.full(shape, rng.choice((*_INTS, 1, 2, 4, 3, -1)), np.int64)
            pick.CopyFrom(numpy_helper.from_array(value, pick.name))
        else:
            pick.dims[:] = [rng.choice((0, 1, 2, 3, 4, -1, 1 << 31, 1 << 62)) for _ in range(rng.randrange(5))]
    elif act == 5:
        values = [*graph.input, *graph.output, *graph.value_info]
        if values:
            shape = rng.choice(values).type.tensor_type.shape
            for dim in shape.dim[: rng.randrange(1, 5)]:
                dim.dim_value = rng.choice((0, 1, 2, 3, 4, 8, -1, 1 << 20, 1 << 31, 1 << 62))
    elif act == 6 and nodes:
        pick = rng.choice(nodes)
        pick.attribute.extend([helper.make_attribute(
            rng.choice(("axis", "to", "perm", "pads", "group", "kernel_shape", "strides", "value", "epsilon",
            "keepdims", "mode")),
            rng.choice((0, -1, 99, 1 << 40, [1, 2], [0, 0, 0, 0], 0.5, "x", [1 << 40])))])  # fmt: skip
    elif act == 7:
        for item in model.opset_import[:1]:
            item.version = rng.choice((1, 6, 7, 9, 11, 13, 17, 18, 19, 21, 22, 25, 26, 99, 0, -1, 1 << 62))
    elif act == 8 and graph.initializer:
        pick = rng.choice(graph.initializer)
        pick.data_location = TensorProto.EXTERNAL
        del pick.external_data[:]
        for key, value in (("location", rng.choice(("../outside/secret.bin", "/etc/hostname", "weights.bin", "", ".",
        "a\0b"))),
                           ("offset", rng.choice(("0", "-1", "x", "9" * 30))), ("length", rng.choice(("4", "0", "-4",
                           str(1 << 50))))):  # fmt: skip
            if rng.random() < 0.8:
                pick.external_data.add(key=key, value=value)
    elif graph.node and act == 9:
        item = rng.choice([*graph.input, *graph.output])
        item.name = rng.choice(names) or hostile_text(rng).encode("utf-8", "replace").decode()
