"""Attention is found in every form that exporters write, and nowhere else; fused graphs give the numbers of unfused ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from trt_engine.graph.fusion import fuse_model
from trt_engine.verbs.doctor.machine import requirement_holds

from .attention_graphs import (
    BATCH,
    HEADS,
    SIZE,
    TOKENS,
    WIDTH,
    Builder,
    check_same,
    fuse,
    operators,
    self_attention,
    tokens,
)

Form = Callable[[Builder], str]


def packed(b: Builder) -> str:
    """Linear to 3 x width, reshaped to (batch, tokens, 3, heads, size), transposed, split: timm."""
    qkv = b.linear(tokens(b, length=TOKENS), WIDTH, 3 * WIDTH)
    parts = b.add("Transpose", b.add("Reshape", qkv, b.ints(-1, TOKENS, 3, HEADS, SIZE)), perm=(2, 0, 3, 1, 4))
    q, k, v = (b.add("Squeeze", part, b.ints(0)) for part in b.several("Split", 3, parts, num_outputs=3, axis=0))
    return b.merged(b.core(q, b.add("Transpose", k, perm=(0, 1, 3, 2)), v))


def packed_gather(b: Builder) -> str:
    """The same, indexed by Gather, each factor of the product scaled by a fourth root."""
    qkv = b.linear(tokens(b), WIDTH, 3 * WIDTH, first=True)
    parts = b.add("Transpose", b.add("Reshape", qkv, b.ints(0, 0, 3, HEADS, SIZE)), perm=(2, 0, 3, 1, 4))
    q, k, v = (b.add("Gather", parts, b.constant(np.array(at, np.int64)), axis=0) for at in range(3))
    root = b.add("Sqrt", b.add("Sqrt", b.number(1 / SIZE)))
    q, k = b.add("Mul", q, root), b.add("Mul", b.add("Transpose", k, perm=(0, 1, 3, 2)), root)
    return b.merged(b.core(q, k, v, lambda b, scores: scores))


def packed_split(b: Builder) -> str:
    """Linear to 3 x width, split along the columns: GPT-2."""
    q, k, v = b.several("Split", 3, b.linear(tokens(b), WIDTH, 3 * WIDTH), b.ints(WIDTH, WIDTH, WIDTH), axis=-1)
    return b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v)))


def packed_by_head(b: Builder) -> str:
    """Queries, keys and values of one head beside each other: GPT-NeoX, BLOOM."""
    qkv = b.add("Reshape", b.linear(tokens(b), WIDTH, 3 * WIDTH), b.ints(0, 0, HEADS, 3 * SIZE))
    q, k, v = b.several("Split", 3, b.add("Transpose", qkv, perm=(0, 2, 1, 3)), b.ints(SIZE, SIZE, SIZE), axis=-1)
    return b.merged(b.core(q, b.add("Transpose", k, perm=(0, 1, 3, 2)), v))


def separate(b: Builder) -> str:
    return self_attention(b, tokens(b))


def separate_without_bias(b: Builder) -> str:
    return self_attention(b, tokens(b), bias=False)


def scaled_query(b: Builder) -> str:
    """Queries divided before the heads are split; keys without a bias: Whisper."""
    x = tokens(b)
    q = b.add("Div", b.linear(x, WIDTH, WIDTH), b.number(SIZE**0.5))
    k, v = b.linear(x, WIDTH, WIDTH, bias=False), b.linear(x, WIDTH, WIDTH)
    return b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v), lambda b, scores: scores))


def keys_by_reshape(b: Builder) -> str:
    """Keys transposed with batch and heads merged: the dynamo exporter."""
    q, k, v = (b.heads(b.linear(tokens(b, length=TOKENS), WIDTH, WIDTH)) for _ in range(3))
    k = b.add("Transpose", b.add("Reshape", k, b.ints(-1, TOKENS, SIZE)), perm=(0, 2, 1))
    k = b.add("Reshape", k, b.ints(-1, HEADS, SIZE, TOKENS))
    return b.merged(b.core(q, k, v))


def merged_heads(b: Builder) -> str:
    """Products of rank 3, batch and heads in one dimension: `bmm`."""
    x = tokens(b, length=TOKENS)
    q, k, v = (
        b.add("Reshape", b.heads(b.linear(x, WIDTH, WIDTH)), b.ints(-1, TOKENS, SIZE)) for _ in range(3)
    )  # fmt: skip
    mixed = b.add("Reshape", b.core(q, b.add("Transpose", k, perm=(0, 2, 1)), v), b.ints(-1, HEADS, TOKENS, SIZE))
    return b.merged(mixed)


def sequence_first(b: Builder) -> str:
    """(tokens, batch, width): `torch.nn.MultiheadAttention`, fixed sizes."""
    x = b.given("x", [TOKENS, BATCH, WIDTH])
    q, k, v = (
        b.add("Reshape", b.linear(x, WIDTH, WIDTH), b.ints(TOKENS, BATCH * HEADS, SIZE)) for _ in range(3)
    )  # fmt: skip
    q, v = (b.add("Reshape", b.add("Transpose", y, perm=(1, 0, 2)), b.ints(BATCH, HEADS, TOKENS, SIZE)) for y in (q, v))
    k = b.add("Transpose", b.add("Reshape", b.add("Transpose", k, perm=(1, 0, 2)), b.ints(BATCH, HEADS, TOKENS, SIZE)),
              perm=(0, 1, 3, 2))  # fmt: skip
    mixed = b.add("Transpose", b.core(q, k, v), perm=(2, 0, 1, 3))
    return b.add("Reshape", b.linear(b.add("Reshape", mixed, b.ints(TOKENS * BATCH, WIDTH)), WIDTH, WIDTH),
                 b.ints(TOKENS, BATCH, WIDTH))  # fmt: skip


def gemm(b: Builder) -> str:
    """Projections over merged rows, transposed weights."""
    x = tokens(b, length=TOKENS)
    rows = b.add("Reshape", x, b.ints(-1, WIDTH))

    def part(perm: tuple[int, ...]) -> str:
        made = b.add("Gemm", rows, b.weight(WIDTH, WIDTH), b.weight(WIDTH), transB=1)
        return b.add("Transpose", b.add("Reshape", made, b.ints(-1, TOKENS, HEADS, SIZE)), perm=perm)

    return b.merged(b.core(part((0, 2, 1, 3)), part((0, 2, 3, 1)), part((0, 2, 1, 3))))


def wide_values(b: Builder) -> str:
    """Values of another head size."""
    x = tokens(b)
    q, k, v = (b.linear(x, WIDTH, width) for width in (WIDTH, WIDTH, 2 * WIDTH))
    mixed = b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v, size=2 * SIZE))
    return b.merged(mixed, 2 * WIDTH)


def one_head(b: Builder) -> str:
    x = tokens(b)
    q, k, v = (b.linear(x, WIDTH, WIDTH) for _ in range(3))
    return b.core(q, b.add("Transpose", k, perm=(0, 2, 1)), v)


def half_softmax(b: Builder) -> str:
    """Scores cast to FP32 for the softmax: LLaMA in FP16."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(b.kind))
    q, k, v = (b.linear(tokens(b), WIDTH, WIDTH) for _ in range(3))
    scores = b.add("Mul", b.add("MatMul", b.heads(q), b.heads(k, (0, 2, 3, 1))), b.number(0.5))
    shares = b.add("Cast", b.add("Softmax", b.add("Cast", scores, to=1), axis=-1), to=kind)
    return b.merged(b.add("MatMul", shares, b.heads(v)))


