"""Modes are added to a cell: what was measured stays, whatever is asked for next and however that ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import moody
from onnx_models import FLOAT, conv_net, node, save
from trt_engine.records.sweep import CellResult, RunSummary
from trt_engine.verbs.run.cell_runner import missing_tool_warnings
from trt_engine.verbs.run.cells import expand
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.run.plan_file import read_plan
from trt_engine.verbs.run.run import exit_code, prepare, preview
from trt_engine.verbs.run.run import run as run_sweep
from trt_engine.verbs.run.sweep_folder import measured_modes, merge, pending
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

TEXT = "models: [net.onnx]\nwarmup: 2\niterations: 3\nprofile: {inferences: 3}\n"
NAME = "net-as-is-onnxruntime-b1"
Run = Callable[..., RunSummary]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    conv_net(tmp_path / "net.onnx")

    def go(*modes: str, text: str = TEXT, **more: object) -> RunSummary:
        (tmp_path / "plan.yaml").write_text(text)
        return run_sweep(tmp_path / "plan.yaml", tmp_path / "out", modes=modes, **more)  # type: ignore[arg-type]

    return go


def kept(tmp_path: Path, name: str = NAME) -> bytes:
    return (tmp_path / "out" / "cells" / f"{name}.json").read_bytes()


def test_a_run_that_asks_for_nothing_a_cpu_can_do_skips_its_cells_and_says_why(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(TEXT)
    (planned,) = preview(prepare(tmp_path / "plan.yaml", tmp_path / "out", RunConfig(modes=("nsys",)))).cells
    assert planned.action == "skip" and "Nsight profiles GPUs" in planned.reason
    summary = run("nsys", "ncu")
    (result,) = summary.results
    assert (result.state, summary.skipped, exit_code(summary.results)) == ("skipped", 1, 3)
    assert result.reason == (
        "none of the requested modes apply (nsys: Nsight profiles GPUs, but the device is `cpu`; "
        "ncu: Nsight profiles GPUs, but the device is `cpu`)\nhint: `modes: profile` works on any device"
    )
    assert result.engine is None and not (tmp_path / "out" / "engines").exists()
    assert "Nsight profiles GPUs" in (tmp_path / "out" / "REPORT.txt").read_text()
    (needs,) = run("evaluate").results
    assert (needs.reason or "").endswith("(evaluate: the plan names no `dataset`)\nhint: `dataset:` in the plan")


@pytest.mark.slow
def test_what_was_measured_survives_a_run_that_asks_for_what_a_cpu_cannot_do(run: Run, tmp_path: Path) -> None:
    run("bench")
    before = kept(tmp_path)
    for rerun in (False, True):
        summary = run("nsys", rerun=rerun)
        assert (summary.done, summary.reused, summary.skipped) == (1, 1, 0)
        assert summary.warnings == ("`nsys` is skipped in 1 cell: Nsight profiles GPUs, but the device is `cpu`",)
        assert kept(tmp_path) == before
    assert "highest: net-as-is-onnxruntime-b1" in (tmp_path / "out" / "REPORT.txt").read_text()


@pytest.mark.slow
def test_a_mode_is_added_to_what_is_there_and_only_what_changed_is_measured_again(run: Run, tmp_path: Path) -> None:
    (first,) = run("bench").results
    told = preview(prepare(tmp_path / "plan.yaml", tmp_path / "out", RunConfig(modes=("profile", "ncu"))))
    (planned,) = told.cells
    assert (planned.action, planned.reason, planned.spec.modes) == (
        "run",
        "some modes are missing",
        ("build", "profile"),
    )
    assert [text.partition(" is skipped")[0] for text in told.warnings] == ["`ncu`"]
    (both,) = run("profile", "ncu").results
    assert first.bench is not None and both.bench == first.bench and both.profile is not None
    assert (both.spec.modes, measured_modes(both)) == (("build", "bench", "profile"), {"bench", "profile"})
    assert [step.name for step in both.steps] == ["bench", "look", "build", "profile"]
    assert "ncu was left out: Nsight profiles GPUs, but the device is `cpu`" in both.warnings
    assert {"record", "timeline"} <= set(both.files) and all(
        (tmp_path / "out" / f).exists() for f in both.files.values()
    )
    assert list(missing_tool_warnings(both.profile, ("profile", "nsys"))) == [
        "nsys was left out: no GPU to profile: `cpu` runs the engine"
    ]
    assert list(missing_tool_warnings(both.profile, ("profile",))) == [], (
        "the ladder takes another rung, and that is no warning"
    )
    for modes in (["bench"], ["profile"], ["build"], ["bench", "profile"]):
        assert run(*modes).reused == 1
    (other,) = run("bench", "profile", text=TEXT.replace("iterations: 3", "iterations: 4")).results
    assert other.bench is not None and other.bench.queries == 4
    assert other.profile == both.profile, "how the benchmark is measured is nothing to the profile"
    again = run("bench", rerun=True, text=TEXT.replace("iterations: 3", "iterations: 4")).results[0]
    assert again.bench is not None and again.bench.started != other.bench.started and again.profile == both.profile


@pytest.mark.slow
def test_a_mode_that_fails_is_the_state_of_its_cell_beside_what_was_measured(run: Run, tmp_path: Path) -> None:
    (first,) = run("bench").results
    (failed,) = run("evaluate", text=TEXT + "dataset: val.npz\n").results
    assert failed.state == "failed" and "does not declare how images become its inputs" in (failed.reason or "")
    assert failed.bench == first.bench is not None and measured_modes(failed) == {"bench"}
    (back,) = run("bench").results
    assert (back.state, back.reason, back.spec.modes) == ("done", None, ("build", "bench"))


@pytest.mark.slow
def test_what_the_machine_lacks_for_an_added_mode_takes_nothing_away(run: Run, tmp_path: Path) -> None:
    (before,) = run("bench").results
    (spec,) = expand(read_plan(tmp_path / "plan.yaml"), ["profile"])
    now = CellResult(spec, "skipped", reason="the backend needs `x`, not installed here\nhint: install it")
    after = merge(before, now)
    said = "profile was left out: the backend needs `x`, not installed here"
    assert after == replace(before, warnings=(*before.warnings, said))
    assert pending(after, spec) == ("build", "profile"), "it is tried again"
    assert merge(after, now) == after
    done = replace(now, state="done", reason=None)
    assert said not in merge(after, done).warnings
    assert merge(None, now) == now


@pytest.mark.slow
def test_a_cell_that_runs_out_of_memory_has_all_its_modes_at_the_batch_that_fits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = moody.known(tmp_path / "moody", monkeypatch)
    text = TEXT + "backends: [{backend: moody, options: {memory_up_to: 2}}]\nbatches: 8\n"
    (first,) = run("bench", text=text).results
    assert (first.spec.batch, first.requested_batch) == (2, 8)
    (both,) = run("profile", text=text).results
    assert moody.batches(built) == [8, 4, 2]
    assert (both.state, both.spec.batch, both.requested_batch, both.bench) == ("done", 2, 8, first.bench)
    assert both.profile is not None and both.profile.batch == 2
    assert "out of memory at batch 8: measured at 2" in both.warnings
    assert run("bench", "profile", text=text).reused == 1


@pytest.mark.slow
def test_an_engine_that_was_built_anew_is_said_beside_the_figures_of_the_old_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = run("bench").results
    passport = tmp_path / "out" / f"{first.engine}.json"
    document = msgspec.json.decode(passport.read_bytes())
    document["payload"][0]["digest"] = "sha256:" + "0" * 64  # as a builder that times its tactics makes another
    passport.write_bytes(msgspec.json.encode(document))
    (both,) = run("profile").results
    assert both.bench == first.bench
    assert (
        "bench: measured with an earlier build of the engine; `--rerun` runs all requested modes again" in both.warnings
    )


@pytest.mark.slow
def test_accuracy_that_was_lost_is_not_forgotten_over_another_mode(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="pillow reads the pictures")
    for name, gain in (("good", 1.0), ("bad", -1.0)):
        plain = save(
            tmp_path / f"{name}.onnx",
            [node("GlobalAveragePool", "images", "mean"), node("Flatten", "mean", "f"), node("Mul", "f gain", "scores")],
            {"images": (FLOAT, ["batch", 3, 8, 8])}, {"scores": (FLOAT, ["batch", 3])}, {"gain": np.float32([gain])},
        )  # fmt: skip
        classes = Postprocess("classify", classes=("red", "green", "blue"), activation="softmax")
        declare(plain, Vision(Preprocess((8, 8)), classes), plain)
    pictures = np.zeros((6, 8, 8, 3), np.uint8)
    for row in range(6):
        pictures[row, :, :, row % 3] = 250
    np.savez(tmp_path / "val.npz", images=pictures, labels=np.arange(6) % 3)
    text = "models: [{path: good.onnx, files: [bad.onnx], precisions: fp32}]\nwarmup: 2\niterations: 3\n"
    text += "accuracy: {dataset: val.npz, max_drop: 0.01}\n"
    lost = run("evaluate", text=text).results[1]
    assert (lost.state, lost.exit_code) == ("failed", 7)
    summary = run("bench", text=text)
    good, bad = summary.results
    assert good.state == "done" and good.evaluation is not None and good.bench is not None
    assert (bad.state, bad.reason, bad.exit_code) == ("failed", lost.reason, 7)
    assert bad.evaluation == lost.evaluation is not None and bad.bench is not None
    assert exit_code(summary.results) == 7
