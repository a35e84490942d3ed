"""Graphs of the fake device, which refuses to replay what has changed: captured, replayed, padded, dropped, refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trt_engine.backends.fake.run import FakeContext, FakeSession
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.device.fake import FakeStream
from trt_engine.errors import MemoryExhausted, UsageError
from trt_engine.runtime.cuda_graph_policy import GraphStats, graph_sizes, joined_graph_sizes
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Signature, TensorSpec

Load = Callable[..., InferenceEngine]


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return (np.arange(count * 3, dtype=np.float32) + np.float32(start)).reshape(count, 3)


def answers(engine: InferenceEngine, count: int, start: float = 0.0) -> bool:
    y = engine.infer(rows(count, start))["y"]
    return y.shape == (count, 3) and np.array_equal(y, 2 * rows(count, start))


def graphs(engine: InferenceEngine) -> GraphStats:
    found = engine.stats().pool
    assert found is not None
    return found.graphs


def test_a_shape_is_captured_once_and_replayed_from_then_on(load: Load, double: Path) -> None:
    engine = load(double, graphs=True)
    assert not engine.is_captured(rows(2))
    assert all(answers(engine, 2, start) for start in (0, 10, 20))
    assert engine.is_captured(rows(2))
    assert (graphs(engine).captured, graphs(engine).replayed) == (1, 2)


def test_batches_are_filled_up_to_captured_sizes_and_callers_do_not_notice(load: Load, double: Path) -> None:
    engine = load(double, graphs=(2, 4))
    for count in (4, 3, 2, 1, 3):
        assert answers(engine, count)
    assert graphs(engine).captured == 2
    assert engine.is_captured(rows(3))


def test_without_sizes_batches_are_filled_up_to_powers_of_two_within_the_profile(load: Load, double: Path) -> None:
    engine = load(double, graphs=True, batch=(1, 4, 6))
    for count in (3, 4, 5, 6, 5):  # 8 is beyond the profile: 5 and 6 are graphs of their own
        assert answers(engine, count)
    # growing from four rows to five and from five to six took the addresses of the smaller ones
    assert graphs(engine).evicted == 2
    assert graphs(engine).captured == 4


def test_the_least_recently_used_graph_makes_room(load: Load, double: Path) -> None:
    engine = load(double, graphs=True, max_graphs=2)
    for count in (4, 2, 4, 1):
        assert answers(engine, count)
    assert [engine.is_captured(rows(count)) for count in (4, 2, 1)] == [True, False, True]
    assert graphs(engine).evicted == 1


def test_growing_a_buffer_forgets_graphs_that_hold_its_old_address(load: Load, double: Path) -> None:
    engine = load(double, graphs=True)
    for count in (1, 4, 1, 1):
        assert answers(engine, count)
    assert (graphs(engine).captured, graphs(engine).evicted) == (3, 1)


def test_a_capture_that_is_refused_is_explained_once_and_inference_goes_on(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise UsageError("an operator waits for the stream while it is captured")

    monkeypatch.setattr(FakeStream, "capture", refuses)
    engine = load(double, graphs=True)
    with caplog.at_level(logging.WARNING, "trt_engine"):
        assert all(answers(engine, count) for count in (2, 1, 3))
    assert graphs(engine).disabled_reason == "an operator waits for the stream while it is captured"
    assert engine.runtime_info["graphs"].startswith("none: an operator waits")
    assert caplog.text.count("no graph could be captured") == 1
    monkeypatch.undo()
    engine.reset_graphs()
    answers(engine, 2)
    assert engine.is_captured(rows(2))


def test_outputs_that_depend_on_the_data_are_answered_without_a_graph(load: Load, positions: Path) -> None:
    engine = load(positions, graphs=True)
    for _ in range(2):
        assert engine.infer({"x": np.eye(3, dtype=np.float32)})["where"].shape == (2, 3)
    assert "depend on the data" in str(graphs(engine).disabled_reason)


def test_a_first_run_that_fails_leaves_no_context_behind(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape to be captured runs in a context of its own first; the session would refuse to close under it."""
    engine = load(double, graphs=True)
    enqueue = FakeContext.enqueue

    def fail(*_: object) -> None:
        raise RuntimeError("the engine raised")

    monkeypatch.setattr(FakeContext, "enqueue", fail)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            engine.infer(rows(2))
    monkeypatch.setattr(FakeContext, "enqueue", enqueue)
    assert engine._pool is not None
    session = engine._pool._session
    assert isinstance(session, FakeSession)
    assert len(session._open) == 1
    assert answers(engine, 2)
    engine.close()


