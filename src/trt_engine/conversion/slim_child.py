"""onnxslim on one file, in a process of its own: `python -P slim_child.py IN OUT SKIPPED`.

Its symbolic arithmetic (sympy) can run for minutes on an odd graph, and it sets loggers up for the whole process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import onnxslim  # type: ignore[import-not-found,import-untyped,unused-ignore]


def main(source: str, target: str, skipped: str) -> None:
    """The simplified model at `target`."""
    made = onnxslim.slim(onnx.load(source), skip_optimizations=[item for item in skipped.split(",") if item])
    Path(target).write_bytes(made.SerializeToString())


if __name__ == "__main__":
    main(*sys.argv[1:])
