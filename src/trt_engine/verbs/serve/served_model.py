"""One version of a model, loaded: its engine, its queue, its statistics, and what really runs."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile, out_of_range_error, select_profile
from trt_engine.config.runtime import Batching
from trt_engine.device import Device, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.open_inference.wire_tensors import NUMPY_DTYPES, check_sizes, protocol_dtype
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.cuda_graph_policy import joined_graph_sizes
from trt_engine.runtime.feeds import random_feeds
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec
from trt_engine.verbs.load import load
from trt_engine.verbs.serve.config import ServeConfig
from trt_engine.verbs.serve.execution import (
    DirectQueue,
    Run,
    TimedRunner,
    bundle_digest,
    join_facts,
    load_bundle,
    open_bundle,
    row_count,
)
from trt_engine.verbs.serve.model_config import (
    PLATFORMS,
    ModelSettings,
    check_engine,
    describe_config,
    reshaped,
    warmup_samples,
)
from trt_engine.verbs.serve.statistics import Timing, VersionStatistics
from trt_engine.vision.spec import Vision, vision_of
from trt_engine.workers.crash import is_out_of_memory

log = logging.getLogger(__name__)

_DEFAULT_WAITING = 1024
"""Requests that may wait for an engine whose requests are not joined."""
_STRICT_MS = 1e9
"""A level of priority counts as days of waiting: all requests of a level go before those of the next, as in Triton."""
_MAX_CLASSES = 1 << 20
"""Values that an answer to `classification` has: each takes some hundred bytes as text."""
_SMALL_ANSWER = 1 << 16
_HOST = {np.ndarray}
_MAX_VALIDATED = 1024
_SHORT_NS = 100_000
"""A run up to this costs less on the event loop than its way through other threads."""
_TINY_NS = 30_000
"""A run up to this costs less on the event loop than joining it with others."""
_SHORT_RUNS = 8
"""Short runs of one shape after which the next is made on the event loop."""
_WARM_UP_S = 30.0
"""Time after which no further graph is captured before a version is ready; its first batch of that size captures it."""


@dataclass(slots=True)
class _ShortRuns:
    """Short and tiny runs of one shape: one more for each, several fewer for a longer one."""

    short: int = 0
    tiny: int = 0

    def note(self, ns: int) -> None:
        self.short = self._next(self.short, ns <= _SHORT_NS)
        self.tiny = self._next(self.tiny, ns <= _TINY_NS)

    @staticmethod
    def _next(count: int, more: bool) -> int:
        return min(count + 1, 8 * _SHORT_RUNS) if more else max(count - 2 * _SHORT_RUNS, 0)


class Mailbox:
    """Hands results of other threads to the event loop, many in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._results: deque[tuple[asyncio.Future[Run | None], Future[dict[str, Any]], Run | None]] = deque()
        self._scheduled = False

    def put(self, waiter: asyncio.Future[Run | None], future: Future[dict[str, Any]], run: Run | None) -> None:
        self._results.append((waiter, future, run))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: the server has ended
                log.debug("a result came after the server had ended")

    def _deliver(self) -> None:
        self._scheduled = False  # before reading: a later result schedules again
        while self._results:
            waiter, future, run = self._results.popleft()
            if waiter.done():  # the caller has gone
                continue
            if future.cancelled():
                waiter.cancel()
            elif (error := future.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(run)


@dataclass(frozen=True, slots=True)
class Truth:
    """What really runs, as found when the engine was loaded."""

    backend: str
    providers: str
    """ONNX Runtime's providers; empty for other backends."""
    device: str
    precision: str
    """As found in the engine, not as requested."""
    engine: str
    """SHA-256 of the engine's payload."""
    fallback: str = ""
    """The provider that was replaced and why, where that was allowed."""
    graphs: str = ""
    """Whether CUDA graphs are captured, or why not; empty where none are wanted."""

    def as_dict(self) -> dict[str, str]:
        names = ("backend", "providers", "device", "precision", "engine", "fallback", "graphs")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value}

    def header(self) -> str:
        """As the value of the response header `trt-engine`."""
        return "; ".join(f"{name}={_header_text(value)}" for name, value in self.as_dict().items())


