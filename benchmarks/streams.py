"""Largest number of sources within a deadline: predicted from the latency curve, and observed by live search.

For each deadline, policy and mix of frame rates the curve of the model is measured first; the prediction is
`StreamModel.largest` with its bootstrap interval; the observation is a live search: the engine is driven through the batcher
with N paced sources, N moves from the prediction, by 3 % and more, until one number passes and the next fails. Agreement is
within 5 % or one source, whichever is larger. Coverage is the share of searches, each with other phases, whose number is in
the interval. Then the gain of the searched policy over three usual ones (predicted), and the time of simulating 10,000
sources for a minute.

A machine that changes its speed for seconds at a time (virtual cores that share a physical one for a while) tells nothing
about a prediction. So turns of the curve whose median is more than 10 % over the fastest turn's are left out. A run begins
when full batches take as long as in the curve, within 6 %, and counts where they do after it too and, for one context, if
no 40 batches in a row took more than 1.25 times as long; others are made again, some times at most, and then count as they
are. With two contexts a batch's time depends on the other's, so there a number that fails is tried once more.

A process appends one line for itself and one for each search to `--out`; a search that the file has already is left out,
so that the same command resumes, and several processes each run their `--cases` on cores of their own. On a CPU the engine
has as many threads as the process has cores.

    python benchmarks/streams.py --gains
    taskset -c 0,1 python benchmarks/streams.py --cases 7 --repeats 20 --seconds 5 --limit-s 500 --out case-7.jsonl
    python benchmarks/streams.py --device cuda:0 --model vit --policies 1,0ms 16,4ms 32,8ms,2 --batches 1 2 4 8 16 32 \\
        --deadlines 20 40 80 --mixes 1@25 2@15,1@30
    python benchmarks/streams.py --merge case-*.jsonl --out streams.jsonl --check   # a table of all
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networks
import numpy as np

import trt_engine as te
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.size import SizeConfig
from trt_engine.config.streams import BatchPolicy, SourceGroup, parse_policy, parse_sources
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.records.streams import CurvePoint, CurveSummary
from trt_engine.sizing.arrivals import Sources
from trt_engine.sizing.capacity import StreamModel, bootstrap_interval, resample
from trt_engine.sizing.curve import (
    CurveGrid,
    detect_environment,
    keep_points,
    measure_host_curve,
    queue_limit,
    service_times,
    summarize_curve,
    turn_times,
)
from trt_engine.sizing.simulation import ServiceTimes, simulate
from trt_engine.sizing.stream_capacity import find_capacity
from trt_engine.sizing.stream_worker import DriveRequest, drive, full_batches_ms

ROOT = Path(__file__).resolve().parents[1]
LATE = 0.01
AGREEMENT = 0.05
SIMULATION_LIMIT_S = 10.0
STEP = 0.03
CURVES = 2
FASTEST = 1.1
"""Largest median of a turn of the curve, of the fastest turn's of the same batch."""
SPEED = 0.06
"""Largest difference from the curve's mean time of full batches around a run, as a share."""
SPEED_S, WAIT_S = 0.4, 20.0
SLOWEST, BATCHES = 1.25, 40
"""Largest median time of so many batches inside a run, of the curve's."""
TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One deadline, policy and mix; `number` is its place in the list of all."""

    number: int
    mix: str
    deadline_ms: float
    policy: BatchPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class Drive:
    """One live run."""

    streams: int
    frames: int
    late_share: float
    p99_ms: float
    speed: tuple[float, float]
    """Mean time of full batches before and after it, of the curve's."""
    slowest: float
    """Largest median time of some batches in a row, of the curve's; 1 with two contexts."""
    tries: int


def counts(speed: Sequence[float], slowest: float) -> bool:
    """Whether the machine was as fast during a run as for the curve."""
    return all(map(is_of_the_curve, speed)) and slowest <= SLOWEST


