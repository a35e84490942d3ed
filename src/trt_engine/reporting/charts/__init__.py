"""Charts drawn as SVG of our own: colours come from the page (classes, no fixed colour), text stays text.

A chart is a value; `draw` makes its SVG. Each has a title and a description for those who cannot see it; series differ in
shape and dashes, parts in their number, so that nothing hangs on colour.
"""

from __future__ import annotations

from trt_engine.reporting.charts import lines, rows
from trt_engine.reporting.charts.kinds import (
    Bars,
    Box,
    Boxes,
    Chart,
    Forest,
    Histogram,
    Limit,
    Line,
    LineChart,
    Point,
    Scatter,
    Span,
    Stack,
    Stacked,
)
from trt_engine.reporting.charts.parts import WIDTH

__all__ = [
    "WIDTH",
    "Bars",
    "Box",
    "Boxes",
    "Chart",
    "Forest",
    "Histogram",
    "Limit",
    "Line",
    "LineChart",
    "Point",
    "Scatter",
    "Span",
    "Stack",
    "Stacked",
    "draw",
    "legend",
]


def draw(chart: Chart) -> str:
    """The chart as one `<svg>` element."""
    match chart:
        case LineChart():
            return lines.line_chart(chart)
        case Scatter():
            return lines.scatter(chart)
        case Histogram():
            return lines.histogram(chart)
        case Bars():
            return rows.bars(chart)
        case Boxes():
            return rows.boxes(chart)
        case Stacked():
            return rows.stacked(chart)
        case Forest():
            return rows.forest(chart)


def legend(chart: Chart) -> list[tuple[str, str]]:
    """What the marks of a chart mean: a small drawing and its words; empty where nothing needs telling apart."""
    match chart:
        case LineChart():
            found = lines.line_keys(chart.lines)
        case Scatter():
            found = lines.line_keys(chart.groups, front=len(chart.front) > 1)
        case Boxes():
            found = rows.box_keys()
        case Stacked():
            found = rows.stacked_keys(chart)
        case Forest():
            found = rows.forest_keys(chart)
        case _:
            found = []
    return [
        (f'<svg class="key" viewBox="0 0 24 12" aria-hidden="true">{drawing}</svg>', name) for drawing, name in found
    ]
