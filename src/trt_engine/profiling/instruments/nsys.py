"""Nsight Systems: an engine's kernels and copies on the device's clock, profiled from outside its process.

`collect_capture` runs the engine under `nsys profile`; `nsys_export` reads the export of its report.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.profiling.instruments import nsight_run, nsight_tools
from trt_engine.profiling.instruments.capture import Capture, ProfilerUnavailable
from trt_engine.profiling.instruments.nsight_run import ProcessResult
from trt_engine.profiling.instruments.nsight_tools import Tool
from trt_engine.profiling.instruments.nsys_export import read_sqlite, with_warnings
from trt_engine.profiling.instruments.target import TargetOutcome

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
