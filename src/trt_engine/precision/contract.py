"""The precision contract: is a graph, or an engine, what was asked for? With the share, and the nodes that are not.

The source graph says what was meant, the engine's own graph what came of it. Where the engine's graph is ONNX Runtime's, it
is read at its word: an operator between inserted Casts computes in FP32, one whose Q/DQ pairs were not fused computes in
FP32, whatever the source says; why they were not fused follows from where they are placed (`graph.quant_placement`). Of a
TensorRT engine there are its layers, counted by data type (`plans.layers.census`): they are held against what the source
writes, and where they tell too little, that is said.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import ModelProto

from trt_engine.engine import Passport, Share
from trt_engine.errors import PrecisionError
from trt_engine.graph import walk
from trt_engine.graph.census import Layer, is_dequantize, is_quantize, layers_of
from trt_engine.graph.flops import Cost
from trt_engine.plans.layers import UNKNOWN

__all__ = ["LEAST_QUANTIZED", "LEAST_SHARE", "Miss", "Proof", "prove", "prove_engine", "prove_passport"]

log = logging.getLogger(__name__)

LEAST_SHARE = 0.95
"""Of all multiply-adds for a floating-point type; of those the source graph quantizes for a quantized one."""
LEAST_QUANTIZED = 0.5
"""Of the multiply-adds of layers with weights that a graph must quantize: whoever quantizes leaves some out on purpose."""
_QUANTIZED = ("int8", "fp8", "int4", "nvfp4", "mxfp8")
_WEIGHT_ONLY = ("int4",)
"""Types of weights alone: their layers compute in a floating-point type, and are told by their weights."""
_WEIGHTED = {
    "Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1, "FusedConv": 1, "FusedMatMul": 1, "FusedGemm": 1,
    "QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3, "ConvInteger": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1, "MatMulNBits": 1,
}  # fmt: skip
"""Layers that can have weights, and the input where they stand."""
_SHOWN = 4
_BLOCKED = "_nchwc"
"""How ONNX Runtime's names of convolutions in its blocked layout end."""
_OWN_CAST = "InsertedPrecisionFreeCast_"
"""How ONNX Runtime names the Casts it puts around an operator without a kernel for the type."""


