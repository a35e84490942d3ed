"""Runs `.pt2` packages: strict about shapes and addresses, which packages themselves do not check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trt_engine.backends.inductor.options import InductorOptions
from trt_engine.config.profiles import Profile, profile_at
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import from_values
from trt_engine.device import Buffer, Device, Stream, open_device, parse_device
from trt_engine.device.host import HostBuffer, HostStream, numpy_dtype
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, MemoryExhausted, TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.plan_header import is_native_package
from trt_engine.protocols import CheckedContext, CheckedSession, check_buffer_size
from trt_engine.tensors import Shape, Tensors, TensorSpec, dtype
from trt_engine.workers.crash import is_out_of_memory

_ALIGNMENT = 16
"""Bytes that compiled GPU kernels take the address of an input to be a multiple of."""
_launch_lock = threading.Lock()
"""Held while work is launched: TF32 is a setting of the whole process, and a package on a GPU is for one thread."""


class InductorRuntime:
    """Loads packages."""

    def load(self, engine: Engine, config: RuntimeConfig) -> InductorSession:
        options: InductorOptions = from_values(InductorOptions, config.options)
        if not options.trust_source:  # native code: nothing of it runs before
            engine.verify()
        again = f"build it again: `{engine.passport.build.command}`"
        if not is_native_package(engine.path):
            raise EngineError(f"`{engine.path}` is not a compiled package", hint=again)
        kind, number = parse_device(config.device or engine.passport.device)
        if kind != parse_device(engine.passport.device)[0]:
            raise UsageError(
                f"the engine's code is for `{engine.passport.device}`, requested is `{config.device}`",
                hint=f"build it again: `{engine.passport.build.command} --device {config.device}`",
            )
        try:
            # PyTorch's `load_package` calls the C++ compiler to describe the machine, which `check_compatibility` compares
            loader = torch._C._aoti.AOTIModelPackageLoader(
                str(engine.path),
                "model",
                kind == "cuda",  # single-threaded: the threaded form queries events, which a capture forbids
                1 if kind == "cuda" else max(config.contexts, 1),
                number if kind == "cuda" else -1,
            )
        except RuntimeError as error:
            raise _translate(error, "cannot be loaded", again) from error
        return InductorSession(engine, loader.run, open_device(f"cuda:{number}" if kind == "cuda" else "cpu"))


def _translate(error: BaseException, what: str, hint: str) -> TrtEngineError:
    if is_out_of_memory(error):
        return MemoryExhausted("out of memory in a compiled package", hint="a smaller batch, or fewer contexts")
    first = library_reason(error)
    return EngineError(f"the compiled package {what}: {first}", hint=hint)


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _as_tensor(array: npt.NDArray[Any], name: str) -> torch.Tensor:
    """A contiguous writable array as a tensor on the same memory."""
    if array.dtype.kind == "V" or array.dtype.name not in np.sctypeDict:  # bfloat16 and float8 of `ml_dtypes`
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(_torch_dtype(name))
    return torch.from_numpy(array)


def _as_array(tensor: torch.Tensor, spec: TensorSpec) -> npt.NDArray[Any]:
    kind = numpy_dtype(spec.dtype)
    plain = tensor.contiguous()
    if kind.name in np.sctypeDict and kind.kind != "V":
        found: npt.NDArray[Any] = plain.numpy()
        return found
    stored: npt.NDArray[Any] = plain.view(torch.int16 if kind.itemsize == 2 else torch.int8).numpy()
    return stored.view(kind)


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """PyTorch's TF32 switches, which cuBLAS and cuDNN follow at each launch, for this one; then as they were."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if on else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


