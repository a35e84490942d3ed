"""Pools of buffers: what they hold, what they reuse, and how they behave where memory ends."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.device import Device, open_device
from trt_engine.device.fake import FakeDevice
from trt_engine.device.ledger import Ledger, Ranges
from trt_engine.device.memory import Pool, size_class
from trt_engine.errors import MemoryExhausted, SetupError, UsageError

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that may take 8 MiB."""
    try:
        made = open_device(request.param, limit_bytes=8 * MIB)
    except SetupError as error:
        if request.param != "cuda":
            raise
        pytest.skip(f"no GPU here: {error.message}")
    yield made
    made.close()


@given(st.integers(0, 1 << 40))
def test_a_size_class_holds_the_request_and_little_more(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= max(nbytes, 512)
    assert size_class(size) == size
    if nbytes > MIB:
        assert size <= nbytes * 1.125
    elif nbytes > 512:
        assert size < nbytes * 2


def test_what_was_closed_is_handed_out_again(device: Device) -> None:
    with Pool(device) as pool:
        first = pool.allocate(1000)
        address = first.pointer
        first.close()
        again = pool.allocate(700)
        assert (again.pointer, again.nbytes) == (address, 700)
        again.close()
        stats = pool.stats()
        assert (stats.total_bytes, stats.used_bytes, stats.idle_bytes) == (KIB, 0, KIB)
        assert (stats.peak_bytes, stats.count, stats.served, stats.reused) == (KIB, 0, 2, 1)
        assert device.memory().allocated_count == 1
    assert device.memory().allocated_count == 0


def test_two_buffers_in_use_are_never_one(device: Device) -> None:
    with Pool(device) as pool:
        one, other = pool.allocate(100), pool.allocate(100)
        assert one.pointer != other.pointer
        one.close()
        one.close()
        third, fourth = pool.allocate(100), pool.allocate(100)
        assert len({other.pointer, third.pointer, fourth.pointer}) == 3
        for item in (other, third, fourth):
            item.close()
        assert pool.stats().count == 0


def test_a_closed_buffer_of_a_pool_is_refused_though_its_memory_lives_on(device: Device) -> None:
    with Pool(device) as pool:
        buffer, stream = pool.allocate(100), device.stream()
        buffer.close()
        with pytest.raises(UsageError, match=r"(closed|freed) buffer"):
            device.upload(np.zeros(10, np.uint8), buffer, stream)
        stream.close()


def test_a_pools_limit_names_what_was_asked_and_the_pool_goes_on(device: Device) -> None:
    with Pool(device, 64 * KIB) as pool:
        held = pool.allocate(48 * KIB)
        with pytest.raises(MemoryExhausted, match=r"a pool of .* asked for 40000 bytes and has 0 of 65536 left"):
            pool.allocate(40_000)
        stats = pool.stats()
        assert (stats.total_bytes, stats.count, stats.served) == (64 * KIB, 1, 1)
        held.close()
        again = pool.allocate(40_000)
        again.close()


def test_idle_memory_makes_room_before_a_limit_refuses(device: Device) -> None:
    with Pool(device, 64 * KIB) as pool:
        for _ in range(2):
            for nbytes in (512, 4 * KIB, 32 * KIB, 64 * KIB):
                pool.allocate(nbytes).close()
        assert pool.stats().served == 8
        assert pool.stats().peak_bytes <= 64 * KIB


@pytest.mark.parametrize("device", ["cpu", "fake"], indirect=True)
def test_idle_memory_makes_room_before_the_device_refuses(device: Device) -> None:
    with Pool(device, 16 * MIB) as pool:
        for nbytes in (3 * MIB, 4 * MIB, 6 * MIB, 8 * MIB):
            pool.allocate(nbytes).close()
        for _ in range(3):  # what was refused does not count against the pool's own limit
            with pytest.raises(MemoryExhausted, match=f"asked for {9 * MIB} bytes"):
                pool.allocate(9 * MIB)
        stats = pool.stats()
        assert (stats.used_bytes, stats.count, stats.peak_bytes) == (0, 0, 8 * MIB)
        pool.allocate(8 * MIB).close()


def test_trim_keeps_what_it_is_told_to(device: Device) -> None:
    with Pool(device) as pool:
        for item in [pool.allocate(nbytes) for nbytes in (KIB, KIB, 2 * KIB, 8 * KIB)]:
            item.close()
        assert pool.trim(keep_bytes=4 * KIB) == 8 * KIB
        assert pool.stats().idle_bytes == device.memory().allocated_bytes == 4 * KIB
        assert pool.trim() == 4 * KIB
        assert device.memory().allocated_bytes == 0


def test_a_pinned_pool_holds_host_memory(device: Device) -> None:
    with Pool(device, 4 * KIB, pinned=True) as pool:
        buffer = pool.allocate(KIB)
        array = buffer.array("float32")  # type: ignore[attr-defined]
        array[:] = 3
        assert isinstance(array, np.ndarray)
        assert (device.memory().pinned_bytes, device.memory().allocated_bytes) == (KIB, 0)
        with pytest.raises(MemoryExhausted, match="pinned pool"):
            pool.allocate(4 * KIB)
        del array
        buffer.close()
    assert device.memory().pinned_bytes == 0


def test_closing_a_pool_says_what_is_in_use_and_takes_it_back_later(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool(device)
    held = pool.allocate(100)
    with caplog.at_level(logging.WARNING):
        pool.close()
        pool.close()
    assert caplog.text.count("with 1 buffers in use") == 1
    with pytest.raises(UsageError, match="closed pool"):
        pool.allocate(1)
    assert device.memory().allocated_count == 1
    held.close()
    assert device.memory().allocated_count == 0


def test_a_buffer_dropped_without_close_is_said_and_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    device = open_device("cpu")
    pool = Pool(device)
    with caplog.at_level(logging.WARNING):
        pool.allocate(100)
        gc.collect()
    assert "dropped without `close`" in caplog.text
    stats = pool.stats()
    assert (stats.total_bytes, stats.used_bytes, stats.idle_bytes, stats.count) == (0, 0, 0, 0)
    assert device.memory().allocated_bytes == 0
    pool.close()


def test_a_negative_size_is_a_usage_error() -> None:
    with Pool(open_device("cpu")) as pool, pytest.raises(UsageError, match="a buffer of -5 bytes"):
        pool.allocate(-5)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300 * KIB)), max_size=60))
