"""An NVIDIA GPU: `CudaDevice`, over cuda.core, in the primary context that torch, CuPy and the CUDA runtime share.

cuda.core opens the device, its memory pool, streams and events; copies, captures and allocations are the driver's own calls
(cuda.bindings). A thread's current context is as it was when a call returns. What came with the process stays: the primary
context is not given back by `close`.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from cuda import core
from cuda.bindings import driver
from cuda.core import DeviceMemoryResource, DeviceMemoryResourceOptions, EventOptions, StreamOptions

from trt_engine.device import Event, Graph, MemoryStats, Properties, Stream, dlpack
from trt_engine.device.host import Bytes, Holding, address_of, bytes_of, check_part, typed, unpinned
from trt_engine.device.ledger import Ledger, Ranges, check_size, exhausted
from trt_engine.device.memory import size_class
from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError, TrtEngineError, UsageError

__all__ = ["CudaBuffer", "CudaDevice", "CudaEvent", "CudaGraph", "CudaHostBuffer", "CudaStream", "device_count"]

log = logging.getLogger(__name__)

_Result = driver.CUresult
_OK, _OUT_OF_MEMORY = _Result.CUDA_SUCCESS, _Result.CUDA_ERROR_OUT_OF_MEMORY

# cuda.h: what these say is said by every later call too, until the process ends
_FATAL = frozenset(
    getattr(_Result, f"CUDA_ERROR_{name}")
    for name in (
        "ILLEGAL_ADDRESS LAUNCH_FAILED HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE "
        "INVALID_PC ASSERT LAUNCH_TIMEOUT ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE CONTEXT_IS_DESTROYED DEVICE_UNAVAILABLE "
        "DEVICE_NOT_LICENSED EXTERNAL_DEVICE DEINITIALIZED CONTAINED UNKNOWN"
    ).split()
    if hasattr(_Result, f"CUDA_ERROR_{name}")
)
_CAPTURE = "CUDA_ERROR_STREAM_CAPTURE"

# cuda.core before 1.0 calls it `enable_timing`
_TIMED = next(item.name for item in fields(EventOptions) if item.name in ("timing_enabled", "enable_timing"))
_EVENT, _MARK = EventOptions(**{_TIMED: True}), EventOptions()
_DEFAULT_STREAM = dlpack.DEFAULT_STREAM
_DEFAULT_STREAMS = frozenset((_DEFAULT_STREAM, 2))
"""And each thread's own, whose number means another stream in every thread: the first one waits for all of them."""
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_HOST = driver.CUmemorytype.CU_MEMORYTYPE_HOST
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

Item = TypeVar("Item")
_Dropped: TypeAlias = tuple[bool, int, int]
"""A buffer nobody closed: whether it is pinned, its address and its size."""


def device_count() -> int:
    """How many GPUs CUDA shows this process; `SetupError` without a driver."""
    try:
        (status,) = driver.cuInit(0)
        if status == _Result.CUDA_ERROR_NO_DEVICE:
            return 0
        if status == _OK:
            status, count = driver.cuDeviceGetCount()
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError, or a symbol the driver lacks
        raise SetupError(
            f"there is no NVIDIA driver here: {error}",
            hint="install one (`nvidia-smi` then answers), in a container start it with `--gpus all`; or `--device cpu`",
        ) from error
    if status != _OK:
        raise SetupError(
            f"the NVIDIA driver does not start: {_text(status)}",
            hint="`nvidia-smi` shows driver and GPUs; a driver older than cuda-bindings needs an older `cuda-bindings`",
        )
    return int(count)


def _text(status: Any) -> str:
    """As `an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)`."""
    failed, described = driver.cuGetErrorString(status)
    words = described.decode() if failed == _OK and described else "unknown error"
    return f"{words} ({getattr(status, 'name', status)})"


