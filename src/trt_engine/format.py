"""Numbers, units, lists of names and library messages as text, the same in every verb and report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

MIB = 1 << 20
TINY = 1e-4
"""Smaller values get an exponent."""


def join_names(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` names: `a, b and 3 more`."""
    return separator.join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def quoted(name: object) -> str:
    """A path as a word of a command that is shown."""
    return shlex.quote(str(name))


def shorten_middle(text: str, limit: int) -> str:
    """The text, its middle left out where it is longer: a name ends with what tells it apart, a message with its reason."""
    head = limit // 3
    return text if len(text) <= limit else f"{text[:head].rstrip()} ... {text[head + 5 - limit :].lstrip()}"


def library_reason(error: BaseException | str, *, whole: bool = False) -> str:
    """A library's message on one line, up to its reason: the first line, and those after one that ends with a colon; all of
    it with `whole`.

    A longer one loses its middle, for the reason is often its end; an error without any text is its class.
    """
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    count = next((at for at, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = shorten_middle(" ".join(lines if whole else lines[:count]), 400)
    return text or ("" if isinstance(error, str) else type(error).__name__)


def format_number(value: float, digits: int = 3, *, thousands: str = "") -> str:
    """A number with at least `digits` significant digits: `0.260`, `4.50`, `764`, `12345`."""
    if 0 < abs(value) < TINY:
        return f"{value:.{digits - 1}e}"
    return f"{value:{thousands}.{decimal_places(value, digits)}f}"


def decimal_places(value: float, digits: int = 3) -> int:
    """Decimal places for `digits` significant digits; 0 for zero and for NaN or infinity."""
    if not value or not math.isfinite(value):
        return 0
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # as rounded: 9.999 has the decimals of 10.0
    return max(0, digits - 1 - exponent)


def format_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_label(name: str, module: str | None) -> str:
    """The name of a node, its PyTorch module first where that is known: `layer2.0.conv1 [node_Conv_157]`."""
    return f"{module} [{name}]" if module and module != name else name


def format_streams(images_per_s: float, fps: float) -> tuple[str, str]:
    """Video streams that a rate serves: `13 streams`, `at 30 fps`; below one stream a camera of fewer frames."""
    streams = math.floor(min(images_per_s / fps, 1e15)) if fps > 0 else 0
    if streams >= 1:
        return f"{streams:,} stream{'' if streams == 1 else 's'}", f"at {fps:g} fps"
    frames = math.floor(images_per_s)
    return ("1 camera", f"at {frames} fps") if frames >= 1 else ("no camera", f"{format_number(images_per_s)} images/s")


def format_ms(value: float) -> str:
    return f"{format_number(value)} ms"


def format_us(value: float) -> str:
    return f"{format_number(value)} us"


def format_quantity(value: float, unit: str) -> str:
    """A number with its unit, rates scaled: `2.53 us`, `4.01 TB/s`."""
    value, unit = scale_unit(value, unit)
    return f"{format_number(value)} {unit}"


_RATE_PREFIXES = "MGT"


def scale_unit(value: float, unit: str) -> tuple[float, str]:
    """A rate in the thousands that suit it: 0.26 `TFLOP/s` are 260 `GFLOP/s`, 4012 `GB/s` are 4.012 `TB/s`.

    Nothing is above `T`: data sheets have 1979 TFLOP/s. Units other than rates stay unchanged.
    """
    if not unit.endswith("/s") or (step := _RATE_PREFIXES.find(unit[0])) < 0:
        return value, unit
    while abs(value) >= 1000 and step + 1 < len(_RATE_PREFIXES):
        value, step = value / 1000, step + 1
    while 0 < abs(value) < 1 and step:
        value, step = value * 1000, step - 1
    return value, _RATE_PREFIXES[step] + unit[1:]


def format_bytes(nbytes: float) -> str:
    """Bytes in the largest unit that holds one: `512 B`, `687.5 KiB`, `140.4 GiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_count(value: int) -> str:
    """A count of operations: `38,240`, `103.9 M`, `4.089 G`."""
    for unit, factor in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= factor:
            return f"{format_number(value / factor, 4)} {unit}"
    return f"{value:,}"


def format_percent(share: float) -> str:
    """A fraction as integer percent: `87 %`, `<1 %` for small nonzero values."""
    shown = f"{100 * share:.0f} %"
    return "<1 %" if share > 0 and shown == "0 %" else shown


def format_or_dash(value: float | None, significant: int = 3) -> str:
    """Format a number with at least `significant` digits and whole thousands: `0.0123`, `4.56`, `12,345`."""
    if value is None or not math.isfinite(value):
        return "–"
    return format_number(value, significant, thousands=",")


def format_column(values: Sequence[float | None], significant: int = 3) -> tuple[str, ...]:
    """Format a column of numbers, with the same decimals if they suit both the smallest and the largest."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
    fine = decimal_places(min(sizes), significant) if sizes else 0
    coarse = decimal_places(max(sizes), max(significant + 2, 5)) if sizes else 0
    if coarse < fine - significant + 1 or (sizes and min(sizes) < TINY):  # the smallest would show as zero
        return tuple(format_or_dash(value, significant) for value in values)
    return tuple(
        "–" if value is None or not math.isfinite(value) else f"{value:,.{min(fine, coarse)}f}" for value in values
    )


def format_int(value: int) -> str:
    return f"{value:,}"


def format_difference(value: float | None, digits: int = 1) -> str:
    """Format with sign: `+1.2`, `−0.4`."""
    return "–" if value is None else f"{value:+,.{digits}f}".replace("-", "−")
