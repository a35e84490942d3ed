"""Optimization profiles: min, opt and max shapes of each input, and their check against a signature."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.config.parse import as_shape, parse_shape, shapes_by_name
from trt_engine.errors import FeedError, ProfileError, ShapeError, UsageError
from trt_engine.tensors import Shape, Signature, TensorSpec, format_shape, suggest


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Smallest, usual and largest shape of one input."""

    min: Shape
    """Smallest shape."""
    opt: Shape
    """The shape that the engine is tuned for."""
    max: Shape
    """Largest shape."""

    def __post_init__(self) -> None:
        text = ",".join(map(format_shape, (self.min, self.opt, self.max)))
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ProfileError(f"the shapes {text} differ in rank", hint="min, opt and max need the same rank")
        for position, (low, best, high) in enumerate(zip(self.min, self.opt, self.max, strict=True)):
            if low < 0:
                raise ProfileError(f"the shapes {text} have the size {low}", hint="a profile needs sizes of 0 or more")
            if not low <= best <= high:
                raise ProfileError(
                    f"the shapes {text} are not min <= opt <= max: dimension {position} is {low}, {best}, {high}",
                    hint="order them: smallest, usual, largest",
                )

    def contains(self, shape: Sequence[int]) -> bool:
        """True when every dimension is between min and max."""
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        return self.min, self.opt, self.max

    def __str__(self) -> str:
        return ",".join(map(format_shape, self.shapes))


@dataclass(frozen=True, slots=True)
class Profile:
    """The range of shapes an engine is built for, by input."""

    ranges: dict[str, ShapeRange]
    """By input."""

    def check(self, feeds: Mapping[str, Any], index: int = 0) -> None:
        """`ProfileError` when a feed's shape is outside."""
        for name, span in self.ranges.items():
            shape = tuple(feeds[name].shape)
            if not span.contains(shape):
                raise out_of_range_error(name, span, shape, index)

    def __str__(self) -> str:
        return " ".join(f"{quote_name(name)}:{span}" for name, span in self.ranges.items())


def select_profile(profiles: Sequence[Profile], check: Callable[[Profile, int], object]) -> int:
    """Index of the first profile that `check` accepts; the first one's `ProfileError` if none does."""
    refused: ProfileError | None = None
    for index, profile in enumerate(profiles):
        try:
            check(profile, index)
        except ProfileError as error:
            refused = refused or error
        else:
            return index
    if refused is not None:
        raise refused
    return 0


def profile_at(profiles: Sequence[Profile], number: int) -> Profile | None:
    """The profile of that number; None for an engine without profiles, `UsageError` for a number that does not exist."""
    if not 0 <= number < max(len(profiles), 1):
        raise UsageError(f"there is no profile {number}, the engine has {len(profiles)}", hint="profiles count from 0")
    return profiles[number] if profiles else None


def fixed_shapes(profiles: Sequence[Profile]) -> dict[str, Shape]:
    """The size of each input's dimensions that is the same in all profiles; -1 for the others."""
    spans: dict[str, list[Shape]] = {}
    for profile in profiles:
        for name, span in profile.ranges.items():
            spans.setdefault(name, []).extend((span.min, span.max))
    return {
        name: tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True))
        for name, shapes in spans.items()
    }


def check_shapes(
    signature: Signature, shapes: Mapping[str, Shape], profile: Profile | None = None, index: int = 0
) -> None:
    """Check the shapes of a context: one for each input, its rank and fixed sizes, the profile's
    range. `FeedError` or `ProfileError` otherwise."""
    known = [spec.name for spec in signature.inputs]
    for name in shapes:
        if name not in known:
            raise FeedError(f"unknown input `{name}`", hint=suggest(name, known))
    for spec in signature.inputs:
        shape = shapes.get(spec.name)
        if shape is None:
            raise FeedError(f"input `{spec.name}` has no shape", hint=f"expected {spec.format_symbolic()}")
        if len(shape) != len(spec.shape) or any(
            want >= 0 and got != want for got, want in zip(shape, spec.shape, strict=True)
        ):
            raise FeedError(
                f"input `{spec.name}` is {format_shape(shape)}, expected {spec.format_symbolic()}",
                hint="feed the sizes the engine was built for",
            )
        span = profile.ranges.get(spec.name) if profile else None
        if span is not None and not span.contains(shape):
            raise out_of_range_error(spec.name, span, shape, index)


