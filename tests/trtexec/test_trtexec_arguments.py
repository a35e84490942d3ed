"""The command line of each version: nothing it does not have, everything that was asked for or a word about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trt_engine.backends.trtexec import command_line
from trt_engine.backends.trtexec.program import Program
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.errors import UsageError
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.trt.settings import parse

NOT_IN = {  # by the parser of each tag of the public repository (`sampleOptions.cpp`), of what we could ever pass
    (8, 5, 3): "skipInference stronglyTyped profile builderOptimizationLevel maxAuxStreams maxTactics "
    "tilingOptimizationLevel l2LimitForTiling setBuildRoute distributiveIndependence stripWeights weightless "
    "versionCompatible excludeLeanRuntime hardwareCompatibilityLevel runtimePlatform allowWeightStreaming "
    "weightStreamingBudget staticPlugins setPluginsToSerialize errorOnTimingCacheMiss noCompilationCache useProfile "
    "leanDLLPath allocationStrategy",
    (8, 6, 1): "stronglyTyped profile maxTactics tilingOptimizationLevel l2LimitForTiling setBuildRoute "
    "distributiveIndependence stripWeights weightless runtimePlatform allowWeightStreaming weightStreamingBudget "
    "errorOnTimingCacheMiss noCompilationCache useProfile allocationStrategy",
    (9, 1, 0): "maxTactics tilingOptimizationLevel l2LimitForTiling setBuildRoute distributiveIndependence stripWeights "
    "weightless runtimePlatform allowWeightStreaming weightStreamingBudget allocationStrategy",
    (10, 0, 1): "buildOnly maxTactics tilingOptimizationLevel l2LimitForTiling setBuildRoute distributiveIndependence "
    "runtimePlatform",
    (10, 16, 1): "buildOnly setBuildRoute",
    (11, 0, 0): "buildOnly setBuildRoute weightless fp16 bf16 int8 fp8 int4 best calib",
    (11, 1, 0): "buildOnly weightless fp16 bf16 int8 fp8 int4 best calib",
}  # fmt: skip
EVERY = pytest.mark.parametrize("version", NOT_IN, ids=lambda version: ".".join(map(str, version)))
SIGNATURE = Signature((TensorSpec("x", "float32", (-1, 3)), TensorSpec("fixed", "float32", (2, 2))), ())
PROFILE = Profile({"x": ShapeRange((1, 3), (2, 3), (4, 3)), "fixed": ShapeRange((2, 2), (2, 2), (2, 2))})


def trtexec(version: tuple[int, int, int]) -> Program:
    """One whose help was too short to be whole: the version decides."""
    return Program(Path("trtexec"), version, None, frozenset())


def made(
    version: tuple[int, int, int], *, kinds: tuple[str, ...] = ("fp32",), **options: str
) -> command_line.CommandLine:
    config = BuildConfig(backend="trtexec", device="cuda:1", profiles=(PROFILE,), workspace_mib=8192)
    return command_line.build_command(
        trtexec(version), config, parse(options), SIGNATURE,
        command_line.BuildFiles(Path("/m.onnx"), Path("/m.engine"), Path("/l.json"), Path("/t.cache")), dtypes=kinds,
    )  # fmt: skip


def names(words: list[str]) -> set[str]:
    return {word.removeprefix("--").partition("=")[0] for word in words}


SEARCH = {
    "optimization_level": "4", "max_aux_streams": "0", "max_tactics": "9", "tiling_optimization": "fast",
    "l2_limit_for_tiling": "1MiB", "build_route": "-a=1", "distributive_independence": "on",
    "error_on_timing_cache_miss": "on", "compilation_cache": "off", "preview_features": "aliased_plugin_io_10_03",
    "tactic_sources": "+EDGE_MASK_CONVOLUTIONS", "sparsity": "on", "max_threads": "3", "strict_nans": "on",
}  # fmt: skip


@EVERY
def test_what_steers_the_search_is_passed_or_said_and_never_both(version: Any) -> None:
    found = made(version, **SEARCH)
    lacking = set(NOT_IN[version].split())
    assert not names(found.arguments) & lacking
    for setting, option in (
        ("optimization_level", "builderOptimizationLevel"), ("max_aux_streams", "maxAuxStreams"),
        ("max_tactics", "maxTactics"), ("tiling_optimization", "tilingOptimizationLevel"),
        ("l2_limit_for_tiling", "l2LimitForTiling"), ("build_route", "setBuildRoute"),
        ("distributive_independence", "distributiveIndependence"), ("compilation_cache=off", "noCompilationCache"),
        ("error_on_timing_cache_miss", "errorOnTimingCacheMiss"),
    ):  # fmt: skip
        told = [text for text in found.warnings if f"`--{option}`" in text and f"`{setting}` is left out" in text]
        assert (option in names(found.arguments), len(told)) == ((False, 1) if option in lacking else (True, 0)), option
    assert sum("trtexec has no option for" in text for text in found.warnings) == 2  # max_threads, strict_nans


PLAN = {
    "strip_weights": ("on", {"stripWeights"}), "version_compatible": ("on", {"versionCompatible"}),
    "hardware_compatibility": ("ampere_plus", {"hardwareCompatibilityLevel"}),
    "runtime_platform": ("windows_amd64", {"runtimePlatform"}), "weight_streaming": ("on", {"allowWeightStreaming"}),
}  # fmt: skip


@EVERY
@pytest.mark.parametrize("setting", PLAN)
def test_what_makes_another_plan_is_passed_or_refused(version: Any, setting: str) -> None:
    value, options = PLAN[setting]
    if options & set(NOT_IN[version].split()):
        with pytest.raises(UsageError, match=f"`{setting}` needs"):
            made(version, **{setting: value})
    else:
        assert options <= names(made(version, **{setting: value}).arguments)


@EVERY
def test_several_profiles_are_passed_from_9_on_and_refused_before(version: Any) -> None:
    config = BuildConfig(backend="trtexec", device="cuda:0", profiles=(PROFILE, PROFILE))
    if version < (9,):
        with pytest.raises(UsageError, match="builds one profile, 2 were given"):
            built(version, config)
    else:
        assert [word for word in built(version, config).arguments if "rofile=" in word] == [
            "--profile=0",
            "--profile=1",
        ]


def built(version: tuple[int, int, int], config: BuildConfig) -> command_line.CommandLine:
    return command_line.build_command(
        trtexec(version), config, parse({}), SIGNATURE,
        command_line.BuildFiles(Path("m"), Path("e")), dtypes=("fp32",),
    )  # fmt: skip


def test_a_version_without_strong_typing_is_allowed_the_types_of_the_graph() -> None:
    found = made((8, 6, 1), kinds=("fp32", "fp16", "int8"))
    assert {"--fp16", "--int8"} <= set(found.arguments) and any("no strong typing" in text for text in found.warnings)
    with pytest.raises(UsageError, match="the graph contains bf16"):
        made((8, 6, 1), kinds=("fp32", "bf16"))
    assert not {"fp16", "int8"} & names(made((9, 1, 0), kinds=("fp16", "int8")).arguments)


@EVERY
def test_values_a_version_does_not_know_are_said_and_left_out(version: Any) -> None:
    found = made(
        version,
        preview_features="profile_sharing_0806,-aliased_plugin_io_10_03",
        tactic_sources="cudnn,-JIT_CONVOLUTIONS",
    )
    words = " ".join(found.arguments)
    for text, known in (
        ("+profileSharing0806", (8, 6) <= version < (11, 0)), ("-aliasedPluginIO1003", version >= (10, 3)),
        ("+CUDNN", version < (11, 0)), ("-JIT_CONVOLUTIONS", True),
    ):  # fmt: skip
        assert (text in words) is known
        assert any(f"does not know `{text}`" in said for said in found.warnings) is not known


@EVERY
def test_an_engine_is_loaded_with_what_the_version_has(version: Any) -> None:
    lacking = set(NOT_IN[version].split())
    options = {"weight_streaming_budget": "2GiB", "memory_strategy": "user_managed"}
    if "weightStreamingBudget" in lacking:
        with pytest.raises(UsageError, match="allowWeightStreaming"):
            running(version, **options)
        options.pop("weight_streaming_budget")
    found = running(version, **options)
    assert not names(found.arguments) & lacking
    assert "--shapes=x:2x3" in found.arguments
    assert ("allocationStrategy" in lacking) is any("allocationStrategy" in text for text in found.warnings)


def test_a_yes_to_host_code_and_a_lean_runtime_are_passed_as_trtexec_has_them() -> None:
    """At load `--versionCompatible` allows the host code; `--useRuntime=lean` would take the lean library of trtexec's own
    version, and no plugins."""
    assert "--versionCompatible" not in running((11, 1, 0), version_compatible="on").arguments
    assert "--versionCompatible" in running((11, 1, 0), version_compatible="on", allow_host_code="on").arguments
    words = running((11, 1, 0), lean_runtime="libnvinfer_lean.so.10").arguments
    assert "--leanDLLPath=libnvinfer_lean.so.10" in words and not [word for word in words if "useRuntime" in word]
    with pytest.raises(UsageError, match="versionCompatible"):
        running((8, 5, 3), allow_host_code="on")


def test_what_an_engine_was_built_for_is_said_again_when_it_is_loaded() -> None:
    assert "--useDLACore=1" in running((10, 16, 1), dla_core="1").arguments
    found = running((10, 16, 1), persistent_cache_limit="1MiB")
    assert any("persistent_cache_limit" in text for text in found.warnings)
    assert not names(found.arguments) & {"useDLACore", "persistentCacheRatio"}


@pytest.mark.parametrize(
    ("budget", "word"), [("off", "-2"), ("auto", "-1"), ("40%", "40%"), ("2GiB", "2147483648B"), ("1MB", "1048576B")]
)
def test_a_budget_is_passed_in_bytes(budget: str, word: str) -> None:
    words = running((10, 16, 1), weight_streaming_budget=budget).arguments
    assert f"--weightStreamingBudget={word}" in words and "--allowWeightStreaming" in words


def running(version: tuple[int, int, int], **options: str) -> command_line.CommandLine:
    given = {"x": (2, 3), "fixed": (2, 2)}
    return command_line.run_command(
        trtexec(version), parse(options), SIGNATURE, given, engine=Path("/m.engine"), device="cuda:0", profile=0
    )


def test_names_and_scalars_are_written_as_trtexec_reads_them() -> None:
    assert command_line.format_shapes({"a": (1, 3), "in:0": (2,), "s": ()}) == "a:1x3,'in:0':2,s:scalar"
    with pytest.raises(UsageError, match="cannot be written"):
        command_line.format_shapes({"it's:0": (1,)})


@pytest.mark.parametrize(
    ("asked", "found", "pool", "differs"),
    [
        (32768.0, 32768.0, "workspace", False), (32768.0, 0.03125, "workspace", True), (32768.0, None, "workspace", True),
        (1234567.0, 1.23457e6, "workspace", False), (0.046875, 0.046875, "tacticSharedMem", False),
        (3.0, 2.0, "dlaSRAM", False), (3.0, 1.0, "dlaSRAM", True), (8192.0, 4096.0, "workspace", True),
    ],
)  # fmt: skip
def test_a_pool_that_was_read_otherwise_is_seen(asked: float, found: float | None, pool: str, differs: bool) -> None:
    assert command_line.is_pool_size_different(asked, found, pool) is differs


def test_weights_that_only_the_bindings_replace_are_refused_and_never_left_out() -> None:
    with pytest.raises(UsageError, match="trtexec cannot refit weights") as caught:
        running((11, 1, 0), refit_from="other.onnx")
    assert "install TensorRT's bindings" in (caught.value.hint or "")


@pytest.mark.parametrize(("gpu_mib", "word"), [(24576, 24576), (None, 32768), (81920, 32768)])
def test_the_workspace_is_never_more_than_the_memory_of_the_gpu_where_that_is_known(
    gpu_mib: int | None, word: int
) -> None:
    found = command_line.build_command(
        trtexec((10, 16, 1)), BuildConfig(backend="trtexec", device="cuda:0"), parse({}), SIGNATURE,
        command_line.BuildFiles(Path("m"), Path("e")), dtypes=("fp32",), gpu_mib=gpu_mib,
    )  # fmt: skip
    assert f"--memPoolSize=workspace:{word}" in found.arguments and found.pools_mib == {"workspace": word}
    assert not any("workspace" in text for text in found.warnings)


def test_a_pool_of_less_than_a_mib_is_refused_where_suffixes_are_ignored() -> None:
    assert (
        "--memPoolSize=workspace:8192,tacticSharedMem:0.046875"
        in made((10, 1, 0), tactic_shared_memory="48KiB").arguments
    )
    with pytest.raises(UsageError, match="takes whole MiB"):
        made((10, 0, 1), tactic_shared_memory="48KiB")
    assert any("no pool" in text for text in made((8, 6, 1), tactic_shared_memory="1MiB").warnings)
