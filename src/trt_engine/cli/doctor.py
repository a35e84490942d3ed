"""`trt-engine doctor`: what is installed, what works together, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trt_engine.cli import options
from trt_engine.cli.origin import installable
from trt_engine.cli.output import Talk, document, emit
from trt_engine.device import parse_device
from trt_engine.errors import SetupError, UsageError
from trt_engine.figures import figure, scaled

if TYPE_CHECKING:
    from trt_engine.records import BackendState, Ceilings, DoctorReport

__all__ = ["command"]

_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}


@click.command(short_help="What is installed, what works together, what to do.")
@click.option("--ceilings", is_flag=True, help="Also what a device can do at most; measured once, and kept.")
@click.option("--device", metavar="TEXT", help="With --ceilings: of this device, cpu or cuda:0 [every one here].")
@click.option("--again", is_flag=True, help="With --ceilings: measure, whatever is kept.")
@options.common
def command(talk: Talk, ceilings: bool, device: str | None, again: bool) -> int:
    """What is installed here, what works together, which backends can run, and what to type for the rest.

    Changes nothing; --ceilings keeps what it measures beside the store. Ends with exit code 3 when there is a problem, 0
    otherwise.
    """
    if not ceilings and (device is not None or again):
        flag = "--again" if device is None else "--device"
        raise UsageError(f"`{flag}` belongs to `--ceilings`", hint="`trt-engine doctor --ceilings`")

    from trt_engine.diagnosis.checks import doctor

    report = doctor(ceilings=_devices(device), again=again) if ceilings else doctor()
    doc = document("doctor", report, command=options.spelled_command(), warnings=_warnings(report))
    emit(talk, doc, text(report))
    return SetupError.exit_code if report.problems else 0


def _devices(asked: str | None) -> list[str]:
    """The device asked for; else the processor and every GPU."""
    if asked is not None:
        kind, number = parse_device(asked)
        return [kind if kind == "cpu" else f"{kind}:{number}"]
    from trt_engine.device import info

    return ["cpu", *(f"cuda:{board.index}" for board in info.gpus())]


def _warnings(report: DoctorReport) -> list[str]:
    found = [f"{item.name}: {item.found}" for item in report.diagnoses if item.status in ("warning", "problem")]
    return [*found, *(f"ceilings of {one.device}: {note}" for one in report.ceilings for note in one.notes)]


def text(report: DoctorReport) -> str:
    """The report for a person: one line a check, fixes under what they fix, readable without colour."""
    names = max(len(item.name) for item in report.diagnoses)
    lines = []
    for item in report.diagnoses:
        lines.append(f"{_MARKS[item.status]:<8} {item.name:<{names}}  {item.found}")
        if item.fix:
            lines.append(f"{'':<8} {'':<{names}}  fix: {item.fix}")
    lines += ["", "backends here:"]
    widest = max((len(state.name) for state in report.backends), default=0)
    for state in report.backends:
        lines += _backend(state, widest)
    for one in report.ceilings:
        lines += ["", *_limits(one)]
    lines += ["", _verdict(report)]
    return installable("\n".join(lines))


def _limits(found: Ceilings) -> list[str]:
    """A device's ceilings, one a line, and what is missing or doubtful."""
    names = max((len(item.name) for item in found.items), default=0)
    lines = [f"{found.device} can do at most" + (f" (measured {found.measured}):" if found.measured else ":")]
    for item in found.items:
        source = "" if item.source == "measured" else "not measured: "
        value, unit = scaled(item.value, item.unit)
        lines.append(f"  {item.name:<{names}}  {figure(value):>6} {unit:<7}  {source}{item.how}")
    lines += [f"  skipped: {text}" for text in found.skipped]
    return lines + [f"  note: {text}" for text in found.notes]


def _backend(state: BackendState, widest: int) -> list[str]:
    told = f"runs on {', '.join(state.devices)}" if state.runs else f"cannot run: {state.reason}"
    lines = [f"  {state.name:<{widest}}  {told}"]
    return [*lines, f"  {'':<{widest}}  fix: {state.fix}"] if state.fix else lines


def _verdict(report: DoctorReport) -> str:
    if not report.problems and not report.warnings_found:
        return "no problems found"
    counts = [(report.problems, "problem"), (report.warnings_found, "warning")]
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count)
