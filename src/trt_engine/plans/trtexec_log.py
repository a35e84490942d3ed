"""trtexec's logs, 8.5 to 11.x, read whole or line by line as they come.

Line formats are those of `samples/common/sampleReporting.cpp`, `sampleOptions.cpp` and `logging.h` of the public TensorRT
repository. A figure counts only behind trtexec's own `[I]` prefix, because its verbose explanations and the library's lines
look alike. Nothing is believed that the log does not show to its end: a build can fail behind `Engine built in`, and
`PASSED` can stand under an engine that could not be loaded.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_engine.engine import plan_header
from trt_engine.plans.causes import Cause, cause_of, errors_of, node_of, telling_error
from trt_engine.plans.versions import Version
from trt_engine.records import LoggedProfile, LoggedTimes, LogReport

__all__ = [
    "LayerTime",
    "Line",
    "TrtexecLog",
    "facts_of",
    "layer_times",
    "misses",
    "parse",
    "pools_of",
    "read_line",
    "split",
    "times_of",
]

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STAMP = r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] "
_JOINED = re.compile(rf"(?=&&&& (?:RUNNING|PASSED|FAILED|WAIVED|TASK_)|{_STAMP}\[[FEWIV]\])")
"""Where a new line begins although the one before had no end: two streams were written into one file."""
_LINE = re.compile(
    rf"^[\s>]*(?P<stamp>{_STAMP})?\[(?P<severity>[FEWIV])\](?: (?P<library>\[TRT\])(?= |$))?(?: (?P<text>.*))?$"
)
_BANNER = re.compile(
    r"^[\s>]*&&&& (?P<mark>RUNNING|PASSED|FAILED|WAIVED) (?P<tool>\S+) \[TensorRT v(?P<version>\d+)\]"
    r"(?: \[b(?P<build>\d+)\])? # ?(?P<command>.*)$"
)
_TASK = re.compile(r"^[\s>]*&&&& TASK_(?P<what>BEGIN|END|ABORT)\b")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)"
_ITEM = re.compile(rf"(min|max|mean|median|percentile\(({_NUMBER})%\)) = ({_NUMBER}) ms")
_TIMES = {
    "Latency": "latency_ms",
    "Enqueue Time": "enqueue_ms",
    "H2D Latency": "h2d_ms",
    "GPU Compute Time": "gpu_compute_ms",
    "D2H Latency": "d2h_ms",
}
_SUMMARY = re.compile(r"^(?P<name>[A-Z][A-Za-z0-9 ]*?): (?P<items>min = .*)$")
_SWITCHES = {"Data transfers": "data_transfers", "Spin-wait": "spin_wait", "CUDA Graph": "cuda_graph"}
_FIGURES: tuple[tuple[re.Pattern[str], tuple[tuple[str, type], ...]], ...] = tuple(
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
_PERF = (
    ("enqueue_bound", "* Throughput may be bound by Enqueue Time"),
    ("h2d_bound", "* Throughput may be bound by host-to-device transfers"),
    ("d2h_bound", "* Throughput may be bound by device-to-host transfers"),
    ("gpu_compute_unstable", "* GPU compute time is unstable"),
)
_UNSTABLE = re.compile(rf"^\* GPU compute time is unstable, with coefficient of variance = ({_NUMBER})%")
_POOLS = "Memory Pools: "
_POOL = re.compile(rf"(?P<name>\w+): (?:(?P<size>{_NUMBER}) (?P<unit>[KMG]iB|B)|default)")
_PROFILE = re.compile(r"^=== Profile \((?P<iterations>\d+) iterations? ?\) ===")
_ROW = re.compile(
    rf"^\s*(?P<total>{_NUMBER})\s+(?P<average>{_NUMBER})\s+(?P<median>{_NUMBER})\s+(?P<share>{_NUMBER})\s+(?P<name>\S.*)$"
)
_ROW_8_5 = re.compile(
    rf"^\s*(?P<name>\S.*?)\s+(?P<total>{_NUMBER})\s+(?P<average>{_NUMBER})\s+(?P<median>{_NUMBER})\s+(?P<share>{_NUMBER})\s*$"
)
_UNIT_MIB = {"B": 1 / (1 << 20), "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
_NO_GRAPH = (
    "The specified --useCudaGraph flag has been ignored",
    "CUDA graph capture failed. The inference will be launched without using CUDA graph",
    "operations that are not permitted under CUDA graph capture mode",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log; severity `""` is a line without prefix, a continuation or something that was printed bare."""

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


