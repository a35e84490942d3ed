"""The files trtexec exports: times of every query, and times of every layer. (Its layers: `plans.layers`.)

Keys are those of `samples/common/sampleReporting.cpp`, 8.5 to 11.1. The start and end fields of `--exportTimes` have six
significant digits from the start of the run, so only the durations are used. Layer names in `--exportProfile` are not
escaped: a name with a quote makes the file no JSON, and it is read all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.errors import EngineError
from trt_engine.plans.trtexec_log import LayerTime

__all__ = ["QueryTimes", "read_profile", "read_times"]


@dataclass(frozen=True, slots=True)
class QueryTimes:
    """One list entry per query, in ms, the warm-up left out."""

    compute_ms: tuple[float, ...]
    latency_ms: tuple[float, ...]
    h2d_ms: tuple[float, ...]
    d2h_ms: tuple[float, ...]


def read_times(path: Path) -> QueryTimes:
    """The times of `--exportTimes`; `EngineError` for a file that is none."""
    entries = _json(_text(path), path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _damaged(path, "it is no list of queries")
    try:
        return QueryTimes(
            *(tuple(_number(entry[name]) for entry in entries) for name in ("computeMs", "latencyMs", "h2dMs", "d2hMs"))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"a query lacks {error}") from error


def read_profile(path: Path) -> tuple[int, tuple[LayerTime, ...]]:
    """The iterations and the layers of `--exportProfile`; `EngineError` for a file that is none."""
    text = _text(path)
    try:
        entries = msgspec.json.decode(text)
    except msgspec.DecodeError:
        entries = _tolerant(text)
    if not isinstance(entries, list):
        raise _damaged(path, "it is no list of layers")
    count, rows = 0, []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise _damaged(path, "an entry is no layer")
        if "name" not in entry:
            count = int(entry.get("count", count))
            continue
        try:
            median = entry.get("medianMs", entry["averageMs"])  # 8.4 and earlier had none
            rows.append(
                LayerTime(
                    str(entry["name"]), _number(entry["timeMs"]), _number(entry["averageMs"]), _number(median),
                    _number(entry["percentage"]),
                )
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"a layer lacks {error}") from error
    if not rows and not count:
        raise _damaged(path, "there is no layer in it")
    return count, tuple(rows)


_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)"
_COUNT = re.compile(r'\{\s*"count"\s*:\s*(\d+)\s*\}')
_LAYER = re.compile(
    r'\{\s*"name"\s*:\s*"(?P<name>.*?)"\s*,\s*"timeMs"\s*:\s*(?P<timeMs>@)\s*,\s*"averageMs"\s*:\s*(?P<averageMs>@)'
    r'\s*,(?:\s*"medianMs"\s*:\s*(?P<medianMs>@)\s*,)?\s*"percentage"\s*:\s*(?P<percentage>@)\s*\}'.replace(
        "@", _NUMBER
    ),
    re.DOTALL,
)


def _tolerant(text: str) -> list[dict[str, Any]] | None:
    """The entries by their keys, whatever stands in the names."""
    count = _COUNT.search(text)
    found: list[dict[str, Any]] = [] if count is None else [{"count": int(count[1])}]
    for match in _LAYER.finditer(text):
        found.append({name: value for name, value in match.groupdict().items() if value is not None})
    return found or None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise _damaged(path, (error.strerror or str(error)).lower()) from error


def _json(text: str, path: Path) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        try:  # `inf` and `nan` are printed bare
            return msgspec.json.decode(re.sub(r"(?<=: )(-?inf|-?nan)\b", r'"\1"', text))
        except msgspec.DecodeError:
            raise _damaged(path, str(error)) from error


def _number(value: Any) -> float:
    return float(value)


def _damaged(path: Path, what: str) -> EngineError:
    return EngineError(f"`{path}` is no export of trtexec: {what}", hint="export it again")
