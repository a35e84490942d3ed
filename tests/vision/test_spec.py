"""What a model declares about pictures: kept in its metadata and in the passport, checked against its signature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import trt_engine as te
from onnx_models import FLOAT, INT64, conv_net, node, save
from trt_engine.errors import ModelError, UsageError
from trt_engine.vision.spec import METADATA_KEY, Postprocess, Preprocess, Vision, declare, vision_from_file, vision_of

VISION = Vision(
    Preprocess(size=(8, 8), resize="center-crop", crop_share=0.875, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1)),
    Postprocess("classify", classes=tuple(f"c{index}" for index in range(16)), activation="softmax"),
)


def with_metadata(path: Path, **metadata: str) -> Path:
    model = onnx.load(path)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


def detector(path: Path, shape: list[Any]) -> Path:
    """`images` in, `rows` of the given shape out."""
    return save(
        path, [node("Reshape", "images to", "rows")], {"images": (FLOAT, ["batch", 3, 4, 6])}, {"rows": (FLOAT, shape)},
        {"to": onnx.numpy_helper.from_array(np.array([0, -1, 6]), "to")},
    )  # fmt: skip


def test_a_declaration_comes_back_as_it_was_written_and_the_graph_is_untouched(tmp_path: Path) -> None:
    model = conv_net(tmp_path / "net.onnx")
    before = onnx.load(model)
    out = declare(model, VISION, tmp_path / "declared.onnx")
    assert vision_of(model) is None
    assert vision_of(out) == VISION
    after = onnx.load(out)
    del after.metadata_props[:]
    assert after.SerializeToString() == before.SerializeToString()


def test_declaring_again_replaces_the_declaration_and_keeps_other_metadata(tmp_path: Path) -> None:
    model = with_metadata(conv_net(tmp_path / "net.onnx"), author="me")
    declare(model, VISION, model)
    other = Vision(Preprocess(size=(8, 8)), Postprocess("classify"))
    declare(model, other, model)
    assert vision_of(model) == other
    assert [item.key for item in onnx.load(model).metadata_props] == ["author", METADATA_KEY]


def test_the_passport_carries_what_the_model_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    plain = te.build(conv_net(tmp_path / "plain.onnx"), out=tmp_path / "plain.engine.onnx")
    assert vision_of(plain) is None
    model = declare(tmp_path / "plain.onnx", VISION, tmp_path / "net.onnx")
    engine = te.build(model, out=tmp_path / "net.engine.onnx")
    model.unlink()
    assert vision_of(engine) == VISION
    assert vision_of(engine.path) == VISION
    assert vision_of(te.Engine.open(engine.path)) == VISION


def test_a_declaration_that_cannot_be_read_does_not_stop_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    model = with_metadata(conv_net(tmp_path / "net.onnx"), **{METADATA_KEY: "{"})
    with pytest.raises(ModelError, match="not a declaration"):
        vision_of(model)
    assert te.build(model, out=tmp_path / "net.engine.onnx").passport.vision is None
    assert "is left out" in caplog.text


@pytest.mark.parametrize(
    ("shape", "extra", "decode"),
    [
        (["batch", 12, 6], {"task": "detect"}, "yolov10"),
        (["batch", 6, "anchors"], {"task": "detect"}, "yolo"),
    ],
)
def test_ultralytics_metadata_is_understood_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: list[Any], extra: dict[str, str], decode: str
) -> None:
    model = with_metadata(
        detector(tmp_path / "yolo.onnx", shape), names="{0: 'cat', 1: 'dog'}", imgsz="[4, 6]", stride="32", **extra
    )
    with caplog.at_level("INFO", "trt_engine"):
        found = vision_of(model)
    assert found is not None
    assert found.source == "Ultralytics metadata"
    assert found.postprocess.decode == decode
    assert found.postprocess.classes == ("cat", "dog")
    assert found.preprocess.size == (4, 6)
    assert found.preprocess.resize == "letterbox"
    assert "using its Ultralytics metadata" in caplog.text


@pytest.mark.parametrize(
    "metadata",
    [
        {"names": "{0: 'a'}", "task": "segment", "imgsz": "[4, 6]"},
        {"names": "{0: 'a'}", "task": "detect", "imgsz": "[5, 6]"},
        {"names": "{0: 'a'}", "task": "pose", "imgsz": "[4, 6]", "kpt_shape": "[None, 3]"},
        {"names": "{0: 'a'}", "task": "detect", "imgsz": "__import__('os')"},
        {"names": "nonsense(", "task": "classify", "imgsz": "[4, 6]"},
        {"names": "{0: 'a'}"},
    ],
)
def test_metadata_that_does_not_fit_declares_nothing(tmp_path: Path, metadata: dict[str, str]) -> None:
    model = with_metadata(detector(tmp_path / "yolo.onnx", ["batch", 7, "anchors"]), **metadata)
    assert vision_of(model) is None


@pytest.mark.parametrize(
    ("vision", "says"),
    [
        (Vision(Preprocess((9, 8)), Postprocess("classify")), "the declared image is 3x9x8"),
        (Vision(Preprocess((8, 8), channels="L"), Postprocess("classify")), "the declared image is 1x8x8"),
        (Vision(Preprocess((8, 8), layout="NHWC"), Postprocess("classify")), "8x8x3 (NHWC)"),
        (Vision(Preprocess((8, 8), dtype="uint8"), Postprocess("classify")), "the declared `dtype` is uint8"),
        (
            Vision(Preprocess((8, 8), input="imges"), Postprocess("classify")),
            "the declared input `imges` does not exist",
        ),
        (Vision(Preprocess((8, 8)), Postprocess("classify", classes=("a", "b"))), "expects batch x 2"),
        (Vision(Preprocess((8, 8)), Postprocess("yolo")), "expects batch x 4 + classes x anchors"),
        (Vision(Preprocess((8, 8)), Postprocess("yolov10")), "expects batch x rows x 6"),
        (Vision(Preprocess((8, 8)), Postprocess("classify", output="x")), "the declared output `x` does not exist"),
    ],
)
def test_a_declaration_of_another_model_is_refused(tmp_path: Path, vision: Vision, says: str) -> None:
    model = conv_net(tmp_path / "net.onnx")
    with pytest.raises(UsageError) as refused:
        declare(model, vision, tmp_path / "out.onnx")
    assert says in refused.value.message
    assert refused.value.hint
    assert not (tmp_path / "out.onnx").exists()


def test_one_of_several_inputs_must_be_named(tmp_path: Path) -> None:
    model = save(
        tmp_path / "two.onnx",
        [node("Identity", "images", "rows"), node("Identity", "sizes", "kept")],
        {"images": (FLOAT, ["b", 3, 8, 8]), "sizes": (INT64, ["b", 2])},
        {"rows": (FLOAT, ["b", 3, 8, 8]), "kept": (INT64, ["b", 2])},
    )
    with pytest.raises(UsageError, match="2 inputs"):
        declare(model, VISION, tmp_path / "out.onnx")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"preprocess": {"size": [8, 8], "reszie": "stretch"}}, "`reszie`, which is not a setting"),
        ({"preproces": {}}, "`preproces`, which is not a setting"),
        ({"preprocess": {}}, "missing required field `size`"),
        ({"preprocess": {"size": [8, 8], "resize": "squash"}}, "Invalid enum value 'squash'"),
        ({"preprocess": {"size": [0, 8]}}, "expected height and width"),
        ({"preprocess": {"size": [8, 8], "std": [1, 0, 1]}}, "must be finite and not 0"),
        ({"preprocess": {"size": [8, 8], "mean": [0.1, 0.2]}}, "2 values, `RGB` has 3 channels"),
        ({"preprocess": {"size": [8, 8], "pad_value": [300, 0, 0]}}, "expected 0 to 255"),
        ({"preprocess": {"size": [8, 8], "crop_share": 0}}, "`crop_share`"),
        ({"preprocess": {"size": [8, 8], "dtype": "float31"}}, "unknown element type"),
        ({"postprocess": {"decode": "yolov11"}}, "Invalid enum value 'yolov11'"),
        ({"postprocess": {"decode": "yolo", "activation": "softmax"}}, "is for classifiers"),
        ({"postprocess": {"decode": "yolo", "min_score": 2}}, "must be between 0 and 1"),
        ({"postprocess": {"decode": "yolo", "max_detections": 0}}, "`max_detections`"),
        ({"version": 2}, "Invalid enum value 2"),
        ([1], "not a declaration"),
    ],
)
def test_a_wrong_declaration_file_is_refused_with_the_place(tmp_path: Path, changed: Any, says: str) -> None:
    plain = {"preprocess": {"size": [8, 8]}, "postprocess": {"decode": "classify"}}
    path = tmp_path / "vision.json"
    path.write_text(json.dumps(plain | changed if isinstance(changed, dict) else changed))
    with pytest.raises(UsageError) as refused:
        vision_from_file(path)
    assert says in refused.value.message
    assert refused.value.hint
