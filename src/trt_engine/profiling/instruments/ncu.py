"""Nsight Compute: hardware counters of single kernels.

`collect_counters` runs one inference of an engine under `ncu`; `ncu_output` parses what it prints. `ncu` replays each
kernel, flushes caches and may lock clocks: its durations are not the application's.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trt_engine.atomic_io import read_bounded
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.profiling.instruments import nsight_run, nsight_tools
from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.ncu_output import (
    COMPUTE,
    DRAM,
    DURATION,
    MEMORY,
    OCCUPANCY,
    SECTION_DRAM,
    KernelLaunch,
    parse_output,
)
from trt_engine.profiling.instruments.nsight_run import ProcessResult
from trt_engine.profiling.instruments.nsight_tools import Tool
from trt_engine.profiling.instruments.target import TargetOutcome
from trt_engine.records.profile import Counters

log = logging.getLogger(__name__)

REPORT, OUTPUT, LOG = "profile.ncu-rep", "ncu.csv", "ncu.log"
"""Files written by `counters`."""
METRICS = (
    DURATION, COMPUTE, MEMORY, DRAM, OCCUPANCY, "dram__bytes_read.sum", "dram__bytes_write.sum",
    "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct", "launch__registers_per_thread",
    "launch__occupancy_limit_blocks", "launch__occupancy_limit_registers", "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
)  # fmt: skip
"""The metrics; all exist from compute capability 7.0 on."""
_SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis")
"""Sections required by the tool's rules."""
_REQUIRED_OPTIONS = (
    "--csv", "--page", "--metrics", "--kernel-name", "--launch-skip", "--launch-count", "--profile-from-start"
)  # fmt: skip
_LAUNCHES = 2


def open_command(report: Path) -> str:
    """The command that opens a report in the GUI."""
    return f"ncu-ui {report}"


def collect_counters(
    engine: Path,
    out: Path,
    *,
    kernels: Sequence[str],
    warmup: int = 3,
    runtime: RuntimeConfig | None = None,
    config: BenchConfig | None = None,
    rules: bool = False,
    timeout_s: float = 1800.0,
) -> tuple[Counters, ...]:
    """Counters of these kernels in one inference of the engine, in the given order; empty names mean every kernel.

    `kernels` are full names from a capture. Per kernel and grid `_LAUNCHES` launches are measured (in total, for versions
    that do not separate grids). `rules` adds the tool's advice. Clocks are not locked. Writes report, CSV and raw log into
    the folder `out`. Raises as `nsys.collect_capture` does.
    """
    request = nsight_run.make_request(engine, config, runtime, inferences=1, warmup=warmup)
    tool = nsight_tools.find_tool("ncu")
    if nsight_tools.read_permission().is_refused:
        raise nsight_tools.permission_error()
    tool.require_options(_REQUIRED_OPTIONS)
    out = nsight_run.prepare_folder(out, REPORT, OUTPUT, LOG)
    ran, outcome = nsight_run.run_target(tool, _command_line(tool, kernels, rules), request, out, timeout_s=timeout_s)
    said = ran.output
    with contextlib.suppress(OSError):  # else, or if it is empty, the output of the tool and its program
        text = read_bounded(out / OUTPUT).decode(errors="replace")
        said = text if text.strip() else said
    instrument = f"{tool.label}, clocks as they are, caches flushed"
    if ran.ended_by == "interrupted":
        raise _partial_counters(said, kernels, instrument)
    whole = replace(ran, output=said if said == ran.output else f"{said}\n{ran.output}")
    nsight_run.check_result(tool, whole, outcome, engine, timeout_s)
    launches = _parse_launches(said, whole, tool, kernels, outcome)
    if rules and (out / REPORT).is_file():
        launches = (*launches, *_add_advice(tool, out))
    found = kernel_counters(launches, kernels, instrument)
    if missing := [name for name in kernels if name not in {item.kernel for item in found}]:
        log.warning("%s measured no launch of %s", tool.label, ", ".join(f"`{base_name(name)}`" for name in missing))
    return found


def _command_line(tool: Tool, kernels: Sequence[str], rules: bool) -> list[str]:
    def wished(*option: str) -> list[str]:
        return list(option) if tool.has_option(option[0]) else []

    bases = list(dict.fromkeys(map(base_name, kernels)))
    names = "|".join(re.sub(r"([^\w])", r"\\\1", base) for base in bases)  # unlike `re.escape`, for the tool's dialect
    by_grid = wished("--filter-mode", "per-launch-config")
    return [
        "--csv", "--page", "raw", *wished("--print-units", "base"), "--metrics", ",".join(METRICS),
        *(word for section in _SECTIONS if rules for word in ("--section", section)),
        *(["--kernel-name", f"regex:^({names})$"] if bases else []),
        *wished("--kernel-name-base", "function"), *by_grid,
        "--launch-skip", "0", "--launch-count", str(_LAUNCHES if by_grid else _LAUNCHES * max(len(bases), 1)),
        *wished("--clock-control", "none"), *wished("--cache-control", "all"), *wished("--target-processes", "all"),
        "--profile-from-start", "off", *wished("--log-file", OUTPUT),
        "--force-overwrite", "--export", Path(REPORT).stem,
    ]  # fmt: skip


def base_name(kernel: str) -> str:
    """The function of a demangled kernel name, as `ncu` filters by: no types, namespaces, template or call arguments."""
    text = re.sub(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}", "", kernel.strip())
    at = text.rfind("[clone ")
    if at >= 0 and text.find("]", at) == len(text) - 1:
        text = text[:at].rstrip()
    kept, depth = [], 0
    for position, letter in enumerate(text):
        if letter == "<":
            depth += 1
        elif letter == ">" and depth and text[position - 1] != "-":
            depth -= 1
        elif letter == "(" and not depth:
            break
        elif not depth:
            kept.append(letter)
    plain = "".join(kept).strip().rpartition("::")
    return (plain[2].split() or [kernel.strip()])[-1]


