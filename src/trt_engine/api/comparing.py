"""`compare`: engines measured in turns, their outputs on the same input, and what may be said of the difference."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import psutil

from trt_engine.api.loading import admit, load
from trt_engine.api.measuring import sealed, settled
from trt_engine.backend import Backend
from trt_engine.benchmark.loop import Progress, Turn, about_the_machine, batch_of, feeds_for, in_force, ready
from trt_engine.benchmark.paired import (
    LEAST_LOADS,
    METHOD,
    UNPAIRED,
    Difference,
    Load,
    Opened,
    Schedule,
    TakeTurn,
    blocks_of,
    holm,
    interleave,
    loaded,
    paired,
    unpaired,
)
from trt_engine.benchmark.stability import held_down
from trt_engine.comparisons import Compared, ComparePlan, CompareReport, CompareSide, EngineDiff, Gate
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig, first_fitting
from trt_engine.device import parse_device
from trt_engine.device.host import numpy_dtype
from trt_engine.device.info import Clocks, clocks
from trt_engine.engine import Engine, is_bare_model
from trt_engine.environment import Environment
from trt_engine.errors import (
    AccuracyError,
    Interrupted,
    ProfileError,
    SpeedError,
    TrtEngineError,
    UnstableError,
    UsageError,
)
from trt_engine.evaluation.parity import are_sorted, compare_rows, is_sorting
from trt_engine.evaluation.parity import compare as error_of
from trt_engine.files import ensure_folder, explain, json_bytes, path_of, write_whole
from trt_engine.graph import walk
from trt_engine.graph.load import open_model, read_proto
from trt_engine.profiling.diff import diff
from trt_engine.protocols import Session
from trt_engine.records import BenchRecord, Protocol, document
from trt_engine.runfiles import COMPARE
from trt_engine.tensors import Tensors, dtype, format_shape

__all__ = ["DURATION_S", "LOADS", "Rule", "compare", "gate", "outlook", "rules_of", "run"]

DURATION_S = 20.0
"""For everything, when nobody says how long."""
LOADS = 12
"""How often everything is loaded anew, when nobody says how often."""

_BASELINE = "trt-engine/baseline"
_DETECTABLE_LIMIT_PCT = 5.0
"""A comparison that would miss a difference of this size one time in five is no stable one."""

log = logging.getLogger(__name__)


def compare(*engines: Engine | Path | str, **values: Any) -> CompareReport:
    """How much slower (or faster) engines are than the first one, with an interval, and how far their outputs lie apart.

    Engines (or bare models, which are built into the store first) are measured in turns, on the same input. `values` are
    `fail_if` (rules as `"slower:3%"`, `"p99-slower:5%"`, `"maybe-slower:3%"`, `"error:1e-3"`), `baseline` (a file that
    `save_baseline` wrote, in place of the first engine), `save_baseline`, `loads` (how often everything is loaded anew),
    `out`, `yes`, `on_progress`, and the settings of `BenchConfig`, `RuntimeConfig` and (for models) `BuildConfig`;
    `duration_s` is for everything together. Paths of two `records.jsonl` compare what was measured before, which is no pair.

    Raises `AccuracyError` or `SpeedError` when a rule fails and `UnstableError` with `strict=True`, after everything is
    written; `UsageError` for what was or would be measured by different rules.
    """
    report = run(*engines, **values)
    config = values.get("config") or BenchConfig()
    gate(report, strict=bool(values.get("strict", config.strict)))
    return report


def run(
    *engines: Engine | Path | str,
    fail_if: Sequence[str] = (),
    baseline: Path | str | None = None,
    save_baseline: Path | str | None = None,
    loads: int = LOADS,
    out: Path | str | None = None,
    yes: bool = False,
    command: str = "",
    config: BenchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    on_progress: Progress | None = None,
    **values: Any,
) -> CompareReport:
    """The same without the gates."""
    config, runtime, build, named = settled(config, runtime, build, values)
    engines = tuple(item if isinstance(item, Engine) else path_of(item, "an engine") for item in engines)
    baseline, save_baseline, out = (
        None if given is None else path_of(given, f"`{name}`")
        for name, given in (("baseline", baseline), ("save_baseline", save_baseline), ("out", out))
    )
    rules = rules_of(fail_if)
    _check(engines, rules, baseline, save_baseline, loads)
    targets = _targets(out, save_baseline, yes)
    for name, target in targets.items():  # tried before minutes are spent
        ensure_folder(target.parent, by="--save-baseline" if name == "baseline" else "-o")
    recorded = [_is_record(item) for item in engines]
    if any(recorded):
        report, first = _of_records(engines, recorded, rules, baseline), None
    else:
        opened = [sealed(item, config, runtime, build, named) for item in engines]
        for engine in opened:
            engine.verify()
        labels = _labels([str(item.path if isinstance(item, Engine) else item) for item in engines])
        base = None if baseline is None else _read_baseline(Path(baseline))
        report = _measured(opened, labels, config, runtime, rules, loads, base, baseline, on_progress)
        first = report.sides[0 if base is None else 1]
    if (place := targets.get("baseline")) is not None and first is not None and report.complete:
        kept = _Kept(_BASELINE, first)
        write_whole(place, json_bytes(kept) + b"\n")
    if (place := targets.get("compare")) is not None:
        written = msgspec.json.format(json_bytes(document("compare", report, command=command)), indent=2)
        write_whole(place, written + b"\n")
    for text in report.warnings:
        log.warning("%s", text)
    if not report.complete:
        raise Interrupted(
            f"interrupted after {report.blocks} turns of each engine",
            hint="the same command compares again",
            partial=report,
        )
    return report


def outlook(
    *engines: Engine | Path | str,
    fail_if: Sequence[str] = (),
    baseline: Path | str | None = None,
    save_baseline: Path | str | None = None,
    loads: int = LOADS,
    out: Path | str | None = None,
    yes: bool = False,
    config: BenchConfig | None = None,
) -> ComparePlan:
    """What `run` would do with the same arguments, refused where it would refuse at once. Writes and measures nothing."""
    rules = rules_of(fail_if)
    _check(engines, rules, baseline, save_baseline, loads)
    targets = _targets(out, save_baseline, yes)
    base = None if baseline is None else _read_baseline(Path(baseline))
    recorded = [_is_record(item) for item in engines]
    if any(recorded):
        _of_records(engines, recorded, rules, baseline)
    builds = [] if any(recorded) else [str(item) for item in engines if is_bare_model(item)]
    for item in () if any(recorded) else engines:
        if is_bare_model(item):
            open_model(Path(item))  # type: ignore[arg-type]
        elif not isinstance(item, Engine):
            Engine.open(item)
    asked_s = config.duration_s if config is not None else None
    return ComparePlan(
        engines=tuple(str(item.path if isinstance(item, Engine) else item) for item in engines),
        builds=tuple(builds),
        baseline=None if base is None else str(baseline),
        rules=tuple(rule.text for rule in rules),
        duration_s=DURATION_S if asked_s is None else asked_s,
        loads=loads,
        writes=tuple(map(str, targets.values())),
    )


def gate(report: CompareReport, *, strict: bool = False) -> None:
    """Raise what a failed rule asks for: `AccuracyError` before `SpeedError`; `UnstableError` with `strict`."""
    failed = [item for item in report.gates if item.failed]
    outputs = [item.text for item in failed if item.rule.startswith("error")]
    if outputs:
        raise AccuracyError(
            "; ".join(outputs), hint="`trt-engine evaluate` says what it costs in the task's own figure"
        )
    if failed:
        raise SpeedError(
            "; ".join(item.text for item in failed),
            hint="`trt-engine profile` of both engines says where the time goes",
        )
    if strict and not report.stable:
        raise UnstableError(
            f"the comparison is not stable: {'; '.join(report.instability)}",
            hint="compare longer (`--duration 60s`) on a quiet machine",
        )


# ------------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True, slots=True)
class Rule:
    """One `--fail-if`, read."""

    text: str
    metric: Literal["median", "mean", "p99", "error"]
    limit: float
    """Per cent; of `error` a difference over the largest value."""
    maybe: bool = False
    """Fails when it cannot be excluded, not only when it was found."""


_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_RULE = re.compile(
    rf"(?P<maybe>maybe-)?(?:(?P<metric>median|mean|p99)-)?slower:(?P<pct>{_NUMBER})%|error:(?P<error>{_NUMBER})",
    re.IGNORECASE | re.ASCII,
)


def rules_of(texts: Sequence[str]) -> list[Rule]:
    """The rules of `--fail-if`; `UsageError` for what cannot be read."""
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, Sequence):
        raise UsageError(f"`fail_if` is {texts!r}, expected a list of rules", hint='`fail_if=["slower:3%"]`')
    found = []
    for text in texts:
        match = _RULE.fullmatch(str(text).strip())
        if match is None or not math.isfinite(float(match["error"] or match["pct"])):
            raise UsageError(
                f"cannot read the rule `{text}`",
                hint="`slower:3%`, `p99-slower:5%`, `mean-slower:3%`, `maybe-slower:3%` or `error:1e-3`",
            )
        if match["error"] is not None:
            found.append(Rule(text, "error", float(match["error"])))
        else:
            metric: Any = (match["metric"] or "median").lower()
            found.append(Rule(text, metric, float(match["pct"]), match["maybe"] is not None))
    return found


def _judge(rules: Sequence[Rule], against: Sequence[Compared], found: Sequence[Sequence[Difference]]) -> Iterator[Gate]:
    """Each rule over all engines against the first; several engines are several chances of a false alarm (Holm)."""
    for rule in rules:
        if rule.metric == "error":
            yield _judge_outputs(rule, against)
            continue
        items = [next((item for item in differences if item.metric == rule.metric), None) for differences in found]
        p_values = [1.0 if item is None else item.p_value(rule.limit) for item in items]
        sure = holm(p_values)
        texts, failed = [], False
        for side, item, slower in zip(against, items, sure, strict=True):
            if item is None:
                failed |= rule.maybe
                texts.append(f"`{side.label}` cannot be judged: there is no interval of {rule.metric}")
                continue
            span = item.interval()
            fails = span.high > rule.limit if rule.maybe else slower
            failed |= fails
            text = f"`{side.label}` is {_slower(span.value)} by {rule.metric} ({span.low:+.1f} to {span.high:+.1f} %)"
            if fails:
                text += f", {rule.limit:g} % {'cannot be excluded' if rule.maybe else 'is allowed'}"
            texts.append(text)
        yield Gate(rule.text, failed, "; ".join(texts), rule.metric, rule.limit, judged=None not in items)


def _slower(pct: float) -> str:
    return f"{abs(pct):.1f} % {'slower' if pct >= 0 else 'faster'}"


def _judge_outputs(rule: Rule, against: Sequence[Compared]) -> Gate:
    texts, failed, judged = [], False, True
    for side in against:
        worst = max((error.max_rel for error in side.outputs), default=None)
        if worst is None or side.outputs_differ:
            failed, judged = True, False
            texts.append(f"the outputs of `{side.label}` cannot be judged: {side.outputs_note}")
            continue
        failed |= worst > rule.limit
        texts.append(
            f"the outputs of `{side.label}` differ by {worst:.2g} of the largest value, {rule.limit:g} is allowed"
        )
    return Gate(rule.text, failed, "; ".join(texts), rule.metric, rule.limit, judged=judged)


# ------------------------------------------------------------------------------------------------ what is asked


def _check(engines: Sequence[Any], rules: Sequence[Rule], baseline: Any, save_baseline: Any, loads: int) -> None:
    alone = baseline is not None or save_baseline is not None
    if not engines or (len(engines) < 2 and not alone):
        raise UsageError(
            f"{len(engines)} engine{'' if len(engines) == 1 else 's'} to compare, expected two or more",
            hint="`trt-engine compare A B`, or `trt-engine compare A --baseline FILE`",
        )
    if len(engines) < 2 and baseline is None and rules:
        raise UsageError("one engine alone passes or fails no rule", hint="name another, or `--baseline FILE`")
    if baseline is not None and any(rule.metric == "error" for rule in rules):
        raise UsageError("a baseline file holds no outputs to compare", hint="name the engine itself for `error:`")
    if save_baseline is not None and any(map(_is_record, engines)):
        raise UsageError(
            "records make no baseline: they were measured alone", hint="name the engine to measure it in turns"
        )
    if not isinstance(loads, int):
        raise UsageError(f"`loads` is {loads!r}, expected a whole number", hint=f"`loads={LOADS}`")
    if loads < LEAST_LOADS:
        raise UsageError(
            f"`loads` is {loads}: fewer than {LEAST_LOADS} tell nothing of how much loads differ",
            hint=f"`--loads {LOADS}`",
        )


def _targets(out: Path | str | None, save_baseline: Path | str | None, yes: bool) -> dict[str, Path]:
    """Where to write; `UsageError` for what may not be written over."""
    targets = {}
    if out is not None:
        targets["compare"] = Path(out) / COMPARE
    if save_baseline is not None:
        targets["baseline"] = Path(save_baseline)
    for place in targets.values():
        try:
            folder, there = place.is_dir(), place.exists()
        except OSError as error:
            raise explain(error, place) from error
        if folder:
            raise UsageError(f"`{place}` is a folder, expected a file or a new name", hint="add a file name")
        if there and not yes:
            raise UsageError(f"`{place}` is there already", hint="`--yes` overwrites it")
    return targets


def _labels(names: Sequence[str]) -> list[str]:
    """As typed; what is named twice is numbered."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found