def read_line(raw: str) -> Line:
    """The line, its prefix taken off."""
    raw = _COLOUR.sub("", raw).rstrip("\r\n")
    match = _LINE.match(raw)
    if match is None:
        return Line("", raw)
    return Line(match["severity"], match["text"] or "", bool(match["library"]), bool(match["stamp"]))


def split(text: str) -> list[str]:
    """The lines of a log; those that two streams wrote into one are parted."""
    return [part for line in _COLOUR.sub("", text).splitlines() for part in _JOINED.split(line) if part or not line]


@dataclass(frozen=True, slots=True)
class TrtexecLog:
    """A whole log: what to report of it, the cause of its failure, and what a driver asks of it."""

    report: LogReport
    cause: Cause | None
    """Finer than the report's `error_class`; None when it passed."""
    banner: dict[str, str]
    """The options as trtexec says it read them: `Iterations`, `Percentiles`, `Save engine`, by their names."""
    graph_refused: bool = False
    """A CUDA graph was asked for and could not be captured; the banner says `Enabled` all the same."""
    last_words: str = ""
    """The last thing that was said."""


def parse(text: str | Sequence[str], name: str = "log") -> TrtexecLog:
    """The log of a run, or of as much of it as there is; the last figure of each kind where it reports twice.

    Of several runs one after another in a file (`>>`, the attempts of a ladder) it is the last one.
    """
    raw = split(text) if isinstance(text, str) else [part for line in text for part in split(line)]
    marks, outside = _outside_tasks(raw)
    if len(begins := _begins(raw, outside)) > 1:
        raw = raw[begins[-1] :]
        marks, outside = _outside_tasks(raw)
    lines = [read_line(line) for line in raw]
    own = [lines[at] for at in outside]
    found: dict[str, Any] = {}
    for line in own:
        if line.severity == "I" and not line.from_library:
            found.update(facts_of(line.text))
    perf = {label for line in own if line.severity == "W" for label, start in _PERF if line.text.startswith(start)}
    for line in own:
        if unstable := _UNSTABLE.match(line.text):
            found["gpu_compute_coeff_var_pct"] = float(unstable[1])
    pools = next((pools for line in own if line.severity == "I" and (pools := pools_of(line.text))), {})
    if "workspace" in pools:
        found["workspace_mib"] = pools["workspace"]
    found.update(_banner(marks))
    report = LogReport(
        log=name,
        written_by="trtexec" if marks or any(line.severity or _died_at_start(line) for line in lines) else None,
        status="failed",
        perf_warnings=tuple(label for label, _ in _PERF if label in perf),
        warning_lines=sum(line.severity == "W" and line.stamped for line in lines),
        error_lines=sum(line.severity in ("E", "F") for line in lines),
        layer_profile=_profile(own),
        **found,
    )
    banner = _options_read(own)
    wrong = _wrong(report, own)
    cause = cause_of(_messages(own)) if wrong is not None else None
    spoken = [line.text for line in lines if line.text.strip()]
    return TrtexecLog(
        report=_judged(report, wrong, cause),
        cause=cause,
        banner=banner,
        graph_refused=any(start in line.text for line in own if line.severity == "W" for start in _NO_GRAPH),
        last_words=spoken[-1] if spoken else "",
    )


def facts_of(text: str) -> Iterator[tuple[str, Any]]:
    """What the text of one `[I]` line says, by the names of `LogReport`."""
    text = text.rstrip()
    if summary := _SUMMARY.match(text):
        if summary["name"] in _TIMES and (times := times_of(summary["items"])):
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
        for pattern, fields in _FIGURES:
            if match := pattern.match(text):
                for (field, kind), number in zip(fields, match.groups(), strict=False):
                    yield from _counted(field, kind, float(number))


