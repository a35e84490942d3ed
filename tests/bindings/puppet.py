"""The stand-in for libnvinfer, from Python: which virtual call means which member of the bindings, and who answers it.

The slot of a member is learned by calling it once on every release (`learn`), in a forked child because a call without
an object behind it may crash. Nothing about slots is written down: they moved between majors, and once inside one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTRIES = (
    "create_builder", "create_runtime", "create_refitter", "create_parser", "create_parser_refitter",
    "builder_plugin_registry", "plugin_registry", "init_plugins",
)  # fmt: skip
"""The entry points, in the order of puppet.c."""

LEVELS = ("outer", "impl", "entry")
Key = tuple[str, str, int]
"""Class of the object, `outer` or `impl` table, slot."""
Slots = dict[str, list[Key]]
"""The virtual calls a member makes, in order: `IBuilderConfig.flags`, its setter `IBuilderConfig.flags=`."""

MAX_DIMS = 8


class Dims(ctypes.Structure):
    """A shape as TensorRT lays it out."""

    _fields_ = (("count", ctypes.c_int32), ("sizes", ctypes.c_int64 * MAX_DIMS))


class Weights(ctypes.Structure):
    """Weights as TensorRT lays them out: a type, an address, a number of elements."""

    _fields_ = (("dtype", ctypes.c_int32), ("values", ctypes.c_uint64), ("count", ctypes.c_int64))


class Call(ctypes.Structure):
    """One virtual call, as `puppet.c` writes it down."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("id", ctypes.c_int64),
        ("level", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("args", ctypes.c_uint64 * 5),
        ("floats", ctypes.c_double * 2),
        ("stack", ctypes.POINTER(ctypes.c_uint64)),
        ("by_value", ctypes.c_uint64),
        ("float_answer", ctypes.c_double),
    )

    def int32(self, at: int) -> int:
        return ctypes.c_int32(self.args[at] & 0xFFFFFFFF).value

    def int64(self, at: int) -> int:
        return ctypes.c_int64(self.args[at]).value

    def flag(self, at: int) -> bool:
        return bool(self.args[at] & 0xFF)

    def address(self, at: int) -> int:
        return int(self.args[at])

    def text(self, at: int) -> str:
        return ctypes.string_at(self.args[at]).decode() if self.args[at] else ""

    def dims(self, at: int) -> tuple[int, ...]:
        """A shape given by reference."""
        found = Dims.from_address(self.args[at])
        return tuple(found.sizes[: max(found.count, 0)])

    def weights(self) -> Weights:
        """Weights given by value: they lie on the stack, being wider than two registers."""
        return Weights.from_address(ctypes.addressof(self.stack.contents))


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.POINTER(Call))
Answer = Callable[[Call], Any]


