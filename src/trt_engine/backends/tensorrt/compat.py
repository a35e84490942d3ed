"""The one module that knows how TensorRT's bindings differ, 10.0 to 11.4: everything else asks here.

Enum values are reached by name and never stored as numbers: 11.0 renumbered the enums it pruned. Names that came or went
are gated by the release the table says (`surface`), not by trying.
Source: the real bindings of 22 releases, called one by one; where NVIDIA's pages differ, the bindings are right.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt.surface import SURFACE, at_least, find
from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import closest

__all__ = [
    "SURFACE",
    "VERSION",
    "at_least",
    "check_version",
    "choices",
    "dtype_name",
    "has",
    "json_information",
    "library_version",
    "member",
    "profile_values",
    "reach",
    "require",
    "stream_writer",
    "strongly_typed",
    "version_text",
]

VERSION: tuple[int, ...] = tuple(int(part) for part in trt.__version__.split(".") if part.isdigit())
"""Of the bindings: `(11, 4, 0, 106)`."""


def version_text() -> str:
    """`11.4.0.106`; early 10.x bindings say three parts."""
    return str(trt.__version__)


def has(name: str) -> bool:
    """True when this TensorRT has the name; `KeyError` for one the table lacks."""
    return find(name).present(VERSION)


def require(name: str, asked_by: str) -> None:
    """`UsageError` naming the release it needs, unless this TensorRT has the name."""
    use = find(name)
    if use.present(VERSION):
        return
    if not at_least(VERSION, use.since):
        raise UsageError(
            f"`{asked_by}` needs TensorRT {use.since} or later, this is {version_text()}",
            hint=f"leave it out, or install TensorRT {use.since} or later",
        )
    raise UsageError(
        f"`{asked_by}` was taken out in TensorRT {use.until}, this is {version_text()}", hint="leave it out"
    )


def reach(name: str, asked_by: str | None = None) -> Any:
    """The object under a dotted name; `UsageError` where this TensorRT lacks it."""
    require(name, asked_by or name)
    found: Any = trt
    for part in name.split("."):
        found = getattr(found, part)
    return found


def member(enum: str, name: str, asked_by: str) -> Any:
    """The member of an enum by a user's spelling (`ampere_plus`); `UsageError` naming those this TensorRT has."""
    wanted = name.upper()
    known = choices(enum)
    if f"{enum}.{wanted}" not in (use.name for use in SURFACE):
        raise UsageError(f"`{asked_by}`: there is no `{name}`", hint=closest(name.lower(), list(known)))
    return reach(f"{enum}.{wanted}", asked_by)


def choices(enum: str) -> tuple[str, ...]:
    """The names of an enum's members this TensorRT has, as users write them."""
    return tuple(
        use.name.rpartition(".")[2].lower()
        for use in SURFACE
        if use.name.rpartition(".")[0] == enum and use.present(VERSION)
    )


def strongly_typed() -> int:
    """The mask of a network whose types are those of the graph, and no others.

    A shift of the enum's value, never the enum itself: the bindings take that too, and it means another flag.
    """
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def json_information() -> Any:
    """The inspector's format that can be read by a program."""
    return trt.LayerInformationFormat.JSON


_DTYPES = {  # TensorRT's names to ours
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "BOOL": "bool", "FP8": "float8_e4m3fn", "INT4": "int4", "FP4": "float4_e2m1fn",
    "E8M0": "float8_e8m0fnu",
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """Our name of a TensorRT data type; its own, in small letters, for one we have no name for."""
    return _DTYPES.get(dtype.name, str(dtype.name).lower())


def profile_values(engine: Any, profile: int, name: str) -> Sequence[Sequence[int]]:
    """Smallest, usual and largest values of a shape input. Positional: its keyword names are swapped in every release."""
    found: Sequence[Sequence[int]] = engine.get_tensor_profile_values(profile, name)
    return found


def stream_writer(write: Callable[[bytes], int]) -> Any:
    """A writer TensorRT hands the plan to piece by piece (10.13.3 on): no second copy of it, and no limit of 2 GiB."""
    return _writer_class()(write)


@functools.cache
def _writer_class() -> Any:
    base = reach("IStreamWriter.write") and trt.IStreamWriter

    class Writer(base):  # type: ignore[misc, valid-type]  # the base is there from 10.13.3 on
        """Calls `write` with each piece; what that raises is kept, because TensorRT would only print it."""

        def __init__(self, write: Callable[[bytes], int]) -> None:
            super().__init__()
            self._write = write
            self.error: BaseException | None = None

        def write(self, data: bytes, size: int = -1) -> int:  # called with the bytes alone, whatever is published
            try:
                return self._write(data)
            except BaseException as error:
                self.error = error
                return 0

    return Writer


# ------------------------------------------------------------------------------------------------ the library


def library_version() -> tuple[int, int, int] | None:
    """Version of the libnvinfer these bindings are linked to; None where it does not say."""
    try:
        library = ctypes.CDLL(f"libnvinfer.so.{VERSION[0]}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.getInferLibVersion.restype = ctypes.c_int32
        number = int(library.getInferLibVersion())
    except (OSError, AttributeError):  # another soname (Windows, safety builds), or not exported
        return None
    return (number // 10_000, number // 100 % 100, number % 100) if number else None


def check_version() -> None:
    """`SetupError` when bindings and library are not of one release: calls would end in the wrong functions."""
    library = library_version()
    if library is None or library == VERSION[:3]:
        return
    found = ".".join(map(str, library))
    raise SetupError(
        f"TensorRT's bindings are {version_text()} and the library they found is {found}",
        hint="two TensorRTs lie on one loader path: `trt-engine doctor` lists them, `LD_LIBRARY_PATH` orders them",
    )
