"""`evaluate`: an engine (or a model, built first) on a dataset, beside a baseline, and the figures kept."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api.loading import load
from trt_engine.api.pictures import Given
from trt_engine.config import BuildConfig, RuntimeConfig, from_values, is_preset, settings
from trt_engine.device import parse_device
from trt_engine.engine import Engine, is_bare_model
from trt_engine.environment import Environment
from trt_engine.errors import AccuracyError, UsageError
from trt_engine.evaluation.evaluate import Evaluation, evaluate_runner
from trt_engine.files import ensure_folder, write_whole
from trt_engine.graph.load import open_model
from trt_engine.records import MAIN_FIGURE, EvaluateReport, SkippedImage, document
from trt_engine.runtime.instance import InferenceEngine
from trt_engine.tensors import closest
from trt_engine.vision.datasets import Dataset, open_dataset
from trt_engine.vision.declaration import Preprocess, Vision, from_file, vision_from, vision_of

__all__ = ["METRICS", "declared_for", "evaluate", "gate", "run", "undeclared"]

log = logging.getLogger(__name__)

METRICS = "metrics.json"
"""What `out` holds: the document that `--json` prints."""
_USUAL_BATCH = 8
_SHOWN = 100


def evaluate(engine: Engine | Path | str, dataset: Path | str, **values: Any) -> EvaluateReport:
    """COCO's figures of a detector, top-1 and top-5 of a classifier, latency by batch, and differences from a baseline.

    `dataset` is a folder with annotations.json, an annotations file, a folder of a folder for each class, an `.npz` of
    `images` and `labels`, or (with a baseline) a folder of pictures. `values` are `batch`, `limit` (pictures), `seed` (of
    their choice), `baseline` (an engine), `max_drop`, `preprocess` (in place of what the model declares),
    `save_predictions`, `out`, `yes`, and the settings of `RuntimeConfig` and (for a model) `BuildConfig`. Raises
    `AccuracyError` when the main figure lies more than `max_drop` under the baseline's, after everything is written.
    """
    report = run(engine, dataset, **values)
    gate(report)
    return report


def run(
    engine: Engine | Path | str,
    dataset: Path | str,
    *,
    batch: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    baseline: Engine | Path | str | None = None,
    max_drop: float | None = None,
    preprocess: Given | None = None,
    save_predictions: Path | str | None = None,
    out: Path | str | None = None,
    yes: bool = False,
    command: str = "",
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **values: Any,
) -> EvaluateReport:
    """The same without the gate."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    _check(batch, limit, baseline, max_drop)
    runtime, build = _settled(runtime, build, values)
    targets = _targets(out, save_predictions, yes)
    vision = declared_for(engine, preprocess)
    listed = open_dataset(dataset)
    if max_drop is not None and not listed.labelled:
        raise UsageError(f"`{listed.path}` has no labels to gate by", hint="leave `--max-drop` out")
    if save_predictions is not None and listed.kind != "coco":
        raise UsageError(f"predictions are saved for COCO annotations, `{listed.path}` has none", hint="leave it out")
    if listed.kind == "coco":
        import trt_engine.evaluation.coco  # noqa: F401  # its library is found missing before anything is built
    chosen = listed.subset(limit, seed)
    with contextlib.ExitStack() as open_now:
        runner = open_now.enter_context(_loaded(engine, runtime, build, vision, batch))
        other = None
        if baseline is not None:
            other = open_now.enter_context(_loaded(baseline, runtime, build, vision, batch))
        log.info("%d pictures of `%s`, kind %s", len(chosen.items), listed.path, listed.kind)
        found = evaluate_runner(runner, chosen, vision, batch=batch, baseline=other, on_progress=on_progress)
        found = dataclasses.replace(
            found, engine=_as_typed(found.engine, engine), baseline=_as_typed(found.baseline, baseline)
        )
        number = parse_device(found.engine.device)[1] if found.engine.device.startswith("cuda") else None
    warnings = tuple(_warnings(found, listed))
    for warning in warnings:
        log.warning("%s", warning)
    report = EvaluateReport(
        **_figures(found, vision, max_drop),
        task=vision.postprocess.task,
        dataset=str(listed.path),
        dataset_kind=listed.kind,
        limit=limit,
        seed=seed,
        max_drop=max_drop,
        vision=vision.as_dict(),
        environment=Environment.here(number),
        started=started,
        wall_s=time.monotonic() - began,
        artifacts={name: str(path) for name, path in targets.items()},
        warnings=(*listed.warnings, *warnings),
    )
    _write(report, found, targets, command)
    return report


