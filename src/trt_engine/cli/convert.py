"""`trt-engine convert`: any source to ONNX, compared with it, simplified and looked through."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options, output
from trt_engine.config import parse_options
from trt_engine.errors import Interrupted, UsageError
from trt_engine.figures import size

if TYPE_CHECKING:
    from trt_engine.records import ConvertReport, DynamicAxis
    from trt_engine.tensors import TensorSpec

__all__ = ["command"]

_SHOWN = 10


@click.command()
@click.argument("source", metavar="SRC")
@options.out_option("The .onnx file to write.")
@click.option("--input", "inputs", metavar="SPEC|FILE", multiple=True,
              help="An example input: images:2x3x640x640, ids:2x128:int64@0..30521, .npy, .npz (repeatable).")  # fmt: skip
@click.option("--dynamic", metavar="SPEC", multiple=True,
              help="Axes that stay open: images:0=batch@1..64,2=height@64..640/32 (repeatable) [0=batch].")  # fmt: skip
@click.option("--fixed", is_flag=True, help="No axis stays open.")
@click.option("--opset", type=click.INT, metavar="N", help="ONNX opset [20, or the highest that --target takes].")
@click.option(
    "--target", type=click.Choice(("all", "tensorrt", "onnxruntime")), default="all", help="Who runs it [all]."
)
@click.option("--exporter", type=click.Choice(("auto", "dynamo", "torchscript")), default="auto",
              help="PyTorch's exporter [dynamo, then torchscript].")  # fmt: skip
@click.option(
    "-O", "given", metavar="NAME=VALUE", multiple=True, help="An argument of the factory or of what loads the name."
)
@click.option("--allow-frozen-branches", is_flag=True,
              help="A Python `if` on values keeps the branch of the example, with a warning.")  # fmt: skip
@click.option("--all-outputs", is_flag=True, help="Keep the outputs of detectors that only training needs.")
@click.option("--factory", metavar="REF", help="What makes the module of a state dict: file.py:factory.")
@click.option("--simplify/--no-simplify", default=True, help="Fold and deduplicate, checked [yes].")
@click.option("--tolerance", type=click.FLOAT, metavar="X", help="Largest difference over the largest value [1e-4].")
@click.option("--offline", is_flag=True, help="Names on a hub from the cache alone.")
@click.option("--cache", type=options.FILE, metavar="DIR", help="Where names on a hub are kept.")
@click.option("--external-data", is_flag=True, help="Weights in a file beside the model.")
@click.option("--python", metavar="PATH", help="The interpreter that has TensorFlow.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    source: str,
    out: Path | None,
    inputs: tuple[str, ...],
    dynamic: tuple[str, ...],
    fixed: bool,
    opset: int | None,
    target: str,
    exporter: str,
    given: tuple[str, ...],
    allow_frozen_branches: bool,
    all_outputs: bool,
    factory: str | None,
    simplify: bool,
    tolerance: float | None,
    offline: bool,
    cache: Path | None,
    external_data: bool,
    python: str | None,
    yes: bool,
    dry_run: bool,
) -> None:
    """Convert SRC to ONNX, and refuse what is not equal to it: a frozen batch, a baked size, wrong numbers.

    SRC is a file or folder (ONNX, TorchScript, torch.export, state dict, SavedModel, frozen graph, Keras, TFLite, Hugging
    Face), a Python factory, or a name on a hub. A factory is your own Python, and runs.

    \b
      trt-engine convert net.py:build --input images:2x3x640x640 -o net.onnx
      trt-engine convert net.py:build --input images:2x3x640x640 --dynamic images:0=batch@1..64 -O depth=50 -o net.onnx
      trt-engine convert weights.pt --factory net.py:build --input images:2x3x224x224 -o net.onnx
      trt-engine convert org/name --offline -o net.onnx
    """
    if out is None and not dry_run:
        raise UsageError("no place for the result is given", hint="`-o model.onnx`")
    if fixed and dynamic:
        raise UsageError("`--fixed` and `--dynamic` contradict each other", hint="leave one of them out")

    from trt_engine.conversion.convert import EXPORTERS, convert

    try:
        report = convert(
            source,
            out=out,
            inputs=inputs or None,
            dynamic={} if fixed else dynamic or None,
            opset=opset,
            target=target,  # type: ignore[arg-type]
            simplify=simplify,
            exporter=EXPORTERS if exporter == "auto" else exporter,
            options=parse_options(given),
            factory=factory,
            tolerance=tolerance,
            offline=offline,
            cache=cache,
            external_data=external_data,
            python=python,
            allow_frozen_branches=allow_frozen_branches,
            all_outputs=all_outputs,
            yes=yes,
            dry_run=dry_run,
        )
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: the file was written whole, or not at all", hint="the same command converts from the start"
        ) from None
    output.emit(talk, output.document("convert", report, command=options.spelled_command()), _text(report))


def _text(report: ConvertReport) -> str:
    """The report for a person."""
    lines = [("source", f"{report.source}, {report.kind}: {report.seen}")]
    if report.out is None:  # a dry run
        lines += [("would" if not index else "", note) for index, note in enumerate(report.notes)]
        lines.append(("opset", str(report.opset)))
        return _laid_out(lines)
    lines.append(("written", report.out))
    lines.append(("exporter", f"{report.exporter}, {report.export_s or 0.0:.1f} s"))
    lines.append(("opset", f"{report.opset}, IR {report.ir_version}"))
    if report.signature is not None:
        lines += [("inputs" if not index else "", str(spec)) for index, spec in enumerate(report.signature.inputs)]
        lines += [("outputs" if not index else "", str(spec)) for index, spec in enumerate(report.signature.outputs)]
    for index, axis in enumerate(report.dynamic):
        lines.append(("dynamic" if not index else "", f"{axis.symbol}: {_span(axis)}"))
    nodes = f"{report.nodes_before} as exported, {report.nodes} written"
    if report.operators_gone:
        nodes += f" ({', '.join(f'{count} {name}' for name, count in list(report.operators_gone.items())[:4])} gone)"
    lines.append(("nodes", nodes))
    lines.append(("size", size(report.nbytes or 0)))
    if report.worst is not None:
        lines.append(
            (
                "agrees",
                f"within {report.worst:.2g} of a channel's largest value at {len(report.agreement)} sets of shapes",
            )
        )
        for item in report.agreement:
            sizes = ", ".join(f"{name} {steps}" for name, steps in item.sizes.items()) or "as given"
            worst = max((error.max_rel for error in item.outputs.values()), default=0.0)
            lines.append(("", f"{sizes}: {worst:.2g}"))
    lines += [("note" if not index else "", note) for index, note in enumerate(report.notes)]
    lines += [("warning" if not index else "", text) for index, text in enumerate(report.warnings)]
    told = [item for item in report.findings if item.severity != "info"]
    for index, finding in enumerate(told[:_SHOWN]):
        lines.append(("lint" if not index else "", f"{finding.code}: {finding.message}"))
    if len(told) > _SHOWN:
        lines.append(("", f"and {len(told) - _SHOWN} more (`trt-engine lint {shlex.quote(report.out)}`)"))
    lines.append(("next", f"trt-engine build {shlex.quote(report.out)}{_profile(report)}"))
    return _laid_out(lines)


def _profile(report: ConvertReport) -> str:
    """The sizes an engine is built for: without them, batch 1 alone."""
    axes = {axis.symbol: axis for axis in report.dynamic}
    batch = next(
        (axis for axis in report.dynamic if all(positions == (0,) for positions in axis.inputs.values())), None
    )
    if not axes or report.signature is None or not all(axis.tried for axis in report.dynamic):
        return ""
    ends = {
        symbol: (axis.low, _USUAL_BATCH, axis.high or _LARGEST_BATCH)
        if axis is batch
        else (min(axis.tried), max(axis.tried), axis.high or max(axis.tried))
        for symbol, axis in axes.items()
    }
    ends = {symbol: (low, min(max(low, most), high), high) for symbol, (low, most, high) in ends.items()}
    if batch is not None and len(axes) == 1:
        return f" --batch {':'.join(map(str, ends[batch.symbol]))}"

    def shape(spec: TensorSpec, at: int) -> str:
        named = zip(spec.shape, spec.symbols, strict=True)
        return "x".join(str(ends[name][at] if name in ends else size) for size, name in named)

    inputs = [
        f"{spec.name}:{','.join(shape(spec, at) for at in range(3))}"
        for spec in report.signature.inputs
        if spec.dynamic
    ]
    return f" --profile {shlex.quote(' '.join(inputs))}"


_USUAL_BATCH, _LARGEST_BATCH = 8, 64


def _span(axis: DynamicAxis) -> str:
    """`tried 1, 2, 4; dynamic`, or with its range: `1 to 64; tried 1, 2, 4`."""
    tried = f"tried {', '.join(map(str, axis.tried))}" if axis.tried else ""
    step = f", step {axis.step}" if axis.step > 1 else ""
    if axis.high is not None:
        return "; ".join(filter(None, (f"{axis.low} to {axis.high}{step}", tried)))
    least = f" from {axis.low}" if axis.low > 1 else ""
    return "; ".join(filter(None, (tried, f"dynamic{least}{step}")))


def _laid_out(lines: list[tuple[str, str]]) -> str:
    return "\n".join(output.spelled_out(f"{f'{name}:' if name else '':<10}{value}") for name, value in lines)
