"""Computes a strided convolution of an image, which has few channels, from blocks of pixels.

cuDNN runs a convolution of three channels without tensor cores: the first one of ResNet-50 in FP16 took 0.77 of 4.6 ms at
batch 64 on an H100, and the change of layout before it 0.16 ms. In a graph in NHWC layout, blocks of 2 x 4 pixels become
channels, and a convolution of stride 1 gives two columns of the output at once: in NHWC, they are two neighbours.

    batch x 3 x H x W  ->  batch x H/2 x W/4 x 24  ->  batch x H/2 x W/4 x (2 * channels)  ->  batch x H/2 x W/2 x channels
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.backends.onnxruntime.conv_bias import NHWC_DOMAIN
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import (
    Weights,
    count_reads,
    drop_unused,
    free_name,
    make_initializer,
    replace_items,
    used_names,
)
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.tensors import Shape

_MAX_CHANNELS = 4
_ROWS, _COLUMNS = 2, 4
"""Pixels of a block: with the stride of 2, one row and two columns of the output."""

Array = npt.NDArray[np.generic]


def rewrite_image_convs(proto: ModelProto, folder: Path) -> int:
    """Rewrite the graph in place; returns the number of convolutions. `folder` holds weights outside the graph.

    Taken are FP16 convolutions of stride 2, of one group, without dilation, that read a transposed input of at most 4
    channels whose height is a multiple of 2 and width of 4, and halve both. A graph with subgraphs is left as it is.
    """
    if any(True for node in proto.graph.node for _ in walk.bodies(node)):
        return 0
    weights, facts = Weights(proto, folder), trace(proto, {}).tensors
    makers = {name: node for node in proto.graph.node for name in node.output}
    reads, taken, nodes, count = count_reads(proto), used_names(proto), list[NodeProto](), 0
    stored = [item.name for item in proto.graph.initializer]
    for node in proto.graph.node:
        before = makers.get(node.input[0]) if node.op_type == "Conv" and walk.domain_of(node) == NHWC_DOMAIN else None
        if before is None or not _is_change_of_layout(before) or any(name not in weights for name in node.input[1:]):
            nodes.append(node)
            continue
        image, weight = facts.get(before.input[0], TensorInfo()), weights.read(node.input[1])
        shape = image.shape or ()
        if image.elem != TensorProto.FLOAT16 or not _fits(node, shape, weight.shape):
            nodes.append(node)
            continue
        operands = [_block_kernel(weight, _pads(node)), *(np.tile(weights.read(name), 2) for name in node.input[2:])]
        nodes += _replacement(proto, node, before.input[0], list(shape[1:]), operands, taken)
        reads[before.output[0]] -= 1
        count += 1
    if count:
        unread = {name for name, node in makers.items() if _is_change_of_layout(node) and not reads[name]}
        replace_items(proto.graph.node, [node for node in nodes if node.output[0] not in unread])
        drop_unused(proto, stored)
    return count


def _is_change_of_layout(node: NodeProto) -> bool:
    return node.op_type == "Transpose" and walk.attributes(node).get("perm") == [0, 2, 3, 1]


def _pads(node: NodeProto) -> list[int]:
    """Padding at the begin and end of rows and columns: top, left, bottom, right."""
    return list(walk.attributes(node).get("pads") or [0] * 4)


def _fits(node: NodeProto, image: Shape, weight: Shape) -> bool:
    given = walk.attributes(node)
    if len(image) != 4 or len(weight) != 4 or not 0 < image[1] <= _MAX_CHANNELS:
        return False
    if given.get("group", 1) != 1 or weight[1] != image[1] or given.get("auto_pad", b"NOTSET") != b"NOTSET":
        return False
    if list(given.get("strides") or ()) != [2, 2] or any(step != 1 for step in given.get("dilations") or ()):
        return False
    if min(image[2:]) <= 0 or image[2] % _ROWS or image[3] % _COLUMNS:
        return False
    pads = _pads(node)
    halves = ((size + pads[at] + pads[at + 2] - weight[2 + at]) // 2 + 1 for at, size in enumerate(image[2:]))
    return list(halves) == [size // 2 for size in image[2:]]


def _block_kernel(weight: Array, pads: list[int]) -> Array:
    """Kernels `[2 * outputs, 8 * channels, rows of blocks, columns of blocks]` of the kernels `[outputs, channels, h, w]`.

    The outputs are ordered by column, then channel; the inputs by row and column in the block, then channel.
    """
    outputs, channels, height, width = weight.shape
    rows, columns = _reach(height, pads[0], _ROWS), _reach(width, pads[1], _COLUMNS)
    made = np.zeros((2, outputs, _ROWS, _COLUMNS, channels, 2 * rows + 1, 2 * columns + 1), weight.dtype)
    for column in range(2):
        for i in range(height):
            for j in range(width):
                row, in_row = divmod(i - pads[0], _ROWS)
                block, in_block = divmod(2 * column + j - pads[1], _COLUMNS)
                made[column, :, in_row, in_block, :, row + rows, block + columns] = weight[:, :, i, j]
    return made.reshape(2 * outputs, _ROWS * _COLUMNS * channels, 2 * rows + 1, 2 * columns + 1)


def _reach(kernel: int, pad: int, block: int) -> int:
    """Blocks on each side that the outputs of one block read; the same on both, as few kernels pad one side more."""
    last = (block - 2) + kernel - 1 - pad
    return max(-(-pad // block), last // block, 0)


def _replacement(
    proto: ModelProto, node: NodeProto, image: str, sizes: list[int], operands: list[Array], taken: set[str]
) -> list[NodeProto]:
    """Blocks of pixels as channels, the convolution, and its two columns side by side; `sizes` are channels, H and W."""
    (channels, height, width), out = sizes, node.output[0]
    outputs, depth, *kernel = operands[0].shape

    def stored(array: Array, name: str) -> str:
        made = free_name(f"{out}_{name}", taken)
        proto.graph.initializer.append(make_initializer(array, made))
        return made

    def shape(*values: int) -> str:
        return stored(np.array([0, *values], np.int64), "shape")

    split, blocks, rows, pairs = (free_name(f"{out}_{name}", taken) for name in ("split", "blocks", "rows", "pairs"))
    conv = helper.make_node(
        "Conv", [rows, *(stored(array, "blocks_weight") for array in operands)], [pairs], name=node.name,
        domain=NHWC_DOMAIN, kernel_shape=kernel, pads=[size // 2 for size in kernel] * 2, strides=[1, 1],
    )  # fmt: skip
    grid = (height // _ROWS, width // _COLUMNS)
    return [
        helper.make_node("Reshape", [image, shape(channels, grid[0], _ROWS, grid[1], _COLUMNS)], [split], name=split),
        helper.make_node("Transpose", [split], [blocks], name=blocks, perm=[0, 2, 4, 3, 5, 1]),
        helper.make_node("Reshape", [blocks, shape(*grid, depth)], [rows], name=rows),
        conv,
        helper.make_node("Reshape", [pairs, shape(grid[0], 2 * grid[1], outputs // 2)], [out], name=f"{out}_columns"),
    ]
