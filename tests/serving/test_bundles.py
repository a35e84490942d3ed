"""A bundle is one model: its inputs are those that no component feeds, and its answer is the chain's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tritonclient.utils import InferenceServerException

import trt_engine as te
from onnx_models import FLOAT, node, save
from serving.triton import Client, fetch
from trt_engine.verbs.serve.server import Server


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`first` (x to its double, transposed by the application) feeds `second`, which has a state, `h` to `h_out`."""
    folder = tmp_path_factory.mktemp("bundle")
    save(folder / "first.onnx", [node("Add", "x x", "y")], {"x": (FLOAT, ["n", 3])}, {"y": (FLOAT, ["n", 3])})
    save(
        folder / "second.onnx", [node("Add", "z h", "h_out"), node("Neg", "h_out", "x_out")],
        {"z": (FLOAT, [3, "n"]), "h": (FLOAT, [3, "n"])}, {"h_out": (FLOAT, [3, "n"]), "x_out": (FLOAT, [3, "n"])},
    )  # fmt: skip
    meta = {
        "name": "pair", "components": {"first": "first.onnx", "second": "second.onnx"}, "dimensions": {"n": [1, 2, 8]},
        "connections": [
            {"from": "first.y", "to": "second.z", "transpose": [1, 0]}, {"from": "second.h_out", "to": "second.h"},
        ],
    }  # fmt: skip
    (folder / "model_meta.json").write_text(json.dumps(meta))
    te.bundle(folder / "model_meta.json", folder / "engines", parity=False)
    return folder


def expected(folder: Path, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The chain, by ONNX Runtime alone."""
    first, second = (onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("first", "second"))
    (y,) = first.run(None, {"x": x})
    return second.run(["x_out"], {"z": y.T.copy(), "h": h})[0]


def test_a_bundle_answers_as_its_chain_over_both_protocols(bundle: Path, serve: Callable[..., Server]) -> None:
    server = serve(f"pair={bundle / 'engines'}")
    x, h = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    for protocol in ("http", "grpc"):
        client = Client(protocol, server)
        answer = client.infer("pair", {"x": x, "h": h})
        np.testing.assert_array_equal(answer.as_numpy("x_out"), expected(bundle, x, h))
        np.testing.assert_array_equal(answer.as_numpy("h_out"), x.T * 2 + h)
        with pytest.raises(InferenceServerException, match="component `second`"):
            client.infer("pair", {"x": x, "h": np.ones((3, 1), np.float32)})
        with pytest.raises(InferenceServerException, match="16"):
            client.infer("pair", {"x": np.ones((16, 3), np.float32), "h": h})
        client.raw.close()
    found = fetch(server, "/v2/models/pair")[2]
    assert [item["name"] for item in found["inputs"]] == ["x", "h"]
    assert [item["name"] for item in found["outputs"]] == ["h_out", "x_out"]
    assert found["properties"]["backend"] == "onnxruntime" and found["properties"]["engine"].startswith("sha256:")


def test_a_bundle_is_a_version_of_a_repository(bundle: Path, serve: Callable[..., Server], repository: Path) -> None:
    shutil.copytree(bundle / "engines", repository / "pair" / "1")
    server = serve(model_repository=repository, grpc_port=-1)
    assert fetch(server, "/v2/models/pair/ready")[0] == 200


def test_a_bundle_whose_engine_was_replaced_is_not_ready(
    bundle: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    folder = tmp_path / "pair"
    shutil.copytree(bundle / "engines", folder)
    te.build(bundle / "first.onnx", out=folder / "second.engine.onnx", parity=False, overwrite=True)
    (model,) = serve(folder).report.models
    assert model.state == "UNAVAILABLE" and "is not the engine of the report" in model.reason
