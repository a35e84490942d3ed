"""`trt-engine quantize`: a model in INT8, FP8, INT4, NVFP4 or MXFP8, as a graph that says so itself."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output
from trt_engine.config import QuantizeConfig
from trt_engine.figures import percent, size, with_module

if TYPE_CHECKING:
    from trt_engine.records import IntegerKernels, QuantizeReport

__all__ = ["command"]

_FORMATS = ("int8", "fp8", "int4", "nvfp4", "mxfp8")
_SHOWN = 8
_TENSORRT_ONLY = ("nvfp4", "mxfp8")
"""Of these ONNX Runtime has no kernels, only their emulation runs."""


@click.command()
@click.argument("model", type=options.FILE, metavar="MODEL")
@click.option("--to", type=click.Choice(_FORMATS), required=True, help="The format.")
@click.option(
    "--calibrate", "--data", "data", metavar="DATA",
    help="What calibration sees: images, a labelled dataset, .npy, .npz, .bin, .raw; `random` for a mere trial.",
)  # fmt: skip
@options.preprocess_option()
@click.option("--cache", type=options.FILE, metavar="FILE", help="Keep the ranges here; a hit needs no data.")
@click.option(
    "--emulate", type=options.FILE, metavar="FILE",
    help="Write an FP32 graph too that computes the same numbers on any CPU.",
)  # fmt: skip
@options.of(QuantizeConfig)
@options.out_option("Where the quantised model goes.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    model: Path,
    to: str,
    data: str | None,
    preprocess: str | None,
    cache: Path | None,
    emulate: Path | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """Quantise MODEL for the library that will run it: TensorRT 10 (strongly typed) and 11, or ONNX Runtime.

    \b
      trt-engine quantize model.onnx --to int8 --calibrate images/ -o model.int8.onnx
      trt-engine quantize model.onnx --to int8 --target onnxruntime-cpu --calibrate images/ -o model.cpu.onnx
      trt-engine quantize bert.onnx --to int8 --target onnxruntime-cpu --dynamic -o bert.cpu.onnx
      trt-engine quantize vit.onnx --to int4 --method awq --calibrate data.npz -o vit.int4.onnx
      trt-engine quantize vit.onnx --to nvfp4 --calibrate data.npz --emulate vit.emulated.onnx -o vit.nvfp4.onnx
    """
    config = options.config_from(QuantizeConfig, values)

    from trt_engine.api.calibrating import quantize

    report = quantize(
        model,
        to,
        out=out,
        data=data,
        cache=cache,
        preprocess=preprocess,
        emulate=emulate,
        config=config,
        yes=yes,
        dry_run=dry_run,
    )
    output.emit(talk, output.document("quantize", report, command=options.spelled_command()), _text(report))


def _text(report: QuantizeReport) -> str:
    """The report for a person, with what to type next."""
    lines = [("model", report.out or ("(nothing is written)" if report.dry_run else "(the emulation alone)"))]
    if "emulation" in report.artifacts:
        lines.append(("emulation", report.artifacts["emulation"]))
    lines.append(("target", _target(report)))
    lines.append(("format", _format(report)))
    lines.append(("quantised", f"{len(report.quantized)} layers"))
    reasons: dict[str, list[str]] = {}
    for item in report.left if report.integer_kernels is None else ():  # else said with the kernels
        reasons.setdefault(item.reason, []).append(with_module(item.node, item.module))
    for index, (reason, nodes) in enumerate(reasons.items()):
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        lines.append(("left" if not index else "", f"{len(nodes)}: {reason} ({', '.join(nodes[:3])}{more})"))
    if report.nbytes is not None:
        before, now = report.nbytes_before, report.nbytes
        lines.append(("size", f"{size(before)} before, {size(now)} now ({percent(now / before)})"))
    if report.precision.found:
        shares = [
            f"{name} {percent(share.layers if share.macs is None else share.macs)}"
            for name, share in report.precision.running.items()
        ]
        lines.append(("written in", ", ".join(shares)))
    if report.calibration:
        lines.append(("calibrated", _calibrated(report.calibration)))
    for index, (name, error) in enumerate(list((report.parity or {}).items())[:_SHOWN]):
        lines.append(
            (
                "compared" if not index else "",
                f"{name}: {error.summary}, {error.spread}, cosine {error.cosine:.6f}",
            )
        )
    if report.parity:
        lines.append(("", f"on {report.parity_inputs}, by {_measured(report)}"))
    if report.integer_kernels is not None:
        lines += _kernels(report.integer_kernels)
    lines.append(("took", f"{report.seconds:.1f} s"))
    if report.out:
        lines += _next(report, report.out)
    width = max(12, *(len(name) + 2 for name, _ in lines))
    return "\n".join(f"{f'{name}:' if name else '':<{width}}{value}" for name, value in lines)


def _next(report: QuantizeReport, written: str) -> list[tuple[str, str]]:
    """What runs here: the graph, else its emulation; of a block format without one, what would."""
    emulation = report.artifacts.get("emulation")
    if report.to in _TENSORRT_ONLY and emulation is None:
        return [
            ("next", f"trt-engine build {shlex.quote(written)} --backend tensorrt"),
            ("", f"(only TensorRT runs {report.to}; `--emulate FILE` adds a graph that `evaluate` takes anywhere)"),
        ]
    return [("next", f"trt-engine evaluate {shlex.quote(emulation or written)} --dataset DATASET")]


def _target(report: QuantizeReport) -> str:
    from trt_engine.graph.quant_target import quant_target

    title = quant_target(report.target).title
    if report.to != "int8":
        return f"{report.target} ({title})"
    other = "" if report.target == "onnxruntime-cpu" else "; `--target onnxruntime-cpu` for a CPU"
    return f"{report.target} (Q/DQ placed for {title}{other})"


def _kernels(found: IntegerKernels) -> list[tuple[str, str]]:
    """How many layers run in integer kernels, and why the others do not."""
    counts = ", ".join(f"{done} of {count} {op}" for op, (done, count) in found.layers.items())
    lines = [("integer kernels", counts or "none: there is no layer with weights")]
    reasons: dict[str, list[str]] = {}
    for item in found.not_fused:
        reasons.setdefault(item.reason, []).append(item.node)
    for index, (reason, nodes) in enumerate(reasons.items()):
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        lines.append(("not fused" if not index else "", f"{nodes[0]}{more}: {reason}"))
    return lines


def _format(report: QuantizeReport) -> str:
    parts = [report.to]
    if report.method == "awq":
        parts.append("AWQ")
    if report.method == "dynamic":
        parts.append("activations while running")
    if report.weights_only:
        parts.append("weights alone")
    if report.high_precision != "fp32":
        parts.append(f"the rest in {report.high_precision}")
    raised = f" (was {report.opset_before})" if report.opset != report.opset_before else ""
    return f"{', '.join(parts)}; opset {report.opset}{raised}"


def _calibrated(made: dict[str, Any]) -> str:
    told = [str(made[name]) for name in ("calibrator",) if name in made]
    if made.get("data"):
        told.append(f"{made.get('samples')} samples of {made['data']}")
    if made.get("preprocess"):
        told.append(f"pre-processing {made['preprocess']['source']}")
    if made.get("random"):
        told.append("RANDOM: real values may lie far from these")
    if made.get("cached"):
        told.append("from the cache")
    return ", ".join(told)


def _measured(report: QuantizeReport) -> str:
    return "ONNX Runtime from the file itself" if report.measured_on == "kernels" else "the emulation in FP32"
