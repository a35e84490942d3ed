"""`trt-engine pack`: the archive where it was asked for, nothing of anybody's overwritten."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

from trt_engine.cli.main import run

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))

import sample_matrix

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "pack.json"


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


def test_pages_written_beside_both_are_equal_too(folder: Path, tmp_path: Path) -> None:
    assert run(["pack", "run"]) == 0
    assert run(["report", "run", "-o", "a.html"]) == run(["report", "run.tar.gz", "-o", "b.html"]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--engines", "--no-raw"]])
def test_json_fits_its_schema(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run(["pack", "run", "--json", *more]) == 0
    said = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(said)
    assert said["artifacts"] == {"archive": "run.tar.gz"} and said["dry_run"] == (more == ["--dry-run"])


def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(["pack", "run", "--dry-run"]) == 0
    assert "would pack" in capsys.readouterr().out and sorted(tmp_path.rglob("*")) == before


def test_a_file_of_somebody_else_stays_unless_yes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.zip").write_bytes(b"mine")
    assert run(["pack", "run", "-o", "x.zip"]) == 2
    assert "was not written by trt-engine" in capsys.readouterr().err and (tmp_path / "x.zip").read_bytes() == b"mine"
    assert run(["pack", "run", "-o", "x.zip", "--overwrite"]) == 0
    assert run(["pack", "run", "-o", "x.zip"]) == 0  # ours now


def test_a_folder_gets_the_archive_by_the_runs_name(folder: Path, tmp_path: Path) -> None:
    assert run(["pack", "run", "--outdir", "sent"]) == 0
    assert (tmp_path / "sent" / "run.tar.gz").is_file()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "no such folder"),
        (["."], "is not a run folder"),
        (["run", "-o", "x.rar"], "not an archive name"),
        (["run/run.json"], "is a file, expected the folder of a run"),
        ([], "RUN"),
    ],
)
def test_bad_input_ends_with_its_exit_code_and_a_hint(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert run(["pack", *args]) == 2
    told = capsys.readouterr().err
    assert said in told and "hint:" in told and "Traceback" not in told
