"""Candidates built and measured: what is chosen, what is left out and why, what the passport and the reports hold."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine import errors
from trt_engine.backend import list_backends
from trt_engine.backends.inductor.options import tuning_candidates as inductor_candidates
from trt_engine.backends.onnxruntime import tuning
from trt_engine.benchmark import interleaving
from trt_engine.benchmark.closed_loop import QueryBurst
from trt_engine.benchmark.interleaving import Schedule
from trt_engine.benchmark.speed_difference import Restart
from trt_engine.config.build import BuildConfig
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.passport import Candidate, Tuning
from trt_engine.verbs.build import search as build_search
from trt_engine.verbs.build.candidates import PlannedCandidate
from trt_engine.verbs.build.precision import data_digest
from trt_engine.verbs.build.request import GivenInputs
from trt_engine.verbs.build.run import execute, plan
from trt_engine.verbs.build.search import Search
from trt_engine.verbs.build.worker import build_in_process
from trt_engine.verbs.evaluate import run as evaluate

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"
NHWC = {"cuda.prefer_nhwc": "1"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "net.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["N", 8])}, {"y": (FLOAT, ["N", 8])})


# ------------------------------------------------------------------------------------------------ the choice, scripted


class Script:
    """A search whose builds and rounds take scripted times, on a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, build_s: Sequence[float], **settings: Any) -> None:
        self.now, self.build_s, self.rounds = 0.0, build_s, list[tuple[int, ...]]()
        self.ms: Mapping[int, Sequence[float]] = {}
        self.failures: dict[int, BaseException] = {}
        self.stop_after = 99
        config = BuildConfig(**({"backend": "auto", "time_budget_s": 100.0} | settings))
        one = BuildConfig(backend="onnxruntime")
        plans = [SimpleNamespace(config=one, at=at, find_in_store=lambda: None) for at in range(len(build_s))]
        candidates = tuple(
            PlannedCandidate(replace(one, options={"arena": str(at)}), {"arena": str(at)}, plan=item)
            for at, item in enumerate(plans)
        )
        plan = SimpleNamespace(config=config, candidates=candidates, given=GivenInputs())
        self.search = Search(plan, self.build, clock=lambda: self.now)
        monkeypatch.setattr(Search, "_open", self.open)
        monkeypatch.setattr(build_search, "measure_interleaved", self.measure)

    def set_backends(self, names: Sequence[str]) -> None:
        self.search.plan.candidates = tuple(
            replace(item, config=replace(item.config, backend=name))
            for item, name in zip(self.search.plan.candidates, names, strict=True)
        )

    def build(self, one: Any) -> Any:
        self.now += self.build_s[one.at]
        if one.at in self.failures:
            raise self.failures[one.at]
        passport = SimpleNamespace(validation=None, build=SimpleNamespace(seconds=self.build_s[one.at]))
        return SimpleNamespace(passport=passport, at=one.at)

    def open(self, active: Sequence[int]) -> Any:
        bursts = {at: (self.burst(at, 0), self.burst(at, 0)) for at in active}
        sides = {at: SimpleNamespace(load_s=0.1, query_s=0.01, bursts=bursts[at]) for at in active}
        return sides, {at: at for at in active}, 1

    def measure(self, sides: Sequence[int], schedule: Schedule, partial: list[Restart]) -> list[Restart]:
        if len(self.rounds) >= self.stop_after:
            raise KeyboardInterrupt
        self.rounds.append(tuple(sides))
        self.now += schedule.duration_s
        turns = [tuple(self.burst(side, load) for side in sides) for load in range(schedule.restarts)]
        partial += [(turn,) for turn in turns]
        return partial

    def burst(self, side: int, load: int) -> QueryBurst:
        times = self.ms.get(side, (99.0,))
        ms = times[load % len(times)] * (1 + 1e-4 * load)
        return QueryBurst((ms,) * 20, 20 * ms / 1e3)

    def run(self, **ms: Sequence[float]) -> tuple[int, Tuning]:
        self.ms = {int(name[1:]): times for name, times in ms.items()}
        engine, tuned = self.search.run()
        assert engine.at == tuned.chosen
        return tuned.chosen, tuned


