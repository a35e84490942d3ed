"""Nsight Systems: an engine's kernels and copies on the device's clock, from outside the process that runs it.

`collect` runs the engine under `nsys profile`, `read_sqlite` reads what `nsys export` makes of a report. `read_stats` is for
Python callers who were handed the text of `nsys stats` alone, out of a log or a ticket; no verb reads it. Tables and columns
are asked for by name: a table without rows does not exist in an export, and every version adds columns.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.files import ensure_folder
from trt_engine.profiling import nsight
from trt_engine.profiling.capture import Capture, HostSpan, Launch, ProfilerUnavailable, assemble, window_of
from trt_engine.profiling.child import RANGE, Outcome
from trt_engine.profiling.nsight import Tool, decimal_mark, number
from trt_engine.tensors import Shape
from trt_engine.traces import COPIES, COPY_WORDS, Activity

__all__ = [
    "DATABASE",
    "LOG",
    "REPORT",
    "StatsTable",
    "activities_of",
    "collect",
    "export",
    "opens",
    "read_sqlite",
    "read_stats",
    "stats",
]

log = logging.getLogger(__name__)

REPORT, DATABASE, LOG = "profile.nsys-rep", "profile.sqlite", "nsys.log"
"""What `collect` leaves in its folder."""

_NEEDED = ("--capture-range-end",)
_WISHED = ("--cpuctxsw=none", "--kill=none", "--cuda-graph-trace=node")
"""Left out where a version does not know them."""
_EXPORT_S = 600.0


def opens(report: Path) -> str:
    """The command that shows a report on a desk."""
    return f"nsys-ui {report}"


# ------------------------------------------------------------------------------------------------ an engine under nsys


def collect(
    engine: Path,
    out: Path,
    *,
    batch: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
    device: str | None = None,
    inferences: int = 20,
    warmup: int = 10,
    runtime: RuntimeConfig | None = None,
    config: BenchConfig | None = None,
    timeout_s: float = 1800.0,
    tool: Tool | None = None,
) -> Capture:
    """What the device does in `inferences` of the engine, after `warmup` that are not recorded.

    Leaves report, export and raw log in the folder `out`. Raises `ProfilerUnavailable` when this rung of the ladder is not
    to be had, and the engine's own error (out of memory, a shape outside its profile) where it has one. On Ctrl-C
    `Interrupted` with the capture of the inferences that were done as its `partial`.
    """
    request = nsight.request_for(
        engine,
        config=config,
        runtime=runtime,
        batch=batch,
        shapes=shapes,
        device=device,
        inferences=inferences,
        warmup=warmup,
    )
    tool = tool or nsight.find("nsys")
    for option in _NEEDED:
        tool.needs(option, "profile")
    known = tool.options("profile")
    wished = [option for option in _WISHED if not known or option.partition("=")[0] in known]
    out = ensure_folder(out).absolute()
    report, raw_log = out / REPORT, out / LOG
    for stale in (report, report.with_suffix(".qdrep"), report.with_suffix(".qdstrm"), out / DATABASE, raw_log):
        stale.unlink(missing_ok=True)
    words = [
        "profile", "-t", "cuda,nvtx", "-s", "none", *wished, "-c", "cudaProfilerApi", "--capture-range-end=stop",
        "-f", "true", "-o", report.stem,
    ]  # fmt: skip
    ran, outcome = nsight.profiled(tool, words, request, out=out, raw_log=raw_log, timeout_s=timeout_s)
    found = next((place for place in (report, report.with_suffix(".qdrep")) if place.is_file()), None)
    if ran.ended == "interrupted":
        raise _interrupted(tool, found, outcome, raw_log)
    nsight.judge(tool, ran, outcome, raw_log=raw_log, engine=engine, timeout_s=timeout_s)
    if found is None:
        raise _no_report(tool, ran.said, outcome, report, raw_log)
    capture = read_sqlite(export(found, tool=tool, raw_log=raw_log), outcome)
    if not capture.inferences:
        raise ProfilerUnavailable(
            f"{tool.text} recorded, and its kernels cannot be told apart by inference",
            hint=f"`{opens(found)}` shows the report",
        )
    missing = [option for option in _WISHED if option not in wished and "graph" in option]
    extra = tuple(f"{tool.text} does not know `{option}`: kernels of CUDA graphs may be missing" for option in missing)
    if not any(item.kind == "kernel" for item in capture.activities):
        raise ProfilerUnavailable(
            f"{tool.text} recorded no kernels of `{engine}`" + "".join(f"; {text}" for text in capture.warnings[:2]),
            hint=f"`{raw_log}` has what it said; `{opens(found)}` shows the report",
        )
    return _with_warnings(capture, (*extra, *_outcome_warnings(outcome)))


def _outcome_warnings(outcome: Outcome | None) -> Iterator[str]:
    if outcome is None:
        return
    yield from outcome.warnings
    if not outcome.complete:
        yield f"the run was stopped after {outcome.inferences} inferences"


def _with_warnings(capture: Capture, more: Iterable[str]) -> Capture:
    return replace(capture, warnings=(*capture.warnings, *more))


def _no_report(tool: Tool, said: str, outcome: Outcome | None, report: Path, raw_log: Path) -> ProfilerUnavailable:
    if (known := nsight.diagnose(said, tool)) is not None:
        return known
    if report.with_suffix(".qdstrm").is_file():
        return ProfilerUnavailable(
            f"{tool.text} recorded, and could not make a report of `{report.with_suffix('.qdstrm')}`",
            hint="its host part is not installed here: install the whole Nsight Systems, or open the file where it is",
        )
    if outcome is not None and outcome.switch:
        return ProfilerUnavailable(
            f"{tool.text} wrote no report: its capture range never started, though {outcome.switch} was asked to start it",
            hint=f'`{raw_log}` has what it said; `pip install "cuda-bindings>=12.9,<14"` brings another way to start it',
        )
    return ProfilerUnavailable(
        f"{tool.text} wrote no report: {nsight.last_words(said)}", hint=f"`{raw_log}` has all that it said"
    )


def _interrupted(tool: Tool, report: Path | None, outcome: Outcome | None, raw_log: Path) -> Interrupted:
    partial: Capture | None = None
    if report is not None:
        with contextlib.suppress(ProfilerUnavailable, KeyboardInterrupt):
            partial = read_sqlite(export(report, tool=tool, raw_log=raw_log), outcome)
    if partial is not None and partial.activities:
        done = outcome.inferences if outcome is not None else 0
        return Interrupted(
            f"interrupted; `{report}` has the {done} inferences until then", hint=f"`{opens(report or Path())}`",
            partial=_with_warnings(partial, tuple(_outcome_warnings(outcome))),
        )  # fmt: skip
    return Interrupted("interrupted before anything was recorded", hint="the same command profiles again")


def export(report: Path, *, tool: Tool | None = None, raw_log: Path | None = None) -> Path:
    """The SQLite export beside a report, made anew: one that lies there may be of another run into the same name."""
    tool = tool or nsight.find("nsys")
    target = report.with_suffix(".sqlite")
    target.unlink(missing_ok=True)
    ran = nsight.run(
        tool, ["export", "-t", "sqlite", "-f", "true", "-o", target.name, report.name], folder=report.parent.absolute(),
        raw_log=raw_log or report.with_suffix(".log"), timeout_s=_EXPORT_S,
    )  # fmt: skip
    if ran.ended == "interrupted":
        raise Interrupted(f"interrupted while `{report}` was read", hint=f"`{ran.command}`")
    if ran.exit_code != 0 or not target.is_file():
        if (known := nsight.diagnose(ran.said, tool)) is not None:
            raise known
        raise ProfilerUnavailable(
            f"{tool.text} could not export `{report}`: {nsight.last_words(ran.said)}",
            hint=f"`{ran.command}`; a report of a newer nsys needs that version",
        )
    return target


def stats(report: Path, name: str, *, tool: Tool | None = None, raw_log: Path | None = None) -> tuple[StatsTable, ...]:
    """One report of `nsys stats` as a table: `cuda_gpu_kern_sum`, `cuda_gpu_trace`."""
    tool = tool or nsight.find("nsys")
    ran = nsight.run(
        tool, ["stats", "-r", name, "-f", "csv", "-o", "-", "--force-export=true", report.name],
        folder=report.parent.absolute(), raw_log=raw_log or report.with_suffix(".log"), timeout_s=_EXPORT_S,
    )  # fmt: skip
    return read_stats(ran.said)


# ------------------------------------------------------------------------------------------------ SQLite

_LOUD = re.compile(
    r"\b(?:drop|lost|loss|overflow|fail|error|incomplete|not collected|unable|missing|corrupt)", re.IGNORECASE
)
_PUSH_POP = 59


class _Export:
    """The tables of an export by name; what is not there is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        self.tables = {
            name for (name,) in self._database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        }

    def close(self) -> None:
        self._database.close()

    def columns(self, table: str) -> set[str]:
        if table not in self.tables:
            return set()
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, table: str, *names: str, needed: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        """The columns asked for of every row, None for those this version does not have; empty without a needed one."""
        there = self.columns(table)
        if not there or not there.issuperset(needed):
            if there:
                lacks = ", ".join(f"`{name}`" for name in needed if name not in there)
                log.warning("`%s`: the table `%s` lacks %s", self.path, table, lacks)
            return []
        chosen = ", ".join(f'"{name}"' if name in there else "NULL" for name in names)
        return self._database.execute(f'SELECT {chosen} FROM "{table}"').fetchall()

    def pairs(self, table: str, key: str, value: str) -> dict[Any, Any]:
        return {row[0]: row[1] for row in self.rows(table, key, value, needed=(key, value))}


