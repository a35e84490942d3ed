"""Where everything lies."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trt_engine.errors import UsageError
from trt_engine.verbs.size.output_layout import output_layout

NOW = time.struct_time((2026, 11, 20, 17, 48, 16, 4, 324, 0))


def test_a_model_of_the_tree_writes_beside_itself() -> None:
    layout = output_layout(Path("models/yolo26n/model/net.onnx"), None, ".engine", NOW)
    assert layout.folder == Path("models/yolo26n/benchmarks")
    assert layout.model_name == "yolo26n"
    assert layout.engine(64) == Path("models/yolo26n/benchmarks/engines/net_dynamic_b64.engine")
    assert layout.build_log() == layout.folder / "engines/net_dynamic_build_20261120_174816.log"
    assert layout.build_log(128) == layout.folder / "engines/net_dynamic_build_b128_20261120_174816.log"
    assert layout.bench_log(1) == layout.folder / "b1/trtexec_b1.log"
    assert layout.bench_log(128) == layout.folder / "b128/trtexec_b128.log"


def test_the_tree_is_found_from_inside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "models" / "yolo" / "model"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert output_layout(Path("net.onnx"), None, ".onnx").folder == tmp_path / "models" / "yolo" / "benchmarks"


@pytest.mark.parametrize("length", [200, 240, 250])
def test_a_name_no_disk_takes_is_refused_before_anything_is_made(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layout = output_layout(Path("n" * length + ".onnx"), None, ".engine.onnx", NOW)
    with pytest.raises(UsageError, match="too long"):
        layout.check(overwrite=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["net.onnx", "a/b/net.onnx", "models/net.onnx", "models/x/net.onnx", "models/x/model/y/net.onnx"]
)
def test_any_other_model_gets_a_run_folder_of_its_own(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = output_layout(Path(path), None, ".onnx", NOW)
    assert first.folder == Path("runs/20261120_174816_net")
    assert not first.folder.exists()
    first.folder.mkdir(parents=True)
    second = output_layout(Path(path), None, ".onnx", NOW)
    assert second.folder == Path("runs/20261120_174816_net_2")
    second.folder.mkdir()
    assert output_layout(Path(path), None, ".onnx", NOW).folder == Path("runs/20261120_174816_net_3")


def test_a_folder_that_is_named_gets_the_tree_directly_and_the_suffix_of_the_backend() -> None:
    layout = output_layout(Path("models/x/model/net.v2.onnx"), Path("out"), ".pt2")
    assert layout.engine(8) == Path("out/engines/net.v2_dynamic_b8.pt2")
    assert layout.engine(4, dynamic=False) == Path("out/engines/net.v2_static_b4.pt2")


@pytest.mark.parametrize("other", [b"", b"{", b"[1]", b'{"schema": "trt-engine/bench"}'])
def test_a_size_json_of_somebody_else_is_foreign_too(tmp_path: Path, other: bytes) -> None:
    layout = output_layout(Path("net.onnx"), tmp_path, ".onnx")
    layout.size_json.write_bytes(other)
    assert layout.previous_document() is None
    with pytest.raises(UsageError, match=r"size\.json"):
        layout.check(overwrite=False)


def test_results_of_an_earlier_run_make_way_and_everything_else_stays(tmp_path: Path) -> None:
    layout = output_layout(Path("net.onnx"), tmp_path, ".onnx")
    layout.size_json.write_text(json.dumps({"schema": "trt-engine/size", "complete": True}))
    for name in ("records.jsonl", "report.md", "report.html", "benchmark_data.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    layout.engine(64).parent.mkdir()
    layout.engine(64).write_text("x")
    layout.check(overwrite=False)
    layout.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engines", "notes.txt"]
    assert layout.engine(64).exists()
