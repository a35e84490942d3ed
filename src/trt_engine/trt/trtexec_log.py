"""Parser of trtexec's logs, 8.5 to 11.x, complete or line by line.

Line formats are those of `samples/common/sampleReporting.cpp`, `sampleOptions.cpp` and `logging.h` of the public TensorRT
repository. Values count only behind trtexec's `[I]` prefix, because its verbose explanations and the library's lines
look alike. Success is decided at the log's end: a build can fail after `Engine built in`, and `PASSED` can follow an
engine that failed to load.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_engine.plan_header import plan_header
from trt_engine.records.bench import LoggedProfile, LoggedTimes, LogReport
from trt_engine.trt.failure_causes import Cause, cause_hint, error_texts, extract_node, find_cause, main_error
from trt_engine.trt.log_prefixes import STAMP, normalise
from trt_engine.trt.versions import Version

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_START = re.compile(rf"(?=&&&& (?:RUNNING|PASSED|FAILED|WAIVED|TASK_)|{STAMP}\[[FEWIV]\])")
"""The start of a line whose predecessor lacks a newline: two streams were written into one file."""
_LINE = re.compile(
    rf"^[\s>]*(?P<stamp>{STAMP})?\[(?P<severity>[FEWIV])\](?: (?P<library>\[TRT\])(?= |$))?(?: (?P<text>.*))?$"
)
_BANNER = re.compile(
    r"^[\s>]*&&&& (?P<mark>RUNNING|PASSED|FAILED|WAIVED) (?P<tool>\S+) \[TensorRT v(?P<version>\d+)\]"
    r"(?: \[b(?P<build>\d+)\])?(?: # ?(?P<command>.*))?$"
)
_TASK = re.compile(r"^[\s>]*&&&& TASK_(?P<what>BEGIN|END|ABORT)\b")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|inf|nan)"
_STATISTIC = re.compile(rf"(min|max|mean|median|percentile\(({_NUMBER})%\)) = ({_NUMBER}) ms")
_TIMES = {
    "Latency": "latency_ms",
    "Enqueue Time": "enqueue_ms",
    "H2D Latency": "h2d_ms",
    "GPU Compute Time": "gpu_compute_ms",
    "D2H Latency": "d2h_ms",
}
_SUMMARY = re.compile(r"^(?P<name>[A-Z][A-Za-z0-9 ]*?): (?P<items>min = .*)$")
_SWITCHES = {"Data transfers": "data_transfers", "Spin-wait": "spin_wait", "CUDA Graph": "cuda_graph"}
_FIELDS: tuple[tuple[re.Pattern[str], tuple[tuple[str, type], ...]], ...] = tuple(
    (re.compile(pattern.replace("N", f"({_NUMBER})")), fields)
    for pattern, fields in (
        (r"^Throughput: N qps$", (("throughput_qps", float),)),
        (r"^Total Host Walltime: N s$", (("total_host_walltime_s", float),)),
        (r"^Total GPU Compute Time: N s$", (("total_gpu_compute_time_s", float),)),
        (r"^Warmup completed N queries over N ms$", (("warmup_queries", int), ("warmup_ms", float))),
        (r"^Timing trace has N queries over N s$", (("timed_queries", int),)),
        (r"^Engine built in N sec\.$", (("engine_built_s", float),)),
        (r"^(?:Created|Loaded) engine with size: N MiB", (("engine_size_mib", float),)),
        (r"^Engine deserialized in N sec\.", (("engine_deserialized_s", float),)),
    )
)
_PERFORMANCE_WARNINGS = (
    ("enqueue_bound", "* Throughput may be bound by Enqueue Time"),
    ("h2d_bound", "* Throughput may be bound by host-to-device transfers"),
    ("d2h_bound", "* Throughput may be bound by device-to-host transfers"),
    ("gpu_compute_unstable", "* GPU compute time is unstable"),
)
_UNSTABLE = re.compile(rf"^\* GPU compute time is unstable, with coefficient of variance = ({_NUMBER})%")
_POOLS = "Memory Pools: "
_POOL = re.compile(rf"\b(?P<name>\w+): (?:(?P<size>{_NUMBER}) (?P<unit>[KMG]iB|B)|default)")
_PROFILE = re.compile(r"^=== Profile \((?P<iterations>\d{1,18}) iterations? ?\) ===")
_CELL = re.compile(_NUMBER)
_UNIT_MIB = {"B": 1 / (1 << 20), "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
_GRAPH_FAILURES = (
    "The specified --useCudaGraph flag has been ignored",
    "CUDA graph capture failed. The inference will be launched without using CUDA graph",
    "operations that are not permitted under CUDA graph capture mode",
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log; severity `""` is a line without prefix, a continuation or unprefixed output."""

    severity: str
    text: str
    from_library: bool = False
    stamped: bool = False


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One row of a layer table."""

    name: str
    time_ms: float
    average_ms: float
    median_ms: float
    share_pct: float


def parse_line(raw: str) -> LogLine:
    """The line without its prefix."""
    raw = _COLOUR.sub("", raw).rstrip("\r\n")
    match = _LINE.match(raw)
    if match is None:
        return LogLine("", raw)
    return LogLine(match["severity"], match["text"] or "", bool(match["library"]), bool(match["stamp"]))


def split_lines(text: str) -> list[str]:
    """The lines of a log; lines joined by two streams are split."""
    return [part for line in _COLOUR.sub("", text).splitlines() for part in _LINE_START.split(line) if part or not line]


@dataclass(frozen=True, slots=True)
class TrtexecLog:
    """A parsed log: its report, the cause of its failure, and fields for callers that run trtexec."""

    report: LogReport
    cause: Cause | None
    """Finer than the report's `error_class`; None when it passed."""
    banner: dict[str, str]
    """The options as trtexec prints them: `Iterations`, `Percentiles`, `Save engine`, by their names."""
    cuda_graph_failed: bool = False
    """A requested CUDA graph could not be captured; the banner still prints `Enabled`."""
    last_error_line: str = ""
    """The last line of output."""


