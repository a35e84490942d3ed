"""Accuracy of an engine on a dataset, optionally next to a baseline on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.arrayfiles import Array
from trt_engine.equivalence.output_error import worst_errors
from trt_engine.equivalence.sorted_outputs import compare_outputs
from trt_engine.equivalence.tolerance import TOLERANCES
from trt_engine.errors import ShapeError, UsageError
from trt_engine.progress import progress_counter
from trt_engine.records.evaluate import Evaluation
from trt_engine.records.parity import OutputError
from trt_engine.records.percentiles import summarize
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.vision.datasets import Dataset, DatasetReader, ImageBatch, SkippedImage
from trt_engine.vision.decode import decode_outputs, probabilities
from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.spec import Vision

_DEFAULT_BATCH = 8


@dataclass(frozen=True, slots=True)
class DatasetEvaluation:
    """Result of `evaluate_runner`."""

    engine: Evaluation
    baseline: Evaluation | None
    parity: dict[str, OutputError] | None
    images: int
    skipped: tuple[SkippedImage, ...]
    digest: str
    results: list[dict[str, Any]] = field(default_factory=list)
    """Detections of the engine in COCO's results format."""


def evaluate_runner(
    runner: InferenceEngine,
    dataset: Dataset,
    vision: Vision,
    *,
    batch: int | None = None,
    baseline: InferenceEngine | None = None,
) -> DatasetEvaluation:
    """Run every readable image through the engine (and the baseline), and compute the metrics of each.

    Raises `UsageError` when dataset, declaration and engine do not match. Classes missing from the dataset are ignored.
    """
    check_task(dataset, vision, baseline is not None)
    low, high = batch_range(runner, vision)
    size = batch or min(max(low, _DEFAULT_BATCH), high)
    if size > high and (reason := runner.signature.row_dependence) is not None:
        raise UsageError(
            f"`{runner.engine.path.name}` cannot run several images at once: {reason}", hint="leave `--batch` out"
        )
    if not low <= size <= high:
        only = f"takes batches of {low} only" if low == high else f"takes {low} to {high}"
        raise ShapeError(
            f"the batch is {size}, `{runner.engine.path.name}` {only}", hint=f"`--batch {min(max(size, low), high)}`"
        )
    mapping = _class_map(dataset, vision)
    sides = [_EngineScore(item, dataset, vision, mapping, size) for item in (runner, baseline) if item is not None]
    dtype = vision.input_spec(runner.signature).dtype
    reader = DatasetReader(dataset, Preprocessor(vision.preprocess, dtype), size)
    worst: dict[str, list[OutputError]] = {}
    weights: list[int] = []
    total, count = len(dataset.items), progress_counter("evaluating", "images")
    image_ids: list[int] = []
    for group in reader:
        outputs = [side.run_batch(group) for side in sides]
        if baseline is not None:
            weights.append(len(group))
            # rows sorted by score may swap between two engines
            ranked = list(outputs[1]) if vision.postprocess.decode in ("yolov10", "nms") else []
            for name, error in compare_outputs(outputs[0], outputs[1], ranked, TOLERANCES["quantized"]).items():
                worst.setdefault(name, []).append(error)
        image_ids += [item.image_id for item in group.items]
        count(reader.images, total)
    if not reader.images:
        reasons = "; ".join(f"`{item.name}`: {item.reason}" for item in reader.skipped[:3])
        raise UsageError(
            f"none of the {total} images of `{dataset.path}` can be used ({reasons})",
            hint="check the size and format of one of them",
        )
    found = [side.result(image_ids) for side in sides]
    return DatasetEvaluation(
        engine=found[0],
        baseline=found[1] if baseline is not None else None,
        parity={name: worst_errors(errors, weights) for name, errors in worst.items()}
        if baseline is not None
        else None,
        images=reader.images,
        skipped=tuple(reader.skipped),
        digest=reader.digest,
        results=sides[0].results,
    )


def batch_range(runner: InferenceEngine, vision: Vision) -> tuple[int, int]:
    """Smallest and largest batch that the engine has a result for each image of; `UsageError` where it has no such batch."""
    low, high = _engine_batches(runner, vision)
    if (reason := runner.signature.row_dependence) is None:
        return low, high
    if low > 1:
        raise UsageError(
            f"`{runner.engine.path.name}` has no result for each image of a batch of {low}: {reason}",
            hint="build it for a batch of 1",
        )
    return 1, 1


