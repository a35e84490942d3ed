"""The published schemas are those of the record types, and what verbs print fits them."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pytest

from documents import document
from onnx_models import FLOAT, node, save
from programs import load_program
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "schemas"
CLASSIFIERS = ROOT / "examples" / "classifiers"


def _generator() -> ModuleType:
    return load_program(ROOT / "tools" / "schemas.py", "schemas_generator")


GENERATOR = _generator()


@pytest.mark.parametrize("name", list(GENERATOR.DOCUMENTS))
def test_a_published_schema_is_up_to_date_and_itself_a_schema(name: str) -> None:
    published = (FOLDER / f"{name}.json").read_text()
    assert published == GENERATOR.text(name), "run `python tools/schemas.py`"
    jsonschema.Draft202012Validator.check_schema(json.loads(published))


def test_the_published_schema_of_a_plan_is_up_to_date_and_itself_a_schema() -> None:
    published = (ROOT / "docs" / "run.schema.json").read_text()
    assert published == json.dumps(GENERATOR.plan_schema(), indent=2) + "\n", "run `python tools/schemas.py`"
    jsonschema.Draft202012Validator.check_schema(json.loads(published))


def test_every_verb_has_a_schema_and_no_schema_is_left_over() -> None:
    assert set(VERBS) <= set(GENERATOR.DOCUMENTS)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(GENERATOR.DOCUMENTS)


@pytest.mark.slow
def test_every_document_that_is_made_anywhere_has_a_schema() -> None:
    """`print_result` prints the document of its verb; the others name theirs."""
    calls = [
        (path, node, ast.unparse(node.func).rpartition(".")[2])
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    makers = ("document", "verb_document", "write_document")
    names = [(path, node.args[call == "write_document"]) for path, node, call in calls if call in makers]
    named = {name.value for _, name in names if isinstance(name, ast.Constant)}
    unnamed = {path.name for path, name in names if not isinstance(name, ast.Constant)}
    assert named | set(VERBS) == set(GENERATOR.DOCUMENTS)
    assert unnamed == {"output.py", "base.py"}, "what hands a name on"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a verb with `--json`; its one document, found to fit the schema it names."""
    monkeypatch.chdir(tmp_path)

    def say(*args: str, code: int | None = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["trt-engine", *args, "--json"])
        capsys.readouterr()
        got = run([*args, "--json"])
        out, err = capsys.readouterr()
        assert code is None or got == code, err
        told = document(out)
        assert told["command"] == " ".join(["trt-engine", *args, "--json"])
        return told

    return say


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of one product: x (batch x 3) times a 3 x 2 matrix."""
    save(
        tmp_path / "net.onnx",
        [node("MatMul", "x w", "y")],
        {"x": (FLOAT, ["batch", 3])},
        {"y": (FLOAT, ["batch", 2])},
        {"w": np.ones((3, 2), np.float32)},
        opset=17,
    )
    return "net.onnx"


@pytest.mark.slow
def test_the_small_verbs_print_what_their_schemas_say(said: Callable[..., Any]) -> None:
    assert said("cache", "list")["schema"] == "trt-engine/cache"
    assert said("cache", "prune", "--all")["removed"] == []
    assert said("completion", "bash")["shell"] == "bash"
    assert said("doctor", code=None)["diagnoses"]


def test_errors_print_what_their_schema_says(said: Callable[..., Any]) -> None:
    assert said("build", "none.onnx", code=4)["error"]["exit_code"] == 4
    assert said("bnech", code=2)["error"]["type"] == "UsageError"
    assert said("size", code=2)["error"]["hint"]


def test_the_verbs_around_one_engine_print_what_their_schemas_say(said: Callable[..., Any], model: str) -> None:
    assert said("inspect", model)["schema"] == "trt-engine/inspect"
    assert said("build", model, "--batch", "1:2:4", "--dry-run")["dry_run"] is True
    built = said("build", model, "--batch", "1:2:4", "-o", "net.engine.onnx")
    assert built["schema"] == "trt-engine/build"
    assert said("inspect", "net.engine.onnx")["kind"] == "engine"
    assert said("infer", "net.engine.onnx", "--random", "-o", "y.npz")["outputs"]
    measured = said("bench", "net.engine.onnx", "--duration", "20ms", "--warmup", "0", "-o", "run")
    assert measured["schema"] == "trt-engine/bench"
    assert said("bench", "--parse-log", "run/bench.log")["schema"] == "trt-engine/bench-log"
    assert said("report", "run")["schema"] == "trt-engine/report"
    assert said("inspect", "run")["kind"] == "run"
    assert len(said("cache", "list")["engines"]) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "ENGINE", "-o", "run"], ["bench", "net.onnx", "--batch", "2"], ["bench", "net.onnx"],
        ["profile", "ENGINE", "-o", "run"], ["profile", "net.onnx", "--profiler", "layers"],
        ["compare", "ENGINE", "net.onnx", "--fail-if", "slower:3%", "-o", "run"],
        ["infer", "ENGINE", "--random", "-o", "y.npz"], ["infer", "net.onnx", "--random"],
        ["evaluate", f"{CLASSIFIERS}/resnet.onnx", "--dataset", f"{CLASSIFIERS}/val.npz", "-o", "run"],
        ["ranges", "net.onnx", "-o", "ranges.json"], ["ranges", "net.onnx", "--calib-data", "data.npz"],
        ["build", "net.onnx", "--batch", "1:2:4"], ["size", "net.onnx", "--max-batch", "4"],
        ["cast", "net.onnx", "--to", "fp16", "-o", "half.onnx"],
        ["quantize", "net.onnx", "--to", "int8", "--calib-data", "data.npz", "-o", "small.onnx"],
        ["convert", "net.onnx", "-o", "other.onnx"],
    ],
    ids=lambda args: f"{args[0]} {Path(args[1]).name}",
)  # fmt: skip
def test_a_dry_run_fits_the_schema_of_its_verb_and_writes_nothing(
    args: list[str], said: Callable[..., Any], model: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((4, 3), np.float32))
    if "ENGINE" in args:
        said("build", model, "--batch", "1:2:4", "-o", "net.engine.onnx")
    args = ["net.engine.onnx" if word == "ENGINE" else word for word in args]
    before = sorted(tmp_path.rglob("*"))
    told = said(*args, "--dry-run")
    assert told["schema"] == f"trt-engine/{args[0]}" and told["dry_run"] is True
    if args[0] in ("bench", "profile", "compare", "infer", "evaluate", "ranges"):
        builds = [word for word in args if word.endswith("net.onnx") and args[0] != "ranges"]
        assert told["builds"] == builds, "an engine is never built again"
        assert "-o" not in args or {Path(place).parts[0] for place in told["writes"]} == {args[-1]}
    assert sorted(tmp_path.rglob("*")) == before
