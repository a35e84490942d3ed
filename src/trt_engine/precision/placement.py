"""Where Q/DQ goes: which nodes of a graph a format can take, and why the others stay as they are.

Only linear operators with constant weights are quantised, and only their own inputs: a scale never reaches a Concat whose
parts live in different ranges, and nothing stands between a convolution, its normalisation and its activation.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trt_engine.errors import UsageError
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.module_paths import names_of
from trt_engine.graph.trace import Fact, attributes, trace
from trt_engine.precision.formats import Format
from trt_engine.precision.surgery import Weights
from trt_engine.tensors import Shape, closest, format_shape

__all__ = ["BLOCKS", "Exclusions", "Left", "Placement", "Site", "given_block", "place"]

CONVOLUTIONS = ("Conv", "ConvTranspose")
PRODUCTS = ("MatMul", "Gemm")
LINEAR = frozenset((*CONVOLUTIONS, *PRODUCTS))
_LAYOUT = frozenset("Reshape Transpose Squeeze Unsqueeze Flatten Identity Split Cast".split())
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
BLOCKS = (128, 64, 32, 16)
"""What INT4 blocks may be when none is asked for, the largest that divides first."""


@dataclass(frozen=True, slots=True)
class Exclusions:
    """What the caller wants left as it is."""

    nodes: Sequence[str] = ()
    types: Sequence[str] = ()
    patterns: Sequence[str] = ()
    """Shell patterns over the names of nodes and of their PyTorch modules, as `/head/*` and `layer4.*`."""

    def reason(self, node: NodeProto) -> str | None:
        """Why a node is left, or None."""
        names = names_of(node)
        if not set(self.nodes).isdisjoint(names):
            return "excluded by name"
        if node.op_type in self.types:
            return "excluded by type"
        for pattern in self.patterns:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return f"excluded by `{pattern}`"
        return None

    def check(self, proto: ModelProto) -> None:
        """`UsageError` for a name, type or pattern that fits nothing in the model: a typing error would go unseen."""
        names = {name for place in walk.nodes(proto) for name in names_of(place.node)}
        types = {place.node.op_type for place in walk.nodes(proto)}
        for given, known, flag in ((self.nodes, names, "node"), (self.types, types, "operator type")):
            for item in given:
                if item not in known:
                    raise UsageError(f"the model has no {flag} `{item}` to exclude", hint=closest(item, sorted(known)))
        for pattern in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"no node of the model fits the pattern `{pattern}`", hint="as `/head/*`; `inspect -v`"
                )


@dataclass(frozen=True, slots=True)
class Site:
    """One node that can be quantised: its activation, its weight, and how the weight lies."""

    node: NodeProto
    activation: str
    weight: str
    shape: Shape
    """Of the weight."""
    elem: int
    """ONNX's number for the type the node computes in."""
    channel: int
    """The weight's axis of output channels."""
    reduced: int
    """The weight's axis that is summed over (MatMul, Gemm)."""
    rank: int | None
    """Of the activation."""
    block: int | None = None

    @property
    def label(self) -> str:
        """What a person finds the node by."""
        return walk.label(self.node)

    @property
    def scaled(self) -> int | None:
        """The weight's axis that can have a scale for each channel; None for batched weights, which no kernel takes so."""
        return self.channel if self.node.op_type in CONVOLUTIONS or len(self.shape) == 2 else None

    @property
    def key(self) -> str:
        """What no other node of the graph has: its output."""
        return str(self.node.output[0])


@dataclass(frozen=True, slots=True)
class Left:
    """One linear node that stays as it is, and why."""

    node: str
    op: str
    reason: str


@dataclass(slots=True)
class Placement:
    """The nodes to quantise, the linear nodes left, and what is known of every tensor."""

    sites: list[Site]
    left: list[Left]
    facts: Mapping[str, Fact] = field(default_factory=dict)

    @property
    def activations(self) -> list[str]:
        """The tensors whose ranges matter, each once, in order."""
        return list(dict.fromkeys(site.activation for site in self.sites))


def place(
    proto: ModelProto,
    form: Format,
    weights: Weights,
    *,
    exclude: Exclusions | None = None,
    block: int | None = None,
    weights_only: bool = False,
    convolutions: bool = False,
) -> Placement:
    """What of the model that format can take.

    `convolutions` lets block formats take convolutions as well, which no kernel does: for emulation alone.
    """
    exclude = exclude or Exclusions()
    exclude.check(proto)
    facts = trace(proto, {}).facts
    makers = {name: node for node in proto.graph.node for name in node.output if name}
    rules = _Rules(form, weights, facts, makers, exclude, block, weights_only, convolutions)
    made = Placement([], [], facts)
    for node in proto.graph.node:
        if node.op_type in LINEAR and not walk.domain_of(node):
            found = rules.judge(node)
            if isinstance(found, Site):
                made.sites.append(found)
            else:
                made.left.append(Left(walk.label(node), node.op_type, found))
    inside = [(place.node, place.owner) for place in walk.nodes(proto) if place.owner is not proto.graph]
    for node, owner in inside:
        if node.op_type in LINEAR and not walk.domain_of(node):
            where = "the body of an If, Loop or Scan" if isinstance(owner, GraphProto) else "a local function"
            made.left.append(Left(walk.label(node), node.op_type, f"it stands in {where}"))
    return made


