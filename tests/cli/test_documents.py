"""The JSON documents of the verbs: on stdout, and in the files that the verbs write."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow reads the pictures")

from PIL import Image

from documents import document
from onnx_models import FLOAT, node, save
from reporting.sample_runs import cpu_run
from trt_engine.cli.main import run
from trt_engine.command_line.output import OutputOptions
from trt_engine.records import base
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

SHORT = ("--duration", "50ms", "--warmup", "0")
VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    "bench": (("net.onnx", *SHORT, "-o", "out"), "out/records.jsonl"),
    "bundle": (("meta.json", "-o", "out"), "out/build_report.json"),
    "compare": (("net.onnx", "net.onnx", "--duration", "200ms", "-o", "out"), "out/compare.json"),
    "evaluate": (("net.onnx", "--dataset", "val.npz", "-o", "out"), "out/metrics.json"),
    "infer": (("net.onnx", "--image", "x.png", "-o", "out.json"), "out.json"),
    "loadtest": (("net.onnx", "--duration", "100ms", "--warmup", "0", "-o", "out"), "out/loadtest.jsonl"),
    "profile": (("net.onnx", *SHORT, "-o", "out"), "out/profile.json"),
    "ranges": (("net.onnx", "-o", "out.json"), "out.json"),
    "run": (("plan.yaml", "-o", "out"), "out/run.json"),
    "search": (
        ("net.onnx", "--dataset", "val.npz", "--calib-data", "cal.npz", "--budget", "0.5", "-o", "out"),
        "out/search.json",
    ),
    "size": (("net.onnx", *SHORT, "--max-batch", "1", "-o", "out"), "out/size.json"),
    "upgrade-check": (("old", "old", "-o", "out"), "out/upgrade.json"),
}
"""Verb, to its arguments and the file that it writes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with data, a plan, a bundle and a run, and the engine in a store."""
    made = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    save(
        made / "net.onnx",
        [
            node("GlobalAveragePool", "images", "mean"),
            node("Flatten", "mean", "flat"),
            node("MatMul", "flat w", "scores", name="first"),
        ],
        {"images": (FLOAT, ["batch", 3, 4, 4])},
        {"scores": (FLOAT, ["batch", 3])},
        {"w": np.eye(3, dtype=np.float32)},
    )
    classes = Postprocess("classify", classes=("red", "green", "blue"), activation="softmax")
    declare(made / "net.onnx", Vision(Preprocess((4, 4)), classes), made / "net.onnx")
    images = rng.uniform(0, 1, (8, 3, 4, 4)).astype(np.float32)
    np.savez(made / "val.npz", images=images, labels=images.mean((2, 3)).argmax(1))
    np.savez(made / "cal.npz", images=images)
    Image.new("RGB", (9, 7), "red").save(made / "x.png")
    cpu_run(made / "ran")
    (made / "plan.yaml").write_text("models: [net.onnx]\nwarmup: 2\niterations: 3\nmodes: bench\n")
    (made / "meta.json").write_text(json.dumps({"name": "one", "components": {"net": {"file": "net.onnx"}}}))
    return made


SLOW = ("run", "upgrade-check")


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow) if verb in SLOW else verb for verb in VERBS]
)
def test_a_document_has_every_warning_of_stderr_on_stdout_and_in_its_file(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning is logged before the verb starts, one after it has written its file."""
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder / "store"))
    monkeypatch.chdir(folder)
    log, start, write = logging.getLogger("trt_engine.test"), OutputOptions.start_log, base.write_json

    def early(given: OutputOptions) -> None:
        start(given)
        log.warning("told early")

    def late(path: Path, value: Any, **given: Any) -> Path:
        write(path, value, **given)
        log.warning("told late")
        return path

    def call(verb: str, *words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["trt-engine", verb, *words])
        assert run([verb, *words]) in (0, 8), capsys.readouterr().err
        return capsys.readouterr()

    if "old" in VERBS[verb][0] and not (folder / "old").exists():
        call("run", "plan.yaml", "-o", "old")
    monkeypatch.setattr(OutputOptions, "start_log", early)
    monkeypatch.setattr(base, "write_json", late)
    words, place = VERBS[verb]
    said = [f"{verb}-{word}" if word.startswith("out") else word for word in words]
    out, err = call(verb, *said, "--json")
    printed = document(out)
    assert printed["command"] == " ".join(["trt-engine", verb, *said, "--json"])
    told = re.findall(r"^\[ *[\d.]+ s\] warning: (.*)$", err, re.MULTILINE)
    assert "told early" in told and set(told) <= set(printed["warnings"])
    text = (folder / f"{verb}-{place}").read_text()
    if place.endswith(".jsonl"):  # a record for each measurement
        assert "told early" in json.loads(text)["warnings"]
        return
    written = json.loads(text)
    assert "told late" in told and written["warnings"] == printed["warnings"]
    assert written == printed or verb == "run"


KEPT: dict[str, tuple[tuple[str, ...], str]] = {
    "build": (("net.onnx", "-o", "out.onnx"), "out.onnx"),
    "cast": (("net.onnx", "--to", "fp16", "-o", "out.onnx"), "out.onnx"),
    "convert": (("net.onnx", "-o", "out.onnx"), "out.onnx"),
    "quantize": (("net.onnx", "--to", "int8", "--calib-data", "cal.npz", "-o", "out.onnx"), "out.onnx"),
    "report": (("ran", "-o", "out.html"), "out.html"),
    "pack": (("ran", "-o", "out.zip"), "out.zip"),
    "upgrade-check": (("ran", "ran", "-o", "out"), "out/upgrade.json"),
    **{verb: VERBS[verb] for verb in ("compare", "evaluate", "infer", "profile", "ranges")},
}


@pytest.mark.parametrize("verb", KEPT)
def test_a_file_that_is_there_is_kept_before_anything_is_done_unless_overwrite_is_given(
    verb: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder / "store"))
    monkeypatch.chdir(folder)
    words, place = KEPT[verb]
    typed = [verb, *(str(tmp_path / word) if word.startswith("out") else word for word in words)]
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    assert run(["1h" if word in ("50ms", "200ms") else word for word in typed]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "--overwrite" in told.err.partition("hint: ")[2] and file.read_text() == "mine"
    assert run([*typed, "--overwrite"]) in (0, 8), capsys.readouterr().err
    assert file.read_bytes() != b"mine"
