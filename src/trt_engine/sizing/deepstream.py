"""DeepStream output: nvinfer keys of a model, and `benchmark_data.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trt_engine.errors import UsageError
from trt_engine.graph.lint_rules.model_view import image_input
from trt_engine.records.size import BatchResult, SizeReport
from trt_engine.tensors import Shape, Signature, TensorSpec
from trt_engine.vision.spec import Preprocess, Vision

NO_IMAGE_INPUT = (
    "no image input found (four dimensions, 1, 3 or 4 channels): a stream counts as one row of the batch per frame, and "
    "nvinfer keys are omitted"
)
_NETWORK_MODES = {"fp32": "0", "tf32": "0", "int8": "1", "fp16": "2"}  # nvinfer's numbers
_FILTERS = {"nearest": "0", "bilinear": "1", "bicubic": "2", "lanczos": "4"}
"""`scaling-filter` on the GPU (`NvBufSurfTransform_Inter`); its default is nearest."""
_COLORS = {"RGB": "0", "BGR": "1", "L": "2"}
_PARSER_NOTE = "parse-bbox-func-name and custom-lib-path: your output parser, nvinfer has no built-in one"
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
    kind, cluster = _network_type(signature)
    keys = {
        "gpu-id": "0",
        **({"onnx-file": onnx_file} if onnx_file is not None else {}),
        "model-engine-file": engine_file,
        "batch-size": str(batch),
        "network-mode": _NETWORK_MODES.get(precision, "2"),
        "network-type": kind,
    }
    if cluster is not None:
        keys["cluster-mode"] = cluster
    nhwc = (vision.preprocess.layout if vision else image.image_layout) == "NHWC"
    _, *sizes = shapes.get(image.name, image.shape)
    channels, height, width = (sizes[2], *sizes[:2]) if nhwc else sizes
    if min(channels, height, width) > 0:
        keys["infer-dims"] = f"{channels};{height};{width}"  # in this order for both layouts
    if nhwc:
        keys["network-input-order"] = "1"
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
    keys["gie-unique-id"] = "1"
    if kind == "100":
        keys["output-tensor-meta"] = "1"
    if kind != "0":
        return NvinferConfig(keys, tuple(notes))
    known, said, groups = _detector_keys(vision)
    return NvinferConfig(keys | known, (*notes, *said), groups)


def _detector_keys(vision: Vision | None) -> tuple[dict[str, str], list[str], dict[str, dict[str, str]]]:
    """Keys of a detector's classes, notes, and the group of their threshold."""
    notes = [_PARSER_NOTE]
    if vision is None or not vision.postprocess.classes:
        notes.append("num-detected-classes: number of classes of the model")
    if vision is None:
        return {}, notes, {}
    classes = len(vision.postprocess.classes)
    keys = {"num-detected-classes": str(classes)} if classes else {}
    return keys, notes, {"class-attrs-all": {"pre-cluster-threshold": f"{vision.postprocess.min_score:g}"}}


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


def _network_type(signature: Signature) -> tuple[str, str | None]:
    """nvinfer's network-type and cluster-mode, from the output shapes."""
    if any(map(_is_set_prediction, signature.outputs)):
        return "0", "4"  # a detector whose boxes are final: no clustering
    if len(signature.outputs) == 1 and len(signature.outputs[0].shape) == 2:
        return "1", None  # a classifier
    return "100", None  # raw tensors, for a custom probe


def _is_set_prediction(spec: TensorSpec) -> bool:
    """`[N, 300, 6]`: x1, y1, x2, y2, score, class; without non-maximum suppression."""
    return len(spec.shape) == 3 and spec.shape[2] == 6 and 0 < spec.shape[1] <= 1000


def benchmark_data(report: SizeReport) -> dict[str, Any]:
    """`benchmark_data.json`. Keys `gpu_*` are null for a CPU, whose values are in `cpu_*`."""
    gpu = report.device.startswith("cuda")
    first, last = report.batches[0], report.batches[-1]
    bs1: dict[str, Any] = {"qps": first.qps} | _mean_ms(first, gpu)
    bsmax = {"qps": last.qps} | _mean_ms(last, gpu)
    bsmax |= {"p99_ms": last.compute_ms.p99, "imgs_per_sec": last.images_per_s}
    made: dict[str, Any] = {
        "model_name": report.model_name,
        "engine": report.engine,
        "max_bs": last.batch,
        "device": report.device,
        "trtexec": {"bs1": bs1, "bsmax": bsmax},
        "peak_gpu_streams": report.peak_streams,
        "deepstream": {"run1": None, "run2": None},
    }
    if gpu and report.protocol is not None and report.protocol.clock == "host":
        made["note"] = "gpu_mean_ms is host clock time around a synchronized run" + (
            ", its copies included" if report.protocol.transfers else ", without copies"
        )
    if not gpu:
        made["note"] = "measured on a CPU: gpu_mean_ms is null, cpu_mean_ms and peak_gpu_streams are the CPU's"
    return made


def _mean_ms(result: BatchResult, gpu: bool) -> dict[str, float | None]:
    mean = result.compute_ms.mean
    return {"gpu_mean_ms": mean} if gpu else {"gpu_mean_ms": None, "cpu_mean_ms": mean}
