"""What the GPU benchmarks share: engines of two networks, raw ONNX Runtime beside them, blocks of calls, records.

Not a program. Everything here runs on a CPU as well (`--device cpu`, small networks), to try the programs out.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnxruntime as ort

import trt_engine as te
from trt_engine.device.info import Clocks, clocks
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.records.summary import percentile
from trt_engine.store import Store

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Record:
    """One comparison, with its samples."""

    schema: str
    started: str
    command: str
    model: str
    model_digest: str
    facts: dict[str, str]
    settings: dict[str, Any]
    environment: Environment
    clocks: tuple[Clocks, ...]
    """Before, and after."""
    samples: dict[str, tuple[float, ...]]
    """By way; the unit is in the name."""
    results: dict[str, Any]
    met: bool | None
    """Whether the demand was kept; None where there is none."""


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--device", default="cuda:0", help="`cpu` tries the program out on small networks")
    made.add_argument("--models", nargs="+", choices=sorted(networks.NETWORKS), default=["vit", "resnet50"])
    made.add_argument("--seconds", type=float, default=4.0, help="how long each comparison is measured [4]")
    made.add_argument("-O", "--option", action="append", default=[], metavar="NAME=VALUE")
    made.add_argument("--folder", type=Path, help="where networks and engines are kept between runs")
    made.add_argument("--out", type=Path, help="the records' file")
    return made


class Bench:
    """Engines built once, and records written as they come."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.args, self.name = args, name
        self.options = dict(option.split("=", 1) for option in args.option)
        self.on_gpu = args.device != "cpu"
        self.gpu = int(args.device.partition(":")[2] or 0) if self.on_gpu else None
        kind = "h200" if self.on_gpu else "cpu"
        self.out: Path = args.out or RESULTS / f"{name.replace('_', '-')}-{kind}.jsonl"
        self._temporary = None if args.folder else tempfile.TemporaryDirectory()
        self.folder: Path = args.folder or Path(self._temporary.name)  # type: ignore[union-attr]
        self.folder.mkdir(parents=True, exist_ok=True)

    def engine(
        self, model: str, most: int = 64, options: dict[str, str] | None = None, *, usual: int = 1, **settings: Any
    ) -> te.Engine:
        """The network as an engine for batches of 1 to `most`, built for `usual`."""
        small = {"size": 32} if model == "resnet50" else {"width": 64, "depth": 2, "heads": 4, "size": 32}
        path = self.folder / f"{model}-{'fp16' if self.on_gpu else 'small'}.onnx"
        if not path.exists():
            networks.NETWORKS[model](path, half=self.on_gpu, **({} if self.on_gpu else small))
        return te.build(
            path, device=self.args.device, batch=(1, usual, most), options=self.options | (options or {}),
            store=Store(self.folder / "store"), **settings,
        )  # fmt: skip

    def feeds(self, engine: te.Engine, batch: int, seed: int = 0) -> dict[str, Any]:
        spec = engine.signature.inputs[0]
        values = np.random.default_rng(seed).standard_normal((batch, *spec.shape[1:]), np.float32)
        return {spec.name: values.astype(spec.dtype)}

    def raw(self, engine: te.Engine, **provider: str) -> ort.InferenceSession:
        """ONNX Runtime on the same graph with the same options, and nothing of ours."""
        made = ort.SessionOptions()
        made.log_severity_level = 3
        ort.set_default_logger_severity(3)
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # the graph is optimised already
        if not self.on_gpu:
            return ort.InferenceSession(str(engine.path), made, providers=["CPUExecutionProvider"])
        given = {"device_id": self.args.device.partition(":")[2] or "0", "use_tf32": "0"} | provider
        given |= {name.removeprefix("cuda."): value for name, value in self.options.items() if "." in name}
        session = ort.InferenceSession(str(engine.path), made, providers=[("CUDAExecutionProvider", given)])
        assert session.get_providers()[0] == "CUDAExecutionProvider", session.get_providers()
        return session

    def bound(self, session: ort.InferenceSession, feeds: dict[str, Any], *, from_host: bool = False) -> Call:
        """One inference of raw ONNX Runtime on arrays that lie on the device, into outputs that stay there.

        `from_host` copies the feeds there and the outputs back in each call.
        """
        place = ("cuda", int(self.args.device.partition(":")[2] or 0)) if self.on_gpu else ("cpu", 0)
        binding = session.io_binding()
        given = {name: ort.OrtValue.ortvalue_from_numpy(array, *place) for name, array in feeds.items()}
        outputs = []
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for value in session.get_outputs():
            rows = next(iter(feeds.values())).shape[0]
            kind = np.float16 if "float16" in value.type else np.float32
            held = ort.OrtValue.ortvalue_from_shape_and_type([rows, *value.shape[1:]], kind, *place)
            binding.bind_ortvalue_output(value.name, held)
            outputs.append(held)
        run = session.run_with_iobinding
        if not from_host:
            return lambda: run(binding)

        def call() -> object:
            for name, value in given.items():
                value.update_inplace(feeds[name])
            run(binding)
            return [value.numpy() for value in outputs]

        return call

    def same_session(self, runner: te.InferenceEngine) -> ort.InferenceSession | None:
        """The session of ONNX Runtime's that the first context runs on, to be used without us."""
        streams = getattr(getattr(runner.runner, "_session", None), "_stream_sessions", None)
        return streams[0].loaded if streams else None

    def resident(self, runner: te.InferenceEngine, feeds: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The feeds as arrays on the engine's device, and whether there is one."""
        device = getattr(runner.runner, "device", None)
        if device is None:
            return feeds, False
        stream, lying = device.stream(), {}
        for name, array in feeds.items():
            buffer = device.allocate(array.nbytes)
            device.upload(array, buffer, stream)
            stream.synchronize()
            lying[name] = buffer.array(array.dtype.name, array.shape)
        stream.close()
        return lying, True

    def ours(self, runner: te.InferenceEngine, feeds: dict[str, Any]) -> Call:
        """One `infer` on arrays of the device, with outputs that stay there and belong to the caller."""
        lying, on_device = self.resident(runner, feeds)
        infer = runner.infer
        return (lambda: infer(lying, on_device=True)) if on_device else (lambda: infer(lying))

    def write(self, model: str, engine: te.Engine, before: Clocks, started: str, facts: dict[str, str],
              settings: dict[str, Any], samples: dict[str, Sequence[float]], results: dict[str, Any],
              met: bool | None) -> None:  # fmt: skip
        self.out.parent.mkdir(parents=True, exist_ok=True)
        append_record(self.out, Record(
            schema=f"trt-engine/{self.name.replace('_', '-')}",
            started=started,
            command=self._command(),
            model=model,
            model_digest=engine.passport.model.digest,
            facts=facts,
            settings=settings,
            environment=Environment.detect(self.gpu),
            clocks=(before, clocks(self.gpu)),
            samples={name: tuple(round(float(value), 2) for value in values) for name, values in samples.items()},
            results=results,
            met=met,
        ))  # fmt: skip

    @staticmethod
    def _command() -> str:
        """What was typed, without the places of this machine."""
        kept, rest = [], iter(sys.argv[1:])
        for item in rest:
            if item in ("--folder", "--out", "--timeline"):
                next(rest, None)
            else:
                kept.append(item)
        return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept])

    @contextmanager
    def measuring(self) -> Iterator[tuple[Clocks, str]]:
        yield clocks(self.gpu), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def p(values: Sequence[float], q: float) -> float:
    return float(percentile(sorted(values), q, "linear"))


