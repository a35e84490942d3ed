"""Check that a graph or an engine computes in the requested precision; report its share and the violating nodes.

An ONNX Runtime graph is read literally: an op between inserted Casts, or one whose DequantizeLinear was not fused, runs in
FP32; `graph.quant_placement` explains why it was not fused. A TensorRT engine is checked by its layer count per data type
(`trt.layers.dtype_shares`) against the source graph; where too few layers report a type, the check is inconclusive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import ModelProto

from trt_engine.backends.onnxruntime.node_mapping import base_name, map_nodes
from trt_engine.config.precision import QUANTIZED_PRECISIONS
from trt_engine.errors import PrecisionError
from trt_engine.format import join_names
from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import Layer, compute_layers, is_dequantize, is_quantize
from trt_engine.records.passport import DtypeShare, GraphPrecision, Passport
from trt_engine.trt.layers import UNKNOWN

MIN_SHARE = 0.95
"""Required fraction of MACs: of all MACs for a floating-point type, of those the source quantizes for a quantized one."""
MIN_QUANTIZED_SHARE = 0.5
"""Fraction of weighted layers' MACs that a graph must quantize; some layers are excluded deliberately."""
_WEIGHT_ONLY = ("int4",)
"""Weight-only types: their layers compute in floating point and are identified by their weights."""
_WEIGHT_INPUT = {
    "Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1, "FusedConv": 1, "FusedMatMul": 1, "FusedGemm": 1,
    "QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3, "ConvInteger": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1, "MatMulNBits": 1,
}  # fmt: skip
"""Index of the weight input, by operator."""
_MAX_NAMES = 4
_ORT_CAST_PREFIX = "InsertedPrecisionFreeCast_"
"""Prefix of the Casts that ONNX Runtime inserts around an operator without a kernel for the type."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One layer that does not compute in the requested type."""

    node: str
    op: str
    format: str
    share: float
    """Fraction of counted MACs."""
    reason: str


@dataclass(frozen=True, slots=True)
class PrecisionCheck:
    """Result of a precision check: pass or fail, the share, and the violations."""

    requested: str
    satisfied: bool
    share: float
    """Fraction of counted MACs (of layers where MACs are unknown) in the requested type."""
    weighted_by: str
    """Unit of the shares: `multiply-adds` or `layers`."""
    shares: dict[str, float]
    """Share of each type."""
    violations: tuple[Violation, ...]
    """Largest share first. A check can pass with some: the threshold is `MIN_SHARE`."""
    conclusive: bool = True
    """False where the engine reports too few layer types: `share` then describes the source graph."""
    remark: str | None = None
    """Additional explanation."""

    def describe(self) -> str:
        """`requested fp16, found fp16 60 %, fp32 40 % of multiply-adds: ...`."""
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares.items()) or "nothing countable"
        text = f"requested {self.requested}, found {shares}" + (f" of {self.weighted_by}" if self.shares else "")
        reasons = "; ".join(part for part in (self.remark, self.describe_violations()) if part)
        return f"{text}: {reasons}" if reasons else text

    def describe_violations(self) -> str:
        """The reasons, each with the number of layers and some of their names."""
        reasons: dict[str, list[Violation]] = {}
        for miss in self.violations:
            reasons.setdefault(miss.reason, []).append(miss)
        parts = []
        for reason, misses in reasons.items():
            names = join_names([f"`{miss.node}` ({miss.op})" for miss in misses], _MAX_NAMES)
            count = f" ({len(misses)} layers)" if len(misses) > _MAX_NAMES else ""
            parts.append(f"{reason}{count}: {names}")
        return "; ".join(parts)

    def require(self, hint: str) -> None:
        """Raise `PrecisionError` (exit 6) unless the check passed."""
        if not self.satisfied:
            raise PrecisionError(self.describe(), hint=hint)


