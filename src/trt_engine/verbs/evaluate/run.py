"""`evaluate`: metrics of an engine (or a model, built first) and of a baseline on a dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.atomic_io import all_or_nothing, ensure_folder
from trt_engine.config.build import BuildConfig
from trt_engine.config.evaluate import EvaluateConfig
from trt_engine.config.precision import is_preset
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.environment import Environment
from trt_engine.errors import AccuracyError, UsageError
from trt_engine.evaluation.evaluate_runner import DatasetEvaluation, check_task, evaluate_runner
from trt_engine.format import join_names
from trt_engine.graph.load import open_model
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.dry_run import DryRun
from trt_engine.records.evaluate import MAIN_METRIC, EvaluateReport, SkippedImage
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.verbs.calibration_images import VisionSource
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.load import build_for_runtime, load, merge_run_settings
from trt_engine.vision.datasets import Dataset, open_dataset
from trt_engine.vision.spec import Preprocess, Vision, resolve_vision, vision_from_file, vision_of

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import EvaluateSettings

log = logging.getLogger(__name__)

METRICS = "metrics.json"
"""What `out` holds: the document that `--json` prints."""
_DEFAULT_BATCH = 8
_MAX_LISTED_IMAGES = 100


@public_function
@takes_model("engine")
def evaluate(
    engine: Engine | AnyModel,
    dataset: Path | str,
    *,
    config: EvaluateConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[EvaluateSettings],
) -> EvaluateReport:
    """COCO's figures of a detector, top-1 and top-5 of a classifier, latency by batch, and differences from a baseline.

    `dataset` is a folder with annotations.json, an annotations file, a folder of a folder for each class, an `.npz` of
    `images` and `labels`, or (with a baseline) a folder of images. `values` are settings of `EvaluateConfig` (`batch`,
    `max_samples`, `baseline`, ...), `RuntimeConfig` and (for a model) `BuildConfig`. Raises `AccuracyError` when the main
    metric is more than `max_drop` below the baseline's, after everything is written. `UsageError` for an unknown setting,
    and for `max_drop` without a baseline or labels.
    """
    report = run(on_disk(engine), dataset, *merge_run_settings(values, runtime, build, config or EvaluateConfig()))
    gate(report)
    return report


def run(
    engine: Engine | Path | str,
    dataset: Path | str,
    config: EvaluateConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    *,
    command: str = "",
) -> EvaluateReport:
    """The same without the gate."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    targets = _output_files(config)
    vision = resolve_spec(engine, config.preprocess)
    listed = _open_dataset(dataset, config)
    chosen = listed.subset(config.max_samples, config.seed)
    sides = [engine] if config.baseline is None else [engine, config.baseline]
    with contextlib.ExitStack() as open_now:
        runner, *others = (
            open_now.enter_context(_load_engine(side, runtime, build, vision, config.batch)) for side in sides
        )
        log.info("%d images of `%s`, kind %s", len(chosen.items), listed.path, listed.kind)
        found = evaluate_runner(runner, chosen, vision, batch=config.batch, baseline=others[0] if others else None)
        found = dataclasses.replace(
            found,
            engine=_with_requested_name(found.engine, engine),
            baseline=_with_requested_name(found.baseline, config.baseline),
        )
        number = parse_device(found.engine.device)[1] if found.engine.device.startswith("cuda") else None
    order = _class_order(listed, vision)
    if order:
        log.info(
            "the model declares no class names: the folders are its classes in the order of their names: %s", order
        )
    warnings = tuple(_warnings(found, listed, order))
    for warning in warnings:
        log.warning("%s", warning)
    report = EvaluateReport(
        **_report_fields(found, vision, config.max_drop),
        task=vision.postprocess.task,
        dataset=str(listed.path),
        dataset_kind=listed.kind,
        max_samples=config.max_samples,
        seed=config.seed,
        max_drop=config.max_drop,
        vision=vision.as_dict(),
        environment=Environment.detect(number),
        started=started,
        wall_s=time.monotonic() - began,
        artifacts={name: str(path) for name, path in targets.items()},
        warnings=(*listed.warnings, *warnings),
    )
    _write(report, found, targets, command)
    return report


