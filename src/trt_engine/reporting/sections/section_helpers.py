"""Helpers of report sections: tables, phrases, names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trt_engine.format import format_column, format_or_dash
from trt_engine.records.bench import BenchRecord
from trt_engine.records.size import BatchResult
from trt_engine.records.summary import Summary, percentile
from trt_engine.records.sweep import CellResult, CellSpec
from trt_engine.reporting.document import Table

T = TypeVar("T")
K = TypeVar("K")
Columns = list[tuple[str, Sequence[str]]]
"""Columns of a table: the heading, and the text of each row."""


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, both in order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def more_note(most: int, many: int, which: str = "first") -> str:
    """`, the first 24 of 30`, if not all are shown."""
    return f", the {most} {which} of {many}" if many > most else ""


def pluralize(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def record_state(record: BenchRecord | BatchResult) -> str:
    complete = not isinstance(record, BenchRecord) or record.complete
    return ", ".join(word for word, so in (("not stable", not record.stable), ("incomplete", not complete)) if so)


def format_time(started: str) -> str:
    """`2026-11-20T17:48:51+00:00` as `2026-11-20 17:48 UTC`."""
    day, t, clock = started.partition("T")
    return f"{day} {clock[:5]} UTC" if t and len(clock) >= 5 else started


def format_factor(factor: float | None) -> str:
    """A factor: `2.31×`."""
    return "–" if factor is None else f"{format_or_dash(factor)}×"


def format_rate(value: float) -> str:
    """Format a rate, whole numbers without decimals."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else f"{value:,.2f}"


def shorten_label(label: str, most: int = 64) -> str:
    """Shorten a label to its beginning and end."""
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-(most // 2 - 1) :]}"


def short_labels(cells: Sequence[CellSpec]) -> list[str]:
    """Name cells by their differences; use full labels if those would not be unique."""
    parts = [
        (
            cell.model,
            cell.precision,
            cell.backend + (f" ({', '.join(cell.providers)})" if cell.providers else ""),
            cell.device,
            f"batch {cell.batch}",
        )
        for cell in cells
    ]
    columns = [values for values in zip(*parts, strict=True) if len(set(values)) > 1]
    short = [" · ".join(values) for values in zip(*columns, strict=True)]
    return short if len(cells) > 1 and len(set(short)) == len(cells) else [cell.label for cell in cells]


def number_columns(rows: Sequence[object], fields: Mapping[str, str]) -> Columns:
    """A column by heading for each attribute that some row has."""
    return known_columns((title, [getattr(row, name, None) for row in rows]) for title, name in fields.items())


def summary_columns(summaries: Sequence[Summary | None]) -> Columns:
    return number_columns(summaries, {name: name for name in ("mean", "median", "p90", "p95", "p99")})


def measurement_columns(measured: Sequence[BenchRecord | BatchResult], summaries: Sequence[Summary | None]) -> Columns:
    """Columns of measurements: batch, rates, times, and what is wrong with them if anything is."""
    state = [record_state(item) for item in measured]
    per_image = [s.mean / item.batch if s else None for item, s in zip(measured, summaries, strict=True)]
    return [
        ("batch", [str(item.batch) for item in measured]),
        ("queries/s", format_column([item.qps for item in measured])),
        ("images/s", format_column([item.images_per_s for item in measured])),
        ("ms per image", format_column(per_image)),
        *summary_columns(summaries),
        *([("", state)] if any(state) else []),
    ]


def make_table(
    caption: str,
    columns: Sequence[tuple[str, Sequence[str]]],
    *,
    words: int = 0,
    also: Sequence[str] = (),
    marked: Iterable[int] = (),
) -> Table:
    """A table of columns; the first `words`, those in `also` and those without a heading are text."""
    left = frozenset([*range(words), *(i for i, (title, _) in enumerate(columns) if not title or title in also)])
    rows = tuple(zip(*(values for _, values in columns), strict=True))
    return Table(caption, tuple(title for title, _ in columns), rows, left, frozenset(marked))


def known_columns(columns: Iterable[tuple[str, Sequence[float | None]]]) -> Columns:
    """The columns of numbers that have any."""
    return [(title, format_column(values)) for title, values in columns if any(value is not None for value in values)]


def varying_columns(columns: Iterable[tuple[str, Sequence[str]]]) -> Columns:
    """The columns whose values differ."""
    return [(title, values) for title, values in columns if len(set(values)) > 1]


def text_table(
    caption: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], marked: Iterable[int] = ()
) -> Table:
    """A table of text columns."""
    cells = tuple(tuple(cell for cell in row) for row in rows)
    return Table(caption, columns, cells, frozenset(range(len(columns))), frozenset(marked))


def record_percentile(record: BenchRecord, percent: float) -> float:
    return percentile(sorted(record.compute_ms), percent, record.protocol.percentile_rule)


_SUBJECT_PREFIX = re.compile(r"^(?:\d+ cells \(.*?\)|Batch \d+(?:, \d+)*|`[^`]+`): ")


def warning_summary(text: str) -> str:
    """Summarize a warning: without its subject, up to the first punctuation."""
    said = _SUBJECT_PREFIX.sub("", text)
    head = re.split(r"[:;.]\s(?=(?:[^`]*`[^`]*`)*[^`]*$)", said, maxsplit=1)[0].strip().rstrip(".,")
    return head if len(head) <= 90 else f"{head[:88].rsplit(' ', 1)[0]} …"


def flatten_warning(text: str) -> str:
    """A warning and its hint in one line: `evaluate was left out: ...; `pip install ...``."""
    said, _, hint = text.partition("\nhint: ")
    return with_hint(" ".join(said.split()), " ".join(hint.split()))


def with_hint(text: str, hint: str | None) -> str:
    return f"{text}; {hint}" if hint else text


def to_sentence(text: str) -> str:
    """Add a full stop, and capitalize a plain first word."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    plain = first.isalpha() and first.islower()
    return f"{text[:1].upper() if plain else text[:1]}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def measurement_names(records: Sequence[BenchRecord], known: dict[int, str] | None = None) -> dict[int, str]:
    """Name each measurement: the known name, else its batch and the attributes that distinguish it."""
    names: dict[int, str] = {}
    known = known or {}
    others = [record for record in records if id(record) not in known]
    for index, record in enumerate(records):
        if id(record) in known:
            name = known[id(record)]
        else:
            twins = [other for other in others if other.batch == record.batch]
            name = f"batch {record.batch}"
            for part in ("protocol", "device", "backend", "engine"):
                value = record.protocol.name if part == "protocol" else getattr(record, part)
                if any(
                    (other.protocol.name if part == "protocol" else getattr(other, part)) != value for other in twins
                ):
                    name += f", {Path(value).name if part == 'engine' else value}"
            if name in names.values():
                name += f" ({index + 1})"
        names[id(record)] = name if record.complete else f"{name}, incomplete"
    return names


def precision_label(cell: CellResult) -> str:
    """The requested precision, and the actual one if different."""
    return cell.spec.precision + (f" (ran in {cell.compute_dtype})" if cell.compute_dtype else "")


def backend_label(cell: CellResult) -> str:
    return cell.spec.backend + (f" ({', '.join(cell.spec.providers)})" if cell.spec.providers else "")
