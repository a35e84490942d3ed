"""Beside NVIDIA ModelOpt's own calibrators: a seeded sample of benchmarks/calibration.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from programs import load_program

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "calibration.py"


@pytest.fixture(scope="module")
def calibration() -> Any:
    return load_program(PROGRAM, "benchmark_calibration")


@pytest.fixture(scope="module")
def interpreter() -> str:
    chosen = os.environ.get("TRT_ENGINE_TEST_MODELOPT_PYTHON", sys.executable)
    there = subprocess.run(
        [chosen, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('modelopt') is None)"], check=False
    )
    if there.returncode:
        pytest.skip("NVIDIA ModelOpt is not installed (extra `quant`, or TRT_ENGINE_TEST_MODELOPT_PYTHON)")
    return chosen


KINDS = ["relu(normal)", "relu(normal - 1)", "relu(laplace)", "|normal|", "relu6", "sigmoid", "gelu", "normal"]


@pytest.mark.slow
def test_entropy_is_modelopts_and_the_default_errs_hardly_more_than_the_best_of_its_three(
    calibration: Any, interpreter: str
) -> None:
    draws = [(20_000, 0)]
    for kind, theirs in calibration.drawn_thresholds(KINDS, draws, interpreter).items():
        found = calibration.distribution(kind, draws, theirs)
        assert found["entropy_bins_apart"] <= 1 and found["over_best"] <= 1.2 and found["over_least"] <= 2, found
