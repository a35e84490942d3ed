"""From named dimensions to the profile of each component: ranges from the command line, the file and the RNNT-TDT defaults,
fixed sizes from the model's own signature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trt_engine.bundling.meta import ComponentMeta, Meta, Range
from trt_engine.config import Profile, ShapeRange, parse_profile
from trt_engine.errors import ProfileError, ShapeError, UsageError
from trt_engine.model import Model
from trt_engine.tensors import Signature, TensorSpec, closest, format_shape

__all__ = ["DEFAULTS", "Overrides", "Resolved", "resolve"]

DEFAULTS: dict[str, Range] = {"B": (1, 1, 1), "T": (16, 64, 256), "U": (1, 1, 8)}
"""Of an RNNT-TDT: batch, encoder frames, tokens (source: the trtexec-driven engine builder this verb takes over)."""

_LARGEST = (1 << 31) - 1
_MOST = (1 << 60) - 1
"""Values in one tensor whose bytes a signed 64-bit number still counts."""
Partial = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says about sizes."""

    dims: dict[str, Partial] = field(default_factory=dict)
    """By dimension (`T`) or by component and dimension (`joint.T`); None keeps what was there."""
    profiles: dict[str, Profile] = field(default_factory=dict)
    """Whole ranges of inputs by component."""

    @classmethod
    def parse(cls, dims: Iterable[str] | Mapping[str, object] = (), profiles: Iterable[str] = ()) -> Overrides:
        """From `T=16:64:512`, `joint.T=::512` and `encoder:audio_signal:1x128x16,1x128x64,1x128x512`."""
        pairs = dims.items() if isinstance(dims, Mapping) else [_parted(item) for item in dims]
        found: dict[str, Partial] = {}
        for name, value in pairs:
            now = _partial(name, value)
            before = found.get(name, (None, None, None))
            both = [new if new is not None else old for new, old in zip(now, before, strict=True)]
            found[name] = both[0], both[1], both[2]
        whole: dict[str, Profile] = {}
        for text in [profiles] if isinstance(profiles, str) else profiles:
            component, colon, rest = text.partition(":")
            if not colon or not component or ":" not in rest:
                raise UsageError(
                    f"cannot read the profile `{text}`",
                    hint="write it as `--profile encoder:audio_signal:1x128x16,1x128x64,1x128x256`",
                )
            before_ = whole.get(component, Profile({})).ranges
            made = parse_profile(rest).ranges
            if both_ := sorted(set(before_) & set(made)):
                raise UsageError(f"`{component}` has two profiles for `{both_[0]}`", hint="give one of them")
            whole[component] = Profile(before_ | made)
        return cls(found, whole)

    def words(self) -> list[str]:
        """As the command line has them."""
        made = []
        for name, sizes in self.dims.items():
            made += ["--dim", f"{name}={':'.join('' if size is None else str(size) for size in sizes)}"]
        for component, profile in self.profiles.items():
            made += ["--profile", f"{component}:{profile}"]
        return made


def _parted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"cannot read the dimension `{text}`", hint="write it as `--dim T=16:64:256` (min:opt:max)")
    return name.strip(), value


def _partial(name: str, value: object) -> Partial:
    """`16:64:256`, `64`, `::512`, or the same as numbers."""
    parts: list[object]
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(":")]
    else:
        parts = list(value) if isinstance(value, list | tuple) else [value]
    sizes: list[int | None] = []
    for part in parts:
        if part in ("", None):
            sizes.append(None)
        elif isinstance(part, int) and not isinstance(part, bool):
            sizes.append(part)
        elif isinstance(part, str) and part.isascii() and part.isdigit() and len(part) <= 12:
            sizes.append(int(part))
        else:
            sizes = []
            break
    if len(sizes) == 1 and sizes[0] is not None:
        sizes *= 3
    if len(sizes) != 3 or all(size is None for size in sizes):
        raise UsageError(f"cannot read the range `{value}` of `{name}`", hint=f"`--dim {name}=16:64:256` (min:opt:max)")
    if any(size is not None and not 0 <= size <= _LARGEST for size in sizes):
        raise ProfileError(f"the range `{value}` of `{name}` has a size out of reach", hint=f"`--dim {name}=16:64:256`")
    return sizes[0], sizes[1], sizes[2]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The profile of one component, and where its named dimensions lie."""

    profile: Profile
    places: dict[str, tuple[str, int]]
    """By dimension: an input and the position in its shape."""
    fills: dict[str, int | tuple[str, int]]
    """Inputs a smoke run does not fill at random: with a number, or with the size of another input's dimension."""
    warnings: tuple[str, ...] = ()


