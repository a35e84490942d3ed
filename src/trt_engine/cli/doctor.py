"""`trt-engine doctor`: what is installed, what works together, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit

if TYPE_CHECKING:
    from trt_engine.records import BackendState, Diagnosis, DoctorReport

__all__ = ["command"]

_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}


@click.command(short_help="What is installed, what works together, what to do.")
@options.common
def command(talk: Talk) -> int:
    """What is installed here, what works together, which backends can run, and what to type for the rest.

    Changes nothing. Ends with exit code 3 when there is a problem, 0 otherwise.
    """
    from trt_engine.diagnosis.checks import doctor
    from trt_engine.errors import SetupError

    report = doctor()
    doc = document("doctor", report, command=options.spelled_command(), warnings=_warnings(report.diagnoses))
    emit(talk, doc, text(report))
    return SetupError.exit_code if report.problems else 0


def _warnings(diagnoses: tuple[Diagnosis, ...]) -> list[str]:
    return [f"{item.name}: {item.found}" for item in diagnoses if item.status in ("warning", "problem")]


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
    lines += ["", _verdict(report)]
    return "\n".join(lines)


def _backend(state: BackendState, widest: int) -> list[str]:
    told = f"runs on {', '.join(state.devices)}" if state.runs else f"cannot run: {state.reason}"
    lines = [f"  {state.name:<{widest}}  {told}"]
    return [*lines, f"  {'':<{widest}}  fix: {state.fix}"] if state.fix else lines


def _verdict(report: DoctorReport) -> str:
    if not report.problems and not report.warnings_found:
        return "no problems found"
    counts = [(report.problems, "problem"), (report.warnings_found, "warning")]
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count)
