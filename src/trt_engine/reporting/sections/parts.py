"""Small parts that every subject's sections are made of: tables, words, names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trt_engine.records import BenchRecord, Summary, percentile
from trt_engine.reporting.charts import Point
from trt_engine.reporting.contents import Table, clean
from trt_engine.reporting.figures import column, number

__all__ = [
    "brief",
    "cleaned",
    "difference",
    "hinted",
    "moment",
    "names_of",
    "one_line",
    "per",
    "percentile_of",
    "plural",
    "point",
    "sentence",
    "state_of",
    "summary_columns",
    "table",
    "times",
    "told",
    "varying",
    "words",
]


def point(x: float, y: float, mark: str) -> Point:
    return Point(x, y, number(y), "unstable" if mark else "")


def told(parts: Iterable[str]) -> str:
    return "; ".join(parts) + "."


def plural(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def state_of(record: BenchRecord) -> str:
    return ", ".join(
        word for word, so in (("not stable", not record.stable), ("incomplete", not record.complete)) if so
    )


def moment(started: str) -> str:
    """`2026-11-20T17:48:51+00:00` as `2026-11-20 17:48 UTC`."""
    day, t, clock = started.partition("T")
    return f"{day} {clock[:5]} UTC" if t and len(clock) >= 5 else started


def times(factor: float | None) -> str:
    """A factor: `2.31×`."""
    return "–" if factor is None else f"{number(factor)}×"


def per(value: float) -> str:
    """How often: whole numbers as such."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else f"{value:,.2f}"


def brief(label: str, most: int = 64) -> str:
    """A label as a sentence takes it: its beginning and its end, which tells cells apart."""
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-(most // 2 - 1) :]}"


def difference(value: float | None, digits: int = 1) -> str:
    """With its sign: `+1.2`, `−0.4`."""
    return "–" if value is None else f"{value:+,.{digits}f}".replace("-", "−")


def summary_columns(summaries: Sequence[Summary | None]) -> list[tuple[str, Sequence[str]]]:
    return [
        (name, column([getattr(summary, name) if summary else None for summary in summaries]))
        for name in ("mean", "median", "p90", "p95", "p99")
    ]


def table(
    caption: str,
    columns: Sequence[tuple[str, Sequence[str]]],
    *,
    words: int = 0,
    also: Sequence[str] = (),
    marked: Iterable[int] = (),
) -> Table:
    """A table of columns; the first `words`, those named in `also` and the one without a heading hold words."""
    left = frozenset([*range(words), *(i for i, (title, _) in enumerate(columns) if not title or title in also)])
    rows = tuple(zip(*(values for _, values in columns), strict=True))
    return Table(caption, tuple(title for title, _ in columns), rows, left, frozenset(marked))


def varying(columns: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, Sequence[str]]]:
    """The columns that tell rows apart."""
    return [(title, values) for title, values in columns if len(set(values)) > 1]


def words(caption: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], marked: Iterable[int] = ()) -> Table:
    """A table of words alone."""
    cells = tuple(tuple(clean(cell) for cell in row) for row in rows)
    return Table(caption, columns, cells, frozenset(range(len(columns))), frozenset(marked))


def percentile_of(record: BenchRecord, percent: float) -> float:
    return percentile(sorted(record.compute_ms), percent, record.protocol.percentile_rule)


def one_line(text: str) -> str:
    """A warning with its hint: `evaluate was left out: ...; `pip install ...``."""
    said, _, hint = text.partition("\nhint: ")
    return hinted(" ".join(said.split()), " ".join(hint.split()))


def hinted(text: str, hint: str | None) -> str:
    return f"{text}; {hint}" if hint else text


def sentence(text: str) -> str:
    """The text with a full stop, and a capital where it begins with a plain word."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    plain = first.isalpha() and first.islower()
    return f"{text[:1].upper() if plain else text[:1]}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def cleaned(rows: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((clean(name), clean(str(value))) for name, value in rows)


def names_of(records: Sequence[BenchRecord], known: dict[int, str] | None = None) -> dict[int, str]:
    """What to call each measurement: the name it has, else its batch and what else tells it from the others."""
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
        names[id(record)] = clean(name if record.complete else f"{name}, incomplete")
    return names