def check_graph(
    requested: str,
    graph: ModelProto,
    *,
    excluded: Collection[str] = (),
    tf32: bool = False,
) -> PrecisionCheck:
    """Check that a graph as written computes in `requested`. `excluded` are deliberately excluded nodes."""
    layers = _relevant_layers(requested, list(compute_layers(graph, tf32=tf32)), graph)
    counted = [layer for layer in layers if walk.label(layer.step.node) not in excluded]
    shares, by = _type_shares(counted)
    total = sum(_layer_weight(layer, by) for layer in counted)
    misses = []
    for layer in [*counted, *(layer for layer in layers if walk.label(layer.step.node) in excluded)]:
        label, share, reason = walk.label(layer.step.node), 0.0, "excluded on purpose"
        if label not in excluded:
            share = _layer_weight(layer, by) / total if total else 0.0
            mixed = f", where {layer.mixed_dtype}" if layer.mixed_dtype else ""
            reason = f"{layer.dtype} in the graph itself{mixed}"
        if layer.dtype != requested:
            misses.append(Violation(label, layer.step.node.op_type, layer.dtype, share, reason))
    return _make_check(
        requested, shares, by, misses, MIN_QUANTIZED_SHARE if requested in QUANTIZED_PRECISIONS else MIN_SHARE
    )


def check_engine(
    requested: str,
    source: ModelProto,
    built: ModelProto | None,
    census: Mapping[str, DtypeShare],
    *,
    providers: Sequence[str] = (),
    compiled: bool = False,
    excluded: Collection[str] = (),
    not_fused: Mapping[str, str] | None = None,
) -> PrecisionCheck:
    """Check that an engine computes in `requested`, by its optimized graph or else by its backend's layer count.

    `compiled`: a compiler that fuses Q/DQ pairs itself runs the graph (TensorRT EP). `not_fused`: reason by node why a
    quantized layer is not fused (`PlacedGraph.refusals`).
    """
    if built is None:  # without a readable graph: the backend's layer count against the source graph
        meant = check_graph(requested, source, excluded=excluded, tf32=requested == "tf32")
        reported = check_layers(requested, census, _graph_precision(meant, source, excluded))
        return replace(reported, violations=meant.violations)
    tf32 = "tf32" in census
    meant = check_graph(requested, source, excluded=excluded, tf32=tf32)
    literal = not compiled and requested not in _WEIGHT_ONLY
    layers = list(compute_layers(built, tf32=tf32, literal=literal))
    relevant = _relevant_layers(requested, layers, built)
    sources = map_nodes(built, source)
    names = {id(layer): _source_names(layer, sources) for layer in relevant}
    counted = [layer for layer in relevant if names[id(layer)].isdisjoint(excluded)]
    if requested in QUANTIZED_PRECISIONS:  # of a normalisation alone ONNX Runtime makes a blocked convolution
        others = {walk.label(place.node) for place in walk.nodes(source) if place.node.op_type != "BatchNormalization"}
        counted = [layer for layer in counted if not others.isdisjoint(_made_of(layer, sources) or others)]
    shares, by = _type_shares(counted)
    widened = any(_ORT_CAST_PREFIX in name for place in walk.nodes(built) for name in place.node.output)
    off_in_source = {miss.node: miss for miss in meant.violations}
    total = sum(_layer_weight(layer, by) for layer in counted)
    has_pairs = any(is_quantize(place.node) or is_dequantize(place.node) for place in walk.nodes(source))
    keeps_pairs = any(is_dequantize(place.node) for place in walk.nodes(built))
    where = ",".join(providers) or "the backend"
    misses = []
    for layer in counted:
        if layer.dtype == requested:
            continue
        name = walk.label(layer.step.node).replace(_ORT_CAST_PREFIX, "")
        if name in off_in_source:
            reason = off_in_source[name].reason
        elif requested in QUANTIZED_PRECISIONS and not has_pairs:
            reason = f"{layer.dtype} in the graph itself, which has no Q/DQ"
        elif requested in QUANTIZED_PRECISIONS and not keeps_pairs:
            reason = f"runs in {layer.dtype}: {where} folded the Q/DQ pairs away"
        elif requested in QUANTIZED_PRECISIONS:
            why = next((text for node, text in (not_fused or {}).items() if node in names[id(layer)]), None)
            reason = f"runs in {layer.dtype}: {where} did not fuse its Q/DQ pairs" + (f", {why}" if why else "")
        else:
            reason = f"runs in {layer.dtype}: {where} has no {requested} kernel for it" + (
                " and puts Casts around it" if widened else ""
            )
        misses.append(
            Violation(
                name, layer.step.node.op_type, layer.dtype, _layer_weight(layer, by) / total if total else 0.0, reason
            )
        )
    if requested in QUANTIZED_PRECISIONS and not meant.satisfied:
        return meant
    return _make_check(
        requested, shares, by, misses, MIN_SHARE * (meant.share if requested in QUANTIZED_PRECISIONS else 1)
    )


