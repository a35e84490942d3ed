"""TensorRT's own layer times: `IProfiler` on a context of its own, its report asked for after each inference."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trt_engine.backends.tensorrt import compat
from trt_engine.backends.tensorrt.context import LayerTimes, TensorRtContext
from trt_engine.backends.tensorrt.run import TensorRtRuntime, TensorRtSession
from trt_engine.config import RuntimeConfig, check_shapes, first_fitting
from trt_engine.device import Stream
from trt_engine.device.host import numpy_dtype
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError
from trt_engine.files import write_whole
from trt_engine.plans.layer_times import over, rows
from trt_engine.plans.layers import LayerInfo
from trt_engine.tensors import Tensors
from trt_engine.traces import LayerProfile

__all__ = ["TIMES", "profile"]

log = logging.getLogger(__name__)

TIMES = "tensorrt-layers.json"
"""The raw times: a list of `[layer, ms]` for each inference."""


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """The times of the engine's layers by the device's clock, in `inferences` runs after `warmup` that are not looked at."""
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    profiles = engine.passport.profiles
    number = (
        first_fitting(profiles, lambda span, index: check_shapes(engine.signature, shapes, span, index))
        if profiles
        else 0
    )
    session = TensorRtRuntime().load(engine, config)
    times = LayerTimes()
    found: list[list[tuple[str, float]]] = []
    try:
        layers, notes = _layers(session)
        with _ready(session, number, feeds) as (context, stream):
            for _ in range(max(1, warmup)):  # the first one sets things up that no later one pays for
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
            f"TensorRT told no layer times of `{engine.path.name}`",
            hint="build it with `-O profiling_verbosity=layer_names_only` or `detailed`",
        )
    raw = None
    if keep is not None:
        raw = str(write_whole(keep / TIMES, msgspec.json.encode(found)))
    at_optimum = not profiles or all(
        name not in profiles[number].ranges or profiles[number].ranges[name].opt == shape
        for name, shape in shapes.items()
    )
    return LayerProfile(
        rows=rows(over(found), layers, device=device, at_these_shapes=at_optimum and number == 0),
        inferences=inferences,
        instrument=f"tensorrt IProfiler {compat.version_text()}",
        wall_ms=statistics.median(walls),
        raw=raw,
        notes=notes,
        clock="device",
    )


def _layers(session: TensorRtSession) -> tuple[tuple[LayerInfo, ...], tuple[str, ...]]:
    """What the inspector says of the layers; times are worth having without it."""
    try:
        found = session.layers()
    except (EngineError, SetupError) as error:
        return (), (f"the layers have names alone: {error.message}",)
    if not any(layer.detailed for layer in found):
        return found, (
            "the engine was built without `-O profiling_verbosity=detailed`: what a layer is made of is not told",
        )
    return found, ()


@contextmanager
def _ready(session: TensorRtSession, profile: int, feeds: Tensors) -> Iterator[tuple[TensorRtContext, Stream]]:
    """A context with the feeds on the device; everything is given back in the end."""
    with ExitStack() as stack:
        device = session.device
        context = session.context(profile)
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
            stream.synchronize()  # after Ctrl-C too: nothing is freed under a device at work
            held.clear()
