"""What goes on to DeepStream: the nvinfer keys of a model, and `benchmark_data.json` in the shape its reports read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trt_engine.errors import UsageError
from trt_engine.graph.findings import image_input, image_layout
from trt_engine.records import BatchResult, SizeReport
from trt_engine.tensors import Shape, Signature, TensorSpec
from trt_engine.vision.declaration import Preprocess, Vision

__all__ = ["NO_PICTURES", "Nvinfer", "benchmark_data", "nvinfer", "nvinfer_text"]

NO_PICTURES = (
    "no input looks like pictures (four dimensions, 1, 3 or 4 channels): a stream is counted as one row of the batch for "
    "each frame, and there are no keys for nvinfer"
)
_NETWORK_MODES = {"fp32": "0", "tf32": "0", "int8": "1", "fp16": "2"}  # nvinfer's numbers
_COLORS = {"RGB": "0", "BGR": "1", "L": "2"}
_PARSER = "parse-bbox-func-name and custom-lib-path: your parser of the outputs, nvinfer has none built in for them"
_UNDECLARED = (
    "the model declares no pre-processing (`trt_engine.vision`), so these are not known; where they are left out, nvinfer "
    "takes 1, 0, RGB, and stretches:"
)
_FACTOR = "y = net-scale-factor * (x - offset), x from 0 to 255"


@dataclass(frozen=True, slots=True)
class Nvinfer:
    """The `[property]` keys that are known, and in words what is not known or what no key of nvinfer can say.

    Keys and their meaning: Gst-nvinfer's page of the DeepStream documentation.
    """

    keys: dict[str, str]
    notes: tuple[str, ...] = ()


def nvinfer(
    signature: Signature,
    shapes: Mapping[str, Shape],
    vision: Vision | None,
    *,
    onnx_file: str,
    engine_file: str,
    batch: int,
    precision: str,
) -> Nvinfer:
    """What follows from an engine and its model's declaration; no keys at all when no input takes pictures.

    `shapes` are the engine's usual ones, for what is open in the signature; files are as seen from the folder of the
    configuration.
    """
    notes: list[str] = []
    try:
        image = image_input(signature.inputs) if vision is None else vision.input_of(signature)
    except UsageError as error:
        notes.append(f"the declared pre-processing does not fit the model and is left out: {error.message}")
        vision, image = None, image_input(signature.inputs)
    if image is None:
        return Nvinfer({})
    kind, cluster = _network(signature)
    keys = {
        "gpu-id": "0",
        "onnx-file": onnx_file,
        "model-engine-file": engine_file,
        "batch-size": str(batch),
        "network-mode": _NETWORK_MODES.get(precision, "2"),
        "network-type": kind,
    }
    if cluster is not None:
        keys["cluster-mode"] = cluster
    nhwc = (vision.preprocess.layout if vision else image_layout(image)) == "NHWC"
    _, *sizes = shapes.get(image.name, image.shape)
    channels, height, width = (sizes[2], *sizes[:2]) if nhwc else sizes
    if min(channels, height, width) > 0:
        keys["infer-dims"] = f"{channels};{height};{width}"  # in this order for both layouts
    if nhwc:
        keys["network-input-order"] = "1"
    known, said = _undeclared(channels) if vision is None else _declared(vision.preprocess)
    keys |= known
    notes += said
    if vision is not None and vision.source != "declared":
        notes.append(f"the pre-processing is what {vision.source} says")
    if others := [f"`{spec.name}`" for spec in signature.inputs if spec is not image]:
        notes.append(
            f"nvinfer fills `{image.name}` alone; {', '.join(others)}: NvDsInferInitializeInputLayers of yours"
        )
    keys["gie-unique-id"] = "1"
    if kind == "100":
        keys["output-tensor-meta"] = "1"
    if kind == "0":
        notes += [_PARSER, "num-detected-classes: how many the model was trained for"]
    return Nvinfer(keys, tuple(notes))


def _undeclared(channels: int) -> tuple[dict[str, str], list[str]]:
    """The channels say whether it is grey; the rest only the model's training knows."""
    notes = [_UNDECLARED, f"net-scale-factor, offsets: {_FACTOR}; 0.00392156862745098 makes it 0 to 1"]
    keys = {}
    if channels == 1:
        keys["model-color-format"] = _COLORS["L"]
    elif channels == 4:
        notes.append("model-color-format: nvinfer feeds 3 channels, or 1 of grey, and this input takes 4")
    else:
        notes.append("model-color-format: 0 RGB, 1 BGR")
    notes.append("maintain-aspect-ratio, symmetric-padding: 1 and 1 letterbox, the picture centred; 0 stretches")
    return keys, notes


