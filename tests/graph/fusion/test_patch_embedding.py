"""The convolution of a patch embedding becomes a matrix product where patches do not overlap, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .attention_graphs import Builder, check_same, fuse, operators

WIDTH, PATCH = 10, (4, 6)


def convolution(
    b: Builder, shape: tuple[Any, ...] = (3, 8, 18), *, bias: bool = True, kernel: tuple[int, int] = PATCH, **given: Any
) -> str:
    depth = shape[0] // given.get("group", 1)
    weights = [b.weight(WIDTH, depth, *kernel), *([b.weight(WIDTH)] if bias else [])]
    return b.add("Conv", b.given("images", ["batch", *shape]), *weights, **{"strides": list(kernel)} | given)


def tokens_last(b: Builder, x: str, target: tuple[int, ...] = (0, WIDTH, -1)) -> str:
    return b.add("Transpose", b.add("Reshape", x, b.ints(*target)), perm=[0, 2, 1])


def channels_last(b: Builder, x: str) -> str:
    return b.add("Transpose", x, perm=[0, 2, 3, 1])


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [tokens_last, channels_last])
@pytest.mark.parametrize("given", [{}, {"pads": [0] * 4, "dilations": [1, 1], "group": 1}, {"auto_pad": "VALID"}])
def test_patches_are_multiplied(
    layout: Callable[[Builder, str], str], bias: bool, half: bool, given: dict[str, Any]
) -> None:
    b = Builder(half)
    model = b.model(layout(b, convolution(b, bias=bias, **given)))
    fused = fuse(model)
    assert fused.counts == {"patch_embedding": 1}
    assert "Conv" not in operators(fused)
    check_same(model, fused)
    check_same(model, fused, batch=5)


def test_one_row_of_patches_and_an_older_opset() -> None:
    b = Builder(opset=11)
    model = b.model(tokens_last(b, convolution(b, (3, 4, 12))))
    fused = fuse(model)
    assert fused.counts == {"patch_embedding": 1}
    check_same(model, fused)


def test_for_a_cpu_it_stays() -> None:
    b = Builder()
    assert not fuse(b.model(tokens_last(b, convolution(b))), on_gpu=False).counts


def overlapping(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, strides=[2, 6])),)


def padded(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, pads=[0, 3, 0, 3])),)


def same_padding(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, auto_pad="SAME_UPPER")),)


def dilated(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, dilations=[2, 1])),)


def grouped(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, (4, 8, 18), group=2)),)


def left_over(b: Builder) -> tuple[str, ...]:
    """The last column is in no patch."""
    return (tokens_last(b, convolution(b, (3, 8, 19))),)


def any_size(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, (3, "height", 18))),)


def computed_weights(b: Builder) -> tuple[str, ...]:
    x, weight = b.given("images", ["batch", 3, 8, 18]), b.given("weight", [WIDTH, 3, *PATCH])
    return (tokens_last(b, b.add("Conv", x, weight, strides=list(PATCH))),)


def channels_first(b: Builder) -> tuple[str, ...]:
    return (b.add("Relu", convolution(b)),)


def other_order(b: Builder) -> tuple[str, ...]:
    return (b.add("Transpose", convolution(b), perm=[0, 3, 2, 1]),)


def other_split(b: Builder) -> tuple[str, ...]:
    """The reshape takes channels apart."""
    return (b.add("Transpose", b.add("Reshape", convolution(b), b.ints(0, 2 * WIDTH, -1)), perm=[0, 2, 1]),)


def output_in_the_middle(b: Builder) -> tuple[str, ...]:
    x = convolution(b)
    return tokens_last(b, x), x


def read_twice(b: Builder) -> tuple[str, ...]:
    flat = b.add("Reshape", convolution(b), b.ints(0, WIDTH, -1))
    return b.add("Transpose", flat, perm=[0, 2, 1]), b.add("Relu", flat)


def small(b: Builder) -> tuple[str, ...]:
    return (tokens_last(b, convolution(b, kernel=(1, 1))),)


def quantized(b: Builder) -> tuple[str, ...]:
    scale, zero = b.number(0.05), b.constant(np.int8(0))
    x = b.add(
        "DequantizeLinear", b.add("QuantizeLinear", b.given("images", ["batch", 3, 8, 18]), scale, zero), scale, zero
    )
    return (tokens_last(b, b.add("Conv", x, b.weight(WIDTH, 3, *PATCH), strides=list(PATCH))),)


@pytest.mark.parametrize("form", [overlapping, padded, same_padding, dilated, grouped, left_over, any_size, computed_weights,
                                  channels_first, other_order, other_split, output_in_the_middle, read_twice, small,
                                  quantized])  # fmt: skip
def test_other_convolutions_stay(form: Callable[[Builder], tuple[str, ...]]) -> None:
    b = Builder()
    model = b.model(*form(b))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused, height=8)
