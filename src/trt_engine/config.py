"""Settings: one frozen dataclass per verb, one line per setting.

A setting made with `opt` carries its help, its flag and whether it is part of an engine's key; the command
line (`cli/options.py`), the help text and the store read it from there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_engine.errors import ProfileError, ShapeError, UsageError
from trt_engine.tensors import Shape, Signature, TensorSpec, closest, format_shape

__all__ = [
    "PRECISIONS",
    "Batching",
    "BenchConfig",
    "BuildConfig",
    "Profile",
    "RuntimeConfig",
    "Setting",
    "ShapeRange",
    "SizeConfig",
    "opt",
    "parse_batch",
    "parse_duration",
    "parse_options",
    "parse_profile",
    "parse_shapes",
    "parse_size",
    "settings",
]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp8")


# ------------------------------------------------------------------------------------------------ parsing

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
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
    if isinstance(text, int):
        return text << 20
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"cannot read the size `{text}`", hint="write it as `32GiB`, `512M`, `4096K` or `1024B`")
    return int(float(match[1]) * _UNITS[match[2].lower()])


_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|min|m|h)?\s*", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str | float) -> float:
    """Seconds of `200ms`, `0.2s`, `2min`; a bare number is seconds."""
    if isinstance(text, int | float):
        if text < 0:
            raise UsageError(f"a duration cannot be {text}", hint="write it as `10s` or `200ms`")
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"cannot read the duration `{text}`", hint="write it as `10s`, `200ms` or `2min`")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def _sizes(text: str, whole: str) -> Shape:
    text = text.strip().strip("[]()")
    if text in ("", "scalar"):
        return ()
    try:
        return tuple(int(size) for size in re.split(r"[x,*]", text))
    except ValueError:
        raise UsageError(
            f"cannot read the shape in `{whole}`", hint="write shapes as `images:1x3x640x640`, several with commas"
        ) from None


def _split_name(text: str) -> tuple[str, str]:
    """`images:1x3`, `'Input:0':1x3`, `ns/Input:0:1x3` as name and shape: the last colon parts them."""
    name, colon, shape = text.strip().rpartition(":")
    name = name.strip().strip("'\"")
    if not colon or not name:
        raise UsageError(f"cannot read the shape `{text}`: no input name", hint="write shapes as `images:1x3x640x640`")
    return name, shape


def parse_shapes(text: str | Mapping[str, Sequence[int]] | None) -> dict[str, Shape]:
    """Shapes by input name, as trtexec (`a:1x3x64x64,b:8`), Polygraphy (`a:[1,3,64,64]`) and perf_analyzer
    (`a:1,3,64,64`) write them; a scalar is `a:` or `a:scalar`."""
    if text is None:
        return {}
    if not isinstance(text, str):
        return {name: tuple(int(size) for size in shape) for name, shape in text.items()}
    shapes: dict[str, Shape] = {}
    # a comma parts two inputs only where a name with a colon follows it
    for part in re.split(r"\s*[,;]\s*(?=['\"]?[^\d\s,\[\]()][^,;]*:)|\s+(?=\S*:)", text.strip()):
        name, shape = _split_name(part)
        if name in shapes:
            raise UsageError(f"input `{name}` is named twice in `{text}`", hint="one shape for each input")
        shapes[name] = _sizes(shape, text)
    return shapes


def parse_batch(text: str | int | Sequence[int] | None) -> tuple[int, int, int] | None:
    """`1:8:64` as (min, opt, max); one number is all three."""
    if text is None:
        return None
    try:
        parts = (
            [text]
            if isinstance(text, int)
            else [int(part) for part in (text.split(":") if isinstance(text, str) else text)]
        )
    except ValueError:
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

    def __str__(self) -> str:
        return ",".join(map(format_shape, (self.min, self.opt, self.max)))


@dataclass(frozen=True, slots=True)
class Profile:
    """The range of shapes an engine is built for, by input."""

    ranges: dict[str, ShapeRange]

    def check(self, feeds: Mapping[str, Any], index: int = 0) -> None:
        """`ProfileError` when a feed's shape lies outside."""
        for name, span in self.ranges.items():
            shape = tuple(feeds[name].shape)
            if not span.holds(shape):
                wider = (
                    ShapeRange(tuple(map(min, span.min, shape)), span.opt, tuple(map(max, span.max, shape)))
                    if len(shape) == len(span.min)
                    else None
                )
                raise ProfileError(
                    f"input `{name}` is {format_shape(shape)}, profile {index} spans "
                    f"{format_shape(span.min)} to {format_shape(span.max)}",
                    hint=f"rebuild with `--profile {name}:{wider}`" if wider else None,
                )

    def __str__(self) -> str:
        return " ".join(f"{name}:{span}" for name, span in self.ranges.items())