def _header_text(value: str) -> str:
    return "".join(letter if " " <= letter <= "~" and letter != ";" else "?" for letter in value)


class ServedVersion:
    """A loaded version. Made in any thread; requests come from the event loop alone."""

    def __init__(
        self,
        name: str,
        version: str,
        runner: InferenceEngine,
        settings: ModelSettings,
        statistics: VersionStatistics,
        truth: Truth | None = None,
    ) -> None:
        self.name, self.version, self.settings = name, version, settings
        self.runner = runner
        self.statistics = statistics
        self.timed = TimedRunner(runner, self.statistics)
        self.in_flight = 0
        self._idle: asyncio.Event | None = None
        self._validated: dict[tuple[Any, ...], _ShortRuns | None] = {}
        """Short runs by shapes that were checked; None where a run is never made on the event loop."""
        self.heads: dict[bytes, Any] = {}
        """`BinaryHead` by the JSON of binary requests over HTTP."""
        self._answer_nbytes: dict[tuple[Shape, ...], int] = {}
        """Bytes of the outputs by the inputs' shapes; the most that a run had."""
        self._known_shapes: set[tuple[str, Shape]] = set()
        """Inputs and shapes that a profile takes."""
        self.queue: Batcher | DirectQueue
        self._device_queue: DirectQueue | None = None
        self.signature: Signature
        self.max_batch = 0
        """Rows that requests are joined to; 0 where the batch is not the first dimension."""
        self._make_queue()
        if settings.config is not None and (kept := {item.name for item in settings.config.output}):
            outputs = tuple(spec for spec in self.signature.outputs if spec.name in kept)  # others are not answered
            self.signature = replace(self.signature, outputs=outputs)
        self.inputs: dict[str, tuple[TensorSpec, str]] = {
            spec.name: (spec, protocol_dtype(spec)) for spec in self.signature.inputs
        }
        """Spec and protocol dtype by name."""
        self.has_text = any(datatype == "BYTES" for _, datatype in self.inputs.values())
        """Whether an input is decoded string by string."""
        self.max_nbytes = self._find_max_nbytes()
        """Bytes of the largest inputs together; None where they have no limit."""
        self.outputs = {spec.name: protocol_dtype(spec) for spec in self.signature.outputs}
        largest = [{name: span.max for name, span in profile.ranges.items()} for profile in self._profiles]
        self.small_answers = all(
            self._stated_nbytes(shapes, sys.maxsize) <= _SMALL_ANSWER for shapes in largest or [{}]
        )
        """Whether no request can have an answer that is worth counting."""
        self.truth = truth or _find_truth(runner.engine, runner.runtime_info)
        self.header = self.truth.header().encode()
        self.metadata_pair = (("trt-engine", self.truth.header()),)
        """The truth as gRPC's trailing metadata."""
        self.vision: Vision | None = None
        """How an image becomes the input, where the engine declares it."""
        self.loaded_s = 0.0
        """Time that loading took."""

    @property
    def device(self) -> Device | None:
        """The device whose arrays the engine takes in place; None for several, or none."""
        return self.runner.runner.device

    @property
    def platform(self) -> str:
        return PLATFORMS.get(self.truth.backend, self.truth.backend)

    def _make_queue(self) -> None:
        settings, waiting = self.settings, self.settings.max_queue or _DEFAULT_WAITING
        batcher = None
        if _joins_requests(settings, self.runner.signature):
            batching = Batching(
                max_batch=settings.max_batch, max_wait_ms=settings.max_wait_ms, max_rows_waiting=settings.max_queue,
                priority_ms=_STRICT_MS,
            )  # fmt: skip
            try:
                batcher = Batcher(self.timed, batching, profiles=self.runner.profiles)
            except UsageError:  # no batch dimension
                if settings.config is not None or settings.max_batch is not None:
                    raise
        if batcher is None:
            self.queue, self.signature = DirectQueue(self.timed, max_waiting=waiting), self.runner.signature
            self.max_batch = settings.max_request_rows or 0
            return
        self.queue, self.signature = batcher, batcher.signature
        self.max_batch = settings.max_request_rows or batcher.batching.max_batch or 0

    # -------------------------------------------------------------------------------------------- requests

    @property
    def _profiles(self) -> Sequence[Profile]:
        return self.queue.profiles if isinstance(self.queue, Batcher) else self.runner.profiles

    def max_body(self, config: ServeConfig) -> int:
        """Bytes that a request may have: `max_request`, and no more than `max_json` and the model's largest inputs."""
        if self.max_nbytes is None:
            return config.max_request
        return min(config.max_request, self.max_nbytes + config.max_json)

    def _find_max_nbytes(self) -> int | None:
        total = 0
        for name, (spec, datatype) in self.inputs.items():
            spans = [profile.ranges[name].max for profile in self._profiles if name in profile.ranges]
            largest = spans or ([] if spec.dynamic else [spec.shape])
            if not largest or datatype == "BYTES":
                return None
            total += max(map(math.prod, largest)) * NUMPY_DTYPES[datatype].itemsize
        return total

    def client_array(self, name: str, array: Any) -> Any:
        """An output of the engine in the shape of its `dims`."""
        if name not in self.settings.reshapes:
            return array
        dims, sizes = self.settings.reshapes[name]
        return array.reshape(reshaped(array.shape, sizes, dims))

    def classify(self, name: str, array: Any, count: int) -> Any:
        """The largest values of each row as `value:index:label`, as in Triton's classification extension.

        Strings `[batch, count]`, `[count]` for a model without a batch; fewer where a row has fewer elements.
        """
        width = math.prod(array.shape[1:] if self.max_batch else array.shape)
        rows = array.reshape((len(array) if self.max_batch else 1, width))
        if len(rows) * min(count, width) > _MAX_CLASSES:
            raise UsageError(
                f"{min(count, width)} classes of {len(rows)} rows of `{name}`, {_MAX_CLASSES} are sent",
                hint="fewer classes",
            )
        labels = self.settings.labels.get(name, ())
        if not labels and self.vision is not None and len(self.vision.postprocess.classes) == rows.shape[1]:
            labels = self.vision.postprocess.classes
        found = [
            [
                _class_text(row[index], index, labels)
                for index in np.argsort(-row.astype(np.float64), kind="stable")[:count]
            ]
            for row in rows
        ]
        made = np.array(found, object).reshape((len(rows), min(count, width)))
        return made if self.max_batch else made[0]

    def check_shape(self, name: str, shape: Shape) -> None:
        """`FeedError` or `ProfileError` unless a profile takes an input of this shape; before its sizes are used."""
        spec, _ = self.inputs[name]
        if len(shape) == len(spec.shape) and (name, shape) in self._known_shapes:
            return
        check_sizes(name, shape, len(spec.shape))
        spec.check_shape(shape)
        spans = [profile.ranges[name] for profile in self._profiles if name in profile.ranges]
        if spans and not any(span.contains(shape) for span in spans):
            raise out_of_range_error(name, spans[0], shape, 0)
        if len(self._known_shapes) < _MAX_VALIDATED:
            self._known_shapes.add((name, shape))

    def check(self, feeds: Tensors) -> tuple[Any, ...]:
        """Names and shapes; `FeedError` or `ProfileError` unless exactly the inputs are fed, in shapes the engine takes."""
        key = tuple([(name, array.shape) for name, array in feeds.items()])
        if key in self._validated:
            return key
        self.signature.check(feeds)
        select_profile(self._profiles, lambda profile, index: profile.check(feeds, index))
        most = self.settings.max_request_rows
        if most is not None and (rows := row_count(feeds)) > most:
            raise FeedError(f"the request has {rows} rows, the model takes {most}", hint="split the request")
        if len(self._validated) < _MAX_VALIDATED:
            self._validated[key] = _ShortRuns() if self._runs_as_it_is(feeds) else None
        return key

    def answer_nbytes(self, feeds: Tensors) -> int:
        """Bytes of the outputs for these inputs: as in earlier runs, before the first as far as their sizes are stated."""
        found = self._answer_nbytes.get(tuple([array.shape for array in feeds.values()]))
        return self._stated_nbytes({name: array.shape for name, array in feeds.items()}) if found is None else found

    def note_answer(self, feeds: Tensors, outputs: Tensors) -> None:
        """Remember the bytes of the outputs for `answer_nbytes`."""
        key, nbytes = tuple([array.shape for array in feeds.values()]), sum(array.nbytes for array in outputs.values())
        if key in self._answer_nbytes or len(self._answer_nbytes) < _MAX_VALIDATED:
            self._answer_nbytes[key] = max(nbytes, self._answer_nbytes.get(key, 0))

    def _stated_nbytes(self, shapes: Mapping[str, Shape], unknown: int = 1) -> int:
        """Bytes of the outputs for inputs of these shapes, with `unknown` for sizes that do not follow from them."""
        sizes: dict[str | None, int] = {
            symbol: size
            for spec in self.signature.inputs
            for symbol, size in zip(spec.symbols, shapes.get(spec.name, ()), strict=False)
            if symbol
        }
        return sum(
            (unknown if self.outputs[spec.name] == "BYTES" else NUMPY_DTYPES[self.outputs[spec.name]].itemsize)
            * math.prod(
                have if have >= 0 else sizes.get(symbol, unknown)
                for have, symbol in zip(spec.shape, spec.symbols or (None,) * len(spec.shape), strict=True)
            )
            for spec in self.signature.outputs
        )

    def _runs_as_it_is(self, feeds: Tensors) -> bool:
        """Whether the engine takes a request without padding and without waiting for others."""
        if self.settings.max_wait_ms or self.settings.runtime.graphs:
            return False
        try:
            self.runner.signature.check(feeds)
            select_profile(self.runner.profiles, lambda profile, index: profile.check(feeds, index))
        except UsageError:
            return False
        return True

    async def infer(
        self, feeds: Tensors, mailbox: Mailbox, timing: Timing, *, level: int = 0, timeout_us: int = 0
    ) -> dict[str, Any]:
        """The outputs; fills in the times of the run. `level` is the protocol's priority, 1 the first.

        Raises what the engine raises, `Overloaded` where too much waits, `DeadlineExpired` after `timeout_us`.
        """
        key = self.check(feeds)
        timing.submitted_ns = time.perf_counter_ns()
        timing.rows = row_count(feeds) if self.max_batch else 1
        on_device = {*map(type, feeds.values())} != _HOST
        runs = None if on_device else self._validated.get(key)
        if runs is not None and (runs.short if self.in_flight == 1 else runs.tiny) >= _SHORT_RUNS:
            return self._run_here(key, feeds, timing)
        busy_ns = self.timed.all_busy_ns(timing.submitted_ns)
        deadline_ms = self.settings.deadline_ms(timeout_us, level)
        queue = self._queue_of_device() if on_device else self.queue
        waiter: asyncio.Future[Run | None] = asyncio.get_running_loop().create_future()
        future = queue.submit(
            feeds,
            priority=self.settings.priority(level),
            deadline_ms=deadline_ms,
            done=lambda resolved: mailbox.put(waiter, resolved, self.timed.last_run()),
        )
        try:
            run = await waiter
        except BaseException:
            future.cancel()
            raise
        if run is not None:
            self._note_run(key, run, timing)
            wait_ns = timing.started_ns - timing.submitted_ns
            timing.batch_wait_ns = max(wait_ns - (run.all_busy_ns - busy_ns), 0)
        return future.result()

    def _run_here(self, key: tuple[Any, ...], feeds: Tensors, timing: Timing) -> dict[str, Any]:
        """Run a request at once on the event loop: its runs are shorter than the way through other threads."""
        try:
            outputs = self.timed.run(feeds)
        except TrtEngineError:
            raise
        except Exception as error:
            raise TrtEngineError(f"the engine failed: {error}") from error
        run = self.timed.last_run()
        assert run is not None
        self._note_run(key, run, timing)
        return outputs

    def _note_run(self, key: tuple[Any, ...], run: Run, timing: Timing) -> None:
        timing.started_ns, timing.ended_ns = max(run.started_ns, timing.submitted_ns), run.ended_ns
        timing.delivered_ns = time.perf_counter_ns()
        runs = self._validated.get(key)
        if runs is not None:
            runs.note(run.cost_ns)

    def _queue_of_device(self) -> DirectQueue:
        """The queue of requests whose inputs are on the GPU: each is run as it is, in place."""
        if self._device_queue is None:
            self._device_queue = DirectQueue(self.timed, max_waiting=self.settings.max_queue or _DEFAULT_WAITING)
        return self._device_queue

    # -------------------------------------------------------------------------------------------- state

    def enter(self) -> None:
        """Count a request; from the event loop."""
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        if self._idle is not None and not self.in_flight:
            self._idle.set()

    async def retire(self) -> None:
        """Wait for the requests that hold this version, then close it. New requests must not reach it any more."""
        self._idle = asyncio.Event()
        if self.in_flight:
            await self._idle.wait()
        await asyncio.to_thread(self.close)

    def not_ready_reason(self) -> str | None:
        """Why the loaded engine cannot answer; None where it can."""
        suspended = self.runner.runtime_info.get("not serving")
        replicas = self.runner.stats().replicas
        if suspended and replicas and not any(replica.serving for replica in replicas):
            return f"no device serves: {suspended}"
        return None

    @property
    def waiting(self) -> int:
        """Requests that wait for a run."""
        return self.queue.waiting if isinstance(self.queue, DirectQueue) else self.batch_stats().waiting

    def batch_stats(self) -> Any:
        """The batcher's statistics; None where requests are not joined."""
        return self.queue.stats() if isinstance(self.queue, Batcher) else None

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """The protocol's metadata, and the truth as `properties`."""
        return {
            "name": self.name,
            "versions": versions,
            "platform": self.platform,
            "inputs": [self._tensor_metadata(spec) for spec in self.signature.inputs],
            "outputs": [self._tensor_metadata(spec) for spec in self.signature.outputs],
            "properties": self.truth.as_dict() | ({"image": self.vision.postprocess.task} if self.vision else {}),
        }

    def _tensor_metadata(self, spec: TensorSpec) -> dict[str, Any]:
        shape = spec.shape
        if spec.name in self.settings.reshapes:
            dims, sizes = self.settings.reshapes[spec.name]
            shape = reshaped(shape, sizes, dims)
        return {"name": spec.name, "datatype": protocol_dtype(spec), "shape": [*shape]}

    def config(self) -> Any:
        """The `inference.ModelConfig` in force; its parameters carry the truth."""
        made = describe_config(self.name, self.settings, self.signature, self.truth.backend, self.max_batch)
        for key, value in self.truth.as_dict().items():
            made.parameters[key].string_value = value
        return made

    def close(self) -> None:
        if self._device_queue is not None:
            self._device_queue.close()
        self.queue.close()


