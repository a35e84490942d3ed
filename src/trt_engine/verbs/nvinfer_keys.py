"""nvinfer keys of a model, as `size` prints them and `deploy deepstream` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trt_engine.errors import UsageError
from trt_engine.graph.lint_rules.model_view import image_input
from trt_engine.tensors import Shape, Signature
from trt_engine.vision.output_roles import recognise
from trt_engine.vision.spec import Postprocess, Preprocess, Vision

NO_IMAGE_INPUT = (
    "no image input found (four dimensions, 1, 3 or 4 channels): a stream counts as one row of the batch per frame, and "
    "nvinfer keys are omitted"
)
_NETWORK_MODES = {"fp32": "0", "tf32": "0", "int8": "1", "fp16": "2"}  # nvinfer's numbers
_FILTERS = {"nearest": "0", "bilinear": "1", "bicubic": "2", "lanczos": "4"}
"""`scaling-filter` on the GPU (`NvBufSurfTransform_Inter`); its default is nearest."""
_COLORS = {"RGB": "0", "BGR": "1", "L": "2"}
_PROJECT = "https://github.com/marcoslucianops/DeepStream-Yolo"
_DISPLAY_SCORE, _METRIC_SCORE = 0.25, 0.001
"""Least score of a box to show; it replaces the declared one where that is the default, which is for COCO's metrics."""
_STRIDES = (8, 16, 32)
"""Strides of YOLO's grids, in pixels of the input."""
_PREPROCESS_NOTE = (
    "the model declares no pre-processing (`trt_engine.vision`), so these are unknown; nvinfer defaults to 1, 0, RGB, and "
    "stretching:"
)
_FACTOR_FORMULA = "y = net-scale-factor * (x - offset), x from 0 to 255"


@dataclass(frozen=True, slots=True)
class NvinferConfig:
    """Known `[property]` keys, and notes on unknown ones and on what nvinfer cannot express.

    Keys: Gst-nvinfer's page of the DeepStream documentation.
    """

    keys: dict[str, str]
    notes: tuple[str, ...] = ()
    class_groups: dict[str, dict[str, str]] = field(default_factory=dict)
    """Groups of classes: thresholds of `class-attrs-all`."""
    warning: str | None = None
    """What nvinfer needs besides these files to find anything; None for a classifier."""


def nvinfer_config(
    signature: Signature,
    shapes: Mapping[str, Shape],
    vision: Vision | None,
    *,
    onnx_file: str | None,
    engine_file: str,
    batch: int,
    precision: str,
    labels_file: str | None = None,
    gie_id: int = 1,
) -> NvinferConfig:
    """nvinfer keys from an engine and its model's declaration; none without an image input.

    `shapes` are the engine's opt shapes, for dynamic dimensions of the signature; file paths are relative to the folder of
    the configuration.
    """
    notes: list[str] = []
    try:
        image = image_input(signature.inputs) if vision is None else vision.input_spec(signature)
    except UsageError as error:
        notes.append(f"the declared pre-processing does not match the model and is ignored: {error.message}")
        vision, image = None, image_input(signature.inputs)
    if image is None:
        return NvinferConfig({})
    keys = {
        "gpu-id": "0",
        **({"onnx-file": onnx_file} if onnx_file is not None else {}),
        "model-engine-file": engine_file,
        "batch-size": str(batch),
        "network-mode": _NETWORK_MODES.get(precision, "2"),
    }
    nhwc = (vision.preprocess.layout if vision else image.image_layout) == "NHWC"
    _, *sizes = shapes.get(image.name, image.shape)
    if vision is not None:
        sizes = [size if size > 0 else own for size, own in zip(sizes, vision.preprocess.shape, strict=True)]
    channels, height, width = (sizes[2], *sizes[:2]) if nhwc else sizes
    if min(channels, height, width) > 0:
        keys["infer-dims"] = f"{channels};{height};{width}"  # in this order for both layouts
    if nhwc:
        keys["network-input-order"] = "1"
    declared = vision.postprocess if vision is not None else _recognise(signature, (height, width), notes)
    network = _network_keys(declared, signature)
    keys |= network.keys
    known, said = _undeclared_keys(channels) if vision is None else _preprocess_keys(vision.preprocess)
    keys |= known
    notes += said
    if vision is not None and vision.source != "declared":
        notes.append(f"pre-processing from {vision.source}")
    if labels_file is not None:
        keys["labelfile-path"] = labels_file
    if others := [f"`{spec.name}`" for spec in signature.inputs if spec is not image]:
        notes.append(
            f"nvinfer fills only `{image.name}`; {', '.join(others)}: implement NvDsInferInitializeInputLayers"
        )
    keys["gie-unique-id"] = str(gie_id)
    return NvinferConfig(keys, (*notes, *network.notes), network.class_groups, network.warning)


