"""Nsight Compute: why single kernels are as fast as they are, by the GPU's own counters.

`counters` runs one inference of an engine under `ncu`, `read` reads what `ncu` prints: its CSV in both layouts and its
console text, of any version and locale. `ncu` runs each kernel several times over, flushes caches and may hold clocks: its
durations are not the application's.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.errors import Interrupted, UsageError
from trt_engine.files import ensure_folder
from trt_engine.profiling import nsight
from trt_engine.profiling.capture import ProfilerUnavailable
from trt_engine.profiling.child import Outcome
from trt_engine.profiling.nsight import Ran, Tool, decimal_mark, number
from trt_engine.tensors import Shape
from trt_engine.traces import Counters

__all__ = [
    "LOG",
    "METRICS",
    "OUTPUT",
    "REPORT",
    "KernelLaunch",
    "base_name",
    "counters",
    "counters_of",
    "opens",
    "read",
]

log = logging.getLogger(__name__)

REPORT, OUTPUT, LOG = "profile.ncu-rep", "ncu.csv", "ncu.log"
"""What `counters` leaves in its folder."""

_DURATION = "gpu__time_duration.sum"
_COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
_MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
_DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
_DRAM_OF_SECTION = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"

METRICS = (
    _DURATION, _COMPUTE, _MEMORY, _DRAM, _OCCUPANCY, "dram__bytes_read.sum", "dram__bytes_write.sum",
    "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct", "launch__registers_per_thread",
    "launch__occupancy_limit_blocks", "launch__occupancy_limit_registers", "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
)  # fmt: skip
"""What is measured when nobody says otherwise; every one of them is there from compute capability 7.0 on."""
_SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis")
"""What the tool's rules look at."""
_ALIASES = {
    "Duration": _DURATION, "Compute (SM) Throughput": _COMPUTE, "SM [%]": _COMPUTE, "Memory Throughput": _MEMORY,
    "Memory [%]": _MEMORY, "DRAM Throughput": _DRAM, "Achieved Occupancy": _OCCUPANCY,
}  # fmt: skip
"""The details page's names of what `Counters` has a field for."""
_NEEDED = ("--csv", "--page", "--metrics", "--kernel-name", "--launch-skip", "--launch-count", "--profile-from-start")
_HINT = "`ncu -i REPORT.ncu-rep --csv --page raw --print-units base` writes what is read here"


def opens(report: Path) -> str:
    """The command that shows a report on a desk."""
    return f"ncu-ui {report}"


# ------------------------------------------------------------------------------------------------ an engine under ncu


def counters(
    engine: Path,
    out: Path,
    *,
    kernels: Sequence[str],
    batch: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
    device: str | None = None,
    warmup: int = 3,
    runtime: RuntimeConfig | None = None,
    config: BenchConfig | None = None,
    metrics: Sequence[str] = METRICS,
    launch_skip: int = 0,
    launch_count: int = 2,
    rules: bool = False,
    timeout_s: float = 1800.0,
    tool: Tool | None = None,
) -> tuple[Counters, ...]:
    """The counters of these kernels in one inference of the engine, in the order asked for; empty names mean every kernel.

    `kernels` are whole names as a capture has them. Of each kernel and grid `launch_count` launches are measured, after
    `launch_skip` (in all, with a version that cannot tell grids apart). With `rules` the tool's advice is asked for as well.
    Clocks are left as they are. Leaves report, CSV and raw log in the folder `out`. Raises as `nsys.collect` does.
    """
    if launch_count < 1 or launch_skip < 0:
        raise UsageError(
            f"cannot measure {launch_count} launches after {launch_skip}", hint="`launch_count` is 1 or more"
        )
    request = nsight.request_for(
        engine, config=config, runtime=runtime, batch=batch, shapes=shapes, device=device, inferences=1, warmup=warmup
    )
    tool = tool or nsight.find("ncu")
    if nsight.permission().refused:
        raise nsight.not_permitted()
    for option in _NEEDED:
        tool.needs(option)
    out = ensure_folder(out).absolute()
    report, output, raw_log = out / REPORT, out / OUTPUT, out / LOG
    for stale in (report, output, raw_log):
        stale.unlink(missing_ok=True)
    words = _words(tool, kernels, metrics, launch_skip, launch_count, rules, output, report)
    ran, outcome = nsight.profiled(tool, words, request, out=out, raw_log=raw_log, timeout_s=timeout_s)
    said = _said(output, ran)
    instrument = f"{tool.text}, clocks as they are, caches flushed"
    if ran.ended == "interrupted":
        raise _interrupted(said, kernels, instrument)
    whole = said if said == ran.said else f"{said}\n{ran.said}"
    nsight.judge(tool, replace(ran, said=whole), outcome, raw_log=raw_log, engine=engine, timeout_s=timeout_s)
    launches = _measured(said, whole, tool, kernels, outcome, raw_log)
    if rules and report.is_file():
        launches = (*launches, *_advised(tool, report, raw_log))
    found = tuple(replace(item, instrument=instrument) for item in counters_of(launches, kernels))
    if missing := [name for name in kernels if name not in {item.kernel for item in found}]:
        log.warning("%s measured no launch of %s", tool.text, ", ".join(f"`{base_name(name)}`" for name in missing))
    return found


