"""Result of an exporter: a raw ONNX file and a callable source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trt_engine.arrayfiles import Array
from trt_engine.conversion.axes import Axis
from trt_engine.tensors import Shape

Reference = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Runs the source on inputs by ONNX name; returns outputs by ONNX name."""


@dataclass(frozen=True)
class Exported:
    """A raw export of a source: neither simplified nor verified."""

    path: Path
    """The ONNX file; side files are in the same folder."""
    reference: Reference
    exporter: str
    """`dynamo`, `torchscript`, `tf2onnx`, `onnx`."""
    example: dict[str, Array]
    """Example inputs of the export by ONNX name."""
    symbols: dict[str, dict[int, str]]
    """Requested dynamic axes: input -> axis -> symbol name."""
    notes: tuple[str, ...] = ()
    """Report sentences on what was raised, renamed or dropped."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the exporting libraries: `{"torch": "2.13.0"}`."""
    close: Callable[[], None] = lambda: None
    """Releases `reference`."""
    limits: dict[str, Axis] = field(default_factory=dict)
    """Range of every symbol; others have every size from 1."""
    feeds: Callable[[Mapping[str, Shape], int], dict[str, Array]] | None = None
    """Inputs at other shapes, from a seed; None: the example, cropped or repeated."""
    specialized: Callable[[], str | None] = lambda: None
    """Source line where a dynamic size became a constant, once known."""
    roots: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Exporter's symbols: `s35` -> (`height`, 32) if the height is 32 times it."""
    modules: frozenset[str] = frozenset()
    """PyTorch module paths, `layer2.0.conv1`; empty for other sources."""
    batch_statistics: str | None = None
    """Source line that normalises with batch statistics, as in training."""
