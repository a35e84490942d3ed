"""A sample of `benchmarks/parity_check.py`: no false alarm, no missed defect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("net", ["digits", "resnet-trained", "vit-trained"])
def test_right_outputs_pass_and_planted_defects_fail(net: str, seed: int) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "parity_check.py"), "--only", net, "--seeds", str(seed)]
    done = subprocess.run(
        [*program, "--formats", "fp32", "fp16", "int8"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 false alarms" in done.stdout and ", 0 missed" in done.stdout