def _counted(field: str, kind: type, number: float) -> Iterator[tuple[str, Any]]:
    if kind is float or number == number // 1:  # no count is `inf` or `nan`
        yield field, kind(number)


def times_of(items: str) -> LoggedTimes | None:
    """The items of a summary line, as printed; None where one of the four is missing."""
    plain: dict[str, float] = {}
    percentiles: dict[str, float] = {}
    for name, percent, value in _ITEM.findall(items):
        if percent:
            percentiles[f"{float(percent):g}"] = float(value)
        else:
            plain[name] = float(value)
    if set(plain) != {"min", "max", "mean", "median"}:
        return None
    usual = {f"p{percent}": percentiles.get(percent) for percent in ("90", "95", "99")}
    others = {"percentiles": percentiles} if set(percentiles) - {"90", "95", "99"} else {}
    return LoggedTimes(**plain, **usual, **others)  # type: ignore[arg-type]


def pools_of(text: str) -> dict[str, float]:
    """The pools of a line `Memory Pools: workspace: 8192 MiB, ...` that have a size, in MiB."""
    if not text.startswith(_POOLS):
        return {}
    return {
        match["name"]: float(match["size"]) * _UNIT_MIB[match["unit"]]
        for match in _POOL.finditer(text.removeprefix(_POOLS))
        if match["size"]
    }


# ------------------------------------------------------------------------------------------------ the verdict


def misses(log: TrtexecLog, *, exit_code: int, engine: Path | None = None, measured: bool = False) -> tuple[str, ...]:
    """Which of the five signs of success a run of the tool lacks, in words; none when it succeeded.

    The marker, the exit code, no error that was not a skipped tactic, an engine that is a plan, and a throughput.
    """
    report, found = log.report, []
    if report.end_marker != "PASSED":
        found.append(f"its log ends with {report.end_marker or 'no marker'}, expected PASSED")
    if exit_code:
        found.append(f"it ended with {_ending(exit_code)}")
    if report.status != "passed" and report.error_text and report.end_marker == "PASSED":
        found.append(f"it said PASSED after `{report.error_text}`")
    if engine is not None:
        if not engine.is_file() or not engine.stat().st_size:
            found.append("it wrote no engine" if not engine.is_file() else "the engine it wrote is empty")
        elif plan_header(engine) is None:
            found.append("what it wrote does not begin as a TensorRT plan")
    if measured and report.throughput_qps is None:
        found.append("it printed no throughput")
    return tuple(found)


_EMPTY = re.compile(r"^Created engine with size: 0(?:\.0*)? MiB")


def _wrong(report: LogReport, own: Sequence[Line]) -> str | None:
    """Why the run did not succeed, by what tells it best; None when it did."""
    ended = report.end_marker is not None
    # an engine that could not be loaded passes with `--skipInference`
    error = telling_error(errors_of(_messages(line for line in own if line.severity)), ended=ended)
    if error is not None:
        return error
    if report.end_marker not in ("PASSED", "WAIVED"):
        bare = telling_error(errors_of(_messages(own)), ended=ended)
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
_BARE = re.compile(
    rf"{_LOADER.pattern}|^(?:Cuda failure|Cannot find (?:any available devices|device ID)|Assertion fail|terminate called"
    r"|Killed|Could not load library|Uncaught exception|\s+what\(\):  |\[\d+\] |(?:\S+ )?Error Code:? \d+: )"
    r"|(?:^|: line \d+: +\d+ )(?:Abort(?:ed)?|Killed|Segmentation fault|Illegal instruction|Bus error)\b"
    r"|: Assertion [`\u2018][^`\u2018]*['\u2019] failed|-- assertion failed"
)
"""Errors without a prefix: of the loader, the C library, the shell and CUDA, and the parser's reason behind its own line."""


def _messages(lines: Iterable[Line]) -> Iterator[str]:
    """The lines as causes are looked for in them: a help text or a plugin's output is not an error."""
    for line in lines:
        yield f"[{line.severity or ('E' if _BARE.search(line.text) else 'V')}] {line.text}"


