"""Results of `infer`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from trt_engine.display import RichDisplay


@dataclass(frozen=True, slots=True)
class OutputSummary:
    """Statistics of one output; None where it has no finite values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    min: float | None
    """`min`, `max` and `mean` are over finite values."""
    max: float | None
    mean: float | None
    not_finite: int
    """Number of NaN or infinite values."""


class Detection(msgspec.Struct, frozen=True):
    """One object detected in an image, or (without a box) one class of it."""

    index: int = msgspec.field(name="class")
    name: str
    score: float
    """Confidence, 0 to 1."""
    box: tuple[float, float, float, float] | UnsetType = UNSET
    """Left, top, right, bottom in image pixels."""


@dataclass(frozen=True, slots=True)
class InferReport(RichDisplay):
    """Report of one `infer` call."""

    engine: str
    """The engine's path."""
    backend: str
    device: str
    inputs: str
    """Source of the inputs: a file's name, or `seeded random, seed 0`."""
    shapes: dict[str, tuple[int, ...]]
    first_ms: float
    """The first inference, by the host's clock around the call, copies included."""
    median_ms: float | None
    """Median without the first inference; None for a single one."""
    samples_ms: tuple[float, ...]
    outputs: tuple[OutputSummary, ...]
    runtime_info: dict[str, str]
    artifacts: dict[str, str]
    detections: tuple[Detection, ...] | UnsetType = UNSET
    """Detections of an image, best first."""
    classes: tuple[Detection, ...] | UnsetType = UNSET
    """Classes of an image, best first."""
    image_size: tuple[int, int] | UnsetType = UNSET
    """Image width and height in pixels."""


@dataclass(frozen=True, slots=True)
class InferPlan(RichDisplay):
    """Report of `infer --dry-run`: what would be run, built and written."""

    engine: str
    needs_build: bool
    """A model's engine comes from the store, or is built into it."""
    inputs: str
    """Source of the inputs."""
    outputs: tuple[str, ...]
    """Names of the outputs."""
    writes: tuple[str, ...]
    dry_run: bool = True
