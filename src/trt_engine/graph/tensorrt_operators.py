"""Operator support of TensorRT's ONNX parser: its published list, and rules about attributes, types and shapes.

The list is `tensorrt_operators.json` beside this module, with its sources. `benchmarks/parser_agreement.py` compares
both with TensorRT-RTX's parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.environment import distribution_version
from trt_engine.errors import UsageError
from trt_engine.graph import operators, walk
from trt_engine.graph.shape_inference import (
    TracedNode,
    declared_shape,
    decode_text,
    dtype_name,
    has_input,
    has_output,
    input_of,
    shape_of,
    typed_attributes,
)
from trt_engine.tensors import format_shape

SupportTarget = Literal["tensorrt", "cpu", "cuda"]
SupportStatus = Literal["missing", "limited", "type", "newer", "kernel", "plugin"]


@dataclass(frozen=True, slots=True)
class UnsupportedNode:
    """A node that a target does not run unmodified."""

    target: SupportTarget
    kind: SupportStatus
    node: NodeProto
    reason: str
    confirmed: bool = False
    """True if the target's own parser rejected it, False for a list or a rule."""


# ------------------------------------------------------------------------------------------------ the published list


@dataclass(frozen=True, slots=True)
class _OperatorList:
    """Contents of `tensorrt_operators.json`."""

    types: dict[str, frozenset[str]]
    """Element types by operator; empty if not listed."""
    types_since: tuple[tuple[tuple[int, int], str, frozenset[str]], ...]
    """(TensorRT, element type, operators): additions of a release to `types`."""
    unsupported: frozenset[str]
    since: dict[str, tuple[int, int]]
    limits: dict[str, str]
    opsets: tuple[tuple[tuple[int, int], int, int], ...]
    """(TensorRT, lowest opset, highest opset), oldest first."""
    newest: str


@cache
def _load_operator_list() -> _OperatorList:
    found = json.loads(Path(__file__).with_name("tensorrt_operators.json").read_text(encoding="utf-8"))
    return _OperatorList(
        types={op: frozenset(types.split()) for types, ops in found["types"].items() for op in ops.split()},
        types_since=tuple(
            (_number(release), name, frozenset(ops.split()))
            for release, more in found["types_since"].items()
            for name, ops in more.items()
        ),
        unsupported=frozenset(found["unsupported"].split()),
        since={op: _number(text) for op, text in found["since"].items()},
        limits=found["limits"],
        opsets=tuple((_number(release), low, high) for release, (low, high) in found["opsets"].items()),
        newest=found["newest"],
    )


def is_unsupported(op: str) -> bool:
    """True for a standard operator that no release's parser has."""
    return op in _load_operator_list().unsupported


@cache
def _types_of(op: str, release: tuple[int, int]) -> frozenset[str]:
    """Element types a release supports for an operator; empty if not listed."""
    listed = _load_operator_list()
    types = listed.types[op]
    more = {name for since, name, ops in listed.types_since if since <= release and op in ops}
    return types | more if types else types


def tensorrt_version(requested: str | None = None) -> str:
    """The release to check against: requested, else installed, else the newest in the list.

    Raises `UsageError` for a version before 10.0.
    """
    text = (
        requested
        or distribution_version("tensorrt")
        or distribution_version("tensorrt-cu13")
        or distribution_version("tensorrt-cu12")
        or _load_operator_list().newest
    )
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None or int(match[1]) < 10:
        raise UsageError(
            f"cannot check against TensorRT `{text}`, expected 10.0 or newer",
            hint="`--tensorrt 10.16`, or leave it out",
        )
    return f"{match[1]}.{match[2]}"


def tensorrt_opsets(version: str) -> tuple[int, int]:
    """Lowest and highest opset documented for this release's parser."""
    low, high = 9, 20
    for release, first, last in _load_operator_list().opsets:
        if release <= _number(version):
            low, high = first, last
    return low, high