PACKED = [packed, packed_gather, packed_split, packed_by_head, separate, separate_without_bias, scaled_query,
          keys_by_reshape, merged_heads, sequence_first, gemm, wide_values, one_head, half_softmax]  # fmt: skip


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", PACKED)
def test_attention_of_one_tensor_takes_its_projections_in(form: Form, half: bool) -> None:
    b = Builder(half)
    model = b.model(form(b))
    fused = fuse(model)
    assert fused.counts == {"attention": 1}, fused.unfused
    assert not {"Softmax", "Erf"} & set(operators(fused))
    check_same(model, fused)
    if len(b.inputs["x"][1]) == 3 and b.inputs["x"][1][1] == "tokens":
        check_same(model, fused, tokens=1, batch=1)
        check_same(model, fused, tokens=33)


@pytest.mark.parametrize("form", PACKED)
def test_for_a_cpu_the_projections_stay_products_of_their_own(form: Form) -> None:
    b = Builder()
    model = b.model(form(b))
    fused = fuse(model, on_gpu=False)
    assert fused.counts == {"multi_head_attention": 1}, fused.unfused
    check_same(model, fused)


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 22])
def test_graphs_of_every_opset_from_11_on_are_fused_with_operators_of_theirs(opset: int) -> None:
    b = Builder(opset=opset)
    mask = b.given("mask", ["batch", "tokens"])
    row = b.add("Unsqueeze", mask, axes=[1, 2]) if opset < 13 else b.add("Unsqueeze", mask, b.ints(1, 2))
    model = b.model(self_attention(b, tokens(b), lambda b, scores: b.add("Add", scores, row)))
    fused = fuse(model)
    assert fused.counts == {"attention": 1}, fused.unfused
    check_same(model, fused)


