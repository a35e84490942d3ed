"""Select the layers that a format can quantize, with the reason for every other layer, and what the caller excludes.

Only linear operators with constant weights are quantized, and only their inputs: no scale spans a Concat of different
ranges, and no Q/DQ separates a convolution, its normalization and its activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trt_engine.config.precision import CastConfig, QuantizeConfig
from trt_engine.errors import UsageError
from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import Weights, consumers_of
from trt_engine.graph.module_paths import names_of
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.precision.formats import Format
from trt_engine.records.precision import UnquantizedNode
from trt_engine.tensors import Shape, format_shape, suggest

CONV_OPS = ("Conv", "ConvTranspose")
MATMUL_OPS = ("MatMul", "Gemm")
LINEAR_OPS = frozenset((*CONV_OPS, *MATMUL_OPS))
_LAYOUT = frozenset("Reshape Transpose Squeeze Unsqueeze Flatten Identity Split Cast".split())
_TO_LOG = ("Add", "Clip", "Max", "Mul", "Div", "Relu", "Abs", "Slice", "Where")
LOG_REASON = "its result goes into a Log, for whose small values 8 bits are too coarse: left in float"
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
INT4_BLOCK_SIZES = (128, 64, 32, 16)
"""Default INT4 block sizes; the largest that divides is used."""


@dataclass(frozen=True, slots=True)
class QuantizableLayer:
    """A quantizable node: its activation, its weight and the weight's layout."""

    node: NodeProto
    activation: str
    weight: str
    weight_shape: Shape
    """Shape of the weight."""
    elem_type: int
    """ONNX element type the node computes in."""
    channel_axis: int
    """Output channel axis of the weight."""
    reduction_axis: int
    """Reduction axis of the weight (MatMul, Gemm)."""
    activation_rank: int | None
    """Rank of the activation."""
    block_size: int | None = None

    @property
    def label(self) -> str:
        """Display name of the node."""
        return walk.label(self.node)

    @property
    def scale_axis(self) -> int | None:
        """Axis of per-channel scales; None for batched weights, which kernels do not support."""
        return self.channel_axis if self.node.op_type in CONV_OPS or len(self.weight_shape) == 2 else None

    @property
    def output_name(self) -> str:
        """Unique key: the output name."""
        return str(self.node.output[0])


@dataclass(slots=True)
class LayerSelection:
    """The nodes to quantize, the other linear nodes, and shape and type of every tensor."""

    layers: list[QuantizableLayer]
    unquantized: list[UnquantizedNode]
    tensor_info: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def activations(self) -> list[str]:
        """The input activations, each once, in order."""
        return list(dict.fromkeys(site.activation for site in self.layers))

    def without(self, reason: Callable[[QuantizableLayer], str | None]) -> LayerSelection:
        """The selection without the layers that `reason` gives a reason against."""
        reasons = [(site, reason(site)) for site in self.layers]
        left = [UnquantizedNode(site.label, site.node.op_type, why) for site, why in reasons if why is not None]
        kept = [site for site, why in reasons if why is None]
        return LayerSelection(kept, [*self.unquantized, *left], self.tensor_info)


def select_layers(
    proto: ModelProto,
    form: Format,
    weights: Weights,
    *,
    exclude: Exclusions | None = None,
    block_size: int | None = None,
    weights_only: bool = False,
    include_convolutions: bool = False,
) -> LayerSelection:
    """Select the layers that the format can quantize.

    `convolutions` selects convolutions for block formats too, for emulation only: no kernels exist.
    """
    exclude = exclude or Exclusions()
    exclude.check(proto)
    facts = trace(proto, {}).tensors
    makers = {name: node for node in proto.graph.node for name in node.output if name}
    readers = consumers_of(proto.graph.node)
    rules = _SelectionRules(
        form, weights, facts, makers, readers, exclude, block_size, weights_only, include_convolutions
    )
    made = LayerSelection([], [], facts)
    places = [item for item in walk.nodes(proto) if item.node.op_type in LINEAR_OPS and not walk.domain_of(item.node)]
    for node, owner, _ in sorted(places, key=lambda place: place.owner is not proto.graph):  # the main graph first
        inner = "the body of an If, Loop or Scan" if isinstance(owner, GraphProto) else "a local function"
        found = rules.select(node) if owner is proto.graph else f"it is in {inner}"
        if isinstance(found, QuantizableLayer):
            made.layers.append(found)
        else:
            made.unquantized.append(UnquantizedNode(walk.label(node), node.op_type, found))
    return made