def _words(
    tool: Tool,
    kernels: Sequence[str],
    metrics: Sequence[str],
    skip: int,
    count: int,
    rules: bool,
    output: Path,
    report: Path,
) -> list[str]:
    known = tool.options()

    def wished(*option: str) -> list[str]:
        return list(option) if not known or option[0] in known else []

    bases = list(dict.fromkeys(map(base_name, kernels)))
    by_grid = wished("--filter-mode", "per-launch-config")
    return [
        "--csv", "--page", "raw", *wished("--print-units", "base"), "--metrics", ",".join(metrics),
        *(word for section in _SECTIONS if rules for word in ("--section", section)),
        *(["--kernel-name", f"regex:^({'|'.join(map(_escaped, bases))})$"] if bases else []),
        *wished("--kernel-name-base", "function"), *by_grid,
        "--launch-skip", str(skip), "--launch-count", str(count if by_grid else count * max(len(bases), 1)),
        *wished("--clock-control", "none"), *wished("--cache-control", "all"), *wished("--target-processes", "all"),
        "--profile-from-start", "off", *wished("--log-file", output.name),
        "--force-overwrite", "--export", report.stem,
    ]  # fmt: skip


def _escaped(name: str) -> str:
    """The name as a regular expression that matches it alone; letters stay, for `re.escape` knows another dialect."""
    return re.sub(r"([^\w])", r"\\\1", name)


def base_name(kernel: str) -> str:
    """The function of a demangled kernel name, as `ncu` filters by: no types, namespaces, template or call arguments."""
    text = re.sub(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}", "", kernel.strip())
    text = re.sub(r"\s*\[clone [^]]*\]$", "", text)
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


def _said(output: Path, ran: Ran) -> str:
    """What the tool wrote to its file; what it and its program wrote to their streams where it has none."""
    with contextlib.suppress(OSError):
        text = output.read_text(errors="replace")
        return text if text.strip() else ran.said
    return ran.said


def _interrupted(said: str, kernels: Sequence[str], instrument: str) -> Interrupted:
    with contextlib.suppress(ProfilerUnavailable):
        found = tuple(replace(item, instrument=instrument) for item in counters_of(read(said), kernels))
        if found:
            return Interrupted(
                f"interrupted; {len(found)} kernels were measured until then",
                hint="the same command measures all of them",
                partial=found,
            )
    return Interrupted("interrupted before a kernel was measured", hint="the same command measures again")


def _measured(
    said: str, whole: str, tool: Tool, kernels: Sequence[str], outcome: Outcome | None, raw_log: Path
) -> tuple[KernelLaunch, ...]:
    try:
        return read(said)
    except ProfilerUnavailable as error:
        if (known := nsight.diagnose(whole, tool)) is not None:
            raise known from error
        if "No kernels were profiled" not in whole:
            raise
    there = re.findall(r"^\s*\d+\. (\S.*)$", said.partition("Available Kernels:")[2], re.MULTILINE)
    if there:
        names = ", ".join(f"`{base_name(name)}`" for name in kernels)
        raise ProfilerUnavailable(
            f"{tool.text} profiled no kernels: none of those that ran is {names}",
            hint="there were: " + ", ".join(f"`{name.strip()}`" for name in there[:8]),
        )
    if outcome is not None and outcome.switch:
        wanted = f" is named {', '.join(f'`{base_name(name)}`' for name in kernels)}" if kernels else " ran"
        raise ProfilerUnavailable(
            f"{tool.text} profiled no kernels: inside the capture range none{wanted}, or the range never started",
            hint=f"`{raw_log}` has the command; without `--kernel-name` every kernel is measured",
        )
    raise ProfilerUnavailable(f"{tool.text} profiled no kernels: {nsight.last_words(said)}", hint=f"`{raw_log}`")


