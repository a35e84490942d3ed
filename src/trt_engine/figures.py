"""Figures in words: as many digits as mean something, in the units that TensorRT's tools speak.

What verbs print and reports show is written by these, so that a value reads the same wherever it stands.
"""

from __future__ import annotations

import math

__all__ = [
    "MIB",
    "TINY",
    "decimals",
    "figure",
    "in_ms",
    "in_us",
    "percent",
    "quantity",
    "scaled",
    "si",
    "size",
    "with_module",
]

MIB = 1 << 20
TINY = 1e-4
"""What is smaller has an exponent: nobody counts more zeros."""


def figure(value: float, digits: int = 3, *, thousands: str = "") -> str:
    """A number with at least so many digits that count: `0.260`, `4.50`, `764`, `12345`."""
    if 0 < abs(value) < TINY:
        return f"{value:.{digits - 1}e}"
    return f"{value:{thousands}.{decimals(value, digits)}f}"


def decimals(value: float, digits: int = 3) -> int:
    """The decimals a number takes for so many digits that count; none for 0 and for what is no number."""
    if not value or not math.isfinite(value):
        return 0
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # as rounded: 9.999 has the decimals of 10.0
    return max(0, digits - 1 - exponent)


def with_module(name: str, module: str | None) -> str:
    """The name of a node, its PyTorch module first where that is known: `layer2.0.conv1 [node_Conv_157]`."""
    return f"{module} [{name}]" if module and module != name else name


def in_ms(value: float) -> str:
    return f"{figure(value)} ms"


def in_us(value: float) -> str:
    return f"{figure(value)} us"


def quantity(value: float, unit: str) -> str:
    """A number with its unit, rates scaled: `2.53 us`, `4.01 TB/s`."""
    value, unit = scaled(value, unit)
    return f"{figure(value)} {unit}"


_STEPS = "MGT"


def scaled(value: float, unit: str) -> tuple[float, str]:
    """A rate in the thousands that suit it: 0.26 `TFLOP/s` are 260 `GFLOP/s`, 4012 `GB/s` are 4.012 `TB/s`.

    Nothing is above `T`: data sheets have 1979 TFLOP/s. What is no rate stays as it is.
    """
    if not unit.endswith("/s") or (step := _STEPS.find(unit[0])) < 0:
        return value, unit
    while abs(value) >= 1000 and step + 1 < len(_STEPS):
        value, step = value / 1000, step + 1
    while 0 < abs(value) < 1 and step:
        value, step = value * 1000, step - 1
    return value, _STEPS[step] + unit[1:]


def size(nbytes: float) -> str:
    """Bytes in the largest unit that holds one: `512 B`, `687.5 KiB`, `140.4 GiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def si(value: int) -> str:
    """A count of operations: `38,240`, `103.9 M`, `4.089 G`."""
    for unit, factor in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= factor:
            return f"{figure(value / factor, 4)} {unit}"
    return f"{value:,}"


def percent(share: float) -> str:
    """A share in whole percents: `87 %`, and `<1 %` for what is little and not nothing."""
    shown = f"{100 * share:.0f} %"
    return "<1 %" if share > 0 and shown == "0 %" else shown
