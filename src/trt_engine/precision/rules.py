"""The typing rules that TensorRT's strongly typed builder holds a graph to, checked on any machine.

In a strongly typed network, the only kind TensorRT 11 has, types come from the graph alone and nothing is converted on the
way: operands that differ are an error, not a cast. The rules and where they stand: `INetworkDefinition` and `ILayer` in
TensorRT's public headers (operands of one type, data types), `IQuantizeLayer`, `IDequantizeLayer`, `IDynamicQuantizeLayer`
there and the page "Explicit Quantization" of its documentation (symmetric, positive constant scales, axes, blocks), the
operator table of the public onnx-tensorrt repository (UINT8, FP64). docs/precision.md lists them with their codes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, numpy_helper

from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.operators import is_trt_only
from trt_engine.graph.trace import attributes, trace
from trt_engine.precision import elements
from trt_engine.precision.elements import Op, Scope, Tensor
from trt_engine.records import Finding

__all__ = ["check_strong_typing"]

log = logging.getLogger(__name__)

_E8M0, _FP8, _FP4, _INT4 = (f"tensor({name})" for name in ("float8e8m0", "float8e4m3fn", "float4e2m1", "int4"))
_KNOWN = frozenset(
    f"tensor({name})"
    for name in "float float16 bfloat16 float8e4m3fn float4e2m1 float8e8m0 int4 int8 int32 int64 bool uint8".split()
)
_QUANTIZED = frozenset(("tensor(int8)", _FP8, _INT4, _FP4))
_LAYOUT = frozenset(
    "Transpose Reshape Squeeze Unsqueeze Flatten Identity Slice Split Expand Gather GatherElements GatherND Concat Cast "
    "TopK ReduceMax Max MaxPool Where".split()
)
_UNIT = frozenset("Sigmoid Softmax HardSigmoid".split())
_FEWEST_LEVELS = 32
"""Steps of an integer scale between 0 and 1 below which scores cannot be told apart."""
_BLOCKS = {_FP4: 16, _E8M0: 32}
_FLOATS = frozenset(f"tensor({name})" for name in ("float", "float16", "bfloat16", "double"))
_NAMES = {"tensor(float)": "fp32", "tensor(float16)": "fp16", "tensor(bfloat16)": "bf16", "tensor(double)": "fp64"}


def check_strong_typing(proto: ModelProto) -> tuple[Finding, ...]:
    """What a strongly typed build would refuse or do other than meant, errors first; nothing for a clean model."""
    scope = elements.read(elements.inlined(proto))
    seen = _Seen(scope, list(scope.all_ops()), proto)
    found = [finding for rule in _RULES for finding in rule(seen)]
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(dict.fromkeys(found), key=lambda item: order[item.severity]))


def _short(kind: str) -> str:
    """`fp16` for `tensor(float16)`."""
    return _NAMES.get(kind) or (kind[7:-1] if kind.startswith("tensor(") else kind)


@dataclass(slots=True)
class _Seen:
    """The model as the rules read it."""

    main: Scope
    ops: list[Op]
    proto: ModelProto
    _shapes: dict[str, tuple[int, ...]] | None = field(default=None)

    def shape(self, tensor: Tensor | None) -> tuple[int, ...] | None:
        """The sizes of a tensor, -1 where open; None when its rank is not known."""
        if tensor is None:
            return None
        if tensor.stored is not None:
            return tuple(tensor.stored.dims)
        if self._shapes is None:
            facts = trace(self.proto, {}).facts
            self._shapes = {name: fact.shape for name, fact in facts.items() if fact.shape is not None}
        return self._shapes.get(tensor.name)


# ------------------------------------------------------------------------------------------------ types of operands


def _operands(seen: _Seen) -> Iterator[Finding]:
    """Inputs that the operator's schema gives one type have one type, and one it takes."""
    for op in seen.ops:
        signature = op.signature
        if signature is None or op.bodies or is_trt_only(op.node):
            continue
        bound: dict[str, tuple[int, Tensor]] = {}
        for position, tensor in enumerate(op.inputs):
            if tensor is None or not tensor.kind:
                continue
            formal = signature.input(position)
            if not signature.allows(formal, tensor.kind):
                allowed = signature.variables.get(formal, frozenset((formal,)))
                floats = sorted(_short(kind) for kind in allowed if kind in _FLOATS)
                yield Finding(
                    "type-not-taken",
                    "error",
                    f"`{op.node.op_type}` reads `{tensor.name}` in {_short(tensor.kind)}, which it does not take there at "
                    "this opset" + (f" (it takes {', '.join(floats)})" if floats else ""),
                    op.label,
                    "put a Cast before it, or raise the opset",
                )
                continue
            heterogeneous = formal in signature.variables and op.node.op_type in ("Loop", "Scan", "If")
            if formal in bound and not heterogeneous and bound[formal][1].kind != tensor.kind:
                first = bound[formal][1]
                yield Finding(
                    "types-differ",
                    "error",
                    f"`{op.node.op_type}` reads `{first.name}` in {_short(first.kind)} and `{tensor.name}` in "
                    f"{_short(tensor.kind)}; a strongly typed network converts neither",
                    op.label,
                    "put a Cast before one of them: `trt-engine cast` does so everywhere",
                )
            bound.setdefault(formal, (position, tensor))
        if op.node.op_type == "Pow" and len(op.inputs) == 2 and op.inputs[0] and op.inputs[1]:
            base, exponent = op.inputs[0], op.inputs[1]
            if base.kind in _FLOATS and exponent.kind in _FLOATS and base.kind != exponent.kind:
                yield Finding(
                    "types-differ",
                    "error",
                    f"`Pow` reads `{base.name}` in {_short(base.kind)} and `{exponent.name}` in {_short(exponent.kind)}: "
                    "ONNX allows that, an elementwise layer of TensorRT does not",
                    op.label,
                    "give the exponent the type of the base",
                )


