"""From a model to a TensorRT plan: parsed, configured, built, checked, and its layers counted.

Precision is in the graph on both majors: the network is strongly typed, and what `--precision` asked for was written into
the ONNX before this. A plan in which TensorRT chose another type is found by the census, not hoped against.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt import compat, configure, driver, inspector, parsing
from trt_engine.backends.tensorrt.allocator import Allocated, CountingAllocator, Memory, let_go
from trt_engine.backends.tensorrt.driver import Board
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.backends.tensorrt.plugins import load_plugins
from trt_engine.backends.tensorrt.progress import Progress, run_beside
from trt_engine.backends.tensorrt.timing import TimingCache
from trt_engine.config import BuildConfig
from trt_engine.device import open_device
from trt_engine.engine import Needs, Precision, Share, plan_header
from trt_engine.errors import BuildError, SetupError, TrtEngineError
from trt_engine.files import explain
from trt_engine.graph.flops import count
from trt_engine.graph.load import read_proto
from trt_engine.model import Model
from trt_engine.plans import versions
from trt_engine.plans.layers import census, read_layers
from trt_engine.plans.settings import PlanSettings, parse
from trt_engine.protocols import BuildOutcome, BuildPlaces
from trt_engine.tensors import Signature

__all__ = ["TensorRtBuilder"]

log = logging.getLogger(__name__)

STREAMED_FROM = 2 << 30
"""Bytes of model from which the plan goes to its file piece by piece, where this TensorRT can: no copy of it in memory."""
_SHOWN_WARNINGS = 8


class TensorRtBuilder:
    """Builds for one GPU through TensorRT's own builder."""

    def identity(self, config: BuildConfig) -> str:
        _, board = _admitted(config)  # asked first: what cannot be built is refused before it is cast or calibrated
        return " ".join(dict.fromkeys(("tensorrt", compat.version_text(), board.architecture, board.name)))

    def build(self, model: Model, config: BuildConfig, places: BuildPlaces) -> BuildOutcome:
        settings, board = _admitted(config)
        progress = Progress(places.doing)
        with TensorRtLogger(places.log) as logger:
            job = _Job(model, config, settings, places, board, logger, progress)
            return run_beside(job.run, progress)


