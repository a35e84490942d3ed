"""One inference at a time over contexts: `Lane` has a stream, buffers, a context for each profile, and captured graphs."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trt_engine.config import Profile
from trt_engine.device import Buffer, Event, Graph, HostBuffer, Stream
from trt_engine.device.dlpack import DeviceArray
from trt_engine.errors import TrtEngineError
from trt_engine.protocols import Context, LaunchingContext, Session
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.runtime.graphs import GraphPolicy
from trt_engine.runtime.lying import Lying, LyingSet, Slots
from trt_engine.runtime.straight import Straight
from trt_engine.tensors import Shape, Tensors

__all__ = ["Key", "Lane"]

log = logging.getLogger(__name__)

_REMEMBERED = 32
"""Of so many kinds of requests a lane remembers how they are answered, and of so many sizes it keeps outputs' memory."""

Key = tuple[Any, ...]
"""The shapes of the inputs in the signature's order, and the values of those that hold sizes."""


class Lane:
    """From feeds to outputs on one stream; for one thread at a time.

    Buffers grow to the largest shape seen and are shared by everything in the lane. A shape that graphs are wanted for gets
    a context of its own: a graph is only good while its context stays as it was captured.
    """

    def __init__(
        self, session: Session, profiles: Sequence[Profile], stream: Stream, policy: GraphPolicy, *, alone: bool = True
    ) -> None:
        self.stream = stream
        self._alone = alone
        self._session = session
        self._device = session.device
        self._profiles = profiles
        self._policy = policy
        self._inputs = [spec.name for spec in session.signature.inputs]
        self._outputs = [spec.name for spec in session.signature.outputs]
        self._types = {spec.name: numpy_dtype(spec.dtype) for spec in session.signature}
        self._names = {spec.name: spec.dtype for spec in session.signature}
        self._staged = session.device.name != "cpu"  # pinned memory: copies that do not hold up the caller
        self._frames: dict[int, _Frame] = {0: _Frame(session.context(0))}
        self._captured: OrderedDict[Key, _Frame] = OrderedDict()
        self._generation = policy.generation
        self._capturing: Stream | None = None
        self._buffers: dict[str, Buffer] = {}
        self._pinned: dict[str, HostBuffer] = {}
        self._host_inputs: frozenset[str] = frozenset(getattr(self._frames[0].context, "host_inputs", ()))
        self._last: Key | None = None
        self._fresh: _Frame | None = None  # runs for the first time, to be captured then
        self._enqueued = False
        self._slots: dict[int, Slots] = {}
        self._again: dict[tuple[Key, bool, tuple[bool, ...]], _Again] = {}
        self._straight: _Again | None = None
        """What was answered last of what goes the shortest way."""

    # -------------------------------------------------------------------------------------------- one inference

    def key(self, feeds: Tensors, size: int | None = None) -> Key:
        """What has to be prepared for these feeds, run as a batch of `size` where it is given."""
        shapes = tuple([feeds[name].shape for name in self._inputs]) if size is None else self._key_of(feeds, size)
        if not self._host_inputs:
            return shapes
        return (*shapes, *(tuple(np.ravel(feeds[name]).tolist()) for name in sorted(self._host_inputs)))

    def ready(self, key: Key) -> bool:
        """Whether these shapes are prepared already; a hint, asked from other threads."""
        return key == self._last or key in self._captured

    def run(
        self,
        parts: Sequence[Tensors],
        events: list[Event] | None = None,
        on_device: bool = False,
        size: int | None = None,
    ) -> dict[str, Any]:
        """The outputs of these parts, one below the other; `events` gets the start and the end.

        Host arrays run as a batch of `size` rows where that is more than they have, filled up with the last one.
        """
        self._enqueued = False
        try:
            if self._again and events is None and size is None and len(parts) == 1:
                outputs = self._run_again(parts[0], on_device)
                if outputs is not None:
                    return outputs
            return self._run(parts, events, on_device, size)
        except BaseException:
            self._recover()
            raise

    def run_on_device(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs of these feeds, which stay on the device."""
        again = self._straight
        if again is not None and again.frame.key is again.key and self._generation == self._policy.generation:
            assert again.straight is not None
            try:
                outputs = again.straight.run(feeds)
            except BaseException:
                self._enqueued = again.frame.graph is not None
                self._recover()
                raise
            if outputs is not None:
                if again.frame.graph is not None:
                    self._replayed(again.key)
                self._last = again.key
                return outputs
        return self.run([feeds], None, True)

    def captured(self, feeds: Tensors) -> bool:
        """Whether feeds of these shapes are answered by a graph."""
        key = self.key(feeds)
        if self._policy.by_rows:
            key = self._key_of(feeds, self._policy.bucket(key[0][0]))
        return self._generation == self._policy.generation and key in self._captured

    def _run(
        self, parts: Sequence[Tensors], events: list[Event] | None, on_device: bool, size: int | None
    ) -> dict[str, Any]:
        stream, feeds = self.stream, parts[0]
        lent = {
            name: self._device.borrow(feeds[name], stream)
            for name in self._inputs
            if not isinstance(feeds[name], np.ndarray) and name not in self._host_inputs
        }
        rows = None
        if len(parts) > 1 or size is not None or (self._policy.on and self._policy.by_rows):
            rows = sum([part[self._inputs[0]].shape[0] for part in parts])
            size = rows if lent else self._policy.bucket(max(size or rows, rows))
        key = self.key(feeds) if rows is None else self._key_of(feeds, size or rows)
        frame = self._frame_for(key, feeds, may_capture=not lent and not on_device)
        into = self._bound(frame, lent, on_device)
        if events is not None:
            events.append(stream.record())
        for name in self._inputs:
            if name in lent:
                if frame.graph is not None:
                    self._device.copy(lent[name], self._buffers[name], frame.nbytes[name], stream)
            elif name not in self._host_inputs:
                arrays = [part[name] for part in parts]
                self._upload(name, arrays, frame.shapes[name], rows)
        self._enqueued = True
        frame.enqueue(stream)
        found = self._download(frame, into, None if rows == size else rows, on_device)
        if events is not None:
            events.append(stream.record())
        self._wait()
        outputs = {name: found[name]() for name in found}
        if frame.late:
            outputs.update(frame.context.outputs())
            outputs = {name: outputs[name] for name in self._outputs}
        if self._fresh is not None:
            self._capture(key, self._fresh)
        elif len(parts) == 1 and rows == size:
            self._remember(key, frame, lent, on_device)
        self._last = key
        return outputs

    def _run_again(self, feeds: Tensors, on_device: bool) -> dict[str, Any] | None:
        """The outputs of feeds of a kind that was answered before, by the shortest way; None where it is not prepared.

        What is done before the launch is what the device waits for: everything else comes behind it.
        """
        names, device, stream = self._inputs, self._device, self.stream
        key = tuple([feeds[name].shape for name in names])
        again = self._again.get((key, on_device, tuple([isinstance(feeds[name], np.ndarray) for name in names])))
        if again is None or again.frame.key is not again.key or self._generation != self._policy.generation:
            return None
        frame, addresses, held = again.frame, [], []
        for name, copied in again.inputs:
            if copied is None:
                array = feeds[name]
                if type(array) is DeviceArray and array.buffer.device is device:  # type: ignore[attr-defined]
                    buffer = array.buffer  # the caller has it until this returns
                    if buffer.readers:  # who was lent it may have written to it since
                        stream.follow(buffer.readers)
                else:
                    buffer = device.borrow(array, stream)
                    held.append(buffer)
                if frame.graph is not None:
                    device.copy(buffer, self._buffers[name], frame.nbytes[name], stream)
            else:
                whole, pinned, buffer, nbytes = copied
                np.copyto(whole, feeds[name])
                device.copy(pinned, buffer, nbytes, stream)
            addresses.append(buffer.pointer)
        outputs: dict[str, Any] = {}
        self._enqueued = True
        if frame.graph is None:
            if on_device:
                one = again.lying.take()
                outputs = one.arrays.copy()
                addresses += one.addresses
            else:
                addresses += again.outputs
            again.launch(addresses, stream)
        else:
            frame.graph.replay(stream)
            if on_device:
                one = again.lying.take()
                for (name, _, _), buffer in zip(frame.sized, one.buffers, strict=True):
                    device.copy(frame.bound[name], buffer, frame.nbytes[name], stream)
                outputs = one.arrays.copy()
            self._replayed(key)
        if again.straight is not None:
            self._straight = again
        if on_device:
            self._wait()
        else:
            for _, _, buffer, pinned, nbytes in again.downloads:
                device.copy(buffer, pinned, nbytes, stream)
            self._wait()
            for name, whole, _, _, _ in again.downloads:
                outputs[name] = whole.copy()
        self._last = key
        return outputs

    def _laid_out(self, frame: _Frame) -> LyingSet:
        """Arrays for outputs that stay on the device, and their memory."""
        ended: list[None] = []
        buffers = tuple([self._output(frame.nbytes[name], partial(ended.append, None)) for name, _, _ in frame.sized])
        arrays = {
            name: buffer.array(self._names[name], shape)
            for (name, shape, _), buffer in zip(frame.sized, buffers, strict=True)
        }
        return LyingSet(arrays, buffers, ended)

    def _remember(self, key: Key, frame: _Frame, lent: Mapping[str, Buffer], on_device: bool) -> None:
        """Keep how feeds of this kind were answered."""
        launcher: Any = frame.context if frame.graph is None and hasattr(frame.context, "launching") else None
        if (launcher is None and frame.graph is None) or frame.late or self._host_inputs:
            return
        again = _Again(frame, launcher, Lying(self.stream, lambda: self._laid_out(frame)))
        if on_device and self._alone and len(lent) == len(self._inputs):
            graph, nbytes, held = frame.graph, frame.nbytes, self._buffers
            into = [(held[name], nbytes[name]) for name in self._inputs]
            copies = [(frame.bound[name], nbytes[name]) for name, _, _ in frame.sized] if graph is not None else []
            again.straight = Straight(
                frame.shapes, self._device, self.stream, again.lying,
                launcher=launcher, graph=graph, into=into, copies=copies,
            )  # fmt: skip
            self._straight = again
        for name in self._inputs:
            if name in lent:
                again.inputs.append((name, None))
            else:
                whole = self._staging(name, frame.shapes[name])
                again.inputs.append((name, (whole, self._pinned[name], self._buffers[name], frame.nbytes[name])))
        for name, shape, _ in frame.sized:
            again.outputs.append(self._buffers[name].pointer)
            if not on_device:
                whole = self._staging(name, shape)
                again.downloads.append((name, whole, self._buffers[name], self._pinned[name], frame.nbytes[name]))
        if len(self._again) >= _REMEMBERED:
            self._again.clear()  # the straight way is good as long as its frame is
        self._again[key, on_device, tuple([name not in lent for name in self._inputs])] = again

    def _replayed(self, key: Key | None) -> None:
        if key is not None:
            self._captured.move_to_end(key)
        self._policy.replayed()

    def _key_of(self, feeds: Tensors, size: int) -> Key:
        return tuple([(size, *feeds[name].shape[1:]) for name in self._inputs])

    def _upload(self, name: str, arrays: Sequence[Any], shape: Shape, rows: int | None) -> None:
        """The parts of one input below each other, filled up with the last row, in the stream's order."""
        array, padded = arrays[0], rows is not None and shape[0] != rows
        if len(arrays) > 1 or padded or (self._staged and not array.flags.c_contiguous):
            whole = self._staging(name, shape) if self._staged else np.empty(shape, self._types[name])
            start = 0
            for array in arrays:
                end = start + (array.shape[0] if rows is not None else whole.shape[0] if whole.shape else 0)
                np.copyto(whole[start:end] if rows is not None else whole, array)
                start = end
            if padded:
                whole[start:] = whole[start - 1]
            array = whole
        self._device.upload(np.asarray(array, order="C"), self._buffers[name], self.stream)

    def _staging(self, name: str, shape: Shape) -> Any:
        kind = self._types[name]
        nbytes = max(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, 1)
        held = self._pinned.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self._forget_ways()
                del self._pinned[name]
                held.close()
            held = self._pinned[name] = self._device.pinned(nbytes)
        return held.array(self._names[name], shape)

    def _download(self, frame: _Frame, into: Mapping[str, Buffer], rows: int | None, on_device: bool) -> dict[str, Any]:
        """For each output of a known size what gives it once the stream is done; `rows` of them where it was filled up."""
        found: dict[str, Any] = {}
        for name, whole, kind in frame.sized:
            shape = whole if rows is None else (rows, *whole[1:])
            if on_device:
                if frame.bound[name] is not into[name]:
                    self._device.copy(frame.bound[name], into[name], frame.nbytes[name], self.stream)
                found[name] = _Lent(into[name], self._names[name], shape)
                continue
            array = np.empty(shape, kind)
            if self._staged and array.nbytes:
                held = self._staging(name, shape)
                self._device.download(frame.bound[name], held, self.stream)
                found[name] = _Copied(held, array)
            else:
                self._device.download(frame.bound[name], array, self.stream)
                found[name] = _Copied(None, array)
        return found

    def _wait(self) -> None:
        if self._alone:
            self.stream.synchronize()
        else:  # what other lanes have put behind ours is not ours to wait for
            self.stream.record().synchronize()

    # -------------------------------------------------------------------------------------------- contexts

    def _frame_for(self, key: Key, feeds: Tensors, *, may_capture: bool) -> _Frame:
        """The context prepared for these shapes; `_fresh` where it is to be captured once it has run."""
        if self._generation != self._policy.generation:
            self._forget_graphs()
            self._generation = self._policy.generation
        frame = self._captured.get(key)
        if frame is not None:
            self._captured.move_to_end(key)
            self._policy.replayed()
            return frame
        shapes = dict(zip(self._inputs, key, strict=False))
        number = self._profile_for(shapes)
        if may_capture and self._policy.wants(key):
            try:
                frame = self._fresh = _Frame(self._session.context(number))
            except TrtEngineError as error:
                self._policy.refuse(f"no context of its own could be made: {error.message}")
            else:
                self._prepare(frame, key, shapes, feeds)
                return frame
        frame = self._frames.get(number)
        if frame is None:
            frame = self._frames[number] = _Frame(self._session.context(number))
        if frame.key != key:
            self._prepare(frame, key, shapes, feeds)
        return frame

    def _prepare(self, frame: _Frame, key: Key, shapes: dict[str, Shape], feeds: Tensors) -> None:
        """Set the shapes and grow the buffers that are too small. What fails leaves the lane ready for other shapes."""
        frame.key = None
        for name in self._host_inputs:
            frame.context.set_values(name, np.ascontiguousarray(feeds[name]))  # type: ignore[attr-defined]
        outputs = frame.context.prepare(shapes)
        frame.bound = {}
        sized = {name: shape for name, shape in outputs.items() if -1 not in shape}
        try:
            frame.nbytes = {
                name: int(np.prod(shape, dtype=np.int64)) * self._types[name].itemsize
                for name, shape in (shapes | sized).items()
            }
            for name, nbytes in frame.nbytes.items():
                if name not in self._host_inputs:
                    self._grow(name, max(nbytes, 1))
        except BaseException:
            self._free()  # half of a set that does not fit would stand in the way of a smaller one
            raise
        frame.shapes = shapes
        frame.sized = [(name, sized[name], self._types[name]) for name in self._outputs if name in sized]
        frame.late = len(sized) < len(outputs)
        frame.key = key

    def _bound(self, frame: _Frame, lent: Mapping[str, Buffer], on_device: bool) -> dict[str, Buffer]:
        """Bind the frame: what was lent is bound as it lies, outputs for the device get memory of their own. Gives those."""
        into: dict[str, Buffer] = {}
        if on_device:
            into = self._outputs_of(frame)
        if frame.graph is None:
            names = (*frame.shapes, *(name for name, _, _ in frame.sized))
            held = {name: self._buffers[name] for name in names if name not in self._host_inputs}
            frame.bind(held | dict(lent) | into)
        return into

    def _outputs_of(self, frame: _Frame) -> dict[str, Buffer]:
        return {name: self._output(frame.nbytes[name]) for name, _, _ in frame.sized}

    def _output(self, nbytes: int, then: Callable[[], None] | None = None) -> Buffer:
        """Memory for an output that stays on the device, nobody else's as long as there is an array of it."""
        slots = self._slots.pop(nbytes, None)
        if slots is None:
            while len(self._slots) >= max(_REMEMBERED, 4 * len(self._outputs)):
                self._slots.pop(next(iter(self._slots))).close()
            slots = Slots(self._device, self.stream, max(nbytes, 1))
        self._slots[nbytes] = slots  # the size that was asked for last stands last
        return slots.take(then)

    def _profile_for(self, shapes: Mapping[str, Shape]) -> int:
        fits = (
            number
            for number, profile in enumerate(self._profiles)
            if all(span.holds(shapes[name]) for name, span in profile.ranges.items() if name not in self._host_inputs)
        )
        return next(fits, 0)

    def _grow(self, name: str, nbytes: int) -> None:
        held = self._buffers.get(name)
        if held is not None:
            if held.nbytes >= nbytes:
                return
            for key in [key for key, frame in self._captured.items() if frame.bound.get(name) is held]:
                self._captured.pop(key).close()  # a graph holds the old address
                self._policy.dropped()
            self._forget_ways()
            del self._buffers[name]  # given back before the larger one is asked for: both may not fit
            held.close()
        self._buffers[name] = self._device.allocate(nbytes)

    # -------------------------------------------------------------------------------------------- graphs

    def _capture(self, key: Key, frame: _Frame) -> None:
        """Keep what has just run as a graph. Where that cannot be, the stream is clean and inference goes on without."""
        self._fresh = None
        try:
            if frame.late:
                raise TrtEngineError("the sizes of its outputs depend on the data")
            if reason := getattr(frame.context, "no_graph", None):
                raise TrtEngineError(reason)
            if not self._alone and self._capturing is None:
                self._capturing = self._device.stream()  # of its own: nobody else's work gets into the graph
            frame.graph = (self._capturing or self.stream).capture(frame.context.enqueue)
        except Exception as error:  # whatever a library says against it, inference works without
            frame.close()
            self._policy.refuse(str(error).partition("\n")[0])
            return
        while len(self._captured) >= self._policy.max_graphs:
            self._forget_ways()
            self._captured.popitem(last=False)[1].close()
            self._policy.dropped()
        self._captured[key] = frame
        self._forget_ways()  # what ran without a graph has one now
        self._policy.captured()

    def _forget_graphs(self) -> None:
        self._forget_ways()
        while self._captured:
            self._captured.popitem()[1].close()

    def _forget_ways(self) -> None:
        self._again.clear()
        self._straight = None

    # -------------------------------------------------------------------------------------------- the end

    def _recover(self) -> None:
        """After a failure: nothing stays on the stream, and the next inference prepares anew."""
        self._last = None
        self._forget_ways()
        fresh, self._fresh = self._fresh, None
        for frame in self._frames.values():
            frame.key = None
        with contextlib.suppress(TrtEngineError):
            self.stream.synchronize()
        if fresh is not None:
            fresh.close()
        if self._enqueued:  # a graph may be what failed
            self._forget_graphs()

    def close(self) -> None:
        self._forget_ways()
        self._forget_slots()
        for frame in self._frames.values():
            frame.close()
        self._frames = {}
        self._free()
        for buffer in self._pinned.values():
            buffer.close()
        self._pinned = {}
        if self._capturing is not None:
            self._capturing.close()
            self._capturing = None

    def _forget_slots(self) -> None:
        for slots in self._slots.values():
            slots.close()
        self._slots = {}

    def _free(self) -> None:
        self._forget_graphs()
        self._forget_slots()
        for frame in self._frames.values():
            frame.key = None
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}


