"""Kernels, copies and launches by CUPTI, through NVIDIA's `cupti-python`: for whatever library launches them.

Tracing reads no performance counter, so that an ordinary user may do it where Nsight Compute may not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cupti import cupti as api

from trt_engine.profiling.capture import BUSY, PERMIT, PROBING, Capture, HostSpan, Launch, ProfilerUnavailable, assemble
from trt_engine.traces import COPIES, Activity

__all__ = ["hear_ranges", "record"]

BUFFER_BYTES = 32 << 20
"""Room for some 150 000 records: a buffer that fills up is read in the middle of an inference."""
_FORCED = 1
_LISTENER = b"NVTX_INJECTION64_PATH"
_NEEDED = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET", "RUNTIME", "DRIVER")
_WELCOME = ("MARKER",)
_MARKS_START, _MARKS_END = 2, 4
_BUSY = f"{BUSY}; `torch.profiler` keeps CUPTI until its process ends"


def record(run: Callable[[], None], inferences: int) -> Capture:
    """What the device does in so many calls of `run`; `ProfilerUnavailable` where CUPTI does not serve us."""
    book = _Book()
    windows: list[tuple[int, int]] = []
    with _tracing(book):
        for _ in range(PROBING):
            run()
        for _ in range(inferences):
            start = api.get_timestamp()
            run()
            windows.append((start, api.get_timestamp()))
    return assemble(
        book.activities,
        book.launches,
        windows,
        _version(),
        spans=book.spans,
        dropped=book.dropped,
        warnings=book.warnings,
    )


def hear_ranges() -> bool:
    """Names CUPTI as the listener of NVTX ranges, unless there is one; True if ranges will be heard."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    given = library.getenv(_LISTENER)
    if given:
        return b"libcupti" in given
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cupti").abs_path
    except (ImportError, RuntimeError, OSError):
        return False
    # not by os.environ: a process that Nsight starts for us gets that, and has a listener of its own
    return bool(path) and library.setenv(_LISTENER, str(path).encode(), 1) == 0


def _version() -> str:
    try:
        return f"cupti {importlib.metadata.version('cupti-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "cupti"