def parse_profile(text: str | Profile | Mapping[str, Any]) -> Profile:
    """A profile as `images:1x3x640x640,8x3x640x640,64x3x640x640` (min, opt, max); several inputs with blanks or `;`."""
    if isinstance(text, Profile):
        return text
    ranges: dict[str, ShapeRange] = {}
    parts: Iterable[tuple[str, Sequence[Shape]]]
    if isinstance(text, str):
        parts = [
            (name, [_sizes(shape, text) for shape in shapes.split(",")])
            for name, shapes in map(_split_name, re.split(r"[;\s]+", text.strip()))
        ]
    else:
        parts = [
            (
                name,
                (shapes.min, shapes.opt, shapes.max) if isinstance(shapes, ShapeRange) else [tuple(s) for s in shapes],
            )
            for name, shapes in text.items()
        ]
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

    `ShapeError` with the option to add when a dynamic size other than the batch is not given (A3).
    """
    shapes = dict(shapes or {})
    for name in shapes:
        signature.input(name)
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
) -> Any:
    """A setting: a dataclass field with its help, flags (blank separated), parser, and whether the engine's key has it."""
    made = {"help": help, "flags": flags, "key": key, "parse": parse, "choices": choices, "metavar": metavar}
    made["multiple"] = multiple
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
                flags=tuple(made["flags"].split()) if made["flags"] else (flag,),
                default=default,
                in_key=made["key"],
                parse=made["parse"],
                choices=tuple(made["choices"]) if made["choices"] else None,
                metavar=made["metavar"],
                multiple=made["multiple"],
                is_flag=isinstance(default, bool),
            )
        )
    return found


def _workspace_mib(text: str | int) -> int:
    return max(1, parse_size(text) >> 20)


