"""Large host arrays are copied in chunks by several threads: nothing is lost between two, and nothing goes on after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_arrays import device_of, on_device, on_host, rows
from patience import HANG_S
from trt_engine.config.runtime import Batching
from trt_engine.runtime import staging
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.staging import CopyThreads

Load = Callable[..., InferenceEngine]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 40 bytes for arrays of 60 and more, so that small arrays are large ones; three threads."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 40)
    monkeypatch.setattr(staging, "CHUNKED_BYTES", 60)
    monkeypatch.setattr(CopyThreads.__init__, "__defaults__", (3,))


def kinds(x: np.ndarray) -> list[np.ndarray]:
    """The same values in other layouts."""
    wide = np.zeros((x.shape[0], 6), np.float32)
    wide[:, ::2] = x
    return [x, np.asfortranarray(x), x[::-1].copy()[::-1], wide[:, ::2]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    counts=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.booleans()), min_size=1, max_size=8),
    graphs=st.booleans(),
    contexts=st.sampled_from([(1, 1), (2, 1)]),
)
def test_arrays_of_every_size_and_layout_come_back_whole(
    load: Load, double: Path, counts: list[tuple[int, int, bool]], graphs: bool, contexts: tuple[int, int]
) -> None:
    with load(double, batch=(1, 8, 64), graphs=graphs, contexts=contexts[0], streams=contexts[1]) as engine:
        for number, (count, layout, stays) in enumerate(counts):
            x = kinds(rows(count) + number)[layout]
            for _ in range(3):
                found = engine.infer({"x": x}, on_device=stays)["y"]
                assert np.array_equal(on_host(device_of(engine), found) if stays else found, 2 * x)
            lying = on_device(device_of(engine), np.ascontiguousarray(x))
            assert np.array_equal(engine.infer({"x": lying})["y"], 2 * x)


@pytest.mark.parametrize("buckets", [(), (16, 64)])
@pytest.mark.parametrize("by_driver", [False, True])
def test_batches_of_many_callers_are_gathered(
    load: Load, double: Path, buckets: tuple[int, ...], by_driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "GATHERED", 2 if by_driver else 100)
    monkeypatch.setattr(staging, "GATHERED_BYTES", 1)
    batching = Batching(max_batch=32, max_wait_ms=20.0, buckets=buckets)
    engine = load(double, batch=(1, 8, 64), batching=batching)
    asked = [rows(1 + number % 7) + number for number in range(60)]
    futures = [engine.infer_async({"x": x}) for x in asked]
    for x, future in zip(asked, futures, strict=True):
        assert np.array_equal(future.result(HANG_S)["y"], 2 * x)


def test_the_threads_end_with_the_engine(load: Load, double: Path) -> None:
    before = set(threading.enumerate())
    engine = load(double, batch=(1, 8, 64))
    engine.infer(rows(2))
    assert set(threading.enumerate()) == before
    engine.infer(rows(50))
    assert len(set(threading.enumerate()) - before) in (1, 2, 3)
    engine.close()
    assert set(threading.enumerate()) <= before


def test_what_fails_in_a_chunk_is_raised_when_no_copy_runs_any_more() -> None:
    threads, running = CopyThreads(3), []
    gate = threading.Event()

    def work() -> None:
        running.append(1)
        gate.wait(HANG_S)
        running.pop()

    def fail() -> None:
        gate.set()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        threads.run([work, fail, work, work], lambda number: None)
    assert not running
    done: list[int] = []
    threads.run([lambda: None] * 9, done.append)
    assert sorted(done) == list(range(9))
    threads.close()
