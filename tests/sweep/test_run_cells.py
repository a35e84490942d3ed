"""A run does what is missing and nothing else, whatever stopped it, and one bad cell is one line of its report."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import moody
from onnx_models import FLOAT, conv_net, node, save
from patience import HANG_S, runs, until
from trt_engine.atomic_io import os_error
from trt_engine.cli import main as cli
from trt_engine.errors import DeviceLost, ModelError, SetupError, UsageError
from trt_engine.records.bench import Protocol
from trt_engine.records.sweep import CellResult, RunManifest, RunSummary
from trt_engine.trt.failure_causes import Cause, make_error
from trt_engine.verbs.run import sweep_folder
from trt_engine.verbs.run.cell_runner import move_raw_files
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.run.run import exit_code, prepare, preview
from trt_engine.verbs.run.run import run as run_sweep
from trt_engine.verbs.run.sweep_folder import SweepFolder
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

QUICK = "warmup: 2\niterations: 3\nmodes: bench\n"
MAIN = "from trt_engine.cli.main import main; main()"
Run = Callable[..., RunSummary]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of builds of the backend `moody`."""
    return moody.known(tmp_path / "moody", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    conv_net(tmp_path / "net.onnx")

    def go(text: str, **more: object) -> RunSummary:
        (tmp_path / "plan.yaml").write_text(text)
        return run_sweep(tmp_path / "plan.yaml", tmp_path / "out", **more)  # type: ignore[arg-type]

    return go


def plan(batches: str, moods: str = "", more: str = "") -> str:
    return (
        f"models: [net.onnx]\nbackends: [{{backend: moody, options: {{{moods}}}}}]\nbatches: [{batches}]\n{QUICK}{more}"
    )


def states(summary: RunSummary) -> dict[int, str]:
    return {int(result.spec.label.rpartition("-b")[2]): result.state for result in summary.results}


def reason(summary: RunSummary, at: int) -> str:
    return summary.results[at].reason or ""


# ------------------------------------------------------------------------------------------------ what it leaves


def test_a_run_leaves_the_tree_that_is_promised(run: Run, tmp_path: Path) -> None:
    summary = run("models: net.onnx\nbatches: [1, 2]\n" + QUICK + "title: Two\n", command="typed")
    out, labels = tmp_path / "out", ["net-as-is-onnxruntime-b1", "net-as-is-onnxruntime-b2"]
    assert (summary.done, summary.failed, summary.skipped, summary.reused, summary.complete) == (2, 0, 0, 0, True)
    assert (out / "plan.yaml").read_bytes() == (tmp_path / "plan.yaml").read_bytes()
    assert all(label in (out / "REPORT.txt").read_text() for label in labels) and (out / "report.html").stat().st_size
    document = json.loads((out / "run.json").read_text())
    assert (document["schema"], document["command"], document["title"]) == ("trt-engine/run-manifest", "typed", "Two")
    manifest = msgspec.json.decode((out / "run.json").read_bytes(), type=RunManifest)
    assert [spec.label for spec in manifest.cells] == labels
    for label, batch in zip(labels, (1, 2), strict=True):
        cell = msgspec.json.decode((out / "cells" / f"{label}.json").read_bytes(), type=CellResult)
        assert (cell.state, cell.exit_code, cell.spec.batch) == ("done", 0, batch)
        assert cell.engine is not None and (out / cell.engine).stat().st_size == cell.engine_bytes
        assert cell.bench is not None and cell.bench.batch == batch and cell.bench.engine == cell.engine
        assert (cell.bench.warmup_queries, cell.bench.queries) == (2, 3)
        assert cell.parity is not None and cell.parity.passed
        assert {step.name for step in cell.steps} == {"look", "build", "bench"}
        record = json.loads((out / cell.files["record"]).read_text())
        assert record["schema"] == "trt-engine/bench" and tuple(record["samples_ms"]) == cell.bench.compute_ms
        assert (out / cell.files["log"]).read_text()
        assert str(tmp_path) not in (out / "cells" / f"{label}.json").read_text(), "a run can be moved and sent"


@pytest.mark.slow
def test_a_model_that_is_not_there_is_its_cells_reason_and_the_rest_goes_on(run: Run) -> None:
    summary = run("models: [gone.onnx, net.onnx]\n" + QUICK)
    assert [result.state for result in summary.results] == ["failed", "done"]
    first = summary.results[0]
    assert first.exit_code == exit_code(summary.results) == 4
    assert "no such file" in reason(summary, 0) and "\nhint: " in reason(summary, 0)


@pytest.mark.slow
def test_the_exit_code_is_the_failed_cells_own_where_they_agree(run: Run, built: Path) -> None:
    summary = run(plan("2, 3", "fail_at: 2"))
    assert states(summary) == {2: "failed", 3: "done"}
    assert exit_code(summary.results) == 5
    assert reason(summary, 0) == "it does not want to\nhint: ask again tomorrow"
    mixed = run("models: [gone.onnx, net.onnx]\nbackends: [{backend: moody, options: {fail_at: 1}}]\n" + QUICK)
    assert sorted(result.exit_code for result in mixed.results) == [4, 5]
    assert exit_code(mixed.results) == 1


@pytest.mark.slow
def test_fail_fast_stops_at_the_first_failure(run: Run, built: Path) -> None:
    summary = run(plan("1, 2, 3", "fail_at: 2"), fail_fast=True)
    assert states(summary) == {1: "done", 2: "failed", 3: "waiting"}
    assert not summary.complete
    assert moody.batches(built) == [1, 2]


def test_what_the_machine_lacks_is_skipped_with_its_reason_before_anything_is_made(
    run: Run, built: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", images=np.zeros((4, 3, 8, 8), np.float32))
    summary = run(plan("1", "refuse: libmood", "precisions: int8\ncalib_data: data.npz\n"))
    assert (summary.skipped, exit_code(summary.results)) == (1, 3), "nothing was done"
    assert reason(summary, 0) == "`libmood` is not here\nhint: install `libmood`"
    assert moody.batches(built) == []
    assert not (tmp_path / "out" / "models").exists(), "nothing is quantised for a cell that cannot be built"


@pytest.mark.slow
def test_operators_that_only_tensorrt_runs_are_never_sent_to_onnx_runtime(run: Run, tmp_path: Path) -> None:
    sides = {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, ["batch", 4])}
    save(
        tmp_path / "nms.onnx",
        [node("EfficientNMS_TRT", "x", "y", domain="trt.plugins")],
        *sides,
        domains={"trt.plugins": 1},
    )
    summary = run("models: [nms.onnx, {path: net.onnx, precisions: mxfp8}]\ncalib_data: random\n" + QUICK)
    assert [result.state for result in summary.results] == ["skipped", "skipped"]
    assert "EfficientNMS_TRT" in reason(summary, 0) and "only TensorRT supports" in reason(summary, 0)
    assert "TRT_MXFP8DequantizeLinear" in reason(summary, 1)
    assert "tensorrt" in reason(summary, 1).partition("hint: ")[2] and "quantize again" in reason(summary, 1)
    assert not (tmp_path / "out" / "models").exists()


def test_raw_profiles_lie_in_the_folders_people_look_for_them_in(tmp_path: Path) -> None:
    place = tmp_path / "profiles" / "a"
    place.mkdir(parents=True)
    for name in ("profile.nsys-rep", "nsys.log", "timeline.json"):
        (place / name).write_text(name)
    moved = move_raw_files(place, tmp_path / "nsight-systems" / "a", ("profile.nsys-rep", "profile.sqlite", "nsys.log"))
    target = tmp_path / "nsight-systems" / "a" / "profile.nsys-rep"
    assert moved[place / "profile.nsys-rep"] == target and target.read_text() == "profile.nsys-rep"
    assert [path.name for path in place.iterdir()] == ["timeline.json"]
    assert move_raw_files(place, tmp_path / "nsight-compute" / "a", ("profile.ncu-rep",)) == {}
    assert not (tmp_path / "nsight-compute").exists()


# ------------------------------------------------------------------------------------------------ crashes and memory


@pytest.mark.slow
def test_out_of_memory_halves_the_batch_and_says_so(run: Run, built: Path) -> None:
    summary = run(plan("8", "memory_up_to: 2"))
    (result,) = summary.results
    assert moody.batches(built) == [8, 4, 2]
    assert (result.state, result.requested_batch, result.spec.batch) == ("done", 8, 2)
    assert result.spec.label.endswith("-b8"), "it is found again under the plan's own name"
    assert result.bench is not None and result.bench.batch == 2
    assert "out of memory at batch 8: measured at 2" in result.warnings
    assert run(plan("8", "memory_up_to: 2")).reused == 1
    assert moody.batches(built) == [8, 4, 2]


# ------------------------------------------------------------------------------------------------ going on


@pytest.mark.slow
def test_a_second_run_does_nothing_and_a_changed_plan_only_what_changed(run: Run, built: Path) -> None:
    assert run(plan("1, 2")).reused == 0
    again = run(plan("1, 2"))
    assert (again.done, again.reused, moody.batches(built)) == (2, 2, [1, 2])
    more = run(plan("1, 2, 3"))
    assert (more.done, more.reused, moody.batches(built)) == (3, 2, [1, 2, 3])
    fewer = run(plan("2"))
    assert (fewer.done, fewer.reused) == (1, 1)
    assert sorted(path.name for path in (Path(fewer.folder) / "cells").glob("*.json")) == ["net-as-is-moody-b2.json"]
    assert len(list((Path(fewer.folder) / "cells" / "old").glob("*.json"))) == 2


@pytest.mark.slow
def test_only_does_the_cells_named_and_keeps_the_others_results(run: Run, built: Path) -> None:
    run(plan("1"))
    summary = run(plan("1, 2, 3"), cells=["*-b3"])
    assert states(summary) == {1: "done", 2: "waiting", 3: "done"}
    assert moody.batches(built) == [1, 3]


@pytest.mark.slow
def test_a_model_is_quantised_once_for_all_cells_and_runs_that_share_it(run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", images=np.random.default_rng(0).random((8, 3, 8, 8)).astype(np.float32))
    text = (
        "models: [{path: net.onnx, precisions: int8}]\ncalib_data: data.npz\nbatches: [1, 2]\n"
        "backends: [onnxruntime, {backend: onnxruntime, label: basic, options: {graph_optimization: basic}}]\n" + QUICK
    )
    summary = run(text)
    assert summary.done == 4
    made = tmp_path / "out" / "models" / "net-int8-onnxruntime-cpu.onnx"
    logs = [(tmp_path / "out" / result.files["log"]).read_text() for result in summary.results]
    assert ["of an earlier cell" in log for log in logs] == [False, True, True, True]
    before = made.stat().st_mtime_ns
    run(text, rerun=True)
    assert made.stat().st_mtime_ns == before
    np.savez(tmp_path / "data.npz", images=np.random.default_rng(1).random((8, 3, 8, 8)).astype(np.float32))
    assert run(text).reused == 0
    assert made.stat().st_mtime_ns != before


@pytest.mark.slow
def test_a_processor_without_kernels_for_a_precision_is_said_and_measured(run: Run) -> None:
    summary = run("models: [{path: net.onnx, precisions: [fp32, fp16]}]\n" + QUICK)
    assert [result.state for result in summary.results] == ["done", "done"]
    said = "the graph is fp16, but the engine runs in another precision: found fp32 100 %"
    assert any(text.startswith(said) and "no fp16 kernel" in text for text in summary.results[1].warnings)
    assert summary.results[1].dtype_shares.get("fp32"), "what ran stands in the record"
    assert [result.compute_dtype for result in summary.results] == [None, "fp32"]


# ------------------------------------------------------------------------------------------------ accuracy


def colours(path: Path, gain: float) -> Path:
    """Scores red, green and blue by the mean of each channel; `gain` below 0 turns its answers round."""
    nodes = [
        node("GlobalAveragePool", "images", "mean"), node("Flatten", "mean", "flat"), node("Mul", "flat gain", "scores"),
    ]  # fmt: skip
    sides = {"images": (FLOAT, ["batch", 3, 8, 8])}, {"scores": (FLOAT, ["batch", 3])}
    plain = save(path, nodes, *sides, {"gain": np.float32([gain])})
    classes = Postprocess("classify", classes=("red", "green", "blue"), activation="softmax")
    return declare(plain, Vision(Preprocess((8, 8)), classes), plain)


@pytest.mark.slow
def test_a_cell_that_lost_more_than_it_may_has_failed_with_its_figures_kept(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="pillow reads the pictures")
    colours(tmp_path / "good.onnx", 1.0)
    colours(tmp_path / "bad.onnx", -1.0)
    pictures = np.zeros((6, 8, 8, 3), np.uint8)
    for row in range(6):
        pictures[row, :, :, row % 3] = 250
    np.savez(tmp_path / "val.npz", images=pictures, labels=np.arange(6) % 3)
    text = "models: [{path: good.onnx, files: [bad.onnx], precisions: fp32}]\naccuracy: {dataset: val.npz, max_drop: 0.01}\n"
    summary = run(text + QUICK.replace("bench", "[bench, evaluate]"))
    first, second = summary.results
    assert (first.state, second.state, second.exit_code) == ("done", "failed", 7)
    assert first.evaluation is not None and first.evaluation.metrics["top1"] == 1.0
    assert second.evaluation is not None and second.evaluation.passed is False and second.bench is not None
    assert "a drop of 1.0000, allowed is 0.01" in (second.reason or "")
    assert first.images_digest == second.images_digest is not None, "the same pictures in every cell"


def gated(folder: Path, files: str) -> str:
    """A plan of a model and files held against it; its pictures and models lie in `folder`."""
    colours(folder / "good.onnx", 1.0)
    colours(folder / "bad.onnx", -1.0)
    pictures = np.zeros((6, 8, 8, 3), np.uint8)
    for row in range(6):
        pictures[row, :, :, row % 3] = 250
    np.savez(folder / "val.npz", images=pictures, labels=np.arange(6) % 3)
    text = f"models: [{{path: good.onnx, files: [{files}], precisions: fp32}}]\n"
    return text + "accuracy: {dataset: val.npz, max_drop: 0.01}\n" + QUICK.replace("bench", "evaluate")


@pytest.mark.slow
def test_a_gate_that_had_no_baseline_is_said_and_made_up_for_when_there_is_one(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="pillow reads the pictures")
    text = gated(tmp_path, "bad.onnx")
    alone = run(text, cells=["good-bad-*"])
    first, other = alone.results
    assert (first.state, other.state) == ("waiting", "done")
    assert other.evaluation is not None and other.evaluation.passed is None
    said = f"`max_drop` was not applied: the baseline `{first.spec.label}` has no `top1`"
    assert said in other.warnings
    both = run(text)
    assert both.reused == 1, "nothing of the cell is measured again"
    kept = both.results[1]
    assert (kept.state, kept.exit_code) == ("failed", 7) and "a drop of 1.0000" in (kept.reason or "")
    assert said not in kept.warnings and kept.evaluation is not None and kept.evaluation.passed is False
    assert exit_code(both.results) == 7
    cell = msgspec.json.decode((tmp_path / "out" / "cells" / f"{kept.spec.label}.json").read_bytes(), type=CellResult)
    assert cell == kept


@pytest.mark.slow
def test_the_command_of_a_cells_record_measures_the_same_way_again(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = run("models: net.onnx\nbatches: 2\n" + QUICK).results
    assert cell.bench is not None
    command = json.loads((tmp_path / "out" / cell.files["record"]).read_text())["command"]
    program, *words = shlex.split(command)
    assert program == "trt-engine"
    monkeypatch.chdir(tmp_path / "out")
    capsys.readouterr()
    assert cli.run([*words, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert msgspec.convert(again["protocol"], Protocol) == cell.bench.protocol
    assert (again["warmup_queries"], again["queries"], again["batch"]) == (2, 3, 2)


def test_a_disk_that_is_full_is_a_failure_and_what_the_machine_lacks_is_none() -> None:
    full = os_error(OSError(errno.ENOSPC, "no space"), Path("x"))
    assert (
        not full.machine_specific
        and not DeviceLost("gone").machine_specific
        and not ModelError("broken").machine_specific
    )
    assert SetupError("no provider").machine_specific
    plugin = make_error(Cause("plugin_not_found", "Plugin not found"), "the build of `x.onnx`")
    assert isinstance(plugin, ModelError) and plugin.machine_specific
    assert pickle.loads(pickle.dumps(plugin)).machine_specific, "it comes from another process"


# ------------------------------------------------------------------------------------------------ two at once, and the end


def started(tmp_path: Path, text: str, *more: str) -> subprocess.Popen[str]:
    (tmp_path / "plan.yaml").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "run", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "out"), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until(lambda: condition() or process.poll() is not None, "the run came so far")
    assert process.poll() is None, process.communicate()


@pytest.mark.slow
def test_a_run_that_is_killed_half_way_and_started_again_does_only_what_is_missing(
    run: Run, built: Path, tmp_path: Path
) -> None:
    text = plan("1, 2, 3, 4", "wait_at: 3")
    process = started(tmp_path, text)
    wait_for(lambda: len(moody.batches(built)) == 3, process)
    children = [int(line.split()[2]) for line in built.read_text().splitlines()]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not runs(children[2]), "a cell's process outlives the run")
    assert sorted(path.stem[-2:] for path in (tmp_path / "out" / "cells").glob("*.json")) == ["b1", "b2"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "out" / "cells").glob("*.json")}
    built.with_name("go").touch()
    summary = run(text)
    assert (summary.done, summary.reused, summary.complete) == (4, 2, True)
    assert moody.batches(built) == [1, 2, 3, 3, 4], "the first two were neither built nor measured again"
    assert all((tmp_path / "out" / "cells" / name).read_bytes() == raw for name, raw in before.items())


@pytest.mark.slow
def test_how_to_go_on_has_the_modes_and_cells_that_were_asked_for(run: Run, built: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan("1, 2, 3", "wait_at: 2"))
    words = ["--modes", "bench", "--cells", "*-b2", "--cells", "*-b3"]
    process = started(tmp_path, plan("1, 2, 3", "wait_at: 2"), *words)
    wait_for(lambda: len(moody.batches(built)) == 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "--modes bench" in err and "--cells net-as-is-moody-b2 --cells net-as-is-moody-b3" in err


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(run: Run, built: Path, tmp_path: Path) -> None:
    text = plan("1, 2, 3", "wait_at: 2")
    process = started(tmp_path, text)
    wait_for(lambda: len(moody.batches(built)) == 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "1 done, 2 not done" in out and "Traceback" not in err
    assert f"trt-engine run {tmp_path / 'plan.yaml'} -o {tmp_path / 'out'}" in err
    kept = json.loads((tmp_path / "out" / "cells" / "net-as-is-moody-b2.json").read_text())
    assert (kept["state"], kept["exit_code"]) == ("interrupted", 130)
    built.with_name("go").touch()
    assert (summary := run(text)).complete and summary.reused == 1
    assert moody.batches(built) == [1, 2, 2, 3]


@pytest.mark.slow
def test_two_runs_in_one_folder_at_once_are_refused(run: Run, built: Path, tmp_path: Path) -> None:
    process = started(tmp_path, plan("1", "wait_at: 1"))
    wait_for(lambda: len(moody.batches(built)) == 1, process)
    with pytest.raises(SetupError, match="another run is using"):
        run(plan("2"))
    built.with_name("go").touch()
    assert process.communicate(timeout=HANG_S) and process.returncode == 0
    assert moody.batches(built) == [1]


def test_a_folder_whose_run_was_killed_after_any_of_its_first_files_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    for home, name in ((sweep_folder, "write_document"), (sweep_folder.atomic_io, "write_atomic")):
        monkeypatch.setattr(home, name, lambda path, *_, **__: written.append(path.name))
    with contextlib.suppress(AttributeError):  # of the manifest
        SweepFolder(tmp_path).begin(None, b"", "")  # type: ignore[arg-type]
    assert len(written) == 2
    for count in range(3):
        (tmp_path / str(count)).mkdir()
        for name in written[:count]:
            (tmp_path / str(count) / name).write_text("")
        SweepFolder.prepare(tmp_path / str(count))


@pytest.mark.slow
def test_a_folder_with_other_things_in_it_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="contains other files"):
        run("models: net.onnx\n" + QUICK)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert run("models: net.onnx\n" + QUICK, overwrite=True).done == 1


@pytest.mark.slow
def test_a_cell_kept_from_another_machine_is_said(run: Run, tmp_path: Path) -> None:
    run("models: net.onnx\n" + QUICK)
    path = tmp_path / "out" / "cells" / "net-as-is-onnxruntime-b1.json"
    path.write_text(path.read_text().replace('"cpu": "', '"cpu": "Another '))
    (warning,) = run("models: net.onnx\n" + QUICK).warnings
    assert "measured on another machine or with other versions (cpu)" in warning and "--rerun" in warning


# ------------------------------------------------------------------------------------------------ the outlook


@pytest.mark.slow
def test_the_outlook_says_what_each_cell_would_do_and_writes_nothing(run: Run, built: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan("1, 2"))
    fresh = preview(prepare(tmp_path / "plan.yaml", tmp_path / "out", RunConfig()))
    assert [(cell.action, cell.reason, cell.seconds) for cell in fresh.cells] == [("run", "new", None)] * 2
    assert fresh.seconds is None and not (tmp_path / "out").exists()
    run(plan("1, 2", "fail_at: 2"))
    (tmp_path / "plan.yaml").write_text(plan("1, 2, 3", "fail_at: 2"))
    told = preview(prepare(tmp_path / "plan.yaml", tmp_path / "out", RunConfig(cells=("*-b1", "*-b2"))))
    assert [(cell.action, cell.reason) for cell in told.cells] == [
        ("keep", "already done"), ("run", "was failed"), ("leave", "excluded by `--cells`"),
    ]  # fmt: skip
    beside = preview(prepare(tmp_path / "plan.yaml", tmp_path / "another", RunConfig()))
    assert beside.cells[0].seconds is not None, "the run beside it knows how long such a cell takes"
    assert moody.batches(built) == [1, 2]
