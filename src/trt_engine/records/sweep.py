"""A run of many cells: what `run PLAN.yaml` keeps of each, as facts a report can read.

A cell is one model at one precision by one backend at one batch size. Each keeps its own file, written whole when the cell
ends, so that a killed run resumes with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.base import StepTime
from trt_engine.records.bench import BenchRecord
from trt_engine.records.evaluate import EvaluateReport
from trt_engine.records.parity import Parity
from trt_engine.records.profile import ProfileReport

_FLOATS = ("fp32", "tf32", "fp16", "bf16", "as-is")
_SLOWDOWN_RATIO = 1.05
"""Least ratio to the FP32 cell's median that is reported; high because cells are not measured interleaved."""

CellState = Literal["done", "failed", "skipped", "interrupted", "waiting"]


@dataclass(frozen=True, slots=True)
class CellSpec:
    """Settings of a cell; its `label` names its files."""

    label: str
    """`digits-int8-onnxruntime-b8`: safe as a file name, unique in the run."""
    model: str
    """The name the plan gives the model."""
    source: str
    """The ONNX file the engine is made of: the model's, or the cell's own already quantised one."""
    precision: str
    backend: str
    batch: int
    device: str
    modes: tuple[str, ...]
    """Some of `build`, `bench`, `evaluate`, `profile`, `nsys`, `ncu`; empty where no requested mode can run."""
    prequantized: bool = False
    """True when the plan names an already quantised file for it: nothing is quantised again."""
    providers: tuple[str, ...] = ()
    """Requested execution providers of ONNX Runtime, in order."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of build and bench, by name."""
    digest: str = ""
    """Digest of the engine: of all fields above except the modes, and of the files' contents."""
    mode_digests: dict[str, str] = field(default_factory=dict)
    """By mode, the digest of its settings and data: a mode with another digest runs again."""
    skipped_modes: dict[str, str] = field(default_factory=dict)
    """Explicitly requested modes that do not apply to this cell, and why."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of a cell."""

    spec: CellSpec
    state: CellState
    """`skipped`: cannot run on this machine; `waiting`: not run yet."""
    reason: str | None = None
    """Why it failed or was skipped, and the remedy after `hint: `."""
    exit_code: int = 0
    """Exit code of its error."""
    engine: str | None = None
    """Relative to the run's folder."""
    engine_bytes: int | None = None
    build_seconds: float | None = None
    """Duration of the build, also of an engine from the store."""
    dtype_shares: dict[str, float] = field(default_factory=dict)
    """Dtype breakdown: fraction of layers by dtype."""
    compute_dtype: str | None = None
    """Compute dtype, where it is not the cell's precision."""
    not_fused: str | None = None
    """Which of its quantised layers run in floating point, and why."""
    parity: Parity | None = None
    validation: str | None = None
    """For an engine built for another GPU: `not validated on a GPU`."""
    bench: BenchRecord | None = None
    evaluation: EvaluateReport | None = None
    profile: ProfileReport | None = None
    requested_batch: int | None = None
    """Batch of the plan, where out-of-memory halved it."""
    images_digest: str | None = None
    """Digest of the list of images for evaluation and calibration."""
    steps: tuple[StepTime, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Files by kind, relative to the run's folder: `log`, `nsys`, `ncu`, `timeline`, `record`."""
    open_commands: dict[str, str] = field(default_factory=dict)
    """The command that opens each of the profiler's `files`."""
    warnings: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunManifest:
    """`run.json`: what the run is, written first."""

    name: str
    plan: str
    """The plan's file name; the run folder has a copy as `plan.yaml`."""
    plan_digest: str
    """`sha256:<hex>` of the plan file."""
    cells: tuple[CellSpec, ...]
    """Every cell of the plan, also those that `--cells` leaves out."""
    modes: tuple[str, ...]
    """Requested modes: `build`, `bench`, `evaluate`, `profile`, `nsys`, `ncu`."""
    environment: Environment
    started: str
    command: str = ""
    title: str = ""
    baseline: str | None = None
    """Label of the baseline cell; None: the first of each model."""
    container: dict[str, str] = field(default_factory=dict)
    """Image, digest and engine of `--container`, tool versions inside; empty when run directly."""
    trusted: tuple[str, ...] = ()
    """Keys of the plan that run code or reach outside, allowed by `--trust-plan`."""


@dataclass(frozen=True, slots=True)
class RunSummary(RichDisplay):
    """Report of `run`."""

    folder: str
    manifest: RunManifest
    results: tuple[CellResult, ...]
    """One for each cell of the plan, in its order."""
    done: int
    failed: int
    skipped: int
    """Number of cells that cannot run on this machine."""
    reused: int
    """Cells that were there already."""
    artifacts: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """Planned action for a cell."""

    spec: CellSpec
    """With the modes that are left to run."""
    action: Literal["run", "keep", "skip", "leave"]
    """`keep`: its result is there already; `leave`: `--cells` leaves it out."""
    reason: str
    seconds: float | None = None
    """About how long, by earlier records; None where there are none."""


@dataclass(frozen=True, slots=True)
class RunPlan(RichDisplay):
    """Report of `run --dry-run`: every cell and what it would do."""

    folder: str
    plan: str
    cells: tuple[PlannedCell, ...]
    seconds: float | None
    """About how long all of it takes; None while nothing like it was measured."""
    container_command: tuple[str, ...] = ()
    """With `--container`: the command line that would be started."""
    dry_run: bool = True
    warnings: tuple[str, ...] = ()


def quantized_slowdowns(results: Iterable[CellResult]) -> Iterator[str]:
    """A sentence for each quantised cell that is slower than the FP32 cell of its model, backend, device and batch; both
    measured, stable and by the same rules."""
    done = [(cell, cell.bench) for cell in results if cell.state == "done" and cell.bench and cell.bench.stable]
    timed = [(cell, times.median) for cell, bench in done if (times := bench.compute_summary()) is not None]
    for cell, ms in timed:
        if cell.spec.precision in _FLOATS:
            continue
        for plain, plain_ms in timed:
            if (
                plain.spec.precision == "fp32"
                and _comparison_key(plain) == _comparison_key(cell)
                and ms > _SLOWDOWN_RATIO * plain_ms
            ):
                why = f": {cell.not_fused}" if cell.not_fused else ""
                yield f"`{cell.spec.label}` is {100 * (ms / plain_ms - 1):.0f} % slower than `{plain.spec.label}`{why}"
                break


def _comparison_key(cell: CellResult) -> tuple[Any, ...]:
    spec, bench = cell.spec, cell.bench
    assert bench is not None
    gpus = spec.settings.get("gpus")
    return spec.model, spec.backend, spec.device, spec.providers, gpus, bench.batch, bench.protocol