class _CudaArray:
    """Device memory as `__cuda_array_interface__`, of bytes."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None,
        }  # fmt: skip


class InductorSession(CheckedSession):
    """A loaded package. On the CPU `run` takes host arrays; on a GPU contexts run on the device's streams."""

    def __init__(self, engine: Engine, run: Callable[[list[torch.Tensor]], list[torch.Tensor]], device: Device) -> None:
        super().__init__()
        self.signature = engine.signature
        self.device = device
        self.on_gpu = device.name != "cpu"
        self.runs_host_arrays = not self.on_gpu
        self.profiles = engine.passport.profiles
        self._run: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = run
        self._tf32 = engine.passport.build.notes.get("tf32") == "on"
        self._computes_fp32 = self.on_gpu and not {"fp32", "tf32"}.isdisjoint(engine.passport.precision.shares)
        self._facts = {"library": f"torch {torch.__version__}", "tf32": "on" if self._tf32 else "off"}
        self.pools: list[Any] = []
        """Memory pools of captured graphs, which must outlive them."""
        self.ran = threading.local()
        """`here` in threads that have run it on a GPU."""

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs as host arrays; the caller validates feeds."""
        tensors = []
        for spec in self.signature.inputs:
            array = np.ascontiguousarray(feeds[spec.name]).reshape(feeds[spec.name].shape)
            tensors.append(_as_tensor(array if array.flags.writeable else array.copy(), spec.dtype))
        found = self.launch(tensors)
        return {spec.name: _as_array(value, spec) for spec, value in zip(self.signature.outputs, found, strict=True)}

    def launch(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """One inference; on a GPU on PyTorch's current stream, with `_launch_lock` held."""
        if self._run is None:
            raise UsageError("the session is closed", hint="load the engine again")
        try:
            with _tf32(self._tf32) if self._computes_fp32 else nullcontext():
                return self._run(tensors)
        except RuntimeError as error:
            raise _translate(error, "failed", "trt-engine doctor") from error

    def create_context(self, profile: int = 0) -> InductorContext:
        if self._run is None:
            raise UsageError("the session is closed", hint="load the engine again")
        return self._register(InductorContext(self, profile_at(self.profiles, profile), profile))

    def runtime_info(self) -> dict[str, str]:
        return dict(self._facts)

    def close(self) -> None:
        self._check_no_context()
        self._run = None
        self.pools.clear()
        if self.on_gpu:
            torch.cuda.empty_cache()  # other libraries cannot use what PyTorch's allocator keeps
        self.device.close()


