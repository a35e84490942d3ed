"""Known troublemakers of a model, each with what it means and what to do; codes are stable."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.engine import Share
from trt_engine.graph import operators, walk
from trt_engine.graph.census import Layer, is_dequantize
from trt_engine.graph.frozen import before, describe, entered, misfits
from trt_engine.graph.load import beyond_onnxruntime
from trt_engine.graph.trace import Step, Trace, attributes, trace
from trt_engine.model import Model
from trt_engine.records import Finding
from trt_engine.tensors import Shape, TensorSpec, format_shape

__all__ = [
    "MASK_REMEDIES",
    "Rule",
    "Seen",
    "few",
    "findings",
    "image_input",
    "image_layout",
    "image_size",
    "islands",
    "look",
    "ordered",
]

MASK_REMEDIES = (  # in the order to try them
    "export again with the dynamo exporter and `torch.export.Dim('batch', min=1, max=N)` "
    "(TensorRT 10.16.01, torch 2.11, transformers 5.5 or newer)",
    "else fold the mask at fixed shapes, which `trt-engine build` does by itself after that failure: one engine for each "
    "batch",
    "else build at optimization level 2",
)
_LAYOUT = frozenset("Unsqueeze Squeeze Reshape Transpose Identity Expand".split())


@dataclass(slots=True)
class Seen:
    """The model as the rules read it."""

    model: Model
    proto: ModelProto
    trace: Trace
    shapes: Mapping[str, Shape]
    """The sizes the trace was made at; empty when open sizes other than the batch were not given."""
    nodes: list[NodeProto]
    makers: dict[str, NodeProto] = field(default_factory=dict)
    readers: dict[str, list[NodeProto]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def elem(self, name: str) -> int:
        fact = self.trace.facts.get(name)
        return fact.elem if fact is not None else 0

    def first(self, *kinds: str) -> str | None:
        """Label of the first node of these operators."""
        return next((walk.label(node) for node in self.nodes if node.op_type in kinds), None)

    def back(self, name: str) -> NodeProto | None:
        """The node that makes a tensor, past what only lays it out anew."""
        for _ in range(16):
            node = self.makers.get(name)
            if node is None or node.op_type not in _LAYOUT or not node.input:
                return node
            name = node.input[0]
        return None

    def ahead(self, node: NodeProto, most: int = 64) -> Iterator[NodeProto]:
        """What reads a node's results, directly or through others, nearest first; at most so many."""
        queue, met = deque(node.output), set[int]()
        while queue and most > 0:
            for reader in self.readers.get(queue.popleft(), ()):
                if id(reader) not in met:
                    met.add(id(reader))
                    most -= 1
                    yield reader
                    queue.extend(reader.output)


Rule = Callable[[Seen], Iterable[Finding]]


def findings(
    model: Model, proto: ModelProto, traced: Trace | None = None, shapes: Mapping[str, Shape] | None = None
) -> tuple[Finding, ...]:
    """What is worth knowing about the model, errors first. A plain model has none, or `info` alone."""
    seen = look(model, proto, traced, shapes)
    found = [finding for rule in _RULES for finding in rule(seen)]
    return ordered(found)


def look(
    model: Model, proto: ModelProto, traced: Trace | None = None, shapes: Mapping[str, Shape] | None = None
) -> Seen:
    """The model as rules read it; traced at `shapes` unless a trace at them is given."""
    shapes = dict(shapes or {})
    traced = traced if traced is not None else trace(proto, shapes)
    seen = Seen(model, proto, traced, shapes, [place.node for place in walk.nodes(proto)])
    for node in seen.nodes:
        seen.counts[node.op_type] += 1
        for name in node.output:
            seen.makers[name] = node
        for name in node.input:
            seen.readers.setdefault(name, []).append(node)
    return seen


def ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings."""
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda item: order[item.severity]))


def few(found: Iterable[Finding], most: int = 10) -> Iterator[Finding]:
    """At most so many of each code, the last of them saying how many are left out."""
    found = list(found)
    counts = Counter(item.code for item in found)
    met: Counter[str] = Counter()
    for item in found:
        met[item.code] += 1
        if met[item.code] == most < counts[item.code]:
            yield replace(item, message=f"{item.message} (and {counts[item.code] - most} more like this)")
        elif met[item.code] <= most:
            yield item


def islands(layers: Iterable[Layer], shares: Mapping[str, Share]) -> Iterator[Finding]:
    """The layers in a wider type than the 16-bit one that most of a graph computes in."""
    most = max(shares, key=lambda kind: (shares[kind].macs, shares[kind].layers))
    if most not in ("fp16", "bf16"):
        return
    wide = [layer for layer in layers if layer.kind in ("fp32", "fp64")]
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
        "leave them where numbers ask for it (`trt-engine ranges` says); else cast the FP32 model again",
    )


def image_input(inputs: Iterable[TensorSpec]) -> TensorSpec | None:
    """The first input that looks like a batch of images: four dimensions, 1, 3 or 4 channels (or an open number)."""
    return next((spec for spec in inputs if image_layout(spec) is not None), None)


def image_size(spec: TensorSpec) -> tuple[int, int]:
    """Height and width of an image input, -1 where dynamic."""
    at = 1 if image_layout(spec) == "NHWC" else 2
    return spec.shape[at], spec.shape[at + 1]


def image_layout(spec: TensorSpec) -> Literal["NCHW", "NHWC"] | None:
    """Where the channels of a batch of images lie; None when it looks like none."""
    if len(spec.shape) != 4 or not spec.dtype.startswith(("float", "bfloat", "uint8", "int8")):
        return None
    if spec.shape[1] in (1, 3, 4):
        return "NCHW"
    if spec.shape[3] in (1, 3, 4):
        return "NHWC"
    return "NCHW" if spec.shape[1] < 0 else None


# ------------------------------------------------------------------------------------------------ who runs it


def _trt_only(seen: Seen) -> Iterator[Finding]:
    if names := operators.trt_only(seen.proto):
        shown = ", ".join(f"`{name}`" for name in names)
        where = next(walk.label(node) for node in seen.nodes if operators.is_trt_only(node))
        yield Finding(
            "tensorrt-only-operator",
            "warning",
            f"only TensorRT runs {shown}: ONNX Runtime is never given this model",
            where,
            "build it where TensorRT has the plugins (an image of TensorRT that brings them, or `-O plugins=a.so`), or "
            "export (quantize) again from the plain ONNX model",
        )


def _unknown(seen: Seen) -> Iterator[Finding]:
    for item in operators.unknown(seen.proto):
        error = item.error(seen.model.path.name)
        yield Finding("unknown-operator", "error", error.message, item.node, error.hint)


def _optimised(seen: Seen) -> Iterator[Finding]:
    if seen.model.optimised is not None:
        yield Finding(
            "optimised-graph",
            "warning",
            f"a graph ONNX Runtime has optimised for one machine, without a passport ({seen.model.optimised})",
            hint="an engine lost its passport: copy `X.onnx.json` along with it, or build again from the exporter's model",
        )


def _beyond(seen: Seen) -> Iterator[Finding]:
    beyond = beyond_onnxruntime(seen.model)
    hint = "export again with opset 20 and IR version 10, which everything takes, or upgrade ONNX Runtime"
    for code, found, word in (
        ("opset-beyond-onnxruntime", beyond.opset, "opset"),
        ("ir-beyond-onnxruntime", beyond.ir, "IR version"),
    ):
        if found is not None:
            yield Finding(
                code,
                "warning",
                f"{word} {found[0]}: ONNX Runtime {beyond.runtime} takes up to {found[1]} and refuses the model",
                hint=hint,
            )


_NEEDS = {  # element type -> finding, what runs it
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


def _types(seen: Seen) -> Iterator[Finding]:
    found: dict[str, tuple[str, int, str]] = {}
    for tensor in walk.tensors(seen.proto):
        if tensor.data_type in _NEEDS:
            code, text = _NEEDS[tensor.data_type]
            count = found[code][1] if code in found else 0
            found.setdefault(code, (text, 0, tensor.name))
            found[code] = (text, count + 1, found[code][2])
    for name, fact in seen.trace.facts.items():
        if fact.elem in _NEEDS and _NEEDS[fact.elem][0] not in found:
            found[_NEEDS[fact.elem][0]] = (_NEEDS[fact.elem][1], 1, name)
    for code, (text, count, where) in found.items():
        yield Finding(
            f"{code}-type", "info", f"{code.upper()} values ({count} tensors): {text}", where, "trt-engine doctor"
        )
    double = next((name for name, fact in seen.trace.facts.items() if fact.elem == TensorProto.DOUBLE), None)
    if double is not None:
        yield Finding(
            "float64",
            "warning",
            "parts of the graph are float64, which TensorRT does not compute in and every device is slow at",
            double,
            "export the network in float32: `model.float()`",
        )


def _int64(seen: Seen) -> Iterator[Finding]:
    wide = next(
        (
            tensor.name
            for tensor in walk.tensors(seen.proto)
            if tensor.data_type == TensorProto.INT64 and tensor.dims and max(tensor.dims) > 64
        ),
        None,
    )
    inputs = [spec.name for spec in seen.model.signature.inputs if spec.dtype == "int64"]
    if wide or inputs:
        yield Finding(
            "int64",
            "info",
            "INT64 " + (f"inputs ({', '.join(f'`{name}`' for name in inputs)})" if inputs else "tables of indices")
            + ": TensorRT before 10 casts them to INT32, and DeepStream feeds no INT64",
            inputs[0] if inputs else wide,
            "nothing to do with TensorRT 10 or newer; else give the exporter INT32 indices",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ masks of detectors


def _deformable(seen: Seen) -> Iterator[Finding]:
    named = next(
        (node for node in seen.nodes if re.search(r"ms_?deform|multi_?scale_?deformable", node.op_type, re.I)), None
    )
    written_out = seen.counts["GridSample"] >= 2 and seen.counts["Softmax"] >= 1
    if named is not None or written_out:
        yield Finding(
            "deformable-attention",
            "warning",
            "deformable attention"
            + ("" if named is not None else " written out with GridSample")
            + ": TensorRT needs a workspace of 32 GiB for it at batch 64, 8 GiB end in `insufficient workspace`, and its "
            "compiler may be silent for 5 to 10 minutes",
            walk.label(named) if named is not None else seen.first("GridSample"),
            "`--workspace 32GiB` (the default here); do not lower the optimization level before that",
        )


def _mask_path(seen: Seen) -> Iterator[Finding]:
    for node in seen.nodes:
        if node.op_type != "Resize" or not node.input:
            continue
        cast = seen.back(node.input[0])
        if cast is None or cast.op_type != "Cast" or not cast.input:
            continue
        source = seen.elem(cast.input[0])
        near = list(seen.ahead(node, 6))
        to_bool = any(after.op_type == "Cast" and attributes(after).get("to") == TensorProto.BOOL for after in near)
        from_mask = source in (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
        sigmoid = any(after.op_type == "Sigmoid" for after in near)
        if to_bool or sigmoid or (from_mask and seen.counts["Softmax"]):
            yield Finding(
                "detr-mask-path",
                "warning",
                "a mask is cast and resized inside the graph (Cast, Resize), as DETR exports do: TensorRT 10.16 fuses it "
                "into a ForeignNode it has no implementation for",
                walk.label(node),
                "; ".join(MASK_REMEDIES),
            )
            return


def _transformer(seen: Seen) -> Iterator[Finding]:
    fused = [node for node in seen.nodes if re.search(r"attention", node.op_type, re.I)]
    written_out = [
        node
        for node in seen.nodes
        if node.op_type == "Softmax"
        and any(after.op_type in ("MatMul", "Einsum", "FusedMatMul") for after in seen.ahead(node, 4))
        and _reached_from(seen, node, ("MatMul", "Einsum", "FusedMatMul"))
    ]
    if fused or written_out:
        yield Finding(
            "transformer",
            "info",
            f"attention ({len(fused) + len(written_out)} blocks): a dynamic TensorRT engine can be much slower at odd batch "
            "sizes (17 to 19 is documented)",
            walk.label((fused + written_out)[0]),
            "look for them with `trt-engine size --scan`, and prefer powers of two",
        )


def _reached_from(seen: Seen, node: NodeProto, kinds: tuple[str, ...]) -> bool:
    """True when one of these operators makes the node's input within a few steps."""
    front = list(node.input[:1])
    for _ in range(5):
        front = [name for made in (seen.makers.get(name) for name in front) if made is not None for name in made.input]
        if any((made := seen.makers.get(name)) is not None and made.op_type in kinds for name in front):
            return True
    return any((made := seen.makers.get(name)) is not None and made.op_type in kinds for name in node.input[:1])


