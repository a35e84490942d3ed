"""Which lines of a parser's functions were executed, by Python's own tracing: nothing to install, and any Python."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["Lines", "lines_of_functions", "modules_under"]


def modules_under(parsers: Sequence[str]) -> dict[str, str]:
    """Files of the modules and packages under `trt_engine`, by their dotted name."""
    found = {}
    for name in parsers:
        spec = importlib.util.find_spec(f"trt_engine.{name}")
        if spec is None or spec.origin is None:
            continue
        files = (
            sorted(Path(spec.origin).parent.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]
        )
        for file in files:
            inner = file.relative_to(Path(spec.origin).parent).with_suffix("").parts if len(files) > 1 else ()
            found[".".join([name, *(part for part in inner if part != "__init__")])] = str(file)
    return found


def lines_of_functions(file: str) -> set[int]:
    """The numbers of the lines inside functions: what importing the module executes is left out."""
    found: set[int] = set()

    def walk(code: CodeType) -> None:
        if code.co_flags & 0x3 == 0x3:  # CO_OPTIMIZED and CO_NEWLOCALS: a function, no class body
            found.update(line for _, _, line in code.co_lines() if line and line != code.co_firstlineno)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                walk(constant)

    walk(compile(Path(file).read_text(), file, "exec"))
    return found


class Lines:
    """A trace function that keeps the executed lines of some files."""

    def __init__(self, files: Sequence[str]) -> None:
        self._seen: dict[str, set[int]] = {file: set() for file in files}

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        seen = self._seen.get(frame.f_code.co_filename)
        if seen is None:
            return None

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            seen.add(frame.f_lineno)
            return local

        return local(frame, event, arg)

    def taken(self) -> dict[str, list[int]]:
        return {file: sorted(lines) for file, lines in self._seen.items()}
