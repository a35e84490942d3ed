"""The ceilings of a GPU and of its CPU, measured twice by `te.doctor`: how far two measurements differ.

python benchmarks/gpu/ceilings.py
python benchmarks/gpu/ceilings.py --device cpu --rounds 1
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time

from common import opened, parser

import trt_engine as te


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=2)
    args = options.parse_args()
    with opened(args, "ceilings") as bench:
        os.environ["TRT_ENGINE_STORE"] = str(bench.folder / "store")  # the user's own cache stays as it is
        values: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            bench.begin()
            start = time.perf_counter()
            report = te.doctor(peaks=["cpu", args.device] if bench.on_gpu else ["cpu"], remeasure=True)
            for found in report.peaks:
                bench.write(seconds=round(time.perf_counter() - start, 2), **dataclasses.asdict(found))
                for peak in found.peaks:
                    name = f"{found.device:<24} {peak.name:<18} {peak.unit:<8} {peak.source}"
                    values.setdefault(name, []).append(peak.value)
        for name, found in values.items():
            print(name, " ".join(f"{value:>10.4g}" for value in found), f"  x{max(found) / min(found):.3f}")
    return 0 if values else 3


if __name__ == "__main__":
    sys.exit(main())
