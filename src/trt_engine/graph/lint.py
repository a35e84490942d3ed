"""`lint`: the rules of `inspect` plus deeper ones: sizes frozen in constants, overflowing shape arithmetic, name
clashes, layouts with needless transposes, unused values, operator support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import ModelProto, TensorProto

from trt_engine.errors import ModelError
from trt_engine.graph import operator_support, operators
from trt_engine.graph.cost import model_cost
from trt_engine.graph.dtype_breakdown import compute_layers, count_parameters, shares_by_dtype
from trt_engine.graph.lint_rules import dtype_rules, graph_rules, shape_rules
from trt_engine.graph.lint_rules.model_view import ModelView, Rule, analyse, image_input, sort_findings, warning
from trt_engine.graph.lint_rules.shape_rules import nonconforming_nodes
from trt_engine.graph.load import OpenedModel
from trt_engine.graph.module_paths import ModulePaths, add_modules
from trt_engine.graph.operator_support import ParserResult, Target
from trt_engine.graph.shape_inference import flatten, trace
from trt_engine.graph.tensorrt_operators import RTX_RELEASE, tensorrt_version
from trt_engine.records.base import Finding
from trt_engine.records.lint import OperatorSupport
from trt_engine.tensors import Shape, Signature, format_shape

_IMAGE_SIZES = (320, 352, 640, 224, 416, 512, 608, 384, 480, 256, 800, 1024, 1280, 192, 160, 128, 96, 64, 32, 28, 16)
_OTHER_SIZES = (16, 24, 32, 64, 77, 100, 128, 197, 256, 300, 384, 512, 1024, 8, 4)


@dataclass(frozen=True, slots=True)
class LintResult:
    """Findings, and the shapes they were checked at."""

    findings: tuple[Finding, ...]
    operators: tuple[OperatorSupport, ...]
    shapes: dict[str, Shape]
    assumed_shapes: bool
    """True if some dynamic sizes were chosen here."""
    tensorrt: str


def lint_model(
    opened: OpenedModel,
    *,
    shapes: Mapping[str, Shape] | None = None,
    target: Target = "all",
    tensorrt: str | None = None,
    rtx: bool = False,
    parser_result: ParserResult | None = None,
) -> LintResult:
    """Findings of `inspect` and lint rules, errors first, and operator support.

    Traced at `shapes`; missing sizes are as declared, batch 1, and dynamic ones a size at which the graph fits. `tensorrt`
    is the release to check against (default: the installed one, else the newest known); `rtx` checks against TensorRT-RTX,
    whose parser is that of `RTX_RELEASE`. Results of a real parser (`parser_result`) replace the published lists. Raises
    `UsageError` for a `tensorrt` before 10.0.
    """
    model, proto = opened.model, opened.model.proto
    version = tensorrt_version(tensorrt or (RTX_RELEASE if rtx else None))
    given = {name: tuple(sizes) for name, sizes in (shapes or {}).items()}
    sizes, assumed, probes = _choose_shapes(model.signature, proto, given)
    traced = opened.trace_at(sizes)
    gaps = operator_support.unsupported_nodes(proto, traced, version, rtx=rtx)
    if parser_result is not None:
        gaps = parser_result.merge(gaps)
    parsed = parser_result is not None and parser_result.complete
    view = analyse(
        model, traced, sizes,
        given=frozenset(given),
        target=target, tensorrt=version, rtx=rtx, assumed_shapes=assumed, probes=tuple(probes), gaps=gaps, parsed=parsed,
    )  # fmt: skip
    found = [*apply_rules(view)]
    if {fact.elem for step in flatten(traced.nodes) for fact in step.outputs} & _HALF_TYPES:
        layers = list(compute_layers(proto, model_cost(proto, traced=traced)))
        found += dtype_rules.fp32_islands(layers, shares_by_dtype(layers, count_parameters(model.graph)))
    try:
        operators.check_nodes(model.graph)
    except ModelError as error:  # a node violates its operator's schema: other rules do not run on such a graph
        found.append(Finding("broken-node", "error", f"`{model.path.name}` {error.message}", hint=error.hint))
    else:
        found += apply_rules(view, _LINT_RULES)
    named = {(item.code, item.location) for item in found}
    found = [item for item in found if (_SUPERSEDED_BY.get(item.code), item.location) not in named]
    found = [item for item in found if item.code not in _NOT_FOR[target]]
    if target == "onnxruntime":
        found = [replace(item, severity="error") if item.code in _ONNXRUNTIME_ERRORS else item for item in found]
    findings = add_modules(sort_findings(found), ModulePaths(proto), "location")
    return LintResult(findings, operator_support.support_rows(traced, gaps), dict(sizes), assumed, version)


_HALF_TYPES = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
_SUPERSEDED_BY = {"batch-folded": "batch-lost", "shape-conflict": "index-type"}
"""A code that is superseded by another one at the same node."""


def _choose_shapes(
    signature: Signature, proto: ModelProto, given: Mapping[str, Shape]
) -> tuple[dict[str, Shape], bool, list[Finding]]:
    """Shape of every input, whether some sizes were chosen here, and findings for dynamic sizes that fit at one value
    only."""
    groups = _axis_groups(signature, given)
    picked = {key: candidates[0] for key, (_, candidates) in groups.items()}

    def at(sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {
            spec.name: given.get(spec.name)
            or tuple(
                size if size >= 0 else sizes.get(_axis_group(signature, spec.name, axis), 1)
                for axis, size in enumerate(spec.shape)
            )
            for spec in signature.inputs
        }

    found = []
    for key, (axes, candidates) in groups.items():
        bad = nonconforming_nodes(trace(proto, at(picked)))
        beside = nonconforming_nodes(trace(proto, at(picked | {key: candidates[1]})))
        if not bad and not beside:
            continue
        fitting = [candidates[at_] for at_, miss in ((0, bad), (1, beside)) if not miss]
        if not fitting:
            fitting = [
                size
                for size in candidates[2:]
                if not shape_rules.nonconforming_nodes(trace(proto, at(picked | {key: size})))
            ]
            fitting = [size for size in fitting if 4 * size > max(fitting)]  # size 1 fits anything: it broadcasts
        if len(fitting) == 1:
            picked[key] = fitting[0]
            where, why = next(iter((bad or beside).items()))
            fixed = ",".join(f"{name}:{format_shape(shape)}" for name, shape in at(picked).items())
            found.append(
                warning(
                    "baked-size",
                    f"{axes} is dynamic, but of {len(candidates)} sizes tried the graph fits "
                    f"{fitting[0]} alone: at another one `{where}` does not ({why}): anchors, a grid or positions of one "
                    "size are baked in as constants",
                    where,
                    f"fix it where the model is exported, or fix the size: `--shapes {fixed}`",
                )
            )
        elif fitting:
            picked[key] = fitting[0]
    return at(picked), bool(groups), found


def _axis_group(signature: Signature, name: str, axis: int) -> str:
    """Name of a dynamic size: its symbol, `height and width` for both of an image, else its position."""
    image = image_input(signature.inputs)
    spec = signature.input(name)
    if image is not None and name == image.name and axis in (image.image_axes or ()):
        return "the height and width"
    symbol = spec.symbols[axis] if axis < len(spec.symbols) else None
    return f"`{symbol}`" if symbol else f"axis {axis} of `{name}`"


def _axis_groups(signature: Signature, given: Mapping[str, Shape]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dynamic sizes that change together (batches excluded): names and candidate sizes."""
    batches = {_axis_group(signature, spec.name, 0) for spec in signature.inputs if spec.shape and spec.shape[0] < 0}
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in signature.inputs:
        if spec.name in given:
            continue
        for axis in spec.dynamic:
            key = _axis_group(signature, spec.name, axis)
            if axis > 0 and key not in batches:
                candidates = _IMAGE_SIZES if key == "the height and width" else _OTHER_SIZES
                groups[key] = (key if key.startswith("the ") else f"{key} of `{spec.name}`", candidates)
    return groups


