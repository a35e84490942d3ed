"""Random graphs around each fusion, by seed: what exporters write, what is nearly that, and inputs that tell them apart."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from .attention_graphs import Builder

Outputs = tuple[str, ...]
Feeds = dict[str, np.ndarray]
FILLS = (-1e4, -3e4, -1e9, float(np.finfo(np.float32).min), -np.inf, -5.0)


class Draw(Builder):
    """A builder with a generator: how often, which, and nodes in the form of the graph's opset."""

    def __init__(self, family: str, seed: int) -> None:
        self.random = np.random.default_rng([zlib.crc32(family.encode()), seed])
        opsets = (23, 24) if family == "standard_attention" else (11, 12, 13, 14, 17, 18, 20, 21, 22, 23, 24)
        super().__init__(half=self.chance(0.2), opset=int(self.random.choice(opsets)))
        self._random = self.random
        self.notes: list[str] = []
        self.extra: list[str] = []
        """Tensors in the middle that are outputs too."""
        self.batch: Any = self.pick("batch", "batch", "batch", 1, 2)
        self.length: Any = self.pick("tokens", "tokens", 1, 4, 5)

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def pick(self, *options: Any) -> Any:
        return options[int(self.random.integers(len(options)))]

    def note(self, option: Any) -> Any:
        self.notes.append(getattr(option, "__name__", str(option)))
        return option

    def wire(self, name: str) -> str:
        """The tensor, which is seldom an output too or read by another node."""
        if self.chance(0.015):
            self.note("inner output")
            self.extra.append(name)
        elif self.chance(0.01):
            self.note("second reader")
            self.extra.append(self.add("Neg", name))
        return name

    def op(self, op: str, *inputs: str, **given: Any) -> str:
        return self.wire(self.add(op, *inputs, **given))

    def either(self, op: str, one: str, two: str) -> str:
        return self.op(op, *((one, two) if self.chance(0.5) else (two, one)))

    def scaled(self, x: str, factor: float) -> str:
        if self.chance(0.3) and factor:
            return self.op("Div", x, self.number(1 / factor))
        return self.either("Mul", x, self.number(factor))

    def with_axes(self, op: str, x: str, *axes: int, since: int = 13, **given: Any) -> str:
        if self.opset < since:
            return self.op(op, x, axes=list(axes), **given)
        return self.op(op, x, self.ints(*axes), **given)

    def parts(self, x: str, *sizes: int, axis: int) -> list[str]:
        if self.opset < 13:
            return self.several("Split", len(sizes), x, split=list(sizes), axis=axis)
        return self.several("Split", len(sizes), x, self.ints(*sizes), axis=axis)

    def slice(self, x: str, start: int, end: int, axis: int, step: int = 1) -> str:
        return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(axis), self.ints(step))

    def dense(self, x: str, before: int, after: int) -> str:
        made = self.op("MatMul", x, self.weight(before, after))
        return self.either("Add", made, self.weight(after)) if self.chance(0.7) else made

    def lead(self) -> list[Any]:
        return [self.batch, self.length]


@dataclass(frozen=True)
class Drawn:
    """A random graph."""

    family: str
    seed: int
    model: onnx.ModelProto
    notes: tuple[str, ...]
    half: bool


def draw_graph(family: str, seed: int) -> Drawn | None:
    """The graph of a seed; None where it contradicts itself (onnx does not infer its shapes)."""
    d = Draw(family, seed)
    outputs = FAMILIES[family](d)
    try:
        model = d.model(*dict.fromkeys((*outputs, *d.extra)))
    except Exception:
        return None
    model.ir_version = 10
    return Drawn(family, seed, model, (f"opset {d.opset}", *d.notes), d.kind is np.float16)


# ------------------------------------------------------------------------------------------------ attention


def attention(d: Draw) -> Outputs:
    heads, size = d.pick(1, 2, 3, 4), d.pick(1, 2, 3, 4, 8)
    q, k, v, mine, values = d.note(d.pick(_separate, _separate, _packed, _cross, _given, _rows, _first, _bmm))(
        d, heads, size
    )
    context = _core(d, q, k, v, heads, size, mine)
    return (_merge(d, context, heads, values, mine),)


@dataclass
class Layout:
    """Sizes of the scores: batches, queries, keys; the rank of the products; `first` for (tokens, batch)."""

    batch: Any
    queries: Any
    keys: Any
    rank: int = 4
    first: bool = False


