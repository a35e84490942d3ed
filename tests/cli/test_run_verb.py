"""`trt-engine run` as a person and a script meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import trt_engine as te
from documents import document
from onnx_models import conv_net

ROOT = Path(__file__).parents[2]
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Typed) -> Typed:
    """The verb in a folder with `net.onnx`."""
    conv_net(tmp_path / "net.onnx")
    (tmp_path / "plan.yaml").write_text("models: [net.onnx]\nwarmup: 2\niterations: 3\nmodes: bench\n")
    monkeypatch.chdir(tmp_path)
    return partial(call, "run")


def test_the_result_is_on_stdout_and_the_talk_on_stderr(typed: Typed) -> None:
    code, out, err = typed("plan.yaml", "-o", "out")
    assert code == 0
    assert "net-as-is-onnxruntime-b1: median " in out and "cells:     1 done" in out
    assert "cell 1 of 1: net-as-is-onnxruntime-b1" in err and "Traceback" not in err
    assert typed("plan.yaml", "-o", "out", "-q")[2] == ""


@pytest.mark.slow
def test_a_failed_cell_ends_the_command_with_its_code_and_stands_in_the_report(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("models: [gone.onnx, net.onnx]\nwarmup: 2\niterations: 3\nmodes: bench\n")
    code, out, err = typed("plan.yaml", "-o", "out")
    assert code == 4
    assert "gone-as-is-onnxruntime-b1: FAILED: no such file" in out and "1 done, 1 FAILED" in out
    assert "gone-as-is-onnxruntime-b1 failed: no such file" in err
    assert "gone-as-is-onnxruntime-b1" in (text := te.report(tmp_path / "out")) and "No such file `gone.onnx`" in text


@pytest.mark.parametrize(
    ("words", "found", "hint"),
    [
        (["none.yaml"], "cannot read `none.yaml`: no such file or directory", "a plan in YAML"),
        (["plan.yaml", "--cells", "nothing"], "`--cells nothing` matches no cell", "net-as-is-onnxruntime-b1"),
        (["plan.yaml", "--modes", "bech"], "unknown mode `bech`", "did you mean `bench`?"),
        (["plan.yaml", "--modes", ","], "names no mode", "--modes bench,evaluate"),
        (["plan.yaml", "--nsys", "--modes", "bench"], "`--nsys` and `--modes` are both given", "leave one"),
        (["plan.yaml", "-o", "plan.yaml"], "is a file, expected a folder", "-o"),
        (["plan.yaml", "-o", "."], "contains other files", "new folder"),
        (["plan.yaml", "--container-facts", "[1"], "is not JSON", "--container"),
        (["net.onnx"], "net.onnx:", ""),
    ],
)
def test_a_wrong_call_is_told_in_one_line_with_a_hint(typed: Typed, words: list[str], found: str, hint: str) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and found in err and hint in err and "Traceback" not in err


@pytest.mark.slow
def test_the_digits_plan_says_how_good_fast_and_large_each_precision_is(typed: Typed, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="pillow reads the pictures")
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval works out COCO's figures")
    made = document(typed(str(ROOT / "examples" / "digits" / "plan.yaml"), "-o", "out", "--json")[1])
    assert (made["done"], made["failed"], made["skipped"]) == (6, 0, 0)
    cells = {cell["spec"]["label"]: cell for cell in made["results"]}
    for precision in ("fp32", "fp16", "int8"):
        for batch in (1, 8):
            cell = cells[f"digits-{precision}-onnxruntime-b{batch}"]
            assert cell["evaluation"]["metrics"]["AP"] > 0.9
            assert len(cell["bench"]["compute_ms"]) == 100 and cell["bench"]["warmup_queries"] == 50
            assert cell["profile"]["layers"]["rows"]
    assert len({cell["images_digest"] for cell in cells.values()}) == 1
    sizes = [cells[f"digits-{precision}-onnxruntime-b8"]["engine_bytes"] for precision in ("fp32", "int8")]
    assert sizes[1] < sizes[0] / 3
    text = te.report(tmp_path / "out")
    assert all(label in text for label in cells) and "0.92" in text


def test_the_three_ways_are_skipped_with_reasons_where_there_is_no_gpu(typed: Typed) -> None:
    planned = document(typed(str(ROOT / "examples" / "three-way.yaml"), "--dry-run", "--json")[1])
    routes = {(cell["spec"]["backend"], *cell["spec"]["providers"]) for cell in planned["cells"]}
    assert routes == {("onnxruntime", "cuda"), ("tensorrt",), ("onnxruntime", "tensorrt", "cuda")}
    assert {cell["spec"]["precision"] for cell in planned["cells"]} == {"fp32", "fp16", "int8"}
    assert all({"build", "bench", "evaluate"} <= set(cell["spec"]["modes"]) for cell in planned["cells"])
    assert {cell["spec"]["settings"]["dataset"] for cell in planned["cells"]} == {"digits/val"}


def test_the_words_of_older_scripts_are_taken_together(typed: Typed) -> None:
    code, out, _ = typed("plan.yaml", "-o", "out", "--benchmark", "--nsys", "--ncu", "--dry-run", "--json")
    assert code == 0
    (cell,) = json.loads(out)["cells"]
    assert cell["spec"]["modes"] == ["build", "bench"], "Nsight profiles GPUs, and `bench` is not lost beside it"


def test_the_dry_run_of_a_container_starts_what_the_run_would(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code, out, _ = typed("plan.yaml", "-o", "out", "--container", "img", "--fail-fast", "--dry-run")
    assert code == 0 and "--fail-fast" in out.partition("would start ")[2]
