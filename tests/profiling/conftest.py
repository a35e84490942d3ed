"""The engine that the profilers of these tests profile."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnx_models as models
from trt_engine.verbs.build.run import build


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine on the device that does not exist."""
    folder = tmp_path_factory.mktemp("engine")
    model = models.conv_net(folder / "net.onnx", width=4)
    return build(model, backend="fake", batch="1:2:4", out=folder / "net.fake", parity=False).path
