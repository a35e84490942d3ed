"""A soak: the runtime under many callers for minutes, with faults injected; nothing may be lost and nothing may grow.

Three engines answer at once: a batcher, a pool of contexts, replicas. Their callers send rows of several sizes and widths,
change their minds, set deadlines too short, and feed things no engine takes; the engine under them raises, falls asleep, and
refuses poisoned rows. Every `--cycle-s` all three are closed in the middle of the work, every second time with what waits
cancelled, and loaded again. Each answer is checked row by row, each request must end, and each end must be one that its
caller earned. Memory, threads and files are sampled; a record with every sample is appended at the end, also after Ctrl-C.

Requests go through `te.InferenceEngine`. Faults enter below it, in sessions and between runners, which takes the package's
internals; so do two replicas on one device, which `te.load` does not make.

    python benchmarks/soak.py --minutes 10
    python benchmarks/soak.py --minutes 5 --device cuda:0
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import datetime
import gc
import logging
import os
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import trt_engine as te
from trt_engine.backend import list_backends
from trt_engine.errors import DeadlineExpired, FeedError, Overloaded, ProfileError, TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.records.base import append_record
from trt_engine.runtime.assemble import runner_for_session
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.replicas import Replicas

ROOT = Path(__file__).resolve().parents[1]
MOST_ROWS, WIDTHS, POISON = 16, (8, 24, 64), -1e30
LOST_AFTER_S = 60.0
GROWTH_MIB, GROWTH_SHARE = 8.0, 0.03


class InjectedFault(Exception):
    """An error of a foreign library, of a type that no backend translates."""


class PoisonedRows(RuntimeError):
    """What an engine raises for these rows, every time."""


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    rss_mib: float
    threads: int
    files: int
    requests: int


@dataclass(frozen=True, slots=True)
class Soak:
    """One soak."""

    schema: str
    started: str
    command: str
    device: str
    seconds: float
    callers: int
    cycles: int
    faults: dict[str, float]
    facts: dict[str, dict[str, str]]
    environment: te.Environment
    requests: int
    ends: dict[str, dict[str, int]]
    """How requests ended, for each engine; `requests` is their sum."""
    wrong: int
    """Answers with other rows than asked for."""
    unearned: tuple[str, ...]
    """Errors that reached a caller who had not earned them; at most 50."""
    unearned_count: int
    lost: int
    """Requests without an end."""
    uncounted: tuple[str, ...]
    """Statistics of the engines that do not add up."""
    left_over: tuple[str, ...]
    """Threads and device memory that outlived a `close`."""
    rss_growth_mib: float
    """Median of the last quarter of the samples less that of the second."""
    samples: tuple[Sample, ...]
    met: bool


@dataclass
class Ledger:
    """What became of the requests, over all threads."""

    ends: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    wrong: int = 0
    lost: int = 0
    unearned: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, name: str, how: str) -> None:
        with self.lock:
            self.ends[name][how] += 1

    @property
    def requests(self) -> int:
        with self.lock:
            return sum(sum(counts.values()) for counts in self.ends.values())


class Faults:
    """Decides what goes wrong: a share of the runs raises, a share of them sleeps."""

    def __init__(self, raises: float, sleeps: float, sleep_ms: float, seed: int) -> None:
        self._raises, self._sleeps, self._sleep_s = raises, sleeps, sleep_ms / 1e3
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def strike(self) -> None:
        with self._lock:
            drawn = self._random.random()
        if drawn < self._raises:
            raise InjectedFault("the engine raised")
        if drawn < self._raises + self._sleeps:
            time.sleep(self._sleep_s)


class FaultyRunner(RunnerBase):
    """A runner that strikes, and refuses poisoned rows whatever other rows are in the batch."""

    def __init__(self, runner: RunnerBase, faults: Faults) -> None:
        self._runner, self._faults = runner, faults
        self.signature, self.profiles, self.device = runner.signature, runner.profiles, runner.device
        self.width, self.can_batch = runner.width, runner.can_batch

    def close(self) -> None:
        self._runner.close()

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self._look([feeds])
        return self._runner.run(feeds)

    def run_batched(self, parts: Sequence[dict[str, Any]], size: int | None = None) -> dict[str, Any]:
        self._look(parts)
        return self._runner.run_batched(parts, size)

    def _look(self, parts: Sequence[dict[str, Any]]) -> None:
        if any((feeds["x"] == POISON).any() for feeds in parts):
            raise PoisonedRows("these rows cannot be computed")
        self._faults.strike()


class FaultySession:
    """A session that strikes as it is run, or in its contexts as work is enqueued."""

    def __init__(self, session: Any, faults: Faults) -> None:
        self._session, self._faults = session, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        return self._struck(found) if name == "run" else found

    def create_context(self, profile: int = 0) -> Any:
        context = self._session.create_context(profile)
        context.enqueue = self._struck(context.enqueue)
        if context.can_prebind:  # repeated requests on a GPU
            prebind = context.prebind
            context.prebind = lambda *args, **settings: self._struck(prebind(*args, **settings))
        return context

    def _struck(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any) -> Any:
            self._faults.strike()
            return call(*args)

        return struck


def main() -> int:
    parser = argparse.ArgumentParser(description="The runtime under faults for minutes: nothing lost, nothing grown.")
    parser.add_argument("--minutes", type=float, default=10.0, help="[10]")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0 [cpu]")
    parser.add_argument("--callers", type=int, default=8, help="threads for each of the three engines [8]")
    parser.add_argument("--cycle-s", type=float, default=20.0, help="seconds between two closings of the engines [20]")
    parser.add_argument("--sample-s", type=float, default=2.0, help="seconds between samples [2]")
    parser.add_argument("--raises", type=float, default=0.01, help="share of the runs that raise [0.01]")
    parser.add_argument("--sleeps", type=float, default=0.01, help="share of the runs that sleep [0.01]")
    parser.add_argument("--sleep-ms", type=float, default=30.0, help="how long [30]")
    parser.add_argument("--pause-ms", type=float, default=1.0, help="longest pause of a caller between requests [1]")
    parser.add_argument("--seed", type=int, default=1, help="[1]")
    parser.add_argument("--out", type=Path, default=None, help="[benchmarks/results/soak-DEVICE.jsonl]")
    args = parser.parse_args()
    kind = args.device.partition(":")[0]
    out = args.out or ROOT / f"benchmarks/results/soak-{kind}.jsonl"
    logging.getLogger("trt_engine").setLevel(logging.ERROR)  # faults are said, and there are thousands
    few_arenas()
    with tempfile.TemporaryDirectory() as folder:
        record = soaked(args, Path(folder))
    append_record(out, record)
    print(told(record))
    return 0 if record.met else 8


def few_arenas() -> None:
    """Four of glibc's heaps for all threads, as MALLOC_ARENA_MAX=4 would have it.

    Each thread gets a heap of its own, eight for each core, and each keeps the most it ever had. With hundreds of threads
    that come and go on a large machine their number grows for longer than a soak lasts, which looks like a leak and is none.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-8, 4)  # M_ARENA_MAX of malloc.h


