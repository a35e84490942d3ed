"""Emulation of nvinfer's pre-processing, and its numeric difference from the model's own.

Geometry (`get_converted_buffer`) and keys: the sources of gst-nvinfer in DeepStream; arithmetic: "Gst-nvinfer" of NVIDIA's
DeepStream documentation; filters: `NvBufSurfTransform_Inter` of nvbufsurftransform.h. Sampling without anti-aliasing and
rounding differ slightly between GPUs: differences of a filter are estimates, all others are exact.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trt_engine.arrayfiles import Array
from trt_engine.atomic_io import os_errors, read_bounded
from trt_engine.errors import UsageError
from trt_engine.records.deploy import PreprocessDifference
from trt_engine.vision.spec import Preprocess

_LUMA = np.array([0.299, 0.587, 0.114])
_CUBIC, _LANCZOS = "2", "4"
_SCALE_LIMIT, _LEVEL_LIMIT, _PLACEMENT_LIMIT_PX = 1e-4, 0.05, 1.0
"""Differences up to these are none: rounding of printed numbers, and of sizes to whole pixels."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Position of the image in the network input, in pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class NvinferPreprocess:
    """nvinfer's pre-processing by its keys: resize and pad, then `net-scale-factor * (x - offsets)`."""

    height: int
    width: int
    factor: float
    offsets: tuple[float, ...]
    colors: str
    """`0` RGB, `1` BGR, `2` grey."""
    keep_aspect: bool
    symmetric: bool
    filter: str
    channels_last: bool

    @classmethod
    def from_keys(cls, keys: Mapping[str, str], size: tuple[int, int]) -> NvinferPreprocess:
        """The `[property]` keys with nvinfer's defaults; `size` where `infer-dims` is absent. `UsageError` for no number."""
        try:
            dims = [int(part) for part in keys.get("infer-dims", "").split(";") if part.strip()]
            colors = keys.get("model-color-format", "0").strip()
            offsets = [float(part) for part in keys.get("offsets", "").split(";") if part.strip()]
            factor = float(keys.get("net-scale-factor", "1"))
            keep_aspect, symmetric = (
                bool(int(keys.get(name, "0"))) for name in ("maintain-aspect-ratio", "symmetric-padding")
            )
        except ValueError as error:
            raise UsageError(
                f"a value of the nvinfer configuration is not a number: {error}", hint="see the keys"
            ) from None
        count = 1 if colors == "2" else 3
        if colors not in ("0", "1", "2") or len(offsets) not in (0, count) or len(dims) not in (0, 3):
            raise UsageError(
                f"nvinfer refuses model-color-format {colors} with {len(offsets)} offsets and {len(dims)} infer-dims",
                hint="one offset for each channel, `infer-dims=C;H;W`",
            )
        height, width = dims[1:] if dims else size
        return cls(
            height=height,
            width=width,
            factor=factor,
            offsets=tuple(offsets or [0.0] * count),
            colors=colors,
            keep_aspect=keep_aspect,
            symmetric=symmetric,
            filter=keys.get("scaling-filter", "6").strip(),
            channels_last=keys.get("network-input-order", "0").strip() == "1",
        )

    def place(self, width: int, height: int) -> Rectangle:
        """Where an image of this size comes to be: sizes are truncated, as nvinfer does."""
        if not self.keep_aspect:
            return Rectangle(0, 0, self.width, self.height)
        tall, wide = self.width * height / width, self.height * width / height
        goal = (self.width, int(tall)) if tall <= self.height else (int(wide), self.height)
        left, top = ((self.width - goal[0]) // 2, (self.height - goal[1]) // 2) if self.symmetric else (0, 0)
        return Rectangle(left, top, *goal)

    def normalize(self, pixels_HWC: Array) -> Array:
        """uint8 RGB pixels [..., 3] as network values [..., C]."""
        if self.colors == "2":
            pixels_HWC = np.rint(pixels_HWC @ _LUMA)[..., None]
        elif self.colors == "1":
            pixels_HWC = pixels_HWC[..., ::-1]
        values: Array = self.factor * (pixels_HWC.astype(np.float64) - np.array(self.offsets))
        return values

    def run(self, image_HWC: Array) -> Array:
        """uint8 RGB image [H, W, 3] as the network input [C, H, W], or [H, W, C] with channels last."""
        height, width = (side - side % 2 for side in image_HWC.shape[:2])
        place = self.place(width, height)
        canvas = np.zeros((self.height, self.width, 3), np.uint8)
        resized = _resize(image_HWC[:height, :width], place.height, place.width, self.filter)
        canvas[place.top : place.top + place.height, place.left : place.left + place.width] = resized
        values = self.normalize(canvas)
        return values if self.channels_last else np.moveaxis(values, -1, 0)


def _resize(image_HWC: Array, height: int, width: int, kind: str) -> Array:
    """Separable sampling at pixel centres without anti-aliasing."""
    rows, columns = (
        _sampling(goal, side, kind) for goal, side in zip((height, width), image_HWC.shape[:2], strict=True)
    )
    values = np.einsum("htwc,ht->hwc", image_HWC.astype(np.float64)[rows[0]], rows[1])
    values = np.einsum("hwtc,wt->hwc", values[:, columns[0]], columns[1])
    made: Array = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return made


def _sampling(goal: int, side: int, kind: str) -> tuple[Array, Array]:
    """Source indices [goal, taps] and their weights."""
    centres = (np.arange(goal) + 0.5) * side / goal - 0.5
    if kind in ("0", "6"):
        return np.clip(np.floor(centres + 0.5).astype(int), 0, side - 1)[:, None], np.ones((goal, 1))
    reach = {_CUBIC: 2, _LANCZOS: 3}.get(kind, 1)
    taps = np.floor(centres).astype(int)[:, None] + np.arange(1 - reach, reach + 1)
    away = np.abs(centres[:, None] - taps)
    if kind == _CUBIC:
        near, far = 1.5 * away**3 - 2.5 * away**2 + 1, -0.5 * away**3 + 2.5 * away**2 - 4 * away + 2
        weights = np.where(away <= 1, near, far)
    else:
        weights = np.sinc(away) * np.sinc(away / 3) if kind == _LANCZOS else 1 - away
    return np.clip(taps, 0, side - 1), weights / weights.sum(axis=1, keepdims=True)


def read_keys(path: Path) -> dict[str, str]:
    """The `[property]` keys of an nvinfer configuration, key file or YAML; `UsageError` for another file."""
    with os_errors(path, "read", by="--check"):
        text = read_bounded(path).decode("utf-8", "replace")
    try:
        if path.suffix in (".yml", ".yaml"):
            group = (yaml.safe_load(text) or {}).get("property")
        else:
            parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
            parser.read_string(text)
            group = dict(parser["property"]) if parser.has_section("property") else None
    except (configparser.Error, yaml.YAMLError, AttributeError) as error:
        raise UsageError(f"`{path}` is not an nvinfer configuration: {error}", hint="a key file, or YAML") from None
    if not isinstance(group, dict):
        raise UsageError(f"`{path}` has no group `property`", hint="the configuration of nvinfer, not of the pipeline")
    return {str(name): str(int(value) if isinstance(value, bool) else value) for name, value in group.items()}


def sample_image() -> Array:
    """uint8 RGB image [480, 854, 3] without symmetry: gradients, edges and noise, different in each channel."""
    y, x = np.mgrid[:480, :854].astype(np.float64)
    waves = np.stack([x / 854, y / 480, ((x // 61 + y // 37) % 2)], axis=-1)
    noise = np.random.default_rng(0).random((480, 854, 3))
    made: Array = np.clip(np.rint(235 * (0.8 * waves + 0.2 * noise)) + np.array([20, 0, 10]), 0, 255).astype(np.uint8)
    return made


def compare(
    keys: Mapping[str, str], own: Preprocess, image_HWC: Array, *, file: str, image: str = "test image"
) -> PreprocessDifference:
    """Differences between nvinfer with these keys and the model's own pre-processing.

    Levels are those of an 8-bit pixel, 0 to 255. Raises `SetupError` without pillow, `UsageError` for keys nvinfer refuses.
    """
    from trt_engine.vision.preprocess import Preprocessor, image_from_array

    other = NvinferPreprocess.from_keys(keys, own.size)
    findings: list[str] = []
    if (found := (other.height, other.width)) != own.size or len(other.offsets) != own.channel_count:
        findings.append(
            f"the input is {len(other.offsets)} x {found[0]} x {found[1]}, the model declares "
            f"{own.channel_count} x {own.size[0]} x {own.size[1]}"
        )
        return PreprocessDifference(file, image, findings=tuple(findings))
    mine, place = Preprocessor(own, "float32")(image_from_array(image_HWC))
    mine_HWC = np.moveaxis(mine, 0, -1) if own.layout == "NCHW" else mine
    theirs = other.run(image_HWC)
    theirs_HWC = theirs if other.channels_last else np.moveaxis(theirs, 0, -1)
    if other.channels_last != (own.layout == "NHWC"):
        findings.append(f"network-input-order is {int(other.channels_last)}, the model declares {own.layout}")
    factors = np.array([own.scale / std for std in own.std])
    levels = np.abs(mine_HWC - theirs_HWC) / np.abs(factors)
    values = _compare_values(other, own, findings)
    goal = other.place(image_HWC.shape[1] - image_HWC.shape[1] % 2, image_HWC.shape[0] - image_HWC.shape[0] % 2)
    wide, tall = place.width * place.scale_x, place.height * place.scale_y
    edges = np.array([place.left, place.top, place.left + wide, place.top + tall])
    moved = float(np.max(np.abs(edges - [goal.left, goal.top, goal.left + goal.width, goal.top + goal.height])))
    if moved > _PLACEMENT_LIMIT_PX:
        findings.append(
            f"the image is placed up to {moved:.0f} pixels elsewhere: maintain-aspect-ratio {int(other.keep_aspect)}, "
            f"symmetric-padding {int(other.symmetric)}, the model declares {own.resize}"
            + (f" ({own.pad_placement})" if own.resize == "letterbox" else "")
        )
    padding = max(own.pad_value) if own.resize == "letterbox" and other.keep_aspect else 0
    if padding and (goal.width, goal.height) != (other.width, other.height):
        findings.append(f"nvinfer pads with 0, the model with {padding}")
    inside = levels[goal.top : goal.top + goal.height, goal.left : goal.left + goal.width]
    return PreprocessDifference(
        file=file, image=image, mean_levels=float(levels.mean()), max_levels=float(levels.max()), **values,
        placement_px=moved, padding_levels=float(padding), content_levels=float(inside.mean()), findings=tuple(findings),
    )  # fmt: skip


def _compare_values(other: NvinferPreprocess, own: Preprocess, findings: list[str]) -> dict[str, Any]:
    """Scale, offset and colour order, exact."""
    factors = np.array([own.scale / std for std in own.std])
    scale = float(np.max(np.abs(other.factor - factors) / np.abs(factors)))
    offset = float(np.max(np.abs(np.array(own_offsets(own)) - np.array(other.offsets))))
    if scale > _SCALE_LIMIT:
        wanted = ", ".join(f"{value:.6g}" for value in factors)
        findings.append(
            f"net-scale-factor is {other.factor:.6g}, the model declares {wanted}: off by up to {100 * scale:.3g} %"
        )
    if offset > _LEVEL_LIMIT:
        listed = ";".join(f"{value:.6g}" for value in own_offsets(own))
        findings.append(f"offsets are off by up to {offset:.3g} levels of 255: the model declares {listed}")
    reds = {"0": 0, "1": 2}.get(other.colors), {"RGB": 0, "BGR": 2}.get(own.channels)
    if reds[0] != reds[1]:
        findings.append(f"model-color-format is {other.colors}, the model declares {own.channels}")
    return {"scale": scale, "offset_levels": offset, "colors_match": reds[0] == reds[1]}


def own_offsets(own: Preprocess) -> list[float]:
    """The pixel value of each channel that the model's own pre-processing maps to 0."""
    return [mean / own.scale for mean in own.mean]
