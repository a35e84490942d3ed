"""From an ONNX file to TensorRT's network, and everything its parser objects to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError
from trt_engine.files import explain
from trt_engine.plans.causes import cause_of

__all__ = ["complaints", "model_bytes", "objection", "parse"]

_SHOWN = 3
_OF_A_GRAPH = ("plugin_not_found", "onnx_parse_error", "out_of_memory")


def parse(network: Any, path: Path, logger: TensorRtLogger, config: Any = None) -> Any:
    """The parser, after it has put the graph of `path` into the network; `ModelError` with its objections otherwise.

    `config` lets the parser look at settings (DLA), where this TensorRT can take it. Keep the parser as long as the
    network: weights stay its own.
    """
    raw = model_bytes(path)
    try:
        parser = trt.OnnxParser(network, logger)
    except TypeError as error:  # the library gave no object
        raise logger.failure("creating TensorRT's ONNX parser") from error
    if config is not None and not parser.set_builder_config(config):
        raise logger.failure("giving TensorRT's ONNX parser the settings")
    # by its whole path: external weights are looked for beside it, whatever the current folder
    before = logger.said
    if not parser.parse(raw, str(path.absolute())):
        raise objection(path, list(complaints(parser)), logger, since=before)
    return parser


def model_bytes(path: Path) -> bytes:
    """The file's bytes; `ModelError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise explain(error, path, doing="read") from error


def complaints(parser: Any) -> Iterator[tuple[str, str]]:
    """What a parser objects to, each with the name of its code: node, operator, local functions around it, reason."""
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        code = error.code()
        name = str(getattr(code, "name", code))
        place = f"node {error.node()}"
        if error.node_name():
            place += f" `{error.node_name()}`"
        if error.node_operator():
            place += f" ({error.node_operator()})"
        inside = [str(item) for item in error.local_function_stack() or ()]
        if inside:
            place += f" in {' in '.join(inside)}"
        yield name, f"{place}: {str(error.desc()).strip() or name}"


def objection(
    path: Path, found: list[tuple[str, str]], logger: TensorRtLogger, doing: str = "cannot parse", since: int = 0
) -> TrtEngineError:
    """The error for a graph TensorRT does not take, with the first objections and the hint of a known cause.

    The hint is that of the objections: errors of a missing GPU or driver stand beside them and refuse no graph. The log,
    from its message `since` on, is used only where there are none.
    """
    texts = [text for _, text in found] or logger.errors()[-_SHOWN:] or ["no reason was given"]
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    message = f"TensorRT {trt.__version__} {doing} `{path}`: {'; '.join(texts[:_SHOWN])}{more}"
    cause = cause_of(texts if found else logger.grave(since))
    if any(name == "MEM_ALLOC_FAILED" for name, _ in found):
        return MemoryExhausted(message, hint="free memory on host and GPU; `nvidia-smi` shows who has it")
    hint = cause.hint if cause is not None and (cause.name in _OF_A_GRAPH or not found) else ""
    return ModelError(message, hint=hint or f"`trt-engine inspect {path}` lists what in the model TensorRT cannot take")