@dataclass
class _Job:
    """One build, in the thread it runs in."""

    model: Model
    config: BuildConfig
    settings: PlanSettings
    places: BuildPlaces
    board: Board
    logger: TensorRtLogger
    progress: Progress
    notes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def run(self) -> BuildOutcome:
        with driver.current(self.config.device), self._counting() as allocator:
            libraries = load_plugins(self.settings.plugins, self.settings.python_plugins, self.logger)
            self._warn(*configure.warnings_of(self.settings))
            signature = self._write_plan(allocator)
            gc.collect()  # builder and network go before the plan is read: their memory is not both needed
            built_by = self._check_plan()
            found = self._prove(allocator)
            if allocator is not None:
                self._note_allocations(allocator.allocated, allocator.error)
        said = [f"TensorRT: {text}" for text in self.logger.warnings()[:_SHOWN_WARNINGS]]
        return BuildOutcome(
            signature=signature,
            precision=Precision(asked=self.config.precision, found=found),
            needs=Needs(
                library="tensorrt",
                version=built_by,
                compute_capability=self.board.compute_capability or None,
                gpu=self.board.name if self.board.compute_capability else None,
                plugins=() if self.settings.serialize_plugins else tuple(Path(item).name for item in libraries),
                hardware_compatibility=self.settings.hardware_compatibility,
                version_compatible=self.settings.version_compatible,
                lean_runtime=self.settings.exclude_lean_runtime,
                stripped=self.settings.strip_weights,
            ),
            warnings=tuple(dict.fromkeys((*self.warnings, *said))),
            notes=self.notes,
        )

    # -------------------------------------------------------------------------------- building

    def _write_plan(self, allocator: CountingAllocator | None) -> Signature:
        """Build the plan into its file; the signature as TensorRT takes it. Its objects end with this call."""
        builder = _made(lambda: trt.Builder(self.logger), "creating TensorRT's builder", self.logger, SetupError)
        if allocator is not None:
            builder.gpu_allocator = allocator
        network = _made(
            lambda: builder.create_network(compat.strongly_typed()), "creating a strongly typed network", self.logger
        )
        if not network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
            raise BuildError("TensorRT made a network that is not strongly typed", hint="`trt-engine doctor`")
        config = _made(builder.create_builder_config, "creating the builder's settings", self.logger)
        configure.configure(builder, config, self.config, self.settings)
        config.progress_monitor = self.progress
        parser = self._parse(network, config)
        configure.mark_refittable(network, self.settings)
        signature = self._signature(network)
        profiles = configure.add_profiles(builder, network, config, self.config.profiles, self.settings, self.logger)
        self._carry_used_libraries(parser, config)
        cache = TimingCache(self.places.timing_cache) if self.places.timing_cache is not None else None
        if cache is not None:
            cache.attach(config)
        self._note_settings(config, profiles, network.num_layers)
        try:
            self._serialize(builder, network, config)
        except BaseException:
            if cache is not None and self.progress.cancelled:
                cache.keep(config)  # what was timed until then need not be timed again
            raise
        if cache is not None:
            cache.keep(config)
            self.notes["timing_cache"] = cache.note()
            self._warn(*dict.fromkeys(cache.warnings))
        if self.progress.seconds:
            longest = sorted(self.progress.seconds.items(), key=lambda item: -item[1])[:4]
            self.notes["phases"] = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
        return signature

    def _parse(self, network: Any, config: Any) -> Any:
        looks = self.settings.dla_core is not None and compat.has("OnnxParser.set_builder_config")
        return parsing.parse(network, self.model.path, self.logger, config if looks else None)

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
                    f"TensorRT's network has {', '.join(sorted(tensors)) or 'nothing'} where the model has "
                    f"{', '.join(sorted(spec.name for spec in specs))}",
                    hint="`trt-engine inspect` shows the model's inputs and outputs",
                )
            sides.append(tuple(replace(spec, dtype=self._type_of(spec.name, spec.dtype, tensors)) for spec in specs))
        return Signature(*sides)

    def _type_of(self, name: str, asked: str, tensors: dict[str, Any]) -> str:
        found = compat.dtype_name(tensors[name].dtype)
        if found != asked:
            self._warn(f"`{name}` is {asked} in the model and {found} in TensorRT's network: the engine takes {found}")
        return found

    def _carry_used_libraries(self, parser: Any, config: Any) -> None:
        """A plan for later versions takes along the plugin libraries its operators come from."""
        if not self.settings.version_compatible or self.settings.exclude_lean_runtime:
            return
        used = [str(item) for item in parser.get_used_vc_plugin_libraries() or ()]
        if used:
            config.plugins_to_serialize = list(dict.fromkeys([*config.plugins_to_serialize, *used]))

    def _serialize(self, builder: Any, network: Any, config: Any) -> None:
        payload, subject = self.places.payload, f"the build of `{self.model.path.name}`"
        streams = compat.has("Builder.build_serialized_network_to_stream") and self.model.nbytes >= STREAMED_FROM
        said = self.logger.said
        try:
            with payload.open("wb") as file:
                if streams:
                    writer = compat.stream_writer(file.write)
                    done = builder.build_serialized_network_to_stream(network, config, writer)
                    if writer.error is not None and not self.progress.cancelled:
                        raise writer.error
                else:
                    plan = builder.build_serialized_network(network, config)
                    done = plan is not None
                    if done:
                        file.write(memoryview(plan))
            if not done:
                raise self._failed(subject, said)
        except OSError as error:
            payload.unlink(missing_ok=True)
            raise explain(error, payload) from error
        except BaseException:
            payload.unlink(missing_ok=True)
            raise

    def _failed(self, subject: str, said: int) -> BaseException:
        """Why there is no plan: a callback's own exception, somebody who stopped it, or what TensorRT said since."""
        if self.progress.error is not None:
            return self.progress.error
        if self.progress.cancelled:
            return BuildError(
                f"{subject} was stopped", hint="run it again; what was timed until now is in the timing cache"
            )
        return self.logger.failure(subject, since=said)

    # -------------------------------------------------------------------------------- afterwards

    def _check_plan(self) -> str:
        """The TensorRT the plan says it is of; `BuildError` for a payload that does not begin as a plan of this one."""
        payload = self.places.payload
        header = plan_header(payload)
        if header is None:
            raise BuildError(
                f"TensorRT wrote {payload.stat().st_size} bytes that do not begin as a plan",
                hint="the disk may be full, or the TensorRT libraries damaged: `trt-engine doctor`",
            )
        if header.tensorrt[:3] != compat.VERSION[:3]:  # the fourth is of a distribution, and the library's counts
            raise BuildError(
                f"the plan says TensorRT {header.version}, the bindings that built it are {compat.version_text()}",
                hint="two TensorRTs lie on one loader path: `trt-engine doctor` lists them",
            )
        return header.version

    def _prove(self, allocator: CountingAllocator | None) -> dict[str, Share]:
        """Load the plan as a user will and count its layers by type; empty, and said, where that cannot be done here."""
        if self.settings.runtime_platform != "same":
            self._warn("the plan is for another platform: it was not loaded here, and its precision not counted")
            return {}
        said = self.logger.said  # a build that succeeds can have complained of memory: that is no reason for this
        with _opened(self.places.payload) as plan:
            runtime = _made(lambda: trt.Runtime(self.logger), "creating TensorRT's runtime", self.logger, SetupError)
            runtime.engine_host_code_allowed = self.settings.version_compatible or self.settings.serialize_plugins
            if allocator is not None:
                runtime.gpu_allocator = allocator
            engine = runtime.deserialize_cuda_engine(plan)
            if engine is None:
                if self.settings.exclude_lean_runtime:
                    self._warn("the plan needs the lean runtime to be loaded: its precision was not counted")
                    return {}
                raise self.logger.failure("loading the plan that was just built", since=said)
            document = inspector.layer_document(engine)
            self._note_engine(engine)
            del engine, runtime
        layers = read_layers(document)
        self.notes["layers"] = str(len(layers))
        return census(layers, self._macs())

    def _macs(self) -> dict[str, int]:
        """Multiply-adds by node at the first profile's optimum: what a layer weighs in the census."""
        shapes = {name: span.opt for profile in self.config.profiles[:1] for name, span in profile.ranges.items()}
        return count(read_proto(self.model.path), shapes).macs_by_node()

    # -------------------------------------------------------------------------------- notes

    def _note_settings(self, config: Any, profiles: int, layers: int) -> None:
        self.notes |= {
            "typing": "strong",
            "optimization_level": str(config.builder_optimization_level),
            "workspace": f"{config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)} bytes",
            "tf32": "on" if config.get_flag(trt.BuilderFlag.TF32) else "off",
            "avg_timing_iterations": str(config.avg_timing_iterations),
            "profiles": str(profiles),
            "network_layers": str(layers),
        }

    def _note_engine(self, engine: Any) -> None:
        self.notes["aux_streams"] = str(engine.num_aux_streams)
        self.notes["refittable"] = "yes" if engine.refittable else "no"
        name = "device_memory_size_v2" if compat.has("ICudaEngine.device_memory_size_v2") else "device_memory_size"
        self.notes["activation_memory"] = f"{getattr(engine, name)} bytes"
        if self.settings.weight_streaming:
            self.notes["streamable_weights"] = f"{engine.streamable_weights_size} bytes"

    def _note_allocations(self, allocated: Allocated, error: BaseException | None) -> None:
        self.notes["allocations"] = str(allocated)
        if allocated.refused:
            self._warn(f"the GPU had no memory for {allocated.refused} of TensorRT's requests: tactics were left out")
        if error is not None:
            self._warn(f"TensorRT's memory was not all counted: {error}")

    def _warn(self, *texts: str) -> None:
        for text in texts:
            log.warning("%s", text)
            self.warnings.append(text)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[CountingAllocator | None]:
        if not self.settings.count_allocations:
            yield None
            return
        with contextlib.ExitStack() as stack:
            memory: Memory = driver.Memory(self.config.device)  # which waits as it frees
            if self.board.architecture == "fake":
                memory = stack.enter_context(contextlib.closing(open_device(self.config.device)))
            allocator = CountingAllocator(memory, _freed_in_turn)
            try:
                yield allocator
            except BaseException as error:
                let_go(error)
                raise
            finally:
                gc.collect()  # objects that hold its memory
                allocator.close()


