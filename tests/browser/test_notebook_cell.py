"""A notebook cell in a real browser: readable in light and dark, on a desktop and at 400 px."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import onnx_models as models
import trt_engine as te

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
