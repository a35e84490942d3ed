"""`TensorSpec`, `Signature`, and the validation of feeds.

Light on purpose: arrays of any library pass through by their `shape` and `dtype`; numpy is not imported here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.errors import FeedError, UsageError
from trt_engine.units import count_elements

Shape = tuple[int, ...]
"""Sizes of the dimensions; -1 is a dynamic one."""
Role = Literal["data", "positive", "one", "size", "first", "axes", "reshape"]
"""What the values of an input decide: `positive` a divisor or repeats, `one` a step or a count, `size` a size or an end,
`first` a start or one axis, `axes` several, `reshape` a shape that takes all elements, `data` what is not known."""
Layout = Literal["NCHW", "NHWC", "other"]
"""How a graph reads an input of four dimensions: as images in that order of axes, or as no image."""
Choice = bool | int | float | str | None
"""A value that a graph compares an input with; None is a random one."""
Tensors = Mapping[str, Any]
"""Arrays by tensor name: numpy, or anything with `shape`, `dtype` and DLPack."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: our name (numpy's and ml_dtypes' name), bits, ONNX `TensorProto` number, protocol name."""

    name: str
    bits: int
    onnx: int
    kserve_name: str | None
    """Name in the Open Inference Protocol v2; None where it has no such type."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a packed tensor of this shape (4-bit types pack two elements to a byte)."""
        return (count_elements(shape) * self.bits + 7) // 8

    def to_scalar(self, value: bool | float | str) -> Choice:
        """The value as a Python scalar of this type, numbers rounded to whole ones where it has no others; None where the
        type has no such value."""
        try:
            if self.name == "string":
                return str(value)
            number = float(value) if isinstance(value, str) else value
            if self.name == "bool":
                return bool(number)
            if "int" not in self.name:
                return float(number)
            whole = round(number)
            low = 0 if self.name.startswith("u") else -(1 << (self.bits - 1))
            return whole if low <= whole < low + (1 << self.bits) else None
        except (ValueError, OverflowError):
            return None


# Numbers: enum TensorProto.DataType of onnx.proto (ONNX 1.23). Wire names: Open Inference Protocol v2.
DTYPES: dict[str, Dtype] = {
    item.name: item
    for item in (
        Dtype("float32", 32, 1, "FP32"),
        Dtype("uint8", 8, 2, "UINT8"),
        Dtype("int8", 8, 3, "INT8"),
        Dtype("uint16", 16, 4, "UINT16"),
        Dtype("int16", 16, 5, "INT16"),
        Dtype("int32", 32, 6, "INT32"),
        Dtype("int64", 64, 7, "INT64"),
        Dtype("string", 0, 8, "BYTES"),
        Dtype("bool", 8, 9, "BOOL"),
        Dtype("float16", 16, 10, "FP16"),
        Dtype("float64", 64, 11, "FP64"),
        Dtype("uint32", 32, 12, "UINT32"),
        Dtype("uint64", 64, 13, "UINT64"),
        Dtype("complex64", 64, 14, None),
        Dtype("complex128", 128, 15, None),
        Dtype("bfloat16", 16, 16, "BF16"),
        Dtype("float8_e4m3fn", 8, 17, None),
        Dtype("float8_e4m3fnuz", 8, 18, None),
        Dtype("float8_e5m2", 8, 19, None),
        Dtype("float8_e5m2fnuz", 8, 20, None),
        Dtype("uint4", 4, 21, None),
        Dtype("int4", 4, 22, None),
        Dtype("float4_e2m1fn", 4, 23, None),
        Dtype("float8_e8m0fnu", 8, 24, None),
        Dtype("uint2", 2, 25, None),
        Dtype("int2", 2, 26, None),
    )
}
_ONNX_NAMES = {item.onnx: item.name for item in DTYPES.values()}


def dtype(value: str | int) -> Dtype:
    """The `Dtype` of a name or of an ONNX `TensorProto` number; `UsageError` for one we do not know."""
    name = _ONNX_NAMES.get(value) if isinstance(value, int) else value
    if name not in DTYPES:
        raise UsageError(f"unknown element type `{value}`", hint=f"known types: {', '.join(DTYPES)}")
    return DTYPES[name]


_PLACEHOLDER = re.compile(
    r"[?*\-.\s_]*|-?\d+|(none|null|nan|dyn|dynamic|unk|unknown|any|var|free)[_?*\s]*\d*", re.IGNORECASE
)


