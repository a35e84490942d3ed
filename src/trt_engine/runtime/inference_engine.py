"""`InferenceEngine`: a loaded engine, safe from many threads."""

from __future__ import annotations

import inspect
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

from trt_engine.config.profiles import Profile
from trt_engine.device.dlpack import DeviceArray
from trt_engine.device.foreign import library_of
from trt_engine.display import RichDisplay
from trt_engine.engine import Engine, describe_io
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.public_function import check_call, public_method
from trt_engine.runtime.batch_queue import InferenceFuture
from trt_engine.runtime.batch_stats import BatchStats
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.bound_call import BoundCall
from trt_engine.runtime.context_pool import ContextPool, PoolStats
from trt_engine.runtime.feeds import as_feed, is_device_array, random_feeds, shapes_of
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.runtime.replicas import Replicas, ReplicaStats
from trt_engine.runtime.stats import FOLD_MASK, RequestCounter
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec, suggest

log = logging.getLogger(__name__)

_MAX_VALIDATED = 1024
"""Maximum cached feed validations by name, dtype and shape."""


@dataclass(frozen=True, slots=True)
class InferenceResult(RichDisplay):
    """Result of a request that does not raise."""

    outputs: dict[str, Any] = field(default_factory=dict)
    latency_ms: float = 0.0
    """By device events from upload to download for a context pool, else host time around the call."""
    success: bool = True
    message: str = ""
    """The error with its hint; empty on success."""


@dataclass(frozen=True, slots=True)
class Stats(RichDisplay):
    """Statistics of an `InferenceEngine` since it was loaded, without warm-up."""

    requests: int
    """Finished requests, including failures."""
    failures: int
    in_flight: int
    seconds: float
    """Time inside requests, summed over threads."""
    pool: PoolStats | None = None
    """Context pool statistics, if there is a pool."""
    batching: BatchStats | None = None
    replicas: tuple[ReplicaStats, ...] = ()