def soaked(args: argparse.Namespace, folder: Path) -> Soak:
    engines = built(folder, args.device)
    faults = Faults(args.raises, args.sleeps, args.sleep_ms, args.seed)
    ledger, samples, facts = Ledger(), [], {}
    started, began_s = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    base = {thread.ident for thread in threading.enumerate()}
    until_s, cycles = began_s + args.minutes * 60, 0
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < until_s:
            loaded = stacks(engines, args.device, faults)
            facts = {name: engine.runtime_info for name, engine in loaded.items()}
            stop = threading.Event()
            crowd = [
                threading.Thread(
                    target=caller, args=(name, engine, ledger, stop, args, args.seed + 1000 * cycles + number)
                )
                for name, engine in loaded.items()
                for number in range(args.callers)
            ]
            for thread in crowd:
                thread.start()
            try:
                ends_s = min(time.monotonic() + args.cycle_s, until_s)
                while (left_s := ends_s - time.monotonic()) > 0:
                    stop.wait(min(args.sample_s, left_s))
                    samples.append(sample(began_s, ledger))
            finally:
                for engine in loaded.values():  # in the middle of the work; the callers find out
                    engine.close(cancel=bool(cycles % 2))
                stop.set()
                for thread in crowd:
                    thread.join(LOST_AFTER_S)
                    ledger.lost += thread.is_alive()
            audit(loaded, ledger, base)
            cycles += 1
    growth = grown([item.rss_mib for item in samples])
    allowed = max(GROWTH_MIB, GROWTH_SHARE * samples[len(samples) // 2].rss_mib) if samples else 0.0
    clean = not (ledger.wrong or ledger.lost or ledger.unearned or ledger.uncounted or ledger.left_over)
    return Soak(
        schema="trt-engine/soak",
        started=started,
        command=shlex.join(["python", "benchmarks/soak.py", *sys.argv[1:]]),
        device=args.device,
        seconds=round(time.monotonic() - began_s, 1),
        callers=3 * args.callers,
        cycles=cycles,
        faults={"raises": args.raises, "sleeps": args.sleeps, "sleep_ms": args.sleep_ms},
        facts=facts,
        environment=te.Environment.detect(),
        requests=ledger.requests,
        ends={name: dict(sorted(counts.items())) for name, counts in ledger.ends.items()},
        wrong=ledger.wrong,
        unearned=tuple(ledger.unearned[:50]),
        unearned_count=len(ledger.unearned),
        lost=ledger.lost,
        uncounted=tuple(ledger.uncounted[:50]),
        left_over=tuple(ledger.left_over[:50]),
        rss_growth_mib=round(growth, 2),
        samples=tuple(samples),
        met=clean and growth <= allowed,
    )


# ------------------------------------------------------------------------------------------------ the engines


def built(folder: Path, device: str) -> dict[str, te.Engine]:
    """y = x + x over rows of any width, for the device and, where that has no contexts of its own, for the fake one."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [value("x", TensorProto.FLOAT, ["batch", "width"])],
        [value("y", TensorProto.FLOAT, ["batch", "width"])],
    )
    path = folder / "double.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    profile = f"x:1x{WIDTHS[0]},4x{WIDTHS[1]},{MOST_ROWS}x{WIDTHS[-1]}"
    store = te.Store(folder / "store")
    real = te.build(path, backend="onnxruntime", device=device, profiles=(profile,), store=store)
    fake = te.build(path, backend="fake", device="fake", profiles=(profile,), store=store)
    return {"real": real, "contexts": fake if device == "cpu" else real}


def stacks(engines: dict[str, te.Engine], device: str, faults: Faults) -> dict[str, te.InferenceEngine]:
    """A batcher, a pool and replicas, loaded anew."""
    real, contexts = engines["real"], engines["contexts"]
    profiles = real.passport.profiles
    options = {"intra_op_threads": "1"} if device == "cpu" else {}

    def session(engine: te.Engine, config: te.RuntimeConfig) -> Any:
        return list_backends()[engine.passport.backend].load_component("runtime")().load(engine, config)

    def runner(engine: te.Engine, **settings: Any) -> Any:
        own = options if engine is real else {}
        config = te.RuntimeConfig(device=engine.passport.device, options=own, **settings)
        return runner_for_session(FaultySession(session(engine, config), faults), profiles, config)  # type: ignore[arg-type]

    batched = Batcher(
        FaultyRunner(runner(real, contexts=2), faults), max_batch=MOST_ROWS, max_rows_waiting=256, profiles=profiles
    )
    pool = runner(contexts, contexts=4, streams=2, graphs=True, max_graphs=4, max_waiting=6, wait_timeout_s=0.5)
    replicas = Replicas(
        [FaultyRunner(runner(real, contexts=2), faults) for _ in range(2)], balance="least busy", pause_s=0.05
    )
    return {
        "batcher": te.InferenceEngine(batched, real),
        "pool": te.InferenceEngine(pool, contexts),
        "replicas": te.InferenceEngine(replicas, real),
    }


# ------------------------------------------------------------------------------------------------ the callers


def caller(
    name: str, engine: te.InferenceEngine, ledger: Ledger, stop: threading.Event, args: argparse.Namespace, seed: int
) -> None:
    draw = random.Random(seed)
    while not stop.is_set():
        try:
            end = request(name, engine, ledger, draw)
        except BaseException as error:  # whatever it is, it has no business here
            with ledger.lock:
                ledger.unearned.append(f"{name}: {error!r}")
            end = "unearned"
        ledger.ended(name, end)
        if end == "closed":
            return
        if args.pause_ms:
            time.sleep(draw.random() * args.pause_ms / 1e3)


def request(name: str, engine: te.InferenceEngine, ledger: Ledger, draw: random.Random) -> str:
    """One request from its feeds to its end, which is returned in a word."""
    rows, width = draw.randint(1, 4), draw.choice(WIDTHS)
    x = np.full((rows, width), np.float32(draw.randint(0, 1 << 20)))
    x += np.arange(rows, dtype=np.float32)[:, None]
    kind = draw.choices(("plain", "future", "cancelled", "hurried", "bad", "poisoned"), (6, 6, 3, 1, 1, 1))[0]
    if kind == "poisoned" and name == "pool":
        kind = "plain"
    if kind == "hurried" and name != "batcher":
        kind = "cancelled"
    if kind == "bad":
        x = x.astype(np.float64) if draw.random() < 0.5 else np.zeros((MOST_ROWS + 1, width), np.float32)
    if kind == "poisoned":
        x[draw.randrange(rows)] = POISON
    try:
        if kind in ("plain", "bad", "poisoned") and draw.random() < 0.7:
            outputs = engine.infer({"x": x})
        else:
            urgent = {"priority": draw.randint(0, 2)} if name == "batcher" else {}
            if kind == "hurried":
                urgent["deadline_ms"] = draw.choice((0, 1, 2))
            outputs = waited(engine.infer_async({"x": x}, **urgent), kind == "cancelled", draw)
    except CancelledError:
        return "cancelled"
    except TimeoutError:
        with ledger.lock:
            ledger.lost += 1
        return "lost"
    except InjectedFault:
        return "fault"
    except PoisonedRows:
        return earned("poisoned", kind == "poisoned", name, ledger)
    except Overloaded:
        return "refused"
    except DeadlineExpired:
        return earned("expired", kind == "hurried" or name == "pool", name, ledger)
    except (FeedError, ProfileError):
        return earned("bad", kind == "bad", name, ledger)
    except UsageError as error:
        return earned("closed", "closed" in error.message, name, ledger)
    except TrtEngineError as error:
        return earned(type(error).__name__, kind == "bad", name, ledger)
    right = kind not in ("bad", "poisoned") and np.array_equal(outputs["y"], x + x)
    if not right:
        with ledger.lock:
            ledger.wrong += 1
    return "answered" if right else "wrong"


def waited(future: Future[dict[str, Any]], changes_mind: bool, draw: random.Random) -> dict[str, Any]:
    if changes_mind:
        time.sleep(draw.choice((0.0, 0.0005, 0.002, 0.005)))
        if future.cancel():
            raise CancelledError
    return future.result(LOST_AFTER_S)


def earned(end: str, right: bool, name: str, ledger: Ledger) -> str:
    if not right:
        with ledger.lock:
            ledger.unearned.append(f"{name}: {end}")
    return end


# ------------------------------------------------------------------------------------------------ the books


def audit(loaded: dict[str, te.InferenceEngine], ledger: Ledger, base: set[int | None]) -> None:
    """After `close`: the engines' own counts add up, and nothing of theirs is left."""
    for name, engine in loaded.items():
        stats = engine.stats()
        if stats.in_flight:
            ledger.uncounted.append(f"{name}: {stats.in_flight} in flight after close")
        if (batching := stats.batching) is not None:
            ends = batching.answered + batching.failed + batching.cancelled + batching.expired
            if ends != batching.requests or batching.waiting or batching.running or batching.rows_waiting:
                ledger.uncounted.append(f"{name}: {batching}")
        if stats.pool is not None and (stats.pool.busy or stats.pool.waiting):
            ledger.uncounted.append(f"{name}: {stats.pool}")
        if (
            stats.pool is not None
            and (held := stats.pool.memory) is not None
            and (held.allocated_bytes or held.pinned_bytes)
        ):
            ledger.left_over.append(f"{name}: {held}")
    patience_s = time.monotonic() + 5
    while (
        alive := [item for item in threading.enumerate() if item.ident not in base]
    ) and time.monotonic() < patience_s:
        time.sleep(0.01)
    ledger.left_over += [thread.name for thread in alive]
    gc.collect()


def sample(began_s: float, ledger: Ledger) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        at_s=round(time.monotonic() - began_s, 2),
        rss_mib=round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 2),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        requests=ledger.requests,
    )


def grown(values: Sequence[float]) -> float:
    """The last quarter over the second; the first is for warming up."""
    quarters = list(_quarters(values))
    return median(quarters[3]) - median(quarters[1]) if len(values) >= 4 else 0.0


def _quarters(values: Sequence[float]) -> Iterator[Sequence[float]]:
    for number in range(4):
        yield values[len(values) * number // 4 : len(values) * (number + 1) // 4]


def told(record: Soak) -> str:
    lines = [f"{record.requests} requests in {record.seconds:g} s on {record.device}, {record.cycles} closings"]
    lines += [
        f"  {name:<9}{' '.join(f'{how} {count}' for how, count in ends.items())}" for name, ends in record.ends.items()
    ]
    lines += [
        f"  wrong {record.wrong}, lost {record.lost}, unearned {len(record.unearned)}, uncounted {len(record.uncounted)}"
    ]
    lines += [f"  left over {len(record.left_over)}, memory {record.rss_growth_mib:+.2f} MiB: "]
    lines[-1] += "kept" if record.met else "NOT kept"
    troubles = (*record.unearned, *record.uncounted, *record.left_over)
    return "\n".join([*lines, *(f"    {trouble}" for trouble in troubles[:10])])


if __name__ == "__main__":
    sys.exit(main())
