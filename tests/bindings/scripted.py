"""A TensorRT that exists in Python alone, behind the real bindings: it parses, builds, inspects, loads and computes.

It keeps TensorRT's manners, not its work: what is refused with None and a message, what is refused silently, what is
called back and when. A plan is a header, a description and the ONNX it was built from; an engine computes with onnx's
reference evaluator, on the buffers and streams of the fake device. It runs in a process of its own (worker.py).
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper, shape_inference
from onnx.reference import ReferenceEvaluator

from bindings.puppet import Call, Dims, Puppet, Slots, virtual
from trt_engine.device.fake import FakeBuffer, FakeDevice, FakeStream

Shape = tuple[int, ...]

SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
TYPES = {
    TensorProto.FLOAT: 0, TensorProto.FLOAT16: 1, TensorProto.INT8: 2, TensorProto.INT32: 3, TensorProto.BOOL: 4,
    TensorProto.UINT8: 5, TensorProto.FLOAT8E4M3FN: 6, TensorProto.BFLOAT16: 7, TensorProto.INT64: 8,
    TensorProto.INT4: 9, TensorProto.FLOAT4E2M1: 10,
}  # fmt: skip
"""TensorRT's number of each type of ONNX; those did not move between majors."""
WORDS_10 = {0: "Float", 1: "Half", 2: "Int8", 3: "Int32", 4: "Bool", 5: "UInt8", 6: "FP8", 7: "BFloat16", 8: "Int64",
            9: "Int4", 10: "FP4"}  # fmt: skip
"""As an inspector of either major spells them."""
MATRIX = ("Conv", "ConvTranspose", "MatMul", "Gemm")
INPUT, OUTPUT = 1, 2
VERSIONED = 4
"""First slot of a versioned interface's own methods; the loggers of TensorRT 10 are not versioned and begin at 0."""


@dataclass(slots=True)
class Gpu:
    """The GPU the scripted TensorRT believes in."""

    name: str = "NVIDIA H200"
    compute_capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 8 << 30
    """What a workspace may be: the default of its pool."""


@dataclass(slots=True)
class Faults:
    """What goes wrong, by members of the bindings: `Builder.create_network`."""

    nothing_from: set[str] = field(default_factory=set)
    """Answer null, as a library does that cannot."""
    refused: set[str] = field(default_factory=set)
    """Answer False."""
    stubborn: set[str] = field(default_factory=set)
    """Setters that do nothing and say nothing: `IBuilderConfig.max_aux_streams=`."""
    says: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """What the logger is told when the member is called, as (severity, text)."""
    unsupported: set[str] = field(default_factory=set)
    """Operators the parser does not know."""
    computes_in: dict[str, str] = field(default_factory=dict)
    """Type of a layer in the engine by its node's name, `*` for all: an engine that is not what the graph says."""
    wrong_by: float = 0.0
    """Added to every floating output."""
    before_step: Callable[[int], None] | None = None
    """Called before each step a build reports, with its number."""


# ------------------------------------------------------------------------------------------------ plans


def plan_bytes(version: Sequence[int], facts: Mapping[str, Any], model: bytes) -> bytes:
    """A plan: the header the library's own begin with, what was built, the graph."""
    described = json.dumps(facts).encode()
    behind = struct.pack("<Q", len(described)) + described + model
    if "gpu_bits" in facts:
        from bindings import scripted_rtx

        return scripted_rtx.header(version, facts, 64 + len(behind)) + behind
    numbers = bytes([*version, 0, 0, 0][:4])
    return b"ftrt" + struct.pack("<iiiii", 239, 0, 0, 0, 0) + numbers + bytes(4) + behind


def plan_facts(plan: bytes) -> dict[str, Any]:
    """What `plan_bytes` was given as `facts`; `ValueError` for what is cut."""
    at = 64 if plan.startswith(b"vtrt") else 32
    if len(plan) < at + 8:
        raise ValueError("cut in its header")
    (size,) = struct.unpack_from("<Q", plan, at)
    at += 8
    if len(plan) < at + size:
        raise ValueError("cut in its description")
    facts: dict[str, Any] = json.loads(plan[at : at + size])
    facts["model"] = plan[at + size :]
    if len(facts["model"]) != facts["model_bytes"]:
        raise ValueError("cut in its weights")
    return facts


# ------------------------------------------------------------------------------------------------ objects


def member(*names: str) -> Callable[[Any], Any]:
    """The method answers these members of its class, not the one of its name: the setter `flags=`, the slot `parse#1`."""

    def mark(function: Any) -> Any:
        function.members = names
        return function

    return mark


Answers = dict[str, Callable[[Any, Call], Any]]
"""Member -> its answer, by the object and the call."""


class Wide(int):
    """The default of a property of 64 bits."""


class Native:
    """One object of the library. Its class name is that of the bindings' class."""

    plain: ClassVar[dict[str, Any]] = {}
    """Properties that keep what they are given; the default tells the type, None an address."""

    def __init__(self, world: ScriptedTensorRT, logger: int = 0) -> None:
        self.world = world
        self.logger = logger
        self.values = dict(self.plain)
        self.alive = True
        self.address, self.id = world.puppet.new(self.kind)
        world.objects[self.id] = self

    @property
    def kind(self) -> str:
        return type(self).__name__

    def say(self, severity: str, text: str) -> None:
        self.world.say(self.logger, severity, text)

    def read(self, name: str) -> Any:
        return self.values[name]

    def write(self, name: str, call: Call) -> int:
        """A setter: True, for those whose answer the bindings throw away."""
        default = self.plain[name]
        if isinstance(default, bool):
            self.values[name] = call.flag(0)
        elif isinstance(default, Wide):
            self.values[name] = call.int64(0)
        elif isinstance(default, int):
            self.values[name] = call.int32(0)
        elif isinstance(default, str):
            self.values[name] = call.text(0)
        else:
            self.values[name] = call.address(0)
        return 1

    def destroyed(self) -> None:
        """The bindings gave the object back."""


class Builder(Native):
    plain: ClassVar = {"max_threads": 1, "gpu_allocator": None, "num_DLA_cores": 0, "error_recorder": None}
    answers: ClassVar[Answers] = {
        "create_network": lambda self, call: INetworkDefinition(self.world, self.logger, call.int32(0)).address,
        "create_builder_config": lambda self, call: IBuilderConfig(self.world, self.logger).address,
        "create_optimization_profile": lambda self, call: IOptimizationProfile(self.world, self.logger).address,
        "get_plugin_registry": lambda self, call: self.world.registry.address,
    }

    def build_serialized_network(self, call: Call) -> int:
        plan = self._build(call)
        return 0 if plan is None else IHostMemory(self.world, plan).address

    def build_serialized_network_to_stream(self, call: Call) -> int:
        plan = self._build(call)
        if plan is None:
            return 0
        for at in range(0, len(plan), 1 << 16):
            piece = plan[at : at + (1 << 16)]
            address = self.world.puppet.keep(piece)
            taken = virtual(
                call.address(2), VERSIONED, ctypes.c_int64, (ctypes.c_uint64, address), (ctypes.c_int64, len(piece))
            )
            if taken != len(piece):
                self.say("ERROR", f"IStreamWriter wrote {taken} of {len(piece)} bytes")
                return 0
        return 1

    def _build(self, call: Call) -> bytes | None:
        network, config = self.world.known(call.address(0)), self.world.known(call.address(1))
        return _Build(self, network, config).plan()


class INetworkDefinition(Native):
    plain: ClassVar = {"name": "Unnamed Network 0", "error_recorder": None}
    answers: ClassVar[Answers] = {
        "num_inputs": lambda self, call: len(self.inputs),
        "num_outputs": lambda self, call: len(self.outputs),
        "num_layers": lambda self, call: len(self.model.graph.node) if self.model else 0,
        "get_flag": lambda self, call: self.flag_bits >> call.int32(0) & 1,
        "flags": lambda self, call: self.flag_bits,
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, flags: int) -> None:
        super().__init__(world, logger)
        self.flag_bits = flags
        self.model: onnx.ModelProto | None = None
        self.inputs: list[ITensor] = []
        self.outputs: list[ITensor] = []
        self.refittable: set[str] = set()
        if world.major < 11 and not self.strongly_typed:
            self.say("WARNING", "Using default network: weak typing is deprecated")

    @property
    def strongly_typed(self) -> bool:
        return self.world.major >= 11 or self._has("STRONGLY_TYPED")

    def _has(self, name: str) -> bool:
        return bool(self.flag_bits >> int(getattr(self.world.trt.NetworkDefinitionCreationFlag, name)) & 1)

    def take(self, model: onnx.ModelProto) -> None:
        self.model = shape_inference.infer_shapes(model)
        weights = {item.name for item in model.graph.initializer}
        for value in model.graph.input:
            if value.name not in weights:
                self.inputs.append(ITensor(self.world, value, is_input=True))
        self.outputs = [ITensor(self.world, value, is_input=False) for value in self.model.graph.output]

    def get_input(self, call: Call) -> int:
        at = call.int32(0)
        return self.inputs[at].address if 0 <= at < len(self.inputs) else 0

    def get_output(self, call: Call) -> int:
        at = call.int32(0)
        return self.outputs[at].address if 0 <= at < len(self.outputs) else 0

    def mark_weights_refittable(self, call: Call) -> int:
        assert self.model is not None
        name = call.text(0)
        if name not in {item.name for item in self.model.graph.initializer}:
            return 0
        self.refittable.add(name)
        return 1


