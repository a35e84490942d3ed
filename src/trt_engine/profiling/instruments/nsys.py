"""Nsight Systems: an engine's kernels and copies on the device's clock, profiled from outside its process.

`collect_capture` runs the engine under `nsys profile`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trt_engine.atomic_io import open_regular
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.profiling.instruments import nsight_run, nsight_tools
from trt_engine.profiling.instruments.capture import Capture, HostSpan, Launch, ProfilerUnavailable, assemble, window_of
from trt_engine.profiling.instruments.nsight_run import ProcessResult
from trt_engine.profiling.instruments.nsight_tools import Tool
from trt_engine.profiling.instruments.target import RANGE_PREFIX, TargetOutcome
from trt_engine.records.profile import COPY_KINDS, Activity

log = logging.getLogger(__name__)

REPORT, DATABASE, LOG = "profile.nsys-rep", "profile.sqlite", "nsys.log"
"""Files written by `collect`."""
_OPTIONAL_OPTIONS = ("--cpuctxsw=none", "--kill=none", "--cuda-graph-trace=node")
"""Omitted for versions without them."""
_EXPORT_S = 600.0


def open_command(report: Path) -> str:
    """The command that opens a report in the GUI."""
    return f"nsys-ui {report}"


def collect_capture(
    engine: Path,
    out: Path,
    *,
    inferences: int = 20,
    warmup: int = 10,
    runtime: RuntimeConfig | None = None,
    config: BenchConfig | None = None,
    timeout_s: float = 1800.0,
) -> Capture:
    """Device activity of `inferences` of the engine, after `warmup` unrecorded ones.

    Writes report, export and raw log into the folder `out`. Raises `ProfilerUnavailable` if nsys is unavailable, and the
    engine's error (out of memory, a shape outside its profile). On Ctrl-C `Interrupted`, with the capture of the completed
    inferences as its `partial`.
    """
    request = nsight_run.make_request(engine, config, runtime, inferences=inferences, warmup=warmup)
    tool = nsight_tools.find_tool("nsys")
    tool.require_options(["--capture-range-end"], "profile")
    wished = [option for option in _OPTIONAL_OPTIONS if tool.has_option(option.partition("=")[0], "profile")]
    older = [Path(REPORT).with_suffix(suffix).name for suffix in (".qdrep", ".qdstrm")]
    report = nsight_run.prepare_folder(out, REPORT, *older, DATABASE, LOG) / REPORT
    words = [
        "profile", "-t", "cuda,nvtx", "-s", "none", *wished, "-c", "cudaProfilerApi", "--capture-range-end=stop",
        "-f", "true", "-o", report.stem,
    ]  # fmt: skip
    ran, outcome = nsight_run.run_target(tool, words, request, report.parent, timeout_s=timeout_s)
    found = next((place for place in (report, report.with_suffix(".qdrep")) if place.is_file()), None)
    if ran.ended_by == "interrupted":
        raise _partial_capture(tool, found, outcome)
    nsight_run.check_result(tool, ran, outcome, engine, timeout_s)
    if found is None:
        raise _no_report_error(tool, ran, outcome, report)
    capture = read_sqlite(_export_sqlite(found, tool), outcome)
    if not capture.inferences:
        raise ProfilerUnavailable(
            f"{tool.label} recorded, and its kernels cannot be assigned to inferences",
            hint=f"`{open_command(found)}` shows the report",
        )
    missing = [option for option in _OPTIONAL_OPTIONS if option not in wished and "graph" in option]
    extra = tuple(f"{tool.label} does not know `{option}`: kernels of CUDA graphs may be missing" for option in missing)
    if not any(item.kind == "kernel" for item in capture.activities):
        raise ProfilerUnavailable(
            f"{tool.label} recorded no kernels of `{engine}`" + "".join(f"; {text}" for text in capture.warnings[:2]),
            hint=f"`{ran.raw_log}` has its output; `{open_command(found)}` shows the report",
        )
    return with_warnings(capture, (*extra, *_outcome_warnings(outcome)))


def _outcome_warnings(outcome: TargetOutcome | None) -> Iterator[str]:
    if outcome is None:
        return
    yield from outcome.warnings
    if not outcome.complete:
        yield f"the run was stopped after {outcome.inferences} inferences"


def _no_report_error(
    tool: Tool, ran: ProcessResult, outcome: TargetOutcome | None, report: Path
) -> ProfilerUnavailable:
    if (known := nsight_run.find_known_failure(ran.output, tool)) is not None:
        return known
    if report.with_suffix(".qdstrm").is_file():
        return ProfilerUnavailable(
            f"{tool.label} recorded, and could not make a report of `{report.with_suffix('.qdstrm')}`",
            hint="its host part is not installed here: install the whole Nsight Systems, or open the file where it is",
        )
    if outcome is not None and outcome.switch:
        return ProfilerUnavailable(
            f"{tool.label} wrote no report: its capture range never started, though {outcome.switch} was called to start it",
            hint=f'`{ran.raw_log}` has its output; `pip install "cuda-bindings>=12.9,<14"` brings another way to start it',
        )
    return ProfilerUnavailable(
        f"{tool.label} wrote no report: {nsight_run.last_error_line(ran.output)}",
        hint=f"`{ran.raw_log}` has its output",
    )


def _partial_capture(tool: Tool, report: Path | None, outcome: TargetOutcome | None) -> Interrupted:
    partial: Capture | None = None
    if report is not None:
        with contextlib.suppress(ProfilerUnavailable, KeyboardInterrupt):
            partial = read_sqlite(_export_sqlite(report, tool), outcome)
    if partial is not None and partial.activities:
        done = outcome.inferences if outcome is not None else 0
        return Interrupted(
            f"interrupted; `{report}` has the {done} inferences until then", hint=f"`{open_command(report or Path())}`",
            partial=with_warnings(partial, tuple(_outcome_warnings(outcome))),
        )  # fmt: skip
    return Interrupted("interrupted before anything was recorded", hint="the same command profiles again")


def _export_sqlite(report: Path, tool: Tool) -> Path:
    """Write the SQLite export beside a report, replacing an existing one, which may be of another run."""
    target = report.with_suffix(".sqlite")
    target.unlink(missing_ok=True)
    ran = nsight_run.run_tool(
        tool,
        ["export", "-t", "sqlite", "-f", "true", "-o", target.name, report.name],
        report.parent,
        timeout_s=_EXPORT_S,
    )
    if ran.ended_by == "interrupted":
        raise Interrupted(f"interrupted while `{report}` was read", hint=f"`{ran.command}`")
    if ran.exit_code != 0 or not target.is_file():
        if (known := nsight_run.find_known_failure(ran.output, tool)) is not None:
            raise known
        raise ProfilerUnavailable(
            f"{tool.label} could not export `{report}`: {nsight_run.last_error_line(ran.output)}",
            hint=f"`{ran.command}`; a report of a newer nsys needs that version",
        )
    return target


def with_warnings(capture: Capture, more: Iterable[str]) -> Capture:
    return replace(capture, warnings=(*capture.warnings, *more))


_LOSS_WORDS = re.compile(
    r"\b(?:drop|lost|loss|overflow|fail|error|incomplete|not collected|unable|missing|corrupt)", re.IGNORECASE
)
_PUSH_POP = 59


class _Export:
    """The tables of an export by name; a missing table is empty."""

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
        """The requested columns of every row, None for missing ones; empty without a needed one."""
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


def read_sqlite(path: Path, outcome: TargetOutcome | None = None) -> Capture:
    """All device activity, from an export of any version; `outcome` is that of the profiled process.

    Inference windows are our NVTX ranges, else the process's host times mapped to the capture's clock.
    `ProfilerUnavailable` for a file that is not an export, or damaged.
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
    if size < (whole := _declared_size(path)):
        raise ProfilerUnavailable(f"`{path}` is cut: it has {size} of {whole} bytes", hint=hint)
    try:
        with contextlib.closing(_Export(path)) as source:
            capture = _read_export(source, outcome, hint)
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise ProfilerUnavailable(f"`{path}` is not a complete SQLite export of nsys: {error}", hint=hint) from error
    except (TypeError, ValueError) as error:  # a text in place of a number: SQLite columns are untyped
        raise ProfilerUnavailable(f"`{path}` holds values nsys does not write: {error}", hint=hint) from error
    report = path.with_suffix(".nsys-rep")
    with contextlib.suppress(OSError):
        if report.stat().st_mtime_ns > path.stat().st_mtime_ns:
            stale = f"`{path.name}` is older than its report: it may be of another run"
            return with_warnings(capture, (stale,))
    return capture


