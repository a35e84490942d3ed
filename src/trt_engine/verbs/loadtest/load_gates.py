"""The rules of `loadtest --fail-if`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trt_engine.errors import SpeedError, UsageError
from trt_engine.records.loadtest import LoadGate, LoadtestRecord
from trt_engine.verbs.loadtest.config import parse_bound

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
