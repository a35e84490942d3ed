"""The command line a version of trtexec understands, made from our settings.

What a version does not have is said and left out where it only steers the search, and refused where it would make another
kind of plan. Facts: `sampleOptions.cpp` of the public TensorRT repository, 8.5 to 11.1, and the help of the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trt_engine.backends.trtexec.program import Program
from trt_engine.config import BuildConfig, Profile, parse_size
from trt_engine.errors import SetupError, UsageError
from trt_engine.plans.settings import PlanSettings
from trt_engine.tensors import Shape, Signature, format_shape

__all__ = ["Arguments", "for_build", "for_running", "pool_differs", "shapes"]

_PREVIEWS = {
    "profile_sharing_0806": "profileSharing0806",
    "aliased_plugin_io_10_03": "aliasedPluginIO1003",
    "runtime_activation_resize_10_10": "runtimeActivationResize",
    "multidevice_runtime_10_16": "multiDeviceRuntime",
}
_VALUES = {  # the first version that knows a name, and the first that does not know it again
    "profileSharing0806": ((8, 6), (11,)), "aliasedPluginIO1003": ((10, 3), (99,)),
    "runtimeActivationResize": ((10, 10), (99,)), "multiDeviceRuntime": ((10, 16), (11,)),
    "CUBLAS": ((8, 5), (11,)), "CUBLAS_LT": ((8, 5), (11,)), "CUDNN": ((8, 5), (11,)),
}  # fmt: skip
_TILING = {"none": 0, "fast": 1, "moderate": 2, "full": 3}
_HARDWARE = {"ampere_plus": "ampere+", "same_compute_capability": "sameComputeCapability"}
_STRATEGY = {"static": "static", "on_profile_change": "profile", "user_managed": "runtime"}
_WEAK = {"fp16": "--fp16", "bf16": "--bf16", "int8": "--int8", "fp8": "--fp8", "int4": "--int4"}
"""What lets a weakly typed builder use a type; gone in 11."""


@dataclass
class Arguments:
    """The words of a command line, what was left out of it, and what was promised of memory."""

    program: Program
    words: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Warnings: what this version does not have, what does not help."""
    pools_mib: dict[str, float] = field(default_factory=dict)
    """Sizes by pool, as the banner must show them."""

    def add(self, option: str, value: object = None) -> None:
        self.words.append(f"--{option}" if value is None else f"--{option}={value}")

    def offer(self, option: str, value: object = None, *, setting: str) -> bool:
        """Add an option that steers the search; say so where this version lacks it."""
        if self.program.has(option):
            self.add(option, value)
            return True
        self.said.append(
            f"trtexec {self.program.text} has no `--{option}`: `{setting}` is left out, the engine is built without"
        )
        return False

    def need(self, option: str, value: object = None, *, setting: str) -> None:
        """Add an option without which another kind of plan would come out; `UsageError` where this version lacks it."""
        if not self.program.has(option):
            raise UsageError(
                f"trtexec {self.program.text} has no `--{option}`, which `{setting}` needs",
                hint=f"leave `-O {setting}` out, use a TensorRT that has it, or `--backend tensorrt`",
            )
        self.add(option, value)


def for_build(
    program: Program,
    config: BuildConfig,
    settings: PlanSettings,
    signature: Signature,
    *,
    model: Path,
    engine: Path,
    layers: Path | None,
    timing_cache: Path | None,
    kinds: Collection[str],
    gpu_mib: int | None = None,
) -> Arguments:
    """The command line of a build. `kinds` are the data types of the graph, `gpu_mib` is the GPU's memory."""
    made = Arguments(program)
    made.add("onnx", model)
    made.add("saveEngine", engine)
    made.add("skipInference" if program.has("skipInference") else "buildOnly")
    _device(made, config.device)
    _typing(made, config, kinds)
    _profiles(made, config.profiles, settings, signature)
    _pools(made, config, settings, gpu_mib)
    _search(made, settings)
    _plan(made, settings)
    _dla(made, settings)
    _plugins(made, settings)
    if timing_cache is not None:
        made.add("timingCacheFile", timing_cache)
    if settings.error_on_timing_cache_miss:
        made.offer("errorOnTimingCacheMiss", setting="error_on_timing_cache_miss")
    if not settings.compilation_cache:
        made.offer("noCompilationCache", setting="compilation_cache=off")
    made.add("profilingVerbosity", settings.profiling_verbosity)
    if layers is not None:
        made.add("exportLayerInfo", layers)
    return made


