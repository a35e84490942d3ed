"""An engine at work in a process of its own, for a profiler that watches it from outside: `nsys`, `ncu`.

`python -m trt_engine.profiling.child REQUEST.json` loads the engine, warms it up, and opens CUDA's profiler range
(`cudaProfilerStart`, `cudaProfilerStop`) around the inferences that count. Each of them stands in an NVTX range where NVTX
can be had, and its times on the host are in the answer, so that kernels can be told apart by inference. The answer is
written anew at every stage: a process that is killed leaves behind how far it came.
"""

from __future__ import annotations

import ctypes
import functools
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
from typing import Any, Literal

import msgspec

from trt_engine.backend import backend, runner_of
from trt_engine.benchmark.loop import feeds_for, in_force, ready
from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import MemoryExhausted, SetupError, TrtEngineError
from trt_engine.files import write_whole
from trt_engine.processes import Stop

__all__ = ["RANGE", "Failed", "Outcome", "Request", "Stage", "encode", "read_outcome"]

RANGE = "trt_engine inference "
"""The NVTX range around one inference begins so; its number follows, from 0."""

Stage = Literal["starting", "loading", "warming", "range", "capturing", "ending", "done"]

_MEMORY_WORDS = (
    "bad_alloc",
    "failed to allocate",
    "out of memory",
    "cannot allocate memory",
    "cudaerrormemoryallocation",
)


class Request(msgspec.Struct):
    """What the process is asked to do."""

    engine: str
    config: BenchConfig
    """Batch, shapes, inputs, and whether copies and graphs belong to an inference, as in a measurement."""
    runtime: RuntimeConfig
    inferences: int = 20
    warmup: int = 10
    answer: str = ""
    parent: int = 0
    """Ends with that process; 0 for nobody."""


class Failed(msgspec.Struct):
    """The error it ended in: a class of `errors`, its message and hint."""

    kind: str
    message: str
    hint: str | None = None


class Outcome(msgspec.Struct):
    """How far the process came, and what it saw."""

    pid: int
    stage: Stage = "starting"
    device: str = ""
    inferences: int = 0
    """Done inside the range."""
    windows: tuple[tuple[int, int], ...] = ()
    """Start and end of each on the host, in ns since 1970."""
    switch: str = ""
    """What opened the range: `cuda.bindings`, `libcudart.so.13`."""
    ranges: str = ""
    """What makes NVTX ranges: `nvtx`, `libnvToolsExt`; empty where nothing does."""
    gpu: dict[str, str] = {}
    facts: dict[str, str] = {}
    """What the session tells of itself."""
    graph: bool = False
    """Whether each inference replays a graph."""
    transfers: bool = False
    warnings: list[str] = []
    complete: bool = True
    """False when it was asked to stop before the last inference."""
    error: Failed | None = None


def encode(request: Request) -> bytes:
    """The request as JSON."""
    return msgspec.json.encode(request, enc_hook=str)


def _back(kind: type, value: Any) -> Any:
    return kind(value)


def _decode(raw: bytes) -> Request:
    return msgspec.json.decode(raw, type=Request, dec_hook=_back)


