"""Streams: every frame once, the newest where it must be, connected again, and none in the way of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("av", reason="PyAV decodes clips")
pytest.importorskip("PIL", reason="frames are pillow's images")

import clips

from trt_engine.errors import Overloaded
from trt_engine.records.infer import VideoSource
from trt_engine.video.decoder import Frame, Packet, VideoError
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream


class Camera:
    """A decoder of a few packets with a frame each; it breaks off where a packet is an error."""

    def __init__(self, packets: list[Any]) -> None:
        self.info = VideoSource("camera", "h264", 160, 120, 1000.0, None)
        self.damaged = 0
        self._packets = packets

    def packets(self) -> Iterator[Packet]:
        for index, packet in enumerate(self._packets):
            if isinstance(packet, Exception):
                raise packet
            yield Packet(index / 1000, packet)

    def decode(self, packet: Packet | None) -> list[Frame]:
        return [] if packet is None else [Frame(0, packet.time_s, packet.data)]

    def rewind(self) -> None: ...
    def close(self) -> None: ...


class Slow:
    """A pipeline whose engine runs a frame when it is told to."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Any, Future[Any], Any]] = []

    def prepare(self, frame: Frame) -> Any:
        if isinstance(frame.data, str):
            raise ValueError(frame.data)
        return frame.data

    def submit(self, frame: Frame, prepared: Any, done: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append((prepared, future, done))
        return future


class Quick(Slow):
    """A pipeline that answers at once."""

    def submit(self, frame: Frame, prepared: Any, done: Any) -> Future[Any]:
        done(SimpleNamespace(value=prepared))
        return Future()


def play(source: str, pipeline: Any, settings: StreamSettings, **more: Any) -> tuple[VideoStream, list[StreamFrame]]:
    found: list[StreamFrame] = []
    stream = VideoStream(source, pipeline, found.append, settings, **more).start()
    stream.join()
    return stream, found


def test_every_frame_of_a_clip_is_answered_once_and_in_order(tmp_path: Path) -> None:
    clip = str(clips.write_clip(tmp_path / "clip.mp4"))
    ended = threading.Event()
    stream, found = play(clip, Quick(), StreamSettings(), on_end=ended.set)
    assert [frame.number for frame in found] == list(range(20)) and stream.dropped == 0 and ended.is_set()
    assert found[-1].time_s == pytest.approx(1.9, abs=2e-3)


def test_a_clip_in_a_loop_goes_on_in_time(tmp_path: Path) -> None:
    clip = str(clips.write_clip(tmp_path / "clip.mp4"))
    stream, found = play(clip, Quick(), StreamSettings(loop=True, max_frames=50))
    assert stream.loops == 2 and len(found) == 50
    assert [frame.time_s for frame in found] == pytest.approx([index / 10 for index in range(50)], abs=0.25)
    assert [frame.time_s for frame in found] == sorted(frame.time_s for frame in found)


@pytest.mark.parametrize("packets", [[1, 2, 3, 4], [1, 2, 3, 0, 5, 6, 7]])
def test_frames_that_a_decoder_holds_back_come_at_their_own_times_in_a_loop(packets: list[Any]) -> None:
    class Reordering(Camera):
        held: list[Frame]

        def packets(self) -> Iterator[Packet]:
            self.held = []
            return super().packets()

        def decode(self, packet: Packet | None) -> list[Frame]:
            self.held += super().decode(packet)
            kept = 0 if packet is None else 1 if packet.data == 0 else 2  # a key frame is not in front of others
            ready = self.held[: max(0, len(self.held) - kept)]
            self.held = self.held[len(ready) :]
            return ready

    settings = StreamSettings(paced=True, loop=True, max_frames=12)
    _, found = play("clip", Quick(), settings, opener=lambda source, threads: Reordering(packets))
    times_s = [frame.arrived_s - found[0].arrived_s for frame in found]
    assert times_s == pytest.approx([index / 1000 for index in range(12)], abs=1e-6)


def test_a_frame_that_waits_is_dropped_for_a_newer_one() -> None:
    engine = Slow()
    stream, found = play(
        "clip", engine, StreamSettings(newest_only=True), opener=lambda source, threads: Camera([1, 2, 3])
    )
    assert [prepared for prepared, _, _ in engine.submitted] == [1, 2, 3]
    assert [future.cancelled() for _, future, _ in engine.submitted] == [True, True, False]
    assert [frame.number for frame in found if frame.result is None] == [0, 1] and stream.dropped == 2


def test_a_camera_is_connected_again_and_its_frames_go_on(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("trt_engine.video.stream._FIRST_RETRY_S", 0.0)
    visits = iter([Camera([1, 2, VideoError("it sent nothing for 10 s")]), VideoError("no such host"), Camera([3, 4])])

    def open_camera(source: str, threads: int) -> Camera:
        visit = next(visits)
        if isinstance(visit, Exception):
            raise visit
        return visit

    with caplog.at_level("INFO"):
        stream, found = play("rtsp://u:p@camera/1", Quick(), StreamSettings(max_frames=4), opener=open_camera)
    assert [frame.number for frame in found] == [0, 1, 2, 3] and stream.error is None and stream.reconnects == 2
    assert "`rtsp://***@camera/1`: it sent nothing for 10 s; connecting again" in caplog.text
    assert "is back after" in caplog.text and "u:p" not in caplog.text


def test_a_camera_that_never_answered_ends_with_the_reason() -> None:
    def nowhere(source: str, threads: int) -> Camera:
        raise VideoError("connection refused")

    stream, found = play("rtsp://camera/1", Quick(), StreamSettings(), opener=nowhere)
    assert stream.error == "connection refused" and found == [] and stream.reconnects == 0


def test_a_frame_that_fails_and_a_source_that_breaks_cost_no_other_frame() -> None:
    stream, found = play("clip", Quick(), StreamSettings(), opener=lambda source, threads: Camera([1, "bad", 3]))
    assert [type(frame.result).__name__ for frame in found] == ["SimpleNamespace", "ValueError", "SimpleNamespace"]

    stream, found = play(
        "clip", Quick(), StreamSettings(), opener=lambda source, threads: Camera([1, RuntimeError("a bug")])
    )
    assert len(found) == 1 and stream.error == "RuntimeError: a bug"


@pytest.mark.parametrize("newest_only", [False, True])
def test_a_frame_that_is_not_taken_is_answered_and_the_stream_ends(newest_only: bool) -> None:
    class Full(Slow):
        def submit(self, frame: Frame, prepared: Any, done: Any) -> Future[Any]:
            raise Overloaded("8 rows wait")

    settings = StreamSettings(newest_only=newest_only, in_flight=1)
    stream, found = play("camera", Full(), settings, opener=lambda source, threads: Camera([1, 2, 3]))
    kinds = {type(frame.result) for frame in found}
    assert len(found) == 3 and kinds == {type(None) if newest_only else Overloaded}
    assert stream.dropped == (3 if newest_only else 0)


def test_a_source_waits_while_its_frames_are_in_flight() -> None:
    engine, answers = Slow(), SimpleQueue[StreamFrame]()
    stream = VideoStream(
        "clip", engine, answers.put, StreamSettings(in_flight=2), opener=lambda source, threads: Camera([1, 2, 3, 4])
    ).start()  # fmt: skip
    for number in range(4):
        while len(engine.submitted) <= number:
            threading.Event().wait(0.01)
        assert len(engine.submitted) <= number + 2
        engine.submitted[number][2](SimpleNamespace())
    stream.join()
    assert sorted(answers.get().number for _ in range(4)) == [0, 1, 2, 3]