def _bodies(seen: _Seen) -> Iterator[Finding]:
    """Both branches give the same types; what a loop carries keeps its type."""
    for op in seen.ops:
        if op.node.op_type == "If" and len(op.bodies) == 2:
            first, second = op.bodies.values()
            for at, (one, other) in enumerate(zip(first.outputs, second.outputs, strict=False)):
                if one is not None and other is not None and one.kind and other.kind and one.kind != other.kind:
                    yield Finding(
                        "branches-differ",
                        "error",
                        f"output {at} of `If` is {_short(one.kind)} in one branch and {_short(other.kind)} in the other",
                        op.label,
                        "put a Cast at the end of one branch",
                    )
        carried = {"Loop": 2, "Scan": 0}.get(op.node.op_type)
        body = op.bodies.get("body")
        if carried is None or body is None:
            continue
        for position, given in enumerate(op.inputs[carried:]):
            at = position + carried
            inside = body.inputs[at] if at < len(body.inputs) else None
            end = at - 1 if op.node.op_type == "Loop" else at
            scanned = op.node.op_type == "Scan" and position >= len(op.inputs) - attributes(op.node)["num_scan_inputs"]
            left = body.outputs[end] if end < len(body.outputs) and not scanned else None
            kinds = {item.kind for item in (given, inside, left) if item is not None and item.kind}
            if len(kinds) > 1:
                yield Finding(
                    "loop-types-differ",
                    "error",
                    f"what `{op.node.op_type}` carries as `{body.graph.input[at].name}` is "
                    f"{' and '.join(sorted(map(_short, kinds)))}",
                    op.label,
                    "put Casts so that it has one type before, in and after the body",
                )


def _stated(seen: _Seen) -> Iterator[Finding]:
    """An output is of the type the file says."""
    for scope in seen.main.all_scopes():
        for value, tensor in zip(scope.graph.output, scope.outputs, strict=True):
            said = elements.declared(value.type)
            if tensor is not None and said and tensor.kind and said != tensor.kind:
                yield Finding(
                    "output-type-differs",
                    "error",
                    f"the output `{value.name}` is stated as {_short(said)} and made in {_short(tensor.kind)}",
                    value.name,
                    "put a Cast before it, or state the type it has",
                )


def _foreign(seen: _Seen) -> Iterator[Finding]:
    """Types TensorRT does not have."""
    told: set[str] = set()
    for scope in seen.main.all_scopes():
        for tensor in scope.tensors.values():
            if tensor.kind in _KNOWN or not tensor.kind or tensor.kind in told:
                continue
            if tensor.maker is None and not tensor.users and not tensor.leaves:
                continue
            told.add(tensor.kind)
            where = tensor.maker.label if tensor.maker is not None else tensor.name
            if tensor.kind == "tensor(double)":
                yield Finding(
                    "float64",
                    "error",
                    f"`{tensor.name}` is fp64, which TensorRT does not compute in",
                    where,
                    "export the model in float32",
                )
            else:
                yield Finding(
                    "type-unknown-to-tensorrt",
                    "error",
                    f"`{tensor.name}` is of type {_short(tensor.kind)}, which TensorRT does not have",
                    where,
                    "export the model with int32, int64, float32 or bool there",
                )


