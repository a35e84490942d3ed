"""`trt-engine compare`: the table, the document, and the exit code that a rule asks for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from patience import HANG_S, until
from trt_engine.cli.main import run

QUICK = ["--duration", "300ms", "--restarts", "6"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an engine, one of other weights, and a store."""
    folder = tmp_path_factory.mktemp("compare")
    for name, weight in (("a", 1.0), ("b", 1.25)):
        save(
            folder / f"{name}.onnx",
            [node("Mul", "x w", "y")],
            {"x": (FLOAT, ["batch", 64])},
            {"y": (FLOAT, ["batch", 64])},
            {"w": np.full(64, weight, np.float32)},
        )
        te.build(
            folder / f"{name}.onnx",
            out=folder / f"{name}.engine.onnx",
            batch=(1, 2, 8),
            store=te.Store(folder / "store"),
        )
    return folder


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(place / "store"))
    monkeypatch.chdir(place)


def compare(*args: str | Path) -> int:
    return run(["compare", *map(str, args)])


def test_the_text_has_engines_figures_outputs_and_how_it_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("a.engine.onnx", "b.engine.onnx", *QUICK) == 0
    told = capsys.readouterr().out
    for text in (
        "b.engine.onnx against a.engine.onnx: median: ",
        "Against a.engine.onnx, per cent of it with the interval",
        "slower %",
        "best class same %",
        "The engines:",
        "Output differences:",
        "reloaded 6 times",
        "percentile-t",
    ):
        assert text in told
    rows = [line.split() for line in told.splitlines()]
    assert ["a.engine.onnx", "fp32", "a.engine.onnx", "onnxruntime", "cpu"] in [row[:5] for row in rows]
    (output,) = [row for row in rows if row[:1] == ["y"]]
    assert "0.25" in output and output[-1] == "100"


def test_rules_end_with_the_exit_code_of_what_failed_and_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("a.engine.onnx", "b.engine.onnx", *QUICK)
    assert compare(*pair, "--fail-if", "slower:100000%", "--fail-if", "error:0.3") == 0
    assert ["slower:100000%", "held"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert compare(*pair, "--fail-if", "error:0.2", "--json") == 7
    told = capsys.readouterr()
    doc = json.loads(told.out)
    assert doc["schema"] == "trt-engine/compare" and doc["gates"][0]["failed"]
    assert re.search(r"y: .*\(0\.25 of the \w+'s scale\), 0\.2 is allowed", told.err) and "hint:" in told.err
    assert compare(*pair, "--fail-if", "slow:3%") == 2


def test_a_rule_without_an_interval_has_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("s1", "s2"):
        words = ["bench", "a.engine.onnx", "--duration", "0", "--warmup", "0s", "--iterations", "60", "-o", name]
        assert run(words) == 0
    pair = ("s1/records.jsonl", "s2/records.jsonl", "--fail-if", "p99-slower:0%")
    capsys.readouterr()
    assert compare(*pair) == 0
    told = capsys.readouterr().out
    assert "p99-slower:0%  not judged  " in told and "held" not in told
    assert compare(*pair, "--strict") == 9
    assert "the rule `p99-slower:0%` was not judged" in capsys.readouterr().err


TALKATIVE = """
from trt_engine import progress
from trt_engine.cli import main
progress.LOG_EVERY_S = 0.0  # after each load, and not every ten seconds
main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loads", "heard", "times", "schema"),
    [
        ("6", "comparing `a.engine.onnx`", 1, "trt-engine/error"),  # the first load alone takes ten minutes
        ("100000", "comparing: ", 7, "trt-engine/compare"),  # enough loads are done
    ],
)
def test_ctrl_c_ends_with_130_and_a_report_of_what_was_measured(
    place: Path, tmp_path: Path, loads: str, heard: str, times: int, schema: str
) -> None:
    words = [sys.executable, "-c", TALKATIVE, "compare", "a.engine.onnx", "a.engine.onnx", "--json", "-v"]
    said = tmp_path / "said"
    with said.open("w") as file:
        child = subprocess.Popen(
            [*words, "--duration", "1h", "--restarts", loads], stdout=subprocess.PIPE, stderr=file, text=True, cwd=place,
            env=os.environ | {"TRT_ENGINE_STORE": str(place / "store")},
        )  # fmt: skip
        until(lambda: said.read_text().count(heard) >= times or child.poll() is not None, "it is at work")
        assert child.poll() is None, said.read_text()
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 130, said.read_text()
    assert "Traceback" not in said.read_text()
    told = json.loads(out)
    assert told["schema"] == schema and told.get("complete", False) is False


def test_an_engine_that_is_not_there_is_told_before_another_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "fresh"))
    assert compare("a.onnx", tmp_path / "nowhere.onnx", *QUICK) == 4
    assert f"no such file `{tmp_path / 'nowhere.onnx'}`" in capsys.readouterr().err
    assert not (tmp_path / "fresh").exists()
