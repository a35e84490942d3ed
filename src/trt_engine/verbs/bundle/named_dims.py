"""Resolves named dimensions to the profile of each component: ranges from the command line, the file and the RNNT-TDT
defaults, static sizes from the model's signature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trt_engine.config.profiles import Profile, ShapeRange, parse_profile
from trt_engine.errors import ProfileError, ShapeError, UsageError
from trt_engine.model import Model
from trt_engine.tensors import Signature, TensorSpec, format_shape, suggest
from trt_engine.verbs.bundle.model_meta import ComponentMeta, ModelMeta, Range

RNNT_DEFAULTS: dict[str, Range] = {"B": (1, 1, 1), "T": (16, 64, 256), "U": (1, 1, 8)}
"""Default ranges of an RNNT-TDT: batch, encoder frames, tokens (source: an earlier engine builder based on trtexec)."""
_MAX_SIZE = (1 << 31) - 1
_MAX_VALUES = (1 << 60) - 1
"""Maximum elements of a tensor, so that its bytes fit a signed 64-bit integer."""
PartialRange = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Overrides:
    """Dimensions and profiles from the command line."""

    dims: dict[str, PartialRange] = field(default_factory=dict)
    """By dimension (`T`) or component and dimension (`joint.T`); None keeps the other source's value."""
    profiles: dict[str, Profile] = field(default_factory=dict)
    """Shape ranges of inputs by component."""

    @classmethod
    def parse(cls, dims: Iterable[str] | Mapping[str, object] = (), profiles: Iterable[str] = ()) -> Overrides:
        """Parse `T=16:64:512`, `joint.T=::512` and `encoder:audio_signal:1x128x16,1x128x64,1x128x512`."""
        pairs = dims.items() if isinstance(dims, Mapping) else [_split_dim(item) for item in dims]
        found: dict[str, PartialRange] = {}
        for name, value in pairs:
            now = _parse_range(name, value)
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

    def to_argv(self) -> list[str]:
        """As command line arguments."""
        made = []
        for name, sizes in self.dims.items():
            made += ["--dim", f"{name}={':'.join('' if size is None else str(size) for size in sizes)}"]
        for component, profile in self.profiles.items():
            made += ["--profile", f"{component}:{profile}"]
        return made


def _split_dim(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"cannot read the dimension `{text}`", hint="write it as `--dim T=16:64:256` (min:opt:max)")
    return name.strip(), value


def _parse_range(name: str, value: object) -> PartialRange:
    """Parse `16:64:256`, `64`, `::512`, or the same as numbers."""
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
    if any(size is not None and not 0 <= size <= _MAX_SIZE for size in sizes):
        raise ProfileError(
            f"the range `{value}` of `{name}` has a size below 0 or above {_MAX_SIZE}", hint=f"`--dim {name}=16:64:256`"
        )
    return sizes[0], sizes[1], sizes[2]


@dataclass(frozen=True, slots=True)
class ResolvedDims:
    """The profile of one component, and the positions of its named dimensions."""

    profile: Profile
    dim_positions: dict[str, tuple[str, int]]
    """By dimension: an input and the axis."""
    fills: dict[str, int | tuple[str, int]]
    """Inputs not filled at random in a smoke run: a number, or the input and axis whose size to use."""
    warnings: tuple[str, ...] = ()


def resolve(meta: ModelMeta, models: Mapping[str, Model], overrides: Overrides) -> dict[str, ResolvedDims]:
    """Resolve the profile of every component.

    Raises `ModelError` if the file contradicts a model, `ShapeError` for a missing size, `UsageError` for an override
    without a match.
    """
    components = {item.name: item for item in meta.components}
    for name in overrides.profiles:
        if name not in components:
            raise UsageError(f"no component `{name}`", hint=suggest(name, list(components)))
    work = {
        name: _ComponentResolver(meta, item, models[name].signature, overrides) for name, item in components.items()
    }
    found = {name: item.resolve() for name, item in work.items()}
    met = {name for item in work.values() for name in item.used_overrides}
    for name in overrides.dims:
        if name not in met:
            known = {dim for item in work.values() for dim in item.dim_names}
            known |= {f"{item.component.name}.{dim}" for item in work.values() for dim in item.dim_names}
            raise UsageError(f"no model has a dynamic dimension `{name}`", hint=suggest(name, sorted(known)))
    return found


