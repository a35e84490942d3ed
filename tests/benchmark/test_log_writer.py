"""The text log: its first line tells the truth, scripts find their lines, and it can be read back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.benchmark.measurement_protocols import resolve_protocol
from trt_engine.benchmark.trtexec_style_log import format_float, parse_log, render_log
from trt_engine.config.bench import BenchConfig
from trt_engine.environment import Environment
from trt_engine.records.bench import BenchRecord

STRICT = re.compile(r"\] \[I\] GPU Compute Time: min")


def record(samples_ms: tuple[float, ...] = tuple(1.0 + n / 1000 for n in range(1000)), **changes: Any) -> BenchRecord:
    device = changes.get("device", "cpu")
    protocol = resolve_protocol(
        BenchConfig(protocol=changes.pop("protocol", "trt-engine")),
        device,
        events=changes.pop("events", None),
        resident=changes.pop("resident", False),
    )
    facts: dict[str, Any] = {
        "engine": "models/m.engine.onnx", "backend": "onnxruntime", "device": device, "batch": 8,
        "shapes": {"x": (8, 3, 16, 16)}, "protocol": protocol, "environment": Environment.detect(), "compute_ms": samples_ms,
        "wall_s": 2.5, "started": "2026-01-02T03:04:05+00:00", "queries": len(samples_ms), "warmup_queries": 40,
    }  # fmt: skip
    return BenchRecord(**{**facts, **changes})


def on_gpu(**changes: Any) -> BenchRecord:
    samples = tuple(1.0 + n / 1000 for n in range(1000))
    board = dataclasses.replace(Environment.detect(), gpu="NVIDIA H200", compute_capability="9.0")
    return record(
        samples,
        device="cuda:0",
        environment=board,
        latency_ms=samples,
        enqueue_ms=tuple(s / 10 for s in samples),
        **changes,
    )


def test_the_first_line_of_a_cpu_log_says_that_no_gpu_was_involved() -> None:
    first = render_log(record()).splitlines()[0]
    assert first.startswith("# device: cpu (")
    assert "host-clock compute times on the CPU, no GPU was involved" in first


def test_a_cpu_log_has_no_line_a_strict_parser_takes_for_a_gpu_figure() -> None:
    text = render_log(record())
    assert not STRICT.search(text)
    assert "CPU Compute Time (host clock" in text
    assert not re.search(r"\] \[I\] (Latency|Enqueue Time|H2D Latency|D2H Latency|Total GPU Compute Time):", text)


def test_a_device_with_events_prints_trtexecs_lines_as_far_as_measured() -> None:
    text = render_log(on_gpu())
    assert STRICT.search(text)
    assert "[I] Latency: min" in text
    assert "H2D Latency" not in text
    assert "NVIDIA H200" in text.splitlines()[0]
    assert "[I] H2D Latency: min" in render_log(
        on_gpu(h2d_ms=(0.1,) * 1000, d2h_ms=(0.1,) * 1000, protocol="trtexec10")
    )


def test_the_log_says_how_it_was_measured_and_why_not_to_trust_it() -> None:
    made = record(
        stable=False,
        instability=("the last third ran 9.0 % slower",),
        warnings=("the machine was busy",),
        complete=False,
    )
    text = render_log(made)
    for part in (
        "Protocol: trt-engine",
        "Warmup completed 40 queries over 1000 ms",
        "Timing trace has 1000 queries over 2.5 s",
        "Not on this device: transfers, graph, spin",
        "[W] * Measurement is unstable: the last third",
        "the machine was busy",
        "interrupted",
    ):
        assert part in text


@given(st.floats(1e-12, 1e12))
def test_numbers_have_no_exponent_and_six_digits(value: float) -> None:
    text = format_float(value)
    assert re.fullmatch(r"\d+(\.\d+)?", text)
    assert float(text) == pytest.approx(value, rel=1e-5)


def test_the_lines_tell_when_it_was_not_when_it_was_written() -> None:
    made = record(started="2026-01-01T10:00:00+00:00", wall_s=5.0)
    stamps = {
        line.partition("] [")[2][3:17]: line[1:20] for line in render_log(made).splitlines() if line.startswith("[")
    }
    assert stamps["=== Measuremen"] == "01/01/2026-10:00:00"
    assert stamps["Warmup complet"] == "01/01/2026-10:00:01"
    assert stamps["Total Host Wal"] == "01/01/2026-10:00:06"


# ------------------------------------------------------------------------------------------------ read back


@pytest.mark.parametrize("made", [record(), on_gpu()], ids=["cpu", "gpu"])
def test_a_log_of_ours_is_read_back(made: BenchRecord) -> None:
    found = parse_log(render_log(made))
    assert (found.producer, found.status, found.device) == ("trt-engine", "passed", made.device)
    assert (found.protocol, found.batch, found.timed_queries, found.warmup_queries) == ("trt-engine", 8, 1000, 40)
    assert found.throughput_qps == 400
    times = found.gpu_compute_ms or found.compute_ms
    assert times is not None
    assert (times.mean, times.p99, times.p90) == (1.4995, 1.99, 1.899)
    assert (found.gpu_compute_ms is None) is (made.device == "cpu")
    assert found.cuda_graph is (made.device != "cpu")


def trtexec_log(version: str = "8502", *, end: str = "PASSED", extra: str = "", build: str = "") -> str:
    """A log in trtexec's line formats, with figures of a public 8.5.2 log of a YOLOv8 on an RTX 3090."""
    times = "min = 4.76367 ms, max = 5.03192 ms, mean = 4.9113 ms, median = 4.9054 ms, percentile(90%) = 4.94385 ms, "
    times += "percentile(95%) = 5.00531 ms, percentile(99%) = 5.02271 ms"
    stamp = "[08/23/2023-08:34:51]"
    lines = [
        f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}]{build} # trtexec --onnx=m.onnx --fp16 ",
        f"{stamp} [I] === Inference Options ===",
        f"{stamp} [I] Batch: Explicit",
        f"{stamp} [I] Data transfers: Enabled",
        f"{stamp} [I] Spin-wait: Disabled",
        f"{stamp} [I] CUDA Graph: Disabled",
        f"{stamp} [I] Selected Device: NVIDIA GeForce RTX 3090",
        f"{stamp} [I] Compute Capability: 8.6",
        f"{stamp} [I] [TRT] Loaded engine size: 13 MiB",
        f"{stamp} [W] [TRT] CUDA lazy loading is not enabled.",
        f"{stamp} [I] Engine built in 351.008 sec.",
        f"{stamp} [I] Engine deserialized in 0.0285541 sec.",
        f"{stamp} [I] Warmup completed 40 queries over 200 ms",
        f"{stamp} [I] Timing trace has 594 queries over 3.01626 s",
        f"{stamp} [V] Throughput: the observed throughput computed by dividing the number of queries by the walltime.",
        f"{stamp} [V] GPU Compute Time: the GPU latency to execute the kernels for a query.",
        f"{stamp} [I] Throughput: 196.933 qps",
        f"{stamp} [I] H2D Latency: min = 0 ms, max = 1e-05 ms, mean = 0 ms, median = 0 ms, percentile(99%) = inf ms",
        f"{stamp} [I] GPU Compute Time: {times}",
        f"{stamp} [I] Total Host Walltime: 3.01626 s",
        f"{stamp} [I] Total GPU Compute Time: 2.91731 s",
        *extra.splitlines(),
    ]
    if end:
        lines.append(f"&&&& {end} TensorRT.trtexec [TensorRT v{version}]{build} # trtexec --onnx=m.onnx --fp16 ")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("end", "status"), [("PASSED", "passed"), ("FAILED", "failed"), ("", "failed")])
def test_the_last_marker_decides_and_none_is_failed(end: str, status: str) -> None:
    assert parse_log(trtexec_log(end=end)).status == status