def test_an_older_opset_is_left_alone() -> None:
    b = Builder(opset=10)
    fused = fuse(b.model(separate(b)))
    assert not fused.counts


def cross(b: Builder) -> str:
    q = b.linear(tokens(b), WIDTH, WIDTH)
    memory = tokens(b, "memory", "keys", 8)
    k, v = b.linear(memory, 8, WIDTH), b.linear(memory, 8, WIDTH)
    return b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v)))


def normed_heads(b: Builder) -> str:
    """A norm over each head of queries and keys, behind the transposition: Qwen3."""
    x = tokens(b)

    def norm(y: str) -> str:
        return b.add("LayerNormalization", y, b.weight(SIZE), b.weight(SIZE), axis=-1)

    q, k, v = (b.heads(b.linear(x, WIDTH, WIDTH)) for _ in range(3))
    return b.merged(b.core(norm(q), b.add("Transpose", norm(k), perm=(0, 1, 3, 2)), v))


def rotated_heads(b: Builder) -> str:
    """A rotary embedding before the transposition."""
    x = tokens(b)

    def rotated(y: str, perm: tuple[int, ...]) -> str:
        split = b.add("Reshape", y, b.ints(0, 0, HEADS, SIZE))
        first, second = b.several("Split", 2, split, num_outputs=2, axis=-1)
        turned = b.add("Concat", b.add("Neg", second), first, axis=-1)
        made = b.add("Add", b.add("Mul", split, b.weight(1, 1, 1, SIZE)), b.add("Mul", turned, b.weight(1, 1, 1, SIZE)))
        return b.add("Transpose", made, perm=perm)

    q, k, v = (b.linear(x, WIDTH, WIDTH) for _ in range(3))
    return b.merged(b.core(rotated(q, (0, 2, 1, 3)), rotated(k, (0, 2, 3, 1)), b.heads(v)))


def given_heads(b: Builder) -> str:
    """Heads that are inputs of the graph, the result left in heads."""
    q, k, v = (
        b.given(name, ["batch", HEADS, length, SIZE])
        for name, length in (("q", "tokens"), ("k", "keys"), ("v", "keys"))
    )
    return b.core(q, b.add("Transpose", k, perm=(0, 1, 3, 2)), v)


def given_heads_of_two_sizes(b: Builder) -> str:
    """Keys and values of rank 4 with sizes of their own, which the operator takes with merged heads alone."""
    q, k = (b.given(name, ["batch", HEADS, "tokens", SIZE]) for name in ("q", "k"))
    return b.core(q, b.add("Transpose", k, perm=(0, 1, 3, 2)), b.given("v", ["batch", HEADS, "tokens", SIZE + 1]))


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", [cross, normed_heads, rotated_heads, given_heads, given_heads_of_two_sizes])
def test_attention_of_several_tensors_keeps_its_projections(form: Form, half: bool) -> None:
    b = Builder(half)
    model = b.model(form(b))
    fused = fuse(model)
    assert fused.counts == {"multi_head_attention": 1}, fused.unfused
    for length in (1, 5, 31):
        check_same(model, fused, tokens=length)


# ------------------------------------------------------------------------------------------------ masks


def additive(*shape: Any) -> Callable[[Builder, str], str]:
    return lambda b, scores: b.add("Add", b.add("Div", scores, b.number(2.0)), b.given("mask", list(shape)))


def added_first(b: Builder, scores: str) -> str:
    """A bias that is scaled with the scores."""
    return b.add("Mul", b.add("Add", b.given("mask", [1, HEADS, "tokens", "tokens"]), scores), b.number(0.5))


