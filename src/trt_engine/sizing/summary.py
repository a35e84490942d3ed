"""The closing text of `size`: what was built, both measurements, the count, the time, what to run next."""

from __future__ import annotations

import shlex

from trt_engine.records import BatchResult, SizeReport
from trt_engine.sizing.cliffs import advice
from trt_engine.sizing.deepstream import nvinfer_text

__all__ = ["peak_line", "text"]

_REASONS = {
    "peak_within_batch": "PEAK <= N",
    "max_batch": "--max-batch reached with PEAK > N; a larger N may sustain more",
    "out_of_memory": "out of memory beyond N; the last good answer stands",
    "static_batch": "the model's batch is fixed; export it with a dynamic batch for a larger one",
    "interrupted": "interrupted",
    "failed": "failed",
}


def text(report: SizeReport) -> str:
    """The summary of a complete run; its last line is the stream count."""
    unit = _unit(report)
    lines = [
        "=== Engine build complete ===",
        f"Model:   {report.model_name} ({report.model})",
        f"Engine:  {report.engine}",
        f"         ({report.backend}, {report.device}, {report.precision})",
        *(f"Note:    {note}" for note in report.notes),
        "",
        f"Results ({_protocol(report)}):",
        *_results(report, unit),
        "",
        _bound(report),
        *_held_back(report),
        "",
        _counts(report),
        f"Stopped: {_REASONS[report.stopped_because]}",
    ]
    if report.cliffs:
        lines.append(f"Cliffs:  {advice(report.cliffs)}")
    width = max(len(step.name) for step in report.steps) + 1
    lines += ["", "Timing:"]
    lines += [f"  {step.name + ':':<{width}} {step.seconds:8.2f} s" for step in report.steps]
    lines += [f"  {'total:':<{width}} {sum(step.seconds for step in report.steps):8.2f} s", "", *_next(report)]
    return "\n".join([*lines, "", peak_line(report)])


def peak_line(report: SizeReport) -> str:
    """`PEAK_GPU_STREAMS: N ...`, which says when no GPU was measured."""
    at = f"streams @{report.fps:g}fps"
    if _on_gpu(report):
        return f"PEAK_GPU_STREAMS: {report.peak_streams} {at} (GPU-only upper bound)"
    return f"PEAK_GPU_STREAMS: {report.peak_streams} {at} (measured on the CPU: no GPU's count)"


def _on_gpu(report: SizeReport) -> bool:
    return report.device.startswith("cuda")


def _unit(report: SizeReport) -> str:
    return "GPU" if _on_gpu(report) else "CPU" if report.device == "cpu" else report.device


def _protocol(report: SizeReport) -> str:
    rules = report.protocol
    if rules is None:
        return "nothing measured"
    scope = "copies included" if rules.transfers else "compute only"
    if _on_gpu(report) and rules.clock == "host":
        scope += ", the host's clock around synchronised runs"
    if rules.graph:
        scope += ", CUDA graph"
    return f"{rules.name}, {scope}, {rules.warmup_s:g} s warm-up, {rules.duration_s:g} s run"


def _results(report: SizeReport, unit: str) -> list[str]:
    labels = [f"BS={result.batch}:" for result in report.batches]
    width = max(map(len, labels))
    lines = []
    for label, result in zip(labels, report.batches, strict=True):
        lines.append(f"  {label:<{width}} {_result(result, unit)}")
        lines += [f"  {'':<{width}} not stable: {reason}" for reason in result.instability]
    return lines


def _result(result: BatchResult, unit: str) -> str:
    times = result.compute_ms
    return (
        f"{result.qps:.2f} QPS  |  {result.images_per_s:.2f} img/s  |  {unit} mean: {times.mean:.3f} ms  "
        f"P99: {times.p99:.3f} ms  per image: {result.per_image_ms:.3f} ms"
    )


def _bound(report: SizeReport) -> str:
    fps, images = f"{report.fps:g}", report.images_per_s or 0.0
    count = f"PEAK_GPU_STREAMS is floor({images:.2f} / {fps}) = {report.peak_streams}"
    if _on_gpu(report):
        return (
            f"{count}: the GPU-only upper bound at {fps} fps.\n"
            "DeepStream typically reaches 10-40 % fewer (NVDEC, mux, GStreamer); start its first run from this count."
        )
    return (
        f"{count}, measured on the CPU: it is no GPU's count.\n"
        "Build with TensorRT on the GPU that will serve and run `size` there. Its count is then the GPU-only upper bound\n"
        f"at {fps} fps: DeepStream typically reaches 10-40 % fewer (NVDEC, mux, GStreamer); start its first run from it."
    )


def _held_back(report: SizeReport) -> list[str]:
    largest = report.batches[-1].batch
    if (report.peak_streams or 0) <= largest:
        return []
    return [f"The engine's largest batch is {largest}: DeepStream puts at most {largest} streams into one batch of it."]


def _counts(report: SizeReport) -> str:
    engines, runs = report.engines_built, report.measurements
    line = f"Engines built: {engines}, measurements: {runs}"
    if report.scan_measurements:
        line += (
            f" (the doubling {engines - report.scan_engines} and {runs - report.scan_measurements},"
            f" the scan {report.scan_engines} and {report.scan_measurements})"
        )
    if report.out_of_memory:
        line += f"; out of memory at batch {', '.join(map(str, report.out_of_memory))}"
    return line


def _next(report: SizeReport) -> list[str]:
    folder = report.artifacts.get("folder", "")
    lines = [
        "Next:",
        f"  trt-engine inspect {shlex.quote(report.engine or '')}",
        f"  report: {report.artifacts.get('report_html', folder)}",
    ]
    if report.nvinfer:
        tensorrt = (report.engine or "").endswith(".engine")
        when = "" if tensorrt else ", for this model once it is built with TensorRT"
        lines += ["", f"nvinfer keys of DeepStream{when}:", nvinfer_text(report.nvinfer, report.nvinfer_notes)]
    return lines
