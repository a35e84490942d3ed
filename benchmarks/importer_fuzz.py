"""The importer of the backend `inductor`, node by node as PyTorch traces it, beside ONNX's node tests and ONNX Runtime.

    python benchmarks/importer_fuzz.py --nodes                 ONNX's node tests, parameters as constants
    python benchmarks/importer_fuzz.py --count 3000 --seed 0   drawn graphs, against ONNX Runtime without optimisation
    python benchmarks/importer_fuzz.py --count 300 --only resize     of one generator
    python benchmarks/importer_fuzz.py --seed 0 --show 417 --attempt 2     the graph of a record
    python benchmarks/importer_fuzz.py ... -o FILE             the records, one JSON object a line

A graph is right, refused (by a `ModelError` that names a node and its operator, or the operators), wrong (another shape,
dtype or value) or a crash (any other exception); the exit code is 1 for one that is wrong or a crash.
Graphs are drawn until ONNX Runtime runs one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.backends.inductor.onnx_module import OnnxModule, load_graph, to_tensor
from trt_engine.backends.inductor.tensor_rules import RULES
from trt_engine.errors import ModelError

OPSETS = (7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24)
TIES = ("test_top_k_same_values", "test_top_k_same_values_2d", "test_top_k_same_values_largest")
"""Among equal values PyTorch's choice of the index is open."""


# ------------------------------------------------------------------------------------------------ both sides


def imported(proto: ModelProto, feeds: Sequence[Any]) -> list[torch.Tensor]:
    """The importer's outputs; feeds in the order of the graph's inputs."""
    copied = ModelProto()
    copied.CopyFrom(proto)
    kinds = [item.type.tensor_type.elem_type for item in copied.graph.input]
    module = OnnxModule(load_graph(copied).proto, torch.device("cpu"), RULES).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(module(*(to_tensor(np.asarray(a), kind) for a, kind in zip(feeds, kinds, strict=True))))


def difference(
    found: Sequence[torch.Tensor], wanted: Sequence[Any], kinds: Sequence[int], *, masked: bool = False
) -> str:
    """What the first output that differs is, and should be; empty where all agree. `masked`: zeros for what is no number
    agree, as of attention's rows without a key."""
    for at, (value, array, kind) in enumerate(zip(found, wanted, kinds, strict=True)):
        array = np.asarray(array)
        if array.dtype.kind in "iu":  # numpy has two types of 64 bits
            array = array.astype(f"{array.dtype.kind}{array.itemsize}")
        expected = to_tensor(array, kind)
        if value.dtype != expected.dtype or value.shape != expected.shape:
            return f"output {at} is {_form(value)}, expected {_form(expected)}"
        coarse = value.dtype.is_floating_point and value.dtype.itemsize < 4
        a, b = value.double(), expected.double()
        b = torch.where(b.isnan() & (a == 0), 0.0, b) if masked else b
        scale = float(b[torch.isfinite(b)].abs().max()) if bool(torch.isfinite(b).any()) else 1.0
        limits = (
            {"rtol": 1e-2, "atol": 2e-3 * max(scale, 1.0)} if coarse else {"rtol": 1e-3, "atol": 1e-5 * max(scale, 1.0)}
        )
        if not torch.allclose(a, b, equal_nan=True, **limits):
            apart = torch.isclose(a, b, equal_nan=True, **limits).logical_not().reshape(-1).nonzero()[0]
            return f"output {at}: {a.reshape(-1)[apart].item():.6g}, expected {b.reshape(-1)[apart].item():.6g}"
    return ""