def _declared_size(path: Path) -> int:
    """Bytes declared in a database's header (page size at byte 16, pages at byte 28); 0 if unknown."""
    with open_regular(path, error=ProfilerUnavailable) as file:
        head = file.read(32)
    if len(head) < 32 or not head.startswith(b"SQLite format 3\0"):
        return 0
    page = int.from_bytes(head[16:18], "big")
    return (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")


def _read_export(source: _Export, outcome: TargetOutcome | None, hint: str) -> Capture:
    known = {"StringIds", "META_DATA_EXPORT", "TARGET_INFO_SESSION_START_TIME"}
    if not source.tables & known and not any(name.startswith("CUPTI_") for name in source.tables):
        found = ", ".join(sorted(source.tables)[:5]) or "no tables"
        raise ProfilerUnavailable(f"`{source.path}` is a database, but none of nsys: it has {found}", hint=hint)
    meta = source.pairs("META_DATA_EXPORT", "name", "value")
    product, schema = meta.get("EXPORT_PRODUCT_VERSION"), meta.get("EXPORT_SCHEMA_VERSION")
    log.info("`%s`: exported by nsys %s, schema %s", source.path.name, product or "unknown", schema or "unknown")
    strings = source.pairs("StringIds", "id", "value")
    numbers = _CorrelationIds()
    seen = list(_activities(source, strings, numbers))
    calls = _api_calls(source, strings, numbers)
    spans, own = _ranges(source, strings)
    warnings = [*_diagnostics(source), *_graphs(source, seen)]
    windows = _inference_windows(source, outcome, own, seen, calls, warnings)
    instrument = "nsys" if not product else f"nsys {'.'.join(str(product).split('.')[:3])}"
    if windows:
        return assemble(seen, calls or None, windows, instrument, spans=spans, warnings=warnings)
    whole = assemble(seen, calls or None, [(0, _OPEN_END)], instrument, spans=spans)  # its warnings concern the window
    return replace(whole, inferences=(), warnings=tuple(warnings))


class _CorrelationIds:
    """Correlation ids unique in the whole capture: nsys counts per process."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}

    def __call__(self, number: int | None, global_id: int | None) -> int:
        if not number:
            return 0
        pid = (global_id or 0) >> 24 & 0xFFFFFF
        return number + (self._pids.setdefault(pid, len(self._pids)) << 40)


_ACTIVITY_TABLES: dict[Literal["kernel", "copy", "memset"], str] = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL", "copy": "CUPTI_ACTIVITY_KIND_MEMCPY", "memset": "CUPTI_ACTIVITY_KIND_MEMSET"
}  # fmt: skip
_ACTIVITY_COLUMNS = (
    "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes", "copyKind",
    "demangledName", "mangledName", "shortName", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
    "registersPerThread", "staticSharedMemory", "dynamicSharedMemory",
)  # fmt: skip


def _activities(source: _Export, strings: Mapping[int, str], numbers: _CorrelationIds) -> Iterator[Activity]:
    labels = source.pairs("ENUM_CUDA_MEMCPY_OPER", "id", "label")
    for kind, table in _ACTIVITY_TABLES.items():
        for values in source.rows(table, *_ACTIVITY_COLUMNS, needed=("start", "end")):
            row = dict(zip(_ACTIVITY_COLUMNS, values, strict=True))
            names = [
                strings.get(row[key]) for key in _ACTIVITY_COLUMNS if key.endswith("Name") and row[key] is not None
            ]
            copy = row["copyKind"]
            shared = [size for size in (row["staticSharedMemory"], row["dynamicSharedMemory"]) if size is not None]
            yield Activity(
                kind,
                {
                    "kernel": next(filter(None, names), "unnamed kernel"),
                    "copy": COPY_KINDS.get(copy) or labels.get(copy) or f"copy {copy}",
                    "memset": "memset",
                }[kind],
                int(row["start"]),
                int(row["end"]),
                row["deviceId"] or 0,
                row["streamId"] or 0,
                row["bytes"] or 0,
                numbers(row["correlationId"], row["globalPid"]),
                row["graphNodeId"] or 0,
                _launch_shape(row["gridX"], row["gridY"], row["gridZ"]),
                _launch_shape(row["blockX"], row["blockY"], row["blockZ"]),
                row["registersPerThread"],
                sum(shared) if shared else None,
            )


def _launch_shape(x: int | None, y: int | None, z: int | None) -> tuple[int, int, int] | None:
    return None if x is None or y is None or z is None else (x, y, z)


def _api_calls(source: _Export, strings: Mapping[int, str], numbers: _CorrelationIds) -> list[Launch]:
    """Every host call into CUDA, runtime and driver."""
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


_OPEN_END = 1 << 62


def _ranges(source: _Export, strings: Mapping[int, str]) -> tuple[list[HostSpan], list[HostSpan]]:
    """Foreign push/pop ranges, and those around our inferences."""
    others: list[HostSpan] = []
    own: list[HostSpan] = []
    rows = source.rows(
        "NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid", needed=("start", "eventType")
    )
    for start, end, kind, text, key, thread in rows:
        name = str(text or strings.get(key) or "")
        if kind == _PUSH_POP and name:
            found = HostSpan(name, int(start), _OPEN_END if end is None else int(end), thread or 0)
            (own if name.startswith(RANGE_PREFIX) else others).append(found)
    return others, own


def _inference_windows(
    source: _Export,
    outcome: TargetOutcome | None,
    own: list[HostSpan],
    found: list[Activity],
    calls: list[Launch],
    warnings: list[str],
) -> list[tuple[int, int]]:
    """The window of each inference on the report's clock: by NVTX, else by the process's host times."""
    closed = sorted((item.start_ns, item.end_ns) for item in own if item.end_ns != _OPEN_END)
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
        # the first launch is of the first inference, the last of the last: the origin is between
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
            "the report has no NVTX ranges, and the process's host times do not fit its clock: "
            "kernels are not assigned to inferences"
        )
    return best


def _origin_by_shares(windows: Sequence[tuple[int, int]], moments: Sequence[int]) -> list[int]:
    """The origin that puts an equal share of the moments into each window; None if they do not divide.

    A delayed inference widens its own window only, so all windows must contain their share.
    """
    share, rest = divmod(len(moments), len(windows))
    if rest or not share:
        return []
    firsts, lasts = moments[::share], moments[share - 1 :: share]
    earliest = max(start - first for (start, _), first in zip(windows, firsts, strict=True))
    latest = min(end - last for (_, end), last in zip(windows, lasts, strict=True))
    return [(earliest + latest) // 2]


def _diagnostics(source: _Export) -> Iterator[str]:
    """The profiler's messages about lost data, each once."""
    labels = source.pairs("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", "id", "label")
    seen: set[str] = set()
    for severity, text in source.rows("DIAGNOSTIC_EVENT", "severity", "text", needed=("text",)):
        plain = " ".join(str(text or "").split())
        label = str(labels.get(severity, ""))
        loud = re.search(r"warn|err|fatal", label, re.IGNORECASE) if label else _LOSS_WORDS.search(plain)
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
