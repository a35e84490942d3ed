"""What the importer honours of each operator, without PyTorch: a build refuses all else before it starts."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import ModelProto, NodeProto, helper, inliner

from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import replace_items
from trt_engine.graph.load import parse_errors
from trt_engine.graph.operators import check_nodes
from trt_engine.graph.opset import raise_opset
from trt_engine.graph.resource_estimate import infer_shapes
from trt_engine.graph.shape_inference import schema_of
from trt_engine.model import Model

log = logging.getLogger(__name__)

_MOST_NESTED = 3
_SMALL_ELEMENTS = 1024

MIN_OPSET = 18
"""Graphs of older opsets are raised to it; the rules know no older meaning of an operator."""
NEWEST = 28
"""The newest definition of an operator that the rules were written for: from 24 on they added element types and attributes,
and Mod of opset 28 floating point without `fmod`."""
_INTEGERS = "bool int8 uint8 int16 int32 int64"
_FLOATS = "float16 bfloat16 float32 float64"
_STORED = "uint16 uint32 uint64 int4 uint4 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
_TYPES = {"": f"{_INTEGERS} {_FLOATS}", "float": _FLOATS, "any": f"{_INTEGERS} {_FLOATS} {_STORED}"}
"""Element types of tensors by their word in the table: `any` for operators that move or convert values."""
_TABLE = """
    Abs; Acos; Add; And; ArgMax: axis keepdims select_last_index; ArgMin: axis keepdims select_last_index; Asin; Atan
    AveragePool: auto_pad ceil_mode count_include_pad dilations kernel_shape pads strides
    BatchNormalization: epsilon momentum; Cast any: to saturate; CastLike any: saturate; Ceil; Celu: alpha; Clip
    Concat any: axis; Constant any: value value_float value_floats value_int value_ints; ConstantOfShape any: value
    Conv: auto_pad dilations group kernel_shape pads strides
    ConvTranspose: auto_pad dilations group kernel_shape output_padding output_shape pads strides
    Cos; Cosh; CumSum: exclusive reverse; DepthToSpace: blocksize mode
    DequantizeLinear any: axis block_size output_dtype; Div; Dropout: seed; Einsum: equation; Elu: alpha; Equal
    Erf float; Exp; Expand any; Flatten any: axis; Floor
    GRU: activations clip direction hidden_size layout linear_before_reset
    Gather any: axis; GatherElements: axis; GatherND: batch_dims; Gelu: approximate; Gemm: alpha beta transA transB
    GlobalAveragePool; GlobalMaxPool; Greater; GreaterOrEqual; GridSample: align_corners mode padding_mode
    GroupNormalization: epsilon num_groups; HardSigmoid: alpha beta; HardSwish; Identity any; If: then_branch else_branch
    InstanceNormalization: epsilon; IsInf: detect_negative detect_positive; IsNaN
    LSTM: activations clip direction hidden_size input_forget layout
    LayerNormalization: axis epsilon; LeakyRelu: alpha; Less; LessOrEqual; Log; LogSoftmax: axis; Loop: body; MatMul; Max
    MaxPool: auto_pad ceil_mode dilations kernel_shape pads storage_order strides
    Mean; Min; Mish; Mod: fmod; Mul; Neg; NonZero; Not; OneHot: axis; Or; PRelu; Pad any: mode; Pow
    QuantizeLinear any: axis block_size output_dtype saturate; RMSNormalization: axis epsilon
    RNN: activations clip direction hidden_size layout; Range; Reciprocal; ReduceL1: keepdims noop_with_empty_axes
    ReduceL2 float: keepdims noop_with_empty_axes; ReduceLogSum float: keepdims noop_with_empty_axes
    ReduceLogSumExp float: keepdims noop_with_empty_axes; ReduceMax: keepdims noop_with_empty_axes
    ReduceMean: keepdims noop_with_empty_axes; ReduceMin: keepdims noop_with_empty_axes
    ReduceProd: keepdims noop_with_empty_axes; ReduceSum: keepdims noop_with_empty_axes
    ReduceSumSquare: keepdims noop_with_empty_axes; Relu; Reshape any: allowzero
    Resize: axes coordinate_transformation_mode cubic_coeff_a exclude_outside mode nearest_mode
    Round; ScatterElements: axis reduction; ScatterND: reduction; Selu: alpha gamma; Shape any: end start; Sigmoid; Sign
    Sin; Sinh; Size any; Slice any; Softmax: axis; Softplus; Softsign; SpaceToDepth: blocksize; Split any: axis num_outputs
    Sqrt; Squeeze any; Sub; Sum; Swish: alpha; Tan; Tanh; ThresholdedRelu: alpha; Tile any; TopK: axis largest sorted
    Transpose any: perm; Trilu: upper; Unsqueeze any; Where any; Xor
"""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as the rules compute it."""

    attributes: frozenset[str]
    """Those that are honoured with any value; all others at their default alone."""
    types: frozenset[str]
    """Element types of its input tensors."""


def _read_table(text: str) -> Iterator[tuple[str, Operator]]:
    for entry in filter(None, (item.strip() for item in text.replace("\n", ";").split(";"))):
        head, _, attributes = entry.partition(":")
        name, _, types = head.partition(" ")
        yield name, Operator(frozenset(attributes.split()), frozenset(_TYPES[types].split()))


OPERATORS = dict(_read_table(_TABLE))


def operators_text() -> str:
    """The operators with the attributes that are honoured, as `trt-engine docs reference/inductor` lists them."""
    words = ", ".join(
        f"{name} ({', '.join(sorted(item.attributes))})" if item.attributes else name
        for name, item in sorted(OPERATORS.items())
    )
    return textwrap.fill(f"{words}.", 150, break_long_words=False, break_on_hyphens=False)


