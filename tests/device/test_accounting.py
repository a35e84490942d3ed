"""What the accounting of device memory promises: sizes, counts, limits, and addresses."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from patience import HANG_S
from trt_engine.device.accounting import AddressRanges, MemoryAccounting, size_class

KIB, MIB = 1 << 10, 1 << 20


@given(st.integers(0, 1 << 40))
def test_a_size_class_holds_the_request_and_little_more(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= max(nbytes, 512)
    assert size_class(size) == size
    if nbytes > MIB:
        assert size <= nbytes * 1.125
    elif nbytes > 512:
        assert size < nbytes * 2


def test_what_the_collector_gives_back_in_the_middle_of_a_count_waits_for_nobody() -> None:
    """A finaliser may run while its own thread holds the ledger's lock: it must neither wait nor be lost."""
    ledger, ranges = MemoryAccounting(), AddressRanges[str]()
    ledger.charge(100)
    ranges.add(4096, 100, "one")
    done = threading.Event()

    def finaliser() -> None:
        with ledger._lock, ranges._lock:
            ledger.release(100)
            ranges.remove(4096)
        done.set()

    thread = threading.Thread(target=finaliser, daemon=True)
    thread.start()
    assert done.wait(HANG_S), "it waits for itself"
    assert (ledger.usage().nbytes, ledger.usage().count) == (0, 0)
    assert ranges.find(4096) is None


def test_a_reservation_counts_against_the_limit_and_not_as_given_out() -> None:
    ledger = MemoryAccounting()
    assert ledger.reserve(60, 100) is None
    assert ledger.reserve(50, 100) == 40
    assert (ledger.usage().nbytes, ledger.usage().peak_bytes) == (0, 0)
    ledger.cancel(60)
    assert ledger.charge(100, 100) is None
    assert (ledger.usage().nbytes, ledger.usage().peak_bytes, ledger.usage().total_allocations) == (100, 100, 1)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), max_size=30))
def test_an_address_is_found_in_the_range_that_holds_it_and_in_no_other(spans: list[tuple[int, int]]) -> None:
    ranges, model, start = AddressRanges[int](), {}, 0
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
