"""Lint rules: dtypes that a target converts or refuses, values outside FP16's range, indices that lose precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import Layer, is_dequantize
from trt_engine.graph.lint_rules.model_view import ModelView, error, info, warning
from trt_engine.graph.shape_inference import TracedNode, dtype_name, flatten, schema_of, typed_attributes
from trt_engine.records.base import Finding
from trt_engine.records.passport import DtypeShare

MASK_REMEDIES = (  # in the order to try
    "export again with the dynamo exporter and `torch.export.Dim('batch', min=1, max=N)` "
    "(TensorRT 10.16.01, torch 2.11, transformers 5.5 or newer)",
    "else fold the mask at fixed shapes, which `trt-engine build` does by itself after that failure: one engine for each "
    "batch",
    "else build at optimization level 2",
)


def fp32_islands(layers: Iterable[Layer], shares: Mapping[str, DtypeShare]) -> Iterator[Finding]:
    """Layers in a wider type than the 16-bit type most of the graph computes in."""
    most = max(shares, key=lambda kind: (shares[kind].macs, shares[kind].layers), default=None)
    if most not in ("fp16", "bf16"):
        return
    wide = [layer for layer in layers if layer.dtype in ("fp32", "fp64")]
    if not wide:
        return
    nodes = [layer.step.node for layer in sorted(wide, key=lambda layer: -layer.macs)]
    named = [f"`{walk.label(node)}` ({node.op_type})" for node in nodes]
    yield Finding(
        "mixed-precision-island",
        "warning" if any(layer.macs for layer in wide) else "info",
        f"most of the graph computes in {most}, {len(wide)} layers in a wider type: {', '.join(named[:10])}"
        + (f" and {len(named) - 10} more" if len(named) > 10 else ""),
        walk.label(nodes[0]),
        "keep them if value ranges require it (see `trt-engine ranges`); else cast the FP32 model again",
    )


_NEEDS = {  # dtype -> finding, supporting hardware
    TensorProto.FLOAT8E4M3FN: ("fp8", "TensorRT needs compute capability 8.9 or higher (L4, H100), ONNX Runtime's CPU "
                                      "provider reads it at the basic optimization level alone"),
    TensorProto.FLOAT8E5M2: ("fp8-e5m2", "TensorRT does not take E5M2; quantize to E4M3 instead"),
    TensorProto.INT4: ("int4", "weights only: TensorRT 10 or newer, and ONNX Runtime from opset 21"),
    TensorProto.UINT4: ("int4", "weights only: TensorRT takes signed INT4, ONNX Runtime both from opset 21"),
    TensorProto.FLOAT4E2M1: ("fp4", "TensorRT needs compute capability 10.0 or higher (Blackwell) and 10.8 or newer, "
                                    "ONNX Runtime's CPU provider has no kernels for it"),
    24: ("mxfp8", "scales in E8M0: TensorRT needs compute capability 10.0 or higher (Blackwell), ONNX Runtime's CPU "
                  "provider has no kernels for it"),
}  # fmt: skip


def check_dtypes(view: ModelView) -> Iterator[Finding]:
    found: dict[str, tuple[str, int, str]] = {}
    for tensor in walk.tensors(view.model.proto):
        if tensor.data_type in _NEEDS:
            code, text = _NEEDS[tensor.data_type]
            count = found[code][1] if code in found else 0
            found.setdefault(code, (text, 0, tensor.name))
            found[code] = (text, count + 1, found[code][2])
    for name, fact in view.trace.tensors.items():
        if fact.elem in _NEEDS and _NEEDS[fact.elem][0] not in found:
            found[_NEEDS[fact.elem][0]] = (_NEEDS[fact.elem][1], 1, name)
    for code, (text, count, where) in found.items():
        yield Finding(
            f"{code}-type", "info", f"{code.upper()} values ({count} tensors): {text}", where, "trt-engine doctor"
        )
    double = next((name for name, fact in view.trace.tensors.items() if fact.elem == TensorProto.DOUBLE), None)
    if double is not None:
        yield warning(
            "float64",
            "parts of the graph are float64, which TensorRT does not compute in and every device is slow at",
            double,
            "export the network in float32: `model.float()`",
        )


def check_int64(view: ModelView) -> Iterator[Finding]:
    wide = next(
        (
            tensor.name
            for tensor in walk.tensors(view.model.proto)
            if tensor.data_type == TensorProto.INT64 and tensor.dims and max(tensor.dims) > 64
        ),
        None,
    )
    inputs = [spec.name for spec in view.model.signature.inputs if spec.dtype == "int64"]
    if wide or inputs:
        yield info(
            "int64",
            "INT64 " + (f"inputs ({', '.join(f'`{name}`' for name in inputs)})" if inputs else "tables of indices")
            + ": TensorRT before 10 casts them to INT32, and DeepStream feeds no INT64",
            inputs[0] if inputs else wide,
            "nothing to do with TensorRT 10 or newer; else give the exporter INT32 indices",
        )  # fmt: skip


def check_mask_path(view: ModelView) -> Iterator[Finding]:
    for node in view.nodes:
        if node.op_type != "Resize" or not node.input:
            continue
        cast = view.producer_past_layout(node.input[0])
        if cast is None or cast.op_type != "Cast" or not cast.input:
            continue
        source = view.elem(cast.input[0])
        near = list(view.downstream_nodes(node, 6))
        to_bool = any(
            after.op_type == "Cast" and walk.attributes(after).get("to") == TensorProto.BOOL for after in near
        )
        from_mask = source in (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
        sigmoid = any(after.op_type == "Sigmoid" for after in near)
        if to_bool or sigmoid or (from_mask and view.counts["Softmax"]):
            yield warning(
                "detr-mask-path",
                "a mask is cast and resized inside the graph (Cast, Resize), as DETR exports do: TensorRT 10.16 fuses it "
                "into a ForeignNode it has no implementation for",
                walk.label(node),
                "; ".join(MASK_REMEDIES),
            )
            return


def check_fp16_range(view: ModelView) -> Iterator[Finding]:
    """Constants outside FP16's range that are added, subtracted, selected or clipped with."""
    for graph in walk.graphs(view.model.proto):
        nodes = [node for node in graph.node if node.op_type == "Constant" and node.output]
        constants = [(node.output[0], item.t) for node in nodes for item in node.attribute if item.HasField("t")]
        for name, tensor in (*((item.name, item) for item in graph.initializer), *constants):
            if tensor.data_type != TensorProto.FLOAT or tensor.data_location == TensorProto.EXTERNAL:
                continue
            elements = int(np.prod(tensor.dims)) if tensor.dims else 1
            readers = [node.op_type for node in view.readers.get(name, ()) if not is_dequantize(node)]
            if elements > 64 or not any(op in ("Where", "Add", "Sub", "Mul", "Max", "Min") for op in readers):
                continue
            value = numpy_helper.to_array(tensor)
            if value.size and np.isfinite(value).all() and np.abs(value).max() > 65504:
                yield info(
                    "beyond-fp16",
                    f"the constant `{name}` holds {float(value.flat[np.abs(value).argmax()]):g}, beyond FP16's "
                    "65504: as FP16 it is infinite, and a mask that adds it can end in NaN",
                    name,
                    "keep that part in FP32 when the model is cast, or use -65504 for masks",
                )
                return


