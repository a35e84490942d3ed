"""INT8 on ONNX Runtime's CPU provider: ours against FP32 and against ONNX Runtime's own quantisation.

Five networks (`int8_networks.py`), one thread, batch 1. FP32 and ours run through the public API (`te.build`, `te.load`,
`infer` with NumPy arrays); ONNX Runtime's own models through `InferenceSession.run`: `quantize_static` (QDQ and QOperator,
U8S8, one scale for each channel, after its recommended pre-processing) and `quantize_dynamic`. Turns are interleaved in
rounds, sessions loaded again for each load; the ratio of our best to ONNX Runtime's best has a 95 % interval over loads.
`--accuracy` quantises the three trained examples and evaluates them. Records go to `benchmarks/results/int8-cpu.jsonl`.

    python benchmarks/int8_cpu.py
    python benchmarks/int8_cpu.py --networks vit-tiny bert-base --duration 120
    python benchmarks/int8_cpu.py --check       # exit 8 when a ratio is above 1.05, or accuracy 0.5 points below FP32
    python benchmarks/int8_cpu.py --accuracy
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import logging
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from int8_networks import NETWORKS, feeds
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from precision_table import NETS, data_of

import trt_engine as te
from trt_engine.benchmark.closed_loop import QueryBurst
from trt_engine.benchmark.interleaving import MeasureBurst, Schedule, measure_interleaved
from trt_engine.benchmark.speed_difference import METHOD, paired_differences
from trt_engine.device.info import Clocks, clocks
from trt_engine.environment import Environment
from trt_engine.errors import ModelError
from trt_engine.precision.quantize_model import quantize
from trt_engine.records.base import append_record
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.precision import IntegerKernels
from trt_engine.store import Store
from trt_engine.verbs.calibration_images import images_as_inputs
from trt_engine.vision.spec import vision_of

ROOT = Path(__file__).resolve().parents[1]
ALLOWED_RATIO, ALLOWED_POINTS = 1.05, 0.5
OPTIONS = {"intra_op_threads": "1"}
TARGET = "onnxruntime-cpu"
CALIBRATION = 8
WAYS: dict[str, dict[str, Any]] = {
    "default": {}, "entropy": {"calibrator": "entropy"}, "percentile": {"calibrator": "percentile"},
    "minmax": {"calibrator": "minmax"}, "dynamic": {"dynamic": True},
}  # fmt: skip

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Variant:
    """One quantisation of a network: its times, load by load."""

    name: str
    median_ms: float
    samples_ms: tuple[tuple[float, ...], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """One network."""

    schema: str
    started: str
    command: str
    network: str
    variants: tuple[Variant, ...]
    failed: dict[str, str]
    """Variants that could not be made, and why."""
    best: str
    best_of_onnxruntime: str
    ratio: float
    interval: tuple[float, float]
    """Of the ratio, 95 %."""
    speedup: float
    """FP32 over our best."""
    kernels: IntegerKernels | None
    """Of our static model."""
    method: str
    environment: Environment
    clocks: tuple[Clocks, Clocks]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One trained example."""

    schema: str
    started: str
    command: str
    model: str
    fp32: float
    """AP of the detector, top-1 of the classifiers."""
    int8: dict[str, float]
    """By way of quantising."""
    points: float
    """FP32 less static INT8 with the default calibrator, in hundredths."""
    environment: Environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--duration", type=float, default=90.0, help="seconds for each network")
    parser.add_argument("--loads", type=int, default=8)
    parser.add_argument("--accuracy", action="store_true", help="the trained examples alone")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "int8-cpu.jsonl")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        if args.accuracy or args.check:
            for accuracy in accuracies(Path(folder)):
                append_record(args.out, accuracy)
                ways = ", ".join(f"{way} {value:.4f}" for way, value in accuracy.int8.items())
                print(f"{accuracy.model:<12} FP32 {accuracy.fp32:.4f}, {ways}", flush=True)
                kept &= accuracy.points <= ALLOWED_POINTS
        for network in [] if args.accuracy else args.networks:
            speed = measured(network, args, Path(folder))
            append_record(args.out, speed)
            print(line(speed), flush=True)
            kept &= speed.ratio <= ALLOWED_RATIO
    return 8 if args.check and not kept else 0


# ------------------------------------------------------------------------------------------------ speed


