"""What all result records share: findings, timings, the document printed by `--json`, files of records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine import logs
from trt_engine.atomic_io import encode_json, os_errors, write_json
from trt_engine.environment import distribution_version
from trt_engine.errors import TrtEngineError
from trt_engine.format import node_label


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of one of several items: its type, message, hint and exit code."""

    type: str
    message: str
    hint: str | None
    exit_code: int

    @classmethod
    def of(cls, error: TrtEngineError) -> Failure:
        return cls(type(error).__name__, error.message, error.hint, error.exit_code)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a run and the seconds it took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing about a model: what, where, what it means, what to do."""

    code: str
    """Stable and greppable: `tensorrt-only-operator`, `deformable-attention`, `detr-mask-path`."""
    severity: Literal["info", "warning", "error"]
    message: str
    location: str | None = None
    """Name of the node, tensor or constant; None for the whole model."""
    hint: str | None = None
    module: str | None = None
    """The PyTorch module of `location`; None if unknown."""

    @property
    def full_message(self) -> str:
        """The message with its place, where it does not name it."""
        if self.location and f"`{self.location}`" not in self.message:
            return f"{self.message} (at `{node_label(self.location, self.module)}`)"
        return f"{self.message} (in `{self.module}`)" if self.module else self.message


def verb_document(verb: str, report: Any, *, command: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The verb's JSON document: the common keys, then the verb's own.

    `body` is one of the `...Report` records or a mapping.
    """
    own = report if isinstance(report, Mapping) else msgspec.to_builtins(report)
    common = {
        "schema": f"trt-engine/{verb}",
        "schema_version": 1,
        "tool": {"name": "trt-engine", "version": distribution_version("trt-engine") or "unknown"},
        "command": command,
        "warnings": [*warnings, *(item for item in own.get("warnings", ()) if item not in warnings)],
    }
    return common | {name: value for name, value in own.items() if name not in common}


def write_document(path: Path, verb: str, report: Any, *, command: str, of: str = "") -> Path:
    """Write the verb's JSON document atomically; a command of the verb (or of the verb `of`) completes its warnings when
    it prints its own document.
    """
    doc = verb_document(verb, report, command=command)
    if (running := logs.running_command()) is not None:
        running.documents[path] = (of or verb, doc)
    return write_json(path, doc)


def append_record(path: Path, record: Any) -> None:
    """Add one record to a .jsonl file, at once, so that an interruption loses nothing already measured.

    A line that does not fit on the disk is taken back: the file holds whole records or is as it was.
    """
    line = encode_json(record) + b"\n"
    with os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if before:
                file.seek(before - 1)
                if file.read(1) != b"\n":  # a process died in the middle of a line; ours starts on its own
                    line = b"\n" + line
            try:
                while line:  # a full disk first writes less than requested, and fails on the next write
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(before)
                raise
