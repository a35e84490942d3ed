"""A run of many cells: what `run PLAN.yaml` keeps of each, as facts a report can read.

A cell is one model at one precision by one backend at one batch size. Each keeps its own file, written whole when the cell
ends, so that a run that was killed goes on with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.engine import Parity
from trt_engine.environment import Environment
from trt_engine.records import BenchRecord, EvaluateReport, Step, Summary
from trt_engine.traces import ProfileReport

__all__ = ["CellResult", "CellSpec", "PlannedCell", "RunManifest", "RunOutlook", "RunSummary", "slower_than_float"]

_FLOATS = ("fp32", "tf32", "fp16", "bf16", "as-is")
_SLOWER = 1.05
"""How many times the FP32 cell's median another one's has to be for a sentence: cells are not measured in turns."""

CellState = Literal["done", "failed", "skipped", "interrupted", "waiting"]


@dataclass(frozen=True, slots=True)
class CellSpec:
    """What a cell is to do; its `label` names its files."""

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
    """Of `build`, `bench`, `evaluate`, `profile`, `nsys`, `ncu`; none where nothing that was asked for can be done."""
    own_file: bool = False
    """True when the plan names an already quantised file for it: nothing is quantised again."""
    providers: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of build and bench, by name."""
    digest: str = ""
    """Of everything above but the modes and their own settings, and of the files' contents: of the engine."""
    parts: dict[str, str] = field(default_factory=dict)
    """By mode, the digest of its own settings and data: a mode with another one is carried out again."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Modes that were asked for by name and have nothing to do in this cell, and why."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """What became of a cell."""

    spec: CellSpec
    state: CellState
    reason: str | None = None
    """Why it failed or was skipped, and the remedy after `hint: `."""
    exit_code: int = 0
    """The one its error has as a command of its own."""
    engine: str | None = None
    """Relative to the run's folder."""
    engine_bytes: int | None = None
    build_seconds: float | None = None
    found: dict[str, float] = field(default_factory=dict)
    """The census: share of layers by type."""
    ran_in: str | None = None
    """What its engine computes in where that is not its precision."""
    not_fused: str | None = None
    """Which of its quantised layers run in floating point, and why."""
    parity: Parity | None = None
    bench: BenchRecord | None = None
    evaluated: EvaluateReport | None = None
    profile: ProfileReport | None = None
    asked_batch: int | None = None
    """Where out-of-memory halved the batch: the one the plan named."""
    images_digest: str | None = None
    """Of the list of images it was evaluated and calibrated on."""
    steps: tuple[Step, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """By what they are, relative to the run's folder: `log`, `nsys`, `ncu`, `timeline`, `record`."""
    opens: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunManifest:
    """`run.json`: what the run is, written first."""

    name: str
    plan: str
    """The plan's file name; a copy lies in the run's folder as `plan.yaml`."""
    plan_digest: str
    cells: tuple[CellSpec, ...]
    modes: tuple[str, ...]
    environment: Environment
    started: str
    command: str = ""
    title: str = ""
    baseline: str | None = None
    """Label of the cell every other is held against; None: the first of each model."""
    container: dict[str, str] = field(default_factory=dict)
    """Image, digest and engine of `--container`, tool versions inside; empty when run directly."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What `run` says at its end."""

    folder: str
    manifest: RunManifest
    results: tuple[CellResult, ...]
    done: int
    failed: int
    skipped: int
    reused: int
    """Cells that were there already."""
    artifacts: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """What would be done with a cell."""

    spec: CellSpec
    does: Literal["run", "keep", "skip", "leave"]
    """`keep`: its result is there already; `leave`: `--only` leaves it out."""
    reason: str
    seconds: float | None = None
    """About how long, by earlier records; None where there are none."""


@dataclass(frozen=True, slots=True)
class RunOutlook:
    """What `run --dry-run` says: every cell and what it would do."""

    folder: str
    plan: str
    cells: tuple[PlannedCell, ...]
    seconds: float | None
    """About how long all of it takes; None while nothing like it was measured."""
    starts: tuple[str, ...] = ()
    """With `--container`: the command line that would be started."""
    dry_run: bool = True
    warnings: tuple[str, ...] = ()


def slower_than_float(results: Iterable[CellResult]) -> Iterator[str]:
    """A sentence for each quantised cell that is slower than the FP32 cell of its model, backend, device and batch; both
    measured, stable and by the same rules."""
    timed = [(cell, times.median) for cell in results if (times := _times(cell)) is not None]
    for cell, ms in timed:
        if cell.spec.precision in _FLOATS:
            continue
        for plain, plain_ms in timed:
            if plain.spec.precision == "fp32" and _place(plain) == _place(cell) and ms > _SLOWER * plain_ms:
                why = f": {cell.not_fused}" if cell.not_fused else ""
                yield f"`{cell.spec.label}` is {100 * (ms / plain_ms - 1):.0f} % slower than `{plain.spec.label}`{why}"
                break


def _times(cell: CellResult) -> Summary | None:
    return cell.bench.compute() if cell.state == "done" and cell.bench is not None and cell.bench.stable else None


def _place(cell: CellResult) -> tuple[Any, ...]:
    spec, bench = cell.spec, cell.bench
    assert bench is not None
    return spec.model, spec.backend, spec.device, spec.providers, bench.batch, bench.protocol