# ------------------------------------------------------------------------------------------------ engines


@dataclass(slots=True)
class _Contestant:
    """One engine, what it runs on, and what the first look at it told."""

    label: str
    engine: Engine
    card: Backend
    config: RuntimeConfig
    feeds: Tensors
    device: str = ""
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    memory_bytes: int | None = None
    outputs: dict[str, Any] | None = None
    outputs_note: str = ""

    @property
    def apart(self) -> bool:
        """It measures in a process of its own."""
        return self.card.has("measure")

    def load(self) -> Session:
        session: Session = self.card.half("runtime")().load(self.engine, self.config)
        return session


def _measured(
    engines: Sequence[Engine],
    labels: Sequence[str],
    config: BenchConfig,
    runtime: RuntimeConfig,
    rules: Sequence[Rule],
    loads: int,
    base: CompareSide | None,
    baseline: Path | str | None,
    on_progress: Progress | None,
) -> CompareReport:
    """All engines in turns, and what follows."""
    duration_s = DURATION_S if config.duration_s is None else config.duration_s
    config = dataclasses.replace(config, streams=1, warmup_s=0.0, duration_s=duration_s)
    feeds, inputs = feeds_for(engines[0], config)
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    batch = batch_of(engines[0].signature, shapes)
    contestants = [
        _Contestant(label, engine, admit(engine, runtime), runtime, _fed(engine, feeds, engines[0], label))
        for label, engine in zip(labels, engines, strict=True)
    ]
    warnings: list[str] = []
    protocol = _looked_at(contestants, config, warnings)
    device = contestants[0].device
    kind, number = parse_device(device)
    gpu = number if kind == "cuda" else None
    if base is not None and base.record is not None:
        mine = _blank(contestants[0], protocol, batch, shapes, gpu)
        _refuse_different(base.label, base.record, contestants[0].label, mine)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    schedule = Schedule(
        duration_s, loads, seed=config.seed, **({"queries": config.iterations} if config.iterations else {}),
        alone=any(item.apart for item in contestants),
    )  # fmt: skip
    log.info(
        "comparing %s at batch %d on %s: %g s, loaded anew %d times, protocol %s",
        ", ".join(f"`{item.label}`" for item in contestants), batch, device, duration_s, loads, protocol.name,
    )  # fmt: skip
    ways: list[Opened] = [_way(item, config, protocol) for item in contestants]
    before, turns, complete, began = clocks(gpu), list[Load](), True, time.perf_counter()
    try:
        interleave(ways, schedule, on_progress=on_progress, kept=turns)
    except KeyboardInterrupt:
        complete = False
        if len(turns) < LEAST_LOADS:
            raise Interrupted(
                f"interrupted after {len(turns)} of {loads} loads: too few to say anything",
                hint="the same command compares again",
            ) from None
    states = (before, clocks(gpu))
    warnings += about_the_machine(*states, gpu, before.load_average)
    if (took_s := time.perf_counter() - began) > 1.2 * duration_s + 1:
        warnings.append(
            f"the fewest rounds took {took_s:.1f} s, {duration_s:g} s were asked for (`--loads` asks for fewer)"
        )
    sides = [
        _side(item, index, turns, _blank(item, protocol, batch, shapes, gpu), inputs, states, started, complete)
        for index, item in enumerate(contestants)
    ]
    if base is not None:
        found = [unpaired(_units(base), _units(side)) for side in sides]
        sides, method = [base, *sides], UNPAIRED
        warnings += _of_another_time(base)
        others: list[_Contestant] = contestants
        first: _Contestant | None = None
    else:
        found = [paired(turns, index, batch=batch) for index in range(1, len(sides))]
        method, first, others = METHOD, contestants[0], contestants[1:]
    against = [
        _compared(first, other, sides[0], side, differences)
        for other, side, (differences, _) in zip(others, sides[1:], found, strict=True)
    ]
    return _report(
        sides, against, found, rules, protocol, method,
        blocks=sum(map(len, turns)),
        order=_order(len(contestants), schedule),
        baseline=None if baseline is None else str(baseline),
        batch=batch, shapes=shapes, states=states, started=started, complete=complete, warnings=warnings,
    )  # fmt: skip


