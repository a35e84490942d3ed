"""TensorRT's runtime: loads plans, counts their memory, and creates contexts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trt_engine.backends.tensorrt import cuda_driver
from trt_engine.backends.tensorrt.allocator import CountingAllocator, clear_frames
from trt_engine.backends.tensorrt.binding import TENSORRT, Binding, dtype_name, lifecycle_lock
from trt_engine.backends.tensorrt.context import TensorRtContext
from trt_engine.backends.tensorrt.deserialize import (
    check_requirements,
    deserialize,
    make_runtime,
    refit,
    set_weight_streaming,
)
from trt_engine.backends.tensorrt.inspector import layer_document
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.backends.tensorrt.plugins import load_plugins
from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Device, Stream, open_device, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, MemoryExhausted, ModelError, SetupError, UsageError
from trt_engine.protocols import CheckedSession
from trt_engine.tensors import Signature
from trt_engine.trt.layers import LayerInfo, read_layers
from trt_engine.trt.settings import PlanSettings, parse

log = logging.getLogger(__name__)

FirstRun = Callable[[Callable[[int], bool], Callable[[], None]], Callable[[int], bool]]
"""Wraps an inference and calls the second function once it is done."""


class TensorRtSession(CheckedSession):
    """A plan on one GPU. Contexts may be created from any thread; the library allocates through `device`, counted."""

    binding: Binding = TENSORRT
    first_run: FirstRun | None = None
    """Wraps the first inference at new shapes; None if it needs none."""

    def __init__(self, engine: Engine, settings: PlanSettings, device: Device, *, owns_device: bool = False) -> None:
        super().__init__()
        self.signature: Signature = engine.signature
        self.device = device
        self.memory_strategy = settings.memory_strategy
        self.logger = TensorRtLogger(binding=self.binding)
        self._name = engine.path.name
        self._profiles: tuple[Profile, ...] = engine.passport.profiles
        self._settings = settings
        self._gpu = cuda_driver.find_gpu(device.name)
        built_with = engine.passport.build.config.get("options") or {}
        self._on_dla = settings.dla_core is not None or built_with.get("dla_core") is not None
        self._owns_device = owns_device
        self._native: Any = None
        self._runtimes: tuple[Any, ...] = ()
        self._allocator = CountingAllocator(device, _stream_waiter(device)) if settings.count_allocations else None
        self._native_allocator: Any = None
        self._closed = False
        try:
            with self.activate():
                self._load(engine, settings)
        except BaseException as error:
            self._owns_device = False  # its opener closes it
            clear_frames(error)
            self.close()
            raise

    def _load(self, engine: Engine, settings: PlanSettings) -> None:
        subject = f"loading `{self._name}`"
        load_plugins(settings.plugins, settings.python_plugins, self.logger)
        self._runtimes = self.make_runtime(settings, subject)
        if self._allocator is not None:
            self._native_allocator = self.binding.wrap_callback(self._allocator)
            self._runtimes[-1].gpu_allocator = self._native_allocator
        try:
            self._native = deserialize(self._runtimes[-1], engine.path, self.logger)
        except EngineError as error:
            raise self._out_of_memory_error(subject) or error from error
        self.budget_bytes = set_weight_streaming(self._native, settings.weight_streaming_budget, self.logger)
        """Bytes of weights kept on the GPU, if requested."""
        self._check_signature()
        if engine.passport.requirements.stripped or settings.refit_from is not None:
            refit(self._native, _refit_source(engine, settings), self.logger)
        hosted = [
            spec.name
            for spec in self.signature
            if self._native.get_tensor_location(spec.name) == self.binding.trt.TensorLocation.HOST
        ]
        inputs = {spec.name for spec in self.signature.inputs}
        self.value_inputs = tuple(name for name in hosted if name in inputs)
        """Shape inputs, which TensorRT reads on the host."""
        self.host_outputs = frozenset(name for name in hosted if name not in inputs)

    def create_context(self, profile: int = 0) -> TensorRtContext:
        self._check_open()
        count = int(self._native.num_optimization_profiles)
        if not 0 <= profile < max(count, 1):
            raise UsageError(f"profile {profile} does not exist, the engine has {count}", hint="profiles count from 0")
        said, refused, subject = (
            self.logger.problem_count,
            self.failed_allocations(),
            f"making a context of `{self._name}`",
        )
        with self.activate():
            native = self.new_context(self._native)
            if native is None:
                raise self._out_of_memory_error(subject, refused) or self.logger.make_error(subject, EngineError, said)
            if native.active_optimization_profile != profile:
                self._set_profile(native, profile, said)
            self._limit_cache(native)
        span = self._profiles[profile] if profile < len(self._profiles) else None
        return self._register(TensorRtContext(self, native, span, profile))

    def new_context(self, engine: Any) -> Any:
        """A native context with the memory strategy in force; None on failure."""
        strategy = f"ExecutionContextAllocationStrategy.{self.memory_strategy.upper()}"
        return engine.create_execution_context(self.binding.get_api(strategy, "memory_strategy"))

    def capture_blocker(self, native: Any, stream: Stream) -> str | None:
        """Why the library cannot capture a context's inference on a stream; None if it can."""
        return None

    def save_caches(self) -> None:
        """Save caches of the engine before it is destroyed; its contexts are closed."""

    def make_runtime(self, settings: PlanSettings, subject: str) -> tuple[Any, ...]:
        """The library's runtimes: the last loads plans, the others must outlive it."""
        return make_runtime(self.logger, settings, subject)

    def layers(self) -> tuple[LayerInfo, ...]:
        """The engine's layers, in the order they run."""
        self._check_open()
        with self.activate():
            return read_layers(layer_document(self.binding, self._native))

    def runtime_info(self) -> dict[str, str]:
        """Runtime information: versions, GPU, memory, streams, weights."""
        self._check_open()
        native = self._native
        facts = {
            "library": f"{self.binding.module} {self.binding.version_text}",
            "gpu": " ".join(part for part in (self._gpu.name, self._gpu.architecture) if part),
            "layers": str(native.num_layers),
            "aux_streams": str(native.num_aux_streams),
            "profiles": str(native.num_optimization_profiles),
            "memory_strategy": self.memory_strategy,
            "scratch_bytes": str(self._scratch_bytes()),
        }
        if self._allocator is not None:
            facts["allocated"] = str(self._allocator.stats)
        if native.streamable_weights_size:
            kept = native.streamable_weights_size if self.budget_bytes is None else self.budget_bytes
            facts["weights_on_device"] = f"{kept} of {native.streamable_weights_size} bytes"
        if self.no_graph:
            facts["graphs"] = f"none: {self.no_graph}"
        return facts

    @property
    def no_graph(self) -> str | None:
        """Why no inference of this session can be captured in a graph; None where it can."""
        if self.budget_bytes is not None and self.budget_bytes < self._native.streamable_weights_size:
            return "weights are streamed, and TensorRT then waits inside the call"
        if self._on_dla:
            return "DLA runs a part of it, and its work cannot be captured"
        return None

    def close(self) -> None:
        """Destroy contexts, engine, runtimes, memory and logger, in this order."""
        self._check_no_context()
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as context:
            with contextlib.suppress(SetupError):  # the driver is gone: free the rest anyway
                context.enter_context(self.activate())
            if self._native is not None:
                self.save_caches()
            self._native = None
            with lifecycle_lock():
                for _ in range(len(self._runtimes)):
                    self._runtimes = self._runtimes[:-1]
            if self._allocator is not None:
                self._allocator.close()
            self._native_allocator = None
        if self._owns_device:
            self.device.close()
        self.logger.close()

    # -------------------------------------------------------------------------------- for its contexts

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Makes the session's GPU current in this thread."""
        return cuda_driver.current_device(self.device.name)

    def failed_allocations(self) -> int:
        """Number of failed device allocations so far; 0 if not counted."""
        return self._allocator.stats.failed if self._allocator is not None else 0

    # -------------------------------------------------------------------------------- its parts

    def _set_profile(self, native: Any, profile: int, problems_before: int) -> None:
        stream = self.device.stream()
        try:
            try:
                switched = native.set_optimization_profile_async(profile, stream.handle)
            except RuntimeError as error:
                raise self.logger.make_error(f"choosing profile {profile}", EngineError, problems_before) from error
            if not switched:
                raise self.logger.make_error(f"choosing profile {profile}", EngineError, problems_before)
            stream.synchronize()
        finally:
            stream.close()

    def _limit_cache(self, native: Any) -> None:
        limit = self._settings.persistent_cache_limit
        if limit is None:
            return
        native.persistent_cache_limit = limit
        if (got := native.persistent_cache_limit) != limit:
            log.warning("TensorRT keeps %d bytes of L2 for activations, %d were requested", got, limit)

    def _check_signature(self) -> None:
        """`EngineError` unless the plan has the inputs and outputs of its passport."""
        native, trt = self._native, self.binding.trt
        names = [native.get_tensor_name(index) for index in range(native.num_io_tensors)]
        inputs = {spec.name for spec in self.signature.inputs}
        stated = {
            name: (native.get_tensor_mode(name) == trt.TensorIOMode.INPUT, dtype_name(native.get_tensor_dtype(name)))
            for name in names
        }
        written = {spec.name: (spec.name in inputs, spec.dtype) for spec in self.signature}
        if stated == written:
            return
        differ = sorted({*stated} ^ {*written}) or [name for name in stated if stated[name] != written[name]]
        raise EngineError(
            f"`{self._name}` is not the plan of its passport: `{differ[0]}` is "
            f"{_tensor_spec(stated.get(differ[0]))}, the passport states {_tensor_spec(written.get(differ[0]))}",
            hint="build the engine again, or bring the passport it was sealed with",
        )

    def _scratch_bytes(self) -> int:
        """Bytes of the contexts' scratch memory, TensorRT's or ours."""
        contexts: list[Any] = list(self._open)  # others may be opened meanwhile
        if self.memory_strategy == "user_managed":
            return sum(context.scratch_bytes for context in contexts)
        newer = self.binding.has_api("ICudaEngine.device_memory_size_v2")
        return len(contexts) * int(self._native.device_memory_size_v2 if newer else self._native.device_memory_size)

    def _out_of_memory_error(self, subject: str, before: int = 0) -> MemoryExhausted | None:
        if self._allocator is None or self.failed_allocations() <= before:
            return None
        return MemoryExhausted(
            f"{subject} failed: TensorRT was refused memory on `{self.device.name}` ({self._allocator.stats})",
            hint="a smaller profile, fewer contexts, or `-O weight_streaming_budget=` where it was built for it",
        )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", hint="load the engine again")


