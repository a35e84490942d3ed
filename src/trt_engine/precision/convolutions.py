"""Convolutions rounded in the block formats, for emulation alone: no kernel takes them, yet the cost can be measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.graph.trace import attributes
from trt_engine.precision.emulate import mxfp8_blocks, nvfp4_blocks, times_blocks
from trt_engine.precision.formats import Format, emulate
from trt_engine.precision.formats import quantize as to_format
from trt_engine.precision.opsets import raise_opset
from trt_engine.precision.placement import Site
from trt_engine.precision.surgery import Names, Ops, Weights, drop_unused

__all__ = ["round_convolutions"]

Array = npt.NDArray[Any]


def round_convolutions(
    proto: ModelProto, weights: Weights, form: Format, sites: list[Site], amax: Mapping[str, float] | None
) -> None:
    """Round these convolutions in place: weights over all that one output channel sums, activations over channels, both
    filled up with zeros to whole blocks; without `amax` activations stay as they are."""
    if not sites:
        return
    raise_opset(proto, 21)
    ops = Ops(Names(proto))
    wanted = {site.key: site for site in sites}
    read: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in proto.graph.node:
        site = wanted.get(node.output[0]) if node.output else None
        if site is not None:
            node.input[1] = ops.store(_weight(weights, form, site), f"{site.weight}_{form.name}")
            if amax is not None and not form.weights_only:
                if site.activation not in read:
                    read[site.activation] = _channels(ops, form, site, amax)
                node.input[0] = read[site.activation]
        nodes.extend(ops.taken())
        nodes.append(node)
    ops.put(proto, nodes)
    drop_unused(proto, [site.weight for site in sites])


def _weight(weights: Weights, form: Format, site: Site) -> Array:
    values = weights.read(site.weight)
    whole = np.moveaxis(values.astype(np.float32), site.channel, 0)
    flat = whole.reshape(len(whole), -1)
    size = site.block or 1
    filled = np.pad(flat, ((0, 0), (0, -flat.shape[1] % size)))
    made = emulate(filled, form, axis=1, block=size)[:, : flat.shape[1]]
    return np.ascontiguousarray(np.moveaxis(made.reshape(whole.shape), 0, site.channel)).astype(values.dtype)


def _channels(ops: Ops, form: Format, site: Site, amax: Mapping[str, float]) -> str:
    """The activation of a convolution after dynamic quantisation in blocks of channels."""
    name, size = site.activation, site.block or 1
    groups = 1 if site.node.op_type == "ConvTranspose" else attributes(site.node).get("group", 1)
    channels = site.shape[site.reduced] * groups
    rank, spare = len(site.shape), -channels % size
    data = name if site.elem == TensorProto.FLOAT else ops.add("Cast", [name], name, to=TensorProto.FLOAT)
    if spare:
        pads = np.zeros(2 * rank, np.int64)
        pads[rank + 1] = spare
        data = ops.add("Pad", [data, ops.constant(pads, "pads")], name)
    if form.name == "nvfp4":
        second = to_format(np.zeros(16, np.float32), form, amax=amax[name]).second
        assert second is not None  # two levels
        values, scales = nvfp4_blocks(ops, data, 1, second, name)
        scales = ops.add("Mul", [scales, ops.constant(second, "scale")], name)
    else:
        values, scales = mxfp8_blocks(ops, data, 1, name)
    made = times_blocks(ops, values, scales, 1, size, name)
    if spare:
        ends = [ops.constant(np.array([end], np.int64), "slice") for end in (0, channels, 1)]
        made = ops.add("Slice", [made, *ends], name)
    return made if site.elem == TensorProto.FLOAT else ops.add("Cast", [made], name, to=site.elem)
