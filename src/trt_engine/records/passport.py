"""Parts of an engine's passport: source, build, requirements, precision, compatibility."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trt_engine.config.profiles import Profile
from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.format import format_percent
from trt_engine.records.parity import OutputError, Parity, ParityLimits, SpeedCheck
from trt_engine.tensors import Signature

PASSPORT_VERSION = 1
GRAPH_DTYPE = "written"
"""Build note: dtype of the graph, where the engine computes in another one."""
QUANT_TARGET = "quant_target"
"""The note of a build that names the quantisation target its graph was quantised for by the build."""
NOT_FUSED = "not_fused"
"""Build note: quantised layers that the kernels do not support, and why."""
FUSIONS = "fusions"
"""Build note: what the build fused and how often, as `attention 12, bias_gelu 12`."""
FP32_PRODUCTS = "fp32_products"
"""Build note of ONNX Runtime's CUDA provider: the number of matrix products and convolutions in FP32."""
NOT_VALIDATED = "not validated on a GPU"
"""The summary of an engine whose check is deferred."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One file of the engine: name beside the passport, bytes, SHA-256."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Source:
    """The model an engine was built from."""

    name: str
    digest: str
    opset: int | None
    file: str
    """Path of the model at the build."""


@dataclass(frozen=True, slots=True)
class DtypeShare:
    """Fractions of a network in one dtype, each between 0 and 1."""

    layers: float
    """Fraction of the layers that compute."""
    parameters: float
    """Fraction of the stored weights."""
    macs: float | None = None
    """Fraction of the multiply-adds; None where they could not be counted."""

    @property
    def main(self) -> float:
        """The share of the multiply-adds, or of the layers where those could not be counted."""
        return self.layers if self.macs is None else self.macs


@dataclass(frozen=True, slots=True)
class Precision:
    """Requested precision and dtype breakdown of the engine."""

    requested: str | None
    """None where the graph's was taken."""
    shares: dict[str, DtypeShare] = field(default_factory=dict)
    """By dtype, the largest first."""

    @property
    def main_dtype(self) -> str | None:
        """The type most multiply-adds (or, unknown, most layers) run in."""
        if not self.shares:
            return None
        return max(self.shares, key=lambda name: (self.shares[name].macs or 0.0, self.shares[name].layers))

    @property
    def compute_shares(self) -> dict[str, DtypeShare]:
        """`shares` without dtypes that only store weights."""
        return {name: share for name, share in self.shares.items() if share.layers or share.macs}

    @property
    def shares_text(self) -> str:
        """`fp16 92 %, fp32 8 %`, of the dtypes that compute."""
        return ", ".join(f"{name} {format_percent(share.main)}" for name, share in self.compute_shares.items())


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements for loading the engine."""

    library: str
    """`onnxruntime`, `tensorrt`, `tensorrt-rtx`, `torch`."""
    version: str
    """Version of `library` at the build."""
    cpu_features: tuple[str, ...] = ()
    """Instruction sets the payload's layouts and kernels were chosen for."""
    providers: tuple[str, ...] = ()
    """Execution providers of ONNX Runtime, in order."""
    compute_capability: str | None = None
    gpu: str | None = None
    compute_capabilities: tuple[str, ...] = ()
    """The GPUs of a payload that was built for several, or for one the building machine need not have: `8.9`, `12.0`."""
    plugins: tuple[str, ...] = ()
    """Plugin libraries that must be loaded first, by file name."""
    hardware_compatibility: str = "none"
    """For a TensorRT plan: `none`, `ampere_plus`, `same_compute_capability`."""
    version_compatible: bool = False
    """Later TensorRT versions run it; it holds code for the host unless `lean_runtime` is needed."""
    lean_runtime: bool = False
    """The loader must bring the lean runtime library of the version that built it."""
    stripped: bool = False
    """Its weights must be put back before it runs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A build that was considered: measured, or left out with the reason."""

    backend: str
    options: dict[str, str] = field(default_factory=dict)
    """`-O` settings besides the requested ones."""
    precision: str | None = None
    """Requested precision; None for the graph's."""
    build_s: float | None = None
    """Until it was built and checked; about 0 for one from the store."""
    median_ms: float | None = None
    """Median of its last round, as `p99_ms`; None where it was not measured."""
    p99_ms: float | None = None
    slower_pct: float | None = None
    """Than the fastest of its last round, by what is optimised for; 0 for that one."""
    interval_pct: tuple[float, float] | None = None
    """95 % interval of `slower_pct`; None from one load."""
    rounds: int = 0
    """In how many interleaved rounds it was measured; 0 with a median: by one load alone."""
    metric: float | None = None
    """AP or top-1 on the dataset, where one was given."""
    note: str | None = None
    """Why it was left out, not measured, or not eligible."""

    @property
    def label(self) -> str:
        """`onnxruntime fp16 spinning=off`."""
        settings = (f"{name}={value}" for name, value in self.options.items())
        return " ".join((self.backend, *([self.precision] if self.precision else []), *settings))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The candidates that were built and measured on this machine, and the one chosen."""

    candidates: tuple[Candidate, ...]
    """Simpler ones first: the order of equally fast ones."""
    chosen: int
    """Index of the candidate that the engine is."""
    shapes: dict[str, tuple[int, ...]]
    """What was measured at; empty where nothing was measured."""
    protocol: str
    """How it was measured."""
    optimize_for: str
    """`latency`, `throughput`, or `deadline`: throughput with a p99 within `max_p99_ms`."""
    budget_s: float
    seconds: float
    first_engine_s: float
    """Until the first engine was built and checked."""
    best_engine_s: float
    """Until the chosen one was."""
    runner_up: int | None = None
    """The fastest eligible candidate besides the chosen one, of its last round."""
    margin_pct: float | None = None
    """By how much the runner-up is slower than the chosen one; negative where the simpler was chosen within the interval."""
    margin_interval_pct: tuple[float, float] | None = None
    """95 % interval of `margin_pct`; None from one load."""
    max_p99_ms: float | None = None
    """`--deadline-ms`; None without."""
    complete: bool = True
    """False after Ctrl-C: such a result is not used again."""

    @property
    def summary(self) -> str:
        """`inductor: next is onnxruntime at +4.1 % (+2.0 to +6.1 %; 3 of 6 candidates measured in 12.0 s)`."""
        best, measured = self.candidates[self.chosen], sum(item.median_ms is not None for item in self.candidates)
        aside = f"{measured} of {len(self.candidates)} candidates measured in {self.seconds:.1f} s"
        if self.runner_up is None or self.margin_pct is None:
            return f"{best.label}: {aside}"
        interval = (
            "{:+.1f} to {:+.1f} %".format(*self.margin_interval_pct) if self.margin_interval_pct else "one load each"
        )
        second = self.candidates[self.runner_up].label
        return f"{best.label}: next is {second} at {self.margin_pct:+.1f} % ({interval}; {aside})"


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """How the engine was built; `command` repeats the build."""

    command: str
    config: dict[str, Any]
    """The settings that are part of the key."""
    seconds: float
    identity: str
    warnings: tuple[str, ...] = ()
    retries: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    """Facts of the backend, by name."""
    tuning: Tuning | None = None
    """Candidates that were measured; None where none were."""

    @property
    def graph_dtype(self) -> str | None:
        """Dtype of the graph, where the engine computes in another one: `int8` for an engine that runs in fp32."""
        return self.notes.get(GRAPH_DTYPE)

    @property
    def fusions(self) -> str | None:
        """What the build fused into ONNX Runtime's operators, and how often: `attention 12, bias_gelu 12`."""
        return self.notes.get(FUSIONS)

    @property
    def quant_target(self) -> str | None:
        """The target its model was quantised for by the build itself."""
        return self.notes.get(QUANT_TARGET)

    @property
    def not_fused(self) -> str | None:
        """Which quantised layers run in floating point, and why."""
        return self.notes.get(NOT_FUSED)


