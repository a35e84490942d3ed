"""`trt-engine inspect PATH`: what is in a model, an engine, a TensorRT plan, a bundle's folder or a run folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit, spelled_out
from trt_engine.figures import figure, in_ms, percent, si, size

if TYPE_CHECKING:
    from trt_engine.errors import EngineError
    from trt_engine.records import EngineReport, Finding, ModelReport, QuantPlacement, RunReport

__all__ = ["command"]

_OPERATORS = 12
_TOP = 20


@click.command("inspect", short_help="What is in a model, an engine, a plan or a run folder.")
@click.argument("path", type=options.FILE)
@click.option(
    "--shapes", metavar="SPEC", help="Input shapes to count (or run) at, as images:1x3x640x640 [batch 1, stated sizes]."
)
@click.option("--run", is_flag=True, help="Load the engine and run it once on seeded inputs.")
@click.option("--device", metavar="DEVICE", help="The device to judge and run an engine for (default: its own).")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the inputs of --run [0].")
@options.common
def command(talk: Talk, path: Path, shapes: str | None, run: bool, device: str | None, seed: int) -> int:
    """What is in PATH: an ONNX model, an engine, a bare TensorRT plan, a bundle, a run folder or an archive of one.

    Of a model: inputs and outputs, operators, parameters, multiply-adds, precision, and what is known to give trouble. Of an
    engine or a plan: whether it loads here, and what to type if not. Ends with 0 whenever there is an answer, whatever it
    is; with 4 for a file that is no whole model, with 10 for an .engine that is no plan.
    """
    from trt_engine.api.inspecting import inspect
    from trt_engine.errors import EngineError
    from trt_engine.records import BundleState, EngineReport, ModelReport

    typed = options.spelled_command()
    try:
        report = inspect(path, shapes=shapes, run=run, device=device, seed=seed)
    except EngineError as error:
        if talk.json and not run:  # a file that is no plan is an error with a verdict
            place = path.with_suffix("") if path.suffix == ".json" else path
            emit(talk, document("error", _refused(error, place, typed), command=_again(place)), "")
        raise
    if isinstance(report, ModelReport):
        text = _model(report)
        warnings = [f"{item.code}: {item.message}" for item in report.findings if item.severity != "info"]
    elif isinstance(report, EngineReport):
        emit(talk, _engine_document(report, typed), _engine(report))
        return 0
    elif isinstance(report, BundleState):
        from trt_engine.cli.bundle import state_text

        text, warnings = state_text(report), list(report.problems)
    else:
        text, warnings = _run(report), [] if report.complete else ["the run is not complete"]
    emit(talk, document("inspect", report, command=typed, warnings=warnings), text)
    return 0


def _engine_document(report: EngineReport, typed: str) -> dict[str, Any]:
    """The report with `verdict`, `reason` and `command` side by side. `command` is what to type next, where there is
    something; `invocation` is what was typed."""
    import msgspec

    told = report.verdict
    body = msgspec.to_builtins(report) | {"verdict": told.verdict, "reason": told.reason, "invocation": typed}
    warnings = [] if told.verdict == "loads" else [f"{told.verdict}: {told.reason}"]
    return document("inspect", body, command=told.command or typed, warnings=warnings)


def _again(path: Path) -> str:
    """The command that puts an engine where one was expected."""
    backend = "" if path.suffix == ".onnx" else "--backend tensorrt "
    return f"trt-engine build MODEL.onnx {backend}-o {shlex.quote(str(path))}"


def _refused(error: EngineError, path: Path, typed: str) -> dict[str, Any]:
    """The error with a verdict, and the version of a plan whose passport is what is damaged."""
    from trt_engine.engine import plan_header

    try:
        header = plan_header(path)
    except OSError:
        header = None
    told = {"type": "EngineError", "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    version = header.version if header is not None else None
    return {
        "error": told,
        "verdict": "refuse",
        "reason": error.message,
        "tensorrt_version": version,
        "invocation": typed,
    }


# ------------------------------------------------------------------------------------------------ models


def _model(report: ModelReport) -> str:
    """The report of a model; the first lines are what scripts read (`input_name:`, `height:`, `width:`)."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in report.opsets.items())
    lines = [f"model: {report.path}", *_image_lines(report)]
    lines += [f"input: {spec}" for spec in report.signature.inputs]
    lines += [f"output: {spec}" for spec in report.signature.outputs]
    lines += [
        f"opset: {opsets}",
        f"ir_version: {report.ir_version}",
        f"producer: {report.producer or 'not stated'}",
        f"size: {size(report.nbytes)}",
        f"digest: {report.digest}",
        f"parameters: {report.parameters:,} ({size(report.parameter_bytes)})",
        *_cost_lines(report),
        f"precision: {report.precision.main or 'no arithmetic'}",
        *_census_lines(report),
        f"quantized: {_quantized(report)}",
        *_placement_lines(report.placement),
        f"external_data: {', '.join(report.external) or 'none'}",
        f"nodes: {report.nodes}",
        *_table((("operator", "nodes"), *list(report.operators.items())[:_OPERATORS])),
    ]
    if len(report.operators) > _OPERATORS:
        lines.append(f"  and {len(report.operators) - _OPERATORS} more (--json has all)")
    if set(report.domains) - {"ai.onnx"}:
        lines.append("domains: " + ", ".join(f"{domain} ({count})" for domain, count in report.domains.items()))
    lines += [f"metadata: {name} = {value[:80]}" for name, value in list(report.metadata.items())[:_TOP]]
    lines += _finding_lines(report.findings)
    return "\n".join(map(spelled_out, lines))


