"""Builds candidates, measures them interleaved, and chooses the best: successive halving within a time budget."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trt_engine.backend import get_backend
from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.closed_loop import QueryBurst
from trt_engine.benchmark.interleaving import EngineOpener, MeasureBurst, Schedule, measure_interleaved
from trt_engine.benchmark.speed_difference import MIN_RESTARTS, Restart, paired_differences
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.evaluate import EvaluateConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import BuildError, TrtEngineError
from trt_engine.records.bench import Protocol
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.passport import Candidate, Tuning
from trt_engine.runtime.feeds import at_shapes
from trt_engine.verbs.build.worker import build_in_process
from trt_engine.verbs.candidates import Candidate as Side
from trt_engine.verbs.candidates import effective_protocols, loader_for, make_candidates

if TYPE_CHECKING:
    from trt_engine.verbs.build.run import BuildPlan

log = logging.getLogger(__name__)

_BUILD_SHARE = 0.7
"""Share of the time budget after which no further candidate is built."""
_SIDE_S = 5.0
"""Longest time of a candidate in one round: more changes no choice of engines whose queries are short."""
_LONGEST = 1.1
"""Share of the time budget by which a load or burst is expected to end, or is not begun."""
_SAME_PCT = 5.0
"""A candidate that measured more than this slower is not taken for as fast, however wide the interval; one that may be is
measured again."""
_SAME_ONE_LOAD_PCT = 1.0
"""The same where each was loaded once: the first of the candidates is taken for no more than that."""
_NOT_REACHED = "not reached in the time given"
_NOT_MEASURED = "not measured in the time given"


@dataclass(slots=True)
class Search:
    """One search: what was built, and what is known of every candidate."""

    plan: BuildPlan
    build: Callable[[BuildPlan], Engine]
    rebuild: bool = False
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0
    engines: dict[int, Engine] = field(default_factory=dict)
    """Built and checked candidates, by index."""
    built_s: dict[int, float] = field(default_factory=dict)
    """When they were, since the beginning."""
    table: list[Candidate] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    loads: set[int] = field(default_factory=set)
    """Loads of each engine, in the interleaved rounds."""
    best: int | None = None
    """The choice so far, once one has run."""
    last: _Round | None = None
    failure: TrtEngineError | None = None
    """The first candidate's error, or the first error of all."""

    @property
    def budget_s(self) -> float:
        return self.plan.config.time_budget_s or 0.0

    def run(self) -> tuple[Engine, Tuning]:
        """The best engine and the table. Raises the first error where no candidate could be built and checked.

        Ctrl-C, and the end of the budget, give the best of what was built; before the first engine Ctrl-C is raised.
        """
        self.began = self.clock()
        self.table = [
            Candidate(
                item.config.backend, item.options, item.config.precision,
                note=item.reason if item.plan is None else _NOT_REACHED,
            )
            for item in self.plan.candidates
        ]  # fmt: skip
        complete = True
        log.info("up to %d candidates within %g s (`--time-budget`)", len(self.table), self.budget_s)
        try:
            self._build_all()
            self._measure_all()
        except KeyboardInterrupt:
            if not self.engines:
                raise
            complete = False
        chosen = min(self.engines) if self.best is None else self.best
        tuning = self._record(chosen, complete)
        log.info("%s", tuning.summary)
        return self.engines[chosen], tuning

    def _elapsed(self) -> float:
        return self.clock() - self.began

    # -------------------------------------------------------------------------------------------- building

    def _build_all(self) -> None:
        longest: dict[str, float] = {}
        for index, item in enumerate(self.plan.candidates):
            if item.plan is None:
                log.info("%s is left out: %s", self.table[index].label, item.reason)
                continue
            started, backend = self._elapsed(), item.config.backend
            stored = None if self.rebuild else item.plan.find_in_store()
            share = _BUILD_SHARE if stored is None else 1.0  # nothing is built for a stored one
            left_s = share * self.budget_s - started
            if self.engines and left_s < (longest.get(backend, 0.0) if stored is None else 0.0):
                continue
            quick = backend in longest and get_backend(backend).fast_build and item.config.calib_data is None
            try:
                self._build_one(index, item.plan, stored, math.inf if quick or not self.engines else left_s)
            except TrtEngineError as error:
                if index == 0 and not get_backend(self.plan.config.backend).selects:
                    raise  # the build as requested
                self.failure = self.failure or error
                self.table[index] = replace(self.table[index], note=error.message)
                log.info("%s is left out: %s", self.table[index].label, error.message)
            took_s = self._elapsed() - started if stored is None else stored.passport.build.seconds
            longest[backend] = max(longest.get(backend, 0.0), took_s)
        if not self.engines:
            raise self.failure or BuildError(
                f"no candidate can be built here: {'; '.join(f'{item.label}: {item.note}' for item in self.table)}",
                hint="`trt-engine doctor` lists the backends",
            )

    def _build_one(self, index: int, plan: BuildPlan, stored: Engine | None, limit_s: float) -> None:
        """Take it from the store, or build and check it; with a limit, in a process that ends with the time."""
        started, quick = self._elapsed(), math.isinf(limit_s)
        engine = stored or (self.build(plan) if quick else build_in_process(plan, limit_s, rebuild=self.rebuild))
        if engine.passport.validation is not None and engine.passport.validation.state == "deferred":
            raise BuildError("it cannot be checked here")
        known = replace(self.table[index], build_s=self._elapsed() - started, note=None)
        self.table[index] = replace(known, metric=self._gate_accuracy(engine))
        self.engines[index], self.built_s[index] = engine, self._elapsed()
        log.info("%s: built and checked in %.1f s", known.label, self._elapsed() - started)

    def _gate_accuracy(self, engine: Engine) -> float | None:
        """AP or top-1 on the dataset; `AccuracyError` where it is too far below the first engine's."""
        config = self.plan.config
        if config.accuracy_data is None:
            return None
        from trt_engine.verbs.evaluate import run as evaluate

        first = next(iter(self.engines.values()), None)
        rules = EvaluateConfig(
            preprocess=config.preprocess,
            baseline=first,
            max_drop=None if first is None else min(config.accuracy_drop, 1.0),
        )
        runtime = RuntimeConfig(allow_fallback=config.allow_fallback)
        report = evaluate.run(engine, config.accuracy_data, rules, runtime, config)
        evaluate.gate(report)
        return report.metrics.get(MAIN_METRIC[report.task])

    # -------------------------------------------------------------------------------------------- measuring

    def _measure_all(self) -> None:
        """The probes, then rounds of interleaved measurement, each of the faster half of the one before; the last
        again, with its loads added, while an interval leaves open which is faster.

        A single engine is probed too, so that its figure is in the table; it is delivered in any case.
        """
        try:
            sides, openers, batch = self._open(self._probe_order())
        except TrtEngineError:
            if len(self.engines) > 1:
                raise
            return
        active = sorted(sides)
        turns = zip(*(sides[index].bursts for index in active), strict=True)
        self._enter(last := _Round(active, [(turn,) for turn in turns], batch, self.plan.config, loads=1))
        before: list[Restart] = []  # of the same candidates
        while len(active) > 1:
            left_s = self.budget_s - self._elapsed()
            # each engine is loaded and runs its bursts, an eighth of the time or more
            restart_s = sum(sides[index].load_s + 6 * sides[index].query_s for index in active) * 8 / 7
            loads = min(MIN_RESTARTS, int(left_s / restart_s))
            if loads < 2 and last.loads == 1 and len(active) > 2:
                active = sorted(active, key=self._rank)[:-1]
                continue
            if loads < (2 if before else max(2, last.loads)):
                log.info("the rest of the time is too short for a round, each load of which takes %.1f s", restart_s)
                return
            active.sort()
            most_s = min(left_s / math.ceil(math.log2(len(active))), _SIDE_S * len(active))
            restarts: list[Restart] = []
            try:
                schedule = Schedule(max(loads * restart_s, most_s), restarts=loads, seed=len(before))
                measure_interleaved([openers[index] for index in active], schedule, partial=restarts)
            except _CandidateFailed as failed:
                active.remove(failed.index)
                before = []
                self.best = min(active, key=self._rank) if failed.index == self.best else self.best
                note = f"does not run beside the others: {failed.error.message}"
                self.table[failed.index] = replace(self.table[failed.index], note=note)
                continue
            except _TimeIsUp:
                if not restarts or len(before) + len(restarts) < max(2, last.loads):
                    return
            restarts[:0] = before
            fastest, tied = self._enter(last := _Round(active, restarts, batch, self.plan.config, len(restarts)))
            faster = sorted(active, key=self._rank)[: math.ceil(len(active) / 2)]
            remaining = active if len(active) == 2 else sorted({*faster, fastest, min((fastest, *tied))})
            if last.is_decided and (remaining == active or not tied):
                return
            before = restarts if remaining == active else []
            active = remaining

    def _rank(self, index: int) -> tuple[bool, float]:
        """By speed in its last round, those above the deadline last."""
        return self.table[index].note is not None, self.table[index].slower_pct or 0.0

    def _probe_order(self) -> list[int]:
        """The first one of every backend, then the second ones: each backend is measured as long as the time allows."""
        backends = [self.plan.candidates[index].config.backend for index in sorted(self.engines)]
        places = {index: backends[:at].count(backends[at]) for at, index in enumerate(sorted(self.engines))}
        return sorted(places, key=lambda index: (places[index], index))

    def _open(self, active: Sequence[int]) -> tuple[dict[int, Side], dict[int, EngineOpener], int]:
        """The candidates as `compare` measures them, each by its own rules but one clock; those that do not run are out."""
        throughput = self.plan.config.optimize_for == "throughput"
        first = self.engines[active[0]]
        shapes = {name: span.max for name, span in first.passport.profiles[0].ranges.items()} if throughput else {}
        config = BenchConfig(warmup_s=0.0, duration_s=0.0, transfers=False, shapes=shapes)
        feeds, _ = feeds_for(first, config)
        feeds |= at_shapes(first.signature, self.plan.given.values, {name: item.shape for name, item in feeds.items()})
        self.shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        runtime = RuntimeConfig(allow_fallback=self.plan.config.allow_fallback)

        def make(index: int) -> Side:
            (side,) = make_candidates([self.engines[index]], [self.table[index].label], runtime, feeds)
            side.outputs_note = "not compared"  # the build has checked them
            return side

        sides, protocols = self._probe_all(active, make, config)
        if not sides:
            raise BuildError("no engine runs", hint="; ".join(f"{item.label}: {item.note}" for item in self.table))
        openers: dict[int, EngineOpener] = {
            index: functools.partial(self._open_in_time, index, side, loader_for(side, config, protocols[index]))
            for index, side in sides.items()
        }
        return sides, openers, batch_of(first.signature, self.shapes)

    def _probe_all(
        self, active: Sequence[int], make: Callable[[int], Side], config: BenchConfig
    ) -> tuple[dict[int, Side], dict[int, Protocol]]:
        """Each candidate loaded alone and run, and its protocol, until the time is up and one runs; others are noted."""
        sides: dict[int, Side] = {}
        protocols: dict[int, Protocol] = {}
        firsts: dict[str, Side] = {}
        backends = {index: self.plan.candidates[index].config.backend for index in active}
        events = None if len({*backends.values()}) == 1 else False  # not every backend has them
        for index in active:
            first = firsts.get(backends[index])
            if sides and self._elapsed() + (first.load_s if first is not None else 0.0) > self.budget_s:
                self.table[index] = replace(self.table[index], note=_NOT_MEASURED)
                continue
            try:
                side = make(index)
                (protocols[index],) = effective_protocols([side], config, [], events)
            except TrtEngineError as error:
                self.table[index] = replace(self.table[index], note=f"does not run: {error.message}")
                continue
            sides[index] = side
            self.best = min(sides)
            first = firsts.setdefault(backends[index], side)
            first.load_s = min(first.load_s, side.load_s)  # the first load includes the backend's libraries
        return sides, protocols

    @contextlib.contextmanager
    def _open_in_time(self, index: int, side: Side, opener: EngineOpener) -> Iterator[MeasureBurst]:
        """The opened candidate, whose errors are `_CandidateFailed`; `_TimeIsUp` in place of what would end too late."""
        with contextlib.ExitStack() as stack:
            self._require_time(side.load_s)
            try:
                measure = stack.enter_context(opener())
            except TrtEngineError as error:
                raise _CandidateFailed(index, error) from error

            def burst(duration_s: float, queries: int, warmup: int) -> QueryBurst:
                self._require_time(max(duration_s, queries * side.query_s))
                try:
                    return measure(duration_s, queries, warmup)
                except TrtEngineError as error:
                    raise _CandidateFailed(index, error) from error

            yield burst

    def _require_time(self, seconds: float) -> None:
        if self._elapsed() + seconds > _LONGEST * self.budget_s:
            raise _TimeIsUp

    def _enter(self, measured: _Round) -> tuple[int, list[int]]:
        """Enter a round into the table; its fastest eligible candidate, and those not shown to be slower than that one."""
        best, tied = measured.fastest, []
        for at, index in enumerate(measured.active):
            known = replace(
                self.table[index], median_ms=measured.median_ms[at], p99_ms=measured.p99_ms[at],
                rounds=self.table[index].rounds + (measured.loads > 1), slower_pct=0.0, interval_pct=None, note=None,
            )  # fmt: skip
            if at != best:
                slower_pct, interval_pct = measured.difference(at, best)
                known = replace(known, slower_pct=slower_pct, interval_pct=interval_pct)
                if at in measured.eligible and measured.may_be_equal(slower_pct, interval_pct):
                    tied.append(index)
            if at in measured.late:
                limit = self.plan.config.max_p99_ms
                known = replace(known, note=f"p99 {known.p99_ms:.3g} ms is above the deadline of {limit:g} ms")
            self.table[index] = known
        self.last, self.best = measured, min((measured.active[best], *tied))
        self.loads |= {measured.loads} - {1}
        return measured.active[best], tied

    # -------------------------------------------------------------------------------------------- the record

    def _record(self, chosen: int, complete: bool) -> Tuning:
        config = self.plan.config
        found = Tuning(
            candidates=tuple(self.table),
            chosen=chosen,
            shapes=self.shapes,
            protocol=self._protocol(),
            optimize_for=config.optimize_for,
            budget_s=self.budget_s,
            seconds=self._elapsed(),
            first_engine_s=min(self.built_s.values()),
            best_engine_s=self.built_s[chosen],
            max_p99_ms=config.max_p99_ms,
            complete=complete,
        )
        if self.last is None or chosen not in self.last.active:
            return found
        base = self.last.active.index(chosen)
        others = {
            at: self.last.difference(at, base)
            for at in self.last.eligible
            if at != base and self.table[self.last.active[at]].note is None
        }
        if not others:
            return found
        second = min(others, key=lambda at: others[at][0])
        margin_pct, interval_pct = others[second]
        return replace(
            found, runner_up=self.last.active[second], margin_pct=margin_pct, margin_interval_pct=interval_pct
        )

    def _protocol(self) -> str:
        """How the candidates in the table were measured."""
        alone = sum(item.median_ms is not None and item.rounds == 0 for item in self.table)
        one_load = "one load each, one after another, no interval"
        if not self.loads:
            return f"{one_load}, transfers left out" if alone else "not measured"
        loads = " to ".join(map(str, sorted({min(self.loads), max(self.loads)})))
        rest = f"; {alone} of the candidates by {one_load}" if alone else ""
        return f"interleaved in rounds, {loads} loads each, transfers left out{rest}"


