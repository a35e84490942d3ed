"""What an engine tells of its layers, read the same way for every TensorRT: names, types, tactics, ONNX nodes; and the
census, the share of the network that each data type computes.

The inspector of TensorRT 10 writes one text for layout and type (`Format/Datatype`: `Half`, or `Channel major FP16 format
where channel % 8 == 0` once shapes are set), that of 11 two keys; TensorRT 8 wrote longer texts. Layers are objects only
where the engine was built with the verbosity `detailed`, plain names otherwise. Nothing here stops at a layer it does not
know. Source: the migration pages of IEngineInspector, TensorRT 11.0 and 11.3, and public inspector outputs.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trt_engine.engine import Share
from trt_engine.errors import EngineError

__all__ = ["UNKNOWN", "LayerInfo", "LayerTensor", "census", "io_tensors", "kinds_of", "read_layers"]

UNKNOWN = "unknown"
"""The census's name for layers whose type the engine does not tell."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """What one layer reads or writes. None is what the engine does not say."""

    name: str
    dtype: str | None = None
    """Our name of the element type: `float16`."""
    dims: tuple[int, ...] | None = None
    format: str | None = None
    """The layout, in TensorRT's words."""


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer of an engine as TensorRT fused it. Names can repeat."""

    name: str
    kind: str = ""
    """TensorRT's word: `CaskConvolution`, `gemm`, `kgen`; empty where only names are told."""
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    constants: tuple[LayerTensor, ...] = ()
    weights: str | None = None
    """The element type of its own weights, where they are told."""
    weight_count: int = 0
    tactic: str | None = None
    """The kernel by name, else by number."""
    stream: int | None = None
    onnx_nodes: tuple[str, ...] = ()
    """The nodes of the ONNX graph it was made of, by their names."""
    reformat: bool = False
    """A change of layout or type that TensorRT put in, or that is all that is left of a Q/DQ node or a Cast."""

    @property
    def detailed(self) -> bool:
        """False where the engine tells the name alone."""
        return bool(self.kind or self.inputs or self.outputs)

    @property
    def moves(self) -> bool:
        """True for a layer that lays out, copies or converts data and computes nothing."""
        return self.reformat or self.kind.lower() in _MOVING or _only_moves(self.name)

    @property
    def matrix(self) -> bool:
        """True for a layer that multiplies matrices, convolutions included."""
        own = self.name if self.name.startswith("_") else ""  # Myelin's names tell operations, others the ONNX nodes
        words = f"{self.kind} {own} {self.tactic or ''}".lower()
        return self.weights is not None or any(word in words for word in _MATRIX)


# ------------------------------------------------------------------------------------------------ reading


def read_layers(document: Mapping[str, Any] | str) -> tuple[LayerInfo, ...]:
    """The layers of an inspector's JSON, in the order they run; `EngineError` for a text that is no such JSON."""
    return tuple(_layer(item) for item in _list(_parsed(document).get("Layers")) if isinstance(item, Mapping | str))


def io_tensors(document: Mapping[str, Any] | str) -> tuple[LayerTensor, ...]:
    """The engine's own inputs and outputs: with types and sizes from TensorRT 11, names with what the layers say before."""
    whole = _parsed(document)
    listed = _list(whole.get("I/O Tensors"))
    if listed:
        return tuple(_tensor(item) for item in listed if isinstance(item, Mapping | str))
    known: dict[str, LayerTensor] = {}
    for layer in read_layers(whole):
        for tensor in (*layer.inputs, *layer.outputs):
            if tensor.name not in known or known[tensor.name].dtype is None:
                known[tensor.name] = tensor
    named = [_tensor(item) for item in _list(whole.get("Bindings")) if isinstance(item, Mapping | str)]
    return tuple(tensor if tensor.dtype else known.get(tensor.name, tensor) for tensor in named)