def _class_text(value: Any, index: int, labels: Sequence[str]) -> str:
    text = f"{value:f}" if value.dtype.kind == "f" else str(value)
    return f"{text}:{index}" + (f":{labels[index]}" if index < len(labels) else "")


def _find_truth(engine: Engine, info: Mapping[str, str]) -> Truth:
    passport = engine.passport
    return Truth(
        backend=passport.backend,
        providers=info.get("providers", ""),
        device=info.get("device", passport.device),
        precision=passport.precision.shares_text or info.get("precision", "") or "unknown",
        engine=passport.payload[0].digest,
        fallback=info.get("fallback", ""),
        graphs=info.get("graphs", ""),
    )


def _load_bundle(folder: Path, settings: ModelSettings, name: str, *, verify: bool) -> tuple[InferenceEngine, Truth]:
    """A bundle as one engine, with what runs by component where they differ."""
    engines, links = open_bundle(folder, verify=verify)
    runner = load_bundle(engines, links, replace(settings.runtime, batching=None), verify=verify)
    info = runner.runtime_info
    truths = {component: _find_truth(engine, info).as_dict() for component, engine in engines.items()}
    facts = {
        key: join_facts({component: truth.get(key, "") for component, truth in truths.items()})
        for key in ("backend", "precision")
    }
    truth = replace(_find_truth(runner.engine, info), **facts, engine=bundle_digest(engines))
    try:
        check_engine(settings, truth.backend, runner.signature, name, runner.profiles)
    except BaseException:
        runner.close()
        raise
    return runner, truth


