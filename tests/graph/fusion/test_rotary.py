"""Rotary embeddings are fused in every form that exporters write, and what is nearly one stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .attention_graphs import HEADS, WIDTH, Builder, check_same, fuse, operators, tokens

SIZE, HALF = WIDTH // HEADS, WIDTH // HEADS // 2
Form = Callable[[Builder], tuple[str, ...]]


def angles(b: Builder, *, rows: str = "tokens", width: int = HALF) -> str:
    """Angles (1 or batch, positions, width)."""
    shape = ["batch", "tokens", 1] if rows == "batch" else [1, rows, 1]
    return b.add("Mul", b.given("positions", shape), b.weight(width))


def tables(b: Builder, *, interleaved: bool = False, full: bool = True, axis: int = 1, **rows: object) -> list[str]:
    """Cosines and sines of rank 4, of all columns or of half of them; heads are at `axis`."""
    made = angles(b, **rows)  # type: ignore[arg-type]
    if full and interleaved:
        pairs = b.add("Expand", b.add("Unsqueeze", made, b.ints(-1)), b.ints(1, 1, 1, 2))
        made = b.add("Reshape", pairs, b.ints(0, 0, 2 * HALF))
    elif full:
        made = b.add("Concat", made, made, axis=-1)
    return [b.add("Unsqueeze", b.add(op, made), b.ints(axis)) for op in ("Cos", "Sin")]


def part(b: Builder, x: str, start: int, end: int, step: int = 1, axis: int = -1) -> str:
    return b.add("Slice", x, *(b.ints(at) for at in (start, end, axis, step)))


def heads(b: Builder, x: str | None = None) -> str:
    return b.heads(b.linear(x or tokens(b), WIDTH, WIDTH))


def turned(b: Builder, x: str, size: int = SIZE) -> str:
    """The second half with the other sign, then the first."""
    return b.add("Concat", b.add("Neg", part(b, x, size // 2, size)), part(b, x, 0, size // 2), axis=-1)


def swapped(b: Builder, x: str) -> str:
    """Neighbours swapped, the first of each with the other sign."""
    pair = [b.add("Neg", part(b, x, 1, SIZE, 2)), part(b, x, 0, SIZE, 2)]
    stack = b.add("Concat", *(b.add("Unsqueeze", item, b.ints(-1)) for item in pair), axis=-1)
    return b.add("Reshape", stack, b.ints(0, 0, 0, SIZE))


def rotate(b: Builder, x: str, cos: str, sin: str, turn: Callable[[Builder, str], str] = turned) -> str:
    return b.add("Add", b.add("Mul", x, cos), b.add("Mul", turn(b, x), sin))


def halves(b: Builder) -> tuple[str, ...]:
    return (rotate(b, heads(b), *tables(b)),)


def other_order(b: Builder) -> tuple[str, ...]:
    """Sines first, halves by Split, the sign by a product."""
    x, (cos, sin) = heads(b), tables(b)
    first, second = b.several("Split", 2, x, axis=3, num_outputs=2)
    turned_x = b.add("Concat", b.add("Mul", b.number(-1.0), second), first, axis=3)
    return (b.add("Add", b.add("Mul", sin, turned_x), b.add("Mul", cos, x)),)


def neighbours(b: Builder) -> tuple[str, ...]:
    return (rotate(b, heads(b), *tables(b, interleaved=True), swapped),)


def by_halves(b: Builder) -> tuple[str, ...]:
    """Each half computed alone, with cosines and sines of half the columns."""
    x, (cos, sin) = heads(b), tables(b, full=False)
    one, two = part(b, x, 0, HALF), part(b, x, HALF, SIZE)
    first = b.add("Sub", b.add("Mul", one, cos), b.add("Mul", two, sin))
    second = b.add("Add", b.add("Mul", two, cos), b.add("Mul", one, sin))
    return (b.add("Concat", first, second, axis=-1),)


def by_pairs(b: Builder) -> tuple[str, ...]:
    """Columns as pairs, cosines and sines of half the columns."""
    x, (cos, sin) = heads(b), tables(b, full=False)
    pairs = b.add("Reshape", x, b.ints(0, HEADS, -1, HALF, 2))
    one, two = (b.add("Gather", pairs, b.constant(np.int64(at)), axis=-1) for at in (0, 1))
    first = b.add("Sub", b.add("Mul", one, cos), b.add("Mul", two, sin))
    second = b.add("Add", b.add("Mul", one, sin), b.add("Mul", two, cos))
    stack = b.add("Concat", *(b.add("Unsqueeze", item, b.ints(-1)) for item in (first, second)), axis=-1)
    return (b.add("Reshape", stack, b.ints(0, HEADS, -1, SIZE)),)


def partial(b: Builder) -> tuple[str, ...]:
    """The first columns are rotated, the others pass."""
    x = b.heads(b.linear(tokens(b), WIDTH, 2 * WIDTH), size=2 * SIZE)
    rotated = rotate(b, part(b, x, 0, SIZE), *tables(b))
    return (b.add("Concat", rotated, part(b, x, SIZE, 2 * SIZE), axis=-1),)


def part_of_one_key_head(b: Builder) -> tuple[str, ...]:
    """Multi-query attention: half of one head."""
    x = b.heads(b.linear(tokens(b), WIDTH, 2 * SIZE), heads=1, size=2 * SIZE)
    rotated = rotate(b, part(b, x, 0, SIZE), *tables(b))
    return (b.add("Concat", rotated, part(b, x, SIZE, 2 * SIZE), axis=-1),)


def before_the_transpose(b: Builder) -> tuple[str, ...]:
    """Heads behind the positions."""
    x = b.add("Reshape", b.linear(tokens(b), WIDTH, WIDTH), b.ints(0, 0, HEADS, SIZE))
    return (b.add("Transpose", rotate(b, x, *tables(b, axis=2)), perm=[0, 2, 1, 3]),)


def rows_of_each_sequence(b: Builder) -> tuple[str, ...]:
    return (rotate(b, heads(b), *tables(b, rows="batch")),)


def neighbours_of_each_sequence(b: Builder) -> tuple[str, ...]:
    x = b.add("Reshape", b.linear(tokens(b), WIDTH, WIDTH), b.ints(0, 0, HEADS, SIZE))
    return (rotate(b, x, *tables(b, rows="batch", interleaved=True, axis=2), swapped),)


def heads_first(b: Builder) -> tuple[str, ...]:
    """Heads that no Transpose makes."""
    return (rotate(b, b.given("x", ["batch", HEADS, "tokens", SIZE]), *tables(b)),)


def stored(b: Builder) -> tuple[str, ...]:
    """Cosines and sines of a fixed number of positions, stored."""
    x = heads(b, tokens(b, length=5))
    cos, sin = (b.constant(np.tile(np.random.default_rng(at).random((5, HALF)), 2).astype(b.kind)) for at in (0, 1))
    return (rotate(b, x, cos, sin),)


def gathered(b: Builder) -> tuple[str, ...]:
    """Rows of stored tables by position."""
    x, rows = heads(b), b.given("rows", ["batch", "tokens"], np.int64)
    made = []
    for at in (0, 1):
        table = b.constant(np.tile(np.random.default_rng(at).random((16, HALF)), 2).astype(b.kind))
        made.append(b.add("Unsqueeze", b.add("Gather", table, rows, axis=0), b.ints(1)))
    return (rotate(b, x, *made),)


FORMS = [halves, other_order, neighbours, by_halves, by_pairs, partial, part_of_one_key_head, before_the_transpose,
         rows_of_each_sequence, neighbours_of_each_sequence, heads_first, stored, gathered]  # fmt: skip


def unknown_rows(b: Builder, axis: int) -> tuple[str, ...]:
    """As many rows as positions, or one for all of them: what shape inference cannot know."""
    x = b.add("Reshape", b.linear(tokens(b), WIDTH, WIDTH), b.ints(0, 0, HEADS, SIZE))
    x = b.add("Transpose", x, perm=[0, 2, 1, 3]) if axis == 0 else x
    rows = b.add("Slice", b.given("positions", [16, 1]), b.ints(0), b.given("rows", [1], np.int64), b.ints(0))
    made = b.add("Mul", rows, b.weight(HALF))
    made = b.add("Unsqueeze", b.add("Concat", made, made, axis=-1), b.ints(axis))
    return (rotate(b, x, b.add("Cos", made), b.add("Sin", made)),)


@pytest.mark.parametrize("axis", [0, 1], ids=["heads first", "positions first"])
def test_one_row_that_stands_for_all_positions_at_run_time_does(axis: int) -> None:
    b = Builder()
    model = b.model(*unknown_rows(b, axis))
    fused = fuse(model)
    assert fused.counts == {"rotary_embedding": 1}
    for rows, length in ((5, 5), (1, 5), (1, 1)):
        check_same(model, fused, tokens=length, feeds={"rows": np.array([rows])})


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_rotary_embedding_is_one_operator(form: Form, half: bool, on_gpu: bool) -> None:
    b = Builder(half)
    model = b.model(*form(b))
    fused = fuse(model, on_gpu=on_gpu)
    assert fused.counts == {"rotary_embedding": 1}
    assert operators(fused).count("RotaryEmbedding") == 1 and not {"Neg", "Sub"} & set(operators(fused))
    check_same(model, fused)
    if form is not stored:
        check_same(model, fused, tokens=1, batch=3)
        check_same(model, fused, tokens=9, batch=1)


def test_rotated_queries_and_keys_are_part_of_an_attention_without_a_transpose() -> None:
    b = Builder()
    x, (cos, sin) = tokens(b), tables(b)
    q, k = (rotate(b, heads(b, x), cos, sin) for _ in range(2))
    context = b.core(q, b.add("Transpose", k, perm=[0, 1, 3, 2]), heads(b, x))
    model = b.model(b.merged(context))
    fused = fuse(model)
    assert fused.counts == {"rotary_embedding": 2, "multi_head_attention": 1}
    assert "Transpose" not in operators(fused) and operators(fused).count("Slice") == 2, "one table for both"
    check_same(model, fused)
    check_same(model, fused, tokens=1)


def test_the_standards_operator_stays_and_its_attention_is_fused() -> None:
    b = Builder(opset=23)
    x = tokens(b)
    cos, sin = (b.given(name, ["batch", "tokens", HALF]) for name in ("cos", "sin"))
    q, k = (b.add("RotaryEmbedding", heads(b, x), cos, sin) for _ in range(2))
    model = b.model(b.merged(b.core(q, b.add("Transpose", k, perm=[0, 1, 3, 2]), heads(b, x))))
    fused = fuse(model)
    assert fused.counts == {"multi_head_attention": 1}
    assert [node.op_type for node in fused.proto.graph.node if not node.domain].count("RotaryEmbedding") == 2
    check_same(model, fused)


# ------------------------------------------------------------------------------------------------ near misses


def other_sign(b: Builder) -> tuple[str, ...]:
    def turn(b: Builder, x: str) -> str:
        return b.add("Concat", part(b, x, HALF, SIZE), b.add("Neg", part(b, x, 0, HALF)), axis=-1)

    return (rotate(b, heads(b), *tables(b), turn),)


def no_sign(b: Builder) -> tuple[str, ...]:
    def turn(b: Builder, x: str) -> str:
        return b.add("Concat", part(b, x, HALF, SIZE), part(b, x, 0, HALF), axis=-1)

    return (rotate(b, heads(b), *tables(b), turn),)


def other_axis(b: Builder) -> tuple[str, ...]:
    """Positions are swapped, not columns."""
    x = heads(b, tokens(b, length=4))
    turn = b.add("Concat", b.add("Neg", part(b, x, 2, 4, axis=2)), part(b, x, 0, 2, axis=2), axis=2)
    cos, sin = tables(b, rows=4)  # type: ignore[arg-type]
    return (b.add("Add", b.add("Mul", x, cos), b.add("Mul", turn, sin)),)


def other_factor(b: Builder) -> tuple[str, ...]:
    def turn(b: Builder, x: str) -> str:
        return b.add("Concat", b.add("Mul", part(b, x, HALF, SIZE), b.number(-2.0)), part(b, x, 0, HALF), axis=-1)

    return (rotate(b, heads(b), *tables(b), turn),)


def halves_differ(b: Builder) -> tuple[str, ...]:
    """Both halves have angles of their own."""
    made = b.add("Concat", angles(b), angles(b), axis=-1)
    return (rotate(b, heads(b), *(b.add("Unsqueeze", b.add(op, made), b.ints(1)) for op in ("Cos", "Sin"))),)


def stored_halves_differ(b: Builder) -> tuple[str, ...]:
    x = heads(b, tokens(b, length=5))
    return (rotate(b, x, b.weight(5, SIZE), b.weight(5, SIZE)),)


def tables_of_the_other_form(b: Builder) -> tuple[str, ...]:
    """Halves are turned with cosines that are stored for neighbours."""
    return (rotate(b, heads(b), *tables(b, interleaved=True)),)


def other_tensor(b: Builder) -> tuple[str, ...]:
    x, y, (cos, sin) = heads(b), heads(b, tokens(b, "y")), tables(b)
    return (b.add("Add", b.add("Mul", x, cos), b.add("Mul", turned(b, y), sin)),)


def one_position(b: Builder) -> tuple[str, ...]:
    """One row for all positions."""
    return (rotate(b, heads(b), *tables(b, rows=1)),)  # type: ignore[arg-type]


def tables_of_each_head(b: Builder) -> tuple[str, ...]:
    x = b.given("x", ["batch", HEADS, "tokens", SIZE])
    tables = [b.add("Concat", made, made, axis=-1) for made in
              (b.given(name, ["batch", HEADS, "tokens", HALF]) for name in ("cos", "sin"))]  # fmt: skip
    return (rotate(b, x, *tables),)


def tables_of_another_batch(b: Builder) -> tuple[str, ...]:
    x = b.given("x", ["batch", HEADS, "tokens", SIZE])
    tables = [b.add("Concat", made, made, axis=-1) for made in
              (b.given(name, ["keys", 1, "tokens", HALF]) for name in ("cos", "sin"))]  # fmt: skip
    return (rotate(b, x, *tables),)


def shared_middle(b: Builder) -> tuple[str, ...]:
    made = halves(b)
    return (*made, b.add("Relu", next(node.output[0] for node in b.nodes if node.op_type == "Neg")))


def middle_is_an_output(b: Builder) -> tuple[str, ...]:
    made = halves(b)
    return (*made, next(node.output[0] for node in reversed(b.nodes) if node.op_type == "Concat"))


def quantized(b: Builder) -> tuple[str, ...]:
    scale, zero = b.number(0.05), b.constant(np.int8(0))
    made = rotate(b, heads(b), *tables(b))
    return (b.add("DequantizeLinear", b.add("QuantizeLinear", made, scale, zero), scale, zero),)


@pytest.mark.parametrize("form", [other_sign, no_sign, other_axis, other_factor, halves_differ, stored_halves_differ,
                                  tables_of_the_other_form, other_tensor, one_position, tables_of_each_head,
                                  tables_of_another_batch, shared_middle, middle_is_an_output, quantized])  # fmt: skip
def test_what_is_nearly_a_rotary_embedding_stays(form: Form) -> None:
    b = Builder()
    model = b.model(*form(b))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused, keys=1)


def test_columns_that_pass_with_a_shared_reader_leave_the_rotated_ones_to_a_fusion_of_their_own() -> None:
    b = Builder()
    x = b.heads(b.linear(tokens(b), WIDTH, 2 * WIDTH), size=2 * SIZE)
    rotated, rest = rotate(b, part(b, x, 0, SIZE), *tables(b)), part(b, x, SIZE, 2 * SIZE)
    model = b.model(b.add("Concat", rotated, rest, axis=-1), b.add("Relu", rest))
    fused = fuse(model)
    assert fused.counts == {"rotary_embedding": 1} and "Concat" in operators(fused)
    check_same(model, fused)


def both_halves(b: Builder, one: str, two: str, cos: str, sin: str) -> str:
    """Each half computed alone."""
    first = b.add("Sub", b.add("Mul", one, cos), b.add("Mul", two, sin))
    second = b.add("Add", b.add("Mul", two, cos), b.add("Mul", one, sin))
    return b.add("Concat", first, second, axis=-1)


def test_tables_that_rotations_of_two_sizes_share_are_cut_for_each() -> None:
    b = Builder()
    x, (cos, sin) = b.given("x", ["batch", HEADS, "tokens", SIZE]), tables(b)
    y = b.given("y", ["batch", HEADS, "tokens", 2 * SIZE])
    wide = both_halves(b, part(b, y, 0, SIZE), part(b, y, SIZE, 2 * SIZE), cos, sin)
    model = b.model(rotate(b, x, cos, sin), wide)
    fused = fuse(model)
    assert fused.counts == {"rotary_embedding": 2}
    check_same(model, fused)


def test_a_slice_whose_steps_are_not_stored_stays() -> None:
    b = Builder()
    x, (cos, sin) = b.given("x", ["batch", HEADS, "tokens", SIZE]), tables(b, full=False)
    steps = b.given("steps", [1], np.int64)
    two = b.add("Slice", x, b.ints(HALF), b.ints(SIZE), b.ints(-1), steps)
    model = b.model(both_halves(b, part(b, x, 0, HALF), two, cos, sin))
    fused = fuse(model)
    assert not fused.counts
    for step in (1, 2):  # by 2 there is one column, which stands for all
        check_same(model, fused, feeds={"steps": np.array([step])})


def test_an_uneven_split_of_stored_tables_has_its_smallest_part_last() -> None:
    b = Builder()
    x = b.given("x", ["batch", HEADS, 3, SIZE])
    made = []
    for at in (0, 1):
        table = np.tile(np.random.default_rng(at).random((7, HALF)), 2).astype(b.kind)
        table[5, 0] = 9  # in the second part of 3, 3 and 1 rows
        made.append(b.several("Split", 3, b.constant(table), axis=0, num_outputs=3)[1])
    model = b.model(rotate(b, x, *made))
    fused = fuse(model)
    assert not fused.counts
    check_same(model, fused)
