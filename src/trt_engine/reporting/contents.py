"""What a report consists of, once, for every form it is written in: sections of facts, tables, charts and commands."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

from trt_engine.reporting.charts import Chart

__all__ = [
    "Block",
    "Commands",
    "Contents",
    "Facts",
    "Figure",
    "Links",
    "Notice",
    "Paragraph",
    "Section",
    "Table",
    "clean",
]


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the few numbers a reader came for."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that changes how the numbers are to be read."""

    text: str
    kind: Literal["info", "warning"] = "warning"


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they are."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` are headings, `left` the positions of those that hold words; `marked` rows stand out."""

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
    """What it is, the path as shown, and the link (None where nothing is there to open)."""

    rows: tuple[tuple[str, str, str | None], ...]


Block = Paragraph | Notice | Facts | Table | Commands | Links | tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A whole report. `device` and `notices` come first in every form."""

    title: str
    subtitle: str
    device: str
    figures: tuple[Figure, ...]
    claim: str
    """What the first figure means, and what it does not."""
    notices: tuple[Notice, ...]
    sections: tuple[Section, ...]
    footer: str


def clean(text: str) -> str:
    """The text in one line, without characters that move the cursor, hide, or turn the reading direction."""
    text = text.encode(errors="replace").decode()
    return "".join(
        " " if c in "\t\n\r\u2028\u2029" else "�" if unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn") else c
        for c in text
    )