def _network_keys(declared: Postprocess | None, signature: Signature) -> NvinferConfig:
    """Kind of network, its parser, classes and thresholds; raw tensors where the outputs are not known."""
    if declared is None:
        return NvinferConfig({"network-type": "100", "output-tensor-meta": "1"})
    if declared.decode == "classify":
        notes = []
        if declared.activation != "none":
            notes.append(
                f"the outputs are scores before {declared.activation}, nvinfer compares them with the threshold"
            )
        return NvinferConfig({"network-type": "1", "classifier-threshold": "0"}, tuple(notes))
    masks = declared.masks or declared.keypoints is not None
    clustered = declared.suppressed and not masks  # the parsers of masks and keypoints suppress themselves
    keys = {"network-type": "3" if masks else "0", "cluster-mode": "2" if clustered else "4"}
    classes = len(declared.classes)
    if classes:
        keys["num-detected-classes"] = str(classes)
    notes = [] if classes else ["num-detected-classes: number of classes of the model"]
    least = _DISPLAY_SCORE if declared.min_score == _METRIC_SCORE else declared.min_score
    group = {"pre-cluster-threshold": f"{least:g}", "topk": str(declared.max_detections)}
    if clustered:
        group["nms-iou-threshold"] = f"{declared.iou:g}"
    function, library, where = _parser(declared)
    parser = {function[0]: function[1], "custom-lib-path": library}
    if masks:
        keys["output-instance-mask"] = "1"
    if declared.keypoints is None and masks:
        keys["segmentation-threshold"] = "0.5"
    fits = len(signature.outputs) == 1 and declared.has_final_rows and not masks
    warning = f"nvinfer has no parser for this network's boxes: build `{library}` of {where}"
    if fits:
        keys |= parser
    else:  # a parser that reads other rows would draw garbage; without one nvinfer stops with an error
        warning += (
            ", and export the network with that project's `utils/export_*.py`, whose rows its parser reads"
            + (", or as [N, rows, 6] (Ultralytics: `nms=True`)" if clustered else "")
            + "; until then the two lines are comments"
        )
        notes += [f"{name}={value}" for name, value in parser.items()]
    return NvinferConfig(keys, (*notes, warning), {"class-attrs-all": group}, warning)


def _parser(declared: Postprocess) -> tuple[tuple[str, str], str, str]:
    """Key and name of the function, path of the library, and the project that has them."""
    kind = "Pose" if declared.keypoints is not None else "Seg" if declared.masks else ""
    library = f"nvdsinfer_custom_impl_Yolo{f'_{kind.lower()}' if kind else ''}"
    path = f"{library}/lib{library}.so"
    if not kind:
        return ("parse-bbox-func-name", "NvDsInferParseYolo"), path, _PROJECT
    return ("parse-bbox-instance-mask-func-name", f"NvDsInferParseYolo{kind}"), path, f"{_PROJECT}-{kind}"