@dataclass(frozen=True, slots=True)
class Miss:
    """One layer that does not compute in what was asked for."""

    node: str
    op: str
    found: str
    share: float
    """Of the multiply-adds that count."""
    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether the contract holds, by how much, and what does not keep it."""

    asked: str
    kept: bool
    share: float
    """Of the multiply-adds that count (of layers where there are none) in the type asked for."""
    by: str
    """What was weighed: `multiply-adds`, `layers`."""
    found: dict[str, float]
    """The share of each type."""
    misses: tuple[Miss, ...]
    """The heaviest first. A contract can hold with some: the threshold is `LEAST_SHARE`."""
    judged: bool = True
    """False where the engine does not tell enough of its layers: then `kept` speaks of the graph it was built from."""
    remark: str | None = None
    """What the shares alone do not say."""

    def describe(self) -> str:
        """`asked for fp16, found fp16 60 %, fp32 40 % of multiply-adds: ...`."""
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.found.items()) or "nothing countable"
        text = f"asked for {self.asked}, found {shares}" + (f" of {self.by}" if self.found else "")
        reasons = "; ".join(part for part in (self.remark, self.why()) if part)
        return f"{text}: {reasons}" if reasons else text

    def why(self) -> str:
        """The reasons, each with how many layers and some of their names."""
        reasons: dict[str, list[Miss]] = {}
        for miss in self.misses:
            reasons.setdefault(miss.reason, []).append(miss)
        parts = []
        for reason, misses in reasons.items():
            names = ", ".join(f"`{miss.node}` ({miss.op})" for miss in misses[:_SHOWN])
            more = f" and {len(misses) - _SHOWN} more" if len(misses) > _SHOWN else ""
            count = f" ({len(misses)} layers)" if len(misses) > _SHOWN else ""
            parts.append(f"{reason}{count}: {names}{more}")
        return "; ".join(parts)

    def require(self, hint: str) -> None:
        """`PrecisionError` (exit 6) unless the contract holds."""
        if not self.kept:
            raise PrecisionError(self.describe(), hint=hint)


def prove(
    asked: str,
    graph: ModelProto,
    *,
    cost: Cost | None = None,
    excluded: Collection[str] = (),
    tf32: bool = False,
) -> Proof:
    """Whether a graph, as it is written, computes in `asked`. `excluded` are nodes that somebody left out on purpose."""
    layers = list(layers_of(graph, cost, tf32=tf32))
    counted = [layer for layer in _counted(asked, layers, graph) if walk.label(layer.step.node) not in excluded]
    left_out = [layer for layer in _counted(asked, layers, graph) if walk.label(layer.step.node) in excluded]
    shares, by = _shares(counted)
    total = sum(_weight(layer, by) for layer in counted)
    misses = [
        Miss(
            walk.label(layer.step.node),
            layer.step.node.op_type,
            layer.kind,
            _weight(layer, by) / total if total else 0.0,
            f"{layer.kind} in the graph itself" + (f", where {layer.partly}" if layer.partly else ""),
        )
        for layer in counted
        if not _is(asked, layer.kind)
    ]
    misses += [
        Miss(walk.label(layer.step.node), layer.step.node.op_type, layer.kind, 0.0, "excluded on purpose")
        for layer in left_out
        if not _is(asked, layer.kind)
    ]
    return _proof(asked, shares, by, misses, LEAST_QUANTIZED if asked in _QUANTIZED else LEAST_SHARE)


def prove_engine(
    asked: str,
    source: ModelProto,
    built: ModelProto | None,
    found: Mapping[str, Share],
    *,
    providers: Sequence[str] = (),
    compiled: bool = False,
    excluded: Collection[str] = (),
    tf32: bool = False,
    not_fused: Mapping[str, str] | None = None,
) -> Proof:
    """Whether an engine computes in `asked`: by its own graph where it is one, else by the census its backend gives.

    `compiled` says that the graph is handed to a compiler that fuses Q/DQ pairs itself (TensorRT's provider). `not_fused`
    says by node why quantised layers of the source are not fused there (`PlacedGraph.refusals`).
    """
    if built is None:
        return _by_census(asked, found, source, excluded)
    meant = prove(asked, source, excluded=excluded, tf32=tf32)
    literal = not compiled and asked not in _WEIGHT_ONLY
    layers = list(layers_of(built, tf32=tf32, literal=literal))
    counted = _counted(asked, layers, built)
    counted = [layer for layer in counted if walk.label(layer.step.node) not in excluded]
    shares, by = _shares(counted)
    widened = any(_OWN_CAST in name for place in walk.nodes(built) for name in place.node.output)
    off_in_source = {miss.node: miss for miss in meant.misses}
    total = sum(_weight(layer, by) for layer in counted)
    has_pairs = any(is_quantize(place.node) or is_dequantize(place.node) for place in walk.nodes(source))
    keeps_pairs = any(is_dequantize(place.node) for place in walk.nodes(built))
    where = ",".join(providers) or "the backend"
    misses = []
    for layer in counted:
        if _is(asked, layer.kind):
            continue
        name = walk.label(layer.step.node).replace(_OWN_CAST, "")
        if name in off_in_source:
            reason = off_in_source[name].reason
        elif asked in _QUANTIZED and not has_pairs:
            reason = f"{layer.kind} in the graph itself, which has no Q/DQ"
        elif asked in _QUANTIZED and not keeps_pairs:
            reason = f"runs in {layer.kind}: {where} folded the Q/DQ pairs away"
        elif asked in _QUANTIZED:
            why = (not_fused or {}).get(name.removesuffix(_BLOCKED))
            reason = f"runs in {layer.kind}: {where} did not fuse its Q/DQ pairs" + (f", {why}" if why else "")
        else:
            reason = f"runs in {layer.kind}: {where} has no {asked} kernel for it" + (
                " and puts Casts around it" if widened else ""
            )
        misses.append(
            Miss(name, layer.step.node.op_type, layer.kind, _weight(layer, by) / total if total else 0.0, reason)
        )
    if asked in _QUANTIZED and not meant.kept:
        return meant
    return _proof(asked, shares, by, misses, LEAST_SHARE * (meant.share if asked in _QUANTIZED else 1))


def _proof(asked: str, shares: Mapping[str, float], by: str, misses: Sequence[Miss], least: float) -> Proof:
    share = sum(part for kind, part in shares.items() if _is(asked, kind))
    return Proof(
        asked=asked,
        kept=bool(shares) and share >= least - 1e-9,
        share=share,
        by=by,
        found=_sorted(shares),
        misses=tuple(sorted(misses, key=lambda miss: -miss.share)),
    )


def prove_passport(asked: str, passport: Passport) -> Proof:
    """Whether an engine that was built some time ago computes in `asked`, by what its passport says.

    One that was built to be `asked` was proved then. Of any other there is its census: without the graph it was built from,
    nothing tells which layers were left out on purpose.
    """
    found, notes = passport.precision, passport.build.notes
    shares = {name: share.layers if share.macs is None else share.macs for name, share in found.running.items()}
    shares = {name: share for name, share in shares.items() if share}
    by = "layers" if any(share.macs is None for share in found.running.values()) else "multiply-adds"
    if notes.get("tf32") == "on" and "fp32" in shares:  # a builder's switch: no layer tells it
        shares["tf32"] = shares.get("tf32", 0.0) + shares.pop("fp32")
    share, told = shares.get(asked, 0.0), sum(part for name, part in shares.items() if name != UNKNOWN)
    built_for = found.asked == asked
    least = LEAST_QUANTIZED if asked in _QUANTIZED else LEAST_SHARE
    possible = share + shares.get(UNKNOWN, 0.0) if told else 1.0
    if not built_for and share < least - 1e-9 <= possible:
        remark = f"the engine tells the types of {100 * told:.0f} % of its layers only, and was not built for {asked}"
        return Proof(asked, True, share, by, _sorted(shares), (), judged=False, remark=remark)
    return Proof(asked, built_for or share >= least - 1e-9, share, by, _sorted(shares), ())


_UNSEEN = {"tf32": "fp32", "mxfp8": "fp8"}
"""What a layer is told as where it may be the other: TF32 shows in some kernels' names only, block scales not always."""
_FEW = 0.5
"""Of layers: fewer than this in a floating-point type and an engine is not of it. Layers weigh differently, so between
this and `LEAST_SHARE` their number alone proves nothing."""
_HARDLY_ANY = 1e-3


def _by_census(asked: str, found: Mapping[str, Share], source: ModelProto, excluded: Collection[str]) -> Proof:
    """For an engine whose graph cannot be read: the backend's count against what the source writes.

    A quantized type must hold its share of what the source quantizes of the whole, because a census counts layers
    without weights too; a floating-point one `LEAST_SHARE` of everything that nobody left out on purpose.
    """
    seen_as = {asked, _UNSEEN.get(asked, asked)}
    meant = prove(asked, source, excluded=excluded, tf32=asked == "tf32")
    shares = {name: share.layers if share.macs is None else share.macs for name, share in found.items()}
    shares = {name: share for name, share in shares.items() if share}
    by = "layers" if any(share.macs is None for share in found.values()) else "multiply-adds"
    share, unknown = sum(part for name, part in shares.items() if name in seen_as), shares.get(UNKNOWN, 0.0)
    quantized = asked in _QUANTIZED
    least = LEAST_SHARE
    if by == "multiply-adds" and (quantized or excluded):
        least *= _written(asked, source)
    surely_less = least if by == "multiply-adds" else _HARDLY_ANY if quantized else _FEW
    if not shares.keys() - {UNKNOWN}:
        return _unjudged(meant, "the engine does not tell the types of its layers")
    if quantized and not meant.kept:
        return replace(meant, found=_sorted(shares), by=by)
    kept = share >= least - 1e-9
    if not kept and share + unknown >= surely_less - 1e-9:
        little = (
            f"the engine tells the types of {100 * (1 - unknown):.0f} % of its {by} only"
            if unknown
            else "the engine's layers cannot be matched with the graph's, and their number alone proves nothing"
        )
        return _unjudged(replace(meant, found=_sorted(shares), by=by), little)
    other = None if kept or not meant.kept else f"the graph is {asked}, the engine that was built from it is not"
    return Proof(asked, kept, share, by, _sorted(shares), meant.misses, remark=other)


def _unjudged(meant: Proof, reason: str) -> Proof:
    written = "is" if meant.kept else "is not"
    return replace(
        meant, judged=False, remark=f"{reason}; judged by the graph it was built from, which {written} {meant.asked}"
    )


def _written(asked: str, source: ModelProto) -> float:
    """The share of all multiply-adds of a graph that it writes in that type."""
    shares, _ = _shares(list(layers_of(source, tf32=asked == "tf32")))
    return shares.get(asked, 0.0)


def _sorted(shares: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _is(asked: str, kind: str) -> bool:
    return kind == asked


def _counted(asked: str, layers: Sequence[Layer], graph: ModelProto) -> list[Layer]:
    """The layers the contract is about: for a quantized type those that can be quantized, with weights of their own."""
    if asked not in _QUANTIZED:
        return list(layers)
    constants = _constants(graph)
    return [
        layer
        for layer in layers
        if (at := _WEIGHTED.get(layer.step.node.op_type)) is not None
        and len(layer.step.node.input) > at
        and layer.step.node.input[at] in constants
        and not (asked in _WEIGHT_ONLY and "Conv" in layer.step.node.op_type)
    ]


def _constants(graph: ModelProto) -> set[str]:
    """The tensors that are worked out from stored ones alone."""
    known = {item.name for part in walk.graphs(graph) for item in part.initializer}
    for place in walk.nodes(graph):
        if all(name in known for name in place.node.input if name) and (
            any(place.node.input) or place.node.op_type == "Constant"
        ):
            known.update(place.node.output)
    return known


def _weight(layer: Layer, by: str) -> float:
    return layer.macs if by == "multiply-adds" else 1


def _shares(layers: Sequence[Layer]) -> tuple[dict[str, float], str]:
    by = "multiply-adds" if any(layer.macs for layer in layers) else "layers"
    total = sum(_weight(layer, by) for layer in layers)
    counted: Counter[str] = Counter()
    for layer in layers:
        counted[layer.kind] += int(_weight(layer, by))
    return {kind: amount / total for kind, amount in counted.items() if amount}, by
