"""Biases outside their convolutions: the same numbers, in NHWC graphs as ONNX Runtime's optimiser writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nhwc_nets import Net, count, run
from onnx import helper, numpy_helper

from trt_engine.backends.onnxruntime.conv_bias import NHWC_DOMAIN, separate_conv_biases
from trt_engine.graph.cost import model_cost


def rewritten(model: onnx.ModelProto, *, separated: int, channels: bool = False) -> onnx.ModelProto:
    """The graph after the pass, with the same outputs."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    assert separate_conv_biases(made, Path(), channels=channels) == separated
    size = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value or 9
    half = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    x = np.random.default_rng(1).standard_normal((2, size, size, 4)).astype(np.float16 if half else np.float32)
    for before, after in zip(run(model, x), run(made, x), strict=True):
        assert before.shape == after.shape
        np.testing.assert_allclose(after, before, rtol=0, atol=(4e-3 if half else 4e-6) * np.abs(before).max())
    return made


def bottleneck(net: Net, x: str, channels: int, inner: int, stride: int = 1) -> str:
    """The block of a ResNet."""
    y = net.op("Relu", net.conv(x, channels, inner))
    y = net.op("Relu", net.conv(y, inner, inner, 3, strides=[stride] * 2))
    y = net.conv(y, inner, channels)
    skip = x if stride == 1 else net.conv(x, channels, channels, strides=[stride] * 2)
    return net.op("Relu", net.op("Add", y, skip))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_a_residual_network_needs_an_addition_or_a_channel_for_each_padded_convolution(
    channels: bool, half: bool
) -> None:
    net = Net(half=half)
    x = net.op("Relu", net.conv("x", 4, 8, 3))
    x = net.op("MaxPool", x, domain=NHWC_DOMAIN, kernel_shape=[2, 2], strides=[2, 2])
    x = bottleneck(net, bottleneck(net, x, 8, 4), 8, 4, stride=2)
    pooled = net.op("GlobalAveragePool", x, domain=NHWC_DOMAIN)
    made = rewritten(net.model(net.op("Identity", pooled)), separated=8, channels=channels)
    assert all(len(node.input) == 2 for node in made.graph.node if node.op_type == "Conv")
    # behind a convolution whose bias is in a channel of its input, the activation is the Relu it was
    assert (count(made, "Relu"), count(made, "Max")) == ((2, 5) if channels else (0, 7))
    # the two residual sums, one addition behind the pooling, and those before two padded convolutions
    assert count(made, "Add") == 2 + 1 + (0 if channels else 2)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (3, {}), (3, {"strides": [2, 2]}), (3, {"dilations": [2, 2], "pads": [2] * 4}), (5, {"strides": [1, 3]}),
        (1, {"pads": [0] * 4}),
    ],
)  # fmt: skip
def test_a_shift_passes_through_a_padded_convolution_as_a_channel(
    kernel: int, given: dict[str, Any], half: bool
) -> None:
    net = Net(half=half)
    x = net.op("Relu", net.conv("x", 4, 8))
    made = rewritten(net.model(net.op("Sigmoid", net.conv(x, 8, 4, kernel, **given))), separated=2, channels=True)
    assert count(made, "Add") == (kernel == 1)
    first, second = (node for node in made.graph.node if node.op_type == "Conv")
    shapes = {item.name: list(item.dims) for item in made.graph.initializer}
    wide = 8 if kernel == 1 else 16
    assert shapes[first.input[1]] == [wide, 4, 1, 1]
    assert shapes[second.input[1]] == [4, wide, kernel, kernel]
    assert len(shapes) == (3 + (kernel == 1))  # two weights and the constant of the Max


def shared(net: Net) -> tuple[str, ...]:
    x = net.op("Relu", net.conv("x", 4, 8))
    return net.op("Sigmoid", net.conv(x, 8, 8, 3)), net.op("Sigmoid", x)


def shared_before_the_activation(net: Net) -> tuple[str, ...]:
    x = net.conv("x", 4, 8)
    return net.op("Sigmoid", net.conv(net.op("Relu", x), 8, 8, 3)), net.op("Sigmoid", x)


def output_in_the_middle(net: Net) -> tuple[str, ...]:
    x = net.op("Relu", net.conv("x", 4, 8))
    return net.op("Sigmoid", net.conv(x, 8, 8, 3)), x


def read_twice(net: Net) -> tuple[str, ...]:
    x = net.op("Relu", net.conv("x", 4, 8))
    return net.op("Sigmoid", net.conv(x, 8, 8, 3)), net.op("Sigmoid", net.conv(x, 8, 8, 5))


