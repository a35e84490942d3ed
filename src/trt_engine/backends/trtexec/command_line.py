"""trtexec command lines by version.

Unsupported tuning options are dropped with a warning; options that change the plan raise. Source: `sampleOptions.cpp` of the
public TensorRT repository, 8.5 to 11.1, and the program's help.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trt_engine.backends.trtexec.program import Program
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile
from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import Shape, Signature, format_shape
from trt_engine.trt.settings import PlanSettings
from trt_engine.units import parse_size

PREVIEWS = {
    "profile_sharing_0806": "profileSharing0806",
    "aliased_plugin_io_10_03": "aliasedPluginIO1003",
    "runtime_activation_resize_10_10": "runtimeActivationResize",
    "multidevice_runtime_10_16": "multiDeviceRuntime",
}
_VALUE_VERSIONS = {  # first version with a value, first version without it
    "profileSharing0806": ((8, 6), (11,)), "aliasedPluginIO1003": ((10, 3), (99,)),
    "runtimeActivationResize": ((10, 10), (99,)), "multiDeviceRuntime": ((10, 16), (11,)),
    "CUBLAS": ((8, 5), (11,)), "CUBLAS_LT": ((8, 5), (11,)), "CUDNN": ((8, 5), (11,)),
}  # fmt: skip
_TILING = {"none": 0, "fast": 1, "moderate": 2, "full": 3}
_TUNING = (
    ("builderOptimizationLevel", "optimization_level"), ("maxAuxStreams", "max_aux_streams"),
    ("maxTactics", "max_tactics"), ("tilingOptimizationLevel", "tiling_optimization"),
    ("l2LimitForTiling", "l2_limit_for_tiling"), ("setBuildRoute", "build_route"),
)  # fmt: skip
_HARDWARE = {"ampere_plus": "ampere+", "same_compute_capability": "sameComputeCapability"}
_STRATEGY = {"static": "static", "on_profile_change": "profile", "user_managed": "runtime"}
_WEAK_TYPES = ("fp16", "bf16", "int8", "fp8", "int4")
"""Types that a flag of the same name allows in a weakly typed network; removed in 11."""


@dataclass
class CommandLine:
    """A command line, its warnings, and the memory pool sizes it requests."""

    program: Program
    arguments: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Warnings about options dropped for this version."""
    pools_mib: dict[str, float] = field(default_factory=dict)
    """Pool sizes in MiB, as the banner must print them."""

    def add(self, option: str, value: object = None) -> None:
        self.arguments.append(f"--{option}" if value is None else f"--{option}={value}")

    def add_all(self, **values: object) -> None:
        for option, value in values.items():
            self.add(option, value)

    def add_optional(self, option: str, value: object = None, *, setting: str) -> bool:
        """Add a tuning option; warn if this version lacks it. Returns whether it was added."""
        if self.program.has(option):
            self.add(option, value)
            return True
        self.warnings.append(
            f"trtexec {self.program.version_text} has no `--{option}`: `{setting}` is left out, the engine is built without"
        )
        return False

    def add_required(self, option: str, value: object = None, *, setting: str) -> None:
        """Add an option that changes the plan; `UsageError` if this version lacks it."""
        if not self.program.has(option):
            raise UsageError(
                f"trtexec {self.program.version_text} has no `--{option}`, which `{setting}` needs",
                hint=f"leave `-O {setting}` out, use a TensorRT that has it, or `--backend tensorrt`",
            )
        self.add(option, value)


@dataclass(frozen=True, slots=True)
class BuildFiles:
    """The files of a build."""

    model: Path
    engine: Path
    layers: Path | None = None
    timing_cache: Path | None = None


