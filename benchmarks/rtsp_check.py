"""A camera behind GStreamer's RTSP server that breaks in every way, beside cameras that must not notice.

    python benchmarks/rtsp_check.py [--cameras N] [--seconds N] [--out FILE]

Clips play as `--cameras` healthy cameras through one engine; one more stream comes over RTSP through a relay that cuts it,
refuses it, holds it up, replaces its bytes, or finds a stream of another size and rate behind it. Printed for each part are
the frames and reconnections of that camera and the late share of the others. The exit code is 1 where a stream ended, a
frame was lost or counted twice, the camera did not come back, or the others were later than in the calm part by more than
one frame in a hundred. It needs the extra `video` and Debian's `python3-gi gir1.2-gst-rtsp-server-1.0
gstreamer1.0-plugins-good gstreamer1.0-plugins-bad`; without them it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.video.pipeline import FramePipeline
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream
from trt_engine.vision.spec import vision_of

IMPORTS = """
import sys
import gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer
Gst.init(None)
"""
SERVER = f"""{IMPORTS}
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service("0")
for spec in sys.argv[1:]:
    name, launch = spec.split("=", 1)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(launch)
    server.get_mount_points().add_factory("/" + name, factory)
server.attach(None)
print(server.get_bound_port(), flush=True)
GLib.MainLoop().run()
"""
"""Run by the system's Python, which has the bindings."""
PYTHON = "/usr/bin/python3"
LIVE = (
    "( videotestsrc is-live=true pattern=ball ! video/x-raw,width={},height={},framerate={}/1 ! openh264enc gop-size=10 "
    "! rtph264pay name=pay0 config-interval=1 )"
)
CLIP = '( filesrc location="{}" ! qtdemux ! h264parse ! rtph264pay name=pay0 )'
DEADLINE_S = 0.2
"""Of the healthy cameras: long enough that a machine with other work is not in the way."""