def _image_lines(report: ModelReport) -> list[str]:
    from trt_engine.graph.findings import image_input, image_size

    inputs = report.signature.inputs
    image = image_input(inputs)
    if image is None:
        return [f"input_name: {inputs[0].name}"] if inputs else []
    height, width = image_size(image)
    return [
        f"input_name: {image.name}",
        f"height: {height if height >= 0 else 'dynamic'}",
        f"width: {width if width >= 0 else 'dynamic'}",
    ]


def _cost_lines(report: ModelReport) -> list[str]:
    from trt_engine.tensors import format_shape

    if report.macs is None or report.flops is None:
        names = ", ".join(f"{name}:SHAPE" for name in report.dynamic)
        return [f"macs: not counted, sizes are open (`--shapes {names}` gives them)"]
    shapes = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in report.flops_shapes.items())
    at_least = "" if report.flops_exact else "at least "
    lines = [
        f"macs: {at_least}{si(report.macs)} (at {shapes})",
        f"flops: {at_least}{si(report.flops)} (2 x macs, and what is computed by element)",
    ]
    if report.uncounted:
        names = ", ".join(f"{op} ({count})" for op, count in list(report.uncounted.items())[:_OPERATORS])
        lines.append(f"not_counted: {names}")
    return lines


def _census_lines(report: ModelReport) -> list[str]:
    found = report.precision.found
    if len(found) < 2:
        return []
    rows = [("type", "layers", "parameters", "macs")]
    for name, share in found.items():
        macs = "" if share.macs is None else f"{share.macs:.1%}"
        rows.append((name, f"{share.layers:.1%}", f"{share.parameters:.1%}", macs))
    return _table(rows)


def _quantized(report: ModelReport) -> str:
    if not report.quantized:
        return "no"
    return f"yes ({report.q_nodes} quantize, {report.dq_nodes} dequantize nodes)"


def _placement_lines(placement: QuantPlacement | None) -> list[str]:
    """The targets that take the quantised layers, and what keeps the other two usual ones from it."""
    if placement is None:
        return []
    names = ", ".join(placement.targets) or "no target as a whole"
    stated = f"; the file states {placement.stated}" if placement.stated is not None else ""
    lines = [f"Q/DQ placed for: {names} ({placement.style}{stated})"]
    for fit in placement.fits:
        if fit.target in ("tensorrt", "onnxruntime-cpu") and fit.target not in placement.targets:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in fit.reasons.items())
            lines.append(f"  {fit.target} takes {fit.taken} of {fit.layers} {fit.what}: {reasons}")
    return lines


def _finding_lines(findings: Iterable[Finding]) -> list[str]:
    lines = []
    for item in findings:
        lines.append(f"{item.severity}: {item.code}: {item.text}")
        if item.hint:
            lines.append(f"  hint: {item.hint}")
    return ["findings:", *(f"  {line}" for line in lines)] if lines else ["findings: none"]


# ------------------------------------------------------------------------------------------------ engines


def _engine(report: EngineReport) -> str:
    lines = [
        f"engine: {report.path}",
        f"kind: {'TensorRT plan without a passport' if report.kind == 'plan' else 'engine with a passport'}",
        f"verdict: {report.verdict.verdict}",
        f"reason: {report.verdict.reason}",
    ]
    if report.verdict.command:
        lines.append(f"command: {report.verdict.command}")
    if report.tensorrt_version:
        lines.append(f"tensorrt: {report.tensorrt_version}")
    lines.append(f"size: {size(report.nbytes)}")
    if report.passport is not None:
        lines += _passport_lines(report.passport)
    if report.smoke is not None:
        lines += _smoke_lines(report.smoke)
    return "\n".join(map(spelled_out, lines))


