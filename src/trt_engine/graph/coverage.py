"""Who runs which operator: TensorRT's ONNX parser by its published list, ONNX Runtime's CPU provider by the kernels of the
installed build, its CUDA provider by its published list.

The lists are data files beside this module; each says its source and version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.environment import version_of
from trt_engine.errors import UsageError
from trt_engine.graph import operators, walk
from trt_engine.graph.trace import Step, Trace, attributes, flatten, schema_of
from trt_engine.records import OperatorSupport

__all__ = [
    "Gap",
    "element_name",
    "gaps",
    "given_of",
    "newest_tensorrt",
    "support",
    "tensorrt_opsets",
    "tensorrt_version",
]

Where = Literal["tensorrt", "cpu", "cuda"]
Kind = Literal["missing", "limited", "type", "newer", "plugin"]


@dataclass(frozen=True, slots=True)
class Gap:
    """One node that a target does not run, or not as it stands."""

    where: Where
    kind: Kind
    node: NodeProto
    why: str


# ------------------------------------------------------------------------------------------------ TensorRT


@dataclass(frozen=True, slots=True)
class _Parser:
    """What TensorRT's ONNX parser takes, by its published list."""

    types: dict[str, frozenset[str]]
    """Element types by operator; empty where the list does not say."""
    unsupported: frozenset[str]
    since: dict[str, tuple[int, int]]
    limits: dict[str, str]
    opsets: tuple[tuple[tuple[int, int], int, int], ...]
    """(TensorRT, lowest opset, highest opset), oldest first."""
    newest: str
    source: str


@cache
def _parser() -> _Parser:
    found = json.loads(Path(__file__).with_name("tensorrt_operators.json").read_text(encoding="utf-8"))
    return _Parser(
        types={op: frozenset(types.split()) for types, ops in found["types"].items() for op in ops.split()},
        unsupported=frozenset(found["unsupported"].split()),
        since={op: _number(text) for op, text in found["since"].items()},
        limits=found["limits"],
        opsets=tuple((_number(release), low, high) for release, (low, high) in found["opsets"].items()),
        newest=found["newest"],
        source=f"{found['source']['name']} ({found['source']['version']}), {found['source']['and']}",
    )


def newest_tensorrt() -> str:
    """The newest release the list knows."""
    return _parser().newest


def tensorrt_version(asked: str | None = None) -> str:
    """The release to judge for: as asked, else the installed one, else the newest the list knows."""
    text = (
        asked
        or version_of("tensorrt")
        or version_of("tensorrt-cu13")
        or version_of("tensorrt-cu12")
        or newest_tensorrt()
    )
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None or int(match[1]) < 10:
        raise UsageError(
            f"cannot judge for TensorRT `{text}`, expected 10.0 or newer", hint="`--tensorrt 10.16`, or leave it out"
        )
    return f"{match[1]}.{match[2]}"


def tensorrt_opsets(version: str) -> tuple[int, int]:
    """The lowest and the highest opset this release's parser takes."""
    low, high = 9, 20
    for release, first, last in _parser().opsets:
        if release <= _number(version):
            low, high = first, last
    return low, high


def _number(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


_TRT_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
    TensorProto.INT8: "INT8",
    TensorProto.FLOAT8E4M3FN: "FP8",
    TensorProto.FLOAT4E2M1: "FP4",
    TensorProto.INT4: "INT4",
}
_NAMES: dict[int, str] = {value: name.lower() for name, value in TensorProto.DataType.items() if name != "UNDEFINED"}
_NARROWED: tuple[int, ...] = (TensorProto.DOUBLE,)
"""Types the parser turns into another: FP64 becomes FP32."""


