"""`trt-engine build`: an engine and its passport from an ONNX model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options, output, verb_command
from trt_engine.config.build import BuildConfig
from trt_engine.errors import UsageError

if TYPE_CHECKING:
    from trt_engine.verbs.build.run import BuildPlan

PLAN_SUFFIXES = (".engine", ".plan", ".trt")


@options.verb(dry_run=True)
@click.argument("model", metavar="MODEL", required=False, type=options.FILE)
@options.config_options(BuildConfig)
@click.option(
    "--each-gpu",
    cls=verb_command.Option,
    group="Build",
    metavar="GPU[,GPU...]",
    help="As --gpus, with one engine per GPU: -o model.engine makes model.sm89.engine.",
)
@options.out_option("The engine file or its folder [default: only the store].")
@click.option("--rebuild", is_flag=True, help="Build even if the store has this engine.")
@options.overwrite_option
def command(
    model: Path | None,
    out: Path | None,
    rebuild: bool,
    each_gpu: str | None,
    overwrite: bool,
    dry_run: bool,
    **values: Any,
) -> Any:
    """Build an engine from an ONNX MODEL, compare it with plain ONNX Runtime, and write its passport.

    \b
      trt-engine build model.onnx --batch 1:8:64 -o model.engine.onnx
      trt-engine build model.onnx --profile images:1x3x640x640,8x3x640x640,64x3x640x640
      trt-engine build model.onnx -O graph_optimization=basic -O intra_op_threads=2
      trt-engine build model.onnx --backend tensorrt-rtx --each-gpu sm89,sm120 -o engines/
    """
    if model is None:
        raise UsageError("no model is given", hint="`trt-engine build MODEL.onnx`")
    config = options.config_from(BuildConfig, values)

    from trt_engine.verbs.build.each import build_report, planned_report
    from trt_engine.verbs.build.run import execute, plan

    target = f"{out}/" if out is not None and options.out_is_folder() else out
    if each_gpu is not None:
        return _build_each(model, each_gpu, config, target, rebuild=rebuild, overwrite=overwrite, dry_run=dry_run)
    planned = plan(model, out=target, config=config, overwrite=overwrite)
    planned = _add_warnings(planned, config)
    if dry_run:
        return planned_report(planned, rebuild=rebuild)
    return build_report(planned, execute(planned, rebuild=rebuild))


def _build_each(
    model: Path,
    gpus: str,
    config: BuildConfig,
    out: Path | str | None,
    *,
    rebuild: bool,
    overwrite: bool,
    dry_run: bool,
) -> int:
    """`--each-gpu`: one engine per GPU, one report."""
    from trt_engine.verbs.build.each import execute_builds, exit_code, plan_builds, planned_builds_report

    names = [name.strip() for name in gpus.split(",") if name.strip()]
    first, *others = plan_builds(model, names, config=config, out=out, overwrite=overwrite)
    if first.plan is not None:  # the others' warnings are the same
        first = replace(first, plan=_add_warnings(first.plan, config))
    targets = [first, *others]
    report = (planned_builds_report if dry_run else execute_builds)(model, targets, rebuild=rebuild)
    output.print_result(report)
    return exit_code(report)


def _add_warnings(planned: BuildPlan, config: BuildConfig) -> BuildPlan:
    return replace(planned, warnings=(*_warnings(planned, config), *planned.warnings))


def _warnings(planned: BuildPlan, config: BuildConfig) -> Iterator[str]:
    """Warn of a dynamic batch built for batch 1, and of a TensorRT file name for another backend."""
    from trt_engine.backend import get_backend
    from trt_engine.verbs.build.request import find_open_batch

    shapes = config.shapes | planned.given.shapes(config)
    if (name := find_open_batch(planned.model.signature, replace(config, shapes=shapes))) is not None:
        yield (
            f"the batch of `{name}` is open and none was given: the engine takes only batch 1; "
            "`--batch 1:8:64` builds it for 1 to 64, tuned for 8"
        )
    backend_spec = get_backend(config.backend)
    if (
        planned.out is not None
        and planned.out.suffix in PLAN_SUFFIXES
        and backend_spec.payload_suffix not in PLAN_SUFFIXES
    ):
        yield (
            f"`{planned.out.name}` will be a file of the backend `{backend_spec.name}` "
            f"({backend_spec.payload_suffix}), not a TensorRT plan as the name suggests; "
            f"`{planned.out.with_suffix(f'.engine{backend_spec.payload_suffix}').name}` is clearer; "
            "`--backend tensorrt` builds one"
        )
