"""Errors of PyTorch's exporters, with the user's line and what to change."""

from __future__ import annotations

import re

from trt_engine.conversion.torch.user_code import user_location
from trt_engine.conversion.torch.value_reads import ValueRead, read_at
from trt_engine.format import library_reason


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
