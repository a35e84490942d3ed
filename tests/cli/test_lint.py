"""`trt-engine lint`: what it prints, what scripts read, and when it fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from documents import document
from onnx_models import FLOAT, node, save
from trt_engine.cli.main import run


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    """A model whose batch is one row and that draws random numbers."""
    return save(
        tmp_path / "net.onnx",
        [
            node("RandomNormalLike", "x", "n", name="noise"),
            node("Add", "x n", "s", name="sum"),
            node("MatMul", "s w", "y", name="head"),
        ],
        {"x": (FLOAT, [1, 3])},
        {"y": (FLOAT, [1, 2])},
        {"w": np.ones((3, 2), np.float32)},
    )


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
    told = document(capsys.readouterr().out)
    assert told["schema"] == "trt-engine/lint"
    assert [(item["code"], item["severity"], item["location"]) for item in told["findings"]] == [
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


def test_a_target_prints_its_own_runners_alone(frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", str(frozen), "--target", "tensorrt", "--tensorrt", "10.16"]) == 0
    out = capsys.readouterr().out
    assert "TensorRT 10.16: every operator" in out
    assert "ONNX Runtime" not in out
    assert run(["lint", str(frozen), "--target", "onnxruntime"]) == 0
    assert "TensorRT 1" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ a parser, and --reduce


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that refuses RandomNormalLike, without the library."""
    from trt_engine.backends.tensorrt.parser_check import ParserCheck, ParserProcess
    from trt_engine.trt.parser_messages import ParserError
    from trt_engine.verbs.lint import parser as parser_lint

    def check(process: ParserProcess, model: Path, *, weights_beside: Path | None = None) -> ParserCheck:
        nodes = onnx.load(model).graph.node
        at = next((index for index, item in enumerate(nodes) if item.op_type == "RandomNormalLike"), None)
        if at is None:
            return ParserCheck("1.7.1", parsed=True)
        refusal = ParserError("false", "UNSUPPORTED_NODE", at, nodes[at].name, nodes[at].op_type, "checkRandom")
        return ParserCheck("1.7.1", (refusal,))

    monkeypatch.setattr(parser_lint, "installed_version", lambda library: "1.7.1")
    monkeypatch.setattr(ParserProcess, "check", check)


def test_the_text_says_who_judged_what_is_supported_and_what_was_reduced(
    frozen: Path, judged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = frozen.with_name("small.onnx")
    assert run(["lint", str(frozen), "--target", "tensorrt-rtx", "--reduce", str(out), "--fail-on", "error"]) == 4
    text = capsys.readouterr().out
    assert "\nTensorRT-RTX: not: RandomNormalLike (1)\nsupport from: tensorrt-rtx 1.7.1 parser\n" in text
    assert "\nsupported subgraphs, of 3 nodes: 2 (`sum` to `head`)\n" in text
    assert (
        "  error: not-in-tensorrt: RandomNormalLike (1 node): TensorRT-RTX's parser does not have this operator" in text
    )
    assert f"\nreduced: {out}, 1 of 3 nodes (RandomNormalLike), 1 candidate\n" in text
    assert "  refused by tensorrt-rtx 1.7.1 parser: node 0 `noise` (RandomNormalLike): TensorRT-RTX's parser" in text
    assert [item.name for item in onnx.load(out).graph.node] == ["noise"]


def test_the_document_has_judge_subgraphs_and_the_reduced_model(
    frozen: Path, judged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = frozen.with_name("small.onnx")
    assert run(["lint", str(frozen), "--target", "tensorrt-rtx", "--reduce", str(out), "--json"]) == 0
    told = document(capsys.readouterr().out)
    assert told["checked_by"] == "tensorrt-rtx 1.7.1 parser"
    assert told["subgraphs"] == [{"nodes": 2, "first": "sum", "last": "head", "start": 1, "end": 2}]
    assert (told["reduced"]["nodes"], told["reduced"]["original_nodes"], told["reduced"]["complete"]) == (1, 3, True)


def test_a_parser_that_is_demanded_and_not_there_ends_with_3(
    frozen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trt_engine.verbs.lint import parser as parser_lint

    monkeypatch.setattr(parser_lint, "installed_version", lambda library: None)
    assert run(["lint", str(frozen), "--target", "tensorrt-rtx", "--support-from", "parser"]) == 3
    assert "[rtx]'` (x86-64 Linux, no GPU needed)" in capsys.readouterr().err


def test_a_file_in_the_way_needs_yes_and_what_needs_no_reducing_ends_with_2(
    frozen: Path, judged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = frozen.with_name("small.onnx")
    out.write_bytes(b"mine")
    asked = ["lint", str(frozen), "--target", "tensorrt-rtx", "--reduce", str(out)]
    assert run(asked) == 2
    assert "`--overwrite` overwrites it" in capsys.readouterr().err and out.read_bytes() == b"mine"
    assert run([*asked, "--overwrite"]) == 0
    assert onnx.load(out).graph.node[0].name == "noise"
    assert run(["lint", str(frozen), "--gpus", "sm89"]) == 2
    assert "`--reduce`" in capsys.readouterr().err
