"""Q/DQ written into a graph: activations, weights and scales in the one layout that TensorRT and ONNX Runtime both take.

How NVFP4 and MXFP8 are spelled was read in the public onnx-tensorrt parser (the importers of `TRT_FP4DynamicQuantize`,
`TRT_MXFP8DynamicQuantize` and `TRT_MXFP8DequantizeLinear`) and in NVIDIA Model Optimizer (modelopt/onnx/export).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.config import QuantizeConfig
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.trace import attributes
from trt_engine.precision import awq
from trt_engine.precision.bias import axis_of, correction
from trt_engine.precision.formats import Format, Quantized, clip_search
from trt_engine.precision.formats import quantize as to_format
from trt_engine.precision.opsets import import_domain
from trt_engine.precision.placement import Placement, Site
from trt_engine.precision.surgery import Names, Ops, Weights, drop_unused
from trt_engine.records import QuantizedNode

__all__ = ["Writer", "bias_additions", "narrow"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_SCALES: dict[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
}  # fmt: skip
_FP8 = int(TensorProto.FLOAT8E4M3FN)


class Writer:
    """Puts the format into one graph, in place."""

    def __init__(
        self, proto: ModelProto, form: Format, config: QuantizeConfig, weights: Weights, placement: Placement
    ) -> None:
        self.proto, self.form, self.config, self.weights, self.placement = proto, form, config, weights, placement
        self.ops = Ops(Names(proto))
        self.written: list[QuantizedNode] = []
        self._activations: dict[str, str] = {}
        self._stored: dict[tuple[str, int, bool, str], tuple[str, float, Array | None]] = {}
        self._means: Mapping[tuple[str, int], Array] = {}
        self._additive: dict[str, NodeProto] = {}
        """Additions of a stored vector to a MatMul's result that nobody else reads, by that result's name."""
        self._additions = _residual_additions(proto, placement) if config.residuals else {}
        self._replaced: list[str] = []
        self._amax: Mapping[str, float] = {}
        self._moments: Mapping[str, awq.Moments] = {}
        self._scales: dict[str, Array] = {}

    @property
    def dynamic(self) -> bool:
        """True when activations are quantised, by ranges or while running."""
        return not self.form.weights_only and not self.config.weights_only

    @property
    def activations(self) -> list[str]:
        """The tensors whose ranges must be known."""
        if not self.dynamic or self.form.name == "mxfp8":
            return []
        both = [*self.placement.activations, *(name for names in self._additions.values() for name in names.values())]
        return list(dict.fromkeys(both))

    def planned(self) -> list[QuantizedNode]:
        """What would be quantised, before any data is seen."""
        reads = self.dynamic
        return [
            QuantizedNode(
                site.label, site.node.op_type, self._described(site), site.activation if reads else None, None, 0.0
            )
            for site in self.placement.sites
        ]

    def write(
        self,
        amax: Mapping[str, float],
        moments: Mapping[str, awq.Moments],
        means: Mapping[tuple[str, int], Array] | None = None,
    ) -> None:
        """Quantise every site; the graph is whole again afterwards."""
        self._amax, self._moments, self._means = amax, moments, means or {}
        if self._means:
            self._additive = bias_additions(self.proto, self.weights)
        if self.form.weights_only and moments:
            self._find_scales()
        sites = {site.key: site for site in self.placement.sites}
        nodes: list[NodeProto] = []
        for node in self.proto.graph.node:
            made = node.output[0] if node.output else ""
            if made in sites:
                self._site(sites[made])
            for at, name in self._additions.get(made, {}).items():
                node.input[at] = self._activation(name, self.placement.facts[name].elem)
            nodes.extend(self.ops.taken())
            nodes.append(node)
        self.ops.put(self.proto, nodes)
        drop_unused(self.proto, [*(site.weight for site in self.placement.sites), *self._replaced])
        if any(node.domain == "trt" for node in self.proto.graph.node):
            import_domain(self.proto, "trt")

    def _site(self, site: Site) -> None:
        node, read = site.node, site.activation
        weight, error, lost = self._weight(site)
        if lost is not None:
            self._correct(site, lost)
        if self.dynamic:
            node.input[0] = self._activation(read, site.elem)
        elif read in self._scales:
            node.input[0] = self._scaled(site)
        node.input[1] = weight
        activation, amax = (read, self._amax.get(read)) if self.dynamic else (None, None)
        self.written.append(
            QuantizedNode(walk.label(node), node.op_type, self._described(site), activation, amax, error)
        )

    def _correct(self, site: Site, lost: Array) -> None:
        """Let the layer's bias take up what was lost, where it has one or can have one."""
        mean = self._means.get((site.activation, axis_of(site)))
        added = correction(lost, site, mean) if mean is not None else None
        node = site.node
        if added is None or not added.any():
            return
        kind = helper.tensor_dtype_to_np_dtype(site.elem)
        if node.op_type == "MatMul":
            addition = self._additive.get(node.output[0])
            if addition is None:
                return
            at = 1 if addition.input[0] == node.output[0] else 0
            whole = self.weights.read(addition.input[at]).astype(np.float32)
            if whole.shape != added.shape:
                return
            self._replaced.append(addition.input[at])
            addition.input[at] = self.ops.store((whole + added).astype(kind), f"{addition.input[at]}_corrected")
            return
        given = node.input[2] if len(node.input) > 2 else ""
        scaled = attributes(node)
        if scaled.get("alpha", 1.0) != 1.0 or scaled.get("beta", 1.0) != 1.0 or (given and given not in self.weights):
            return
        if given:
            before = self.weights.read(given).astype(np.float32)
            if before.shape != added.shape:
                return
            self._replaced.append(given)
            added = before + added
        while len(node.input) < 3:
            node.input.append("")
        node.input[2] = self.ops.store(added.astype(kind), f"{given or site.weight}_corrected")

    # -------------------------------------------------------------------------------------------- activations

    def _activation(self, name: str, elem: int) -> str:
        """The tensor after quantisation and back; one pair for all that read it."""
        if name not in self._activations:
            rules = {"nvfp4": self._nvfp4, "mxfp8": self._mxfp8}
            rule = rules.get(self.form.name, self._static)
            self._activations[name] = rule(name, elem)
        return self._activations[name]

    def _static(self, name: str, elem: int) -> str:
        empty = to_format(np.zeros(1, np.float32), self.form, amax=self._amax[name], scale_dtype=_SCALES[elem])
        scale = self.ops.store(empty.scales, f"{name}_scale")
        zero = self.ops.constant(np.zeros((), self.form.numpy), f"zero_{self.form.name}")
        quantized = self.ops.add("QuantizeLinear", [name, scale, zero], name)
        return self.ops.add("DequantizeLinear", [quantized, scale, zero], name)

    def _nvfp4(self, name: str, elem: int) -> str:
        second = to_format(np.zeros(16, np.float32), self.form, amax=self._amax[name]).second
        scale = self.ops.store(np.asarray(second, np.float32), f"{name}_scale")
        given: dict[str, Any] = {"axis": -1, "block_size": 16, "scale_type": int(_FP8)}
        values, scales = self.ops.several("TRT_FP4DynamicQuantize", [name, scale], name, 2, domain="trt", **given)
        self._typed(values, TensorProto.FLOAT4E2M1, name, 1)
        self._typed(scales, _FP8, name, 16)
        first = self.ops.add("DequantizeLinear", [scales, scale], name)
        made = self.ops.add("DequantizeLinear", [values, first], name, axis=-1, block_size=16)
        return self._cast_to(made, elem, name)

    def _mxfp8(self, name: str, elem: int) -> str:
        given: dict[str, Any] = {"axis": -1, "block_size": 32}
        values, scales = self.ops.several(
            "TRT_MXFP8DynamicQuantize", [name], name, 2, domain="trt", output_dtype=int(_FP8), **given
        )
        self._typed(values, _FP8, name, 1)
        self._typed(scales, TensorProto.UINT8, name, 32)
        made = self.ops.add(
            "TRT_MXFP8DequantizeLinear", [values, scales], name, domain="trt", output_dtype=elem, **given
        )
        self._typed(made, elem, name, 1)
        return made

    def _typed(self, name: str, elem: int, like: str, over: int) -> None:
        """State the type of what an operator without a schema gives: like another tensor, blocks of the last axis."""
        fact = self.placement.facts.get(like)
        value = helper.make_tensor_value_info(name, elem, None)
        if fact is not None and fact.shape is not None:
            shape = [size if size >= 0 else None for size in fact.shape]
            if shape[-1] is not None:
                shape[-1] //= over
            value = helper.make_tensor_value_info(name, elem, shape)
        self.proto.graph.value_info.append(value)

    def _cast_to(self, name: str, elem: int, stem: str) -> str:
        return name if elem == TensorProto.FLOAT else self.ops.add("Cast", [name], stem, to=elem)

    # -------------------------------------------------------------------------------------------- weights

    def _weight(self, site: Site) -> tuple[str, float, Array | None]:
        """The name of the weight taken back to floating point, its relative error, and what rounding took away where that
        is to be corrected."""
        turned = site.reduced == 0 and site.node.op_type == "Gemm" and self.form.name in ("nvfp4", "mxfp8")
        key = (site.weight, site.channel, turned, site.activation if site.activation in self._scales else "")
        if key not in self._stored:
            try:
                self._stored[key] = self._quantized(site)
            except UsageError as error:
                raise ModelError(
                    f"the weight `{site.weight}` of `{site.label}` cannot be quantised: {error.message}",
                    hint=f"`--exclude-node {site.label}`",
                ) from error
        if turned:  # the matrix is stored outputs x inputs
            for at in reversed(range(len(site.node.attribute))):
                if site.node.attribute[at].name == "transB":
                    del site.node.attribute[at]
            site.node.attribute.append(helper.make_attribute("transB", 1))
        return self._stored[key]

    def _quantized(self, site: Site) -> tuple[str, float, Array | None]:
        values = self.weights.read(site.weight).astype(np.float32)
        if self.form.name in ("nvfp4", "mxfp8"):
            name, made, error = self._matrix(site, values)
            return name, error, None
        axis = site.reduced if self.form.name == "int4" else site.scaled if self.form.name == "int8" else None
        scale = self._scales.get(site.activation)
        if scale is not None:
            values = values * (scale[None, :] if site.reduced else scale[:, None])
        made = self._rounded(values, site, axis)
        lost = values - made.dequantize()
        size = float(np.linalg.norm(values))
        error = float(np.linalg.norm(lost)) / size if size else 0.0
        kept = lost.astype(np.float32) if self._means else None
        return self._dequantized(site, made), error, kept

    def _rounded(self, values: Array, site: Site, axis: int | None) -> Quantized:
        scale_dtype = _SCALES[site.elem] if self.form.name in ("int8", "fp8", "int4") else None
        if self.config.method == "awq" and site.activation in self._moments:
            square = self._moments[site.activation].mean_square
            if site.activation in self._scales:
                square = square / np.square(self._scales[site.activation], dtype=np.float64)
            square = square[None, :] if axis else square[:, None]
            return clip_search(
                values, self.form, axis=axis, block=site.block, importance=square, scale_dtype=scale_dtype
            )
        return to_format(values, self.form, axis=axis, block=site.block, scale_dtype=scale_dtype)

    def _dequantized(self, site: Site, made: Quantized) -> str:
        """Stored values and scales, and the DequantizeLinear that TensorRT folds into the layer's kernel."""
        stem = site.weight
        given: dict[str, Any] = {} if made.axis is None else {"axis": made.axis}
        if made.block is not None:
            given["block_size"] = made.block
        values = self.ops.store(made.values, f"{stem}_{self.form.name}")
        inputs = [values, self.ops.store(made.scales, f"{stem}_scale")]
        if made.block is None:
            shape = made.scales.shape if made.scales is not None else ()
            inputs.append(self.ops.constant(np.zeros(shape, self.form.numpy), f"zero_{self.form.name}"))
        return self.ops.add("DequantizeLinear", inputs, stem, **given)

    def _matrix(self, site: Site, values: Array) -> tuple[str, Quantized, float]:
        """A weight as outputs x inputs with blocks along the last axis, the one layout public exporters write."""
        stem = site.weight
        given: dict[str, Any] = {"axis": -1, "block_size": site.block}
        turned = site.reduced == 0
        matrix = np.ascontiguousarray(values.T) if turned else values
        made = self._rounded(matrix, site, 1)
        stored_values = self.ops.store(made.values, f"{stem}_{self.form.name}")
        assert made.scales is not None  # block formats have them
        if self.form.name == "nvfp4":
            second = self.ops.store(np.asarray(made.second, np.float32), f"{stem}_scale")
            scales = self.ops.store(made.scales, f"{stem}_block_scales")
            first = self.ops.add("DequantizeLinear", [scales, second], stem)
            name = self.ops.add("DequantizeLinear", [stored_values, first], stem, **given)
            name = self._cast_to(name, site.elem, stem)
        else:
            scales = self.ops.store(made.scales.view(np.uint8), f"{stem}_block_scales")
            name = self.ops.add(
                "TRT_MXFP8DequantizeLinear",
                [stored_values, scales],
                stem,
                domain="trt",
                output_dtype=site.elem,
                **given,
            )
            self.proto.graph.value_info.append(helper.make_tensor_value_info(name, site.elem, matrix.shape))
        if turned and site.node.op_type != "Gemm":
            name = self.ops.add("Transpose", [name], stem, perm=[1, 0])
        return name, made, _relative_error(made, matrix)

    def _described(self, site: Site) -> str:
        form = self.form.name
        if self.form.granularity == "block":
            return f"{form}, blocks of {site.block} along its {site.shape[site.reduced]} inputs"
        if form == "int8" and site.scaled is not None:
            return f"int8, one scale for each of {site.shape[site.channel]} channels (axis {site.channel})"
        return f"{form}, one scale"

    # -------------------------------------------------------------------------------------------- AWQ

    def _find_scales(self) -> None:
        """What to multiply the inputs of weights with: one answer for all that read the same activation."""
        groups: dict[str, list[Site]] = {}
        for site in self.placement.sites:
            groups.setdefault(site.activation, []).append(site)
        for activation, sites in groups.items():
            matrices = []
            for site in sites:
                values = self.weights.read(site.weight).astype(np.float32)
                matrices.append(values.T if site.reduced == 0 else values)
            blocks = [site.block for site in sites]
            scale = awq.input_scale(matrices, self._moments[activation], self.form, blocks)
            if scale is not None:
                self._scales[activation] = scale
        log.info("inputs scaled before rounding at %d of %d activations", len(self._scales), len(groups))

    def _scaled(self, site: Site) -> str:
        name = site.activation
        if name not in self._activations:
            kind = helper.tensor_dtype_to_np_dtype(site.elem)
            inverse = self.ops.store((1 / self._scales[name]).astype(kind), f"{name}_awq")
            self._activations[name] = self.ops.add("Mul", [name, inverse], name)
        return self._activations[name]


