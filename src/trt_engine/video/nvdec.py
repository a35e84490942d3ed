"""Decodes on an NVIDIA GPU, into its memory: FFmpeg reads the packets, NVDEC decodes them (`pynvvideocodec`)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_engine.device import Buffer, Device
from trt_engine.errors import SetupError, TrtEngineError
from trt_engine.format import library_reason
from trt_engine.video.decoder import Frame, Packet, PyAvDecoder, VideoError, require_video

with contextlib.suppress(ImportError):  # `require_video` has the error
    import av

if TYPE_CHECKING:
    from PIL import Image

_CODECS = {
    "h264": "H264", "hevc": "HEVC", "av1": "AV1", "vp8": "VP8", "vp9": "VP9",
    "mpeg1video": "MPEG1", "mpeg2video": "MPEG2", "mpeg4": "MPEG4", "vc1": "VC1",
}  # fmt: skip
"""FFmpeg's name of a codec -> NVDEC's."""
_START_CODES = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
"""Filters that write packets as NVDEC reads them."""
_PIXELS = {"yuv420p", "yuvj420p"}
_FULL_RANGE = 2


class DecoderMemory:
    """A stream of the GPU for one decoder at a time, and memory for its frames, used again and again.

    It has no lock: frames give their memory back as they are destroyed, at any point of any thread.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream()
        self._free: dict[int, list[Buffer]] = defaultdict(list)
        self._closed = False

    def take(self, nbytes: int) -> Buffer:
        """Memory that only work of this stream uses any more."""
        free = self._free[nbytes]
        return free.pop() if free else self.device.allocate(nbytes)  # by the decoder's thread alone

    def give_back(self, buffer: Buffer) -> None:
        """Take back what no work but this stream's uses."""
        if self._closed:
            buffer.close()
        else:
            self._free[buffer.nbytes].append(buffer)

    def close(self) -> None:
        """Free the memory; frames that are alive free theirs later."""
        self.stream.close()
        self._closed = True
        for buffer in (buffer for free in self._free.values() for buffer in free):
            buffer.close()


class Surface:
    """A frame in the GPU's memory: luma [height, width], then pairs of U and V [height / 2, width / 2], 8 bits each.

    The buffer goes back to its `DecoderMemory` with this object: keep it until the work that reads it is done.
    """

    def __init__(
        self, memory: DecoderMemory, buffer: Buffer, width: int, height: int, colours: tuple[int, bool]
    ) -> None:
        self.memory, self.buffer = memory, buffer
        self.width, self.height = width, height
        self.colours = colours
        """The number of the colour space (ITU-T H.273), and whether the range is full."""

    def __del__(self) -> None:
        self.memory.give_back(self.buffer)


