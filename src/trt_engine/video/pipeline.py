"""Frames of any number of streams through one engine: prepared in the caller's thread, batched, decoded to results.

`prepare` and `submit` belong to the thread of a stream. The batcher's threads run the engine, a few threads decode its
outputs. Each thread notes the CPU time of its part, so that the parts can be added up to the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_engine.closing import Closing
from trt_engine.config.runtime import Batching
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.metered_runner import MeteredRunner
from trt_engine.video.decoder import Frame
from trt_engine.video.device_frames import DeviceFrames, FrameRunner
from trt_engine.vision.image_inference import ImageResult, ImageRunner
from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.spec import Vision

if TYPE_CHECKING:
    from PIL import Image

CROP_PARTS = ("crops", "second engine")
PARTS = ("decoder", "pre-processing", "engine", *CROP_PARTS, "post-processing")
"""What is timed, the crops' in a cascade alone; the rest of the process is the host's."""


class PartTimes:
    """CPU seconds of one thread by part. The thread that made it writes, others read."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the thread's CPU time inside to `part`, one of `PARTS`."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds[part] += time.thread_time() - started


_Done = Callable[["FrameResult | BaseException"], None]


@dataclass(frozen=True, slots=True)
class FrameResult:
    """What the engine found in one frame."""

    frame: Frame
    prepared: ImageRunner
    result: ImageResult
    crops: tuple[ImageResult, ...] = ()
    """What the second engine of a cascade found in the best boxes, best box first."""

    def drawn(self) -> Image.Image:
        """The frame with what was found drawn on it."""
        return self.prepared.drawn(self.result, self.frame.image() if self.prepared.image is None else None)


class FramePipeline(Closing):
    """Runs frames through an engine, whichever stream they are from. Close it after the streams."""

    def __init__(
        self,
        runner: RunnerBase,
        vision: Vision,
        batching: Batching | None = None,
        *,
        min_score: float = 0.25,
        top: int = 1,
        decoders: int = 2,
        frames: DeviceFrames | None = None,
        then: CropStage | None = None,
    ) -> None:
        """`decoders` threads turn outputs into results with a score of at least `min_score`, or the `top` classes. With
        `frames` the pipeline takes frames of its decoders alone, and leaves it open. `then` infers their best boxes.

        Raises `UsageError` for a declaration that does not fit the engine's inputs and outputs.
        """
        self.meter = MeteredRunner(runner if frames is None else FrameRunner(runner, frames))
        self.vision, self._signature, self._frames = vision, runner.signature, frames
        self._preprocessor = Preprocessor(vision.preprocess, vision.input_spec(runner.signature).dtype)
        self._min_score, self._top, self.then = min_score, top, then
        self._batcher = Batcher(self.meter, batching, profiles=runner.profiles)
        self._outputs: SimpleQueue[_Work | None] = SimpleQueue()
        self.times = [PartTimes() for _ in range(decoders)]
        """CPU times of the threads that decode outputs."""
        self._threads = [
            threading.Thread(target=self._decode_outputs, args=(times,), name=f"results-{number}", daemon=True)
            for number, times in enumerate(self.times)
        ]
        for thread in self._threads:
            thread.start()

    def prepare(self, frame: Frame) -> ImageRunner:
        """The frame as one row of the engine's input."""
        if self._frames is not None:
            return self._frames.prepare(frame)
        return ImageRunner.prepare(frame.image(), self.vision, self._signature, preprocessor=self._preprocessor, rows=1)

    def submit(self, frame: Frame, prepared: ImageRunner, done: _Done) -> Future[dict[str, Any]]:
        """Queue a frame; `done` is called with its result, or with what failed, unless the future is cancelled first.

        Raises `Overloaded` if too many wait.
        """

        def answered(future: Future[dict[str, Any]]) -> None:
            if not future.cancelled():
                self._outputs.put(_Work(frame, prepared, future, done))

        return self._batcher.submit(prepared.feeds, done=answered)

    def _decode_outputs(self, times: PartTimes) -> None:
        while (work := self._outputs.get()) is not None:
            found: FrameResult | BaseException
            try:
                outputs = work.future.result()
                with times.timed("post-processing"):
                    result = work.prepared.decode(outputs, self._min_score, self._top)
                found = FrameResult(work.frame, work.prepared, result)
                if self.then is not None and self.then.submit(found, work.done, times):
                    continue
            except BaseException as error:  # the thread serves every stream: each gets its own error
                found = error
            work.done(found)

    def close(self) -> None:
        """Finish what waits and end the threads; the runner stays open. Idempotent."""
        self._batcher.close()
        for _ in self._threads:
            self._outputs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self.then is not None:
            self.then.close()


