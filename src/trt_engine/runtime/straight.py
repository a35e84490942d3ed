"""The shortest way from arrays on the device to arrays on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_engine.device import Buffer, Device, Graph, Stream
from trt_engine.device.dlpack import DeviceArray
from trt_engine.protocols import LaunchingContext
from trt_engine.runtime.lying import Lying
from trt_engine.tensors import Shape, Tensors

__all__ = ["Straight"]


class Straight:
    """Answers feeds of one kind that lie on the device with outputs that stay there, on a stream that nobody else uses.

    After an inference the processor's caches hold nothing of ours, and each thing touched here costs the caller some tens
    of nanoseconds.
    """

    __slots__ = ("_copies", "_device", "_inputs", "_launcher", "_lying", "_sets", "_stream", "graph")

    def __init__(
        self,
        shapes: dict[str, Shape],
        device: Device,
        stream: Stream,
        lying: Lying,
        *,
        launcher: LaunchingContext | None = None,
        graph: Graph | None = None,
        into: Sequence[tuple[Buffer, int]] = (),
        copies: Sequence[tuple[Buffer, int]] = (),
    ) -> None:
        """By a context, or by a graph, which reads what is copied `into` and whose outputs are `copies`: buffers, and the
        bytes that count.
        """
        self._inputs = tuple(
            (name, shape, *(into[number] if graph is not None else (None, 0)))
            for number, (name, shape) in enumerate(shapes.items())
        )
        self._device, self._stream, self._lying, self._sets = device, stream, lying, lying.sets
        self._launcher, self._copies = launcher, tuple(copies)
        self.graph = graph

    def run(self, feeds: Tensors) -> dict[str, Any] | None:
        """The outputs, once the device is done; None where these feeds are of another kind."""
        device, stream = self._device, self._stream
        fed = []
        for name, shape, target, nbytes in self._inputs:
            array: Any = feeds[name]
            if type(array) is not DeviceArray or array.shape != shape:
                return None
            buffer = array.buffer  # the caller has it until this returns
            if buffer.device is not device:  # type: ignore[attr-defined]
                return None
            if buffer.readers:  # who was lent it may have written to it since
                stream.follow(buffer.readers)
            if target is None:
                fed.append(buffer.pointer)
            else:
                device.copy(buffer, target, nbytes, stream)
        if self.graph is None:
            sets = self._sets
            if sets and (one := sets[0]).is_free(stream):
                sets.rotate(-1)
            else:
                one = self._lying.take()
            assert self._launcher is not None
            if one.run is None or one.fed != fed:
                one.run, one.fed = self._launcher.launching((*fed, *one.addresses), stream, waits=True), fed
            try:
                one.run()
            except Exception as error:
                if (ours := self._launcher.explained(error)) is None:
                    raise
                raise ours from error
            return one.arrays.copy()
        self.graph.replay(stream)
        one = self._lying.take()
        for (source, nbytes), buffer in zip(self._copies, one.buffers, strict=True):
            device.copy(source, buffer, nbytes, stream)
        outputs = one.arrays.copy()
        stream.synchronize()
        return outputs
