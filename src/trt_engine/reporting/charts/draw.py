"""SVG of a chart: colours come from the page's CSS classes, text stays text.

Some charts have two axes; others one row per item, its label and value above a bar, a box or an interval, for a phone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from trt_engine.format import format_or_dash
from trt_engine.reporting.charts import (
    Bars,
    Boxes,
    Chart,
    Histogram,
    IntervalChart,
    Line,
    LineChart,
    Point,
    Scatter,
    StackedBars,
)
from trt_engine.reporting.charts.axes import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    axis_labels,
    ellipsize,
    format_tick,
    line_class,
    log_ticks,
    make_scale,
    marker,
    nice_ticks,
    pad_range,
    svg_element,
    svg_text,
    text_width,
    x_axis,
    y_axis,
)


def draw(chart: Chart) -> str:
    """The chart as one `<svg>` element."""
    match chart:
        case LineChart():
            return line_chart(chart)
        case Scatter():
            return scatter(chart)
        case Histogram():
            return histogram(chart)
        case Bars():
            return bars(chart)
        case Boxes():
            return boxes(chart)
        case StackedBars():
            return stacked_bars(chart)
        case IntervalChart():
            return interval_chart(chart)


def legend(chart: Chart) -> list[tuple[str, str]]:
    """Legend entries of a chart: SVG symbol and text; empty if not needed."""
    match chart:
        case LineChart():
            found = line_legend(chart.lines)
        case Scatter():
            found = line_legend(chart.groups, front=len(chart.front) > 1)
        case Boxes():
            found = box_legend()
        case Histogram():
            found = histogram_legend(chart)
        case StackedBars():
            found = stacked_legend(chart)
        case IntervalChart():
            found = interval_legend(chart)
        case _:
            found = []
    return [
        (f'<svg class="key" viewBox="0 0 24 12" aria-hidden="true">{drawing}</svg>', name) for drawing, name in found
    ]


# ------------------------------------------------------------------------------------------------ two axes


def line_chart(chart: LineChart) -> str:
    height = 300
    points = [point for line in chart.lines for point in line.points]
    xs, ys = sorted({point.x for point in points}), [point.y for point in points]
    low_y, high_y, y_ticks = nice_ticks(0.0 if chart.from_zero else min(ys), max(ys))
    log = chart.log_x and xs[0] > 0 and xs[-1] / xs[0] < 1e30
    low_x, high_x = pad_range(xs[0], xs[-1], log)
    x_at = make_scale(low_x, high_x, LEFT, WIDTH - RIGHT, log)
    y_at = make_scale(low_y, high_y, height - BOTTOM, TOP, False)
    parts = [y_axis(y_ticks, y_at), x_axis([(x, f"{x:g}") for x in xs], x_at, height)]
    taken: list[_LabelBox] = []
    for index, line in enumerate(chart.lines):
        ordered = sorted(line.points, key=lambda point: point.x)
        if line.style != "points" and len(ordered) > 1:
            path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in ordered)
            parts.append(f'<polyline class="line {_line_class(line, index)}" points="{path}"/>')
        if line.style != "dashed":
            parts.extend(_point_marker(x_at(p.x), y_at(p.y), p, index) for p in ordered)
            parts.append(_point_labels(ordered, x_at, y_at, taken))
    parts.append(axis_labels(chart.x_label, chart.y_label, height))
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def line_legend(lines: Sequence[Line], *, front: bool = False) -> list[tuple[str, str]]:
    """Legend entries of lines and marks; empty if not needed."""
    found = []
    if len(lines) > 1:
        for index, line in enumerate(lines):
            stroke = f'<line class="line {_line_class(line, index)}" x1="1" x2="23" y1="6" y2="6"/>'
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


def _line_class(line: Line, index: int) -> str:
    return f"s{index} dashed" if line.style == "dashed" else line_class(index)


def _point_marker(x: float, y: float, point: Point, series: int) -> str:
    if point.mark == "cliff":
        size = 6.5
        shape = f"M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"
        return f'<path class="cliff" d="{shape}"/>'
    return marker(x, y, series, " hollow" if point.mark == "unstable" else "")


_LabelBox = tuple[float, float, float, float]
"""Left, top, right and bottom of a label."""


def _point_labels(
    points: Sequence[Point], x_at: Callable[[float], float], y_at: Callable[[float], float], taken: list[_LabelBox]
) -> str:
    """Labels above their points, or below in a dip; the last and the first have priority."""
    parts = []
    for index in (len(points) - 1, *range(len(points) - 1)):
        point = points[index]
        if not point.label:
            continue
        half = 4.5 * len(point.label)
        middle = min(max(x_at(point.x), LEFT + half), WIDTH - half)
        around = [points[near].y for near in (index - 1, index + 1) if 0 <= near < len(points)]
        dip = bool(around) and point.y < min(around) and y_at(point.y) < y_at(0) - 30
        base = y_at(point.y) + (22 if point.mark == "cliff" or dip else -10)
        box = (middle - half - 4, base - 13, middle + half + 4, base + 3)
        if any(box[0] < c and a < box[2] and box[1] < d and b < box[3] for a, b, c, d in taken):
            continue
        taken.append(box)
        parts.append(svg_text(middle, base, point.label, "value middle"))
    return "".join(parts)


def scatter(chart: Scatter) -> str:
    height = 320
    points = [point for group in chart.groups for point in group.points]
    low_x, high_x, x_ticks = nice_ticks(0.0, max(point.x for point in points))
    ys = [point.y for point in points]
    spread = (max(ys) - min(ys)) or abs(max(ys)) * 0.02 or 1.0
    low_y, high_y, y_ticks = nice_ticks(min(ys) - 0.12 * spread, max(ys) + 0.12 * spread)
    x_at = make_scale(low_x, high_x, LEFT, WIDTH - RIGHT - 6, False)
    y_at = make_scale(low_y, high_y, height - BOTTOM, TOP, False)
    parts = [y_axis(y_ticks, y_at), x_axis([(x, format_tick(x)) for x in x_ticks], x_at, height)]
    if len(chart.front) > 1:
        path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in sorted(chart.front, key=lambda p: p.x))
        parts.append(f'<polyline class="line front" points="{path}"/>')
    taken = [(x_at(p.x) - 6, y_at(p.y) - 6, x_at(p.x) + 6, y_at(p.y) + 6) for p in points]
    for index, group in enumerate(chart.groups):
        parts.extend(_point_marker(x_at(p.x), y_at(p.y), p, index) for p in group.points)
    for point in points:
        parts.append(_place_label(x_at(point.x), y_at(point.y), point.label, taken, height))
    parts.append(axis_labels(chart.x_label, chart.y_label, height))
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def _place_label(x: float, y: float, label: str, taken: list[tuple[float, float, float, float]], height: float) -> str:
    """Place the label at a free position around its point; omit it if there is none."""
    half = text_width(label) / 2
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
            return svg_text(x + right, base, label, "value middle")
    return ""


def histogram(chart: Histogram) -> str:
    height = 240
    ascending = sorted(chart.samples)
    low, high = ascending[0], _axis_end(ascending)
    late = len(ascending) - bisect.bisect_right(ascending, high)
    if high <= low * 1.000001 or high <= 0:  # a single value: one bar with padding
        low, high = low * 0.99 or -0.01, high * 1.01 or 0.01
    log = low > 0 and 4 < high / low < 1e30
    kept = len(ascending) - late
    bins = max(8, min(44, math.ceil(math.sqrt(kept) * 1.2)))
    right = WIDTH - RIGHT - (26 if late else 0)
    x_at = make_scale(low, high, LEFT, right, log)
    step = (right - LEFT) / bins
    counts = [0] * bins
    for value in ascending[:kept]:
        counts[min(bins - 1, max(0, int((x_at(value) - LEFT) / step)))] += 1
    _, top, y_ticks = nice_ticks(0, max(*counts, late), whole=True)
    y_at = make_scale(0, top, height - BOTTOM, TOP - 14, False)
    ticks = log_ticks(low, high) if log else [x for x in nice_ticks(low, high)[2] if low <= x <= high]
    parts = [y_axis(y_ticks, y_at), x_axis([(x, format_tick(x)) for x in ticks], x_at, height)]

    def bar(style: str, x: float, width: float, many: int) -> str:
        tall = max(1.5, y_at(0) - y_at(many))  # a single late query is seen too
        return f'<rect class="{style}" x="{x:.1f}" y="{y_at(0) - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"/>'

    parts += [bar("bar", LEFT + i * step + 0.5, max(1.0, step - 1), many) for i, many in enumerate(counts) if many]
    if late:
        parts.append(bar("bar late", WIDTH - RIGHT - 14, 14, late))
    for index, (_, value) in enumerate(chart.marks):
        x = x_at(value) if value <= high else WIDTH - RIGHT - 7.0  # among the late ones
        style = f"mark m{index % 2}"
        parts.append(f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 20}" y2="{height - BOTTOM}"/>')
    parts.append(axis_labels(chart.x_label + (", log scale" if log else ""), "queries", height))
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def histogram_legend(chart: Histogram) -> list[tuple[str, str]]:
    """Legend entries of the marks with their values, and of the bar beyond the axis."""
    found = [
        (f'<line class="mark m{index % 2}" x1="12" x2="12" y1="0" y2="12"/>', f"{name} {format_or_dash(value)}")
        for index, (name, value) in enumerate(chart.marks)
    ]
    ascending = sorted(chart.samples)
    late = len(ascending) - bisect.bisect_right(ascending, _axis_end(ascending))
    if late:
        said = f"{late:,} more, up to {format_or_dash(ascending[-1])}"
        found.append(('<rect class="bar late" x="5" y="0" width="14" height="12"/>', said))
    return found


def _axis_end(ascending: Sequence[float]) -> float:
    """End of the axis: just beyond p99 (all but three of few samples), so that outliers do not compress the other bars."""
    many = len(ascending)
    body = ascending[max(many - 1 - max(many // 100, min(many // 20, 3)), 0)]
    limit = body + 0.35 * (body - ascending[0])
    return min(ascending[-1], limit) if limit > ascending[0] else ascending[-1]


# ------------------------------------------------------------------------------------------------ rows


_OTHER_PART = 9
"""Index of the part outside the categories."""
_AXIS_LEFT = 20
"""Left end of the axis where labels are above the rows."""


def bars(chart: Bars) -> str:
    row = 34
    height = row * len(chart.bars) + 8
    longest = max((value for _, value in chart.bars), default=0) or 1
    parts = []
    for index, ((name, value), label) in enumerate(zip(chart.bars, chart.labels, strict=True)):
        y = index * row + 16
        parts.append(_row_label(name, label, y))
        parts.append(f'<rect class="track" x="2" y="{y + 5}" width="{WIDTH - 4}" height="7" rx="1.5"/>')
        width = max(1.5, (WIDTH - 4) * value / longest)
        parts.append(f'<rect class="bar" x="2" y="{y + 5}" width="{width:.1f}" height="7" rx="1.5"/>')
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def boxes(chart: Boxes) -> str:
    row = 44
    height = row * len(chart.boxes) + BOTTOM + 4
    low, high = min(box.low for box in chart.boxes), max(box.high for box in chart.boxes)
    log = low > 0 and 8 < high / low < 1e30
    if log:
        low, high = low / (high / low) ** 0.02, high * (high / low) ** 0.02
        ticks = log_ticks(low, high)
    else:
        low, high, ticks = nice_ticks(0.0 if low >= 0 and low < high * 0.5 else low, high)
    x_at = make_scale(low, high, _AXIS_LEFT, WIDTH - RIGHT, log)
    parts = [_grid_lines(ticks, x_at, height, row, len(chart.boxes))]
    for index, box in enumerate(chart.boxes):
        y = index * row + 16
        parts.append(_row_label(box.label, f"{format_or_dash(box.median)} {chart.unit}", y))
        a, b, c, d, e = (x_at(value) for value in (box.low, box.q1, box.median, box.q3, box.high))
        parts.append(f'<line class="whisker" x1="{a:.1f}" x2="{e:.1f}" y1="{y + 15}" y2="{y + 15}"/>')
        for end in (a, e):
            parts.append(f'<line class="whisker" x1="{end:.1f}" x2="{end:.1f}" y1="{y + 11}" y2="{y + 19}"/>')
        parts.append(f'<rect class="box" x="{b:.1f}" y="{y + 8}" width="{max(1.5, d - b):.1f}" height="14" rx="1.5"/>')
        parts.append(f'<line class="median" x1="{c:.1f}" x2="{c:.1f}" y1="{y + 6}" y2="{y + 24}"/>')
    parts.append(svg_text(WIDTH / 2, height - 8, chart.unit + (", log scale" if log else ""), "label middle"))
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def box_legend() -> list[tuple[str, str]]:
    return [
        ('<line class="median" x1="12" x2="12" y1="0" y2="12"/>', "median"),
        ('<rect class="box" x="2" y="1" width="20" height="10" rx="1.5"/>', "middle half"),
        ('<path class="whisker" d="M1 6h22M1 2v8M23 2v8"/>', "p1 to p99"),
    ]


def stacked_bars(chart: StackedBars) -> str:
    row = 48
    height = row * len(chart.stacks) + 8
    longest = max((sum(stack.values) for stack in chart.stacks), default=0) or 1
    parts = []
    for index, stack in enumerate(chart.stacks):
        y = index * row + 16
        parts.append(_row_label(stack.label, f"{format_or_dash(sum(stack.values))} {chart.unit}", y))
        x = 2.0
        for (_, which), value in zip(chart.parts, stack.values, strict=True):
            width = (WIDTH - 4) * value / longest
            if width < 0.4:
                x += width
                continue
            inner = max(0.4, width - (1.2 if width > 2.5 else 0))
            parts.append(f'<rect class="c{which}" x="{x:.1f}" y="{y + 6}" width="{inner:.1f}" height="19"/>')
            if width >= 6 + text_width(digits := str(which + 1), 9):
                parts.append(svg_text(x + inner / 2, y + 20, digits, _digit_class(which)))
            x += width
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def stacked_legend(chart: StackedBars) -> list[tuple[str, str]]:
    return [
        (
            f'<rect class="c{which}" x="4" y="-2" width="16" height="16"/>'
            + svg_text(12, 10.5, str(which + 1), _digit_class(which)),
            name,
        )
        for name, which in chart.parts
    ]


def _digit_class(which: int) -> str:
    """CSS classes of a number in a segment; the last segment colour is pale."""
    return "on plain middle" if which >= _OTHER_PART else "on middle"


def interval_chart(chart: IntervalChart) -> str:
    row = 44
    height = row * len(chart.spans) + BOTTOM + 4
    ends = [
        0.0,
        *(end for span in chart.spans for end in (span.low, span.high)),
        *(limit.value for limit in chart.limits),
    ]
    low, high, ticks = nice_ticks(min(ends), max(ends))
    x_at = make_scale(low, high, _AXIS_LEFT, WIDTH - RIGHT, False)
    parts = [_grid_lines(ticks, x_at, height, row, len(chart.spans))]
    zero = x_at(0)
    for index in range(len(chart.spans)):
        y = index * row + 16
        parts.append(f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="{y + 5}" y2="{y + 25}"/>')
    for limit in chart.limits:
        x = x_at(limit.value)
        for index in limit.spans:
            y = index * row + 16
            parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 5}" y2="{y + 25}"/>')
    for index, span in enumerate(chart.spans):
        y = index * row + 16
        said = f"{format_signed(span.value)} {chart.unit} ({format_signed(span.low)} to {format_signed(span.high)})"
        parts.append(_row_label(span.label, said, y))
        a, b, c = (x_at(value) for value in (span.low, span.value, span.high))
        parts.append(f'<line class="span" x1="{a:.1f}" x2="{c:.1f}" y1="{y + 15}" y2="{y + 15}"/>')
        for end in (a, c):
            parts.append(f'<line class="span" x1="{end:.1f}" x2="{end:.1f}" y1="{y + 10}" y2="{y + 20}"/>')
        hollow = "" if span.excludes_zero else " hollow"
        parts.append(f'<circle class="dot s0{hollow}" cx="{b:.1f}" cy="{y + 15}" r="4.5"/>')
    parts.append(svg_text(WIDTH / 2, height - 8, chart.x_label, "label middle"))
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def interval_legend(chart: IntervalChart) -> list[tuple[str, str]]:
    found = [
        ('<circle class="dot s0" cx="12" cy="6" r="4.5"/>', "a difference"),
        ('<circle class="dot s0 hollow" cx="12" cy="6" r="4.5"/>', "no difference found"),
    ]
    found.append(('<line class="zero" x1="12" x2="12" y1="0" y2="12"/>', "no change"))
    named = dict.fromkeys(limit.name for limit in chart.limits)
    return found + [('<line class="limit" x1="12" x2="12" y1="0" y2="12"/>', f"gate {name}") for name in named]


def format_signed(value: float) -> str:
    """Format a percentage with its sign."""
    digits = 1 if abs(value) >= 1 or not value else 2
    return f"{value:+,.{digits}f}".replace("-", "−")


def _row_label(name: str, value: str, y: float) -> str:
    """A row's label and value; the label is shortened to fit."""
    shown = ellipsize(name, WIDTH - 16 - text_width(value))
    return svg_text(2, y, shown, "name") + svg_text(WIDTH - 2, y, value, "value end")


def _grid_lines(ticks: Sequence[float], x_at: Callable[[float], float], height: float, row: float, rows: int) -> str:
    """Grid lines beside each row's mark, not through the labels."""
    tops = [index * row + 21 for index in range(rows)]
    lines = (
        f'<line class="grid" x1="{x_at(at):.1f}" x2="{x_at(at):.1f}" y1="{y:g}" y2="{y + 20:g}"/>'
        for at in ticks
        for y in tops
    )
    return "".join(lines) + x_axis([(at, format_tick(at)) for at in ticks], x_at, height, left=_AXIS_LEFT)