def _order(count: int, schedule: Schedule) -> str:
    if count == 1:
        return f"alone, loaded {schedule.loads} times"
    dealt = "each turn a process of its own" if schedule.alone else "random in rounds"
    return f"{dealt}, loaded anew {schedule.loads} times in rotated random order, seed {schedule.seed}"


def _fed(engine: Engine, feeds: Tensors, first: Engine, label: str) -> dict[str, Any]:
    """The first engine's feeds as this one takes them: same names and shapes, in its own types."""
    names, wanted = [spec.name for spec in engine.signature.inputs], [spec.name for spec in first.signature.inputs]
    if sorted(names) != sorted(wanted):
        raise UsageError(
            f"`{label}` has the inputs {', '.join(map(repr, names))}, `{first.path}` has {', '.join(map(repr, wanted))}",
            hint="engines of one model are compared",
        )
    made = {spec.name: _as_type(feeds[spec.name], spec.dtype) for spec in engine.signature.inputs}
    try:
        first_fitting(engine.passport.profiles, lambda profile, index: profile.check(made, index))
    except ProfileError as error:
        raise ProfileError(
            f"`{label}` does not take the input of `{first.path}`: {error.message}",
            hint=f"engines of one model are compared; build `{label}` for the same shapes, or set `--batch`",
        ) from error
    return made


