"""Settings of `deploy`, one class for each target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trt_engine.config.settings import Config, opt


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig(Config):
    """Settings of `deploy triton`: how the models of the repository are scheduled."""

    sized: tuple[Path, ...] = opt(
        (), "folder of a `size` run: the engine it measured is batched as measured (repeatable)", parse=Path,
        metavar="DIR", multiple=True,
    )  # fmt: skip
    instances: int | None = opt(None, "execution instances of each model on a device [default: measured, else 1]", ge=1)
    max_wait_ms: float | None = opt(
        None, "longest wait of a request for others of its batch [default: measured, else 0]", metavar="MS", ge=0
    )
    warmup: bool = opt(True, "have Triton run the smallest, usual and largest batch before a model is ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepstreamConfig(Config):
    """Settings of `deploy deepstream`: the sources, and what the pipeline is sized by."""

    sized: tuple[Path, ...] = opt(
        (), "folder of a `size` run: streams, batch, timeout and interval as measured", parse=Path, metavar="DIR",
        multiple=True,
    )  # fmt: skip