def _parsed(document: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(document, Mapping):
        return document
    try:
        found = msgspec.json.decode(document.encode())
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise EngineError(
            f"the engine's layer information is no JSON: {error}", hint="export it again: it may have been cut"
        ) from error
    if isinstance(found, list):  # some tools keep the list alone
        return {"Layers": found}
    if not isinstance(found, Mapping):
        raise EngineError(
            "the engine's layer information is no JSON object", hint="expected what an inspector or trtexec wrote"
        )
    return found


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _layer(item: Mapping[str, Any] | str) -> LayerInfo:
    if isinstance(item, str):
        return LayerInfo(_NODE_MARK.sub("", item).strip(_SEPARATORS + " "), onnx_nodes=_nodes(item))
    name, kind = str(item.get("Name") or ""), str(item.get("LayerType") or "")
    weights = item.get("Weights")
    weights = weights if isinstance(weights, Mapping) else {}
    inputs = tuple(_tensor(part) for part in _list(item.get("Inputs")) if isinstance(part, Mapping | str))
    outputs = tuple(_tensor(part) for part in _list(item.get("Outputs")) if isinstance(part, Mapping | str))
    tactic = item.get("TacticName") or item.get("TacticValue")
    stream, count = item.get("StreamId"), weights.get("Count")
    held = _dtype(weights.get("Type")) if count != 0 else None
    return LayerInfo(
        name=name,
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        constants=tuple(_tensor(part) for part in _list(item.get("Constants")) if isinstance(part, Mapping | str)),
        weights=held,
        weight_count=count if isinstance(count, int) and held else 0,
        tactic=str(tactic) if tactic is not None else None,
        stream=stream if isinstance(stream, int) and not isinstance(stream, bool) else None,
        onnx_nodes=_nodes(str(item.get("Metadata") or "")) or _nodes(name),
        reformat=kind.lower() in _REFORMATS
        or str(item.get("ParameterType") or "").lower() in _REFORMATS
        or name.startswith("Reformatting CopyNode"),
    )


def _tensor(item: Mapping[str, Any] | str) -> LayerTensor:
    if isinstance(item, str):
        return LayerTensor(item)
    together = item.get("Format/Datatype")
    kind = item.get("DataType") or item.get("Datatype") or together
    dims = item.get("Dimensions")
    layout = item.get("Format") or together
    return LayerTensor(
        name=str(item.get("Name") or ""),
        dtype=_dtype(kind),
        dims=tuple(dims) if isinstance(dims, list) and all(isinstance(size, int) for size in dims) else None,
        format=_layout(layout),
    )


_DTYPES = (
    ("bfloat16", r"bf16|bfloat16"),
    ("float16", r"fp16|half|float16"),
    ("float8_e8m0fnu", r"e8m0"),
    ("float8_e5m2", r"e5m2"),
    ("float8_e4m3fn", r"fp8|float8|e4m3"),
    ("float4_e2m1fn", r"fp4|float4|e2m1"),
    ("float64", r"fp64|double|float64"),
    ("float32", r"fp32|float32|float"),
    ("uint8", r"uint8"),
    ("int4", r"int4"),
    ("int8", r"int8"),
    ("int32", r"int32"),
    ("int64", r"int64"),
    ("bool", r"bool"),
)
_ANY_DTYPE = [(name, re.compile(rf"(?<![a-z0-9])(?:{words})(?![0-9])", re.IGNORECASE)) for name, words in _DTYPES]
_BARE = re.compile(rf"(?:{'|'.join(words for _, words in _DTYPES)})\w*", re.IGNORECASE)


def _dtype(text: Any) -> str | None:
    """The element type in one of TensorRT's texts; None for `N/A due to dynamic shapes` and what we do not know."""
    return _dtype_in(text) if isinstance(text, str) else None


@functools.lru_cache(maxsize=1024)
def _dtype_in(text: str) -> str | None:
    return next((name for name, pattern in _ANY_DTYPE if pattern.search(text)), None)


def _layout(text: Any) -> str | None:
    if not isinstance(text, str) or text.startswith("N/A") or _BARE.fullmatch(text):
        return None
    return text


_SEPARATORS = "\x1e\x1f"
"""Between the ONNX names of one layer; which of the two depends on what fused it, and some joins have neither."""
_NODE_MARK = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f]|\s*\[|\s*$)")


