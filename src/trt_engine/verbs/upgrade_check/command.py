"""`trt-engine upgrade-check OLD NEW`: engines of two library versions, one page, one verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.verbs.upgrade_check.config import UpgradeConfig


@options.verb(dry_run=True)
@click.argument("old", metavar="OLD", type=options.FILE)
@click.argument("new", metavar="NEW", type=options.FILE)
@options.config_options(UpgradeConfig)
def command(old: Path, new: Path, dry_run: bool, **values: Any) -> None:
    """Compare what two versions of TensorRT or ONNX Runtime made of the same models.

    OLD and NEW are run folders or archives of `run` (also with --container), folders of `bench -o`, or engines, each made
    with its version. Speed, accuracy, precision, layers and plan compatibility; nothing is measured. The exit code is that
    of the worst gate: 10 plan, 7 accuracy, 6 precision, 8 speed.

    \b
      trt-engine run plan.yaml -o old                  # with the old version
      trt-engine run plan.yaml -o new                  # with the new version
      trt-engine upgrade-check old new -o upgrade --fail-if slower:5%
    """
    config: UpgradeConfig = options.config_from(UpgradeConfig, values)

    from trt_engine.verbs.upgrade_check import run as upgrade_check

    report = upgrade_check.run(old, new, config, dry_run=dry_run, command=options.command_line())
    print_result(report)
    upgrade_check.gate(report, strict=config.strict)
