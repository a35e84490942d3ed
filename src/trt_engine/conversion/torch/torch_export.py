"""PyTorch modules and exported programs to ONNX: the dynamo exporter, with the TorchScript exporter as fallback.

Their errors name the user's line and what to change.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trt_engine.atomic_io import os_error
from trt_engine.conversion.axes import symbols_of
from trt_engine.conversion.exported import Exported
from trt_engine.conversion.torch.bound_module import BoundModule, call_module, flatten_outputs, inference_mode, to_torch
from trt_engine.conversion.torch.user_code import quiet_loggers, user_location
from trt_engine.conversion.torch.value_reads import ValueRead, read_at, value_reads
from trt_engine.errors import MemoryExhausted
from trt_engine.format import library_reason

log = logging.getLogger(__name__)

_HIGHEST_TORCHSCRIPT = 20
"""Highest opset of the TorchScript exporter (torch 2.13)."""


class _FlatModule(torch.nn.Module):  # type: ignore[misc]
    """The source as a module with positional tensor inputs and a tuple output."""

    def __init__(self, call: BoundModule) -> None:
        super().__init__()
        self.source = call.loaded.module
        self._keywords = call.keywords

    def forward(self, *tensors: Any) -> Any:
        found = tuple(tensor for _, tensor in flatten_outputs(call_module(self.source, tensors, self._keywords)))
        return found if len(found) > 1 else found[0]


def export_torch(call: BoundModule, exporter: str, opset: int, folder: Path) -> Exported:
    """Export the source as a raw ONNX file in `folder`; `ExportFailed` with the reason if the exporter fails."""
    path = folder / f"{exporter}.onnx"
    roots: dict[str, tuple[str, int]] = {}
    try:
        if exporter == "dynamo":
            roots = _dynamo(call, opset, path)
        else:
            _torchscript(call, opset, path)
    except (ExportFailed, KeyboardInterrupt):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryExhausted("the export ran out of memory", hint="give a smaller example `--input`") from error
    except BaseException as error:  # exporters pass on exceptions of the user's code
        for item in error_chain(error):
            if isinstance(item, OSError) and item.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise os_error(item, folder.parent) from error
        raise export_failure(error) from error
    versions = dict(call.loaded.versions)
    with contextlib.suppress(ImportError):
        import onnxscript

        versions["onnxscript"] = str(onnxscript.__version__)
    symbols = {name: {at: axis.symbol for at, axis in positions.items()} for name, positions in call.axes.items()}
    return Exported(
        path,
        call.run,
        exporter,
        call.example(),
        symbols,
        (*call.loaded.notes, *call.notes),
        versions,
        limits=symbols_of(call.axes),
        feeds=call.feeds,
        specialized=lambda: _specialized_line(call),
        roots=roots,
        modules=frozenset(name for name, _ in call.loaded.module.named_modules() if name),
        batch_statistics=call.batch_statistics,
    )


def _dynamo(call: BoundModule, opset: int, path: Path) -> dict[str, tuple[str, int]]:
    if call.loaded.scripted:
        raise ExportFailed("it reads Python code, and this is TorchScript")
    args = tuple(to_torch(array) for array in call.example().values())
    if call.loaded.program is not None:
        for size in call.loaded.program.range_constraints:
            if not size.is_Symbol:
                raise ExportFailed(
                    f"torch {torch.__version__} does not write a program that was saved with an axis in steps (`{size}`)"
                )
    with _exporter_log(), inference_mode(), _patch_len(call.loaded.module):
        if call.loaded.program is not None:
            program = torch.onnx.export(
                call.loaded.program, dynamo=True, input_names=list(call.names), output_names=list(call.outputs),
                opset_version=opset, verbose=False,
            )  # fmt: skip
        else:
            program = torch.onnx.export(
                _FlatModule(call).eval(), args, dynamo=True, input_names=list(call.names), output_names=list(call.outputs),
                dynamic_shapes=(_dynamic_dims(call),), opset_version=opset, verbose=False, optimize=True,
            )  # fmt: skip
    large = sum(parameter.nbytes for parameter in call.loaded.module.state_dict().values()) > _INLINE_UP_TO
    program.save(str(path), external_data=large)
    return _symbol_factors(call, getattr(program, "exported_program", None))


def _symbol_factors(call: BoundModule, program: Any) -> dict[str, tuple[str, int]]:
    """Exporter's symbols: `s35` -> (`height`, 32) if the height is `32*s35`."""
    if program is None:
        return {}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [str(name) for name in program.graph_signature.user_inputs]
    found = {}
    for name, value in zip(call.names, (values.get(item) for item in inputs), strict=False):
        for at, axis in call.axes.get(name, {}).items():
            sizes = getattr(value, "shape", ())
            if at < len(sizes) and isinstance(sizes[at], torch.SymInt):
                factor, root = sizes[at].node.expr.as_coeff_Mul()
                if root.is_Symbol and factor.is_Integer:
                    found[str(root)] = (axis.symbol, int(factor))
    return found