def _uint8(seen: _Seen) -> Iterator[Finding]:
    """UINT8 is a type of network inputs and outputs: it is cast right behind the one and right before the other."""
    for op in seen.ops:
        if op.node.op_type == "Constant" or is_trt_only(op.node) or is_quantize(op.node) or is_dequantize(op.node):
            continue
        reads = [item for item in op.inputs if item is not None and item.kind == "tensor(uint8)"]
        makes = [item for item in op.outputs if item is not None and item.kind == "tensor(uint8)"]
        if not reads and not makes:
            continue
        inner_reads = [item for item in reads if item.maker is not None or item.scope is not seen.main]
        inner_makes = [item for item in makes if item.users or not item.leaves]
        cast = op.node.op_type in ("Cast", "CastLike", "Shape", "Identity")
        if cast and not inner_reads and not inner_makes:
            continue
        yield Finding(
            "uint8-inside",
            "error",
            f"`{op.node.op_type}` works on uint8 (`{(reads or makes)[0].name}`), which TensorRT has for inputs and "
            "outputs of the network alone",
            op.label,
            "put a Cast to float or int32 right behind the input, or right before the output",
        )


# ------------------------------------------------------------------------------------------------ Q and DQ


def _pairs(seen: _Seen) -> Iterator[tuple[Op, bool]]:
    """The QuantizeLinear and DequantizeLinear nodes of the standard and of ONNX Runtime; True for the first kind."""
    for op in seen.ops:
        if op.node.op_type in ("QuantizeLinear", "DequantizeLinear") and not is_trt_only(op.node):
            yield op, op.node.op_type == "QuantizeLinear"


def _input(op: Op, position: int) -> Tensor | None:
    return op.inputs[position] if position < len(op.inputs) else None


def _value(tensor: Tensor | None) -> npt.NDArray[np.float32] | None:
    """The numbers of a constant stored in the file itself, or of two scales multiplied; None for others."""
    if tensor is None or tensor.stored is None or tensor.stored.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return np.asarray(numpy_helper.to_array(tensor.stored)).astype(np.float32)
    except (ValueError, TypeError, KeyError):
        return None


def _from_constants(tensor: Tensor | None, depth: int = 8) -> bool:
    """True for what is known when the engine is built."""
    if tensor is None or tensor.stored is not None:
        return tensor is not None
    op = tensor.maker
    if op is None or depth == 0:
        return tensor.scope.owner is None and op is None and tensor not in tensor.scope.inputs
    return op.node.op_type == "Constant" or (
        bool(op.inputs) and all(item is None or _from_constants(item, depth - 1) for item in op.inputs)
    )


def _from_tensorrt(tensor: Tensor | None, depth: int = 4) -> bool:
    """True for scales that an operator of TensorRT's works out itself, block by block."""
    op = tensor.maker if tensor is not None else None
    if op is None or depth == 0:
        return False
    return is_trt_only(op.node) or any(_from_tensorrt(item, depth - 1) for item in op.inputs)


def _zero_points(seen: _Seen) -> Iterator[Finding]:
    for op, _ in _pairs(seen):
        zero = _input(op, 2)
        if zero is None:
            continue
        value = _value(zero)
        if value is None and not _from_constants(zero):
            yield Finding(
                "zero-point-not-constant",
                "error",
                f"the zero point `{zero.name}` is computed; TensorRT takes none, or zeros known when the engine is built",
                op.label,
                "quantize symmetrically, with constant zero points of 0",
            )
        elif value is not None and np.any(value != 0):
            yield Finding(
                "asymmetric-zero-point",
                "error",
                f"the zero point `{zero.name}` is {value.reshape(-1)[value.reshape(-1) != 0][0]:g}; "
                "TensorRT quantizes symmetrically, zero points are 0",
                op.label,
                "quantize again with symmetric activations and weights: `trt-engine quantize` does",
            )


