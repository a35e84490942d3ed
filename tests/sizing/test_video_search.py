"""`size --video`: the search over measured runs, its interval and limit, and runs over real clips."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from trt_engine.cli.main import run
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.streams import BatchPolicy
from trt_engine.errors import EngineError, TrtEngineError
from trt_engine.records.infer import VideoSource
from trt_engine.records.streams import VideoRun
from trt_engine.verbs.size import video_search
from trt_engine.verbs.size.stream_worker import VideoRequest, WorkerRequest
from trt_engine.vision.spec import vision_of

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
        video_search.search(
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

    runs = list(video_search.search(measure, 0.01, start=6))
    assert seen.count(6) == 2 and seen[-1] == 5 and seen.count(5) == 2 and runs[-1].streams == 5


def request(late: float = 0.01) -> VideoRequest:
    clip = VideoSource("clip.mp4", "h264", 320, 240, 25.0, 100)
    return VideoRequest(BatchPolicy(4, 0.0), (clip,), 40.0, late, 10.0)


class Simulated:
    """What a conclusion reads of the simulation."""

    upper_bound, streams = 80, 70


def concluded(runs: list[VideoRun], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    monkeypatch.setattr(video_search, "core_count", lambda: 2)
    return video_search.conclude(
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


def test_processes_share_the_cameras_and_one_that_dies_is_an_error(folder: Path) -> None:
    from trt_engine.verbs.size import video_run  # with PyAV

    engine = te.build("example/detector.onnx", batch=2, parity=False)
    clip = VideoSource("example/clip.mp4", "h264", 320, 240, 25.0, 100)
    asked = VideoRequest(BatchPolicy(2, 1.0, 1), (clip,), 1e4, 0.01, 0.2)
    request = WorkerRequest(str(engine.path), RuntimeConfig(), 30, video=asked)
    with te.load(engine) as runner, video_run.Decoders(None) as decoders, video_run.OtherProcess(request) as other:
        other.answer()
        vision = vision_of(engine)
        assert vision is not None
        other_clip = shutil.copy("example/clip.mp4", "other.mp4")
        for names in (["example/clip.mp4", other_clip, "example/clip.mp4"], [other_clip, "example/clip.mp4"]):
            assert [one.info.path for one in decoders.open(names)] == names  # a share begins with any of the clips
        player = video_run.ClipPlayer(runner, vision, asked, decoders)
        run = video_run.play_clips(player, 5, 0.2, seed=0, others=[other])
        assert (run.streams, run.frames, run.late) == (5, 25, 0)
        other.send("no clips")
        with pytest.raises(TrtEngineError, match="AttributeError"):
            other.answer()
        with pytest.raises(EngineError, match="a process that played cameras ended by exit code 0"):
            video_run.play_clips(player, 2, 0.2, seed=0, others=[other])


@pytest.mark.parametrize("carried", [0, 3])
def test_processes_that_fail_leave_the_answer_of_one(carried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    video_run = pytest.importorskip(
        "trt_engine.verbs.size.video_run", reason="PyAV decodes clips", exc_type=ImportError
    )
    seen: list[str] = []

    def failing(request: WorkerRequest) -> SimpleNamespace:
        seen.append("started")
        return SimpleNamespace(answer=lambda: te.Engine.open("no.engine"), close=lambda: seen.append("ended"))

    monkeypatch.setattr(video_run, "OtherProcess", failing)
    monkeypatch.setattr(video_run, "core_count", lambda: 6)
    monkeypatch.setattr(video_run, "_opened_player", lambda *_: nullcontext(SimpleNamespace(frames=True)))
    monkeypatch.setattr(video_run, "part_rates", lambda *_: {"engine": 2500.0})
    monkeypatch.setattr(video_run, "play_clips", lambda _, n, *__, **___: made_run(n, 0.0 if n <= carried else 0.3))
    job = WorkerRequest("net.engine", RuntimeConfig(), 30, video=request())
    runs, rates, count = video_run.measure_clips(SimpleNamespace(runner=None), job)
    assert (video_search.largest_passed(runs, 0.01), rates, count) == (carried, {"engine": 2500.0}, 1)
    assert seen == (["started", "started", "ended", "ended"] if carried else []), "none where one camera is too many"


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
