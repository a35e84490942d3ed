"""Builds a TensorRT plan: parse, configure, build, check, and count its layers by dtype.

Precision is in the graph on both majors: the network is strongly typed, and `--precision` was written into the ONNX
before this. The dtype breakdown of the plan detects another type.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from trt_engine.atomic_io import os_error, read_bounded, write_atomic
from trt_engine.backends.tensorrt import configure, cuda_driver, inspector, parser_check
from trt_engine.backends.tensorrt.allocator import AllocationStats, CountingAllocator, DeviceMemory, clear_frames
from trt_engine.backends.tensorrt.binding import TENSORRT, Binding, StreamWriter, dtype_name, lifecycle_lock
from trt_engine.backends.tensorrt.build_progress import BuildProgress, run_in_thread
from trt_engine.backends.tensorrt.cuda_driver import TargetGpu
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.backends.tensorrt.number_formats import GpuFormats
from trt_engine.backends.tensorrt.plugins import load_plugins
from trt_engine.config.build import BuildConfig
from trt_engine.device import open_device
from trt_engine.errors import BuildError, SetupError, TrtEngineError
from trt_engine.format import format_bytes
from trt_engine.graph.cost import model_cost
from trt_engine.graph.dtype_breakdown import data_types
from trt_engine.model import Model
from trt_engine.plan_header import plan_header
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import DtypeShare, Precision, Requirements
from trt_engine.tensors import Signature
from trt_engine.trt import versions
from trt_engine.trt.known_warnings import find_known_warning
from trt_engine.trt.layers import dtype_shares, read_layers
from trt_engine.trt.settings import PlanSettings, parse

log = logging.getLogger(__name__)

T = TypeVar("T")
STREAM_MIN_BYTES = 2 << 30
"""Model bytes from which the plan is streamed to its file, if this TensorRT can, without a copy in memory."""
_MAX_WARNINGS = 8


class TensorRtBuilder:
    """Builds for one GPU with TensorRT's builder."""

    def identity(self, config: BuildConfig) -> str:
        _, board = _check_request(config)  # first: unsupported requests fail before casting or calibration
        return " ".join(dict.fromkeys(("tensorrt", TENSORRT.version_text, board.architecture, board.name)))

    def build(self, model: Model, config: BuildConfig, places: BuildPaths) -> BuildOutcome:
        settings, board = _check_request(config)
        if board.compute_capability:
            FORMATS.check(model.path, data_types(model.proto), [board.compute_capability], board.name)
        progress = BuildProgress(places.on_status)
        with TensorRtLogger(places.log, binding=TENSORRT) as logger:
            job = BuildJob(model, config, settings, places, board, logger, progress)
            return run_in_thread(job.run, progress)


