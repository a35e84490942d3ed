"""Largest number of sources within a deadline: predicted from the latency curve, and observed by live search.

For each deadline, policy and mix of frame rates the curve of the model is measured; the prediction is `StreamModel.largest`
with its interval. The observation is a live search by the up-and-down method: the engine is driven through the batcher with
N paced sources, with other phases each time; N goes up by 3 % after a run within the deadline and down after one beyond it.
The observed number is the mean of N from the first turn on. Between two runs one more turn of the curve is measured, since
virtual machines change their speed by 10 % and more for seconds at a time.

Agreement: the prediction from all turns and the observed number, which saw the same machine, are within 5 % or one source,
whichever is larger. Coverage: the observed number is in the interval of the curve from before the search.
`--gains` adds the gain of the searched policy over three usual ones (predicted), and the time of simulating 10,000 sources
for a minute.

A run lasts at least 50 times the deadline: a queue that grows by 2 % of the time is then seen. A process appends one line
for itself and one for each search to `--out`; a search that the file has already is left out, so that the same command
resumes, and several processes each run their `--cases` on cores of their own. On a CPU the engine has as many threads as the
process has cores. On a GPU it is loaded as `size` does and recommends: with CUDA graphs of the sizes up to the largest of
`--batches` and of the policies, which are also the batches of the curve.

    python benchmarks/streams.py --gains
    taskset -c 0,1 python benchmarks/streams.py --cases 1 --repeats 20 --limit-s 500 --out cover.jsonl
    python benchmarks/streams.py --device cuda:0 --policies 1,0ms 4,2ms 8,4ms --deadlines 10 20 40 --mixes 1@25 2@15,1@30 \\
        --seconds 1 --turn-seconds 0.3 --runs 6
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
from pathlib import Path
from typing import Any

import networks
import numpy as np

import trt_engine as te
from trt_engine.config.streams import BatchPolicy, SourceGroup, parse_policy, parse_sources
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.records.streams import CurvePoint
from trt_engine.runtime.cuda_graph_policy import graph_sizes
from trt_engine.verbs.size.arrivals import Sources
from trt_engine.verbs.size.capacity import StreamModel, TurnTimes, bootstrap_interval, resample
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.curve import detect_environment, queue_limit, uses_graphs
from trt_engine.verbs.size.simulation import ServiceTimes, simulate
from trt_engine.verbs.size.stream_capacity import find_capacity
from trt_engine.verbs.size.stream_worker import CurveRequest, DriveRequest, drive, measure_curve, warm_up

ROOT = Path(__file__).resolve().parents[1]
LATE = 0.01
AGREEMENT = 0.05
SIMULATION_LIMIT_S = 10.0
STEP = 0.03
TURNS = 8
"""Of the curve before a search."""
DEADLINES = 50
"""Least length of a run, in deadlines."""


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
    batches: float | None
    """Mean time of its batches, of the curve's for as many rows; None with two contexts."""


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
    turn_means_ms: dict[str, tuple[float, ...]]
    """By batch and contexts: the mean of each turn of the curve, those before the search first."""
    first: int
    """Predicted from the curve before the search, with its interval."""
    low: int
    high: int
    predicted: int
    """From all turns, each scaled to their common mean."""
    observed: float
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
    parser.add_argument("--deadlines", nargs="+", type=float, default=[50.0, 100.0, 200.0], metavar="MS")
    parser.add_argument("--mixes", nargs="+", default=["1@5", "2@1,1@3"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8], help="of the curve")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one live run at least [3]")
    parser.add_argument("--turn-seconds", type=float, default=1.0, help="of one turn of the curve [1]")
    parser.add_argument("--runs", type=int, default=10, help="of one search [10]")
    parser.add_argument("--repeats", type=int, default=1, help="searches of each case [1]")
    parser.add_argument("--first", type=int, default=0, help="number of the first search, which sets its phases [0]")
    parser.add_argument(
        "--gains", action="store_true", help="also the gain of the searched policy, and the simulation's time"
    )
    parser.add_argument("--cases", default=None, help="numbers of cases, as 0,3,7 [all]; `--list` shows them")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="no search is begun or goes on after this time"
    )
    parser.add_argument("--folder", type=Path, help="where network and engine are kept between runs")
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
        driver = Driver(engine, args, [case.policy for case in cases], end_s)
        append_record(args.out, describe(args, driver, load, started))
        try:
            head = {"started": started, "model": args.model.name, "device": args.device}
            for case, repeat in itertools.product(cases, range(args.first, args.first + args.repeats)):
                if search_key(head | {"case": dataclasses.asdict(case), "repeat": repeat}) not in done:
                    found = search(case, repeat, driver, args.runs, head)
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
        parity=False,
        device=args.device,
        batch=(1, most, most),
        options=threads,
        store=te.Store(folder / "store"),
    )


