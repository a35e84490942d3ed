"""Our settings as TensorRT takes them: each only where this release has it, and read back, for most refuse in silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt import compat
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.config import BuildConfig, Profile
from trt_engine.errors import ProfileError, SetupError, UsageError
from trt_engine.plans.settings import PlanSettings
from trt_engine.tensors import closest, format_shape

__all__ = ["add_profiles", "check_release", "configure", "mark_refittable", "warnings_of"]

log = logging.getLogger(__name__)

_REFIT = {"all": "REFIT", "identical": "REFIT_IDENTICAL", "individual": "REFIT_INDIVIDUAL"}
_POOLS = {
    "tactic_dram": "TACTIC_DRAM",
    "tactic_shared_memory": "TACTIC_SHARED_MEMORY",
    "dla_sram": "DLA_MANAGED_SRAM",
    "dla_local_dram": "DLA_LOCAL_DRAM",
    "dla_global_dram": "DLA_GLOBAL_DRAM",
}
_NEEDS = {  # settings that are names of this or that release; what has a value of its own is asked for where it is set
    "max_tactics": "IBuilderConfig.max_num_tactics",
    "tiling_optimization": "IBuilderConfig.tiling_optimization_level",
    "l2_limit_for_tiling": "IBuilderConfig.l2_limit_for_tiling",
    "build_route": "IBuilderConfig.build_route",
    "strict_nans": "BuilderFlag.STRICT_NANS",
    "distributive_independence": "BuilderFlag.DISTRIBUTIVE_INDEPENDENCE",
    "editable_timing_cache": "BuilderFlag.EDITABLE_TIMING_CACHE",
    "refit_weights": "INetworkDefinition.mark_weights_refittable",
}


def check_release(settings: PlanSettings) -> None:
    """`UsageError` naming the release it needs for a setting this TensorRT lacks; asked before anything is spent."""
    for name, needed in _NEEDS.items():
        if getattr(settings, name) not in (None, False, ()):
            compat.require(needed, f"-O {name}")
    if settings.refit != "none":
        compat.require(f"BuilderFlag.{_REFIT[settings.refit]}", f"-O refit={settings.refit}")
    if settings.runtime_platform != "same":
        compat.require("IBuilderConfig.runtime_platform", "-O runtime_platform")
    if settings.hardware_compatibility != "none":
        compat.member("HardwareCompatibilityLevel", settings.hardware_compatibility, "-O hardware_compatibility")
    for name, enum in (("tactic_sources", "TacticSource"), ("preview_features", "PreviewFeature")):
        for text in getattr(settings, name):
            _signed(text, enum, name)


def configure(builder: Any, config: Any, build: BuildConfig, settings: PlanSettings) -> None:
    """Everything but profiles, timing cache and progress monitor; `UsageError` for what TensorRT would not take."""
    _Settings(builder, config, settings).apply()
    wanted, whole = build.workspace_mib << 20, config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    _pool(config, "WORKSPACE", min(wanted, whole) if whole else wanted, "--workspace")  # the default is all there is
    # precision is in the graph; TF32 alone is a setting: fp32 is fp32 unless TF32 is asked for, as on every backend
    _flag(config, "TF32", build.precision == "tf32", "--precision")


class _Settings:
    """One build's settings on their way into the builder."""

    def __init__(self, builder: Any, config: Any, settings: PlanSettings) -> None:
        self.builder, self.config, self.settings = builder, config, settings

    def apply(self) -> None:
        for part in (self._tactics, self._sources, self._cache, self._plan, self._dla, self._pools, self._plugins):
            part()

    def _tactics(self) -> None:
        asked, config = self.settings, self.config
        config.avg_timing_iterations = asked.avg_timing_iterations
        _kept(config.avg_timing_iterations, asked.avg_timing_iterations, "avg_timing_iterations")
        if asked.optimization_level is not None:
            config.builder_optimization_level = asked.optimization_level
            _kept(config.builder_optimization_level, asked.optimization_level, "optimization_level")
        if asked.max_aux_streams is not None:
            config.max_aux_streams = asked.max_aux_streams
            _kept(config.max_aux_streams, asked.max_aux_streams, "max_aux_streams")
        if asked.max_threads is not None:
            self.builder.max_threads = asked.max_threads
            _kept(self.builder.max_threads, asked.max_threads, "max_threads")
        if asked.max_tactics is not None:
            config.max_num_tactics = asked.max_tactics
            _kept(config.max_num_tactics, asked.max_tactics, "max_tactics")
        if asked.tiling_optimization is not None:
            level = compat.member("TilingOptimizationLevel", asked.tiling_optimization, "-O tiling_optimization")
            config.tiling_optimization_level = level
            _kept(config.tiling_optimization_level, level, "tiling_optimization")
        if asked.l2_limit_for_tiling is not None:
            config.l2_limit_for_tiling = asked.l2_limit_for_tiling
            _kept(config.l2_limit_for_tiling, asked.l2_limit_for_tiling, "l2_limit_for_tiling")
        if asked.build_route is not None:
            config.build_route = asked.build_route
            if config.build_route != asked.build_route:
                raise UsageError(
                    f"TensorRT does not take `-O build_route={asked.build_route}`", hint=_knobs(config.all_build_routes)
                )
        _flag(config, "SPARSE_WEIGHTS", asked.sparsity, "-O sparsity")
        for name, flag in (
            ("strict_nans", "STRICT_NANS"),
            ("distributive_independence", "DISTRIBUTIVE_INDEPENDENCE"),
        ):
            if getattr(asked, name):
                _flag(config, flag, True, f"-O {name}")
        verbosity = compat.member("ProfilingVerbosity", asked.profiling_verbosity, "-O profiling_verbosity")
        config.profiling_verbosity = verbosity
        _kept(config.profiling_verbosity, verbosity, "profiling_verbosity")

    def _sources(self) -> None:
        if self.settings.tactic_sources:
            mask = self.config.get_tactic_sources()
            for text in self.settings.tactic_sources:
                add, source = _signed(text, "TacticSource", "tactic_sources")
                mask = mask | 1 << int(source) if add else mask & ~(1 << int(source))
            if not self.config.set_tactic_sources(mask) or self.config.get_tactic_sources() != mask:
                raise UsageError(
                    f"TensorRT does not take `-O tactic_sources={','.join(self.settings.tactic_sources)}`",
                    hint=f"it has {', '.join(compat.choices('TacticSource'))}",
                )
        for text in self.settings.preview_features:
            add, feature = _signed(text, "PreviewFeature", "preview_features")
            self.config.set_preview_feature(feature, add)
            _kept(self.config.get_preview_feature(feature), add, f"preview_features={text}")

    def _cache(self) -> None:
        asked, config = self.settings, self.config
        _flag(config, "ERROR_ON_TIMING_CACHE_MISS", asked.error_on_timing_cache_miss, "-O error_on_timing_cache_miss")
        _flag(config, "DISABLE_COMPILATION_CACHE", not asked.compilation_cache, "-O compilation_cache")
        if asked.editable_timing_cache:
            _flag(config, "EDITABLE_TIMING_CACHE", True, "-O editable_timing_cache")

    def _plan(self) -> None:
        asked, config = self.settings, self.config
        refit = asked.refit
        if asked.strip_weights and refit == "none":
            refit = "identical"  # what is stripped must be put back, and what is put back are the build's own weights
        if refit != "none":
            _flag(config, _REFIT[refit], True, f"-O refit={refit}")
        _flag(config, "STRIP_PLAN", asked.strip_weights, "-O strip_weights")
        _flag(config, "WEIGHT_STREAMING", asked.weight_streaming, "-O weight_streaming")
        _flag(config, "VERSION_COMPATIBLE", asked.version_compatible, "-O version_compatible")
        _flag(config, "EXCLUDE_LEAN_RUNTIME", asked.exclude_lean_runtime, "-O exclude_lean_runtime")
        if asked.hardware_compatibility != "none":
            level = compat.member("HardwareCompatibilityLevel", asked.hardware_compatibility, "hardware_compatibility")
            config.hardware_compatibility_level = level
            _kept(config.hardware_compatibility_level, level, "hardware_compatibility")
        if asked.runtime_platform != "same":
            platform = compat.member("RuntimePlatform", asked.runtime_platform, "-O runtime_platform")
            config.runtime_platform = platform
            _kept(config.runtime_platform, platform, "runtime_platform")

    def _dla(self) -> None:
        core = self.settings.dla_core
        if core is None:
            return
        cores = self.builder.num_DLA_cores
        if core >= cores:
            raise SetupError(
                f"there is no DLA core {core}: this device has {cores}",
                hint="leave `-O dla_core` out; DLA is on Jetson and DRIVE boards",
            )
        self.config.default_device_type = trt.DeviceType.DLA
        _kept(self.config.default_device_type, trt.DeviceType.DLA, "dla_core")
        self.config.DLA_core = core
        _kept(self.config.DLA_core, core, "dla_core")
        _flag(self.config, "GPU_FALLBACK", self.settings.gpu_fallback, "-O gpu_fallback")

    def _pools(self) -> None:
        for name, pool in _POOLS.items():
            size = getattr(self.settings, name)
            if size is not None:
                _pool(self.config, pool, size, f"-O {name}")

    def _plugins(self) -> None:
        if self.settings.serialize_plugins:
            paths = [str(Path(item).expanduser().resolve()) for item in self.settings.plugins]
            self.config.plugins_to_serialize = paths
            _kept(list(self.config.plugins_to_serialize), paths, "serialize_plugins")