def dimension_symbol(name: str) -> str | None:
    """The symbol that a model names a dimension by; None for a placeholder (`?`, `-1`, `None`, `unk__12`, `dyn`, a blank).

    Exporters write one placeholder for every size they do not know: equal ones are not equal sizes.
    """
    return None if _PLACEHOLDER.fullmatch(name) else name


def format_shape(shape: Sequence[int]) -> str:
    """A shape as trtexec writes it: `1x3x640x640`; a scalar is `scalar`."""
    return "x".join(str(size) for size in shape) or "scalar"


PRECISION_NAMES = {name: name for name in "fp32 tf32 fp16 bf16 int8 fp8 int4 nvfp4 mxfp8".split()}
PRECISION_NAMES |= {"half": "fp16", "float16": "fp16", "float32": "fp32", "bfloat16": "bf16", "float8": "fp8"}
"""What a precision is called, here and elsewhere -> its name here."""


def suggest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence: the nearest known name if there is one, else all of them."""
    from difflib import get_close_matches  # only errors need it

    name = str(name)
    lower = name.lower()
    match = get_close_matches(PRECISION_NAMES.get(lower, lower), known, n=1) or get_close_matches(name, known, n=1)
    if match:
        return f"did you mean `{match[0]}`?"
    return "expected one of " + ", ".join(f"`{item}`" for item in known) if known else "there are none"


_CHANNELS = (1, 3, 4)
"""Sizes of the second or last dimension of images; features have more."""
_IMAGE_DTYPES = ("float", "bfloat", "uint8", "int8")
_USUAL_SIZES: dict[str | None, Sequence[int]] = {"NCHW": (3, 640, 640), "NHWC": (640, 640, 3)}
_ATTENTION_WORDS = frozenset(
    "past present cache cached state states hidden attn attention query key keys value kv seq sequence len length head "
    "heads memory token tokens".split()
)
"""Words in the names of four-dimensional tensors and of their sizes that are not images: a KV cache, an attention mask."""
_SOUND_WORDS = frozenset(
    "audio mel mels melspec spec spectrogram fbank mfcc wav wave waveform waveforms speech sound pcm".split()
)
_TIME_WORDS = frozenset(
    "time times timestep frame frames step steps sample samples window windows chunk bins freq".split()
)
"""Words in the names of tensors of sound, and of sizes after the batch that are steps of time."""


def _words(names: Sequence[str]) -> list[str]:
    return re.split(r"[^a-z]+", " ".join(names).lower())


def no_array(name: str, value: Any) -> FeedError:
    """The error of something else that is given for the array of an input."""
    found = f"input `{name}` is a {type(value).__name__}, expected an array"
    return FeedError(found, hint="`numpy.asarray(value, dtype=...)`: dtypes are not inferred")


def dtype_name(array: Any) -> str:
    """The name of the element type of an array of any library; of its class where it is not an array."""
    found = getattr(array, "dtype", type(array).__name__)
    return str(getattr(found, "name", None) or found).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one input or output; -1 is a dynamic dimension.

    `symbols` names the dynamic dimensions where the model does (`("batch", None, None, None)`); equal symbols
    are equal sizes. `role` is set for an input whose values the graph does not take as mere numbers: random inputs are
    drawn accordingly.
    """

    name: str
    dtype: str
    """numpy's or ml_dtypes' name: `float32`, `bfloat16`."""
    shape: Shape
    """-1 for a dynamic dimension."""
    symbols: tuple[str | None, ...] = ()
    """Names of the dynamic dimensions, None for the others; empty without any."""
    role: Role | None = field(default=None, compare=False)
    """What the graph uses the values for; None for plain numbers."""
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    """Values that the graph compares a switch with; of an engine, those that its model runs with. None is
    a random one. Generated inputs have the first."""

    layout: Layout | None = field(default=None, compare=False)
    """How the graph reads an input of four dimensions; None where its operators do not show it, and without a graph."""

    @property
    def dynamic(self) -> tuple[int, ...]:
        """Positions of the dynamic dimensions."""
        return tuple(index for index, size in enumerate(self.shape) if size < 0)

    @property
    def image_layout(self) -> Literal["NCHW", "NHWC"] | None:
        """`NCHW` or `NHWC` of a batch of images; None for anything else.

        Images have 1, 3, 4 or open channels, and no name of sound or time. Their axes are known by `layout`; without, a name
        of attention or of a state is of no image.
        """
        if len(self.shape) != 4 or not self.dtype.startswith(_IMAGE_DTYPES) or self.layout == "other" or self._is_sound:
            return None
        if self.layout is not None:
            channels = self.shape[1 if self.layout == "NCHW" else 3]
            return self.layout if channels < 0 or channels in _CHANNELS else None
        if self._is_attention:
            return None
        if self.shape[1] in _CHANNELS:
            return "NCHW"
        return "NHWC" if self.shape[3] in _CHANNELS else "NCHW" if self.shape[1] < 0 else None

    @property
    def _is_attention(self) -> bool:
        """True where the tensor or one of its sizes is named after attention or a state: `past_key_values.0.key`."""
        return not _ATTENTION_WORDS.isdisjoint(_words([self.name, *(symbol or "" for symbol in self.symbols)]))

    @property
    def _is_sound(self) -> bool:
        """True where the tensor is named after sound, or a size after the batch after time: `batchx3xframesx160`."""
        sizes = [symbol or "" for symbol in self.symbols[1:]]
        return not (_SOUND_WORDS.isdisjoint(_words([self.name, *sizes])) and _TIME_WORDS.isdisjoint(_words(sizes)))

    @property
    def image_axes(self) -> tuple[int, int] | None:
        """Axes of height and width of a batch of images; None for anything else."""
        layout = self.image_layout
        return None if layout is None else (2, 3) if layout == "NCHW" else (1, 2)

    @property
    def image_size(self) -> tuple[int, ...]:
        """Height and width of a batch of images, -1 where dynamic; empty for anything else."""
        return tuple(self.shape[axis] for axis in self.image_axes or ())

    def suggested_shape(self, batch: int = 1, known: Mapping[str, int] | None = None) -> Shape:
        """A shape to suggest: fixed sizes, `known` ones by symbol, `batch` first, 640 for sides of an image, else 128."""
        usual = (batch, *_USUAL_SIZES.get(self.image_layout, [128] * len(self.shape)))
        symbols = self.symbols or (None,) * len(self.shape)
        return tuple(
            have if have >= 0 else (known or {}).get(symbol or "", size)
            for have, symbol, size in zip(self.shape, symbols, usual, strict=False)
        )

    def __str__(self) -> str:
        return f"{self.name}:{self.format_symbolic()} {self.dtype}"

    def format_symbolic(self) -> str:
        """The shape with symbols where they are known: `batchx3x640x640`."""
        symbols = self.symbols or (None,) * len(self.shape)
        parts = [symbol or "?" if size < 0 else str(size) for size, symbol in zip(self.shape, symbols, strict=True)]
        return "x".join(parts) or "scalar"

    def check(self, array: Any) -> None:
        """`FeedError` unless the array's element type, rank and fixed sizes are the ones of this spec."""
        shape = getattr(array, "shape", None)
        kind = dtype_name(array)
        cast = f"`.to(torch.{self.dtype})`" if type(array).__module__ == "torch" else f'`.astype("{self.dtype}")`'
        if shape is None:
            raise no_array(self.name, array)
        if kind != self.dtype and not (self.dtype == "string" and kind.startswith(("object", "str", "bytes"))):
            raise FeedError(f"input `{self.name}` is {kind}, expected {self.dtype}", hint=f"convert it: {cast}")
        self.check_shape(tuple(shape))

    def check_shape(self, shape: Shape) -> None:
        """`FeedError` unless the rank and the fixed sizes are the ones of this spec."""
        if len(shape) != len(self.shape):
            raise FeedError(
                f"input `{self.name}` has {len(shape)} dimensions ({format_shape(shape)}), "
                f"expected {len(self.shape)} ({self.format_symbolic()})",
                hint="a single image needs a batch dimension: `x[None]`" if len(shape) + 1 == len(self.shape) else None,
            )
        for position, (got, want) in enumerate(zip(shape, self.shape, strict=True)):
            if want >= 0 and got != want:
                raise FeedError(
                    f"input `{self.name}` is {format_shape(shape)}, expected {self.format_symbolic()}: "
                    f"dimension {position} is fixed at {want}",
                    hint=f"resize or pad dimension {position} to {want}",
                )


