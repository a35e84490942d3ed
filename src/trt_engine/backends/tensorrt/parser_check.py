"""Checks a graph with the ONNX parser and builder of TensorRT or TensorRT-RTX in a child process, because native code may
crash or hang; either is a result about the graph.
Parses an ONNX file into the network of a build as well, and reports the parser's errors.

python -m trt_engine.backends.tensorrt.parser_check PIPE     the child: one request per line on stdin, one reply per line
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import mmap
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine.atomic_io import decode_json, os_errors
from trt_engine.backends.tensorrt.binding import TENSORRT, TENSORRT_RTX, Binding, lifecycle_lock
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.closing import Closing
from trt_engine.environment import distribution_version
from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError
from trt_engine.format import library_reason, quoted
from trt_engine.graph.symbolic_shapes import without_unbound_names
from trt_engine.trt.failure_causes import cause_hint, error_texts, find_cause, main_error
from trt_engine.trt.parser_messages import ParserError, format_parser_error, plain_text
from trt_engine.workers.crash import exit_name
from trt_engine.workers.messages import MessagePipe
from trt_engine.workers.process import ChildProcess, exit_with_parent, read_first_line, spawn_worker

Library = Literal["tensorrt", "tensorrt-rtx"]
LIBRARIES: dict[Library, Binding] = {"tensorrt": TENSORRT, "tensorrt-rtx": TENSORRT_RTX}
_PARSE_S, _BUILD_S = 300.0, 900.0
"""Timeouts of a request: parsing takes seconds for gigabytes, building a large network minutes."""


@dataclass(frozen=True, slots=True)
class ParserCheck:
    """The result of a parser, and of a builder if used, for one graph."""

    version: str = ""
    """Version of the library: `1.7.1.116`."""
    errors: tuple[ParserError, ...] = ()
    """Empty if the parser accepts the graph, or gives no reason."""
    parsed: bool = False
    built: bool | None = None
    """None where nothing was built."""
    cause: str = ""
    """The name of a known cause (`trt/failure_causes.py`) of a failed build."""
    message: str = ""
    """The most informative error of a failed build, without internals."""
    exit_status: str = ""
    """How the child ended before its reply: `SIGSEGV`, `exit code 1`, `no answer within 300 s`."""
    unavailable: str = ""
    """Why the library cannot be used here."""


def installed_version(library: Library) -> str | None:
    """The version of the library's Python package, None where it is not installed; nothing is imported."""
    binding = LIBRARIES[library]
    try:
        if importlib.util.find_spec(binding.module) is None:
            return None
    except (ImportError, ValueError):
        return None
    versions = (distribution_version(name) for name in binding.distributions)
    return next((version for version in versions if version), "")


class _Request(msgspec.Struct):
    library: Library
    model: str
    weights_beside: str
    """The path whose folder has the external weights."""
    gpus: list[str]
    """Compute capabilities to build for; with none the graph is only parsed."""
    build: bool