def build_command(
    program: Program,
    config: BuildConfig,
    settings: PlanSettings,
    signature: Signature,
    files: BuildFiles,
    *,
    dtypes: Collection[str],
    gpu_mib: int | None = None,
) -> CommandLine:
    """The command line of a build. `dtypes` are the graph's, `gpu_mib` the GPU memory in MiB."""
    made = CommandLine(program)
    made.add("onnx", files.model)
    made.add("saveEngine", files.engine)
    made.add("skipInference" if program.has("skipInference") else "buildOnly")
    _add_device(made, config.device)
    _add_typing(made, config, dtypes)
    _add_profiles(made, config.profiles, settings, signature)
    _add_pools(made, config, settings, gpu_mib)
    _add_tuning(made, settings)
    _add_plan_kind(made, settings)
    if settings.python_plugins:
        raise UsageError(
            "trtexec cannot load plugins written in Python", hint="`--backend tensorrt`, or a plugin library"
        )
    _add_loaded(made, settings)
    if settings.dla_core is not None and settings.gpu_fallback:
        made.add("allowGPUFallback")
    for library in settings.plugins if settings.serialize_plugins else ():
        made.add_required("setPluginsToSerialize", _resolve_library(library), setting="serialize_plugins")
    if files.timing_cache is not None:
        made.add("timingCacheFile", files.timing_cache)
    if settings.error_on_timing_cache_miss:
        made.add_optional("errorOnTimingCacheMiss", setting="error_on_timing_cache_miss")
    if not settings.compilation_cache:
        made.add_optional("noCompilationCache", setting="compilation_cache=off")
    made.add("profilingVerbosity", settings.profiling_verbosity)
    if files.layers is not None:
        made.add("exportLayerInfo", files.layers)
    return made


def run_command(
    program: Program,
    settings: PlanSettings,
    signature: Signature,
    input_shapes: Mapping[str, Shape],
    *,
    engine: Path,
    device: str,
    profile: int = 0,
) -> CommandLine:
    """The command line to load an engine, without run options."""
    if settings.refit_from is not None:
        raise UsageError(
            "trtexec cannot refit weights (`refit_from`)",
            hint="leave `-O refit_from` out, or install TensorRT's bindings: `pip install 'trt-engine[tensorrt]'`",
        )
    made = CommandLine(program)
    made.add("loadEngine", engine)
    _add_device(made, device)
    dynamic = {spec.name: input_shapes[spec.name] for spec in signature.inputs if spec.dynamic}
    if dynamic:
        made.add("shapes", format_shapes(dynamic))
    if profile:
        made.add_required("useProfile", profile, setting="profile")
    _add_loaded(made, settings)
    if settings.allow_host_code:  # required to load a version-compatible plan
        made.add_required("versionCompatible", setting="allow_host_code")
    if settings.lean_runtime is not None:  # loaded by the full runtime; trtexec's lean one has its own version
        made.add_required("leanDLLPath", _resolve_library(settings.lean_runtime), setting="lean_runtime")
    budget = {None: None, "off": "-2", "auto": "-1"}.get(
        settings.weight_streaming_budget, settings.weight_streaming_budget
    )
    if budget is not None:
        made.add_required("allowWeightStreaming", setting="weight_streaming_budget")
        text = budget if budget.endswith("%") or budget.startswith("-") else f"{parse_size(budget)}B"
        made.add_required("weightStreamingBudget", text, setting="weight_streaming_budget")
    if settings.persistent_cache_limit is not None:
        made.warnings.append("trtexec takes a fraction of L2, not bytes: `persistent_cache_limit` is left out")
    if settings.memory_strategy != "static":
        made.add_optional("allocationStrategy", _STRATEGY[settings.memory_strategy], setting="memory_strategy")
    return made


def format_shapes(shapes: Mapping[str, Iterable[int]]) -> str:
    """Shapes in trtexec syntax; names with colons or commas are quoted."""
    return ",".join(f"{quote_name(name)}:{format_shape(tuple(shape)) or 'scalar'}" for name, shape in shapes.items())


def quote_name(name: str) -> str:
    """An input name in trtexec list syntax."""
    if "'" in name and any(letter in name for letter in ":,"):
        raise UsageError(
            f"the input name `{name}` cannot be written on trtexec's command line", hint="rename it in the model"
        )
    return f"'{name}'" if any(letter in name for letter in ":,*") else name


def is_pool_size_different(requested_mib: float, read_mib: float | None, pool: str) -> bool:
    """Whether trtexec read another size than requested; it prints six digits and rounds dlaSRAM down."""
    if read_mib is None:
        return True
    if pool == "dlaSRAM" and read_mib <= requested_mib < 2 * read_mib:
        return False
    return abs(read_mib - requested_mib) > 1e-4 * requested_mib