class ITensor(Native):
    answers: ClassVar[Answers] = {
        "name": lambda self, call: self.proto.name,
        "dtype": lambda self, call: TYPES[self.proto.type.tensor_type.elem_type],
        "shape": lambda self, call: declared(self.proto),
        "is_shape_tensor": lambda self, call: self.proto.name in self.world.shape_tensors,
        "is_network_input": lambda self, call: self.is_input,
        "is_network_output": lambda self, call: not self.is_input,
    }

    def __init__(self, world: ScriptedTensorRT, value: onnx.ValueInfoProto, *, is_input: bool) -> None:
        super().__init__(world)
        self.proto = value
        self.is_input = is_input


class IOptimizationProfile(Native):
    plain: ClassVar = {"extra_memory_target": 0, "profile_stream": None}

    def __init__(self, world: ScriptedTensorRT, logger: int) -> None:
        super().__init__(world, logger)
        self.shapes: dict[str, list[Shape]] = {}
        self.shape_values: dict[str, list[list[int]]] = {}

    def set_shape(self, call: Call) -> int:
        """Called three times for each `set_shape` of Python: smallest, usual, largest."""
        spans = self.shapes.setdefault(call.text(0), [(), (), ()])
        spans[call.int32(1)] = call.dims(2)
        low, best, high = spans
        return all(
            not a or not b or all(x <= y for x, y in zip(a, b, strict=True)) for a, b in ((low, best), (best, high))
        )

    def get_shape(self, call: Call) -> Shape | None:
        spans = self.shapes.get(call.text(0))
        return spans[call.int32(1)] if spans else None

    def set_shape_input(self, call: Call) -> int:
        """Values of a shape tensor, 32 or 64 bits wide by release."""
        kind = ctypes.c_int64 if self.world.wide_values else ctypes.c_int32
        values = [kind.from_address(call.address(2) + ctypes.sizeof(kind) * at).value for at in range(call.int32(3))]
        self.shape_values.setdefault(call.text(0), [[], [], []])[call.int32(1)] = values
        return 1

    @member("get_shape_input#0")
    def shape_input_count(self, call: Call) -> int:
        values = self.shape_values.get(call.text(0))
        return len(values[0]) if values else -1

    @member("get_shape_input#1")
    def shape_input_values(self, call: Call) -> int:
        values = self.shape_values[call.text(0)][call.int32(1)]
        return self.world.puppet.keep(struct.pack(f"<{len(values)}{'q' if self.world.wide_values else 'i'}", *values))


class IBuilderConfig(Native):
    plain: ClassVar = {
        "builder_optimization_level": 3, "max_aux_streams": -1, "avg_timing_iterations": 1, "profiling_verbosity": 0,
        "hardware_compatibility_level": 0, "default_device_type": 0, "DLA_core": -1, "runtime_platform": 0,
        "max_num_tactics": -1, "tiling_optimization_level": 0, "l2_limit_for_tiling": Wide(-1), "build_route": "",
        "progress_monitor": None, "engine_capability": 0, "profile_stream": None, "remote_auto_tuning_config": "",
    }  # fmt: skip
    answers: ClassVar[Answers] = {
        "get_flag": lambda self, call: self.flag_bits >> call.int32(0) & 1,
        "flags": lambda self, call: self.flag_bits,
        "num_compute_capabilities": lambda self, call: len(self.targets),
        "get_compute_capability": lambda self, call: self.targets[call.int32(0)],
        "get_memory_pool_limit": lambda self, call: self.pools.get(call.int32(0), self._default(call.int32(0))),
        "num_optimization_profiles": lambda self, call: len(self.profiles),
        "get_timing_cache": lambda self, call: self.cache.address if self.cache else 0,
        "get_tactic_sources": lambda self, call: self.sources,
        "get_preview_feature": lambda self, call: self.previews.get(call.int32(0), False),
        "plugins_to_serialize#0": lambda self, call: len(self.serialized_plugins),
        "plugins_to_serialize#1": lambda self, call: self.serialized_plugins[call.int32(0)],
    }

    def __init__(self, world: ScriptedTensorRT, logger: int) -> None:
        super().__init__(world, logger)
        self.flag_bits = 1 << int(world.trt.BuilderFlag.TF32)
        self.pools: dict[int, int] = {}
        self.profiles: list[IOptimizationProfile] = []
        self.cache: ITimingCache | None = None
        self.sources = sum(1 << int(item) for item in world.trt.TacticSource.__members__.values())
        self.previews: dict[int, bool] = {}
        self.serialized_plugins: list[str] = []
        self.targets: list[int] = []
        """Of TensorRT-RTX: the GPUs a plan is for, by the numbers of `ComputeCapability`."""

    def has(self, name: str) -> bool:
        flag = getattr(self.world.trt.BuilderFlag, name, None)
        return flag is not None and bool(self.flag_bits >> int(flag) & 1)

    @property
    def flag_names(self) -> list[str]:
        return sorted(name for name in self.world.trt.BuilderFlag.__members__ if self.has(name))

    def pool(self, name: str) -> int:
        at = int(getattr(self.world.trt.MemoryPoolType, name))
        return self.pools.get(at, self._default(at))

    def _default(self, pool: int) -> int:
        kinds = self.world.trt.MemoryPoolType
        if pool == int(kinds.DLA_MANAGED_SRAM):
            return 0
        if pool in (int(kinds.DLA_LOCAL_DRAM), int(kinds.DLA_GLOBAL_DRAM)):
            return 1 << 29
        return self.world.gpu.memory_bytes

    def set_flag(self, call: Call) -> int:
        self.flag_bits |= 1 << call.int32(0)
        return 0

    def clear_flag(self, call: Call) -> int:
        self.flag_bits &= ~(1 << call.int32(0))
        return 0

    @member("flags=")
    def set_flags(self, call: Call) -> int:
        self.flag_bits = call.int32(0)
        return 0

    @member("num_compute_capabilities=")
    def set_num_compute_capabilities(self, call: Call) -> int:
        self.targets = [0] * call.int32(0)
        return 1

    def set_compute_capability(self, call: Call) -> int:
        if not 0 <= call.int32(1) < len(self.targets):
            return 0
        self.targets[call.int32(1)] = call.int32(0)
        return 1

    def set_memory_pool_limit(self, call: Call) -> int:
        self.pools[call.int32(0)] = call.address(1)
        return 0

    def add_optimization_profile(self, call: Call) -> int:
        self.profiles.append(self.world.known(call.address(0)))
        return len(self.profiles) - 1

    def create_timing_cache(self, call: Call) -> int:
        raw = ctypes.string_at(call.address(0), call.address(1)) if call.address(1) else b""
        entries = self.world.read_cache(raw)
        if entries is None:
            self.say("ERROR", "Timing cache cannot be deserialized: version or format do not match")
            return 0
        return ITimingCache(self.world, self.logger, entries, self.world.cache_device(raw)).address

    def set_timing_cache(self, call: Call) -> int:
        cache = self.world.known(call.address(0))
        if cache.device != self.world.gpu.name and not call.flag(1):
            self.say("WARNING", "Timing cache was made on another device")
            return 0
        self.cache = cache
        return 1

    def set_tactic_sources(self, call: Call) -> int:
        self.sources = call.address(0) & 0xFFFFFFFF
        return 1

    def set_preview_feature(self, call: Call) -> int:
        self.previews[call.int32(0)] = call.flag(1)
        return 0

    def all_build_routes(self, call: Call) -> str:
        option = {"option": "fusion", "allowed_values": ["on", "off"], "default_value": "on", "help": "fuse"}
        return json.dumps({"tuner_version": "1", "tuner_options": [option]})

    @member("build_route=")
    def set_build_route(self, call: Call) -> int:
        """What is no knob is refused, and the bindings do not tell."""
        text = call.text(0)
        if not all(word.startswith("-fusion=") for word in text.split()):
            return 0
        self.values["build_route"] = text
        return 1

    @member("plugins_to_serialize=")
    def set_plugins_to_serialize(self, call: Call) -> int:
        pointers = [ctypes.c_char_p.from_address(call.address(0) + 8 * at).value for at in range(call.int32(1))]
        self.serialized_plugins = [(pointer or b"").decode() for pointer in pointers]
        return 0


