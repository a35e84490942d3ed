"""What goes on to DeepStream, and the closing text."""

from __future__ import annotations

import configparser
from dataclasses import replace

import pytest
from planted import HERE, protocol, record

from trt_engine.records import BatchResult, CliffPoint, SizeReport, Step
from trt_engine.sizing.deepstream import benchmark_data, nvinfer_keys, nvinfer_text
from trt_engine.sizing.doubling import images_per_s, queries_per_s
from trt_engine.sizing.summary import text
from trt_engine.tensors import Signature, TensorSpec


def signature(*outputs: tuple[int, ...], image: tuple[int, ...] = (-1, 3, 160, 160)) -> Signature:
    return Signature(
        (TensorSpec("images", "float32", image),),
        tuple(TensorSpec(f"out{index}", "float32", shape) for index, shape in enumerate(outputs)),
    )


def keys(*outputs: tuple[int, ...], precision: str = "fp16") -> dict[str, str]:
    return nvinfer_keys(
        signature(*outputs), onnx_file="../model.onnx", engine_file="engines/x.engine", batch=48, precision=precision
    )


def test_the_block_can_be_pasted() -> None:
    made = keys((-1, 300, 6))
    parser = configparser.ConfigParser()
    parser.read_string(nvinfer_text(made))
    assert dict(parser["property"]) == made
    assert made["onnx-file"] == "../model.onnx"
    assert made["model-engine-file"] == "engines/x.engine"
    assert made["batch-size"] == "48"
    assert made["infer-dims"] == "3;160;160"
    assert made["net-scale-factor"].startswith("0.0039215")


@pytest.mark.parametrize(
    ("outputs", "kind", "cluster"),
    [
        (((-1, 300, 6),), "0", "4"),
        (((-1, 1000),), "1", None),
        (((-1, 84, 8400),), "100", None),
        (((-1, 300, 4), (-1, 300, 80)), "100", None),
    ],
)
def test_network_type_and_clustering_follow_from_the_outputs(
    outputs: tuple[tuple[int, ...], ...], kind: str, cluster: str | None
) -> None:
    made = keys(*outputs)
    assert (made["network-type"], made.get("cluster-mode")) == (kind, cluster)


@pytest.mark.parametrize(("precision", "mode"), [("fp32", "0"), ("int8", "1"), ("fp16", "2")])
def test_network_mode_is_the_precision(precision: str, mode: str) -> None:
    assert keys((-1, 300, 6), precision=precision)["network-mode"] == mode


def test_open_sizes_are_not_guessed() -> None:
    made = nvinfer_keys(
        signature((-1, 300, 6), image=(-1, 3, -1, -1)), onnx_file="m", engine_file="e", batch=1, precision="fp16"
    )
    assert "infer-dims" not in made


def result(batch: int, queries: int, *, device: str = "cpu") -> BatchResult:
    one = record(batch, queries=queries, device=device)
    times = one.compute()
    assert times is not None
    return BatchResult(
        batch=batch,
        qps=float(queries_per_s(one)),
        images_per_s=float(images_per_s(one)),
        per_image_ms=times.mean / batch,
        compute_ms=times,
        engine="e",
    )


