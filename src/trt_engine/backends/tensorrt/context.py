"""One inference in flight on an engine of TensorRT: shapes, addresses, and one call that puts it on a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorrt as trt

from trt_engine.backends.tensorrt import compat, driver
from trt_engine.config import Profile, check_shapes
from trt_engine.device import Buffer, Device, Stream
from trt_engine.device.host import numpy_dtype
from trt_engine.errors import BuildError, FeedError, MemoryExhausted, TrtEngineError, UsageError
from trt_engine.tensors import Shape, TensorSpec, closest, dtype, format_shape

if TYPE_CHECKING:
    from trt_engine.backends.tensorrt.run import TensorRtSession

__all__ = ["LayerTimes", "TensorRtContext"]

Array = npt.NDArray[Any]
_ALIGNMENT = 256
"""Of every address TensorRT is given."""


class TensorRtContext:
    """One inference in flight, one thread. Ready to be captured once `prepare` and `bind` are done."""

    def __init__(self, session: TensorRtSession, native: Any, profile: Profile | None, index: int) -> None:
        self._session = session
        self._native = native
        self._profile = profile
        self._index = index
        self._device: Device = session.device
        self._specs = {spec.name: spec for spec in session.signature}
        self._inputs: dict[str, Shape] | None = None
        self._outputs: dict[str, Shape] = {}
        self._values: dict[str, Array] = {}
        self._held: dict[str, Array] = {}
        """Host memory TensorRT holds addresses of: shape tensors."""
        self._late: dict[str, _LateOutput] = {}
        self._bound: dict[str, Buffer] = {}
        self._scratch: Buffer | None = None
        self._stream: Stream | None = None
        self._execute: Callable[[int], bool] = _not_ready
        self._times: LayerTimes | None = None
        self._said = self._refused_before = 0
        self._closed = False
        self.host_inputs = frozenset(session.value_inputs)
        """Inputs whose values decide shapes: they go to `set_values`, and no buffer is bound to them."""

    # -------------------------------------------------------------------------------- before the hot path

    def set_values(self, name: str, value: Any) -> None:
        """The values of an input whose content decides shapes (one of `host_inputs`), for the next `prepare`.

        They are copied, and are part of what was prepared: other values need another `prepare`.
        """
        self._check_open()
        if name not in self.host_inputs:
            raise FeedError(
                f"the values of `{name}` decide no shapes", hint="bind a buffer to it: only its shape is prepared"
            )
        self._values[name] = np.array(value, numpy_dtype(self._specs[name].dtype), order="C")

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._check_open()
        check_shapes(self._session.signature, inputs, self._profile, self._index)
        self._execute, self._inputs, self._bound = _not_ready, None, {}
        said = self._session.said()
        with self._session.current():
            for name, shape in inputs.items():
                if not self._native.set_input_shape(name, tuple(shape)):
                    raise self._failed(said, f"setting `{name}` to {format_shape(shape)}", FeedError)
            self._hold_values(inputs)
            try:
                missing = list(self._native.infer_shapes())
            except RuntimeError as error:
                raise self._failed(said, "working out the output shapes", FeedError) from error
            if missing:
                raise FeedError(
                    f"TensorRT misses shapes or values of {', '.join(f'`{name}`' for name in missing)}",
                    hint="give a shape to every input, and values to those that decide shapes",
                )
            self._outputs = {spec.name: self._output_shape(spec) for spec in self._session.signature.outputs}
            self._take_late()
            self._give_scratch()
        self._inputs = {name: tuple(shape) for name, shape in inputs.items()}
        return dict(self._outputs)

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        self._check_open()
        if self._inputs is None:
            raise UsageError("buffers were bound before the shapes were prepared", hint="call `prepare` first")
        wanted = {name: shape for name, shape in self._inputs.items() if name not in self._held}
        wanted |= {
            name: shape for name, shape in self._outputs.items() if name not in self._late and name not in self._held
        }
        for name in buffers:
            if name not in wanted and name not in self._held:
                raise UsageError(f"there is no tensor `{name}` to bind", hint=closest(name, list(wanted)))
        self._execute = _not_ready
        said = self._session.said()
        addresses = {name: self._address(name, shape, buffers.get(name)) for name, shape in wanted.items()}
        for name, address in addresses.items():
            if not self._native.set_tensor_address(name, address):
                raise self._failed(said, f"giving `{name}` the address {address:#x}", UsageError)
        self._bound = {name: buffers[name] for name in wanted}
        self._said, self._refused_before = said, self._session.refusals()
        self._execute = driver.on_device(self._device.name, self._native.execute_async_v3)

    # -------------------------------------------------------------------------------- the hot path

    def enqueue(self, stream: Stream) -> None:
        self._stream = stream
        if not self._execute(stream.handle):
            raise self._refused()

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
            if name in self._held:
                found[name] = self._held[name].copy()
                continue
            late = self._late[name]
            late.check()
            found[name] = late.download(stream)
        stream.synchronize()
        return {name: self._shaped(name, value) for name, value in found.items()}

    @property
    def no_graph(self) -> str | None:
        """Why an inference of this context cannot be captured in a graph; None where it can."""
        if self._late:
            return f"the shape of `{next(iter(self._late))}` depends on the data"
        return self._session.no_graph

    def profile_layers(self, times: LayerTimes | None) -> None:
        """Have the layers' times told to `times` after each inference (`times.report`), which costs time; None ends it."""
        self._check_open()
        self._native.profiler = times
        self._native.enqueue_emits_profile = times is None  # False: enqueue stays asynchronous, the report is asked for
        self._let_times_go()
        if times is not None:
            times.attach(self._native)
            self._times = times

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._execute = _closed
        self._let_times_go()
        self._native = None  # before its memory goes
        for late in self._late.values():
            late.close()
        self._late, self._held, self._bound, self._stream = {}, {}, {}, None
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        self._session._forget(self)

    # -------------------------------------------------------------------------------- its parts

    def _let_times_go(self) -> None:
        """The bindings keep a profiler as long as its context: one that kept the context too would keep both for ever."""
        if self._times is not None:
            self._times.attach(None)
            self._times = None

    def _hold_values(self, inputs: Mapping[str, Shape]) -> None:
        """Give TensorRT host memory of ours with the values of the shape tensors."""
        self._held = {}
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
            self._hold(name, value if value.size else np.zeros(1, value.dtype))

    def _hold(self, name: str, value: Array) -> None:
        self._held[name] = value
        if not self._native.set_tensor_address(name, value.ctypes.data):
            raise self._failed(0, f"giving `{name}` its values", FeedError)

    def _output_shape(self, spec: TensorSpec) -> Shape:
        """The shape TensorRT tells; all -1 for a tensor on the host, which `outputs` gives."""
        shape = tuple(self._native.get_tensor_shape(spec.name))
        if spec.name not in self._session.host_outputs:
            return shape
        if -1 in shape:
            size = self._native.get_max_output_size(spec.name)
            if size < 0:
                raise self._failed(0, f"working out the size of `{spec.name}`", FeedError)
            shape = (size // max(dtype(spec.dtype).bits // 8, 1),)
        self._hold(spec.name, np.zeros(shape, numpy_dtype(spec.dtype)))
        return (-1,) * max(len(shape), 1)

    def _take_late(self) -> None:
        """An allocator for each output whose size only the inference itself tells."""
        for spec in self._session.signature.outputs:
            if -1 not in self._outputs[spec.name] or spec.name in self._held:
                if spec.name in self._late:
                    self._native.set_output_allocator(spec.name, None)
                    self._late.pop(spec.name).close()
                continue
            if spec.name not in self._late:
                late = _LateOutput(spec, self._device)
                if not self._native.set_output_allocator(spec.name, late):
                    raise self._failed(0, f"taking the output `{spec.name}` as it comes", UsageError)
                self._late[spec.name] = late
            self._late[spec.name].begin()

    def _give_scratch(self) -> None:
        """Scratch memory for these shapes, where it is ours to give. The old one is not in use: nothing is in flight."""
        if self._session.memory_strategy != "user_managed":
            return
        said = self._session.said()
        need = int(self._native.update_device_memory_size_for_shapes())
        if need <= 0 and self._session.logger.complained(said):  # 0 is an error, or no need: only the messages tell
            raise self._failed(said, "working out the scratch memory", BuildError)
        if self._scratch is None or self._scratch.nbytes < need:
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None
            self._scratch = self._device.allocate(max(need, _ALIGNMENT))
        if compat.has("IExecutionContext.set_device_memory"):
            self._native.set_device_memory(self._scratch.pointer, self._scratch.nbytes)
        else:
            self._native.device_memory = self._scratch.pointer

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of ours that TensorRT works in."""
        return self._scratch.nbytes if self._scratch is not None else 0

    def _address(self, name: str, shape: Shape, buffer: Buffer | None) -> int:
        if buffer is None:
            raise UsageError(f"no buffer is bound to `{name}`", hint="bind every input and every sized output")
        need = dtype(self._specs[name].dtype).nbytes(shape)
        if need > buffer.nbytes:
            raise UsageError(f"`{name}` needs {need} bytes, its buffer has {buffer.nbytes}", hint="a larger buffer")
        pointer = buffer.pointer
        if not pointer or pointer % _ALIGNMENT:
            raise UsageError(
                f"the buffer of `{name}` lies at {pointer:#x}, TensorRT takes multiples of {_ALIGNMENT}",
                hint=f"allocate it with `session.device`, and cut views at multiples of {_ALIGNMENT}",
            )
        return pointer

    def _shaped(self, name: str, value: Array) -> Array:
        """A host tensor in the shape it has by now: TensorRT knows it once the inference is done."""
        if name not in self._held:
            return value
        shape = tuple(self._native.get_tensor_shape(name))
        if -1 in shape:
            return value
        return value.reshape(-1)[: math.prod(shape)].reshape(shape)

    def _refused(self) -> TrtEngineError:
        """Why an inference was not taken: an allocator of ours that could not, else what TensorRT said."""
        for late in self._late.values():
            if isinstance(late.error, TrtEngineError):
                return late.error
        starved = self._session.refusals() > self._refused_before
        return self._failed(self._said, "the inference", MemoryExhausted if starved else BuildError)

    def _failed(self, said: int, subject: str, kind: type[TrtEngineError]) -> TrtEngineError:
        return self._session.logger.failure(subject, kind, said)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the context is closed", hint="make another with `session.context()`")


def _not_ready(stream: int) -> bool:
    raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")


def _closed(stream: int) -> bool:
    raise UsageError("the context is closed", hint="make another with `session.context()`")


class _LateOutput(trt.IOutputAllocator):  # type: ignore[misc]
    """Memory for an output whose size only the inference tells. Called by TensorRT inside `enqueue`; never raises."""

    def __init__(self, spec: TensorSpec, device: Device) -> None:
        super().__init__()
        self._spec = spec
        self._device = device
        self._buffer: Buffer | None = None
        self._outgrown: list[Buffer] = []
        self._shape: Shape | None = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Forget the last inference's shape; nothing is in flight."""
        self._shape, self.error = None, None
        self._drop_outgrown()

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        try:
            if self._buffer is None or self._buffer.nbytes < size:
                larger = self._device.allocate(max(size, _ALIGNMENT))
                if self._buffer is not None:
                    self._outgrown.append(self._buffer)  # the inference before may still write to it
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

    def check(self) -> None:
        """Raise what went wrong in a callback: TensorRT printed it and went on."""
        if self.error is not None:
            raise self.error
        if self._shape is None:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")

    def download(self, stream: Stream) -> Array:
        """The output as TensorRT sized it; there once the stream is done."""
        assert self._shape is not None
        array: Array = np.empty(self._shape, numpy_dtype(self._spec.dtype))
        if array.size and self._buffer is not None:
            self._device.download(self._buffer, array, stream)
        return array

    def close(self) -> None:
        self._drop_outgrown()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _drop_outgrown(self) -> None:
        for buffer in self._outgrown:
            buffer.close()
        self._outgrown = []


class LayerTimes(trt.IProfiler):  # type: ignore[misc]
    """The layers' times of the last inference that was reported, in the order they ran. Names can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self._native: Any = None
        self._times: list[tuple[str, float]] = []

    def attach(self, native: Any) -> None:
        """The context whose times they are; None lets it go."""
        self._native = native

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Called by TensorRT."""
        self._times.append((layer_name, ms))

    def report(self) -> list[tuple[str, float]]:
        """Name and milliseconds of each layer; to be called once the stream is done."""
        self._times = []
        if self._native is None or not self._native.report_to_profiler():
            raise UsageError("TensorRT has no layer times to report", hint="enqueue and synchronize first")
        return self._times