@cache
def defaults(op: str, opset: int) -> dict[str, Any]:
    """The attributes of an operator of ONNX, and their defaults: None where there is none."""
    schema = schema_of(op, "", opset)
    found = {} if schema is None else schema.attributes
    return {
        name: helper.get_attribute_value(item.default_value) if item.default_value.name else None
        for name, item in found.items()
    }


def unhonoured(node: NodeProto, opset: int) -> str | None:
    """Why the rules do not compute a node as it is written, from its attributes and its definition; None if they do."""
    known = OPERATORS[node.op_type]
    schema = schema_of(node.op_type, "", opset)
    if schema is not None and schema.since_version > NEWEST:
        return f"its definition of opset {schema.since_version}; up to {NEWEST} is"
    given, usual = walk.attributes(node), defaults(node.op_type, opset)
    for name, value in given.items():
        if name not in known.attributes and value != usual.get(name):
            shown = value.decode(errors="replace") if isinstance(value, bytes) else value
            return f"the attribute `{name}={shown}`"
    return None


def write_out(proto: ModelProto) -> None:
    """Replace operators of the main graph that have no rule and that ONNX defines by others (Attention of opset 23) by their
    definitions; one that cannot be stays as it is."""
    opset = walk.opsets_of(proto).get("", 1)
    for _ in range(_MOST_NESTED):
        schemas = {
            node.op_type: schema_of(node.op_type, "", opset)
            for node in proto.graph.node
            if not walk.domain_of(node) and node.op_type not in OPERATORS
        }
        defined = [
            name
            for name, item in schemas.items()
            if item and (item.has_function or item.has_context_dependent_function)
        ]
        if not defined:
            return
        for node in proto.graph.node:  # a definition reads its attributes by name: the inliner knows no defaults
            if not walk.domain_of(node) and node.op_type in defined:
                given = {item.name for item in node.attribute}
                usual = schemas[node.op_type].attributes.values()
                node.attribute.extend(i.default_value for i in usual if i.default_value.name and i.name not in given)
        try:
            flat = inliner.inline_selected_functions(
                _typed_skeleton(proto), [("", name) for name in defined], inline_schema_functions=True
            )
        except RuntimeError as error:  # a type that is not known
            log.debug("%s: %s", ", ".join(defined), error)
            return
        replace_items(proto.graph.node, flat.graph.node)


def _typed_skeleton(proto: ModelProto) -> ModelProto:
    """The main graph with the types of all its tensors, large constants as inputs."""
    graph = proto.graph
    small = [item for item in graph.initializer if math.prod(item.dims) <= _SMALL_ELEMENTS]
    made = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    made.graph.name = "g"
    made.graph.node.extend(graph.node)
    made.graph.output.extend(graph.output)
    made.graph.input.extend(graph.input)
    types = {
        item.name: helper.make_tensor_value_info(item.name, item.data_type, item.dims) for item in graph.initializer
    }
    made.graph.input.extend(types[name] for name in types.keys() - {item.name for item in (*small, *graph.input)})
    made.graph.initializer.extend(small)
    made = infer_shapes(made)
    made.graph.value_info.extend(types[item.name] for item in small)
    return made


def refusal(node: NodeProto, why: str) -> ModelError:
    """The error for a node that is not imported."""
    return ModelError(
        f"node `{walk.label(node)}` ({node.op_type}) is not imported: {why}", hint="`-b onnxruntime` runs it"
    )


def check_attributes(proto: ModelProto) -> None:
    """`ModelError` for the first node, bodies included, with an attribute or a definition that the rules do not honour."""
    opset = walk.opsets_of(proto).get("", 1)
    local = {(item.domain, item.name) for item in proto.functions}
    for place in walk.nodes(proto):
        node = place.node
        if walk.domain_of(node) or node.op_type not in OPERATORS or (node.domain, node.op_type) in local:
            continue
        if why := unhonoured(node, place.opsets.get("", opset)):
            raise refusal(node, why)


def check_model(model: Model) -> None:
    """`ModelError` naming the operators that the importer lacks, or the node with what it does not honour."""
    with parse_errors(model.path):
        check_nodes(model.graph)
        proto = model.proto
        if model.opsets.get("", 1) < MIN_OPSET:
            proto = ModelProto()
            proto.CopyFrom(model.proto)
            raise_opset(proto, MIN_OPSET)
        if any(not walk.domain_of(node) and node.op_type not in OPERATORS for node in proto.graph.node):
            copied = ModelProto()
            copied.CopyFrom(proto)
            write_out(proto := copied)
        local = {(item.domain, item.name) for item in proto.functions}
        lacking = dict.fromkeys(
            walk.qualified_name(node)
            for node in walk.all_nodes(proto)
            if (node.domain, node.op_type) not in local and (walk.domain_of(node) or node.op_type not in OPERATORS)
        )
        if lacking:
            names = ", ".join(f"`{name}`" for name in list(lacking)[:8])
            raise ModelError(
                f"`{model.path}` has operators the backend `inductor` does not import: {names}",
                hint="`-b onnxruntime` runs them",
            )
        check_attributes(proto)
    for spec in model.signature:
        if spec.dtype in ("string", "complex64", "complex128") or spec.dtype.endswith(("int4", "int2", "4_e2m1fn")):
            raise ModelError(f"`{spec.name}` is {spec.dtype}, which its engines do not take", hint="`-b onnxruntime`")
