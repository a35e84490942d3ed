"""What a verb says to type next: the line as it stands, in a folder whose name needs quotes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_models as models
from trt_engine.cli import main
from trt_engine.config.build import BuildConfig
from trt_engine.config.settings import followed
from trt_engine.verbs.build.report import KEPT

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


@pytest.mark.parametrize("shape", ["images:1x3x8", "images:1x4x8x8", "image:1x3x8x8"])
def test_cast_refuses_shapes_that_are_not_the_models_before_it_writes(say: Say, shape: str) -> None:
    assert main.run(["cast", "net.onnx", "--to", "fp16", "-o", "made.onnx", "--shapes", shape]) == 2
    assert not Path("made.onnx").exists()


@pytest.mark.parametrize("shapes", [(), ("--shapes", "images:1x3x12x8")], ids=["open", "given"])
def test_the_next_command_of_a_model_with_open_sizes_builds(say: Say, shapes: tuple[str, ...]) -> None:
    model = onnx.load("net.onnx")
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    sizes[2].dim_param, sizes[3].dim_param = "height", "width"
    for item in model.graph.output:
        item.type.tensor_type.ClearField("shape")
    onnx.save(model, "open.onnx")
    words = following(say("cast", "open.onnx", "--to", "fp16", "-o", "made.onnx", *shapes))
    assert words[3] == "--shapes" and words[4] == (shapes[1] if shapes else "images:1x3x640x640")
    say(*words[1:])


def two_sizes(*, switch: bool) -> str:
    """`two.onnx`: `audio` [N, frames, 64], and with `switch` a number that only 16000 suits; its `in.npz`."""
    random = np.random.default_rng(0)
    nodes = [models.node("MatMul", "audio w", "m"), models.node("Tanh", "m", "out")]
    weights, inputs = {"w": random.normal(0, 0.3, (64, 64)).astype(np.float32)}, {"audio": (1, ["N", "frames", 64])}
    values = {"audio": random.normal(0, 1, (2, 20, 64)).astype(np.float32)}
    if switch:
        nodes[1:] = [models.node("Cast", "rate", "r", to=1), models.node("Div", "m r", "out")]
        inputs["rate"], values["rate"] = (7, []), np.array(16000)
    models.save(Path("two.onnx"), nodes, inputs, {"out": (1, None)}, weights)
    np.savez("in.npz", **values)
    return "audio:2x20x64"


@pytest.mark.parametrize("given", ["--shapes", "--inputs"])
@pytest.mark.parametrize(
    "words",
    [
        ("cast", "--to", "fp16", "-o", "made.onnx"),
        ("quantize", "--to", "int8", "--dynamic", "--target", "onnxruntime-cpu", "-o", "made.onnx"),
    ],
    ids=lambda words: words[0],
)
def test_a_next_command_keeps_the_shapes_and_the_inputs_that_were_given(
    say: Say, words: tuple[str, ...], given: str
) -> None:
    value = two_sizes(switch=given == "--inputs") if given == "--shapes" else two_sizes(switch=True) and "in.npz"
    text = say(words[0], "two.onnx", *words[1:], given, value)
    commands = [shlex.split(line) for line in re.findall(r"trt-engine (?:build|bench|profile) .*", text)]
    assert commands
    for command in commands:
        assert value in command
        say(*command[1:], *(("--duration", "50ms") if command[1] != "build" else ()))


def test_the_original_in_place_of_a_slow_int8_is_built_with_all_but_the_precision() -> None:
    config = BuildConfig(precision="int8", shapes={"x y": (2, 3)}, options={"intra_op_threads": "1"}, fuse=False)
    words = shlex.split(followed(config, *KEPT))
    assert words == ["--shapes", "'x y':2x3", "--no-fuse", "-O", "intra_op_threads=1"]