class CropStage(Closing):
    """The second model of a cascade: the best boxes of a frame, cut from it, are one request of as many rows."""

    def __init__(self, runner: RunnerBase, vision: Vision, crops: int) -> None:
        """`crops` boxes of a frame at most; the runner stays open.

        Raises `UsageError` for a declaration that does not fit the engine's inputs and outputs.
        """
        self.meter, self.times = MeteredRunner(runner), PartTimes()
        self._vision, self._signature, self._crops = vision, runner.signature, crops
        self._preprocessor = Preprocessor(vision.preprocess, vision.input_spec(runner.signature).dtype)
        self._batcher = Batcher(self.meter, Batching(max_wait_ms=0.0), profiles=runner.profiles)
        self._outputs: SimpleQueue[tuple[FrameResult, list[ImageRunner], Future[Any], _Done] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._decode_outputs, name="crops", daemon=True)
        self._thread.start()

    def submit(self, found: FrameResult, done: _Done, times: PartTimes) -> bool:
        """Whether the frame has boxes; then `done` is called with its result and that of the crops, or with what failed.

        The crops are cut in this thread, that of `times`. Raises `Overloaded` if too many wait.
        """
        if found.result.detections is None or not len(found.result.detections):
            return False
        with times.timed("crops"):
            image = found.frame.image() if found.prepared.image is None else found.prepared.image
            prepared = [
                ImageRunner.prepare(
                    image.crop(box), self._vision, self._signature, preprocessor=self._preprocessor, rows=1
                )
                for box in crop_boxes(found.result.detections.boxes_xyxy[: self._crops], image.size)
            ]
            feeds = {name: np.concatenate([one.feeds[name] for one in prepared]) for name in prepared[0].feeds}
        self._batcher.submit(feeds, done=lambda future: self._outputs.put((found, prepared, future, done)))
        return True

    def _decode_outputs(self) -> None:
        while (work := self._outputs.get()) is not None:
            frame, prepared, future, done = work
            found: FrameResult | BaseException
            try:
                outputs = future.result()
                with self.times.timed("post-processing"):
                    rows = [
                        {name: value[row : row + 1] for name, value in outputs.items()} for row in range(len(prepared))
                    ]
                    crops = [one.decode(row, 0.25, 1) for one, row in zip(prepared, rows, strict=True)]
                found = replace(frame, crops=tuple(crops))
            except BaseException as error:  # as in the pipeline: each frame gets its own error
                found = error
            done(found)

    def close(self) -> None:
        """Finish what waits and end the threads. Idempotent."""
        self._batcher.close()
        self._outputs.put(None)
        self._thread.join()


def crop_boxes(boxes_xyxy: npt.NDArray[Any], size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Boxes [N, 4] in pixels as whole pixels that they touch within an image of this width and height, one at least."""
    limits = np.array(size * 2) - (1, 1, 0, 0)
    least, most = np.floor(boxes_xyxy[:, :2]), np.ceil(boxes_xyxy[:, 2:])
    first = np.clip(least, 0, limits[:2])
    last = np.clip(most, first + 1, limits[2:])
    return [tuple(map(int, box)) for box in np.concatenate([first, last], axis=1)]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class _Work:
    """A frame whose outputs are to be decoded."""

    frame: Frame
    prepared: ImageRunner
    future: Future[dict[str, Any]]
    done: _Done
