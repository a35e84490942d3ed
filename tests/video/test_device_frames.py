"""Frames that stay on the engine's device, with PyAV in NVDEC's place and the kernel compiled for the CPU."""

from __future__ import annotations

import ctypes
import shutil
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV reads and decodes clips")
pytest.importorskip("PIL", reason="the reference is pillow's")

import av
import clips
from cpu_kernel import compile_kernel

from patience import HANG_S
from trt_engine.config.runtime import Batching
from trt_engine.device.host import HostDevice
from trt_engine.errors import MemoryExhausted, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.size.video_run import Decoders
from trt_engine.video.decoder import PyAvDecoder, VideoError, read_frames
from trt_engine.video.device_frames import DeviceFrames, device_frames
from trt_engine.video.nvdec import DecoderMemory
from trt_engine.video.pipeline import FramePipeline
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream
from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.spec import Postprocess, Preprocess, Vision

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="the kernel is compiled with `c++`")

VISION = Vision(Preprocess((64, 96)), Postprocess("classify"))
SIGNATURE = Signature(
    (TensorSpec("images", "float32", (-1, 3, 64, 96), ("n", None, None, None)),),
    (TensorSpec("scores", "float32", (-1, 2), ("n", None)),),
)


class Device(HostDevice):
    """The host in a GPU's place."""

    name = "cuda:0"
    number = 0

    def copy_from(self, pointer: int, target: Any, stream: Any) -> None:
        ctypes.memmove(target.pointer, pointer, target.nbytes)


class Means(RunnerBase):
    """An engine of which a row's output is the mean of its pixels, and 1 less it."""

    signature = SIGNATURE
    can_batch = True

    def __init__(self) -> None:
        self.device = Device()
        self.batches: list[np.ndarray[Any, Any]] = []

    def run(self, feeds: Any) -> dict[str, Any]:
        self.batches.append(np.array(feeds["images"]))
        means = self.batches[-1].mean((1, 2, 3))
        return {"scores": np.stack([means, 1 - means], -1)}

    def close(self) -> None: ...


class Session:
    """NVDEC's part, done by PyAV: the next packet overwrites the frames."""

    def __init__(self, codec: str) -> None:
        self._codec = av.CodecContext.create(codec, "r")
        self._size = (0, 0)
        self._memory: list[np.ndarray[Any, Any]] = []

    def Decode(self, packet: Any) -> list[Any]:  # noqa: N802
        for pixels in self._memory:
            pixels[:] = 0
        data = av.Packet(ctypes.string_at(packet.bsl_data, packet.bsl)) if packet.bsl else None
        if data is not None:
            data.pts = packet.pts
        found = self._codec.decode(data)
        if data is None:
            self._codec.flush_buffers()
        if found:
            self._size = found[0].width, found[0].height
        self._memory = [frame.reformat(format="nv12").to_ndarray().ravel().copy() for frame in found]
        return [
            SimpleNamespace(GetPtrToPlane=lambda _, at=pixels.ctypes.data: at, getPTS=lambda stamp=frame.pts: stamp)
            for frame, pixels in zip(found, self._memory, strict=True)
        ]

    def GetWidth(self) -> int:  # noqa: N802
        return self._size[0]

    def GetHeight(self) -> int:  # noqa: N802
        return self._size[1]


class Library:
    """The module PyNvVideoCodec."""

    cudaVideoCodec = SimpleNamespace(H264="h264", HEVC="hevc")  # noqa: N815
    DisplayDecodeLatencyType = SimpleNamespace(LOW=1, NATIVE=0)
    VideoPacketFlag = SimpleNamespace(ENDOFPICTURE=2)
    PacketData = staticmethod(lambda: SimpleNamespace(bsl=0, bsl_data=0, pts=0, decode_flag=0))
    opened: list[dict[str, Any]]

    def __init__(self) -> None:
        self.opened = []

    def CreateDecoder(self, **settings: Any) -> Session:  # noqa: N802
        self.opened.append(settings)
        return Session(settings["codec"])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    """The library and the kernel in the place of those of a GPU."""
    made = Library()
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", made)
    monkeypatch.setattr("trt_engine.video.nvdec.importlib.util.find_spec", lambda name: SimpleNamespace())

    class Kernel:
        def __init__(self, device: Any, source: str, name: str, macros: dict[str, str]) -> None:
            self._run = compile_kernel(Preprocessor(VISION.preprocess, "float32"), tmp_path)

        def launch(self, stream: Any, grid: Any, block: Any, *addresses: int) -> None:
            assert grid[0] * block[0] >= 96 and grid[1] * block[1] >= 64
            self._run(*map(ctypes.c_void_p, addresses), grid[2])

    monkeypatch.setitem(sys.modules, "trt_engine.device.cuda.kernel", SimpleNamespace(CudaKernel=Kernel))  # type: ignore[misc]
    return made


