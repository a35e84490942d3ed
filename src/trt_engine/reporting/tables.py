"""What results and report sections share: tables, phrases, names of cells and measurements."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trt_engine.config.profiles import Profile, format_shapes
from trt_engine.errors import TrtEngineError
from trt_engine.format import format_bytes, format_column, format_ms, format_or_dash, format_percent, join_names
from trt_engine.records.base import Finding
from trt_engine.records.bench import BenchRecord
from trt_engine.records.parity import OutputError, Parity
from trt_engine.records.passport import Precision
from trt_engine.records.percentiles import Summary
from trt_engine.records.size import BatchResult
from trt_engine.records.sweep import CellResult, CellSpec
from trt_engine.reporting.document import Fact, Table
from trt_engine.tensors import Signature, format_shape

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


def name_groups(items: Iterable[tuple[str, str]], most: int) -> dict[str, str]:
    """Names by reason: `a, b and 3 more`."""
    groups = group_by(items, lambda item: item[0])
    return {reason: join_names([name for _, name in found], most) for reason, found in groups.items()}


# ------------------------------------------------------------------------------------------------ tables


def make_table(
    caption: str,
    columns: Iterable[tuple[str, Sequence[str]]],
    *,
    words: int = 0,
    also: Sequence[str] = (),
    marked: Iterable[int] = (),
) -> Table:
    """A table of columns; the first `words`, those in `also` and those without a heading are text."""
    titles, values = zip(*columns, strict=True)
    left = frozenset([*range(words), *(i for i, title in enumerate(titles) if not title or title in also)])
    return Table(caption, titles, tuple(zip(*values, strict=True)), left, frozenset(marked))


def text_table(
    caption: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], marked: Iterable[int] = ()
) -> Table:
    """A table of text columns."""
    return Table(caption, columns, tuple(rows), frozenset(range(len(columns))), frozenset(marked))


def known_columns(columns: Iterable[tuple[str, Sequence[float | None]]]) -> Columns:
    """The columns of numbers that have any."""
    return [(title, format_column(values)) for title, values in columns if any(value is not None for value in values)]


def number_columns(rows: Sequence[object], fields: Mapping[str, str]) -> Columns:
    """A column by heading for each attribute that some row has."""
    return known_columns((title, [getattr(row, name, None) for row in rows]) for title, name in fields.items())


def varying_columns(columns: Iterable[tuple[str, Sequence[str]]]) -> Columns:
    """The columns whose values differ."""
    return [(title, values) for title, values in columns if len(set(values)) > 1]


def summary_columns(summaries: Sequence[Summary | None]) -> Columns:
    return number_columns(summaries, {name: name for name in ("mean", "median", "p90", "p95", "p99")})


def measurement_columns(measured: Sequence[BenchRecord | BatchResult], summaries: Sequence[Summary | None]) -> Columns:
    """Columns of measurements: batch, rates, times, and what is wrong with them if anything is."""
    states = (("not stable", "stable"), ("incomplete", "complete"))
    state = [", ".join(word for word, name in states if not getattr(item, name, True)) for item in measured]
    per_image = [s.mean / item.batch if s else None for item, s in zip(measured, summaries, strict=True)]
    return [
        ("batch", [str(item.batch) for item in measured]),
        ("queries/s", format_column([item.qps for item in measured])),
        ("images/s", format_column([item.images_per_s for item in measured])),
        ("ms per image", format_column(per_image)),
        *summary_columns(summaries),
        *([("", state)] if any(state) else []),
    ]


# ------------------------------------------------------------------------------------------------ phrases


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def sized(text: object, nbytes: int | None) -> str:
    """`model.engine (4.0 KiB)`."""
    return f"{text}" if nbytes is None else f"{text} ({format_bytes(nbytes)})"


def shapes_text(shapes: Mapping[str, Sequence[int]], sign: str = ":") -> str:
    return ", ".join(f"{name}{sign}{format_shape(tuple(shape))}" for name, shape in shapes.items())


def more_note(most: int, many: int, which: str = "first") -> str:
    """`, the first 24 of 30`, if not all are shown."""
    return f", the {most} {which} of {many}" if many > most else ""


def first_lines(lines: Sequence[str], most: int, rest: str = "") -> list[str]:
    """The first lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more{rest}"] if len(lines) > most else [])]


def metric_text(value: float) -> str:
    """-1 is COCO's value for a metric without objects."""
    return "-" if value < 0 else f"{value:.4f}"


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """`warning: code: message` and its hint."""
    for item in findings:
        yield f"{item.severity}: {item.code}: {item.full_message}"
        if item.hint:
            yield f"  hint: {item.hint}"


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


