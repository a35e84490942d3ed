"""Results of `bench`: every sample, the effective protocol, the machine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from trt_engine.device.info import Clocks
from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.percentiles import PercentileRule, Summary, percentile, summarize


@dataclass(frozen=True, slots=True)
class Protocol:
    """The rules a number was measured by; two numbers compare only under equal rules.

    Fields hold the effective settings. A feature the device lacks is False here, even where requested, and is named in
    `not_applicable`: nothing is claimed that did not happen.
    """

    name: str
    """Named protocol: `trt-engine`, `trtexec10`, `trtexec11`."""
    loop: Literal["closed"]
    clock: Literal["host", "device events"]
    """`device events`: events around the computation; `host`: the host's clock around the call."""
    transfers: bool
    """Inputs and outputs are copied in each query."""
    graph: bool
    """A CUDA graph is replayed."""
    spin: bool
    """The host waits for the device by spinning, not blocking."""
    streams: int
    """Concurrent queries, each on a separate stream."""
    warmup_s: float
    """Queries that started before this time are not counted."""
    duration_s: float
    min_iterations: int
    """Measured queries at least, also where they take longer than `duration_s`."""
    idle_s: float
    """Pause after each query."""
    percentile_rule: PercentileRule
    """`trtexec`: a measured value; `linear`: interpolated between two."""
    not_applicable: tuple[str, ...] = ()
    """Features that this device or engine does not have: `graph`, `spin`, `overlapped copies`."""
    min_warmup: int = 0
    """Queries left out at least, however fast they were."""


