"""Results that a graph sorts: near-equal scores have no order, so rows may change places without being wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto

from trt_engine.conversion.exporting import Array
from trt_engine.precision.comparison import compared_tensors

__all__ = ["in_their_order", "ranked"]

_MOST_ROWS = 4096


def ranked(proto: ModelProto) -> tuple[str, ...]:
    """The outputs that come out of a sort (TopK, NonMaxSuppression) of the main graph."""
    compared = set(compared_tensors(proto))
    return tuple(item.name for item in proto.graph.output if item.name not in compared)


def in_their_order(
    got: Mapping[str, Array], want: Mapping[str, Array], names: Sequence[str], limit: float
) -> tuple[dict[str, Array], int]:
    """What was got with its rows in the order of what was wanted, and how many rows of an item changed places at most.

    Rows stand on the second axis, one of every output together: a detection's box goes with its score. Only rows that are
    off by more than `limit` of their channel's scale are moved, each to a place that another such row left.
    """
    found, most = dict(got), 0
    together: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        if got[name].ndim > 1 and got[name].shape == want[name].shape and got[name].dtype.kind in "fiu":
            together.setdefault(got[name].shape[:2], []).append(name)
    for (items, _), group in together.items():
        for name in group:
            found[name] = found[name].copy()
        for item in range(items):
            mine = np.concatenate([_scaled(got[name], want[name], item) for name in group], axis=1)
            theirs = np.concatenate([_scaled(want[name], want[name], item) for name in group], axis=1)
            with np.errstate(invalid="ignore"):
                off = np.flatnonzero(~(np.abs(mine - theirs).max(axis=1) <= limit))
            if not 1 < off.size <= _MOST_ROWS or (taken := _matched(mine[off], theirs[off], limit)) is None:
                continue
            for name in group:
                found[name][item, off] = got[name][item, off[taken]]
            most = max(most, int(off.size))
    return found, most


def _scaled(array: Array, reference: Array, item: int) -> Array:
    """One item's rows, flat, every channel over its largest value in the reference."""
    scale = np.abs(reference.astype(np.float64)).max(axis=(0, 1))
    rows = array[item].astype(np.float64) / np.where(scale > 0, scale, 1.0)
    return np.asarray(rows.reshape(len(rows), -1))


def _matched(mine: Array, theirs: Array, limit: float) -> list[int] | None:
    """For each of their rows the one of mine that is it, each once; None where there is none for some."""
    left = list(range(len(mine)))
    taken = []
    for row in theirs:
        apart = np.abs(mine[left] - row).max(axis=1)
        at = int(np.argmin(apart))
        if not apart[at] <= limit:
            return None
        taken.append(left.pop(at))
    return taken
