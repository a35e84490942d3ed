"""Sums with norms and biases with activations are fused where the operators compute the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .attention_graphs import WIDTH, Builder, check_same, fuse, operators, tokens

Form = Callable[[Builder], tuple[str, ...]]


def norm(b: Builder, x: str, **given: int | float) -> str:
    return b.add("LayerNormalization", x, b.weight(WIDTH), b.weight(WIDTH), **{"axis": -1, "epsilon": 1e-6} | given)


def after(b: Builder) -> tuple[str, ...]:
    """A norm of the sum alone: BERT."""
    x = tokens(b)
    return (norm(b, b.add("Add", b.linear(x, WIDTH, WIDTH), x)),)


def before(b: Builder) -> tuple[str, ...]:
    """The sum goes on as well: ViT."""
    x = tokens(b)
    total = b.add("Add", x, b.linear(x, WIDTH, WIDTH, first=True))
    return (b.add("Add", total, b.linear(norm(b, total), WIDTH, WIDTH)),)


def sum_is_an_output(b: Builder) -> tuple[str, ...]:
    total = b.add("Add", tokens(b), tokens(b, "y"))
    return norm(b, total), total


def without_offset(b: Builder) -> tuple[str, ...]:
    total = b.add("Add", tokens(b), tokens(b, "y"))
    return (b.add("LayerNormalization", total, b.weight(WIDTH), axis=2),)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", [after, before, sum_is_an_output, without_offset])
def test_a_sum_and_its_norm_are_one_operator(form: Form, half: bool) -> None:
    b = Builder(half)
    model = b.model(*form(b))
    fused = fuse(model)
    assert fused.counts == {"skip_layer_norm": 1}
    assert "LayerNormalization" not in operators(fused)
    check_same(model, fused)
    check_same(model, fused, tokens=1, batch=3)


@pytest.mark.parametrize("form", [after, before])
def test_for_a_cpu_sums_and_norms_are_left_to_onnxruntime(form: Form) -> None:
    b = Builder()
    assert not fuse(b.model(*form(b)), on_gpu=False).counts


def broadcast_addend(b: Builder) -> tuple[str, ...]:
    return (norm(b, b.add("Add", tokens(b), b.given("y", ["batch", 1, WIDTH]))),)


def other_name(b: Builder) -> tuple[str, ...]:
    """A batch that the model names differently may be 1."""
    return (norm(b, b.add("Add", tokens(b), b.given("y", ["keys", "tokens", WIDTH]))),)


def rows_that_were_repeated(b: Builder) -> tuple[str, ...]:
    """A sum of two names, one of which may be 1: shape inference has no name for it."""
    return (norm(b, b.add("Add", tokens(b), b.add("Add", tokens(b), b.given("y", ["batch", "keys", WIDTH])))),)


def constant_addend(b: Builder) -> tuple[str, ...]:
    return (norm(b, b.add("Add", tokens(b), b.weight(1, 1, WIDTH))),)


def other_axis(b: Builder) -> tuple[str, ...]:
    total = b.add("Add", b.given("x", ["batch", 4, WIDTH]), b.given("y", ["batch", 4, WIDTH]))
    return (b.add("LayerNormalization", total, b.weight(4, WIDTH), b.weight(4, WIDTH), axis=1),)


def other_rank(b: Builder) -> tuple[str, ...]:
    return (norm(b, b.add("Add", b.given("x", ["batch", 2, 3, WIDTH]), b.given("y", ["batch", 2, 3, WIDTH]))),)


def mean_is_used(b: Builder) -> tuple[str, ...]:
    total = b.add("Add", tokens(b), tokens(b, "y"))
    return tuple(b.several("LayerNormalization", 2, total, b.weight(WIDTH), b.weight(WIDTH), axis=-1))


def computed_scale(b: Builder) -> tuple[str, ...]:
    total = b.add("Add", tokens(b), tokens(b, "y"))
    return (b.add("LayerNormalization", total, b.given("scale", [WIDTH]), b.weight(WIDTH), axis=-1),)


def doubled(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    return (norm(b, b.add("Add", x, x)),)


def quantized(b: Builder) -> tuple[str, ...]:
    scale, zero = b.number(0.05), b.constant(np.int8(0))
    pair = b.add("DequantizeLinear", b.add("QuantizeLinear", tokens(b, "y"), scale, zero), scale, zero)
    return (norm(b, b.add("Add", tokens(b), pair)),)


@pytest.mark.parametrize("form", [broadcast_addend, other_name, rows_that_were_repeated, constant_addend, other_axis,
                                  other_rank, mean_is_used, computed_scale, doubled, quantized])  # fmt: skip
def test_other_sums_with_norms_stay(form: Form) -> None:
    b = Builder()
    model = b.model(*form(b))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused, keys=1)


def test_a_bias_that_something_else_reads_is_not_taken_in() -> None:
    b = Builder()
    x = tokens(b)
    biased = b.linear(x, WIDTH, WIDTH)
    model = b.model(norm(b, b.add("Add", biased, x)), biased)
    fused = fuse(model)
    assert fused.counts == {"skip_layer_norm": 1}
    assert len(next(node for node in fused.proto.graph.node if node.op_type == "SkipLayerNormalization").input) == 4
    check_same(model, fused)


# ------------------------------------------------------------------------------------------------ activations


def erf(b: Builder, x: str, order: int = 0) -> str:
    """Gelu with erf: the half and the sum in three orders."""
    root, half, one = b.number(2**0.5), b.number(0.5), b.number(1.0)
    inner = b.add("Add", b.add("Erf", b.add("Div", x, root)), one)
    if order == 0:
        return b.add("Mul", b.add("Mul", x, inner), half)
    if order == 1:
        return b.add("Mul", b.add("Mul", half, x), inner)
    return b.add("Mul", x, b.add("Mul", inner, half))


def tanh(b: Builder, x: str, *, power: bool = True) -> str:
    cube = b.add("Pow", x, b.number(3.0)) if power else b.add("Mul", x, b.add("Mul", x, x))
    inner = b.add("Mul", b.number((2 / np.pi) ** 0.5), b.add("Add", x, b.add("Mul", cube, b.number(0.044715))))
    return b.add("Mul", b.add("Mul", b.number(0.5), x), b.add("Add", b.number(1.0), b.add("Tanh", inner)))


def tanh_before(b: Builder, x: str, cube: float = 0.044715, one: float = 1.0) -> str:
    """x in front of the sum, as `gelu_fast` of transformers writes it."""
    square = b.add("Mul", b.add("Mul", x, b.number(cube)), x)
    inner = b.add("Mul", b.add("Mul", x, b.number((2 / np.pi) ** 0.5)), b.add("Add", square, b.number(one)))
    return b.add("Mul", b.add("Mul", x, b.number(0.5)), b.add("Add", b.add("Tanh", inner), b.number(1.0)))


ACTIVATIONS: dict[str, tuple[Callable[[Builder, str], str], dict[str, int]]] = {
    "Gelu": (lambda b, x: b.add("Gelu", x), {"bias_gelu": 1}),
    "Gelu tanh": (lambda b, x: b.add("Gelu", x, approximate="tanh"), {"bias_gelu": 1}),
    "erf, half last": (erf, {"gelu": 1, "bias_gelu": 1}),
    "erf, half first": (lambda b, x: erf(b, x, 1), {"gelu": 1, "bias_gelu": 1}),
    "erf, half inside": (lambda b, x: erf(b, x, 2), {"gelu": 1, "bias_gelu": 1}),
    "tanh": (tanh, {"fast_gelu": 1, "bias_gelu": 1}),
    "tanh by products": (lambda b, x: tanh(b, x, power=False), {"fast_gelu": 1, "bias_gelu": 1}),
    "tanh, x before the sum": (lambda b, x: tanh_before(b, x), {"fast_gelu": 1, "bias_gelu": 1}),
}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_bias_and_its_activation_are_one_operator(name: str, half: bool) -> None:
    b = Builder(half)
    write, counts = ACTIVATIONS[name]
    model = b.model(write(b, b.linear(tokens(b), WIDTH, WIDTH)))
    fused = fuse(model)
    assert fused.counts == counts
    assert len(operators(fused)) == 2
    check_same(model, fused)


def test_an_activation_without_a_bias_is_put_together_alone() -> None:
    b = Builder()
    model = b.model(erf(b, tokens(b)))
    fused = fuse(model)
    assert fused.counts == {"gelu": 1} and operators(fused) == ["Gelu"]
    check_same(model, fused)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", ["x first", "x last", "quotient"])
def test_a_product_with_a_scaled_sigmoid_is_one_operator(form: str, half: bool) -> None:
    b = Builder(half)
    x = b.linear(tokens(b), WIDTH, WIDTH)
    scaled = b.add("Div", x, b.number(1 / 1.702)) if form == "quotient" else b.add("Mul", b.number(1.702), x)
    gate = b.add("Sigmoid", scaled)
    model = b.model(b.add("Mul", *((gate, x) if form == "x last" else (x, gate))))
    fused = fuse(model)
    assert fused.counts == {"quick_gelu": 1} and operators(fused)[-1] == "QuickGelu"
    if not half:  # ONNX Runtime's CPU provider has no FP16 kernel
        check_same(model, fused)
        check_same(model, fused, tokens=1, batch=3)


def test_for_a_cpu_a_scaled_sigmoid_is_left_to_onnxruntime() -> None:
    b = Builder()
    x = tokens(b)
    model = b.model(b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, b.number(1.702)))))
    assert not fuse(model, on_gpu=False).counts


def unscaled_sigmoid(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    return (b.add("Mul", x, b.add("Sigmoid", x)),)


def gate_of_another(b: Builder) -> tuple[str, ...]:
    return (b.add("Mul", tokens(b, "y"), b.add("Sigmoid", b.add("Mul", tokens(b), b.number(1.702)))),)


def shared_gate(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    gate = b.add("Sigmoid", b.add("Mul", x, b.number(1.702)))
    return b.add("Mul", x, gate), b.add("Relu", gate)


def gate_is_an_output(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    gate = b.add("Sigmoid", b.add("Mul", x, b.number(1.702)))
    return b.add("Mul", x, gate), gate


def scale_of_each_column(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    return (b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, b.weight(WIDTH)))),)


def quantized_gate(b: Builder) -> tuple[str, ...]:
    x, scale, zero = tokens(b), b.number(0.05), b.constant(np.int8(0))
    made = b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, b.number(1.702))))
    return (b.add("DequantizeLinear", b.add("QuantizeLinear", made, scale, zero), scale, zero),)


@pytest.mark.parametrize("form", [unscaled_sigmoid, gate_of_another, shared_gate, gate_is_an_output,
                                  scale_of_each_column, quantized_gate])  # fmt: skip
def test_other_products_with_a_sigmoid_stay(form: Form) -> None:
    b = Builder()
    model = b.model(*form(b))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused)


@pytest.mark.parametrize("given", [{"cube": 0.05}, {"one": 0.9}])
def test_another_cube_or_sum_in_front_of_a_tanh_is_not_a_gelu(given: dict[str, float]) -> None:
    b = Builder()
    model = b.model(tanh_before(b, tokens(b), **given))
    fused = fuse(model)
    assert not fused.counts and "Tanh" in operators(fused)
    check_same(model, fused)


def shared_erf(b: Builder) -> tuple[str, ...]:
    made = erf(b, tokens(b))
    return made, b.add("Relu", next(node.output[0] for node in b.nodes if node.op_type == "Erf"))


def other_root(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    inner = b.add("Add", b.add("Erf", b.add("Div", x, b.number(2.0))), b.number(1.0))
    return (b.add("Mul", b.add("Mul", x, inner), b.number(0.5)),)


def other_half(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    inner = b.add("Add", b.add("Erf", b.add("Div", x, b.number(2**0.5))), b.number(1.0))
    return (b.add("Mul", b.add("Mul", x, inner), b.number(0.7)),)


def other_factor(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    inner = b.add("Add", b.add("Erf", b.add("Div", x, b.number(2**0.5))), b.number(1.0))
    return (b.add("Mul", b.add("Mul", tokens(b, "y"), inner), b.number(0.5)),)


def middle_is_an_output(b: Builder) -> tuple[str, ...]:
    made = erf(b, tokens(b))
    return made, b.nodes[2].output[0]


def one_more_dimension(b: Builder) -> tuple[str, ...]:
    """A half of four dimensions, which the product has then too."""
    made = erf(b, tokens(b))
    half = next(item for item in b.weights if item.name == b.nodes[-1].input[1])
    half.dims.extend([1, 1, 1, 1])
    return (made,)


@pytest.mark.parametrize(
    "form", [shared_erf, other_root, other_half, other_factor, middle_is_an_output, one_more_dimension]
)
def test_what_is_nearly_gelu_stays(form: Form) -> None:
    b = Builder()
    model = b.model(*form(b))
    fused = fuse(model)
    assert not fused.counts and "Erf" in operators(fused)
    check_same(model, fused)


@pytest.mark.parametrize("shape", [(WIDTH, WIDTH), (1, 5, 1), ()])
def test_what_is_added_before_an_activation_is_a_bias_only_by_its_shape(shape: tuple[int, ...]) -> None:
    b = Builder()
    x = tokens(b) if shape != (WIDTH, WIDTH) else tokens(b, length=WIDTH)
    model = b.model(b.add("Gelu", b.add("Add", x, b.weight(*shape) if shape else b.number(0.3))))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused)


def test_a_quantized_bias_and_activation_stay() -> None:
    b = Builder()
    scale, zero = b.number(0.05), b.constant(np.int8(0))
    made = b.add("Gelu", b.linear(tokens(b), WIDTH, WIDTH))
    model = b.model(b.add("DequantizeLinear", b.add("QuantizeLinear", made, scale, zero), scale, zero))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused)