# ------------------------------------------------------------------------------------------------ shapes


def _open_sizes(seen: Seen) -> Iterator[Finding]:
    image = image_input(seen.model.signature.inputs)
    if image is not None and -1 in image_size(image):
        sizes = [1 if at == 0 else 640 if at > 1 else 3 for at in range(4)]
        sizes = [size if size >= 0 else sizes[at] for at, size in enumerate(image.shape)]
        yield Finding(
            "dynamic-height-width",
            "warning",
            f"height and width of `{image.name}` ({image.describe()}) are open: an engine needs them fixed",
            image.name,
            f"`--shapes {image.name}:{format_shape(sizes)}` with the size the model was trained for "
            "(`image_size` in its configuration)",
        )
    for spec in seen.model.signature.inputs:
        others = [at for at in spec.dynamic if at > 0]
        if spec is not image and others:
            yield Finding(
                "dynamic-sizes",
                "info",
                f"`{spec.name}` ({spec.describe()}) has open sizes beside the batch: an engine needs a range for them",
                spec.name,
                f"`--profile {spec.name}:MIN,OPT,MAX`",
            )


def _batch(seen: Seen) -> Iterator[Finding]:
    inputs = [spec for spec in seen.model.signature.inputs if spec.shape]
    if inputs and all(spec.shape[0] >= 0 for spec in inputs):
        size = inputs[0].shape[0]
        yield Finding(
            "frozen-batch",
            "warning",
            f"the batch is frozen at {size} (`{inputs[0].name}` is {inputs[0].describe()}): `size` cannot scale it, and "
            "one engine serves one batch",
            inputs[0].name,
            "export again with a dynamic batch and an example of 2 rows or more "
            "(`dynamic_shapes=({0: 'batch'},)`), else measure at this batch",
        )
        return
    for spec in seen.model.signature.outputs:
        if inputs and spec.shape and spec.shape[0] >= 0 and all(item.shape[0] < 0 for item in inputs):
            if spec.symbols and inputs[0].symbols and inputs[0].symbols[0] in set(spec.symbols) - {None}:
                continue  # the batch stands further back, as in time-major results
            after = _twice(seen, inputs)
            step = entered(seen.trace, after, spec.name) if after is not None else None
            if step is not None and step.node.op_type in _LISTING:
                continue  # `data-dependent-shape` tells it
            yield _lost(spec.name, f"is {spec.describe()} whatever the batch", step)
            return
    yield from _batch_probe(seen, inputs)


