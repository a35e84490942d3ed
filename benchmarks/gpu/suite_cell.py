"""The work of `suite.py`'s child processes: builds, one cell's measurement, the card's ceilings, the steps of one model."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import operator
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import networks
import numpy as np
import onnx
import onnxruntime as ort
import torch
from suite_networks import TORCH_NETWORKS

import trt_engine as te

Call = Callable[[], object]

SMALL: dict[str, dict[str, int]] = {
    "vit": {"width": 64, "depth": 2, "heads": 4, "size": 32}, "resnet50": {"size": 32}, "yolo": {"size": 64, "divide": 4},
    "bert": {"width": 64, "depth": 2, "heads": 4, "tokens": 16, "words": 100},
}  # fmt: skip
"""What `--device cpu` tries the program out with."""
TRANSFORMERS, CONVOLUTIONS = ("vit", "bert"), ("resnet50", "yolo")
QUANTIZED, PARITY_BATCH = ("fp8", "int8"), 8
CHECKED_ROWS = 2
"""Rows of the batch that are compared with FP32."""
LARGEST_ERROR = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.5, "fp8": 0.5}
"""As a part of the largest value: weights are random, which quantized layers suffer from more than trained ones."""
BLOCK_S, LEAST_CALLS = 0.03, 3
ELEMENTS = {
    "float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT, "bfloat16": onnx.TensorProto.BFLOAT16,
    "int64": onnx.TensorProto.INT64,
}  # fmt: skip


class Cell(msgspec.Struct, frozen=True):
    """One row of the table."""

    model: str
    batch: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.model}-b{self.batch}-{self.precision}"


class Job(msgspec.Struct, frozen=True):
    """What a child does: `networks`, `ceilings`, `build`, `compile`, `measure` or `steps`."""

    kind: str
    device: str
    folder: str
    cell: Cell | None = None
    way: str = ""
    """The way that is built."""
    ours: tuple[str, ...] = ()
    seconds: float = 4.0
    budget_s: float = 60.0
    """The time budget of searches."""
    autotune_s: int = 0
    with_torch: bool = True
    with_onnxruntime: bool = True
    together: bool = False
    """Other cells are loaded at the same time."""
    parity: bool = True
    done: dict[str, dict[str, Any]] = {}
    """What the builds of this cell gave, by way."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def number(self) -> int:
        return int(self.device.partition(":")[2] or 0)


# ------------------------------------------------------------------------------------------------ models and builds


def network(job: Job, model: str, precision: str, *, fused: bool = False) -> Path:
    """The ONNX graph in a precision, written once; of quantized cells the one that is quantized."""
    precision = half_of(job) if precision in QUANTIZED else precision
    path = Path(job.folder) / f"{model}-{precision}{'-fused' if fused else ''}{'' if job.on_gpu else '-small'}.onnx"
    if path.exists():
        return path
    if precision in ("fp16", "fp32"):
        new = path.with_suffix(f".{os.getpid()}")
        more: dict[str, Any] = ({} if job.on_gpu else dict(SMALL[model])) | ({"fused": True} if fused else {})
        networks.NETWORKS[model](new, half=precision == "fp16", **more)
        return new.rename(path)
    te.cast(network(job, model, "fp32"), "bf16", out=path, keep_io=False, parity=False, overwrite=True)
    return path


def half_of(job: Job) -> str:
    """FP16; FP32 where the program is only tried out."""
    return "fp16" if job.on_gpu else "fp32"


def calibration(job: Job, model: str) -> str:
    """Seeded rows for quantized cells, in the types of the graph that is quantized."""
    path = Path(job.folder) / f"{model}-calibration.npz"
    if not path.exists():
        feeds = torch_feeds(job, host_feeds(network(job, model, "fp32"), 16, seed=1), dtype_of(job, "fp16"))
        np.savez(path, **{name: value.cpu().numpy() for name, value in feeds.items()})
    return str(path)


