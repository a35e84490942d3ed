"""`trt-engine pack`: the archive where it was asked for, nothing of anybody's overwritten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trt_engine.cli.main import run

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))

import sample_matrix


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return sample_matrix.matrix(tmp_path / "run")


def test_the_archive_lies_beside_the_run_and_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pack", "run"]) == 0
    told = capsys.readouterr().out
    assert "read it with `trt-engine report run.tar.gz`" in told and "left out, an engine or model" in told
    assert run(["report", "run.tar.gz"]) == 0
    from_archive = capsys.readouterr().out
    assert run(["report", "run"]) == 0
    assert capsys.readouterr().out == from_archive
    assert run(["inspect", "run.tar.gz"]) == 0
    assert "cells: 8" in capsys.readouterr().out


def test_a_folder_gets_the_archive_by_the_runs_name(folder: Path, tmp_path: Path) -> None:
    assert run(["pack", "run", "--outdir", "sent"]) == 0
    assert (tmp_path / "sent" / "run.tar.gz").is_file()