def grouped(net: Net) -> tuple[str, ...]:
    return (net.op("Sigmoid", net.conv(net.op("Relu", net.conv("x", 4, 8)), 8, 8, 3, group=2)),)


def grouped_before(net: Net) -> tuple[str, ...]:
    return (net.op("Sigmoid", net.conv(net.op("Relu", net.conv("x", 4, 8, group=2)), 8, 8, 3)),)


def not_centred(net: Net) -> tuple[str, ...]:
    return (net.op("Sigmoid", net.conv(net.op("Relu", net.conv("x", 4, 8)), 8, 8, 3, pads=[0, 1, 2, 1])),)


def even_kernel(net: Net) -> tuple[str, ...]:
    return (net.op("Sigmoid", net.conv(net.op("Relu", net.conv("x", 4, 8)), 8, 8, 2)),)


def same_padding(net: Net) -> tuple[str, ...]:
    return (
        net.op("Sigmoid", net.conv(net.op("Relu", net.conv("x", 4, 8)), 8, 8, 3, pads=None, auto_pad="SAME_UPPER")),
    )


def activated_twice(net: Net) -> tuple[str, ...]:
    x = net.op("Relu", net.op("Relu", net.conv("x", 4, 8)))
    return (net.op("Sigmoid", net.conv(x, 8, 8, 3)),)


def without_activation(net: Net) -> tuple[str, ...]:
    return (net.op("Sigmoid", net.conv(net.conv("x", 4, 8), 8, 8, 3)),)


def pooled(net: Net) -> tuple[str, ...]:
    x = net.op("Relu", net.conv("x", 4, 8))
    x = net.op("MaxPool", x, domain=NHWC_DOMAIN, kernel_shape=[2, 2], strides=[2, 2])
    return (net.op("Sigmoid", net.conv(x, 8, 8, 3)),)


@pytest.mark.parametrize("form", [shared, shared_before_the_activation, output_in_the_middle, read_twice, grouped,
                                  grouped_before, not_centred, even_kernel, same_padding, activated_twice,
                                  without_activation, pooled])  # fmt: skip
def test_other_padded_convolutions_have_an_addition_before_them(form: Callable[[Net], tuple[str, ...]]) -> None:
    net = Net()
    model = net.model(*form(net))
    weights = {tuple(item.dims) for item in model.graph.initializer if len(item.dims) == 4}
    made = rewritten(model, separated=count(model, "Conv"), channels=True)
    assert count(made, "Add") >= 2  # before the padded convolution, and behind it
    assert {tuple(item.dims) for item in made.graph.initializer if len(item.dims) == 4} == weights


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"pads": [0] * 4}, 1), ({"pads": [0] * 4, "group": 2}, 1), ({"pads": [0] * 4, "strides": [2, 1]}, 1),
        ({"pads": [0] * 4, "dilations": [2, 2]}, 1), ({"pads": [0, 1, 2, 1]}, 2), ({"pads": [1] * 4, "group": 2}, 2),
    ],
)  # fmt: skip
def test_a_shift_passes_through_a_convolution_without_padding(given: dict[str, Any], added: int) -> None:
    net = Net()
    x = net.op("Relu", net.conv("x", 4, 8))
    made = rewritten(net.model(net.op("Relu", net.conv(x, 8, 8, 3, **given))), separated=2)
    assert count(made, "Add") == added  # the output, and before padding


@pytest.mark.parametrize("op", ["Sigmoid", "Identity", "LeakyRelu"])
def test_other_operators_read_the_true_value(op: str) -> None:
    net = Net()
    x = net.conv("x", 4, 8, 3)
    made = rewritten(net.model(net.op("Mul", x, net.op(op, x))), separated=1)
    assert count(made, "Add") == 1  # once for both readers


def test_outputs_in_the_middle_keep_their_names_and_values() -> None:
    net = Net()
    x = net.conv("x", 4, 8, 3)
    y = net.op("Relu", x)
    rewritten(net.model(x, y, net.op("Relu", net.conv(y, 8, 8))), separated=2)


def test_a_sum_that_broadcasts_reads_the_true_values() -> None:
    net = Net()
    x = net.conv("x", 4, 8, 3)
    pooled = net.op("GlobalAveragePool", net.op("Relu", net.conv(x, 8, 8, 3)), domain=NHWC_DOMAIN)
    rewritten(net.model(net.op("Relu", net.op("Add", x, pooled))), separated=2)