def test_the_counts_reconcile_after_any_sequence(steps: list[tuple[bool, int]]) -> None:
    device = FakeDevice(memory_bytes=MIB)
    pool, held, served = Pool(device, 768 * KIB), [], 0
    for take, number in steps:
        if take:
            try:
                held.append(pool.allocate(number))
                served += 1
            except MemoryExhausted:
                assert sum(size_class(item.nbytes) for item in held) + size_class(number) > 768 * KIB
        elif held:
            held.pop(number % len(held)).close()
        stats = pool.stats()
        assert stats.used_bytes == sum(size_class(item.nbytes) for item in held)
        assert (stats.count, stats.served) == (len(held), served)
        assert stats.total_bytes == stats.used_bytes + stats.idle_bytes == device.allocated_bytes
        assert stats.total_bytes <= stats.peak_bytes <= 768 * KIB
    for item in held:
        item.close()
    pool.close()
    assert device.allocated_bytes == 0


# ------------------------------------------------------------------------------------------------ the counts themselves


def test_what_the_collector_gives_back_in_the_middle_of_a_count_waits_for_nobody() -> None:
    """A finaliser may run while its own thread holds the ledger's lock: it must neither wait nor be lost."""
    ledger, ranges = Ledger(), Ranges[str]()
    ledger.take(100)
    ranges.add(4096, 100, "one")
    done = threading.Event()

    def finaliser() -> None:
        with ledger._lock, ranges._lock:
            ledger.give(100)
            ranges.remove(4096)
        done.set()

    thread = threading.Thread(target=finaliser, daemon=True)
    thread.start()
    assert done.wait(60), "it waits for itself"
    assert (ledger.read().nbytes, ledger.read().count) == (0, 0)
    assert ranges.find(4096) is None


def test_a_reservation_counts_against_the_limit_and_not_as_given_out() -> None:
    ledger = Ledger()
    assert ledger.reserve(60, 100) is None
    assert ledger.reserve(50, 100) == 40
    assert (ledger.read().nbytes, ledger.read().peak_bytes) == (0, 0)
    ledger.undo(60)
    assert ledger.take(100, 100) is None
    assert (ledger.read().nbytes, ledger.read().peak_bytes, ledger.read().served) == (100, 100, 1)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), max_size=30))
def test_an_address_is_found_in_the_range_that_holds_it_and_in_no_other(spans: list[tuple[int, int]]) -> None:
    ranges, model, start = Ranges[int](), {}, 0
    for number, (length, gap) in enumerate(spans):
        ranges.add(start, length, number)
        model.update(dict.fromkeys(range(start, start + length), (start, number)))
        start += length + gap
    for begin in {begin for begin, number in model.values() if number % 3 == 0}:
        ranges.remove(begin)
        model = {address: owner for address, owner in model.items() if owner[0] != begin}
    assert [ranges.find(address) for address in range(-1, start + 1)] == [
        model.get(address) for address in range(-1, start + 1)
    ]
