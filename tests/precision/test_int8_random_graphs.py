"""A seeded sample of `benchmarks/int8_fuzz.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "int8_fuzz.py"


@pytest.mark.slow
def test_random_graphs_in_int8_are_right_and_run_in_integer_kernels() -> None:
    command = [sys.executable, str(PROGRAM), "--graphs", "20", "--seed", "33"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "'right'" in done.stdout