@contextlib.contextmanager
def server(clip: Path) -> Iterator[int]:
    """GStreamer's server with `/camera` of 320x240 at 25, `/other` of 640x360 at 10, and `/clip`; its port."""
    launches = [
        f"camera={LIVE.format(320, 240, 25)}",
        f"other={LIVE.format(640, 360, 10)}",
        f"clip={CLIP.format(clip)}",
    ]
    process = subprocess.Popen([PYTHON, "-c", SERVER, *launches], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


class Relay(threading.Thread):
    """Forwards connections to a server, as `mode` says: `pass`, `cut`, `hold`, `flip` (bytes of the video), `noise`."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.mode, self.path = "pass", b"/camera"
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.rng = random.Random(0)
        self.start()

    def run(self) -> None:
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self.forward, args=(client,), daemon=True).start()

    def forward(self, client: socket.socket) -> None:
        if self.mode == "cut":
            client.close()
            return
        path = self.path
        with client, socket.create_connection(("127.0.0.1", self.target)) as far, contextlib.suppress(OSError):
            ready = selectors.DefaultSelector()
            ready.register(client, selectors.EVENT_READ)
            ready.register(far, selectors.EVENT_READ)
            while self.mode != "cut" and path == self.path:
                for key, _ in ready.select(0.05):
                    while self.mode == "hold":
                        time.sleep(0.05)
                    if not (data := key.fileobj.recv(65536)):  # type: ignore[union-attr]
                        return
                    if key.fileobj is client:
                        far.sendall(data.replace(b"/camera", path))
                    else:
                        client.sendall(self.spoilt(data.replace(path, b"/camera")))

    def spoilt(self, data: bytes) -> bytes:
        if self.mode == "noise":
            return self.rng.randbytes(len(data))
        if self.mode == "flip" and not data.startswith(b"RTSP"):
            changed = bytearray(data)
            for _ in range(1 + len(data) // 400):
                changed[self.rng.randrange(len(data))] = self.rng.randrange(256)
            return bytes(changed)
        return data


class Seen:
    """The frames of a stream by number, and when each came and was answered."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, float, float | None, tuple[int, int] | None]] = []

    def note(self, frame: StreamFrame) -> None:
        found = frame.result
        if isinstance(found, BaseException):
            raise found
        size = None if found is None else found.result.fields["image_size"]
        self.frames.append((frame.number, frame.arrived_s, None if found is None else time.perf_counter(), size))

    def late(self, from_s: float, to_s: float) -> list[bool]:
        frames = [(at_s, end_s) for _, at_s, end_s, _ in list(self.frames) if from_s <= at_s < to_s]
        return [end_s is None or end_s - at_s > DEADLINE_S for at_s, end_s in frames]


PARTS: tuple[tuple[str, str, bytes], ...] = (
    ("calm", "pass", b"/camera"),
    ("refused", "cut", b"/camera"),
    ("back", "pass", b"/camera"),
    ("another size and rate", "pass", b"/other"),
    ("flipped bytes", "flip", b"/other"),
    ("back from flipped bytes", "pass", b"/camera"),
    ("noise", "noise", b"/camera"),
    ("back from noise", "pass", b"/camera"),
    ("held up", "hold", b"/camera"),
    ("back from being held up", "pass", b"/camera"),
    ("a clip that ends", "pass", b"/clip"),
)


def why_not() -> str | None:
    """Why there is no server here."""
    asked = "assert all(map(Gst.ElementFactory.find, ('openh264enc', 'rtph264pay', 'qtdemux', 'h264parse'))), 'plugins'"
    try:
        done = subprocess.run([PYTHON, "-c", IMPORTS + asked], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped, GStreamer's RTSP server is not here: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        te.example(folder / "example", video=True)
        clip = folder / "example/clip.mp4"
        sizes = "images:1x3x160x160,4x3x160x160,8x3x160x160"
        engine = te.build(folder / "example/detector.onnx", profiles=sizes, out=folder / "detector.engine")
        relay = Relay(stack.enter_context(server(clip)))
        runner = stack.enter_context(te.load(engine))
        vision = vision_of(engine)
        assert vision is not None
        pipeline = stack.enter_context(FramePipeline(runner.runner, vision, te.Batching(max_batch=8, max_wait_ms=5.0)))
        healthy = [Seen() for _ in range(options.cameras)]
        paced = StreamSettings(paced=True, loop=True, newest_only=True)
        streams = [VideoStream(str(clip), pipeline, seen.note, paced).start() for seen in healthy]
        camera = Seen()
        live = VideoStream(
            f"rtsp://127.0.0.1:{relay.port}/camera", pipeline, camera.note, StreamSettings(newest_only=True)
        ).start()
        time.sleep(2.0)
        rows: list[dict[str, Any]] = []
        failed = False
        for what, mode, path in PARTS:
            before, reconnects, damaged = len(camera.frames), live.reconnects, live.damaged
            relay.path, relay.mode = path, mode
            from_s = time.perf_counter()
            time.sleep(
                max(options.seconds, 13.0) if mode == "hold" or what.startswith("back from") else options.seconds
            )
            late = [item for seen in healthy for item in seen.late(from_s, time.perf_counter() - DEADLINE_S)]
            found = camera.frames[before:]
            rows.append({
                "part": what, "frames": len(found), "sizes": sorted({size for *_, size in found if size}),
                "reconnects": live.reconnects - reconnects, "damaged": live.damaged - damaged,
                "others_frames": len(late), "others_late": statistics.fmean(late),
            })  # fmt: skip
            row = rows[-1]
            print(
                f"{what}: {row['frames']} frames {row['sizes']}, {row['reconnects']} reconnections, {row['damaged']} damaged"
            )
            print(f"    others: {len(late)} frames, {100 * row['others_late']:.2f} % late", flush=True)
            failed |= mode == "pass" and not row["frames"]
            failed |= row["others_late"] > rows[0]["others_late"] + 0.01
        ended = [stream.error for stream in (live, *streams) if not stream.is_alive()]
        for stream in (live, *streams):
            stream.stop()
        for stream in (live, *streams):
            stream.join()
    for seen, stream in zip((camera, *healthy), (live, *streams), strict=True):
        numbers = sorted(number for number, *_ in seen.frames)
        failed |= numbers != list(range(len(numbers))) or stream.frames - len(numbers) > 1  # the last is not answered
    failed |= bool(ended)
    print(f"ended early: {ended}; {len(camera.frames)} frames and {live.reconnects} reconnections of the camera")
    if options.out is not None:
        command = [
            "python",
            "benchmarks/rtsp_check.py",
            *(item for item in sys.argv[1:] if "/" not in item and item != "--out"),
        ]
        append_record(options.out, {
            "schema": "trt-engine/rtsp-check", "command": shlex.join(command), "deadline_s": DEADLINE_S, "parts": rows,
            "environment": Environment.detect(),
        })  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
