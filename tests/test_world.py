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
    small = "--kinds model,report --sample 10 --seed 1843 --verbs lint,build,read".split()  # models of seconds each
    command = [sys.executable, str(PROGRAM), str(folder), "--fetch", str(folder), "--out", str(records), *small]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "not tried" not in done.stdout and len(records.read_text().splitlines()) > 10
