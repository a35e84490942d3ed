"""A plan's cells: what they are called, what makes one another cell, and what does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onnx_models import FLOAT, conv_net, node, save
from trt_engine.errors import UsageError
from trt_engine.records.sweep import CellSpec
from trt_engine.verbs.run.cells import expand, parse_modes, safe_label, select
from trt_engine.verbs.run.plan_file import read_plan

Cells = Callable[..., tuple[CellSpec, ...]]


@pytest.fixture
def cells(tmp_path: Path) -> Cells:
    conv_net(tmp_path / "net.onnx")

    def make(text: str, *modes: str, name: str = "plan.yaml") -> tuple[CellSpec, ...]:
        (tmp_path / name).write_text(text)
        return expand(read_plan(tmp_path / name), modes)

    return make


def labels(specs: tuple[CellSpec, ...]) -> list[str]:
    return [spec.label for spec in specs]


def test_every_model_precision_backend_and_batch_is_a_cell_in_the_order_of_the_plan(cells: Cells) -> None:
    found = cells(
        "models: [{path: net.onnx, precisions: [fp32, int8]}]\nbatches: [1, 8]\n"
        "backends: [onnxruntime, {backend: onnxruntime, providers: [cuda]}, {backend: tensorrt, label: trt}]\n"
    )
    assert labels(found)[:6] == [
        "net-fp32-onnxruntime-b1", "net-fp32-onnxruntime-b8", "net-fp32-onnxruntime-cuda-b1",
        "net-fp32-onnxruntime-cuda-b8", "net-fp32-trt-b1", "net-fp32-trt-b8",
    ]  # fmt: skip
    assert len(found) == 12
    assert [spec.device for spec in found[:6:2]] == ["cpu", "cuda:0", "cuda:0"]


def test_a_model_is_built_as_it_is_unless_a_precision_is_named(cells: Cells) -> None:
    assert labels(cells("models: net.onnx")) == ["net-as-is-onnxruntime-b1"]
    assert labels(cells("models: net.onnx\nprecisions: fp16")) == ["net-fp16-onnxruntime-b1"]


def test_a_file_that_is_quantised_already_has_its_label_and_precision(cells: Cells, tmp_path: Path) -> None:
    conv_net(tmp_path / "theirs.onnx", width=8)
    found = cells(
        "models:\n- path: net.onnx\n  precisions: fp32\n  files:\n"
        "  - theirs.onnx\n  - {path: theirs.onnx, label: int8}\n"
        "  - {path: theirs.onnx, label: nvfp4 awq, precision: nvfp4}\n"
    )
    assert [(spec.label, spec.precision, spec.prequantized, spec.source) for spec in found] == [
        ("net-fp32-onnxruntime-b1", "fp32", False, "net.onnx"),
        ("net-theirs-onnxruntime-b1", "as-is", True, "theirs.onnx"),
        ("net-int8-onnxruntime-b1", "int8", True, "theirs.onnx"),
        ("net-nvfp4_awq-onnxruntime-b1", "nvfp4", True, "theirs.onnx"),
    ]


def test_a_path_with_a_label_behind_a_colon_is_a_file_in_that_precision(cells: Cells) -> None:
    (spec,) = cells("models: ['net.onnx:fp16']")
    assert (spec.label, spec.precision, spec.prequantized, spec.source) == (
        "net-fp16-onnxruntime-b1",
        "fp16",
        True,
        "net.onnx",
    )


def test_a_model_with_a_fixed_batch_is_measured_at_it(cells: Cells, tmp_path: Path) -> None:
    sides = {"x": (FLOAT, [64, 3])}, {"y": (FLOAT, [64, 3])}
    save(tmp_path / "vit_bs_064.onnx", [node("Relu", "x", "y")], *sides)
    found = cells("models: [vit_bs_064.onnx, net.onnx]\nbatches: [1, 8]")
    assert [(spec.label, spec.settings.get("fixed_batch", False)) for spec in found] == [
        ("vit_bs_064-as-is-onnxruntime-b64", True),
        ("net-as-is-onnxruntime-b1", False),
        ("net-as-is-onnxruntime-b8", False),
    ]


def test_labels_are_safe_as_file_names_and_unique(cells: Cells, tmp_path: Path) -> None:
    assert safe_label("../ä b/c:d") == "b_c_d"
    assert safe_label("...") == "model"
    with pytest.raises(UsageError, match=r"plan.yaml:1:20: `models\[1\]` has the name `net`"):
        cells("models: [net.onnx, ./net.onnx]")
    with pytest.raises(UsageError, match="two cells called `net-as-is-onnxruntime-b1`"):
        cells("models: net.onnx\nbackends: [onnxruntime, {backend: onnxruntime, options: {graph_optimization: basic}}]")
    with pytest.raises(UsageError, match="characters"):
        cells(f"models: [{{path: net.onnx, name: {'n' * 200}}}]")


def test_modes_leave_out_what_there_is_nothing_for(cells: Cells) -> None:
    (spec,) = cells("models: net.onnx")
    assert spec.modes == ("build", "bench", "profile"), "no dataset, and Nsight profiles GPUs"
    (spec,) = cells("models: net.onnx\ndataset: val\nbackends: tensorrt")
    assert spec.modes == ("build", "bench", "evaluate", "profile", "nsys", "ncu")
    (spec,) = cells("models: net.onnx\ndataset: val\nmodes: benchmark")
    assert spec.modes == ("build", "bench")
    (spec,) = cells("models: net.onnx\nmodes: all", "build")
    assert spec.modes == ("build",)
    with pytest.raises(UsageError, match="unknown mode `benhc`"):
        parse_modes(["benhc"])


# ------------------------------------------------------------------------------------------------ what makes another cell

QUANTISED = "models: [{path: net.onnx, precisions: [fp32, int8]}]\ncalib_data: data\nmodes: bench\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.npy").write_bytes(b"one")
    return tmp_path / "data" / "a.npy"


def digests(specs: tuple[CellSpec, ...]) -> list[str]:
    return [spec.digest for spec in specs]


@pytest.mark.parametrize(
    "more",
    [
        "build: {parity: no}", "backends: [{backend: onnxruntime, options: {graph_optimization: basic}}]",
        "backends: [{backend: onnxruntime, allow_fallback: yes}]", "device: 'cpu'\nbuild: {retry: no}",
    ],
)  # fmt: skip
def test_another_setting_makes_other_cells(cells: Cells, data: Path, more: str) -> None:
    before, after = digests(cells(QUANTISED)), digests(cells(QUANTISED + more + "\n"))
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("more", ["iterations: 7", "warmup: 1s", "bench: {streams: 2}"])
def test_another_way_to_measure_is_another_measurement_of_the_same_engine(cells: Cells, data: Path, more: str) -> None:
    for old, new in zip(cells(QUANTISED), cells(QUANTISED + more + "\n"), strict=True):
        assert (
            old.digest == new.digest
            and old.mode_digests.keys() == new.mode_digests.keys() == {"bench"}
            and old.mode_digests != new.mode_digests
        )


def test_fewer_modes_are_the_same_cell_and_each_mode_answers_for_its_own_data(
    cells: Cells, data: Path, tmp_path: Path
) -> None:
    text = QUANTISED.replace("modes: bench", "modes: all\ndataset: val.npz")
    (tmp_path / "val.npz").write_bytes(b"one")
    before, fewer = cells(text)[1], cells(text, "evaluate")[1]
    assert set(before.mode_digests) == {"bench", "evaluate", "profile"} and set(fewer.mode_digests) == {"evaluate"}
    assert (fewer.digest, fewer.mode_digests["evaluate"]) == (before.digest, before.mode_digests["evaluate"])
    (tmp_path / "val.npz").write_bytes(b"two")
    after = cells(text)[1]
    assert after.digest == before.digest and {
        m for m in after.mode_digests if after.mode_digests[m] != before.mode_digests[m]
    } == {"evaluate"}
    (tmp_path / "val.npz").rename(tmp_path / "moved.npz")
    assert cells(text.replace("val.npz", "moved.npz"))[1].mode_digests == after.mode_digests


def test_a_mode_asked_for_by_name_that_has_nothing_to_do_is_left_out_with_its_reason(cells: Cells) -> None:
    gpus = "Nsight profiles GPUs, but the device is `cpu`"
    (spec,) = cells("models: net.onnx\nmodes: [bench, nsys, evaluate]")
    assert spec.modes == ("build", "bench")
    assert spec.skipped_modes == {"evaluate": "the plan names no `dataset`", "nsys": gpus}
    (spec,) = cells("models: net.onnx\nmodes: all")
    assert spec.skipped_modes == {}, "`all` is all there is to do"
    (spec,) = cells("models: net.onnx\nmodes: [all, ncu]")
    assert spec.skipped_modes == {"ncu": gpus} and spec.modes == ("build", "bench", "profile")
    (spec,) = cells("models: net.onnx", "nsys", "ncu")
    assert (spec.modes, spec.mode_digests, list(spec.skipped_modes)) == ((), {}, ["nsys", "ncu"]), (
        "the build was not asked for"
    )
    (spec,) = cells("models: net.onnx", "build", "nsys")
    assert spec.modes == ("build",)
    (spec,) = cells("models: [{path: net.onnx, dataset: none}]\nmodes: evaluate")
    assert spec.skipped_modes == {}, "the plan itself says so"
    (spec,) = cells("models: net.onnx\nbackends: tensorrt\nmodes: nsys")
    assert (spec.modes, spec.skipped_modes) == (("build", "nsys"), {})


def test_only_takes_labels_with_wildcards_and_refuses_what_fits_none(cells: Cells) -> None:
    specs = cells("models: net.onnx\nprecisions: [fp32, fp16]\nbatches: [1, 8]")
    assert labels(select(specs, ["*-fp16-*", "*-b8"])) == [
        "net-fp32-onnxruntime-b8", "net-fp16-onnxruntime-b1", "net-fp16-onnxruntime-b8",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"`--cells \*-b9` matches no cell"):
        select(specs, ["*-b9"])


def test_pipes_and_folders_of_half_a_disk_are_not_read(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "pipe")
    assert cells(QUANTISED.replace(": data", ": odd"))
    assert cells(QUANTISED.replace(": data", ": /dev/zero"))
    monkeypatch.setattr("trt_engine.verbs.run.cells._MAX_FILES", 2)
    for name in "abc":
        (tmp_path / "odd" / name).touch()
    with pytest.raises(UsageError, match="contains more than 2 files"):
        cells(QUANTISED.replace(": data", ": odd"))


def test_each_cell_is_quantised_for_the_library_that_runs_it(cells: Cells) -> None:
    found = cells(
        "models: net.onnx\nprecisions: [fp32, int8, fp8]\ncalib_data: random\n"
        "backends: [onnxruntime, {backend: onnxruntime, providers: [tensorrt, cuda]}, {backend: tensorrt, label: trt}]\n"
    )
    targets = {spec.label: spec.settings.get("quantize", {}).get("target") for spec in found}
    assert targets == {
        "net-fp32-onnxruntime-b1": None,
        "net-fp32-onnxruntime-tensorrt-b1": None,
        "net-fp32-trt-b1": None,
        "net-int8-onnxruntime-b1": "onnxruntime-cpu",
        "net-int8-onnxruntime-tensorrt-b1": "onnxruntime-tensorrt",
        "net-int8-trt-b1": "tensorrt",
        "net-fp8-onnxruntime-b1": None,  # no kernels: its accuracy is shown, placed as for TensorRT
        "net-fp8-onnxruntime-tensorrt-b1": "onnxruntime-tensorrt",
        "net-fp8-trt-b1": "tensorrt",
    }


@pytest.mark.parametrize("provider", ["tensorrt", "tensorrt-rtx", "cuda"])
def test_a_provider_of_a_gpu_puts_its_cells_on_one(cells: Cells, provider: str) -> None:
    (cell,) = cells(f"models: net.onnx\nbackends: [{{backend: onnxruntime, providers: [{provider}, cpu]}}]\n")
    assert cell.device == "cuda:0"


def test_a_plan_that_names_a_target_has_it_in_every_cell(cells: Cells) -> None:
    found = cells("models: net.onnx\nprecisions: int8\ncalib_data: random\nquantize: {target: tensorrt}\n")
    assert [spec.settings["quantize"]["target"] for spec in found] == ["tensorrt"]
