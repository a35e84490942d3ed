"""A backend's layer times made comparable: what each layer does, the work that is known, and the shares of time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.backend import get_backend
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.graph.cost import model_cost
from trt_engine.graph.load import read_proto
from trt_engine.profiling.attribution import count_work, layer_shares, profile_layers
from trt_engine.records.profile import Category, LayerProfile, LayerRow

FEEDS = {"images": np.zeros((2, 3, 8, 8), np.float32)}
SHAPES = {"images": (2, 3, 8, 8)}


def row(name: str, category: Category, ms: float, precision: str = "", **more: object) -> LayerRow:
    return LayerRow(name, "", category, 9 * ms, ms, 0.0, 1.0, precision=precision, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> te.Engine:
    folder = tmp_path_factory.mktemp("layers")
    net = models.conv_net(folder / "net.onnx")
    store = te.Store(folder / "store")
    return te.build(
        net, backend="fake", device="fake:0", batch=(1, 2, 4), out=folder / "net.fake", parity=False, store=store
    )


def profiled(engine: te.Engine) -> LayerProfile:
    return profile_layers(
        get_backend("fake"), engine, FEEDS, RuntimeConfig(), inferences=2, warmup=1, keep=None
    )  # fmt: skip


def test_rows_have_a_category_and_the_work_of_the_models_nodes(fake: te.Engine) -> None:
    found = profiled(fake)
    assert [item.category for item in found.rows[:2]] == ["matrix", "element-wise"]
    model = model_cost(read_proto(Path(fake.passport.model.file)), SHAPES)
    assert sum(item.flops or 0 for item in found.rows) == model.flops


def test_the_work_is_the_layers_own_where_each_tells_and_the_models_elsewhere(fake: te.Engine) -> None:
    found = profiled(fake)
    whole = count_work(fake, SHAPES, found)
    assert (whole.flops, whole.source) == (sum(item.flops or 0 for item in found.rows), "layers")
    assert whole.nbytes is None, "the fake backend does not tell sizes of inputs: no number is made up"
    silent = dataclasses.replace(found, rows=tuple(dataclasses.replace(item, flops=None) for item in found.rows))
    assert count_work(fake, SHAPES, silent).source == count_work(fake, SHAPES, None).source == "model"


def test_shares_go_by_medians_and_are_of_the_layers_alone() -> None:
    found = LayerProfile((row("a", "matrix", 3.0), row("b", "copy", 1.0), row("c", "matrix", 4.0)), 5, "here")
    shares = layer_shares(found)
    assert [(item.category, item.ms, item.share, item.count) for item in shares] == [
        ("matrix", 7.0, 0.875, 2), ("copy", 1.0, 0.125, 1),
    ]  # fmt: skip


def test_an_engine_whose_model_is_gone_has_no_work_to_tell(tmp_path: Path) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    engine = te.build(net, backend="fake", device="fake:0", batch=(1, 2, 4), out=tmp_path / "n.fake", parity=False)
    net.unlink()
    assert count_work(engine, SHAPES, None).flops is None
    assert all(item.flops is None for item in profiled(engine).rows if item.category == "matrix")
