"""The examples of docs/runtime.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import trt_engine as te
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.store import Store

PAGE = (Path(__file__).parents[1] / "docs/runtime.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_page_has_an_example_for_each_part() -> None:
    assert len(EXAMPLES) == 8
    assert all(len(example.strip().splitlines()) <= 11 for example in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["images"], ["y"])],
        "g",
        [value("images", TensorProto.FLOAT, ["batch", 3])],
        [value("y", TensorProto.FLOAT, ["batch", 3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
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


def test_the_settings_the_page_names_are_there() -> None:
    """A renamed setting would leave the page telling of one that is refused."""
    known = {*RuntimeConfig.__dataclass_fields__, *Batching.__dataclass_fields__}
    for name in (
        "max_waiting",
        "wait_timeout_s",
        "graphs",
        "max_graphs",
        "priority_ms",
        "max_bytes_waiting",
        "buckets",
    ):
        assert f"`{name}" in PAGE or f"{name}=" in PAGE
        assert name in known