def read_sqlite(path: Path, outcome: Outcome | None = None) -> Capture:
    """Everything the device did, from an export of any version; `outcome` is what the watched process told of itself.

    The inferences' windows are the NVTX ranges of ours, else the process's own times brought to the capture's clock.
    `ProfilerUnavailable` for a file that is no export, or is damaged.
    """
    hint = f"`nsys export -t sqlite -f true -o {path} {path.with_suffix('.nsys-rep')}` makes it again"
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ProfilerUnavailable(
            f"cannot read `{path}`: {(error.strerror or str(error)).lower()}", hint=hint
        ) from error
    if not path.is_file() or size == 0:
        raise ProfilerUnavailable(
            f"`{path}` is {'empty' if path.is_file() else 'a folder'}, expected an export", hint=hint
        )
    if size < (whole := _whole_size(path)):
        raise ProfilerUnavailable(f"`{path}` is cut: it has {size} of {whole} bytes", hint=hint)
    source: _Export | None = None
    try:
        source = _Export(path)
        capture = _read(source, outcome, hint)
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise ProfilerUnavailable(f"`{path}` is no whole SQLite export of nsys: {error}", hint=hint) from error
    except (TypeError, ValueError) as error:  # a text where a number belongs: SQLite's columns hold anything
        raise ProfilerUnavailable(f"`{path}` holds values nsys does not write: {error}", hint=hint) from error
    finally:
        if source is not None:
            source.close()
    report = path.with_suffix(".nsys-rep")
    with contextlib.suppress(OSError):
        if report.stat().st_mtime_ns > path.stat().st_mtime_ns:
            stale = f"`{path.name}` is older than its report: it may be of another run"
            return _with_warnings(capture, (stale,))
    return capture