def _source_names(layer: Layer, sources: Mapping[str, Sequence[str]]) -> set[str]:
    """Labels of the source's nodes that an engine's layer stands for: ONNX Runtime renames what it fuses."""
    label = walk.label(layer.step.node)
    return {label, base_name(label), *_made_of(layer, sources)}


def _made_of(layer: Layer, sources: Mapping[str, Sequence[str]]) -> Sequence[str]:
    return sources.get(next(filter(None, layer.step.node.output), ""), ())


def _make_check(
    requested: str, shares: Mapping[str, float], by: str, violations: Sequence[Violation], threshold: float
) -> PrecisionCheck:
    share = shares.get(requested, 0.0)
    return PrecisionCheck(
        requested=requested,
        satisfied=bool(shares) and share >= threshold - 1e-9,
        share=share,
        weighted_by=by,
        shares=_sort_shares(shares),
        violations=tuple(sorted(violations, key=lambda miss: -miss.share)),
    )


def check_passport(requested: str, passport: Passport) -> PrecisionCheck:
    """Check an existing engine by its passport.

    An engine built for `requested` was checked at build time. Any other is checked by its layer count alone: without the
    source graph, deliberate exclusions are unknown.
    """
    found, notes = passport.precision, passport.build.notes
    shares, by = _reported_shares(found.compute_shares)
    if notes.get("tf32") == "on" and "fp32" in shares:  # a builder flag, not visible in layer types
        shares["tf32"] = shares.get("tf32", 0.0) + shares.pop("fp32")
    share, stated = shares.get(requested, 0.0), sum(part for name, part in shares.items() if name != UNKNOWN)
    built_for = found.requested == requested
    least = MIN_QUANTIZED_SHARE if requested in QUANTIZED_PRECISIONS else MIN_SHARE
    possible = share + shares.get(UNKNOWN, 0.0) if stated else 1.0
    if not built_for and share < least - 1e-9 <= possible:
        share_text = f"{100 * stated:.0f} %"
        remark = f"the engine reports the types of only {share_text} of its layers, and was not built for {requested}"
        return PrecisionCheck(requested, True, share, by, _sort_shares(shares), (), conclusive=False, remark=remark)
    return PrecisionCheck(requested, built_for or share >= least - 1e-9, share, by, _sort_shares(shares), ())


_REPORTED_AS = {"tf32": "fp32", "mxfp8": "fp8"}
"""Type that layers may be reported as: TF32 shows only in some kernel names, block scales not always."""
_MIN_LAYER_SHARE = 0.5
"""Below this fraction of layers in a floating-point type the check fails; between it and `MIN_SHARE` it is inconclusive,
since layers differ in cost."""
_MIN_QUANTIZED_LAYERS = 1e-3


def _reported_shares(census: Mapping[str, DtypeShare]) -> tuple[dict[str, float], str]:
    """Share by type of what an engine reports, and its unit."""
    shares = {name: share.layers if share.macs is None else share.macs for name, share in census.items()}
    by = "layers" if any(share.macs is None for share in census.values()) else "multiply-adds"
    return {name: share for name, share in shares.items() if share}, by


def graph_precision(requested: str, source: ModelProto, excluded: Collection[str] = ()) -> GraphPrecision:
    """Properties of the source graph that `check_layers` needs."""
    return _graph_precision(
        check_graph(requested, source, excluded=excluded, tf32=requested == "tf32"), source, excluded
    )


