"""Settings: one frozen dataclass per verb, one line per setting.

A setting made with `opt` carries its help, its flag and whether it is part of an engine's key; the command
line (`cli/options.py`), the help text and the store read it from there.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_engine.device import parse_device
from trt_engine.errors import FeedError, ProfileError, ShapeError, UsageError
from trt_engine.tensors import Shape, Signature, TensorSpec, closest, format_shape

__all__ = [
    "PRECISIONS",
    "PREPROCESS_PRESETS",
    "QUANT_TARGETS",
    "Batching",
    "BenchConfig",
    "BuildConfig",
    "Profile",
    "QuantizeConfig",
    "RuntimeConfig",
    "Setting",
    "ShapeRange",
    "SizeConfig",
    "check_shapes",
    "first_fitting",
    "opt",
    "parse_batch",
    "parse_duration",
    "parse_options",
    "parse_profile",
    "parse_shapes",
    "parse_size",
    "profile_for",
    "settings",
    "words",
]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp8")
PREPROCESS_PRESETS = ("imagenet", "yolo")
"""Pre-processing by name, wherever `--preprocess` takes a file; `yolo:640` names the size as well."""
QUANT_TARGETS = ("tensorrt", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda", "onnxruntime-tensorrt")
"""The libraries `quantize` places Q/DQ for (`graph/quant_target.py` has their rules)."""


# ------------------------------------------------------------------------------------------------ parsing

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_UNITS = {  # base 2, as trtexec's single letters are; MB spelled out is read the same way, and said in docs/size.md
    "": 1 << 20,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 1 << 30,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 1 << 40,
}


def parse_size(text: str | int) -> int:
    """Bytes of `32GiB`, `32768M`, `512 KiB`; a bare number is MiB, as in trtexec. All units are base 2."""
    if isinstance(text, int) and text >= 0:
        return text << 20
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"cannot read the size `{text}`", hint="write it as `32GiB`, `512M`, `4096K` or `1024B`")
    return int(float(match[1]) * _UNITS[match[2].lower()])


_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|min|m|h|d)?\s*", re.IGNORECASE | re.ASCII)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | float) -> float:
    """Seconds of `200ms`, `0.2s`, `2min`, `30d`; a bare number is seconds."""
    if isinstance(text, int | float):
        if not 0 <= text < math.inf:
            raise UsageError(f"a duration cannot be {text}", hint="write it as `10s` or `200ms`")
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"cannot read the duration `{text}`", hint="write it as `10s`, `200ms` or `2min`")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


_SEPARATOR = re.compile(r"\s*[,;]\s*|\s+")
_SHAPES_HINT = "write shapes as `images:1x3x640x640`, several with commas"


def _sizes(text: str, whole: str) -> Shape:
    """One shape: `1x3x640x640`, `[1,3,640,640]`, `scalar` or nothing."""
    inner = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
    if inner.strip() in ("", "scalar"):
        return ()
    sizes = re.split(r"\s*[,]\s*|\s+" if inner is not text else r"[x*]", inner.strip())
    if not all(re.fullmatch(r"-?[0-9]+", size) for size in sizes):
        raise UsageError(f"cannot read the shape in `{whole}`", hint=_SHAPES_HINT)
    return tuple(map(int, sizes))


def _pieces(text: str) -> list[str]:
    """The text parted at commas, semicolons and blanks that stand outside quotes and brackets."""
    pieces, start, position, quote, depth = [], 0, 0, "", 0
    while position < len(text):
        letter = text[position]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and position == start:  # a quote elsewhere is part of a name
            quote = letter
        elif letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif not depth and (gap := _SEPARATOR.match(text, position)):
            pieces.append(text[start:position])
            start = position = gap.end()
            continue
        position += 1
    return [*pieces, text[start:]]


def _by_name(text: str) -> list[tuple[str, list[str]]]:
    """Input names with the shapes that follow each: `a:1x3,8x3 'Input:0':4` as `a` with two and `Input:0` with one.

    The last colon parts name and shape, because names have colons and shapes have none.
    """
    found: list[tuple[str, list[str]]] = []
    for piece in _pieces(text.strip()):
        name, colon, shape = piece.rpartition(":")
        if colon:
            name = name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "'\"" else name
            if not name:
                raise UsageError(f"cannot read the shape `{piece}`: no input name", hint=_SHAPES_HINT)
            found.append((name, [shape]))
        elif found and piece:
            shapes = found[-1][1]
            if shapes == [""]:  # a blank after the colon
                shapes.clear()
            shapes.append(piece)
        else:
            raise UsageError(f"cannot read the shape in `{text}`: no input name", hint=_SHAPES_HINT)
    return found


def _plain(name: str, sizes: Any) -> Shape:
    """A shape that came as a Python value."""
    if isinstance(sizes, str):
        return _sizes(sizes.strip(), f"{name}:{sizes}")
    try:
        return tuple(int(size) for size in sizes)
    except (TypeError, ValueError):
        raise UsageError(f"the shape of `{name}` is {sizes!r}, expected sizes", hint="as `(1, 3, 640, 640)`") from None


def parse_shapes(text: str | Mapping[str, Sequence[int]] | None) -> dict[str, Shape]:
    """Shapes by input name, as trtexec (`a:1x3x64x64,b:8`), Polygraphy (`a:[1,3,64,64]`) and perf_analyzer
    (`a:1,3,64,64`) write them; a scalar is `a:` or `a:scalar`. Names with commas or blanks are quoted."""
    if text is None:
        return {}
    if not isinstance(text, str):
        return {name: _plain(name, sizes) for name, sizes in text.items()}
    shapes: dict[str, Shape] = {}
    for name, parts in _by_name(text):
        if name in shapes:
            raise UsageError(f"input `{name}` is named twice in `{text}`", hint="one shape for each input")
        if len(parts) > 1 and not all(part.isdecimal() for part in parts):
            raise UsageError(f"input `{name}` has {len(parts)} shapes in `{text}`", hint="one shape for each input")
        shapes[name] = _sizes(f"[{','.join(parts)}]" if len(parts) > 1 else parts[0], text)
    return shapes


def parse_batch(text: str | int | Sequence[int] | None) -> tuple[int, int, int] | None:
    """`1:8:64` as (min, opt, max); one number is all three."""
    if text is None:
        return None
    try:
        parts = (
            [operator.index(text)]
            if hasattr(text, "__index__")
            else [int(part) for part in (text.split(":") if isinstance(text, str) else text)]
        )
    except (TypeError, ValueError):
        parts = []
    if len(parts) not in (1, 3):
        raise UsageError(f"cannot read the batch range `{text}`", hint="write it as `--batch 1:8:64` (min:opt:max)")
    low, best, high = parts if len(parts) == 3 else parts * 3
    if not 1 <= low <= best <= high:
        raise ProfileError(
            f"the batch range {low}:{best}:{high} is not 1 <= min <= opt <= max", hint="`--batch 1:8:64`"
        )
    return low, best, high


def parse_options(values: Iterable[str]) -> dict[str, str]:
    """`name=value` pairs, as `-O` takes them."""
    options: dict[str, str] = {}
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, Iterable) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"cannot read the options `{values}`", hint="as `options={'name': 'value'}`")
    for value in values:
        name, equals, setting = value.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"cannot read the option `{value}`", hint="write it as `-O name=value`")
        options[name.strip().replace("-", "_")] = setting.strip()
    return options


# ------------------------------------------------------------------------------------------------ profiles


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Smallest, usual and largest shape of one input."""

    min: Shape
    opt: Shape
    max: Shape

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

    def holds(self, shape: Sequence[int]) -> bool:
        """True when the shape lies between min and max in every dimension."""
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

    def check(self, feeds: Mapping[str, Any], index: int = 0) -> None:
        """`ProfileError` when a feed's shape lies outside."""
        for name, span in self.ranges.items():
            shape = tuple(feeds[name].shape)
            if not span.holds(shape):
                raise _outside(name, span, shape, index)

    def __str__(self) -> str:
        return " ".join(f"{_quoted(name)}:{span}" for name, span in self.ranges.items())