def for_running(
    program: Program,
    settings: PlanSettings,
    signature: Signature,
    given: Mapping[str, Shape],
    *,
    engine: Path,
    device: str,
    profile: int = 0,
) -> Arguments:
    """The command line that loads an engine, without what is to be done with it."""
    if settings.refit_from is not None:
        raise UsageError(
            "trtexec cannot replace weights, which `refit_from` asks for",
            hint="leave `-O refit_from` out, or install TensorRT's bindings: `pip install 'trt-engine[tensorrt]'`",
        )
    made = Arguments(program)
    made.add("loadEngine", engine)
    _device(made, device)
    dynamic = {spec.name: given[spec.name] for spec in signature.inputs if spec.dynamic}
    if dynamic:
        made.add("shapes", shapes(dynamic))
    if profile:
        made.need("useProfile", profile, setting="profile")
    for library in settings.plugins:
        made.add("staticPlugins" if program.has("staticPlugins") else "plugins", _absolute(library))
    if settings.allow_host_code:  # at load this option is that yes; without it a version-compatible plan is refused
        made.need("versionCompatible", setting="allow_host_code")
    if settings.lean_runtime is not None:  # the full runtime loads it: trtexec's lean one would be of its own version
        made.need("leanDLLPath", _absolute(settings.lean_runtime), setting="lean_runtime")
    budget = {None: None, "off": "-2", "auto": "-1"}.get(
        settings.weight_streaming_budget, settings.weight_streaming_budget
    )
    if budget is not None:
        made.need("allowWeightStreaming", setting="weight_streaming_budget")
        made.need("weightStreamingBudget", _budget_text(budget), setting="weight_streaming_budget")
    if settings.dla_core is not None:
        made.add("useDLACore", settings.dla_core)
    if settings.persistent_cache_limit is not None:
        made.said.append("trtexec takes a share of L2 and no bytes: `persistent_cache_limit` is left out")
    if settings.memory_strategy != "static":
        made.offer("allocationStrategy", _STRATEGY[settings.memory_strategy], setting="memory_strategy")
    return made


def shapes(given: Mapping[str, Iterable[int]]) -> str:
    """Shapes as trtexec reads them; a scalar has none, and names with colons or commas are quoted."""
    return ",".join(f"{quoted(name)}:{format_shape(tuple(shape)) or 'scalar'}" for name, shape in given.items())


def quoted(name: str) -> str:
    """An input's name as trtexec reads it in lists."""
    if "'" in name and any(letter in name for letter in ":,"):
        raise UsageError(
            f"the input name `{name}` cannot be written on trtexec's command line", hint="rename it in the model"
        )
    return f"'{name}'" if any(letter in name for letter in ":,*") else name


def pool_differs(asked_mib: float, found_mib: float | None, pool: str) -> bool:
    """True when the tool read another size than it was given; it prints six digits, and rounds dlaSRAM down."""
    if found_mib is None:
        return True
    if pool == "dlaSRAM" and found_mib <= asked_mib < 2 * found_mib:
        return False
    return abs(found_mib - asked_mib) > 1e-4 * asked_mib


# ------------------------------------------------------------------------------------------------ parts


def _device(made: Arguments, device: str) -> None:
    number = device.partition(":")[2] or "0"
    if number != "0":
        made.add("device", number)


