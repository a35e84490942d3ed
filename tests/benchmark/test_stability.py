"""When a measurement is unstable: on series made to be steady, drifting, bimodal, interrupted once, or short."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.benchmark.measurement_protocols import resolve_protocol
from trt_engine.benchmark.stability import advice, drift_pct, instability, interval_pct
from trt_engine.config.bench import BenchConfig
from trt_engine.device.info import Clocks
from trt_engine.environment import Environment
from trt_engine.records.bench import BenchRecord

CPU = resolve_protocol(BenchConfig(), "cpu")
GPU = resolve_protocol(BenchConfig(), "fake:0")
TRTEXEC = resolve_protocol(BenchConfig(protocol="trtexec10"), "fake:0")


def noisy(count: int, mean: float = 5.0, spread: float = 0.05, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(mean, spread * mean) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [40, 200, 5000])
def test_a_quiet_run_on_a_cpu_is_stable(count: int, seed: int) -> None:
    assert instability(noisy(count, seed=seed), CPU) == ()


def test_a_run_that_slows_down_is_unstable_and_says_by_how_much() -> None:
    series = [value * (1 + 0.3 * index / 1000) for index, value in enumerate(noisy(1000))]
    reasons = " ".join(instability(series, CPU))
    assert "slower than the first" in reasons
    assert drift_pct(series) == pytest.approx(20, abs=4)


def test_one_interruption_does_not_condemn_a_run() -> None:
    series = noisy(1000, spread=0.01)
    series[700] = 105.0  # twenty times the others: the plain mean of the last third moves by 6 %
    assert instability(series, CPU) == ()


@pytest.mark.parametrize("count", range(10))
def test_fewer_than_ten_queries_prove_nothing(count: int) -> None:
    assert instability([5.0] * count, CPU) == (f"{count} queries were measured, expected at least 10",)


@pytest.mark.parametrize(("spread", "stable"), [(0.01, True), (0.024, True), (0.03, False), (0.2, False)])
def test_trtexecs_protocols_look_at_the_spread_of_single_queries(spread: float, stable: bool) -> None:
    alternating = [1.0 + spread if index % 2 else 1.0 - spread for index in range(1000)]
    assert (not instability(alternating, TRTEXEC)) is stable


def test_a_hot_gpu_is_unstable_and_a_busy_one_is_not() -> None:
    assert instability([1.0] * 100, GPU, ("sw_power_cap",)) == ()
    assert instability([1.0] * 100, GPU, ("hw_thermal_slowdown",)) == (
        "the GPU clocks were held down: hw_thermal_slowdown",
    )


@given(st.lists(st.floats(1e-6, 1e5), min_size=0, max_size=200), st.sampled_from([CPU, GPU, TRTEXEC]))
def test_any_series_gets_an_answer_in_words(series: list[float], protocol: object) -> None:
    assert all(isinstance(reason, str) for reason in instability(series, protocol))  # type: ignore[arg-type]


@given(st.lists(st.floats(0.1, 100.0), min_size=10, max_size=200), st.sampled_from([1e-3, 1e3]))
def test_the_unit_of_time_does_not_matter(series: list[float], factor: float) -> None:
    scaled = [value * factor for value in series]
    assert drift_pct(scaled) == pytest.approx(drift_pct(series), rel=1e-6, abs=1e-6)
    assert interval_pct(scaled) == pytest.approx(interval_pct(series), rel=1e-3, abs=1.0)


def record(**changes: Any) -> BenchRecord:
    made = BenchRecord(
        engine="e", backend="onnxruntime", device="cpu", batch=1, shapes={}, protocol=CPU, environment=Environment.detect(),
        compute_ms=(5.0,) * 40, wall_s=0.2, started="", queries=40, warmup_queries=1, runtime_info={"threads": "2"},
    )  # fmt: skip
    return replace(made, **changes)


def test_the_advice_for_an_unstable_measurement_goes_by_what_the_machine_shows() -> None:
    two = replace(Environment.detect(), cpu_cores=2)
    busy = advice(record(environment=two, clocks=(Clocks(load_average=7.5),)))
    assert "load average 7.5 on 2 cores" in busy and "`-O intra_op_threads=1`" in busy and "`taskset -c 0" in busy
    pinned = advice(record(environment=two, clocks=(Clocks(load_average=0.1),), runtime_info={"threads": "1"}))
    assert "load average" not in pinned and "intra_op_threads" not in pinned and "taskset" in pinned
    moved = advice(record(device="cuda:0", clocks=(Clocks(sm_mhz=1980), Clocks(sm_mhz=1410))))
    assert "nvidia-smi -lgc" in moved and "taskset" not in moved
    hot = advice(record(device="cuda:0", clocks=(Clocks(sm_mhz=900, throttled=("hw_thermal_slowdown",)),)))
    assert "hw_thermal_slowdown" in hot and "-lgc" not in hot
