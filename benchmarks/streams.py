"""Largest number of sources within a deadline: predicted from the latency curve, and observed by live search.

The curve of the digits detector is measured once. For each deadline, policy and mix of frame rates the prediction is
`StreamModel.largest` with its bootstrap interval; the observation is a live search: the engine is driven through the batcher
with N paced sources, N moves by 3 % from the prediction until one number passes and the next fails. Agreement is within 5 %
or one source, whichever is larger. Then the gain of the searched policy over three usual ones (predicted), and the time of
simulating 10,000 sources for a minute.

    python benchmarks/streams.py
    python benchmarks/streams.py --seconds 30 --repeats 20 --check   # coverage of the interval
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

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
    drive_sources,
    measure_host_curve,
    queue_limit,
    service_times,
    summarize_curve,
    turn_times,
)
from trt_engine.sizing.simulation import ServiceTimes, simulate
from trt_engine.sizing.stream_capacity import find_capacity
from trt_engine.sizing.stream_worker import DriveRequest

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("1,0ms", "4,5ms", "8,10ms,2")
DEADLINES_MS = (60.0, 120.0, 250.0)
MIXES = ("1@5", "2@1,1@3")
LATE = 0.01
AGREEMENT = 0.05
SIMULATION_LIMIT_S = 10.0
STEP = 0.03


@dataclasses.dataclass(frozen=True, slots=True)
class Drive:
    """One live run."""

    streams: int
    frames: int
    late_share: float
    p99_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One deadline, policy and mix."""

    deadline_ms: float
    policy: BatchPolicy
    mix: str
    predicted: int
    low: int
    high: int
    observed: int
    drives: tuple[Drive, ...]
    agrees: bool
    covered: bool
    """The observed number is in the interval."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamsRecord:
    schema: str
    started: str
    command: str
    model: str
    late: float
    seconds: float
    environment: Environment
    load_average: tuple[float, float, float]
    """Before the first measurement."""
    curve: tuple[CurveSummary, ...]
    cases: tuple[Case, ...]
    gains: dict[str, dict[str, int]]
    """Predicted streams by mix and policy."""
    simulation_frames: int
    simulation_s: float
    met: bool


def main() -> int:
    parser = argparse.ArgumentParser(description="Streams within a deadline: predicted and observed.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/digits/model.onnx")
    parser.add_argument("--device", default="cpu", help="[cpu]")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one live run [15]")
    parser.add_argument("--curve-seconds", type=float, default=8.0, help="of one point of the curve [8]")
    parser.add_argument("--repeats", type=int, default=1, help="searches of each case, with other phases [1]")
    parser.add_argument("--cases", type=int, default=None, help="the first N cases alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/streams-cpu.jsonl")
    parser.add_argument("--check", action="store_true", help="exit 8 when a limit is not kept")
    args = parser.parse_args()
    load, started = os.getloadavg(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        engine = te.build(args.model, out=Path(folder) / "model.onnx", device=args.device, batch=(1, 8, 8))
        grid = CurveGrid((1, 2, 4, 8), (1, 2), args.curve_seconds, longest_ms=1e4)
        points = measure_host_curve(engine, grid, RuntimeConfig(), args.device)
        cases = list(_cases(args, engine, points))
    frames, simulation_s = time_simulation()
    record = StreamsRecord(
        schema="trt-engine/benchmark/streams",
        started=started,
        command=shlex.join(["python", "benchmarks/streams.py", *sys.argv[1:]]),
        model=args.model.name,
        late=LATE,
        seconds=args.seconds,
        environment=Environment.detect(),
        load_average=load,
        curve=summarize_curve(points),
        cases=tuple(cases),
        gains={mix: gains(points, mix) for mix in MIXES},
        simulation_frames=frames,
        simulation_s=simulation_s,
        met=all(case.agrees for case in cases) and simulation_s < SIMULATION_LIMIT_S,
    )
    append_record(args.out, record)
    _print(record)
    return 8 if args.check and not record.met else 0


def _cases(args: argparse.Namespace, engine: Engine, points: list[CurvePoint]) -> Iterator[Case]:
    service, turns, wanted = service_times(points), turn_times(points), []
    for mix in MIXES:
        for deadline_ms in DEADLINES_MS:
            wanted += [(mix, deadline_ms, parse_policy(policy)) for policy in POLICIES]
    for mix, deadline_ms, policy in wanted[: args.cases]:
        model = StreamModel(service, Sources(parse_sources(mix)), deadline_ms / 1e3, LATE)
        predicted = model.largest(policy)
        low, high = bootstrap_interval(lambda rng: resample(turns, rng), model, policy, predicted)
        for repeat in range(args.repeats):
            observed, drives = search(engine, model, policy, predicted, args.seconds, seed=repeat)
            case = Case(
                deadline_ms, policy, mix, predicted, low, high, observed, tuple(drives),
                agrees=abs(predicted - observed) <= max(1, AGREEMENT * observed), covered=low <= observed <= high,
            )  # fmt: skip
            print(_line(case), flush=True)
            yield case


def search(
    engine: Engine, model: StreamModel, policy: BatchPolicy, guess: int, seconds: float, seed: int
) -> tuple[int, list[Drive]]:
    """The largest number of sources that passes live, searched from `guess` in steps of 3 %."""
    drives: dict[int, Drive] = {}

    def passes(streams: int) -> bool:
        times = model.mix.scaled(streams).arrivals(seconds, np.random.default_rng((seed, streams)))
        request = DriveRequest(policy, tuple(times.tolist()), queue_limit(policy, model.service, model.deadline_s))
        found = drive_sources(engine, request, RuntimeConfig())
        served = np.array([np.inf if one is None else one for one in found])
        share = float(np.mean(served > model.deadline_s))
        drives[streams] = Drive(streams, len(found), share, float(1e3 * np.quantile(served, 0.99, method="lower")))
        return share <= model.late

    step, low, high = max(1, round(STEP * guess)), 0, None
    count = max(1, guess)
    while count > low and (high is None or count < high):
        if passes(count):
            low, count = count, count + step
        else:
            high, count = count, count - step
        if low and high is not None:
            break
        if high is not None and count <= 0:
            break
    while high is not None and high - low > 1:
        count = (low + high) // 2
        low, high = (count, high) if passes(count) else (low, count)
    return low, list(drives.values())


def gains(points: list[CurvePoint], mix: str) -> dict[str, int]:
    """Predicted streams of the searched policy and of three usual ones, at the middle deadline."""
    config = SizeConfig(deadline_ms=DEADLINES_MS[1], late=LATE, sources=parse_sources(mix))
    return {found.label: found.streams for found in find_capacity(points, config, 0.0).capacity.policies}


def time_simulation() -> tuple[int, float]:
    """Frames and seconds of 10,000 sources at 30 fps for a minute, with arrivals, on a device fast enough."""
    service = ServiceTimes({(batch, 1): [0.02 + 0.0015 * batch] for batch in (1, 32)})
    started = time.perf_counter()
    rng = np.random.default_rng(0)
    times = Sources((SourceGroup(10_000, 30.0),)).arrivals(60.0, rng)
    simulate(times, BatchPolicy(32, 2.0), service, rng)
    return times.size, time.perf_counter() - started


def _line(case: Case) -> str:
    return (
        f"{case.mix:12} {case.deadline_ms:5g} ms  {case.policy!s:36} predicted {case.predicted:4} "
        f"({case.low}-{case.high}), observed {case.observed:4}  {'agrees' if case.agrees else 'DIFFERS'}"
    )


def _print(record: StreamsRecord) -> None:
    cases = record.cases
    print(
        f"{sum(case.agrees for case in cases)} of {len(cases)} agree, {sum(case.covered for case in cases)} in the interval"
    )
    print(
        f"simulated {record.simulation_frames:,} frames in {record.simulation_s:.2f} s; load {record.load_average[0]:.2f}"
    )
    for mix, found in record.gains.items():
        print(f"{mix}: " + ", ".join(f"{label} {streams}" for label, streams in found.items()))


if __name__ == "__main__":
    sys.exit(main())
