"""The child that drives the batcher, in this process: full batches, errors, paced frames."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from onnx_models import two_inputs
from trt_engine.config.streams import BatchPolicy
from trt_engine.engine import Engine
from trt_engine.errors import MemoryExhausted
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.metered_runner import MeteredRunner
from trt_engine.tensors import Signature, Tensors, TensorSpec
from trt_engine.verbs.size import curve
from trt_engine.verbs.size.curve import CurveGrid, measure_host_curve, usable_points
from trt_engine.verbs.size.stream_worker import (
    CurveRequest,
    DriveRequest,
    drive,
    full_batches_ms,
    measure_curve,
    warm_up,
)


class Doubling(RunnerBase):
    """`y = 2 x` for rows of 4; out of memory above `most` rows."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.signature = Signature(
            (TensorSpec("x", "float32", (-1, 4), ("batch", None)),),
            (TensorSpec("y", "float32", (-1, 4), ("batch", None)),),
        )
        self.most = most
        self.sizes: list[int] = []

    def run(self, feeds: Tensors) -> dict[str, Any]:
        rows = len(feeds["x"])
        self.sizes.append(rows)
        if rows > self.most:
            raise MemoryExhausted("out of memory", hint="a smaller batch")
        return {"y": 2 * np.asarray(feeds["x"])}

    def close(self) -> None:
        raise AssertionError("the runner has another owner")


@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("batch", [1, 4])
def test_every_sample_is_of_a_full_batch(batch: int, contexts: int) -> None:
    runner = Doubling()
    times_ms = full_batches_ms(runner, batch, contexts, duration_s=0.0)
    assert set(runner.sizes) == {batch}
    assert len(times_ms) >= 8 * contexts
    assert min(times_ms) > 0


def test_paced_frames_come_back_with_their_latency_or_dropped() -> None:
    times_s = tuple(np.linspace(0, 0.05, 60).tolist())
    driven = drive(Doubling(), DriveRequest(BatchPolicy(4, 1.0), times_s, max_rows_waiting=1000))
    latencies_s = driven.latencies_s
    assert sum(rows for rows, _ in driven.batches) == len(latencies_s) == 60
    assert all(time_s > 0 for _, time_s in driven.batches)
    assert all(latency is not None and latency > 0 for latency in latencies_s)


def test_frames_beyond_the_queue_are_dropped_not_lost() -> None:
    """All at once, batches of 64 wait for a minute unless full, and 8 rows may wait: the close runs those."""
    latencies_s = drive(Doubling(), DriveRequest(BatchPolicy(64, 6e4), (0.0,) * 20, max_rows_waiting=8)).latencies_s
    assert sum(latency is None for latency in latencies_s) == 12


def test_a_timed_runner_counts_cycles_by_thread() -> None:
    timed = MeteredRunner(Doubling())
    timed.starts = {1: [(0.0, 2), (0.5, 2), (0.6, 1), (1.0, 2)], 2: [(0.0, 2), (0.2, 2)]}
    assert timed.cycles_ms(2) == pytest.approx([500.0, 100.0, 200.0])


# ------------------------------------------------------------------------------------------------ graphs


@pytest.fixture
def captured(tmp_path: Path) -> Engine:
    """A sum on a fake device, which captures graphs."""
    return te.build(
        two_inputs(tmp_path / "sum.onnx"), out=tmp_path / "sum.fake", backend="fake", device="fake:0",
        batch=(1, 2, 4), parity=False, store=te.Store(tmp_path / "store"),
    )  # fmt: skip


def test_every_size_is_captured_before_it_is_timed_or_driven(captured: Engine) -> None:
    with te.load(captured, contexts=2, graphs=(1, 2, 3, 4)) as engine:
        warm_up(engine, (1, 2, 3, 4))
        cells = measure_curve(engine.runner, CurveRequest((1, 2, 3, 4), (1, 2), turns=2, turn_s=0.0, longest_ms=1e9))
        times_s = tuple(np.linspace(0, 0.05, 60).tolist())
        drive(engine.runner, DriveRequest(BatchPolicy(4, 1.0, 2), times_s, max_rows_waiting=1000))
        pool = engine.stats().pool
    assert len(cells) == 8
    assert pool is not None and (pool.graphs.captured, pool.graphs.evicted) == (8, 0)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_child_measures_with_graphs_of_the_grids_sizes_and_records_it(captured: Engine, graphs: bool) -> None:
    grid = CurveGrid((1, 3, 4), (1,), 0.01, 1e9, graphs=graphs)
    points = measure_host_curve(captured, grid, te.RuntimeConfig(), "fake:0")
    assert [(point.batch, point.graphs) for point in points] == [(batch, "on" if graphs else "") for batch in (1, 3, 4)]
    here = dataclasses.replace(grid, graphs=not graphs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curve, "detect_environment", lambda device: points[0].environment)
        assert usable_points(points, captured, "fake:0", "host", grid) == points
        assert usable_points(points, captured, "fake:0", "host", here) == [], "measured otherwise"


def test_sizes_out_of_memory_are_left_out_though_the_batcher_would_split_them() -> None:
    cells = measure_curve(Doubling(most=2), CurveRequest((1, 2, 4, 8), (1,), turns=2, turn_s=0.0, longest_ms=1e9))
    assert [(cell.batch, len(cell.turns_ms)) for cell in cells] == [(1, 2), (2, 2)]