def read_outcome(path: Path) -> Outcome | None:
    """The answer at `path`; None where there is none that is whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


# ------------------------------------------------------------------------------------------------ CUDA's profiler range


class _Switch:
    """`cudaProfilerStart` and `cudaProfilerStop` of whichever library has them."""

    def __init__(self, name: str, start: Callable[[], int], stop: Callable[[], int]) -> None:
        self.name, self._start, self._stop = name, start, stop

    def on(self) -> None:
        if (code := self._start()) != 0:
            raise SetupError(
                f"cudaProfilerStart of {self.name} answered {code}", hint="`trt-engine doctor` checks the installation"
            )

    def off(self) -> None:
        self._stop()


def _switch(number: int) -> _Switch:
    """The first that can be had: cuda-bindings, a libcudart that is loaded or lies where the loader looks, the driver."""
    tried = []
    for make in (_of_bindings, _of_cudart, _of_driver):
        try:
            return make(number)
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            tried.append(
                f"{make.__name__.removeprefix('_of_')}: {str(error).splitlines()[0] if str(error) else error!r}"
            )
    raise SetupError(
        f"no library here has cudaProfilerStart ({'; '.join(tried)})", hint='`pip install "cuda-bindings>=12.9,<14"`'
    )


def _of_bindings(number: int) -> _Switch:
    runtime = importlib.import_module("cuda.bindings.runtime")
    (code,) = runtime.cudaSetDevice(number)
    if int(code) != 0:
        raise RuntimeError(f"cudaSetDevice answered {int(code)}")
    return _Switch(
        "cuda.bindings", lambda: int(runtime.cudaProfilerStart()[0]), lambda: int(runtime.cudaProfilerStop()[0])
    )


def _of_cudart(number: int) -> _Switch:
    error: OSError | None = None
    for name in (*_loaded(r"libcudart\.so\S*"), *(f"libcudart.so.{end}" for end in ("13", "12", "11.0"))):
        try:
            library = ctypes.CDLL(name)
        except OSError as failure:
            error = error or failure
            continue
        if (code := library.cudaSetDevice(number)) != 0:
            raise RuntimeError(f"cudaSetDevice answered {code}")
        return _Switch(Path(name).name, library.cudaProfilerStart, library.cudaProfilerStop)
    raise error or OSError("libcudart.so was not found")


def _of_driver(number: int) -> _Switch:
    library = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for code in (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(device), number),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        library.cuCtxSetCurrent(context),
    ):
        if code != 0:
            raise RuntimeError(f"the driver answered {code}")
    return _Switch("libcuda.so.1", library.cuProfilerStart, library.cuProfilerStop)


def _loaded(pattern: str) -> list[str]:
    """Paths of the libraries of that name this process has loaded already."""
    try:
        text = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in text.splitlines() if line.count("/"))
    return [path for path in paths if re.fullmatch(pattern, Path(path).name)]


# ------------------------------------------------------------------------------------------------ NVTX


def _push(function: Callable[[bytes], object], text: str) -> None:
    function(text.encode())


class _Ranges:
    """Push and pop of NVTX, or nothing. Torch is not imported for it: its libraries would change what is watched."""

    def __init__(self) -> None:
        self.name = ""
        self.push: Callable[[str], object] = lambda text: None
        self.pop: Callable[[], object] = lambda: None
        for make in (self._package, self._library, self._torch):
            try:
                make()
            except (ImportError, OSError, AttributeError):
                continue
            break

    def _package(self) -> None:
        nvtx = importlib.import_module("nvtx")
        self.push, self.pop, self.name = nvtx.push_range, nvtx.pop_range, "nvtx"

    def _library(self) -> None:
        error: OSError | None = None
        for name in (*_loaded(r"libnvToolsExt\.so\S*"), "libnvToolsExt.so.1"):
            try:
                library = ctypes.CDLL(name)
            except OSError as failure:
                error = failure
                continue
            library.nvtxRangePushA.argtypes = [ctypes.c_char_p]
            self.push = functools.partial(_push, library.nvtxRangePushA)
            self.pop, self.name = library.nvtxRangePop, "libnvToolsExt"
            return
        raise error or OSError("libnvToolsExt.so.1 was not found")

    def _torch(self) -> None:
        nvtx = sys.modules["torch"].cuda.nvtx if "torch" in sys.modules else None
        if nvtx is None:
            raise ImportError("torch is not loaded")
        self.push, self.pop, self.name = nvtx.range_push, nvtx.range_pop, "torch"


# ------------------------------------------------------------------------------------------------ the process


class _Teller:
    """The answer on disk, whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcome = Outcome(pid=os.getpid())
        self._write()

    def at(self, stage: Stage) -> None:
        self.outcome.stage = stage
        self._write()

    def failed(self, error: Failed) -> None:
        self.outcome.error = error
        self._write()

    def _write(self) -> None:
        write_whole(self.path, msgspec.json.encode(self.outcome, enc_hook=str))


def _end_with(parent: int) -> None:
    """End when that process does: the profiler in between would wait for ever for who asked it."""
    try:
        handle = os.pidfd_open(parent)
    except (OSError, AttributeError):
        return

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _work(request: Request, teller: _Teller, stop: Stop) -> None:
    outcome = teller.outcome
    teller.at("loading")
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
    session = runner_of(backend(engine.passport.backend)).half("runtime")().load(engine, request.runtime)
    try:
        outcome.facts = {str(name): str(value) for name, value in session.facts().items()}
        _, protocol = in_force(session, request.config, events=False)
        with ready(session, engine, feeds, protocol, outcome.warnings) as query:
            assert query.call is not None
            outcome.graph, outcome.transfers = query.protocol.graph, query.protocol.transfers
            _capture(query.call, request, teller, stop, number)
            teller.at("ending")
    finally:
        session.close()
    teller.at("done")


def _capture(run: Callable[[], object], request: Request, teller: _Teller, stop: Stop, number: int) -> None:
    outcome = teller.outcome
    teller.at("warming")
    for _ in range(request.warmup):
        run()
    teller.at("range")
    switch, ranges = _switch(number), _Ranges()
    outcome.switch, outcome.ranges = switch.name, ranges.name
    windows: list[tuple[int, int]] = []
    names = [f"{RANGE}{index}" for index in range(request.inferences)]
    clock, push, pop = time.time_ns, ranges.push, ranges.pop
    stop.measuring = True
    switch.on()
    teller.at("capturing")
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
        switch.off()
        outcome.windows, outcome.inferences = tuple(windows), len(windows)
        outcome.complete = len(windows) == request.inferences


def _failure(error: BaseException, request: Request) -> Failed:
    """The message of an error; whatever a library says of memory is `MemoryExhausted`."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    if any(
        isinstance(one, MemoryError | MemoryExhausted) or any(word in str(one).lower() for word in _MEMORY_WORDS)
        for one in chain
    ):
        return Failed(
            "MemoryExhausted", f"out of memory while `{request.engine}` ran under the profiler", "a smaller batch"
        )
    if isinstance(error, TrtEngineError):
        return Failed(type(error).__name__, error.message, error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Failed("Interrupted", "interrupted before anything was captured", "the same command profiles again")
    return Failed("TrtEngineError", f"unexpected {type(error).__name__}: {error}", "the tool's log has what it printed")


def main() -> int:
    """One request, one answer; 0 when everything asked for was done."""
    stop = Stop()
    request = _decode(Path(sys.argv[1]).read_bytes())
    teller = _Teller(Path(request.answer))
    if request.parent:
        _end_with(request.parent)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        _work(request, teller, stop)
    except BaseException as error:  # everything becomes the answer
        teller.failed(_failure(error, request))
        sys.stderr.write(f"{type(error).__name__}: {error}\n")  # goes to the tool's log, which a person reads
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
