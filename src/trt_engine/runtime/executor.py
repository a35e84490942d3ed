"""Runs one inference at a time: a stream, buffers, one context per profile, and captured graphs."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile
from trt_engine.device import Buffer, Event, HostBuffer, Stream
from trt_engine.device.dlpack import DeviceArray
from trt_engine.errors import TrtEngineError
from trt_engine.format import library_reason
from trt_engine.protocols import Session
from trt_engine.runtime.batch_rows import concat
from trt_engine.runtime.bound_call import BoundCall, BoundCallHome
from trt_engine.runtime.cuda_graph_policy import GraphPolicy
from trt_engine.runtime.fast_path import ReplayPlan, Slot
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.runtime.prepared_context import Key, PreparedContext, select_profile
from trt_engine.runtime.staging import CopyThreads, OutputPool, StagedArray
from trt_engine.tensors import Shape, Tensors

_MAX_PLANS = 32
"""Maximum number of replay plans, and of output sizes whose memory is kept."""

Events = list[Event] | None
"""Receives the start and the end event of an inference."""


class Executor:
    """Executes feeds on one stream; for one thread at a time.

    All contexts share buffers that grow to the largest shape seen. Each captured shape has a dedicated context, because a
    graph is valid only while its context is unchanged.
    """

    def __init__(
        self,
        session: Session,
        profiles: Sequence[Profile],
        stream: Stream,
        policy: GraphPolicy,
        *,
        copy_threads: CopyThreads,
        exclusive_stream: bool = True,
    ) -> None:
        self.stream = stream
        self._copy_threads = copy_threads
        self._exclusive_stream = exclusive_stream
        self._session = session
        self._device = session.device
        self._profiles = profiles
        self._policy = policy
        self._inputs = [spec.name for spec in session.signature.inputs]
        self._outputs = [spec.name for spec in session.signature.outputs]
        self._dtypes = {spec.name: numpy_dtype(spec.dtype) for spec in session.signature}
        self._dtype_names = {spec.name: spec.dtype for spec in session.signature}
        self._uses_staging = session.device.name != "cpu"  # pinned memory: copies that do not hold up the caller
        self._prepared_contexts: dict[int, PreparedContext] = {0: PreparedContext(session.create_context(0))}
        self._captured: OrderedDict[Key, PreparedContext] = OrderedDict()
        self._generation = policy.generation
        self._capture_stream: Stream | None = None
        self._buffers: dict[str, Buffer] = {}
        self._pinned: dict[str, HostBuffer] = {}
        self._host_inputs: frozenset[str] = self._prepared_contexts[0].context.host_inputs
        self._last_key: Key | None = None
        self._capture_pending: PreparedContext | None = None  # runs for the first time, to be captured then
        self._enqueued = False
        self._output_pools: dict[int, OutputPool] = {}
        self._plans: dict[Key, ReplayPlan] = {}
        """By shape and type of every input, and where the outputs stay."""
        self.replayed = 0
        """Number of graph replays."""

    # -------------------------------------------------------------------------------------------- one inference

    def key(self, feeds: Tensors, size: int | None = None) -> Key:
        """The key of these feeds, padded to a batch of `size` if given.

        Dtypes are those of the signature and not part of it.
        """
        shapes = tuple([feeds[name].shape for name in self._inputs]) if size is None else self._batch_key(feeds, size)
        if not self._host_inputs:
            return shapes
        return (*shapes, *(tuple(np.ravel(feeds[name]).tolist()) for name in sorted(self._host_inputs)))

    def is_prepared(self, key: Key) -> bool:
        """Whether these shapes are prepared; a hint for other threads."""
        return key == self._last_key or key in self._captured

    def run(self, feeds: Tensors, on_device: bool = False) -> dict[str, Any]:
        """The outputs of one request; device arrays with `on_device`. Feeds have the dtypes of the signature."""
        self._enqueued = False
        try:
            plan = self._plans.get(_plan_key(feeds, on_device))
            if plan is None or plan.frame.key is not plan.key or plan.generation != self._policy.generation:
                return self._run([feeds], None, on_device and self._uses_staging, None)
            if plan.replays:
                self._enqueued = True
                self.replayed += 1
                if plan.key is not None and plan.key is not self._last_key:
                    self._captured.move_to_end(plan.key)
            self._last_key = plan.key
            return plan.run(feeds)
        except BaseException:
            self._recover()
            raise

    def run_parts(
        self, parts: Sequence[Tensors], events: Events = None, on_device: bool = False, size: int | None = None
    ) -> dict[str, Any]:
        """The outputs of `parts`, concatenated along the batch; appends start and end event to `events`.

        The batch is padded to `size` rows by repeating rows; outputs are device arrays with `on_device`. Feeds have the
        dtypes of the signature.
        """
        self._enqueued = False
        try:
            return self._run(parts, events, on_device and self._uses_staging, size)
        except BaseException:
            self._recover()
            raise

    def is_captured(self, feeds: Tensors) -> bool:
        """Whether a graph is captured for feeds of these shapes, in the dtypes of the signature."""
        key = self.key(feeds)
        if self._policy.pads_batches:
            key = self._batch_key(feeds, self._policy.bucket_for(key[0][0]))
        return self._generation == self._policy.generation and key in self._captured

    def _run(self, parts: Sequence[Tensors], events: Events, on_device: bool, size: int | None) -> dict[str, Any]:
        stream, feeds = self.stream, parts[0]
        lent = {
            name: self._device.borrow(feeds[name], stream)
            for name in self._inputs
            if not isinstance(feeds[name], np.ndarray) and name not in self._host_inputs
        }
        rows = None
        if len(parts) > 1 or size is not None or (self._policy.enabled and self._policy.pads_batches):
            rows = sum([part[self._inputs[0]].shape[0] for part in parts])
            size = self._policy.bucket_for(max(size or rows, rows))
        key = self.key(feeds) if rows is None else self._batch_key(feeds, size or rows)
        frame = self._context_for(key, feeds)
        in_place = frame.graph is None and frame is not self._capture_pending and rows == size
        into = self._bind(frame, lent if in_place else {}, on_device, in_place)
        if events is not None:
            events.append(stream.record())
        for name in self._inputs:
            if name in lent:
                if not in_place:
                    self._copy_padded(lent[name], self._buffers[name], frame.nbytes[name])
            elif name not in self._host_inputs:
                arrays = [part[name] for part in parts]
                self._upload(name, arrays, frame.shapes[name], rows)
        self._enqueued = True
        frame.enqueue(stream)
        found = self._download(frame, into, None if rows == size else rows, on_device)
        if events is not None:
            events.append(stream.record())
        outputs = {name: read() for name, (read, waits) in found.items() if waits}
        self._synchronize()
        outputs = {name: outputs[name] if waits else read() for name, (read, waits) in found.items()}
        if frame.dynamic_outputs:
            outputs.update(frame.context.outputs())
            outputs = {name: outputs[name] for name in self._outputs}
        if self._capture_pending is not None:
            self._capture(key, self._capture_pending)
        elif len(parts) == 1 and rows == size:
            self._add_plan(feeds, frame, lent, on_device)
        self._last_key = key
        return outputs

    def _add_plan(
        self, feeds: Tensors, frame: PreparedContext, borrowed: Mapping[str, Buffer], on_device: bool
    ) -> None:
        """Store a replay plan for these shapes and types."""
        if frame.dynamic_outputs or self._host_inputs or not self._uses_staging:
            return

        def slot(name: str, shape: Shape, staged: bool, **more: Any) -> Slot:
            pinned = self._staged_array(name, shape) if staged else None
            return Slot(name, shape, self._dtype_names[name], self._buffers[name], frame.nbytes[name], pinned, **more)

        inputs, outputs = [], []
        for name in self._inputs:
            read = self._device.reader(type(feeds[name]), self.stream) if name in borrowed else None
            inputs.append(slot(name, frame.shapes[name], read is None, read=read))
        for name, shape, _ in frame.sized_outputs:
            pool = self._output_pool(frame.nbytes[name]) if on_device else None
            outputs.append(slot(name, shape, pool is None, pool=pool))
        if len(self._plans) >= _MAX_PLANS:
            self._drop_plans()
        self._plans[_plan_key(feeds, on_device)] = ReplayPlan(
            frame, self._generation, self._device, self.stream, inputs=inputs, outputs=outputs,
            on_device=on_device, exclusive_stream=self._exclusive_stream,
        )  # fmt: skip

    def _batch_key(self, feeds: Tensors, size: int) -> Key:
        return tuple([(size, *feeds[name].shape[1:]) for name in self._inputs])

    def _upload(self, name: str, arrays: Sequence[Any], shape: Shape, rows: int | None) -> None:
        """Upload one input: `arrays` joined along the batch and padded with the last row; stream-ordered."""
        target = self._buffers[name]
        if not self._uses_staging:
            array = arrays[0]
            if rows is not None and (len(arrays) > 1 or shape[0] != rows):
                array = concat([{name: part} for part in arrays], rows, shape[0])[name]
            self._device.upload(np.asarray(array, order="C"), target, self.stream)
        elif rows is None:
            self._staged_array(name, shape).upload(arrays[0], target, self.stream)
        else:
            self._staged_array(name, shape).upload_rows(arrays, target, self.stream)

    def _copy_padded(self, source: Buffer, target: Buffer, nbytes: int) -> None:
        """Copy a device input, and fill the rest of the padded batch with rows of it; stream-ordered."""
        device, stream, filled = self._device, self.stream, min(source.nbytes, nbytes)
        device.copy(source, target, filled, stream)
        while 0 < filled < nbytes:
            count = min(filled, nbytes - filled)
            device.copy(target, target.view(filled, count), count, stream)
            filled += count

    def _staged_array(self, name: str, shape: Shape) -> StagedArray:
        nbytes = max(int(np.prod(shape, dtype=np.int64)) * self._dtypes[name].itemsize, 1)
        held = self._pinned.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self._drop_plans()
                del self._pinned[name]
                held.close()
            held = self._pinned[name] = self._device.pinned(nbytes)
        return StagedArray(self._device, held, held.array(self._dtype_names[name], shape), self._copy_threads)

    def _download(
        self, frame: PreparedContext, into: Mapping[str, DeviceArray], rows: int | None, on_device: bool
    ) -> dict[str, tuple[Callable[[], Any], bool]]:
        """Start downloads; maps each sized output to a function that returns it, and whether that waits for its download.

        `rows` drops padding.
        """
        found: dict[str, tuple[Callable[[], Any], bool]] = {}
        for name, whole, kind in frame.sized_outputs:
            shape = whole if rows is None else (rows, *whole[1:])
            if on_device:
                buffer = into[name].buffer
                if frame.bound_buffers[name] is not buffer:
                    self._device.copy(frame.bound_buffers[name], buffer, frame.nbytes[name], self.stream)
                into[name].shape = shape
                found[name] = partial(into.__getitem__, name), False
                continue
            if self._uses_staging:
                staged = self._staged_array(name, shape)
                staged.download(frame.bound_buffers[name], self.stream)
                found[name] = staged.read, staged.chunked
            else:
                array = np.empty(shape, kind)
                self._device.download(frame.bound_buffers[name], array, self.stream)
                found[name] = partial(np.asarray, array), False
        return found

    def _synchronize(self) -> None:
        if self._exclusive_stream:
            self.stream.synchronize()
        else:  # do not wait for later work of other executors
            self.stream.record().synchronize()

    # -------------------------------------------------------------------------------------------- contexts

    def _context_for(self, key: Key, feeds: Tensors) -> PreparedContext:
        """The context prepared for these shapes; sets `_capture_pending` if it will be captured after this run."""
        if self._generation != self._policy.generation:
            self._drop_graphs()
            self._generation = self._policy.generation
        frame = self._captured.get(key)
        if frame is not None:
            self._captured.move_to_end(key)
            self.replayed += 1
            return frame
        shapes = dict(zip(self._inputs, key, strict=False))
        number = select_profile(self._profiles, shapes, self._host_inputs)
        if self._policy.should_capture(key):
            try:
                frame = self._capture_pending = PreparedContext(self._session.create_context(number))
            except TrtEngineError as error:
                self._policy.disable(f"no dedicated context could be created: {error.message}")
            else:
                self._prepare(frame, key, shapes, feeds)
                return frame
        frame = self._prepared_contexts.get(number)
        if frame is None:
            frame = self._prepared_contexts[number] = PreparedContext(self._session.create_context(number))
        if frame.key != key:
            self._prepare(frame, key, shapes, feeds)
        return frame

    def _prepare(self, frame: PreparedContext, key: Key, shapes: dict[str, Shape], feeds: Tensors) -> None:
        """Set the shapes and grow buffers that are too small. After an error other shapes still work."""
        frame.key = None
        for name in self._host_inputs:
            frame.context.set_values(name, np.ascontiguousarray(feeds[name]))
        outputs = frame.context.prepare(shapes)
        frame.bound_buffers = {}
        sized = {name: shape for name, shape in outputs.items() if -1 not in shape}
        try:
            frame.nbytes = {
                name: int(np.prod(shape, dtype=np.int64)) * self._dtypes[name].itemsize
                for name, shape in (shapes | sized).items()
            }
            for name, nbytes in frame.nbytes.items():
                if name not in self._host_inputs:
                    self._grow_buffer(name, max(nbytes, 1))
        except BaseException:
            self._free_buffers()  # free partial allocations for smaller shapes
            raise
        frame.shapes = shapes
        frame.sized_outputs = [(name, sized[name], self._dtypes[name]) for name in self._outputs if name in sized]
        frame.dynamic_outputs = [name for name in outputs if name not in sized]
        frame.key = key

    def _bind(
        self, frame: PreparedContext, borrowed: Mapping[str, Buffer], on_device: bool, in_place: bool
    ) -> dict[str, DeviceArray]:
        """Bind borrowed inputs and, `in_place`, new outputs, else the executor's buffers; returns new device outputs."""
        into: dict[str, DeviceArray] = {}
        if on_device:
            into = {
                name: self._output_pool(frame.nbytes[name]).acquire(self._dtype_names[name], shape)[1]
                for name, shape, _ in frame.sized_outputs
            }
        if frame.graph is None:
            names = (*frame.shapes, *(name for name, _, _ in frame.sized_outputs))
            held = {name: self._buffers[name] for name in names if name not in self._host_inputs}
            fresh = {name: array.buffer for name, array in into.items()} if in_place else {}
            frame.bind(held | dict(borrowed) | fresh)
        return into

    def _output_pool(self, nbytes: int) -> OutputPool:
        """The memory for device outputs of one size."""
        pool = self._output_pools.pop(nbytes, None)
        if pool is None:
            while len(self._output_pools) >= max(_MAX_PLANS, 4 * len(self._outputs)):
                self._drop_plans()
                self._output_pools.pop(next(iter(self._output_pools))).close()
            pool = OutputPool(self._device, self.stream, max(nbytes, 1))
        self._output_pools[nbytes] = pool  # least recently used first
        return pool

    def _grow_buffer(self, name: str, nbytes: int) -> None:
        held = self._buffers.get(name)
        if held is not None:
            if held.nbytes >= nbytes:
                return
            for key in [key for key, frame in self._captured.items() if frame.bound_buffers.get(name) is held]:
                self._captured.pop(key).close()  # captured with the old address
                self._policy.count_evicted()
            self._drop_plans()
            del self._buffers[name]  # freed first: both may not fit
            held.close()
        self._buffers[name] = self._device.allocate(nbytes)

    # -------------------------------------------------------------------------------------------- graphs

    def _capture(self, key: Key, frame: PreparedContext) -> None:
        """Capture the inference that has just run as a graph; on failure, disable graphs and continue without."""
        try:
            frame.capture(self._stream_for_capture())
        except Exception as error:  # any library error: inference works without a graph
            self._capture_pending = None
            frame.close()
            self._policy.disable(library_reason(error))
            return
        while len(self._captured) >= self._policy.max_graphs:
            oldest, evicted = self._captured.popitem(last=False)
            self._drop_plans(oldest)
            evicted.close()
            self._policy.count_evicted()
        self._captured[key], self._capture_pending = frame, None  # until here, Ctrl-C closes it
        self._drop_plans(key)  # plans for this shape must use the graph
        self._policy.count_captured()

    def _stream_for_capture(self) -> Stream:
        if not self._exclusive_stream and self._capture_stream is None:
            self._capture_stream = self._device.stream()  # excludes work of other executors from the graph
        return self._capture_stream or self.stream

    def bind(
        self,
        inputs: Tensors,
        outputs: Tensors,
        exclusively: Callable[[Callable[[], object], bool], None],
        calls: set[BoundCall],
    ) -> BoundCall:
        """A call on fixed memory, on this executor's stream; with a graph of its own where graphs are enabled.

        Arrays by name, in the dtypes and shapes of the signature.
        """
        shapes = {name: tuple(inputs[name].shape) for name in self._inputs}
        home = BoundCallHome(self.stream, calls, self._exclusive_stream, exclusively, self._copy_threads)
        number = select_profile(self._profiles, shapes, self._host_inputs)
        call = BoundCall(self._session, number, home, inputs, outputs)
        try:
            if self._session.device.name != "cpu":
                call.rehearse()  # the first inference allocates, which waits for the device: an enqueued one must not
            if self._policy.should_capture(tuple(shapes.values())):
                try:
                    call.capture(self._stream_for_capture())
                    self._policy.count_captured()
                except Exception as error:  # any library error: inference works without a graph
                    self._policy.disable(library_reason(error))
        except BaseException:
            call.release()
            raise
        return call

    def _drop_plans(self, key: Key | None = None) -> None:
        """Drop the plans for these shapes; all without a key."""
        for name, plan in [*self._plans.items()]:
            if key is None or plan.key == key:
                del self._plans[name]
                plan.close()

    def _drop_graphs(self) -> None:
        self._drop_plans()
        while self._captured:
            self._captured.popitem()[1].close()

    # -------------------------------------------------------------------------------------------- the end

    def _recover(self) -> None:
        """After a failure, drain the stream and make the next inference prepare its context again."""
        self._last_key = None
        self._drop_plans()
        fresh, self._capture_pending = self._capture_pending, None
        for frame in self._prepared_contexts.values():
            frame.key = None
        with contextlib.suppress(TrtEngineError):
            self.stream.synchronize()
        if fresh is not None:
            fresh.close()
        if self._enqueued:  # the graph may have failed
            self._drop_graphs()

    def close(self) -> None:
        self._drop_plans()
        self._drop_output_pools()
        for frame in self._prepared_contexts.values():
            frame.close()
        self._prepared_contexts = {}
        self._free_buffers()
        for buffer in self._pinned.values():
            buffer.close()
        self._pinned = {}
        if self._capture_stream is not None:
            self._capture_stream.close()
            self._capture_stream = None

    def _drop_output_pools(self) -> None:
        for slots in self._output_pools.values():
            slots.close()
        self._output_pools = {}

    def _free_buffers(self) -> None:
        self._drop_graphs()
        self._drop_output_pools()
        for frame in self._prepared_contexts.values():
            frame.key = None
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}


def _plan_key(feeds: Tensors, on_device: bool) -> Key:
    return (on_device, *[(name, array.shape, type(array)) for name, array in feeds.items()])