def play(
    clip: Path, runner: Means, frames: DeviceFrames | None, **settings: Any
) -> tuple[list[StreamFrame], VideoStream]:
    """The answers by number."""
    answers: SimpleQueue[StreamFrame] = SimpleQueue()
    opener = {} if frames is None else {"opener": frames.open}
    with FramePipeline(runner, VISION, Batching(max_batch=4), frames=frames) as pipeline:
        stream = VideoStream(str(clip), pipeline, answers.put, StreamSettings(**settings), **opener).start()
        stream.join()
    found = [answers.get() for _ in range(answers.qsize())]
    return sorted(found, key=lambda answer: answer.number), stream


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_frames_are_decoded_prepared_and_drawn_as_on_the_cpu(codec: str, library: Library, tmp_path: Path) -> None:
    clip = clips.write_clip(tmp_path / "clip.mp4", codec=codec)
    runner = Means()
    with device_frames(runner, VISION, [str(clip)]) as frames:
        assert frames is not None
        found, _ = play(clip, runner, frames)
        drawn = [np.asarray(answer.result.drawn()) for answer in found]
    with PyAvDecoder(str(clip)) as decoder:
        images = [(frame.time_s, frame.image()) for frame in read_frames(decoder)]
    assert [answer.time_s for answer in found] == pytest.approx([time_s for time_s, _ in images])
    preprocessor = Preprocessor(VISION.preprocess, "float32")
    rows = np.concatenate(runner.batches)
    for row in (preprocessor(image)[0] for _, image in images):
        assert (rows == row).all((1, 2, 3)).any()
    for answer, picture, (_, image) in zip(found, drawn, images, strict=True):
        wanted = preprocessor(image)[0].mean()
        assert answer.result.result.fields["classes"][0].score == pytest.approx(max(wanted, 1 - wanted), abs=1e-5)
        assert np.abs(picture.astype(int) - np.asarray(image).astype(int))[60:-8, 8:-8].max() == 0  # inside of its box


def test_a_loop_goes_on_with_the_same_decoder(library: Library, tmp_path: Path) -> None:
    clip = clips.write_clip(tmp_path / "clip.mp4", frames=10)
    runner = Means()
    with device_frames(runner, VISION, [str(clip)]) as frames:
        found, stream = play(clip, runner, frames, loop=True, max_frames=25)
    assert (len(found), stream.loops, len(library.opened)) == (25, 2, 1)
    assert [round(10 * answer.time_s) for answer in found] == list(range(25))


def test_a_raw_stream_that_starts_again_keeps_its_memory(library: Library, tmp_path: Path) -> None:
    clip = clips.write_clip(tmp_path / "clip.h264", frames=10)
    with device_frames(Means(), VISION, [str(clip)]) as frames:
        assert frames is not None
        first = frames.open(str(clip))
        memory = next(read_frames(first)).data.memory
        first.rewind()
        with closing(frames.open(str(clip))) as second:
            assert next(read_frames(second)).data.memory is not memory
        clip.unlink()
        for _ in range(2):
            with pytest.raises(VideoError, match="no such file"):
                first.rewind()


