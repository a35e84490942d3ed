"""What TensorRT-RTX has beside TensorRT, for the scripted one: plans for several GPUs, kernels compiled when they first run.

The texts of refusals about GPUs are the real library's; those of the runtime cache and of deferred weights are not known,
because no machine with an RTX GPU has run them here.
"""

from __future__ import annotations

import ctypes
import json
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any, ClassVar

from bindings.puppet import Call
from bindings.scripted import Answers, ICudaEngine, IExecutionContext, IHostMemory, Native, ScriptedTensorRT, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GPU_BITS = {(7, 5): 0x01, (8, 0): 0x02, (8, 6): 0x04, (8, 9): 0x08, (12, 0): 0x10, (12, 1): 0x20}
LATER = 0x40
VALID, INVALID, UNSUPPORTED_GPU, MALFORMED = 0, 2, 2, 32
"""Of `EngineValidity` and of `EngineInvalidityDiagnostics`."""


def header(version: Sequence[int], facts: Mapping[str, Any], length: int) -> bytes:
    """The 64 bytes a plan begins with, of `length` bytes as a whole."""
    numbers = bytes([*version, 0, 0, 0][:4])
    bits = facts["gpu_bits"]
    return (
        b"vtrt" + struct.pack("<IQQ", 0, 2, length) + numbers + b"vtrt" + struct.pack("<Q", bits) + bytes(16)
        + struct.pack("<Q", facts["model_bytes"])
    )  # fmt: skip


def refusal(world: ScriptedTensorRT, plan: bytes) -> str | None:
    """Why a plan is not for the GPU of this world, as the library says it."""
    (bits,) = struct.unpack_from("<Q", plan, 32)
    here = world.gpu.compute_capability
    if bits & GPU_BITS.get(here, LATER if here > (12, 1) else 0):
        return None
    names = [f"{major}.{minor}" for (major, minor), bit in GPU_BITS.items() if bits & bit]
    shown = " ".join([*names, ">12.0"] if bits & LATER else names)
    return (
        f"Current GPU compute capability {here[0]}.{here[1]} is not supported. Supported compute capabilities: {shown}"
    )


def validity(world: ScriptedTensorRT, raw: bytes) -> tuple[int, int]:
    """What `get_engine_validity` answers: the verdict and its reasons."""
    if len(raw) < 64 or not raw.startswith(b"vtrt"):
        return INVALID, MALFORMED
    return (VALID, 0) if refusal(world, raw) is None else (INVALID, UNSUPPORTED_GPU)


class IRuntimeConfig(Native):
    plain: ClassVar = {"cuda_graph_strategy": 0, "dynamic_shapes_kernel_specialization_strategy": 0}
    answers: ClassVar[Answers] = {
        "get_execution_context_allocation_strategy": lambda self, call: self.allocation,
        "create_runtime_cache": lambda self, call: IRuntimeCache(self.world, self.logger).address,
        "get_runtime_cache": lambda self, call: self.cache.address if self.cache else 0,
    }

    def __init__(self, world: ScriptedTensorRT, logger: int, engine: ICudaEngine) -> None:
        super().__init__(world, logger)
        self.engine = engine
        self.allocation = 0
        self.cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, call: Call) -> int:
        self.allocation = call.int32(0)
        return 0

    def set_runtime_cache(self, call: Call) -> int:
        self.cache = self.world.known(call.address(0))
        return 1


class IRuntimeCache(Native):
    """Kernels compiled on one GPU by one version; anything else is refused and leaves the cache as it was."""

    def __init__(self, world: ScriptedTensorRT, logger: int) -> None:
        super().__init__(world, logger)
        self.kernels: set[str] = set()

    def environment(self) -> list[str]:
        return [self.world.version_text, self.world.gpu.name]

    def serialize(self, call: Call) -> int:
        document = {"environment": self.environment(), "kernels": sorted(self.kernels)}
        return IHostMemory(self.world, json.dumps(document).encode()).address

    def deserialize(self, call: Call) -> int:
        try:
            document = json.loads(ctypes.string_at(call.address(0), call.address(1)))
            if document["environment"] != self.environment():
                raise ValueError("another environment")
        except (ValueError, KeyError, TypeError) as error:
            self.say("WARNING", f"IRuntimeCache::deserialize: the runtime cache is not compatible: {error}")
            return 0
        self.kernels |= set(document["kernels"])
        return 1

    def reset(self, call: Call) -> int:
        self.kernels = set()
        return 1

    def destroyed(self) -> None:
        if any(
            isinstance(item, IExecutionContext) and item.jit and item.jit.cache is self for item in self.world.alive()
        ):
            self.world.violations.append("a runtime cache was destroyed before a context that uses it")


def compile_kernels(context: IExecutionContext, shapes: Mapping[str, Shape] | None) -> None:
    """Compile what no cache holds: the kernels a context has for any shape, or those for these shapes."""
    engine, world = context.engine, context.world
    key = f"{zlib.crc32(engine.facts['model'])}:{'any' if shapes is None else sorted(shapes.items())}"
    cache = context.jit.cache if context.jit is not None else None
    if key in context.kernels:
        return
    if cache is None or key not in cache.kernels:
        world.kernels_compiled.append(key)
        time.sleep(world.compile_s)
    context.kernels.add(key)
    if cache is not None:
        cache.kernels.add(key)


CLASSES: tuple[type[Native], ...] = (IRuntimeConfig, IRuntimeCache)