def _advised(tool: Tool, report: Path, raw_log: Path) -> Iterator[KernelLaunch]:
    """The tool's rules, which only the details page has; the report is read again without a GPU."""
    ran = nsight.run(
        tool, ["--import", report.name, "--csv", "--page", "details", "--print-units", "base"], folder=report.parent,
        raw_log=raw_log, timeout_s=600.0,
    )  # fmt: skip
    try:
        for item in read(ran.said):
            yield replace(item, metrics={}, units={}, texts={})
    except ProfilerUnavailable as error:
        log.warning("the advice of %s cannot be read: %s", tool.text, error.message)


# ------------------------------------------------------------------------------------------------ launches to counters


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of a kernel as `ncu` measured it."""

    kernel: str
    """As the tool spells it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """In base units: ns, byte, hz, %."""
    units: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Values that are no numbers: `launch__func_cache_config`."""
    advice: tuple[str, ...] = ()
    launch: str = ""
    """The tool's number of it."""
    process: str = ""
    device: str = ""
    grid: str = ""
    block: str = ""


def counters_of(launches: Iterable[KernelLaunch], kernels: Sequence[str] = ()) -> tuple[Counters, ...]:
    """One `Counters` for each kernel, named and in the order of `kernels` where those are given.

    Tools spell one kernel in different ways (`float const*`, `const float *`, `<(int)4>`), so among launches of the same
    function those whose words are most alike are taken.
    """
    by_name: dict[str, list[KernelLaunch]] = defaultdict(list)
    for item in launches:
        by_name[item.kernel].append(item)
    if not kernels:
        return tuple(_counters(name, items) for name, items in by_name.items())
    found = []
    for wanted in dict.fromkeys(kernels):
        alike = [name for name in by_name if base_name(name) == base_name(wanted)]
        if alike:
            best = max(alike, key=lambda name: _likeness(name, wanted))
            found.append(_counters(wanted, by_name[best]))
    return tuple(found)


def _likeness(one: str, other: str) -> float:
    if one == other:
        return 2.0
    mine, others = _tokens(one), _tokens(other)
    return len(mine & others) / max(len(mine | others), 1)


def _tokens(name: str) -> set[str]:
    """Identifiers and numbers of a name: `1ul`, `(unsigned long)1` and `1` are the same word."""
    plain = re.sub(r"\(\w[\w ]*\)(?=-?\d)", "", name)
    words = re.findall(r"\w+", plain)
    return {re.sub(r"(?<=\d)(?:u?l{1,2}|u)$", "", word, flags=re.IGNORECASE) for word in words}


def _counters(name: str, launches: Sequence[KernelLaunch]) -> Counters:
    measured = [item for item in launches if item.metrics]
    weights = [item.metrics.get(_DURATION) or 1.0 for item in measured]
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
    duration = metrics.get(_DURATION)
    return Counters(
        kernel=name,
        duration_us=None if duration is None else duration / 1e3,
        compute_pct=metrics.get(_COMPUTE),
        memory_pct=metrics.get(_MEMORY),
        dram_pct=metrics.get(_DRAM, metrics.get(_DRAM_OF_SECTION)),
        occupancy_pct=metrics.get(_OCCUPANCY),
        metrics=metrics,
        units=units,
        advice=tuple(dict.fromkeys(text for item in launches for text in item.advice)),
        launches=len(measured),
    )


# ------------------------------------------------------------------------------------------------ what ncu prints

_FIXED = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream", "Block Size",
    "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type",
    "Rule Description", "Estimated Speedup Type", "Estimated Speedup",
)  # fmt: skip
_WHOLE = re.compile(
    r"(?:n|u|m)?s(?:econd)?|[KMGT]?(?:i?B|byte)|cycle|inst|request|sector|block|thread|warp|register/thread"
)