def _as_type(value: Any, dtype: str) -> Any:
    return value if dtype == "string" else np.asarray(value).astype(numpy_dtype(dtype), copy=False)


def _looked_at(contestants: Sequence[_Contestant], config: BenchConfig, warnings: list[str]) -> Protocol:
    """Each engine run once: its device, memory and outputs; the protocol that is in force for all of them.

    Where some are timed by events and others by the host's clock, all are timed by the host's clock; where one cannot
    capture a graph, none does. What differs still is refused.
    """
    events = None
    by_clock = _protocols(contestants, config, warnings, events)
    here = not any(item.apart for item in contestants) and len({item.device for item in contestants}) == 1
    if here and len({protocol.clock for protocol in by_clock}) > 1:
        events = False
        by_clock = _protocols(contestants, config, warnings, events)
        warnings.append(
            "not all engines can be timed by events: all are timed by the host's clock around a synchronised run"
        )
    if here and len({protocol.graph for protocol in by_clock}) > 1:
        by_clock = _protocols(contestants, dataclasses.replace(config, graph=False), warnings, events)
        warnings.append("not all engines run as a graph here: all are measured without one")
    first = contestants[0]
    for item, protocol in zip(contestants, by_clock, strict=True):
        differing = _different_fields(by_clock[0], protocol, "protocol.")
        if item.device != first.device:
            differing.insert(0, f"device (`{first.device}` against `{item.device}`)")
        if differing:
            raise UsageError(
                f"`{first.label}` and `{item.label}` would be measured by different rules: {'; '.join(differing)}",
                hint="`--device`, `--no-graph` or `--no-transfers` for all, or measure each with `trt-engine bench`",
            )
    return by_clock[0]