class _CandidateFailed(Exception):
    """A candidate could not be loaded or run while it was measured."""

    def __init__(self, index: int, error: TrtEngineError) -> None:
        super().__init__(error.message)
        self.index, self.error = index, error


class _TimeIsUp(Exception):
    """The next load or burst would end after the time given."""


class _Round:
    """One measurement of some candidates, interleaved or by their probes (one load), and what follows from it."""

    def __init__(
        self, active: Sequence[int], restarts: Sequence[Restart], batch: int, config: BuildConfig, loads: int
    ) -> None:
        self.active = [*active]
        self.restarts, self.batch, self.loads = restarts, batch, loads
        self.metric = "median" if config.optimize_for == "latency" else "throughput"
        samples = [
            [value for load in restarts for turn in load for value in turn[side].samples_ms]
            for side in range(len(active))
        ]
        self.median_ms = [statistics.median(values) for values in samples]
        self.p99_ms = [sorted(values)[math.ceil(0.99 * len(values)) - 1] for values in samples]
        limit = math.inf if config.max_p99_ms is None else config.max_p99_ms
        self.late = {at for at, p99 in enumerate(self.p99_ms) if p99 > limit}
        """Positions of those above the deadline."""
        in_time = [at for at in range(len(active)) if at not in self.late]
        self.eligible = in_time or [self.p99_ms.index(min(self.p99_ms))]

    def difference(self, other: int, base: int) -> tuple[float, tuple[float, float] | None]:
        """Per cent that position `other` is slower in what is optimised for, and the 95 % interval, none from one load."""
        found, _ = paired_differences(self.restarts, other, base=base, batch=self.batch, least=2)
        interval = next(item for item in found if item.metric == self.metric).interval()
        return interval.value, None if self.loads == 1 else (interval.low, interval.high)

    def may_be_equal(self, slower_pct: float, interval_pct: tuple[float, float] | None) -> bool:
        """True of a small difference that is not shown; one load each shows none, and the fastest is likely the fastest."""
        if interval_pct is None:
            return slower_pct <= _SAME_ONE_LOAD_PCT
        return slower_pct <= _SAME_PCT and interval_pct[0] <= 0

    @property
    def is_decided(self) -> bool:
        """True if each other candidate is shown to be slower than the fastest, or not to be much slower."""
        intervals = [self.difference(at, self.fastest)[1] for at in self.eligible if at != self.fastest]
        return all(found is not None and (found[0] > 0 or found[1] <= _SAME_PCT) for found in intervals)

    @property
    def fastest(self) -> int:
        """Position of the fastest eligible candidate."""
        first = self.eligible[0]
        return min(self.eligible, key=lambda at: self.difference(at, first)[0] if at != first else 0.0)