def boolean(
    fill: float, *, masked: bool, shape: tuple[Any, ...] = ("batch", 1, "tokens", "tokens")
) -> Callable[[Builder, str], str]:
    def edit(b: Builder, scores: str) -> str:
        condition, value = b.given("mask", list(shape), np.bool_), b.number(fill)
        return b.add("Where", condition, *((value, scores) if masked else (scores, value)))

    return edit


def padding(b: Builder, scores: str) -> str:
    """(1 - mask) times a large negative number, of (batch, tokens): BERT."""
    kept = b.add("Unsqueeze", b.add("Cast", b.given("mask", ["batch", "tokens"], np.bool_),
                                    to=helper.np_dtype_to_tensor_dtype(np.dtype(b.kind))), b.ints(1, 2))  # fmt: skip
    return b.add("Add", scores, b.add("Mul", b.add("Sub", b.number(1.0), kept), b.number(-10000.0)))


MASKS = {
    "per batch and head": additive("batch", HEADS, "tokens", "tokens"),
    "for all heads": additive("batch", 1, "tokens", "tokens"),
    "for all batches": additive(1, HEADS, "tokens", "tokens"),
    "one row": additive("batch", 1, 1, "tokens"),
    "rank 2": additive("tokens", "tokens"),
    "rank 3": additive(HEADS, "tokens", "tokens"),
    "scaled": added_first,
    "keep": boolean(-3e4, masked=False),
    "drop": boolean(-3e4, masked=True),
    "drop one row": boolean(-3e4, masked=True, shape=("batch", 1, 1, "tokens")),
    "padding": padding,
}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_become_a_bias_of_the_scores(mask: str, half: bool) -> None:
    b = Builder(half)
    model = b.model(self_attention(b, tokens(b), MASKS[mask]))
    fused = fuse(model)
    assert fused.counts == {"attention": 1}, fused.unfused
    for length in (2, 5, 17):
        feeds = {}
        if half and "Where" in [node.op_type for node in b.nodes]:  # FP16 has no number that takes every score in
            shape = [{"batch": BATCH, "tokens": length}.get(size, size) for size in b.inputs["mask"][1]]
            masked = np.random.default_rng(0).random(shape) < 0.5
            masked[..., 0] = False
            feeds = {"mask": masked == (mask != "keep")}
        check_same(model, fused, tokens=length, feeds=feeds)


def guarded(b: Builder, fill: float, shape: list[Any]) -> str:
    """Rows without a key give 0: `scaled_dot_product_attention` with a mask, as torch exports it."""
    mask = b.add("Where", b.given("mask", shape, np.bool_), b.number(0.0), b.number(fill))
    q, k, v = (b.linear(tokens(b), WIDTH, WIDTH) for _ in range(3))
    shares = b.add("Softmax", b.add("Add", b.add("MatMul", b.heads(q), b.heads(k, (0, 2, 3, 1))), mask), axis=-1)
    shares = b.add("Where", b.add("IsNaN", shares), b.number(0.0), shares)
    return b.merged(b.add("MatMul", shares, b.heads(v)))


@pytest.mark.parametrize("fill", [-np.inf, -3.0e38])
def test_rows_whose_keys_are_all_masked_give_what_they_gave(fill: float) -> None:
    b = Builder()
    model = b.model(guarded(b, fill, ["batch", 1, "tokens", "tokens"]))
    fused = fuse(model)
    assert fused.counts == {"attention": 1}, fused.unfused
    mask = np.random.default_rng(0).random((BATCH, 1, TOKENS, TOKENS)) < 0.5
    mask[1, 0, 2] = mask[0, 0, 0] = False
    mask[0, 0, 1] = True
    check_same(model, fused, feeds={"mask": mask})


def test_a_mask_that_several_layers_share_is_prepared_once() -> None:
    b = Builder()
    x, row = tokens(b), b.given("mask", ["batch", 1, 1, "tokens"])
    for _ in range(3):
        x = self_attention(b, x, lambda b, scores: b.add("Add", scores, row))
    model = b.model(x)
    fused = fuse(model)
    assert fused.counts == {"attention": 3}
    assert operators(fused).count("Expand") == 1
    check_same(model, fused)


# ------------------------------------------------------------------------------------------------ near misses


def wrong_axis(b: Builder) -> tuple[str, ...]:
    q, k, v = (b.linear(tokens(b, length=TOKENS), WIDTH, WIDTH) for _ in range(3))
    return (b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v), axis=2)),)


