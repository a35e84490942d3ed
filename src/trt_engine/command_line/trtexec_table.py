"""All options of trtexec 8.6 to 11.1, and their translation to our options.

The versions are those of the public sources (`sampleOptions.cpp`). `trt-engine docs reference/trtexec` prints
the table, `trtexec_options.py` translates command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SameOption:
    """Our verbs have the same option."""


@dataclass(frozen=True, slots=True)
class FileArgument:
    """The file is the argument of our verb."""


@dataclass(frozen=True, slots=True)
class RenamedOption:
    """Our `flag`, for verbs that have it; `read` converts the value, `value` replaces a switch."""

    flag: str
    parse: str | None = None
    """Name of a value parser in `trtexec_options`."""
    value: str | None = None


@dataclass(frozen=True, slots=True)
class BackendSetting:
    """`-O name=value` of the TensorRT backends; `values` maps trtexec's values to ours."""

    name: str
    value: str | None = None
    values: dict[str, str] = field(default_factory=dict)
    parse: str | None = None
    also: str | None = None
    """A second setting, as `name=value`."""


@dataclass(frozen=True, slots=True)
class ProfileShapes:
    """One of the three options of an optimization profile."""


@dataclass(frozen=True, slots=True)
class IgnoredOption:
    """Accepted without effect; `why` is logged."""

    reason: str


@dataclass(frozen=True, slots=True)
class RejectedOption:
    """Rejected with a hint."""

    hint: str


Translation = (
    SameOption | FileArgument | RenamedOption | BackendSetting | ProfileShapes | IgnoredOption | RejectedOption
)


@dataclass(frozen=True, slots=True)
class TrtexecOption:
    """One trtexec option: first and last version, whether it takes a value, translation by verb."""

    spelling: str
    first: str
    last: str | None
    """None for 11.1, the newest public version."""
    takes_value: bool
    measuring_only: bool
    """For measuring or reporting, which `build` ignores."""
    translation: Translation
    by_verb: dict[str, Translation] = field(default_factory=dict)

    def for_verb(self, verb: str) -> Translation:
        return self.by_verb.get(verb, self.translation)

    @property
    def versions(self) -> str:
        """`8.6 to 11.1`."""
        return f"{self.first} to {self.last or '11.1'}" if self.first != (self.last or "11.1") else self.first


OPTIONS: dict[str, TrtexecOption] = {}


def _add(spelling: str, versions: str, meaning: Translation, *, measures: bool = False, **by_verb: Translation) -> None:
    """`--name=` takes a value; `8.6-10.16`, `11.1` and `8.6-` are versions."""
    first, dash, last = versions.partition("-")
    name = spelling.removesuffix("=")
    made = TrtexecOption(name, first, last or (None if dash else first), name != spelling, measures, meaning, by_verb)
    OPTIONS[name] = made


def _add_measuring(spelling: str, versions: str, meaning: Translation, **by_verb: Translation) -> None:
    _add(spelling, versions, meaning, measures=True, **by_verb)


