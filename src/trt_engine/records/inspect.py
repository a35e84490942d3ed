"""Results of `inspect`: models, engines, plans, run folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.records.base import Finding
from trt_engine.records.passport import Compatibility, Passport, Precision
from trt_engine.tensors import Signature


@dataclass(frozen=True, slots=True)
class TargetSupport:
    """Quantised layers of a graph that one library's kernels support."""

    target: str
    """A quantisation target, as `onnxruntime-cpu`."""
    supported_layers: int
    """Those of `layers` that run in quantised kernels."""
    layers: int
    """All quantised layers."""
    layer_kind: str
    """`convolutions` where all of them are, else `layers`."""
    share: float
    """Supported fraction, by multiply-adds (by number where those are unknown)."""
    reasons: dict[str, int]
    """Number of unsupported layers by reason."""


@dataclass(frozen=True, slots=True)
class QuantPlacement:
    """For which libraries' kernels a quantised graph is placed, whatever tool quantised it."""

    style: str
    """As `S8 symmetric, results in float`."""
    declared_target: str | None
    """The target that the file names in its metadata; None where another tool quantised it."""
    targets: tuple[str, ...]
    """Targets that take nearly all of it."""
    support: tuple[TargetSupport, ...]
    """Every target."""


@dataclass(frozen=True, slots=True)
class Unfused:
    """A node that has the anchor of a fusion and is not part of one."""

    fusion: str
    """`attention`, `layer_norm`."""
    node: str
    operator: str
    reason: str
    """What was found, and what the fusion needs."""


@dataclass(frozen=True, slots=True)
class ModelReport(RichDisplay):
    """Report of `inspect` on an ONNX model."""

    path: str
    name: str
    """The file's name without `.onnx`."""
    digest: str
    nbytes: int
    signature: Signature
    opsets: dict[str, int]
    """Version by operator domain; the standard one is empty."""
    ir_version: int
    producer: str
    """Tool and version that wrote the file."""
    nodes: int
    operators: dict[str, int]
    parameters: int
    """Number of weights, each stored tensor once; scales and zero points of Q/DQ are not counted."""
    parameter_bytes: int
    flops: int | None
    """Floating-point operations (2 x multiply-adds) of one inference at `flops_shapes`; None when shapes are unknown."""
    macs: int | None
    flops_shapes: dict[str, tuple[int, ...]]
    """Input shapes at which `flops` and `macs` are counted."""
    flops_exact: bool
    """False when a shape could not be inferred and some operators are not counted."""
    precision: Precision
    quantized: bool
    """It has DequantizeLinear nodes or operators on quantised data."""
    q_nodes: int
    dq_nodes: int
    dynamic: dict[str, tuple[int, ...]]
    """Positions of dynamic dimensions by input."""
    external: tuple[str, ...]
    """Side files with weights, as the model names them."""
    domains: dict[str, int]
    """Nodes by operator domain."""
    findings: tuple[Finding, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    """`metadata_props` of the file."""
    uncounted: dict[str, int] = field(default_factory=dict)
    """Nodes that `macs` and `flops` leave out because a shape or the operator is not known, by operator."""
    placement: QuantPlacement | None = None
    """For a quantised graph."""
    fusions: dict[str, int] = field(default_factory=dict)
    """Number of fusions that the backend `onnxruntime` makes for a GPU, by name; for a CPU those of attention, rotary
    embeddings and norms."""
    unfused: tuple[Unfused, ...] = ()
    """Nodes that are nearly part of a fusion."""
    kind: Literal["model"] = "model"


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """Contents of a plan's header."""

    product: Literal["TensorRT", "TensorRT-RTX"]
    version: str
    compute_capabilities: tuple[str, ...] = ()
    """The GPUs it was built for; TensorRT's plans do not state them."""
    has_ptx: bool = False
    """It also has code that GPUs above 12.0 compile for themselves."""
    weight_nbytes: int | None = None
    """Size of the weights; None where the header does not state it."""
    container: str | None = None
    """The tool that wrote metadata before the plan, in the same file; None where the plan is the whole file."""
    offset: int = 0
    """Bytes before the plan."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The tool's metadata as it is in the file (Ultralytics: `task`, `names`, `imgsz`, `stride`, `batch` and others)."""
    strip_command: str | None = None
    """The command that writes the plan alone beside the file."""


@dataclass(frozen=True, slots=True)
class EngineReport(RichDisplay):
    """Report of `inspect` on an engine or a bare plan."""

    path: str
    kind: Literal["engine", "plan"]
    compatibility: Compatibility
    """Whether it can be used here."""
    tensorrt_version: str | None = None
    """For a plan of TensorRT; `plan` has it for every plan."""
    plan: PlanInfo | None = None
    """None where the engine is not a plan."""
    nbytes: int = 0
    passport: Passport | None = None
    smoke_run: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RunReport(RichDisplay):
    """Report of `inspect` on a run folder: its records and their contents."""

    path: str
    kind: Literal["run"]
    verb: str | None
    """The verb that wrote the folder's document; None for records alone."""
    complete: bool
    """False when the run was interrupted or a record is damaged."""
    summary: dict[str, Any]
    """The document's own main figures: model, engine, peak_streams, images_per_s, stop_reason."""
    measurements: tuple[dict[str, Any], ...]
    """One entry for each record: engine, backend, device, batch, qps, mean_ms, stable, complete."""
    damaged: int
    """Damaged lines of the record files, and documents or cells that cannot be read."""
    files: dict[str, int]
    """Bytes by path inside the folder."""
    nbytes: int
