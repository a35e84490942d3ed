"""Settings of `batch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trt_engine.config.precision import PREPROCESS_METAVAR
from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(Config):
    """Settings of a batch job: rows of an inference and of a part, workers, what is written of an image."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.min_score > 1:
            raise UsageError(f"`--min-score` is {self.min_score}, expected 0 to 1", hint="`--min-score 0.25`")

    batch: int | None = opt(None, "rows of an inference [default: 8, within the profile]", ge=1)
    part_rows: int = opt(1000, "rows of a part: what is done again after an interruption", ge=1)
    workers: int | None = opt(
        None, "processes that run the engine [default: one for each GPU, on CPUs one for each node]", ge=1
    )
    address: str | None = opt(
        None, "a running Ray cluster, `auto` for that of this machine [default: one of its own]", metavar="HOST:PORT"
    )
    raw: bool = opt(False, "of an image too, the outputs as arrays instead of detections or classes")
    min_score: float = opt(0.25, "of an image: minimum score of a detection", ge=0)
    top: int = opt(5, "of an image: the N best classes", ge=1)
    preprocess: Any = opt(
        None, "of images: instead of the declared one", metavar=PREPROCESS_METAVAR, group="Input",
        accepts="VisionSource | None",
    )  # fmt: skip
    overwrite: bool = opt(False, "replace another job in the folder", group="Output")
