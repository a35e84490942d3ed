"""`build --gpus`, `build --each-gpu` and `validate` as a person and a script meet them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_models as models
from documents import document
from trt_engine.backends.fake.build import MAGIC
from trt_engine.engine import Engine, payload_files
from trt_engine.records.passport import NOT_VALIDATED

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Run:
    """A command line in a folder with `net.onnx`."""
    monkeypatch.chdir(tmp_path)
    models.conv_net(Path("net.onnx"))
    return call


BUILD = ("build", "net.onnx", "--backend", "fake", "--batch", "1:2:4")


def test_an_engine_goes_from_the_machine_that_builds_it_to_the_one_that_validates_it(run: Run, tmp_path: Path):
    code, out, err = run(*BUILD, "--gpus", "RTX 4090,sm120", "-o", "net.fake")
    assert code == 0 and f"checked:   {NOT_VALIDATED}: it is for compute capability 8.9, 12.0" in out
    assert "next:      trt-engine validate net.fake" in out and NOT_VALIDATED in err
    away = tmp_path / "away"
    away.mkdir()
    for name in ("net.fake", "net.fake.json", "net.fake.reference.npz"):
        shutil.move(name, away / name)
    Path("net.onnx").unlink()
    code, out, _ = run("inspect", "away/net.fake")
    assert code == 0 and f"validation: {NOT_VALIDATED}\n" in out
    code, out, _ = run("validate", "away/net.fake", "--dry-run")
    assert code == 0 and "would:     compare it with onnxruntime on the CPU" in out
    assert Engine.open(away / "net.fake").validation == NOT_VALIDATED
    code, out, err = run("validate", "away/net.fake")
    assert code == 0 and "result:    passed on fake:0" in out and "parity:    scores: " in out
    assert NOT_VALIDATED not in err and "next:      trt-engine bench away/net.fake" in out
    assert "validation: passed on fake:0\n" in run("inspect", "away/net.fake")[1]


def test_a_measurement_says_it_in_text_and_in_its_document(run: Run):
    run(*BUILD, "--gpus", "sm89", "-o", "net.fake")
    short = ("bench", "net.fake", "--iterations", "1", "--duration", "0", "--warmup", "0")
    _, out, _ = run(*short)
    assert f"validation: {NOT_VALIDATED}" in out
    assert document(run("inspect", "net.fake", "--json")[1])["passport"]["validation"]["state"] == "deferred"


def test_an_engine_that_fails_has_its_document_its_error_and_its_exit_code(run: Run):
    run(*BUILD, "--gpus", "sm89", "-o", "net.fake")
    engine = Engine.open("net.fake")
    proto = onnx.load_from_string(engine.path.read_bytes()[len(MAGIC) :])
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.1), tensor.name))
    engine.path.write_bytes(MAGIC + proto.SerializeToString())
    Engine.seal(engine.path, replace(engine.passport, payload=payload_files(engine.path)))
    code, out, err = run("validate", "net.fake", "--json")
    told = document(out)
    assert code == 7 and told["state"] == "failed" and "`scores`" in told["failure"]
    assert "error: output `scores` of the engine differs" in err and "hint: " in err
    code, out, err = run("infer", "net.fake", "--random")
    assert code == 0 and "its validation failed on fake:0: output `scores`" in err


# ------------------------------------------------------------------------------------------------ --each-gpu


def test_one_command_makes_a_file_for_each_gpu(run: Run):
    code, out, _ = run(*BUILD, "--each-gpu", "sm120,RTX4090,8.9", "-o", "fleet/")
    assert code == 0 and "built:     2 of 2" in out
    assert "sm89:      fleet/net.sm89.engine.fake" in out and "on each GPU: trt-engine validate fleet/" in out
    for label, target in (("sm89", "8.9"), ("sm120", "12.0")):
        engine = Engine.open(f"fleet/net.{label}.engine.fake")
        assert engine.passport.requirements.compute_capabilities == (target,) and engine.verify_reference()
        assert engine.passport.build.command.endswith(f"--gpus {target} -o fleet/net.{label}.engine.fake")
    code, out, _ = run(*BUILD, "--each-gpu", "sm89", "-o", "one.fake", "--json")
    told = document(out)
    assert code == 0 and told["targets"][0]["gpu"] == "8.9" and told["built"] == 1 and told["failed"] == 0
    assert told["artifacts"]["sm89_engine"] == "one.sm89.fake" and told["targets"][0]["report"]["cached"] is True


def test_a_dry_run_of_several_writes_nothing(run: Run, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run(*BUILD, "--each-gpu", "sm89,sm120", "-o", "fleet/", "--dry-run", "--json")
    assert code == 0 and document(out)["dry_run"] is True and sorted(tmp_path.rglob("*")) == before
    assert "would:     make 2 engines" in run(*BUILD, "--each-gpu", "sm89,sm120", "-o", "fleet/", "--dry-run")[1]
