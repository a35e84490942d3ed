"""`trt-engine size`, as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from onnx_models import FLOAT, node, save
from trt_engine.cli.main import run

QUICK = ["--duration", "100ms", "--warmup", "0", "--max-batch", "2"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A detector in shape: images [batch, 3, 8, 8] to boxes [batch, 32, 6]; and a store of the test's own."""
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    return save(
        tmp_path / "net.onnx",
        [node("Conv", "images w", "maps", name="conv"), node("Reshape", "maps shape", "boxes", name="flat")],
        {"images": (FLOAT, ["batch", 3, 8, 8])},
        {"boxes": (FLOAT, ["batch", 32, 6])},
        {
            "w": helper.make_tensor("w", TensorProto.FLOAT, [3, 3, 1, 1], [0.1 * value for value in range(9)]),
            "shape": helper.make_tensor("shape", TensorProto.INT64, [3], [-1, 32, 6]),
        },
    )


def told(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_json_is_one_document_with_the_keys_of_the_contract(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["size", str(model), *QUICK, "--json", "-o", str(tmp_path / "out")]) == 0
    out, err = told(capsys)
    made: dict[str, Any] = json.loads(out)
    for name in (
        "schema", "schema_version", "tool", "command", "warnings", "model", "engine", "peak_streams", "images_per_s",
        "batches", "stop_reason", "engines_built", "measurements", "steps", "protocol", "environment", "artifacts",
    ):  # fmt: skip
        assert name in made
    assert made["capacity"] is None, "without a deadline"
    assert [batch["batch"] for batch in made["batches"]] == [1, 2]
    for batch in made["batches"]:
        assert batch["images_per_s"] == pytest.approx(batch["qps"] * batch["batch"])
        assert batch["per_image_ms"] == pytest.approx(batch["compute_ms"]["mean"] / batch["batch"])
        assert {"mean", "median", "p90", "p95", "p99"} <= set(batch["compute_ms"])
    assert made["peak_streams"] == int(made["batches"][-1]["images_per_s"] // 30)
    assert made["engines_built"] == 1
    assert made["measurements"] == 2
    written = json.loads((tmp_path / "out" / "size.json").read_text())
    assert made == written
    assert not re.search("h2d|d2h|gpu_compute", out, re.IGNORECASE)
    assert "batch 2:" in err, "the talk is on stderr"


def test_the_last_line_is_the_stream_count_and_the_logs_answer_the_sources_grep(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["size", str(model), *QUICK, "-q", "-o", str(tmp_path / "out")]) == 0
    out, _ = told(capsys)
    last = out.rstrip("\n").splitlines()[-1]
    assert re.fullmatch(r"PEAK_GPU_STREAMS: \d+ streams @30fps \(measured on the CPU, not a GPU\)", last)
    assert "cluster-mode=4" in out
    log = (tmp_path / "out" / "b2" / "trtexec_b2.log").read_text()
    qps = re.findall(r"Throughput:\s*([0-9.]+)", log)[-1]
    mean = re.findall(r"GPU Compute Time:.*mean = ([0-9.]+)", log)[-1]
    data = json.loads((tmp_path / "out" / "benchmark_data.json").read_text())
    assert float(qps) == pytest.approx(data["trtexec"]["bsmax"]["qps"], rel=1e-4)
    assert float(mean) == pytest.approx(data["trtexec"]["bsmax"]["cpu_mean_ms"], rel=1e-4)
    assert "cpu" in log.splitlines()[0]
