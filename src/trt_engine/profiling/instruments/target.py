"""Runs an engine in a separate process, for an external profiler: `nsys`, `ncu`.

`python -m trt_engine.profiling.instruments.target REQUEST.json` loads the engine, warms it up, and opens CUDA's
profiler range
(`cudaProfilerStart`, `cudaProfilerStop`) around the measured inferences. Each is in an NVTX range if NVTX is available,
and its host times are in the outcome, so that kernels can be assigned to inferences. The outcome is rewritten at every
stage: a killed process leaves its progress behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from trt_engine.atomic_io import write_atomic
from trt_engine.backend import get_backend, runtime_backend
from trt_engine.benchmark.bench_inputs import feeds_for
from trt_engine.benchmark.closed_loop import effective_protocol, prepare_query
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.device.cuda.libcuda import Driver
from trt_engine.engine import Engine
from trt_engine.errors import SetupError
from trt_engine.format import library_reason
from trt_engine.workers.messages import ErrorMessage, error_message
from trt_engine.workers.process import StopSignal

RANGE_PREFIX = "trt_engine inference "
"""Prefix of the NVTX range around one inference; its index follows, from 0."""

Stage = Literal["starting", "loading", "warming", "range", "capturing", "ending", "done"]


class TargetRequest(msgspec.Struct):
    """A request to the profiled process."""

    engine: str
    config: BenchConfig
    """Batch, shapes, inputs, and whether an inference includes copies and graphs, as in a benchmark."""
    runtime: RuntimeConfig
    inferences: int = 20
    warmup: int = 10
    outcome_path: str = ""
    parent: int = 0
    """Exits with that process; 0 for none."""


class TargetOutcome(msgspec.Struct):
    """Progress and results of the profiled process."""

    pid: int
    stage: Stage = "starting"
    device: str = ""
    inferences: int = 0
    """Inferences completed inside the range."""
    windows: tuple[tuple[int, int], ...] = ()
    """Host start and end of each, in ns since the epoch."""
    switch: str = ""
    """What opened the range: `cuda.bindings`, `libcudart.so.13`."""
    ranges: str = ""
    """What makes NVTX ranges: `nvtx`, `libnvToolsExt`; empty if none."""
    gpu: dict[str, str] = {}
    facts: dict[str, str] = {}
    """Runtime information of the session."""
    graph: bool = False
    """Whether each inference replays a graph."""
    transfers: bool = False
    warnings: list[str] = []
    complete: bool = True
    """False if it was stopped before the last inference."""
    error: ErrorMessage | None = None


def encode(request: TargetRequest) -> bytes:
    """The request as JSON."""
    return msgspec.json.encode(request, enc_hook=str)


def read_outcome(path: Path) -> TargetOutcome | None:
    """The outcome at `path`; None if missing or incomplete."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TargetOutcome)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


# ------------------------------------------------------------------------------------------------ CUDA's profiler range


class _ProfilerSwitch(NamedTuple):
    """`cudaProfilerStart` and `cudaProfilerStop` of an available library."""

    name: str
    start: Callable[[], int]
    stop: Callable[[], int]


def _find_switch(number: int) -> _ProfilerSwitch:
    """The first available of: cuda-bindings, a libcudart that is loaded or on the loader path, the driver."""
    tried = []
    for make in (_bindings_switch, _cudart_switch, _driver_switch):
        try:
            return make(number)
        except (ImportError, OSError, AttributeError, RuntimeError, SetupError) as error:
            tried.append(f"{make.__name__}: {library_reason(error)}")
    raise SetupError(
        f"no library here has cudaProfilerStart ({'; '.join(tried)})", hint='`pip install "cuda-bindings>=12.9,<14"`'
    )


def _bindings_switch(number: int) -> _ProfilerSwitch:
    runtime = importlib.import_module("cuda.bindings.runtime")
    (code,) = runtime.cudaSetDevice(number)
    if int(code) != 0:
        raise RuntimeError(f"cudaSetDevice answered {int(code)}")
    return _ProfilerSwitch(
        "cuda.bindings", lambda: int(runtime.cudaProfilerStart()[0]), lambda: int(runtime.cudaProfilerStop()[0])
    )


def _cudart_switch(number: int) -> _ProfilerSwitch:
    name, library = _load_library(r"libcudart\.so\S*", *(f"libcudart.so.{end}" for end in ("13", "12", "11.0")))
    if (code := library.cudaSetDevice(number)) != 0:
        raise RuntimeError(f"cudaSetDevice answered {code}")
    return _ProfilerSwitch(name, library.cudaProfilerStart, library.cudaProfilerStop)


def _driver_switch(number: int) -> _ProfilerSwitch:
    driver = Driver()
    driver.call("cuCtxSetCurrent", driver.primary_context(number))
    return _ProfilerSwitch("libcuda.so.1", driver.library.cuProfilerStart, driver.library.cuProfilerStop)


def _load_library(pattern: str, *names: str) -> tuple[str, ctypes.CDLL]:
    """The first library that opens: those of that pattern which are loaded already, then the names."""
    error: OSError | None = None
    for name in (*_loaded_libraries(pattern), *names):
        try:
            return Path(name).name, ctypes.CDLL(name)
        except OSError as failure:
            error = error or failure
    raise error or OSError(f"{names[-1]} was not found")


