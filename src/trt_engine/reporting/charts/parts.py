"""What every chart is made of: the frame, text that fits, axes, scales, and marks that differ in shape as well as colour."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Sequence

__all__ = [
    "BOTTOM",
    "LEFT",
    "RIGHT",
    "SERIES",
    "TOP",
    "WIDTH",
    "dash",
    "escape",
    "fitted",
    "labels",
    "log_ticks",
    "marker",
    "nice",
    "padded",
    "room",
    "scale",
    "svg",
    "text",
    "tick",
    "x_axis",
    "y_axis",
]

WIDTH = 480
LEFT, RIGHT, TOP, BOTTOM = 54, 18, 40, 46
SERIES = 8
"""Colours, markers and dashes before they begin again."""


def svg(key: str, title: str, description: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def escape(words: str) -> str:
    return html.escape(words, quote=True)


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def room(words: str, each: float = 9.0) -> float:
    """About the width of the words in the chart's units, on a phone, where its letters are largest."""
    return each * sum(
        0 if unicodedata.combining(c) else 1.9 if unicodedata.east_asian_width(c) in "WF" else 1.35 if c in _WIDE else 1
        for c in words
    )


_WIDE = frozenset("MW@%mw—…ѠШЩЖЮФ")


def fitted(words: str, width: float) -> str:
    """The words, or their beginning and end around an ellipsis: labels of cells differ at the end."""
    if room(words) <= width:
        return words
    kept = len(words)
    while kept > 2 and room(words[: (kept + 1) // 2] + "…" + words[len(words) - kept // 2 :]) > width:
        kept -= 1
    return words[: (kept + 1) // 2] + "…" + words[len(words) - kept // 2 :]


def labels(x_label: str, y_label: str, height: float) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return text(middle, height - 8, x_label, "label middle") + text(0, 12, y_label, "label")


def y_axis(ticks: Sequence[float], y_at: Callable[[float], float]) -> str:
    parts = []
    for value in ticks:
        y = y_at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 8, y + 4, tick(value), "tick end"))
    return "".join(parts)


def x_axis(
    ticks: Sequence[tuple[float, str]], x_at: Callable[[float], float], height: float, *, left: float = LEFT
) -> str:
    """Tick labels that do not run into each other."""
    parts = []
    floor = height - BOTTOM
    taken = -math.inf
    for value, label in ticks:
        x = x_at(value)
        half = 4.6 * len(label)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor:g}" y2="{floor + 4:g}"/>')
        if x - half > taken and x + half <= WIDTH + 4:
            parts.append(text(x, floor + 18, label, "tick middle"))
            taken = x + half + 5
    parts.append(f'<line class="axis" x1="{left:g}" x2="{WIDTH - RIGHT}" y1="{floor:g}" y2="{floor:g}"/>')
    return "".join(parts)


def marker(x: float, y: float, series: int, more: str = "") -> str:
    """The point of a series: a shape of its own, since colour alone tells some readers nothing."""
    style = f"dot s{series % SERIES}{more}"
    kind = series % SERIES
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


def dash(series: int) -> str:
    """The style of a solid series' line: the first is whole, the others are dashed, each in its way."""
    return f"s{series % SERIES} d{series % SERIES}" if series % SERIES else "s0"


def scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    """Where a value lies between `start` and `end`."""
    if log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return start + (end - start) * ((math.log(value) if log else value) - low) / span

    return at


def padded(low: float, high: float, log: bool) -> tuple[float, float]:
    """A little room at both ends, so that no point sits on the frame."""
    if log:
        space = 1.15 if low == high else (high / low) ** 0.05
        return low / space, high * space
    space = (high - low) * 0.04 or 1.0
    return low - space, high + space


def nice(low: float, high: float, whole: bool = False) -> tuple[float, float, list[float]]:
    """Bounds and about five ticks on 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + (abs(low) or 1.0)
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


def tick(value: float) -> str:
    """As short as it stays exact: `0.53`, `20,000`, `1.5M`."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 100 * factor or (factor > 1e3 and abs(value) >= factor):
            return f"{value / factor:.6g}{unit}".replace("-", "−")
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}").replace("-", "−")
