"""`InferenceEngine`: an engine that is loaded and answers, from one thread or from many."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import Any, Literal, overload

import numpy as np

from trt_engine.config import Profile
from trt_engine.device.dlpack import DeviceArray
from trt_engine.engine import Engine
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.protocols import Runner
from trt_engine.runtime.arrays import admitted, is_foreign
from trt_engine.runtime.batcher import Batcher, BatchStats
from trt_engine.runtime.counting import FOLD, Tally
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.runtime.pool import ContextPool, PoolStats
from trt_engine.runtime.replicas import Replicas, ReplicaStats
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec

__all__ = ["InferenceEngine", "InferenceResult", "Stats"]

log = logging.getLogger(__name__)

_REMEMBERED = 1024
"""Feeds accepted before are remembered by names, types and shapes, so many of them; then from the start again."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The answer to one request that does not raise."""

    outputs: dict[str, Any] = field(default_factory=dict)
    latency_ms: float = 0.0
    """By device events from upload to download where one context answered, else by the host's clock around the call."""
    success: bool = True
    message: str = ""
    """What went wrong, and what to do; empty for a success."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What an `InferenceEngine` has done since it was loaded; warm-up is not counted."""

    requests: int
    """Answered, failures included."""
    failures: int
    in_flight: int
    seconds: float
    """Spent inside requests, summed over threads."""
    pool: PoolStats | None = None
    """The contexts, on backends that have them."""
    batching: BatchStats | None = None
    replicas: tuple[ReplicaStats, ...] = ()