class CudaBuffer:
    """Memory of a GPU."""

    on_host = False

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int, stream: CudaStream | None = None) -> None:
        self.device = device
        self.stream = stream
        self._nbytes = nbytes
        self._pointer = pointer
        self._closed = False
        self.readers: set[int] = set()
        self._parent: CudaBuffer | None = None
        self._shared: list[bool] = []
        self._end: weakref.finalize[..., CudaBuffer] | None = None

    def own(self) -> None:
        """From here on the memory goes back with this buffer: when it is closed, or some time after it was dropped."""
        self._end = weakref.finalize(self, self.device._drop, (self.on_host, self._pointer, self._nbytes), self._shared)
        self._end.atexit = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        if self._closed or (self._parent is not None and self._parent.closed):
            raise UsageError("a freed buffer was used", hint="keep it open until the stream is done with it")
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._closed or (self._parent is not None and self._parent.closed)

    def view(self, offset: int, nbytes: int, then: Callable[[], None] | None = None) -> CudaBuffer:
        check_part(offset, nbytes, self._nbytes)
        return _CudaView(self, offset, nbytes, then)

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        _ = self.pointer
        self.lend()
        if self.on_host:
            raw = (ctypes.c_uint8 * max(self._nbytes, 1)).from_address(self._pointer)
            memory: Bytes = np.ctypeslib.as_array(raw)[: self._nbytes]
            return typed(np.asarray(Holding(self, memory)), dtype, shape)
        return dlpack.device_array(self, dtype, shape, dlpack.CUDA, self.device.number)

    def lend(self) -> None:
        """Somebody has an array of it: dropped with the array, it was not forgotten."""
        if not self._shared:
            self._shared.append(True)

    def close(self) -> None:
        self._closed = True
        if self._end is not None and self._end.detach() is not None:
            self.device._free(self)


class CudaHostBuffer(CudaBuffer):
    """Pinned memory of the host."""

    on_host = True

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = super().array(dtype, shape)
        return array


class _CudaView(CudaBuffer):
    """A part of a buffer; it ends with it."""

    def __init__(self, parent: CudaBuffer, offset: int, nbytes: int, then: Callable[[], None] | None) -> None:
        super().__init__(parent.device, parent.pointer + offset, nbytes, parent.stream)
        self.on_host = parent.on_host
        self.readers = parent.readers
        self._parent: CudaBuffer = parent
        self._then = then

    def lend(self) -> None:
        self._parent.lend()

    def close(self) -> None:
        self._closed = True
        then, self._then = self._then, None
        if then is not None:
            then()


class _Borrowed(CudaBuffer):
    """Another library's memory, kept until `close`."""

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int, lender: Any) -> None:
        super().__init__(device, pointer, nbytes)
        self._lender = lender

    def close(self) -> None:
        self._closed = True
        self._lender = None


class CudaEvent:
    """A point in a stream's work on a GPU."""

    def __init__(self, device: CudaDevice, event: Any, captured: bool) -> None:
        self.device = device
        self.event = event
        self._captured = captured

    def done(self) -> bool:
        self.check()
        with self.device.here(), _Relaxed():
            return bool(self.event.is_done)

    def synchronize(self) -> None:
        self.check()
        with self.device.here(), _Relaxed():
            self.event.sync()

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, CudaEvent) or since.device is not self.device:
            raise UsageError("two events of different devices were compared", hint="record both on one device")
        since.synchronize()
        self.synchronize()
        with self.device.here(), _Relaxed():
            return float(self.event - since.event)

    def check(self) -> None:
        self.device.check()
        if self._captured:
            raise UsageError("an event of a capture has no time", hint="record it before and after the replay")


class CudaGraph:
    """An instantiated CUDA graph."""

    def __init__(self, device: CudaDevice, handle: Any, buffers: tuple[CudaBuffer, ...]) -> None:
        self._device = device
        self._handle, self._address = handle, int(handle)
        self._buffers = buffers
        self._end = weakref.finalize(self, device._destroy_graph, handle)
        self._end.atexit = False

    def replay(self, stream: Stream) -> None:
        if not self._end.alive:
            raise UsageError("a closed graph was replayed", hint="capture another")
        if not isinstance(stream, CudaStream) or stream.device is not self._device:
            raise UsageError(
                f"a graph of `{self._device.name}` was replayed on another device", hint="capture it there"
            )
        for buffer in self._buffers:
            if buffer.closed:
                raise UsageError("a graph holds the address of a freed buffer", hint="capture it again")
        if self._device._lost is None and _straight.replay(self._address, stream.handle) == 0:
            return
        with self._device.here():
            self._device.say(driver.cuGraphLaunch(self._handle, stream.handle))

    def close(self) -> None:
        self._buffers = ()
        self._end()