def _quantized_types(seen: _Seen) -> Iterator[Finding]:
    for op, quantizes in _pairs(seen):
        tensor = (op.outputs[0] if op.outputs else None) if quantizes else _input(op, 0)
        kind = tensor.kind if tensor is not None else ""
        if tensor is None or not kind or kind in _QUANTIZED or kind == _E8M0:
            continue
        yield Finding(
            "quantized-type",
            "error",
            f"`{op.node.op_type}` works on {_short(kind)}; TensorRT quantizes to int8, fp8 (E4M3), int4 and fp4",
            op.label,
            "quantize again to one of them: `trt-engine quantize` does",
        )


def _scales(seen: _Seen) -> Iterator[Finding]:
    for op, quantizes in _pairs(seen):
        scale = _input(op, 1)
        if scale is None:
            continue
        value = _value(scale)
        if value is not None and scale.kind != _E8M0 and not (np.isfinite(value).all() and (value > 0).all()):
            bad = value.reshape(-1)[~((value.reshape(-1) > 0) & np.isfinite(value.reshape(-1)))][0]
            yield Finding(
                "scale-not-positive",
                "error",
                f"the scale `{scale.name}` holds {bad:g}; scales are positive and finite",
                op.label,
                "calibrate again with data that reaches this tensor, or leave it in high precision",
            )
        if not _from_constants(scale) and not _from_tensorrt(scale):
            yield Finding(
                "scale-not-constant",
                "error",
                f"the scale `{scale.name}` is computed from data; TensorRT wants it when the engine is built",
                op.label,
                "quantize statically, from calibration data",
            )
        high = _input(op, 0) if quantizes else (op.outputs[0] if op.outputs else None)
        if (
            high is not None
            and high.kind in _FLOATS
            and scale.kind in _FLOATS
            and high.kind != scale.kind
        ):  # fmt: skip
            yield Finding(
                "scale-type-differs",
                "error",
                f"the scale `{scale.name}` is {_short(scale.kind)} and the high-precision side `{high.name}` is "
                f"{_short(high.kind)}",
                op.label,
                "store the scale in the type of what is quantized",
            )


def _axes(seen: _Seen) -> Iterator[Finding]:
    """Per-channel scales: on weights, along the output channels, as many as there are."""
    for op, quantizes in _pairs(seen):
        shape, scale = seen.shape(_input(op, 0)), seen.shape(_input(op, 1))
        given = attributes(op.node)
        if scale is None or len(scale) != 1 or (scale == (1,) and (shape is None or len(shape) == 0)):
            continue
        axis = int(given.get("axis", 1))
        if shape is None:
            continue
        if not -len(shape) <= axis < len(shape):
            if math.prod(scale) > 1:
                yield Finding(
                    "axis-out-of-range",
                    "error",
                    f"the scale of `{op.label}` lies along axis {axis}, and `{_name(op)}` has {len(shape)} dimensions",
                    op.label,
                    "quantize again, or set the axis of the output channels",
                )
            continue
        if scale == (1,):
            continue
        size = shape[axis]
        if size >= 0 and scale[0] >= 0 and size != scale[0]:
            yield Finding(
                "scale-length",
                "error",
                f"`{_name(op)}` has {size} channels along axis {axis} and {scale[0]} scales",
                op.label,
                "set the axis the scales were computed along",
            )
            continue
        if not _from_constants(_input(op, 0)) and not _quantized_constant(op):
            yield Finding(
                "per-channel-activation",
                "error",
                f"`{_name(op)}` is an activation with {scale[0]} scales; TensorRT takes one for each activation tensor",
                op.label,
                "quantize activations per tensor, weights per channel",
            )
            continue
        if quantizes:
            continue
        for user, right in _weight_axes(op, len(shape)):
            if axis % len(shape) != right:
                yield Finding(
                    "axis-not-output-channels",
                    "error",
                    f"the scales of the weights `{_name(op)}` lie along axis {axis}; the output channels of "
                    f"`{user.node.op_type}` are along axis {right}",
                    op.label,
                    f"quantize along axis {right}",
                )


def _name(op: Op) -> str:
    tensor = _input(op, 0)
    return tensor.name if tensor is not None else op.label


def _quantized_constant(op: Op) -> bool:
    """True for a DequantizeLinear that reads what QuantizeLinear made of a constant."""
    source = _input(op, 0)
    maker = source.maker if source is not None else None
    return maker is not None and is_quantize(maker.node) and _from_constants(_input(maker, 0))


