"""`ReplayPlan`: the path of a repeated request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from trt_engine.device import Buffer, Device, Graph, Stream
from trt_engine.runtime.prepared_context import PreparedContext
from trt_engine.runtime.staging import StagedArray
from trt_engine.tensors import Shape, Tensors

log = logging.getLogger(__name__)

_MAX_LAUNCHES = 64
"""Maximum number of launches, and of addresses seen, that are kept."""
_MAX_GRAPHS = 8
"""Maximum number of graphs on callers' memory, for each plan."""

Addresses: TypeAlias = tuple[int, ...]
"""Of inputs, then of outputs, in the order of the signature."""


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

    A launch belongs to the addresses of its tensors. A graph on a caller's memory is captured when the same addresses come
    a second time; until then, and beyond some graphs, the tensors are copied to and from the addresses of the first graph.
    """

    __slots__ = ("_acquire", "_captures", "_device", "_exclusive_stream", "_graphs", "_inputs", "_launches", "_names",
                 "_outputs", "_seen", "_stream", "_waits", "frame", "generation", "key")  # fmt: skip

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
        self._launches: dict[Addresses, Callable[[], None]] = {}
        self._seen: set[Addresses] = set()
        self._graphs: list[Graph] = []
        self._waits = exclusive_stream and acquire is not None and frame.graph is None and frame.context.can_prebind
        self._captures = frame.graph is not None and exclusive_stream and frame.context.can_prebind
        if frame.graph is not None:
            own = (*(slot.buffer.pointer for slot in inputs), *(slot.buffer.pointer for slot in outputs))
            self._launches[own] = partial(frame.graph.replay, stream)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs, complete; feeds have the plan's shapes and dtypes."""
        device, stream, outputs = self._device, self._stream, self._outputs
        buffers = []
        for slot in self._inputs:
            if slot.staged is not None:
                slot.staged.upload(feeds[slot.name], slot.buffer, stream)
                buffers.append(slot.buffer)
            else:
                buffers.append(device.borrow(feeds[slot.name], stream))
        if self._acquire is None:
            self._launch(buffers + [slot.buffer for slot in outputs])
            return self._download()
        fresh = [self._acquire(slot.nbytes) for slot in outputs]
        self._launch(buffers + fresh)
        found = {slot.name: buffer.array(slot.dtype, slot.shape) for slot, buffer in zip(outputs, fresh, strict=True)}
        if not self._waits:
            self._synchronize()
        return found

    def close(self) -> None:
        """Destroy the graphs on callers' memory."""
        for graph in self._graphs:
            graph.close()
        self._graphs, self._launches = [], {}

    def _download(self) -> dict[str, Any]:
        staged = {slot.name: slot.staged for slot in self._outputs if slot.staged is not None}
        for slot in self._outputs:
            staged[slot.name].download(slot.buffer, self._stream)
        large = {name: array.read() for name, array in staged.items() if array.chunked}
        self._synchronize()
        return {name: large[name] if array.chunked else array.read() for name, array in staged.items()}

    def _launch(self, buffers: list[Buffer]) -> None:
        """Enqueue on these buffers, inputs before outputs."""
        context = self.frame.context
        addresses = tuple([buffer.pointer for buffer in buffers])
        launch = self._launches.get(addresses)
        if launch is None:
            if self.frame.graph is not None:
                launch = self._capture(addresses) or partial(self._replay_copied, buffers, self.frame.graph)
            elif context.can_prebind:
                if len(self._launches) >= _MAX_LAUNCHES:
                    self._launches.clear()
                launch = self._launches[addresses] = context.prebind(addresses, self._stream, waits=self._waits)
            else:
                self.frame.bind(dict(zip(self._names, buffers, strict=True)))
                launch = partial(context.enqueue, self._stream)
        try:
            launch()
        except Exception as error:
            if (ours := context.translate_error(error)) is None:
                raise
            raise ours from error

    def _capture(self, addresses: Addresses) -> Callable[[], None] | None:
        """A graph on these addresses; None the first time they come, and where no more are captured."""
        if not self._captures or addresses not in self._seen:
            if len(self._seen) >= _MAX_LAUNCHES:
                self._seen.clear()
            self._seen.add(addresses)
            return None
        try:
            run = self.frame.context.prebind(addresses, self._stream)
            graph = self._stream.capture(lambda stream: run())  # holds no arrays: it runs only on the addresses given
        except Exception as error:  # any library error: the first graph goes on
            log.debug("no graph on the caller's memory: %s", error)
            self._captures = False
            return None
        self._graphs.append(graph)
        self._captures = len(self._graphs) < _MAX_GRAPHS
        launch = self._launches[addresses] = partial(graph.replay, self._stream)
        return launch

    def _replay_copied(self, buffers: Sequence[Buffer], graph: Graph) -> None:
        """Replay the first graph, with copies from and to these buffers."""
        device, stream, count = self._device, self._stream, len(self._inputs)
        for slot, buffer in zip(self._inputs, buffers[:count], strict=True):
            if buffer is not slot.buffer:
                device.copy(buffer, slot.buffer, slot.nbytes, stream)
        graph.replay(stream)
        for output, buffer in zip(self._outputs, buffers[count:], strict=True):
            if buffer is not output.buffer:
                device.copy(output.buffer, buffer, output.nbytes, stream)

    def _synchronize(self) -> None:
        if self._exclusive_stream:
            self._stream.synchronize()
        else:  # do not wait for later work of other executors
            self._stream.record().synchronize()
