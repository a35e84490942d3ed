"""`trt-engine quantize` as a person and a script meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

import onnx_models as models
from trt_engine.graph.quant_target import METADATA_KEY
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Say) -> Say:
    """`trt-engine quantize ...` in a folder with `net.onnx` and `data.npz`."""
    monkeypatch.chdir(tmp_path)
    models.conv_net(tmp_path / "net.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", images=rng.random((16, 3, 8, 8), np.float32))
    return partial(call, "quantize")


def test_one_json_document_says_what_was_quantised_and_what_was_left(say: Say, tmp_path: Path) -> None:
    code, out, _ = say("net.onnx", "--to", "int8", "--calib-data", "data.npz", "-o", "q.onnx", "--json")
    told = json.loads(out)
    assert code == 0 and told["schema"] == "trt-engine/quantize"
    assert (told["to"], told["measured_on"], told["calibration"]["samples"]) == ("int8", "kernels", 16)
    assert [item["op"] for item in told["quantized"]] == ["Conv"] and told["unquantized"][0]["reason"].startswith(
        "it is the last"
    )
    assert told["nbytes"] < told["nbytes_before"]
    onnx.checker.check_model(str(tmp_path / "q.onnx"), full_check=True)


def test_the_text_names_the_target_and_for_a_cpu_what_was_fused(say: Say) -> None:
    common = ("net.onnx", "--to", "int8", "--calib-data", "data.npz")
    _, out, _ = say(*common, "-o", "a.onnx")
    assert "tensorrt (Q/DQ placed for TensorRT; `--target onnxruntime-cpu` for a CPU)" in out
    assert "integer kernels" not in out
    code, out, _ = say(*common, "-o", "b.onnx", "--target", "onnxruntime-cpu")
    assert code == 0 and "onnxruntime-cpu (Q/DQ placed for ONNX Runtime's CPU provider)" in out
    assert " 1 of 2 Conv" in out and "integer kernels:" in out and "not fused:" in out
    assert out.count("it is the last layer before an output") == 1


def test_the_text_says_where_how_much_and_what_next(say: Say) -> None:
    code, out, err = say("net.onnx", "--to", "fp8", "--calib-data", "data.npz", "-o", "q.onnx", "--emulate", "e.onnx")
    assert code == 0
    for said in ("q.onnx", "e.onnx", "opset 20", "cosine", "1 layers", "calibrated:"):
        assert said in out
    assert "calibrated" in err


@pytest.mark.parametrize("to", ["nvfp4", "mxfp8"])
def test_what_only_tensorrt_runs_is_not_sent_to_another_backend(say: Say, tmp_path: Path, to: str) -> None:
    rng = np.random.default_rng(0)
    weights = {f"w{index}": rng.standard_normal((64, 64)).astype(np.float32) / 8 for index in range(3)}
    nodes = [models.node("MatMul", f"x{index} w{index}", f"x{index + 1}") for index in range(3)]
    sides = {"x0": (1, ["batch", 64])}, {"x3": (1, ["batch", 64])}
    models.save(tmp_path / "blocks.onnx", nodes, *sides, weights)
    code, out, _ = say("blocks.onnx", "--to", to, "--calib-data", "random", "-o", "q.onnx")
    told = out[out.index("next:") :]
    assert (
        code == 0
        and "trt-engine build q.onnx --backend tensorrt --batch 1:8:64\n" in told
        and "`--emulate FILE`" in told
    )
    code, out, _ = say("blocks.onnx", "--to", to, "--calib-data", "random", "-o", "p.onnx", "--emulate", "e.onnx")
    assert code == 0 and "trt-engine evaluate e.onnx" in out[out.index("next:") :]


def test_random_data_is_used_when_asked_for_and_never_hidden(say: Say) -> None:
    code, out, err = say("net.onnx", "--to", "int8", "--calib-data", "random", "-o", "q.onnx")
    assert code == 0 and "RANDOM" in out and "random feeds" in err


def pictures(folder: Path) -> Path:
    (folder / "pictures").mkdir()
    rng = np.random.default_rng(1)
    for index in range(4):
        pixels = rng.integers(0, 255, (12, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{index}.png")
    return folder / "pictures"


def test_pictures_become_inputs_as_the_model_declares_and_a_damaged_one_is_counted(say: Say, tmp_path: Path) -> None:
    folder = pictures(tmp_path)
    (folder / "2.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    arguments = ("--to", "int8", "--calib-data", "pictures", "-o", "q.onnx", "--json")
    code, _, err = say("net.onnx", *arguments)
    assert code == 2 and "does not declare" in err
    vision = Vision(
        preprocess=Preprocess(size=(8, 8)),
        postprocess=Postprocess(decode="classify", classes=tuple("abcdefghijklmnop")),
    )
    declare(tmp_path / "net.onnx", vision, tmp_path / "declared.onnx")
    code, out, err = say("declared.onnx", *arguments)
    told = json.loads(out)
    assert code == 0 and told["calibration"]["samples"] == 3
    assert list(told["calibration"]["skipped"]) == ["2.png"] and "1 damaged file" in err
    kept = {item.key for item in onnx.load(tmp_path / "q.onnx").metadata_props}
    assert kept == {item.key for item in onnx.load(tmp_path / "declared.onnx").metadata_props} | {METADATA_KEY}
