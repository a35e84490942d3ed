"""Results, engines and runners in `print`, in IPython and in a notebook cell."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.display import RichDisplay
from trt_engine.model import WrittenModel
from trt_engine.records.build import CachedEngine, CacheReport
from trt_engine.reporting import results
from trt_engine.reporting.document import Commands, Facts, Links, Notice, Paragraph, Section, Table
from trt_engine.reporting.html import render_cell
from trt_engine.runtime.inference_engine import InferenceEngine, InferenceResult

Load = Callable[..., InferenceEngine]
LARGEST_CELL = 20_000
assert te.Store  # the first name of the package that is read says what results are shown with


class _Page(HTMLParser):
    """The tags, attributes and visible text of a fragment; every tag is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""


def cell(value: Any) -> _Page:
    """The notebook cell of a value, which is a table and not the text that stands in for one."""
    text = value._repr_html_()
    assert "<table>" in text and len(text) < LARGEST_CELL
    assert "http" not in text.replace(str(value), "") and "url(" not in text and "@import" not in text
    page = _Page(text)
    assert {"script", "img", "link", "iframe"}.isdisjoint(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href"}
    return page


def pretty(value: Any) -> str:
    """What IPython prints."""
    parts: list[str] = []

    class Printer:
        text = staticmethod(parts.append)

    value._repr_pretty_(Printer(), False)
    return "".join(parts)


def cache(count: int, model: str = "model") -> CacheReport:
    engine = CachedEngine("key", "/store/key", "onnxruntime", model, 1024, "2026-11-01T00:00:00Z")
    engines = tuple(replace(engine, key=f"key{number}") for number in range(count))
    return CacheReport("list", "/store", engines, 1024 * count)


def test_what_the_verbs_return_is_a_table(tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    engine = te.build(model, out=tmp_path / "net.engine.onnx", parity=False)
    values = [engine, engine.passport, engine.signature, te.inspect(model), te.inspect(engine.path), te.lint(model)]
    for value in values:
        page = cell(value)
        assert engine.signature.inputs[0].name in page.text
        assert str(value) == results.result_text(value).rstrip("\n") == pretty(value)
    assert "onnxruntime" in str(engine) and str(engine.path) in str(engine)
    assert re.fullmatch(r"<Engine \S+ of \w+: \S+ float32 -> .* float32; profile 0 \S+>", repr(engine)), repr(engine)


def test_a_loaded_engine_names_its_device_precision_and_shapes(load: Load, double: Path) -> None:
    runner = load(double, contexts=2)
    spec = str(runner.inputs[0])
    for text in (cell(runner).text, str(runner)):
        assert "fake:0" in text and spec in text and "loaded" in text and "0 finished" in text
    x = np.zeros((2, 3), np.float32)
    result = runner.infer({"x": x}, result=True)
    assert "2x3" in cell(result).text and "float32" in cell(result).text
    assert "1 finished" in cell(runner.stats()).text and "contexts" in str(runner.stats())
    runner.close()
    assert "closed" in cell(runner).text


def test_a_bound_call_shows_each_array_and_where_it_is(load: Load, double: Path) -> None:
    x, y = np.zeros((2, 3), np.float32), np.empty((2, 3), np.float32)
    with load(double, contexts=1).bind({"x": x}, {"y": y}) as call:
        page = cell(call)
        assert page.text.count("copied, pageable") == 2 and page.text.count("2x3") == 2
        assert "double.fake" in page.text and "bound" in str(call)
    assert "closed" in cell(call).text


def test_all_types_with_blocks_and_no_others_have_the_display() -> None:
    for module in pkgutil.walk_packages(te.__path__, "trt_engine."):
        if module.name.split(".")[1] in (
            "records",
            "runtime",
            "precision",
            "reporting",
            "engine",
            "tensors",
        ) or module.name.startswith("trt_engine.verbs.serve."):
            try:
                importlib.import_module(module.name)
            except ImportError:  # an extra that is not here
                assert ".serve." in module.name
    bases = (RichDisplay, WrittenModel)
    kinds = {kind for base in bases for kind in base.__subclasses__() if kind.__module__.startswith("trt_engine.")}
    kinds -= {WrittenModel}
    assert {kind.__name__ for kind in kinds} | {"Server"} == results._FUNCTIONS.keys()
    for kind in kinds:  # IPython looks in the class itself, before its `__repr__`
        assert "_repr_pretty_" in vars(kind), kind


def test_verbs_return_what_has_the_display() -> None:
    plain = {"Path", "str", "LogOutput", "tuple[DocPage, ...]"}
    for name in te.__all__:
        if inspect.isfunction(value := getattr(te, name)):
            returned = {part.strip() for part in str(value.__annotations__["return"]).split("|")}
            assert returned <= results._FUNCTIONS.keys() | plain, name


BLOCKS = [
    Paragraph, lambda text: Facts(((text, text),)), lambda text: Table(text, (text,), ((text,),)),
    lambda text: Commands((text,)), lambda text: Links(((text, text, text),)), lambda text: Section("key", text, ()),
    lambda text: Notice(text),
]  # fmt: skip


@pytest.mark.parametrize("make", BLOCKS)
def test_every_kind_of_block_is_escaped(make: Callable[[str], Any]) -> None:
    text = render_cell([make('<i onclick="x">&')])
    assert "<i" not in text and "&lt;i onclick=" in text and 'onclick="' not in text
    _Page(text)


def test_a_long_list_ends_with_its_count_in_a_cell_and_is_whole_in_print() -> None:
    report = cache(500)
    assert "key19" in cell(report).text and "key20" not in cell(report).text and "and 480 more" in cell(report).text
    assert "and 480 more" in pretty(report) and len(pretty(report)) < 4000
    assert "key499" in str(report) and "more" not in str(report)


@dataclass(frozen=True, slots=True)
class Unknown(RichDisplay):
    text: str


class Broken(RichDisplay):
    def __repr__(self) -> str:
        raise RuntimeError("broken")


def test_a_display_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    value = Unknown("<b>" + "x" * 10_000)
    assert (
        str(value).startswith("Unknown(text='<b>xxx") and str(value).endswith("characters)") and len(str(value)) < 5000
    )
    assert value._repr_html_().startswith("<pre>Unknown(text=&#x27;&lt;b&gt;xxx")
    assert pretty(value) == str(value)
    assert "Broken object at" in str(Broken()) and "Broken object at" in Broken()._repr_html_()
    assert pretty(InferenceResult(outputs={"y": object()})).startswith("InferenceResult(")  # an array without a shape

    def fail(*_: object) -> str:
        raise RuntimeError("no template")

    monkeypatch.setattr(results, "result_html", fail)
    assert cache(1)._repr_html_().startswith("<pre>CacheReport(")


@pytest.mark.slow  # a kernel is a process of its own
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "nbformat", "ipykernel"))), reason="no nbclient and ipykernel"
)
@pytest.mark.parametrize("name", ["measure", "pytorch"])
def test_a_notebook_of_the_site_runs_and_shows_what_it_shows_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = importlib.import_module("nbclient"), importlib.import_module("nbformat")
    pytest.importorskip({"pytorch": "torch"}.get(name, "trt_engine"))
    monkeypatch.chdir(tmp_path)
    kernels = tmp_path / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernels / "kernel.json").write_text(f'{{"argv": {command}, "display_name": "tests", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(te.__file__).parents[1]), *filter(None, sys.path)]))
    source = (Path(__file__).parents[2] / f"examples/notebooks/{name}.ipynb").read_text(encoding="utf-8")
    assert len(source) < 100_000 and re.findall(r"(?<![\w<.:/])/\w+/", source) == []  # no absolute path
    assert set(re.findall("https?://([^/,]+)", source)) <= {"ui.perfetto.dev", "github.com"}
    notebook = nbformat.reads(source, 4)

    def shown() -> list[Any]:
        return [[sorted(one["data"]) for one in cell.get("outputs", ()) if "data" in one] for cell in notebook.cells]

    kept = shown()
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert shown() == kept
    if name == "pytorch":
        assert re.search(r"^  net.int8.engine.onnx +int8 ", notebook.cells[-2].outputs[-1]["data"]["text/plain"], re.M)
