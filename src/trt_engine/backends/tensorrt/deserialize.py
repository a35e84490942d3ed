"""Deserializes a plan: checks its requirements, reports TensorRT's reason on failure, puts its weights back."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import os_errors
from trt_engine.backends.tensorrt import parser_check
from trt_engine.backends.tensorrt.allocator import clear_frames
from trt_engine.backends.tensorrt.binding import Binding, lifecycle_lock
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, ModelError, SetupError, UsageError
from trt_engine.plan_header import plan_header
from trt_engine.records.passport import Requirements
from trt_engine.trt.settings import PlanSettings
from trt_engine.units import parse_size

log = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 30
"""Plan bytes from which it is streamed if TensorRT can (10.7 on), to avoid a second host copy."""


def check_requirements(engine: Engine, settings: PlanSettings) -> None:
    """`EngineError` or `SetupError` for missing requirements of a plan, before TensorRT is called."""
    needs = engine.passport.requirements
    if _has_host_code(engine) and not settings.allow_host_code:
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


def _has_host_code(engine: Engine) -> bool:
    needs: Requirements = engine.passport.requirements
    options = engine.passport.build.config.get("options") or {}
    carried = str(options.get("serialize_plugins", "")).lower() in ("on", "true", "yes", "1")
    return (needs.version_compatible and not needs.lean_runtime) or carried


def make_runtime(logger: TensorRtLogger, settings: PlanSettings, subject: str) -> tuple[Any, ...]:
    """TensorRT's runtimes; the last one loads plans: the lean runtime if its library is given.

    Earlier ones must outlive it. An error logged during creation counts as a failure: the object would crash when used.
    """
    before = logger.problem_count
    try:
        with lifecycle_lock():
            runtime = logger.binding.trt.Runtime(logger.native)
    except (TypeError, RuntimeError) as error:
        raise logger.make_error(subject, SetupError) from error
    if logger.had_errors(before):
        raise logger.make_error(subject, SetupError, before)
    runtime.engine_host_code_allowed = settings.allow_host_code
    if settings.dla_core is not None:
        _set_dla_core(runtime, settings.dla_core)
    if settings.lean_runtime is None:
        return (runtime,)
    path = Path(settings.lean_runtime).expanduser()
    if not path.is_file():
        raise SetupError(
            f"the lean runtime `{path}` does not exist",
            hint="give the path of `libnvinfer_lean.so` in `-O lean_runtime=`",
        )
    said = logger.problem_count
    with lifecycle_lock():
        lean = runtime.load_runtime(str(path.resolve()))
    if lean is None:
        raise logger.make_error(f"loading the lean runtime `{path.name}`", SetupError, said)
    lean.engine_host_code_allowed = settings.allow_host_code
    return (runtime, lean)


def _set_dla_core(runtime: Any, core: int) -> None:
    cores = runtime.num_DLA_cores
    if not 0 <= core < cores:
        raise SetupError(
            f"DLA core {core} does not exist, this machine has {cores}",
            hint="leave `-O dla_core=` out" if not cores else f"`-O dla_core=0` to `{cores - 1}`",
        )
    runtime.DLA_core = core
    if runtime.DLA_core != core:
        raise SetupError(f"TensorRT did not take DLA core {core}", hint="`trt-engine doctor`")


def deserialize(runtime: Any, path: Path, logger: TensorRtLogger) -> Any:
    """The engine of a plan; otherwise the error of TensorRT's messages."""
    said, engine = logger.problem_count, None
    with os_errors(path):
        if not path.stat().st_size:
            raise EngineError(f"`{path}` is empty", hint="build the engine again")
        with map_plan(path) as plan:
            if len(plan) >= _LARGE_BYTES and logger.binding.has_api("IStreamReaderV2.read"):
                engine = _deserialize_streamed(logger.binding, runtime, plan)
            else:
                engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise logger.make_error(f"loading `{path.name}`", EngineError, said)
    return engine


@contextlib.contextmanager
def map_plan(path: Path) -> Iterator[memoryview]:
    """The plan in the file, memory-mapped, without the metadata that another tool wrote before it."""
    header = plan_header(path)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
        whole[header.offset if header is not None else 0 :] as plan,
    ):
        yield plan


def _deserialize_streamed(binding: Binding, runtime: Any, plan: memoryview) -> Any:
    """The engine of a mapped plan; weights are streamed to the GPU without a full host copy."""
    reader = _StreamReader(plan)
    try:
        engine = runtime.deserialize_cuda_engine(binding.wrap_callback(reader))
    finally:
        reader.plan = None
    if reader.error is not None:
        raise reader.error
    return engine