def _protocols(
    contestants: Sequence[_Contestant], config: BenchConfig, warnings: list[str], events: bool | None
) -> list[Protocol]:
    found = []
    with contextlib.ExitStack() as stack:
        for item in contestants:
            found.append(_look(item, config, warnings, events, stack))
    whole = {"duration_s": config.duration_s or 0.0, "min_iterations": config.iterations or 1}
    in_turns = whole | {"warmup_s": 0.0, "min_warmup": 1}  # a process warms up as the named protocol says
    return [
        dataclasses.replace(protocol, **(whole if item.apart else in_turns))  # type: ignore[arg-type]
        for item, protocol in zip(contestants, found, strict=True)
    ]


def _look(
    item: _Contestant, config: BenchConfig, warnings: list[str], events: bool | None, stack: contextlib.ExitStack
) -> Protocol:
    """One engine run once; it stays loaded for as long as `stack`, so that its memory is its own."""
    if item.apart:
        record = _in_its_process(item, dataclasses.replace(config, duration_s=0.0, iterations=10, warmup_s=None))
        item.device, item.facts = record.device, record.facts
        _infer(item)
        return record.protocol
    before = psutil.Process().memory_info().rss
    session = item.load()
    stack.callback(session.close)
    item.facts = session.facts()
    item.device, protocol = in_force(session, config, events=events)
    said: list[str] = []
    with ready(session, item.engine, item.feeds, protocol, said) as query:
        query.turn(0.0, 1, 0)
        protocol = query.protocol
    if parse_device(item.device)[0] == "cpu":
        item.memory_bytes = max(0, psutil.Process().memory_info().rss - before)
    warnings += [f"`{item.label}`: {text}" for text in said if f"`{item.label}`: {text}" not in warnings]
    if item.outputs is None and not item.outputs_note:
        if hasattr(session, "run"):
            item.outputs = session.run(item.feeds)
        else:
            _infer(item)
    return protocol


def _infer(item: _Contestant) -> None:
    """The outputs, by whoever runs such engines here."""
    try:
        with load(item.engine, config=item.config, verify=False) as runner:
            item.outputs = runner.infer(item.feeds)
    except TrtEngineError as error:
        item.outputs_note = f"`{item.label}` could not be run for its outputs: {error.message}"


def _in_its_process(item: _Contestant, config: BenchConfig) -> BenchRecord:
    record: BenchRecord = item.card.call("measure")(item.engine, config, item.config)
    return record


def _way(item: _Contestant, config: BenchConfig, protocol: Protocol) -> Opened:
    if not item.apart:
        return functools.partial(loaded, item.load, item.engine, item.feeds, protocol, [])

    @contextlib.contextmanager
    def opened() -> Iterator[TakeTurn]:
        def turn(duration_s: float, queries: int, warmup: int) -> Turn:
            record = _in_its_process(
                item, dataclasses.replace(config, duration_s=duration_s, iterations=queries, warmup_s=None)
            )
            return Turn(record.compute_ms, record.wall_s)

        yield turn

    return opened


