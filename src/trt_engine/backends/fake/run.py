"""Runs fake payloads: sessions and contexts that execute when their stream is synchronized."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from trt_engine.atomic_io import write_atomic
from trt_engine.backends.fake.build import MAGIC, library_version
from trt_engine.backends.fake.options import FakeOptions
from trt_engine.config.profiles import Profile, profile_at
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import from_values
from trt_engine.device import Buffer, Stream, parse_device
from trt_engine.device.fake import FakeBuffer, FakeDevice, FakeStream
from trt_engine.device.host import numpy_dtype
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, UsageError
from trt_engine.graph import walk
from trt_engine.protocols import CheckedContext, CheckedSession, check_buffer_size
from trt_engine.records.passport import Compatibility
from trt_engine.records.profile import LayerProfile, LayerRow
from trt_engine.tensors import Shape, Signature, Tensors, dtype, format_shape


class FakeRuntime:
    """Loads fake payloads."""

    def load(self, engine: Engine, config: RuntimeConfig) -> FakeSession:
        options = from_values(FakeOptions, config.options)
        kind, number = parse_device(config.device or engine.passport.device)
        if kind != "fake":
            raise UsageError(f"an engine of the backend `fake` cannot run on `{config.device}`", hint="`--device fake`")
        raw = engine.path.read_bytes()
        if not raw.startswith(MAGIC):
            raise EngineError(f"`{engine.path}` is not a payload of the backend `fake`", hint="build it again")
        try:
            proto = onnx.load_from_string(raw[len(MAGIC) :])
        except Exception as error:  # protobuf's DecodeError, which comes without types
            raise EngineError(f"`{engine.path}` is damaged: {error}", hint="build it again") from error
        device = FakeDevice(number, memory_bytes=options.memory)
        return FakeSession(proto, engine.signature, engine.passport.profiles, device)


def check_compatibility(engine: Engine, config: RuntimeConfig) -> Compatibility:
    """Loads on the GPUs it was built for; another version of onnx is a penalty."""
    own = from_values(FakeOptions, config.options).compute_capability
    targets = engine.passport.requirements.compute_capabilities
    if own and targets and own not in targets:
        reason = f"it is for compute capability {', '.join(targets)}, the device here has {own}"
        return Compatibility("refuse", reason, engine.passport.build.command)
    built, here = engine.passport.requirements.version, library_version()
    if built != here:
        return Compatibility("penalty", f"built with onnx {built}, installed is {here}: results may differ", None)
    return Compatibility("loads", f"built with the installed onnx ({here})", None)


class FakeSession(CheckedSession):
    """A model on a fake device."""

    device: FakeDevice

    def __init__(
        self, proto: onnx.ModelProto, signature: Signature, profiles: tuple[Profile, ...], device: FakeDevice
    ) -> None:
        super().__init__()
        self.signature = signature
        self.device = device
        self._proto = proto
        self._profiles = profiles
        self._closed = False

    def create_context(self, profile: int = 0) -> FakeContext:
        if self._closed:
            raise UsageError("the session is closed", hint="load the engine again")
        return self._register(FakeContext(self, self._proto, profile_at(self._profiles, profile), profile))

    def runtime_info(self) -> dict[str, str]:
        return {"library": f"onnx {library_version()}", "computes": "onnx.reference on the host"}

    def close(self) -> None:
        self._check_no_context()
        self._closed = True
        self.device.close()


class FakeContext(CheckedContext):
    """One inference in flight on a fake device."""

    can_prebind = True
    _owner: FakeSession

    def __init__(self, owner: FakeSession, proto: onnx.ModelProto, profile: Profile | None, index: int) -> None:
        super().__init__(owner, profile, index)
        self._proto = proto
        self._evaluator = ReferenceEvaluator(proto)

    def _output_shapes(self, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
        return _output_shapes(self._proto, inputs)

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        types = {spec.name: spec.dtype for spec in self._signature}
        bound = {}
        for name, shape in self._check_buffers(buffers).items():
            buffer = buffers[name]
            if not isinstance(buffer, FakeBuffer) or buffer.device is not self._owner.device:
                raise UsageError(
                    f"the buffer of `{name}` is not on `{self._owner.device.name}`", hint="allocate it there"
                )
            check_buffer_size(name, buffer, _nbytes(types[name], shape))
            buffer.memory()
            bound[name] = buffer
        self._bound = bound

    def enqueue(self, stream: Stream) -> None:
        self._check_bound()
        if not isinstance(stream, FakeStream):
            raise UsageError("the stream is of another device", hint="`session.device.stream()`")
        inputs, outputs, bound = self._inputs or {}, self._outputs, self._bound
        stream.enqueue(lambda: self._compute(inputs, outputs, bound), list(bound.values()), self._stale())

    def _stale(self) -> Callable[[], str | None]:
        """Why work enqueued now may not run later; None while it may."""
        epoch = self._generation

        def reason() -> str | None:
            if self._closed:
                return "its context is closed"
            return None if epoch == self._generation else "its context was prepared again"

        return reason

    def prebind(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        self._check_open()
        epoch = self._generation

        def buffers() -> dict[str, FakeBuffer]:
            at = self._owner.device.buffer_at
            return {spec.name: at(address) for spec, address in zip(self._signature, addresses, strict=True)}

        def run() -> None:
            if epoch != self._generation:
                raise UsageError("the launch was bound for other shapes", hint="`prebind` again, after `prepare`")
            bound, inputs, outputs = self._bound, self._inputs or {}, self._outputs
            if isinstance(stream, FakeStream) and stream.capturing:  # a graph holds the addresses alone
                stream.enqueue(lambda: self._compute(inputs, outputs, buffers()), [], self._stale())
                return
            try:
                self.bind(buffers())
                self.enqueue(stream)
            finally:
                self._bound = bound
            if waits:
                stream.synchronize()

        return run

    def _compute(
        self, inputs: Mapping[str, Shape], outputs: Mapping[str, Shape], bound: Mapping[str, FakeBuffer]
    ) -> None:
        """Run the inference in stream order, from buffers to buffers."""
        feeds = {}
        for spec in self._signature.inputs:
            shape = inputs[spec.name]
            raw = bound[spec.name].memory()[: _nbytes(spec.dtype, shape)]
            feeds[spec.name] = raw.view(numpy_dtype(spec.dtype)).reshape(shape).copy()
        names = [spec.name for spec in self._signature.outputs]
        late = {}
        with np.errstate(all="ignore"):  # devices do not warn about division by zero
            values = self._evaluator.run(names, feeds)
        for spec, value in zip(self._signature.outputs, values, strict=True):
            result = np.asarray(value, dtype=numpy_dtype(spec.dtype), order="C")
            if -1 in outputs[spec.name]:
                late[spec.name] = result.copy()
            elif result.shape != outputs[spec.name]:
                raise UsageError(
                    f"output `{spec.name}` is {format_shape(result.shape)}, expected {format_shape(outputs[spec.name])}",
                    hint="the model's shapes contradict its operators",
                )
            else:
                bound[spec.name].memory()[: result.nbytes] = result.reshape(-1).view(np.uint8)
        self._dynamic_outputs = late


def _nbytes(name: str, shape: Shape) -> int:
    """Size in host memory in bytes; 4-bit elements take a byte each."""
    return max(dtype(name).bits // 8, 1) * int(np.prod(shape, dtype=np.int64))


def _output_shapes(proto: onnx.ModelProto, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Output shapes for these input shapes by ONNX shape inference; -1 for data-dependent dimensions."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for value in fixed.graph.input:
        if value.name in inputs:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for size in inputs[value.name]:
                shape.dim.add().dim_value = size
    del fixed.graph.value_info[:]  # the exporter's symbols would contradict them
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


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """Times of the main graph's operators; subgraph bodies count towards their operator."""
    proto = onnx.load_from_string(engine.path.read_bytes()[len(MAGIC) :])
    evaluator = ReferenceEvaluator(proto)
    for _ in range(warmup):
        _time_nodes(evaluator, feeds)
    runs, walls = [], []
    for _ in range(inferences):
        started = time.perf_counter()
        runs.append(_time_nodes(evaluator, feeds))
        walls.append((time.perf_counter() - started) * 1e3)
    samples: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for index, (ms, _) in enumerate(run):
            samples[index].append(ms)
    medians = {index: statistics.median(times) for index, times in samples.items()}
    whole = sum(medians.values())
    raw = None
    if keep is not None:
        times = [[ms for ms, _ in run] for run in runs]
        raw = str(write_atomic(keep / "fake-layers.json", msgspec.json.encode(times)))
    return LayerProfile(
        rows=tuple(
            LayerRow(
                name=walk.label(node),
                kind=node.op_type,
                category="other",
                mean_ms=statistics.fmean(samples[index]),
                median_ms=medians[index],
                share=medians[index] / whole if whole else 0.0,
                calls=1.0,
                device=config.device or engine.passport.device,
                dtypes=tuple(str(value.dtype) for value in runs[-1][index][1]),
                shapes=tuple(value.shape for value in runs[-1][index][1]),
                onnx_nodes=(walk.label(node),),
            )
            for index, node in enumerate(proto.graph.node)
        ),
        inferences=inferences,
        instrument=f"onnx.reference {library_version()}, the host's clock around each operator",
        wall_ms=statistics.median(walls),
        raw=raw,
    )


def _time_nodes(evaluator: Any, feeds: Tensors) -> list[tuple[float, tuple[Any, ...]]]:
    """Time in ms and outputs of each operator of one inference."""
    results: dict[str, Any] = {"": None, **{name: np.asarray(value) for name, value in feeds.items()}}
    results |= evaluator.rt_inits_
    found = []
    with np.errstate(all="ignore"):
        for node in evaluator.rt_nodes_:
            given = [results[name] for name in node.input]
            linked = {"context": results} if node.need_context() else {}
            started = time.perf_counter()
            outputs = node.run(*given, **linked)
            ms = (time.perf_counter() - started) * 1e3
            results.update(zip(node.output, outputs, strict=False))
            found.append((ms, tuple(np.asarray(value) for value in outputs)))
    return found
