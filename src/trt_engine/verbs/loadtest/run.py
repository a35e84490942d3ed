"""`loadtest`: load on a server or an engine, with the latency that arriving requests see; its record and the warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, engine_argument, is_onnx_model
from trt_engine.environment import Environment
from trt_engine.errors import (
    CapacityError,
    DeadlineExpired,
    Interrupted,
    Overloaded,
    SetupError,
    SpeedError,
    TrtEngineError,
    UsageError,
)
from trt_engine.format import format_ms
from trt_engine.logs import running_command
from trt_engine.progress import ProgressOption, progress_counter
from trt_engine.public_function import public_function
from trt_engine.records.base import append_record
from trt_engine.records.dry_run import DryRun
from trt_engine.records.loadtest import PERCENTILE_RULE, LoadGate, LoadtestRecord, RateStep
from trt_engine.records.percentiles import summarize
from trt_engine.reporting.report import REPORT_FILES, write_reports
from trt_engine.run_folder import LOADTEST
from trt_engine.verbs.bench.run import output_folder
from trt_engine.verbs.given_model import takes_model
from trt_engine.verbs.load import merge_run_settings
from trt_engine.verbs.loadtest.config import LatencyBound, LoadtestConfig, parse_bound
from trt_engine.verbs.loadtest.generator import (
    CONNECTION,
    REFUSED,
    TIMEOUT,
    LoadRun,
    OnProgress,
    Timing,
    arrival_times,
    read_arrivals,
)
from trt_engine.verbs.loadtest.subjects import Subject, engine_subject, server_subject
from trt_engine.verbs.loadtest.target import is_url

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import LoadtestSettings

_DURATION_S, _STEP_S, _WARMUP_S = 10.0, 5.0, 1.0
_PROBE_S, _PROBE_CONCURRENCY = 1.0, 16
"""A search begins at half the rate of a short closed loop."""
_LATE_BOUNDS = 4
"""A rate of a search has failed once a request waits this many times the bound."""
_LEAST_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


@public_function
@takes_model()
def loadtest(
    target: Engine | Path | str,
    *,
    config: LoadtestConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[LoadtestSettings],
) -> LoadtestRecord:
    """Load a server (a URL), an engine, or the engine of an `.onnx` model, and return every request's latency.

    A URL is `http://HOST:PORT/v2/models/NAME`, or `https`, `grpc`, `grpcs`. Without `rate`, `replay` and `find_rate` the
    loop is closed: `concurrency` requests in flight. `values` are settings of `LoadtestConfig` and, for an engine, of
    `RuntimeConfig` and `BuildConfig`. The record goes to `out/loadtest.jsonl` and the report beside it before anything is
    raised: `SpeedError` for a rule of `fail_if`, `CapacityError` where no rate keeps the bound of `find_rate`, and where
    nothing was answered the error of that failure (`SetupError` refused, `Overloaded` 503, `DeadlineExpired` timeouts).
    `Interrupted` after Ctrl-C has the incomplete record as `partial`. With `progress=True` the rate and latency of the
    moment go to stderr, or to a function that takes a `te.Progress`. `SetupError` for gRPC without `grpcio`. `UsageError`
    for an unknown setting.
    """
    target = engine_argument(target, "target")
    config, runtime, build = merge_run_settings(values, runtime, build, config or LoadtestConfig())
    record = run(target, config, runtime, build, values)
    raise_for_result(record)
    return record


def run(
    target: Engine | Path | str,
    config: LoadtestConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    named: Container[str],
) -> LoadtestRecord:
    """Measure and write; the record of a test that failed or was interrupted too. `named` are the explicit settings."""
    rules = check_config(target, config, named)
    with output_folder(config.out), open_subject(target, config, runtime, build, named) as subject:
        test = _LoadTest(subject, config, rules)
        record = test.run() if config.find_rate is None else test.search(config.find_rate)
    for text in record.warnings:
        log.warning("%s", text)
    return record


def raise_for_result(record: LoadtestRecord) -> None:
    """The error that a record stands for: interrupted, nothing answered, no rate within the bound, a rule that failed."""
    if not record.complete:
        raise Interrupted(
            f"interrupted after {record.requests} requests",
            hint="the same command measures again",
            partial=record if record.requests else None,
        )
    if (error := nothing_answered(record)) is not None:
        raise error
    if record.bound is not None and not any(step.passed for step in record.steps):
        lowest = min(step.rate for step in record.steps)
        raise CapacityError(
            f"no rate keeps {record.bound}: {lowest:.4g} requests/s already does not", hint="a wider bound"
        )
    raise_for_gates(record.gates)


def check_config(target: object, config: LoadtestConfig, named: Container[str]) -> list[LoadRule]:
    """The rules of `--fail-if`; `UsageError` for settings that exclude each other."""
    chosen = [
        flag
        for flag, given in (
            ("--concurrency", "concurrency" in named),
            ("--rate", config.rate),
            ("--replay", config.replay),
        )
        if given
    ]
    if len(chosen) > 1:
        raise UsageError(f"`{chosen[0]}` and `{chosen[1]}` are two kinds of load", hint="leave one of them out")
    if config.find_rate is not None and config.replay is not None:
        raise UsageError("`--find-rate` chooses the rate itself", hint="leave `--replay` out")
    if config.processes > config.max_in_flight:
        raise UsageError(
            f"{config.processes} processes for {config.max_in_flight} requests in flight", hint="fewer `--processes`"
        )
    if not is_url(target):
        for flag, given in (
            ("--processes", config.processes > 1), ("--model", config.model), ("--model-version", config.model_version),
            ("--binary", config.binary is not None), ("--shared-memory", config.shared_memory),
            ("--token-file", config.token_file), ("--ca-file", config.ca_file),
        ):  # fmt: skip
            if given:
                raise UsageError(f"`{flag}` is for a server, and `{target}` is not a URL", hint=f"leave `{flag}` out")
    return parse_rules(config.fail_if, deadline=config.deadline_ms is not None)


@contextlib.contextmanager
def open_subject(
    target: Engine | Path | str,
    config: LoadtestConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    named: Container[str],
) -> Iterator[Subject]:
    """What is loaded. Raises `UsageError` for settings of engines beside a URL."""
    if not is_url(target):
        with engine_subject(target, config, runtime, build, named) as subject:
            yield subject
        return
    for given, own in ((runtime, RuntimeConfig()), (build, BuildConfig())):
        for item in dataclasses.fields(own):
            if getattr(given, item.name) != getattr(own, item.name):
                raise UsageError(
                    f"`{item.name}` is for an engine in this process, and `{target}` is a server", hint="leave it out"
                )
    with server_subject(str(target), config) as subject:
        yield subject


class _LoadTest:
    """One load test: its runs, its record and its files."""

    def __init__(self, subject: Subject, config: LoadtestConfig, rules: list[LoadRule]) -> None:
        self._subject, self._config, self._rules = subject, config, rules

    def run(self) -> LoadtestRecord:
        """One load, written."""
        config = self._config
        timing = self._timing(config.rate)
        record = self._measure(timing, config.rate, config.timeout_s)
        record = dataclasses.replace(record, gates=tuple(rule.check(record) for rule in self._rules))
        self._write(record)
        return record

    def search(self, bound: LatencyBound) -> LoadtestRecord:
        """The record of the highest rate within the bound, or of the last one tried; every step is written."""
        config, steps, tried = self._config, list[RateStep](), list[LoadtestRecord]()
        duration_s = config.duration_s or _STEP_S
        timeout_s = min(config.timeout_s, max(_LATE_BOUNDS * bound.limit_ms / 1e3, _LEAST_TIMEOUT_S))

        def try_rate(rate: float) -> LoadtestRecord:
            found = self._measure(self._timing(rate, duration_s), rate, timeout_s)
            tried.append(dataclasses.replace(found, bound=str(bound)))
            self._write(tried[-1], report=False)
            return tried[-1]

        def on_step(step: RateStep) -> None:
            steps.append(step)
            measured = "nothing answered" if step.bound_ms is None else f"p{bound.percent:g} {step.bound_ms:.4g} ms"
            errors = f", {step.errors} failed" if step.errors else ""
            log.info("%.4g requests/s: %s%s, %s", step.rate, measured, errors, "kept" if step.passed else "not kept")

        best = find_rate(
            try_rate, config.rate or self._probe(), bound, lowest=LEAST_REQUESTS / duration_s, on_step=on_step
        )
        record = dataclasses.replace(best or tried[-1], steps=tuple(steps), complete=tried[-1].complete)
        record = dataclasses.replace(record, gates=tuple(rule.check(record) for rule in self._rules))
        self._write(record)
        return record

    def _probe(self) -> float:
        """Half the rate of a short closed loop; raises what makes it fail altogether."""
        concurrency = max(_PROBE_CONCURRENCY, self._config.processes)
        timing = Timing(0.0, _PROBE_S, None)
        run = self._subject.run(timing, concurrency, self._config.timeout_s, _progress("first rate"))
        record = load_record(self._subject, self._config, timing, run, rate=None, concurrency=concurrency)
        if (error := nothing_answered(record)) is not None:
            raise error
        if run.interrupted:
            raise Interrupted("interrupted before the first rate", hint="the same command measures again")
        return record.requests_per_s / 2

    def _measure(self, timing: Timing, rate: float | None, timeout_s: float) -> LoadtestRecord:
        config = self._config
        concurrency = config.concurrency if timing.arrivals_s is None else config.connections
        step = "load" if config.find_rate is None else f"{rate:.4g} requests/s"
        run = self._subject.run(timing, concurrency, timeout_s, _progress(step))
        found = load_record(self._subject, config, timing, run, rate=rate, concurrency=concurrency)
        return dataclasses.replace(found, timeout_s=timeout_s)

    def _timing(self, rate: float | None, duration_s: float | None = None) -> Timing:
        return load_timing(self._config, rate, duration_s)

    def _write(self, record: LoadtestRecord, *, report: bool = True) -> None:
        if self._config.out is not None:
            if (running := running_command()) is not None:
                record = dataclasses.replace(record, warnings=running.with_logged(record.warnings))
            append_record(self._config.out / LOADTEST, record)
            if report:
                write_reports(self._config.out)


def _progress(step: str) -> OnProgress:
    return progress_counter(step, "s")


def load_timing(config: LoadtestConfig, rate: float | None, duration_s: float | None = None) -> Timing:
    """How long to send and when. Raises `UsageError` for a recording that cannot be read."""
    duration_s = duration_s or config.duration_s
    if config.replay is not None:
        arrivals_s, warmup_s = read_arrivals(config.replay), config.warmup_s or 0.0
        if duration_s is not None:
            arrivals_s = arrivals_s[arrivals_s < warmup_s + duration_s]
        if arrivals_s[-1] < warmup_s:
            raise UsageError(
                f"`{config.replay}` has no request between {warmup_s:g} s and its end", hint="a shorter `--warmup`"
            )
        return Timing(warmup_s, duration_s or float(arrivals_s[-1]) - warmup_s, arrivals_s)
    warmup_s = _WARMUP_S if config.warmup_s is None else config.warmup_s
    duration_s = duration_s or _DURATION_S
    if rate is None:
        return Timing(warmup_s, duration_s, None)
    times = arrival_times(config.arrivals, rate, warmup_s + duration_s, seed=config.seed, burst=config.burst)
    if not np.any(times >= warmup_s):
        raise UsageError(f"{rate:g} requests/s are none in {duration_s:g} s", hint="a longer `--duration`")
    return Timing(warmup_s, duration_s, times)


def plan(
    target: Path | str,
    config: LoadtestConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    named: Container[str],
) -> DryRun:
    """What would be sent where, with all checks before the first request; a model is not built for it."""
    check_config(target, config, named)
    timing = load_timing(config, config.rate)
    concurrency = config.connections if timing.arrivals_s is not None else config.concurrency
    load = describe_load(config, config.rate, concurrency)
    if config.find_rate is not None:
        load = f"search for the highest rate within {config.find_rate}"
    facts: dict[str, Any] = {"interface": "engine", "shapes": config.shapes}
    if not (bare := is_onnx_model(target)):
        with open_subject(target, config, runtime, build, named) as subject:
            facts = subject.facts()
    return DryRun(
        does=f"load {target}: {load} for {timing.duration_s:g} s, after {timing.warmup_s:g} s of warm-up",
        builds=(str(target),) if bare else (),
        writes=() if config.out is None else tuple(str(config.out / name) for name in (LOADTEST, *REPORT_FILES)),
        settings=facts,
    )


RESOLUTION = 1.05
"""The search ends when the lowest rate that failed is at most this many times the highest that passed."""
MAX_STEPS = 32
_KEEPS_UP = 0.9
LEAST_REQUESTS = 20
"""A rate with fewer requests in its step is too low to be measured."""


def find_rate(
    try_rate: Callable[[float], LoadtestRecord],
    first: float,
    bound: LatencyBound,
    *,
    lowest: float,
    on_step: Callable[[RateStep], None],
) -> LoadtestRecord | None:
    """The record of the highest rate that keeps the bound without an error, None where even `lowest` does not.

    A rate that fails though the server keeps up is tried once more: one disturbance does not end the search. Ends early
    at a record that is not complete.
    """
    best: LoadtestRecord | None = None
    passed, failed, rate, again = 0.0, math.inf, max(first, lowest), False
    for _ in range(MAX_STEPS):
        record = try_rate(rate)
        step = rate_step(record, rate, bound)
        on_step(step)
        if not record.complete:
            break
        again = not step.passed and not again and keeps_up(record)
        if again:
            continue
        if step.passed:
            passed, best = rate, record
        else:
            failed = rate
        if failed <= lowest or failed <= passed * RESOLUTION:
            break
        if math.isinf(failed):
            rate = passed * 2
        elif not passed:
            rate = max(failed / 2, lowest)
        else:
            rate = math.sqrt(passed * failed)
    return best


def keeps_up(record: LoadtestRecord) -> bool:
    """Whether the last answer came soon after the last request: an answer's usual time and a tenth of the test."""
    usual_ms = record.latency_percentile(10) or 0.0
    return record.wall_s <= record.duration_s / _KEEPS_UP + usual_ms / 1e3


def rate_step(record: LoadtestRecord, rate: float, bound: LatencyBound) -> RateStep:
    """Whether the record of a rate keeps the bound, and the server kept up: with a wide bound a queue may just grow."""
    measured = record.latency_percentile(bound.percent)
    passed = measured is not None and measured <= bound.limit_ms and not record.errors and keeps_up(record)
    return RateStep(rate, record.requests_per_s, measured, record.failed, passed)


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
