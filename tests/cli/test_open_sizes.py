"""What a graph leaves open: the size is read from the model's metadata, an open batch is never taken silently."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from trt_engine.cli.main import run

READ = "the size of `images` is 1x3x32x48, from the metadata of `yolo.onnx`"
OPEN = "the batch of `images` is open and none was given"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ["batch", 3, "height", "width"]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("images", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["y"])], "g", values[:1], values[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, tmp_path / "bare.onnx")
    # as Ultralytics writes it for a task whose outputs are not understood here
    helper.set_model_props(made, {"imgsz": "[32, 48]", "task": "segment", "names": "{0: 'a'}"})
    onnx.save(made, tmp_path / "yolo.onnx")


@pytest.mark.parametrize("verb", ["build", "bench", "size"])
def test_the_size_of_an_image_input_is_read_from_the_metadata_and_said(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "yolo.onnx", "--dry-run"]) == 0
    assert capsys.readouterr().err.count(READ) == 1
    assert run([verb, "bare.onnx", "--dry-run"]) == 2
    assert "must be given" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["lint", "inspect"])
def test_reading_a_model_uses_the_size_of_its_metadata(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "yolo.onnx"]) == 0
    told = capsys.readouterr()
    assert READ in told.err and "1x3x32x48" in told.out


@pytest.mark.parametrize("sides", ["[0, 32]", "['a', 'b']", "[1, 2, 3]", "nothing", "[32.5, 32]"])
def test_metadata_that_names_no_size_leaves_the_question_open(sides: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load("yolo.onnx")
    del model.metadata_props[:]
    helper.set_model_props(model, {"imgsz": sides})
    onnx.save(model, "yolo.onnx")
    assert run(["build", "yolo.onnx", "--dry-run"]) == 2
    assert "must be given" in capsys.readouterr().err


def test_an_open_batch_is_said_wherever_an_engine_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "yolo.onnx", "--dry-run"]) == 0
    assert f"{OPEN}: the engine takes only batch 1" in capsys.readouterr().err
    quick = ["--duration", "0", "--warmup", "0", "--iterations", "2", "--no-retry"]
    assert run(["bench", "yolo.onnx", *quick]) == 0
    assert f"{OPEN}: it is 1; `--batch 8` measures another" in capsys.readouterr().err
    assert run(["bench", "yolo.onnx", *quick, "--batch", "2"]) == 0
    assert OPEN not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ a sequence


@pytest.fixture(scope="module")
def sequence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs that share an open batch and an open length, and two layers that every format takes."""
    import numpy as np

    shape = ["batch", "sequence", 32]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("words", "places")]
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((32, 32), np.float32), name) for name in ("w1", "w2", "w3")
    ]
    nodes = [
        helper.make_node("Add", ["words", "places"], ["x"]), helper.make_node("MatMul", ["x", "w1"], ["a"], name="one"),
        helper.make_node("Relu", ["a"], ["b"]), helper.make_node("MatMul", ["b", "w2"], ["c"], name="two"),
        helper.make_node("Relu", ["c"], ["d"]), helper.make_node("MatMul", ["d", "w3"], ["y"], name="head"),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)], weights
    )
    path = tmp_path_factory.mktemp("sequence") / "text.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "nvfp4", "mxfp8"])
def test_a_model_with_an_open_sequence_is_quantised_on_random_data(
    form: str, sequence: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(sequence), "--to", form, "--calib-data", "random", "-o", "q.onnx"]
    assert run(command) == 2
    assert "add `--shapes words:8x128x32,places:8x128x32` with" in capsys.readouterr().err
    assert run([*command, "--shapes", "words:2x16x32", "--json"]) == 0, "the other input follows by its symbols"
    told = json.loads(capsys.readouterr().out)
    assert len(told["quantized"]) == 2 and Path("q.onnx").exists()
    assert "words:2x16x32" in told["parity_inputs"]


def test_a_build_calibrates_on_random_inputs_of_its_profile(sequence: Path, tmp_path: Path) -> None:
    from trt_engine.config.build import BuildConfig
    from trt_engine.graph.load import open_model
    from trt_engine.verbs.build.precision import prepare

    model = open_model(sequence)
    asked = BuildConfig(precision="int8", calib_data="random", shapes={"words": (2, 16, 32), "places": (2, 16, 32)})
    made = prepare(
        model,
        BuildConfig(precision="int8", calib_data="random", profiles=asked.resolve(model.signature)),
        tmp_path / "prepared",
    )
    assert made.steps[0].startswith("quantised to int8")


@pytest.mark.parametrize(
    "verb",
    ["build", "bench", "size", "profile", "ranges", "infer --random", "compare {}", "cast --to fp16 --auto-exclude"],
)
def test_the_hint_of_every_verb_names_an_option_that_it_has_and_sizes_of_a_sequence(
    verb: str, sequence: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = verb.format(sequence).split()
    assert run([name, str(sequence), *more, *(["-o", "out"] if name != "infer" else [])]) == 2
    assert "add `--shapes words:1x128x32,places:1x128x32` with" in capsys.readouterr().err
