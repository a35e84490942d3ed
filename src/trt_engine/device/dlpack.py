"""Zero-copy exchange of arrays with other libraries: `Lent` is imported, `DeviceArray` is exported.

Structures follow dlpack.h 1.1. No array library is imported.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from trt_engine.device import Buffer
from trt_engine.device.foreign import library_of
from trt_engine.errors import UsageError

DEFAULT_STREAM = 1
"""CUDA's legacy default stream in the array API standard; None means the same."""
CPU, CUDA, CUDA_HOST, FAKE, CUDA_MANAGED = 1, 2, 3, 12, 13  # DLDeviceType; FAKE is kDLExtDev
ON_HOST = (CPU, CUDA_HOST)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# DLDataTypeCode and bits by numpy's and ml_dtypes' names
_CODES = {
    "bool": (6, 8), "bfloat16": (4, 16), "complex64": (5, 64), "complex128": (5, 128),
    "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
} | {
    f"{kind}{bits}": (code, bits)
    for code, kind, widths in ((0, "int", (8, 16, 32, 64)), (1, "uint", (8, 16, 32, 64)), (2, "float", (16, 32, 64)))
    for bits in widths
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
_TYPESTR = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}  # supported by `__cuda_array_interface__`

_api = ctypes.pythonapi
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", _api))
_raw_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_is_valid_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)


@dataclass(frozen=True, slots=True)
class ImportedArray:
    """The memory of another library's array, kept alive by this object."""

    pointer: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    device_type: int
    device_id: int | None
    """None if unknown (`__cuda_array_interface__`)."""
    stream: int | None = None
    """The owner's stream, if the consumer must order its work after it (`__cuda_array_interface__`)."""
    owner: Any = field(default=None, repr=False)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Bytes for numpy; host memory only."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "strides": None}


def import_array(array: Any, stream: int | None) -> ImportedArray:
    """Import an array with DLPack or `__cuda_array_interface__`; `stream` is the consumer's stream."""
    if isinstance(array, DeviceArray):
        kind, number = array.__dlpack_device__()
        return ImportedArray(array.buffer.pointer, array.nbytes, array.dtype, array.shape, kind, number, None, array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        kind, number = (int(item) for item in array.__dlpack_device__())
        asked = {"stream": stream} if kind in (CUDA, CUDA_MANAGED) and stream is not None else {}
        try:
            return _from_capsule(array.__dlpack__(**asked), int(number))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"an array of {type(array).__name__} cannot be exported: {error}") from error
    if hasattr(array, "__cuda_array_interface__"):
        return _from_cuda_array_interface(array)
    raise UsageError(f"a {type(array).__name__} does not support DLPack", hint="pass an array of torch, cupy or jax")


def is_read_only(array: Any) -> bool:
    """Whether numpy's or the CUDA array interface forbids writing to this array."""
    if isinstance(array, DeviceArray) or library_of(type(array)) is not None:  # of torch or CuPy
        return False
    if hasattr(array, "flags") and hasattr(array.flags, "writeable"):
        return not array.flags.writeable
    return bool(getattr(array, "__cuda_array_interface__", {"data": (0, False)})["data"][1])


