"""A TensorRT execution context: shapes, addresses, and one call to enqueue on a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.backends.tensorrt import cuda_driver
from trt_engine.config.profiles import Profile, check_shapes
from trt_engine.device import Buffer, Device, Stream
from trt_engine.device.host import numpy_dtype
from trt_engine.errors import BuildError, FeedError, MemoryExhausted, TrtEngineError, UsageError
from trt_engine.protocols import CheckedContext, check_buffer_size
from trt_engine.tensors import Shape, TensorSpec, dtype, format_shape

if TYPE_CHECKING:
    from trt_engine.backends.tensorrt.run import FirstRun, TensorRtSession

_ALIGNMENT = 256
"""Alignment of every address passed to TensorRT, in bytes."""


class TensorRtContext(CheckedContext):
    """An execution context for one thread. Ready for capture after `prepare` and `bind`."""

    _owner: TensorRtSession

    def __init__(self, session: TensorRtSession, native: Any, profile: Profile | None, index: int) -> None:
        super().__init__(session, profile, index)
        self._native = native
        self._device: Device = session.device
        self._specs = {spec.name: spec for spec in session.signature}
        self._values: dict[str, Array] = {}
        self._host_values: dict[str, Array] = {}
        """Host memory of shape tensors, referenced by TensorRT."""
        self._data_dependent: dict[str, _DataDependentOutput] = {}
        self._native_allocators: dict[str, Any] = {}
        self._scratch: Buffer | None = None
        self._stream: Stream | None = None
        self._execute: Callable[[int], bool] = _not_ready
        self._profiler: LayerProfiler | None = None
        self._ran: set[tuple[tuple[str, Shape], ...]] = set()
        """Input shapes already run: others may compile first."""
        self._problems_before = self._failed_before = 0
        self.host_inputs = frozenset(session.value_inputs)

    # -------------------------------------------------------------------------------- before the hot path

    def set_values(self, name: str, value: Any) -> None:
        """Set the values of a shape input (one of `host_inputs`) for the next `prepare`.

        They are copied; other values need another `prepare`.
        """
        self._check_open()
        if name not in self.host_inputs:
            raise FeedError(
                f"the values of `{name}` decide no shapes", hint="bind a buffer to it: only its shape is prepared"
            )
        self._values[name] = np.array(value, numpy_dtype(self._specs[name].dtype), order="C")

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._check_open()
        check_shapes(self._signature, inputs, self._profile, self._index)
        self._execute, self._inputs, self._bound = _not_ready, None, None
        said = self._owner.logger.problem_count
        with self._owner.activate():
            for name, shape in inputs.items():
                if not self._native.set_input_shape(name, tuple(shape)):
                    raise self._error(said, f"setting `{name}` to {format_shape(shape)}", FeedError)
            self._set_shape_values(inputs)
            try:
                missing = list(self._native.infer_shapes())
            except RuntimeError as error:
                raise self._error(said, "working out the output shapes", FeedError) from error
            if missing:
                raise FeedError(
                    f"TensorRT misses shapes or values of {', '.join(f'`{name}`' for name in missing)}",
                    hint="give a shape to every input, and values to those that decide shapes",
                )
            self._outputs = {spec.name: self._output_shape(spec) for spec in self._signature.outputs}
            self._attach_output_allocators()
            self._allocate_scratch()
        self._inputs = {name: tuple(shape) for name, shape in inputs.items()}
        return dict(self._outputs)

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        wanted = self._check_buffers(buffers)
        self._execute = _not_ready
        said = self._owner.logger.problem_count
        addresses = {name: self._address(name, shape, buffers[name]) for name, shape in wanted.items()}
        for name, address in addresses.items():
            if not self._native.set_tensor_address(name, address):
                raise self._error(said, f"giving `{name}` the address {address:#x}", UsageError)
        self._bound = {name: buffers[name] for name in wanted}
        self._problems_before, self._failed_before = said, self._owner.failed_allocations()
        self._execute = cuda_driver.call_on_device(self._device.name, self._native.execute_async_v3)
        if self._owner.first_run is not None:
            self._wrap_first_run(self._owner.first_run, self._execute)

    # -------------------------------------------------------------------------------- the hot path

    def enqueue(self, stream: Stream) -> None:
        self._stream = stream
        if not self._execute(stream.handle):
            raise self._enqueue_error()

    # -------------------------------------------------------------------------------- after it

    def outputs(self) -> dict[str, Any]:
        self._check_open()
        if all(-1 not in shape for shape in self._outputs.values()):
            return {}
        if self._stream is None:
            raise UsageError("the outputs are not there yet", hint="enqueue, then synchronize the stream")
        stream, found = self._stream, {}
        for name, shape in self._outputs.items():
            if -1 not in shape:
                continue
            if name in self._host_values:
                found[name] = self._host_values[name].copy()
                continue
            late = self._data_dependent[name]
            late.raise_error()
            found[name] = late.download(stream)
        stream.synchronize()
        return {name: self._shaped(name, value) for name, value in found.items()}

    @property
    def no_graph(self) -> str | None:
        if self._data_dependent:
            return f"the shape of `{next(iter(self._data_dependent))}` depends on the data"
        if (reason := self._owner.no_graph) is not None or self._stream is None:
            return reason
        with self._owner.activate():
            return self._owner.capture_blocker(self._native, self._stream)

    def profile_layers(self, times: LayerProfiler | None) -> None:
        """Report layer times to `times` after each inference (`times.report`), at a cost; None stops it."""
        self._check_open()
        self._native.profiler = None if times is None else self._owner.binding.wrap_callback(times)
        self._native.enqueue_emits_profile = times is None  # False: asynchronous, `times` reports
        self._detach_profiler()
        if times is not None:
            times.attach(self._native)
            self._profiler = times

    def close(self) -> None:
        if self._closed:
            return
        self._execute = _closed
        self._detach_profiler()
        self._native = None  # before its memory is freed
        for late in self._data_dependent.values():
            late.close()
        self._data_dependent, self._native_allocators, self._host_values, self._stream = {}, {}, {}, None
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        super().close()

    # -------------------------------------------------------------------------------- its parts

    def _detach_profiler(self) -> None:
        """Detach the profiler: the bindings keep it as long as its context, a reference cycle."""
        if self._profiler is not None:
            self._profiler.attach(None)
            self._profiler = None

    def _wrap_first_run(self, first_run: FirstRun, execute: Callable[[int], bool]) -> None:
        """Call the first inference at new shapes through the session's wrapper."""
        shapes = tuple(sorted((self._inputs or {}).items()))
        if shapes in self._ran:
            return

        def done() -> None:
            self._ran.add(shapes)
            self._execute = execute

        self._execute = first_run(execute, done)

    def _set_shape_values(self, inputs: Mapping[str, Shape]) -> None:
        """Bind host memory with the values of the shape tensors."""
        self._host_values = {}
        for name in sorted(self.host_inputs):
            value = self._values.get(name)
            if value is None:
                raise FeedError(
                    f"the values of input `{name}` decide shapes and are not known",
                    hint="`context.set_values(name, values)` before `prepare`",
                )
            if value.shape != tuple(inputs[name]):
                raise FeedError(
                    f"the values of `{name}` are {format_shape(value.shape)}, its shape is {format_shape(inputs[name])}",
                    hint="`set_values` and `prepare` belong to one inference",
                )
            self._set_host_value(name, value if value.size else np.zeros(1, value.dtype))

    def _set_host_value(self, name: str, value: Array) -> None:
        self._host_values[name] = value
        if not self._native.set_tensor_address(name, value.ctypes.data):
            raise self._error(0, f"giving `{name}` its values", FeedError)

    def _output_shape(self, spec: TensorSpec) -> Shape:
        """The shape reported by TensorRT; all -1 for a host tensor, whose shape is set by `outputs`."""
        shape = tuple(self._native.get_tensor_shape(spec.name))
        if spec.name not in self._owner.host_outputs:
            return shape
        if -1 in shape:
            size = self._native.get_max_output_size(spec.name)
            if size < 0:
                raise self._error(0, f"working out the size of `{spec.name}`", FeedError)
            shape = (size // max(dtype(spec.dtype).bits // 8, 1),)
        self._set_host_value(spec.name, np.zeros(shape, numpy_dtype(spec.dtype)))
        return (-1,) * max(len(shape), 1)

    def _attach_output_allocators(self) -> None:
        """Set an allocator for each output with a data-dependent shape."""
        for spec in self._signature.outputs:
            if -1 not in self._outputs[spec.name] or spec.name in self._host_values:
                if spec.name in self._data_dependent:
                    self._native.set_output_allocator(spec.name, None)
                    self._data_dependent.pop(spec.name).close()
                    del self._native_allocators[spec.name]
                continue
            if spec.name not in self._data_dependent:
                late = _DataDependentOutput(spec, self._device)
                taking = self._native_allocators[spec.name] = self._owner.binding.wrap_callback(late)
                if not self._native.set_output_allocator(spec.name, taking):
                    raise self._error(0, f"taking the output `{spec.name}` as it comes", UsageError)
                self._data_dependent[spec.name] = late
            self._data_dependent[spec.name].reset()

    def _allocate_scratch(self) -> None:
        """Allocate scratch memory for these shapes, if we provide it. Nothing is in flight, so the old one is free."""
        if self._owner.memory_strategy != "user_managed":
            return
        said = self._owner.logger.problem_count
        need = int(self._native.update_device_memory_size_for_shapes())
        if need <= 0 and self._owner.logger.had_errors(said):  # 0 is an error, or no scratch: messages decide
            raise self._error(said, "working out the scratch memory", BuildError)
        if self._scratch is None or self._scratch.nbytes < need:
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None
            self._scratch = self._device.allocate(max(need, _ALIGNMENT))
        if self._owner.binding.has_api("IExecutionContext.set_device_memory"):
            self._native.set_device_memory(self._scratch.pointer, self._scratch.nbytes)
        else:
            self._native.device_memory = self._scratch.pointer

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory provided to TensorRT."""
        return self._scratch.nbytes if self._scratch is not None else 0

    def _address(self, name: str, shape: Shape, buffer: Buffer) -> int:
        check_buffer_size(name, buffer, dtype(self._specs[name].dtype).nbytes(shape))
        pointer = buffer.pointer
        if not pointer or pointer % _ALIGNMENT:
            raise UsageError(
                f"the buffer of `{name}` is at {pointer:#x}, TensorRT takes multiples of {_ALIGNMENT}",
                hint=f"allocate it with `session.device`, and cut views at multiples of {_ALIGNMENT}",
            )
        return pointer

    def _shaped(self, name: str, value: Array) -> Array:
        """A host tensor in its final shape, known after the inference."""
        if name not in self._host_values:
            return value
        shape = tuple(self._native.get_tensor_shape(name))
        if -1 in shape:
            return value
        return value.reshape(-1)[: math.prod(shape)].reshape(shape)

    def _enqueue_error(self) -> TrtEngineError:
        """The error of a failed enqueue: of an output allocator, else from TensorRT's messages."""
        for late in self._data_dependent.values():
            if isinstance(late.error, TrtEngineError):
                return late.error
        starved = self._owner.failed_allocations() > self._failed_before
        return self._error(self._problems_before, "the inference", MemoryExhausted if starved else BuildError)

    def _error(self, problems_before: int, subject: str, kind: type[TrtEngineError]) -> TrtEngineError:
        return self._owner.logger.make_error(subject, kind, problems_before)


def _not_ready(stream: int) -> bool:
    raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")


def _closed(stream: int) -> bool:
    raise UsageError("the context is closed", hint="make another with `session.create_context()`")


class _DataDependentOutput:
    """Memory for an output with a data-dependent shape. Called by TensorRT inside `enqueue`; never raises."""

    native_base = "IOutputAllocator"

    def __init__(self, spec: TensorSpec, device: Device) -> None:
        self._spec = spec
        self._device = device
        self._buffer: Buffer | None = None
        self._outgrown: list[Buffer] = []
        self._shape: Shape | None = None
        self.error: BaseException | None = None

    def reset(self) -> None:
        """Reset the last inference's shape; nothing is in flight."""
        self._shape, self.error = None, None
        self._free_outgrown()

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        try:
            if self._buffer is None or self._buffer.nbytes < size:
                larger = self._device.allocate(max(size, _ALIGNMENT))
                if self._buffer is not None:
                    self._outgrown.append(self._buffer)  # the previous inference may still write to it
                self._buffer = larger
            return self._buffer.pointer
        except BaseException as error:
            self.error = error
            return 0

    def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        try:
            self._shape = tuple(shape)
        except BaseException as error:
            self.error = error

    def raise_error(self) -> None:
        """Raise a callback's error, which TensorRT only printed."""
        if self.error is not None:
            raise self.error
        if self._shape is None:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")

    def download(self, stream: Stream) -> Array:
        """The output in its actual shape; valid after stream synchronization."""
        assert self._shape is not None
        array: Array = np.empty(self._shape, numpy_dtype(self._spec.dtype))
        if array.size and self._buffer is not None:
            self._device.download(self._buffer, array, stream)
        return array

    def close(self) -> None:
        self._free_outgrown()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _free_outgrown(self) -> None:
        for buffer in self._outgrown:
            buffer.close()
        self._outgrown = []


class LayerProfiler:
    """Layer times of the last reported inference, in execution order. Names can repeat."""

    native_base = "IProfiler"

    def __init__(self) -> None:
        self._native: Any = None
        self._times: list[tuple[str, float]] = []

    def attach(self, native: Any) -> None:
        """Attach to a context; None detaches."""
        self._native = native

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Called by TensorRT."""
        self._times.append((layer_name, ms))

    def report(self) -> list[tuple[str, float]]:
        """Name and time in ms of each layer; call after stream synchronization."""
        self._times = []
        if self._native is None or not self._native.report_to_profiler():
            raise UsageError("TensorRT has no layer times to report", hint="enqueue and synchronize first")
        return self._times
