"""The report of a comparison: gate results, instability, warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trt_engine.benchmark.speed_difference import MIN_RESTARTS, Difference, holm_correction
from trt_engine.benchmark.stability import advice, throttle_reasons
from trt_engine.device.info import Clocks
from trt_engine.records.bench import BenchRecord
from trt_engine.records.compare import CompareReport, CompareSide, Comparison, GateResult
from trt_engine.verbs.compare.request import CompareRequest, GateRule

_INTERLEAVE = "measure both by turns on one machine"
"""What gives an interval that includes what the machine does."""
_FLOATS = ("fp32", "fp64", "tf32", "fp16", "bf16", "unknown")
_DETECTABLE_LIMIT_PCT = 5.0
"""A comparison that would miss a difference of this size one time in five is not stable."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """One engine against the base."""

    comparison: Comparison
    differences: Sequence[Difference]
    """`compared.speed` with what the rules need."""
    messages: Sequence[str]
    """Why a metric has no interval."""
    doubt: str = ""
    """Why a difference that was found fails no rule but `maybe-slower`; empty where it can."""
    nothing_differs: bool = False
    """The difference is of the machine or of the models, and fails `maybe-slower` neither."""


@dataclass(frozen=True, slots=True)
class CompareRun:
    """Input of the report: measured interleaved now, or read from records."""

    sides: tuple[CompareSide, ...]
    """Each with its record. The first one's input and rules are the report's."""
    results: tuple[PairResult, ...]
    """One for each side but the base."""
    blocks: int
    order: str
    method: str
    warnings: tuple[str, ...]
    base: CompareSide | None = None
    """Base from an earlier measurement; None where the first side is the base."""


def require_record(side: CompareSide) -> BenchRecord:
    assert side.record is not None
    return side.record


def make_report(request: CompareRequest, run: CompareRun) -> CompareReport:
    """All that was found, judged by the rules."""
    warnings = list(run.warnings)
    base = run.base or run.sides[0]
    others = run.sides if run.base is not None else run.sides[1:]
    found = [
        dataclasses.replace(item, comparison=dataclasses.replace(item.comparison, slowdown_note=text)) if text else item
        for item, side in zip(run.results, others, strict=True)
        for text in (_slowdown_note(base, side, item.comparison),)
    ]
    for item in found:
        side = item.comparison
        warnings += [side.slowdown_note] if side.slowdown_note else []
        warnings += [f"`{side.label}`: {text}" for text in item.messages]
        warnings += [f"`{side.label}`: {item.doubt}"] if item.nothing_differs else []
        warnings += [f"`{side.label}`: {side.outputs_note}"] if side.outputs_differ and side.outputs_note else []
    against = tuple(item.comparison for item in found)
    if len(against) > 1:
        warnings.append(
            f"{len(against)} engines are compared with the first: each interval holds for itself alone, "
            "`--fail-if` corrects for their number (Holm)"
        )
    gates = tuple(evaluate_gates(request.rules, run.results))
    records = [require_record(side) for side in run.sides]
    reasons = (
        *(
            f"`{side.label}` is incomplete: its measurement was interrupted after {require_record(side).queries} queries"
            for side in run.sides
            if any(request.from_records) and not require_record(side).complete
        ),
        *find_instability(against, [state for record in records for state in record.clocks], gates),
    )
    if reasons:
        warnings.append(f"for a stable comparison: {advice(records[0])}")
    return CompareReport(
        sides=run.sides if run.base is None else (run.base, *run.sides),
        comparisons=against,
        protocol=records[0].protocol,
        environment=records[-1].environment,
        blocks=run.blocks,
        order=run.order,
        method=run.method if against else "nothing was compared",
        gates=gates,
        baseline=None if request.options.baseline is None else str(request.options.baseline),
        batch=records[0].batch,
        shapes=dict(records[0].shapes),
        stable=not reasons,
        instability=reasons,
        warnings=tuple(dict.fromkeys(warnings)),
        started=records[0].started,
        complete=any(request.from_records) or all(record.complete for record in records),
    )


def _slowdown_note(base: CompareSide, side: CompareSide, compared: Comparison) -> str:
    """The sentence for the quantised one of two engines, where it is slower than the other, in floating point."""
    median = next((item for item in compared.speed if item.metric == "median"), None)
    kinds = [_quantized_dtype(item) for item in (base, side)]
    if median is None or not median.slower_pct.excludes_zero or all(kinds) or not any(kinds):
        return ""
    pct = median.slower_pct.value
    slow, other = (side, base) if pct > 0 else (base, side)
    kind = _quantized_dtype(slow)
    if kind is None:
        return ""
    pct = pct if pct > 0 else 100 * (1 / (1 + pct / 100) - 1)
    why = slow.not_fused or (f"its graph is {kind}, and it runs in {slow.precision}" if slow.graph_dtype else "")
    which = f"{kind} (`{slow.label}`) is {pct:.0f} % slower than {other.precision} (`{other.label}`)"
    return f"{which}: {why}" if why else which


def _quantized_dtype(side: CompareSide) -> str | None:
    """The quantised dtype of a graph; None for a floating-point one."""
    kind = side.graph_dtype or side.precision
    return None if kind in _FLOATS else kind


def find_doubt(base: CompareSide, side: CompareSide, *, by_turns: bool) -> tuple[str, bool]:
    """Why a difference in speed of the two fails no rule, and whether nothing differs.

    `by_turns`: their loads alternated.
    """
    records = (require_record(base), require_record(side))
    if records[0].engine_digest and _conditions(records[0]) == _conditions(records[1]):
        return "it is one engine, byte for byte, on one machine: only the machine's load differs", True
    few = min(len(base.restart_blocks), len(side.restart_blocks)) < MIN_RESTARTS
    if by_turns and not few:
        return "", False
    unstable = [f"`{one.label}`" for one, record in zip((base, side), records, strict=True) if not record.stable]
    if unstable:
        return f"the measurement of {' and of '.join(unstable)} was not stable; {_INTERLEAVE}", False
    if few:
        return f"the two were loaded fewer than {MIN_RESTARTS} times, at different times; {_INTERLEAVE}", False
    return "", False


def _conditions(record: BenchRecord) -> tuple[object, ...]:
    """Engine and machine: what is equal in an A/A test."""
    info = {name: value for name, value in record.runtime_info.items() if name != "measured"}
    return record.engine_digest, info, dataclasses.replace(record.environment, memory_mib=0)


def evaluate_gates(rules: Sequence[GateRule], results: Sequence[PairResult]) -> Iterator[GateResult]:
    """Each rule over all engines against the base; several engines are several chances of a false alarm (Holm)."""
    for rule in rules:
        if rule.metric == "error":
            yield _evaluate_output_gate(rule, [item.comparison for item in results])
            continue
        items = [next((one for one in item.differences if one.metric == rule.metric), None) for item in results]
        p_values = [1.0 if item is None else item.p_value(rule.limit) for item in items]
        sure = holm_correction(p_values)
        found: list[tuple[bool | None, str]] = []  # passed, and the text; None: not judged
        for result, item, slower in zip(results, items, sure, strict=True):
            label = result.comparison.label
            if item is None:
                reason = f"`{label}` cannot be judged without an interval of {rule.metric}"
                found.append((False if rule.point_estimate else None, reason))
                continue
            span = item.interval()
            fails = span.high > rule.limit if rule.point_estimate else slower
            change = f"{abs(span.value):.1f} % {'slower' if span.value >= 0 else 'faster'}"
            text = f"`{label}` is {change} by {rule.metric} ({span.low:+.1f} to {span.high:+.1f} %)"
            if fails:
                text += f", {rule.limit:g} % {'cannot be excluded' if rule.point_estimate else 'is allowed'}"
            if fails and result.doubt and (result.nothing_differs or not rule.point_estimate):
                found.append((None, f"{text}, which decides nothing: {result.doubt}"))
            else:
                found.append((not fails, text))
        gate = _gate_result(rule, found)
        yield dataclasses.replace(gate, evaluated=gate.evaluated and None not in items)


def _gate_result(rule: GateRule, found: Sequence[tuple[bool | None, str]]) -> GateResult:
    """One gate; the text names the failed engines, else those that were not judged, else all."""
    states = [passed for passed, _ in found]
    worst = False if False in states else None if None in states else True
    text = "; ".join(text for passed, text in found if passed is worst)
    return GateResult(rule.text, worst is False, text, rule.metric, rule.limit, evaluated=None not in states)


def _evaluate_output_gate(rule: GateRule, against: Sequence[Comparison]) -> GateResult:
    found, judged = [], True
    for side in against:
        worst = max(side.outputs, key=lambda error: error.max_rel, default=None)
        if worst is None or side.outputs_differ:
            judged = False
            found.append((False, f"the outputs of `{side.label}` cannot be judged: {side.outputs_note}"))
            continue
        name = side.output_names[side.outputs.index(worst)]
        text = f"the outputs of `{side.label}`: {name}: {worst.summary}, {rule.limit:g} is allowed"
        found.append((worst.max_rel <= rule.limit, text))
    return dataclasses.replace(_gate_result(rule, found), evaluated=judged)


def find_instability(
    against: Sequence[Comparison], states: Sequence[Clocks], gates: Sequence[GateResult]
) -> tuple[str, ...]:
    """Why the comparison is not stable, in words."""
    reasons = []
    for side in against:
        median = next((item for item in side.speed if item.metric == "median"), None)
        if median is None:
            reasons.append(f"no interval for `{side.label}`")
        elif median.min_detectable_pct is not None and median.min_detectable_pct > _DETECTABLE_LIMIT_PCT:
            reasons.append(
                f"a difference of `{side.label}` below {median.min_detectable_pct:.1f} % would likely be missed, "
                f"the limit is {_DETECTABLE_LIMIT_PCT:g} %"
            )
    reasons += [f"the rule `{item.rule}` was not judged" for item in gates if not item.evaluated and not item.failed]
    if held := throttle_reasons(reason for state in states for reason in state.throttled):
        reasons.append(f"the GPU clocks were held down: {', '.join(held)}")
    return tuple(reasons)