def _typing(made: Arguments, config: BuildConfig, kinds: Collection[str]) -> None:
    """Precision is in the graph. 11 takes nothing else, 9 and 10 are told so, before that types must be allowed."""
    version = made.program.version
    if version < (11, 0, 0):
        if made.program.has("stronglyTyped"):
            made.add("stronglyTyped")
        else:
            allowed = [_WEAK[kind] for kind in _WEAK if kind in kinds and made.program.has(_WEAK[kind][2:])]
            made.words += allowed
            made.said.append(
                f"TensorRT {made.program.text} has no strong typing: "
                + (f"{' '.join(allowed)} lets it use what the graph holds" if allowed else "the graph is fp32")
                + ", and the census says what it used"
            )
            if lacking := sorted(kind for kind in _WEAK if kind in kinds and not made.program.has(_WEAK[kind][2:])):
                raise UsageError(
                    f"the graph holds {', '.join(lacking)}, which trtexec {made.program.text} cannot build",
                    hint="use TensorRT 10 or later",
                )
    if config.precision != "tf32" and made.program.has("noTF32"):
        made.add("noTF32")  # fp32 is fp32 unless TF32 is asked for, as on every backend


def _profiles(made: Arguments, profiles: tuple[Profile, ...], settings: PlanSettings, signature: Signature) -> None:
    """min, opt and max of what moves; a static model takes no shapes at all."""
    values = settings.shape_values.ranges if settings.shape_values is not None else {}
    dynamic = [spec.name for spec in signature.inputs if spec.dynamic and spec.name not in values]
    if not dynamic and not values:
        return
    if len(profiles) > 1 and not made.program.has("profile"):
        raise UsageError(
            f"trtexec {made.program.text} builds one profile, {len(profiles)} were given",
            hint="give one `--profile`, use TensorRT 9 or later, or `--backend tensorrt`",
        )
    for index, profile in enumerate(profiles):
        if len(profiles) > 1:
            made.add("profile", index)
        ranges = {name: profile.ranges[name] for name in dynamic} | dict(values)
        for which in ("min", "opt", "max"):
            made.add(f"{which}Shapes", shapes({name: getattr(span, which) for name, span in ranges.items()}))