def _relative_error(made: Quantized, values: Array) -> float:
    """Root mean square of the difference over that of the values."""
    size = float(np.linalg.norm(values))
    return float(np.linalg.norm(made.dequantize() - values)) / size if size else 0.0


def bias_additions(proto: ModelProto, weights: Weights) -> dict[str, NodeProto]:
    """Additions of a stored vector that are alone in reading what they add it to, by the name of that."""
    readers: dict[str, list[NodeProto]] = {}
    for found in walk.nodes(proto):
        for name in found.node.input:
            readers.setdefault(name, []).append(found.node)
    outputs = {item.name for item in proto.graph.output}
    made = {}
    for node in proto.graph.node:
        if node.op_type != "Add" or walk.domain_of(node) or len(node.input) != 2:
            continue
        for one, other in ((node.input[0], node.input[1]), (node.input[1], node.input[0])):
            if other in weights and one not in outputs and len(readers.get(one, ())) == 1:
                made[one] = node
    return made


def _residual_additions(proto: ModelProto, placement: Placement) -> dict[str, dict[int, str]]:
    """Additions of a quantised layer's result and something else, by node: where the other side stands and its name.

    TensorRT computes such an addition inside the layer's kernel when the other side is quantised as well."""
    made = {site.node.output[0] for site in placement.sites}
    found: dict[str, dict[int, str]] = {}
    for node in proto.graph.node:
        if node.op_type != "Add" or walk.domain_of(node) or len(node.input) != 2:
            continue
        ours = [name in made for name in node.input]
        if sum(ours) != 1:
            continue
        at = ours.index(False)
        fact = placement.facts.get(node.input[at])
        if fact is not None and not fact.stored and fact.shape is not None and len(fact.shape) > 1:
            found[node.output[0]] = {at: node.input[at]}
    return found


