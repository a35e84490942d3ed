"""One source of frames in a thread of its own: paced, looped, connected again, and never in the way of another one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from trt_engine.errors import Overloaded
from trt_engine.records.infer import VideoSource
from trt_engine.video.decoder import Decoder, Frame, PyAvDecoder, VideoError, is_live, shown_address
from trt_engine.video.pipeline import FramePipeline, FrameResult, PartTimes

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 8.0
"""Waits before a camera is connected again: doubled from the first to the last."""
_STOP_CHECK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How the frames of a source are played and taken."""

    paced: bool = False
    """A file's packets are due at their times, as a camera sends them; else as fast as they are taken."""
    loop: bool = False
    """From the start again, for ever."""
    newest_only: bool = False
    """A frame that waits for the engine is dropped for a newer one of the stream; else the source waits."""
    in_flight: int = 8
    """Without `newest_only`: frames of the stream in the pipeline at once."""
    threads: int = 1
    """Threads of the decoder."""
    max_frames: int | None = None
    """The stream ends after this number of frames."""
    give_up_s: float = 60.0
    """A camera that has been away for so long ends the stream."""


@dataclass(frozen=True, slots=True)
class StreamFrame:
    """What became of a frame."""

    number: int
    """From 0 over the life of the stream."""
    time_s: float
    """Presentation time since the first frame of the stream."""
    arrived_s: float
    """When its packet was due or read, by `time.perf_counter`."""
    result: FrameResult | BaseException | None
    """The result, what failed, or None for a frame that was dropped."""


