"""Kernels, copies and launches of any library by CUPTI, through NVIDIA's `cupti-python`.

Tracing reads no performance counters, so it works without the permissions that Nsight Compute needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cupti import cupti as api

from trt_engine.environment import distribution_version
from trt_engine.format import library_reason
from trt_engine.profiling.instruments.capture import (
    BUSY_HINT,
    PROBE_INFERENCES,
    Capture,
    HostSpan,
    Launch,
    ProfilerUnavailable,
    assemble,
)
from trt_engine.profiling.instruments.nsight_tools import permission_error
from trt_engine.records.profile import COPY_KINDS, Activity

BUFFER_BYTES = 32 << 20
"""Capacity for about 150 000 records: a full buffer is read in the middle of an inference."""
_FLUSH_FORCED = 1
_NVTX_INJECTION = b"NVTX_INJECTION64_PATH"
_REQUIRED_KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET", "RUNTIME", "DRIVER")
_OPTIONAL_KINDS = ("MARKER",)
_MARKS_START, _MARKS_END = 2, 4
_BUSY = f"{BUSY_HINT}; `torch.profiler` keeps CUPTI until its process ends"


def capture(run: Callable[[], None], inferences: int) -> Capture:
    """Device activity of `inferences` calls of `run`; `ProfilerUnavailable` if CUPTI fails."""
    book = _RecordReader()
    windows: list[tuple[int, int]] = []
    with _tracing(book):
        for _ in range(PROBE_INFERENCES):
            run()
        for _ in range(inferences):
            start = api.get_timestamp()
            run()
            windows.append((start, api.get_timestamp()))
    version = distribution_version("cupti-python")
    return assemble(
        book.activities, book.launches, windows, f"cupti {version}" if version else "cupti",
        spans=book.spans, dropped=book.dropped, warnings=book.warnings,
    )  # fmt: skip


def subscribe_nvtx() -> bool:
    """Set CUPTI as the NVTX injection library, unless one is set; True if ranges will be recorded."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    given = library.getenv(_NVTX_INJECTION)
    if given:
        return b"libcupti" in given
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cupti").abs_path
    except (ImportError, RuntimeError, OSError):
        return False
    # not by os.environ: Nsight's child processes would inherit it and have their own
    return bool(path) and library.setenv(_NVTX_INJECTION, str(path).encode(), 1) == 0