class CudaStream:
    """A non-blocking CUDA stream."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self.device = device
        self._stream = stream
        self._handle = int(stream.handle)
        self._touched: list[CudaBuffer] | None = None
        self._closed = False
        self.gate = threading.RLock()
        """No capture begins while another thread, which has this, waits for the stream or records an event in it."""

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as a number."""
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")
        return self._handle

    @property
    def capturing(self) -> bool:
        return self._touched is not None

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        usable = self._touched is None and not self._closed and self.device._lost is None
        if usable and _straight.wait(self._handle) == 0:
            return
        handle = self.handle
        if self.capturing:
            raise UsageError("a stream cannot be waited for while it is captured", hint="synchronize after the capture")
        with self.device.here(), _Relaxed():
            self.device.say(driver.cuStreamSynchronize(handle))

    def record(self) -> CudaEvent:
        _ = self.handle
        with self.device.here():
            return CudaEvent(self.device, self._stream.record(options=_EVENT), self.capturing)

    def mark(self) -> list[Any] | None:
        """An event behind what is enqueued, none of a closed stream; None while it is captured. From any thread."""
        with self.gate:
            if self._closed:
                return []
            return None if self._is_captured() else [self._stream.record(options=_MARK)]

    def settle(self) -> bool:
        """Wait for what is enqueued; False, at once, while the stream is captured. From any thread."""
        with self.gate:
            if self._closed:
                return True
            if self._is_captured():
                return False
            with _Relaxed():
                self.device.say(driver.cuStreamSynchronize(self._handle))
            return True

    def _is_captured(self) -> bool:
        """Whether we or, by its handle, another library captures it."""
        if self.capturing:
            return True
        (status,) = self.device.say(driver.cuStreamIsCapturing(self._handle))
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def wait(self, event: Event) -> None:
        _ = self.handle
        if not isinstance(event, CudaEvent) or event.device is not self.device:
            raise UsageError("an event of another device was waited for", hint="record it on this device")
        if self.capturing:
            raise UsageError("a stream cannot wait for an event while it is captured", hint="wait before the capture")
        event.check()
        with self.device.here():
            self._stream.wait(event.event)

    def follow(self, readers: Collection[int]) -> bool:
        if _DEFAULT_STREAMS.isdisjoint(readers):
            return True
        try:
            with self.device.here(), _Relaxed():
                self._stream.wait(core.Stream.from_handle(_DEFAULT_STREAM))
        except TrtEngineError:  # a stream that waits for the default one is being captured: nothing may come behind it
            return False
        return True

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        handle, device = self.handle, self.device
        if self.capturing:
            raise UsageError("a capture is under way on this stream", hint="one capture at a time")
        local = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with device.here():
            touched: list[CudaBuffer] = []
            with self.gate:
                device.say(driver.cuStreamBeginCapture(handle, local))
                self._touched = touched
            device._capturing.add(threading.get_ident())
            try:
                work(self)
            except BaseException:
                _discard(driver.cuStreamEndCapture(handle))
                raise
            else:
                ended = driver.cuStreamEndCapture(handle)
            finally:
                self._touched = None
                device._capturing.discard(threading.get_ident())
            if ended[0] != _OK:
                _discard(ended)
                device.say(ended[:1])
            with _Relaxed():
                try:
                    (made,) = device.say(driver.cuGraphInstantiate(ended[1], 0))
                finally:
                    _discard(ended)
                graph = CudaGraph(device, made, tuple(touched))
                device.say(driver.cuGraphUpload(made, handle))
            return graph

    def touch(self, *buffers: CudaBuffer) -> None:
        """Remember buffers for the graph that is being captured."""
        if self._touched is not None:
            self._touched.extend(buffers)

    def close(self) -> None:
        with self.gate:
            if self._closed:
                return
            try:
                with self.device.here():
                    self.settle()
            except Exception as error:  # never raises
                log.warning(
                    "a stream of `%s` was closed with work that failed: %s", self.device.name, _first_line(error)
                )
            self._closed = True
            try:
                with self.device.here(lost=True):
                    self._stream.close()
            except Exception as error:  # never raises
                log.debug("a stream of `%s` was not given back: %s", self.device.name, _first_line(error))


def _discard(ended: tuple[Any, ...]) -> None:
    """Destroy the graph of a capture that ended, if there is one."""
    if len(ended) > 1 and ended[1] is not None and int(ended[1]):
        with _Relaxed():
            driver.cuGraphDestroy(ended[1])


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


class _Here:
    """The calling thread in the device's context; left as it was found. What CUDA raises comes out as ours."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        _, current = driver.cuCtxGetCurrent()
        if int(current) != self._device._context_number:
            (status,) = driver.cuCtxPushCurrent(self._device._context)
            if status != _OK:
                raise self._device._ours(status)
            self._pushed = True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._pushed:
            driver.cuCtxPopCurrent()
        if not isinstance(error, Exception) or isinstance(error, TrtEngineError):
            return
        if found := re.search(r"CUDA_ERROR_\w+", str(error)):  # cuda.core's errors have no public class
            raise self._device._ours(getattr(_Result, found[0], found[0])) from error


class _Relaxed:
    """In it the calling thread breaks no capture. In "global" mode, which torch and ONNX Runtime capture in, a wait, an
    allocation or a look at an event by any other thread would (seen on an H200).
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        _, self._before = driver.cuThreadExchangeStreamCaptureMode(_RELAXED)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:  # a driver that refuses changed nothing
            driver.cuThreadExchangeStreamCaptureMode(self._before)


