"""What a verb says to type next: the line as it stands, in a folder whose name needs quotes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
from trt_engine.cli import main

Say = Callable[..., str]
AWAY = "my models/it's"


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """The stdout of a verb that succeeds, in a folder with `net.onnx`, `data.npz` and one to be quoted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / AWAY).mkdir(parents=True)
    models.conv_net(tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", images=np.random.default_rng(0).random((16, 3, 8, 8), np.float32))

    def told(*words: str) -> str:
        assert main.run(list(words)) == 0
        return capfd.readouterr().out

    yield told


def following(text: str) -> list[str]:
    """The words of the `next:` line, as a shell reads them."""
    (line,) = [line for line in text.splitlines() if line.startswith("next:")]
    return shlex.split(line.removeprefix("next:"))


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (("build", "net.onnx"), "bench"),
        (("cast", "net.onnx", "--to", "fp16"), "build"),
        (("convert", "net.onnx"), "build"),
        (("quantize", "net.onnx", "--to", "int8", "--calib-data", "data.npz"), "evaluate"),
    ],
)
def test_the_next_command_can_be_pasted_whatever_the_file_is_called(
    say: Say, words: tuple[str, ...], verb: str
) -> None:
    out = f"{AWAY}/made.onnx"
    assert following(say(*words, "-o", out))[:3] == ["trt-engine", verb, out]
    assert Path(out).exists()
