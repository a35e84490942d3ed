"""Logs read back: trtexec's (8.5 to 11.1) and our own.

Line formats are those of `samples/common/sampleReporting.cpp` and `logging.h` of the public TensorRT repository; a figure
counts only behind trtexec's own `[I]` prefix, because its verbose explanations and the library's lines look alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.errors import UsageError
from trt_engine.records import LoggedTimes, LogReport

__all__ = ["parse_log", "read_log"]

_LINE = re.compile(
    r"^(?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] )?\[(?P<severity>[FEWIV])\] (?P<trt>\[TRT\] )?(?P<text>.*)$"
)
_STAMPED = re.compile(r"^\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] ")
_BANNER = re.compile(
    r"^&&&& (?P<mark>RUNNING|PASSED|FAILED|WAIVED) (?P<tool>\S+) \[TensorRT v(?P<version>\d+)\]"
    r"(?: \[b(?P<build>\d+)\])? # ?(?P<command>.*)$"
)
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)"
_ITEM = re.compile(rf"(min|max|mean|median|percentile\(({_NUMBER})%\)) = ({_NUMBER}) ms")
_OURS = re.compile(r"^# device: (?P<device>\S+) \((?P<what>.*)\) · times are ")

_TIMES = {
    "Latency": "latency_ms",
    "Enqueue Time": "enqueue_ms",
    "H2D Latency": "h2d_ms",
    "GPU Compute Time": "gpu_compute_ms",
    "D2H Latency": "d2h_ms",
}
_SWITCHES = {"Data transfers": "data_transfers", "Spin-wait": "spin_wait", "CUDA Graph": "cuda_graph"}
_SUMMARY = re.compile(r"^(?P<name>[A-Z][A-Za-z0-9 ]*?)(?P<note> \([^()]*\))?: (?P<items>min = .*)$")
_FIGURES: tuple[tuple[re.Pattern[str], tuple[tuple[str, type], ...]], ...] = tuple(
    (re.compile(pattern.replace("N", f"({_NUMBER})")), fields)
    for pattern, fields in (
        (r"^Throughput: N qps$", (("throughput_qps", float),)),
        (r"^Total Host Walltime: N s$", (("total_host_walltime_s", float),)),
        (r"^Total GPU Compute Time: N s$", (("total_gpu_compute_time_s", float),)),
        (r"^Warmup completed N queries over N ms$", (("warmup_queries", int), ("warmup_ms", float))),
        (r"^Timing trace has N queries over", (("timed_queries", int),)),
        (r"^Engine built in N sec\.$", (("engine_built_s", float),)),
        (r"^(?:Created|Loaded) engine with size: N MiB", (("engine_size_mib", float),)),
        (r"^Engine deserialized in N sec\.", (("engine_deserialized_s", float),)),
        (r"^Batch: N$", (("batch", int),)),
    )
)
_PERF = (
    ("enqueue_bound", "* Throughput may be bound by Enqueue Time"),
    ("h2d_bound", "* Throughput may be bound by host-to-device transfers"),
    ("d2h_bound", "* Throughput may be bound by device-to-host transfers"),
)
_UNSTABLE = re.compile(rf"\* GPU compute time is unstable, with coefficient of variance = ({_NUMBER})%")


def read_log(path: Path) -> LogReport:
    """What is in the log at `path`; `UsageError` when it cannot be read or is no log of either tool."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot read the log `{path}`: {reason}", hint="give a log of trtexec or of `bench`"
        ) from error
    report = parse_log(raw.decode(errors="replace"), str(path))
    if report.written_by is None:
        raise UsageError(
            f"`{path}` is no log of trtexec or trt-engine: no banner and no `[I]` line",
            hint="capture stdout and stderr: `trtexec ... 2>&1 | tee trtexec.log`",
        )
    return report


