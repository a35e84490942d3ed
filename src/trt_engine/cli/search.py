"""`trt-engine search MODEL --dataset D --budget 0.01`: layers that can be quantised within an accuracy budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, verb_command
from trt_engine.cli.output import OutputOptions, print_result
from trt_engine.config.precision import QUANTIZE_DATA, QuantizeConfig, SearchConfig
from trt_engine.config.runtime import RuntimeConfig

if TYPE_CHECKING:
    from trt_engine.precision_search.search import SearchJob
    from trt_engine.records.search import SearchPlan

_FILE = options.FILE


@verb_command.verb("search", short_help="Layers to quantise within an accuracy budget.")
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
@options.dry_run_option
@options.common
def command(output_options: OutputOptions, model: Path, dataset: Path, dry_run: bool, **values: Any) -> None:
    """Find the largest part of MODEL that can be INT8 or FP8 while AP or top-1 drops by at most the budget.

    Measures each layer alone on a subset, adds layers from the cheapest while the budget holds, and verifies the result on
    the whole dataset. An interrupted search resumes.

    \b
      trt-engine search model.onnx --dataset val --budget 0.01 --calib-data train/ -o found
      trt-engine quantize model.onnx --to int8 --calib-data train/ --quantize-outputs --exclude-node @found/exclude.txt
    """
    configs = [options.config_from(kind, values) for kind in (SearchConfig, QuantizeConfig, RuntimeConfig)]

    from trt_engine.precision_search import search as searching

    planned = searching.plan(model, dataset, *configs, command=options.command_line())
    print_result(output_options, "search", _plan(planned) if dry_run else searching.run(planned))


def _plan(planned: SearchJob) -> SearchPlan:
    """`--dry-run`: candidate layers and measurements."""
    from trt_engine.precision_search.search import EXCLUDE_FILE, REPORT_FILE, TRIALS_FILE
    from trt_engine.records.search import SearchPlan

    return SearchPlan(
        model=str(planned.model.path),
        to=planned.settings.to,
        target=planned.mixed_precision.config.target,
        dataset=str(planned.dataset.path),
        metric=planned.metric,
        budget=planned.settings.budget,
        groups=tuple(group.nodes for group in planned.groups),
        images=len(planned.dataset.items),
        subset=min(planned.settings.subset, len(planned.dataset.items)),
        measurements=planned.max_measurements,
        writes=tuple(str(planned.out / name) for name in (TRIALS_FILE, EXCLUDE_FILE, REPORT_FILE)),
    )
