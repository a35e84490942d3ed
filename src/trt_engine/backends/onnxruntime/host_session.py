"""Sessions of ONNX Runtime that take host arrays, on the CPU and through a GPU provider."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.ort_values import (
    as_contiguous,
    is_numpy_dtype,
    run_interruptibly,
    to_numpy,
    to_ort_value,
)
from trt_engine.config.profiles import Profile, profile_at
from trt_engine.device import Buffer, Device, Stream, open_device, parse_device
from trt_engine.device.host import HostBuffer, HostStream
from trt_engine.errors import UsageError
from trt_engine.protocols import CheckedContext, CheckedSession, check_buffer_size
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec, dtype


def reference_session(path: Path, signature: Signature) -> OnnxRuntimeSession:
    """The unoptimised model on the CPU, as the reference for engines; interruptible by Ctrl-C."""
    facts = {"device": "cpu", "graph_optimization": "none"}
    return OnnxRuntimeSession(session.create_unoptimized(path), signature, (), facts, interruptible=True)


def bind_run(loaded: ort.InferenceSession) -> Callable[[Sequence[str], Any], Sequence[Any]]:
    """The native `run(names, feeds)`, bypassing the Python method if possible.

    The method validates names again: 2.7 of 10.2 us for a single Add, ONNX Runtime 1.31.1.
    """
    options = session.run_options()
    inner = getattr(getattr(loaded, "_sess", None), "run", None)
    if inner is None:  # a private attribute of ONNX Runtime
        return lambda names, feeds: loaded.run(names, feeds, options)
    count = len(loaded.get_inputs())

    def run(names: Sequence[str], feeds: Any) -> Sequence[Any]:
        if len(feeds) != count:  # the library detects unknown names but not missing ones
            raise ValueError(f"{len(feeds)} inputs are fed, the engine has {count}")
        outputs: Sequence[Any] = inner(names, feeds, options)
        return outputs

    return run


class OnnxRuntimeSession(CheckedSession):
    """An engine in ONNX Runtime. `run` is safe from many threads; contexts are for one thread each."""

    runs_host_arrays = True

    def __init__(
        self,
        loaded: ort.InferenceSession,
        signature: Signature,
        profiles: tuple[Profile, ...],
        runtime_info: dict[str, str],
        *,
        interruptible: bool = False,
    ) -> None:
        super().__init__()
        self.signature = signature
        self.device: Device = open_device("cpu")  # for buffers; GPU providers copy them
        self._loaded: ort.InferenceSession | None = loaded
        self._profiles = profiles
        self._runtime_info = runtime_info
        self._names = [spec.name for spec in signature.outputs]
        self._options = session.run_options()
        plain = all(is_numpy_dtype(spec.dtype) for spec in signature)
        self._run: Callable[[Sequence[str], Any], Sequence[Any]] = bind_run(loaded) if plain else self._run_ort_values
        if interruptible and plain:
            self._run = functools.partial(run_interruptibly, loaded)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs by name; the caller validates feeds."""
        try:
            given = feeds if type(feeds) is dict else dict(feeds)  # ONNX Runtime takes no other mapping
            outputs = self._run(self._names, given)  # as many as there are names
            return dict(zip(self._names, outputs))  # noqa: B905  # `strict` takes 5 microseconds here
        except session.ERRORS as error:
            raise session.translate_run_error(error) from error

    def create_context(self, profile: int = 0) -> OnnxRuntimeContext:
        span = profile_at(self._profiles, profile)
        return self._register(OnnxRuntimeContext(self, self._require_open(), span, profile))

    def runtime_info(self) -> dict[str, str]:
        return dict(self._runtime_info)

    def close(self) -> None:
        self._check_no_context()
        self._loaded = None
        self._run = _raise_closed
        self.device.close()

    def _require_open(self) -> ort.InferenceSession:
        if self._loaded is None:
            raise UsageError("the session is closed", hint="load the engine again")
        return self._loaded

    def _run_ort_values(self, names: Sequence[str], feeds: Tensors) -> list[Any]:
        """`run` for dtypes numpy lacks, through OrtValues."""
        arrays = {spec.name: to_ort_value(spec, feeds[spec.name]) for spec in self.signature.inputs}
        values = self._require_open().run_with_ort_values(list(names), arrays, self._options)
        return [to_numpy(spec, value) for spec, value in zip(self.signature.outputs, values, strict=True)]


