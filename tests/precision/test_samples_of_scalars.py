"""Inputs without dimensions, in every way that data comes in."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.graph.load import open_model
from trt_engine.precision.samples import open_samples
from trt_engine.records.precision import RangesReport
from trt_engine.reporting.tables import batch_option

ROWS = 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """`y = x * k + flag`, `k` and `flag` without dimensions, as the batch's size may be anything."""
    nodes = [
        helper.make_node("Mul", ["x", "k"], ["m"]),
        helper.make_node("Cast", ["flag"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["m", "f"], ["y"]),
    ]
    return save(
        tmp_path / "m.onnx",
        nodes,
        {"k": (FLOAT, []), "x": (FLOAT, ["n", 4]), "flag": (TensorProto.BOOL, [])},
        {"y": (FLOAT, ["n", 4])},
    )


def feeds(number: float = 3.0, rows: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 4), np.float32), "k": np.array(number, np.float32), "flag": np.array(True)}


def largest(report: RangesReport) -> float:
    return next(item for item in report.tensors if item.name == "y").max


@pytest.mark.parametrize("kind", [float, np.float32, np.float64], ids=["float", "float32", "float64"])
def test_a_plain_number_is_a_scalar(model: Path, kind: type) -> None:
    assert largest(te.ranges(model, [feeds() | {"k": kind(3)}])) == 4.0


def test_ranges_take_a_scalar_from_a_file_and_from_a_folder_of_files(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        np.savez(folder / f"{number}.npz", **feeds(float(number), 2))
    assert largest(te.ranges(model, folder / "1.npz", batch=2)) == 2.0
    assert largest(te.ranges(model, folder)) == 3.0


def test_rows_that_go_with_different_scalars_do_not_share_a_batch(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        np.savez(folder / f"{number}.npz", **feeds(float(number), 2))
    batches = list(open_samples(folder, open_model(model).signature, batch=4))
    assert [(float(batch.feeds["k"]), batch.rows) for batch in batches] == [(0.0, 2), (1.0, 2), (2.0, 2)]
    assert all(batch.feeds["flag"].shape == () for batch in batches)


def test_cast_and_its_automatic_choice_take_a_scalar_from_a_file(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **feeds(3.0, ROWS))
    report = te.cast(model, "fp16", out=tmp_path / "half.onnx", auto_exclude=True, calib_data=tmp_path / "data.npz")
    assert report.parity is not None
    assert "y" in report.parity.outputs


def test_a_table_of_a_size_of_its_own_goes_with_the_rows_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "table.onnx"
    save(
        path,
        [node("MatMul", "x table", "y")],
        {"x": (FLOAT, ["n", 4]), "table": (FLOAT, [4, 3])},
        {"y": (FLOAT, ["n", 3])},
    )
    np.savez(tmp_path / "d.npz", x=np.ones((7, 4), np.float32), table=np.ones((4, 3), np.float32))
    report = te.ranges(path, tmp_path / "d.npz")
    assert (report.rows, largest(report)) == (7, 4.0)


def test_a_model_of_one_scalar_takes_npy_raw_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "one.onnx"
    save(path, [node("Exp", "k", "y")], {"k": (FLOAT, [])}, {"y": (FLOAT, [])})
    np.save(tmp_path / "k.npy", np.float32(2))
    np.array(2, np.float32).tofile(tmp_path / "k.bin")
    for data in (tmp_path / "k.npy", tmp_path / "k.bin", [2.0], [np.float32(2)]):
        assert largest(te.ranges(path, data)) == pytest.approx(np.exp(2.0))


@pytest.mark.parametrize("kind", ["int2", "uint2", "int4", "bfloat16", "float8_e4m3fn", "float8_e5m2fnuz"])
def test_data_of_a_type_numpy_lacks_is_observed(tmp_path: Path, kind: str) -> None:
    number = {"int2": 26, "uint2": 25, "int4": 22, "bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2fnuz": 20}[kind]
    path = tmp_path / "m.onnx"
    save(
        path,
        [node("Cast", "x", "f", to=1), node("Add", "f f", "y")],
        {"x": (number, ["n", 3])},
        {"y": (FLOAT, ["n", 3])},
        opset=25,
    )
    report = te.ranges(path, [{"x": np.array([[1, 0, 1]], getattr(ml_dtypes, kind))}])
    assert largest(report) == 2.0


@pytest.mark.parametrize("together", [True, False])
def test_a_recording_is_one_sample_and_its_frames_are_not_where_frames_depend_on_others(
    tmp_path: Path, together: bool
) -> None:
    inner = node("CumSum", "x axis", "y")
    save(
        tmp_path / "m.onnx",
        [inner],
        {"x": (FLOAT, ["t", "f"])},
        {"y": (FLOAT, ["u", "f"])},
        {"axis": np.int64(not together)},
    )
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((ROWS, 4), np.float32))
    model, sizes = open_model(tmp_path / "m.onnx"), [6, 6, 6] if together else [2] * 9
    for limit, taken in ((None, sizes), (2, sizes[: 2 if together else 1])):
        found = open_samples(tmp_path, model.signature, batch=2, limit=limit, model=model)
        assert [batch.rows for batch in found] == taken
    assert not together or "--shapes x:6x4" in batch_option(str(tmp_path / "m.onnx"), batch=False, data=tmp_path)
