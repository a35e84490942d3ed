"""Results of `size`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.base import Finding, StepTime
from trt_engine.records.bench import Protocol
from trt_engine.records.percentiles import Summary
from trt_engine.records.streams import StreamCapacity, VideoCapacity


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One measured batch size of `size`, without transfers."""

    batch: int
    qps: float
    images_per_s: float
    per_image_ms: float
    """Mean compute time over the batch."""
    compute_ms: Summary
    engine: str
    stable: bool = True
    instability: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CliffPoint:
    """One batch size of a cliff scan."""

    batch: int
    images_per_s: float
    expected_images_per_s: float | None
    """Throughput interpolated from neighbours (`trt_engine.verbs.size.curve`); None without any."""
    cliff: bool
    """True when it fell short twice."""
    engine: str = ""
    measured: int = 1
    """Number of measurements: a suspected cliff is measured twice."""


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One pre-flight check: subject, status, result."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SizeReport(RichDisplay):
    """Report of `size`. For an interrupted or failed run: the results so far, `complete` false."""

    model: str
    """The path of the ONNX file, as it was given."""
    engine: str | None
    device: str
    backend: str
    precision: str
    """The engine's main dtype; without an engine the requested precision, or `as the graph is`."""
    peak_streams: int | None
    """`floor(images_per_s / fps)`: an upper bound."""
    images_per_s: float | None
    """Queries per second times the batch, of the final N."""
    fps: float
    batches: tuple[BatchResult, ...]
    """Batch 1 first, then the final N; the steps of the doubling are in `all_batches`."""
    stop_reason: Literal["peak_within_batch", "max_batch", "out_of_memory", "static_batch", "interrupted", "failed"]
    """Why the doubling ended. `peak_within_batch`: `peak_streams` is at most N; `max_batch`: 2 N is above `--max-batch`;
    `static_batch`: the model has one batch."""
    engines_built: int
    """Engines of the doubling and of the scan."""
    measurements: int
    """Finished measurements of the doubling and of the scan."""
    steps: tuple[StepTime, ...]
    protocol: Protocol | None
    environment: Environment
    artifacts: dict[str, str]
    all_batches: tuple[BatchResult, ...] = ()
    """Every engine of the doubling at its largest batch."""
    cliffs: tuple[CliffPoint, ...] = ()
    """Every batch of the scan; empty without `--scan`."""
    complete: bool = True
    model_name: str = ""
    out_of_memory: tuple[int, ...] = ()
    """Batch sizes that did not fit, in the order tried."""
    scan_engines: int = 0
    """Number of `engines_built` for the scan alone."""
    scan_measurements: int = 0
    """Number of `measurements` for the scan."""
    slow_batches: tuple[int, ...] = ()
    """Batch sizes the scan found to be cliffs."""
    preflight: tuple[PreflightCheck, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """Caveats of the figures: precision, fall-backs, limits reached."""
    warnings: tuple[str, ...] = ()
    nvinfer: dict[str, str] = field(default_factory=dict)
    """Keys of DeepStream's nvinfer for this model, once built with TensorRT; none where no input is an image."""
    nvinfer_notes: tuple[str, ...] = ()
    """Keys whose value is unknown, and settings without a key."""
    error: str | None = None
    """Error that ended an incomplete run."""
    capacity: StreamCapacity | None = None
    """Streams within the deadline, with `deadline_ms`."""
    video: VideoCapacity | None = None
    """Cameras measured with clips, with `video`."""

    @property
    def best(self) -> BatchResult | None:
        """The measurement with the most images a second: batch 1 where that delivers more than the doubling's last N."""
        return max((*self.all_batches, *self.batches), key=lambda result: result.images_per_s, default=None)
