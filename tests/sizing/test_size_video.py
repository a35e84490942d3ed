"""What `size` hands on to DeepStream of a model it has sized, measured for a moment in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from onnx_models import FLOAT, node, save
from trt_engine.records.size import SizeReport
from trt_engine.reporting.results import result_text as summary_text
from trt_engine.verbs.nvinfer_keys import NO_IMAGE_INPUT
from trt_engine.verbs.size.run import size
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare


def sized(model: Path, out: Path, **values: Any) -> SizeReport:
    return size(model, out=out, start_batch=1, max_batch=1, duration_s=0.02, warmup_s=0.0, **values)


def classifier(path: Path, image: list[int | str]) -> Path:
    """[batch, ...] to [batch, channels]: the mean of each channel."""
    return save(
        path,
        [node("ReduceMean", "images axes", "scores", keepdims=0)],
        {"images": (FLOAT, ["batch", *image])},
        {"scores": (FLOAT, ["batch", image[0]])},
        {"axes": helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])},
    )


def test_the_block_for_nvinfer_is_of_the_engine_that_was_measured_and_of_what_the_model_declares(
    tmp_path: Path,
) -> None:
    path = classifier(tmp_path / "net.onnx", [1, "height", "width"])
    declare(path, Vision(Preprocess((16, 24), resize="stretch", channels="L"), Postprocess("classify")), path)
    report = sized(path, tmp_path / "out", shapes={"images": (1, 1, 16, 24)})
    expected = {"infer-dims": "1;16;24", "model-color-format": "2", "maintain-aspect-ratio": "0"}
    assert {name: report.nvinfer.get(name) for name in expected} == expected
    assert "symmetric-padding" not in report.nvinfer and not report.nvinfer_notes


def test_what_is_not_known_of_the_keys_is_said_wherever_they_are_shown(make_model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = sized(make_model(), out)
    told = "the model declares no pre-processing"
    kept = json.loads((out / "size.json").read_text())
    assert told in "\n".join(kept["nvinfer_notes"]) and "net-scale-factor" not in kept["nvinfer"]
    assert f"# {told}" in summary_text(report).splitlines() or f"\n# {told}" in summary_text(report)
    assert "[property]" in summary_text(report).splitlines(), "a block to paste"
    assert f"# {told}" in (out / "report.md").read_text() and told in (out / "report.html").read_text()


def test_the_count_of_a_model_without_pictures_says_what_a_stream_is_then(tmp_path: Path) -> None:
    path = tmp_path / "tokens.onnx"
    save(path, [node("Relu", "x", "y")], {"x": (FLOAT, ["batch", 7])}, {"y": (FLOAT, ["batch", 7])})
    report = sized(path, tmp_path / "out")
    assert report.nvinfer == {} and NO_IMAGE_INPUT in report.notes
    assert NO_IMAGE_INPUT in summary_text(report) and "[property]" not in summary_text(report)
    assert "[property]" not in (tmp_path / "out" / "report.html").read_text()
