"""Imports and calls of a pickle, read from its opcodes without running them.

`read_pickle` follows the stack and the memo as the unpickler does and collects every global (module and name).
`conversion.torch.archive_check` compares them with two exact lists: what tensors, their containers and NumPy arrays need.
"""

from __future__ import annotations

import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, BinaryIO

from trt_engine.format import shorten_middle
from trt_engine.limits import PICKLE_OPCODES


def _pairs(module: str, names: str) -> frozenset[tuple[str, str]]:
    return frozenset((module, name) for name in names.split())


_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
_COMPLEX = "ComplexDouble ComplexFloat"
_QUANTISED = "QInt8 QInt32 QUInt8 QUInt2x4 QUInt4x2"
_DTYPES = (
    "bfloat16 bool complex32 complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float4_e2m1fn_x2 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "bits8 bits16 bits1x8 bits2x4 bits4x2 qint8 qint32 quint8 quint2x4 quint4x2 "
    "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
)


def _of_types(ending: str, names: str = _TYPES) -> str:
    return " ".join(f"{name}{ending}" for name in names.split())


TENSOR_GLOBALS: frozenset[tuple[str, str]] = frozenset().union(
    _pairs("collections", "OrderedDict Counter"),
    _pairs("builtins", "bytearray complex set"),
    _pairs("_codecs", "encode"),
    _pairs("torch", f"{_DTYPES} {_of_types('Storage')} {_of_types('Tensor')}"),
    _pairs("torch", f"{_of_types('Storage', _COMPLEX)} {_of_types('Storage', _QUANTISED)}"),
    _pairs("torch", "Size Tensor device per_channel_affine per_channel_affine_float_qparams per_channel_symmetric"),
    _pairs("torch", "per_tensor_affine per_tensor_symmetric"),
    _pairs("torch.cuda", f"{_of_types('Storage')} {_of_types('Storage', _COMPLEX)} {_of_types('Tensor')}"),
    _pairs("torch.storage", "TypedStorage UntypedStorage"),
    _pairs("torch.nn.parameter", "Parameter"),
    _pairs("torch.serialization", "_get_layout"),
    _pairs("torch._tensor", "_rebuild_from_type_v2"),
    _pairs(
        "torch._utils",
        "_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor _rebuild_tensor _rebuild_tensor_v2 "
        "_rebuild_tensor_v3 _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor "
        "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor",
    ),
)  # fmt: skip
"""Module and name of what `torch.save` writes for tensors and their containers: part of PyTorch's own list."""
NUMPY_GLOBALS: frozenset[tuple[str, str]] = frozenset().union(
    _pairs("numpy", "dtype ndarray"),
    *(_pairs(module, "_reconstruct scalar") for module in ("numpy._core.multiarray", "numpy.core.multiarray")),
)
"""What NumPy writes for arrays and scalars, as checkpoints hold them beside the weights."""


class PickleError(ValueError):
    """A pickle that ends early, breaks a rule, or uses what is not understood; `contents` is what came before."""

    def __init__(self, message: str, contents: PickleContents) -> None:
        super().__init__(message)
        self.contents = contents


@dataclass
class PickleContents:
    """Imports, calls and result of one pickle, as far as opcodes show them."""

    globals: dict[tuple[str, str], None] = field(default_factory=dict)
    """Module and name, in order, each once."""
    calls_unknown: str | None = None
    """The opcode that would call or change what the opcodes do not show."""
    value: Any = None
    """An `int` or a short name if the pickle is that, else a placeholder."""
    opcodes: int = 0


@dataclass(frozen=True, slots=True)
class _Global:
    module: str
    name: str


class _Placeholder:
    """A value that is neither a global nor part of a name."""

    __slots__ = ()


