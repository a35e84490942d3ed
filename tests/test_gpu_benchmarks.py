"""Benchmarks on a GPU call the package as its users do."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import trt_engine as te

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
PROGRAMS = sorted(FOLDER.glob("*.py"))


SHARED = {"common", "networks"}
"""What the programs import from each other."""
OWN = {"self", "os", "torch"}
"""Whose private names are not the package's."""


def is_other(module: str) -> bool:
    """Whether that is a program of `benchmarks/`, which may use private names."""
    return module not in SHARED and (FOLDER.parent / f"{module}.py").exists()


def private_uses(source: str) -> list[str]:
    """What a program takes from the package or from the folder that a user of `te.*` would not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.startswith("trt_engine.") or is_other(name.name)]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or "."
            found += [module] if is_other(module) or module.partition(".")[0] == "trt_engine" else []
        elif isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            inner = node.attr == "runner"  # what an engine wraps
            if (of not in OWN and (private or inner)) or (of == "te" and node.attr not in (*te.__all__, "__version__")):
                found.append(node.attr)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("trt_engine."):
            found.append(str(node.value))
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_gpu_benchmark_uses_the_public_interface_alone(program: Path) -> None:
    assert private_uses(program.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import trt_engine.store",
        "from trt_engine import device",
        "from trt_engine.device import open_device",
        "import trt_engine as te\nte.load_component",
        "runner._session",
        "runner.runner.device",
        "from overhead import Record",
        "import soak",
        "importlib.import_module('trt_engine.device')",
    ],
)
def test_each_way_around_the_public_interface_is_noticed(source: str) -> None:
    assert private_uses(source)
    assert not private_uses("import trt_engine as te\nfrom common import Bench\nte.load.__doc__")


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


@pytest.mark.slow
def test_the_serve_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("httptools")
    command = [sys.executable, str(FOLDER / "serve.py"), "--out", str(tmp_path), "--device", "cpu", "--seconds", "0.5"]
    command += ["--max-batch", "4", "--concurrency", "4", "--processes", "1", "--ways", "http-shared-memory"]
    subprocess.run(command, check=True, timeout=300)
    records = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["cell"] for record in records] == [
        "bare full batches", "bare batcher", "server", "http-shared-memory throughput", "http-shared-memory at 50%",
        "http-shared-memory at 80%",
    ]  # fmt: skip
    assert not any(record.get("error") or record.get("failed") for record in records)
    assert records[3]["share_of_bare"] > 0 and records[-1]["latency_ms"]


# ------------------------------------------------------------------------------------------------ the suite


NARROW = {"width": 64, "depth": 2, "heads": 4}


@pytest.mark.parametrize(("name", "more"), [("vit", {"size": 32}), ("bert", {"tokens": 16, "words": 100})])
def test_onnx_runtime_s_own_operators_compute_the_same_network(
    name: str, more: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    import networks

    outputs = []
    for fused in (False, True):
        path = networks.NETWORKS[name](tmp_path / f"{fused}.onnx", half=False, fused=fused, **NARROW, **more)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        random = np.random.default_rng(0)
        feeds = {
            item.name: random.standard_normal((2, *item.shape[1:]), np.float32)
            if item.type == "tensor(float)"
            else random.integers(0, 2, (2, *item.shape[1:]))
            for item in session.get_inputs()
        }
        outputs.append(session.run(None, feeds)[0])
    np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)


def measured(**more: Any) -> dict[str, Any]:
    return {
        "schema": "trt-engine/gpu-suite", "model": "vit", "batch": 64, "precision": "fp16", "autotune_s": 0,
        "state": "measured", "reason": None, "ceilings": {"fp16": 750.0, "copy_tb_s": 4.2}, "flops": 2250 * 10**9,
        "p50_us": {"onnxruntime": 5100.0, "onnxruntime bind": 5000.0, "torch compiled": 6000.0},
        "ratio_to_best_peer": {"onnxruntime": [0.85, 0.8, 0.9], "onnxruntime bind": [0.83, 0.82, 0.84]},
        "best_peer": "torch compiled", "errors": {"onnxruntime": 1e-3}, "failed": {"torch eager": "no memory"},
        "builds": {}, "environment": {"gpu": "H200", "cpu": "", "driver": "1", "libraries": {"torch": "2.11"}},
    } | more  # fmt: skip


def test_the_suite_s_table_lists_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import suite_table

    late = {"state": "not reached", "reason": "not measured within 540 s"}
    steps = {"cpu fp16": 3.4e6, "cuda fp32 numpy": 60_000.0, "resident": 50_000.0, "tuned": 5000.0}
    records = [
        measured(), measured(**late), measured(batch=1, **late),
        measured(schema="trt-engine/gpu-steps", p50_us=steps, failed={}),
    ]  # fmt: skip
    assert suite_table.write(records, "records.jsonl", tmp_path / "page.md", tmp_path / "chart.svg") == 0
    page, chart = (tmp_path / "page.md").read_text(), (tmp_path / "chart.svg").read_text()
    assert "| ViT-B/16 b64 fp16 | 5.1 / 5 | 6 | 0.83 (0.82 to 0.84) | 3 | 1.0e-03 |" in page
    assert "| ViT-B/16 b1 fp16 | not reached: not measured within 540 s |" in page
    (missing,) = [line for line in page.splitlines() if line.startswith("- Not reached, without a record: ")]
    assert " ResNet-50 b1 fp16;" in missing and "ViT-B/16 b1 fp16;" not in missing and "ViT-B/16 b8 fp16;" in missing
    assert "**680x**" in page and "1.20x" in page and "it is 12.0x" in page
    assert "0.83 ours: onnxruntime bind" in chart and chart.count("<rect") == 3
    assert suite_table.write([], "records.jsonl", tmp_path / "page.md", tmp_path / "chart.svg") == 5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed here")
def test_the_suite_runs_on_a_cpu_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "suite.jsonl"
    command = [
        sys.executable,
        str(FOLDER / "suite.py"),
        "--device",
        "cpu",
        "--folder",
        str(tmp_path),
        "--out",
        str(out),
    ]
    command += ["--models", "vit", "--batches", "2", "--ours", "onnxruntime", "--no-torch", "--seconds", "0.1"]
    ended = subprocess.run([*command, "--limit-s", "1"], timeout=300, check=False)
    assert ended.returncode == 5 and json.loads(out.read_text())["state"] == "not reached"
    subprocess.run([*command, "--budget-s", "1"], check=True, timeout=300)
    _, second = (json.loads(line) for line in out.read_text().splitlines())
    assert second["state"] == "measured" and max(second["errors"].values()) < 1e-4
    assert {"onnxruntime", "onnxruntime bind", "onnxruntime own fusion"} <= set(second["p50_us"])
    subprocess.run(command, check=True, timeout=300)
    assert len(out.read_text().splitlines()) == 2
