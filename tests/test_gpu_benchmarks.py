"""Benchmarks on a GPU call the package as its users do."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_gpu_benchmark_uses_the_public_interface_alone(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("trt_engine.")]
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] != "trt_engine"
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr in ("__init__", "__doc__", "__name__", "__version__"), (
                node.attr
            )


@pytest.mark.slow
def test_the_overhead_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "overhead.py"), "--out", str(tmp_path), "--device", "cpu"]
    subprocess.run([*command, "--models", "vit", "--batches", "2", "--seconds", "0.1"], check=True, timeout=300)
    record = json.loads((tmp_path / "overhead.jsonl").read_text(encoding="utf-8"))
    assert max(record["differences"].values()) < 1e-4
    assert {"ort_numpy", "ours_numpy"} <= set(record["samples_us"])


@pytest.mark.slow
def test_the_serve_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("httptools")
    command = [sys.executable, str(FOLDER / "serve.py"), "--out", str(tmp_path), "--device", "cpu", "--seconds", "0.5"]
    command += ["--max-batch", "4", "--concurrency", "4", "--processes", "1", "--ways", "http-shared-memory"]
    subprocess.run(command, check=True, timeout=300)
    records = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["cell"] for record in records] == [
        "bare full batches", "bare batcher", "server", "http-shared-memory 1 processes", "http-shared-memory throughput",
        "http-shared-memory at 50%", "http-shared-memory at 80%",
    ]  # fmt: skip
    assert not any(record.get("error") or record.get("failed") for record in records)
    assert records[4]["share_of_bare"] > 0 and records[-1]["latency_ms"]
