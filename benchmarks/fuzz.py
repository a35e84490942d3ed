"""Damaged and hostile inputs for each parser and verb, for as long as there is time: nothing may crash, hang or end with 1.

    python benchmarks/fuzz.py --minutes 30                  every target in turn; writes the record and prints the table
    python benchmarks/fuzz.py --minutes 2 --only onnx       targets by name; writes nothing but reproducers
    python benchmarks/fuzz.py --only onnx --merge         writes the rows of these targets into the record
    python benchmarks/fuzz.py --replay x.json y.json        kept inputs again, with the faults each still has
    python benchmarks/fuzz.py --table                       the table of the record

Inputs are made by `tests/fuzz` from valid files and a seed: the n-th input of a seed is the same on one machine. They run
in worker processes, one for each core with `--workers`; one that hangs, crashes or takes more than 1 GiB is recorded with
its input. The smallest input of each distinct fault goes to `--out`; the exit code is 1
when there is one, or when fewer than 5 % of a target's inputs pass its parser.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.campaign import Result, Watched, fuzz, replay  # noqa: E402
from fuzz.inputs import Input  # noqa: E402
from fuzz.targets import TARGETS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fuzz-cpu.jsonl"
LEAST_SHARE = 0.05


def main(args: Sequence[str] | None = None) -> int:
    options = _parsed(args)
    if options.table:
        print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))
        return 0
    if options.replay:
        return _replayed(options.replay)
    names = options.only or list(TARGETS)
    began = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        shares = [names[index :: options.workers] for index in range(options.workers)]
        done = list(pool.map(lambda share: _part(share, options), shares))
    results = sorted((result for part in done for result in part), key=lambda result: names.index(result.target))
    rows = [_head(options, time.monotonic() - began), *map(_row, results)]
    if options.merge:  # rows of other targets stay; the new ones have the seed and the minutes of their run
        old = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        new = [row | {"seed": options.seed, "minutes": options.minutes} for row in rows[1:]]
        rows = [row for row in old if row.get("target") not in names] + new
    if not options.only or options.merge:
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    for result in results:
        for key, found in result.faults.items():
            print(f"{result.target}: {found.count} x {key}: {found.fault.text}")
    return int(any(result.faults or result.share < LEAST_SHARE for result in results))


def _parsed(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of fuzzing in all [30]")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs [the clock]")
    parser.add_argument("--workers", type=int, default=2, help="processes at once [2]")
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="this target (repeatable)")
    parser.add_argument(
        "--merge", action="store_true", help="with `--only`: write the rows of these targets into the record"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz-faults"), help="where reproducers go [fuzz-faults]")
    parser.add_argument("--replay", nargs="+", type=Path, help="run kept inputs again")
    parser.add_argument("--table", action="store_true", help="print the table of the record")
    return parser.parse_args(args)


def _part(names: Sequence[str], options: argparse.Namespace) -> list[Result]:
    """One worker's targets: in turns of equal time, so that a target that is slow takes no more than its part."""
    worker = Watched()
    results: list[Result] = []
    try:
        seconds = options.minutes * 60 / max(1, len(names))
        for name in names:
            result = fuzz(worker, name, options.seed, 10**9, until=time.monotonic() + seconds)
            print(f"{name}: {result.inputs} inputs, {len(result.faults)} distinct faults", file=sys.stderr, flush=True)
            results.append(result)
            for key, found in result.faults.items():
                print(f"{name}: {found.count} x {key}: {found.fault.text[:200]}", file=sys.stderr, flush=True)
                _save(options.out, result.target, key, found.input, found.fault.text)
    finally:
        worker.close()
    return results


def _save(folder: Path, target: str, key: str, item: Input, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    (folder / f"{target}-{digest}.json").write_text(item.to_json(found=key, text=text))


def _replayed(paths: Sequence[Path]) -> int:
    worker, failed = Watched(), 0
    try:
        for path in paths:
            faults = replay(worker, Input.from_json(path.read_text()))
            failed += bool(faults)
            print(f"{path.name}: {'; '.join(f'{fault.key}: {fault.text}' for fault in faults) or 'no fault'}")
    finally:
        worker.close()
    return int(failed > 0)


# ------------------------------------------------------------------------------------------------ the record


def _head(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    import numpy
    import onnx
    import onnxruntime

    import trt_engine

    return {
        "schema": "trt-engine/fuzz", "trt_engine": trt_engine.__version__, "python": platform.python_version(),
        "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__, "numpy": numpy.__version__, "seed": options.seed,
        "minutes": options.minutes, "workers": options.workers, "seconds": round(seconds, 1),
    }  # fmt: skip


def _row(result: Result) -> dict[str, Any]:
    return {
        "target": result.target, "inputs": result.inputs, "passed": result.passed, "seconds": round(result.seconds, 1),
        "codes": dict(sorted(result.codes.items())),
        "faults": {key: found.count for key, found in result.faults.items()},
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The record as a table in markdown."""
    head, *targets = rows
    lines = [
        f"{sum(row['inputs'] for row in targets):,} inputs in {head['seconds'] / 60:.0f} minutes, "
        f"{head['workers']} processes, seed {head['seed']}, onnx {head['onnx']}, ONNX Runtime {head['onnxruntime']}",
        "",
        "| target | inputs | a second | pass the parser | faults |",
        "|---|---|---|---|---|",
    ]
    for row in targets:
        lines.append(
            f"| {row['target']} | {row['inputs']:,} | {row['inputs'] / max(row['seconds'], 1e-9):.0f} |"
            f" {100 * row['passed'] / max(row['inputs'], 1):.0f} % | {sum(row['faults'].values())} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
