"""TensorRT's runtime: plans are loaded, their memory is counted, and contexts run them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt import compat, driver
from trt_engine.backends.tensorrt.allocator import CountingAllocator, let_go
from trt_engine.backends.tensorrt.context import TensorRtContext
from trt_engine.backends.tensorrt.inspector import layer_document
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.backends.tensorrt.plugins import load_plugins
from trt_engine.backends.tensorrt.reading import check_needs, deserialised, make_runtime, streamed
from trt_engine.backends.tensorrt.refit import refit
from trt_engine.config import Profile, RuntimeConfig
from trt_engine.device import Device, open_device, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, MemoryExhausted, ModelError, SetupError, UsageError
from trt_engine.plans.layers import LayerInfo, read_layers
from trt_engine.plans.settings import PlanSettings, parse
from trt_engine.tensors import Signature

__all__ = ["TensorRtRuntime", "TensorRtSession", "layers"]

log = logging.getLogger(__name__)


class TensorRtRuntime:
    """Loads plans."""

    def load(self, engine: Engine, config: RuntimeConfig, *, device: Device | None = None) -> TensorRtSession:
        """The session of a plan on the device asked for; a `device` of the caller's stays open when the session closes."""
        settings = parse(config.options)
        name = device.name if device is not None else config.device or engine.passport.device
        if parse_device(name)[0] not in ("cuda", "fake"):
            raise UsageError(f"TensorRT does not run on `{name}`", hint="`--device cuda:0`")
        check_needs(engine, settings)
        driver.check_driver(name)  # TensorRT's own objects look whole without a driver, and crash
        compat.check_version()
        if device is not None:
            return TensorRtSession(engine, settings, device)
        opened = open_device(name)
        try:
            return TensorRtSession(engine, settings, opened, owns_device=True)
        except BaseException:
            opened.close()
            raise


