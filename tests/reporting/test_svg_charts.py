"""Charts: well-formed, inside their frame, whatever the numbers."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as some

from trt_engine.reporting.charts import (
    Bars,
    Box,
    Boxes,
    Chart,
    GateLimit,
    Histogram,
    Interval,
    IntervalChart,
    Line,
    LineChart,
    Point,
    Scatter,
    Stack,
    StackedBars,
)
from trt_engine.reporting.charts.draw import WIDTH, draw, legend

POSITIVE = some.floats(1e-6, 1e6)


def drawn(chart: Chart) -> ElementTree.Element:
    """The chart read as XML, with every number in it looked at."""
    root = ElementTree.fromstring(draw(chart))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for item in root.iter():
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
            if name in item.attrib:
                limit = width if "x" in name else height
                assert -1 <= float(item.attrib[name]) <= limit + 1, (item.tag, item.attrib)
        if item.tag == "rect":
            assert float(item.attrib["x"]) + float(item.attrib["width"]) <= width + 1
            assert float(item.attrib["y"]) + float(item.attrib["height"]) <= height + 1
    return root


def count(root: ElementTree.Element, tag: str, style: str) -> int:
    return len([item for item in root.iter(tag) if style in item.attrib.get("class", "").split()])


@given(some.lists(POSITIVE, min_size=1, max_size=300))
def test_a_histogram_shows_every_sample_or_says_how_many_more(samples: list[float]) -> None:
    chart = Histogram("h", "t", "ms", tuple(samples), (("median", sorted(samples)[len(samples) // 2]),))
    root = drawn(chart)
    assert count(root, "rect", "bar") >= 1
    assert count(root, "rect", "late") == sum("more, up to" in name for _, name in legend(chart))


@given(some.dictionaries(some.integers(1, 4096), POSITIVE, min_size=1, max_size=40), some.booleans())
def test_a_line_chart_has_a_mark_for_every_point(values: dict[int, float], log: bool) -> None:
    points = tuple(Point(batch, value, f"{value:.3g}") for batch, value in values.items())
    root = drawn(LineChart("l", "t", "batch", "images/s", (Line("a", points),), log_x=log))
    assert count(root, "circle", "dot") == len(points)


def test_cliffs_and_unstable_points_have_shapes_of_their_own_and_a_legend() -> None:
    points = (Point(16, 9), Point(17, 4, "17", "cliff"), Point(18, 9, "", "unstable"))
    chart = LineChart("l", "t", "batch", "images/s", (Line("measured", points), Line("suggested", points, "dashed")))
    root = drawn(chart)
    assert count(root, "path", "cliff") == 1 and count(root, "circle", "hollow") == 1
    assert [name for _, name in legend(chart)] == [
        "measured",
        "suggested",
        "not stable",
        "cliff: avoid this batch size",
    ]


@pytest.mark.parametrize("seconds", [(0.0,), (0.0, 0.0), (1e-9, 5000.0), (3.0,) * 16])
def test_bars_keep_within_their_track(seconds: tuple[float, ...]) -> None:
    root = drawn(Bars("b", "t", "s", tuple((f"step {index}", value) for index, value in enumerate(seconds))))
    assert count(root, "rect", "bar") == len(seconds)
    assert all(float(item.attrib["width"]) <= WIDTH for item in root.iter("rect"))


def test_text_in_a_chart_is_text() -> None:
    evil = '</text><script>"&'
    root = drawn(Bars("b", evil, "s", ((evil, 1.0),)))
    assert not list(root.iter("script"))
    assert [item.text for item in root.iter("title")] == [evil]


@given(some.lists(some.lists(POSITIVE, min_size=5, max_size=5).map(sorted), min_size=1, max_size=12))
def test_every_box_lies_between_its_whiskers(rows: list[list[float]]) -> None:
    root = drawn(Boxes("x", "t", "ms", tuple(Box(f"cell {i}", *row) for i, row in enumerate(rows))))
    boxes = [item for item in root.iter("rect") if item.attrib["class"] == "box"]
    whiskers = [item for item in root.iter("line") if item.attrib["class"] == "whisker"][::3]
    assert len(boxes) == len(whiskers) == len(rows)
    for box, whisker in zip(boxes, whiskers, strict=True):
        assert float(whisker.attrib["x1"]) <= float(box.attrib["x"]) + 0.1


@given(some.lists(some.lists(some.floats(0, 1e6), min_size=4, max_size=4), min_size=1, max_size=12))
def test_segments_follow_each_other_and_never_leave_the_bar(rows: list[list[float]]) -> None:
    parts = (("matrix", 0), ("copy", 5), ("reformat", 6), ("outside of kernels", 9))
    chart = StackedBars("x", "t", "ms", parts, tuple(Stack(f"cell {i}", tuple(row)) for i, row in enumerate(rows)))
    root = drawn(chart)
    assert [name for _, name in legend(chart)] == [name for name, _ in parts]
    by_row: dict[str, list[tuple[float, float]]] = {}
    for item in root.iter("rect"):
        by_row.setdefault(item.attrib["y"], []).append((float(item.attrib["x"]), float(item.attrib["width"])))
    for segments in by_row.values():
        for (x, width), (after, _) in pairwise(segments):
            assert x + width <= after + 0.6


def test_a_segment_wide_enough_carries_the_number_of_its_part() -> None:
    chart = StackedBars("x", "t", "ms", (("matrix", 0), ("copy", 5)), (Stack("a", (9.0, 0.01)),))
    numbers = [item.text for item in drawn(chart).iter("text") if "on" in item.attrib["class"].split()]
    assert numbers == ["1"]


@given(some.lists(some.lists(some.floats(-400, 400), min_size=3, max_size=3).map(sorted), min_size=1, max_size=12))
def test_intervals_and_zero_lie_on_one_axis(rows: list[list[float]]) -> None:
    spans = tuple(Interval(f"engine {i}", *row, row[0] > 0 or row[2] < 0) for i, row in enumerate(rows))
    chart = IntervalChart("x", "t", "%", "%", spans, (GateLimit("slower:3%", 3.0, tuple({0, len(rows) - 1})),))
    root = drawn(chart)
    assert count(root, "line", "zero") == len(rows), "beside each interval, not through the labels"
    assert count(root, "line", "limit") == len({0, len(rows) - 1}), "beside the spans it judges, and no other"
    assert count(root, "circle", "hollow") == sum(not span.excludes_zero for span in spans)
    assert [name for _, name in legend(chart)][-2:] == ["no change", "gate slower:3%"]


@given(some.lists(some.tuples(POSITIVE, some.floats(0, 1)), min_size=1, max_size=40))
def test_points_of_a_scatter_are_all_there_and_labels_never_lie_on_each_other(
    values: list[tuple[float, float]],
) -> None:
    points = tuple(Point(x, y, str(index)) for index, (x, y) in enumerate(values, 1))
    root = drawn(Scatter("s", "t", "images/s", "AP", (Line("fp32", points, "points"),), points[:2]))
    assert count(root, "circle", "dot") == len(points)
    at = [(float(i.attrib["x"]), float(i.attrib["y"])) for i in root.iter("text") if "value" in i.attrib["class"]]
    assert all(abs(a - c) >= 8 or abs(b - d) >= 10 for k, (a, b) in enumerate(at) for c, d in at[:k])


def test_series_differ_in_their_markers_and_dashes() -> None:
    lines = tuple(Line(f"p{k}", (Point(1, k + 1.0), Point(8, k + 2.0))) for k in range(8))
    keys = [drawing for drawing, _ in legend(LineChart("l", "t", "x", "y", lines))]
    shapes = {key.replace(f"s{k}", "").replace(f" d{k}", f" d{k}") for k, key in enumerate(keys)}
    assert len(shapes) == 8
