"""`lint` with a real ONNX parser as the judge: TensorRT-RTX's, which needs no GPU, and what happens where it ends badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import trt_engine as te
from onnx_models import save
from patience import HANG_S, PATIENT_COMMAND
from trt_engine.backends.tensorrt import parser_check
from trt_engine.backends.tensorrt.parser_check import ParserCheck, ParserProcess, installed_version
from trt_engine.errors import Interrupted, ModelError, SetupError, UsageError
from trt_engine.records.base import Finding
from trt_engine.records.lint import LintReport
from trt_engine.trt.parser_messages import ParserError
from trt_engine.verbs.lint import parser as parser_lint
from trt_engine.verbs.lint import run as lint_run
from trt_engine.workers.process import ChildProcess, spawn_worker

DIGITS = Path(__file__).parents[2] / "examples/digits/model.onnx"
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
rtx = pytest.mark.skipif(
    installed_version("tensorrt-rtx") is None, reason="TensorRT-RTX is not installed: `pip install 'trt-engine[rtx]'`"
)

value, node = helper.make_tensor_value_info, helper.make_node


@pytest.fixture(scope="module")
def child() -> Iterator[ParserProcess]:
    """One child for the tests of this file: it starts in half a second."""
    with ParserProcess("tensorrt-rtx") as process:
        yield process


@pytest.fixture
def shared(child: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> ParserProcess:
    class Kept:
        def __init__(self, library: str) -> None:
            assert library == "tensorrt-rtx"

        def __enter__(self) -> ParserProcess:
            return child

        def __exit__(self, *_: object) -> None:
            pass

    for module in (parser_lint, lint_run):
        monkeypatch.setattr(module, "ParserProcess", Kept)
    return child


def found(report: LintReport) -> list[Finding]:
    return [item for item in report.findings if "tensorrt" in item.code or item.code == "parser-ended"]


# ------------------------------------------------------------------------------------------------ planted refusals


def chain() -> ModelProto:
    """Forty nodes, `n0` to `n39`, with a residual now and then."""
    names = ["x", *(f"t{at}" for at in range(39)), "y"]
    nodes = [
        node("Add", [names[at], names[at - 2]], [names[at + 1]], name=f"n{at}")
        if at % 5 == 4
        else node(("Relu", "Sigmoid", "Abs")[at % 3], [names[at]], [names[at + 1]], name=f"n{at}")
        for at in range(40)
    ]
    sides = value("x", FLOAT, ["batch", 3, 8, 8]), value("y", FLOAT, ["batch", 3, 8, 8])
    graph = helper.make_graph(nodes, "g", [sides[0]], [sides[1]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def plant(
    at: int,
    make: Callable[[str], list[onnx.NodeProto]],
    folder: Path,
    opset: int | None = None,
    *,
    digits: bool = False,
) -> Path:
    """A network with nodes put in before one of its own; the last one's output is what that reads."""
    proto = onnx.load(DIGITS) if digits else chain()
    new = make(proto.graph.node[at].input[0])
    proto.graph.node[at].input[0] = new[-1].output[0]
    for offset, item in enumerate(new):
        proto.graph.node.insert(at + offset, item)
    if opset is not None:
        proto.opset_import[0].version = opset
    path = folder / "planted.onnx"
    onnx.save(proto, path)
    return path


def unsupported(x: str) -> list[onnx.NodeProto]:
    return [node("Bernoulli", [x], ["planted"], name="bad")]


def mixed_types(x: str) -> list[onnx.NodeProto]:
    return [node("Cast", [x], ["half"], to=HALF, name="to_half"), node("Add", [x, "half"], ["planted"], name="bad")]


def no_place(x: str) -> list[onnx.NodeProto]:
    """The parser does not say which node it refuses here."""
    indices = node("Cast", [x], ["indices"], to=TensorProto.INT64, name="to_indices")
    return [indices, node("ScatterElements", [x, "indices", x], ["planted"], name="bad", reduction="add")]


def in_a_branch(x: str) -> list[onnx.NodeProto]:
    then = helper.make_graph(
        [node("Relu", [x], ["t0"]), node("Bernoulli", ["t0"], ["t1"], name="bad"), node("Abs", ["t1"], ["t2"])],
        "then", [], [value("t2", FLOAT, None)],
    )  # fmt: skip
    other = helper.make_graph([node("Relu", [x], ["o"])], "other", [], [value("o", FLOAT, None)])
    return [
        node("ReduceMax", [x], ["max"], keepdims=0),
        node("Cast", ["max"], ["yes"], to=TensorProto.BOOL),
        node("If", ["yes"], ["planted"], name="branch", then_branch=then, else_branch=other),
    ]


