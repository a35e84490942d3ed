"""Several inferences in flight on one device: a pool of contexts, each with its buffers, prepared when shapes change."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from trt_engine.config import Profile
from trt_engine.device import Buffer, Event, Stream
from trt_engine.errors import TrtEngineError
from trt_engine.protocols import Context, Session
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import Shape, Signature, Tensors

__all__ = ["ContextPool"]


class ContextPool:
    """A Runner over the contexts of a session: as many inferences at once as there are contexts, the rest wait.

    Streams are shared out in turn; with fewer streams than contexts, inferences on one stream follow each other.
    """

    def __init__(self, session: Session, profiles: Sequence[Profile], contexts: int = 1, streams: int = 1) -> None:
        self.signature: Signature = session.signature
        self._streams: list[Stream] = []
        self._lanes: list[_Lane] = []
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        try:
            self._streams = [session.device.stream() for _ in range(min(streams, contexts))]
            for number in range(contexts):
                lane = _Lane(session, profiles, self._streams[number % len(self._streams)])
                self._lanes.append(lane)
                self._free.put(lane)
        except BaseException:
            self.close()
            raise

    def run(self, feeds: Tensors) -> dict[str, Any]:
        lane = self._free.get()
        try:
            return lane.run(feeds)
        finally:
            self._free.put(lane)

    def timed(self, feeds: Tensors) -> tuple[dict[str, Any], float]:
        """The outputs, and the milliseconds from the upload to the download by the device's events."""
        lane = self._free.get()
        try:
            events: list[Event] = []
            outputs = lane.run(feeds, events)
            return outputs, events[1].elapsed_ms(events[0])
        finally:
            self._free.put(lane)

    def close(self) -> None:
        """Close contexts, buffers and streams; nobody may be inside `run`."""
        for lane in self._lanes:
            lane.close()
        for stream in self._streams:
            stream.close()
        self._lanes, self._streams = [], []


class _Lane:
    """One context of each profile that was needed, its stream and its buffers; one thread at a time."""

    def __init__(self, session: Session, profiles: Sequence[Profile], stream: Stream) -> None:
        self.stream = stream
        self._session = session
        self._device = session.device
        self._profiles = profiles
        self._inputs = [spec.name for spec in session.signature.inputs]
        self._outputs = [(spec.name, numpy_dtype(spec.dtype)) for spec in session.signature.outputs]
        self._types = {spec.name: numpy_dtype(spec.dtype) for spec in session.signature}
        self._contexts: dict[int, Context] = {0: session.context(0)}
        self._buffers: dict[str, Buffer] = {}
        self._key: tuple[Shape, ...] | None = None
        self._context = self._contexts[0]
        self._sized: list[tuple[str, Shape, np.dtype[Any]]] = []
        self._late = False

    def run(self, feeds: Tensors, events: list[Event] | None = None) -> dict[str, Any]:
        key = tuple([feeds[name].shape for name in self._inputs])
        if key != self._key:
            self._prepare(key)
        device, stream, buffers = self._device, self.stream, self._buffers
        try:
            if events is not None:
                events.append(stream.record())
            for name in self._inputs:
                device.upload(np.asarray(feeds[name], order="C"), buffers[name], stream)
            self._context.enqueue(stream)
            found: dict[str, Any] = {name: np.empty(shape, kind) for name, shape, kind in self._sized}
            for name, array in found.items():
                device.download(buffers[name], array, stream)
            if events is not None:
                events.append(stream.record())
            stream.synchronize()
            if not self._late:
                return found
            found.update(self._context.outputs())
        except BaseException:
            self._recover()
            raise
        return {name: found[name] for name, _ in self._outputs}

    def _prepare(self, key: tuple[Shape, ...]) -> None:
        """Set the shapes, grow the buffers that are too small, bind. What fails leaves the lane ready for other shapes."""
        self._key = None
        inputs = dict(zip(self._inputs, key, strict=True))
        self._context = self._context_for(inputs)
        outputs = self._context.prepare(inputs)
        sized = {name: shape for name, shape in outputs.items() if -1 not in shape}
        try:
            for name, shape in (inputs | sized).items():
                self._grow(name, max(int(np.prod(shape, dtype=np.int64)) * self._types[name].itemsize, 1))
        except BaseException:
            self._free()  # half of a set that does not fit would stand in the way of a smaller one
            raise
        self._context.bind({name: self._buffers[name] for name in (*inputs, *sized)})
        self._sized = [(name, sized[name], kind) for name, kind in self._outputs if name in sized]
        self._late = len(sized) < len(outputs)
        self._key = key

    def _context_for(self, shapes: Mapping[str, Shape]) -> Context:
        fits = (
            number
            for number, profile in enumerate(self._profiles)
            if all(span.holds(shapes[name]) for name, span in profile.ranges.items())
        )
        number = next(fits, 0)
        if number not in self._contexts:
            self._contexts[number] = self._session.context(number)
        return self._contexts[number]

    def _grow(self, name: str, nbytes: int) -> None:
        held = self._buffers.get(name)
        if held is not None:
            if held.nbytes >= nbytes:
                return
            del self._buffers[name]  # given back before the larger one is asked for: both may not fit
            held.close()
        self._buffers[name] = self._device.allocate(nbytes)

    def _recover(self) -> None:
        """After a failure: nothing stays on the stream, and the next inference prepares anew."""
        self._key = None
        with contextlib.suppress(TrtEngineError):
            self.stream.synchronize()

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts = {}
        self._free()

    def _free(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}