class _StreamReader:
    """Hands TensorRT parts of a mapped file, without a copy; stores errors, which TensorRT would only print."""

    native_base = "IStreamReaderV2"

    def __init__(self, plan: memoryview) -> None:
        self.plan: memoryview | None = plan
        self.error: BaseException | None = None
        self._at = 0

    def read(self, num_bytes: int, stream: int) -> memoryview | bytes:
        try:
            assert self.plan is not None
            start, self._at = self._at, min(self._at + num_bytes, len(self.plan))
            return self.plan[start : self._at]
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


def set_weight_streaming(engine: Any, budget: str | None, logger: TensorRtLogger) -> int | None:
    """Set the bytes of weights that stay on the device; return the value in force, None if not requested.

    Call it before any context is created. The setter hides a failure, so the value is read back.
    """
    if budget is None:
        return None
    logger.binding.require_api("ICudaEngine.weight_streaming_budget_v2", "weight_streaming_budget")
    streamable = int(engine.streamable_weights_size)
    if streamable <= 0:
        if budget == "off":
            return None
        raise UsageError(
            "the engine's weights cannot be streamed",
            hint="build it with `-O weight_streaming=on`, or leave the budget out",
        )
    wanted = _budget_bytes(engine, budget, streamable)
    said = logger.problem_count
    engine.weight_streaming_budget_v2 = wanted
    got = int(engine.weight_streaming_budget_v2)
    if got != wanted:
        raise logger.make_error(
            f"keeping {wanted} bytes of weights on the device (TensorRT kept {got})", SetupError, said
        )
    return got


def _budget_bytes(engine: Any, budget: str, streamable: int) -> int:
    if budget == "off":
        return streamable
    if budget == "auto":
        return min(int(engine.get_weight_streaming_automatic_budget()), streamable)
    if budget.endswith("%"):
        return min(int(streamable * float(budget[:-1]) / 100), streamable)
    return min(parse_size(budget), streamable)


# ------------------------------------------------------------------------------------------------ weights put back

_MAX_NAMES = 5


def refit(engine: Any, model: Path, logger: TensorRtLogger) -> int:
    """Refit the engine with the weights of `model`, the graph it was built from; return the number of missing weights.

    Call it before a context is created. `ModelError` if the ONNX does not match, `EngineError` if weights are still missing
    or the engine is not refittable: a partly refitted engine computes garbage.
    """
    if not engine.refittable:
        raise EngineError(
            "the engine's weights cannot be replaced", hint="build it with `-O refit=identical` or `-O refit=all`"
        )
    raw, trt = parser_check.model_bytes(model), logger.binding.trt
    try:
        with lifecycle_lock():
            refitter = trt.Refitter(engine, logger.native)
    except TypeError as error:  # the library gave no object
        raise logger.make_error("preparing to put weights back", EngineError) from error
    try:
        return _refit_with(refitter, raw, model, logger)
    except BaseException as error:
        clear_frames(error)
        raise
    finally:
        with lifecycle_lock():
            del refitter


def _refit_with(refitter: Any, raw: bytes, model: Path, logger: TensorRtLogger) -> int:
    binding, trt = logger.binding, logger.binding.trt
    try:
        parser = trt.OnnxParserRefitter(refitter, logger.native)
    except TypeError as error:
        raise logger.make_error("preparing to put weights back", EngineError) from error
    before = len(refitter.get_missing_weights())
    with logger.suppress_errors():
        if not parser.refit_from_bytes(raw, str(model.absolute())):
            raise _refit_error(model, parser, logger)
    missing = list(refitter.get_missing_weights())
    if missing:
        more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        names = ", ".join(f"`{name}`" for name in missing[:_MAX_NAMES])
        raise EngineError(
            f"`{model}` has no weights for {names}{more}",
            hint="give the ONNX the engine was built from: `-O refit_from=MODEL.onnx`",
        )
    if not refitter.refit_cuda_engine():
        raise logger.make_error("refitting the engine", EngineError)
    if binding.has_api("Refitter.release_refit_resources") and not refitter.release_refit_resources():
        log.info("TensorRT keeps the memory used for refitting")
    log.info("refitted with the weights of `%s` (%d were missing)", model.name, before)
    return before


def _refit_error(model: Path, parser: Any, logger: TensorRtLogger) -> Exception:
    error = parser_check.unsupported_model_error(
        model, parser_check.parser_errors(parser), logger, "cannot take the weights of"
    )
    if isinstance(error, ModelError):
        error.hint = "give the ONNX the engine was built from: `-O refit_from=MODEL.onnx`"
    return error
