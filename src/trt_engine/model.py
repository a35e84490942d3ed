"""`Model`: an ONNX file with its graph, digest, signature and external data; the reports that stand for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trt_engine.display import RichDisplay
from trt_engine.errors import UsageError
from trt_engine.tensors import Signature

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto


class NodeLocation(NamedTuple):
    """A node and its location."""

    node: NodeProto
    owner: GraphProto | FunctionProto
    opsets: dict[str, int]
    """Opset imports there: a local function has its own."""


@dataclass(frozen=True, slots=True)
class GraphIndex:
    """A parsed model and what one walk over it finds, bodies of If, Loop and Scan and local functions included.

    Made by `trt_engine.graph.walk.index_of`, for callers that do not modify the proto.
    """

    proto: ModelProto
    """Without external weights."""
    graphs: tuple[GraphProto, ...]
    """The main graph first."""
    nodes: tuple[NodeLocation, ...]
    tensors: tuple[TensorProto, ...]
    """Initializers and tensors in attributes."""
    opsets: dict[str, int]
    """Version by operator-set domain; the default domain is `""`."""
    functions: frozenset[tuple[str, str]]
    """Domain and name of the local functions."""


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """One side file that holds weights of an ONNX model."""

    location: str
    """As the model spells it, relative to the model's folder."""
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """An ONNX model on disk, opened and verified. Made by `trt_engine.graph.load.open_model`."""

    path: Path
    digest: str
    """SHA-256 over the model file and its external files, in the order of their locations."""
    nbytes: int
    """Size of the model file and its external files together."""
    signature: Signature
    opsets: dict[str, int]
    """Version by operator-set domain; the default domain is `""`."""
    ir_version: int
    graph: GraphIndex = field(repr=False, compare=False)
    external: tuple[ExternalFile, ...] = ()
    optimised: str | None = None
    """How one sees that ONNX Runtime wrote this graph for one machine, and no exporter did; None for a plain model."""

    @property
    def proto(self) -> ModelProto:
        """The parsed file without external weights, for callers that do not modify it."""
        return self.graph.proto

    @property
    def name(self) -> str:
        """The file's name without `.onnx`."""
        return self.path.stem


class WrittenModel(RichDisplay):
    """Base class of reports of a written model, which stand for its path: `te.build(te.convert(...))`."""

    __slots__ = ()
    out: str | None

    def __fspath__(self) -> str:
        if self.out is None:
            raise UsageError(f"this {type(self).__name__} wrote no model", hint="run it without `dry_run=True`")
        return self.out