def first_fitting(profiles: Sequence[Profile], check: Callable[[Profile, int], object]) -> int:
    """The number of the first profile that `check` lets pass; the first one's `ProfileError` where none does."""
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


def check_shapes(
    signature: Signature, shapes: Mapping[str, Shape], profile: Profile | None = None, index: int = 0
) -> None:
    """What a context asks of the shapes it is prepared for: one for each input, its rank and fixed sizes, the profile's
    range. `FeedError` or `ProfileError` otherwise."""
    known = [spec.name for spec in signature.inputs]
    for name in shapes:
        if name not in known:
            raise FeedError(f"there is no input `{name}`", hint=closest(name, known))
    for spec in signature.inputs:
        shape = shapes.get(spec.name)
        if shape is None:
            raise FeedError(f"input `{spec.name}` has no shape", hint=f"expected {spec.describe()}")
        if len(shape) != len(spec.shape) or any(
            want >= 0 and got != want for got, want in zip(shape, spec.shape, strict=True)
        ):
            raise FeedError(
                f"input `{spec.name}` is {format_shape(shape)}, expected {spec.describe()}",
                hint="feed the sizes the engine was built for",
            )
        span = profile.ranges.get(spec.name) if profile else None
        if span is not None and not span.holds(shape):
            raise _outside(spec.name, span, shape, index)