@dataclass(frozen=True, slots=True)
class BenchRecord(RichDisplay):
    """One measurement: every sample, the rules, the machine.

    `compute_ms` holds one time per query, in the order measured: the device's own time on a GPU (events around the
    computation), the host's clock around the call on a CPU. The transfer and enqueue lists are empty where the device has
    none. No field is named `gpu` unless `device` is one.
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
    runtime_info: dict[str, str] = field(default_factory=dict)
    """The truth about what ran: providers, threads, precision."""
    stable: bool = True
    instability: tuple[str, ...] = ()
    """Why the measurement is not stable, in words with figures."""
    warnings: tuple[str, ...] = ()
    complete: bool = True
    """False for the partial record of an interrupted measurement."""
    percentiles: tuple[float, ...] = (90.0, 95.0, 99.0)
    inputs: str = ""
    validation: str | None = None
    """For an engine built for another GPU: `not validated on a GPU`, or the result of its check and where."""
    engine_digest: str = ""
    """SHA-256 of the engine's files; equal digests are one engine. Empty in a record of an older version."""

    @property
    def qps(self) -> float:
        """Queries (not images) per second."""
        return self.queries / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def images_per_s(self) -> float:
        """`qps x batch`."""
        return self.qps * self.batch

    @property
    def uses_device_events(self) -> bool:
        """True when times are the device's own; False when they are the host's clock around a call."""
        return self.protocol.clock == "device events"

    def compute_summary(self) -> Summary | None:
        return summarize(self.compute_ms, self.protocol.percentile_rule)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Report of one `bench` measurement. Latency, enqueue and copy times exist only on devices that have them."""

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
    """Compute time by requested percentile: `{"90": 1.93, "99.9": 2.2}`."""
    queries: int
    warmup_queries: int
    wall_s: float
    """Start of the first measured query to the end of the last."""
    protocol: Protocol
    stable: bool
    instability: tuple[str, ...]
    complete: bool
    environment: Environment
    runtime_info: dict[str, str]
    clocks: tuple[Clocks, ...]
    """Clock rates before and after."""
    started: str
    inputs: str
    artifacts: dict[str, str]
    samples_ms: tuple[float, ...]
    """Compute times in the order measured."""
    validation: str | None = None
    """For an engine built for another GPU: `not validated on a GPU`, or the result of its check and where."""
    latency_ms: Summary | UnsetType = UNSET
    enqueue_ms: Summary | UnsetType = UNSET
    h2d_ms: Summary | UnsetType = UNSET
    d2h_ms: Summary | UnsetType = UNSET

    @classmethod
    def of(cls, record: BenchRecord, artifacts: dict[str, str] | None = None) -> BenchReport:
        """The report of a record: its facts as they are, its figures worked out."""
        rule = record.protocol.percentile_rule
        compute, ascending = record.compute_summary(), sorted(record.compute_ms)
        own: dict[str, Any] = {item.name: getattr(record, item.name, None) for item in fields(cls)}
        own |= {
            "per_image_ms": compute.mean / record.batch if compute else None,
            "compute_ms": compute,
            "percentiles_ms": {f"{p:g}": percentile(ascending, p, rule) for p in record.percentiles if ascending},
            "artifacts": artifacts or {},
            "samples_ms": record.compute_ms,
        }
        copies = ("latency_ms", "enqueue_ms", "h2d_ms", "d2h_ms")
        return cls(**own | {name: summarize(getattr(record, name), rule) or UNSET for name in copies})


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
    """Profiled inferences."""
    layers: int
    """Rows without `Total`; layers that took no time are not printed."""
    first_layer: str
    first_layer_time_ms: float
    """Sum over all iterations."""
    total_time_ms: float
    """Sum over all layers and iterations."""
    total_avg_ms: float
    """All layers in one iteration, by means."""
    total_median_ms: float
    """All layers in one iteration, by medians."""


@dataclass(frozen=True, slots=True)
class LogReport(RichDisplay):
    """Report of `bench --parse-log FILE` on a log of trtexec (8.5 to 11.1), of `bench`, or of a program that prints the
    messages of TensorRT; None for missing values."""

    log: str
    producer: Literal["trtexec", "trt-engine", "TensorRT"] | None
    """Tool that wrote the log; `TensorRT` for messages of its logger that another program printed, None for another one."""
    status: Literal["passed", "failed"]
    """Verified result, which may differ from the log's last line; a log without its end marker is `failed`, of TensorRT's
    logger one with an error."""
    end_marker: str | None
    """`PASSED`, `FAILED` or `WAIVED` of trtexec, `complete` of `bench`; None for a truncated log."""
    error_class: str | None = None
    """The known failure, by one word; None when it passed, and for a failure that is not known."""
    error_text: str | None = None
    """The line that carries the cause."""
    error_hint: str | UnsetType = UNSET
    """What to do about a known failure."""
    error_node: str | UnsetType = UNSET
    """The node of the graph by its full path; of a missing plugin whose node has no path the plugin's name."""
    error_plugin: str | UnsetType = UNSET
    requested_bytes: int | UnsetType = UNSET
    """Size of the allocation that failed."""
    unknown_options: tuple[str, ...] | UnsetType = UNSET
    workspace_mib: float | UnsetType = UNSET
    """Workspace size as trtexec parsed it, if set."""
    trt_version: str | None = None
    """Version in trtexec's banner."""
    trt_build: int | None = None
    """Build number in the banner."""
    command: str | None = None
    """The command line in the banner."""
    device: str | None = None
    """Device in a log of `bench`: `cpu`, `cuda:0`."""
    gpu: str | None = None
    compute_capability: str | None = None
    protocol: str | None = None
    batch: int | None = None
    throughput_qps: float | None = None
    """Queries (not images) per second."""
    latency_ms: LoggedTimes | None = None
    enqueue_ms: LoggedTimes | None = None
    h2d_ms: LoggedTimes | None = None
    gpu_compute_ms: LoggedTimes | None = None
    """From events on a GPU only; a CPU's compute time is in `compute_ms`."""
    d2h_ms: LoggedTimes | None = None
    compute_ms: LoggedTimes | None = None
    total_host_walltime_s: float | None = None
    """Start of the first measured query to the end of the last."""
    total_gpu_compute_time_s: float | None = None
    """Sum of the compute times of all measured queries."""
    warmup_queries: int | None = None
    warmup_ms: float | None = None
    timed_queries: int | None = None
    engine_built_s: float | None = None
    """Duration of the build; None where the engine was loaded."""
    engine_size_mib: float | None = None
    engine_deserialized_s: float | None = None
    data_transfers: bool | None = None
    spin_wait: bool | None = None
    cuda_graph: bool | None = None
    perf_warnings: tuple[str, ...] = ()
    """Any of enqueue_bound, h2d_bound, d2h_bound, gpu_compute_unstable."""
    gpu_compute_coeff_var_pct: float | None = None
    """Coefficient of variation, in per cent; only printed where the GPU compute time is unstable."""
    warning_lines: int = 0
    """Number of `[W]` lines with a time stamp."""
    error_lines: int = 0
    layer_profile: LoggedProfile | None = None
    """Totals of the last complete layer table; None without one."""
