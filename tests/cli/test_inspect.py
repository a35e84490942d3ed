"""`trt-engine inspect`: what it prints, what it ends with."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper

from sealed import seal_model

sys.path.insert(0, str(Path(__file__).parents[1]))  # the models of tests/graph, wherever pytest starts
from graph import models

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    return models.save(models.detector(height=160, width=128), tmp_path)


# ------------------------------------------------------------------------------------------------ models


def grep(pattern: str, text: str) -> list[str]:
    """As the source document's script greps: `grep -oP 'input_name:\\s*\\K\\S+'`."""
    return re.findall(pattern.replace(r"\K", "("), text)


GREPS = {"name": r"input_name:\s*\K\S+)", "height": r"height:\s*\K[0-9]+)", "width": r"width:\s*\K[0-9]+)"}


def test_a_script_reads_name_height_and_width(cli: Run, detector: Path) -> None:
    code, out, _ = cli(detector)
    assert code == 0
    assert {name: grep(pattern, out) for name, pattern in GREPS.items()} == {
        "name": ["images"], "height": ["160"], "width": ["128"],
    }  # fmt: skip


def test_open_height_and_width_leave_a_script_empty_handed_and_say_dynamic(cli: Run, tmp_path: Path) -> None:
    code, out, _ = cli(models.save(models.detector(height=None, width=None), tmp_path))
    assert code == 0
    assert grep(GREPS["height"], out) == grep(GREPS["width"], out) == []
    assert "height: dynamic" in out
    assert "--shapes images:1x3x640x640" in out


def test_the_text_says_what_is_in_the_model(cli: Run, detector: Path) -> None:
    _, out, _ = cli(detector)
    for line in (
        "input: images:batchx3x160x128 float32",
        "output: scores:batchx10 float32",
        "opset: ai.onnx 20",
        "ir_version: 10",
        "producer: tests",
        "precision: fp32",
        "quantized: no",
        "external_data: none",
        "findings: none",
    ):
        assert line in out.splitlines()
    assert "(at images:1x3x160x128)" in out


def test_shapes_move_the_count(cli: Run, detector: Path) -> None:
    _, out, _ = cli(detector, "--shapes", "images:4x3x160x128", "--json")
    assert json.loads(out)["macs"] == 4 * (8 * 160 * 128 * 27 + 80)


@pytest.mark.parametrize("op", [("EfficientNMS_TRT", ""), ("Magic", "my.company"), ("Reluu", "")])
def test_operators_that_do_not_run_here_are_answered_with_findings(
    cli: Run, tmp_path: Path, op: tuple[str, str]
) -> None:
    code, out, _ = cli(models.save(models.unpicked(*op), tmp_path))
    assert code == 0
    assert re.search(r"(warning: tensorrt-only-operator|error: unknown-operator)", out)


