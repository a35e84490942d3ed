"""Render a report as one HTML page without scripts, fonts or requests (light, dark, mobile and print styles), and blocks
for a notebook cell."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from trt_engine.reporting.charts import Chart
from trt_engine.reporting.charts.draw import draw, legend
from trt_engine.reporting.document import Block, Facts, Links, Paragraph, Picture, ReportDocument, Section, Table

MARK = '<meta name="generator" content="trt-engine report">'


def render(contents: ReportDocument) -> str:
    """Render the page. All text is escaped, and the content security policy forbids scripts and requests."""
    return _templates().get_template("page.html.jinja").render(page=contents, mark=Markup(MARK))


def render_cell(parts: Iterable[Block | Section]) -> str:
    """Render blocks as tables for a notebook cell, in the colours of its surroundings. All text is escaped."""
    shown = [
        replace(part, blocks=tuple(map(_as_table, part.blocks))) if isinstance(part, Section) else _as_table(part)
        for part in parts
        if not (isinstance(part, Paragraph) and not part.text.strip())
    ]
    return _templates().get_template("cell.html.jinja").render(parts=shown)


def _as_table(part: Block) -> Block:
    """Facts and links as a table of names and values, which notebooks style; file links lead nowhere from a cell."""
    if isinstance(part, Facts):
        return Table("", ("", ""), part.rows, frozenset((0, 1)))
    if isinstance(part, Links):
        return Table("", ("", ""), tuple((name, path) for name, path, _ in part.rows), frozenset((0, 1)))
    return part


@cache
def _templates() -> Environment:
    folder = resources.files("trt_engine.reporting")
    templates = Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.globals |= {"kind": _block_kind, "svg": lambda chart: Markup(draw(chart)), "legend": _render_legend}
    templates.globals |= {"code": _render_code, "picture": _picture_data}
    return templates


def _block_kind(block: object) -> str:
    return "charts" if isinstance(block, tuple) else type(block).__name__.lower()


def _render_code(text: str) -> Markup:
    """Escape the text and render backtick spans as code."""
    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part for index, part in enumerate(parts)
    )


_PICTURE_BYTES = 4 << 20


def _picture_data(picture: Picture) -> str:
    """The JPEG file as a data URL; empty where it is gone, large or another file."""
    try:
        data = Path(picture.path).read_bytes() if Path(picture.path).stat().st_size <= _PICTURE_BYTES else b""
    except OSError:
        return ""
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}" if data.startswith(b"\xff\xd8\xff") else ""


def _render_legend(chart: Chart) -> list[tuple[Markup, str]]:
    return [(Markup(drawing), name) for drawing, name in legend(chart)]