def is_of_the_curve(speed: float) -> bool:
    return abs(speed - 1) <= SPEED


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """What one process measured before its searches."""

    schema: str
    started: str
    command: str
    model: str
    device: str
    engine_info: dict[str, str]
    late: float
    seconds: float
    environment: Environment
    cores: tuple[int, ...]
    """The process's affinity."""
    load_average: tuple[float, float, float]
    """Before the first measurement."""
    gains: dict[str, dict[str, int]]
    """Predicted streams by mix and policy."""
    simulation_frames: int
    simulation_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """One live search beside the prediction."""

    schema: str
    started: str
    """Of its process."""
    model: str
    device: str
    case: Case
    repeat: int
    curve: tuple[CurveSummary, ...]
    turn_means_ms: dict[str, tuple[float, ...]]
    """By batch and contexts: the mean of each turn of the curve."""
    predicted: int
    low: int
    high: int
    observed: int
    drives: tuple[Drive, ...]
    agrees: bool
    covered: bool
    """The observed number is in the interval."""


class OutOfTime(Exception):
    """`--limit-s` has passed."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Streams within a deadline: predicted and observed.")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "examples/digits/model.onnx", help="a file, or `vit` (FP16 on a GPU)"
    )
    parser.add_argument("--device", default="cpu", help="[cpu]")
    parser.add_argument("--policies", nargs="+", default=["1,0ms", "4,5ms", "8,10ms,2"])
    parser.add_argument("--deadlines", nargs="+", type=float, default=[60.0, 120.0, 250.0], metavar="MS")
    parser.add_argument("--mixes", nargs="+", default=["1@5", "2@1,1@3"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8], help="of the curve")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one live run [15]")
    parser.add_argument("--curve-seconds", type=float, default=8.0, help="of one point of the curve [8]")
    parser.add_argument(
        "--repeats", type=int, default=1, help="searches of each case, each with its own curve and phases [1]"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first search, which sets its phases [0]")
    parser.add_argument("--shared-curve", action="store_true", help="one curve for all searches of this process")
    parser.add_argument(
        "--any-speed", action="store_true", help="every turn of the curve and every run counts (for a quiet machine)"
    )
    parser.add_argument(
        "--gains", action="store_true", help="also the gain of the searched policy, and the simulation's time"
    )
    parser.add_argument("--cases", default=None, help="numbers of cases, as 0,3,7 [all]; `--list` shows them")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="no search is begun or goes on after this time"
    )
    parser.add_argument("--folder", type=Path, help="where network and engine are kept between runs, and every curve")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/streams-cpu.jsonl")
    parser.add_argument(
        "--merge", nargs="+", type=Path, help="files of other processes: to `--out`, and a table of all"
    )
    parser.add_argument("--check", action="store_true", help="exit 8 when a limit is not kept")
    return parser.parse_args()


def main() -> int:
    args = options()
    cases = list_cases(args)
    if args.list:
        for case in cases:
            print(f"{case.number:3}  {case.mix:12} {case.deadline_ms:5g} ms  {case.policy}")
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.merge:
        args.out.write_text("".join(path.read_text(encoding="utf-8") for path in args.merge), encoding="utf-8")
    else:
        wanted = [case for case in cases if args.cases is None or str(case.number) in args.cases.split(",")]
        measure(args, wanted, time.perf_counter() + args.limit_s)
    met = summarize(args.out)
    return 8 if args.check and not met else 0


def list_cases(args: argparse.Namespace) -> list[Case]:
    cells = itertools.product(args.mixes, args.deadlines, args.policies)
    return [Case(number, mix, deadline, parse_policy(policy)) for number, (mix, deadline, policy) in enumerate(cells)]


def measure(args: argparse.Namespace, cases: list[Case], end_s: float) -> None:
    """Every search that the file does not have, until the time is over."""
    load, started = os.getloadavg(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    done = {search_key(line) for line in read_lines(args.out) if "case" in line}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        engine = open_engine(args, folder)
        driver = Driver(engine, args, end_s)
        append_record(args.out, describe(args, engine, driver.info(), load, started))
        try:
            points: list[CurvePoint] = []
            if args.shared_curve:
                points = measure_curve(args, engine, max(args.batches), max(case.policy.contexts for case in cases))
                keep_points(folder / "curves.jsonl", points)
            head = {"started": started, "model": args.model.name, "device": args.device}
            for case in cases:
                keys = {repeat: search_key(head | {"case": dataclasses.asdict(case), "repeat": repeat})
                        for repeat in range(args.first, args.first + args.repeats)}  # fmt: skip
                wanted = [repeat for repeat, key in keys.items() if key not in done]
                if not wanted:
                    continue
                for repeat in wanted:
                    if not args.shared_curve:
                        points = measure_curve(args, engine, case.policy.max_batch, case.policy.contexts)
                        keep_points(folder / "curves.jsonl", points)
                    found = search_case(case, repeat, points, driver, head)
                    append_record(args.out, found)
                    print(case_line([dataclasses.asdict(found)]), flush=True)
        except OutOfTime:
            print(f"stopped after {args.limit_s:g} s; the same command goes on", flush=True)
        finally:
            driver.close()


def open_engine(args: argparse.Namespace, folder: Path) -> Engine:
    """The model's engine; on a CPU with a thread for each core of this process, which ONNX Runtime does not look at."""
    path, most = args.model, max(args.batches)
    if path.name == "vit":
        half = args.device != "cpu"
        path = folder / "vit.onnx"
        if not path.exists():
            networks.vit(path, half=half, **({} if half else {"width": 64, "depth": 2, "heads": 4, "size": 32}))
    threads = {"intra_op_threads": str(len(os.sched_getaffinity(0)))} if args.device == "cpu" else {}
    return te.build(
        path,
        backend="onnxruntime",
        device=args.device,
        batch=(1, most, most),
        options=threads,
        store=te.Store(folder / "store"),
    )