# ------------------------------------------------------------------------------------------------ options


def _add_device(made: CommandLine, device: str) -> None:
    number = device.partition(":")[2] or "0"
    if number != "0":
        made.add("device", number)


def _add_typing(made: CommandLine, config: BuildConfig, dtypes: Collection[str]) -> None:
    """Strong typing: the default of 11, a flag in 9 and 10; older versions get flags for the graph's types."""
    version = made.program.version
    if version < (11, 0, 0):
        if made.program.has("stronglyTyped"):
            made.add("stronglyTyped")
        else:
            used = [kind for kind in _WEAK_TYPES if kind in dtypes]
            allowed = [f"--{kind}" for kind in used if made.program.has(kind)]
            made.arguments += allowed
            made.warnings.append(
                f"TensorRT {made.program.version_text} has no strong typing: "
                + (f"{' '.join(allowed)} allows the graph's types" if allowed else "the graph is fp32")
                + "; the dtype breakdown shows what it used"
            )
            if lacking := sorted(kind for kind in used if not made.program.has(kind)):
                raise UsageError(
                    f"the graph contains {', '.join(lacking)}, which trtexec {made.program.version_text} cannot build",
                    hint="use TensorRT 10 or later",
                )
    if config.precision != "tf32" and made.program.has("noTF32"):
        made.add("noTF32")  # fp32 excludes TF32 unless requested, as on every backend


def _add_profiles(
    made: CommandLine, profiles: tuple[Profile, ...], settings: PlanSettings, signature: Signature
) -> None:
    """min, opt and max shapes of dynamic inputs; none for a static model."""
    values = settings.shape_values.ranges if settings.shape_values is not None else {}
    dynamic = [spec.name for spec in signature.inputs if spec.dynamic and spec.name not in values]
    if not dynamic and not values:
        return
    if len(profiles) > 1 and not made.program.has("profile"):
        raise UsageError(
            f"trtexec {made.program.version_text} builds one profile, {len(profiles)} were given",
            hint="give one `--profile`, use TensorRT 9 or later, or `--backend tensorrt`",
        )
    for index, profile in enumerate(profiles):
        if len(profiles) > 1:
            made.add("profile", index)
        ranges = {name: profile.ranges[name] for name in dynamic} | dict(values)
        for which in ("min", "opt", "max"):
            made.add(f"{which}Shapes", format_shapes({name: getattr(span, which) for name, span in ranges.items()}))


def _add_pools(made: CommandLine, config: BuildConfig, settings: PlanSettings, gpu_mib: int | None) -> None:
    """Pool sizes as plain MiB, the only syntax common to all versions (`1024MiB` is 1024 bytes from 10.1)."""
    sizes: dict[str, float] = {"workspace": float(min(config.workspace_mib, gpu_mib or config.workspace_mib))}
    if gpu_mib is None and config.workspace_mib > BuildConfig().workspace_mib:
        made.warnings.append(
            f"the workspace stays {config.workspace_mib} MiB: the GPU memory size is unknown without NVML"
        )
    for pool, nbytes, setting in (
        ("dlaSRAM", settings.dla_sram, "dla_sram"),
        ("dlaLocalDRAM", settings.dla_local_dram, "dla_local_dram"),
        ("dlaGlobalDRAM", settings.dla_global_dram, "dla_global_dram"),
        ("tacticSharedMem", settings.tactic_shared_memory, "tactic_shared_memory"),
    ):
        if nbytes is None:
            continue
        if pool == "tacticSharedMem" and made.program.version < (10, 0, 0):
            made.warnings.append(f"trtexec {made.program.version_text} has no pool `{pool}`: `{setting}` is left out")
            continue
        if nbytes % (1 << 20) and made.program.version < (10, 1, 0):
            raise UsageError(
                f"trtexec {made.program.version_text} takes whole MiB, `{setting}` is {nbytes} bytes",
                hint="`-O name=1MiB`",
            )
        sizes[pool] = nbytes / (1 << 20)
    made.pools_mib = sizes
    made.add(
        "memPoolSize", ",".join(f"{pool}:{mib:g}" if mib % 1 else f"{pool}:{int(mib)}" for pool, mib in sizes.items())
    )
    if settings.tactic_dram is not None:
        made.warnings.append("trtexec has no option for `tactic_dram`; it is left out")


