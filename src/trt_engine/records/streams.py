"""Streams within a deadline: the measured latency curve, and the answer of `size --deadline-ms`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_engine.config.streams import BatchPolicy, SourceGroup
from trt_engine.environment import Environment
from trt_engine.records.infer import VideoSource

FrameMemory = Literal["host", "device"]
"""Where a frame is when it arrives: uploaded as part of its batch, or already on the device."""
Limit = Literal["compute", "deadline", "upload", "decode"]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Times of full batches with all contexts busy, in ms, one tuple for each turn of the measurement.

    `host`: the cycle of one worker of the batcher (concatenation, upload, inference, download, splitting, hand-over).
    `device`: the inference alone.
    """

    engine_digest: str
    device: str
    batch: int
    contexts: int
    frames: FrameMemory
    turns_ms: tuple[tuple[float, ...], ...]
    environment: Environment
    started: str
    """UTC, ISO 8601."""
    graphs: str = ""
    """`on` where each batch replayed a CUDA graph, as it then does under load, padded to the next batch measured; `none` and
    the reason where none could be captured; empty where none was wanted."""

    @property
    def samples(self) -> int:
        return sum(map(len, self.turns_ms))


@dataclass(frozen=True, slots=True)
class CurveSummary:
    """One point of the curve as reported; the samples are in `curve.jsonl`."""

    batch: int
    contexts: int
    frames: FrameMemory
    """`host`: the batcher's whole cycle, upload included; `device`: the inference alone."""
    samples: int
    """Number of timed batches."""
    median_ms: float
    """Time of one batch, as `p99_ms`."""
    p99_ms: float
    rows_per_s: float
    """Rows/s of all contexts together, from the mean time."""


@dataclass(frozen=True, slots=True)
class SharePoint:
    """Predicted share of late frames for a number of sources."""

    streams: int
    late_share: float
    """Fraction of late or dropped frames, 0 to 1."""


@dataclass(frozen=True, slots=True)
class PolicyCapacity:
    """The largest number of sources under one policy, and its late share around that number."""

    label: str
    policy: BatchPolicy
    streams: int
    """The largest number of sources within the deadline, decoding not counted."""
    points: tuple[SharePoint, ...]


@dataclass(frozen=True, slots=True)
class GpuCount:
    """GPUs for the requested sources: `needed` carry them within the deadline, `spare` may fail."""

    sources: tuple[SourceGroup, ...]
    """The sources of all GPUs together."""
    needed: int
    """Fewest GPUs, also for decoding where a codec is given; `total` is with `spare`."""
    spare: int
    total: int
    late_share: float
    """Predicted on the `needed` GPUs."""


@dataclass(frozen=True, slots=True)
class DecodeLimit:
    """Published decoder throughput of the GPU, at 1920x1080."""

    codec: str
    architecture: str
    """Decoder generation: `Turing`, `Ada`, `Blackwell`."""
    decoders: int
    """NVDECs of one GPU."""
    frames_per_s: float
    """All decoders of one GPU together."""
    streams: int
    """Sources that they decode, every frame of each."""
    source: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The engine driven through the batcher with paced sources, and the prediction for the same arrivals."""

    streams: int
    duration_s: float
    policy: BatchPolicy
    frames: int
    """Submitted frames."""
    late: int
    """Frames answered after the deadline."""
    dropped: int
    """Frames without an answer."""
    observed_share: float
    """Late and dropped frames over all frames."""
    predicted_share: float
    """The same by the simulation."""
    observed_p50_ms: float | None
    """Latency of the answered frames; None if every frame was dropped."""
    predicted_p50_ms: float
    observed_p99_ms: float | None
    predicted_p99_ms: float
    observed_batch_ms: float | None
    """Mean time of the batches; None with more than one context, where batches slow each other down."""
    predicted_batch_ms: float | None
    """The curve's, for batches of the same rows."""
    passed: bool
    """The observed share is within the allowed one."""