class _Straight:
    """The calls that an inference makes again and again, straight into the driver; each gives its status, 0 for success.

    The same by cuda.bindings, with the context and the capture mode around it, makes up to six calls of a microsecond or
    more. What gives another status was not done: the long way does it or says why. So it does where there is no library.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.found = False
        try:
            brief, long = ctypes.PyDLL(library), ctypes.CDLL(library)  # the second lets other threads run meanwhile
            self._exchange = brief.cuThreadExchangeStreamCaptureMode
            self._wait, self._copy, self._launch = long.cuStreamSynchronize, long.cuMemcpyAsync, long.cuGraphLaunch
        except (OSError, AttributeError):
            return
        address = ctypes.c_void_p
        self._exchange.argtypes = self._wait.argtypes = (address,)
        self._copy.argtypes, self._launch.argtypes = (address, address, ctypes.c_size_t, address), (address, address)
        self._relaxed = int(_RELAXED)
        self.found = True

    def wait(self, stream: int) -> int:
        """Wait for a stream as in `_Relaxed`, whatever context the thread is in."""
        if not self.found:
            return -1
        mode = ctypes.c_int(self._relaxed)
        place = ctypes.byref(mode)
        if status := self._exchange(place):
            return int(status)
        try:
            return int(self._wait(stream))
        finally:
            self._exchange(place)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        """The stream says in which context; in a thread that is in none, or in another, the driver may refuse."""
        return int(self._copy(target, source, nbytes, stream)) if self.found else -1

    def replay(self, graph: int, stream: int) -> int:
        return int(self._launch(graph, stream)) if self.found else -1


_straight = _Straight()


class CudaDevice:
    """The GPU `cuda:N`, as CUDA counts them, of which at most `limit_bytes` may be taken. Made by `open_device`."""

    def __init__(self, number: int = 0, *, limit_bytes: int | None = None) -> None:
        self.name = f"cuda:{number}"
        self.number = number
        self.limit_bytes = limit_bytes
        self._lost: str | None = None
        self._closed = False
        self._capturing: set[int] = set()
        self._ledger, self._pinned_ledger = Ledger(), Ledger()
        self._pinned: Ranges[weakref.ref[CudaHostBuffer]] = Ranges()
        self._idle_pinned: dict[int, list[int]] = {}
        self._dropped: deque[_Dropped] = deque()
        self._leaving: deque[tuple[list[Any], list[_Dropped]]] = deque()  # behind these events nothing uses them
        self._told = False
        self._lent = False
        """Whether a buffer was dropped that others had an array of, and may still read."""
        self._open: weakref.WeakSet[CudaStream] = weakref.WeakSet()
        # once the device is closed `_drop` takes it, which the collector calls in the middle of anything
        self._lock = threading.RLock()
        with _Relaxed():
            self._start()
        weakref.finalize(
            self, _end, self.name, self._context, self._idle_pinned, self._resource, self._home
        ).atexit = False

    def _start(self) -> None:
        """Open the GPU through cuda.core; the thread's context is as it was afterwards."""
        number = self.number
        _, before = driver.cuCtxGetCurrent()
        try:
            board = core.Device(number)
            board.set_current()
            _, self._context = driver.cuCtxGetCurrent()
            self._context_number = int(self._context)
            _, total = driver.cuDeviceTotalMem(number)
            made = board.properties
            capability = board.compute_capability
            self._properties = Properties(
                name=str(board.name),
                memory_bytes=int(total),
                multiprocessors=int(made.multiprocessor_count),
                compute_capability=(int(capability[0]), int(capability[1])),
            )
            self._resource = DeviceMemoryResource(board, DeviceMemoryResourceOptions()) if _has_pools(made) else None
            self._home = board.create_stream(options=StreamOptions(nonblocking=True))
        except Exception as error:
            status = getattr(_Result, found[0], None) if (found := re.search(r"CUDA_ERROR_\w+", str(error))) else None
            if status == _OUT_OF_MEMORY:
                raise MemoryExhausted(
                    f"`{self.name}` has no memory left for a context", hint="`nvidia-smi` shows who has it"
                ) from error
            raise SetupError(
                f"`{self.name}` does not open: {_first_line(error)}", hint="`nvidia-smi` shows driver and GPUs"
            ) from error
        finally:
            driver.cuCtxSetCurrent(before)
        self._home_number = int(self._home.handle)
        if self._resource is not None:
            kinds, pool = driver.CUmemPool_attribute, self._resource.handle
            # freed memory stays for the next allocation, which never waits for another stream's work to get it
            driver.cuMemPoolSetAttribute(
                pool, kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, driver.cuuint64_t((1 << 64) - 1)
            )
            driver.cuMemPoolSetAttribute(pool, kinds.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0)

    # ---------------------------------------------------------------------------------------- what it is

    def properties(self) -> Properties:
        return self._properties

    def memory(self) -> MemoryStats:
        self.check()
        free, total = self._room()
        held, pinned = self._ledger.read(), self._pinned_ledger.read()
        return MemoryStats(
            total, free, held.nbytes, held.peak_bytes, held.count, self.limit_bytes,
            pinned.nbytes, pinned.peak_bytes, pinned.count, held.served,
        )  # fmt: skip

    def _room(self) -> tuple[int, int]:
        """Bytes an allocation may take, and what the GPU has: free ones, and those our pool keeps unused."""
        with self.here(), _Relaxed():
            free, total = self.say(driver.cuMemGetInfo())
            free = int(free)
            if self._resource is not None:
                kinds, pool = driver.CUmemPool_attribute, self._resource.handle
                (kept,) = self.say(driver.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT))
                (used,) = self.say(driver.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
                free += int(kept) - int(used)
        if self.limit_bytes is not None:
            free = min(free, self.limit_bytes - self._ledger.read().nbytes)
        return free, int(total)

    # ---------------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int, stream: Any = None) -> CudaBuffer:
        self._check_open()
        self._check_no_capture()
        handle = None if stream is None else stream.handle
        if stream is not None and stream.capturing:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")
        if self._dropped or self._leaving:
            self._reap()
        pointer = self._allocate(nbytes, handle)
        if pointer is None:
            self._make_room(nbytes)
            pointer = self._allocate(nbytes, handle)
        if pointer is None:
            free, total = self._room()
            raise exhausted(self.name, nbytes, free, total, self.limit_bytes)
        buffer = CudaBuffer(self, pointer, nbytes, stream)
        buffer.own()
        return buffer

    def _allocate(self, nbytes: int, handle: int | None) -> int | None:
        """An address, counted; None where there is no room."""
        if self._ledger.reserve(nbytes, self.limit_bytes) is not None:
            return None
        try:
            with self.here(), _Relaxed():
                size = max(nbytes, 1)
                if self._resource is None:
                    status, pointer = driver.cuMemAlloc(size)
                else:
                    at = self._home_number if handle is None else handle
                    status, pointer = driver.cuMemAllocFromPoolAsync(size, self._resource.handle, at)
                if status == _OUT_OF_MEMORY:
                    self._ledger.undo(nbytes)
                    return None
                self.say((status,))
                if self._resource is not None and handle is None:
                    self.say(driver.cuStreamSynchronize(self._home_number))  # from here on any stream may use it
        except BaseException:
            self._ledger.undo(nbytes)
            raise
        self._ledger.keep(nbytes)
        return int(pointer)

    def _make_room(self, nbytes: int) -> None:
        """Give back all that is given up, for which all streams are waited for: the alternative is an error."""
        self._collect()
        if self.limit_bytes is None or self._ledger.read().nbytes + nbytes <= self.limit_bytes:  # the GPU is full
            self._wait_for_streams()  # what was freed in a stream's order is free then
            self._trim()

    def pinned(self, nbytes: int) -> CudaHostBuffer:
        self._check_open()
        self._check_no_capture()
        size = size_class(check_size(nbytes))
        with self._lock:
            idle = self._idle_pinned.get(size)
            pointer = idle.pop() if idle else None
        if pointer is None:
            with self.here(), _Relaxed():
                status, raw = driver.cuMemHostAlloc(size, _PORTABLE)
                if status == _OUT_OF_MEMORY and self._collect() + self._trim_pinned():
                    status, raw = driver.cuMemHostAlloc(size, _PORTABLE)
            if status == _OUT_OF_MEMORY:
                raise MemoryExhausted(
                    f"the host has no {nbytes} bytes of pinned memory left for `{self.name}`",
                    hint="a smaller batch, or `ulimit -l` raised where it is set",
                )
            self.say((status,))
            pointer = int(raw)
        self._pinned_ledger.take(nbytes)
        buffer = CudaHostBuffer(self, pointer, nbytes)
        self._pinned.add(pointer, size, weakref.ref(buffer))
        buffer.own()
        return buffer

    def borrow(self, array: Any, stream: Any) -> CudaBuffer:
        self._check_open()
        if stream.capturing:
            raise UsageError("an array was borrowed while a graph is captured", hint="borrow it before the capture")
        if type(array) is dlpack.DeviceArray and array.buffer.device is self:  # type: ignore[attr-defined]
            if array.buffer.readers:  # who was lent it may have written to it since
                stream.follow(array.buffer.readers)
            return _Borrowed(self, array.buffer.pointer, array.nbytes, array)
        with self.here(), _Relaxed():
            lent = dlpack.read(array, stream.handle)
            number = self._device_of(lent.pointer) if lent.device_id is None else lent.device_id
            if lent.device_type != dlpack.CUDA or (number != self.number and lent.nbytes):
                raise UsageError(f"an array of another device was given to `{self.name}`", hint="copy it there first")
            if lent.stream is not None and lent.stream != stream.handle:
                stream._stream.wait(core.Stream.from_handle(lent.stream))
        return _Borrowed(self, lent.pointer, lent.nbytes, lent)

    def _device_of(self, pointer: int) -> int:
        """The GPU that memory is on; -1 where the driver knows none."""
        kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        status, found = driver.cuPointerGetAttribute(kind, pointer)
        return int(found) if status == _OK else -1

    def _free(self, buffer: CudaBuffer) -> None:
        """Give back what a buffer had; never raises. On its stream's turn where it has one."""
        pointer, nbytes = buffer._pointer, buffer._nbytes
        if buffer.on_host:
            self._free_pinned(pointer, nbytes)
            return
        stream = buffer.stream
        if stream is not None and (stream.capturing or self._lost):
            self._dropped.append((False, pointer, nbytes))
            return
        ordered = stream is not None and not stream._closed
        self._free_device(pointer, nbytes, stream._handle if ordered and stream is not None else self._home_number)

    def _free_device(self, pointer: int, nbytes: int, at: int) -> None:
        self._ledger.give(nbytes)
        if self._lost:
            return
        try:
            with self.here(), _Relaxed():
                if self._resource is None:
                    self.say(driver.cuMemFree(pointer))
                else:
                    self.say(driver.cuMemFreeAsync(pointer, at))
        except Exception as error:  # never raises
            log.warning("`%s` did not take %d bytes back: %s", self.name, nbytes, _first_line(error))

    def _free_pinned(self, pointer: int, nbytes: int) -> None:
        self._pinned.remove(pointer)
        self._pinned_ledger.give(nbytes)
        size = size_class(nbytes)
        with self._lock:
            if not self._closed:
                self._idle_pinned.setdefault(size, []).append(pointer)
                return
        _unpin(self.name, {size: [pointer]})

    def _drop(self, dropped: _Dropped, shared: list[bool]) -> None:
        """A buffer was collected while it was open. Work may still use it: it waits for `_reap` or `_collect`."""
        if shared:
            self._lent = True
        self._dropped.append(dropped)
        if not shared and not self._told:
            self._told = True
            log.warning(
                "a buffer of %d bytes of `%s` was dropped without `close`; it is given back when all streams are done "
                "with what they have now (said once)", dropped[2], self.name,
            )  # fmt: skip
        if self._closed and not self._lost:  # nobody will come by any more
            try:
                self._collect()
            except Exception as error:  # in a finaliser
                log.warning("`%s` did not take %d bytes back: %s", self.name, dropped[2], _first_line(error))

    def _reap(self) -> None:
        """Give dropped buffers back that no stream uses any more, without waiting: an event in each stream tells."""
        with self.here(), _Relaxed():
            if left := _drain(self._leaving, 1):
                events, doomed = left[0]
                if not all(event.is_done for event in events):
                    self._leaving.appendleft(left[0])
                    return
                self._give_back(doomed)
            if doomed := _drain(self._dropped):
                marks = [stream.mark() for stream in self._streams()]
                if self._lent:
                    marks.append(self._mark_of_others())
                if None in marks:  # a stream that is captured may have had work before
                    self._dropped.extend(doomed)
                else:
                    self._leaving.append(([event for mark in marks for event in mark or ()], doomed))

    def _mark_of_others(self) -> list[Any] | None:
        """An event behind what other libraries have on the default stream; None where it cannot be had."""
        try:
            return [core.Stream.from_handle(_DEFAULT_STREAM).record(options=_MARK)]
        except Exception:  # a stream that waits for the default one is being captured
            return None

    def _wait_for_others(self) -> bool:
        """Wait for what other libraries have on the default stream; False where it cannot be waited for."""
        with self.here(), _Relaxed():
            (status,) = driver.cuStreamSynchronize(_DEFAULT_STREAM)
        if status != _OK and str(status.name).startswith(_CAPTURE):
            return False
        self.say((status,))
        return True

    def _collect(self) -> int:
        """Give dropped buffers back, for which all streams are waited for; how many."""
        doomed = [item for _, items in _drain(self._leaving) for item in items] + _drain(self._dropped)
        if not doomed:
            return 0
        try:
            done = self._wait_for_streams() and (not self._lent or self._wait_for_others())
        except BaseException:
            self._dropped.extend(doomed)
            raise
        if not done:
            self._dropped.extend(doomed)
            return 0
        self._give_back(doomed)
        return len(doomed)

    def _give_back(self, doomed: list[_Dropped]) -> None:
        for pinned, pointer, nbytes in doomed:
            if pinned:
                self._free_pinned(pointer, nbytes)
            else:
                self._free_device(pointer, nbytes, self._home_number)

    def _trim(self) -> None:
        """Hand memory that nobody uses from our pool back to the GPU."""
        if self._resource is not None:
            with self.here(), _Relaxed():
                self.say(driver.cuStreamSynchronize(self._home_number))
                self.say(driver.cuMemPoolTrimTo(self._resource.handle, 0))

    def _trim_pinned(self) -> int:
        with self._lock:
            idle = dict(self._idle_pinned)
            self._idle_pinned.clear()
        with self.here():
            return _unpin(self.name, idle)

    # ---------------------------------------------------------------------------------------- work

    def stream(self) -> CudaStream:
        self._check_open()
        with self.here(), _Relaxed():
            board = core.Device(self.number)
            board.set_current()  # cuda.core's devices are one for each thread
            made = CudaStream(self, board.create_stream(options=StreamOptions(nonblocking=True)))
        with self._lock:
            self._open.add(made)
        return made

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        source, pointer = bytes_of(array), self._own(buffer, stream)
        nbytes = source.nbytes
        if nbytes > buffer.nbytes:
            raise UsageError(f"{nbytes} bytes do not fit a buffer of {buffer.nbytes}", hint="allocate a larger one")
        if not nbytes:
            return
        start = address_of(source)
        if stream.capturing:
            stream.touch(buffer, *self._pinned_at(start))
        with self.here():
            self.say(driver.cuMemcpyHtoDAsync(pointer, start, nbytes, stream.handle))

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        target, pointer = bytes_of(array, written=True), self._own(buffer, stream)
        nbytes = target.nbytes
        if nbytes > buffer.nbytes:
            raise UsageError(f"{nbytes} bytes cannot be read from a buffer of {buffer.nbytes}", hint="a smaller array")
        if not nbytes:
            return
        start = address_of(target)
        if stream.capturing:
            stream.touch(buffer, *self._pinned_at(start))
        with self.here():
            self.say(driver.cuMemcpyDtoHAsync(start, pointer, nbytes, stream.handle))

    def copy(self, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        left, right = self._own(source, stream), self._own(target, stream)
        if not 0 <= nbytes <= source.nbytes or nbytes > target.nbytes:
            check_part(0, nbytes, min(source.nbytes, target.nbytes))
        if not nbytes:
            return
        stream.touch(source, target)
        handle = stream.handle
        if _straight.copy(right, left, nbytes, handle) == 0:
            return
        with self.here():
            self.say(driver.cuMemcpyAsync(right, left, nbytes, handle))

    def synchronize(self) -> None:
        self._check_open()
        self._check_no_capture()
        self._wait_for_streams()
        self._collect()

    def _wait_for_streams(self) -> bool:
        """Whether all were waited for: those that are captured are left alone."""
        with self.here():
            settled = [stream.settle() for stream in self._streams()]
        return all(settled)

    def _streams(self) -> list[CudaStream]:
        with self._lock:
            return list(self._open)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self._lost:
                self._collect()
                self._trim_pinned()
                self._trim()
        except Exception as error:  # never raises
            log.warning("`%s` was closed with work that failed: %s", self.name, _first_line(error))
        held, pinned = self._ledger.read(), self._pinned_ledger.read()
        if (held.count or pinned.count) and not self._lost:
            log.warning(
                "`%s` was closed with %d buffers (%d bytes) still allocated",
                self.name, held.count + pinned.count, held.nbytes + pinned.nbytes,
            )  # fmt: skip

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------- checks and errors

    def here(self, lost: bool = False) -> _Here:
        """The calling thread in this device's context; `DeviceLost` once it is lost, unless `lost` is allowed."""
        if not lost:
            self.check()
        return _Here(self)

    def say(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the driver gave besides its status; our error for a status that is none of success."""
        if result[0] != _OK:
            raise self._ours(result[0])
        return result[1:]

    def _ours(self, status: Any) -> TrtEngineError:
        name, text = str(getattr(status, "name", status)), _text(status) if isinstance(status, _Result) else str(status)
        if status in _FATAL:
            self._lost = self._lost or text
            return self._is_lost()
        if status == _OUT_OF_MEMORY:
            return MemoryExhausted(f"`{self.name}` is out of memory: {text}", hint="a smaller batch, or fewer contexts")
        if name.startswith(_CAPTURE):
            return UsageError(
                f"the work cannot be captured in a graph: {text}",
                hint="run it once before the capture, or without a graph",
            )
        return SetupError(
            f"`{self.name}` refused: {text}", hint="`trt-engine doctor`; `nvidia-smi` shows the GPU's state"
        )

    def _is_lost(self) -> DeviceLost:
        return DeviceLost(f"`{self.name}` is lost: {self._lost}", hint="close it and start the process again")

    def check(self) -> None:
        if self._lost is not None:
            raise self._is_lost()

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise UsageError(f"the device `{self.name}` is closed", hint="open it again")

    def _check_no_capture(self) -> None:
        if threading.get_ident() in self._capturing:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")

    def _own(self, buffer: Any, stream: Any) -> int:
        """The address of an open buffer of this device that may be used on that stream."""
        if self._lost is not None:
            raise self._is_lost()
        if not isinstance(buffer, CudaBuffer) or buffer.device is not self:
            raise UsageError(f"a buffer of another device was used on `{self.name}`", hint="allocate it there")
        if buffer.stream is not None and buffer.stream is not stream:
            raise UsageError(
                "a buffer allocated for another stream was used", hint="allocate it without naming a stream"
            )
        return buffer.pointer

    def _pinned_at(self, address: int) -> tuple[CudaHostBuffer, ...]:
        """Our pinned buffer at that address, none where it is somebody else's; `UsageError` for ordinary memory."""
        if (found := self._pinned.find(address)) is not None:
            buffer = found[1]()
            return () if buffer is None else (buffer,)
        kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, memory = driver.cuPointerGetAttribute(kind, address)
        if status != _OK or int(memory) != int(_HOST):
            raise unpinned()
        return ()

    def _destroy_graph(self, handle: Any) -> None:
        if not self._lost:
            with _Relaxed():
                (status,) = driver.cuGraphExecDestroy(handle)
            if status != _OK:
                log.debug("a graph of `%s` was not given back: %s", self.name, _text(status))


def _drain(items: deque[Item], most: int | None = None) -> list[Item]:
    """Take out the first `most`; other threads may do the same."""
    taken: list[Item] = []
    while most is None or len(taken) < most:
        try:
            taken.append(items.popleft())
        except IndexError:
            break
    return taken


def _end(name: str, context: Any, idle: dict[int, list[int]], resource: Any, home: Any) -> None:
    """Give back what a device had itself, when nobody has it or any of its buffers any more. Never raises."""
    (status,) = driver.cuCtxPushCurrent(context)
    try:
        with _Relaxed():
            _unpin(name, idle)
            for item in (resource, home):
                if item is not None:
                    item.close()
    except Exception as error:  # in a finaliser
        log.debug("`%s` was not given back: %s", name, _first_line(error))
    finally:
        if status == _OK:
            driver.cuCtxPopCurrent()


def _unpin(name: str, idle: dict[int, list[int]]) -> int:
    """Give pinned memory back to the host; how many pieces. Never raises."""
    count = 0
    with _Relaxed():
        for pointer in (pointer for pointers in idle.values() for pointer in pointers):
            (status,) = driver.cuMemFreeHost(pointer)
            count += 1
            if status != _OK:
                log.debug("`%s` did not take pinned memory back: %s", name, _text(status))
    return count


def _has_pools(properties: Any) -> bool:
    return bool(getattr(properties, "memory_pools_supported", True))