@dataclass
class BuildJob:
    """One build, in the thread it runs in. A subclass overrides what differs for TensorRT-RTX."""

    model: Model
    config: BuildConfig
    settings: PlanSettings
    paths: BuildPaths
    gpu: TargetGpu | None
    """The GPU of this machine; None for a build that needs none."""
    logger: TensorRtLogger
    progress: BuildProgress
    notes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def binding(self) -> Binding:
        return self.logger.binding

    def run(self) -> BuildOutcome:
        here = cuda_driver.current_device(self.config.device) if self.gpu is not None else contextlib.nullcontext()
        with here, self._counting_allocator() as allocator:
            libraries = load_plugins(self.settings.plugins, self.settings.python_plugins, self.logger)
            self._warn(*self.setting_warnings())
            signature = self._use_object("Builder", self._build_with, allocator)
            gc.collect()  # free builder and network before loading the plan, to save memory
            built_by = self.check_plan()
            found = self.verify_plan(allocator)
            if allocator is not None:
                self._note_allocations(allocator.stats, allocator.error)
        said = [f"{self.binding.product}: {text}" for text in self.logger.warnings()[:_MAX_WARNINGS]]
        return BuildOutcome(
            signature=signature,
            precision=Precision(requested=self.config.precision, shares=found),
            requirements=self.requirements(built_by, tuple(Path(item).name for item in libraries)),
            warnings=tuple(dict.fromkeys((*self.warnings, *said))),
            notes=self.notes,
        )

    # -------------------------------------------------------------------------------- what differs between libraries

    def setting_warnings(self) -> Iterator[str]:
        """Warnings about costs of the settings."""
        return configure.setting_warnings(self.binding, self.settings)

    def configure(self, builder: Any, config: Any) -> None:
        """Apply all settings but profiles, timing cache and progress monitor."""
        self._warn(*configure.configure(self.binding, builder, config, self.config, self.settings))

    def requirements(self, version: str, plugins: tuple[str, ...]) -> Requirements:
        """Requirements for loading the plan."""
        gpu = self.gpu.name if self.gpu is not None and self.gpu.compute_capability else None
        return Requirements(
            library="tensorrt",
            version=version,
            compute_capability=self.gpu.compute_capability if self.gpu is not None and gpu else None,
            gpu=gpu,
            plugins=() if self.settings.serialize_plugins else plugins,
            hardware_compatibility=self.settings.hardware_compatibility,
            version_compatible=self.settings.version_compatible,
            lean_runtime=self.settings.exclude_lean_runtime,
            stripped=self.settings.strip_weights,
        )

    # -------------------------------------------------------------------------------- building

    def _use_object(self, kind: str, use: Callable[[Any, Any], T], allocator: CountingAllocator | None) -> T:
        """The result of `use` for the library's builder or runtime, and its allocator; destroys it in this call."""
        trt, product = self.binding.trt, self.binding.product
        counting = self.binding.wrap_callback(allocator) if allocator is not None else None
        make, action = partial(getattr(trt, kind), self.logger.native), f"creating {product}'s {kind.lower()}"
        with lifecycle_lock():
            made = _create(make, action, self.logger, SetupError)
        try:
            return use(made, counting)
        except BaseException as error:
            clear_frames(error)
            raise
        finally:
            with lifecycle_lock():
                del made

    def _build_with(self, builder: Any, allocator: Any) -> Signature:
        if allocator is not None:
            builder.gpu_allocator = allocator
        binding, trt, product = self.binding, self.binding.trt, self.binding.product
        network = _create(
            lambda: builder.create_network(binding.strongly_typed_flags()),
            "creating a strongly typed network",
            self.logger,
        )
        if not network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
            raise BuildError(f"{product} made a network that is not strongly typed", hint="`trt-engine doctor`")
        config = _create(builder.create_builder_config, "creating the builder's settings", self.logger)
        with configure.add_logged_reason(self.logger):
            self.configure(builder, config)
        monitor = binding.wrap_callback(self.progress)
        config.progress_monitor = monitor
        parser = self._parse(network, config)
        configure.mark_refittable(network, self.settings)
        signature = self._signature(network)
        profiles = configure.add_profiles(builder, network, config, self.config.profiles, self.settings, self.logger)
        self._serialize_used_plugins(parser, config)
        cache = TimingCache(self.paths.timing_cache, self.logger) if self.paths.timing_cache is not None else None
        if cache is not None:
            cache.attach(config)
        self.note_settings(config)
        self.notes |= {"profiles": str(profiles), "network_layers": str(network.num_layers)}
        try:
            self._serialize(builder, network, config)
        except BaseException:
            if cache is not None and self.progress.cancelled:
                cache.save(config)  # keep the timings taken so far
            raise
        if cache is not None:
            cache.save(config)
            self.notes["timing_cache"] = cache.summary()
            self._warn(*dict.fromkeys(cache.warnings))
        if self.progress.seconds:
            self.notes["phases"] = self.progress.slowest_phases()
        return signature

    def _parse(self, network: Any, config: Any) -> Any:
        looks = self.settings.dla_core is not None and self.binding.has_api("OnnxParser.set_builder_config")
        return parser_check.parse_model(network, self.model.path, self.logger, config if looks else None)

    def _signature(self, network: Any) -> Signature:
        """The model's signature in the types of the network, whose names must be the model's."""
        sides = []
        for specs, size, tensor_at in (
            (self.model.signature.inputs, network.num_inputs, network.get_input),
            (self.model.signature.outputs, network.num_outputs, network.get_output),
        ):
            tensors = {tensor.name: tensor for tensor in map(tensor_at, range(size))}
            if set(tensors) != {spec.name for spec in specs}:
                raise BuildError(
                    f"{self.binding.product}'s network has {', '.join(sorted(tensors)) or 'nothing'} where the model has "
                    f"{', '.join(sorted(spec.name for spec in specs))}",
                    hint="`trt-engine inspect` shows the model's inputs and outputs",
                )
            sides.append(
                tuple(replace(spec, dtype=self._network_dtype(spec.name, spec.dtype, tensors)) for spec in specs)
            )
        inputs, outputs = sides
        return Signature(inputs, outputs)

    def _network_dtype(self, name: str, model_dtype: str, tensors: dict[str, Any]) -> str:
        found = dtype_name(tensors[name].dtype)
        if found != model_dtype:
            self._warn(
                f"`{name}` is {model_dtype} in the model and {found} in {self.binding.product}'s network: the "
                f"engine takes {found}"
            )
        return found

    def _serialize_used_plugins(self, parser: Any, config: Any) -> None:
        """Serialize the used plugin libraries into a version-compatible plan."""
        if not self.settings.version_compatible or self.settings.exclude_lean_runtime:
            return
        used = [str(item) for item in parser.get_used_vc_plugin_libraries() or ()]
        if used:
            config.plugins_to_serialize = list(dict.fromkeys([*config.plugins_to_serialize, *used]))

    def _serialize(self, builder: Any, network: Any, config: Any) -> None:
        payload, subject = self.paths.payload, f"the build of `{self.model.path.name}`"
        can_stream = self.binding.has_api("Builder.build_serialized_network_to_stream")
        said = self.logger.problem_count
        try:
            with payload.open("wb") as file:
                if can_stream and self.model.nbytes >= STREAM_MIN_BYTES:
                    writer = StreamWriter(file.write)
                    done = builder.build_serialized_network_to_stream(
                        network, config, self.binding.wrap_callback(writer)
                    )
                    if writer.error is not None and not self.progress.cancelled:
                        raise writer.error
                else:
                    plan = builder.build_serialized_network(network, config)
                    done = plan is not None
                    if done:
                        file.write(memoryview(plan))
            if not done:
                raise self._build_error(subject, said)
        except OSError as error:
            payload.unlink(missing_ok=True)
            raise os_error(error, payload) from error
        except BaseException:
            payload.unlink(missing_ok=True)
            raise

    def _build_error(self, subject: str, problems_before: int) -> BaseException:
        """The error for a missing plan: a callback's exception, a cancelled build, or TensorRT's messages since."""
        if self.progress.error is not None:
            return self.progress.error
        if self.progress.cancelled:
            return BuildError(
                f"{subject} was stopped", hint="run it again; what was timed until now is in the timing cache"
            )
        return self.logger.make_error(subject, since=problems_before)

    # -------------------------------------------------------------------------------- afterwards

    def check_plan(self) -> str:
        """The TensorRT version in the plan's header; `BuildError` if the payload is not a plan of this TensorRT."""
        payload = self.paths.payload
        header = plan_header(payload)
        if header is None:
            raise BuildError(
                f"{self.binding.product} wrote {payload.stat().st_size} bytes that do not begin as a plan",
                hint="the disk may be full, or the libraries damaged: `trt-engine doctor`",
            )
        # the fourth part differs by distribution, and the library's counts
        if header.tensorrt[:3] != self.binding.version[:3]:
            raise BuildError(
                f"the plan states {self.binding.product} {header.version}, the bindings that built it are "
                f"{self.binding.version_text}",
                hint="two releases are on one loader path: `trt-engine doctor` lists them",
            )
        return header.version

    def verify_plan(self, allocator: CountingAllocator | None) -> dict[str, DtypeShare]:
        """Load the plan and return its layer shares by dtype; empty, with a warning, if it cannot be loaded here."""
        if self.settings.runtime_platform != "same":
            self._warn("the plan is for another platform: it was not loaded here, and its precision not counted")
            return {}
        document = self._use_object("Runtime", self._layer_document, allocator)
        if document is None:
            return {}
        layers = read_layers(document)
        self.notes["layers"] = str(len(layers))
        return dtype_shares(layers, self._macs_by_node())

    def _layer_document(self, runtime: Any, allocator: Any) -> dict[str, Any] | None:
        """The layer document of the plan's engine, destroyed in this call; None if it needs the lean runtime."""
        if allocator is not None:
            runtime.gpu_allocator = allocator
        said = self.logger.problem_count  # a successful build can have logged memory errors, which are unrelated
        with _map_plan(self.paths.payload) as plan:
            runtime.engine_host_code_allowed = self.settings.version_compatible or self.settings.serialize_plugins
            engine = runtime.deserialize_cuda_engine(plan)
            if engine is None:
                if self.settings.exclude_lean_runtime:
                    self._warn("the plan needs the lean runtime to be loaded: its precision was not counted")
                    return None
                raise self.logger.make_error("loading the plan that was just built", since=said)
            document = inspector.layer_document(self.binding, engine)
            self._note_engine(engine)
            del engine
        return document

    def _macs_by_node(self) -> dict[str, int]:
        """MACs by node at the first profile's optimum: the layer weights of the dtype breakdown."""
        shapes = {name: span.opt for profile in self.config.profiles[:1] for name, span in profile.ranges.items()}
        return model_cost(self.model.proto, shapes).macs_by_node()

    # -------------------------------------------------------------------------------- notes

    def note_settings(self, config: Any) -> None:
        trt = self.binding.trt
        self.notes |= {
            "typing": "strong",
            "optimization_level": str(config.builder_optimization_level),
            "workspace": f"{config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)} bytes",
            "tf32": "on" if config.get_flag(trt.BuilderFlag.TF32) else "off",
            "avg_timing_iterations": str(config.avg_timing_iterations),
        }

    def _note_engine(self, engine: Any) -> None:
        self.notes["aux_streams"] = str(engine.num_aux_streams)
        self.notes["refittable"] = "yes" if engine.refittable else "no"
        newer = self.binding.has_api("ICudaEngine.device_memory_size_v2")
        nbytes = engine.device_memory_size_v2 if newer else engine.device_memory_size
        self.notes["activation_memory"] = f"{nbytes} bytes"
        if self.settings.weight_streaming:
            self.notes["streamable_weights"] = f"{engine.streamable_weights_size} bytes"

    def _note_allocations(self, allocated: AllocationStats, error: BaseException | None) -> None:
        self.notes["allocations"] = str(allocated)
        if allocated.failed:
            self._warn(f"the GPU had no memory for {allocated.failed} of TensorRT's requests: tactics were left out")
        if error is not None:
            self._warn(f"TensorRT's memory was not all counted: {error}")

    def _warn(self, *texts: str) -> None:
        for text in texts:
            log.warning("%s", text)
            self.warnings.append(text)

    @contextlib.contextmanager
    def _counting_allocator(self) -> Iterator[CountingAllocator | None]:
        if not self.settings.count_allocations or self.gpu is None:
            yield None
            return
        with contextlib.ExitStack() as stack:
            memory: DeviceMemory = cuda_driver.DriverMemory(self.config.device)  # its free waits
            if self.gpu is not None and self.gpu.architecture == "fake":
                memory = stack.enter_context(contextlib.closing(open_device(self.config.device)))
            allocator = CountingAllocator(memory, lambda stream: None)  # its memory waits
            try:
                yield allocator
            except BaseException as error:
                clear_frames(error)
                raise
            finally:
                gc.collect()  # destroy objects that hold its memory
                allocator.close()


