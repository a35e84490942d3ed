"""Layer information of an engine, as the JSON that `trt.layers` reads."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec
import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.atomic_io import decode_json
from trt_engine.backends.tensorrt.binding import Binding, dtype_name, profile_values
from trt_engine.errors import EngineError, SetupError

log = logging.getLogger(__name__)


def layer_document(binding: Binding, engine: Any) -> dict[str, Any]:
    """The layer information of a deserialized engine, at the first profile's optimum if shapes are dynamic.

    Without shapes a dynamic engine reports no layouts (and, in TensorRT 10, no types), so a context without device memory
    is created for them. `EngineError` if the engine reports nothing.
    """
    trt = binding.trt
    if not hasattr(trt, "EngineInspector"):
        raise SetupError(
            "TensorRT's lean package cannot inspect engines", hint="install the whole package: `pip install tensorrt`"
        )
    inspector = engine.create_engine_inspector()
    if inspector is None:
        raise EngineError("TensorRT returned no inspector for the engine", hint="`-v` shows TensorRT's messages")
    context, values = _optimum_context(binding, engine)
    if context is not None:
        inspector.execution_context = context
        if inspector.execution_context is not None:  # the setter fails silently
            found = _read_document(binding, inspector, engine)
            if found is not None:
                return found
        inspector = engine.create_engine_inspector()  # a new inspector: its context cannot be reset to None
    del context, values  # the context references the values until here
    found = _read_document(binding, inspector, engine)
    if found is None:
        raise EngineError("the engine has no layer information", hint="build it with `-O profiling_verbosity=detailed`")
    return found


def _optimum_context(binding: Binding, engine: Any) -> tuple[Any, list[Array]]:
    """A context at the first profile's optimum without device memory, and the host memory it references; None for static or
    rejected shapes."""
    trt = binding.trt
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    hosted = [name for name in inputs if engine.get_tensor_location(name) == trt.TensorLocation.HOST]
    if not hosted and all(size >= 0 for name in inputs for size in engine.get_tensor_shape(name)):
        return None, []
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if context is None:
        return None, []
    values: list[Array] = []
    for name in inputs:
        try:
            best = tuple(engine.get_tensor_profile_shape(name, 0)[1])
            accepted = context.set_input_shape(name, best)
            if accepted and name in hosted:
                kind = dtype_name(engine.get_tensor_dtype(name))
                values.append(np.array(profile_values(engine, 0, name)[1], kind))
                accepted = context.set_tensor_address(name, values[-1].ctypes.data)
        except (
            RuntimeError,
            IndexError,
            ValueError,
        ):  # no such values; sizes of rank -1, which the bindings give for none
            accepted = False
        if not accepted:
            log.debug("the inspector runs without shapes: `%s` was rejected at its optimum", name)
            return None, []
    return context, values


def _read_document(binding: Binding, inspector: Any, engine: Any) -> dict[str, Any] | None:
    """The whole document; layer by layer if TensorRT's JSON is invalid (names with quotation marks)."""
    text = inspector.get_engine_information(binding.json_format())
    with contextlib.suppress(msgspec.DecodeError, TypeError, AttributeError):
        found = decode_json(text)
        if isinstance(found, dict) and found:
            return found
    layers = []
    for index in range(engine.num_layers):
        part = inspector.get_layer_information(index, binding.json_format())
        if not part:
            continue
        try:
            layers.append(decode_json(part))
        except msgspec.DecodeError:
            layers.append(part.strip())
    return {"Layers": layers} if layers else None