def shared_shares(b: Builder) -> tuple[str, ...]:
    mixed = separate(b)
    shares = next(node.output[0] for node in b.nodes if node.op_type == "Softmax")
    return mixed, b.add("ReduceMean", shares)


def shares_are_an_output(b: Builder) -> tuple[str, ...]:
    mixed = separate(b)
    return mixed, next(node.output[0] for node in b.nodes if node.op_type == "Softmax")


def scores_are_an_output(b: Builder) -> tuple[str, ...]:
    mixed = separate(b)
    return mixed, next(node.output[0] for node in b.nodes if node.op_type == "Mul")


def shared_scores(b: Builder) -> tuple[str, ...]:
    mixed = separate(b)
    return mixed, b.add("Relu", next(node.output[0] for node in b.nodes if node.op_type == "Mul"))


def other_heads_of_values(b: Builder) -> tuple[str, ...]:
    """Four heads of values for one product of shares broadcast over one head of queries."""
    x = tokens(b)
    q, k = (b.heads(b.linear(x, WIDTH, SIZE), perm, heads=1) for perm in ((0, 2, 1, 3), (0, 2, 3, 1)))
    return (b.merged(b.core(q, k, b.heads(b.linear(x, WIDTH, WIDTH)))),)


def mixed_heads(b: Builder) -> tuple[str, ...]:
    """Queries whose heads are split across the columns the other way round."""
    x = tokens(b)
    q = b.add("Transpose", b.add("Reshape", b.linear(x, WIDTH, WIDTH), b.ints(0, 0, SIZE, HEADS)), perm=(0, 3, 1, 2))
    k, v = b.heads(b.linear(x, WIDTH, WIDTH), (0, 2, 3, 1)), b.heads(b.linear(x, WIDTH, WIDTH))
    return (b.merged(b.core(q, k, v)),)


def mask_of_rank_5(b: Builder) -> tuple[str, ...]:
    mask = b.given("mask", [1, 1, HEADS, TOKENS, TOKENS])

    def edit(b: Builder, scores: str) -> str:
        return b.add("Squeeze", b.add("Add", scores, mask), b.ints(0))

    return (self_attention(b, tokens(b, length=TOKENS), edit),)


def mask_per_query(b: Builder) -> tuple[str, ...]:
    return (self_attention(b, tokens(b, length=TOKENS), additive("batch", 1, TOKENS, 1)),)


def weak_mask(b: Builder) -> tuple[str, ...]:
    return (self_attention(b, tokens(b), boolean(-3.0, masked=True)),)


def mask_that_is_scaled_down(b: Builder) -> tuple[str, ...]:
    def edit(b: Builder, scores: str) -> str:
        return b.add("Mul", boolean(-1e4, masked=True)(b, scores), b.number(1e-4))

    return (self_attention(b, tokens(b), edit),)


def mask_that_is_negated(b: Builder) -> tuple[str, ...]:
    def edit(b: Builder, scores: str) -> str:
        return b.add("Mul", boolean(-1e9, masked=True)(b, scores), b.number(-1.0))

    return (self_attention(b, tokens(b), edit),)


def queries_for_the_whole_batch(b: Builder) -> tuple[str, ...]:
    """Learned queries, which the product repeats for each row of the batch."""
    x = tokens(b)
    q, k, v = (b.linear(y, WIDTH, WIDTH) for y in (b.weight(1, TOKENS, WIDTH), x, x))
    return (b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v))),)


def capped_scores(b: Builder) -> tuple[str, ...]:
    return (self_attention(b, tokens(b), lambda b, scores: b.add("Tanh", scores)),)


def vector_scale(b: Builder) -> tuple[str, ...]:
    return (self_attention(b, tokens(b), lambda b, scores: b.add("Mul", scores, b.weight(HEADS, 1, 1))),)


def guard_with_another_number(b: Builder) -> tuple[str, ...]:
    made = guarded(b, -np.inf, ["batch", 1, "tokens", "tokens"])
    where = [node for node in b.nodes if node.op_type == "Where"][-1]
    where.input[1] = b.number(1.0)
    return (made,)


def guard_per_head(b: Builder) -> tuple[str, ...]:
    return (guarded(b, -np.inf, ["batch", HEADS, "tokens", "tokens"]),)


def scores_of_zero(b: Builder) -> tuple[str, ...]:
    """A scale of 0 is ONNX Runtime's default."""
    return (self_attention(b, tokens(b), lambda b, scores: b.add("Mul", scores, b.number(0.0))),)