def _form(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def judge(proto: ModelProto, feeds: Sequence[Any], wanted: Sequence[Any]) -> dict[str, str]:
    """`state` and `why`."""
    kinds = [item.type.tensor_type.elem_type for item in proto.graph.output]
    try:
        for item, array in zip(proto.graph.input, feeds, strict=True):
            to_tensor(np.asarray(array), item.type.tensor_type.elem_type)
    except Exception as error:  # a type that PyTorch has no name for
        return {"state": "not fed", "why": f"{type(error).__name__}: {error}"[:300]}
    try:
        found = imported(proto, feeds)
    except ModelError as error:
        return {"state": "refused", "why": error.message}
    except Exception as error:
        return {"state": "crash", "why": f"{type(error).__name__}: {error}"[:300]}
    try:
        why = difference(found, wanted, kinds, masked=any(node.op_type == "Softmax" for node in proto.graph.node))
    except Exception as error:  # a type that PyTorch has no name for
        return {"state": "not fed", "why": f"{type(error).__name__}: {error}"[:300]}
    return {"state": "wrong", "why": why} if why else {"state": "right", "why": ""}


# ------------------------------------------------------------------------------------------------ ONNX's node tests


def node_tests() -> Iterator[dict[str, str]]:
    """A record for each case of ONNX whose inputs and outputs are arrays; what decides shapes is a constant."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in cases:
        proto = ModelProto()
        proto.CopyFrom(case.model)
        given, wanted = case.data_sets[0]
        arrays = [_array(item) for item in given]
        wanted = [_array(item) for item in wanted]
        if not all(isinstance(item, np.ndarray) and item.dtype.kind not in "OSU" for item in arrays):
            yield {"name": case.name, "state": "not fed", "why": "sequences, optionals or strings"}
            continue
        feeds = []
        inputs = list(proto.graph.input)
        del proto.graph.input[:]
        for at, (value, array) in enumerate(zip(inputs, arrays, strict=True)):
            parameter = array.ndim <= 1 and value.type.tensor_type.elem_type != TensorProto.STRING
            if at and parameter:
                kind = value.type.tensor_type.elem_type
                try:
                    stored = numpy_helper.from_array(array, value.name)
                except Exception:
                    stored = helper.make_tensor(value.name, kind, array.shape, array.astype(np.float32).reshape(-1))
                proto.graph.initializer.append(stored)
            else:
                proto.graph.input.append(value)
                feeds.append(array)
        found = judge(proto, feeds, wanted)
        if case.name in TIES and found["state"] == "wrong":
            found = {"state": "ties", "why": found["why"]}
        yield {"name": case.name} | found


def _array(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


# ------------------------------------------------------------------------------------------------ drawn graphs


@dataclass
class Drawn:
    """A graph in the making: its random numbers, nodes, inputs and constants."""

    rng: random.Random
    opset: int
    nodes: list[NodeProto] = field(default_factory=list)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    count: int = 0

    def name(self, stem: str = "t") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def pick(self, *items: Any) -> Any:
        return self.rng.choice(items)

    def maybe(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def attributes(self, share: float = 0.5, **given: Any) -> dict[str, Any]:
        """Each with this share."""
        return {name: value for name, value in given.items() if value is not None and self.maybe(share)}

    def sizes(self, rank: int, low: int = 1, high: int = 5) -> list[int]:
        return [self.rng.randint(low, high) for _ in range(rank)]

    def array(self, shape: Sequence[int], dtype: Any = np.float32, scale: float | None = None) -> np.ndarray:
        draw = np.random.default_rng(self.rng.getrandbits(32))
        kind = np.dtype(dtype)
        if kind.kind == "b":
            return draw.random(shape) < 0.5
        if kind.kind in "iu":
            limits = np.iinfo(kind)
            low, high = (limits.min, limits.max) if self.maybe(0.2) and kind.itemsize == 1 else (max(-9, limits.min), 9)
            return draw.integers(low, high, shape, endpoint=True).astype(kind)
        return (draw.standard_normal(shape) * (scale or self.pick(1, 1, 5))).astype(kind)

    def feed(self, shape: Sequence[int], dtype: Any = np.float32, scale: float | None = None) -> str:
        self.feeds[name := self.name("x")] = np.asarray(self.array(shape, dtype, scale))
        return name

    def const(self, values: Any, dtype: Any = np.int64) -> str:
        self.constants[name := self.name("c")] = (
            values if isinstance(values, TensorProto) else np.asarray(values, dtype)
        )
        return name

    def stored(self, kind: int, shape: Sequence[int], values: Sequence[float]) -> str:
        """A constant of any element type."""
        name = self.name("c")
        self.constants[name] = helper.make_tensor(name, kind, shape, values)
        return name

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"n{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def model(self) -> ModelProto:
        value = helper.make_tensor_value_info
        stored = []
        for name, item in self.constants.items():
            tensor = item if isinstance(item, TensorProto) else numpy_helper.from_array(item, name)
            tensor.name = name
            stored.append(tensor)
        inputs = [value(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in self.feeds.items()]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


Generator = Callable[[Drawn], Any]
_NUMBERS = (np.float32, np.float32, np.float32, np.int32, np.int64, np.float64)
_SMALL = (np.int8, np.uint8, np.int32, np.int64, np.float32)


def unary(g: Drawn) -> Any:
    ops = "Abs Ceil Cos Erf Exp Floor HardSwish Identity IsNaN Log Neg Reciprocal Relu Round Sigmoid Sign Sin Softplus Sqrt"
    ops += " Tanh Atan Cosh IsInf Mish Softsign Tan Asin"
    dtype = g.pick(np.float32, np.float32, np.int32, np.int8, np.uint8, np.float16)
    return g.add(g.pick(*ops.split()), [g.feed(g.sizes(g.rng.randint(0, 3)), dtype)])


def activation(g: Drawn) -> Any:
    x = g.feed(g.sizes(g.rng.randint(1, 4)))
    op = g.pick("Elu", "LeakyRelu", "HardSigmoid", "Gelu", "PRelu", "Clip", "Dropout", "Selu", "ThresholdedRelu")
    if op == "PRelu":
        return g.add(op, [x, g.const(g.array(g.feeds[x].shape[-1:]), np.float32)])
    if op == "Clip":
        low, high = (g.const(-1.0, np.float32), g.const(g.pick(0.5, -2.0), np.float32)) if g.opset >= 11 else ("", "")
        inputs = [x, low if g.maybe() else "", high if g.maybe() else ""] if low else [x]
        return g.add(op, inputs, **(g.attributes(min=-1.0, max=0.5) if not low else {}))
    given = {"Elu": g.attributes(alpha=0.3), "LeakyRelu": g.attributes(alpha=0.3),
             "HardSigmoid": g.attributes(alpha=0.4, beta=0.1), "Gelu": g.attributes(approximate=g.pick("tanh", "none")),
             "Selu": g.attributes(alpha=1.1, gamma=2.0),
             "ThresholdedRelu": g.attributes(alpha=0.2)}.get(op, {})  # fmt: skip
    return g.add(op, [x], **given)


def binary(g: Drawn) -> Any:
    op = g.pick(
        *"Add Sub Mul Div Pow Mod Max Min Sum Equal Less Greater LessOrEqual GreaterOrEqual And Or Where".split()
    )
    dtype = np.bool_ if op in ("And", "Or") else g.pick(*_NUMBERS, np.int8, np.uint8)
    shape = g.sizes(g.rng.randint(0, 3))
    other = [size if g.maybe(0.7) else 1 for size in shape][g.rng.randint(0, len(shape)) if shape else 0 :]
    count = g.rng.randint(1, 4) if op in ("Max", "Min", "Sum") else 2
    names = [
        g.feed(shape, dtype),
        *(g.feed(other, dtype) if g.maybe() else g.const(g.array(other, dtype), dtype) for _ in range(count - 1)),
    ]
    if op in ("Div", "Mod"):
        for name in names[1:]:
            held = g.feeds if name in g.feeds else g.constants
            held[name] = np.where(held[name] == 0, 3, held[name]).astype(dtype)
    if op == "Pow":
        g.feeds[names[0]] = np.abs(g.feeds[names[0]])
        held = g.feeds if names[1] in g.feeds else g.constants
        held[names[1]] = np.clip(np.abs(held[names[1]]), 0, 3)
    if op == "Where":
        names = [g.feed(shape, np.bool_), *names]
    fmod = {"fmod": 1} if op == "Mod" and (np.dtype(dtype).kind == "f" or g.maybe()) else {}
    return g.add(op, names, **fmod)


_ON_NUMBERS = """
    Add Sub Mul Div Mod Max Min Cast Where Neg Abs Reduce Concat Gather Slice Equal Pow Unsqueeze Floor Sqrt Range Size
    ConstantOfShape Expand Split Squeeze Reshape Not Identity Tile Ceil Reciprocal Sign Clip
""".split()
_MOVES = """
    Reshape Flatten Transpose Squeeze Unsqueeze Split Slice Slice Pad Pad Expand Tile Concat Shape Size ConstantOfShape
    DepthToSpace SpaceToDepth Trilu Identity
""".split()
_REDUCTIONS = """
    ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceLogSum ReduceLogSumExp ReduceSumSquare
""".split()
_QUANTIZED = """
    INT8 UINT8 INT16 UINT16 INT4 UINT4 FLOAT8E4M3FN FLOAT8E5M2 FLOAT8E4M3FNUZ
""".split()


def numbers(g: Drawn) -> Any:
    """Arithmetic on sizes and small constants, which is computed while the graph is traced."""
    x = g.feed(g.sizes(g.rng.randint(1, 4)))
    dtype = g.pick(*_SMALL, np.int64, np.int64)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    count = g.rng.randint(1, 4)
    known: list[tuple[str, Any]] = []

    def fresh() -> str:
        if g.maybe(0.3) and g.opset >= 13 and dtype is np.int64:
            made = g.add(
                "Shape", [x], **(g.attributes(start=g.pick(-2, 0, 1), end=g.pick(-1, 1, 2)) if g.opset >= 15 else {})
            )
            return g.add(g.pick("ReduceSum", "ReduceSum"), [made, g.const([0])], keepdims=g.pick(0, 1))
        return g.const(g.array(g.pick([], [1], [count], [count]), dtype), dtype)

    name = fresh()
    for _ in range(g.rng.randint(1, 4)):
        op = g.pick(*_ON_NUMBERS)
        if op in ("Div", "Mod"):
            divisor = g.const(np.where((a := g.array(g.pick([], [1]), dtype)) == 0, 3, a), dtype)
            name = g.add(
                op, [name, divisor], **({"fmod": 1} if op == "Mod" and (dtype is np.float32 or g.maybe()) else {})
            )
        elif op in ("Max", "Min"):
            name = g.add(op, [name, *(fresh() for _ in range(g.rng.randint(0, 3)))])
        elif op in ("Add", "Sub", "Mul"):
            name = g.add(op, [name, fresh()] if g.maybe() else [fresh(), name])
        elif op == "Pow":
            name = g.add(op, [name, g.const(g.pick(0, 1, 2, 3), dtype)])
        elif op == "Cast":
            other = g.pick(
                TensorProto.UINT8,
                TensorProto.INT8,
                TensorProto.INT32,
                TensorProto.INT64,
                TensorProto.FLOAT,
                TensorProto.BOOL,
            )
            name = g.add("Cast", [g.add("Cast", [name], to=other)], to=kind)
        elif op == "Where":
            name = g.add(op, [g.add("Equal", [name, fresh()]), name, fresh()])
        elif op in ("Equal", "Not"):
            test = g.add(g.pick("Equal", "Less", "Greater"), [name, fresh()])
            name = g.add("Cast", [g.add("Not", [test]) if op == "Not" else test], to=kind)
        elif op in ("Neg", "Abs", "Identity", "Floor", "Ceil", "Sqrt", "Reciprocal", "Sign"):
            name = g.add(op, [name])
        elif op == "Clip":
            name = g.add(op, [name, g.const(0, dtype), g.const(5, dtype)])
        elif op == "Reduce":
            op = g.pick("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd", "ReduceMean")
            noop = {"noop_with_empty_axes": 1} if g.opset >= (13 if op == "ReduceSum" else 18) and g.maybe() else {}
            axes = [g.const(g.pick([0], [-1], []))] if noop | {} and g.maybe() else []
            name = g.add(op, [name, *axes], **noop, **g.attributes(keepdims=g.pick(0, 1)))
        elif op == "Concat":
            name = g.add(op, [g.add("Reshape", [part, g.const([-1])]) for part in (name, fresh())], axis=g.pick(0, -1))
        elif op == "Gather":
            name = g.add(
                op,
                [g.add("Reshape", [name, g.const([-1])]), g.const(g.pick(0, -1, [0], [-1, 0]))],
                **g.attributes(axis=0),
            )
        elif op == "Slice":
            step = g.pick(1, 1, 2, -1)
            ends = g.pick(1, 2, -1, 100) if step > 0 else g.pick(-100, 0)
            name = g.add(
                op,
                [
                    g.add("Reshape", [name, g.const([-1])]),
                    g.const([0 if step > 0 else g.pick(-1, 5)]),
                    g.const([ends]),
                    g.const([g.pick(0, -1)]),
                    g.const([step]),
                ],
            )
            name = g.add("ReduceSum", [name], keepdims=1)
        elif op == "Unsqueeze":
            name = g.add("Reshape", [g.add(op, [name, g.const([g.pick(0, -1)])]), g.const([-1])])
        elif op == "Squeeze":
            name = g.add(op, [g.add("ReduceSum", [name], keepdims=g.pick(0, 1)), *([g.const([])] if False else [])])
        elif op == "Range" and np.dtype(dtype).kind in "if" and dtype is not np.int8:
            name = g.add(
                op, [g.const(g.pick(0, 5), dtype), g.const(g.pick(3, 1, 0), dtype), g.const(g.pick(1, -1, 2), dtype)]
            )
            name = g.add("ReduceSum", [name], keepdims=1)
        elif op == "ConstantOfShape":
            value = helper.make_tensor("v", kind, [1], [g.pick(0, 3, 100)])
            name = g.add("Add", [name, g.add(op, [g.const(g.pick([1], []))], value=value)])
        elif op == "Expand":
            name = g.add(op, [name, g.const(g.pick([1], [1, 1], [2, 1]))])
        elif op == "Tile":
            name = g.add(op, [g.add("Reshape", [name, g.const([-1])]), g.const([g.pick(1, 2)])])
        elif op == "Split":
            flat = g.add("Concat", [g.add("Reshape", [part, g.const([-1])]) for part in (name, name)], axis=0)
            given = {"num_outputs": 2} if g.opset >= 18 else {}
            name = g.add(op, [flat], 2, **given)[g.pick(0, 1)]
        elif op == "Reshape":
            name = g.add(op, [name, g.const(g.pick([-1], [1, -1], [-1, 1]))])
        elif op == "Size":
            name = g.add("Add", [name, g.add("Cast", [g.add("Size", [name])], to=kind)])
    del known
    return name


def cast(g: Drawn) -> Any:
    kinds = [TensorProto.DataType.Value(name) for name in
             "FLOAT FLOAT16 DOUBLE BFLOAT16 INT8 UINT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 BOOL INT4 UINT4 "
             "FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ".split()]  # fmt: skip
    to = g.pick(*kinds)
    dtype = g.pick(np.float32, np.float32, np.float16, np.int32, np.int64, np.uint8, np.int8, np.bool_)
    x = g.array(g.pick([3], [6], [2, 9]), dtype)
    if x.dtype.kind == "f":
        x = (x * g.pick(1, 10, 1000)).astype(dtype)
        if (to >= 17 and to <= 20) or to in (1, 10, 11, 16):
            x.reshape(-1)[:2] = g.pick((np.inf, -np.inf), (np.nan, 0.0), (-0.0, 1e4))
        else:
            x = np.clip(x, 0, 100).astype(dtype) if to in (2, 4, 12, 13) else np.clip(x, -100, 100).astype(dtype)
    if g.maybe(0.3):
        name = g.const(x, dtype)
        g.feed([1])
    else:
        g.feeds[name := g.name("x")] = x
    given = {"saturate": g.pick(0, 1)} if 17 <= to <= 20 and g.maybe(0.6) else {}
    made = g.add("Cast", [name], to=to, **given)
    if to in (21, 22) or 17 <= to <= 20:
        made = g.add("Cast", [made], to=TensorProto.FLOAT)
    return made


def quantize(g: Drawn) -> Any:
    kind = TensorProto.DataType.Value(g.pick(*_QUANTIZED))
    rank = g.rng.randint(1, 4)
    shape = g.sizes(rank)
    x = g.feed(shape, np.float32, g.pick(1, 5, 100))
    axis = g.rng.randrange(-rank, rank)
    block = g.pick(1, 2) if g.opset >= 21 and g.maybe(0.3) else 0
    per = g.maybe() and not block
    size = (
        []
        if not per and not block
        else [shape[axis]]
        if per
        else [-(-n // block) if at == axis % rank else n for at, n in enumerate(shape)]
    )
    scale = g.const(np.abs(g.array(size, np.float32)) * 0.1 + 0.02, np.float32)
    whole = kind < 17 or kind in (21, 22)
    zero = g.rng.randint(0, 5) if whole else 0
    inputs = [x, scale]
    given = {"axis": axis} if per or block or g.maybe(0.2) else {}
    if block:
        given["block_size"] = block
    named = {}
    if g.maybe(0.7) or g.opset < 21:
        inputs.append(g.stored(kind, size, [zero] * int(np.prod(size, dtype=np.int64))))
    else:
        named = {"output_dtype": kind}
    if not whole and g.maybe(0.4):
        named["saturate"] = g.pick(0, 1)
    if g.opset >= 23 and g.maybe(0.2):
        named["precision"] = g.pick(1, 10)
    made = g.add("QuantizeLinear", inputs, **given, **named)
    if g.maybe(0.3):
        made = g.add("Reshape", [made, g.const(shape)])
    return g.add("DequantizeLinear", [made, *inputs[1:]], **given)


def _window(g: Drawn, rank: int, *, transposed: bool = False) -> dict[str, Any]:
    kernel = g.sizes(rank, 1, 3)
    given = g.attributes(strides=g.sizes(rank, 1, 3), dilations=g.sizes(rank, 1, 2))
    auto = g.pick("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID") if g.maybe(0.4) else None
    if auto:
        given["auto_pad"] = auto
    if auto in (None, "NOTSET") and g.maybe(0.6):
        given["pads"] = (
            [g.rng.randint(0, size - 1) for size in kernel] * 2
            if g.maybe()
            else [g.rng.randint(0, s - 1) for s in kernel * 2]
        )
    given["kernel_shape"] = kernel
    return given


def conv(g: Drawn) -> Any:
    rank, group = g.pick(1, 2, 2, 2, 3), g.pick(1, 1, 2, 3)
    given = _window(g, rank)
    channels, outputs = group * g.rng.randint(1, 3), group * g.rng.randint(1, 2)
    x = g.feed([g.rng.randint(1, 2), channels, *g.sizes(rank, 4, 8)], scale=1)
    weight = g.const(g.array([outputs, channels // group, *given["kernel_shape"]], scale=1), np.float32)
    bias = [g.const(g.array([outputs]), np.float32)] if g.maybe() else []
    if g.maybe(0.3):
        del given["kernel_shape"]
    made = g.add("Conv", [x, weight, *bias], **given, **({"group": group} if group > 1 or g.maybe(0.2) else {}))
    return g.add("Relu", [made]) if g.maybe(0.2) else made


def conv_transpose(g: Drawn) -> Any:
    rank, group = g.pick(1, 2, 2, 2, 3), g.pick(1, 1, 2)
    given = _window(g, rank)
    strides = given.get("strides", [1] * rank)
    channels, outputs = group * g.rng.randint(1, 3), g.rng.randint(1, 2)
    sizes = g.sizes(rank, 2, 6)
    x = g.feed([g.rng.randint(1, 2), channels, *sizes], scale=1)
    weight = g.const(g.array([channels, outputs, *given["kernel_shape"]], scale=1), np.float32)
    bias = [g.const(g.array([outputs * group]), np.float32)] if g.maybe() else []
    if g.maybe(0.4):
        given["output_padding"] = [g.rng.randint(0, s - 1) for s in strides]
    if g.maybe(0.2) and "pads" not in given:
        given["output_shape"] = [size * stride + g.pick(0, 0, 1) for size, stride in zip(sizes, strides, strict=True)]
    if g.maybe(0.3):
        del given["kernel_shape"]
    return g.add("ConvTranspose", [x, weight, *bias], **given, **({"group": group} if group > 1 else {}))


def pool(g: Drawn) -> Any:
    op, rank = g.pick("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), g.pick(1, 2, 2, 3)
    x = g.feed([1, 2, *g.sizes(rank, 4, 8)])
    if op.startswith("Global"):
        return g.add(op, [x])
    given = _window(g, rank) | (g.attributes(0.4, ceil_mode=g.pick(0, 1)) if g.opset >= 10 else {})
    if op == "AveragePool":
        given |= g.attributes(0.4, count_include_pad=g.pick(0, 1))
        if g.opset < 19:
            given.pop("dilations", None)
    elif g.opset < 10:
        given.pop("dilations", None)
    if op == "MaxPool":
        if g.maybe(0.2):
            given["storage_order"] = g.pick(0, 1)
        if g.maybe(0.2):
            return g.add(op, [x], 2, **given)
    return g.add(op, [x], **given)


def norm(g: Drawn) -> Any:
    op, shape = (
        g.pick(
            "BatchNormalization",
            "InstanceNormalization",
            "LayerNormalization",
            "LpNormalization",
            "GroupNormalization",
            "RMSNormalization",
        ),
        [2, 4, *g.sizes(g.rng.randint(1, 2), 2, 4)],
    )
    x = g.feed(shape)
    eps = g.attributes(epsilon=0.1)
    if op == "LayerNormalization":
        axis = g.pick(-1, 1, 2, 0, -2)
        size = shape[axis:]
        return g.add(
            op,
            [x, g.const(g.array(size), np.float32), *([g.const(g.array(size), np.float32)] if g.maybe() else [])],
            axis=axis,
            **eps,
            **g.attributes(0.3, stash_type=1),
        )
    if op == "BatchNormalization":
        four = [g.const(np.abs(g.array([4])) + 0.1, np.float32) for _ in range(4)]
        return g.add(op, [x, *four], **eps, **g.attributes(0.3, momentum=0.5))
    if op == "InstanceNormalization":
        return g.add(op, [x, *(g.const(g.array([4]), np.float32) for _ in range(2))], **eps)
    if op == "GroupNormalization":
        return g.add(op, [x, *(g.const(g.array([4]), np.float32) for _ in range(2))], num_groups=2, **eps)
    if op == "RMSNormalization":
        return g.add(op, [x, g.const(g.array(shape[-1:]), np.float32)], **eps)
    return g.add(op, [x], **g.attributes(axis=1, p=1))


def product(g: Drawn) -> Any:
    op = g.pick("Gemm", "MatMul", "MatMul", "Einsum")
    n, m, k = g.sizes(3)
    if op == "Gemm":
        ta, tb = g.pick(0, 1), g.pick(0, 1)
        dtype = g.pick(np.float32, np.float32, np.int32)
        names = [g.feed([k, n] if ta else [n, k], dtype), g.const(g.array([m, k] if tb else [k, m], dtype), dtype)]
        if g.maybe() or g.opset < 11:
            names.append(g.const(g.array(g.pick([m], [1, m], [n, m], [n, 1], [], [1]), dtype), dtype))
        return g.add(op, names, **g.attributes(alpha=0.5, beta=2.0), transA=ta, transB=tb)
    if op == "MatMul":
        left, right = g.pick(
            ([n, k], [k, m]),
            ([k], [k, m]),
            ([n, k], [k]),
            ([k], [k]),
            ([2, 3, n, k], [3, k, m]),
            ([n, k], [2, k, m]),
            ([2, n, k], [k]),
        )
        x = g.feed(left)
        y = g.add(op, [x, g.feed(right) if g.maybe() else g.const(g.array(right), np.float32)])
        return g.add("Add", [y, g.const(g.array([1]), np.float32)]) if g.maybe(0.3) else y
    equation, left, right = g.pick(
        ("ij,jk->ik", [n, k], [k, m]),
        ("bij,bjk->bik", [2, n, k], [2, k, m]),
        ("ij,jk", [n, k], [k, m]),
        ("...ij,jk->...ik", [2, n, k], [k, m]),
        ("i,j->ij", [n], [m]),
    )
    return g.add(op, [g.feed(left), g.feed(right)], equation=equation)


def shape(g: Drawn) -> Any:
    rank = g.rng.randint(1, 4)
    sizes = g.sizes(rank)
    dtype = g.pick(np.float32, np.float32, np.int64, np.uint8, np.bool_)
    x = g.feed(sizes, dtype)
    op = g.pick(*_MOVES)
    if op == "Reshape":
        total = int(np.prod(sizes))
        into = g.pick([-1], [0, -1], [total], [1, -1, 1], sizes[::-1])
        return g.add(op, [x, g.const(into)], **(g.attributes(0.3, allowzero=1) if g.opset >= 14 else {}))
    if op == "Flatten":
        return g.add(op, [x], **g.attributes(0.8, axis=g.rng.randint(-rank if g.opset >= 11 else 0, rank)))
    if op == "Transpose":
        return g.add(op, [x], **g.attributes(0.7, perm=g.rng.sample(range(rank), rank)))
    if op in ("Squeeze", "Unsqueeze"):
        x = g.feed([1, 3, 1, 2], dtype)
        axes = (
            g.pick([0], [2], [0, 2], [-2], [-4, -2])
            if op == "Squeeze"
            else g.pick([0], [-1], [0, 3], [4], [5, 1], [-6, -1])
        )
        if g.opset < 11:
            axes = [abs(axis) % 4 for axis in axes]
        if g.opset >= 13:
            return g.add(op, [x, g.const(axes)] if op == "Unsqueeze" or g.maybe(0.7) else [x])
        return g.add(op, [x], axes=sorted(axes))
    if op == "Split":
        axis = g.rng.randrange(-rank if g.opset >= 11 else 0, rank)
        x = g.feed([*sizes[: axis % rank], 5, *sizes[axis % rank + 1 :]], dtype)
        if g.opset >= 18 and g.maybe():
            count = g.pick(1, 2, 3, 4)
            made = g.add(op, [x], count, axis=axis, num_outputs=count)
        elif g.opset >= 13:
            made = g.add(
                op, [x, g.const(parts := g.pick([2, 3], [1, 4], [5], [1, 1, 3], [0, 5]))], len(parts), axis=axis
            )
        else:
            made = g.add(op, [x], 2, axis=axis, split=[2, 3])
        return made
    if op == "Slice":
        if g.opset < 10:
            return g.add(op, [x], starts=[0], ends=[g.pick(1, -1, 100)], **g.attributes(axes=[rank - 1]))
        axes = g.rng.sample(range(rank), g.rng.randint(1, rank))
        steps = [g.pick(1, 2, -1, -2) for _ in axes]
        starts = [g.pick(0, 1, -2, 10) if s > 0 else g.pick(-1, 3, 100, -2) for s in steps]
        ends = [g.pick(1, -1, 100, 2**63 - 1) if s > 0 else g.pick(0, -100, -(2**63), 1, -3) for s in steps]
        kind = g.pick(np.int64, np.int64, np.int32)
        clipped = [np.clip(v, np.iinfo(kind).min, np.iinfo(kind).max) for v in (starts, ends)]
        return g.add(
            op,
            [
                x,
                *(g.const(v, kind) for v in clipped),
                g.const([a - g.pick(0, rank) for a in axes], kind),
                g.const(steps, kind),
            ],
        )
    if op == "Pad":
        mode = g.pick("constant", "constant", "reflect", "edge", "wrap")
        rank = g.rng.randint(1, 5)
        x = g.feed(g.sizes(rank, 3, 4), g.pick(np.float32, np.float32, np.int64, np.uint8))
        picked = (
            list(range(rank))
            if g.opset < 18 or g.maybe()
            else sorted(g.rng.sample(range(rank), g.rng.randint(1, rank)))
        )
        pads = [g.pick(0, 0, 1, 2, -1) for _ in picked * 2]
        if g.opset < 11:
            return g.add(op, [g.feed(g.sizes(rank, 3, 4))], pads=pads, mode=mode, **g.attributes(value=1.5))
        value = g.const(g.pick(1, 3), g.feeds[x].dtype) if g.maybe() else ""
        inputs = [
            x,
            g.const(pads),
            value,
            *([g.const([a - g.pick(0, rank) for a in picked])] if g.opset >= 18 and len(picked) < rank else []),
        ]
        return g.add(op, inputs if inputs[-1] else inputs[:2], mode=mode)
    if op == "Expand":
        return g.add(op, [x, g.const([2, *[g.pick(1, n) for n in sizes]])])
    if op == "Tile":
        return g.add(op, [x, g.const(g.sizes(rank, 1, 3))])
    if op == "Concat":
        axis = g.rng.randrange(-rank if g.opset >= 11 else 0, rank)
        return g.add(op, [x, x, g.const(g.array(sizes, dtype), dtype)], axis=axis)
    if op == "Shape":
        return g.add(
            op, [x], **(g.attributes(start=g.rng.randint(-6, 6), end=g.rng.randint(-6, 6)) if g.opset >= 15 else {})
        )
    if op == "ConstantOfShape":
        return g.add(op, [g.add("Shape", [x])], **g.attributes(value=numpy_helper.from_array(np.array([3], dtype))))
    if op == "Trilu":
        return g.add(
            op,
            [g.feed([2, 3, 4]), *([g.const(g.pick(-1, 1))] if g.maybe() else [])],
            **g.attributes(upper=g.pick(0, 1)),
        )
    if op in ("DepthToSpace", "SpaceToDepth"):
        x = g.feed([1, 8, 4, 4])
        return g.add(
            op, [x], blocksize=2, **(g.attributes(mode=g.pick("DCR", "CRD")) if op[0] == "D" and g.opset >= 11 else {})
        )
    return g.add(op, [x])


def resize(g: Drawn) -> Any:
    rank = g.pick(4, 4, 4, 3, 5)
    x = g.feed([1, 2, *g.sizes(rank - 2, 2, 5)])
    if g.opset < 11:
        return (
            g.add(
                "Resize" if g.opset >= 10 else "Upsample",
                [x, g.const([1.0, 1.0, *[g.pick(1.0, 2.0, 3.0) for _ in range(rank - 2)]], np.float32)],
                mode="nearest",
            )
            if g.opset >= 9
            else g.add("Upsample", [x], scales=[1.0, 1.0, *[2.0] * (rank - 2)])
        )
    mode = g.pick("nearest", "nearest", "linear", "cubic")
    given = {"mode": mode} if mode != "nearest" or g.maybe() else {}
    where = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"] + (
        ["half_pixel_symmetric"] if g.opset >= 19 else []
    )
    given |= g.attributes(0.8, coordinate_transformation_mode=g.pick(*where))
    given |= (
        g.attributes(0.6, nearest_mode=g.pick("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
        if mode == "nearest"
        else {}
    )
    if mode == "cubic":
        given |= g.attributes(0.3, cubic_coeff_a=g.pick(-0.5, -0.75), exclude_outside=g.pick(0, 1))
    if g.opset >= 18:
        given |= g.attributes(0.15, antialias=1) | g.attributes(0.1, axes=list(range(2, rank)))
    axes = given.get("axes", list(range(rank)))
    sizes = g.feeds[x].shape
    empty = g.const([], np.float32)
    if g.maybe(0.6) or "axes" in given:
        scales = [
            g.pick(1.0, 2.0)
            if axis < 2 and g.maybe(0.15)
            else 1.0
            if axis < 2
            else g.pick(1.0, 2.0, 2.0, 3.0, 0.5, 1.5)
            for axis in axes
        ]
        return g.add("Resize", [x, empty, g.const(scales, np.float32)], **given)
    given |= (
        g.attributes(0.15, keep_aspect_ratio_policy=g.pick("stretch", "not_larger", "not_smaller"))
        if g.opset >= 18
        else {}
    )
    wanted = [*sizes[:2], *[g.pick(n, 2 * n, n + 1, max(n // 2, 1), 1, 7) for n in sizes[2:]]]
    return g.add("Resize", [x, empty, empty if g.opset < 13 else "", g.const(wanted)], **given)


def grid(g: Drawn) -> Any:
    x = g.feed([2, 2, 4, 5])
    modes = ("linear", "nearest", "cubic") if g.opset >= 20 else ("bilinear", "nearest", "bicubic")
    return g.add(
        "GridSample",
        [x, g.feed([2, 3, 3, 2], scale=0.7)],
        **g.attributes(
            0.7, mode=g.pick(*modes), padding_mode=g.pick("zeros", "border", "reflection"), align_corners=g.pick(0, 1)
        ),
    )


def picking(g: Drawn) -> Any:
    op, rank = (
        g.pick(
            "Gather",
            "GatherElements",
            "GatherND",
            "TopK",
            "ArgMax",
            "ArgMin",
            "NonZero",
            "OneHot",
            "ScatterND",
            "ScatterElements",
            "CumSum",
        ),
        g.rng.randint(1, 4),
    )
    sizes = g.sizes(rank, 2, 4)
    x = g.feed(sizes)
    axis = g.rng.randrange(-rank, rank) if g.opset >= 13 else g.rng.randrange(rank)
    kind = g.pick(np.int64, np.int32)
    if op == "Gather":
        index = np.array(g.pick(0, -1, [0], [-1, 1], [[0, 1], [-1, 0]]), kind)
        index = index if g.opset >= 11 else np.abs(index)
        return g.add(op, [x, g.const(index, kind)], **({"axis": axis} if g.maybe(0.8) else {}))
    if op == "GatherElements":
        index = np.random.default_rng(g.rng.getrandbits(32)).integers(
            -2, 2, [n if at != axis % rank else 3 for at, n in enumerate(sizes)]
        )
        return g.add(op, [x, g.const(index, kind) if g.maybe() else g.const(index)], axis=axis)
    if op == "GatherND":
        batch = g.pick(0, 0, 1) if rank > 1 and g.opset >= 12 else 0
        draw = np.random.default_rng(g.rng.getrandbits(32))
        last = g.rng.randint(1, rank - batch)
        return g.add(
            op,
            [x, g.const(draw.integers(-1, 2, [*sizes[:batch], 3, last]))],
            **({"batch_dims": batch} if batch else {}),
        )
    if op == "TopK":
        if g.opset < 10:
            return g.add(op, [x], 2, k=2, axis=axis)
        return g.add(
            op,
            [x, g.const([g.pick(1, 2)])],
            2,
            axis=axis,
            **(g.attributes(largest=g.pick(0, 1)) if g.opset >= 11 else {}),
        )
    if op in ("ArgMax", "ArgMin"):
        if g.opset >= 12 and g.maybe(0.3):
            g.feeds[x] = np.round(g.feeds[x])
            return g.add(op, [x], axis=axis, select_last_index=g.pick(0, 1), **g.attributes(keepdims=0))
        return g.add(op, [x], **g.attributes(axis=axis, keepdims=g.pick(0, 1)))
    if op == "NonZero":
        g.feeds[x] = np.round(g.feeds[x])
        return g.add(op, [x])
    if op == "OneHot":
        return g.add(op, [g.feed([3], np.int64), g.const(5), g.const([0, 1], np.float32)], **g.attributes(axis=0))
    if op == "CumSum":
        return g.add(op, [x, g.const(axis)], **g.attributes(exclusive=1, reverse=1))
    if op == "ScatterND":
        x = g.feed([5, 3])
        reduction = g.attributes(0.5, reduction=g.pick("none", "add", "mul")) if g.opset >= 16 else {}
        return g.add(op, [x, g.const([[0], [3]]), g.feed([2, 3])], **reduction)
    x = g.feed([5, 3])
    reduction = g.attributes(0.5, reduction=g.pick("none", "add", "mul")) if g.opset >= 16 else {}
    return g.add(op, [x, g.const([[0, 1, 2], [-1, 4, 3]]), g.feed([2, 3])], **g.attributes(axis=0), **reduction)


def reduce(g: Drawn) -> Any:
    op, rank = (
        g.pick(*_REDUCTIONS),
        g.rng.randint(0, 4),
    )
    x = g.feed(g.sizes(rank, 1, 4), g.pick(np.float32, np.float32, np.int32, np.int64, np.float64), 1)
    axes = g.rng.sample(range(-rank, 0), g.rng.randint(0, rank)) if rank else []
    axes = axes if g.opset >= 11 else sorted(axis + rank for axis in axes)
    keep = g.attributes(0.7, keepdims=g.pick(0, 1))
    if g.opset >= (13 if op == "ReduceSum" else 18):
        inputs = [x, g.const(axes)] if axes or g.maybe() else [x]
        return g.add(op, inputs, **keep, **g.attributes(0.3, noop_with_empty_axes=g.pick(0, 1)))
    return g.add(op, [x], **keep, **({"axes": axes} if axes else {}))


def softmax(g: Drawn) -> Any:
    rank = g.rng.randint(1, 4)
    axis = g.rng.randrange(-rank if g.opset >= 11 else 0, rank)
    return g.add(
        g.pick("Softmax", "LogSoftmax", "Softmax", "Hardmax"), [g.feed(g.sizes(rank))], **g.attributes(0.7, axis=axis)
    )


def recurrent(g: Drawn) -> Any:
    op = g.pick("LSTM", "GRU", "RNN")
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    steps, batch, width, hidden = g.rng.randint(1, 4), g.rng.randint(1, 3), 3, g.rng.randint(1, 3)
    way = g.pick("forward", "forward", "reverse", "bidirectional")
    ways = 2 if way == "bidirectional" else 1
    layout = 1 if g.opset >= 14 and g.maybe(0.15) else 0
    x = g.feed([batch, steps, width] if layout else [steps, batch, width])
    names = [
        x,
        g.const(g.array([ways, gates * hidden, width]), np.float32),
        g.const(g.array([ways, gates * hidden, hidden]), np.float32),
    ]
    names.append(g.const(g.array([ways, 2 * gates * hidden]), np.float32) if g.maybe(0.7) else "")
    lens = g.maybe(0.25)
    names.append(
        g.const([g.rng.randint(1, steps) if g.maybe(0.6) else steps for _ in range(batch)], np.int32) if lens else ""
    )
    state = [batch, ways, hidden] if layout else [ways, batch, hidden]
    names.append(g.feed(state) if g.maybe() else "")
    if op == "LSTM":
        names.append(g.feed(state) if g.maybe() else "")
        names.append(g.const(g.array([ways, 3 * hidden]), np.float32) if g.maybe(0.2) else "")
    given: dict[str, Any] = {"hidden_size": hidden} | g.attributes(0.9, direction=way if way != "forward" else None)
    if ways == 2 or way == "reverse":
        given["direction"] = way
    given |= g.attributes(0.2, clip=g.pick(0.3, 3.0)) | ({"layout": 1} if layout else {})
    if op == "LSTM":
        given |= g.attributes(0.15, input_forget=g.pick(0, 1))
    if op == "GRU":
        given |= g.attributes(0.6, linear_before_reset=g.pick(0, 1))
    if g.maybe(0.25):
        each = {"LSTM": 3, "GRU": 2, "RNN": 1}[op]
        given["activations"] = [
            g.pick("Sigmoid", "Tanh", "Relu", "HardSigmoid", "Softsign", "LeakyRelu") for _ in range(each)
        ] * ways
        if "LeakyRelu" in given["activations"] or "HardSigmoid" in given["activations"]:
            given["activations"] = [
                {"LeakyRelu": "Relu", "HardSigmoid": "Sigmoid"}.get(a, a) for a in given["activations"]
            ]
    elif g.maybe(0.2):
        given["activations"] = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[
            op
        ] * ways
    while not names[-1]:
        names.pop()
    return g.add(op, names, 3 if op == "LSTM" else 2, **given)


def attention(g: Drawn) -> Any:
    rank = g.pick(3, 4, 4, 5)
    lead, (s, t, d) = g.sizes(rank - 2, 1, 3), g.sizes(3, 2, 4)
    q, k, v = g.feed([*lead, s, d], scale=1), g.feed([*lead, t, d], scale=1), g.feed([*lead, t, d], scale=1)
    swapped = g.add("Transpose", [k], perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = g.add("MatMul", [q, swapped])
    if g.maybe(0.7):
        scores = g.add(g.pick("Mul", "Div"), [scores, g.const(g.pick(0.5, 2.0, -1.0), np.float32)])
    mask = np.where(g.array([s, t], np.bool_), 0, g.pick(-np.inf, -1e4, -3.4e38)).astype(np.float32)
    if g.maybe(0.7):
        mask[0] = mask.min() if g.maybe(0.5) else 0
        name = g.const(mask, np.float32) if g.maybe(0.5) else None
        if name is None:
            g.feeds[name := g.name("m")] = mask
        scores = g.add("Add", [scores, name] if g.maybe(0.8) else [name, scores])
    axis = g.pick(-1, -1, 3, rank - 1, rank - 2)
    axis = axis if axis < rank else -1
    weights = g.add("Softmax", [scores], axis=axis)
    if g.maybe(0.4):
        weights = g.add("Where", [g.add("IsNaN", [weights]), g.const(0.0, np.float32), weights])
    if axis not in (-1, rank - 1):
        pass
    return g.add("MatMul", [weights, v])


def control(g: Drawn) -> Any:
    """`If` and `Loop` of sizes."""
    x = g.feed(g.sizes(3, 1, 3))
    value = helper.make_tensor_value_info
    size = g.add("Gather", [g.add("Shape", [x]), g.const(g.pick(0, 1, 2))], axis=0)
    if g.maybe(0.6):
        test = g.add(g.pick("Equal", "Greater") if g.opset >= 11 else "Equal", [size, g.const(1)])
        if g.maybe(0.2):
            test = g.add("Cast", [g.add("ReduceSum", [x], keepdims=0)], to=TensorProto.BOOL)
        branches = []
        for op in g.rng.sample(["Relu", "Neg", "Abs"], 2):
            inner = helper.make_node(op, [x], [name := g.name("b")])
            branches.append(helper.make_graph([inner], "b", [], [value(name, 1, None)]))
        return g.add(
            "Relu" if g.maybe(0.3) else "Identity",
            [g.add("If", [test], then_branch=branches[0], else_branch=branches[1])],
        )
    body = helper.make_graph(
        [helper.make_node("Identity", ["keep"], ["keep_out"]), helper.make_node("Add", ["carried", x], ["carried_out"]),
         helper.make_node("Neg", ["carried"], ["scanned"])],
        "b", [value("i", 7, []), value("keep", 9, []), value("carried", 1, None)],
        [value("keep_out", 9, []), value("carried_out", 1, None), value("scanned", 1, None)],
    )  # fmt: skip
    return g.add("Loop", [size, g.const(np.array(True), np.bool_) if g.maybe(0.7) else "", x], 2, body=body)


def integers(g: Drawn) -> Any:
    """Operators of quantised models: dynamic ones, and the older QLinear family."""
    kind, weight_kind = g.pick(np.uint8, np.int8), g.pick(np.int8, np.uint8)
    zero = g.const(g.array([], kind), kind)
    op = g.pick("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv", "Dynamic")
    if op == "DynamicQuantizeLinear":
        return g.add(op, [g.feed(g.sizes(g.rng.randint(0, 3)), scale=g.pick(0.1, 5))], 3)
    n, m, k = g.sizes(3)
    conv = op in ("ConvInteger", "QLinearConv")
    x = g.feed([1, 2, 4, 5] if conv else g.pick([n, k], [2, n, k]), kind)
    size = [3, 2, 2, 2] if conv else [k, m]
    w = g.const(g.array(size, weight_kind), weight_kind)
    w_zero = g.const(g.array(g.pick([], [m]) if op == "MatMulInteger" else [], weight_kind), weight_kind)
    if op == "Dynamic":
        values, scale, offset = g.add("DynamicQuantizeLinear", [g.feed([n, k])], 3)
        made = g.add("MatMulInteger", [values, w, offset, w_zero] if g.maybe() else [values, w, offset])
        return g.add("Mul", [g.add("Cast", [made], to=1), scale])
    if op in ("MatMulInteger", "ConvInteger"):
        window = g.attributes(pads=[1, 0, 1, 1], strides=[2, 1]) if conv else {}
        return g.add(op, [x, w, *([zero, w_zero] if g.maybe(0.7) else [])], **window)
    scale = g.const(0.05, np.float32)
    out = [g.const(g.pick(0.5, 2.0), np.float32), g.const(g.array([], kind), kind)]
    bias = [g.const(g.array([3], np.int32), np.int32)] if conv and g.maybe() else []
    return g.add(op, [x, scale, zero, w, scale, w_zero, *out, *bias])


def standard_attention(g: Drawn) -> Any:
    """`Attention` and `RotaryEmbedding` of opset 23 and later."""
    heads, kv, size, s, t = g.pick(2, 4), g.pick(1, 2), 4, g.rng.randint(1, 4), g.rng.randint(1, 4)
    flat = g.maybe(0.4)
    shapes = [[2, length, n * size] if flat else [2, n, length, size] for n, length in ((heads, s), (kv, t))]
    q = g.feed(shapes[0], scale=1)
    if g.maybe(0.4):
        half = g.pick(1, 2)
        tables = [g.const(g.array([9, half]), np.float32) for _ in range(2)]
        places = [g.const(g.rng.choices(range(9), k=2 * s))]
        places = [g.add("Reshape", [places[0], g.const([2, s])])]
        part = {"rotary_embedding_dim": 2} if half == 1 else {}
        return g.add("RotaryEmbedding", [q, *tables, *places], **part, **({"num_heads": heads} if flat else {}),
                     **g.attributes(interleaved=g.pick(0, 1)))  # fmt: skip
    inputs = [q, g.feed(shapes[1], scale=1), g.feed(shapes[1], scale=1)]
    if g.maybe():
        inputs.append(g.const(m := g.array(g.pick([s, t], [2, 1, s, t]), g.pick(np.bool_, np.float32)), m.dtype))
    given = {"q_num_heads": heads, "kv_num_heads": kv} if flat else {}
    given |= g.attributes(0.4, is_causal=1) | g.attributes(0.3, scale=0.7) | g.attributes(0.2, softcap=2.0)
    return g.add("Attention", inputs, **given)


def rare(g: Drawn) -> Any:
    """One operator of those that few models have."""
    x, op = g.feed(g.pick([3, 4], [2, 3, 4])), g.pick(*_RARE)
    axis = g.pick(0, 1, -1)
    last = g.feeds[x].shape[axis]
    image = [g.feed([1, 2, 4, 6])]
    signal = g.const(g.rng.randint(2, 6))
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "Compress": ([x, g.const(g.array([last], np.bool_), np.bool_)], {"axis": axis}),
        "ReverseSequence": (
            [x, g.const(g.rng.choices((1, 2, 3), k=g.feeds[x].shape[1]))], {"time_axis": 0, "batch_axis": 1}),
        "EyeLike": ([g.feed([3, 5])], g.attributes(k=g.pick(-1, 2))),
        "Unique": ([x], g.attributes(axis=axis, sorted=1)), "Shrink": ([x], g.attributes(bias=0.3, lambd=0.7)),
        "MeanVarianceNormalization": (image, g.attributes(axes=[0, 2, 3])), "Det": ([g.feed([2, 3, 3])], {}),
        "LRN": (image, {"size": 3} | g.attributes(alpha=0.1, bias=2.0)),
        "LpPool": (image, {"kernel_shape": [2, 2]} | g.attributes(p=1, strides=[1, 2], pads=[1, 0, 0, 1])),
        "GlobalLpPool": (image, g.attributes(p=1)), "HannWindow": ([signal], g.attributes(periodic=0)),
        "HammingWindow": ([signal], g.attributes(periodic=0)), "BlackmanWindow": ([signal], {}),
        "DFT": ([g.feed([1, 6, 1])], g.attributes(onesided=g.pick(0, 1))),
        "CenterCropPad": ([x, g.const([2, 6][: 1 + (axis < 0)])], {"axes": [axis] if axis >= 0 else [0, 1]}),
        "BitShift": ([g.feed([4], np.uint8), g.const([1, 0, 3, 7], np.uint8)], {"direction": g.pick("LEFT", "RIGHT")}),
        "BitwiseAnd": ([g.feed([4], np.int32), g.const([1, -1, 3, 7], np.int32)], {}),
        "Xor": ([g.feed([4], np.bool_)] * 2, {}),
        "BitwiseNot": ([g.feed([4], np.int8)], {}), "Mean": ([x, x, g.const(2.0, np.float32)], {}),
        "Swish": ([x], g.attributes(alpha=0.5)), "Celu": ([x], g.attributes(alpha=0.5)),
        "Acos": ([x], {}), "Sinh": ([x], {}),
        "CastLike": ([x, g.const(1, g.pick(np.int8, np.float16, np.bool_))], {}), "Atanh": ([x], {}), "Acosh": ([x], {}),
        "NonMaxSuppression": ([g.feed([1, 5, 4]), g.feed([1, 2, 5]), g.const(3), g.const(0.3, np.float32)], {}),
        "RoiAlign": ([*image, g.const([[0, 0, 3, 3]], np.float32), g.const([0])], g.attributes(output_height=2, mode="max")),
        "Col2Im": ([g.feed([1, 8, 6]), g.const([3, 4]), g.const([2, 2])], {}),
        "Constant": ([], {"value_floats": [1.0, 2.5]}),
        "AffineGrid": ([g.feed([1, 2, 3]), g.const([1, 1, 2, 3])], g.attributes(align_corners=1)),
        "MaxRoiPool": ([*image, g.const([[0, 0, 0, 3, 3]], np.float32)], {"pooled_shape": [2, 2]}),
    }  # fmt: skip
    inputs, given = cases[op]
    return g.add(op, inputs, **given)


def sequence(g: Drawn) -> Any:
    """Sequences, optional values and `Scan`."""
    x = g.feed([3, 2, 4])
    how = g.pick("split", "made", "optional", "scan")
    if how == "scan":
        value = helper.make_tensor_value_info
        body = helper.make_graph(
            [helper.make_node("Add", ["kept", "each"], ["sum"]), helper.make_node("Neg", ["sum"], ["out"])], "b",
            [value("kept", 1, [2, 4]), value("each", 1, [2, 4])], [value("sum", 1, [2, 4]), value("out", 1, [2, 4])],
        )  # fmt: skip
        return g.add("Scan", [g.feed([2, 4]), x], 2, body=body, num_scan_inputs=1,
                     **g.attributes(scan_input_directions=[1], scan_output_directions=[1]))  # fmt: skip
    if how == "optional":
        return g.add("OptionalGetElement", [g.add("Optional", [x])])
    axis = g.pick(0, 1, 2, -1)
    if how == "split":
        made = g.add("SplitToSequence", [x, g.const(g.pick(1, [1]))], axis=axis, keepdims=g.pick(0, 1)) if g.maybe() else (
            g.add("SplitToSequence", [x], axis=axis, **g.attributes(keepdims=0)))  # fmt: skip
    else:
        made = g.add("SequenceConstruct", [x, g.add("Neg", [x])])
        if g.maybe(0.3):
            made = g.add("SequenceInsert", [made, g.add("Abs", [x]), g.const(g.pick(0, -1))])
    if g.maybe(0.3):
        return g.add("SequenceLength", [made])
    if g.maybe():
        return g.add("SequenceAt", [made, g.const(g.pick(0, -1))])
    return g.add("ConcatFromSequence", [made], axis=g.pick(0, 1, -1), **g.attributes(0.3, new_axis=1))


def empty(g: Drawn) -> Any:
    """Tensors of no elements, through operators that have their own rule for them."""
    shape = g.pick([0, 3], [2, 0], [2, 0, 4], [0])
    x, op = (
        g.feed(shape),
        g.pick(*"Softmax MatMul Concat Transpose Resize Gather Slice Pad Tile Expand Reduce Reshape".split()),
    )
    full = [n or 2 for n in shape]
    if op == "MatMul":
        return g.add(op, [x, g.feed([*shape[:-2], shape[-1], 3])])
    if op == "Concat":
        return g.add(op, [x, g.feed(full)], axis=shape.index(0))
    if op == "Gather":
        return g.add(op, [g.feed(full), g.const(np.zeros(g.pick([0], [2, 0])))], axis=g.pick(0, -1))
    if op == "Slice":
        return g.add(op, [g.feed(full), g.const([g.pick(5, 1)]), g.const([g.pick(1, -9)]), g.const([g.pick(0, -1)])])
    if op == "Pad":
        return g.add(op, [x, g.const([1] * (2 * len(shape)))])
    if op == "Tile":
        return g.add(op, [g.feed(full), g.const([g.pick(0, 2) for _ in shape])])
    if op == "Expand":
        return g.add(op, [g.feed([1] * len(shape)), g.const(shape)])
    if op == "Reduce":
        return g.add(g.pick(*_REDUCTIONS), [x], **g.attributes(0.5, keepdims=0))
    if op == "Reshape":
        return g.add(op, [x, g.const([0, -1] if shape == [2, 0, 4] and g.maybe() else [*shape, 1])])
    if op == "Resize":
        return g.add(op, [g.feed([0, 1, 2, 3]), "", g.const([1, 1, 2, 2], np.float32)])
    return g.add(op, [x], **({"axis": g.pick(0, -1)} if op == "Softmax" else {}))


_RARE = """
    Compress ReverseSequence EyeLike Unique Shrink MeanVarianceNormalization Det LRN LpPool GlobalLpPool HannWindow Acosh
    HammingWindow BlackmanWindow DFT CenterCropPad BitShift BitwiseAnd BitwiseNot Mean Swish Celu Acos Sinh CastLike Atanh
    NonMaxSuppression RoiAlign Col2Im Constant AffineGrid MaxRoiPool Xor
""".split()


GENERATORS: dict[str, Generator] = {
    item.__name__: item for item in (
        unary, activation, binary, numbers, cast, quantize, conv, conv_transpose, pool, norm, product, shape, resize, grid,
        picking, reduce, softmax, recurrent, attention, control, integers, standard_attention, rare, sequence, empty,
    )
}  # fmt: skip
_WEIGHTS = {"numbers": 4, "shape": 3, "binary": 2, "resize": 3, "recurrent": 3, "cast": 2, "quantize": 2, "picking": 2}


def drawn(seed: int, number: int, only: Sequence[str] = (), attempt: int = 0) -> tuple[str, Drawn]:
    """The generator and a graph of a number: the first attempt that ONNX Runtime runs is the one that counts."""
    names = [name for name in GENERATORS if not only or name in only]
    name = random.Random(f"{seed}/{number}").choices(names, [_WEIGHTS.get(item, 1) for item in names])[0]
    rng = random.Random(f"{seed}/{number}/{attempt}")
    made = Drawn(rng, rng.choice(OPSETS))
    found = GENERATORS[name](made)
    made.outputs = list(found) if isinstance(found, list) else [found]
    return name, made


def random_graphs(count: int, seed: int, only: Sequence[str] = (), first: int = 0) -> Iterator[dict[str, Any]]:
    """A record for each graph, which ONNX Runtime runs as it is written."""
    for number in range(first, first + count):
        for attempt in range(60):
            name, made = drawn(seed, number, only, attempt)
            proto = made.model()
            try:
                wanted, kinds = _reference(proto, made.feeds)
            except Exception:  # not valid in that opset, or not of the types that ONNX Runtime has kernels for
                continue
            ops = " ".join(dict.fromkeys(node.op_type for node in made.nodes))
            record = {"number": number, "attempt": attempt, "kind": name, "opset": made.opset, "operators": ops}
            for output, kind in zip(proto.graph.output, kinds, strict=True):
                output.type.tensor_type.elem_type = kind
            feeds = [made.feeds[item.name] for item in proto.graph.input]
            yield record | judge(proto, feeds, wanted)
            break


def _reference(proto: ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Sequence[Any], list[int]]:
    """What ONNX Runtime computes, and the element types of the outputs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {item.name: feeds[item.name] for item in session.get_inputs()})
    return wanted, [_KINDS[item.type] for item in session.get_outputs()]