def _outside(name: str, span: ShapeRange, shape: Shape, index: int) -> ProfileError:
    return ProfileError(
        f"input `{name}` is {format_shape(shape)}, profile {index} spans "
        f"{format_shape(span.min)} to {format_shape(span.max)}",
        hint=_remedy(name, span, shape),
    )


def _remedy(name: str, span: ShapeRange, shape: Shape) -> str | None:
    """What to type for a shape outside the range; nothing is built for tensors without elements."""
    if len(shape) != len(span.min):
        return None
    if 0 in shape and 0 not in span.min:
        return f"feed `{name}` with {format_shape(span.min)} or more: an engine takes no tensor without elements"
    wider = ShapeRange(tuple(map(min, span.min, shape)), span.opt, tuple(map(max, span.max, shape)))
    return f"rebuild with `--profile {_quoted(name)}:{wider}`"


def _quoted(name: str) -> str:
    """A name as `--profile` and `--shapes` take it."""
    if not re.search(r"[\s,;\[\]()'\"]", name):
        return name
    return f'"{name}"' if "'" in name else f"'{name}'"


def _three(name: str, shapes: Any) -> Sequence[Shape]:
    if isinstance(shapes, ShapeRange):
        return shapes.min, shapes.opt, shapes.max
    if isinstance(shapes, str):
        return parse_profile(f"'{name}':{shapes}").ranges[name].shapes
    return [_plain(name, shape) for shape in shapes]


def parse_profile(text: str | Profile | Mapping[str, Any]) -> Profile:
    """A profile as `images:1x3x640x640,8x3x640x640,64x3x640x640` (min, opt, max); several inputs with blanks or `;`."""
    if isinstance(text, Profile):
        return text
    ranges: dict[str, ShapeRange] = {}
    parts: Iterable[tuple[str, Sequence[Shape]]]
    if isinstance(text, str):
        parts = [(name, [_sizes(shape, text) for shape in shapes]) for name, shapes in _by_name(text)]
    else:
        parts = [(name, _three(name, shapes)) for name, shapes in text.items()]
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
    flag: str = "--shapes",
) -> Profile:
    """The profile of a signature whose batch moves through `batch` and whose other dynamic sizes are `shapes`.

    `ShapeError` with the option to add when a dynamic size other than the batch is not given.
    """
    shapes = dict(shapes or {})
    for name in shapes:
        signature.input(name)
    if batch is not None:
        _check_batch(signature, batch)
    ranges = {}
    for spec in signature.inputs:
        given = shapes.get(spec.name)
        if given is not None:
            _check_given(spec, given, flag)
        low: list[int] = []
        best: list[int] = []
        high: list[int] = []
        missing = [position for position in spec.dynamic if position > 0 and given is None]
        if missing:
            raise ShapeError(
                f"input `{spec.name}` is {spec.describe()}: dimension {_dimension_names(spec, missing)} must be given",
                hint=f"add `{flag} {spec.name}:{_suggest(spec)}` with the sizes this model expects",
            )
        for position, size in enumerate(spec.shape):
            if size >= 0:
                span = (size, size, size)
            elif position == 0 and batch is not None:
                span = batch
            elif given is not None:
                span = (given[position],) * 3
            else:
                span = (1, 1, 1)
            for sizes, value in zip((low, best, high), span, strict=True):
                sizes.append(value)
        ranges[spec.name] = ShapeRange(tuple(low), tuple(best), tuple(high))
    return Profile(ranges)


def _check_batch(signature: Signature, batch: tuple[int, int, int]) -> None:
    """`ShapeError` when a batch range was given and no input's first dimension can move to it."""
    firsts = {spec.shape[0]: spec for spec in signature.inputs if spec.shape}
    if firsts and all(size >= 0 for size in firsts) and any((size,) * 3 != batch for size in firsts):
        size, spec = next(iter(firsts.items()))
        raise ShapeError(
            f"`--batch {':'.join(map(str, batch))}` cannot be built: input `{spec.name}` is {spec.describe()}, "
            f"its batch is fixed at {size}",
            hint=f"leave `--batch` out (or `--batch {size}`), or export the model with a dynamic batch",
        )


