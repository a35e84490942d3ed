"""A seeded sample of `benchmarks/world.py`: models and texts that nobody here made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "world.py"


@pytest.mark.slow
def test_a_sample_of_the_world_is_right_or_rightly_refused(tmp_path: Path) -> None:
    folder, records = platformdirs.user_cache_path("trt-engine-tests") / "world", tmp_path / "world.jsonl"
    wanted = ["--kinds", "model,report", "--sample", "10", "--seed", "26", "--verbs", "inspect,lint,build,cast,read"]
    command = [sys.executable, str(PROGRAM), str(folder), "--fetch", str(folder), "--out", str(records), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "not tried" not in done.stdout and len(records.read_text().splitlines()) > 10