def batch_of_another_name(b: Builder) -> tuple[str, ...]:
    """Which may be 1, and repeated."""
    memory = b.given("memory", ["keys", "tokens", WIDTH])
    q, k, v = (b.linear(y, WIDTH, WIDTH) for y in (tokens(b), memory, memory))
    return (b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v))),)


def batch_that_was_repeated(b: Builder) -> tuple[str, ...]:
    """A sum with a tensor of another batch in front of the queries: shape inference has no name for it."""
    x = tokens(b)
    total = b.add("Add", x, b.given("y", ["keys", "tokens", WIDTH]))
    q, k, v = (b.linear(y, WIDTH, WIDTH) for y in (total, x, x))
    return (b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v))),)


def mask_that_repeats_the_scores(b: Builder) -> tuple[str, ...]:
    return (self_attention(b, b.given("x", ["batch", 1, WIDTH]), additive(1, 1, 3, 1)),)


def mask_of_another_batch(b: Builder) -> tuple[str, ...]:
    return (self_attention(b, tokens(b), additive("keys", 1, "tokens", "tokens")),)


def mask_of_fixed_rows_beside_an_open_number_of_queries(b: Builder) -> tuple[str, ...]:
    """A Reshape leaves the number of queries open: it is that of the tokens, which may be 1."""
    x, mask = tokens(b), b.given("mask", [1, 1, TOKENS, "tokens"])
    q, k, v = (b.linear(x, WIDTH, WIDTH) for _ in range(3))
    opened = b.add("Relu", b.add("Reshape", q, b.ints(0, -1, HEADS, SIZE)))
    q = b.add("Transpose", opened, perm=(0, 2, 1, 3))
    masked = b.core(q, b.heads(k, (0, 2, 3, 1)), b.heads(v), lambda b, scores: b.add("Add", scores, mask))
    return (b.merged(masked),)


def weak_fill_beside_another_mask(b: Builder) -> tuple[str, ...]:
    def edit(b: Builder, scores: str) -> str:
        kept = b.given("kept", ["batch", 1, 1, "tokens"], np.bool_)
        return b.add("Where", kept, additive("batch", 1, "tokens", "tokens")(b, scores), b.number(-1e4))

    return (self_attention(b, tokens(b), edit),)


MISSES = [mask_of_fixed_rows_beside_an_open_number_of_queries, scores_of_zero,
          batch_of_another_name, batch_that_was_repeated, mask_that_repeats_the_scores,
          mask_of_another_batch, weak_fill_beside_another_mask, wrong_axis, shared_shares, shares_are_an_output,
          scores_are_an_output, shared_scores, other_heads_of_values, mask_of_rank_5, mask_per_query, weak_mask,
          capped_scores, vector_scale, guard_with_another_number, guard_per_head, mask_that_is_scaled_down,
          mask_that_is_negated, queries_for_the_whole_batch]  # fmt: skip


@pytest.mark.parametrize("miss", MISSES)
def test_what_is_nearly_attention_stays_as_it_is_and_has_a_reason(miss: Callable[[Builder], tuple[str, ...]]) -> None:
    b = Builder()
    model = b.model(*miss(b))
    fused = fuse(model)
    assert not fused.counts
    assert operators(fused).count("Softmax") == 1
    assert fused.unfused[0].reason
    check_same(model, fused, keys=1)


def test_heads_split_the_other_way_round_are_gathered_from_their_columns() -> None:
    b = Builder()
    model = b.model(*mixed_heads(b))
    fused = fuse(model)
    assert fused.counts == {"attention": 1}
    check_same(model, fused)


@pytest.mark.parametrize("where", ["query", "key", "value", "shares", "weight"])
def test_a_graph_with_quantized_products_is_not_fused_there(where: str) -> None:
    b = Builder()
    scale, zero = b.number(0.05), b.constant(np.int8(0))

    def pair(x: str) -> str:
        return b.add("DequantizeLinear", b.add("QuantizeLinear", x, scale, zero), scale, zero)

    x = tokens(b)
    q, k, v = (b.linear(x, WIDTH, WIDTH) for _ in range(3))
    if where == "weight":
        stored = b.constant(np.ones((WIDTH, WIDTH), np.int8))
        v = b.add("MatMul", pair(x), b.add("DequantizeLinear", stored, scale, zero))
    q, k, v = b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v)
    q, k, v = (pair(y) if name == where else y for name, y in (("query", q), ("key", k), ("value", v)))
    shares = b.add("Softmax", b.add("MatMul", q, k), axis=-1)
    mixed = b.merged(b.add("MatMul", pair(shares) if where == "shares" else shares, v))
    model = b.model(mixed)
    fused = fuse(model)
    # quantized projections in front of products that are not leave those to be fused
    assert fused.counts == ({"multi_head_attention": 1} if where == "weight" else {})
    assert operators(fused).count("QuantizeLinear") == 1
    check_same(model, fused)


