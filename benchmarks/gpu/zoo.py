"""Fifty architectures of other people's libraries on a GPU: engines of `te.build(backend="auto")` beside torch.

    python benchmarks/gpu/zoo.py --folder /tmp/zoo                                    all cells, as many as there is time for
    python benchmarks/gpu/zoo.py --folder /tmp/zoo --only unet,resnet18 --batches 1   some of them
    python benchmarks/gpu/zoo.py --folder /tmp/zoo --only distilbert:16 --profile     kernels of ours and of the peers
    python benchmarks/gpu/zoo.py --folder /tmp/zoo --device cpu --only crnn           tries the program out
    python benchmarks/gpu/zoo.py --table                                              the tables of docs/gpu-zoo.md

Of each network in `zoo_networks.py`: `convert`; then per batch, in FP16, engines of the backends `inductor` and
`onnxruntime` and torch.compile's code, each built in a process of its own, several at a time. Their seconds are of a
machine as busy as `--jobs` makes it, and are compared with each other alone. Then, in one process per cell,
`te.build(backend="auto")` chooses among what was built; the engine is loaded with `graphs=True` and called with CUDA
tensors by `infer(..., on_device=True)` and by `bind`. Peers: torch eager; torch.compile replayed from a CUDA graph,
convolutions channels-last; with `--autotune` torch.compile with `max-autotune`; ONNX Runtime's CUDA provider on the
FP16 graph with its own optimiser and its CUDA graph. Cells are loaded several at a time and measured one after the
other, all ways of a cell interleaved. What is in `--out` is not measured again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from zoo_networks import NETWORKS, made  # noqa: E402

RESULTS = HERE.parent / "results" / "gpu-zoo-h200.jsonl"
PEERS = ("torch compiled", "torch compiled autotuned", "torch eager", "onnxruntime own")
TOLERANCE = 3e-2
"""Of the largest output: random weights in FP16, other kernels."""

# ------------------------------------------------------------------------------------------------ one job, in its process


def drawn(network: str, batch: int, device: str, half: bool) -> dict[str, Any]:
    """Inputs of so many rows, as tensors on the device, the same at each call; a mask without padding."""
    import torch

    found, source = {}, torch.Generator().manual_seed(1)
    for item in NETWORKS[network].inputs:
        name, sizes, *kind = item.split(":")
        shape = [batch, *map(int, sizes.split("x")[1:])]
        if name == "mask":
            value = torch.ones(shape, dtype=torch.int64)
        elif kind:
            value = torch.randint(0, 1000, shape, generator=source)
        else:
            value = torch.randn(shape, generator=source)
        value = value.to(device)
        found[name] = value.half() if half and value.is_floating_point() else value
    return found


def module(job: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The peer and its inputs: half precision, convolutions channels-last."""
    import torch

    network = made(NETWORKS[job["network"]]).eval().requires_grad_(False).to(job["device"])
    feeds = [*drawn(job["network"], job["batch"], job["device"], job["half"]).values()]
    network = network.half() if job["half"] else network
    layout = torch.channels_last
    return network.to(memory_format=layout), [x.contiguous(memory_format=layout) if x.ndim == 4 else x for x in feeds]


def onnx_of(job: dict[str, Any]) -> Path:
    return Path(job["folder"], f"{job['network']}.onnx")


def run_convert(job: dict[str, Any]) -> dict[str, Any]:
    import trt_engine as te

    name, *given = NETWORKS[job["network"]].factory.split()
    options = {key: value for key, _, value in (item.partition("=") for item in given)}
    te.convert(
        f"{HERE / 'zoo_networks.py'}:{name}", inputs=list(NETWORKS[job["network"]].inputs), out=onnx_of(job),
        options=options, overwrite=True,
    )  # fmt: skip
    return {}


def build(job: dict[str, Any], backend: str, budget_s: float) -> Any:
    import trt_engine as te

    return te.build(
        onnx_of(job), backend=backend, device=job["device"], precision="fp16" if job["half"] else None, batch=job["batch"],
        time_budget_s=budget_s, store=te.Store(Path(job["folder"], "store")),
    )  # fmt: skip


