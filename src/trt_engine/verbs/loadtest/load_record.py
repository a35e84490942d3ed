"""The record of a load test from its samples, with the warnings that follow from them."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_engine.environment import Environment
from trt_engine.errors import DeadlineExpired, Overloaded, SetupError, SpeedError, TrtEngineError, UsageError
from trt_engine.format import format_ms
from trt_engine.records.loadtest import PERCENTILE_RULE, LoadGate, LoadtestRecord
from trt_engine.records.percentiles import summarize
from trt_engine.verbs.loadtest.config import LoadtestConfig, parse_bound
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


_HINT = "`p99:50ms`, `median:5ms`, `mean:5ms`, `max:1s`, `rate:500`, `errors:1%` or `late:1%`"
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SHARE = re.compile(rf"(errors|late):({_NUMBER})%", re.ASCII)
_RATE = re.compile(rf"rate:({_NUMBER})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LoadRule:
    """One rule: what is measured, and the limit in ms, requests/s or per cent."""

    text: str
    metric: str
    """`rate`, `errors`, `late`, `mean`, or a percentile as `99`."""
    limit: float

    def check(self, record: LoadtestRecord) -> LoadGate:
        """The gate; where nothing was answered, a latency does not pass."""
        summary = record.latency_summary()
        if self.metric == "rate":
            return LoadGate(self.text, record.requests_per_s, record.requests_per_s >= self.limit)
        if self.metric in ("errors", "late"):
            late = 100 * (record.late or 0) / max(record.requests, 1)
            measured: float | None = record.error_pct if self.metric == "errors" else late
        elif self.metric == "mean":
            measured = None if summary is None else summary.mean
        else:
            measured = record.latency_percentile(float(self.metric))
        return LoadGate(self.text, measured, measured is not None and measured <= self.limit)


def parse_rules(texts: Sequence[str], *, deadline: bool) -> list[LoadRule]:
    """The rules; `UsageError` for what cannot be read, and for `late:` without a deadline."""
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, Sequence):
        raise UsageError(f"`fail_if` is {texts!r}, expected a list of rules", hint='`fail_if=["p99:50ms"]`')
    rules = [_parse_rule(str(text).strip().lower()) for text in texts]
    if not deadline and any(rule.metric == "late" for rule in rules):
        raise UsageError("`late:` needs a deadline", hint="`--deadline-ms 50`")
    return rules


def _parse_rule(text: str) -> LoadRule:
    if (match := _SHARE.fullmatch(text)) is not None:
        return LoadRule(text, match[1], float(match[2]))
    if (match := _RATE.fullmatch(text)) is not None:
        return LoadRule(text, "rate", float(match[1]))
    try:
        bound = parse_bound(re.sub("^mean:", "median:", text))
    except UsageError as error:
        raise UsageError(f"cannot read the rule `{text}`", hint=_HINT) from error
    metric = "mean" if text.startswith("mean:") else f"{bound.percent:g}"
    return LoadRule(text, metric, bound.limit_ms)


def raise_for_gates(gates: Sequence[LoadGate]) -> None:
    """`SpeedError` for the gates that did not pass."""
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        found = "; ".join(f"{gate.rule} (measured {_format(gate.measured)})" for gate in failed)
        raise SpeedError(f"{len(failed)} of {len(gates)} rules failed: {found}", hint="the record has every request")


def _format(value: float | None) -> str:
    return "nothing" if value is None or not math.isfinite(value) else f"{value:.4g}"