_WINDOWS = {"sameasbuild": "same", "windowsamd64": "windows_amd64"}
_HARDWARE = {"none": "none", "ampere+": "ampere_plus", "samecomputecapability": "same_compute_capability"}
_TILING = {"0": "none", "1": "fast", "2": "moderate", "3": "full"}
_STRATEGY = {"static": "static", "profile": "on_profile_change", "runtime": "user_managed"}
_VERBOSITY = {
    "layer_names_only": "layer_names_only", "default": "layer_names_only", "detailed": "detailed", "verbose": "detailed",
    "none": "none",
}  # fmt: skip
_BUDGET = {"-2": "off", "-1": "auto"}
_CAFFE = RejectedOption(
    "Caffe and UFF models are not read; `trt-engine convert` makes an ONNX file of PyTorch and TensorFlow models"
)
_TYPES = RejectedOption(
    "types are in the graph: `trt-engine cast MODEL --to fp16 --exclude-node NAME`, `trt-engine quantize --help`"
)
_IO_TYPES = RejectedOption(
    "inputs and outputs have the types of the graph: `trt-engine cast MODEL --to fp16 --no-keep-io`"
)
_CALIBRATION = RejectedOption(
    "TensorRT's calibration caches are not read, data is: `trt-engine quantize MODEL --to int8 --calib-data DATA`"
)
_TRTEXEC = "leave it out, or use trtexec itself and read its log with `trt-engine bench --parse-log FILE`"
_DLA = RejectedOption(f"of DLA there are `-O dla_core=0` and `-O gpu_fallback=on`; {_TRTEXEC}")
_SAFETY = RejectedOption(f"safety builds are not made here; {_TRTEXEC}")
_TUNER = RejectedOption(f"`-O build_route='...'` sets one route, the search over routes is trtexec's; {_TRTEXEC}")
_DEBUG = RejectedOption("`trt-engine ranges MODEL` reads every tensor of a graph")
_ACCURACY = RejectedOption(
    "`trt-engine compare REFERENCE ENGINE --fail-if error:1e-3` compares outputs; `build` does so always"
)
_OUTPUTS = IgnoredOption("`trt-engine infer ENGINE -o outputs.npz` writes outputs")
_LAYERS = IgnoredOption(
    "`trt-engine profile ENGINE -o DIR` lists the layers and their times; `trt-engine diff A B` compares layers"
)
_PROFILE = IgnoredOption("`trt-engine profile ENGINE -o DIR` has the times of the layers")
_OFTEN = IgnoredOption("`profile` measures with and without its profiler, and prints the layers, in any case")
_FILES = IgnoredOption("`-o DIR` writes the layers and their times as JSON")
_TIMES_ONE = RejectedOption(f"loading and refitting are not timed alone; {_TRTEXEC}")
_PLUGIN_NORM = IgnoredOption("TensorRT's parser chooses how InstanceNormalization runs")
_QUANTIZE = RejectedOption("`trt-engine quantize MODEL --to {0} --calib-data DATA`")
_CAST = RejectedOption("`trt-engine cast MODEL --to {0}`")
_BEST = RejectedOption(
    "gone in TensorRT 11: name one, as `--precision fp16`, or `trt-engine search` for a mixture within a budget"
)
_NAMED_BY_O = RejectedOption(
    "`trt-engine build MODEL -o FILE` keeps an engine; other verbs build a model's into the store"
)
_BUILDS_ONLY = RejectedOption("`trt-engine build MODEL -o FILE` builds and measures nothing")

# model
_add("--onnx=", "8.6-", FileArgument())
for _name in ("--deploy=", "--uff=", "--uffInput=", "--uffNHWC"):
    _add(_name, "8.6-9.3", _CAFFE)
_add("--model=", "8.6-9.3", RejectedOption("the model is an argument, an ONNX file: `trt-engine build MODEL`"))
_add("--output=", "8.6-9.3", RejectedOption("`-o FILE` names the file to write; outputs are those of the ONNX graph"))
_add("--batch=", "8.6-9.3", SameOption())
_add(
    "--maxBatch=",
    "8.6-9.3",
    RejectedOption("implicit batches are gone since TensorRT 10: `--batch 1:8:64` is min:opt:max"),
)
_add("--explicitBatch", "8.6-9.3", IgnoredOption("the batch is always explicit"))
_add(
    "--explicitPrecision",
    "8.6-9.3",
    IgnoredOption("the graph's QuantizeLinear and DequantizeLinear define what is quantised"),
)

# files
_add("--saveEngine=", "8.6-", _NAMED_BY_O, build=RenamedOption("--out"))
_add(
    "--loadEngine=",
    "8.6-",
    FileArgument(),
    build=RejectedOption("an engine needs no build: `trt-engine bench ENGINE` measures it"),
)
_add("--getPlanVersionOnly", "9.1-", RejectedOption("`trt-engine inspect ENGINE` prints the version"))
_add("--timingCacheFile=", "8.6-", RenamedOption("--timing-cache"))
_add(
    "--noBuilderCache",
    "8.6-",
    IgnoredOption("a timing cache changes how long a build takes; `--timing-cache FILE` chooses another"),
)
_add("--errorOnTimingCacheMiss", "9.1-", BackendSetting("error_on_timing_cache_miss", "on"))
_add("--noCompilationCache", "9.1-", BackendSetting("compilation_cache", "off"))
_add("--tempdir=", "8.6-", IgnoredOption("the environment variable TMPDIR names the folder for temporary files"))
_add(
    "--tempfileControls=", "8.6-", IgnoredOption("the environment variable TMPDIR names the folder for temporary files")
)