_TENSORRT_ONLY = frozenset(
    "not-in-tensorrt tensorrt-too-old limited-in-tensorrt type-not-in-tensorrt no-tensorrt-kernel opset-beyond-tensorrt "
    "ir-beyond-tensorrt parser-ended int64 detr-mask-path deformable-attention".split()
)
_ONNXRUNTIME_ONLY = frozenset(
    "opset-beyond-onnxruntime ir-beyond-onnxruntime no-cpu-kernel no-cuda-kernel tensorrt-only-operator".split()
)
_NOT_FOR: dict[Target, frozenset[str]] = {
    "all": frozenset(),
    "tensorrt": _ONNXRUNTIME_ONLY,
    "onnxruntime": _TENSORRT_ONLY,
}
_ONNXRUNTIME_ERRORS = frozenset("opset-beyond-onnxruntime ir-beyond-onnxruntime tensorrt-only-operator".split())
"""Warnings that become errors for the target ONNX Runtime."""
_MODEL_RULES: tuple[Rule, ...] = (
    graph_rules.check_unknown_operators,
    graph_rules.check_tensorrt_only,
    graph_rules.check_optimised_graph,
    graph_rules.check_onnxruntime_version,
    graph_rules.check_deformable_attention,
    dtype_rules.check_mask_path,
    shape_rules.check_open_sizes,
    shape_rules.check_batch,
    graph_rules.check_nms,
    graph_rules.check_control_flow,
    graph_rules.check_training_mode,
    dtype_rules.check_dtypes,
    dtype_rules.check_int64,
    shape_rules.check_output_ranks,
    graph_rules.check_attention,
    graph_rules.check_external_data,
    dtype_rules.check_fp16_range,
)
"""Rules of `inspect` for known problems of a model, each with its meaning and a remedy; codes are stable."""
_LINT_RULES: tuple[Rule, ...] = (
    dtype_rules.check_input_types,
    dtype_rules.check_index_range,
    lambda view: () if view.parsed else operator_support.opset_findings(view.model, view.tensorrt),
    lambda view: operator_support.unsupported_node_findings(view.gaps, view.target, rtx=view.rtx),
    lambda view: view.probes,
    shape_rules.check_shape_conflicts,
    shape_rules.check_mixed_batch,
    shape_rules.check_folded_batch,
    shape_rules.check_overflow,
    dtype_rules.check_16bit_indices,
    graph_rules.check_unused,
    graph_rules.check_outputs,
    graph_rules.check_layout,
    graph_rules.check_duplicates,
    graph_rules.check_names,
    graph_rules.check_node_order,
)


def apply_rules(view: ModelView, rules: Sequence[Rule] = _MODEL_RULES) -> Iterator[Finding]:
    """Findings of an analysed model by some rules; a plain model has none by those of `inspect`, or `info` only."""
    return (finding for rule in rules for finding in rule(view))
