"""Results of `deploy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_engine.display import RichDisplay

DeployTarget = Literal["triton", "deepstream", "ray"]


@dataclass(frozen=True, slots=True)
class DeployedSetting:
    """One setting of the written configuration, and where its value comes from."""

    name: str
    """The key in the target's own spelling: `dynamic_batching.max_queue_delay_microseconds`."""
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """One model of a deployment."""

    name: str
    source: str
    """The engine, or the model that is built where it runs."""
    digest: str | None
    """SHA-256 of the engine's payload; None for a model that is built later."""
    backend: str | None
    settings: tuple[DeployedSetting, ...] = ()
    notes: tuple[str, ...] = ()
    """What the target cannot express, and what remains to be done."""


@dataclass(frozen=True, slots=True)
class PreprocessDifference:
    """What nvinfer makes of an image by a configuration, beside what the model's own pre-processing makes of it.

    Levels are those of an 8-bit pixel, 0 to 255. Where the sizes differ the numbers are None.
    """

    file: str
    """The configuration."""
    image: str
    mean_levels: float | None = None
    """Mean absolute difference over the whole input; `max_levels` the largest."""
    max_levels: float | None = None
    scale: float | None = None
    """Largest relative difference of the factor of a channel."""
    offset_levels: float | None = None
    """Largest difference of the offset of a channel."""
    colors_match: bool | None = None
    """Same order of red and blue."""
    placement_px: float | None = None
    """Largest distance between the edges of the image in the input."""
    padding_levels: float | None = None
    """Difference of the padding's value."""
    content_levels: float | None = None
    """Mean absolute difference inside the image: the filter alone, where nothing else differs."""
    findings: tuple[str, ...] = ()
    """What differs, with the keys; empty where nothing but the filter does."""


@dataclass(frozen=True, slots=True)
class DeployReport(RichDisplay):
    """Report of `deploy`: the files written for a target, and the decisions in them."""

    target: DeployTarget
    folder: str
    models: tuple[DeployedModel, ...]
    files: dict[str, int]
    """Bytes by path in the folder; 0 in a dry run for files that are not copied yet."""
    next_command: str
    """Command that runs the result."""
    notes: tuple[str, ...] = ()
    preprocessing: tuple[PreprocessDifference, ...] = ()
    """Differences of DeepStream's pre-processing: of the configuration written, and of the one to check."""
    dry_run: bool = False
