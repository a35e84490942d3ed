"""The fake device keeps the rules of a real one."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from trt_engine.device import open_device
from trt_engine.device.fake import FakeDevice
from trt_engine.device.host import HostDevice
from trt_engine.errors import MemoryExhausted, UsageError


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(memory_bytes=1000)


def read(device: FakeDevice, buffer: object, nbytes: int) -> list[int]:
    out = np.zeros(nbytes, np.uint8)
    stream = device.stream()
    device.download(buffer, out, stream)
    stream.synchronize()
    return out.tolist()


def test_fresh_memory_is_not_zero(device: FakeDevice) -> None:
    assert read(device, device.allocate(3), 3) == [0xCD] * 3


def test_nothing_happens_before_synchronize(device: FakeDevice) -> None:
    stream, buffer, out = device.stream(), device.allocate(4), np.zeros(4, np.uint8)
    device.upload(np.array([1, 2, 3, 4], np.uint8), buffer, stream)
    device.download(buffer, out, stream)
    assert out.tolist() == [0, 0, 0, 0]
    stream.synchronize()
    assert out.tolist() == [1, 2, 3, 4]


def test_an_ordinary_array_is_free_again_when_upload_returns_and_a_pinned_one_is_not(device: FakeDevice) -> None:
    stream, buffer, pinned = device.stream(), device.allocate(2), device.pinned(1)
    x, y = np.array([1], np.uint8), pinned.array()
    y[0] = 1
    device.upload(x, buffer.view(0, 1), stream)
    device.upload(y, buffer.view(1, 1), stream)
    x[0] = y[0] = 9
    stream.synchronize()
    assert read(device, buffer, 2) == [1, 9]


def test_pinned_memory_given_back_before_its_copy_shows(device: FakeDevice) -> None:
    stream, buffer, pinned = device.stream(), device.allocate(1), device.pinned(1)
    device.upload(pinned.array(), buffer, stream)
    pinned.close()
    with pytest.raises(UsageError, match="freed buffer"):
        stream.synchronize()


def test_a_capture_refuses_to_copy_ordinary_memory(device: FakeDevice) -> None:
    stream, buffer, x = device.stream(), device.allocate(1), np.zeros(1, np.uint8)
    with pytest.raises(UsageError, match="ordinary array"):
        stream.capture(lambda stream: device.upload(x, buffer, stream))
    with pytest.raises(UsageError, match="ordinary array"):
        stream.capture(lambda stream: device.download(buffer, x, stream))


def test_streams_do_not_wait_for_each_other(device: FakeDevice) -> None:
    one, other, done = device.stream(), device.stream(), []
    one.enqueue(lambda: done.append("one"))
    other.enqueue(lambda: done.append("other"))
    other.synchronize()
    assert done == ["other"]


def test_a_freed_buffer_is_not_used_again(device: FakeDevice) -> None:
    buffer, stream = device.allocate(4), device.stream()
    buffer.close()
    buffer.close()
    with pytest.raises(UsageError, match="freed buffer"):
        device.upload(np.zeros(4, np.uint8), buffer, stream)
    with pytest.raises(UsageError, match="freed buffer"):
        _ = buffer.pointer


def test_a_buffer_freed_before_its_work_is_done_shows(device: FakeDevice) -> None:
    buffer, stream = device.allocate(4), device.stream()
    device.upload(np.zeros(4, np.uint8), buffer, stream)
    buffer.close()
    with pytest.raises(UsageError, match="freed buffer"):
        stream.synchronize()
    stream.synchronize()  # what failed is gone


def test_failed_work_takes_the_work_behind_it_with_it(device: FakeDevice) -> None:
    stream, done = device.stream(), []

    def fail() -> None:
        raise RuntimeError("illegal address")

    stream.enqueue(fail)
    stream.enqueue(lambda: done.append(1))
    with pytest.raises(RuntimeError):
        stream.synchronize()
    stream.synchronize()
    assert done == []


def test_memory_ends_and_says_what_was_asked(device: FakeDevice) -> None:
    first = device.allocate(600)
    with pytest.raises(MemoryExhausted, match="cannot allocate 500 bytes: 400 of 1000 are free"):
        device.allocate(500)
    first.close()
    device.allocate(1000)


def test_what_is_allocated_can_be_counted(device: FakeDevice) -> None:
    first, second = device.allocate(100), device.allocate(200)
    assert (device.allocated_count, device.allocated_bytes) == (2, 300)
    first.close()
    first.close()
    assert (device.allocated_count, device.allocated_bytes, device.peak_bytes) == (1, 200, 300)
    second.close()
    assert device.allocated_bytes == 0


def test_counting_is_right_with_many_threads() -> None:
    device = FakeDevice()

    def churn() -> None:
        for _ in range(200):
            device.allocate(8).close()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (device.allocated_count, device.allocated_bytes) == (0, 0)


def test_a_leak_is_said_when_the_device_closes(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    device.allocate(10)
    with caplog.at_level(logging.WARNING):
        device.close()
        device.close()
    assert [record.getMessage() for record in caplog.records] == [
        "`fake:0` was closed with 1 buffers (10 bytes) still allocated"
    ]
    with pytest.raises(UsageError, match="is closed"):
        device.allocate(1)


def test_undone_work_is_said_when_its_stream_closes(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    stream = device.stream()
    stream.enqueue(lambda: None)
    stream.close()
    stream.close()
    assert "1 pieces of work undone" in caplog.text
    with pytest.raises(UsageError, match="closed stream"):
        stream.enqueue(lambda: None)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(5, np.uint8), "5 bytes"),
        (np.zeros((4, 4), np.uint8)[:, :1], "strided"),
        (np.array(["a"], dtype=object), "object"),
        ([1, 2], "list"),
    ],
)
def test_what_cannot_be_copied_as_it_lies_is_refused(device: FakeDevice, array: object, says: str) -> None:
    buffer, stream = device.allocate(4), device.stream()
    for copy in (lambda: device.upload(array, buffer, stream), lambda: device.download(buffer, array, stream)):
        with pytest.raises(UsageError, match=says):
            copy()


def test_a_buffer_of_another_device_is_refused(device: FakeDevice) -> None:
    for foreign in (FakeDevice(1).allocate(4), HostDevice().allocate(4)):
        with pytest.raises(UsageError, match="another device"):
            device.upload(np.zeros(4, np.uint8), foreign, device.stream())


# ------------------------------------------------------------------------------------------------ graphs


def test_a_graph_runs_nothing_when_captured_and_again_at_every_replay(device: FakeDevice) -> None:
    stream, buffer = device.stream(), device.allocate(1)
    x, out = device.pinned(1).array(), device.pinned(1).array()
    out[0] = 0

    def work(stream: object) -> None:
        device.upload(x, buffer, stream)
        device.download(buffer, out, stream)

    graph = stream.capture(work)
    stream.synchronize()
    assert out[0] == 0
    for value in (5, 6):
        x[0] = value
        graph.replay(stream)
        stream.synchronize()
        assert out[0] == value


def test_a_graph_refuses_when_a_buffer_it_holds_was_freed(device: FakeDevice) -> None:
    stream, buffer, device_x = device.stream(), device.allocate(1), device.pinned(1).array()
    graph = stream.capture(lambda stream: device.upload(device_x, buffer, stream))
    buffer.close()
    with pytest.raises(UsageError, match="freed buffer"):
        graph.replay(stream)


def test_a_closed_graph_refuses(device: FakeDevice) -> None:
    stream = device.stream()
    graph = stream.capture(lambda stream: None)
    graph.close()
    graph.close()
    with pytest.raises(UsageError, match="closed graph"):
        graph.replay(stream)


def test_nothing_is_allocated_during_a_capture(device: FakeDevice) -> None:
    stream = device.stream()
    with pytest.raises(UsageError, match="while a graph is captured"):
        stream.capture(lambda stream: device.allocate(1))
    device.allocate(1)


def test_nothing_is_waited_for_during_a_capture(device: FakeDevice) -> None:
    with pytest.raises(UsageError, match="while it is captured"):
        device.stream().capture(lambda stream: stream.synchronize())


def test_a_failed_capture_leaves_the_stream_clean(device: FakeDevice) -> None:
    stream, done = device.stream(), []
    stream.enqueue(lambda: done.append("before"))

    def fail(stream: object) -> None:
        stream.enqueue(lambda: done.append("captured"))
        raise RuntimeError("not capturable")

    with pytest.raises(RuntimeError):
        stream.capture(fail)
    stream.enqueue(lambda: done.append("after"))
    stream.synchronize()
    assert done == ["before", "after"]


def test_captures_do_not_nest(device: FakeDevice) -> None:
    with pytest.raises(UsageError, match="a capture is under way"):
        device.stream().capture(lambda stream: stream.capture(lambda stream: None))


# ------------------------------------------------------------------------------------------------ events


def test_events_follow_the_order_of_the_work_and_wait_for_it(device: FakeDevice) -> None:
    stream, done = device.stream(), []
    before = stream.record()
    stream.enqueue(lambda: done.append(1))
    after = stream.record()
    assert done == []
    assert after.elapsed_ms(before) >= 0
    assert done == [1]


def test_an_event_whose_work_failed_has_no_time(device: FakeDevice) -> None:
    stream = device.stream()
    before = stream.record()

    def fail() -> None:
        raise RuntimeError("no")

    stream.enqueue(fail)
    after = stream.record()
    with pytest.raises(RuntimeError):
        stream.synchronize()
    with pytest.raises(UsageError, match="never reached"):
        after.elapsed_ms(before)


def test_the_fake_device_is_opened_by_name() -> None:
    assert open_device("fake:3").name == "fake:3"