def measured(network: str, args: argparse.Namespace, folder: Path) -> Speed:
    """Quantise every way, measure in turns."""
    before, started = clocks(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    model = NETWORKS[network](folder / f"{network}.onnx")
    files, failed, kernels = quantised(model, folder)
    data = feeds(model, 1)[0]
    sides = [opened(name, path, data, folder) for name, path in files.items()]
    loads = measure_interleaved(sides, Schedule(args.duration, restarts=args.loads))
    names = list(files)
    samples = {
        name: tuple(tuple(ms for turns in load for ms in turns[at].samples_ms) for load in loads)
        for at, name in enumerate(names)
    }
    middle = {name: float(np.median(np.concatenate(of))) for name, of in samples.items()}
    best = min((name for name in names if name.startswith("ours")), key=middle.__getitem__)
    other = min((name for name in names if name.startswith("onnxruntime")), key=middle.__getitem__)
    found, _ = paired_differences(loads, names.index(best), base=names.index(other))
    difference = next(item for item in found if item.metric == "median")
    interval = difference.interval()
    return Speed(
        schema="trt-engine/int8-cpu",
        started=started,
        command=shlex.join(["python", "benchmarks/int8_cpu.py", *sys.argv[1:]]),
        network=network,
        variants=tuple(Variant(name, middle[name], samples[name], files[name].stat().st_size) for name in names),
        failed=failed,
        best=best,
        best_of_onnxruntime=other,
        ratio=math.exp(difference.value),
        interval=(1 + interval.low / 100, 1 + interval.high / 100),
        speedup=middle["fp32"] / middle[best],
        kernels=kernels,
        method=METHOD,
        environment=Environment.detect(),
        clocks=(before, clocks()),
    )


def quantised(model: Path, folder: Path) -> tuple[dict[str, Path], dict[str, str], IntegerKernels | None]:
    """Files by name, what could not be made and why, and what ONNX Runtime fused of ours."""
    data = feeds(model, CALIBRATION)
    files, failed = {"fp32": model}, {}
    at = lambda name: folder / f"{model.stem}.{name}.onnx"  # noqa: E731
    report = quantize(model, "int8", target=TARGET, calib_data=data, calibrator="minmax", out=at("ours-static"))
    files["ours-static"] = at("ours-static")
    try:
        quantize(model, "int8", target=TARGET, dynamic=True, out=at("ours-dynamic"))
        files["ours-dynamic"] = at("ours-dynamic")
    except ModelError as error:
        failed["ours-dynamic"] = error.message
    prepared = at("prepared")
    with contextlib.redirect_stdout(io.StringIO()):
        quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
    for name, form in (("qdq", QuantFormat.QDQ), ("qoperator", QuantFormat.QOperator)):
        made = at(f"onnxruntime-{name}")
        quantize_static(
            str(prepared), str(made), _Reader(data), quant_format=form, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
        files[f"onnxruntime-{name}"] = made
    made = at("onnxruntime-dynamic")
    quantize_dynamic(str(prepared), str(made), per_channel=True, weight_type=QuantType.QInt8)
    try:
        session(made)
        files["onnxruntime-dynamic"] = made
    except Exception as error:  # whatever ONNX Runtime raises for what its own tool wrote
        failed["onnxruntime-dynamic"] = str(error).splitlines()[0][:200]
    return files, failed, report.integer_kernels


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """ONNX Runtime's way of asking for data."""

    def __init__(self, data: list[dict[str, Any]]) -> None:
        self._left = iter(data)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def opened(
    name: str, path: Path, data: dict[str, Any], folder: Path
) -> Callable[[], AbstractContextManager[MeasureBurst]]:
    """Loads a variant for as long as the context lasts: FP32 and ours by the public API."""
    if name.startswith("onnxruntime"):

        @contextmanager
        def raw() -> Iterator[MeasureBurst]:
            loaded = session(path)
            yield turns(lambda: loaded.run(None, data))

        return raw
    engine = te.build(path, backend="onnxruntime", batch=1, options=OPTIONS, store=Store(folder / "store"))

    @contextmanager
    def ours() -> Iterator[MeasureBurst]:
        with te.load(engine, options=OPTIONS) as runner:
            yield turns(lambda: runner.infer(data))

    return ours


def turns(call: Call) -> MeasureBurst:
    def take(seconds: float, queries: int, left_out: int) -> QueryBurst:
        for _ in range(left_out):
            call()
        clock, samples = time.perf_counter, []
        began = clock()
        while len(samples) < queries or clock() - began < seconds:
            start = clock()
            call()
            samples.append((clock() - start) * 1e3)
        return QueryBurst(tuple(samples), clock() - began)

    return take


def line(record: Speed) -> str:
    times = ", ".join(f"{item.name} {item.median_ms:.2f}" for item in record.variants)
    low, high = record.interval
    return (
        f"{record.network:<12} {record.best} / {record.best_of_onnxruntime}: {record.ratio:.3f} [{low:.3f}, {high:.3f}], "
        f"{record.speedup:.2f}x FP32; ms: {times}"
    )


# ------------------------------------------------------------------------------------------------ accuracy


def accuracies(folder: Path) -> Iterator[Accuracy]:
    """The three trained examples, calibrated on their training side, evaluated on the other."""
    for net in NETS:
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        dataset, images = data_of(net, folder)
        inputs = images_as_inputs(net.path, str(images))
        plain = score(net.path, net.path, dataset, folder)
        found: dict[str, float] = {}
        for way, settings in WAYS.items():
            out = folder / f"{net.name}.{way}.onnx"
            data = None if settings.get("dynamic") else inputs.calib_data
            try:
                quantize(net.path, "int8", target=TARGET, calib_data=data, out=out, **settings)
            except ModelError:
                continue  # nothing but convolutions, which are not quantised while running
            found[way] = score(out, net.path, dataset, folder)
        yield Accuracy(
            schema="trt-engine/int8-cpu-accuracy",
            started=started,
            command=shlex.join(["python", "benchmarks/int8_cpu.py", *sys.argv[1:]]),
            model=net.name,
            fp32=plain,
            int8=found,
            points=100 * (plain - found["default"]),
            environment=Environment.detect(),
        )


def score(model: Path, declared: Path, dataset: Path, folder: Path) -> float:
    """AP of a detector, top-1 of a classifier, on the engine that ONNX Runtime runs on this CPU."""
    engine = te.build(model, backend="onnxruntime", batch=(1, 8, 8), parity=False, store=Store(folder / "store"))
    report = te.evaluate(engine, dataset, batch=8, preprocess=vision_of(declared))
    return float(report.metrics[MAIN_METRIC[report.task]])


if __name__ == "__main__":
    sys.exit(main())