def _engine_batches(runner: InferenceEngine, vision: Vision) -> tuple[int, int]:
    spec = vision.input_spec(runner.signature)
    if spec.shape[0] >= 0:
        return spec.shape[0], spec.shape[0]
    spans = [profile.ranges[spec.name] for profile in runner.profiles if spec.name in profile.ranges]
    if not spans:
        return 1, _DEFAULT_BATCH
    return min(span.min[0] for span in spans), max(span.max[0] for span in spans)


def check_task(dataset: Dataset, vision: Vision, has_baseline: bool) -> None:
    """Raise `UsageError` for a dataset whose labels are not of the declared task."""
    task = vision.postprocess.task
    if not dataset.labelled and not has_baseline:
        raise UsageError(
            f"`{dataset.path}` has images without labels", hint="`--baseline ENGINE` compares outputs without labels"
        )
    if dataset.labelled and (dataset.kind == "coco") != (task == "detect"):
        wanted = "COCO annotations" if task == "detect" else "one folder per class, or an .npz of images and labels"
        raise UsageError(
            f"`{dataset.path}` is a `{dataset.kind}` dataset, the model is declared to `{task}`",
            hint=f"expected {wanted}",
        )


def _class_map(dataset: Dataset, vision: Vision) -> dict[int, int]:
    """COCO: class to category. Folders: label to class. Otherwise empty."""
    classes = vision.postprocess.classes
    if dataset.kind == "coco":
        from trt_engine.evaluation.coco_metrics import category_ids  # its library is not needed for classifiers

        return category_ids(classes, dataset.categories)
    if dataset.kind == "folders":
        return dict(enumerate(label_classes(dataset.labels, classes)))
    return {}


