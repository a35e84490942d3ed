"""`trt-engine evaluate ENGINE|MODEL --dataset D`: accuracy of an engine, optionally next to a baseline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.config.evaluate import EvaluateConfig
from trt_engine.errors import UsageError

_FILE = options.FILE


@options.verb(dry_run=True)
@click.argument("path", metavar="ENGINE|MODEL", type=_FILE)
@click.option("--dataset", type=_FILE, required=True, metavar="PATH", help="A folder, an annotations .json or an .npz.")
@options.config_options(EvaluateConfig)
@options.engine_options(leave_out=("batch", "shapes", "profiles", "preprocess"))
def command(path: Path, dataset: Path, dry_run: bool, **values: Any) -> None:
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
    from trt_engine.verbs.evaluate import run as evaluate

    bare = is_onnx_model(path)
    if changed is not None and not bare and not (config.baseline is not None and is_onnx_model(config.baseline)):
        raise UsageError(
            f"`{path}` is already built: `--{changed.replace('_', '-')}` cannot change it",
            hint="pass the model to rebuild",
        )
    if build.calib_data is not None:
        build = dataclasses.replace(build, preprocess=config.preprocess)
    if dry_run:
        print_result(evaluate.plan(path, dataset, config))
        return
    report = evaluate.run(path, dataset, config, runtime, build, command=options.command_line())
    print_result(report)
    evaluate.gate(report)
