"""An engine's layers, read the same way for every TensorRT: names, types, tactics, ONNX nodes; and the dtype breakdown,
the share of the network that each data type computes.

The inspector of TensorRT 10 writes one text for layout and type (`Format/Datatype`: `Half`, or `Channel major FP16 format
where channel % 8 == 0` once shapes are set), that of 11 two keys; TensorRT 8 wrote longer texts. Layers are objects only
where the engine was built with the verbosity `detailed`, plain names otherwise. Unknown layers are accepted.
Source: the migration pages of IEngineInspector, TensorRT 11.0 and 11.3, and public inspector outputs.
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

from trt_engine.atomic_io import decode_json
from trt_engine.errors import EngineError
from trt_engine.records.passport import DtypeShare

UNKNOWN = "unknown"
"""Dtype name of layers whose type the engine does not report."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One input or output of a layer. None is what the engine does not report."""

    name: str
    dtype: str | None = None
    """The dtype: `float16`."""
    dims: tuple[int, ...] | None = None
    format: str | None = None
    """The layout, as named by TensorRT."""


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer of an engine as TensorRT fused it. Names can repeat."""

    name: str
    kind: str = ""
    """TensorRT's layer type: `CaskConvolution`, `gemm`, `kgen`; empty if only names are known."""
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    constants: tuple[LayerTensor, ...] = ()
    weights: str | None = None
    """The dtype of its weights, if known."""
    weight_count: int = 0
    tactic: str | None = None
    """The kernel by name, else by number."""
    stream: int | None = None
    onnx_nodes: tuple[str, ...] = ()
    """Names of the fused ONNX nodes."""
    reformat: bool = False
    """A layout or dtype conversion inserted by TensorRT, or left of a Q/DQ node or a Cast."""

    @property
    def is_detailed(self) -> bool:
        """False if the engine reports the name alone."""
        return bool(self.kind or self.inputs or self.outputs)

    @property
    def is_data_movement(self) -> bool:
        """True for a layer that only moves, converts or copies data."""
        words = myelin_operations(self.name)
        moves = self.kind.lower() in _DATA_MOVEMENT or (bool(words) and words <= _MYELIN_MOVES)
        return self.reformat or moves or self.is_dequantize

    @property
    def is_gemv(self) -> bool:
        """True for a Myelin kernel that multiplies a vector by a weight matrix: a product and a sum."""
        own = _MYELIN.match(self.name)
        return (
            own is not None
            and "MulSum" in own[1]
            and any(tensor.dims is not None and sum(size > 1 for size in tensor.dims) > 1 for tensor in self.constants)
        )

    @property
    def is_dequantize(self) -> bool:
        """True for a kernel that only dequantizes."""
        words = myelin_operations(self.name)
        return (
            bool(words)
            and words <= _MYELIN_MOVES | {"Mul", "Sub"}
            and any(tensor.dtype in _QUANTIZED_DTYPES for tensor in (*self.inputs, *self.constants))
            and all(tensor.dtype in _FLOAT_DTYPES for tensor in self.outputs)
        )

    @property
    def is_matmul(self) -> bool:
        """True for a layer that multiplies matrices, convolutions included."""
        own = self.name if self.name.startswith("_") else ""  # Myelin's names list operations, others ONNX nodes
        if "Fc" in myelin_operations(self.name) or self.is_gemv:
            return True
        words = f"{self.kind} {own} {self.tactic or ''}".lower()
        return self.weights is not None or any(word in words for word in _MATMUL)


# ------------------------------------------------------------------------------------------------ reading


def read_layers(document: Mapping[str, Any] | str) -> tuple[LayerInfo, ...]:
    """The layers of an inspector's JSON, in the order they run; `EngineError` for any other text."""
    return tuple(
        _parse_layer(item) for item in _as_list(_load_json(document).get("Layers")) if isinstance(item, Mapping | str)
    )