def _passport_lines(passport: Any) -> list[str]:
    from trt_engine.api.speed_check import speed_text

    found = ", ".join(f"{name} {percent(share.layers)} of layers" for name, share in passport.precision.running.items())
    asked = f" (asked: {passport.precision.asked})" if passport.precision.asked else ""
    asked += f" (the graph is {passport.build.written})" if passport.build.written else ""
    lines = [
        f"backend: {passport.backend}",
        f"device: {passport.device}",
        *(f"input: {spec}" for spec in passport.signature.inputs),
        *(f"output: {spec}" for spec in passport.signature.outputs),
        *(f"profile {index}: {profile}" for index, profile in enumerate(passport.profiles)),
        f"precision: {found or 'not known'}{asked}",
        *([f"quantised_for: {passport.build.quant_target}"] if passport.build.quant_target else []),
        *([f"not_fused: {passport.build.not_fused}"] if passport.build.not_fused else []),
        *([f"speed: {speed_text(passport.speed)}"] if passport.speed is not None else []),
        f"model: {passport.model.name} ({passport.model.digest})",
        f"built_by: {passport.build.identity} in {passport.build.seconds:.1f} s",
        f"build_command: {passport.build.command}",
        f"needs: {passport.needs.library} {passport.needs.version}"
        + (f", providers {', '.join(passport.needs.providers)}" if passport.needs.providers else "")
        + (f", CPU features {' '.join(passport.needs.cpu_features)}" if passport.needs.cpu_features else "")
        + (f", compute capability {passport.needs.compute_capability}" if passport.needs.compute_capability else "")
        + (f", plugins {', '.join(passport.needs.plugins)}" if passport.needs.plugins else ""),
    ]
    if passport.parity is not None:
        worst = max((error.max_rel for error in passport.parity.outputs.values()), default=0.0)
        state = "passed" if passport.parity.passed else "failed"
        lines.append(
            f"parity: {state} against {passport.parity.reference} (largest difference {worst:.2g} of a channel's scale)"
        )
        if passport.parity.given:
            apart = max(error.max_rel for error in passport.parity.given.values())
            lines.append(f"parity_given: largest difference {apart:.2g} from the model as it was given, not judged")
    lines += [f"warning: {text}" for text in passport.build.warnings]
    return lines


def _smoke_lines(smoke: dict[str, Any]) -> list[str]:
    lines = [
        f"run: loaded in {in_ms(smoke['load_ms'])}, first inference {in_ms(smoke['first_ms'])}, "
        f"second {in_ms(smoke['second_ms'])} (seed {smoke['seed']})"
    ]
    for side in ("inputs", "outputs"):
        for name, told in smoke[side].items():
            shape = "x".join(map(str, told["shape"])) or "scalar"
            text = f"  {side[:-1]} {name}: {told['dtype']} {shape}"
            if "min" in told:
                text += f", {told['min']:.4g} to {told['max']:.4g}, mean {told['mean']:.4g}"
            if told.get("not_finite"):
                text += f", {told['not_finite']} values are not finite"
            lines.append(text)
    lines += [f"  {name}: {value}" for name, value in smoke["facts"].items()]
    return lines


# ------------------------------------------------------------------------------------------------ run folders


def _run(report: RunReport) -> str:
    lines = [
        f"run: {report.path}",
        f"verb: {report.verb or 'not stated'}",
        f"complete: {'yes' if report.complete else 'no'}",
        *(f"{name}: {value}" for name, value in report.summary.items()),
        f"records: {len(report.measurements)}" + (f" and {report.damaged} damaged" if report.damaged else ""),
    ]
    if report.measurements:
        rows: list[Sequence[Any]] = [("batch", "device", "qps", "images/s", "mean ms", "samples", "stable")]
        for item in report.measurements:
            rows.append(
                (
                    item["batch"],
                    item["device"],
                    *("" if item[name] is None else figure(item[name]) for name in ("qps", "images_per_s", "mean_ms")),
                    item["samples"],
                    "yes" if item["stable"] else "no",
                )
            )
        lines += _table(rows)
    shown = sorted(report.files.items(), key=lambda item: -item[1])[:_TOP]
    lines.append(f"files: {len(report.files)} ({size(report.nbytes)})")
    lines += [f"  {name} ({size(nbytes)})" for name, nbytes in shown]
    lines.append(f"hint: `trt-engine report {shlex.quote(report.path)}` writes it out")
    return "\n".join(map(spelled_out, lines))


# ------------------------------------------------------------------------------------------------ words


def _table(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Rows aligned in columns, the first one as heading: text to the left, figures to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    if len(cells) < 2:
        return []
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    return [
        "  "
        + "  ".join(c.ljust(w) if at == 0 else c.rjust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
