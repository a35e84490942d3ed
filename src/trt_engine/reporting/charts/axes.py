"""Chart elements: frame, fitted text, axes, scales and markers."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Sequence

WIDTH = 480
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 40, 46
Scale = Callable[[float], float]
"""A function that maps a value to a position."""
SERIES_STYLES = 8
"""Number of distinct colours, markers and dashes."""


def svg_element(key: str, title: str, description: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def escape(label: str) -> str:
    return html.escape(label, quote=True)


def svg_text(x: float, y: float, label: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(label)}</text>'


def rule_element(style: str, x1: float, x2: float, y1: float, y2: float) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def rect_element(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def text_width(label: str, each: float = 9.0) -> float:
    """Approximate text width in chart units at the largest (phone) font."""
    return each * sum(map(_relative_width, label))


def _relative_width(c: str) -> float:
    if unicodedata.combining(c):
        return 0
    return 1.9 if unicodedata.east_asian_width(c) in "WF" else 1.35 if c in _WIDE_CHARACTERS else 1


_WIDE_CHARACTERS = frozenset("MW@%mw—…ѠШЩЖЮФ")


def ellipsize(label: str, width: float) -> str:
    """Fit the text to the width with an ellipsis in the middle."""
    if text_width(label) <= width:
        return label
    kept = len(label)
    while kept > 2 and text_width(label[: (kept + 1) // 2] + "…" + label[len(label) - kept // 2 :]) > width:
        kept -= 1
    return label[: (kept + 1) // 2] + "…" + label[len(label) - kept // 2 :]


def y_axis(ticks: Sequence[float], y_at: Scale, label: str) -> str:
    parts = [svg_text(0, 12, label, "label")]
    for value in ticks:
        y = y_at(value)
        parts.append(rule_element("grid", LEFT, WIDTH - RIGHT, y, y))
        parts.append(svg_text(LEFT - 8, y + 4, format_tick(value), "tick end"))
    return "".join(parts)


def x_axis(ticks: Sequence[tuple[float, str]], x_at: Scale, height: float, label: str, *, left: float = LEFT) -> str:
    """The x axis, without overlapping tick labels."""
    floor = height - BOTTOM
    parts = [svg_text((LEFT + WIDTH - RIGHT) / 2, height - 8, label, "label middle")] if label else []
    taken = -math.inf
    for value, name in ticks:
        x = x_at(value)
        half = 4.6 * len(name)
        parts.append(rule_element("axis", x, x, floor, floor + 4))
        if x - half > taken and x + half <= WIDTH + 4:
            parts.append(svg_text(x, floor + 18, name, "tick middle"))
            taken = x + half + 5
    return "".join([*parts, rule_element("axis", left, WIDTH - RIGHT, floor, floor)])


def marker(x: float, y: float, series: int, more: str = "") -> str:
    """The marker of a series, with a distinct shape for colour-blind readers."""
    style = f"dot s{series % SERIES_STYLES}{more}"
    kind = series % SERIES_STYLES
    if kind == 0:
        return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if kind == 1:
        return f'<rect class="{style}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
    paths = {
        2: "m0 -5l4.6 8.4h-9.2z",
        3: "m0 5l-4.6 -8.4h9.2z",
        4: "m-4 -4l8 8m0 -8l-8 8",
        5: "m0 -5v10m-5 -5h10",
        6: "m-5 -2.5h10v5h-10z",
        7: "m-2.5 -5h5v10h-5z",
    }
    return f'<path class="{style}" d="M{x:.1f} {y:.1f}{paths[kind]}"/>'


def series_class(series: int) -> str:
    """CSS classes of a series' line: the first is solid, others have distinct dashes."""
    return f"s{series % SERIES_STYLES} d{series % SERIES_STYLES}" if series % SERIES_STYLES else "s0"


def make_scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    """A function that maps a value to a position between `start` and `end`."""
    if log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return start + (end - start) * ((math.log(value) if log else value) - low) / span

    return at


def pad_range(low: float, high: float, log: bool) -> tuple[float, float]:
    """Pad the range at both ends."""
    if log:
        space = 1.15 if low == high else (high / low) ** 0.05
        return low / space, high * space
    space = (high - low) * 0.04 or 1.0
    return low - space, high + space


_MAX_BOUND, _MIN_SPREAD = 1e200, 1e-200


def nice_ticks(low: float, high: float, whole: bool = False) -> tuple[float, float, list[float]]:
    """Bounds and about five ticks on 1, 2 or 5 times a power of ten."""
    low, high = max(low, -_MAX_BOUND), min(high, _MAX_BOUND)
    if high - low <= abs(low) * 1e-12 + _MIN_SPREAD:  # too narrow for ticks
        high = low + (abs(low) if abs(low) > _MIN_SPREAD else 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= raw)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of each decade between the bounds."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    times = (1, 2, 5) if last - first <= 3 else (1,)
    return [one * 10.0**ten for ten in range(first, last + 1) for one in times if low <= one * 10.0**ten <= high]


def format_tick(value: float) -> str:
    """Format a tick in its shortest exact form: `0.53`, `20,000`, `1.5M`."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 100 * factor or (factor > 1e3 and abs(value) >= factor):
            return f"{value / factor:.6g}{unit}".replace("-", "−")
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}").replace("-", "−")