def _number(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.DOUBLE: "FP32",  # the parser converts FP64
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
    TensorProto.INT8: "INT8",
    TensorProto.FLOAT8E4M3FN: "FP8",
    TensorProto.FLOAT4E2M1: "FP4",
    TensorProto.INT4: "INT4",
}
"""TensorRT's type name by ONNX element type. The parser rejects tensors of any other type."""
_FLOAT16_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


# ------------------------------------------------------------------------------------------------ one model


@dataclass(frozen=True, slots=True)
class _Graph:
    """Graph context of the rules: release, inputs and outputs."""

    release: tuple[int, int]
    rtx: bool
    opset: int
    inputs: frozenset[str]
    outputs: frozenset[str]


_Rule = Callable[[TracedNode, _Graph], str]
"""Reason for a rejection; empty if the node is accepted."""


def tensorrt_unsupported_nodes(
    proto: ModelProto, steps: Sequence[TracedNode], version: str, *, rtx: bool = False
) -> list[UnsupportedNode]:
    """Nodes that the parser or builder of a TensorRT release (with `rtx`: TensorRT-RTX 1.7) rejects."""
    stored = {item.name for item in proto.graph.initializer}
    graph = _Graph(
        _number(version), rtx, walk.opsets_of(proto).get("", 1),
        frozenset(item.name for item in proto.graph.input if item.name not in stored),
        frozenset(item.name for item in proto.graph.output),
    )  # fmt: skip
    return [*_edge_types(proto, graph), *(gap for step in steps for gap in _check_node(step, graph))]


def _edge_types(proto: ModelProto, graph: _Graph) -> Iterator[UnsupportedNode]:
    """Inputs and stored tensors of a type TensorRT lacks, each at its first reader."""
    foreign = {item.name: item.type.tensor_type.elem_type for item in proto.graph.input if item.name in graph.inputs}
    foreign |= {item.name: item.data_type for owner in walk.graphs(proto) for item in owner.initializer}
    foreign = {name: elem for name, elem in foreign.items() if elem and elem not in _TYPES}
    if not foreign:
        return
    nodes = walk.all_nodes(proto)
    for name, elem in foreign.items():
        reader = next((node for node in nodes if name in node.input), nodes[0] if nodes else None)
        if reader is not None:
            what = "input" if name in graph.inputs else "stored tensor"
            yield UnsupportedNode(
                "tensorrt", "type", reader, f"the {what} `{name}` is {dtype_name(elem)}, a type TensorRT lacks"
            )


def _check_node(step: TracedNode, graph: _Graph) -> list[UnsupportedNode]:
    """Why TensorRT rejects a node; empty if it does not."""
    node, op, listed = step.node, step.node.op_type, _load_operator_list()
    if walk.domain_of(node) or operators.is_trt_only(node):
        return []
    kind: SupportStatus = "missing"
    since = listed.since.get(op, (0, 0))
    if op in listed.unsupported or op not in listed.types:
        why = listed.limits.get(op, "TensorRT's ONNX parser does not support it")
    elif graph.rtx and RTX_ABSENT.get(op) == "missing":
        why = "TensorRT-RTX ships no plugin for it (TensorRT does)"
    elif graph.release < since:
        kind, why = "newer", f"TensorRT's ONNX parser supports it from {since[0]}.{since[1]} on"
    elif not step.folded and (why := _LIMITS.get(op, _old_broadcast)(step, graph)):
        kind, why = "limited", f"{why}; TensorRT's rule: {listed.limits[op]}" if op in listed.limits else why
    elif why := _type_reason(step, graph, _types_of(op, graph.release)):
        kind = "type"
    else:
        kind, why = "kernel", missing_kernel(step) if graph.rtx and not step.folded else ""
    return [UnsupportedNode("tensorrt", kind, node, why)] if why else []