def _weight_axes(op: Op, rank: int) -> Iterator[tuple[Op, int]]:
    """The layers that read a DequantizeLinear as their weights, and the axis of the output channels in them."""
    made = op.outputs[0] if op.outputs else None
    for user, position in _readers(made):
        kind = user.node.op_type
        if position != 1 or walk.domain_of(user.node):
            continue
        if kind == "Conv":
            yield user, 0
        elif kind == "ConvTranspose" and attributes(user.node).get("group", 1) == 1:
            yield user, 1
        elif kind == "Gemm":
            yield user, 0 if attributes(user.node).get("transB") else 1
        elif kind == "MatMul" and rank >= 2:
            yield user, rank - 1


def _readers(made: Tensor | None) -> Iterator[tuple[Op, int]]:
    """Who reads a tensor, past Casts and Identities."""
    for user, position in made.users if made is not None else ():
        if user.node.op_type in ("Cast", "Identity") and not walk.domain_of(user.node):
            yield from _readers(user.outputs[0])
        else:
            yield user, position


def _blocks(seen: _Seen) -> Iterator[Finding]:
    """Block scales: of the input's rank, along one of its last two axes, which they divide."""
    for op, _ in _pairs(seen):
        source = _input(op, 0)
        shape, scale = seen.shape(source), seen.shape(_input(op, 1))
        given = attributes(op.node)
        block = int(given.get("block_size", 0))
        if scale is None or (len(scale) < 2 and not block):
            continue
        axis = int(given.get("axis", 1))
        if not block:
            yield Finding(
                "block-size-missing",
                "error",
                f"the scale of `{op.label}` has {len(scale)} dimensions and no `block_size` is given",
                op.label,
                "set `block_size`, or give one scale or one for each channel",
            )
            continue
        if shape is None:
            continue
        if len(scale) != len(shape):
            yield Finding(
                "block-scale-rank",
                "error",
                f"block scales have the rank of what they scale: `{_name(op)}` has {len(shape)} dimensions, its scale "
                f"{len(scale)}",
                op.label,
                "store one scale for each block, in the shape of the tensor",
            )
            continue
        rank = len(shape)
        if not -rank <= axis < rank:
            yield Finding(
                "axis-out-of-range",
                "error",
                f"the blocks of `{op.label}` lie along axis {axis}, and `{_name(op)}` has {rank} dimensions",
                op.label,
                "use the last axis or the one before it",
            )
            continue
        axis %= rank
        kind = source.kind if source is not None and not is_quantize(op.node) else ""
        kind = kind or (op.outputs[0].kind if op.outputs and op.outputs[0] else "")
        if axis < rank - 2:
            yield Finding(
                "block-axis",
                "error",
                f"the blocks of `{_name(op)}` lie along axis {axis} of {rank}; TensorRT blocks the last two axes alone",
                op.label,
                "quantize along one of them",
            )
        if kind == _INT4 and rank != 2:
            yield Finding(
                "block-rank",
                "error",
                f"`{_name(op)}` holds int4 in blocks and has {rank} dimensions; TensorRT takes two",
                op.label,
                "quantize weights of MatMul and Gemm in blocks, others not",
            )
        scale_kind = (_input(op, 1) or source).kind if source is not None else ""
        wanted = _BLOCKS.get(scale_kind) or _BLOCKS.get(kind)
        if wanted and block != wanted:
            yield Finding(
                "block-size",
                "error",
                f"`{op.label}` has blocks of {block}; {_short(kind)} goes with blocks of {wanted}",
                op.label,
                f"quantize with `block_size={wanted}`",
            )
        size = shape[axis]
        if size >= 0 and size % block:
            yield Finding(
                "block-does-not-divide",
                "error",
                f"`{_name(op)}` has {size} elements along axis {axis}, which blocks of {block} do not divide",
                op.label,
                "choose a block size that divides it, pad the weights, or leave this layer out",
            )
        elif size >= 0 and scale[axis] >= 0 and scale[axis] != size // block:
            yield Finding(
                "block-scale-shape",
                "error",
                f"`{_name(op)}` has {size // block} blocks along axis {axis} and {scale[axis]} scales there",
                op.label,
                "the axis or the block size is not the one the scales were computed with",
            )
        yield from _along_products(op, axis, rank)