def read(text: str) -> tuple[KernelLaunch, ...]:
    """Every launch in what `ncu` printed: CSV of the page raw or details, or console text, other lines in between.

    `ProfilerUnavailable` says what is wrong with a text that is empty, cut, something else, or tells why nothing was
    profiled.
    """
    lines = text.splitlines()
    if not any(line.strip() for line in lines):
        raise ProfilerUnavailable("the output of ncu is empty, expected a table of kernels", hint=_HINT)
    at = next((index for index, line in enumerate(lines) if _is_header(line)), None)
    if at is not None:
        found = _read_csv(lines, at)
        if not found:
            raise ProfilerUnavailable(
                "the output of ncu has a header and no launches: it is cut, or nothing was profiled", hint=_HINT
            )
        return found
    if any(line.strip().startswith("Section: ") for line in lines) or any(map(_LAUNCH.match, lines)):
        return _read_console(lines)
    raise _nothing(text, lines)


def _nothing(text: str, lines: Sequence[str]) -> ProfilerUnavailable:
    if "ERR_NVGPUCTRPERM" in text:
        return nsight.not_permitted()
    if found := re.search(r"==ERROR==\s*(.*)", text):
        return ProfilerUnavailable(f"ncu measured nothing: {found[1].strip()}", hint=_HINT)
    if "No kernels were profiled" in text:
        return ProfilerUnavailable("ncu measured nothing: No kernels were profiled", hint=_HINT)
    first = next(line.strip() for line in lines if line.strip())[:80]
    return ProfilerUnavailable(f"no table of ncu was found; the text begins with `{first}`", hint=_HINT)


def _is_header(line: str) -> bool:
    return '"Kernel Name"' in line and line.lstrip("\ufeff ").startswith('"')


def _records(lines: Sequence[str], at: int) -> Iterator[tuple[int, list[str]]]:
    """The CSV records from the header on, with the number of their line; a value may go over several lines."""
    while at < len(lines):
        line = lines[at].lstrip("\ufeff ")
        start = at
        at += 1
        if not line.startswith('"'):
            continue
        while line.count('"') % 2 and at < len(lines) and not lines[at].startswith("=="):
            line += "\n" + lines[at]
            at += 1
        if line.count('"') % 2:
            raise ProfilerUnavailable(
                f"the output of ncu is cut: line {start + 1} ends inside a value: `{line[:80]}`", hint=_HINT
            )
        yield start + 1, next(csv.reader([line]))


def _read_csv(lines: Sequence[str], at: int) -> tuple[KernelLaunch, ...]:
    header: list[str] = []
    least = 0
    blocks: list[tuple[list[str], list[list[str]]]] = []
    for line, row in _records(lines, at):
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
        found += _details(names, rows) if "Metric Name" in names else _raw(names, rows)
    return tuple(found)