_ANY_TYPE = frozenset(
    "Constant ConstantOfShape Shape Size BlackmanWindow HammingWindow HannWindow RandomNormalLike RandomUniformLike".split()
)
"""Operators whose first input may have any TensorRT type, or is a shape."""
_CHECKED_INPUT = {"OneHot": 2, "Where": 1, "CastLike": 0}


def _type_reason(step: TracedNode, graph: _Graph, listed: frozenset[str]) -> str:
    """Why a node's types are rejected: outputs without a TensorRT type, or its first input."""
    op = step.node.op_type
    for name, made in zip(step.node.output, step.outputs, strict=False):
        if name and made.elem and made.non_tensor_type is None and made.elem not in _TYPES:
            return f"its output is {dtype_name(made.elem)}, a type TensorRT lacks"
    if op in ("Cast", "CastLike"):
        narrow = bool(step.outputs) and step.outputs[0].elem == TensorProto.UINT8
        inside = narrow and step.node.output[0] not in graph.outputs
        return (
            "it produces uint8 inside the graph; TensorRT supports uint8 for inputs and outputs only" if inside else ""
        )
    if step.folded or op in _ANY_TYPE or not listed:
        return ""
    at = _CHECKED_INPUT.get(op, next((at for at, item in enumerate(step.inputs) if item is not None), 0))
    first = input_of(step, at)
    if first is None or not first.elem or _TYPES.get(first.elem) in listed:
        return ""
    return f"TensorRT's list supports it for {', '.join(sorted(listed))}, here it reads {dtype_name(first.elem)}"


_BROADCASTING = frozenset(
    "Add And Div Equal Gemm Greater Less Max Mean Min Mul Or PRelu Pow Sub Sum Xor".split()
)  # fmt: skip


def _old_broadcast(step: TracedNode, graph: _Graph) -> str:
    many = sum(item is not None for item in step.inputs) > 1
    return "binary operators are not parsed before opset 7" if graph.opset < 7 and many and (
        step.node.op_type in _BROADCASTING) else ""  # fmt: skip


# ------------------------------------------------------------------------------------------------ rules by operator


def _constant(at: int) -> _Rule:
    """Rule: the input is absent, or a constant of the model."""

    def rule(step: TracedNode, graph: _Graph) -> str:
        item = input_of(step, at)
        open_here = item is not None and not item.is_constant
        return f"`{step.node.input[at]}` is worked out at run time" if open_here else ""

    return rule


def _pool(step: TracedNode, _: _Graph) -> str:
    given = typed_attributes(step.node)
    if has_output(step, 1):
        return "it also gives the indices"
    dilations = list(given.get("dilations", ()))
    if any(item != 1 for item in dilations):
        return f"its dilations are {dilations}"
    if step.node.op_type == "LpPool" and given.get("p", 2) not in (1, 2):
        return f"its p is {given['p']}"
    shape = shape_of(step, 0)
    return f"its input has {len(shape)} dimensions" if shape is not None and not 3 <= len(shape) <= 5 else ""


def _squeeze(step: TracedNode, graph: _Graph) -> str:
    if (
        not has_input(step, 1)
        and "axes" not in typed_attributes(step.node)
        and graph.release < (11, 5)
        and not graph.rtx
    ):
        return "it names no axes"
    axes = input_of(step, 1)
    return f"`{step.node.input[1]}` is worked out at run time" if axes is not None and axes.value is None else ""


def _attention(step: TracedNode, _: _Graph) -> str:
    given = typed_attributes(step.node)
    if any(has_output(step, at) for at in (1, 2, 3)):
        return "it gives present keys or the intermediate product"
    if any(has_input(step, at) for at in (4, 5)):
        return "it takes past keys"
    if given.get("softcap"):
        return "it has a softcap"
    if "softmax_precision" in given:
        return "it sets the precision of its softmax"
    if has_input(step, 3) and given.get("is_causal"):
        return "it has a mask and is_causal as well"
    if has_input(step, 3) and has_input(step, 6):
        return "it has a mask and lengths of the keys (nonpad_kv_seqlen) as well"
    keys, values = shape_of(step, 1), shape_of(step, 2)
    if keys and values and len(keys) == len(values) and -1 < keys[-1] != values[-1] > -1:
        return f"its keys have {keys[-1]} channels, its values {values[-1]}"
    return ""