# ------------------------------------------------------------------------------------------------ after a cast


def narrow(proto: ModelProto) -> None:
    """Take out the Casts around TensorRT's operators in a graph cast to 16 bits, in place: they read 16-bit tensors as
    they are, and `output_dtype` says what they give."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    readers: dict[str, list[NodeProto]] = {}
    for found in walk.nodes(proto):
        for name in found.node.input:
            readers.setdefault(name, []).append(found.node)
    outputs = {item.name for item in proto.graph.output}
    gone: set[str] = set()
    for node in proto.graph.node:
        if node.op_type in ("TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize"):
            maker = makers.get(node.input[0])
            if maker is not None and maker.op_type == "Cast" and maker.input[0] in makers:
                name = node.input[0]
                node.input[0] = maker.input[0]
                if len(readers[name]) == 1 and name not in outputs:
                    gone.add(name)
        elif node.op_type == "TRT_MXFP8DequantizeLinear" and node.output[0] not in outputs:
            casts = readers.get(node.output[0], [])
            kinds = {attributes(item)["to"] for item in casts if item.op_type == "Cast"}
            if len(kinds) != 1 or any(item.op_type != "Cast" or item.output[0] in outputs for item in casts):
                continue
            kind = kinds.pop()
            next(item for item in node.attribute if item.name == "output_dtype").i = kind
            for cast in casts:
                for reader in readers.get(cast.output[0], []):
                    for at, name in enumerate(reader.input):
                        if name == cast.output[0]:
                            reader.input[at] = node.output[0]
                gone.add(cast.output[0])
            for value in proto.graph.value_info:
                if value.name == node.output[0]:
                    value.type.tensor_type.elem_type = kind
    for at in reversed(range(len(proto.graph.node))):
        if proto.graph.node[at].op_type == "Cast" and proto.graph.node[at].output[0] in gone:
            del proto.graph.node[at]