class ITimingCache(Native):
    def __init__(self, world: ScriptedTensorRT, logger: int, entries: dict[str, float], device: str) -> None:
        super().__init__(world, logger)
        self.entries = entries
        self.device = device

    def serialize(self, call: Call) -> int:
        raw = json.dumps({"version": self.world.version_text, "device": self.device, "entries": self.entries}).encode()
        return IHostMemory(self.world, raw).address

    def combine(self, call: Call) -> int:
        other = self.world.known(call.address(0))
        if other.device != self.device and not call.flag(1):
            return 0
        self.entries = other.entries | self.entries
        return 1

    def reset(self, call: Call) -> int:
        self.entries = {}
        return 1


class IHostMemory(Native):
    answers: ClassVar[Answers] = {
        "nbytes": lambda self, call: len(self.raw),
        "dtype": lambda self, call: TYPES[TensorProto.UINT8],
        "data": lambda self, call: self.held,
    }

    def __init__(self, world: ScriptedTensorRT, raw: bytes) -> None:
        super().__init__(world)
        self.raw = raw
        self.held = world.puppet.keep(raw)


class OnnxParser(Native):
    plain: ClassVar = {"flags": 0}
    answers: ClassVar[Answers] = {
        "num_errors": lambda self, call: len(self.errors),
        "get_error": lambda self, call: self.errors[call.int32(0)].address,
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, network: INetworkDefinition) -> None:
        super().__init__(world, logger)
        self.network = network
        self.errors: list[IParserError] = []
        self.config = 0

    def parse(self, call: Call) -> int:
        raw = ctypes.string_at(call.address(0), call.address(1))
        return self._parse(raw, self.world.model_path(call, 2))

    def parse_from_file(self, call: Call) -> int:
        path = Path(call.text(0))
        return self._parse(path.read_bytes(), path) if path.is_file() else self._fail(0, None, f"no file {path}")

    def _parse(self, raw: bytes, path: Path | None) -> int:
        world = self.world
        try:
            model = onnx.load_from_string(raw)
            if not model.graph.node:
                return self._fail(0, None, "Failed to parse ONNX model from buffer")
        except Exception:
            return self._fail(0, None, "Failed to parse ONNX model from buffer")
        if outside := [item for item in model.graph.initializer if item.data_location == TensorProto.EXTERNAL]:
            try:
                if path is None:
                    raise OSError("no path was given")
                onnx.load_external_data_for_model(model, str(path.parent))
            except Exception as error:
                return self._fail(0, None, f"Failed to open external weights of {outside[0].name}: {error}")
        for at, node in enumerate(model.graph.node):
            if node.domain not in ("", "ai.onnx") and node.op_type not in world.registry.names:
                text = (
                    "Plugin not found, are the plugin name, version, and namespace correct?"
                    f" (In node {at} with name: {node.name} and operator: {node.op_type} (importFallbackPluginImporter))"
                )
                return self._fail(at, node, text)
            if node.op_type in world.faults.unsupported:
                return self._fail(at, node, f"No importer registered for op: {node.op_type}")
        self.network.take(model)
        return 1

    def _fail(self, at: int, node: onnx.NodeProto | None, text: str) -> int:
        self.say(
            "ERROR", f"ModelImporter.cpp:948: While parsing node number {at} [{node.op_type if node else ''} -> ]:"
        )
        self.say("ERROR", text)
        self.errors.append(IParserError(self.world, at, node, text))
        return 0

    def clear_errors(self, call: Call) -> int:
        self.errors = []
        return 0

    def set_builder_config(self, call: Call) -> int:
        self.config = call.address(0)
        return 1

    def get_used_vc_plugin_libraries(self, call: Call) -> int:
        ctypes.c_int64.from_address(call.address(0)).value = 0
        return 0


class IParserError(Native):
    answers: ClassVar[Answers] = {
        "desc": lambda self, call: self.text,
        "file": lambda self, call: "ModelImporter.cpp",
        "line": lambda self, call: 948,
        "func": lambda self, call: "parseNode",
        "node": lambda self, call: self.at,
        "node_name": lambda self, call: self.proto.name if self.proto else "",
        "node_operator": lambda self, call: self.proto.op_type if self.proto else "",
        "local_function_stack": lambda self, call: 0,
        "local_function_stack_size": lambda self, call: 0,
    }

    def __init__(self, world: ScriptedTensorRT, at: int, node: onnx.NodeProto | None, text: str) -> None:
        super().__init__(world)
        self.at, self.proto, self.text = at, node, text

    def code(self, call: Call) -> int:
        codes = self.world.trt.ErrorCode
        return int(codes.UNSUPPORTED_NODE if self.proto is not None else codes.MODEL_DESERIALIZE_FAILED)


class IPluginRegistry(Native):
    plain: ClassVar = {"parent_search_enabled": True, "error_recorder": None}
    answers: ClassVar[Answers] = {
        "deregister_library": lambda self, call: 0,
        "get_creator": lambda self, call: 0,
    }

    def __init__(self, world: ScriptedTensorRT) -> None:
        super().__init__(world)
        self.names: set[str] = set()
        """Operators a loaded library brings."""
        self.libraries: dict[str, int] = {}

    def load_library(self, call: Call) -> int:
        """Beside a library of the test lies a text file that lists its operators."""
        path = Path(call.text(0))
        listed = path.with_suffix(".ops")
        if not listed.is_file():
            return 0
        self.names |= set(listed.read_text().split())
        return self.libraries.setdefault(str(path), self.world.puppet.keep(b"handle"))

    @member("all_creators", "all_creators_recursive")
    def all_creators(self, call: Call) -> int:
        ctypes.c_int32.from_address(call.address(0)).value = 0
        return 0


# ------------------------------------------------------------------------------------------------ the build


