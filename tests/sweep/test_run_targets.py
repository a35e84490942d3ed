"""A plan that builds for GPUs that are not here: a cell for each, and what is left out until it is on its GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnx_models import conv_net
from trt_engine.device import info
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.records.passport import NOT_VALIDATED
from trt_engine.records.sweep import CellSpec, RunSummary
from trt_engine.verbs.run.cell_runner import missing_requirements
from trt_engine.verbs.run.cells import expand
from trt_engine.verbs.run.container import _uses_gpu
from trt_engine.verbs.run.plan_file import read_plan
from trt_engine.verbs.run.run import exit_code
from trt_engine.verbs.run.run import run as run_sweep

Cells = Callable[..., tuple[CellSpec, ...]]
AWAY = "this machine has no GPU of compute capability 8.9"


@pytest.fixture
def cells(tmp_path: Path) -> Cells:
    conv_net(tmp_path / "net.onnx")

    def make(text: str, *modes: str) -> tuple[CellSpec, ...]:
        (tmp_path / "plan.yaml").write_text(f"models: net.onnx\n{text}")
        return expand(read_plan(tmp_path / "plan.yaml"), modes)

    return make


def labels(specs: tuple[CellSpec, ...]) -> list[str]:
    return [spec.label for spec in specs]


def board(capability: str) -> info.Gpu:
    return info.Gpu(0, "NVIDIA L4", "GPU-1", 23034, capability, "580.1")


def test_each_gpu_of_a_route_is_a_cell_and_a_text_of_several_is_one(cells: Cells) -> None:
    found = cells("backends: [{backend: fake, gpus: [RTX 4090, sm120, '8.6,8.9', SM89]}, onnxruntime]\nbatches: [1, 8]")
    assert labels(found) == [
        "net-as-is-fake-sm89-b1", "net-as-is-fake-sm89-b8", "net-as-is-fake-sm120-b1", "net-as-is-fake-sm120-b8",
        "net-as-is-fake-sm86_sm89-b1", "net-as-is-fake-sm86_sm89-b8", "net-as-is-onnxruntime-b1",
        "net-as-is-onnxruntime-b8",
    ]  # fmt: skip
    assert [spec.settings.get("gpus") for spec in found[::2]] == [["8.9"], ["12.0"], ["8.6", "8.9"], None]


def test_the_plans_gpus_are_for_backends_that_build_for_them(cells: Cells) -> None:
    found = cells("gpus: [sm89, sm120]\nbackends: [onnxruntime, fake, {backend: fake, label: own, gpus: sm86}]")
    assert labels(found) == [
        "net-as-is-onnxruntime-b1", "net-as-is-fake-sm89-b1", "net-as-is-fake-sm120-b1", "net-as-is-own-sm86-b1",
    ]  # fmt: skip


def test_what_needs_the_gpu_is_left_out_where_it_is_not(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "backends: [{backend: fake, gpus: sm89}]"
    (spec,) = cells(text)
    assert spec.modes == ("build",) and spec.skipped_modes == {"bench": AWAY} and not _uses_gpu(spec)
    (measured,) = cells(text, "bench")
    assert measured.modes == () and measured.skipped_modes == {"bench": AWAY}
    skipped = missing_requirements(measured)
    assert skipped is not None and AWAY in skipped.message and "`--modes build`" in str(skipped.hint)
    monkeypatch.setattr(info, "gpus", lambda: (board("8.9"),))
    (here,) = cells(text)
    assert here.digest == spec.digest and "bench" in here.modes and here.skipped_modes == {}
    monkeypatch.setattr(info, "gpus", lambda: (board("12.0"),))
    assert cells(text)[0].skipped_modes == {"bench": AWAY}
    assert "bench" in cells("backends: fake")[0].modes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("backends: [{backend: fake, gpus: [sm89, H100]}]", r"plan.yaml:2:41: `backends\[0\].gpus\[1\]` .*Hopper"),
        ("gpus: sm88\nbackends: fake", r"plan.yaml:2:7: `gpus` .*unknown GPU `sm88`"),
        ("gpus: sm89", "`gpus` is set, but no backend of this plan builds for other GPUs"),
        ("backends: [{backend: onnxruntime, gpus: sm89}]", r"`backends\[0\].gpus` is set, but no backend of this plan"),
        ("backends: fake\nbuild: {gpus: sm89}", "`build.gpus` is not a setting"),
    ],
)
def test_a_mistake_is_told_with_its_place(cells: Cells, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cells(text)


def test_a_run_builds_for_a_gpu_that_is_not_here_and_says_what_is_left_for_it(tmp_path: Path) -> None:
    conv_net(tmp_path / "net.onnx")
    np.savez(tmp_path / "val.npz", images=np.zeros((2, 3, 8, 8), np.float32), labels=np.zeros(2, np.int64))
    (tmp_path / "plan.yaml").write_text(
        "models: net.onnx\nbackends: [{backend: fake, gpus: sm89}]\naccuracy: {dataset: val.npz, max_samples: 2}\n"
    )
    summary: RunSummary = run_sweep(tmp_path / "plan.yaml", tmp_path / "out")
    assert (summary.done, summary.failed, exit_code(summary.results)) == (1, 0, 0)
    (result,) = summary.results
    assert result.validation == NOT_VALIDATED and result.bench is None and result.parity is None
    assert f"bench was left out: {AWAY}" in result.warnings
    engine = Engine.open(tmp_path / "out" / str(result.engine))
    assert engine.passport.requirements.compute_capabilities == ("8.9",) and engine.verify_reference()
    assert engine.passport.validation is not None
    command = f"trt-engine evaluate {engine.path.name} --dataset val.npz --max-samples=2"
    assert engine.passport.validation.accuracy_command == command
    assert NOT_VALIDATED in (tmp_path / "out" / "REPORT.txt").read_text()