# builder search
_add("--skipInference", "8.6-", _BUILDS_ONLY, build=IgnoredOption("`build` measures nothing in any case"))
_add("--buildOnly", "8.6-9.3", _BUILDS_ONLY, build=IgnoredOption("`build` measures nothing in any case"))
_add("--avgTiming=", "8.6-", BackendSetting("avg_timing_iterations"))
_add(
    "--minTiming=", "8.6-9.3", IgnoredOption("TensorRT 10 has it no more; `-O avg_timing_iterations=8` is what is left")
)
_add("--builderOptimizationLevel=", "8.6-", BackendSetting("optimization_level"))
_add("--heuristic", "8.6-9.3", IgnoredOption("TensorRT 10 has it no more; `-O optimization_level=2` builds faster"))
_add("--maxAuxStreams=", "8.6-", BackendSetting("max_aux_streams"))
_add("--maxTactics=", "10.4-", BackendSetting("max_tactics"))
_add("--tilingOptimizationLevel=", "10.8-", BackendSetting("tiling_optimization", values=_TILING))
_add("--l2LimitForTiling=", "10.8-", BackendSetting("l2_limit_for_tiling", parse="nbytes"))
_add("--tacticSources=", "8.6-", BackendSetting("tactic_sources"))
_add("--preview=", "8.6-", BackendSetting("preview_features", parse="previews"))
_add("--setBuildRoute=", "11.1", BackendSetting("build_route"))
_add("--sparsity=", "8.6-", BackendSetting("sparsity", values={"disable": "off", "enable": "on"}))
_add("--profilingVerbosity=", "8.6-", BackendSetting("profiling_verbosity", values=_VERBOSITY))
_add("--nvtxMode=", "8.6-9.3", BackendSetting("profiling_verbosity", values=_VERBOSITY))
_add("--memPoolSize=", "8.6-", RenamedOption("--workspace", parse="pools"))
_add("--workspace=", "8.6-9.3", SameOption())
_add("--distributiveIndependence", "10.12-", BackendSetting("distributive_independence", "on"))
_add(
    "--monitorMemory",
    "10.7-",
    IgnoredOption("the allocations of a build are counted in any case (`-O count_allocations=off` stops it)"),
)
_add("--asyncFileReader", "10.7-", IgnoredOption("it changes how fast a file is read"))
_add("--decomposableAttentions=", "10.14-", RejectedOption(f"attention is decomposed as TensorRT decides; {_TRTEXEC}"))
for _name in ("--pluginInstanceNorm", "--pi"):
    _add(_name, "10.0-", _PLUGIN_NORM)
for _name in ("--nativeInstanceNorm", "--ni"):
    _add(_name, "9.1-9.3", _PLUGIN_NORM)

# plan properties
_add("--refit", "8.6-", BackendSetting("refit", "all"))
_add("--stripWeights", "10.0-", BackendSetting("strip_weights", "on"))
_add("--weightless", "9.3-10.16", BackendSetting("strip_weights", "on"))
_add("--stripAllWeights", "10.1-", BackendSetting("strip_weights", "on", also="refit=all"))
_add("--refitFromOnnx=", "10.14-", BackendSetting("refit_from"))
for _name in ("--versionCompatible", "--vc"):
    _at_load = RejectedOption(
        "`-O version_compatible=on` at build; at load `-O allow_host_code=on`, for a plan that you trust"
    )
    _add(_name, "8.6-", BackendSetting("version_compatible", "on"), bench=_at_load, profile=_at_load)
_add("--excludeLeanRuntime", "8.6-", BackendSetting("exclude_lean_runtime", "on"))
_add("--leanDLLPath=", "8.6-", BackendSetting("lean_runtime"))
_add(
    "--useRuntime=",
    "8.6-",
    RejectedOption("the full runtime runs every engine; `-O lean_runtime=FILE` names the lean one's library"),
)
_add("--hardwareCompatibilityLevel=", "8.6-", BackendSetting("hardware_compatibility", values=_HARDWARE))
_add("--runtimePlatform=", "10.2-", BackendSetting("runtime_platform", values=_WINDOWS))
_add("--allowWeightStreaming", "10.0-", BackendSetting("weight_streaming", "on"))
_add("--weightStreamingBudget=", "10.0-", BackendSetting("weight_streaming_budget", values=_BUDGET, parse="nbytes"))
_add(
    "--directIO",
    "8.6-",
    RejectedOption("TensorRT deprecates it: leave it out; the graph's own inputs and outputs are used"),
)
_add("--markDebug=", "10.0-", _DEBUG)
_add("--markUnfusedTensorsAsDebugTensors", "10.12-", _DEBUG)