class Driver:
    """The engine, loaded in this process: turns of the curve, and runs with paced sources."""

    def __init__(self, engine: Engine, args: argparse.Namespace, policies: list[BatchPolicy], end_s: float) -> None:
        self.seconds, self.turn_s, self.end_s = args.seconds, args.turn_seconds, end_s
        self.sizes, graphs = sorted(args.batches), uses_graphs(te.RuntimeConfig(), args.device)
        contexts = max(policy.contexts for policy in policies)
        if graphs:
            self.sizes = sorted({*graph_sizes(self.sizes[-1]), *(policy.max_batch for policy in policies)})
        self.loaded = te.load(
            engine,
            contexts=contexts,
            graphs=tuple(self.sizes) if graphs else False,
            max_graphs=max(16, len(self.sizes)),
        )
        warm_up(self.loaded, self.sizes if graphs else range(1, self.sizes[-1] + 1))
        self.padded = self.loaded.runtime_info.get("graphs") == "on"

    def curve(self, policy: BatchPolicy, turns: int) -> dict[tuple[int, int], list[list[float]]]:
        """Times in ms of full batches up to the policy's, by batch and contexts, in turns."""
        batches = tuple(batch for batch in self.sizes if batch <= policy.max_batch)
        contexts = tuple(range(1, policy.contexts + 1))
        request = CurveRequest(batches, contexts, turns, self.turn_s / (len(batches) * len(contexts)), longest_ms=1e9)
        return {(cell.batch, cell.contexts): cell.turns_ms for cell in measure_curve(self.loaded.runner, request)}

    def drive(self, model: StreamModel, policy: BatchPolicy, streams: int, seed: tuple[int, int]) -> Drive:
        """One live run; `OutOfTime` where it would end too late."""
        if not streams:
            return Drive(0, 0, 0.0, 0.0, None)
        seconds = max(self.seconds, DEADLINES * model.deadline_s)
        if time.perf_counter() + seconds > self.end_s:
            raise OutOfTime
        times = model.mix.scaled(streams).arrivals(seconds, np.random.default_rng(seed))
        request = DriveRequest(policy, tuple(times.tolist()), queue_limit(policy, model.service, model.deadline_s))
        driven = drive(self.loaded.runner, request)
        served = np.array([np.inf if one is None else one for one in driven.latencies_s])
        expected_s = sum(model.service.mean_s(rows) for rows, _ in driven.batches)
        return Drive(
            streams, served.size, float(np.mean(served > model.deadline_s)),
            1e3 * float(np.quantile(served, 0.99, method="lower")),
            sum(time_s for _, time_s in driven.batches) / expected_s if policy.contexts == 1 else None,
        )  # fmt: skip

    def close(self) -> None:
        self.loaded.close()


