"""What each part of the path on a GPU carries alone, in frames per second: measured before cameras are played."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import cycle, islice

import numpy as np

from trt_engine.protocols import RunnerBase
from trt_engine.verbs.size.stream_worker import VideoRequest
from trt_engine.video.decoder import Decoder, read_frames
from trt_engine.video.device_frames import DeviceFrames
from trt_engine.video.nvdec import Surface

_DECODERS = 16
"""Clips decoded at once: more than a GPU has decoders."""
_SPAN_S = 1.0


def part_rates(runner: RunnerBase, frames: DeviceFrames, request: VideoRequest) -> dict[str, float]:
    """Frames/s of the decoder, the preparation, the engine and the copy of its outputs, each without the others.

    Raises `VideoError` for a clip that cannot be decoded.
    """
    name, count, contexts = runner.signature.inputs[0].name, request.policy.max_batch, request.policy.contexts
    device = frames.device
    with ExitStack() as stack:
        decoders = [
            stack.enter_context(closing(frames.open(clip.path))) for clip in islice(cycle(request.clips), _DECODERS)
        ]

        def decode(decoder: Decoder) -> int:
            decoder.rewind()
            return sum(1 for _ in read_frames(decoder))

        rates = {"decoder": _rate([lambda one=one: decode(one) for one in decoders])}  # type: ignore[misc]
        decoders[0].rewind()
        surface: Surface = next(read_frames(decoders[0])).data
        rows = [surface] * count

        def prepare() -> int:
            with frames.batch(rows):
                return count

        rates["pre-processing"] = _rate([prepare] * contexts)
        batch = stack.enter_context(frames.batch(rows))
        nbytes = sum(value.nbytes for value in runner.run({name: batch}).values())

        def infer() -> int:
            runner.run({name: batch})
            return count

        rates["engine"] = _rate([infer] * contexts)
        source, target, stream = device.allocate(nbytes), device.pinned(nbytes), device.stream()
        for item in (stream, source, target):
            stack.callback(item.close)
        array = np.asarray(target.array("uint8"))[:nbytes]

        def copy() -> int:
            device.download(source, array, stream)
            stream.synchronize()
            return count

        return rates | {"copy": _rate([copy])}


def _rate(calls: Sequence[Callable[[], int]]) -> float:
    """What the calls count per second, each repeated in a thread of its own after a first time."""
    gate = threading.Barrier(len(calls))

    def repeat(call: Callable[[], int]) -> float:
        try:
            call()
        except BaseException:
            gate.abort()
            raise
        gate.wait()
        counted, started_s = 0, time.perf_counter()
        while not counted or time.perf_counter() - started_s < _SPAN_S:
            counted += call()
        return counted / (time.perf_counter() - started_s)

    with ThreadPoolExecutor(len(calls)) as pool:
        threads = [pool.submit(repeat, call) for call in calls]
    failures = [error for thread in threads if (error := thread.exception()) is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError) or error is failures[-1]:
            raise error
    return sum(thread.result() for thread in threads)
