"""The fake device keeps the rules of a real one."""

from __future__ import annotations

import numpy as np
import pytest

from trt_engine.device.fake import FakeDevice
from trt_engine.errors import UsageError


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


def test_streams_do_not_wait_for_each_other(device: FakeDevice) -> None:
    one, other, done = device.stream(), device.stream(), []
    one.enqueue(lambda: done.append("one"))
    other.enqueue(lambda: done.append("other"))
    other.synchronize()
    assert done == ["other"]


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


# ------------------------------------------------------------------------------------------------ graphs


# ------------------------------------------------------------------------------------------------ events


def test_events_follow_the_order_of_the_work_and_wait_for_it(device: FakeDevice) -> None:
    stream, done = device.stream(), []
    before = stream.record()
    stream.enqueue(lambda: done.append(1))
    after = stream.record()
    assert done == []
    assert after.elapsed_ms(before) >= 0
    assert done == [1]