def _twice(seen: Seen, inputs: list[TensorSpec]) -> Trace | None:
    """The trace at two rows where the first was at one; None where the sizes are not known."""
    twice = {}
    for spec in inputs:
        at_one = seen.shapes.get(spec.name)
        if at_one is None or len(at_one) != len(spec.shape):
            return None
        twice[spec.name] = (at_one[0] * 2, *at_one[1:])
    return trace(seen.proto, twice)


def _batch_probe(seen: Seen, inputs: list[TensorSpec]) -> Iterator[Finding]:
    """An output that states a dynamic batch and keeps one size when the inputs have two rows."""
    if not inputs or not all(spec.shape[0] < 0 for spec in inputs):
        return
    after = _twice(seen, inputs)
    if after is None:
        return
    rows = seen.shapes[inputs[0].name][0]
    for spec in seen.model.signature.outputs:
        one, two = seen.trace.facts.get(spec.name), after.facts.get(spec.name)
        if one is None or two is None or one.shape is None or two.shape is None or one.stored:
            continue
        step = entered(seen.trace, after, spec.name)
        if step is not None and step.node.op_type in _LISTING:
            continue
        if not one.shape:
            if step is not None:
                yield _lost(spec.name, "has no axis for it", step)
                return
            continue
        moved = any((a, b) == (rows, 2 * rows) for a, b in zip(one.shape, two.shape, strict=False))
        if one.shape[0] >= 0 and one.shape[0] == two.shape[0] and not moved:
            yield _lost(spec.name, f"keeps the size {one.shape[0]} when the batch doubles", step)
            return
    known = misfits(seen.trace)
    new = {name: why for name, why in misfits(after).items() if name not in known}
    if new:
        name, why = next(iter(new.items()))
        yield _lost(name, f"does not fit at twice the batch ({why})", before(seen.trace, after, name))


