"""`trt-engine report`: the result on stdout or in a file, and nothing of anybody's overwritten."""

from __future__ import annotations

import json
import os
import subprocess
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


@pytest.mark.parametrize("args", [["--json"], ["--format", "json"]])
def test_json_is_one_document_with_the_common_keys(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert run(["report", str(folder), *args]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"schema", "schema_version", "tool", "command", "warnings", "run", "summary", "artifacts"} <= set(said)
    assert said["schema"] == "trt-engine/report"
    assert said["summary"]["peak_streams"] == 29
    assert [item["batch"] for item in said["summary"]["measurements"]] == [1, 64]
    assert said["summary"]["measurements"][0]["compute_ms"]["p99"] > 1.9


@pytest.mark.parametrize(
    ("name", "begins"), [("x.md", "<!--"), ("x.html", "<!doctype"), ("x.txt", "trt-"), ("x.json", "{")]
)
def test_the_suffix_of_the_file_chooses_the_form(folder: Path, tmp_path: Path, name: str, begins: str) -> None:
    assert run(["report", str(folder), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text().startswith(begins)


def test_a_folder_gets_the_report_by_its_usual_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert run(["report", str(folder), "--format", "html", "-o", str(tmp_path / "there")]) == 0
    assert 'href="../run/records.jsonl"' in (tmp_path / "there" / "report.html").read_text()


def test_json_beside_a_file_says_where_it_lies(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.html"
    assert run(["report", str(folder), "-o", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["artifacts"] == {"report": str(target)}
    assert target.read_text().startswith("<!doctype")


def test_our_own_report_is_made_anew_without_asking(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.html"
    for _ in range(2):
        assert run(["report", str(folder), "-o", str(target)]) == 0


def test_a_file_of_somebody_else_stays_unless_yes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.md"
    target.write_text("mine\n")
    assert run(["report", str(folder), "-o", str(target)]) == 2
    told = capsys.readouterr()
    assert "exists and was not written by trt-engine" in told.err and "hint:" in told.err
    assert target.read_text() == "mine\n"
    assert run(["report", str(folder), "-o", str(target), "--overwrite"]) == 0
    assert target.read_text().startswith("<!--")


def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(["report", str(folder), "-o", str(tmp_path / "x.html"), "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_reading_a_run_writes_nothing_into_it(folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(["report", str(folder)]) == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["nowhere"], 2, "no such folder"),
        (["."], 2, "is not a run folder"),
        (["run/size.json"], 2, "is a file, expected the folder of a run"),
        (["run", "--format", "pdf"], 2, "pdf"),
        (["run", "--format", "html", "--json"], 2, "both use stdout"),
        (["run", "-o", "run/size.json/x.md"], 3, "a file is in the way"),
        ([], 2, "RUN"),
    ],
)
def test_bad_input_ends_with_its_exit_code_and_a_hint(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, said: str
) -> None:
    assert run(["report", *args]) == code
    told = capsys.readouterr().err
    assert said in told and "hint:" in told and "Traceback" not in told


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom trt_engine.cli.main import run\nassert run(['report', '--help']) == 0\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'jinja2', 'msgspec'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--overwrite", "--dry-run"]])
def test_a_pipe_in_the_place_of_a_report_stays_a_pipe(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run(["report", str(folder), "--format", "md", "-o", str(tmp_path / "pipe"), *more]) == 2
    assert "is a pipe" in capsys.readouterr().err and (tmp_path / "pipe").is_fifo()


def test_a_link_to_a_report_of_ours_is_followed(folder: Path, tmp_path: Path) -> None:
    assert run(["report", str(folder), "-o", str(tmp_path / "real.md")]) == 0
    before = (tmp_path / "real.md").stat().st_ino
    (tmp_path / "link.md").symlink_to(tmp_path / "real.md")
    assert run(["report", str(folder), "-o", str(tmp_path / "link.md")]) == 0
    assert (tmp_path / "link.md").is_symlink() and (tmp_path / "real.md").stat().st_ino != before


def test_outdir_is_a_folder_that_is_made(folder: Path, tmp_path: Path) -> None:
    assert run(["report", str(folder), "--format", "html", "--outdir", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "report.html").read_text().startswith("<!doctype")
