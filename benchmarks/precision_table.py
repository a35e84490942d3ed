"""One table of what each precision keeps of three models' accuracy: AP or top-1, size, census and latency.

    python benchmarks/precision_table.py

The digits detector runs over 512 generated validation scenes, a small ViT and a small ResNet over the 539 held-out digits of
examples/classifiers. Calibration sees 128 generated pictures of the training side. Where ONNX Runtime has no kernels for a
format on this machine, the FP32 emulation of it is measured, and the table says so. Each cell is appended to
benchmarks/results/precision-table.jsonl.gz as soon as it is measured; a second run measures what is missing. It prints the
tables that the site shows on docs/precision-table.md (`--table`: only that).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gzip
import hashlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

import trt_engine as te
from trt_engine.backends.onnxruntime.cpu_kernels import kernel_dtypes
from trt_engine.engine import Engine
from trt_engine.environment import distribution_version, source_digest
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.graph.dtype_breakdown import dtype_shares
from trt_engine.graph.emulate_half import emulate_half_precision
from trt_engine.graph.load import open_model, read_graph, read_proto
from trt_engine.precision.quantize_model import quantize
from trt_engine.records.bench import BenchRecord
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.percentiles import summarize
from trt_engine.records.precision import CastReport
from trt_engine.store import Store
from trt_engine.verbs.calibration_images import images_as_inputs
from trt_engine.verbs.cast.run import cast
from trt_engine.verbs.evaluate import run as evaluate
from trt_engine.vision.spec import vision_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "precision-table.jsonl.gz"
DIGITS, CLASSIFIERS = ROOT / "examples" / "digits", ROOT / "examples" / "classifiers"
SCENES, CALIBRATION = 512, 128
BATCH = 8
TARGETS = {"fp16": 0.001, "int8": 0.01, "fp8": 0.005}
"""How far AP of the digits detector may lie from FP32's."""


@dataclass(frozen=True)
class Net:
    """One model of the table."""

    name: str
    path: Path
    title: str
    convolutions: bool
    """Nearly all of its work is convolutions, which block formats have no kernels for: they are emulated anyway."""


NETS = (
    Net("digits", DIGITS / "model.onnx", f"The digits detector, {SCENES} validation scenes", True),
    Net("vit", CLASSIFIERS / "vit.onnx", "The ViT, 539 held-out digits", False),
    Net("resnet", CLASSIFIERS / "resnet.onnx", "The ResNet, 539 held-out digits", True),
)


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    to: str
    calibrator: str | None = None
    method: str = "rtn"
    target: str = "tensorrt"

    @property
    def name(self) -> str:
        target = "" if self.target == "tensorrt" else f"for {self.target}"
        return " ".join(filter(None, (self.to, self.calibrator, "" if self.method == "rtn" else self.method, target)))