def _partial_counters(output: str, kernels: Sequence[str], instrument: str) -> Interrupted:
    with contextlib.suppress(ProfilerUnavailable):
        found = kernel_counters(parse_output(output), kernels, instrument)
        if found:
            return Interrupted(
                f"interrupted; {len(found)} kernels were measured until then",
                hint="the same command measures all of them",
                partial=found,
            )
    return Interrupted("interrupted before a kernel was measured", hint="the same command measures again")


def _parse_launches(
    output: str, ran: ProcessResult, tool: Tool, kernels: Sequence[str], outcome: TargetOutcome | None
) -> tuple[KernelLaunch, ...]:
    try:
        return parse_output(output)
    except ProfilerUnavailable as error:
        if (known := nsight_run.find_known_failure(ran.output, tool)) is not None:
            raise known from error
        if "No kernels were profiled" not in ran.output:
            raise
    there = re.findall(r"^[ \t]*\d+\. (\S.*)$", output.partition("Available Kernels:")[2], re.MULTILINE)
    if there:
        names = ", ".join(f"`{base_name(name)}`" for name in kernels)
        raise ProfilerUnavailable(
            f"{tool.label} profiled no kernels: none of those that ran is {names}",
            hint="there were: " + ", ".join(f"`{name.strip()}`" for name in there[:8]),
        )
    if outcome is not None and outcome.switch:
        wanted = f" is named {', '.join(f'`{base_name(name)}`' for name in kernels)}" if kernels else " ran"
        raise ProfilerUnavailable(
            f"{tool.label} profiled no kernels: inside the capture range none{wanted}, or the range never started",
            hint=f"`{ran.raw_log}` has the command; without `--kernel-name` every kernel is measured",
        )
    raise ProfilerUnavailable(
        f"{tool.label} profiled no kernels: {nsight_run.last_error_line(output)}", hint=f"`{ran.raw_log}`"
    )


def _add_advice(tool: Tool, folder: Path) -> Iterator[KernelLaunch]:
    """The launches with the tool's advice, from the report's details page; needs no GPU."""
    ran = nsight_run.run_tool(
        tool, ["--import", REPORT, "--csv", "--page", "details", "--print-units", "base"], folder, timeout_s=600.0
    )
    try:
        for item in parse_output(ran.output):
            yield replace(item, metrics={}, units={})
    except ProfilerUnavailable as error:
        log.warning("the advice of %s cannot be read: %s", tool.label, error.message)


def kernel_counters(
    launches: Iterable[KernelLaunch], kernels: Sequence[str] = (), instrument: str = ""
) -> tuple[Counters, ...]:
    """One `Counters` for each kernel, named and in the order of `kernels` where those are given.

    Tools spell a kernel differently (`float const*`, `const float *`, `<(int)4>`), so among launches of the same function
    those with the most similar tokens are taken.
    """
    by_name: dict[str, list[KernelLaunch]] = defaultdict(list)
    for item in launches:
        by_name[item.kernel].append(item)
    if not kernels:
        return tuple(_aggregate(name, items, instrument) for name, items in by_name.items())
    found = []
    for wanted in dict.fromkeys(kernels):
        alike = [name for name in by_name if base_name(name) == base_name(wanted)]
        if alike:
            best = max(alike, key=lambda name: _similarity(name, wanted))
            found.append(_aggregate(wanted, by_name[best], instrument))
    return tuple(found)


def _similarity(one: str, other: str) -> float:
    if one == other:
        return 2.0
    mine, others = _name_tokens(one), _name_tokens(other)
    return len(mine & others) / max(len(mine | others), 1)


def _name_tokens(name: str) -> set[str]:
    """Identifiers and numbers of a name: `1ul`, `(unsigned long)1` and `1` are equal."""
    plain = re.sub(r"\(\w[\w ]*\)(?=-?\d)", "", name)
    words = re.findall(r"\w+", plain)
    return {re.sub(r"(?<=\d)(?:u?l{1,2}|u)$", "", word, flags=re.IGNORECASE) for word in words}


def _aggregate(name: str, launches: Sequence[KernelLaunch], instrument: str) -> Counters:
    measured = [item for item in launches if item.metrics]
    weights = [item.metrics.get(DURATION) or 1.0 for item in measured]
    metrics: dict[str, float] = {}
    units: dict[str, str] = {}
    for item in measured:
        units.update(item.units)
    for metric in dict.fromkeys(key for item in measured for key in item.metrics):
        pairs = [
            (item.metrics[metric], weight)
            for item, weight in zip(measured, weights, strict=True)
            if metric in item.metrics
        ]
        if units.get(metric) == "%":
            metrics[metric] = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        else:
            metrics[metric] = sum(value for value, _ in pairs) / len(pairs)
    duration = metrics.get(DURATION)
    return Counters(
        kernel=name,
        duration_us=None if duration is None else duration / 1e3,
        compute_pct=metrics.get(COMPUTE),
        memory_pct=metrics.get(MEMORY),
        dram_pct=metrics.get(DRAM, metrics.get(SECTION_DRAM)),
        occupancy_pct=metrics.get(OCCUPANCY),
        metrics=metrics,
        units=units,
        advice=tuple(dict.fromkeys(text for item in launches for text in item.advice)),
        launches=len(measured),
        instrument=instrument,
    )