class VideoStream:
    """Decodes a source and gives its frames to a pipeline. `on_frame` is called once for each frame, by any thread."""

    def __init__(
        self,
        source: str,
        pipeline: FramePipeline,
        on_frame: Callable[[StreamFrame], None],
        settings: StreamSettings | None = None,
        *,
        on_end: Callable[[], None] = lambda: None,
        opener: Callable[..., Decoder] = PyAvDecoder,
    ) -> None:
        """`on_end` is called last, after every frame; `opener` opens the source. Nothing starts before `start`."""
        self.source, self.settings = source, settings or StreamSettings()
        self.times = PartTimes()
        """CPU times of the stream's thread."""
        self.info: VideoSource | None = None
        self.error: str | None = None
        """Why the stream ended early."""
        self.frames = self.dropped = self.damaged = self.loops = self.reconnects = 0
        """`frames` is what was decoded, dropped ones included; `damaged` are packets."""
        self._pipeline, self._on_frame, self._on_end, self._opener = pipeline, on_frame, on_end, opener
        self._stopping = threading.Event()
        self._slots = threading.Semaphore(self.settings.in_flight)
        self._waiting: tuple[Future[dict[str, Any]], StreamFrame] | None = None
        self._start_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"stream {shown_address(source)}"[:60], daemon=True)

    def start(self, at_s: float | None = None) -> VideoStream:
        """Begin to play; a paced source's first packet is due at `at_s` of `time.perf_counter`, at once without it."""
        self._start_s = time.perf_counter() if at_s is None else at_s
        self._thread.start()
        return self

    def stop(self) -> None:
        """End after the current frame, without waiting for it."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until the stream has ended and `on_end` has been called."""
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    # -------------------------------------------------------------------------------------------- the stream's thread

    def _run(self) -> None:
        try:
            self._play_to_the_end()
        except Exception as error:  # one stream's failure costs no other stream anything
            self.error = f"{type(error).__name__}: {error}"
            log.warning("`%s` ended: %s", shown_address(self.source), self.error)
        finally:
            if not self.settings.newest_only:
                for _ in range(self.settings.in_flight):  # every frame is answered
                    self._slots.acquire()
            self._waiting = None  # with its frame's memory
            self._on_end()

    def _play_to_the_end(self) -> None:
        live, name = is_live(self.source), shown_address(self.source)
        lost_s, retry_s = None, _FIRST_RETRY_S
        while not self._stopping.is_set():
            reason = "it ended"
            try:
                with contextlib.closing(self._opener(self.source, threads=self.settings.threads)) as decoder:
                    if lost_s is not None:
                        log.info("`%s` is back after %.1f s", name, time.perf_counter() - lost_s)
                    self.info, lost_s, retry_s = decoder.info, None, _FIRST_RETRY_S
                    self._play(decoder)
            except VideoError as error:
                reason = str(error)
                if not live:
                    self.error = reason
            if not live or self._stopping.is_set():
                return
            lost_s = lost_s or time.perf_counter()
            if self.info is None or time.perf_counter() - lost_s > self.settings.give_up_s:
                self.error = reason
                return
            self.reconnects += 1
            log.warning("`%s`: %s; connecting again in %g s", name, reason, retry_s)
            self._stopping.wait(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _play(self, decoder: Decoder) -> None:
        before = self.damaged
        first_s = time.perf_counter() - self._start_s if self.frames else 0.0  # after a reconnection: time goes on
        while True:
            packets, last_s = decoder.packets(), 0.0
            while not self._stopping.is_set():
                with self.times.timed("decoder"):
                    packet = next(packets, None)
                if packet is not None and self.settings.paced:
                    due_s = self._start_s + first_s + packet.time_s
                    if self._wait_until(due_s):
                        return
                else:
                    due_s = self._start_s + first_s + last_s if self.settings.paced else time.perf_counter()
                with self.times.timed("decoder"):
                    frames = decoder.decode(packet)
                self.damaged = before + decoder.damaged
                interval_s = 1 / decoder.info.fps
                for place, frame in enumerate(frames):
                    if self.settings.paced and (place or packet is None):
                        due_s += interval_s  # held back for their order: a camera would send them one by one
                        if self._wait_until(due_s):
                            return
                    self._take(frame, first_s + frame.time_s, due_s, interval_s)
                    if self.frames == self.settings.max_frames:
                        self._stopping.set()
                        break
                if packet is None:
                    break
                last_s = packet.time_s
            if not self.settings.loop or self._stopping.is_set():
                return
            if not self.frames:
                raise VideoError("no frame of it could be decoded")
            self.loops += 1
            first_s += last_s + 1 / decoder.info.fps
            with self.times.timed("decoder"):
                decoder.rewind()

    def _wait_until(self, due_s: float) -> bool:
        """Whether the stream was stopped while it waited."""
        while (left_s := due_s - time.perf_counter()) > 0:
            if left_s < _STOP_CHECK_S:
                time.sleep(left_s)  # exact, where an event is not
            elif self._stopping.wait(left_s - _STOP_CHECK_S / 2):
                break
        return self._stopping.is_set()

    def _take(self, frame: Frame, time_s: float, due_s: float, interval_s: float) -> None:
        """Prepare and submit a frame, or drop it for a newer one."""
        number = self.frames
        self.frames += 1
        taken = partial(StreamFrame, number, time_s, due_s)
        newest_only = self.settings.newest_only
        if newest_only and self.settings.paced and time.perf_counter() - due_s > interval_s:
            self._drop(taken(None))  # the next one is there already
            return
        if not newest_only:
            while not self._slots.acquire(timeout=_STOP_CHECK_S):
                if self._stopping.is_set():
                    self._drop(taken(None))
                    return
        try:
            with self.times.timed("pre-processing"):
                prepared = self._pipeline.prepare(frame)
            if self._waiting is not None and self._waiting[0].cancel():
                self._drop(self._waiting[1])
            future = self._pipeline.submit(frame, prepared, lambda result: self._finish(taken(result)))
        except Exception as error:  # of this frame: the next one may be well
            if newest_only and isinstance(error, Overloaded):
                self._drop(taken(None))
            else:
                self._finish(taken(error))
        else:
            self._waiting = (future, taken(None)) if newest_only else None

    def _drop(self, frame: StreamFrame) -> None:
        self.dropped += 1
        self._on_frame(frame)

    def _finish(self, frame: StreamFrame) -> None:
        try:
            self._on_frame(frame)
        finally:
            self._slots.release()
