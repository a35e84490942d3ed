"""The examples of docs/runtime.md and docs/python.md, run as they stand."""

from __future__ import annotations

import asyncio
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.store import Store

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/runtime.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)
TASKS = dict(re.findall(r"^## ([^\n]+)\n```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.M | re.S))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = (FLOAT, ["batch", 3])
    save(tmp_path / "m.onnx", [node("Relu", "images", "y")], {"images": row}, {"y": row})
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    te.build("m.onnx", batch=(1, 2, 4), out="model.engine.onnx", store=store)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    names = {
        "te": te,
        "np": np,
        "engine": te.build("m.onnx", backend="fake", device="fake", batch=(1, 2, 4), store=store),
        "x": x,
        "rows": [x[:1] + row for row in range(10)],
    }
    exec(compile(EXAMPLES[number], f"docs/runtime.md, example {number}", "exec"), names)
    outputs = names.get("outputs")
    if isinstance(outputs, list):
        assert np.array_equal(np.concatenate(outputs), np.concatenate(names["rows"]))
        assert names["stats"].answered == 10
    elif outputs is not None:
        assert np.array_equal(outputs["y"], x)


def test_each_part_has_an_example_and_the_settings_that_none_uses_are_there() -> None:
    assert (len(EXAMPLES), len(TASKS)) == (8, 9)
    known = {*RuntimeConfig.__dataclass_fields__, *Batching.__dataclass_fields__}
    assert all(f"`{name}" in PAGE and name in known for name in ("priority_ms", "max_bytes_waiting", "buckets"))


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the engines of docs/python.md, and the names of its first example."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "first.py").write_text(TASKS["Load and run"])
    with pytest.MonkeyPatch.context() as place:
        place.chdir(folder)
        place.setenv("TRT_ENGINE_STORE", "store")
        te.build(ROOT / "examples/classifiers/resnet.onnx", batch=(1, 8, 32), out="classifier.engine.onnx")
        return folder, runpy.run_path("first.py", run_name="__main__")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_in_python_runs(
    task: str, tried: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for library in re.findall(r"^(?:import|from) (torch|fastapi)", TASKS[task], re.M):
        pytest.importorskip(library)
    folder, names = tried
    monkeypatch.chdir(folder)
    (folder / "task.py").write_text(TASKS[task])
    names = runpy.run_path(str(folder / "task.py"), names, run_name="__main__")
    printed = capfd.readouterr().out
    assert [text for text in re.findall(r"print\(.*\)  # (.*)", TASKS[task]) if text not in printed] == []
    if task == "FastAPI":
        assert np.shape(asyncio.run(ask(names["app"], names["images"]))) == (8, 7, 400)
        assert "is float64" in asyncio.run(ask(names["app"], np.zeros((1, 3, 160, 160))))["error"]


async def ask(app: Any, array: np.ndarray) -> Any:
    """What a service of the page answers to `array`, without a server."""
    body, sent = io.BytesIO(), []
    np.save(body, array)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.getvalue()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body"))

    scope = {"type": "http", "method": "POST", "path": "/detect", "query_string": b"", "headers": []}
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    return json.loads(sent[-1])