@dataclass(frozen=True, slots=True)
class DeviceFrame(Frame):
    """A frame whose `data` is a `Surface`."""

    def image(self) -> Image.Image:
        """A copy on the host, 8-bit RGB."""
        surface: Surface = self.data
        device, (space, full) = surface.memory.device, surface.colours
        pixels = np.empty((surface.height * 3 // 2, surface.width), np.uint8)
        stream = device.stream()
        try:
            stream.order_after(surface.memory.stream.handle)
            device.download(surface.buffer, pixels, stream)
            stream.synchronize()
        finally:
            stream.close()
        luma, chroma = pixels[: surface.height], pixels[surface.height :]
        halves = [chroma[:, number::2].reshape(-1, surface.width) for number in (0, 1)]
        frame = av.VideoFrame.from_ndarray(np.concatenate([luma, *halves]), format="yuv420p")
        frame.colorspace, frame.color_range = space, _FULL_RANGE if full else 1
        return Frame(self.index, self.time_s, frame, self.reformatter).image()


class NvDecoder(PyAvDecoder):
    """Decodes on a GPU, into a `DecoderMemory`. What the driver conceals in a damaged packet is not counted as damaged."""

    def __init__(
        self, source: str, memory: DecoderMemory, number: int, *, on_close: Callable[[DecoderMemory], None]
    ) -> None:
        """`number` is the GPU's; `on_close` gets the memory back. Raises `VideoError` for a source that cannot be read, or
        that NVDEC does not decode."""
        self._library = load_library()
        self._memory, self._number, self._on_close = memory, number, on_close
        self._session: Any = None
        self._is_open = self._is_fed = False
        try:
            super().__init__(source)
            if (reason := unsupported(self)) is not None:
                raise VideoError(reason)
        except BaseException:
            super().close()
            on_close(memory)
            raise
        self._is_open = True

    def _from_start(self) -> None:
        super()._from_start()
        self._filter = None
        if (name := _START_CODES.get(self.info.codec)) is not None:
            self._filter = av.bitstream.BitStreamFilterContext(name, self._stream)
        full = self._codec.pix_fmt == "yuvj420p" or int(self._codec.color_range) == _FULL_RANGE
        self._colours = int(self._codec.colorspace), full

    def _open_session(self) -> Any:
        codec = getattr(self._library.cudaVideoCodec, _CODECS[self.info.codec])
        latency = self._library.DisplayDecodeLatencyType
        try:
            return self._library.CreateDecoder(
                gpuid=self._number, codec=codec, cudastream=self._memory.stream.handle, usedevicememory=True,
                latency=latency.NATIVE if self._codec.has_b_frames else latency.LOW,
            )  # fmt: skip
        except Exception as error:
            raise VideoError(f"this GPU does not decode it: {library_reason(error)}") from error

    def decode(self, packet: Packet | None) -> list[Frame]:
        """The frames that a packet completes, in the GPU's memory; for None those that are left at the end. Raises
        `VideoError` where the GPU does not decode the source, `MemoryExhausted`."""
        found: list[Frame] = []
        if self._session is None and packet is None:
            return found
        if self._session is None:
            self._session = self._open_session()
        try:
            for data in self._filtered(packet):
                found.extend(self._decode_data(data))
            if packet is None:
                found.extend(self._decode_data(None))
        except TrtEngineError:  # no memory
            raise
        except Exception:  # of the library, whose errors have no common class
            self._session = None  # the next key frame starts again
            self.damaged += packet is not None
        return found

    def _filtered(self, packet: Packet | None) -> list[Any]:
        if self._filter is None:
            return [] if packet is None else [packet.data]
        return self._filter.filter(None if packet is None else packet.data)

    def rewind(self) -> None:
        """Back to the first packet, without the frames that are not decoded yet. Raises `VideoError`."""
        if self._is_fed:
            self.decode(None)
        super().rewind()

    def _decode_data(self, data: Any) -> list[Frame]:
        """The frames of a packet in the codec's own form; None ends the stream."""
        self._is_fed = data is not None
        given = self._library.PacketData()
        given.bsl = given.bsl_data = given.pts = given.decode_flag = 0
        if data is not None:
            given.bsl, given.bsl_data = data.buffer_size, data.buffer_ptr
            given.pts = -1 if data.pts is None else data.pts
            if not self._codec.has_b_frames:  # the frame is decoded at once, not with the next packet
                given.decode_flag = int(self._library.VideoPacketFlag.ENDOFPICTURE)
        return [self._keep(frame) for frame in self._session.Decode(given)]

    def _keep(self, decoded: Any) -> Frame:
        """A copy of a frame, which the next packet overwrites."""
        memory, width, height = self._memory, self._session.GetWidth(), self._session.GetHeight()
        surface = Surface(memory, memory.take(width * height * 3 // 2), width, height, self._colours)
        memory.device.copy_from(decoded.GetPtrToPlane(0), surface.buffer, memory.stream)  # type: ignore[attr-defined]
        stamp = decoded.getPTS()
        time_s = self._index / self.info.fps if stamp < 0 else float(stamp * self._stream.time_base)
        if self._first_frame is None:
            self._first_frame = time_s
        self._index += 1
        return DeviceFrame(self._index - 1, max(0.0, time_s - self._first_frame), surface, self._reformatter)

    def close(self) -> None:
        """Release the source and its decoder. Idempotent."""
        super().close()
        if self._is_open:
            self._is_open, self._session = False, None
            self._on_close(self._memory)


def load_library() -> Any:
    """The module PyNvVideoCodec. Raises `SetupError` where it is not installed or does not start."""
    require_video()
    if importlib.util.find_spec("PyNvVideoCodec") is None:
        raise SetupError("`pynvvideocodec` is not installed", hint="`pip install 'trt-engine[video-gpu]'`")
    try:
        return importlib.import_module("PyNvVideoCodec")
    except Exception as error:  # a driver without video
        raise SetupError(
            f"`pynvvideocodec` does not load: {library_reason(error)}",
            hint="a driver with NVDEC; in a container `NVIDIA_DRIVER_CAPABILITIES=compute,video,utility`",
        ) from error


def unsupported(decoder: PyAvDecoder) -> str | None:
    """Why NVDEC, or the preparation on the GPU, does not take an opened source's frames; None where they do."""
    info, pixels = decoder.info, decoder._codec.pix_fmt
    if info.codec not in _CODECS:
        return f"NVDEC does not decode {info.codec}"
    if pixels not in _PIXELS or info.width % 2 or info.height % 2:
        return (
            f"frames of {pixels} {info.width}x{info.height} are not prepared on the GPU, 8-bit 4:2:0 of even size are"
        )
    return None
