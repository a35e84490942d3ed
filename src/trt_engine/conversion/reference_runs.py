"""Runs the source at every set of sizes that its graph is compared at, and finds sizes and batches it does not
support."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.conversion.axes import Axes, Axis, alternate_size, shapes_at, size_variants, sizes_of, symbols_of
from trt_engine.conversion.examples import resize_example
from trt_engine.conversion.exported import Exported
from trt_engine.errors import ModelError
from trt_engine.tensors import Shape

log = logging.getLogger(__name__)

_SEEDS_WITHOUT_AXES = 3


@dataclass(frozen=True)
class ReferenceOutputs:
    """Outputs of the source for one set of inputs."""

    moved: tuple[str, ...]
    """Symbols that differ from the example's size."""
    sizes: dict[str, int]
    feeds: dict[str, Array]
    outputs: dict[str, Array]
    failed: tuple[tuple[str, int, str], ...] = ()
    """Sizes at which the source itself failed: symbol, size, error message."""

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: array.shape for name, array in self.feeds.items()}


ReferenceRuns = list[ReferenceOutputs]


def axes_of(exported: Exported) -> Axes:
    """The dynamic axes of the export, with their ranges."""
    return {
        name: {at: exported.limits.get(symbol, Axis(symbol)) for at, symbol in positions.items()}
        for name, positions in exported.symbols.items()
    }


def compared_sizes(references: ReferenceRuns, symbol: str) -> tuple[int, ...]:
    """Compared sizes of a symbol, sorted."""
    return tuple(sorted({answer.sizes[symbol] for answer in references}))


def run_references(exported: Exported) -> ReferenceRuns:
    """Run the source at every set of sizes to compare.

    `ModelError` naming the axis if the source does not support other sizes of it, or if two runs on the same inputs
    differ.
    """
    axes = axes_of(exported)
    base = {name: array.shape for name, array in exported.example.items()}
    first = exported.reference(exported.example)
    again = exported.reference(exported.example)
    for name, value in first.items():
        if not equal_outputs(value, again[name]):
            raise ModelError(
                f"the source is not deterministic: output `{name}` differs between two runs on the same inputs",
                hint="take random operators out, or seed them inside forward; dropout belongs to training alone",
            )
    found = []
    if not symbols_of(axes):
        for seed in range(_SEEDS_WITHOUT_AXES):
            feeds = exported.example if not seed else feeds_at(exported, base, seed)
            found.append(ReferenceOutputs((), {}, dict(feeds), first if not seed else exported.reference(feeds)))
        return found
    sizes = sizes_of(axes, base)
    for seed, (wanted, moved) in enumerate(size_variants(axes, sizes)):
        if not moved:
            found.append(ReferenceOutputs((), wanted, dict(exported.example), first))
        elif (answer := _run_moved(exported, axes, base, sizes, wanted, moved, seed, found)) is not None:
            found.append(answer)
    return found


