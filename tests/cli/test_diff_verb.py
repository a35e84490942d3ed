"""`diff` tells what changed, groups what is alike, and ends with 0 whatever it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

import trt_engine as te
from trt_engine.cli.main import run

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half") / "half.onnx"
    te.cast(DIGITS, "fp16", out=path)
    return path


def test_changes_that_are_alike_are_one_line(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(DIGITS), str(half)]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["type", "fp32", "->", "fp16", "`Conv_0`,", "..."] in [row[1:] for row in rows]
    assert ["kind", "Cast", "1", "4", "+3"] in rows
