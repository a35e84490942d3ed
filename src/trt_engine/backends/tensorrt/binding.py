"""The Python bindings of TensorRT and TensorRT-RTX, and all differences between them.

A `Binding` is a table entry: module, library, its API names. Both may be loaded in a process. Enum values are
looked up by name, never stored as numbers: 11.0 renumbered enums. API names are gated by release in a table (`api_table`),
not by trial.
Source: the real bindings of 22 releases of TensorRT and of TensorRT-RTX 1.7.1, called one by one; where NVIDIA's pages
differ, the bindings are right.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trt_engine.backends.tensorrt import api_table
from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import suggest


class Callbacks(Protocol):
    """A Python object whose methods the library calls; `Binding.native` wraps it in the library's class."""

    native_base: str
    """The wrapping class of the library: a key of `_CALLBACKS`."""


@dataclass(frozen=True)
class Binding:
    """One library of the TensorRT family, through its Python bindings. Imported when it is first used."""

    product: str
    """Name for messages."""
    module: str
    distributions: tuple[str, ...]
    """Pip packages that contain the module."""
    soname: str
    """File name of the library; `{major}` is the first part of the version."""
    releases: tuple[tuple[str, str], ...]
    """Its releases, from the oldest supported on, each with the TensorRT release of the same interface."""
    missing_names: frozenset[str] = frozenset()
    """Names of `SURFACE` missing in every release."""
    extra_entries: tuple[api_table.ApiEntry, ...] = ()
    """Names that only this library has, by its releases."""

    # -------------------------------------------------------------------------------- versions

    @functools.cached_property
    def trt(self) -> Any:
        """The bindings."""
        return importlib.import_module(self.module)

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """Version of the bindings: `(11, 4, 0, 106)`."""
        return tuple(int(part) for part in self.version_text.split(".") if part.isdigit())

    @property
    def version_text(self) -> str:
        """`11.4.0.106`; early 10.x bindings give three parts."""
        return str(self.trt.__version__)

    @functools.cached_property
    def equivalent_release(self) -> tuple[int, ...]:
        """The TensorRT release of the same interface, for release gates."""
        return self.equivalent_release_of(self.version)

    def equivalent_release_of(self, version: tuple[int, ...]) -> tuple[int, ...]:
        """The TensorRT release whose interface that version of this library has."""
        if not self.extra_entries:
            return version
        fitting = [same for own, same in self.releases if api_table.at_least(version, own)]
        return api_table.parse_release(fitting[-1] if fitting else self.releases[0][1])

    def supports_release(self, text: str) -> bool:
        """True when the library has the interface of that TensorRT release, or of a later one."""
        return api_table.at_least(self.equivalent_release, text)

    # -------------------------------------------------------------------------------- names

    def has_api(self, name: str) -> bool:
        """True when this library has the name; `KeyError` for one that is not in the table."""
        if (use := self._extra_names.get(name)) is not None:
            return use.is_present(self.version)
        return name not in self.missing_names and api_table.find_entry(name).is_present(self.equivalent_release)

    def require_api(self, name: str, setting: str) -> None:
        """`UsageError` with the required release, unless this library has the name."""
        if self.has_api(name):
            return
        use = self._extra_names.get(name)
        if use is None and self.extra_entries:  # the table's releases are those of TensorRT
            raise UsageError(
                f"{self.product} {self.version_text} does not have `{setting}`",
                hint="leave it out, or build with TensorRT",
            )
        use = use or api_table.find_entry(name)
        if not api_table.at_least(self.version, use.since):
            raise UsageError(
                f"`{setting}` needs {self.product} {use.since} or later, this is {self.version_text}",
                hint=f"leave it out, or install {self.product} {use.since} or later",
            )
        raise UsageError(
            f"`{setting}` was taken out in {self.product} {use.until}, this is {self.version_text}",
            hint="leave it out",
        )

    def get_api(self, name: str, setting: str | None = None) -> Any:
        """The object under a dotted name; `UsageError` where this library lacks it."""
        self.require_api(name, setting or name)
        found: Any = self.trt
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def enum_member(self, enum: str, name: str, setting: str) -> Any:
        """The member of an enum by a user's spelling (`ampere_plus`); `UsageError` naming those this library has."""
        wanted = f"{enum}.{name.upper()}"
        known = self.choices(enum)
        if wanted not in self._extra_names and wanted not in (use.name for use in api_table.API_TABLE):
            raise UsageError(f"`{setting}`: `{name}` does not exist", hint=suggest(name.lower(), list(known)))
        return self.get_api(wanted, setting)

    def choices(self, enum: str) -> tuple[str, ...]:
        """The names of an enum's members this library has, as users write them."""
        return tuple(
            use.name.rpartition(".")[2].lower()
            for use in (*api_table.API_TABLE, *self.extra_entries)
            if use.name.rpartition(".")[0] == enum and self.has_api(use.name)
        )

    @functools.cached_property
    def _extra_names(self) -> dict[str, api_table.ApiEntry]:
        return {use.name: use for use in self.extra_entries}

    # -------------------------------------------------------------------------------- objects

    def strongly_typed_flags(self) -> int:
        """The creation flags of a strongly typed network.

        A shift of the enum's value: the bindings accept the enum itself, but as another flag.
        """
        trt = self.trt
        return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def json_format(self) -> Any:
        """The inspector's JSON format."""
        trt = self.trt
        return trt.LayerInformationFormat.JSON

    def wrap_callback(self, target: Callbacks) -> Any:
        """An object of the library's class `target.native_base` that forwards each call to `target`.

        Keep it alive as long as the library object it was passed to.
        """
        return _callback_class(self, target.native_base)(target)

    # -------------------------------------------------------------------------------- the library

    def library_version(self) -> tuple[int, int, int] | None:
        """Version of the library these bindings are linked to; None if it does not report one."""
        try:
            name = self.soname.format(major=self.version[0])
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            library.getInferLibVersion.restype = ctypes.c_int32
            number = int(library.getInferLibVersion())
        except (OSError, AttributeError):  # another soname (Windows, safety builds), or not exported
            return None
        return (number // 10_000, number // 100 % 100, number % 100) if number else None

    def check_version(self) -> None:
        """`SetupError` for a release that is too old, or if bindings and library differ in release: calls would
        reach the wrong functions."""
        oldest = self.releases[0][0]
        if not api_table.at_least(self.version, oldest):
            raise SetupError(
                f"{self.product} {self.version_text} is too old: {oldest} or later is needed",
                hint=f"`pip install '{self.distributions[0]}>={oldest}'`",
            )
        library = self.library_version()
        if library is None or library == self.version[:3]:
            return
        found = ".".join(map(str, library))
        raise SetupError(
            f"{self.product}'s bindings are {self.version_text} and the library they found is {found}",
            hint="two releases are on one loader path: `trt-engine doctor` lists them, `LD_LIBRARY_PATH` orders them",
        )


TENSORRT = Binding(
    product="TensorRT",
    module="tensorrt",
    distributions=("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    soname="libnvinfer.so.{major}",
    releases=(("10.0", "10.0"),),
)
TENSORRT_RTX = Binding(
    product="TensorRT-RTX",
    module="tensorrt_rtx",
    distributions=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
    soname="libtensorrt_rtx.so.{major}",
    releases=(("1.7", "11.4"),),
    missing_names=api_table.RTX_MISSING,
    extra_entries=api_table.RTX_API_TABLE,
)
_DTYPES = {  # TensorRT's names to numpy's
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "BOOL": "bool", "FP8": "float8_e4m3fn", "INT4": "int4", "FP4": "float4_e2m1fn",
    "E8M0": "float8_e8m0fnu",
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """The dtype name of a TensorRT data type; TensorRT's, in lower case, for an unknown one."""
    return _DTYPES.get(dtype.name, str(dtype.name).lower())


def profile_values(engine: Any, profile: int, name: str) -> Sequence[Sequence[int]]:
    """Min, opt and max values of a shape input. Positional: its keyword names are swapped in every release."""
    found: Sequence[Sequence[int]] = engine.get_tensor_profile_values(profile, name)
    return found


class StreamWriter:
    """Calls `write` with each chunk of a plan: without a second copy, and without the 2 GiB limit.

    Stores an exception of `write`, which the library would only print.
    """

    native_base = "IStreamWriter"

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self.error: BaseException | None = None

    def write(self, data: bytes, size: int = -1) -> int:  # called with the bytes alone, contrary to its documentation
        try:
            return self._write(data)
        except BaseException as error:
            self.error = error
            return 0


# ------------------------------------------------------------------------------------------------ making and dropping

_LIFECYCLE_LOCK = threading.RLock()


@contextlib.contextmanager
def lifecycle_lock() -> Iterator[None]:
    """The lock to hold while a builder, a runtime or a refitter is created or destroyed.

    The library has an internal lock for both and calls the logger under it. In that call Python may collect garbage or
    switch threads: destroying one of these objects there would deadlock on that lock, with the GIL held.
    """
    with _LIFECYCLE_LOCK:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


# ------------------------------------------------------------------------------------------------ callbacks

_CALLBACKS = {
    "ILogger": ("log",),
    "IProgressMonitor": ("phase_start", "step_complete", "phase_finish"),
    "IGpuAsyncAllocator": ("allocate", "allocate_async", "reallocate", "deallocate", "deallocate_async"),
    "IOutputAllocator": ("reallocate_output", "reallocate_output_async", "notify_shape"),
    "IProfiler": ("report_layer_time",),
    "IStreamWriter": ("write",),
    "IStreamReaderV2": ("read", "seek"),
}
"""The subclassed library classes, and the methods it calls on them."""


@functools.cache
def _callback_class(binding: Binding, base: str) -> Any:
    """A subclass of the library's class `base` that forwards its methods to an object."""
    binding.require_api(f"{base}.__init__", base)

    def begin(self: Any, target: Any) -> None:
        native.__init__(self)
        self._target = target

    native = getattr(binding.trt, base)
    return type(
        f"{base}Adapter", (native,), {"__init__": begin, **{name: _forward_method(name) for name in _CALLBACKS[base]}}
    )


def _forward_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._target, name)(*args)

    method.__name__ = name
    return method