def _nodes(metadata: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in _NODE_MARK.findall(metadata) if name))


# ------------------------------------------------------------------------------------------------ what a layer does

_REFORMATS = frozenset("reformat quantize dequantize cast".split())
_MOVING = frozenset(
    "noop constant shuffle slice concatenation concat copy move gather padding identity signal wait shape shape_call host "
    "shapehosttodevicecopy devicetoshapehostcopy".split()
)
_MATRIX = (
    "conv", "gemm", "matmul", "matrixmultiply", "matrix_multiply", "fullyconnected", "einsum", "mha", "attention",
    "correlation", "rnn", "lstm", "__myl_fc", "myelin", "foreignnode",
)  # fmt: skip
"""In the kind or the kernel's name. A whole subgraph that Myelin keeps to itself multiplies, as far as anybody can see."""
_MYELIN = re.compile(r"^_+myl_([A-Za-z]+)")
_MYELIN_WORD = re.compile(r"[A-Z][a-z]*")
_MYELIN_MOVES = frozenset(
    "Move Cast Tran Trans Conc Slic Resh Copy Repl Bro Broa Pad Gath Expa Sque Unsq Quan Dequ Iden".split()
)


def _only_moves(name: str) -> bool:
    """For the kernels Myelin writes itself, which are named by their operations: `__myl_MoveConc_myl0_3`."""
    found = _MYELIN.match(name)
    if found is None:
        return False
    words = _MYELIN_WORD.findall(found[1])
    return bool(words) and all(word in _MYELIN_MOVES for word in words)


# ------------------------------------------------------------------------------------------------ what it computes in

_PRECISIONS = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16", "int8": "int8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int4": "int4", "float4_e2m1fn": "nvfp4",
}  # fmt: skip
"""UINT8 is not here: TensorRT takes it at its inputs and outputs only."""
_FLOATS = ("fp64", "fp32", "bf16", "fp16")
"""Widest first."""
_OPERANDS = "tf32|bf16|f16|f32|f64|e4m3|e5m2|e2m1|i8|u8|i4"
_KERNEL = re.compile(rf"(?<![a-z0-9])(?:{_OPERANDS})({_OPERANDS})_({_OPERANDS})(?:f16|f32|f64|bf16|i32)(?![a-z0-9])")
"""In the name of a matrix kernel: its two operands, then what it multiplies in and what it adds up in."""
_KERNEL_TYPES = {
    "tf32": "tf32", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "e4m3": "fp8", "e5m2": "fp8",
    "e2m1": "nvfp4", "i8": "int8", "u8": "int8", "i4": "int4",
}  # fmt: skip


def census(layers: Sequence[LayerInfo], macs: Mapping[str, int] | None = None) -> dict[str, Share]:
    """The shares by data type, largest first; empty where the engine tells names alone, or computes nothing.

    A layer computes in what its kernel's name says it multiplies in (that tells TF32 from FP32), else in what it reads:
    FP16 in and FP32 out is FP16. One that reads INT8 or FP8 and keeps its own weights in floating point is no quantised
    layer; one whose weights alone are INT4 or FP4 is. Reformats, copies, casts and what is left of Q/DQ do not count.

    `macs` are multiply-adds by ONNX node; a node of several layers is shared out among those that multiply. Where less
    than nine tenths of them can be found in the layers, no share of multiply-adds is given.
    """
    kinds = kinds_of(layers)
    weighed = _weighed(layers, list(kinds), macs or {})
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for index, kind in kinds.items():
        shares[kind][0] += 1
        shares[kind][1] += layers[index].weight_count
        shares[kind][2] += weighed.get(index, 0.0)
    count, held, work = (sum(share[which] for share in shares.values()) for which in range(3))
    complete = work > 0 and work >= _LEAST_MATCHED * sum((macs or {}).values())
    found = {
        kind: Share(share[0] / count, share[1] / held if held else 0.0, share[2] / work if complete else None)
        for kind, share in shares.items()
    }
    return dict(sorted(found.items(), key=lambda item: (-(item[1].macs or 0), -item[1].layers, item[0])))


