"""`BoundCall`: an inference on fixed memory, prepared once."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trt_engine.device import Buffer, Device, Stream
from trt_engine.device.dlpack import DeviceArray, is_read_only
from trt_engine.device.foreign import library_of, stream_handle
from trt_engine.display import RichDisplay
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.protocols import Session
from trt_engine.runtime.prepared_context import PreparedContext
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.runtime.staging import CopyThreads, StagedArray
from trt_engine.tensors import Shape, Tensors, TensorSpec, dtype, dtype_name, format_shape


class _Tensor:
    """One bound tensor: the caller's array and the buffer that the inference uses."""

    def __init__(self, name: str, array: Any, buffer: Buffer, *, in_place: bool) -> None:
        self.name, self.array, self.buffer = name, array, buffer
        self.in_place = in_place
        """Whether the buffer is the array's memory, not a copy of it on the device."""
        self.pointer = buffer.pointer
        self.pinned = False
        self.staged: StagedArray | None = None
        """Pinned memory for a pageable array."""

    def check_address(self, pointer: int) -> None:
        if pointer != self.pointer:
            raise UsageError(
                f"the array bound to `{self.name}` has other memory than when it was bound",
                hint="bind again after `resize_`, `set_` or an assignment to `.data`",
            )


def _call(work: Callable[[], object], unlimited: bool = False) -> None:
    work()


@dataclass(frozen=True, slots=True)
class BoundCallHome:
    """What a bound call shares with the runner that made it."""

    stream: Stream
    calls: set[BoundCall]
    """The open calls of the runner, which closes them before its session."""
    exclusive_stream: bool = True
    """False if several contexts use the stream."""
    exclusively: Callable[[Callable[[], object], bool], None] = _call
    """Runs a function while nothing else uses the stream; with True it waits for that without limits."""
    copy_threads: CopyThreads = field(default_factory=CopyThreads)