class _Book:
    """What CUPTI told, in our words. Records die with the buffer they came in, so they are read as they come."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.launches: list[Launch] = []
        self.dropped = 0
        self._opened: dict[int, tuple[str, int, int]] = {}
        self._shut: dict[int, int] = {}
        self._unreadable: Counter[str] = Counter()
        kinds = api.ActivityKind
        self._readers: dict[int, Callable[[Any], None]] = {
            int(kinds.CONCURRENT_KERNEL): self._kernel,
            int(kinds.KERNEL): self._kernel,
            int(kinds.MEMCPY): self._copy,
            int(kinds.MEMCPY2): self._copy,
            int(kinds.MEMSET): self._fill,
            int(kinds.RUNTIME): functools.partial(self._call, int(api.CallbackDomain.RUNTIME_API)),
            int(kinds.DRIVER): functools.partial(self._call, int(api.CallbackDomain.DRIVER_API)),
            int(kinds.MARKER): self._mark,
        }

    def read(self, records: Sequence[Any]) -> None:
        """Called by CUPTI, from a thread of its own: nothing may be raised into it."""
        for item in records:
            try:
                reader = self._readers.get(int(item.kind))
                if reader is not None:
                    reader(item)
            except Exception as error:  # CUPTI would swallow it, and the rest of the buffer with it
                self._unreadable[f"{type(error).__name__}: {error}"] += 1

    @property
    def spans(self) -> list[HostSpan]:
        """The ranges that were marked; those still open have no end and are left out."""
        return [
            HostSpan(name, start, self._shut[number], thread)
            for number, (name, start, thread) in self._opened.items()
            if number in self._shut
        ]

    @property
    def warnings(self) -> list[str]:
        return [f"{count} records of CUPTI could not be read ({text})" for text, count in self._unreadable.items()]

    def _kernel(self, item: Any) -> None:
        self.activities.append(Activity(
            kind="kernel",
            name=_demangled(item.name),
            start_ns=item.start,
            end_ns=item.end,
            device=item.device_id,
            stream=item.stream_id,
            correlation=item.correlation_id,
            graph_node=item.graph_node_id,
            grid=(item.grid_x, item.grid_y, item.grid_z),
            block=(item.block_x, item.block_y, item.block_z),
            registers=item.registers_per_thread,
            shared_bytes=item.static_shared_memory + item.dynamic_shared_memory,
        ))  # fmt: skip

    def _copy(self, item: Any) -> None:
        self.activities.append(Activity(
            kind="copy",
            name=COPIES.get(int(item.copy_kind), "unknown"),
            start_ns=item.start,
            end_ns=item.end,
            device=item.device_id,
            stream=item.stream_id,
            nbytes=item.bytes,
            correlation=item.correlation_id,
            graph_node=item.graph_node_id,
        ))  # fmt: skip

    def _fill(self, item: Any) -> None:
        self.activities.append(Activity(
            kind="memset",
            name="memset",
            start_ns=item.start,
            end_ns=item.end,
            device=item.device_id,
            stream=item.stream_id,
            nbytes=item.bytes,
            correlation=item.correlation_id,
            graph_node=item.graph_node_id,
        ))  # fmt: skip

    def _call(self, domain: int, item: Any) -> None:
        name = _called(domain, int(item.cbid))
        self.launches.append(Launch(name, item.start, item.end, item.correlation_id, item.thread_id))

    def _mark(self, item: Any) -> None:
        flags = int(item.flags_)
        if flags & _MARKS_START:
            self._opened[item.id] = item.name or "", item.timestamp, item.object_id.pt.thread_id
        elif flags & _MARKS_END:
            self._shut[item.id] = item.timestamp


_book: _Book | None = None
"""The one capture under way; CUPTI keeps our two functions for good and may call them after it."""


def _requested() -> tuple[int, int]:
    return BUFFER_BYTES, 0


def _completed(records: Sequence[Any]) -> None:
    if _book is not None:
        _book.read(records)


def _ignored(*given: object) -> None:
    """No domain is ever enabled for it: we subscribe to be the only one."""


@contextmanager
def _tracing(book: _Book) -> Iterator[None]:
    global _book
    try:
        subscriber = api.subscribe(_ignored, None)
    except (api.cuptiError, RuntimeError) as error:
        raise _refused(error) from error
    enabled: list[int] = []
    try:
        try:
            api.activity_register_callbacks(_requested, _completed)
            for name in (*_NEEDED, *_WELCOME):
                if _enable(name, needed=name in _NEEDED):
                    enabled.append(getattr(api.ActivityKind, name))
        except (api.cuptiError, RuntimeError) as error:
            raise _refused(error) from error
        _forgotten_drops()
        _book = book
        yield
        try:
            api.activity_flush_all(0)
            api.activity_flush_all(_FORCED)
        except api.cuptiError as error:
            raise ProfilerUnavailable(
                f"CUPTI does not hand its records over: {error}", hint="capture again in another process"
            ) from error
        book.dropped = _forgotten_drops()
    finally:
        _book = None
        for kind in enabled:
            _quietly(api.activity_disable, kind)
        _quietly(api.activity_flush_all, _FORCED)  # an inference that failed leaves records behind: nobody's now
        _quietly(api.unsubscribe, subscriber)


def _enable(name: str, *, needed: bool) -> bool:
    kind = getattr(api.ActivityKind, name, None)
    if kind is None:
        return False
    try:
        api.activity_enable(kind)
    except api.cuptiError:
        if needed and name != "MEMCPY2":  # copies between two GPUs: not every release and machine has them
            raise
        return False
    return True


def _forgotten_drops() -> int:
    """The records dropped since the last call."""
    count = ctypes.c_size_t(0)
    try:
        api.activity_get_num_dropped_records(0, 0, ctypes.addressof(count))
    except api.cuptiError:  # nothing was recorded yet
        return 0
    return count.value


def _quietly(call: Callable[[Any], object], given: object) -> None:
    """For the end of a capture: there is nothing left to save, and an error may be on its way already."""
    with contextlib.suppress(api.cuptiError, RuntimeError):
        call(given)


def _refused(error: Exception) -> ProfilerUnavailable:
    """CUPTI's answer as one a person can act on."""
    status = getattr(error, "status", None)
    name = api.Result(status).name if status is not None else ""
    if name in ("ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", "ERROR_MAX_LIMIT_REACHED", "ERROR_HARDWARE_BUSY"):
        return ProfilerUnavailable("another profiler holds CUPTI in this process", hint=_BUSY)
    if "INSUFFICIENT_PRIVILEGES" in name:
        return ProfilerUnavailable("this user may not profile the GPU (ERR_NVGPUCTRPERM)", hint=PERMIT)
    if name in ("ERROR_NOT_COMPATIBLE", "ERROR_NOT_INITIALIZED", "ERROR_NOT_SUPPORTED"):
        return ProfilerUnavailable(
            f"CUPTI and the driver do not fit together ({name})",
            hint="install the `cupti-python` of the CUDA release that `nvidia-smi` names",
        )
    text = name or (str(error).strip() or type(error).__name__).splitlines()[0]
    return ProfilerUnavailable(f"CUPTI does not start: {text}", hint="`trt-engine doctor` says what a GPU needs here")


# ------------------------------------------------------------------------------------------------ names


@functools.cache
def _called(domain: int, number: int) -> str:
    try:
        return re.sub(r"_v\d+$", "", api.get_callback_name(domain, number))
    except (api.cuptiError, RuntimeError):
        return f"call {number}"


@functools.lru_cache(maxsize=4096)
def _demangled(name: str | None) -> str:
    """The name in C++'s words; as it is where there is no C++ library to ask."""
    if not name or not name.startswith("_Z"):
        return name or "?"
    library = _cxx()
    if library is None:
        return name
    status = ctypes.c_int()
    made = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not made:
        return name
    text = ctypes.string_at(made).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(made))
    return text


@functools.cache
def _cxx() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library
