"""The host as a device."""

from __future__ import annotations

import numpy as np
import pytest

from trt_engine.device import open_device
from trt_engine.device.fake import FakeDevice
from trt_engine.device.host import HostDevice
from trt_engine.errors import MemoryExhausted, UsageError


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000])
def test_memory_begins_on_a_cache_line(nbytes: int) -> None:
    buffer = HostDevice().allocate(nbytes)
    assert buffer.pointer % 64 == 0
    assert buffer.memory().nbytes == buffer.nbytes == nbytes


def test_a_buffer_holds_what_was_put_in() -> None:
    device = open_device("cpu")
    stream, buffer = device.stream(), device.allocate(24)
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.empty((2, 3), np.float32)
    device.upload(x, buffer, stream)
    device.download(buffer, y, stream)
    stream.synchronize()
    assert np.array_equal(x, y)


def test_a_scalar_travels_too() -> None:
    device = HostDevice()
    stream, buffer, y = device.stream(), device.allocate(4), np.empty((), np.float32)
    device.upload(np.array(3, np.float32), buffer, stream)
    device.download(buffer, y, stream)
    assert y == 3


def test_a_closed_buffer_is_not_used_again() -> None:
    device = HostDevice()
    buffer = device.allocate(4)
    buffer.close()
    buffer.close()
    with pytest.raises(UsageError, match="closed buffer"):
        device.upload(np.zeros(4, np.uint8), buffer, device.stream())


def test_memory_the_host_does_not_have_is_an_error_with_a_number() -> None:
    with pytest.raises(MemoryExhausted, match=str(1 << 60)):
        HostDevice().allocate(1 << 60)


def test_a_copy_that_does_not_fit_is_refused() -> None:
    device = HostDevice()
    buffer, stream = device.allocate(4), device.stream()
    with pytest.raises(UsageError, match="8 bytes do not fit a buffer of 4"):
        device.upload(np.zeros(8, np.uint8), buffer, stream)
    with pytest.raises(UsageError, match="8 bytes cannot be read from a buffer of 4"):
        device.download(buffer, np.zeros(8, np.uint8), stream)


def test_events_are_in_order() -> None:
    stream = HostDevice().stream()
    first, second = stream.record(), stream.record()
    assert second.elapsed_ms(first) >= 0


def test_a_graph_is_recorded_and_not_run_until_it_is_replayed() -> None:
    stream, done = HostDevice().stream(), []
    graph = stream.capture(lambda stream: stream.enqueue(lambda: done.append(1)))
    assert done == []
    graph.replay(stream)
    graph.replay(stream)
    assert done == [1, 1]
    graph.close()
    with pytest.raises(UsageError, match="closed graph"):
        graph.replay(stream)


def test_a_failed_capture_leaves_the_stream_clean() -> None:
    stream, done = HostDevice().stream(), []
    with pytest.raises(ZeroDivisionError):
        stream.capture(lambda stream: 1 / 0)
    stream.enqueue(lambda: done.append(1))
    assert done == [1]


def test_a_stream_is_not_waited_for_during_its_capture() -> None:
    with pytest.raises(UsageError, match="while it is captured"):
        HostDevice().stream().capture(lambda stream: stream.synchronize())


def test_graphs_and_events_stay_on_their_device() -> None:
    graph = HostDevice().stream().capture(lambda stream: None)
    with pytest.raises(UsageError, match="another device"):
        graph.replay(FakeDevice().stream())
    with pytest.raises(UsageError):
        HostDevice().stream().record().elapsed_ms(FakeDevice().stream().record())


def test_a_closed_stream_refuses() -> None:
    stream = HostDevice().stream()
    stream.close()
    stream.close()
    with pytest.raises(UsageError, match="closed stream"):
        stream.record()
