"""What a pickle would import and call, read from its opcodes without running them.

The stack and the memo are followed as an unpickler does, with placeholders for values. A pickle is data if all its imports
are on two exact lists: what tensors, their containers and NumPy arrays need.
"""

from __future__ import annotations

import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from trt_engine.errors import ModelError
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


_SCRIPT_GLOBALS = _pairs(
    "torch.jit._pickle",
    "build_intlist build_tensorlist build_doublelist build_boollist build_tensor_from_id restore_type_tag",
)
_LEGACY_PICKLES = 5


def code_in_pickles(file: BinaryIO, what: str, *, strict: bool, script: bool = False) -> list[str]:
    """Disallowed imports of the pickles in a file; the legacy format of PyTorch has five in sequence.

    `strict` rejects unreadable content; otherwise such a file counts as data if no foreign import precedes.
    `script` allows what TorchScript writes.
    """
    for at in range(_LEGACY_PICKLES):
        error = None
        try:
            contents = read_pickle(file)
        except PickleError as caught:
            contents, error = caught.contents, caught
        foreign = [item for item in contents.globals if not _is_data(*item, script=script)]
        if foreign:
            return [f"it imports `{'.'.join(foreign[0])}`"]
        if contents.hidden is not None:
            return [f"its pickle applies {contents.hidden} to what the pickle does not show"]
        if error is not None and strict:
            raise ModelError(
                f"the pickle in {what} cannot be read: {error}", hint="copy or download the file again"
            ) from error
        if error is not None or (at == 0 and not isinstance(contents.value, int)):  # the legacy format begins with one
            return []
    return []


def _is_data(module: str, name: str, *, script: bool) -> bool:
    if (module, name) in TENSOR_GLOBALS or (module, name) in NUMPY_GLOBALS:
        return True
    # `__torch__` is not a Python module: it names classes defined in the archive
    return script and ((module, name) in _SCRIPT_GLOBALS or module.split(".")[0] == "__torch__")


class PickleError(ValueError):
    """A pickle that ends early, breaks a rule, or uses what is not understood; `contents` is what came before."""

    def __init__(self, message: str, contents: PickleContents) -> None:
        super().__init__(message)
        self.contents = contents


@dataclass
class PickleContents:
    """Imports and result of one pickle, as far as opcodes show them."""

    globals: dict[tuple[str, str], None] = field(default_factory=dict)
    """Module and name, in order, each once."""
    hidden: str | None = None
    """The opcode that would call or change what the opcodes do not show: nothing after it can be trusted."""
    value: Any = None
    """An `int` or a short text if the pickle is that, else a placeholder."""
    opcodes: int = 0


def read_pickle(file: BinaryIO) -> PickleContents:
    """What the pickle at the file's position would import and call; the position is behind its STOP afterwards.

    `PickleError` for what ends early, breaks a rule of the format, or has more opcodes than `TRT_ENGINE_MAX_PICKLE_OPCODES`.
    """
    machine = _PickleMachine()
    contents, most = machine.contents, PICKLE_OPCODES.value
    try:
        for opcode, argument, _ in pickletools.genops(file):
            contents.opcodes += 1
            if contents.opcodes > most:
                raise ValueError(f"it has more than {most} opcodes; {PICKLE_OPCODES.hint}")
            machine.step(opcode, argument)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        text = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise PickleError(shorten_middle(text, 400), contents) from error
    return contents


class _Global(tuple[str, str]):
    """Module and name."""

    __slots__ = ()


_PLACEHOLDER = object()
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_MOST_TEXT = 128
_MOST_TUPLE = 16
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ")
_CHANGES = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_UNUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")
"""Opcodes whose object is outside of the pickle; `torch.save` writes none of them."""


class _PickleMachine:
    """The unpickler's stack, marks and memo, with a placeholder for what is neither a global nor part of a name."""

    def __init__(self) -> None:
        self.contents = PickleContents()
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name, stack = opcode.name, self._stack
        if name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name == "POP" and not stack:
            self._stack = self._marks.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        else:
            operands = self._take([item.name for item in opcode.stack_before])
            result = self._result(name, argument, operands)
            if name == "STOP":
                self.contents.value = operands[0]
            elif opcode.stack_after:
                self._stack.append(result)

    def _take(self, wanted: list[str]) -> list[Any]:
        """The operands of an opcode, lowest first; those above a mark follow those below it."""
        above: list[Any] = []
        if "mark" in wanted:
            above, self._stack = self._stack, self._marks.pop()
            wanted = wanted[: wanted.index("mark")]
        below = [self._stack.pop() for _ in wanted]
        return below[::-1] + above

    def _result(self, name: str, argument: Any, operands: list[Any]) -> Any:
        if name in _UNUSED:
            self._refuse(name)
        if name == "PROTO" and argument > 5:
            raise ValueError(f"protocol {argument} is not known here")
        if name == "GLOBAL":
            return self._import(*argument.partition(" ")[::2])
        if name == "STACK_GLOBAL":
            if not all(type(item) is str for item in operands):
                self._refuse(name)
            return self._import(*operands)
        if name == "INST":
            return self._call(name, self._import(*argument.partition(" ")[::2]), tuple(operands))
        if name in _CALLS:
            arguments = operands[1:] if name == "OBJ" else operands[1]
            return self._call(name, operands[0], tuple(arguments) if isinstance(arguments, list | tuple) else ())
        if name in _CHANGES:  # a method of the object or its state: of a class, it would be that of everybody else
            if operands[0] is not _PLACEHOLDER:
                self._refuse(name)
            return _PLACEHOLDER
        if "TUPLE" in name:
            return tuple(operands) if len(operands) <= _MOST_TUPLE else _PLACEHOLDER
        is_kept = isinstance(argument, int) or (isinstance(argument, str) and len(argument) <= _MOST_TEXT)
        return argument if is_kept else _PLACEHOLDER

    def _refuse(self, opcode: str) -> NoReturn:
        self.contents.hidden = opcode
        raise ValueError(f"{opcode} is applied to what the opcodes do not show")

    def _import(self, module: str, name: str) -> _Global:
        if not _NAME.fullmatch(module) or not _NAME.fullmatch(name):
            raise ValueError("a global that is not a name")
        pair = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.contents.globals[pair] = None
        return _Global(pair)

    def _call(self, opcode: str, callee: Any, arguments: tuple[Any, ...]) -> Any:
        # an encoding is a module that Python imports by its name
        if not isinstance(callee, _Global) or (callee == ("_codecs", "encode") and arguments[1:] != ("latin1",)):
            self._refuse(opcode)
        if _allocates(callee, arguments):
            raise ValueError(f"{opcode} makes `{'.'.join(callee)}` of a size that the file does not hold")
        return _PLACEHOLDER


def _allocates(callee: _Global, arguments: tuple[Any, ...]) -> bool:
    """Arrays and bytes made by their size alone: writers give them their contents."""
    module, name = callee
    if callee == ("builtins", "bytearray"):
        return any(isinstance(item, int) for item in arguments)
    if name == "_reconstruct":
        return len(arguments) < 2 or arguments[1] != (0,)
    return callee == ("numpy", "ndarray") or (module.startswith("torch") and name.endswith("Tensor"))
