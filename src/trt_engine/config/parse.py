"""Parsers of setting values: shapes, sizes in bytes, durations, percentiles, `-O name=value`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trt_engine.device import parse_device
from trt_engine.errors import ProfileError, UsageError
from trt_engine.tensors import Shape
from trt_engine.units import parse_size

SCALAR_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": (dict.fromkeys("1 true on yes".split(), True) | dict.fromkeys("0 false off no".split(), False)).__getitem__,
}
_SEPARATOR = re.compile(r"\s*[,;]\s*|\s+")
_SHAPES_HINT = "write shapes as `images:1x3x640x640`, several with commas"


def parse_shape(text: str, whole: str) -> Shape:
    """One shape: `1x3x640x640`, `[1,3,640,640]`, `scalar` or nothing."""
    inner = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
    if inner.strip() in ("", "scalar"):
        return ()
    sizes = re.split(r"\s*[,]\s*|\s+" if inner is not text else r"[x*]", inner.strip())
    if not all(re.fullmatch(r"-?[0-9]+", size) for size in sizes):
        raise UsageError(f"cannot read the shape in `{whole}`", hint=_SHAPES_HINT)
    return tuple(map(int, sizes))


def _split_top_level(text: str) -> list[str]:
    """The text split at commas, semicolons and blanks outside quotes and brackets."""
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


def shapes_by_name(text: str) -> list[tuple[str, list[str]]]:
    """Input names with the shapes that follow each: `a:1x3,8x3 'Input:0':4` as `a` with two and `Input:0` with one.

    The last colon parts name and shape, because names have colons and shapes have none.
    """
    found: list[tuple[str, list[str]]] = []
    for piece in _split_top_level(text.strip()):
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


def as_shape(name: str, sizes: Any) -> Shape:
    """A shape that came as a Python value."""
    if isinstance(sizes, str):
        return parse_shape(sizes.strip(), f"{name}:{sizes}")
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
        return {name: as_shape(name, sizes) for name, sizes in text.items()}
    shapes: dict[str, Shape] = {}
    for name, parts in shapes_by_name(text):
        if name in shapes:
            raise UsageError(f"input `{name}` is named twice in `{text}`", hint="one shape for each input")
        if len(parts) > 1 and not all(part.isdecimal() for part in parts):
            hint = "one shape for each input"
            if len(parts) == 3:
                hint += f"; smallest, usual and largest are `--profile {name}:{','.join(parts)}`"
            raise UsageError(f"input `{name}` has {len(parts)} shapes in `{text}`", hint=hint)
        shapes[name] = parse_shape(f"[{','.join(parts)}]" if len(parts) > 1 else parts[0], text)
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


def device_name(value: str | int) -> str:
    """`cpu`, `cuda:0`: one spelling for each device; a bare number is a CUDA device; nothing is the backend's own."""
    if value == "":
        return ""
    kind, number = parse_device(value)
    return "cpu" if kind == "cpu" else f"{kind}:{number}"


def parse_bytes(text: str | int) -> int:
    """A size as people type it, or a number of bytes as programs have it."""
    return text if isinstance(text, int) else parse_size(text)


def parse_workspace_mib(text: str | int) -> int:
    nbytes = parse_size(text)
    if nbytes >> 63:  # builders count it in 64 bits
        raise UsageError(f"the size `{text}` is more than any machine has", hint="`32GiB` is the default")
    return max(1, nbytes >> 20) if nbytes else 0


def parse_count(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"`{text}` is not a whole number", hint="write it as `64`") from None


def parse_batch_sizes(value: str | int | Iterable[int]) -> tuple[int, ...]:
    """Sizes of batches, or other counts, in order, each once: `1,2,4`."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    try:
        found = tuple(sorted({int(part) for part in parts}))
    except (TypeError, ValueError):
        raise UsageError(f"cannot read the list `{value}`", hint="whole numbers, as `1,2,4,8`") from None
    if found and found[0] < 1:
        raise UsageError(f"`{found[0]}` is less than 1", hint="whole numbers from 1, as `1,2,4,8`")
    return found


def parse_graphs(value: bool | str | Iterable[int] | None) -> bool | tuple[int, ...] | None:
    """True, False, or the sizes graphs are captured for; None is unset."""
    if isinstance(value, bool) or value is None:
        return value
    switch = SCALAR_PARSERS["bool"]
    try:
        return (
            bool(switch(value.strip().lower()))
            if isinstance(value, str) and "," not in value
            else parse_batch_sizes(value)
        )
    except (KeyError, ValueError):
        return parse_batch_sizes(value)


def parse_names(text: str | Sequence[str]) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()] if isinstance(text, str) else text
    names = tuple(names) if isinstance(names, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise UsageError(f"cannot read the names `{text}`", hint="write them as `a,b`, or as a list of strings")
    return names


def parse_gpus(text: str | Sequence[str]) -> tuple[str, ...]:
    names = parse_names(text)
    if not names and text != ():
        raise UsageError("`gpus` names no GPU", hint="`--gpus sm89,sm120`; without it: this machine's GPU, else all")
    return names


def parse_percentiles(text: str | Sequence[float]) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in (text.split(",") if isinstance(text, str) else text))
    except ValueError:
        raise UsageError(f"cannot read the percentiles `{text}`", hint="`--percentile 90,95,99`") from None
    if not all(0 <= value <= 100 for value in values):
        raise UsageError(f"the percentiles {text} are not all between 0 and 100", hint="`--percentile 90,95,99`")
    return values
