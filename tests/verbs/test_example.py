"""`te.example`: a detector that detects, the same for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import trt_engine as te
from documents import document
from trt_engine.cli.main import run
from trt_engine.verbs.example.run import scene_image
from trt_engine.vision.decode import decode_outputs
from trt_engine.vision.spec import vision_of


class Doubled:
    """The way back from the network's input to a picture twice as large."""

    width, height = 320, 240

    def to_image(self, boxes_xyxy: Any) -> Any:
        return boxes_xyxy * 2


def test_every_call_writes_the_same_sound_model_of_less_than_a_mebibyte(tmp_path: Path) -> None:
    first, second = te.example(tmp_path / "a"), te.example(str(tmp_path / "b"))
    assert first == tmp_path / "a" / "detector.onnx"
    assert first.read_bytes() == second.read_bytes() and first.stat().st_size < 1 << 20
    onnx.checker.check_model(first, full_check=True)
    assert te.lint(first).findings == ()
    assert te.example(tmp_path / "a") == first


def test_it_finds_the_three_objects_of_its_scene_in_any_batch(tmp_path: Path) -> None:
    model = te.example(tmp_path)
    vision = vision_of(model)
    assert vision is not None
    half = scene_image()[::2, ::2].transpose(2, 0, 1).astype(np.float32) / 255  # 120 x 160, at the top of the input
    images_NCHW = np.full((2, 3, 160, 160), 114 / 255, np.float32)
    images_NCHW[1, :, :120] = half
    with te.load(te.build(model, batch=(1, 2, 2))) as runner:
        output = runner.infer({"images": images_NCHW})["detections"]
    empty, found = decode_outputs({"detections": output}, vision, [Doubled(), Doubled()])
    assert len(empty) == 0
    centres = [(box[:2] + box[2:]) / 2 for box in found.boxes_xyxy]
    places = {int(index): centre for index, centre in zip(found.classes, centres, strict=True)}
    assert len(found.scores) == 3
    for index, place in enumerate(((70, 80), (160, 170), (250, 90))):
        assert np.abs(places[index] - place).max() < 12


def test_the_verb_says_where_it_is_and_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["example"]) == 0
    assert "next        trt-engine size example/detector.onnx" in capsys.readouterr().out
    assert run(["example", "-o", "other", "--json"]) == 0
    told = document(capsys.readouterr().out)
    assert Path(told["model"]).is_file() and Path(told["image"]).is_file()
