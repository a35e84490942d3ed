"""One `InferenceEngine` under 1 to 16 callers on a CPU, against the best that raw ONNX Runtime sessions and threads reach.

Raw: the threads call `run` of one, two or four sessions by turns. Ours: `infer` of one engine from as many threads. For each
number of callers all ways take turns, block by block, in one run; ours is compared with the best of the raw ways of that
number of callers, and the demand is 0.95 of it.

    python benchmarks/pool.py
    python benchmarks/pool.py --callers 1 2 4 8 16 --sessions 1 2 4 --check
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from overhead import block

import trt_engine as te
from trt_engine.device.info import Clocks, clocks
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.store import Store

ROOT = Path(__file__).resolve().parents[1]
LEAST_RATIO = 0.95
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Callers:
    """So many threads calling: calls per second of each block, by way."""

    callers: int
    per_s: dict[str, tuple[float, ...]]
    best_raw: str
    ratio: float
    """Median over the rounds of ours over the best raw way (by its own median) beside it."""


@dataclass(frozen=True, slots=True)
class PoolRecord:
    schema: str
    started: str
    command: str
    model: str
    model_digest: str
    options: dict[str, str]
    facts: dict[str, str]
    environment: Environment
    clocks: tuple[Clocks, ...]
    callers: tuple[Callers, ...]
    met: bool


def main() -> int:
    parser = argparse.ArgumentParser(description="One engine from many threads against raw sessions and threads.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/digits/model.onnx")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 16], help="[1 2 4 16]")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4], help="raw sessions [1 2 4]")
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--block-s", type=float, default=0.4, help="[0.4]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/pool-cpu.jsonl")
    parser.add_argument("--check", action="store_true", help="exit 8 when the limit is not kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = measured(args, Store(Path(folder) / "store"))
    append_record(args.out, record)
    print(f"{record.model}: calls/s")
    for item in record.callers:
        ways = "  ".join(f"{way} {median(values):.1f}" for way, values in item.per_s.items())
        print(f"  {item.callers:>3} callers  {ways}  ours/best {item.ratio:.3f}")
    print(f"at least {LEAST_RATIO:g} of the best raw way: {'kept' if record.met else 'NOT kept'}")
    return 8 if args.check and not record.met else 0


def measured(args: argparse.Namespace, store: Store) -> PoolRecord:
    options = {"intra_op_threads": "1"}  # callers compete, not operators
    engine = te.build(args.model, batch=(1, 1, 1), options=options, store=store)
    started, before = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), clocks()
    with ExitStack() as stack:
        ours = stack.enter_context(te.load(engine, options=options))
        loaded = [stack.enter_context(te.load(engine, options=options)) for _ in range(max(args.sessions))]
        sessions = [one.runner.session._loaded for one in loaded]
        feeds = random_feeds(ours.signature, shapes_of(ours.signature, engine.passport.profiles[0], batch=1))
        names = [spec.name for spec in ours.outputs]
        ways: dict[str, Callable[[], object]] = {OURS: lambda: ours.infer(feeds)}
        ways |= {
            f"raw {count}": spread([session.run for session in sessions[:count]], names, feeds)
            for count in args.sessions
        }
        for call in ways.values():
            for _ in range(10):
                call()
        found = tuple(called(ways, callers, args) for callers in args.callers)
        facts = ours.runtime_info
    return PoolRecord(
        schema="trt-engine/pool",
        started=started,
        command=shlex.join(["python", "benchmarks/pool.py", *sys.argv[1:]]),
        model=f"{args.model.resolve().parent.name}/{args.model.name}",
        model_digest=engine.passport.model.digest,
        options=options,
        facts=facts,
        environment=Environment.detect(),
        clocks=(before, clocks()),
        callers=found,
        met=all(item.ratio >= LEAST_RATIO for item in found),
    )


def spread(runs: list[Callable[..., Any]], names: list[str], feeds: dict[str, Any]) -> Callable[[], object]:
    """One call on the sessions by turns; a session is safe from many threads."""
    if len(runs) == 1:
        (run,) = runs
        return lambda: run(names, feeds)
    turn = itertools.cycle(runs).__next__

    def call() -> object:
        return turn()(names, feeds)

    return call


def called(ways: dict[str, Callable[[], object]], callers: int, args: argparse.Namespace) -> Callers:
    per_s: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for number in range(args.rounds):
        for way in order[number % len(order) :] + order[: number % len(order)]:
            per_s[way].append(block(ways[way], callers, args.block_s))
    best = max((way for way in ways if way != OURS), key=lambda way: median(per_s[way]))
    return Callers(
        callers=callers,
        per_s={way: tuple(round(value, 1) for value in values) for way, values in per_s.items()},
        best_raw=best,
        ratio=median(one / other for one, other in zip(per_s[OURS], per_s[best], strict=True)),
    )


if __name__ == "__main__":
    sys.exit(main())
