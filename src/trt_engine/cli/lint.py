"""`trt-engine lint MODEL.onnx`: what is worth changing in a model before anyone builds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit, spelled_out
from trt_engine.config import QUANT_TARGETS
from trt_engine.errors import ModelError

if TYPE_CHECKING:
    from trt_engine.records import LintReport, OperatorSupport

__all__ = ["command"]

_RANK = {"info": 0, "warning": 1, "error": 2}


@click.command("lint", short_help="What is worth changing in a model before anyone builds it.")
@click.argument("model", metavar="MODEL", type=options.FILE)
@click.option(
    "--target",
    type=click.Choice(("all", "tensorrt", "onnxruntime", *(name for name in QUANT_TARGETS if name != "tensorrt"))),
    default="all",
    help="Leave out what concerns other runtimes alone [all].",
)
@click.option(
    "--tensorrt", metavar="VERSION", help="The TensorRT release to judge for, as 10.16 [installed, else newest]."
)
@click.option(
    "--shapes", metavar="SPEC", help="Input shapes to look at, as images:1x3x640x640 [stated, open ones tried]."
)
@click.option(
    "--fail-on",
    type=click.Choice(("error", "warning")),
    help="End with 4 when there is such a finding, or a worse one [findings never fail].",
)
@options.common
def command(talk: Talk, model: Path, target: str, tensorrt: str | None, shapes: str | None, fail_on: str | None) -> int:
    """What is worth changing in MODEL before anyone builds it: each finding with the reason and what to type.

    Frozen batches and sizes, shapes that depend on data, arithmetic that overflows, random and training operators, wrong
    types, layouts that move data, names that clash, what nobody reads, and who cannot run which operator. Findings do not
    fail; --fail-on says which do. Ends with 4 for a file that is no whole model.

    \b
      trt-engine lint model.onnx
      trt-engine lint model.onnx --target tensorrt --tensorrt 10.16 --fail-on error
    """
    from trt_engine.api.linting import lint

    report = lint(model, shapes=shapes, target=target, tensorrt=tensorrt)  # type: ignore[arg-type]
    told = [f"{item.code}: {item.message}" for item in report.findings if item.severity != "info"]
    emit(talk, document("lint", report, command=options.spelled_command(), warnings=told), _text(report))
    _gate(report, fail_on)
    return 0


def _gate(report: LintReport, fail_on: str | None) -> None:
    if fail_on is None:
        return
    bad = [item for item in report.findings if _RANK[item.severity] >= _RANK[fail_on]]
    if bad:
        codes = ", ".join(dict.fromkeys(f"`{item.code}`" for item in bad))
        raise ModelError(
            f"`{report.path}` has {len(bad)} {'finding' if len(bad) == 1 else 'findings'} of `--fail-on {fail_on}`: {codes}",
            hint=bad[0].hint or "see the findings above",
        )


# ------------------------------------------------------------------------------------------------ words


def _text(report: LintReport) -> str:
    opset = f"opset {report.opset}" if report.opset is not None else "no standard opset"
    lines = [f"model: {report.path} ({report.nodes} nodes, {opset}, IR {report.ir_version})"]
    if report.shapes:
        from trt_engine.tensors import format_shape

        shapes = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in report.shapes.items())
        lines.append(
            f"looked at: {shapes}" + (" (open sizes are ours; `--shapes` gives yours)" if report.assumed else "")
        )
    lines += _runners(report)
    counts = ", ".join(f"{count} {_plural(severity, count)}" for severity, count in report.counts.items() if count)
    lines.append(f"findings: {counts or 'none'}")
    for item in report.findings:
        lines.append(f"  {item.severity}: {item.code}: {item.text}")
        if item.hint:
            lines.append(f"    hint: {item.hint}")
    return "\n".join(map(spelled_out, lines))


def _plural(severity: str, count: int) -> str:
    return severity if count == 1 or severity == "info" else f"{severity}s"


def _runners(report: LintReport) -> list[str]:
    """One line for each that could run the model: whether it runs every operator, else which it does not."""
    runners = []
    if not report.target.startswith("onnxruntime"):
        runners.append((f"TensorRT {report.tensorrt}", [row.tensorrt for row in report.operators]))
    if not report.target.startswith("tensorrt"):
        release = f" {report.onnxruntime}" if report.onnxruntime else ""
        runners.append((f"ONNX Runtime{release} CPU", [row.cpu for row in report.operators]))
        runners.append(("ONNX Runtime CUDA", [row.cuda for row in report.operators]))
    lines = []
    for name, verdicts in runners:
        parts = []
        for verdict, words in (
            ("no", "not"),
            ("limited", "not every node of"),
            ("plugin", "with a plugin library"),
            ("unknown", "not known"),
        ):
            ops = [_counted(row) for row, said in zip(report.operators, verdicts, strict=True) if said == verdict]
            if ops:
                more = f" and {len(ops) - 8} more" if len(ops) > 8 else ""
                parts.append(f"{words}: {', '.join(ops[:8])}{more}")
        kinds = f"{len(report.operators)} {'kind' if len(report.operators) == 1 else 'kinds'}"
        lines.append(f"{name}: " + ("; ".join(parts) if parts else f"every operator ({kinds})"))
    return lines


def _counted(row: OperatorSupport) -> str:
    return f"{row.op} ({row.nodes})"
