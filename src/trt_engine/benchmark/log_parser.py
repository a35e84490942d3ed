"""Logs read back: trtexec's (8.5 to 11.x, by `trt_engine.trt.trtexec_log`) and our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import read_bounded
from trt_engine.errors import UsageError
from trt_engine.limits import LOG_LINES
from trt_engine.records.bench import LogReport
from trt_engine.trt import trtexec_log

_OURS = re.compile(r"^# device: (?P<device>\S+) \((?P<what>.*)\) · times are ")
_HOST_TIMES = re.compile(r"^[A-Z][A-Za-z0-9 ]* \([^()]*host clock[^()]*\): (?P<items>min = .*)$")
_ENDS = b"\n\r\v\f\x1c\x1d\x1e"


def read_log(path: Path) -> LogReport:
    """Parse the log at `path`. Raises `UsageError` when it is unreadable or of neither tool."""
    try:
        raw = read_bounded(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot read the log `{path}`: {reason}", hint="give a log of trtexec or of `bench`"
        ) from error
    if (lines := len(raw) - len(raw.translate(None, _ENDS))) > LOG_LINES.value:
        raise UsageError(f"`{path}` has more than {lines} lines", hint=LOG_LINES.hint)
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"  # PowerShell's `>` writes UTF-16
    report = parse_log(raw.decode(encoding, errors="replace"), str(path))
    if report.producer is None:
        raise UsageError(
            f"`{path}` is not a log of trtexec or trt-engine: no banner and no `[I]` line",
            hint="capture stdout and stderr: `trtexec ... 2>&1 | tee trtexec.log`",
        )
    return report


def parse_log(text: str, name: str = "log") -> LogReport:
    """Parse a log; the last value wins where a run reports twice."""
    lines = text.splitlines()
    ours = next((match for line in lines[:5] if (match := _OURS.match(line))), None)
    return trtexec_log.parse(text, name).report if ours is None else _parse_own_log(lines, name, ours["device"])


def _parse_own_log(raw: list[str], name: str, device: str) -> LogReport:
    """Parse a log of `bench`, which has its own end marker."""
    lines = [trtexec_log.parse_line(line) for line in raw]
    found: dict[str, Any] = {}
    for line in lines:
        if line.severity == "I":
            found.update(trtexec_log.parse_fields(line.text))
            found.update(_own_fields(line.text))
    whole = found.pop("whole", False)
    return LogReport(
        log=name,
        producer="trt-engine",
        status="passed" if whole and found.get("throughput_qps") is not None else "failed",
        end_marker="complete" if whole else None,
        device=device,
        warning_lines=sum(line.severity == "W" and line.stamped for line in lines),
        error_lines=sum(line.severity in ("E", "F") for line in lines),
        **found,
    )


def _own_fields(text: str) -> Iterator[tuple[str, Any]]:
    """Fields that only logs of `bench` have."""
    if (match := _HOST_TIMES.match(text)) and (times := trtexec_log.parse_times(match["items"])):
        yield "compute_ms", times
    name, colon, value = text.partition(": ")
    if name == "Protocol" and colon:
        yield "protocol", value.strip().partition(" ")[0]
    elif name == "End of measurement":
        yield "whole", value.strip() == "complete"
    elif name == "Batch" and value.strip().isdecimal() and len(value) < 19:
        yield "batch", int(value)
