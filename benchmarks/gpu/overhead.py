"""What a call costs on a GPU as users make it, beside ONNX Runtime used directly, all ways in turns in one run.

Peers, on sessions of their own over the same optimised graph: ONNX Runtime's io binding on device memory (twice, in two
sessions: their difference is what two sessions differ by), its CUDA graph, and its `run` on numpy arrays. Ours, through
the public interface alone: `infer` on a torch tensor, a CuPy array and a numpy array, without any warm-up call, and
`bind` on torch tensors; each with `graphs` off and on. Every call ends when its outputs are complete. Each way is called
for 50 ms in a row, in an order drawn anew for each round: at a power limit a way gains from pauses of the one before it.

One line of JSON for each network and batch is written to `overhead.jsonl` in the folder given by `--out`, as it comes.

    python benchmarks/gpu/overhead.py --out results
    python benchmarks/gpu/overhead.py --out results --device cpu --seconds 1 --batches 1 2
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Call, interleaved, networks

import trt_engine as te

SMALL = {"vit": {"width": 64, "depth": 2, "heads": 4, "size": 32}, "resnet50": {"size": 32}}


def library(name: str) -> Any:
    """The module, or None where it is not installed or finds no GPU."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"without {name}: {error}", file=sys.stderr)
        return None


class Cell:
    """One network at one batch: the same values in every kind of memory, and the ways to call."""

    def __init__(self, engine: te.Engine, batch: int, device: str) -> None:
        self.engine, self.device, self.on_gpu = engine, device, device != "cpu"
        self.index = int(device.partition(":")[2] or 0)
        spec = engine.signature.inputs[0]
        values = np.random.default_rng(batch).standard_normal((batch, *spec.shape[1:]), np.float32)
        self.feeds = {spec.name: values.astype(spec.dtype)}
        self.output = engine.signature.outputs[0]
        self.output_shape = (batch, *self.output.shape[1:])
        self.facts: dict[str, Any] = {}
        self.reads: dict[str, Callable[[], Any]] = {}
        """How the output of a way is read as a numpy array, after a call."""

    # ---------------------------------------------------------------------------------------- ONNX Runtime

    def session(self, **provider: str) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # the engine is optimised already
        if not self.on_gpu:
            return ort.InferenceSession(str(self.engine.path), options, providers=["CPUExecutionProvider"])
        built = self.engine.passport.build.config["options"]
        given = {"device_id": str(self.index)} | provider  # TF32 as ONNX Runtime has it: on
        given |= {name.removeprefix("cuda."): value for name, value in built.items() if name.startswith("cuda.")}
        session = ort.InferenceSession(str(self.engine.path), options, providers=[("CUDAExecutionProvider", given)])
        assert session.get_providers()[0] == "CUDAExecutionProvider", session.get_providers()
        return session

    def binding(self, way: str, session: Any) -> Call:
        """A call of ONNX Runtime on memory of the device, bound once."""
        import onnxruntime as ort

        place = ("cuda", self.index) if self.on_gpu else ("cpu", 0)
        binding, held = session.io_binding(), []
        for name, array in self.feeds.items():
            held.append(ort.OrtValue.ortvalue_from_numpy(array, *place))
            binding.bind_ortvalue_input(name, held[-1])
        out = ort.OrtValue.ortvalue_from_shape_and_type(list(self.output_shape), self.output.dtype, *place)
        binding.bind_ortvalue_output(self.output.name, out)
        self.reads[way] = out.numpy
        run = session.run_with_iobinding
        return lambda held=held: run(binding)

    def peers(self) -> dict[str, Call]:
        plain = self.session()
        names, run, feeds = [self.output.name], plain.run, self.feeds
        ways = {
            "ort_binding": self.binding("ort_binding", plain),
            "ort_binding_again": self.binding("ort_binding_again", self.session()),
            "ort_numpy": self.keeping("ort_numpy", lambda: run(names, feeds), lambda outputs: outputs[0]),
        }
        if self.on_gpu:
            ways["ort_graph"] = self.binding("ort_graph", self.session(enable_cuda_graph="1"))
        return ways

    # ---------------------------------------------------------------------------------------- ours

    def ours(self, runner: te.InferenceEngine, prefix: str, torch: Any, cupy: Any) -> dict[str, Call]:
        infer, feeds, name = runner.infer, self.feeds, self.output.name
        ways: dict[str, Call] = {}
        if torch is not None and self.on_gpu:
            tensors = {key: torch.from_numpy(array).to(self.device) for key, array in feeds.items()}
            way = f"{prefix}_torch"
            ways[way] = self.keeping(way, lambda: infer(tensors, on_device=True), lambda found: torch_host(found[name]))
        if cupy is not None and self.on_gpu:
            arrays = {key: cupy.asarray(array) for key, array in feeds.items()}
            way = f"{prefix}_cupy"
            ways[way] = self.keeping(
                way, lambda: infer(arrays, on_device=True), lambda found: cupy.asnumpy(cupy.from_dlpack(found[name]))
            )
        way = f"{prefix}_numpy"
        ways[way] = self.keeping(way, lambda: infer(feeds), lambda found: found[name])
        return ways

    def bound(self, runner: te.InferenceEngine, prefix: str, torch: Any) -> dict[str, Call]:
        """A call on fixed memory: torch tensors on a GPU, else numpy arrays."""
        way, name = f"{prefix}_bind", self.output.name
        if torch is not None and self.on_gpu:
            inputs = {key: torch.from_numpy(array).to(self.device) for key, array in self.feeds.items()}
            out = torch.empty(self.output_shape, dtype=getattr(torch, self.output.dtype), device=self.device)
            call = runner.bind(inputs, {name: out})
        else:
            call = runner.bind(self.feeds, {name: np.empty(self.output_shape, self.output.dtype)})
        self.facts[f"{prefix}_bind_captured"] = call.is_captured

        def read(found: dict[str, Any]) -> Any:
            return found[name] if isinstance(found[name], np.ndarray) else found[name].cpu().numpy()

        return {way: self.keeping(way, call, read)}

    def keeping(self, way: str, call: Callable[[], Any], read: Callable[[Any], Any]) -> Call:
        """The call as it is; its output is read by one more call, outside of the measurement."""
        self.reads[way] = lambda: read(call())
        return call