def search(case: Case, repeat: int, driver: Driver, runs: int, head: dict[str, str]) -> Search:
    """The prediction, the live search, and the prediction from the turns of the curve of both times."""
    policy = case.policy
    turns = driver.curve(policy, TURNS)
    model = model_of(case, turns, driver.padded)
    first = model.largest(policy)
    low, high = bootstrap_interval(lambda rng: resample(turns, rng, padded=driver.padded), model, policy, first)
    every = {key: list(found) for key, found in turns.items()}
    drives: list[Drive] = []
    step, count, turned = max(1, round(STEP * first)), first, None
    while len(drives) < runs:
        drives.append(driver.drive(model, policy, count, (repeat, len(drives))))
        passed = drives[-1].late_share <= LATE
        if turned is None and len(drives) > 1 and passed != (drives[-2].late_share <= LATE):
            turned = len(drives) - 1
        count = max(0, count + (step if passed else -step))
        for key, found in driver.curve(policy, 1).items():
            every[key] += found
    observed = (
        float(np.mean([one.streams for one in drives[turned:]] + [count])) if turned is not None else float(count)
    )
    predicted = model_of(case, at_one_speed(every), driver.padded).largest(policy)
    return Search(
        schema="trt-engine/benchmark/streams-search", case=case, repeat=repeat,
        turn_means_ms={
            f"{batch} x {contexts}": tuple(round(float(np.mean(turn)), 4) for turn in found)
            for (batch, contexts), found in every.items()
        },
        first=first, low=low, high=high, predicted=predicted, observed=round(observed, 1), drives=tuple(drives),
        agrees=abs(predicted - observed) <= max(1, AGREEMENT * observed), covered=low <= round(observed) <= high, **head,
    )  # fmt: skip


def at_one_speed(turns: TurnTimes) -> TurnTimes:
    """Every turn scaled to the geometric mean of its point's turns, as the runs' numbers are averaged."""
    found = {}
    for key, parts in turns.items():
        means = np.array([np.mean(part) for part in parts])
        scales = np.exp(np.log(means).mean()) / means
        found[key] = [(scale * np.array(part)).tolist() for scale, part in zip(scales, parts, strict=True)]
    return found


def model_of(case: Case, turns: TurnTimes, padded: bool) -> StreamModel:
    service = ServiceTimes({key: np.concatenate(found) for key, found in turns.items()}, padded=padded)
    return StreamModel(service, Sources(parse_sources(case.mix)), case.deadline_ms / 1e3, LATE)


def describe(args: argparse.Namespace, driver: Driver, load: tuple[float, float, float], started: str) -> Process:
    frames, simulation_s = time_simulation() if args.gains else (0, 0.0)
    points = measured_points(driver, args.device) if args.gains else []
    return Process(
        schema="trt-engine/benchmark/streams",
        started=started,
        command=_command(),
        model=args.model.name,
        device=args.device,
        engine_info={name: str(value) for name, value in driver.loaded.runtime_info.items()},
        late=LATE,
        seconds=args.seconds,
        environment=detect_environment(args.device),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        load_average=load,
        gains={mix: gains(points, mix, args.deadlines) for mix in args.mixes} if args.gains else {},
        simulation_frames=frames,
        simulation_s=simulation_s,
    )


def measured_points(driver: Driver, device: str) -> list[CurvePoint]:
    """The curve of all batches, with 1 and 2 contexts."""
    turns = driver.curve(BatchPolicy(max(driver.sizes), 0.0, 2), TURNS)
    here, graphs = detect_environment(device), "on" if driver.padded else ""
    return [
        CurvePoint("", device, batch, contexts, "host", tuple(map(tuple, found)), here, "", graphs)
        for (batch, contexts), found in turns.items()
    ]


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
    fast = True
    for line in lines:
        for mix, streams in line.get("gains", {}).items():
            print(f"{mix}: " + ", ".join(f"{label} {count}" for label, count in streams.items()))
        if line.get("simulation_frames"):
            print(f"simulated {line['simulation_frames']:,} frames in {line['simulation_s']:.2f} s")
            fast = fast and line["simulation_s"] < SIMULATION_LIMIT_S
    return bool(total) and agree == total and fast


def case_line(found: list[dict[str, Any]]) -> str:
    case, policy = found[0]["case"], BatchPolicy(**found[0]["case"]["policy"])
    text = f"{case['number']:3}  {case['mix']:12} {case['deadline_ms']:5g} ms  {policy!s:32} "
    for line in found if len(found) <= 3 else []:
        text += f"predicted {line['first']} ({line['low']}-{line['high']}), {line['predicted']} with later turns, "
        text += f"observed {line['observed']:g}; "
    agree, covered = (sum(line[name] for line in found) for name in ("agrees", "covered"))
    return text + f"{agree} of {len(found)} agree, {covered} in the interval"


if __name__ == "__main__":
    sys.exit(main())
