"""`Waiting` against the plainest thing that could be right: a list, looked through from end to end."""

from __future__ import annotations

import math
from concurrent.futures import Future
from queue import SimpleQueue

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trt_engine.runtime.batch_queue import AdmissionControl, BatchQueue, Request

MAX_BATCH = 8


def request(arrived_s: float, rows: int, key: str, priority: int, wait_s: float, deadline_s: float) -> Request:
    return Request(
        feeds={}, rows=rows, nbytes=rows, key=key, future=Future(), arrived_s=arrived_s, due_s=arrived_s + wait_s,
        deadline_s=arrived_s + deadline_s, rank=arrived_s - 5 * priority,
    )  # fmt: skip


class Queues(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiting = BatchQueue(MAX_BATCH)
        self.listed: list[Request] = []
        self.now_s = 0.0

    @rule(
        rows=st.integers(1, MAX_BATCH + 2),
        key=st.sampled_from("ab"),
        priority=st.integers(-1, 2),
        wait_s=st.sampled_from((0.0, 1.0, 4.0)),
        deadline_s=st.sampled_from((math.inf, math.inf, 0.0, 2.0)),
    )
    def add(self, rows: int, key: str, priority: int, wait_s: float, deadline_s: float) -> None:
        made = request(self.now_s, rows, key, priority, wait_s, deadline_s)
        self.waiting.add(made)
        self.listed.append(made)

    @rule(seconds=st.sampled_from((0.5, 1.0, 3.0)))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.listed)).future.cancel()

    @rule()
    def departed(self) -> None:
        gone = [item for item in self.listed if item.cancelled]
        assert set(map(id, self.waiting.remove_cancelled())) == set(map(id, gone))
        self._leave(gone)

    @rule()
    def expired(self) -> None:
        gone = [item for item in self.listed if item.deadline_s <= self.now_s]
        assert set(map(id, self.waiting.remove_expired(self.now_s))) == set(map(id, gone))
        self._leave(gone)

    @rule(flush=st.booleans())
    def take(self, flush: bool) -> None:
        queues = {key: [item for item in self.listed if item.key == key] for key in "ab"}
        ready = {
            key: min(item.due_s for item in queue)
            for key, queue in queues.items()
            if queue
            and (
                flush
                or sum(item.rows for item in queue) >= MAX_BATCH
                or min(item.due_s for item in queue) <= self.now_s
            )
        }
        batch = self.waiting.take_batch(self.now_s, flush=flush)
        assert bool(batch) == bool(ready)
        if not batch:
            return
        (key,) = {item.key for item in batch}
        assert ready[key] == min(ready.values()), "another queue's oldest was due earlier"
        there = [item for item in batch if not item.cancelled]
        assert sum(item.rows for item in there) <= MAX_BATCH or len(there) == 1
        left = [item for item in queues[key] if all(item is not taken for taken in batch)]
        assert all(item.rank >= max(taken.rank for taken in batch) for item in left), "somebody was overtaken"
        if left and there:  # the batch is as large as it can be without overtaking
            following = min((item for item in left), key=lambda item: item.rank)
            same = [item for item in left if item.rank == following.rank]
            assert any(sum(item.rows for item in there) + item.rows > MAX_BATCH for item in same)
        self._leave(batch)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert len(self.waiting) == len(self.listed)

    @invariant()
    def it_wakes_when_something_is_due(self) -> None:
        first = min((min(item.due_s, item.deadline_s) for item in self.listed), default=math.inf)
        assert self.waiting.next_event_s() == first
        assert self.waiting.next_deadline_s() == min((item.deadline_s for item in self.listed), default=math.inf)

    def _leave(self, gone: list[Request]) -> None:
        self.listed = [item for item in self.listed if all(item is not other for other in gone)]

    def teardown(self) -> None:
        assert len(self.waiting.remove_all()) == len(self.listed)
        assert len(self.waiting) == 0


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, database=None)


def test_low_priority_is_never_passed_for_ever() -> None:
    """A step of priority is a head start in time: whoever comes so much later is behind."""
    waiting = BatchQueue(max_batch=1)
    patient = request(0.0, 1, "a", 0, 0.0, math.inf)
    waiting.add(patient)
    for second in range(100):
        waiting.add(request(float(second), 1, "a", 2, 0.0, math.inf))
        if waiting.take_batch(float(second))[0] is patient:
            break
    assert 9 <= second <= 11


def test_the_departed_take_no_room_and_end_no_batch() -> None:
    for departs, sizes in ((0, (5, 5, 3)), (1, (5, 5, 3)), (2, (5, 3, 5))):
        waiting = BatchQueue(MAX_BATCH)
        asked = [request(float(number), rows, "a", 0, 100.0, math.inf) for number, rows in enumerate(sizes)]
        for item in asked:
            waiting.add(item)
        asked[departs].future.cancel()
        assert waiting.take_batch(3.0, flush=True) == asked
        assert len(waiting) == 0


def test_the_owner_is_woken_once_and_only_for_a_free_worker_or_a_deadline() -> None:
    inbox: SimpleQueue[str] = SimpleQueue()
    admission = AdmissionControl(100, None, inbox)

    def admit(deadline_s: float = math.inf) -> Request:
        made = request(0.0, 1, "a", 0, 0.0, deadline_s)
        admission.admit(made)
        return made

    assert not admission.wake_for_requests(False)
    quiet = [admit(), admit()]
    assert inbox.empty()
    urgent = [admit(1.0), admit(1.0)]
    assert inbox.qsize() == 1
    assert admission.take_requests() == [*quiet, *urgent] and not admission.take_requests()
    late = admit()
    assert inbox.qsize() == 1  # no worker is free
    assert admission.wake_for_requests(True)  # one is: the request that came meanwhile is not waited for
    assert admission.take_requests() == [late] and not admission.wake_for_requests(True)
    admit(), admit()
    assert inbox.qsize() == 2
    admission.close()
    assert inbox.qsize() == 3 and len(admission.take_requests()) == 2
