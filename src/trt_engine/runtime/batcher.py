"""`Batcher`: requests of many callers joined to batches, and every caller gets exactly its rows."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from trt_engine.config import Batching, Profile
from trt_engine.errors import DeadlineExpired, DeviceLost, FeedError, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import Runner
from trt_engine.runtime.batches import Rows, join, part, rows_of
from trt_engine.runtime.counting import Histogram, Times
from trt_engine.runtime.waiting import Request, Waiting
from trt_engine.tensors import Signature, Tensors

__all__ = ["BatchStats", "Batcher"]

log = logging.getLogger(__name__)

_BATCHES_WAITING = 64
"""So many full batches may wait where nobody named a limit."""
_USUAL_BATCH = 32
"""Of an engine that takes any."""
_NO_SMALLER = (DeviceLost, Overloaded, DeadlineExpired)
"""Errors that half a batch would meet again: nothing in it is at fault."""
_FREE, _LOOK, _CLOSE = "free", "look", "close"
_Message = Request | str


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a batcher has done: `requests` is the sum of `answered`, `failed`, `dropped`, `expired`, `waiting`, `running`."""

    requests: int = 0
    """Taken; the refused are not among them."""
    rows: int = 0
    """Of the requests that were run."""
    batches: int = 0
    """Runs of the engine, retries of a failed batch included."""
    mean_batch: float = 0.0
    """Rows in one run."""
    answered: int = 0
    failed: int = 0
    dropped: int = 0
    """Cancelled by their callers before their turn."""
    expired: int = 0
    """Not run: their deadline was over."""
    refused: int = 0
    """Not taken: too much was waiting."""
    waiting: int = 0
    rows_waiting: int = 0
    running: int = 0
    padding: int = 0
    """Rows that were run to fill up a batch and belong to nobody."""
    retries: int = 0
    """Batches that failed and were run again in halves."""
    queue: Times = field(default_factory=Times)
    """From a request's arrival until its batch began."""
    wait: Times = field(default_factory=Times)
    """From a request's arrival until its answer."""
    run: Times = field(default_factory=Times)
    """One run of the engine, joining its inputs included."""


