"""Ctrl-C while memory is counted as given back, which finalisers do at any time."""

from __future__ import annotations

import random
import signal
import sys

import pytest

from trt_engine.device.accounting import AddressRanges, MemoryAccounting

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="interrupts are sent by an interval timer")


def test_what_is_given_back_is_counted_whatever_falls_in_between() -> None:
    ledger, ranges, draw, armed = MemoryAccounting(), AddressRanges[str](), random.Random(0), False

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(500):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-6, 1e-4))
                for _ in range(400):
                    ledger.release(0)
                    ranges.remove(1)
                armed = False
            except KeyboardInterrupt:
                armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not ledger._lock.locked() and not ranges._lock.locked()
    finally:
        signal.signal(signal.SIGALRM, before)
    ranges.add(0, 8, "mine")
    assert ranges.find(4) == (0, "mine") and ledger.charge(8) is None