def test_projections_that_something_else_reads_are_not_computed_twice() -> None:
    b = Builder()
    mixed = separate(b)
    key = [node.output[0] for node in b.nodes if node.op_type == "Add"][1]
    model = b.model(mixed, key)
    fused = fuse(model)
    assert fused.counts == {"multi_head_attention": 1}
    assert operators(fused).count("MatMul") == 3
    check_same(model, fused)


# ------------------------------------------------------------------------------------------------ opset 23


@pytest.mark.parametrize("mask", [None, "boolean", "additive", "causal"])
@pytest.mark.parametrize("rank", [3, 4])
def test_the_standard_attention_becomes_onnxruntimes_own(rank: int, mask: str | None) -> None:
    b = Builder(opset=23)
    x = tokens(b)
    q, k, v = (b.linear(x, WIDTH, WIDTH) for _ in range(3))
    if rank == 4:
        q, k, v = (b.heads(y) for y in (q, k, v))
    inputs = [q, k, v]
    if mask in ("boolean", "additive"):
        inputs.append(b.given("mask", ["tokens", "tokens"], np.bool_ if mask == "boolean" else None))
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS} if rank == 3 else {}
    made = b.add("Attention", *inputs, is_causal=int(mask == "causal"), **heads)
    model = b.model(made if rank == 3 else b.merged(made))
    fused = fuse(model)
    assert fused.counts == {"attention": 1}, fused.unfused
    assert [node.domain for node in fused.proto.graph.node if node.op_type == "Attention"] == ["com.microsoft"]
    feeds = {"mask": np.tril(np.ones((TOKENS, TOKENS), bool))} if mask == "boolean" else {}
    check_same(model, fused, feeds=feeds)


@pytest.mark.skipif(
    requirement_holds(ort.__version__, "<1.28"),
    reason="ONNX Runtime's own Attention gives such rows NaN or a mean before 1.28",
)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("form", ["plain", "causal", "per head"])
def test_rows_of_the_standard_attention_without_a_key_give_0(form: str, kind: str) -> None:
    b = Builder(opset=23)
    q, k, v = (b.heads(b.linear(tokens(b), WIDTH, WIDTH)) for _ in range(3))
    shape = ["batch", HEADS if form == "per head" else 1, "tokens", "tokens"]
    mask = b.given("mask", shape, np.bool_ if kind == "boolean" else None)
    model = b.model(b.merged(b.add("Attention", q, k, v, mask, is_causal=int(form == "causal"))))
    fused = fuse(model)
    assert fused.counts == ({"attention": 1} if form == "plain" else {}), fused.unfused
    kept = np.ones((BATCH, HEADS if form == "per head" else 1, TOKENS, TOKENS), bool)
    kept[0, 0, 2] = False
    kept[1, 0, :, :2] = False
    check_same(model, fused, feeds={"mask": kept if kind == "boolean" else np.where(kept, 0, -np.inf).astype("f4")})


def test_a_standard_attention_with_a_cache_or_shared_keys_stays() -> None:
    b = Builder(opset=23)
    x = tokens(b)
    q, k, v = b.linear(x, WIDTH, WIDTH), b.linear(x, WIDTH, SIZE), b.linear(x, WIDTH, SIZE)
    model = b.model(b.add("Attention", q, k, v, q_num_heads=HEADS, kv_num_heads=1))
    fused = fuse(model)
    assert not fused.counts and len(fused.unfused) == 1
    check_same(model, fused)


def test_a_graph_with_a_node_of_too_few_inputs_is_left_to_onnxruntime() -> None:
    b = Builder()
    model = b.model(separate(b))
    del next(node for node in model.graph.node if node.op_type == "MatMul").input[1:]
    fused = fuse_model(model, Path(), on_gpu=True)
    assert not fused.counts and fused.proto is model
