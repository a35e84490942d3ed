"""From several callers' rows to one batch and back: `join`, `part`, and what an engine must be for that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.config import Profile, ShapeRange
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.tensors import Signature, Tensors, TensorSpec, format_shape

__all__ = ["Rows", "join", "part", "rows_of"]

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """What an engine takes and gives by rows: its signature and profiles with the batch left open, and its limits."""

    signature: Signature
    profiles: tuple[Profile, ...]
    spans: tuple[tuple[int, int], ...]
    """The batches the engine takes, as first and last; empty where it takes any."""

    @classmethod
    def of(cls, signature: Signature, profiles: Sequence[Profile] = ()) -> Rows:
        """`UsageError` unless the first dimension of every input and output is the batch."""
        fixed = _fixed(signature)
        if fixed is None:
            symbols = {spec.symbols[0] for spec in signature.inputs if spec.symbols} - {None}
            for spec in signature.outputs:
                other = spec.symbols[0] if spec.symbols else None
                if not spec.shape or spec.shape[0] >= 0 or (symbols and other is not None and other not in symbols):
                    raise _not_rows(spec)
        else:
            for spec in signature.outputs:
                if not spec.shape or spec.shape[0] != fixed:
                    raise _not_rows(spec)
        spans = ((fixed, fixed),) if fixed else tuple(_span(profile) for profile in profiles if profile.ranges)
        opened = Signature(tuple(map(_opened, signature.inputs)), tuple(map(_opened, signature.outputs)))
        return cls(opened, tuple(map(_from_one, profiles)), spans)

    @property
    def most(self) -> int | None:
        """The most rows it takes at once."""
        return max((high for _, high in self.spans), default=None)

    def check(self, rows: int) -> None:
        """`FeedError` for more rows than the engine takes at once."""
        if self.most is not None and rows > self.most:
            raise FeedError(
                f"a request of {rows} rows, the engine takes {self.most} at once", hint="part it, and ask again"
            )

    def padded(self, rows: int, buckets: Sequence[int] = ()) -> int:
        """The batch so many rows run as: the next of `buckets`, then the next the engine takes."""
        wanted = next((size for size in buckets if size >= rows), rows)
        for size in (wanted, rows):
            if not self.spans or any(low <= size <= high for low, high in self.spans):
                return size
        return min((low for low, _ in self.spans if low >= rows), default=rows)


def _span(profile: Profile) -> tuple[int, int]:
    spans = profile.ranges.values()
    return max(span.min[0] for span in spans), min(span.max[0] for span in spans)


def _fixed(signature: Signature) -> int | None:
    if signature.batch_axis:
        return None
    first = {spec.shape[0] if spec.shape else -1 for spec in signature.inputs}
    if len(first) != 1 or min(first) < 1:
        inputs = ", ".join(f"`{spec.name}` {spec.describe()}" for spec in signature.inputs)
        raise UsageError(
            f"requests cannot be joined: the inputs do not share their first dimension ({inputs})",
            hint="leave `batching` out",
        )
    return first.pop()


def _not_rows(spec: TensorSpec) -> UsageError:
    return UsageError(
        f"requests cannot be joined: output `{spec.name}` is {spec.describe()}, its first dimension is not the batch",
        hint="leave `batching` out, or export the model with one row of output for each row of input",
    )


def _opened(spec: TensorSpec) -> TensorSpec:
    symbols = spec.symbols or (None,) * len(spec.shape)
    return dataclasses.replace(spec, shape=(-1, *spec.shape[1:]), symbols=(symbols[0] or "batch", *symbols[1:]))


def _from_one(profile: Profile) -> Profile:
    """The profile from one row on: what is fewer than an engine takes is filled up."""
    return Profile(
        {
            name: ShapeRange((min(1, span.min[0]), *span.min[1:]), span.opt, span.max)
            for name, span in profile.ranges.items()
        }
    )


def rows_of(feeds: Tensors) -> int:
    """The rows of one request; `FeedError` where its inputs differ or there are none."""
    counts = {name: int(array.shape[0]) if array.shape else 0 for name, array in feeds.items()}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        raise FeedError(f"the inputs differ in their rows: {told}", hint="as many rows in every input")
    rows = next(iter(counts.values()))
    if rows < 1:
        raise FeedError("a request without rows", hint="one row or more")
    return rows


def join(parts: Sequence[Tensors], rows: int, padded: int) -> dict[str, Any]:
    """The rows of all parts, one below the other, and filled up to `padded` with the last row. One part is not copied."""
    if len(parts) == 1 and rows == padded:
        return dict(parts[0])
    joined = {}
    for name, first in parts[0].items():
        whole = joined[name] = np.empty((padded, *first.shape[1:]), first.dtype)
        np.concatenate([part[name] for part in parts], out=whole[:rows])
        whole[rows:] = whole[rows - 1]  # not by `concatenate`: it would lay the whole out as what repeats is laid out
    return joined


def part(outputs: Tensors, counts: Sequence[int], padded: int) -> list[dict[str, Any]]:
    """Each caller's rows, in memory of their own; the only caller of a batch that was not filled up gets it as it is."""
    if len(counts) == 1 and counts[0] == padded:
        return [dict(outputs)]
    for name, array in outputs.items():
        if not array.shape or array.shape[0] != padded:
            raise TrtEngineError(
                f"output `{name}` came out as {format_shape(array.shape)} for a batch of {padded}: "
                "it has no row for each row of input",
                hint="leave `batching` out for this engine",
            )
    found, start = [], 0
    for count in counts:
        found.append({name: np.array(array[start : start + count]) for name, array in outputs.items()})
        start += count
    return found