@dataclass(slots=True)
class _SelectionRules:
    """Decides whether a format can quantize a node."""

    form: Format
    weights: Weights
    tensor_info: Mapping[str, TensorInfo]
    producers: Mapping[str, NodeProto]
    consumers: Mapping[str, list[NodeProto]]
    exclude: Exclusions
    block: int | None
    weights_only: bool
    convolutions: bool

    def select(self, node: NodeProto) -> QuantizableLayer | str:
        """Return the quantizable layer, or the reason against it."""
        if reason := self.exclude.reason(node):
            return reason
        if len(node.input) < 2 or not node.input[1] or node.input[1] not in self.weights:
            return "its weight is computed, not stored"
        activation, weight = node.input[0], node.input[1]
        if activation in self.weights:
            return "both of its sides are stored"
        shape = self.weights.shape(weight) or ()
        elem = self.weights.elem_type(weight)
        if elem not in _FLOATS:
            return "it computes in a type that is not quantised"
        if 0 in shape:
            return "its weight is empty"
        convolution = node.op_type in CONV_OPS
        if self.form.granularity == "block" and convolution and not self.convolutions:
            return f"`{self.form.name}` has no kernels for convolutions"
        fact = self.tensor_info.get(activation)
        rank = len(fact.shape) if fact is not None and fact.shape is not None else None
        given = walk.attributes(node)
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
        if reason := self._softmax_reason(activation):
            return reason
        if self.form.name == "int8" and not self.weights_only and self._feeds_log(node):
            return LOG_REASON
        site = QuantizableLayer(node, activation, weight, shape, elem, channel, reduced, rank)
        return self._with_blocks(site, convolution) if self.form.granularity == "block" else site

    def _softmax_reason(self, activation: str) -> str | None:
        """Reason to skip a layer that weights probabilities, such as a detector's box distributions."""
        name = activation
        for _ in range(8):
            maker = self.producers.get(name)
            if maker is None:
                return None
            if maker.op_type == "Softmax":
                return "it weighs a Softmax (the decoding of a detector's boxes): left in float"
            if maker.op_type not in _LAYOUT or is_quantize(maker) or is_dequantize(maker):
                return None
            name = maker.input[0]
        return None

    def _feeds_log(self, node: NodeProto) -> bool:
        """True for a spectrum on its way to decibels: the Log makes the steps of 8 bits as large as its small values."""
        names = {node.output[0]}
        for _ in range(8):
            readers = [reader for name in names for reader in self.consumers.get(name, ())]
            if any(reader.op_type == "Log" for reader in readers):
                return True
            names = {reader.output[0] for reader in readers if reader.op_type in (*_LAYOUT, *_TO_LOG)}
        return False

    def _with_blocks(self, site: QuantizableLayer, convolution: bool) -> QuantizableLayer | str:
        if convolution:  # emulation only: blocks span an output channel's inputs, zero-padded
            size = self.block or self.form.block
        else:
            length = site.weight_shape[site.reduction_axis]
            size = self._block_size(length)
            if size is None:
                wanted = self.block or self.form.block if self.form.block_fixed or self.block else min(INT4_BLOCK_SIZES)
                return f"its {length} inputs are not divided by blocks of {wanted}"
            if self.form.bits == 4 and not self.form.block_fixed and (site.weight_shape[0] * site.weight_shape[1]) % 2:
                return "its weight has an odd number of elements, which 4 bits cannot pack"
            if not self.form.weights_only and not self.weights_only and site.activation_rank not in (2, 3):
                rank = "of unknown rank" if site.activation_rank is None else f"of rank {site.activation_rank}"
                return f"its activation is {rank}, and dynamic quantisation takes rank 2 or 3"
        return replace(site, block_size=size)

    def _block_size(self, length: int) -> int | None:
        if self.block is not None or self.form.block_fixed:
            size = self.block or self.form.block
            return size if size and length % size == 0 else None
        return next((size for size in INT4_BLOCK_SIZES if length % size == 0), None)


