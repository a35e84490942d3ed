"""Earlier measurements: records, baseline files, and which of them may be compared."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trt_engine.atomic_io import decode_json, encode_json, os_error, read_bounded, write_atomic
from trt_engine.benchmark.speed_difference import UNPAIRED_METHOD, split_blocks, unpaired_differences
from trt_engine.errors import UsageError
from trt_engine.records.bench import BenchRecord
from trt_engine.records.compare import CompareReport, CompareSide, Comparison
from trt_engine.verbs.candidates import different_fields, format_field
from trt_engine.verbs.compare.report import CompareRun, PairResult, find_doubt, require_record
from trt_engine.verbs.compare.request import CompareRequest, unique_labels

_BASELINE = "trt-engine/baseline"

log = logging.getLogger(__package__)


def compare_records(request: CompareRequest) -> CompareRun:
    """Comparison of earlier records."""
    if not all(request.from_records):
        raise UsageError(
            "records and engines are named together",
            hint="measure both: `trt-engine compare A B`, or `--baseline FILE`",
        )
    if any(rule.metric == "error" for rule in request.rules):
        raise UsageError("records hold no outputs to compare", hint="name the engines for `error:`")
    sides = [_read_record_side(name) for name in request.labels]
    if request.options.baseline is not None:
        sides.insert(0, read_baseline(request.options.baseline))
    labels = unique_labels([side.label for side in sides])
    for label, side in zip(labels, sides, strict=True):
        require_same_conditions(sides[0].label, require_record(sides[0]), label, require_record(side))
    sides = [dataclasses.replace(side, label=label) for label, side in zip(labels, sides, strict=True)]
    return CompareRun(
        sides=tuple(sides),
        results=tuple(compare_with_base(sides[0], side) for side in sides[1:]),
        blocks=min(len(resampling_blocks(side)) for side in sides),
        order="measured one after another, at different times",
        method=UNPAIRED_METHOD,
        warnings=unpaired_warnings(*sides),
    )


def compare_with_base(base: CompareSide, side: CompareSide, *, by_turns: bool = False) -> PairResult:
    """Speed of a side against the base, unpaired; `by_turns` where their loads alternated."""
    differences, said = unpaired_differences(resampling_blocks(base), resampling_blocks(side))
    compared = Comparison(
        label=side.label,
        speed=tuple(item.to_record() for item in differences),
        outputs=(),
        outputs_note="records hold no outputs",
    )
    return PairResult(compared, differences, said, *find_doubt(base, side, by_turns=by_turns))


def resampling_blocks(side: CompareSide) -> list[Sequence[float]]:
    """The blocks of a side: its loads; of a plain record, stretches of it."""
    if not side.restart_blocks or not side.blocks_ms:
        return split_blocks(require_record(side).compute_ms)
    found, at = [], 0
    for count in side.restart_blocks:
        found.append([value for block in side.blocks_ms[at : at + count] for value in block])
        at += count
    return [unit for unit in found if unit]


def unpaired_warnings(base: CompareSide, *others: CompareSide) -> tuple[str, ...]:
    """Warnings for sides that were not measured together."""
    said = (
        f"`{base.label}` was measured at another time: what the machine did in between is part of the difference, "
        "and the interval does not know it"
    )
    if all(side.restart_blocks for side in (base, *others)):
        return (said,)
    return said, "each record is of one load: how much loads of one engine differ is not in the interval"


def _read_record_side(name: str) -> CompareSide:
    """One line of a `records.jsonl`: the last, or the one named `FILE:N`."""
    match = re.fullmatch(r"(.*\.jsonl)(?::(\d+))?", name)
    assert match is not None
    path = Path(match[1])
    try:
        lines = [line for line in read_bounded(path).splitlines() if line.strip()]
    except FileNotFoundError:
        raise UsageError(f"no such file `{path}`", hint="`trt-engine bench ENGINE -o DIR` writes one") from None
    except OSError as error:
        raise os_error(error, path, "read") from error
    number = len(lines) if match[2] is None else int(match[2])
    if not 1 <= number <= len(lines):
        raise UsageError(f"`{path}` has {len(lines)} records, no number {number}", hint=f"`{path}:1` is the first")
    try:
        record = decode_json(lines[number - 1], BenchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"line {number} of `{path}` is not a record of a measurement: {str(error).lower()}",
            hint="`trt-engine bench ENGINE -o DIR` writes them",
        ) from error
    if match[2] is None and len(lines) > 1:
        log.info("`%s` has %d records, the last one is taken (`%s:1` is the first)", path, len(lines), path)
    return CompareSide(
        label=name,
        engine=record.engine,
        backend=record.backend,
        device=record.device,
        precision=record.runtime_info.get("precision", "unknown"),
        engine_bytes=0,
        runtime_info=record.runtime_info,
        record=record,
    )


# ------------------------------------------------------------------------------------------------ baselines


class _BaselineFile(msgspec.Struct):
    schema: str
    side: CompareSide
    schema_version: int = 1


def write_baseline(path: Path, side: CompareSide, report: CompareReport) -> None:
    """Write the side to a file, for `read_baseline`; as unstable as the report of its measurement."""
    record = dataclasses.replace(require_record(side), stable=report.stable, instability=report.instability)
    side = dataclasses.replace(side, record=record)
    write_atomic(path, encode_json(_BaselineFile(_BASELINE, side)) + b"\n")


def read_baseline(path: Path) -> CompareSide:
    """The side a baseline file holds, with its record."""
    hint = "`trt-engine compare ENGINE --save-baseline FILE` writes one"
    try:
        raw = read_bounded(path)
    except FileNotFoundError:
        raise UsageError(f"no such file `{path}`", hint=hint) from None
    except OSError as error:
        raise os_error(error, path, "read") from error
    try:
        kept = decode_json(raw, _BaselineFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is not a baseline: {str(error).lower()}", hint=hint) from error
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
"""Protocol fields that may differ: durations."""
_IGNORED_FIELDS = ("memory_mib",)


def require_same_conditions(
    name: str, record: BenchRecord, other_name: str, other: BenchRecord, ignored: Sequence[str] = ()
) -> None:
    """`UsageError` naming what differs in how, on what and with what two records were measured.

    `ignored` are fields of the environment that may differ.
    """
    differing = [
        f"{what} ({format_field(a)} against {format_field(b)})"
        for what, a, b in (
            ("device", record.device, other.device),
            ("batch", record.batch, other.batch),
            ("shapes", record.shapes, other.shapes),
            ("measured", record.runtime_info.get("measured", "alone"), other.runtime_info.get("measured", "alone")),
        )
        if a != b
    ]
    differing += different_fields(record.protocol, other.protocol, "protocol.", _LENGTHS)
    differing += different_fields(record.environment, other.environment, "environment.", (*_IGNORED_FIELDS, *ignored))
    if differing:
        raise UsageError(
            f"`{name}` and `{other_name}` do not compare: {'; '.join(differing)}",
            hint="measure both here, interleaved: `trt-engine compare A B`",
        )