def parse_log(text: str, name: str = "log") -> LogReport:
    """The facts of a log, the last one of each kind where a run reports twice."""
    lines = text.splitlines()
    found: dict[str, Any] = dict(_banner(lines))
    ours = next((match for line in lines[:5] if (match := _OURS.match(line))), None)
    perf: dict[str, None] = {}
    warning_lines = error_lines = 0
    prefixed = False
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        severity, message = match["severity"], match["text"]
        prefixed = True
        warning_lines += severity == "W" and bool(_STAMPED.match(line))
        error_lines += severity in "EF"
        if severity == "I" and not match["trt"]:
            found.update(_facts(message))
        elif severity == "W":
            for label, start in _PERF:
                if message.startswith(start):
                    perf[label] = None
            if unstable := _UNSTABLE.match(message):
                perf["gpu_compute_unstable"] = None
                found["gpu_compute_coeff_var_pct"] = float(unstable[1])
    if ours is not None:
        found["device"] = ours["device"]
        found["end_marker"] = "complete" if found.pop("whole", False) else None
        found["status"] = "passed" if found["end_marker"] and found.get("throughput_qps") is not None else "failed"
    found.pop("whole", None)
    order = [label for label, _ in _PERF] + ["gpu_compute_unstable"]
    written_by = "trt-engine" if ours else "trtexec" if prefixed or found.get("trt_version") else None
    return LogReport(
        log=name,
        written_by=written_by,  # type: ignore[arg-type]
        perf_warnings=tuple(label for label in order if label in perf),
        warning_lines=warning_lines,
        error_lines=error_lines,
        **found,
    )


def _banner(lines: list[str]) -> Iterator[tuple[str, Any]]:
    """Version, command, and the verdict: the last marker of the tool decides, and a log without one is failed."""
    marks = [match for line in lines if (match := _BANNER.match(line.rstrip()))]
    ends = [mark["mark"] for mark in marks if mark["mark"] != "RUNNING"]
    yield "end_marker", ends[-1] if ends else None
    yield "status", "passed" if ends and ends[-1] in ("PASSED", "WAIVED") else "failed"
    if marks:
        yield "trt_version", _version(int(marks[0]["version"]))
        yield "trt_build", int(marks[0]["build"]) if marks[0]["build"] else None
        yield "command", marks[0]["command"].rstrip()


def _version(number: int) -> str:
    """`101601` is 10.16.1; up to 9.x the major stood before three digits: `8502` is 8.5.2."""
    if number >= 100_000:
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return f"{number // 1000}.{number // 100 % 10}.{number % 100}"


def _facts(message: str) -> Iterator[tuple[str, Any]]:
    """What one `[I]` line says."""
    if summary := _SUMMARY.match(message):
        if times := _times(summary["items"]):
            if summary["note"] is None and summary["name"] in _TIMES:
                yield _TIMES[summary["name"]], times
            elif summary["note"] is not None and "host clock" in summary["note"]:
                yield "compute_ms", times
        return
    name, colon, value = message.partition(": ")
    value = value.strip()
    if name in _SWITCHES and value in ("Enabled", "Disabled"):
        yield _SWITCHES[name], value == "Enabled"
    elif name == "Selected Device" and colon:
        yield "gpu", value
    elif name == "Compute Capability" and colon:
        yield "compute_capability", value
    elif name == "Protocol" and colon:
        yield "protocol", value.partition(" ")[0]
    elif name == "End of measurement":
        yield "whole", value == "complete"
    else:
        for pattern, fields in _FIGURES:
            if match := pattern.match(message.rstrip()):
                for (field, kind), text in zip(fields, match.groups(), strict=False):
                    yield field, kind(float(text))


def _times(items: str) -> LoggedTimes | None:
    """The items of a summary line, as printed."""
    plain: dict[str, float] = {}
    percentiles: dict[str, float] = {}
    for name, percent, value in _ITEM.findall(items):
        if percent:
            percentiles[f"{float(percent):g}"] = float(value)
        else:
            plain[name] = float(value)
    if set(plain) != {"min", "max", "mean", "median"}:
        return None
    return LoggedTimes(
        **plain,
        p90=percentiles.get("90"),
        p95=percentiles.get("95"),
        p99=percentiles.get("99"),
        percentiles=percentiles,
    )