def run_build(job: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    engine = build(job, job["way"], 0.0)
    return {"seconds": round(time.perf_counter() - started, 1), "notes": str(engine.passport.build.notes)[:400]}


def run_compile(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from suite_cell import compiled

    network, feeds = module(job)
    started = time.perf_counter()
    with torch.no_grad():
        compiled(network, feeds, job["way"], on_gpu=False)
    return {"seconds": round(time.perf_counter() - started, 1)}


def own_session(job: dict[str, Any]) -> Callable[[], Any]:
    """ONNX Runtime's CUDA provider on the graph in FP16, its optimiser and its CUDA graph, fixed memory in and out."""
    import onnx
    import onnxruntime as ort
    import torch

    import trt_engine as te

    path = onnx_of(job).with_suffix(".fp16.onnx")
    if not path.exists():
        kept = path.with_suffix(f".{os.getpid()}.onnx")
        te.cast(onnx_of(job), "fp16", out=kept, keep_io=False, parity=False, overwrite=True)
        kept.rename(path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    graph = onnx.load(path, load_external_data=False).graph
    held = drawn(job["network"], job["batch"], job["device"], True)
    for item in graph.input:
        for dim, size in zip(item.type.tensor_type.shape.dim, held[item.name].shape, strict=True):
            if dim.dim_param:
                options.add_free_dimension_override_by_name(dim.dim_param, size)
    session = ort.InferenceSession(
        str(path), options, providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
    )
    binding = session.io_binding()
    kinds = {torch.float16: onnx.TensorProto.FLOAT16, torch.int64: onnx.TensorProto.INT64}
    for name, value in held.items():
        binding.bind_input(name, "cuda", 0, kinds[value.dtype], tuple(value.shape), value.data_ptr())
    binding.synchronize_inputs()
    outputs = []
    for item in session.get_outputs():
        outputs.append(torch.empty(item.shape, dtype=torch.float16, device=job["device"]))
        binding.bind_output(item.name, "cuda", 0, kinds[torch.float16], tuple(item.shape), outputs[-1].data_ptr())

    def call(_held: object = held) -> list[Any]:
        session.run_with_iobinding(binding)
        return outputs

    return call


def add_ours(job: dict[str, Any], ways: Any, found: dict[str, Any], stack: contextlib.ExitStack) -> None:
    """The engine that `auto` chooses among what is in the store: `infer`, and `bind`."""
    import torch
    from suite_cell import first_rows

    import trt_engine as te

    started = time.perf_counter()
    engine = build(job, "auto", job["budget_s"])
    config = engine.passport.build
    found["auto"] = {
        "backend": engine.passport.backend, "seconds": round(time.perf_counter() - started, 1),
        "notes": {key: str(text)[:300] for key, text in config.notes.items()},
        "candidates": [str(item)[:200] for item in config.tuning.candidates] if config.tuning else [],
    }  # fmt: skip
    runner = stack.enter_context(te.load(engine, graphs=job["half"]))
    half = any("float16" in str(item.dtype) for item in engine.signature.inputs)
    feeds = drawn(job["network"], job["batch"], job["device"], half)
    given: dict[str, Any] = feeds if job["half"] else {name: value.numpy() for name, value in feeds.items()}
    infer = functools.partial(runner.infer, given, **({"on_device": True} if job["half"] else {}))
    ways.outputs["ours"] = first_rows(runner.infer(given).values())
    for _ in range(4):
        infer()
    ways.calls["ours"] = infer
    found["auto"]["captured"] = bool(job["half"] and runner.is_captured(given))
    with ways.trying("ours bind"):
        ways.calls["ours bind"] = stack.enter_context(runner.bind(inputs=given))
    if job["half"]:
        torch.cuda.synchronize()


def add_peers(job: dict[str, Any], ways: Any) -> None:
    import torch
    from suite_cell import compiled, first_rows

    network, feeds = module(job)

    def eager() -> Any:
        result = network(*feeds)
        if job["half"]:
            torch.cuda.synchronize()
        return result

    with ways.trying("torch eager"):
        ways.outputs["torch eager"], ways.calls["torch eager"] = first_rows(eager()), eager
    for way in ("torch compiled", *(("torch compiled autotuned",) if job["autotune"] else ())):
        with ways.trying(way):
            run, replay = compiled(network, feeds, way, job["half"])
            ways.outputs[way], ways.calls[way] = first_rows(run()), replay
    if job["half"]:
        with ways.trying("onnxruntime own"):
            call = own_session(job)
            ways.outputs["onnxruntime own"], ways.calls["onnxruntime own"] = first_rows(call()), call


def exact(job: dict[str, Any]) -> list[Any]:
    """The first rows in FP32."""
    import torch
    from suite_cell import CHECKED_ROWS, first_rows

    network = made(NETWORKS[job["network"]]).eval().requires_grad_(False).to(job["device"])
    torch.backends.cudnn.allow_tf32 = False
    feeds = drawn(job["network"], job["batch"], job["device"], False).values()
    return first_rows(network(*(value[:CHECKED_ROWS] for value in feeds)))


def run_measure(job: dict[str, Any]) -> dict[str, Any]:
    """All ways of a cell."""
    import torch
    from suite_cell import Job, Turn, Ways, clocks, interleaved, largest_difference, ratio, summary

    ways, found, stack = Ways(), {}, contextlib.ExitStack()
    Turn.WAIT_S = 150.0
    like = Job(kind="measure", device=f"cuda:{job['gpu']}", folder=job["turns"], together=True)
    searching = Turn(Job(kind="search", device=job["device"], folder=f"{job['turns']}-search", together=True))
    turn = Turn(like)
    with torch.no_grad():
        add_peers(job, ways)
        expected = exact(job)
        searching.begin()  # it measures
        with ways.trying("ours"):
            add_ours(job, ways, found, stack)
        searching.end()
        ways.drop_failing()
        turn.begin()
        before = clocks(like)
        blocks = interleaved(ways.calls, job["seconds"])
        after = clocks(like)
        profiled = kernels(ways.calls) if job["profile"] else None
        turn.end()
    errors = {way: largest_difference(outputs, expected) for way, outputs in ways.outputs.items()}
    for way, error in errors.items():
        if not error <= TOLERANCE:
            ways.failed[way] = f"its outputs differ from FP32's by {error:.2g} of the largest value"
    blocks = {way: parts for way, parts in blocks.items() if way.removesuffix(" bind") not in ways.failed}
    made_of = summary(blocks)
    medians = made_of["blocks_p50_us"]
    peers, ours = [way for way in PEERS if way in blocks], [way for way in blocks if way.startswith("ours")]
    best = {name: min(group, key=made_of["p50_us"].get) for name, group in (("peer", peers), ("ours", ours)) if group}
    ratios = {way: ratio(medians, way, best["peer"]) for way in ours} if "peer" in best else {}
    made_of.pop("blocks_p50_us")
    return found | made_of | {
        "best": best, "ratio": ratios, "errors": errors, "failed": ways.failed, "clocks": [before, after],
        "kernels": profiled, "versions": versions(),
    }  # fmt: skip


def kernels(calls: dict[str, Callable[[], Any]], calls_each: int = 10) -> dict[str, list[Any]]:
    """Of each way: kernels, longest first, with microseconds and launches per call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    table = {}
    for way, call in calls.items():
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(calls_each):
                call()
            torch.cuda.synchronize()
        events = [(item.key, item.self_device_time_total, item.count) for item in profiled.key_averages()]
        events = sorted((item for item in events if item[1] > 0), key=lambda item: -item[1])
        table[way] = [
            [key[:110], round(total / calls_each, 2), round(count / calls_each, 1)] for key, total, count in events[:25]
        ]
        table[way].append(["all", round(sum(item[1] for item in events) / calls_each, 2), len(events)])
    return table


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in ("torch", "torchvision", "timm", "transformers", "onnxruntime-gpu", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


JOBS = {"convert": run_convert, "build": run_build, "compile": run_compile, "measure": run_measure}


def run_job(text: str, result: Path) -> None:
    import torch

    job = json.loads(text)
    if job["half"]:
        torch.cuda.set_device(0)
    result.write_text(json.dumps(JOBS[job["kind"]](job), default=str))


# ------------------------------------------------------------------------------------------------ the run


class Zoo:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.until = args, time.monotonic() + args.limit_s
        self.lock, self.seconds = threading.Lock(), defaultdict[str, dict[str, Any]](dict)
        self.half = args.device != "cpu"
        for name in ("jobs", *(f"turns/{gpu}{kind}" for gpu in args.gpus for kind in ("", "-search"))):
            (args.folder / name).mkdir(parents=True, exist_ok=True)

    def child(self, kind: str, network: str, batch: int, way: str = "", gpu: int = 0) -> dict[str, Any]:
        """The result of a job in a process of its own; `failed` says why there is none."""
        args, label = self.args, "-".join([network, str(batch), kind, *way.split()])
        job = {
            "kind": kind, "network": network, "batch": batch, "way": way, "folder": str(args.folder), "half": self.half,
            "device": "cuda:0" if self.half else "cpu", "turns": str(args.folder / "turns" / str(gpu)),
            "gpu": gpu, "seconds": args.seconds, "budget_s": args.budget_s, "autotune": args.autotune,
            "profile": args.profile,
        }  # fmt: skip
        result, log = args.folder / "jobs" / f"{label}.json", args.folder / "jobs" / f"{label}.log"
        if kind != "measure" and result.exists():
            return dict(json.loads(result.read_text()))
        if (left := self.until - time.monotonic()) < 5:
            return {"failed": "no time left"}
        limit = min(left, args.job_s)
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "4",
            "TORCHINDUCTOR_CACHE_DIR": str(args.folder / f"torch-{network}-{batch}"),
        }  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps(job), str(result)], stdout=output, stderr=output,
                start_new_session=True, env=environment,
            )  # fmt: skip
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = f"ended after {limit:.0f} s"
        if code == 0 and result.exists():
            return dict(json.loads(result.read_text()))
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or line.startswith("error")] or lines[-1:]
        failed = {"failed": f"{code}: {' | '.join(errors[-2:])[:500]}"}
        if isinstance(code, int):
            result.write_text(json.dumps(failed))
        return failed

    def prepare(self, cells: list[tuple[str, int]]) -> None:
        """Everything that compiles, several at a time."""
        ways = [("build", "onnxruntime"), ("build", "inductor"), ("compile", "torch compiled")]
        ways += [("compile", "torch compiled autotuned")] if self.args.autotune else []

        def network(name: str) -> str:
            if not (made_of := self.child("convert", name, 0)).get("failed"):
                return name
            with self.lock:
                self.seconds[name]["convert"] = made_of
                print(f"{name}: convert {made_of['failed']}", flush=True)
            return name

        def one(cell: tuple[str, int], kind: str, way: str, gpu: int) -> None:
            made_of = self.child(kind, *cell, way, gpu=gpu)
            with self.lock:
                self.seconds[f"{cell}"][way] = made_of
                if made_of.get("failed"):
                    print(f"{cell}: {way}: {made_of['failed'][:200]}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(self.args.jobs) as threads:
            waiting, number = [], 0
            for done in concurrent.futures.as_completed(
                [threads.submit(network, name) for name in dict.fromkeys(name for name, _ in cells)]
            ):
                for cell in cells:
                    if cell[0] == done.result() and "convert" not in self.seconds[cell[0]]:
                        for kind, way in ways:
                            number += 1
                            waiting.append(
                                threads.submit(one, cell, kind, way, self.args.gpus[number % len(self.args.gpus)])
                            )
            concurrent.futures.wait(waiting)

    def measure(self, cells: list[tuple[str, int]]) -> None:
        """Cells by GPU, `--together` loaded at a time on each."""

        def one(cell: tuple[str, int], gpu: int) -> None:
            failed = self.seconds[cell[0]].get("convert")
            self.write(
                cell, {"failed": {"convert": failed["failed"]}} if failed else self.child("measure", *cell, gpu=gpu)
            )

        def of_gpu(place: int, gpu: int) -> None:
            mine = cells[place :: len(self.args.gpus)]
            for at in range(0, len(mine), self.args.together):
                with concurrent.futures.ThreadPoolExecutor(self.args.together) as threads:
                    list(threads.map(lambda cell: one(cell, gpu), mine[at : at + self.args.together]))

        with concurrent.futures.ThreadPoolExecutor(len(self.args.gpus)) as threads:
            list(threads.map(of_gpu, *zip(*enumerate(self.args.gpus), strict=True)))

    def write(self, cell: tuple[str, int], result: dict[str, Any]) -> None:
        typed = [item for item in sys.argv[1:] if "/" not in item and item not in ("--folder", "--out")]
        record = {
            "schema": "trt-engine/gpu-zoo", "network": cell[0], "family": NETWORKS[cell[0]].family, "batch": cell[1],
            "built": {way: {key: made_of[key] for key in made_of if key != "notes"}
                      for way, made_of in self.seconds[f"{cell}"].items()},
            **result, "command": shlex.join(["python", "benchmarks/gpu/zoo.py", *typed]), "tree": self.args.tree,
            "gpu": self.args.gpu_name, "at": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        with self.lock, self.args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
            best = result.get("best", {})
            ratios = {way: found[0] for way, found in result.get("ratio", {}).items()}
            print(cell, (result.get("auto") or {}).get("backend"), ratios, best.get("peer"),
                  str(result.get("failed") or "")[:160], flush=True)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(path: Path = RESULTS) -> str:
    """What the site shows on docs/gpu-zoo.md: the newest record of each cell."""
    newest = {(item["network"], item["batch"]): item for item in read(path)}
    rows, failed, ratios = [], [], []
    for (network, batch), item in sorted(newest.items()):
        made_of, ratio = item.get("p50_us", {}), item.get("ratio", {})
        if "ours" in ratio:
            best = item["best"]
            value, low, high = ratio[best["ours"]]
            ratios.append(value)
            seconds = [
                item["built"].get(way, {}).get("seconds") for way in ("inductor", "onnxruntime", "torch compiled")
            ]
            cells = [
                network, str(batch), item["auto"]["backend"], *(f"{made_of[way] / 1e3:.3f}" for way in best.values()),
                best["peer"], f"{value:.2f} ({low:.2f} to {high:.2f})",
                " / ".join("-" if value is None else f"{value:.0f}" for value in seconds),
            ]  # fmt: skip
            rows.append(f"| {' | '.join([*cells[:3], cells[4], cells[3], *cells[5:]])} |")
        for way, why in item.get("failed", {}).items():
            if way in ("convert", "inductor", "onnxruntime", "ours"):
                failed.append(
                    f"| {network} | {batch} | {way} | {' '.join(why.rpartition('Error: ')[2].split())[:160]} |"
                )
    first = sum(value <= 1 for value in ratios)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    head = f"""\
{len(rows)} of {2 * len(NETWORKS)} cells are measured, on an H200. In {first} of them `te.build(backend="auto")` is at
least as fast as the best peer; the geometric mean of the ratios is {mean:.2f}.

| network | batch | backend | ours, ms | best peer, ms | best peer | ratio, 95 % | s: inductor / onnxruntime / torch |
|---|---|---|---|---|---|---|---|
"""
    refused = ["", "| not delivered | batch | what | reason |", "|---|---|---|---|", *failed, ""]
    return head + "\n".join([*rows, *(refused if failed else [""])])


def cells_of(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Each network's first batch before the second of any; not what is measured already."""
    known = {(item["network"], item["batch"]) for item in read(args.out) if item.get("ratio") and not args.again}
    asked = [item.partition(":") for item in args.only.split(",")]
    for at, batch in enumerate(args.batches):
        wanted = [(name, int(own or batch)) for name, _, own in asked if at == 0 or not own]
        yield from (cell for cell in wanted if cell not in known)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        run_job(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir(), "zoo"), help="networks, engines, caches"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cuda:0", help="`cpu` tries the program out, in FP32")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument("--only", default=",".join(NETWORKS), metavar="NAME[:BATCH],...")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--autotune", action="store_true", help="also torch.compile with max-autotune")
    parser.add_argument("--profile", action="store_true", help="also the kernels of each way")
    parser.add_argument("--prepare", action="store_true", help="only convert, build and compile")
    parser.add_argument("--again", action="store_true", help="measure what is measured already")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 3, 1), help="compilations at a time")
    parser.add_argument("--together", type=int, default=6, help="cells loaded at a time on a GPU")
    parser.add_argument("--seconds", type=float, default=2.5, help="of interleaved measurement in a cell")
    parser.add_argument("--budget-s", type=float, default=15.0, help="`--time-budget` of `auto`")
    parser.add_argument("--job-s", type=float, default=300.0, help="longest time of a process")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of the whole run")
    parser.add_argument("--tree", default="", help="the commit, for the records")
    parser.add_argument("--gpu-name", default="", help="for the records")
    parser.add_argument("--table", action="store_true", help="print the tables")
    args = parser.parse_args()
    if args.table:
        print(tables(args.out))
        return
    zoo, cells = Zoo(args), [*cells_of(args)]
    zoo.prepare(cells)
    if not args.prepare:
        zoo.measure(cells)


if __name__ == "__main__":
    main()