@pytest.mark.parametrize(
    "content",
    [b"", b"plain text, no model\n", bytes(range(256)) * 4, models.detector().SerializeToString()[:900]],
    ids=["empty", "text", "bytes", "truncated"],
)
def test_what_is_no_whole_model_ends_with_four_and_a_hint(cli: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    code, out, err = cli(path)
    assert (code, out) == (4, "")
    assert err.startswith("error: ")
    assert "\nhint: " in err
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------------------ engines


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """A detector sealed as an engine of the fake backend, which needs no library but ONNX's."""
    from trt_engine.config.build import BuildConfig
    from trt_engine.config.profiles import parse_profile

    model = models.save(models.detector(height=8, width=8), tmp_path)
    config = BuildConfig(backend="fake", device="fake", profiles=(parse_profile("images:1x3x8x8,2x3x8x8,4x3x8x8"),))
    return seal_model(model, tmp_path / "model.fake", config)


def test_an_engine_is_told_from_its_passport(cli: Run, engine: Any) -> None:
    code, out, _ = cli(engine.path)
    assert code == 0
    for line in ("verdict: loads", "backend: fake", "profile 0: images:1x3x8x8,2x3x8x8,4x3x8x8"):
        assert line in out.splitlines()
    assert "build_command: trt-engine build model.onnx --backend fake" in out


def test_a_changed_payload_is_refused_in_the_verdict_with_the_command_that_builds_it(cli: Run, engine: Any) -> None:
    engine.path.write_bytes(engine.path.read_bytes() + b"x")
    code, out, _ = cli(engine.path, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["verdict"] == "refuse"
    assert "changed" in document["reason"]
    assert document["command"] == "trt-engine build model.onnx --backend fake"
    assert cli(engine.path, "--run")[0] == 10


def test_a_backend_that_is_not_here_is_a_verdict_and_not_a_failure(cli: Run, engine: Any) -> None:
    passport = Path(f"{engine.path}.json")
    passport.write_text(passport.read_text().replace('"backend": "fake"', '"backend": "absent"'))
    code, out, _ = cli(engine.path)
    assert code == 0
    assert "verdict: refuse" in out
    assert "`absent`" in out


def test_a_backend_without_its_package_says_what_to_install(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from trt_engine.verbs.inspect import run as inspect

    real = inspect.list_backends()["fake"]
    backend_spec = dataclasses.replace(real, modules=("a_package_nobody_has",), install="pip install a-package")
    monkeypatch.setattr(inspect, "list_backends", lambda: {"fake": backend_spec})
    report = inspect.inspect(engine.path)
    assert report.compatibility.status == "refuse"  # type: ignore[union-attr]
    assert report.compatibility.command == "pip install a-package"  # type: ignore[union-attr]


def test_a_smoke_run_tells_what_went_in_and_came_out(cli: Run, engine: Any) -> None:
    code, out, _ = cli(engine.path, "--run", "--json", "--shapes", "images:3x3x8x8")
    smoke = json.loads(out)["smoke_run"]
    assert code == 0
    assert smoke["inputs"]["images"]["shape"] == [3, 3, 8, 8]
    scores = smoke["outputs"]["scores"]
    assert (scores["shape"], scores["not_finite"]) == ([3, 10], 0)
    assert np.isfinite(scores["mean"])
    assert smoke["first_ms"] > 0


# ------------------------------------------------------------------------------------------------ run folders


def record(batch: int, samples: list[float]) -> dict[str, Any]:
    return {
        "engine": "e", "backend": "onnxruntime", "device": "cpu", "batch": batch, "compute_ms": samples,
        "wall_s": 2.0, "queries": len(samples), "stable": True, "complete": True,
    }  # fmt: skip


def run_folder(folder: Path, *, torn: bool = False) -> Path:
    folder.mkdir()
    said = {"schema": "trt-engine/size", "model": "m.onnx", "peak_streams": 12, "stop_reason": "max_batch"}
    (folder / "size.json").write_text(json.dumps(said))
    lines = [json.dumps(record(batch, [1.0, 3.0])) for batch in (1, 8)]
    (folder / "records.jsonl").write_text("\n".join(lines) + ("\n" + lines[0][:40] if torn else "\n"))
    return folder


def test_a_run_folder_is_summed_up(cli: Run, tmp_path: Path) -> None:
    code, out, _ = cli(run_folder(tmp_path / "run"), "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["kind"], document["verb"], document["complete"]) == ("run", "size", True)
    assert document["summary"]["peak_streams"] == 12
    second = document["measurements"][1]
    assert (second["batch"], second["qps"], second["images_per_s"], second["mean_ms"]) == (8, 1.0, 8.0, 2.0)
    text = cli(tmp_path / "run")[1]
    assert "peak_streams: 12" in text
    assert "records: 2" in text


def test_the_command_that_writes_a_runs_report_can_be_pasted(cli: Run, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "my runs")
    _, out, _ = cli(str(folder))
    (line,) = [line for line in out.splitlines() if line.startswith("hint: ")]
    assert shlex.split(line.split("`")[1]) == ["trt-engine", "report", str(folder)]


def test_a_folder_that_is_no_run_is_told_all_that_would_make_it_one(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = cli(tmp_path / "empty")
    assert code == 4
    assert all(
        f"`{name}`" in err for name in ("size.json", "records.jsonl", "run.json", "profile.json", "compare.json")
    )


# ------------------------------------------------------------------------------------------------ types by hand


def quantised(**changes: Any) -> Any:
    """A convolution between quantised activations and weights; `changes` plant a fault."""
    asked = {"zero": 0, "axis": 0} | changes
    return models.model(
        [
            models.node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            models.node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            models.node("DequantizeLinear", ["w", "sw"], ["wd"], axis=asked["axis"]),
            models.node("Conv", ["d", "wd"], ["y"]),
        ],
        [models.value("x", [1, 8, 4, 4])], [models.value("y", [1, 8, 4, 4])],
        [
            numpy_helper.from_array(np.float32(0.02), "s"), numpy_helper.from_array(np.int8(asked["zero"]), "z"),
            numpy_helper.from_array(np.ones((8, 8, 1, 1), np.int8), "w"),
            numpy_helper.from_array(np.full(8, 0.01, np.float32), "sw"),
        ],
    )  # fmt: skip


def in_blocks(op: str = "MatMul", shape: tuple[int, int] = (64, 16), axis: int = 0, **given: Any) -> Any:
    """INT4 weights in blocks of 32."""
    scale = list(shape)
    scale[axis] = -(-shape[axis] // 32)
    return models.model(
        [
            models.node("DequantizeLinear", ["w", "s"], ["d"], axis=axis, block_size=32),
            models.node(op, ["x", "d"], ["y"], **given),
        ],
        [models.value("x", [2, shape[1] if given.get("transB") else shape[0]])], [models.value("y", None)],
        [
            numpy_helper.from_array(np.zeros(shape, ml_dtypes.int4), "w"),
            numpy_helper.from_array(np.ones(scale, np.float32), "s"),
        ],
        opset=21,
    )  # fmt: skip


def one_scale(scale: float) -> Any:
    """Boxes up to 480 and scores up to 1, joined and quantised as one."""
    return models.model(
        [
            models.node("Mul", ["x", "strides"], ["boxes"]),
            models.node("Sigmoid", ["x"], ["scores"]),
            models.node("Concat", ["boxes", "scores"], ["joined"], axis=1),
            models.node("QuantizeLinear", ["joined", "s", "z"], ["q"]),
            models.node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        [models.value("x", [1, 4])], [models.value("y", None)],
        [
            numpy_helper.from_array(np.float32(480), "strides"), numpy_helper.from_array(np.float32(scale), "s"),
            numpy_helper.from_array(np.int8(0), "z"),
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("planted", "clean", "code"),
    [
        (lambda: quantised(axis=1), quantised, "axis-not-output-channels"),
        (lambda: quantised(zero=5), quantised, "asymmetric-zero-point"),
        (lambda: in_blocks(shape=(48, 16)), in_blocks, "block-does-not-divide"),
        (
            lambda: in_blocks("Gemm", (64, 64), transB=1),
            lambda: in_blocks("Gemm", (64, 64), axis=1, transB=1),
            "int4-gemm-transb",
        ),
        (lambda: one_scale(480 / 127), lambda: one_scale(1 / 127), "scores-share-a-scale"),
    ],
)
def test_what_strong_typing_refuses_is_a_finding(
    cli: Run, tmp_path: Path, planted: Callable[[], Any], clean: Callable[[], Any], code: str
) -> None:
    def codes(name: str, made: Any) -> dict[str, str]:
        ended, out, err = cli(models.save(made, tmp_path, name), "--json")
        assert ended == 0, err
        return {item["code"]: item["severity"] for item in json.loads(out)["findings"]}

    assert codes("planted.onnx", planted())[code] in ("warning", "error")
    left = {kind for kind, severity in codes("clean.onnx", clean()).items() if severity != "info"}
    assert left <= {"frozen-batch"}


def halves(third: str) -> Any:
    """Three layers in FP16, the middle one in `third`."""
    wide = third == "float32"
    nodes = [models.node("MatMul", ["x", "w0"], ["a"], name="first")]
    if wide:
        nodes.append(models.node("Cast", ["a"], ["a32"], to=1))
    nodes.append(models.node("MatMul", ["a32" if wide else "a", "w1"], ["b"], name="middle"))
    if wide:
        nodes.append(models.node("Cast", ["b"], ["b16"], to=10))
    nodes.append(models.node("MatMul", ["b16" if wide else "b", "w2"], ["y"], name="last"))
    weights = [models.weight(f"w{at}", 16, 16, kind=third if at == 1 else "float16") for at in range(3)]
    return models.model(nodes, [models.value("x", ["n", 16], 10)], [models.value("y", ["n", 16], 10)], weights)


def test_an_island_in_a_wider_type_is_named(cli: Run, tmp_path: Path) -> None:
    for third, wanted in (("float32", ["middle"]), ("float16", [])):
        code, out, err = cli(models.save(halves(third), tmp_path, f"{third}.onnx"), "--json")
        assert code == 0, err
        found = [item for item in json.loads(out)["findings"] if item["code"] == "mixed-precision-island"]
        assert [item["location"] for item in found] == wanted
        assert all("`middle` (MatMul)" in item["message"] and item["severity"] == "warning" for item in found)
