"""Records of `compare` and `diff`: differences of engines in speed, outputs and structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.parity import OutputError


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    low: float
    """In per cent, as the estimate `value` and `high`."""
    value: float
    high: float
    level: float = 0.95
    """Confidence level, 0 to 1."""

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """One metric of `side` against the first engine: by how many per cent it is slower (faster below zero)."""

    metric: Literal["median", "mean", "p99", "throughput"]
    """`throughput` is in images/s; the others are times of one query."""
    baseline: float
    """Value of the first engine, in `unit`."""
    other: float
    """Value of this engine, in `unit`."""
    unit: Literal["ms", "images/s"]
    slower_pct: Interval
    """Per cent of the base; positive is slower, of throughput too."""
    verdict: Literal["slower", "faster", "no difference found"]
    """By the interval alone."""
    min_detectable_pct: float | None = None
    """The smallest difference this comparison would find four times out of five (power 0.8), by its own scatter."""

    @property
    def factor(self) -> float:
        """Speed ratio (at least 1), by the estimate of `slower_pct`."""
        times = max(1e-6, 1 + self.slower_pct.value / 100)
        return times if times >= 1 else 1 / times


@dataclass(frozen=True, slots=True)
class GateResult:
    """One `--fail-if` and how it went."""

    rule: str
    """As typed: `slower:3%`; of `upgrade-check` also `plan`, `accuracy`, `precision`."""
    failed: bool
    """An engine is beyond the limit; of `error` and `maybe-slower` also one that cannot be judged."""
    text: str
    metric: Literal["median", "mean", "p99", "error"] | None = None
    """Metric of the rule; None in a record of an older version."""
    limit: float | None = None
    """Per cent; of `error` a difference over the scale of its channel."""
    evaluated: bool = True
    """False where some engine has no figure to judge by: what did not fail has not passed either."""


@dataclass(frozen=True, slots=True)
class CompareSide:
    """One engine of a comparison."""

    label: str
    """As typed, made unique."""
    engine: str
    backend: str
    device: str
    precision: str
    engine_bytes: int
    """Size of the engine with its side files; 0 for a side read from `bench` records."""
    weights_bytes: int | None = None
    """Size of the weights; None unless the engine is an ONNX file."""
    memory_bytes: int | None = None
    """GPU memory freed by closing it, or process growth on a CPU; None if unknown."""
    runtime_info: dict[str, str] = field(default_factory=dict)
    record: BenchRecord | None = None
    """All its interleaved samples, or the record it was read from."""
    blocks_ms: tuple[tuple[float, ...], ...] = ()
    """Its samples by block, in the order measured."""
    restart_blocks: tuple[int, ...] = ()
    """Number of blocks per load; empty for a record that was measured alone."""
    graph_dtype: str | None = None
    """Main dtype of its graph, where `precision` differs; None also if unknown."""
    not_fused: str | None = None
    """Which of its quantised layers run in floating point, and why."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One engine against the first."""

    label: str
    speed: tuple[MetricDifference, ...]
    """One for each metric; a metric without an interval is missing, and `warnings` has why."""
    outputs: tuple[OutputError, ...]
    """By output; empty where they were not compared, with the reason in `outputs_note`."""
    outputs_note: str = ""
    """Why outputs were not compared or have no figure, and rows of sorted outputs left out."""
    structure: EngineDiff | None = None
    """None where the layers of one engine cannot be read."""
    size_ratio: float | None = None
    """Engine size over the first engine's; None where either is unknown."""
    output_names: tuple[str, ...] = ()
    """Names of `outputs`, in order."""
    outputs_differ: bool = False
    """Some output has no figure: it is missing, has another shape, or values that are not finite on one side alone."""
    top1_agreement: dict[str, float] = field(default_factory=dict)
    """For outputs with rows of scores: fraction of rows with the same best class."""
    slowdown_note: str = ""
    """The sentence for a quantised engine that is slower than a floating-point one, with the reason where it is known."""