class Puppet:
    """The library, loaded: makes objects and asks `rules` what each virtual call answers."""

    def __init__(self, library: Path) -> None:
        self._native = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._native.puppet_new.restype = ctypes.c_uint64
        self._native.puppet_new.argtypes = (ctypes.c_int64, ctypes.c_int64)
        self.rules: dict[Key, Answer] = {}
        self.entries: dict[str, Answer] = {}
        self.calls: list[tuple[Key, int]] = []
        """Every virtual call with the object's id; forgotten by whoever reads them."""
        self.recording = True
        self.unanswered: list[tuple[Key, int]] = []
        """Calls nobody has an answer for: they got null."""
        self.broken: list[str] = []
        """Exceptions of the answers themselves: the call got null."""
        self._kinds: list[str] = []
        self._made = 0
        self._kept: list[Any] = []
        self._callback = _CALLBACK(self._on)
        self._native.puppet_listen(self._callback)

    def new(self, kind: str) -> tuple[int, int]:
        """The address and the id of a new object of that class."""
        if kind not in self._kinds:
            self._kinds.append(kind)
        self._made += 1
        address = self._native.puppet_new(self._kinds.index(kind), self._made)
        if not address:
            raise MemoryError("the puppet has no room for more objects; one process is meant to make a few thousand")
        return address, self._made

    def keep(self, raw: bytes) -> int:
        """The address of these bytes, a zero behind them, for as long as the process lives."""
        held = ctypes.create_string_buffer(raw, len(raw) + 1)
        self._kept.append(held)
        return ctypes.addressof(held)

    def _on(self, pointer: Any) -> int:
        call: Call = pointer.contents
        try:
            if LEVELS[call.level] == "entry":
                rule: Answer | None = self.entries.get(ENTRIES[call.slot])
                return 0 if rule is None else self._answer(call, rule(call))
            key = (self._kinds[call.kind], LEVELS[call.level], int(call.slot))
            if self.recording:
                self.calls.append((key, int(call.id)))
            rule = self.rules.get(key)
            if rule is None:
                self.unanswered.append((key, int(call.id)))
                return self._answer(call, None)
            return self._answer(call, rule(call))
        except BaseException:
            self.broken.append(traceback.format_exc())
            return self._answer(call, None)

    def _answer(self, call: Call, value: Any) -> int:
        """What the register holds; structs and floats are written where the caller looks for them."""
        if call.by_value:
            made: ctypes.Structure = value if isinstance(value, Weights) else Dims()
            if isinstance(made, Dims):
                sizes = tuple(value or ())
                made.count, made.sizes[: len(sizes)] = (-1 if value is None else len(sizes)), sizes
            ctypes.memmove(call.by_value, ctypes.addressof(made), ctypes.sizeof(made))
            return 0
        if isinstance(value, float):
            call.float_answer = value
            return 0
        if isinstance(value, str):
            return self.keep(value.encode())
        return 0 if value is None else int(value) & 0xFFFF_FFFF_FFFF_FFFF


def virtual(obj: int, slot: int, result: Any, *arguments: tuple[Any, Any]) -> Any:
    """Call a virtual method of an object the bindings gave us, a Python subclass behind a trampoline: (type, value)..."""
    table = ctypes.c_uint64.from_address(obj).value
    function = ctypes.c_uint64.from_address(table + 8 * slot).value
    prototype = ctypes.CFUNCTYPE(result, ctypes.c_uint64, *(kind for kind, _ in arguments))
    return prototype(function)(obj, *(value for _, value in arguments))


# ------------------------------------------------------------------------------------------------ learning the slots

_MADE_BY = (
    ("IBuilderConfig", "Builder", "create_builder_config", ()),
    ("INetworkDefinition", "Builder", "create_network", (0,)),
    ("IOptimizationProfile", "Builder", "create_optimization_profile", ()),
    ("IHostMemory", "Builder", "build_serialized_network", ("INetworkDefinition", "IBuilderConfig")),
    ("ITimingCache", "IBuilderConfig", "create_timing_cache", (b"",)),
    ("ICudaEngine", "Runtime", "deserialize_cuda_engine", (b"plan",)),
    ("IExecutionContext", "ICudaEngine", "create_execution_context", ()),
    ("EngineInspector", "ICudaEngine", "create_engine_inspector", ()),
    ("ISerializationConfig", "ICudaEngine", "create_serialization_config", ()),
    ("IRuntimeConfig", "ICudaEngine", "create_runtime_config", ()),
    ("IRuntimeCache", "IRuntimeConfig", "create_runtime_cache", ()),
    ("ITensor", "INetworkDefinition", "get_input", (0,)),
    ("ILayer", "INetworkDefinition", "get_layer", (0,)),
    ("IParserError", "OnnxParser", "get_error", (0,)),
    ("IPluginRegistry", "Builder", "get_plugin_registry", ()),
)
"""Which member makes an object of which class, in an order in which the arguments exist: strings name classes."""

_COUNTED = ("IBuilderConfig.plugins_to_serialize", "IParserError.local_function_stack")
"""Members that ask for a number first: what they call then shows when the number is not zero."""

_BOUND_AS = {"IParserError": "ParserError"}


