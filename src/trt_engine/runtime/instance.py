"""`InferenceEngine`: an engine that is loaded and answers, from one thread or from many."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt

from trt_engine.config import Profile, RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.protocols import DirectSession, Session
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.runtime.pool import ContextPool
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec

__all__ = ["InferenceEngine", "InferenceResult", "Stats"]

Array = npt.NDArray[Any]
_REMEMBERED = 1024
"""Feeds accepted before are remembered by names, types and shapes, so many of them; then from the start again."""

_FOLD = 0x7FF
"""Every 2048th request adds up what the others left."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The answer to one request that does not raise."""

    outputs: dict[str, Any] = field(default_factory=dict)
    latency_ms: float = 0.0
    """By device events from upload to download where the device has them, else by the host's clock around the call."""
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


class InferenceEngine:
    """A loaded engine: `infer`, `infer_async`, `warmup`, `stats`, `close`. Made by `te.load`; safe from many threads.

    The outputs belong to the caller: no later call changes them. No thread is started before the first `infer_async`.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        config: RuntimeConfig | None = None,
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        config = config or RuntimeConfig()
        self._session = session
        self._engine = engine
        self._signature = session.signature
        self._profiles = engine.passport.profiles
        self._workers = config.contexts
        self._on_close = on_close
        self._pool: ContextPool | None = None
        if hasattr(session, "run"):  # a DirectSession: no copies and no lock of ours
            self._run: Callable[[Tensors], dict[str, Any]] = cast(DirectSession, session).run
        else:
            self._pool = ContextPool(session, self._profiles, config.contexts, config.streams)
            self._run = self._pool.run
        self._facts = {
            "engine": engine.path.name,
            "backend": engine.passport.backend,
            "device": session.device.name,
        } | session.facts()
        self._accepted: set[tuple[Any, ...]] = set()
        self._tally = _Tally()
        self._executor: ThreadPoolExecutor | None = None
        self._thread_prefix = f"infer-{id(self):x}"
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._closing = False
        self._ending = threading.Lock()
        self._closed = False
        self._warming = 0

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
        """The truth about what runs (F5): backend, device, providers, threads, by name."""
        return dict(self._facts)

    def stats(self) -> Stats:
        return self._tally.read()

    # -------------------------------------------------------------------------------------------- requests

    @overload
    def infer(self, feeds: Any, *, result: Literal[False] = False) -> dict[str, Any]: ...
    @overload
    def infer(self, feeds: Any, *, result: Literal[True]) -> InferenceResult: ...
    def infer(self, feeds: Any, *, result: bool = False) -> dict[str, Any] | InferenceResult:
        """The outputs by name for feeds by name (or one array, for an engine of one input); raises what went wrong.

        Feeds are numpy arrays or anything with DLPack on the host. Types are never converted. With `result=True` an
        `InferenceResult` comes back instead, and errors of ours are in it.
        """
        return self._result(feeds) if result else self._answer(feeds)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The same as `infer`, under the name every Runner has."""
        return self._answer(feeds)

    @overload
    def infer_async(self, feeds: Any, *, result: Literal[False] = False) -> Future[dict[str, Any]]: ...
    @overload
    def infer_async(self, feeds: Any, *, result: Literal[True]) -> Future[InferenceResult]: ...
    def infer_async(self, feeds: Any, *, result: bool = False) -> Future[Any]:
        """The same as `infer`, as a future; the arrays must stay as they are until it is done.

        As many run at once as the engine has contexts; the others wait in order. A future that is cancelled before
        its turn costs nothing.
        """
        call = self._result if result else self._answer
        with self._lock:
            if self._closing:
                raise _closed()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._workers, self._thread_prefix)
            return self._executor.submit(call, feeds, True)

    def warmup(
        self, runs: int = 1, *, batch: int | None = None, shapes: Mapping[str, Shape] | None = None, seed: int = 0
    ) -> None:
        """Run `runs` times on seeded inputs of the profile's usual shape (each context, where there are several)."""
        profile = self._profiles[0] if self._profiles else None
        wanted = shapes_of(self._signature, profile, batch=batch, overrides=shapes)
        feeds = self._accept(random_feeds(self._signature, wanted, seed))
        with self._lock:
            if self._closing:
                raise _closed()
            self._warming += 1
        try:
            for _ in range(runs * (self._workers if self._pool else 1)):
                self._run(feeds)
        finally:
            with self._lock:
                self._warming -= 1
            self._wake()

    def _answer(self, feeds: Any, queued: bool = False) -> dict[str, Any]:
        """The hot path. `queued` requests were admitted before a `close` and are still answered."""
        tally = self._tally
        number = tally.begin()
        started = time.perf_counter()
        failed = True
        try:
            if self._closing and not queued:
                raise _closed()
            outputs = self._run(self._accept(feeds))
            failed = False
            return outputs
        finally:
            tally.end((time.perf_counter() - started, failed))
            if not number & _FOLD:
                tally.fold()
            if self._closing:
                self._wake()

    def _result(self, feeds: Any, queued: bool = False) -> InferenceResult:
        tally = self._tally
        number = tally.begin()
        started = time.perf_counter()
        failed = True
        try:
            if self._closing and not queued:
                raise _closed()
            accepted = self._accept(feeds)
            if self._pool is not None:
                outputs, latency_ms = self._pool.timed(accepted)
            else:
                before = time.perf_counter()
                outputs = self._run(accepted)
                latency_ms = (time.perf_counter() - before) * 1e3
            failed = False
            return InferenceResult(outputs, latency_ms)
        except TrtEngineError as error:
            return InferenceResult({}, (time.perf_counter() - started) * 1e3, False, str(error))
        finally:
            tally.end((time.perf_counter() - started, failed))
            if not number & _FOLD:
                tally.fold()
            if self._closing:
                self._wake()

    # -------------------------------------------------------------------------------------------- feeds

    def _accept(self, feeds: Any) -> dict[str, Any]:
        """The feeds as arrays by name, checked; what looks like feeds accepted before is not looked at again."""
        if type(feeds) is dict:
            try:
                key = tuple([(name, type(array), array.dtype, array.shape) for name, array in feeds.items()])
                if key in self._accepted:
                    return feeds
            except (AttributeError, TypeError):  # no arrays; said properly below
                pass
        arrays = self._arrays(feeds)
        key = tuple([(name, np.ndarray, array.dtype, array.shape) for name, array in arrays.items()])
        if key not in self._accepted:
            self._check(arrays)
            if len(self._accepted) >= _REMEMBERED:
                self._accepted.clear()
            self._accepted.add(key)
        return arrays

    def _arrays(self, feeds: Any) -> dict[str, Array]:
        if isinstance(feeds, Mapping):
            return {name: _as_array(name, value) for name, value in feeds.items()}
        if len(self.inputs) != 1:
            expected = ", ".join(f"`{spec.name}`" for spec in self.inputs)
            raise FeedError(
                f"the feeds are a {type(feeds).__name__}, the engine has {len(self.inputs)} inputs",
                hint=f"give arrays by name: {expected}",
            )
        name = self.inputs[0].name
        return {name: _as_array(name, feeds)}

    def _check(self, arrays: dict[str, Array]) -> None:
        self._signature.check(arrays)
        for name, array in arrays.items():
            if not array.dtype.isnative:
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

    def close(self) -> None:
        """Refuse new requests, finish those in flight and in the queue, then give everything back. Twice is once."""
        if threading.current_thread().name.startswith(self._thread_prefix):
            raise UsageError("`close` was called from inside a request", hint="close from the thread that loaded")
        with self._lock:
            self._closing = True
            executor = self._executor
        with self._ending:  # who comes second waits; where the first was broken off, the second goes on
            if self._closed:
                return
            if executor is not None:
                executor.shutdown(wait=True)
            with self._idle:
                while self._tally.read().in_flight or self._warming:
                    self._idle.wait()
            if self._pool is not None:
                self._pool.close()
            self._session.close()
            if self._on_close is not None:
                self._on_close()
            self._closed = True

    def _wake(self) -> None:
        with self._idle:
            self._idle.notify_all()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"<InferenceEngine {self._engine.path.name} on {self._facts['device']}: {inputs}>"


