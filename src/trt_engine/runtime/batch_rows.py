"""Batch concatenation and splitting, and the batch sizes of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.tensors import Signature, Tensors, TensorSpec, format_shape

DEFAULT_MAX_BATCH = 32
"""Default `max_batch` of a batcher for an engine without a batch limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLayout:
    """Signature and profiles of an engine with a dynamic batch, and its batch limits."""

    signature: Signature
    profiles: tuple[Profile, ...]
    batch_ranges: tuple[tuple[int, int], ...]
    """Supported batches as (min, max); empty if unlimited."""

    @classmethod
    def from_signature(cls, signature: Signature, profiles: Sequence[Profile] = ()) -> BatchLayout:
        """The layout; `UsageError` unless the first dimension of every input and output is the batch, and rows are
        independent."""
        if signature.row_dependence is not None:
            raise UsageError(f"requests cannot be batched: {signature.row_dependence}", hint="leave `batching` out")
        fixed = _static_batch(signature)
        if fixed is None:
            symbols = {spec.symbols[0] for spec in signature.inputs if spec.symbols} - {None}
            for spec in signature.outputs:
                other = spec.symbols[0] if spec.symbols else None
                if (
                    signature.batch_axes(spec) != (0,)
                    or not spec.shape
                    or spec.shape[0] >= 0
                    or (symbols and other is not None and other not in symbols)
                ):
                    raise _no_batch_dimension(spec)
        else:
            for spec in signature.outputs:
                if not spec.shape or spec.shape[0] != fixed:
                    raise _no_batch_dimension(spec)
        spans = ((fixed, fixed),) if fixed else tuple(_batch_range(profile) for profile in profiles if profile.ranges)
        opened = Signature(
            tuple(map(_with_dynamic_batch, signature.inputs)), tuple(map(_with_dynamic_batch, signature.outputs))
        )
        return cls(opened, tuple(map(_from_one_row, profiles)), spans)

    @property
    def max_rows(self) -> int | None:
        """Maximum rows per run; None if unlimited."""
        return max((high for _, high in self.batch_ranges), default=None)

    def check_rows(self, rows: int) -> None:
        """`FeedError` for more rows than the engine's maximum."""
        if self.max_rows is not None and rows > self.max_rows:
            raise FeedError(
                f"a request has {rows} rows, the engine takes {self.max_rows} at once", hint="split the request"
            )

    def bucket_for(self, rows: int, buckets: Sequence[int] = ()) -> int:
        """The padded batch for `rows`: the next of `buckets` or the next supported batch."""
        wanted = next((size for size in buckets if size >= rows), rows)
        for size in (wanted, rows):
            if not self.batch_ranges or any(low <= size <= high for low, high in self.batch_ranges):
                return size
        return min((low for low, _ in self.batch_ranges if low >= rows), default=rows)


def _batch_range(profile: Profile) -> tuple[int, int]:
    spans = profile.ranges.values()
    return max(span.min[0] for span in spans), min(span.max[0] for span in spans)


def _static_batch(signature: Signature) -> int | None:
    if signature.batch_axis:
        return None
    for spec in signature.inputs:
        if (axes := signature.batch_axes(spec)) not in ((), (0,)):
            raise UsageError(
                f"requests cannot be batched: input `{spec.name}` is {spec.format_symbolic()}, its batch is dimension "
                f"{' and '.join(map(str, axes))}, and requests are joined along the first",
                hint="leave `batching` out, or export the model with the batch first",
            )
    first = {spec.shape[0] if spec.shape else -1 for spec in signature.inputs}
    if len(first) != 1 or min(first) < 1:
        inputs = ", ".join(f"`{spec.name}` {spec.format_symbolic()}" for spec in signature.inputs)
        raise UsageError(
            f"requests cannot be batched: the inputs do not share their first dimension ({inputs})",
            hint="leave `batching` out",
        )
    return first.pop()


def _no_batch_dimension(spec: TensorSpec) -> UsageError:
    return UsageError(
        f"requests cannot be batched: output `{spec.name}` is {spec.format_symbolic()}, without a leading batch dimension",
        hint="leave `batching` out, or export the model with one row of output for each row of input",
    )


def _with_dynamic_batch(spec: TensorSpec) -> TensorSpec:
    symbols = spec.symbols or (None,) * len(spec.shape)
    return dataclasses.replace(spec, shape=(-1, *spec.shape[1:]), symbols=(symbols[0] or "batch", *symbols[1:]))


def _from_one_row(profile: Profile) -> Profile:
    """The profile with a minimum batch of 1; smaller batches are padded."""
    return Profile(
        {
            name: ShapeRange((min(1, span.min[0]), *span.min[1:]), span.opt, span.max)
            for name, span in profile.ranges.items()
        }
    )


def row_count(feeds: Tensors) -> int:
    """The rows of one request, the first dimension of arrays of any dtype; `FeedError` if its inputs differ or have none."""
    counts = [array.shape[0] if array.shape else 0 for array in feeds.values()]
    rows = int(counts[0]) if counts else 0
    if counts.count(rows) != len(counts) or not counts:
        listed = ", ".join(f"`{name}` {count}" for name, count in zip(feeds, counts, strict=True))
        raise FeedError(
            f"the inputs differ in their rows: {listed}", hint="give the same number of rows to every input"
        )
    if rows < 1:
        raise FeedError("a request without rows", hint="one row or more")
    return rows


def concat(parts: Sequence[Tensors], rows: int, padded: int) -> dict[str, Any]:
    """`parts` concatenated along the batch and padded to `padded` rows with the last row. A single part is not copied.

    Dtypes are those of the parts.
    """
    if len(parts) == 1 and rows == padded:
        return dict(parts[0])
    joined = {}
    for name, first in parts[0].items():
        whole = joined[name] = np.empty((padded, *first.shape[1:]), first.dtype)
        np.concatenate([part[name] for part in parts], out=whole[:rows])
        whole[rows:] = whole[rows - 1]  # `concatenate` would adopt the memory layout of the repeated row
    return joined


def split(outputs: Tensors, counts: Sequence[int], padded: int) -> list[dict[str, Any]]:
    """A copy of each request's rows; outputs of a single unpadded request are not copied.

    Shapes are `[rows, ...]`, dtypes those of `outputs`. Raises `TrtEngineError` for an output that does not have a row per
    input row.
    """
    if len(counts) == 1 and counts[0] == padded:
        return [dict(outputs)]
    for name, array in outputs.items():
        if not array.shape or array.shape[0] != padded:
            raise TrtEngineError(
                f"output `{name}` is {format_shape(array.shape)} for a batch of {padded}, expected one row per input row",
                hint="leave `batching` out for this engine",
            )
    found, start = [], 0
    for count in counts:
        found.append({name: np.array(array[start : start + count]) for name, array in outputs.items()})
        start += count
    return found