# ------------------------------------------------------------------------------------------------ what is told


def _blank(
    item: _Contestant, protocol: Protocol, batch: int, shapes: dict[str, tuple[int, ...]], gpu: int | None
) -> BenchRecord:
    """The record of a measurement by these rules, before it has samples."""
    return BenchRecord(
        engine=str(item.engine.path),
        backend=item.engine.passport.backend,
        device=item.device,
        batch=batch,
        shapes=shapes,
        protocol=protocol,
        environment=Environment.here(gpu),
        compute_ms=(),
        wall_s=0.0,
        started="",
        queries=0,
        warmup_queries=0,
        facts=item.facts | {"measured": "in turns"},
    )


def _side(
    item: _Contestant,
    index: int,
    loads: Sequence[Load],
    blank: BenchRecord,
    inputs: str,
    states: tuple[Clocks, Clocks],
    started: str,
    complete: bool,
) -> CompareSide:
    turns = [rounds[index] for one in loads for rounds in one]
    samples = tuple(value for turn in turns for value in turn.samples_ms)
    passport = item.engine.passport
    return CompareSide(
        label=item.label,
        engine=str(item.engine.path),
        backend=passport.backend,
        device=item.device,
        precision=item.facts.get("precision") or passport.precision.main or "unknown",
        engine_bytes=sum(part.nbytes for part in passport.payload),
        weights_bytes=_weights(item.engine),
        memory_bytes=item.memory_bytes,
        facts=item.facts,
        record=dataclasses.replace(
            blank,
            compute_ms=samples,
            wall_s=sum(turn.wall_s for turn in turns),
            started=started,
            queries=len(samples),
            clocks=states,
            inputs=inputs,
            complete=complete,
        ),
        blocks_ms=tuple(turn.samples_ms for turn in turns),
        loads=tuple(map(len, loads)),
    )


def _weights(engine: Engine) -> int | None:
    """Bytes of the weights, of a payload that is an ONNX file."""
    if engine.path.suffix.lower() != ".onnx":
        return None
    try:
        return sum(dtype(tensor.data_type).nbytes(tensor.dims) for tensor in walk.tensors(read_proto(engine.path)))
    except TrtEngineError:
        return None


def _compared(
    first: _Contestant | None,
    other: _Contestant,
    base: CompareSide,
    side: CompareSide,
    differences: Sequence[Difference],
) -> Compared:
    made = _Outputs(note="the base is a file, which holds no outputs") if first is None else _outputs(first, other)
    return Compared(
        label=side.label,
        speed=tuple(item.record() for item in differences),
        outputs=tuple(made.errors.values()),
        outputs_note=made.note,
        structure=None if first is None else _structure(first.engine, other.engine),
        size_ratio=side.engine_bytes / base.engine_bytes if base.engine_bytes else None,
        output_names=tuple(made.errors),
        outputs_differ=made.differ,
        top1_same=made.top1_same,
    )


@dataclass(slots=True)
class _Outputs:
    """What two engines answered to the same input."""

    errors: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    differ: bool = False
    """Some output has no figure: another shape, values that are not finite."""
    top1_same: dict[str, float] = dataclasses.field(default_factory=dict)


def _outputs(first: _Contestant, other: _Contestant) -> _Outputs:
    if first.outputs is None or other.outputs is None:
        return _Outputs(note=first.outputs_note or other.outputs_note, differ=True)
    made, said, remarks = _Outputs(), [], []
    sorting = _sorts(first.engine) or _sorts(other.engine)
    for name, want in first.outputs.items():
        if name not in other.outputs:
            said.append(f"`{name}` is no output of `{other.label}`")
            continue
        got, want = np.asarray(other.outputs[name]), np.asarray(want)
        error = error_of(got, want)
        if sorting or (are_sorted(got) and are_sorted(want)):
            matched = compare_rows(got, want, _ROWS_REPLACED, tied=_ROWS_TIED)
            if matched.max_rel < error.max_rel:
                remarks.append(
                    f"rows of `{name}` are matched by value, without the {_ROWS_REPLACED:.0%} that lie worst and those tied "
                    f"with the last: the model sorts them (row by row as they stand, {error.max_abs:.3g})"
                )
                error = matched
        if math.isfinite(error.max_rel) and math.isfinite(error.max_abs):
            made.errors[name] = error
        elif got.shape != want.shape:
            said.append(f"`{name}` is {format_shape(want.shape)} against {format_shape(got.shape)}")
        else:
            said.append(f"`{name}` holds other values that are not finite, or is zero on one side alone")
        if got.shape == want.shape and want.ndim == 2 and want.shape[1] > 1 and want.dtype.kind == "f":
            made.top1_same[name] = float(np.mean(got.argmax(axis=1) == want.argmax(axis=1)))
    said += [f"`{name}` is no output of `{first.label}`" for name in other.outputs if name not in first.outputs]
    made.differ = bool(said)
    made.note = "; ".join([*said, *remarks])
    return made


