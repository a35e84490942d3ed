"""Build's parity, compare's gate and quantize's report fail for a detector whose scores are wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_models as models
import trt_engine as te
import trt_engine.precision.quantize_model as quantizing
from trt_engine.backend import list_backends
from trt_engine.backends.onnxruntime.build import OnnxRuntimeBuilder
from trt_engine.errors import AccuracyError
from trt_engine.graph.load import open_model
from trt_engine.precision.quantize_model import quantize

pytestmark = pytest.mark.usefixtures("kept_engines")

ANCHORS, CLASSES, WIDTH = 40, 80, 16


def detector(path: Path) -> Path:
    """Features `[N, 16, 40]` to `[N, 84, 40]`: boxes up to 480 pixels beside 80 sigmoid scores."""
    rng = np.random.default_rng(0)
    weights = {
        "wf": rng.standard_normal((WIDTH, WIDTH, 1)).astype(np.float32) / 4,
        "wb": rng.uniform(10, 40, (4, WIDTH, 1)).astype(np.float32),
        "ws": rng.standard_normal((CLASSES, WIDTH, 1)).astype(np.float32),
        "bs": np.zeros(CLASSES, np.float32),
    }
    nodes = [
        models.node("Conv", "x wf", "features", name="features"),
        models.node("Conv", "x wb", "boxes", name="boxes"),
        models.node("Conv", "features ws bs", "logits", name="logits"),
        models.node("Sigmoid", "logits", "scores"),
        models.node("Concat", "boxes scores", "output0", name="together", axis=1),
    ]
    given = {"x": (models.FLOAT, ["batch", WIDTH, ANCHORS])}
    return models.save(path, nodes, given, {"output0": (models.FLOAT, ["batch", 4 + CLASSES, ANCHORS])}, weights)


def plant(defect: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its scores made wrong right before they meet the boxes."""
    factor, shift, order = np.ones((CLASSES, 1), np.float32), np.zeros((CLASSES, 1), np.float32), np.arange(CLASSES)
    if defect == "+0.3 on every score":
        shift[:] = 0.3
    elif defect == "dead class head":
        factor[:], shift[:] = 0, 0.3
    elif defect == "all scores equal":
        factor[:], shift[:] = 0, 0.5
    elif defect == "one wrong channel":
        factor[17], shift[17] = -1, 1
    else:
        order[[10, 11]] = order[[11, 10]]
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    stored = {"factor": factor, "shift": shift, "order": order}
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    (at,) = [index for index, node in enumerate(made.graph.node) if node.name == "together"]
    nodes = [
        models.node("Gather", "scores order", "scores_1", axis=1),
        models.node("Mul", "scores_1 factor", "scores_2"),
        models.node("Add", "scores_2 shift", "scores_3"),
    ]
    for offset, node in enumerate(nodes):
        made.graph.node.insert(at + offset, node)
    made.graph.node[at + len(nodes)].input[1] = "scores_3"
    return made


DEFECTS = ["+0.3 on every score", "dead class head", "all scores equal", "one wrong channel", "swapped classes"]


@dataclass(frozen=True)
class Planted(OnnxRuntimeBuilder):
    """Builds another model than the one it is given."""

    defect: ClassVar[str] = ""

    def build(self, model: Any, config: Any, places: Any) -> Any:
        other = places.payload.parent / "other.onnx"
        onnx.save(plant(self.defect, onnx.load(model.path)) if self.defect else onnx.load(model.path), other)
        return super().build(open_model(other), config, places)


@pytest.fixture
def plant_in_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    backend_spec = replace(list_backends()["onnxruntime"], builder=f"{__name__}:Planted")
    monkeypatch.setitem(list_backends(), "onnxruntime", backend_spec)
    return lambda defect: monkeypatch.setattr(Planted, "defect", defect)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defects")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    np.save(folder / "data.npy", rng.standard_normal((32, WIDTH, ANCHORS)).astype(np.float32))
    return folder / "data.npy"


@pytest.fixture(scope="module")
def models_by_precision(folder: Path, data: Path) -> dict[str, Path]:
    """The detector as it is and in INT8, which `quantize` calls right."""
    path = detector(folder / "net.onnx")
    report = quantize(path, "int8", out=folder / "int8.onnx", calib_data=data, quantize_outputs=True)
    assert not [text for text in report.warnings if "not the model's" in text]
    return {"as is": path, "int8": folder / "int8.onnx"}


@pytest.fixture(scope="module")
def right(folder: Path, models_by_precision: dict[str, Path]) -> dict[str, te.Engine]:
    """Their engines by the same builder with nothing planted, which `build` calls right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            list_backends(), "onnxruntime", replace(list_backends()["onnxruntime"], builder=f"{__name__}:Planted")
        )
        return {
            precision: te.build(
                path, batch=(1, 2, 2), out=folder / f"{precision}.engine.onnx", store=te.Store(folder / "s")
            )
            for precision, path in models_by_precision.items()
        }


@pytest.mark.parametrize("precision", ["as is", "int8"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_builds_parity_fails(
    defect: str, precision: str, plant_in_engine: Callable[[str], None], models_by_precision: dict[str, Path],
    right: dict[str, te.Engine], tmp_path: Path,
) -> None:  # fmt: skip
    assert right[precision].passport.parity.passed  # type: ignore[union-attr]
    plant_in_engine(defect)
    with pytest.raises(AccuracyError, match=r"output `output0` of the engine differs .* channel \d+ of 84"):
        te.build(models_by_precision[precision], batch=(1, 2, 2), out=tmp_path / "wrong.onnx", rebuild=True)
    assert not (tmp_path / "wrong.onnx").exists()


@pytest.mark.parametrize("defect", DEFECTS[::3])
def test_compares_gate_fails_and_names_the_channel(
    defect: str, plant_in_engine: Callable[[str], None], models_by_precision: dict[str, Path],
    right: dict[str, te.Engine], tmp_path: Path,
) -> None:  # fmt: skip
    plant_in_engine(defect)
    path = models_by_precision["as is"]
    wrong = te.build(path, out=tmp_path / "engine.onnx", batch=(1, 2, 2), parity=False, rebuild=True)
    with pytest.raises(AccuracyError, match=r"output0: channel \d+ of 84 \(axis 1\): difference"):
        te.compare(right["as is"], wrong, fail_if=["error:0.05"], duration_s=0.2, restarts=6)


@pytest.mark.parametrize("defect", DEFECTS)
def test_quantizes_report_says_so(
    defect: str, data: Path, models_by_precision: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = models_by_precision["as is"], tmp_path / "wrong.onnx"
    monkeypatch.setattr(quantizing, "deepcopy", lambda proto: plant(defect, deepcopy(proto)))
    if defect in ("dead class head", "all scores equal"):
        with pytest.raises(AccuracyError, match=r"channel \d+ of 84 \(axis 1\) of `output0` is dead"):
            quantize(path, "int8", out=out, calib_data=data, quantize_outputs=True)
        assert not out.exists()
    else:
        report = quantize(path, "int8", out=out, calib_data=data, quantize_outputs=True)
        assert any("`output0` no longer matches the model: channel" in text for text in report.warnings)
