"""What cannot be done, by verb: the exit code, one message with a hint and no trace, and not a file more or less."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnx_models as models
import trt_engine as te
from onnx_models import FLOAT, node
from trt_engine.cli.main import run
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))

import sample_matrix
import sample_runs

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`net`: images to scores; `two`: rows of three numbers to `minus` and `log`; `colours`: a declared classifier; `boxes`:
    a detector in shape; engines of the first two; runs, pictures, arrays and files that are none of these."""
    Image = pytest.importorskip("PIL.Image", reason="pillow reads the pictures")
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval works out COCO's figures")
    place = tmp_path_factory.mktemp("refusals")
    row, pictures = (FLOAT, ["batch", 3]), {"images": (FLOAT, ["batch", 3, 8, 8])}
    models.conv_net(place / "net.onnx")
    models.save(
        place / "two.onnx", [node("Neg", "x", "minus"), node("Log", "x", "log")], {"x": row}, {"minus": row, "log": row}
    )
    pool = [node("GlobalAveragePool", "images", "mean"), node("Flatten", "mean", "scores")]
    classes = Postprocess("classify", classes=("red", "green", "blue"), activation="softmax")
    colours = models.save(place / "colours.onnx", pool, pictures, {"scores": row})
    declare(colours, Vision(Preprocess((8, 8)), classes), colours)
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [-1, 32, 6])
    flat = [node("Reshape", "images shape", "boxes")]
    models.save(place / "boxes.onnx", flat, pictures, {"boxes": (FLOAT, ["batch", 32, 6])}, {"shape": shape})
    store = te.Store(place / "store")
    for name in ("net", "two"):
        te.build(place / f"{name}.onnx", batch=(1, 2, 4), out=place / f"{name}.engine.onnx", store=store)
    te.build(place / "net.onnx", backend="fake", batch=(1, 2, 4), gpus="sm89", out=place / "net.fake", store=store)
    for name, colour in (("red", (250, 0, 0)), ("green", (0, 250, 0))):
        (place / "data" / name).mkdir(parents=True)
        Image.new("RGB", (9, 7), colour).save(place / "data" / name / "x.png")
    Image.new("RGB", (4, 4)).save(place / "x.png")
    sample_runs.cpu_run(place / "run")
    sample_matrix.matrix(place / "matrix")
    for name, array in (
        ("x", np.ones((1, 3), np.float32)), ("wide", np.ones((1, 4), np.float32)), ("double", np.ones((1, 3))),
        ("many", np.ones((5, 3), np.float32)),
    ):  # fmt: skip
        np.save(place / f"{name}.npy", array)
    np.savez(place / "named.npz", z=np.ones((1, 3), np.float32))
    wrong = {"preprocess": {"sise": [8, 8]}, "postprocess": {"decode": "classify"}}
    for name, text in (
        ("text.npy", "1 2 3"), ("wrong.json", json.dumps(wrong)), ("mine.sm120.fake", "years of work"),
        ("text.onnx", "not a network at all"), ("foreign.engine", "no plan" * 10), ("in_the_way", "a file"),
        ("points.jsonl", '{"hello": 1}\n'), ("notes.txt", "hello"),
    ):  # fmt: skip
        (place / name).write_text(text)
    return place


