"""The host as a device."""

from __future__ import annotations

import numpy as np
import pytest

from trt_engine.device.fake import FakeDevice
from trt_engine.device.host import HostDevice
from trt_engine.errors import MemoryExhausted, UsageError


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000])
def test_memory_begins_on_a_cache_line(nbytes: int) -> None:
    buffer = HostDevice().allocate(nbytes)
    assert buffer.pointer % 64 == 0
    assert buffer.memory().nbytes == buffer.nbytes == nbytes


def test_a_scalar_travels_too() -> None:
    device = HostDevice()
    stream, buffer, y = device.stream(), device.allocate(4), np.empty((), np.float32)
    device.upload(np.array(3, np.float32), buffer, stream)
    device.download(buffer, y, stream)
    assert y == 3


def test_memory_the_host_does_not_have_is_an_error_with_a_number() -> None:
    with pytest.raises(MemoryExhausted, match=str(1 << 60)):
        HostDevice().allocate(1 << 60)


def test_graphs_and_events_stay_on_their_device() -> None:
    graph = HostDevice().stream().capture(lambda stream: None)
    with pytest.raises(UsageError, match="another device"):
        graph.replay(FakeDevice().stream())
    with pytest.raises(UsageError):
        HostDevice().stream().record().elapsed_ms(FakeDevice().stream().record())