class Batcher:
    """A Runner that joins requests to batches of a Runner: at most `max_batch` rows, waiting at most `max_wait_ms`.

    `submit` answers with a future; `run` waits for it. A batch goes when it is full or its oldest request has waited long
    enough, and the runner is free. Requests of different shapes wait in queues of their own. One request that fails costs
    its neighbours nothing but time: a failed batch is run again in halves until the error has found its caller.

    One thread owns what waits; as many `workers` as the runner can use at once run the batches.
    """

    def __init__(
        self,
        runner: Runner,
        batching: Batching | None = None,
        *,
        profiles: Sequence[Profile] = (),
        workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        given = batching or Batching(**settings)
        self.runner = runner
        """What runs the batches."""
        self._run_parts: Callable[[Sequence[Tensors], int], dict[str, Any]] | None = getattr(runner, "run_parts", None)
        self._rows = Rows.of(runner.signature, profiles)
        most = self._rows.most
        max_batch = given.max_batch or most or _USUAL_BATCH
        if most is not None and max_batch > most:
            raise UsageError(
                f"`max_batch` is {max_batch}, the engine takes {most} rows at once",
                hint=f"`max_batch={most}`, or leave it out",
            )
        self.batching = dataclasses.replace(given, max_batch=max_batch)
        self._buckets = tuple(sorted(given.buckets))
        self._names = [spec.name for spec in runner.signature.inputs]
        self._clock = clock
        self._waiting = Waiting(max_batch)
        self._counts = _Counts()
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        max_rows = given.max_rows_waiting or _BATCHES_WAITING * max_batch
        self._room = _Room(max_rows, given.max_bytes_waiting, self._inbox)
        self._jobs: SimpleQueue[list[Request] | None] = SimpleQueue()
        self.width = given.workers or workers or int(getattr(runner, "width", 1))
        self._idle = self.width
        self._ending = threading.Lock()
        self._ended = False
        name = f"batcher-{id(self):x}"
        self._owner = threading.Thread(target=self._own, name=name, daemon=True)
        self._workers = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(self.width)
        ]
        self._told: SimpleQueue[tuple[Request, BaseException] | None] = SimpleQueue()
        self._teller: threading.Thread | None = None
        self._process = os.getpid()
        self._start()

    def _start(self) -> None:
        started: list[threading.Thread] = []
        try:
            for thread in (self._owner, *self._workers):
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # the process may have no more threads
            needed = 1 + len(self._workers)
            self._workers = [thread for thread in self._workers if thread in started]
            self._idle = self.width = len(self._workers)
            self._room.close()
            for thread in started:
                thread.join()
            raise TrtEngineError(
                f"a batcher needs {needed} threads: {error}", hint="fewer `workers`, or a higher limit"
            ) from error
        atexit.register(self._at_exit)  # its threads must not be inside a library when the interpreter ends

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a child that was forked has neither the threads nor the library's
            self.close()

    @property
    def signature(self) -> Signature:
        """The runner's, with the batch left open."""
        return self._rows.signature

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The engine's, from one row on."""
        return self._rows.profiles

    def submit(self, feeds: Tensors, *, priority: int = 0, deadline_ms: float | None = None) -> Future[dict[str, Any]]:
        """The answer as a future; the arrays must stay as they are until it is done or cancelled.

        A higher `priority` goes first, with a head start of so many times `priority_ms`. A request that has not begun
        within `deadline_ms` is not run: `DeadlineExpired`. `Overloaded` where too much is waiting, `FeedError` for feeds
        that cannot be joined; nothing is checked but rows.
        """
        request = self._request(feeds, priority, deadline_ms)
        self._room.enter(request)
        return request.future

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The same as `submit`, and waits."""
        if self.inside():  # a callback must not wait for itself
            return part(*self._run_rows([dict(feeds)], [rows_of(feeds)]))[0]
        future = self.submit(feeds)
        try:
            return future.result()
        except CancelledError:
            raise UsageError("the batcher was closed before its turn", hint="load the engine again") from None
        except BaseException:
            future.cancel()  # nobody waits any more where the waiting was broken off
            raise

    def stats(self) -> BatchStats:
        return self._counts.read(self._room)

    def filled(self, feeds: Tensors) -> dict[str, Any]:
        """The feeds as the runner gets them when nobody else asks."""
        rows = rows_of(feeds)
        return join([feeds], rows, self._rows.padded(rows, self._buckets))

    def describe(self) -> str:
        """In one line, for facts."""
        given = self.batching
        return f"up to {given.max_batch} rows, waiting up to {given.max_wait_ms:g} ms, {self.width} at once"

    def inside(self) -> bool:
        """Whether the caller is one of the batcher's threads, as a future's callback is."""
        return threading.current_thread() in (self._owner, self._teller, *self._workers)

    def close(self, *, cancel: bool = False) -> None:
        """Refuse new requests, answer those that wait, end the threads, close the runner. Twice is once.

        With `cancel=True` those that wait are cancelled, and only what has begun is answered.
        """
        if self.inside():
            raise UsageError("`close` was called from inside a request", hint="close from the thread that loaded")
        self._room.close()
        if cancel:
            self.cancel_waiting()
        with self._ending:
            if self._ended:
                return
            for thread in (self._owner, *self._workers):
                thread.join()
            atexit.unregister(self._at_exit)
            self.runner.close()
            self._ended = True

    def cancel_waiting(self) -> None:
        """Cancel every request that has not begun."""
        for future in self._room.futures():
            future.cancel()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------- callers' threads

    def _request(self, feeds: Tensors, priority: int, deadline_ms: float | None) -> Request:
        try:
            given = {name: feeds[name] for name in self._names}
        except KeyError as error:
            raise FeedError(f"input `{error.args[0]}` is not fed", hint="feed every input") from None
        for name, array in given.items():
            if not isinstance(array, np.ndarray):
                raise FeedError(
                    f"input `{name}` is a {type(array).__name__}: batches are joined of arrays on the host",
                    hint="give it on the host, or load without `batching`",
                )
        rows = rows_of(given)
        self._rows.check(rows)
        _check_numbers(priority, deadline_ms)
        now_s = self._clock()
        deadline_s = math.inf if deadline_ms is None else now_s + deadline_ms / 1e3
        due_s = now_s + self.batching.max_wait_ms / 1e3
        if deadline_ms is not None:
            slack_s = deadline_ms / 1e3 - self._counts.usual_run_s
            due_s = min(due_s, now_s + max(0.0, slack_s) / 2)  # the other half is for who is in front and for the clock
        return Request(
            feeds=given,
            rows=rows,
            nbytes=sum(array.nbytes for array in given.values()),
            key=tuple([(array.dtype, array.shape[1:]) for array in given.values()]),
            future=_Answer(self._left),
            arrived_s=now_s,
            due_s=due_s,
            deadline_s=deadline_s,
            rank=now_s - priority * self.batching.priority_ms / 1e3,
        )

    def _left(self, future: Future[Any]) -> None:
        """A caller has cancelled: its arrays are its own again, and its place is free."""
        self._room.leave_early(future)

    # -------------------------------------------------------------------------------------------- the owner's thread

    def _own(self) -> None:
        """Take in what arrives, send out what is ready. It must not die: everybody would wait for ever."""
        closing = False
        while not (closing and not len(self._waiting) and self._idle == self.width):
            try:
                for message in self._messages():
                    if isinstance(message, Request):
                        self._waiting.add(message)
                    elif message is _FREE:
                        self._idle += 1
                    elif message is _CLOSE:
                        closing = True
                self._look(closing)
            except Exception as error:  # a fault of ours: those who wait are told, and the thread goes on
                log.exception("the batcher failed; what waited was given up")
                for request in self._waiting.remove_all():
                    if self._begin(request):
                        said = TrtEngineError(f"the batcher failed: {error!r}", hint="this is a bug of ours")
                        self._tell(request, said)
        for _ in self._workers:
            self._jobs.put(None)
        if self._teller is not None:
            self._told.put(None)
            self._teller.join()

    def _messages(self) -> list[_Message]:
        """What has arrived, at least one thing unless it is time for something."""
        inbox, found = self._inbox, []
        wakes_s = self._waiting.wakes_s() if self._idle else self._waiting.expires_s()
        with contextlib.suppress(Empty):
            # a wait of more than some days overflows what the platform can wait for
            timeout = None if wakes_s == math.inf else min(max(0.0, wakes_s - self._clock()), 1e5)
            found.append(inbox.get(timeout=timeout))
            while len(found) < 4096:
                found.append(inbox.get_nowait())
        return found

    def _look(self, closing: bool) -> None:
        now_s = self._clock()
        if self._room.take_departures():
            for request in self._waiting.remove_departed():
                self._begin(request)
        for request in self._waiting.expired(now_s):
            if self._begin(request):
                late_ms = (now_s - request.deadline_s) * 1e3
                self._tell(request, DeadlineExpired(
                    f"the deadline is over by {late_ms:.3g} ms and the request had not begun",
                    hint="a longer deadline, fewer callers, or more GPUs",
                ))  # fmt: skip
        while self._idle and (batch := self._waiting.take(now_s, flush=closing)):
            begun = [request for request in batch if self._begin(request)]
            if begun:
                self._idle -= 1
                self._counts.began(begun, now_s)
                self._jobs.put(begun)

    def _begin(self, request: Request) -> bool:
        """True when the request's caller is still there, who from now on cannot cancel any more."""
        try:
            there = request.future.set_running_or_notify_cancel()
        except (RuntimeError, InvalidStateError):  # somebody else has answered it
            there = False
        self._room.leave(request)
        if not there:
            self._counts.dropped()
        return there

    def _tell(self, request: Request, error: BaseException) -> None:
        """Answer from a thread that may be kept waiting: a caller's callbacks run where the answer is given."""
        if self._teller is None:
            teller = threading.Thread(target=self._tell_all, name=f"{self._owner.name}-teller", daemon=True)
            try:
                teller.start()
            except RuntimeError:  # the process may have no more threads: rather here than never
                self._finish(request, error, ran=False)
                return
            self._teller = teller
        self._told.put((request, error))

    def _tell_all(self) -> None:
        while (told := self._told.get()) is not None:
            self._finish(*told, ran=False)
            del told

    # -------------------------------------------------------------------------------------------- the workers' threads

    def _work(self) -> None:
        """Run one batch after the other. It must not die: its batch's callers would wait for ever."""
        while (batch := self._jobs.get()) is not None:
            try:
                self._answer(batch)
            except BaseException as error:
                log.exception("a batch failed in a way nobody thought of")
                for request in batch:
                    self._finish(request, error)
            del batch
            self._inbox.put(_FREE)

    def _answer(self, batch: Sequence[Request]) -> None:
        """Run these requests as one batch, and in halves where that fails."""
        try:
            parts = part(*self._run_rows([request.feeds or {} for request in batch], [item.rows for item in batch]))
        except BaseException as error:
            if len(batch) == 1 or isinstance(error, _NO_SMALLER):
                for request in batch:
                    self._finish(request, error if len(batch) == 1 else _copied(error))
                return
            self._counts.retried()
            middle = len(batch) // 2
            self._answer(batch[:middle])
            self._answer(batch[middle:])
            return
        for request, outputs in zip(batch, parts, strict=True):
            self._finish(request, outputs)

    def _run_rows(self, parts: list[dict[str, Any]], counts: list[int]) -> tuple[dict[str, Any], list[int], int]:
        """The outputs of these parts run together, and how many rows they have."""
        rows = sum(counts)
        padded = self._rows.padded(rows, self._buckets)
        started_s = self._clock()
        try:
            if self._run_parts is not None and (len(parts) > 1 or rows != padded):
                return self._run_parts(parts, padded), counts, rows
            return self.runner.run(join(parts, rows, padded)), counts, padded
        finally:
            self._counts.ran(rows, padded, self._clock() - started_s)

    def _finish(self, request: Request, answer: dict[str, Any] | BaseException, *, ran: bool = True) -> None:
        """Give the answer, once; the request's arrays are the caller's again. Whatever a callback raises ends here."""
        if request.feeds is None:
            return
        request.feeds = None
        self._counts.finished(request, answer, self._clock(), ran=ran)
        try:
            if isinstance(answer, BaseException):
                request.future.set_exception(answer)
            else:
                request.future.set_result(answer)
        except InvalidStateError:
            log.warning("a future was answered by somebody else than the batcher")
        except BaseException:  # `sys.exit` in a callback: this thread is not its caller's, and others wait for it
            log.exception("a callback of a future raised")


