"""The `-O name=value` settings of TensorRT, for its Python bindings and for trtexec.

One class for build and load, because one command may do both. Load settings are not part of an engine's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_engine.config.build import BuildConfig
from trt_engine.config.parse import parse_names
from trt_engine.config.profiles import Profile, parse_profile
from trt_engine.config.settings import from_values, opt
from trt_engine.errors import UsageError
from trt_engine.units import parse_size


def parse_values(value: str | Profile | None) -> Profile | None:
    """Values of shape tensors, written as profiles are: `sizes:1x3x64x64,8x3x64x64,8x3x128x128`."""
    return None if value is None else parse_profile(value)


def parse_budget(value: str | int) -> str:
    """`off`, `auto`, `40%` or a size: validated here, resolved against the engine at load."""
    text = str(value).strip().lower()
    if text in ("off", "auto") or (text.endswith("%") and text[:-1].replace(".", "", 1).isdigit()):
        return text
    parse_size(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of TensorRT. None is the default of its version."""

    # -------------------------------------------------------------------------------- how tactics are chosen
    optimization_level: int | None = opt(None, "0 (first tactic that runs) to 5 (search longest); TensorRT's 3")
    max_aux_streams: int | None = opt(None, "maximum extra streams of the engine; 0 uses least memory")
    avg_timing_iterations: int = opt(8, "runs a tactic's time is the mean of (trtexec's 8; the bindings' own is 1)")
    max_tactics: int | None = opt(None, "tactics to time at most (10.4 on)")
    max_threads: int | None = opt(None, "threads of the builder")
    tiling_optimization: str | None = opt(
        None, "how hard to look for on-chip tilings (10.8 on)", choices=("none", "fast", "moderate", "full")
    )
    l2_limit_for_tiling: int | None = opt(None, "bytes of L2 tilings may use", parse=parse_size)
    tactic_sources: tuple[str, ...] = opt(
        (), "sources to add and drop, as +JIT_CONVOLUTIONS,-EDGE_MASK_CONVOLUTIONS", parse=parse_names
    )
    preview_features: tuple[str, ...] = opt(
        (), "preview features to switch, as +aliased_plugin_io_10_03", parse=parse_names
    )
    build_route: str | None = opt(None, "compiler knobs, as '-knob=value ...' (11.1 on)")
    sparsity: bool = opt(False, "use 2:4 sparse kernels where the weights are sparse")
    strict_nans: bool = opt(False, "keep NaN behaviour exactly (10.6 on)")
    distributive_independence: bool = opt(False, "the same result for a row, whatever the batch (10.12 on)")
    tactic_dram: int | None = opt(None, "device memory one tactic may take", parse=parse_size)
    tactic_shared_memory: int | None = opt(None, "shared memory one tactic may take", parse=parse_size)
    profiling_verbosity: str = opt(
        "detailed",
        "layer information kept in the engine; the precision check needs `detailed`",
        choices=("detailed", "layer_names_only", "none"),
    )
    shape_values: Profile | None = opt(
        None,
        "values of inputs that hold sizes, min,opt,max, as sizes:1x3x64x64,8x3x64x64,8x3x128x128; the same in every "
        "profile",
        parse=parse_values,
    )
    # -------------------------------------------------------------------------------- timing cache
    error_on_timing_cache_miss: bool = opt(False, "fail if the timing cache has no time for a tactic")
    editable_timing_cache: bool = opt(False, "keep a timing cache that can be read and edited (10.8 on)")
    compilation_cache: bool = opt(True, "keep compiled kernels in the timing cache")
    # -------------------------------------------------------------------------------- the plan
    refit: str = opt(
        "none",
        "weights that may be replaced later: none, all, those `identical` to the build's, `individual` ones",
        choices=("none", "all", "identical", "individual"),
    )
    refit_weights: tuple[str, ...] = opt(
        (), "with refit=individual: the names of the weights that may be replaced (10.2 on)", parse=parse_names
    )
    strip_weights: bool = opt(False, "leave the weights out of the plan; it is refitted from the ONNX at load")
    version_compatible: bool = opt(False, "a plan for later TensorRT versions too")
    exclude_lean_runtime: bool = opt(False, "with version_compatible: the loader brings the lean runtime")
    hardware_compatibility: str = opt(
        "none", "other GPUs the plan may run on", choices=("none", "ampere_plus", "same_compute_capability")
    )
    runtime_platform: str = opt("same", "the operating system the plan runs on", choices=("same", "windows_amd64"))
    weight_streaming: bool = opt(False, "weights may stay in host memory and be streamed in")
    # -------------------------------------------------------------------------------- DLA
    dla_core: int | None = opt(None, "the DLA core to build for")
    gpu_fallback: bool = opt(True, "layers unsupported by the DLA run on the GPU")
    dla_sram: int | None = opt(None, "DLA's managed SRAM", parse=parse_size)
    dla_local_dram: int | None = opt(None, "DLA's local DRAM", parse=parse_size)
    dla_global_dram: int | None = opt(None, "DLA's global DRAM", parse=parse_size)
    # -------------------------------------------------------------------------------- plugins
    plugins: tuple[str, ...] = opt((), "plugin libraries to load, as a.so,b.so", parse=parse_names)
    python_plugins: tuple[str, ...] = opt(
        (), "modules (or .py files) that register Python V3 plugins", parse=parse_names
    )
    serialize_plugins: bool = opt(False, "serialize the plugin libraries into the plan")
    # -------------------------------------------------------------------------------- watching
    count_allocations: bool = opt(True, "count TensorRT's device memory; off uses its own allocator", in_key=False)
    # -------------------------------------------------------------------------------- running
    allow_host_code: bool = opt(
        False, "load a plan with host code (version-compatible ones have it): only if you trust it", in_key=False
    )
    lean_runtime: str | None = opt(None, "the lean runtime library of the version that built the plan", in_key=False)
    weight_streaming_budget: str | None = opt(
        None, "weights kept on the device: off (all), auto, 40%, 2GiB", parse=parse_budget, in_key=False
    )
    memory_strategy: str = opt(
        "static",
        "scratch memory of a context: for the largest profile, the profile in use, or the shapes in use",
        choices=("static", "on_profile_change", "user_managed"),
        in_key=False,
    )
    persistent_cache_limit: int | None = opt(
        None, "bytes of L2 for persisting activations", parse=parse_size, in_key=False
    )
    refit_from: str | None = opt(
        None, "the ONNX to refit a stripped plan from (default: the model in its passport)", in_key=False
    )

    def __post_init__(self) -> None:
        """`UsageError` for values that no TensorRT accepts: it would ignore some silently."""
        for name, value, least, most in (
            ("optimization_level", self.optimization_level, 0, 5),
            ("max_aux_streams", self.max_aux_streams, 0, None),
            ("avg_timing_iterations", self.avg_timing_iterations, 1, None),
            ("max_tactics", self.max_tactics, 1, None),
            ("max_threads", self.max_threads, 1, None),
            ("dla_core", self.dla_core, 0, None),
        ):
            if value is not None and (value < least or (most is not None and value > most)):
                span = f"{least} to {most}" if most is not None else f"{least} or more"
                raise UsageError(f"`{name}` is {value}, expected {span}", hint=f"`-O {name}={least}`")
        if self.exclude_lean_runtime and not self.version_compatible:
            raise UsageError(
                "`exclude_lean_runtime` is for version-compatible plans alone", hint="add `-O version_compatible=on`"
            )
        if self.runtime_platform != "same" and self.version_compatible and not self.exclude_lean_runtime:
            raise UsageError(
                "a version-compatible plan for another platform cannot hold this platform's lean runtime",
                hint="add `-O exclude_lean_runtime=on`",
            )
        check_refit(self.refit, self.refit_weights, strip_weights=self.strip_weights)

    @property
    def to_plan_settings(self) -> PlanSettings:
        """The settings themselves; those of TensorRT-RTX give the part they share."""
        return self


