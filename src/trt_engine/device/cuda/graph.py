"""Captured CUDA graphs and the buffers they keep alive."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from trt_engine.device import Stream
from trt_engine.device.cuda.driver_calls import RelaxedCapture, launch_graph
from trt_engine.device.cuda.memory import CudaBuffer
from trt_engine.errors import UsageError

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice


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
