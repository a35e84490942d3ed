"""Decoders: packets of a clip or a camera in, frames out. `PyAvDecoder` decodes on the CPU; another has the same methods.

Reading and decoding are two steps, because a source in real time waits between them: a camera's packet arrives at its time,
whatever the decoder does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trt_engine.atomic_io import failed_download, open_regular
from trt_engine.closing import Closing
from trt_engine.errors import SetupError, UsageError
from trt_engine.limits import IMAGE_PIXELS
from trt_engine.records.infer import VideoSource
from trt_engine.vision.preprocess import require_pillow

with contextlib.suppress(ImportError):  # `require_video` has the error
    import av
    import av.logging
    from av.video.reformatter import VideoReformatter
    from PIL import Image

SUFFIXES = tuple(".mp4 .mkv .mov .avi .webm .ts .m4v .mpg .mpeg .flv .wmv .h264 .h265 .hevc".split())
"""File names that a folder of clips is searched for."""
_LIVE = re.compile(r"(rtsps?|rtmps?|srt|udp|rtp|https?)://", re.IGNORECASE)
_CONTAINERS = (
    "3g2 3gp apng asf av1 avi dv flv gif h261 h263 h264 hevc ivf m4a m4v matroska mj2 mjpeg mov mp4 mpeg mpegts mpegvideo "
    "mxf nut obu ogg rm vc1 vvc webm wtv yuv4mpegpipe"
)
"""What a file may be, by FFmpeg's names: none of them leads to other files, as playlists do."""
_PLAYLISTS = (b"ffconcat", b"#EXTM3U", b"<?xml", b"<MPD", b"v=0")
_OPEN_S, _READ_S = 10.0, 10.0
"""How long a camera may take to answer, and to send its next packet."""
_SILENT = f"it sent nothing for {_READ_S:g} s"
_DAMAGED = "its data is damaged, or not a video"
_DEFAULT_FPS = 25.0
"""Frame rate of a source that states none."""


class VideoError(Exception):
    """A source that cannot be read or decoded (any more); the message is the reason, without the name."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Compressed data, and when it is due."""

    time_s: float
    """Decoding time from the source's first packet on, 0 or more, never falling."""
    data: Any
    """The library's own packet."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame."""

    index: int
    """From 0, in the order of presentation."""
    time_s: float
    """Presentation time from the first frame on."""
    data: Any
    """The library's own frame, in the codec's colours."""
    reformatter: Any = None
    """The library's converter, for the decoder's thread."""

    def image(self) -> Image.Image:
        """The upright frame, 8-bit RGB."""
        # one thread and a converter that is kept: `to_image` takes four times as long
        picture = Image.fromarray(self.reformatter.reformat(self.data, format="rgb24", threads=1).to_ndarray())
        turned = _TURNS.get(int(self.data.rotation) % 360)
        return picture.transpose(getattr(Image.Transpose, turned)) if turned else picture


_TURNS = {90: "ROTATE_90", 180: "ROTATE_180", 270: "ROTATE_270"}
"""By the rotation in degrees, counterclockwise, that shows a frame upright."""


class Decoder(Protocol):
    """What a source of frames implements; for one thread at a time."""

    info: VideoSource
    damaged: int
    """Packets so far that could not be decoded, or were decoded to damaged frames."""

    def packets(self) -> Iterator[Packet]:
        """The packets in order, to the end. Raises `VideoError` where the source breaks off."""

    def decode(self, packet: Packet | None) -> list[Frame]:
        """The frames that a packet completes; for None those that are left at the end."""

    def rewind(self) -> None:
        """Back to the first packet. Raises `VideoError`."""

    def close(self) -> None:
        """Release the source. Idempotent."""


def require_video() -> None:
    """Raise `SetupError` where clips cannot be read."""
    require_pillow()
    if importlib.util.find_spec("av") is None:
        raise SetupError("reading videos needs PyAV, which is not installed", hint="`pip install 'trt-engine[video]'`")


