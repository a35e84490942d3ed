"""Lines, points and histograms: charts with two axes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from trt_engine.reporting.charts.kinds import Histogram, Line, LineChart, Point, Scatter
from trt_engine.reporting.charts.parts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    dash,
    labels,
    log_ticks,
    marker,
    nice,
    padded,
    room,
    scale,
    svg,
    text,
    tick,
    x_axis,
    y_axis,
)
from trt_engine.reporting.figures import number

__all__ = ["histogram", "line_chart", "line_keys", "scatter"]


def line_chart(chart: LineChart) -> str:
    height = 300
    points = [point for line in chart.lines for point in line.points]
    xs, ys = sorted({point.x for point in points}), [point.y for point in points]
    low_y, high_y, y_ticks = nice(0.0 if chart.from_zero else min(ys), max(ys))
    log = chart.log_x and xs[0] > 0
    low_x, high_x = padded(xs[0], xs[-1], log)
    x_at = scale(low_x, high_x, LEFT, WIDTH - RIGHT, log)
    y_at = scale(low_y, high_y, height - BOTTOM, TOP, False)
    parts = [y_axis(y_ticks, y_at), x_axis([(x, f"{x:g}") for x in xs], x_at, height)]
    for index, line in enumerate(chart.lines):
        ordered = sorted(line.points, key=lambda point: point.x)
        if line.style != "points" and len(ordered) > 1:
            path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in ordered)
            parts.append(f'<polyline class="line {_stroke(line, index)}" points="{path}"/>')
        if line.style != "dashed":
            parts.extend(_dot(x_at(p.x), y_at(p.y), p, index) for p in ordered)
            parts.append(_point_labels(ordered, x_at, y_at))
    parts.append(labels(chart.x_label, chart.y_label, height))
    return svg(chart.key, chart.title, chart.description, height, parts)


def line_keys(lines: Sequence[Line], *, front: bool = False) -> list[tuple[str, str]]:
    """What lines and marks mean: a small drawing and its words; empty where nothing needs telling apart."""
    found = []
    if len(lines) > 1:
        for index, line in enumerate(lines):
            stroke = f'<line class="line {_stroke(line, index)}" x1="1" x2="23" y1="6" y2="6"/>'
            dot = marker(12, 6, index)
            found.append(
                ((stroke if line.style != "points" else "") + (dot if line.style != "dashed" else ""), line.name)
            )
    if front:
        found.append(('<line class="line front" x1="1" x2="23" y1="6" y2="6"/>', "best trade-offs"))
    marks = {point.mark for line in lines for point in line.points}
    if "unstable" in marks:
        found.append((marker(12, 6, 0, " hollow"), "not stable"))
    if "cliff" in marks:
        found.append(('<path class="cliff" d="M12 0l6 6l-6 6l-6 -6z"/>', "cliff: avoid this batch size"))
    return found


def _stroke(line: Line, index: int) -> str:
    return f"s{index} dashed" if line.style == "dashed" else dash(index)


def _dot(x: float, y: float, point: Point, series: int) -> str:
    if point.mark == "cliff":
        size = 6.5
        shape = f"M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"
        return f'<path class="cliff" d="{shape}"/>'
    return marker(x, y, series, " hollow" if point.mark == "unstable" else "")


def _point_labels(points: Sequence[Point], x_at: Callable[[float], float], y_at: Callable[[float], float]) -> str:
    """Labels above their points, or below in a dip of the line; the last and the first win where room is short."""
    parts = []
    taken: list[tuple[float, float]] = []
    for index in (len(points) - 1, *range(len(points) - 1)):
        point = points[index]
        half = 4.5 * len(point.label)
        middle = min(max(x_at(point.x), LEFT + half), WIDTH - half)
        if not point.label or any(middle - half < end and start < middle + half for start, end in taken):
            continue
        taken.append((middle - half - 4, middle + half + 4))
        around = [points[near].y for near in (index - 1, index + 1) if 0 <= near < len(points)]
        dip = bool(around) and point.y < min(around) and y_at(point.y) < y_at(0) - 30
        below = point.mark == "cliff" or dip
        parts.append(text(middle, y_at(point.y) + (22 if below else -10), point.label, "value middle"))
    return "".join(parts)


def scatter(chart: Scatter) -> str:
    height = 320
    points = [point for group in chart.groups for point in group.points]
    low_x, high_x, x_ticks = nice(0.0, max(point.x for point in points))
    ys = [point.y for point in points]
    spread = (max(ys) - min(ys)) or abs(max(ys)) * 0.02 or 1.0
    low_y, high_y, y_ticks = nice(min(ys) - 0.12 * spread, max(ys) + 0.12 * spread)
    x_at = scale(low_x, high_x, LEFT, WIDTH - RIGHT - 6, False)
    y_at = scale(low_y, high_y, height - BOTTOM, TOP, False)
    parts = [y_axis(y_ticks, y_at), x_axis([(x, tick(x)) for x in x_ticks], x_at, height)]
    if len(chart.front) > 1:
        path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in sorted(chart.front, key=lambda p: p.x))
        parts.append(f'<polyline class="line front" points="{path}"/>')
    taken = [(x_at(p.x) - 6, y_at(p.y) - 6, x_at(p.x) + 6, y_at(p.y) + 6) for p in points]
    for index, group in enumerate(chart.groups):
        parts.extend(_dot(x_at(p.x), y_at(p.y), p, index) for p in group.points)
    for point in points:
        parts.append(_free_label(x_at(point.x), y_at(point.y), point.label, taken, height))
    parts.append(labels(chart.x_label, chart.y_label, height))
    return svg(chart.key, chart.title, chart.description, height, parts)


def _free_label(x: float, y: float, label: str, taken: list[tuple[float, float, float, float]], height: float) -> str:
    """The label where nothing else stands, around its point; none where everything is full, which the table makes up for."""
    half = room(label) / 2
    for right, down in (
        (0, -10),
        (0, 20),
        (half + 9, 5),
        (-half - 9, 5),
        (half + 9, -9),
        (-half - 9, -9),
        (0, -24),
        (0, 34),
    ):
        left, base = x + right - half, y + down
        box = (left, base - 11, left + 2 * half, base + 2)
        inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 16 and box[3] <= height - BOTTOM
        if inside and not any(box[0] < c and a < box[2] and box[1] < d and b < box[3] for a, b, c, d in taken):
            taken.append(box)
            return text(x + right, base, label, "value middle")
    return ""


def histogram(chart: Histogram) -> str:
    height = 240
    ascending = sorted(chart.samples)
    low, high = ascending[0], _shown_until(ascending)
    late = len(ascending) - bisect.bisect_right(ascending, high)
    if high <= low * 1.000001 or high <= 0:  # nothing to spread: one bar, with room around it
        low, high = low * 0.99 or -0.01, high * 1.01 or 0.01
    log = low > 0 and high / low > 4
    kept = len(ascending) - late
    bins = max(8, min(44, math.ceil(math.sqrt(kept) * 1.2)))
    right = WIDTH - RIGHT - (26 if late else 0)
    x_at = scale(low, high, LEFT, right, log)
    step = (right - LEFT) / bins
    counts = [0] * bins
    for value in ascending[:kept]:
        counts[min(bins - 1, max(0, int((x_at(value) - LEFT) / step)))] += 1
    _, top, y_ticks = nice(0, max(*counts, late), whole=True)
    y_at = scale(0, top, height - BOTTOM, TOP - 18 + 14 * len(chart.marks), False)
    ticks = log_ticks(low, high) if log else [x for x in nice(low, high)[2] if low <= x <= high]
    parts = [y_axis(y_ticks, y_at), x_axis([(x, tick(x)) for x in ticks], x_at, height)]

    def bar(style: str, x: float, width: float, many: int) -> str:
        tall = max(1.5, y_at(0) - y_at(many))  # a single late query is seen too
        return f'<rect class="{style}" x="{x:.1f}" y="{y_at(0) - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"/>'

    parts += [bar("bar", LEFT + i * step + 0.5, max(1.0, step - 1), many) for i, many in enumerate(counts) if many]
    if late:
        parts.append(bar("bar late", WIDTH - RIGHT - 14, 14, late))
    for row, (name, value) in enumerate(chart.marks):
        y = TOP - 26 + 14 * row
        x = x_at(value) if value <= high else WIDTH - RIGHT - 7.0  # among the late ones
        label = f"{name} {number(value)}"
        after = x + 8 + 8.6 * len(label) < WIDTH
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8}" y2="{height - BOTTOM}"/>')
        parts.append(text(x + (5 if after else -5), y, label, "value" if after else "value end"))
    if late:
        said = f"{late:,} more, up to {number(ascending[-1])}"
        parts.append(text(WIDTH - RIGHT, min(y_at(late), y_at(0) - 1.5) - 6, said, "tick end"))
    parts.append(labels(chart.x_label + (", log scale" if log else ""), "queries", height))
    return svg(chart.key, chart.title, chart.description, height, parts)


def _shown_until(ascending: Sequence[float]) -> float:
    """Where the axis ends: a little after p99 (after all but three, of a few samples), so that a few late queries do not
    squeeze all others into one bar."""
    many = len(ascending)
    body = ascending[max(many - 1 - max(many // 100, min(many // 20, 3)), 0)]
    limit = body + 0.35 * (body - ascending[0])
    return min(ascending[-1], limit) if limit > ascending[0] else ascending[-1]