def _check_numbers(priority: float, deadline_ms: float | None) -> None:
    """One that is no number would put the whole queue out of order."""
    with contextlib.suppress(TypeError, OverflowError):
        if math.isfinite(priority) and (deadline_ms is None or math.isfinite(deadline_ms / 1e3) or deadline_ms > 0):
            return
    raise UsageError(
        f"`priority` is {priority!r} and `deadline_ms` is {deadline_ms!r}, expected numbers",
        hint="as `priority=1, deadline_ms=50`",
    )


def _copied(error: BaseException) -> BaseException:
    """One of its own for each caller: a traceback grows as an error is raised."""
    try:
        again = copy.copy(error)
    except Exception:  # an error of somebody else's that cannot be copied is shared
        return error
    again.__cause__ = error
    return again


class _Answer(Future[dict[str, Any]]):
    """A future that tells when it is cancelled."""

    def __init__(self, left: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._left = left

    def cancel(self) -> bool:
        first = not self.cancelled()
        cancelled = super().cancel()
        if cancelled and first:
            self._left(self)
        return cancelled


class _Room:
    """How much waits, and whether more may: the one thing callers and owner share."""

    def __init__(self, max_rows: int, max_bytes: int | None, inbox: SimpleQueue[_Message]) -> None:
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._inbox = inbox
        self._lock = threading.Lock()
        self._inside: dict[Future[Any], Request] = {}
        self._rows = self._bytes = 0
        self._refused = self._entered = self._departures = 0
        self._closed = False

    def enter(self, request: Request) -> None:
        with self._lock:
            if self._closed:
                raise UsageError("the batcher is closed", hint="load the engine again")
            rows, nbytes = self._rows + request.rows, self._bytes + request.nbytes
            # what is larger than all the room there is goes when nobody else waits
            if self._inside and rows > self._max_rows:
                self._refused += 1
                raise Overloaded(
                    f"{self._rows} rows are waiting of {self._max_rows} that may, there is no room for {request.rows} more",
                    hint="ask again later; `max_rows_waiting` sets the limit",
                )
            if self._inside and self._max_bytes is not None and nbytes > self._max_bytes:
                self._refused += 1
                raise Overloaded(
                    f"{self._bytes} bytes are waiting of {self._max_bytes} that may, there is no room for "
                    f"{request.nbytes} more",
                    hint="ask again later; `max_bytes_waiting` sets the limit",
                )
            self._entered += 1
            self._rows, self._bytes = rows, nbytes
            self._inside[request.future] = request
            self._inbox.put(request)  # under the lock: nothing may come behind `_CLOSE`

    def leave(self, request: Request) -> None:
        with self._lock:
            self._leave(request.future)

    def leave_early(self, future: Future[Any]) -> None:
        """After a cancellation. The first since the owner looked makes it look."""
        with self._lock:
            request = self._leave(future)
            if request is not None:
                request.feeds = None
                self._departures += 1
                if self._departures == 1:
                    self._inbox.put(_LOOK)

    def _leave(self, future: Future[Any]) -> Request | None:
        request = self._inside.pop(future, None)
        if request is not None:
            self._rows -= request.rows
            self._bytes -= request.nbytes
        return request

    def take_departures(self) -> int:
        with self._lock:
            found, self._departures = self._departures, 0
            return found

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(_CLOSE)

    def futures(self) -> list[Future[Any]]:
        with self._lock:
            return list(self._inside)

    def read(self) -> tuple[int, int, int, int]:
        """Requests taken, requests refused, requests inside, rows inside."""
        with self._lock:
            return self._entered, self._refused, len(self._inside), self._rows


class _Counts:
    """What owner and workers have done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue, self._wait, self._run = Histogram(), Histogram(), Histogram()
        self._recent_s: deque[float] = deque(maxlen=16)
        self._rows = self._batches = self._padding = self._retries = self._run_rows = 0
        self._begun = self._over = self._answered = self._failed = self._dropped = self._expired = 0
        self.usual_run_s = 0.0
        """The longest of the last runs; a request with a deadline goes earlier for it."""

    def began(self, batch: Sequence[Request], now_s: float) -> None:
        with self._lock:
            self._begun += len(batch)
            for request in batch:
                self._rows += request.rows
                self._queue.add(now_s - request.arrived_s)

    def ran(self, rows: int, padded: int, seconds: float) -> None:
        with self._lock:
            self._batches += 1
            self._run_rows += rows
            self._padding += padded - rows
            self._run.add(seconds)
            self._recent_s.append(seconds)
            self.usual_run_s = max(self._recent_s)

    def retried(self) -> None:
        with self._lock:
            self._retries += 1

    def dropped(self) -> None:
        with self._lock:
            self._dropped += 1

    def finished(self, request: Request, answer: object, now_s: float, *, ran: bool) -> None:
        with self._lock:
            self._over += ran
            if isinstance(answer, DeadlineExpired) and not ran:
                self._expired += 1
            elif isinstance(answer, BaseException):
                self._failed += 1
            else:
                self._answered += 1
            self._wait.add(now_s - request.arrived_s)

    def read(self, room: _Room) -> BatchStats:
        with self._lock:
            entered, refused, _, rows_waiting = room.read()
            running = self._begun - self._over
            return BatchStats(
                requests=entered,
                rows=self._rows,
                batches=self._batches,
                mean_batch=self._run_rows / self._batches if self._batches else 0.0,
                answered=self._answered,
                failed=self._failed,
                dropped=self._dropped,
                expired=self._expired,
                refused=refused,
                waiting=entered - self._answered - self._failed - self._dropped - self._expired - running,
                rows_waiting=rows_waiting,
                running=running,
                padding=self._padding,
                retries=self._retries,
                queue=self._queue.read(),
                wait=self._wait.read(),
                run=self._run.read(),
            )
