"""The source run at every set of sizes that its graph is compared at, and which sizes and batches it can take at all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trt_engine.conversion.axes import Axes, Axis, another, shapes_at, sizes_of, symbols_of, variants
from trt_engine.conversion.examples import resized
from trt_engine.conversion.exporting import Array, Exported
from trt_engine.errors import ModelError
from trt_engine.tensors import Shape

__all__ = ["Answer", "Answers", "answers", "axes_of", "feeds_at", "mixes_rows", "same", "told_sizes", "tried_sizes"]

log = logging.getLogger(__name__)

_SEEDS_WITHOUT_AXES = 3


@dataclass(frozen=True)
class Answer:
    """What the source says to one set of inputs."""

    moved: tuple[str, ...]
    """Symbols that do not have the example's size."""
    sizes: dict[str, int]
    feeds: dict[str, Array]
    outputs: dict[str, Array]
    failed: tuple[tuple[str, int, str], ...] = ()
    """Sizes tried first that the source itself cannot run at: symbol, size, what it raised."""

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: array.shape for name, array in self.feeds.items()}


Answers = list[Answer]


def axes_of(exported: Exported) -> Axes:
    """The dynamic axes of the export, with their ranges."""
    return {
        name: {at: exported.limits.get(symbol, Axis(symbol)) for at, symbol in positions.items()}
        for name, positions in exported.symbols.items()
    }


def tried_sizes(given: Answers, symbol: str) -> tuple[int, ...]:
    """The sizes of a symbol that source and graph were compared at, in order."""
    return tuple(sorted({answer.sizes[symbol] for answer in given}))


def answers(exported: Exported) -> Answers:
    """The source run at every set of sizes it is to be compared at.

    `ModelError` naming the axis when the source itself cannot move along it, or when it answers the same inputs twice
    differently.
    """
    axes = axes_of(exported)
    base = {name: array.shape for name, array in exported.example.items()}
    first = exported.reference(exported.example)
    again = exported.reference(exported.example)
    for name, value in first.items():
        if not same(value, again[name]):
            raise ModelError(
                f"the source is not deterministic: output `{name}` differs between two runs on the same inputs",
                hint="take random operators out, or seed them inside forward; dropout belongs to training alone",
            )
    found = []
    if not symbols_of(axes):
        for seed in range(_SEEDS_WITHOUT_AXES):
            feeds = exported.example if not seed else feeds_at(exported, base, seed)
            found.append(Answer((), {}, dict(feeds), first if not seed else exported.reference(feeds)))
        return found
    sizes = sizes_of(axes, base)
    for seed, (wanted, moved) in enumerate(variants(axes, sizes)):
        if not moved:
            found.append(Answer((), wanted, dict(exported.example), first))
        elif (answer := _moved(exported, axes, base, sizes, wanted, moved, seed, found)) is not None:
            found.append(answer)
    return found


def _moved(
    exported: Exported, axes: Axes, base: Mapping[str, Shape], sizes: dict[str, int], wanted: dict[str, int],
    moved: tuple[str, ...], seed: int, before: Answers,
) -> Answer | None:  # fmt: skip
    """One answer; other sizes of its first symbol are tried where the source cannot run at these.

    None where the source runs at no further size, and the others were compared already. `ModelError` where the symbol does
    not move at all, or fails inside the range that was named for it.
    """
    symbol = moved[0]
    axis = symbols_of(axes)[symbol]
    failed: list[tuple[str, int, str]] = []
    cause: ModelError | None = None
    known = [answer.sizes for answer in before]
    for size in (wanted[symbol], *_instead(axis, sizes[symbol], wanted[symbol])):
        at = {**wanted, symbol: size}
        if at in known or any(size == other for _, other, _ in failed):
            continue
        feeds = feeds_at(exported, shapes_at(axes, dict(base), at), seed)
        try:
            return Answer(moved, at, feeds, exported.reference(feeds), tuple(failed))
        except ModelError as error:
            cause = cause or error
            failed.append((symbol, size, error.message))
            if axis != Axis(symbol) and size == axis.low:  # the range was named, and its end does not run
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
        f"the source itself does not follow `{symbol}`: it runs at {told_sizes(sizes, moved)} and not at "
        f"{told_sizes(wanted, moved)}: {cause.message}",
        hint=hint,
    ) from cause


_PROBED = 8


def _instead(axis: Axis, size: int, wanted: int) -> Iterator[int]:
    """Sizes to try where the source cannot run at the one wanted: the smallest that works, or twice the example's."""
    if wanted == axis.low < size:
        yield from range(axis.low + axis.step, min(size, axis.low + _PROBED * axis.step), axis.step)
    if axis.holds(2 * size):
        yield 2 * size
    other = another(axis, size, avoid=(wanted, 2 * size))
    if other is not None:
        yield other
    if axis.holds(3 * size):
        yield 3 * size


def mixes_rows(exported: Exported, given: Answers) -> tuple[str, ...]:
    """The outputs whose first row changes with the other rows of the batch: statistics of the batch, or rows compared.

    Every other row is made equal to the first; the sizes stay, so that nothing but the other rows' numbers changes.
    """
    batch = next((positions[0] for positions in exported.symbols.values() if 0 in positions), None)
    first = given[0]
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
            if apart.size and np.nanmax(apart, initial=0.0) > _MIXED * np.nanmax(np.abs(one), initial=0.0):
                found.append(name)
    return tuple(found)


_MIXED = 1e-3
"""Of the row's largest value: what other rows change is a dependence on them, not the rounding of sums."""


def told_sizes(sizes: Mapping[str, int], moved: Iterable[str]) -> str:
    return ", ".join(f"{name} {sizes[name]}" for name in moved)


def feeds_at(exported: Exported, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
    if exported.feeds is not None:
        return exported.feeds(shapes, seed)
    return {name: resized(array, tuple(shapes[name])) for name, array in exported.example.items()}


def same(one: Array, two: Array) -> bool:
    if one.shape != two.shape:
        return False
    if one.dtype.kind not in "fiub":
        return bool(np.array_equal(one, two))
    return bool(np.allclose(one.astype(np.float64), two.astype(np.float64), rtol=1e-6, atol=1e-7, equal_nan=True))
