"""Cascades: the second model sees the boxes that the first one found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

pytest.importorskip("av", reason="PyAV decodes clips")
pytest.importorskip("PIL", reason="frames are pillow's images")

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.video.pipeline import CropStage, FramePipeline, FrameResult, crop_boxes
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

COLOURS = ("red", "green", "blue")


def write_classifier(path: Path) -> Path:
    """Names the strongest colour of a crop: the mean of each channel."""
    save(
        path,
        [node("ReduceMean", "images axes", "scores", keepdims=0)],
        {"images": (FLOAT, ["batch", 3, 32, 32])},
        {"scores": (FLOAT, ["batch", 3])},
        {"axes": helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])},
    )
    declare(path, Vision(Preprocess((32, 32), resize="stretch"), Postprocess("classify", classes=COLOURS)), path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    te.example("example", video=True)
    write_classifier(tmp_path / "colours.onnx")
    return tmp_path


def test_the_second_model_sees_the_boxes_of_the_first(folder: Path) -> None:
    found: list[StreamFrame] = []
    first, second = te.build("example/detector.onnx"), te.build("colours.onnx", batch=(1, 2, 2))
    with te.load(first) as detector, te.load(second) as classifier:
        stage = CropStage(classifier.runner, resolve_spec(second), 2)
        with FramePipeline(detector.runner, resolve_spec(first), te.Batching(max_batch=1), then=stage) as pipeline:
            VideoStream("example/clip.mp4", pipeline, found.append, StreamSettings(max_frames=20)).start().join()
    assert sorted(frame.number for frame in found) == list(range(20))
    for frame in found:
        assert isinstance(frame.result, FrameResult)
        boxes = frame.result.result.fields["detections"][:2]
        assert [crop.fields["classes"][0].name for crop in frame.result.crops] == [box.name for box in boxes]
    assert max(len(frame.result.crops) for frame in found) == 2
    assert stage.times.seconds["post-processing"] > 0 and pipeline.times[0].seconds["crops"] > 0


def test_a_crop_is_the_pixels_a_box_touches_and_never_empty() -> None:
    boxes = np.array([[1.2, 2.0, 3.1, 4.0], [-5, -5, 200, 200], [90, 10, 130, 20], [150, 70, 160, 80], [7, 7, 7, 7]])
    assert crop_boxes(boxes, (100, 50)) == [
        (1, 2, 4, 4), (0, 0, 100, 50), (90, 10, 100, 20), (99, 49, 100, 50), (7, 7, 8, 8)
    ]  # fmt: skip


def test_a_cascade_that_cannot_run_is_refused_before_it_is_measured(folder: Path) -> None:
    (folder / "curve.jsonl").touch()  # of a run that measured nothing
    detector, colours = "example/detector.onnx", "colours.onnx"
    cases = [(detector, colours, "takes 2 "), (colours, colours, "no boxes"), (detector, ".", "takes 0 ")]
    for first, then, said in cases:
        with pytest.raises(te.TrtEngineError, match=said):
            te.size(first, video=["example/clip.mp4"], then=then, crops=3, max_batch=2, out="out")
    assert not (folder / "out").exists()


def test_a_cascade_over_clips_counts_its_crops_and_parts(folder: Path) -> None:
    made = te.size(
        "example/detector.onnx", video=["example/clip.mp4"], then="colours.onnx", crops=2, deadline_ms=0.01, max_batch=2,
        contexts=(1,), duration_s=0.2, warmup_s=0.0, out="out",
    )  # fmt: skip
    assert made.video is not None and made.video.streams == 0  # no frame is decoded in 10 us
    assert {"crops", "second engine"} <= made.video.part_streams.keys()
    assert all(0 < run.crops <= 2 and run.parts["second engine"] > 0 for run in made.video.runs)
    assert "of a frame, by the second model" in (folder / "out" / "report.html").read_text()
