"""Charts drawn as SVG of our own: colours come from the page (classes, no fixed colour), text stays text.

A chart is a value; `draw` makes its SVG. Each has a title and a description for those who cannot see it.
"""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trt_engine.reporting.figures import number

__all__ = ["Bars", "Chart", "Histogram", "Line", "LineChart", "Point", "draw", "legend"]

WIDTH = 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 18, 40, 46


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str = ""
    mark: Literal["", "unstable", "cliff"] = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a line chart; `style` also numbers its colour."""

    name: str
    points: tuple[Point, ...]
    style: Literal["solid", "dashed", "points"] = "solid"


@dataclass(frozen=True, slots=True)
class LineChart:
    key: str
    title: str
    description: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    from_zero: bool = True


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of samples; a long tail gets a logarithmic axis."""

    key: str
    title: str
    description: str
    x_label: str
    samples: tuple[float, ...]
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    key: str
    title: str
    description: str
    unit: str
    bars: tuple[tuple[str, float], ...]


Chart = LineChart | Histogram | Bars


def draw(chart: Chart) -> str:
    """The chart as one `<svg>` element."""
    if isinstance(chart, LineChart):
        return _line_chart(chart)
    if isinstance(chart, Histogram):
        return _histogram(chart)
    return _bars(chart)


def legend(chart: Chart) -> list[tuple[str, str]]:
    """What the lines and marks of a chart mean: a small drawing and its words; empty where nothing needs telling apart."""
    if not isinstance(chart, LineChart):
        return []
    found = []
    if len(chart.lines) > 1:
        for index, line in enumerate(chart.lines):
            stroke = f'<line class="line s{index % 4} {line.style}" x1="1" x2="23" y1="6" y2="6"/>'
            dot = f'<circle class="dot s{index % 4}" cx="12" cy="6" r="4"/>'
            found.append(
                ((stroke if line.style != "points" else "") + (dot if line.style != "dashed" else ""), line.name)
            )
    marks = {point.mark for line in chart.lines for point in line.points}
    if "unstable" in marks:
        found.append(('<circle class="dot s0 hollow" cx="12" cy="6" r="4"/>', "not stable"))
    if "cliff" in marks:
        found.append(('<path class="cliff" d="M12 0l6 6l-6 6l-6 -6z"/>', "cliff: avoid this batch size"))
    return [
        (f'<svg class="key" viewBox="0 0 24 12" aria-hidden="true">{drawing}</svg>', name) for drawing, name in found
    ]


# ---------------------------------------------------------------------------------------------- kinds of charts


def _line_chart(chart: LineChart) -> str:
    height = 300
    points = [point for line in chart.lines for point in line.points]
    xs, ys = sorted({point.x for point in points}), [point.y for point in points]
    low_y, high_y, y_ticks = _nice(0.0 if chart.from_zero else min(ys), max(ys))
    low_x, high_x = _padded(xs[0], xs[-1], chart.log_x)
    x_at = _scale(low_x, high_x, _LEFT, WIDTH - _RIGHT, chart.log_x)
    y_at = _scale(low_y, high_y, height - _BOTTOM, _TOP, False)
    parts = [_y_axis(y_ticks, y_at), _x_axis([(x, f"{x:g}") for x in xs], x_at, height)]
    for index, line in enumerate(chart.lines):
        ordered = sorted(line.points, key=lambda point: point.x)
        if line.style != "points" and len(ordered) > 1:
            path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in ordered)
            parts.append(f'<polyline class="line s{index % 4} {line.style}" points="{path}"/>')
        if line.style != "dashed":
            parts.extend(_dot(x_at(p.x), y_at(p.y), p, index % 4) for p in ordered)
            parts.append(_point_labels(ordered, x_at, y_at))
    parts.append(_labels(chart.x_label, chart.y_label, height))
    return _svg(chart.key, chart.title, chart.description, height, parts)


def _dot(x: float, y: float, point: Point, style: int) -> str:
    if point.mark == "cliff":  # a shape of its own: colour alone tells some readers nothing
        size = 6.5
        shape = f"M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"
        return f'<path class="cliff" d="{shape}"/>'
    hollow = " hollow" if point.mark == "unstable" else ""
    return f'<circle class="dot s{style}{hollow}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _point_labels(points: Sequence[Point], x_at: Callable[[float], float], y_at: Callable[[float], float]) -> str:
    """Labels above their points, or below in a dip of the line; the last and the first win where room is short."""
    parts = []
    taken: list[tuple[float, float]] = []
    for index in (len(points) - 1, *range(len(points) - 1)):
        point = points[index]
        half = 3.8 * len(point.label)
        middle = min(max(x_at(point.x), _LEFT + half), WIDTH - half)
        if not point.label or any(middle - half < end and start < middle + half for start, end in taken):
            continue
        taken.append((middle - half - 4, middle + half + 4))
        around = [points[near].y for near in (index - 1, index + 1) if 0 <= near < len(points)]
        dip = bool(around) and point.y < min(around) and y_at(point.y) < y_at(0) - 30
        below = point.mark == "cliff" or dip
        parts.append(_text(middle, y_at(point.y) + (22 if below else -10), point.label, "value middle"))
    return "".join(parts)