# ------------------------------------------------------------------------------------------------ profiles


def add_profiles(
    builder: Any, network: Any, config: Any, profiles: Sequence[Profile], settings: PlanSettings, logger: TensorRtLogger
) -> int:
    """Give the builder the profiles of every dynamic input and of every input that holds sizes; how many were needed."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    dynamic = [item for item in inputs if item.is_shape_tensor or any(size < 0 for size in tuple(item.shape))]
    if not dynamic:
        return 0
    for number, profile in enumerate(profiles):
        made = builder.create_optimization_profile()
        if made is None:
            raise logger.failure("creating an optimization profile")
        for tensor in dynamic:
            _set_range(made, tensor, profile, settings.shape_values, number)
        at = config.add_optimization_profile(made)
        if at != number:
            raise ProfileError(
                f"TensorRT does not take profile {number} (`{profile}`): {_last(logger)}",
                hint="every dynamic input needs min <= opt <= max in every profile",
            )
    return len(profiles)


def _set_range(made: Any, tensor: Any, profile: Profile, values: Profile | None, number: int) -> None:
    name = tensor.name
    known = values.ranges if values is not None and tensor.is_shape_tensor else {}
    if tensor.is_shape_tensor and name not in known:
        raise ProfileError(
            f"input `{name}` holds sizes, and no values are given for it in profile {number}",
            hint=f"add `-O shape_values={name}:1x3x64x64,8x3x64x64,8x3x128x128` with its smallest, usual, largest values",
        )
    span = known[name] if tensor.is_shape_tensor else profile.ranges.get(name)
    if span is None:
        raise ProfileError(f"profile {number} has no range for input `{name}`", hint=f"add `--profile {name}:...`")
    try:
        if tensor.is_shape_tensor:
            made.set_shape_input(name, *(list(shape) for shape in span.shapes))
            taken = [tuple(one) for one in made.get_shape_input(name) or ()]
        else:
            made.set_shape(name, *span.shapes)
            taken = [tuple(one) for one in made.get_shape(name) or ()]
    except RuntimeError as error:
        raise ProfileError(
            f"TensorRT does not take {span} for input `{name}`, which is {format_shape(tuple(tensor.shape))}: {error}",
            hint="sizes must agree with the model's fixed ones, smallest first",
        ) from error
    if taken != list(span.shapes):
        raise ProfileError(
            f"input `{name}` was given {span} and TensorRT keeps {', '.join(map(format_shape, taken)) or 'nothing'}",
            hint="`-v` shows what TensorRT says",
        )


def mark_refittable(network: Any, settings: PlanSettings) -> None:
    """Mark the weights that may be replaced by name; `UsageError` for a name the network has not."""
    for name in settings.refit_weights:
        if not network.mark_weights_refittable(name):
            raise UsageError(
                f"there are no weights `{name}` that can be replaced", hint="names are those of the ONNX initializers"
            )


# ------------------------------------------------------------------------------------------------ said beforehand


def warnings_of(settings: PlanSettings) -> Iterator[str]:
    """What these settings cost or lose, as TensorRT's own notes say."""
    if settings.optimization_level == 0:
        yield "optimisation level 0 takes the first tactic that runs and ignores the timing cache"
    if settings.weight_streaming and settings.refit == "all" and not compat.at_least(compat.VERSION, "10.8"):
        yield "before TensorRT 10.8 `refit=all` with weight streaming can fail when it runs; `refit=identical` does not"
    if settings.version_compatible:
        yield "a version-compatible plan can be slower, and holds code for the host: `-O allow_host_code=on` loads it"
    if settings.hardware_compatibility == "ampere_plus":
        yield "`hardware_compatibility=ampere_plus` leaves fewer tactics and fusions: expect less speed, most with TF32"
    if settings.weight_streaming:
        yield "weights that are streamed in make an inference slower, and no CUDA graph can be captured of it"
    if settings.l2_limit_for_tiling is not None and settings.tiling_optimization in (None, "none"):
        yield "`l2_limit_for_tiling` does nothing without `-O tiling_optimization=`"
    idle = [name for name in ("dla_sram", "dla_local_dram", "dla_global_dram") if getattr(settings, name) is not None]
    if idle and settings.dla_core is None:
        yield f"`{idle[0]}` does nothing without `-O dla_core=`"
    if settings.serialize_plugins and not settings.plugins:
        yield "`serialize_plugins` has nothing to carry: no library is named by `-O plugins=`"
    if settings.profiling_verbosity != "detailed":
        yield "without `profiling_verbosity=detailed` the engine does not tell its layers' types: no census"


