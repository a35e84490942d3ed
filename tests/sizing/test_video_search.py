"""`size --video`: the search over measured runs, its interval and limit, and runs over real clips;
and what `size` hands on to DeepStream.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.cli.main import run
from trt_engine.config.streams import BatchPolicy
from trt_engine.records.infer import VideoSource
from trt_engine.records.size import SizeReport
from trt_engine.records.streams import VideoRun
from trt_engine.reporting.results import result_text as summary_text
from trt_engine.verbs.nvinfer_keys import NO_IMAGE_INPUT
from trt_engine.verbs.size import video_run
from trt_engine.verbs.size.run import size
from trt_engine.verbs.size.stream_worker import VideoRequest
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

PARTS = {"decoder": 4.0, "pre-processing": 2.0, "engine": 1.0, "post-processing": 0.5, "host": 0.5}


def made_run(streams: int, share: float, *, busy: float = 1.9, others: float = 0.0, seconds: int = 10) -> VideoRun:
    """A run of 25 frames a second in which this share is late, in every second alike but for a little."""
    wiggle = np.random.default_rng(streams).uniform(0.9, 1.1, seconds)
    frames = 25 * streams * seconds
    blocks = tuple((share * wiggle).tolist())
    return VideoRun(streams, frames, round(share * frames), 0, blocks, share, 10.0, 20.0, busy, others, PARTS)


def found_by(capacity: int, start: int, late: float = 0.01) -> list[VideoRun]:
    """The search over cameras that are served up to `capacity`, and 30 % late above it."""
    return list(
        video_run.search(
            lambda streams, number: made_run(streams, 0.0 if streams <= capacity else 0.3), late, start=start
        )
    )


@pytest.mark.parametrize("start", [1, 5, 200])
@pytest.mark.parametrize("capacity", [0, 1, 2, 7, 33, 150])
def test_the_search_ends_at_the_largest_number_and_measures_it_twice(capacity: int, start: int) -> None:
    runs = found_by(capacity, start)
    passed = [run.streams for run in runs if run.late_share <= 0.01]
    assert max(passed, default=0) >= capacity - max(0, round(0.03 * capacity)) and max(passed, default=0) <= capacity
    assert not passed or passed.count(max(passed)) == 2
    assert len(runs) <= 2 * (max(capacity, start) + 1).bit_length() + 3


def test_a_number_that_fails_its_second_run_is_given_up() -> None:
    seen: list[int] = []

    def measure(streams: int, number: int) -> VideoRun:
        seen.append(streams)
        lucky = streams == 6 and seen.count(6) == 1
        return made_run(streams, 0.0 if streams <= 5 or lucky else 0.3)

    runs = list(video_run.search(measure, 0.01, start=6))
    assert seen.count(6) == 2 and seen[-1] == 5 and seen.count(5) == 2 and runs[-1].streams == 5


def request(late: float = 0.01) -> VideoRequest:
    clip = VideoSource("clip.mp4", "h264", 320, 240, 25.0, 100)
    return VideoRequest(BatchPolicy(4, 0.0), (clip,), 40.0, late, 10.0)


class Simulated:
    """What a conclusion reads of the simulation."""

    upper_bound, streams = 80, 70


def concluded(runs: list[VideoRun], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    monkeypatch.setattr(video_run, "core_count", lambda: 2)
    return video_run.conclude(
        request(), runs, Simulated(), on_cpu=more.get("on_cpu", True), rates=more.get("rates", {})
    )  # type: ignore[arg-type]


def test_the_interval_is_from_what_is_certain_to_what_is_certainly_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [made_run(8, 0.0), made_run(16, 0.3), made_run(12, 0.012), made_run(10, 0.0099), made_run(10, 0.0099)]
    found = concluded(runs, monkeypatch)
    assert (found.low, found.streams, found.high) == (8, 10, 11)


def test_the_limit_is_the_part_with_the_least_room_where_the_cores_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = concluded([made_run(9, 0.0), made_run(10, 0.3)], monkeypatch)
    assert found.limit == "decoder" and "1.9 of 2 cores are busy with 9 cameras" in found.limit_reason
    idle = [made_run(9, 0.0, busy=0.4, others=1.5), made_run(10, 0.3, busy=0.4, others=1.5)]
    found = concluded(idle, monkeypatch)
    assert found.limit == "deadline" and "1.5 with other programs" in found.limit_reason
    found = concluded([made_run(90, 0.0)], monkeypatch, on_cpu=False)
    assert found.limit == "none" and found.part_streams["engine"] == 80


def test_on_a_gpu_the_limit_is_the_part_that_carries_least_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"decoder": 290.0, "pre-processing": 9000.0, "engine": 1000.0, "copy": 9000.0}
    found = concluded([made_run(9, 0.0), made_run(10, 0.3)], monkeypatch, on_cpu=False, rates=rates)
    assert found.limit == "decoder" and found.part_streams["engine"] == pytest.approx(1000 / 25)
    assert found.limit_reason.endswith("9 cameras, the decoder alone carries 12")
    rates["engine"] = 280.0
    assert concluded([made_run(9, 0.0), made_run(10, 0.3)], monkeypatch, on_cpu=False, rates=rates).limit == "engine"


def test_no_camera_in_time_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = concluded([made_run(2, 0.9), made_run(1, 0.9)], monkeypatch)
    assert (found.low, found.streams, found.high) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------ with clips


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("av", reason="PyAV decodes clips")
    monkeypatch.chdir(tmp_path)
    te.example("example", video=True)
    return tmp_path


QUICK = ["--duration", "200ms", "--warmup", "0", "--max-batch", "2", "--contexts", "1"]


def test_clips_play_as_cameras_and_the_answer_is_the_headline_and_the_last_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["size", "example/detector.onnx", *QUICK, *"--video example/clip.mp4 --deadline-ms 0.01 -o out".split()]
    assert run([*asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    found = made["video"]
    assert found["streams"] == 0 and made["fps"] == 25 and found["late"] == 0.01  # no frame is decoded in 10 us
    assert found["sources"][0] == {
        "path": "example/clip.mp4", "codec": "h264", "width": 320, "height": 240, "fps": 25.0, "frames": 100,
    }  # fmt: skip
    for one in found["runs"]:
        assert one["frames"] > 0 and one["late"] + one["dropped"] == one["frames"]
        assert set(one["parts"]) == set(PARTS)
    page = (folder / "out" / "report.html").read_text()
    assert 0 < page.index("cameras") < page.index("images/s")
    assert run([*asked, "--min-streams", "1"]) == 12
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("CAMERAS: 0 streams @25fps within 0.01 ms")


def test_what_the_clips_state_and_cameras_that_cannot_be_tried_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.mp4").write_bytes(b"no video")
    for arguments, message in (
        (["--video", "example/clip.mp4", "--fps", "20"], "`--fps` and `--video` are given"),
        (["--video", "rtsp://u:p@camera/1"], "`rtsp://***@camera/1` is one camera"),
        (["--video", "broken.mp4"], "`broken.mp4` is not a readable video"),
        (["--video", "store"], "`store` has no clips"),
    ):
        (folder / "store").mkdir(exist_ok=True)
        assert run(["size", "example/detector.onnx", *QUICK, *arguments, "-o", "out"]) == 2
        assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


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
