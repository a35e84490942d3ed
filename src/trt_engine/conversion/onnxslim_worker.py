"""Runs onnxslim on one file in a separate process: `python -P onnxslim_worker.py IN OUT SKIPPED`.

Its symbolic arithmetic (sympy) can run for minutes on unusual graphs, and it configures process-wide loggers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import onnxslim  # type: ignore[import-not-found,import-untyped,unused-ignore]


def main(source: str, target: str, skipped: str) -> None:
    """Write the simplified model to `target`."""
    made = onnxslim.slim(onnx.load(source), skip_optimizations=[item for item in skipped.split(",") if item])
    Path(target).write_bytes(made.SerializeToString())


if __name__ == "__main__":
    main(*sys.argv[1:])
