"""`Vision`: pre- and post-processing of a model, stored in the model and in the passport.

One key of an ONNX file's metadata (`trt_engine.vision`) holds it as JSON. Models that Ultralytics exported carry `names`,
`imgsz` and `task` instead; those are read too, and logged.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import logging
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import msgspec

from trt_engine.atomic_io import copy_atomic, decode_json, read_bounded, write_atomic
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import PREPROCESS_PRESETS, is_preset
from trt_engine.engine import Engine, engine_path
from trt_engine.errors import FeedError, ModelError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.tensors import Shape, Signature, TensorSpec, dtype, format_shape, suggest
from trt_engine.vision.output_roles import ROLES, output_roles, prototypes, recognise

log = logging.getLogger(__name__)

_TASKS = ("detect", "segment", "pose", "classify")
METADATA_KEY = "trt_engine.vision"
"""The key of the declaration in an ONNX model's `metadata_props`."""

Resize = Literal["letterbox", "stretch", "center-crop"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Decode = Literal["yolov10", "yolo", "yolov5", "detr", "nms", "classify"]
BoxFormat = Literal["xyxy", "cxcywh", "yxyx"]


@dataclass(frozen=True, slots=True)
class Preprocess:
    """Image to input: resize to `size`, then `(pixel * scale - mean) / std` in `layout` and `dtype`."""

    size: tuple[int, int]
    """Height and width of the network input, in pixels."""
    resize: Resize = "letterbox"
    """`letterbox` keeps the aspect ratio and pads, `center-crop` keeps it and crops, `stretch` ignores it."""
    interpolation: Interpolation = "bilinear"
    pad_value: tuple[int, ...] = (114, 114, 114)
    """Letterbox padding, 0 to 255 per channel, in the order of `channels`."""
    pad_placement: Literal["center", "top-left"] = "center"
    """Position of the image in the letterbox."""
    crop_share: float = 1.0
    """`center-crop`: fraction of the resized shorter side that is kept (224 of 256 is 0.875)."""
    channels: Literal["RGB", "BGR", "L"] = "RGB"
    """Channel order; `L` is one grey channel."""
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Per channel, in the order of `channels`, after scaling."""
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    dtype: str | None = None
    """Dtype of the network input; None accepts any."""
    input: str | None = None
    """Name of the image input; None for a model with one input."""

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
                    hint="one value per channel",
                )
        if not all(0 <= value <= 255 for value in self.pad_value):
            raise UsageError(
                f"the declared `pad_value` is {self.pad_value}, expected 0 to 255", hint="`[114, 114, 114]`"
            )
        if not all(math.isfinite(value) and value for value in (self.scale, *self.std)):
            raise UsageError(
                "the declared `scale` and `std` must be finite and not 0", hint="`std` of [1, 1, 1] has no effect"
            )
        if not all(map(math.isfinite, self.mean)):
            raise UsageError(
                f"the declared `mean` is {self.mean}, expected finite numbers", hint="`[0, 0, 0]` has no effect"
            )
        if not 0 < self.crop_share <= 1:
            raise UsageError(
                f"the declared `crop_share` is {self.crop_share}, expected 0 to 1", hint="224 of 256 is 0.875"
            )

    def input_spec(self, signature: Signature) -> TensorSpec:
        """The image input. Raises `UsageError` when its shape or dtype is not the declared one."""
        spec = _select_tensor(signature.inputs, self.input, "input")
        wanted = (-1, *self.shape)
        fits = len(spec.shape) == 4 and all(
            got < 0 or want < 0 or got == want for got, want in zip(spec.shape, wanted, strict=True)
        )
        if not fits:
            declared = "x".join(map(str, self.shape))
            raise UsageError(
                f"input `{spec.name}` is {spec.format_symbolic()}, the declared image is {declared} ({self.layout})",
                hint="declare the `size`, `channels` and `layout` of the model",
            )
        if self.dtype not in (None, spec.dtype):
            raise UsageError(
                f"input `{spec.name}` is {spec.dtype}, the declared `dtype` is {self.dtype}",
                hint=f'declare `"dtype": "{spec.dtype}"`',
            )
        return spec

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, for reports and range caches."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    @property
    def channel_count(self) -> int:
        return 1 if self.channels == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one network input, without the batch dimension."""
        height, width = self.size
        return (self.channel_count, height, width) if self.layout == "NCHW" else (height, width, self.channel_count)


@dataclass(frozen=True, slots=True)
class Postprocess:
    """How the outputs are decoded; N images, C classes, E values after them (coefficients of masks, keypoints).

    `yolov10`: [N, R, 6 + E] rows of x1, y1, x2, y2 in pixels of the input, score, class; no NMS needed.
    `yolo`: [N, 4 + C + E, anchors] of centre x, centre y, width, height in pixels of the input, then C class scores; the
    last two dimensions in either order.
    `yolov5`: [N, anchors, 5 + C + E], the same with an objectness score before those of the classes.
    `detr`: boxes [N, Q, 4] (centre, as shares of the input) and class scores [N, Q, C], for `softmax` [N, Q, C + 1] with the
    no-object class last; or one output of both.
    `nms`: boxes [N, K, 4], scores [N, K], classes [N, K] and their count, as TensorRT's plugins give them, without N too;
    boxes and scores [N, C, A] with ONNX's selected indices [K, 3]; or rows [K, 7] of image, corners, class, score.
    `classify`: [N, C] class scores.
    """

    decode: Decode
    classes: tuple[str, ...] = ()
    """Class names by index; empty when unknown."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Turns class scores into probabilities; `none` when they already are."""
    min_score: float = 0.001
    """Detections below it are dropped. COCO metrics need the long tail; use 0.25 to display boxes."""
    iou: float = 0.7
    """NMS threshold within one class, where boxes are suppressed here."""
    max_detections: int = 300
    output: str | None = None
    """Name of the decoded output; None for a model with one output."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Names by role, where a decoder reads several: `boxes`, `scores`, `classes`, `count`, `indices`, `protos`."""
    box_format: BoxFormat | None = None
    """Order of a box's values; None is that of the decoder."""
    normalized: bool | None = None
    """Boxes are shares of the input's size rather than pixels; None is that of the decoder."""
    suppress: bool | None = None
    """Suppress overlapping boxes of a class; None: `yolo` and `yolov5` alone need it."""
    first_class: int = 0
    """`nms`: the number of the first class; TensorFlow's detectors count from 1."""
    masks: bool = False
    """Rows end in coefficients of the mask prototypes [N, M, h, w], an output of its own."""
    keypoints: tuple[int, int] | None = None
    """Number of keypoints at the end of a row, and of their values: x, y in pixels of the input and (3) a score."""

    def __post_init__(self) -> None:
        if not (0 <= self.min_score <= 1 and 0 <= self.iou <= 1):
            raise UsageError(
                f"the declared `min_score` {self.min_score} and `iou` {self.iou} must be between 0 and 1",
                hint="0.001 and 0.7",
            )
        if self.max_detections < 1:
            raise UsageError(f"the declared `max_detections` is {self.max_detections}", hint="300 is usual")
        if self.activation == "softmax" and self.decode not in ("classify", "detr"):
            raise UsageError(
                "`softmax` is for classifiers and `detr`; other detectors score each class separately",
                hint="`sigmoid` or `none`",
            )
        if unknown := [role for role in self.outputs if role not in ROLES]:
            raise UsageError(f"`{unknown[0]}` is not a role of an output", hint=suggest(unknown[0], [*ROLES]))
        if (self.masks or self.keypoints) and self.decode not in ("yolov10", "yolo", "yolov5"):
            raise UsageError(f"`{self.decode}` decodes no masks and keypoints", hint="`yolov10`, `yolo` or `yolov5`")
        if self.keypoints is not None and (self.keypoints[0] < 1 or self.keypoints[1] not in (2, 3)):
            raise UsageError(
                f"the declared `keypoints` are {list(self.keypoints)}, expected their number and 2 or 3 values",
                hint="`[17, 3]`",
            )

    @property
    def task(self) -> Literal["detect", "classify"]:
        return "classify" if self.decode == "classify" else "detect"

    def name(self, index: int) -> str:
        """The class name, or the index where none is declared."""
        return self.classes[index] if 0 <= index < len(self.classes) else str(index)

    @property
    def suppressed(self) -> bool:
        """Whether overlapping boxes are still to be suppressed."""
        return self.suppress if self.suppress is not None else self.decode in ("yolo", "yolov5")

    @property
    def has_final_rows(self) -> bool:
        """Whether the output is rows of corners in pixels of the input, score and class."""
        return self.decode == "yolov10" and self.box_format in (None, "xyxy") and not self.normalized

    def roles(self, outputs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
        """The decoded outputs by role. Raises `UsageError` where one is missing or cannot be distinguished."""
        declared = {**({"rows": self.output} if self.output is not None else {}), **self.outputs}
        found = output_roles(self.decode, declared, outputs)
        if self.masks:
            found["protos"] = prototypes(found, outputs)
        return found

    def row_values(self, protos: Shape | None) -> int | None:
        """Values of a row or an anchor; None where the classes are not known. `protos` is the shape of the prototypes."""
        extra = (protos[1] if protos is not None else 0) + math.prod(self.keypoints or (0,))
        if self.decode == "yolov10":
            return 6 + extra
        return 4 + (self.decode == "yolov5") + len(self.classes) + extra if self.classes else None


@dataclass(frozen=True, slots=True)
class Vision:
    """Pre- and post-processing of one model, and its source."""

    preprocess: Preprocess
    postprocess: Postprocess
    version: Literal[1] = 1
    source: str = field(default="declared")
    """`declared`, or the other metadata it was read from."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, for the passport."""
        plain: dict[str, Any] = msgspec.json.decode(self.to_json())
        return plain

    @classmethod
    def parse(cls, raw: bytes | str | Mapping[str, Any], where: str) -> Vision:
        """Parse JSON or JSON values. Raises `UsageError` naming the invalid field."""
        with _parse_errors(where):
            plain = decode_json(raw) if isinstance(raw, bytes | str) else dict(raw)
            _refuse_unknown(plain, where)
            return msgspec.convert(plain, type=cls)

    def input_spec(self, signature: Signature) -> TensorSpec:
        """The image input. Raises `UsageError` when its shape or dtype is not the declared one."""
        return self.preprocess.input_spec(signature)

    def output_spec(self, signature: Signature) -> TensorSpec:
        """The decoded output, of several that of the boxes. `UsageError` when its shape contradicts the declaration."""
        found = self.postprocess.roles(signature.outputs)
        spec = found.get("rows") or found.get("boxes")
        decode, classes = self.postprocess.decode, len(self.postprocess.classes)
        if spec is None:
            listed = ", ".join(f"`{item.name}`" for item in signature.outputs)
            raise UsageError(f"`{decode}` found no boxes among the outputs {listed}", hint="declare the `outputs`")
        shape, expected = spec.shape, ""
        protos = found["protos"].shape if "protos" in found else None
        if decode == "classify":
            right = len(shape) == 2 and (not classes or shape[1] in (-1, classes))
            expected = f"batch x {classes or 'classes'}"
        elif decode in ("yolov10", "yolo", "yolov5"):
            count = self.postprocess.row_values(protos)
            axes = (2,) if decode == "yolov10" else (1, 2)
            right = len(shape) == 3 and (
                max(shape[1:]) > 4 or -1 in shape[1:] if count is None
                else any(shape[axis] == count for axis in axes) or shape[1 if decode == "yolo" else 2] == -1
            )  # fmt: skip
            rows = f"{count if count is not None else '4 + classes'}"
            expected = f"batch x rows x {rows}" if decode == "yolov10" else f"batch x {rows} x anchors"
        elif "rows" in found:
            right = len(shape) in (2, 3)
            expected = "rows x 7" if decode == "nms" else "batch x queries x 4 + classes"
        else:
            right = len(shape) >= 2 and shape[-1] in (-1, 4, 5)
            expected = "boxes of four values"
        if not right and shape != (-1,):  # one open dimension stands for an unknown rank
            raise UsageError(
                f"output `{spec.name}` is {spec.format_symbolic()}, `{decode}` expects {expected}",
                hint="declare another `decode`, the right number of `classes`, or the right `output`",
            )
        return spec

    def check(self, signature: Signature) -> None:
        """Raise `UsageError` when this declaration does not match the signature."""
        self.input_spec(signature)
        self.output_spec(signature)


def _select_tensor(specs: tuple[TensorSpec, ...], name: str | None, side: str) -> TensorSpec:
    known = [spec.name for spec in specs]
    if name is None and len(specs) == 1:
        return specs[0]
    if name is None:
        listed = ", ".join(f"`{item}`" for item in known)
        raise UsageError(f"the model has {len(known)} {side}s: {listed}", hint=f"declare the `{side}`")
    if name not in known:
        raise UsageError(f"the declared {side} `{name}` does not exist", hint=suggest(name, known))
    return specs[known.index(name)]


def _refuse_unknown(plain: Any, where: str) -> None:
    """Raise `UsageError` for unknown settings: a misspelled one must not fall back to its default."""
    parts = {"": Vision, "preprocess": Preprocess, "postprocess": Postprocess}
    for part, kind in parts.items():
        found = plain.get(part, {}) if part and isinstance(plain, dict) else plain
        known = [item.name for item in dataclasses.fields(kind)]
        for name in found if isinstance(found, dict) else ():
            if name not in known:
                raise UsageError(f"{where} declares `{name}`, which is not a setting", hint=suggest(name, known))


# ------------------------------------------------------------------------------------------------ explicit pre-processing


def resolve_preprocess(given: Vision | Preprocess | Path | str, found: Signature) -> Preprocess:
    """The pre-processing from a value, a preset (`imagenet`, `yolo`, `yolo:640`) for this signature, or a JSON file.

    A file needs no `postprocess` here. Raises `UsageError` for a preset that does not match the model.
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
    with _parse_errors(where):
        return msgspec.convert(plain["preprocess"], type=Preprocess)


def resolve_vision(given: Preprocess | str, found: Signature, declared: Vision | None) -> Vision:
    """A value or preset with post-processing: the declared one, or the usual one for the preset."""
    pixels = resolve_preprocess(given, found)
    if declared is not None:
        return replace(declared, preprocess=pixels, source="given" if isinstance(given, Preprocess) else str(given))
    if isinstance(given, Preprocess):
        raise UsageError("the model declares no post-processing", hint="pass a `Vision` with a `Postprocess`")
    if str(given).startswith("imagenet"):
        return Vision(pixels, Postprocess("classify", output=found.outputs[0].name), source=str(given))
    settings, assumed = recognise(found.outputs)
    usual = Postprocess(**settings)
    log.warning("outputs are decoded as `%s`, by their names and shapes: %s", usual.decode, assumed)
    return Vision(pixels, usual, source=str(given))


def _preset(text: str, found: Signature) -> Preprocess:
    name, _, size = text.partition(":")
    spec = _select_tensor(found.inputs, None, "input")
    channels = [at for at in (1, 3) if len(spec.shape) == 4 and spec.shape[at] == 3]
    if not channels or not spec.dtype.startswith(("float", "bfloat")):
        raise UsageError(
            f"the preset `{name}` makes 3 floating-point channels, "
            f"input `{spec.name}` is {spec.dtype} {spec.format_symbolic()}",
            hint="`--preprocess FILE.json` declares the pre-processing of this input (`trt-engine docs vision`)",
        )
    layout: Literal["NCHW", "NHWC"] = "NCHW" if channels[0] == 1 else "NHWC"
    sides = _sides(size, text) if size else spec.shape[2:] if layout == "NCHW" else spec.shape[1:3]
    if min(sides) < 1:
        raise UsageError(
            f"input `{spec.name}` is {spec.format_symbolic()}: the preset `{name}` needs a size",
            hint=f"give it: `--preprocess {name}:{224 if name == 'imagenet' else 640}`, or HEIGHTxWIDTH",
        )
    pixels = Preprocess(size=(sides[0], sides[1]), layout=layout)
    if name == "imagenet":
        pixels = replace(
            pixels, resize="center-crop", crop_share=224 / 256, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
        )
    elif name == "rtdetr":
        pixels = replace(pixels, resize="stretch")
    pixels.input_spec(found)
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


# ------------------------------------------------------------------------------------------------ reading and writing


def vision_from_file(path: Path) -> Vision:
    """Read a `Vision` from a JSON file."""
    return Vision.parse(read_json(path), f"`{path}`")


def read_json(path: Path) -> dict[str, Any]:
    """Read a declaration file as unvalidated JSON values."""
    try:
        raw = read_bounded(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        presets = ", ".join(f"`{name}`" for name in PREPROCESS_PRESETS)
        raise UsageError(f"cannot read `{path}`: {reason}", hint=f"give a JSON file, or {presets}") from error
    with _parse_errors(f"`{path}`"):
        return decode_json(raw, dict[str, Any])


@contextlib.contextmanager
def _parse_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{where} is not a declaration of pre- and post-processing: {error}",
            hint='`{"preprocess": {"size": [640, 640]}, "postprocess": {"decode": "yolov10"}}` is the minimum',
        ) from error


def declare(model: Path | str, vision: Vision, out: Path | str) -> Path:
    """Write `model` to `out` with the declaration in its metadata; weights and graph are unchanged.

    The declaration is first checked against the model signature. `out` may be the model itself.
    """
    source, target = open_model(model), Path(out)
    vision.check(source.signature)
    proto = deepcopy(source.proto)
    kept = [item for item in proto.metadata_props if item.key != METADATA_KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=METADATA_KEY, value=vision.to_json().decode())
    if source.path.parent.resolve() != target.parent.resolve():
        for item in source.external:
            copy_atomic(item.path, target.parent / item.location)
    return write_atomic(target, proto.SerializeToString())


def vision_of(thing: Engine | Path | str) -> Vision | None:
    """The declaration in the ONNX metadata of a model or in the passport of an engine; None when absent.

    Raises `ModelError` for an unreadable declaration.
    """
    if isinstance(thing, Engine):
        kept = thing.passport.vision
        return None if kept is None else _parse_metadata(kept, thing.path)
    path = Path(thing)
    if path.suffix == ".json" or engine_path(path) is not None or path.suffix != ".onnx":
        return vision_of(Engine.open(path))
    return vision_of_model(open_model(path))


def vision_of_model(model: Model) -> Vision | None:
    """The declaration in the metadata of an opened model; None when absent."""
    metadata = {item.key: item.value for item in model.proto.metadata_props}
    if METADATA_KEY in metadata:
        return _parse_metadata(metadata[METADATA_KEY], model.path)
    if "names" in metadata and ("task" in metadata or "stride" in metadata):
        return _ultralytics(metadata, model.signature, model.path)
    return None


def declared_shapes(model: Model, known: Container[str] = ()) -> dict[str, Shape]:
    """Shape at batch 1 of an image input that is dynamic in the graph and has a size in the metadata.

    Read from our declaration, else from `imgsz` as Ultralytics writes it; `known` are inputs whose shape is given already.
    """
    open_inputs = [
        spec for spec in model.signature.inputs if any(at > 0 for at in spec.dynamic) and spec.name not in known
    ]
    if not open_inputs:
        return {}
    metadata = {item.key: item.value for item in model.proto.metadata_props}
    try:
        if METADATA_KEY in metadata:
            pixels = _parse_metadata(metadata[METADATA_KEY], model.path).preprocess
            spec, shape = pixels.input_spec(model.signature), (1, *pixels.shape)
        else:
            sides = _literal(metadata.get("imgsz", ""))
            height, width = [sides, sides] if isinstance(sides, int) else sides
            (spec,) = model.signature.inputs
            shape = (1, spec.shape[1], height, width)
    except (TrtEngineError, TypeError, ValueError, IndexError):
        return {}
    fits = len(spec.shape) == len(shape) and all(
        isinstance(size, int) and size > 0 and have in (-1, size)
        for have, size in zip(spec.shape[1:], shape[1:], strict=True)
    )
    if not fits or spec not in open_inputs:
        return {}
    log.info("the size of `%s` is %s, from the metadata of `%s`", spec.name, format_shape(shape), model.path.name)
    return {spec.name: shape}


def _parse_metadata(raw: str | Mapping[str, Any], path: Path) -> Vision:
    try:
        return Vision.parse(raw, f"`{path}`")
    except UsageError as error:
        raise ModelError(error.message, hint=error.hint) from error


# ------------------------------------------------------------------------------------------------ others' metadata


def _ultralytics(metadata: Mapping[str, str], found: Signature, path: Path) -> Vision | None:
    """What Ultralytics' exporters write: `names` and `imgsz` as Python literals, `task`, `kpt_shape`, `end2end`, `args`.

    YOLOv5's own exporter writes `names` and `stride` alone, and its anchors have an objectness score.
    """
    task = metadata.get("task", "detect")
    if task not in _TASKS or len(found.inputs) != 1 or len(found.inputs[0].shape) != 4:
        log.info("`%s` has Ultralytics' metadata for the task `%s`, which is not known here", path.name, task)
        return None
    spec = found.inputs[0]
    names = _literal(metadata["names"])
    names = [*names.values()] if isinstance(names, dict) else names
    classes = tuple(map(str, names)) if isinstance(names, list | tuple) else ()
    size = _literal(metadata.get("imgsz", "")) or list(spec.shape[2:])
    size = [size, size] if isinstance(size, int) else size
    if not _are_sizes(size):
        log.info("`%s` has Ultralytics' metadata without a size", path.name)
        return None
    pixels = Preprocess(size=(size[0], size[1]), input=spec.name)
    if task == "classify":
        pixels = replace(pixels, resize="center-crop")
    transformer = metadata.get("head") == "RTDETRDecoder" or "rtdetr" in metadata.get("description", "").lower()
    if transformer:
        pixels = replace(pixels, resize="stretch")
    try:
        declared = _ultralytics_outputs(metadata, found, task, classes)
        if transformer:
            declared = replace(declared, box_format="cxcywh", normalized=True, suppress=False)
        vision = Vision(pixels, declared, source="Ultralytics metadata")
        vision.check(found)
    except UsageError as error:
        log.info("`%s` has Ultralytics' metadata that does not fit it: %s", path.name, error.message)
        return None
    log.info(
        "`%s` has no `trt_engine.vision` declaration; using its Ultralytics metadata: %s, %dx%d, %d classes",
        path.name, declared.decode, *pixels.size, len(classes),
    )  # fmt: skip
    return vision


def _ultralytics_outputs(
    metadata: Mapping[str, str], found: Signature, task: str, classes: tuple[str, ...]
) -> Postprocess:
    if task == "classify":
        return Postprocess("classify", classes=classes, output=found.outputs[0].name)
    protos = next((spec for spec in found.outputs if len(spec.shape) == 4), None) if task == "segment" else None
    shape = _literal(metadata.get("kpt_shape", "")) if task == "pose" else None
    points = (shape[0], shape[1]) if _are_sizes(shape) else None
    args = _literal(metadata.get("args", ""))
    final = metadata.get("end2end") == "True" or (isinstance(args, dict) and args.get("nms") is True)
    if task == "segment" and protos is None:
        raise UsageError("no output of mask prototypes", hint="export it again")
    extra = (protos.shape[1] if protos is not None else 0) + math.prod(points or (0,))
    rows = [spec for spec in found.outputs if len(spec.shape) == 3]
    settings: dict[str, Any] = {"decode": "yolov10"}
    if task == "pose" and points is None:
        raise UsageError("no shape of the keypoints", hint="export it again")
    if not final:
        settings, _ = recognise(
            rows or found.outputs,
            classes=len(classes),
            extra=extra,
            objectness=None if "task" not in metadata else False,
        )
    if rows:
        settings["output"] = rows[0].name
    return Postprocess(**settings, classes=classes, masks=protos is not None, keypoints=points)


def _are_sizes(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def check_data_exists(config: BuildConfig) -> None:
    """`FeedError` for data of a build that is not there, `UsageError` for a file of pre-processing that is not."""
    for flag, data in (("--calib-data", config.calib_data), ("--accuracy-data", config.accuracy_data)):
        if data is not None and data != "random" and not Path(data).exists():
            raise FeedError(f"no such file or folder `{data}`", hint=f"check the path of the data (`{flag}`)")
    if config.preprocess is not None and not is_preset(config.preprocess):
        read_json(Path(config.preprocess))