@dataclass(frozen=True)
class Signature(RichDisplay):
    """The inputs and outputs of a model or an engine, in the file's order."""

    inputs: tuple[TensorSpec, ...]
    """In the order of the file."""
    outputs: tuple[TensorSpec, ...]
    row_dependence: str | None = field(default=None, compare=False)
    """Why the rows of an engine's batch are not independent, so that requests must not be joined. None where they are,
    and where it was not checked."""

    def __iter__(self) -> Iterator[TensorSpec]:
        yield from self.inputs
        yield from self.outputs

    def input(self, name: str) -> TensorSpec:
        """The input of that name; `UsageError` naming the nearest one otherwise."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise UsageError(f"unknown input `{name}`", hint=suggest(name, [spec.name for spec in self.inputs]))

    def by_name(self, given: Any, which: Literal["inputs", "outputs"] = "inputs") -> Tensors:
        """Arrays by name, of any shape and dtype; one array is that of the only input or output, else `FeedError`."""
        if isinstance(given, Mapping):
            return given
        specs: tuple[TensorSpec, ...] = getattr(self, which)
        if len(specs) != 1:
            found = f"the {which} are a {type(given).__name__}, the engine has {len(specs)} {which}"
            raise FeedError(found, hint=f"pass arrays by name: {', '.join(f'`{spec.name}`' for spec in specs)}")
        return {specs[0].name: given}

    def check(self, feeds: Tensors) -> None:
        """`FeedError` unless exactly the inputs are fed, each with its dtype, rank and fixed sizes, and equal sizes for
        equal symbols.
        """
        names = [spec.name for spec in self.inputs]
        for name in feeds:
            if name not in names:
                raise FeedError(f"unknown input `{name}`", hint=suggest(name, names))
        for spec in self.inputs:
            if spec.name not in feeds:
                raise FeedError(f"input `{spec.name}` is not fed", hint=f"expected {', '.join(map(str, self.inputs))}")
            spec.check(feeds[spec.name])
        self._check_symbols(feeds)

    def _check_symbols(self, feeds: Tensors) -> None:
        seen: dict[str, tuple[int, str]] = {}
        for spec in self.inputs:
            for size, symbol in zip(feeds[spec.name].shape, spec.symbols or (), strict=False):
                if symbol is None:
                    continue
                other_size, other = seen.setdefault(symbol, (size, spec.name))
                # within one input a name does not bind: ONNX Runtime runs `x[h, h]` of 48x192
                if other_size != size and other != spec.name and spec.symbols.count(symbol) == 1:
                    raise FeedError(
                        f"`{symbol}` is {other_size} in input `{other}` and {size} in input `{spec.name}`",
                        hint="equal symbols are equal sizes: feed the same batch to every input",
                    )

    @cached_property
    def batch_symbol(self) -> str | None:
        """The symbol of the batch: one that is called so, else the one that most inputs begin with; None without any."""
        for spec in self.inputs:
            for symbol in spec.symbols:
                if symbol is not None and symbol.isidentifier() and symbol.lower().startswith("batch"):
                    return symbol
        first = Counter(spec.symbols[0] for spec in self.inputs if spec.symbols and spec.symbols[0] is not None)
        return max(first, key=lambda symbol: first[symbol], default=None)

    def batch_axes(self, spec: TensorSpec) -> tuple[int, ...]:
        """Where a tensor has the batch: at its symbol, wherever that stands, else first where that dimension is dynamic.

        Empty for a tensor without a batch that moves.
        """
        symbol = self.batch_symbol
        found = tuple(axis for axis in spec.dynamic if spec.symbols and spec.symbols[axis] == symbol is not None)
        return found or ((0,) if spec.shape and spec.shape[0] < 0 else ())

    def following_sizes(self, shapes: Mapping[str, Shape], *, batch: bool = True) -> dict[str, dict[int, int]]:
        """Sizes of the inputs that `shapes` leaves out, by name and axis, as far as they follow from it: equal symbols are
        equal sizes, and inputs have one batch. Without that of the batch where `batch` is false."""
        own = self.batch_symbol
        others = {
            spec.name: {axis: symbol for axis, symbol in enumerate(spec.symbols) if symbol not in (None, own)}
            for spec in self.inputs
        }
        sizes: dict[str | None, int] = {}
        rows: set[int] = set()
        for spec in self.inputs:
            if (given := shapes.get(spec.name)) is not None and len(given) == len(spec.shape):
                sizes |= {symbol: given[axis] for axis, symbol in others[spec.name].items()}
                rows |= {given[axis] for axis in self.batch_axes(spec) if axis not in others[spec.name]}
        found: dict[str, dict[int, int]] = {}
        for spec in self.inputs:
            if spec.name not in shapes:
                follows = {axis: sizes[symbol] for axis, symbol in others[spec.name].items() if symbol in sizes}
                if batch and len(rows) == 1:
                    follows |= {axis: min(rows) for axis in self.batch_axes(spec) if axis not in others[spec.name]}
                found[spec.name] = {axis: size for axis, size in follows.items() if spec.shape[axis] < 0}
        return found

    @property
    def batch_axis(self) -> bool:
        """True when the first dimension of every input is the batch, and dynamic."""
        return bool(self.inputs) and all(self.batch_axes(spec) == (0,) for spec in self.inputs)
