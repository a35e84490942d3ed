"""How engines differ: in speed with an interval, in outputs, in structure. Facts a report can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.engine import OutputError
from trt_engine.environment import Environment
from trt_engine.records import BenchRecord, Protocol

__all__ = [
    "ComparePlan",
    "CompareReport",
    "CompareSide",
    "Compared",
    "EngineDiff",
    "Gate",
    "Interval",
    "LayerChange",
    "MetricDifference",
    "StructureCount",
]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    low: float
    value: float
    high: float
    level: float = 0.95

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """One metric of `side` against the first engine: by how many per cent it is slower (faster below zero)."""

    metric: Literal["median", "mean", "p99", "throughput"]
    base: float
    """Of the first engine, in `unit`."""
    other: float
    unit: Literal["ms", "images/s"]
    slower_pct: Interval
    """Per cent of the base; positive is slower, of throughput too."""
    verdict: Literal["slower", "faster", "no difference found"]
    """By the interval alone."""
    detectable_pct: float | None = None
    """The smallest difference this comparison would find four times out of five (power 0.8), by its own scatter."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One `--fail-if` and how it went."""

    rule: str
    """As typed: `slower:3%`."""
    failed: bool
    text: str
    metric: Literal["median", "mean", "p99", "error"] | None = None
    """What it judges by; None in a record of an older version."""
    limit: float | None = None
    """Per cent; of `error` a difference over the scale of its channel."""
    judged: bool = True
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
    weights_bytes: int | None = None
    memory_bytes: int | None = None
    """What a GPU has again once it is closed, or the process's growth on a CPU; None where nothing tells."""
    facts: dict[str, str] = field(default_factory=dict)
    record: BenchRecord | None = None
    """All its interleaved samples, or the record it was read from."""
    blocks_ms: tuple[tuple[float, ...], ...] = ()
    """Its samples by block, in the order measured."""
    loads: tuple[int, ...] = ()
    """How many of the blocks each load had; empty for a record that was measured alone."""
    written: str | None = None
    """What most of its graph is written in, where `precision` is another type; None where it is not known too."""
    not_fused: str | None = None
    """Which of its quantised layers run in floating point, and why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One engine against the first."""

    label: str
    speed: tuple[MetricDifference, ...]
    outputs: tuple[OutputError, ...]
    """By output; empty where the outputs were not compared, and `outputs_note` says why."""
    outputs_note: str = ""
    structure: EngineDiff | None = None
    size_ratio: float | None = None
    output_names: tuple[str, ...] = ()
    """Of `outputs`, in their order."""
    outputs_differ: bool = False
    """Some output has no figure: it is missing, has another shape, or values that are not finite on one side alone."""
    top1_same: dict[str, float] = field(default_factory=dict)
    """Of outputs with rows of scores: the share of rows with the same best class."""
    quantised_slower: str = ""
    """The sentence for a quantised engine that is slower than a floating-point one, with the reason where it is known."""


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """What `compare --dry-run` says: what would be measured, built and written."""

    engines: tuple[str, ...]
    builds: tuple[str, ...]
    """Models whose engines come from the store, or are built into it."""
    baseline: str | None
    rules: tuple[str, ...]
    duration_s: float
    loads: int
    writes: tuple[str, ...]
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class CompareReport:
    """What `compare` says. The first engine is the base."""

    sides: tuple[CompareSide, ...]
    against: tuple[Compared, ...]
    """The others, in order."""
    protocol: Protocol
    environment: Environment
    blocks: int
    """How often each engine had its turn."""
    order: str
    """How turns were dealt: `random in pairs, seed 0`."""
    method: str
    """The interval's method in one sentence."""
    gates: tuple[Gate, ...] = ()
    baseline: str | None = None
    """The file the base was read from; None when it was measured now."""
    batch: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stable: bool = True
    instability: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    started: str = ""
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StructureCount:
    """A count on both sides: layers, reformats, fused layers, nodes per operator, tensors per type."""

    name: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer, or group of layers, that is not the same in both."""

    change: Literal["fused", "split", "added", "removed", "tactic", "type", "shape", "time", "reformat"]
    before: tuple[str, ...]
    """Names; empty for an added one."""
    after: tuple[str, ...]
    text: str
    """What changed, in words: `FP32 -> FP16`, a tactic's name against another's."""
    before_ms: float | None = None
    after_ms: float | None = None
    onnx_nodes: tuple[str, ...] = ()
    module: str | None = None
    """The PyTorch module of these layers, `layer2.0.conv1`; None where it is not known."""


@dataclass(frozen=True, slots=True)
class EngineDiff:
    """What `diff` says of two engines."""

    before: str
    after: str
    read_as: tuple[str, str]
    """How each was read: `tensorrt 10 inspector`, `tensorrt 11 inspector`, `onnxruntime graph`, `onnx model`."""
    counts: tuple[StructureCount, ...]
    changes: tuple[LayerChange, ...]
    """Those with most time first, where times are known."""
    same: int
    """Layers that are the same in both."""
    unknown_kinds: tuple[str, ...] = ()
    """Layer types nobody here has heard of; they are compared by name all the same."""
    build: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings, versions and precision that differ, by name."""
    warnings: tuple[str, ...] = ()