class InferenceEngine:
    """A loaded engine: `infer`, `infer_async`, `warmup`, `stats`, `close`. Made by `te.load`; safe from many threads.

    The outputs belong to the caller: no later call changes them. No thread is started before the first `infer_async`.
    """

    def __init__(self, runner: Runner, engine: Engine, *, on_close: Callable[[], None] | None = None) -> None:
        self.runner = runner
        """What answers: a `DirectRunner`, a `ContextPool`, `Replicas`, a `Batcher`."""
        self._run: Callable[[Tensors], dict[str, Any]] = runner.run
        self._staying: Callable[[Tensors], dict[str, Any]] | None = getattr(runner, "run_on_device", None)
        self._engine = engine
        self._signature = runner.signature
        self._profiles: tuple[Profile, ...] = getattr(runner, "profiles", engine.passport.profiles)
        self._batcher = runner if isinstance(runner, Batcher) else None
        below = self._batcher.runner if self._batcher is not None else runner
        self._replicas = below if isinstance(below, Replicas) else None
        self._pool = below if isinstance(below, ContextPool) else None
        self._device = None if self._batcher is not None else getattr(runner, "device", None)
        self._workers = int(getattr(runner, "width", 1))
        self._on_close = on_close
        self._accepted: set[tuple[Any, ...]] = set()
        self._last: tuple[tuple[str, type, Any, Any, Any], ...] | None = None
        """What the feeds accepted last look like."""
        self._tally = Tally()
        self._began, self._ended = self._tally.begin, self._tally.end
        self._executor: ThreadPoolExecutor | None = None
        self._queued: set[Future[Any]] = set()
        self._thread_prefix = f"infer-{id(self):x}"
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._closing = False
        self._ending = threading.Lock()
        self._closed = False
        self._warming = 0
        self._last_facts = self._find_facts()

    # -------------------------------------------------------------------------------------------- what it is

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.outputs

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The ranges of shapes it takes; a feed must lie within one of them."""
        return self._profiles

    @property
    def engine(self) -> Engine:
        """The engine on disk it was loaded from."""
        return self._engine

    @property
    def facts(self) -> dict[str, str]:
        """The truth about what runs: backend, device, providers, threads, replicas that do not serve, by name."""
        if not self._closing:
            self._last_facts = self._find_facts()
        return dict(self._last_facts)

    def _find_facts(self) -> dict[str, str]:
        below = self._batcher.runner if self._batcher is not None else self.runner
        told = {"engine": self._engine.path.name, "backend": self._engine.passport.backend}
        told |= getattr(below, "facts", dict)()
        if self._batcher is not None:
            told["batching"] = self._batcher.describe()
        return told

    def stats(self) -> Stats:
        return Stats(
            *self._tally.read(),
            pool=self._pool.stats() if self._pool is not None else None,
            batching=self._batcher.stats() if self._batcher is not None else None,
            replicas=self._replicas.stats() if self._replicas is not None else (),
        )

    def is_captured(self, feeds: Any) -> bool:
        """Whether feeds of these shapes are answered by replaying a graph, in some context."""
        pools = self._pools()
        arrays = self._accept(feeds)
        return any(pool.is_captured(arrays) for pool in pools)

    def reset(self) -> None:
        """Forget all graphs; they are captured again as their shapes come."""
        for pool in self._pools():
            pool.reset()

    def _pools(self) -> list[ContextPool]:
        runners = self._replicas.runners if self._replicas is not None else [self._pool]
        return [runner for runner in runners if isinstance(runner, ContextPool)]

    # -------------------------------------------------------------------------------------------- requests

    @overload
    def infer(self, feeds: Any, *, result: Literal[False] = False, on_device: bool = False) -> dict[str, Any]: ...
    @overload
    def infer(self, feeds: Any, *, result: Literal[True], on_device: bool = False) -> InferenceResult: ...
    def infer(self, feeds: Any, *, result: bool = False, on_device: bool = False) -> dict[str, Any] | InferenceResult:
        """The outputs by name for feeds by name (or one array, for an engine of one input); raises what went wrong.

        Feeds are numpy arrays or anything with DLPack, on the host or on the engine's device. Types are never converted.
        With `on_device=True` the outputs stay on the device, as arrays with DLPack. With `result=True` an
        `InferenceResult` comes back instead, and errors of ours are in it.
        """
        if result:
            return self._result(feeds, on_device)
        return self._answer(feeds, False, self._staying or self._on_device()) if on_device else self._answer(feeds)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The same as `infer`, under the name every Runner has."""
        return self._answer(feeds)

    @overload
    def infer_async(
        self, feeds: Any, *, result: Literal[False] = False, priority: int = 0, deadline_ms: float | None = None
    ) -> Future[dict[str, Any]]: ...
    @overload
    def infer_async(
        self, feeds: Any, *, result: Literal[True], priority: int = 0, deadline_ms: float | None = None
    ) -> Future[InferenceResult]: ...
    def infer_async(
        self, feeds: Any, *, result: bool = False, priority: int = 0, deadline_ms: float | None = None
    ) -> Future[Any]:
        """The same as `infer`, as a future; the arrays must stay as they are until it is done.

        As many run at once as the engine has contexts; the others wait in order. A future that is cancelled before
        its turn costs nothing. `priority` and `deadline_ms` are for engines loaded with `batching`: `Batcher.submit`.
        """
        if self._batcher is not None and not result:
            return self._submit(feeds, priority, deadline_ms)
        if priority or deadline_ms is not None:
            raise UsageError(
                "`priority` and `deadline_ms` are for futures of engines loaded with `batching`",
                hint="`te.load(engine, batching=te.Batching())`, and `result` left out",
            )
        call = self._result if result else self._answer
        with self._lock:
            if self._closing:
                raise _closed()
            if self._executor is None:
                workers = self._workers if self._batcher is None else self._batcher.batching.max_batch or 1
                self._executor = ThreadPoolExecutor(workers, self._thread_prefix)
            future: Future[Any] = Future()
            try:
                self._executor.submit(self._deliver, future, call, feeds)
            except RuntimeError as error:  # the interpreter ends, or the process may have no more threads
                raise TrtEngineError(f"nobody can answer any more: {error}", hint="ask with `infer`") from error
            self._queued.add(future)
            return future

    def _deliver(self, future: Future[Any], call: Callable[..., Any], feeds: Any) -> None:
        """Answer in a thread that is everybody's: whatever a callback raises, `sys.exit` too, ends here."""
        self._queued.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer, error = call(feeds, queued=True), None
        except BaseException as raised:
            answer, error = None, raised
        try:
            future.set_result(answer) if error is None else future.set_exception(error)
        except BaseException:
            log.exception("a callback of a future raised")

    def _submit(self, feeds: Any, priority: int, deadline_ms: float | None) -> Future[dict[str, Any]]:
        assert self._batcher is not None
        tally = self._tally
        number = tally.begin()
        started = perf_counter()

        def end(future: Future[Any]) -> None:
            failed = future.cancelled() or future.exception() is not None
            self._end(number, started, failed)

        try:
            if self._closing:
                raise _closed()
            future = self._batcher.submit(self._accept(feeds), priority=priority, deadline_ms=deadline_ms)
        except FeedError as error:  # told where the answer is asked for, as without a batcher
            self._end(number, started, True)
            future = Future()
            future.set_exception(error)
            return future
        except BaseException:
            self._end(number, started, True)
            raise
        future.add_done_callback(end)
        return future

    def warmup(
        self, runs: int = 1, *, batch: int | None = None, shapes: Mapping[str, Shape] | None = None, seed: int = 0
    ) -> None:
        """Run `runs` times on seeded inputs of the profile's usual shape, on every device and in every context.

        With graphs this captures those of these shapes.
        """
        for name, number in (("runs", runs), ("batch", 1 if batch is None else batch)):
            if not isinstance(number, int) or number < 1:
                raise UsageError(f"`{name}` is {number!r}, expected a whole number of 1 or more", hint="`warmup(3)`")
        profile = self._profiles[0] if self._profiles else None
        wanted = shapes_of(self._signature, profile, batch=batch, overrides=shapes)
        feeds = self._accept(random_feeds(self._signature, wanted, seed))
        with self._lock:
            if self._closing:
                raise _closed()
            self._warming += 1
        try:
            self._warm(feeds, runs)
        finally:
            with self._lock:
                self._warming -= 1
            self._wake()

    def _warm(self, feeds: Tensors, runs: int) -> None:
        below = self.runner
        if self._batcher is not None:
            below, feeds = self._batcher.runner, self._batcher.filled(feeds)
        for runner in self._replicas.runners if self._replicas is not None else [below]:
            for _ in range(runs):
                getattr(runner, "warm", runner.run)(feeds)

    def _answer(
        self, feeds: Any, queued: bool = False, run: Callable[[Tensors], dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """The hot path. `queued` requests were admitted before a `close` and are still answered.

        After an inference the processor's caches hold nothing of ours: a `finally` and four attributes less were 8
        microseconds of 16 there.
        """
        number = self._began()
        started = perf_counter()
        try:
            if self._closing and not queued:
                raise _closed()
            outputs = (run or self._run)(self._accept(feeds))
        except BaseException:
            self._end(number, started, True)
            raise
        self._ended((perf_counter() - started, False))
        if not number & FOLD:
            self._tally.fold()
        if self._closing:
            self._wake()
        return outputs

    def _result(self, feeds: Any, on_device: bool = False, queued: bool = False) -> InferenceResult:
        number = self._tally.begin()
        started = perf_counter()
        failed = True
        try:
            if self._closing and not queued:
                raise _closed()
            accepted = self._accept(feeds)
            timed = None if self._batcher is not None else getattr(self.runner, "timed", None)
            if timed is not None:
                outputs, latency_ms = timed(accepted, on_device=on_device)
            else:
                before = perf_counter()
                outputs = (self._on_device() if on_device else self._run)(accepted)
                latency_ms = (perf_counter() - before) * 1e3
            failed = False
            return InferenceResult(outputs, latency_ms)
        except TrtEngineError as error:
            return InferenceResult({}, (perf_counter() - started) * 1e3, False, str(error))
        finally:
            self._end(number, started, failed)

    def _end(self, number: int, started: float, failed: bool) -> None:
        self._tally.end((perf_counter() - started, failed))
        if not number & FOLD:
            self._tally.fold()
        if self._closing:
            self._wake()

    def _on_device(self) -> Callable[[Tensors], dict[str, Any]]:
        if self._staying is None:
            raise UsageError(
                "outputs stay on the device where one device answers, without batching", hint="leave `on_device` out"
            )
        return self._staying

    # -------------------------------------------------------------------------------------------- feeds

    def _accept(self, feeds: Any) -> dict[str, Any]:
        """The feeds as arrays by name, checked; what looks like feeds accepted before is not looked at again.

        Those accepted last are told without a hash, which numpy's types take their time for.
        """
        last = self._last
        if last is not None and type(feeds) is dict and len(feeds) == len(last):
            for name, kind, dtype, shape, place in last:
                array = feeds.get(name)
                if type(array) is not kind or array.shape != shape:  # type: ignore[attr-defined]
                    break
                if array.dtype is not dtype and (place is None or array.dtype != dtype):  # type: ignore[attr-defined]
                    break
                if place is not None and array.device != place:  # type: ignore[attr-defined]
                    break
            else:
                return feeds
        if type(feeds) is dict:
            try:
                key = tuple(
                    [
                        (name, array.dtype, array.shape)
                        if type(array) is np.ndarray
                        else (name, DeviceArray, array.dtype, array.shape, array.device)
                        if type(array) is DeviceArray
                        else (name, *_looks(array))
                        for name, array in feeds.items()
                    ]
                )
                if key in self._accepted:
                    self._last = _remembered(feeds)
                    return feeds
            except (AttributeError, TypeError):  # no arrays; said properly below
                pass
        arrays = self._arrays(feeds)
        key = tuple([(name, *_looks(item)) for name, item in arrays.items()])
        if key not in self._accepted:
            self._check(arrays)
            if len(self._accepted) >= _REMEMBERED:
                self._accepted.clear()
            self._accepted.add(key)
        return arrays

    def _arrays(self, feeds: Any) -> dict[str, Any]:
        if isinstance(feeds, Mapping):
            for name in feeds:
                if not isinstance(name, str):
                    raise FeedError(
                        f"the name of an input is {name!r}",
                        hint=f"expected {', '.join(f'`{one.name}`' for one in self.inputs)}",
                    )
            return {name: admitted(name, value, self._device) for name, value in feeds.items()}
        if len(self.inputs) != 1:
            expected = ", ".join(f"`{spec.name}`" for spec in self.inputs)
            raise FeedError(
                f"the feeds are a {type(feeds).__name__}, the engine has {len(self.inputs)} inputs",
                hint=f"give arrays by name: {expected}",
            )
        name = self.inputs[0].name
        return {name: admitted(name, feeds, self._device)}

    def _check(self, arrays: dict[str, Any]) -> None:
        self._signature.check(arrays)
        for name, array in arrays.items():
            if not is_foreign(array) and not array.dtype.isnative:
                raise FeedError(
                    f"input `{name}` is {array.dtype.str}, expected this machine's byte order",
                    hint="`array.astype(array.dtype.newbyteorder('='))`",
                )
        if not self._profiles:
            return
        for profile in self._profiles:
            if all(span.holds(arrays[name].shape) for name, span in profile.ranges.items()):
                return
        self._profiles[0].check(arrays)

    # -------------------------------------------------------------------------------------------- the end

    def close(self, *, cancel: bool = False) -> None:
        """Refuse new requests, finish those in flight and in the queue, then give everything back. Twice is once.

        With `cancel=True` only what has begun is finished: futures that wait are cancelled, callers that wait are told.
        """
        inside = self._batcher is not None and self._batcher.inside()
        if inside or threading.current_thread().name.startswith(self._thread_prefix):
            raise UsageError("`close` was called from inside a request", hint="close from the thread that loaded")
        with self._lock:
            self._closing = True
            executor = self._executor
        if cancel:
            self._cancel_waiting()
        with self._ending:  # who comes second waits; where the first was broken off, the second goes on
            if self._closed:
                return
            if executor is not None:
                executor.shutdown(wait=True)
            with self._idle:
                while self._warming:  # it asks what is under a batcher
                    self._idle.wait()
            if self._batcher is not None:
                self._batcher.close()
            with self._idle:
                while self._tally.read()[2] and self._asked():  # Ctrl-C may have kept a caller from saying it has ended
                    self._idle.wait(1.0)
            self.runner.close()
            if self._on_close is not None:
                self._on_close()
            self._closed = True

    def _cancel_waiting(self) -> None:
        with self._lock:
            queued = list(self._queued)
        for future in queued:  # no lock is held: their callbacks may do anything
            future.cancel()
        if self._batcher is not None:
            self._batcher.cancel_waiting()
        for pool in self._pools():
            pool.turn_away()

    def _asked(self) -> bool:
        """Whether somebody is inside a request, by the stacks of all threads."""
        for frame in [*sys._current_frames().values()]:
            looked: FrameType | None = frame
            while looked is not None:
                if looked.f_code in _REQUESTS and looked.f_locals.get("self") is self:
                    return True
                looked = looked.f_back
        return False

    def _wake(self) -> None:
        with self._idle:
            self._idle.notify_all()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"<InferenceEngine {self._engine.path.name} on {self._last_facts.get('device', 'several devices')}: {inputs}>"


_REQUESTS = {InferenceEngine._answer.__code__, InferenceEngine._result.__code__, InferenceEngine._submit.__code__}


def _looks(array: Any) -> tuple[Any, ...]:
    """What an array is accepted by. Ours and numpy's tell where they lie; others may lie anywhere, and are asked."""
    kind = type(array)
    if kind is np.ndarray:
        return array.dtype, array.shape
    return kind, array.dtype, array.shape, array.device if kind is DeviceArray else is_foreign(array)


def _remembered(feeds: dict[str, Any]) -> tuple[tuple[str, type, Any, Any, Any], ...] | None:
    """Name, class, element type, shape and place of each; None where some lie who knows where."""
    found = []
    for name, array in feeds.items():
        kind = type(array)
        if kind is not np.ndarray and kind is not DeviceArray:
            return None
        found.append((name, kind, array.dtype, array.shape, array.device if kind is DeviceArray else None))
    return tuple(found)


def _closed() -> UsageError:
    return UsageError("the engine is closed", hint="load it again with `te.load`")
