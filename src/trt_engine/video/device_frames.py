"""Frames that stay on the engine's GPU: decoded there, prepared there in batches, and given to the engine there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import resources
from typing import Any

import numpy as np

from trt_engine.device import Buffer, Device, Stream
from trt_engine.errors import SetupError
from trt_engine.protocols import RunnerBase
from trt_engine.tensors import Tensors
from trt_engine.video.decoder import Decoder, Frame, PyAvDecoder, VideoError, is_live, read_frames, shown_address
from trt_engine.video.nvdec import DecoderMemory, NvDecoder, Surface, load_library, unsupported
from trt_engine.vision.image_inference import ImageRunner
from trt_engine.vision.preprocess import Placement, Preprocessor
from trt_engine.vision.resampling import colour_numbers, frame_plan, kernel_settings
from trt_engine.vision.spec import Vision

log = logging.getLogger(__name__)

_BLOCK = (32, 8, 1)
"""Threads of the kernel: pixels of a row side by side."""


@contextmanager
def device_frames(runner: RunnerBase, vision: Vision, sources: Sequence[str]) -> Iterator[DeviceFrames | None]:
    """Frames of these sources on the runner's GPU; None for an engine on the CPU, and after a warning with the reason where
    they cannot be decoded or prepared there."""
    found = None
    if runner.device is not None and runner.device.name.startswith("cuda"):
        found = _open_frames(runner, runner.device, vision, sources)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _open_frames(runner: RunnerBase, device: Device, vision: Vision, sources: Sequence[str]) -> DeviceFrames | None:
    try:
        load_library()
        for source in sources:
            if (reason := _refusal(source)) is not None:
                raise SetupError(f"`{shown_address(source)}`: {reason}")
        from trt_engine.device.cuda.kernel import CudaKernel

        preprocessor = Preprocessor(vision.preprocess, vision.input_spec(runner.signature).dtype)
        code = resources.files("trt_engine.video").joinpath("prepare_frames.cu").read_text("utf-8")
        kernel = CudaKernel(device, code, "prepare_frames", kernel_settings(preprocessor))  # type: ignore[arg-type]
    except SetupError as error:
        hint = f" ({error.hint})" if error.hint else ""
        log.warning("video is decoded and prepared on the CPU, not on `%s`: %s%s", device.name, error.message, hint)
        return None
    return DeviceFrames(runner, device, vision, preprocessor, kernel)


def _refusal(source: str) -> str | None:
    """Why the source is not decoded on a GPU; None for one that is, and for one that cannot be read at all."""
    try:
        with closing(PyAvDecoder(source)) as decoder:
            if (reason := unsupported(decoder)) is None and not is_live(source):
                first = next(read_frames(decoder), None)
                if first is not None and int(first.data.rotation) % 360:  # the container states it, PyAV with a frame
                    reason = "its frames are turned as they are shown"
            return reason
    except VideoError:
        return None


class DeviceFrames:
    """Opens decoders that decode into the memory of a GPU, and prepares their frames there. Close it after the streams."""

    def __init__(
        self, runner: RunnerBase, device: Device, vision: Vision, preprocessor: Preprocessor, kernel: Any
    ) -> None:
        """`kernel` is the `CudaKernel` of `prepare_frames.cu` for this declaration."""
        self.device, self._vision, self._preprocessor, self._kernel = device, vision, preprocessor, kernel
        self._input = vision.input_spec(runner.signature)
        self._output = vision.output_spec(runner.signature).name
        self._lock = threading.Lock()
        self._held = ExitStack()
        self._idle_memories: list[DecoderMemory] = []
        self._plans: dict[tuple[int, int, tuple[int, bool]], tuple[Buffer, Placement]] = {}
        self._idle_desks: list[_Desk] = []
        self._levels = self._uploaded(np.stack(preprocessor.levels))

    def _uploaded(self, array: np.ndarray[Any, Any]) -> Buffer:
        buffer = self._held.enter_context(closing(self.device.allocate(array.nbytes)))
        with closing(self.device.stream()) as stream:
            self.device.upload(array, buffer, stream)
        return buffer

    def open(self, source: str, *, threads: int = 1) -> Decoder:
        """A decoder of a source; `threads` is of no account. Raises `VideoError` for one that cannot be decoded here."""
        with self._lock:
            if not self._idle_memories:
                self._idle_memories.append(self._held.enter_context(closing(DecoderMemory(self.device))))
            memory = self._idle_memories.pop()
        return NvDecoder(source, memory, self.device.number, on_close=self._idle_memories.append)  # type: ignore[attr-defined]

    def prepare(self, frame: Frame) -> ImageRunner:
        """The frame as one row for `FrameRunner`, without an image: nothing is copied to the host."""
        _, placement = self._plan(frame.data)
        row = np.empty(1, object)
        row[0] = frame.data
        return ImageRunner(None, self._vision, {self._input.name: row}, placement, self._output)

    def _plan(self, surface: Surface) -> tuple[Buffer, Placement]:
        key = surface.width, surface.height, surface.colours
        with self._lock:
            if (found := self._plans.get(key)) is None:
                size = surface.width, surface.height
                plan = frame_plan(self._preprocessor, *size, colour_numbers(*surface.colours))
                found = self._plans[key] = self._uploaded(plan), self._preprocessor.place(*size)[2]
            return found

    @contextmanager
    def batch(self, surfaces: Sequence[Surface]) -> Iterator[Any]:
        """The frames prepared as one device array, `[frames, ...]` in the input's dtype, valid inside."""
        with self._lock:
            if not self._idle_desks:
                self._idle_desks.append(self._held.enter_context(closing(_Desk(self.device))))
            desk = self._idle_desks.pop()
        try:
            yield self._fill(desk, surfaces)
        finally:
            self._idle_desks.append(desk)

    def _fill(self, desk: _Desk, surfaces: Sequence[Surface]) -> Any:
        stream, count = desk.stream, len(surfaces)
        shape = (count, *self._vision.preprocess.shape)
        desk.reserve(count * self._preprocessor.dtype.itemsize * int(np.prod(shape[1:])), 16 * count)
        assert desk.rows is not None and desk.table is not None
        for handle in {surface.memory.stream.handle for surface in surfaces}:
            stream.order_after(handle)  # the copy of the frame
        table = [(surface.buffer.pointer, self._plan(surface)[0].pointer) for surface in surfaces]
        self.device.upload(np.array(table, np.int64), desk.table, stream)
        tall, wide = self._vision.preprocess.size
        grid = -(-wide // _BLOCK[0]), -(-tall // _BLOCK[1]), count
        self._kernel.launch(stream, grid, _BLOCK, desk.table.pointer, self._levels.pointer, desk.rows.pointer)
        stream.synchronize()
        return desk.rows.array(self._input.dtype, shape)

    def close(self) -> None:
        """Free what is held on the GPU. Idempotent."""
        self._held.close()


class _Desk:
    """A stream and memory for one batch at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream: Stream = device.stream()
        self.rows: Buffer | None = None
        self.table: Buffer | None = None

    def reserve(self, row_bytes: int, table_bytes: int) -> None:
        """Memory for a batch; nothing uses the old one any more."""
        if self.rows is None or self.rows.nbytes < row_bytes:
            self.close_buffers()
            self.table = self._device.allocate(table_bytes)
            self.rows = self._device.allocate(row_bytes)

    def close_buffers(self) -> None:
        for buffer in (self.rows, self.table):
            if buffer is not None:
                buffer.close()
        self.rows = self.table = None

    def close(self) -> None:
        self.stream.close()
        self.close_buffers()


class FrameRunner(RunnerBase):
    """Another runner, kept open, on rows that are frames: `[rows]` of `Surface`. Outputs as the runner's."""

    can_batch = True

    def __init__(self, runner: RunnerBase, frames: DeviceFrames) -> None:
        self._runner, self._frames = runner, frames
        self.signature, self.profiles, self.width = runner.signature, runner.profiles, runner.width

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs `[rows, ...]` on the host, in the dtypes of the signature. Raises what the runner raises."""
        return self.run_batched([feeds])

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        """The same for the rows of several requests in one batch of `size` rows; raises as `run`."""
        (name,) = parts[0]
        surfaces = [surface for part in parts for surface in part[name]]
        rows = len(surfaces)
        surfaces += surfaces[-1:] * ((size or rows) - rows)
        with self._frames.batch(surfaces) as batch:
            outputs = self._runner.run({name: batch})
        return outputs if len(surfaces) == rows else {key: value[:rows] for key, value in outputs.items()}

    def close(self) -> None:
        """Nothing: the runner has another owner."""