_LISTING = frozenset("NonZero Unique Compress NonMaxSuppression".split())
"""Operators whose results are a list of what was found, for all images one."""
_TOGETHER = re.compile(r"Reduce\w+|Arg(Max|Min)|Einsum|MatMul|Gemm")
"""Operators that make one result of a whole axis: nothing is frozen there."""


def _lost(name: str, what: str, step: Step | None = None) -> Finding:
    if step is not None and _TOGETHER.fullmatch(step.node.op_type):
        why = f"{describe(step)} makes one result of the whole batch"
        hint = "nothing, if that is meant; else leave the first axis out of it in the source, and export again"
    else:
        why = "a constant batch is baked inside" + (f", at {describe(step)}" if step is not None else "")
        hint = "export again with an example batch of 2 or more; with 1 exporters freeze it without an error"
    text = f"the inputs have a dynamic batch, but `{name}` {what}: {why}"
    return Finding("batch-lost", "warning", text, walk.label(step.node) if step is not None else name, hint)


def _unknown_rank(seen: Seen) -> Iterator[Finding]:
    for value in seen.proto.graph.output:
        if not value.type.tensor_type.HasField("shape"):
            yield Finding(
                "output-without-shape",
                "info",
                f"the model does not state the shape of its output `{value.name}`",
                value.name,
                "add the shapes with `onnx.shape_inference.infer_shapes`",
            )
            return


_DATA_DEPENDENT = "NonZero Unique Compress StringNormalizer SequenceConstruct".split()


def _control_flow(seen: Seen) -> Iterator[Finding]:
    kinds = [kind for kind in ("If", "Loop", "Scan", "SequenceMap") if seen.counts[kind]]
    if kinds:
        counted = ", ".join(f"{seen.counts[kind]} {kind}" for kind in kinds)
        yield Finding(
            "control-flow",
            "warning",
            f"control flow ({counted}): TensorRT cannot fuse across it, and shapes inside may depend on data",
            seen.first(*kinds),
            "export again with example inputs that let the exporter unroll it (dynamo does), or fold it with `onnxslim`",
        )
    open_shapes = [kind for kind in _DATA_DEPENDENT if seen.counts[kind]]
    if open_shapes:
        yield Finding(
            "data-dependent-shape",
            "warning",
            f"{', '.join(open_shapes)}: sizes are known only after it has run, which costs a synchronization, keeps CUDA "
            "graphs out and needs TensorRT 8.5 or newer",
            seen.first(*open_shapes),
            "a fixed number of results (TopK) keeps the shapes known",
        )


