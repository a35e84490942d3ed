"""Nsight Compute: hardware counters of single kernels.

`collect_counters` runs one inference of an engine under `ncu`. `ncu` replays each
kernel, flushes caches and may lock clocks: its durations are not the application's.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trt_engine.atomic_io import read_bounded
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.profiling.instruments import nsight_run, nsight_tools
from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.nsight_run import ProcessResult
from trt_engine.profiling.instruments.nsight_tools import Tool
from trt_engine.profiling.instruments.target import TargetOutcome
from trt_engine.records.profile import Counters

log = logging.getLogger(__name__)

REPORT, OUTPUT, LOG = "profile.ncu-rep", "ncu.csv", "ncu.log"
"""Files written by `counters`."""
DURATION = "gpu__time_duration.sum"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
SECTION_DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_ALIASES = {
    "Duration": DURATION, "Compute (SM) Throughput": COMPUTE, "SM [%]": COMPUTE, "Memory Throughput": MEMORY,
    "Memory [%]": MEMORY, "DRAM Throughput": DRAM, "Achieved Occupancy": OCCUPANCY,
}  # fmt: skip
"""Names on the details page of the fields of `Counters`."""
_HINT = "`ncu -i REPORT.ncu-rep --csv --page raw --print-units base` writes what is read here"
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


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of a kernel as `ncu` measured it."""

    kernel: str
    """Spelled as by the tool."""
    metrics: dict[str, float] = field(default_factory=dict)
    """In base units: ns, byte, hz, %."""
    units: dict[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()


_FIXED_COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream", "Block Size",
    "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type",
    "Rule Description", "Estimated Speedup Type", "Estimated Speedup",
)  # fmt: skip


def parse_output(text: str) -> tuple[KernelLaunch, ...]:
    """Every launch in what `ncu` printed: CSV of the page raw or details, other lines in between.

    `ProfilerUnavailable` with the reason for a text that is empty, truncated, not from `ncu`, or without kernels.
    """
    lines = text.splitlines()
    if not any(line.strip() for line in lines):
        raise ProfilerUnavailable("the output of ncu is empty, expected a table of kernels", hint=_HINT)
    headers = (
        at for at, line in enumerate(lines) if '"Kernel Name"' in line and line.lstrip("\ufeff ").startswith('"')
    )
    at = next(headers, None)
    if at is not None:
        found = _read_csv(lines, at)
        if not found:
            raise ProfilerUnavailable(
                "the output of ncu has a header and no launches: it is cut, or nothing was profiled", hint=_HINT
            )
        return found
    raise _no_launches_error(text, lines)


def _no_launches_error(text: str, lines: Sequence[str]) -> ProfilerUnavailable:
    if "ERR_NVGPUCTRPERM" in text:
        return nsight_tools.permission_error()
    if found := re.search(r"==ERROR==\s*(.*)", text):
        return ProfilerUnavailable(f"ncu measured nothing: {found[1].strip()}", hint=_HINT)
    if "No kernels were profiled" in text:
        return ProfilerUnavailable("ncu measured nothing: No kernels were profiled", hint=_HINT)
    first = next(line.strip() for line in lines if line.strip())[:80]
    return ProfilerUnavailable(f"no table of ncu was found; the text begins with `{first}`", hint=_HINT)


def _csv_records(lines: Sequence[str], at: int) -> Iterator[tuple[int, list[str]]]:
    """The CSV records from the header on, with their line numbers; a value may span lines."""
    while at < len(lines):
        line = lines[at].lstrip("\ufeff ")
        start = at
        at += 1
        if not line.startswith('"'):
            continue
        parts, quotes = [line], line.count('"')
        while quotes % 2 and at < len(lines) and not lines[at].startswith("=="):
            parts.append(lines[at])
            quotes += lines[at].count('"')
            at += 1
        line = "\n".join(parts)
        if quotes % 2:
            raise ProfilerUnavailable(
                f"the output of ncu is cut: line {start + 1} ends inside a value: `{line[:80]}`", hint=_HINT
            )
        try:
            row = next(csv.reader([line]))
        except csv.Error as error:
            raise ProfilerUnavailable(f"the output of ncu is damaged: line {start + 1}: {error}", hint=_HINT) from error
        yield start + 1, row


