"""The verb `deploy`: its folder is whole or not there, what exists stays, wrong requests are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trt_engine as te
from trt_engine.errors import EngineError, UsageError
from trt_engine.verbs.deploy.job import DeployJob


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