class ParserProcess(Closing):
    """Sends requests to a library in a child process, started on demand and restarted after it ended."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.binding = LIBRARIES[library]
        self._child: ChildProcess | None = None

    def check(self, model: Path, *, weights_beside: Path | None = None) -> ParserCheck:
        """Whether the parser takes the file; its external weights are in the folder of `beside`."""
        return self._send(
            _Request(self.library, str(model), str((weights_beside or model).absolute()), [], False), _PARSE_S
        )

    def build(self, model: Path, gpus: Sequence[str] = (), *, weights_beside: Path | None = None) -> ParserCheck:
        """Whether parser and builder take the file, for these compute capabilities (default: the library's own)."""
        place = str((weights_beside or model).absolute())
        return self._send(_Request(self.library, str(model), place, list(gpus), True), _BUILD_S)

    def _send(self, request: _Request, limit_s: float) -> ParserCheck:
        raw = msgspec.json.encode(request)
        try:
            if self._child is None:
                self._child = spawn_worker(__name__, raw, subprocess.DEVNULL)
            else:
                self._child.send(raw)
            answer = self._child.read_line(limit_s)
        except TimeoutError:
            self.close()
            return ParserCheck(exit_status=f"no answer within {limit_s:g} s")
        except BaseException:  # KeyboardInterrupt as well
            self.close()
            raise
        if answer is None:
            ended, self._child = self._child.close(grace_s=5.0), None
            return ParserCheck(exit_status=exit_name(ended.code))
        return decode_json(answer, type=ParserCheck)

    def close(self) -> None:
        """End the child. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


# ------------------------------------------------------------------------------------------------ the child


def main(pipe: int) -> None:
    """Serve requests until stdin ends."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an expected result
    exit_with_parent(reads_stdin=True)
    replies = MessagePipe(pipe)
    while True:
        replies.send(_check_request(msgspec.json.decode(read_first_line(), type=_Request)))


def _check_request(request: _Request) -> ParserCheck:
    from trt_engine.backends.tensorrt.logger import TensorRtLogger
    from trt_engine.backends.tensorrt.plugins import load_plugins
    from trt_engine.errors import TrtEngineError

    binding = LIBRARIES[request.library]
    try:
        trt, version = binding.trt, binding.version_text
        binding.check_version()
    except (ImportError, OSError, TrtEngineError) as error:
        return ParserCheck(unavailable=library_reason(error))
    with TensorRtLogger(binding=binding) as logger:
        try:
            load_plugins((), (), logger)
            with lifecycle_lock():
                builder = trt.Builder(logger.native)
            network = builder.create_network(binding.strongly_typed_flags())
            parser = trt.OnnxParser(network, logger.native)
        except (TypeError, TrtEngineError):  # the library gives no object without a driver
            reason = plain_text((logger.errors() or ["no reason was given"])[-1], binding.product)
            return ParserCheck(version, unavailable=reason)
        with Path(request.model).open("rb") as file, _map_file(file) as raw:
            parsed = bool(parser.parse(raw, request.weights_beside))
            refusals = tuple(parser_errors(parser))
            if any(_lacks_node(item) for item in refusals):
                # a parser does not keep its network alive
                second = builder.create_network(binding.strongly_typed_flags())
                again = trt.OnnxParser(second, logger.native)
                name, operator = _last_node(lambda: again.parse(raw, request.weights_beside))
                refusals = tuple(
                    replace(item, name=name, operator=operator) if _lacks_node(item) else item for item in refusals
                )
        if not parsed or not request.build:
            text = "" if parsed or refusals else _find_failure(logger.problems(), binding.product)[1]
            return ParserCheck(version, refusals if not parsed else (), parsed, message=text)
        since = logger.problem_count
        built = _try_build(trt, builder, network, request.gpus)
        cause, text = ("", "") if built else _find_failure(logger.problems(since), binding.product)
        return ParserCheck(version, (), True, built, cause, text)


@contextlib.contextmanager
def _map_file(file: Any) -> Any:
    """The file's bytes without a copy; an empty one cannot be mapped."""
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            yield raw
    except ValueError:
        yield b""


def _lacks_node(refusal: ParserError) -> bool:
    """Whether the error is about a node without naming it."""
    without = ("importInput", "importInputs", "importInitializers", "importOutputs")
    return refusal.node < 0 and refusal.function not in without


_NODE = re.compile(r"Parsing node: (?P<name>.*) \[(?P<operator>\w+)\]")


def _last_node(parse: Callable[[], object]) -> tuple[str, str]:
    """Name and operator of the node at which the parser stopped, from its verbose log."""
    last = ["", ""]

    class Last(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := _NODE.match(record.getMessage()):
                last[:] = found["name"], found["operator"]

    library_log, handler = logging.getLogger("trt_engine.tensorrt"), Last()
    level, propagate = library_log.level, library_log.propagate
    library_log.addHandler(handler)
    library_log.setLevel(logging.DEBUG)
    library_log.propagate = False
    try:
        parse()
    finally:
        library_log.removeHandler(handler)
        library_log.setLevel(level)
        library_log.propagate = propagate
    return last[0], last[1]


def _try_build(trt: Any, builder: Any, network: Any, gpus: Sequence[str]) -> bool:
    """Whether a plan can be built of the network; dynamic dimensions and shape values are set to 1."""
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    if gpus:
        config.num_compute_capabilities = len(gpus)
        for index, gpu in enumerate(gpus):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{gpu.replace('.', '')}"), index)
    profile, used = builder.create_optimization_profile(), False
    for tensor in map(network.get_input, range(network.num_inputs)):
        shape = [size if size >= 0 else 1 for size in tensor.shape]
        if tensor.is_shape_tensor:
            count = shape[0] if shape else 1
            profile.set_shape_input(tensor.name, *[[1] * count] * 3)
            used = True
        elif list(tensor.shape) != shape:
            profile.set_shape(tensor.name, *[shape] * 3)
            used = True
    if used:
        config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None


_NO_DRIVER = "cudaError 35"


def _find_failure(texts: list[str], product: str) -> tuple[str, str]:
    """The cause's name and its main error; errors of a missing driver are ignored."""
    own = [text for text in texts if _NO_DRIVER not in text] or texts
    cause = find_cause(own)
    error = main_error(error_texts(own), crashed=True) or (own[-1].partition("] ")[2] if own else "no reason was given")
    return (cause.name if cause is not None else ""), plain_text(cause.text if cause is not None else error, product)


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