FORMATS = GpuFormats(TENSORRT.product, versions.COMPUTE_CAPABILITY)
"""The number formats TensorRT builds for each GPU."""


def _check_request(config: BuildConfig) -> tuple[PlanSettings, TargetGpu]:
    """The settings and the GPU of a build, validated; `UsageError` or `SetupError` if not possible here."""
    settings = parse(config.options)
    TENSORRT.check_version()
    board = cuda_driver.find_gpu(config.device)
    _check_machine(config, board)
    configure.check_release(TENSORRT, settings)
    return settings, board


def _check_machine(config: BuildConfig, gpu: TargetGpu) -> None:
    """`SetupError` for a GPU that does not support this TensorRT or the requested precision."""
    here = versions.Version(TENSORRT.version)
    has = versions.parse_capability(gpu.compute_capability) if gpu.compute_capability else None
    if has is not None and versions.supports(here, has) is False:
        raise SetupError(
            f"TensorRT {TENSORRT.version_text} does not run on {gpu.name} ({gpu.architecture})",
            hint=f"it needs TensorRT {versions.supported_versions_text(has)}",
        )
    if config.precision is None:
        return
    since = versions.precision_since(config.precision)
    if since is not None and here < since:
        raise SetupError(
            f"TensorRT {TENSORRT.version_text} has no {config.precision}, it came with {since}",
            hint=f"install TensorRT {since} or later, or choose another precision",
        )
    needed = versions.COMPUTE_CAPABILITY[config.precision]
    if has is not None and has < needed:
        raise SetupError(
            f"{gpu.name} ({gpu.compute_capability}) has no {config.precision}, which needs compute capability "
            f"{needed[0]}.{needed[1]}",
            hint="choose a precision this GPU has; `trt-engine doctor` lists them",
        )