def _graph_precision(found: PrecisionCheck, source: ModelProto, excluded: Collection[str]) -> GraphPrecision:
    written = 1.0  # fraction of all MACs of the graph written in that type
    if excluded or found.requested in QUANTIZED_PRECISIONS:
        shares, _ = _type_shares(list(compute_layers(source, tf32=found.requested == "tf32")))
        written = shares.get(found.requested, 0.0)
    return GraphPrecision(found.satisfied, found.share, found.shares, found.weighted_by, written, bool(excluded))


def check_layers(requested: str, census: Mapping[str, DtypeShare], graph: GraphPrecision) -> PrecisionCheck:
    """Check that an engine computes in `requested`, by its layer count and its source graph.

    A quantized type must reach its share of the source's quantized fraction, because the count includes layers without
    weights; a floating-point type `MIN_SHARE` of everything not deliberately excluded.
    """
    seen_as = {requested, _REPORTED_AS.get(requested, requested)}
    meant = PrecisionCheck(requested, graph.meets_request, graph.share, graph.weighting, graph.macs_by_dtype, ())
    shares, by = _reported_shares(census)
    share, unknown = sum(part for name, part in shares.items() if name in seen_as), shares.get(UNKNOWN, 0.0)
    quantized = requested in QUANTIZED_PRECISIONS
    least = MIN_SHARE
    if by == "multiply-adds" and (quantized or graph.has_exclusions):
        least *= graph.requested_macs
    surely_less = least if by == "multiply-adds" else _MIN_QUANTIZED_LAYERS if quantized else _MIN_LAYER_SHARE
    if not shares.keys() - {UNKNOWN}:
        return _inconclusive(meant, "the engine does not report the types of its layers")
    if quantized and not meant.satisfied:
        return replace(meant, shares=_sort_shares(shares), weighted_by=by)
    kept = share >= least - 1e-9
    if not kept and share + unknown >= surely_less - 1e-9:
        little = (
            f"the engine reports the types of only {100 * (1 - unknown):.0f} % of its {by}"
            if unknown
            else "the engine's layers cannot be matched with the graph's, and their number alone proves nothing"
        )
        return _inconclusive(replace(meant, shares=_sort_shares(shares), weighted_by=by), little)
    other = None if kept or not meant.satisfied else f"the graph is {requested}, the engine built from it is not"
    return PrecisionCheck(requested, kept, share, by, _sort_shares(shares), (), remark=other)


def _inconclusive(source_check: PrecisionCheck, reason: str) -> PrecisionCheck:
    written = "is" if source_check.satisfied else "is not"
    return replace(
        source_check,
        conclusive=False,
        remark=f"{reason}; judged by its source graph, which {written} {source_check.requested}",
    )


def _sort_shares(shares: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _relevant_layers(requested: str, layers: Sequence[Layer], graph: ModelProto) -> list[Layer]:
    """The layers to check: for a quantized type, those with constant weights."""
    if requested not in QUANTIZED_PRECISIONS:
        return list(layers)
    constants = _constant_tensors(graph)
    return [
        layer
        for layer in layers
        if (at := _WEIGHT_INPUT.get(layer.step.node.op_type)) is not None
        and len(layer.step.node.input) > at
        and layer.step.node.input[at] in constants
        and not (requested in _WEIGHT_ONLY and "Conv" in layer.step.node.op_type)
    ]


def _constant_tensors(graph: ModelProto) -> set[str]:
    """The tensors computed from constants alone."""
    known = {item.name for part in walk.graphs(graph) for item in part.initializer}
    for place in walk.nodes(graph):
        if all(name in known for name in place.node.input if name) and (
            any(place.node.input) or place.node.op_type == "Constant"
        ):
            known.update(place.node.output)
    return known


def _layer_weight(layer: Layer, by: str) -> float:
    return layer.macs if by == "multiply-adds" else 1


def _type_shares(layers: Sequence[Layer]) -> tuple[dict[str, float], str]:
    by = "multiply-adds" if any(layer.macs for layer in layers) else "layers"
    total = sum(_layer_weight(layer, by) for layer in layers)
    counted: Counter[str] = Counter()
    for layer in layers:
        counted[layer.dtype] += int(_layer_weight(layer, by))
    return {kind: amount / total for kind, amount in counted.items() if amount}, by
