"""Charts: well-formed, inside their frame, whatever the numbers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from trt_engine.reporting.charts import WIDTH, Bars, Chart, Histogram, Line, LineChart, Point, draw, legend

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


@settings(max_examples=60, deadline=None)
@given(some.lists(POSITIVE, min_size=1, max_size=300))
def test_a_histogram_shows_every_sample_or_says_how_many_more(samples: list[float]) -> None:
    root = drawn(Histogram("h", "t", "d", "ms", tuple(samples), (("median", sorted(samples)[len(samples) // 2]),)))
    assert count(root, "rect", "bar") >= 1
    assert count(root, "rect", "late") == sum("more, up to" in (item.text or "") for item in root.iter("text"))


def test_late_queries_do_not_squeeze_the_others_into_one_bar() -> None:
    samples = (*(1 + index / 10000 for index in range(1000)), 40.0, 60.0)
    root = drawn(Histogram("h", "t", "d", "ms", samples))
    assert count(root, "rect", "bar") > 20
    assert any("2 more, up to 60.0" in (item.text or "") for item in root.iter("text"))


def test_a_wide_distribution_gets_a_logarithmic_axis() -> None:
    root = drawn(Histogram("h", "t", "d", "ms", tuple(1.02**index for index in range(400))))
    assert any(item.text == "ms, log scale" for item in root.iter("text"))


@settings(max_examples=60, deadline=None)
@given(some.dictionaries(some.integers(1, 4096), POSITIVE, min_size=1, max_size=40), some.booleans())
def test_a_line_chart_has_a_mark_for_every_point(values: dict[int, float], log: bool) -> None:
    points = tuple(Point(batch, value, f"{value:.3g}") for batch, value in values.items())
    root = drawn(LineChart("l", "t", "d", "batch", "images/s", (Line("a", points),), log_x=log))
    assert count(root, "circle", "dot") == len(points)


def test_cliffs_and_unstable_points_have_shapes_of_their_own_and_a_legend() -> None:
    points = (Point(16, 9), Point(17, 4, "17", "cliff"), Point(18, 9, "", "unstable"))
    chart = LineChart(
        "l", "t", "d", "batch", "images/s", (Line("measured", points), Line("suggested", points, "dashed"))
    )
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
    root = drawn(Bars("b", "t", "d", "s", tuple((f"step {index}", value) for index, value in enumerate(seconds))))
    assert count(root, "rect", "bar") == len(seconds)
    assert all(float(item.attrib["width"]) <= WIDTH for item in root.iter("rect"))


def test_text_in_a_chart_is_text() -> None:
    evil = '</text><script>"&'
    root = drawn(Bars("b", evil, evil, "s", ((evil, 1.0),)))
    assert not list(root.iter("script"))
    assert [item.text for item in root.iter("title")] == [evil]