class InferenceEngine(ProcessBound, RichDisplay):
    """A loaded engine: `infer`, `infer_async`, `warmup`, `stats`, `close`. Created by `te.load`; thread-safe.

    The caller owns the outputs: no later call changes them. No thread is started before the first `infer_async`.

    Pickled, it is how it was loaded: another process loads the engine again. In a child made with `fork` it raises
    `UsageError`.
    """

    def __init__(
        self,
        runner: RunnerBase,
        engine: Engine,
        *,
        on_close: Callable[[], None] | None = None,
        reload: Callable[[], tuple[Any, ...]] | None = None,
    ) -> None:
        """`reload` returns a function and its arguments, which make this again in another process."""
        self.runner = runner
        """A `HostRunner`, `ContextPool`, `Replicas` or `Batcher`."""
        self._run: Callable[[Tensors], dict[str, Any]] = runner.run
        self._direct = runner if isinstance(runner, ContextPool) else None
        self.engine = engine
        """The engine on disk."""
        self.signature: Signature = runner.signature
        self.profiles: tuple[Profile, ...] = runner.profiles or engine.passport.profiles
        """The supported shape ranges; feeds must be within one of them."""
        self._batcher = runner if isinstance(runner, Batcher) else None
        below = self._batcher.runner if self._batcher is not None else runner
        self._replicas = below if isinstance(below, Replicas) else None
        self._pool = below if isinstance(below, ContextPool) else None
        self._on_close = on_close
        self._reload = reload
        self._validated: set[tuple[Any, ...]] = set()
        self._last_validated: tuple[tuple[str, type, Any, Any, Any], ...] | None = None
        """Names, types and shapes of the feeds validated last."""
        self._counter = RequestCounter()
        self._begin_count, self._end_count = self._counter.begin, self._counter.end
        self._thread_pool: ThreadPoolExecutor | None = None
        self._queued_futures: set[Future[Any]] = set()
        self._thread_prefix = f"infer-{id(self):x}"
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._closing = False
        self._close_lock = threading.Lock()
        self._closed = False
        self._running_warmups = 0
        self._last_runtime_info = self._collect_runtime_info()

    # -------------------------------------------------------------------------------------------- properties

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.signature.outputs

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def runtime_info(self) -> dict[str, str]:
        """Backend, device, providers, threads and suspended replicas as actually in use, by name."""
        if not self._closing:
            self._last_runtime_info = self._collect_runtime_info()
        return dict(self._last_runtime_info)

    def _collect_runtime_info(self) -> dict[str, str]:
        below = self._batcher.runner if self._batcher is not None else self.runner
        info = {"engine": self.engine.path.name, "backend": self.engine.passport.backend}
        info |= below.runtime_info()
        if self._batcher is not None:
            info["batching"] = self._batcher.describe()
        return info

    def stats(self) -> Stats:
        return Stats(
            *self._counter.totals(),
            pool=self._pool.stats() if self._pool is not None else None,
            batching=self._batcher.stats() if self._batcher is not None else None,
            replicas=self._replicas.stats() if self._replicas is not None else (),
        )

    @public_method
    def is_captured(self, feeds: Any) -> bool:
        """Whether any context has a graph for feeds of these shapes."""
        pools = self._pools()
        arrays = self._validate(feeds)
        return any(pool.is_captured(arrays) for pool in pools)

    def reset_graphs(self) -> None:
        """Drop all graphs; shapes are captured again on their next run."""
        for pool in self._pools():
            pool.reset_graphs()

    def _pools(self) -> list[ContextPool]:
        runners = self._replicas.runners if self._replicas is not None else [self._pool]
        return [runner for runner in runners if isinstance(runner, ContextPool)]

    # -------------------------------------------------------------------------------------------- requests

    @overload
    def infer(self, feeds: Any, *, result: Literal[False] = False, on_device: bool = False) -> dict[str, Any]: ...
    @overload
    def infer(self, feeds: Any, *, result: Literal[True], on_device: bool = False) -> InferenceResult: ...
    def infer(
        self, feeds: Any = None, *more: Any, result: bool = False, on_device: bool = False, **unknown: Any
    ) -> dict[str, Any] | InferenceResult:
        """The outputs by name for feeds by name, or for one array if the engine has one input.

        Feeds are numpy or DLPack arrays, on the host or on the engine's device; dtypes are never converted. With
        `on_device=True` the outputs are device arrays with DLPack. With `result=True` returns an `InferenceResult`, which
        holds any `TrtEngineError` instead of raising it.
        """
        if more or unknown or type(result) is not bool or type(on_device) is not bool:  # a wrapper takes 0.4 us of 6
            given = {"result": result, "on_device": on_device} | unknown
            check_call("te.InferenceEngine.infer", _INFER, (self, feeds, *more), given)
        if result:
            return self._infer_result(feeds, on_device)
        return self._infer(feeds, False, on_device)

    __call__ = infer

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """`infer`, as a Runner method.

        Feeds and outputs by name, in the dtypes and shapes of `signature`. Raises `FeedError` and `ShapeError` for feeds
        that do not fit, `UsageError` once closed.
        """
        return self._infer(feeds)

    @overload
    def infer_async(
        self, feeds: Any, *, result: Literal[False] = False, priority: int = 0, deadline_ms: float | None = None
    ) -> InferenceFuture[dict[str, Any]]: ...
    @overload
    def infer_async(
        self, feeds: Any, *, result: Literal[True], priority: int = 0, deadline_ms: float | None = None
    ) -> InferenceFuture[InferenceResult]: ...
    @public_method
    def infer_async(
        self, feeds: Any, *, result: bool = False, priority: int = 0, deadline_ms: float | None = None
    ) -> InferenceFuture[Any]:
        """`infer` as a future that can be awaited; the arrays must not change until it is done.

        Runs one request per context; others wait in FIFO order and can be cancelled. `priority` and `deadline_ms` need
        `batching`: see `Batcher.submit`. Raises `UsageError` once closed or for these two without it, and `TrtEngineError`
        if no thread can be started; what `infer` raises is in the future.
        """
        if self._batcher is not None and not result:
            return self._submit(feeds, priority, deadline_ms)
        if priority or deadline_ms is not None:
            raise UsageError(
                "`priority` and `deadline_ms` need an engine loaded with `batching`",
                hint="`te.load(engine, batching=te.Batching())`, and `result` left out",
            )
        call = self._infer_result if result else self._infer
        with self._lock:
            if self._closing:
                raise _closed_error()
            if self._thread_pool is None:
                workers = self.runner.width if self._batcher is None else self._batcher.batching.max_batch or 1
                self._thread_pool = ThreadPoolExecutor(workers, self._thread_prefix)
            future: InferenceFuture[Any] = InferenceFuture()
            try:
                self._thread_pool.submit(self._resolve, future, call, feeds)
            except RuntimeError as error:  # interpreter shutdown, or thread limit reached
                raise TrtEngineError(f"no thread can be started: {error}", hint="call `infer`") from error
            self._queued_futures.add(future)
            return future

    def _resolve(self, future: Future[Any], call: Callable[..., Any], feeds: Any) -> None:
        """Run in a pool thread and resolve the future; exceptions of callbacks, also `sys.exit`, are logged."""
        self._queued_futures.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer, error = call(feeds, admitted=True), None
        except BaseException as raised:
            answer, error = None, raised
        try:
            future.set_result(answer) if error is None else future.set_exception(error)
        except BaseException:
            log.exception("a callback of a future raised")

    def _submit(self, feeds: Any, priority: int, deadline_ms: float | None) -> InferenceFuture[dict[str, Any]]:
        assert self._batcher is not None
        tally = self._counter
        number = tally.begin()
        started = perf_counter()

        def end(future: Future[Any]) -> None:
            failed = future.cancelled() or future.exception() is not None
            self._finish_request(number, started, failed)

        try:
            if self._closing:
                raise _closed_error()
            future = self._batcher.submit(self._validate(feeds), priority=priority, deadline_ms=deadline_ms)
        except FeedError as error:  # raised by the future, as without a batcher
            self._finish_request(number, started, True)
            future = InferenceFuture()
            future.set_exception(error)
            return future
        except BaseException:
            self._finish_request(number, started, True)
            raise
        future.add_done_callback(end)
        return future

    @public_method
    def bind(self, inputs: Any, outputs: Any = None) -> BoundCall:
        """A call prepared on fixed memory: `call()` runs it, `call.enqueue(stream)` orders it on a stream without waiting.

        `inputs` and `outputs` are arrays by name, or one array where the engine has one: numpy arrays, and on a GPU arrays
        of torch, CuPy, or any other library with DLPack or `__cuda_array_interface__`. Arrays on the device are used in
        place, others are copied in each call. Outputs that are left out are allocated on the device: `call.outputs`. On a
        GPU it runs once now, and with `graphs` it replays a graph of its own, captured after that. It is for one thread at
        a time, keeps its arrays alive, and is closed with the engine; it is not counted in `stats()`.

        Raises `FeedError` and `ShapeError` for inputs the engine does not take, `UsageError` for outputs whose sizes depend
        on the data, for arrays of another shape or dtype, strided or read-only outputs, with several devices or batching.
        """
        if self._closing:
            raise _closed_error()
        names = [spec.name for spec in self.outputs]
        given = self.signature.by_name({} if outputs is None else outputs, "outputs")
        for name in given:
            if name not in names:
                raise UsageError(f"unknown output `{name}`", hint=suggest(name, names))
        arrays = {name: as_feed(name, array, self.runner.device) for name, array in given.items()}
        bound: BoundCall = self.runner.bind(self._validate(inputs), arrays)
        bound.engine = self.engine
        return bound

    @public_method
    def warmup(
        self, runs: int = 1, *, batch: int | None = None, shapes: Mapping[str, Shape] | None = None, seed: int = 0
    ) -> None:
        """Run `runs` times on seeded inputs of the profile's opt shapes, on every device and in every context.

        Captures graphs for these shapes if enabled. Raises `UsageError` for numbers below 1 and once closed, `ShapeError`
        for shapes the engine does not take, `ModelError` for inputs beyond the size limit.
        """
        for name, number in (("runs", runs), ("batch", 1 if batch is None else batch)):
            if not isinstance(number, int) or number < 1:
                raise UsageError(f"`{name}` is {number!r}, expected a whole number of 1 or more", hint="`warmup(3)`")
        profile = self.profiles[0] if self.profiles else None
        wanted = shapes_of(self.signature, profile, batch=batch, overrides=shapes)
        feeds = self._validate(random_feeds(self.signature, wanted, seed))
        with self._lock:
            if self._closing:
                raise _closed_error()
            self._running_warmups += 1
        try:
            below = self.runner
            if self._batcher is not None:
                below, feeds = self._batcher.runner, self._batcher.pad_feeds(feeds)
            for runner in self._replicas.runners if self._replicas is not None else [below]:
                for _ in range(runs):
                    runner.warm_up(feeds)
        finally:
            with self._lock:
                self._running_warmups -= 1
            self._notify_idle()

    def _infer(self, feeds: Any, admitted: bool = False, on_device: bool = False) -> dict[str, Any]:
        """The hot path. `admitted` requests were queued before a `close` and still run.

        CPU caches are cold after an inference: removing a `finally` and four attributes saved 8 of 16 us.
        """
        number = self._begin_count()
        started = perf_counter()
        try:
            if self._closing and not admitted:
                raise _closed_error()
            feeds = self._validate(feeds)
            if not on_device:
                outputs = self._run(feeds)
            elif self._direct is not None:
                outputs = self._direct.run(feeds, True)
            else:
                outputs = self.runner.run_on_device(feeds)
        except BaseException:
            self._finish_request(number, started, True)
            raise
        self._end_count((perf_counter() - started, False))
        if not number & FOLD_MASK:
            self._counter.fold()
        if self._closing:
            self._notify_idle()
        return outputs

    def _infer_result(self, feeds: Any, on_device: bool = False, admitted: bool = False) -> InferenceResult:
        number = self._counter.begin()
        started = perf_counter()
        failed = True
        try:
            if self._closing and not admitted:
                raise _closed_error()
            outputs, latency_ms = self.runner.run_timed(self._validate(feeds), on_device=on_device)
            failed = False
            return InferenceResult(outputs, latency_ms)
        except TrtEngineError as error:
            return InferenceResult({}, (perf_counter() - started) * 1e3, False, str(error))
        finally:
            self._finish_request(number, started, failed)

    def _finish_request(self, number: int, started: float, failed: bool) -> None:
        self._counter.end((perf_counter() - started, failed))
        if not number & FOLD_MASK:
            self._counter.fold()
        if self._closing:
            self._notify_idle()

    # -------------------------------------------------------------------------------------------- feeds

    def _validate(self, feeds: Any) -> dict[str, Any]:
        """Validated feeds by name; validation is cached per (name, dtype, shape).

        The last feeds are compared without hashing, which is slow for numpy dtypes.
        """
        last = self._last_validated
        if last is not None and len(last) == 1 and type(feeds) is last[0][1]:
            feeds = {last[0][0]: feeds}  # one array for the one input
        if last is not None and type(feeds) is dict and len(feeds) == len(last):
            for name, kind, dtype, shape, place in last:
                array = feeds.get(name)
                if type(array) is not kind or array.shape != shape:  # type: ignore[attr-defined]
                    break
                if array.dtype is not dtype and (place is None or array.dtype != dtype):  # type: ignore[attr-defined]
                    break
                if place is not None and getattr(array, place[0]) != place[1]:
                    break
            else:
                return feeds
        if type(feeds) is dict:
            try:
                key = tuple(
                    [
                        (name, array.dtype, array.shape) if type(array) is np.ndarray else (name, *_feed_key(array))
                        for name, array in feeds.items()
                    ]
                )
                if key in self._validated:
                    self._last_validated = _feed_snapshot(feeds)
                    return feeds
            except (AttributeError, TypeError):  # not arrays: raised below
                pass
        try:
            arrays = self._as_arrays(feeds)
            key = tuple([(name, *_feed_key(item)) for name, item in arrays.items()])
            if is_new := key not in self._validated:
                self._check(arrays)
        except FeedError:  # in the terms of the library that the array is of
            given = feeds if isinstance(feeds, Mapping) else {spec.name: feeds for spec in self.inputs[:1]}
            for spec in self.inputs:
                if hasattr(given.get(spec.name), "dtype"):
                    spec.check(given[spec.name])
            raise
        if is_new:
            if len(self._validated) >= _MAX_VALIDATED:
                self._validated.clear()
            self._validated.add(key)
        return arrays

    def _as_arrays(self, feeds: Any) -> dict[str, Any]:
        named = self.signature.by_name(feeds)
        return {name: as_feed(name, value, self.runner.device) for name, value in named.items()}

    def _check(self, arrays: dict[str, Any]) -> None:
        self.signature.check(arrays)
        for name, array in arrays.items():
            if not is_device_array(array) and not array.dtype.isnative:
                raise FeedError(
                    f"input `{name}` is {array.dtype.str}, expected this machine's byte order",
                    hint="`array.astype(array.dtype.newbyteorder('='))`",
                )
        if not self.profiles:
            return
        for profile in self.profiles:
            if all(span.contains(arrays[name].shape) for name, span in profile.ranges.items()):
                return
        self.profiles[0].check(arrays)

    # -------------------------------------------------------------------------------------------- close

    def close(self, *, cancel: bool = False) -> None:
        """Reject new requests, finish running and queued ones, then free all resources. Idempotent.

        With `cancel=True` only running requests finish: queued futures are cancelled, waiting callers get `UsageError`.
        """
        if self._forked:
            return
        inside = self._batcher is not None and self._batcher.is_own_thread()
        if inside or threading.current_thread().name.startswith(self._thread_prefix):
            raise UsageError("`close` was called from inside a request", hint="close from the thread that loaded")
        with self._lock:
            self._closing = True
            executor = self._thread_pool
        if cancel:
            self._cancel_waiting()
        with self._close_lock:  # a second call waits, or continues an interrupted first one
            if self._closed:
                return
            if executor is not None:
                executor.shutdown(wait=True)
            with self._idle:
                self._idle.wait_for(lambda: not self._running_warmups)  # warm-up bypasses the batcher
            if self._batcher is not None:
                self._batcher.close()
            with self._idle:
                while True:  # not `while condition`, whose jump back Python 3.13.0 leaves out of the `with`
                    if not (self._counter.totals()[2] and self._has_running_request()):
                        break
                    self._idle.wait(1.0)  # not longer: an interrupted request may be missing in the count
            self.runner.close()
            if self._on_close is not None:
                self._on_close()
            self._closed = True

    def _cancel_waiting(self) -> None:
        with self._lock:
            queued = list(self._queued_futures)
        for future in queued:  # no lock held: callbacks run user code
            future.cancel()
        if self._batcher is not None:
            self._batcher.cancel_waiting()
        for pool in self._pools():
            pool.reject_waiting()

    def _has_running_request(self) -> bool:
        """Whether any thread's stack is inside a request."""
        for frame in [*sys._current_frames().values()]:
            looked: FrameType | None = frame
            while looked is not None:
                if looked.f_code in _REQUEST_CODES and looked.f_locals.get("self") is self:
                    return True
                looked = looked.f_back
        return False

    def _notify_idle(self) -> None:
        with self._idle:
            self._idle.notify_all()

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._closing:
            raise _closed_error()
        return super().__reduce__() if self._reload is None else self._reload()

    def __repr__(self) -> str:
        device = self._last_runtime_info.get("device", "several devices")
        return f"<InferenceEngine {self.engine.path.name} on {device}: {describe_io(self.signature, self.profiles)}>"


