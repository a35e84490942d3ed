"""Arrays that lie on the device: bound as they are, given back as they are, told apart from those that do not."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_arrays import device_of, on_device, on_host, rows
from trt_engine.backends.fake.run import FakeContext
from trt_engine.config.runtime import Batching
from trt_engine.device.fake import FakeDevice, FakeStream
from trt_engine.errors import FeedError, MemoryExhausted, UsageError
from trt_engine.runtime.cuda_graph_policy import GraphStats
from trt_engine.runtime.inference_engine import InferenceEngine

Load = Callable[..., InferenceEngine]


@pytest.mark.parametrize("graphs", [False, True])
def test_feeds_on_the_device_are_taken_as_they_lie(load: Load, double: Path, graphs: bool) -> None:
    engine = load(double, graphs=graphs)
    x = on_device(device_of(engine), rows(2))
    served = device_of(engine).memory().allocated_count
    for _ in range(3):
        assert np.array_equal(engine.infer({"x": x})["y"], 2 * rows(2))
    assert device_of(engine).memory().allocated_count == served + 2  # the lane's own, once


def test_outputs_stay_on_the_device_and_belong_to_the_caller(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    kept = engine.infer(rows(2), on_device=True)["y"]
    other = engine.infer({"x": kept}, on_device=True)["y"]  # from one inference to the next without the host
    engine.infer(rows(4))
    assert np.array_equal(on_host(device, kept), 2 * rows(2))
    assert np.array_equal(on_host(device, other), 4 * rows(2))
    timed = engine.infer(rows(2), on_device=True, result=True)
    assert np.array_equal(on_host(device, timed.outputs["y"]), 2 * rows(2))
    assert timed.latency_ms > 0


class Capsule:
    """A capsule alone: the array it is of was dropped."""

    def __init__(self, array: object) -> None:
        self._capsule, self._place, self.shape = array.__dlpack__(), array.__dlpack_device__(), array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place

    def __dlpack__(self, **_: object) -> object:
        return self._capsule


def test_an_array_of_another_device_is_refused(load: Load, double: Path) -> None:
    other = FakeDevice(7)
    with pytest.raises((FeedError, UsageError), match="another device"):
        load(double).infer({"x": on_device(other, rows(2))})


def test_a_batcher_joins_on_the_host_alone(load: Load, double: Path) -> None:
    engine = load(double, batching=Batching(max_batch=4))
    with pytest.raises(UsageError, match="no batching"):
        engine.infer(rows(1), on_device=True)
    with pytest.raises(FeedError):
        engine.infer({"x": on_device(FakeDevice(0), rows(2))})
    assert np.array_equal(engine.infer(rows(1))["y"], 2 * rows(1))


@pytest.mark.parametrize("prebound", [True, False])
def test_the_short_way_gives_what_the_long_way_gives(
    load: Load, double: Path, prebound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeContext, "can_prebind", prebound)
    engine = load(double)
    device = device_of(engine)
    for count in (2, 3, 2, 2, 2, 3, 3):
        x = rows(count) + count
        assert np.array_equal(engine.infer({"x": x})["y"], 2 * x)
        kept = engine.infer({"x": on_device(device, x)}, on_device=True)["y"]
        assert np.array_equal(engine.infer({"x": kept})["y"], 4 * x)
        assert np.array_equal(on_host(device, kept), 2 * x)
        assert np.array_equal(on_host(device, engine.infer({"x": x}, on_device=True)["y"]), 2 * x)


@pytest.mark.parametrize("graphs", [False, True])
def test_kept_outputs_are_not_written_by_later_inferences_and_dropped_ones_give_their_memory_to_others(
    load: Load, double: Path, graphs: bool
) -> None:
    engine = load(double, graphs=graphs)
    device = device_of(engine)
    x = on_device(device, rows(2))
    kept = [engine.infer({"x": x}, on_device=True)["y"]]
    for number in range(40):
        other = engine.infer({"x": rows(2) + number}, on_device=True)["y"]
        if number % 4 == 0:
            kept.append(other)
    assert np.array_equal(on_host(device, kept[0]), 2 * rows(2))
    for place, array in enumerate(kept[1:]):
        assert np.array_equal(on_host(device, array), 2 * (rows(2) + 4 * place))
    held = device.memory().allocated_bytes
    for number in range(200):
        engine.infer({"x": rows(2) + number}, on_device=True)
    assert device.memory().allocated_bytes == held


def test_a_full_device_fails_the_inference_that_finds_no_room_and_not_the_one_before(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    kept = []
    with pytest.raises(MemoryExhausted):
        for number in range(10_000):
            kept.append(engine.infer({"x": rows(2) + number}, on_device=True)["y"])
            if number == 20:
                device.limit_bytes = device.memory().allocated_bytes
    assert len(kept) >= 21
    for number, array in enumerate(kept):
        assert np.array_equal(on_host(device, array), 2 * (rows(2) + number))
    kept.clear()
    assert np.array_equal(on_host(device, engine.infer({"x": rows(2)}, on_device=True)["y"]), 2 * rows(2))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=30),
    graphs=st.booleans(),
    streams=st.sampled_from([(1, None), (2, None), (2, 1)]),
)
def test_whatever_was_asked_before_and_wherever_it_lies_the_answer_is_the_same(
    load: Load, double: Path, asked: list[tuple[int, bool, bool, bool]], graphs: bool, streams: tuple[int, int | None]
) -> None:
    with load(double, graphs=graphs, contexts=streams[0], streams=streams[1]) as engine:
        device, kept = device_of(engine), []
        for number, (count, lies, stays, keeps) in enumerate(asked):
            x = rows(count) + number
            found = engine.infer({"x": on_device(device, x) if lies else x}, on_device=stays)["y"]
            assert np.array_equal(on_host(device, found) if stays else found, 2 * x)
            if stays and keeps:
                kept.append((found, x))
        for array, x in kept:
            assert np.array_equal(on_host(device, array), 2 * x)


@pytest.mark.parametrize("graphs", [False, True])
def test_after_a_failure_on_the_shortest_way_the_next_answer_is_right(load: Load, double: Path, graphs: bool) -> None:
    engine = load(double, graphs=graphs)
    device = device_of(engine)
    engine.infer(rows(2))  # captured, where graphs are
    x, wrong = on_device(device, rows(2)), on_device(device, rows(2))
    for _ in range(3):
        engine.infer({"x": x}, on_device=True)
    wrong.buffer.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="freed buffer"):
            engine.infer({"x": wrong}, on_device=True)
        assert np.array_equal(on_host(device, engine.infer({"x": x}, on_device=True)["y"]), 2 * rows(2))
    assert engine.stats().failures == 2


def test_outputs_of_shapes_that_are_forgotten_give_their_memory_back_without_the_collector(
    load: Load, double: Path
) -> None:
    engine = load(double, batch=(1, 2, 400))
    device = device_of(engine)
    gc.collect()
    gc.disable()
    try:
        held = set()
        for number in range(24):
            for count in (300, 400):
                for _ in range(3):
                    engine.infer({"x": on_device(device, rows(count))}, on_device=True)
            if number > 3:
                held.add(device.memory().allocated_bytes)
        assert len(held) == 1
    finally:
        gc.enable()


def test_who_keeps_a_buffer_a_part_of_it_or_a_capsule_keeps_the_output(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    engine.infer({"x": rows(2)}, on_device=True)  # the next one goes the short way

    def asked(number: int) -> object:
        return engine.infer({"x": rows(2) + number}, on_device=True)["y"]

    kept = [asked(0), asked(1).buffer, asked(2).buffer.view(0, 24), Capsule(asked(3))]
    for number in range(4, 40):
        asked(number)
    assert np.array_equal(on_host(device, kept[0]), 2 * rows(2))
    assert np.array_equal(on_host(device, kept[1].array("float32", (2, 3))), 2 * (rows(2) + 1))
    assert np.array_equal(on_host(device, kept[2].array("float32", (2, 3))), 2 * (rows(2) + 2))
    assert np.array_equal(on_host(device, kept[3]), 2 * (rows(2) + 3))


def test_an_output_whose_buffer_somebody_closed_is_not_given_out_again(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    for number in range(40):
        output = engine.infer({"x": rows(2) + number}, on_device=True)["y"]
        assert np.array_equal(on_host(device, output), 2 * (rows(2) + number))
        output.buffer.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_memory_for_outputs_does_not_grow_with_the_number_of_their_sizes(
    load: Load, double: Path, graphs: bool
) -> None:
    engine = load(double, batch=(1, 2, 200), graphs=graphs)
    device = device_of(engine)
    engine.infer(rows(200))
    kept = {count: engine.infer({"x": rows(count)}, on_device=True)["y"] for count in (200, 1, 77)}
    for count in range(1, 200):
        found = engine.infer({"x": rows(count)}, on_device=True)["y"]
        assert np.array_equal(on_host(device, found), 2 * rows(count))
        del found
    assert device.memory().allocated_count < 50
    for count, array in kept.items():
        assert np.array_equal(on_host(device, array), 2 * rows(count))


def lent_whole(output: object, stream: int) -> None:
    output.__dlpack__(stream=stream)


def lent_in_part(output: object, stream: int) -> None:
    output.buffer.view(0, 24).array("float32", (2, 3)).__dlpack__(stream=stream)


@pytest.mark.parametrize("lent", [lent_whole, lent_in_part])
@pytest.mark.parametrize("held", [0, 1, 2])
@pytest.mark.parametrize("graphs", [False, True])
def test_an_output_that_was_dropped_is_not_written_before_another_librarys_stream_has_read_it(
    load: Load, double: Path, graphs: bool, held: int, lent: Callable[[object, int], None]
) -> None:
    """As torch reads: the kernel is launched, the tensor dropped, the next inference asked for."""
    engine = load(double, graphs=graphs)
    device = device_of(engine)
    elsewhere, found, kept = device.stream(), [], []

    def read(address: int) -> None:
        memory = FakeDevice.buffer_at(address).memory()[:24]
        found.append(memory.view(np.float32).reshape(2, 3).copy())

    for number in range(30):
        output = engine.infer({"x": rows(2) + number}, on_device=True)["y"]
        lent(output, elsewhere.handle)
        elsewhere.enqueue(functools.partial(read, output.buffer.pointer))
        kept = [output, *kept][:held]
        del output
    elsewhere.synchronize()
    for number, array in enumerate(found):
        assert np.array_equal(array, 2 * (rows(2) + number))
    assert len(found) == 30


@pytest.mark.parametrize("graphs", [False, True])
def test_an_output_that_was_dropped_outlives_the_engine_until_another_librarys_stream_has_read_it(
    load: Load, double: Path, graphs: bool
) -> None:
    engine = load(double, graphs=graphs)
    device = device_of(engine)
    engine.infer(rows(2))
    elsewhere, found = device.stream(), []

    def read(memory: np.ndarray) -> None:
        found.append(memory[:24].view(np.float32).reshape(2, 3).copy())

    for number in range(5):
        output = engine.infer({"x": rows(2) + number}, on_device=True)["y"]
        output.__dlpack__(stream=elsewhere.handle)
        elsewhere.enqueue(functools.partial(read, FakeDevice.buffer_at(output.buffer.pointer).memory()))
        del output
    engine.close()
    elsewhere.synchronize()
    assert len(found) == 5
    for number, array in enumerate(found):
        assert np.array_equal(array, 2 * (rows(2) + number))


@pytest.mark.parametrize("graphs", [False, True])
def test_what_another_library_writes_into_an_output_in_its_place_is_seen_by_the_next_inference(
    load: Load, double: Path, graphs: bool
) -> None:
    """As torch writes: `torch.from_dlpack(output).add_(1)`, and the output is fed."""
    engine = load(double, graphs=graphs)
    device = device_of(engine)
    elsewhere = device.stream()

    def add_one(memory: np.ndarray) -> None:
        memory[:24].view(np.float32)[:] += 1

    for number in range(5):
        output = engine.infer({"x": rows(2) + number}, on_device=True)["y"]
        output.__dlpack__(stream=elsewhere.handle)
        elsewhere.enqueue(functools.partial(add_one, FakeDevice.buffer_at(output.buffer.pointer).memory()))
        assert np.array_equal(engine.infer({"x": output})["y"], 2 * (2 * (rows(2) + number) + 1))


@pytest.mark.parametrize("first", ["device", "host"])
@pytest.mark.parametrize("stays", [False, True])
def test_arrays_of_the_device_and_of_the_host_share_one_graph_captured_by_the_first(
    load: Load, double: Path, first: str, stays: bool
) -> None:
    engine = load(double, graphs=True)
    device = device_of(engine)
    for number in range(6):
        x = rows(2) + number
        fed = on_device(device, x) if (number % 2 == 0) == (first == "device") else x
        found = engine.infer({"x": fed}, on_device=stays)["y"]
        assert np.array_equal(on_host(device, found) if stays else found, 2 * x)
        assert engine.is_captured({"x": fed})
    assert graph_stats(engine).captured == 1
    assert graph_stats(engine).replayed == 5


@pytest.mark.parametrize("stays", [False, True])
def test_arrays_of_the_device_are_padded_on_the_device_to_a_captured_batch(
    load: Load, double: Path, stays: bool
) -> None:
    engine = load(double, graphs=(4, 16), batch=(1, 4, 16))
    device = device_of(engine)
    for count in (3, 5, 1, 16, 4, 3, 7):
        x = rows(count) + count
        found = engine.infer({"x": on_device(device, x)}, on_device=stays)["y"]
        assert np.array_equal(on_host(device, found) if stays else found, 2 * x)
        assert engine.is_captured({"x": on_device(device, x)})
    assert graph_stats(engine).captured == 3  # of 4, of 16, and of 4 again, whose buffers the 16 had replaced


def graph_stats(engine: InferenceEngine) -> GraphStats:
    found = engine.stats().pool
    assert found is not None
    return found.graphs


def counted(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """One entry for each call of this method from now on."""
    calls: list[str] = []
    plain = getattr(kind, name)

    def call(*args: object, **named: object) -> object:
        calls.append(name)
        return plain(*args, **named)

    monkeypatch.setattr(kind, name, call)
    return calls


def test_a_graph_on_the_callers_memory_copies_nothing(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(double, graphs=True)
    device = device_of(engine)
    arrays = [on_device(device, rows(2) + number) for number in range(2)]
    for _ in range(4):
        for array in arrays:
            engine.infer({"x": array}, on_device=True)
    copies = counted(monkeypatch, FakeDevice, "copy")
    for _ in range(3):
        for number, array in enumerate(arrays):
            found = engine.infer({"x": array}, on_device=True)["y"]
            assert not copies
            assert np.array_equal(on_host(device, found), 2 * (rows(2) + number))
            del found
            copies.clear()  # reading the values copied
    assert engine.stats().pool.graphs.captured == 1


def test_callers_of_many_addresses_get_few_graphs_and_right_answers(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(double, graphs=True)
    device = device_of(engine)
    captures = counted(monkeypatch, FakeStream, "capture")
    arrays = [on_device(device, rows(2) + number) for number in range(40)]
    for _ in range(3):
        for number, array in enumerate(arrays):
            found = engine.infer({"x": array}, on_device=True)["y"]
            assert np.array_equal(on_host(device, found), 2 * (rows(2) + number))
    assert len(captures) == 1 + 8
    for number in range(5):  # a smaller shape ends no graph of the first
        assert np.array_equal(engine.infer(rows(1) + number)["y"], 2 * (rows(1) + number))
    again = len(captures)
    for number, array in enumerate(arrays):
        assert np.array_equal(on_host(device, engine.infer({"x": array}, on_device=True)["y"]), 2 * (rows(2) + number))
    assert len(captures) == again == 1 + 8 + 1


def test_without_a_graph_on_the_callers_memory_the_first_graph_goes_on(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(double, graphs=True)
    device = device_of(engine)
    x = on_device(device, rows(2))
    engine.infer({"x": x}, on_device=True)

    def refused(self: FakeContext, *_: object, **__: object) -> None:
        raise RuntimeError("no binding")

    monkeypatch.setattr(FakeContext, "prebind", refused)
    for _ in range(6):
        assert np.array_equal(on_host(device, engine.infer({"x": x}, on_device=True)["y"]), 2 * rows(2))
    assert engine.is_captured({"x": x})
    assert engine.stats().pool.graphs.disabled_reason is None
