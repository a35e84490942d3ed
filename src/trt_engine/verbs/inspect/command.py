"""`trt-engine inspect PATH`: what is in a model, an engine, a TensorRT plan, a bundle folder or a run folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import as_json, describe_error, document, emit, print_result, result_text
from trt_engine.errors import EngineError

if TYPE_CHECKING:
    from trt_engine.records.inspect import EngineReport


@options.verb()
@click.argument("path", type=options.FILE)
@click.option(
    "--shapes",
    metavar="SPEC",
    help="Input shapes for counting and --run, e.g. images:1x3x640x640 [default: batch 1].",
)
@click.option("--run", is_flag=True, help="Load the engine and run it once on seeded inputs.")
@click.option("--device", type=options.DEVICE, help="The device to check and run an engine on [default: its own].")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the inputs of --run [default: 0].")
def command(path: Path, shapes: str | None, run: bool, device: str | None, seed: int) -> None:
    """Describe PATH: an ONNX model, an engine, a bare plan, a bundle, a run folder or an archive of one.

    For a model: inputs, outputs, operators, parameters, MACs, precision, known problems. For an engine or a plan: whether it
    loads here, else the fix. The exit code is 0 for any readable file, 4 for a damaged model, 10 for an .engine that is not
    a plan.
    """
    from trt_engine.records.bundle import BundleState
    from trt_engine.records.inspect import EngineReport, ModelReport
    from trt_engine.verbs.inspect.run import inspect

    typed = options.command_line()
    try:
        report = inspect(path, shapes=shapes, run=run, device=device, seed=seed)
    except EngineError as error:
        if as_json() and not run:  # a file that is not a plan is an error with a verdict
            place = path.with_suffix("") if path.suffix == ".json" else path
            emit(document("error", _error_document(error, place, typed), command=_rebuild_command(place)), "")
        raise
    if isinstance(report, EngineReport):
        emit(_engine_document(report, typed), "" if as_json() else result_text(report))
        return
    if isinstance(report, ModelReport):
        warnings = [f"{item.code}: {item.message}" for item in report.findings if item.severity != "info"]
    elif isinstance(report, BundleState):
        warnings = list(report.problems)
    else:
        warnings = [] if report.complete else ["the run is not complete"]
    print_result(report, warnings=warnings)


def _engine_document(report: EngineReport, typed: str) -> dict[str, Any]:
    """The report with top-level `verdict`, `reason` and `command`. `command` is the next command, where there is
    something; `invocation` is what was typed."""
    import msgspec

    found = report.compatibility
    body = msgspec.to_builtins(report) | {"verdict": found.status, "reason": found.reason, "invocation": typed}
    warnings = [] if found.status == "loads" else [f"{found.status}: {found.reason}"]
    return document("inspect", body, command=found.command or typed, warnings=warnings)


def _rebuild_command(path: Path) -> str:
    """The command that rebuilds the engine at this path."""
    from trt_engine.plan_header import PLAN_BACKENDS, detect_plan

    try:
        product = detect_plan(path)
    except (OSError, EngineError):
        product = None
    backend = "" if path.suffix == ".onnx" else f"--backend {PLAN_BACKENDS[product or 'TensorRT']} "
    return f"trt-engine build MODEL.onnx {backend}-o {shlex.quote(str(path))}"


def _error_document(error: EngineError, path: Path, typed: str) -> dict[str, Any]:
    """The error with a verdict, and the plan version where only the passport is damaged."""
    from trt_engine.plan_header import plan_header

    try:
        header = plan_header(path)
    except OSError:
        header = None
    version = header.version if header is not None and header.product == "TensorRT" else None
    return {
        "error": describe_error(error),
        "verdict": "refuse",
        "reason": error.message,
        "tensorrt_version": version,
        "invocation": typed,
    }
