"""What these programs share: engines of two networks, raw ONNX Runtime beside them, turns and crowds of callers, records.

Not a program. Ours is called through the public interface alone. With `--device cpu` everything runs on small networks,
to try a program out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

sys.path.append(str(Path(__file__).resolve().parents[1]))

import networks

import trt_engine as te

BENCHMARKS = Path(__file__).resolve().parents[1]
Call = Callable[[], object]
SMALL = {
    "vit": {"width": 64, "depth": 2, "heads": 4, "size": 32}, "resnet50": {"size": 32},
    "yolo": {"size": 64, "divide": 8},
}  # fmt: skip
_STATE = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def parser(text: str, *models: str) -> argparse.ArgumentParser:
    """The options of every program here; `models` are measured where none is named."""
    made = argparse.ArgumentParser(description=text.partition("\n")[0])
    made.add_argument("--device", default="cuda:0", help="`cpu` tries the program out on small networks")
    made.add_argument("--models", nargs="+", choices=sorted(networks.NETWORKS), default=list(models))
    made.add_argument("--seconds", type=float, default=4.0, help="how long each comparison is measured [4]")
    made.add_argument("--time-budget-s", type=float, default=5.0, help="for measured settings of an engine [5]")
    made.add_argument("-O", "--option", action="append", default=[], metavar="NAME=VALUE")
    made.add_argument("--folder", type=Path, help="where networks and engines are kept between runs")
    made.add_argument("--out", type=Path, help="the records' file [benchmarks/results/gpu-NAME-DEVICE.jsonl]")
    return made


class Bench:
    """Engines built once, and records written as they come."""

    def __init__(self, args: argparse.Namespace, name: str, folder: Path) -> None:
        self.args, self.name, self.folder = args, name, folder
        self.on_gpu = args.device != "cpu"
        self.index = int(args.device.partition(":")[2] or 0)
        self.options = dict(option.split("=", 1) for option in args.option)
        kind = "h200" if self.on_gpu else "cpu"
        self.out: Path = args.out or BENCHMARKS / "results" / f"{name}-{kind}.jsonl"
        self.started, self.before = "", {}

    def begin(self) -> None:
        """Note the time and the state of the GPU for the next record."""
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.before = self.gpu_state()

    def network(self, model: str, half: bool) -> Path:
        """The network's file, written once; without a GPU a small one."""
        path = self.folder / f"{model}-{'fp16' if half else 'fp32'}{'' if self.on_gpu else '-small'}.onnx"
        if not path.exists():
            networks.NETWORKS[model](path, half=half, **({} if self.on_gpu else SMALL[model]))
        return path

    def engine(self, model: str | Path, most: int = 64, *, usual: int = 1, **settings: Any) -> te.Engine:
        """The engine of a network, or of a file, for batches of 1 to `most` with settings measured at `usual`."""
        return te.build(
            self.network(model, half=self.on_gpu) if isinstance(model, str) else model, device=self.args.device,
            batch=(1, usual, most), options=self.options, store=te.Store(self.folder / "store"),
            **({"time_budget_s": self.args.time_budget_s} if self.on_gpu else {}) | settings,
        )  # fmt: skip

    def feeds(self, engine: te.Engine, batch: int) -> dict[str, np.ndarray]:
        """Normal random values for the one input, `(batch, ...)` in its dtype."""
        spec = engine.signature.inputs[0]
        values = np.random.default_rng(batch).standard_normal((batch, *spec.shape[1:]), np.float32)
        return {spec.name: values.astype(spec.dtype)}

    def session(self, engine: te.Engine, **provider: str) -> ort.InferenceSession:
        """ONNX Runtime on the engine's graph with the options it was built with, and nothing of ours."""
        made = ort.SessionOptions()
        made.log_severity_level = 3
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # the engine is optimised already
        if not self.on_gpu:
            return ort.InferenceSession(str(engine.path), made, providers=["CPUExecutionProvider"])
        built = engine.passport.build.config["options"]
        given = {"device_id": str(self.index)} | provider
        given |= {name.removeprefix("cuda."): value for name, value in built.items() if name.startswith("cuda.")}
        session = ort.InferenceSession(str(engine.path), made, providers=[("CUDAExecutionProvider", given)])
        assert session.get_providers()[0] == "CUDAExecutionProvider", session.get_providers()
        return session

    def bound(self, engine: te.Engine, session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> Call:
        """A call of ONNX Runtime by io binding, from and into memory of the device."""
        place = ("cuda", self.index) if self.on_gpu else ("cpu", 0)
        binding, held, spec = session.io_binding(), [], engine.signature.outputs[0]
        for name, array in feeds.items():
            held.append(ort.OrtValue.ortvalue_from_numpy(array, *place))
            binding.bind_ortvalue_input(name, held[-1])
        shape = [len(next(iter(feeds.values()))), *spec.shape[1:]]
        held.append(ort.OrtValue.ortvalue_from_shape_and_type(shape, spec.dtype, *place))
        binding.bind_ortvalue_output(spec.name, held[-1])
        run = session.run_with_iobinding
        return lambda held=held: run(binding)

    def ours(self, runner: te.InferenceEngine, feeds: dict[str, np.ndarray]) -> Call:
        """`infer` as a user of torch calls it: tensors of the device in and out; without a GPU numpy arrays."""
        infer = runner.infer
        if not self.on_gpu:
            return lambda: infer(feeds)
        import torch

        tensors = {name: torch.from_numpy(array).to(self.args.device) for name, array in feeds.items()}
        torch.cuda.synchronize(self.args.device)
        return lambda: infer(tensors, on_device=True)

    def gpu_state(self) -> dict[str, str]:
        """Clocks, power, temperature and throttle reasons as nvidia-smi states them; empty without it."""
        command = ["nvidia-smi", f"--query-gpu={_STATE}", "--format=csv,noheader", f"--id={self.index}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
            return dict(zip(_STATE.split(","), found.strip().split(", "), strict=False)) if self.on_gpu else {}
        return {}

    def write(self, **fields: Any) -> None:
        """Append a record: `fields`, and what was typed, when, on which machine, at which clocks."""
        typed, rest = [], iter(sys.argv[1:])
        for item in rest:  # without the folders of this machine
            if item in ("--folder", "--out"):
                next(rest, None)
            else:
                typed.append(item)
        record = {
            "schema": f"trt-engine/{self.name}",
            "started": self.started,
            "command": shlex.join(["python", f"benchmarks/gpu/{Path(sys.argv[0]).name}", *typed]),
            **fields,
            "options": self.options,
            "environment": dataclasses.asdict(te.Environment.detect(self.index if self.on_gpu else None)),
            "gpu_state": [self.before, self.gpu_state()],
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")


@contextlib.contextmanager
def opened(args: argparse.Namespace, name: str) -> Iterator[Bench]:
    """The program's Bench, in the folder given or in one of its own."""
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        yield Bench(args, name, folder)


def each_model(args: argparse.Namespace, name: str, measure: Callable[[Bench, str], bool]) -> int:
    """Measure one network after the other; the exit code is 8 where a demand was not met, 1 where a network failed."""
    code = 0
    with opened(args, name) as bench:
        for model in args.models:
            try:
                code = max(code, 0 if measure(bench, model) else 8)
            except Exception as error:  # ONNX Runtime's too: the other networks are still measured
                print(f"{model}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                code = max(code, 1)
    return code


def kept(met: bool) -> str:
    return "kept" if met else "NOT kept"


def rounded(values: Sequence[float], most: int = 5000) -> list[float]:
    """At most that many of the values, evenly spread, in four significant digits."""
    return [float(f"{value:.4g}") for value in values[:: len(values) // most + 1]]


def interleaved(calls: dict[str, Call], seconds: float, block_s: float = 0.05) -> dict[str, list[float]]:
    """Microseconds of every call: blocks of each way in an order drawn anew for each round.

    In blocks, as users call: after another way's call a CPU has forgotten what this one needs.
    """
    for call in calls.values():
        for _ in range(10):
            call()
    clock = time.perf_counter_ns
    samples: dict[str, list[float]] = {way: [] for way in calls}
    ways = list(calls.items())
    until, number, order = time.perf_counter() + seconds, 0, random.Random(0)
    while time.perf_counter() < until or number < 3:
        order.shuffle(ways)
        for way, call in ways:
            over, start, taken = clock() + block_s * 1e9, 0, samples[way]
            while start < over:
                start = clock()
                call()
                taken.append((clock() - start) / 1e3)
        number += 1
    return samples


class Crowd:
    """Threads that live on between measurements, one for each call; each call is warmed up alone, in its own thread.

    A CUDA graph of ONNX Runtime belongs to the thread that captured it, and a capture must not be disturbed.
    """

    def __init__(self, calls: Sequence[Call], warm: int = 4) -> None:
        self.calls, self.seconds, self.failed = calls, 0.0, []
        self.gate = threading.Barrier(len(calls) + 1)
        self.counts, self.ends = [0] * len(calls), [0.0] * len(calls)
        for index in range(len(calls)):
            ready = threading.Event()
            threading.Thread(target=self.live, args=(index, warm, ready), daemon=True).start()
            ready.wait()

    def rate(self, seconds: float, rows: int = 1) -> float:
        """Rows per second of all threads together; the first error is raised."""
        self.seconds = seconds
        self.gate.wait()
        start = time.perf_counter()
        self.gate.wait()
        if self.failed:
            raise self.failed[0]
        return rows * sum(self.counts) / (max(self.ends) - start)

    def close(self) -> None:
        self.seconds = -1.0
        self.gate.wait()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def live(self, index: int, warm: int, ready: threading.Event) -> None:
        self.repeat(index, lambda: self.counts[index] < warm)
        ready.set()
        while self.gate.wait() >= 0 and self.seconds >= 0:
            until = time.perf_counter() + self.seconds
            self.repeat(index, lambda until=until: time.perf_counter() < until)
            self.gate.wait()

    def repeat(self, index: int, more: Callable[[], bool]) -> None:
        call, self.counts[index] = self.calls[index], 0
        try:
            while not self.failed and more():
                call()
                self.counts[index] += 1
        except BaseException as error:
            self.failed.append(error)
        self.ends[index] = time.perf_counter()


def rate(calls: Sequence[Call], seconds: float, rows: int = 1) -> float:
    """Rows per second of one new thread for each call."""
    with Crowd(calls, warm=0) as crowd:
        return crowd.rate(seconds, rows)