_COORDINATES = ("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners",
                "half_pixel_symmetric")  # fmt: skip


def _resize(step: TracedNode, graph: _Graph) -> str:
    given = typed_attributes(step.node)
    mode = decode_text(given.get("mode", b"nearest"))
    if mode not in ("nearest", "linear", "cubic"):
        return f"its mode is {mode}"
    if given.get("antialias"):
        return "it uses antialiasing"
    policy = decode_text(given.get("keep_aspect_ratio_policy", b"stretch"))
    if policy != "stretch":
        return f"its aspect ratio policy is {policy}"
    way = decode_text(given.get("coordinate_transformation_mode", b"half_pixel"))
    if way not in _COORDINATES:
        return f"its coordinates are {way}"
    at = 1 if step.node.op_type == "Upsample" or graph.opset < 11 else 2
    scales = input_of(step, at)
    if scales is None or not has_input(step, at):
        return ""
    if step.node.input[at] in graph.inputs:
        return f"its scales `{step.node.input[at]}` are an input of the graph, in floating point"
    axes, rank = given.get("axes"), len(shape_of(step, 0) or ())
    if axes is not None and rank and [axis % rank for axis in axes] != list(range(rank)):
        return f"its scales are for the axes {axes} only"
    return ""


def _top_k(step: TracedNode, _: _Graph) -> str:
    count = input_of(step, 1)
    if count is not None and count.value is not None and count.value.size and int(count.value.reshape(-1)[0]) > 3840:
        return f"its K is {int(count.value.reshape(-1)[0])}"
    return ""


def _scatter(step: TracedNode, _: _Graph) -> str:
    how = decode_text(typed_attributes(step.node).get("reduction", b"none"))
    return f"its reduction is {how}" if how != "none" else ""


def _recurrent(step: TracedNode, _: _Graph) -> str:
    given = typed_attributes(step.node)
    if step.node.op_type == "LSTM" and given.get("input_forget"):
        return "it couples input and forget gate (input_forget)"
    names = [decode_text(item) for item in given.get("activations", ())]
    half = len(names) // 2
    if decode_text(given.get("direction", b"forward")) == "bidirectional" and names[:half] != names[half:]:
        return "its two directions have different activations"
    return ""


def _grid(step: TracedNode, graph: _Graph) -> str:
    shape = shape_of(step, 0)
    deep = shape is not None and len(shape) != 4
    return f"its input has {len(shape or ())} dimensions" if deep and graph.release < (11, 2) else ""


def _zero_point(step: TracedNode, _: _Graph) -> str:
    data, zero = input_of(step, 0), input_of(step, 2)
    if data is not None and data.elem in (TensorProto.INT4, TensorProto.FLOAT4E2M1) and data.num_elements % 2:
        return f"its {data.num_elements} elements of 4 bits are an odd number"
    if zero is None or zero.value is None:
        return ""
    return "its zero point is not 0" if np.any(np.asarray(zero.value).astype(np.float32) != 0) else ""


def _einsum(step: TracedNode, graph: _Graph) -> str:
    text = decode_text(typed_attributes(step.node).get("equation", b""))
    left = text.partition("->")[0].split(",")
    if graph.release < (10, 12) and ("..." in text or any(len(set(part)) < len(part) for part in left)):
        return f"its equation is `{text}`"
    return ""


def _plain_constant(step: TracedNode, _: _Graph) -> str:
    odd = {"sparse_value", "value_string", "value_strings"} & {item.name for item in step.node.attribute}
    return f"it has {sorted(odd)[0]}" if odd else ""


def _dropout(step: TracedNode, _: _Graph) -> str:
    mode = input_of(step, 2)
    if mode is None:
        return ""
    certain = mode.is_constant and mode.value is not None and not np.any(mode.value)
    return "" if certain else "it is in training mode, or may be"