def declared_for(engine: Engine | Path | str, preprocess: Given | None = None) -> Vision:
    """The pre- and post-processing given, or declared by the engine or model; `UsageError` saying how to declare it."""
    if isinstance(preprocess, Vision):
        return preprocess
    if isinstance(preprocess, Preprocess) or (preprocess is not None and is_preset(str(preprocess))):
        path = engine.path if isinstance(engine, Engine) else Path(engine)
        signature = (open_model(path) if is_bare_model(engine) else Engine.open(path)).signature
        given = preprocess if isinstance(preprocess, Preprocess) else str(preprocess)
        return vision_from(given, signature, vision_of(engine))
    if preprocess is not None:
        return dataclasses.replace(from_file(Path(preprocess)), source=Path(preprocess).name)
    found = vision_of(engine)
    if found is None:
        raise undeclared(engine.path if isinstance(engine, Engine) else Path(engine))
    return found


def undeclared(path: Path) -> UsageError:
    """How to declare what a model needs."""
    return UsageError(
        f"`{path}` does not declare how pictures go into it and what its outputs mean",
        hint='`--preprocess imagenet`, `yolo`, or a file with `{"preprocess": {"size": [640, 640]}, "postprocess": '
        '{"decode": "yolov10"}}`; `trt_engine.vision.declaration.declare` writes it into the model (docs/vision.md)',
    )


# ------------------------------------------------------------------------------------------------ before


def _check(batch: int | None, limit: int | None, baseline: object, max_drop: float | None) -> None:
    for name, value in (("batch", batch), ("limit", limit)):
        if value is not None and value < 1:
            raise UsageError(f"the {name} cannot be {value}", hint=f"`--{name} 8`")
    if max_drop is not None and baseline is None:
        raise UsageError("`max_drop` compares with a baseline, and none is given", hint="`--baseline ENGINE`")
    if max_drop is not None and not 0 <= max_drop <= 1:
        raise UsageError(f"`max_drop` is {max_drop}, expected 0 to 1", hint="`--max-drop 0.01` is one point of AP")


def _settled(
    runtime: RuntimeConfig | None, build: BuildConfig | None, values: dict[str, Any]
) -> tuple[RuntimeConfig, BuildConfig]:
    runtime, build = runtime or RuntimeConfig(), build or BuildConfig()
    of_runtime, of_build = ({item.name for item in settings(kind)} for kind in (RuntimeConfig, BuildConfig))
    for name in values:
        if name not in of_runtime | of_build:
            raise UsageError(f"there is no setting `{name}`", hint=closest(name, sorted(of_runtime | of_build)))
    for_runtime = {name: value for name, value in values.items() if name in of_runtime}
    for_build = {name: value for name, value in values.items() if name in of_build}
    made, built = from_values(RuntimeConfig, for_runtime), from_values(BuildConfig, for_build)
    return (
        dataclasses.replace(runtime, **{name: getattr(made, name) for name in for_runtime}),
        dataclasses.replace(build, **{name: getattr(built, name) for name in for_build}),
    )


def _targets(out: Path | str | None, predictions: Path | str | None, yes: bool) -> dict[str, Path]:
    """What will be written, found to be writable before minutes are spent."""
    targets = {}
    if out is not None:
        targets["metrics"] = Path(out) / METRICS
    if predictions is not None:
        targets["predictions"] = Path(predictions)
    for path in targets.values():
        if path.exists() and not yes:
            raise UsageError(f"`{path}` exists", hint="`--yes` overwrites it, or name another place")
        ensure_folder(path.parent)
    return targets


@contextlib.contextmanager
def _loaded(
    engine: Engine | Path | str, runtime: RuntimeConfig, build: BuildConfig, vision: Vision, batch: int | None
) -> Iterator[InferenceEngine]:
    if is_bare_model(engine):
        engine = _built(Path(engine), runtime, build, vision, batch)  # type: ignore[arg-type]
    with load(engine, config=runtime) as runner:
        yield runner


