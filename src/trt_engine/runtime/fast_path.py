"""`ReplayPlan`: the path of a repeated request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.device import Buffer, Device, Stream
from trt_engine.runtime.prepared_context import PreparedContext
from trt_engine.runtime.staging import StagedArray
from trt_engine.tensors import Shape, Tensors

_MAX_LAUNCHES = 64
"""Maximum number of launches kept by the addresses they are bound to."""


@dataclass(frozen=True, slots=True)
class InputSlot:
    """One input of a plan."""

    name: str
    buffer: Buffer
    """The executor's own: what a graph reads, and where host arrays go."""
    nbytes: int
    staged: StagedArray | None
    """None for an array on the device."""


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """One output of a plan."""

    name: str
    shape: Shape
    dtype: str
    buffer: Buffer
    """The executor's own: what a graph writes, and what is downloaded."""
    nbytes: int
    staged: StagedArray | None
    """None for an output that stays on the device."""


class ReplayPlan:
    """A repeated request: the same shapes and types of all inputs, one launch or graph replay, outputs of one place.

    The device idles until the launch, so everything that can follows it.
    """

    __slots__ = ("_acquire", "_device", "_exclusive_stream", "_inputs", "_launches", "_names", "_outputs", "_stream",
                 "_waits", "frame", "generation", "key")  # fmt: skip

    def __init__(
        self,
        frame: PreparedContext,
        generation: int,
        device: Device,
        stream: Stream,
        *,
        inputs: Sequence[InputSlot],
        outputs: Sequence[OutputSlot],
        acquire: Callable[[int], Buffer] | None,
        exclusive_stream: bool,
    ) -> None:
        """With `acquire` outputs stay on the device, in memory it returns; else they are downloaded."""
        self.frame, self.key, self.generation = frame, frame.key, generation
        self._device, self._stream, self._exclusive_stream = device, stream, exclusive_stream
        self._inputs, self._outputs, self._acquire = tuple(inputs), tuple(outputs), acquire
        self._names = (*(slot.name for slot in inputs), *(slot.name for slot in outputs))
        self._launches: dict[tuple[int, ...], Callable[[], None]] = {}
        self._waits = exclusive_stream and acquire is not None and frame.graph is None and frame.context.can_prebind

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs, complete; feeds have the plan's shapes and dtypes."""
        device, stream, graph = self._device, self._stream, self.frame.graph
        used = []
        for slot in self._inputs:
            array, buffer = feeds[slot.name], slot.buffer
            if slot.staged is not None:
                slot.staged.upload(array, buffer, stream)
            else:
                borrowed = device.borrow(array, stream)
                if graph is None:
                    buffer = borrowed
                else:
                    device.copy(borrowed, buffer, slot.nbytes, stream)
            used.append(buffer)
        if graph is not None:
            graph.replay(stream)
        outputs = self._outputs
        buffers = [slot.buffer for slot in outputs]
        if self._acquire is not None:
            buffers = [self._acquire(slot.nbytes) for slot in outputs]
        if graph is None:
            self._launch(used + buffers)
        elif self._acquire is not None:
            for output, buffer in zip(outputs, buffers, strict=True):
                device.copy(output.buffer, buffer, output.nbytes, stream)
        if self._acquire is not None:
            found = {
                output.name: buffer.array(output.dtype, output.shape)
                for output, buffer in zip(outputs, buffers, strict=True)
            }
            if not self._waits:
                self._synchronize()
            return found
        for output in outputs:
            assert output.staged is not None
            output.staged.download(output.buffer, stream)
        staged = {output.name: output.staged for output in outputs if output.staged is not None}
        large = {name: array.read() for name, array in staged.items() if array.chunked}
        self._synchronize()
        return {name: large[name] if array.chunked else array.read() for name, array in staged.items()}

    def _launch(self, buffers: list[Buffer]) -> None:
        """Enqueue on these buffers, inputs before outputs."""
        context = self.frame.context
        if not context.can_prebind:
            self.frame.bind(dict(zip(self._names, buffers, strict=True)))
            context.enqueue(self._stream)
            return
        addresses = tuple([buffer.pointer for buffer in buffers])
        launch = self._launches.get(addresses)
        if launch is None:
            if len(self._launches) >= _MAX_LAUNCHES:
                self._launches.clear()
            launch = self._launches[addresses] = context.prebind(addresses, self._stream, waits=self._waits)
        try:
            launch()
        except Exception as error:
            if (ours := context.translate_error(error)) is None:
                raise
            raise ours from error

    def _synchronize(self) -> None:
        if self._exclusive_stream:
            self._stream.synchronize()
        else:  # do not wait for later work of other executors
            self._stream.record().synchronize()