def out_of_range_error(name: str, span: ShapeRange, shape: Shape, index: int) -> ProfileError:
    """The error of a shape that is outside the range of the profile `index`."""
    return ProfileError(
        f"input `{name}` is {format_shape(shape)}, profile {index} spans "
        f"{format_shape(span.min)} to {format_shape(span.max)}",
        hint=_profile_hint(name, span, shape),
    )


def _profile_hint(name: str, span: ShapeRange, shape: Shape) -> str | None:
    """Hint for a shape outside the range; nothing is built for tensors without elements."""
    if len(shape) != len(span.min):
        return None
    if 0 in shape and 0 not in span.min:
        return f"feed `{name}` with {format_shape(span.min)} or more: an engine takes no tensor without elements"
    wider = ShapeRange(tuple(map(min, span.min, shape)), span.opt, tuple(map(max, span.max, shape)))
    return f"rebuild with `--profile {quote_name(name)}:{wider}`"


def quote_name(name: str) -> str:
    """A name as `--profile` and `--shapes` take it."""
    if not re.search(r"[\s,;\[\]()'\"]", name):
        return name
    return f'"{name}"' if "'" in name else f"'{name}'"


def _format_range(name: str, shapes: Any) -> Sequence[Shape]:
    if isinstance(shapes, ShapeRange):
        return shapes.min, shapes.opt, shapes.max
    if isinstance(shapes, str):
        return parse_profile(f"'{name}':{shapes}").ranges[name].shapes
    return [as_shape(name, shape) for shape in shapes]


def parse_profile(text: str | Profile | Mapping[str, Any]) -> Profile:
    """A profile as `images:1x3x640x640,8x3x640x640,64x3x640x640` (min, opt, max); several inputs with blanks or `;`."""
    if isinstance(text, Profile):
        return text
    ranges: dict[str, ShapeRange] = {}
    parts: Iterable[tuple[str, Sequence[Shape]]]
    if isinstance(text, str):
        parts = [(name, [parse_shape(shape, text) for shape in shapes]) for name, shapes in shapes_by_name(text)]
    else:
        parts = [(name, _format_range(name, shapes)) for name, shapes in text.items()]
    for name, shapes in parts:
        if len(shapes) not in (1, 3):
            raise UsageError(
                f"the profile of `{name}` has {len(shapes)} shapes, expected 3 (min, opt, max) or 1",
                hint="write it as `--profile images:1x3x640x640,8x3x640x640,64x3x640x640`",
            )
        if name in ranges:
            raise UsageError(f"input `{name}` is named twice in a profile", hint="one range for each input")
        ranges[name] = ShapeRange(*(shapes if len(shapes) == 3 else [shapes[0]] * 3))
    return Profile(ranges)