@dataclass(frozen=True, slots=True)
class CompareReport(RichDisplay):
    """Report of `compare`. The first engine is the base."""

    sides: tuple[CompareSide, ...]
    comparisons: tuple[Comparison, ...]
    """The others, in order."""
    protocol: Protocol
    environment: Environment
    blocks: int
    """Number of blocks per engine."""
    order: str
    """Measurement order: `random in pairs, seed 0`."""
    method: str
    """The interval's method in one sentence."""
    gates: tuple[GateResult, ...] = ()
    baseline: str | None = None
    """The file the base was read from; None when it was measured now."""
    batch: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stable: bool = True
    instability: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    started: str = ""
    complete: bool = True
    artifacts: dict[str, str] = field(default_factory=dict)
    """Written files by kind: `compare`, `report_html`, `report_md`, `baseline`."""


def headline(report: CompareReport, other: Comparison) -> str:
    """`B is 1.45x slower than A: runs in fp32, its graph is int8`, with the reason where it is known."""
    median = next((metric for metric in other.speed if metric.metric == "median"), None)
    base = report.sides[0]
    if median is None:
        return ""
    if median.verdict == "no difference found":
        return f"No difference in the median found between {other.label} and {base.label}."
    side = next((one for one in report.sides if one.label == other.label), None)
    said = f"{other.label} is {median.factor:.2f}x {median.verdict} than {base.label}"
    slow = side if median.verdict == "slower" else base
    reasons = []
    if slow is not None and slow.graph_dtype:
        reasons.append(
            f"{'it' if slow is side else base.label} runs in {slow.precision.upper()}, its graph is {slow.graph_dtype}"
        )
    elif side is not None and side.precision != base.precision:
        reasons.append(f"it runs in {side.precision.upper()}, {base.label} in {base.precision.upper()}")
    if slow is not None and slow.not_fused:
        reasons.append(slow.not_fused)
    return said + (f": {'; '.join(reasons)}" if reasons else "") + "."


@dataclass(frozen=True, slots=True)
class StructureCount:
    """A count on both sides: layers, reformats, fused layers, nodes per operator, tensors per type."""

    name: str
    """As `layers`, `of several nodes`, `in fp16`, `kind Conv`, or a category."""
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer, or group of layers, that is not the same in both."""

    change: Literal["fused", "split", "added", "removed", "tactic", "type", "shape", "time", "reformat"]
    """`type`: dtype; `tactic`: kernel or layer kind; `time`: only slower or faster; `reformat`: an inserted or removed
    one."""
    before: tuple[str, ...]
    """Names; empty for an added one."""
    after: tuple[str, ...]
    """Names; empty for a removed one."""
    text: str
    """Description of the change: `FP32 -> FP16`, both tactic names."""
    before_ms: float | None = None
    """Sum over the layers of that side, as `after_ms`; None without times."""
    after_ms: float | None = None
    onnx_nodes: tuple[str, ...] = ()
    """ONNX nodes of both sides."""
    module: str | None = None
    """The PyTorch module of these layers, `layer2.0.conv1`; None where it is not known."""


@dataclass(frozen=True, slots=True)
class EngineDiff(RichDisplay):
    """Report of `diff` on two engines."""

    before: str
    after: str
    sources: tuple[str, str]
    """Source of each: `tensorrt 10 inspector`, `tensorrt 11 inspector`, `onnxruntime graph`, `onnx model`."""
    counts: tuple[StructureCount, ...]
    """Without those that neither engine has; kinds only where their numbers differ."""
    changes: tuple[LayerChange, ...]
    """Those with most time first, where times are known."""
    unchanged: int
    """Layers that are the same in both."""
    unknown_kinds: tuple[str, ...] = ()
    """Unknown layer types, compared by name."""
    build: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings, versions and precision that differ, by name."""
    warnings: tuple[str, ...] = ()
