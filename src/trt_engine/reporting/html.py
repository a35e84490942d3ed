"""A report as one HTML page: no script, no font, no request; light, dark, on a phone and on paper."""

from __future__ import annotations

from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from trt_engine.reporting.charts import Chart, draw, legend
from trt_engine.reporting.contents import Contents

__all__ = ["MARK", "render"]

MARK = '<meta name="generator" content="trt-engine report">'


def render(contents: Contents) -> str:
    """The page. Everything from records is escaped; the policy in its head forbids scripts and requests besides."""
    return _template().render(page=contents, mark=Markup(MARK), kind=_kind, svg=_svg, legend=_legend)


@cache
def _template() -> Template:
    source = resources.files("trt_engine.reporting").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).from_string(source)


def _kind(block: object) -> str:
    return "charts" if isinstance(block, tuple) else type(block).__name__.lower()


def _svg(chart: Chart) -> Markup:
    return Markup(draw(chart))  # escapes its own text


def _legend(chart: Chart) -> list[tuple[Markup, str]]:
    return [(Markup(drawing), name) for drawing, name in legend(chart)]