def test_halving_keeps_the_faster_half_and_the_simplest_that_may_be_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, [1.0] * 6)
    chosen, tuned = script.run(a0=[10, 14], a1=[20], a2=[9.9], a3=[30], a4=[9.8, 10.2], a5=[40])
    assert script.rounds[0] == (0, 1, 2, 3, 4, 5)
    assert all(set(later) < set(earlier) for earlier, later in zip(script.rounds, script.rounds[1:], strict=False))
    assert chosen in (2, 4) or tuned.candidates[0].interval_pct[0] <= 0
    assert [item.rounds for item in tuned.candidates][1::2] == [1, 1, 1]


def test_while_the_interval_is_so_wide_that_all_may_be_equal_they_are_measured_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noisy = [1.0, 1.6, 0.7, 1.9, 0.8, 1.2]
    script = Script(monkeypatch, [1.0, 1.0])
    chosen, tuned = script.run(a0=[12.0 * one for one in noisy], a1=[10.0 * one for one in noisy[::-1]])
    assert chosen == 1 and tuned.seconds <= 1.1 * 100.0 and len(script.rounds) > 3
    assert tuned.candidates[0].slower_pct == pytest.approx(20.0, abs=1)
    script = Script(monkeypatch, [1.0, 1.0])
    script.stop_after = 1
    assert script.run(a0=[12.0 * one for one in noisy], a1=[10.0 * one for one in noisy[::-1]])[0] == 1
    assert script.search.table[0].interval_pct[0] < 0, "which one round does not show"


def test_the_time_is_kept_and_the_first_engine_is_always_built(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, [200.0, 1.0])
    chosen, tuned = script.run()
    assert chosen == 0 and not script.rounds and tuned.candidates[1].note == "not reached in the time given"
    script = Script(monkeypatch, [30.0] * 5)
    _, tuned = script.run(a0=[9.0], a1=[5.0])
    assert [item.build_s for item in tuned.candidates] == [30.0, 30.0, None, None, None]
    assert tuned.seconds <= 1.1 * 100.0
    script = Script(monkeypatch, [1.0] * 8, time_budget_s=14.0)
    _, tuned = script.run(**{f"a{at}": [10.0 + at % 2, 10.5] for at in range(8)})
    assert script.rounds and tuned.seconds <= 1.1 * 14.0


def test_an_interrupted_search_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, [1.0] * 4)
    script.stop_after = 1
    chosen, tuned = script.run(a0=[30.0, 31], a1=[8.0, 9.1], a2=[9.0, 8.1], a3=[20.0])
    assert chosen == 1 and not tuned.complete and len(script.rounds) == 1
    script = Script(monkeypatch, [1.0] * 3)
    script.failures[1] = KeyboardInterrupt()
    chosen, tuned = script.run()
    assert chosen == 0 and not tuned.complete
    script = Script(monkeypatch, [1.0])
    script.failures[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        script.run()


def test_a_candidate_that_fails_while_measured_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, [1.0] * 4)
    measure = script.measure

    def fails_once(sides: Sequence[int], schedule: Schedule, partial: list[Restart]) -> list[Restart]:
        if 2 in sides:
            raise build_search._CandidateFailed(2, errors.MemoryExhausted("out of memory on cuda:0"))
        return measure(sides, schedule, partial)

    monkeypatch.setattr(build_search, "measure_interleaved", fails_once)
    chosen, tuned = script.run(a0=[9.0], a1=[5.0], a3=[7.0])
    assert chosen == 1 and script.rounds[0] == (0, 1, 3)
    assert tuned.candidates[2].note == "does not run beside the others: out of memory on cuda:0"
    script = Script(monkeypatch, [1.0] * 2)
    monkeypatch.setattr(build_search, "measure_interleaved", fails_once)
    script.failures[0] = errors.BuildError("no kernel")
    assert script.run()[0] == 1


def test_errors_name_the_candidate_that_raised_them(monkeypatch: pytest.MonkeyPatch) -> None:
    search, side = Script(monkeypatch, [1.0]).search, SimpleNamespace(load_s=0.1, query_s=0.1)

    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        yield lambda *_: (_ for _ in ()).throw(errors.MemoryExhausted("no memory"))

    with search._open_in_time(3, side, opened) as burst, pytest.raises(build_search._CandidateFailed) as caught:
        burst(1.0, 1, 1)
    assert caught.value.index == 3
    with pytest.raises(ValueError, match="of another"), search._open_in_time(3, side, opened):
        raise ValueError("of another")


