"""A program that behaves as trtexec 10.16 and 11.1 are documented to, without a GPU: the tests' other side.

Options, defaults, banner, messages, exit codes and files are those of `samples/common` and `samples/trtexec` of the public
TensorRT repository and of public logs. A plan is a header with TensorRT's version, then a JSON and the ONNX it was built
from; what runs is ONNX Runtime on that ONNX, so outputs and times are real. `behaviour` says what goes wrong.
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

COMMON = """
onnx saveEngine= loadEngine= skipInference avgTiming= builderOptimizationLevel= maxAuxStreams= maxTactics=
tilingOptimizationLevel= l2LimitForTiling= profilingVerbosity= refit stripWeights stripAllWeights refitFromOnnx=
versionCompatible vc excludeLeanRuntime leanDLLPath= useRuntime= hardwareCompatibilityLevel= runtimePlatform= tempdir=
tempfileControls= sparsity= tacticSources= preview= allowWeightStreaming weightStreamingBudget= pluginInstanceNorm
decomposableAttentions= distributiveIndependence markDebug= monitorMemory asyncFileReader getPlanVersionOnly directIO
useDLACore= allowGPUFallback buildDLAStandalone layerDeviceTypes= enablePluginOverride minShapes= optShapes= maxShapes=
shapes= profile= useProfile= inputIOFormats= outputIOFormats= noTF32 stronglyTyped memPoolSize= noBuilderCache
timingCacheFile= errorOnTimingCacheMiss noCompilationCache iterations= warmUp= duration= avgRuns= percentile= idleTime=
sleepTime= infStreams= streams= threads noDataTransfers useSpinWait useCudaGraph separateProfileRun exposeDMA
useManagedMemory loadInputs= persistentCacheRatio= allocationStrategy= saveDebugTensors= timeDeserialize timeRefit device=
verbose dumpProfile exportProfile= dumpLayerInfo exportLayerInfo= exportTimes= dumpOutput exportOutput= dumpRefit
dumpRawBindingsToFile dumpOptimizationProfile staticPlugins= dynamicPlugins= setPluginsToSerialize= plugins= help
""".replace("onnx ", "onnx= ").split()
ONLY_10 = "fp16 bf16 int8 fp8 int4 best calib= calibProfile= layerPrecisions= precisionConstraints= restricted".split()
ONLY_11 = "noCudaGraph noSpinWait includeDataTransfers setBuildRoute= tuneBuildRoutes= loadRefOutputs= dryRun".split()
TYPES = {1: "Float", 10: "Half", 16: "BFloat16", 2: "UInt8", 3: "Int8", 6: "Int32", 7: "Int64", 9: "Bool", 17: "FP8"}
NUMPY = {1: "float32", 10: "float16", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 11: "float64"}
ORT = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(int32)": "int32",
    "tensor(int8)": "int8", "tensor(uint8)": "uint8", "tensor(bool)": "bool", "tensor(double)": "float64",
}  # fmt: skip


def g(value: float) -> str:
    """As C++ streams print: six significant digits."""
    return f"{value:g}"


class Failed(Exception):
    """Ends the run with FAILED; what it says was said."""


class Tool:
    def __init__(self, behaviour: dict[str, Any], arguments: list[str]) -> None:
        self.on = behaviour
        self.version: tuple[int, ...] = tuple(behaviour["version"])
        self.arguments = arguments
        number = self.version[0] * 10000 + self.version[1] * 100 + self.version[2]
        self.tail = f"TensorRT.trtexec [TensorRT v{number}] [b{self.version[3]}] # trtexec {' '.join(arguments)}"
        self.new = self.version[0] >= 11
        self.given: dict[str, str] = {}
        self.profiles: list[dict[str, str]] = []

    # -------------------------------------------------------------------------------- saying

    def info(self, text: str) -> None:
        print(f"[{stamp()}] [I] {text}", flush=True)

    def warn(self, text: str) -> None:
        print(f"[{stamp()}] [W] {text}", file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        print(f"[{stamp()}] [E] {text}", file=sys.stderr, flush=True)

    def end(self, mark: str, code: int) -> NoReturn:
        print(f"&&&& {mark} {self.tail}", flush=True)
        raise SystemExit(code)

    # -------------------------------------------------------------------------------- options

    @property
    def known(self) -> dict[str, bool]:
        """Options by name, and whether they take a value."""
        names = [*COMMON, *(ONLY_11 if self.new else ONLY_10)]
        hidden = set(self.on.get("lacks", ()))
        return {name.rstrip("="): name.endswith("=") for name in names if name.rstrip("=") not in hidden}

    def help(self) -> None:
        print("=== Model Options ===\n  --onnx=<file>   ONNX model")
        for name, value in self.known.items():
            print(f"  --{name}{'=<value>' if value else ''}".ljust(34) + "documented elsewhere")

    def parse(self) -> None:
        unknown = []
        for argument in self.arguments:
            name, equals, value = argument.removeprefix("--").partition("=")
            takes = self.known.get(name) if argument.startswith("--") else None
            if takes is None or (takes and not equals):
                unknown.append(f"{argument.partition('=')[0]} {value}")
                continue
            if name == "profile":
                self.profiles.append({})
            if name in ("minShapes", "optShapes", "maxShapes") and self.profiles:
                self.profiles[-1][name] = value
            self.given[name] = value if takes else ""
        if unknown:
            self.help()
            for option in unknown:
                self.error(f"Unknown option: {option}")
            if self.new:
                raise SystemExit(1)
            self.end("FAILED", 1)
        if not self.profiles:
            self.profiles = [
                {name: self.given[name] for name in ("minShapes", "optShapes", "maxShapes") if name in self.given}
            ]
        if "saveEngine" in self.given and "loadEngine" in self.given:
            self.error("Incompatible load and save engine options selected")
            self.end("FAILED", 1)

    def pools(self) -> dict[str, float]:
        """MiB by pool: only the last letter is a unit (10.1 and later)."""
        found: dict[str, float] = {}
        for part in filter(None, self.given.get("memPoolSize", "").split(",")):
            pool, _, size = part.partition(":")
            if pool not in ("workspace", "dlaSRAM", "dlaLocalDRAM", "dlaGlobalDRAM", "tacticSharedMem"):
                self.error(f"Unknown memory pool: {pool}")
                self.end("FAILED", 1)
            unit = size[-1].upper()
            number = float("".join(letter for letter in size if letter.isdigit() or letter == ".") or 0)
            if unit.isdigit():
                found[pool] = number
            elif unit in "BKMG":
                found[pool] = number * {"B": 1 / (1 << 20), "K": 1 / 1024, "M": 1.0, "G": 1024.0}[unit]
            else:
                self.error(f"Error parsing \"{part}\": invalid unit specifier '{size[-1]}'. Valid base-2 unit suffixes "
                           "include: 'B', 'K', 'M', 'G'.")  # fmt: skip
                self.end("FAILED", 1)
        if self.on.get("workspace_as_bytes") and "workspace" in found:
            found["workspace"] /= 1 << 20
        return found

    def switches(self) -> tuple[bool, bool, bool]:
        """CUDA graph, spin-wait, data transfers as they are in force."""
        if self.new:
            for old, note in (
                ("useCudaGraph", "CUDA graph is"),
                ("useSpinWait", "Spin-wait is"),
                ("noDataTransfers", "No data transfers is"),
            ):
                if old in self.given:
                    self.warn(f"--{old} is deprecated. {note} now enabled by default.")
            found = (
                "noCudaGraph" not in self.given,
                "noSpinWait" not in self.given,
                "includeDataTransfers" in self.given,
            )
        else:
            found = ("useCudaGraph" in self.given, "useSpinWait" in self.given, "noDataTransfers" not in self.given)
        return (not found[0], *found[1:]) if self.on.get("wrong_switch") else found

    def banner(self) -> None:
        given, on = self.given, lambda value: "Enabled" if value else "Disabled"
        if "onnx" in given:
            self.info("=== Model Options ===")
            self.info("Format: ONNX")
            self.info(f"Model: {given['onnx']}")
        self.info("=== Build Options ===")
        pools = self.pools()
        shown = [
            f"{pool}: {g(pools[pool])} MiB" if pool in pools else f"{pool}: default"
            for pool in ("workspace", "dlaSRAM", "dlaLocalDRAM", "dlaGlobalDRAM")
        ]
        shared = f"{g(pools['tacticSharedMem'] * 1024)} KiB" if "tacticSharedMem" in pools else "default"
        self.info("Memory Pools: " + ", ".join([*shown, f"tacticSharedMem: {shared}"]))
        self.info(f"avgTiming: {given.get('avgTiming', '8')}")
        self.info("Precision: " + ("Strongly Typed" if self.new or "stronglyTyped" in given else "FP32"))
        self.info(f"Skip inference: {on('skipInference' in given)}")
        self.info(f"Save engine: {given.get('saveEngine', '')}")
        self.info(f"Load engine: {given.get('loadEngine', '')}")
        self.info(f"timingCacheMode: {'global' if 'timingCacheFile' in given else 'local'}")
        self.info(f"BuilderOptimizationLevel: {given.get('builderOptimizationLevel', '-1')}")
        self.info("=== Inference Options ===")
        self.info("Batch: Explicit")
        self.info(f"Iterations: {given.get('iterations', '10')}")
        self.info(
            f"Duration: {g(float(given.get('duration', '3')))}s (+ {g(float(given.get('warmUp', '200')))}ms warm up)"
        )
        self.info(f"Idle time: {g(float(given.get('idleTime', '0')))}ms")
        self.info(f"Inference Streams: {given.get('infStreams', '1')}")
        graph, spin, transfers = self.switches()
        self.info(f"Data transfers: {on(transfers)}")
        self.info(f"Spin-wait: {on(spin)}")
        self.info(f"CUDA Graph: {on(graph)}")
        self.info("=== Reporting Options ===")
        self.info(f"Percentiles: {given.get('percentile', '90,95,99')}")
        self.info("=== Device Information ===")
        if self.on.get("no_gpu"):
            print(
                "Cuda failure at sampleDevice.cpp:12: no CUDA-capable device is detected", file=sys.stderr, flush=True
            )
            raise SystemExit(1)
        self.info(f"Selected Device: {self.on.get('gpu', 'NVIDIA H200')}")
        self.info(f"Compute Capability: {self.on.get('compute_capability', '9.0')}")
        self.info("Device Global Memory: 143771 MiB")
        self.info("")
        self.info(f"TensorRT version: {'.'.join(map(str, self.version[:3]))}")

    # -------------------------------------------------------------------------------- build

    def chain(self, *texts: str) -> NoReturn:
        for text in texts:
            self.error(text)
        raise Failed

    def build(self) -> bytes:
        import onnx

        self.info("Start parsing network model.")
        path = Path(self.given["onnx"])
        try:
            model = onnx.load(path)
        except Exception:
            self.chain(
                "[TRT] ModelImporter.cpp:914: Failed to parse ONNX model from file", "Failed to parse onnx file",
                "Parsing model failed", "Failed to create engine from model or file.", "Engine set up failed",
            )  # fmt: skip
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx"):
                self.info(f"[TRT] Searching for plugin with node domain namespace: using pluginName: {node.op_type}, "
                          "pluginVersion: 1, pluginNamespace:")  # fmt: skip
                print(f"[{stamp()}] [E] [TRT] ModelImporter.cpp:149: ERROR: onnxOpCheckers.cpp:923 In function "
                      "checkFallbackPluginImporter:\n"
                      '[6] creator && "Plugin not found, are the plugin name, version, and namespace correct?"',
                      file=sys.stderr, flush=True)  # fmt: skip
                self.chain("Failed to parse onnx file", "Parsing model failed",
                           "Failed to create engine from model or file.", "Engine set up failed")  # fmt: skip
        self.info("Finished parsing network model. Parse time: 0.00104328")
        ranges = [self.profile(model, profile) for profile in self.profiles]
        if "timingCacheFile" in self.given and not Path(self.given["timingCacheFile"]).exists():
            self.warn(
                f"Could not read cache from: {self.given['timingCacheFile']}. A new cache will be generated and written."
            )
        if "tacticsFile" in self.on:
            Path(self.on["tacticsFile"]).write_text("tactics ran")
        self.trouble(model)
        if told := self.on.get("silent_until_told"):
            place = Path(told)
            before = place.stat().st_size
            for _ in range(60_000):  # some ten minutes, where nobody is left to tell it
                if place.stat().st_size != before:
                    break
                time.sleep(0.01)
        if "timingCacheFile" in self.given:
            place = Path(self.given["timingCacheFile"])
            place.write_bytes((place.read_bytes() if place.exists() else b"cache") + b"+")
        self.info("[TRT] Engine generation completed in 0.5 seconds.")
        header = b"ftrt" + struct.pack("<I", 0) + bytes(16) + bytes(self.version) + bytes(4)
        about = json.dumps({
            "profiles": ranges, "verbosity": self.given.get("profilingVerbosity", "layer_names_only"),
            "weak": not (self.new or "stronglyTyped" in self.given), "host_code": "versionCompatible" in self.given,
        }).encode()  # fmt: skip
        return header + struct.pack("<I", len(about)) + about + model.SerializeToString()

    def profile(self, model: Any, texts: dict[str, str]) -> dict[str, list[list[int]]]:
        moving = {}
        weights = {item.name for item in model.graph.initializer}
        for value in model.graph.input:
            dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
            if value.name not in weights and -1 in dims:
                moving[value.name] = dims
        given = {which: shapes_of(texts[which]) for which in texts}
        if given and not moving:
            self.chain("Static model does not take explicit shapes since the shape of inference tensors will be determined "
                       "by the model itself", "Network And Config setup failed", "Building engine failed",
                       "Failed to create engine from model or file.", "Engine set up failed")  # fmt: skip
        for named in given.values():
            for name in named:
                if name not in moving:
                    self.chain(f'Cannot find input tensor with name "{name}" in the network inputs! Please make sure the '
                               "input tensor names are correct.", "Network And Config setup failed")  # fmt: skip
        found: dict[str, list[list[int]]] = {}
        for name, dims in moving.items():
            three = [given.get(which, {}).get(name) for which in ("minShapes", "optShapes", "maxShapes")]
            one = next((shape for shape in three if shape is not None), None)
            if one is None:
                one = [1 if size < 0 else size for size in dims]
                self.warn(f"Dynamic dimensions required for input: {name}, but no shapes were provided. Automatically "
                          f"overriding shape to: {'x'.join(map(str, one))}")  # fmt: skip
            found[name] = [shape or one for shape in three]
        return found

    def largest(self) -> int:
        """The largest first dimension of the profiles."""
        every = [shape for texts in self.profiles for shape in shapes_of(texts.get("maxShapes", "")).values()]
        return max((shape[0] for shape in every if shape), default=0)

    def trouble(self, model: Any) -> None:
        """What goes wrong while tactics are tried."""
        wrong = self.on.get("fail")
        end = ("Engine could not be created from network", "Building engine failed",
               "Failed to create engine from model or file.", "Engine set up failed")  # fmt: skip
        level = int(self.given.get("builderOptimizationLevel", 3))
        if self.on.get("child_file"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(self.on["child_file"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if wrong == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong == "out_of_memory" and self.largest() >= self.on.get("from_batch", 0):
            self.warn("[TRT] Requested amount of GPU memory (68719476736 bytes) could not be allocated. There may not be "
                      "enough free memory for allocation to succeed.")  # fmt: skip
            self.chain("Error[2]: [virtualMemoryBuffer.cpp::resizePhysical::154] Error Code 2: OutOfMemory (Requested size "
                       "was 68719476736 bytes.)", *end)  # fmt: skip
        if wrong == "foreign_node" and level > self.on.get("works_at_level", -1):
            self.error("Error[9]: Error Code: 9: Skipping tactic 0x0000000000000000 due to exception no kernel")
            self.chain(
                "Error[10]: IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any "
                "implementation for node {ForeignNode[/decoder/mask.1/Reshape.../decoder/mask.1/Einsum]}.)", *end,
            )  # fmt: skip
        needed = self.on.get("needs_workspace_mib")
        if needed and self.pools().get("workspace", 1e9) < needed:
            had = int(self.pools()["workspace"])
            self.warn(f"[TRT] Tactic Device request: {needed}MB Available: {had}MB. Device memory is insufficient to use "
                      "tactic.")  # fmt: skip
            self.chain("Error[10]: IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any "
                       "implementation for node {ForeignNode[/attention.0/GridSample]} due to insufficient workspace. See "
                       "verbose log for requested sizes.)", *end)  # fmt: skip
        if wrong == "cuda_error":
            print("Cuda failure at common.h:120: an illegal memory access was encountered", file=sys.stderr, flush=True)
            raise SystemExit(1)
        if wrong == "empty_engine":  # from 10.13 the result of the streaming build is not looked at
            self.error("Error[10]: IBuilder::buildSerializedNetworkToStream: Error Code 10: Internal Error (Could not find "
                       "any implementation for node conv.)")  # fmt: skip
            Path(self.given["saveEngine"]).touch()
            self.info("Created engine with size: 0 MiB")
            self.info("Engine built in 1.5 sec.")
            print(f'[{stamp()}] [E] Assertion failure: false && "Attempting to access an empty engine!"', file=sys.stderr,
                  flush=True)  # fmt: skip
            raise SystemExit(1)
        if wrong == "passed_without_engine":
            self.info("Engine built in 1.5 sec.")
            self.end("PASSED", 0)

    # -------------------------------------------------------------------------------- run

    def load(self) -> tuple[dict[str, Any], bytes]:
        raw = Path(self.given["loadEngine"]).read_bytes() if Path(self.given["loadEngine"]).is_file() else None
        end = ("Engine deserialization failed", "Got invalid engine!", "Inference set up failed")
        if raw is None:
            self.chain(
                f"Error opening engine file: {self.given['loadEngine']}", "Failed to create engine from model or file."
            )
        if raw[:4] != b"ftrt":
            self.chain("Error[1]: IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion "
                       "magicTagRead == kMAGIC_TAG failed.Magic tag does not match)", *end)  # fmt: skip
        if tuple(raw[24:28]) != self.version:
            self.chain("Error[6]: The engine plan file is not compatible with this version of TensorRT, expecting library "
                       f"version {'.'.join(map(str, self.version))} got {'.'.join(map(str, raw[24:28]))}, please rebuild.",
                       "Error[1]: incompatible serialization version", *end)  # fmt: skip
        (length,) = struct.unpack("<I", raw[32:36])
        about = json.loads(raw[36 : 36 + length])
        if about["host_code"] and "versionCompatible" not in self.given:  # `mVersionCompatible` of `sampleEngines.cpp`
            self.chain("Error[4]: IRuntime::deserializeCudaEngine: Error Code 4: API Usage Error (the plan holds host code, "
                       "and setEngineHostCodeAllowed was not called)", *end)  # fmt: skip
        self.info(f"Loaded engine with size: {g(len(raw) / (1 << 20))} MiB")
        self.info("Engine deserialized in 0.0258638 sec.")
        return about, raw[36 + length :]

    def infer(self, about: dict[str, Any], network: bytes) -> None:
        import numpy as np
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
        asked = shapes_of(self.given.get("shapes", ""))
        profile = about["profiles"][int(self.given.get("useProfile", 0))]
        files = dict(pair.rsplit(":", 1) for pair in filter(None, self.given.get("loadInputs", "").split(",")))
        files = {name.strip("'"): file for name, file in files.items()}
        feeds = {}
        for value in session.get_inputs():
            kind = np.dtype(ORT[value.type])
            shape = [size if isinstance(size, int) else -1 for size in value.shape]
            if -1 in shape:
                if value.name not in asked:
                    self.warn(f"Shape missing for input with dynamic shape: {value.name}Automatically setting shape to: "
                              f"{'x'.join(str(max(size, 1)) for size in shape)}")  # fmt: skip
                shape = asked.get(value.name, [max(size, 1) for size in shape])
                low, _, high = profile[value.name]
                if not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
                    self.chain(
                        "Error[3]: IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter check failed, "
                        "condition: engineDims.d[i] in profile. Static dimension mismatch while setting input shape for "
                        f"{value.name}.)", "Inference set up failed",
                    )  # fmt: skip
            if value.name in files:
                raw = Path(files[value.name]).read_bytes()
                if len(raw) != math.prod(shape) * kind.itemsize:
                    self.chain(f"Failed to load input {value.name}", "Error occurred during inference")
                feeds[value.name] = np.frombuffer(raw, kind).reshape(shape)
            else:
                feeds[value.name] = np.random.default_rng(0).integers(0, 2, shape).astype(kind)
        if "exportLayerInfo" in self.given:
            self.layers(about, network, with_shapes=True)
        graph, _, transfers = self.switches()
        if graph and self.on.get("graph_refused"):
            self.warn(
                "The built TensorRT engine contains operations that are not permitted under CUDA graph capture mode."
            )
            self.warn(
                "CUDA graph capture failed. The inference will be launched without using CUDA graph."
                if self.new
                else "The specified --useCudaGraph flag has been ignored. The inference will be launched without using "
                "CUDA graph launch."
            )
        elif graph:
            self.info("Successfully captured CUDA graph for the current execution context")
        self.info("Starting inference")
        profiled = "dumpProfile" in self.given or "exportProfile" in self.given
        if profiled and not self.new and "separateProfileRun" not in self.given:
            self.info("The e2e network timing is not reported since it is inaccurate due to the extra synchronizations when "
                      "the profiler is enabled.")  # fmt: skip
        else:
            self.measure(session, feeds, transfers=transfers)
        if profiled:
            self.profiled(network)
        if "dumpRawBindingsToFile" in self.given:
            self.dump(session, feeds)

    def measure(self, session: Any, feeds: dict[str, Any], *, transfers: bool) -> None:
        warm, full = float(self.given.get("warmUp", 200)), float(self.given.get("duration", 3)) * 1000
        least = int(self.given.get("iterations", 10))
        origin = time.perf_counter()
        times: list[tuple[float, float]] = []  # start and length in ms
        kept = 0
        while not (times and kept >= least and times[-1][0] + times[-1][1] >= warm + full):
            began = time.perf_counter()
            session.run(None, feeds)
            start = (began - origin) * 1000
            times.append((start, (time.perf_counter() - began) * 1000))
            kept += start >= warm
        first = next(at for at, (start, _) in enumerate(times) if start >= warm)
        traces = times[first:]
        copy = 0.05 if transfers else 0.0
        compute = [length for _, length in traces]
        wall = (traces[-1][0] + traces[-1][1] - traces[0][0]) / 1000
        if self.on.get("no_throughput"):
            return
        self.info(f"Warmup completed {first} queries over {g(warm)} ms")
        self.info(f"Timing trace has {len(traces)} queries over {g(wall)} s")
        self.info("")
        self.info("=== Performance summary ===")
        self.info(f"Throughput: {g(len(traces) / wall)} qps")
        self.say("Latency", [value + 2 * copy for value in compute])
        self.say("Enqueue Time", [0.002] * len(compute))
        self.say("H2D Latency", [copy] * len(compute))
        self.say("GPU Compute Time", compute)
        self.say("D2H Latency", [copy] * len(compute))
        self.info(f"Total Host Walltime: {g(wall)} s")
        self.info(f"Total GPU Compute Time: {g(sum(compute) / 1000)} s")
        if "exportTimes" in self.given:
            rows = []
            for start, length in traces:
                h2d, done = start + copy, start + copy + length
                rows.append(
                    f'  {{ "startEnqMs" : {g(start)}, "endEnqMs" : {g(start + 0.002)}, "startH2dMs" : {g(start)}, '
                    f'"endH2dMs" : {g(h2d)}, "startComputeMs" : {g(h2d)}, "endComputeMs" : {g(done)}, '
                    f'"startD2hMs" : {g(done)}, "endD2hMs" : {g(done + copy)}, "h2dMs" : {g(copy)}, '
                    f'"computeMs" : {g(length)}, "d2hMs" : {g(copy)}, "latencyMs" : {g(length + 2 * copy)} }}'
                )
            Path(self.given["exportTimes"]).write_text("[\n" + ",\n".join(rows) + "\n]\n")

    def profiled(self, network: bytes) -> None:
        """`--dumpProfile` and `--exportProfile`: a row for each node. Names are not escaped in the file."""
        import onnx

        names = [node.name or node.output[0] for node in onnx.load_from_string(network).graph.node]
        share = 100 / len(names)
        if "dumpProfile" in self.given:
            self.info("=== Profile (20 iterations ) ===")
            self.info("   Time(ms)     Avg.(ms)   Median(ms)   Time(%)   Layer")
            for name in names:
                self.info(f"{2.0:11.2f} {0.1:12.4f} {0.1:12.4f} {share:9.1f}   {name}")
            self.info(f"{2.0 * len(names):11.2f} {0.1 * len(names):12.4f} {0.1 * len(names):12.4f} {100:9.1f}   Total")
        if "exportProfile" in self.given:
            rows = [
                f'  {{ "name" : "{name}", "timeMs" : 2, "averageMs" : 0.1, "medianMs" : 0.1, "percentage" : {g(share)} }}'
                for name in names
            ]
            text = ",\n".join(['  { "count" : 20 }', *rows])
            Path(self.given["exportProfile"]).write_text(f"[\n{text}\n]\n")

    def say(self, name: str, values: list[float]) -> None:
        ordered, count = sorted(values), len(values)
        middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
        text = (f"{name}: min = {g(ordered[0])} ms, max = {g(ordered[-1])} ms, mean = {g(sum(values) / count)} ms, "
                f"median = {g(middle)} ms")  # fmt: skip
        for percent in filter(None, self.given.get("percentile", "90,95,99").split(",")):
            at = max(count - 1 - int((1 - float(percent) / 100) * count), 0)
            text += f", percentile({g(float(percent))}%) = {g(ordered[at])} ms"
        self.info(text)

    def dump(self, session: Any, feeds: dict[str, Any]) -> None:
        import numpy as np

        outputs = zip(session.get_outputs(), session.run(None, feeds), strict=True)
        every = [("input", name, value) for name, value in feeds.items()]
        every += [("output", spec.name, value) for spec, value in outputs]
        for side, name, value in every:
            dims = ".".join(map(str, value.shape))
            plain = f"{name}.{side}.{dims}.{value.dtype}.raw"
            file = "".join(letter if letter.isalnum() or letter in "._-," else "_" for letter in plain)
            self.info(
                f"Writing file for {side} binding {name} (with datatype {value.dtype} and dimensions {dims}) to {file}"
            )
            Path(file).write_bytes(np.ascontiguousarray(value).tobytes())

    def layers(self, about: dict[str, Any], network: bytes, *, with_shapes: bool) -> None:
        """`--exportLayerInfo`: one layer a node; without a context a dynamic engine does not tell its types."""
        import onnx

        model = onnx.shape_inference.infer_shapes(onnx.load_from_string(network))
        kinds = {
            item.name: item.type.tensor_type.elem_type
            for item in (*model.graph.input, *model.graph.value_info, *model.graph.output)
        }
        weights = {item.name: item for item in model.graph.initializer}
        told = with_shapes or not any(about["profiles"])

        def tensor(name: str) -> dict[str, Any]:
            word = TYPES.get(kinds.get(name, 1), "Float")
            word = "Float" if self.on.get("builds_fp32") and word in ("Half", "BFloat16") else word
            if not told:
                word = "N/A due to dynamic shapes"
            own = {"Format": "Row major linear", "DataType": word} if self.new else {"Format/Datatype": word}
            return {"Name": name, "Location": "Device", "Dimensions": [-1]} | own

        layers: list[Any] = []
        for node in model.graph.node:
            held = [weights[name] for name in node.input if name in weights]
            layer: dict[str, Any] = {
                "Name": node.name or node.output[0],
                "LayerType": {"Conv": "CaskConvolution", "Gemm": "gemm", "MatMul": "gemm"}.get(
                    node.op_type, "PointWiseV2"
                ),
                "Inputs": [tensor(name) for name in node.input if name and name not in weights],
                "Outputs": [tensor(name) for name in node.output if name],
                "ParameterType": node.op_type,
                "TacticName": "",
                "StreamId": 0,
                "Metadata": f"[ONNX Layer: {node.name or f'node_of_{node.output[0]}'}]",
            }
            if held and node.op_type in ("Conv", "Gemm", "MatMul"):
                word = TYPES.get(held[0].data_type, "Float")
                word = "Float" if self.on.get("builds_fp32") else word
                layer["Weights"] = {"Type": word, "Count": math.prod(held[0].dims)}
            layers.append(layer)
        if about["verbosity"] != "detailed":
            layers = [layer["Name"] for layer in layers]
        names = [item.name for item in (*model.graph.input, *model.graph.output) if item.name not in weights]
        ends = {"I/O Tensors": [{"Name": name} for name in names]} if self.new else {"Bindings": names}
        Path(self.given["exportLayerInfo"]).write_text(json.dumps({"Layers": layers} | ends))

    # -------------------------------------------------------------------------------- all of it

    def run(self) -> NoReturn:
        print(f"&&&& RUNNING {self.tail}", flush=True)
        if "--help" in self.arguments:
            self.help()
            self.end("PASSED", 0)
        self.parse()
        self.banner()
        try:
            if "loadEngine" in self.given:
                about, network = self.load()
            else:
                raw = self.build()
                Path(self.given["saveEngine"]).write_bytes(raw)
                self.info(f"Created engine with size: {g(len(raw) / (1 << 20))} MiB")
                self.info("Engine built in 0.5 sec.")
                (length,) = struct.unpack("<I", raw[32:36])
                about, network = json.loads(raw[36 : 36 + length]), raw[36 + length :]
            if "skipInference" in self.given:
                if "exportLayerInfo" in self.given:
                    self.layers(about, network, with_shapes=False)
                self.info("Skipped inference phase since --skipInference is added.")
            else:
                self.infer(about, network)
        except Failed:
            self.end("FAILED", 1)
        self.end("PASSED", 0)


def stamp() -> str:
    return time.strftime("%m/%d/%Y-%H:%M:%S")


def shapes_of(text: str) -> dict[str, list[int]]:
    """`a:1x3,'b:0':2x2`; names with colons are quoted."""
    found: dict[str, list[int]] = {}
    for part in filter(None, text.split(",")):
        name, _, sizes = part.rpartition(":")
        found[name.strip("'")] = [] if sizes in ("", "scalar") else [int(size) for size in sizes.split("x")]
    return found
