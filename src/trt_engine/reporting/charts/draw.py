"""SVG of a chart: colours come from the page's CSS classes, text stays text.

Some charts have two axes; others one row per item, its label and value above a bar, a box or an interval, for a phone.
"""

from __future__ import annotations

import bisect
import html
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from trt_engine.format import format_difference, format_or_dash
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

_AXIS_LEFT = 20
"""Left end of the axis where labels are above the rows."""
_OTHER_PART = 9
"""Index of the part outside the categories; its colour is pale."""


def draw(chart: Chart) -> str:
    """The chart as one `<svg>` element."""
    match chart:
        case LineChart() | Scatter():
            height, parts = _points(chart)
        case Histogram():
            height, parts = _histogram(chart)
        case Bars():
            height, parts = _bars(chart)
        case Boxes():
            height, parts = _boxes(chart)
        case StackedBars():
            height, parts = _stacked_bars(chart)
        case IntervalChart():
            height, parts = _intervals(chart)
    return svg_element(chart.key, chart.title, chart.description, height, parts)


def legend(chart: Chart) -> list[tuple[str, str]]:
    """Legend entries of a chart: SVG symbol and text; empty if not needed."""
    match chart:
        case LineChart():
            found = _line_legend(chart.lines)
        case Scatter():
            found = _line_legend(chart.groups, front=len(chart.front) > 1)
        case Boxes():
            found = [
                (rule_element("median", 12, 12, 0, 12), "median"),
                (rect_element("box", 2, 1, 20, 10), "middle half"),
                ('<path class="whisker" d="M1 6h22M1 2v8M23 2v8"/>', "p1 to p99"),
            ]
        case Histogram():
            found = _histogram_legend(chart)
        case StackedBars():
            segments = (rect_element(f"c{which}", 4, -2, 16, 16) + _digit(12, 10.5, which) for _, which in chart.parts)
            found = [(drawing, name) for drawing, (name, _) in zip(segments, chart.parts, strict=True)]
        case IntervalChart():
            found = [(marker(12, 6, 0), "a difference"), (marker(12, 6, 0, " hollow"), "no difference found")]
            found.append((rule_element("zero", 12, 12, 0, 12), "no change"))
            names = dict.fromkeys(limit.name for limit in chart.limits)
            found += [(rule_element("limit", 12, 12, 0, 12), f"gate {name}") for name in names]
        case _:
            found = []
    return [
        (f'<svg class="key" viewBox="0 0 24 12" aria-hidden="true">{drawing}</svg>', name) for drawing, name in found
    ]


# ------------------------------------------------------------------------------------------------ two axes


_Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a label or a marker."""


def _points(chart: LineChart | Scatter) -> tuple[float, list[str]]:
    """Lines by x from zero up; of a scatter the points, and the front that connects the best ones."""
    lines = chart.lines if isinstance(chart, LineChart) else chart.groups
    points = [point for line in lines for point in line.points]
    xs, ys = sorted({point.x for point in points}), [point.y for point in points]
    if isinstance(chart, LineChart):
        height, log = 300, chart.log_x and xs[0] > 0 and xs[-1] / xs[0] < 1e30
        low_y, high_y, y_ticks = nice_ticks(0.0, max(ys))
        low_x, high_x = pad_range(xs[0], xs[-1], log)
        x_at = make_scale(low_x, high_x, LEFT, WIDTH - RIGHT, log)
        x_ticks = [(x, f"{x:g}") for x in xs]
    else:
        height, spread = 320, 0.12 * ((max(ys) - min(ys)) or abs(max(ys)) * 0.02 or 1.0)
        low_y, high_y, y_ticks = nice_ticks(min(ys) - spread, max(ys) + spread)
        low_x, high_x, ticks = nice_ticks(0.0, xs[-1])
        x_at = make_scale(low_x, high_x, LEFT, WIDTH - RIGHT - 6, False)
        x_ticks = [(x, format_tick(x)) for x in ticks]
    y_at = make_scale(low_y, high_y, height - BOTTOM, TOP, False)
    parts = [y_axis(y_ticks, y_at, chart.y_label), x_axis(x_ticks, x_at, height, chart.x_label)]
    if isinstance(chart, Scatter) and len(chart.front) > 1:
        parts.append(_polyline("front", chart.front, x_at, y_at))
    around = [(x_at(p.x) - 6, y_at(p.y) - 6, x_at(p.x) + 6, y_at(p.y) + 6) for p in points]
    taken = [] if isinstance(chart, LineChart) else around
    for index, line in enumerate(lines):
        if line.style != "points" and len(line.points) > 1:
            parts.append(_polyline(_line_class(line, index), line.points, x_at, y_at))
        if line.style != "dashed":
            parts += [_point_marker(x_at(p.x), y_at(p.y), p, index) for p in line.points]
            if isinstance(chart, LineChart):
                parts.append(_point_labels(sorted(line.points, key=lambda point: point.x), x_at, y_at, taken))
    if isinstance(chart, Scatter):
        parts += [_place_label(x_at(point.x), y_at(point.y), point.label, taken, height) for point in points]
    return height, parts


def _polyline(style: str, points: Iterable[Point], x_at: Scale, y_at: Scale) -> str:
    path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in sorted(points, key=lambda point: point.x))
    return f'<polyline class="line {style}" points="{path}"/>'


def _line_class(line: Line, index: int) -> str:
    """CSS classes of a series' line: the first is solid, others have distinct dashes."""
    series = index % SERIES_STYLES
    return f"s{index} dashed" if line.style == "dashed" else f"s{series} d{series}" if series else "s0"


