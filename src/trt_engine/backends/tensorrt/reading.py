"""A plan from its file to an engine: with what it needs beside it, and with the reason where TensorRT will not have it."""

from __future__ import annotations

import functools
import mmap
from pathlib import Path
from typing import Any, BinaryIO

import tensorrt as trt

from trt_engine.backends.tensorrt import compat
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.config import parse_size
from trt_engine.engine import Engine, Needs
from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.files import explain
from trt_engine.plans.settings import PlanSettings

__all__ = ["check_needs", "deserialised", "make_runtime", "streamed"]

_LARGE_BYTES = 1 << 30
"""From here on a plan is read piece by piece where TensorRT can (10.7 on), so that it is not in host memory twice."""


def check_needs(engine: Engine, settings: PlanSettings) -> None:
    """`EngineError` or `SetupError` for what a plan needs and nobody gave, before TensorRT is asked."""
    needs = engine.passport.needs
    if _holds_code(engine) and not settings.allow_host_code:
        raise EngineError(
            f"`{engine.path.name}` holds code for the host, which would run in this process",
            hint="`-O allow_host_code=on` loads it: only where you trust who built it",
        )
    if needs.lean_runtime and settings.lean_runtime is None:
        major = needs.version.split(".")[0]
        raise EngineError(
            f"`{engine.path.name}` needs the lean runtime of TensorRT {needs.version}, which it was built without",
            hint=f"`-O lean_runtime=/path/to/libnvinfer_lean.so.{major}` of that version",
        )
    given = {Path(name).name for name in settings.plugins}
    if missing := [name for name in needs.plugins if Path(name).name not in given]:
        raise SetupError(
            f"`{engine.path.name}` needs the plugin libraries {', '.join(f'`{name}`' for name in missing)}",
            hint=f"`-O plugins=/path/to/{Path(missing[0]).name}`",
        )


def _holds_code(engine: Engine) -> bool:
    needs: Needs = engine.passport.needs
    options = engine.passport.build.config.get("options", {})
    carried = str(options.get("serialize_plugins", "")).lower() in ("on", "true", "yes", "1")
    return (needs.version_compatible and not needs.lean_runtime) or carried


def make_runtime(logger: TensorRtLogger, settings: PlanSettings, subject: str) -> tuple[Any, ...]:
    """TensorRT's runtime, and last the one to load with: the lean one where its library is given.

    Earlier ones must outlive it. An error TensorRT logs as it makes one is taken for a failure: the object would look
    whole and crash when it is used.
    """
    before = logger.said
    try:
        runtime = trt.Runtime(logger)
    except (TypeError, RuntimeError) as error:
        raise logger.failure(subject, SetupError) from error
    if logger.complained(before):
        raise logger.failure(subject, SetupError, before)
    runtime.engine_host_code_allowed = settings.allow_host_code
    if settings.dla_core is not None:
        _choose_dla(runtime, settings.dla_core)
    if settings.lean_runtime is None:
        return (runtime,)
    path = Path(settings.lean_runtime).expanduser()
    if not path.is_file():
        raise SetupError(
            f"there is no lean runtime `{path}`", hint="give the path of `libnvinfer_lean.so` in `-O lean_runtime=`"
        )
    said = logger.said
    lean = runtime.load_runtime(str(path.resolve()))
    if lean is None:
        raise logger.failure(f"loading the lean runtime `{path.name}`", SetupError, said)
    lean.engine_host_code_allowed = settings.allow_host_code
    return (runtime, lean)


def _choose_dla(runtime: Any, core: int) -> None:
    cores = runtime.num_DLA_cores
    if not 0 <= core < cores:
        raise SetupError(
            f"there is no DLA core {core}, this machine has {cores}",
            hint="leave `-O dla_core=` out" if not cores else f"`-O dla_core=0` to `{cores - 1}`",
        )
    runtime.DLA_core = core
    if runtime.DLA_core != core:
        raise SetupError(f"TensorRT did not take DLA core {core}", hint="`trt-engine doctor`")


def deserialised(runtime: Any, path: Path, logger: TensorRtLogger) -> Any:
    """The engine of a plan; the error TensorRT's messages tell of otherwise."""
    said, engine = logger.said, None
    try:
        nbytes = path.stat().st_size
        if not nbytes:
            raise EngineError(f"`{path}` is empty", hint="build the engine again")
        with path.open("rb") as file:
            if nbytes >= _LARGE_BYTES and compat.has("IStreamReaderV2.read"):
                engine = _read_in_pieces(runtime, file)
            else:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
                    engine = runtime.deserialize_cuda_engine(plan)
    except OSError as error:
        raise explain(error, path) from error
    if engine is None:
        raise logger.failure(f"loading `{path.name}`", EngineError, said)
    return engine


def _read_in_pieces(runtime: Any, file: BinaryIO) -> Any:
    """The engine of an open plan, whose weights go to the GPU without lying in host memory as a whole."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        reader = _reader_class()(plan)
        try:
            engine = runtime.deserialize_cuda_engine(reader)
        finally:
            reader.plan = None
        if reader.error is not None:
            raise reader.error
        return engine


@functools.cache
def _reader_class() -> Any:
    compat.require("IStreamReaderV2.read", "reading a plan piece by piece")

    class Reader(trt.IStreamReaderV2):  # type: ignore[misc]
        """Hands TensorRT parts of a mapped file, uncopied; what goes wrong is kept: TensorRT would only print it."""

        def __init__(self, plan: mmap.mmap) -> None:
            super().__init__()
            self.plan: mmap.mmap | None = plan
            self.error: BaseException | None = None
            self._at = 0

        def read(self, num_bytes: int, stream: int) -> memoryview | bytes:
            try:
                assert self.plan is not None
                start, self._at = self._at, min(self._at + num_bytes, len(self.plan))
                return memoryview(self.plan)[start : self._at]
            except BaseException as error:
                self.error = error
                return b""

        def seek(self, offset: int, where: Any) -> bool:
            try:
                assert self.plan is not None
                at = offset + {"SET": 0, "CUR": self._at, "END": len(self.plan)}[where.name]
                if not 0 <= at <= len(self.plan):
                    return False
                self._at = at
            except BaseException as error:
                self.error = error
                return False
            return True

    return Reader


def streamed(engine: Any, budget: str | None, logger: TensorRtLogger) -> int | None:
    """Set how many bytes of weights stay on the device; what TensorRT made of it. None where nothing was asked.

    To be called before any context is made. The setter hides a failure, so the value is read back.
    """
    if budget is None:
        return None
    compat.require("ICudaEngine.weight_streaming_budget_v2", "weight_streaming_budget")
    streamable = int(engine.streamable_weights_size)
    if streamable <= 0:
        if budget == "off":
            return None
        raise UsageError(
            "the engine's weights cannot be streamed",
            hint="build it with `-O weight_streaming=on`, or leave the budget out",
        )
    wanted = _budget_bytes(engine, budget, streamable)
    said = logger.said
    engine.weight_streaming_budget_v2 = wanted
    got = int(engine.weight_streaming_budget_v2)
    if got != wanted:
        raise logger.failure(f"keeping {wanted} bytes of weights on the device (TensorRT kept {got})", SetupError, said)
    return got


def _budget_bytes(engine: Any, budget: str, streamable: int) -> int:
    if budget == "off":
        return streamable
    if budget == "auto":
        return min(int(engine.get_weight_streaming_automatic_budget()), streamable)
    if budget.endswith("%"):
        return min(int(streamable * float(budget[:-1]) / 100), streamable)
    return min(parse_size(budget), streamable)
