"""The simulation of the batcher: against queueing formulas, and batch by batch against the batcher's own queue."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from trt_engine.config.streams import BatchPolicy, SourceGroup
from trt_engine.errors import UsageError
from trt_engine.runtime.batch_queue import BatchQueue, Request
from trt_engine.verbs.size.arrivals import Sources, read_trace
from trt_engine.verbs.size.simulation import ChainedTimes, ServiceTimes, simulate

Array = npt.NDArray[np.float64]


def constant(*times_ms: float, batches: tuple[int, ...] = (1,)) -> ServiceTimes:
    """Constant times: by batch with one context."""
    return ServiceTimes({(batch, 1): [time_ms] for batch, time_ms in zip(batches, times_ms, strict=True)})


def poisson(rate: float, count: int) -> Array:
    return np.cumsum(np.random.default_rng(3).exponential(1 / rate, count))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_row_of_poisson_arrivals_waits_as_m_d_1(load: float) -> None:
    """Pollaczek-Khinchine: the mean wait is load / (2 (1 - load)) service times."""
    found = simulate(poisson(load, 2_000_000), BatchPolicy(1, 0.0), constant(1000.0), np.random.default_rng(0))
    assert found.latencies_s.mean() == pytest.approx(1 + load / (2 * (1 - load)), rel=0.01)


@pytest.mark.parametrize(("sources", "waits"), [(16, 2), (16, 3), (40, 5)])
def test_periodic_sources_wait_as_n_d_d_1(sources: int, waits: int) -> None:
    """The exact tail of the N*D/D/1 queue (Roberts, Mocci, Virtamo: Broadband Network Teletraffic, 1996, part III): a frame
    sees the workload of the other N - 1 sources. Draws of phases stand apart; the second period is stationary."""
    period, draws = 20.0 * sources / 16, 100_000
    rng = np.random.default_rng(1)
    phases = np.sort(rng.random((draws, sources)) * period, axis=1)
    starts = np.arange(draws)[:, None, None] * 10 * period + np.arange(2)[None, :, None] * period
    times = (starts + phases[:, None, :]).ravel()
    found = simulate(times, BatchPolicy(1, 0.0), constant(1000.0), rng)
    second = found.latencies_s.reshape(draws, 2, sources)[:, 1]
    others = sources - 1
    tail = sum(
        math.comb(others, n)
        * ((n - waits) / period) ** n
        * (1 - (n - waits) / period) ** (others - n)
        * (period - others + waits)
        / (period - n + waits)
        for n in range(waits + 1, others + 1)
    )
    assert np.mean(second - 1 > waits) == pytest.approx(tail, rel=0.01)


def test_a_batch_that_always_fills_waits_for_its_last_row() -> None:
    times = np.arange(8000) * 0.01
    found = simulate(times, BatchPolicy(8, 1000.0), constant(1.0, batches=(8,)), np.random.default_rng(0))
    assert set(found.batch_rows) == {8}
    assert found.latencies_s[:8] == pytest.approx([0.07 - 0.01 * row + 0.001 for row in range(8)])


def queued_batches(times: Array, policy: BatchPolicy, service_s: float) -> list[int]:
    """Rows of each batch of the batcher's own queue, in virtual time with constant batch times."""
    queue, free, rows = BatchQueue(policy.max_batch), [-math.inf] * policy.contexts, []
    now, wait_s, coming = -math.inf, policy.max_wait_ms / 1e3, [*times.tolist()]
    while coming or len(queue):
        ready = min(free)
        next_s = min(coming[0] if coming else math.inf, max(queue.next_event_s(), ready))
        now = max(now, next_s)
        while coming and coming[0] <= now:
            at = coming.pop(0)
            queue.add(Request({}, 1, 0, "rows", Future(), at, at + wait_s, rank=at))
        while min(free) <= now and (batch := queue.take_batch(now)):
            free[free.index(min(free))] = now + service_s
            rows.append(len(batch))
        if not coming and len(queue) and min(free) > now:
            now = min(free)
        elif len(queue) and min(free) > now and (not coming or coming[0] > min(free)):
            now = min(free)
            while min(free) <= now and (batch := queue.take_batch(now)):
                free[free.index(min(free))] = now + service_s
                rows.append(len(batch))
    return rows


@pytest.mark.parametrize("contexts", [1, 2, 3])
@pytest.mark.parametrize(("batch", "wait_ms"), [(1, 0.0), (4, 0.0), (4, 7.0), (16, 30.0), (3, 1000.0)])
@pytest.mark.parametrize("rate", [40.0, 300.0])
def test_batches_are_those_of_the_batchers_own_queue(batch: int, wait_ms: float, contexts: int, rate: float) -> None:
    policy, times = BatchPolicy(batch, wait_ms, contexts), poisson(rate, 1500)
    service = ServiceTimes({(size, busy): [9.7] for size in (1, batch) for busy in {1, contexts}})
    found = simulate(times, policy, service, np.random.default_rng(0))
    assert found.batch_rows.tolist() == queued_batches(times, policy, 9.7e-3)