class TensorRtRuntime:
    """Loads plans."""

    session: type[TensorRtSession] = TensorRtSession
    parse_options: Callable[[Mapping[str, str]], Any] = staticmethod(parse)

    @property
    def binding(self) -> Binding:
        return self.session.binding

    def load(self, engine: Engine, config: RuntimeConfig, *, device: Device | None = None) -> TensorRtSession:
        """The session of a plan on the requested device; a caller's `device` stays open when the session closes."""
        settings = self.parse_options(config.options)
        name = device.name if device is not None else config.device or engine.passport.device
        if parse_device(name)[0] not in ("cuda", "fake"):
            raise UsageError(f"{self.binding.product} does not run on `{name}`", hint="`--device cuda:0`")
        check_requirements(engine, settings.to_plan_settings)
        cuda_driver.find_gpu(name)  # without a driver TensorRT's objects crash when used
        self.binding.check_version()
        if device is not None:
            return self.session(engine, settings, device)
        opened = open_device(name)
        try:
            return self.session(engine, settings, opened, owns_device=True)
        except BaseException:
            opened.close()
            raise


def layers(
    engine: Engine, config: RuntimeConfig | None = None, *, runtime: TensorRtRuntime | None = None
) -> tuple[LayerInfo, ...]:
    """The layers of an engine, in the order they run."""
    session = (runtime or TensorRtRuntime()).load(engine, config or RuntimeConfig())
    try:
        return session.layers()
    finally:
        session.close()


