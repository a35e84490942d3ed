"""The ceilings of a GPU and of its host, by each library that is there, as one record.

python benchmarks/gpu_ceilings.py [--device cuda:0] [--by torch cupy host] [-o FILE]

Appends one line to benchmarks/results/ceilings-h200.jsonl (or FILE): for PyTorch and CuPy apart, and for the processor.
Nothing kept is read, and nothing is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from trt_engine.device import info, parse_device
from trt_engine.environment import Environment
from trt_engine.errors import SetupError
from trt_engine.profiling.peaks import cpu, gpu
from trt_engine.profiling.peaks.probe import PeakProbe
from trt_engine.records.base import append_record

RESULTS = Path(__file__).with_name("results") / "ceilings-h200.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--by", choices=("torch", "cupy", "host"), nargs="+", default=("torch", "cupy", "host"))
    parser.add_argument("-o", "--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    _, number = parse_device(asked.device)
    for name in asked.by:
        started, begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.perf_counter()
        gauge, share = PeakProbe(60.0), cpu.watch_other_load()
        try:
            if name == "host":
                library = cpu.LIBRARIES
                cpu.measure_cpu(gauge)
            else:
                made = gpu.find_library(name, number)
                library = made.name
                gpu.measure_gpu(gauge, number, made)
        except SetupError as error:
            print(f"{name}: {error.message}", file=sys.stderr)
            continue
        record = {
            "benchmark": "ceilings",
            "command": f"python benchmarks/gpu_ceilings.py --device {asked.device}",
            "started": started,
            "seconds": round(time.perf_counter() - begun, 2),
            "device": "cpu" if name == "host" else asked.device,
            "library": library,
            "items": gauge.peaks,
            "skipped": gauge.skipped,
            "busy_elsewhere": round(share(), 3),
            "clocks": info.clocks(None if name == "host" else number),
            "environment": Environment.detect(number),
        }
        append_record(asked.out, record)
        print(f"{library}: {record['seconds']} s")
        for item in gauge.peaks:
            print(f"  {item.name:<18} {item.value:>10.4g} {item.unit:<8} {item.method}")
        for text in gauge.skipped:
            print(f"  skipped {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
