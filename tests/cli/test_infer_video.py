"""`trt-engine infer --video`: what is drawn, listed and said of a clip; `example --video` makes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("av", reason="PyAV decodes clips")
pytest.importorskip("PIL", reason="frames are pillow's images")

import av

import trt_engine as te
from trt_engine.progress import Progress
from trt_engine.verbs.example.run import FRAMES

Told = tuple[int, str, str]
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model.onnx"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clip(folder: Path) -> Path:
    return te.example(folder / "example", video=True).with_name("clip.mp4")


def test_the_example_s_clip_is_drawn_counted_and_listed(infer: Callable[..., Told], clip: Path, folder: Path) -> None:
    code, out, err = infer(
        clip.with_name("detector.onnx"), "--video", clip, "--draw", "out.mp4", "-o", "out.jsonl", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["video"]["frames"] == told["video"]["source"]["frames"] == FRAMES
    assert told["video"]["objects"] == {name: [FRAMES, 1] for name in ("red", "green", "blue")}
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line["frame"] for line in lines] == list(range(FRAMES)) and lines[10]["time_s"] == pytest.approx(0.4)
    assert {item["name"] for item in lines[10]["objects"]} == {"red", "green", "blue"}
    with av.open("out.mp4") as drawn:
        assert sum(1 for _ in drawn.decode(video=0)) == FRAMES and drawn.streams.video[0].average_rate == 25
    assert (folder / "out_frames.jpg").read_bytes()[:3] == b"\xff\xd8\xff"
    assert sorted(path.name for path in folder.iterdir()) == [
        "example", "out.jsonl", "out.mp4", "out_frames.jpg", "store",
    ]  # fmt: skip


def test_the_digit_detector_reads_the_digits_of_the_same_clip(clip: Path) -> None:
    report = te.infer(DIGITS, video=clip, max_frames=10)
    assert report.video is not None and report.video.frames == 10
    assert {name for name, (total, _) in report.video.objects.items() if total >= 8} == {"2", "4", "5"}


def test_progress_says_the_time_left_and_a_notebook_shows_the_first_frames(clip: Path) -> None:
    told: list[Progress] = []
    report = te.infer(clip.with_name("detector.onnx"), video=clip, out="out.mp4", progress=told.append)
    counted = [item for item in told if item.unit == "frames"]
    assert counted[-1].done == counted[-1].total == FRAMES
    assert " left" in counted[0].text
    assert "data:image/jpeg;base64," in report._repr_html_() and "base64" not in str(report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--video", "none.mp4"), "`none.mp4` is not a readable video: no such file"),
        (("--video", "example"), "`example` is a folder, with `example/clip.mp4`"),
        (("--video", "rtsp://localhost:1/x"), "`rtsp://localhost:1/x` may never end"),
        (("--video", "example/scene.txt"), "is not a readable video"),
        (("--video", "example/clip.mp4", "-o", "out.npz"), "cannot be written to `out.npz`"),
        (("--video", "example/clip.mp4", "-o", "a.mp4", "--draw", "b.mp4"), "two clips"),
        (("--video", "example/clip.mp4", "--image", "example/scene.png"), "both `--image` and `--video`"),
        (("--video", "example/clip.mp4", "--output", "detections"), "`--output` needs `--image`"),
        (("--image", "example/scene.png", "--max-frames", "3"), "`--max-frames` needs `--video`"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    arguments: tuple[str, ...], message: str, infer: Callable[..., Told], clip: Path, folder: Path
) -> None:
    (folder / "example" / "scene.txt").write_text("no video")
    before = sorted(folder.iterdir())
    code, _, err = infer("example/detector.onnx", *arguments)
    assert code == 2 and message in err
    assert sorted(folder.iterdir()) == before


def test_a_clip_without_a_whole_frame_leaves_no_file(infer: Callable[..., Told], clip: Path, folder: Path) -> None:
    data = bytearray(clip.read_bytes())
    start = data.index(b"mdat") + 4
    size = int.from_bytes(data[start - 8 : start - 4]) - 8
    data[start : start + size] = bytes(size)  # the index is well, the frames are zeros
    (folder / "zeros.mp4").write_bytes(data)
    code, _, err = infer("example/detector.onnx", "--video", "zeros.mp4", "-o", "out.mp4")
    assert code == 2 and "no frame of `zeros.mp4` can be decoded" in err
    assert not [path for path in folder.iterdir() if path.name.startswith((".", "out"))]