def _check_given(spec: TensorSpec, given: Shape, flag: str) -> None:
    if len(given) != len(spec.shape) or any(
        want >= 0 and want != got for got, want in zip(given, spec.shape, strict=False)
    ):
        raise ShapeError(
            f"`{flag} {spec.name}:{format_shape(given)}` does not fit input `{spec.name}`, which is {spec.describe()}",
            hint=f"`{flag} {spec.name}:{_suggest(spec)}`",
        )
    if any(size < 0 for size in given):
        raise ShapeError(f"`{flag} {spec.name}:{format_shape(given)}` has a negative size", hint="sizes are 0 or more")


def _dimension_names(spec: TensorSpec, positions: Sequence[int]) -> str:
    image = {2: "height", 3: "width"} if len(spec.shape) == 4 else {}
    return " and ".join(
        f"{position} ({image[position]})" if position in image else str(position) for position in positions
    )


def _suggest(spec: TensorSpec) -> str:
    """A shape to type: fixed sizes kept, the batch 1, the rest the field's usual sizes."""
    return format_shape(
        [size if size >= 0 else 1 if position == 0 else 640 for position, size in enumerate(spec.shape)]
    )


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known about one field made with `opt`."""

    name: str
    help: str
    flags: tuple[str, ...]
    default: Any
    in_key: bool
    parse: Callable[[Any], Any] | None
    choices: tuple[str, ...] | None
    metavar: str | None
    multiple: bool
    is_flag: bool
    type: str
    """The annotation's first name: `int` of `int | None`."""
    least: float | None
    above: float | None
    write: Callable[[Any], str] | None
    """The text a value is typed as, where `str` is not it."""


def opt(
    default: Any,
    help: str,
    *,
    flags: str | None = None,
    key: bool = True,
    parse: Callable[[Any], Any] | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    multiple: bool = False,
    least: float | None = None,
    above: float | None = None,
    write: Callable[[Any], str] | None = None,
) -> Any:
    """A setting: a dataclass field with its help, flags (blank separated), parser, and whether the engine's key has it.

    `flags=""` is a setting of Python alone, which no command offers. A number below `least` or not above `above` is refused
    wherever the config is made (`_within_limits`).
    """
    made: dict[str, Any] = {
        "help": help, "flags": flags, "key": key, "parse": parse, "choices": choices, "metavar": metavar,
        "multiple": multiple, "least": least, "above": above, "write": write,
    }  # fmt: skip
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=made)
    return field(default=default, metadata=made)


def settings(config: type | object) -> list[Setting]:
    """The settings of a config class, in order."""
    found = []
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        if "help" not in item.metadata:
            continue
        made = item.metadata
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        flag = "--" + re.sub(r"_(s|ms|mib)$", "", item.name).replace("_", "-")
        found.append(
            Setting(
                name=item.name,
                help=made["help"],
                flags=(flag,) if made["flags"] is None else tuple(made["flags"].split()),
                default=default,
                in_key=made["key"],
                parse=made["parse"],
                choices=tuple(made["choices"]) if made["choices"] else None,
                metavar=made["metavar"],
                multiple=made["multiple"],
                is_flag=isinstance(default, bool),
                type=item.type.__name__ if isinstance(item.type, type) else str(item.type).partition(" ")[0],
                least=made["least"],
                above=made["above"],
                write=made["write"],
            )
        )
    return found


def _within_limits(config: Any) -> None:
    """`UsageError` when a number of a config is none, or lies outside its setting's limits."""
    for item in dataclasses.fields(config):
        value, least, above = getattr(config, item.name), item.metadata.get("least"), item.metadata.get("above")
        kind = str(item.type).partition(" ")[0]
        if value is not None and kind in _NUMBERS and not _is_number(value, kind):
            raise UsageError(
                f"`{item.name}` is {value!r}, expected {_NUMBERS[kind]}", hint=str(item.metadata.get("help", ""))
            )
        if value is None or (least is None and above is None):
            continue
        fits = value >= least if least is not None else value > above
        if not (fits and value < math.inf):
            flag = next((*one.flags, one.name)[0] for one in settings(config) if one.name == item.name)
            limit = f"{least:g} or more" if least is not None else f"more than {above:g}"
            raise UsageError(f"`{flag}` is {value}, expected {limit}", hint=f"{item.metadata['help']}")


_NUMBERS = {"int": "a whole number", "float": "a number", "tuple[int,": "whole numbers"}


def _is_number(value: Any, kind: str) -> bool:
    if kind == "tuple[int,":
        return isinstance(value, tuple | list) and all(_is_number(one, "int") for one in value)
    return isinstance(value, numbers.Integral if kind == "int" else numbers.Real) and not isinstance(value, bool)


