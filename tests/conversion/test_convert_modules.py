"""A PyTorch network's own names, `layer2.0.conv1`, from `convert` to every report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from programs import needs
from trt_engine.backend import get_backend
from trt_engine.config.precision import QuantizeConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import module_of
from trt_engine.precision.quantize_model import quantize
from trt_engine.precision.tensor_ranges import ranges
from trt_engine.profiling.attribution import profile_layers
from trt_engine.verbs.diff.run import diff

pytestmark = needs("torch", "onnxscript")

PLANTED = Path(__file__).with_name("planted.py")
LAYERS = {f"layer{stage}.0.{part}" for stage in (1, 2) for part in ("conv1", "conv2", "down.0")} | {"fc"}
OTHERS = {"layer1.0", "layer2.0", "layer1.0.relu", "layer2.0.relu"}
SHAPE = (2, 3, 16, 16)


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    te.convert(f"{PLANTED}:residual", inputs={"x": SHAPE}, exporter=request.param, out=folder / "net.onnx")
    return folder / "net.onnx"


def modules(path: Path) -> set[str]:
    return {module_of(place.node) for place in walk.nodes(read_proto(path))} - {""}


def test_the_networks_own_names_go_through_every_step(network: Path, tmp_path: Path) -> None:
    assert modules(network) == LAYERS | OTHERS
    assert b"planted" not in network.read_bytes() and b"pkg.torch" not in network.read_bytes()
    te.cast(network, "fp16", out=tmp_path / "half.onnx")
    data = {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}
    config = QuantizeConfig(parity=False, quantize_outputs=True)
    quantize(network, "int8", out=tmp_path / "int8.onnx", calib_data=data, config=config)
    for name in ("half.onnx", "int8.onnx"):
        assert modules(tmp_path / name) == LAYERS | OTHERS
    store = te.Store(tmp_path / "store")
    engines = []
    for path in (network, tmp_path / "int8.onnx"):
        out = tmp_path / f"{path.stem}.engine.onnx"
        te.build(path, out=out, parity=False, store=store)
        engines.append(Engine.open(out))
    feeds = {"x": np.zeros((1, *SHAPE[1:]), np.float32)}
    for engine in engines:
        found = profile_layers(
            get_backend("onnxruntime"), engine, feeds, RuntimeConfig(), inferences=2, warmup=1, keep=None
        )  # fmt: skip
        assert {row.module for row in found.rows} >= LAYERS
    seen = ranges(network, data)
    assert {item.module for item in seen.tensors} >= LAYERS
    assert {item.module for item in seen.constants} >= LAYERS
    # "down" and "fc" stay operators of their own: whether the difference lists them depends on the processor's layouts
    fused = {name for name in LAYERS if "conv" in name}
    assert {change.module for change in diff(network, engines[0].path).changes} >= fused