class OnnxRuntimeGpuSession(OnnxRuntimeSession):
    """A GPU session: runs on host arrays, or on feeds resident on the GPU."""

    binds_resident = True

    def __init__(
        self,
        loaded: ort.InferenceSession,
        signature: Signature,
        *,
        profiles: tuple[Profile, ...],
        runtime_info: dict[str, str],
        device: str,
        create_graph_session: Callable[[], ort.InferenceSession],
    ) -> None:
        super().__init__(loaded, signature, profiles, runtime_info)
        self._device_spec = parse_device(device)
        self._create_graph_session = create_graph_session
        self._graph_session: ort.InferenceSession | None = None
        self._graph_count = 0

    def bind_resident(self, feeds: Tensors, *, graph: bool = False) -> ResidentInference:
        """Inference on feeds copied to the GPU once; with `graph`, replays a CUDA graph captured now. Raises
        `TrtEngineError` if capture fails."""
        loaded = self._require_open()
        try:
            inputs = {
                spec.name: ort.OrtValue.ortvalue_from_numpy(as_contiguous(feeds[spec.name]), *self._device_spec)
                if is_numpy_dtype(spec.dtype)
                else to_ort_value(spec, feeds[spec.name])  # host memory, copied when bound
                for spec in self.signature.inputs
            }
            outputs = self._allocate_outputs(loaded, inputs)
            options = session.run_options()
            if graph:
                if self._graph_session is None:
                    self._graph_session = self._create_graph_session()
                loaded = self._graph_session
                self._graph_count += 1
                for entry in _GRAPH_ID:
                    options.add_run_config_entry(entry, str(self._graph_count))
            binding = loaded.io_binding()
            for name, value in inputs.items():
                binding.bind_ortvalue_input(name, value)
            for name, value in outputs.items():
                binding.bind_ortvalue_output(name, value)
            binding.synchronize_inputs()
        except session.ERRORS as error:
            raise session.translate_run_error(error) from error
        made = ResidentInference(loaded, binding, options, outputs)
        made()  # selects algorithms, and captures
        return made

    def close(self) -> None:
        super().close()
        self._graph_session = None

    def _allocate_outputs(self, loaded: ort.InferenceSession, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """GPU outputs with the shapes for these inputs."""
        binding = loaded.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._names:
            binding.bind_output(name, *self._device_spec)
        loaded.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return dict(zip(self._names, binding.get_outputs(), strict=True))


_GRAPH_ID = ("gpu_graph_id", "cuda_graph_annotation_id")
"""Option names of ONNX Runtime and of the TensorRT-RTX provider (0.5.0)."""


class ResidentInference:
    """Runs one inference per call into GPU outputs and synchronizes. For one thread."""

    def __init__(
        self, loaded: ort.InferenceSession, binding: Any, options: ort.RunOptions, outputs: dict[str, Any]
    ) -> None:
        self._loaded, self._binding, self._options, self._outputs = loaded, binding, options, outputs

    def __call__(self) -> None:
        try:
            self._loaded.run_with_iobinding(self._binding, self._options)
            self._binding.synchronize_outputs()
        except session.ERRORS as error:
            raise session.translate_run_error(error) from error

    def outputs(self) -> dict[str, Any]:
        """Host copies of the last outputs."""
        return {name: value.numpy() for name, value in self._outputs.items()}


def _raise_closed(names: Sequence[str], feeds: Any) -> Sequence[Any]:
    raise UsageError("the session is closed", hint="load the engine again")


class OnnxRuntimeContext(CheckedContext):
    """One inference in flight over host buffers."""

    equal_symbols = False
    _owner: OnnxRuntimeSession

    def __init__(
        self, owner: OnnxRuntimeSession, loaded: ort.InferenceSession | None, profile: Profile | None, index: int
    ) -> None:
        super().__init__(owner, profile, index)
        self._loaded: Any = loaded
        self._options = owner._options

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        wanted = self._check_buffers(buffers)
        binding, held, inputs = self._loaded.io_binding(), [], self._inputs or {}
        for spec in self._signature:
            if spec.name not in wanted:
                binding.bind_output(spec.name, "cpu")
                continue
            buffer = _host_buffer(spec, wanted[spec.name], buffers[spec.name])
            bind = binding.bind_input if spec.name in inputs else binding.bind_output
            kind = np.dtype(spec.dtype) if is_numpy_dtype(spec.dtype) else dtype(spec.dtype).onnx
            bind(spec.name, "cpu", 0, kind, list(wanted[spec.name]), buffer.pointer)
            held.append(buffer)
        self._bound = (binding, tuple(held))

    def enqueue(self, stream: Stream) -> None:
        self._check_bound()
        if not isinstance(stream, HostStream):
            raise UsageError("the stream is of another device", hint="`session.device.stream()`")
        binding, held = self._bound

        def compute() -> None:
            try:
                self._loaded.run_with_iobinding(binding, self._options)
            except session.ERRORS as error:
                raise session.translate_run_error(error) from error
            self._dynamic_outputs = {
                spec.name: to_numpy(spec, value)
                for spec, value in zip(self._signature.outputs, binding.get_outputs(), strict=True)
                if -1 in self._outputs[spec.name]
            }

        stream.enqueue(self._deferred(held, compute))


def _host_buffer(spec: TensorSpec, shape: Shape, buffer: Buffer) -> HostBuffer:
    if not isinstance(buffer, HostBuffer):
        raise UsageError(f"the buffer of `{spec.name}` is not on the host", hint="`session.device.allocate`")
    check_buffer_size(spec.name, buffer, dtype(spec.dtype).nbytes(shape))
    return buffer