@dataclass(frozen=True, slots=True)
class StreamCapacity:
    """The largest number of sources on one device with at most `late` of the frames late or dropped."""

    deadline_ms: float
    """From the arrival of a frame to its result."""
    late: float
    """Allowed share of late or dropped frames."""
    frames: FrameMemory
    """`host`: frames are uploaded with their batch; `device`: they are on the device already."""
    mix: tuple[SourceGroup, ...]
    """The sources of the answer: the requested ones, in proportion."""
    interval: int
    """Frames of each source skipped between two inferred ones."""
    streams: int
    """The largest number of sources; 0 if not even one is within the deadline."""
    low: int
    """Lower end of the interval of `streams`."""
    high: int
    confidence: float
    """Confidence of the interval `low` to `high`, 0 to 1, by bootstrap over the turns and samples of the curve."""
    policy: BatchPolicy
    """The batching policy that carries most sources, or the given one."""
    late_share: float
    """Predicted for `streams` sources, the mean over their phases."""
    late_share_p90: float
    """The same for phases that only one site in ten has worse."""
    limit: Limit
    """What more of would carry more sources."""
    limit_reason: str
    upper_bound: int
    """Streams from compute alone, `floor(images/s / fps)` of the fastest point measured, for the same sources."""
    policies: tuple[PolicyCapacity, ...]
    """The chosen policy first, then usual first choices."""
    curve: tuple[CurveSummary, ...]
    """Every measured point, of both kinds of frames."""
    deepstream: dict[str, str]
    """Keys of nvstreammux and nvinfer for `policy`."""
    batching: str
    """The settings as Python, for `te.load`."""
    gpus: GpuCount | None = None
    """For `--sources`; None without, and where one source is too many for one GPU."""
    decode: DecodeLimit | None = None
    """For `--codec`; None without, and for a GPU or codec without published figures."""
    verification: Verification | None = None
    crops: int = 0
    """Rows of a second model for each inferred frame, on the same device."""
    crop_curve: tuple[CurveSummary, ...] = ()
    """Latencies of the second model."""


@dataclass(frozen=True, slots=True)
class VideoRun:
    """One number of paced sources, for one duration."""

    streams: int
    frames: int
    """Frames that arrived while it was measured."""
    late: int
    """Answered after the deadline."""
    dropped: int
    """Not answered: a newer frame of the source was there first."""
    late_blocks: tuple[float, ...]
    """Share of late and dropped frames in each second, 0 to 1."""
    worst_share: float
    """The share of the source that fared worst, 0 to 1."""
    p50_ms: float | None
    """Latency of the answered frames, from arrival to decoded result; None without any."""
    p99_ms: float | None
    busy_cores: float
    """CPU time of the process over the duration."""
    other_cores: float
    """The same of everything else on the machine."""
    parts: dict[str, float]
    """CPU time of a frame in ms by part: `decoder`, `pre-processing`, `engine`, `post-processing` and `host` (queues,
    hand-over, pacing), which is the process without the others; of a cascade also `crops` (cut and prepared) and `second
    engine`."""
    crops: float = 0.0
    """Mean number of crops of a frame that the second model of a cascade took."""

    @property
    def cpu_ms(self) -> float:
        """CPU time of the process for a frame."""
        return sum(self.parts.values())

    @property
    def late_share(self) -> float:
        """Late and dropped frames over all frames."""
        return (self.late + self.dropped) / max(1, self.frames)


VideoLimit = Literal[
    "decoder", "copy", "pre-processing", "engine", "crops", "second engine", "post-processing", "host", "deadline", "none"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class VideoCapacity:
    """The largest number of clips played as cameras, decoded, inferred and decoded again in time: measured."""

    sources: tuple[VideoSource, ...]
    deadline_ms: float
    """From the arrival of a frame's last packet to its decoded result."""
    late: float
    """Allowed share of late or dropped frames."""
    streams: int
    """The largest number within the deadline; 0 if not even one is."""
    low: int
    """Lower end of the interval of `streams`: the largest number tried that is within the allowed share for certain."""
    high: int
    """Upper end: below the smallest number tried that is beyond it for certain."""
    confidence: float
    """Confidence of `low` and `high`, 0 to 1, from the shares of the seconds."""
    policy: BatchPolicy
    cores: int
    """CPU cores that the process may use."""
    limit: VideoLimit
    """What more of would carry more sources; `none` where the search ended at its largest number."""
    limit_reason: str
    part_streams: dict[str, float]
    """Part -> streams that all cores would carry with this part alone. On a GPU: that its decoders, preparation, engine and
    copies of outputs each carry alone, measured, and what one core of each process carries of the rest, in Python."""
    runs: tuple[VideoRun, ...]
    """In the order measured."""
    processes: int = 1
    """That share the cameras, each with the engine: more than one where Python's lock would be a GPU's limit."""