_INLINE_UP_TO = 1 << 30


def _dynamic_dims(call: BoundModule) -> tuple[dict[int, Any] | None, ...]:
    made: dict[str, Any] = {}
    for positions in call.axes.values():
        for axis in positions.values():
            if axis.symbol not in made:
                high = None if axis.high is None else axis.high // axis.step
                low = axis.low // axis.step
                name = axis.symbol if axis.step == 1 else f"_{axis.symbol}"
                dim = torch.export.Dim(name, min=low, max=high) if high != low else None
                made[axis.symbol] = dim * axis.step if dim is not None and axis.step > 1 else dim
    return tuple(
        {at: made[axis.symbol] for at, axis in call.axes[name].items()} if name in call.axes else None
        for name in call.names
    )


def _torchscript(call: BoundModule, opset: int, path: Path) -> None:
    if call.loaded.program is not None:
        raise ExportFailed("it traces modules, and this is an exported program")
    args = tuple(to_torch(array) for array in call.example().values())
    dynamic = {name: {at: axis.symbol for at, axis in positions.items()} for name, positions in call.axes.items()}
    with _exporter_log(), _stdout_to_null(), inference_mode(), _patch_len(call.loaded.module):
        # a script is exported as it is: called inside a trace, its weights are not part of that trace
        module = call.loaded.module if call.loaded.scripted else _FlatModule(call).eval()
        torch.onnx.export(
            module, args, str(path), dynamo=False, verbose=True, input_names=list(call.names),
            output_names=list(call.outputs), dynamic_axes=dynamic, opset_version=min(opset, _HIGHEST_TORCHSCRIPT),
            do_constant_folding=True,
        )  # fmt: skip


@contextlib.contextmanager
def _patch_len(module: Any) -> Iterator[None]:
    """Make `len(tensor)` trace as `tensor.shape[0]` in the source's files, as Python's `len` returns a number."""
    files = {sys.modules.get(type(item).__module__) for item in module.modules()}
    patched = [file for file in files if file is not None and "len" not in vars(file) and _is_user_file(file)]
    for file in patched:
        file.len = _rows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for file in patched:
            del file.len


def _is_user_file(file: Any) -> bool:
    return file.__name__.split(".")[0] not in ("torch", "trt_engine", "builtins")