def parse(text: str | Sequence[str], name: str = "log") -> TrtexecLog:
    """The log of a complete or truncated run; the last value of each field if reported twice.

    If the file holds several runs (`>>`, retries of a build), the last run is parsed.
    """
    plain, other = normalise(text.splitlines() if isinstance(text, str) else text)
    raw = [part for line in plain for part in split_lines(line)]
    marks, outside = _main_run_markers(raw)
    if len(begins := _run_starts(raw, outside)) > 1:
        raw = raw[begins[-1] :]
        marks, outside = _main_run_markers(raw)
    lines = [parse_line(line) for line in raw]
    own = [lines[at] for at in outside]
    found: dict[str, Any] = {}
    for line in own:
        if line.severity == "I" and not line.from_library:
            found.update(parse_fields(line.text))
    perf = {
        label
        for line in own
        if line.severity == "W"
        for label, start in _PERFORMANCE_WARNINGS
        if line.text.startswith(start)
    }
    for line in own:
        if unstable := _UNSTABLE.match(line.text):
            found["gpu_compute_coeff_var_pct"] = float(unstable[1])
    pools = next((pools for line in own if line.severity == "I" and (pools := parse_pools(line.text))), {})
    if "workspace" in pools:
        found["workspace_mib"] = pools["workspace"]
    found.update(_parse_banner(marks))
    report = LogReport(
        log=name,
        producer="TensorRT"
        if other
        else "trtexec"
        if marks or any(line.severity or _NO_START.match(line.text) for line in lines)
        else None,
        status="failed",
        perf_warnings=tuple(label for label, _ in _PERFORMANCE_WARNINGS if label in perf),
        warning_lines=sum(line.severity == "W" and line.stamped for line in lines),
        error_lines=sum(line.severity in ("E", "F") for line in lines),
        layer_profile=_last_complete_table(own),
        **found,
    )
    banner = _parse_options(own)
    wrong = _failure_reason(report, own)
    cause = find_cause(_diagnostic_lines(own)) if wrong is not None else None
    spoken = [line.text for line in lines if line.text.strip()]
    return TrtexecLog(
        report=_set_outcome(report, wrong, cause),
        cause=cause,
        banner=banner,
        cuda_graph_failed=any(start in line.text for line in own if line.severity == "W" for start in _GRAPH_FAILURES),
        last_error_line=spoken[-1] if spoken else "",
    )


