"""NumPy arrays as `OrtValue`s and back, for the dtypes that NumPy lacks too."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from trt_engine.arrayfiles import Array
from trt_engine.backends.onnxruntime import session
from trt_engine.tensors import Tensors, TensorSpec, dtype


def is_byte_sized(name: str) -> bool:
    """Whether elements occupy whole bytes."""
    return name != "string" and dtype(name).bits >= 8


def run_interruptibly(loaded: ort.InferenceSession, names: Sequence[str], feeds: Any) -> Sequence[Any]:
    return session.run_interruptibly(lambda options: list(loaded.run(names, feeds, options)))


def as_contiguous(array: Any) -> Array:
    """The array made C-contiguous; scalars keep their shape."""
    return np.ascontiguousarray(array).reshape(np.shape(array))


def is_numpy_dtype(name: str) -> bool:
    return not hasattr(ml_dtypes, name)


def to_ort_value(spec: TensorSpec, array: Any) -> Any:
    """The OrtValue of a feed; dtypes numpy lacks are passed as bits."""
    if (given := np.asarray(array)).dtype.kind in "OSU":
        return _string_value(given)
    if is_numpy_dtype(spec.dtype):
        return ort.OrtValue.ortvalue_from_numpy(as_contiguous(array))
    kind = dtype(spec.dtype)
    raw = np.ascontiguousarray(array).reshape(-1)
    if kind.bits < 8:
        raw = _pack_bits(raw, kind.bits)
    whole = raw.view(f"u{raw.dtype.itemsize}").reshape(np.shape(array))
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(whole, kind.onnx)


def _string_value(array: Array) -> Any:
    """The OrtValue of strings, as the output of a constant graph: ONNX Runtime makes none from numpy's strings."""
    texts = [value if isinstance(value, bytes) else str(value).encode() for value in array.reshape(-1).tolist()]
    graph = helper.make_graph(
        [],
        "strings",
        [],
        [helper.make_tensor_value_info("y", TensorProto.STRING, array.shape)],
        [TensorProto(name="y", data_type=TensorProto.STRING, dims=array.shape, string_data=texts)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4  # no threads
    loaded = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return loaded.run_with_ort_values(["y"], {})[0]


def run_arrays(loaded: ort.InferenceSession, names: Sequence[str], feeds: Tensors) -> list[Any]:
    """The outputs for arrays of any dtype; raises ONNX Runtime's exceptions. Interruptible by Ctrl-C."""
    if all(is_numpy_dtype(array.dtype.name) for array in feeds.values()):
        return list(run_interruptibly(loaded, list(names), dict(feeds)))
    given = {name: to_ort_value(TensorSpec(name, array.dtype.name, ()), array) for name, array in feeds.items()}
    values = session.run_interruptibly(lambda options: loaded.run_with_ort_values(list(names), given, options))
    return [to_numpy(TensorSpec("", dtype(value.element_type()).name, ()), value) for value in values]


def _pack_bits(values: Array, bits: int) -> Array:
    """Pack sub-byte elements, low bits first, at the start of an array of one byte per element."""
    each = 8 // bits
    parts = np.zeros((-(-values.size // each), each), np.uint8)
    parts.reshape(-1)[: values.size] = values.view(np.uint8) & (1 << bits) - 1
    whole = np.zeros(values.size, np.uint8)
    whole[: len(parts)] = np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=1)
    return whole


def to_numpy(spec: TensorSpec, value: Any) -> Array:
    """A numpy array of an OrtValue, owned by the caller."""
    if is_numpy_dtype(spec.dtype):
        return np.asarray(value.numpy())
    kind, shape = dtype(spec.dtype), tuple(value.shape())
    wanted: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spec.dtype))
    raw = np.frombuffer(ctypes.string_at(value.data_ptr(), kind.nbytes(shape)), np.uint8)
    if kind.bits < 8:
        parts = raw[:, None] >> np.arange(0, 8, kind.bits, dtype=np.uint8) & (1 << kind.bits) - 1
        flat = parts.reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
        if spec.dtype.startswith("int"):
            sign = 1 << kind.bits - 1
            signed: Array = ((flat.astype(np.int8) ^ sign) - sign).astype(wanted)
            return signed.reshape(shape)
        return np.ascontiguousarray(flat).view(wanted).reshape(shape)
    return raw.view(wanted).reshape(shape).copy()