_KINDS = {
    f"tensor({name})": TensorProto.DataType.Value(kind) for name, kind in (
        ("float", "FLOAT"), ("float16", "FLOAT16"), ("double", "DOUBLE"), ("bfloat16", "BFLOAT16"), ("bool", "BOOL"),
        *((f"{sign}int{bits}", f"{sign}int{bits}".upper()) for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ the program


def table(found: Sequence[dict[str, Any]], by: str) -> str:
    """How many graphs ended how, by `kind` or by nothing, and what refusals name."""
    lines = [
        f"{len(found)} graphs: "
        + ", ".join(f"{n} {state}" for state, n in Counter(r["state"] for r in found).most_common())
    ]
    for kind in sorted({record.get(by, "") for record in found} - {""}):
        states = Counter(record["state"] for record in found if record.get(by) == kind)
        lines.append(f"    {kind:16s} " + ", ".join(f"{n} {state}" for state, n in states.most_common()))
    for item in found:
        if item["state"] in ("wrong", "crash"):
            where = f"{item.get('name', item.get('number'))} {item.get('operators', '')} opset {item.get('opset', '')}"
            lines.append(f"{item['state']:6s} {where}: {item['why']}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], choices=GENERATORS)
    parser.add_argument("--show", type=int)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("-o", type=Path, metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.show is not None:
        _, made = drawn(given.seed, given.show, given.only, given.attempt)
        print(onnx.printer.to_text(made.model()))
        return 0
    found = list(node_tests()) if given.nodes else list(random_graphs(given.count, given.seed, given.only))
    if given.o:
        header = {
            "schema": "trt-engine/importer-fuzz", "onnx": onnx.__version__, "onnxruntime": ort.__version__,
            "torch": torch.__version__, "trt_engine": te.__version__, "command": " ".join(["python", *sys.argv]),
        }  # fmt: skip
        with given.o.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in (header, *found))
    print(table(found, "kind"))
    return int(any(record["state"] in ("wrong", "crash") for record in found))


if __name__ == "__main__":
    sys.exit(main())
