"""What ONNX Runtime's own operators demand of sizes and attributes: it is looked for before one is put in a graph.

Plain ONNX repeats a dimension of 1 wherever two tensors meet, and so may any dimension that the model names by a symbol of
its own: these operators refuse it when they run. So sizes must have one number or name. One that shape inference loses is
taken for equal (most exports have such); the build tries its engine at the ends of each profile, and leaves a fusion out
that does not run there.

| operator | demands |
|---|---|
| Attention, MultiHeadAttention | queries, keys and values of one batch; a scale other than 0, which stands for the default |
| their bias | (1 or batch, 1 or heads, queries, keys): no size that repeats the scores |
| MultiHeadAttention with keys and values of rank 4 | one head size for both |
| SkipLayerNormalization and its RMS form | addends of one shape |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from trt_engine.graph.fusion.fusion_graph import NotFused
from trt_engine.graph.symbolic_shapes import Size, is_unknown, may_be_equal

Names = Collection[Size]
"""What one size is known by: a number, symbols, None for nothing."""


def is_named(size: Size, names: Names) -> bool:
    """Whether a size is proved to be one that is known by these names."""
    return size is not None and size in names


def _may_be(size: Size, names: Names) -> bool:
    known = [name for name in names if not is_unknown(name)]
    return any(may_be_equal(size, name) for name in known or names)


def require_attention(batches: Sequence[Size], scale: float) -> None:
    """`NotFused` where Attention and MultiHeadAttention do not take queries, keys and values of these batches, or this
    scale."""
    if not all(map(may_be_equal, batches, [*batches[1:], batches[0]])):
        found = ", ".join(map(str, batches))
        raise NotFused(f"the batches of its queries, keys and values are {found}, which may differ, and be repeated")
    if np.float32(scale) == 0:
        raise NotFused("its scores are multiplied by 0, which stands for the default scale")


def require_bias(shape: Sequence[Size], scores: Sequence[Names]) -> None:
    """`NotFused` where a bias of this shape is not one of scores (batch, heads, queries, keys), once its queries are
    expanded."""
    if len(shape) < 2 or (shape[-1] == 1 and 1 not in scores[-1]):
        raise NotFused("its mask is the same for all keys")
    for own, other in zip(reversed(shape), reversed(scores), strict=False):
        if own != 1 and not _may_be(own, other):
            raise NotFused(f"its mask has the sizes {list(shape)}, which may repeat its scores")


def takes_heads_first(key_size: int, value_size: int) -> bool:
    """Whether MultiHeadAttention takes keys and values as (batch, heads, sequence, size)."""
    return key_size == value_size


def require_skip_norm(first: Sequence[Size], second: Sequence[Size]) -> None:
    """`NotFused` where SkipLayerNormalization does not add tensors of these shapes."""
    if len(first) != 3 or len(second) != 3 or not all(map(may_be_equal, first, second)):
        raise NotFused(
            f"its addends have the shapes {list(first)} and {list(second)}, expected two of rank 3 that are the same"
        )