class _ComponentResolver:
    """Resolves the profile of one component."""

    def __init__(self, meta: ModelMeta, component: ComponentMeta, signature: Signature, overrides: Overrides) -> None:
        self.meta, self.component, self.signature, self.overrides = meta, component, signature, overrides
        self.used_overrides: set[str] = set()
        """Dimension overrides that matched."""
        self.dim_names: set[str] = set()
        self.dim_positions: dict[str, tuple[str, int]] = {}
        self.warnings: list[str] = []
        where = next(
            (place for place in (f"components.{component.name}",) if place in meta.positions.lines), "components"
        )
        self.json_path = where

    def resolve(self) -> ResolvedDims:
        self._check_names()
        ranges = {spec.name: self._input_range(spec) for spec in self.signature.inputs}
        for name, span in ranges.items():
            if math.prod(span.max) > _MAX_VALUES:
                raise ProfileError(
                    f"input `{name}` of `{self.component.name}` is too large: {format_shape(span.max)} values",
                    hint="use a narrower range, as `--dim T=16:64:256`",
                )
        return ResolvedDims(Profile(ranges), self.dim_positions, self._resolve_fills(), tuple(self.warnings))

    def _check_names(self) -> None:
        for side, specs, declared in (
            ("input", self.signature.inputs, self.component.inputs),
            ("output", self.signature.outputs, self.component.outputs),
        ):
            known = {spec.name: spec for spec in specs}
            for name, dims in declared.items():
                place = f"{self.json_path}.{side}s.{name}"
                if name not in known:
                    raise self.meta.error(
                        place, f"`{self.component.file}` has no {side} `{name}`", suggest(name, list(known))
                    )
                self._check_dims(known[name], dims, place, side)
        inputs = {spec.name: spec for spec in self.signature.inputs}
        for name, value in self.component.fills.items():
            place = f"{self.json_path}.inputs.{name}"
            if name not in inputs:
                raise self.meta.error(
                    place, f"`{self.component.file}` has no input `{name}`", suggest(name, list(inputs))
                )
            if isinstance(value, int) and not _fits_dtype(inputs[name].dtype, value):
                raise self.meta.error(
                    f"{place}.fill",
                    f"{value} is not a valid {inputs[name].dtype}",
                    "give a number of the input's dtype, or a dimension",
                )
        mels = self.meta.n_mels
        if (
            self.meta.is_rnnt
            and self.component.name == "encoder"
            and mels is not None
            and (
                spec := next(
                    (one for one in self.signature.inputs if len(one.shape) == 3 and "float" in one.dtype), None
                )
            )
        ):
            fixed = [size for size in spec.shape[1:] if size >= 0]
            if fixed and mels not in fixed:
                raise self.meta.error(
                    "features.n_mels",
                    f"it is {mels}, but input `{spec.name}` of `{self.component.file}` is {spec.format_symbolic()}",
                    "meta and ONNX file are from different exports: export both again",
                )
        for name in self.overrides.profiles.get(self.component.name, Profile({})).ranges:
            self.signature.input(name)

    def _check_dims(self, spec: TensorSpec, dims: tuple[int | str | None, ...], json_path: str, side: str) -> None:
        again = "correct it, or export the file and the ONNX again together"
        if len(dims) != len(spec.shape):
            raise self.meta.error(
                json_path,
                f"it has {len(dims)} dimensions, but {side} `{spec.name}` of `{self.component.file}` is "
                f"{spec.format_symbolic()}",
                again,
            )
        for position, (said, size) in enumerate(zip(dims, spec.shape, strict=True)):
            if isinstance(said, int) and size >= 0 and said != size:
                raise self.meta.error(
                    f"{json_path}[{position}]",
                    f"it is {said}, but {side} `{spec.name}` of `{self.component.file}` is {spec.format_symbolic()}: "
                    f"dimension {position} is fixed at {size}",
                    again,
                )
            if isinstance(said, str) and size >= 0 and side == "input":
                given = self._named_range((said,), defaults=False)
                if given is not None and not given[0] <= size <= given[2]:
                    raise self.meta.error(
                        f"{json_path}[{position}]",
                        f"the range of `{said}` is {given[0]} to {given[2]}, but dimension {position} of `{spec.name}` is "
                        f"fixed at {size} in `{self.component.file}`",
                        f"`--dim {said}={size}`, or export the model with a dynamic dimension",
                    )

    def _input_range(self, spec: TensorSpec) -> ShapeRange:
        whole = self.overrides.profiles.get(self.component.name, Profile({})).ranges.get(spec.name)
        spans: list[Range] = []
        for position, size in enumerate(spec.shape):
            names = self._names_of_dim(spec, position)
            for name in names:
                self.dim_positions.setdefault(name, (spec.name, position))
            if size >= 0:
                spans.append((size, size, size))
                continue
            self.dim_names |= set(names)
            said = self.component.inputs.get(spec.name, (None,) * len(spec.shape))[position]
            if whole is not None:
                spans.append((0, 0, 0))
                continue
            spans.append((said, said, said) if isinstance(said, int) else self._dim_range(spec, position, names))
        if whole is not None:
            self._check_fit(spec, whole)
            self.used_overrides |= {name for name in self.overrides.dims if name.rpartition(".")[2] in self.dim_names}
            return whole
        low, best, high = (tuple(span[which] for span in spans) for which in range(3))
        return ShapeRange(low, best, high)

    def _check_fit(self, spec: TensorSpec, span: ShapeRange) -> None:
        for shape in span.shapes:
            if len(shape) != len(spec.shape) or any(
                want >= 0 and want != got for got, want in zip(shape, spec.shape, strict=True)
            ):
                raise ShapeError(
                    f"the profile {format_shape(shape)} does not match input `{spec.name}` of `{self.component.name}`, "
                    f"which is {spec.format_symbolic()}",
                    hint=f"`--profile {self.component.name}:{spec.name}:MIN,OPT,MAX` with its rank and fixed sizes",
                )

    def _names_of_dim(self, spec: TensorSpec, position: int) -> tuple[str, ...]:
        """Names of a dimension: from the file, the model, and its role in an RNNT-TDT."""
        said = self.component.inputs.get(spec.name, (None,) * len(spec.shape))[position]
        symbol = spec.symbols[position] if spec.symbols else None
        role = self._rnnt_dim(spec, position) if said is None and self.meta.is_rnnt else None
        return tuple(dict.fromkeys(name for name in (said, symbol, role) if isinstance(name, str)))

    def _rnnt_dim(self, spec: TensorSpec, position: int) -> str | None:
        """B, T or U by axis: `audio_signal` is `[B, mels, T]`, `y` is `[B, U]`, `h` and `c` are `[L, B, H]`."""
        rank = len(spec.shape)
        name = self.component.name
        if rank == 1 or (position == 0 and not (name == "predictor" and rank == 3)):
            return "B"
        if name == "predictor":
            return {2: {1: "U"}, 3: {1: "B"}}.get(rank, {}).get(position)
        if rank != 3:
            return None
        last = 2 if spec.shape[2] < 0 or spec.shape[1] >= 0 else 1  # the dynamic one: [B, D, T] or [B, T, D]
        if position != last:
            return None
        floats = [item.name for item in self.signature.inputs if len(item.shape) == 3]
        if name == "encoder":
            return "T"
        encoded = next((name for name in floats if "enc" in name.lower()), floats[0])  # the joint's encoder output
        return "T" if spec.name == encoded else "U"

    def _named_range(self, names: tuple[str, ...], *, defaults: bool = True) -> Range | None:
        """Range of a dimension by its names; priority: command line, component, file, defaults."""
        levels = [
            self.component.dimensions,
            self.meta.dimensions,
            RNNT_DEFAULTS if defaults and self.meta.is_rnnt else {},
        ]
        base = next((level[name] for level in levels for name in names if name in level), None)
        sizes: list[int | None] = list(base or (None, None, None))
        typed = None
        for key in (*names, *(f"{self.component.name}.{name}" for name in names)):  # component overrides last
            if key in self.overrides.dims:
                self.used_overrides.add(key)
                typed = key
                sizes = [
                    new if new is not None else old for new, old in zip(self.overrides.dims[key], sizes, strict=True)
                ]
        if typed is None:
            return base
        low, best, high = sizes
        if low is None or best is None or high is None:
            raise ProfileError(
                f"`--dim {typed}` gives a partial range without a default for the rest",
                hint=f"give all three, as `--dim {typed}=1:8:64`",
            )
        if not low <= best <= high:
            ordered = _ordered_range(
                (low, best, high), [size for size in self.overrides.dims[typed] if size is not None]
            )
            raise ProfileError(
                f"the range {low}:{best}:{high} of `{typed}` is not min <= opt <= max",
                hint=f"give all three: `--dim {typed}={':'.join(map(str, ordered))}`",
            )
        return low, best, high

    def _dim_range(self, spec: TensorSpec, position: int, names: tuple[str, ...]) -> Range:
        if (found := self._named_range(names)) is not None:
            return found
        firsts = {name for item in self.signature.inputs if item.shape for name in self._names_of_dim(item, 0)}
        if position == 0 or firsts & set(names):  # the batch, on any axis
            return (1, 1, 1)
        called = f"`{names[0]}`" if names else f"{position}"
        example = format_shape([size if size >= 0 else 1 for size in spec.shape])
        raise ShapeError(
            f"input `{spec.name}` of `{self.component.name}` is {spec.format_symbolic()}: dimension {called} has no range",
            hint=f"`--dim {names[0]}=1:8:64`, or `dimensions` in `{self.meta.path.name}`"
            if names
            else f"`--profile {self.component.name}:{spec.name}:{example}`, or name it in `{self.meta.path.name}`",
        )

    def _resolve_fills(self) -> dict[str, int | tuple[str, int]]:
        fills: dict[str, int | tuple[str, int]] = {}
        for name, value in self.component.fills.items():
            if isinstance(value, str) and value not in self.dim_positions:
                raise self.meta.error(
                    f"{self.json_path}.inputs.{name}.fill",
                    f"`{self.component.file}` has no dimension `{value}`",
                    suggest(value, sorted(self.dim_positions)),
                )
            fills[name] = self.dim_positions[value] if isinstance(value, str) else value
        if self.meta.is_rnnt:  # lengths: full size
            for spec in self.signature.inputs:
                dim = {"encoder": "T", "predictor": "U"}.get(self.component.name)
                if len(spec.shape) < 2 and "int" in spec.dtype and "len" in spec.name and dim in self.dim_positions:
                    fills.setdefault(spec.name, self.dim_positions[dim])
        return fills


def _fits_dtype(dtype: str, value: int) -> bool:
    """Whether the value is representable in the dtype."""
    if dtype == "bool":
        return value in (0, 1)
    signed, bits = not dtype.startswith("u"), dtype.lstrip("uint")
    if "float" in dtype or not bits.isdigit():
        return abs(value) < 1 << 53
    low, high = (-(1 << int(bits) - 1), (1 << int(bits) - 1) - 1) if signed else (0, (1 << int(bits)) - 1)
    return low <= value <= high


def _ordered_range(span: Range, given_sizes: list[int]) -> list[int]:
    """A valid min <= opt <= max that keeps the sizes in `given_sizes`."""
    if len(given_sizes) == 3:
        return sorted(given_sizes)
    low, best, high = min(span[0], *given_sizes), span[1], max(span[2], *given_sizes)
    return [low, min(max(best, low), high), high]