# shapes
for _name in ("--minShapes=", "--optShapes=", "--maxShapes="):
    _add(_name, "8.6-", ProfileShapes())
_add("--shapes=", "8.6-", SameOption())
_add("--profile=", "9.1-", SameOption())
_add_measuring(
    "--useProfile=",
    "9.1-",
    RejectedOption("the shapes choose the profile: `--batch 8`, or `--shapes images:8x3x640x640`"),
)
_add("--inputIOFormats=", "8.6-", _IO_TYPES)
_add("--outputIOFormats=", "8.6-", _IO_TYPES)
for _name in ("--minShapesCalib=", "--optShapesCalib=", "--maxShapesCalib="):
    _add(_name, "8.6-10.16", _CALIBRATION)
_add("--calibProfile=", "9.1-10.16", _CALIBRATION)

# precision
for _name, _first in (("fp16", "8.6"), ("bf16", "9.1")):
    _add(
        f"--{_name}", f"{_first}-10.16", RenamedOption("--precision", value=_name), cast=RenamedOption("--to", value=_name),
        quantize=RejectedOption(_CAST.hint.format(_name)),
    )  # fmt: skip
for _name, _first in (("int8", "8.6"), ("fp8", "8.6"), ("int4", "10.1")):
    _add(
        f"--{_name}", f"{_first}-10.16", RenamedOption("--precision", value=_name),
        quantize=RenamedOption("--to", value=_name),
        cast=RejectedOption(_QUANTIZE.hint.format(_name)), ranges=RejectedOption(_QUANTIZE.hint.format(_name)),
    )  # fmt: skip
_loaded = IgnoredOption("changes nothing at load: an engine keeps the precision it was built with")
_add("--best", "8.6-10.16", _BEST, bench=_loaded, profile=_loaded)
_add("--noTF32", "8.6-", IgnoredOption("TF32 is off without `--precision tf32`"))
_add("--stronglyTyped", "9.1-", IgnoredOption("always so: an engine computes in the types of its graph"))
for _name in ("--precisionConstraints=", "--layerPrecisions=", "--layerOutputTypes="):
    _add(_name, "8.6-10.16", _TYPES)
_add("--calib=", "8.6-10.16", _CALIBRATION)

# DLA
_add("--useDLACore=", "8.6-", BackendSetting("dla_core"))
_add("--allowGPUFallback", "8.6-", BackendSetting("gpu_fallback", "on"))
for _name, _first in (
    ("--buildDLAStandalone", "8.6"), ("--layerDeviceTypes=", "8.6"), ("--uint8AsymmetricQuantizationDLA", "10.11"),
    ("--reportCapabilityDLA", "10.16"), ("--adjustForDLA", "10.16"),
):  # fmt: skip
    _add(_name, f"{_first}-", _DLA)

# plugins and safety
for _name, _first in (("--staticPlugins=", "8.6"), ("--dynamicPlugins=", "8.6"), ("--plugins=", "8.6")):
    _add(_name, f"{_first}-", BackendSetting("plugins", parse="library"))
_add("--setPluginsToSerialize=", "8.6-", BackendSetting("plugins", parse="library", also="serialize_plugins=on"))
_add("--ignoreParsedPluginLibs", "8.6-", IgnoredOption("only the libraries that `-O plugins` names are loaded"))
_add("--enablePluginOverride", "10.15-", RejectedOption(f"a plugin does not replace TensorRT's own; {_TRTEXEC}"))
for _name, _versions in (
    ("--safe", "8.6-"), ("--consistency", "8.6-"), ("--restricted", "8.6-10.16"), ("--std", "8.6-"),
    ("--serialized=", "8.6-"), ("--dumpKernelText", "10.13-"), ("--remoteAutoTuningConfig=", "10.13-"),
    ("--safetyPlugins=", "10.13-"), ("--cpuOnly", "10.15-"),
):  # fmt: skip
    _add(_name, _versions, _SAFETY)

# measuring
_add_measuring("--iterations=", "8.6-", SameOption(), profile=RenamedOption("--inferences"))
_counts = RejectedOption("`--warmup N` of `profile` counts inferences; of `bench` it is a time, as `--warmup 200ms`")
_add_measuring("--warmUp=", "8.6-", RenamedOption("--warmup", parse="milliseconds"), profile=_counts)
_add_measuring("--duration=", "8.6-", SameOption())
_add_measuring("--avgRuns=", "8.6-", IgnoredOption("every sample is kept: nothing is averaged over runs"))
_add_measuring(
    "--percentile=", "8.6-", SameOption(), profile=IgnoredOption("the median and the 99th percentile are printed")
)
_add_measuring("--idleTime=", "8.6-", RenamedOption("--idle", parse="milliseconds"))
_add_measuring("--sleepTime=", "8.6-", IgnoredOption("the warm-up stands in front of the first query"))
for _name, _means in (("--infStreams=", RenamedOption("--streams")), ("--streams=", SameOption())):
    _add_measuring(_name, "8.6-", _means, profile=IgnoredOption("one query at a time is profiled"))