def _nms(seen: Seen) -> Iterator[Finding]:
    if seen.counts["NonMaxSuppression"]:
        yield Finding(
            "nms-inside",
            "warning",
            "NonMaxSuppression inside: the number of detections depends on the image, and so does the time",
            seen.first("NonMaxSuppression"),
            "export without it (`nms=False`) and let DeepStream cluster, or take an NMS-free head, or TensorRT's "
            "`EfficientNMS_TRT` with a fixed maximum",
        )


# ------------------------------------------------------------------------------------------------ what else


def _external(seen: Seen) -> Iterator[Finding]:
    if seen.model.external:
        names = ", ".join(f"`{item.location}`" for item in seen.model.external[:3])
        more = len(seen.model.external) - 3
        yield Finding(
            "external-data",
            "info",
            f"the weights lie beside the model, in {names}{f' and {more} more files' if more > 0 else ''}",
            hint="copy them together with the model; the digest covers them",
        )


_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")


def _training(seen: Seen) -> Iterator[Finding]:
    if where := seen.first(*_RANDOM):
        yield Finding(
            "random-operator",
            "warning",
            "the graph draws random numbers: two runs of one input differ, and so does every comparison",
            where,
            "export in evaluation mode (`model.eval()`), or feed the noise as an input",
        )
    for node in seen.nodes:
        given = attributes(node)
        training = node.op_type == "BatchNormalization" and (given.get("training_mode") or len(node.output) > 1)
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            fact = seen.trace.facts.get(node.input[2])
            training = fact is None or fact.value is None or bool(np.any(fact.value))
        if training:
            yield Finding(
                "training-mode",
                "warning",
                f"{node.op_type} is in training mode: results depend on the rest of the batch",
                walk.label(node),
                "export after `model.eval()`",
            )
            return


def _beyond_fp16(seen: Seen) -> Iterator[Finding]:
    """Constants no FP16 number reaches, where something adds, subtracts, chooses or clips with them."""
    for graph in walk.graphs(seen.proto):
        for tensor in (*graph.initializer, *_constants(graph)):
            if tensor.data_type != TensorProto.FLOAT or tensor.data_location == TensorProto.EXTERNAL:
                continue
            elements = int(np.prod(tensor.dims)) if tensor.dims else 1
            readers = [node.op_type for node in seen.readers.get(tensor.name, ()) if not is_dequantize(node)]
            if elements > 64 or not any(op in ("Where", "Add", "Sub", "Mul", "Max", "Min") for op in readers):
                continue
            try:
                value = numpy_helper.to_array(tensor)
            except (ValueError, TypeError):  # fewer bytes than its shape: who runs it says so
                continue
            if value.size and np.isfinite(value).all() and np.abs(value).max() > 65504:
                yield Finding(
                    "beyond-fp16",
                    "info",
                    f"the constant `{tensor.name}` holds {float(value.flat[np.abs(value).argmax()]):g}, beyond FP16's "
                    "65504: as FP16 it is infinite, and a mask that adds it can end in NaN",
                    tensor.name,
                    "keep that part in FP32 when the model is cast, or use -65504 for masks",
                )
                return


def _constants(graph: GraphProto) -> Iterator[TensorProto]:
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for item in node.attribute:
                if item.HasField("t"):
                    named = TensorProto()
                    named.CopyFrom(item.t)
                    named.name = node.output[0]
                    yield named


_RULES: tuple[Rule, ...] = (
    _unknown,
    _trt_only,
    _optimised,
    _beyond,
    _deformable,
    _mask_path,
    _open_sizes,
    _batch,
    _nms,
    _control_flow,
    _training,
    _types,
    _int64,
    _unknown_rank,
    _transformer,
    _external,
    _beyond_fp16,
)