_INDEX_INPUTS = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "Scatter": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
    "OneHot": 0,
}


def check_input_types(view: ModelView) -> Iterator[Finding]:
    """Inputs of a type that their operator's schema does not allow, and results declared in another type than theirs."""
    opsets, graphs = view.model.opsets, view.model.graph.graphs
    declared = {
        item.name: item.type.tensor_type.elem_type for graph in graphs for item in (*graph.value_info, *graph.output)
    }
    trusted = {value.name for value in view.model.proto.graph.input} | {
        item.name for graph in graphs for item in graph.initializer
    }
    reported = 0
    for step in flatten(view.trace.nodes):
        node = step.node
        schema = schema_of(node.op_type, "", opsets.get("", 1)) if not walk.domain_of(node) else None
        if schema is None:
            continue
        wrong = next(iter(_wrong_types(step, schema, trusted)), None)
        if wrong is None:
            if walk.label(node) not in view.trace.failures:
                if trusted.issuperset(filter(None, node.input)):
                    yield from _wrong_declarations(step, declared)
                trusted.update(node.output)
            continue
        name, got, allowed, index = wrong
        if (reported := reported + 1) > 10:
            return
        yield Finding(
            "index-type" if index else "wrong-type",
            "error",
            f"{node.op_type} takes {'indices' if index else 'this input'} in {' or '.join(allowed)}, `{name}` at "
            f"`{walk.label(node)}` is {got}: ONNX Runtime refuses the model",
            walk.label(node),
            "cast it in the source (`indices.long()`), then export again" if index else "export the model again",
        )


