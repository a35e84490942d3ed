"""`trt-engine cast` as a person and a script meet it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnx_models
from trt_engine.graph import emulate_half
from trt_engine.precision import autocast

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(autocast.PYTHON_VARIABLE, raising=False)
    return partial(call, "cast")


@pytest.fixture(autouse=True)
def net(tmp_path: Path) -> Path:
    return onnx_models.conv_net(tmp_path / "net.onnx")


def document(run: Run, *args: str) -> Any:
    code, out, err = run(*args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_report_says_what_was_cast_and_how_far_it_lies_from_fp32(run: Run, tmp_path: Path) -> None:
    told = document(run, "net.onnx", "--to", "fp16", "-o", "half.onnx", "--exclude-type", "Flatten")
    assert told["schema"] == "trt-engine/cast" and told["method"] == "built-in" and told["out"] == "half.onnx"
    assert (told["nodes"], told["nodes_cast"], told["casts_added"]) == (6, 5, 2)
    assert [(item["op"], item["code"]) for item in told["fp32_nodes"]] == [("Flatten", "excluded")]
    assert told["nbytes_after"] == (tmp_path / "half.onnx").stat().st_size < told["nbytes_before"]
    assert told["findings"] == [] and told["precision"]["shares"]["fp16"]["macs"] == 1
    parity = told["parity"]
    assert 0 <= parity["outputs"]["scores"]["max_rel"] < 1e-2 and parity["outputs"]["scores"]["cosine"] > 0.999
    assert sum(parity["kernels"].values()) >= 4 and parity["emulated"] is bool(parity["kernels"].get("fp32"))
    assert onnx.load(tmp_path / "half.onnx").graph.initializer[0].data_type == TensorProto.FLOAT16


def test_a_type_without_kernels_is_compared_by_rounding_and_that_is_said(run: Run) -> None:
    parity = document(run, "net.onnx", "--to", "bf16", "-o", "brain.onnx")["parity"]
    assert parity["emulated"] is True and "no kernel" in parity["note"]
    assert 0 < parity["outputs"]["scores"]["max_rel"] < 5e-2


def test_data_decides_what_auto_keeps(run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "huge.npz", images=np.full((1, 3, 8, 8), 60000, np.float32))
    told = document(run, "net.onnx", "--to", "fp16", "--auto-exclude", "--calib-data", "huge.npz", "-o", "half.onnx")
    assert {item["code"] for item in told["fp32_nodes"]} >= {"range"}
    np.savez(tmp_path / "small.npz", images=np.full((1, 3, 8, 8), 0.5, np.float32))
    told = document(
        run, "net.onnx", "--to", "fp16", "--auto-exclude", "--calib-data", "small.npz", "-o", "half.onnx", "--overwrite"
    )
    assert told["fp32_nodes"] == []


# ------------------------------------------------------------------------------------------------ the careful path


def python(tmp_path: Path, body: str) -> str:
    """An interpreter whose ModelOpt does as `body` says."""
    package = tmp_path / "fake" / "modelopt" / "onnx" / "autocast"
    package.mkdir(parents=True)
    (package.parents[1] / "__init__.py").write_text("__version__ = '0.0.test'\n")
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(body)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "fake"}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


CASTS = """
import onnx
from trt_engine.config.precision import CastConfig
from trt_engine.precision.cast_model import cast_proto
from pathlib import Path
def convert_to_mixed_precision(onnx_path, low_precision_type, keep_io_types, **more):
    assert not more or set(more) <= {"nodes_to_exclude", "calibration_data", "init_max"}, more
    print("a line that a library prints")
    config = CastConfig(keep_io=keep_io_types)
    return cast_proto(onnx.load(onnx_path), low_precision_type, folder=Path("."), config=config)[0]