def _raw(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[KernelLaunch]:
    """One row a launch, metrics as columns, their units in the row without a number."""
    at = {name: index for index, name in enumerate(header)}
    units: Sequence[str] = [""] * len(header)
    if rows and not rows[0][at["ID"]].strip():
        units, rows = rows[0], rows[1:]
    columns = [(name, index) for name, index in at.items() if name not in _FIXED]
    mark = decimal_mark(row[index] for row in rows for _, index in columns)
    for row in rows:
        values = [(name, units[index], row[index]) for name, index in columns]
        yield _launch({name: row[index] for name, index in at.items() if name in _FIXED}, values, mark)


def _details(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[KernelLaunch]:
    """One row a metric or a rule; rows of one launch have its number and its process."""
    every = [dict(zip(header, row, strict=True)) for row in rows]
    mark = decimal_mark(row["Metric Value"] for row in every if "Metric Value" in row)
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
        yield replace(_launch(items[0], values, mark), advice=tuple(dict.fromkeys(advice)))


def _launch(about: Mapping[str, str], values: Iterable[tuple[str, str, str]], mark: str | None) -> KernelLaunch:
    metrics: dict[str, float] = {}
    units: dict[str, str] = {}
    texts: dict[str, str] = {}
    for name, unit, text in values:
        value = number(text, mark, whole=bool(_WHOLE.fullmatch(unit)))
        if value is None:
            if text.strip() not in ("", "n/a", "nan", "-nan", "inf"):
                texts[name] = text
            continue
        known, factor = _base(unit)
        name = _ALIASES[name] if name in _ALIASES and _belongs(_ALIASES[name], known) else name
        if name not in metrics:  # the first section that has it: others repeat it, or mean another thing
            metrics[name], units[name] = value * factor, known
    return KernelLaunch(
        kernel=about.get("Kernel Name", "").strip(), metrics=metrics, units=units, texts=texts, launch=about.get("ID", ""),
        process=about.get("Process ID", ""), device=about.get("Device", ""), grid=about.get("Grid Size", ""),
        block=about.get("Block Size", ""),
    )  # fmt: skip


def _belongs(metric: str, unit: str) -> bool:
    """`Memory Throughput` stands twice on the details page: in % and in byte/s."""
    return unit == ("ns" if metric == _DURATION else "%")


_TIMES = {
    "nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9, "sec": 1e9,
}  # fmt: skip
_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PER_SECOND = {"second": 1.0, "s": 1.0, "msecond": 1e3, "ms": 1e3, "usecond": 1e6, "us": 1e6, "nsecond": 1e9, "ns": 1e9}


def _base(unit: str) -> tuple[str, float]:
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


# ------------------------------------------------------------------------------------------------ console text

_LAUNCH = re.compile(
    r"  (?P<kernel>\S.*?)"
    r"(?:,? (?P<grid>\(\d+, \d+, \d+\))x(?P<block>\(\d+, \d+, \d+\)))?"
    r"(?:, \d{4}-[^,]*)?, Context \d+, Stream \d+(?:, Device (?P<device>\d+), CC [\d.]+)?\s*$"
)
_RULE = re.compile(r"\s*-{2,}(?: -{2,})+\s*")
_ADVICE = re.compile(r"    (OPT|INF|WRN|ERR)\s+(\S.*)")


def _read_console(lines: Sequence[str]) -> tuple[KernelLaunch, ...]:
    """The details page as it stands on a console: a line for each launch, and its sections as tables."""
    found: list[KernelLaunch] = []
    about: dict[str, str] | None = None
    rows: list[tuple[str, str, str]] = []
    advice: list[str] = []
    at = 0

    def finish() -> None:
        if about is None:
            return
        if not rows:
            raise ProfilerUnavailable(f"the output of ncu is cut: `{about['Kernel Name']}` has no metrics", hint=_HINT)
        mark = decimal_mark(value for _, _, value in rows)
        found.append(replace(_launch(about, rows, mark), advice=tuple(advice)))

    while at < len(lines):
        line = lines[at]
        if match := _LAUNCH.match(line):
            finish()
            about = {
                "Kernel Name": match["kernel"].strip(), "ID": str(len(found)), "Grid Size": match["grid"] or "",
                "Block Size": match["block"] or "", "Device": match["device"] or "",
            }  # fmt: skip
            rows, advice = [], []
        elif _RULE.fullmatch(line) and at + 1 < len(lines) and "Metric Name" in lines[at + 1]:
            table, at = _console_table(lines, at)
            rows += table
            continue
        elif match := _ADVICE.match(line):
            words = [match[2].strip()]
            while at + 1 < len(lines) and lines[at + 1].startswith("          ") and lines[at + 1].strip():
                at += 1
                words.append(lines[at].strip())
            advice.append(" ".join(words))
        at += 1
    if about is None:
        raise ProfilerUnavailable("the output of ncu is cut: it has sections and names no kernel", hint=_HINT)
    finish()
    return tuple(found)


def _console_table(lines: Sequence[str], at: int) -> tuple[list[tuple[str, str, str]], int]:
    """The rows of the table that begins with the dashes at `at`; it ends with dashes too."""
    spans = [match.span() for match in re.finditer(r"-{2,}", lines[at])]
    cut = ProfilerUnavailable(f"the output of ncu is cut: the table at line {at + 1} has no end", hint=_HINT)
    if len(spans) != 3 or at + 2 >= len(lines) or not _RULE.fullmatch(lines[at + 2]):
        raise cut
    found, end = [], at + 3
    while end < len(lines) and not _RULE.fullmatch(lines[end]):
        line = lines[end]
        if not line.strip():
            raise cut
        name, unit, value = (line[begin:stop].strip() for begin, stop in (*spans[:2], (spans[2][0], len(line))))
        found.append((name, unit, value))
        end += 1
    if end >= len(lines):
        raise cut
    return found, end + 1