class _Build:
    """One call of `build_serialized_network`."""

    def __init__(self, builder: Builder, network: INetworkDefinition, config: IBuilderConfig) -> None:
        self.world = builder.world
        self.builder, self.network, self.config = builder, network, config

    def plan(self) -> bytes | None:
        world, network = self.world, self.network
        if network.model is None or not network.outputs:
            return self._fail("Network must have at least one output")
        if (refusal := self._refusal()) is not None:
            return self._fail(refusal)
        name = f"Builder.build_serialized_network{'_to_stream' if self.config is None else ''}"
        for severity, text in world.faults.says.get("build", []):
            self.builder.say(severity, text)
        if any(severity in ("ERROR", "INTERNAL_ERROR") for severity, _ in world.faults.says.get("build", [])):
            return None
        memory = self._scratch()
        if memory is None:
            return None
        try:
            if not self._report() or not self._time():
                return None
        finally:
            memory()
        self.builder.say("INFO", f"{name}: engine generation completed")
        return self._serialized()

    def _fail(self, text: str) -> None:
        self.builder.say("ERROR", f"IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error ({text})")

    def _refusal(self) -> str | None:
        config, network = self.config, self.network
        if self.world.major < 11:
            lower = [name for name in config.flag_names if name in ("FP16", "BF16", "INT8", "FP8", "INT4", "FP4")]
            if network.strongly_typed and lower:
                return f"BuilderFlag {lower[0]} cannot be set for a strongly typed network"
        dynamic = [item.proto.name for item in network.inputs if -1 in declared(item.proto)]
        if dynamic and not config.profiles:
            return "Network has dynamic or shape inputs, but no optimization profile has been defined."
        for index, profile in enumerate(config.profiles):
            for name in dynamic:
                if not (all(profile.shapes.get(name, [()])) or all(profile.shape_values.get(name, [[]]))):
                    return f"Required optimization profile is invalid: {name} in profile {index}"
        if config.has("EXCLUDE_LEAN_RUNTIME") and not config.has("VERSION_COMPATIBLE"):
            return "kEXCLUDE_LEAN_RUNTIME needs kVERSION_COMPATIBLE"
        if config.has("WEIGHT_STREAMING") and not network.strongly_typed:
            return "Weight streaming needs a strongly typed network"
        if config.has("STRIP_PLAN") and not any(map(config.has, ("REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL"))):
            return "kSTRIP_PLAN needs a refittable engine"
        if config.has("REFIT_INDIVIDUAL") and (config.has("REFIT") or config.has("REFIT_IDENTICAL")):
            return "kREFIT_INDIVIDUAL excludes kREFIT and kREFIT_IDENTICAL"
        if config.values["default_device_type"] and not config.has("GPU_FALLBACK"):
            return "DLA cannot run this layer and GPU fallback is off"
        return None

    def _scratch(self) -> Callable[[], None] | None:
        """Scratch memory through the user's allocator, as tactics take it; how to give it back."""
        allocator = self.builder.values["gpu_allocator"]
        wanted = self.world.scratch_bytes
        if wanted > self.config.pool("WORKSPACE"):
            self.builder.say("WARNING", f"Tactic Device request: {wanted >> 20}MB Available: "
                             f"{self.config.pool('WORKSPACE') >> 20}MB. Device memory is insufficient")  # fmt: skip
            node = self.network.model.graph.node[0].name  # type: ignore[union-attr]
            self.builder.say("ERROR", "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any "
                             f"implementation for node {node} due to insufficient workspace. See verbose log)")  # fmt: skip
            return None
        if not allocator:
            return lambda: None
        address = self.world.allocate(allocator, wanted)
        if not address:
            self.builder.say("ERROR", f"Requested amount of GPU memory ({wanted} bytes) could not be allocated. "
                             "There may not be enough free memory for allocation to succeed.")  # fmt: skip
            return None
        return lambda: self.world.release(allocator, address)

    def _report(self) -> bool:
        """Progress as TensorRT reports it, a phase within a phase; False when it was cancelled."""
        monitor, steps = self.config.values["progress_monitor"], len(self.network.model.graph.node)  # type: ignore[union-attr]
        whole, part = b"Building engine from subgraph", b"Computing profile costs"
        if not monitor:
            return True
        start = functools.partial(virtual, monitor, VERSIONED, None)
        text, number = ctypes.c_char_p, ctypes.c_int32
        start((text, whole), (text, None), (number, 1))
        start((text, part), (text, whole), (number, steps))
        going = True
        for step in range(steps):
            if self.world.faults.before_step is not None:
                self.world.faults.before_step(step)
            if not virtual(monitor, VERSIONED + 1, ctypes.c_bool, (text, part), (number, step)):
                going = False
                break
        virtual(monitor, VERSIONED + 2, None, (text, part))
        if going:
            going = virtual(monitor, VERSIONED + 1, ctypes.c_bool, (text, whole), (number, 0))
        virtual(monitor, VERSIONED + 2, None, (text, whole))
        return going

    def _time(self) -> bool:
        """Time a tactic for each layer that the cache does not know."""
        cache = self.config.cache
        if self.config.values["builder_optimization_level"] == 0:
            return True
        for node in self.network.model.graph.node:  # type: ignore[union-attr]
            key = f"{node.op_type}:{','.join(node.input)}"
            if cache is not None and key in cache.entries:
                self.world.cache_hits += 1
                continue
            if self.config.has("ERROR_ON_TIMING_CACHE_MISS"):
                self._fail(f"no timing for {key} and kERROR_ON_TIMING_CACHE_MISS is set")
                return False
            self.world.tactics_timed += 1
            if cache is not None:
                cache.entries[key] = 0.001
        return True

    def _serialized(self) -> bytes:
        world, config, network = self.world, self.config, self.network
        model = onnx.ModelProto()
        model.CopyFrom(network.model)
        stripped = config.has("STRIP_PLAN")
        if stripped:
            for item in model.graph.initializer:
                kept = onnx.TensorProto(name=item.name, data_type=item.data_type, dims=item.dims)
                item.CopyFrom(kept)
        raw = model.SerializeToString()
        level = {int(item): name for name, item in world.trt.HardwareCompatibilityLevel.__members__.items()}
        verbosity = {int(item): name for name, item in world.trt.ProfilingVerbosity.__members__.items()}
        facts = {
            "flags": config.flag_names,
            "strongly_typed": network.strongly_typed,
            "profiles": [profile.shapes for profile in config.profiles],
            "shape_values": [profile.shape_values for profile in config.profiles],
            "compute_capability": list(world.gpu.compute_capability),
            "hardware_compatibility": level[config.values["hardware_compatibility_level"]],
            "verbosity": verbosity[config.values["profiling_verbosity"]],
            "host_code": config.has("VERSION_COMPATIBLE") and not config.has("EXCLUDE_LEAN_RUNTIME"),
            "version_compatible": config.has("VERSION_COMPATIBLE"),
            "lean_outside": config.has("EXCLUDE_LEAN_RUNTIME"),
            "stripped": stripped,
            "windows": config.values["runtime_platform"] != 0,
            "plugins": config.serialized_plugins,
            "settings": {
                name: value for name, value in config.values.items()
                if isinstance(value, int | str) and name not in ("progress_monitor", "profile_stream")
            },
            "pools": {name: config.pool(name) for name in world.trt.MemoryPoolType.__members__},
            "computes_in": world.faults.computes_in,
            "aux_streams": max(config.values["max_aux_streams"], 0),
            "model_bytes": len(raw),
        }  # fmt: skip
        if world.rtx:
            facts["gpu_bits"] = self._gpu_bits()
        world.built.append(facts)
        return plan_bytes(world.version, facts, raw)

    def _gpu_bits(self) -> int:
        """The GPUs of a plan of TensorRT-RTX: those given; 8.0 and later where none is; `CURRENT` is this one."""
        from bindings import scripted_rtx

        if not self.config.targets:
            return 0x7E
        wanted = [divmod(item, 10) if item > 1 else self.world.gpu.compute_capability for item in self.config.targets]
        return sum(scripted_rtx.GPU_BITS[item] for item in set(wanted))


# ------------------------------------------------------------------------------------------------ running


class Runtime(Native):
    plain: ClassVar = {
        "engine_host_code_allowed": False, "gpu_allocator": None, "max_threads": 1, "DLA_core": -1, "num_DLA_cores": 0,
        "error_recorder": None, "temporary_directory": "", "tempfile_control_flags": 0, "defer_weights_loading": False,
    }  # fmt: skip
    answers: ClassVar[Answers] = {
        "get_plugin_registry": lambda self, call: self.world.registry.address,
        "engine_header_size": lambda self, call: 64,
    }

    def __init__(
        self, world: ScriptedTensorRT, logger: int, lean_of: str | None = None, parent: Runtime | None = None
    ) -> None:
        super().__init__(world, logger)
        self.lean_of, self.parent = lean_of, parent

    def load_runtime(self, call: Call) -> int:
        """A lean runtime of the test is a text file with a version."""
        path = Path(call.text(0))
        return Runtime(self.world, self.logger, path.read_text().strip(), self).address if path.is_file() else 0

    @member("deserialize_cuda_engine#0")
    def deserialize_cuda_engine(self, call: Call) -> int:
        plan = ctypes.string_at(call.address(0), call.address(1))
        if not plan.startswith(b"vtrt" if self.world.rtx else b"ftrt"):
            return self._fail("Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match")
        try:
            facts = plan_facts(plan)
        except ValueError as error:
            return self._fail(f"Serialization assertion failed: the plan is {error}")
        made = tuple(plan[24:28])
        if made != tuple([*self.world.version, 0, 0][:4]) and not facts["version_compatible"]:
            return self._fail("Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does "
                              "not match. Note: Current Version: 240, Serialized Engine Version: 239")  # fmt: skip
        if facts["host_code"] and not self.values["engine_host_code_allowed"]:
            return self._fail("Plan contains host code and IRuntime::setEngineHostCodeAllowed(true) was not called")
        if facts["lean_outside"] and self.lean_of is None:
            return self._fail("The plan excludes the lean runtime: load it with IRuntime::loadRuntime")
        if facts["windows"]:
            return self._fail("The engine plan file is generated for another platform: not compatible with this version"
                              " of TensorRT")  # fmt: skip
        if self.world.rtx:
            from bindings import scripted_rtx

            if (text := scripted_rtx.refusal(self.world, plan)) is not None:
                return self._fail(text)
            facts["compute_capability"] = list(self.world.gpu.compute_capability)
        here = list(self.world.gpu.compute_capability)
        portable = facts["hardware_compatibility"] == "AMPERE_PLUS" and here >= [8, 0]
        if here != facts["compute_capability"] and not portable:
            return self._fail(f"The engine plan file is generated on an incompatible device, expecting compute "
                              f"{here[0]}.{here[1]} got compute {facts['compute_capability'][0]}."
                              f"{facts['compute_capability'][1]}, please rebuild.")  # fmt: skip
        engine = ICudaEngine(self.world, self.logger, facts, self)
        engine.deferred = self.values["defer_weights_loading"]
        engine.alive = engine.deferred or engine.hold()
        return engine.address if engine.alive else 0

    def get_engine_validity(self, call: Call) -> int:
        from bindings import scripted_rtx

        verdict, reasons = scripted_rtx.validity(self.world, ctypes.string_at(call.address(0), call.address(1)))
        ctypes.c_uint64.from_address(call.address(2)).value = reasons
        return verdict

    def _fail(self, text: str) -> int:
        self.say("ERROR", f"IRuntime::deserializeCudaEngine: Error Code 1: Serialization ({text})")
        return 0

    def destroyed(self) -> None:
        if any(isinstance(item, ICudaEngine) and item.alive and item.runtime is self for item in self.world.alive()):
            self.world.violations.append("a runtime was destroyed before its engine")
        if any(isinstance(item, Runtime) and item.parent is self for item in self.world.alive()):
            self.world.violations.append("a runtime was destroyed before the lean one it loaded")


