"""Turns and intervals: who is measured when, and what may be said of it."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trt_engine.backend import get_backend
from trt_engine.benchmark import interleaving
from trt_engine.benchmark.closed_loop import QueryBurst, effective_protocol, prepare_query
from trt_engine.benchmark.interleaving import MeasureBurst, Schedule, measure_interleaved, open_in_process
from trt_engine.benchmark.speed_difference import (
    Difference,
    Restart,
    _paired_difference,
    holm_correction,
    paired_differences,
    split_blocks,
    unpaired_differences,
)
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import SetupError

Made = Callable[[str], Engine]

# ------------------------------------------------------------------------------------------------ turns


class Machine:
    """A clock that only work moves, and engines on it that write down what was asked of them."""

    def __init__(self, *query_s: float) -> None:
        self.now_s = self.load_s = 0.0
        self.query_s = query_s
        self.said: list[tuple[str, int]] = []
        self.asked: list[tuple[int, float, int, int]] = []
        self.collecting: list[bool] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sides(self) -> list[Callable[[], Any]]:
        return [lambda side=side: self._open(side) for side in range(len(self.query_s))]  # type: ignore[misc]

    @contextlib.contextmanager
    def _open(self, side: int) -> Iterator[MeasureBurst]:
        self.said.append(("load", side))
        self.now_s += self.load_s

        def turn(duration_s: float, queries: int, warmup: int) -> QueryBurst:
            self.said.append(("turn", side))
            self.asked.append((side, duration_s, queries, warmup))
            self.collecting.append(gc.isenabled())
            one = self.query_s[side]
            count = max(queries, int(duration_s / one))
            self.now_s += (count + warmup) * one
            return QueryBurst((one * 1e3,) * count, count * one)

        yield turn
        self.said.append(("close", side))

    def rounds(self, count: int) -> list[list[int]]:
        """The turns by round of each load, the first one (before the rounds) left out."""
        found: list[list[int]] = []
        for what, side in self.said:
            if what == "load":
                settle = dict.fromkeys(range(count), True)
                found_now: list[int] = []
            elif what == "turn" and settle.get(side):
                settle[side] = False
            elif what == "turn":
                found_now.append(side)
                if len(found_now) == count:
                    found.append(found_now)
                    found_now = []
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(*query_s: float) -> Machine:
        made = Machine(*query_s)
        monkeypatch.setattr(interleaving, "time", SimpleNamespace(perf_counter=made.perf_counter))
        return made

    return make


def test_every_engine_has_one_turn_in_every_round_in_an_order_that_changes(machine: Callable[..., Machine]) -> None:
    at = machine(0.001, 0.001, 0.001)
    measure_interleaved(at.sides(), Schedule(6.0))
    rounds = at.rounds(3)
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert len({tuple(order) for order in rounds}) == 6


def test_engines_are_side_by_side_and_loaded_anew_each_equally_often_first(machine: Callable[..., Machine]) -> None:
    at = machine(0.001, 0.001, 0.001)
    measure_interleaved(at.sides(), Schedule(3.0, restarts=12))
    loads = [side for what, side in at.said if what == "load"]
    assert len(loads) == 36
    for place in range(3):
        assert sorted(loads[place::3]) == [0] * 4 + [1] * 4 + [2] * 4
    open_now: set[int] = set()
    for what, side in at.said:
        if what == "turn":
            assert open_now == {0, 1, 2}
        elif what == "load":
            open_now.add(side)
        else:
            open_now.discard(side)
    assert not open_now


def test_the_first_round_of_a_load_and_the_first_query_of_a_turn_are_left_out(machine: Callable[..., Machine]) -> None:
    at = machine(0.001, 0.001)
    loads = measure_interleaved(at.sides(), Schedule(2.0))
    kept = sum(len(rounds) for rounds in loads)
    assert len(at.rounds(2)) == kept + len(loads)
    assert {warmup for _, _, _, warmup in at.asked} == {1}


def test_the_time_is_kept_and_is_passed_only_for_the_fewest_rounds(machine: Callable[..., Machine]) -> None:
    quick, slow = machine(0.001, 0.001), None
    loads = measure_interleaved(quick.sides(), Schedule(4.0))
    assert 4.0 <= quick.now_s < 4.5
    assert all(len(rounds) >= 10 for rounds in loads)
    slow = machine(2.0, 2.0)
    loads = measure_interleaved(slow.sides(), Schedule(4.0, restarts=6))
    assert all(len(rounds) == 2 for rounds in loads)
    assert slow.now_s <= 6 * 2 * (2 + 3) * 2.0  # two to settle and three rounds of one query, with nothing before it


def test_an_interruption_leaves_the_loads_that_were_done(machine: Callable[..., Machine]) -> None:
    at = machine(0.001, 0.001)
    kept: list[Restart] = []

    def press(done_s: float, planned_s: float) -> None:
        if done_s > planned_s / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_interleaved(at.sides(), Schedule(2.0), on_progress=press, partial=kept)
    assert len(kept) == 6
    assert [what for what, _ in at.said].count("close") == [what for what, _ in at.said].count("load")
    assert gc.isenabled()


def test_turns_in_processes_of_their_own_are_one_round_for_a_load(machine: Callable[..., Machine]) -> None:
    at = machine(0.001, 0.001)
    loads = measure_interleaved(at.sides(), Schedule(2.4, separate_processes=True))
    assert [len(rounds) for rounds in loads] == [1] * 12
    assert {(round(seconds, 6), warmup) for _, seconds, _, warmup in at.asked} == {(0.1, 0)}


@pytest.mark.parametrize("name", ["onnxruntime", "fake"])
@pytest.mark.parametrize("events", [None, False])
def test_a_turn_is_the_closed_loop_over_an_engine_that_stays_loaded(made: Made, name: str, events: bool | None) -> None:
    engine = made(name)
    runtime = get_backend(name).load_component("runtime")()
    session = runtime.load(engine, RuntimeConfig())
    _, protocol = effective_protocol(session, BenchConfig(), events=events)
    assert protocol.clock == ("device events" if name == "fake" and events is None else "host")
    session.close()
    feeds = {"x": np.zeros((2, 3, 16, 16), np.float32)}
    with open_in_process(lambda: runtime.load(engine, RuntimeConfig()), engine, feeds, protocol, []) as turn:
        for queries in (1, 5):
            taken = turn(0.0, queries, 1)
            assert queries <= len(taken.samples_ms) <= queries + 1  # by events one more is in flight
            assert min(taken.samples_ms) > 0
            assert taken.wall_s > 0


def test_an_engine_that_is_loaded_again_and_runs_by_other_rules_is_not_measured(made: Made) -> None:
    engine = made("fake")
    runtime = get_backend("fake").load_component("runtime")()
    session = runtime.load(engine, RuntimeConfig())
    _, protocol = effective_protocol(session, BenchConfig())
    session.close()
    assert protocol.graph

    def load() -> Any:
        again = runtime.load(engine, RuntimeConfig())
        stream = again.device.stream

        def stubborn() -> Any:
            taken = stream()
            taken.capture = lambda work: (_ for _ in ()).throw(RuntimeError("not permitted"))
            return taken

        again.device.stream = stubborn
        return again

    feeds = {"x": np.zeros((2, 3, 16, 16), np.float32)}
    with (
        pytest.raises(SetupError, match="not permitted"),
        open_in_process(load, engine, feeds, protocol, []),
    ):
        pass


def test_an_engine_on_a_device_by_the_hosts_clock_is_run_to_its_end_with_its_copies(made: Made) -> None:
    engine = made("fake")
    session = get_backend("fake").load_component("runtime")().load(engine, RuntimeConfig())
    config = BenchConfig(transfers=True)
    _, protocol = effective_protocol(session, config, events=False)
    assert (protocol.clock, protocol.transfers, protocol.graph) == ("host", True, False)
    with prepare_query(session, engine, {"x": np.ones((2, 3, 16, 16), np.float32)}, protocol, []) as query:
        assert len(query.measure_burst(0.0, 3, 0).samples_ms) == 3
        _, host = query.streams[0].downloads[0]
        assert np.abs(host).max() > 0
    assert session.device.allocated_count == 0
    session.close()


# ------------------------------------------------------------------------------------------------ what they tell


def turn_of(median_ms: float, rng: np.random.Generator | None = None, count: int = 9) -> QueryBurst:
    times = np.full(count, median_ms) if rng is None else median_ms * np.exp(0.03 * rng.standard_t(4, count))
    return QueryBurst(tuple(times.tolist()), float(times.sum()) / 1e3)


def loads_of(
    rng: np.random.Generator,
    slower_pct: float = 0.0,
    *,
    apart: float = 0.0,
    drift: float = 0.0,
    bursts: float = 0.0,
    loads: int = 12,
    rounds: int = 5,
    count: int = 9,
) -> list[Restart]:
    """Made-up turns: loads differ by `apart`, the machine slows down by `drift`, turns are hit by bursts."""
    made: list[Restart] = []
    turn = 0
    for _ in range(loads):
        sides = rng.normal(0, apart, 2)
        load = []
        for _ in range(rounds):
            taken: dict[int, QueryBurst] = {}
            for side in rng.permutation(2):
                slow = 1 + drift * turn / (loads * rounds * 2) + (3.0 if rng.random() < bursts else 0.0)
                base = 10 * slow * np.exp(sides[side]) * (1 + slower_pct / 100 if side else 1)
                taken[int(side)] = turn_of(base, rng, count)
                turn += 1
            load.append((taken[0], taken[1]))
        made.append(tuple(load))
    return made


def metric(differences: list[Difference], name: str) -> Difference:
    return next(item for item in differences if item.metric == name)


def median_of(loads: list[Restart]) -> Difference:
    return metric(paired_differences(loads, 1)[0], "median")


@pytest.mark.parametrize(
    "noise",
    [
        {},
        pytest.param({"apart": 0.02}, marks=pytest.mark.slow),
        pytest.param({"drift": 0.5}, marks=pytest.mark.slow),
        pytest.param({"bursts": 0.1, "apart": 0.005}, marks=pytest.mark.slow),
    ],
    ids=["quiet", "loads differ", "drift", "bursts"],
)
def test_equal_engines_raise_no_more_alarms_than_promised_and_unequal_ones_are_found(noise: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    spans = [median_of(loads_of(rng, **noise)).interval() for _ in range(100)]
    assert sum(span.excludes_zero for span in spans) <= 10  # 5 are promised; two standard errors and a quarter more
    found = [median_of(loads_of(rng, 5.0, **noise)).interval() for _ in range(20)]
    assert sum(span.low > 0 for span in found) >= 16
    assert sum(span.low <= 5 <= span.high for span in found) >= 17


def test_the_power_it_states_is_the_power_it_has() -> None:
    rng = np.random.default_rng(11)
    least = float(np.median([median_of(loads_of(rng, apart=0.01, rounds=2)).detectable_pct() for _ in range(40)]))
    found = sum(median_of(loads_of(rng, least, apart=0.01, rounds=2)).interval().low > 0 for _ in range(100))
    assert 0.68 <= found / 100 <= 0.92


@pytest.mark.parametrize("blocks", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_the_size_it_would_find_is_found_by_four_of_five_new_comparisons(blocks: int) -> None:
    """Resamples of few blocks scatter less than new blocks would: uncorrected it is 76 of 100 here."""
    rows = np.random.default_rng(2).normal(0, 0.02, (600, blocks))
    said = [_paired_difference("p99", (1.0, 1.0), row) for row in rows]
    least = math.log1p(float(np.median([item.detectable_pct() for item in said])) / 100)
    found = np.mean([least + math.log1p(item.interval().low / 100) > 0 for item in said])
    assert 0.78 <= found <= 0.84


def test_slower_is_positive_by_every_metric_and_throughput_too() -> None:
    rng = np.random.default_rng(0)
    differences, said = paired_differences(loads_of(rng, 20.0, count=20), 1, batch=4)
    assert not said
    records = [item.to_record() for item in differences]
    assert [item.metric for item in records] == ["median", "mean", "p99", "throughput"]
    assert [item.unit for item in records] == ["ms", "ms", "ms", "images/s"]
    assert {item.verdict for item in records} == {"slower"}
    assert all(15 < item.slower_pct.value < 25 for item in records)
    assert records[0].other > records[0].baseline and records[3].other < records[3].baseline
    assert records[3].baseline == pytest.approx(400, rel=0.05)  # images, four to a query of 10 ms


def test_too_few_queries_have_no_p99_and_it_is_said() -> None:
    rng = np.random.default_rng(0)
    few, said = paired_differences(loads_of(rng, count=4), 1)  # 240 of each side
    assert "p99" not in {item.metric for item in few}
    assert len(said) == 1 and "too few queries for an interval of p99: 240 per side make 2 groups of 100" in said[0]
    enough, said = paired_differences(loads_of(rng, count=20), 1)
    assert "p99" in {item.metric for item in enough} and not said


@pytest.mark.parametrize("loads", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4)), 5])
def test_intervals_of_few_loads_are_students(loads: int) -> None:
    rng = np.random.default_rng(3)
    spans = [
        metric(paired_differences(loads_of(rng, loads=loads, apart=0.02, count=5), 1, least=2)[0], "median").interval()
        for _ in range(200)
    ]
    assert sum(span.excludes_zero for span in spans) <= 20  # 10 are promised
    found = metric(paired_differences(loads_of(rng, loads=loads, apart=0.02), 1, least=2)[0], "mean")
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[loads]
    assert math.log1p(found.interval().high / 100) - found.value == pytest.approx(quantile * found.std_error, rel=0.05)
    assert not paired_differences(loads_of(rng, loads=loads), 1, least=loads + 1)[0]


def test_series_that_were_measured_apart_are_compared_by_their_own_blocks() -> None:
    rng = np.random.default_rng(5)

    def series(median_ms: float) -> list[float]:
        return list(map(float, median_ms * np.exp(0.05 * rng.standard_normal(2400))))

    alarms = sum(
        metric(unpaired_differences(split_blocks(series(5)), split_blocks(series(5)))[0], "median")
        .interval()
        .excludes_zero
        for _ in range(60)
    )
    assert alarms <= 7
    found, said = unpaired_differences(split_blocks(series(5)), split_blocks(series(5.5)))
    assert [item.metric for item in found] == ["median", "mean", "p99"] and not said
    assert all(item.to_record().verdict == "slower" for item in found[:2])
    assert 8 < found[0].interval().value < 12
    assert not unpaired_differences(split_blocks(series(5), 5), split_blocks(series(5)))[0]


def test_a_p_value_agrees_with_the_interval() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        item = median_of(loads_of(rng, 3.0, apart=0.01))
        low = item.interval().low
        assert item.p_value(low - 0.05) <= 0.05 < item.p_value(low + 0.05)
        assert item.p_value(item.interval().value + 1) == 1.0


@pytest.mark.parametrize(
    ("p_values", "yes"),
    [
        ([0.04], [True]),
        ([0.04, 0.04], [False, False]),
        ([0.02, 0.04], [True, True]),
        ([0.03, 0.001, 0.2], [False, True, False]),
        ([], []),
    ],
)
def test_several_questions_are_answered_by_holms_rule(p_values: list[float], yes: list[bool]) -> None:
    assert holm_correction(p_values) == yes


def test_more_rounds_of_the_same_loads_do_not_hide_how_much_loads_differ() -> None:
    rng = np.random.default_rng(4)
    few = [median_of(loads_of(rng, apart=0.03, rounds=3)).std_error for _ in range(15)]
    many = [median_of(loads_of(rng, apart=0.03, rounds=20)).std_error for _ in range(15)]
    assert 0.7 < np.mean(many) / np.mean(few) < 1.3