def _read_csv(lines: Sequence[str], at: int) -> tuple[KernelLaunch, ...]:
    header: list[str] = []
    least = 0
    blocks: list[tuple[list[str], list[list[str]]]] = []
    for line, row in _csv_records(lines, at):
        if "Kernel Name" in row and "ID" in row:
            header = row
            blocks.append((header, []))
            least = header.index("Metric Value") + 1 if "Metric Value" in header else len(header)
        elif not least <= len(row) <= len(header):
            raise ProfilerUnavailable(
                f"the output of ncu is damaged: line {line} has {len(row)} values, the header {len(header)}", hint=_HINT
            )
        else:  # a row of a metric ends before the columns of rules
            blocks[-1][1].append([*row, *[""] * (len(header) - len(row))])
    found: list[KernelLaunch] = []
    for names, rows in blocks:
        found += _details_launches(names, rows) if "Metric Name" in names else _raw_launches(names, rows)
    return tuple(found)


def _raw_launches(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[KernelLaunch]:
    """One row per launch, metrics as columns, units in the row without a number."""
    at = {name: index for index, name in enumerate(header)}
    units: Sequence[str] = [""] * len(header)
    if rows and not rows[0][at["ID"]].strip():
        units, rows = rows[0], rows[1:]
    columns = [(name, index) for name, index in at.items() if name not in _FIXED_COLUMNS]
    for row in rows:
        yield _make_launch(row[at["Kernel Name"]], ((name, units[index], row[index]) for name, index in columns))


def _details_launches(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[KernelLaunch]:
    """One row per metric or rule; rows of one launch share its number and process."""
    every = [dict(zip(header, row, strict=True)) for row in rows]
    by_launch: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in every:
        by_launch[row.get("Process ID", ""), row["ID"], row["Kernel Name"]].append(row)
    for items in by_launch.values():
        values = [
            (item["Metric Name"], item.get("Metric Unit", ""), item.get("Metric Value", ""))
            for item in items
            if item.get("Metric Name")
        ]
        advice = [" ".join(item["Rule Description"].split()) for item in items if item.get("Rule Description")]
        yield replace(_make_launch(items[0]["Kernel Name"], values), advice=tuple(dict.fromkeys(advice)))


def _make_launch(kernel: str, values: Iterable[tuple[str, str, str]]) -> KernelLaunch:
    metrics: dict[str, float] = {}
    units: dict[str, str] = {}
    for name, unit, text in values:
        try:
            value = float(text.replace(",", ""))  # of thousands
        except ValueError:  # `n/a`, `0x3`, `CachePreferNone`
            continue
        if not math.isfinite(value):
            continue
        known, factor = _base_unit(unit)
        alias = _ALIASES.get(name, name)
        if known == ("ns" if alias == DURATION else "%"):  # `Memory Throughput` is there twice: in % and in byte/s
            name = alias
        if name not in metrics:  # the first section that has it: others repeat it, or differ in meaning
            metrics[name], units[name] = value * factor, known
    return KernelLaunch(kernel.strip(), metrics, units)


_TIMES = {
    "nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9, "sec": 1e9,
}  # fmt: skip
_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PER_SECOND = {"second": 1.0, "s": 1.0, "msecond": 1e3, "ms": 1e3, "usecond": 1e6, "us": 1e6, "nsecond": 1e9, "ns": 1e9}


def _base_unit(unit: str) -> tuple[str, float]:
    """The base unit and what to multiply by: `Kbyte` is 1000 `byte`, `msecond` 1e6 `ns`, `cycle/nsecond` 1e9 `hz`."""
    plain = unit.strip()
    if plain in _TIMES:
        return "ns", _TIMES[plain]
    if plain in ("%", "percent"):
        return "%", 1.0
    if match := re.fullmatch(r"([KMGTP]?)(?:hz|Hz)", plain):
        return "hz", _PREFIXES[match[1]]
    if match := re.fullmatch(r"([KMGTP]?)(\w+?)/(\w+)", plain):
        amount = "byte" if match[2] in ("byte", "B") else match[2]
        factor = _PREFIXES[match[1]] * _PER_SECOND.get(match[3], 1.0)
        if match[3] in _PER_SECOND:
            return ("hz" if amount == "cycle" else f"{amount}/s"), factor
        return f"{amount}/{match[3]}", factor
    if match := re.fullmatch(r"([KMGTP]?)(byte|B)", plain):
        return "byte", _PREFIXES[match[1]]
    return plain, 1.0
