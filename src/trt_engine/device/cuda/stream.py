"""CUDA streams and events: ordering, timing, capture."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Collection
from ctypes import byref, c_int
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from cuda.core import EventOptions

from trt_engine.device import Event, Graph, Stream, dlpack
from trt_engine.device.cuda.driver_calls import (
    RELAXED_MODE,
    SUCCESS,
    RelaxedCapture,
    exchange_mode,
    launch_graph,
    record_event,
    synchronize_stream,
    wait_event,
)
from trt_engine.device.cuda.memory import CudaBuffer
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.format import library_reason

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice


log = logging.getLogger(__name__)


# cuda.core before 1.0 calls it `enable_timing`
_TIMING_OPTION = next(item.name for item in fields(EventOptions) if item.name in ("timing_enabled", "enable_timing"))
TIMED_EVENT = EventOptions(**{_TIMING_OPTION: True})
UNTIMED_EVENT = EventOptions()
DEFAULT_STREAM = dlpack.DEFAULT_STREAM
_RELAXED = int(RELAXED_MODE)
_DEFAULT_STREAMS = frozenset((DEFAULT_STREAM, 2))
"""Legacy and per-thread default stream; the legacy one synchronizes with every per-thread one."""


class CudaEvent:
    """A CUDA event."""

    def __init__(self, device: CudaDevice, event: Any, captured: bool) -> None:
        self.device = device
        self.event = event
        self._captured = captured

    def done(self) -> bool:
        self.check()
        with self.device.activate(), RelaxedCapture():
            return bool(self.event.is_done)

    def synchronize(self) -> None:
        self.check()
        with self.device.activate(), RelaxedCapture():
            self.event.sync()

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, CudaEvent) or since.device is not self.device:
            raise UsageError("two events of different devices were compared", hint="record both on one device")
        since.synchronize()
        self.synchronize()
        with self.device.activate(), RelaxedCapture():
            return float(self.event - since.event)

    def check(self) -> None:
        self.device.check()
        if self._captured:
            raise UsageError("an event of a capture has no time", hint="record it before and after the replay")


class CudaStream:
    """A non-blocking CUDA stream."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self.device = device
        self._stream = stream
        self._handle = int(stream.handle)
        self._graph_buffers: list[CudaBuffer] | None = None
        self._closed = False
        self._users = 0
        self._marker: Any = None
        """The event that orders this stream and those of other libraries, recorded again and again."""
        self._address = ctypes.c_void_p(self._handle)
        self._marker_address: ctypes.c_void_p | None = None
        """Its handle; None before it is made and on a closed stream."""
        self.capture_lock = threading.RLock()
        """Held by threads that synchronize or record an event, to exclude the start of a capture."""

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer."""
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")
        return self._handle

    @property
    def capturing(self) -> bool:
        return self._graph_buffers is not None

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        if self._graph_buffers is None and not self._closed and self.device._lost is None:
            mode = byref(c_int(_RELAXED))  # see `RelaxedCapture`
            if exchange_mode(mode) == 0:
                try:
                    status = synchronize_stream(self._address)
                finally:
                    exchange_mode(mode)
                if status == 0:
                    return
        handle = self.handle
        if self.capturing:
            raise UsageError("a stream cannot be synchronized during its capture", hint="synchronize after the capture")
        with self.device.activate(), RelaxedCapture():
            self.device.check_status(driver.cuStreamSynchronize(handle))

    def record(self) -> CudaEvent:
        _ = self.handle
        with self.device.activate():
            return CudaEvent(self.device, self._stream.record(options=TIMED_EVENT), self.capturing)

    def record_marker(self) -> list[Any] | None:
        """An event after the enqueued work, empty for a closed stream, None during a capture. Thread-safe."""
        with self.capture_lock:
            if self._closed:
                return []
            return None if self._is_captured() else [self._stream.record(options=UNTIMED_EVENT)]

    def synchronize_unless_captured(self) -> bool:
        """Wait for the enqueued work; returns False immediately during a capture. Thread-safe."""
        with self.capture_lock:
            if self._closed:
                return True
            if self._is_captured():
                return False
            with RelaxedCapture():
                self.device.check_status(driver.cuStreamSynchronize(self._handle))
            return True

    def _is_captured(self) -> bool:
        """Whether it is in capture, here or by another library."""
        if self.capturing:
            return True
        (status,) = self.device.check_status(driver.cuStreamIsCapturing(self._handle))
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def wait(self, event: Event) -> None:
        _ = self.handle
        if not isinstance(event, CudaEvent) or event.device is not self.device:
            raise UsageError("an event of another device was waited for", hint="record it on this device")
        if self.capturing:
            raise UsageError("a stream cannot wait for an event while it is captured", hint="wait before the capture")
        event.check()
        with self.device.activate():
            self._stream.wait(event.event)

    def wait_for_external(self, external_streams: Collection[int]) -> bool:
        if _DEFAULT_STREAMS.isdisjoint(external_streams):
            return True
        try:
            self.order_after(DEFAULT_STREAM)
        except TrtEngineError:  # a capture that depends on the default stream forbids it
            return False
        return True

    def order_after(self, handle: int) -> None:
        if handle == self._handle:
            return
        event = self._marker_address if self._graph_buffers is None else None
        if event and record_event(event, handle or DEFAULT_STREAM) == 0 and wait_event(self._address, event, 0) == 0:
            return
        self._order(self._handle, handle or DEFAULT_STREAM)

    def order_before(self, handle: int) -> None:
        if handle == self._handle:
            return
        later, event = handle or DEFAULT_STREAM, self._marker_address if self._graph_buffers is None else None
        # a default stream is that of the thread's current context: recording on another one fails, waiting there does not
        direct = event and later not in _DEFAULT_STREAMS
        if direct and record_event(event, self._address) == 0 and wait_event(later, event, 0) == 0:
            return
        self._order(later, self._handle)

    def _order(self, later: int, earlier: int) -> None:
        """Order two streams by the marker; `UsageError` where a capture forbids it."""
        _ = self.handle  # of an open stream
        if self.capturing:
            raise UsageError("streams cannot be ordered during a capture", hint="order them before the capture")
        with self.device.activate(), RelaxedCapture():
            if self._marker is None:
                self._marker = self._stream.record(options=UNTIMED_EVENT)
                self._marker_address = ctypes.c_void_p(int(self._marker.handle))
            marker = int(self._marker.handle)
            self.device.check_status(driver.cuEventRecord(marker, earlier))
            self.device.check_status(driver.cuStreamWaitEvent(later, marker, 0))

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        handle, device = self.handle, self.device
        if self.capturing:
            raise UsageError("a capture is under way on this stream", hint="one capture at a time")
        local = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with device.activate():
            touched: list[CudaBuffer] = []
            with self.capture_lock:
                device.check_status(driver.cuStreamBeginCapture(handle, local))
                self._graph_buffers = touched
            device._capturing_threads.add(threading.get_ident())
            try:
                work(self)
            except BaseException:
                discard_capture(driver.cuStreamEndCapture(handle))
                raise
            else:
                ended = driver.cuStreamEndCapture(handle)
            finally:
                self._graph_buffers = None
                device._capturing_threads.discard(threading.get_ident())
            if ended[0] != SUCCESS:
                discard_capture(ended)
                device.check_status(ended[:1])
            with RelaxedCapture():
                try:
                    (made,) = device.check_status(driver.cuGraphInstantiate(ended[1], 0))
                finally:
                    discard_capture(ended)
                graph = CudaGraph(device, made, tuple(touched))
                device.check_status(driver.cuGraphUpload(made, handle))
            return graph

    def retain_for_graph(self, *buffers: CudaBuffer) -> None:
        """Keep buffers with the graph in capture, if any."""
        if self._graph_buffers is not None:
            self._graph_buffers.extend(buffers)

    def retain(self) -> None:
        """Keep the native stream for a library that uses it until `release`; `close` then ends only its use here."""
        with self.capture_lock:
            self._users += 1

    def release(self) -> None:
        """End a use by a library; destroys the native stream of a closed one. Never raises."""
        with self.capture_lock:
            self._users -= 1
            if self._closed:
                self._destroy()

    def _destroy(self) -> None:
        if self._users:
            return
        try:
            with self.device.activate(allow_lost=True):
                self._marker = None
                self._stream.close()
        except Exception as error:  # never raises
            log.debug("a stream of `%s` was not given back: %s", self.device.name, library_reason(error))

    def close(self) -> None:
        with self.capture_lock:
            if self._closed:
                return
            try:
                with self.device.activate():
                    self.synchronize_unless_captured()
            except Exception as error:  # never raises
                log.warning(
                    "a stream of `%s` was closed with work that failed: %s", self.device.name, library_reason(error)
                )
            self._closed, self._marker_address = True, None
            self._destroy()


class CudaGraph:
    """An instantiated CUDA graph."""

    def __init__(self, device: CudaDevice, handle: Any, buffers: tuple[CudaBuffer, ...]) -> None:
        self._device = device
        self._handle, self._address = handle, int(handle)
        self._buffers = buffers
        self._finalizer = weakref.finalize(self, device._destroy_graph, handle)
        self._finalizer.atexit = False

    def replay(self, stream: Stream) -> None:
        if not self._finalizer.alive:
            raise UsageError("a closed graph was replayed", hint="capture another")
        if getattr(stream, "device", None) is not self._device:
            raise UsageError(
                f"a graph of `{self._device.name}` was replayed on another device", hint="capture it there"
            )
        for buffer in self._buffers:
            if buffer.closed:
                raise UsageError("a graph holds the address of a freed buffer", hint="capture it again")
        if self._device._lost is None and launch_graph(self._address, stream.handle) == 0:
            return
        with self._device.activate():
            self._device.check_status(driver.cuGraphLaunch(self._handle, stream.handle))

    def launcher(self, stream: Stream) -> Callable[[], None]:
        graph, handle, replay = ctypes.c_void_p(self._address), ctypes.c_void_p(stream.handle), self.replay

        def run() -> None:
            if launch_graph(graph, handle):
                replay(stream)  # again, with its errors

        return run

    def close(self) -> None:
        self._buffers = ()
        self._finalizer()


def discard_capture(ended: tuple[Any, ...]) -> None:
    """Destroy the graph returned by an ended capture, if any."""
    if len(ended) > 1 and ended[1] is not None and int(ended[1]):
        with RelaxedCapture():
            driver.cuGraphDestroy(ended[1])
