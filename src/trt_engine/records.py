"""Records: samples and facts, as every verb writes them. Means and percentiles are worked out when asked.

These types import no instrument, so a report reads them without what made them. Each verb's JSON is one of the `...Report`
types below; `docs/schemas/` is generated from them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from trt_engine.device.info import Clocks
from trt_engine.engine import Passport, Precision, Verdict
from trt_engine.environment import Environment
from trt_engine.tensors import Signature

__all__ = [
    "BatchResult",
    "BenchRecord",
    "Finding",
    "ModelReport",
    "Protocol",
    "SizeReport",
    "Step",
    "Summary",
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
    """The rules a number was measured by; two numbers compare only under equal rules (F3).

    `asked` are the named protocol's rules; what the device does not have is said in `not_applicable`.
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
    """The truth about what ran: providers, threads, precision (F5)."""
    stable: bool = True
    instability: tuple[str, ...] = ()
    """Why the measurement is not stable, in words with figures."""
    warnings: tuple[str, ...] = ()
    complete: bool = True
    """False for the partial record of an interrupted measurement."""

    @property
    def qps(self) -> float:
        """Queries (not images) per second."""
        return self.queries / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def images_per_s(self) -> float:
        """`qps x batch` (A6)."""
        return self.qps * self.batch

    def compute(self) -> Summary | None:
        return summarize(self.compute_ms, self.protocol.percentile_rule)


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


@dataclass(frozen=True, slots=True)
class CliffPoint:
    """One batch size of a cliff scan."""

    batch: int
    images_per_s: float
    expected_images_per_s: float
    """What its better neighbours suggest."""
    cliff: bool


@dataclass(frozen=True, slots=True)
class SizeReport:
    """What `size` says (A1-A12)."""

    model: str
    engine: str
    device: str
    backend: str
    precision: str
    peak_streams: int
    images_per_s: float
    fps: float
    batches: tuple[BatchResult, ...]
    """Batch 1 first, then the final N; the steps of the doubling stand in `tried`."""
    stopped_because: Literal["peak_within_batch", "max_batch", "out_of_memory", "interrupted"]
    engines_built: int
    measurements: int
    steps: tuple[Step, ...]
    protocol: Protocol
    environment: Environment
    artifacts: dict[str, str]
    tried: tuple[BatchResult, ...] = ()
    cliffs: tuple[CliffPoint, ...] = ()
    complete: bool = True


def encode(value: Any) -> bytes:
    """JSON of a record, one line; NaN and infinities become null."""
    return msgspec.json.encode(value)


def append(path: Path, record: Any) -> None:
    """Add one record to a .jsonl file, at once, so that an interruption loses nothing already measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encode(record) + b"\n")
