"""A profiler starts the program it watches in the profile's folder: what was named from here is found there too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG_S
from trt_engine.profiling.instruments import nsight_tools


def test_packages_of_a_relative_pythonpath_are_found_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "beside.py").write_text("told = 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("here", str(tmp_path / "nothing"))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import beside; print(beside.told)"], cwd=tmp_path / "elsewhere",
        env=nsight_tools.tool_environment(), capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.stdout.strip() == "found", done.stderr
