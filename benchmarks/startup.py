"""How long a person waits for `trt-engine --help`: fresh processes, interleaved, next to what Python and click cost.

    python benchmarks/startup.py [--rounds 40] [--no-record]

Each round starts every command once, in an order that turns from round to round. `python -c pass` is measured twice
(A and A): their difference is what this machine cannot tell apart. The record goes to
benchmarks/results/startup-cpu.jsonl with every sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.records.percentiles import percentile

RESULTS = Path(__file__).resolve().parent / "results" / "startup-cpu.jsonl"
LIMIT_MS = 100.0
CASES: dict[str, list[str]] = {
    "python -c pass (A)": ["python", "-c", "pass"],
    "python -c pass (A again)": ["python", "-c", "pass"],
    'python -c "import click"': ["python", "-c", "import click"],
    "trt-engine --help": ["trt-engine", "--help"],
    "trt-engine size --help": ["trt-engine", "size", "--help"],
    "trt-engine doctor --help": ["trt-engine", "doctor", "--help"],
    "trt-engine --version": ["trt-engine", "--version"],
}


def program(command: list[str]) -> list[str]:
    """The command with this interpreter's own `python` and `trt-engine`."""
    beside = Path(sys.executable).with_name(command[0])
    first = [sys.executable] if command[0] == "python" else [str(beside)]
    if command[0] == "trt-engine" and not beside.exists():
        first = [sys.executable, "-m", "trt_engine"]
    return [*first, *command[1:]]


def once_ms(command: list[str], environment: dict[str, str]) -> float:
    """Milliseconds from starting the process to its end, output thrown away."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    return 1000 * (time.perf_counter() - started)


def measure(rounds: int, byte_code: str) -> dict[str, list[float]]:
    """Samples by command. Byte code is kept as an installed package has it, in a folder of its own for every command."""
    switched = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPROFILEIMPORTTIME")
    environment = {name: value for name, value in os.environ.items() if name not in switched}
    environment["PYTHONPYCACHEPREFIX"] = byte_code
    commands = {name: program(command) for name, command in CASES.items()}
    for (
        command
    ) in commands.values():  # writes the byte code and fills the page cache: the second start is the usual one
        once_ms(command, environment)
    samples: dict[str, list[float]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(rounds):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 else reversed(order):
            samples[name].append(once_ms(commands[name], environment))
    return samples


def table(samples: dict[str, list[float]]) -> str:
    rows = [("command", "min", "median", "p95", "over python")]
    floor = statistics.median(samples["python -c pass (A)"])
    for name, values in samples.items():
        middle = statistics.median(values)
        p95 = percentile(sorted(values), 95, "linear")
        rows.append((name, f"{min(values):.1f}", f"{middle:.1f}", f"{p95:.1f}", f"{middle - floor:+.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="starts of each command (30 or more for a record)")
    parser.add_argument("--no-record", action="store_true", help="print only")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as byte_code:
        samples = measure(asked.rounds, byte_code)
    print(f"ms from start to end, {asked.rounds} starts each, load average {load_before:.2f}")
    print(table(samples))
    median = statistics.median(samples["trt-engine --help"])
    holds = median < LIMIT_MS
    print(f"trt-engine --help: median {median:.1f} ms, {'under' if holds else 'NOT under'} {LIMIT_MS:.0f} ms")
    if asked.no_record:
        return 0
    if asked.rounds < 30:
        print("a record needs 30 rounds or more", file=sys.stderr)
        return 2
    record: dict[str, Any] = {
        "benchmark": "startup",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rounds": asked.rounds,
        "byte_code": "kept between starts, as in an installed package",
        "order": "interleaved, rotated each round, reversed every second",
        "limit_ms": LIMIT_MS,
        "median_ms": {name: round(statistics.median(values), 3) for name, values in samples.items()},
        "samples_ms": {name: [round(value, 3) for value in values] for name, values in samples.items()},
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "environment": Environment.detect(),
    }
    append_record(RESULTS, record)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
