"""Parses an ONNX file into TensorRT's network, and reports the parser's errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import os_errors
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError
from trt_engine.format import quoted
from trt_engine.graph.symbolic_shapes import without_unbound_names
from trt_engine.trt.failure_causes import cause_hint, find_cause
from trt_engine.trt.parser_messages import ParserError, format_parser_error, plain_text

_MAX_SHOWN = 3
_GRAPH_CAUSES = (
    "plugin_not_found",
    "onnx_parse_error",
    "out_of_memory",
    "operator_not_supported",
    "data_type_not_supported",
)


def parse_model(network: Any, path: Path, logger: TensorRtLogger, config: Any = None) -> Any:
    """Parse the graph of `path` into the network and return the parser; `ModelError` with its errors otherwise.

    `config` passes settings (DLA) to the parser, if this TensorRT supports it. Keep the parser as long as the network:
    it owns the weights.
    """
    raw, trt, product = without_unbound_names(model_bytes(path)), logger.binding.trt, logger.binding.product
    try:
        parser = trt.OnnxParser(network, logger.native)
    except TypeError as error:  # the library gave no object
        raise logger.make_error(f"creating {product}'s ONNX parser") from error
    if config is not None and not parser.set_builder_config(config):
        raise logger.make_error(f"giving {product}'s ONNX parser the settings")
    # by absolute path: external weights are searched in its folder
    before = logger.problem_count
    with logger.suppress_errors():
        if not parser.parse(raw, str(path.absolute())):
            raise unsupported_model_error(path, parser_errors(parser), logger, since=before)
    return parser


def model_bytes(path: Path) -> bytes:
    """The file's bytes; `ModelError` where it cannot be read."""
    with os_errors(path, doing="read"):
        return path.read_bytes()


def parser_errors(parser: Any) -> list[ParserError]:
    """All errors of a parser."""
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        code = error.code()
        found.append(
            ParserError(
                description=str(error.desc()),
                code=str(getattr(code, "name", code)),
                node=error.node(),
                name=error.node_name() or "",
                operator=error.node_operator() or "",
                function=error.func() or "",
                file=error.file() or "",
                local_functions=tuple(str(item) for item in error.local_function_stack() or ()),
            )
        )
    return found


def unsupported_model_error(
    path: Path, errors: Sequence[ParserError], logger: TensorRtLogger, action: str = "cannot parse", since: int = 0
) -> TrtEngineError:
    """The exception for an unsupported graph, with the first parser errors and the hint of a known cause.

    The hint is that of the parser errors; errors of a missing GPU or driver are ignored. The log, from its message `since`
    on, is used only without parser errors.
    """
    product = logger.binding.product
    texts = [format_parser_error(refusal, product) for refusal in errors]
    texts = (
        texts or [plain_text(text, product) for text in logger.errors(since)[-_MAX_SHOWN:]] or ["no reason was given"]
    )
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    message = f"{product} {logger.binding.version_text} {action} `{path}`: {'; '.join(texts[:_MAX_SHOWN])}{more}"
    cause = find_cause([refusal.description for refusal in errors] if errors else logger.problems(since))
    if any(refusal.code == "MEM_ALLOC_FAILED" for refusal in errors):
        return MemoryExhausted(message, hint="free memory on host and GPU; `nvidia-smi` shows who has it")
    hint = cause_hint(cause, product) if cause is not None and (cause.name in _GRAPH_CAUSES or not errors) else ""
    return ModelError(
        message, hint=hint or f"`trt-engine inspect {quoted(path)}` lists what in the model {product} cannot take"
    )
