"""Random graphs through this package's compilers, judged by plain ONNX Runtime without optimisation.

    python benchmarks/graph_fuzz.py --graphs 10000          of the fusions, all families in turn; writes the record
    python benchmarks/graph_fuzz.py --graphs 500 --family rotary --seed 7000
    python benchmarks/graph_fuzz.py --graphs 10000 --seed 100000 --out FILE    goes on where FILE's run ended early
    python benchmarks/graph_fuzz.py --table                 the table of the record

The n-th graph of a family is the same everywhere. Each is fused for a CPU and for a GPU; the latter's operators run on ONNX
Runtime's CPU kernels, which judges the rewrite and not CUDA's kernels. The exit code is 1 where a graph is wrong, crashes
or fails at run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from graph.fusion.fuzz_oracle import CRASH, FAILS, FAULTS, NOT_FINITE, NOT_FUSED, NOT_JUDGED, RIGHT, WRONG, judge  # noqa: E402
from graph.fusion.random_graphs import FAMILIES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "graph-fuzz-cpu.jsonl"
_COLUMNS = (RIGHT, NOT_FUSED, WRONG, CRASH, FAILS, NOT_FINITE, NOT_JUDGED)
_WEIGHTS = {"attention": 3, "rotary": 2, "norms": 2, "standard_attention": 2}
"""Turns of a family; others have one."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000, help="random graphs in all [1000]")
    parser.add_argument("--seed", type=int, default=0, help="first seed [0]")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="this family (repeatable)")
    parser.add_argument("--workers", type=int, default=1, help="processes at once [1]")
    parser.add_argument("--out", type=Path, help=f"the record [{RESULTS.relative_to(ROOT)} where all families run]")
    parser.add_argument("--table", action="store_true", help="print the table of the record")
    options = parser.parse_args(args)
    out = options.out or RESULTS
    if options.table:
        print(table([json.loads(line) for line in out.read_text().splitlines()]))
        return 0
    began, families = time.monotonic(), options.family or list(FAMILIES)
    turns = [name for name in families for _ in range(_WEIGHTS.get(name, 1))]
    drawn, tasks = Counter[str](), list[tuple[str, int]]()
    for at in range(options.graphs):
        family = turns[at % len(turns)]
        tasks.append((family, options.seed + drawn[family]))
        drawn[family] += 1
    head, tallies, faults = _so_far(options)
    fusions, done, spent = Counter[str](head.pop("fused", {})), head.pop("graphs", 0), head.pop("seconds", 0)
    rows: list[dict[str, Any]] = []

    def write(graphs: int) -> None:
        now = {
            "graphs": graphs,
            "seconds": round(spent + time.monotonic() - began),
            "fused": dict(sorted(fusions.items())),
        }
        counted = ({"family": a, "mode": b, "verdicts": dict(tally)} for (a, b), tally in sorted(tallies.items()))
        rows[:] = [head | now, *counted, *faults]
        if options.out or not options.family:
            out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with ProcessPoolExecutor(options.workers) as pool:
        for at, verdicts in enumerate(pool.map(_judged, tasks[done:], chunksize=20), done):
            family, seed = tasks[at]
            for mode, (verdict, text, counts) in verdicts.items():
                tallies.setdefault((family, mode), Counter())[verdict] += 1
                fusions.update(counts)
                if verdict in FAULTS:
                    faults.append({"family": family, "seed": seed, "mode": mode, "verdict": verdict, "text": text})
                    print(f"{family} {seed} {mode}: {verdict}: {text[:300]}", file=sys.stderr, flush=True)
            if (at + 1) % 100 == 0:
                write(at + 1)
    write(len(tasks))
    print(table(rows))
    return int(bool(faults))


def _judged(task: tuple[str, int]) -> dict[str, tuple[str, str, dict[str, int]]]:
    found = {}
    for mode in ("cpu", "gpu"):
        made = judge(*task, on_gpu=mode == "gpu")
        found[mode] = (made.verdict, made.text, made.counts)
    return found


def _so_far(
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[tuple[str, str], Counter[str]], list[dict[str, Any]]]:
    """The head of the record, and the counts and faults of `--out` where it is an earlier run of the same graphs."""
    import onnx
    import onnxruntime

    import trt_engine
    from trt_engine.environment import source_digest

    head: dict[str, Any] = {
        "schema": "trt-engine/graph-fuzz", "trt_engine": trt_engine.__version__, "fusions": source_digest("graph/fusion"),
        "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__, "seed": options.seed,
        "families": options.family or list(FAMILIES),
    }  # fmt: skip
    if not options.out or not options.out.exists():
        return head, {}, []
    before, *rows = (json.loads(line) for line in options.out.read_text().splitlines())
    if any(before.get(key) != value for key, value in head.items()):
        return head, {}, []
    tallies = {(row["family"], row["mode"]): Counter(row["verdicts"]) for row in rows if "verdicts" in row}
    return before, tallies, [row for row in rows if "verdict" in row]


def table(rows: list[dict[str, Any]]) -> str:
    """Counts of each verdict by family and mode."""
    lines = [f"| family | mode | {' | '.join(_COLUMNS)} |", "|---|---|" + "---:|" * len(_COLUMNS)]
    total = Counter[str]()
    for row in rows:
        if "verdicts" in row:
            total.update(row["verdicts"])
            cells = " | ".join(str(row["verdicts"].get(name, 0)) for name in _COLUMNS)
            lines.append(f"| {row['family']} | {row['mode']} | {cells} |")
    lines.append(f"| all | | {' | '.join(str(total.get(name, 0)) for name in _COLUMNS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
