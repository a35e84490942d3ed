"""The content of a report, independent of its output format: sections of facts, tables, charts and commands."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

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


Block = Paragraph | Notice | Facts | Table | Commands | Links | tuple[Chart, ...]


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
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, tuple):
        return value if value and isinstance(value[0], float) else tuple(map(clean, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: clean(getattr(value, item.name)) for item in fields(value)})
    return value


def clean_text(text: str) -> str:
    """The text in one line, without control, format and unassigned characters."""
    if text.isascii() and text.isprintable():
        return text
    text = text.encode(errors="replace").decode()
    return "".join(
        " " if c in "\t\n\r\u2028\u2029" else "�" if unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn") else c
        for c in text
    )


Fact = tuple[str, str | Iterable[str] | None]
"""A name, and its value: text, several lines of it, or None for no row."""


def make_facts(*facts: Fact, aligned: bool = True) -> Facts:
    """Names and values, without those that are None or empty."""
    rows: list[tuple[str, str]] = []
    for name, value in facts:
        texts = [] if value is None else [value] if isinstance(value, str) else list(value)
        rows += [(name if not index else "", text) for index, text in enumerate(texts)]
    return Facts(tuple(rows), aligned)