def words(config: object) -> list[str]:
    """The settings that are not their defaults, as the words of a command line that makes the same config again."""
    found: list[str] = []
    for item in settings(config):
        value = getattr(config, item.name)
        if value == item.default or value is None or not item.flags:
            continue
        flag = item.flags[0]
        if isinstance(value, bool):
            yes, _, no = flag.partition("/")
            found.append(yes if value else no or f"--no-{yes[2:]}")
        elif item.multiple and isinstance(value, dict):
            found += [word for name, text in value.items() for word in (flag, f"{name}={text}")]
        elif item.multiple:
            found += [word for one in value for word in (flag, str(one))]
        else:
            found += [flag, (item.write or _written)(value)]
    return found


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{_quoted(name)}:{format_shape(shape)}" for name, shape in value.items())
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _device(value: str | int) -> str:
    """`cpu`, `cuda:0`: one spelling for each device; a bare number is a CUDA device; nothing is the backend's own."""
    if value == "":
        return ""
    kind, number = parse_device(value)
    return "cpu" if kind == "cpu" else f"{kind}:{number}"


def _bytes(text: str | int) -> int:
    """A size as people type it, or a number of bytes as programs have it."""
    return text if isinstance(text, int) else parse_size(text)


def _workspace_mib(text: str | int) -> int:
    nbytes = parse_size(text)
    if nbytes >> 63:  # builders count it in 64 bits
        raise UsageError(f"the size `{text}` is more than any machine has", hint="`32GiB` is the default")
    return max(1, nbytes >> 20) if nbytes else 0


def _count(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"`{text}` is no whole number", hint="write it as `64`") from None


