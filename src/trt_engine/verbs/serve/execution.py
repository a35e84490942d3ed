"""How requests of a served version reach its engine: joined by the runtime's batcher, or one by one by urgency. A bundle
is one engine, whose components run in the order they feed each other."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import DeadlineExpired, EngineError, Overloaded, TrtEngineError
from trt_engine.protocols import RunnerBase
from trt_engine.records.bundle import BundleConnection
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.tensors import Signature, Tensors, TensorSpec
from trt_engine.verbs.bundle_chain import prefix_errors, topological_order
from trt_engine.verbs.bundle_folder import open_component, read_report
from trt_engine.verbs.load import load
from trt_engine.verbs.serve.statistics import VersionStatistics

Done = Callable[[Future[dict[str, Any]]], None]


@dataclass(slots=True)
class Run:
    """One run of the engine: when it began and ended, and how long all contexts had been busy until it began."""

    started_ns: int
    ended_ns: int
    all_busy_ns: int
    cost_ns: int
    """What the run took of its thread: processor time where the engine runs on a CPU, else its duration."""


class TimedRunner(RunnerBase):
    """The engine with each run timed; the thread that ran can read the times of its last run."""

    def __init__(self, engine: InferenceEngine, statistics: VersionStatistics) -> None:
        self._engine = engine
        below = engine.runner
        self._statistics = statistics
        self.signature, self.profiles, self.width = engine.signature, engine.profiles, max(below.width, 1)
        self.can_batch = below.can_batch
        self._lock = threading.Lock()
        self._busy = 0
        self._all_busy_ns = self._all_busy_since_ns = 0
        self._thread = threading.local()
        on_cpu = parse_device(engine.engine.passport.device)[0] == "cpu"
        self._clock_ns = time.thread_time_ns if on_cpu else time.perf_counter_ns

    def run(self, feeds: Tensors) -> dict[str, Any]:
        started = self._begin()
        try:
            return self._engine.run(feeds)
        finally:
            self._end(*started, row_count(feeds))

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        started = self._begin()
        try:
            return self._engine.runner.run_batched(parts, size)
        finally:
            rows = sum(map(row_count, parts))
            self._end(*started, size or rows, padding=(size or rows) - rows)

    def _begin(self) -> tuple[int, int, int]:
        """The time now, the time until now in which every context was busy, and the clock of `cost_ns`."""
        started_ns = time.perf_counter_ns()
        with self._lock:
            all_busy_ns = self._all_busy_until(started_ns)
            self._busy += 1
            if self._busy == self.width:
                self._all_busy_since_ns = started_ns
        return started_ns, all_busy_ns, self._clock_ns()

    def _end(self, started_ns: int, all_busy_ns: int, clock_ns: int, rows: int, padding: int = 0) -> None:
        cost_ns, ended_ns = self._clock_ns() - clock_ns, time.perf_counter_ns()
        with self._lock:
            self._all_busy_ns = self._all_busy_until(ended_ns)
            self._all_busy_since_ns = ended_ns
            self._busy -= 1
        self._thread.run = Run(started_ns, ended_ns, all_busy_ns, cost_ns)
        self._statistics.count_run(rows, ended_ns - started_ns, padding)

    def _all_busy_until(self, now_ns: int) -> int:
        busy = self._busy >= self.width
        return self._all_busy_ns + (now_ns - self._all_busy_since_ns if busy else 0)

    def all_busy_ns(self, now_ns: int) -> int:
        """Time until now in which every context was busy."""
        with self._lock:
            return self._all_busy_until(now_ns)

    def last_run(self) -> Run | None:
        """The last run of the calling thread."""
        return getattr(self._thread, "run", None)

    def close(self) -> None:
        self._engine.close()


def row_count(feeds: Tensors) -> int:
    """Rows of the first input."""
    for array in feeds.values():
        return array.shape[0] if array.shape else 1
    return 1


@dataclass(slots=True)
class _Job:
    feeds: Tensors
    deadline_s: float | None
    future: Future[dict[str, Any]]


class DirectQueue(ProcessBound):
    """Requests that are not joined: one run each, the highest priority first, then in order of arrival."""

    def __init__(self, runner: RunnerBase, *, max_waiting: int) -> None:
        self.runner = runner
        self._max_waiting = max_waiting
        self._jobs: list[tuple[int, int, _Job]] = []
        self._numbers = itertools.count()
        self._ready = threading.Condition()
        self._closed = False
        names = (f"direct-{id(self):x}-{number}" for number in range(runner.width))
        self._workers = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        try:
            for worker in self._workers:
                worker.start()
        except RuntimeError as error:  # thread limit of the process
            self._workers = [worker for worker in self._workers if worker.ident is not None]
            self._end_workers()
            raise TrtEngineError(
                f"{runner.width} contexts need as many threads: {error}", hint="fewer of them"
            ) from error

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def submit(
        self, feeds: Tensors, *, priority: int = 0, deadline_ms: float | None = None, done: Done | None = None
    ) -> Future[dict[str, Any]]:
        """A future of the outputs. Raises `Overloaded` if the queue is full or closed."""
        deadline_s = None if deadline_ms is None else time.monotonic() + deadline_ms / 1e3
        job = _Job(feeds, deadline_s, Future())
        if done is not None:
            job.future.add_done_callback(done)
        with self._ready:
            if self._closed:
                raise Overloaded("the model is being closed", hint="retry later")
            if len(self._jobs) >= self._max_waiting:
                raise Overloaded(
                    f"{len(self._jobs)} requests wait already", hint="retry later; `--max-queue` sets the limit"
                )
            heapq.heappush(self._jobs, (-priority, next(self._numbers), job))
            self._ready.notify()
        return job.future

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                _, _, job = heapq.heappop(self._jobs)
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                outputs = self._run(job)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(outputs)
            del job

    def _run(self, job: _Job) -> dict[str, Any]:
        if job.deadline_s is not None and (late_s := time.monotonic() - job.deadline_s) > 0:
            raise DeadlineExpired(
                f"the deadline passed {late_s * 1e3:.3g} ms ago and the request had not started",
                hint="a longer `timeout`, or fewer requests at once",
            )
        try:
            return self.runner.run(job.feeds)
        except TrtEngineError:
            raise
        except Exception as error:
            raise TrtEngineError(f"the engine failed: {error}") from error

    def close(self) -> None:
        """Finish what waits, then close the runner. Idempotent."""
        if self._forked:
            return
        self._end_workers()
        self.runner.close()

    def _end_workers(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for worker in self._workers:
            worker.join()


Tensor = tuple[str, str]
"""A component and one of its inputs or outputs."""


class BundleRunner(RunnerBase):
    """Runs all components, each fed with the outputs that are connected to it.

    Inputs of the bundle are those that nothing earlier feeds, also states, which a component feeds itself; its outputs
    are those that feed nothing later. A name that several components have is `component.tensor`.
    """

    def __init__(self, runners: Mapping[str, InferenceEngine], links: Sequence[BundleConnection]) -> None:
        self._runners = runners
        self._order = topological_order([*runners], links)
        place = {name: number for number, name in enumerate(self._order)}
        self._links = {
            (link.consumer, link.input): link for link in links if place[link.producer] < place[link.consumer]
        }
        consumed = {(link.producer, link.output) for link in self._links.values()}
        inputs = self._tensors("inputs")
        self._inputs = {tensor: spec for tensor, spec in inputs.items() if tensor not in self._links}
        outputs = self._tensors("outputs")
        self._outputs = {tensor: spec for tensor, spec in outputs.items() if tensor not in consumed}
        self._input_names, self._output_names = _names(self._inputs), _names(self._outputs)
        self.signature = Signature(
            tuple(_named(spec, self._input_names[tensor]) for tensor, spec in self._inputs.items()),
            tuple(_named(spec, self._output_names[tensor]) for tensor, spec in self._outputs.items()),
        )
        self.profiles = (self._profile(),)
        self.width = min(runner.runner.width for runner in runners.values())

    def _tensors(self, side: str) -> dict[Tensor, TensorSpec]:
        return {
            (name, spec.name): spec for name in self._order for spec in getattr(self._runners[name].signature, side)
        }

    def _profile(self) -> Profile:
        """The ranges of the bundle's inputs, of components with one profile; the others check their feeds themselves."""
        ranges = {}
        for (component, tensor), name in self._input_names.items():
            profiles = self._runners[component].profiles
            if len(profiles) == 1 and tensor in profiles[0].ranges:
                ranges[name] = profiles[0].ranges[tensor]
        return Profile(ranges)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        given: dict[Tensor, Any] = {}
        for component in self._order:
            runner = self._runners[component]
            taken = {spec.name: self._feed((component, spec.name), feeds, given) for spec in runner.signature.inputs}
            with prefix_errors(component):
                given |= {(component, name): value for name, value in runner.infer(taken).items()}
        return {name: given[tensor] for tensor, name in self._output_names.items()}

    def _feed(self, tensor: Tensor, feeds: Tensors, given: Mapping[Tensor, Any]) -> Any:
        link = self._links.get(tensor)
        if link is None:
            return feeds[self._input_names[tensor]]
        value = given[link.producer, link.output]
        return np.ascontiguousarray(np.transpose(value, link.transpose)) if link.transpose else value

    def runtime_info(self) -> dict[str, str]:
        """What runs, by fact; by component where they differ."""
        found: dict[str, dict[str, str]] = {}
        for component, runner in self._runners.items():
            for key, value in runner.runtime_info.items():
                found.setdefault(key, {})[component] = value
        return {key: join_facts(values) for key, values in found.items() if key != "engine"}

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()