def _load_engine(engine: Engine, settings: ModelSettings, name: str, *, verify: bool) -> InferenceEngine:
    check_engine(settings, engine.passport.backend, engine.signature, name, engine.passport.profiles)
    runtime = replace(settings.runtime, batching=None)
    device = runtime.device
    devices = device if device is not None and "," in device else None
    return load(engine, config=replace(runtime, device=None) if devices else runtime, devices=devices, verify=verify)


def _joins_requests(settings: ModelSettings, signature: Signature) -> bool:
    single = all(spec.shape[:1] == (1,) for spec in signature.inputs)
    return settings.join and settings.max_batch != 1 and not single


def _with_graph_sizes(settings: ModelSettings, engine: Engine) -> ModelSettings:
    """On a GPU, where requests are joined and nothing else is set: graphs of the sizes that batches are padded to."""
    runtime, passport = settings.runtime, engine.passport
    device = (runtime.device or passport.device).partition(",")[0]
    if runtime.graphs is False or isinstance(runtime.graphs, tuple) or parse_device(device)[0] == "cpu":
        return settings
    if not _joins_requests(settings, engine.signature):
        return settings
    sizes = joined_graph_sizes(engine.signature, passport.profiles, settings.max_batch, max_graphs=runtime.max_graphs)
    return replace(settings, runtime=replace(runtime, graphs=sizes or runtime.graphs))


