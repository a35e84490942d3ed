"""The record of a load test from its samples, with the warnings that follow from them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np

from trt_engine.environment import Environment
from trt_engine.errors import DeadlineExpired, Overloaded, SetupError, TrtEngineError, UsageError
from trt_engine.format import format_ms
from trt_engine.records.loadtest import PERCENTILE_RULE, LoadtestRecord
from trt_engine.records.percentiles import summarize
from trt_engine.verbs.loadtest.config import LoadtestConfig
from trt_engine.verbs.loadtest.generator import LoadRun, Timing
from trt_engine.verbs.loadtest.samples import CONNECTION, REFUSED, TIMEOUT
from trt_engine.verbs.loadtest.subjects import Subject

_LAG_MS = 1.0
_LEAST_SHARE = 0.95
_STALL_MEDIANS, _STALL_SHARE = 20, 0.05
_OVERLOADED = ("status 503", "status UNAVAILABLE", "status RESOURCE_EXHAUSTED", "status 429", "Overloaded")
_NEEDED_BEYOND = 1.0
"""A percentile needs a sample beyond it."""


def describe_load(config: LoadtestConfig, rate: float | None, concurrency: int) -> str:
    """How requests are sent, in words."""
    if config.replay is not None:
        return f"arrivals of {config.replay.name}"
    if rate is None:
        return f"closed loop, {concurrency} in flight"
    kinds = {"poisson": "Poisson arrivals", "constant": "constant arrivals", "bursts": f"bursts of {config.burst}"}
    return f"{kinds[config.arrivals]} at {rate:g} requests/s"


def load_record(
    subject: Subject, config: LoadtestConfig, timing: Timing, run: LoadRun, *, rate: float | None, concurrency: int
) -> LoadtestRecord:
    """The record of a run, without its warm-up."""
    kept = run.samples.since(run.window.measured)
    last = int(kept.ends.max(initial=run.window.measured))
    planned = run.window.end if not run.interrupted and timing.arrivals_s is not None else last
    made = LoadtestRecord(
        **subject.facts(),
        loop="closed" if timing.arrivals_s is None else "open",
        load=describe_load(config, rate, concurrency),
        rate=rate,
        concurrency=concurrency,
        processes=config.processes,
        duration_s=timing.duration_s,
        warmup_s=timing.warmup_s,
        timeout_s=config.timeout_s,
        deadline_ms=config.deadline_ms,
        environment=Environment.detect(subject.gpu),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        wall_s=(max(last, planned) - run.window.measured) / 1e9,
        sent_s=tuple(np.round((kept.intended - run.window.measured) / 1e9, 6).tolist()),
        latency_ms=tuple(np.round((kept.ends - kept.intended) / 1e6, 4).tolist()),
        errors=kept.count_errors(),
        error_messages=kept.texts,
        warmup_requests=len(run.samples.ends) - len(kept.ends),
        lag_ms=None if timing.arrivals_s is None else summarize(lag_ms(kept), PERCENTILE_RULE),
        percentiles=config.percentiles,
        complete=not run.interrupted,
    )
    return dataclasses.replace(made, warnings=(*made.warnings, *_warnings(made, kept.request_waits)))


def lag_ms(samples: Any) -> list[float]:
    """How much later than meant each request was sent."""
    found: list[float] = np.round((samples.sent - samples.intended) / 1e6, 4).tolist()
    return found


def _warnings(record: LoadtestRecord, request_waits: int) -> Iterator[str]:
    summary = record.latency_summary()
    if record.errors:
        kinds = ", ".join(
            f"{count} {kind}{_quoted(record.error_messages.get(kind))}" for kind, count in record.errors.items()
        )
        yield f"{record.failed} of {record.failed + record.requests} requests failed: {kinds}"
    if record.late:
        yield f"{record.late} of {record.requests} answers came after the deadline of {record.deadline_ms:g} ms"
    if record.rate is not None and record.complete:
        sent_per_s = (record.requests + record.failed) / record.duration_s  # random arrivals have not just the rate
        if record.requests_per_s < _LEAST_SHARE * sent_per_s:
            answered = f"{record.requests_per_s:.4g} requests/s were answered of {sent_per_s:.4g} sent"
            yield f"{answered}: the server does not keep up"
    if record.lag_ms is not None and record.lag_ms.p99 > _LAG_MS:
        why = (
            f"all {record.concurrency} connections were busy (`--connections` allows more)"
            if request_waits
            else "this client cannot send that fast (`--processes` adds some)"
        )
        yield f"1 % of the requests were sent {format_ms(record.lag_ms.p99)} late or more, which counts: {why}"
    if summary is not None and record.loop == "closed":
        stalled = summary.max > _STALL_MEDIANS * summary.median and summary.max > _STALL_SHARE * record.wall_s * 1e3
        if stalled:
            yield (
                f"an answer took {format_ms(summary.max)}, and a closed loop sends nothing meanwhile: its percentiles leave "
                f"out who would have waited (`--rate {float(f'{record.requests_per_s:.2g}'):g}` counts them)"
            )
    few = [p for p in record.percentiles if record.requests * (1 - p / 100) < _NEEDED_BEYOND and p < 100]
    if few and summary is not None:
        names = ", ".join(f"p{p:g}" for p in few)
        yield f"{record.requests} requests are too few for {names} (a longer `--duration`)"


def _quoted(text: str | None) -> str:
    return f" ({text.strip()})" if text and text.strip() else ""


def nothing_answered(record: LoadtestRecord) -> TrtEngineError | None:
    """The error of a test without one answer, by the most frequent failure; None for any other."""
    if not record.requests and not record.errors and record.loop == "closed" and record.complete:
        return DeadlineExpired(
            f"no request was sent in {record.duration_s:g} s: those of the warm-up took until its end",
            hint="a longer `--duration`, or fewer requests at once",
        )
    if record.requests or not record.errors:
        return None
    kind = next(iter(record.errors))
    text = record.error_messages.get(kind, "").strip()
    message = f"none of {record.failed} requests was answered: {kind}{f', {text}' if text else ''}"
    if kind in (REFUSED, CONNECTION):
        return SetupError(message, hint="is the server started, at this port?")
    if kind in (TIMEOUT, "status DEADLINE_EXCEEDED", "status 504"):
        return DeadlineExpired(message, hint="a longer `--timeout`, or fewer requests at once")
    if kind in _OVERLOADED:
        return Overloaded(message, hint="a lower `--rate` or `--concurrency`")
    if kind.startswith("status 4") or kind in ("status INVALID_ARGUMENT", "status NOT_FOUND"):
        return UsageError(message, hint="`--shapes` and `--inputs` set what is sent")
    return SetupError(message, hint="the server's log has more")