class _EngineScore:
    """Runs one engine in batches it accepts, and collects its metrics."""

    def __init__(
        self, runner: InferenceEngine, dataset: Dataset, vision: Vision, mapping: dict[int, int], batch: int
    ) -> None:
        vision.check(runner.signature)
        self.results: list[dict[str, Any]] = []
        self._runner = runner
        self._dataset = dataset
        self._declared = vision.postprocess
        self._input = vision.input_spec(runner.signature)
        self._vision = vision
        self._output = vision.output_spec(runner.signature).name
        self._low, high = batch_range(runner, vision)
        self._batch = min(max(batch, self._low), high)  # a baseline with another batch runs a group in pieces
        self._samples_ms: list[float] = []
        self._partial_ms: list[float] = []
        self._warm = False
        self._predictions = self._not_finite = 0
        self._accuracy = TopKAccuracy()
        self._mapping = mapping

    def run_batch(self, group: ImageBatch) -> dict[str, Any]:
        """Run and score one batch; returns the outputs."""
        pixels = group.pixels
        if pixels.dtype.name != self._input.dtype:  # a baseline with another input dtype
            from trt_engine.runtime.feeds import numpy_dtype

            pixels = pixels.astype(numpy_dtype(self._input.dtype))
        pieces = [self._run(pixels[start : start + self._batch]) for start in range(0, len(pixels), self._batch)]
        outputs = pieces[0]
        if len(pieces) > 1:
            outputs = {name: np.concatenate([np.atleast_1d(piece[name]) for piece in pieces]) for name in outputs}
        self._score(outputs, group)
        return outputs

    def _run(self, pixels: Array) -> dict[str, Any]:
        """Run one query, padded to the smallest batch; padding rows are removed."""
        count = len(pixels)
        if count < self._low:
            pixels = np.concatenate([pixels, np.repeat(pixels[-1:], self._low - count, axis=0)])
        feeds = {self._input.name: pixels}
        if not self._warm:  # the first call allocates
            self._runner.infer(feeds)
            self._warm = True
        answer = self._runner.infer(feeds, result=True)
        if not answer.success:
            self._runner.infer(feeds)  # raises the error
        (self._samples_ms if len(pixels) == self._batch else self._partial_ms).append(answer.latency_ms)
        rows = len(pixels)
        return {
            name: value[:count] if value.ndim and len(value) == rows else value
            for name, value in answer.outputs.items()
        }

    def _score(self, outputs: dict[str, Any], group: ImageBatch) -> None:
        if self._declared.task == "classify":
            self._classify(probabilities(outputs[self._output], self._declared), group)
            return
        found = decode_outputs(outputs, self._vision, group.placements)
        self._not_finite += sum(item.not_finite for item in found)
        if self._dataset.kind != "coco":
            self._predictions += sum(map(len, found))
            return
        from trt_engine.evaluation.coco_metrics import coco_results

        for item, detections in zip(group.items, found, strict=True):
            rows = coco_results(detections, item.image_id, self._mapping)
            self._predictions += len(rows)
            self.results += rows

    def _classify(self, scores: Array, group: ImageBatch) -> None:
        self._predictions += len(group)
        self._not_finite += int((~np.isfinite(scores)).any(axis=1).sum())
        if not self._dataset.labelled:
            return
        given = [item.label for item in group.items if item.label is not None]
        labels = [self._mapping.get(label, label) for label in given]
        wrong = [label for label in labels if not 0 <= label < scores.shape[1]]
        if wrong:
            raise UsageError(
                f"the dataset has the class {wrong[0]}, the model scores {scores.shape[1]} classes (0 to "
                f"{scores.shape[1] - 1})",
                hint="evaluate on the dataset the model was trained for",
            )
        self._accuracy.add(scores, labels)

    def result(self, image_ids: Sequence[int]) -> Evaluation:
        metrics: dict[str, float] = {}
        if self._dataset.kind == "coco":
            from trt_engine.evaluation.coco_metrics import coco_metrics

            metrics = coco_metrics(self._dataset.ground_truth, self._dataset.categories, image_ids, self.results)
        elif self._dataset.labelled:
            metrics = self._accuracy.metrics()
        samples = self._samples_ms or self._partial_ms
        facts, passport = self._runner.runtime_info, self._runner.engine.passport
        return Evaluation(
            engine=str(self._runner.engine.path),
            backend=passport.backend,
            device=facts["device"],
            metrics=metrics,
            batch=self._batch,
            latency_ms=summarize(samples),
            samples_ms=tuple(samples),
            precision=passport.precision,
            runtime_info=facts,
            predictions=self._predictions,
            not_finite=self._not_finite,
        )


@dataclass(slots=True)
class TopKAccuracy:
    """Running top-1 and top-5 counts."""

    images: int = 0
    top1: int = 0
    top5: int = 0

    def add(self, scores: Array, labels: Sequence[int]) -> None:
        """Add scores [N, C] with their true classes."""
        places = class_ranks(scores, labels)
        self.images += len(places)
        self.top1 += int((places < 1).sum())
        self.top5 += int((places < 5).sum())

    def metrics(self) -> dict[str, float]:
        count = max(self.images, 1)
        return {"top1": self.top1 / count, "top5": self.top5 / count}


def class_ranks(scores: Array, labels: Sequence[int]) -> npt.NDArray[np.int64]:
    """Rank of the true class in each row of scores [N, C], 0 is best; ties by index, NaN last."""
    values = np.nan_to_num(np.asarray(scores, np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    wanted = np.asarray(labels, np.int64)
    own = values[np.arange(len(values)), wanted][:, None]
    before = np.arange(values.shape[1])[None, :] < wanted[:, None]
    places: npt.NDArray[np.int64] = ((values > own) | ((values == own) & before)).sum(axis=1, dtype=np.int64)
    lost = np.isnan(np.asarray(scores, np.float64)[np.arange(len(values)), wanted])
    places[lost] = values.shape[1] + 5
    return places


def label_classes(labels: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Class index of each folder: by name where the model declares names, else in sorted order."""
    if not classes:
        return list(range(len(labels)))
    index = {name.casefold(): number for number, name in enumerate(classes)}
    missing = [name for name in labels if name.casefold() not in index]
    if missing:
        raise UsageError(
            f"the folder `{missing[0]}` is not a class of the model"
            + (f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""),
            hint=f"name folders as the model's classes: {', '.join(f'`{name}`' for name in list(classes)[:5])}, ...",
        )
    return [index[name.casefold()] for name in labels]