def to_sentence(text: str) -> str:
    """Add a full stop, and capitalize a plain first word."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    plain = first.isalpha() and first.islower()
    return f"{text[:1].upper() if plain else text[:1]}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def with_hint(text: str, hint: str | None) -> str:
    return f"{text}; {hint}" if hint else text


def flatten_warning(text: str) -> str:
    """A warning and its hint in one line: `evaluate was left out: ...; `pip install ...``."""
    said, _, hint = text.partition("\nhint: ")
    return with_hint(" ".join(said.split()), " ".join(hint.split()))


_SUBJECT_PREFIX = re.compile(r"^(?:\d+ cells \(.*?\)|Batch \d+(?:, \d+)*|`[^`]+`): ")


def warning_summary(text: str) -> str:
    """Summarize a warning: without its subject, up to the first punctuation."""
    said = _SUBJECT_PREFIX.sub("", text)
    head = re.split(r"[:;.]\s(?=(?:[^`]*`[^`]*`)*[^`]*$)", said, maxsplit=1)[0].strip().rstrip(".,")
    return head if len(head) <= 90 else f"{head[:88].rsplit(' ', 1)[0]} …"


# ------------------------------------------------------------------------------------------------ engines


def requested_text(precision: Precision) -> str:
    return f" (requested: {precision.requested})" if precision.requested else ""


def layer_shares(precision: Precision, of: str = "") -> str:
    shares = precision.compute_shares.items()
    return ", ".join(f"{name} {format_percent(share.layers)}{of}" for name, share in shares)


def parity_fact(parity: Parity | None) -> Fact:
    """The difference between engine and model outputs."""
    if parity is None:
        return "parity", None
    rms = " RMS" if parity.metric == "rms_rel" else ""
    worst = max(parity.outputs, key=lambda name: parity.outputs[name].max_rel, default="")
    limit = parity.limits.get(worst, parity.tolerance)
    raised = ", raised as the model itself moves with rounding" if worst in parity.limits else ""
    lines = [f"{_largest_difference(parity.outputs)}, allowed {limit:.3g}{rms}{raised}"]
    if parity.source_errors:
        lines.append(f"from the model as it was given: {_largest_difference(parity.source_errors)} (not judged)")
    return "parity", lines


def _largest_difference(outputs: Mapping[str, OutputError]) -> str:
    """The output with the largest difference, and its location."""
    if not outputs:
        return "no output was compared"
    name, error = max(outputs.items(), key=lambda item: item[1].max_rel)
    return ", ".join(filter(None, (f"{name}: {error.summary}", error.rms_text)))


def signature_facts(signature: Signature, profiles: Sequence[Profile] = ()) -> list[Fact]:
    """Inputs, outputs and profiles, one row each."""
    return [
        *(("input", str(spec)) for spec in signature.inputs),
        *(("output", str(spec)) for spec in signature.outputs),
        *((f"profile {index}", str(profile)) for index, profile in enumerate(profiles)),
    ]


def smoke_time(smoke: Mapping[str, float]) -> str:
    """Times of a smoke run."""
    return (
        f"loaded in {format_ms(smoke['load_ms'])}, first inference {format_ms(smoke['first_ms'])}, "
        f"second {format_ms(smoke['second_ms'])} (seed {smoke['seed']})"
    )


def batch_option(model: str, *, batch: bool = True, data: object = None) -> str:
    """` --batch 1:8:64` for a model with a dynamic batch alone, shapes (of `data`) where needed; none for a missing file."""
    from trt_engine.graph.load import open_model
    from trt_engine.precision.samples import shapes_in
    from trt_engine.vision.spec import declared_shapes

    try:
        opened = open_model(Path(model))
    except TrtEngineError:
        return ""
    inputs, declared = opened.signature.inputs, declared_shapes(opened)
    if batch and {at for spec in inputs for at in spec.dynamic} == {0}:
        return " --batch 1:8:64"
    is_open = [spec for spec in inputs if set(spec.dynamic) - set(opened.signature.batch_axes(spec))]
    shapes = {spec.name: spec.suggested_shape() for spec in is_open if spec.name not in declared}
    return f" --shapes {shlex.quote(format_shapes(shapes_in(data, opened) or shapes))}" if shapes else ""


# ------------------------------------------------------------------------------------------------ cells, measurements


def shorten_label(label: str, most: int = 64) -> str:
    """Shorten a label to its beginning and end."""
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-(most // 2 - 1) :]}"


def precision_label(cell: CellResult) -> str:
    """The requested precision, and the actual one if different."""
    return cell.spec.precision + (f" (ran in {cell.compute_dtype})" if cell.compute_dtype else "")


def backend_label(spec: CellSpec) -> str:
    return spec.backend + (f" ({', '.join(spec.providers)})" if spec.providers else "")


def short_labels(cells: Sequence[CellSpec]) -> list[str]:
    """Name cells by their differences; use full labels if those would not be unique."""
    parts = [
        (cell.model, cell.precision, backend_label(cell), cell.device, f"batch {cell.batch}") for cell in cells
    ]  # fmt: skip
    columns = [values for values in zip(*parts, strict=True) if len(set(values)) > 1]
    short = [" · ".join(values) for values in zip(*columns, strict=True)]
    return short if len(cells) > 1 and len(set(short)) == len(cells) else [cell.label for cell in cells]


def measurement_names(records: Sequence[BenchRecord], known: Mapping[int, str]) -> dict[int, str]:
    """Name each measurement: the known name, else its batch and what tells it from others of that batch."""
    names: dict[int, str] = {}
    facts = {
        id(record): (record.protocol.name, record.device, record.backend, record.engine)
        for record in records
        if id(record) not in known
    }
    for index, record in enumerate(records):
        name = known.get(id(record))
        if name is None:
            twins = [facts[id(other)] for other in records if id(other) in facts and other.batch == record.batch]
            columns = zip(facts[id(record)], zip(*twins, strict=True), strict=True)
            different = (Path(own).name or own for own, values in columns if len(set(values)) > 1)
            name = ", ".join([f"batch {record.batch}", *different])
            name += f" ({index + 1})" if name in names.values() else ""
        names[id(record)] = name if record.complete else f"{name}, incomplete"
    return names