def _point_marker(x: float, y: float, point: Point, series: int) -> str:
    if point.mark == "cliff":
        return f'<path class="cliff" d="M{x:.1f} {y - 6.5:.1f}l6.5 6.5l-6.5 6.5l-6.5 -6.5z"/>'
    return marker(x, y, series, " hollow" if point.mark == "unstable" else "")


def _line_legend(lines: Sequence[Line], *, front: bool = False) -> list[tuple[str, str]]:
    """Legend entries of lines and marks; empty if not needed."""
    found = []
    for index, line in enumerate(lines if len(lines) > 1 else ()):
        stroke = rule_element(f"line {_line_class(line, index)}", 1, 23, 6, 6) if line.style != "points" else ""
        found.append((stroke + (marker(12, 6, index) if line.style != "dashed" else ""), line.name))
    if front:
        found.append((rule_element("line front", 1, 23, 6, 6), "best trade-offs"))
    marks = {point.mark for line in lines for point in line.points}
    if "unstable" in marks:
        found.append((marker(12, 6, 0, " hollow"), "not stable"))
    if "cliff" in marks:
        found.append(('<path class="cliff" d="M12 0l6 6l-6 6l-6 -6z"/>', "cliff: avoid this batch size"))
    return found


def _is_free(box: _Box, taken: Iterable[_Box]) -> bool:
    return not any(box[0] < c and a < box[2] and box[1] < d and b < box[3] for a, b, c, d in taken)


def _point_labels(points: Sequence[Point], x_at: Scale, y_at: Scale, taken: list[_Box]) -> str:
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
        if _is_free(box, taken):
            taken.append(box)
            parts.append(svg_text(middle, base, point.label, "value middle"))
    return "".join(parts)


def _place_label(x: float, y: float, label: str, taken: list[_Box], height: float) -> str:
    """Place the label at a free position around its point; omit it if there is none."""
    half = text_width(label) / 2
    side = half + 9
    for right, down in ((0, -10), (0, 20), (side, 5), (-side, 5), (side, -9), (-side, -9), (0, -24), (0, 34)):
        left, base = x + right - half, y + down
        box = (left, base - 11, left + 2 * half, base + 2)
        inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 16 and box[3] <= height - BOTTOM
        if inside and _is_free(box, taken):
            taken.append(box)
            return svg_text(x + right, base, label, "value middle")
    return ""


