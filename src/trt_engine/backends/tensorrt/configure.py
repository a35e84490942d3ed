"""Applies settings to TensorRT's builder, if its release has them, and reads them back: most setters fail silently."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trt_engine.backends.tensorrt.binding import Binding
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile
from trt_engine.errors import ProfileError, SetupError, UsageError
from trt_engine.tensors import format_shape, suggest
from trt_engine.trt.failure_causes import cause_hint, find_cause
from trt_engine.trt.settings import PlanSettings

log = logging.getLogger(__name__)

_REFIT = {"all": "REFIT", "identical": "REFIT_IDENTICAL", "individual": "REFIT_INDIVIDUAL"}
_POOLS = {
    "tactic_dram": "TACTIC_DRAM",
    "tactic_shared_memory": "TACTIC_SHARED_MEMORY",
    "dla_sram": "DLA_MANAGED_SRAM",
    "dla_local_dram": "DLA_LOCAL_DRAM",
    "dla_global_dram": "DLA_GLOBAL_DRAM",
}
_OTHER_HINT = "leave it out, or give another value"
_REQUIRED_API = {  # settings whose API depends on the release; enum values are checked where they are set
    "max_tactics": "IBuilderConfig.max_num_tactics",
    "tiling_optimization": "IBuilderConfig.tiling_optimization_level",
    "l2_limit_for_tiling": "IBuilderConfig.l2_limit_for_tiling",
    "build_route": "IBuilderConfig.build_route",
    "strict_nans": "BuilderFlag.STRICT_NANS",
    "distributive_independence": "BuilderFlag.DISTRIBUTIVE_INDEPENDENCE",
    "editable_timing_cache": "BuilderFlag.EDITABLE_TIMING_CACHE",
    "refit_weights": "INetworkDefinition.mark_weights_refittable",
}


def check_release(binding: Binding, settings: PlanSettings) -> None:
    """`UsageError` for a setting this TensorRT lacks, naming the release it needs."""
    for name, needed in _REQUIRED_API.items():
        if getattr(settings, name) not in (None, False, ()):
            binding.require_api(needed, f"-O {name}")
    if settings.refit != "none":
        binding.require_api(f"BuilderFlag.{_REFIT[settings.refit]}", f"-O refit={settings.refit}")
    if settings.runtime_platform != "same":
        binding.require_api("IBuilderConfig.runtime_platform", "-O runtime_platform")
    if settings.hardware_compatibility != "none":
        binding.enum_member("HardwareCompatibilityLevel", settings.hardware_compatibility, "-O hardware_compatibility")
    for name, enum in (("tactic_sources", "TacticSource"), ("preview_features", "PreviewFeature")):
        for text in getattr(settings, name):
            _parse_signed(binding, text, enum, name)


def configure(
    binding: Binding, builder: Any, config: Any, build: BuildConfig, settings: PlanSettings
) -> tuple[str, ...]:
    """Apply all settings but profiles, timing cache and progress monitor; return warnings about adjusted ones.

    `UsageError` for a setting that TensorRT rejects.
    """
    _SettingsWriter(binding, builder, config, settings).apply()
    warnings = set_workspace(binding, config, build.workspace_mib)
    # precision is in the graph; TF32 alone is a setting: fp32 is fp32 unless TF32 is requested, as on every backend
    set_flag(binding, config, "TF32", build.precision == "tf32", "--precision")
    return warnings


def set_workspace(binding: Binding, config: Any, mib: int) -> tuple[str, ...]:
    """Set the workspace, at most to the pool's default, which is all device memory; return a warning if less was set."""
    trt = binding.trt
    whole = config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    size = min(mib << 20, whole) if whole else mib << 20
    _set_pool(binding, config, "WORKSPACE", size, "--workspace")
    if size == mib << 20 or mib == BuildConfig().workspace_mib:
        return ()
    return (f"`--workspace` is {mib} MiB and {binding.product} has {whole >> 20} MiB: the build may use those",)


@contextlib.contextmanager
def add_logged_reason(logger: TensorRtLogger) -> Iterator[None]:
    """Adds the library's logged reason to a `UsageError` raised inside."""
    said = logger.problem_count
    try:
        yield
    except UsageError as error:
        reasons, cause = logger.plain_reasons(said), find_cause(logger.problems(said))
        if not reasons:
            raise
        hint = error.hint if cause is None else cause_hint(cause, logger.binding.product)
        raise type(error)(f"{error.message}: {reasons}", hint=hint) from error


def set_refit(binding: Binding, config: Any, settings: PlanSettings) -> None:
    """Set which weights may be replaced, and whether the plan contains them."""
    refit = settings.refit
    if settings.strip_weights and refit == "none":
        refit = "identical"  # stripped weights must be restored, with the build's own values
    if refit != "none":
        set_flag(binding, config, _REFIT[refit], True, f"-O refit={refit}")
    set_flag(binding, config, "STRIP_PLAN", settings.strip_weights, "-O strip_weights")


