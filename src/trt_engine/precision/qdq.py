"""Write Q/DQ into a graph, in the layout that both TensorRT and ONNX Runtime accept.

NVFP4 and MXFP8 follow the public onnx-tensorrt parser (the importers of `TRT_FP4DynamicQuantize`,
`TRT_MXFP8DynamicQuantize` and `TRT_MXFP8DequantizeLinear`) and NVIDIA Model Optimizer (modelopt/onnx/export).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.config.precision import QuantizeConfig
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import (
    NameAllocator,
    NodeBuilder,
    Weights,
    consumers_of,
    drop_unused,
    retain_items,
    set_attribute,
    set_input,
)
from trt_engine.graph.opset import import_domain
from trt_engine.precision import weight_correction
from trt_engine.precision.formats import Format, QuantizedArray, search_clip_range
from trt_engine.precision.formats import quantize as to_format
from trt_engine.precision.layer_selection import LayerSelection, QuantizableLayer
from trt_engine.precision.weight_correction import channel_axis, output_correction
from trt_engine.records.precision import QuantizedNode

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_SCALES: dict[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
}  # fmt: skip
_FP8 = int(TensorProto.FLOAT8E4M3FN)


class QdqWriter:
    """Writes Q/DQ of one format into a graph, in place."""

    def __init__(
        self, proto: ModelProto, form: Format, config: QuantizeConfig, weights: Weights, selection: LayerSelection
    ) -> None:
        self.proto, self.form, self.config, self.weights, self.selection = proto, form, config, weights, selection
        self.ops = NodeBuilder(NameAllocator(proto))
        self.quantized_nodes: list[QuantizedNode] = []
        self._dequantized_names: dict[str, str] = {}
        self._stored_weights: dict[tuple[str, int, bool, str], tuple[str, float, Array | None]] = {}
        self._means: Mapping[tuple[str, int], Array] = {}
        self._bias_adds: dict[str, NodeProto] = {}
        """Bias Adds after a MatMul without other consumers, by the MatMul's output."""
        self._residual_adds = _find_residual_adds(proto, selection) if config.quantize_residuals else {}
        self._unused: list[str] = []
        self._amax: Mapping[str, float] = {}
        self._channel_stats: Mapping[str, weight_correction.ChannelStats] = {}
        self._awq_scales: dict[str, Array] = {}

    @property
    def quantizes_activations(self) -> bool:
        """True if activations are quantized, statically or dynamically."""
        return not self.form.weights_only and not self.config.weights_only

    @property
    def range_tensors(self) -> list[str]:
        """The tensors whose ranges are needed."""
        if not self.quantizes_activations or self.form.name == "mxfp8":
            return []
        both = [
            *self.selection.activations,
            *(name for names in self._residual_adds.values() for name in names.values()),
        ]
        return list(dict.fromkeys(both))

    def plan(self) -> list[QuantizedNode]:
        """The layers to be quantized, before calibration."""
        reads = self.quantizes_activations
        return [
            QuantizedNode(
                site.label, site.node.op_type, self._describe(site), site.activation if reads else None, None, 0.0
            )
            for site in self.selection.layers
        ]

    def write(
        self,
        amax: Mapping[str, float],
        stats: Mapping[str, weight_correction.ChannelStats],
        means: Mapping[tuple[str, int], Array] | None = None,
    ) -> None:
        """Quantize every layer.

        `amax` are magnitudes by tensor name, `means` those of the inputs by name and axis, float64 `[channels]`.
        """
        self._amax, self._channel_stats, self._means = amax, stats, means or {}
        if self._means:
            self._bias_adds = find_bias_adds(self.proto, self.weights)
        if self.form.weights_only and stats:
            self._search_awq_scales()
        sites = {site.output_name: site for site in self.selection.layers}
        nodes: list[NodeProto] = []
        for node in self.proto.graph.node:
            made = node.output[0] if node.output else ""
            if made in sites:
                self._quantize_layer(sites[made])
            for at, name in self._residual_adds.get(made, {}).items():
                node.input[at] = self._add_qdq(name, self.selection.tensor_info[name].elem)
            nodes.extend(self.ops.take_nodes())
            nodes.append(node)
        self.ops.replace_nodes(self.proto, nodes)
        drop_unused(self.proto, [*(site.weight for site in self.selection.layers), *self._unused])
        if any(node.domain == "trt" for node in self.proto.graph.node):
            import_domain(self.proto, "trt")

    def _quantize_layer(self, site: QuantizableLayer) -> None:
        node, read = site.node, site.activation
        weight, error, lost = self._quantize_weight(site)
        if lost is not None:
            self._correct_bias(site, lost)
        if self.quantizes_activations:
            node.input[0] = self._add_qdq(read, site.elem_type, site)
        elif read in self._awq_scales:
            node.input[0] = self._apply_awq_scale(site)
        node.input[1] = weight
        activation, amax = (read, self._amax.get(read)) if self.quantizes_activations else (None, None)
        self.quantized_nodes.append(
            QuantizedNode(walk.label(node), node.op_type, self._describe(site), activation, amax, error)
        )

    def _correct_bias(self, site: QuantizableLayer, lost: Array) -> None:
        """Add the bias correction where the layer has a bias or can have one."""
        mean = self._means.get((site.activation, channel_axis(site)))
        added = output_correction(lost, site, mean) if mean is not None else None
        node = site.node
        if added is None or not added.any():
            return
        kind = helper.tensor_dtype_to_np_dtype(site.elem_type)
        if node.op_type == "MatMul":
            self._unused += correct_bias_add(self.ops, self.weights, self._bias_adds, node.output[0], added, kind)
            return
        given = node.input[2] if len(node.input) > 2 else ""
        scaled = walk.attributes(node)
        if scaled.get("alpha", 1.0) != 1.0 or scaled.get("beta", 1.0) != 1.0 or (given and given not in self.weights):
            return
        if given:
            before = self.weights.read(given).astype(np.float32)
            if before.shape != added.shape:
                return
            self._unused.append(given)
            added = before + added
        set_input(node, 2, self.ops.add_initializer(added.astype(kind), f"{given or site.weight}_corrected"))

    # -------------------------------------------------------------------------------------------- activations

    def _add_qdq(self, name: str, elem: int, site: QuantizableLayer | None = None) -> str:
        """Return the dequantized tensor; all consumers share one pair."""
        if name not in self._dequantized_names:
            rules = {"nvfp4": self._add_nvfp4_qdq, "mxfp8": self._add_mxfp8_qdq}
            if site is not None and (rule := rules.get(self.form.name)) is not None:
                self._dequantized_names[name] = rule(name, elem, self._state_last_dimension(site))
            else:
                self._dequantized_names[name] = self._add_static_qdq(name, elem)
        return self._dequantized_names[name]

    def _state_last_dimension(self, site: QuantizableLayer) -> str:
        """Return the activation with a static last dimension, taken from the weight: TensorRT does not parse blocks along
        a computed dimension, such as that of a Reshape to -1."""
        name, fact = site.activation, self.selection.tensor_info.get(site.activation)
        if fact is None or not fact.shape or fact.shape[-1] >= 0 or site.node.op_type not in ("MatMul", "Gemm"):
            return name
        sizes = np.array([*(0 for _ in fact.shape[1:]), site.weight_shape[site.reduction_axis]], np.int64)
        return self.ops.add("Reshape", [name, self.ops.shared_constant(sizes, f"{name}_sizes")], name)

    def _add_static_qdq(self, name: str, elem: int) -> str:
        empty = to_format(np.zeros(1, np.float32), self.form, amax=self._amax[name], scale_dtype=_SCALES[elem])
        scale = self.ops.add_initializer(empty.scales, f"{name}_scale")
        zero = self.ops.shared_constant(np.zeros((), self.form.numpy), f"zero_{self.form.name}")
        quantized = self.ops.add("QuantizeLinear", [name, scale, zero], name)
        return self.ops.add("DequantizeLinear", [quantized, scale, zero], name)

    def _add_nvfp4_qdq(self, name: str, elem: int, sized: str) -> str:
        second = to_format(np.zeros(16, np.float32), self.form, amax=self._amax[name]).tensor_scale
        scale = self.ops.add_initializer(np.asarray(second, np.float32), f"{name}_scale")
        given: dict[str, Any] = {"axis": -1, "block_size": 16, "scale_type": int(_FP8)}
        values, scales = self.ops.add_multi_output(
            "TRT_FP4DynamicQuantize", [sized, scale], name, 2, domain="trt", **given
        )
        self._state_type(values, TensorProto.FLOAT4E2M1, name, 1)
        self._state_type(scales, _FP8, name, 16)
        first = self.ops.add("DequantizeLinear", [scales, scale], name)
        made = self.ops.add("DequantizeLinear", [values, first], name, axis=-1, block_size=16)
        return self._add_cast(made, elem, name)

    def _add_mxfp8_qdq(self, name: str, elem: int, sized: str) -> str:
        given: dict[str, Any] = {"axis": -1, "block_size": 32}
        values, scales = self.ops.add_multi_output(
            "TRT_MXFP8DynamicQuantize", [sized], name, 2, domain="trt", output_dtype=int(_FP8), **given
        )
        self._state_type(values, _FP8, name, 1)
        self._state_type(scales, TensorProto.UINT8, name, 32)
        made = self.ops.add(
            "TRT_MXFP8DequantizeLinear", [values, scales], name, domain="trt", output_dtype=elem, **given
        )
        self._state_type(made, elem, name, 1)
        return made

    def _state_type(self, name: str, elem: int, like: str, over: int) -> None:
        """Declare the output type of an operator without a schema, shaped like another tensor in blocks of the last axis."""
        fact, shape = self.selection.tensor_info.get(like), None
        if fact is not None and fact.shape is not None:
            last = fact.shape[-1]
            shape = [size if size >= 0 else None for size in (*fact.shape[:-1], last // over if last >= 0 else -1)]
        self.proto.graph.value_info.append(helper.make_tensor_value_info(name, elem, shape))

    def _add_cast(self, name: str, elem: int, stem: str) -> str:
        return name if elem == TensorProto.FLOAT else self.ops.add("Cast", [name], stem, to=elem)

    # -------------------------------------------------------------------------------------------- weights

    def _quantize_weight(self, site: QuantizableLayer) -> tuple[str, float, Array | None]:
        """Return the name of the dequantized weight, its relative error, and the rounding residual if bias is corrected."""
        turned = site.reduction_axis == 0 and site.node.op_type == "Gemm" and self.form.name in ("nvfp4", "mxfp8")
        key = (site.weight, site.channel_axis, turned, site.activation if site.activation in self._awq_scales else "")
        if key not in self._stored_weights:
            try:
                self._stored_weights[key] = self._store_weight(site)
            except UsageError as error:
                raise ModelError(
                    f"the weight `{site.weight}` of `{site.label}` cannot be quantised: {error.message}",
                    hint=f"`--exclude-node {site.label}`",
                ) from error
        if turned:  # the matrix is stored as [outputs, inputs]
            set_attribute(site.node, "transB", 1)
        return self._stored_weights[key]

    def _store_weight(self, site: QuantizableLayer) -> tuple[str, float, Array | None]:
        values = self.weights.read(site.weight).astype(np.float32)
        if self.form.name in ("nvfp4", "mxfp8"):
            return *self._store_block_weight(site, values), None
        axis = (
            site.reduction_axis if self.form.name == "int4" else site.scale_axis if self.form.name == "int8" else None
        )
        scale = self._awq_scales.get(site.activation)
        if scale is not None:
            values = values * (scale[None, :] if site.reduction_axis else scale[:, None])
        made = self._round_weight(values, site, axis)
        lost = values - made.dequantize()
        kept = lost.astype(np.float32) if self._means else None
        return self._add_weight_dq(site, made), relative_error(lost, values), kept

    def _round_weight(self, values: Array, site: QuantizableLayer, axis: int | None) -> QuantizedArray:
        scale_dtype = _SCALES[site.elem_type] if self.form.name in ("int8", "fp8", "int4") else None
        if self.config.method == "awq" and site.activation in self._channel_stats:
            square = self._channel_stats[site.activation].mean_square
            if site.activation in self._awq_scales:
                square = square / np.square(self._awq_scales[site.activation], dtype=np.float64)
            square = square[None, :] if axis else square[:, None]
            return search_clip_range(
                values, self.form, axis=axis, block=site.block_size, importance=square, scale_dtype=scale_dtype
            )
        return to_format(values, self.form, axis=axis, block=site.block_size, scale_dtype=scale_dtype)

    def _add_weight_dq(self, site: QuantizableLayer, made: QuantizedArray) -> str:
        """Store values and scales, and add the DequantizeLinear that TensorRT fuses into the layer."""
        stem = site.weight
        given: dict[str, Any] = {} if made.axis is None else {"axis": made.axis}
        if made.block is not None:
            given["block_size"] = made.block
        values = self.ops.add_initializer(made.values, f"{stem}_{self.form.name}")
        inputs = [values, self.ops.add_initializer(made.scales, f"{stem}_scale")]
        if made.block is None:
            shape = made.scales.shape if made.scales is not None else ()
            inputs.append(self.ops.shared_constant(np.zeros(shape, self.form.numpy), f"zero_{self.form.name}"))
        return self.ops.add("DequantizeLinear", inputs, stem, **given)

    def _store_block_weight(self, site: QuantizableLayer, values: Array) -> tuple[str, float]:
        """Store a weight as `[outputs, inputs]` with blocks along the last axis, the layout of public exporters."""
        stem = site.weight
        given: dict[str, Any] = {"axis": -1, "block_size": site.block_size}
        turned = site.reduction_axis == 0
        matrix = np.ascontiguousarray(values.T) if turned else values
        made = self._round_weight(matrix, site, 1)
        stored_values = self.ops.add_initializer(made.values, f"{stem}_{self.form.name}")
        assert made.scales is not None  # block formats have them
        if self.form.name == "nvfp4":
            second = self.ops.add_initializer(np.asarray(made.tensor_scale, np.float32), f"{stem}_scale")
            scales = self.ops.add_initializer(made.scales, f"{stem}_block_scales")
            first = self.ops.add("DequantizeLinear", [scales, second], stem)
            name = self.ops.add("DequantizeLinear", [stored_values, first], stem, **given)
            name = self._add_cast(name, site.elem_type, stem)
        else:
            scales = self.ops.add_initializer(made.scales.view(np.uint8), f"{stem}_block_scales")
            name = self.ops.add(
                "TRT_MXFP8DequantizeLinear",
                [stored_values, scales],
                stem,
                domain="trt",
                output_dtype=site.elem_type,
                **given,
            )
            self.proto.graph.value_info.append(helper.make_tensor_value_info(name, site.elem_type, matrix.shape))
        if turned and site.node.op_type != "Gemm":
            name = self.ops.add("Transpose", [name], stem, perm=[1, 0])
        return name, relative_error(made.dequantize() - matrix, matrix)

    def _describe(self, site: QuantizableLayer) -> str:
        form = self.form.name
        if self.form.granularity == "block":
            return f"{form}, blocks of {site.block_size} along its {site.weight_shape[site.reduction_axis]} inputs"
        if form == "int8" and site.scale_axis is not None:
            return f"int8, one scale for each of {site.weight_shape[site.channel_axis]} channels (axis {site.channel_axis})"
        return f"{form}, one scale"

    # -------------------------------------------------------------------------------------------- AWQ

    def _search_awq_scales(self) -> None:
        """Search the AWQ input scales, one for all layers that read the same activation."""
        groups: dict[str, list[QuantizableLayer]] = {}
        for site in self.selection.layers:
            groups.setdefault(site.activation, []).append(site)
        for activation, sites in groups.items():
            matrices = []
            for site in sites:
                values = self.weights.read(site.weight).astype(np.float32)
                matrices.append(values.T if site.reduction_axis == 0 else values)
            blocks = [site.block_size for site in sites]
            scale = weight_correction.search_input_scale(matrices, self._channel_stats[activation], self.form, blocks)
            if scale is not None:
                self._awq_scales[activation] = scale
        log.info("inputs scaled before rounding at %d of %d activations", len(self._awq_scales), len(groups))

    def _apply_awq_scale(self, site: QuantizableLayer) -> str:
        name = site.activation
        if name not in self._dequantized_names:
            kind = helper.tensor_dtype_to_np_dtype(site.elem_type)
            inverse = self.ops.add_initializer((1 / self._awq_scales[name]).astype(kind), f"{name}_awq")
            self._dequantized_names[name] = self.ops.add("Mul", [name, inverse], name)
        return self._dequantized_names[name]


def relative_error(lost: Array, values: Array) -> float:
    """RMS of what is lost over RMS of the values.

    Both have one shape and a floating-point dtype; a ratio, 0 for values of 0.
    """
    size = float(np.linalg.norm(values))
    return float(np.linalg.norm(lost)) / size if size else 0.0


def correct_bias_add(
    ops: NodeBuilder, weights: Weights, bias_adds: Mapping[str, NodeProto], output: str, added: Array, kind: Any
) -> list[str]:
    """Add the bias correction to the constant of the Add after a MatMul; return the constant it replaces.

    `added` is float32 in the shape of that constant, else nothing is changed.
    """
    addition = bias_adds.get(output)
    if addition is None:
        return []
    at = 1 if addition.input[0] == output else 0
    name = addition.input[at]
    whole = weights.read(name).astype(np.float32)
    if whole.shape != added.shape:
        return []
    addition.input[at] = ops.add_initializer((whole + added).astype(kind), f"{name}_corrected")
    return [name]


def find_bias_adds(proto: ModelProto, weights: Weights) -> dict[str, NodeProto]:
    """Adds of a constant that are the only consumer of their other input, by that input's name."""
    readers = consumers_of(walk.all_nodes(proto))
    outputs = {item.name for item in proto.graph.output}
    made = {}
    for node in proto.graph.node:
        if node.op_type != "Add" or walk.domain_of(node) or len(node.input) != 2:
            continue
        for one, other in ((node.input[0], node.input[1]), (node.input[1], node.input[0])):
            if other in weights and one not in outputs and len(readers.get(one, ())) == 1:
                made[one] = node
    return made


def _find_residual_adds(proto: ModelProto, selection: LayerSelection) -> dict[str, dict[int, str]]:
    """Residual Adds of a quantized layer's output: index and name of the other input, by output.

    TensorRT fuses such an Add into the layer if the other input is quantized too."""
    made = {site.node.output[0] for site in selection.layers}
    found: dict[str, dict[int, str]] = {}
    for node in proto.graph.node:
        if node.op_type != "Add" or walk.domain_of(node) or len(node.input) != 2:
            continue
        ours = [name in made for name in node.input]
        if sum(ours) != 1:
            continue
        at = ours.index(False)
        fact = selection.tensor_info.get(node.input[at])
        if fact is not None and not fact.is_constant and fact.shape is not None and len(fact.shape) > 1:
            found[node.output[0]] = {at: node.input[at]}
    return found


# ------------------------------------------------------------------------------------------------ after a cast


def strip_half_casts(proto: ModelProto) -> None:
    """Remove the Casts around TensorRT's operators in a 16-bit graph, in place: they accept 16-bit inputs, and
    `output_dtype` sets their output."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    readers = consumers_of(walk.all_nodes(proto))
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
            kinds = {walk.attributes(item)["to"] for item in casts if item.op_type == "Cast"}
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
    retain_items(proto.graph.node, lambda node: node.op_type != "Cast" or node.output[0] not in gone)