REFUSALS = {
    "bench net.engine.onnx --json": [
        ("--batch 9", 2, ""), ("--shapes y:1x3x8x8", 2, ""), ("--shapes images:1x3x9x8", 2, ""),
        ("--duration soon", 2, ""), ("--inputs absent.npy", 2, ""), ("--loadEngine=m.engine.onnx", 2, ""),
        ("--parse-log x.log", 2, ""), ("--isolate --memory-limit much", 2, ""), ("-o in_the_way", 3, ""),
        ("--duration 0 --warmup 0 --iterations 3 --strict", 9, ""),
    ],
    "bench --json": [("", 2, ""), ("--parse-log absent.log", 2, ""), ("absent.onnx", 4, ""), ("text.onnx", 4, ""),
                     ("foreign.engine", 10, "")],
    "build net.onnx --backend fake --batch 1:2:4": [
        ("--each-gpu sm89,H100", 2, "`H100` is compute capability 9.0 (Hopper)"),
        ("--each-gpu 'sm89,RTX 4091'", 2, "unknown GPU `RTX 4091`"),
        ("--each-gpu sm89 --gpus sm89", 2, "`--gpus` and `--each-gpu` are both given"),
        ("--each-gpu ,", 2, "`--each-gpu` names no GPU"),
        ("--each-gpu sm89,sm120 -o mine.fake", 2, "`mine.sm120.fake` exists and is not a trt-engine engine"),
    ],
    "cast net.onnx": [
        ("--to fp16", 2, "no output file is given"), ("--to int8 -o new.onnx", 2, "int8"),
        ("--to fp16 -o net.onnx", 2, "the model itself"),
        ("--to fp16 -o new.onnx --exclude-node nope", 2, "no node `nope`"),
        ("--to fp16 -o new.onnx --max-constant -1", 2, "more than 0"),
        ("--to fp16 -o new.onnx --autocast --auto-exclude", 2, "leave one of them out"),
        ("--to fp16 --autocast --dry-run", 2, "has no dry run"),
    ],
    "cast none.onnx": [("--to fp16 -o new.onnx", 4, "no such file")],
    "compare two.engine.onnx": [
        ("", 2, ""), ("nothing.engine", 4, ""), ("--baseline none.json", 2, ""), ("two.engine.onnx --restarts 3", 2, ""),
        ("two.engine.onnx --backend tensorrt", 2, ""), ("two.engine.onnx --batch 9", 2, ""), ("--dry-run", 2, ""),
        ("two.engine.onnx --restarts 2 --dry-run", 2, ""), ("--baseline none.json --dry-run", 2, ""),
        ("two.engine.onnx --save-baseline two.onnx --dry-run", 2, ""),
    ],
    "compare": [("", 2, ""), ("none.jsonl none.jsonl", 2, ""), ("none.jsonl none.jsonl --dry-run", 2, ""),
                ("nothing.engine none.onnx --dry-run", 4, "")],
    "diff net.onnx": [("notes.txt", 2, "hint: expected an engine, an ONNX model")],
    "evaluate colours.onnx": [
        ("", 2, "dataset"), ("--dataset none", 2, "no such dataset `none`"),
        ("--dataset data --max-drop 0.1", 2, "compares with a baseline"),
        ("--dataset data --max-drop 3 --baseline x", 2, "expected 0 to 1"),
        ("--dataset data --baseline none.onnx", 4, "no such file `none.onnx`"),
        ("--dataset data --preprocess none.json", 2, "cannot read `none.json`"),
        ("--dataset data --batch 0", 2, "`--batch` is 0, expected 1 or more"),
        ("--dataset data --max-samples 0", 2, "`--max-samples` is 0, expected 1 or more"),
        (f"--dataset {DIGITS / 'val'}", 2, "is declared to `classify`"),
        ("--dataset data --save-predictions p.json", 2, "predictions are saved for COCO annotations"),
        ("--dataset data -o in_the_way/x", 3, "a file is in the way"),
    ],
    "infer colours.onnx": [
        ("--image none.jpg", 2, "cannot read the image `none.jpg`: no such file"),
        ("--image net.onnx", 2, "is not a readable image"),
        ("--image x.png --random", 2, "both `--image` and `--random` are given"),
        ("--image x.png --batch 2", 2, "`--batch` needs `--random`"),
        ("--random --draw y.png", 2, "`--draw` needs `--image`"),
        ("--random --min-score 0.5", 2, "`--min-score` needs `--image`"), ("--random -o y.json", 2, "ends in .npz or .npy"),
        ("--image x.png --draw y.gif", 2, "a drawing cannot be written to `y.gif`"),
        ("--image x.png --draw x.png", 2, "`x.png` exists"), ("--image x.png -o y.txt", 2, "ends in .json, .npz or .npy"),
        ("--image x.png --preprocess wrong.json", 2, "`sise`, which is not a setting"),
    ],
    "infer two.engine.onnx": [
        ("", 2, "no inputs are given"), ("--input x.npy --random", 2, "both `--input` and `--random`"),
        ("--input x.npy --batch 2", 2, "`--batch` needs `--random`"),
        ("--input x.npy --shapes x:1x3", 2, "`--shapes` needs `--random`"),
        ("--input none.npy", 2, "cannot read the inputs `none.npy`: no such file"),
        ("--input text.npy", 2, "neither .npy nor .npz"), ("--input wide.npy", 2, "dimension 1 is fixed at 3"),
        ("--input double.npy", 2, "is float64, expected float32"),
        ("--input many.npy", 2, "profile 0 spans 1x3 to 4x3"),
        ("--input named.npz", 2, "contains `z`, which is not an input"),
        ("--random --batch 9", 2, "profile 0 spans 1x3 to 4x3"), ("--random --batch 0", 2, "0"),
        ("--random --repeat 0", 2, "0"), ("--random --output mins", 2, "did you mean `minus`"),
        ("--random -o y.npy", 2, "can hold one array, there are 2"), ("--random -o y.csv", 2, "ends in .npz or .npy"),
        ("--random -o x.npy/y.npz", 3, "a file is in the way"), ("--random --device tpu", 2, "unknown device `tpu`"),
        ("--random --precision fp16", 2, "is already built: `--precision` cannot change it"),
        ("--random -O nonsense=1", 2, "nonsense"),
    ],
    "inspect net.onnx": [("--shapes image:1x3x8x8", 2, ""), ("--shapes images:1x3x8", 2, ""),
                         ("--shapes images:1x3x9x8", 2, ""), ("--shapes images:axb", 2, ""), ("--run", 2, "")],
    "inspect .": [("--run", 2, "")],
    "lint two.onnx": [("--target tflite", 2, ""), ("--tensorrt 8.6", 2, ""), ("--tensorrt newest", 2, ""),
                      ("--shapes z:1x3", 2, ""), ("--shapes x:2x4", 2, "")],
    "pack": [("nowhere", 2, "no such folder"), (".", 2, "is not a run folder"),
             ("matrix -o x.rar", 2, "not an archive name"), ("", 2, "RUN"),
             ("matrix/run.json", 2, "is a file, expected the folder of a run")],
    "profile net.engine.onnx --duration 0 --warmup 1 -o new": [
        ("--batch 9", 2, ""), ("--shapes other:1", 2, ""), ("--device cuda:0", 10, ""), ("--profiler gprof", 2, ""),
        ("--inferences 0", 2, ""), ("--backend fake", 2, ""),
    ],
    "profile missing.engine": [("-o new", 4, "")],
    "quantize net.onnx -o new.onnx": [("--to int9", 2, ""), ("--to int4 --block-size 33", 2, ""), ("", 2, "")],
    "report": [
        ("nowhere", 2, "no such folder"), (".", 2, "is not a run folder"),
        ("run/size.json", 2, "is a file, expected the folder of a run"), ("run --format pdf", 2, "pdf"),
        ("run --format html --json", 2, "both use stdout"), ("run -o run/size.json/x.md", 3, "a file is in the way"),
        ("", 2, "RUN"),
    ],
    "size boxes.onnx": [
        ("--max-batch 0", 2, "--max-batch"), ("--max-batch many", 2, ""), ("--fps 0", 2, ""), ("--no-such", 2, ""),
        ("--backend no-such", 2, ""), ("--shapes image:1x3x8x8", 2, "images"), ("--workspace 32768Mib5", 2, "32GiB"),
        ("-o boxes.onnx", 3, "-o"), ("-o boxes.onnx/below", 3, "-o"), ("--batch 8", 2, ""),
    ],
    "size boxes.onnx -o new --deadline-ms": [
        ("50 --sources 40", 2, "cannot read the sources `40`"), ("50 --late 150%", 2, "cannot read the share `150%`"),
        ("50 --policy fast", 2, "cannot read the policy `fast`"), ("50 --arrivals none.txt", 2, "none.txt"),
        ("50 --curve none.jsonl", 2, "none.jsonl"), ("0", 2, "more than 0"),
        ("50 --curve points.jsonl", 2, "cannot read the latency curve"),
    ],
    "size": [("nowhere.onnx", 4, "torch.onnx.export"), ("weights.pt", 4, "torch.onnx.export")],
    "validate": [("", 2, "missing argument `ENGINE`"), ("none.engine", 4, "no such file"),
                 ("net.onnx", 10, "is a model, expected an engine"),
                 ("net.fake -O compute_capability=12.0", 10, "the device here has 12.0"),
                 ("net.fake -O memroy=1", 2, "unknown setting `memroy`")],
}  # fmt: skip


SEEN_BY_RUNNING = ("--strict", "-O nonsense=1", "--to fp16")
"""In calls that a dry run lets through; a cast without a file is one."""


def contents(place: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in place.rglob("*")}


@pytest.mark.parametrize("call", REFUSALS)
def test_what_cannot_be_done_ends_with_its_code_and_a_hint_and_changes_nothing(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    run([*shlex.split(call), "--help"])
    takes_dry_run = "--dry-run" in capsys.readouterr().out
    for words, code, says in REFUSALS[call]:
        typed = shlex.split(f"{call} {words}")
        assert run(typed) == code, typed
        out, err = capsys.readouterr()
        assert says in err and "error: " in err and "hint: " in err and "Traceback" not in err, (typed, err)
        assert json.loads(out)["error"]["exit_code"] == code if "--json" in typed else not out, typed
        assert contents(folder) == before, typed
        if takes_dry_run and not words.endswith(SEEN_BY_RUNNING):
            assert run([*typed, "--dry-run"]) == code, typed
            assert says in capsys.readouterr().err and contents(folder) == before, typed
