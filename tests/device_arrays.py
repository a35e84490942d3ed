"""Arrays on a fake device: made of numpy's, and read back."""

from __future__ import annotations

import numpy as np

from trt_engine.device.fake import FakeDevice
from trt_engine.runtime.inference_engine import InferenceEngine


def rows(count: int) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


def device_of(engine: InferenceEngine) -> FakeDevice:
    assert engine._pool is not None
    assert isinstance(engine._pool.device, FakeDevice)
    return engine._pool.device


def on_device(device: FakeDevice, array: np.ndarray) -> object:
    buffer, stream = device.allocate(array.nbytes), device.stream()
    device.upload(array, buffer, stream)
    stream.synchronize()
    stream.close()
    return buffer.array(array.dtype.name, array.shape)


def on_host(device: FakeDevice, array: object) -> np.ndarray:
    stream = device.stream()
    found = np.empty(array.shape, np.float32)
    device.download(device.borrow(array, stream), found, stream)
    stream.synchronize()
    stream.close()
    return found