class ICudaEngine(Native):
    plain: ClassVar = {"error_recorder": None}
    answers: ClassVar[Answers] = {
        "weights_loaded": lambda self, call: not self.deferred,
        "name": lambda self, call: self.model.graph.name,
        "num_io_tensors": lambda self, call: len(self.names),
        "num_layers": lambda self, call: len(layers_of(self)),
        "num_optimization_profiles": lambda self, call: max(len(self.facts["profiles"]), 1),
        "num_aux_streams": lambda self, call: self.facts["aux_streams"],
        "get_tensor_name": lambda self, call: self.names[call.int32(0)],
        "get_tensor_location": lambda self, call: 1 if call.text(0) in self.world.shape_tensors else 0,
        "is_shape_inference_io": lambda self, call: call.text(0) in self.world.shape_tensors,
        "get_tensor_format": lambda self, call: 0,
        "get_tensor_vectorized_dim": lambda self, call: -1,
        "get_tensor_bytes_per_component": lambda self, call: -1,
        "get_tensor_components_per_element": lambda self, call: 1,
        "get_tensor_format_desc": lambda self, call: "Row major linear format (kLINEAR)",
        "device_memory_size": lambda self, call: max(
            self.activation_bytes(index) for index in range(max(len(self.facts["profiles"]), 1))
        ),
        "device_memory_size_v2": lambda self, call: max(
            self.activation_bytes(index) for index in range(max(len(self.facts["profiles"]), 1))
        ),
        "get_device_memory_size_for_profile": lambda self, call: self.activation_bytes(call.int32(0)),
        "get_device_memory_size_for_profile_v2": lambda self, call: self.activation_bytes(call.int32(0)),
        "refittable": lambda self, call: any(name.startswith("REFIT") for name in self.facts["flags"]),
        "streamable_weights_size": lambda self, call: (
            self.weights_bytes if "WEIGHT_STREAMING" in self.facts["flags"] else 0
        ),
        "weight_streaming_budget": lambda self, call: self.budget,
        "weight_streaming_budget_v2": lambda self, call: self.budget,
        "get_weight_streaming_automatic_budget": lambda self, call: self.weights_bytes // 2,
        "weight_streaming_scratch_memory_size": lambda self, call: 256 if self.budget < self.weights_bytes else 0,
        "hardware_compatibility_level": lambda self, call: int(
            getattr(self.world.trt.HardwareCompatibilityLevel, self.facts["hardware_compatibility"])
        ),
        "profiling_verbosity": lambda self, call: int(
            getattr(self.world.trt.ProfilingVerbosity, self.facts["verbosity"])
        ),
        "engine_capability": lambda self, call: 0,
        "tactic_sources": lambda self, call: 0,
        "create_engine_inspector": lambda self, call: EngineInspector(self.world, self.logger, self).address,
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, facts: dict[str, Any], runtime: Runtime) -> None:
        super().__init__(world, logger)
        self.facts, self.runtime = facts, runtime
        self.model = onnx.load_from_string(facts["model"])
        stored = {item.name for item in self.model.graph.initializer}
        self.inputs = {item.name: item for item in self.model.graph.input if item.name not in stored}
        self.outputs = {item.name: item for item in self.model.graph.output}
        self.weights_bytes = sum(nbytes_of(item) for item in self.model.graph.initializer)
        self.refitted = not facts["stripped"]
        self.budget = self.weights_bytes if "WEIGHT_STREAMING" in facts["flags"] else 0
        self.weights_at = 0
        self.deferred = False
        """Its weights are brought to the GPU by `load_weights`."""

    def hold(self) -> bool:
        """Take device memory for the weights through the user's allocator, if there is one."""
        allocator = self.runtime.values["gpu_allocator"]
        if not allocator:
            return True
        self.weights_at = self.world.allocate(allocator, max(self.weights_bytes, 256))
        if not self.weights_at:
            self.say("ERROR", f"Requested amount of GPU memory ({self.weights_bytes} bytes) could not be allocated.")
        return bool(self.weights_at)

    def destroyed(self) -> None:
        if any(isinstance(item, IExecutionContext) and item.engine is self for item in self.world.alive()):
            self.world.violations.append("an engine was destroyed before its context")
        self._give_weights_back()

    def _give_weights_back(self) -> None:
        address, self.weights_at = self.weights_at, 0
        if address:
            self.world.release(self.runtime.values["gpu_allocator"], address)

    def load_weights(self, call: Call) -> int:
        facts = plan_facts(ctypes.string_at(call.address(0), call.address(1)))
        if not self.deferred or facts["model"] != self.facts["model"] or not self.hold():
            return 0
        self.deferred = False
        return 1

    @property
    def names(self) -> list[str]:
        return [*self.inputs, *self.outputs]

    def proto(self, name: str) -> onnx.ValueInfoProto | None:
        return self.inputs.get(name) or self.outputs.get(name)

    def get_tensor_mode(self, call: Call) -> int:
        name = call.text(0)
        return INPUT if name in self.inputs else OUTPUT if name in self.outputs else 0

    def get_tensor_dtype(self, call: Call) -> int:
        proto = self.proto(call.text(0))
        return TYPES[proto.type.tensor_type.elem_type] if proto is not None else 0

    def get_tensor_shape(self, call: Call) -> Shape | None:
        proto = self.proto(call.text(0))
        return declared(proto) if proto is not None else None

    def get_tensor_profile_shape(self, call: Call) -> Shape | None:
        name, index = call.text(0), call.int32(1)
        spans = self.span(name, index)
        return spans[call.int32(2)] if spans else None

    def get_tensor_profile_values(self, call: Call) -> int:
        values = self.facts["shape_values"][call.int32(1)].get(call.text(0))
        if values is None:
            return 0
        which = values[call.int32(2)]
        kind = "q" if self.world.wide_values else "i"
        return self.world.puppet.keep(struct.pack(f"<{len(which)}{kind}", *which))

    def span(self, name: str, index: int) -> list[Shape] | None:
        """Smallest, usual and largest shape of an input in a profile."""
        if name not in self.inputs:
            return None
        profiles = self.facts["profiles"]
        given = profiles[index].get(name) if index < len(profiles) else None
        return [tuple(item) for item in given] if given else [declared(self.inputs[name])] * 3

    def activation_bytes(self, profile: int) -> int:
        """As many bytes as the inputs of the largest shapes, twice."""
        return sum(8 * math.prod(self.span(name, profile)[2]) for name in self.inputs) // 256 * 256 + 256  # type: ignore[index]

    @member("weight_streaming_budget=", "weight_streaming_budget_v2=")
    def set_weight_streaming_budget(self, call: Call) -> int:
        if any(isinstance(item, IExecutionContext) and item.engine is self for item in self.world.alive()):
            self.say("ERROR", "the weight streaming budget cannot change while there are active contexts")
            return 0
        if call.int64(0) < 0:
            return 0
        self.budget = min(call.int64(0), self.weights_bytes)
        return 1

    @member("create_execution_context#0")
    def create_execution_context(self, call: Call) -> int:
        if not self.refitted:
            self.say("ERROR", "ICudaEngine::createExecutionContext: Error Code 3: the engine has missing weights")
            return 0
        return self._context(IExecutionContext(self.world, self.logger, self, call.int32(0)))

    @member("create_execution_context#1")
    def create_context_of_config(self, call: Call) -> int:
        config = self.world.known(call.address(0))
        context = IExecutionContext(self.world, self.logger, self, config.allocation)
        context.jit = config
        return self._context(context)

    def _context(self, context: IExecutionContext) -> int:
        context.alive = context.hold()
        if context.alive and self.world.rtx:
            from bindings import scripted_rtx

            scripted_rtx.compile_kernels(context, None)
        return context.address if context.alive else 0

    def create_runtime_config(self, call: Call) -> int:
        from bindings import scripted_rtx

        return scripted_rtx.IRuntimeConfig(self.world, self.logger, self).address

    def serialize(self, call: Call) -> int:
        facts = {name: value for name, value in self.facts.items() if name != "model"}
        return IHostMemory(self.world, plan_bytes(self.world.version, facts, self.facts["model"])).address