def _numbers(value: str | int | Iterable[int]) -> tuple[int, ...]:
    """Sizes of batches, in order, each once: `1,2,4`."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    try:
        found = tuple(sorted({int(part) for part in parts}))
    except (TypeError, ValueError):
        raise UsageError(f"cannot read the batch sizes `{value}`", hint="write them as `1,2,4,8`") from None
    if found and found[0] < 1:
        raise UsageError(f"a batch of {found[0]} rows is none", hint="sizes of 1 or more")
    return found


def _graphs(value: bool | str | Iterable[int]) -> bool | tuple[int, ...]:
    """True, False, or the sizes graphs are captured for."""
    if isinstance(value, bool) or value is None:
        return bool(value)
    switch = _FROM_TEXT["bool"]
    try:
        return bool(switch(value.strip().lower())) if isinstance(value, str) and "," not in value else _numbers(value)
    except (KeyError, ValueError):
        return _numbers(value)


def _names(text: str | Sequence[str]) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()] if isinstance(text, str) else text
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"cannot read the names `{text}`", hint="write them as `a,b`, or as a list of strings")
    return tuple(names)


def _percentiles(text: str | Sequence[float]) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in (text.split(",") if isinstance(text, str) else text))
    except ValueError:
        raise UsageError(f"cannot read the percentiles `{text}`", hint="`--percentile 90,95,99`") from None
    if not all(0 <= value <= 100 for value in values):
        raise UsageError(f"the percentiles {text} are not all between 0 and 100", hint="`--percentile 90,95,99`")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """How to build an engine."""

    def __post_init__(self) -> None:
        _within_limits(self)

    backend: str = opt("onnxruntime", "the backend that builds", flags="--backend -b")
    device: str = opt(
        "", "the device to build for: cpu, cuda:0, ... (default: the backend's own, cpu where it has it)", parse=_device
    )
    precision: str | None = opt(None, "what the engine must compute in (default: as the graph is)", choices=PRECISIONS)
    calibrate: str | None = opt(
        None, "data to quantise with when --precision asks for what the graph is not: a folder, .npz", metavar="DATA"
    )
    preprocess: str | None = opt(
        None, "how pictures of --calibrate become inputs, instead of what the model declares",
        metavar="|".join(("FILE", *PREPROCESS_PRESETS)),
    )  # fmt: skip
    profiles: tuple[Profile, ...] = opt(
        (), "min,opt,max shapes, as images:1x3x640x640,8x3x640x640,64x3x640x640", flags="--profile",
        parse=parse_profile, multiple=True, metavar="SPEC",
    )  # fmt: skip
    batch: tuple[int, int, int] | None = opt(
        None, "min:opt:max when only the batch moves", parse=parse_batch, metavar="MIN:OPT:MAX",
        write=lambda batch: ":".join(map(str, batch)),
    )  # fmt: skip
    shapes: dict[str, Shape] = opt(
        {}, "sizes of dynamic dimensions, as images:1x3x640x640", parse=parse_shapes, metavar="SPEC"
    )
    workspace_mib: int = opt(
        32768, "scratch memory the builder may use, as 32GiB (backends with a builder of their own)",
        flags="--workspace", parse=_workspace_mib, metavar="SIZE", write=lambda mib: f"{mib}MiB", least=1,
    )  # fmt: skip
    timing_cache: Path | None = opt(
        None, "the file tactics' timings are kept in (default: one in the store for each library version and GPU)",
        flags="--timing-cache", parse=Path, metavar="FILE", key=False,
    )  # fmt: skip
    ladder: bool = opt(
        True, "after a known failure try the steps known to help, and say each (--no-ladder to stop at the first failure)",
        key=False,
    )  # fmt: skip
    providers: tuple[str, ...] = opt(
        (), "ONNX Runtime's providers in order of preference: cpu, cuda, tensorrt", parse=_names, metavar="A,B"
    )
    allow_fallback: bool = opt(False, "let a provider that cannot run be replaced by the next; it is recorded")
    parity: bool = opt(
        True, "compare the engine with plain ONNX Runtime on one input (--no-parity to leave it out)", key=False
    )
    parity_rtol: float | None = opt(
        None, "largest difference allowed, relative to the largest reference value (default: 0.001, and more for a graph "
        "that rounds more coarsely than fp32)", key=False, above=0,
    )  # fmt: skip
    options: dict[str, str] = opt(
        {}, "the backend's own settings (a wrong name lists the right ones)", flags="-O --option", metavar="NAME=VALUE",
        multiple=True,
    )  # fmt: skip

    def key(self) -> dict[str, Any]:
        """The settings that make two engines different, by name."""
        return {item.name: getattr(self, item.name) for item in settings(self) if item.in_key}

    def resolve(self, signature: Signature) -> tuple[Profile, ...]:
        """The profiles this model is built with; every dynamic dimension has a range in each.

        Raises `UsageError` for a name the model does not have and `ShapeError` for a dynamic size nobody gave.
        """
        if self.profiles and self.batch:
            raise UsageError("`--profile` and `--batch` contradict each other", hint="give one of them")
        if not self.profiles:
            return (profile_for(signature, batch=self.batch, shapes=self.shapes, flag="--shapes"),)
        complete = []
        for profile in self.profiles:
            for name, span in profile.ranges.items():
                spec = signature.input(name)
                for shape in (span.min, span.opt, span.max):
                    _check_given(spec, shape, "--profile")
            for name in self.shapes:
                if name in profile.ranges:
                    raise UsageError(
                        f"input `{name}` has both a `--profile` and a `--shapes`",
                        hint="a profile says min, opt and max: leave `--shapes` out for this input",
                    )
                signature.input(name)
            rest = profile_for(
                Signature(tuple(spec for spec in signature.inputs if spec.name not in profile.ranges), ()),
                shapes=self.shapes,
                flag="--shapes",
            )
            complete.append(
                Profile({spec.name: (profile.ranges | rest.ranges)[spec.name] for spec in signature.inputs})
            )
        return tuple(complete)


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests are joined to batches: at most `max_batch` rows, waiting at most `max_wait_ms`."""

    def __post_init__(self) -> None:
        _within_limits(self)
        _numbers(self.buckets)

    max_batch: int | None = opt(None, "rows in one batch (default: what the engine takes, else 32)", flags="", least=1)
    max_wait_ms: float = opt(2.0, "how long a request may wait for others, from its arrival", flags="", least=0)
    max_rows_waiting: int | None = opt(
        None, "rows that may wait; more are refused (default: 64 batches)", flags="", least=1
    )
    max_bytes_waiting: int | None = opt(
        None, "bytes of inputs that may wait; more are refused", flags="", parse=_bytes, least=1
    )
    buckets: tuple[int, ...] = opt(
        (), "sizes batches are padded to (default: what the engine needs)", flags="", parse=_numbers
    )
    priority_ms: float = opt(100.0, "the head start one step of priority gives", flags="", least=0)
    workers: int | None = opt(
        None, "batches at work at once (default: as many as the engine has contexts)", flags="", least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How to run an engine."""

    def __post_init__(self) -> None:
        _within_limits(self)

    device: str | None = opt(None, "the device to run on (default: the one the engine was built for)", parse=_device)
    contexts: int = opt(1, "inferences in flight at once on backends with contexts", least=1)
    streams: int | None = opt(None, "device streams (default: one for each context)", least=1)
    graphs: bool | tuple[int, ...] = opt(
        False, "capture a graph for each shape; sizes: batches are padded to these first", flags="", parse=_graphs
    )
    max_graphs: int = opt(16, "graphs kept for each context; the least recently used one goes", flags="", least=1)
    max_waiting: int | None = opt(None, "callers that may wait for a context; more are refused", flags="", least=0)
    wait_timeout_s: float | None = opt(
        None, "how long a caller may wait for a context", flags="", parse=parse_duration, above=0
    )
    providers: tuple[str, ...] = opt((), "ONNX Runtime's providers in order of preference", parse=_names, metavar="A,B")
    allow_fallback: bool = opt(False, "let a provider that cannot run be replaced by the next; it is recorded")
    options: dict[str, str] = opt(
        {}, "the backend's own settings", flags="-O --option", metavar="NAME=VALUE", multiple=True
    )
    batching: Batching | None = None


PROTOCOLS = ("trt-engine", "trtexec10", "trtexec11")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """How to measure. What is None comes from the protocol."""

    def __post_init__(self) -> None:
        _within_limits(self)

    protocol: str = opt("trt-engine", "the named set of measuring rules", choices=PROTOCOLS)
    batch: int | None = opt(None, "rows in one query (default: the profile's optimum)", least=1)
    shapes: dict[str, Shape] = opt(
        {}, "shapes to measure at, as images:8x3x640x640", parse=parse_shapes, metavar="SPEC"
    )
    duration_s: float | None = opt(
        None, "measure at least this long (200ms, 10s)", parse=parse_duration, metavar="TIME", least=0
    )
    warmup_s: float | None = opt(
        None, "run this long before measuring", flags="--warmup", parse=parse_duration, metavar="TIME", least=0
    )
    iterations: int | None = opt(None, "measure at least this many queries", least=1)
    warmup_iterations: int = opt(0, "leave at least this many queries out as warm-up", least=0)
    idle_s: float = opt(0.0, "pause after each query", parse=parse_duration, metavar="TIME", least=0)
    percentiles: tuple[float, ...] = opt(
        (90.0, 95.0, 99.0), "percentiles to print", flags="--percentile", parse=_percentiles, metavar="P,P"
    )
    inputs: Path | None = opt(
        None, ".npy (one input) or .npz with the inputs (default: seeded random)", parse=Path, metavar="FILE"
    )
    seed: int = opt(0, "seed of the random inputs", least=0)
    transfers: bool | None = opt(
        None, "copy inputs and outputs inside the measured part", flags="--transfers/--no-transfers"
    )
    graph: bool | None = opt(None, "replay a CUDA graph where the device has them", flags="--graph/--no-graph")
    spin: bool | None = opt(None, "wait for the device by spinning", flags="--spin/--no-spin")
    streams: int = opt(
        1, "queries in flight side by side, each on a stream of its own", flags="--streams --infStreams", least=1
    )
    strict: bool = opt(False, "end with exit code 9 when the measurement is not stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig:
    """How many streams: the doubling of engines and what it may cost."""

    def __post_init__(self) -> None:
        _within_limits(self)

    start_batch: int = opt(64, "the first engine's largest batch", least=1)
    max_batch: int = opt(1024, "stop doubling here (and start here when it is lower than the start)", least=1)
    fps: float = opt(30.0, "frames per second of one stream", above=0)
    duration_s: float = opt(10.0, "length of each measurement", parse=parse_duration, metavar="TIME", above=0)
    warmup_s: float = opt(
        1.0, "run this long before each measurement", flags="--warmup", parse=parse_duration, metavar="TIME", least=0
    )
    scan: bool = opt(False, "look for batch sizes that are much slower than their neighbours (N +- --scan-width)")
    scan_width: int = opt(8, "how far the scan goes to each side", least=1)
    memory_limit: int | None = opt(
        None,
        "memory one measurement may take, as 8GiB (default: what is free)",
        parse=_bytes,
        metavar="SIZE",
        write=lambda nbytes: f"{nbytes}B",
        least=1,
    )
    protocol: str = opt("trt-engine", "the named set of measuring rules", choices=PROTOCOLS)
    need_streams: int | None = opt(
        None, "end with exit code 12 when fewer streams than this are sustained", parse=_count, metavar="N"
    )
    strict: bool = opt(False, "end with exit code 9 when a measurement is not stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """How to quantise: what stays as it is, where ranges come from, how weights are rounded."""

    def __post_init__(self) -> None:
        _within_limits(self)

    target: str = opt(
        "tensorrt", "the library that will run the model: where its kernels want Q/DQ", choices=QUANT_TARGETS
    )
    dynamic: bool = opt(
        False, "quantise activations while running, without data (INT8 of MatMul and Gemm, --target onnxruntime-cpu)"
    )
    reduce_range: str = opt(
        "auto", "weights in 7 bits, so that kernels without VNNI do not overflow (--target onnxruntime-cpu; auto: as this "
        "processor needs)", choices=("auto", "on", "off"),
    )  # fmt: skip
    calibrator: str | None = opt(
        None, "the rule for activations' ranges (default: mse for INT8, minmax for FP8 and NVFP4)",
        choices=("mse", "entropy", "percentile", "minmax"),
    )  # fmt: skip
    samples: int | None = opt(None, "how many samples of the data to take (default: all)", least=1)
    sample_batch: int = opt(8, "how many samples run at once", least=1)
    method: str = opt("rtn", "how weights are rounded: to nearest, or seen through the data", choices=("rtn", "awq"))
    block: int | None = opt(
        None, "elements under one scale in INT4 (default: the largest of 128, 64, 32, 16 that fits)"
    )
    weights_only: bool = opt(False, "leave activations as they are (NVFP4 and MXFP8; INT4 always does)")
    residuals: bool = opt(False, "quantise the other side of residual additions too, so that they fuse (INT8, FP8)")
    bias_correction: bool = opt(
        True,
        "let biases take up what rounding weights takes away on average (INT8, FP8; --no-bias-correction to leave it)",
    )
    heads: bool = opt(False, "quantise the last layer before each output as well")
    exclude_nodes: tuple[str, ...] = opt(
        (),
        "leave this node, or PyTorch module (`layer4.1`), as it is",
        flags="--exclude-node",
        multiple=True,
        parse=str,
        metavar="NAME",
    )
    exclude_types: tuple[str, ...] = opt(
        (), "leave this operator type as it is", flags="--exclude-type", multiple=True, parse=str, metavar="OP"
    )
    exclude_patterns: tuple[str, ...] = opt(
        (),
        "leave nodes whose names or modules fit this pattern, as '/head/*'",
        flags="--exclude-pattern",
        multiple=True,
        parse=str,
        metavar="GLOB",
    )
    high_precision: str = opt("fp32", "what is not quantised computes in this", choices=("fp32", "fp16", "bf16"))
    convolutions: bool = opt(
        False, "let the emulation of INT4, NVFP4 and MXFP8 round convolutions too, which no kernel does"
    )
    parity: bool = opt(True, "compare with the model as it was (--no-parity to leave it out)")


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": {
        "1": True,
        "true": True,
        "on": True,
        "yes": True,
        "0": False,
        "false": False,
        "off": False,
        "no": False,
    }.__getitem__,
}


def _from_text(item: Setting, text: str) -> Any:
    """The number or switch behind the text of `-O name=value`."""
    try:
        return _FROM_TEXT[item.type](text.strip().lower())
    except (ValueError, KeyError):
        kind = {"int": "a whole number", "float": "a number", "bool": "`true` or `false`"}[item.type]
        raise UsageError(f"`{item.name}` is `{text}`, expected {kind}", hint=item.help) from None


def _options(values: Mapping[str, Any]) -> dict[str, str]:
    """A backend's settings given as values, in the spelling `-O` gives them: equal settings are one engine key."""
    return {
        str(name).replace("-", "_"): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def from_values(config: type[Any], values: Mapping[str, Any]) -> Any:
    """A config made from plain Python values, each passed through its setting's parser; unknown names are refused."""
    known = {item.name: item for item in settings(config)}
    extra = {item.name for item in dataclasses.fields(config)} - set(known)
    made = {}
    for name, value in values.items():
        if name not in known and name not in extra:
            raise UsageError(f"there is no setting `{name}`", hint=closest(name, list(known)))
        item = known.get(name)
        if item is not None and value is not None:
            if item.parse is not None and item.multiple:
                value = tuple(item.parse(one) for one in (value if isinstance(value, list | tuple) else [value]))
            elif item.parse is not None:
                value = item.parse(value)
            elif item.multiple:
                value = _options(value) if isinstance(value, Mapping) else parse_options(value)
            elif isinstance(value, str) and item.type in _FROM_TEXT:
                value = _from_text(item, value)
            if item.choices and value not in item.choices:
                raise UsageError(f"`{name}` cannot be `{value}`", hint=closest(str(value), item.choices))
        made[name] = value
    config = config(**made)
    _within_limits(config)  # a backend's own settings class has no `__post_init__` that asks
    return config


def is_preset(preprocess: str) -> bool:
    """Whether that names a preset of pre-processing, `yolo` or `yolo:640`, and no file."""
    return preprocess.partition(":")[0] in PREPROCESS_PRESETS
