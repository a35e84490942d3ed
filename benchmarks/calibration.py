"""Calibrators beside those of ONNX Runtime and NVIDIA ModelOpt: memory, time, thresholds, squared error, and logits.

    python benchmarks/calibration.py [--only memory|distributions|examples] [--modelopt PYTHON]

`memory`: a ResNet-18-sized net at 224 px over 128 images, each calibration in a process of its own, one after the other, on
the same seeded weights and images. ONNX Runtime is given all images at once, as its `quantize_static` does, with 2048 bins.
`distributions`: the squared INT8 error of every threshold on seeded values of eight distributions, beside ModelOpt's max,
entropy and percentile 99.99 and the best threshold of all. `examples`: INT8 of the trained examples in emulation, the RMS
error of their logits over their standard deviation, with every calibrator's ranges and ModelOpt's. The last two need an
interpreter with ModelOpt (`--modelopt`, else $TRT_ENGINE_TEST_MODELOPT_PYTHON). Records go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "calibration-cpu.jsonl"
CALIBRATORS = ("minmax", "percentile", "entropy", "mse")
THEIRS = ("minmax", "percentile")
"""ONNX Runtime has these by the same rules; its entropy counts exact zeros, and it has no squared error."""
DEFAULT = "mse"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DRAWS = [(size, seed) for size in (20_000, 200_000, 1_000_000) for seed in range(3)]
AT_MOST_BEST, AT_MOST_LEAST, AT_MOST_LOGITS = 1.2, 2.0, 1.1
"""Of the default: squared error over the best of ModelOpt's three and over the least of all, its logits' over the best."""
LIMIT_MIB = 1000
OPERATORS = ("Conv", "Gemm")


def resnet(path: Path, *, size: int, classes: int = 1000, seed: int = 0) -> Path:
    """ResNet-18's graph (batch normalisation folded, as exporters leave it) with seeded weights of He's scale."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng, nodes, stored = np.random.default_rng(seed), [], []

    def weight(name: str, *shape: int) -> str:
        values = rng.normal(size=shape).astype(np.float32) * np.float32(np.sqrt(2 / np.prod(shape[1:])))
        stored.append(numpy_helper.from_array(values, name))
        stored.append(numpy_helper.from_array((rng.normal(size=shape[0]) * 0.05).astype(np.float32), f"{name}_bias"))
        return name

    def conv(source: str, name: str, inward: int, outward: int, kernel: int, stride: int) -> str:
        weight(f"{name}_w", outward, inward, kernel, kernel)
        nodes.append(
            helper.make_node(
                "Conv", [source, f"{name}_w", f"{name}_w_bias"], [name], name=name,
                kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4,
            )
        )  # fmt: skip
        return name

    def relu(source: str) -> str:
        nodes.append(helper.make_node("Relu", [source], [f"{source}_relu"]))
        return f"{source}_relu"

    last = relu(conv("images", "stem", 3, 64, 7, 2))
    nodes.append(helper.make_node("MaxPool", [last], ["pool"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    last, width = "pool", 64
    for stage, outward in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            inner = conv(relu(conv(last, f"{name}a", width, outward, 3, stride)), f"{name}b", outward, outward, 3, 1)
            short = last if width == outward else conv(last, f"{name}c", width, outward, 1, stride)
            nodes.append(helper.make_node("Add", [inner, short], [f"{name}_sum"]))
            last, width = relu(f"{name}_sum"), outward
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"]))
    weight("fc", classes, 512)
    nodes.append(helper.make_node("Gemm", ["flat", "fc", "fc_bias"], ["logits"], transB=1, name="fc"))
    graph = helper.make_graph(
        nodes, "resnet18",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])],
        stored,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def images(count: int, size: int) -> Iterator[Any]:
    """Smooth seeded pictures of different contrast, normalised as photographs are."""
    for index in range(count):
        rng = np.random.default_rng(index)
        coarse = rng.normal(size=(3, size // 16, size // 16)) * rng.uniform(0.5, 1.5)
        fine = rng.normal(size=(3, size, size)) * 0.2
        yield (np.kron(coarse, np.ones((16, 16))) + fine).astype(np.float32)[None]


# ------------------------------------------------------------------------------------------------ one calibration each


def ours(path: Path, name: str, count: int, size: int) -> dict[str, float]:
    from trt_engine.graph.load import read_proto
    from trt_engine.precision.calibration import calibrate

    graph = read_proto(path).graph
    stored = {item.name for item in graph.initializer}
    wanted = dict.fromkeys(
        name
        for node in graph.node
        if node.op_type in OPERATORS
        for name in (*node.input, *node.output)
        if name not in stored
    )
    return calibrate(path, lambda: images(count, size), name, tensors=list(wanted), memory_mib=256).amax


def theirs(path: Path, name: str, count: int, size: int) -> dict[str, float]:
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    method, options = {
        "minmax": (CalibrationMethod.MinMax, {}),
        "entropy": (CalibrationMethod.Entropy, {"num_bins": 2048, "num_quantized_bins": 128}),
        "percentile": (CalibrationMethod.Percentile, {"num_bins": 2048, "percentile": 99.999}),
    }[name]
    left = images(count, size)

    class Reader:
        def get_next(self) -> Any:
            image = next(left, None)
            return None if image is None else {"images": image}

    with contextlib.redirect_stdout(io.StringIO()):
        calibrator = create_calibrator(
            path, list(OPERATORS), str(path.with_name("augmented.onnx")), calibrate_method=method, extra_options=options
        )
        calibrator.collect_data(Reader())
        found = calibrator.compute_data()
    return {
        tensor: max(abs(float(np.min(data.range_value[0]))), abs(float(np.max(data.range_value[1]))))
        for tensor, data in found.items()
    }


def child(who: str, path: Path, name: str, count: int, size: int) -> None:
    """One calibration; prints what it found, its time and its peak memory."""
    started = time.perf_counter()
    amax = {"ours": ours, "onnxruntime": theirs}[who](path, name, count, size)
    wall_s = time.perf_counter() - started
    print(json.dumps({"amax": amax, "wall_s": wall_s, "peak_rss_mib": peak_rss_mib()}))


def peak_rss_mib() -> float:
    """Of this process since it began its program; `getrusage` also counts what its parent held when it forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system does not tell a process its peak memory")


def measured(who: str, path: Path, name: str, count: int, size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", who, name, "--model", str(path)]
    command += ["--images", str(count), "--size", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{who} {name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ------------------------------------------------------------------------------------------------ distributions


def _gelu(x: Any) -> Any:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


DISTRIBUTIONS = {
    "relu(normal)": lambda rng, size: np.maximum(rng.normal(size=size), 0),
    "relu(normal - 1)": lambda rng, size: np.maximum(rng.normal(size=size) - 1, 0),
    "relu(laplace)": lambda rng, size: np.maximum(rng.laplace(size=size), 0),
    "|normal|": lambda rng, size: np.abs(rng.normal(size=size)),
    "relu6": lambda rng, size: np.clip(3 * rng.normal(size=size), 0, 6),
    "sigmoid": lambda rng, size: 1 / (1 + np.exp(-2 * rng.normal(size=size))),
    "gelu": lambda rng, size: _gelu(rng.normal(size=size)),
    "normal": lambda rng, size: rng.normal(size=size),
}


def drawn(kind: str, size: int, seed: int) -> Any:
    return DISTRIBUTIONS[kind](np.random.default_rng(seed), size).astype(np.float32)


def squared_error(values: Any, reach: float) -> float:
    """Of INT8 over that range, signed and symmetric as TensorRT's."""
    scaled = values * np.float32(127 / reach)
    return (
        float(np.mean(np.square(np.clip(np.rint(scaled), -127, 127) - scaled), dtype=np.float64)) * (reach / 127) ** 2
    )


def modelopt(*arguments: str, python: str) -> Any:
    """What this program prints in ModelOpt's environment."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    done = subprocess.run(
        [python, __file__, "--modelopt-child", *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"ModelOpt's calibration failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def published(histogram: Any, largest: float) -> dict[str, float]:
    """ModelOpt's thresholds of one of its histograms, which each rule changes."""
    counts, found = histogram._calib_hist.clone(), {"max": largest}
    for rule in ("percentile", "entropy"):
        histogram._calib_hist = counts.clone()
        found[rule] = largest if largest == 0 else float(histogram.compute_amax(rule))
    return found


def modelopt_child(arguments: list[str]) -> None:
    """In ModelOpt's environment: its thresholds of distributions' draws, or of a model's activations by tensor."""
    import torch
    from modelopt.torch.quantization.calib import HistogramCalibrator

    if len(arguments) == 2:
        made: dict[str, list[dict[str, float]]] = {}
        for kind in json.loads(arguments[0]):
            for size, seed in json.loads(arguments[1]):
                values, histogram = torch.from_numpy(drawn(kind, size, seed)), HistogramCalibrator()
                histogram.collect(values)
                made.setdefault(kind, []).append(published(histogram, float(values.abs().max())))
        print(json.dumps(made))
        return
    from trt_engine.precision.calibration import calibrate

    class Theirs:
        def __init__(self) -> None:
            self.histograms: dict[str, Any] = {}
            self.largest: dict[str, float] = {}

        def observe(self, name: str, array: Any) -> None:
            values = torch.from_numpy(np.array(array, np.float32))
            self.histograms.setdefault(name, HistogramCalibrator()).collect(values)
            self.largest[name] = max(self.largest.get(name, 0.0), float(values.abs().max()))

        def threshold(self, name: str) -> float:
            return self.largest[name]

    model, feeds, tensors = Path(arguments[0]), np.load(arguments[1]), json.loads(arguments[2])
    theirs = Theirs()
    calibrate(model, in_batches(feeds), theirs, tensors=tensors)
    print(json.dumps({name: published(theirs.histograms[name], theirs.largest[name]) for name in tensors}))


def in_batches(feeds: Any) -> list[dict[str, Any]]:
    rows = len(feeds[feeds.files[0]])
    return [{name: feeds[name][at : at + 8] for name in feeds.files} for at in range(0, rows - rows % 8, 8)]


def drawn_thresholds(kinds: Sequence[str], draws: list[tuple[int, int]], python: str) -> dict[str, Any]:
    """ModelOpt's thresholds by distribution, one for each draw: its environment starts once."""
    return dict(modelopt(json.dumps(kinds), json.dumps(draws), python=python))


def distribution(kind: str, draws: list[tuple[int, int]], thresholds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Squared errors of every calibrator's and ModelOpt's thresholds on these draws, over the least of any."""
    from trt_engine.precision.calibrators import CALIBRATORS as OURS

    rows = []
    for (size, seed), theirs in zip(draws, thresholds, strict=True):
        values = drawn(kind, size, seed)
        largest, reach = float(np.abs(values).max()), {f"modelopt {rule}": value for rule, value in theirs.items()}
        for name in CALIBRATORS:
            calibrator = OURS[name]()
            for index in range(calibrator.passes):
                calibrator.start_pass(index, calibrator.passes)
                calibrator.observe("x", values)
            reach[name] = calibrator.threshold("x")
        tried = values[:200_000]
        best = max(
            (largest * float(share) for share in np.linspace(0.1, 1, 91)), key=lambda one: -squared_error(tried, one)
        )
        errors = {name: squared_error(values, value) for name, value in reach.items()}
        errors["least"] = min(squared_error(values, best), *errors.values())
        published_best = min(value for name, value in errors.items() if name.startswith("modelopt"))
        rows.append(
            {
                "size": size, "seed": seed, "thresholds": reach, "squared_errors": errors,
                "over_best": errors[DEFAULT] / published_best, "over_least": errors[DEFAULT] / errors["least"],
                "entropy_bins_apart": abs(reach["entropy"] - reach["modelopt entropy"]) / (largest / 2048),
            }
        )  # fmt: skip
    over_best, over_least, apart = (
        max(row[one] for row in rows) for one in ("over_best", "over_least", "entropy_bins_apart")
    )
    return {
        "distribution": kind,
        "default": DEFAULT,
        "over_best": over_best,
        "over_least": over_least,
        "entropy_bins_apart": apart,
        "passed": over_best <= AT_MOST_BEST and over_least <= AT_MOST_LEAST and apart <= 1,
        "draws": rows,
    }


# ------------------------------------------------------------------------------------------------ trained examples

LOGITS = {"digits": ("Concat_13", "Concat_14"), "vit": ("logits",), "resnet": ("logits",)}
"""Of the detector the boxes' and the classes', before rows are sorted."""


def example(name: str, work: Path, python: str) -> dict[str, Any]:
    """RMS error of the logits in INT8, over their standard deviation, with each calibrator's ranges and ModelOpt's."""
    sys.path.insert(0, str(Path(__file__).parent))
    from precision_table import NETS, data_of

    from trt_engine.graph.load import open_model
    from trt_engine.precision.calibration import calibrate
    from trt_engine.precision.quantize_model import quantize
    from trt_engine.precision.samples import open_samples
    from trt_engine.verbs.calibration_images import images_as_inputs

    net = next(item for item in NETS if item.name == name)
    model, (held_out, seen) = open_model(net.path), data_of(net, work)
    held_out, few = (held_out / "images", 64) if held_out.is_dir() else (held_out, 512)
    arrays = {}
    for side, data, limit in (("seen", seen, min(few, 128)), ("held out", held_out, few)):
        batches = open_samples(images_as_inputs(model, data).calib_data, model.signature, batch=8, limit=limit)
        rows = [batch.feeds for batch in batches]
        np.savez(work / f"{name} {side}.npz", **{one: np.concatenate([row[one] for row in rows]) for one in rows[0]})
        arrays[side] = in_batches(np.load(work / f"{name} {side}.npz"))
    plain = logits(net.path, name, arrays["held out"])
    tensors = activations(net.path)
    ranges: dict[str, dict[str, float]] = {
        one: calibrate(model, arrays["seen"], one, tensors=tensors).amax for one in CALIBRATORS
    }
    theirs = modelopt(str(net.path), str(work / f"{name} seen.npz"), json.dumps(tensors), python=python)
    for rule in ("max", "entropy", "percentile"):
        ranges[f"modelopt {rule}"] = {tensor: theirs[tensor][rule] for tensor in tensors}
    errors = {}
    for one, given in ranges.items():
        emulation = work / f"{name}.emulation.onnx"
        quantize(
            model, "int8", emulate=emulation, ranges=given, calib_data=arrays["seen"], parity=False, overwrite=True
        )
        found = logits(emulation, name, arrays["held out"])
        parts = [float(np.sqrt(np.mean((a - b) ** 2)) / np.std(b)) for a, b in zip(found, plain, strict=True)]
        errors[one] = float(np.mean(parts))
    over_best = errors[DEFAULT] / min(value for one, value in errors.items() if one.startswith("modelopt"))
    return {
        "example": name,
        "default": DEFAULT,
        "seen": sum(len(next(iter(feeds.values()))) for feeds in arrays["seen"]),
        "held_out": sum(len(next(iter(feeds.values()))) for feeds in arrays["held out"]),
        "logits_rms_error": errors,
        "over_best": over_best,
        "passed": over_best <= AT_MOST_LOGITS,
    }


def activations(path: Path) -> list[str]:
    """What INT8's layers read: activations of convolutions and products."""
    from trt_engine.graph.load import read_proto

    graph = read_proto(path).graph
    stored = {item.name for item in graph.initializer}
    nodes = [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    return list(dict.fromkeys(name for node in nodes for name in node.input if name and name not in stored))


def logits(path: Path, name: str, feeds: list[dict[str, Any]]) -> list[Any]:
    import onnx
    import onnxruntime

    model = onnx.load(path)
    there = {item.name for item in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=one) for one in LOGITS[name] if one not in there)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [
        np.concatenate(parts) for parts in zip(*(session.run(list(LOGITS[name]), one) for one in feeds), strict=True)
    ]


# ------------------------------------------------------------------------------------------------ the comparison


def apart_in_bins(mine: dict[str, float], other: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    """By tensor, the difference of two thresholds in bins of the 2048 that span the tensor from -largest to largest."""
    return {name: abs(mine[name] - other[name]) / (2 * largest[name] / 2048) for name in other}


def memory(path: Path, name: str, count: int, size: int, largest: dict[str, float]) -> dict[str, Any]:
    """One calibrator on the ResNet-18, beside ONNX Runtime's where it has it."""
    mine = measured("ours", path, name, count, size)
    record = {
        "model": "ResNet-18, seeded weights", "images": count, "size": size, "calibrator": name, "bins": 2048,
        "memory_limit_mib": LIMIT_MIB, "passed": mine["peak_rss_mib"] < LIMIT_MIB, "ours": mine,
    }  # fmt: skip
    if name not in THEIRS:
        return record
    other = measured("onnxruntime", path, name, count, size)
    apart, same = (
        apart_in_bins(mine["amax"], other["amax"], largest or mine["amax"]),
        set(mine["amax"]) == set(other["amax"]),
    )
    passed = record["passed"] and same and max(apart.values()) <= 1
    return record | {
        "passed": passed, "same_tensors": same, "most_bins_apart": max(apart.values()), "onnxruntime": other
    }  # fmt: skip


def records(given: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    if given.only in (None, "memory"):
        path = resnet(work / "resnet18.onnx", size=given.size)
        largest: dict[str, float] = {}
        for name in CALIBRATORS:  # minmax comes first
            record = memory(path, name, given.images, given.size, largest)
            largest = largest or record["ours"]["amax"]
            yield {"benchmark": "calibration"} | record
    if given.only in (None, "distributions"):
        thresholds = drawn_thresholds([*DISTRIBUTIONS], DRAWS, given.modelopt)
        for kind in DISTRIBUTIONS:
            yield {"benchmark": "calibration-distributions"} | distribution(kind, DRAWS, thresholds[kind])
    for name in LOGITS if given.only in (None, "examples") else ():
        yield {"benchmark": "calibration-examples"} | example(name, work, given.modelopt)


def told(record: dict[str, Any]) -> str:
    verdict = "passed" if record["passed"] else "FAILED"
    if "distribution" in record:
        return (
            f"{record['distribution']:<17} {DEFAULT}: {record['over_best']:.3f} of ModelOpt's best, "
            f"{record['over_least']:.3f} of the least; entropy {record['entropy_bins_apart']:.2g} bins apart: {verdict}"
        )
    if "example" in record:
        errors = ", ".join(f"{name} {value:.3%}" for name, value in record["logits_rms_error"].items())
        return f"{record['example']:<17} {errors}; {DEFAULT} {record['over_best']:.3f} of ModelOpt's best: {verdict}"
    mine = record["ours"]
    line = f"{record['calibrator']:<17} {mine['peak_rss_mib']:.0f} MiB and {mine['wall_s']:.1f} s"
    if "onnxruntime" in record:
        other = record["onnxruntime"]
        line += (
            f", ONNX Runtime {other['peak_rss_mib']:.0f} MiB and {other['wall_s']:.1f} s; "
            f"at most {record['most_bins_apart']:.3g} bins apart"
        )
    return f"{line}: {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "distributions", "examples"), help="this part [all]")
    parser.add_argument("--images", type=int, default=128, help="of the ResNet-18 [128]")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--modelopt", default=os.environ.get("TRT_ENGINE_TEST_MODELOPT_PYTHON", sys.executable))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--modelopt-child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], given.model, given.child[1], given.images, given.size)
        return 0
    if given.modelopt_child:
        modelopt_child(given.modelopt_child)
        return 0

    from trt_engine.environment import Environment
    from trt_engine.records.base import append_record

    good, environment = True, Environment.detect()
    with tempfile.TemporaryDirectory() as folder:
        for record in records(given, Path(folder)):
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            append_record(given.out, record | {"when": when, "environment": environment})  # before the next one starts
            print(told(record), flush=True)
            good = good and record["passed"]
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