def resolve(meta: Meta, models: Mapping[str, Model], overrides: Overrides) -> dict[str, Resolved]:
    """The profile of every component.

    Raises `ModelError` where the file contradicts a model, `ShapeError` for a size nobody gave, `UsageError` for an override
    that meets nothing.
    """
    components = {item.name: item for item in meta.components}
    for name in overrides.profiles:
        if name not in components:
            raise UsageError(f"there is no component `{name}`", hint=closest(name, list(components)))
    work = {name: _Component(meta, item, models[name].signature, overrides) for name, item in components.items()}
    found = {name: item.resolved() for name, item in work.items()}
    met = {name for item in work.values() for name in item.met}
    for name in overrides.dims:
        if name not in met:
            known = {dim for item in work.values() for dim in item.names}
            known |= {f"{item.component.name}.{dim}" for item in work.values() for dim in item.names}
            raise UsageError(f"no model has a dynamic dimension `{name}`", hint=closest(name, sorted(known)))
    return found


class _Component:
    """One component on its way to a profile."""

    def __init__(self, meta: Meta, component: ComponentMeta, signature: Signature, overrides: Overrides) -> None:
        self.meta, self.component, self.signature, self.overrides = meta, component, signature, overrides
        self.met: set[str] = set()
        """Overrides of dimensions that were of use."""
        self.names: set[str] = set()
        self.places: dict[str, tuple[str, int]] = {}
        self.warnings: list[str] = []
        where = next((place for place in (f"components.{component.name}",) if place in meta.places.lines), "components")
        self.where = where

    def resolved(self) -> Resolved:
        self._check_names()
        ranges = {spec.name: self._range(spec) for spec in self.signature.inputs}
        for name, span in ranges.items():
            if math.prod(span.max) > _MOST:
                raise ProfileError(
                    f"input `{name}` of `{self.component.name}` would have {format_shape(span.max)} values: no tensor has",
                    hint="a narrower range, as `--dim T=16:64:256`",
                )
        return Resolved(Profile(ranges), self.places, self._fills(), tuple(self.warnings))

    def _check_names(self) -> None:
        for side, specs, declared in (
            ("input", self.signature.inputs, self.component.inputs),
            ("output", self.signature.outputs, self.component.outputs),
        ):
            known = {spec.name: spec for spec in specs}
            for name, dims in declared.items():
                place = f"{self.where}.{side}s.{name}"
                if name not in known:
                    raise self.meta.error(
                        place, f"`{self.component.file}` has no {side} `{name}`", closest(name, list(known))
                    )
                self._check_dims(known[name], dims, place, side)
        inputs = {spec.name: spec for spec in self.signature.inputs}
        for name, value in self.component.fills.items():
            place = f"{self.where}.inputs.{name}"
            if name not in inputs:
                raise self.meta.error(
                    place, f"`{self.component.file}` has no input `{name}`", closest(name, list(inputs))
                )
            if isinstance(value, int) and not _holds(inputs[name].dtype, value):
                raise self.meta.error(
                    f"{place}.fill",
                    f"no {inputs[name].dtype} is {value}",
                    "a number of the input's type, or a dimension",
                )
        mels = self.meta.mels
        if self.meta.rnnt and self.component.name == "encoder" and mels is not None and (spec := self._audio()):
            fixed = [size for size in spec.shape[1:] if size >= 0]
            if fixed and mels not in fixed:
                raise self.meta.error(
                    "features.n_mels",
                    f"it is {mels}, and input `{spec.name}` of `{self.component.file}` is {spec.describe()}",
                    "meta and ONNX are of different exports: export both again",
                )
        for name in self.overrides.profiles.get(self.component.name, Profile({})).ranges:
            self.signature.input(name)

    def _check_dims(self, spec: TensorSpec, dims: tuple[int | str | None, ...], place: str, side: str) -> None:
        again = "correct it, or export the file and the ONNX again together"
        if len(dims) != len(spec.shape):
            raise self.meta.error(
                place,
                f"it has {len(dims)} dimensions, and {side} `{spec.name}` of `{self.component.file}` is "
                f"{spec.describe()}",
                again,
            )
        for position, (said, size) in enumerate(zip(dims, spec.shape, strict=True)):
            if isinstance(said, int) and size >= 0 and said != size:
                raise self.meta.error(
                    f"{place}[{position}]",
                    f"it is {said}, and {side} `{spec.name}` of `{self.component.file}` is {spec.describe()}: "
                    f"dimension {position} is fixed at {size}",
                    again,
                )
            if isinstance(said, str) and size >= 0 and side == "input":
                given = self._given((said,), defaults=False)
                if given is not None and not given[0] <= size <= given[2]:
                    raise self.meta.error(
                        f"{place}[{position}]",
                        f"`{said}` goes from {given[0]} to {given[2]}, and dimension {position} of `{spec.name}` is "
                        f"fixed at {size} in `{self.component.file}`",
                        f"`--dim {said}={size}`, or export the model with that dimension open",
                    )

    def _audio(self) -> TensorSpec | None:
        return next((spec for spec in self.signature.inputs if len(spec.shape) == 3 and "float" in spec.dtype), None)

    def _range(self, spec: TensorSpec) -> ShapeRange:
        whole = self.overrides.profiles.get(self.component.name, Profile({})).ranges.get(spec.name)
        spans: list[Range] = []
        for position, size in enumerate(spec.shape):
            names = self._names(spec, position)
            for name in names:
                self.places.setdefault(name, (spec.name, position))
            if size >= 0:
                spans.append((size, size, size))
                continue
            self.names |= set(names)
            said = self.component.inputs.get(spec.name, (None,) * len(spec.shape))[position]
            if whole is not None:
                spans.append((0, 0, 0))
                continue
            spans.append((said, said, said) if isinstance(said, int) else self._span(spec, position, names))
        if whole is not None:
            self._must_fit(spec, whole)
            self.met |= {name for name in self.overrides.dims if name.rpartition(".")[2] in self.names}
            return whole
        low, best, high = (tuple(span[which] for span in spans) for which in range(3))
        return ShapeRange(low, best, high)

    def _must_fit(self, spec: TensorSpec, span: ShapeRange) -> None:
        for shape in span.shapes:
            if len(shape) != len(spec.shape) or any(
                want >= 0 and want != got for got, want in zip(shape, spec.shape, strict=True)
            ):
                raise ShapeError(
                    f"the profile {format_shape(shape)} does not fit input `{spec.name}` of `{self.component.name}`, "
                    f"which is {spec.describe()}",
                    hint=f"`--profile {self.component.name}:{spec.name}:MIN,OPT,MAX` with its rank and fixed sizes",
                )

    def _names(self, spec: TensorSpec, position: int) -> tuple[str, ...]:
        """What a dimension is called: by the file, in the model, by its place in an RNNT-TDT."""
        said = self.component.inputs.get(spec.name, (None,) * len(spec.shape))[position]
        symbol = spec.symbols[position] if spec.symbols else None
        role = self._role(spec, position) if said is None and self.meta.rnnt else None
        return tuple(dict.fromkeys(name for name in (said, symbol, role) if isinstance(name, str)))

    def _role(self, spec: TensorSpec, position: int) -> str | None:
        """B, T or U by position: `audio_signal` is B x mels x T, `y` is B x U, `h` and `c` are L x B x H."""
        rank = len(spec.shape)
        name = self.component.name
        if rank == 1 or (position == 0 and not (name == "predictor" and rank == 3)):
            return "B"
        if name == "predictor":
            return {2: {1: "U"}, 3: {1: "B"}}.get(rank, {}).get(position)
        if rank != 3:
            return None
        last = 2 if spec.shape[2] < 0 or spec.shape[1] >= 0 else 1  # the one that moves: B x D x T, or B x T x D
        if position != last:
            return None
        floats = [item.name for item in self.signature.inputs if len(item.shape) == 3]
        if name == "encoder":
            return "T"
        return "T" if spec.name == _encoder_side(floats) else "U"

    def _given(self, names: tuple[str, ...], *, defaults: bool = True) -> Range | None:
        """The range of a dimension by any of its names: the command line over the component over the file over defaults."""
        levels = [self.component.dimensions, self.meta.dimensions, DEFAULTS if defaults and self.meta.rnnt else {}]
        base = next((level[name] for level in levels for name in names if name in level), None)
        sizes: list[int | None] = list(base or (None, None, None))
        typed = None
        for key in (*names, *(f"{self.component.name}.{name}" for name in names)):  # what is meant for one comes last
            if key in self.overrides.dims:
                self.met.add(key)
                typed = key
                sizes = [
                    new if new is not None else old for new, old in zip(self.overrides.dims[key], sizes, strict=True)
                ]
        if typed is None:
            return base
        low, best, high = sizes
        if low is None or best is None or high is None:
            raise ProfileError(
                f"`--dim {typed}` leaves a part of its range open, and nothing else says it",
                hint=f"give all three, as `--dim {typed}=1:8:64`",
            )
        if not low <= best <= high:
            ordered = _in_order((low, best, high), [size for size in self.overrides.dims[typed] if size is not None])
            raise ProfileError(
                f"the range {low}:{best}:{high} of `{typed}` is not min <= opt <= max",
                hint=f"give all three: `--dim {typed}={':'.join(map(str, ordered))}`",
            )
        return low, best, high

    def _span(self, spec: TensorSpec, position: int, names: tuple[str, ...]) -> Range:
        if (found := self._given(names)) is not None:
            return found
        firsts = {name for item in self.signature.inputs if item.shape for name in self._names(item, 0)}
        if position == 0 or firsts & set(names):  # the batch, wherever it stands
            return (1, 1, 1)
        called = f"`{names[0]}`" if names else f"{position}"
        example = format_shape([size if size >= 0 else 1 for size in spec.shape])
        raise ShapeError(
            f"input `{spec.name}` of `{self.component.name}` is {spec.describe()}: dimension {called} must be given",
            hint=f"`--dim {names[0]}=1:8:64`, or `dimensions` in `{self.meta.path.name}`"
            if names
            else f"`--profile {self.component.name}:{spec.name}:{example}`, or name it in `{self.meta.path.name}`",
        )

    def _fills(self) -> dict[str, int | tuple[str, int]]:
        fills: dict[str, int | tuple[str, int]] = {}
        for name, value in self.component.fills.items():
            if isinstance(value, str) and value not in self.places:
                raise self.meta.error(
                    f"{self.where}.inputs.{name}.fill",
                    f"`{self.component.file}` has no dimension `{value}`",
                    closest(value, sorted(self.places)),
                )
            fills[name] = self.places[value] if isinstance(value, str) else value
        if self.meta.rnnt:  # lengths: all frames and all tokens are there
            for spec in self.signature.inputs:
                dim = {"encoder": "T", "predictor": "U"}.get(self.component.name)
                if len(spec.shape) < 2 and "int" in spec.dtype and "len" in spec.name and dim in self.places:
                    fills.setdefault(spec.name, self.places[dim])
        return fills


def _holds(dtype: str, value: int) -> bool:
    """Whether a number of the type can be the value."""
    if dtype == "bool":
        return value in (0, 1)
    signed, bits = not dtype.startswith("u"), dtype.lstrip("uint")
    if "float" in dtype or not bits.isdigit():
        return abs(value) < 1 << 53
    low, high = (-(1 << int(bits) - 1), (1 << int(bits) - 1) - 1) if signed else (0, (1 << int(bits)) - 1)
    return low <= value <= high


def _in_order(span: Range, typed: list[int]) -> list[int]:
    """min <= opt <= max of a range that is not: what was typed stays, the rest gives way to it."""
    if len(typed) == 3:
        return sorted(typed)
    low, best, high = min(span[0], *typed), span[1], max(span[2], *typed)
    return [low, min(max(best, low), high), high]


def _encoder_side(names: list[str]) -> str | None:
    """Which of the joint's inputs is the encoder's: by its name, else the first."""
    return next((name for name in names if "enc" in name.lower()), names[0] if names else None)