def is_live(address: str) -> bool:
    """Whether the address is a camera's or a server's, not a file's."""
    return _LIVE.match(address) is not None


def shown_address(address: str) -> str:
    """The address without the password."""
    return re.sub(r"(?<=://)([^/@]*)@", "***@", address)


def find_clips(source: str) -> list[str]:
    """The clips of a folder in the order of their names; any other source itself. `UsageError` for an empty folder."""
    path = Path(source)
    if is_live(source) or not path.is_dir():
        return [source]
    found = sorted(str(item) for item in path.iterdir() if item.suffix.lower() in SUFFIXES and item.is_file())
    if not found:
        raise UsageError(f"`{source}` has no clips", hint=f"their names end in {', '.join(SUFFIXES[:6])} and others")
    return found


def describe_clip(source: str, *, first_frame: bool = False) -> VideoSource:
    """What the source states about its video; with `first_frame` only if that can be decoded.

    Raises `UsageError` for what cannot be read, `SetupError` without PyAV.
    """
    try:
        with contextlib.closing(PyAvDecoder(source)) as decoder:
            if first_frame and next(read_frames(decoder), None) is None:
                raise VideoError("no frame of it can be decoded")
            return decoder.info
    except VideoError as error:
        raise UsageError(
            f"`{shown_address(source)}` is not a readable video: {error}", hint="a clip or address that `ffplay` plays"
        ) from error


