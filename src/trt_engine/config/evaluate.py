"""Settings of `evaluate` and `infer`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_engine.config.parse import parse_shapes
from trt_engine.config.precision import PREPROCESS_METAVAR
from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.errors import UsageError
from trt_engine.tensors import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(Config):
    """Settings of an evaluation: which images, what to compare with, what to write."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_drop is not None and self.baseline is None:
            raise UsageError("`max_drop` compares with a baseline, and none is given", hint="`--baseline ENGINE`")
        if self.max_drop is not None and not 0 <= self.max_drop <= 1:
            raise UsageError(
                f"`max_drop` is {self.max_drop}, expected 0 to 1", hint="`--max-drop 0.01` is one point of AP"
            )

    batch: int | None = opt(None, "images per query [default: 8, within the profile]", ge=1)
    max_samples: int | None = opt(None, "at most N images [default: all]", ge=1)
    seed: int | None = opt(None, "with `--max-samples`: random images [default: the first N]", ge=0)
    baseline: Any = opt(
        None, "also evaluate this baseline on the same images", metavar="ENGINE|MODEL",
        accepts="Engine | Path | str | None",
    )  # fmt: skip
    max_drop: float | None = opt(None, "exit code 7 when AP or top-1 drops by more than X")
    preprocess: Any = opt(
        None, "Pre- and post-processing, instead of the declared one", metavar=PREPROCESS_METAVAR, group="Input",
        accepts="VisionSource | None",
    )  # fmt: skip
    save_predictions: Path | None = opt(None, "write detections in COCO's results format", parse=Path, metavar="FILE")
    out: Path | None = opt(None, "write metrics.json into this folder", flags="-o --out", parse=Path, group="Output")
    overwrite: bool = opt(False, "overwrite existing files", group="Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferConfig(Config):
    """Settings of one inference: an image or random inputs, the outputs to report and write."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.min_score is not None and self.min_score > 1:
            raise UsageError(f"`--min-score` is {self.min_score}, expected 0 to 1", hint="`--min-score 0.25`")

    image: Path | None = opt(None, "an image, preprocessed as declared", parse=Path, metavar="FILE")
    video: Any = opt(
        None, "a clip or an RTSP address, frame by frame", metavar="FILE|URL", accepts="Path | str | None"
    )  # fmt: skip
    max_frames: int | None = opt(None, "with `--video`: end after N frames", ge=1)
    batch: int | None = opt(None, "with `--random`: rows [default: the profile's optimum]", ge=1)
    shapes: dict[str, Shape] = opt(
        {}, "with `--random`: shapes, as images:8x3x640x640", parse=parse_shapes, metavar="SPEC"
    )
    seed: int = opt(0, "with `--random`: the seed", ge=0)
    outputs: Any = opt(
        (), "select this output (repeatable) [default: all]", flags="--output", multiple=True, metavar="NAME",
        accepts="Sequence[str]",
    )  # fmt: skip
    repeat: int = opt(1, "run N times; the outputs are those of the first", ge=1)
    draw: Path | None = opt(None, "with `--image`, `--video`: write it with boxes", parse=Path, metavar="FILE")
    min_score: float | None = opt(None, "with `--image`, `--video`: minimum score [default: 0.25]", ge=0)
    top: int | None = opt(None, "with `--image`, `--video`: the N best classes [default: 5, 1]", ge=1)
    preprocess: Any = opt(
        None, "with `--image`, `--video`: instead of the declared one", metavar=PREPROCESS_METAVAR, group="Input",
        accepts="VisionSource | None",
    )  # fmt: skip
    out: Path | None = opt(
        None, ".npz (outputs by name) or .npy (one output) to write; with `--image` .json as well; with `--video` .mp4, "
        ".mkv or .mov (drawn), or .jsonl (a line for each frame)", flags="-o --out", parse=Path, group="Output",
    )  # fmt: skip
    overwrite: bool = opt(False, "overwrite existing files", group="Output")