def _load_json(document: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(document, Mapping):
        return document
    try:
        found = decode_json(document)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise EngineError(
            f"the engine's layer information is not JSON: {error}", hint="export it again: it may have been cut"
        ) from error
    if isinstance(found, list):  # some tools keep the list alone
        return {"Layers": found}
    if not isinstance(found, Mapping):
        raise EngineError(
            "the engine's layer information is not a JSON object", hint="expected what an inspector or trtexec wrote"
        )
    return found


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _parse_layer(item: Mapping[str, Any] | str) -> LayerInfo:
    if isinstance(item, str):
        return LayerInfo(_NODE_MARK.sub("", item).strip(_SEPARATORS + " "), onnx_nodes=_parse_onnx_nodes(item))
    name, kind = str(item.get("Name") or ""), str(item.get("LayerType") or "")
    weights = item.get("Weights")
    weights = weights if isinstance(weights, Mapping) else {}
    inputs = tuple(_parse_tensor(part) for part in _as_list(item.get("Inputs")) if isinstance(part, Mapping | str))
    outputs = tuple(_parse_tensor(part) for part in _as_list(item.get("Outputs")) if isinstance(part, Mapping | str))
    tactic = item.get("TacticName") or item.get("TacticValue")
    stream, count = item.get("StreamId"), weights.get("Count")
    held = _parse_dtype(weights.get("Type")) if count != 0 else None
    return LayerInfo(
        name=name,
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        constants=tuple(
            _parse_tensor(part) for part in _as_list(item.get("Constants")) if isinstance(part, Mapping | str)
        ),
        weights=held,
        weight_count=count if isinstance(count, int) and held else 0,
        tactic=str(tactic) if tactic is not None else None,
        stream=stream if isinstance(stream, int) and not isinstance(stream, bool) else None,
        onnx_nodes=_parse_onnx_nodes(str(item.get("Metadata") or "")) or _parse_onnx_nodes(name),
        reformat=kind.lower() in _REFORMATS
        or str(item.get("ParameterType") or "").lower() in _REFORMATS
        or name.startswith("Reformatting CopyNode"),
    )


def _parse_tensor(item: Mapping[str, Any] | str) -> LayerTensor:
    if isinstance(item, str):
        return LayerTensor(item)
    together = item.get("Format/Datatype")
    kind = item.get("DataType") or item.get("Datatype") or together
    dims = item.get("Dimensions")
    layout = item.get("Format") or together
    return LayerTensor(
        name=str(item.get("Name") or ""),
        dtype=_parse_dtype(kind),
        dims=tuple(dims) if isinstance(dims, list) and all(isinstance(size, int) for size in dims) else None,
        format=_parse_format(layout),
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
_BARE_DTYPE = re.compile(rf"(?:{'|'.join(words for _, words in _DTYPES)})\w*", re.IGNORECASE)


def _parse_dtype(text: Any) -> str | None:
    """The dtype in one of TensorRT's texts; None for `N/A due to dynamic shapes` and unknown texts."""
    return _find_dtype(text) if isinstance(text, str) else None


@functools.lru_cache(maxsize=1024)
def _find_dtype(text: str) -> str | None:
    return next((name for name, pattern in _ANY_DTYPE if pattern.search(text)), None)


def _parse_format(text: Any) -> str | None:
    if not isinstance(text, str) or text.startswith("N/A") or _BARE_DTYPE.fullmatch(text):
        return None
    return text


_SEPARATORS = "\x1e\x1f"
"""Between the ONNX names of one layer; which of the two depends on what fused it, and some joins have neither."""
_NODE_MARK = re.compile(r"\[ONNX Layer: ((?:(?!\[ONNX Layer: ).)*?)\](?=[\x1e\x1f]|\s*\[|\s*$)")


def _parse_onnx_nodes(metadata: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in _NODE_MARK.findall(metadata) if name))


# ------------------------------------------------------------------------------------------------ the builder's log

# With the verbosity `detailed` the builder ends with one VERBOSE message: `Layers:`, a line for each layer in the order they
# run, then the inputs and outputs. Source: TensorRT-RTX 1.7.1, whose kernels are compiled later, where the engine runs.
_LIST_START = "Layers:\n"
_LIST_KEYS = (
    ("Name", "Name: "), ("LayerType", ", LayerType: "), ("Inputs", ", Inputs: ["), ("Constants", "], Constants: ["),
    ("Outputs", "], Outputs: ["), ("TacticName", "], TacticName: "), ("StreamId", ", StreamId: "),
    ("Metadata", ", Metadata: "),
)  # fmt: skip
_LISTED_TENSOR = re.compile(
    r"\{ Name: (?P<Name>.*?), Dimensions: \[(?P<Dimensions>[-\d,]*)\](?:, Strides: \[[-\d,]*\], StrideOrder: \[[-\d,]*\])?"
    r", Datatype: (?P<Datatype>[^,}]*?), Format: (?P<Format>.*?) \}(?=, \{ Name: |$)"
)


def is_layer_list(message: str) -> bool:
    """True for the message that lists the layers."""
    return message.startswith(_LIST_START) and ", LayerType: " in message


def parse_layer_list(message: str) -> dict[str, Any]:
    """The layers of that message as an inspector's document (`read_layers`); other lines are left out."""
    listed = message.partition("\nI/O Tensors:")[0].removeprefix(_LIST_START).splitlines()
    return {"Layers": [layer for text in listed if (layer := _parse_listed_layer(text)) is not None]}


def _parse_listed_layer(text: str) -> dict[str, Any] | None:
    values, rest = [], text
    for _, before in _LIST_KEYS:
        value, found, rest = rest.partition(before)
        if not found:
            return None
        values.append(value)
    layer: dict[str, Any] = dict(zip((key for key, _ in _LIST_KEYS), [*values[1:], rest], strict=True))
    for side in ("Inputs", "Outputs", "Constants"):
        layer[side] = [
            one.groupdict() | {"Dimensions": [int(size) for size in one["Dimensions"].split(",") if size]}
            for one in _LISTED_TENSOR.finditer(layer[side])
        ]
    stream = layer["StreamId"]
    return layer | {"StreamId": int(stream) if stream.isdecimal() else None}


# ------------------------------------------------------------------------------------------------ what a layer does

_REFORMATS = frozenset("reformat quantize dequantize cast".split())
_DATA_MOVEMENT = frozenset(
    "noop constant shuffle slice concatenation concat copy move gather padding identity signal wait shape shape_call host "
    "shapehosttodevicecopy devicetoshapehostcopy".split()
)
_MATMUL = (
    "conv", "gemm", "matmul", "matrixmultiply", "matrix_multiply", "fullyconnected", "einsum", "mha", "attention",
    "correlation", "rnn", "lstm", "__myl_fc", "myelin", "foreignnode",
)  # fmt: skip
"""In the kind or the kernel's name. An opaque Myelin subgraph is assumed to multiply."""
_MYELIN = re.compile(r"^_+myl_([A-Za-z]+)")
_MYELIN_WORD = re.compile(r"[A-Z][a-z]*")
_MYELIN_MOVES = frozenset(
    "Move Cast Tran Trans Conc Slic Resh Copy Repl Bro Broa Pad Gath Expa Sque Unsq Quan Dequ Dyna Iden".split()
)
_QUANTIZED_DTYPES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
_FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")


def myelin_operations(name: str) -> frozenset[str]:
    """The operations in a Myelin kernel's name, `__myl_MoveConc_myl0_3`; empty for other layers."""
    found = _MYELIN.match(name)
    return frozenset(_MYELIN_WORD.findall(found[1])) if found is not None else frozenset()


# ------------------------------------------------------------------------------------------------ what it computes in

_PRECISIONS = {
    "float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16", "int8": "int8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int4": "int4", "float4_e2m1fn": "nvfp4",
}  # fmt: skip
"""UINT8 is not here: TensorRT takes it at its inputs and outputs only."""
_FLOAT_PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
"""Widest first."""
_OPERANDS = "tf32|bf16|f16|f32|f64|e4m3|e5m2|e2m1|i8|u8|i4"
_KERNEL = re.compile(rf"(?<![a-z0-9])(?:{_OPERANDS})({_OPERANDS})_({_OPERANDS})(?:f16|f32|f64|bf16|i32)(?![a-z0-9])")
"""In the name of a matrix kernel: its two operands, its compute and its accumulation dtype."""
_KERNEL_TYPES = {
    "tf32": "tf32", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "e4m3": "fp8", "e5m2": "fp8",
    "e2m1": "nvfp4", "i8": "int8", "u8": "int8", "i4": "int4",
}  # fmt: skip


def dtype_shares(layers: Sequence[LayerInfo], macs: Mapping[str, int] | None = None) -> dict[str, DtypeShare]:
    """The shares by data type, largest first; empty if the engine reports names alone, or computes nothing.

    A layer's compute dtype is that of its kernel's name (which separates TF32 from FP32), else that of its inputs: FP16 in
    and FP32 out is FP16. A layer with INT8 or FP8 inputs and floating-point weights is not quantized; one with INT4 or FP4
    weights alone is. Reformats, copies, casts and leftover Q/DQ do not count.

    `macs` are MACs by ONNX node; a node of several layers is divided among those that multiply. If less than 90 % of
    them match layers, no MAC share is returned.
    """
    kinds = compute_dtypes(layers)
    weighed = _layer_macs(layers, list(kinds), macs or {})
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for index, kind in kinds.items():
        shares[kind][0] += 1
        shares[kind][1] += layers[index].weight_count
        shares[kind][2] += weighed.get(index, 0.0)
    count, held, work = (sum(share[which] for share in shares.values()) for which in range(3))
    complete = work > 0 and work >= _MIN_MATCHED * sum((macs or {}).values())
    found = {
        kind: DtypeShare(share[0] / count, share[1] / held if held else 0.0, share[2] / work if complete else None)
        for kind, share in shares.items()
    }
    return dict(sorted(found.items(), key=lambda item: (-(item[1].macs or 0), -item[1].layers, item[0])))


_MIN_MATCHED = 0.9


def compute_dtypes(layers: Sequence[LayerInfo]) -> dict[int, str]:
    """The compute dtype of each counted layer, by index."""
    return dict(
        _compute_dtypes(
            layers, [index for index, layer in enumerate(layers) if layer.is_detailed and not layer.is_data_movement]
        )
    )


def _compute_dtypes(layers: Sequence[LayerInfo], counted: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The dtype of each computing layer, without index arithmetic and integer comparisons."""
    wanted = set(counted)
    makers: dict[str, LayerInfo] = {}  # the last one to write a name: scratch tensors share names
    for index, layer in enumerate(layers):
        if index in wanted and (kind := _layer_precision(layer, makers)) is not None:
            yield index, kind
        for tensor in layer.outputs:
            makers[tensor.name] = layer


def _layer_precision(layer: LayerInfo, makers: Mapping[str, LayerInfo]) -> str | None:
    operands = [tensor.dtype for tensor in layer.inputs]
    reads = [_PRECISIONS[name] for name in operands if name in _PRECISIONS]
    writes = [_PRECISIONS[tensor.dtype] for tensor in layer.outputs if tensor.dtype in _PRECISIONS]
    own = _PRECISIONS.get(layer.weights or "")
    stored = {own, *reads, *(_PRECISIONS.get(tensor.dtype or "") for tensor in layer.constants)}
    stored |= {_weight_dtype(tensor, makers) for tensor in layer.inputs}
    kernel = _KERNEL.search(layer.tactic or "")
    scaled = any(tensor.dtype == "float8_e8m0fnu" for tensor in (*layer.inputs, *layer.constants))
    kind: str | None
    if kernel is not None:
        kind = _KERNEL_TYPES[kernel[2]]
        stored.add(_KERNEL_TYPES[kernel[1]])
    elif layer.is_matmul and own in _FLOAT_PRECISIONS and reads and reads[0] not in _FLOAT_PRECISIONS:
        kind = own
    elif layer.is_gemv and writes and writes[0] in _FLOAT_PRECISIONS:
        kind = writes[0]  # narrower inputs are unpacked first
    elif layer.is_matmul and reads:
        kind = reads[0] if reads[0] not in ("int4", "nvfp4") or len(set(reads)) == 1 else _widest_dtype(reads)
    elif reads:
        kind = _widest_dtype(reads)
    elif own is not None:
        kind = own
    else:
        stated = any(tensor.dtype is not None for tensor in (*layer.inputs, *layer.outputs))
        return _widest_dtype(writes) if writes else None if stated else UNKNOWN  # None: integers and booleans alone
    if kind == "fp8" and scaled:
        return "mxfp8"
    if layer.is_matmul and kind in _FLOAT_PRECISIONS:
        return next((name for name in ("int4", "nvfp4") if name in stored), kind)
    return kind


def _weight_dtype(tensor: LayerTensor, makers: Mapping[str, LayerInfo]) -> str | None:
    """The dtype of 4-bit weights dequantized by a separate layer."""
    for _ in range(4):
        maker = makers.get(tensor.name)
        if maker is None or not maker.is_data_movement:
            return None
        for held in (*maker.inputs[:1], *maker.constants):
            if held.dtype in ("int4", "float4_e2m1fn"):
                return _PRECISIONS[held.dtype]
        if not maker.inputs:
            return None
        tensor = maker.inputs[0]
    return None


def _widest_dtype(kinds: Sequence[str]) -> str:
    return min(kinds, key=lambda kind: _FLOAT_PRECISIONS.index(kind) if kind in _FLOAT_PRECISIONS else math.inf)


def _layer_macs(layers: Sequence[LayerInfo], counted: Sequence[int], macs: Mapping[str, int]) -> dict[int, float]:
    """MACs by layer: each node's, divided among its layers."""
    places: dict[str, list[int]] = defaultdict(list)
    for index in counted:
        for node in layers[index].onnx_nodes:
            if macs.get(node):
                places[node].append(index)
    weighed: dict[int, float] = defaultdict(float)
    for node, found in places.items():
        multiplying = [index for index in found if layers[index].is_matmul] or found
        for index in multiplying:
            weighed[index] += macs[node] / len(multiplying)
    return weighed