class IExecutionContext(Native):
    plain: ClassVar = {
        "enqueue_emits_profile": True, "profiler": None, "persistent_cache_limit": Wide(0), "name": "", "debug_sync": False,
        "nvtx_verbosity": 1, "error_recorder": None, "temporary_allocator": None,
    }  # fmt: skip
    answers: ClassVar[Answers] = {
        "engine": lambda self, call: self.engine.address,
        "active_optimization_profile": lambda self, call: self.profile,
        "all_binding_shapes_specified": lambda self, call: 0,
        "get_tensor_address": lambda self, call: self.addresses.get(call.text(0), 0),
        "update_device_memory_size_for_shapes": lambda self, call: (
            sum(8 * math.prod(shape) for shape in self.shapes.values()) // 256 * 256 + 256
        ),
        "report_to_profiler": lambda self, call: self._profile(),
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, engine: ICudaEngine, strategy: int) -> None:
        super().__init__(world, logger)
        self.engine = engine
        self.strategy = {
            int(item): name for name, item in world.trt.ExecutionContextAllocationStrategy.__members__.items()
        }[strategy]
        self.profile = 0
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, int] = {}
        self.given: tuple[int, int] = (0, 0)
        self.scratch = 0
        self.epoch = 0
        self.jit: Any = None
        """Of TensorRT-RTX: the runtime config it was made with."""
        self.kernels: set[str] = set()
        for name, proto in engine.inputs.items():
            if -1 not in declared(proto):
                self.shapes[name] = declared(proto)

    def hold(self) -> bool:
        """Memory for activations, where TensorRT takes it itself."""
        allocator = self.engine.runtime.values["gpu_allocator"]
        if self.strategy == "USER_MANAGED" or not allocator:
            return True
        every = range(max(len(self.engine.facts["profiles"]), 1)) if self.strategy == "STATIC" else [self.profile]
        wanted = max(self.engine.activation_bytes(index) for index in every)
        self.scratch = self.world.allocate(allocator, wanted)
        if not self.scratch:
            self.say("ERROR", f"Requested amount of GPU memory ({wanted} bytes) could not be allocated.")
        return bool(self.scratch)

    def destroyed(self) -> None:
        if self.scratch:
            self.world.release(self.engine.runtime.values["gpu_allocator"], self.scratch)

    def set_optimization_profile_async(self, call: Call) -> int:
        index = call.int32(0)
        if not 0 <= index < max(len(self.engine.facts["profiles"]), 1):
            self.say("ERROR", f"IExecutionContext::setOptimizationProfileAsync: there is no profile {index}")
            return 0
        self.world.stream(call.address(1))
        self.profile = index
        self.epoch += 1
        for name, proto in self.engine.inputs.items():
            if -1 in declared(proto):
                self.shapes.pop(name, None)
        return 1

    def set_input_shape(self, call: Call) -> int:
        name, shape = call.text(0), call.dims(1)
        spans = self.engine.span(name, self.profile)
        if spans is None:
            self.say("ERROR", f"IExecutionContext::setInputShape: {name} is no input")
            return 0
        low, _, high = spans
        if len(shape) != len(low) or not all(a <= x <= b for a, x, b in zip(low, shape, high, strict=True)):
            self.say("ERROR", "IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter check failed, "
                     f"condition: engineDims.d[i] == dims.d[i]. Static dimension mismatch while setting input shape for "
                     f"{name}. Set dimensions are {list(shape)}.)")  # fmt: skip
            return 0
        if self.shapes.get(name) != shape:
            self.epoch += 1
        self.shapes[name] = shape
        return 1

    def get_tensor_shape(self, call: Call) -> Shape | None:
        name = call.text(0)
        if name in self.engine.inputs:
            return self.shapes.get(name, declared(self.engine.inputs[name]))
        if name not in self.engine.outputs:
            return None
        return self.output_shapes()[name]

    def output_shapes(self) -> dict[str, Shape]:
        if len(self.shapes) < len(self.engine.inputs):
            return {name: declared(proto) for name, proto in self.engine.outputs.items()}
        known = tuple(
            (name, self._read(name, self.addresses[name], self.shapes[name]).tobytes())
            for name in sorted(self.engine.inputs)
            if name in self.world.shape_tensors and self.addresses.get(name)
        )
        return shapes_of(self.engine.model, tuple(sorted(self.shapes.items())), known)

    def infer_shapes(self, call: Call) -> int:
        missing = [name for name in self.engine.inputs if name not in self.shapes]
        for at, name in enumerate(missing[: call.int32(0)]):
            ctypes.c_uint64.from_address(call.address(1) + 8 * at).value = self.world.puppet.keep(name.encode())
        return len(missing)

    def get_max_output_size(self, call: Call) -> int:
        proto = self.engine.outputs[call.text(0)]
        elements = max(math.prod(shape) for shape in self.shapes.values())
        return elements * 8 * max(len(declared(proto)), 1)

    @member("set_tensor_address", "set_input_tensor_address")
    def set_tensor_address(self, call: Call) -> int:
        name = call.text(0)
        if self.engine.proto(name) is None:
            self.say("ERROR", f"IExecutionContext::setTensorAddress: there is no tensor {name}")
            return 0
        if self.addresses.get(name) != call.address(1):
            self.epoch += 1
        self.addresses[name] = call.address(1)
        return 1

    def set_output_allocator(self, call: Call) -> int:
        if call.text(0) not in self.engine.outputs:
            return 0
        self.allocators[call.text(0)] = call.address(1)
        return 1

    def set_device_memory(self, call: Call) -> int:
        self.given = (call.address(0), call.int64(1))
        return 0

    @member("device_memory=")
    def set_device_memory_alone(self, call: Call) -> int:
        self.given = (call.address(0), 1 << 62)
        return 0

    def _profile(self) -> int:
        """`report_layer_time` of the user's profiler, for each layer. Its slot moved when the class became versioned."""
        profiler = self.values["profiler"]
        if not profiler:
            return 0
        for layer in layers_of(self.engine):
            virtual(
                profiler,
                self.world.profiler_slot,
                None,
                (ctypes.c_char_p, layer["Name"].encode()),
                (ctypes.c_float, 0.5),
            )
        return 1

    def execute_async_v3(self, call: Call) -> int:
        if (refusal := self._refusal()) is not None:
            self.say("ERROR", f"IExecutionContext::enqueueV3: Error Code 3: API Usage Error ({refusal})")
            return 0
        stream = self.world.stream(call.address(0))
        if self.world.rtx:
            self._specialise(capturing=stream._recording is not None)
        self.world.enqueued_on.append(call.address(0))
        sized = self.output_shapes()
        late = [name for name, shape in sized.items() if -1 in shape]
        shapes, addresses, epoch = dict(self.shapes), dict(self.addresses), self.epoch

        def compute() -> None:
            feeds = {name: self._read(name, addresses[name], shape) for name, shape in shapes.items()}
            with np.errstate(all="ignore"):  # a device divides by zero without a word
                values = ReferenceEvaluator(self.engine.model).run(list(self.engine.outputs), feeds)
            for name, value in zip(self.engine.outputs, values, strict=True):
                self._write(name, np.asarray(value), late, addresses, stream.handle)

        def stale() -> str | None:
            if not self.alive:
                return "its context is gone"
            return None if epoch == self.epoch else "its context has other shapes, addresses or another profile now"

        if late:
            if stream._recording is not None:
                self.say("ERROR", "operation not permitted when stream is capturing")
                return 0
            stream.synchronize()  # TensorRT answers the allocator before `enqueueV3` returns
            compute()
        else:
            held = [
                self.world.buffer(address)
                for name, address in addresses.items()
                if address and name not in self.world.shape_tensors
            ]
            stream.enqueue(compute, held, stale)
        if self.values["enqueue_emits_profile"]:
            self._profile()
        return 1

    def _specialise(self, *, capturing: bool) -> None:
        """Compile for these shapes before they run (`EAGER`); a graph captured otherwise keeps kernels for any shape."""
        from bindings import scripted_rtx

        eager = self.jit is not None and self.jit.values["dynamic_shapes_kernel_specialization_strategy"] == 1
        if eager and not capturing:
            scripted_rtx.compile_kernels(self, self.shapes)

    def is_stream_capturable(self, call: Call) -> int:
        self.world.stream(call.address(0))
        return self.world.capturable

    def _refusal(self) -> str | None:
        if self.engine.deferred:
            return "the weights of the engine are not loaded"
        if missing := [name for name in self.engine.inputs if name not in self.shapes]:
            return f"input shapes are not specified: {missing}"
        for name in self.engine.names:
            address = self.addresses.get(name, 0)
            if not address and not self.allocators.get(name):
                return f"neither address nor allocator is set for {name}"
            if address % 256 and name not in self.world.shape_tensors:
                return f"the address of {name} is not aligned to 256 bytes"
        if self.strategy == "USER_MANAGED":
            address, size = self.given
            need = sum(8 * math.prod(shape) for shape in self.shapes.values()) // 256 * 256 + 256
            if not address or size < need:
                return f"the device memory given has {size} bytes, {need} are needed"
        return None

    def _read(self, name: str, address: int, shape: Shape) -> Any:
        kind = helper.tensor_dtype_to_np_dtype(self.engine.inputs[name].type.tensor_type.elem_type)
        nbytes = math.prod(shape) * kind.itemsize
        if name in self.world.shape_tensors:  # on the host
            return np.frombuffer(ctypes.string_at(address, nbytes), kind).reshape(shape)
        raw = self.world.memory(address, nbytes)
        return raw.view(kind).reshape(shape).copy()

    def _write(self, name: str, value: Any, late: Sequence[str], addresses: Mapping[str, int], stream: int) -> None:
        kind = helper.tensor_dtype_to_np_dtype(self.engine.outputs[name].type.tensor_type.elem_type)
        if self.world.faults.wrong_by and kind.kind == "f":
            value = value + self.world.faults.wrong_by
        value = np.ascontiguousarray(value, dtype=kind)
        address = addresses.get(name, 0)
        if name in self.world.shape_tensors:  # on the host
            ctypes.memmove(address, value.ctypes.data, value.nbytes)
            return
        if name in late:
            address = self._ask_for(name, value, address, stream)
        raw = value.reshape(-1).view(np.uint8)
        self.world.memory(address, raw.nbytes)[:] = raw

    def _ask_for(self, name: str, value: Any, address: int, stream: int) -> int:
        """The user's output allocator: memory of that size, then the shape that came out."""
        allocator, text = self.allocators.get(name, 0), (ctypes.c_char_p, name.encode())
        if not allocator:
            return address
        wide = ctypes.c_uint64
        size, alignment = (wide, max(value.nbytes, 1)), (wide, 256)
        address = virtual(allocator, VERSIONED + 1, wide, text, (wide, address), size, alignment, (wide, stream))
        shape = Dims(value.ndim, (ctypes.c_int64 * 8)(*value.shape))
        virtual(allocator, VERSIONED + 2, None, text, (wide, ctypes.addressof(shape)))
        return int(address or 0)


