"""Records: samples and facts, as every verb writes them. Means and percentiles are worked out when asked.

These types import no instrument, so a report reads them without what made them. Each verb's JSON is one of the `...Report`
types below; `docs/schemas/` is generated from them.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trt_engine.config import Profile
from trt_engine.device.info import Clocks
from trt_engine.engine import OutputError, Parity, Passport, Precision, SpeedCheck, Verdict
from trt_engine.environment import Environment, version_of
from trt_engine.figures import with_module
from trt_engine.files import explain, json_bytes
from trt_engine.tensors import Signature

__all__ = [
    "MAIN_FIGURE",
    "BackendState",
    "BatchResult",
    "BenchPlan",
    "BenchRecord",
    "BenchReport",
    "BuildReport",
    "BundleComponent",
    "BundleConnection",
    "BundleFailure",
    "BundleReport",
    "BundleState",
    "BundleStep",
    "CacheReport",
    "CachedEngine",
    "CastParity",
    "CastReport",
    "Ceiling",
    "Ceilings",
    "Check",
    "CliffPoint",
    "ConvertReport",
    "Detected",
    "Diagnosis",
    "DoctorReport",
    "DynamicAxis",
    "EvaluatePlan",
    "EvaluateReport",
    "Evaluated",
    "Exclusion",
    "ExportAttempt",
    "Finding",
    "InferPlan",
    "InferReport",
    "IntegerKernels",
    "KeptNode",
    "LeftNode",
    "LintReport",
    "LogReport",
    "LoggedProfile",
    "LoggedTimes",
    "ModelReport",
    "OperatorSupport",
    "OpsetReport",
    "OutputFacts",
    "Protocol",
    "QuantPlacement",
    "QuantizeReport",
    "QuantizedNode",
    "RangesPlan",
    "RangesReport",
    "RunReport",
    "SearchGroup",
    "SearchPlan",
    "SearchPoint",
    "SearchReport",
    "SearchTrial",
    "ShapeAgreement",
    "SimplifyReport",
    "SizePlan",
    "SizeReport",
    "SkippedImage",
    "Step",
    "Summary",
    "TargetFit",
    "TensorRange",
    "append",
    "document",
    "encode",
    "percentile",
    "summarize",
]

PercentileRule = Literal["trtexec", "linear"]


def percentile(ascending: Sequence[float], percent: float, rule: PercentileRule = "trtexec") -> float:
    """The `percent`-th percentile of ascending values.

    `trtexec`: `v[max(n - 1 - int((1 - p/100) * n), 0)]` in single precision, no interpolation, so that p99 of 100 values is
    the largest (source: `findPercentile` in samples/common/sampleReporting.cpp of the public TensorRT repository).
    `linear`: interpolation between the two neighbours, numpy's default.
    """
    count = len(ascending)
    if not count:
        return math.nan
    if rule == "trtexec":
        exclude = int(_f32(_f32(1.0 - _f32(_f32(percent) / 100.0)) * count))
        return ascending[max(count - 1 - exclude, 0)]
    position = (count - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, count - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (position - low)


def _f32(value: float) -> float:
    """The nearest single-precision number."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric of one measurement, in ms."""

    min: float
    max: float
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    cv_pct: float
    """Coefficient of variation: population standard deviation over the mean, in per cent."""