def _refit_source(engine: Engine, settings: PlanSettings) -> Path:
    """The ONNX to refit a plan from: of the settings, else of its passport."""
    if settings.refit_from is not None:
        path = Path(settings.refit_from).expanduser()
        if not path.is_file():
            raise ModelError(
                f"the model `{path}` to take weights from does not exist", hint="`-O refit_from=MODEL.onnx`"
            )
        return path
    source = engine.passport.model
    if "prepared_digest" in engine.passport.build.notes:
        raise EngineError(
            f"`{engine.path.name}` was built from a copy of `{source.name}` in another precision, which is gone",
            hint="make that copy again (`trt-engine cast` or `quantize`) and give it: `-O refit_from=COPY.onnx`",
        )
    path = Path(source.file)
    if not path.is_file():
        raise EngineError(
            f"`{engine.path.name}` was stripped of its weights, and `{path}` they came from is not here",
            hint="`-O refit_from=MODEL.onnx` with the model it was built from",
        )
    return path


def _stream_waiter(device: Device) -> Callable[[int], None]:
    """The allocator's function to synchronize a stream by its handle."""
    if parse_device(device.name)[0] == "cuda":
        return lambda handle: cuda_driver.synchronize(handle) if handle else device.synchronize()
    return lambda handle: device.synchronize()


def _tensor_spec(layer_tensor: tuple[bool, str] | None) -> str:
    if layer_tensor is None:
        return "not there"
    return f"an {'input' if layer_tensor[0] else 'output'} of {layer_tensor[1]}"
