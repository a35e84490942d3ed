"""Where a network comes from: `Model`, its digest, its signature, its external data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trt_engine.tensors import Signature

__all__ = ["ExternalFile", "Model"]


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """One side file that holds weights of an ONNX model."""

    location: str
    """As the model spells it, relative to the model's folder."""
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """An ONNX model on disk that was opened, found whole, and read. Made by `trt_engine.graph.load.open_model`."""

    path: Path
    digest: str
    """SHA-256 over the model file and its external files, in the order of their locations."""
    nbytes: int
    """Size of the model file and its external files together."""
    signature: Signature
    opsets: dict[str, int]
    """Version by operator-set domain; the default domain is `""`."""
    ir_version: int
    external: tuple[ExternalFile, ...] = ()
    optimised: str | None = None
    """How one sees that ONNX Runtime wrote this graph for one machine, and no exporter did; None for a plain model."""

    @property
    def name(self) -> str:
        """The file's name without `.onnx`."""
        return self.path.stem
