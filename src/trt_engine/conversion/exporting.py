"""What every exporter gives: a raw ONNX file, and its source ready to be run on named inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trt_engine.conversion.axes import Axis
from trt_engine.tensors import Shape

__all__ = ["Array", "Exported", "Reference"]

Array = npt.NDArray[Any]
Reference = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Runs the source on inputs by their ONNX names; gives its outputs by their ONNX names."""


def _nothing() -> None:
    return None


def _nowhere() -> str | None:
    return None


@dataclass(frozen=True)
class Exported:
    """One source as it came out of an exporter: not simplified, not checked, in the folder it was told to write to."""

    path: Path
    """The ONNX file; side files lie beside it."""
    reference: Reference
    exporter: str
    """`dynamo`, `torchscript`, `tf2onnx`, `onnx`."""
    example: dict[str, Array]
    """The inputs it was exported with, by their ONNX names."""
    symbols: dict[str, dict[int, str]]
    """What is to stay dynamic: input -> axis -> the name of its symbol."""
    notes: tuple[str, ...] = ()
    """For the report: what was raised, renamed or left out, one sentence each."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the libraries that wrote it: `{"torch": "2.13.0"}`."""
    close: Callable[[], None] = _nothing
    """Called when `reference` is not needed any more."""
    limits: dict[str, Axis] = field(default_factory=dict)
    """The range of every symbol; one that is not named here has every size from 1."""
    feeds: Callable[[Mapping[str, Shape], int], dict[str, Array]] | None = None
    """Inputs of other shapes, from a seed; None: the example, cut off or repeated."""
    specialized: Callable[[], str | None] = _nowhere
    """The line of the source where an open size became a number, once that is known to have happened."""
    roots: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Names the exporter made up: `s35` -> (`height`, 32), where the height is 32 times it."""
    modules: frozenset[str] = frozenset()
    """Of PyTorch, by path: `layer2.0.conv1`; empty for other sources."""
    batch_statistics: str | None = None
    """The line of the source that normalises with the statistics of the inputs at hand, as in training."""