def _histogram(chart: Histogram) -> str:
    height = 240
    ascending = sorted(chart.samples)
    low, high = ascending[0], _shown_until(ascending)
    late = len(ascending) - bisect.bisect_right(ascending, high)
    if high <= low * 1.000001 or high <= 0:  # nothing to spread: one bar, with room around it
        low, high = low * 0.99 or -0.01, high * 1.01 or 0.01
    log = low > 0 and high / low > 4
    kept = len(ascending) - late
    bins = max(8, min(44, math.ceil(math.sqrt(kept) * 1.2)))
    right = WIDTH - _RIGHT - (26 if late else 0)
    x_at = _scale(low, high, _LEFT, right, log)
    step = (right - _LEFT) / bins
    counts = [0] * bins
    for value in ascending[:kept]:
        counts[min(bins - 1, max(0, int((x_at(value) - _LEFT) / step)))] += 1
    _, top, y_ticks = _nice(0, max(*counts, late), whole=True)
    y_at = _scale(0, top, height - _BOTTOM, _TOP - 18 + 14 * len(chart.marks), False)
    ticks = _log_ticks(low, high) if log else [x for x in _nice(low, high)[2] if low <= x <= high]
    parts = [_y_axis(y_ticks, y_at), _x_axis([(x, _tick(x)) for x in ticks], x_at, height)]

    def bar(style: str, x: float, width: float, many: int) -> str:
        tall = max(1.5, y_at(0) - y_at(many))  # a single late query is seen too
        return f'<rect class="{style}" x="{x:.1f}" y="{y_at(0) - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"/>'

    parts += [bar("bar", _LEFT + i * step + 0.5, max(1.0, step - 1), many) for i, many in enumerate(counts) if many]
    if late:
        parts.append(bar("bar late", WIDTH - _RIGHT - 14, 14, late))
    for row, (name, value) in enumerate(chart.marks):
        y = _TOP - 26 + 14 * row
        x = x_at(value) if value <= high else WIDTH - _RIGHT - 7.0  # among the late ones
        label = f"{name} {number(value)}"
        after = x + 8 + 7 * len(label) < WIDTH
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8}" y2="{height - _BOTTOM}"/>')
        parts.append(_text(x + (5 if after else -5), y, label, "value" if after else "value end"))
    if late:
        said = f"{late:,} more, up to {number(ascending[-1])}"
        parts.append(_text(WIDTH - _RIGHT, min(y_at(late), y_at(0) - 1.5) - 6, said, "tick end"))
    parts.append(_labels(chart.x_label + (", log scale" if log else ""), "queries", height))
    return _svg(chart.key, chart.title, chart.description, height, parts)


def _shown_until(ascending: Sequence[float]) -> float:
    """Where the axis ends: a little after p99 (after all but three, of a few samples), so that a few late queries do not
    squeeze all others into one bar."""
    many = len(ascending)
    body = ascending[max(many - 1 - max(many // 100, min(many // 20, 3)), 0)]
    limit = body + 0.35 * (body - ascending[0])
    return min(ascending[-1], limit) if limit > ascending[0] else ascending[-1]


def _bars(chart: Bars) -> str:
    row = 34
    height = row * len(chart.bars) + 8
    longest = max((value for _, value in chart.bars), default=0) or 1
    parts = []
    for index, (name, value) in enumerate(chart.bars):
        y = index * row + 16
        shown = name if len(name) <= 44 else name[:43] + "…"
        parts.append(_text(2, y, shown, "name"))
        parts.append(_text(WIDTH - 2, y, f"{number(value)} {chart.unit}", "value end"))
        parts.append(f'<rect class="track" x="2" y="{y + 5}" width="{WIDTH - 4}" height="7" rx="1.5"/>')
        width = max(1.5, (WIDTH - 4) * value / longest)
        parts.append(f'<rect class="bar" x="2" y="{y + 5}" width="{width:.1f}" height="7" rx="1.5"/>')
    return _svg(chart.key, chart.title, chart.description, height, parts)


# ---------------------------------------------------------------------------------------------- parts of a chart


def _svg(key: str, title: str, description: str, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{_escape(title)}</title><desc id="{key}-desc">{_escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{_escape(text)}</text>'


def _labels(x_label: str, y_label: str, height: int) -> str:
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return _text(middle, height - 8, x_label, "label middle") + _text(0, 12, y_label, "label")


def _y_axis(ticks: Sequence[float], y_at: Callable[[float], float]) -> str:
    parts = []
    for value in ticks:
        y = y_at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, _tick(value), "tick end"))
    return "".join(parts)


def _x_axis(ticks: Sequence[tuple[float, str]], x_at: Callable[[float], float], height: int) -> str:
    """Tick labels that do not run into each other."""
    parts = []
    floor = height - _BOTTOM
    taken = -math.inf
    for value, label in ticks:
        x = x_at(value)
        half = 3.9 * len(label)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>')
        if x - half > taken:
            parts.append(_text(x, floor + 18, label, "tick middle"))
            taken = x + half + 5
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>')
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    """Where a value lies between `start` and `end`."""
    if log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return start + (end - start) * ((math.log(value) if log else value) - low) / span

    return at


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    """A little room at both ends, so that no point sits on the frame."""
    if log:
        room = 1.15 if low == high else (high / low) ** 0.05
        return low / room, high * room
    room = (high - low) * 0.04 or 1.0
    return low - room, high + room


def _nice(low: float, high: float, whole: bool = False) -> tuple[float, float, list[float]]:
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


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of each decade between the bounds."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    times = (1, 2, 5) if last - first <= 3 else (1,)
    return [one * 10.0**ten for ten in range(first, last + 1) for one in times if low <= one * 10.0**ten <= high]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