def parse_fields(text: str) -> Iterator[tuple[str, Any]]:
    """The fields of `LogReport` in one `[I]` line."""
    text = text.rstrip()
    if summary := _SUMMARY.match(text):
        if summary["name"] in _TIMES and (times := parse_times(summary["items"])):
            yield _TIMES[summary["name"]], times
        return
    name, colon, value = text.partition(": ")
    value = value.strip()
    if name in _SWITCHES and value in ("Enabled", "Disabled"):
        yield _SWITCHES[name], value == "Enabled"
    elif name == "Selected Device" and colon:
        yield "gpu", value
    elif name == "Compute Capability" and colon:
        yield "compute_capability", value
    else:
        for pattern, fields in _FIELDS:
            if match := pattern.match(text):
                for (field, kind), number in zip(fields, match.groups(), strict=False):
                    if kind is float or float(number) == float(number) // 1:  # a count is never `inf` or `nan`
                        yield field, kind(float(number))


def parse_times(items: str) -> LoggedTimes | None:
    """The values of a summary line, as printed; None if one of the four is missing."""
    plain: dict[str, float] = {}
    percentiles: dict[str, float] = {}
    for name, percent, value in _STATISTIC.findall(items):
        if percent:
            percentiles[f"{float(percent):g}"] = float(value)
        else:
            plain[name] = float(value)
    if set(plain) != {"min", "max", "mean", "median"}:
        return None
    usual = {f"p{percent}": percentiles.get(percent) for percent in ("90", "95", "99")}
    others = {"percentiles": percentiles} if set(percentiles) - {"90", "95", "99"} else {}
    return LoggedTimes(**plain, **usual, **others)  # type: ignore[arg-type]


def parse_pools(text: str) -> dict[str, float]:
    """The pools of a line `Memory Pools: workspace: 8192 MiB, ...` that have a size, in MiB."""
    if not text.startswith(_POOLS):
        return {}
    return {
        match["name"]: float(match["size"]) * _UNIT_MIB[match["unit"]]
        for match in _POOL.finditer(text.removeprefix(_POOLS))
        if match["size"]
    }


# ------------------------------------------------------------------------------------------------ the verdict


def missing_success_signs(
    log: TrtexecLog, *, exit_code: int, engine: Path | None = None, measured: bool = False
) -> tuple[str, ...]:
    """Descriptions of the missing signs of success, of five; empty if the run succeeded.

    The marker, the exit code, no error that was not a skipped tactic, a valid plan, and a throughput.
    """
    report, passed = log.report, log.report.end_marker == "PASSED"
    written = engine is not None and engine.is_file()
    empty = engine is not None and written and not engine.stat().st_size
    signs = (
        (not passed, f"its log ends with {report.end_marker or 'no marker'}, expected PASSED"),
        (exit_code, f"it ended with {_format_exit(exit_code)}"),
        (report.status != "passed" and report.error_text and passed, f"it printed PASSED after `{report.error_text}`"),
        (engine is not None and not written, "it wrote no engine"),
        (empty, "the engine it wrote is empty"),
        (
            engine is not None and written and not empty and plan_header(engine) is None,
            "what it wrote does not begin as a TensorRT plan",
        ),
        (measured and report.throughput_qps is None, "it printed no throughput"),
    )
    return tuple(text for missing, text in signs if missing)


_EMPTY = re.compile(r"^Created engine with size: 0(?:\.0*)? MiB")


