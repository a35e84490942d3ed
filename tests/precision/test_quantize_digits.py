"""The digits detector quantised: accuracy on pictures it was never calibrated on; a sample of `benchmarks/int8_fuzz.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from trt_engine.precision.quantize_model import quantize

ROOT = Path(__file__).parents[2] / "examples" / "digits"
Array = np.ndarray[Any, Any]


@cache
def _modules() -> Any:
    sys.path.insert(0, str(ROOT))
    try:
        import detect
        import scenes
    finally:
        sys.path.remove(str(ROOT))
    return detect, scenes


@pytest.fixture(scope="module")
def data() -> list[dict[str, Array]]:
    """64 generated scenes of the training side, in batches of 8."""
    detect, scenes = _modules()
    from PIL import Image

    made = [detect.letterbox(Image.fromarray(scenes.scene("train", 5, index).image))[0] for index in range(64)]
    return [{"images": np.stack(made[at : at + 8])} for at in range(0, 64, 8)]


def average_precision(path: Path, level: str = "ALL") -> float:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    kind = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = kind.ORT_ENABLE_BASIC if level == "BASIC" else kind.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    run: Callable[[Array], Array] = lambda images: session.run(["output0"], {"images": images})[0]  # noqa: E731
    return float(_modules()[0].average_precision(run, ROOT / "val").ap50_95)


@pytest.mark.slow
@pytest.mark.parametrize("calibrator", ["mse", "entropy", "minmax", "percentile"])
def test_int8_keeps_the_accuracy_of_the_digits_detector_on_onnx_runtimes_kernels(
    tmp_path: Path, data: list[dict[str, Array]], calibrator: str
) -> None:
    report = quantize(ROOT / "model.onnx", "int8", out=tmp_path / "q.onnx", calib_data=data, calibrator=calibrator)
    assert report.precision.shares["int8"].macs is not None and report.precision.shares["int8"].macs > 0.95
    assert report.nbytes is not None and report.nbytes < 0.3 * report.nbytes_before
    assert average_precision(tmp_path / "q.onnx") > average_precision(ROOT / "model.onnx") - 0.01


@pytest.mark.slow
def test_fp8_keeps_the_accuracy_of_the_digits_detector_and_the_emulation_agrees(
    tmp_path: Path, data: list[dict[str, Array]]
) -> None:
    quantize(ROOT / "model.onnx", "fp8", out=tmp_path / "q.onnx", emulate=tmp_path / "e.onnx", calib_data=data)
    kernels, emulated = average_precision(tmp_path / "q.onnx", "BASIC"), average_precision(tmp_path / "e.onnx")
    assert abs(kernels - emulated) < 0.003
    assert emulated > average_precision(ROOT / "model.onnx") - 0.007  # 64 pictures; on 512 the drop is 0.004


PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "int8_fuzz.py"


@pytest.mark.slow
def test_random_graphs_in_int8_are_right_and_run_in_integer_kernels() -> None:
    command = [sys.executable, str(PROGRAM), "--graphs", "20", "--seed", "33"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "'right'" in done.stdout