class PyAvDecoder(Closing):
    """Decodes on the CPU with FFmpeg's decoders, which run without Python's lock."""

    def __init__(self, source: str, *, threads: int = 1) -> None:
        """`threads` above 1 decode several frames at once, each a little later. Raises `VideoError`, `SetupError`."""
        require_video()
        self.damaged = 0
        self._source, self._threads = source, threads
        self._live = is_live(source)
        self._container: Any = None
        self._reformatter = VideoReformatter()
        self._open()

    def _open(self) -> None:
        av.logging.set_level(None)  # FFmpeg's own lines name neither the source nor the remedy
        options = {"rtsp_transport": "tcp"} if self._source.lower().startswith("rtsp") else {}
        if not self._live:
            path = Path(self._source)
            if path.exists() and not path.is_file():
                raise VideoError("it is not a regular file")
            options |= {"protocol_whitelist": "file", "format_whitelist": _CONTAINERS.replace(" ", ",")}
        timeout = (_OPEN_S, _READ_S) if self._live else None
        try:
            self._container = av.open(self._source, options=options, timeout=timeout)
            if not self._container.streams.video:
                kinds = sorted({stream.type for stream in self._container.streams})
                raise VideoError(f"it has no video, only {' and '.join(kinds)}" if kinds else "it has no video")
            self._stream = self._container.streams.video[0]
            self._codec = self._stream.codec_context
            if self._codec is None:
                raise VideoError("its codec has no decoder here")
            most = IMAGE_PIXELS.value // 2  # a codec keeps up to 17 frames; 8K is 35 million
            self._codec.options = {"max_pixels": str(most)}  # a later frame may be larger than the first
            self._codec.thread_type = "AUTO" if self._threads > 1 else "NONE"
            self._codec.thread_count = self._threads
            if (pixels := self._codec.width * self._codec.height) > most:
                raise VideoError(f"its frames have {pixels} pixels, more than half of an image; {IMAGE_PIXELS.hint}")
            self.info = self._read_info()
        except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
            self.close()
            raise VideoError(_open_reason(self._source, error)) from error
        except VideoError:
            self.close()
            raise
        self._from_start()

    def _from_start(self) -> None:
        self._index, self._last_s = 0, 0.0
        self._first_packet: float | None = None
        self._first_frame: float | None = None

    def _read_info(self) -> VideoSource:
        stream, codec = self._stream, self._codec
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate and 0 < rate <= 1000 else _DEFAULT_FPS
        duration_s = None
        if stream.duration and stream.time_base:
            duration_s = float(stream.duration * stream.time_base)
        elif self._container.duration:
            duration_s = self._container.duration / av.time_base
        return VideoSource(
            path=shown_address(self._source),
            codec=codec.name,
            width=codec.width,
            height=codec.height,
            fps=fps,
            frames=stream.frames or (round(duration_s * fps) if duration_s and not self._live else None),
        )

    def packets(self) -> Iterator[Packet]:
        """The packets in order, to the end. Raises `VideoError` where the source breaks off."""
        packets = self._container.demux(self._stream)
        while True:
            asked_s = time.monotonic()
            try:
                packet = next(packets, None)
            except (av.FFmpegError, OSError, ValueError) as error:
                raise VideoError(_reason(error)) from error
            if packet is None or packet.size == 0:  # an empty one ends the stream
                return
            silent = self._live and time.monotonic() - asked_s >= _READ_S
            yield Packet(self._due_s(packet), packet)
            if silent:  # FFmpeg gives what it has first, the error later
                raise VideoError(_SILENT)

    def _due_s(self, packet: Any) -> float:
        stamp = packet.dts if packet.dts is not None else packet.pts
        time_s = self._last_s if stamp is None or packet.time_base is None else float(stamp * packet.time_base)
        if self._first_packet is None:
            self._first_packet = time_s
        self._last_s = max(self._last_s, time_s - self._first_packet)
        return self._last_s

    def decode(self, packet: Packet | None) -> list[Frame]:
        """The frames that a packet completes; for None those that are left at the end."""
        try:
            decoded = self._codec.decode(None if packet is None else packet.data)
        except (av.FFmpegError, ValueError):
            self.damaged += packet is not None  # the next key frame makes it whole
            return []
        found = []
        for frame in decoded:
            self.damaged += bool(frame.is_corrupt)
            if frame.pts is None or self._stream.time_base is None:
                time_s = self._index / self.info.fps
            else:  # not `frame.time`: frames left at the end have no time base
                time_s = float(frame.pts * self._stream.time_base)
            if self._first_frame is None:
                self._first_frame = time_s
            found.append(Frame(self._index, max(0.0, time_s - self._first_frame), frame, self._reformatter))
            self._index += 1
        return found

    def rewind(self) -> None:
        """Back to the first packet. Raises `VideoError`."""
        if self._container is not None:
            with contextlib.suppress(av.FFmpegError, OSError, ValueError):  # a raw stream has no index
                self._container.seek(0)
                self._codec.flush_buffers()
                self._from_start()
                return
            self._container.close()
        self._open()

    def close(self) -> None:
        """Release the source. Idempotent."""
        if self._container is not None:
            self._container.close()
            self._container = None


def _open_reason(source: str, error: Exception) -> str:
    """Why a source cannot be opened: what its first bytes are, or FFmpeg's reason."""
    with contextlib.suppress(OSError, UsageError):
        if not is_live(source):
            with open_regular(Path(source)) as file:
                head = file.read(64)
            if not head:
                return "it is empty"
            if (other := failed_download(head)) is not None:
                return f"it is {other[0]}"
            if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(_PLAYLISTS):
                return "it is a playlist; name the clips, or a folder of them"
            if head[4:8] == b"ftyp" and isinstance(error, av.InvalidDataError):
                return "it was cut or damaged: its index (`moov`) cannot be read"
            if "Invalid argument" in str(error):  # it is of another format
                return _DAMAGED
    return _reason(error)


def _reason(error: Exception) -> str:
    """FFmpeg's reason in lower case, without number and name."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if "Immediate exit" in text:
        return _SILENT
    if "Invalid data" in text:
        return _DAMAGED
    return text[:1].lower() + text[1:]


def read_frames(decoder: Decoder) -> Iterator[Frame]:
    """All frames of a decoder in order. Raises `VideoError` where the source breaks off."""
    for packet in decoder.packets():
        yield from decoder.decode(packet)
    yield from decoder.decode(None)