def check_block_size(form: Format, block_size: int | None) -> int | None:
    """Validate the requested block size; raise `UsageError` if the format does not support it."""
    if block_size is None:
        return None
    if form.granularity != "block":
        raise UsageError(f"`{form.name}` has no blocks", hint="leave `block` out")
    if block_size < 16 or block_size & (block_size - 1):
        raise UsageError(f"a block of {block_size} is not a power of two from 16 on", hint=f"as {form.block}")
    if form.block_fixed and block_size != form.block:
        raise UsageError(f"`{form.name}` has blocks of {form.block}, not of {block_size}", hint="leave `block` out")
    return block_size


def skip_output_layers(proto: ModelProto, selection: LayerSelection) -> LayerSelection:
    """Remove the last layer before each output, whose errors (boxes, scores) later layers do not average out.

    Returns the selection unchanged if no layer would remain."""
    leads: set[str] = set()
    heads: set[str] = set()
    sites = {site.output_name for site in selection.layers}
    for node in reversed(proto.graph.node):
        ours = bool(node.output) and node.output[0] in sites
        on = any(name in leads for name in node.output)
        if ours and not on:
            heads.add(node.output[0])
        if on or ours:
            leads.update(node.input[:1] if ours else node.input)
    reason = "it is the last layer before an output (`--quantize-outputs` takes it too)"
    found = selection.without(lambda site: reason if site.output_name in heads else None)
    return found if found.layers else selection


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Nodes that the caller excludes."""

    nodes: Sequence[str] = ()
    """Names of nodes, their modules or their outputs."""
    types: Sequence[str] = ()
    """Operators, with their domain unless it is the standard one."""
    patterns: Sequence[str] = ()
    """Shell patterns for names of nodes and PyTorch modules, as `/head/*` and `layer4.*`."""

    @classmethod
    def of(cls, config: CastConfig | QuantizeConfig) -> Exclusions:
        return cls(config.exclude_nodes, config.exclude_types, config.exclude_patterns)

    def reason(self, node: NodeProto) -> str | None:
        """Why a node is excluded, or None."""
        if not set(self.nodes).isdisjoint(_names(node)):
            return "excluded by name"
        if walk.qualified_name(node) in self.types:
            return f"excluded by operator `{walk.qualified_name(node)}`"
        fitting = (item for item in self.patterns if any(fnmatchcase(name, item) for name in names_of(node)))
        return next((f"excluded by `{pattern}`" for pattern in fitting), None)

    def check(self, proto: ModelProto) -> None:
        """Raise `UsageError` for a name, operator or pattern without a match, such as a typing error."""
        nodes = [place.node for place in walk.nodes(proto)]
        names = {name for node in nodes for name in _names(node)}
        types = {walk.qualified_name(node) for node in nodes}
        for given, known, flag in ((self.nodes, names, "node"), (self.types, types, "operator")):
            for item in given:
                if item not in known:
                    raise UsageError(f"the model has no {flag} `{item}` to exclude", hint=suggest(item, sorted(known)))
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for node in nodes for name in names_of(node)):
                raise UsageError(
                    f"no node name matches the pattern `{pattern}`", hint="`*` matches anything, as in `/head/*`"
                )


def _names(node: NodeProto) -> Iterator[str]:
    yield from names_of(node)
    yield from filter(None, node.output)