_add_measuring("--threads", "8.6-", IgnoredOption("one thread enqueues for all streams"))
for _name, _ours, _versions in (
    ("--noDataTransfers", "--no-transfers", "8.6-"), ("--includeDataTransfers", "--transfers", "11.0-"),
    ("--useSpinWait", "--spin", "8.6-"), ("--noSpinWait", "--no-spin", "11.0-"),
    ("--useCudaGraph", "--graph", "8.6-"), ("--noCudaGraph", "--no-graph", "11.0-"),
):  # fmt: skip
    _add_measuring(_name, _versions, RenamedOption(_ours))
_add_measuring("--separateProfileRun", "8.6-", IgnoredOption("nothing is profiled while measuring"), profile=_OFTEN)
_add_measuring(
    "--exposeDMA",
    "8.6-",
    IgnoredOption("serialises copies and computation (45 % less throughput where it was tried); left out"),
)
_add_measuring("--useManagedMemory", "8.6-", RejectedOption(f"inputs and outputs are in device memory; {_TRTEXEC}"))
_add_measuring(
    "--loadInputs=", "8.6-", RejectedOption("`--inputs FILE.npz` has the inputs by name, `--inputs FILE.npy` one input")
)
_add_measuring(
    "--persistentCacheRatio=", "8.6-", RejectedOption("`-O persistent_cache_limit=4MiB` is in bytes, not a share")
)
_add_measuring("--allocationStrategy=", "10.0-", BackendSetting("memory_strategy", values=_STRATEGY))
_add_measuring("--timeDeserialize", "8.6-", _TIMES_ONE)
_add_measuring("--timeRefit", "8.6-", _TIMES_ONE)
_add_measuring("--saveDebugTensors=", "10.0-", _DEBUG)
_add_measuring("--saveAllDebugTensors=", "10.12-", _DEBUG)

# reporting
_add("--verbose", "8.6-", SameOption())
_add("-v", "8.6-", SameOption())
_add("--help", "8.6-", SameOption())
_add("-h", "8.6-", SameOption())
_add_measuring("--dumpProfile", "8.6-", _PROFILE, profile=_OFTEN)
_add_measuring("--exportProfile=", "8.6-", _PROFILE, profile=_FILES)
_add_measuring("--dumpLayerInfo", "8.6-", _LAYERS, profile=_OFTEN)
_add_measuring("--exportLayerInfo=", "8.6-", _LAYERS, profile=_FILES)
_add_measuring(
    "--exportTimes=",
    "8.6-",
    IgnoredOption("`trt-engine bench ENGINE -o DIR` writes records.jsonl with the time of every query"),
)
_add_measuring("--dumpOutput", "8.6-", _OUTPUTS)
_add_measuring("--exportOutput=", "8.6-", _OUTPUTS)
_add_measuring("--dumpRawBindingsToFile", "8.6-", _OUTPUTS)
_add_measuring("--dumpRefit", "8.6-", IgnoredOption(f"weights that can be replaced are not listed; {_TRTEXEC}"))
_add_measuring("--dumpOptimizationProfile", "9.1-", IgnoredOption("`trt-engine inspect ENGINE` prints the profiles"))

# system
_add("--device=", "8.6-", SameOption())

# 11.1: accuracy, build route tuner
for _name in ("--loadRefOutputs=", "--accuracyAlgorithm=", "--atol=", "--rtol=", "--accuracyThreshold=", "--refPair="):
    _add_measuring(_name, "11.1", _ACCURACY)
for _name in (
    "--tuneBuildRoutes=", "--tuneBuildRouteFile=", "--tuningSearch=", "--tuningCacheFile=", "--tuningResultFile=",
    "--tuningTimeOut=", "--saveAllEngines", "--continue", "--helpBuildRoute",
):  # fmt: skip
    _add(_name, "11.1", _TUNER)
_add("--dryRun", "11.1", RenamedOption("--dry-run"))
