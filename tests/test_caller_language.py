"""Messages and hints are in the language of the caller: Python, a shell, or a plan."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine import errors
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS
from trt_engine.config.caller_language import in_plan, in_python

SOURCES = Path(te.__file__).parent
SHELL = ("cli/", "command_line/", "verbs/cache/")  # modules of the command alone
OTHER_TOOLS = re.compile(
    r"`(docker|podman|pip|nvidia-smi|nsys|ncu|taskset|chmod|ulimit|python|sudo|X |cat |ls |curl|uv)|"  # commands of others
    r"--[a-z]+[A-Z]|--(help|json|quiet|version|verbose|all|parse-log|container-facts|graph|scan|meta)\b|"
    r"--(kernel-name|query-metrics|cap-add|network|shm-size|entrypoint|rm)\b|trt-engine (cache|completion)"
)


@pytest.fixture
def from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests read messages as they are written."""
    monkeypatch.setattr(errors, "in_shell", False)
    monkeypatch.setattr(errors, "in_python", te._in_python)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return models.conv_net(tmp_path / "net.onnx").name


def written() -> Iterator[tuple[str, str]]:
    """Every message of an error, every hint and every warning in the sources, what is filled in as `X`."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            said = list[ast.expr]()
            if isinstance(node, ast.keyword) and node.arg == "hint":
                said = [node.value]
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                said = node.args[:1] if called == "warning" or hasattr(errors, called) else []
            for text in (text for node in said for text in texts(node)):
                yield path.relative_to(SOURCES).as_posix(), text


def texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp | ast.BinOp | ast.BoolOp | ast.Tuple | ast.List):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from texts(child)


def test_no_message_has_an_option_or_a_command_of_the_shell_in_python() -> None:
    found = [(place, in_python(text)) for place, text in written() if not place.startswith(SHELL)]
    assert len(found) > 2000
    spans = [(place, span) for place, text in found for span in re.findall(r"`[^`\n]+`", text)]
    left = [(place, span) for place, span in spans if re.search(r"`--[a-z]|\s--[a-z]", span)]
    left += [(place, text) for place, text in found if re.search(rf"trt-engine ({'|'.join(VERBS)})\b", text)]
    left += [(place, text) for place, text in found if re.search(r"(^|\s)--[a-z]", re.sub("`[^`]*`", "", text))]
    assert [one for one in left if not OTHER_TOOLS.search(one[1])] == []


@pytest.mark.parametrize(
    ("written", "python", "plan"),
    [
        ("`--max-batch 8`", "`max_batch=8`", "`max_batch: 8`"),
        ("`--overwrite` overwrites it", "`overwrite=True` overwrites it", "`overwrite: true` overwrites it"),
        ("`--no-parity`", "`parity=False`", "`parity: false`"),
        ("`--exclude-node a --exclude-node b`", '`exclude_nodes=["a", "b"]`', "`exclude_nodes: ['a', 'b']`"),
        ("`--duration 2s`", '`duration_s="2s"`', "`duration_s: 2s`"),
        ("leave `--batch` out", "leave `batch` out", "leave `batch` out"),
        ("`-O level=basic`", '`options={"level": "basic"}`', "`options: {'level': 'basic'}`"),
        ("`--backend tensorrt --device cuda:0`", '`backend="tensorrt", device="cuda:0"`',
         "`backend: tensorrt, device: cuda:0`"),
        ("`trt-engine build a.onnx --batch 1:4:8 -o e`", '`te.build("a.onnx", batch=(1, 4, 8), out="e")`', None),
        ("trt-engine upgrade-check a b", 'te.upgrade_check("a", "b")', None),
        ("`trt-engine upgrade-check OLD NEW`", '`te.upgrade_check("OLD", "NEW")`', None),
        ("`trt-engine bench --help`", "`help(te.bench)`", None),
        ("`pip install 'trt-engine[torch]'`, `chmod +r`, `--json`", None, None),
        ("`trt-engine cache prune --max-size 1GiB`", None, None), ("it's `a` `--", None, None),
    ],
)  # fmt: skip
def test_one_text_is_written_for_each_caller(written: str, python: str | None, plan: str | None) -> None:
    assert in_python(written) == (python or written)
    assert in_python(in_python(written)) == in_python(written)
    assert in_plan(written) == (plan or written)


X = np.zeros((1, 3, 8, 8), np.float32)
# mistakes in Python: the call, and what its message says to write
MISTAKES: list[tuple[Callable[[str], Any], str]] = [
    (lambda m: te.build(m, batch=(1, 4)), "`batch=(1, 8, 64)`"),
    (lambda m: te.build(m, out="there"), "`overwrite=True`"),
    (lambda m: te.build(m, shapes="images"), "images:1x3x640x640"),
    (lambda m: te.load(te.build(m), contexts=0), "`contexts` is 0"),
    (lambda m: te.load("net.onnx"), '`te.build("net.onnx", batch=(1, 8, 64))`'),
    (lambda m: te.load(te.build(m), device="cuda:x"), "cuda:x"),
    (lambda m: te.quantize(m, "int8"), "out="),
    (lambda m: te.build(m, precision="FP16"), "did you mean `fp16`?"),
    (lambda m: te.build(m, int8=True), 'did you mean `precision="int8"`?'),
    (lambda m: te.load(m, max_batch=8), "did you mean `batching=te.Batching(max_batch=8)`?"),
    (lambda m: te.Batching(max_bach=8), "`te.Batching` has no argument `max_bach`"),  # type: ignore[call-arg]
    (lambda m: te.load(te.build(m, batch=(1, 2, 4))).infer(np.zeros((9, 3, 8, 8), np.float32)), "profiles="),
]


@pytest.mark.usefixtures("from_python")
@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_in_python_is_answered_in_python(number: int, model: str) -> None:
    Path("there").write_text("not an engine")
    call, said = MISTAKES[number]
    with pytest.raises(te.TrtEngineError) as refused:
        call(model)
    text = str(refused.value)
    assert said in text and "`-" not in text and "`trt-engine" not in text, text


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["build", "net.onnx", "--batch", "1:4"], "`--batch 1:8:64`"),
        (["build", "net.onnx", "-o", "there"], "`--overwrite`"),
        (["bench", "net.onnx", "--contexts", "0"], "`--contexts`"),
        (["cast", "net.onnx", "--to", "fp16"], "`-o"),
        (["quantize", "net.onnx", "--to", "int8"], "`-o"),
        (["build", "net.onnx", "--shapes", "images"], "images:1x3x640x640"),
        (["inspect", "there", "--run"], "there"),
        (["validate", "net.onnx"], "`trt-engine build net.onnx --batch 1:8:64`"),
        (["build", "net.onnx", "--bacth", "1"], "`--batch`"),
        (["compare", "net.onnx"], "trt-engine compare"),
    ],
)
@pytest.mark.usefixtures("from_python")
def test_a_mistake_in_the_shell_is_answered_with_options(
    typed: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there").write_text("not an engine")
    assert run(typed) not in (0, 1)
    text = capsys.readouterr().err
    assert said in text and "te." not in text, text


PLANS = [
    "device: gpu9", "warmup: soon", "timeout: later", "timeout: 0", "models: [{path: net.onnx, shapes: images}]",
    "build: {batch: 1-8}", "duration: 3s", "--max-batch: 8",
    "backends: [onnxrutime]", "precisions: [fp61]",
    "models: []", "batchs: [1]", "dataset: a\naccuracy: {dataset: b}",
]  # fmt: skip


@pytest.mark.parametrize("wrong", PLANS)
@pytest.mark.usefixtures("from_python")
def test_a_mistake_in_a_plan_is_answered_with_its_keys(wrong: str, model: str) -> None:
    plan = Path("plan.yaml")
    plan.write_text("" if wrong.startswith("models") else "models: [net.onnx]\n")
    with plan.open("a") as file:
        file.write(f"{wrong}\n")
    with pytest.raises(errors.UsageError) as refused:
        te.run(plan, "out")
    text = str(refused.value)
    assert "plan.yaml" in text and "`-" not in text and "=" not in text, text
    assert wrong != "duration: 3s" or "`bench: {duration: ...}`" in text


def test_a_cell_that_fails_names_keys_of_its_plan(model: str) -> None:
    Path("plan.yaml").write_text("models: [net.onnx]\nprecisions: [int8]\n")
    assert "`calib_data: DATA`" in str(te.run("plan.yaml", "out"))


@pytest.mark.parametrize("wrong", [["x", {}], object(), b"x", np.zeros((2, 2)), len])
def test_a_value_of_another_type_is_refused_by_its_name(wrong: Any, model: str) -> None:
    engine = te.build(model)
    for name in ("device", "backend", "duration_s", "shapes", "percentiles", "options", "graph"):
        with pytest.raises(errors.UsageError, match=name.replace("options", "option")):
            te.bench(engine, **{name: wrong})
    with pytest.raises(errors.UsageError, match="unknown target"):
        te.deploy(engine, "triton", out="there")  # type: ignore[arg-type]


def test_a_warning_of_a_call_names_arguments_on_stderr_and_in_handlers(
    tmp_path: Path, from_python: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trt_engine"), "propagate", False)  # pytest's own handler stays out
    te.log_to  # noqa: B018  # the first name that is resolved
    log = logging.getLogger("trt_engine.verbs.size.doubling")
    log.warning("twice N exceeds `--max-batch %d`", 8)
    log.info("`--max-batch 9`")
    assert capsys.readouterr().err == "twice N exceeds `max_batch=8`\n"
    with te.log_to(tmp_path / "log.txt"):
        log.warning("twice N exceeds `--max-batch %d`", 16)
    assert (tmp_path / "log.txt").read_text().endswith("size.doubling: twice N exceeds `max_batch=16`\n")
    assert capsys.readouterr().err == ""
