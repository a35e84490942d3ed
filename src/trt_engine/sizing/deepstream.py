"""What goes on to DeepStream: the nvinfer keys of a model, and `benchmark_data.json` in the shape its reports read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_engine.records import BatchResult, SizeReport
from trt_engine.tensors import Signature, TensorSpec

__all__ = ["benchmark_data", "nvinfer_keys", "nvinfer_text"]

_NETWORK_MODES = {"fp32": "0", "tf32": "0", "int8": "1", "fp16": "2"}  # nvinfer's numbers
_NOT_THERE = "parse-bbox-func-name and custom-lib-path: your parser of the outputs, nvinfer has none built in for them"


def nvinfer_keys(
    signature: Signature, *, onnx_file: str, engine_file: str, batch: int, precision: str
) -> dict[str, str]:
    """The `[property]` keys that follow from the model; files are as seen from the folder of the configuration."""
    image = next((spec for spec in signature.inputs if len(spec.shape) == 4), signature.inputs[0])
    kind, cluster = _network(signature)
    keys = {
        "gpu-id": "0",
        "onnx-file": onnx_file,
        "model-engine-file": engine_file,
        "batch-size": str(batch),
        "network-mode": _NETWORK_MODES.get(precision, "2"),
        "network-type": kind,
    }
    if all(size > 0 for size in image.shape[1:]):
        keys["infer-dims"] = ";".join(map(str, image.shape[1:]))
    if cluster is not None:
        keys["cluster-mode"] = cluster
    if image.dtype in ("float32", "float16", "bfloat16"):
        keys["net-scale-factor"] = "0.00392156862745098"  # 1/255: pixels to 0..1
    keys |= {"model-color-format": "0", "maintain-aspect-ratio": "1", "symmetric-padding": "1", "gie-unique-id": "1"}
    if kind == "100":
        keys["output-tensor-meta"] = "1"
    return keys


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


def nvinfer_text(keys: Mapping[str, str]) -> str:
    """A `[property]` block to paste into nvinfer's configuration."""
    lines = ["[property]", *(f"{name}={value}" for name, value in keys.items())]
    if keys.get("network-type") == "0":
        lines += [f"# {_NOT_THERE}", "# num-detected-classes: how many the model was trained for"]
    return "\n".join(lines)


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
