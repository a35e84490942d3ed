"""`size` of a graph whose shapes the ladder had to fix: one engine for each batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnx_models as models
import trt_engine as te
from brittle import brittle, foreign, installed
from trt_engine.errors import MemoryExhausted
from trt_engine.verbs.size import curve


@pytest.mark.slow
def test_a_graph_that_builds_at_fixed_shapes_alone_is_sized_with_an_engine_for_each_batch(monkeypatch, tmp_path: Path):
    brittle(monkeypatch)(foreign(lambda model, config: not any(spec.dynamic for spec in model.signature.inputs)))
    installed(tmp_path / "site", monkeypatch)
    net = models.conv_net(tmp_path / "net.onnx")
    report = te.size(
        net,
        backend="brittle",
        start_batch=4,
        max_batch=4,
        duration_s=0.1,
        warmup_s=0.0,
        out=tmp_path / "out",
        fps=0.001,
    )
    assert [result.batch for result in report.batches] == [1, 4]
    assert report.engines_built == 2
    names = {path.name for path in (tmp_path / "out" / "engines").iterdir()}
    assert {"net_dynamic_b4.onnx", "net_static_b1.onnx"} <= names
    assert any("batch 1 has a separate engine" in note for note in report.notes)
    assert any("build retry" in note for note in report.notes)


def test_the_curve_of_an_engine_with_static_shapes_has_its_batch_alone(monkeypatch, tmp_path: Path):
    brittle(monkeypatch)(foreign(lambda model, config: not any(spec.dynamic for spec in model.signature.inputs)))
    installed(tmp_path / "site", monkeypatch)
    measured = []

    def measure(engine, grid, runtime, device):
        measured.append(grid.batches)
        raise MemoryExhausted("full")

    monkeypatch.setattr(curve, "measure_host_curve", measure)
    net, limits = models.conv_net(tmp_path / "net.onnx"), {"start_batch": 4, "max_batch": 4, "fps": 0.001}
    with pytest.raises(MemoryExhausted):
        te.size(net, backend="brittle", duration_s=0.1, warmup_s=0.0, out=tmp_path / "out", deadline_ms=50, **limits)
    assert measured == [(4,)]


def test_the_timings_of_a_run_lie_beside_its_engines(monkeypatch, tmp_path: Path):
    kept = []

    def fails(model, config):
        kept.append(config.timing_cache)
        return

    brittle(monkeypatch)(fails)
    installed(tmp_path / "site", monkeypatch)
    net = models.conv_net(tmp_path / "net.onnx")
    te.size(net, backend="brittle", start_batch=1, max_batch=1, duration_s=0.05, warmup_s=0.0, out=tmp_path / "out")
    assert kept == [tmp_path / "out" / "engines" / "timing.cache"]
