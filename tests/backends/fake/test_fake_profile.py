"""The fake backend tells the time of each operator of its reference evaluator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import onnx_models as models
import trt_engine as te
from trt_engine.backend import get_backend
from trt_engine.config.runtime import RuntimeConfig


def test_each_operator_has_its_time_by_the_hosts_clock(tmp_path: Path) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    engine = te.build(net, backend="fake", device="fake:0", batch=(1, 2, 4), out=tmp_path / "net.fake", parity=False)
    feeds = {"images": np.random.default_rng(0).random((2, 3, 8, 8), np.float32)}
    call = get_backend("fake").load_function("profile")
    found = call(engine, feeds, RuntimeConfig(), inferences=3, warmup=1, keep=tmp_path / "kept")
    assert [row.kind for row in found.rows] == ["Conv", "Relu", "Conv", "Relu", "GlobalAveragePool", "Flatten"]
    assert all(row.mean_ms > 0 for row in found.rows) and found.clock == "host" and found.inferences == 3
    assert found.rows[-1].shapes == ((2, 16),) and found.rows[-1].dtypes == ("float32",)
    assert len(json.loads(Path(found.raw).read_text())) == 3
