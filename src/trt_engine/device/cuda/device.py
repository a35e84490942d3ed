"""`CudaDevice`: an NVIDIA GPU in the primary context, which torch, CuPy and the CUDA runtime share.

cuda.core opens the device, its memory pool, streams and events; copies, captures and allocations are driver calls
(cuda.bindings). Each call restores the thread's current context. `close` does not release the primary context.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from cuda import core
from cuda.bindings import driver
from cuda.core import DeviceMemoryResource, DeviceMemoryResourceOptions, StreamOptions

from trt_engine.closing import Closing
from trt_engine.device import MemoryStats, Properties, dlpack, foreign
from trt_engine.device.accounting import AddressRanges, MemoryAccounting, check_size, memory_exhausted, size_class
from trt_engine.device.cuda.driver_calls import (
    CAPTURE_ERROR_PREFIX,
    FATAL,
    OUT_OF_MEMORY,
    SUCCESS,
    ContextGuard,
    RelaxedCapture,
    Result,
    copy_all,
    copy_async,
    status_text,
)
from trt_engine.device.cuda.memory import BorrowedBuffer, CudaBuffer, CudaHostBuffer, DroppedBuffer
from trt_engine.device.cuda.stream import DEFAULT_STREAM, UNTIMED_EVENT, CudaStream
from trt_engine.device.host import address_of, as_bytes, check_range, download_bytes, unpinned_error, upload_bytes
from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError, TrtEngineError, UsageError
from trt_engine.format import library_reason

log = logging.getLogger(__name__)

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_HOST = driver.CUmemorytype.CU_MEMORYTYPE_HOST
Item = TypeVar("Item")


class CudaDevice(Closing):
    """The GPU `cuda:N`, limited to `limit_bytes` of allocations. Created by `open_device`."""

    def __init__(self, number: int = 0, *, limit_bytes: int | None = None) -> None:
        self.name = f"cuda:{number}"
        self.number = number
        self.limit_bytes = limit_bytes
        self._lost: str | None = None
        self._closed = False
        self._capturing_threads: set[int] = set()
        self._accounting, self._pinned_accounting = MemoryAccounting(), MemoryAccounting()
        self._pinned_ranges: AddressRanges[weakref.ref[CudaHostBuffer]] = AddressRanges()
        self._idle_pinned: dict[int, list[int]] = {}
        self._dropped: deque[DroppedBuffer] = deque()
        self._pending_frees: deque[tuple[list[Any], list[DroppedBuffer]]] = deque()  # unused after these events
        self._warned = False
        self._dropped_exported = False
        """Whether an exported buffer was dropped, which other libraries may still read."""
        self._open_streams: weakref.WeakSet[CudaStream] = weakref.WeakSet()
        # reentrant: `_drop`, a finalizer, takes it after `close`
        self._lock = threading.RLock()
        with RelaxedCapture():
            self._open_device()
        weakref.finalize(
            self, _finalize_device, self.name, self._context, self._idle_pinned, self._resource, self._allocation_stream
        ).atexit = False

    def _open_device(self) -> None:
        """Open the GPU through cuda.core; restores the thread's context."""
        number = self.number
        _, before = driver.cuCtxGetCurrent()
        try:
            board = core.Device(number)
            board.set_current()
            _, self._context = driver.cuCtxGetCurrent()
            self._context_handle = int(self._context)
            _, total = driver.cuDeviceTotalMem(number)
            made = board.properties
            capability = board.compute_capability
            self._properties = Properties(
                name=str(board.name),
                memory_bytes=int(total),
                multiprocessors=int(made.multiprocessor_count),
                compute_capability=(int(capability[0]), int(capability[1])),
            )
            pools = getattr(made, "memory_pools_supported", True)
            self._resource = DeviceMemoryResource(board, DeviceMemoryResourceOptions()) if pools else None
            self._allocation_stream = board.create_stream(options=StreamOptions(nonblocking=True))
        except Exception as error:
            status = getattr(Result, found[0], None) if (found := re.search(r"CUDA_ERROR_\w+", str(error))) else None
            if status == OUT_OF_MEMORY:
                raise MemoryExhausted(
                    f"`{self.name}` has no memory left for a context",
                    hint="`nvidia-smi` shows the processes that use it",
                ) from error
            raise SetupError(
                f"`{self.name}` does not open: {library_reason(error)}", hint="`nvidia-smi` shows driver and GPUs"
            ) from error
        finally:
            driver.cuCtxSetCurrent(before)
        self._allocation_stream_handle = int(self._allocation_stream.handle)
        if self._resource is not None:
            kinds, pool = driver.CUmemPool_attribute, self._resource.handle
            # keep freed memory in the pool; never wait for other streams to reuse it
            driver.cuMemPoolSetAttribute(
                pool, kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, driver.cuuint64_t((1 << 64) - 1)
            )
            driver.cuMemPoolSetAttribute(pool, kinds.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0)

    # ---------------------------------------------------------------------------------------- properties

    def properties(self) -> Properties:
        return self._properties

    def memory(self) -> MemoryStats:
        self.check()
        free, total = self._free_bytes()
        held, pinned = self._accounting.usage(), self._pinned_accounting.usage()
        return MemoryStats(
            total, free, held.nbytes, held.peak_bytes, held.count, self.limit_bytes,
            pinned.nbytes, pinned.peak_bytes, pinned.count, held.total_allocations,
        )  # fmt: skip

    def _free_bytes(self) -> tuple[int, int]:
        """Available and total bytes; unused memory of the pool is available."""
        with self.activate(), RelaxedCapture():
            free, total = self.check_status(driver.cuMemGetInfo())
            free = int(free)
            if self._resource is not None:
                kinds, pool = driver.CUmemPool_attribute, self._resource.handle
                (kept,) = self.check_status(
                    driver.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
                )
                (used,) = self.check_status(driver.cuMemPoolGetAttribute(pool, kinds.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
                free += int(kept) - int(used)
        if self.limit_bytes is not None:
            free = min(free, self.limit_bytes - self._accounting.usage().nbytes)
        return free, int(total)

    # ---------------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int, stream: Any = None) -> CudaBuffer:
        self._check_open()
        self._check_no_capture()
        handle = None if stream is None else stream.handle
        if stream is not None and stream.capturing:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")
        if self._dropped or self._pending_frees:
            self._free_completed()
        pointer = self._allocate(nbytes, handle)
        if pointer is None:
            self._reclaim(nbytes)
            pointer = self._allocate(nbytes, handle)
        if pointer is None:
            free, total = self._free_bytes()
            raise memory_exhausted(self.name, nbytes, free, total, self.limit_bytes)
        buffer = CudaBuffer(self, pointer, nbytes, stream)
        buffer.register_finalizer()
        return buffer

    def _allocate(self, nbytes: int, handle: int | None) -> int | None:
        """Allocate and account; the address, or None if memory is exhausted."""
        if self._accounting.reserve(nbytes, self.limit_bytes) is not None:
            return None
        try:
            with self.activate(), RelaxedCapture():
                size = max(nbytes, 1)
                if self._resource is None:
                    status, pointer = driver.cuMemAlloc(size)
                else:
                    at = self._allocation_stream_handle if handle is None else handle
                    status, pointer = driver.cuMemAllocFromPoolAsync(size, self._resource.handle, at)
                if status == OUT_OF_MEMORY:
                    self._accounting.cancel(nbytes)
                    return None
                self.check_status((status,))
                if self._resource is not None and handle is None:
                    # now usable on any stream
                    self.check_status(driver.cuStreamSynchronize(self._allocation_stream_handle))
        except BaseException:
            self._accounting.cancel(nbytes)
            raise
        self._accounting.commit(nbytes)
        return int(pointer)

    def _reclaim(self, nbytes: int) -> None:
        """Free all dropped memory after synchronizing all streams, instead of failing."""
        self._synchronize_and_free()
        if self.limit_bytes is None or self._accounting.usage().nbytes + nbytes <= self.limit_bytes:  # the GPU is full
            self._wait_for_streams()  # completes stream-ordered frees
            self._trim()

    def pinned(self, nbytes: int) -> CudaHostBuffer:
        self._check_open()
        self._check_no_capture()
        size = size_class(check_size(nbytes))
        with self._lock:
            idle = self._idle_pinned.get(size)
            pointer = idle.pop() if idle else None
        if pointer is None:
            with self.activate(), RelaxedCapture():
                status, raw = driver.cuMemHostAlloc(size, _PORTABLE)
                if status == OUT_OF_MEMORY and self._synchronize_and_free() + self._trim_pinned():
                    status, raw = driver.cuMemHostAlloc(size, _PORTABLE)
            if status == OUT_OF_MEMORY:
                raise MemoryExhausted(
                    f"the host has no {nbytes} bytes of pinned memory left for `{self.name}`",
                    hint="a smaller batch, or `ulimit -l` raised where it is set",
                )
            self.check_status((status,))
            pointer = int(raw)
        self._pinned_accounting.charge(nbytes)
        buffer = CudaHostBuffer(self, pointer, nbytes)
        self._pinned_ranges.add(pointer, size, weakref.ref(buffer))
        buffer.register_finalizer()
        return buffer

    def borrow(self, array: Any, stream: Any) -> CudaBuffer:
        self._check_open()
        if stream.capturing:
            raise UsageError("an array was borrowed while a graph is captured", hint="borrow it before the capture")
        if type(array) is dlpack.DeviceArray and array.buffer.device is self:  # type: ignore[attr-defined]
            if array.buffer.external_streams:  # who was lent it may have written to it since
                stream.wait_for_external(array.buffer.external_streams)
            return BorrowedBuffer(self, array.buffer.pointer, array.nbytes, array)
        library = foreign.library_of(type(array))
        if library is not None:
            number = library.index_of(array)
            if self.number != number >= 0 and array.nbytes:
                raise self._wrong_device_error()
            if number >= 0 and (pointer := library.reader(number, stream.order_after)(array)) is not None:
                return BorrowedBuffer(self, pointer, array.nbytes, array)
        with self.activate(), RelaxedCapture():
            lent = dlpack.import_array(array, stream.handle)
            number = self._device_of(lent.pointer) if lent.device_id is None else lent.device_id
            if lent.device_type != dlpack.CUDA or (number != self.number and lent.nbytes):
                raise self._wrong_device_error()
            if lent.stream is not None:
                stream.order_after(lent.stream)
        return BorrowedBuffer(self, lent.pointer, lent.nbytes, lent)

    def reader(self, kind: type, stream: Any) -> Callable[[Any], int | None]:
        library = foreign.library_of(kind)
        return library.reader(self.number, stream.order_after) if library is not None else lambda array: None

    def _wrong_device_error(self) -> UsageError:
        return UsageError(f"an array of another device was passed to `{self.name}`", hint="copy it there first")

    def _device_of(self, pointer: int) -> int:
        """The GPU index of an address; -1 if unknown to the driver."""
        kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        status, found = driver.cuPointerGetAttribute(kind, pointer)
        return int(found) if status == SUCCESS else -1

    def _free(self, buffer: CudaBuffer) -> None:
        """Free a buffer, in stream order if it has a stream; never raises."""
        pointer, nbytes = buffer._pointer, buffer._nbytes
        if buffer.on_host:
            self._free_pinned(pointer, nbytes)
            return
        stream = buffer.stream
        if stream is not None and (stream.capturing or self._lost):
            self._dropped.append((False, pointer, nbytes))
            return
        ordered = stream is not None and not stream._closed
        at = stream._handle if ordered and stream is not None else self._allocation_stream_handle
        self._free_device(pointer, nbytes, at)

    def _free_device(self, pointer: int, nbytes: int, at: int) -> None:
        self._accounting.release(nbytes)
        if self._lost:
            return
        try:
            with self.activate(), RelaxedCapture():
                if self._resource is None:
                    self.check_status(driver.cuMemFree(pointer))
                else:
                    self.check_status(driver.cuMemFreeAsync(pointer, at))
        except Exception as error:  # never raises
            log.warning("`%s` could not free %d bytes: %s", self.name, nbytes, library_reason(error))

    def _free_pinned(self, pointer: int, nbytes: int) -> None:
        self._pinned_ranges.remove(pointer)
        self._pinned_accounting.release(nbytes)
        size = size_class(nbytes)
        with self._lock:
            if not self._closed:
                self._idle_pinned.setdefault(size, []).append(pointer)
                return
        _free_pinned_memory(self.name, {size: [pointer]})

    def _on_drop(self, dropped: DroppedBuffer, exported: list[bool]) -> None:
        """Finalizer of an open buffer. Work may still use it: `_free_completed` or `_synchronize_and_free` frees it."""
        if exported:
            self._dropped_exported = True
        self._dropped.append(dropped)
        if not exported and not self._warned:
            self._warned = True
            log.warning(
                "a buffer of %d bytes of `%s` was dropped without `close`; it is freed when all streams are done with "
                "their present work (logged once)", dropped[2], self.name,
            )  # fmt: skip
        if self._closed and not self._lost:  # no later call would free it
            try:
                self._synchronize_and_free()
            except Exception as error:  # in a finaliser
                log.warning("`%s` could not free %d bytes: %s", self.name, dropped[2], library_reason(error))

    def _free_completed(self) -> None:
        """Free dropped buffers no longer in use, without waiting, by an event in each stream."""
        with self.activate(), RelaxedCapture():
            if left := _drain(self._pending_frees, 1):
                events, doomed = left[0]
                if not all(event.is_done for event in events):
                    self._pending_frees.appendleft(left[0])
                    return
                self._free_dropped(doomed)
            if doomed := _drain(self._dropped):
                marks = [stream.record_marker() for stream in self._list_streams()]
                if self._dropped_exported:
                    marks.append(self._mark_default_stream())
                if None in marks:  # a stream in capture may have earlier work
                    self._dropped.extend(doomed)
                else:
                    self._pending_frees.append(([event for mark in marks for event in mark or ()], doomed))

    def _mark_default_stream(self) -> list[Any] | None:
        """An event on the default stream, for other libraries' work; None during a capture that depends on it."""
        try:
            return [core.Stream.from_handle(DEFAULT_STREAM).record(options=UNTIMED_EVENT)]
        except Exception:  # a capture depends on the default stream
            return None

    def _wait_for_default_stream(self) -> bool:
        """Synchronize the default stream, for other libraries' work; False during a capture that depends on it."""
        with self.activate(), RelaxedCapture():
            (status,) = driver.cuStreamSynchronize(DEFAULT_STREAM)
        if status != SUCCESS and str(status.name).startswith(CAPTURE_ERROR_PREFIX):
            return False
        self.check_status((status,))
        return True

    def _synchronize_and_free(self) -> int:
        """Synchronize all streams and free dropped buffers; returns their number."""
        doomed = [item for _, items in _drain(self._pending_frees) for item in items] + _drain(self._dropped)
        if not doomed:
            return 0
        try:
            done = self._wait_for_streams() and (not self._dropped_exported or self._wait_for_default_stream())
        except BaseException:
            self._dropped.extend(doomed)
            raise
        if not done:
            self._dropped.extend(doomed)
            return 0
        self._free_dropped(doomed)
        return len(doomed)

    def _free_dropped(self, doomed: list[DroppedBuffer]) -> None:
        for pinned, pointer, nbytes in doomed:
            if pinned:
                self._free_pinned(pointer, nbytes)
            else:
                self._free_device(pointer, nbytes, self._allocation_stream_handle)

    def _trim(self) -> None:
        """Return unused pool memory to the GPU."""
        if self._resource is not None:
            with self.activate(), RelaxedCapture():
                self.check_status(driver.cuStreamSynchronize(self._allocation_stream_handle))
                self.check_status(driver.cuMemPoolTrimTo(self._resource.handle, 0))

    def _trim_pinned(self) -> int:
        with self._lock:
            idle = dict(self._idle_pinned)
            self._idle_pinned.clear()
        with self.activate():
            return _free_pinned_memory(self.name, idle)

    # ---------------------------------------------------------------------------------------- work

    def stream(self) -> CudaStream:
        self._check_open()
        with self.activate(), RelaxedCapture():
            board = core.Device(self.number)
            board.set_current()  # cuda.core devices are per thread
            made = CudaStream(self, board.create_stream(options=StreamOptions(nonblocking=True)))
        with self._lock:
            self._open_streams.add(made)
        return made

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        pointer = self._checked_pointer(buffer, stream)
        source = upload_bytes(array, buffer)
        if not (nbytes := source.nbytes):
            return
        start = address_of(source)
        if stream.capturing:
            stream.retain_for_graph(buffer, *self._pinned_at(start))
        with self.activate():
            self.check_status(driver.cuMemcpyHtoDAsync(pointer, start, nbytes, stream.handle))

    def gather(self, arrays: Sequence[Any], buffer: Any, stream: Any) -> bool:
        pointer = self._checked_pointer(buffer, stream)
        sizes = [array.nbytes for array in arrays]
        check_range(0, sum(sizes), buffer.nbytes)
        if stream.capturing:
            return False
        with self.activate():
            targets, sources = [*accumulate(sizes, initial=pointer)][:-1], [address_of(array) for array in arrays]
            return copy_all(targets, sources, sizes, stream.handle) == 0

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        pointer = self._checked_pointer(buffer, stream)
        target = download_bytes(array, buffer)
        if not (nbytes := target.nbytes):
            return
        start = address_of(target)
        if stream.capturing:
            stream.retain_for_graph(buffer, *self._pinned_at(start))
        with self.activate():
            self.check_status(driver.cuMemcpyDtoHAsync(start, pointer, nbytes, stream.handle))

    def copy(self, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        left, right = self._checked_pointer(source, stream), self._checked_pointer(target, stream)
        if not 0 <= nbytes <= source.nbytes or nbytes > target.nbytes:
            check_range(0, nbytes, min(source.nbytes, target.nbytes))
        if not nbytes:
            return
        stream.retain_for_graph(source, target)
        handle = stream.handle
        if copy_async(right, left, nbytes, handle) == 0:
            return
        with self.activate():
            self.check_status(driver.cuMemcpyAsync(right, left, nbytes, handle))

    def copy_from(self, pointer: int, target: Any, stream: Any) -> None:
        """Fill the buffer from an address on this GPU that another library keeps until the copy is done; stream-ordered."""
        self.copy(BorrowedBuffer(self, pointer, target.nbytes, None), target, target.nbytes, stream)

    def synchronize(self) -> None:
        self._check_open()
        self._check_no_capture()
        self._wait_for_streams()
        self._synchronize_and_free()

    def _wait_for_streams(self) -> bool:
        """Synchronize all streams except those in capture; whether there were none in capture."""
        with self.activate():
            settled = [stream.synchronize_unless_captured() for stream in self._list_streams()]
        return all(settled)

    def _list_streams(self) -> list[CudaStream]:
        with self._lock:
            return list(self._open_streams)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self._lost:
                self._synchronize_and_free()
                self._trim_pinned()
                self._trim()
        except Exception as error:  # never raises
            log.warning("`%s` was closed with work that failed: %s", self.name, library_reason(error))
        held, pinned = self._accounting.usage(), self._pinned_accounting.usage()
        if (held.count or pinned.count) and not self._lost:
            log.warning(
                "`%s` was closed with %d buffers (%d bytes) still allocated",
                self.name, held.count + pinned.count, held.nbytes + pinned.nbytes,
            )  # fmt: skip

    # ---------------------------------------------------------------------------------------- checks and errors

    def activate(self, allow_lost: bool = False) -> ContextGuard:
        """Make this device's context current; raises `DeviceLost` unless `lost` is allowed."""
        if not allow_lost:
            self.check()
        return ContextGuard(self)

    def check_status(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """The driver call's results without the status; raises unless it succeeded."""
        if result[0] != SUCCESS:
            raise self._translate_status(result[0])
        return result[1:]

    def _translate_status(self, status: Any) -> TrtEngineError:
        name = str(getattr(status, "name", status))
        text = status_text(status) if isinstance(status, Result) else str(status)
        if status in FATAL:
            self._lost = self._lost or text
            return self._lost_error()
        if status == OUT_OF_MEMORY:
            return MemoryExhausted(f"`{self.name}` is out of memory: {text}", hint="a smaller batch, or fewer contexts")
        if name.startswith(CAPTURE_ERROR_PREFIX):
            return UsageError(
                f"the work cannot be captured in a graph: {text}",
                hint="run it once before the capture, or without a graph",
            )
        return SetupError(
            f"`{self.name}` failed: {text}", hint="`trt-engine doctor`; `nvidia-smi` shows the GPU's state"
        )

    def _lost_error(self) -> DeviceLost:
        return DeviceLost(f"`{self.name}` is lost: {self._lost}", hint="close it and start the process again")

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost_error()

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise UsageError(f"the device `{self.name}` is closed", hint="open it again")

    def _check_no_capture(self) -> None:
        if threading.get_ident() in self._capturing_threads:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")

    def _checked_pointer(self, buffer: Any, stream: Any) -> int:
        """The buffer's address; raises unless it is open, on this device and usable on that stream."""
        if self._lost is not None:
            raise self._lost_error()
        if not isinstance(buffer, CudaBuffer) or buffer.device is not self:
            raise UsageError(f"a buffer of another device was used on `{self.name}`", hint="allocate it there")
        if buffer.stream is not None and buffer.stream is not stream:
            raise UsageError(
                "a buffer allocated for another stream was used", hint="allocate it without naming a stream"
            )
        return buffer.pointer

    def is_pinned(self, array: Any) -> bool:
        if not array.nbytes:
            return True
        try:
            with self.activate():
                self._pinned_at(address_of(as_bytes(array)))
        except UsageError:
            return False
        return True

    def _pinned_at(self, address: int) -> tuple[CudaHostBuffer, ...]:
        """The pinned buffer at that address, empty if another library pinned it; `UsageError` for pageable memory."""
        if (found := self._pinned_ranges.find(address)) is not None:
            buffer = found[1]()
            return () if buffer is None else (buffer,)
        kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, memory = driver.cuPointerGetAttribute(kind, address)
        if status != SUCCESS or int(memory) != int(_HOST):
            raise unpinned_error()
        return ()

    def _destroy_graph(self, handle: Any) -> None:
        if not self._lost:
            with RelaxedCapture():
                (status,) = driver.cuGraphExecDestroy(handle)
            if status != SUCCESS:
                log.debug("a graph of `%s` could not be destroyed: %s", self.name, status_text(status))


def _drain(items: deque[Item], most: int | None = None) -> list[Item]:
    """Pop up to `most` items; safe with concurrent pops."""
    taken: list[Item] = []
    while most is None or len(taken) < most:
        try:
            taken.append(items.popleft())
        except IndexError:
            break
    return taken


def _finalize_device(name: str, context: Any, idle: dict[int, list[int]], resource: Any, home: Any) -> None:
    """Finalizer of a device: free its own resources. Never raises."""
    (status,) = driver.cuCtxPushCurrent(context)
    try:
        with RelaxedCapture():
            _free_pinned_memory(name, idle)
            for item in (resource, home):
                if item is not None:
                    item.close()
    except Exception as error:  # in a finaliser
        log.debug("`%s` could not be released: %s", name, library_reason(error))
    finally:
        if status == SUCCESS:
            driver.cuCtxPopCurrent()


def _free_pinned_memory(name: str, idle: dict[int, list[int]]) -> int:
    """Free pinned memory; returns the number of blocks. Never raises."""
    count = 0
    with RelaxedCapture():
        for pointer in (pointer for pointers in idle.values() for pointer in pointers):
            (status,) = driver.cuMemFreeHost(pointer)
            count += 1
            if status != SUCCESS:
                log.debug("`%s` could not free pinned memory: %s", name, status_text(status))
    return count
