"""Render a report for the terminal, without colour or drawings."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence

from trt_engine.escapes import join_lines
from trt_engine.reporting import document

MARK = "trt-engine report · "
_WIDTH = 100
_NAME_WIDTH = 11
"""Least width of the names of a result, with their colon."""


def render(contents: document.ReportDocument) -> str:
    """Render the report as plain text."""
    lines = [f"{MARK}{contents.title}", contents.device, contents.subtitle, ""]
    values = [figure.value for figure in contents.figures]
    labels = [figure.label for figure in contents.figures]
    for figure in contents.figures:
        value = _pad(figure.value, _max_width(values), left=False)
        lines += _wrap(figure.note, f"  {_pad(figure.label, _max_width(labels))}  {value}  ")
    lines.append("")
    for notice in contents.notices:
        lines += _wrap(notice.text, "! " if notice.kind == "warning" else "- ")
    if contents.claim:
        lines += ["", *_wrap(contents.claim)]
    for section in contents.sections:
        lines += _render_section(section, _WIDTH)
    return "\n".join([*lines, "", *_wrap(contents.footer)]) + "\n"


def render_result(parts: Iterable[document.Block | document.Section], width: int | None = None) -> str:
    """Render what a verb prints, tables in `width` columns if it is given; control characters in names are escapes."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, document.Section):
            lines += _render_section(part, width)
        elif isinstance(part, document.Facts):
            lines += _render_facts(part)
        elif isinstance(part, document.Paragraph):
            lines.append(part.text)
        else:
            lines += _render_block(part, width)
    return join_lines(lines)


def _render_facts(facts: document.Facts) -> Iterator[str]:
    """`name:  value`, the values in one column if `aligned`."""
    width = max(_NAME_WIDTH, _max_width([name for name, _ in facts.rows]) + 2)
    for name, value in facts.rows:
        if facts.aligned:
            yield _pad(f"{name}:" if name else "", width) + value
        else:
            yield f"{name}: {value}" if name else f"  {value}"


def _render_section(section: document.Section, width: int | None = None) -> Iterator[str]:
    yield from ("", section.title, "-" * _width(section.title))
    for block in section.blocks:
        yield from _render_block(block, width)


def _render_block(block: document.Block, width: int | None = None) -> Iterator[str]:
    if isinstance(block, document.Paragraph):
        yield from _wrap(block.text)
    elif isinstance(block, document.Notice):
        yield from _wrap(block.text, "! " if block.kind == "warning" else "- ")
    elif isinstance(block, document.Facts):
        yield from _render_pairs(block.rows)
    elif isinstance(block, document.Links):
        yield from _render_pairs([(name, path) for name, path, _ in block.rows])
    elif isinstance(block, document.Commands):
        yield from (f"  {line}" for line in block.lines)
    elif isinstance(block, document.Table):
        yield from _render_table(block, width)


def _render_pairs(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    longest = min(26, _max_width([name for name, _ in rows]))
    for name, value in rows:
        if _width(name) > longest:
            yield f"  {name}"
            name = ""
        yield from _wrap(value, f"  {_pad(name, longest)}  ")


def _render_table(table: document.Table, room: int | None = None) -> Iterator[str]:
    """The table; in less `room` its texts are wrapped, or its last columns stand below, each part with the first columns."""
    cells = [table.columns, *table.rows]
    widths = [_max_width([row[index] for row in cells]) for index in range(len(table.columns))]
    if table.caption:
        yield f"{table.caption}:"
    parts = [list(range(len(widths)))]
    if room is not None and sum(widths) + 2 * len(widths) > room:
        parts = _fit_columns(cells, widths, table.left, room)
    for part in parts:
        for number, row in enumerate(cells):
            if not any(row):  # a table without headings
                continue
            wrapped = [
                textwrap.wrap(row[at], max(widths[at], 1), break_long_words=False, break_on_hyphens=False) or [""]
                for at in part
            ]
            for line in range(max(map(len, wrapped))):
                mark = "*" if number - 1 in table.marked and not line else " "
                padded = (
                    _pad(texts[line] if line < len(texts) else "", widths[at], left=at in table.left)
                    for at, texts in zip(part, wrapped, strict=True)
                )
                yield f"{mark} {'  '.join(padded)}".rstrip()


_LEAST_COLUMN = 12
"""Width below which no text of a table is wrapped."""


def _fit_columns(
    cells: Sequence[Sequence[str]], widths: list[int], left: Collection[int], room: int
) -> list[list[int]]:
    """Narrow the columns of text in `widths` as far as words allow; return the columns of each part of the table."""
    whole = [min(width, max(room // 2 - 3, _LEAST_COLUMN)) if at in left else width for at, width in enumerate(widths)]
    for at in sorted(left, key=lambda one: -widths[one]):
        excess = sum(widths) + 2 * len(widths) - room
        longest = max((_width(word) for row in cells for word in row[at].split()), default=0)
        widths[at] = max(min(widths[at], max(longest, _LEAST_COLUMN)), widths[at] - max(excess, 0))
    if sum(widths) + 2 * len(widths) <= room:
        return [list(range(len(widths)))]
    widths[:] = whole  # each part has room again
    keys = [at for at in range(len(widths)) if set(range(at + 1)) <= set(left)][:2] or [0]
    while len(keys) > 1 and sum(widths[at] + 2 for at in keys) > room // 2:
        keys.pop()
    parts = [[*keys]]
    used = start = sum(widths[at] + 2 for at in keys)
    for at in (one for one in range(len(widths)) if one not in keys):
        if used + widths[at] + 2 > room and len(parts[-1]) > len(keys):
            parts.append([*keys])
            used = start
        parts[-1].append(at)
        used += widths[at] + 2
    return parts


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