def _names(text: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if isinstance(text, str) else tuple(text)


def _percentiles(text: str | Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(part) for part in (text.split(",") if isinstance(text, str) else text))
    if not all(0 <= value <= 100 for value in values):
        raise UsageError(f"the percentiles {text} are not all between 0 and 100", hint="`--percentile 90,95,99`")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """How to build an engine."""

    backend: str = opt("onnxruntime", "the backend that builds", flags="--backend -b")
    device: str = opt("cpu", "the device to build for: cpu, cuda:0, ...")
    precision: str | None = opt(None, "what the engine must compute in (default: as the graph is)", choices=PRECISIONS)
    profiles: tuple[Profile, ...] = opt(
        (), "min,opt,max shapes, as images:1x3x640x640,8x3x640x640,64x3x640x640", flags="--profile",
        parse=parse_profile, multiple=True, metavar="SPEC",
    )  # fmt: skip
    batch: tuple[int, int, int] | None = opt(
        None, "min:opt:max when only the batch moves", parse=parse_batch, metavar="MIN:OPT:MAX"
    )
    shapes: dict[str, Shape] = opt(
        {}, "sizes of dynamic dimensions, as images:1x3x640x640", parse=parse_shapes, metavar="SPEC"
    )
    workspace_mib: int = opt(
        32768, "scratch memory the builder may use, as 32GiB (backends with a builder of their own)",
        flags="--workspace", parse=_workspace_mib, metavar="SIZE",
    )  # fmt: skip
    providers: tuple[str, ...] = opt(
        (), "ONNX Runtime's providers in order of preference: cpu, cuda, tensorrt", parse=_names, metavar="A,B"
    )
    allow_fallback: bool = opt(False, "let a provider that cannot run be replaced by the next; it is recorded")
    parity: bool = opt(
        True, "compare the engine with plain ONNX Runtime on one input (--no-parity to leave it out)", key=False
    )
    parity_rtol: float = opt(1e-3, "largest difference allowed, relative to the largest reference value", key=False)
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

    max_batch: int
    max_wait_ms: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How to run an engine."""

    device: str | None = opt(None, "the device to run on (default: the one the engine was built for)")
    contexts: int = opt(1, "inferences in flight at once on backends with contexts")
    streams: int = opt(1, "device streams")
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

    protocol: str = opt("trt-engine", "the named set of measuring rules", choices=PROTOCOLS)
    batch: int | None = opt(None, "rows in one query (default: the profile's optimum)")
    shapes: dict[str, Shape] = opt(
        {}, "shapes to measure at, as images:8x3x640x640", parse=parse_shapes, metavar="SPEC"
    )
    duration_s: float | None = opt(
        None, "measure at least this long (200ms, 10s)", parse=parse_duration, metavar="TIME"
    )
    warmup_s: float | None = opt(
        None, "run this long before measuring", flags="--warmup", parse=parse_duration, metavar="TIME"
    )
    iterations: int | None = opt(None, "measure at least this many queries")
    idle_s: float = opt(0.0, "pause after each query", parse=parse_duration, metavar="TIME")
    percentiles: tuple[float, ...] = opt(
        (90.0, 95.0, 99.0), "percentiles to print", flags="--percentile", parse=_percentiles, metavar="P,P"
    )
    inputs: Path | None = opt(
        None, ".npy (one input) or .npz with the inputs (default: seeded random)", parse=Path, metavar="FILE"
    )
    seed: int = opt(0, "seed of the random inputs")
    transfers: bool | None = opt(
        None, "copy inputs and outputs inside the measured part", flags="--transfers/--no-transfers"
    )
    graph: bool | None = opt(None, "replay a CUDA graph where the device has them", flags="--graph/--no-graph")
    spin: bool | None = opt(None, "wait for the device by spinning", flags="--spin/--no-spin")
    strict: bool = opt(False, "end with exit code 9 when the measurement is not stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig:
    """How many streams: the doubling of engines and what it may cost."""

    start_batch: int = opt(64, "the first engine's largest batch")
    max_batch: int = opt(1024, "stop doubling here (and start here when it is lower than the start)")
    fps: float = opt(30.0, "frames per second of one stream")
    duration_s: float = opt(10.0, "length of each measurement", parse=parse_duration, metavar="TIME")
    warmup_s: float = opt(
        1.0, "run this long before each measurement", flags="--warmup", parse=parse_duration, metavar="TIME"
    )
    scan: bool = opt(False, "look for batch sizes that are much slower than their neighbours (N +- --scan-width)")
    scan_width: int = opt(8, "how far the scan goes to each side")
    memory_limit: int | None = opt(
        None, "memory one measurement may take (default: what is free)", parse=parse_size, metavar="SIZE"
    )
    protocol: str = opt("trt-engine", "the named set of measuring rules", choices=PROTOCOLS)
    strict: bool = opt(False, "end with exit code 9 when a measurement is not stable")


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
            elif item.multiple and not isinstance(value, dict):
                value = parse_options(value)
            if item.choices and value not in item.choices:
                raise UsageError(f"`{name}` cannot be `{value}`", hint=closest(str(value), item.choices))
        made[name] = value
    return config(**made)