def _rows(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else len(value)


_LOGGERS = "torch.onnx torch.export torch._export torch.fx torch._dynamo onnxscript onnx_ir torch".split()


@contextlib.contextmanager
def _exporter_log() -> Iterator[None]:
    """Redirect output of the exporters to the debug log."""
    said = io.StringIO()
    try:
        with (
            quiet_loggers(*_LOGGERS, level=logging.CRITICAL),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            yield
    finally:
        if text := said.getvalue().strip():
            log.debug("%s", text[-4000:])


@contextlib.contextmanager
def _stdout_to_null() -> Iterator[None]:
    """Redirect file descriptor 1: `verbose=True`, needed for source lines, prints the graph from C++."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with tempfile.TemporaryFile() as instead:
            os.dup2(instead.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def frozen_values(call: BoundModule) -> list[ValueRead]:
    """Source lines that read tensor values while traced: their decisions would be frozen."""
    if call.loaded.scripted or call.loaded.program is not None:
        return []
    args = tuple(to_torch(array) for array in call.example().values())
    with _exporter_log(), _patch_len(call.loaded.module):
        return value_reads(_FlatModule(call).eval(), args)


_GUARD = re.compile(r"(?:eval|set_replacement:?) .*?(?P<file>\S+\.py):(?P<line>\d+) in (?P<function>\w+)")


def _specialized_line(call: BoundModule) -> str | None:
    """User's line where a dynamic size first became a constant for `torch.export`; None if unknown."""
    if call.loaded.scripted or call.loaded.program is not None:
        return None
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, ear = logging.getLogger("torch.fx.experimental.symbolic_shapes"), Ear()
    args = tuple(to_torch(array) for array in call.example().values())
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        with _exporter_log(), inference_mode(), _patch_len(call.loaded.module):
            logger.setLevel(logging.INFO)
            logger.handlers[:], logger.propagate = [ear], False
            torch.export.export(_FlatModule(call).eval(), args, dynamic_shapes=(_dynamic_dims(call),), strict=False)
    except Exception as error:  # it fails as before; only its log matters
        log.debug("%s", error)
    finally:
        logger.handlers[:], logger.propagate, logger.level = before
    for line in heard:
        if "Eq(" in line or "set_replacement" in line:
            match = _GUARD.search(line)
            if match is not None and not is_library_file(match["file"]):
                return f"{Path(match['file']).name}:{match['line']} in `{match['function']}`"  # torch cuts paths short
    return None


class ExportFailed(Exception):
    """An exporter failed; the message is one line."""

    def __init__(self, reason: str, read: ValueRead | None = None) -> None:
        super().__init__(reason)
        self.read = read
        """The source line that reads tensor values, if that is the cause."""


_USER_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def error_chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, outermost first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return chain


def export_failure(error: BaseException) -> ExportFailed:
    """One line: the innermost error, and its location in the user's file if known."""
    chain = error_chain(error)
    stated = next(
        (
            item
            for item in chain
            if not type(item).__name__.endswith(("TorchExportError", "OnnxExporterError", "ConversionError"))
        ),
        chain[0],
    )
    text = f"{type(stated).__name__}: {library_reason(stated) if str(stated).strip() else ''}"
    places = [match for match in _USER_LINE.finditer(str(stated)) if not is_library_file(match["file"])]
    place = (
        f"{places[-1]['file']}:{places[-1]['line']} in `{places[-1]['function']}`" if places else user_location(stated)
    )
    guard = next((item for item in chain if _VALUE_GUARD.search(f"{type(item).__name__}: {item}")), None)
    line = (_guarded_line(guard) or (places[-1] if places else None)) if guard is not None else None
    read = read_at(line["file"], int(line["line"]), line["function"]) if line is not None else None
    if read is not None:
        return ExportFailed(str(read), read)
    return ExportFailed(text + (f" ({place})" if place else ""))


_VALUE_GUARD = re.compile(r"GuardOnDataDependent|data-dependent expression|[Dd]ata-dependent branching|item\(\) on")


def _guarded_line(error: BaseException) -> re.Match[str] | None:
    """Source line at which `torch.export` met a data-dependent condition."""
    lines = [match for match in _USER_LINE.finditer(str(error)) if "/torch/" not in match["file"]]
    return lines[-1] if lines else None


def is_library_file(path: str) -> bool:
    return "site-packages" in path or "/lib/python" in path or path.startswith("<")
