"""`trt-engine evaluate ENGINE|MODEL --dataset D`: accuracy of an engine, optionally next to a baseline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, verb_command
from trt_engine.cli.output import OutputOptions, print_result
from trt_engine.config.evaluate import EvaluateConfig
from trt_engine.errors import UsageError

if TYPE_CHECKING:
    from trt_engine.records.evaluate import EvaluatePlan
    from trt_engine.vision.spec import Vision

_FILE = options.FILE


@verb_command.verb("evaluate", short_help="AP or top-1 of an engine on a dataset.")
@click.argument("path", metavar="ENGINE|MODEL", type=_FILE)
@click.option("--dataset", type=_FILE, required=True, metavar="PATH", help="A folder, an annotations .json or an .npz.")
@options.config_options(EvaluateConfig)
@options.engine_options(leave_out=("batch", "shapes", "profiles", "preprocess"))
@options.dry_run_option
@options.common
def command(output_options: OutputOptions, path: Path, dataset: Path, dry_run: bool, **values: Any) -> None:
    """Evaluate ENGINE on a dataset (a MODEL is built into the store first).

    COCO annotations give the twelve COCO metrics; one folder per class, or an .npz of images and labels, gives top-1 and
    top-5; a folder of images with --baseline gives only the output difference.

    \b
      trt-engine evaluate model.engine.onnx --dataset val -o run
      trt-engine evaluate int8.engine.onnx --dataset val --baseline fp32.engine.onnx --max-drop 0.01
    """
    config: EvaluateConfig = options.config_from(EvaluateConfig, values)
    runtime, build, _ = options.engine_configs(values)
    changed = next((name for name, value in values.items() if value not in (None, ())), None)

    from trt_engine.engine import is_onnx_model
    from trt_engine.verbs import evaluate

    bare = is_onnx_model(path)
    if changed is not None and not bare and not (config.baseline is not None and is_onnx_model(config.baseline)):
        raise UsageError(
            f"`{path}` is already built: `--{changed.replace('_', '-')}` cannot change it",
            hint="pass the model to rebuild",
        )
    if build.calib_data is not None:
        build = dataclasses.replace(build, preprocess=config.preprocess)
    typed = options.command_line()
    if dry_run:
        plan = _plan(path, dataset, evaluate.resolve_spec(path, config.preprocess), config)
        print_result(output_options, "evaluate", plan)
        return
    report = evaluate.run(path, dataset, config, runtime, build, command=typed)
    print_result(output_options, "evaluate", report)
    evaluate.gate(report)


def _plan(path: Path, dataset: Path, vision: Vision, config: EvaluateConfig) -> EvaluatePlan:
    """`--dry-run`: what would be built, read and written."""
    from trt_engine.engine import is_onnx_model
    from trt_engine.records.evaluate import EvaluatePlan
    from trt_engine.verbs.evaluate import METRICS
    from trt_engine.vision.datasets import open_dataset

    listed, out = open_dataset(dataset), config.out
    return EvaluatePlan(
        engine=str(path),
        needs_build=is_onnx_model(path),
        dataset=str(listed.path),
        dataset_kind=listed.kind,
        images=len(listed.subset(config.max_samples, config.seed).items),
        vision=vision.as_dict(),
        writes=tuple(str(item) for item in (out / METRICS if out else None, config.save_predictions) if item),
    )