def interleaved(
    calls: dict[str, Call], seconds: float, warm: int = 20, block_s: float = 0.05
) -> dict[str, list[float]]:
    """Microseconds of every call, the ways in an order that turns from round to round.

    Each way is called for `block_s` in a row, as those call who use it: after another way's call a processor has forgotten
    what this one needs, which on an H200's host was worth some 100 microseconds.
    """
    for call in calls.values():
        for _ in range(warm):
            call()
    clock = time.perf_counter_ns
    samples: dict[str, list[float]] = {way: [] for way in calls}
    ways = list(calls.items())
    until, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < until or number < 6:
        turn = number % len(ways)
        for way, call in ways[turn:] + ways[:turn]:
            over = clock() + block_s * 1e9
            start = 0
            while start < over:
                start = clock()
                call()
                samples[way].append((clock() - start) / 1e3)
        number += 1
    return samples


class Crowd:
    """Threads that live on between blocks, each with one call; each warmed up alone, in its own thread.

    A graph of ONNX Runtime's belongs to the thread that captured it, and nobody may do anything else meanwhile.
    """

    def __init__(self, calls: Sequence[Call], warm: int = 4) -> None:
        self._calls = calls
        self._gate = threading.Barrier(len(calls) + 1)
        self._counts, self._ends = [0] * len(calls), [0.0] * len(calls)
        self._failed: list[BaseException] = []
        self._seconds: float | None = 0.0
        for index in range(len(calls)):
            ready = threading.Event()
            threading.Thread(target=self._live, args=(index, warm, ready), daemon=True).start()
            ready.wait()

    def rate(self, seconds: float, rows: int = 1) -> float:
        """Rows per second of all of them together; errors are raised."""
        self._seconds = seconds
        self._gate.wait()
        start = time.perf_counter()
        self._gate.wait()
        if self._failed:
            raise self._failed[0]
        return rows * sum(self._counts) / (max(self._ends) - start)

    def close(self) -> None:
        self._seconds = None
        self._gate.wait()

    def _live(self, index: int, warm: int, ready: threading.Event) -> None:
        call = self._calls[index]
        try:
            for _ in range(warm):
                call()
        except BaseException as error:
            self._failed.append(error)
        ready.set()
        while True:
            self._gate.wait()
            if self._seconds is None:
                return
            until, count = time.perf_counter() + self._seconds, 0
            try:
                while not self._failed and time.perf_counter() < until:
                    call()
                    count += 1
            except BaseException as error:
                self._failed.append(error)
            self._counts[index], self._ends[index] = count, time.perf_counter()
            self._gate.wait()


def rate(calls: Sequence[Call], seconds: float, rows: int = 1) -> float:
    """Rows per second of one thread for each call, from the first start to the last end; errors are raised."""
    crowd = Crowd(calls, warm=0)
    try:
        return crowd.rate(seconds, rows)
    finally:
        crowd.close()
