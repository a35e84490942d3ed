"""`trt-engine evaluate ENGINE|MODEL --dataset D`: how good an engine is, beside a baseline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.config import BuildConfig, RuntimeConfig
from trt_engine.errors import UsageError
from trt_engine.figures import in_ms

if TYPE_CHECKING:
    from trt_engine.records import Evaluated, EvaluateReport
    from trt_engine.vision.declaration import Vision

__all__ = ["command"]

_FILE = options.FILE


@click.command("evaluate", short_help="AP or top-1 of an engine on a dataset.")
@click.argument("path", metavar="ENGINE|MODEL", type=_FILE)
@click.option("--dataset", type=_FILE, required=True, metavar="PATH", help="A folder, an annotations .json or an .npz.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Pictures in one query [8, or what it takes].")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N pictures [all].")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="With --limit: chosen at random [the first N].")
@click.option("--baseline", type=_FILE, metavar="ENGINE|MODEL", help="Compare with this one, on the same pictures.")
@click.option("--max-drop", type=float, metavar="X", help="Exit code 7 when AP or top-1 drops by more than X.")
@options.preprocess_option("Pre- and post-processing, instead of the declared one.")
@click.option("--save-predictions", type=_FILE, metavar="FILE", help="Detections in COCO's result form.")
@options.of(RuntimeConfig, leave_out=("contexts", "streams"))
@options.of(
    BuildConfig,
    leave_out=(
        "device", "batch", "shapes", "profiles", "providers", "allow_fallback", "options", "preprocess",
    ),
)  # fmt: skip
@options.out_option("Write metrics.json into this folder.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: Talk,
    path: Path,
    dataset: Path,
    batch: int | None,
    limit: int | None,
    seed: int | None,
    baseline: Path | None,
    max_drop: float | None,
    preprocess: str | None,
    save_predictions: Path | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """How good ENGINE is on a dataset (a MODEL is built into the store first).

    COCO annotations give a detector's twelve figures, a folder for each class or an .npz of images and labels a
    classifier's top-1 and top-5, a folder of pictures with --baseline the difference of the outputs alone.

    \b
      trt-engine evaluate model.engine.onnx --dataset val -o run
      trt-engine evaluate int8.engine.onnx --dataset val --baseline fp32.engine.onnx --max-drop 0.01
    """
    runtime, build, _ = options.engine_configs(values)
    asked = next((name for name, value in values.items() if value not in (None, ())), None)

    from trt_engine.api import evaluating
    from trt_engine.engine import is_bare_model

    bare = is_bare_model(path)
    if asked is not None and not bare and not (baseline is not None and is_bare_model(baseline)):
        raise UsageError(
            f"`{path}` is built already: `--{asked.replace('_', '-')}` cannot change it",
            hint="give the model to build it again",
        )
    if build.calibrate is not None:
        build = dataclasses.replace(build, preprocess=preprocess)
    typed = options.spelled_command()
    if dry_run:
        vision = evaluating.declared_for(path, preprocess)
        emit(talk, *_plan(path, bare, dataset, limit, seed, vision, out, save_predictions))
        return
    report = evaluating.run(
        path,
        dataset,
        batch=batch,
        limit=limit,
        seed=seed,
        baseline=baseline,
        max_drop=max_drop,
        preprocess=preprocess,
        save_predictions=save_predictions,
        out=out,
        yes=yes,
        command=typed,
        runtime=runtime,
        build=build,
    )
    emit(talk, document("evaluate", report, command=typed), _text(report))
    evaluating.gate(report)


def _text(report: EvaluateReport) -> str:
    from trt_engine.records import Evaluated

    engine = Evaluated(
        engine=report.engine,
        backend=report.backend,
        device=report.device,
        metrics=report.metrics,
        batch=report.batch,
        latency_ms=report.latency_ms,
        samples_ms=(),
        precision=report.precision,
        facts={},
    )
    left_out = f", {report.skipped} left out" if report.skipped else ""
    lines = [
        f"engine      {_who(engine)}",
        *([f"baseline    {_who(report.baseline)}"] if report.baseline else []),
        f"dataset     {report.dataset} ({report.dataset_kind}): {report.images} pictures{left_out}",
        f"            {report.dataset_digest}",
        f"declared    {report.vision['postprocess']['decode']} ({report.vision['source']})",
        *_table(report),
        f"latency     {_latency(engine)}",
        *([f"  baseline  {_latency(report.baseline)}"] if report.baseline else []),
    ]
    for name, error in (report.parity or {}).items():
        lines.append(f"parity      {name}: {error.summary}, mean {error.mean_abs:.3g}")
    if report.passed is not None:
        lines.append(f"gate        {'passed' if report.passed else 'FAILED'}: a drop of {report.max_drop:g} is allowed")
    lines += [f"written     {place}" for place in report.artifacts.values()]
    return "\n".join(lines)


def _who(side: Evaluated) -> str:
    return f"{side.engine} ({side.backend} on {side.device}, {side.precision.main or 'unknown precision'})"


def _latency(side: Evaluated) -> str:
    if side.latency_ms is None:
        return "not measured"
    return f"median {in_ms(side.latency_ms.median)}, p99 {in_ms(side.latency_ms.p99)} for a batch of {side.batch}"


def _table(report: EvaluateReport) -> list[str]:
    """One line for each figure; -1 is COCO's sign for a figure that nothing belongs to."""
    lines = []
    for name, value in report.metrics.items():
        text = f"{name:<12}{'-' if value < 0 else f'{value:.4f}'}"
        if report.baseline is not None and report.drop is not None and value >= 0:
            text += f"   baseline {report.baseline.metrics[name]:.4f}   drop {report.drop[name]:+.4f}"
        lines.append(text)
    return lines


def _plan(
    path: Path,
    bare: bool,
    dataset: Path,
    limit: int | None,
    seed: int | None,
    vision: Vision,
    out: Path | None,
    predictions: Path | None,
) -> tuple[dict[str, Any], str]:
    """`--dry-run`: what would be built, read and written."""
    from trt_engine.api.evaluating import METRICS
    from trt_engine.records import EvaluatePlan
    from trt_engine.vision.datasets import open_dataset

    listed = open_dataset(dataset)
    writes = [str(item) for item in (out / METRICS if out else None, predictions) if item is not None]
    body = EvaluatePlan(
        engine=str(path),
        builds=bare,
        dataset=str(listed.path),
        dataset_kind=listed.kind,
        images=len(listed.subset(limit, seed).items),
        vision=vision.as_dict(),
        writes=tuple(writes),
    )
    lines = [
        f"would run {path} over {body.images} pictures of {listed.path} ({listed.kind})",
        *(["would build its engine into the store first"] if bare else []),
        *([f"would write {', '.join(writes)}"] if writes else []),
    ]
    return document("evaluate", body, command=options.spelled_command()), "\n".join(lines)
