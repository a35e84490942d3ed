"""The search for the highest rate, on servers whose latency is a formula; gates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trt_engine.environment import Environment
from trt_engine.errors import SpeedError, UsageError
from trt_engine.records.loadtest import LoadtestRecord
from trt_engine.units import parse_milliseconds
from trt_engine.verbs.loadtest.config import LatencyBound, parse_bound
from trt_engine.verbs.loadtest.run import RESOLUTION, find_rate, parse_rules, raise_for_gates

RECORD = LoadtestRecord(
    target="http://h", interface="http", model="net", version=None, server="s", loop="open", load="", rate=1.0,
    concurrency=1, processes=1, duration_s=1.0, warmup_s=0.0, timeout_s=1.0, deadline_ms=4.0, batch=1, shapes={}, inputs="",
    request_bytes=1, environment=Environment("", "", "", "", 1, (), 1), started="", wall_s=2.0,
    sent_s=(0.0, 0.1, 0.2, 0.3), latency_ms=(1.0, 2.0, 3.0, 10.0), errors={"timeout": 1},
)  # fmt: skip
BOUND = LatencyBound(99.0, 10.0)


def queue(capacity: float, *, errors: bool = False):
    """A server of that capacity: latency 1 ms, far more beyond it."""

    def run(rate: float) -> LoadtestRecord:
        slow = rate > capacity
        failed = {"status 503": 1} if slow and errors else {}
        return replace(
            RECORD, rate=rate, latency_ms=(1.0 if errors or not slow else 500.0,), sent_s=(0.0,), errors=failed, wall_s=1.0,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("first", [1.0, 100.0, 740.0, 5000.0, 1e5])
@pytest.mark.parametrize("errors", [False, True])
def test_the_search_ends_near_the_capacity_from_any_first_rate(first: float, errors: bool) -> None:
    steps: list = []
    best = find_rate(queue(750.0, errors=errors), first, BOUND, lowest=1.0, on_step=steps.append)
    assert best is not None and best.rate is not None and 750 / RESOLUTION <= best.rate <= 750
    assert max(step.rate for step in steps if step.passed) == best.rate
    assert min(step.rate for step in steps if not step.passed) <= best.rate * RESOLUTION


def test_one_disturbance_does_not_end_the_search() -> None:
    disturbed = set()

    def run(rate: float) -> LoadtestRecord:
        found = queue(750.0)(rate)
        if rate not in disturbed and rate < 750:
            disturbed.add(rate)
            return replace(found, latency_ms=(99.0,))
        return found

    best = find_rate(run, 100.0, BOUND, lowest=1.0, on_step=lambda step: None)
    assert best is not None and best.rate is not None and best.rate > 700


def test_an_interrupted_step_ends_the_search_with_what_was_found() -> None:
    def run(rate: float) -> LoadtestRecord:
        return replace(queue(750.0)(rate), complete=rate < 300)

    best = find_rate(run, 100.0, BOUND, lowest=1.0, on_step=lambda step: None)
    assert best is not None and best.rate == 200.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("p99:50ms", (99, 50)), ("P99.9:1s", (99.9, 1000)), ("median:500us", (50, 0.5)), ("max:2s", (100, 2000))],
)
def test_a_bound_is_read(text: str, expected: tuple[float, float]) -> None:
    bound = parse_bound(text)
    assert (bound.percent, bound.limit_ms) == expected and parse_bound(str(bound)) == bound


@pytest.mark.parametrize("text", ["p99", "p99:50", "99:50ms", "p101:5ms", "p99:0ms", "mean:", "p99:fast"])
def test_a_bound_without_percentile_or_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bound(text)


def test_a_deadline_is_in_ms_or_has_its_unit() -> None:
    assert (parse_milliseconds("50"), parse_milliseconds("0.2s"), parse_milliseconds(7)) == (50.0, 200.0, 7.0)


@pytest.mark.parametrize(
    ("rule", "passed", "measured"),
    [
        ("p99:10ms", True, 10.0), ("p99:9ms", False, 10.0), ("median:2500us", True, 2.0), ("mean:4ms", True, 4.0),
        ("mean:3.9ms", False, 4.0), ("max:9ms", False, 10.0), ("rate:2", True, 2.0), ("rate:2.1", False, 2.0),
        ("errors:20%", True, 20.0), ("errors:19.9%", False, 20.0), ("late:25%", True, 25.0), ("LATE:24%", False, 25.0),
    ],
)  # fmt: skip
def test_a_rule_is_compared_with_what_was_measured(rule: str, passed: bool, measured: float) -> None:
    (gate,) = (one.check(RECORD) for one in parse_rules([rule], deadline=True))
    assert gate.passed is passed
    assert gate.measured == pytest.approx(measured, rel=0.3 if rule.startswith("median") else 1e-9)
    if passed:
        raise_for_gates([gate])
    else:
        with pytest.raises(SpeedError, match="1 of 1 rules failed"):
            raise_for_gates([gate])


@pytest.mark.parametrize("rule", ["slower:3%", "p99", "errors:1", "rate:fast", "p99:1", ""])
def test_a_rule_that_cannot_be_read_names_the_forms(rule: str) -> None:
    with pytest.raises(UsageError, match="cannot read the rule") as caught:
        parse_rules([rule], deadline=True)
    assert "p99:50ms" in str(caught.value.hint)


def test_a_late_rule_needs_a_deadline() -> None:
    with pytest.raises(UsageError, match="needs a deadline"):
        parse_rules(["late:1%"], deadline=False)
    with pytest.raises(UsageError, match="expected a list"):
        parse_rules(5, deadline=False)  # type: ignore[arg-type]