def _whole_size(path: Path) -> int:
    """How large a database says it is (its header: page size at byte 16, pages at byte 28); 0 where it does not say."""
    with path.open("rb") as file:
        head = file.read(32)
    if len(head) < 32 or not head.startswith(b"SQLite format 3\0"):
        return 0
    page = int.from_bytes(head[16:18], "big")
    return (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")


def _read(source: _Export, outcome: Outcome | None, hint: str) -> Capture:
    known = {"StringIds", "META_DATA_EXPORT", "TARGET_INFO_SESSION_START_TIME"}
    if not source.tables & known and not any(name.startswith("CUPTI_") for name in source.tables):
        found = ", ".join(sorted(source.tables)[:5]) or "no tables"
        raise ProfilerUnavailable(f"`{source.path}` is a database, but none of nsys: it has {found}", hint=hint)
    meta = source.pairs("META_DATA_EXPORT", "name", "value")
    product, schema = meta.get("EXPORT_PRODUCT_VERSION"), meta.get("EXPORT_SCHEMA_VERSION")
    log.info("`%s`: exported by nsys %s, schema %s", source.path.name, product or "unknown", schema or "unknown")
    strings = source.pairs("StringIds", "id", "value")
    numbers = _Correlations()
    seen: list[Activity] = [*_kernels(source, strings, numbers), *_copies(source, numbers), *_fills(source, numbers)]
    calls = _calls(source, strings, numbers)
    spans, own = _ranges(source, strings)
    warnings = [*_diagnostics(source), *_graphs(source, seen)]
    windows = _windows(source, outcome, own, seen, calls, warnings)
    instrument = "nsys" if not product else f"nsys {'.'.join(str(product).split('.')[:3])}"
    if windows:
        return assemble(seen, calls or None, windows, instrument, spans=spans, warnings=warnings)
    whole = assemble(seen, calls or None, [(0, _OPEN)], instrument, spans=spans)  # what it warns of is the window's
    return replace(whole, inferences=(), warnings=tuple(warnings))


class _Correlations:
    """Numbers that are unique in the whole capture: nsys counts them for each process."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}

    def __call__(self, number: int | None, global_id: int | None) -> int:
        if not number:
            return 0
        pid = (global_id or 0) >> 24 & 0xFFFFFF
        return number + (self._pids.setdefault(pid, len(self._pids)) << 40)


def _shape(x: int | None, y: int | None, z: int | None) -> tuple[int, int, int] | None:
    return None if x is None or y is None or z is None else (x, y, z)


def _kernels(source: _Export, strings: Mapping[int, str], numbers: _Correlations) -> Iterator[Activity]:
    rows = source.rows(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "demangledName", "shortName",
        "mangledName", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread",
        "staticSharedMemory", "dynamicSharedMemory",
        needed=("start", "end"),
    )  # fmt: skip
    for (
        start, end, device, stream, correlation, pid, node, demangled, short, mangled, gx, gy, gz, bx, by, bz, registers,
        static, dynamic,
    ) in rows:  # fmt: skip
        names = (strings.get(key) for key in (demangled, mangled, short) if key is not None)
        shared = None if static is None and dynamic is None else (static or 0) + (dynamic or 0)
        yield Activity(
            "kernel", next((name for name in names if name), "unnamed kernel"), int(start), int(end), device or 0,
            stream or 0, correlation=numbers(correlation, pid), graph_node=node or 0, grid=_shape(gx, gy, gz),
            block=_shape(bx, by, bz), registers=registers, shared_bytes=shared,
        )  # fmt: skip


def _copies(source: _Export, numbers: _Correlations) -> Iterator[Activity]:
    labels = source.pairs("ENUM_CUDA_MEMCPY_OPER", "id", "label")
    rows = source.rows(
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes", "copyKind",
        needed=("start", "end"),
    )  # fmt: skip
    for start, end, device, stream, correlation, pid, node, nbytes, kind in rows:
        name = COPIES.get(kind) or labels.get(kind) or f"copy {kind}"
        yield Activity(
            "copy", name, int(start), int(end), device or 0, stream or 0, nbytes=nbytes or 0,
            correlation=numbers(correlation, pid), graph_node=node or 0,
        )  # fmt: skip


def _fills(source: _Export, numbers: _Correlations) -> Iterator[Activity]:
    rows = source.rows(
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes",
        needed=("start", "end"),
    )  # fmt: skip
    for start, end, device, stream, correlation, pid, node, nbytes in rows:
        yield Activity(
            "memset", "memset", int(start), int(end), device or 0, stream or 0, nbytes=nbytes or 0,
            correlation=numbers(correlation, pid), graph_node=node or 0,
        )  # fmt: skip


def _calls(source: _Export, strings: Mapping[int, str], numbers: _Correlations) -> list[Launch]:
    """Every call of the host's into CUDA, runtime and driver."""
    rows = source.rows(
        "CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId", "nameId", needed=("start", "end")
    )
    return [
        Launch(
            re.sub(r"_v\d+$", "", strings.get(name) or "unknown"), int(start), int(end), numbers(correlation, thread),
            thread or 0,
        )
        for start, end, thread, correlation, name in rows
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ NVTX ranges


_OPEN = 1 << 62


def _ranges(source: _Export, strings: Mapping[int, str]) -> tuple[list[HostSpan], list[HostSpan]]:
    """The push/pop ranges of others, and those around our inferences."""
    others: list[HostSpan] = []
    own: list[HostSpan] = []
    rows = source.rows(
        "NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid", needed=("start", "eventType")
    )
    for start, end, kind, text, key, thread in rows:
        name = str(text or strings.get(key) or "")
        if kind == _PUSH_POP and name:
            found = HostSpan(name, int(start), _OPEN if end is None else int(end), thread or 0)
            (own if name.startswith(RANGE) else others).append(found)
    return others, own


# ------------------------------------------------------------------------------------------------ windows, warnings


def _windows(
    source: _Export,
    outcome: Outcome | None,
    own: list[HostSpan],
    found: list[Activity],
    calls: list[Launch],
    warnings: list[str],
) -> list[tuple[int, int]]:
    """When each inference was, on the report's clock: by NVTX, else by the process's own times."""
    closed = sorted((item.start_ns, item.end_ns) for item in own if item.end_ns != _OPEN)
    if closed:
        if outcome is not None and outcome.inferences != len(closed):
            warnings.append(f"{len(closed)} of {outcome.inferences} inferences have an NVTX range in the report")
        return closed
    if outcome is None or not outcome.windows:
        return []
    called = {item.correlation: item.start_ns for item in calls if item.correlation}
    moments = sorted(called.get(item.correlation, item.start_ns) for item in found)
    origins = [row[0] for row in source.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs") if row[0]]
    if moments:
        # the first thing asked for is of the first inference, the last of the last: the origin lies between
        earliest, latest = outcome.windows[0][0] - min(moments), outcome.windows[-1][1] - max(moments)
        origins += _origin_by_shares(outcome.windows, moments)
        origins += (
            [earliest + (latest - earliest) * step // 4 for step in range(5)] if latest > earliest else [earliest]
        )
    best: list[tuple[int, int]] = []
    most = 0.9 * len(moments)
    for origin in origins:
        windows = [(start - origin, end - origin) for start, end in outcome.windows]
        inside = sum(window_of(windows, moment) is not None for moment in moments)
        if inside > most or (inside == most and not best):
            best, most = windows, inside
    if not best and found:
        warnings.append(
            "there are no NVTX ranges, and the process's own times do not fit the report's clock: "
            "kernels are not told apart by inference"
        )
    return best


def _origin_by_shares(windows: Sequence[tuple[int, int]], moments: Sequence[int]) -> list[int]:
    """The origin that puts an equal share of the moments into each window; none where they do not divide.

    One inference that was held up makes its own window wider, and not that of the others: they all must hold their share.
    """
    share, rest = divmod(len(moments), len(windows))
    if rest or not share:
        return []
    firsts, lasts = moments[::share], moments[share - 1 :: share]
    earliest = max(start - first for (start, _), first in zip(windows, firsts, strict=True))
    latest = min(end - last for (_, end), last in zip(windows, lasts, strict=True))
    return [(earliest + latest) // 2]


def _diagnostics(source: _Export) -> Iterator[str]:
    """What the profiler itself has to say of what it lost; each once."""
    labels = source.pairs("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", "id", "label")
    seen: set[str] = set()
    for severity, text in source.rows("DIAGNOSTIC_EVENT", "severity", "text", needed=("text",)):
        plain = " ".join(str(text or "").split())
        label = str(labels.get(severity, ""))
        loud = re.search(r"warn|err|fatal", label, re.IGNORECASE) if label else _LOUD.search(plain)
        if plain and plain not in seen:
            seen.add(plain)
            if loud:
                yield f"nsys: {plain}"
            else:
                log.debug("nsys: %s", plain)


def _graphs(source: _Export, found: list[Activity]) -> Iterator[str]:
    count = len(source.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "start", needed=("start",)))
    if count and any(item.kind == "kernel" for item in found):
        yield f"{count} CUDA graph launches were recorded as a whole: the kernels in them are missing"
    elif count:
        yield (
            f"nsys recorded {count} CUDA graph launches as a whole, and none of the kernels in them: "
            "profile with `--cuda-graph-trace=node`"
        )


# ------------------------------------------------------------------------------------------------ text of `nsys stats`

Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class StatsTable:
    """One report of `nsys stats`."""

    report: str
    """`cuda_gpu_kern_sum`; empty where the text does not tell."""
    columns: tuple[str, ...]
    rows: tuple[dict[str, Value], ...]
    """By column; numbers as numbers."""
    skipped: str | None = None
    """Why there are no rows: `does not contain CUDA kernel data.`"""


_PROCESSING = re.compile(r"Processing \[.*\] with \[(?:.*[/\\])?([\w-]+?)(?:\.py)?(?::[\w:-]*)?\]")
_TITLE = re.compile(r"\s*\*\* .*\((\w+)(?::[\w:-]*)?\):?\s*$")
_SKIPPED = re.compile(r"SKIPPED: (.*)")
_RULE = re.compile(r"\s*-{2,}(?:\s+-{2,})*\s*")
_UNIT = re.compile(r"\((?:%|ns|us|ms|s|nsec|usec|msec|sec|B|bytes|KB|KiB|MB|MiB|GB|GiB)\)\s*$", re.IGNORECASE)
_WHOLE = re.compile(r"(?:Total Time|Min|Max|Start|Duration) \(ns\)|Instances|Num Calls|Count|CorrId|Calls")
_TEXTS = ("Name", "Operation", "Range", "Style", "GridXYZ", "BlockXYZ", "Device", "Ctx", "SrcMemKd", "DstMemKd")
_STATS_HINT = (
    "`nsys stats -r cuda_gpu_kern_sum -f csv -o - --force-export=true REPORT.nsys-rep` writes what is read here"
)
_OLD_NAMES = {
    "gpukernsum": "cuda_gpu_kern_sum", "cudaapisum": "cuda_api_sum", "gpumemtimesum": "cuda_gpu_mem_time_sum",
    "gpumemsizesum": "cuda_gpu_mem_size_sum", "gputrace": "cuda_gpu_trace", "nvtxsum": "nvtx_sum", "osrtsum": "osrt_sum",
}  # fmt: skip
"""Of releases before about 2022.4."""


def read_stats(text: str) -> tuple[StatsTable, ...]:
    """Every table in what `nsys stats` wrote: CSV, TSV or columns, of any version and locale, console lines in between.

    A report without data is a table without rows. `ProfilerUnavailable` says what is wrong with a text that is empty, cut in
    the middle of a table, or something else.
    """
    lines = text.splitlines()
    if not any(line.strip() for line in lines):
        raise ProfilerUnavailable("the text of `nsys stats` is empty, expected a table", hint=_STATS_HINT)
    found: list[StatsTable] = []
    report, titled, at = "", False, 0
    while at < len(lines):
        line = lines[at]
        if match := _PROCESSING.match(line):
            report, titled = _OLD_NAMES.get(match[1], match[1]), False
        elif match := _SKIPPED.match(line.strip()):
            reason = re.sub(r"^\S+ (?=does|has|contains)", "", match[1])
            found.append(StatsTable(report, (), (), reason))
            titled = False
        elif match := _TITLE.match(line):
            report, titled = _OLD_NAMES.get(match[1], match[1]), True
        elif at + 1 < len(lines) and _RULE.fullmatch(lines[at + 1]) and line.strip():
            table, at = _columns_table(report, lines, at)
            found.append(table)
            titled = False
            continue
        elif (separator := _separator(line)) is not None:
            table, at = _csv_table(report, lines, at, separator)
            found.append(table)
            titled = False
            continue
        at += 1
    if titled:
        raise ProfilerUnavailable(f"the table `{report}` is cut: it has a title and no rows", hint=_STATS_HINT)
    if not found and not report:
        first = next(line.strip() for line in lines if line.strip())[:80]
        raise ProfilerUnavailable(
            f"no table of `nsys stats` was found; the text begins with `{first}`", hint=_STATS_HINT
        )
    return tuple(found)


def _separator(line: str) -> str | None:
    """What parts the fields of a header line; None for any other line."""
    for mark in (",", "\t"):
        if line.count(mark) < 2:
            continue
        fields = [field.strip() for field in next(csv.reader([line], delimiter=mark))]
        if sum(map(bool, map(_UNIT.search, fields))) >= 1 and not any(number(field) is not None for field in fields):
            return mark
    return None


def _csv_table(report: str, lines: Sequence[str], at: int, separator: str) -> tuple[StatsTable, int]:
    columns = tuple(field.strip() for field in next(csv.reader([lines[at]], delimiter=separator)))
    cells: list[list[str]] = []
    end = at + 1
    while end < len(lines) and lines[end].strip() and not _ends_table(lines[end]):
        row = next(csv.reader([lines[end]], delimiter=separator))
        if len(row) != len(columns):
            raise _cut(report, end, f"{len(row)} fields, the header has {len(columns)}", lines[end])
        cells.append(row)
        end += 1
    return _table(report, columns, cells), end


def _ends_table(line: str) -> bool:
    return bool(_PROCESSING.match(line) or _SKIPPED.match(line.strip()) or _TITLE.match(line))


def _columns_table(report: str, lines: Sequence[str], at: int) -> tuple[StatsTable, int]:
    spans = [match.span() for match in re.finditer(r"-{2,}", lines[at + 1])]
    columns = tuple(lines[at][begin:stop].strip() for begin, stop in spans)
    if not all(columns):
        raise _cut(report, at, "a header that does not stand over its columns", lines[at])
    cells: list[list[str]] = []
    end = at + 2
    while end < len(lines) and lines[end].strip() and not _ends_table(lines[end]):
        line = lines[end]
        if len(line) <= spans[-1][0] or any(
            line[stop : spans[n + 1][0]].strip() for n, (_, stop) in enumerate(spans[:-1])
        ):
            raise _cut(report, end, "a row that does not fit the columns above it", line)
        ends = [*(stop for _, stop in spans[:-1]), len(line)]
        cells.append([line[begin:stop].strip() for (begin, _), stop in zip(spans, ends, strict=True)])
        end += 1
    return _table(report, columns, cells), end


def _cut(report: str, at: int, what: str, line: str) -> ProfilerUnavailable:
    where = f"the table `{report}`" if report else "a table of `nsys stats`"
    return ProfilerUnavailable(f"{where} is damaged: line {at + 1} has {what}: `{line.strip()[:80]}`", hint=_STATS_HINT)


def _table(report: str, columns: tuple[str, ...], cells: list[list[str]]) -> StatsTable:
    numeric = [name for name in columns if name not in _TEXTS]
    mark = decimal_mark(value for row in cells for name, value in zip(columns, row, strict=True) if name in numeric)

    def value(name: str, text: str) -> Value:
        if name in _TEXTS:
            return text
        found = number(text, mark, whole=bool(_WHOLE.fullmatch(name)))
        return found if found is not None else text or None

    rows = tuple({name: value(name, cell) for name, cell in zip(columns, row, strict=True)} for row in cells)
    return StatsTable(report or _report_of(columns), columns, rows)


def _report_of(columns: tuple[str, ...]) -> str:
    """The report a bare table is of, by the columns it alone has."""
    if "Instances" in columns and "Name" in columns:
        return "cuda_gpu_kern_sum"
    if any(name.startswith("Total (") for name in columns) and "Operation" in columns:
        return "cuda_gpu_mem_size_sum"
    if "Operation" in columns and "Count" in columns:
        return "cuda_gpu_mem_time_sum"
    if "CorrId" in columns and any(name.startswith("Duration") for name in columns):
        return "cuda_gpu_trace"
    return ""  # `Num Calls` and `Name` are of cuda_api_sum and osrt_sum alike


_NS = {"ns": 1, "nsec": 1, "us": 1000, "usec": 1000, "ms": 10**6, "msec": 10**6, "s": 10**9, "sec": 10**9}
_BYTES = {"b": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def activities_of(tables: Iterable[StatsTable]) -> tuple[Activity, ...]:
    """What the device did, from the report `cuda_gpu_trace`; the other reports hold sums."""
    found = []
    for table in tables:
        if table.report == "cuda_gpu_trace":
            found += [_traced(row) for row in table.rows]
    return tuple(sorted(found, key=lambda item: (item.start_ns, item.end_ns)))


def _traced(row: Mapping[str, Value]) -> Activity:
    start, duration = _scaled(row, "Start", _NS), _scaled(row, "Duration", _NS)
    name = str(row.get("Name") or "")
    copy = re.match(r"\[CUDA memcpy (.*)\]", name)
    kind: Any = "copy" if copy else "memset" if name.startswith("[CUDA memset") else "kernel"
    text = COPY_WORDS.get(copy[1], copy[1]) if copy else "memset" if kind == "memset" else name
    device = re.search(r"\((\d+)\)\s*$", str(row.get("Device") or ""))

    def whole(key: str) -> int | None:
        got = row.get(key)
        return int(got) if isinstance(got, int | float) else None

    return Activity(
        kind, text, start, start + duration, int(device[1]) if device else 0, whole("Strm") or 0,
        nbytes=_scaled(row, "Bytes", _BYTES), correlation=whole("CorrId") or 0,
        grid=_shape(whole("GrdX"), whole("GrdY"), whole("GrdZ")), block=_shape(whole("BlkX"), whole("BlkY"), whole("BlkZ")),
        registers=whole("Reg/Trd"),
        shared_bytes=_scaled(row, "StcSMem", _BYTES) + _scaled(row, "DymSMem", _BYTES) if kind == "kernel" else None,
    )  # fmt: skip


def _scaled(row: Mapping[str, Value], name: str, units: Mapping[str, int]) -> int:
    """The value of the column `NAME (unit)` in the smallest unit; 0 where it is not told."""
    for column, value in row.items():
        head, _, unit = column.partition(" (")
        if head == name and isinstance(value, int | float):
            return round(value * units.get(unit.rstrip(")").lower(), 1))
    return 0