def measure_curve(args: argparse.Namespace, engine: Engine, max_batch: int, contexts: int) -> list[CurvePoint]:
    """The curve up to this batch and number of contexts."""
    batches = tuple(batch for batch in args.batches if batch <= max_batch)
    grid = CurveGrid(batches, tuple(range(1, contexts + 1)), args.curve_seconds, longest_ms=1e4)
    curves = [measure_host_curve(engine, grid, RuntimeConfig(), args.device) for _ in range(CURVES)]
    return join_curves(curves, float("inf") if args.any_speed else FASTEST)


def join_curves(curves: list[list[CurvePoint]], fastest: float) -> list[CurvePoint]:
    """One curve, of the turns of all whose median is at most so many times the fastest's."""
    found = []
    for first in curves[0]:
        key = first.batch, first.contexts
        turns = [
            turn
            for curve in curves
            for point in curve
            if (point.batch, point.contexts) == key
            for turn in point.turns_ms
        ]
        medians = [float(np.median(turn)) for turn in turns]
        kept = [turn for turn, median in zip(turns, medians, strict=True) if median <= fastest * min(medians)]
        found.append(dataclasses.replace(first, turns_ms=tuple(kept)))
    return found


def slowest(batches: list[tuple[int, float]], service: ServiceTimes) -> float:
    """The largest median time of some batches in a row, of the curve's for as many rows."""
    expected_s = {rows: service.mean_s(rows) for rows, _ in batches}
    times = np.array([time_s / expected_s[rows] for rows, time_s in batches])
    parts = np.array_split(times, max(1, times.size // BATCHES))
    return max((float(np.median(part)) for part in parts if part.size), default=1.0)


class Driver:
    """The engine loaded once for each number of contexts, driven with paced sources in this process."""

    def __init__(self, engine: Engine, args: argparse.Namespace, end_s: float) -> None:
        self.engine, self.most, self.seconds, self.end_s = engine, max(args.batches), args.seconds, end_s
        self.any_speed: bool = args.any_speed
        self._loaded: dict[int, te.InferenceEngine] = {}

    def info(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._load(1).runtime_info.items()}

    def _load(self, contexts: int) -> te.InferenceEngine:
        if contexts not in self._loaded:
            runner = self._loaded[contexts] = te.load(self.engine, contexts=contexts)
            for rows in range(1, self.most + 1):  # the first run of a shape is slow on a GPU
                runner.warmup(batch=rows)
        return self._loaded[contexts]

    def drive(self, model: StreamModel, policy: BatchPolicy, streams: int, seed: int) -> Drive:
        """One live run, made again where the machine was slower; `OutOfTime` where it would end too late."""
        times = model.mix.scaled(streams).arrivals(self.seconds, np.random.default_rng((seed, streams)))
        request = DriveRequest(policy, tuple(times.tolist()), queue_limit(policy, model.service, model.deadline_s))
        for tries in itertools.count(1):
            before = self.wait_for_speed(model, policy)
            if time.perf_counter() + self.seconds > self.end_s:
                raise OutOfTime
            driven = drive(self._load(policy.contexts).runner, request)
            served = np.array([np.inf if one is None else one for one in driven.latencies_s])
            found = Drive(
                streams, served.size, float(np.mean(served > model.deadline_s)) if served.size else 0.0,
                1e3 * float(np.quantile(served, 0.99, method="lower")) if served.size else 0.0,
                (before, self.speed(model, policy)),
                slowest(driven.batches, model.service) if policy.contexts == 1 else 1.0, tries,
            )  # fmt: skip
            if self.any_speed or counts(found.speed, found.slowest) or tries == TRIES:
                return found
        raise AssertionError

    def wait_for_speed(self, model: StreamModel, policy: BatchPolicy) -> float:
        """The machine's speed once it is that of the curve, or after some time."""
        gives_up_s = time.perf_counter() + WAIT_S
        while not is_of_the_curve(found := self.speed(model, policy)) and time.perf_counter() < gives_up_s:
            if self.any_speed:
                break
            time.sleep(0.5)
        return found

    def speed(self, model: StreamModel, policy: BatchPolicy) -> float:
        """Mean time of full batches now, of the curve's."""
        runner = self._load(policy.contexts).runner
        times_ms = full_batches_ms(runner, policy.max_batch, policy.contexts, min(SPEED_S, self.seconds / 10))
        return float(np.mean(times_ms)) / (1e3 * model.service.mean_s(policy.max_batch, policy.contexts))

    def close(self) -> None:
        for runner in self._loaded.values():
            runner.close()


def search_case(case: Case, repeat: int, points: list[CurvePoint], driver: Driver, head: dict[str, str]) -> Search:
    """The prediction and the live search with these phases."""
    turns = turn_times(points)
    model = StreamModel(service_times(points), Sources(parse_sources(case.mix)), case.deadline_ms / 1e3, LATE)
    predicted = model.largest(case.policy)
    low, high = bootstrap_interval(lambda rng: resample(turns, rng), model, case.policy, predicted)
    observed, drives = search(driver, model, case.policy, predicted, repeat)
    return Search(
        schema="trt-engine/benchmark/streams-search", case=case, repeat=repeat, curve=summarize_curve(points),
        turn_means_ms={
            f"{batch} x {contexts}": tuple(round(float(np.mean(turn)), 4) for turn in found)
            for (batch, contexts), found in turns.items()
        },
        predicted=predicted, low=low, high=high,
        observed=observed, drives=tuple(drives), agrees=abs(predicted - observed) <= max(1, AGREEMENT * observed),
        covered=low <= observed <= high, **head,
    )  # fmt: skip


def search(driver: Driver, model: StreamModel, policy: BatchPolicy, guess: int, seed: int) -> tuple[int, list[Drive]]:
    """The largest number of sources that passes live, searched from `guess` in steps of 3 % that double."""
    drives: list[Drive] = []

    def passes(streams: int) -> bool:
        for _ in range(policy.contexts):
            drives.append(driver.drive(model, policy, streams, seed))
            if drives[-1].late_share <= model.late:
                return True
        return False

    step, low, high = max(1, round(STEP * guess)), 0, None
    count = max(1, guess)
    while count > low and (high is None or count < high):
        if passes(count):
            low, count = count, count + step
        else:
            high, count = count, max(count - step, 0)
        step *= 2
    while high is not None and high - low > 1:
        count = (low + high) // 2
        low, high = (count, high) if passes(count) else (low, count)
    return low, drives


def describe(
    args: argparse.Namespace,
    engine: Engine,
    info: dict[str, str],
    load: tuple[float, float, float],
    started: str,
) -> Process:
    frames, simulation_s = time_simulation() if args.gains else (0, 0.0)
    points = measure_curve(args, engine, max(args.batches), 2) if args.gains else []
    return Process(
        schema="trt-engine/benchmark/streams",
        started=started,
        command=_command(),
        model=args.model.name,
        device=args.device,
        engine_info=info,
        late=LATE,
        seconds=args.seconds,
        environment=detect_environment(args.device),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        load_average=load,
        gains={mix: gains(points, mix, args.deadlines) for mix in args.mixes} if args.gains else {},
        simulation_frames=frames,
        simulation_s=simulation_s,
    )


def gains(points: list[CurvePoint], mix: str, deadlines_ms: list[float]) -> dict[str, int]:
    """Predicted streams of the searched policy and of three usual ones, at the middle deadline."""
    deadline_ms = sorted(deadlines_ms)[len(deadlines_ms) // 2]
    config = SizeConfig(deadline_ms=deadline_ms, late=LATE, sources=parse_sources(mix))
    return {found.label: found.streams for found in find_capacity(points, config, 0.0).capacity.policies}


def time_simulation() -> tuple[int, float]:
    """Frames and seconds of 10,000 sources at 30 fps for a minute, with arrivals, on a device fast enough."""
    service = ServiceTimes({(batch, 1): [0.02 + 0.0015 * batch] for batch in (1, 32)})
    started = time.perf_counter()
    rng = np.random.default_rng(0)
    times = Sources((SourceGroup(10_000, 30.0),)).arrivals(60.0, rng)
    simulate(times, BatchPolicy(32, 2.0), service, rng)
    return times.size, time.perf_counter() - started


def _command() -> str:
    """What was typed, without the places of this machine."""
    kept, rest = [], iter(sys.argv[1:])
    for item in rest:
        if item in ("--folder", "--out"):
            next(rest, None)
        else:
            kept.append(item)
    return shlex.join(["python", "benchmarks/streams.py", *kept])


# ------------------------------------------------------------------------------------------------ the file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a last one that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def search_key(line: dict[str, Any]) -> tuple[str, ...]:
    """What makes two searches the same: model, device, case and repeat."""
    case = line["case"]
    return tuple(
        str(item)
        for item in (line["model"], line["device"], case["mix"], case["deadline_ms"], case["policy"], line["repeat"])
    )


def summarize(path: Path) -> bool:
    """Print the file's searches by case; whether every limit is kept."""
    lines = read_lines(path)
    by_case: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if "case" in line:
            by_case.setdefault(search_key(line)[:-1], []).append(line)
    agree = covered = total = many = 0
    for found in by_case.values():
        print(case_line(found))
        agree += sum(line["agrees"] for line in found)
        covered += sum(line["covered"] for line in found)
        total += len(found)
        many += min(line["observed"] for line in found) > 60
    print(
        f"{total} searches of {len(by_case)} cases, more than 60 sources in {many}: "
        f"{agree} agree, {covered} in the interval"
    )
    drives = [one for found in by_case.values() for line in found for one in line["drives"]]
    print(
        f"{len(drives)} runs, {sum(one['tries'] - 1 for one in drives)} made again, "
        f"{sum(not counts(one['speed'], one['slowest']) for one in drives)} on a slower machine all the same"
    )
    fast = True
    for line in lines:
        for mix, streams in line.get("gains", {}).items():
            print(f"{mix}: " + ", ".join(f"{label} {count}" for label, count in streams.items()))
        if line.get("simulation_frames"):
            print(f"simulated {line['simulation_frames']:,} frames in {line['simulation_s']:.2f} s")
            fast = fast and line["simulation_s"] < SIMULATION_LIMIT_S
    return bool(total) and agree == total and fast


def case_line(found: list[dict[str, Any]]) -> str:
    case, observed = found[0]["case"], sorted(line["observed"] for line in found)
    policy = BatchPolicy(**case["policy"])
    predicted = sorted({(line["predicted"], line["low"], line["high"]) for line in found})
    numbers = "; ".join(f"{count} ({low}-{high})" for count, low, high in predicted)
    text = f"{case['number']:3}  {case['mix']:12} {case['deadline_ms']:5g} ms  {policy!s:32} predicted {numbers}, observed "
    if len(found) == 1:
        return text + f"{observed[0]}  {'agrees' if found[0]['agrees'] else 'DIFFERS'}"
    agree, covered = (sum(line[name] for line in found) for name in ("agrees", "covered"))
    return text + (
        f"{observed[0]} to {observed[-1]} (median {observed[len(observed) // 2]}): "
        f"{agree} of {len(found)} agree, {covered} in the interval"
    )


if __name__ == "__main__":
    sys.exit(main())
