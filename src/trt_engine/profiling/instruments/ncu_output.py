"""Parses the tables and messages of Nsight Compute, as it writes them with `--csv` and the C locale (`tool_environment`)."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trt_engine.profiling.instruments import nsight_tools
from trt_engine.profiling.instruments.capture import ProfilerUnavailable

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