def host_feeds(path: Path, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs by name in FP32 and INT64, the mask without padding."""
    random = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for spec in te.inspect(path).signature.inputs:
        shape = (batch, *(int(size) for size in spec.shape[1:]))
        if spec.name.endswith("mask"):
            feeds[spec.name] = np.ones(shape, np.int64)
        elif spec.name.endswith("ids"):
            feeds[spec.name] = random.integers(0, 100, shape)
        else:
            feeds[spec.name] = random.standard_normal(shape, np.float32)
    return feeds


LAYOUTS: tuple[dict[str, str], ...] = (
    {"cuda.prefer_nhwc": "1", "separate_conv_bias": "on"}, {"cuda.prefer_nhwc": "1"},
)  # fmt: skip
ATTENTION: tuple[dict[str, str], ...] = ({"cuda.sdpa_kernel": "8"}, {"cuda.sdpa_kernel": "1"})
SETTINGS: dict[str, tuple[dict[str, str], ...]] = {
    "vit": ATTENTION, "resnet50": ({"cuda.prefer_nhwc": "1", "separate_conv_bias": "channel"}, *LAYOUTS), "yolo": LAYOUTS,
    "bert": ATTENTION,
}  # fmt: skip
"""What a search asks of the backend `onnxruntime`: built beforehand, so that the search only measures."""


def settings(job: Job, way: str) -> dict[str, Any]:
    """Settings of `te.build` by the name of the way: as a user who names the backend, `inductor` without a search."""
    backend, _, more = way.partition(" ")
    if backend != "inductor":
        return {"backend": backend, "time_budget_s": job.budget_s}
    options = {
        "autotuned": {"autotune_s": str(job.autotune_s)}, "unfused": {"fuse_kernels": "off"},
    }  # fmt: skip
    return {"backend": backend, "time_budget_s": 0.0, "options": options.get(more, {})}


def build(job: Job, way: str, precision: str | None = None, **more: Any) -> te.Engine:
    """The engine for the cell's batch alone. Quantized ones are made of the FP16 graph. Above a batch of 8 the build checks
    no parity, which is computed on the CPU: all outputs are compared with FP32 here."""
    assert job.cell is not None
    cell, precision = job.cell, precision or job.cell.precision
    if precision in QUANTIZED:
        more |= {"precision": precision, "calib_data": calibration(job, cell.model)}
    return te.build(
        network(job, cell.model, precision), device=job.device, batch=(cell.batch,) * 3,
        parity=job.parity and cell.batch <= PARITY_BATCH, store=te.Store(Path(job.folder) / "store"),
        **(settings(job, way) | more),
    )  # fmt: skip


def run_build(job: Job) -> dict[str, Any]:
    """Seconds of the first build, and what the passport says of it; the settings of a later search are built too."""
    assert job.cell is not None
    started = time.perf_counter()
    engine = build(job, job.way, time_budget_s=0.0)
    made = {"first_s": round(time.perf_counter() - started, 2)} | described(engine)
    for options in SETTINGS[job.cell.model] if job.way == "onnxruntime" and job.on_gpu else ():
        with contextlib.suppress(te.TrtEngineError):  # the search will say why
            build(job, job.way, time_budget_s=0.0, options=options)
    return made


def run_search(job: Job) -> dict[str, Any]:
    """Seconds of a search for the best engine, whose candidates are built: it measures, and nothing else runs."""
    started = time.perf_counter()
    build(job, job.way)
    return {"search_s": round(time.perf_counter() - started, 2)}


def described(engine: te.Engine) -> dict[str, Any]:
    made = engine.passport.build
    found = {
        "backend": engine.passport.backend, "options": made.config.get("options"),
        "notes": {name: text for name, text in made.notes.items() if name != "calibrated_with"},  # a path
        "tuning": made.tuning, "parity": engine.passport.parity, "precision": engine.passport.precision,
    }  # fmt: skip
    return dict(msgspec.to_builtins(found, enc_hook=str))


# ------------------------------------------------------------------------------------------------ peers


def dtype_of(job: Job, precision: str) -> torch.dtype:
    """What torch computes in beside the precision: FP16 where it is a quantized one."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(
        precision, torch.float16 if job.on_gpu else torch.float32
    )


def torch_module(job: Job) -> torch.nn.Module:
    assert job.cell is not None
    torch.manual_seed(0)
    made = TORCH_NETWORKS[job.cell.model](**({} if job.on_gpu else SMALL[job.cell.model]))
    return made.eval().requires_grad_(False)


