"""`trt-engine lint`: what it prints, what scripts read, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_engine.cli.main import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    """A model whose batch is one row and that draws random numbers."""
    graph = helper.make_graph(
        [
            helper.make_node("RandomNormalLike", ["x"], ["n"], name="noise"),
            helper.make_node("Add", ["x", "n"], ["s"], name="sum"),
            helper.make_node("MatMul", ["s", "w"], ["y"], name="head"),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(np.ones((3, 2), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    return path


def test_the_text_names_each_finding_with_what_to_type(frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", str(frozen)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"model: {frozen} (3 nodes, opset 20, IR 10)\nlooked at: x:1x3\n")
    assert "TensorRT 11.5: every operator (3 kinds)" in out
    assert "findings: 2 warnings\n" in out
    assert "  warning: frozen-batch: the batch is frozen at 1" in out
    assert "  warning: random-operator: " in out
    assert "(at `noise`)" in out
    assert out.count("    hint: ") == 2


def test_the_document_fits_its_schema_and_says_the_same(frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", str(frozen), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json.loads((ROOT / "docs/schemas/lint.json").read_text())).validate(told)
    assert told["schema"] == "trt-engine/lint"
    assert [(item["code"], item["severity"], item["where"]) for item in told["findings"]] == [
        ("frozen-batch", "warning", "x"),
        ("random-operator", "warning", "noise"),
    ]
    assert told["counts"] == {"error": 0, "warning": 2, "info": 0}
    assert len(told["warnings"]) == 2
    assert {row["op"]: row["cpu"] for row in told["operators"]} == {
        "Add": "yes",
        "MatMul": "yes",
        "RandomNormalLike": "yes",
    }


@pytest.mark.parametrize(("gate", "code"), [([], 0), (["--fail-on", "error"], 0), (["--fail-on", "warning"], 4)])
def test_findings_fail_only_when_asked(
    frozen: Path, capsys: pytest.CaptureFixture[str], gate: list[str], code: int
) -> None:
    assert run(["lint", str(frozen), *gate]) == code
    out, err = capsys.readouterr()
    assert "frozen-batch" in out, "the report is printed before the gate"
    assert ("`--fail-on warning`: `frozen-batch`, `random-operator`" in err) == (code == 4)


def test_a_gate_that_fails_leaves_one_document(frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", str(frozen), "--json", "--fail-on", "warning"]) == 4
    assert json.loads(capsys.readouterr().out)["schema"] == "trt-engine/lint"


def test_a_sound_model_passes_the_strictest_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", str(ROOT / "examples/digits/model.onnx"), "--fail-on", "warning"]) == 0
    assert capsys.readouterr().out.endswith("findings: none\n")


def test_a_target_prints_its_own_runners_alone(frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", str(frozen), "--target", "tensorrt", "--tensorrt", "10.16"]) == 0
    out = capsys.readouterr().out
    assert "TensorRT 10.16: every operator" in out
    assert "ONNX Runtime" not in out
    assert run(["lint", str(frozen), "--target", "onnxruntime"]) == 0
    assert "TensorRT 1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--target", "tflite"], 2),
        (["--tensorrt", "8.6"], 2),
        (["--tensorrt", "newest"], 2),
        (["--shapes", "z:1x3"], 2),
        (["--shapes", "x:2x3"], 2),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    frozen: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int
) -> None:
    assert run(["lint", str(frozen), *args]) == code
    assert "hint:" in capsys.readouterr().err


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path, frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = onnx.load(frozen)
    proto.graph.node[0].name = "noise\x1b[2J\nerror: not ours"
    onnx.save(proto, tmp_path / "odd.onnx")
    assert run(["lint", str(tmp_path / "odd.onnx")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\nerror: not ours" not in out
    assert "unprintable-name" in out
