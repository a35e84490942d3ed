"""`infer --video`: every frame of a clip or camera through the engine, drawn into a clip, listed as JSON lines."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from trt_engine.atomic_io import move_into_place, os_errors, resolve_link, staging_folder, write_atomic
from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import Batching
from trt_engine.errors import UsageError
from trt_engine.progress import progress_counter
from trt_engine.records.infer import Detection, VideoSource, VideoSummary
from trt_engine.runtime.batch_rows import BatchLayout
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Signature
from trt_engine.video.decoder import PyAvDecoder, describe_clip, find_clips, is_live, shown_address
from trt_engine.video.device_frames import device_frames
from trt_engine.video.pipeline import FramePipeline
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream
from trt_engine.video.writer import VideoWriter
from trt_engine.vision.spec import Vision

if TYPE_CHECKING:
    from trt_engine.config.evaluate import InferConfig

with contextlib.suppress(ImportError):  # who draws has read a clip
    from PIL import Image, ImageDraw, ImageFont

_MAX_BATCH = 8
"""Frames inferred at once: every frame of a batch is in memory."""
_SHEET_FRAMES, _SHEET_EVERY_S = 12, 0.5
_PLAYABLE = "a clip that a player can play"
_COLUMNS, _CELL_PX, _GAP_PX = 4, 320, 4


def check_source(source: str, max_frames: int | None) -> VideoSource:
    """What the source states about its video. Raises `UsageError` for what cannot be read, `SetupError` without PyAV."""
    name = shown_address(source)
    if is_live(source) and max_frames is None:
        raise UsageError(f"`{name}` may never end", hint="`--max-frames 500` ends it")
    if Path(source).is_dir():
        listed = ", ".join(f"`{clip}`" for clip in find_clips(source)[:3])
        raise UsageError(f"`{source}` is a folder, with {listed}", hint="one clip at a time")
    return describe_clip(source)


@dataclass(frozen=True, slots=True)
class VideoJob:
    """A clip or camera to run through an engine."""

    source: str
    info: VideoSource
    vision: Vision
    config: InferConfig

    @property
    def clip(self) -> Path | None:
        """The clip to draw."""
        return next((path for path in self._files if path.suffix != ".jsonl"), None)

    @property
    def lines(self) -> Path | None:
        """The file with a JSON line for each frame."""
        return next((path for path in self._files if path.suffix == ".jsonl"), None)

    @property
    def sheet(self) -> Path | None:
        """The contact sheet of the first frames, beside the clip."""
        return None if self.clip is None else self.clip.with_name(f"{self.clip.stem}_frames.jpg")

    @property
    def _files(self) -> list[Path]:
        return [path for path in (self.config.out, self.config.draw) if path is not None]

    @property
    def artifacts(self) -> dict[str, str]:
        """The files to write."""
        files = {"video": self.clip, "frames": self.lines, "contact_sheet": self.sheet}
        return {name: str(path) for name, path in files.items() if path is not None}


def run_video(job: VideoJob, runner: InferenceEngine) -> tuple[VideoSummary, tuple[float, ...]]:
    """What was found, and the time of each batch in ms; the files are written.

    Raises `UsageError` for a source without frames, and the first error of a frame.
    """
    config, name = job.config, shown_address(job.source)
    score = 0.25 if config.min_score is None else config.min_score
    batching = Batching(max_batch=frames_at_once(runner.signature, runner.profiles), max_wait_ms=20.0)
    threads = max(1, (os.cpu_count() or 1) - 1)
    settings = StreamSettings(in_flight=3 * _MAX_BATCH, threads=threads, max_frames=config.max_frames)
    answers: Queue[StreamFrame | None] = Queue(_MAX_BATCH)  # who draws is slower than a GPU
    started_s = time.perf_counter()
    with (
        device_frames(runner.runner, job.vision, [job.source]) as frames,
        FramePipeline(
            runner.runner, job.vision, batching, min_score=score, top=config.top or 1, decoders=1, frames=frames
        ) as pipeline,
    ):
        stream = VideoStream(
            job.source, pipeline, answers.put, settings, on_end=lambda: answers.put(None),
            opener=PyAvDecoder if frames is None else frames.open,
        ).start()  # fmt: skip
        try:
            with _output_files(job) as (writer, lines):
                sink = _Sink(job, writer, lines)
                for answer in _in_order(answers):
                    sink.take(answer)
                if not sink.frames:
                    damage = f"{stream.damaged} of its packets are damaged" if stream.damaged else "it has none"
                    raise UsageError(f"no frame of `{name}` can be decoded: {stream.error or damage}", hint=_PLAYABLE)
        finally:
            stream.stop()
            while stream.is_alive():  # what is still answered is thrown away
                with contextlib.suppress(Empty):
                    answers.get(timeout=0.05)
        sink.write_sheet()
    batches_ms = tuple(seconds * 1e3 for _, seconds, _ in pipeline.meter.batches)
    return sink.summary(stream, time.perf_counter() - started_s), batches_ms


def _in_order(answers: Queue[StreamFrame | None]) -> Iterator[StreamFrame]:
    """The answers by number, until None."""
    early: dict[int, StreamFrame] = {}
    number = 0
    while (answer := answers.get()) is not None:
        early[answer.number] = answer
        while number in early:
            yield early.pop(number)
            number += 1


@contextlib.contextmanager
def _output_files(job: VideoJob) -> Iterator[tuple[VideoWriter | None, BinaryIO | None]]:
    """The clip and the lines to write: beside their places, and moved there once the block is done."""
    made: list[tuple[Path, Path]] = []
    with contextlib.ExitStack() as stack:

        def aside(path: Path) -> Path:
            folder = stack.enter_context(staging_folder(path))
            made.append((folder / path.name, resolve_link(path)))
            return made[-1][0]

        writer = stack.enter_context(VideoWriter(aside(job.clip), fps=job.info.fps)) if job.clip else None
        lines = stack.enter_context(aside(job.lines).open("wb")) if job.lines else None
        with os_errors(job.clip or job.lines or Path(job.source)):
            yield writer, lines
            for file in (writer, lines):
                if file is not None:
                    file.close()
            for place, target in made:
                move_into_place(place, target)


class _Sink:
    """Counts, draws and lists the frames in order."""

    def __init__(self, job: VideoJob, writer: VideoWriter | None, lines: BinaryIO | None) -> None:
        self.frames = 0
        self._job, self._writer, self._lines = job, writer, lines
        self._total: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        self._sheet: list[tuple[float, Image.Image]] = []
        self._count = progress_counter(f"`{Path(job.source).name}`", "frames")
        self._started_s = time.perf_counter()
        limits = [number for number in (job.info.frames, job.config.max_frames) if number is not None]
        self._planned = min(limits, default=None)

    def take(self, answer: StreamFrame) -> None:
        """Write one frame. Raises what failed in it."""
        found = answer.result
        if isinstance(found, BaseException):
            raise found
        if found is None:  # the stream was stopped
            return
        fields = found.result.fields
        objects: tuple[Detection, ...] = fields.get("detections") or fields.get("classes") or ()
        counts = Counter(item.name for item in objects)
        self._total += counts
        self._most |= counts
        if self._lines is not None:
            line = {"frame": self.frames, "time_s": round(answer.time_s, 6), "image_size": fields["image_size"]}
            self._lines.write(msgspec.json.encode(line | {"objects": objects}) + b"\n")
        if self._writer is not None:
            drawn = found.drawn()
            if found.result.detections is not None:
                draw_counts(drawn, counts)
            self._writer.write(drawn, answer.time_s)
            if len(self._sheet) < _SHEET_FRAMES and answer.time_s >= len(self._sheet) * _SHEET_EVERY_S:
                self._sheet.append((answer.time_s, drawn))
        self.frames += 1
        rate = self.frames / (time.perf_counter() - self._started_s)
        left = "" if self._planned is None else f", {format_time_left((self._planned - self.frames) / rate)} left"
        self._count(self.frames, self._planned, f"{rate:.3g} frames/s{left}")

    def write_sheet(self) -> None:
        """Write the contact sheet, if a clip is drawn."""
        if self._job.sheet is not None:
            buffer = io.BytesIO()
            contact_sheet(self._sheet).save(buffer, "JPEG", quality=85)
            write_atomic(self._job.sheet, buffer.getvalue())

    def summary(self, stream: VideoStream, wall_s: float) -> VideoSummary:
        """What the frames held."""
        info = stream.info or self._job.info
        names = sorted(self._total, key=lambda name: -self._total[name])
        return VideoSummary(
            source=info,
            frames=self.frames,
            damaged_packets=stream.damaged,
            reconnects=stream.reconnects,
            ended=stream.error,
            wall_s=wall_s,
            objects={name: (self._total[name], self._most[name]) for name in names},
        )


def frames_at_once(signature: Signature, profiles: Sequence[Profile]) -> int:
    """Frames to infer in one batch: as many as the engine takes, 8 at most; 1 where rows depend on each other."""
    if signature.row_dependence is not None:
        return 1
    return min(_MAX_BATCH, BatchLayout.from_signature(signature, profiles).max_rows or _MAX_BATCH)


def format_time_left(seconds: float) -> str:
    """`3 min 05 s`, `12 s`."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def draw_counts(image: Image.Image, counts: Mapping[str, int]) -> None:
    """Draw the number of objects of each class in the top left corner of the RGB image."""
    total = sum(counts.values())
    lines = [
        f"{total} object{'' if total == 1 else 's'}",
        *(f"{name} {count}" for name, count in sorted(counts.items())),
    ]
    pen = ImageDraw.Draw(image, "RGBA")
    font = ImageFont.load_default(max(10, round(min(image.size) / 28)))
    text = "\n".join(lines)
    left, top, right, bottom = pen.multiline_textbbox((6, 6), text, font=font)
    pen.rectangle((left - 4, top - 4, right + 4, bottom + 4), fill=(0, 0, 0, 150))
    pen.multiline_text((6, 6), text, fill=(255, 255, 255, 255), font=font)


def contact_sheet(frames: Sequence[tuple[float, Image.Image]]) -> Image.Image:
    """A sheet of images with their times in s, four in a row, each in a cell of the first one's proportions."""
    width, height = frames[0][1].size
    cell = min(_CELL_PX, width)
    size = cell, max(1, round(cell * height / width))
    columns = min(_COLUMNS, len(frames))
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * (size[0] + _GAP_PX) - _GAP_PX, rows * (size[1] + _GAP_PX) - _GAP_PX), "white")
    font = ImageFont.load_default(12)
    for number, (time_s, image) in enumerate(frames):
        row, column = divmod(number, columns)
        place = column * (size[0] + _GAP_PX), row * (size[1] + _GAP_PX)
        sheet.paste(image.resize(size), place)
        pen = ImageDraw.Draw(sheet)
        corner = place[0] + size[0] - 4, place[1] + size[1] - 4
        pen.text(corner, f"{time_s:.1f} s", fill="white", font=font, anchor="rs", stroke_width=2, stroke_fill="black")
    return sheet
