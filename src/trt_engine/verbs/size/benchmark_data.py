"""`benchmark_data.json` of a run for DeepStream."""

from __future__ import annotations

from typing import Any

from trt_engine.records.size import BatchResult, SizeReport


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
