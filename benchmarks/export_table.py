"""Twelve kinds of sources to ONNX and back against the source: the rows of docs/export-table.md.

    .venv-full/bin/python benchmarks/export_table.py            write the table
    .venv-full/bin/python benchmarks/export_table.py --only vit  one line, on stdout

A line fails when the graph is not its source within 1e-4 of the largest value at one of its shapes; then nothing is written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trt_engine as te
from trt_engine.records.convert import ConvertReport

HERE = Path(__file__).resolve().parent
TABLE = HERE.parent / "docs" / "export-table.md"
NETWORKS = HERE / "export_networks.py"


@dataclass(frozen=True)
class Line:
    """One source of the table, and how it is converted."""

    title: str
    inputs: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] | None = None
    make: Callable[[Path], Path] | None = None
    """Writes a source that is no Python factory; gives its path."""


def _in_tensorflow(program: str) -> Callable[[Path], Path]:
    """The source a TensorFlow program writes, in a process of its own: it and PyTorch need not meet."""

    def make(folder: Path) -> Path:
        target = folder / "source"
        done = subprocess.run([sys.executable, "-c", program, str(target)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the TensorFlow source could not be written:\n{done.stderr[-2000:]}")
        return next(item for item in (target, target.with_suffix(".tflite")) if item.exists())

    return make


_NET = """
import sys, pathlib
import tensorflow as tf
tf.random.set_seed(0)
class Net(tf.Module):
    def __init__(self):
        self.kernel = tf.Variable(tf.random.normal([3, 3, 3, 8]) * 0.2)
        self.weight = tf.Variable(tf.random.normal([8, 5]))
    @tf.function(input_signature=[tf.TensorSpec([{batch}, 32, 32, 3], tf.float32, name="images")])
    def __call__(self, images):
        x = tf.nn.relu(tf.nn.conv2d(images, self.kernel, 2, "SAME"))
        return {{"scores": tf.nn.softmax(tf.reduce_mean(x, [1, 2]) @ self.weight)}}
net = Net()
target = pathlib.Path(sys.argv[1])
"""
_SAVED_MODEL = _NET.format(batch="None") + "tf.saved_model.save(net, str(target), signatures=net.__call__)\n"
_TFLITE = _NET.format(batch="None") + (
    "made = tf.lite.TFLiteConverter.from_concrete_functions([net.__call__.get_concrete_function()], net).convert()\n"
    "target.with_suffix('.tflite').write_bytes(made)\n"
)

LINES: dict[str, Line] = {
    "mlp": Line("MLP", {"features": (4, 32)}),
    "cnn": Line("CNN, any size", {"images": (2, 3, 32, 48)}, {"images": {0: "batch", 2: "height", 3: "width"}}),
    "resnet": Line("ResNet", {"images": (2, 3, 64, 64)}, {"images": {0: "batch@1..64"}}),
    "vit": Line("ViT", {"images": (2, 3, 64, 64)}),
    "unet": Line(
        "UNet, any size in steps of 4", {"images": (2, 3, 32, 64)},
        {"images": {0: "batch", 2: "height@16..256/4", 3: "width@16..256/4"}},
    ),
    "detector": Line(
        "detector, head without NMS", {"images": (2, 3, 96, 128)},
        {"images": {0: "batch", 2: "height@64..640/32", 3: "width@64..640/32"}},
    ),
    "encoder": Line(
        "transformer encoder with mask", {"input_ids": "3x12:int64@0..199", "attention_mask": "3x12:int64"},
        {"*": {0: "batch", 1: "sequence@1..128"}},
    ),
    "recurrent": Line(
        "LSTM with state", {"frames": (3, 6, 12), "hidden": (2, 3, 24), "cell": (2, 3, 24)},
        {"frames": {0: "batch", 1: "time"}, "hidden": {1: "batch"}, "cell": {1: "batch"}},
    ),
    "two_inputs": Line(
        "two inputs, a dict of outputs", {"images": (3, 3, 32, 32), "tokens": "3x7:int64@0..49"},
        {"images": {0: "batch"}, "tokens": {0: "batch", 1: "words"}},
    ),
    "branching": Line("control flow (`torch.cond`)", {"signal": (3, 16)}),
    "saved_model": Line("TensorFlow SavedModel", {"images": (2, 32, 32, 3)}, make=_in_tensorflow(_SAVED_MODEL)),
    "tflite": Line("TensorFlow Lite", {"images": (2, 32, 32, 3)}, make=_in_tensorflow(_TFLITE)),
}  # fmt: skip


def convert(name: str, folder: Path) -> ConvertReport:
    """One line of the table converted; raises what `convert` raises."""
    line = LINES[name]
    source = line.make(folder) if line.make is not None else f"{NETWORKS}:{name}"
    return te.convert(source, out=folder / f"{name}.onnx", inputs=line.inputs, dynamic=line.dynamic, tolerance=1e-4)


def row(name: str, report: ConvertReport) -> str:
    """One row in Markdown."""
    shapes = "; ".join(
        ", ".join(f"{axis} {size}" for axis, size in item.sizes.items()) or "as given" for item in report.verification
    )
    return (
        f"| {LINES[name].title} | {report.exporter} | {report.opset} | {report.export_s:.1f} | {report.nodes_before} | "
        f"{report.nodes} | {len(report.verification)}: {shapes} | {report.max_rel:.1g} |"
    )


_HEAD = """\
# Twelve sources, exported and compared

Written by `benchmarks/export_table.py`; a source that is not equal to its graph within 1e-4 of the largest value writes no
table. Small networks with random weights, in `benchmarks/export_networks.py`, on a CPU; the first export of a process takes
seconds longer than the next, and what else the machine does stands in them: {processors} processors, load average {before}
before the first source and {after} after the last. {versions}.

| source | exporter | opset | export (s) | nodes exported | nodes written | compared at | largest difference |
|---|---|---|---|---|---|---|---|
"""


def _load() -> str:
    """Of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LINES, action="append")
    only = parser.parse_args().only
    rows, versions = [], dict[str, str]()
    before = _load()
    for name in only or LINES:
        with tempfile.TemporaryDirectory() as folder:
            report = convert(name, Path(folder))
        versions |= report.versions
        rows.append(row(name, report))
        print(rows[-1], flush=True)
    if not only:
        told = ", ".join(f"{library} {version}" for library, version in versions.items())
        head = _HEAD.format(versions=told, processors=os.cpu_count(), before=before, after=_load())
        TABLE.write_text(head + "\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
