"""`bundle` through the trtexec backend, on a stand-in for the program: the source's command, its folder, what stops it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rnnt_models as rnnt

import trt_engine as te
from patience import text_of, until
from trt_engine.atomic_io import file_digest
from trt_engine.engine import Engine
from trtexec.stand_in import V10, V11, write_trtexec

NAMES = ("encoder", "predictor", "joint")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return rnnt.export(tmp_path / "export")


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, version: Any = V10, **behaviour: Any) -> Path:
    """A trtexec for this test; what it does wrong is in `behaviour`."""
    path = write_trtexec(folder, version, **behaviour)
    monkeypatch.setenv("TRT_ENGINE_TRTEXEC", str(path))
    return path


def on_disk(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "build_report.json").read_text())
    return document


@pytest.mark.slow
@pytest.mark.parametrize("version", [V10, V11], ids=["10.16", "11.1"])
def test_the_sources_command_makes_the_sources_folder(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: Any
) -> None:
    from trt_engine.cli.main import run

    installed(monkeypatch, tmp_path / "tool", version)
    out = tmp_path / "engines"
    typed = ["bundle", "--meta", str(exported), "--outdir", str(out), "--fp16", "--backend", "trtexec", "--run", "-q"]
    assert run(typed) == 0, capsys.readouterr().err
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        *(f"{name}.engine{end}" for name in NAMES for end in ("", ".json")),
        *(f"build_logs/{name}.log" for name in NAMES), "timing.cache", "build_report.json",
    }  # fmt: skip
    report = on_disk(out)
    assert report["complete"] and {"gpu", "driver"} <= set(report["environment"])
    for item in report["components"]:
        text = (out / item["log"]).read_text()
        assert text.startswith(f"# {item['command']}\n") and "--fp16" not in text.partition("&&&&")[0]
        assert "&&&& RUNNING TensorRT.trtexec" in text and "&&&& PASSED" in text and "Engine built in" in text
        assert f"--minShapes={next(iter(item['profiles'][0]['ranges']))}:" in text
        assert item["library"] == f"tensorrt {'.'.join(map(str, version))}" and item["precision"]["requested"] == "fp16"
        assert (
            item["digest"] == file_digest(out / item["engine"])
            and item["payload_bytes"] == (out / item["engine"]).stat().st_size
        )
        assert item["parity"]["passed"] and item["smoke_run"]["outputs"]
    assert [step["component"] for step in report["chain"]] == ["encoder", "predictor", "joint", "predictor"]


@pytest.mark.slow
def test_a_foreign_node_climbs_the_ladder_and_the_report_names_the_models_not_their_staged_copies(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "tool", fail="foreign_node", works_at_level=2)
    report = te.bundle(exported, tmp_path / "engines", backend="trtexec", parity=False)
    assert report.complete
    for item in report.components:
        assert item.notes["retry"].startswith("optimisation level 2")
        convert = next(step for step in item.retries if "trt-engine convert" in step)
        assert f"-o {exported.parent / item.name}.dynamo.onnx" in convert and ".staged" not in " ".join(item.retries)


@pytest.mark.slow
def test_plans_without_weights_are_built_and_what_cannot_be_proved_is_said(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without("tensorrt"))
    installed(monkeypatch, tmp_path / "tool")
    report = te.bundle(exported, tmp_path / "engines", backend="trtexec", options={"strip_weights": "on"})
    assert report.complete
    assert all(item.parity is None and "without its weights" in item.notes["parity"] for item in report.components)


def without(absent: str) -> Any:
    """`find_spec` on a machine that lacks one package."""
    find = importlib.util.find_spec
    return lambda name, *rest: None if name == absent else find(name, *rest)


@pytest.mark.slow
def test_engines_from_the_store_come_with_the_timings_they_were_built_with(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path / "tool")
    te.bundle(exported, tmp_path / "one", backend="trtexec", timing_cache=tmp_path / "mine.cache")
    second = te.bundle(exported, tmp_path / "two", backend="trtexec")
    assert [item.status for item in second.components] == ["stored"] * 3
    assert (tmp_path / "mine.cache").read_bytes() == (tmp_path / "one" / "timing.cache").read_bytes()
    assert (tmp_path / "two" / "timing.cache").is_file() and "timing" in second.artifacts


def builds(log: Path) -> bool:
    text = text_of(log)
    return "&&&& RUNNING" in text and "&&&& PASSED" not in text


@pytest.mark.slow
def test_a_bundle_that_is_killed_leaves_a_true_report_and_the_next_one_finishes_it(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components: dict[str, Any] = {name: {} for name in NAMES}
    rnnt.meta(exported.parent, components=components)
    out = tmp_path / "engines"
    installed(monkeypatch, tmp_path / "tool")
    first = te.bundle(exported, out, backend="trtexec")
    rnnt.predictor(exported.parent / "predictor.onnx", location=None)  # this one must be built anew
    told = tmp_path / "told"
    told.touch()
    installed(monkeypatch, tmp_path / "tool", silent_until_told=str(told))
    command = [sys.executable, "-c", "from trt_engine.cli.main import main; main()",
               "bundle", str(exported), "-o", str(out), "--backend", "trtexec"]  # fmt: skip
    process = subprocess.Popen(
        command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        log = out / "build_logs" / "predictor.log"
        until(lambda: builds(log) or process.poll() is not None, "the predictor is built")
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    report = on_disk(out)
    assert [item["status"] for item in report["components"]] == ["kept", "building", "pending"]
    assert report["complete"] is False and list(out.glob(".staged.*"))
    for name in NAMES:  # the old predictor among them: whole, and known by its digest
        Engine.open(out / f"{name}.engine").verify()
    installed(monkeypatch, tmp_path / "tool")
    again = te.bundle(exported, out, backend="trtexec")
    assert [item.status for item in again.components] == ["kept", "built", "kept"] and again.complete
    assert again.components[1].digest != first.components[1].digest and not list(out.glob(".*"))
    told.write_text("end")  # the tool, which nobody waits for any more
