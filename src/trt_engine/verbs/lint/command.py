"""`trt-engine lint MODEL.onnx`: problems of a model, found before building it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.config.precision import QUANT_TARGETS
from trt_engine.errors import ModelError

if TYPE_CHECKING:
    from trt_engine.records.lint import LintReport

_RANK = {"info": 0, "warning": 1, "error": 2}


@options.verb()
@click.argument("model", metavar="MODEL", type=options.FILE)
@click.option(
    "--target",
    type=click.Choice(("all", "tensorrt", "onnxruntime", *(name for name in QUANT_TARGETS if name != "tensorrt"))),
    default="all",
    help="Skip findings for other runtimes [default: all].",
)
@click.option(
    "--tensorrt",
    metavar="VERSION",
    help="The TensorRT release to check for, e.g. 10.16 [default: installed, else newest].",
)
@click.option(
    "--shapes",
    metavar="SPEC",
    help="Input shapes, e.g. images:1x3x640x640 [default: static ones; dynamic ones are tried].",
)
@click.option(
    "--fail-on",
    type=click.Choice(("error", "warning")),
    help="Exit with 4 for findings of this severity or worse [default: never].",
)
@click.option(
    "--support-from",
    type=click.Choice(("auto", "parser", "static")),
    default="auto",
    help="Source of TensorRT support: its installed ONNX parser, or static rules [default: parser if installed].",
)
@click.option(
    "--reduce",
    metavar="OUT.onnx",
    type=options.FILE,
    help="Write the smallest subgraph that TensorRT's parser, or else its builder, rejects.",
)
@click.option(
    "--gpus",
    metavar="GPU[,GPU...]",
    default="",
    help="With --reduce: GPUs TensorRT-RTX builds for, e.g. sm89,sm120 [default: all].",
)
@options.overwrite_option
def command(model: Path, fail_on: str | None, **values: Any) -> None:
    """Find problems of MODEL before building it, each with its reason and fix.

    Frozen batches and sizes, data-dependent shapes, overflows, random and training operators, wrong types, layouts that
    move data, name clashes, unused values, and unsupported operators. Findings fail only with --fail-on. The exit code is 4
    for a damaged model.

    \b
      trt-engine lint model.onnx
      trt-engine lint model.onnx --target tensorrt --tensorrt 10.16 --fail-on error
      trt-engine lint model.onnx --target tensorrt-rtx --reduce small.onnx
    """
    from trt_engine.verbs.lint.run import lint

    report = lint(model, **values)
    warnings = [f"{item.code}: {item.message}" for item in report.findings if item.severity != "info"]
    print_result(report, warnings=warnings)
    _gate(report, fail_on)


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