PLANTED: dict[str, tuple[Callable[[str], list[onnx.NodeProto]], str, str, str]] = {
    "unsupported": (unsupported, "not-in-tensorrt", "parser does not have this operator", "bad"),
    "mixed types": (mixed_types, "type-not-in-tensorrt", "must have same input types", "bad"),
    "no place": (no_place, "limited-in-tensorrt", "Unsupported reduction type", "bad"),
    "in a branch": (in_a_branch, "not-in-tensorrt", "Bernoulli inside: ", "branch"),
}


def version() -> str:
    return installed_version("tensorrt-rtx") or ""


@rtx
@pytest.mark.parametrize("digits", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_refusal_is_found_with_the_parsers_reason_and_reduced_to_its_node(
    kind: str, digits: bool, tmp_path: Path, shared: ParserProcess
) -> None:
    make, code, words, where = PLANTED[kind]
    out = tmp_path / "small.onnx"
    report = te.lint(plant(120 if digits else 21, make, tmp_path, digits=digits), target="tensorrt-rtx", reduce=out)
    (refused,) = found(report)
    assert (refused.code, refused.severity, refused.location) == (code, "error", where)
    assert words in refused.message and "Assertion" not in refused.message
    assert report.checked_by == f"tensorrt-rtx {version()} parser"
    assert sum(item.nodes for item in report.subgraphs) == len(onnx.load(report.path).graph.node) - 1
    assert report.subgraphs[0].nodes == max(item.nodes for item in report.subgraphs)
    assert {0, len(onnx.load(report.path).graph.node) - 1} <= {
        at for run in report.subgraphs for at in (run.start, run.end)
    }
    made = report.reduced
    assert made is not None and (made.nodes, made.complete, made.path) == (1, True, str(out))
    assert made.original_nodes == report.nodes and made.candidates < 20
    small = onnx.load(out)
    onnx.checker.check_model(small)
    assert [item.name for item in small.graph.node] == ["bad"]
    assert not shared.check(out).parsed


@rtx
def test_several_refusals_of_different_stages_are_all_found(tmp_path: Path, shared: ParserProcess) -> None:
    first = plant(28, unsupported, tmp_path)
    proto = onnx.load(first)
    x = proto.graph.node[10].input[0]
    proto.graph.node[10].input[0] = "product"
    for offset, item in enumerate([node("Cast", [x], ["h2"], to=HALF, name="c2"),
                                   node("Mul", [x, "h2"], ["product"], name="mul")]):  # fmt: skip
        proto.graph.node.insert(10 + offset, item)
    onnx.save(proto, first)
    report = te.lint(first, target="tensorrt-rtx")
    assert {item.location for item in found(report)} == {"bad", "mul"}
    assert [item.nodes for item in report.subgraphs] == [18, 12, 11]


@rtx
def test_a_network_it_takes_is_one_subgraph_and_static_rules_are_not_asked(
    tmp_path: Path, shared: ParserProcess
) -> None:
    onnx.save(chain(), tmp_path / "chain.onnx")
    report = te.lint(tmp_path / "chain.onnx", target="tensorrt-rtx")
    assert not found(report)
    assert [(item.nodes, item.start, item.end) for item in report.subgraphs] == [(40, 0, 39)]
    assert {row.tensorrt for row in report.operators} == {"yes"}
    opset_28 = helper.make_model(
        helper.make_graph([node("Relu", ["x"], ["y"])], "g", [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]),
        opset_imports=[helper.make_opsetid("", 28)], ir_version=13,
    )  # fmt: skip
    onnx.save(opset_28, tmp_path / "new.onnx")
    assert not found(te.lint(tmp_path / "new.onnx", target="tensorrt-rtx"))
    assert found(te.lint(tmp_path / "new.onnx", target="tensorrt-rtx", support_from="static"))


# ------------------------------------------------------------------------------------------------ who judges


def one(op: str, kind: int = FLOAT, *, outputs: int = FLOAT, **given: Any) -> ModelProto:
    graph = helper.make_graph(
        [node(op, ["x"], ["y"], name="only", **given)],
        "g",
        [value("x", kind, [1, 3, 4, 4])],
        [value("y", outputs, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[ModelProto], Path]:
    def save(proto: ModelProto) -> Path:
        path = tmp_path / "model.onnx"
        onnx.save(proto, path)
        return path

    return save


@rtx
def test_what_tensorrt_rtx_alone_lacks_is_no_finding_for_tensorrt(
    saved: Callable[[ModelProto], Path], shared: ParserProcess
) -> None:
    path = saved(one("NonZero", outputs=TensorProto.INT64))
    (refused,) = found(te.lint(path, target="tensorrt-rtx"))
    assert refused.code == "not-in-tensorrt" and refused.location == "only"
    report = te.lint(path, target="tensorrt")
    assert not found(report)
    assert report.checked_by == f"tensorrt-rtx {version()} parser, for TensorRT"
    assert report.tensorrt == "11.4"


@rtx
def test_the_parser_sees_the_shapes_that_build_is_given(saved: Callable[[ModelProto], Path]) -> None:
    """`Squeeze` without axes removes two axes at these sizes, and one by the declared shape of its reader."""
    nodes = [node("Squeeze", ["x"], ["s"], "squeeze"), node("MatMul", ["s", "w"], ["y"], "product")]
    weight = numpy_helper.from_array(np.ones((4, 2), np.float32), "w")
    graph = helper.make_graph(nodes, "g", [value("x", FLOAT, ["n", 1, 3, 4])], [value("y", FLOAT, None)], [weight])
    path = saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8))
    for batch in (1, 2):
        found = te.lint(path, target="tensorrt-rtx", shapes=f"x:{batch}x1x3x4", support_from="parser")
        refused = [item for item in found.findings if item.severity == "error"]
        engine = te.build(
            path, backend="tensorrt-rtx", shapes=f"x:{batch}x1x3x4", out=path.with_suffix(f".{batch}.engine")
        )
        assert not refused and engine.path.is_file()


@rtx
def test_an_operator_of_a_plugin_is_refused_by_tensorrt_rtx_alone(
    saved: Callable[[ModelProto], Path], shared: ParserProcess
) -> None:
    path = saved(one("EfficientNMS_TRT"))
    assert [item.code for item in found(te.lint(path, target="tensorrt-rtx"))] == ["not-in-tensorrt"]
    assert not found(te.lint(path, target="tensorrt"))


@rtx
def test_an_input_of_a_type_it_lacks_is_named(saved: Callable[[ModelProto], Path], shared: ParserProcess) -> None:
    proto = one("Cast", TensorProto.UINT16, to=FLOAT)
    proto.graph.input.append(value("unused", TensorProto.STRING, [1]))
    refused = found(te.lint(saved(proto), target="tensorrt-rtx"))
    assert {item.location for item in refused} == {"only", "unused"}
    assert all("does not have this ONNX data type" in item.message for item in refused)


def test_a_release_that_was_named_is_judged_by_the_lists(saved: Callable[[ModelProto], Path]) -> None:
    report = te.lint(saved(one("Det")), target="tensorrt", tensorrt="10.16")
    assert report.checked_by == "static tables" and report.tensorrt == "10.16" and not report.subgraphs


def test_without_a_library_the_lists_judge_unless_a_parser_is_demanded(
    saved: Callable[[ModelProto], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parser_lint, "installed_version", lambda library: None)
    path = saved(one("Det"))
    report = te.lint(path, target="tensorrt-rtx")
    assert report.checked_by == "static tables"
    assert found(report)[0].code == "not-in-tensorrt"
    with pytest.raises(SetupError, match="no ONNX parser") as caught:
        te.lint(path, target="tensorrt-rtx", support_from="parser")
    assert "trt-engine[rtx]" in str(caught.value.hint)
    with pytest.raises(SetupError, match="needs a real ONNX parser"):
        te.lint(path, reduce=tmp_path / "small.onnx")


def test_a_library_that_cannot_judge_here_is_said_and_the_lists_judge(
    saved: Callable[[ModelProto], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parser_lint, "installed_version", lambda library: "1.7.1")
    monkeypatch.setattr(ParserProcess, "check", lambda *_, **__: ParserCheck("1.7.1", unavailable="no driver"))
    path = saved(one("Det"))
    assert te.lint(path, target="tensorrt-rtx").checked_by == "static tables"
    assert "no driver" in caplog.text
    with pytest.raises(SetupError, match="no driver"):
        te.lint(path, target="tensorrt-rtx", support_from="parser")


def test_where_tensorrt_has_no_driver_tensorrt_rtx_stands_in(
    saved: Callable[[ModelProto], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(process: ParserProcess, *_: object, **__: object) -> ParserCheck:
        return (
            ParserCheck("1.7.1", parsed=True)
            if process.library == "tensorrt-rtx"
            else ParserCheck(unavailable="no driver")
        )

    monkeypatch.setattr(
        parser_lint, "installed_version", lambda library: {"tensorrt": "11.4.0", "tensorrt-rtx": "1.7.1"}[library]
    )
    monkeypatch.setattr(ParserProcess, "check", check)
    monkeypatch.setattr(ParserProcess, "build", lambda *_, **__: ParserCheck("1.7.1", parsed=True, built=True))
    path = saved(one("Det"))
    report = te.lint(path, target="tensorrt")
    assert report.checked_by == "tensorrt-rtx 1.7.1 parser, for TensorRT" and not found(report)
    assert (
        te.lint(path, target="tensorrt", tensorrt="11.4").checked_by == "static tables"
    )  # no driver, and no release of RTX
    with pytest.raises(UsageError, match=r"parser of tensorrt-rtx 1\.7\.1 takes"):
        te.lint(path, target="tensorrt", reduce=path.with_name("small.onnx"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"support_from": "oracle"}, "unknown source of support `oracle`"),
        ({"target": "onnxruntime", "support_from": "parser"}, "`--support-from parser` is for TensorRT"),
        ({"target": "onnxruntime", "reduce": "small.onnx"}, "`--reduce` uses TensorRT's parser"),
        ({"gpus": "sm89"}, "`--gpus` is of `--reduce`"),
    ],
)
def test_what_does_not_go_together_is_refused(saved: Callable[[ModelProto], Path], given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        te.lint(saved(one("Relu")), **given)


# ------------------------------------------------------------------------------------------------ bad ends


def program(code: str) -> Callable[[str, bytes, int | IO[bytes]], ChildProcess]:
    """In the place of the child: a Python program that gets the pipe's number."""

    def start(module: str, request: bytes, noise: int | IO[bytes]) -> ChildProcess:
        real = subprocess.Popen

        def other(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
            return real([sys.executable, "-S", "-c", code, command[-1]], **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", other)
            return spawn_worker(module, request, noise)

    return start


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; os.abort()", "SIGABRT"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import time; time.sleep(6000)", "no answer within 0.3 s"),
    ],
)
def test_a_crash_or_a_hang_of_the_parser_is_an_answer(
    code: str, how: str, saved: Callable[[ModelProto], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_check, "spawn_worker", program(code))
    monkeypatch.setattr(parser_check, "_PARSE_S", 0.3 if "sleep" in code else HANG_S)
    monkeypatch.setattr(parser_lint, "installed_version", lambda library: "1.7.1")
    report = te.lint(saved(one("Det")), target="tensorrt-rtx")
    told = {item.code: item for item in found(report)}
    assert set(told) == {"parser-ended", "not-in-tensorrt"}  # the lists say what they can
    assert how in told["parser-ended"].message and told["parser-ended"].severity == "error"
    assert not report.subgraphs


@rtx
@pytest.mark.slow
def test_the_child_starts_again_after_it_was_killed(saved: Callable[[ModelProto], Path]) -> None:
    path = saved(one("Relu"))
    with ParserProcess("tensorrt-rtx") as process:
        assert process.check(path).parsed
        assert process._child is not None
        process._child.process.kill()
        assert process.check(path).exit_status == "SIGKILL"
        assert process.check(path).parsed


def test_ctrl_c_kills_the_child(saved: Callable[[ModelProto], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_check, "spawn_worker", program("import time; time.sleep(60)"))
    process = ParserProcess("tensorrt-rtx")
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(child: ChildProcess, timeout_s: float) -> bytes | None:
        started.append(child.process)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.check(saved(one("Relu")))
    assert started[0].returncode == -9
    process.close()


# ------------------------------------------------------------------------------------------------ reducing


def judged_by(monkeypatch: pytest.MonkeyPatch, *, interrupt_at: int = -1) -> None:
    """A parser that refuses every graph with two Bernoulli nodes, without saying where."""
    asked = []

    def check(process: ParserProcess, model: Path, *, weights_beside: Path | None = None) -> ParserCheck:
        asked.append(model)
        if len(asked) == interrupt_at:
            raise KeyboardInterrupt
        count = sum(item.op_type == "Bernoulli" for item in onnx.load(model, load_external_data=False).graph.node)
        refusal = ParserError("two of them", "INVALID_GRAPH", function="importGraph")
        return ParserCheck("1.7.1", (refusal,) if count > 1 else (), parsed=count < 2)

    monkeypatch.setattr(parser_lint, "installed_version", lambda library: "1.7.1")
    monkeypatch.setattr(ParserProcess, "check", check)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    names = ["x", *(f"t{index}" for index in range(31)), "y"]
    nodes = [node("Bernoulli" if at in (9, 24) else "Relu", [names[at]], [names[at + 1]]) for at in range(32)]
    nodes[8] = node("Mul", [names[8], "w"], [names[9]])
    return save(
        tmp_path / "pair.onnx",
        nodes,
        {"x": (FLOAT, ["n", 1 << 15])},
        {"y": (FLOAT, ["n", 1 << 15])},
        {"w": np.arange(1 << 15, dtype=np.float32).reshape(1, 1 << 15)},
    )


def test_two_nodes_refused_together_are_left_and_the_file_is_whole(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged_by(monkeypatch)
    out = pair.with_name("small.onnx")
    report = te.lint(pair, target="tensorrt-rtx", reduce=out)
    assert report.reduced is not None and (report.reduced.nodes, report.reduced.original_nodes) == (2, 32)
    onnx.checker.check_model(onnx.load(out))
    assert sorted(item.name for item in pair.parent.iterdir()) == ["pair.onnx", "small.onnx"]


@pytest.mark.parametrize(("at", "left"), [(3, False), (12, True)])
def test_ctrl_c_leaves_the_smallest_part_or_nothing(
    pair: Path, monkeypatch: pytest.MonkeyPatch, at: int, left: bool
) -> None:
    judged_by(monkeypatch, interrupt_at=at)
    out = pair.with_name("small.onnx")
    with pytest.raises(Interrupted) as caught:
        te.lint(pair, target="tensorrt-rtx", reduce=out)
    assert out.exists() == left
    if left:
        nodes = len(onnx.load(out).graph.node)
        assert 2 < nodes < 32 and f"{nodes} of 32 nodes" in str(caught.value)
    else:
        assert "nothing was written" in str(caught.value)


@pytest.mark.parametrize("outside", [False, True])
def test_weights_of_the_part_are_in_its_file_wherever_they_were(
    pair: Path, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    monkeypatch.setattr(parser_lint, "_EXTERNAL_MIN_BYTES", 1 << 16)
    written = []
    if outside:
        onnx.save(onnx.load(pair), pair, save_as_external_data=True, location="pair.data", size_threshold=0)

    def check(process: ParserProcess, model: Path, *, weights_beside: Path | None = None) -> ParserCheck:
        if model != pair:
            written.append(model.stat().st_size)
        proto = onnx.load(model, load_external_data=False)
        used = any(item.op_type == "Mul" for item in proto.graph.node)
        if used and weights_beside is not None:  # the weights can be read from where they are said to be
            onnx.load_external_data_for_model(proto, str(weights_beside.parent))
            assert numpy_helper.to_array(proto.graph.initializer[0])[0, -1] == (1 << 15) - 1
        refusal = ParserError("no", "INVALID_NODE", 8, nodes_name(proto), "Mul", "importMul")
        return ParserCheck("1.7.1", (refusal,) if used else (), parsed=not used)

    monkeypatch.setattr(parser_lint, "installed_version", lambda library: "1.7.1")
    monkeypatch.setattr(ParserProcess, "check", check)
    out = pair.with_name("small.onnx")
    te.lint(pair, target="tensorrt-rtx", reduce=out)
    small = onnx.load(out, load_external_data=False)
    assert numpy_helper.to_array(small.graph.initializer[0])[0, -1] == (1 << 15) - 1
    assert written and max(written) < 1 << 14  # parts do not carry them


def nodes_name(proto: ModelProto) -> str:
    return next((item.name for item in proto.graph.node if item.op_type == "Mul"), "")


@rtx
def test_where_nothing_is_refused_there_is_nothing_to_reduce(
    saved: Callable[[ModelProto], Path], shared: ParserProcess, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"nothing to reduce: .* builds it for 8\.9"):
        te.lint(saved(one("Relu")), target="tensorrt-rtx", reduce=tmp_path / "small.onnx", gpus="sm89")
    assert not (tmp_path / "small.onnx").exists()


def test_a_refusal_of_what_no_part_has_is_an_error(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = ParserError("of the file", "INVALID_GRAPH")

    def check(process: ParserProcess, model: Path, *, weights_beside: Path | None = None) -> ParserCheck:
        return ParserCheck("1.7.1", (refusal,), parsed=False) if model == pair else ParserCheck("1.7.1", parsed=True)

    monkeypatch.setattr(parser_lint, "installed_version", lambda library: "1.7.1")
    monkeypatch.setattr(ParserProcess, "check", check)
    with pytest.raises(ModelError, match="but no part of it: of the file"):
        te.lint(pair, target="tensorrt-rtx", reduce=pair.with_name("small.onnx"))


def in_fp8(x: str) -> list[onnx.NodeProto]:
    return [
        node("Constant", [], ["one"], value_float=1.0),
        node("QuantizeLinear", [x, "one"], ["q"], output_dtype=TensorProto.FLOAT8E4M3FN, name="q"),
        node("DequantizeLinear", ["q", "one"], ["planted"], name="dq"),
    ]


@rtx
@pytest.mark.slow
def test_what_the_builder_alone_refuses_is_reduced_for_the_gpus_given(tmp_path: Path, shared: ParserProcess) -> None:
    path, out = plant(120, in_fp8, tmp_path, opset=21, digits=True), tmp_path / "small.onnx"
    report = te.lint(path, target="tensorrt-rtx", reduce=out, gpus="sm80")
    assert report.reduced is not None and report.reduced.nodes <= 4
    assert report.reduced.rejected_by.endswith("builder for 8.0") and "fp8" in report.reduced.reason
    with pytest.raises(UsageError, match="nothing to reduce"):
        te.lint(path, target="tensorrt-rtx", reduce=tmp_path / "other.onnx", gpus="sm89")


def attention(x: str) -> list[onnx.NodeProto]:
    return [
        node("Constant", [], ["heads"], value_ints=[1, 4, -1, 16]),
        node("Reshape", [x, "heads"], ["split"], name="split_heads"),
        node("Attention", ["split", "split", "split"], ["mixed"], name="bad"),
        node("Shape", [x], ["shape"], name="shape_of"),
        node("Reshape", ["mixed", "shape"], ["planted"], name="merge_heads"),
    ]


@rtx
@pytest.mark.slow
def test_attention_in_fp32_parses_and_does_not_build_and_is_found_alone(tmp_path: Path) -> None:
    path, out = plant(190, attention, tmp_path, opset=23, digits=True), tmp_path / "small.onnx"
    report = te.lint(path, target="tensorrt-rtx", reduce=out, gpus=["RTX 4090"])
    assert [(item.code, item.location) for item in found(report)] == [("no-tensorrt-kernel", "bad")]
    assert report.reduced is not None and report.reduced.nodes == 1
    assert [item.op_type for item in onnx.load(out).graph.node] == ["Attention"]


@rtx
@pytest.mark.slow
def test_ctrl_c_at_the_command_line_ends_it_and_leaves_no_child(tmp_path: Path) -> None:
    """The type is refused for 8.0 alone and named nowhere: many parts are built."""
    path, out = plant(120, in_fp8, tmp_path, opset=21, digits=True), tmp_path / "small.onnx"
    command = [*PATIENT_COMMAND, "lint", str(path), "--target", "tensorrt-rtx", "--gpus", "sm80", "--reduce", str(out)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "are still refused (candidate" in line and "230 of 230" not in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        lines += process.stderr.readlines()
        assert process.wait(HANG_S) == 130, lines
    assert not any(item.is_running() and item.status() != psutil.STATUS_ZOMBIE for item in children)
    assert f"`{out}` is the smallest part found until then" in "".join(lines)
    assert 1 < len(onnx.load(out).graph.node) < 230
    assert not list(tmp_path.glob("trt-engine-*"))
