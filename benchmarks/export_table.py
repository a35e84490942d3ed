"""Twelve kinds of sources to ONNX and back against the source: the rows of docs/export-table.md.

    .venv-full/bin/python benchmarks/export_table.py             write the records, print the table
    .venv-full/bin/python benchmarks/export_table.py --only vit  one line, on stdout
    python benchmarks/export_table.py --table                    print the table of the records

A line fails when the graph is not its source within 1e-4 of the largest value at one of its shapes; then nothing is written.
"""

from __future__ import annotations

import argparse
import json
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
RECORDS = HERE / "results" / "export-table.jsonl"
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


def record(name: str, report: ConvertReport) -> dict[str, Any]:
    """What the table has of one line."""
    return {
        "source": name,
        "exporter": report.exporter,
        "opset": report.opset,
        "export_s": round(report.export_s, 1),
        "nodes_before": report.nodes_before,
        "nodes": report.nodes,
        "compared": [dict(item.sizes) for item in report.verification],
        "max_rel": report.max_rel,
    }


def row(line: dict[str, Any]) -> str:
    """One row in Markdown."""
    compared = [", ".join(f"{axis} {size}" for axis, size in sizes.items()) or "as given" for sizes in line["compared"]]
    return (
        f"| {LINES[line['source']].title} | {line['exporter']} | {line['opset']} | {line['export_s']:.1f} | "
        f"{line['nodes_before']} | {line['nodes']} | {len(compared)}: {'; '.join(compared)} | {line['max_rel']:.1g} |"
    )


def tables(path: Path = RECORDS) -> str:
    """What the site shows on docs/export-table.md."""
    head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    versions = ", ".join(f"{library} {version}" for library, version in head["versions"].items())
    return "\n".join([
        f"{head['processors']} processors, load average {head['load_before']} before the first source and "
        f"{head['load_after']} after the last. {versions}.",
        "",
        "| source | exporter | opset | export (s) | nodes exported | nodes written | compared at | largest difference |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, lines),
    ])  # fmt: skip


def _load() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LINES, action="append")
    parser.add_argument("--table", action="store_true", help="only print the table of the records")
    given = parser.parse_args()
    if given.table:
        print(tables())
        return 0
    lines, versions = [], dict[str, str]()
    before = _load()
    for name in given.only or LINES:
        with tempfile.TemporaryDirectory() as folder:
            report = convert(name, Path(folder))
        versions |= report.versions
        lines.append(record(name, report))
        print(row(lines[-1]), flush=True)
    if not given.only:
        head = {"versions": versions, "processors": os.cpu_count(), "load_before": before, "load_after": _load()}
        RECORDS.write_text("".join(json.dumps(item) + "\n" for item in (head, *lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