def report(device: str = "cpu", **changes: object) -> SizeReport:
    made = SizeReport(
        model="models/x/model/x.onnx",
        engine="out/engines/x_dynamic_b64." + ("onnx" if device == "cpu" else "engine"),
        device=device,
        backend="onnxruntime",
        precision="fp32",
        peak_streams=42,
        images_per_s=1280.0,
        fps=30.0,
        batches=(result(1, 100), result(64, 20)),
        stopped_because="peak_within_batch",
        engines_built=1,
        measurements=2,
        steps=(Step("preflight", 0.1), Step("build b64", 1.5), Step("measure b1", 1.2), Step("measure b64", 1.2)),
        protocol=protocol(),
        environment=HERE,
        artifacts={"folder": "out", "report_html": "out/report.html"},
        model_name="x",
        nvinfer=keys((-1, 300, 6)),
        notes=("precision FP32: as the graph is",),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_last_line_is_the_count_and_says_when_no_gpu_was_measured() -> None:
    last = text(report()).splitlines()[-1]
    assert last == "PEAK_GPU_STREAMS: 42 streams @30fps (measured on the CPU: no GPU's count)"
    assert text(report("cuda:0")).splitlines()[-1] == "PEAK_GPU_STREAMS: 42 streams @30fps (GPU-only upper bound)"


def test_on_a_cpu_no_figure_is_called_a_gpus() -> None:
    told = text(report())
    assert "CPU mean: 10.000 ms" in told
    assert "GPU mean" not in told
    assert "GPU mean: 10.000 ms" in text(report("cuda:0"))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_bound_is_worded_as_an_upper_bound(device: str) -> None:
    told = " ".join(text(report(device)).split())
    assert "the GPU-only upper bound at 30 fps" in told.replace("Its count is then ", "")
    assert "10-40 % fewer (NVDEC, mux, GStreamer)" in told
    assert "start its first run from" in told


def test_the_summary_has_both_measurements_counts_times_and_what_to_run_next() -> None:
    told = text(report())
    assert "=== Engine build complete ===" in told
    assert "BS=1:" in told
    assert "BS=64: 20.00 QPS  |  1280.00 img/s" in told
    assert "P99:" in told
    assert "Engines built: 1, measurements: 2" in told
    assert "precision FP32: as the graph is" in told
    assert "build b64:" in told
    assert "4.00 s" in told
    assert "[property]" in told
    assert "trt-engine inspect" in told
    assert not any(word in told for word in ("H2D", "D2H", "transfer"))


def test_the_summary_tells_what_the_scan_cost_and_what_to_avoid() -> None:
    points = tuple(CliffPoint(batch, 100.0, 900.0, batch in (17, 18)) for batch in (16, 17, 18))
    told = text(report(cliffs=points, engines_built=2, measurements=19, scan_engines=1, scan_measurements=17))
    assert "Engines built: 2, measurements: 19 (the doubling 1 and 2, the scan 1 and 17)" in told
    assert "avoid batch 17-18" in told


def test_more_streams_than_the_batch_holds_are_said_to_be_more() -> None:
    assert "at most 64 streams" in text(report(peak_streams=65, stopped_because="max_batch"))
    assert "at most" not in text(report(peak_streams=64))


def test_out_of_memory_and_instability_are_told() -> None:
    shaky = replace(result(64, 20), stable=False, instability=("the mean drifts by 9 %",))
    told = text(report(out_of_memory=(128,), stopped_because="out_of_memory", batches=(result(1, 100), shaky)))
    assert "out of memory at batch 128" in told
    assert "the last good answer stands" in told
    assert "not stable: the mean drifts by 9 %" in told


def test_benchmark_data_has_the_shape_deepstream_reads_and_no_cpu_time_under_a_gpus_key() -> None:
    made = benchmark_data(report())
    assert made["max_bs"] == 64
    assert made["peak_gpu_streams"] == 42
    assert made["deepstream"] == {"run1": None, "run2": None}
    assert made["trtexec"]["bs1"] == {"qps": 100.0, "gpu_mean_ms": None, "cpu_mean_ms": 10.0}
    assert made["trtexec"]["bsmax"]["imgs_per_sec"] == 1280.0
    assert made["device"] == "cpu"
    assert "CPU" in made["note"]
    on_gpu = benchmark_data(report("cuda:0"))
    assert on_gpu["trtexec"]["bs1"] == {"qps": 100.0, "gpu_mean_ms": 10.0}
    assert set(on_gpu["trtexec"]["bsmax"]) == {"qps", "gpu_mean_ms", "p99_ms", "imgs_per_sec"}
    assert "the host's clock around a synchronised run, without copies" in on_gpu["note"]
