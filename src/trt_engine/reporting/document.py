"""The content of a report, independent of its output format: sections of facts, tables, charts and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from trt_engine.errors import in_callers_language
from trt_engine.escapes import is_hidden
from trt_engine.reporting.charts import Chart


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One of the key numbers."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Information that affects the interpretation of the numbers."""

    text: str
    kind: Literal["info", "warning"] = "warning"
    summary: str = ""
    """Short form for the summary of warnings; default: the beginning of the text."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values; a row without a name continues the one before."""

    rows: tuple[tuple[str, str], ...]
    aligned: bool = True
    """False for `name: value` without columns, which scripts read."""


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` are headings, `left` the indices of left-aligned text columns; `marked` rows are highlighted."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Commands:
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """Description, displayed path, and link (None if the file is missing)."""

    rows: tuple[tuple[str, str, str | None], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A JPEG file, shown in HTML; its path is text elsewhere."""

    caption: str
    path: str


Block = Picture | Paragraph | Notice | Facts | Table | Commands | Links | tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class ReportDocument:
    """A whole report. `device` and `notices` come first in every form."""

    title: str
    subtitle: str
    device: str
    figures: tuple[KeyFigure, ...]
    claim: str
    """Explanation of the first figure."""
    notices: tuple[Notice, ...]
    sections: tuple[Section, ...]
    footer: str


def clean(value: Any) -> Any:
    """A document or a part of it, with all its text cleaned."""
    return change_texts(value, clean_text)


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A document or a part of it, with each text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return value if value and isinstance(value[0], float) else tuple(change_texts(one, change) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {item.name: change_texts(getattr(value, item.name), change) for item in fields(value)}
        return replace(value, **changed)
    return value


def clean_text(text: str) -> str:
    """The text in one line, without control, format and unassigned characters."""
    if text.isascii() and text.isprintable():
        return text
    text = text.encode(errors="replace").decode()
    return "".join(" " if c in "\t\n\r\u2028\u2029" else "�" if is_hidden(c) else c for c in text)


Fact = tuple[str, str | Iterable[str] | None]
"""A name, and its value: text, several lines of it, or None for no row."""


def make_facts(*facts: Fact, aligned: bool = True) -> Facts:
    """Names and values, without those that are None or empty."""
    rows: list[tuple[str, str]] = []
    for name, value in facts:
        texts = [] if value is None else [value] if isinstance(value, str) else list(value)
        if name == "next":
            texts = [in_callers_language(text) for text in texts]
        rows += [(name if not index else "", text) for index, text in enumerate(texts)]
    return Facts(tuple(rows), aligned)


_MOST_ROWS = 20
_MOST_PARTS = 60
_LONGEST_TEXT = 600


def shorten(parts: Sequence[Block | Section]) -> list[Block | Section]:
    """The blocks with their first rows and the count of the others: 20 rows of a table, 60 of facts, 60 lines or blocks."""
    cut = [
        replace(part, blocks=tuple(map(_shorten_block, part.blocks)))
        if isinstance(part, Section)
        else _shorten_block(part)
        for part in parts[:_MOST_PARTS]
    ]
    return [*cut, *(Paragraph(text) for text in _rest(len(parts) - _MOST_PARTS))]


def _shorten_block(part: Block) -> Block:
    if isinstance(part, Paragraph):
        return Paragraph(_cut(part.text))
    if isinstance(part, Commands):
        lines = tuple(map(_cut, part.lines[:_MOST_PARTS]))
        return Commands((*lines, *_rest(len(part.lines) - _MOST_PARTS)))
    if isinstance(part, Facts):
        facts = tuple((name, _cut(value)) for name, value in part.rows[:_MOST_PARTS])
        return replace(part, rows=(*facts, *(("", text) for text in _rest(len(part.rows) - _MOST_PARTS))))
    if isinstance(part, Table):
        rows = tuple(tuple(map(_cut, row)) for row in part.rows[:_MOST_ROWS])
        rest = ((text, *("" for _ in part.columns[1:])) for text in _rest(len(part.rows) - _MOST_ROWS))
        return replace(part, rows=(*rows, *rest))
    return part


def _rest(count: int) -> list[str]:
    return [f"and {count} more"] if count > 0 else []


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"