def plan(engine: Path, dataset: Path, config: EvaluateConfig) -> DryRun:
    """What `run` would build, read and write; raises its early errors."""
    targets, vision = _output_files(config, dry=True), resolve_spec(engine, config.preprocess)
    listed = _open_dataset(dataset, config)
    check_task(listed, vision, config.baseline is not None)
    sides = [side for side in (engine, config.baseline) if side is not None]
    for side in sides:
        (open_model if is_onnx_model(side) else Engine.open)(side)
    images = len(listed.subset(config.max_samples, config.seed).items)
    return DryRun(
        does=f"run {engine} over {images} images of {listed.path} ({listed.kind})",
        builds=tuple(str(side) for side in sides if is_onnx_model(side)),
        writes=tuple(map(str, targets.values())),
        settings={"images": images, "vision": vision.as_dict()},
    )


def resolve_spec(engine: Engine | Path | str, preprocess: VisionSource | None = None) -> Vision:
    """The pre- and post-processing given, or declared by the engine or model; `UsageError` with how to declare it."""
    if isinstance(preprocess, Vision):
        return preprocess
    if isinstance(preprocess, Preprocess) or (preprocess is not None and is_preset(str(preprocess))):
        path = engine.path if isinstance(engine, Engine) else Path(engine)
        signature = (open_model(path) if is_onnx_model(engine) else Engine.open(path)).signature
        given = preprocess if isinstance(preprocess, Preprocess) else str(preprocess)
        return resolve_vision(given, signature, vision_of(engine))
    if preprocess is not None:
        return dataclasses.replace(vision_from_file(Path(preprocess)), source=Path(preprocess).name)
    found = vision_of(engine)
    if found is None:
        raise missing_spec_error(engine.path if isinstance(engine, Engine) else Path(engine))
    return found


def missing_spec_error(path: Path) -> UsageError:
    """Error with how to declare the processing of a model."""
    return UsageError(
        f"`{path}` does not declare how images become its inputs and what its outputs mean",
        hint='`--preprocess imagenet`, `yolo`, or a file with `{"preprocess": {"size": [640, 640]}, "postprocess": '
        '{"decode": "yolov10"}}`; `trt_engine.vision.spec.declare` writes it into the model '
        "(`trt-engine docs vision`)",
    )


# ------------------------------------------------------------------------------------------------ before


def _open_dataset(path: Path | str, config: EvaluateConfig) -> Dataset:
    """The dataset, with what gates and predictions need of it."""
    listed = open_dataset(path)
    if config.max_drop is not None and not listed.labelled:
        raise UsageError(f"`{listed.path}` has no labels to gate by", hint="leave `--max-drop` out")
    if config.save_predictions is not None and listed.kind != "coco":
        raise UsageError(f"predictions are saved for COCO annotations, `{listed.path}` has none", hint="leave it out")
    if listed.kind == "coco":
        import trt_engine.evaluation.coco_metrics  # noqa: F401  # its library is found missing before anything is built
    return listed


def _output_files(config: EvaluateConfig, *, dry: bool = False) -> dict[str, Path]:
    """Output files, checked to be writable before minutes are spent; `dry` makes no folder."""
    places = {"metrics": config.out and config.out / METRICS, "predictions": config.save_predictions}
    targets = {name: path for name, path in places.items() if path is not None}
    for path in targets.values():
        if path.exists() and not config.overwrite:
            raise UsageError(f"`{path}` exists", hint="`--overwrite` overwrites it, or name another place")
        ensure_folder(path.parent, dry=dry)
    return targets


@contextlib.contextmanager
def _load_engine(
    engine: Engine | Path | str, runtime: RuntimeConfig, build: BuildConfig, vision: Vision, batch: int | None
) -> Iterator[InferenceEngine]:
    if is_onnx_model(engine):
        from trt_engine.verbs.build.run import build as build_engine

        path = Path(engine)
        log.info("`%s` is a model: its engine is built into the store first, or taken from there", path)
        engine = build_engine(path, config=build_config_for(path, runtime, build, vision, batch))
    with load(engine, config=runtime) as runner:
        yield runner


def build_config_for(
    path: Path, runtime: RuntimeConfig, build: BuildConfig, vision: Vision, batch: int | None
) -> BuildConfig:
    """The build settings of a bare model whose engine takes batches of images up to the requested one."""
    spec = vision.input_spec(open_model(path).signature)
    if not build.profiles and build.batch is None and not build.shapes:
        size = batch or _DEFAULT_BATCH
        if spec.shape[0] < 0:
            build = dataclasses.replace(build, batch=(1, size, size))
        if any(side < 0 for side in spec.shape[1:]):
            build = dataclasses.replace(build, shapes={spec.name: (max(spec.shape[0], size), *vision.preprocess.shape)})
    return build_for_runtime(build, runtime)