class EngineInspector(Native):
    plain: ClassVar = {"execution_context": None, "error_recorder": None}
    answers: ClassVar[Answers] = {
        "get_layer_information": lambda self, call: json.dumps(layers_of(self.engine)[call.int32(0)]),
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, engine: ICudaEngine) -> None:
        super().__init__(world, logger)
        self.engine = engine

    def get_engine_information(self, call: Call) -> str:
        layers = layers_of(self.engine)
        return json.dumps(self._document(layers))

    def _document(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        verbosity = self.engine.facts["verbosity"]
        shown: list[Any] = layers
        if verbosity != "DETAILED":
            shown = [layer["Name"] for layer in layers] if verbosity == "LAYER_NAMES_ONLY" else []
        if self.world.major < 11:
            return {"Layers": shown, "Bindings": self.engine.names}
        tensors = [
            {"Name": name, "IOMode": "Input" if name in self.engine.inputs else "Output", "Location": "Device",
             "DataType": WORDS_10[TYPES[proto.type.tensor_type.elem_type]], "Dimensions": list(declared(proto)),
             "IsShapeInferenceIO": name in self.world.shape_tensors, "ProfileInfo": []}
            for name in self.engine.names if (proto := self.engine.proto(name)) is not None
        ]  # fmt: skip
        return {"ProfilingVerbosity": verbosity, "Layers": shown, "I/O Tensors": tensors}


class Refitter(Native):
    plain: ClassVar = {"weights_validation": True, "max_threads": 1, "error_recorder": None}
    answers: ClassVar[Answers] = {
        "release_refit_resources": lambda self, call: 1,
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, engine: ICudaEngine) -> None:
        super().__init__(world, logger)
        self.engine = engine
        self.given: dict[str, onnx.TensorProto] = {}

    def missing(self) -> list[str]:
        names = [item.name for item in self.engine.model.graph.initializer]
        return [] if self.engine.refitted else [name for name in names if name not in self.given]

    @member("get_missing_weights", "get_missing")
    def get_missing_weights(self, call: Call) -> int:
        missing = self.missing()
        for at, name in enumerate(missing[: call.int32(0)]):
            ctypes.c_uint64.from_address(call.address(1) + 8 * at).value = self.world.puppet.keep(name.encode())
        return len(missing)

    @member("refit_cuda_engine", "refit_cuda_engine_async")
    def refit_cuda_engine(self, call: Call) -> int:
        if missing := self.missing():
            self.say("ERROR", f"Refitter: weights are missing: {missing[0]}")
            return 0
        for item in self.engine.model.graph.initializer:
            if item.name in self.given:
                item.CopyFrom(self.given[item.name])
        self.engine.refitted = True
        return 1


class OnnxParserRefitter(Native):
    answers: ClassVar[Answers] = {
        "num_errors": lambda self, call: len(self.errors),
        "get_error": lambda self, call: self.errors[call.int32(0)].address,
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, refitter: Refitter) -> None:
        super().__init__(world, logger)
        self.refitter = refitter
        self.errors: list[IParserError] = []

    def refit_from_bytes(self, call: Call) -> int:
        raw = ctypes.string_at(call.address(0), call.address(1))
        return self._refit(raw, self.world.model_path(call, 2))

    def refit_from_file(self, call: Call) -> int:
        path = Path(call.text(0))
        return self._refit(path.read_bytes(), path)

    def _refit(self, raw: bytes, path: Path | None) -> int:
        model = onnx.load_from_string(raw)
        if path is not None:
            onnx.load_external_data_for_model(model, str(path.parent))
        wanted = {item.name: item for item in self.refitter.engine.model.graph.initializer}
        for item in model.graph.initializer:
            if item.name in wanted:
                if item.data_type != wanted[item.name].data_type or list(item.dims) != list(wanted[item.name].dims):
                    text = f"weights {item.name} have another type or shape"
                    self.say("ERROR", text)
                    self.errors.append(IParserError(self.world, 0, None, text))
                    return 0
                self.refitter.given[item.name] = item
        return 1


CLASSES: tuple[type[Native], ...] = (
    Builder, INetworkDefinition, ITensor, IOptimizationProfile, IBuilderConfig, ITimingCache, IHostMemory, OnnxParser,
    IParserError, IPluginRegistry, Runtime, ICudaEngine, IExecutionContext, EngineInspector, Refitter, OnnxParserRefitter,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ graphs


def declared(value: onnx.ValueInfoProto) -> Shape:
    """The shape a graph declares, -1 where it is dynamic."""
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)


def shapes_of(
    model: onnx.ModelProto, inputs: tuple[tuple[str, Shape], ...], values: tuple[tuple[str, bytes], ...] = ()
) -> dict[str, Shape]:
    """Shapes of the outputs at these input shapes, and these values of inputs that hold sizes; -1 where the data decide."""
    fixed, given = onnx.ModelProto(), dict(inputs)
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        if value.name in given:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for size in given[value.name]:
                shape.dim.add().dim_value = size
        for name, raw in values:
            if name == value.name:
                kind = value.type.tensor_type.elem_type
                fixed.graph.initializer.append(helper.make_tensor(name, kind, given[name], raw, raw=True))
    del fixed.graph.value_info[:]
    for value in fixed.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("value")
    inferred = shape_inference.infer_shapes(fixed, data_prop=True)
    return {value.name: declared(value) for value in inferred.graph.output}


def nbytes_of(item: onnx.TensorProto) -> int:
    return int(math.prod(item.dims) * helper.tensor_dtype_to_np_dtype(item.data_type).itemsize)


def layers_of(engine: ICudaEngine) -> list[dict[str, Any]]:
    """What an inspector tells of the layers: one for each node, Q/DQ taken into the matrix products they surround."""
    model, major = engine.model, engine.world.major
    types = {item.name: TYPES[item.data_type] for item in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        types[value.name] = TYPES[value.type.tensor_type.elem_type]
    made_by = {name: node for node in model.graph.node for name in node.output}
    weights = {item.name: item for item in model.graph.initializer}
    layers = []
    for node in model.graph.node:
        if node.op_type in ("Constant", "DequantizeLinear"):
            continue
        name = node.name or f"node_of_{node.output[0]}"  # as TensorRT's parser names them
        forced = engine.facts["computes_in"].get(name, engine.facts["computes_in"].get("*"))
        read: list[tuple[str, int]] = []
        held: tuple[int, int] | None = None
        for source in node.input:
            producer = made_by.get(source)
            if producer is not None and producer.op_type == "DequantizeLinear":
                source = producer.input[0]
            kind = types.get(source, 0)
            if source in weights or (
                source in made_by and made_by[source].input and made_by[source].input[0] in weights
            ):
                if held is None and node.op_type in MATRIX:
                    stored = weights.get(source) or weights[made_by[source].input[0]]
                    held = (kind, math.prod(stored.dims))
                continue
            read.append((source, kind))
        wrote = [(target, types.get(target, 0)) for target in node.output]
        if forced is not None:
            number = next(key for key, word in WORDS_10.items() if word == forced)
            read, wrote = [(n, number) for n, _ in read], [(n, number) for n, _ in wrote]
            held = (number, held[1]) if held else None
        layer: dict[str, Any] = {
            "Name": name,
            "LayerType": {"Conv": "CaskConvolution", "QuantizeLinear": "Reformat", "Cast": "Reformat"}.get(
                node.op_type, "gemm" if node.op_type in MATRIX else "kgen"
            ),
            "Inputs": [_tensor(n, kind, major) for n, kind in read],
            "Outputs": [_tensor(n, kind, major) for n, kind in wrote],
            "ParameterType": {"Conv": "Convolution", "QuantizeLinear": "Reformat", "Cast": "Reformat"}.get(
                node.op_type, node.op_type
            ),
            "TacticName": f"scripted_{node.op_type.lower()}",
            "StreamId": 0,
            "Metadata": f"[ONNX Layer: {name}]",
        }
        if held is not None:
            layer["Weights"] = {"Type": WORDS_10[held[0]], "Count": held[1]}
        layers.append(layer)
    return layers


def _tensor(name: str, kind: int, major: int) -> dict[str, Any]:
    word = WORDS_10[kind]
    if major < 11:
        return {"Name": name, "Location": "Device", "Dimensions": [], "Format/Datatype": word}
    return {"Name": name, "Location": "Device", "Dimensions": [], "Format": "Row major linear", "DataType": word}


# ------------------------------------------------------------------------------------------------ the world


class ScriptedTensorRT:
    """All of it: objects, faults, the GPU, what was called. One for each process."""

    def __init__(self, puppet: Puppet, trt: Any, slots: Slots) -> None:
        self.puppet, self.trt, self.slots = puppet, trt, slots
        self.version_text: str = trt.__version__
        self.version = tuple(int(part) for part in trt.__version__.split(".") if part.isdigit())
        self.rtx: bool = trt.__name__ == "tensorrt_rtx"
        self.major = 11 if self.rtx else self.version[0]
        """Of the interface: that of TensorRT-RTX 1.7 is TensorRT 11.4's."""
        self.gpu = Gpu("NVIDIA GeForce RTX 4090", (8, 9)) if self.rtx else Gpu()
        self.faults = Faults()
        self.objects: dict[int, Native] = {}
        self.shape_tensors: set[str] = set()
        """Inputs that hold shapes: they lie in host memory."""
        self.scratch_bytes = 1 << 20
        """What the tactics of a build take."""
        self.built: list[dict[str, Any]] = []
        """What each build was told, oldest first."""
        self.cache_hits = self.tactics_timed = 0
        self.enqueued_on: list[int] = []
        """The stream handles `execute_async_v3` was called with."""
        self.kernels_compiled: list[str] = []
        """What no runtime cache held, in the order it was compiled; `compile_s` is what each takes."""
        self.compile_s = 0.0
        self.capturable = True
        """What `is_stream_capturable` answers."""
        self.violations: list[str] = []
        """Manners the caller broke: an engine destroyed under its context."""
        self.wide_values = self.rtx or self.version >= (10, 11)
        """Values of shape tensors have 64 bits."""
        self.profiler_slot = VERSIONED if self.major >= 11 else 0
        self._install()
        self.registry = IPluginRegistry(self)

    def _install(self) -> None:
        from bindings import scripted_rtx

        names = {key: name for name, keys in self.slots.items() for key in keys}
        for kind in (*CLASSES, *scripted_rtx.CLASSES):
            for name, keys in self.slots.items():
                owner, _, short = name.partition(".")
                if owner == kind.__name__:
                    for which, key in enumerate(keys):
                        if (answer := _answer(kind, short, which)) is not None:
                            self.puppet.rules[key] = self._ruled(name, answer)
            for slot in range(12):
                key = (kind.__name__, "outer", slot)
                if key not in names:
                    self.puppet.rules[key] = self._destroyed
        self.names = names
        entries = self.puppet.entries
        entries["create_builder"] = lambda call: self._made("Builder.__init__", lambda: Builder(self, call.address(0)))
        entries["create_runtime"] = lambda call: self._made("Runtime.__init__", lambda: Runtime(self, call.address(0)))
        entries["create_parser"] = lambda call: self._made(
            "OnnxParser.__init__", lambda: OnnxParser(self, call.address(1), self.known(call.address(0)))
        )
        entries["create_refitter"] = lambda call: self._made(
            "Refitter.__init__", lambda: Refitter(self, call.address(1), self.known(call.address(0)))
        )
        entries["create_parser_refitter"] = lambda call: self._made(
            "OnnxParserRefitter.__init__",
            lambda: OnnxParserRefitter(self, call.address(1), self.known(call.address(0))),
        )
        entries["builder_plugin_registry"] = entries["plugin_registry"] = lambda call: self.registry.address
        entries["init_plugins"] = lambda call: "init_libnvinfer_plugins" not in self.faults.refused

    def _made(self, name: str, make: Callable[[], Native]) -> int:
        return 0 if name in self.faults.nothing_from else make().address

    def _ruled(self, name: str, answer: Callable[[Native, Call], Any]) -> Callable[[Call], Any]:
        def rule(call: Call) -> Any:
            obj, faults = self.objects[call.id], self.faults
            for severity, text in faults.says.get(name, ()):
                obj.say(severity, text)
            if name in faults.nothing_from or name in faults.refused or name in faults.stubborn:
                return None
            return answer(obj, call)

        return rule

    def _destroyed(self, call: Call) -> int:
        obj = self.objects[call.id]
        if obj.alive:
            obj.alive = False
            obj.destroyed()
        return 0

    # -------------------------------------------------------------------------------- for the objects

    def known(self, address: int) -> Any:
        """The object at an address the bindings gave."""
        return next(item for item in self.objects.values() if item.address == address)

    def alive(self) -> Iterator[Native]:
        return (item for item in list(self.objects.values()) if item.alive)

    def say(self, logger: int, severity: str, text: str) -> None:
        """Through the user's logger, as TensorRT does."""
        slot = VERSIONED if self.major >= 11 else 0
        virtual(logger, slot, None, (ctypes.c_int32, SEVERITIES.index(severity)), (ctypes.c_char_p, text.encode()))

    def allocate(self, allocator: int, nbytes: int) -> int:
        """Memory through the user's asynchronous allocator, on the default stream."""
        wide = ctypes.c_uint64
        found = virtual(allocator, VERSIONED + 3, wide, (wide, nbytes), (wide, 256), (ctypes.c_uint32, 0), (wide, 0))
        return int(found or 0)

    def release(self, allocator: int, address: int) -> None:
        wide = ctypes.c_uint64
        if not virtual(allocator, VERSIONED + 4, ctypes.c_bool, (wide, address), (wide, 0)):
            self.violations.append(f"the allocator did not take {address:#x} back")

    def read_cache(self, raw: bytes) -> dict[str, float] | None:
        """The entries of a serialised timing cache; None for one of another version or none at all."""
        if not raw:
            return {}
        try:
            document = json.loads(raw)
        except ValueError:
            return None
        return document["entries"] if document["version"] == self.version_text else None

    def model_path(self, call: Call, at: int) -> Path | None:
        """Where a model's weights are looked for: the header of the parser wants the whole path."""
        path = Path(call.text(at)) if call.address(at) else None
        if path is not None and not path.is_absolute():
            self.violations.append(f"the path of a model is relative: `{path}`")
        return path

    def cache_device(self, raw: bytes) -> str:
        return json.loads(raw)["device"] if raw else self.gpu.name

    # -------------------------------------------------------------------------------- the device

    def stream(self, handle: int) -> FakeStream:
        return FakeDevice.stream_by_handle(handle)

    def buffer(self, address: int) -> FakeBuffer:
        return FakeDevice.buffer_at(address)

    def memory(self, address: int, nbytes: int) -> Any:
        """The bytes at an address; an address outside every buffer, or one too near its end, is a broken promise."""
        buffer = self.buffer(address)
        assert nbytes <= buffer.nbytes, f"{nbytes} bytes at {address:#x} overrun the {buffer.nbytes} that are there"
        return buffer.memory()[:nbytes]

    # -------------------------------------------------------------------------------- for tests

    def unanswered(self) -> list[str]:
        """Members that were called and that nobody scripted."""
        found = [self.names.get(key, f"{key[0]} {key[1]} slot {key[2]}") for key, _ in self.puppet.unanswered]
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Nothing was called that is not scripted, no answer broke, nobody broke TensorRT's manners."""
        assert not self.puppet.broken, self.puppet.broken[0]
        assert not self.unanswered(), f"called and not scripted: {self.unanswered()}"
        assert not self.violations, self.violations


def _answer(kind: type[Native], short: str, which: int) -> Callable[[Any, Call], Any] | None:
    """What answers one slot of a member: a method marked for it, or a plain property."""
    for base in kind.__mro__:
        answers = dict(vars(base).get("answers", {}))
        for name, function in vars(base).items():
            if isinstance(function, types.FunctionType):
                answers |= dict.fromkeys(getattr(function, "members", (name,)), function)
        if (found := answers.get(short) or answers.get(f"{short}#{which}")) is not None:
            return found
    name = short.rstrip("=")
    if name in kind.plain:
        if short.endswith("="):
            return lambda obj, call: obj.write(name, call)
        return lambda obj, call: obj.read(name)
    return None
