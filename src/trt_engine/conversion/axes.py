"""Dynamic axes by name: `images:0=batch@1..64,2=height@64..640/32`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.atomic_io import found_instead
from trt_engine.errors import UsageError
from trt_engine.tensors import Shape, suggest

EVERY = "*"
"""Wildcard for every input."""
_HINT = "write axes as `images:0=batch,2=height`, with a range `0=batch@1..64`, with a step `2=height@64..640/32`"
_ONE = re.compile(r"\s*(\d+)\s*=\s*([A-Za-z_]\w*)\s*(?:@\s*(\d*)\s*\.\.\s*(\d*)\s*(?:/\s*(\d+))?)?\s*")
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:@\s*(\d*)\s*\.\.\s*(\d*)\s*(?:/\s*(\d+))?)?\s*")


@dataclass(frozen=True, slots=True)
class Axis:
    """A symbol: its name, range and step."""

    symbol: str
    low: int = 1
    high: int | None = None
    step: int = 1

    def contains(self, size: int) -> bool:
        """Whether the range includes this size."""
        return self.low <= size and (self.high is None or size <= self.high) and size % self.step == 0

    def __str__(self) -> str:
        plain = (self.low, self.high, self.step) == (1, None, 1)
        span = f"@{self.low}..{'' if self.high is None else self.high}" + (f"/{self.step}" if self.step > 1 else "")
        return self.symbol if plain else self.symbol + span


Axes = dict[str, dict[int, Axis]]
"""Input -> axis -> symbol."""


def parse_dynamic(given: str | Sequence[str] | Mapping[str, Any]) -> Axes:
    """Parse dynamic axes from text or from `{"images": {0: "batch", 2: "height@64..640"}}`.

    Without an input name, `0=batch` applies to every input. `UsageError` for invalid text.
    """
    found: Axes = {}
    kind = Mapping if isinstance(given, Mapping) else str
    parts: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    if not all(isinstance(part, kind) for part in (given.values() if isinstance(given, Mapping) else parts)):
        raise UsageError(f"`dynamic` is {found_instead(given)}, expected axes of inputs", hint=_HINT)
    if isinstance(given, Mapping):
        for name, axes in given.items():
            for position, text in axes.items():
                _add_axis(found, str(name), int(position), text if isinstance(text, Axis) else _parse_symbol(str(text)))
    else:
        for text in parts:
            for part in text.split():
                name, colon, rest = part.rpartition(":")
                for one in rest.split(","):
                    if (match := _ONE.fullmatch(one)) is None:
                        raise UsageError(f"cannot read the dynamic axis `{one}` in `{text}`", hint=_HINT)
                    _add_axis(found, name if colon else EVERY, int(match[1]), _axis(*match.groups()[1:]))
    _unify_symbols(found)
    return found


def _parse_symbol(text: str) -> Axis:
    if (match := _NAMED.fullmatch(text)) is None:
        raise UsageError(
            f"cannot read the dynamic axis `{text}`", hint="write it as `batch`, `batch@1..64` or `h@64..640/32`"
        )
    return _axis(*match.groups())


def _axis(symbol: str, low: str | None, high: str | None, step: str | None) -> Axis:
    every = int(step) if step else 1
    made = Axis(symbol, int(low) if low else every, int(high) if high else None, every)
    if made.step < 1 or made.low < 1 or (made.high is not None and made.high < made.low):
        raise UsageError(f"the range of `{made}` is empty or below 1", hint=_HINT)
    if made.step > 1 and (made.low % made.step or (made.high or 0) % made.step):
        raise UsageError(f"the ends of `{made}` are not multiples of {made.step}", hint=_HINT)
    return made


def _add_axis(found: Axes, name: str, position: int, axis: Axis) -> None:
    if position in found.setdefault(name, {}):
        where = "every input" if name == EVERY else f"`{name}`"
        raise UsageError(f"axis {position} of {where} is named twice", hint="one name for each axis")
    found[name][position] = axis


def _unify_symbols(axes: Axes) -> None:
    """Apply the range of a symbol wherever it occurs; conflicting ranges are an error."""
    ranges: dict[str, Axis] = {}
    for positions in axes.values():
        for axis in positions.values():
            if axis != Axis(axis.symbol):
                other = ranges.setdefault(axis.symbol, axis)
                if other != axis:
                    raise UsageError(f"`{other}` and `{axis}` contradict each other", hint="one symbol has one range")
    for positions in axes.values():
        for position, axis in positions.items():
            positions[position] = ranges.get(axis.symbol, axis)


def axes_for(requested: Axes | None, shapes: Mapping[str, Shape], hints: Axes | None = None) -> Axes:
    """The requested axes; without a request `hints`, or the first axis of every input as `batch`."""
    if requested is None:
        requested = hints if hints is not None else {EVERY: {0: Axis("batch")}}
    names = list(shapes)
    for name, positions in requested.items():
        if name != EVERY and name not in shapes:
            raise UsageError(f"`--dynamic` names `{name}`, which is not an input", hint=suggest(name, names))
        for position in positions:
            if name != EVERY and position >= len(shapes[name]):
                raise UsageError(
                    f"`--dynamic` names axis {position} of `{name}`, which has {len(shapes[name])} dimensions",
                    hint="axes count from 0",
                )
    found: Axes = {}
    for name, shape in shapes.items():
        merged = {at: axis for at, axis in requested.get(EVERY, {}).items() if at < len(shape)} | requested.get(
            name, {}
        )
        if merged:
            found[name] = dict(sorted(merged.items()))
    return found


def symbols_of(axes: Axes) -> dict[str, Axis]:
    """The symbols, in order of occurrence."""
    return {axis.symbol: axis for positions in axes.values() for axis in positions.values()}


def sizes_of(axes: Axes, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Size of every symbol in these shapes; `UsageError` if two axes of a symbol differ or leave its range."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, positions in axes.items():
        for position, axis in positions.items():
            size = shapes[name][position]
            known, where = sizes.setdefault(axis.symbol, (size, name))
            if known != size:
                raise UsageError(
                    f"`{axis.symbol}` is {known} in input `{where}` and {size} in input `{name}`",
                    hint="equal symbols are equal sizes: change `--input`, or give one of them another name",
                )
            if not axis.contains(size):
                raise UsageError(
                    f"`{axis.symbol}` is {size} in the example input `{name}`, outside `{axis}`",
                    hint="give an example inside the range, or widen the range",
                )
    return {symbol: size for symbol, (size, _) in sizes.items()}


def alternate_size(axis: Axis, size: int, *, avoid: Iterable[int] = ()) -> int | None:
    """A second size of the symbol, divisible like the first; None if the range has no other.

    Network strides divide sizes, so the step is the largest power of two that divides the first size, unless the range
    sets one.
    """
    step = axis.step if axis.step > 1 else size & -size
    taken = {size, *avoid}
    for made in (size + step, size - step, size + 2 * step, size + 1, size - 1, axis.low, axis.high or 0):
        if made > 0 and made not in taken and axis.contains(made):
            return made
    return None


def size_variants(axes: Axes, sizes: Mapping[str, int]) -> list[tuple[dict[str, int], tuple[str, ...]]]:
    """Size sets to compare at, each with the changed symbols: as exported, each symbol alone, all together.

    At least three sets if any symbol can change.
    """
    symbols = symbols_of(axes)
    moved = {name: alternate_size(axis, sizes[name]) for name, axis in symbols.items()}
    moved = {name: size for name, size in moved.items() if size is not None}
    found: list[tuple[dict[str, int], tuple[str, ...]]] = [(dict(sizes), ())]
    found += [({**sizes, name: size}, (name,)) for name, size in moved.items() if size is not None]
    lowest = {name: symbols[name].low for name in moved if symbols[name].low == 1 and name == next(iter(moved))}
    last: dict[str, int] = {}
    for name, size in moved.items():
        assert size is not None
        third = lowest.get(name) if name in lowest and lowest[name] != sizes[name] else None
        third = third or alternate_size(symbols[name], sizes[name], avoid=(size,)) or size
        last[name] = third
    together = {**sizes, **last}
    if last and all(together != made for made, _ in found):
        found.append((together, tuple(last)))
    return found


def shapes_at(axes: Axes, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, Shape]:
    """The shapes with these symbol sizes."""
    return {
        name: tuple(
            sizes[axes[name][at].symbol] if name in axes and at in axes[name] else size for at, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    }
