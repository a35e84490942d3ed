"""What a verb says to type next: the line as it stands, in a folder whose name needs quotes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import onnx_models as models
from trt_engine.cli import main
from trt_engine.config.build import BuildConfig
from trt_engine.config.settings import followed
from trt_engine.verbs.build.each import KEPT

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "printed_commands.py"


@pytest.mark.parametrize("only", ["(cast|quantize) .*--(shapes|inputs)", ""], ids=["what was given", "all verbs"])
def test_every_command_that_a_verb_prints_can_be_typed_and_keeps_what_was_given(only: str) -> None:
    """A sample of the program's situations, on a model of open sizes and one with an input that only a number suits."""
    words = ["--models", "open,switch", "--only", only, "--sample", "5", "--seed", "32"]
    done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 situations, 0 faults" in done.stdout


@pytest.mark.parametrize("shape", ["images:1x3x8", "images:1x4x8x8", "image:1x3x8x8"])
def test_cast_refuses_shapes_that_are_not_the_models_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.chdir(tmp_path)
    models.conv_net(tmp_path / "net.onnx")
    assert main.run(["cast", "net.onnx", "--to", "fp16", "-o", "made.onnx", "--shapes", shape]) == 2
    assert not Path("made.onnx").exists()


def test_the_original_in_place_of_a_slow_int8_is_built_with_all_but_the_precision() -> None:
    config = BuildConfig(precision="int8", shapes={"x y": (2, 3)}, options={"intra_op_threads": "1"}, fuse=False)
    words = shlex.split(followed(config, *KEPT))
    assert words == ["--shapes", "'x y':2x3", "--no-fuse", "-O", "intra_op_threads=1"]