def _declared(pixels: Preprocess) -> tuple[dict[str, str], list[str]]:
    """`(x * scale - mean) / std` in nvinfer's terms, the colours, and how a frame gets the size."""
    keys, notes = _scaled(pixels)
    keys["model-color-format"] = _COLORS[pixels.channels]
    if pixels.resize == "center-crop":
        notes.append("the model declares a centre crop, which nvinfer does not make: crop the frames before it")
    elif pixels.resize == "stretch":
        keys["maintain-aspect-ratio"] = "0"
    else:
        keys |= {"maintain-aspect-ratio": "1", "symmetric-padding": str(int(pixels.pad_placement == "center"))}
        if any(pixels.pad_value):
            notes.append(
                f"nvinfer pads with 0, the model declares {_listed(pixels.pad_value)}: results can differ a little"
            )
    return keys, notes


def _scaled(pixels: Preprocess) -> tuple[dict[str, str], list[str]]:
    """One factor above 0 for all channels, and an offset of 0 or more for each: that is all nvinfer has."""
    factors = [pixels.scale / std for std in pixels.std]
    offsets = [mean / pixels.scale for mean in pixels.mean]
    keys, notes = {}, []
    if len(set(factors)) > 1 and min(factors) > 0:
        nearest = 2 * max(factors) * min(factors) / (max(factors) + min(factors))
        off = max(abs(factor - nearest) / factor for factor in factors)
        notes.append(
            f"net-scale-factor is one number for all channels ({_FACTOR}), the model declares {_listed(factors)}: take "
            f"{pixels.scale:.15g} and divide its first layer's weights by the std, by channel; the nearest one factor, "
            f"{nearest:.9g}, is off by up to {100 * off:.2g} %"
        )
    elif min(factors) <= 0:
        notes.append(f"net-scale-factor must be above 0 ({_FACTOR}), the model declares {_listed(factors)}")
    else:
        keys["net-scale-factor"] = f"{factors[0]:.15g}"
    if min(offsets) < 0:
        notes.append(f"offsets must be 0 or more ({_FACTOR}), the model declares {_listed(offsets)}")
    elif any(offsets):
        keys["offsets"] = _listed(offsets)
    return keys, notes


def _listed(values: Iterable[float]) -> str:
    return ";".join(f"{value:.9g}" for value in values)


def _network(signature: Signature) -> tuple[str, str | None]:
    """nvinfer's network-type and cluster-mode: what the outputs look like."""
    if any(map(_set_prediction, signature.outputs)):
        return "0", "4"  # a detector whose boxes are final: no clustering
    if len(signature.outputs) == 1 and len(signature.outputs[0].shape) == 2:
        return "1", None  # a classifier
    return "100", None  # raw tensors, for a probe of your own


def _set_prediction(spec: TensorSpec) -> bool:
    """`[N, 300, 6]`: x1, y1, x2, y2, score, class; no non-maximum suppression to follow."""
    return len(spec.shape) == 3 and spec.shape[2] == 6 and 0 < spec.shape[1] <= 1000


def nvinfer_text(keys: Mapping[str, str], notes: Iterable[str]) -> str:
    """A `[property]` block to paste into nvinfer's configuration, the notes as its comments."""
    return "\n".join(
        ["[property]", *(f"{name}={value}" for name, value in keys.items()), *(f"# {note}" for note in notes)]
    )


def benchmark_data(report: SizeReport) -> dict[str, Any]:
    """`benchmark_data.json`. The keys named `gpu_` hold figures of a GPU or null: a CPU's stand under `cpu_`."""
    gpu = report.device.startswith("cuda")
    first, last = report.batches[0], report.batches[-1]
    bs1: dict[str, Any] = {"qps": first.qps} | _mean(first, gpu)
    bsmax = {"qps": last.qps} | _mean(last, gpu)
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
        made["note"] = "gpu_mean_ms is the host's clock around a synchronised run" + (
            ", its copies included" if report.protocol.transfers else ", without copies"
        )
    if not gpu:
        made["note"] = "measured on a CPU: gpu_mean_ms is null, cpu_mean_ms is the CPU's; peak_gpu_streams is the CPU's"
    return made


def _mean(result: BatchResult, gpu: bool) -> dict[str, float | None]:
    mean = result.compute_ms.mean
    return {"gpu_mean_ms": mean} if gpu else {"gpu_mean_ms": None, "cpu_mean_ms": mean}
