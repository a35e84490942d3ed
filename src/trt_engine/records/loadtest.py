"""Results of `loadtest`: every request with its time, the arrivals, the machine that sent them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.percentiles import PercentileRule, Summary, percentile, summarize

Loop = Literal["closed", "open"]
PERCENTILE_RULE: PercentileRule = "trtexec"
"""A value that was measured, no interpolation."""


@dataclass(frozen=True, slots=True)
class LoadGate:
    """One rule of `--fail-if` with what was measured."""

    rule: str
    measured: float | None
    """In ms, requests/s or per cent, as the rule is; None where nothing was answered."""
    passed: bool
    """False also where a latency was not measured."""


@dataclass(frozen=True, slots=True)
class RateStep:
    """One rate that `--find-rate` tried."""

    rate: float
    """Requests/s that were sent."""
    requests_per_s: float
    """Requests/s that were answered."""
    bound_ms: float | None
    """The bounded percentile of the latency; None where nothing was answered."""
    errors: int
    """Failed requests."""
    passed: bool
    """Within the bound, without errors, and the server kept up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadtestRecord(RichDisplay):
    """One load test: every answered request, the failed ones by kind, how they were sent.

    `latency_ms` counts from the time a request was meant to be sent: in an open loop that is the time of its arrival, also
    where the client sent it later because all connections were busy. In a closed loop it is the end of the one before.
    """

    target: str
    """URL of the model on its server, or path of the engine."""
    interface: Literal["http", "grpc", "engine"]
    model: str
    version: str | None
    """Version of the model; None where the server chooses it, and for an engine."""
    server: str
    """Name and version of the server, or the backend of an engine in this process."""
    loop: Loop
    """`closed`: a request is sent when one is answered; `open`: at times of its own."""
    load: str
    """How requests were sent, in words: `Poisson arrivals at 500 requests/s`."""
    rate: float | None
    """Requests/s that were meant to be sent; None in a closed loop and with `--replay`."""
    concurrency: int
    """Requests in flight in a closed loop; the most in an open one."""
    processes: int
    """Processes that sent requests."""
    duration_s: float
    warmup_s: float
    timeout_s: float
    """A request without an answer after this time is an error."""
    deadline_ms: float | None
    """Later answers count as `late`; None without a deadline."""
    batch: int
    shapes: dict[str, tuple[int, ...]]
    inputs: str
    request_bytes: int
    """Bytes of one request: its head and its body over HTTP, its message over gRPC, its tensors in this process."""
    environment: Environment
    started: str
    """UTC, ISO 8601."""
    wall_s: float
    """From the end of the warm-up to the last answer; in an open loop at least to the planned end."""
    sent_s: tuple[float, ...]
    """When each answered request was meant to be sent, in s from the start of the measured part, ascending."""
    latency_ms: tuple[float, ...]
    """In the order of `sent_s`."""
    lag_ms: Summary | None = None
    """Open loop: how much later than meant requests were sent."""
    errors: dict[str, int] = field(default_factory=dict)
    """Failed requests by kind: `status 503`, `timeout`, `refused`, `connection`."""
    error_messages: dict[str, str] = field(default_factory=dict)
    """The first message of each kind."""
    warmup_requests: int = 0
    """Requests answered before the measured part."""
    gates: tuple[LoadGate, ...] = ()
    bound: str | None = None
    """Bound of `--find-rate`: `p99:50ms`."""
    steps: tuple[RateStep, ...] = ()
    """Rates that `--find-rate` tried, in that order."""
    runtime_info: dict[str, str] = field(default_factory=dict)
    """What the server or the engine reports: platform, provider, precision."""
    warnings: tuple[str, ...] = ()
    complete: bool = True
    """False for the partial record of an interrupted test."""
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0, 99.9)

    @property
    def requests(self) -> int:
        """Answered requests."""
        return len(self.latency_ms)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def error_pct(self) -> float:
        """Failed requests, in per cent of all."""
        return 100 * self.failed / max(self.failed + self.requests, 1)

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second."""
        return self.requests / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def late(self) -> int | None:
        """Answers after the deadline; None without one."""
        return None if self.deadline_ms is None else sum(value > self.deadline_ms for value in self.latency_ms)

    def latency_summary(self) -> Summary | None:
        return summarize(self.latency_ms, PERCENTILE_RULE)

    def latency_percentile(self, percent: float) -> float | None:
        """Latency in ms; None where nothing was answered."""
        return percentile(sorted(self.latency_ms), percent, PERCENTILE_RULE) if self.latency_ms else None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What follows from the samples of a load test."""

    requests: int
    """Answered requests."""
    failed: int
    error_pct: float
    """Failed requests, in per cent of all."""
    requests_per_s: float
    """Answered requests per second."""
    images_per_s: float
    """`requests_per_s x batch`."""
    latency: Summary | None
    percentiles_ms: dict[str, float]
    """Latency by requested percentile: `{"99": 12.5}`."""
    late: int | None
    """Answers after the deadline; None without one."""

    @classmethod
    def of(cls, record: LoadtestRecord) -> LoadFigures:
        ascending, rate = sorted(record.latency_ms), record.requests_per_s
        percentiles = {f"{p:g}": percentile(ascending, p, PERCENTILE_RULE) for p in record.percentiles if ascending}
        return cls(
            record.requests, record.failed, record.error_pct, rate, rate * record.batch, record.latency_summary(),
            percentiles, record.late,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadtestReport(LoadtestRecord):
    """Report of one `loadtest`: the record with its samples, and the figures that follow from them."""

    figures: LoadFigures
    artifacts: dict[str, str]

    @classmethod
    def of(cls, record: LoadtestRecord, artifacts: dict[str, str] | None = None) -> LoadtestReport:
        own: dict[str, Any] = {item.name: getattr(record, item.name) for item in fields(record)}
        return cls(**own, figures=LoadFigures.of(record), artifacts=artifacts or {})