@dataclass(slots=True)
class _Rules:
    """What makes a node fit a format."""

    form: Format
    weights: Weights
    facts: Mapping[str, Fact]
    makers: Mapping[str, NodeProto]
    exclude: Exclusions
    block: int | None
    weights_only: bool
    convolutions: bool

    def judge(self, node: NodeProto) -> Site | str:
        """The node as a site, or why it is left."""
        if reason := self.exclude.reason(node):
            return reason
        if len(node.input) < 2 or not node.input[1] or node.input[1] not in self.weights:
            return "its weight is computed, not stored"
        activation, weight = node.input[0], node.input[1]
        if activation in self.weights:
            return "both of its sides are stored"
        shape = self.weights.shape(weight) or ()
        elem = self.weights.elem(weight)
        if elem not in _FLOATS:
            return "it computes in a type that is not quantised"
        if 0 in shape:
            return "its weight is empty"
        convolution = node.op_type in CONVOLUTIONS
        if self.form.granularity == "block" and convolution and not self.convolutions:
            return f"`{self.form.name}` has no kernels for convolutions"
        fact = self.facts.get(activation)
        rank = len(fact.shape) if fact is not None and fact.shape is not None else None
        given = attributes(node)
        if convolution:
            channel, reduced = (0, 1) if node.op_type == "Conv" else (1, 0)
        elif len(shape) < 2 or (len(shape) > 2 and self.form.granularity == "block"):
            return f"its weight is {format_shape(shape)}, expected a matrix"
        elif node.op_type == "Gemm" and given.get("transB"):
            channel, reduced = 0, 1
        else:
            channel, reduced = len(shape) - 1, len(shape) - 2
        if given.get("transA"):
            return "its activation is transposed (transA)"
        if reason := self._expectation(activation):
            return reason
        site = Site(node, activation, weight, shape, elem, channel, reduced, rank)
        return self._blocked(site, convolution) if self.form.granularity == "block" else site

    def _expectation(self, activation: str) -> str | None:
        """A linear layer that reads a Softmax weighs probabilities: the box distributions of a detector, for one."""
        name = activation
        for _ in range(8):
            maker = self.makers.get(name)
            if maker is None:
                return None
            if maker.op_type == "Softmax":
                return "it weighs a Softmax (the decoding of a detector's boxes): left in float"
            if maker.op_type not in _LAYOUT or is_quantize(maker) or is_dequantize(maker):
                return None
            name = maker.input[0]
        return None

    def _blocked(self, site: Site, convolution: bool) -> Site | str:
        if convolution:  # emulated alone: blocks lie over whatever one output channel sums, filled up with zeros
            size = self.block or self.form.block
        else:
            length = site.shape[site.reduced]
            size = self._block_of(length)
            if size is None:
                wanted = self.block or self.form.block if self.form.block_fixed or self.block else min(BLOCKS)
                return f"its {length} inputs are not divided by blocks of {wanted}"
            if self.form.bits == 4 and not self.form.block_fixed and (site.shape[0] * site.shape[1]) % 2:
                return "its weight has an odd number of elements, which 4 bits cannot pack"
            if not self.form.weights_only and not self.weights_only and site.rank not in (2, 3):
                rank = "of unknown rank" if site.rank is None else f"of rank {site.rank}"
                return f"its activation is {rank}, and dynamic quantisation takes rank 2 or 3"
        return Site(
            site.node, site.activation, site.weight, site.shape, site.elem, site.channel, site.reduced, site.rank, size
        )

    def _block_of(self, length: int) -> int | None:
        if self.block is not None or self.form.block_fixed:
            size = self.block or self.form.block
            return size if size and length % size == 0 else None
        return next((size for size in BLOCKS if length % size == 0), None)


def given_block(form: Format, block: int | None) -> int | None:
    """The block asked for, checked: `UsageError` for a format that has none or only another."""
    if block is None:
        return None
    if form.granularity != "block":
        raise UsageError(f"`{form.name}` has no blocks", hint="leave `block` out")
    if block < 16 or block & (block - 1):
        raise UsageError(f"a block of {block} is no power of two from 16 on", hint=f"as {form.block}")
    if form.block_fixed and block != form.block:
        raise UsageError(f"`{form.name}` has blocks of {form.block}, not of {block}", hint="leave `block` out")
    return block