def torch_feeds(job: Job, host: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    place = job.device if job.on_gpu else "cpu"
    feeds = {name: torch.from_numpy(array).to(place) for name, array in host.items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in feeds.items()}


def peer_module(job: Job, host: dict[str, np.ndarray]) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The module and its inputs, on the device, convolutions channels-last."""
    assert job.cell is not None
    dtype = dtype_of(job, job.cell.precision)
    module = torch_module(job).to(job.device if job.on_gpu else "cpu", dtype)
    feeds = [*torch_feeds(job, host, dtype).values()]
    if job.cell.model in CONVOLUTIONS:
        module = module.to(memory_format=torch.channels_last)
        feeds = [value.contiguous(memory_format=torch.channels_last) for value in feeds]
    return module, feeds


def compiled(module: torch.nn.Module, feeds: list[torch.Tensor], way: str, on_gpu: bool) -> tuple[Call, Call]:
    """torch.compile's code for these shapes: a call that gives outputs, and the replay of its CUDA graph."""
    torch.compiler.reset()
    mode = "max-autotune-no-cudagraphs" if way.endswith("autotuned") else None
    fast = functools.partial(torch.compile(module, dynamic=False, mode=mode), *feeds)
    fast()
    return fast, graph_of(fast) if on_gpu else fast


def graph_of(call: Call) -> Call:
    """A replay of the call's CUDA graph that ends when the device is done."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = call()

    def replay(_held: object = held) -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def run_compile(job: Job) -> dict[str, Any]:
    """Seconds of torch.compile; its code is then in the cache."""
    assert job.cell is not None
    module, feeds = peer_module(job, host_feeds(network(job, job.cell.model, "fp32"), job.cell.batch))
    started = time.perf_counter()
    with torch.no_grad():
        compiled(module, feeds, job.way, on_gpu=False)
        if job.on_gpu:
            torch.cuda.synchronize()
    return {"first_s": round(time.perf_counter() - started, 2)}


def synchronized(job: Job, call: Call) -> Call:
    def once() -> object:
        made = call()
        if job.on_gpu:
            torch.cuda.synchronize()
        return made

    return once


class PlainSession:
    """ONNX Runtime without us: fixed memory of the device in and out, by io binding."""

    def __init__(
        self, job: Job, path: Path, feeds: dict[str, torch.Tensor], *, cpu: bool = False, **options: str
    ) -> None:
        made = ort.SessionOptions()
        made.log_severity_level = 3
        on_gpu = job.on_gpu and not cpu
        # in FP32 as ours; else the provider's default, without which FP16 convolutions have no tensor cores
        tf32 = {"use_tf32": "0"} if job.cell and job.cell.precision == "fp32" else {}
        given = {"device_id": str(job.number)} | tf32 | options
        providers: list[Any] = [("CUDAExecutionProvider", given)] if on_gpu else ["CPUExecutionProvider"]
        self.session = ort.InferenceSession(str(path), made, providers=providers)
        if on_gpu and self.session.get_providers()[0] != "CUDAExecutionProvider":
            raise RuntimeError(f"ONNX Runtime has the providers {self.session.get_providers()}")
        self.binding = self.session.io_binding()
        self.feeds = {name: value.contiguous() for name, value in feeds.items()}
        place = ("cuda", job.number) if on_gpu else ("cpu", 0)
        for name, value in self.feeds.items():
            kind = ELEMENTS[str(value.dtype).removeprefix("torch.")]
            self.binding.bind_input(name, *place, kind, tuple(value.shape), value.data_ptr())
        self.outputs: list[torch.Tensor] = []
        for item in self.session.get_outputs():
            rows = len(next(iter(self.feeds.values())))
            dtype = {"tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}.get(item.type, torch.float32)
            held = torch.empty((rows, *item.shape[1:]), dtype=dtype, device=job.device if on_gpu else "cpu")
            kind = ELEMENTS[str(dtype).removeprefix("torch.")]
            self.binding.bind_output(item.name, *place, kind, tuple(held.shape), held.data_ptr())
            self.outputs.append(held)

    def __call__(self) -> list[torch.Tensor]:
        self.session.run_with_iobinding(self.binding)
        return self.outputs


# ------------------------------------------------------------------------------------------------ measuring


@dataclasses.dataclass
class Ways:
    """Calls to compare, by name, and why others are missing."""

    calls: dict[str, Call] = dataclasses.field(default_factory=dict)
    outputs: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def trying(self, way: str) -> Iterator[None]:
        """What fails is noted, and the other ways go on."""
        try:
            yield
        except Exception as error:
            self.failed[way] = f"{type(error).__name__}: {error}"[:600]
            print(f"{way}: {self.failed[way]}", flush=True)

    def drop_failing(self) -> None:
        """Leave out ways that cannot be called; `RuntimeError` where none is left."""
        for way, call in [*self.calls.items()]:
            with self.trying(way):
                call()
        for way in self.failed.keys() & self.calls.keys():
            del self.calls[way]
        if not self.calls:
            raise RuntimeError("; ".join(f"{way}: {reason}" for way, reason in self.failed.items()))


def first_rows(values: Any) -> list[np.ndarray]:
    """The first rows of outputs in FP64 on the host."""
    items = [values] if isinstance(values, torch.Tensor) else [*values]
    return [
        item[:CHECKED_ROWS].double().cpu().numpy()
        if isinstance(item, torch.Tensor)
        else np.asarray(item)[:CHECKED_ROWS].astype(np.float64)
        for item in items
    ]


def largest_difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Of all outputs, as a part of the largest absolute value of each; infinite where a value is not a number."""
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True)]
    return max(error if np.isfinite(error) else float("inf") for error in errors)