def _heads(d: Draw, x: str, heads: int, size: int, perm: tuple[int, ...] = (0, 2, 1, 3)) -> str:
    target = d.pick([0, 0, heads, size], [0, 0, heads, size], [0, -1, heads, size], [0, 0, -1, size])
    return d.op("Transpose", d.op("Reshape", x, d.ints(*target)), perm=perm)


def _other_size(d: Draw, size: int) -> int:
    return size if d.chance(0.75) else d.note(d.pick(1, size + 1, 2 * size))


def _separate(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    width = heads * size
    x, wide = d.given("x", [*d.lead(), width]), _other_size(d, size)
    q = d.dense(x, width, width)
    q = d.scaled(q, 0.5) if d.chance(0.2) else q
    k, v = d.dense(x, width, width), d.dense(x, width, heads * wide)
    perm = (0, 2, 3, 1) if d.chance(0.6) else (0, 2, 1, 3)
    keys = _heads(d, k, heads, size, perm)
    keys = keys if perm[2] == 3 else d.op("Transpose", keys, perm=(0, 1, 3, 2))
    return _heads(d, q, heads, size), keys, _heads(d, v, heads, wide), Layout(d.batch, d.length, d.length), wide


def _packed(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    width, form = heads * size, d.note(d.pick("columns", "five", "by head"))
    qkv = d.dense(d.given("x", [*d.lead(), width]), width, 3 * width)
    mine = Layout(d.batch, d.length, d.length)
    if form == "columns":
        q, k, v = (_heads(d, part, heads, size) for part in d.parts(qkv, width, width, width, axis=d.pick(-1, 2)))
    elif form == "by head":
        rows = d.op("Transpose", d.op("Reshape", qkv, d.ints(0, 0, heads, 3 * size)), perm=(0, 2, 1, 3))
        q, k, v = d.parts(rows, size, size, size, axis=-1)
    else:
        order = d.op("Transpose", d.op("Reshape", qkv, d.ints(0, 0, 3, heads, size)), perm=(2, 0, 3, 1, 4))
        if d.chance(0.5):
            q, k, v = (d.op("Gather", order, d.constant(np.int64(at)), axis=0) for at in range(3))
        else:
            q, k, v = (d.with_axes("Squeeze", part, 0) for part in d.parts(order, 1, 1, 1, axis=0))
    return q, d.op("Transpose", k, perm=(0, 1, 3, 2)), v, mine, size


def _cross(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    width, depth = heads * size, d.pick(3, 8)
    keys = d.pick("keys", "keys", d.length, 6)
    other = d.batch if d.chance(0.6) else d.note(d.pick("other", 1))
    q = _heads(d, d.dense(d.given("x", [*d.lead(), width]), width, width), heads, size)
    memory, wide = d.given("memory", [other, keys, depth]), _other_size(d, size)
    k = _heads(d, d.dense(memory, depth, width), heads, size, (0, 2, 3, 1))
    return q, k, _heads(d, d.dense(memory, depth, heads * wide), heads, wide), Layout(d.batch, d.length, keys), wide


def _given(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    """Heads first, as inputs: what a decoder has in its cache."""
    keys, wide = d.pick("keys", d.length, 6), _other_size(d, size)
    other = d.batch if d.chance(0.6) else d.note(d.pick("other", 1))
    few = heads if d.chance(0.85) else d.note(1)
    q = d.given("q", [d.batch, heads, d.length, size])
    k = d.given("k", [other, few, keys, size])
    v = d.given("v", [other if d.chance(0.8) else d.batch, few, keys, wide])
    return q, d.op("Transpose", k, perm=(0, 1, 3, 2)), v, Layout(d.batch, d.length, keys), wide


def _rows(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    """Gemm over merged rows."""
    width, length = heads * size, d.pick(1, 4, 5)
    rows = d.op("Reshape", d.given("x", [d.batch, length, width]), d.ints(-1, width))

    def part(perm: tuple[int, ...]) -> str:
        turned = d.chance(0.5)
        made = d.op("Gemm", rows, d.weight(width, width), d.weight(width), transB=int(turned))
        return d.op("Transpose", d.op("Reshape", made, d.ints(-1, length, heads, size)), perm=perm)

    return part((0, 2, 1, 3)), part((0, 2, 3, 1)), part((0, 2, 1, 3)), Layout(d.batch, length, length), size


def _first(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    """(tokens, batch, width) with heads in the batch: `torch.nn.MultiheadAttention`."""
    width, length, batch = heads * size, d.pick(1, 4, 5), d.pick(1, 2, 3)
    x = d.given("x", [length, batch, width])

    def part(perm: tuple[int, ...]) -> str:
        made = d.op("Reshape", d.dense(x, width, width), d.ints(length, batch * heads, size))
        return d.op("Transpose", made, perm=perm)

    q, k, v = part((1, 0, 2)), part((1, 2, 0)), part((1, 0, 2))
    return q, k, v, Layout(batch * heads, length, length, 3, first=True), size


def _bmm(d: Draw, heads: int, size: int) -> tuple[Any, ...]:
    """Batch and heads merged, batch first."""
    width, length = heads * size, d.pick(1, 4, 5)
    x = d.given("x", [d.batch, length, width])

    def part() -> str:
        return d.op("Reshape", _heads(d, d.dense(x, width, width), heads, size), d.ints(-1, length, size))

    q, k, v = part(), d.op("Transpose", part(), perm=(0, 2, 1)), part()
    return q, k, v, Layout(d.batch * heads if isinstance(d.batch, int) else "rows", length, length, 3), size


def _core(d: Draw, q: str, k: str, v: str, heads: int, size: int, mine: Layout) -> str:
    near = d.note(d.pick("wrong axis", "shared", "capped", "vector scale")) if d.chance(0.06) else ""
    factor = d.pick(size**-0.5, size**-0.5, size**-0.5, 1.0, 0.3, -1.0, 0.0, 1e-30, 4.0)
    where = d.pick("scores", "scores", "query", "both", "none")
    if where in ("query", "both"):
        q = d.scaled(q, factor)
    if where == "both":
        k = d.scaled(k, d.pick(0.5, 0.0, 2.0))
    scores = d.op("MatMul", q, k)
    if where == "scores":
        d.note(f"scale {factor:g}")
        scores = d.scaled(scores, factor)
    if near == "vector scale":
        scores = d.op("Mul", scores, d.given("vector", [mine.keys]))
    if near == "capped":
        scores = d.op("Tanh", scores)
    kinds = [d.pick(*MASKS) for _ in range(d.pick(0, 0, 1, 1, 1, 2))] if mine.rank == 4 else []
    for at, kind in enumerate(kinds):
        scores = MASKS[d.note(kind)](d, scores, mine, heads, f"mask_{at}")
    wide = d.kind is np.float16 and d.chance(0.3)
    if wide:
        scores = d.op("Cast", scores, to=TensorProto.FLOAT)
    axis = d.pick(0, 1, 2) if near == "wrong axis" else d.pick(-1, mine.rank - 1)
    shares = d.op("Softmax", scores, axis=axis if d.opset >= 13 or axis > 0 else mine.rank - 1)
    if near == "shared":
        d.extra.append(shares)
    if kinds and d.chance(0.25) and not wide:
        d.note("guarded")
        shares = d.op("Where", d.op("IsNaN", shares), d.number(0.0), shares)
    if wide:
        shares = d.op("Cast", shares, to=TensorProto.FLOAT16)
    return d.op("MatMul", shares, v)


def _merge(d: Draw, context: str, heads: int, size: int, mine: Layout) -> str:
    if d.chance(0.15):
        return d.note(context)
    if mine.rank == 4:
        turned = d.op("Transpose", context, perm=(0, 2, 1, 3))
        made = d.op("Reshape", turned, d.ints(*d.pick([0, 0, heads * size], [0, -1, heads * size], [0, 0, -1])))
        return d.dense(made, heads * size, 4) if d.chance(0.5) else made
    if mine.first:
        batch = mine.batch // heads
        turned = d.op("Transpose", context, perm=(1, 0, 2))
        return d.op("Reshape", turned, d.ints(mine.queries, batch, heads * size))
    apart = d.op("Reshape", context, d.ints(-1, heads, mine.queries, size))
    return d.op("Reshape", d.op("Transpose", apart, perm=(0, 2, 1, 3)), d.ints(0, 0, heads * size))


def _mask_shape(d: Draw, mine: Layout, heads: int) -> list[Any]:
    batch, rows = d.pick(mine.batch, 1, mine.batch), d.pick(mine.queries, 1, mine.queries)
    if d.chance(0.05):
        batch = d.note(d.pick("other", 2, 3))
    if d.chance(0.04):
        rows = d.note(d.pick("rows", 3))
    shape = [batch, d.pick(1, 1, heads), rows, mine.keys]
    return shape[d.pick(0, 0, 0, 1, 2) :]


def _fill(d: Draw) -> float:
    fill = d.note(d.pick(*FILLS))
    return max(fill, -65504.0) if d.kind is np.float16 and np.isfinite(fill) else fill


def _additive(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    return d.either("Add", scores, d.given(f"{name}_add", _mask_shape(d, mine, heads)))


def _keep(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    kept = d.given(f"{name}_keep", _mask_shape(d, mine, heads), np.bool_)
    return d.op("Where", kept, scores, d.number(_fill(d)))


def _drop(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    gone = d.given(f"{name}_drop", _mask_shape(d, mine, heads), np.bool_)
    return d.op("Where", gone, d.number(_fill(d)), scores)


def _padding(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    """(1 - mask) times a number, of (batch, keys): BERT."""
    kind = TensorProto.FLOAT16 if d.kind is np.float16 else TensorProto.FLOAT
    kept = d.add("Cast", d.given(f"{name}_keep", [mine.batch, mine.keys], np.bool_), to=kind)
    fill = _fill(d)
    gone = d.op("Mul", d.op("Sub", d.number(1.0), kept), d.number(fill if np.isfinite(fill) else -1e4))
    return d.either("Add", scores, d.with_axes("Unsqueeze", gone, 1, 2))


def _chosen(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    """A choice between 0 and a number, added."""
    kept = d.given(f"{name}_keep", _mask_shape(d, mine, heads), np.bool_)
    return d.either("Add", scores, d.op("Where", kept, d.number(0.0), d.number(_fill(d))))


def _causal(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    """A stored triangle."""
    if not isinstance(mine.queries, int) or mine.queries != mine.keys:
        return _keep(d, scores, mine, heads, name)
    seen = np.tril(np.ones((1, 1, mine.queries, mine.keys), bool))
    if d.chance(0.5):
        return d.op("Where", d.constant(seen), scores, d.number(_fill(d)))
    return d.op("Add", scores, d.constant(np.where(seen, 0, _fill(d)).astype(d.kind)))


def _scaled_after(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    return d.scaled(_additive(d, scores, mine, heads, name), d.pick(0.5, 0.125, -1.0, 0.0))


def _wide(d: Draw, scores: str, mine: Layout, heads: int, name: str) -> str:
    """One value for all keys, or a row of all ranks."""
    return d.op("Add", scores, d.given(f"{name}_add", d.pick([mine.batch, 1, mine.queries, 1], [mine.keys], [1, 1])))


MASKS = {"additive": _additive, "keep": _keep, "drop": _drop, "padding": _padding, "chosen": _chosen, "causal": _causal,
         "scaled after": _scaled_after, "wide": _wide}  # fmt: skip


def standard_attention(d: Draw) -> Outputs:
    heads, size = d.pick(1, 2, 3, 4), d.pick(1, 2, 4, 8)
    keys, wide = d.pick(d.length, "keys", 6), _other_size(d, size)
    groups = heads if d.chance(0.8) else 1
    other = d.batch if d.chance(0.8) else d.note("other")
    given: dict[str, Any] = {}
    if d.chance(0.5):
        q = d.given("q", [d.batch, heads, d.length, size])
        k, v = d.given("k", [other, groups, keys, size]), d.given("v", [other, groups, keys, wide])
        if d.chance(0.3):
            q = _heads(d, d.dense(d.given("x", [*d.lead(), heads * size]), heads * size, heads * size), heads, size)
            d.inputs.pop("q")
    else:
        q = d.dense(d.given("x", [*d.lead(), 6]), 6, heads * size)
        memory = d.given("memory", [other, keys, 6])
        k, v = d.dense(memory, 6, groups * size), d.dense(memory, 6, groups * wide)
        given |= {"q_num_heads": heads, "kv_num_heads": groups}
    inputs, mine = [q, k, v], Layout(d.batch, d.length, keys)
    mask = d.note(d.pick("", "", "bool", "add"))
    if mask == "bool":
        inputs.append(d.given("mask_0_keep", _mask_shape(d, mine, heads), np.bool_))
    elif mask:
        inputs.append(d.given("mask_0_add", _mask_shape(d, mine, heads)))
    if d.chance(0.3):
        given["scale"] = d.note(d.pick(0.5, 1.0, 1e-30, 0.0, -0.5))
    if d.chance(0.2):
        given["is_causal"] = d.note(1)
    if d.chance(0.1):
        given["softcap"] = d.note(5.0)
    return (d.op("Attention", *inputs, **given),)


# ------------------------------------------------------------------------------------------------ norms


def norms(d: Draw) -> Outputs:
    width = d.pick(1, 2, 6, 8)
    x = d.given(
        "x", [*d.lead(), width] if d.chance(0.8) else [d.batch, width] if d.chance(0.5) else [d.batch, 2, 3, width]
    )
    if d.chance(0.4):
        x = _sum(d, x, width)
    source = x
    if cast := d.kind is np.float16 and d.chance(0.5):
        x = d.op("Cast", x, to=TensorProto.FLOAT)
    kind = np.float32 if cast else d.kind
    number = lambda value: d.constant(np.array(value, kind))  # noqa: E731
    axis = d.pick(-1, -1, -1, -1, -1, -1, -1, len(d.inputs["x"][1]) - 1, 1, 0)

    def mean(y: str, **given: Any) -> str:
        return d.with_axes("ReduceMean", y, axis, since=18, **given)

    centred, again = x, x
    if form := d.note(d.pick("layer", "layer twice", "")):
        centred = again = d.op("Sub", x, average := mean(x))
        if form == "layer twice":
            again = d.op("Sub", x, average if d.chance(0.8) else mean(x))
    squared = (
        d.op("Mul", again, again) if d.chance(0.4) else d.op("Pow", again, number(d.pick(2.0, 2.0, 2.0, 2.0, 3.0)))
    )
    epsilon = number(d.note(d.pick(1e-5, 1e-6, 1e-3, 0.0, 1e-12, 0.5)))
    if d.chance(0.05):
        epsilon = d.constant(np.full(d.note(d.pick((1,), (1, 1), (width,), (1, 1, 1, 1))), 1e-3, kind))
    total = d.either("Add", mean(squared), epsilon)
    root = d.op("Sqrt", total) if d.chance(0.7) else d.op("Pow", total, number(d.pick(0.5, 0.5, 0.25)))
    last = d.pick("Div", "Div", "Reciprocal", "1 / root", "negative power", "upside down")
    if last == "Div":
        made = d.op("Div", centred, root)
    elif last == "Reciprocal":
        made = d.either("Mul", centred, d.op("Reciprocal", root))
    elif last == "1 / root":
        made = d.either("Mul", centred, d.op("Div", number(1.0), root))
    elif last == "negative power":
        made = d.either("Mul", centred, d.op("Pow", total, number(-0.5)))
    else:
        made = d.op("Div", root, centred)
    if cast and d.chance(0.8):
        made = d.op("Cast", made, to=TensorProto.FLOAT16)
        cast, kind = False, np.float16
    for op in ("Mul", "Add"):
        if d.chance(0.7):
            shape = d.pick((width,), (width,), (width,), (1, 1, width), (1,), ())
            made = d.either(op, made, d.constant((d.random.standard_normal(shape)).astype(kind)))
    return (made, source) if d.chance(0.1) else (made,)


def _sum(d: Draw, x: str, width: int) -> str:
    shape = list(d.inputs["x"][1])
    if d.chance(0.3):
        at = int(d.random.integers(len(shape)))
        shape[at] = d.note(d.pick("other", 1)) if at < len(shape) - 1 else 1
    y = d.given("y", shape)
    if shape[-1] == width and d.chance(0.5):
        y = d.dense(y, width, width)
    return d.either("Add", x, y)


def skip_norms(d: Draw) -> Outputs:
    width = d.pick(2, 6, 8)
    total = _sum(d, d.given("x", [*d.lead(), width]), width)
    rms = d.opset >= 23 and d.chance(0.5)
    if d.opset < 17:
        d.opset = 17
    given: dict[str, Any] = {"axis": d.pick(-1, -1, -1, 2, 1), "epsilon": d.pick(1e-5, 1e-6, 1e-3, 0.0)}
    scale = d.weight(*((width,) if given["axis"] != 1 or not isinstance(d.length, int) else (d.length, width)))
    inputs = [total, scale, *([d.weight(width)] if not rms and d.chance(0.7) else [])]
    made = d.op("RMSNormalization" if rms else "LayerNormalization", *inputs, **given)
    if d.chance(0.4):
        made = d.op("Add", made, total)
    return (made, total) if d.chance(0.2) else (made,)


# ------------------------------------------------------------------------------------------------ activations


def activations(d: Draw) -> Outputs:
    width = d.pick(1, 6, 8)
    x = d.given("x", [*d.lead(), width])
    if d.chance(0.7):
        x = (
            d.dense(x, width, width)
            if d.chance(0.6)
            else d.either("Add", x, d.weight(*d.pick((width,), (1, width), (1,))))
        )
    form = d.note(d.pick("erf", "tanh", "tanh before", "quick", "Gelu"))
    if form == "Gelu":
        if d.opset < 20:
            d.opset = 20
        return (d.op("Gelu", x, approximate=d.pick("none", "tanh")),)
    if form == "quick":
        gate = d.op("Sigmoid", d.scaled(x, d.pick(1.702, 1.702, 0.5, 0.0, -1.0)))
        return (d.either("Mul", x if d.chance(0.95) else d.add("Neg", x), gate),)
    half, one = d.number(d.pick(0.5, 0.5, 0.5, 0.5, 0.7)), d.number(d.pick(1.0, 1.0, 1.0, 1.0, 0.9))
    if d.chance(0.05):
        half = d.constant(np.full((1, 1, 1, 1), 0.5, d.kind))
    if form == "erf":
        inner = d.op("Erf", d.scaled(x, d.pick(0.5**0.5, 0.5**0.5, 0.5**0.5, 0.5)))
    else:
        cube = d.op("Pow", x, d.number(3.0)) if d.chance(0.5) else d.op("Mul", d.op("Mul", x, x), x)
        weight, root = d.number(d.pick(0.044715, 0.044715, 0.05)), d.number((2 / np.pi) ** 0.5)
        if form == "tanh":
            inner = d.op("Tanh", d.either("Mul", d.either("Add", x, d.either("Mul", cube, weight)), root))
        else:
            square = d.op("Mul", d.either("Mul", x, weight), x)
            inner = d.op("Tanh", d.op("Mul", d.either("Mul", x, root), d.either("Add", square, d.number(1.0))))
    total = d.either("Add", inner, one)
    order = d.pick(0, 1, 2)
    if order == 0:
        return (d.either("Mul", d.either("Mul", x, total), half),)
    if order == 1:
        return (d.either("Mul", d.either("Mul", x, half), total),)
    return (d.either("Mul", x, d.either("Mul", total, half)),)


# ------------------------------------------------------------------------------------------------ rotary


def rotary(d: Draw) -> Outputs:
    heads, size = d.pick(1, 1, 2, 3, 4), d.pick(2, 4, 6, 8)
    rotated = size if d.chance(0.6) else d.note(d.pick(*range(2, size + 1, 2)))
    first = d.chance(0.7)
    at = 1 if first else 2
    x = d.op("Reshape", d.dense(d.given("x", [*d.lead(), 5]), 5, heads * size), d.ints(0, 0, heads, size))
    x = d.op("Transpose", x, perm=(0, 2, 1, 3)) if first else x
    if d.chance(0.15):
        shape = [d.batch, heads, d.length, size]
        x, _ = d.given("x", shape if first else [shape[item] for item in (0, 2, 1, 3)]), d.nodes.clear()
        d.extra.clear()
    interleaved, half = d.note(d.pick(False, False, True)), rotated // 2
    cos, sin = _tables(d, rotated, at, interleaved=interleaved)
    part = d.slice(x, 0, rotated, -1) if rotated < size else x
    made = (_by_halves if cos[1] == half and d.chance(0.9) else _turned)(d, part, cos[0], sin[0], rotated, interleaved)
    if rotated < size and d.chance(0.95):
        made = d.op("Concat", made, d.slice(x, rotated, size, -1), axis=d.pick(-1, 3))
    return (d.op("Transpose", made, perm=(0, 2, 1, 3)),) if d.chance(0.3) else (made,)


def _tables(d: Draw, rotated: int, at: int, *, interleaved: bool) -> list[tuple[str, int]]:
    half, rows = rotated // 2, d.note(d.pick("shared", "shared", "batch", "stored", "one", "other"))
    full = d.chance(0.6)
    if rows == "stored" and isinstance(d.length, int):
        tables = []
        for _ in range(2):
            value = d.random.standard_normal((d.length, half)).astype(d.kind)
            value = (np.repeat(value, 2, -1) if interleaved else np.tile(value, 2)) if full else value
            tables.append((d.constant(value[:, None] if at == 2 else value), value.shape[-1]))
        return tables
    lead = {"batch": d.batch, "other": "other"}.get(rows, 1)
    made = d.add("Mul", d.given("angles", [lead, 1 if rows == "one" else d.length, 1]), d.weight(half))
    if full and interleaved:
        pairs = d.add("Expand", d.with_axes("Unsqueeze", made, 3), d.ints(1, 1, 1, 2))
        made = d.add("Reshape", pairs, d.ints(0, 0, 2 * half))
    elif full:
        made = d.add("Concat", made, made if d.chance(0.9) else d.add("Neg", made), axis=-1)
    return [(d.with_axes("Unsqueeze", d.op(op, made), at), (2 if full else 1) * half) for op in ("Cos", "Sin")]


def _turned(d: Draw, x: str, cos: str, sin: str, size: int, interleaved: bool) -> str:
    half = size // 2
    sign = lambda y: d.op("Neg", y) if d.chance(0.6) else d.either("Mul", y, d.number(d.pick(-1.0, -1.0, 1.0, -2.0)))  # noqa: E731
    if interleaved:
        pair = [sign(d.slice(x, 1, size, -1, 2)), d.slice(x, 0, size, -1, 2)]
        stack = d.op("Concat", *(d.with_axes("Unsqueeze", item, 4) for item in pair), axis=-1)
        turned = d.op("Reshape", stack, d.ints(0, 0, 0, size))
    else:
        one, two = d.parts(x, half, half, axis=3) if d.chance(0.4) else (
            d.slice(x, 0, half, -1), d.slice(x, half, size, -1))  # fmt: skip
        turned = d.op("Concat", sign(two), one, axis=-1) if d.chance(0.93) else d.op("Concat", two, sign(one), axis=-1)
    return d.either("Add", d.either("Mul", x, cos), d.either("Mul", turned, sin))


def _by_halves(d: Draw, x: str, cos: str, sin: str, size: int, interleaved: bool) -> str:
    half = size // 2
    if interleaved:
        one, two = d.slice(x, 0, size, -1, 2), d.slice(x, 1, size, -1, 2)
    else:
        one, two = d.slice(x, 0, half, -1), d.slice(x, half, size, -1)
    first = d.op(d.pick("Sub", "Sub", "Sub", "Add"), d.either("Mul", one, cos), d.either("Mul", two, sin))
    second = d.either("Add", d.either("Mul", two, cos), d.either("Mul", one, sin))
    if not interleaved:
        return d.op("Concat", first, second, axis=-1)
    stack = d.op("Concat", *(d.with_axes("Unsqueeze", item, 4) for item in (first, second)), axis=-1)
    return d.op("Reshape", stack, d.ints(0, 0, 0, size))


def rotated_attention(d: Draw) -> Outputs:
    """Rotary embeddings of queries and keys in front of an attention."""
    heads, size = d.pick(1, 2, 3), d.pick(4, 8)
    width = heads * size
    x = d.given("x", [*d.lead(), width])
    rotated = d.pick(size, size // 2)
    tables = _tables(d, rotated, 1, interleaved=False)

    def turn(y: str) -> str:
        part = d.slice(y, 0, rotated, -1) if rotated < size else y
        if tables[0][1] == rotated:
            made = _turned(d, part, tables[0][0], tables[1][0], rotated, False)
        else:
            made = _by_halves(d, part, tables[0][0], tables[1][0], rotated, False)
        return d.op("Concat", made, d.slice(y, rotated, size, -1), axis=-1) if rotated < size else made

    q, k, v = (_heads(d, d.dense(x, width, width), heads, size) for _ in range(3))
    k = d.op("Transpose", turn(k), perm=(0, 1, 3, 2))
    mine = Layout(d.batch, d.length, d.length)
    return (_merge(d, _core(d, turn(q), k, v, heads, size, mine), heads, size, mine),)


# ------------------------------------------------------------------------------------------------ patches, a layer


def patches(d: Draw) -> Outputs:
    depth, width, kernel = d.pick(1, 3, 4), d.pick(2, 10), (d.pick(1, 4, 8), d.pick(1, 6, 8))
    rows, columns = d.pick(1, 2, 3) * kernel[0], d.pick(1, 2) * kernel[1]
    if d.chance(0.15):
        columns = d.note(columns + 1)
    given: dict[str, Any] = {"strides": list(kernel)}
    if d.chance(0.2):
        given |= d.note(d.pick({"pads": [0, 1, 0, 1]}, {"pads": [0] * 4}, {"auto_pad": "VALID"}, {"auto_pad": "SAME_UPPER"},
                               {"strides": [1, kernel[1]]}, {"dilations": [1, 1]}))  # fmt: skip
    weights = [d.weight(width, depth, *kernel), *([d.weight(width)] if d.chance(0.6) else [])]
    made = d.op("Conv", d.given("x", [d.batch, depth, rows, columns]), *weights, **given)
    if d.chance(0.4):
        return (d.op("Transpose", made, perm=d.pick([0, 2, 3, 1], [0, 2, 3, 1], [0, 3, 2, 1])),)
    made = d.op("Reshape", made, d.ints(*d.pick([0, width, -1], [0, 0, -1], [1, width, -1])))
    return (d.op("Transpose", made, perm=d.pick([0, 2, 1], [0, 2, 1], [1, 0, 2])),)


def layer(d: Draw) -> Outputs:
    """A layer of a transformer: attention, sums, norms and an activation together."""
    heads, size = d.pick(1, 2, 3), d.pick(2, 4)
    width = heads * size
    d.opset = max(d.opset, 17)
    x, mine = d.given("x", [*d.lead(), width]), Layout(d.batch, d.length, d.length)
    q, k, v = (_heads(d, d.dense(x, width, width), heads, size) for _ in range(3))
    context = _core(d, q, d.op("Transpose", k, perm=(0, 1, 3, 2)), v, heads, size, mine)
    turned = d.op("Reshape", d.op("Transpose", context, perm=(0, 2, 1, 3)), d.ints(0, 0, width))
    total = d.either("Add", d.dense(turned, width, width), x)
    normed = d.op("LayerNormalization", total, d.weight(width), d.weight(width), axis=-1)
    inner = d.dense(normed, width, 2 * width)
    half = d.op("Mul", inner, d.op("Add", d.op("Erf", d.op("Div", inner, d.number(2**0.5))), d.number(1.0)))
    out = d.either("Add", d.dense(d.op("Mul", half, d.number(0.5)), 2 * width, width), normed)
    return (d.op("LayerNormalization", out, d.weight(width), d.weight(width), axis=-1),)


FAMILIES: dict[str, Callable[[Draw], Outputs]] = {
    "attention": attention, "standard_attention": standard_attention, "norms": norms, "skip_norms": skip_norms,
    "activations": activations, "rotary": rotary, "rotated_attention": rotated_attention, "patches": patches,
    "layer": layer,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ inputs


def draw_feeds(drawn: Drawn) -> Iterator[tuple[str, Feeds]]:
    """Inputs by kind: normal twice, large, denormal, a row masked, all masked, not finite, symbols of 1."""
    random = np.random.default_rng([drawn.seed, 7])
    classes = {"batch": 0, "other": 0, "tokens": 1, "keys": 2, "rows": 1}
    sizes = [int(random.integers(1, 6)) for _ in range(3)]
    kinds = ("normal", "again", "large", "denormal", "row masked", "all masked", "not finite", "ones", "other is 1")
    for kind in kinds:
        if kind == "again":
            sizes = [int(random.integers(1, 9)) for _ in range(3)]
        symbols = {name: 1 if kind == "ones" else sizes[at] for name, at in classes.items()}
        if kind == "other is 1":
            symbols |= {"other": 1, "rows": 1}
            if not any("other" in dims or "rows" in dims for dims in map(_dims, drawn.model.graph.input)):
                continue
        yield kind, {item.name: _values(random, item, symbols, kind) for item in drawn.model.graph.input}


def _dims(item: onnx.ValueInfoProto) -> list[Any]:
    return [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]


def _values(random: np.random.Generator, item: onnx.ValueInfoProto, symbols: dict[str, int], kind: str) -> np.ndarray:
    shape = [symbols.get(dim, dim) for dim in _dims(item)]
    dtype = helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
    if dtype == np.bool_ or item.name.endswith("_add"):
        masked = random.random(shape) < 0.3
        if kind in ("row masked", "all masked"):
            masked[(...,) if kind == "all masked" or len(shape) < 2 else (..., 0, slice(None))] = True
        elif shape and kind != "ones":
            masked[..., 0] = False
        if dtype == np.bool_:
            return np.asarray(masked if item.name.endswith("_drop") else ~masked)
        fill = random.choice([-1e4, -30000.0, -np.inf, -65504.0 if dtype == np.float16 else np.finfo(np.float32).min])
        values = np.where(masked, fill, 0)
        return np.asarray((values if random.random() < 0.6 else random.standard_normal(shape) + values).astype(dtype))
    values = random.standard_normal(shape)
    values = values * {"large": 8.0, "denormal": 1e-39 if dtype == np.float32 else 1e-7}.get(kind, 1.0)
    if kind == "not finite" and values.size:
        values.reshape(-1)[random.integers(values.size)] = random.choice([np.nan, np.inf, -np.inf])
    return np.asarray(values.astype(dtype))
