"""What was measured before: records side by side, baseline files, and what may not be compared."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api.comparing.asked import Asked, numbered
from trt_engine.api.comparing.report import Found, Measured, record_of
from trt_engine.benchmark.paired import UNPAIRED, blocks_of, unpaired
from trt_engine.comparisons import Compared, CompareSide
from trt_engine.errors import UsageError
from trt_engine.files import explain, json_bytes, write_whole
from trt_engine.records import BenchRecord
from trt_engine.tensors import format_shape

__all__ = [
    "different_fields",
    "keep_baseline",
    "of_another_time",
    "of_records",
    "read_baseline",
    "refuse_different",
    "units",
]

_BASELINE = "trt-engine/baseline"

log = logging.getLogger(__package__)


def of_records(asked: Asked) -> Measured:
    """What was measured before, side by side."""
    if not all(asked.recorded):
        raise UsageError(
            "records and engines are named together",
            hint="measure both: `trt-engine compare A B`, or `--baseline FILE`",
        )
    if any(rule.metric == "error" for rule in asked.rules):
        raise UsageError("records hold no outputs to compare", hint="name the engines for `error:`")
    sides = [_side_of_record(name) for name in asked.names]
    if asked.baseline is not None:
        sides.insert(0, read_baseline(asked.baseline))
    labels = numbered([side.label for side in sides])
    for label, side in zip(labels, sides, strict=True):
        refuse_different(sides[0].label, record_of(sides[0]), label, record_of(side))
    sides = [dataclasses.replace(side, label=label) for label, side in zip(labels, sides, strict=True)]
    return Measured(
        sides=tuple(sides),
        found=tuple(_against(sides[0], side) for side in sides[1:]),
        blocks=min(len(units(side)) for side in sides),
        order="measured one after another, at different times",
        method=UNPAIRED,
        warnings=of_another_time(*sides),
    )


def _against(base: CompareSide, side: CompareSide) -> Found:
    differences, said = unpaired(units(base), units(side))
    compared = Compared(
        label=side.label,
        speed=tuple(item.record() for item in differences),
        outputs=(),
        outputs_note="records hold no outputs",
    )
    return Found(compared, differences, said)


def units(side: CompareSide) -> list[Sequence[float]]:
    """The blocks of a side: its loads; of a plain record, stretches of it."""
    if not side.loads or not side.blocks_ms:
        return blocks_of(record_of(side).compute_ms)
    found, at = [], 0
    for count in side.loads:
        found.append([value for block in side.blocks_ms[at : at + count] for value in block])
        at += count
    return [unit for unit in found if unit]


def of_another_time(base: CompareSide, *others: CompareSide) -> tuple[str, ...]:
    """What has to be said of sides that were not measured together."""
    said = (
        f"`{base.label}` was measured at another time: what the machine did in between is part of the difference, "
        "and the interval does not know it"
    )
    if all(side.loads for side in (base, *others)):
        return (said,)
    return said, "each record is of one load: how much loads of one engine differ is not in the interval"


def _side_of_record(name: str) -> CompareSide:
    """One line of a `records.jsonl`: the last, or the one named `FILE:N`."""
    match = re.fullmatch(r"(.*\.jsonl)(?::(\d+))?", name)
    assert match is not None
    path = Path(match[1])
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        raise UsageError(f"no such file `{path}`", hint="`trt-engine bench ENGINE -o DIR` writes one") from None
    except OSError as error:
        raise explain(error, path, "read") from error
    number = len(lines) if match[2] is None else int(match[2])
    if not 1 <= number <= len(lines):
        raise UsageError(f"`{path}` has {len(lines)} records, no number {number}", hint=f"`{path}:1` is the first")
    try:
        record = msgspec.json.decode(lines[number - 1], type=BenchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"line {number} of `{path}` is no record of a measurement: {str(error).lower()}",
            hint="`trt-engine bench ENGINE -o DIR` writes them",
        ) from error
    if match[2] is None and len(lines) > 1:
        log.info("`%s` has %d records, the last one is taken (`%s:1` is the first)", path, len(lines), path)
    return CompareSide(
        label=name,
        engine=record.engine,
        backend=record.backend,
        device=record.device,
        precision=record.facts.get("precision", "unknown"),
        engine_bytes=0,
        facts=record.facts,
        record=record,
    )


# ------------------------------------------------------------------------------------------------ baselines


class _Kept(msgspec.Struct):
    schema: str
    side: CompareSide
    schema_version: int = 1


def keep_baseline(path: Path, side: CompareSide) -> None:
    """The side in a file of its own, for `read_baseline`."""
    write_whole(path, json_bytes(_Kept(_BASELINE, side)) + b"\n")


def read_baseline(path: Path) -> CompareSide:
    """The side a baseline file holds, with its record."""
    hint = "`trt-engine compare ENGINE --save-baseline FILE` writes one"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such file `{path}`", hint=hint) from None
    except OSError as error:
        raise explain(error, path, "read") from error
    try:
        kept = msgspec.json.decode(raw, type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is no baseline: {str(error).lower()}", hint=hint) from error
    if kept.schema != _BASELINE or kept.side.record is None:
        raise UsageError(f"`{path}` is `{kept.schema}`, expected `{_BASELINE}`", hint=hint)
    if kept.schema_version > 1:
        raise UsageError(
            f"`{path}` has schema version {kept.schema_version}, this tool reads up to 1",
            hint="install a newer trt-engine",
        )
    return kept.side


# ------------------------------------------------------------------------------------------------ what is refused


_LENGTHS = ("duration_s", "min_iterations")
"""How long it took is no other way of measuring."""
_NO_MATTER = ("memory_mib",)


def refuse_different(name: str, record: BenchRecord, other_name: str, other: BenchRecord) -> None:
    """`UsageError` naming what differs in how, on what and with what two records were measured."""
    differing = [
        f"{what} ({_shown(a)} against {_shown(b)})"
        for what, a, b in (
            ("device", record.device, other.device),
            ("batch", record.batch, other.batch),
            ("shapes", record.shapes, other.shapes),
            ("measured", record.facts.get("measured", "alone"), other.facts.get("measured", "alone")),
        )
        if a != b
    ]
    differing += different_fields(record.protocol, other.protocol, "protocol.", _LENGTHS)
    differing += different_fields(record.environment, other.environment, "environment.", _NO_MATTER)
    if differing:
        raise UsageError(
            f"`{name}` and `{other_name}` do not compare: {'; '.join(differing)}",
            hint="measure both here, in turns: `trt-engine compare A B`",
        )


def different_fields(one: Any, other: Any, prefix: str, but: Sequence[str] = ()) -> list[str]:
    """The fields of two values that differ, with both."""
    return [
        f"{prefix}{item.name} ({_shown(getattr(one, item.name))} against {_shown(getattr(other, item.name))})"
        for item in dataclasses.fields(one)
        if item.name not in but and getattr(one, item.name) != getattr(other, item.name)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return (
            ", ".join(
                f"{name} {format_shape(item) if isinstance(item, tuple) else item}" for name, item in value.items()
            )
            or "nothing"
        )
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return "on" if value is True else "off" if value is False else f"`{value}`"
