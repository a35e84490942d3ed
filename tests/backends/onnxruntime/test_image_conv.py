"""Convolutions of images from blocks of pixels: the same numbers, in NHWC graphs as ONNX Runtime's optimiser writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nhwc_nets import Net, count, run
from onnx import helper, numpy_helper

from trt_engine.backends.onnxruntime.conv_bias import NHWC_DOMAIN
from trt_engine.backends.onnxruntime.image_conv import rewrite_image_convs


def image_net(channels: int = 3, height: int | str = 12, width: int | str = 16, *, half: bool = True) -> Net:
    net = Net(half=half)
    net.image = ["N", channels, height, width]
    return net


def nhwc(net: Net) -> str:
    return net.op("Transpose", "x", perm=[0, 2, 3, 1])


def strided(net: Net, kernel: int = 7, channels: int = 3, **given: Any) -> str:
    return net.op("Relu", net.conv(nhwc(net), channels, 6, kernel, **{"strides": [2, 2]} | given))


def rewritten(model: onnx.ModelProto, images: int) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    assert rewrite_image_convs(made, Path()) == images
    _, channels, *sizes = (dim.dim_value or 8 for dim in model.graph.input[0].type.tensor_type.shape.dim)
    half = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    x = np.random.default_rng(1).standard_normal((2, channels, *sizes)).astype(np.float16 if half else np.float32)
    for before, after in zip(run(model, x), run(made, x), strict=True):
        assert before.shape == after.shape
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-3 * np.abs(before).max())
    return made


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (7, {}), (3, {}), (5, {}), (1, {"pads": [0] * 4}), (2, {"pads": [0] * 4}), (3, {"pads": [0, 0, 1, 1]}),
        (6, {"pads": [2, 2, 2, 2]}), (4, {"pads": [1, 1, 1, 1]}), (7, {"dilations": [1, 1], "group": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_strided_convolution_of_an_image_reads_blocks_of_pixels(
    kernel: int, given: dict[str, Any], channels: int, bias: bool
) -> None:
    net = image_net(channels)
    made = rewritten(net.model(strided(net, kernel, channels, bias=bias, **given)), images=1)
    (conv,) = (node for node in made.graph.node if node.op_type == "Conv")
    shapes = {item.name: tuple(item.dims) for item in made.graph.initializer}
    assert shapes[conv.input[1]][:2] == (12, 8 * channels)
    pads = next(list(item.ints) for item in conv.attribute if item.name == "pads")
    assert pads[:2] == pads[2:] == [size // 2 for size in shapes[conv.input[1]][2:]]
    assert [node.op_type for node in made.graph.node] == ["Reshape", "Transpose", "Reshape", "Conv", "Reshape", "Relu"]
    assert len(made.graph.initializer) == 4 + bias


def test_two_convolutions_of_one_image_and_another_reader_of_the_layout() -> None:
    net = image_net()
    x = nhwc(net)
    outs = [net.op("Relu", net.conv(x, 3, 8, kernel, strides=[2, 2])) for kernel in (3, 7)]
    made = rewritten(net.model(*outs, net.op("Sigmoid", x)), images=2)
    assert count(made, "Transpose") == 3


def other_stride(net: Net) -> str:
    return strided(net, strides=[2, 1])


def dilated(net: Net) -> str:
    return strided(net, 3, dilations=[2, 2], pads=[2] * 4)


def same_padding(net: Net) -> str:
    return strided(net, 3, pads=None, auto_pad="SAME_UPPER")


def not_halved(net: Net) -> str:
    return strided(net, 3, pads=[0] * 4)


def computed_weights(net: Net) -> str:
    weight = net.op("Neg", net.constant(np.ones((8, 3, 3, 3))))
    given: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    return net.op("Conv", nhwc(net), weight, domain=NHWC_DOMAIN, **given)


def other_layout(net: Net) -> str:
    return net.op("Relu", net.conv(net.op("Transpose", "x", perm=[0, 3, 2, 1]), 3, 8, 3, strides=[2, 2]))


@pytest.mark.parametrize("form", [other_stride, dilated, same_padding, not_halved, computed_weights, other_layout])
def test_other_convolutions_stay(form: Callable[[Net], str]) -> None:
    net = image_net()
    assert count(rewritten(net.model(form(net)), images=0), "Conv") == 1


def test_a_graph_with_a_subgraph_stays() -> None:
    net = image_net()
    x = strided(net)
    body = helper.make_graph(
        [helper.make_node("Neg", [x], ["b"])], "then", [], [helper.make_tensor_value_info("b", 10, None)]
    )
    net.stored.append(numpy_helper.from_array(np.array(True), "condition"))
    net.nodes.append(helper.make_node("If", ["condition"], ["y"], then_branch=body, else_branch=body))
    assert rewrite_image_convs(net.model("y"), Path()) == 0