_LEAST_MATCHED = 0.9


def kinds_of(layers: Sequence[LayerInfo]) -> dict[int, str]:
    """What each layer that the census counts computes in, by its place."""
    return dict(_kinds(layers, [index for index, layer in enumerate(layers) if layer.detailed and not layer.moves]))


def _kinds(layers: Sequence[LayerInfo], counted: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The type of each layer that computes on numbers; index arithmetic and comparisons of integers are left out."""
    wanted = set(counted)
    makers: dict[str, LayerInfo] = {}  # the last one to write a name: scratch tensors share names
    for index, layer in enumerate(layers):
        if index in wanted and (kind := _precision(layer, makers)) is not None:
            yield index, kind
        for tensor in layer.outputs:
            makers[tensor.name] = layer


def _precision(layer: LayerInfo, makers: Mapping[str, LayerInfo]) -> str | None:
    operands = [tensor.dtype for tensor in layer.inputs]
    reads = [_PRECISIONS[name] for name in operands if name in _PRECISIONS]
    own = _PRECISIONS.get(layer.weights or "")
    stored = {own, *reads, *(_PRECISIONS.get(tensor.dtype or "") for tensor in layer.constants)}
    stored |= {_stored_as(tensor, makers) for tensor in layer.inputs}
    kernel = _KERNEL.search(layer.tactic or "")
    scaled = any(tensor.dtype == "float8_e8m0fnu" for tensor in (*layer.inputs, *layer.constants))
    kind: str | None
    if kernel is not None:
        kind = _KERNEL_TYPES[kernel[2]]
        stored.add(_KERNEL_TYPES[kernel[1]])
    elif layer.matrix and own in _FLOATS and reads and reads[0] not in _FLOATS:
        kind = own
    elif layer.matrix and reads:
        kind = reads[0] if reads[0] not in ("int4", "nvfp4") or len(set(reads)) == 1 else _widest(reads)
    elif reads:
        kind = _widest(reads)
    elif own is not None:
        kind = own
    else:
        writes = [_PRECISIONS[tensor.dtype] for tensor in layer.outputs if tensor.dtype in _PRECISIONS]
        told = any(tensor.dtype is not None for tensor in (*layer.inputs, *layer.outputs))
        return _widest(writes) if writes else None if told else UNKNOWN  # None: integers and booleans alone
    if kind == "fp8" and scaled:
        return "mxfp8"
    if layer.matrix and kind in _FLOATS:
        return next((name for name in ("int4", "nvfp4") if name in stored), kind)
    return kind


def _stored_as(tensor: LayerTensor, makers: Mapping[str, LayerInfo]) -> str | None:
    """The type of 4-bit weights behind a layer of their own that only dequantises them."""
    for _ in range(4):
        maker = makers.get(tensor.name)
        if maker is None or not maker.moves or not maker.inputs:
            return None
        tensor = maker.inputs[0]
        if tensor.dtype in ("int4", "float4_e2m1fn"):
            return _PRECISIONS[tensor.dtype]
    return None


def _widest(kinds: Sequence[str]) -> str:
    return min(kinds, key=lambda kind: _FLOATS.index(kind) if kind in _FLOATS else math.inf)


def _weighed(layers: Sequence[LayerInfo], counted: Sequence[int], macs: Mapping[str, int]) -> dict[int, float]:
    """Multiply-adds by layer: each node's, shared out among the layers that were made of it."""
    places: dict[str, list[int]] = defaultdict(list)
    for index in counted:
        for node in layers[index].onnx_nodes:
            if macs.get(node):
                places[node].append(index)
    weighed: dict[int, float] = defaultdict(float)
    for node, found in places.items():
        multiplying = [index for index in found if layers[index].matrix] or found
        for index in multiplying:
            weighed[index] += macs[node] / len(multiplying)
    return weighed
