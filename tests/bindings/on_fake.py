"""Our runtimes of TensorRT and TensorRT-RTX on the fake device: what `te.load` takes where there is no GPU."""

from __future__ import annotations

from trt_engine.backends.tensorrt.run import TensorRtRuntime, TensorRtSession
from trt_engine.backends.tensorrt_rtx.run import TensorRtRtxRuntime
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.device.fake import FakeDevice
from trt_engine.engine import Engine

OPENED: list[FakeDevice] = []
"""Every device an engine was loaded on: what is allocated on them when a test ends, leaked."""


class RuntimeOnFake:
    """`TensorRtRuntime` with a fake device in place of the one it would open."""

    runtime = TensorRtRuntime

    def load(self, engine: Engine, config: RuntimeConfig) -> TensorRtSession:
        device = FakeDevice(parse_device(config.device or engine.passport.device)[1])
        OPENED.append(device)
        return self.runtime().load(engine, config, device=device)


class RtxRuntimeOnFake(RuntimeOnFake):
    """The same of `TensorRtRtxRuntime`."""

    runtime = TensorRtRtxRuntime