def test_a_shift_that_outgrows_its_biases_is_added_early() -> None:
    net = Net()
    x, scale = "x", 4.0
    for channels in (4, 8, 8, 8):
        net.random = np.random.default_rng(0)
        x = net.op("Relu", net.conv(x, channels, 8))
        net.stored[-2].CopyFrom(numpy_helper.from_array(np.full((8, channels, 1, 1), scale, "f4"), net.stored[-2].name))
    made = rewritten(net.model(x), separated=4)
    assert count(made, "Add") > 1


def test_biases_of_zero_leave_no_operator_behind() -> None:
    net = Net(scale=0.0)
    made = rewritten(net.model(net.op("Relu", net.conv("x", 4, 8, 3))), separated=1)
    assert [node.op_type for node in made.graph.node] == ["Conv", "Relu"]
    assert len(made.graph.initializer) == 1


def features(net: Net, size: int = 1) -> str:
    """One pixel of 8 channels in NCHW, or more."""
    x = net.op("Relu", net.conv("x", 4, 8, 3))
    pool: dict[str, Any] = {"kernel_shape": [12 // size] * 2, "strides": [12 // size] * 2, "domain": NHWC_DOMAIN}
    return net.op("Transpose", net.op("MaxPool", x, **pool), perm=[0, 3, 1, 2])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("given", [{}, {"transB": 1}, {"axis": 1}])
@pytest.mark.parametrize("bias", [None, (5,), (1, 5), ()])
def test_a_classifier_takes_the_shift_into_its_bias(
    given: dict[str, int], bias: tuple[int, ...] | None, half: bool
) -> None:
    net = Net(half=half)
    weight = net.constant(net.random.standard_normal((5, 8) if "transB" in given else (8, 5)))
    stored = [weight] if bias is None else [weight, net.constant(net.random.standard_normal(bias))]
    flat = net.op("Flatten", features(net), **{name: value for name, value in given.items() if name == "axis"})
    made = rewritten(
        net.model(net.op("Gemm", flat, *stored, **{k: v for k, v in given.items() if k != "axis"})), separated=1
    )
    assert [node.op_type for node in made.graph.node] == ["Conv", "Max", "MaxPool", "Flatten", "Gemm"]


def test_a_graph_with_a_subgraph_or_computed_weights_stays() -> None:
    net = Net()
    weight = net.op("Identity", net.constant(np.ones((8, 4, 1, 1))))
    x = net.op("Conv", "x", net.op("Neg", weight), net.constant(np.ones(8)), domain=NHWC_DOMAIN, kernel_shape=[1, 1])
    rewritten(net.model(net.op("Relu", x)), separated=0)
    body = helper.make_graph(
        [helper.make_node("Neg", [x], ["b"])], "then", [], [helper.make_tensor_value_info("b", 1, None)]
    )
    net.nodes.append(
        helper.make_node(
            "If", [net.op("Cast", net.constant(np.ones(())), to=9)], ["y"], then_branch=body, else_branch=body
        )
    )
    model = net.model("y")
    before = model.SerializeToString()
    assert separate_conv_biases(model, Path()) == 0
    assert model.SerializeToString() == before


def test_the_cost_of_a_convolution_in_nhwc_is_counted() -> None:
    net = Net()
    cost = model_cost(net.model(net.conv("x", 4, 8, 3, strides=[2, 2])), {"x": (2, 12, 12, 4)})
    assert cost.macs == 2 * 6 * 6 * 8 * 4 * 9


def several_pixels(net: Net) -> tuple[str, ...]:
    return (net.op("Gemm", net.op("Flatten", features(net, size=2)), net.constant(np.ones((32, 5)))),)


def layout_read_twice(net: Net) -> tuple[str, ...]:
    x = features(net)
    return net.op("Gemm", net.op("Flatten", x), net.constant(np.ones((8, 5)))), net.op("Sigmoid", x)


def other_axis(net: Net) -> tuple[str, ...]:
    return (net.op("Flatten", features(net), axis=2),)


def layout_is_an_output(net: Net) -> tuple[str, ...]:
    x = features(net)
    return net.op("Flatten", x), x


@pytest.mark.parametrize("form", [several_pixels, layout_read_twice, other_axis, layout_is_an_output])
def test_other_changes_of_layout_read_the_true_value(form: Callable[[Net], tuple[str, ...]]) -> None:
    net = Net()
    made = rewritten(net.model(*form(net)), separated=1)
    assert count(made, "Add") == 1
    assert count(made, "Transpose") == 1