def set_verbosity(binding: Binding, config: Any, verbosity: str) -> None:
    """Set how much layer information the engine contains."""
    level = binding.enum_member("ProfilingVerbosity", verbosity, "-O profiling_verbosity")
    _set_checked(config, "profiling_verbosity", level, "profiling_verbosity")


class _SettingsWriter:
    """Applies one build's settings to the builder."""

    def __init__(self, binding: Binding, builder: Any, config: Any, settings: PlanSettings) -> None:
        self.binding = binding
        self.builder, self.config, self.settings = builder, config, settings

    def apply(self) -> None:
        for part in (self._tactics, self._sources, self._cache, self._plan, self._dla, self._memory):
            part()

    def _tactics(self) -> None:
        asked, config = self.settings, self.config
        _set_checked(config, "avg_timing_iterations", asked.avg_timing_iterations, "avg_timing_iterations")
        _set_checked(config, "builder_optimization_level", asked.optimization_level, "optimization_level")
        _set_checked(config, "max_aux_streams", asked.max_aux_streams, "max_aux_streams")
        _set_checked(self.builder, "max_threads", asked.max_threads, "max_threads")
        _set_checked(config, "max_num_tactics", asked.max_tactics, "max_tactics")
        level = self._member("TilingOptimizationLevel", "tiling_optimization", None)
        _set_checked(config, "tiling_optimization_level", level, "tiling_optimization")
        _set_checked(config, "l2_limit_for_tiling", asked.l2_limit_for_tiling, "l2_limit_for_tiling")
        if asked.build_route is not None:
            config.build_route = asked.build_route
            if config.build_route != asked.build_route:
                raise UsageError(
                    f"TensorRT does not take `-O build_route={asked.build_route}`",
                    hint=_knob_hint(config.all_build_routes),
                )
        self._set_flag("sparsity", asked.sparsity, "SPARSE_WEIGHTS")
        for name in ("strict_nans", "distributive_independence"):
            if getattr(asked, name):
                self._set_flag(name, True)
        set_verbosity(self.binding, config, asked.profiling_verbosity)

    def _sources(self) -> None:
        if self.settings.tactic_sources:
            mask = self.config.get_tactic_sources()
            for text in self.settings.tactic_sources:
                add, source = _parse_signed(self.binding, text, "TacticSource", "tactic_sources")
                mask = mask | 1 << int(source) if add else mask & ~(1 << int(source))
            if not self.config.set_tactic_sources(mask) or self.config.get_tactic_sources() != mask:
                raise UsageError(
                    f"TensorRT does not take `-O tactic_sources={','.join(self.settings.tactic_sources)}`",
                    hint=f"it has {', '.join(self.binding.choices('TacticSource'))}",
                )
        for text in self.settings.preview_features:
            add, feature = _parse_signed(self.binding, text, "PreviewFeature", "preview_features")
            self.config.set_preview_feature(feature, add)
            _check_applied(self.config.get_preview_feature(feature), add, f"preview_features={text}")

    def _cache(self) -> None:
        asked = self.settings
        self._set_flag("error_on_timing_cache_miss", asked.error_on_timing_cache_miss)
        self._set_flag("compilation_cache", not asked.compilation_cache, "DISABLE_COMPILATION_CACHE")
        if asked.editable_timing_cache:
            self._set_flag("editable_timing_cache", True)

    def _plan(self) -> None:
        asked = self.settings
        set_refit(self.binding, self.config, asked)
        for name in ("weight_streaming", "version_compatible", "exclude_lean_runtime"):
            self._set_flag(name, getattr(asked, name))
        level = self._member("HardwareCompatibilityLevel", "hardware_compatibility", "none")
        _set_checked(self.config, "hardware_compatibility_level", level, "hardware_compatibility")
        platform = self._member("RuntimePlatform", "runtime_platform", "same")
        _set_checked(self.config, "runtime_platform", platform, "runtime_platform")

    def _dla(self) -> None:
        core = self.settings.dla_core
        if core is None:
            return
        cores = self.builder.num_DLA_cores
        if core >= cores:
            raise SetupError(
                f"DLA core {core} does not exist: this device has {cores}",
                hint="leave `-O dla_core` out; DLA is on Jetson and DRIVE boards",
            )
        trt = self.binding.trt
        _set_checked(self.config, "default_device_type", trt.DeviceType.DLA, "dla_core")
        _set_checked(self.config, "DLA_core", core, "dla_core")
        self._set_flag("gpu_fallback", self.settings.gpu_fallback)

    def _memory(self) -> None:
        for name, pool in _POOLS.items():
            size = getattr(self.settings, name)
            if size is not None:
                _set_pool(self.binding, self.config, pool, size, f"-O {name}")
        if self.settings.serialize_plugins:
            paths = [str(Path(item).expanduser().resolve()) for item in self.settings.plugins]
            self.config.plugins_to_serialize = paths
            _check_applied(list(self.config.plugins_to_serialize), paths, "serialize_plugins")

    def _set_flag(self, setting: str, on: bool, flag: str = "") -> None:
        set_flag(self.binding, self.config, flag or setting.upper(), on, f"-O {setting}")

    def _member(self, enum: str, setting: str, default: str | None) -> Any:
        """The member of an enum that the setting names; None for its default, which is not set."""
        name = getattr(self.settings, setting)
        return None if name == default else self.binding.enum_member(enum, name, f"-O {setting}")