_REQUEST_CODES = {
    InferenceEngine._infer.__code__,
    InferenceEngine._infer_result.__code__,
    InferenceEngine._submit.__code__,
}


_INFER = inspect.signature(InferenceEngine.infer)
_NAMED = [item for item in _INFER.parameters.values() if "VAR" not in item.kind.name]
_INFER = _INFER.replace(
    parameters=[item.replace(default=item.empty) if item.name == "feeds" else item for item in _NAMED]
)
InferenceEngine.infer.__signature__ = _INFER  # type: ignore[attr-defined]


def _feed_key(array: Any) -> tuple[Any, ...]:
    """The validation key of an array: dtype, shape, and type and device unless it is a numpy array."""
    kind = type(array)
    if kind is np.ndarray:
        return array.dtype, array.shape
    return kind, array.dtype, array.shape, _device_of(array) if _has_device(kind) else is_device_array(array)


def _device_of(array: Any) -> Any:
    """The array's device, hashable: CuPy's devices are not, their numbers are."""
    return getattr(array.device, "id", array.device)


def _has_device(kind: type) -> bool:
    """Whether arrays of this type have their place in `device`: ours, torch's and CuPy's."""
    return kind is DeviceArray or library_of(kind) is not None


def _feed_snapshot(feeds: dict[str, Any]) -> tuple[tuple[str, type, Any, Any, Any], ...] | None:
    """Name, class, dtype, shape and place of each array; None for array types of further libraries.

    The place is an attribute and its value: of torch that which is read fastest, its GPU's index is read with the address.
    """
    found = []
    for name, array in feeds.items():
        kind = type(array)
        if kind is not np.ndarray and not _has_device(kind):
            return None
        where = None if kind is np.ndarray else "is_cuda" if hasattr(kind, "is_cuda") else "device"
        found.append((name, kind, array.dtype, array.shape, where and (where, getattr(array, where))))
    return tuple(found)


def _closed_error() -> UsageError:
    return UsageError("the engine is closed", hint="load it again with `te.load`")