def _add_tuning(made: CommandLine, settings: PlanSettings) -> None:
    made.add("avgTiming", settings.avg_timing_iterations)
    for option, setting in _TUNING:
        if (value := getattr(settings, setting)) is not None:
            made.add_optional(option, _TILING.get(value, value), setting=setting)
    if sources := _supported_names(made, "tactic_sources", _expand_switches(settings.tactic_sources, str.upper)):
        made.add("tacticSources", ",".join(sources))
    spelled = _expand_switches(settings.preview_features, lambda name: PREVIEWS.get(name.lower(), name))
    if previews := _supported_names(made, "preview_features", spelled):
        made.add_optional("preview", ",".join(previews), setting="preview_features")
    if settings.sparsity:
        made.add("sparsity", "enable")
    if settings.distributive_independence:
        made.add_optional("distributiveIndependence", setting="distributive_independence")
    for name in ("max_threads", "strict_nans", "editable_timing_cache"):
        if getattr(settings, name):
            made.warnings.append(f"trtexec has no option for `{name}`; it is left out (`--backend tensorrt` has it)")


def _expand_switches(names: Iterable[str], spelled: Callable[[str], str]) -> list[str]:
    """`+X` and `-Y`, a bare name meaning `+`."""
    return [(name[0] if name[0] in "+-" else "+") + spelled(name.lstrip("+-")) for name in names]


def _supported_names(made: CommandLine, setting: str, switched: Iterable[str]) -> list[str]:
    """The values this version supports; others would fail the command line."""
    found = []
    for name in switched:
        first, end = _VALUE_VERSIONS.get(name[1:], ((0,), (99,)))
        if first <= made.program.version < end:
            found.append(name)
        else:
            made.warnings.append(
                f"trtexec {made.program.version_text} does not know `{name}` of `{setting}`: it is left out"
            )
    return found


def _add_plan_kind(made: CommandLine, settings: PlanSettings) -> None:
    """Options that change the plan."""
    if settings.refit in ("identical", "individual"):
        raise UsageError(
            f"trtexec cannot make a plan with `refit={settings.refit}`", hint="`-O refit=all`, or `--backend tensorrt`"
        )
    if settings.refit == "all":
        made.add("refit")
    if settings.strip_weights:
        made.add_required("stripWeights" if made.program.has("stripWeights") else "weightless", setting="strip_weights")
    if settings.version_compatible:
        made.add_required("versionCompatible", setting="version_compatible")
    if settings.exclude_lean_runtime:
        made.add_required("excludeLeanRuntime", setting="exclude_lean_runtime")
    if settings.hardware_compatibility != "none":
        if settings.hardware_compatibility == "same_compute_capability" and made.program.version < (10, 9, 0):
            raise UsageError(
                f"trtexec {made.program.version_text} knows `ampere_plus` only, `same_compute_capability` came with 10.9",
                hint="`-O hardware_compatibility=ampere_plus`",
            )
        made.add_required(
            "hardwareCompatibilityLevel", _HARDWARE[settings.hardware_compatibility], setting="hardware_compatibility"
        )
    if settings.runtime_platform != "same":
        made.add_required("runtimePlatform", "WindowsAMD64", setting="runtime_platform")
    if settings.weight_streaming:
        made.add_required("allowWeightStreaming", setting="weight_streaming")


def _add_loaded(made: CommandLine, settings: PlanSettings) -> None:
    """The plugin libraries and the DLA core of building and running."""
    for library in settings.plugins:
        made.add("staticPlugins" if made.program.has("staticPlugins") else "plugins", _resolve_library(library))
    if settings.dla_core is not None:
        made.add("useDLACore", settings.dla_core)


def _resolve_library(library: str) -> str:
    """The absolute path of a library; a bare name is resolved by the loader."""
    path = Path(library)
    if path.is_file():
        return str(path.absolute())
    if "/" in library:
        raise SetupError(f"there is no plugin library `{library}`", hint="`-O plugins=/path/to/libcustom.so`")
    return library