# ------------------------------------------------------------------------------------------------ profiles


def add_profiles(
    builder: Any, network: Any, config: Any, profiles: Sequence[Profile], settings: PlanSettings, logger: TensorRtLogger
) -> int:
    """Add the profiles of dynamic inputs and shape inputs to the builder; return their number."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    dynamic = [item for item in inputs if item.is_shape_tensor or any(size < 0 for size in tuple(item.shape))]
    if not dynamic:
        return 0
    for number, profile in enumerate(profiles):
        made = builder.create_optimization_profile()
        if made is None:
            raise logger.make_error("creating an optimization profile")
        with add_logged_reason(logger):
            for tensor in dynamic:
                _set_range(made, tensor, profile, settings.shape_values, number)
        with add_logged_reason(logger):
            if config.add_optimization_profile(made) != number:
                raise ProfileError(
                    f"{logger.binding.product} does not take profile {number} (`{profile}`)",
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
            f"input `{name}` is {span} and TensorRT set {', '.join(map(format_shape, taken)) or 'nothing'}",
            hint=_OTHER_HINT,
        )


def mark_refittable(network: Any, settings: PlanSettings) -> None:
    """Mark refittable weights by name; `UsageError` for an unknown name."""
    for name in settings.refit_weights:
        if not network.mark_weights_refittable(name):
            raise UsageError(
                f"`{name}` does not name replaceable weights", hint="names are those of the ONNX initializers"
            )


# ------------------------------------------------------------------------------------------------ warnings


def setting_warnings(binding: Binding, settings: PlanSettings) -> Iterator[str]:
    """Costs of these settings, from TensorRT's documentation."""
    if settings.optimization_level == 0:
        yield "optimisation level 0 takes the first tactic that runs and ignores the timing cache"
    if settings.weight_streaming and settings.refit == "all" and not binding.supports_release("10.8"):
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
        yield "without `profiling_verbosity=detailed` the engine does not report its layers' types: no dtype breakdown"


# ------------------------------------------------------------------------------------------------ read back


def set_flag(binding: Binding, config: Any, name: str, on: bool, setting: str) -> None:
    if not on and not binding.has_api(f"BuilderFlag.{name}"):
        return  # it is off
    flag = binding.get_api(f"BuilderFlag.{name}", setting)
    (config.set_flag if on else config.clear_flag)(flag)
    if config.get_flag(flag) != on:
        raise UsageError(f"TensorRT does not take `{setting}` ({name})", hint=_OTHER_HINT)


def _set_pool(binding: Binding, config: Any, name: str, size: int, setting: str) -> None:
    pool = binding.get_api(f"MemoryPoolType.{name}", setting)
    config.set_memory_pool_limit(pool, size)
    taken = config.get_memory_pool_limit(pool)
    if taken != size:
        raise UsageError(f"`{setting}` is {size} bytes and TensorRT set {taken}", hint=_OTHER_HINT)


def _set_checked(target: Any, attribute: str, value: Any, setting: str) -> None:
    """Set an attribute, and read it back; None leaves the library's own value."""
    if value is not None:
        setattr(target, attribute, value)
        _check_applied(getattr(target, attribute), value, setting)


def _check_applied(applied: Any, requested: Any, name: str) -> None:
    if applied != requested:
        requested, applied = (getattr(value, "name", value) for value in (requested, applied))
        raise UsageError(f"`-O {name}` is {requested} and TensorRT set {applied}", hint=_OTHER_HINT)


def _parse_signed(binding: Binding, text: str, enum: str, setting: str) -> tuple[bool, Any]:
    """`+NAME` or `-NAME` as (add, enum member)."""
    if text[:1] not in "+-" or len(text) < 2:
        hint = suggest(text.lstrip("+-").lower(), list(binding.choices(enum)))
        raise UsageError(f"cannot read `{text}` in `-O {setting}`: it begins with neither + nor -", hint=hint)
    return text[0] == "+", binding.enum_member(enum, text[1:], f"-O {setting}={text}")


def _knob_hint(document: str) -> str:
    """The knobs of `all_build_routes`, as a hint."""
    try:
        options = [str(item["option"]) for item in json.loads(document)["tuner_options"]]
    except (ValueError, KeyError, TypeError):
        return _OTHER_HINT
    return f"its knobs are {', '.join(options)}"
