"""Results of `bundle`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.config.profiles import Profile
from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.base import Failure
from trt_engine.records.inspect import EngineReport
from trt_engine.records.parity import Parity
from trt_engine.records.passport import Precision


@dataclass(frozen=True, slots=True)
class BundleLink:
    """An output connected to an input."""

    producer: str
    """Component of `output`, as `consumer` that of `input`."""
    output: str
    consumer: str
    input: str
    transpose: tuple[int, ...] = ()
    """Permutation of axes the application applies; empty for none."""
    declared: bool = True
    """False when it was inferred."""

    def __str__(self) -> str:
        return f"{self.producer}.{self.output} -> {self.consumer}.{self.input}"


@dataclass(frozen=True, slots=True)
class BundleConnection(BundleLink):
    """An output of one component that feeds an input of another (or of itself: a state)."""

    tensor: str = ""
    """Type and shape of the output: `float32 batchx1024xtime`."""
    matches: bool | None = None
    """Whether the engines' own signatures agree; None before both are there."""


@dataclass(frozen=True, slots=True)
class BundleStep:
    """One component's run within the chain."""

    component: str
    sources: dict[str, str]
    """Source output by input; other inputs were generated."""
    inputs: dict[str, dict[str, Any]]
    """dtype, shape and range of each, as `outputs`."""
    outputs: dict[str, dict[str, Any]]
    wall_ms: float
    """One inference, by the host's clock."""


@dataclass(frozen=True, slots=True)
class BundleComponent:
    """One component of a bundle and its engine."""

    name: str
    status: Literal["planned", "pending", "building", "built", "stored", "kept", "failed", "interrupted"]
    """`stored`: from the store; `kept`: already in the folder, for this model and these settings."""
    model: str
    model_digest: str
    """SHA-256 of the model with its side files."""
    model_bytes: int
    external: tuple[str, ...]
    """Side files that were staged with the model, as it spells them."""
    command: str
    """Command that builds this engine alone."""
    key: str
    identity: str
    profiles: tuple[Profile, ...]
    fixed_inputs: dict[str, int | tuple[str, int]] = field(default_factory=dict)
    """Inputs a smoke run does not fill at random: a number, or the input and position whose size it is."""
    engine: str | None = None
    """The payload's file, in the bundle's folder."""
    log: str | None = None
    """The build's log, in the bundle's folder."""
    payload_bytes: int | None = None
    """Total size of the payload and its side files."""
    digest: str | None = None
    seconds: float = 0.0
    """Duration of this component in this command."""
    build_seconds: float | None = None
    """Duration of the build itself."""
    library: str | None = None
    """Library that runs it: `tensorrt 10.16.1.11`, `onnxruntime 1.27.0`."""
    precision: Precision | None = None
    parity: Parity | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Facts of the backend, by name."""
    retries: tuple[str, ...] = ()
    smoke_run: dict[str, Any] | None = None
    error: Failure | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BundleReport(RichDisplay):
    """Report of `bundle` and contents of `build_report.json`: components, connections and files."""

    meta: str
    """Path of the meta file."""
    name: str
    version: str
    """Version of the whole bundle: it changes with any model, setting, builder or connection."""
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
    error: Failure | None = None
    """Error of the bundle, not of one component."""
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BundleState(RichDisplay):
    """Report of `inspect` on a bundle folder."""

    path: str
    kind: Literal["bundle"]
    name: str
    version: str
    complete: bool
    """All engines are there, are those of the report, load here, and fit each other."""
    engines: dict[str, EngineReport]
    """Report by component."""
    problems: tuple[str, ...]
    """Why `complete` is False."""
    connections: tuple[BundleConnection, ...]
    chain: tuple[BundleStep, ...]
    """With `--run`: all components run in the order they feed each other."""
    files: dict[str, int]
    """Bytes by path in the folder."""
    nbytes: int