@dataclass(frozen=True, slots=True)
class GraphPrecision:
    """Dtype breakdown of the built graph, where the engine's layers could not be counted."""

    meets_request: bool
    """Whether the graph is in the requested precision."""
    share: float
    """Fraction in the requested precision, weighted by `weighting`."""
    macs_by_dtype: dict[str, float]
    """Fraction by dtype, weighted by `weighting`, also where that is `layers`."""
    weighting: str
    """`multiply-adds` or `layers`."""
    requested_macs: float
    """Fraction of all multiply-adds in the requested precision."""
    has_exclusions: bool
    """Whether nodes were left out on purpose."""


@dataclass(frozen=True, slots=True)
class Validation:
    """The check of an engine that could not be loaded on the machine that built it: deferred, or its result
    (`trt-engine validate`). The figures of a check are the passport's `parity`."""

    state: Literal["deferred", "passed", "failed"]
    """A pass without its time and device is read as `deferred`."""
    deferred_reason: str
    """Why it was not checked when it was built."""
    failure: str | None = None
    """What was wrong."""
    checks: tuple[str, ...] = ("parity",)
    """`parity`, `precision`."""
    reference: Payload | None = None
    """The file of reference inputs and outputs beside the engine; None where plain ONNX Runtime could not make any."""
    inputs: str = ""
    """How the inputs were made."""
    reference_runtime: str = ""
    """Runtime of the reference outputs."""
    tolerance: ParityLimits | None = None
    sorted_outputs: tuple[str, ...] = ()
    """Outputs that the graph sorts: their rows may change places."""
    sensitivity: dict[str, OutputError] = field(default_factory=dict)
    """How far the reference moves from itself when its input is changed by the format's roundoff."""
    graph: GraphPrecision | None = None
    """Dtype breakdown of the graph for the precision check; None without that check."""
    validated_at: str | None = None
    """UTC, ISO 8601."""
    device: str | None = None
    environment: Environment | None = None
    """Where it was checked."""
    accuracy_command: str | None = None
    """The command that measures its accuracy where its GPU is, of an engine that a plan wanted evaluated."""

    def __post_init__(self) -> None:
        if self.state == "passed" and None in (self.validated_at, self.device):  # the file was edited
            object.__setattr__(self, "state", "deferred")

    @property
    def summary(self) -> str:
        """`not validated on a GPU`, or the result and where it was found."""
        if self.state == "deferred":
            return NOT_VALIDATED
        where = self.environment and (self.environment.gpu or (self.device == "cpu" and self.environment.cpu))
        return f"{self.state} on {where or self.device or 'a GPU'}" + (f": {self.failure}" if self.failure else "")