def interleaved(calls: dict[str, Call], seconds: float) -> dict[str, list[list[float]]]:
    """Microseconds of every call by way and block, the ways in an order drawn anew for each block."""
    for call in calls.values():
        until, count = time.perf_counter() + 0.3, 0
        while count < 5 or (time.perf_counter() < until and count < 30):
            call()
            count += 1
    clock, ways, number, order = time.perf_counter_ns, [*calls.items()], 0, random.Random(0)
    blocks: dict[str, list[list[float]]] = {way: [] for way in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or number < 6:
        order.shuffle(ways)
        for way, call in ways:
            over, block, start = clock() + BLOCK_S * 1e9, [], 0
            while start < over or len(block) < LEAST_CALLS:
                start = clock()
                call()
                block.append((clock() - start) / 1e3)
            blocks[way].append(block)
        number += 1
    return blocks


def summary(blocks: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians and 99th percentiles of all calls, and the median of each block as the sample."""
    flat = {way: np.concatenate(parts) for way, parts in blocks.items()}
    return {
        "p50_us": {way: round(float(np.median(values)), 2) for way, values in flat.items()},
        "p99_us": {way: round(float(np.percentile(values, 99)), 2) for way, values in flat.items()},
        "calls": {way: len(values) for way, values in flat.items()},
        "blocks_p50_us": {way: [round(float(np.median(part)), 2) for part in parts] for way, parts in blocks.items()},
    }


def ratio(blocks: dict[str, list[float]], way: str, other: str) -> tuple[float, float, float]:
    """Of the medians of two ways by paired blocks, with its 95 % interval by bootstrap over blocks."""
    quotients = np.asarray(blocks[way]) / np.asarray(blocks[other])
    drawn = np.random.default_rng(0).choice(quotients, (2000, len(quotients)))
    low, high = np.percentile(np.median(drawn, 1), [2.5, 97.5])
    return round(float(np.median(quotients)), 4), round(float(low), 4), round(float(high), 4)


class Turn:
    """Cells that are loaded at the same time are measured one after the other, once all are loaded."""

    WAIT_S = 40.0

    def __init__(self, job: Job) -> None:
        self.file = (Path(job.folder) / "measuring.lock").open("w") if job.together else None
        self.take(fcntl.LOCK_SH)

    def take(self, how: int) -> None:
        if self.file is not None:
            fcntl.flock(self.file, how)

    def begin(self) -> None:
        """Alone, or after `WAIT_S` with one that still loads."""
        self.take(fcntl.LOCK_UN)
        until = time.monotonic() + self.WAIT_S
        while self.file is not None and time.monotonic() < until:
            try:
                self.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return

    def end(self) -> None:
        self.take(fcntl.LOCK_UN)


def clocks(job: Job) -> str | None:
    """What the driver says of the card: processor and memory clock, temperature, power."""
    if not job.on_gpu:
        return None
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={job.number}"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def add_ours(
    job: Job, ways: Ways, stack: contextlib.ExitStack, way: str, host: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The engine of one way: `infer` on tensors of the device, and `bind`. Gives what is known of it."""
    if (reason := job.done.get(way, {}).get("failed")) is not None:
        raise RuntimeError(f"its build failed: {reason}")
    seconds = []
    for _ in range(2):  # the second from the store
        started = time.perf_counter()
        engine = build(job, way)
        seconds.append(round(time.perf_counter() - started, 2))
    runner = stack.enter_context(te.load(engine, graphs=job.on_gpu))
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(
        next(str(spec.dtype) for spec in engine.signature.inputs), torch.float32
    )  # fmt: skip
    feeds = torch_feeds(job, host, dtype)
    given: dict[str, Any] = feeds if job.on_gpu else {name: value.numpy() for name, value in feeds.items()}
    ways.outputs[way] = first_rows(runner.infer(given).values())
    infer = functools.partial(runner.infer, given, **({"on_device": True} if job.on_gpu else {}))
    for _ in range(4):
        infer()
    ways.calls[way] = infer
    with ways.trying(f"{way} bind"):
        ways.calls[f"{way} bind"] = stack.enter_context(runner.bind(inputs=given))
    pool = runner.stats().pool
    return job.done.get(way, {}) | described(engine) | {
        "to_measure_s": seconds[0], "again_s": seconds[1], "captured": job.on_gpu and runner.is_captured(given),
        "refused": pool.graphs.disabled_reason if pool else None, "facts": runner.runtime_info,
    }  # fmt: skip


def add_sessions(job: Job, ways: Ways, feeds: dict[str, torch.Tensor], graph: dict[str, str], precision: str) -> None:
    """ONNX Runtime's own ways."""
    assert job.cell is not None
    cell = job.cell
    with ways.trying("onnxruntime plain"):
        plain = PlainSession(job, network(job, cell.model, precision), feeds, **graph)
        ways.outputs["onnxruntime plain"], ways.calls["onnxruntime plain"] = first_rows(plain()), plain
    with ways.trying("onnxruntime own fusion"):
        transformer = cell.model in TRANSFORMERS
        options = graph | ({} if transformer or not job.on_gpu else {"prefer_nhwc": "1"})
        fused = PlainSession(job, network(job, cell.model, precision, fused=transformer), feeds, **options)
        ways.outputs["onnxruntime own fusion"], ways.calls["onnxruntime own fusion"] = first_rows(fused()), fused


def add_peers(job: Job, ways: Ways, host: dict[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """torch and ONNX Runtime; gives the outputs of torch's module in FP32."""
    assert job.cell is not None
    cell, found = job.cell, {}
    graph = {"enable_cuda_graph": "1"} if job.on_gpu else {}
    precision = cell.precision if cell.precision in ("fp16", "fp32") else half_of(job)
    feeds = torch_feeds(job, host, dtype_of(job, precision))
    if job.with_onnxruntime:
        add_sessions(job, ways, feeds, graph, precision)
    if not job.with_torch:
        return {}
    exact = torch_module(job)
    rows = [torch.from_numpy(value[:CHECKED_ROWS]) for value in host.values()]
    expected = first_rows(exact(*rows))
    module, inputs = peer_module(job, host)
    with ways.trying("torch eager"):
        eager = synchronized(job, functools.partial(module, *inputs))
        ways.outputs["torch eager"], found["torch eager"] = first_rows(eager()), expected
        ways.calls["torch eager"] = eager
    for way in ("torch compiled", *(("torch compiled autotuned",) if job.autotune_s else ())):
        with ways.trying(way):
            if (reason := job.done.get(way, {}).get("failed")) is not None:
                raise RuntimeError(reason)
            run, replay = compiled(module, inputs, way, job.on_gpu)
            ways.outputs[way], found[way] = first_rows(run()), expected
            ways.calls[way] = synchronized(job, replay) if not job.on_gpu else replay
    return found


def run_measure(job: Job) -> dict[str, Any]:
    """One cell: everything built and loaded, then measured interleaved."""
    assert job.cell is not None
    cell = job.cell
    source = network(job, cell.model, "fp32")
    host = host_feeds(source, cell.batch)
    turn = Turn(job)
    ways, builds, stack = Ways(), {}, contextlib.ExitStack()  # the process ends with everything loaded
    with torch.no_grad():
        for way in job.ours:
            with ways.trying(way):
                builds[way] = add_ours(job, ways, stack, way, host)
        peers = add_peers(job, ways, host)
        ways.drop_failing()
        reference = PlainSession(job, source, torch_rows(host), cpu=True)
        expected = first_rows(reference())
        turn.begin()
        before = clocks(job)
        blocks = interleaved(ways.calls, job.seconds)
        after = clocks(job)
        turn.end()
    errors = {way: largest_difference(found, peers.get(way, expected)) for way, found in ways.outputs.items()}
    for way, error in errors.items():
        if not error <= LARGEST_ERROR[cell.precision]:
            ways.failed[way] = f"its outputs differ from FP32's by {error:.2g} of the largest value"
            blocks = {name: parts for name, parts in blocks.items() if name not in (way, f"{way} bind")}
    made = summary(blocks)
    names = [way for way in blocks if way.partition(" bind")[0] not in job.ours]
    best = min(names, key=lambda way: made["p50_us"][way], default=None)
    ratios = {way: ratio(made["blocks_p50_us"], way, best) for way in blocks if way not in names} if best else {}
    model = te.inspect(source)
    return made | {
        "best_peer": best, "ratio_to_best_peer": ratios, "errors": errors, "failed": ways.failed, "builds": builds,
        "compile": {way: done for way, done in job.done.items() if way.startswith("torch")},
        "model_digest": model.digest, "flops": flops(model, cell.batch), "clocks": [before, after],
        "libraries": {"torch": str(torch.__version__), "onnxruntime": ort.__version__},
    }  # fmt: skip


def torch_rows(host: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value[:CHECKED_ROWS].copy()) for name, value in host.items()}


def flops(model: te.ModelReport, batch: int) -> int | None:
    """Floating-point operations of the batch: two for each multiply-add."""
    if model.flops is None or not model.flops_shapes:
        return None
    return model.flops // next(iter(model.flops_shapes.values()))[0] * batch


# ------------------------------------------------------------------------------------------------ ceilings


def device_seconds(call: Call, repeats: int = 20) -> float:
    """Shortest time of one call by CUDA events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def run_ceilings(job: Job) -> dict[str, Any]:
    """TFLOP/s (INT8: TOP/s) of a product of 8192 x 8192 matrices by type, and TB/s of a copy of 1 GiB (read and written)."""
    if not job.on_gpu:
        return {}
    turn = Turn(job)
    side, found = 8192, {}
    a, b = (torch.randn(side, side, device=job.device, dtype=torch.float16) * 0.1 for _ in range(2))
    one = torch.ones((), device=job.device)
    eight = torch.float8_e4m3fn
    int_mm, scaled_mm = operator.attrgetter("_int_mm", "_scaled_mm")(torch)  # they have no public names
    calls: dict[str, Callable[[], Call]] = {
        "fp16": lambda: functools.partial(torch.mm, a, b),
        "bf16": lambda: functools.partial(torch.mm, a.bfloat16(), b.bfloat16()),
        "int8": lambda: functools.partial(int_mm, a.to(torch.int8), b.to(torch.int8).t()),
        "fp8": lambda: functools.partial(
            scaled_mm, a.to(eight), b.to(eight).t(), scale_a=one, scale_b=one, out_dtype=torch.float16
        ),
        "fp32": lambda: functools.partial(torch.mm, a.float(), b.float()),
    }  # fmt: skip
    turn.begin()
    for name, prepare in calls.items():
        with contextlib.suppress(RuntimeError):
            found[name] = round(2 * side**3 / device_seconds(prepare()) / 1e12, 1)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    found["copy_tb_s"] = round(2 * source.numel() / device_seconds(lambda: target.copy_(source)) / 1e12, 3)
    turn.end()
    return found


# ------------------------------------------------------------------------------------------------ the steps of one model


def run_steps(job: Job) -> dict[str, Any]:
    """From ONNX Runtime's CPU provider to the engine: one thing after the other is changed, on one machine."""
    assert job.cell is not None
    cell = job.cell
    half = half_of(job)
    single, low = network(job, cell.model, "fp32"), network(job, cell.model, half)
    host = host_feeds(single, cell.batch)
    full = torch_feeds(job, host, torch.float32)
    reduced = torch_feeds(job, host, dtype_of(job, half))
    arrays = {name: value.cpu().numpy() for name, value in reduced.items()}
    graph = {"enable_cuda_graph": "1"} if job.on_gpu else {}
    slow: dict[str, Call] = {}
    ways, stack = Ways(), contextlib.ExitStack()
    with torch.no_grad():
        for name, path, feeds in (("cpu fp16", low, arrays), ("cpu fp32", single, host)):
            tensors = {key: torch.from_numpy(value) for key, value in feeds.items()}
            slow[name] = PlainSession(job, path, tensors, cpu=True)
        cpu = {name: [timed(call) for _ in range(3)] for name, call in slow.items()}
        slow.clear()
        with ways.trying("cuda fp32 numpy"):
            plain = PlainSession(job, single, full).session
            ways.calls["cuda fp32 numpy"] = functools.partial(plain.run, None, host)
        stages: tuple[tuple[str, Path, dict[str, torch.Tensor], dict[str, str]], ...] = (
            ("resident", single, full, {}), ("graph", single, full, graph), ("fp16", low, reduced, graph),
        )  # fmt: skip
        for name, path, given, options in stages:
            with ways.trying(name):
                ways.calls[name] = PlainSession(job, path, given, **options)
        builds = {}
        for name, way, more in (
            ("fused", "onnxruntime", {"time_budget_s": 0.0}), ("tuned", job.way or "onnxruntime", {}),
        ):  # fmt: skip
            with ways.trying(name):
                engine = build(job, way, half, **more)
                runner = stack.enter_context(te.load(engine, graphs=job.on_gpu))
                values: dict[str, Any] = reduced if job.on_gpu else arrays
                ways.calls[name] = stack.enter_context(runner.bind(inputs=values))
                builds[name] = described(engine)
        ways.drop_failing()
        before = clocks(job)
        made = summary(interleaved(ways.calls, job.seconds))
    made["p50_us"] = {name: float(np.median(values)) for name, values in cpu.items()} | made["p50_us"]
    made["blocks_p50_us"] = cpu | made["blocks_p50_us"]
    return made | {"failed": ways.failed, "builds": builds, "clocks": [before, clocks(job)]}


def timed(call: Call) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    call()
    return round((time.perf_counter() - started) * 1e6, 1)


def run_networks(job: Job) -> dict[str, Any]:
    """The graphs of a cell, so that its builds do not write them at the same time."""
    assert job.cell is not None
    cell, half = job.cell, half_of(job)
    for precision in ("fp32", half, cell.precision):
        network(job, cell.model, precision)
    if cell.model in TRANSFORMERS and job.with_onnxruntime:
        network(job, cell.model, half, fused=True)
    if cell.precision in QUANTIZED:
        calibration(job, cell.model)
    return {}


JOBS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "networks": run_networks, "build": run_build, "compile": run_compile, "search": run_search, "measure": run_measure,
    "ceilings": run_ceilings, "steps": run_steps,
}  # fmt: skip


def main() -> None:
    """`suite_cell.py JOB RESULT`: the job as JSON; its result, or `failed`, is written to the file."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        made = JOBS[job.kind](job)
    except Exception as error:
        traceback.print_exc()
        made = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(made, enc_hook=str))
    sys.stdout.flush()
    signal.raise_signal(signal.SIGKILL)  # with everything loaded: what closing does is not measured, and cannot fail


if __name__ == "__main__":
    main()