def _failure_reason(report: LogReport, own: Sequence[LogLine]) -> str | None:
    """Why the run failed, from the most specific evidence; None if it succeeded."""
    ended = report.end_marker is not None
    # an engine that could not be loaded passes with `--skipInference`
    error = main_error(error_texts(_diagnostic_lines(line for line in own if line.severity)), crashed=ended)
    if error is not None:
        return error
    if report.producer == "TensorRT":
        return main_error(error_texts(_diagnostic_lines(own)), crashed=True)
    if report.end_marker not in ("PASSED", "WAIVED"):
        bare = main_error(error_texts(_diagnostic_lines(own)), crashed=ended)
        return bare or (report.end_marker if ended else "the log ends without a marker")
    if any(line.severity == "I" and _EMPTY.match(line.text) for line in own):
        return "Created engine with size: 0 MiB"
    said = {line.text.strip() for line in own if line.severity == "I" and not line.from_library}
    began = any(line.startswith("Starting inference") for line in said)
    profiled = any(line.startswith("The e2e network timing is not reported") for line in said)
    if began and report.throughput_qps is None and not profiled:
        return "inference was started and no throughput was printed"
    return None


_LOADER = re.compile(
    r"^(?:\S*/)?trtexec: (?:error while loading shared libraries|symbol lookup error|\S+: version `\S+' not found)"
)
"""The dynamic loader ended the program before its banner."""
_NO_START = re.compile(rf"{_LOADER.pattern}|Cuda failure|Cannot find any available devices")
"""Lines without severity that only a program that failed to start prints."""
_BARE_ERROR = re.compile(
    rf"{_LOADER.pattern}|^(?:Cuda failure|Cannot find (?:any available devices|device ID)|Assertion fail|terminate called"
    r"|Killed|Could not load library|Uncaught exception|\s+what\(\):  |\[\d+\] |(?:\S+ )?Error Code:? \d+: )"
    r"|(?:^|: line \d+: +\d+ )(?:Abort(?:ed)?|Killed|Segmentation fault|Illegal instruction|Bus error)\b"
    r"|: Assertion [`\u2018][^`\u2018]*['\u2019] failed|-- assertion failed"
)
"""Errors without a prefix: of the loader, the C library, the shell and CUDA, and the parser's reason behind its own line."""


def _diagnostic_lines(lines: Iterable[LogLine]) -> Iterator[str]:
    """The lines to search for causes: without help texts and plugin output."""
    for line in lines:
        yield f"[{line.severity or ('E' if _BARE_ERROR.search(line.text) else 'V')}] {line.text}"


def _format_exit(exit_code: int) -> str:
    """An exit code as text: `the exit code 1`, `SIGABRT`."""
    if exit_code >= 0:
        return f"the exit code {exit_code}"
    return signal.Signals(-exit_code).name if -exit_code in list(signal.Signals) else f"the signal {-exit_code}"


def _set_outcome(report: LogReport, wrong: str | None, cause: Cause | None) -> LogReport:
    """The report with its outcome, and the cause of a failure."""
    if wrong is None:
        return replace(report, status="passed")
    known: dict[str, Any] = {"error_text": cause.text if cause else wrong}
    if cause is not None:
        known["error_class"] = cause.log_class
        for field, value in (
            ("error_hint", cause_hint(cause)),
            ("error_node", cause.node),
            ("error_plugin", cause.plugin),
            ("requested_bytes", cause.requested_bytes),
            ("unknown_options", cause.unknown_options),
        ):
            if value:
                known[field] = value
    else:
        if node := extract_node(wrong):
            known["error_node"] = node
        if report.end_marker is None and report.producer != "TensorRT":
            known["error_class"] = "aborted"
    return replace(report, status="failed", **known)


# ------------------------------------------------------------------------------------------------ parts of a log