_PLACEHOLDER = _Placeholder()
_TEXT = re.compile(r"[\w.-]{1,128}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_MOST_TEXT = 128
_MOST_TUPLE = 16
_MOST_LINE = 1 << 16
_SKIP = 1 << 20


class _Reader:
    """The bytes of a pickle: lines are bounded, and an early end is an error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        raw = self._file.read(size)
        if len(raw) != size:
            raise ValueError("it ends early")
        return raw

    def readline(self, limit: int = _MOST_LINE) -> bytes:
        raw = self._file.readline(min(limit, _MOST_LINE) if limit >= 0 else _MOST_LINE)
        if not raw.endswith(b"\n"):
            raise ValueError("a line in it ends early or is longer than 64 KiB")
        return raw

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.read(min(size, _SKIP)))


_LENGTHS = {
    "BINUNICODE": 4, "SHORT_BINUNICODE": 1, "BINUNICODE8": 8, "BINSTRING": 4, "SHORT_BINSTRING": 1,
    "BINBYTES": 4, "SHORT_BINBYTES": 1, "BINBYTES8": 8, "BYTEARRAY8": 8, "LONG4": 4,
}  # fmt: skip
_VALUES = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "UNICODE", "STRING", "FLOAT", "BINFLOAT")
_PLAIN = ("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "STOP")


def read_pickle(file: BinaryIO) -> PickleContents:
    """What the pickle at the file's position would import and call; the position is behind its STOP afterwards.

    `PickleError` for what ends early, breaks a rule of the format, or has more opcodes than `TRT_ENGINE_MAX_PICKLE_OPCODES`.
    """
    machine = _PickleMachine(_Reader(file))
    most = PICKLE_OPCODES.value
    try:
        while machine.step():
            if machine.contents.opcodes > most:
                raise PickleError(f"it has more than {most} opcodes; {PICKLE_OPCODES.hint}", machine.contents)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, UnicodeError, OverflowError) as error:
        text = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise PickleError(shorten_middle(text, 400), machine.contents) from error
    return machine.contents


class _PickleMachine:
    """The unpickler's stack, marks and memo, with placeholders for values."""

    def __init__(self, reader: _Reader) -> None:
        self.contents = PickleContents()
        self._reader = reader
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self) -> bool:
        """Do one opcode; False after STOP."""
        byte = self._reader.read(1)
        found = _OPCODES.get(byte)
        if found is None:
            raise ValueError(f"the byte {byte!r} is not an opcode known here")
        self.contents.opcodes += 1
        name, read, action = found
        argument = None if read is None else read(self._reader)
        if action is not None:
            action(self, argument)
        elif name == "STOP":
            self.contents.value = self._pop()
            return False
        else:
            self._stack.append(_PLACEHOLDER if argument is None else argument)
        return True

    def _pop(self) -> Any:
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    # what only moves values

    def _do_proto(self, version: int) -> None:
        if version > 5:
            raise ValueError(f"protocol {version} is not known here")

    def _do_frame(self, _: Any) -> None: ...

    def _do_mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _do_pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _do_pop_mark(self, _: Any) -> None:
        self._pop_mark()

    def _do_dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _do_put(self, place: int) -> None:
        if place < 0:
            raise ValueError("a negative place in the memo")
        self._memo[place] = self._stack[-1]

    _do_binput = _do_long_binput = _do_put

    def _do_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _do_get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    _do_binget = _do_long_binget = _do_get

    # containers

    def _tuple(self, items: list[Any]) -> None:
        self._stack.append(tuple(items) if len(items) <= _MOST_TUPLE else _PLACEHOLDER)

    def _do_tuple(self, _: Any) -> None:
        self._tuple(self._pop_mark())

    def _pop_tuple(self, count: int, _: Any = None) -> None:
        items = [self._pop() for _ in range(count)]
        self._tuple(items[::-1])

    _do_empty_tuple = partialmethod(_pop_tuple, 0)
    _do_tuple1 = partialmethod(_pop_tuple, 1)
    _do_tuple2 = partialmethod(_pop_tuple, 2)
    _do_tuple3 = partialmethod(_pop_tuple, 3)

    def _do_list(self, _: Any) -> None:
        self._pop_mark()
        self._stack.append(_PLACEHOLDER)

    _do_dict = _do_frozenset = _do_list

    def _pop_into_container(self, opcode: str) -> None:
        """Values go into the container on top: `append` of a global would be a call of its method."""
        if not isinstance(self._stack[-1], _Placeholder):
            self._mark_unknown(opcode)

    def _do_append(self, _: Any) -> None:
        self._pop()
        self._pop_into_container("APPEND")

    def _do_setitem(self, _: Any) -> None:
        self._pop_tuple(2)
        self._pop()
        self._pop_into_container("SETITEM")

    def _do_appends(self, _: Any) -> None:
        self._pop_mark()
        self._pop_into_container("APPENDS")

    _do_setitems = _do_additems = _do_appends

    # what imports

    def _import(self, module: str, name: str) -> _Global:
        if not _NAME.fullmatch(module) or not _NAME.fullmatch(name):
            raise ValueError("a global that is not a name")
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[(module, name)]
        elif module in IMPORT_MAPPING:
            module = IMPORT_MAPPING[module]
        self.contents.globals[module, name] = None
        return _Global(module, name)

    def _do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._import(module, name))

    def _do_stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self._mark_unknown("STACK_GLOBAL")
        self._stack.append(self._import(module, name))

    # what calls

    def _mark_unknown(self, opcode: str) -> None:
        """Mark a call or change that opcodes do not show: nothing after it can be trusted."""
        self.contents.calls_unknown = opcode
        raise ValueError(f"{opcode} is applied to what the opcodes do not show")

    def _call(self, opcode: str, callee: Any, arguments: Any) -> None:
        if not isinstance(callee, _Global):
            self._mark_unknown(opcode)
        # an encoding is a module that Python imports by its name
        if (callee.module, callee.name) == ("_codecs", "encode") and tuple(arguments)[1:] != ("latin1",):
            self._mark_unknown(opcode)
        if _allocates(callee, arguments):
            raise ValueError(f"{opcode} makes `{callee.module}.{callee.name}` of a size that the file does not hold")
        self._stack.append(_PLACEHOLDER)

    def _do_reduce(self, _: Any) -> None:
        arguments = self._pop()
        self._call("REDUCE", self._pop(), arguments if isinstance(arguments, tuple) else ())

    def _do_newobj(self, _: Any) -> None:
        arguments = self._pop()
        self._call("NEWOBJ", self._pop(), arguments if isinstance(arguments, tuple) else ())

    def _do_newobj_ex(self, _: Any) -> None:
        self._pop()
        self._do_newobj(None)

    def _do_obj(self, _: Any) -> None:
        items = self._pop_mark()
        self._call("OBJ", items[0], items[1:])

    def _do_inst(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._call("INST", self._import(module, name), self._pop_mark())

    def _do_build(self, _: Any) -> None:
        self._pop()
        if not isinstance(self._stack[-1], _Placeholder):  # the state of a class is the class for everybody else
            self._mark_unknown("BUILD")

    def _do_persid(self, _: Any) -> None:
        self._stack.append(_PLACEHOLDER)

    def _do_binpersid(self, _: Any) -> None:
        self._pop()
        self._stack.append(_PLACEHOLDER)


def _allocates(callee: _Global, arguments: Any) -> bool:
    """Arrays and bytes made by their size alone: writers give them their contents."""
    name = (callee.module, callee.name)
    if name == ("builtins", "bytearray"):
        return any(isinstance(item, int) for item in arguments)
    if callee.name == "_reconstruct":
        return len(arguments) < 2 or arguments[1] != (0,)
    return name == ("numpy", "ndarray") or (callee.module.startswith("torch") and callee.name.endswith("Tensor"))


def _sized_reader(name: str, size_bytes: int) -> Callable[[_Reader], Any]:
    """Reads a length and what follows it: a short text that could be part of a name, else a placeholder."""
    is_text = "UNICODE" in name or "STRING" in name

    def read(reader: _Reader) -> Any:
        size = int.from_bytes(reader.read(size_bytes), "little")
        if not is_text or size > _MOST_TEXT:
            reader.skip(size)
            return _PLACEHOLDER
        text = reader.read(size).decode("utf-8", "replace")
        return text if _TEXT.fullmatch(text) else _PLACEHOLDER

    return read


_Known = tuple[str, Callable[[_Reader], Any] | None, Callable[[_PickleMachine, Any], None] | None]


def _known_opcodes() -> dict[bytes, _Known]:
    """By its byte: the name of an opcode, what reads its argument, what it does (None: the argument is its value)."""
    known: dict[bytes, _Known] = {}
    for opcode in pickletools.opcodes:
        name, size_bytes = opcode.name, _LENGTHS.get(opcode.name)
        action = getattr(_PickleMachine, f"_do_{name.lower()}", None)
        if size_bytes is not None:
            read: Callable[[Any], Any] | None = _sized_reader(name, size_bytes)
        else:
            read = None if opcode.arg is None else opcode.arg.reader
        if action is not None or size_bytes is not None or name in _PLAIN or name in _VALUES:
            known[opcode.code.encode("latin-1")] = (name, read, action)
    return known


_OPCODES = _known_opcodes()
