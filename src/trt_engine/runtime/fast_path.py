"""`ReplayPlan`: the path of a repeated request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from trt_engine.device import Buffer, Device, Graph, Stream
from trt_engine.device.dlpack import DeviceArray
from trt_engine.runtime.prepared_context import PreparedContext
from trt_engine.runtime.staging import OutputPool, StagedArray
from trt_engine.tensors import Shape, Tensors

log = logging.getLogger(__name__)

_MAX_LAUNCHES = 64
"""Maximum number of launches, and of addresses seen, that are kept."""
_MAX_GRAPHS = 8
"""Maximum number of graphs on callers' memory, for each plan."""

Addresses: TypeAlias = tuple[int, ...]
"""Addresses of inputs, then of outputs, in the order of the signature."""


@dataclass(slots=True)
class Slot:
    """One input or output of a plan."""

    name: str
    shape: Shape
    dtype: str
    buffer: Buffer
    """The executor's own: what a graph reads or writes, and where host arrays go and come from."""
    nbytes: int
    staged: StagedArray | None
    """None for an array on the device."""
    read: Callable[[Any], int | None] | None = None
    """`Device.reader` for the arrays of an input on the device."""
    pool: OutputPool | None = None
    """The memory of an output that stays on the device."""
    pointer: int = field(init=False)
    """The address of `buffer`."""

    def __post_init__(self) -> None:
        self.pointer = self.buffer.pointer


class ReplayPlan:
    """A repeated request: the same shapes and types of all inputs, one launch or graph replay, outputs of one place.

    A launch belongs to the addresses of its tensors. A graph on a caller's memory is captured when the same addresses come
    a second time; until then, and beyond some graphs, the tensors are copied to and from the addresses of the first graph.
    """

    def __init__(
        self,
        frame: PreparedContext,
        generation: int,
        device: Device,
        stream: Stream,
        *,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
        on_device: bool,
        exclusive_stream: bool,
    ) -> None:
        """With `on_device` the outputs stay in memory of their slots' pools; else they are downloaded."""
        self.frame, self.key, self.generation = frame, frame.key, generation
        self.replays = frame.graph is not None
        """Whether it replays a graph."""
        self._device, self._stream = device, stream
        self._inputs, self._outputs, self._on_device = tuple(inputs), tuple(outputs), on_device
        self._launches: dict[Addresses, Callable[[], None]] = {}
        self._seen: set[Addresses] = set()
        self._graphs: list[Graph] = []
        prebinds = exclusive_stream and frame.context.can_prebind
        self._captures = self.replays and prebinds
        self._launch_waits = on_device and prebinds and not self.replays
        self._exclusive_stream = exclusive_stream
        if frame.graph is not None:
            self._launches[tuple([slot.pointer for slot in (*inputs, *outputs)])] = frame.graph.launcher(stream)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs, complete; feeds have the plan's shapes and dtypes.

        Few calls and objects: what a call touches is no longer in the caches of the CPU after an inference.
        """
        device, stream = self._device, self._stream
        addresses: list[int] = []
        for slot in self._inputs:
            array = feeds[slot.name]
            if slot.read is not None:
                addresses.append(slot.read(array) or device.borrow(array, stream).pointer)
            elif slot.staged is not None:
                slot.staged.upload(array, slot.buffer, stream)
                addresses.append(slot.pointer)
        arrays: dict[str, Any] = {}
        for slot in self._outputs:
            if slot.pool is not None:
                address, arrays[slot.name] = slot.pool.acquire(slot.dtype, slot.shape)
                addresses.append(address)
            else:
                addresses.append(slot.pointer)
        key = tuple(addresses)
        launch = self._launches.get(key) or self._find_launch(key, feeds, arrays)
        try:
            launch()
        except Exception as error:
            if (ours := self.frame.context.translate_error(error)) is None:
                raise
            raise ours from error
        if not self._on_device:
            return self._download()
        if not self._launch_waits:
            self._synchronize()
        return arrays

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

    def _synchronize(self) -> None:
        if self._exclusive_stream:
            self._stream.synchronize()
        else:  # do not wait for later work of other executors
            self._stream.record().synchronize()

    def _find_launch(
        self, addresses: Addresses, feeds: Tensors, arrays: Mapping[str, DeviceArray]
    ) -> Callable[[], None]:
        """A launch for addresses without one."""
        context = self.frame.context
        if self.frame.graph is not None:
            return self._capture(addresses) or partial(self._replay_copied, feeds, arrays, self.frame.graph)
        if context.can_prebind:
            if len(self._launches) >= _MAX_LAUNCHES:
                self._launches.clear()
            launch = self._launches[addresses] = context.prebind(addresses, self._stream, waits=self._launch_waits)
            return launch
        buffers = {slot.name: buffer for slot, buffer in self._buffers(feeds, arrays)}
        self.frame.bind(buffers)
        return partial(context.enqueue, self._stream)

    def _buffers(self, feeds: Tensors, arrays: Mapping[str, DeviceArray]) -> list[tuple[Slot, Buffer]]:
        """The memory of this call, inputs before outputs."""
        borrow, stream = self._device.borrow, self._stream
        return [
            *((slot, borrow(feeds[slot.name], stream) if slot.read else slot.buffer) for slot in self._inputs),
            *((slot, arrays[slot.name].buffer if slot.pool else slot.buffer) for slot in self._outputs),
        ]

    def _capture(self, addresses: Addresses) -> Callable[[], None] | None:
        """A graph on these addresses; None the first time they come, and where no more are captured."""
        if not self._captures or self.frame.context.no_graph or addresses not in self._seen:
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
        launch = self._launches[addresses] = graph.launcher(self._stream)
        return launch

    def _replay_copied(self, feeds: Tensors, arrays: Mapping[str, DeviceArray], graph: Graph) -> None:
        """Replay the first graph, with copies from and to the memory of this call."""
        device, stream, buffers = self._device, self._stream, self._buffers(feeds, arrays)
        count = len(self._inputs)
        for slot, buffer in buffers[:count]:
            if buffer is not slot.buffer:
                device.copy(buffer, slot.buffer, slot.nbytes, stream)
        graph.replay(stream)
        for slot, buffer in buffers[count:]:
            if buffer is not slot.buffer:
                device.copy(slot.buffer, buffer, slot.nbytes, stream)