def _died_at_start(line: Line) -> bool:
    """True for a line that only a program which could not begin ends with."""
    return not line.severity and bool(
        _LOADER.match(line.text) or line.text.startswith(("Cuda failure", "Cannot find any available devices"))
    )


def _ending(exit_code: int) -> str:
    """An exit code in words: `the exit code 1`, `SIGABRT`."""
    if exit_code >= 0:
        return f"the exit code {exit_code}"
    return signal.Signals(-exit_code).name if -exit_code in list(signal.Signals) else f"the signal {-exit_code}"


def _judged(report: LogReport, wrong: str | None, cause: Cause | None) -> LogReport:
    """The report with its verdict, and for a failure what it failed of."""
    if wrong is None:
        return replace(report, status="passed")
    known: dict[str, Any] = {"error_text": cause.text if cause else wrong}
    if cause is not None:
        known["error_class"] = cause.log_class
        for field, value in (
            ("error_node", cause.node),
            ("error_plugin", cause.plugin),
            ("requested_bytes", cause.requested_bytes),
            ("unknown_options", cause.unknown_options),
        ):
            if value:
                known[field] = value
    else:
        if node := node_of(wrong):
            known["error_node"] = node
        if report.end_marker is None:
            known["error_class"] = "aborted"
    return replace(report, status="failed", **known)


# ------------------------------------------------------------------------------------------------ parts of a log


def _outside_tasks(raw: Sequence[str]) -> tuple[list[re.Match[str]], list[int]]:
    """The markers of the run itself, and the numbers of its lines: 11.1's tuner prints runs of its own in between."""
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


def _begins(raw: Sequence[str], outside: Sequence[int]) -> list[int]:
    """Where runs begin: at their banners, or behind another run's end where the loader ended them before it."""
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


def _banner(marks: Sequence[re.Match[str]]) -> Iterator[tuple[str, Any]]:
    ends = [mark["mark"] for mark in marks if mark["mark"] != "RUNNING"]
    yield "end_marker", ends[-1] if ends else None
    if marks:
        yield "trt_version", str(Version.of_number(int(marks[0]["version"])))
        yield "trt_build", int(marks[0]["build"]) if marks[0]["build"] else None
        yield "command", marks[0]["command"].rstrip()


def _options_read(own: Iterable[Line]) -> dict[str, str]:
    """`Name: value` of trtexec's own information, up to the device: the first of each name."""
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
    lines = [read_line(line) for line in (split(text) if isinstance(text, str) else text)]
    tables = list(_tables(lines))
    return tuple(row for row in tables[-1][1] if row.name != "Total") if tables else ()


def _tables(lines: Sequence[Line]) -> Iterator[tuple[int, list[LayerTime]]]:
    """The layer tables: iterations, and every row. Both layouts; what was printed in between is passed over."""
    iterations: int | None = None
    rows: list[LayerTime] = []
    pattern = _ROW
    for line in lines:
        if line.severity != "I" or line.from_library:
            continue
        if title := _PROFILE.match(line.text.strip()):
            if iterations is not None:
                yield iterations, rows
            iterations, rows, pattern = int(title["iterations"]), [], _ROW
        elif iterations is None:
            continue
        elif line.text.split()[:1] == ["Layer"] and not rows:
            pattern = _ROW_8_5
        elif row := pattern.match(line.text):
            total, average, median, share = (float(row[part]) for part in ("total", "average", "median", "share"))
            rows.append(LayerTime(row["name"].rstrip(), total, average, median, share))
            if rows[-1].name == "Total":
                yield iterations, rows
                iterations = None
    if iterations is not None:
        yield iterations, rows


def _profile(own: Sequence[Line]) -> LoggedProfile | None:
    """The last layer table that is whole."""
    for iterations, rows in reversed(list(_tables(own))):
        layers = [row for row in rows if row.name != "Total"]
        if layers and rows[-1].name == "Total":
            total = rows[-1]
            return LoggedProfile(
                iterations, len(layers), layers[0].name, layers[0].time_ms,
                total.time_ms, total.average_ms, total.median_ms,
            )  # fmt: skip
    return None
