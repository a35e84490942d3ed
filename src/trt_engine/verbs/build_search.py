"""Builds candidates, measures them interleaved, and chooses the best: successive halving within a time budget."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trt_engine.backend import get_backend
from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.closed_loop import QueryBurst
from trt_engine.benchmark.interleaving import EngineOpener, MeasureBurst, Schedule, measure_interleaved
from trt_engine.benchmark.statistics import MIN_RESTARTS, Difference, Restart, paired_differences
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.evaluate import EvaluateConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import BuildError, TrtEngineError
from trt_engine.records.bench import Protocol
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.passport import Candidate, Tuning
from trt_engine.verbs.build_worker import build_in_process
from trt_engine.verbs.compare.candidates import Candidate as Side
from trt_engine.verbs.compare.candidates import effective_protocols, loader_for, make_candidates

if TYPE_CHECKING:
    from trt_engine.verbs.build import BuildPlan

log = logging.getLogger(__name__)

_BUILD_SHARE = 0.7
"""Share of the time budget after which no further candidate is built."""
_SIDE_S = 5.0
"""Longest time of a candidate in one round: more changes no choice of engines whose queries are short."""
_NOT_REACHED = "not reached in the time given"


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
    protocol: str = "not measured"
    best: int | None = None
    """The choice so far, once one was measured."""
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
            left_s = _BUILD_SHARE * self.budget_s - self._elapsed()
            if self.engines and left_s < longest.get(item.config.backend, 0.0):
                continue
            started = self._elapsed()
            try:
                self._build_one(index, item.plan, left_s if self.engines else math.inf)
            except TrtEngineError as error:
                if index == 0 and not get_backend(self.plan.config.backend).selects:
                    raise  # the build as requested
                self.failure = self.failure or error
                self.table[index] = replace(self.table[index], note=error.message)
                log.info("%s is left out: %s", self.table[index].label, error.message)
            longest[item.config.backend] = max(longest.get(item.config.backend, 0.0), self._elapsed() - started)
        if not self.engines:
            raise self.failure or BuildError(
                f"no candidate can be built here: {'; '.join(f'{item.label}: {item.note}' for item in self.table)}",
                hint="`trt-engine doctor` lists the backends",
            )

    def _build_one(self, index: int, plan: BuildPlan, limit_s: float) -> None:
        """Build and check it; one whose build is long is built in a process that ends with the time."""
        started, spec = self._elapsed(), get_backend(plan.config.backend)
        quick = spec.fast_build and plan.config.calib_data is None
        if quick or math.isinf(limit_s) or (not self.rebuild and plan.find_in_store() is not None):
            engine = self.build(plan)
        else:
            engine = build_in_process(plan, limit_s, rebuild=self.rebuild)
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
        from trt_engine.verbs import evaluate

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
        """Rounds of interleaved measurement, each of the faster half of the one before."""
        if len(self.engines) < 2:
            return
        sides, openers, batch = self._open(sorted(self.engines))
        active = sorted(sides)
        self.best = active[0]
        while len(active) > 1:
            left_s = self.budget_s - self._elapsed()
            least_s = _min_round_s([sides[index] for index in active])
            if left_s < least_s and self.last is None and len(active) > 2:
                late = self._most_dispensable(active)
                active.remove(late)
                self.table[late] = replace(self.table[late], note="not measured in the time given")
                continue
            if left_s < least_s:
                log.info("the rest of the time is too short for a round, which takes %.1f s", least_s)
                return
            seconds = max(least_s, min(left_s / math.ceil(math.log2(len(active))), _SIDE_S * len(active)))
            schedule = Schedule(seconds, restarts=MIN_RESTARTS)
            try:
                restarts = measure_interleaved([openers[index] for index in active], schedule)
            except _CandidateFailed as failed:
                active.remove(failed.index)
                self.best = active[0] if failed.index == self.best else self.best
                note = f"does not run beside the others: {failed.error.message}"
                self.table[failed.index] = replace(self.table[failed.index], note=note)
                continue
            self.last = _Round(active, restarts, batch, self.plan.config)
            fastest, tied = self._enter(self.last)
            self.best = min((fastest, *tied))
            faster = sorted(active, key=lambda index: self.table[index].slower_pct or 0.0)[: math.ceil(len(active) / 2)]
            remaining = sorted({*faster, fastest, self.best})
            if len(active) == 2 or not tied or remaining == active:
                return
            active = remaining

    def _most_dispensable(self, active: Sequence[int]) -> int:
        """The last one of the backend that has the most: each backend is measured as long as the time allows."""
        backends = {index: self.plan.candidates[index].config.backend for index in active}
        counts = Counter(backends.values())
        return max(active, key=lambda index: (counts[backends[index]], index))

    def _open(self, active: Sequence[int]) -> tuple[dict[int, Side], dict[int, EngineOpener], int]:
        """The candidates as `compare` measures them, each by its own rules but one clock; those that do not run are out."""
        throughput = self.plan.config.optimize_for == "throughput"
        first = self.engines[active[0]]
        shapes = {name: span.max for name, span in first.passport.profiles[0].ranges.items()} if throughput else {}
        config = BenchConfig(warmup_s=0.0, duration_s=0.0, transfers=False, shapes=shapes)
        feeds, _ = feeds_for(first, config)
        self.shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        runtime = RuntimeConfig(allow_fallback=self.plan.config.allow_fallback)

        def make(index: int) -> Side:
            (side,) = make_candidates([self.engines[index]], [self.table[index].label], runtime, feeds)
            return side

        sides, protocols = self._probe_all(active, make, config, None)
        if len({protocol.clock for protocol in protocols.values()}) > 1:
            sides, protocols = self._probe_all([*sides], make, config, False)
        if not sides:
            raise BuildError("no engine runs", hint="; ".join(f"{item.label}: {item.note}" for item in self.table))
        self.protocol = f"interleaved in rounds, {MIN_RESTARTS} loads each, transfers left out"
        openers: dict[int, EngineOpener] = {
            index: functools.partial(_open_naming, index, loader_for(side, config, protocols[index]))
            for index, side in sides.items()
        }
        return sides, openers, batch_of(first.signature, self.shapes)

    def _probe_all(
        self, active: Sequence[int], make: Callable[[int], Side], config: BenchConfig, events: bool | None
    ) -> tuple[dict[int, Side], dict[int, Protocol]]:
        """Each candidate loaded alone and run once, and its protocol; one that fails is noted and left out."""
        sides: dict[int, Side] = {}
        protocols: dict[int, Protocol] = {}
        loaded: set[str] = set()
        for index in active:
            backend = self.plan.candidates[index].config.backend
            try:
                side = make(index)
                if backend not in loaded:  # the first load includes the backend's libraries
                    effective_protocols([side], config, [], events)
                    loaded.add(backend)
                (protocols[index],) = effective_protocols([side], config, [], events)
                sides[index] = side
            except TrtEngineError as error:
                self.table[index] = replace(self.table[index], note=f"does not run: {error.message}")
        return sides, protocols

    def _enter(self, measured: _Round) -> tuple[int, list[int]]:
        """Enter a round into the table; its fastest eligible candidate, and those not shown to be slower than that one."""
        best, tied = measured.fastest, []
        for at, index in enumerate(measured.active):
            known = replace(
                self.table[index], median_ms=measured.median_ms[at], p99_ms=measured.p99_ms[at],
                rounds=self.table[index].rounds + 1, slower_pct=0.0, interval_pct=None, note=None,
            )  # fmt: skip
            if at != best:
                interval = measured.difference(at, best).interval()
                known = replace(known, slower_pct=interval.value, interval_pct=(interval.low, interval.high))
                if at in measured.eligible and interval.low <= 0:
                    tied.append(index)
            if at in measured.late:
                limit = self.plan.config.max_p99_ms
                known = replace(known, note=f"p99 {known.p99_ms:.3g} ms is above the deadline of {limit:g} ms")
            self.table[index] = known
        return measured.active[best], tied

    # -------------------------------------------------------------------------------------------- the record

    def _record(self, chosen: int, complete: bool) -> Tuning:
        config = self.plan.config
        found = Tuning(
            candidates=tuple(self.table),
            chosen=chosen,
            shapes=self.shapes,
            protocol=self.protocol,
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
        others = {at: self.last.difference(at, base) for at in self.last.eligible if at != base}
        if not others:
            return found
        second = min(others, key=lambda at: others[at].value)
        interval = others[second].interval()
        return replace(
            found,
            runner_up=self.last.active[second],
            margin_pct=interval.value,
            margin_interval_pct=(interval.low, interval.high),
        )


class _CandidateFailed(Exception):
    """A candidate could not be loaded or run while it was measured."""

    def __init__(self, index: int, error: TrtEngineError) -> None:
        super().__init__(error.message)
        self.index, self.error = index, error


@contextlib.contextmanager
def _open_naming(index: int, opener: EngineOpener) -> Iterator[MeasureBurst]:
    """The opened candidate, whose errors are `_CandidateFailed`."""
    with contextlib.ExitStack() as stack:
        try:
            measure = stack.enter_context(opener())
        except TrtEngineError as error:
            raise _CandidateFailed(index, error) from error

        def burst(duration_s: float, queries: int, warmup: int) -> QueryBurst:
            try:
                return measure(duration_s, queries, warmup)
            except TrtEngineError as error:
                raise _CandidateFailed(index, error) from error

        yield burst


class _Round:
    """One interleaved measurement of some candidates, and what follows from it."""

    def __init__(self, active: Sequence[int], restarts: Sequence[Restart], batch: int, config: BuildConfig) -> None:
        self.active = [*active]
        self.restarts, self.batch = restarts, batch
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

    def difference(self, other: int, base: int) -> Difference:
        """Of what is optimised for, between two positions."""
        found, _ = paired_differences(self.restarts, other, base=base, batch=self.batch)
        return next(item for item in found if item.metric == self.metric)

    @property
    def fastest(self) -> int:
        """Position of the fastest eligible candidate."""
        first = self.eligible[0]
        return min(self.eligible, key=lambda at: self.difference(at, first).value if at != first else 0.0)


def _min_round_s(sides: Sequence[Side]) -> float:
    """Seconds of the fewest rounds: each load reads every engine, warms it up and runs its bursts."""
    return MIN_RESTARTS * sum(side.load_s + 6 * side.query_s for side in sides)