def join_facts(by_component: Mapping[str, str]) -> str:
    """One text of a fact that each component has: itself where all agree."""
    if len({*by_component.values()}) == 1:
        return next(iter(by_component.values()))
    return ", ".join(f"{component} {value}" for component, value in by_component.items())


def _names(tensors: Mapping[Tensor, TensorSpec]) -> dict[Tensor, str]:
    count = Counter(tensor for _, tensor in tensors)
    return {
        (component, tensor): tensor if count[tensor] == 1 else f"{component}.{tensor}" for component, tensor in tensors
    }


def _named(spec: TensorSpec, name: str) -> TensorSpec:
    """The spec under its name in the bundle; equal symbols of different components need not be equal sizes."""
    return replace(spec, name=name, symbols=())


def open_bundle(folder: Path, *, verify: bool) -> tuple[dict[str, Engine], tuple[BundleConnection, ...]]:
    """Engines by component, and how they feed each other. Raises `ModelError`, `EngineError` unless all are there.

    With `verify`, they must be those of the bundle's report.
    """
    report = read_report(folder)
    engines: dict[str, Engine] = {}
    for item in report.components:
        engine, problems = open_component(folder, item)
        if engine is None or (problems and verify):
            raise EngineError(problems[0], hint="run the `trt-engine bundle` command again")
        engines[item.name] = engine
    if not engines:
        raise EngineError(f"the bundle `{folder.name}` has no component", hint="`trt-engine bundle model_meta.json`")
    return engines, report.connections


def load_bundle(
    engines: Mapping[str, Engine], links: Sequence[BundleConnection], config: RuntimeConfig, *, verify: bool
) -> InferenceEngine:
    """The components loaded, as one engine."""
    with contextlib.ExitStack() as stack:
        runners = {}
        for name, engine in engines.items():
            with prefix_errors(name):
                runners[name] = stack.enter_context(load(engine, config=config, verify=verify))
        runner = BundleRunner(runners, links)
        stack.pop_all()
    return InferenceEngine(runner, next(iter(engines.values())))


def bundle_digest(engines: Mapping[str, Engine]) -> str:
    """A digest that changes with each of the engines."""
    digests = "".join(f"{name} {engine.passport.payload[0].digest}\n" for name, engine in engines.items())
    return f"sha256:{hashlib.sha256(digests.encode()).hexdigest()}"
