"""Weights put back into a plan that was stripped of them, or replaced in one that lets them be: from the ONNX."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt import compat, parsing
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.errors import EngineError, ModelError

__all__ = ["refit"]

log = logging.getLogger(__name__)
_SHOWN = 5


def refit(engine: Any, model: Path, logger: TensorRtLogger) -> int:
    """Give the engine the weights of `model`, whose graph must be the one it was built from; how many it waited for.

    Call it before a context is made. `ModelError` where the ONNX does not fit, `EngineError` where weights are missing
    afterwards or the engine takes none: an engine half refitted would compute nonsense.
    """
    if not engine.refittable:
        raise EngineError(
            "the engine's weights cannot be replaced", hint="build it with `-O refit=identical` or `-O refit=all`"
        )
    raw = parsing.model_bytes(model)
    try:
        refitter = trt.Refitter(engine, logger)
        parser = trt.OnnxParserRefitter(refitter, logger)
    except TypeError as error:  # the library gave no object
        raise logger.failure("preparing to put weights back", EngineError) from error
    before = len(refitter.get_missing_weights())
    if not parser.refit_from_bytes(raw, str(model.absolute())):
        raise _unfit(model, parser, logger)
    missing = list(refitter.get_missing_weights())
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        names = ", ".join(f"`{name}`" for name in missing[:_SHOWN])
        raise EngineError(
            f"`{model}` has no weights for {names}{more}",
            hint="give the ONNX the engine was built from: `-O refit_from=MODEL.onnx`",
        )
    if not refitter.refit_cuda_engine():
        raise logger.failure("putting weights back into the engine", EngineError)
    if compat.has("Refitter.release_refit_resources") and not refitter.release_refit_resources():
        log.info("the memory used for putting weights back is kept by TensorRT")
    log.info("put the weights of `%s` back (%d were missing)", model.name, before)
    return before


def _unfit(model: Path, parser: Any, logger: TensorRtLogger) -> Exception:
    error = parsing.objection(model, list(parsing.complaints(parser)), logger, "cannot take the weights of")
    if isinstance(error, ModelError):
        error.hint = "give the ONNX the engine was built from: `-O refit_from=MODEL.onnx`"
    return error
