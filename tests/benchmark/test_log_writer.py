"""The text log: its first line tells the truth, scripts find their lines, and it can be read back."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.benchmark.log_parser import parse_log, read_log
from trt_engine.benchmark.log_writer import format_float, render_log
from trt_engine.benchmark.measurement_protocols import resolve_protocol
from trt_engine.config.bench import BenchConfig
from trt_engine.environment import Environment
from trt_engine.errors import UsageError
from trt_engine.records.bench import BenchRecord
from trt_engine.records.summary import percentile

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


def grep(pattern: str, path: Path) -> list[str]:
    """What `grep -oP` of a script finds; every line of it."""
    done = subprocess.run(["grep", "-oP", pattern, str(path)], capture_output=True, text=True, check=False)
    return done.stdout.split()


@pytest.mark.parametrize("made", [record(), on_gpu()], ids=["cpu", "gpu"])
def test_the_scripts_that_read_trtexecs_logs_find_their_figures(made: BenchRecord, tmp_path: Path) -> None:
    path = tmp_path / "trtexec_b8.log"
    path.write_text(render_log(made))
    ascending = sorted(made.compute_ms)
    assert grep(r"Throughput:\s*\K[0-9.]+", path) == [format_float(made.qps)] == ["400"]
    assert grep(r"GPU Compute Time:.*mean = \K[0-9.]+", path) == ["1.4995"]
    assert grep(r"GPU Compute Time:.*percentile\(99%\) = \K[0-9.]+", path) == [format_float(percentile(ascending, 99))]


def test_the_first_line_of_a_cpu_log_says_that_no_gpu_was_involved() -> None:
    first = render_log(record()).splitlines()[0]
    assert first.startswith("# device: cpu (")
    assert "host-clock compute times on the CPU, no GPU was involved" in first


def test_a_cpu_log_has_no_line_a_strict_parser_takes_for_a_gpu_figure() -> None:
    text = render_log(record())
    assert not STRICT.search(text)
    assert "CPU Compute Time (host clock" in text
    assert not re.search(r"\] \[I\] (Latency|Enqueue Time|H2D Latency|D2H Latency|Total GPU Compute Time):", text)


def test_a_gpu_called_with_host_arrays_prints_no_gpu_compute_time_either() -> None:
    text = render_log(record(device="cuda:0", events=False))
    assert not STRICT.search(text)
    assert "its copies included" in text.splitlines()[0]


def test_a_gpu_by_the_hosts_clock_says_so_and_that_no_copy_is_inside() -> None:
    text = render_log(record(device="cuda:0", events=False, resident=True))
    assert not STRICT.search(text)
    assert "synchronised run" in text.splitlines()[0] and "no copies" in text.splitlines()[0]
    assert "Synchronised Run Time (host clock; it stands where scripts look for GPU Compute Time:" in text
    assert "CUDA Graph: Enabled" in text and "Data transfers: Disabled" in text
    assert parse_log(text).compute_ms is not None


def test_a_device_with_events_prints_trtexecs_lines_as_far_as_measured() -> None:
    text = render_log(on_gpu())
    assert STRICT.search(text)
    assert "[I] Latency: min" in text
    assert "H2D Latency" not in text
    assert "NVIDIA H200" in text.splitlines()[0]
    assert "[I] H2D Latency: min" in render_log(
        on_gpu(h2d_ms=(0.1,) * 1000, d2h_ms=(0.1,) * 1000, protocol="trtexec10")
    )


def test_the_fake_device_is_called_what_it_is() -> None:
    assert "does not exist" in render_log(record(device="fake:0")).splitlines()[0]


def test_the_percentiles_asked_for_are_printed() -> None:
    text = render_log(record(percentiles=(50.0, 99.9)))
    assert "percentile(50%)" in text and "percentile(99.9%)" in text
    assert "percentile(90%)" not in text


def test_no_percentiles_at_all_are_printed_when_none_are_asked_for() -> None:
    assert "percentile" not in render_log(record(percentiles=())).replace("trtexec percentiles", "")


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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-05, "0.00001"), (46580.0, "46580"), (15525.94, "15525.9"), (0.00152588, "0.00152588")],
)
def test_numbers_are_written_out(value: float, text: str) -> None:
    assert format_float(value) == text


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


def test_a_log_that_stops_in_the_middle_is_failed() -> None:
    text = render_log(record())
    assert parse_log(text[: text.index("Throughput")]).status == "failed"
    assert parse_log(render_log(record(complete=False))).status == "failed"


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


def test_trtexecs_summary_is_read_as_printed() -> None:
    found = parse_log(trtexec_log())
    assert (found.producer, found.status, found.end_marker) == ("trtexec", "passed", "PASSED")
    assert (found.trt_version, found.trt_build, found.command) == ("8.5.2", None, "trtexec --onnx=m.onnx --fp16")
    assert (found.gpu, found.compute_capability) == ("NVIDIA GeForce RTX 3090", "8.6")
    assert (found.throughput_qps, found.total_host_walltime_s, found.total_gpu_compute_time_s) == (
        196.933,
        3.01626,
        2.91731,
    )
    assert (found.warmup_queries, found.warmup_ms, found.timed_queries) == (40, 200.0, 594)
    assert (found.engine_built_s, found.engine_deserialized_s, found.engine_size_mib) == (351.008, 0.0285541, None)
    assert (found.data_transfers, found.spin_wait, found.cuda_graph) == (True, False, False)
    assert found.gpu_compute_ms is not None and found.h2d_ms is not None
    assert (found.gpu_compute_ms.min, found.gpu_compute_ms.mean, found.gpu_compute_ms.p99) == (4.76367, 4.9113, 5.02271)
    assert (found.h2d_ms.max, found.h2d_ms.p90, found.h2d_ms.p99) == (1e-05, None, float("inf"))
    assert found.latency_ms is None and found.compute_ms is None and found.batch is None
    assert (found.warning_lines, found.error_lines) == (1, 0)


@pytest.mark.parametrize(
    ("number", "build", "version"),
    [("8601", "", "8.6.1"), ("101601", " [b11]", "10.16.1"), ("110100", " [b106]", "11.1.0"), ("100300", "", "10.3.0")],
)
def test_the_banners_number_is_the_version(number: str, build: str, version: str) -> None:
    found = parse_log(trtexec_log(number, build=build))
    assert found.trt_version == version
    assert found.trt_build == (int(build.strip(" []b")) if build else None)


@pytest.mark.parametrize(("end", "status"), [("PASSED", "passed"), ("FAILED", "failed"), ("", "failed")])
def test_the_last_marker_decides_and_none_is_failed(end: str, status: str) -> None:
    assert parse_log(trtexec_log(end=end)).status == status


def test_performance_warnings_are_named_in_their_order() -> None:
    extra = """[08/23/2023-08:34:51] [W] * GPU compute time is unstable, with coefficient of variance = 7.5%.
[08/23/2023-08:34:51] [W]   If not already in use, locking GPU clock frequency may improve the stability.
[08/23/2023-08:34:51] [W] * Throughput may be bound by Enqueue Time rather than GPU Compute."""
    found = parse_log(trtexec_log(extra=extra))
    assert found.perf_warnings == ("enqueue_bound", "gpu_compute_unstable")
    assert found.gpu_compute_coeff_var_pct == 7.5


@pytest.mark.slow
@given(st.text(max_size=400))
def test_any_text_is_answered(text: str) -> None:
    assert parse_log(text).status in ("passed", "failed")


@given(st.integers(0, 4000))
def test_a_log_cut_anywhere_is_answered(length: int) -> None:
    assert parse_log(trtexec_log()[:length]).trt_version in (None, "8.5.2")


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photo.log"
    path.write_bytes(bytes(range(256)) * 10)
    with pytest.raises(UsageError, match="not a log of trtexec or trt-engine") as caught:
        read_log(path)
    assert caught.value.hint


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_log(tmp_path / "absent.log")