def _tensorrt(step: Step, version: tuple[int, int]) -> Iterator[Gap]:
    node, op, parser = step.node, step.node.op_type, _parser()
    if walk.domain_of(node):
        return
    if operators.is_trt_only(node):
        return
    if op in parser.unsupported or op not in parser.types:
        yield Gap("tensorrt", "missing", node, parser.limits.get(op, "TensorRT's ONNX parser does not have it"))
        return
    since = parser.since.get(op)
    if since is not None and version < since:
        yield Gap("tensorrt", "newer", node, f"TensorRT's ONNX parser has it from {since[0]}.{since[1]} on")
        return
    broken = _LIMITS.get(op)
    if broken is not None and not step.folded and (why := broken(step, version)):
        yield Gap(
            "tensorrt", "limited", node, f"{why}; TensorRT's rule: {parser.limits.get(op, '')}".removesuffix(": ")
        )
        return
    if step.folded or op in ("Shape", "Size", "Constant", "QuantizeLinear", "DequantizeLinear", "Cast", "CastLike"):
        return
    first = next((item for item in step.inputs if item is not None), None)
    name = _TRT_TYPES.get(first.elem) if first is not None else None
    listed = parser.types[op]
    if first is None or not first.elem or not listed or name in listed or first.elem in _NARROWED:
        return
    yield Gap("tensorrt", "type", node, f"TensorRT's list has it for {', '.join(sorted(listed))}, here it reads "
                                        f"{element_name(first.elem)}")  # fmt: skip


def _constant(step: Step, at: int) -> bool:
    """True when the input is not given or is a constant of the model."""
    item = step.inputs[at] if at < len(step.inputs) else None
    return item is None or item.stored


def _given(step: Step, at: int) -> bool:
    return at < len(step.node.input) and bool(step.node.input[at])


def _made(step: Step, at: int) -> bool:
    return at < len(step.node.output) and bool(step.node.output[at])


_KINDS: dict[str, type] = {
    "dilations": list, "activations": list, "perm": list, "axis": int, "sorted": int, "antialias": int, "layout": int,
    "input_forget": int, "softcap": float, "mode": bytes, "keep_aspect_ratio_policy": bytes, "reduction": bytes,
    "coordinate_transformation_mode": bytes, "direction": bytes, "equation": bytes,
}  # fmt: skip


def given_of(node: NodeProto) -> dict[str, Any]:
    """The node's attributes that are of the kind their name stands for: in a damaged file they may be of any."""
    found = {name: value if isinstance(value, int | float | bytes) else list(value) if isinstance(value, Sequence) else None
             for name, value in attributes(node).items()}  # fmt: skip
    return {name: value for name, value in found.items() if isinstance(value, _KINDS.get(name, ()))}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _dilated(step: Step) -> str:
    given = given_of(step.node)
    dilations = list(given.get("dilations", ()))
    if any(item != 1 for item in dilations):
        return f"its dilations are {dilations}"
    data = step.inputs[0] if step.inputs else None
    if step.node.op_type != "LpPool" and data is not None and data.shape is not None and len(data.shape) not in (4, 5):
        return f"its input has {len(data.shape)} dimensions"
    return ""


def _max_pool(step: Step, _: tuple[int, int]) -> str:
    return "it also gives the indices" if _made(step, 1) else _dilated(step)


def _axes_constant(at: int) -> Callable[[Step, tuple[int, int]], str]:
    return lambda step, _: "" if _constant(step, at) else f"`{step.node.input[at]}` is worked out at run time"


def _squeeze(step: Step, version: tuple[int, int]) -> str:
    if not _given(step, 1) and "axes" not in given_of(step.node) and version < (11, 5):
        return "it names no axes"
    if _given(step, 1) and step.inputs[1] is not None and step.inputs[1].value is None:
        return f"`{step.node.input[1]}` is worked out at run time"
    return ""


def _attention(step: Step, _: tuple[int, int]) -> str:
    ranks = [len(item.shape) for item in step.inputs[:4] if item is not None and item.shape is not None]
    if any(rank != 4 for rank in ranks):
        return f"its inputs have {sorted(set(ranks))} dimensions"
    if any(_given(step, at) for at in (4, 5, 6)):
        return "it takes past keys or lengths"
    if any(_made(step, at) for at in (1, 2, 3)):
        return "it gives present keys or the intermediate product"
    given = given_of(step.node)
    return "it has a softcap" if given.get("softcap") else ""


def _resize(step: Step, _: tuple[int, int]) -> str:
    given = given_of(step.node)
    mode = _text(given.get("mode", b"nearest"))
    if mode not in ("nearest", "linear"):
        return f"its mode is {mode}"
    if given.get("antialias"):
        return "it asks for antialiasing"
    policy = _text(given.get("keep_aspect_ratio_policy", b"stretch"))
    if policy != "stretch":
        return f"its aspect ratio policy is {policy}"
    way = _text(given.get("coordinate_transformation_mode", b"half_pixel"))
    taken = ("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners")
    return f"its coordinates are {way}" if way not in taken else ""


