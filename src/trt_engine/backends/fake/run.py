"""A fake payload at work: sessions and contexts whose inferences happen when their stream is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator

from trt_engine.backends.fake.build import MAGIC, library_version
from trt_engine.backends.fake.options import FakeOptions
from trt_engine.config import Profile, RuntimeConfig, check_shapes, from_values
from trt_engine.device import Buffer, Stream, parse_device
from trt_engine.device.fake import FakeBuffer, FakeDevice, FakeStream
from trt_engine.device.host import numpy_dtype
from trt_engine.engine import Engine, Verdict
from trt_engine.errors import EngineError, UsageError
from trt_engine.tensors import Shape, Signature, closest, dtype, format_shape

__all__ = ["FakeContext", "FakeRuntime", "FakeSession", "verdict"]

Array = npt.NDArray[Any]


class FakeRuntime:
    """Loads fake payloads."""

    def load(self, engine: Engine, config: RuntimeConfig) -> FakeSession:
        options = from_values(FakeOptions, config.options)
        kind, number = parse_device(config.device or engine.passport.device)
        if kind != "fake":
            raise UsageError(f"an engine of the backend `fake` cannot run on `{config.device}`", hint="`--device fake`")
        raw = engine.path.read_bytes()
        if not raw.startswith(MAGIC):
            raise EngineError(f"`{engine.path}` is no payload of the backend `fake`", hint="build it again")
        try:
            proto = onnx.load_from_string(raw[len(MAGIC) :])
        except Exception as error:  # protobuf's DecodeError, which comes without types
            raise EngineError(f"`{engine.path}` is damaged: {error}", hint="build it again") from error
        device = FakeDevice(number, memory_bytes=options.memory)
        return FakeSession(proto, engine.signature, engine.passport.profiles, device)


def verdict(engine: Engine, config: RuntimeConfig) -> Verdict:
    """The fake backend loads whatever it built; another version of onnx is said."""
    built, here = engine.passport.needs.version, library_version()
    if built != here:
        return Verdict("penalty", f"built with onnx {built}, here is {here}: results may differ", None)
    return Verdict("loads", f"built with the onnx that is here ({here})", None)


class FakeSession:
    """A model on a fake device."""

    def __init__(
        self, proto: onnx.ModelProto, signature: Signature, profiles: tuple[Profile, ...], device: FakeDevice
    ) -> None:
        self.signature = signature
        self.device = device
        self._proto = proto
        self._profiles = profiles
        self._open: set[FakeContext] = set()
        self._closed = False

    def context(self, profile: int = 0) -> FakeContext:
        if self._closed:
            raise UsageError("the session is closed", hint="load the engine again")
        if not 0 <= profile < max(len(self._profiles), 1):
            raise UsageError(
                f"there is no profile {profile}, the engine has {len(self._profiles)}", hint="profiles count from 0"
            )
        made = FakeContext(self, self._proto, self._profiles[profile] if self._profiles else None, profile)
        self._open.add(made)
        return made

    def facts(self) -> dict[str, str]:
        return {"library": f"onnx {library_version()}", "computes": "onnx.reference on the host"}

    def close(self) -> None:
        if self._open:
            raise UsageError(
                f"the session has {len(self._open)} open context(s) and cannot close", hint="close them first"
            )
        self._closed = True
        self.device.close()


class FakeContext:
    """One inference in flight on a fake device."""

    def __init__(self, session: FakeSession, proto: onnx.ModelProto, profile: Profile | None, index: int) -> None:
        self._session = session
        self._signature = session.signature
        self._proto = proto
        self._evaluator = ReferenceEvaluator(proto)
        self._profile = profile
        self._profile_index = index
        self._epoch = 0
        self._inputs: dict[str, Shape] | None = None
        self._outputs: dict[str, Shape] = {}
        self._bound: dict[str, FakeBuffer] | None = None
        self._late: dict[str, Array] | None = None
        self._closed = False

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._check_open()
        check_shapes(self._signature, inputs, self._profile, self._profile_index)
        self._epoch += 1
        self._inputs = dict(inputs)
        self._outputs = _output_shapes(self._proto, inputs)
        self._bound = None
        self._late = None
        return dict(self._outputs)

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        self._check_open()
        if self._inputs is None:
            raise UsageError("buffers were bound before the shapes were prepared", hint="call `prepare` first")
        sized = {name: shape for name, shape in self._outputs.items() if -1 not in shape}
        wanted = self._inputs | sized
        types = {spec.name: spec.dtype for spec in self._signature}
        for name in buffers:
            if name not in wanted:
                raise UsageError(f"there is no tensor `{name}` to bind", hint=closest(name, list(wanted)))
        bound = {}
        for name, shape in wanted.items():
            buffer = buffers.get(name)
            if buffer is None:
                raise UsageError(f"no buffer is bound to `{name}`", hint="bind every input and every sized output")
            if not isinstance(buffer, FakeBuffer) or buffer.device is not self._session.device:
                raise UsageError(
                    f"the buffer of `{name}` is not on `{self._session.device.name}`", hint="allocate it there"
                )
            if (need := _nbytes(types[name], shape)) > buffer.nbytes:
                raise UsageError(f"`{name}` needs {need} bytes, its buffer has {buffer.nbytes}", hint="a larger buffer")
            buffer.memory()
            bound[name] = buffer
        self._bound = bound

    def enqueue(self, stream: Stream) -> None:
        self._check_open()
        if self._inputs is None or self._bound is None:
            raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")
        if not isinstance(stream, FakeStream):
            raise UsageError("the stream is of another device", hint="`session.device.stream()`")
        inputs, outputs, bound, epoch = self._inputs, self._outputs, self._bound, self._epoch

        def stale() -> str | None:
            if self._closed:
                return "its context is closed"
            return None if epoch == self._epoch else "its context was prepared again"

        stream.enqueue(lambda: self._compute(inputs, outputs, bound), list(bound.values()), stale)

    def launching(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        self._check_open()
        epoch = self._epoch

        def run() -> None:
            if epoch != self._epoch:
                raise UsageError("what launches was made for other shapes", hint="`launching` again, after `prepare`")
            at, bound = self._session.device.buffer_at, self._bound
            try:
                self.bind({spec.name: at(address) for spec, address in zip(self._signature, addresses, strict=True)})
                self.enqueue(stream)
            finally:
                self._bound = bound
            if waits:
                stream.synchronize()

        return run

    def explained(self, error: BaseException) -> None:
        return None

    def outputs(self) -> dict[str, Any]:
        self._check_open()
        if all(-1 not in shape for shape in self._outputs.values()):
            return {}
        if self._late is None:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")
        late, self._late = self._late, None
        return dict(late)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._session._open.discard(self)

    def _compute(
        self, inputs: Mapping[str, Shape], outputs: Mapping[str, Shape], bound: Mapping[str, FakeBuffer]
    ) -> None:
        """The inference itself, on the stream's turn: from buffers to buffers."""
        feeds = {}
        for spec in self._signature.inputs:
            shape = inputs[spec.name]
            raw = bound[spec.name].memory()[: _nbytes(spec.dtype, shape)]
            feeds[spec.name] = raw.view(numpy_dtype(spec.dtype)).reshape(shape).copy()
        names = [spec.name for spec in self._signature.outputs]
        late = {}
        with np.errstate(all="ignore"):  # a device divides by zero without a word
            values = self._evaluator.run(names, feeds)
        for spec, value in zip(self._signature.outputs, values, strict=True):
            result = np.asarray(value, dtype=numpy_dtype(spec.dtype), order="C")
            if -1 in outputs[spec.name]:
                late[spec.name] = result.copy()
            elif result.shape != outputs[spec.name]:
                raise UsageError(
                    f"output `{spec.name}` came out as {format_shape(result.shape)}, "
                    f"prepared was {format_shape(outputs[spec.name])}",
                    hint="the model's shapes contradict its operators",
                )
            else:
                bound[spec.name].memory()[: result.nbytes] = result.reshape(-1).view(np.uint8)
        self._late = late

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the context is closed", hint="make another with `session.context()`")


def _nbytes(name: str, shape: Shape) -> int:
    """Bytes as the host holds them: 4-bit types take a byte each here."""
    return max(dtype(name).bits // 8, 1) * int(np.prod(shape, dtype=np.int64))


def _output_shapes(proto: onnx.ModelProto, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of the outputs at these input shapes by ONNX's inference; -1 where they depend on the data."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for value in fixed.graph.input:
        if value.name in inputs:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for size in inputs[value.name]:
                shape.dim.add().dim_value = size
    del fixed.graph.value_info[:]  # the exporter's symbols would stand against the sizes
    for value in fixed.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("value")
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    return {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim
        )
        for value in inferred.graph.output
    }