def _create(
    make: Callable[[], Any], action: str, logger: TensorRtLogger, kind: type[TrtEngineError] = BuildError
) -> Any:
    """The result of `make`; the logger's reason if it fails: factories return None, constructors raise TypeError."""
    try:
        made = make()
    except TypeError as error:
        raise logger.make_error(action, kind) from error
    if made is None:
        raise logger.make_error(action, kind)
    return made


@contextlib.contextmanager
def _map_plan(path: Path) -> Iterator[Any]:
    """The memory-mapped file."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BuildError(f"the plan `{path}` cannot be read back: {error}", hint="the disk may be full") from error
    with mapped:
        yield mapped


_LOCK_S = 60.0
"""Timeout for another writer, in s: timings are worth less than the engine."""


@dataclass
class TimingCache:
    """One build's view of the cache file at `path`."""

    path: Path
    logger: TensorRtLogger
    read_bytes: int = 0
    written_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    """Why the file was not used, or the new timings not saved."""
    _native: Any = None
    """The cache object, kept alive here: the builder's configuration does not."""

    def attach(self, config: Any) -> None:
        """Attach the file's cache to the builder, or an empty one if TensorRT rejects it."""
        before = self._read_file()
        self._native = self._create(config, before) if before else None
        if self._native is not None and config.set_timing_cache(self._native, False):
            self.read_bytes = len(before)
            return
        if before:
            self.warnings.append(
                f"the timing cache `{self.path}` is damaged, or of another TensorRT or GPU: starting with an empty one"
            )
        self._native = config.create_timing_cache(b"")
        if self._native is None or not config.set_timing_cache(self._native, False):
            self.warnings.append("TensorRT takes no timing cache: every tactic is timed again and nothing is saved")

    def save(self, config: Any) -> None:
        """Write the build's timings, merged with those of concurrent builds. A failure only warns."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            with FileLock(f"{self.path}.lock", timeout=_LOCK_S):
                now = self._read_file()
                others = self._create(config, now) if now else None
                if now and (others is None or not cache.combine(others, False)):
                    log.info("what the timing cache `%s` held is not of this TensorRT and GPU: replaced", self.path)
                made = cache.serialize()
                if made is None:
                    self.warnings.append("TensorRT returned no timing cache")
                    return
                raw = bytes(made)
                if raw and raw != now:
                    write_atomic(self.path, raw)
                self.written_bytes = len(raw)
        except Timeout:
            self.warnings.append(f"the timing cache was not saved: another process held its lock for {_LOCK_S:g} s")
        except OSError as error:
            self.warnings.append(f"the timing cache was not saved: {os_error(error, self.path).message}")
        except NotImplementedError as error:  # a file system without locks
            self.warnings.append(f"the timing cache was not saved: {error}")
        except TrtEngineError as error:  # a full disk: timings are worth less than the engine
            self.warnings.append(f"the timing cache was not saved: {error.message}")

    def summary(self) -> str:
        """`read 12 KiB, kept 14 KiB`."""
        if not self.read_bytes:
            return f"new, kept {format_bytes(self.written_bytes)}"
        same = " (nothing had to be timed)" if self.written_bytes == self.read_bytes else ""
        return f"read {format_bytes(self.read_bytes)}, kept {format_bytes(self.written_bytes)}{same}"

    def _create(self, config: Any, raw: bytes) -> Any:
        """The cache in those bytes; None if rejected, where some releases return an empty cache and a warning."""
        said = self.logger.problem_count
        made = config.create_timing_cache(raw)
        warned = {known.name for text in self.logger.problems(said) if (known := find_known_warning(text)) is not None}
        return None if "timing_cache_refused" in warned or self.logger.had_errors(said) else made

    def _read_file(self) -> bytes:
        try:
            return read_bounded(self.path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.warnings.append(f"the timing cache `{self.path}` cannot be read: {error.strerror}")
            return b""