def _main_run_markers(raw: Sequence[str]) -> tuple[list[re.Match[str]], list[int]]:
    """The markers of the run itself, and the numbers of its lines: 11.1's tuner prints nested runs."""
    marks: list[re.Match[str]] = []
    outside: list[int] = []
    in_task = False
    for at, line in enumerate(raw):
        if task := _TASK.match(line):
            in_task = task["what"] == "BEGIN"
            continue
        if in_task:
            continue
        if mark := _BANNER.match(line.rstrip()):
            marks.append(mark)
        outside.append(at)
    return marks, outside


def _run_starts(raw: Sequence[str], outside: Sequence[int]) -> list[int]:
    """Line numbers where runs begin: at banners, or after another run's end if the loader failed before the banner."""
    begins: list[int] = []
    ended = False
    for at in outside:
        if mark := _BANNER.match(raw[at].rstrip()):
            ended = mark["mark"] != "RUNNING"
            if not ended:
                begins.append(at)
        elif ended and _LOADER.match(raw[at]):
            begins.append(at)
            ended = False
    return begins


def _parse_banner(marks: Sequence[re.Match[str]]) -> Iterator[tuple[str, Any]]:
    ends = [mark["mark"] for mark in marks if mark["mark"] != "RUNNING"]
    yield "end_marker", ends[-1] if ends else None
    if marks:
        yield "trt_version", str(Version.from_number(int(marks[0]["version"])))
        yield "trt_build", int(marks[0]["build"]) if marks[0]["build"] else None
        yield "command", marks[0]["command"].rstrip() if marks[0]["command"] is not None else None


def _parse_options(own: Iterable[LogLine]) -> dict[str, str]:
    """`Name: value` pairs of trtexec's options, up to the device; the first of each name."""
    found: dict[str, str] = {}
    for line in own:
        if line.text.startswith("=== Device Information"):
            break
        if line.severity == "I" and not line.from_library:
            name, colon, value = line.text.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
    return found


def layer_times(text: str | Sequence[str]) -> tuple[LayerTime, ...]:
    """The rows of a log's last layer table, without `Total`."""
    lines = [parse_line(line) for line in (split_lines(text) if isinstance(text, str) else text)]
    tables = list(_parse_tables(lines))
    return tuple(row for row in tables[-1][1] if row.name != "Total") if tables else ()


def _parse_tables(lines: Sequence[LogLine]) -> Iterator[tuple[int, list[LayerTime]]]:
    """The layer tables of both layouts: iterations and rows; other output in between is skipped."""
    iterations: int | None = None
    rows: list[LayerTime] = []
    name_first = False
    for line in lines:
        if line.severity != "I" or line.from_library:
            continue
        if title := _PROFILE.match(line.text.strip()):
            if iterations is not None:
                yield iterations, rows
            iterations, rows, name_first = int(title["iterations"]), [], False
        elif iterations is None:
            continue
        elif line.text.split()[:1] == ["Layer"] and not rows:
            name_first = True
        elif row := _parse_row(line.text, name_first):
            rows.append(row)
            if row.name == "Total":
                yield iterations, rows
                iterations = None
    if iterations is not None:
        yield iterations, rows


def _parse_row(text: str, name_first: bool) -> LayerTime | None:
    """One row of a table: four numbers, with the name after them or, up to 8.5, before them."""
    words = text.rsplit(None, 4) if name_first else text.split(None, 4)
    if len(words) != 5:
        return None
    name, figures = (words[0], words[1:]) if name_first else (words[4], words[:4])
    if not all(map(_CELL.fullmatch, figures)):
        return None
    return LayerTime(name.strip(), *map(float, figures))


def _last_complete_table(own: Sequence[LogLine]) -> LoggedProfile | None:
    """The last complete layer table."""
    for iterations, rows in reversed(list(_parse_tables(own))):
        layers = [row for row in rows if row.name != "Total"]
        if layers and rows[-1].name == "Total":
            total = rows[-1]
            return LoggedProfile(
                iterations, len(layers), layers[0].name, layers[0].time_ms,
                total.time_ms, total.average_ms, total.median_ms,
            )  # fmt: skip
    return None
