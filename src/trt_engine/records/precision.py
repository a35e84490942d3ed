"""Results of `cast`, `quantize` and `ranges`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.model import WrittenModel
from trt_engine.records.base import Finding
from trt_engine.records.parity import OutputError, SpeedCheck
from trt_engine.records.passport import Precision


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The values of one tensor over the data. Shares are of the finite values, zeros not counted among the small ones."""

    name: str
    kind: Literal["input", "activation", "constant"]
    node: str | None
    """The node that makes it."""
    operator: str | None
    """Operator of `node`; None for an input or a constant."""
    elements: int
    """Values seen, over all rows of the data."""
    min: float
    max: float
    absmax: float
    """Over finite values, as `min` and `max`."""
    zero_share: float
    """Share that is exactly 0."""
    nan: int
    infinite: int
    fp16_overflow: float
    """Share beyond 65504."""
    fp16_subnormal: float
    """Share below 2^-14: fewer digits."""
    fp16_underflow: float
    """Share below 2^-25: zero in FP16."""
    bf16_subnormal: float
    """Share below 2^-126."""
    fp8_subnormal: float
    """Under one E4M3 scale for the tensor, `absmax` / 448; estimated within a quarter octave."""
    fp8_underflow: float
    """Share that becomes 0 under that scale."""
    module: str | None = None
    """The PyTorch module that makes it, or reads the constant; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One node to leave in FP32, and why."""

    node: str
    """Its name, or its first output where it has none."""
    operator: str
    code: str
    """Code of the finding behind it."""
    reason: str
    tensor: str
    """The tensor or constant behind it."""
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class RangesReport(RichDisplay):
    """Report of `ranges`: value ranges of a model."""

    model: str
    digest: str
    calib_data: str
    """Source of the inputs."""
    random: bool
    """True without data: the ranges are then not representative of real values."""
    batches: int
    """Number of runs of the model."""
    rows: int
    """Rows of the data, over all batches."""
    headroom: float
    """Factor by which values may grow: beyond 65504 / `headroom` a tensor is reported."""
    tensors: tuple[TensorRange, ...]
    constants: tuple[TensorRange, ...]
    findings: tuple[Finding, ...]
    exclude: tuple[Exclusion, ...]
    """Nodes to leave in FP32 when casting to FP16."""
    wall_s: float
    warnings: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    """Files left out, and why."""
    preprocess: dict[str, Any] | None = None
    """Preprocessing of images, its origin under `source`; None where the data was not images."""


@dataclass(frozen=True, slots=True)
class QuantizedNode:
    """One node that was quantised, and how."""

    node: str
    op: str
    weight: str
    """Weight format: `int8, one scale for each of 64 channels (axis 0)`."""
    activation: str | None
    """The tensor it reads, where that is quantised."""
    amax: float | None
    """Range of that tensor; None where it is worked out while running."""
    error: float
    """Relative RMS error of the weight; 0 for a dry run and where weights are not rounded."""
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class UnquantizedNode:
    """One linear node that stays as it was, and why."""

    node: str
    op: str
    reason: str
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class IntegerKernels:
    """Kernels ONNX Runtime selected for a quantised graph on a CPU."""

    layers: dict[str, tuple[int, int]]
    """By operator with weights: nodes in integer kernels, and all nodes."""
    not_fused: tuple[UnquantizedNode, ...]
    """Those that do not, and why."""
    kernels: dict[str, int]
    """Integer kernels of the optimised graph, by operator."""


