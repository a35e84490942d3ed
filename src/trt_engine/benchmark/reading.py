"""Logs read back: trtexec's (8.5 to 11.x, by `trt_engine.plans.trtexec_log`) and our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.errors import UsageError
from trt_engine.plans import trtexec_log
from trt_engine.records import LogReport

__all__ = ["parse_log", "read_log"]

_OURS = re.compile(r"^# device: (?P<device>\S+) \((?P<what>.*)\) · times are ")
_HOST_TIMES = re.compile(r"^[A-Z][A-Za-z0-9 ]* \([^()]*host clock[^()]*\): (?P<items>min = .*)$")


def read_log(path: Path) -> LogReport:
    """What is in the log at `path`; `UsageError` when it cannot be read or is no log of either tool."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot read the log `{path}`: {reason}", hint="give a log of trtexec or of `bench`"
        ) from error
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"  # PowerShell's `>` writes UTF-16
    report = parse_log(raw.decode(encoding, errors="replace"), str(path))
    if report.written_by is None:
        raise UsageError(
            f"`{path}` is no log of trtexec or trt-engine: no banner and no `[I]` line",
            hint="capture stdout and stderr: `trtexec ... 2>&1 | tee trtexec.log`",
        )
    return report


def parse_log(text: str, name: str = "log") -> LogReport:
    """The facts of a log, the last one of each kind where a run reports twice."""
    lines = text.splitlines()
    ours = next((match for line in lines[:5] if (match := _OURS.match(line))), None)
    return trtexec_log.parse(text, name).report if ours is None else _ours(lines, name, ours["device"])


def _ours(raw: list[str], name: str, device: str) -> LogReport:
    """A log of `bench`: it says itself whether it is whole."""
    lines = [trtexec_log.read_line(line) for line in raw]
    found: dict[str, Any] = {}
    for line in lines:
        if line.severity == "I":
            found.update(trtexec_log.facts_of(line.text))
            found.update(_own_facts(line.text))
    whole = found.pop("whole", False)
    return LogReport(
        log=name,
        written_by="trt-engine",
        status="passed" if whole and found.get("throughput_qps") is not None else "failed",
        end_marker="complete" if whole else None,
        device=device,
        warning_lines=sum(line.severity == "W" and line.stamped for line in lines),
        error_lines=sum(line.severity in ("E", "F") for line in lines),
        **found,
    )


def _own_facts(text: str) -> Iterator[tuple[str, Any]]:
    """What only our own lines say."""
    if (match := _HOST_TIMES.match(text)) and (times := trtexec_log.times_of(match["items"])):
        yield "compute_ms", times
    name, colon, value = text.partition(": ")
    if name == "Protocol" and colon:
        yield "protocol", value.strip().partition(" ")[0]
    elif name == "End of measurement":
        yield "whole", value.strip() == "complete"
    elif name == "Batch" and value.strip().isdecimal():
        yield "batch", int(value)