class BoundCall(ProcessBound, RichDisplay):
    """An inference on fixed memory, from `InferenceEngine.bind`: `call()`, `call.enqueue(stream)`, `call.close()`.

    It keeps the arrays alive. For one thread at a time; each `call()` reads the inputs again and overwrites the outputs.
    """

    def __init__(self, session: Session, profile: int, home: BoundCallHome, inputs: Tensors, outputs: Tensors) -> None:
        """`inputs` are validated arrays of all inputs by name, in the dtypes of the signature, and their shapes are those of
        each call; outputs that are left out are allocated on the device.

        Raises `UsageError` for data-dependent outputs and arrays that do not fit.
        """
        self._device: Device = session.device
        self._home, self._stream = home, home.stream
        self._busy = threading.Lock()
        self._closed = False
        self._owned: list[Buffer] = []
        self._frame = PreparedContext(session.create_context(profile))
        self._launch: Callable[[], None] = _raise_closed
        self._launch_and_wait: Callable[[], None] | None = None
        """For a call without downloads, where the library waits at less cost than the stream."""
        self._inputs: list[_Tensor] = []
        self._outputs: list[_Tensor] = []
        self._uploads: list[_Tensor] = []
        self._downloads: list[_Tensor] = []
        self._addresses: list[tuple[Callable[[], int], _Tensor]] = []
        """Functions that return the present addresses of tensors."""
        self._owners: list[tuple[Callable[[int], int], int]] = []
        """Functions that return the current streams of the libraries that own tensors, for a GPU's index."""
        self._lent: list[_Tensor] = []
        """Tensors of further libraries, which order their work as a capsule is exported."""
        self._exported: list[set[int]] = []
        """Streams on which other libraries may use arrays of this package."""
        self.outputs: dict[str, Any] = {}
        """The arrays that hold the outputs of the last call, by name."""
        self.engine: Engine | None = None
        """The engine on disk; None for a call of a runner without one."""
        home.calls.add(self)
        try:
            self._bind(session, inputs, outputs)
        except BaseException:
            self.release()
            raise

    # ---------------------------------------------------------------------------------------- calls

    def __call__(self, *feeds: Any) -> dict[str, Any]:
        """Run and wait; the outputs by name, the same arrays each time.

        Raises `UsageError` if it is closed, in use by another thread, or given feeds.
        """
        if feeds:
            raise UsageError("a bound call takes no feeds", hint="write them into the arrays that it was bound to")
        if self._busy.locked():
            self._check_idle()
        with self._busy:
            self._home.exclusively(self._run, False)
            return self.outputs

    def enqueue(self, stream: Any) -> None:
        """Order one inference on a stream of the device, after its present and before its later work, without waiting.

        `stream` is a stream of torch or CuPy, an object with `__cuda_stream__`, or a `cudaStream_t` as an integer. Pinned
        inputs are read in the order of the stream; pageable ones before this returns, which large ones (64 KiB and more)
        hold up until the stream gets there. `UsageError` on a CPU, and for outputs in pageable memory.
        """
        if self._device.name == "cpu":
            raise UsageError("this engine runs on `cpu`, which has no streams", hint="call it: `call()`")
        if pageable := [tensor.name for tensor in self._downloads if tensor.staged is not None]:
            raise UsageError(
                f"a copy to `{pageable[0]}` would wait for the device: its array is in pageable memory",
                hint="bind outputs on the device or in pinned memory, or call `call()`",
            )
        handle = stream_handle(stream)
        self._check_idle()
        with self._busy:
            self._home.exclusively(partial(self._enqueue, handle), False)

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a CUDA graph."""
        return self._frame.graph is not None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def device(self) -> str:
        """Name of the device: `cpu`, `cuda:0`."""
        return self._device.name

    @property
    def inputs(self) -> dict[str, Any]:
        """The bound input arrays by name, without inputs whose values decide shapes."""
        return {tensor.name: tensor.array for tensor in self._inputs}

    def placement(self, name: str) -> str:
        """How each call reads or writes an input or output: `in place`, `copied, pinned` or `copied, pageable`."""
        tensor = next(tensor for tensor in (*self._inputs, *self._outputs) if tensor.name == name)
        return "in place" if tensor.in_place else f"copied, {'pinned' if tensor.pinned else 'pageable'}"

    def close(self) -> None:
        """Wait for the inference in flight and free what is not the caller's. Idempotent."""
        if self._forked:
            return
        with self._busy:
            if not self._closed:
                self._home.exclusively(self.release, True)

    def release(self) -> None:
        """`close`, for a caller that excludes other uses of the stream and of this object."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TrtEngineError):  # a lost device, or work that failed
            self._stream.synchronize()
        self._frame.close()
        for buffer in self._owned:
            buffer.close()
        self._owned, self._inputs, self._outputs, self._uploads, self._downloads = [], [], [], [], []
        self._addresses, self._owners, self._lent, self._exported = [], [], [], []
        self._launch, self._launch_and_wait, self.outputs = _raise_closed, None, {}
        self._home.calls.discard(self)

    # ---------------------------------------------------------------------------------------- binding

    def _bind(self, session: Session, inputs: Tensors, outputs: Tensors) -> None:
        frame, signature = self._frame, session.signature
        fixed = frame.context.host_inputs
        for name in fixed:
            frame.context.set_values(name, np.ascontiguousarray(inputs[name]))
        frame.shapes = {spec.name: tuple(inputs[spec.name].shape) for spec in signature.inputs}
        sizes = frame.context.prepare(frame.shapes)
        if dynamic := [f"`{name}`" for name, shape in sizes.items() if -1 in shape]:
            raise UsageError(
                f"memory cannot be bound to {', '.join(dynamic)}: the size depends on the data", hint="call `infer`"
            )
        for spec in signature.inputs:
            if spec.name not in fixed:
                self._inputs.append(self._attach(spec, inputs[spec.name], written=False))
        for spec in signature.outputs:
            array = outputs.get(spec.name)
            if array is None:
                array = self._allocate(spec, sizes[spec.name])
            else:
                _check_output(spec, array, sizes[spec.name])
            self._outputs.append(self._attach(spec, array, written=True))
        self.outputs = {tensor.name: tensor.array for tensor in self._outputs}
        self._uploads = [tensor for tensor in self._inputs if not tensor.in_place]
        self._downloads = [tensor for tensor in self._outputs if not tensor.in_place]
        tensors = [*self._inputs, *self._outputs]
        self._find_owners(
            [tensor for tensor in tensors if tensor.in_place and not isinstance(tensor.array, np.ndarray)]
        )
        _check_overlaps(tensors, {tensor.name for tensor in self._outputs})
        frame.bind({tensor.name: tensor.buffer for tensor in tensors})
        self._launch = lambda: self._frame.enqueue(self._stream)
        if frame.context.can_prebind and not fixed:
            addresses = tuple(tensor.pointer for tensor in tensors)
            self._launch = frame.context.prebind(addresses, self._stream)
            if self._home.exclusive_stream and not self._downloads:
                self._launch_and_wait = frame.context.prebind(addresses, self._stream, waits=True)

    def _find_owners(self, tensors: Sequence[_Tensor]) -> None:
        """Note what each call reads of arrays in memory of the device that other code may have work queued on."""
        for tensor in tensors:
            array = tensor.array
            library = library_of(type(array))
            if library is not None:
                self._addresses.append((library.address_of(array), tensor))
                if (owner := (library.current_stream, library.index_of(array))) not in self._owners:
                    self._owners.append(owner)
            elif type(array) is DeviceArray:
                self._addresses.append((partial(getattr, array.buffer, "pointer"), tensor))
                self._exported.append(array.buffer.external_streams)
            else:
                self._lent.append(tensor)

    def rehearse(self) -> None:
        """Run once and wait, before `capture`."""
        for tensor in self._uploads:
            self._upload(tensor, staged=False)
        self._frame.enqueue(self._stream)
        self._stream.synchronize()

    def capture(self, stream: Stream) -> None:
        """Capture a CUDA graph on `stream`, which calls then replay; raises where none can be captured."""
        self._launch, self._launch_and_wait = self._frame.capture(stream).launcher(self._stream), None

    def _attach(self, spec: TensorSpec, array: Any, *, written: bool) -> _Tensor:
        """The array with a buffer of the device: its own memory if it is there, else memory to copy to or from."""
        if written and is_read_only(array):
            raise UsageError(
                f"the array for output `{spec.name}` is read-only",
                hint="a writable one; `tensor.numpy()` of a torch tensor on the host is",
            )
        if not isinstance(array, np.ndarray) or self._device.name == "cpu":
            return _Tensor(spec.name, array, self._device.borrow(array, self._stream), in_place=True)
        if written and not array.flags.c_contiguous:
            raise UsageError(f"the array for output `{spec.name}` is strided", hint="a C-contiguous array")
        buffer = self._device.allocate(max(array.nbytes, 1))
        self._owned.append(buffer)
        tensor = _Tensor(spec.name, array, buffer, in_place=False)
        tensor.pinned = array.flags.c_contiguous and self._device.is_pinned(array)
        if not tensor.pinned:
            pinned = self._device.pinned(max(array.nbytes, 1))
            self._owned.append(pinned)
            tensor.staged = StagedArray(
                self._device, pinned, pinned.array(spec.dtype, array.shape), self._home.copy_threads
            )
        return tensor

    def _allocate(self, spec: TensorSpec, shape: Shape) -> Any:
        buffer = self._device.allocate(max(dtype(spec.dtype).nbytes(shape), 1))
        return buffer.array(spec.dtype, shape)

    # ---------------------------------------------------------------------------------------- parts of a call

    def _run(self) -> None:
        if self._closed:
            _raise_closed()
        stream, downloads = self._stream, self._downloads
        self._check_addresses()
        for current, index in self._owners:
            stream.order_after(current(index))
        if self._exported or self._lent:
            self._order_after_exports()
        for tensor in self._uploads:
            self._upload(tensor, staged=True)
        self._launched(self._launch_and_wait or self._launch)
        if self._launch_and_wait is not None:
            return
        for tensor in downloads:
            if tensor.staged is not None:
                tensor.staged.download(tensor.buffer, stream)
            else:
                self._device.download(tensor.buffer, tensor.array, stream)
        if downloads:
            self._read(large=True)
        if self._home.exclusive_stream:
            stream.synchronize()
        else:  # do not wait for later work of other executors
            stream.record().synchronize()
        if downloads:
            self._read(large=False)

    def _read(self, *, large: bool) -> None:
        for tensor in self._downloads:
            if tensor.staged is not None and tensor.staged.chunked == large:
                tensor.staged.read_into(tensor.array)

    def _enqueue(self, handle: int) -> None:
        if self._closed:
            _raise_closed()
        self._check_addresses()
        self._stream.order_after(handle)
        for tensor in self._uploads:
            self._upload(tensor, staged=False)
        self._launched(self._launch)
        for tensor in self._downloads:
            self._device.download(tensor.buffer, tensor.array, self._stream)
        self._stream.order_before(handle)

    def _check_idle(self) -> None:
        if self._busy.locked():
            raise UsageError("a bound call is in use by another thread", hint="bind one for each thread")

    def _check_addresses(self) -> None:
        for address, tensor in self._addresses:
            if (pointer := address()) != tensor.pointer:
                tensor.check_address(pointer)

    def _order_after_exports(self) -> None:
        """Order the stream after what other libraries have queued, by the rules of DLPack."""
        for streams in self._exported:
            if streams:
                self._stream.wait_for_external(streams)
        for tensor in self._lent:
            tensor.check_address(self._device.borrow(tensor.array, self._stream).pointer)

    def _upload(self, tensor: _Tensor, *, staged: bool) -> None:
        if staged and tensor.staged is not None:
            tensor.staged.upload(tensor.array, tensor.buffer, self._stream)
        else:  # reads a pageable array before it returns
            self._device.upload(np.asarray(tensor.array, order="C"), tensor.buffer, self._stream)

    def _launched(self, launch: Callable[[], None]) -> None:
        try:
            launch()
        except Exception as error:
            if (ours := self._frame.context.translate_error(error)) is None:
                raise
            raise ours from error


def _raise_closed() -> None:
    raise UsageError("the bound call is closed", hint="bind another")


def _check_output(spec: TensorSpec, array: Any, shape: Shape) -> None:
    kind = dtype_name(array)
    if kind != spec.dtype or tuple(array.shape) != shape:
        raise UsageError(
            f"the array for output `{spec.name}` is {format_shape(tuple(array.shape))} {kind}, "
            f"expected {format_shape(shape)} {spec.dtype}",
            hint="an array of that shape and dtype, or leave the output out",
        )


def _check_overlaps(tensors: Sequence[_Tensor], outputs: set[str]) -> None:
    """`UsageError` for an output that shares memory with another tensor."""
    ranges = sorted((tensor.pointer, tensor.pointer + tensor.buffer.nbytes, tensor.name) for tensor in tensors)
    for (_, end, name), (start, after, other) in itertools.pairwise(ranges):
        if start < end and after > start and {name, other} & outputs:
            raise UsageError(f"the arrays of `{name}` and `{other}` share memory", hint="an output needs its own")