class TensorRtSession:
    """A plan on one GPU. Contexts from any thread; TensorRT's own memory is taken through `device` and counted."""

    def __init__(self, engine: Engine, settings: PlanSettings, device: Device, *, owns_device: bool = False) -> None:
        self.signature: Signature = engine.signature
        self.device = device
        self.memory_strategy = settings.memory_strategy
        self.logger = TensorRtLogger()
        self._name = engine.path.name
        self._profiles: tuple[Profile, ...] = engine.passport.profiles
        self._settings = settings
        self._board = driver.board(device.name)
        built_with = engine.passport.build.config.get("options") or {}
        self._on_dla = settings.dla_core is not None or built_with.get("dla_core") is not None
        self._open: set[TensorRtContext] = set()
        self._opening = threading.Lock()
        self._owns_device = owns_device
        self._native: Any = None
        self._runtimes: tuple[Any, ...] = ()
        self._allocator = CountingAllocator(device, _waiting_on(device)) if settings.count_allocations else None
        self._closed = False
        try:
            with self.current():
                self._load(engine, settings)
        except BaseException as error:
            self._owns_device = False  # whoever opened it closes it
            let_go(error)
            self.close()
            raise

    def _load(self, engine: Engine, settings: PlanSettings) -> None:
        subject = f"loading `{self._name}`"
        load_plugins(settings.plugins, settings.python_plugins, self.logger)
        self._runtimes = make_runtime(self.logger, settings, subject)
        if self._allocator is not None:
            self._runtimes[-1].gpu_allocator = self._allocator
        try:
            self._native = deserialised(self._runtimes[-1], engine.path, self.logger)
        except EngineError as error:
            raise self._for_want_of_memory(subject) or error from error
        self.budget_bytes = streamed(self._native, settings.weight_streaming_budget, self.logger)
        """Bytes of weights kept on the GPU, where that was asked for."""
        self._check_signature()
        if engine.passport.needs.stripped or settings.refit_from is not None:
            refit(self._native, _weights_for(engine, settings), self.logger)
        hosted = [
            spec.name
            for spec in self.signature
            if self._native.get_tensor_location(spec.name) == trt.TensorLocation.HOST
        ]
        inputs = {spec.name for spec in self.signature.inputs}
        self.value_inputs = tuple(name for name in hosted if name in inputs)
        """Inputs whose values decide shapes, which TensorRT reads on the host."""
        self.host_outputs = frozenset(name for name in hosted if name not in inputs)

    def context(self, profile: int = 0) -> TensorRtContext:
        self._check_open()
        count = int(self._native.num_optimization_profiles)
        if not 0 <= profile < max(count, 1):
            raise UsageError(f"there is no profile {profile}, the engine has {count}", hint="profiles count from 0")
        said, refused, subject = self.said(), self.refusals(), f"making a context of `{self._name}`"
        with self.current():
            native = self._native.create_execution_context(
                compat.reach(f"ExecutionContextAllocationStrategy.{self.memory_strategy.upper()}", "memory_strategy")
            )
            if native is None:
                raise self._for_want_of_memory(subject, refused) or self.logger.failure(subject, EngineError, said)
            if native.active_optimization_profile != profile:
                self._switch(native, profile, said)
            self._limit_cache(native)
        span = self._profiles[profile] if profile < len(self._profiles) else None
        made = TensorRtContext(self, native, span, profile)
        with self._opening:
            self._open.add(made)
        return made

    def layers(self) -> tuple[LayerInfo, ...]:
        """What the engine tells of its layers, in the order they run."""
        self._check_open()
        with self.current():
            return read_layers(layer_document(self._native))

    def facts(self) -> dict[str, str]:
        """What runs: versions, GPU, memory, streams, weights."""
        self._check_open()
        native = self._native
        facts = {
            "library": f"tensorrt {compat.version_text()}",
            "gpu": " ".join(part for part in (self._board.name, self._board.architecture) if part),
            "layers": str(native.num_layers),
            "aux_streams": str(native.num_aux_streams),
            "profiles": str(native.num_optimization_profiles),
            "memory_strategy": self.memory_strategy,
            "scratch_bytes": str(self._scratch_bytes()),
        }
        if self._allocator is not None:
            facts["allocated"] = str(self._allocator.allocated)
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
        """Contexts before the engine, the engine before its runtimes, its memory then, the logger last."""
        with self._opening:
            if self._open:
                raise UsageError(
                    f"the session has {len(self._open)} open context(s) and cannot close", hint="close them first"
                )
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as context:
            with contextlib.suppress(
                SetupError
            ):  # a driver that went away: what there is to free is freed all the same
                context.enter_context(self.current())
            self._native = None
            while self._runtimes:
                self._runtimes = self._runtimes[:-1]
            if self._allocator is not None:
                self._allocator.close()
        if self._owns_device:
            self.device.close()
        self.logger.close()

    # -------------------------------------------------------------------------------- for its contexts

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread's GPU is the session's."""
        return driver.current(self.device.name)

    def said(self) -> int:
        """How many grave messages there were until now: what a failure is looked for behind."""
        return self.logger.said

    def refusals(self) -> int:
        """How many times until now TensorRT asked for memory the device did not have; 0 where nobody counts."""
        return self._allocator.allocated.refused if self._allocator is not None else 0

    def _forget(self, context: TensorRtContext) -> None:
        with self._opening:
            self._open.discard(context)

    # -------------------------------------------------------------------------------- its parts

    def _switch(self, native: Any, profile: int, said: int) -> None:
        stream = self.device.stream()
        try:
            try:
                switched = native.set_optimization_profile_async(profile, stream.handle)
            except RuntimeError as error:
                raise self.logger.failure(f"choosing profile {profile}", EngineError, said) from error
            if not switched:
                raise self.logger.failure(f"choosing profile {profile}", EngineError, said)
            stream.synchronize()
        finally:
            stream.close()

    def _limit_cache(self, native: Any) -> None:
        limit = self._settings.persistent_cache_limit
        if limit is None:
            return
        native.persistent_cache_limit = limit
        if (got := native.persistent_cache_limit) != limit:
            log.warning("TensorRT keeps %d bytes of L2 for activations, asked for were %d", got, limit)

    def _check_signature(self) -> None:
        """`EngineError` unless the plan has the inputs and outputs its passport says."""
        native = self._native
        names = [native.get_tensor_name(index) for index in range(native.num_io_tensors)]
        inputs = {spec.name for spec in self.signature.inputs}
        told = {
            name: (
                native.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
                compat.dtype_name(native.get_tensor_dtype(name)),
            )
            for name in names
        }
        written = {spec.name: (spec.name in inputs, spec.dtype) for spec in self.signature}
        if told == written:
            return
        differ = sorted({*told} ^ {*written}) or [name for name in told if told[name] != written[name]]
        raise EngineError(
            f"`{self._name}` is not the plan of its passport: `{differ[0]}` is "
            f"{_tensor(told.get(differ[0]))}, the passport says {_tensor(written.get(differ[0]))}",
            hint="build the engine again, or bring the passport it was sealed with",
        )

    def _scratch_bytes(self) -> int:
        """Device memory of the contexts: TensorRT's own scratch, or what was given for it."""
        with self._opening:
            given = sum(context.scratch_bytes for context in self._open)
            count = len(self._open)
        if self.memory_strategy == "user_managed":
            return given
        newer = compat.has("ICudaEngine.device_memory_size_v2")
        return count * int(self._native.device_memory_size_v2 if newer else self._native.device_memory_size)

    def _for_want_of_memory(self, subject: str, before: int = 0) -> MemoryExhausted | None:
        if self._allocator is None or self.refusals() <= before:
            return None
        return MemoryExhausted(
            f"{subject} failed: TensorRT was refused memory on `{self.device.name}` ({self._allocator.allocated})",
            hint="a smaller profile, fewer contexts, or `-O weight_streaming_budget=` where it was built for it",
        )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", hint="load the engine again")


def layers(engine: Engine, config: RuntimeConfig | None = None) -> tuple[LayerInfo, ...]:
    """What an engine tells of its layers, in the order they run."""
    session = TensorRtRuntime().load(engine, config or RuntimeConfig())
    try:
        return session.layers()
    finally:
        session.close()


def _weights_for(engine: Engine, settings: PlanSettings) -> Path:
    """The ONNX a plan's weights are put back from: the one given, else the one its passport names."""
    if settings.refit_from is not None:
        path = Path(settings.refit_from).expanduser()
        if not path.is_file():
            raise ModelError(f"there is no model `{path}` to take weights from", hint="`-O refit_from=MODEL.onnx`")
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


def _waiting_on(device: Device) -> Callable[[int], None]:
    """How the allocator waits for a stream of which TensorRT gives the handle."""
    if parse_device(device.name)[0] == "cuda":
        return lambda handle: driver.synchronize(handle) if handle else device.synchronize()
    return lambda handle: device.synchronize()


def _tensor(told: tuple[bool, str] | None) -> str:
    if told is None:
        return "not there"
    return f"an {'input' if told[0] else 'output'} of {told[1]}"
