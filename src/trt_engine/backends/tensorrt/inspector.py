"""What an engine tells of its own layers, as the JSON that `plans.layers` reads."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import tensorrt as trt

from trt_engine.backends.tensorrt import compat
from trt_engine.errors import EngineError, SetupError

__all__ = ["layer_document"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


def layer_document(engine: Any, profile: int = 0) -> dict[str, Any]:
    """The layer information of a deserialised engine: of its layers at the profile's optimum, where shapes are dynamic.

    Without shapes an engine with dynamic ones tells no layouts (and, in TensorRT 10, no types); a context that holds no
    device memory is made for them. `EngineError` where the engine tells nothing at all.
    """
    if not hasattr(trt, "EngineInspector"):
        raise SetupError(
            "TensorRT's lean package cannot inspect engines", hint="install the whole package: `pip install tensorrt`"
        )
    inspector = engine.create_engine_inspector()
    if inspector is None:
        raise EngineError("TensorRT gave no inspector for the engine", hint="`-v` shows what TensorRT said")
    context, values = _at_the_optimum(engine, profile)
    if context is not None:
        inspector.execution_context = context
        if inspector.execution_context is not None:  # the setter keeps quiet when it fails
            found = _read(inspector, engine)
            if found is not None:
                return found
        inspector = engine.create_engine_inspector()  # a fresh one: None cannot be set where a context was
    del context, values  # the context holds the values' addresses until now
    found = _read(inspector, engine)
    if found is None:
        raise EngineError(
            "the engine tells nothing of its layers", hint="build it with `-O profiling_verbosity=detailed`"
        )
    return found


def _at_the_optimum(engine: Any, profile: int) -> tuple[Any, list[Array]]:
    """A context with the shapes of the profile's optimum and no device memory, and the host memory it has the addresses of;
    None where shapes are fixed, or refused."""
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
            best = tuple(engine.get_tensor_profile_shape(name, profile)[1])
            accepted = context.set_input_shape(name, best)
            if accepted and name in hosted:
                kind = compat.dtype_name(engine.get_tensor_dtype(name))
                values.append(np.array(compat.profile_values(engine, profile, name)[1], kind))
                accepted = context.set_tensor_address(name, values[-1].ctypes.data)
        except (
            RuntimeError,
            IndexError,
            ValueError,
        ):  # no such values; sizes of rank -1, which the bindings give for none
            accepted = False
        if not accepted:
            log.debug("the inspector goes without shapes: `%s` was refused at its optimum", name)
            return None, []
    return context, values


def _read(inspector: Any, engine: Any) -> dict[str, Any] | None:
    """The whole document; layer by layer where TensorRT's JSON is broken (names with quotation marks have broken it)."""
    text = inspector.get_engine_information(compat.json_information())
    with contextlib.suppress(msgspec.DecodeError, TypeError, AttributeError):
        found = msgspec.json.decode(text.encode())
        if isinstance(found, dict) and found:
            return found
    layers = []
    for index in range(engine.num_layers):
        part = inspector.get_layer_information(index, compat.json_information())
        if not part:
            continue
        try:
            layers.append(msgspec.json.decode(part.encode()))
        except msgspec.DecodeError:
            layers.append(part.strip())
    return {"Layers": layers} if layers else None
