"""TensorRT-RTX's runtime: loads and runs plans like TensorRT's, with JIT compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_engine.atomic_io import os_errors
from trt_engine.backends.tensorrt import profile as layer_times
from trt_engine.backends.tensorrt import run as shared
from trt_engine.backends.tensorrt.binding import TENSORRT_RTX
from trt_engine.backends.tensorrt.deserialize import map_plan
from trt_engine.backends.tensorrt_rtx.jit import JitContexts, cache_path
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Device, Stream
from trt_engine.engine import Engine
from trt_engine.errors import EngineError
from trt_engine.records.profile import LayerProfile
from trt_engine.tensors import Tensors
from trt_engine.trt.layers import LayerInfo
from trt_engine.trt.rtx_settings import RtxSettings, parse
from trt_engine.trt.settings import PlanSettings


class TensorRtRtxSession(shared.TensorRtSession):
    """A plan of TensorRT-RTX on one GPU."""

    binding = TENSORRT_RTX
    compiles_at_first_use = True

    def __init__(self, engine: Engine, settings: RtxSettings, device: Device, *, owns_device: bool = False) -> None:
        self._rtx, self._path = settings, engine.path
        self._jit: JitContexts | None = None
        super().__init__(engine, settings.to_plan_settings, device, owns_device=owns_device)
        cache = cache_path(engine.path, settings.runtime_cache, version=self.binding.version_text, gpu=self._gpu.name)
        try:
            with self.activate():
                self._jit = JitContexts(self.binding, self._native, settings, cache)
        except BaseException:
            self._owns_device = False  # its opener closes it
            self.close()
            raise
        self.first_run = self._jit.time_first_run

    def make_runtime(self, settings: PlanSettings, subject: str) -> tuple[Any, ...]:
        made = super().make_runtime(settings, subject)
        if self._rtx.deferred_weights:
            made[-1].defer_weights_loading = True
        return made

    def new_context(self, engine: Any) -> Any:
        assert self._jit is not None
        strategy = f"ExecutionContextAllocationStrategy.{self.memory_strategy.upper()}"
        made = self._jit.context(engine, self.binding.get_api(strategy, "memory_strategy"))
        if made is not None and self._rtx.deferred_weights and not engine.weights_loaded:
            before, refused = self.logger.problem_count, self.failed_allocations()
            subject = f"loading the weights of `{self._name}`"
            if not _load_weights(engine, self._path):
                out_of_memory = self._out_of_memory_error(subject, refused)
                raise out_of_memory or self.logger.make_error(subject, EngineError, before)
        return made

    def runtime_info(self) -> dict[str, str]:
        return super().runtime_info() | (self._jit.runtime_info() if self._jit is not None else {})

    @property
    def no_graph(self) -> str | None:
        if (reason := super().no_graph) is not None or self._jit is None:
            return reason
        return self._jit.no_graph(dynamic=any(-1 in spec.shape for spec in self.signature.inputs))

    def capture_blocker(self, native: Any, stream: Stream) -> str | None:
        if native.is_stream_capturable(stream.handle):
            return None
        return (
            "TensorRT-RTX cannot capture this inference: `-O require_user_allocation=on` at build with "
            "`-O memory_strategy=user_managed` may help, or `-O cuda_graph_strategy=whole_graph_capture`"
        )

    def save_caches(self) -> None:
        if self._jit is not None:
            self._jit.close()


class TensorRtRtxRuntime(shared.TensorRtRuntime):
    """Loads plans of TensorRT-RTX."""

    session = TensorRtRtxSession
    parse_options = staticmethod(parse)


def _load_weights(engine: Any, path: Path) -> bool:
    """Load the weights deferred at deserialization; False on failure."""
    with os_errors(path), map_plan(path) as plan:
        return bool(engine.load_weights(plan))


def layers(engine: Engine, config: RuntimeConfig | None = None) -> tuple[LayerInfo, ...]:
    """The layers of an engine, in the order they run."""
    return shared.layers(engine, config, runtime=TensorRtRtxRuntime())


def profile(engine: Engine, feeds: Tensors, config: RuntimeConfig, **how: Any) -> LayerProfile:
    """The times of the engine's layers by the device's clock."""
    keep: Path | None = how["keep"]
    return layer_times.profile(
        engine, feeds, config,
        inferences=how["inferences"], warmup=how["warmup"], keep=keep, runtime=TensorRtRtxRuntime(),
    )  # fmt: skip
