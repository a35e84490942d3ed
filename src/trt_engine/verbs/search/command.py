"""`trt-engine search MODEL --dataset D --budget 0.01`: layers that can be quantised within an accuracy budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.config.precision import QUANTIZE_DATA, QuantizeConfig, SearchConfig
from trt_engine.config.runtime import RuntimeConfig

if TYPE_CHECKING:
    from trt_engine.records.dry_run import DryRun
    from trt_engine.verbs.search.run import SearchJob

_FILE = options.FILE


@options.verb(dry_run=True)
@click.argument("model", metavar="MODEL", type=_FILE)
@click.option("--dataset", type=_FILE, required=True, metavar="PATH", help="A folder, an annotations .json or an .npz.")
@options.config_options(SearchConfig)
@options.config_options(
    QuantizeConfig,
    leave_out=(
        "shapes", "method", "block_size", "weights_only", "emulate_convs", "high_precision", "parity", "target",
        *QUANTIZE_DATA,
    ),
)  # fmt: skip
@options.config_options(RuntimeConfig, leave_out=("contexts", "streams"))
def command(model: Path, dataset: Path, dry_run: bool, **values: Any) -> Any:
    """Find the largest part of MODEL that can be INT8 or FP8 while AP or top-1 drops by at most the budget.

    Measures each layer alone on a subset, adds layers from the cheapest while the budget holds, and verifies the result on
    the whole dataset. An interrupted search resumes.

    \b
      trt-engine search model.onnx --dataset val --budget 0.01 --calib-data train/ -o found
      trt-engine quantize model.onnx --to int8 --calib-data train/ --quantize-outputs --exclude-node @found/exclude.txt
    """
    configs = [options.config_from(kind, values) for kind in (SearchConfig, QuantizeConfig, RuntimeConfig)]

    from trt_engine.verbs.search import run as searching

    planned = searching.plan(model, dataset, *configs, command=options.command_line())
    return _plan(planned) if dry_run else searching.run(planned)


def _plan(planned: SearchJob) -> DryRun:
    """`--dry-run`: candidate layers and measurements."""
    from trt_engine.records.dry_run import DryRun
    from trt_engine.verbs.search.run import EXCLUDE_FILE, REPORT_FILE, TRIALS_FILE

    groups, layers = planned.groups, sum(len(group.nodes) for group in planned.groups)
    images, subset = len(planned.dataset.items), min(planned.settings.subset, len(planned.dataset.items))
    return DryRun(
        does=(
            f"measure {layers} layers in {len(groups)} groups of {planned.model.path} in {planned.settings.to}: each "
            f"group on {subset} images, the result on all {images}; at most about {planned.max_measurements} measurements"
        ),
        writes=tuple(str(planned.out / name) for name in (TRIALS_FILE, EXCLUDE_FILE, REPORT_FILE)),
        settings={
            "target": planned.mixed_precision.config.target,
            "dataset": str(planned.dataset.path),
            "metric": planned.metric,
            "budget": planned.settings.budget,
            "groups": [group.nodes for group in groups],
        },
    )
