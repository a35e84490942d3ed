"""A warm-up can be counted in queries: as many are left out, and as many as were asked for are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

import trt_engine as te
from onnx_models import conv_net
from trt_engine.errors import UsageError


@pytest.mark.parametrize("backend", ["onnxruntime", "fake"])
def test_as_many_queries_are_left_out_as_were_asked_for(tmp_path: Path, backend: str) -> None:
    engine = te.build(conv_net(tmp_path / "net.onnx"), backend=backend, batch=2, out=tmp_path / "net.engine")
    record = te.bench(engine, warmup_s=0, duration_s=0, warmup_iterations=7, iterations=11)
    assert record.warmup_queries == 7
    assert len(record.compute_ms) == record.queries >= 11
    assert record.queries <= 12, "one more is in flight when the last is counted by events"
    assert record.protocol.min_warmup == 7
    assert record.wall_s >= sum(record.compute_ms[:1]) / 1e3


def test_a_duration_counts_from_the_first_query_that_is_kept(tmp_path: Path) -> None:
    engine = te.build(conv_net(tmp_path / "net.onnx"), batch=2, out=tmp_path / "net.engine.onnx")
    record = te.bench(engine, warmup_s=0, duration_s=0.05, warmup_iterations=50, iterations=1)
    assert record.warmup_queries == 50
    assert record.wall_s >= 0.05


def test_a_warm_up_below_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="warmup-iterations"):
        te.bench(conv_net(tmp_path / "net.onnx"), warmup_iterations=-1)