def _recognise(signature: Signature, size: tuple[int, int], notes: list[str]) -> Postprocess | None:
    """The decoding of undeclared outputs, where names or the cells of YOLO's grids leave no doubt; a note that says so."""
    outputs, cells = signature.outputs, sum((size[0] // step) * (size[1] // step) for step in _STRIDES)
    spec = outputs[0]
    if len(outputs) == 1 and len(spec.shape) == 2 and spec.shape[1] != 7:
        return Postprocess("classify")
    grids = {cells, 3 * cells} if min(size) > 0 else set()
    rows = len(spec.shape) == 3 and (not grids.isdisjoint(spec.shape[1:]) or spec.shape[2] == 6)
    named = len(outputs) > 1 and any("box" in spec.name or "dets" in spec.name for spec in outputs)
    if not rows and not named:
        return None
    try:
        settings, assumed = recognise(outputs)
    except UsageError:
        return None
    notes.append(
        f"no post-processing is declared; by names and shapes of the outputs: `{settings['decode']}`, {assumed}"
    )
    return Postprocess(**settings)


def _undeclared_keys(channels: int) -> tuple[dict[str, str], list[str]]:
    """Keys from the channels alone, and notes on the rest."""
    notes = [_PREPROCESS_NOTE, f"net-scale-factor, offsets: {_FACTOR_FORMULA}; 0.00392156862745098 makes it 0 to 1"]
    keys = {}
    if channels == 1:
        keys["model-color-format"] = _COLORS["L"]
    elif channels == 4:
        notes.append("model-color-format: nvinfer supports 3 channels or 1 (gray), this input has 4")
    else:
        notes.append("model-color-format: 0 RGB, 1 BGR")
    notes.append("maintain-aspect-ratio, symmetric-padding: 1 and 1 letterbox with the image centered; 0 stretches")
    return keys, notes


def _preprocess_keys(preprocess: Preprocess) -> tuple[dict[str, str], list[str]]:
    """`(x * scale - mean) / std` as nvinfer keys, the color format, and resizing."""
    keys, notes = _scale_keys(preprocess)
    keys["model-color-format"] = _COLORS[preprocess.channels]
    keys |= {"scaling-filter": _FILTERS[preprocess.interpolation], "scaling-compute-hw": "1"}
    if preprocess.resize == "center-crop":
        notes.append("the model declares a center crop, which nvinfer does not support: crop the frames before it")
    elif preprocess.resize == "stretch":
        keys["maintain-aspect-ratio"] = "0"
    else:
        keys |= {"maintain-aspect-ratio": "1", "symmetric-padding": str(int(preprocess.pad_placement == "center"))}
        if any(preprocess.pad_value):
            notes.append(
                f"nvinfer pads with 0, the model declares {_join_values(preprocess.pad_value)}: results may differ slightly"
            )
    return keys, notes


def _scale_keys(preprocess: Preprocess) -> tuple[dict[str, str], list[str]]:
    """nvinfer has one factor above 0 for all channels, and an offset of 0 or more per channel."""
    factors = [preprocess.scale / std for std in preprocess.std]
    offsets = [mean / preprocess.scale for mean in preprocess.mean]
    keys, notes = {}, []
    if len(set(factors)) > 1 and min(factors) > 0:
        nearest = 2 * max(factors) * min(factors) / (max(factors) + min(factors))
        off = max(abs(factor - nearest) / factor for factor in factors)
        notes.append(
            f"net-scale-factor is one number for all channels ({_FACTOR_FORMULA}), the model declares "
            f"{_join_values(factors)}: use {preprocess.scale:.15g} and divide its first layer's weights by the std, "
            f"per channel; the nearest single factor, {nearest:.9g}, is off by up to {100 * off:.2g} %"
        )
    elif min(factors) <= 0:
        notes.append(
            f"net-scale-factor must be above 0 ({_FACTOR_FORMULA}), the model declares {_join_values(factors)}"
        )
    else:
        keys["net-scale-factor"] = f"{factors[0]:.15g}"
    if min(offsets) < 0:
        notes.append(f"offsets must be 0 or more ({_FACTOR_FORMULA}), the model declares {_join_values(offsets)}")
    elif any(offsets):
        keys["offsets"] = _join_values(offsets)
    return keys, notes


def _join_values(values: Iterable[float]) -> str:
    return ";".join(f"{value:.9g}" for value in values)
