"""Settings of loading and batching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trt_engine.config.parse import device_name, parse_batch_sizes, parse_bytes, parse_graphs, parse_names
from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.units import parse_duration


@dataclass(frozen=True, slots=True)
class Batching(Config):
    """Dynamic batching settings: at most `max_batch` rows, waiting at most `max_wait_ms`."""

    def __post_init__(self) -> None:
        check_limits(self)
        parse_batch_sizes(self.buckets)

    max_batch: int | None = opt(None, "rows in one batch [default: what the engine takes, else 32]", flags="", ge=1)
    max_wait_ms: float = opt(2.0, "how long a request may wait for others, from its arrival", flags="", ge=0)
    max_rows_waiting: int | None = opt(
        None, "rows that may wait; more are refused [default: 64 batches]", flags="", ge=1
    )
    max_bytes_waiting: int | None = opt(
        None, "bytes of inputs that may wait; more are refused", flags="", parse=parse_bytes, ge=1
    )
    buckets: tuple[int, ...] = opt(
        (), "sizes batches are padded to [default: what the engine needs]", flags="", parse=parse_batch_sizes
    )
    priority_ms: float = opt(100.0, "the head start one step of priority gives", flags="", ge=0)
    workers: int | None = opt(
        None, "batches at work at once [default: as many as the engine has contexts]", flags="", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(Config):
    """Runtime settings."""

    GROUP: ClassVar[str] = "Advanced"

    device: str | None = opt(
        None, "the device to run on [default: the one the engine was built for]", parse=device_name, metavar="cpu|cuda:N",
        group="Build",
    )  # fmt: skip
    contexts: int = opt(1, "inferences in flight at once on backends with contexts", ge=1)
    streams: int | None = opt(None, "device streams [default: one for each context]", ge=1)
    graphs: bool | tuple[int, ...] | None = opt(
        None,
        "capture a graph for each shape; sizes: batches are padded to these first [default: off; `size` and `serve` on a "
        "GPU: sizes up to the largest batch]",
        flags="",
        parse=parse_graphs,
    )
    max_graphs: int = opt(16, "graphs kept for each context; the least recently used one goes", flags="", ge=1)
    max_waiting: int | None = opt(None, "callers that may wait for a context; more are refused", flags="", ge=0)
    wait_timeout_s: float | None = opt(
        None, "how long a caller may wait for a context", flags="", parse=parse_duration, gt=0
    )
    providers: tuple[str, ...] = opt(
        (), "ONNX Runtime's providers in order of preference, as cuda,cpu", parse=parse_names,
        metavar="cpu|cuda|tensorrt|tensorrt-rtx",
    )  # fmt: skip
    allow_fallback: bool = opt(False, "let a provider that cannot run be replaced by the next; it is recorded")
    options: dict[str, str] = opt(
        {}, "the backend's own settings", flags="-O --option", metavar="NAME=VALUE", multiple=True
    )
    batching: Batching | None = None
