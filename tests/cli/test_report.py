"""`trt-engine report`: the result on stdout or in a file, and nothing of anybody's overwritten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trt_engine.cli.main import run

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))

import sample_runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return sample_runs.cpu_run(tmp_path / "run")


def test_text_goes_to_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(folder)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("trt-engine report · digits\nCPU: Example Processor 9000")
    assert told.err == ""


@pytest.mark.parametrize(
    ("form", "begins"), [("md", "<!-- made by"), ("html", "<!doctype html>"), ("text", "trt-engine")]
)
def test_every_form_goes_to_stdout(folder: Path, capsys: pytest.CaptureFixture[str], form: str, begins: str) -> None:
    assert run(["report", str(folder), "--format", form]) == 0
    assert capsys.readouterr().out.startswith(begins)


@pytest.mark.parametrize(
    ("name", "begins"), [("x.md", "<!--"), ("x.html", "<!doctype"), ("x.txt", "trt-"), ("x.json", "{")]
)
def test_the_suffix_of_the_file_chooses_the_form(folder: Path, tmp_path: Path, name: str, begins: str) -> None:
    assert run(["report", str(folder), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text().startswith(begins)


def test_our_own_report_is_made_anew_without_asking(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.html"
    for _ in range(2):
        assert run(["report", str(folder), "-o", str(target)]) == 0


def test_reading_a_run_writes_nothing_into_it(folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(["report", str(folder)]) == 0
    assert sorted(tmp_path.rglob("*")) == before