def _from_capsule(capsule: Any, number: int) -> ImportedArray:
    """The array of a capsule, which is kept and not renamed: its destructor releases the memory."""
    name = _capsule_name(capsule)
    if name == b"dltensor":
        tensor = _Managed.from_address(_capsule_pointer(capsule, name)).tensor
    elif name == b"dltensor_versioned":
        tensor = _Versioned.from_address(_capsule_pointer(capsule, name)).tensor
    else:
        raise UsageError(
            f"a capsule `{(name or b'').decode()}` is not an array", hint="DLPack capsules are named `dltensor`"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_c_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise UsageError("a strided array cannot be used in place", hint="make it contiguous first")
    dtype = _NAMES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise UsageError(
            f"DLPack type ({tensor.code}, {tensor.bits}, {tensor.lanes}) is not supported",
            hint="numbers of 8 to 64 bits are",
        )
    nbytes = math.prod(shape) * tensor.bits // 8
    pointer = (tensor.data or 0) + tensor.byte_offset
    return ImportedArray(pointer, nbytes, dtype, shape, tensor.device_type, tensor.device_id, None, capsule)


def _is_c_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    """Whether strides (in elements) are C-contiguous; dimensions of size 1 may have any stride."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _from_cuda_array_interface(array: Any) -> ImportedArray:
    described = array.__cuda_array_interface__
    shape, typestr = tuple(described["shape"]), described["typestr"]
    name = next((name for name, code in _CODES.items() if _typestr(code) in (typestr, "|" + typestr[1:])), None)
    if name is None:
        raise UsageError(f"array type `{typestr}` is not supported", hint="numbers of 8 to 64 bits are")
    size = _CODES[name][1] // 8
    strides = described.get("strides")
    if strides is not None and not _is_c_contiguous(shape, [item // size for item in strides]):
        raise UsageError("a strided array cannot be used in place", hint="make it contiguous first")
    number = getattr(getattr(array, "device", None), "id", None)
    pointer = described["data"][0] or 0
    return ImportedArray(pointer, math.prod(shape) * size, name, shape, CUDA, number, described.get("stream"), array)


def _typestr(code: tuple[int, int]) -> str | None:
    kind, bits = code
    return None if kind not in _TYPESTR else f"{'|' if bits == 8 else '<'}{_TYPESTR[kind]}{bits // 8}"


# -------------------------------------------------------------------------------------------------- export


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceArray:
    """A buffer as an array with dtype, shape, DLPack and `__cuda_array_interface__`.

    It keeps the buffer alive until the buffer is closed.
    """

    buffer: Buffer
    dtype: str
    shape: tuple[int, ...]
    device: tuple[int, int]
    """DLPack device type and index."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _CODES[self.dtype][1] // 8

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(
        self, *, stream: Any = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None, **_: Any
    ) -> Any:
        """A capsule in the layout before DLPack 1.0, which every library reads.

        `stream` is the consumer's stream (array API standard); the buffer records it.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.device):
            raise BufferError("a buffer is exported in place, without copies")
        if self.device[0] == CUDA and (stream is None or (isinstance(stream, int) and stream < 0)):
            stream = DEFAULT_STREAM  # -1 means no wait, the reading stream is unknown
        if isinstance(stream, int) and stream > 0:
            self.buffer.external_streams.add(stream)
        return _export_capsule(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = _typestr(_CODES[self.dtype])
        if self.device[0] != CUDA or typestr is None:
            raise AttributeError(f"an array of {self.dtype} on device type {self.device[0]} supports only DLPack")
        self.buffer.external_streams.add(DEFAULT_STREAM)  # the reading stream is unknown
        return {
            "version": 3, "shape": self.shape, "typestr": typestr, "strides": None, "stream": None,
            "data": (self.buffer.pointer if self.nbytes else 0, False),
        }  # fmt: skip


def device_array(
    buffer: Buffer, dtype: str, shape: tuple[int, ...] | None, device_type: int, number: int
) -> DeviceArray:
    """The first bytes of `buffer` as an array, or the whole buffer as a vector."""
    if dtype not in _CODES:
        raise UsageError(f"an array of {dtype} cannot be exported", hint=f"these can: {', '.join(_CODES)}")
    if shape is None:
        shape = (buffer.nbytes * 8 // _CODES[dtype][1],)
    made = DeviceArray(buffer, dtype, tuple(shape), (device_type, number))
    if made.nbytes > buffer.nbytes:
        raise UsageError(
            f"an array of {made.shape} {dtype} takes {made.nbytes} bytes, the buffer has {buffer.nbytes}",
            hint="a larger buffer",
        )
    return made


_exports: dict[int, tuple[Any, ...]] = {}
_export_ids = itertools.count(1)


def _export_capsule(array: DeviceArray) -> Any:
    numbers = ctypes.c_int64 * max(len(array.shape), 1)
    shape = numbers(*array.shape)
    strides = numbers(*(math.prod(array.shape[at + 1 :]) for at in range(len(array.shape))))
    code, bits = _CODES[array.dtype]
    managed = _Managed()
    managed.tensor = _Tensor(
        array.buffer.pointer if array.nbytes else 0, *array.device, len(array.shape), code, bits, 1,
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed.context = next(_export_ids)
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    _exports[managed.context] = (managed, shape, strides, array)
    return _new_capsule(ctypes.addressof(managed), b"dltensor", ctypes.cast(_destructor, ctypes.c_void_p).value)


# Dependencies are default arguments: these may run after module teardown.
def _release_export(managed: int, lent: dict[int, tuple[Any, ...]] = _exports, kind: Any = _Managed) -> None:
    lent.pop(kind.from_address(managed).context, None)


def _destroy_capsule(
    capsule: int, valid: Any = _is_valid_capsule, pointer: Any = _raw_capsule_pointer, forget: Any = _release_export
) -> None:
    if valid(capsule, b"dltensor"):  # not consumed
        forget(pointer(capsule, b"dltensor"))


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release_export)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy_capsule)

for _thunk in (_deleter, _destructor):  # other libraries may call them at interpreter exit
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_thunk))