def _along_products(op: Op, axis: int, rank: int) -> Iterator[Finding]:
    """Blocks lie along what the product sums over."""
    made = op.outputs[0] if op.outputs else None
    for user, position in _readers(made):
        kind = user.node.op_type
        if position != 1 or kind not in ("Gemm", "MatMul") or walk.domain_of(user.node) or rank < 2:
            continue
        turned = kind == "Gemm" and bool(attributes(user.node).get("transB"))
        right = rank - 1 if turned else rank - 2
        if axis == right:
            continue
        if turned:
            yield Finding(
                "int4-gemm-transb",
                "error",
                f"the weights `{_name(op)}` are blocked along axis {axis}, and `Gemm(transB=1)` sums over axis {right}: "
                "the known fault of quantizers with this form of Gemm",
                user.label,
                f"set `axis={right}` if the scales were computed along it, else quantize this layer again as MatMul + Add",
            )
        else:
            yield Finding(
                "block-not-along-sum",
                "warning",
                f"the weights `{_name(op)}` are blocked along axis {axis}, and `{kind}` sums over axis {right}: "
                "no kernel reads that",
                op.label,
                f"quantize along axis {right}",
            )


def _pairs_differ(seen: _Seen) -> Iterator[Finding]:
    """What QuantizeLinear wrote is read back with its own scale, along its own axis."""
    for op, quantizes in _pairs(seen):
        source = _input(op, 0)
        maker = source.maker if source is not None else None
        if quantizes or maker is None or maker.node.op_type != "QuantizeLinear":
            continue
        one, other = _input(maker, 1), _input(op, 1)
        first, second = _value(one), _value(other)
        if one is not other and first is not None and second is not None and not np.array_equal(first, second):
            yield Finding(
                "pair-scales-differ",
                "error",
                f"`{maker.label}` writes `{_name(op)}` with the scale `{one.name if one else ''}` and `{op.label}` reads "
                f"it with `{other.name if other else ''}`, which has other values",
                op.label,
                "give both the same scale",
            )
        rank = len(seen.shape(source) or ())
        axes = [int(attributes(item.node).get("axis", 1)) for item in (maker, op)]
        channels = first is not None and first.size > 1
        if channels and (axes[0] % rank != axes[1] % rank if rank else axes[0] != axes[1]):
            yield Finding(
                "pair-axes-differ",
                "error",
                f"`{maker.label}` quantizes along axis {axes[0]} and `{op.label}` reads back along axis {axes[1]}",
                op.label,
                "give both the same axis",
            )


def _shared_scores(seen: _Seen) -> Iterator[Finding]:
    """Scores between 0 and 1 under the scale of something far larger all become the same number."""
    for op, quantizes in _pairs(seen):
        made = op.outputs[0] if op.outputs else None
        if not quantizes or made is None or made.kind not in ("tensor(int8)", "tensor(uint8)", "tensor(int4)"):
            continue
        scale = _value(_input(op, 1))
        if scale is None or scale.size != 1 or not scale.reshape(-1)[0] > 0:
            continue
        levels = 1 / float(scale.reshape(-1)[0])
        scores = _unit_source(_input(op, 0))
        if scores is None or levels >= _FEWEST_LEVELS:
            continue
        yield Finding(
            "scores-share-a-scale",
            "error",
            f"`{_name(op)}` holds scores between 0 and 1 (from `{scores.label}`) under a scale of "
            f"{float(scale.reshape(-1)[0]):.3g}: {levels:.1f} steps for all of them",
            op.label,
            "boxes and scores share one scale: leave the Concat of a detector's head unquantized",
        )


def _unit_source(tensor: Tensor | None, depth: int = 64) -> Op | None:
    """The Sigmoid or Softmax whose results are in a tensor, past what lays it out, joins it, or stores it."""
    op = tensor.maker if tensor is not None else None
    if op is None or depth == 0:
        return None
    if op.node.op_type in _UNIT:
        return op
    if op.node.op_type in _LAYOUT or is_quantize(op.node) or is_dequantize(op.node):
        inputs = op.inputs if op.node.op_type == "Concat" else op.inputs[:1]
        return next((found for item in inputs if (found := _unit_source(item, depth - 1)) is not None), None)
    return None


_RULES: tuple[Callable[[_Seen], Iterator[Finding]], ...] = (
    _operands,
    _bodies,
    _stated,
    _foreign,
    _uint8,
    _zero_points,
    _quantized_types,
    _scales,
    _axes,
    _blocks,
    _pairs_differ,
    _shared_scores,
)