"""


def test_the_careful_path_goes_through_the_same_checks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(autocast.PYTHON_VARIABLE, python(tmp_path, CASTS))
    told = document(run, "net.onnx", "--to", "fp16", "-o", "half.onnx", "--autocast")
    assert told["method"] == "autocast" and told["notes"] == ["by NVIDIA ModelOpt 0.0.test, AutoCast"]
    assert told["nodes_cast"] == 5 and told["parity"]["outputs"]["scores"]["cosine"] > 0.999


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise ImportError('no torch')", 3, "no torch"),
        ("def convert_to_mixed_precision(**given): raise ValueError('cannot')", 4, "cannot"),
        ("def convert_to_mixed_precision(**given):\n import onnx\n return onnx.ModelProto()", 4, "not valid ONNX"),
    ],
)
def test_a_modelopt_that_fails_is_told_and_leaves_nothing(
    body: str, code: int, words: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(autocast.PYTHON_VARIABLE, python(tmp_path, body))
    got, _, err = run("net.onnx", "--to", "fp16", "-o", "half.onnx", "--autocast")
    assert got == code and words in err and "hint:" in err
    assert not (tmp_path / "half.onnx").exists()


@pytest.mark.slow
def test_modelopt_itself_casts_the_net(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = os.environ.get("TRT_ENGINE_TEST_MODELOPT_PYTHON", sys.executable)
    monkeypatch.setenv(autocast.PYTHON_VARIABLE, interpreter)
    code, out, err = run("net.onnx", "--to", "fp16", "-o", "half.onnx", "--autocast", "--json")
    if code == 3 and "ModelOpt" in err:
        pytest.skip("NVIDIA ModelOpt is not installed (extra `quant`, or TRT_ENGINE_TEST_MODELOPT_PYTHON)")
    assert code == 0, err
    told = json.loads(out)
    assert told["nodes_cast"] == 5 and told["findings"] == [] and told["parity"]["outputs"]["scores"]["cosine"] > 0.999


@pytest.mark.parametrize(("peak", "codes"), [(1.01, ["fp16-overflow"]), (0.4, [])])
def test_numbers_that_leave_the_range_of_fp16_on_the_data_are_found_whatever_the_kernels_do(
    run: Run, tmp_path: Path, peak: float, codes: list[str]
) -> None:
    nodes = [
        onnx_models.node("MatMul", "x w", "a", name="big"),
        onnx_models.node("Mul", "a s", "b", name="down"),
        onnx_models.node("MatMul", "b v", "y", name="after"),
    ]
    weights = {"w": np.eye(32, dtype=np.float32) * np.float32(65504 * peak / 200), "s": np.float32(1 / 65504 / peak)}
    sides = {"x": (onnx_models.FLOAT, ["n", 32])}, {"y": (onnx_models.FLOAT, ["n", 32])}
    onnx_models.save(tmp_path / "big.onnx", nodes, *sides, weights | {"v": np.eye(32, dtype=np.float32)})
    x = np.random.default_rng(0).uniform(-100, 100, (8, 32)).astype(np.float32)
    x[3, 5] = 200
    np.save(tmp_path / "x.npy", x)
    told = document(run, "big.onnx", "--to", "fp16", "-o", "unseen.onnx")
    assert not any("infinite" in item for item in told["warnings"]), "drawn numbers stay small"
    told = document(run, "big.onnx", "--to", "fp16", "-o", "half.onnx", "--calib-data", "x.npy")
    assert [item["code"] for item in told["findings"]] == codes
    assert any("FP16's largest number" in item for item in told["warnings"]) is bool(codes)


def test_a_model_that_is_too_large_to_be_emulated_says_whose_numbers_its_parity_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulate_half, "_MAX_BYTES", 16)
    told = document(run, "net.onnx", "--to", "fp16", "-o", "half.onnx")
    assert told["parity"]["emulated"] is False
    if told["parity"]["kernels"].get("fp32"):
        assert "too large to be emulated" in told["parity"]["note"]
        assert any(item.startswith("parity is not that of fp16") for item in told["warnings"])
