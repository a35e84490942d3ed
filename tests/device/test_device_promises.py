"""The promises every device keeps: the host, the fake one, and the GPU where there is one."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from patience import HANG_S
from trt_engine.device import Device, Stream, open_device
from trt_engine.errors import MemoryExhausted, SetupError, UsageError

LIMIT = 64 << 20


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that may take 64 MiB; it must be left as it was found."""
    try:
        made = open_device(request.param, limit_bytes=LIMIT)
    except SetupError as error:
        if request.param != "cuda":
            raise
        pytest.skip(f"no GPU here: {error.message}")
    yield made
    made.close()


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


def filled(nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) * 7 % 251).astype(np.uint8)


def read(device: Device, buffer: object, nbytes: int, stream: Stream) -> np.ndarray:
    out = np.zeros(nbytes, np.uint8)
    device.download(buffer, out, stream)  # type: ignore[arg-type]
    stream.synchronize()
    return out


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("nbytes", [0, 1, 255, 4096, 3_000_001])
def test_what_is_uploaded_comes_back(device: Device, stream: Stream, nbytes: int) -> None:
    buffer, x = device.allocate(nbytes), filled(nbytes)
    device.upload(x, buffer, stream)
    assert np.array_equal(read(device, buffer, nbytes, stream), x)
    assert buffer.nbytes == nbytes
    parts = np.split(x[::-1].copy(), [nbytes // 3])
    if device.gather(parts, buffer, stream):
        parts[0][:] = 0  # read already
        x = np.concatenate([x[::-1][: nbytes // 3], parts[1]])
    assert np.array_equal(read(device, buffer, nbytes, stream), x)
    buffer.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_every_element_type_travels(device: Device, stream: Stream, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x, y = np.ones((3, 5), kind), np.zeros((3, 5), kind)
    buffer = device.allocate(x.nbytes)
    device.upload(x, buffer, stream)
    device.download(buffer, y, stream)
    stream.synchronize()
    assert np.array_equal(x.view(np.uint8), y.view(np.uint8))
    buffer.close()


def test_an_ordinary_array_may_be_changed_when_upload_returns(device: Device, stream: Stream) -> None:
    sizes = (16, 1 << 20, 24 << 20)
    buffers = [device.allocate(nbytes) for nbytes in sizes]
    arrays = [filled(nbytes) for nbytes in sizes]
    for buffer, array in zip(buffers, arrays, strict=True):
        device.upload(array, buffer, stream)
        array[:] = 255
    for buffer, nbytes in zip(buffers, sizes, strict=True):
        assert np.array_equal(read(device, buffer, nbytes, stream), filled(nbytes))
        buffer.close()


def test_pinned_memory_is_a_numpy_array_that_copies_to_and_fro(device: Device, stream: Stream) -> None:
    source, target, buffer = device.pinned(4000), device.pinned(4000), device.allocate(4000)
    x, y = source.array("float32", (10, 100)), target.array("float32")
    x[:] = np.arange(1000).reshape(10, 100)
    y[:] = -1
    device.upload(x, buffer, stream)
    device.download(buffer, y, stream)
    stream.synchronize()
    assert np.array_equal(y, np.arange(1000))
    for item in (source, target, buffer):
        item.close()


def test_a_copy_between_buffers_keeps_the_streams_order(device: Device, stream: Stream) -> None:
    one, other, pinned = device.allocate(100), device.allocate(80), device.pinned(100)
    device.upload(filled(100), one, stream)
    device.copy(one, other, 80, stream)
    device.upload(np.zeros(100, np.uint8), one, stream)
    device.copy(other, pinned, 80, stream)
    stream.synchronize()
    assert np.array_equal(pinned.array()[:80], filled(80))
    with pytest.raises(UsageError, match="bytes 0 to 81 are not all in a buffer of 80"):
        device.copy(one, other, 81, stream)
    for item in (one, other, pinned):
        item.close()


def test_a_view_is_a_part_of_the_memory_and_ends_with_it(device: Device, stream: Stream) -> None:
    buffer = device.allocate(1000)
    view = buffer.view(256, 100)
    inner = view.view(10, 5)
    assert (view.nbytes, view.pointer, inner.pointer) == (100, buffer.pointer + 256, buffer.pointer + 266)
    device.upload(filled(1000), buffer, stream)
    assert np.array_equal(read(device, inner, 5, stream), filled(1000)[266:271])
    view.close()
    assert np.array_equal(read(device, buffer, 1000, stream), filled(1000))
    with pytest.raises(UsageError, match=r"(closed|freed) buffer"):
        _ = inner.pointer
    with pytest.raises(UsageError, match="bytes 990 to 1001 are not all in a buffer of 1000"):
        buffer.view(990, 11)
    other = buffer.view(0, 1)
    buffer.close()
    with pytest.raises(UsageError, match=r"(closed|freed) buffer"):
        _ = other.pointer


def test_a_closed_buffer_is_refused_and_closing_twice_does_nothing(device: Device, stream: Stream) -> None:
    for buffer in (device.allocate(16), device.pinned(16)):
        buffer.close()
        buffer.close()
        with pytest.raises(UsageError, match=r"(closed|freed) buffer"):
            _ = buffer.pointer
        with pytest.raises(UsageError, match=r"(closed|freed) buffer"):
            device.copy(buffer, buffer, 1, stream)
    assert (device.memory().allocated_count, device.memory().pinned_count) == (0, 0)


def test_a_copy_that_does_not_fit_is_refused_before_anything_happens(device: Device, stream: Stream) -> None:
    buffer = device.allocate(4)
    with pytest.raises(UsageError, match="8 bytes do not fit a buffer of 4"):
        device.upload(np.zeros(8, np.uint8), buffer, stream)
    with pytest.raises(UsageError, match="8 bytes cannot be read from a buffer of 4"):
        device.download(buffer, np.zeros(8, np.uint8), stream)
    with pytest.raises(UsageError, match="strided"):
        device.upload(np.zeros((2, 4), np.uint8)[:, ::2], buffer, stream)
    with pytest.raises(UsageError, match="cannot be copied"):
        device.upload(np.array([None]), buffer, stream)
    still = np.zeros(4, np.uint8)
    still.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        device.download(buffer, still, stream)
    device.upload(still, buffer, stream)
    stream.synchronize()
    buffer.close()


# ------------------------------------------------------------------------------------------------ statistics and limits


def test_the_statistics_say_what_is_held_and_what_was(device: Device) -> None:
    before = device.memory()
    assert (before.allocated_bytes, before.allocated_count, before.pinned_bytes) == (0, 0, 0)
    assert before.total_bytes >= before.free_bytes == LIMIT == before.limit_bytes
    first, second, pinned = device.allocate(1000), device.allocate(3 << 20), device.pinned(5000)
    now = device.memory()
    assert (now.allocated_bytes, now.allocated_count, now.free_bytes) == (1000 + (3 << 20), 2, LIMIT - 1000 - (3 << 20))
    assert (now.pinned_bytes, now.pinned_count, now.total_allocations) == (5000, 1, 2)
    for item in (first, second, pinned):
        item.close()
    after = device.memory()
    assert (after.allocated_bytes, after.allocated_count, after.pinned_bytes, after.pinned_count) == (0, 0, 0, 0)
    assert (after.peak_bytes, after.pinned_peak_bytes, after.total_allocations) == (1000 + (3 << 20), 5000, 2)


def test_memory_ends_at_the_limit_and_goes_on_below_it(device: Device, stream: Stream) -> None:
    held = device.allocate(LIMIT - 1000)
    for _ in range(3):
        with pytest.raises(MemoryExhausted, match=f"cannot allocate 1001 bytes: 1000 of .* limit is {LIMIT}"):
            device.allocate(1001)
    assert device.memory().allocated_count == 1
    assert device.memory().peak_bytes == LIMIT - 1000
    rest = device.allocate(1000)
    device.upload(filled(1000), rest, stream)
    assert np.array_equal(read(device, rest, 1000, stream), filled(1000))
    held.close()
    again = device.allocate(LIMIT - 1000)
    for item in (rest, again):
        item.close()


def test_a_negative_size_is_a_usage_error_and_counts_nothing(device: Device) -> None:
    for ask in (device.allocate, device.pinned):
        with pytest.raises(UsageError, match="a buffer is -1 bytes"):
            ask(-1)
    assert device.memory().total_allocations == 0
    assert (device.memory().allocated_bytes, device.memory().pinned_bytes) == (0, 0)


def test_what_did_not_fit_is_no_peak(device: Device) -> None:
    device.allocate(1000).close()
    with pytest.raises(MemoryExhausted):
        device.allocate(LIMIT + 1)
    assert device.memory().peak_bytes == 1000


def test_a_limit_of_nothing_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="leaves nothing"):
        open_device("cpu", limit_bytes=0)


def test_memory_of_a_stream_may_be_closed_behind_its_last_work(device: Device, stream: Stream) -> None:
    out = np.zeros(5000, np.uint8)
    for _ in range(20):
        buffer = device.allocate(5000, stream)
        device.upload(filled(5000), buffer, stream)
        device.download(buffer, out, stream)
        buffer.close()
        with pytest.raises(UsageError, match=r"(closed|freed) buffer"):
            _ = buffer.pointer
    stream.synchronize()
    assert np.array_equal(out, filled(5000))
    assert device.memory().allocated_bytes == 0


# ------------------------------------------------------------------------------------------------ streams and events


def test_handles_are_numbers_of_their_own(device: Device) -> None:
    streams = [device.stream() for _ in range(4)]
    handles = {stream.handle for stream in streams}
    assert len(handles) == 4
    assert all(isinstance(handle, int) for handle in handles)
    for stream in streams:
        stream.close()
        stream.close()
        with pytest.raises(UsageError, match="closed stream"):
            _ = stream.handle
        with pytest.raises(UsageError, match="closed stream"):
            stream.synchronize()


def test_events_tell_when_they_are_reached(device: Device, stream: Stream) -> None:
    buffer = device.allocate(1 << 20)
    first = stream.record()
    device.upload(filled(1 << 20), buffer, stream)
    second = stream.record()
    second.synchronize()
    assert first.done() and second.done()
    assert second.elapsed_ms(first) >= 0
    buffer.close()


def test_asking_an_event_again_and_again_ends(device: Device, stream: Stream) -> None:
    buffer = device.allocate(1000)
    for _ in range(20):
        device.upload(filled(1000), buffer, stream)
    event = stream.record()
    while not event.done():
        pass
    stream.synchronize()
    buffer.close()


def test_a_stream_that_waits_for_an_event_sees_the_work_before_it(device: Device) -> None:
    one, other = device.stream(), device.stream()
    buffer, source, out = device.allocate(8 << 20), device.pinned(8 << 20), np.zeros(8 << 20, np.uint8)
    for value in range(1, 6):
        source.array()[:] = value
        device.upload(source.array(), buffer, one)
        ready = one.record()
        other.wait(ready)
        device.download(buffer, out, other)
        other.synchronize()
        assert (out == value).all()
    one.synchronize()
    for item in (buffer, source, one, other):
        item.close()


def test_streams_that_wait_for_each_other_in_turn_do_not_lock(device: Device) -> None:
    one, other = device.stream(), device.stream()
    buffers = device.allocate(100), device.allocate(100)
    for _ in range(50):
        device.upload(filled(100), buffers[0], one)
        other.wait(one.record())
        device.copy(buffers[0], buffers[1], 100, other)
        one.wait(other.record())
    threads = [threading.Thread(target=stream.synchronize) for stream in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads)
    for item in (*buffers, one, other):
        item.close()


# ------------------------------------------------------------------------------------------------ graphs


def test_a_graph_runs_nothing_when_captured_and_again_at_every_replay(device: Device, stream: Stream) -> None:
    source, target, buffer = device.pinned(16), device.pinned(16), device.allocate(16)
    x, out = source.array(), target.array()
    out[:] = 0

    def work(stream: Stream) -> None:
        device.upload(x, buffer, stream)
        device.download(buffer, out, stream)

    graph = stream.capture(work)
    stream.synchronize()
    assert not out.any()
    for value in (5, 6):
        x[:] = value
        graph.replay(stream)
        stream.synchronize()
        assert (out == value).all()
    graph.close()
    graph.close()
    with pytest.raises(UsageError, match="closed graph"):
        graph.replay(stream)
    for item in (source, target, buffer):
        item.close()


def test_a_graph_refuses_when_a_buffer_it_holds_is_closed_pinned_ones_too(device: Device, stream: Stream) -> None:
    if device.name == "cpu":
        pytest.skip("the host's graph holds the memory itself")
    for lost in (0, 1):
        held = device.pinned(16), device.allocate(16)
        graph = stream.capture(lambda stream, held=held: device.upload(held[0].array(), held[1], stream))  # type: ignore[misc]
        graph.replay(stream)
        stream.synchronize()
        held[lost].close()
        with pytest.raises(UsageError, match="freed buffer"):
            graph.replay(stream)
        graph.close()
        held[1 - lost].close()


def test_a_failed_capture_leaves_the_stream_clean(device: Device, stream: Stream) -> None:
    buffer = device.allocate(100)

    def fail(stream: Stream) -> None:
        device.copy(buffer, buffer.view(50, 50), 50, stream)
        raise ZeroDivisionError("not capturable")

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            stream.capture(fail)
        device.upload(filled(100), buffer, stream)
        assert np.array_equal(read(device, buffer, 100, stream), filled(100))
    graph = stream.capture(lambda stream: device.copy(buffer.view(0, 50), buffer.view(50, 50), 50, stream))
    graph.close()
    buffer.close()


@pytest.mark.parametrize("forbidden", ["synchronize", "wait", "allocate", "upload", "nest", "pinned", "borrow"])
def test_what_a_capture_forbids_is_said_and_breaks_nothing(device: Device, stream: Stream, forbidden: str) -> None:
    if forbidden in ("allocate", "pinned", "borrow") and device.name == "cpu":
        pytest.skip("the host allocates and lends at any time")
    buffer, event = device.allocate(10), stream.record()
    stream.synchronize()

    def work(stream: Stream) -> None:
        match forbidden:
            case "synchronize":
                stream.synchronize()
            case "wait":
                stream.wait(event)
            case "allocate":
                device.allocate(1)
            case "pinned":
                device.pinned(1)
            case "borrow":
                device.borrow(buffer.array(), stream)
            case "upload":
                device.upload(filled(10), buffer, stream)
            case "nest":
                stream.capture(lambda stream: None)

    with pytest.raises(UsageError, match="captur"):
        stream.capture(work)
    device.upload(filled(10), buffer, stream)
    assert np.array_equal(read(device, buffer, 10, stream), filled(10))
    buffer.close()


def test_an_event_of_a_capture_has_no_time(device: Device, stream: Stream) -> None:
    events = []
    graph = stream.capture(lambda stream: events.append(stream.record()))
    graph.replay(stream)
    stream.synchronize()
    with pytest.raises(UsageError, match="event of a capture"):
        events[0].elapsed_ms(events[0])
    with pytest.raises(UsageError, match="event of a capture"):
        stream.wait(events[0])
    graph.close()


def test_others_work_while_one_thread_captures(device: Device, stream: Stream) -> None:
    buffer, source = device.allocate(1000), device.pinned(1000)
    inside, done, failed = threading.Event(), threading.Event(), []

    def neighbour() -> None:
        try:
            inside.wait(HANG_S)
            other = device.stream()
            mine = device.allocate(5000)
            device.upload(filled(5000), mine, other)
            assert np.array_equal(read(device, mine, 5000, other), filled(5000))
            device.synchronize()
            mine.close()
            other.close()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    def work(stream: Stream) -> None:
        device.upload(source.array(), buffer, stream)
        inside.set()
        assert done.wait(HANG_S)
        device.copy(buffer, source, 1000, stream)

    thread = threading.Thread(target=neighbour)
    thread.start()
    graph = stream.capture(work)
    thread.join()
    assert failed == []
    graph.replay(stream)
    stream.synchronize()
    for item in (graph, buffer, source):
        item.close()


# ------------------------------------------------------------------------------------------------ arrays, lifetimes, threads


def test_a_buffer_goes_out_as_an_array_and_comes_in_again(device: Device, stream: Stream) -> None:
    buffer, out = device.allocate(48), np.zeros(12, np.float32)
    device.upload(np.arange(12, dtype=np.float32), buffer, stream)
    lent = buffer.array("float32", (3, 4))
    assert lent.shape == (3, 4)
    borrowed = device.borrow(lent, stream)
    assert (borrowed.pointer, borrowed.nbytes) == (buffer.pointer, 48)
    device.download(borrowed, out, stream)
    stream.synchronize()
    assert np.array_equal(out, np.arange(12))
    borrowed.close()
    assert np.array_equal(read(device, buffer, 48, stream).view(np.float32), np.arange(12))
    with pytest.raises(UsageError, match="takes 52 bytes, the buffer has 48"):
        buffer.array("float32", (13,))
    buffer.close()


def test_what_has_no_memory_is_not_borrowed(device: Device, stream: Stream) -> None:
    with pytest.raises(UsageError, match="a list does not support DLPack"):
        device.borrow([1.0], stream)


def test_an_array_keeps_its_pinned_memory_from_the_collector(device: Device) -> None:
    x = device.pinned(1000).array()
    x[:] = 7
    gc.collect()
    others = [device.pinned(1000) for _ in range(8)]
    for other in others:
        other.array()[:] = 9
    assert (x == 7).all()
    for other in others:
        other.close()


def test_arrays_their_owners_drop_make_room_for_the_next(
    device: Device, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """What a caller gets is the caller's, who has no buffer to close: eighty times the limit goes through."""
    with caplog.at_level(logging.WARNING):
        for value in range(320):
            buffer = device.allocate(LIMIT // 4)
            device.upload(np.full(100, value % 251, np.uint8), buffer, stream)
            array = buffer.array()
            del buffer
            stream.synchronize()
            again = device.borrow(array, stream)
            assert (read(device, again, 100, stream) == value % 251).all()
            again.close()
            del array, again
    device.synchronize()
    assert caplog.text == ""
    assert (device.memory().allocated_bytes, device.memory().allocated_count) == (0, 0)
    assert device.memory().total_allocations == 320


def test_eight_threads_with_a_stream_each_do_not_meet(device: Device) -> None:
    failed: list[BaseException] = []

    def worker(number: int) -> None:
        try:
            stream, random = device.stream(), np.random.default_rng(number)
            for _ in range(60):
                x = random.integers(0, 255, random.integers(1, 200_000), np.uint8)
                one, two = device.allocate(x.nbytes), device.allocate(x.nbytes, stream)
                device.upload(x, one, stream)
                device.copy(one, two, x.nbytes, stream)
                assert np.array_equal(read(device, two, x.nbytes, stream), x)
                two.close()
                one.close()
            stream.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert (device.memory().allocated_bytes, device.memory().total_allocations) == (0, 960)


def test_buffers_of_other_devices_are_refused(device: Device, stream: Stream) -> None:
    stranger = open_device("fake:7" if device.name != "fake:7" else "cpu")
    buffer, mine = stranger.allocate(10), device.allocate(10)
    if device.name != "cpu":
        with pytest.raises(UsageError, match="another device"):
            device.upload(filled(10), buffer, stream)
        with pytest.raises(UsageError, match="another device"):
            device.copy(buffer, mine, 10, stream)
    with pytest.raises(UsageError, match="another device"):
        stream.wait(stranger.stream().record())
    with pytest.raises(UsageError, match="different devices"):
        stream.record().elapsed_ms(stranger.stream().record())
    buffer.close()
    mine.close()


def test_closing_says_what_is_still_held_and_never_raises(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    held = device.allocate(100)
    with caplog.at_level(logging.WARNING):
        device.close()
        device.close()
    if device.name != "cpu":
        assert caplog.text.count("closed with 1 buffers (100 bytes) still allocated") == 1
        with pytest.raises(UsageError, match="is closed"):
            device.allocate(1)
        with pytest.raises(UsageError, match="is closed"):
            device.stream()
    held.close()
    assert device.memory().allocated_bytes == 0


def test_properties_are_of_the_device(device: Device) -> None:
    found = device.properties()
    assert found.name and found.memory_bytes >= LIMIT and found.multiprocessors >= 1
    assert (found.compute_capability is not None) == device.name.startswith("cuda")


def test_a_stream_is_ordered_after_and_before_another_librarys_by_its_handle(device: Device, stream: Stream) -> None:
    other, buffer, target = device.stream(), device.allocate(100), device.pinned(100)
    source, copy = device.pinned(100), np.zeros(100, np.uint8)
    for number in range(3):
        source.array()[:] = filled(100) + number
        device.copy(source, buffer, 100, other)
        stream.order_after(other.handle)
        device.copy(buffer, buffer.view(0, 100), 100, stream)
        stream.order_before(other.handle)
        device.copy(buffer, target, 100, other)
        other.synchronize()
        assert np.array_equal(target.array(), filled(100) + number)
    stream.order_after(stream.handle)
    device.download(buffer, copy, stream)
    stream.synchronize()
    assert np.array_equal(copy, filled(100) + 2)
    if device.name != "cpu":  # whose streams are always in order
        with pytest.raises(UsageError, match="captur"):
            stream.capture(lambda stream: stream.order_after(other.handle))
    for item in (other, buffer, target, source):
        item.close()


def test_pinned_memory_is_told_from_pageable(device: Device) -> None:
    pinned = device.pinned(100)
    assert device.is_pinned(pinned.array()) and device.is_pinned(pinned.array("float32", (5, 5)))
    assert device.is_pinned(np.zeros(100, np.uint8)) == (device.name == "cpu")
    assert device.is_pinned(np.zeros(0, np.uint8))
    pinned.close()
