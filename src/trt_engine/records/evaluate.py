"""Results of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.parity import OutputError
from trt_engine.records.passport import Precision
from trt_engine.records.percentiles import Summary


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """A skipped image and the reason."""

    name: str
    reason: str


MAIN_METRIC = {"detect": "AP", "classify": "top1"}
"""The figure a gate looks at, by task."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One engine over a dataset: how good, how fast, on what."""

    engine: str
    backend: str
    device: str
    metrics: dict[str, float]
    """AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm, ARl (-1: nothing of that kind), or top1 and top5; empty for
    images without labels."""
    batch: int
    """Images per query; a baseline uses the batches it supports."""
    latency_ms: Summary | None
    """Time per batch: device events where the device has them, else the host's clock around the call."""
    samples_ms: tuple[float, ...]
    precision: Precision
    """Requested and measured precision."""
    runtime_info: dict[str, str]
    predictions: int
    not_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport(Evaluation, RichDisplay):
    """Report of `evaluate`: an engine over a dataset, and a baseline over the same images."""

    task: Literal["detect", "classify"]
    """`detect`: COCO metrics; `classify`: top1 and top5."""
    images: int
    """Number of evaluated images."""
    skipped: int
    """Number of images that could not be read or do not fit."""
    skipped_images: tuple[SkippedImage, ...]
    """The first hundred of them, with the reason."""
    per_image_ms: float | None
    """Mean time per batch over the batch; None with fewer images than one batch."""
    dataset: str
    dataset_kind: Literal["coco", "folders", "arrays", "pictures"]
    dataset_digest: str
    """SHA-256 over names and bytes of the images, in order."""
    max_samples: int | None
    """Limit of the images; None for all."""
    seed: int | None
    """Seed of their selection; None for the first ones."""
    vision: dict[str, Any]
    """The pre- and post-processing in force, and where it was declared."""
    environment: Environment
    wall_s: float
    started: str
    """UTC, ISO 8601."""
    artifacts: dict[str, str]
    baseline: Evaluation | None = None
    metric_drop: dict[str, float] | None = None
    """Baseline less engine, by figure."""
    parity: dict[str, OutputError] | None = None
    """Output errors against the baseline: worst batch, by output."""
    max_drop: float | None = None
    """Largest allowed drop of the main figure; None without a gate."""
    passed: bool | None = None
    """Whether the main figure (AP or top1) dropped by no more than `max_drop`; None without a gate."""
    warnings: tuple[str, ...] = ()
