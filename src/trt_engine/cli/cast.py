"""`trt-engine cast`: a model in FP16 or BF16, what must not be cast left in FP32."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options, output
from trt_engine.config import parse_shapes
from trt_engine.errors import UsageError
from trt_engine.figures import percent, size, with_module

if TYPE_CHECKING:
    from trt_engine.records import CastReport

__all__ = ["command"]

_SHOWN = 12


@click.command()
@click.argument("model", metavar="MODEL", type=options.FILE)
@click.option("--to", type=click.Choice(("fp16", "bf16")), required=True, help="The type to cast to.")
@options.out_option("The .onnx file to write.")
@click.option("--keep-io/--no-keep-io", default=True, help="Inputs and outputs stay FP32 [keep].")
@click.option(
    "--exclude-node",
    metavar="NAME",
    multiple=True,
    help="Leave this node, or PyTorch module (layer4.1), in FP32 (repeatable).",
)
@click.option("--exclude-type", metavar="OP", multiple=True, help="Leave this operator in FP32 (repeatable).")
@click.option("--exclude-pattern", metavar="GLOB", multiple=True, help="Leave these nodes in FP32, as '/head/*'.")
@click.option("--auto", is_flag=True, help="Leave in FP32 what leaves the type's range on --data.")
@click.option(
    "--data", type=options.FILE, metavar="PATH",
    help="Images, a labelled dataset, .npy, .npz, .bin, .raw for --auto, --careful and parity [random].",
)  # fmt: skip
@options.preprocess_option()
@click.option("--shapes", metavar="SPEC", help="Shapes of random inputs, as images:1x3x640x640.")
@click.option("--init-max", type=float, metavar="X", help="Constants beyond this stay in FP32 [the type's largest].")
@click.option("--clamp-masks", is_flag=True, help="Move masks such as -1e9 to the type's largest number.")
@click.option("--careful", is_flag=True, help="Let NVIDIA ModelOpt's AutoCast decide (extra `quant`).")
@click.option("--parity/--no-parity", default=True, help="Compare with the FP32 model in ONNX Runtime [yes].")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of random inputs [0].")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    model: Path,
    to: str,
    out: Path | None,
    keep_io: bool,
    exclude_node: tuple[str, ...],
    exclude_type: tuple[str, ...],
    exclude_pattern: tuple[str, ...],
    auto: bool,
    data: Path | None,
    preprocess: str | None,
    shapes: str | None,
    init_max: float | None,
    clamp_masks: bool,
    careful: bool,
    parity: bool,
    seed: int,
    yes: bool,
    dry_run: bool,
) -> None:
    """Cast MODEL to FP16 or BF16, its types consistent everywhere, and say what stayed in FP32 and why.

    \b
      trt-engine cast model.onnx --to fp16 -o model.fp16.onnx
      trt-engine cast model.onnx --to fp16 --auto --data images/ --exclude-type Softmax -o model.fp16.onnx
    """
    if out is None and not dry_run:
        raise UsageError("no place for the result is given", hint=f"`-o {model.with_suffix(f'.{to}.onnx').name}`")
    if careful and dry_run:
        raise UsageError("`--careful` cannot say what it would do without doing it", hint="leave `--dry-run` out")
    if careful and (auto or clamp_masks):
        flag = "--auto" if auto else "--clamp-masks"
        raise UsageError(f"`{flag}` is of our own cast, not of `--careful`", hint="leave one of them out")
    if preprocess is not None and data is None:
        raise UsageError("`--preprocess` makes inputs of pictures, and there are none", hint="`--data PICTURES`")
    if init_max is not None and not init_max > 0:
        raise UsageError(f"`--init-max` is {init_max:g}, expected a number above 0", hint="`--init-max 65504`")

    from trt_engine.api.casting import cast

    report = cast(
        model,
        to,
        out=out,
        keep_io=keep_io,
        exclude_nodes=exclude_node,
        exclude_types=exclude_type,
        exclude_patterns=exclude_pattern,
        auto=auto,
        data=data,
        preprocess=preprocess,
        shapes=parse_shapes(shapes) or None,
        init_max=init_max,
        clamp_masks=clamp_masks,
        careful=careful,
        parity=parity,
        seed=seed,
        yes=yes,
        dry_run=dry_run,
    )
    output.emit(talk, output.document("cast", report, command=options.spelled_command()), _text(report))


def _text(report: CastReport) -> str:
    """The report for a person."""
    lines = [("model" if report.out is None else "written", report.out or report.model)]
    large = size(report.nbytes_before)
    if report.nbytes_after is not None:
        large += f" before, {size(report.nbytes_after)} after"
    lines.append(("size", large))
    lines.append(
        ("cast", f"{report.nodes_cast} of {report.nodes} nodes to {report.to}, {report.casts_added} Casts added")
    )
    if report.precision is not None:
        shares = ", ".join(
            f"{name} {percent(share.layers if share.macs is None else share.macs)}"
            for name, share in report.precision.running.items()
        )
        lines.append(("precision", shares))
    for index, item in enumerate(report.kept[:_SHOWN]):
        lines.append(("kept" if not index else "", f"{with_module(item.node, item.module)} ({item.op}): {item.reason}"))
    if len(report.kept) > _SHOWN:
        lines.append(("", f"and {len(report.kept) - _SHOWN} more (`--json` lists them)"))
    if report.constants_clamped:
        lines.append(("clamped", ", ".join(report.constants_clamped)))
    lines += [("note" if not index else "", text) for index, text in enumerate(report.notes)]
    for index, finding in enumerate(report.findings):
        lines.append(("rules" if not index else "", finding.text))
    if not report.findings:
        lines.append(("rules", "nothing a strongly typed TensorRT build would refuse"))
    lines += _parity_lines(report)
    if report.dry_run:
        lines.append(("would", "write the model; nothing was written"))
    elif report.out is not None:
        lines.append(("next", f"trt-engine build {shlex.quote(report.out)}"))
    return "\n".join(f"{f'{name}:' if name else '':<11}{value}" for name, value in lines)


def _parity_lines(report: CastReport) -> list[tuple[str, str]]:
    found = report.parity
    if found is None:
        return []
    lines = [
        ("parity" if not index else "", f"{name}: {error.summary}, cosine {error.cosine:.6f}")
        for index, (name, error) in enumerate(found.outputs.items())
    ]  # fmt: skip
    ran = ", ".join(f"{name} {count}" for name, count in found.kernels.items())
    if ran:
        lines.append(("kernels", f"{ran} layers{' (emulated)' if found.emulated else ''}"))
    if found.note:
        lines.append(("parity" if not lines else "", found.note))
    return lines
