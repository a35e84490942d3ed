"""The files trtexec exports: times of every query, and times of every layer. (Its layers: `trt.layers`.)

Keys are those of `samples/common/sampleReporting.cpp`, 8.5 to 11.1. The start and end fields of `--exportTimes` have six
significant digits from the start of the run, so only the durations are used. Layer names in `--exportProfile` are not
escaped: a name with a quote makes the file invalid JSON, which is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.errors import EngineError
from trt_engine.trt.trtexec_log import LayerTime


@dataclass(frozen=True, slots=True)
class QueryTimes:
    """One entry per query, in ms, without warm-up."""

    compute_ms: tuple[float, ...]
    latency_ms: tuple[float, ...]
    h2d_ms: tuple[float, ...]
    d2h_ms: tuple[float, ...]


def read_times(path: Path) -> QueryTimes:
    """The times of `--exportTimes`; `EngineError` for another file."""
    entries = _parse_json(_read_text(path), path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _damaged_error(path, "it is not a list of queries")
    try:
        return QueryTimes(
            *(tuple(float(entry[name]) for entry in entries) for name in ("computeMs", "latencyMs", "h2dMs", "d2hMs"))
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged_error(path, f"a query lacks {error}") from error


def read_profile(path: Path) -> tuple[int, tuple[LayerTime, ...]]:
    """The iterations and the layers of `--exportProfile`; `EngineError` for another file."""
    text = _read_text(path)
    try:
        entries = decode_json(text)
    except msgspec.DecodeError:
        entries = _parse_tolerant(text)
    if not isinstance(entries, list):
        raise _damaged_error(path, "it is not a list of layers")
    count, rows = 0, []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise _damaged_error(path, "an entry is not a layer")
        if "name" not in entry:
            count = _as_count(entry.get("count", count), path)
            continue
        try:
            median = entry.get("medianMs", entry["averageMs"])  # 8.4 and earlier had none
            rows.append(
                LayerTime(
                    str(entry["name"]), float(entry["timeMs"]), float(entry["averageMs"]), float(median),
                    float(entry["percentage"]),
                )
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _damaged_error(path, f"a layer lacks {error}") from error
    if not rows and not count:
        raise _damaged_error(path, "it contains no layer")
    return count, tuple(rows)


_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|inf|nan)"
_COUNT = re.compile(r'\{\s*"count"\s*:\s*(\d{1,18})\s*\}')
_OPENING = re.compile(r'\{\s*"name"\s*:\s*"')
_VALUES = re.compile(
    r'"\s*,\s*"timeMs"\s*:\s*(?P<timeMs>@)\s*,\s*"averageMs"\s*:\s*(?P<averageMs>@)\s*,'
    r'(?:\s*"medianMs"\s*:\s*(?P<medianMs>@)\s*,)?\s*"percentage"\s*:\s*(?P<percentage>@)\s*\}'.replace("@", _NUMBER)
)


def _parse_tolerant(text: str) -> list[dict[str, Any]] | None:
    """The entries of invalid JSON: numbers are matched first, the text between them is a name."""
    count = _COUNT.search(text)
    found: list[dict[str, Any]] = [] if count is None else [{"count": int(count[1])}]
    start = 0
    for figures in _VALUES.finditer(text):
        if opening := _OPENING.search(text, start, figures.start()):
            entry = {name: value for name, value in figures.groupdict().items() if value is not None}
            found.append({"name": text[opening.end() : figures.start()]} | entry)
        start = figures.end()
    return found or None


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, error=EngineError).decode(errors="replace")
    except OSError as error:
        raise _damaged_error(path, (error.strerror or str(error)).lower()) from error


def _parse_json(text: str, path: Path) -> Any:
    try:
        return decode_json(text)
    except msgspec.DecodeError as error:
        try:  # `inf` and `nan` are printed bare
            return decode_json(re.sub(r"(?<=: )(-?inf|-?nan)\b", r'"\1"', text))
        except msgspec.DecodeError:
            raise _damaged_error(path, str(error)) from error


def _as_count(value: Any, path: Path) -> int:
    if isinstance(value, int) and 0 <= value < 1 << 63:
        return value
    raise _damaged_error(path, "its count is not a whole number")


def _damaged_error(path: Path, what: str) -> EngineError:
    return EngineError(f"`{path}` is not a trtexec export: {what}", hint="export it again")