def _top_k(step: Step, _: tuple[int, int]) -> str:
    if given_of(step.node).get("sorted", 1) != 1:
        return "it is not sorted"
    count = step.inputs[1] if len(step.inputs) > 1 else None
    if count is not None and count.value is not None and count.value.size and int(count.value.reshape(-1)[0]) >= 3840:
        return f"its K is {int(count.value.reshape(-1)[0])}"
    return ""


def _scatter(step: Step, _: tuple[int, int]) -> str:
    how = _text(given_of(step.node).get("reduction", b"none"))
    return f"its reduction is {how}" if how != "none" else ""


def _recurrent(step: Step, _: tuple[int, int]) -> str:
    given = given_of(step.node)
    if step.node.op_type == "LSTM" and given.get("input_forget"):
        return "it couples input and forget gate (input_forget)"
    if step.node.op_type == "LSTM" and given.get("layout"):
        return "its layout is 1"
    names = [_text(item) for item in given.get("activations", ())]
    half = len(names) // 2
    if _text(given.get("direction", b"forward")) == "bidirectional" and names[:half] != names[half:]:
        return "its two directions have other activations"
    return ""


def _grid(step: Step, version: tuple[int, int]) -> str:
    data = step.inputs[0] if step.inputs else None
    deep = data is not None and data.shape is not None and len(data.shape) != 4
    return f"its input has {len(data.shape or ())} dimensions" if deep and data and version < (11, 2) else ""


def _first_output(step: Step, _: tuple[int, int]) -> str:
    return "it gives more than its first output" if any(_made(step, at) for at in (1, 2)) else ""


def _zero_point(step: Step, _: tuple[int, int]) -> str:
    zero = step.inputs[2] if len(step.inputs) > 2 else None
    if zero is None or zero.value is None:
        return ""
    return "its zero point is not 0" if np.any(np.asarray(zero.value).astype(np.float32) != 0) else ""


def _einsum(step: Step, version: tuple[int, int]) -> str:
    text = _text(given_of(step.node).get("equation", b""))
    left = text.partition("->")[0].split(",")
    if version < (10, 12) and ("..." in text or any(len(set(part)) < len(part) for part in left)):
        return f"its equation is `{text}`"
    return ""


def _plain_constant(step: Step, _: tuple[int, int]) -> str:
    odd = {"sparse_value", "value_string", "value_strings"} & {item.name for item in step.node.attribute}
    return f"it has {sorted(odd)[0]}" if odd else ""


def _sized(step: Step, _: tuple[int, int]) -> str:
    data = step.inputs[0] if step.inputs else None
    return "the sizes of its input are not known" if data is not None and not data.sized else ""


def _dropout(step: Step, _: tuple[int, int]) -> str:
    mode = step.inputs[2] if len(step.inputs) > 2 else None
    if mode is None:
        return ""
    return "it is in training mode, or may be" if mode.value is None or np.any(mode.value) else ""


def _tensor_scatter(step: Step, _: tuple[int, int]) -> str:
    axis = given_of(step.node).get("axis", -2)
    rank = next((len(item.shape) for item in step.inputs if item is not None and item.shape is not None), 4)
    return f"its axis is {axis}, its rank {rank}" if rank != 4 or axis not in (-2, 2) else ""