def _admitted(config: BuildConfig) -> tuple[PlanSettings, Board]:
    """The settings and the GPU of a build that this TensorRT can make here; `UsageError` or `SetupError` otherwise."""
    settings = parse(config.options)
    compat.check_version()
    board = driver.board(config.device)
    _check_machine(config, board)
    configure.check_release(settings)
    return settings, board


def _check_machine(config: BuildConfig, board: Board) -> None:
    """`SetupError` for a GPU this TensorRT or the precision asked for does not run on, before anything is spent."""
    here = versions.Version(compat.VERSION)
    has = versions.capability(board.compute_capability) if board.compute_capability else None
    if has is not None and versions.supports(here, has) is False:
        raise SetupError(
            f"TensorRT {compat.version_text()} does not run on {board.name} ({board.architecture})",
            hint=f"it needs TensorRT {versions.newest_for(has)}",
        )
    if config.precision is None:
        return
    since = versions.precision_since(config.precision)
    if since is not None and here < since:
        raise SetupError(
            f"TensorRT {compat.version_text()} has no {config.precision}, it came with {since}",
            hint=f"install TensorRT {since} or later, or ask for another precision",
        )
    needed = versions.COMPUTE_CAPABILITY[config.precision]
    if has is not None and has < needed:
        raise SetupError(
            f"{board.name} ({board.compute_capability}) has no {config.precision}, which needs compute capability "
            f"{needed[0]}.{needed[1]}",
            hint="ask for a precision this GPU has; `trt-engine doctor` lists them",
        )


def _freed_in_turn(stream: int) -> None:
    """Waits for nothing: what a build's memory is given back to waits itself."""


def _made(make: Callable[[], Any], doing: str, logger: TensorRtLogger, kind: type[TrtEngineError] = BuildError) -> Any:
    """What `make` gives; the logger's reason where that is nothing: factories give None, constructors a TypeError."""
    try:
        made = make()
    except TypeError as error:
        raise logger.failure(doing, kind) from error
    if made is None:
        raise logger.failure(doing, kind)
    return made


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file's bytes without a copy in memory."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BuildError(f"the plan `{path}` cannot be read back: {error}", hint="the disk may be full") from error
    with mapped:
        yield mapped
