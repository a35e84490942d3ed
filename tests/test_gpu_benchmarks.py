"""Benchmarks on a GPU call the package as its users do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"


@pytest.mark.slow
def test_the_overhead_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "overhead.py"), "--out", str(tmp_path), "--device", "cpu"]
    subprocess.run([*command, "--models", "vit", "--batches", "2", "--seconds", "0.1"], check=True, timeout=300)
    record = json.loads((tmp_path / "overhead.jsonl").read_text(encoding="utf-8"))
    assert max(record["differences"].values()) < 1e-4
    assert {"ort_numpy", "ours_numpy"} <= set(record["samples_us"])


SMALL = {
    "batcher": ["--batch", "4", "--callers", "8"],
    "pool": ["--callers", "1", "2", "--sessions", "1", "2"],
    "replicas": ["--models", "vit", "--batch", "4"],
    "shapes": ["--models", "vit", "--batches", "1", "4"],
    "profilers": ["--profilers", "layers", "--batch", "4"],
    "int8": ["--models", "vit", "--batches", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_gpu_benchmark_writes_its_record_on_a_cpu(tmp_path: Path, name: str) -> None:
    out = tmp_path / "records.jsonl"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--out", str(out), "--folder", str(tmp_path / "kept")]
    ended = subprocess.run([*command, "--device", "cpu", "--seconds", "0.5", *SMALL[name]], timeout=300, check=False)
    assert ended.returncode in (0, 8)  # 8: a demand that is made of a GPU
    (record,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert record["model"] == "vit" and record["samples"] and record["results"]
    assert (
        record["command"].startswith(f"python benchmarks/gpu/{name}.py --device cpu")
        and str(tmp_path) not in out.read_text()
    )


# ------------------------------------------------------------------------------------------------ the suite
