"""Cameras on this machine by `size --video`, against a program that shares none of its code above `te.load`.

    python benchmarks/video_check.py [--clip FILE --model FILE] [--seconds N] [--rounds N] [--out FILE]

The other program has a thread for each camera: PyAV decodes the clip at its frame rate, pillow and numpy prepare a frame,
`te.load` with the same batching infers it, numpy finds boxes, and a frame is late where that ends after the next is due.
Both find the largest number with at most one late or dropped frame in a hundred, in turns. The exit code is 1 where their
medians differ by more than one camera and 5 %. Needs the extra `video`; without files the package's own example is used.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record

LATE, SIZE, SETTLE_S = 0.01, 160, 0.5


def prepared(frame: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The example detector's input of one frame: letterboxed RGB of 160 x 160 over grey, [1, 3, 160, 160] from 0 to 1."""
    picture = frame.to_image()
    scale = SIZE / max(picture.size)
    small = picture.resize([round(side * scale) for side in picture.size], Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (SIZE, SIZE), (114, 114, 114))
    canvas.paste(small, ((SIZE - small.width) // 2, (SIZE - small.height) // 2))
    return np.ascontiguousarray(np.asarray(canvas, np.float32).transpose(2, 0, 1)[None] / 255)


def boxes(output: Any) -> list[int]:
    """The best of overlapping boxes of [1, 4 + classes, boxes], by score."""
    x, y, width, height = output[0, :4]
    scores = output[0, 4:].max(axis=0)
    area, kept = width * height, []
    for at in np.argsort(-scores)[: int((scores >= 0.25).sum())]:
        across = [np.minimum(x[at] + width[at] / 2, x[kept] + width[kept] / 2) -
                  np.maximum(x[at] - width[at] / 2, x[kept] - width[kept] / 2),
                  np.minimum(y[at] + height[at] / 2, y[kept] + height[kept] / 2) -
                  np.maximum(y[at] - height[at] / 2, y[kept] - height[kept] / 2)]  # fmt: skip
        shared = np.clip(across[0], 0, None) * np.clip(across[1], 0, None)
        if not (shared / (area[at] + area[kept] - shared) > 0.2).any():
            kept.append(at)
    return kept


class Camera(threading.Thread):
    """Plays a clip in a loop; `seen` has when each frame was due, and whether it was late or dropped."""

    def __init__(self, clip: Path, runner: Any, start_s: float, end_s: float) -> None:
        super().__init__(daemon=True)
        self.clip, self.runner, self.start_s, self.end_s = clip, runner, start_s, end_s
        self.seen: list[tuple[float, bool]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.play()
        except BaseException as error:  # shown by the main thread
            self.error = error

    def play(self) -> None:
        number, due_s = 0, self.start_s
        while due_s < self.end_s:
            with av.open(str(self.clip)) as container:
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1
                interval_s = float(1 / stream.average_rate)
                for packet in container.demux(stream):
                    due_s = self.start_s + number * interval_s
                    if packet.size:
                        time.sleep(max(0.0, due_s - time.perf_counter()))
                    for frame in packet.decode():
                        due_s = self.start_s + number * interval_s
                        time.sleep(max(0.0, due_s - time.perf_counter()))  # the last packet completes several
                        number += 1
                        if is_late := time.perf_counter() > due_s + interval_s:  # a newer one is there
                            self.seen.append((due_s, is_late))
                            continue
                        (output,) = self.runner.infer_async({"images": prepared(frame)}).result().values()
                        boxes(np.asarray(output))
                        self.seen.append((due_s, time.perf_counter() > due_s + interval_s))
                    if due_s > self.end_s:
                        return


def late_share(runner: Any, clip: Path, cameras: int, seconds: float, seed: int) -> float:
    """The share of late and dropped frames of so many cameras, whose starts are spread over two seconds."""
    begin_s, spread_s = time.perf_counter() + 0.3, min(2.0, seconds)
    phases = np.random.default_rng([seed, cameras]).uniform(0, spread_s, cameras)
    from_s = begin_s + spread_s + SETTLE_S
    played = [Camera(clip, runner, begin_s + phase, from_s + seconds) for phase in phases]
    for camera in played:
        camera.start()
    for camera in played:
        camera.join()
        if camera.error is not None:
            raise camera.error
    counted = [late for camera in played for due_s, late in camera.seen if from_s <= due_s < from_s + seconds]
    return statistics.fmean(counted)


def largest(share: Callable[[int], float]) -> int:
    """Doubled, then bisected to one; fewer where it does not pass twice, or each number would be its luckiest run's."""
    passed, failed = 0, 1
    while share(failed) <= LATE:
        passed, failed = failed, 2 * failed
    while failed - passed > 1:
        middle = (passed + failed) // 2
        passed, failed = (middle, failed) if share(middle) <= LATE else (passed, middle)
    while passed and share(passed) > LATE:
        passed -= 1
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clip", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, list[int]] = {"size --video": [], "own threads": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        te.example(folder / "example", video=True)
        model, clip = options.model or folder / "example/detector.onnx", options.clip or folder / "example/clip.mp4"
        reports = []
        for number in range(options.rounds):
            report = te.size(model, video=[clip], duration_s=options.seconds, out=folder / f"size{number}", max_batch=8)
            assert report.video is not None and report.engine is not None
            reports.append(report.video)
            policy = report.video.policy
            batching = te.Batching(max_batch=policy.max_batch, max_wait_ms=policy.max_wait_ms, workers=policy.contexts)
            with te.load(folder / f"size{number}" / report.engine, batching=batching) as runner:
                own = largest(lambda cameras: late_share(runner, clip, cameras, options.seconds, number))  # noqa: B023
            found["size --video"].append(report.video.streams)
            found["own threads"].append(own)
            print(f"round {number + 1}: size --video {report.video.streams} "
                  f"({report.video.low} to {report.video.high}), own threads {own}", flush=True)  # fmt: skip
        ours, other = (statistics.median(numbers) for numbers in found.values())
        if options.out is not None:
            record = {
                "schema": "trt-engine/video-check", "command": shlex.join(["python", "benchmarks/video_check.py",
                *(item for item in sys.argv[1:] if "/" not in item and item != "--out")]),
                "found": found, "policy": reports[-1].policy, "limit": [item.limit for item in reports],
                "part_streams": reports[-1].part_streams, "environment": Environment.detect(),
            }  # fmt: skip
            append_record(options.out, record)
    return int(abs(ours - other) > max(1.0, 0.05 * other))


if __name__ == "__main__":
    sys.exit(main())
