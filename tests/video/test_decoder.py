"""Clips of every kind are decoded as a player shows them, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV decodes clips")
pytest.importorskip("PIL", reason="frames are pillow's images")

import clips

from trt_engine.errors import UsageError
from trt_engine.video.decoder import Frame, PyAvDecoder, VideoError, find_clips, read_frames, shown_address


def frames_of(path: Path) -> list[Frame]:
    with closing(PyAvDecoder(str(path))) as decoder:
        return list(read_frames(decoder))


def is_red(frame: Frame, across: int, down: int) -> bool:
    red, green, _ = frame.image().getpixel((across, down))  # type: ignore[misc]
    return bool(red > 180 and green < 90)


@pytest.mark.parametrize(
    ("make", "count", "size"),
    [
        (clips.write_clip, 20, (160, 120)),
        (lambda path: clips.write_clip(path, frames=1), 1, (160, 120)),
        (lambda path: clips.write_clip(path, size=(161, 121), pixels="yuv444p"), 20, (161, 121)),
        (lambda path: clips.write_clip(path, pixels="yuv420p10le"), 20, (160, 120)),
        (lambda path: clips.write_clip(path, codec="mpeg4"), 20, (160, 120)),
        (lambda path: clips.turn(clips.write_clip(path)), 20, (120, 160)),
    ],
    ids=["plain", "one frame", "odd size", "10 bits", "mpeg4", "turned"],
)
def test_every_frame_is_there_upright_and_in_its_colours(
    make: Callable[[Path], Path], count: int, size: tuple[int, int], tmp_path: Path
) -> None:
    found = []
    with closing(PyAvDecoder(str(make(tmp_path / "clip.mp4")))) as decoder:
        for frame in read_frames(decoder):
            if frame.index == 0:
                assert frame.image().size == size
                assert is_red(frame, size[0] - 20 if size[0] < size[1] else 20, 20)  # turned: at the top right
            found.append(frame.time_s)
        assert decoder.info.frames == count and decoder.damaged == 0
    assert found == pytest.approx([index / 10 for index in range(count)], abs=2e-3)


def test_frames_keep_times_of_their_own(tmp_path: Path) -> None:
    times_s = [0.0, 0.1, 0.15, 0.9, 1.0, 3.0]
    found = frames_of(clips.write_clip(tmp_path / "clip.mkv", times_s=times_s))
    assert [frame.time_s for frame in found] == pytest.approx(times_s, abs=2e-3)


def test_a_clip_starts_again_with_its_first_frame(tmp_path: Path) -> None:
    for name in ("clip.mp4", "clip.h264"):  # the second one has no index to seek with
        with closing(PyAvDecoder(str(clips.write_clip(tmp_path / name)))) as decoder:
            first = [np.asarray(frame.image()) for frame in read_frames(decoder)]
            decoder.rewind()
            again = [np.asarray(frame.image()) for frame in read_frames(decoder)]
        assert len(first) == len(again) == 20
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "no such file"),
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html>", "it is a web page"),
        (bytes(range(256)) * 40, "not a video"),
        (b"ffconcat version 1.0\nfile other.mp4\n", "it is a playlist"),
        ("cut", "index"),
        ("sound", "only audio"),
    ],
    ids=["missing", "empty", "page", "garbage", "playlist", "cut", "sound"],
)
def test_what_is_no_video_is_refused_with_the_reason(data: bytes | str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    if data == "cut":
        whole = clips.write_clip(path).read_bytes()
        path.write_bytes(whole[: whole.index(b"moov")])
    elif data == "sound":
        clips.write_sound(path)
    elif isinstance(data, bytes):
        path.write_bytes(data)
    with pytest.raises(VideoError, match=reason):
        PyAvDecoder(str(path))


def test_frames_of_too_many_pixels_are_refused_also_behind_small_ones(tmp_path: Path, monkeypatch: Any) -> None:
    with closing(PyAvDecoder(str(clips.write_clip(tmp_path / "8k.mp4", size=(8192, 4320), frames=1)))) as opened:
        assert opened.info.width == 8192, "the largest common size opens"
    small, large = (clips.write_clip(tmp_path / f"{w}.h264", size=(w, w)).read_bytes() for w in (64, 192))
    (tmp_path / "clip.h264").write_bytes(small + large)
    monkeypatch.setenv("TRT_ENGINE_MAX_IMAGE_PIXELS", str(3 * 64 * 64))
    assert {frame.data.width for frame in frames_of(tmp_path / "clip.h264")} == {64}
    with pytest.raises(VideoError, match=r"36864 pixels.*TRT_ENGINE_MAX_IMAGE_PIXELS"):
        PyAvDecoder(str(tmp_path / "192.h264"))


def test_damaged_packets_cost_their_own_frames_alone(tmp_path: Path) -> None:
    whole = bytearray(clips.write_clip(tmp_path / "whole.ts", frames=40).read_bytes())
    random = np.random.default_rng(5)
    for place in random.integers(len(whole) // 3, len(whole), 300):
        whole[place] = random.integers(256)
    (tmp_path / "clip.ts").write_bytes(whole)
    with closing(PyAvDecoder(str(tmp_path / "clip.ts"))) as decoder:
        found = list(read_frames(decoder))
        assert decoder.damaged > 0 and 10 < len(found) <= 40


def test_a_camera_that_is_silent_for_too_long_ends_with_what_it_sent(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("trt_engine.video.decoder.is_live", lambda source: True)
    monkeypatch.setattr("trt_engine.video.decoder._READ_S", 0.0)  # every packet takes longer
    with closing(PyAvDecoder(str(clips.write_clip(tmp_path / "clip.mp4")))) as decoder:
        packets = decoder.packets()
        assert next(packets).time_s == 0
        with pytest.raises(VideoError, match="it sent nothing for 10 s"):
            next(packets)


def test_a_folder_is_its_clips_by_name(tmp_path: Path) -> None:
    for name in ("b.MP4", "a.mkv", "notes.txt"):
        (tmp_path / name).touch()
    assert find_clips(str(tmp_path)) == [str(tmp_path / "a.mkv"), str(tmp_path / "b.MP4")]
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="has no clips"):
        find_clips(str(tmp_path / "none"))


def test_no_message_has_a_camera_s_password() -> None:
    assert shown_address("rtsp://user:secret@camera/1") == "rtsp://***@camera/1"
