"""Calibration of a ResNet-18-sized net at 224 px over 128 images: memory, time, and thresholds beside ONNX Runtime's.

    python benchmarks/calibration.py

Each calibration runs in a process of its own, one after the other, on the same seeded weights and images. ONNX Runtime is
given all images at once, as its `quantize_static` does, with 2048 bins. The record goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "calibration-cpu.jsonl"
CALIBRATORS = ("minmax", "percentile", "entropy")
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
    from trt_engine.precision.calibrate import calibrate

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


# ------------------------------------------------------------------------------------------------ the comparison


def apart_in_bins(mine: dict[str, float], other: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    """By tensor, the difference of two thresholds in bins of the 2048 that span the tensor from -largest to largest."""
    return {name: abs(mine[name] - other[name]) / (2 * largest[name] / 2048) for name in other}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], given.model, given.child[1], given.images, given.size)
        return 0

    from trt_engine.environment import Environment
    from trt_engine.records import append

    good, environment = True, Environment.here()
    with tempfile.TemporaryDirectory() as folder:
        path = resnet(Path(folder) / "resnet18.onnx", size=given.size)
        largest: dict[str, float] = {}
        for name in CALIBRATORS:
            mine = measured("ours", path, name, given.images, given.size)
            other = measured("onnxruntime", path, name, given.images, given.size)
            largest = largest or mine["amax"]  # minmax comes first
            apart = apart_in_bins(mine["amax"], other["amax"], largest)
            same = set(mine["amax"]) == set(other["amax"])
            passed = same and max(apart.values()) <= 1 and mine["peak_rss_mib"] < LIMIT_MIB
            good = good and passed
            record = {
                "benchmark": "calibration",
                "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "model": "ResNet-18, seeded weights",
                "images": given.images,
                "size": given.size,
                "calibrator": name,
                "bins": 2048,
                "memory_limit_mib": LIMIT_MIB,
                "passed": passed,
                "same_tensors": same,
                "most_bins_apart": max(apart.values()),
                "ours": mine,
                "onnxruntime": other,
                "environment": environment,
            }
            append(given.out, record)  # before the next one starts
            print(
                f"{name:<11} {len(apart)} tensors, at most {max(apart.values()):.3g} bins apart; "
                f"{mine['peak_rss_mib']:.0f} MiB and {mine['wall_s']:.1f} s, "
                f"ONNX Runtime {other['peak_rss_mib']:.0f} MiB and {other['wall_s']:.1f} s",
                flush=True,
            )
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