def _warm_up(runner: InferenceEngine, graphs: bool | tuple[int, ...] | None) -> None:
    """One run, or one of each size that has a graph until `_WARM_UP_S` are over.

    The largest size first, as a buffer that grows drops the graphs that use it; then small ones, which come at low load.
    Sizes that are out of memory are left out.
    """
    if not isinstance(graphs, tuple):
        runner.warmup(1)
        return
    started_s = time.perf_counter()
    for number, size in enumerate((graphs[-1], *graphs[:-1])):
        if number and time.perf_counter() - started_s > _WARM_UP_S:
            log.info("graphs of %d batch sizes are captured by their first batches", len(graphs) - number)
            return
        try:
            runner.warmup(1, batch=size)
        except TrtEngineError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("batch %d is out of memory; `max_batch_size` limits the batches", size)


def _declared_vision(engine: Engine) -> Vision | None:
    try:
        return vision_of(engine)
    except TrtEngineError as error:
        log.warning("`%s` cannot be tried with images: %s", engine.path.name, error.message)
        return None


def load_version(
    name: str,
    version: str,
    source: Engine | Path,
    settings: ModelSettings,
    statistics: VersionStatistics,
    *,
    verify: bool,
) -> ServedVersion:
    """An engine, or the folder of a bundle, loaded, warmed up and ready for requests; raises why it cannot be.

    `statistics` go on counting.
    """
    started, truth = time.perf_counter(), None
    if isinstance(source, Path):
        runner, truth = _load_bundle(source, settings, name, verify=verify)
        settings = replace(settings, join=False)
    else:
        settings = _with_graph_sizes(settings, source)
        runner = _load_engine(source, settings, name, verify=verify)
    try:
        try:
            _warm_up(runner, settings.runtime.graphs)
        except TrtEngineError as error:  # random inputs need not be valid for every model
            log.warning("`%s` version %s: the first inference on random inputs failed: %s", name, version, error)
        for runs, shapes, given in warmup_samples(settings, runner.signature):
            # one that fails is an error, as in Triton
            runner.warmup(runs, shapes=shapes)
            if given:
                runner.infer(random_feeds(runner.signature, shapes, 0) | given)
        served = ServedVersion(name, version, runner, settings, statistics, truth)
        if isinstance(source, Engine):
            served.vision = _declared_vision(source)
    except BaseException:
        runner.close()
        raise
    served.loaded_s = time.perf_counter() - started
    return served
