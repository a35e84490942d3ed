"""Norms in primitive operators are put together in the forms that exporters write, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from .attention_graphs import WIDTH, Builder, check_same, fuse, operators, tokens

Form = Callable[[Builder], tuple[str, ...]]


def mean(b: Builder, x: str, axes: tuple[int, ...] = (-1,), **given: int) -> str:
    if b.opset < 18:
        return b.add("ReduceMean", x, axes=axes, **given)
    return b.add("ReduceMean", x, b.ints(*axes), **given)


def root_of(b: Builder, x: str, *, square: str = "Pow", epsilon: float = 1e-3, axes: tuple[int, ...] = (-1,)) -> str:
    """The root of the mean square and epsilon."""
    squared = b.add("Mul", x, x) if square == "Mul" else b.add("Pow", x, b.number(2.0))
    return b.add("Sqrt", b.add("Add", mean(b, squared, axes), b.number(epsilon)))


def quotient(b: Builder, x: str, root: str, form: str = "Div") -> str:
    if form == "Reciprocal":
        return b.add("Mul", x, b.add("Reciprocal", root))
    return b.add("Mul", b.add("Div", b.number(1.0), root), x) if form == "1 / root" else b.add("Div", x, root)


def layer_norm(b: Builder, x: str, *, form: str = "Div", axes: tuple[int, ...] = (-1,), **root: Any) -> str:
    centred = b.add("Sub", x, mean(b, x, axes))
    made = quotient(b, centred, root_of(b, centred, axes=axes, **root), form)
    return b.add("Add", b.add("Mul", made, b.weight(WIDTH)), b.weight(WIDTH))


def rms_norm(b: Builder, x: str, form: str = "Div", **root: Any) -> str:
    return b.add("Mul", b.weight(WIDTH), quotient(b, x, root_of(b, x, **root), form))


def negative_power(b: Builder) -> str:
    x = tokens(b)
    total = b.add("Add", mean(b, b.add("Pow", x, b.number(2.0))), b.number(1e-3))
    return b.add("Mul", b.add("Mul", x, b.add("Pow", total, b.number(-0.5))), b.weight(WIDTH))


def without_scale(b: Builder) -> str:
    x = tokens(b)
    centred = b.add("Sub", x, mean(b, x))
    return quotient(b, centred, root_of(b, centred))


def two_differences(b: Builder) -> str:
    """The difference from the mean twice, as older exporters write it."""
    x = tokens(b)
    average = mean(b, x)
    made = b.add("Div", b.add("Sub", x, average), root_of(b, b.add("Sub", x, average)))
    return b.add("Add", b.add("Mul", made, b.weight(WIDTH)), b.weight(WIDTH))


def between_casts(b: Builder) -> str:
    """Computed in FP32, whatever the type around it is."""
    x = b.add("Cast", tokens(b), to=TensorProto.FLOAT)
    squared = b.add("Pow", x, b.constant(np.float32(2)))
    root = b.add("Sqrt", b.add("Add", mean(b, squared), b.constant(np.float32(1e-3))))
    kind = TensorProto.FLOAT16 if b.kind is np.float16 else TensorProto.FLOAT
    return b.add("Mul", b.weight(WIDTH), b.add("Cast", b.add("Div", x, root), to=kind))


NORMS: dict[str, tuple[Callable[[Builder], str], str]] = {
    "layer norm": (lambda b: layer_norm(b, tokens(b)), "layer_norm"),
    "squared by a product": (lambda b: layer_norm(b, tokens(b), square="Mul"), "layer_norm"),
    "reciprocal": (lambda b: layer_norm(b, tokens(b), form="Reciprocal"), "layer_norm"),
    "1 / root": (lambda b: layer_norm(b, tokens(b), form="1 / root"), "layer_norm"),
    "axis 2": (lambda b: layer_norm(b, tokens(b), axes=(2,)), "layer_norm"),
    "without scale": (without_scale, "layer_norm"),
    "two differences": (two_differences, "layer_norm"),
    "rms": (lambda b: rms_norm(b, tokens(b)), "rms_norm"),
    "rms, reciprocal": (lambda b: rms_norm(b, tokens(b), form="Reciprocal"), "rms_norm"),
    "rms, negative power": (negative_power, "rms_norm"),
    "rms between casts": (between_casts, "rms_norm"),
}


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_operator(name: str, half: bool, opset: int, on_gpu: bool) -> None:
    b = Builder(half, opset)
    write, fusion = NORMS[name]
    model = b.model(write(b))
    fused = fuse(model, on_gpu=on_gpu)
    assert fused.counts == {fusion: 1}
    assert operators(fused) == ["LayerNormalization" if fusion == "layer_norm" else "SimplifiedLayerNormalization"]
    check_same(model, fused)
    check_same(model, fused, tokens=1, batch=3)


@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms"])
@pytest.mark.parametrize("opset", [13, 20])
def test_a_sum_and_a_norm_in_primitive_operators_are_one(rms: bool, opset: int) -> None:
    b = Builder(opset=opset)
    total = b.add("Add", tokens(b), b.linear(tokens(b, "y"), WIDTH, WIDTH))
    made = rms_norm(b, total, "Reciprocal") if rms else layer_norm(b, total)
    model = b.model(b.add("Add", made, total))
    fused = fuse(model)
    assert fused.counts == {"rms_norm" if rms else "layer_norm": 1, "skip_layer_norm": 1}
    assert operators(fused) == ["MatMul", f"Skip{'Simplified' if rms else ''}LayerNormalization", "Add"]
    check_same(model, fused)
    check_same(model, fused, tokens=1, batch=3)


def test_a_sum_and_the_standards_rms_norm_are_one() -> None:
    b = Builder(opset=23)
    total = b.add("Add", tokens(b), tokens(b, "y"))
    model = b.model(b.add("RMSNormalization", total, b.weight(WIDTH), axis=-1), total)
    fused = fuse(model)
    assert fused.counts == {"skip_layer_norm": 1} and operators(fused) == ["SkipSimplifiedLayerNormalization"]
    check_same(model, fused)


def test_a_scale_of_each_row_is_a_product_behind_the_norm() -> None:
    b = Builder()
    x = tokens(b, length=WIDTH)
    model = b.model(b.add("Mul", b.weight(WIDTH, 1), quotient(b, x, root_of(b, x))))
    fused = fuse(model)
    assert fused.counts == {"rms_norm": 1} and operators(fused) == ["SimplifiedLayerNormalization", "Mul"]
    check_same(model, fused)


def test_differences_from_the_mean_of_another_axis_have_a_norm_of_the_root_mean_square() -> None:
    b = Builder()
    x = tokens(b, length=4)
    centred = b.add("Sub", x, mean(b, x, (1,)))
    model = b.model(quotient(b, centred, root_of(b, centred)))
    fused = fuse(model)
    assert fused.counts == {"rms_norm": 1}
    assert operators(fused) == ["ReduceMean", "Sub", "SimplifiedLayerNormalization"]
    check_same(model, fused)


# ------------------------------------------------------------------------------------------------ near misses


def other_axis(b: Builder) -> tuple[str, ...]:
    return (layer_norm(b, tokens(b, length=4), axes=(1,)),)


def two_axes(b: Builder) -> tuple[str, ...]:
    return (layer_norm(b, tokens(b, length=4), axes=(1, 2)),)


def epsilon_behind_the_root(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    root = b.add("Sqrt", mean(b, b.add("Pow", x, b.number(2.0))))
    return (b.add("Div", x, b.add("Add", root, b.number(1e-3))),)


def epsilon_of_each_column(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    offsets = b.constant(np.linspace(0.1, 1, WIDTH).astype(b.kind))
    return (b.add("Div", x, b.add("Sqrt", b.add("Add", mean(b, b.add("Pow", x, b.number(2.0))), offsets))),)


def largest_of_epsilon(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    return (b.add("Div", x, b.add("Sqrt", b.add("Max", mean(b, b.add("Pow", x, b.number(2.0))), b.number(1e-3)))),)


def cube(b: Builder) -> tuple[str, ...]:
    x = b.add("Abs", tokens(b))
    return (b.add("Div", x, b.add("Sqrt", b.add("Add", mean(b, b.add("Pow", x, b.number(3.0))), b.number(1e-3)))),)


def inverse_quotient(b: Builder) -> tuple[str, ...]:
    x = b.add("Add", b.add("Abs", tokens(b)), b.number(1.0))
    return (b.add("Div", root_of(b, x), x),)


def another_numerator(b: Builder) -> tuple[str, ...]:
    return (b.add("Div", tokens(b, "y"), root_of(b, tokens(b))),)


def not_centred_numerator(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    return (b.add("Div", x, root_of(b, b.add("Sub", x, mean(b, x)))),)


def shared_root(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    root = root_of(b, x)
    return b.add("Div", x, root), b.add("Relu", root)


def variance_is_an_output(b: Builder) -> tuple[str, ...]:
    made = layer_norm(b, tokens(b))
    return made, [node.output[0] for node in b.nodes if node.op_type == "ReduceMean"][1]


def mean_is_read(b: Builder) -> tuple[str, ...]:
    made = layer_norm(b, tokens(b))
    return made, b.add("Relu", next(node.output[0] for node in b.nodes if node.op_type == "ReduceMean"))


def quantized(b: Builder) -> tuple[str, ...]:
    scale, zero = b.number(0.05), b.constant(np.int8(0))
    made = b.add("QuantizeLinear", layer_norm(b, tokens(b)), scale, zero)
    return (b.add("DequantizeLinear", made, scale, zero),)


@pytest.mark.parametrize("form", [other_axis, two_axes, epsilon_behind_the_root,
                                  epsilon_of_each_column, largest_of_epsilon, cube, inverse_quotient, another_numerator,
                                  not_centred_numerator, shared_root, variance_is_an_output, mean_is_read,
                                  quantized])  # fmt: skip
def test_what_is_nearly_a_norm_stays(form: Form) -> None:
    b = Builder()
    model = b.model(*form(b))
    fused = fuse(model)
    assert not fused.counts and "Sqrt" in operators(fused)
    check_same(model, fused)


def test_the_rank_behind_a_computed_reshape_is_the_length_of_its_target() -> None:
    b = Builder()
    x, target = tokens(b), b.given("target", [3], np.int64)
    for _ in range(3):
        x = layer_norm(b, b.add("MatMul", b.add("Reshape", x, target), b.weight(WIDTH, WIDTH)))
    assert operators(fuse(b.model(x))) == ["Reshape", "MatMul", "LayerNormalization"] * 3
