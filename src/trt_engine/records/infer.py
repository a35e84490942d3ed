"""Results of `infer`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

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


class Mask(msgspec.Struct, frozen=True):
    """Pixels of one object, as COCO's compressed run lengths."""

    size: tuple[int, int]
    """Height and width of the image."""
    counts: str


class Detection(msgspec.Struct, frozen=True, omit_defaults=True):
    """One object detected in an image, or (without a box) one class of it."""

    index: int = msgspec.field(name="class")
    name: str
    score: float
    """Confidence, 0 to 1."""
    box: tuple[float, float, float, float] | None = None
    """Left, top, right, bottom in image pixels."""
    mask: Mask | None = None
    keypoints: tuple[tuple[float, ...], ...] | None = None
    """x, y in image pixels, and a score where the network gives one."""


@dataclass(frozen=True, slots=True)
class VideoSource:
    """What a container states about its video."""

    path: str
    """The path, or the address without its password."""
    codec: str
    width: int
    """Stored width in pixels, before a rotation; `height` likewise."""
    height: int
    fps: float
    """Mean frame rate; 25 where it is not stated."""
    frames: int | None
    """Number of frames, as stated or by the duration; None where neither is."""


@dataclass(frozen=True, slots=True)
class VideoSummary:
    """What was found in the frames of a video."""

    source: VideoSource
    frames: int
    """Frames inferred: all that could be decoded."""
    damaged_packets: int
    """Packets that could not be decoded, or gave damaged frames."""
    reconnects: int
    """How often a camera was connected again."""
    ended: str | None
    """Why the video ended early."""
    wall_s: float
    """From the first packet to the last file."""
    objects: dict[str, tuple[int, int]]
    """Class -> objects in all frames together, and at most in one; the most frequent first. Nothing is tracked."""


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
    detections: tuple[Detection, ...] | None = None
    """Detections of an image, best first."""
    classes: tuple[Detection, ...] | None = None
    """Classes of an image, best first."""
    image_size: tuple[int, int] | None = None
    """Image width and height in pixels."""
    video: VideoSummary | None = None
    """What was found in a video; the samples are then times of batches."""
