"""Results of `convert`, and of the graph passes it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trt_engine.environment import Environment
from trt_engine.model import WrittenModel
from trt_engine.records.base import Finding
from trt_engine.records.parity import OutputError
from trt_engine.tensors import Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChange:
    """What a rewrite did to a graph, and the output difference from the source model."""

    model: str
    out: str
    nodes_before: int
    nodes_after: int
    functions_inlined: int
    nbytes_before: int
    nbytes_after: int
    """External data included."""
    max_rel: float | None
    """The largest difference of any output, in shares of its largest value; None where nothing was compared."""
    tolerance: float
    """Allowed difference: as requested, or by the coarsest dtype of the graph."""
    shapes: tuple[dict[str, tuple[int, ...]], ...] = ()
    """The input shapes at which both were run in ONNX Runtime."""
    unchecked: tuple[str, ...] = ()
    """Outputs of which types and shapes alone were compared: random ones, and those in the order of a sort."""
    notes: tuple[str, ...] = ()
    artifacts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplifyReport(GraphChange):
    """Report of `simplify`."""

    simplifier: Literal["onnxslim", "trt-engine"] | None
    """Whose result was kept: onnxslim's, our own pass's, or None where the model stayed as it was."""
    operators_removed: dict[str, int]
    """Nodes fewer, by operator."""
    operators_added: dict[str, int]
    """Nodes more, by operator: what a fusion wrote."""
    constants_folded: int
    """Nodes that became constants, Constant nodes left out."""
    nodes_deduplicated: int
    """Nodes that computed what another one computed."""
    weights_deduplicated: int
    """Stored tensors that were another one's equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsetReport(GraphChange):
    """Report of an opset conversion."""

    opset: tuple[int, int]
    """Before and after."""
    ir_version: tuple[int, int]
    operators_changed: dict[str, str]
    """By operator whose definition changed: the difference."""


@dataclass(frozen=True, slots=True)
class DynamicAxis:
    """One dynamic dimension: name, axes, and allowed sizes."""

    symbol: str
    inputs: dict[str, tuple[int, ...]]
    """Axes by input."""
    low: int
    high: int | None
    """None for no limit."""
    step: int
    """Sizes are multiples of it."""
    tested_sizes: tuple[int, ...] = ()
    """The sizes at which the graph was compared with its source."""


@dataclass(frozen=True, slots=True)
class ShapeVerification:
    """An exported graph against its source at one set of input shapes."""

    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    """Sizes of the dynamic axes, by name."""
    outputs: dict[str, OutputError]
    """`max_rel` is the largest of the whole output and of any channel by its own scale, where that is beyond rounding."""


@dataclass(frozen=True, slots=True)
class ExportAttempt:
    """One attempted exporter; `reason` is why it failed, None for the one used."""

    exporter: str
    """`dynamo`, `torchscript`, another framework's converter, or `onnx` for a source that is ONNX."""
    seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ConvertReport(WrittenModel):
    """Report of `convert`: source, export steps and output difference; a dry run has the source alone."""

    source: str
    kind: str
    """What the source is: `onnx`, `torch-module`, `huggingface`, `saved-model` and others."""
    detected_by: str
    """Evidence for `kind`."""
    out: str | None
    """None of a dry run."""
    exporter: str | None
    """The one that was used; for a dry run the first to try."""
    attempts: tuple[ExportAttempt, ...]
    """In the order tried; the last one was used."""
    opset: int | None
    ir_version: int | None
    signature: Signature | None
    dynamic: tuple[DynamicAxis, ...]
    verification: tuple[ShapeVerification, ...]
    """At every shape that was compared, the example's first."""
    max_rel: float | None
    """The largest difference over the largest value, of all of them."""
    tolerance: float
    """Largest `max_rel` that is allowed."""
    nodes_before: int | None
    """As exported, before it was simplified."""
    nodes: int | None
    operators: dict[str, int]
    operators_removed: dict[str, int]
    """Taken out by simplifying."""
    nbytes: int | None
    """Model file and side files."""
    digest: str | None
    findings: tuple[Finding, ...]
    """Findings of `lint` on the written model."""
    notes: tuple[str, ...]
    versions: dict[str, str]
    """Libraries that exported it."""
    export_s: float | None
    """Duration of the exporter that was used."""
    seconds: float
    environment: Environment | None
    artifacts: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    warnings: tuple[str, ...] = ()
    trust_source: bool = False
    """Whether code that came with the source was allowed to run."""
    embedded_code: tuple[str, ...] = ()
    """Code found in the source by static inspection: `it imports models.yolo.Model`."""
