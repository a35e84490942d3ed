"""`trt-engine search MODEL --dataset D --budget 0.01`: which layers may be quantised, and which must stay in float."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.config import QuantizeConfig, RuntimeConfig
from trt_engine.figures import MIB, figure, size, with_module

if TYPE_CHECKING:
    from trt_engine.records import SearchReport
    from trt_engine.search.budget import Plan

__all__ = ["command"]

_FILE = options.FILE
_SHOWN = 12


@click.command("search", short_help="Which layers may be quantised within a budget.")
@click.argument("model", metavar="MODEL", type=_FILE)
@click.option("--dataset", type=_FILE, required=True, metavar="PATH", help="A folder, an annotations .json or an .npz.")
@click.option(
    "--budget", type=float, default=0.01, show_default=True, metavar="X", help="How far AP or top-1 may drop."
)
@click.option("--to", type=click.Choice(("int8", "fp8")), default="int8", show_default=True, help="The format.")
@click.option("--calibrate", "--data", "data", metavar="DATA", help="What calibration sees: a folder, .npy, .npz.")
@click.option(
    "--subset", type=click.IntRange(min=1), default=128, show_default=True, metavar="N",
    help="Pictures that the cost of each layer is measured on; the answer is verified on all.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of their choice.")
@click.option(
    "--groups", type=click.IntRange(min=1), metavar="N",
    help="Tell at most N parts of the model apart, of neighbouring layers [every layer].",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Pictures in one query [8, or what it takes].")
@options.preprocess_option("Pre- and post-processing, instead of the declared one.")
@options.of(
    QuantizeConfig,
    leave_out=("method", "block", "weights_only", "convolutions", "high_precision", "parity"),
    defaults={"target": None},
    helps={"target": "The library that will run the model (default: the one that measures)"},
)
@options.of(RuntimeConfig, leave_out=("contexts", "streams"))
@options.out_option("The folder for trials.jsonl, exclude.txt and search.json.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: Talk,
    model: Path,
    dataset: Path,
    budget: float,
    to: str,
    data: str | None,
    subset: int,
    seed: int,
    groups: int | None,
    batch: int | None,
    preprocess: str | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """The largest part of MODEL that may be INT8 or FP8 while AP or top-1 drops by no more than the budget.

    The cost of each layer is measured alone on a subset, then layers are taken from the cheapest on while the budget
    holds, and the answer is verified on the whole dataset. What was measured is kept: a stopped search goes on.

    \b
      trt-engine search model.onnx --dataset val --budget 0.01 --calibrate train/ -o found
      trt-engine quantize model.onnx --to int8 --calibrate train/ --heads --exclude-node @found/exclude.txt -o q.onnx
    """
    target = values.get("target")
    config = options.config_from(QuantizeConfig, values)
    runtime = options.config_from(RuntimeConfig, values)

    from trt_engine.search import budget as searching

    typed = options.spelled_command()
    planned = searching.plan(
        model,
        dataset,
        to=to,
        budget=budget,
        data=data,
        out=out or Path(f"{model.stem}.search"),
        subset=subset,
        seed=seed,
        groups=groups,
        batch=batch,
        preprocess=preprocess,
        target=target,
        config=config,
        runtime=runtime,
        command=typed,
        yes=yes,
    )
    if dry_run:
        emit(talk, *_plan(planned))
        return
    report = searching.run(planned)
    emit(talk, document("search", report, command=typed), _text(report))


def _plan(planned: Plan) -> tuple[dict[str, Any], str]:
    """`--dry-run`: the layers in question and the measurements, and nothing written."""
    from trt_engine.records import SearchPlan
    from trt_engine.search.budget import EXCLUDE, REPORT, TRIALS

    body = SearchPlan(
        model=str(planned.model.path),
        to=planned.to,
        target=planned.mixture.config.target,
        dataset=str(planned.dataset.path),
        metric=planned.metric,
        budget=planned.budget,
        groups=tuple(group.nodes for group in planned.groups),
        images=len(planned.dataset.items),
        subset=min(planned.subset, len(planned.dataset.items)),
        measurements=planned.expected,
        writes=tuple(str(planned.out / name) for name in (TRIALS, EXCLUDE, REPORT)),
    )
    layers = sum(len(group) for group in body.groups)
    lines = [
        f"would measure {layers} layers in {len(body.groups)} groups of {body.model} in {body.to} for {body.target}: at "
        f"most about {body.measurements} measurements,",
        f"the cost of each group on {body.subset} pictures of {body.dataset}, the answer on all {body.images}",
        f"would write {', '.join(body.writes)}",
    ]
    return document("search", body, command=options.spelled_command()), "\n".join(lines)


def _text(report: SearchReport) -> str:
    """The answer, what the costliest layers cost, the table, and what to type next."""
    total = len(report.quantized) + len(report.excluded)
    lines = [
        f"model       {report.model}",
        f"{report.metric:<12}{report.baseline:.4f} before, {report.found:.4f} with {report.to}: a drop of "
        f"{report.drop:.4f}, the budget is {report.budget:g} ({report.images} pictures)",
        f"{report.to:<12}{len(report.quantized)} of {total} layers, {report.macs:.1%} of the multiply-adds",
        f"size        {size(report.nbytes_before)} before, {size(report.nbytes)} now",
        f"measured    {report.trials} mixtures, {report.trials - report.measured} of them found in the log; "
        f"{report.seconds:.0f} s",
    ]
    cost = [group for group in report.groups if group.drop is not None]
    if cost:
        lines += ["", f"what a layer costs alone, on {report.subset} pictures:"]
        for group in cost[:_SHOWN]:
            more = f" and {len(group.nodes) - 1} more" if len(group.nodes) > 1 else ""
            first = with_module(group.nodes[0], group.modules[0] if group.modules else None)
            state = report.to if group.quantized else "float"
            lines.append(f"  {group.drop:+.4f}  {group.macs:6.1%}  {state:<5}  {first}{more}")
        if len(cost) > _SHOWN:
            lines.append(f"  and {len(cost) - _SHOWN} that cost no more than {cost[_SHOWN].drop:+.4f}")
    lines += ["", *_table(report), ""]
    lines += [f"written     {place}" for place in report.artifacts.values()]
    if report.next_command is not None:
        lines.append(f"next        {report.next_command}")
    return "\n".join(lines)


def _table(report: SearchReport) -> list[str]:
    """The mixtures that no other beats, the model as it is, everything quantised, and the answer."""
    lines = [f"{'pictures':>8}  {'layers':>6}  {'macs':>6}  {report.metric:>7}  {'drop':>7}  {'MiB':>6}  ms"]
    for point in report.points:
        answer = point.images == report.images and point.layers == len(report.quantized) and point.macs == report.macs
        if not point.pareto and not answer and point.stage not in ("baseline", "all"):
            continue
        times = f"{figure(point.latency_ms.median)} for {point.batch}" if point.latency_ms is not None else "-"
        mark = "  <- the answer" if answer else "" if point.pareto else "  beaten"
        lines.append(
            f"{point.images:>8}  {point.layers:>6}  {point.macs:>6.1%}  {point.metric:>7.4f}  {point.drop:>+7.4f}  "
            f"{figure(point.nbytes / MIB):>6}  {times}{mark}"
        )
    return lines