_ROWS_REPLACED = 0.01
_ROWS_TIED = 1e-2
"""What `build` allows a model that sorts rows (evaluation/parity.py): near-equal scores change places."""


def _sorts(engine: Engine) -> bool:
    """Whether the model puts rows in an order, of a payload that is an ONNX file."""
    if engine.path.suffix.lower() != ".onnx":
        return False
    try:
        return is_sorting(read_proto(engine.path))
    except TrtEngineError:
        return False


def _structure(first: Engine, other: Engine) -> EngineDiff | None:
    """What differs in the engines themselves, where that can be told."""
    try:
        return diff(first.path, other.path)
    except TrtEngineError as error:
        log.info("the engines' structure was not compared: %s", error.message)
        return None


def _report(
    sides: Sequence[CompareSide],
    against: Sequence[Compared],
    found: Sequence[tuple[list[Difference], list[str]]],
    rules: Sequence[Rule],
    protocol: Protocol,
    method: str,
    *,
    blocks: int,
    order: str,
    baseline: str | None,
    batch: int,
    shapes: Mapping[str, tuple[int, ...]],
    states: Sequence[Clocks],
    started: str,
    complete: bool,
    warnings: Sequence[str],
) -> CompareReport:
    told = list(warnings)
    for side, (_, said) in zip(against, found, strict=True):
        told += [f"`{side.label}`: {text}" for text in said]
        told += [f"`{side.label}`: {side.outputs_note}"] if side.outputs_differ and side.outputs_note else []
    if len(against) > 1:
        told.append(
            f"{len(against)} engines are compared with the first: each interval holds for itself alone, "
            "`--fail-if` corrects for their number (Holm)"
        )
    gates = tuple(_judge(rules, against, [differences for differences, _ in found]))
    reasons = _instability(against, states, gates)
    record = sides[-1].record
    return CompareReport(
        sides=tuple(sides),
        against=tuple(against),
        protocol=protocol,
        environment=record.environment if record is not None else Environment.here(),
        blocks=blocks,
        order=order,
        method=method if against else "nothing was compared",
        gates=gates,
        baseline=baseline,
        batch=batch,
        shapes=dict(shapes),
        stable=not reasons,
        instability=reasons,
        warnings=tuple(dict.fromkeys(told)),
        started=started,
        complete=complete,
    )


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


# ------------------------------------------------------------------------------------------------ records and baselines


def _is_record(item: Any) -> bool:
    return isinstance(item, Path | str) and re.search(r"\.jsonl(:\d+)?$", str(item)) is not None


def _of_records(items: Sequence[Any], recorded: Sequence[bool], rules: Sequence[Rule], baseline: Any) -> CompareReport:
    """What was measured before, side by side."""
    if not all(recorded):
        raise UsageError(
            "records and engines are named together",
            hint="measure both: `trt-engine compare A B`, or `--baseline FILE`",
        )
    if any(rule.metric == "error" for rule in rules):
        raise UsageError("records hold no outputs to compare", hint="name the engines for `error:`")
    sides = [_side_of_record(str(item)) for item in items]
    if baseline is not None:
        sides.insert(0, _read_baseline(Path(baseline)))
    first = _record_of(sides[0])
    for label, side in zip(_labels([side.label for side in sides]), sides, strict=True):
        _refuse_different(sides[0].label, first, label, _record_of(side))
    sides = [
        dataclasses.replace(side, label=label)
        for label, side in zip(_labels([side.label for side in sides]), sides, strict=True)
    ]
    found = [unpaired(_units(sides[0]), _units(side)) for side in sides[1:]]
    against = [
        Compared(
            label=side.label,
            speed=tuple(item.record() for item in differences),
            outputs=(),
            outputs_note="records hold no outputs",
        )
        for side, (differences, _) in zip(sides[1:], found, strict=True)
    ]
    return _report(
        sides, against, found, rules, first.protocol, UNPAIRED,
        blocks=min(len(_units(side)) for side in sides),
        order="measured one after another, at different times",
        baseline=None if baseline is None else str(baseline),
        batch=first.batch, shapes=first.shapes,
        states=[state for side in sides for state in _record_of(side).clocks],
        started=first.started,
        complete=all(_record_of(side).complete for side in sides),
        warnings=_of_another_time(*sides),
    )  # fmt: skip


