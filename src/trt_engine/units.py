"""Parsers of sizes and durations: `32GiB`, `200ms`; the number of elements of a shape."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from trt_engine.errors import UsageError

_MOST_ELEMENTS = 1 << 63
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_UNITS = {  # base 2, as trtexec's single letters are; MB spelled out is read the same way (docs/size.md)
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
    if match is None or match[2].lower() not in _UNITS or math.isinf(float(match[1])):
        raise UsageError(
            f"cannot read the size `{str(text)[:60]}`", hint="write it as `32GiB`, `512M`, `4096K` or `1024B`"
        )
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
    if match is None or math.isinf(float(match[1])):
        raise UsageError(f"cannot read the duration `{text[:60]}`", hint="write it as `10s`, `200ms` or `2min`")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def parse_milliseconds(text: str | float) -> float:
    """Milliseconds of `50`, `50ms`, `0.2s`; a bare number is milliseconds."""
    found = parse_duration(text)
    return found * 1e3 if isinstance(text, str) and text.strip()[-1].isalpha() else found


def count_elements(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape. 2^63 stands for all larger numbers: a file may state any sizes, and their product
    takes as long to compute and to print as there are sizes."""
    if len(shape) <= 8:
        return min(math.prod(shape), _MOST_ELEMENTS)
    total = 1
    for size in shape:
        total *= size
        if not -_MOST_ELEMENTS < total < _MOST_ELEMENTS:
            return 0 if 0 in shape else _MOST_ELEMENTS
    return total