def summarize(samples_ms: Sequence[float], rule: PercentileRule = "trtexec") -> Summary | None:
    """The summary of samples in ms; None for none."""
    if not len(samples_ms):
        return None
    ascending = sorted(samples_ms)
    count = len(ascending)
    mean = math.fsum(ascending) / count
    middle = count // 2
    median = ascending[middle] if count % 2 else (ascending[middle - 1] + ascending[middle]) / 2
    variance = math.fsum((value - mean) ** 2 for value in ascending) / count
    return Summary(
        min=ascending[0],
        max=ascending[-1],
        mean=mean,
        median=median,
        p90=percentile(ascending, 90, rule),
        p95=percentile(ascending, 95, rule),
        p99=percentile(ascending, 99, rule),
        cv_pct=100 * math.sqrt(variance) / mean if mean else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Protocol:
    """The rules a number was measured by; two numbers compare only under equal rules.

    Fields say what was in force. What a device does not have is False here, whoever asked for it, and is named in
    `not_applicable`: nothing is claimed that did not happen.
    """

    name: str
    loop: Literal["closed"]
    clock: Literal["host", "device events"]
    transfers: bool
    graph: bool
    spin: bool
    streams: int
    warmup_s: float
    duration_s: float
    min_iterations: int
    idle_s: float
    percentile_rule: PercentileRule
    not_applicable: tuple[str, ...] = ()
    min_warmup: int = 0
    """Queries left out at least, however fast they were."""


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """One measurement: every sample, the rules, the machine.

    `compute_ms` holds one time per query, in the order measured: the device's own time on a GPU (events around the
    computation), the host's clock around the call on a CPU. The transfer and enqueue lists are empty where the device has
    none. No field says `gpu` unless `device` is one.
    """

    engine: str
    backend: str
    device: str
    """`cpu`, `cuda:0`."""
    batch: int
    shapes: dict[str, tuple[int, ...]]
    protocol: Protocol
    environment: Environment
    compute_ms: tuple[float, ...]
    wall_s: float
    """Length of the measured part: start of the first kept query to the end of the last."""
    started: str
    """UTC, ISO 8601."""
    queries: int
    warmup_queries: int
    latency_ms: tuple[float, ...] = ()
    enqueue_ms: tuple[float, ...] = ()
    h2d_ms: tuple[float, ...] = ()
    d2h_ms: tuple[float, ...] = ()
    clocks: tuple[Clocks, ...] = ()
    """Before, and after."""
    facts: dict[str, str] = field(default_factory=dict)
    """The truth about what ran: providers, threads, precision."""
    stable: bool = True
    instability: tuple[str, ...] = ()
    """Why the measurement is not stable, in words with figures."""
    warnings: tuple[str, ...] = ()
    complete: bool = True
    """False for the partial record of an interrupted measurement."""
    percentiles: tuple[float, ...] = (90.0, 95.0, 99.0)
    """The percentiles asked for; samples give any other."""
    inputs: str = ""
    """Where the inputs came from: `seeded random, seed 0`, a file's name."""

    @property
    def qps(self) -> float:
        """Queries (not images) per second."""
        return self.queries / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def images_per_s(self) -> float:
        """`qps x batch`."""
        return self.qps * self.batch

    @property
    def measured_by_events(self) -> bool:
        """True when times are the device's own; False when they are the host's clock around a call."""
        return self.protocol.clock == "device events"

    def compute(self) -> Summary | None:
        return summarize(self.compute_ms, self.protocol.percentile_rule)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What `build` says. Of a dry run: what would be built, and what is there of it already."""

    model: str
    """The path of the ONNX file, as it was given."""
    engine: str | None
    """The payload's path; None when nothing is built yet."""
    payload_bytes: int | None
    digest: str | None
    """Of the payload."""
    backend: str
    device: str
    identity: str
    """Who builds, exactly: library, version, providers, instruction sets."""
    key: str
    """The engine's key in the store."""
    cached: bool
    """True when the store had the engine."""
    seconds: float
    """Of this command; the build's own are in the passport."""
    precision: Precision
    profiles: tuple[Profile, ...]
    parity: Parity | None
    environment: Environment
    notes: dict[str, str]
    """The backend's facts: optimisation level, providers, nodes by provider."""
    artifacts: dict[str, str]
    quant_target: str | None = None
    """The target whose kernels a quantised model is built for; None for a model without quantised layers."""
    speed: SpeedCheck | None = None
    """The quantised engine beside an FP32 one."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What `bench` says of one measurement. Latency, enqueue and copy times are there only where the device has them."""

    engine: str
    backend: str
    device: str
    batch: int
    shapes: dict[str, tuple[int, ...]]
    qps: float
    images_per_s: float
    per_image_ms: float | None
    """Mean compute time over the batch."""
    compute_ms: Summary | None
    percentiles_ms: dict[str, float]
    """Of the compute time, by the percentiles asked for: `{"90": 1.93, "99.9": 2.2}`."""
    queries: int
    warmup_queries: int
    wall_s: float
    protocol: Protocol
    stable: bool
    instability: tuple[str, ...]
    complete: bool
    environment: Environment
    facts: dict[str, str]
    clocks: tuple[Clocks, ...]
    started: str
    inputs: str
    artifacts: dict[str, str]
    samples_ms: tuple[float, ...]
    """Compute times in the order measured."""
    latency_ms: Summary | UnsetType = UNSET
    enqueue_ms: Summary | UnsetType = UNSET
    h2d_ms: Summary | UnsetType = UNSET
    d2h_ms: Summary | UnsetType = UNSET

    @classmethod
    def of(cls, record: BenchRecord, artifacts: dict[str, str] | None = None) -> BenchReport:
        """The report of a record: its facts as they are, its figures worked out."""
        rule = record.protocol.percentile_rule
        compute, ascending = record.compute(), sorted(record.compute_ms)
        return cls(
            engine=record.engine,
            backend=record.backend,
            device=record.device,
            batch=record.batch,
            shapes=record.shapes,
            qps=record.qps,
            images_per_s=record.images_per_s,
            per_image_ms=compute.mean / record.batch if compute else None,
            compute_ms=compute,
            percentiles_ms={f"{p:g}": percentile(ascending, p, rule) for p in record.percentiles if ascending},
            queries=record.queries,
            warmup_queries=record.warmup_queries,
            wall_s=record.wall_s,
            protocol=record.protocol,
            stable=record.stable,
            instability=record.instability,
            complete=record.complete,
            environment=record.environment,
            facts=record.facts,
            clocks=record.clocks,
            started=record.started,
            inputs=record.inputs,
            artifacts=artifacts or {},
            samples_ms=record.compute_ms,
            latency_ms=summarize(record.latency_ms, rule) or UNSET,
            enqueue_ms=summarize(record.enqueue_ms, rule) or UNSET,
            h2d_ms=summarize(record.h2d_ms, rule) or UNSET,
            d2h_ms=summarize(record.d2h_ms, rule) or UNSET,
        )


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What `bench --dry-run` says: what would be measured, built and written."""

    engine: str
    builds: bool
    """A model's engine comes from the store, or is built into it."""
    device: str
    shapes: dict[str, tuple[int, ...]]
    """Of a model those that were asked for."""
    protocol: Protocol
    writes: tuple[str, ...]
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """What one output of an inference holds, in numbers; None where there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    min: float | None
    """Of the finite values, as are `max` and `mean`."""
    max: float | None
    mean: float | None
    not_finite: int
    """How many values are NaN or infinite."""


class Detected(msgspec.Struct, frozen=True):
    """One object found in a picture, or (without a box) one class of it."""

    index: int = msgspec.field(name="class")
    name: str
    score: float
    box: tuple[float, float, float, float] | UnsetType = UNSET
    """Left, top, right, bottom in pixels of the picture."""


@dataclass(frozen=True, slots=True)
class InferReport:
    """What `infer` says of one inference."""

    engine: str
    """The engine's path."""
    backend: str
    device: str
    inputs: str
    """Where they came from: a file's name, or `seeded random, seed 0`."""
    shapes: dict[str, tuple[int, ...]]
    first_ms: float
    """The first inference, by the host's clock around the call, copies included."""
    median_ms: float | None
    """Of those after the first; None when there was only one."""
    samples_ms: tuple[float, ...]
    outputs: tuple[OutputFacts, ...]
    facts: dict[str, str]
    artifacts: dict[str, str]
    detections: tuple[Detected, ...] | UnsetType = UNSET
    """Of a picture given to a detector, best first."""
    classes: tuple[Detected, ...] | UnsetType = UNSET
    """Of a picture given to a classifier, best first."""
    image_size: tuple[int, int] | UnsetType = UNSET
    """Width and height of the picture."""


@dataclass(frozen=True, slots=True)
class InferPlan:
    """What `infer --dry-run` says: what would be run, built and written."""

    engine: str
    builds: bool
    """A model's engine comes from the store, or is built into it."""
    inputs: str
    """Where they would come from."""
    outputs: tuple[str, ...]
    writes: tuple[str, ...]
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """One picture that was left out, and why."""

    name: str
    reason: str


MAIN_FIGURE = {"detect": "AP", "classify": "top1"}
"""The figure a gate looks at, by task."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One engine over a dataset: how good, how fast, on what."""

    engine: str
    backend: str
    device: str
    metrics: dict[str, float]
    """AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm, ARl (-1: nothing of that kind), or top1 and top5."""
    batch: int
    """Pictures in one query; a baseline keeps to the batches it takes."""
    latency_ms: Summary | None
    """Of one whole batch: device events where the device has them, else the host's clock around the call."""
    samples_ms: tuple[float, ...]
    precision: Precision
    """What the engine was asked to compute in, and was found to."""
    facts: dict[str, str]
    predictions: int = 0
    """Detections that were scored, or classified pictures."""
    not_finite: int = 0
    """Rows of the outputs that held NaN or infinities and were dropped."""


@dataclass(frozen=True, slots=True)
class EvaluateReport:
    """What `evaluate` says of an engine over a dataset, and of a baseline over the same pictures."""

    engine: str
    backend: str
    device: str
    task: Literal["detect", "classify"]
    metrics: dict[str, float]
    images: int
    """Pictures the figures are of."""
    skipped: int
    """Pictures that could not be read or do not fit."""
    skipped_images: tuple[SkippedImage, ...]
    """The first hundred of them, with the reason."""
    latency_ms: Summary | None
    per_image_ms: float | None
    samples_ms: tuple[float, ...]
    batch: int
    dataset: str
    dataset_kind: Literal["coco", "folders", "arrays", "pictures"]
    dataset_digest: str
    """SHA-256 over names and bytes of the pictures, in their order: equal digests, equal pictures."""
    limit: int | None
    seed: int | None
    vision: dict[str, Any]
    """The pre- and post-processing in force, and where it was declared."""
    precision: Precision
    predictions: int
    not_finite: int
    facts: dict[str, str]
    environment: Environment
    wall_s: float
    started: str
    """UTC, ISO 8601."""
    artifacts: dict[str, str]
    baseline: Evaluated | None = None
    drop: dict[str, float] | None = None
    """Baseline less engine, by figure."""
    parity: dict[str, OutputError] | None = None
    """How far the engine's outputs lie from the baseline's: the worst batch, by output."""
    max_drop: float | None = None
    passed: bool | None = None
    """Whether the main figure (AP or top1) dropped by no more than `max_drop`; None without a gate."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluatePlan:
    """What `evaluate --dry-run` says: the pictures, their processing, and what would be built and written."""

    engine: str
    builds: bool
    """A model's engine comes from the store, or is built into it."""
    dataset: str
    dataset_kind: str
    images: int
    vision: dict[str, Any]
    """The declared pre- and post-processing, as in `EvaluateReport`."""
    writes: tuple[str, ...]
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class LoggedTimes:
    """One summary line of a log, in ms, exactly as printed; None for what the line does not have."""

    min: float
    max: float
    mean: float
    median: float
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    percentiles: dict[str, float] | UnsetType = UNSET
    """All percentiles of the line by their number, where it has others than those three."""

    def by_percent(self) -> dict[str, float]:
        """The percentiles of the line, by their number."""
        if not isinstance(self.percentiles, UnsetType):
            return self.percentiles
        usual = (("90", self.p90), ("95", self.p95), ("99", self.p99))
        return {percent: value for percent, value in usual if value is not None}


@dataclass(frozen=True, slots=True)
class LoggedProfile:
    """The layer table of a log: how many layers, the first, and the row `Total`."""

    iterations: int
    layers: int
    """Rows without `Total`; layers that took no time are not printed."""
    first_layer: str
    first_layer_time_ms: float
    total_time_ms: float
    total_avg_ms: float
    total_median_ms: float


@dataclass(frozen=True, slots=True)
class LogReport:
    """What `bench --log FILE` finds in a log of trtexec (8.5 to 11.1) or of `bench`; None for what is not in it."""

    log: str
    written_by: Literal["trtexec", "trt-engine"] | None
    status: Literal["passed", "failed"]
    """The right verdict, which is not always what the last line says; a log without its end marker is failed."""
    end_marker: str | None
    error_class: str | None = None
    """The known failure, by one word; None when it passed, and for a failure that is not known."""
    error_text: str | None = None
    """The line that carries the cause."""
    error_node: str | UnsetType = UNSET
    """The node of the graph by its full path; of a missing plugin whose node has no path the plugin's name."""
    error_plugin: str | UnsetType = UNSET
    requested_bytes: int | UnsetType = UNSET
    """The memory that could not be had."""
    unknown_options: tuple[str, ...] | UnsetType = UNSET
    workspace_mib: float | UnsetType = UNSET
    """What trtexec read as the size of the workspace, where it was given one."""
    trt_version: str | None = None
    trt_build: int | None = None
    command: str | None = None
    device: str | None = None
    gpu: str | None = None
    compute_capability: str | None = None
    protocol: str | None = None
    batch: int | None = None
    throughput_qps: float | None = None
    latency_ms: LoggedTimes | None = None
    enqueue_ms: LoggedTimes | None = None
    h2d_ms: LoggedTimes | None = None
    gpu_compute_ms: LoggedTimes | None = None
    """From events on a GPU only; a CPU's compute time is in `compute_ms`."""
    d2h_ms: LoggedTimes | None = None
    compute_ms: LoggedTimes | None = None
    total_host_walltime_s: float | None = None
    total_gpu_compute_time_s: float | None = None
    warmup_queries: int | None = None
    warmup_ms: float | None = None
    timed_queries: int | None = None
    engine_built_s: float | None = None
    engine_size_mib: float | None = None
    engine_deserialized_s: float | None = None
    data_transfers: bool | None = None
    spin_wait: bool | None = None
    cuda_graph: bool | None = None
    perf_warnings: tuple[str, ...] = ()
    """Any of enqueue_bound, h2d_bound, d2h_bound, gpu_compute_unstable."""
    gpu_compute_coeff_var_pct: float | None = None
    warning_lines: int = 0
    error_lines: int = 0
    layer_profile: LoggedProfile | None = None


@dataclass(frozen=True, slots=True)
class Step:
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
    where: str | None = None
    hint: str | None = None
    module: str | None = None
    """The PyTorch module of `where`; None where that is not known."""

    @property
    def text(self) -> str:
        """The message with its place, where it does not name it."""
        if self.where and f"`{self.where}`" not in self.message:
            return f"{self.message} (at `{with_module(self.where, self.module)}`)"
        return f"{self.message} (in `{self.module}`)" if self.module else self.message


@dataclass(frozen=True, slots=True)
class TargetFit:
    """How many of a graph's quantised layers the kernels of one library take."""

    target: str
    """A quantisation target, as `onnxruntime-cpu`."""
    taken: int
    layers: int
    """All quantised layers."""
    what: str
    """`convolutions` where all of them are, else `layers`."""
    share: float
    """Fraction taken, by multiply-adds (by number where those are not known)."""
    reasons: dict[str, int]
    """Why the others are not taken: layers by reason."""


@dataclass(frozen=True, slots=True)
class QuantPlacement:
    """For which libraries' kernels a quantised graph is placed, whatever tool quantised it."""

    style: str
    """As `S8 symmetric, results in float`."""
    stated: str | None
    """The target that the file names in its metadata; None where another tool quantised it."""
    targets: tuple[str, ...]
    """Targets that take nearly all of it."""
    fits: tuple[TargetFit, ...]
    """Every target."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `inspect` says of an ONNX model."""

    path: str
    name: str
    digest: str
    nbytes: int
    signature: Signature
    opsets: dict[str, int]
    ir_version: int
    producer: str
    nodes: int
    operators: dict[str, int]
    parameters: int
    parameter_bytes: int
    flops: int | None
    """Floating-point operations (2 x multiply-adds) of one inference at `flops_shapes`; None when shapes are unknown."""
    macs: int | None
    flops_shapes: dict[str, tuple[int, ...]]
    flops_exact: bool
    """False when a shape could not be inferred and some operators are not counted."""
    precision: Precision
    quantized: bool
    q_nodes: int
    dq_nodes: int
    dynamic: dict[str, tuple[int, ...]]
    """Positions of dynamic dimensions by input."""
    external: tuple[str, ...]
    domains: dict[str, int]
    """Nodes by operator domain."""
    findings: tuple[Finding, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    uncounted: dict[str, int] = field(default_factory=dict)
    """Nodes that `macs` and `flops` leave out because a shape or the operator is not known, by operator."""
    placement: QuantPlacement | None = None
    """Of a quantised graph."""
    kind: Literal["model"] = "model"


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


@dataclass(frozen=True, slots=True)
class LintReport:
    """What `lint` finds in a model before anyone builds it."""

    path: str
    name: str
    digest: str
    target: Literal[
        "all", "tensorrt", "onnxruntime", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda", "onnxruntime-tensorrt"
    ]
    tensorrt: str
    """The TensorRT release that was judged for."""
    onnxruntime: str | None
    """The installed release that was judged for."""
    opset: int | None
    ir_version: int
    nodes: int
    shapes: dict[str, tuple[int, ...]]
    """The input shapes the graph was traced at."""
    assumed: bool
    """True when some of these sizes were nobody's, but ours to look with."""
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    """Findings by severity."""
    operators: tuple[OperatorSupport, ...]


@dataclass(frozen=True, slots=True)
class SimplifyReport:
    """What `simplify` made of a graph, and how far the result lies from the model it was made of."""

    model: str
    out: str
    by: Literal["onnxslim", "trt-engine"] | None
    """Whose result was kept: onnxslim's, our own pass's, or None where the model stayed as it was."""
    nodes_before: int
    nodes_after: int
    operators_gone: dict[str, int]
    """Nodes fewer, by operator."""
    operators_new: dict[str, int]
    """Nodes more, by operator: what a fusion wrote."""
    constants_folded: int
    """Nodes that became constants, Constant nodes left out."""
    nodes_shared: int
    """Nodes that computed what another one computed."""
    weights_shared: int
    """Stored tensors that were another one's equal."""
    functions_inlined: int
    nbytes_before: int
    nbytes_after: int
    """External data included."""
    largest: float | None
    """The largest difference of any output, in shares of its largest value; None where nothing was compared."""
    tolerance: float
    """What was allowed: the one asked for, or what the graph's coarsest type can keep."""
    shapes: tuple[dict[str, tuple[int, ...]], ...] = ()
    """The input shapes at which both were run in ONNX Runtime."""
    unchecked: tuple[str, ...] = ()
    """Outputs of which types and shapes alone were compared: random ones, and those in the order of a sort."""
    notes: tuple[str, ...] = ()
    artifacts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OpsetReport:
    """What bringing a model to another opset changed."""

    model: str
    out: str
    opset: tuple[int, int]
    """Before and after."""
    ir_version: tuple[int, int]
    nodes_before: int
    nodes_after: int
    operators_changed: dict[str, str]
    """By operator that means something else there: what its definition gained or lost on the way."""
    functions_inlined: int
    nbytes_before: int
    nbytes_after: int
    largest: float | None
    """The largest difference of any output, in shares of its largest value; None where nothing was compared."""
    tolerance: float
    shapes: tuple[dict[str, tuple[int, ...]], ...] = ()
    unchecked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    artifacts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What `inspect` says of an engine or of a bare plan."""

    path: str
    kind: Literal["engine", "plan"]
    verdict: Verdict
    tensorrt_version: str | None = None
    nbytes: int = 0
    passport: Passport | None = None
    smoke: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """What `inspect` says of a run folder: which records are in it and what they hold."""

    path: str
    kind: Literal["run"]
    verb: str | None
    """The verb that wrote the folder's document; None for records alone."""
    complete: bool
    """False when the run was interrupted or a record is damaged."""
    summary: dict[str, Any]
    """The document's own main figures: model, engine, peak_streams, images_per_s, stopped_because."""
    measurements: tuple[dict[str, Any], ...]
    """One entry for each record: engine, backend, device, batch, qps, mean_ms, stable, complete."""
    damaged: int
    """Lines of `records.jsonl` that are no whole record."""
    files: dict[str, int]
    """Bytes by path inside the folder."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class BundleConnection:
    """An output of one component that feeds an input of another (or of itself: a state)."""

    producer: str
    output: str
    consumer: str
    input: str
    transpose: tuple[int, ...] = ()
    """How the application turns the axes on the way; empty: it does not."""
    declared: bool = True
    """False when it was inferred."""
    carries: str = ""
    """Type and shape of the output: `float32 batchx1024xtime`."""
    held: bool | None = None
    """Whether the engines' own signatures agree; None before both are there."""


@dataclass(frozen=True, slots=True)
class BundleStep:
    """One component's turn in a run of the whole chain."""

    component: str
    fed: dict[str, str]
    """By input, the output it came from; the others were generated."""
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    wall_ms: float


@dataclass(frozen=True, slots=True)
class BundleFailure:
    """Why a component has no engine, or does not run."""

    type: str
    message: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class BundleComponent:
    """One component of a bundle and its engine."""

    name: str
    status: Literal["planned", "pending", "building", "built", "stored", "kept", "failed", "interrupted"]
    """`stored`: taken from the store; `kept`: already in the folder, of this model and these settings."""
    model: str
    model_digest: str
    model_bytes: int
    external: tuple[str, ...]
    """Side files that were staged with the model, as it spells them."""
    command: str
    """What builds this engine alone."""
    key: str
    identity: str
    profiles: tuple[Profile, ...]
    fills: dict[str, int | tuple[str, int]] = field(default_factory=dict)
    """Inputs a smoke run does not fill at random: a number, or the input and position whose size it is."""
    engine: str | None = None
    """The payload's file, in the bundle's folder."""
    log: str | None = None
    """The build's log, in the bundle's folder."""
    payload_bytes: int | None = None
    """Of the payload and its side files."""
    digest: str | None = None
    seconds: float = 0.0
    """Of this component in this command."""
    build_seconds: float | None = None
    """Of the build itself, whenever it was."""
    library: str | None = None
    """What runs it: `tensorrt 10.16.1.11`, `onnxruntime 1.27.0`."""
    precision: Precision | None = None
    parity: Parity | None = None
    notes: dict[str, str] = field(default_factory=dict)
    ladder: tuple[str, ...] = ()
    smoke: dict[str, Any] | None = None
    error: BundleFailure | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BundleReport:
    """What `bundle` says, and `build_report.json`: every component, what feeds what, and where it all lies."""

    meta: str
    meta_digest: str
    name: str
    version: str
    """Of the whole: it changes with any model, setting, builder or connection."""
    model_version: str | None
    """As the meta file states it."""
    folder: str
    backend: str
    device: str
    complete: bool
    """Every component has its engine, and every connection holds."""
    components: tuple[BundleComponent, ...]
    connections: tuple[BundleConnection, ...]
    environment: Environment
    started: str
    seconds: float
    artifacts: dict[str, str]
    chain: tuple[BundleStep, ...] = ()
    """With `--run`: all components run in the order they feed each other."""
    error: BundleFailure | None = None
    """What is wrong with the whole rather than with one component."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BundleState:
    """What `inspect` says of a bundle's folder."""

    path: str
    kind: Literal["bundle"]
    name: str
    version: str
    complete: bool
    """All engines are there, are those of the report, load here, and fit each other."""
    engines: dict[str, EngineReport]
    """By component."""
    problems: tuple[str, ...]
    connections: tuple[BundleConnection, ...]
    chain: tuple[BundleStep, ...]
    files: dict[str, int]
    """Bytes by path in the folder."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One measured batch size of `size`, in the terms of A6. No transfer times."""

    batch: int
    qps: float
    images_per_s: float
    per_image_ms: float
    """Mean compute time over the batch."""
    compute_ms: Summary
    engine: str
    stable: bool = True
    instability: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CliffPoint:
    """One batch size of a cliff scan."""

    batch: int
    images_per_s: float
    expected_images_per_s: float | None
    """What its better neighbours suggest (`trt_engine.sizing.cliffs`); None when nothing else was measured."""
    cliff: bool
    """True when it fell short twice."""
    engine: str = ""
    measured: int = 1
    """How often it was measured: a suspected cliff is measured a second time."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the pre-flight: what was looked at, how it stands, what was found."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SizeReport:
    """What `size` says (A1-A12). Of an interrupted or failed run: what was known by then, `complete` false."""

    model: str
    """The path of the ONNX file, as it was given."""
    engine: str | None
    device: str
    backend: str
    precision: str
    """What the engine was found to compute in, and was asked to."""
    peak_streams: int | None
    """`floor(images_per_s / fps)`: an upper bound."""
    images_per_s: float | None
    fps: float
    batches: tuple[BatchResult, ...]
    """Batch 1 first, then the final N; the steps of the doubling stand in `tried`."""
    stopped_because: Literal["peak_within_batch", "max_batch", "out_of_memory", "static_batch", "interrupted", "failed"]
    engines_built: int
    """Of the doubling and of the scan."""
    measurements: int
    """Finished ones, of the doubling and of the scan."""
    steps: tuple[Step, ...]
    protocol: Protocol | None
    environment: Environment
    artifacts: dict[str, str]
    tried: tuple[BatchResult, ...] = ()
    cliffs: tuple[CliffPoint, ...] = ()
    complete: bool = True
    model_name: str = ""
    out_of_memory: tuple[int, ...] = ()
    """Batch sizes that did not fit, in the order tried."""
    scan_engines: int = 0
    """How many of `engines_built` were built for the scan alone."""
    scan_measurements: int = 0
    """How many of `measurements` belong to the scan."""
    avoid: tuple[int, ...] = ()
    """Batch sizes the scan found to be cliffs."""
    preflight: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the figures must know: precision, fall-backs, limits reached."""
    warnings: tuple[str, ...] = ()
    nvinfer: dict[str, str] = field(default_factory=dict)
    """Keys of DeepStream's nvinfer for this model, once built with TensorRT; none where no input takes pictures."""
    nvinfer_notes: tuple[str, ...] = ()
    """What is not known of those keys, or cannot be said in them."""
    error: str | None = None
    """What ended an incomplete run."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of `doctor`: what was looked at, how it stands, what was found, what to type."""

    name: str
    """Stable and greppable: `onnxruntime-twice`, `disk-store`."""
    status: Literal["ok", "note", "warning", "problem"]
    found: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether a backend can work here, on which devices, and if not why and what to do."""

    name: str
    summary: str
    runs: bool
    devices: tuple[str, ...] = ()
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit of a device, measured here or taken from its maker."""

    name: str
    """`fp16_matrix`, `fp32_matrix`, `int8_matrix`, `memory_read`, `memory_copy`, `h2d_pinned`, `launch` (docs/doctor.md)."""
    value: float
    unit: Literal["TFLOP/s", "TOP/s", "GB/s", "us"]
    source: Literal["measured", "datasheet"]
    how: str
    """What ran: `torch.matmul 8192x8192x8192 fp16, best of 20`."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device can do at most, measured once and kept by device name, driver and library."""

    device: str
    """`NVIDIA H200`, or the CPU's model name and its cores."""
    key: str
    """What they are kept under."""
    items: tuple[Ceiling, ...]
    measured: str
    """UTC, ISO 8601."""
    environment: Environment
    skipped: tuple[str, ...] = ()
    """What could not be measured here, with the reason."""
    notes: tuple[str, ...] = ()
    """What makes the figures doubtful: a machine that was busy, clocks held down."""

    def get(self, name: str) -> Ceiling | None:
        """The ceiling of that name; None where there is none."""
        return next((item for item in self.items if item.name == name), None)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `doctor` says of this machine."""

    diagnoses: tuple[Diagnosis, ...]
    backends: tuple[BackendState, ...]
    environment: Environment
    problems: int
    warnings_found: int
    ceilings: tuple[Ceilings, ...] = ()
    """What each device asked about can do at most; with `--ceilings`."""


@dataclass(frozen=True, slots=True)
class CachedEngine:
    """One engine of the store."""

    key: str
    path: str
    backend: str
    model: str
    nbytes: int
    used: str
    """Time of last use, UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What `cache list` and `cache prune` say of the store."""

    action: Literal["list", "prune"]
    folder: str
    engines: tuple[CachedEngine, ...]
    """What is in the store; after `prune`, what is left."""
    nbytes: int
    """Of `engines` together."""
    removed: tuple[CachedEngine, ...] = ()
    removed_bytes: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class SizePlan:
    """What `size --dry-run` says: the pre-flight, and every engine and measurement the run may come to."""

    model: str
    folder: str
    engines: tuple[str, ...]
    """The first engine, then those the doubling may come to."""
    batches: tuple[int, ...]
    """The largest batch of each."""
    measurements: tuple[int, ...]
    preflight: tuple[Check, ...]
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The values of one tensor over the data. Shares are of the finite values, zeros not counted among the small ones."""

    name: str
    kind: Literal["input", "activation", "constant"]
    node: str | None
    """The node that makes it."""
    operator: str | None
    elements: int
    min: float
    max: float
    absmax: float
    """Of the finite values, as `min` and `max`."""
    zero: float
    nan: int
    infinite: int
    fp16_beyond: float
    """Share beyond 65504."""
    fp16_subnormal: float
    """Share below 2^-14: fewer digits."""
    fp16_vanishing: float
    """Share below 2^-25: zero in FP16."""
    bf16_subnormal: float
    fp8_subnormal: float
    """Under one E4M3 scale for the tensor, `absmax` / 448; estimated within a quarter octave."""
    fp8_vanishing: float
    module: str | None = None
    """The PyTorch module that makes it, or reads the constant; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One node to leave in FP32, and why."""

    node: str
    """Its name, or its first output where it has none."""
    operator: str
    code: str
    """Of the finding behind it."""
    reason: str
    tensor: str
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class RangesReport:
    """What `ranges` says of a model."""

    model: str
    digest: str
    data: str
    """Where the inputs came from."""
    random: bool
    """True when no data was given: then the ranges say little about real values."""
    batches: int
    rows: int
    margin: float
    tensors: tuple[TensorRange, ...]
    constants: tuple[TensorRange, ...]
    findings: tuple[Finding, ...]
    exclude: tuple[Exclusion, ...]
    """What to leave in FP32 when the rest goes to FP16."""
    wall_s: float
    warnings: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    """Files left out, and why."""
    preprocess: dict[str, Any] | None = None
    """What made inputs of pictures, and under `source` who says so; None where the data was not pictures."""


@dataclass(frozen=True, slots=True)
class RangesPlan:
    """What `ranges --dry-run` says: what would be looked at and written."""

    model: str
    data: str | None
    """None for random inputs."""
    writes: tuple[str, ...]
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class QuantizedNode:
    """One node that was quantised, and how."""

    node: str
    op: str
    weight: str
    """How its weight lies: `int8, one scale for each of 64 channels (axis 0)`."""
    activation: str | None
    """The tensor it reads, where that is quantised."""
    amax: float | None
    """Range of that tensor; None where it is worked out while running."""
    error: float
    """Of the weight, relative: root of the mean square of the difference over that of the weight."""
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class LeftNode:
    """One linear node that stays as it was, and why."""

    node: str
    op: str
    reason: str
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class IntegerKernels:
    """What ONNX Runtime made of a quantised graph on a CPU."""

    layers: dict[str, tuple[int, int]]
    """By operator with weights: how many run in integer kernels, and how many there are."""
    not_fused: tuple[LeftNode, ...]
    """Those that do not, and why."""
    kernels: dict[str, int]
    """Integer kernels of the optimised graph, by operator."""


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize` says. Of a dry run: what would be quantised."""

    model: str
    out: str | None
    """None for a dry run, and where nothing but an emulation was asked for and possible."""
    to: str
    target: str
    """The library that Q/DQ was placed for."""
    method: Literal["rtn", "awq", "dynamic"]
    weights_only: bool
    high_precision: str
    quantized: tuple[QuantizedNode, ...]
    left: tuple[LeftNode, ...]
    opset_before: int
    opset: int
    nbytes_before: int
    nbytes: int | None
    """Model file and side files."""
    precision: Precision
    """What was asked for, and the census of what was written."""
    calibration: dict[str, Any] | None
    """Calibrator, settings, samples, digests; None where no data was needed."""
    parity: dict[str, OutputError] | None
    """Against the model as it was, by output."""
    parity_inputs: str | None
    """What it was measured on."""
    measured_on: Literal["kernels", "emulation"] | None
    """`kernels`: ONNX Runtime ran the file itself, in FP32 where it has no kernels of the type; `emulation`: an FP32 graph
    that rounds alike."""
    rewritten: tuple[str, ...]
    """What raising the opset and preparing the graph changed."""
    seconds: float
    environment: Environment
    artifacts: dict[str, str]
    integer_kernels: IntegerKernels | None = None
    """What ONNX Runtime fused, for `onnxruntime-cpu`."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


KeptCode = Literal["excluded", "range", "type", "constant", "scale", "index", "between", "careful"]


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node that `cast` left in FP32."""

    node: str
    op: str
    code: KeptCode
    reason: str
    module: str | None = None
    """Its PyTorch module, `layer2.0.conv1`; None where that is not known."""


@dataclass(frozen=True, slots=True)
class CastParity:
    """The cast model against its FP32 source, both in ONNX Runtime on the same input; or why that was not judged."""

    inputs: str
    outputs: dict[str, OutputError]
    kernels: dict[str, int]
    """Nodes by the type their kernels really ran in, Casts left out."""
    emulated: bool
    """True when FP32 kernels ran with every result rounded to the type: it has no kernels here, for all layers or some."""
    note: str | None = None


@dataclass(frozen=True, slots=True)
class CastReport:
    """What `cast` says: what computes in the low type now, what does not, and why."""

    model: str
    out: str | None
    """None of a dry run."""
    to: str
    path: Literal["light", "careful"]
    """Our own rewrite, or ModelOpt's AutoCast."""
    keep_io: bool
    opset: tuple[int, int]
    """Before and after."""
    nodes: int
    """Nodes that read or make floating-point numbers, constants left out."""
    nodes_cast: int
    operators_cast: dict[str, int]
    kept: tuple[KeptNode, ...]
    casts_added: int
    casts_removed: int
    constants_converted: int
    constants_in_both_types: tuple[str, ...]
    constants_clamped: tuple[str, ...]
    nbytes_before: int
    nbytes_after: int | None
    """External data included; None of a dry run."""
    findings: tuple[Finding, ...]
    """Of the typing rules that TensorRT's strongly typed parser enforces, on the result."""
    notes: tuple[str, ...]
    preprocess: dict[str, Any] | None = None
    """What made inputs of pictures, and under `source` who says so; None where the data was not pictures."""
    precision: Precision | None = None
    parity: CastParity | None = None
    artifacts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DynamicAxis:
    """One size that stays open: its name, where it stands, and the sizes it may have."""

    symbol: str
    inputs: dict[str, tuple[int, ...]]
    """Axes by input."""
    low: int
    high: int | None
    step: int
    tried: tuple[int, ...] = ()
    """The sizes at which the graph was compared with its source."""


@dataclass(frozen=True, slots=True)
class ShapeAgreement:
    """An exported graph against its source at one set of input shapes."""

    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    """Of the dynamic axes, by name."""
    outputs: dict[str, OutputError]
    """`max_rel` is the largest of the whole output and of any channel by its own scale, where that is beyond rounding."""


@dataclass(frozen=True, slots=True)
class ExportAttempt:
    """One exporter that was tried; why it was left, or None for the one that was taken."""

    exporter: str
    seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What `convert` says: what the source is, how it became ONNX, how far the two lie apart. Of a dry run: the first."""

    source: str
    kind: str
    seen: str
    """How one sees that it is of this kind."""
    out: str | None
    """None of a dry run."""
    exporter: str | None
    attempts: tuple[ExportAttempt, ...]
    opset: int | None
    ir_version: int | None
    signature: Signature | None
    dynamic: tuple[DynamicAxis, ...]
    agreement: tuple[ShapeAgreement, ...]
    """At every shape that was compared, the example's first."""
    worst: float | None
    """The largest difference over the largest value, of all of them."""
    tolerance: float
    nodes_before: int | None
    """As exported, before it was simplified."""
    nodes: int | None
    operators: dict[str, int]
    operators_gone: dict[str, int]
    """Taken out by simplifying."""
    nbytes: int | None
    """Model file and side files."""
    digest: str | None
    findings: tuple[Finding, ...]
    """Of `lint`, on what was written."""
    notes: tuple[str, ...]
    versions: dict[str, str]
    export_s: float | None
    """Of the exporter that was taken."""
    seconds: float
    environment: Environment | None
    artifacts: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One measurement of a search: a line of trials.jsonl."""

    key: str
    """Digest of the search, the pictures and the layers: equal keys are never measured twice."""
    search: str
    """Digest of all that a measurement depends on: model, dataset, calibration, settings."""
    stage: Literal["baseline", "all", "alone", "prefix", "one more", "verified"]
    nodes: tuple[str, ...]
    """The layers that were quantised."""
    macs: float
    """Their share of the multiply-adds."""
    metric: float
    images: int
    nbytes: int
    batch: int
    samples_ms: tuple[float, ...]
    """One time for each query; empty where no kernel computes the format."""
    measured_on: Literal["model", "kernels", "emulation"]
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """Layers that are quantised together, and what that costs with all others in float."""

    nodes: tuple[str, ...]
    macs: float
    drop: float | None
    """Loss of the metric on the subset; None when it was not asked, since everything keeps the budget."""
    quantized: bool
    modules: tuple[str | None, ...] = ()
    """The PyTorch module of each node; None where that is not known."""


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """One mixture of layers in the table of accuracy against speed and size."""

    stage: Literal["baseline", "all", "alone", "prefix", "one more", "verified"]
    layers: int
    macs: float
    images: int
    metric: float
    drop: float
    """Against the model as it is, on the same pictures."""
    nbytes: int
    batch: int
    latency_ms: Summary | None
    """Of one whole batch; None where no kernel computes the format."""
    measured_on: Literal["model", "kernels", "emulation"]
    pareto: bool
    """No other on the same pictures has a larger share and a larger metric."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """What `search` says: which layers may be quantised within the budget, and what every layer costs."""

    model: str
    digest: str
    """Of all that a measurement depends on: a search with the same one goes on where this one ended."""
    to: str
    dataset: str
    metric: str
    """AP or top1."""
    budget: float
    baseline: float
    """The metric of the model as it is, on the whole dataset."""
    found: float
    """With the chosen layers quantised, on the whole dataset."""
    drop: float
    quantized: tuple[str, ...]
    excluded: tuple[str, ...]
    """Layers the format could take that stay in float."""
    macs: float
    """Share of the multiply-adds that is quantised."""
    nbytes_before: int
    nbytes: int
    images: int
    subset: int
    """Pictures that the cost of each group was measured on."""
    groups: tuple[SearchGroup, ...]
    points: tuple[SearchPoint, ...]
    trials: int
    measured: int
    """Of the trials: made now; the others were in the log."""
    next_command: str | None
    """What makes the model that was verified; None when no layer can be quantised."""
    environment: Environment
    seconds: float
    artifacts: dict[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What `search --dry-run` says: the layers in question and the measurements it would take."""

    model: str
    to: str
    dataset: str
    metric: str
    budget: float
    groups: tuple[tuple[str, ...], ...]
    images: int
    subset: int
    measurements: int
    """At most, about."""
    writes: tuple[str, ...]
    target: str = "tensorrt"
    """The library that Q/DQ are placed for."""
    dry_run: bool = True


def encode(value: Any) -> bytes:
    """JSON of a record, one line; NaN and infinities become null."""
    return json_bytes(value)


def document(verb: str, body: Any, *, command: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The verb's JSON document: the common keys, then the verb's own.

    `body` is one of the `...Report` records or a mapping.
    """
    own = body if isinstance(body, Mapping) else msgspec.to_builtins(body)
    common = {
        "schema": f"trt-engine/{verb}",
        "schema_version": 1,
        "tool": {"name": "trt-engine", "version": version_of("trt-engine") or "unknown"},
        "command": command,
        "warnings": [*warnings, *(item for item in own.get("warnings", ()) if item not in warnings)],
    }
    return common | {name: value for name, value in own.items() if name not in common}


def append(path: Path, record: Any) -> None:
    """Add one record to a .jsonl file, at once, so that an interruption loses nothing already measured.

    A line that does not fit on the disk is taken back: the file holds whole records or is as it was.
    """
    line = encode(record) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if before:
                file.seek(before - 1)
                if file.read(1) != b"\n":  # a process died in the middle of a line; ours starts on its own
                    line = b"\n" + line
            try:
                while line:  # a full disk first writes less than asked, and only then says why
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        raise explain(error, path) from error
