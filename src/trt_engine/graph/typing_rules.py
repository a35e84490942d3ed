"""The typing rules of TensorRT's strongly typed builder, checked without TensorRT.

In a strongly typed network, the only mode of TensorRT 11, types come from the graph alone and are never converted:
operands of different types are an error. Sources of the rules: `INetworkDefinition` and `ILayer` in
TensorRT's public headers (operands of one type, data types), `IQuantizeLayer`, `IDequantizeLayer`, `IDynamicQuantizeLayer`
there and the page "Explicit Quantization" of its documentation (symmetric, positive constant scales, axes, blocks), the
operator table of the public onnx-tensorrt repository (UINT8, FP64). docs/precision.md lists them with their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onnx import ModelProto

from trt_engine.graph import edit_graph, qdq_rules, typed_graph, walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.lint_rules.model_view import error, sort_findings
from trt_engine.graph.operators import is_trt_only
from trt_engine.graph.tensorrt_operators import is_unsupported
from trt_engine.graph.typed_graph import ModelView, Tensor, type_label
from trt_engine.records.base import Finding

_TENSORRT_TYPES = frozenset(
    f"tensor({name})"
    for name in "float float16 bfloat16 float8e4m3fn float4e2m1 float8e8m0 int4 int8 int32 int64 bool uint8".split()
)


def check_strong_typing(proto: ModelProto) -> tuple[Finding, ...]:
    """Find what a strongly typed build would reject or misinterpret, errors first.

    Raises `ModelError` if local functions cannot be inlined.
    """
    scope = typed_graph.build_typed_graph(edit_graph.inline_functions(proto))
    seen = ModelView(scope, list(scope.all_ops()), proto)
    return sort_findings(dict.fromkeys(finding for rule in _RULES for finding in rule(seen)))


def _check_operand_types(seen: ModelView) -> Iterator[Finding]:
    """Inputs with one type variable must have the same supported type."""
    for op in seen.ops:
        signature = op.signature
        if signature is None or op.bodies or is_trt_only(op.node):
            continue
        bound: dict[str, tuple[int, Tensor]] = {}
        for position, tensor in enumerate(op.inputs):
            if tensor is None or not tensor.type_str:
                continue
            formal = signature.input(position)
            if not signature.allows(formal, tensor.type_str):
                allowed = signature.variables.get(formal, frozenset((formal,)))
                floats = sorted(type_label(kind) for kind in allowed if kind in qdq_rules.FLOAT_TYPES)
                yield error(
                    "type-not-taken",
                    f"`{op.node.op_type}` reads `{tensor.name}` in {type_label(tensor.type_str)}, which it does not take "
                    "there at this opset" + (f" (it takes {', '.join(floats)})" if floats else ""),
                    op.label,
                    "put a Cast before it, or raise the opset",
                )
                continue
            heterogeneous = formal in signature.variables and op.node.op_type in ("Loop", "Scan", "If")
            if formal in bound and not heterogeneous and bound[formal][1].type_str != tensor.type_str:
                first = bound[formal][1]
                yield error(
                    "types-differ",
                    f"`{op.node.op_type}` reads `{first.name}` in {type_label(first.type_str)} and `{tensor.name}` in "
                    f"{type_label(tensor.type_str)}; a strongly typed network converts neither",
                    op.label,
                    "put a Cast before one of them: `trt-engine cast` does so everywhere",
                )
            bound.setdefault(formal, (position, tensor))
        if op.node.op_type == "Pow" and len(op.inputs) == 2 and op.inputs[0] and op.inputs[1]:
            base, exponent = op.inputs[0], op.inputs[1]
            if (
                base.type_str in qdq_rules.FLOAT_TYPES
                and exponent.type_str in qdq_rules.FLOAT_TYPES
                and base.type_str != exponent.type_str
            ):
                yield error(
                    "types-differ",
                    f"`Pow` reads `{base.name}` in {type_label(base.type_str)} and `{exponent.name}` in "
                    f"{type_label(exponent.type_str)}: "
                    "ONNX allows that, an elementwise layer of TensorRT does not",
                    op.label,
                    "give the exponent the type of the base",
                )


def _check_body_types(seen: ModelView) -> Iterator[Finding]:
    """Both branches must have the same output types; loop-carried tensors must keep their type."""
    for op in seen.ops:
        if op.node.op_type == "If" and len(op.bodies) == 2:
            first, second = op.bodies.values()
            for at, (one, other) in enumerate(zip(first.outputs, second.outputs, strict=False)):
                if (
                    one is not None
                    and other is not None
                    and one.type_str
                    and other.type_str
                    and one.type_str != other.type_str
                ):
                    yield error(
                        "branches-differ",
                        f"output {at} of `If` is {type_label(one.type_str)} in one branch and "
                        f"{type_label(other.type_str)} in the other",
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
            scanned = (
                op.node.op_type == "Scan" and position >= len(op.inputs) - walk.attributes(op.node)["num_scan_inputs"]
            )
            left = body.outputs[end] if end < len(body.outputs) and not scanned else None
            kinds = {item.type_str for item in (given, inside, left) if item is not None and item.type_str}
            if len(kinds) > 1:
                yield error(
                    "loop-types-differ",
                    f"the type of `{body.graph.input[at].name}`, carried by `{op.node.op_type}`, is "
                    f"{' and '.join(sorted(map(type_label, kinds)))}",
                    op.label,
                    "put Casts so that it has one type before, in and after the body",
                )


def _check_output_types(seen: ModelView) -> Iterator[Finding]:
    """An output must have its declared type."""
    for scope in seen.main.all_scopes():
        for value, tensor in zip(scope.graph.output, scope.outputs, strict=True):
            said = typed_graph.declared_type_str(value.type)
            if tensor is not None and said and tensor.type_str and said != tensor.type_str:
                yield error(
                    "output-type-differs",
                    f"the output `{value.name}` is declared as {type_label(said)} and computed in "
                    f"{type_label(tensor.type_str)}",
                    value.name,
                    "put a Cast before it, or declare the type it has",
                )


def _check_known_types(seen: ModelView) -> Iterator[Finding]:
    """Types must be supported by TensorRT."""
    reported: set[str] = set()
    for scope in seen.main.all_scopes():
        for tensor in scope.tensors.values():
            if tensor.type_str in _TENSORRT_TYPES or not tensor.type_str or tensor.type_str in reported:
                continue
            if tensor.producer is None and not tensor.consumers and not tensor.output_of:
                continue
            reported.add(tensor.type_str)
            where = tensor.producer.label if tensor.producer is not None else tensor.name
            if tensor.type_str == "tensor(double)":
                yield error(
                    "float64",
                    f"`{tensor.name}` is fp64, which TensorRT does not compute in",
                    where,
                    "export the model in float32",
                )
            else:
                yield error(
                    "type-unknown-to-tensorrt",
                    f"`{tensor.name}` is of type {type_label(tensor.type_str)}, which TensorRT does not have",
                    where,
                    "export the model with int32, int64, float32 or bool there",
                )


def _check_uint8(seen: ModelView) -> Iterator[Finding]:
    """UINT8 is supported for network inputs and outputs only, next to a Cast."""
    for op in seen.ops:
        if op.node.op_type == "Constant" or is_trt_only(op.node) or is_quantize(op.node) or is_dequantize(op.node):
            continue
        reads = [item for item in op.inputs if item is not None and item.type_str == "tensor(uint8)"]
        makes = [item for item in op.outputs if item is not None and item.type_str == "tensor(uint8)"]
        if (not reads and not makes) or is_unsupported(op.node.op_type):
            continue  # TensorRT has no such operator of any type
        inner_reads = [item for item in reads if item.producer is not None or item.scope is not seen.main]
        inner_makes = [item for item in makes if item.consumers or not item.output_of]
        cast = op.node.op_type in ("Cast", "CastLike", "Shape", "Identity")
        if cast and not inner_reads and not inner_makes:
            continue
        yield error(
            "uint8-inside",
            f"`{op.node.op_type}` works on uint8 (`{(reads or makes)[0].name}`), which TensorRT has for inputs and "
            "outputs of the network alone",
            op.label,
            "put a Cast to float or int32 right behind the input, or right before the output",
        )


_RULES: tuple[Callable[[ModelView], Iterator[Finding]], ...] = (
    _check_operand_types,
    _check_body_types,
    _check_output_types,
    _check_known_types,
    _check_uint8,
    qdq_rules.check_zero_points,
    qdq_rules.check_quantized_types,
    qdq_rules.check_scales,
    qdq_rules.check_channel_axes,
    qdq_rules.check_blocks,
    qdq_rules.check_pairs,
    qdq_rules.check_score_scales,
)