class _RecordReader:
    """Converts CUPTI records as they arrive: their buffer is freed afterwards."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.launches: list[Launch] = []
        self.dropped = 0
        self._range_starts: dict[int, tuple[str, int, int]] = {}
        self._range_ends: dict[int, int] = {}
        self._unreadable: Counter[str] = Counter()
        kinds = api.ActivityKind
        self._readers: dict[int, Callable[[Any], None]] = {
            int(kinds.CONCURRENT_KERNEL): self._kernel,
            int(kinds.KERNEL): self._kernel,
            int(kinds.MEMCPY): self._transfer,
            int(kinds.MEMCPY2): self._transfer,
            int(kinds.MEMSET): self._transfer,
            int(kinds.RUNTIME): functools.partial(self._call, int(api.CallbackDomain.RUNTIME_API)),
            int(kinds.DRIVER): functools.partial(self._call, int(api.CallbackDomain.DRIVER_API)),
            int(kinds.MARKER): self._marker,
        }

    def read(self, records: Sequence[Any]) -> None:
        """Called from a CUPTI thread: must not raise."""
        for item in records:
            try:
                reader = self._readers.get(int(item.kind))
                if reader is not None:
                    reader(item)
            except Exception as error:  # CUPTI would swallow it, and the rest of the buffer with it
                self._unreadable[f"{type(error).__name__}: {error}"] += 1

    @property
    def spans(self) -> list[HostSpan]:
        """The closed NVTX ranges; open ones are dropped."""
        return [
            HostSpan(name, start, self._range_ends[number], thread)
            for number, (name, start, thread) in self._range_starts.items()
            if number in self._range_ends
        ]

    @property
    def warnings(self) -> list[str]:
        return [f"{count} records of CUPTI could not be read ({text})" for text, count in self._unreadable.items()]

    def _kernel(self, item: Any) -> None:
        self.activities.append(Activity(
            kind="kernel",
            name=_demangle(item.name),
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

    def _transfer(self, item: Any) -> None:
        fill = int(item.kind) == int(api.ActivityKind.MEMSET)
        self.activities.append(Activity(
            kind="memset" if fill else "copy",
            name="memset" if fill else COPY_KINDS.get(int(item.copy_kind), "unknown"),
            start_ns=item.start,
            end_ns=item.end,
            device=item.device_id,
            stream=item.stream_id,
            nbytes=item.bytes,
            correlation=item.correlation_id,
            graph_node=item.graph_node_id,
        ))  # fmt: skip

    def _call(self, domain: int, item: Any) -> None:
        name = _callback_name(domain, int(item.cbid))
        self.launches.append(Launch(name, item.start, item.end, item.correlation_id, item.thread_id))

    def _marker(self, item: Any) -> None:
        flags = int(item.flags_)
        if flags & _MARKS_START:
            self._range_starts[item.id] = item.name or "", item.timestamp, item.object_id.pt.thread_id
        elif flags & _MARKS_END:
            self._range_ends[item.id] = item.timestamp


_reader: _RecordReader | None = None
"""The current capture; CUPTI keeps our two callbacks and may call them after it."""


def _buffer_completed(records: Sequence[Any]) -> None:
    if _reader is not None:
        _reader.read(records)


@contextmanager
def _tracing(book: _RecordReader) -> Iterator[None]:
    global _reader
    try:
        subscriber = api.subscribe(lambda *given: None, None)  # it only makes this process the single subscriber
    except (api.cuptiError, RuntimeError) as error:
        raise _unavailable_error(error) from error
    enabled: list[int] = []
    try:
        try:
            api.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), _buffer_completed)
            for name in (*_REQUIRED_KINDS, *_OPTIONAL_KINDS):
                if _enable_kind(name, needed=name in _REQUIRED_KINDS):
                    enabled.append(getattr(api.ActivityKind, name))
        except (api.cuptiError, RuntimeError) as error:
            raise _unavailable_error(error) from error
        _take_dropped_count()
        _reader = book
        yield
        try:
            api.activity_flush_all(0)
            api.activity_flush_all(_FLUSH_FORCED)
        except api.cuptiError as error:
            raise ProfilerUnavailable(
                f"CUPTI does not hand its records over: {error}", hint="capture again in another process"
            ) from error
        book.dropped = _take_dropped_count()
    finally:
        _reader = None
        for kind in enabled:
            _call_ignoring_errors(api.activity_disable, kind)
        _call_ignoring_errors(api.activity_flush_all, _FLUSH_FORCED)  # discard records of a failed inference
        _call_ignoring_errors(api.unsubscribe, subscriber)


def _enable_kind(name: str, *, needed: bool) -> bool:
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


def _take_dropped_count() -> int:
    """The records dropped since the last call."""
    count = ctypes.c_size_t(0)
    try:
        api.activity_get_num_dropped_records(0, 0, ctypes.addressof(count))
    except api.cuptiError:  # no records yet
        return 0
    return count.value


def _call_ignoring_errors(call: Callable[[Any], object], given: object) -> None:
    """Call at the end of a capture, ignoring errors, so that none hides an earlier one."""
    with contextlib.suppress(api.cuptiError, RuntimeError):
        call(given)


def _unavailable_error(error: Exception) -> ProfilerUnavailable:
    """CUPTI's error with a reason and a hint."""
    status = getattr(error, "status", None)
    name = api.Result(status).name if status is not None else ""
    if name in ("ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", "ERROR_MAX_LIMIT_REACHED", "ERROR_HARDWARE_BUSY"):
        return ProfilerUnavailable("another profiler holds CUPTI in this process", hint=_BUSY)
    if "INSUFFICIENT_PRIVILEGES" in name:
        return permission_error()
    if name in ("ERROR_NOT_COMPATIBLE", "ERROR_NOT_INITIALIZED", "ERROR_NOT_SUPPORTED"):
        return ProfilerUnavailable(
            f"CUPTI and the driver do not fit together ({name})",
            hint="install the `cupti-python` of the CUDA release that `nvidia-smi` names",
        )
    text = name or library_reason(error)
    return ProfilerUnavailable(f"CUPTI does not start: {text}", hint="`trt-engine doctor` lists what a GPU needs here")


# ------------------------------------------------------------------------------------------------ names


@functools.cache
def _callback_name(domain: int, number: int) -> str:
    try:
        return re.sub(r"_v\d+$", "", api.get_callback_name(domain, number))
    except (api.cuptiError, RuntimeError):
        return f"call {number}"


@functools.lru_cache(maxsize=4096)
def _demangle(name: str | None) -> str:
    """The demangled name; unchanged without a C++ library."""
    if not name or not name.startswith("_Z"):
        return name or "?"
    library = _load_libstdcxx()
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
def _load_libstdcxx() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library
