"""Record of `upgrade-check`: the same engines of two versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.compare import Comparison, GateResult
from trt_engine.records.parity import Parity
from trt_engine.records.passport import Compatibility

Verdict = Literal["upgrade", "do not upgrade", "undecided"]


@dataclass(frozen=True, slots=True)
class UpgradeEngine:
    """One cell of a run, one measured engine, or one engine file, as one version made it."""

    state: str
    """`done`; of a cell also `failed`, `skipped`, `interrupted`, `waiting`."""
    backend: str
    device: str
    library: str
    """`onnxruntime 1.31.1`."""
    reason: str | None = None
    """Why there is no engine."""
    exit_code: int = 0
    """Exit code of its error."""
    engine: str | None = None
    engine_bytes: int | None = None
    main_dtype: str | None = None
    """The dtype of most multiply-adds, or of most layers where those are not known."""
    dtype_shares: dict[str, float] = field(default_factory=dict)
    """Fraction by dtype, 0 to 1: of the multiply-adds, or of the layers where those are not known."""
    fusions: str | None = None
    """What the build fused, as `attention 12, bias_gelu 12`."""
    not_fused: str | None = None
    """Which of its quantised layers run in floating point, and why."""
    parity: Parity | None = None
    """Against plain ONNX Runtime of the same environment."""
    metrics: dict[str, float] = field(default_factory=dict)
    """AP, top1 and the others of an evaluation."""
    median_ms: float | None = None
    queries: int = 0
    restarts: int = 0
    """Measurements, each of one load."""


@dataclass(frozen=True, slots=True)
class UpgradeItem:
    """One engine in both versions."""

    label: str
    """Label of the cell, name of the engine file, or engine and batch."""
    old: UpgradeEngine
    new: UpgradeEngine
    comparison: Comparison
    """Speed with interval, layers and fusions. Outputs are in `parity` and `metrics` of each version."""
    compatibility: Compatibility
    """Verdict on the old plan with the new library."""


@dataclass(frozen=True, slots=True)
class UpgradeReport(RichDisplay):
    """Report of `upgrade-check OLD NEW`."""

    old: str
    new: str
    versions: dict[str, tuple[str | None, str | None]]
    """Libraries, driver and tools that differ, with both versions; None where it is not installed or not recorded."""
    items: tuple[UpgradeItem, ...]
    gates: tuple[GateResult, ...]
    """`plan`, `accuracy`, `precision`, then the rules of speed: worst first."""
    verdict: Verdict
    """`undecided`: nothing failed, and something could not be judged."""
    reason: str
    """The failed gates, or those that could not be judged, in words."""
    exit_code: int
    """Exit code of the worst failed gate: 10, 7, 6 or 8; 0 without one."""
    environment: Environment
    """The new one."""
    method: str
    """How the intervals of speed were made."""
    unmatched: tuple[str, ...] = ()
    """Engines that only one side has."""
    warnings: tuple[str, ...] = ()
    started: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)
    complete: bool = True
