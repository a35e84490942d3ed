"""The report of a comparison: how each rule went, what makes it unstable, what has to be said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trt_engine.api.comparing.asked import Asked, Rule
from trt_engine.benchmark.paired import Difference, holm
from trt_engine.benchmark.stability import held_down
from trt_engine.comparisons import Compared, CompareReport, CompareSide, Gate
from trt_engine.device.info import Clocks
from trt_engine.records import BenchRecord

__all__ = ["Found", "Measured", "record_of", "report_of"]

_FLOATS = ("fp32", "fp64", "tf32", "fp16", "bf16", "unknown")
_DETECTABLE_LIMIT_PCT = 5.0
"""A comparison that would miss a difference of this size one time in five is no stable one."""


@dataclass(frozen=True, slots=True)
class Found:
    """One engine against the base."""

    compared: Compared
    differences: Sequence[Difference]
    """What `compared.speed` tells, with all that a rule asks of it."""
    said: Sequence[str]
    """Why a metric has no interval."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What there is to report: measured in turns now, or read from records."""

    sides: tuple[CompareSide, ...]
    """Each with its record. The first one's input and rules are the report's."""
    found: tuple[Found, ...]
    """One for each side but the base."""
    blocks: int
    order: str
    method: str
    warnings: tuple[str, ...]
    base: CompareSide | None = None
    """Of another time than the sides; None where the first of them is the base."""


def record_of(side: CompareSide) -> BenchRecord:
    assert side.record is not None
    return side.record


def report_of(asked: Asked, measured: Measured) -> CompareReport:
    """All that was found, judged by the rules."""
    told = list(measured.warnings)
    base = measured.base or measured.sides[0]
    others = measured.sides if measured.base is not None else measured.sides[1:]
    found = [
        dataclasses.replace(item, compared=dataclasses.replace(item.compared, quantised_slower=text)) if text else item
        for item, side in zip(measured.found, others, strict=True)
        for text in (_quantised_slower(base, side, item.compared),)
    ]
    for item in found:
        side = item.compared
        told += [side.quantised_slower] if side.quantised_slower else []
        told += [f"`{side.label}`: {text}" for text in item.said]
        told += [f"`{side.label}`: {side.outputs_note}"] if side.outputs_differ and side.outputs_note else []
    against = tuple(item.compared for item in found)
    if len(against) > 1:
        told.append(
            f"{len(against)} engines are compared with the first: each interval holds for itself alone, "
            "`--fail-if` corrects for their number (Holm)"
        )
    gates = tuple(_judged(asked.rules, measured.found))
    records = [record_of(side) for side in measured.sides]
    reasons = _instability(against, [state for record in records for state in record.clocks], gates)
    return CompareReport(
        sides=measured.sides if measured.base is None else (measured.base, *measured.sides),
        against=against,
        protocol=records[0].protocol,
        environment=records[-1].environment,
        blocks=measured.blocks,
        order=measured.order,
        method=measured.method if against else "nothing was compared",
        gates=gates,
        baseline=None if asked.baseline is None else str(asked.baseline),
        batch=records[0].batch,
        shapes=dict(records[0].shapes),
        stable=not reasons,
        instability=reasons,
        warnings=tuple(dict.fromkeys(told)),
        started=records[0].started,
        complete=all(record.complete for record in records),
    )


def _quantised_slower(base: CompareSide, side: CompareSide, compared: Compared) -> str:
    """The sentence for the quantised one of two engines, where it is slower than the other, in floating point."""
    median = next((item for item in compared.speed if item.metric == "median"), None)
    kinds = [_quantised(item) for item in (base, side)]
    if median is None or not median.slower_pct.excludes_zero or all(kinds) or not any(kinds):
        return ""
    pct = median.slower_pct.value
    slow, other = (side, base) if pct > 0 else (base, side)
    kind = _quantised(slow)
    if kind is None:
        return ""
    pct = pct if pct > 0 else 100 * (1 / (1 + pct / 100) - 1)
    why = slow.not_fused or (f"its graph is {kind}, and it runs in {slow.precision}" if slow.written else "")
    which = f"{kind} (`{slow.label}`) is {pct:.0f} % slower than {other.precision} (`{other.label}`)"
    return f"{which}: {why}" if why else which


def _quantised(side: CompareSide) -> str | None:
    """The quantised type a graph is written in; None for a floating-point one."""
    kind = side.written or side.precision
    return None if kind in _FLOATS else kind


def _judged(rules: Sequence[Rule], found: Sequence[Found]) -> Iterator[Gate]:
    """Each rule over all engines against the base; several engines are several chances of a false alarm (Holm)."""
    for rule in rules:
        if rule.metric == "error":
            yield _judged_by_outputs(rule, [item.compared for item in found])
            continue
        items = [next((one for one in item.differences if one.metric == rule.metric), None) for item in found]
        p_values = [1.0 if item is None else item.p_value(rule.limit) for item in items]
        sure = holm(p_values)
        texts, failed = [], False
        for label, item, slower in zip((item.compared.label for item in found), items, sure, strict=True):
            if item is None:
                failed |= rule.maybe
                texts.append(f"`{label}` cannot be judged: there is no interval of {rule.metric}")
                continue
            span = item.interval()
            fails = span.high > rule.limit if rule.maybe else slower
            failed |= fails
            text = f"`{label}` is {_slower(span.value)} by {rule.metric} ({span.low:+.1f} to {span.high:+.1f} %)"
            if fails:
                text += f", {rule.limit:g} % {'cannot be excluded' if rule.maybe else 'is allowed'}"
            texts.append(text)
        yield Gate(rule.text, failed, "; ".join(texts), rule.metric, rule.limit, judged=None not in items)


def _slower(pct: float) -> str:
    return f"{abs(pct):.1f} % {'slower' if pct >= 0 else 'faster'}"


def _judged_by_outputs(rule: Rule, against: Sequence[Compared]) -> Gate:
    texts, failed, judged = [], False, True
    for side in against:
        worst = max(side.outputs, key=lambda error: error.max_rel, default=None)
        if worst is None or side.outputs_differ:
            failed, judged = True, False
            texts.append(f"the outputs of `{side.label}` cannot be judged: {side.outputs_note}")
            continue
        failed |= not worst.max_rel <= rule.limit
        name = side.output_names[side.outputs.index(worst)]
        texts.append(f"the outputs of `{side.label}`: {name}: {worst.summary}, {rule.limit:g} is allowed")
    return Gate(rule.text, failed, "; ".join(texts), rule.metric, rule.limit, judged=judged)


def _instability(against: Sequence[Compared], states: Sequence[Clocks], gates: Sequence[Gate]) -> tuple[str, ...]:
    reasons = []
    for side in against:
        median = next((item for item in side.speed if item.metric == "median"), None)
        if median is None:
            reasons.append(f"there is no interval for `{side.label}`")
        elif median.detectable_pct is not None and median.detectable_pct > _DETECTABLE_LIMIT_PCT:
            reasons.append(
                f"a difference of `{side.label}` below {median.detectable_pct:.1f} % would likely be missed, "
                f"the limit is {_DETECTABLE_LIMIT_PCT:g} %"
            )
    reasons += [f"the rule `{item.rule}` was not judged" for item in gates if not item.judged and not item.failed]
    if held := held_down(reason for state in states for reason in state.throttled):
        reasons.append(f"the GPU clocks were held down: {', '.join(held)}")
    return tuple(reasons)