def learned(library: Path, trt: Any, folder: Path) -> Slots:
    """The slots of these bindings; learned now, in a process that ends, if `folder` does not hold them yet."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + library.read_bytes()).hexdigest()[:16]
    path = folder / f"slots-{digest}.json"
    if not path.exists():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                found = _Learner(library, trt).learn()
                aside = path.with_suffix(f".{os.getpid()}")
                aside.write_text(json.dumps(found))
                aside.replace(path)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status or not path.exists():
            raise RuntimeError(f"the slots of {trt.__version__} could not be learned (status {status})")
    return {name: [tuple(key) for key in keys] for name, keys in json.loads(path.read_text()).items()}


class _Learner:
    """Calls every member of every class once and writes down where it lands."""

    def __init__(self, library: Path, trt: Any) -> None:
        self._trt = trt
        self._puppet = Puppet(library)
        self._objects: dict[str, Any] = {}

    def learn(self) -> Slots:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what children say as they crash is no news
        self._make_objects()
        found: Slots = {}
        for kind, obj in self._objects.items():
            bound = getattr(self._trt, _BOUND_AS.get(kind, kind))
            for name in dir(bound):
                if not name.startswith("__"):
                    found |= self._member(kind, obj, name, getattr(bound, name))
        for name in _COUNTED:
            kind, _, short = name.partition(".")
            count = found[name][0]
            self._puppet.rules[count] = lambda call: 1
            found[name] = self._landing(kind, lambda kind=kind, short=short: self._read(kind, short))
        engine = found["IExecutionContext.engine"][0]
        self._puppet.rules[engine] = lambda call: self._puppet.new("ICudaEngine")[0]
        landed = self._landing("IExecutionContext", self._objects["IExecutionContext"].infer_shapes)
        found["IExecutionContext.infer_shapes"] = [key for key in landed if key != engine]  # it asks the engine's first
        found["IHostMemory.data"] = self._data_of_host_memory(found)
        found["ICudaEngine.get_tensor_profile_values"] = self._values_of_a_profile(found)
        return found

    def _make_objects(self) -> None:
        puppet, trt = self._puppet, self._trt
        logger = self._objects["ILogger"] = trt.Logger(trt.Logger.ERROR)
        for entry, kind in (
            ("create_builder", "Builder"), ("create_runtime", "Runtime"), ("create_parser", "OnnxParser"),
            ("create_refitter", "Refitter"), ("create_parser_refitter", "OnnxParserRefitter"),
        ):  # fmt: skip
            puppet.entries[entry] = lambda call, kind=kind: puppet.new(kind)[0]
        self._objects |= {"Builder": trt.Builder(logger), "Runtime": trt.Runtime(logger)}
        for kind, owner, member, given in _MADE_BY:
            if kind == "ITensor":
                self._objects["OnnxParser"] = trt.OnnxParser(self._objects["INetworkDefinition"], logger)
            if owner not in self._objects or not hasattr(self._objects[owner], member):
                continue
            arguments = [self._objects[item] if isinstance(item, str) else item for item in given]
            puppet.calls.clear()
            getattr(self._objects[owner], member)(*arguments)
            key = [key for key, _ in puppet.calls if key[0] == owner][-1]
            puppet.rules[key] = lambda call, kind=kind: puppet.new(kind)[0]
            self._objects[kind] = getattr(self._objects[owner], member)(*arguments)
        engine = self._objects["ICudaEngine"]
        self._objects["Refitter"] = trt.Refitter(engine, logger)
        if hasattr(trt, "OnnxParserRefitter"):
            self._objects["OnnxParserRefitter"] = trt.OnnxParserRefitter(self._objects["Refitter"], logger)
        del self._objects["ILogger"]
        self._logger = logger

    def _member(self, kind: str, obj: Any, name: str, member: Any) -> Slots:
        if isinstance(member, property):
            found = {}
            if member.fget is not None:
                found[f"{kind}.{name}"] = self._landing(kind, lambda: getattr(obj, name))
            if member.fset is not None:
                for types in _overloads(member.fset.__doc__ or "")[-1:] or [["None"]]:
                    found[f"{kind}.{name}="] = self._landing(
                        kind, lambda types=types: setattr(obj, name, self._sample(types[-1]))
                    )
            return {name: keys for name, keys in found.items() if keys}
        if not callable(member):
            return {}
        keys: list[Key] = []
        for types in _overloads(member.__doc__ or ""):
            landed = self._landing(
                kind, lambda types=types: getattr(obj, name)(*(self._sample(item) for item in types[1:]))
            )
            keys += [key for key in landed if key not in keys]
        return {f"{kind}.{name}": keys} if keys else {}

    def _read(self, kind: str, short: str) -> Any:
        value = getattr(self._objects[kind], short)
        return value() if callable(value) else value

    def _landing(self, kind: str, act: Callable[[], Any]) -> list[Key]:
        """The virtual calls of one call, made in a child that may crash: it writes each down before it is answered."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            self._puppet.calls = _Pipe(write)  # type: ignore[assignment]
            with contextlib.suppress(BaseException):
                signal.setitimer(signal.ITIMER_PROF, 5)
                signal.alarm(120)
                act()
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            lines = [json.loads(line) for line in pipe]
        os.waitpid(child, 0)
        seen: list[Key] = []
        for owner, level, slot in lines:
            if owner == kind and (owner, level, slot) not in seen:
                seen.append((owner, level, slot))
        return seen

    def _values_of_a_profile(self, found: Slots) -> list[Key]:
        """Where it lands for an input that holds sizes, after it has asked whether this is one and of what shape."""
        engine = self._objects["ICudaEngine"]
        asked = [
            found[f"ICudaEngine.{name}"][0] for name in ("is_shape_inference_io", "get_tensor_mode", "get_tensor_shape")
        ]
        for key, answer in zip(asked, (1, 1, (2,)), strict=True):
            self._puppet.rules[key] = lambda call, answer=answer: answer
        landed = self._landing("ICudaEngine", lambda: engine.get_tensor_profile_values(0, "x"))
        return [key for key in landed if key not in asked]

    def _data_of_host_memory(self, found: Slots) -> list[Key]:
        """The one slot of IHostMemory only its buffer uses."""
        memory = self._objects["IHostMemory"]
        landed = self._landing("IHostMemory", lambda: bytes(memoryview(memory)))
        others = {key for name, keys in found.items() if name.startswith("IHostMemory.") for key in keys}
        return [key for key in landed if key not in others]

    def _sample(self, kind: str) -> Any:
        """Any value of a type the bindings name in a signature."""
        trt, short = self._trt, kind.split("[")[0].split(".")[-1].split("::")[-1].strip(" |")
        if short in self._objects:
            return self._objects[short]
        plain = {"SupportsInt": 1, "int": 1, "SupportsIndex": 1, "SupportsFloat": 1.0, "float": 1.0, "str": "x",
                 "bool": True, "buffer": b"x", "Buffer": b"x", "bytes": b"x", "tuple": (1, 2), "capsule": None,
                 "ILogger": self._logger}  # fmt: skip
        if short in plain:
            return plain[short]
        if short == "Dims":
            return trt.Dims([2, 3])
        if short == "Weights":
            return trt.Weights(trt.float32)
        if short in ("Sequence", "List", "list", "Iterable"):
            return ["x"] if "str" in kind else [1]
        bound = getattr(trt, short, None)
        if bound is None:
            return None
        if hasattr(bound, "__members__"):
            return next(iter(bound.__members__.values()))
        try:
            return bound()
        except Exception:
            return None


def _overloads(doc: str) -> list[list[str]]:
    """The parameters' types of each overload a docstring shows, the object itself included."""
    made = []
    for inner in re.findall(r"^(?:\d+\. )?\w*\((.*)\) -> ", doc, re.MULTILINE):
        parts = re.split(r", (?=\w+: )", inner)
        made.append([part.split(": ", 1)[1].split(" = ")[0].strip() for part in parts if ": " in part])
    return made


class _Pipe:
    """A list of calls that leaves the process as it grows."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def append(self, item: tuple[Key, int]) -> None:
        os.write(self._descriptor, json.dumps(item[0]).encode() + b"\n")
