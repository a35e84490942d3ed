"""Interleaved measurement of several engines: bursts in randomized order, reloads, pairs."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from trt_engine.benchmark.closed_loop import QueryBurst, gc_paused, prepare_query
from trt_engine.benchmark.speed_difference import Restart
from trt_engine.engine import Engine
from trt_engine.errors import SetupError
from trt_engine.protocols import Session
from trt_engine.records.bench import Protocol
from trt_engine.tensors import Tensors

MeasureBurst = Callable[[float, int, int], QueryBurst]
"""Measures one burst of a loaded engine: seconds, queries, warm-up queries."""
EngineOpener = Callable[[], AbstractContextManager[MeasureBurst]]
"""Opens a loaded engine as a context manager."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Durations and counts of an interleaved measurement."""

    duration_s: float
    """Total, including loading; exceeded where the minimum of rounds takes longer."""
    restarts: int = 12
    burst_queries: int = 2
    """Minimum per burst; fewer where queries are too long."""
    seed: int = 0
    min_rounds: int = 2
    """Minimum of rounds kept per restart."""
    separate_processes: bool = False
    """Each burst is a separate process: no warm-up, and one round per restart."""


@contextlib.contextmanager
def open_in_process(
    load: Callable[[], Session], engine: Engine, feeds: Tensors, protocol: Protocol, warnings: list[str]
) -> Iterator[MeasureBurst]:
    """Load an engine in this process for the closed-loop measurement."""
    session = load()
    try:
        with prepare_query(session, engine, feeds, protocol, warnings) as query:
            if query.protocol != protocol:
                raise SetupError(
                    f"`{engine.path.name}` was reloaded and its protocol changed: {'; '.join(warnings)}",
                    hint="`--no-graph` measures all engines without CUDA graphs",
                )
            yield query.measure_burst
    finally:
        session.close()


def measure_interleaved(
    sides: Sequence[EngineOpener],
    schedule: Schedule,
    *,
    on_progress: Callable[[float, float], None] | None = None,
    partial: list[Restart] | None = None,
) -> list[Restart]:
    """Measure all restarts. `partial` receives each finished one, for interrupted measurements."""
    loads = [] if partial is None else partial
    rng = random.Random(schedule.seed)
    began = time.perf_counter()
    share_s = schedule.duration_s / schedule.restarts
    order: list[int] = []
    with gc_paused():
        for number in range(schedule.restarts):
            order = _next_order(order, number, len(sides), rng)
            until = began + share_s * (number + 1)
            loads.append(_measure_restart(sides, schedule, order, share_s, until, rng))
            if on_progress is not None:
                on_progress(time.perf_counter() - began, schedule.duration_s)
    return loads


def _next_order(before: list[int], number: int, count: int, rng: random.Random) -> list[int]:
    """Loading order: a random permutation, then its rotations, so that each engine takes each position equally often."""
    if number % count == 0:
        return rng.sample(range(count), count)
    return [*before[1:], before[0]]


def _measure_restart(
    sides: Sequence[EngineOpener],
    schedule: Schedule,
    order: Sequence[int],
    share_s: float,
    until: float,
    rng: random.Random,
) -> Restart:
    with contextlib.ExitStack() as stack:
        turns: dict[int, MeasureBurst] = {index: stack.enter_context(sides[index]()) for index in order}
        if schedule.separate_processes:
            taken = {
                index: turns[index](share_s / len(sides), 1, 0) for index in rng.sample(range(len(sides)), len(sides))
            }
            return (tuple(taken[index] for index in range(len(sides))),)
        warmup_s = _WARMUP_SHARE * max(0.0, until - time.perf_counter())
        bursts = [turns[index](warmup_s, 1, 1) for index in order]
        slowest_s = max(float(np.median(burst.samples_ms)) for burst in bursts) / 1e3
        turn = _burst_length(share_s / len(sides), slowest_s, schedule)
        rounds: list[tuple[QueryBurst, ...]] = []
        while True:  # not `while condition`, whose jump back Python 3.13.0 leaves out of the `with`
            if len(rounds) > schedule.min_rounds and time.perf_counter() >= until:
                break
            taken = {index: turns[index](*turn) for index in rng.sample(range(len(sides)), len(sides))}
            rounds.append(tuple(taken[index] for index in range(len(sides))))
        return tuple(rounds[1:])


_WARMUP_SHARE = 0.04
"""Share of a restart's time after loading that each engine runs before the first round."""
_MAX_BURST_S = 0.2
_TARGET_ROUNDS = 24


def _burst_length(side_s: float, query_s: float, schedule: Schedule) -> tuple[float, int, int]:
    """Seconds, queries and warm-up queries of one burst: 24 rounds per restart where `queries` fit, else fewer rounds,
    then fewer queries. Queries too long for a warm-up query do not depend on warm caches."""
    most_s = side_s / (schedule.min_rounds + 2)
    fitting = int(most_s / query_s) if query_s > 0 else schedule.burst_queries + 1
    turn_s = min(side_s / _TARGET_ROUNDS, _MAX_BURST_S)
    return turn_s, max(1, min(schedule.burst_queries, fitting - 1)), 1 if fitting > 1 else 0