def _pools(made: Arguments, config: BuildConfig, settings: PlanSettings, gpu_mib: int | None) -> None:
    """Sizes as plain numbers of MiB: the one spelling every version reads alike (`1024MiB` is 1024 bytes from 10.1)."""
    sizes: dict[str, float] = {"workspace": float(min(config.workspace_mib, gpu_mib or config.workspace_mib))}
    if gpu_mib is None and config.workspace_mib > BuildConfig().workspace_mib:
        made.said.append(
            f"the workspace stays {config.workspace_mib} MiB: nobody here says how much memory the GPU has (NVML is missing)"
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
            made.said.append(f"trtexec {made.program.text} has no pool `{pool}`: `{setting}` is left out")
            continue
        if nbytes % (1 << 20) and made.program.version < (10, 1, 0):
            raise UsageError(
                f"trtexec {made.program.text} takes whole MiB, `{setting}` is {nbytes} bytes", hint="`-O name=1MiB`"
            )
        sizes[pool] = nbytes / (1 << 20)
    made.pools_mib = sizes
    made.add(
        "memPoolSize", ",".join(f"{pool}:{mib:g}" if mib % 1 else f"{pool}:{int(mib)}" for pool, mib in sizes.items())
    )
    if settings.tactic_dram is not None:
        made.said.append("trtexec has no option for `tactic_dram`; it is left out")


def _search(made: Arguments, settings: PlanSettings) -> None:
    if settings.optimization_level is not None:
        made.offer("builderOptimizationLevel", settings.optimization_level, setting="optimization_level")
    if settings.max_aux_streams is not None:
        made.offer("maxAuxStreams", settings.max_aux_streams, setting="max_aux_streams")
    made.add("avgTiming", settings.avg_timing_iterations)
    if settings.max_tactics is not None:
        made.offer("maxTactics", settings.max_tactics, setting="max_tactics")
    if settings.tiling_optimization is not None:
        made.offer("tilingOptimizationLevel", _TILING[settings.tiling_optimization], setting="tiling_optimization")
    if settings.l2_limit_for_tiling is not None:
        made.offer("l2LimitForTiling", settings.l2_limit_for_tiling, setting="l2_limit_for_tiling")
    if sources := _known(made, "tactic_sources", _switched(settings.tactic_sources, str.upper)):
        made.add("tacticSources", ",".join(sources))
    spelled = _switched(settings.preview_features, lambda name: _PREVIEWS.get(name.lower(), name))
    if previews := _known(made, "preview_features", spelled):
        made.offer("preview", ",".join(previews), setting="preview_features")
    if settings.build_route is not None:
        made.offer("setBuildRoute", settings.build_route, setting="build_route")
    if settings.sparsity:
        made.add("sparsity", "enable")
    if settings.distributive_independence:
        made.offer("distributiveIndependence", setting="distributive_independence")
    for name in ("max_threads", "strict_nans", "editable_timing_cache"):
        if getattr(settings, name):
            made.said.append(f"trtexec has no option for `{name}`; it is left out (`--backend tensorrt` has it)")


def _switched(names: Iterable[str], spelled: Callable[[str], str]) -> list[str]:
    """`+X` and `-Y`, a bare name meaning `+`."""
    return [(name[0] if name[0] in "+-" else "+") + spelled(name.lstrip("+-")) for name in names]


def _known(made: Arguments, setting: str, switched: Iterable[str]) -> list[str]:
    """Those this version knows; of the others it would make an error of the whole command line."""
    found = []
    for name in switched:
        first, end = _VALUES.get(name[1:], ((0,), (99,)))
        if first <= made.program.version < end:
            found.append(name)
        else:
            made.said.append(f"trtexec {made.program.text} does not know `{name}` of `{setting}`: it is left out")
    return found


def _plan(made: Arguments, settings: PlanSettings) -> None:
    """What makes another kind of plan."""
    if settings.refit in ("identical", "individual"):
        raise UsageError(
            f"trtexec cannot make a plan with `refit={settings.refit}`", hint="`-O refit=all`, or `--backend tensorrt`"
        )
    if settings.refit == "all":
        made.add("refit")
    if settings.strip_weights:
        made.need("stripWeights" if made.program.has("stripWeights") else "weightless", setting="strip_weights")
    if settings.version_compatible:
        made.need("versionCompatible", setting="version_compatible")
    if settings.exclude_lean_runtime:
        made.need("excludeLeanRuntime", setting="exclude_lean_runtime")
    if settings.hardware_compatibility != "none":
        if settings.hardware_compatibility == "same_compute_capability" and made.program.version < (10, 9, 0):
            raise UsageError(
                f"trtexec {made.program.text} knows `ampere_plus` only, `same_compute_capability` came with 10.9",
                hint="`-O hardware_compatibility=ampere_plus`",
            )
        made.need(
            "hardwareCompatibilityLevel", _HARDWARE[settings.hardware_compatibility], setting="hardware_compatibility"
        )
    if settings.runtime_platform != "same":
        made.need("runtimePlatform", "WindowsAMD64", setting="runtime_platform")
    if settings.weight_streaming:
        made.need("allowWeightStreaming", setting="weight_streaming")


def _dla(made: Arguments, settings: PlanSettings) -> None:
    if settings.dla_core is None:
        return
    made.add("useDLACore", settings.dla_core)
    if settings.gpu_fallback:
        made.add("allowGPUFallback")


def _plugins(made: Arguments, settings: PlanSettings) -> None:
    if settings.python_plugins:
        raise UsageError(
            "trtexec cannot load plugins written in Python", hint="`--backend tensorrt`, or a plugin library"
        )
    for library in settings.plugins:
        path = _absolute(library)
        made.add("staticPlugins" if made.program.has("staticPlugins") else "plugins", path)
        if settings.serialize_plugins:
            made.need("setPluginsToSerialize", path, setting="serialize_plugins")


def _absolute(library: str) -> str:
    """A library's path from wherever the tool runs; a bare name is left to the loader."""
    path = Path(library)
    if path.is_file():
        return str(path.absolute())
    if "/" in library:
        raise SetupError(f"there is no plugin library `{library}`", hint="`-O plugins=/path/to/libcustom.so`")
    return library


def _budget_text(size: str) -> str:
    """A weight streaming budget as trtexec reads it: bytes, or a share."""
    return size if size.endswith("%") or size.startswith("-") else f"{parse_size(size)}B"