def _histogram(chart: Histogram) -> tuple[float, list[str]]:
    height = 240
    kept, late = _split_late(chart.samples)
    low, high = kept[0], kept[-1] if not late else _axis_end([*kept, *late])
    if high <= low * 1.000001 or high <= 0:  # a single value: one bar with padding
        low, high = low * 0.99 or -0.01, high * 1.01 or 0.01
    log = low > 0 and 4 < high / low < 1e30
    bins = max(8, min(44, math.ceil(math.sqrt(len(kept)) * 1.2)))
    right = WIDTH - RIGHT - (26 if late else 0)
    x_at = make_scale(low, high, LEFT, right, log)
    step = (right - LEFT) / bins
    counts = [0] * bins
    for value in kept:
        counts[min(bins - 1, max(0, int((x_at(value) - LEFT) / step)))] += 1
    _, top, y_ticks = nice_ticks(0, max(*counts, len(late)), whole=True)
    y_at = make_scale(0, top, height - BOTTOM, TOP - 14, False)
    ticks = log_ticks(low, high) if log else [x for x in nice_ticks(low, high)[2] if low <= x <= high]
    x_label = chart.x_label + (", log scale" if log else "")
    parts = [y_axis(y_ticks, y_at, "queries"), x_axis([(x, format_tick(x)) for x in ticks], x_at, height, x_label)]

    def bar(style: str, x: float, width: float, many: int) -> str:
        tall = max(1.5, y_at(0) - y_at(many))  # a single late query is seen too
        return rect_element(style, x, y_at(0) - tall, width, tall)

    parts += [bar("bar", LEFT + i * step + 0.5, max(1.0, step - 1), many) for i, many in enumerate(counts) if many]
    if late:
        parts.append(bar("bar late", WIDTH - RIGHT - 14, 14, len(late)))
    for index, (_, value) in enumerate(chart.marks):
        x = x_at(value) if value <= high else WIDTH - RIGHT - 7.0  # among the late ones
        parts.append(rule_element(f"mark m{index % 2}", x, x, TOP - 20, height - BOTTOM))
    return height, parts


def _histogram_legend(chart: Histogram) -> list[tuple[str, str]]:
    """Legend entries of the marks with their values, and of the bar beyond the axis."""
    found = [
        (rule_element(f"mark m{index % 2}", 12, 12, 0, 12), f"{name} {format_or_dash(value)}")
        for index, (name, value) in enumerate(chart.marks)
    ]
    if late := _split_late(chart.samples)[1]:
        said = f"{len(late):,} more, up to {format_or_dash(late[-1])}"
        found.append((rect_element("bar late", 5, 0, 14, 12), said))
    return found