def _tensor_scatter(step: TracedNode, _: _Graph) -> str:
    given = typed_attributes(step.node)
    axis, mode = given.get("axis", -2), decode_text(given.get("mode", b"linear"))
    rank = next((len(item.shape) for item in step.inputs if item is not None and item.shape is not None), 4)
    if mode != "linear":
        return f"its mode is {mode}"
    return f"its axis is {axis}, its rank {rank}" if rank != 4 or axis not in (-2, 2) else ""


def _mat_mul(step: TracedNode, _: _Graph) -> str:
    left, right = shape_of(step, 0), shape_of(step, 1)
    if left is not None and right is not None and len(left) == 1 and len(right) > 2:
        return f"it multiplies a vector by {len(right)} dimensions"
    return ""


def _mod(step: TracedNode, _: _Graph) -> str:
    data = input_of(step, 0)
    decimal = data is not None and data.elem in (TensorProto.FLOAT, TensorProto.DOUBLE, *_FLOAT16_TYPES)
    wrong = decimal and not typed_attributes(step.node).get("fmod")
    return "fmod is 0 and its inputs are not integers" if wrong else ""


def _celu(step: TracedNode, graph: _Graph) -> str:
    data = input_of(step, 0)
    half = data is not None and data.elem in _FLOAT16_TYPES and graph.release >= (11, 0)
    return "it computes in 16 bits, which the parser's own constants do not fit" if half else ""


def _range(step: TracedNode, graph: _Graph) -> str:
    fed = next((name for name in step.node.input if name in graph.inputs), None)
    data = input_of(step, 0)
    return f"`{fed}` is an input of the graph in floating point" if fed and data is not None and (
        data.elem == TensorProto.FLOAT) else ""  # fmt: skip


