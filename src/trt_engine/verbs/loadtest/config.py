"""Settings of `loadtest`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from trt_engine.config.parse import parse_percentiles, parse_shapes
from trt_engine.config.settings import Config, inputs_option, opt
from trt_engine.errors import UsageError
from trt_engine.tensors import Shape
from trt_engine.units import parse_duration, parse_milliseconds

Arrivals = Literal["poisson", "constant", "bursts"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """A percentile of the latency and its limit in ms: `p99:50ms`."""

    percent: float
    limit_ms: float

    def __str__(self) -> str:
        return f"p{self.percent:g}:{self.limit_ms:g}ms"


def parse_bound(text: str | LatencyBound) -> LatencyBound:
    """`p99:50ms`, `median:5ms` or `max:1s`; `UsageError` for anything else."""
    if isinstance(text, LatencyBound):
        return text
    name, _, limit = str(text).strip().lower().partition(":")
    percent = {"median": 50.0, "max": 100.0}.get(name)
    if percent is None and re.fullmatch(r"p\d{1,2}(\.\d+)?|p100", name):
        percent = float(name[1:])
    if percent is None or not re.search(r"[a-z]$", limit) or parse_duration(limit) <= 0:
        raise UsageError(f"cannot read the bound `{text}`", hint="write it as `p99:50ms`, `median:5ms` or `max:1s`")
    return LatencyBound(percent, parse_duration(limit) * 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadtestConfig(Config):
    """Settings of a load test: where to, how requests arrive, what counts as failed, what to write."""

    GROUP: ClassVar[str] = "Measure"

    model: str | None = opt(None, "the model of the server [default: its only one]", metavar="NAME", group="Input")
    model_version: str | None = opt(
        None, "the model's version [default: the server chooses]", metavar="VERSION", group="Input"
    )
    batch: int | None = opt(None, "rows in one request [default: 1, or the profile's optimum]", ge=1, group="Input")
    shapes: dict[str, Shape] = opt(
        {}, "shapes of the inputs, as images:8x3x640x640", parse=parse_shapes, metavar="SPEC", group="Input"
    )
    inputs: Path | None = inputs_option()
    seed: int = opt(0, "seed of the random inputs and arrivals", ge=0, group="Input")
    binary: bool | None = opt(
        None, "send tensors as bytes after the JSON [default: where the server can]", flags="--binary/--no-binary",
        group="Input",
    )  # fmt: skip
    shared_memory: bool = opt(
        False, "put the inputs into system shared memory, registered at a server on this host (HTTP)", group="Input"
    )
    token_file: Path | None = opt(
        None, "file with the bearer token that the server requires", parse=Path, metavar="FILE", group="Input"
    )
    ca_file: Path | None = opt(
        None, "certificates to trust for https and grpcs [default: the system's]", parse=Path, metavar="FILE",
        group="Input",
    )  # fmt: skip
    concurrency: int = opt(1, "closed loop: N requests in flight, each sent when one is answered", ge=1)
    rate: float | None = opt(None, "open loop: send X requests/s, however long answers take", gt=0)
    arrivals: Arrivals = opt("poisson", "when requests of an open loop are sent", choices=ARRIVALS)
    burst: int = opt(16, "requests in one burst of `--arrivals bursts`", ge=1)
    replay: Path | None = opt(
        None, "open loop: send at the times in this file (seconds, one a line; or a loadtest.jsonl)", parse=Path,
        metavar="FILE",
    )  # fmt: skip
    find_rate: LatencyBound | None = opt(
        None, "search for the highest rate within a latency bound, as p99:50ms", parse=parse_bound, metavar="BOUND",
        accepts="str | LatencyBound",
    )  # fmt: skip
    duration_s: float | None = opt(
        None, "send for this long [default: 10s; 5s at each rate of a search; a recording to its end]",
        parse=parse_duration, metavar="TIME", gt=0,
    )  # fmt: skip
    warmup_s: float | None = opt(
        None, "send this long before measuring [default: 1s; 0s before a recording]", flags="--warmup",
        parse=parse_duration, metavar="TIME", ge=0,
    )  # fmt: skip
    connections: int = opt(256, "open loop: at most N requests in flight; others wait in the client", ge=1)
    processes: int = opt(1, "send from N processes, where one cannot send enough", ge=1)
    timeout_s: float = opt(
        30.0, "give a request up after this long; it counts as an error", parse=parse_duration, metavar="TIME", gt=0
    )
    deadline_ms: float | None = opt(
        None, "deadline in ms: sent with each request, later answers are counted", flags="--deadline-ms",
        parse=parse_milliseconds, metavar="MS", gt=0,
    )  # fmt: skip
    percentiles: tuple[float, ...] = opt(
        (50.0, 90.0, 95.0, 99.0, 99.9), "percentiles to print", flags="--percentile", parse=parse_percentiles,
        metavar="P,P",
    )  # fmt: skip
    fail_if: Any = opt(
        (), "p99:50ms (or median, mean, max), rate:500 (fewer answered), errors:1% or late:1% (exit code 8)",
        multiple=True, metavar="RULE", accepts="Sequence[str]",
    )  # fmt: skip
    out: Path | None = opt(
        None, "folder for loadtest.jsonl (appended) and the report", flags="-o --out", parse=Path, group="Output"
    )

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at times of their own."""
        return self.rate is not None or self.replay is not None

    @property
    def is_closed(self) -> bool:
        """Whether each request is sent when another is answered."""
        return not self.is_open and self.find_rate is None

    @property
    def max_in_flight(self) -> int:
        """Requests in flight at most, of all processes."""
        return self.concurrency if self.is_closed else self.connections