def test_busy_contexts_share_the_device() -> None:
    """One batch alone takes 1 s, two together 2 s each: the second begins at half of the first."""
    service = ServiceTimes({(1, 1): [1000.0], (1, 2): [2000.0]})
    found = simulate(np.array([0.0, 0.5]), BatchPolicy(1, 0.0, 2), service, np.random.default_rng(0))
    assert found.latencies_s == pytest.approx([1.5, 1.5])


def test_times_between_measured_batches_are_interpolated_and_below_the_first_padded() -> None:
    service = constant(10.0, 40.0, batches=(2, 8))
    assert [service.mean_s(rows) for rows in (1, 2, 4, 8)] == pytest.approx([0.010, 0.010, 0.020, 0.040])
    assert service.rows_per_s(BatchPolicy(8, 0.0)) == pytest.approx(200.0)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_second_model_on_the_crops_of_each_frame_makes_one_longer_service(load: float) -> None:
    """Constant times: M/D/1 with the sum of the detector's time and that of all its crops' batches."""
    service = ChainedTimes(constant(400.0), constant(100.0, 250.0, batches=(1, 4)), crops=5)
    whole_s = 0.4 + 0.25 + 0.1  # five crops are a batch of four and one of one
    found = simulate(poisson(load / whole_s, 2_000_000), BatchPolicy(1, 0.0), service, np.random.default_rng(0))
    assert found.latencies_s.mean() == pytest.approx(whole_s * (1 + load / (2 * (1 - load))), rel=0.01)


def test_crops_of_a_batch_run_in_the_second_models_batches() -> None:
    second = ServiceTimes({(batch, busy): [busy * 10.0 * batch] for batch in (1, 8) for busy in (1, 2)})
    first = ServiceTimes({(batch, busy): [busy * 100.0] for batch in (1, 16) for busy in (1, 2)})
    service = ChainedTimes(first, second, crops=3)
    assert service.mean_s(16) == pytest.approx(0.1 + 48 * 0.01)
    assert service.mean_s(16, 2) == pytest.approx(0.2 + 48 * 0.02)
    with pytest.raises(UsageError, match="has 1 contexts, that of the frames 2"):
        ChainedTimes(first, constant(1.0), crops=1)


def test_a_policy_beyond_the_curve_is_refused() -> None:
    with pytest.raises(UsageError, match="the curve ends at batch 2"):
        simulate(np.array([0.0]), BatchPolicy(4, 0.0), constant(1.0, batches=(2,)), np.random.default_rng(0))


# ------------------------------------------------------------------------------------------------ arrivals


def test_sources_keep_their_rates_and_phases() -> None:
    sources = Sources((SourceGroup(30, 25.0), SourceGroup(10, 2.0)))
    times = sources.arrivals(20.0, np.random.default_rng(0))
    assert times.size == pytest.approx(20 * (30 * 25 + 10 * 2), abs=40)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < 20
    assert sources.frames_per_s == 770


@pytest.mark.parametrize("count", [0, 1, 7, 100, 1001])
def test_a_scaled_mix_has_the_number_and_keeps_the_proportion(count: int) -> None:
    mix = Sources((SourceGroup(200, 25.0), SourceGroup(50, 30.0), SourceGroup(1, 1.0)))
    scaled = mix.scaled(count)
    assert scaled.count == count
    for group, whole in zip(scaled.groups, mix.groups, strict=True):
        assert abs(group.count - whole.count * count / mix.count) < 1


def test_jitter_moves_frames_and_loses_none_in_the_middle() -> None:
    plain = Sources((SourceGroup(50, 20.0),))
    moved = Sources((SourceGroup(50, 20.0),), jitter_ms=10.0)
    one, other = (sources.arrivals(10.0, np.random.default_rng(5)) for sources in (plain, moved))
    assert abs(one.size - other.size) <= 50
    assert (np.diff(other) >= 0).all()
    assert not np.array_equal(one[:1000], other[:1000])


@pytest.mark.parametrize("text", ["", "1.0", "2 1", "a b", "nan 1", "1 1 1"])
def test_a_file_that_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.txt"
    file.write_text(text)
    with pytest.raises(UsageError):
        read_trace(file)


def test_a_trace_keeps_its_bursts(tmp_path: Path) -> None:
    file = tmp_path / "trace.txt"
    file.write_text("\n".join(map(str, [0.0, 0.001, 0.002, 0.2, 0.201, 0.202, 0.4])))
    sources = Sources((SourceGroup(1, 15.0),), gaps=read_trace(file))
    gaps = np.diff(sources.arrivals(60.0, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(1 / 15, rel=0.02)
    assert np.mean(gaps < 0.002) == pytest.approx(2 / 3, abs=0.02)
