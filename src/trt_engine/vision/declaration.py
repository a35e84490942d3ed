"""`Vision`: how pictures go into a model and what comes out, as values kept in the model itself and in the passport.

One key of an ONNX file's metadata (`trt_engine.vision`) holds it as JSON. Models that Ultralytics exported carry `names`,
`imgsz` and `task` instead; those are understood, and that is said.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from onnx import ModelProto

from trt_engine.config import PREPROCESS_PRESETS, is_preset
from trt_engine.engine import Engine, engine_path
from trt_engine.errors import ModelError, UsageError
from trt_engine.files import copy_whole, write_whole
from trt_engine.graph.load import external_files, read_proto, signature
from trt_engine.tensors import Signature, TensorSpec, closest, dtype

__all__ = [
    "KEY",
    "Postprocess",
    "Preprocess",
    "Vision",
    "declare",
    "from_file",
    "preprocess_from",
    "read_json",
    "vision_from",
    "vision_of",
]

log = logging.getLogger(__name__)

KEY = "trt_engine.vision"
"""The key of the declaration in an ONNX model's `metadata_props`."""

Resize = Literal["letterbox", "stretch", "center-crop"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Decode = Literal["yolov10", "yolo", "classify"]


@dataclass(frozen=True, slots=True)
class Preprocess:
    """What a picture becomes: `(pixel * scale - mean) / std` of a picture of `size`, in `layout` and `dtype`."""

    size: tuple[int, int]
    """Height and width of the network's input, in pixels."""
    resize: Resize = "letterbox"
    """`letterbox` keeps the proportions and pads, `stretch` does not keep them, `center-crop` keeps them and cuts."""
    interpolation: Interpolation = "bilinear"
    pad_value: tuple[int, ...] = (114, 114, 114)
    """Of the letterbox, 0 to 255 for each channel, in the order of `channels`."""
    pad_placement: Literal["center", "top-left"] = "center"
    """Where the picture lies in the letterbox."""
    crop_share: float = 1.0
    """Of `center-crop`: the part of the resized shorter side that is kept (224 of 256 is 0.875)."""
    channels: Literal["RGB", "BGR", "L"] = "RGB"
    """Order of the channels; `L` is one channel of grey."""
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """By channel, in the order of `channels`, in scaled values."""
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    dtype: str | None = None
    """Of the network's input; None for whatever it is."""
    input: str | None = None
    """The input that takes the picture; None for a model of one input."""

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise UsageError(f"the declared size is {self.size}, expected height and width", hint="`[640, 640]`")
        if self.dtype is not None:
            dtype(self.dtype)
        count = self.channel_count
        for name in ("mean", "std", "pad_value"):
            values = getattr(self, name)
            if len(values) != count and len(set(values)) == 1:  # one value, or the default of three, for all channels
                object.__setattr__(self, name, (values[0],) * count)
            elif len(values) != count:
                raise UsageError(
                    f"the declared `{name}` has {len(values)} values, `{self.channels}` has {count} channels",
                    hint="one value for each channel",
                )
        if not all(0 <= value <= 255 for value in self.pad_value):
            raise UsageError(
                f"the declared `pad_value` is {self.pad_value}, expected 0 to 255", hint="`[114, 114, 114]`"
            )
        if not all(math.isfinite(value) and value for value in (self.scale, *self.std)):
            raise UsageError(
                "the declared `scale` and `std` must be finite and not 0", hint="`std` of [1, 1, 1] is none"
            )
        if not all(map(math.isfinite, self.mean)):
            raise UsageError(f"the declared `mean` is {self.mean}, expected finite numbers", hint="`[0, 0, 0]` is none")
        if not 0 < self.crop_share <= 1:
            raise UsageError(
                f"the declared `crop_share` is {self.crop_share}, expected 0 to 1", hint="224 of 256 is 0.875"
            )

    def input_of(self, signature: Signature) -> TensorSpec:
        """The input that takes the picture; `UsageError` unless shape and type are the declared ones."""
        spec = _chosen(signature.inputs, self.input, "input")
        wanted = (-1, *self.shape)
        fits = len(spec.shape) == 4 and all(
            got < 0 or want < 0 or got == want for got, want in zip(spec.shape, wanted, strict=True)
        )
        if not fits:
            declared = "x".join(map(str, self.shape))
            raise UsageError(
                f"input `{spec.name}` is {spec.describe()}, the declared picture is {declared} ({self.layout})",
                hint="declare the `size`, `channels` and `layout` of the model",
            )
        if self.dtype not in (None, spec.dtype):
            raise UsageError(
                f"input `{spec.name}` is {spec.dtype}, the declared `dtype` is {self.dtype}",
                hint=f'declare `"dtype": "{spec.dtype}"`',
            )
        return spec

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as reports and the caches of ranges keep them."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    @property
    def channel_count(self) -> int:
        return 1 if self.channels == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one picture, as the network takes it."""
        height, width = self.size
        return (self.channel_count, height, width) if self.layout == "NCHW" else (height, width, self.channel_count)


@dataclass(frozen=True, slots=True)
class Postprocess:
    """What the output holds.

    `yolov10`: [N, R, 6] rows of x1, y1, x2, y2 in pixels of the input, score, class; nothing left to suppress.
    `yolo`: [N, 4 + C, anchors] of centre x, centre y, width, height in pixels of the input, then C class scores.
    `classify`: [N, C] class scores.
    """

    decode: Decode
    classes: tuple[str, ...] = ()
    """Names by class index; empty when they are not known."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What turns the output's class scores into probabilities; none when they are."""
    min_score: float = 0.001
    """Detections below it are dropped. COCO's figures want the long tail; for looking at boxes take 0.25."""
    iou: float = 0.7
    """Of `yolo`: boxes of one class that overlap more are one object."""
    max_detections: int = 300
    output: str | None = None
    """The output that is decoded; None for a model of one output."""

    def __post_init__(self) -> None:
        if not (0 <= self.min_score <= 1 and 0 <= self.iou <= 1):
            raise UsageError(
                f"the declared `min_score` {self.min_score} and `iou` {self.iou} must lie in 0 to 1",
                hint="0.001 and 0.7",
            )
        if self.max_detections < 1:
            raise UsageError(f"the declared `max_detections` is {self.max_detections}", hint="300 is usual")
        if self.activation == "softmax" and self.decode != "classify":
            raise UsageError(
                "`softmax` is for classifiers, detectors score each class alone", hint="`sigmoid` or `none`"
            )

    @property
    def task(self) -> Literal["detect", "classify"]:
        return "classify" if self.decode == "classify" else "detect"

    def name(self, index: int) -> str:
        """The name of a class; its number where none was declared."""
        return self.classes[index] if 0 <= index < len(self.classes) else str(index)


@dataclass(frozen=True, slots=True)
class Vision:
    """Pre- and post-processing of one model, and where that is known from."""

    preprocess: Preprocess
    postprocess: Postprocess
    version: Literal[1] = 1
    source: str = field(default="declared")
    """`declared`, or which other metadata it was read from."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the passport keeps them."""
        plain: dict[str, Any] = msgspec.json.decode(self.to_json())
        return plain

    @classmethod
    def parse(cls, raw: bytes | str | Mapping[str, Any], where: str) -> Vision:
        """The declaration in JSON or in plain values; `UsageError` naming the place of what is wrong in it."""
        with _unreadable(where):
            plain = msgspec.json.decode(raw) if isinstance(raw, bytes | str) else dict(raw)
            _refuse_unknown(plain, where)
            return msgspec.convert(plain, type=cls)

    def input_of(self, signature: Signature) -> TensorSpec:
        """The input that takes the picture; `UsageError` unless shape and type are the declared ones."""
        return self.preprocess.input_of(signature)

    def output_of(self, signature: Signature) -> TensorSpec:
        """The output that is decoded; `UsageError` unless its rank and sizes can be what is declared."""
        spec = _chosen(signature.outputs, self.postprocess.output, "output")
        classes = len(self.postprocess.classes)
        shape, decode = spec.shape, self.postprocess.decode
        if decode == "classify":
            right = len(shape) == 2 and (not classes or shape[1] in (-1, classes))
            expected = f"batch x {classes or 'classes'}"
        elif decode == "yolov10":
            right = len(shape) == 3 and shape[2] in (-1, 6)
            expected = "batch x rows x 6"
        else:
            right = (
                len(shape) == 3 and (shape[1] < 0 or shape[1] > 4) and (not classes or shape[1] in (-1, 4 + classes))
            )
            expected = f"batch x {4 + classes if classes else '4 + classes'} x anchors"
        if not right and shape != (-1,):  # one open dimension stands for an unknown rank
            raise UsageError(
                f"output `{spec.name}` is {spec.describe()}, `{decode}` expects {expected}",
                hint="declare another `decode`, the right number of `classes`, or the `output` that is meant",
            )
        return spec

    def check(self, signature: Signature) -> None:
        """`UsageError` unless this can be the declaration of a model with that signature."""
        self.input_of(signature)
        self.output_of(signature)


def _chosen(specs: tuple[TensorSpec, ...], name: str | None, side: str) -> TensorSpec:
    known = [spec.name for spec in specs]
    if name is None and len(specs) == 1:
        return specs[0]
    if name is None:
        listed = ", ".join(f"`{item}`" for item in known)
        raise UsageError(f"the model has {len(known)} {side}s: {listed}", hint=f"declare which `{side}` is meant")
    if name not in known:
        raise UsageError(f"there is no {side} `{name}`, which the declaration names", hint=closest(name, known))
    return specs[known.index(name)]


def _refuse_unknown(plain: Any, where: str) -> None:
    """A misspelled setting must not fall back to its default."""
    parts = {"": Vision, "preprocess": Preprocess, "postprocess": Postprocess}
    for part, kind in parts.items():
        found = plain.get(part, {}) if part and isinstance(plain, dict) else plain
        known = [item.name for item in dataclasses.fields(kind)]
        for name in found if isinstance(found, dict) else ():
            if name not in known:
                raise UsageError(f"{where} declares `{name}`, which is no setting", hint=closest(name, known))


# ------------------------------------------------------------------------------------------------ what is given instead


def preprocess_from(given: Vision | Preprocess | Path | str, found: Signature) -> Preprocess:
    """The pre-processing of a value, of a preset (`imagenet`, `yolo`, `yolo:640`) for this signature, or of a JSON file.

    A file needs no `postprocess` here. Raises `UsageError` for a preset that does not fit the model.
    """
    if isinstance(given, Preprocess):
        return given
    if isinstance(given, Vision):
        return given.preprocess
    if is_preset(str(given)):
        return _preset(str(given), found)
    plain, where = read_json(Path(given)), f"`{given}`"
    if "postprocess" in plain or "preprocess" not in plain:
        return Vision.parse(plain, where).preprocess
    _refuse_unknown(plain, where)
    with _unreadable(where):
        return msgspec.convert(plain["preprocess"], type=Preprocess)


def vision_from(given: Preprocess | str, found: Signature, declared: Vision | None) -> Vision:
    """A value or a preset with a post-processing: the declared one, or what the preset's models usually have."""
    pixels = preprocess_from(given, found)
    if declared is not None:
        return replace(declared, preprocess=pixels, source="given" if isinstance(given, Preprocess) else str(given))
    if isinstance(given, Preprocess):
        raise UsageError(
            "nothing declares what the model's outputs mean", hint="give a `Vision`, with a `Postprocess` beside it"
        )
    output = found.outputs[0]
    decode: Decode = "classify"
    if str(given).startswith("yolo"):
        decode = "yolov10" if len(output.shape) == 3 and output.shape[2] == 6 else "yolo"
    return Vision(pixels, Postprocess(decode, output=output.name), source=str(given))


def _preset(text: str, found: Signature) -> Preprocess:
    name, _, size = text.partition(":")
    spec = _chosen(found.inputs, None, "input")
    channels = [at for at in (1, 3) if len(spec.shape) == 4 and spec.shape[at] == 3]
    if not channels or not spec.dtype.startswith(("float", "bfloat")):
        raise UsageError(
            f"the preset `{name}` makes 3 floating-point channels, input `{spec.name}` is {spec.dtype} {spec.describe()}",
            hint="`--preprocess FILE.json` says how a picture becomes this input (docs/vision.md)",
        )
    layout: Literal["NCHW", "NHWC"] = "NCHW" if channels[0] == 1 else "NHWC"
    sides = _sides(size, text) if size else spec.shape[2:] if layout == "NCHW" else spec.shape[1:3]
    if min(sides) < 1:
        raise UsageError(
            f"input `{spec.name}` is {spec.describe()}: the preset `{name}` has no size to make",
            hint=f"name it: `--preprocess {name}:{224 if name == 'imagenet' else 640}`, or HEIGHTxWIDTH",
        )
    pixels = Preprocess(size=(sides[0], sides[1]), layout=layout)
    if name == "imagenet":
        pixels = replace(
            pixels, resize="center-crop", crop_share=224 / 256, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
        )
    pixels.input_of(found)
    return pixels


def _sides(size: str, text: str) -> tuple[int, int]:
    try:
        sides = [int(side) for side in size.split("x")]
        height, width = sides if len(sides) == 2 else sides * 2
    except ValueError:
        height = width = 0
    if min(height, width) < 1:
        raise UsageError(f"cannot read the size of `{text}`", hint="`yolo:640`, or `yolo:384x640` (height x width)")
    return height, width


# ------------------------------------------------------------------------------------------------ where it is kept


def from_file(path: Path) -> Vision:
    """The declaration in a JSON file."""
    return Vision.parse(read_json(path), f"`{path}`")


def read_json(path: Path) -> dict[str, Any]:
    """What the file of a declaration holds, not looked at yet."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        presets = ", ".join(f"`{name}`" for name in PREPROCESS_PRESETS)
        raise UsageError(f"cannot read `{path}`: {reason}", hint=f"give a JSON file, or {presets}") from error
    with _unreadable(f"`{path}`"):
        return msgspec.json.decode(raw, type=dict[str, Any])


@contextlib.contextmanager
def _unreadable(where: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{where} is no declaration of pre- and post-processing: {error}",
            hint='`{"preprocess": {"size": [640, 640]}, "postprocess": {"decode": "yolov10"}}` is the least',
        ) from error


def declare(model: Path | str, vision: Vision, out: Path | str) -> Path:
    """Write `model` to `out` with the declaration in its metadata; weights and graph stay as they are.

    The declaration is checked against the model's signature first. `out` may be the model itself.
    """
    path, target = Path(model), Path(out)
    proto = read_proto(path)
    vision.check(signature(proto, path))
    kept = [item for item in proto.metadata_props if item.key != KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=KEY, value=vision.to_json().decode())
    if path.parent.resolve() != target.parent.resolve():
        for item in external_files(proto, path):
            copy_whole(item.path, target.parent / item.location)
    return write_whole(target, proto.SerializeToString())


def vision_of(thing: Engine | Path | str) -> Vision | None:
    """What a model or an engine declares, from the ONNX metadata or from the passport; None when it declares nothing.

    Raises `ModelError` for a declaration that cannot be read.
    """
    if isinstance(thing, Engine):
        kept = thing.passport.vision
        return None if kept is None else _legible(kept, thing.path)
    path = Path(thing)
    if path.suffix == ".json" or engine_path(path) is not None or path.suffix != ".onnx":
        return vision_of(Engine.open(path))
    return of_proto(read_proto(path), path)


def of_proto(proto: ModelProto, path: Path) -> Vision | None:
    """The same for a model that was read."""
    metadata = {item.key: item.value for item in proto.metadata_props}
    if KEY in metadata:
        return _legible(metadata[KEY], path)
    if "names" in metadata and "task" in metadata:
        return _ultralytics(metadata, signature(proto, path), path)
    return None


def _legible(raw: str | Mapping[str, Any], path: Path) -> Vision:
    try:
        return Vision.parse(raw, f"`{path}`")
    except UsageError as error:
        raise ModelError(error.message, hint=error.hint) from error


# ------------------------------------------------------------------------------------------------ others' metadata


def _ultralytics(metadata: Mapping[str, str], found: Signature, path: Path) -> Vision | None:
    """What Ultralytics' exporter writes: `names` and `imgsz` as Python literals, `task`; the decode from the shapes."""
    task = metadata["task"]
    if task not in ("detect", "classify") or len(found.inputs) != 1 or len(found.inputs[0].shape) != 4:
        log.info("`%s` has Ultralytics' metadata for the task `%s`, which is not known here", path.name, task)
        return None
    spec, output = found.inputs[0], found.outputs[0]
    names = _literal(metadata["names"])
    classes = tuple(map(str, names.values() if isinstance(names, dict) else names or ()))
    size = _literal(metadata.get("imgsz", "")) or list(spec.shape[2:])
    size = [size, size] if isinstance(size, int) else size
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        log.info("`%s` has Ultralytics' metadata without a size", path.name)
        return None
    pixels = Preprocess(size=(size[0], size[1]), input=spec.name)
    decode: Decode = "yolo"
    if task == "classify":
        decode, pixels = "classify", replace(pixels, resize="center-crop")
    elif len(output.shape) == 3 and output.shape[2] == 6:
        decode = "yolov10"
    vision = Vision(pixels, Postprocess(decode, classes=classes, output=output.name), source="Ultralytics metadata")
    try:
        vision.check(found)
    except UsageError as error:
        log.info("`%s` has Ultralytics' metadata that does not fit it: %s", path.name, error.message)
        return None
    log.info(
        "`%s` declares nothing of ours; its Ultralytics metadata is understood: %s, %dx%d, %d classes",
        path.name, decode, *pixels.size, len(classes),
    )  # fmt: skip
    return vision


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
