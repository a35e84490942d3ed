"""Render a report as one HTML page without scripts, fonts or requests; light, dark, mobile and print styles."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from trt_engine.reporting.charts import Chart
from trt_engine.reporting.charts.draw import draw, legend
from trt_engine.reporting.document import ReportDocument

MARK = '<meta name="generator" content="trt-engine report">'


def render(contents: ReportDocument) -> str:
    """Render the page. All text is escaped, and the content security policy forbids scripts and requests."""
    return _load_template().render(
        page=contents, mark=Markup(MARK), kind=_block_kind, svg=_render_chart, legend=_render_legend, code=_render_code
    )


@cache
def _load_template() -> Template:
    source = resources.files("trt_engine.reporting").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).from_string(source)


def _block_kind(block: object) -> str:
    return "charts" if isinstance(block, tuple) else type(block).__name__.lower()


def _render_code(text: str) -> Markup:
    """Escape the text and render backtick spans as code."""
    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part for index, part in enumerate(parts)
    )


def _render_chart(chart: Chart) -> Markup:
    return Markup(draw(chart))  # escapes its own text


def _render_legend(chart: Chart) -> list[tuple[Markup, str]]:
    return [(Markup(drawing), name) for drawing, name in legend(chart)]
