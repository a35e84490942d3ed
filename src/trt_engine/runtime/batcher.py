"""`Batcher`: joins concurrent requests into batches and returns each request's rows."""

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
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import Batching
from trt_engine.errors import DeadlineExpired, DeviceLost, FeedError, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batch_queue import CLOSE, WORKER_FREE, AdmissionControl, BatchQueue, InferenceFuture, Request
from trt_engine.runtime.batch_rows import DEFAULT_MAX_BATCH, BatchLayout, concat, row_count, split
from trt_engine.runtime.batch_stats import BatchCounters, BatchStats
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.tensors import Tensors

log = logging.getLogger(__name__)

_DEFAULT_QUEUED_BATCHES = 64
"""Default queue limit, in full batches."""
_NOT_RETRIED = (DeviceLost, Overloaded, DeadlineExpired)
"""Errors not caused by a request: the batch is not bisected."""


class Batcher(ProcessBound, RunnerBase):
    """A runner that batches requests for another runner: up to `max_batch` rows, waiting up to `max_wait_ms`.

    `submit` returns a future; `run` waits for it. A batch is dispatched when it is full or its oldest request has waited
    `max_wait_ms`, and the runner is free. Requests of different shapes have separate queues. A failed batch is bisected
    until the failing request is isolated; the others still succeed.

    One thread owns the queue; `workers` threads run batches. A batcher that is dropped without `close` answers what
    waits; then its threads end, with a `ResourceWarning`.
    """

    def __init__(
        self,
        runner: RunnerBase,
        batching: Batching | None = None,
        *,
        profiles: Sequence[Profile] = (),
        workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        """`settings` are those of `Batching`; `clock` returns seconds.

        Raises `UsageError` for a `max_batch` above the profile's, `TrtEngineError` if no threads can be started.
        """
        given = batching or Batching(**settings)
        self.runner = runner
        """Runs the batches."""
        signature = runner.signature
        if given.max_batch == 1:  # nothing is joined, so rows may depend on each other
            signature = dataclasses.replace(signature, row_dependence=None)
        self._layout = BatchLayout.from_signature(signature, profiles)
        self.signature = self._layout.signature
        self.profiles = self._layout.profiles
        most = self._layout.max_rows
        max_batch = given.max_batch or most or DEFAULT_MAX_BATCH
        if most is not None and max_batch > most:
            raise UsageError(
                f"`max_batch` is {max_batch}, the engine takes {most} rows at once",
                hint=f"`max_batch={most}` (`serve`: `--max-batch {most}`), or leave it out",
            )
        self.batching = dataclasses.replace(given, max_batch=max_batch)
        self._max_batch = max_batch
        self._buckets = tuple(sorted(given.buckets))
        self._input_names = [spec.name for spec in runner.signature.inputs]
        self._clock = clock
        self._queue = BatchQueue(max_batch)
        self._counters = BatchCounters()
        self._inbox: SimpleQueue[str] = SimpleQueue()
        max_rows = given.max_rows_waiting or _DEFAULT_QUEUED_BATCHES * max_batch
        self._admission = AdmissionControl(max_rows, given.max_bytes_waiting, self._inbox)
        self._jobs: SimpleQueue[list[Request] | None] = SimpleQueue()
        self.width = given.workers or workers or runner.width
        self._idle_workers = self.width
        self._close_lock = threading.Lock()
        self._closing = self._closed = False
        name, this = f"batcher-{id(self):x}", weakref.ref(self)
        owner = (this, self._inbox, self._admission)
        self._owner = threading.Thread(target=_own_queue, args=owner, name=name, daemon=True)
        worker = (this, self._jobs, self._inbox)
        self._workers = [
            threading.Thread(target=_run_jobs, args=worker, name=f"{name}-{number}", daemon=True)
            for number in range(self.width)
        ]
        self._rejections: SimpleQueue[tuple[Request, BaseException] | None] = SimpleQueue()
        self._rejecter: threading.Thread | None = None
        self._start_threads()

    def _start_threads(self) -> None:
        started: list[threading.Thread] = []
        try:
            for thread in (self._owner, *self._workers):
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # thread limit of the process
            needed = 1 + len(self._workers)
            self._workers = [thread for thread in self._workers if thread in started]
            self._idle_workers = self.width = len(self._workers)
            self._admission.close()
            for thread in started:
                thread.join()
            raise TrtEngineError(
                f"a batcher needs {needed} threads: {error}", hint="fewer `workers`, or a higher limit"
            ) from error
        self._at_exit = partial(_close_at_exit, weakref.ref(self), self._process_id)
        atexit.register(self._at_exit)  # no thread may be inside a library at interpreter exit
        queues = (self._inbox, self._jobs, self._rejections)
        self._finalizer = weakref.finalize(self, _end_threads, *queues, self.width, self._at_exit, self._process_id)
        self._finalizer.atexit = False

    def submit(
        self,
        feeds: Tensors,
        *,
        priority: int = 0,
        deadline_ms: float | None = None,
        done: Callable[[Future[dict[str, Any]]], None] | None = None,
    ) -> InferenceFuture[dict[str, Any]]:
        """A future of the outputs for feeds `[rows, ...]` in the dtypes of the signature; the arrays must not change until
        it is done or cancelled.

        `priority` moves a request forward by `priority` * `priority_ms`. A request not started within `deadline_ms` gets
        `DeadlineExpired`. `done` is called with the future by the thread that resolves it. Raises `Overloaded` if the queue
        is full, `FeedError` for feeds that cannot be batched (only rows are checked).
        """
        request = self._make_request(feeds, priority, deadline_ms)
        if done is not None:  # before it can run: a callback that is added later is called by the thread that adds it
            request.future.add_done_callback(done)
        self._admission.admit(request)
        return request.future

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """`submit`, then wait for the outputs.

        Feeds and outputs are `[rows, ...]`, in the dtypes of the signature. Raises as `submit`, with `FeedError` for feeds
        without rows; `UsageError` if the batcher closes first, `TrtEngineError` for an output without a row per input row.
        """
        if self.is_own_thread():  # a callback would deadlock
            return split(*self._run_padded([dict(feeds)], [row_count(feeds)]))[0]
        future = self.submit(feeds)
        try:
            return future.result()
        except CancelledError:
            raise UsageError("the batcher was closed while the request waited", hint="load the engine again") from None
        except BaseException:
            future.cancel()  # the wait was interrupted
            raise

    def stats(self) -> BatchStats:
        return self._counters.stats(self._admission)

    def pad_feeds(self, feeds: Tensors) -> dict[str, Any]:
        """The feeds padded as for a batch of this request alone.

        Shapes are `[rows, ...]`, dtypes stay. Raises `FeedError` for inputs without or with different rows.
        """
        rows = row_count(feeds)
        return concat([feeds], rows, self._layout.bucket_for(rows, self._buckets))

    def describe(self) -> str:
        """A one-line summary."""
        given = self.batching
        return f"up to {given.max_batch} rows, waiting up to {given.max_wait_ms:g} ms, {self.width} at once"

    def is_own_thread(self) -> bool:
        """Whether the current thread is one of the batcher's, as in a future's callback."""
        return threading.current_thread() in (self._owner, self._rejecter, *self._workers)

    def close(self, *, cancel: bool = False) -> None:
        """Reject new requests, finish waiting ones (or `cancel` them), join the threads, close the runner. Idempotent.

        Raises `UsageError` from inside a request.
        """
        if self._forked:
            return
        if self.is_own_thread():
            raise UsageError("`close` was called from inside a request", hint="close from the thread that loaded")
        self._admission.close()
        if cancel:
            self.cancel_waiting()
        with self._close_lock:
            if self._closed:
                return
            for thread in (self._owner, *self._workers):
                thread.join()
            self._finalizer.detach()
            atexit.unregister(self._at_exit)
            self.runner.close()
            self._closed = True

    def cancel_waiting(self) -> None:
        """Cancel all requests that have not started."""
        for future in self._admission.futures():
            future.cancel()

    # -------------------------------------------------------------------------------------------- callers' threads

    def _make_request(self, feeds: Tensors, priority: int, deadline_ms: float | None) -> Request:
        try:
            given = {name: feeds[name] for name in self._input_names}
        except KeyError as error:
            raise FeedError(f"input `{error.args[0]}` is not fed", hint="feed every input") from None
        for name, array in given.items():
            if not isinstance(array, np.ndarray):
                raise FeedError(
                    f"input `{name}` is a {type(array).__name__}, batching needs host arrays",
                    hint="pass a host array, or load without `batching`",
                )
        rows = row_count(given)
        if rows > self._max_batch:
            self._layout.check_rows(rows)
        if priority != 0 or deadline_ms is not None:
            _check_numbers(priority, deadline_ms)
        now_s = self._clock()
        deadline_s = math.inf if deadline_ms is None else now_s + deadline_ms / 1e3
        due_s = now_s + self.batching.max_wait_ms / 1e3
        if deadline_ms is not None:
            slack_s = deadline_ms / 1e3 - self._counters.recent_max_run_s
            due_s = min(due_s, now_s + max(0.0, slack_s) / 2)  # the other half covers running batches and clock error
        return Request(
            feeds=given,
            rows=rows,
            nbytes=sum(array.nbytes for array in given.values()),
            key=tuple([(array.dtype, array.shape[1:]) for array in given.values()]),
            future=_RequestFuture(self._on_cancel),
            arrived_s=now_s,
            due_s=due_s,
            deadline_s=deadline_s,
            rank=now_s - priority * self.batching.priority_ms / 1e3,
        )

    def _on_cancel(self, future: Future[Any]) -> None:
        """Release the arrays and the queue space of a cancelled request."""
        self._admission.cancel(future)

    # -------------------------------------------------------------------------------------------- the owner's thread

    def _take_turn(self, messages: Sequence[str], arrived: Sequence[Request]) -> float | None:
        """Dispatch batches; the seconds to wait for the next message, None at the end. Must survive errors, or all requests
        would hang."""
        try:
            for message in messages:
                if message is WORKER_FREE:
                    self._idle_workers += 1
                elif message is CLOSE:
                    self._closing = True
            for request in arrived:
                self._queue.add(request)
            arrived = []
            self._dispatch_ready(self._closing)
            return None if self._ended() else self._wait_s()
        except Exception as error:  # a bug here: fail the waiting requests and continue
            log.exception("the batcher failed; waiting requests were rejected")
            for request in dict.fromkeys([*self._queue.remove_all(), *arrived]):
                if self._start_request(request):
                    message = f"the batcher failed: {error!r}"
                    self._reject(request, TrtEngineError(message, hint="this is a bug in trt-engine"))
            return 0.0

    def _ended(self) -> bool:
        """Whether the batcher is closed and everything is answered; then its other threads end."""
        if not self._closing or len(self._queue) or self._idle_workers < self.width:
            return False
        for _ in self._workers:
            self._jobs.put(None)
        if self._rejecter is not None:
            self._rejections.put(None)
            self._rejecter.join()
        return True

    def _wait_s(self) -> float:
        """Seconds until the next timeout; 0 where requests are there to be taken."""
        ready = self._admission.wake_for_requests(self._idle_workers > 0)
        wakes_s = self._queue.next_event_s() if self._idle_workers else self._queue.next_deadline_s()
        return 0.0 if ready else max(0.0, wakes_s - self._clock())

    def _dispatch_ready(self, closing: bool) -> None:
        now_s = self._clock()
        if self._admission.take_cancellations():
            for request in self._queue.remove_cancelled():
                self._start_request(request)
        for request in self._queue.remove_expired(now_s):
            if self._start_request(request):
                late_ms = (now_s - request.deadline_s) * 1e3
                self._reject(request, DeadlineExpired(
                    f"the deadline passed {late_ms:.3g} ms ago and the request had not started",
                    hint="a longer deadline, fewer concurrent requests, or more GPUs",
                ))  # fmt: skip
        while self._idle_workers and (batch := self._queue.take_batch(now_s, flush=closing)):
            begun = [request for request in batch if self._start_request(request)]
            if begun:
                self._idle_workers -= 1
                self._counters.count_started(begun, now_s)
                self._jobs.put(begun)

    def _start_request(self, request: Request) -> bool:
        """Whether the request was not cancelled; it cannot be cancelled afterwards."""
        try:
            there = request.future.set_running_or_notify_cancel()
        except (RuntimeError, InvalidStateError):  # resolved elsewhere
            there = False
        self._admission.release(request)
        if not there:
            self._counters.count_cancelled()
        return there

    def _reject(self, request: Request, error: BaseException) -> None:
        """Fail a request on a separate thread, because callbacks may block."""
        if self._rejecter is None:
            name, this = f"{self._owner.name}-teller", weakref.ref(self)
            teller = threading.Thread(target=_tell_rejected, args=(this, self._rejections), name=name, daemon=True)
            try:
                teller.start()
            except RuntimeError:  # thread limit reached: fail it on this thread
                self._finish(request, error, ran=False)
                return
            self._rejecter = teller
        self._rejections.put((request, error))

    # -------------------------------------------------------------------------------------------- the workers' threads

    def _run_job(self, batch: Sequence[Request]) -> None:
        """Run a batch. Must survive errors, or its requests would hang."""
        try:
            self._run_batch(batch)
        except BaseException as error:
            log.exception("a batch failed unexpectedly")
            for request in batch:
                self._finish(request, error)

    def _run_batch(self, batch: Sequence[Request]) -> None:
        """Run these requests as one batch; bisect on failure."""
        try:
            parts = split(*self._run_padded([request.feeds or {} for request in batch], [item.rows for item in batch]))
        except BaseException as error:
            if len(batch) == 1 or isinstance(error, _NOT_RETRIED):
                for request in batch:
                    self._finish(request, error if len(batch) == 1 else _copy_error(error))
                return
            self._counters.count_retry()
            middle = len(batch) // 2
            self._run_batch(batch[:middle])
            self._run_batch(batch[middle:])
            return
        for request, outputs in zip(batch, parts, strict=True):
            self._finish(request, outputs)

    def _run_padded(self, parts: list[dict[str, Any]], counts: list[int]) -> tuple[dict[str, Any], list[int], int]:
        """Run `parts` as one batch: the outputs, the row counts, and the rows of the outputs."""
        rows = sum(counts)
        padded = self._layout.bucket_for(rows, self._buckets)
        started_s = self._clock()
        try:
            if self.runner.can_batch and (len(parts) > 1 or rows != padded):
                return self.runner.run_batched(parts, padded), counts, rows
            return self.runner.run(concat(parts, rows, padded)), counts, padded
        finally:
            self._counters.count_run(rows, padded, self._clock() - started_s)

    def _finish(self, request: Request, result: dict[str, Any] | BaseException, *, ran: bool = True) -> None:
        """Resolve the future once and release the request's arrays; exceptions of callbacks are logged."""
        if request.feeds is None:
            return
        request.feeds = None
        self._counters.count_finished(request, result, self._clock(), ran=ran)
        try:
            if isinstance(result, BaseException):
                request.future.set_exception(result)
            else:
                request.future.set_result(result)
        except InvalidStateError:
            log.warning("a future was resolved outside the batcher")
        except BaseException:  # including `sys.exit`: other requests need this thread
            log.exception("a callback of a future raised")


# ------------------------------------------------------------------------------------------------ threads
# They hold the batcher only while they work, so that one that is dropped is freed. A request that waits holds it through
# its future, and is in the admission control, the jobs or the rejections, which a thread holds.


def _own_queue(this: weakref.ref[Batcher], inbox: SimpleQueue[str], admission: AdmissionControl) -> None:
    """Receive requests and dispatch batches until the batcher is closed or freed."""
    wait_s: float | None = 0.0
    while wait_s is not None:
        messages = _receive(inbox, wait_s)
        arrived = admission.take_requests()
        batcher = this()
        if batcher is None:
            return
        wait_s = batcher._take_turn(messages, arrived)
        del batcher, arrived


def _receive(inbox: SimpleQueue[str], wait_s: float) -> list[str]:
    """Received messages; waits up to `wait_s` for the first."""
    found = list[str]()
    with contextlib.suppress(Empty):
        # some platforms overflow on waits of days
        timeout = None if wait_s == math.inf else min(wait_s, 1e5)
        found.append(inbox.get(timeout=timeout) if wait_s else inbox.get_nowait())
        while len(found) < 4096:
            found.append(inbox.get_nowait())
    return found


def _run_jobs(this: weakref.ref[Batcher], jobs: SimpleQueue[list[Request] | None], inbox: SimpleQueue[str]) -> None:
    """Run batches until there are no more."""
    while (batch := jobs.get()) is not None:
        if (batcher := this()) is not None:
            batcher._run_job(batch)
        del batch, batcher
        inbox.put(WORKER_FREE)


def _tell_rejected(this: weakref.ref[Batcher], rejections: SimpleQueue[tuple[Request, BaseException] | None]) -> None:
    while (rejection := rejections.get()) is not None:
        if (batcher := this()) is not None:
            batcher._finish(*rejection, ran=False)
        del rejection, batcher


def _end_threads(
    inbox: SimpleQueue[str],
    jobs: SimpleQueue[list[Request] | None],
    rejections: SimpleQueue[tuple[Request, BaseException] | None],
    workers: int,
    at_exit: Callable[[], None],
    process_id: int,
) -> None:
    """Let the threads of a batcher that was freed end; takes no lock, because any thread may be here at any moment."""
    atexit.unregister(at_exit)
    inbox.put(CLOSE)
    for _ in range(workers):
        jobs.put(None)
    rejections.put(None)
    if os.getpid() == process_id:
        message = "an engine with `batching` was dropped without `close`; its threads ended now"
        warnings.warn(message, ResourceWarning, stacklevel=2)


def _close_at_exit(this: weakref.ref[Batcher], process_id: int) -> None:
    batcher = this()
    if batcher is not None and os.getpid() == process_id:  # threads do not survive a fork
        batcher.close()


def _check_numbers(priority: float, deadline_ms: float | None) -> None:
    """`UsageError` for a value that is not a number, such as NaN: it would break the queue's order."""
    with contextlib.suppress(TypeError, OverflowError):
        if math.isfinite(priority) and (deadline_ms is None or math.isfinite(deadline_ms / 1e3) or deadline_ms > 0):
            return
    raise UsageError(
        f"`priority` is {priority!r} and `deadline_ms` is {deadline_ms!r}, expected numbers",
        hint="as `priority=1, deadline_ms=50`",
    )


def _copy_error(error: BaseException) -> BaseException:
    """A copy for each request: raising extends an error's traceback."""
    try:
        again = copy.copy(error)
    except Exception:  # not copyable: share it
        return error
    again.__cause__ = error
    return again


class _RequestFuture(InferenceFuture[dict[str, Any]]):
    """A future that calls back when it is cancelled."""

    def __init__(self, on_cancel: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._on_cancel = on_cancel

    def cancel(self) -> bool:
        first = not self.cancelled()
        cancelled = super().cancel()
        if cancelled and first:
            self._on_cancel(self)
        return cancelled