@dataclass(frozen=True, slots=True)
class Passport(RichDisplay):
    """Everything `inspect ENGINE` reports without loading the engine."""

    schema: Literal["trt-engine/passport"]
    schema_version: int
    backend: str
    payload: tuple[Payload, ...]
    """The main file first, then its side files."""
    model: Source
    signature: Signature
    profiles: tuple[Profile, ...]
    precision: Precision
    device: str
    build: BuildInfo
    environment: Environment
    requirements: Requirements
    parity: Parity | None = None
    key: str | None = None
    """The engine's key in the store."""
    speed: SpeedCheck | None = None
    """For an engine whose model the build quantised, where an FP32 engine is quickly built."""
    vision: dict[str, Any] | None = None
    """Pre- and post-processing the model declares, in plain values; `trt_engine.vision.spec` reads them."""
    validation: Validation | None = None
    """For an engine that could not be checked where it was built; None otherwise and with `--no-parity`."""

    @property
    def payload_digest(self) -> str:
        """The digests of all its files."""
        return "+".join(item.digest for item in self.payload)


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether an engine can be used here, with one reason and one command."""

    status: Literal["loads", "penalty", "unknown", "rebuild", "refuse"]
    """`penalty`: loads, and is slower or less exact; `rebuild`: has to be built again; `unknown`: no known obstacle,
    but the decisive check was not available."""
    reason: str
    command: str | None = None
    """The next command; None where there is none."""
