"""A report for the terminal: no colour, no drawing that a narrow window would break."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from trt_engine.reporting.contents import (
    Block,
    Commands,
    Contents,
    Facts,
    Links,
    Notice,
    Paragraph,
    Table,
)

__all__ = ["MARK", "render"]

MARK = "trt-engine report · "
_WIDTH = 100


def render(contents: Contents) -> str:
    """The report as plain text."""
    lines = [f"{MARK}{contents.title}", contents.device, contents.subtitle, ""]
    values = [figure.value for figure in contents.figures]
    labels = [figure.label for figure in contents.figures]
    for figure in contents.figures:
        value = _pad(figure.value, _longest(values), left=False)
        lines.append(f"  {_pad(figure.label, _longest(labels))}  {value}  {figure.note}")
    lines.append("")
    for notice in contents.notices:
        lines += _wrapped(notice.text, "! " if notice.kind == "warning" else "- ")
    if contents.claim:
        lines += ["", *_wrapped(contents.claim)]
    for section in contents.sections:
        lines += ["", section.title, "-" * _width(section.title)]
        for block in section.blocks:
            lines += _block(block)
    return "\n".join([*lines, "", *_wrapped(contents.footer)]) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield from _wrapped(block.text)
    elif isinstance(block, Notice):
        yield from _wrapped(block.text, "! " if block.kind == "warning" else "- ")
    elif isinstance(block, Facts):
        yield from _pairs(block.rows)
    elif isinstance(block, Links):
        yield from _pairs([(name, path) for name, path, _ in block.rows])
    elif isinstance(block, Commands):
        yield from (f"  {line}" for line in block.lines)
    elif isinstance(block, Table):
        yield from _table(block)


def _pairs(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    longest = min(26, _longest([name for name, _ in rows]))
    for name, value in rows:
        yield from _wrapped(value, f"  {_pad(name, longest)}  ")


def _table(table: Table) -> Iterator[str]:
    cells = [table.columns, *table.rows]
    widths = [_longest([row[index] for row in cells]) for index in range(len(table.columns))]
    yield f"{table.caption}:"
    for number, row in enumerate(cells):
        mark = "*" if number - 1 in table.marked else " "
        padded = (
            _pad(cell, width, left=index in table.left)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"{mark} {'  '.join(padded)}".rstrip()


def _wrapped(text: str, start: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * _width(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]


def _width(text: str) -> int:
    """Columns in a terminal: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _longest(texts: Sequence[str]) -> int:
    return max((_width(text) for text in texts), default=0)


def _pad(text: str, width: int, *, left: bool = True) -> str:
    room = " " * (width - _width(text))
    return text + room if left else room + text
