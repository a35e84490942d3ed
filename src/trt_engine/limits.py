"""Bounds on the work and memory that a file from elsewhere may cause, each raised with an environment variable.

A file over a bound is refused with a message that names the variable (`Limit.hint`). `docs/limits.md` has the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from trt_engine.errors import UsageError
from trt_engine.units import parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound: the environment variable that sets it, its default, and what it bounds."""

    variable: str
    """`TRT_ENGINE_MAX_...`."""
    default: int
    """In bytes, seconds or items, by `unit`."""
    unit: Literal["bytes", "s", "items"]
    description: str
    """What it bounds, as in the table of `docs/limits.md`."""

    @property
    def value(self) -> int:
        """The bound in force; `UsageError` for a variable that holds no positive size, duration or count."""
        text = os.environ.get(self.variable, "").strip()
        if not text:
            return self.default
        try:
            value = self._parse(text)
        except (UsageError, ValueError, OverflowError):
            value = 0
        if value < 1:
            raise UsageError(
                f"the environment variable `{self.variable}` is `{text[:60]}`, expected {_EXPECTED[self.unit]}",
                hint=f"unset it for the default, {self.format_value(self.default)}",
            )
        return value

    def _parse(self, text: str) -> int:
        if self.unit == "bytes":
            return parse_size(text)
        return int(parse_duration(text)) if self.unit == "s" else int(text)

    @property
    def hint(self) -> str:
        """Hint for a legitimate file over the bound."""
        return f"if you trust the file, raise `{self.variable}` (now {self.format_value(self.value)})"

    def format_value(self, value: int) -> str:
        """`1GiB`, `20s` or `2000000`: as the variable takes it."""
        if self.unit != "bytes":
            return f"{value}s" if self.unit == "s" else str(value)
        for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= factor:
                return f"{value / factor:g}{unit}"
        return f"{value}B"


_EXPECTED = {"bytes": "a size such as `2GiB`", "s": "a duration such as `60s`", "items": "a whole number above 0"}
RECORD_SIZE = Limit(
    "TRT_ENGINE_MAX_RECORD_SIZE", 256 << 20, "bytes", "a record, log, image, plan file or declaration that is read"
)
RECORD_VALUES = Limit("TRT_ENGINE_MAX_RECORD_VALUES", 8_000_000, "items", "values in one JSON document")
LOG_LINES = Limit("TRT_ENGINE_MAX_LOG_LINES", 2_000_000, "items", "lines of a log that is read")
ARRAY_SIZE = Limit(
    "TRT_ENGINE_MAX_ARRAY_SIZE",
    512 << 20,
    "bytes",
    "arrays of an `.npy` or `.npz` with over 10 times its bytes on disk",
)
IMAGE_PIXELS = Limit(
    "TRT_ENGINE_MAX_IMAGE_PIXELS", 80_000_000, "items", "pixels of an image, half for video (Pillow: 178,956,970)"
)
PACKED_RECORDS = Limit("TRT_ENGINE_MAX_PACKED_RECORDS", 512 << 20, "bytes", "all records of an archive of a run")
UNPACKED_SIZE = Limit(
    "TRT_ENGINE_MAX_UNPACKED_SIZE",
    64 << 20,
    "bytes",
    "what an archive of a run with over 300 times its size unpacks to",
)
MODEL_NODES = Limit(
    "TRT_ENGINE_MAX_NODES", 150_000, "items", "nodes and stored tensors of an ONNX model, local functions written out"
)
FUNCTION_NODES = Limit(
    "TRT_ENGINE_MAX_FUNCTION_NODES", 4_000, "items",
    "nodes that local functions add when they are written out, beside ten for each node of the file",
)  # fmt: skip
MODEL_INPUTS = Limit("TRT_ENGINE_MAX_INPUTS", 10_000, "items", "inputs and outputs of an ONNX model")
CONSTANT_SIZE = Limit(
    "TRT_ENGINE_MAX_CONSTANT_SIZE", 128 << 20, "bytes",
    "what an ONNX model computes from constants alone, beside 64 times what it stores",
)  # fmt: skip
CONSTANT_WORK = Limit(
    "TRT_ENGINE_MAX_CONSTANT_WORK", 10**10, "items",
    "multiplications of constants with each other in an ONNX model, beside 100 for each byte it stores",
)  # fmt: skip
RUN_SIZE = Limit(
    "TRT_ENGINE_MAX_RUN_SIZE", 512 << 20, "bytes",
    "inputs of an ONNX model at the sizes it states, and what is in memory at once when it runs at them, beside 64 times "
    "what it stores and what it is fed",
)  # fmt: skip
PICKLE_OPCODES = Limit("TRT_ENGINE_MAX_PICKLE_OPCODES", 750_000, "items", "opcodes of one pickle in a checkpoint")
ARCHIVE_MEMBERS = Limit("TRT_ENGINE_MAX_ARCHIVE_MEMBERS", 100_000, "items", "members of a ZIP archive with a model")
ARCHIVE_RATIO = Limit(
    "TRT_ENGINE_MAX_ARCHIVE_RATIO", 200, "items", "times that a compressed ZIP archive may grow when it is read"
)
PROGRAM_SIZE = Limit(
    "TRT_ENGINE_MAX_PROGRAM_SIZE", 256 << 20, "bytes", "the JSON, or the code, of a network in a ZIP archive"
)
LIMITS: tuple[Limit, ...] = (
    RECORD_SIZE,
    RECORD_VALUES,
    LOG_LINES,
    ARRAY_SIZE,
    IMAGE_PIXELS,
    PACKED_RECORDS,
    UNPACKED_SIZE,
    MODEL_NODES,
    FUNCTION_NODES,
    MODEL_INPUTS,
    CONSTANT_SIZE,
    CONSTANT_WORK,
    RUN_SIZE,
    PICKLE_OPCODES,
    ARCHIVE_MEMBERS,
    ARCHIVE_RATIO,
    PROGRAM_SIZE,
)
"""All of them, for `docs/limits.md` and `doctor`."""
