"""Calls on fixed memory: they compute what `infer` computes, in the caller's arrays, and refuse what cannot work."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from device_arrays import device_of, on_device, on_host, rows
from patience import HANG_S, until
from trt_engine.backends.fake.run import FakeContext
from trt_engine.device.fake import FakeDevice, FakeStream
from trt_engine.errors import DeadlineExpired, DeviceLost, FeedError, UsageError
from trt_engine.runtime.inference_engine import InferenceEngine

Load = Callable[..., InferenceEngine]
KINDS = ["device", "numpy", "pinned"]


def pinned(device: FakeDevice, array: np.ndarray) -> np.ndarray:
    made = device.pinned(array.nbytes).array(array.dtype.name, array.shape)
    made[...] = array
    return made


def placed(device: FakeDevice, array: np.ndarray, kind: str) -> object:
    if kind == "device":
        return on_device(device, array)
    return pinned(device, array) if kind == "pinned" else array.copy()


def values(device: FakeDevice, array: object) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else on_host(device, array)


def change(device: FakeDevice, array: object, new: np.ndarray) -> None:
    """Write new values into the same memory, and wait."""
    if isinstance(array, np.ndarray):
        array[...] = new
        return
    stream = device.stream()
    device.upload(new, array.buffer, stream)
    stream.synchronize()
    stream.close()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("contexts", [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("taken", [*KINDS, None])
def test_each_call_reads_the_inputs_anew_and_writes_the_outputs_in_their_place(
    load: Load, double: Path, given: str, taken: str | None, contexts: tuple[int, int], graphs: bool
) -> None:
    engine = load(double, graphs=graphs, contexts=contexts[0], streams=contexts[1])
    device = device_of(engine)
    x = placed(device, rows(2), given)
    y = None if taken is None else placed(device, np.zeros((2, 3), np.float32), taken)
    with engine.bind({"x": x}, y) as call:
        assert call.is_captured == graphs
        for number in range(4):
            change(device, x, rows(2) + number)
            outputs = call()
            assert y is None or outputs["y"] is y
            assert np.array_equal(values(device, outputs["y"]), 2 * (rows(2) + number))
            assert np.array_equal(engine.infer(rows(3) + number)["y"], 2 * (rows(3) + number))  # in between


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("taken", ["device", "pinned", None])
def test_an_enqueued_call_runs_after_what_its_stream_holds_and_before_what_follows(
    load: Load, double: Path, given: str, taken: str | None, graphs: bool
) -> None:
    """The fake device runs work only when something waits for it, and orders streams only where they were told to."""
    engine = load(double, graphs=graphs)
    device = device_of(engine)
    stream, seen = device.stream(), []
    x = placed(device, rows(2), given)
    y = None if taken is None else placed(device, np.zeros((2, 3), np.float32), taken)
    with engine.bind({"x": x}, y) as call:
        for number in range(3):
            new = rows(2) + number
            if given == "numpy":
                x[...] = new  # pageable memory is read before `enqueue` returns
            elif given == "pinned":
                stream.enqueue(lambda new=new: np.copyto(x, new))
            else:
                device.upload(new, x.buffer, stream)
            assert call.enqueue(stream) is None
            if given == "numpy":
                x[...] = -1
            stream.enqueue(lambda: seen.append(raw(device, call.outputs["y"])))
        assert not seen
        stream.synchronize()
    assert len(seen) == 3
    for number, found in enumerate(seen):
        assert np.array_equal(found, 2 * (rows(2) + number))
    stream.close()


def raw(device: FakeDevice, array: object) -> np.ndarray:
    """The values that the memory holds at this moment."""
    if isinstance(array, np.ndarray):
        return array.copy()
    return device.buffer_at(array.buffer.pointer).memory()[:24].view(np.float32).reshape(2, 3).copy()


def test_a_call_waits_for_what_another_library_has_queued_on_a_bound_array(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    x, other = on_device(device, rows(2)), device.stream()
    with engine.bind({"x": x}) as call:
        x.__dlpack__(stream=other.handle)
        other.enqueue(lambda: device.buffer_at(x.buffer.pointer).memory()[:24].view(np.float32).fill(7))
        assert np.array_equal(on_host(device, call()["y"]), np.full((2, 3), 14, np.float32))
    other.close()


def test_a_graph_of_a_call_replays_and_enqueues_nothing_else(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(double, graphs=True)
    device = device_of(engine)
    x = on_device(device, rows(2))
    with engine.bind(x) as call:
        captured = engine.stats().pool.graphs.captured

        def fail(*_: object) -> None:
            raise AssertionError("the context was used")

        monkeypatch.setattr(FakeContext, "enqueue", fail)
        assert np.array_equal(on_host(device, call()["y"]), 2 * rows(2))
        assert captured == 1


def test_outputs_of_several_kinds_and_left_out_ones(load: Load, weighted: Path) -> None:
    engine = load(weighted)
    device = device_of(engine)
    a, b = np.full((2, 2), 3, np.float32), on_device(device, np.full((2, 2), 5, np.float32))
    product = np.zeros((2, 2), np.float32)
    with engine.bind({"a": a, "b": b}, {"product": product}) as call:
        found = call()
        assert found["product"] is product and (product == 15).all()
        assert on_host(device, found["largest"]) == 15


# ------------------------------------------------------------------------------------------------ refused


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    engine.infer(rows(2))
    x = on_device(device, rows(2))
    held = device.memory()
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    for inputs, outputs, match in (
        (x, np.zeros((3, 3), np.float32), r"`y` is 3x3 float32, expected 2x3 float32"),
        (x, np.zeros((2, 3), np.float64), r"float64, expected 2x3 float32"),
        (x, np.zeros((3, 2), np.float32).T, "strided"),
        (x, frozen, "read-only"),
        (x, x, "share memory"),
        (x, {"z": frozen}, "unknown output `z`"),
        (x, on_device(FakeDevice(3), rows(2)), "another device"),
        (np.zeros((2, 4), np.float32), None, "fixed at 3"),
        (np.zeros((9, 3), np.float32), None, "9"),
    ):
        with pytest.raises((UsageError, FeedError), match=match):
            engine.bind(inputs, outputs)
    assert device.memory().allocated_count == held.allocated_count
    assert device.memory().pinned_count == held.pinned_count
    assert np.array_equal(engine.infer({"x": x})["y"], 2 * rows(2))


def test_a_second_thread_is_refused_while_a_call_runs(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(double)
    entered, leave = threading.Event(), threading.Event()
    call = engine.bind(np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32))
    synchronize = FakeStream.synchronize

    def slow(stream: FakeStream) -> None:
        entered.set()
        assert leave.wait(HANG_S)
        synchronize(stream)

    monkeypatch.setattr(FakeStream, "synchronize", slow)
    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(HANG_S)
    with pytest.raises(UsageError, match="in use by another thread"):
        call()
    leave.set()
    thread.join()
    assert (call()["y"] == 2).all()
    call.close()


def test_a_closed_call_and_a_call_of_a_closed_engine_are_refused(load: Load, double: Path) -> None:
    engine = load(double)
    first, second = engine.bind(rows(2)), engine.bind(rows(2))
    first.close()
    first.close()
    engine.close()
    for call in (first, second):
        with pytest.raises(UsageError, match="closed"):
            call()
        with pytest.raises(UsageError, match="closed"):
            call.enqueue(1)
        call.close()
    with pytest.raises(UsageError, match="closed"):
        engine.bind(rows(2))


def test_a_call_waits_within_the_limits_and_closes_without(load: Load, double: Path) -> None:
    engine = load(double, contexts=1, wait_timeout_s=0.01)
    call, queue = engine.bind(rows(2), np.zeros((2, 3), np.float32)), engine.runner._wait_queue
    over, taken = threading.Event(), threading.Event()

    def occupy() -> None:
        slot = queue.acquire({"x": rows(2)})
        taken.set()
        over.wait(HANG_S)
        queue.release(slot)

    thread = threading.Thread(target=occupy)
    thread.start()
    assert taken.wait(HANG_S)
    with pytest.raises(DeadlineExpired):
        call()
    closing = threading.Thread(target=call.close)
    closing.start()
    until(lambda: engine.stats().pool.waiting == 1, "it waits")
    over.set()
    for one in (thread, closing):
        one.join(HANG_S)
    with pytest.raises(UsageError, match="closed"):
        call()


def test_what_is_enqueued_needs_a_stream_and_outputs_that_need_no_waiting(load: Load, double: Path) -> None:
    engine = load(double)
    stream = device_of(engine).stream()
    with engine.bind(rows(2), np.zeros((2, 3), np.float32)) as call, pytest.raises(UsageError, match="pageable"):
        call.enqueue(stream)
    with engine.bind(rows(2)) as call:
        with pytest.raises(UsageError, match="a str is not a stream"):
            call.enqueue("main")
        call.enqueue(stream)
        stream.synchronize()
        assert np.array_equal(on_host(device_of(engine), call.outputs["y"]), 2 * rows(2))
    stream.close()


# ------------------------------------------------------------------------------------------------ lifetimes


def test_a_call_keeps_its_arrays_and_gives_them_back(load: Load, double: Path) -> None:
    engine = load(double)
    device = device_of(engine)
    before = device.memory()
    x = on_device(device, rows(2))
    seen = weakref.ref(x.buffer)
    call = engine.bind({"x": x}, np.zeros((2, 3), np.float32))
    del x
    gc.collect()
    assert seen() is not None and np.array_equal(call()["y"], 2 * rows(2))
    call.close()
    gc.collect()
    assert seen() is None
    after = device.memory()
    assert (after.allocated_count, after.pinned_count) == (before.allocated_count, before.pinned_count)


def test_a_call_whose_inference_fails_works_again(load: Load, double: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(double)
    with engine.bind(rows(2), np.zeros((2, 3), np.float32)) as call:
        with monkeypatch.context() as patch:
            patch.setattr(FakeContext, "_compute", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                call()
        assert np.array_equal(call()["y"], 2 * rows(2))
    engine = load(double)
    call = engine.bind(rows(2))
    device_of(engine).lose()
    with pytest.raises(DeviceLost):
        call()


def test_callers_of_infer_and_bound_calls_of_many_threads_share_the_contexts(load: Load, double: Path) -> None:
    engine = load(double, contexts=2, graphs=True)
    wrong: list[object] = []

    def bound(number: int) -> None:
        x, y = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
        with engine.bind(x, y) as call:
            for turn in range(40):
                x[...] = rows(2) + 100 * number + turn
                if not np.array_equal(call()["y"], 2 * x):
                    wrong.append((number, turn))

    def plain(number: int) -> None:
        for turn in range(40):
            x = rows(1 + turn % 4) + 100 * number + turn
            if not np.array_equal(engine.infer(x)["y"], 2 * x):
                wrong.append((number, turn))

    threads = [threading.Thread(target=bound if number < 3 else plain, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    until(lambda: engine.stats().pool.busy == 0, "all contexts are free")


# ------------------------------------------------------------------------------------------------ on a CPU


@pytest.mark.parametrize("limits", [{}, {"max_waiting": 4}])
def test_onnxruntime_on_a_cpu_runs_a_bound_call_on_numpy_arrays_in_place(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    engine = te.build(models.conv_net(tmp_path / "net.onnx"), batch=(1, 2, 4), store=te.Store(tmp_path / "store"))
    with te.load(engine, **limits) as runner:
        spec = runner.inputs[0]
        x = np.zeros((2, *spec.shape[1:]), np.float32)
        out = np.zeros((2, *runner.outputs[0].shape[1:]), np.float32)
        with runner.bind({spec.name: x}, {runner.outputs[0].name: out}) as call:
            for seed in range(3):
                x[...] = np.random.default_rng(seed).random(x.shape, np.float32)
                assert call()[runner.outputs[0].name] is out
                np.testing.assert_allclose(out, runner.infer(x)[runner.outputs[0].name], rtol=1e-6)
            with pytest.raises(UsageError, match="no streams") as caught:
                call.enqueue(0)
            assert caught.value.hint == "call it: `call()`"
        with runner.bind(x) as call:
            np.testing.assert_allclose(call()[runner.outputs[0].name], out, rtol=1e-6)
        left_open = runner.bind(x)
    with pytest.raises(UsageError, match="closed"):
        left_open()