class SlowLoads(Script):
    """Engines whose loads and queries take scripted times, opened and measured as real ones."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, load_s: Sequence[float], budget_s: float, backends: Sequence[str] = ()
    ) -> None:
        opened = Search._open
        super().__init__(monkeypatch, [0.0] * len(load_s), time_budget_s=budget_s)
        self.load_s, self.opened, self.clocks = load_s, list[int](), list[bool | None]()
        self.later_loads = 1.0
        self.set_backends(backends or ["onnxruntime"] * len(load_s))
        for item in self.search.plan.candidates:
            one = self.build(item.plan)
            one.signature = SimpleNamespace(inputs=(), outputs=())
            item.plan.find_in_store = lambda one=one: one
        monkeypatch.setattr(Search, "_open", opened)
        monkeypatch.setattr(build_search, "measure_interleaved", interleaving.measure_interleaved)
        monkeypatch.setattr(interleaving, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(build_search, "feeds_for", lambda *_: ({}, ""))
        monkeypatch.setattr(build_search, "batch_of", lambda *_: 1)
        monkeypatch.setattr(build_search, "make_candidates", self.make)
        monkeypatch.setattr(build_search, "effective_protocols", self.probe)
        monkeypatch.setattr(build_search, "loader_for", lambda side, *_: lambda: self.load(side.at))

    def make(self, engines: Sequence[Any], *_: object) -> list[Any]:
        if engines[0].at in self.failures:
            raise self.failures[engines[0].at]
        return [SimpleNamespace(at=engines[0].at, load_s=0.0, query_s=0.0, bursts=())]

    def probe(self, sides: Sequence[Any], config: object, warnings: object, events: bool | None) -> list[str]:
        (side,), began = sides, self.now
        self.clocks.append(events)
        with self.load(side.at) as measure:
            side.load_s = self.now - began
            side.bursts = (measure(0.1, 1, 0), measure(0.1, 1, 0))
        side.query_s = side.bursts[0].samples_ms[0] / 1e3
        return ["protocol"]

    @contextlib.contextmanager
    def load(self, side: int) -> Iterator[Any]:
        probed = len(self.clocks) > len(self.opened)
        self.opened.append(side)
        self.now += self.load_s[side] * (1.0 if probed else self.later_loads)

        def measure(duration_s: float, queries: int, warmup: int) -> QueryBurst:
            (ms,) = self.ms[side]
            count = max(queries, math.ceil(duration_s * 1e3 / ms))
            self.now += (count + warmup) * ms / 1e3
            return QueryBurst((ms * (1 + 1e-3 * (self.opened.count(side) * (side + 1) % 3)),) * count, count * ms / 1e3)

        yield measure


def test_slow_loads_are_measured_by_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget_s, loads in ((14.0, 2), (20.0, 4), (30.0, 6), (90.0, 6)):
        script = SlowLoads(monkeypatch, [1.0] * 3, budget_s)
        chosen, found = script.run(a0=[10.0], a1=[12.0], a2=[8.0])
        assert chosen == 2 and found.seconds <= 1.1 * budget_s
        assert found.protocol == f"interleaved in rounds, {loads} loads each, transfers left out"
        low, high = found.candidates[0].interval_pct
        assert found.candidates[0].slower_pct == pytest.approx(25.0, abs=0.3)
        assert low < found.candidates[0].slower_pct < high
        assert script.opened[:3] == [0, 1, 2] and script.opened[3:].count(2) >= loads


def test_the_fastest_of_the_probes_are_measured_interleaved_as_far_as_the_time_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = SlowLoads(monkeypatch, [3.0] * 5, 36.0)
    chosen, found = script.run(a0=[50.0], a1=[70.0], a2=[40.0], a3=[60.0], a4=[45.0])
    assert chosen == 2 and found.runner_up == 4 and found.seconds <= 1.1 * 36.0
    assert [item.rounds for item in found.candidates] == [0, 0, 1, 0, 1]
    assert all(item.median_ms is not None and item.note is None for item in found.candidates)
    assert found.protocol == (
        "interleaved in rounds, 2 loads each, transfers left out; 3 of the candidates by one load each, one after another, "
        "no interval"
    )


def test_each_backend_is_probed_before_the_second_settings_of_one_by_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = ("onnxruntime", "onnxruntime", "onnxruntime", "inductor", "tensorrt")
    script = SlowLoads(monkeypatch, [5.0] * 5, 19.0, backends)
    chosen, found = script.run(a0=[50.0], a1=[20.0], a2=[20.0], a3=[48.0], a4=[49.0])
    assert script.opened == [0, 3, 4] and chosen == 3 and script.clocks == [False] * 3
    assert [item.note for item in found.candidates] == [None, *["not measured in the time given"] * 2, None, None]


def test_the_first_that_runs_is_probed_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    script = SlowLoads(monkeypatch, [30.0] * 3, 20.0)
    script.ms = {0: [5.0], 1: [5.0], 2: [5.0]}
    script.search.table = [Candidate("onnxruntime", {}, None) for _ in range(3)]
    script.now = 21.0
    script.failures[0] = errors.MemoryExhausted("out of memory on cuda:0")
    sides, protocols = script.search._probe_all(
        [0, 1, 2], lambda at: script.make([SimpleNamespace(at=at)])[0], te.BenchConfig()
    )
    assert [*sides] == [*protocols] == script.opened == [1]
    assert [item.note for item in script.search.table] == [
        "does not run: out of memory on cuda:0", None, "not measured in the time given",
    ]  # fmt: skip


def test_ctrl_c_in_the_probes_does_not_deliver_what_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    script = SlowLoads(monkeypatch, [1.0] * 3, 20.0)
    script.failures |= {0: errors.MemoryExhausted("out of memory on cuda:0"), 2: KeyboardInterrupt()}
    monkeypatch.setattr(Script, "build", lambda *_: pytest.fail("all are in the store"))
    chosen, found = script.run(a1=[5.0])
    assert chosen == 1 and not found.complete
    assert found.candidates[0].note == "does not run: out of memory on cuda:0"


def test_the_libraries_of_a_backend_are_no_part_of_later_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    script = SlowLoads(monkeypatch, [20.0, 0.1], 60.0)
    script.ms = {0: [5.0], 1: [5.0]}
    sides, _ = script.search._probe_all([0, 1], lambda at: script.make([SimpleNamespace(at=at)])[0], te.BenchConfig())
    assert [side.load_s for side in sides.values()] == pytest.approx([0.1, 0.1])
    assert script.clocks == [None, None], "one backend by its own clock"


def test_a_candidate_that_fails_is_left_out_and_a_requested_build_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, [1.0] * 3)
    script.failures[0] = errors.BuildError("no kernel")
    chosen, tuned = script.run(a1=[9.0], a2=[5.0])
    assert chosen == 2 and tuned.candidates[0].note == "no kernel"
    script = Script(monkeypatch, [1.0] * 2, backend="onnxruntime")
    script.failures[0] = errors.BuildError("no kernel")
    with pytest.raises(errors.BuildError, match="no kernel"):
        script.run()
    script = Script(monkeypatch, [1.0])
    script.failures[0] = errors.PrecisionError("not in fp16")
    with pytest.raises(errors.PrecisionError, match="not in fp16"):
        script.run()


# ------------------------------------------------------------------------------------------------ the candidates


def test_every_backend_is_listed_with_the_reason_it_is_left_out(model: Path, tmp_path: Path) -> None:
    made = plan(model, backend="auto", batch=(1, 2, 4), store=te.Store(tmp_path / "store"), precisions="int8,fp32")
    reasons = {item.config.backend: item.reason for item in made.candidates if item.plan is None}
    assert "builds for cuda" in reasons["tensorrt"] and "builds for cuda" in reasons["trtexec"]
    assert "builds for cuda" in reasons["tensorrt-rtx"]
    assert "calibration data" in reasons["onnxruntime"] and "--accuracy-data" in reasons["onnxruntime"]
    eligible = [(item.config.precision, item.options) for item in made.candidates if item.plan is not None]
    assert eligible[0] == (None, {}) and (None, {"spinning": "off"}) in eligible
    assert all(precision is None for precision, _ in eligible)
    listed = {item.config.backend for item in made.candidates}
    assert listed == {name for name, spec in list_backends().items() if not spec.hidden} - {"auto"}


def test_without_a_gpu_its_backends_are_left_out(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons() -> set[str | None]:
        return {item.reason for item in plan(model, **settings).candidates}

    settings: dict[str, Any] = {"backend": "auto", "device": "cuda:0", "store": te.Store(tmp_path / "store")}
    monkeypatch.setattr("trt_engine.verbs.build.candidates.info.gpus", lambda: ())
    known: list[Any] = [object()]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: known[0])
    made = plan(model, **settings)
    assert reasons() == {"there is no `cuda:0` here"}
    known[0] = None
    assert reasons() == {"`nvidia-ml-py`, which lists GPUs, is not installed: pip install 'trt-engine[gpu]'"}
    with pytest.raises(errors.BuildError, match="no candidate can be built"):
        execute(made)


def test_settings_of_a_search_that_contradict_each_other_are_refused(model: Path) -> None:
    for settings in ({"optimize_for": "deadline"}, {"max_p99_ms": 5.0}):
        with pytest.raises(errors.UsageError, match="belong together"):
            plan(model, backend="auto", **settings)
    with pytest.raises(errors.UsageError, match="unknown precision"):
        plan(model, backend="auto", precisions="fp15")


def test_candidates_fit_the_graph_and_leave_requested_settings_alone() -> None:
    found = open_model(DIGITS)
    separate, channel = (NHWC | {"separate_conv_bias": value} for value in ("on", "channel"))

    def offered(model: Model = found, **settings: Any) -> list[dict[str, str]]:
        return list(tuning.tuning_candidates(model, BuildConfig(**({"device": "cuda:0"} | settings))))

    # a detector with SiLU, whose Softmax is not that of an attention
    assert offered() == offered(fuse=False) == [separate, NHWC]
    assert offered(device="cpu") == offered(providers=("tensorrt", "cuda")) == []
    assert offered(device="cpu", time_budget_s=9, options={"spinning": "on"}) == [{"graph_optimization": "extended"}]
    assert offered(options={"cuda.prefer_nhwc": "0"}) == []
    assert offered(options=NHWC) == [{"separate_conv_bias": "on"}]
    assert offered(options={"separate_conv_bias": "off"}) == [NHWC]
    classifiers = Path(__file__).parents[2] / "examples" / "classifiers"
    kernels = [{"cuda.sdpa_kernel": "8"}, {"cuda.sdpa_kernel": "1"}]
    assert offered(open_model(classifiers / "vit.onnx")) == [separate, NHWC, *kernels]
    assert offered(open_model(classifiers / "vit.onnx"), fuse=False) == [separate, NHWC]
    assert offered(open_model(classifiers / "resnet.onnx")) == [separate, channel, NHWC]
    assert inductor_candidates(found, BuildConfig(device="cuda:0")) == ()
    assert inductor_candidates(found, BuildConfig(device="cuda:0", time_budget_s=9.0)) == ({"conv_1x1_as_mm": "on"},)
    assert inductor_candidates(found, BuildConfig(device="cuda:0", time_budget_s=9.0, precision="fp16")) == ()


def test_biases_are_separated_in_nhwc_alone(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="layout NHWC"):
        te.build(DIGITS, options={"separate_conv_bias": "on"}, store=te.Store(tmp_path / "store"))


# ------------------------------------------------------------------------------------------------ real builds


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build_search, "_SIDE_S", 0.3)
    return None


def tuned(engine: te.Engine) -> Tuning:
    assert engine.passport.build.tuning is not None
    return engine.passport.build.tuning


def test_auto_over_onnx_runtime(model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(list_backends(), "inductor", replace(list_backends()["inductor"], modules=("no_such_torch",)))
    store, out = te.Store(tmp_path / "store"), tmp_path / "net.engine"
    settings = {"backend": "auto", "batch": (1, 2, 4), "time_budget_s": 600.0, "store": store, "out": out}
    engine = te.build(model, **settings)
    found = tuned(engine)
    best = found.candidates[found.chosen]
    assert engine.passport.backend == best.backend == "onnxruntime" and found.complete
    assert engine.passport.parity is not None and engine.passport.parity.passed
    assert engine.passport.build.config["options"] == best.options
    ran = [item for item in found.candidates if item.rounds]
    assert len(ran) == 3 and all(item.median_ms > 0 and item.p99_ms >= item.median_ms for item in ran)
    assert found.runner_up not in (None, found.chosen) and found.margin_interval_pct is not None
    assert found.shapes == {"x": (2, 8)} and 0 < found.first_engine_s <= found.best_engine_s <= found.seconds
    assert "torch" in next(item.note for item in found.candidates if item.backend == "inductor")
    assert tuned(te.Engine.open(out)) == found
    with te.load(out) as runner:
        assert runner.infer({"x": np.full((2, 8), -1.0, np.float32)})["y"].max() == 0

    monkeypatch.setattr(build_search.Search, "run", lambda self: pytest.fail("measured again"))
    again = execute(plan(model, **settings))
    assert again.cached and tuned(again.engine) == found


@pytest.mark.slow
def test_the_chosen_engine_is_the_one_that_was_measured(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wide = te.Store(tmp_path / "store"), {"time_budget_s": 600.0, "batch": (1, 2, 4)}
    built = []
    original = build_search.Search._build_one
    monkeypatch.setattr(
        build_search.Search, "_build_one", lambda self, at, *rest: (built.append(at), original(self, at, *rest))[1]
    )
    engine = te.build(model, store=store, **wide)
    assert built == [0, 1, 2]
    same = plan(model, store=store, batch=(1, 2, 4), options=tuned(engine).candidates[tuned(engine).chosen].options)
    assert same.find_in_store().passport.payload[0].digest == engine.passport.payload[0].digest
    assert te.build(model, store=store, time_budget_s=0, batch=(1, 2, 4)).passport.build.tuning is None


@pytest.mark.slow
def test_an_interrupted_search_is_delivered_and_not_used_again(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = te.Store(tmp_path / "store"), tmp_path / "net.engine"
    settings = {"backend": "auto", "batch": (1, 2, 4), "store": store, "out": out, "time_budget_s": 600.0}
    with monkeypatch.context() as patch:
        patch.setattr(build_search.Search, "_measure_all", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(errors.Interrupted) as stopped:
            te.build(model, **settings)
    assert stopped.value.exit_code == 130 and stopped.value.partial.path == out
    assert te.Engine.open(out).passport.parity.passed and not tuned(te.Engine.open(out)).complete
    assert tuned(te.build(model, **settings)).complete


def test_a_candidate_is_built_in_a_process_that_ends_with_the_time(model: Path, tmp_path: Path) -> None:
    made = plan(model, batch=(1, 2, 4), store=te.Store(tmp_path / "store"))
    with pytest.raises(errors.BuildError, match="not built within"):
        build_in_process(made, 0.01)
    assert made.find_in_store() is None
    engine = build_in_process(made, 600.0)
    assert engine.passport.key == made.key and engine.passport.parity.passed


def test_the_accuracy_gate_compares_with_the_first_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, [1.0] * 3, accuracy_data="digits", accuracy_drop=0.02)
    asked = []

    def run(engine: Any, dataset: str, rules: Any, *rest: object) -> Any:
        asked.append((engine.at, dataset, getattr(rules.baseline, "at", None), rules.max_drop))
        return SimpleNamespace(task="classification", metrics={"top1": 0.9 - 0.1 * (engine.at == 1)}, at=engine.at)

    def gate(report: Any) -> None:
        if report.at == 1:
            raise errors.AccuracyError("a drop of 0.1")

    monkeypatch.setattr(evaluate, "run", run)
    monkeypatch.setattr(evaluate, "gate", gate)
    monkeypatch.setattr(build_search, "MAIN_METRIC", {"classification": "top1"})
    chosen, found = script.run(a0=[9.0], a1=[1.0], a2=[5.0])
    assert chosen == 2 and found.candidates[1].note == "a drop of 0.1" and not found.candidates[1].rounds
    assert asked == [(0, "digits", None, None), (1, "digits", 0, 0.02), (2, "digits", 0, 0.02)]
    assert found.candidates[2].metric == 0.9


def test_data_that_is_not_there_is_not_a_question_of_rights(tmp_path: Path) -> None:
    with pytest.raises(errors.FeedError) as caught:
        data_digest(str(tmp_path / "nope"))
    assert caught.value.hint == "check its path"
