"""Settings of `size`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trt_engine.config.bench import PROTOCOLS
from trt_engine.config.parse import parse_batch_sizes, parse_bytes, parse_count
from trt_engine.config.settings import Config, opt
from trt_engine.config.streams import (
    LEAST_FPS,
    BatchPolicy,
    SourceGroup,
    format_policy,
    format_sources,
    parse_policy,
    parse_share,
    parse_sources,
)
from trt_engine.units import parse_duration

_STREAMS = "Streams within a deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig(Config):
    """Settings of `size`: how far engine batches are doubled, and the limits of each measurement."""

    GROUP: ClassVar[str] = "Measure"

    out: Path | None = opt(
        None, "write directly into this folder [default: next to the model, or a run folder under runs/]",
        flags="-o --out", parse=Path, group="Output",
    )  # fmt: skip
    start_batch: int = opt(64, "the first engine's largest batch", ge=1)
    max_batch: int = opt(1024, "stop doubling here (and start here when it is lower than the start)", ge=1)
    fps: float = opt(30.0, "frames per second of one stream", ge=LEAST_FPS)
    duration_s: float = opt(10.0, "length of each measurement", parse=parse_duration, metavar="TIME", gt=0)
    warmup_s: float = opt(
        1.0, "run this long before each measurement", flags="--warmup", parse=parse_duration, metavar="TIME", ge=0
    )
    scan: bool = opt(False, "look for batch sizes that are much slower than their neighbours (N +- `--scan-width`)")
    scan_width: int = opt(8, "how far the scan goes to each side", ge=1)
    memory_limit: int | None = opt(
        None, "memory one measurement may take, as 8GiB [default: what is free]", parse=parse_bytes, metavar="SIZE",
        to_text=lambda nbytes: f"{nbytes}B", ge=1,
    )  # fmt: skip
    protocol: str = opt("trt-engine", "the named set of measuring rules", choices=PROTOCOLS)
    min_streams: int | None = opt(
        None, "end with exit code 12 when fewer streams than this are sustained", parse=parse_count, metavar="N", ge=0
    )
    strict: bool = opt(False, "end with exit code 9 when a measurement is not stable")
    overwrite: bool = opt(False, "overwrite existing files", group="Output")
    deadline_ms: float | None = opt(
        None, "count the streams whose frames are inferred within this time", flags="--deadline-ms", metavar="MS", gt=0,
        group=_STREAMS,
    )  # fmt: skip
    late: float | None = opt(
        None,
        "share of frames that may be late or dropped [default: 0.1%; with `--video` 1%]",
        parse=parse_share,
        metavar="SHARE",
        group=_STREAMS,
    )
    video: Any = opt(
        (), "measure the whole path with clips as cameras, a file or a folder (repeatable)", multiple=True,
        metavar="CLIP", accepts="Sequence[Path | str]", group=_STREAMS,
    )  # fmt: skip
    sources: tuple[SourceGroup, ...] | None = opt(
        None, "sources by frame rate, as 200@25,50@30: how many GPUs they need", parse=parse_sources, metavar="N@FPS",
        to_text=format_sources, group=_STREAMS,
    )  # fmt: skip
    spare_gpus: int = opt(0, "GPUs that may fail", ge=0, group=_STREAMS)
    policy: BatchPolicy | None = opt(
        None, "batching policy, as 8,5ms or 8,5ms,2 (rows, wait, contexts) [default: the best found]", parse=parse_policy,
        metavar="ROWS,WAIT", to_text=format_policy, group=_STREAMS,
    )  # fmt: skip
    contexts: tuple[int, ...] = opt(
        (1, 2), "batches at once to measure and to choose from", parse=parse_batch_sizes, metavar="N,N", group=_STREAMS
    )
    frames: str = opt(
        "host", "where frames arrive: `device` leaves their upload out", choices=("host", "device"), group=_STREAMS
    )
    interval: int = opt(0, "frames of a source to skip between two inferred ones", ge=0, group=_STREAMS)
    jitter_ms: float = opt(
        0.0, "uniform jitter of the arrivals, to each side", flags="--jitter-ms", metavar="MS", ge=0, group=_STREAMS
    )
    arrivals: Path | None = opt(
        None,
        "measured arrival times of one source, in seconds, one per line",
        parse=Path,
        metavar="FILE",
        group=_STREAMS,
    )
    codec: str | None = opt(None, "include the GPU's decoders", choices=("h264", "hevc", "vp9", "av1"), group=_STREAMS)
    then: Path | None = opt(
        None, "second model of a cascade, which takes `--crops` of every inferred frame: measured first, or the folder of "
        "its own `size` run", parse=Path, metavar="MODEL|DIR", group=_STREAMS,
    )  # fmt: skip
    crops: int = opt(0, "objects of each inferred frame that the model of `--then` takes", ge=0, group=_STREAMS)
    curve: Path | None = opt(
        None, "reuse this `curve.jsonl` of the same engine and machine", parse=Path, metavar="FILE", group=_STREAMS
    )
    verify_s: float | None = opt(
        None, "drive the engine with that many paced sources for this time", flags="--verify", parse=parse_duration,
        metavar="TIME", gt=0, group=_STREAMS,
    )  # fmt: skip

    @property
    def allowed_late(self) -> float:
        """Share of frames that may be late, 0 to 1."""
        return self.late if self.late is not None else 0.01 if self.video else 0.001