def _split(step: TracedNode, _: _Graph) -> str:
    given, shape = typed_attributes(step.node), shape_of(step, 0)
    parts, axis = given.get("num_outputs", 0), given.get("axis", 0)
    if parts < 1 or not shape or not -len(shape) <= axis < len(shape) or shape[axis] < 0:
        return ""
    last = shape[axis] - -(-shape[axis] // parts) * (parts - 1)
    return f"{parts} parts of {shape[axis]} leave {last} for the last" if last < 0 else ""


def _if(step: TracedNode, graph: _Graph) -> str:
    """Branches of other shapes: releases up to 10 refuse them (public logs from 8.2 to 10.13), TensorRT-RTX 1.7 does not."""
    if graph.rtx or graph.release >= (11, 0):
        return ""
    taken = [{name: fact for inner in body for name, fact in zip(inner.node.output, inner.outputs, strict=False)}
             for body in step.bodies]  # fmt: skip
    sides = []
    for _, branch in walk.bodies(step.node):
        made = next((facts for facts in taken if any(item.name in facts for item in branch.output)), {})
        stated = [declared_shape(item.type.tensor_type) for item in branch.output]
        sides.append([made[item.name].shape if item.name in made else shape
                      for item, shape in zip(branch.output, stated, strict=True)])  # fmt: skip
    for name, one, two in zip(step.node.output, *sides, strict=False) if len(sides) == 2 else ():
        if one is not None and two is not None and (
            len(one) != len(two) or any(a != b and a >= 0 and b >= 0 for a, b in zip(one, two, strict=True))
        ):  # fmt: skip
            return (
                f"its branches give `{name}` as {format_shape(one)} and {format_shape(two)}, which TensorRT 11 allows"
            )
    return ""


_LIMITS: dict[str, _Rule] = {
    "If": _if,
    "Attention": _attention,
    "AveragePool": _pool,
    "BatchNormalization": lambda step, _: (
        "it is in training mode" if typed_attributes(step.node).get("training_mode") else ""
    ),
    "Celu": _celu,
    "Constant": _plain_constant,
    "DequantizeLinear": _zero_point,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "EyeLike": lambda step, _: (
        "the sizes of its input are unknown" if (data := input_of(step, 0)) is not None and not data.is_static else ""
    ),
    "GRU": _recurrent,
    "GridSample": _grid,
    "LSTM": _recurrent,
    "LayerNormalization": lambda step, _: (
        "it gives more than its first output" if has_output(step, 1) or has_output(step, 2) else ""
    ),
    "LpPool": _pool,
    "MatMul": _mat_mul,
    "MaxPool": _pool,
    "Mod": _mod,
    "OneHot": _constant(1),
    "QuantizeLinear": _zero_point,
    "RNN": _recurrent,
    **dict.fromkeys(
        ("RandomNormalLike", "RandomUniformLike"),
        lambda step, _: "it makes FP64" if step.outputs and step.outputs[0].elem == TensorProto.DOUBLE else "",
    ),
    "Range": _range,
    "Resize": _resize,
    "STFT": lambda step, graph: next(filter(None, (_constant(at)(step, graph) for at in (1, 2, 3))), ""),
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Split": _split,
    "Squeeze": _squeeze,
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
    "Unsqueeze": _constant(1),
    "Upsample": _resize,
} | {
    f"Reduce{name}": _constant(1)
    for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()
}  # fmt: skip
RTX_RELEASE = "11.4"
"""TensorRT release whose parser TensorRT-RTX 1.7 has. Source: its API, compared with 11.0 to 11.5."""
RTX_ABSENT: Mapping[str, str] = {
    "DFT": "missing",
    "DeformConv": "missing",
    "NonMaxSuppression": "kernel",
    "NonZero": "missing",
    "RoiAlign": "missing",
}
"""Operators that TensorRT runs and TensorRT-RTX 1.7 does not: no plugin (`missing`), or no kernel."""
_NARROW = (TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1)


def missing_kernel(step: TracedNode) -> str:
    """Why the builder has no kernel for a node that the parser accepts; empty if it has, or if unknown."""
    rule = _KERNELS.get(step.node.op_type)
    return rule(step) if rule is not None else ""


def _cast_kernel(step: TracedNode) -> str:
    data, made = input_of(step, 0), step.outputs[0].elem if step.outputs else 0
    narrow = next((elem for elem in (made, data.elem if data is not None else 0) if elem in _NARROW), 0)
    return f"TensorRT-RTX's builder converts {dtype_name(narrow)} in Q/DQ pairs only" if narrow else ""


def _attention_kernel(step: TracedNode) -> str:
    """Measured with TensorRT-RTX 1.7.1 for 8.9: FP16 and BF16 with 12 to 256 channels per head build."""
    given, queries = typed_attributes(step.node), input_of(step, 0)
    if queries is None or not queries.shape:
        return ""
    shape, heads = queries.shape, given.get("q_num_heads", 0)
    plain = len(shape) == 3 and not given.get("is_causal") and not has_input(step, 3)
    if shape[-2] == 1 or (plain and heads == given.get("kv_num_heads")):
        return ""  # decomposed
    if queries.elem not in _FLOAT16_TYPES:
        return f"TensorRT-RTX's builder has kernels for it in FP16 and BF16, here it reads {dtype_name(queries.elem)}"
    channels = shape[-1] // heads if len(shape) == 3 and heads else shape[-1]
    known = channels > 0 and len(shape) in (3, 4)
    return f"TensorRT-RTX's builder has no kernel for {channels} channels per head, only 12 to 256" if known and not (
        12 <= channels <= 256) else ""  # fmt: skip


_KERNELS: dict[str, Callable[[TracedNode], str]] = {
    "Attention": _attention_kernel,
    "Cast": _cast_kernel,
    "CastLike": _cast_kernel,
    "NonMaxSuppression": lambda step: (
        "TensorRT-RTX's parser takes it, its builder has no kernel for it (TensorRT does)"
    ),
}