def _run_moved(
    exported: Exported, axes: Axes, base: Mapping[str, Shape], sizes: dict[str, int], wanted: dict[str, int],
    moved: tuple[str, ...], seed: int, before: ReferenceRuns,
) -> ReferenceOutputs | None:  # fmt: skip
    """Run the source at one set of sizes; if it fails, other sizes of the first symbol are tried.

    None if the source supports no further size and others were compared already. `ModelError` if no other size works,
    or if one fails inside a given range.
    """
    symbol = moved[0]
    axis = symbols_of(axes)[symbol]
    failed: list[tuple[str, int, str]] = []
    cause: ModelError | None = None
    known = [answer.sizes for answer in before]
    for size in (wanted[symbol], *_fallback_sizes(axis, sizes[symbol], wanted[symbol])):
        at = {**wanted, symbol: size}
        if at in known or any(size == other for _, other, _ in failed):
            continue
        feeds = feeds_at(exported, shapes_at(axes, dict(base), at), seed)
        try:
            return ReferenceOutputs(moved, at, feeds, exported.reference(feeds), tuple(failed))
        except ModelError as error:
            cause = cause or error
            failed.append((symbol, size, error.message))
            if axis != Axis(symbol) and size == axis.low:  # the end of an explicit range failed
                break
    assert cause is not None
    lowest = wanted[symbol] == axis.low
    if lowest and axis == Axis(symbol) and any(answer.sizes[symbol] != sizes[symbol] for answer in before):
        before[-1] = replace(before[-1], failed=(*before[-1].failed, *failed))
        return None
    if lowest and any(answer.sizes[symbol] != sizes[symbol] for answer in before):
        hint = f"`{symbol}` was named `{axis}`; name the sizes the source takes, as `{symbol}@{sizes[symbol]}..`"
    else:
        hint = (
            f"something in it is made for one size; leave `{symbol}` out of `--dynamic`, or name the sizes it takes, "
            f"as `{symbol}@{sizes[symbol]}..{4 * sizes[symbol]}/{sizes[symbol]}`"
        )
    raise ModelError(
        f"the source itself does not follow `{symbol}`: it runs at {format_sizes(sizes, moved)} and not at "
        f"{format_sizes(wanted, moved)}: {cause.message}",
        hint=hint,
    ) from cause


_MAX_PROBES = 8


def _fallback_sizes(axis: Axis, size: int, wanted: int) -> Iterator[int]:
    """Fallback sizes: the smallest that works, or twice the example's."""
    if wanted == axis.low < size:
        yield from range(axis.low + axis.step, min(size, axis.low + _MAX_PROBES * axis.step), axis.step)
    if axis.contains(2 * size):
        yield 2 * size
    other = alternate_size(axis, size, avoid=(wanted, 2 * size))
    if other is not None:
        yield other
    if axis.contains(3 * size):
        yield 3 * size


def batch_dependent_outputs(exported: Exported, references: ReferenceRuns) -> tuple[str, ...]:
    """Outputs whose first row changes with other rows of the batch (batch statistics, or rows compared).

    All other rows are set equal to the first; shapes stay.
    """
    batch = next((positions[0] for positions in exported.symbols.values() if 0 in positions), None)
    first = references[0]
    size = first.sizes.get(batch, 1) if batch is not None else 1
    if size < 2:
        return ()
    stacked = [name for name, positions in exported.symbols.items() if positions.get(0) == batch]
    feeds = dict(first.feeds)
    for name in stacked:
        feeds[name] = np.repeat(feeds[name][:1], size, axis=0)
    if all(np.array_equal(feeds[name], first.feeds[name]) for name in stacked):
        return ()
    try:
        other = exported.reference(feeds)
    except ModelError as error:
        log.info("the source refuses a batch of equal rows: %s", error.message)
        return ()
    found = []
    for name, value in first.outputs.items():
        again = other[name]
        if value.ndim and value.shape == again.shape and value.shape[0] == size and value.dtype.kind in "fiu":
            one, two = value[0].astype(np.float64), again[0].astype(np.float64)
            with np.errstate(invalid="ignore"):
                apart = np.abs(one - two)
            if apart.size and np.nanmax(apart, initial=0.0) > _MIXING_TOLERANCE * np.nanmax(np.abs(one), initial=0.0):
                found.append(name)
    return tuple(found)


_MIXING_TOLERANCE = 1e-3
"""Minimum change relative to the row's largest value: above the rounding of sums."""


def format_sizes(sizes: Mapping[str, int], moved: Iterable[str]) -> str:
    return ", ".join(f"{name} {sizes[name]}" for name in moved)


def feeds_at(exported: Exported, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
    if exported.feeds is not None:
        return exported.feeds(shapes, seed)
    return {name: resize_example(array, tuple(shapes[name])) for name, array in exported.example.items()}


def equal_outputs(one: Array, two: Array) -> bool:
    if one.shape != two.shape:
        return False
    if one.dtype.kind not in "fiub":
        return bool(np.array_equal(one, two))
    return bool(np.allclose(one.astype(np.float64), two.astype(np.float64), rtol=1e-6, atol=1e-7, equal_nan=True))
