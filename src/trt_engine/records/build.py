"""Results of `build`, `validate` and `cache`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trt_engine.config.profiles import Profile
from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.base import Failure
from trt_engine.records.parity import Parity, SpeedCheck
from trt_engine.records.passport import Precision, Tuning, Validation


@dataclass(frozen=True, slots=True)
class BuildReport(RichDisplay):
    """Report of `build`; for a dry run, what would be built and what exists already."""

    model: str
    """The path of the ONNX file, as it was given."""
    engine: str | None
    """The payload's path; None when nothing is built yet."""
    payload_bytes: int | None
    """Size of the payload and its side files."""
    digest: str | None
    """SHA-256 of the payload."""
    backend: str
    device: str
    identity: str
    """Who builds, exactly: library, version, providers, instruction sets."""
    key: str
    """The engine's key in the store."""
    cached: bool
    """True when the store had the engine."""
    seconds: float
    """Duration of this command; 0 for a dry run."""
    precision: Precision
    profiles: tuple[Profile, ...]
    parity: Parity | None
    environment: Environment
    notes: dict[str, str]
    """The backend's facts: optimisation level, providers, nodes by provider; `original`, the build to use in place of one
    that is not faster."""
    artifacts: dict[str, str]
    quant_target: str | None = None
    """The target whose kernels a quantised model is built for; None for a model without quantised layers."""
    speed: SpeedCheck | None = None
    """The quantised engine beside an FP32 one."""
    tuning: Tuning | None = None
    """Settings of the backend that were measured before the build."""
    validation: Validation | None = None
    """For an engine that could not be checked where it was built."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()
    """Warnings of this command and of the build."""


@dataclass(frozen=True, slots=True)
class TargetBuild:
    """One of several engines of a model: what was built for a GPU, or why it was not."""

    gpu: str
    """Compute capability: `8.9`."""
    report: BuildReport | None = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class BuildEachReport(RichDisplay):
    """Report of `build --each-gpu`: one engine per GPU; for a dry run, what would be built."""

    model: str
    backend: str
    targets: tuple[TargetBuild, ...]
    """One for each GPU, in the order given."""
    built: int
    """Engines that are there now, from the store or built."""
    failed: int
    """GPUs whose build failed."""
    seconds: float
    artifacts: dict[str, str]
    """Every file, as `sm89_engine`, `sm89_passport`."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValidateReport(RichDisplay):
    """Report of `validate`: an engine compared with its stored reference on a machine that can load it. Of a dry
    run: what would be compared."""

    engine: str
    backend: str
    device: str
    gpu: str | None
    """GPU that checked it; None for a CPU, and before the check."""
    state: Literal["deferred", "passed", "failed"]
    failure: str | None
    """Reason of a failure; None for an engine that passed."""
    checks: tuple[str, ...]
    """`precision`, `parity`."""
    deferred_reason: str
    """Why it was not checked when it was built."""
    inputs: str
    """How the inputs were made."""
    reference: str
    """Runtime of the reference outputs."""
    parity: Parity | None
    precision: Precision
    environment: Environment
    seconds: float
    artifacts: dict[str, str]
    accuracy_command: str | None = None
    """Command that evaluates its accuracy (not part of this check), for a cell whose plan has `evaluate`."""
    runtime_info: dict[str, str] = field(default_factory=dict)
    """Runtime used: library, GPU, providers."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedEngine:
    """One engine of the store."""

    key: str
    path: str
    backend: str
    model: str
    nbytes: int
    last_used: str
    """Time of last use, UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class CacheReport(RichDisplay):
    """Report of `cache list` and `cache prune`."""

    action: Literal["list", "prune"]
    folder: str
    engines: tuple[CachedEngine, ...]
    """Engines in the store, after `prune` if it ran."""
    nbytes: int
    """Total size of `engines`."""
    removed: tuple[CachedEngine, ...] = ()
    """Engines that `prune` removed, or would remove."""
    removed_bytes: int = 0
    dry_run: bool = False
