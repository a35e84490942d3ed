"""TensorRT-RTX's runtime: loads and runs plans like TensorRT's, with JIT compilation."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trt_engine.atomic_io import os_error, os_errors, read_bounded, write_atomic
from trt_engine.backends.tensorrt import profile as layer_times
from trt_engine.backends.tensorrt import run as shared
from trt_engine.backends.tensorrt.binding import TENSORRT_RTX, Binding
from trt_engine.backends.tensorrt.deserialize import map_plan
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Device, Stream
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError, TrtEngineError, UsageError
from trt_engine.format import format_bytes
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


log = logging.getLogger(__name__)

SUFFIX = ".runtime_cache"
_LOCK_S = 10.0
"""Timeout for another writer, in s: kernels can be compiled again."""


def cache_path(engine: Path, requested_path: str | None, *, version: str, gpu: str) -> Path | None:
    """The runtime cache file: the chosen one, else beside the engine and named after library and GPU; None for `off`.
    `UsageError` for an existing file with another suffix."""
    if requested_path is not None and requested_path.strip().lower() in ("off", "no", "false", "0"):
        return None
    if requested_path is not None and requested_path.strip().lower() not in ("on", "yes", "true", "1", ""):
        path = Path(requested_path).expanduser()
        if path.exists() and path.suffix != SUFFIX:  # it would be overwritten
            raise UsageError(
                f"`runtime_cache` is `{path}`, which exists and may be another file",
                hint=f"name a new file, or one that ends in `{SUFFIX}`: `-O runtime_cache={path.name}{SUFFIX}`",
            )
        return path
    board = "-".join(re.findall(r"[a-z0-9]+", gpu.lower())) or "gpu"
    return engine.with_name(f"{engine.name}.{version}-{board}{SUFFIX}")


class JitContexts:
    """Creates the contexts of one engine with its strategies and runtime cache, and sums the compile time."""

    def __init__(self, binding: Binding, engine: Any, settings: RtxSettings, cache: Path | None) -> None:
        self.settings = settings
        self.contexts_s = self.inferences_s = 0.0
        """Seconds of creating contexts, and of first inferences at each shape: mostly compilation."""
        self._binding = binding
        self._path = cache
        self._read: bytes = b""
        self._state = "off"
        self._cache: Any = None
        if cache is not None:
            self._open(engine, cache)

    def context(self, engine: Any, allocation: Any) -> Any:
        """A context of the engine; None on failure. `SetupError` for an unsupported strategy."""
        config = engine.create_runtime_config()
        if config is None:
            return None
        config.set_execution_context_allocation_strategy(allocation)
        self._set_strategy(config, "cuda_graph_strategy", "CudaGraphStrategy", self.settings.cuda_graph_strategy)
        self._set_strategy(
            config,
            "dynamic_shapes_kernel_specialization_strategy",
            "DynamicShapesKernelSpecializationStrategy",
            self.settings.kernel_specialization,
        )
        if self._cache is not None and not config.set_runtime_cache(self._cache):
            log.warning("TensorRT-RTX takes no runtime cache: kernels are compiled at each start")
            self._cache, self._state = None, "not taken"
        began = time.perf_counter()
        made = engine.create_execution_context(config)
        self.contexts_s += time.perf_counter() - began
        return made

    def time_first_run(self, execute: Callable[[int], bool], done: Callable[[], None]) -> Callable[[int], bool]:
        """Wraps `execute` for a first inference: adds its time, then calls `done`."""

        def first(stream: int) -> bool:
            began = time.perf_counter()
            taken = execute(stream)
            self.inferences_s += time.perf_counter() - began
            done()
            return taken

        return first

    def no_graph(self, *, dynamic: bool) -> str | None:
        """Why our capture of inferences is not allowed; None if it is."""
        if self.settings.cuda_graph_strategy != "disabled":
            return f"TensorRT-RTX captures its own (`cuda_graph_strategy={self.settings.cuda_graph_strategy}`)"
        if dynamic and self.settings.kernel_specialization == "lazy":
            return (
                "kernels for a shape are compiled beside its first inferences (`kernel_specialization=lazy`), and a graph "
                "would keep the slower ones for any shape"
            )
        return None

    def runtime_info(self) -> dict[str, str]:
        """Compilation info: time, cache, strategies."""
        total = self.contexts_s + self.inferences_s
        return {
            "jit_s": f"{total:.3f} (contexts {self.contexts_s:.3f}, first inferences {self.inferences_s:.3f})",
            "runtime_cache": self._state,
            "kernel_specialization": self.settings.kernel_specialization,
            "cuda_graph_strategy": self.settings.cuda_graph_strategy,
        }

    def close(self) -> None:
        """Write the runtime cache. Call after the contexts are closed, before the engine is destroyed."""
        cache, self._cache = self._cache, None
        if cache is None or self._path is None:
            return
        made = cache.serialize()
        raw = b"" if made is None else bytes(made)
        if not raw:
            log.warning("TensorRT-RTX returned no runtime cache: the next start compiles again")
        elif raw != self._read:
            lock = FileLock(self._path.with_name(f".{self._path.name}.lock"), timeout=_LOCK_S)
            with _log_errors(self._path, "not saved: the next start compiles again"), lock:
                write_atomic(self._path, raw)

    # -------------------------------------------------------------------------------- its parts

    def _open(self, engine: Any, path: Path) -> None:
        config = engine.create_runtime_config()
        self._cache = None if config is None else config.create_runtime_cache()
        if self._cache is None:
            log.warning("TensorRT-RTX makes no runtime cache: kernels are compiled at each start")
            self._state = "not taken"
            return
        self._state = "new"
        with _log_errors(path, "not read: kernels are compiled again"), contextlib.suppress(FileNotFoundError):
            self._read = read_bounded(path, error=SetupError)
        if not self._read:
            return
        if self._cache.deserialize(self._read):
            self._state = f"read {format_bytes(len(self._read))}"
            return
        self._read = b""
        self._state = "refused"
        log.warning(
            "the runtime cache `%s` is damaged, or of another GPU, driver or TensorRT-RTX: kernels are compiled again",
            path,
        )

    def _set_strategy(self, runtime_config: Any, name: str, enum: str, value: str) -> None:
        """Set a strategy and read it back: setters return nothing in some releases."""
        wanted = self._binding.get_api(f"{enum}.{value.upper()}", name)
        setattr(runtime_config, name, wanted)
        if (got := getattr(runtime_config, name)) != wanted:
            raise SetupError(
                f"TensorRT-RTX did not take `{name}` {value}, it keeps {got.name.lower()}",
                hint="leave the setting out, or install another TensorRT-RTX",
            )


@contextlib.contextmanager
def _log_errors(path: Path, consequence: str) -> Iterator[None]:
    """Logs errors of the cache file, which is optional."""
    try:
        yield
    except Timeout:
        log.warning("the runtime cache `%s` is locked by another process and %s", path, consequence)
    except OSError as error:
        log.warning("the runtime cache is %s (%s)", consequence, os_error(error, path).message)
    except NotImplementedError as error:  # a file system without locks
        log.warning("the runtime cache is %s (%s)", consequence, error)
    except TrtEngineError as error:
        log.warning("the runtime cache is %s (%s)", consequence, error.message)