@dataclass(frozen=True, slots=True)
class QuantizeReport(WrittenModel):
    """Report of `quantize`; for a dry run, what would be quantised."""

    model: str
    out: str | None
    """None for a dry run, and where only an emulation was requested and possible."""
    to: str
    target: str
    """The library that Q/DQ was placed for."""
    method: Literal["rtn", "awq", "dynamic"]
    """Rounding of the weights: `rtn` to nearest, `awq` seen through the data; `dynamic`: activations are quantised
    while running."""
    weights_only: bool
    """Activations stay in floating point."""
    high_precision: str
    """Dtype of what is not quantised."""
    quantized: tuple[QuantizedNode, ...]
    unquantized: tuple[UnquantizedNode, ...]
    opset_before: int
    opset: int
    nbytes_before: int
    nbytes: int | None
    """Model file and side files."""
    precision: Precision
    """Requested precision and dtype breakdown of the result."""
    calibration: dict[str, Any] | None
    """Calibrator, settings, samples, digests; None where no data was needed."""
    parity: dict[str, OutputError] | None
    """Against the model as it was, by output."""
    parity_inputs: str | None
    """Inputs of the parity check."""
    measured_on: Literal["kernels", "emulation"] | None
    """`kernels`: ONNX Runtime ran the file itself, in FP32 where it has no kernels of the type; `emulation`: an FP32 graph
    that rounds alike."""
    rewritten: tuple[str, ...]
    """Changes by raising the opset and preparing the graph."""
    seconds: float
    environment: Environment
    artifacts: dict[str, str]
    integer_kernels: IntegerKernels | None = None
    """Fusions by ONNX Runtime, for `onnxruntime-cpu`."""
    speed: SpeedCheck | None = None
    """The file beside the model as it was, for `onnxruntime-cpu`."""
    next_command: str | None = None
    """What to type instead of an evaluation, for a result that no longer matches the model or is not faster."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


Fp32ReasonCode = Literal["excluded", "range", "type", "constant", "scale", "norm", "index", "between", "autocast"]


@dataclass(frozen=True, slots=True)
class Fp32Node:
    """A node that `cast` left in FP32."""

    node: str
    op: str
    code: Fp32ReasonCode
    """`range`: by the data or a `ranges` report; `constant`, `scale`: a stored number that the low type cannot hold;
    `norm`: a normalisation that is written out; `type`: not supported in it; `index`: arithmetic of indices; `between`:
    moves data between FP32 nodes."""
    reason: str
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class CastParity:
    """The cast model against its FP32 source, both in ONNX Runtime on the same input; or why that was not judged."""

    inputs: str
    """Where the inputs came from: `seeded random, seed 0`, or the data; empty where it was not judged."""
    outputs: dict[str, OutputError]
    kernels: dict[str, int]
    """Nodes by the type their kernels really ran in, Casts left out."""
    emulated: bool
    """True when FP32 kernels ran with every result rounded to the type: it has no kernels here, for all layers or some."""
    note: str | None = None
    """Why it was not judged, or what was emulated."""


@dataclass(frozen=True, slots=True)
class CastReport(WrittenModel):
    """Report of `cast`: what computes in the low type now, what does not, and why."""

    model: str
    out: str | None
    """None of a dry run."""
    to: str
    method: Literal["built-in", "autocast"]
    """Our own rewrite, or ModelOpt's AutoCast."""
    keep_io: bool
    """Inputs and outputs of the graph stay in FP32."""
    opset: tuple[int, int]
    """Before and after."""
    nodes: int
    """Nodes that read or make floating-point numbers, constants left out."""
    nodes_cast: int
    """Those of `nodes` that compute in the low type."""
    operators_cast: dict[str, int]
    """`nodes_cast` by operator."""
    fp32_nodes: tuple[Fp32Node, ...]
    casts_added: int
    casts_removed: int
    constants_converted: int
    """Number of constants stored in the low type."""
    duplicated_constants: tuple[str, ...]
    """Constants stored in both types."""
    constants_clamped: tuple[str, ...]
    """Masks clamped to the type's largest value, with `--clamp-masks`."""
    nbytes_before: int
    nbytes_after: int | None
    """External data included; None of a dry run."""
    findings: tuple[Finding, ...]
    """Findings by the strong-typing rules of TensorRT's parser, on the result."""
    notes: tuple[str, ...]
    preprocess: dict[str, Any] | None = None
    """Preprocessing of images, its origin under `source`; None where the data was not images."""
    precision: Precision | None = None
    parity: CastParity | None = None
    """None for a dry run and with `--no-parity`."""
    artifacts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    dry_run: bool = False
    warnings: tuple[str, ...] = ()
    next_command: str | None = None
    """What to type instead of a build; None for a result that can be built."""