def profile_for(
    signature: Signature,
    *,
    batch: tuple[int, int, int] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    ranges: Mapping[str, ShapeRange] | None = None,
    flag: str = "--shapes",
) -> Profile:
    """The profile of a signature whose batch moves through `batch` and whose other dynamic sizes are `shapes`; `ranges` are
    those of some inputs. A dimension with the symbol of a given one moves with it.

    `ShapeError` with the option to add when a dynamic size other than the batch is not given.
    """
    shapes, known = dict(shapes or {}), dict(ranges or {})
    for name in shapes:
        signature.input(name)
    following = [
        signature.following_sizes(
            shapes | {name: span.shapes[end] for name, span in known.items()}, batch=batch is None
        )
        for end in range(3)
    ]
    if batch is not None:
        _check_batch(signature, batch)
    complete = {}
    for spec in signature.inputs:
        if spec.name in known:
            complete[spec.name] = known[spec.name]
            continue
        given, follows = shapes.get(spec.name), [sizes.get(spec.name, {}) for sizes in following]
        if given is not None:
            check_known_shape(spec, given, flag)
        low: list[int] = []
        best: list[int] = []
        high: list[int] = []
        batch_axes = signature.batch_axes(spec)
        missing = [axis for axis in spec.dynamic if axis not in batch_axes and axis not in follows[0] and given is None]
        if missing:
            raise ShapeError(
                f"input `{spec.name}` is {spec.format_symbolic()}: "
                f"dimension {_dimension_names(spec, missing)} must be given",
                hint=shapes_hint(signature, shapes, flag=flag),
            )
        for position, size in enumerate(spec.shape):
            if size >= 0:
                span = (size, size, size)
            elif position in follows[0]:
                span = (follows[0][position], follows[1][position], follows[2][position])
            elif position in batch_axes and batch is not None:
                span = batch
            elif given is not None:
                span = (given[position],) * 3
            else:
                span = (1, 1, 1)
            for sizes, value in zip((low, best, high), span, strict=True):
                sizes.append(value)
        complete[spec.name] = ShapeRange(tuple(low), tuple(best), tuple(high))
    return Profile(complete)


def _check_batch(signature: Signature, batch: tuple[int, int, int]) -> None:
    """`ShapeError` when a batch range was given and no input's first dimension can move to it."""
    firsts = {spec.shape[0]: spec for spec in signature.inputs if spec.shape}
    if any(signature.batch_axes(spec) for spec in signature.inputs):
        return
    if firsts and all(size >= 0 for size in firsts) and any((size,) * 3 != batch for size in firsts):
        size, spec = next(iter(firsts.items()))
        raise ShapeError(
            f"`--batch {':'.join(map(str, batch))}` cannot be built: input `{spec.name}` is {spec.format_symbolic()}, "
            f"its batch is fixed at {size}",
            hint=f"leave `--batch` out (or `--batch {size}`), or export the model with a dynamic batch",
        )


def check_known_shape(spec: TensorSpec, given: Shape, flag: str) -> None:
    if len(given) != len(spec.shape) or any(
        want >= 0 and want != got for got, want in zip(given, spec.shape, strict=False)
    ):
        raise ShapeError(
            f"`{flag} {spec.name}:{format_shape(given)}` does not fit input `{spec.name}`, "
            f"which is {spec.format_symbolic()}",
            hint=f"`{flag} {quote_name(spec.name)}:{format_shape(spec.suggested_shape())}`",
        )
    if any(size < 0 for size in given):
        raise ShapeError(f"`{flag} {spec.name}:{format_shape(given)}` has a negative size", hint="sizes are 0 or more")


def _dimension_names(spec: TensorSpec, positions: Sequence[int]) -> str:
    image = dict(zip(spec.image_axes or (), ("height", "width"), strict=False))
    return " and ".join(
        f"{position} ({image[position]})" if position in image else str(position) for position in positions
    )


def shapes_hint(signature: Signature, given: Mapping[str, Shape], *, batch: int = 1, flag: str = "--shapes") -> str:
    """Hint for inputs with dynamic sizes besides the batch: the `given` shapes, typical ones for the others."""
    inputs = [
        spec for spec in signature.inputs if spec.name in given or set(spec.dynamic) - set(signature.batch_axes(spec))
    ]
    known = {} if signature.batch_symbol is None else {signature.batch_symbol: batch}
    known |= {
        symbol: size
        for spec in inputs
        for symbol, size in zip(spec.symbols, given.get(spec.name, ()), strict=False)
        if symbol is not None
    }
    shapes = {spec.name: given.get(spec.name) or spec.suggested_shape(batch, known) for spec in inputs}
    return f"add `{flag} {format_shapes(shapes)}` with the sizes this model expects"


def format_shapes(shapes: Mapping[str, Shape]) -> str:
    """Shapes as `--shapes` takes them."""
    return ",".join(f"{quote_name(name)}:{format_shape(shape)}" for name, shape in shapes.items())
