"""Render a report for the terminal, without colour or drawings."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from trt_engine.format import join_lines
from trt_engine.reporting.document import (
    Block,
    Commands,
    Facts,
    Links,
    Notice,
    Paragraph,
    ReportDocument,
    Section,
    Table,
)

MARK = "trt-engine report · "
_WIDTH = 100
_NAME_WIDTH = 11
"""Least width of the names of a result, with their colon."""


def render(contents: ReportDocument) -> str:
    """Render the report as plain text."""
    lines = [f"{MARK}{contents.title}", contents.device, contents.subtitle, ""]
    values = [figure.value for figure in contents.figures]
    labels = [figure.label for figure in contents.figures]
    for figure in contents.figures:
        value = _pad(figure.value, _max_width(values), left=False)
        lines.append(f"  {_pad(figure.label, _max_width(labels))}  {value}  {figure.note}")
    lines.append("")
    for notice in contents.notices:
        lines += _wrap(notice.text, "! " if notice.kind == "warning" else "- ")
    if contents.claim:
        lines += ["", *_wrap(contents.claim)]
    for section in contents.sections:
        lines += _render_section(section)
    return "\n".join([*lines, "", *_wrap(contents.footer)]) + "\n"


def render_result(parts: Iterable[Block | Section]) -> str:
    """Render what a verb prints, without wrapping; control characters in names are escapes."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Section):
            lines += _render_section(part)
        elif isinstance(part, Facts):
            lines += _render_facts(part)
        elif isinstance(part, Paragraph):
            lines.append(part.text)
        else:
            lines += _render_block(part)
    return join_lines(lines)


def _render_facts(facts: Facts) -> Iterator[str]:
    """`name:  value`, the values in one column if `aligned`."""
    width = max(_NAME_WIDTH, _max_width([name for name, _ in facts.rows]) + 2)
    for name, value in facts.rows:
        if facts.aligned:
            yield _pad(f"{name}:" if name else "", width) + value
        else:
            yield f"{name}: {value}" if name else f"  {value}"


def _render_section(section: Section) -> Iterator[str]:
    yield from ("", section.title, "-" * _width(section.title))
    for block in section.blocks:
        yield from _render_block(block)


def _render_block(block: Block) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield from _wrap(block.text)
    elif isinstance(block, Notice):
        yield from _wrap(block.text, "! " if block.kind == "warning" else "- ")
    elif isinstance(block, Facts):
        yield from _render_pairs(block.rows)
    elif isinstance(block, Links):
        yield from _render_pairs([(name, path) for name, path, _ in block.rows])
    elif isinstance(block, Commands):
        yield from (f"  {line}" for line in block.lines)
    elif isinstance(block, Table):
        yield from _render_table(block)


def _render_pairs(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    longest = min(26, _max_width([name for name, _ in rows]))
    for name, value in rows:
        yield from _wrap(value, f"  {_pad(name, longest)}  ")


def _render_table(table: Table) -> Iterator[str]:
    cells = [table.columns, *table.rows]
    widths = [_max_width([row[index] for row in cells]) for index in range(len(table.columns))]
    if table.caption:
        yield f"{table.caption}:"
    for number, row in enumerate(cells):
        if not any(row):  # a table without headings
            continue
        mark = "*" if number - 1 in table.marked else " "
        padded = (
            _pad(cell, width, left=index in table.left)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"{mark} {'  '.join(padded)}".rstrip()


def _wrap(text: str, start: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * _width(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]


def _width(text: str) -> int:
    """Width in terminal columns: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _max_width(texts: Sequence[str]) -> int:
    return max((_width(text) for text in texts), default=0)


def _pad(text: str, width: int, *, left: bool = True) -> str:
    room = " " * (width - _width(text))
    return text + room if left else room + text