class _Frame:
    """A context, what it was prepared for and bound to, and the graph that repeats it where there is one."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.key: Key | None = None
        self.shapes: dict[str, Shape] = {}
        self.sized: list[tuple[str, Shape, np.dtype[Any]]] = []
        self.nbytes: dict[str, int] = {}
        self.late = False
        self.bound: dict[str, Buffer] = {}
        self.graph: Graph | None = None

    def bind(self, buffers: dict[str, Buffer]) -> None:
        if len(buffers) != len(self.bound) or any(self.bound[name] is not buffer for name, buffer in buffers.items()):
            self.context.bind(buffers)
            self.bound = buffers

    def enqueue(self, stream: Stream) -> None:
        if self.graph is not None:
            self.graph.replay(stream)
        else:
            self.context.enqueue(stream)

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
            self.graph = None
        self.context.close()


class _Again:
    """How feeds of one kind are answered: the same shapes, on the device or on the host, as once before."""

    __slots__ = ("_fed", "_launcher", "_run", "downloads", "frame", "inputs", "key", "lying", "outputs", "straight")

    def __init__(self, frame: _Frame, launcher: LaunchingContext | None, lying: Lying) -> None:
        self.frame, self.key = frame, frame.key
        self._launcher = launcher
        self._fed: list[int] | None = None
        self._run: Callable[[], None] | None = None
        self.lying = lying
        """Outputs that stay on the device."""
        self.straight: Straight | None = None
        self.inputs: list[tuple[str, tuple[Any, HostBuffer, Buffer, int] | None]] = []
        """None for one that lies on the device; else pinned memory as an array, its buffer, the device's and the bytes."""
        self.outputs: list[int] = []
        self.downloads: list[tuple[str, Any, Buffer, HostBuffer, int]] = []

    def launch(self, addresses: list[int], stream: Stream) -> None:
        """Enqueue it on memory at these addresses, inputs before outputs."""
        assert self._launcher is not None
        if self._run is None or self._fed != addresses:
            self._run, self._fed = self._launcher.launching(tuple(addresses), stream), addresses
        try:
            self._run()
        except Exception as error:
            if (ours := self._launcher.explained(error)) is None:
                raise
            raise ours from error


class _Copied:
    """A host array, once what was downloaded for it is there."""

    def __init__(self, held: Any, array: Any) -> None:
        self._held, self._array = held, array

    def __call__(self) -> Any:
        if self._held is not None:
            np.copyto(self._array, self._held)
        return self._array


class _Lent:
    """A device array of memory nobody else has."""

    def __init__(self, buffer: Buffer, dtype: str, shape: Shape) -> None:
        self._buffer, self._dtype, self._shape = buffer, dtype, shape

    def __call__(self) -> Any:
        return self._buffer.array(self._dtype, self._shape)