# ------------------------------------------------------------------------------------------------ after


def _with_requested_name(side: Any, requested: Engine | Path | str | None) -> Any:
    """A model goes by the name it was given: the store names an engine after the first of all equal models."""
    return (
        dataclasses.replace(side, engine=str(requested)) if requested is not None and is_onnx_model(requested) else side
    )


def _report_fields(evaluations: DatasetEvaluation, vision: Vision, max_drop: float | None) -> dict[str, Any]:
    """The fields of the report that come from what was run."""
    engine, other, latency = evaluations.engine, evaluations.baseline, evaluations.engine.latency_ms
    drop = None
    if other is not None and engine.metrics:
        drop = {name: other.metrics[name] - value for name, value in engine.metrics.items()}
    passed, main = None, MAIN_METRIC[vision.postprocess.task]
    if max_drop is not None and drop is not None and other is not None:
        known = engine.metrics[main] >= 0 and other.metrics[main] >= 0  # COCO writes -1 for what cannot be worked out
        passed = drop[main] <= max_drop if known else None
    return {
        **{item.name: getattr(engine, item.name) for item in dataclasses.fields(engine)},
        "images": evaluations.images,
        "skipped": len(evaluations.skipped),
        "skipped_images": tuple(
            SkippedImage(item.name, item.reason) for item in evaluations.skipped[:_MAX_LISTED_IMAGES]
        ),
        "per_image_ms": latency.mean / engine.batch if latency and evaluations.images >= engine.batch else None,
        "dataset_digest": evaluations.digest,
        "baseline": other,
        "metric_drop": drop,
        "parity": evaluations.parity,
        "passed": passed,
    }


def _class_order(dataset: Dataset, vision: Vision) -> str:
    """`0 cat, 1 dog` where folders stand for classes by their order alone; else empty."""
    if dataset.kind != "folders" or vision.postprocess.classes:
        return ""
    return join_names([f"{number} `{name}`" for number, name in enumerate(dataset.labels)], _MAX_CLASSES)


_MAX_CLASSES = 10
"""Classes named in a message."""


def _warnings(evaluations: DatasetEvaluation, dataset: Dataset, order: str) -> Iterator[str]:
    if order and evaluations.engine.metrics.get("top1", 1.0) < 1 / len(dataset.labels):
        yield (
            f"top-1 is below chance (1 of {len(dataset.labels)}): are the model's classes in the order of the folders' "
            f"names ({order})? `--preprocess FILE` declares `classes`"
        )
    if evaluations.skipped:
        shown = "; ".join(f"`{item.name}`: {item.reason}" for item in evaluations.skipped[:3])
        more = "; ..." if len(evaluations.skipped) > 3 else ""
        yield f"{len(evaluations.skipped)} images are left out ({shown}{more})"
    if evaluations.engine.not_finite:
        yield f"{evaluations.engine.not_finite} rows of the outputs hold NaN or infinities and do not count"
    if not evaluations.engine.predictions:
        yield f"nothing was found in any image of `{dataset.path.name}`: is the declared pre- and post-processing right?"


@all_or_nothing()
def _write(report: EvaluateReport, evaluations: DatasetEvaluation, targets: dict[str, Path], command: str) -> None:
    if "predictions" in targets:
        from trt_engine.evaluation.coco_metrics import save_predictions

        save_predictions(evaluations.results, targets["predictions"])
    if "metrics" in targets:
        write_document(targets["metrics"], "evaluate", report, command=command)


def gate(report: EvaluateReport) -> None:
    """`AccuracyError` when the report's main metric dropped too far, `UsageError` when it has none."""
    name = MAIN_METRIC[report.task]
    if report.max_drop is not None and report.passed is None:
        raise UsageError(
            f"no {name} to gate by: nothing in the {report.images} images of `{report.dataset}` is labelled",
            hint="more images (`--max-samples`), or a dataset with labels in it",
        )
    if report.passed is not False or report.metric_drop is None or report.baseline is None:
        return
    raise AccuracyError(
        f"{name} is {report.metrics[name]:.4f}, the baseline's is {report.baseline.metrics[name]:.4f}: a drop of "
        f"{report.metric_drop[name]:.4f}, allowed is {report.max_drop:g}",
        hint="`--max-drop` allows more; a finer precision, or fewer layers in the coarse one, loses less",
    )