_LIMITS: dict[str, Callable[[Step, tuple[int, int]], str]] = {
    "Attention": _attention,
    "AveragePool": lambda step, _: _dilated(step),
    "Constant": _plain_constant,
    "CumSum": _axes_constant(1),
    "DequantizeLinear": _zero_point,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "EyeLike": _sized,
    "GRU": _recurrent,
    "GridSample": _grid,
    "LSTM": _recurrent,
    "LayerNormalization": _first_output,
    "LpPool": lambda step, _: _dilated(step),
    "MaxPool": _max_pool,
    "OneHot": _axes_constant(1),
    "QuantizeLinear": _zero_point,
    "RNN": _recurrent,
    "Resize": _resize,
    "ScatterND": _scatter,
    "Squeeze": _squeeze,
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
    "Unsqueeze": _axes_constant(1),
} | {
    f"Reduce{name}": _axes_constant(1)
    for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ ONNX Runtime


@cache
def _kernels() -> Mapping[tuple[str, str], tuple[tuple[int, int, Mapping[str, Sequence[str]]], ...]]:
    """(first version, last version, types by constraint) of the installed CPU provider, by (domain, operator); empty where
    the build does not say."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        listed = state.get_all_opkernel_def()
    except (ImportError, AttributeError):  # not installed, hollow, or a build without the list
        return {}
    found: dict[tuple[str, str], list[tuple[int, int, Mapping[str, Sequence[str]]]]] = {}
    for item in listed:
        if item.provider != "CPUExecutionProvider":
            continue
        key = ("" if item.domain in walk.DEFAULT_DOMAINS else item.domain, item.op_name)
        low, high = item.version_range
        found.setdefault(key, []).append((int(low), int(high), dict(item.type_constraints)))
    return {key: tuple(items) for key, items in found.items()}


@cache
def _cuda() -> Mapping[str, str]:
    """Letters of the types by operator of the default domain, as the data file's legend has them."""
    found = json.loads(Path(__file__).with_name("onnxruntime_cuda_operators.json").read_text(encoding="utf-8"))
    return {op: letters for letters, ops in found["types"].items() for op in ops.split()}


def element_name(elem: int) -> str:
    """The element type as ONNX's schemas spell it, its number where nobody knows it."""
    return _NAMES.get(elem, f"type {elem}")


def _spelled(elem: int) -> str:
    return f"tensor({element_name(elem)})"


def _cpu(step: Step, opsets: Mapping[str, int]) -> Iterator[Gap]:
    node, domain = step.node, walk.domain_of(step.node)
    known = _kernels()
    if not known or operators.is_trt_only(node):
        return
    schema = schema_of(node.op_type, domain, opsets.get(domain, 1))
    found = known.get((domain, node.op_type), ())
    since = schema.since_version if schema is not None else opsets.get(domain, 1)
    fitting = [types for low, high, types in found if low <= since <= high]
    bound = _bound(step, schema) if schema is not None else {}
    widened = {
        name: "tensor(float)" if kind == _spelled(TensorProto.FLOAT16) else kind for name, kind in bound.items()
    }  # FP16 without a kernel is computed in FP32 between two casts
    if any(_allowed(types, bound) or _allowed(types, widened) for types in fitting):
        return
    if (schema is None and not found) or _runs(step, domain, opsets):
        return  # `unknown-operator` says the first; the second is written out in other operators
    if not fitting:
        yield Gap("cpu", "missing", node, "ONNX Runtime's CPU provider has no kernel for it")
        return
    shown = ", ".join(sorted({kind.removeprefix("tensor(").removesuffix(")") for kind in bound.values()}))
    yield Gap("cpu", "type", node, f"ONNX Runtime's CPU provider has no kernel of it for {shown}")


_asked: dict[tuple[Any, ...], bool] = {}


def _runs(step: Step, domain: str, opsets: Mapping[str, int]) -> bool:
    """Whether ONNX Runtime loads the node by itself: some operators without a kernel are written out in others."""
    import onnxruntime

    node = step.node
    facts = [(name, fact) for name, fact in zip(node.input, step.inputs, strict=False) if name and fact is not None]
    key = (node.op_type, domain, opsets.get(domain, 1), node.SerializeToString(deterministic=True),
           tuple(fact.elem for _, fact in facts))  # fmt: skip
    if key in _asked:
        return _asked[key]
    outside = any(item.t.data_location == TensorProto.EXTERNAL for item in node.attribute if item.HasField("t"))
    if step.inside or outside or any(not fact.elem for _, fact in facts):
        return True  # nothing to ask with
    value = onnx.helper.make_tensor_value_info
    stored = {name: fact.value for name, fact in facts if fact.stored and fact.value is not None}
    asked = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node],
            "asked",
            [value(name, fact.elem, [None if size < 0 else size for size in fact.shape] if fact.shape is not None else None)
             for name, fact in dict(facts).items() if name not in stored],
            [value(name, fact.elem, None) for name, fact in zip(node.output, step.outputs, strict=False) if name],
            [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid(name, version) for name, version in opsets.items()],
        ir_version=10,
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(asked.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no other base
        _asked[key] = "NOT_IMPLEMENTED" not in str(error)  # another complaint is another finding's
    else:
        _asked[key] = True
    return _asked[key]


def _bound(step: Step, schema: Any) -> dict[str, str]:
    """The element types by the schema's type names, for the inputs and outputs whose type is known."""
    bound: dict[str, str] = {}
    for formals, facts in ((schema.inputs, step.inputs), (schema.outputs, step.outputs)):
        for at, fact in enumerate(facts):
            formal = formals[min(at, len(formals) - 1)] if formals else None
            if formal is None or fact is None or not fact.elem or fact.other is not None:
                continue
            bound.setdefault(formal.type_str, _spelled(fact.elem))
            bound.setdefault(formal.name, _spelled(fact.elem))
    return bound


def _allowed(types: Mapping[str, Sequence[str]], bound: Mapping[str, str]) -> bool:
    return all(name not in bound or bound[name] in kinds for name, kinds in types.items())


_LETTERS: dict[int, str] = {
    TensorProto.FLOAT: "f", TensorProto.FLOAT16: "h", TensorProto.BFLOAT16: "b", TensorProto.DOUBLE: "d",
}  # fmt: skip


def _on_cuda(step: Step) -> Iterator[Gap]:
    node = step.node
    if walk.domain_of(node) or step.folded or operators.is_trt_only(node):
        return  # ONNX Runtime's own domains are for its optimisers to say
    letters = _cuda().get(node.op_type)
    if letters is None:
        schema = schema_of(node.op_type, "", onnx.defs.onnx_opset_version())
        if schema is None or not schema.has_function:
            yield Gap("cuda", "missing", node, "ONNX Runtime's CUDA provider has no kernel for it: it runs on the CPU")
        return
    elem = next((item.elem for item in step.inputs if item is not None and item.elem in _LETTERS), 0)
    if letters and elem and _LETTERS[elem] not in letters:
        yield Gap("cuda", "type", node, f"ONNX Runtime's CUDA provider has no kernel of it for {_NAMES[elem]}")


# ------------------------------------------------------------------------------------------------ the whole model


def gaps(proto: ModelProto, traced: Trace, version: str) -> list[Gap]:
    """Every node that TensorRT's parser of this version, ONNX Runtime's CPU or its CUDA provider does not run as it
    stands; a local function of the model counts by what it is made of."""
    opsets, release = walk.opsets_of(proto), _number(version)
    local = {(item.domain, item.name) for item in proto.functions}
    found: list[Gap] = []
    for step in flatten(traced.steps):
        if (step.node.domain, step.node.op_type) in local:
            continue
        found += _tensorrt(step, release)
        found += _cpu(step, opsets)
        found += _on_cuda(step)
    return found


def support(traced: Trace, found: Sequence[Gap]) -> tuple[OperatorSupport, ...]:
    """One row for each operator of the traced graph, the most frequent first."""
    counts: dict[str, int] = {}
    only: dict[str, bool] = {}
    for step in flatten(traced.steps):
        name = _named(step.node)
        counts[name] = counts.get(name, 0) + 1
        only[name] = operators.is_trt_only(step.node)
    said: dict[tuple[str, str], Gap] = {}
    rank = {"missing": 0, "newer": 1, "limited": 2, "type": 3, "plugin": 4}
    for gap in found:
        key = (_named(gap.node), gap.where)
        if key not in said or rank[gap.kind] < rank[said[key].kind]:
            said[key] = gap
    rows = []
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        foreign = "::" in name
        verdicts = {where: _verdict(said.get((name, where))) for where in ("tensorrt", "cpu", "cuda")}
        if only[name]:
            verdicts = {"tensorrt": "plugin", "cpu": "no", "cuda": "no"}
        elif foreign:
            verdicts |= {
                "tensorrt": "no" if name.startswith(("com.microsoft", "com.ms")) else "plugin",
                "cuda": "unknown",
            }
        if not only[name] and not _kernels():
            verdicts["cpu"] = "unknown"
        notes = dict.fromkeys(gap.why for gap in (said.get((name, w)) for w in ("tensorrt", "cpu", "cuda")) if gap)
        rows.append(OperatorSupport(name, count, **verdicts, note="; ".join(notes) or None))  # type: ignore[arg-type]
    return tuple(rows)


def _verdict(gap: Gap | None) -> str:
    return "yes" if gap is None else "no" if gap.kind in ("missing", "newer") else "limited"


def _named(node: NodeProto) -> str:
    domain = walk.domain_of(node)
    return f"{domain}::{node.op_type}" if domain else node.op_type