def _loaded_libraries(pattern: str) -> list[str]:
    """Paths of the libraries of that name this process has loaded already."""
    try:
        text = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in text.splitlines() if line.count("/"))
    return [path for path in paths if re.fullmatch(pattern, Path(path).name)]


# ------------------------------------------------------------------------------------------------ NVTX


class _NvtxRanges(NamedTuple):
    """NVTX push and pop, or nothing."""

    name: str = ""
    push: Callable[[str], object] = lambda text: None
    pop: Callable[[], object] = lambda: None


def _find_ranges() -> _NvtxRanges:
    """Ranges of the first available library. Torch is not imported for it: its libraries would affect the profile."""
    for make in (_package_ranges, _library_ranges, _torch_ranges):
        with contextlib.suppress(ImportError, OSError, AttributeError, KeyError):
            return make()
    return _NvtxRanges()


def _package_ranges() -> _NvtxRanges:
    nvtx = importlib.import_module("nvtx")
    return _NvtxRanges("nvtx", nvtx.push_range, nvtx.pop_range)


def _library_ranges() -> _NvtxRanges:
    _, library = _load_library(r"libnvToolsExt\.so\S*", "libnvToolsExt.so.1")
    library.nvtxRangePushA.argtypes = [ctypes.c_char_p]
    return _NvtxRanges("libnvToolsExt", lambda text: library.nvtxRangePushA(text.encode()), library.nvtxRangePop)


def _torch_ranges() -> _NvtxRanges:
    nvtx = sys.modules["torch"].cuda.nvtx
    return _NvtxRanges("torch", nvtx.range_push, nvtx.range_pop)


# ------------------------------------------------------------------------------------------------ the process


class _OutcomeWriter:
    """Writes the outcome atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcome = TargetOutcome(pid=os.getpid())
        self.write()

    def write(self, **known: Any) -> None:
        for name, value in known.items():
            setattr(self.outcome, name, value)
        write_atomic(self._path, msgspec.json.encode(self.outcome, enc_hook=str))


def _exit_with_parent(parent: int) -> None:
    """Exit when that process does: the profiler between them would wait for ever."""
    try:
        handle = os.pidfd_open(parent)
    except (OSError, AttributeError):
        return

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _run_request(request: TargetRequest, writer: _OutcomeWriter, stop: StopSignal) -> None:
    outcome = writer.outcome
    writer.write(stage="loading")
    engine = Engine.open(Path(request.engine))
    device = request.runtime.device or engine.passport.device
    kind, number = parse_device(device)
    outcome.device = device
    board = info.gpu(number) if kind == "cuda" else None
    if board is not None:
        outcome.gpu = {
            "name": board.name, "compute_capability": board.compute_capability, "driver": board.driver,
            "memory_mib": str(board.memory_mib),
        }  # fmt: skip
    feeds, _ = feeds_for(engine, request.config)
    session = (
        runtime_backend(get_backend(engine.passport.backend)).load_component("runtime")().load(engine, request.runtime)
    )
    try:
        outcome.facts = {str(name): str(value) for name, value in session.runtime_info().items()}
        _, protocol = effective_protocol(session, request.config, events=False)
        with prepare_query(session, engine, feeds, protocol, outcome.warnings) as query:
            assert query.call is not None
            outcome.graph, outcome.transfers = query.protocol.graph, query.protocol.transfers
            _capture(query.call, request, writer, stop, number)
            writer.write(stage="ending")
    finally:
        session.close()
    writer.write(stage="done")


def _capture(
    run: Callable[[], object], request: TargetRequest, writer: _OutcomeWriter, stop: StopSignal, number: int
) -> None:
    outcome = writer.outcome
    writer.write(stage="warming")
    for _ in range(request.warmup):
        run()
    writer.write(stage="range")
    switch, ranges = _find_switch(number), _find_ranges()
    outcome.switch, outcome.ranges = switch.name, ranges.name
    windows: list[tuple[int, int]] = []
    names = [f"{RANGE_PREFIX}{index}" for index in range(request.inferences)]
    clock, push, pop = time.time_ns, ranges.push, ranges.pop
    stop.measuring = True
    if (code := switch.start()) != 0:
        raise SetupError(
            f"cudaProfilerStart of {switch.name} answered {code}", hint="`trt-engine doctor` checks the installation"
        )
    writer.write(stage="capturing")
    try:
        for name in names:
            if stop.asked:
                break
            push(name)
            start = clock()
            run()
            end = clock()
            pop()
            windows.append((start, end))
    finally:
        switch.stop()
        outcome.windows, outcome.inferences = tuple(windows), len(windows)
        outcome.complete = len(windows) == request.inferences


def main() -> int:
    """Run one request and write its outcome; exit code 0 if complete."""
    stop = StopSignal()
    raw = Path(sys.argv[1]).read_bytes()
    request = msgspec.json.decode(raw, type=TargetRequest, dec_hook=lambda kind, value: kind(value))
    writer = _OutcomeWriter(Path(request.outcome_path))
    if request.parent:
        _exit_with_parent(request.parent)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        _run_request(request, writer, stop)
    except BaseException as error:  # every error goes into the outcome
        writer.write(
            error=error_message(
                error,
                f"while `{request.engine}` ran under the profiler",
                interrupted=("interrupted before anything was captured", "the same command profiles again"),
                log_hint="the tool's log has what it printed",
            )
        )
        sys.stderr.write(f"{type(error).__name__}: {error}\n")  # for the tool's log
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
