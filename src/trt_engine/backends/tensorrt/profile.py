"""TensorRT's layer times: `IProfiler` on a separate context, reported after each inference."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trt_engine.atomic_io import write_atomic
from trt_engine.backends.tensorrt.context import LayerProfiler, TensorRtContext
from trt_engine.backends.tensorrt.run import TensorRtRuntime, TensorRtSession
from trt_engine.config.profiles import check_shapes, select_profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Stream
from trt_engine.device.host import numpy_dtype
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError
from trt_engine.records.profile import LayerProfile
from trt_engine.tensors import Tensors
from trt_engine.trt.layer_timing import layer_rows, merge_runs
from trt_engine.trt.layers import LayerInfo

TIMES_FILE = "tensorrt-layers.json"
"""The raw times: a list of `[layer, ms]` for each inference."""


def profile(
    engine: Engine,
    feeds: Tensors,
    config: RuntimeConfig,
    *,
    inferences: int,
    warmup: int,
    keep: Path | None,
    runtime: TensorRtRuntime | None = None,
) -> LayerProfile:
    """The times of the engine's layers by the device's clock, in `inferences` runs after `warmup` untimed ones."""
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    profiles = engine.passport.profiles
    number = (
        select_profile(profiles, lambda span, index: check_shapes(engine.signature, shapes, span, index))
        if profiles
        else 0
    )
    session = (runtime or TensorRtRuntime()).load(engine, config)
    times = LayerProfiler()
    found: list[list[tuple[str, float]]] = []
    try:
        layers, notes = _inspect_layers(session)
        with _prepared_context(session, number, feeds) as (context, stream):
            for _ in range(max(1, warmup)):  # the first one includes one-time setup
                context.enqueue(stream)
                stream.synchronize()
            context.profile_layers(times)
            walls = []
            for _ in range(inferences):
                started = time.perf_counter()
                context.enqueue(stream)
                stream.synchronize()
                walls.append((time.perf_counter() - started) * 1e3)
                found.append(times.report())
            context.profile_layers(None)
        device = session.device.name
    finally:
        session.close()
    if not any(found):
        raise EngineError(
            f"TensorRT reported no layer times of `{engine.path.name}`",
            hint="build it with `-O profiling_verbosity=layer_names_only` or `detailed`",
        )
    raw = None
    if keep is not None:
        raw = str(write_atomic(keep / TIMES_FILE, msgspec.json.encode(found)))
    at_optimum = not profiles or all(
        name not in profiles[number].ranges or profiles[number].ranges[name].opt == shape
        for name, shape in shapes.items()
    )
    return LayerProfile(
        rows=layer_rows(merge_runs(found), layers, device=device, same_shapes=at_optimum and number == 0),
        inferences=inferences,
        instrument=f"{session.binding.module} IProfiler {session.binding.version_text}",
        wall_ms=statistics.median(walls),
        raw=raw,
        notes=notes,
        clock="device",
    )


def _inspect_layers(session: TensorRtSession) -> tuple[tuple[LayerInfo, ...], tuple[str, ...]]:
    """The inspector's layers; empty if it fails, as times are useful alone."""
    try:
        found = session.layers()
    except (EngineError, SetupError) as error:
        return (), (f"the layers have names alone: {error.message}",)
    if not any(layer.is_detailed for layer in found):
        return found, ("the engine was built without `-O profiling_verbosity=detailed`: layer details are unknown",)
    return found, ()


@contextmanager
def _prepared_context(
    session: TensorRtSession, profile: int, feeds: Tensors
) -> Iterator[tuple[TensorRtContext, Stream]]:
    """A context with the feeds on the device; frees everything on exit."""
    with ExitStack() as stack:
        device = session.device
        context = session.create_context(profile)
        stack.callback(context.close)
        for name in context.host_inputs:
            context.set_values(name, feeds[name])
        outputs = context.prepare({name: tuple(value.shape) for name, value in feeds.items()})
        stream = device.stream()
        stack.callback(stream.close)
        buffers: dict[str, Any] = {}
        held = []
        for spec in session.signature.inputs:
            host = np.ascontiguousarray(feeds[spec.name]).reshape(np.shape(feeds[spec.name]))
            buffers[spec.name] = made = device.allocate(max(1, host.nbytes))
            stack.callback(made.close)
            device.upload(host, made, stream)
            held.append(host)
        for spec in session.signature.outputs:
            shape = outputs[spec.name]
            if all(size >= 0 for size in shape):
                nbytes = math.prod(shape) * numpy_dtype(spec.dtype).itemsize
                buffers[spec.name] = made = device.allocate(max(1, nbytes))
                stack.callback(made.close)
        context.bind(buffers)
        stream.synchronize()
        try:
            yield context, stream
        finally:
            stream.synchronize()  # after Ctrl-C too: never free memory in use by the device
            held.clear()