class InductorContext(CheckedContext):
    """One inference in flight over buffers of the host or of a GPU."""

    _owner: InductorSession

    def __init__(self, owner: InductorSession, profile: Profile | None, index: int) -> None:
        super().__init__(owner, profile, index)
        self._stream: tuple[int, Any] = (0, None)
        self._pool: Any = None
        """Memory of the temporaries of this context's graphs, which run one after the other."""
        self.can_prebind = owner.on_gpu

    @property
    def no_graph(self) -> str | None:
        """A thread's first run makes handles and plans of cuBLAS and cuDNN, which fails in a capture."""
        has_run = not self._owner.on_gpu or hasattr(self._owner.ran, "here")
        return None if has_run else "this thread has not run it before"

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        wanted = self._check_buffers(buffers)
        tensors: dict[str, torch.Tensor] = {}
        for spec in self._owner.signature:
            if spec.name in wanted:
                shape, buffer = wanted[spec.name], buffers[spec.name]
                check_buffer_size(spec.name, buffer, nbytes := dtype(spec.dtype).nbytes(shape))
                tensors[spec.name] = self._tensor_on(buffer, nbytes, spec, shape)
        inputs = [tensors.pop(spec.name) for spec in self._owner.signature.inputs]
        self._bound = inputs, tensors, [buffers[name] for name in wanted]

    def _tensor_on(self, buffer: Any, nbytes: int, spec: TensorSpec, shape: Shape) -> torch.Tensor:
        """The buffer's memory as a tensor."""
        if self._owner.on_gpu:
            if getattr(buffer, "device", None) is not self._owner.device or getattr(buffer, "on_host", False):
                raise UsageError(
                    f"the buffer of `{spec.name}` is not on `{self._owner.device.name}`",
                    hint="`session.device.allocate`",
                )
            return self._tensor_at(buffer.pointer, nbytes, spec, shape)
        if not isinstance(buffer, HostBuffer):
            raise UsageError(f"the buffer of `{spec.name}` is not on the host", hint="`session.device.allocate`")
        return torch.from_numpy(buffer.memory()[:nbytes]).view(_torch_dtype(spec.dtype)).reshape(shape)

    def _tensor_at(self, address: int, nbytes: int, spec: TensorSpec, shape: Shape) -> torch.Tensor:
        """The memory of the GPU at this address as a tensor."""
        if not nbytes:
            return torch.empty(shape, dtype=_torch_dtype(spec.dtype), device=self._owner.device.name)
        flat = torch.as_tensor(_CudaArray(address, nbytes), device=self._owner.device.name)
        return flat.view(_torch_dtype(spec.dtype)).reshape(shape)

    def enqueue(self, stream: Stream) -> None:
        self._check_bound()
        if self._owner.on_gpu:
            self._enqueue_on_gpu(stream)
            return
        if not isinstance(stream, HostStream):
            raise UsageError("the stream is of another device", hint="`session.device.stream()`")
        inputs, outputs, held = self._bound
        stream.enqueue(self._deferred(held, lambda: self._deliver(self._owner.launch(inputs), outputs)))

    def prebind(self, addresses: tuple[int, ...], stream: Stream, *, waits: bool = False) -> Callable[[], None]:
        self._check_open()
        shapes = (self._inputs or {}) | self._outputs
        if self._inputs is None or any(-1 in shape for shape in shapes.values()):
            raise UsageError(
                "an inference was bound to addresses before all sizes were known", hint="`prepare`, then `bind`"
            )
        tensors = {
            spec.name: self._tensor_at(address, dtype(spec.dtype).nbytes(shape), spec, shape)
            for spec, address in zip(self._owner.signature, addresses, strict=True)
            for shape in (shapes[spec.name],)
        }
        inputs = [tensors.pop(spec.name) for spec in self._owner.signature.inputs]

        def launch() -> None:
            self._launch_on(stream, inputs, tensors)
            if waits:
                stream.synchronize()

        return launch

    def _enqueue_on_gpu(self, stream: Any) -> None:
        inputs, outputs, held = self._bound
        for buffer in held:
            _ = buffer.pointer  # refuses a closed one
        if stream.capturing:
            stream.retain_for_graph(*held)
        self._launch_on(stream, inputs, outputs)

    def _launch_on(self, stream: Any, inputs: list[torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        if self._stream[0] != stream.handle:
            self._stream = (stream.handle, torch.cuda.ExternalStream(stream.handle, device=self._owner.device.name))
        memory: Any = nullcontext()
        if stream.capturing:
            if self._pool is None:
                self._pool = torch.cuda.MemPool()
                self._owner.pools.append(self._pool)
            memory = torch.cuda.use_mem_pool(self._pool, device=self._owner.device.name)
        with _launch_lock, torch.cuda.stream(self._stream[1]), memory:
            aligned = [item.clone() if item.data_ptr() % _ALIGNMENT else item for item in inputs]
            self._deliver(self._owner.launch(aligned), outputs)
        self._owner.ran.here = True

    def _deliver(self, found: list[torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Copy sized outputs to their buffers, keep the others."""
        late = {}
        for spec, value in zip(self._owner.signature.outputs, found, strict=True):
            target = outputs.get(spec.name)
            if target is None:
                late[spec.name] = value
            elif tuple(value.shape) != tuple(target.shape):
                raise EngineError(
                    f"output `{spec.name}` is {tuple(value.shape)}, expected {tuple(target.shape)}",
                    hint="the model's declared shapes contradict its operators: export it again",
                )
            else:
                target.copy_(value, non_blocking=True)
        self._dynamic_outputs = late

    def outputs(self) -> dict[str, Any]:
        late = super().outputs()
        specs = {spec.name: spec for spec in self._owner.signature.outputs}
        return {name: _as_array(value.cpu(), specs[name]) for name, value in late.items()}
