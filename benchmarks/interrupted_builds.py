"""Ctrl-C at random moments of a long build, once or twice: exit codes, how soon the command ends, what is left.

    python benchmarks/interrupted_builds.py model.onnx --moments 50 -- --backend tensorrt-rtx --gpus sm89 --batch 1:8:64

What follows `--` goes to `trt-engine build`. One whole build is timed first. The exit code is 1 when a press ended in
anything but 130, crashed, took too long or left something half-written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from interrupted_builds import Interrupted, build_length, interrupt_builds


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    own = list(sys.argv[1:] if args is None else args)
    at = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:at])
    command = [sys.executable, "-m", "trt_engine", "build", str(options.model), *own[at + 1 :]]
    length_s = build_length(command)
    print(f"a whole build: {length_s:.1f} s\n\n| presses | first press at | second after | exit | ended after |")
    print(f"|{' --- |' * 5}")
    results = []
    for result in interrupt_builds(command, length_s, options.moments, options.seed):
        results.append(result)
        print(_row(result), flush=True)
        if result.faults():
            print(result.stderr, file=sys.stderr)
    for presses, chosen in (
        (1, [one for one in results if one.gap_s is None]),
        (2, [one for one in results if one.gap_s]),
    ):
        ended = [one for one in chosen if not one.finished]
        longest = max((one.ended_s for one in ended), default=0.0)
        print(f"\n{presses} of Ctrl-C: {len(ended)} interrupted of {len(chosen)}, the longest end {longest:.2f} s")
    return int(any(one.faults() for one in results))


def _row(one: Interrupted) -> str:
    second = "" if one.gap_s is None else f"{one.gap_s:.2f} s"
    found = "; ".join(one.faults()) or "whole before" * one.finished
    return (
        f"| {1 if one.gap_s is None else 2} | {one.at_s:.1f} s | {second} | {one.code} | {one.ended_s:.2f} s {found}|"
    )


if __name__ == "__main__":
    sys.exit(main())