def _record_of(side: CompareSide) -> BenchRecord:
    assert side.record is not None
    return side.record


def _units(side: CompareSide) -> list[Sequence[float]]:
    """The blocks of a side: its loads; of a plain record, stretches of it."""
    record = _record_of(side)
    if not side.loads or not side.blocks_ms:
        return blocks_of(record.compute_ms)
    units, at = [], 0
    for count in side.loads:
        units.append([value for block in side.blocks_ms[at : at + count] for value in block])
        at += count
    return [unit for unit in units if unit]


def _of_another_time(base: CompareSide, *others: CompareSide) -> list[str]:
    said = [
        f"`{base.label}` was measured at another time: what the machine did in between is part of the difference, "
        "and the interval does not know it"
    ]
    if not all(side.loads for side in (base, *others)):
        said.append("each record is of one load: how much loads of one engine differ is not in the interval")
    return said


def _side_of_record(name: str) -> CompareSide:
    """One line of a `records.jsonl`: the last, or the one named `FILE:N`."""
    match = re.fullmatch(r"(.*\.jsonl)(?::(\d+))?", name)
    assert match is not None
    path = Path(match[1])
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        raise UsageError(f"no such file `{path}`", hint="`trt-engine bench ENGINE -o DIR` writes one") from None
    except OSError as error:
        raise explain(error, path, "read") from error
    number = len(lines) if match[2] is None else int(match[2])
    if not 1 <= number <= len(lines):
        raise UsageError(f"`{path}` has {len(lines)} records, no number {number}", hint=f"`{path}:1` is the first")
    try:
        record = msgspec.json.decode(lines[number - 1], type=BenchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"line {number} of `{path}` is no record of a measurement: {str(error).lower()}",
            hint="`trt-engine bench ENGINE -o DIR` writes them",
        ) from error
    if match[2] is None and len(lines) > 1:
        log.info("`%s` has %d records, the last one is taken (`%s:1` is the first)", path, len(lines), path)
    return CompareSide(
        label=name,
        engine=record.engine,
        backend=record.backend,
        device=record.device,
        precision=record.facts.get("precision", "unknown"),
        engine_bytes=0,
        facts=record.facts,
        record=record,
    )


class _Kept(msgspec.Struct):
    schema: str
    side: CompareSide
    schema_version: int = 1


def _read_baseline(path: Path) -> CompareSide:
    """The side a baseline file holds."""
    hint = "`trt-engine compare ENGINE --save-baseline FILE` writes one"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such file `{path}`", hint=hint) from None
    except OSError as error:
        raise explain(error, path, "read") from error
    try:
        kept = msgspec.json.decode(raw, type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is no baseline: {str(error).lower()}", hint=hint) from error
    if kept.schema != _BASELINE or kept.side.record is None:
        raise UsageError(f"`{path}` is `{kept.schema}`, expected `{_BASELINE}`", hint=hint)
    if kept.schema_version > 1:
        raise UsageError(
            f"`{path}` has schema version {kept.schema_version}, this tool reads up to 1",
            hint="install a newer trt-engine",
        )
    return kept.side


_LENGTHS = ("duration_s", "min_iterations")
"""How long it took is no other way of measuring."""
_NO_MATTER = ("memory_mib",)


def _refuse_different(name: str, record: BenchRecord, other_name: str, other: BenchRecord) -> None:
    """`UsageError` naming what differs in how, on what and with what two records were measured."""
    differing = [
        f"{what} ({_shown(a)} against {_shown(b)})"
        for what, a, b in (
            ("device", record.device, other.device),
            ("batch", record.batch, other.batch),
            ("shapes", record.shapes, other.shapes),
            ("measured", record.facts.get("measured", "alone"), other.facts.get("measured", "alone")),
        )
        if a != b
    ]
    differing += _different_fields(record.protocol, other.protocol, "protocol.", _LENGTHS)
    differing += _different_fields(record.environment, other.environment, "environment.", _NO_MATTER)
    if differing:
        raise UsageError(
            f"`{name}` and `{other_name}` do not compare: {'; '.join(differing)}",
            hint="measure both here, in turns: `trt-engine compare A B`",
        )


def _different_fields(one: Any, other: Any, prefix: str, but: Sequence[str] = ()) -> list[str]:
    return [
        f"{prefix}{item.name} ({_shown(getattr(one, item.name))} against {_shown(getattr(other, item.name))})"
        for item in dataclasses.fields(one)
        if item.name not in but and getattr(one, item.name) != getattr(other, item.name)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return (
            ", ".join(
                f"{name} {format_shape(item) if isinstance(item, tuple) else item}" for name, item in value.items()
            )
            or "nothing"
        )
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return "on" if value is True else "off" if value is False else f"`{value}`"