def torch_host(array: Any) -> Any:
    import torch

    return torch.from_dlpack(array).cpu().numpy()


def first_calls(cell: Cell, runner: te.InferenceEngine, prefix: str, ways: dict[str, Call]) -> None:
    """The first three calls of a way on an engine that has not run: their times, and whether a graph is captured."""
    way, call = next(iter(ways.items()))
    times = []
    for number in range(3):
        start = time.perf_counter()
        call()
        times.append(round((time.perf_counter() - start) * 1e6, 1))
        if number == 1 and cell.on_gpu:
            cell.facts[f"{prefix}_captured_after_two_calls"] = runner.is_captured(cell.feeds)
    cell.facts[f"{prefix}_first_calls_us"] = {way: times}


def differences(cell: Cell, ways: dict[str, Call]) -> dict[str, float]:
    """The largest difference of each way's output from ONNX Runtime's own, in parts of its largest value."""
    values = {}
    for way, call in ways.items():
        call()
        values[way] = np.array(cell.reads[way](), np.float32)
    right = values["ort_binding"]
    scale = float(np.abs(right).max())
    return {way: float(np.abs(found - right).max()) / scale for way, found in values.items()}


def summarize(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and what ours adds to its peer: io binding, its graph, or `run` on numpy arrays."""
    p50 = {way: float(np.median(values)) for way, values in samples.items()}
    added = {}
    for way, value in p50.items():
        if way.startswith("ort_"):
            continue
        peer = "ort_numpy" if way.endswith("_numpy") else "ort_graph" if way.startswith("graphs_") else "ort_binding"
        if peer in p50:
            added[way] = {
                "peer": peer,
                "added_us": round(value - p50[peer], 2),
                "ratio": round(value / p50[peer], 4),
                "added_to_binding_us": round(value - p50["ort_binding"], 2),
            }
    spread = {way: [round(float(np.percentile(values, q)), 2) for q in (10, 90)] for way, values in samples.items()}
    return {"p50_us": {way: round(value, 2) for way, value in p50.items()}, "p10_p90_us": spread, "ours": added}


@contextlib.contextmanager
def loaded(cell: Cell, torch: Any, cupy: Any) -> Iterator[dict[str, Call]]:
    """All ways of the cell, over engines that are closed afterwards."""
    with te.load(cell.engine) as plain, te.load(cell.engine, graphs=cell.on_gpu) as graphed:
        ways = cell.peers()
        for prefix, runner in (("ours", plain), ("graphs", graphed)):
            own = cell.ours(runner, prefix, torch, cupy)
            first_calls(cell, runner, prefix, own)
            own |= cell.bound(runner, prefix, torch)
            ways |= own
            cell.facts[f"{prefix}_runtime"] = runner.runtime_info
        yield ways


def versions(*modules: Any) -> dict[str, str]:
    import onnxruntime as ort

    found = {"python": platform.python_version(), "trt_engine": te.__version__, "onnxruntime": ort.__version__}
    return found | {module.__name__: str(module.__version__) for module in modules if module is not None}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", default="cuda:0", help="`cpu` tries the program out on small networks")
    options.add_argument("--models", nargs="+", choices=sorted(networks.NETWORKS), default=["vit", "resnet50"])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    options.add_argument("--seconds", type=float, default=30.0, help="measured for each network and batch [30]")
    options.add_argument("--out", type=Path, required=True, help="the folder of the records")
    options.add_argument("--folder", type=Path, help="where networks and engines are kept between runs")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch, cupy = (library(name) if args.device != "cpu" else None for name in ("torch", "cupy"))
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for model in args.models:
            path = folder / f"{model}-{'small' if args.device == 'cpu' else 'fp16'}.onnx"
            if not path.exists():
                small = SMALL[model] if args.device == "cpu" else {}
                networks.NETWORKS[model](path, half=args.device != "cpu", **small)
            start = time.perf_counter()
            most = max(args.batches)
            engine = te.build(path, device=args.device, batch=(1, most, most), store=te.Store(folder / "store"))
            build_s = round(time.perf_counter() - start, 1)
            for batch in args.batches:
                cell = Cell(engine, batch, args.device)
                with loaded(cell, torch, cupy) as ways:
                    off = differences(cell, ways)
                    samples = interleaved(ways, args.seconds)
                results = summarize(samples)
                record = {
                    "schema": "trt-engine/gpu-overhead-as-called", "model": model, "batch": batch, "build_s": build_s,
                    "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "device": args.device, "gpu": torch.cuda.get_device_name(cell.index) if torch else None,
                    "versions": versions(torch, cupy), "facts": cell.facts, "differences": off, "results": results,
                    "samples_us": {way: [round(value, 1) for value in values] for way, values in samples.items()},
                }  # fmt: skip
                with (args.out / "overhead.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                show(model, batch, cell.facts, results, off)
    return 0


def show(model: str, batch: int, facts: dict[str, Any], results: dict[str, Any], off: dict[str, float]) -> None:
    print(f"\n{model}, batch {batch}; graphs captured: {facts.get('graphs_captured_after_two_calls')}")
    print(f"{'':<20}{'p50 us':>12}{'added us':>12}{'ratio':>9}  compared with")
    for way, value in results["p50_us"].items():
        ours = results["ours"].get(way)
        beside = f"{ours['added_us']:>+12.1f}{ours['ratio']:>9.4f}  {ours['peer']}" if ours else ""
        wrong = f"  differs by {off[way]:.2g}" if off[way] > 1e-2 else ""
        print(f"{way:<20}{value:>12.1f}{beside}{wrong}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