# ------------------------------------------------------------------------------------------------ read back


def _flag(config: Any, name: str, on: bool, asked_by: str) -> None:
    flag = compat.reach(f"BuilderFlag.{name}", asked_by)
    (config.set_flag if on else config.clear_flag)(flag)
    if config.get_flag(flag) != on:
        raise UsageError(f"TensorRT does not take `{asked_by}` ({name})", hint="`-v` shows what it says")


def _pool(config: Any, name: str, size: int, asked_by: str) -> None:
    pool = compat.reach(f"MemoryPoolType.{name}", asked_by)
    config.set_memory_pool_limit(pool, size)
    taken = config.get_memory_pool_limit(pool)
    if taken != size:
        raise UsageError(
            f"`{asked_by}` is {size} bytes and TensorRT keeps {taken}",
            hint="`-v` shows what TensorRT says of its limits",
        )


def _kept(found: Any, asked: Any, name: str) -> None:
    if found != asked:
        raise UsageError(f"`-O {name}` is {asked} and TensorRT keeps {found}", hint="`-v` shows what TensorRT says")


def _signed(text: str, enum: str, setting: str) -> tuple[bool, Any]:
    """`+NAME` or `-NAME` as whether to add it, and the member."""
    if text[:1] not in "+-" or len(text) < 2:
        hint = closest(text.lstrip("+-").lower(), list(compat.choices(enum)))
        raise UsageError(f"cannot read `{text}` in `-O {setting}`: it begins with neither + nor -", hint=hint)
    return text[0] == "+", compat.member(enum, text[1:], f"-O {setting}={text}")


def _knobs(document: str) -> str:
    """The knobs of `all_build_routes`, as a hint."""
    try:
        options = [str(item["option"]) for item in json.loads(document)["tuner_options"]]
    except (ValueError, KeyError, TypeError):
        return "`-v` shows what TensorRT says"
    return f"its knobs are {', '.join(options)}"


def _last(logger: TensorRtLogger) -> str:
    errors = logger.errors()
    return errors[-1] if errors else "it gave no reason"
