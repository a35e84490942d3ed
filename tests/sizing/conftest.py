"""Small models, and the folder of `planted.py` so that the tests beside it can import it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from onnx_models import FLOAT, node, save

sys.path.insert(0, str(Path(__file__).parent))

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a small convolution: images [batch, 3, height, width] to maps [batch, 4, height, width]."""

    def make(
        name: str = "net.onnx", *, batch: int | str = "batch", height: int | str = 8, width: int | str = 8
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(
            path,
            [node("Conv", "images w", "maps", name="conv")],
            {"images": (FLOAT, [batch, 3, height, width])},
            {"maps": (FLOAT, [batch, 4, height, width])},
            {"w": helper.make_tensor("w", TensorProto.FLOAT, [4, 3, 1, 1], [0.1 * value for value in range(12)])},
        )

    return make


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of the test's own."""
    store = tmp_path / "store"
    monkeypatch.setenv("TRT_ENGINE_STORE", str(store))
    return store