def _closed() -> UsageError:
    return UsageError("the engine is closed", hint="load it again with `te.load`")


def _as_array(name: str, value: Any) -> Array:
    """The value as a numpy array without a copy and without a change of type; `FeedError` where that cannot be."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__"):
        raise FeedError(
            f"input `{name}` is a {type(value).__name__}, expected an array",
            hint="`numpy.asarray(value, dtype=...)`: types are not guessed",
        )
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise FeedError(
            f"input `{name}` cannot be read in place: {error}", hint="give it on the host: `.detach().cpu()`"
        ) from error


class _Tally:
    """Counts of what many threads do, without a lock on their way.

    A request takes a number when it begins and leaves its seconds when it ends; both are single operations the
    interpreter does not interrupt. Whoever reads adds up what was left, under the lock of the readers.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, bool]] = deque()
        self.begin: Callable[[], int] = itertools.count().__next__
        """The request's number. Every so often (`_FOLD`) who got it calls `fold`, so that nothing piles up."""
        self.end: Callable[[tuple[float, bool]], None] = self._ended.append
        """Takes the seconds, and whether it failed."""
        self._looks = 0
        self._reading = threading.Lock()
        self._requests = self._failures = 0
        self._seconds = 0.0

    def read(self) -> Stats:
        with self._reading:
            self._add_up()  # before `begin`: what is in flight may be told too high, never too low
            begun = self.begin() - self._looks
            self._looks += 1
            return Stats(self._requests, self._failures, begun - self._requests, self._seconds)

    def fold(self) -> None:
        with self._reading:
            self._add_up()

    def _add_up(self) -> None:
        for _ in range(len(self._ended)):
            seconds, failed = self._ended.popleft()
            self._requests += 1
            self._failures += failed
            self._seconds += seconds
