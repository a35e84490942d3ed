"""How good an engine is on a dataset, beside a baseline on the same pictures, batch by batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.engine import OutputError
from trt_engine.equivalence.compare import worst_of
from trt_engine.equivalence.sorted_outputs import compare_outputs
from trt_engine.equivalence.tolerance import TOLERANCES
from trt_engine.errors import ShapeError, UsageError
from trt_engine.evaluation.classify import Hits, class_of_labels
from trt_engine.records import Evaluated, summarize
from trt_engine.runtime.instance import InferenceEngine
from trt_engine.vision.datasets import Batch, Dataset, Reader, Skip
from trt_engine.vision.declaration import Vision
from trt_engine.vision.decode import decode_detections, probabilities
from trt_engine.vision.preprocess import Preprocessor

__all__ = ["Evaluation", "evaluate_runner", "rows_of"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
"""Told the pictures done and their number."""

_USUAL_BATCH = 8
_SAID_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate_runner` found."""

    engine: Evaluated
    baseline: Evaluated | None
    parity: dict[str, OutputError] | None
    images: int
    skipped: tuple[Skip, ...]
    digest: str
    batch: int
    results: list[dict[str, Any]] = field(default_factory=list)
    """The engine's detections in COCO's result form."""


def evaluate_runner(
    runner: InferenceEngine,
    dataset: Dataset,
    vision: Vision,
    *,
    batch: int | None = None,
    baseline: InferenceEngine | None = None,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Run every readable picture through the engine (and the baseline), and work out the figures of each.

    Raises `UsageError` when dataset, declaration and engine do not belong together. Classes the dataset does not have
    do not count.
    """
    _check_kinds(dataset, vision, baseline is not None)
    low, high = rows_of(runner, vision)
    size = batch or min(max(low, _USUAL_BATCH), high)
    if not low <= size <= high:
        only = f"takes batches of {low} only" if low == high else f"takes {low} to {high}"
        raise ShapeError(
            f"the batch is {size}, `{runner.engine.path.name}` {only}", hint=f"`--batch {min(max(size, low), high)}`"
        )
    mapping = _mapping(dataset, vision)
    sides = [_Side(item, dataset, vision, mapping, size) for item in (runner, baseline) if item is not None]
    dtype = vision.input_of(runner.signature).dtype
    reader = Reader(dataset, Preprocessor(vision.preprocess, dtype), size)
    worst: dict[str, list[OutputError]] = {}
    weights: list[int] = []
    total, said = len(dataset.items), time.monotonic()
    image_ids: list[int] = []
    for group in reader:
        outputs = [side.take(group) for side in sides]
        if baseline is not None:
            weights.append(len(group))
            # rows that a network sorts by score may change places between two engines
            ranked = list(outputs[1]) if vision.postprocess.decode == "yolov10" else []
            for name, error in compare_outputs(outputs[0], outputs[1], ranked, TOLERANCES["quantized"]).items():
                worst.setdefault(name, []).append(error)
        image_ids += [item.image_id for item in group.items]
        if on_progress is not None:
            on_progress(reader.images, total)
        if time.monotonic() - said > _SAID_EVERY_S:
            said = time.monotonic()
            log.info("%d of %d pictures", reader.images, total)
    if not reader.images:
        reasons = "; ".join(f"`{item.name}`: {item.reason}" for item in reader.skipped[:3])
        raise UsageError(
            f"none of the {total} pictures of `{dataset.path}` can be used ({reasons})",
            hint="open one of them, and look at its size and format",
        )
    found = [side.result(image_ids) for side in sides]
    return Evaluation(
        engine=found[0],
        baseline=found[1] if baseline is not None else None,
        parity={name: worst_of(errors, weights) for name, errors in worst.items()} if baseline is not None else None,
        images=reader.images,
        skipped=tuple(reader.skipped),
        digest=reader.digest,
        batch=size,
        results=sides[0].results,
    )


def rows_of(runner: InferenceEngine, vision: Vision) -> tuple[int, int]:
    """The smallest and the largest batch the engine takes."""
    spec = vision.input_of(runner.signature)
    if spec.shape[0] >= 0:
        return spec.shape[0], spec.shape[0]
    spans = [profile.ranges[spec.name] for profile in runner.profiles if spec.name in profile.ranges]
    if not spans:
        return 1, _USUAL_BATCH
    return min(span.min[0] for span in spans), max(span.max[0] for span in spans)


def _check_kinds(dataset: Dataset, vision: Vision, has_baseline: bool) -> None:
    task = vision.postprocess.task
    if not dataset.labelled and not has_baseline:
        raise UsageError(
            f"`{dataset.path}` has pictures without labels", hint="`--baseline ENGINE` compares outputs without labels"
        )
    if dataset.labelled and (dataset.kind == "coco") != (task == "detect"):
        wanted = "COCO annotations" if task == "detect" else "a folder for each class, or an .npz of images and labels"
        raise UsageError(
            f"`{dataset.path}` is a dataset of the kind `{dataset.kind}`, the model is declared to `{task}`",
            hint=f"expected {wanted}",
        )


def _mapping(dataset: Dataset, vision: Vision) -> dict[int, int]:
    """COCO: the category of each class. Folders: the class of each label. Else nothing."""
    classes = vision.postprocess.classes
    if dataset.kind == "coco":
        from trt_engine.evaluation.coco import category_ids  # its library is not needed for classifiers

        return category_ids(classes, dataset.categories)
    if dataset.kind == "folders":
        return dict(enumerate(class_of_labels(dataset.labels, classes)))
    return {}


class _Side:
    """One engine: runs batches of the size it takes, and collects what they come to."""

    def __init__(
        self, runner: InferenceEngine, dataset: Dataset, vision: Vision, mapping: dict[int, int], batch: int
    ) -> None:
        vision.check(runner.signature)
        self.results: list[dict[str, Any]] = []
        self._runner = runner
        self._dataset = dataset
        self._declared = vision.postprocess
        self._input = vision.input_of(runner.signature)
        self._output = vision.output_of(runner.signature).name
        self._low, high = rows_of(runner, vision)
        self._batch = min(max(batch, self._low), high)  # a baseline of another batch runs a group in pieces
        self._samples_ms: list[float] = []
        self._partial_ms: list[float] = []
        self._warm = False
        self._predictions = self._not_finite = 0
        self._hits = Hits()
        self._mapping = mapping

    def take(self, group: Batch) -> dict[str, Any]:
        """Run one batch and score it; the outputs."""
        pixels = group.pixels
        if pixels.dtype.name != self._input.dtype:  # a baseline with another input type
            from trt_engine.runtime.feeds import numpy_dtype

            pixels = pixels.astype(numpy_dtype(self._input.dtype))
        pieces = [self._run(pixels[start : start + self._batch]) for start in range(0, len(pixels), self._batch)]
        outputs = pieces[0]
        if len(pieces) > 1:
            outputs = {name: np.concatenate([np.atleast_1d(piece[name]) for piece in pieces]) for name in outputs}
        self._score(outputs[self._output], group)
        return outputs

    def _run(self, pixels: Array) -> dict[str, Any]:
        """One query; rows that only fill it up are cut off again."""
        count = len(pixels)
        if count < self._low:
            pixels = np.concatenate([pixels, np.repeat(pixels[-1:], self._low - count, axis=0)])
        feeds = {self._input.name: pixels}
        if not self._warm:  # the first call pays for allocations
            self._runner.infer(feeds)
            self._warm = True
        answer = self._runner.infer(feeds, result=True)
        if not answer.success:
            self._runner.infer(feeds)  # raises what went wrong
        (self._samples_ms if len(pixels) == self._batch else self._partial_ms).append(answer.latency_ms)
        rows = len(pixels)
        return {
            name: value[:count] if value.ndim and len(value) == rows else value
            for name, value in answer.outputs.items()
        }

    def _score(self, output: Array, group: Batch) -> None:
        if self._declared.task == "classify":
            self._classify(probabilities(output, self._declared), group)
            return
        found = decode_detections(output, self._declared, group.places)
        self._not_finite += sum(item.not_finite for item in found)
        if self._dataset.kind != "coco":
            self._predictions += sum(map(len, found))
            return
        from trt_engine.evaluation.coco import results_of

        for item, detections in zip(group.items, found, strict=True):
            rows = results_of(detections, item.image_id, self._mapping)
            self._predictions += len(rows)
            self.results += rows

    def _classify(self, scores: Array, group: Batch) -> None:
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
                hint="evaluate on the dataset the model was made for",
            )
        self._hits.add(scores, labels)

    def result(self, image_ids: Sequence[int]) -> Evaluated:
        metrics: dict[str, float] = {}
        if self._dataset.kind == "coco":
            from trt_engine.evaluation.coco import figures

            metrics = figures(self._dataset.truth, self._dataset.categories, image_ids, self.results)
        elif self._dataset.labelled:
            metrics = self._hits.metrics()
        samples = self._samples_ms or self._partial_ms
        facts, passport = self._runner.facts, self._runner.engine.passport
        return Evaluated(
            engine=str(self._runner.engine.path),
            backend=passport.backend,
            device=facts["device"],
            metrics=metrics,
            batch=self._batch,
            latency_ms=summarize(samples),
            samples_ms=tuple(samples),
            precision=passport.precision,
            facts=facts,
            predictions=self._predictions,
            not_finite=self._not_finite,
        )