def _built(path: Path, runtime: RuntimeConfig, build: BuildConfig, vision: Vision, batch: int | None) -> Engine:
    """The engine of a bare model, from the store or built into it, for batches up to the one asked for."""
    from trt_engine.api.building import build as build_engine

    spec = vision.input_of(open_model(path).signature)
    if not build.profiles and build.batch is None and not build.shapes:
        size = batch or _USUAL_BATCH
        if spec.shape[0] < 0:
            build = dataclasses.replace(build, batch=(1, size, size))
        if any(side < 0 for side in spec.shape[1:]):
            build = dataclasses.replace(build, shapes={spec.name: (max(spec.shape[0], size), *vision.preprocess.shape)})
    if runtime.device is not None:
        build = dataclasses.replace(build, device=runtime.device)
    if runtime.providers:
        build = dataclasses.replace(build, providers=runtime.providers)
    log.info("`%s` is a model: its engine is built into the store first, or taken from there", path)
    return build_engine(path, config=build)


# ------------------------------------------------------------------------------------------------ after


def _as_typed(side: Any, asked: Engine | Path | str | None) -> Any:
    """A model goes by the name it was given: the store names an engine after the first of all equal models."""
    return dataclasses.replace(side, engine=str(asked)) if asked is not None and is_bare_model(asked) else side


def _figures(found: Evaluation, vision: Vision, max_drop: float | None) -> dict[str, Any]:
    """The fields of the report that come from what was run."""
    engine, other, latency = found.engine, found.baseline, found.engine.latency_ms
    drop = None
    if other is not None and engine.metrics:
        drop = {name: other.metrics[name] - value for name, value in engine.metrics.items()}
    passed, main = None, MAIN_FIGURE[vision.postprocess.task]
    if max_drop is not None and drop is not None and other is not None:
        known = engine.metrics[main] >= 0 and other.metrics[main] >= 0  # COCO writes -1 for what cannot be worked out
        passed = drop[main] <= max_drop if known else None
    return {
        **{item.name: getattr(engine, item.name) for item in dataclasses.fields(engine)},
        "images": found.images,
        "skipped": len(found.skipped),
        "skipped_images": tuple(SkippedImage(item.name, item.reason) for item in found.skipped[:_SHOWN]),
        "per_image_ms": latency.mean / engine.batch if latency and found.images >= engine.batch else None,
        "dataset_digest": found.digest,
        "baseline": other,
        "drop": drop,
        "parity": found.parity,
        "passed": passed,
    }


def _warnings(found: Evaluation, dataset: Dataset) -> Iterator[str]:
    if found.skipped:
        shown = "; ".join(f"`{item.name}`: {item.reason}" for item in found.skipped[:3])
        more = "; ..." if len(found.skipped) > 3 else ""
        yield f"{len(found.skipped)} pictures are left out ({shown}{more})"
    if found.engine.not_finite:
        yield f"{found.engine.not_finite} rows of the outputs hold NaN or infinities and do not count"
    if not found.engine.predictions:
        yield f"nothing was found in any picture of `{dataset.path.name}`: is the declared pre- and post-processing right?"


def _write(report: EvaluateReport, found: Evaluation, targets: dict[str, Path], command: str) -> None:
    if "predictions" in targets:
        from trt_engine.evaluation.coco import save_predictions

        save_predictions(found.results, targets["predictions"])
    if "metrics" in targets:
        raw = msgspec.json.format(msgspec.json.encode(document("evaluate", report, command=command)), indent=2)
        write_whole(targets["metrics"], raw + b"\n")


def gate(report: EvaluateReport) -> None:
    """`AccuracyError` when the report's main figure dropped by more than was allowed, `UsageError` when there is none."""
    name = MAIN_FIGURE[report.task]
    if report.max_drop is not None and report.passed is None:
        raise UsageError(
            f"there is no {name} to gate by: nothing in the {report.images} pictures of `{report.dataset}` is labelled",
            hint="more pictures (`--limit`), or a dataset with labels in it",
        )
    if report.passed is not False or report.drop is None or report.baseline is None:
        return
    raise AccuracyError(
        f"{name} is {report.metrics[name]:.4f}, the baseline's is {report.baseline.metrics[name]:.4f}: a drop of "
        f"{report.drop[name]:.4f}, allowed is {report.max_drop:g}",
        hint="`--max-drop` allows more; a finer precision, or fewer layers in the coarse one, loses less",
    )