def test_memory_that_does_not_suffice_for_a_graph_leaves_the_others_working(load: Load, double: Path) -> None:
    engine = load(double, graphs=True, memory="60B")  # two buffers of two rows
    assert answers(engine, 2)
    with pytest.raises(MemoryExhausted):
        engine.infer(rows(4))
    assert answers(engine, 2)
    assert answers(engine, 2)
    assert engine.is_captured(rows(2))


def test_warm_up_captures_in_every_context(load: Load, double: Path) -> None:
    engine = load(double, graphs=True, contexts=3)
    engine.warmup(1, batch=2)
    assert graphs(engine).captured == 3


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 10, 60, 64, 100, 256])
def test_at_most_a_third_of_a_batch_is_padding_and_every_size_keeps_its_graph(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[0] == 1 and sizes[-1] == most and len(sizes) <= 16
    for rows in range(1, most + 1):
        padded = next(size for size in sizes if size >= rows)
        assert (padded - rows) / padded < 1 / 3


def test_sizes_that_are_too_many_or_that_the_engine_does_not_take_are_left_out() -> None:
    assert graph_sizes(12) == (1, 2, 3, 4, 6, 8, 12)
    assert len(graph_sizes(4096)) == 16 and graph_sizes(4096)[-1] == 4096
    assert graph_sizes(300)[:3] == (1, 2, 4), "the smallest between two powers of two goes first"
    assert graph_sizes(64, max_graphs=3) == (16, 32, 64)
    assert graph_sizes(8, [(4, 8)]) == (4, 6, 8)
    assert graph_sizes(8, [(8, 8)]) == (8,)
    assert graph_sizes(4, [(8, 8)]) == ()


def test_only_an_engine_whose_batch_alone_varies_has_sizes_to_join_to() -> None:
    def sizes(shape: tuple[int, ...], most: int | None = None, span: ShapeRange | None = None) -> tuple[int, ...]:
        spec = TensorSpec("x", "float32", shape, ("batch", *[None] * (len(shape) - 1)))
        profiles = [Profile({"x": span})] if span else []
        return joined_graph_sizes(Signature((spec,), (spec,)), profiles, most)

    assert sizes((-1, 3), 4) == (1, 2, 3, 4)
    assert sizes((-1, 3))[-1] == 32, "the batcher's own default"
    assert sizes((-1, 3), span=ShapeRange((1, 3), (2, 3), (6, 3))) == (1, 2, 3, 4, 6)
    assert sizes((-1, -1), 4) == ()
    assert sizes((-1, -1), 4, ShapeRange((1, 5), (2, 5), (4, 5))) == (1, 2, 3, 4)
    assert sizes((-1, -1), 4, ShapeRange((1, 5), (2, 5), (4, 9))) == ()
    assert sizes((4, 3)) == (4,)


def test_changing_batches_replay_the_graphs_of_a_warm_up_from_the_largest_on(load: Load, double: Path) -> None:
    engine = load(double, graphs=(1, 2, 3, 4), contexts=2)
    for size in (4, 3, 2, 1):
        engine.warmup(batch=size)
    assert graphs(engine).captured == 8 and graphs(engine).evicted == 0
    assert all(answers(engine, count) for count in (1, 3, 2, 4, 1, 4))
    assert (graphs(engine).captured, graphs(engine).replayed) == (8, 6)