CELLS = (
    Cell("fp32"), Cell("fp16"), Cell("bf16"), Cell("int8", "mse"), Cell("int8", "entropy"), Cell("int8", "minmax"),
    Cell("int8", "percentile"), Cell("int8", "mse", target="onnxruntime-cpu"),
    Cell("fp8"), Cell("int4"), Cell("int4", method="awq"), Cell("nvfp4"), Cell("mxfp8"),
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """The files of a cell: the model that would be shipped, and what is run here."""

    run: Path
    kernels: bool
    """`run` is the model itself; else an FP32 graph that computes the same numbers."""
    nbytes: int | None
    census: dict[str, Any] | None
    note: str | None = None
    slow: str | None = None
    """Why there is no latency, where the general reason says too little."""


# ------------------------------------------------------------------------------------------------ data


def module(path: Path) -> ModuleType:
    """An example's own script as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def data_of(net: Net, work: Path) -> tuple[Path, Path]:
    """The dataset and the calibration data of a model, generated once."""
    if net.name == "digits":
        scenes = None
        folders = {"val": (SCENES, 1), "train": (CALIBRATION, 2)}
        for split, (count, seed) in folders.items():
            if not (work / split / "annotations.json").exists():  # written last
                scenes = scenes or module(DIGITS / "scenes.py")
                scenes.write(split, seed, count, work / split)
        return work / "val", work / "train" / "images"
    path = work / "classifiers-train.npz"
    if not path.exists():
        module(CLASSIFIERS / "data.py").write("train", path, CALIBRATION, as_inputs=True)
    return CLASSIFIERS / "val.npz", path


# ------------------------------------------------------------------------------------------------ one cell


def make(net: Net, cell: Cell, data: Path, folder: Path) -> Made:
    """The model in the cell's precision."""
    model = open_model(net.path)
    out = folder / f"{net.name}.{cell.to}.onnx"
    if cell.to == "fp32":
        return Made(net.path, True, model.nbytes, _builtin(dtype_shares(read_graph(net.path))))
    if cell.to in ("fp16", "bf16"):
        report = cast(net.path, cell.to, out=out)
        assert report.precision is not None and report.nbytes_after is not None
        rounded = folder / "rounded.onnx"
        rounded.write_bytes(emulate_half_precision(read_proto(out, weights=True), out.parent).SerializeToString())
        return Made(rounded, False, report.nbytes_after, _builtin(report.precision.shares), slow=_slow(report))
    inputs = images_as_inputs(model, data)
    blocks = cell.to in ("int4", "nvfp4", "mxfp8")
    alone = blocks and net.convolutions
    if alone and cell.method == "awq":
        raise UsageError("AWQ looks at MatMul and Gemm alone, and nearly all of this model is convolutions")
    emulation = folder / "emulation.onnx"
    kernels = cell.to == "int8" or (cell.to == "int4" and not alone)
    done = quantize(
        model, cell.to, out=None if alone else out, emulate=None if kernels else emulation, calib_data=inputs.calib_data,
        calibrator=cell.calibrator, preprocessing=inputs.preprocessing,
        method=cell.method, target=cell.target, emulate_convs=alone, parity=False,
    )  # fmt: skip
    note = "convolutions have no kernels in blocks: rounded in the emulation, no file to ship" if alone else None
    shares = None if alone else _builtin(done.precision.shares)
    return Made(out if kernels else emulation, kernels, done.nbytes, shares, note)


def _slow(report: CastReport) -> str | None:
    """What ONNX Runtime makes of a cast model on this CPU; None where it does not load it at all."""
    assert report.out is not None
    try:
        kernels = kernel_dtypes(Path(report.out))
    except TrtEngineError:
        return None
    layers, wide = sum(kernels.values()), kernels.get("fp32", 0)
    return f"ONNX Runtime runs {wide} of its {layers} layers in FP32 between Casts on this CPU" if wide else None


def _builtin(found: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain


def measure(net: Net, cell: Cell, dataset: Path, data: Path, latency_s: float) -> dict[str, Any]:
    """All that the table and its reader want to know of one cell."""
    vision = vision_of(net.path)
    assert vision is not None
    with tempfile.TemporaryDirectory(prefix="precision-table-") as name:
        folder = Path(name)
        made = make(net, cell, data, folder)
        engine = te.build(made.run, batch=(1, BATCH, BATCH), parity=False, store=Store(folder / "store"))
        report = evaluate.evaluate(engine, dataset, batch=BATCH, preprocess=vision)
        computes = engine.passport.precision
        here = made.kernels and (cell.to == "fp32" or cell.to in computes.compute_shares)
        record = bench(engine, latency_s) if here else None
    return {
        "task": report.task,
        "metric": MAIN_METRIC[report.task],
        "metrics": report.metrics,
        "images": report.images,
        "dataset_digest": report.dataset_digest,
        "measured_on": "kernels" if here else "emulation",
        "nbytes": made.nbytes,
        "census": made.census,
        "note": made.note,
        "latency_samples_ms": None if record is None else [round(value, 4) for value in record.compute_ms],
        "latency_stable": None if record is None else record.stable,
        "latency_missing": None if here else made.slow or _lacking(cell, made),
        "environment": report.environment,
    }


def _lacking(cell: Cell, made: Made) -> str:
    if made.kernels:
        return (
            "the Q/DQ pairs are placed for TensorRT: ONNX Runtime fuses none of them on this CPU, the file runs in FP32"
        )
    return f"no {cell.to.upper()} kernels in ONNX Runtime on this CPU"


def bench(engine: Engine, seconds: float) -> BenchRecord:
    """One query after another at batch 1."""
    return te.bench(engine, batch=1, warmup_s=min(seconds, 0.5), duration_s=seconds)


# ------------------------------------------------------------------------------------------------ the records


def key_of(net: Net, cell: Cell) -> str:
    """Changes with the model, the version and what the cell is made of."""
    parts = [distribution_version("trt-engine"), open_model(net.path).digest, net.name, cell.name, SCENES, CALIBRATION]
    if cell.calibrator is not None:
        parts.append(source_digest("precision"))
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def known(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each cell."""
    found = {}
    if path.exists():
        for line in gzip.decompress(path.read_bytes()).splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                record = msgspec.json.decode(line)
                found[record["key"]] = record
    return found


def fill(
    nets: list[Net],
    records: dict[str, dict[str, Any]],
    given: argparse.Namespace,
    data: Callable[[Net], tuple[Path, Path]],
) -> None:
    """Measure the missing cells, each written before the next one starts."""
    for net, cell in ((net, cell) for net in nets for cell in CELLS):
        key = key_of(net, cell)
        if key in records and not given.again:
            continue
        began = time.monotonic()
        try:
            body: dict[str, Any] = measure(net, cell, *data(net), given.latency_s) | {"reason": None}
        except TrtEngineError as error:
            body = {"reason": error.message}
        record = {
            "benchmark": "precision-table",
            "key": key,
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": net.name,
            "cell": cell.name,
            "calibrated_on": CALIBRATION,
            "seconds": time.monotonic() - began,
            **body,
        }
        with gzip.open(given.out, "ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        records[key] = msgspec.json.decode(msgspec.json.encode(record))
        figure = (
            f"{record['metric']} {record['metrics'][record['metric']]:.4f}" if "metric" in record else body["reason"]
        )
        print(f"{net.name:<7} {cell.name:<16} {figure}, {record['seconds']:.1f} s", flush=True)


# ------------------------------------------------------------------------------------------------ the table


def latest(records: dict[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last record of each model and cell, also where the version or the sources have changed since."""
    return {(record["model"], record["cell"]): record for record in records.values()}


def judged(records: dict[tuple[str, str], dict[str, Any]]) -> Iterator[tuple[str, float, float, bool]]:
    """The cells of the detector that have a target: name, drop, what is allowed, whether it is kept."""
    net = NETS[0]
    base = records.get((net.name, CELLS[0].name))
    for cell in CELLS:
        found = records.get((net.name, cell.name))
        if cell.to not in TARGETS or base is None or found is None or found["reason"] is not None:
            continue
        drop = base["metrics"]["AP"] - found["metrics"]["AP"]
        yield cell.name, drop, TARGETS[cell.to], abs(drop) <= TARGETS[cell.to]


def tables(path: Path = RESULTS) -> str:
    """What the site shows on docs/precision-table.md."""
    records = latest(known(path))
    lines: list[str] = []
    for net in NETS:
        rows = [(cell, records.get((net.name, cell.name))) for cell in CELLS]
        if any(record is not None for _, record in rows):
            lines += ["", f"## {net.title}", "", *_rows(rows)]
    verdicts = list(judged(records))
    if verdicts:
        lines += [
            "",
            "## Targets of the detector",
            "",
            "| format | AP lost | allowed | |",
            "| --- | ---: | ---: | --- |",
        ]
        lines += [
            f"| {name} | {drop:+.4f} | {allowed:g} | {'kept' if kept else '**missed**'} |"
            for name, drop, allowed, kept in verdicts
        ]
    machine = next((record["environment"] for record in records.values() if record.get("environment")), None)
    if machine is not None:
        lines += ["", f"Measured on {_machine(machine)}."]
    return "\n".join(lines) + "\n"


def _rows(rows: list[tuple[Cell, dict[str, Any] | None]]) -> Iterator[str]:
    base = rows[0][1]
    metric = next((record["metric"] for _, record in rows if record and record["reason"] is None), "AP")
    yield f"| format | {metric} | lost | on | size | written in | latency |"
    yield "| --- | ---: | ---: | --- | ---: | --- | ---: |"
    notes: list[str] = []

    def note(text: str) -> str:
        if text not in notes:
            notes.append(text)
        return f" [{notes.index(text) + 1}]"

    for cell, record in rows:
        if record is None:
            yield f"| {cell.name} | not measured | | | | | |"
            continue
        if record["reason"] is not None:
            yield f"| {cell.name} | –{note(record['reason'])} | | | | | |"
            continue
        value = record["metrics"][metric]
        lost = f"{base['metrics'][metric] - value:+.4f}" if base and base["reason"] is None else ""
        size = f"{record['nbytes'] / (1 << 20):.2f} MiB" if record["nbytes"] is not None else "–"
        on = record["measured_on"] + (note(record["note"]) if record["note"] else "")
        latency = summarize(record["latency_samples_ms"] or ())
        if latency is not None:
            time_ms = f"{latency.median:.2f} ms" + ("" if record["latency_stable"] else note("not stable"))
        else:
            time_ms = f"–{note(record['latency_missing'])}"
        yield f"| {cell.name} | {value:.4f} | {lost} | {on} | {size} | {_shares(record['census'])} | {time_ms} |"
    if notes:
        yield ""
        yield from (f"[{number}] {text}  " for number, text in enumerate(notes, 1))


def _shares(census: dict[str, Any] | None) -> str:
    if not census:
        return "–"
    shares = {name: share["macs"] or 0.0 for name, share in census.items()}
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)


def _machine(environment: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in environment["libraries"].items() if "onnx" in name)
    return f"{environment['cpu']} ({environment['cpu_cores']} cores), {libraries}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[net.name for net in NETS], help="these models [all]")
    parser.add_argument("--again", action="store_true", help="measure cells that are there already")
    parser.add_argument("--table", action="store_true", help="only print the tables from the records")
    parser.add_argument("--latency-s", type=float, default=2.0, help="length of a latency measurement [2]")
    parser.add_argument("--work", type=Path, help="keep generated pictures here [a temporary folder]")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="exit 7 when a target is missed")
    given = parser.parse_args()
    records = known(given.out)
    if not given.table:
        nets = [net for net in NETS if given.only is None or net.name in given.only]
        with contextlib.ExitStack() as stack:
            work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="precision-table-")))
            work.mkdir(parents=True, exist_ok=True)
            fill(nets, records, given, lambda net: data_of(net, work))
    print(tables(given.out))
    verdicts = list(judged(latest(records)))
    missed = [name for name, _, _, kept in verdicts if not kept]
    for name, drop, allowed, kept in verdicts:
        print(f"target  {name:<16} AP lost {drop:+.4f}, allowed {allowed:g}: {'kept' if kept else 'MISSED'}")
    return 7 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
