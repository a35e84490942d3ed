"""A notebook cell in a real browser: readable in light and dark, on a desktop and at 400 px."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.reporting.charts import Bars, Line, LineChart, Point
from trt_engine.reporting.html import render_cell

sys.path.insert(0, str(Path(__file__).parent))

import layout

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        layout.CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH or $CHROMIUM"
    ),
]

# The colours of the page around the cell, and the alignment that JupyterLab gives the cells of tables.
PAGE = """<!doctype html><meta charset="utf-8"><style>
:root {{ color-scheme: light dark; }}
body {{ margin: 8px; font: 14px sans-serif; background: white; color: black; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #eee; }} }}
:not(.markdown).cells td, :not(.markdown).cells th {{ text-align: right; }}
</style><main class="cells">{}</main>"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", layout.WIDTHS)
def test_a_cell_is_readable_in_the_colours_around_it(width: int, dark: bool, tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    page = PAGE.format(te.inspect(model)._repr_html_() + te.doctor()._repr_html_())
    assert layout.measure(page, width, dark=dark)["wrong"] == []


@pytest.mark.parametrize("dark", [False, True])
def test_charts_are_drawn_in_the_size_and_the_colours_they_stand_for(dark: bool, tmp_path: Path) -> None:
    """Seen in pixels: the bar of a quarter is a quarter as long, and a legend's symbol is not larger than its box."""
    image = pytest.importorskip("PIL.Image")
    bars = Bars("bars", "Bars", "ms", (("whole", 100.0), ("quarter", 25.0)))
    points = (Point(0, 1), Point(1, 1), Point(2, 1))
    lines = LineChart("lines", "Lines", "x", "y", (Line("first", points), Line("second", points[:2])))
    coloured = []
    for chart in (bars, lines):
        page = PAGE.format(render_cell([(chart,)]))
        assert layout.measure(page, 1280, dark=dark)["wrong"] == []
        layout.screenshot(page, 1280, 500, tmp_path / "cell.png", dark=dark)
        with image.open(tmp_path / "cell.png") as seen:
            spread = seen.convert("HSV").getchannel("S").point(lambda value: 255 * (value > 60))
        rows = [spread.crop((0, y, 1280, y + 1)).histogram()[255] for y in range(500)]
        coloured.append([row for row in rows if row])
    longest, shortest = max(coloured[0]), min(coloured[0])
    assert longest > 500 and 0.2 < shortest / longest < 0.3
    assert coloured[1][0] <= 60 and max(coloured[1]) > 400  # the legend's two symbols, then the lines across the chart