def check_refit(refit: str, names: tuple[str, ...], *, strip_weights: bool) -> None:
    """`UsageError` for contradictory refit settings."""
    if refit == "individual" and strip_weights:
        raise UsageError(
            "weights are stripped all or none, `refit=individual` names some",
            hint="`-O refit=identical` or `-O refit=all`",
        )
    if bool(names) != (refit == "individual"):
        raise UsageError(
            "`refit=individual` and `refit_weights` belong together",
            hint="`-O refit=individual -O refit_weights=a,b`",
        )


def parse(options: Mapping[str, str]) -> PlanSettings:
    """Parse the settings of `-O`; `UsageError` with the closest names for an unknown one."""
    made: PlanSettings = from_values(PlanSettings, options)
    return made


_RUN_OPTIONS = (
    "plugins", "python_plugins", "lean_runtime", "dla_core", "memory_strategy", "weight_streaming_budget",
    "persistent_cache_limit", "count_allocations",
)  # fmt: skip


def parity_options(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """The `-O` to load with, or why the plan cannot be loaded on the machine that built it.

    `model` is the graph it was built from: a stripped plan takes its weights from it.
    """
    settings = parse(config.options)
    if settings.runtime_platform != "same":
        return f"the plan is for `{settings.runtime_platform}`"
    if settings.exclude_lean_runtime and settings.lean_runtime is None:
        return "the plan was built without its lean runtime, and none is given (`-O lean_runtime=PATH`)"
    options = {name: config.options[name] for name in _RUN_OPTIONS if name in config.options}
    if settings.version_compatible or settings.serialize_plugins:
        options["allow_host_code"] = "on"  # just built here
    if settings.strip_weights:
        options["refit_from"] = str(model)
    return options