def _split_late(samples: Iterable[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The ascending samples on the axis, and those beyond it."""
    ascending = sorted(samples)
    at = bisect.bisect_right(ascending, _axis_end(ascending))
    return ascending[:at], ascending[at:]


def _axis_end(ascending: Sequence[float]) -> float:
    """End of the axis: just beyond p99 (all but three of few samples), so that outliers do not compress the other bars."""
    many = len(ascending)
    body = ascending[max(many - 1 - max(many // 100, min(many // 20, 3)), 0)]
    limit = body + 0.35 * (body - ascending[0])
    return min(ascending[-1], limit) if limit > ascending[0] else ascending[-1]


# ------------------------------------------------------------------------------------------------ rows


def _bars(chart: Bars) -> tuple[float, list[str]]:
    longest = max((value for _, value in chart.bars), default=0) or 1
    parts = []
    for y, (name, value), label in zip(_rows(chart.bars, 34), chart.bars, chart.labels, strict=True):
        width = max(1.5, (WIDTH - 4) * value / longest)
        parts += [_row_label(name, label, y), rect_element("track", 2, y + 5, WIDTH - 4, 7)]
        parts.append(rect_element("bar", 2, y + 5, width, 7))
    return 34 * len(chart.bars) + 8, parts


def _boxes(chart: Boxes) -> tuple[float, list[str]]:
    low, high = min(box.low for box in chart.boxes), max(box.high for box in chart.boxes)
    log = low > 0 and 8 < high / low < 1e30
    if log:
        low, high = low / (high / low) ** 0.02, high * (high / low) ** 0.02
        ticks = log_ticks(low, high)
    else:
        low, high, ticks = nice_ticks(0.0 if low >= 0 and low < high * 0.5 else low, high)
    x_at = make_scale(low, high, _AXIS_LEFT, WIDTH - RIGHT, log)
    height, parts = _row_axis(ticks, x_at, len(chart.boxes), chart.unit + (", log scale" if log else ""))
    for y, box in zip(_rows(chart.boxes, 44), chart.boxes, strict=True):
        parts.append(_row_label(box.label, f"{format_or_dash(box.median)} {chart.unit}", y))
        a, b, c, d, e = (x_at(value) for value in (box.low, box.q1, box.median, box.q3, box.high))
        parts += _whiskers("whisker", a, e, y, 4)
        parts.append(rect_element("box", b, y + 8, max(1.5, d - b), 14))
        parts.append(rule_element("median", c, c, y + 6, y + 24))
    return height, parts


def _stacked_bars(chart: StackedBars) -> tuple[float, list[str]]:
    longest = max((sum(stack.values) for stack in chart.stacks), default=0) or 1
    parts = []
    for y, stack in zip(_rows(chart.stacks, 48), chart.stacks, strict=True):
        parts.append(_row_label(stack.label, f"{format_or_dash(sum(stack.values))} {chart.unit}", y))
        x = 2.0
        for (_, which), value in zip(chart.parts, stack.values, strict=True):
            width = (WIDTH - 4) * value / longest
            if width >= 0.4:
                inner = max(0.4, width - (1.2 if width > 2.5 else 0))
                parts.append(rect_element(f"c{which}", x, y + 6, inner, 19))
                if width >= 6 + text_width(str(which + 1), 9):
                    parts.append(_digit(x + inner / 2, y + 20, which))
            x += width
    return 48 * len(chart.stacks) + 8, parts


def _digit(x: float, y: float, which: int) -> str:
    """The number of a segment."""
    return svg_text(x, y, str(which + 1), "on plain middle" if which >= _OTHER_PART else "on middle")


def _intervals(chart: IntervalChart) -> tuple[float, list[str]]:
    ends = [end for span in chart.spans for end in (span.low, span.high)] + [limit.value for limit in chart.limits]
    low, high, ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends))
    x_at = make_scale(low, high, _AXIS_LEFT, WIDTH - RIGHT, False)
    height, parts = _row_axis(ticks, x_at, len(chart.spans), chart.x_label)
    for index, (y, span) in enumerate(zip(_rows(chart.spans, 44), chart.spans, strict=True)):
        lines = [("zero", 0.0), *(("limit", limit.value) for limit in chart.limits if index in limit.spans)]
        parts += [rule_element(style, x_at(value), x_at(value), y + 5, y + 25) for style, value in lines]
        values = span.value, span.low, span.high
        shown, start, end = (format_difference(one, 1 if abs(one) >= 1 or not one else 2) for one in values)
        parts.append(_row_label(span.label, f"{shown} {chart.unit} ({start} to {end})", y))
        parts += _whiskers("span", x_at(span.low), x_at(span.high), y, 5)
        parts.append(marker(x_at(span.value), y + 15, 0, "" if span.excludes_zero else " hollow"))
    return height, parts


def _rows(items: Sequence[object], height: int) -> range:
    """The base lines of the rows' labels."""
    return range(16, height * len(items) + 16, height)


def _row_label(name: str, value: str, y: float) -> str:
    """A row's label and value; the label is shortened to fit."""
    shown = ellipsize(name, WIDTH - 16 - text_width(value))
    return svg_text(2, y, shown, "name") + svg_text(WIDTH - 2, y, value, "value end")


def _whiskers(style: str, start: float, end: float, y: float, half: float) -> list[str]:
    """A horizontal line with its two ends."""
    ends = [rule_element(style, x, x, y + 15 - half, y + 15 + half) for x in (start, end)]
    return [rule_element(style, start, end, y + 15, y + 15), *ends]


def _row_axis(ticks: Sequence[float], x_at: Callable[[float], float], rows: int, label: str) -> tuple[float, list[str]]:
    """Height, and the axis with grid lines beside each row's mark, not through the labels."""
    height = 44 * rows + BOTTOM + 4
    lines = [
        rule_element("grid", x_at(at), x_at(at), 44 * row + 21, 44 * row + 41) for at in ticks for row in range(rows)
    ]
    named = [(at, format_tick(at)) for at in ticks]
    return height, [
        *lines,
        x_axis(named, x_at, height, "", left=_AXIS_LEFT),
        svg_text(WIDTH / 2, height - 8, label, "label middle"),
    ]


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
