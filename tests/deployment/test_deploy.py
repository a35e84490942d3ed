"""The verb `deploy`: its folder is whole or not there, what exists stays, wrong requests are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import trt_engine as te
from trt_engine.cli.main import run
from trt_engine.deployment.job import DeployJob
from trt_engine.deployment.targets import TARGETS
from trt_engine.errors import EngineError, SetupError, UsageError

ROOT = Path(__file__).parents[2]


def names(folder: Path) -> list[str]:
    """Every entry below the folder, hidden ones too."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_folder_that_exists_gets_new_models_and_loses_none(engines: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "models"
    te.deploy("triton", engines["images"], out)
    report = te.deploy("triton", engines["fixed"], out)
    assert {name.partition("/")[0] for name in names(out)} == {"images", "fixed"}
    assert sorted(report.files) == ["fixed/1/model.onnx", "fixed/1/model.onnx.json", "fixed/config.pbtxt"]
    before = names(out)
    (out / "images" / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match=r"`.*images` exists"):
        te.deploy("triton", [engines["flat"], engines["images"]], out)
    assert names(out) == sorted([*before, "images/mine.txt"])
    te.deploy("triton", engines["images"], out, overwrite=True)
    assert names(out) == before
    te.Engine.open(out / "images/1/model.onnx").verify()


def test_ctrl_c_half_way_leaves_nothing(
    engines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "models"
    te.deploy("triton", engines["fixed"], out)
    before, copy = names(tmp_path), DeployJob.copy_engine

    def interrupted(job: DeployJob, engine: te.Engine, name: str) -> None:
        copy(job, engine, name)
        if "flat" in name:
            raise KeyboardInterrupt

    monkeypatch.setattr(DeployJob, "copy_engine", interrupted)
    for goal in (out, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            te.deploy("triton", [engines["images"], engines["flat"]], goal)
        assert names(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_a_setup_error(
    engines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        te.deploy("triton", engines["images"], tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a folder"):
        te.deploy("triton", engines["images"], tmp_path / "link")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o555)
        with pytest.raises(SetupError, match="closed"):
            te.deploy("triton", engines["images"], tmp_path / "closed")
    with pytest.raises((SetupError, UsageError)):
        te.deploy("triton", engines["images"], tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("a/b={}", "cannot be the name"), (".hidden={}", "cannot be the name"), ("x={}\0", "no such|null")],
)
def test_names_that_no_model_can_have_are_refused(
    engines: dict[str, Path], tmp_path: Path, engine: str, expected: str
) -> None:
    with pytest.raises((UsageError, ValueError), match=expected):
        te.deploy("triton", engine.format(engines["images"]), tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_wrong_requests_are_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    out, engine = tmp_path / "models", engines["images"]
    call: Any = te.deploy
    with pytest.raises(UsageError, match="unknown target `tritn`") as caught:
        call("tritn", engine, out)
    assert caught.value.hint == "did you mean `triton`?"
    with pytest.raises(UsageError, match="two engines are named"):
        call("triton", [engine, engine], out)
    with pytest.raises(UsageError, match="no engine is given"):
        call("triton", [], out)
    with pytest.raises(UsageError, match="`triton` takes TritonConfig"):
        call("triton", engine, out, config=te.DeepstreamConfig())
    with pytest.raises(UsageError, match=r"unknown setting|no argument"):
        call("triton", engine, out, streams=3)
    broken = tmp_path / "broken.engine.onnx"
    te.Engine.open(engine).copy_to(broken)
    broken.write_bytes(b"changed")
    with pytest.raises(EngineError, match="digest differs"):
        call("triton", broken, out)
    assert not out.exists()


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_its_command_and_its_help(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", target, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"trt-engine deploy {target}" in text and "--dry-run" in text


def test_the_document_fits_its_schema(
    engines: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["deploy", "triton", str(engines["images"]), "-o", str(tmp_path / "models"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, json.loads((ROOT / "docs" / "schemas" / "deploy.json").read_text()))
    assert document["next_command"].startswith("trt-engine serve --model-repository")
