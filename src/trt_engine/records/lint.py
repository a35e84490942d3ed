"""Results of `lint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_engine.display import RichDisplay
from trt_engine.records.base import Finding


@dataclass(frozen=True, slots=True)
class OperatorSupport:
    """Who runs one operator of a model."""

    op: str
    """As `Conv` or `com.microsoft::Gelu`."""
    nodes: int
    tensorrt: Literal["yes", "limited", "no", "plugin", "unknown"]
    """`limited`: not with the attributes or types of every node here; `plugin`: a library has to bring it."""
    cpu: Literal["yes", "limited", "no", "unknown"]
    """ONNX Runtime's CPU provider, as installed; `unknown` where the build does not list its kernels."""
    cuda: Literal["yes", "limited", "no", "unknown"]
    """ONNX Runtime's CUDA provider, by its published list; what it lacks runs on the CPU."""
    note: str | None = None
    """Reasons for anything but `yes`."""


@dataclass(frozen=True, slots=True)
class SupportedSubgraph:
    """An unbroken run of nodes of the main graph that a parser takes."""

    nodes: int
    first: str
    """The label of its first node."""
    last: str
    start: int
    """Index of its first node in the graph."""
    end: int
    """Index of its last node."""


@dataclass(frozen=True, slots=True)
class ReducedModel:
    """The smallest part found that is rejected for the same reason as the full model."""

    path: str
    nodes: int
    """Nodes of the part, those of bodies and local functions included."""
    original_nodes: int
    """Nodes of the full model."""
    operators: tuple[str, ...]
    """Operators of the part."""
    rejected_by: str
    """`tensorrt-rtx 1.7.1.116 parser`, `tensorrt-rtx 1.7.1.116 builder for 8.9`."""
    reason: str
    candidates: int
    """Parts that were put to the parser or builder."""
    complete: bool
    """True when no node can be left out any more, False where the search ended before."""


@dataclass(frozen=True, slots=True)
class LintReport(RichDisplay):
    """Report of `lint` on a model."""

    path: str
    name: str
    digest: str
    target: Literal[
        "all", "tensorrt", "onnxruntime", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda", "onnxruntime-tensorrt"
    ]
    tensorrt: str
    """The TensorRT release that was judged for; of TensorRT-RTX the one with the same parser."""
    onnxruntime: str | None
    """The installed release that was judged for."""
    opset: int | None
    ir_version: int
    nodes: int
    shapes: dict[str, tuple[int, ...]]
    """The input shapes the graph was traced at."""
    shapes_assumed: bool
    """True when some of these sizes are assumed."""
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    """Findings by severity."""
    operators: tuple[OperatorSupport, ...]
    """Support of each operator of the model."""
    checked_by: str = "static tables"
    """Source of TensorRT operator support: a real parser, as `tensorrt-rtx 1.7.1.116 parser`, or lists and rules."""
    subgraphs: tuple[SupportedSubgraph, ...] = ()
    """The longest runs of nodes that the parser takes; empty without a parser, and where it did not see all of the graph."""
    reduced: ReducedModel | None = None
    """With `--reduce`; None without."""