def test_a_gpu_without_memory_or_without_the_codec_is_not_a_damaged_clip(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryExhausted("no memory")

    clip, runner = clips.write_clip(tmp_path / "clip.mp4", frames=10), Means()
    with device_frames(runner, VISION, [str(clip)]) as frames:
        assert frames is not None
        data = play(clip, runner, frames)[0][0].result.frame.data  # type: ignore[union-attr]
        allocate = runner.device.allocate
        with monkeypatch.context() as patch:
            patch.setattr(runner.device, "allocate", lambda nbytes: (allocate if nbytes < 1000 else refuse)(nbytes))
            for count in (8, 2):
                with pytest.raises(MemoryExhausted), frames.batch([data] * count):
                    pass
        with frames.batch([data]) as batch:
            assert batch.shape == (1, 3, 64, 96)
        del data, batch
        monkeypatch.setattr(DecoderMemory, "take", refuse)
        with pytest.raises(MemoryExhausted), closing(frames.open(str(clip))) as decoder:
            list(read_frames(decoder))
        monkeypatch.setattr(library, "CreateDecoder", lambda **_: 1 / 0)
        stream = play(clip, runner, frames)[1]
        assert (stream.damaged, stream.error) == (0, "this GPU does not decode it: division by zero")


def test_decoders_of_cameras_are_closed_where_another_one_fails(tmp_path: Path) -> None:
    clip, opened, closed = str(clips.write_clip(tmp_path / "clip.mp4", frames=10)), set(), set()

    def open_one(source: str) -> PyAvDecoder:
        made = PyAvDecoder(source)
        opened.add(made)
        made.close = partial(closed.add, made)  # type: ignore[method-assign]
        return made

    with pytest.raises(UsageError, match="no such file"), Decoders(SimpleNamespace(open=open_one)) as decoders:  # type: ignore[arg-type]
        decoders.open(["none.mp4", *[clip] * 6])
    assert opened == closed


def test_memory_is_used_again_and_freed(library: Library, tmp_path: Path) -> None:
    clip = clips.write_clip(tmp_path / "clip.mp4", frames=40)
    runner = Means()
    with device_frames(runner, VISION, [str(clip)]) as frames:
        play(clip, runner, frames, in_flight=4)
        made = runner.device.memory().total_allocations
        play(clip, runner, frames, in_flight=4)
        assert runner.device.memory().total_allocations - made <= 4
    assert runner.device.memory().allocated_bytes == 0


def test_a_frame_may_die_while_its_decoder_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    memory, allocate = DecoderMemory(device), device.allocate
    dead = memory.take(8)
    monkeypatch.setattr(device, "allocate", lambda nbytes: (memory.give_back(dead), allocate(nbytes))[1])
    thread = threading.Thread(target=memory.take, args=(16,), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive() and memory.take(8) is dead


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: clips.write_clip(path, codec="mjpeg", pixels="yuvj420p"), "NVDEC does not decode mjpeg"),
        (lambda path: clips.write_clip(path, pixels="yuv444p"), "8-bit 4:2:0"),
        (lambda path: clips.turn(clips.write_clip(path)), "turned"),
        (clips.write_clip, "`pip install 'trt-engine[video-gpu]'`"),
    ],
)
def test_what_the_gpu_does_not_take_is_decoded_on_the_cpu_after_one_sentence(
    make: Any, reason: str, library: Library, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "pip" in reason:
        monkeypatch.setattr(
            "trt_engine.video.nvdec.importlib.util.find_spec",
            lambda name: None if name[0] == "P" and "Codec" in name else 1,
        )
    with device_frames(Means(), VISION, [str(make(tmp_path / "clip.mp4"))]) as frames:
        assert frames is None
    (warning,) = (record.getMessage() for record in caplog.records)
    assert reason in warning and "on the CPU" in warning


@pytest.mark.parametrize("on_device", [False, True])
def test_broken_clips_cost_no_other_stream_a_frame(on_device: bool, library: Library, tmp_path: Path) -> None:
    """Twenty that are truncated or have garbage in them, beside four that are whole, all at once through one engine."""
    whole = clips.write_clip(tmp_path / "whole.mkv", frames=30)
    paths = [whole] * 4
    data, rng = whole.read_bytes(), np.random.default_rng(0)
    for number, at in enumerate(rng.integers(1, len(data) * 3 // 4, 20).tolist()):
        paths.append(tmp_path / f"{number}.mkv")
        paths[-1].write_bytes(data[:at] + (rng.bytes(500) + data[at + 500 :] if number % 2 else b""))
    runner = Means()
    answers: list[list[tuple[int, float, bool]]] = [[] for _ in paths]

    def note(number: int, answer: StreamFrame) -> None:
        answers[number].append((answer.number, answer.time_s, isinstance(answer.result, BaseException)))

    with device_frames(runner, VISION, [str(whole)]) as frames:
        used = frames if on_device else None
        opener = PyAvDecoder if used is None else used.open
        with FramePipeline(runner, VISION, Batching(max_batch=4), frames=used) as pipeline:
            streams = [
                VideoStream(str(path), pipeline, partial(note, number), opener=opener).start()
                for number, path in enumerate(paths)
            ]
            for stream in streams:
                stream.join()
    assert [len(found) for found in answers] == [stream.frames for stream in streams]
    assert not any(failed for found in answers for _, _, failed in found)
    assert sum(map(len, answers)) == sum(map(len, runner.batches))
    for stream, found in zip(streams[:4], answers[:4], strict=True):
        assert (stream.error, stream.damaged) == (None, 0)
        assert [time_s for _, time_s, _ in sorted(found)] == pytest.approx([index / 10 for index in range(30)])
    harmed = [stream.error or stream.damaged or stream.frames < 30 for stream in streams[4:]]
    assert sum(map(bool, harmed)) >= 10
    assert runner.device.memory().allocated_bytes == 0