def _wrong_declarations(step: TracedNode, declared: Mapping[str, int]) -> Iterator[Finding]:
    for name, fact in zip(step.node.output, step.outputs, strict=False):
        stated = declared.get(name, 0)
        if stated and fact.elem and stated != fact.elem and fact.non_tensor_type is None:
            yield error(
                "wrong-type",
                f"`{name}` is declared as {dtype_name(stated)}, and {step.node.op_type} at `{walk.label(step.node)}` makes "
                f"{dtype_name(fact.elem)}: ONNX Runtime refuses the model",
                walk.label(step.node),
                "export the model again; declarations between nodes can be left out (`del model.graph.value_info[:]`)",
            )


def _wrong_types(step: TracedNode, schema: Any, trusted: set[str]) -> Iterator[tuple[str, str, list[str], bool]]:
    formals = schema.inputs
    for at, (name, fact) in enumerate(zip(step.node.input, step.inputs, strict=False)):
        if fact is None or not fact.elem or name not in trusted or fact.non_tensor_type is not None or not formals:
            continue
        formal = formals[min(at, len(formals) - 1)]
        got = dtype_name(fact.elem)
        if f"tensor({got})" not in formal.types:
            allowed = sorted(kind.removeprefix("tensor(").removesuffix(")") for kind in formal.types)
            yield name, got, allowed[:4], _INDEX_INPUTS.get(step.node.op_type) == at


def check_16bit_indices(view: ModelView) -> Iterator[Finding]:
    """Indices that passed through a 16-bit floating-point type."""
    halves: dict[int, tuple[str, int]] = {
        TensorProto.FLOAT16: ("float16", 2048),
        TensorProto.BFLOAT16: ("bfloat16", 256),
    }
    for step in flatten(view.trace.nodes):
        at = _INDEX_INPUTS.get(step.node.op_type)
        if at is None or at >= len(step.node.input):
            continue
        cast = view.producer_past_layout(step.node.input[at])
        if cast is None or cast.op_type != "Cast" or not cast.input:
            continue
        kind = halves.get(view.elem(cast.input[0]))
        if kind is not None and not view.facts[cast.input[0]].is_constant:
            yield warning(
                "index-through-half",
                f"the indices of `{walk.label(step.node)}` ({step.node.op_type}) are computed in {kind[0]}, which holds "
                f"consecutive integers only up to {kind[1]}: larger indices are rounded",
                walk.label(cast),
                f"keep that part in FP32: `trt-engine cast MODEL --to fp16 --exclude-node {walk.label(cast)}`",
            )
            return


def check_index_range(view: ModelView) -> Iterator[Finding]:
    for step in flatten(view.trace.nodes):
        if step.node.op_type not in ("Gather", "GatherElements") or step.folded or len(step.inputs) < 2:
            continue
        data, indices = step.inputs[0], step.inputs[1]
        if data is None or indices is None or not data.shape or indices.value is None or not indices.is_constant:
            continue
        axis = int(typed_attributes(step.node).get("axis", 0))
        if (
            not -len(data.shape) <= axis < len(data.shape)
            or (view.assumed_shapes and not data.is_constant)
            or not indices.value.size
        ):
            continue
        size = data.shape[axis]
        low, high = int(indices.value.min()), int(indices.value.max())
        dynamic = any(spec.shape and spec.shape[0] < 0 for spec in view.model.signature.inputs)
        batched = dynamic and axis % len(data.shape) == 0
        if size >= 0 and not -size <= low <= high < size and (data.is_constant or not batched):
            yield error(
                "index-out-of-range",
                f"`{walk.label(step.node)}` ({step.node.op_type}) takes rows {low} to {high} of an axis of {size}",
                walk.label(step.node),
                "export the model again with the table it was trained with",
            )
            return
