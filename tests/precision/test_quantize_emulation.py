"""The emulation in FP32 computes, bit for bit, what the formats say, and reads what others write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models import FLOAT, fp8_qdq, int8_qdq, node, save
from trt_engine.errors import ModelError
from trt_engine.precision.emulate import emulate
from trt_engine.precision.formats import FORMATS
from trt_engine.precision.formats import emulate as rounded
from trt_engine.precision.formats import quantize as to_format

Array = np.ndarray[Any, Any]


def run(path: Path, given: dict[str, Array], level: str = "ALL") -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    kind = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = kind.ORT_ENABLE_ALL if level == "ALL" else kind.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def round_trip(path: Path, form: str, amax: float, *, rank: int = 2) -> Path:
    """`x` to the format and back, as `quantize` writes it for an activation."""
    weights: dict[str, Any] = {}
    given: dict[str, Any] = {"axis": -1, "block_size": FORMATS[form].block}
    if form == "nvfp4":
        weights["s"] = np.asarray(to_format(np.zeros(16), "nvfp4", amax=amax).tensor_scale)
        nodes = [
            node("TRT_FP4DynamicQuantize", "x s", "v b", domain="trt", scale_type=17, **given),
            node("DequantizeLinear", "b s", "f"),
            node("DequantizeLinear", "v f", "y", **given),
        ]
    elif form == "mxfp8":
        nodes = [
            node("TRT_MXFP8DynamicQuantize", "x", "v b", domain="trt", output_dtype=17, **given),
            node("TRT_MXFP8DequantizeLinear", "v b", "y", domain="trt", output_dtype=FLOAT, **given),
        ]
    else:
        weights["s"] = to_format(np.zeros(1), form, amax=amax).scales
        kind = TensorProto.INT8 if form == "int8" else TensorProto.FLOAT8E4M3FN
        weights["z"] = helper.make_tensor("z", kind, [], [0])
        nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    shape = [f"d{at}" for at in range(rank)]
    sides = {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)}
    return save(path, nodes, *sides, weights, opset=23, domains={"trt": 1}, ir_version=11)


@pytest.fixture(scope="module")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnxruntime.InferenceSession]:
    """An emulated round trip for each format, with the range 6."""
    folder = tmp_path_factory.mktemp("emulations")
    made = {}
    for form in ("int8", "fp8", "nvfp4", "mxfp8"):
        path = emulate(round_trip(folder / f"{form}.onnx", form, 6.0), folder / f"{form}.emulated.onnx")
        made[form] = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return made


def expected(x: Array, form: str) -> Array:
    if form == "mxfp8":
        return rounded(x, form)
    return rounded(x, form, amax=6.0)


SPECIAL = np.array(
    [0.0, -0.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, 448.0, 447.9, 464.0, 480.0, 1e-45, 1e-40, 2.0**-149, 3e38, -3e38,
     2.0**-126, 1.75 * 2.0**8, 1.75 * 2.0**-6, 1.7500001, 1.9999999, 3.4e38, -5.5, 0.062499996, 0.0625, 0.9999999,
     1.0000001, 2.0, 4.0, 8.0], np.float32,
)  # fmt: skip


@pytest.mark.parametrize("form", ["int8", "fp8", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("scale", [2.0**-130, 1e-30, 1e-6, 1.0, 3.0, 1e6, 1e20, 1e37])
def test_random_data_is_rounded_bit_for_bit(
    emulations: dict[str, onnxruntime.InferenceSession], form: str, scale: float
) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 128)) * np.float32(scale)).astype(np.float32)
    x[3, :64] = 0
    got = emulations[form].run(None, {"x": x})[0]
    np.testing.assert_array_equal(got, expected(x, form))


@pytest.mark.parametrize("form", ["int8", "fp8", "nvfp4", "mxfp8"])
def test_ties_ends_and_the_smallest_numbers_are_rounded_bit_for_bit(
    emulations: dict[str, onnxruntime.InferenceSession], form: str
) -> None:
    rows = np.stack([np.roll(SPECIAL, at) for at in range(len(SPECIAL))])
    with np.errstate(over="ignore"):
        rows = np.concatenate([rows, np.diag(SPECIAL), *[rows * np.float32(2.0**power) for power in (-8, -3, 3)]])
    rows = np.where(np.isfinite(rows), rows, 0).astype(np.float32)
    got = emulations[form].run(None, {"x": rows})[0]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, expected(rows, form))


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp8"])
def test_blocks_of_the_last_axis_do_not_depend_on_the_rank(tmp_path: Path, form: str, rank: int) -> None:
    path = emulate(round_trip(tmp_path / "a.onnx", form, 6.0, rank=rank), tmp_path / "b.onnx")
    x = np.random.default_rng(2).standard_normal((*[2, 3, 5][: rank - 1], 64)).astype(np.float32)
    np.testing.assert_array_equal(run(path, {"x": x})[0], expected(x, form))


@pytest.mark.parametrize("make", [int8_qdq, fp8_qdq])
def test_plain_qdq_graphs_give_the_same_numbers_as_onnx_runtimes_own_kernels(tmp_path: Path, make: Any) -> None:
    source = make(tmp_path / "a.onnx")
    path = emulate(source, tmp_path / "b.onnx")
    x = np.random.default_rng(2).standard_normal((2, 3, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(run(path, {"x": x}, "none")[0], run(source, {"x": x}, "none")[0], rtol=1e-5, atol=1e-5)
    left = {item.op_type for item in onnx.load(path).graph.node}
    assert not left & {"QuantizeLinear", "DequantizeLinear"}


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_zero_points_and_channels_are_read_as_well(tmp_path: Path, kind: Any) -> None:
    rng = np.random.default_rng(4)
    weights = {
        "s": np.float32(0.031), "z": kind(17), "w": rng.integers(0, 100, (4, 8)).astype(kind),
        "sw": rng.uniform(0.01, 0.1, 8).astype(np.float32), "zw": rng.integers(0, 60, 8).astype(kind),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("DequantizeLinear", "w sw zw", "wd", axis=1),
        node("MatMul", "d wd", "y"),
    ]
    source = save(tmp_path / "a.onnx", nodes, {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 8])}, weights)
    x = (rng.standard_normal((16, 4)) * 5).astype(np.float32)
    wanted = run(source, {"x": x}, "none")[0]
    np.testing.assert_allclose(run(emulate(source, tmp_path / "b.onnx"), {"x": x})[0], wanted, rtol=1e-5, atol=1e-5)


def test_stored_weights_come_back_as_the_formats_say(tmp_path: Path) -> None:
    from trt_engine.precision.quantize_model import quantize

    values = np.random.default_rng(5).standard_normal((64, 96)).astype(np.float32)
    for form, axis in (("int4", 0), ("nvfp4", 0), ("mxfp8", 0)):
        nodes = [node("MatMul", "x w", "y")]
        sides = {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 96])}
        source = save(tmp_path / "a.onnx", nodes, *sides, {"w": values})
        own = {"weights_only": True} if form != "int4" else {}
        quantize(
            source, form, out=tmp_path / "q.onnx", emulate=tmp_path / "e.onnx", overwrite=True, parity=False, **own
        )
        eye = np.eye(64, dtype=np.float32)
        block = 64 if form == "int4" else None
        np.testing.assert_array_equal(
            run(tmp_path / "e.onnx", {"x": eye})[0], rounded(values, form, axis=axis, block=block)
        )


def test_an_operator_without_an_emulation_is_refused_by_name(tmp_path: Path) -> None:
    nodes = [node("TRT_BlockQuantize", "x s", "q", domain="trt", name="odd"), node("Identity", "q", "y")]
    sides = {"x": (FLOAT, [4, 32])}, {"y": (FLOAT, [4, 32])}
    source = save(tmp_path / "a.onnx", nodes, *sides, {"s": np.float32(1)}, domains={"trt": 1})
    with pytest.raises(ModelError, match="`odd`"):
        emulate(source, tmp_path / "b.onnx")
    assert not (tmp_path / "b.onnx").exists()


def test_a_scale_worked_out_while_running_is_refused(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMax", "x", "m", keepdims=0), node("QuantizeLinear", "x m z", "q"),
        node("DequantizeLinear", "q m z", "y"),
    ]  # fmt: skip
    sides = {"x": (FLOAT, [4, 32])}, {"y": (FLOAT, [4, 32])}
    source = save(tmp_path / "a.onnx", nodes, *sides, {"z": np.int8(0)})
    with pytest.raises(ModelError, match="computed, not stored"):
        emulate(source, tmp_path / "b.onnx")


def test_an_unquantised_model_comes_through_unchanged(tmp_path: Path) -> None:
    weights = {"w": np.ones((3, 2), np.float32)}
    source = save(
        tmp_path / "a.onnx", [node("MatMul", "x w", "y")], {"x": (FLOAT, ["n", 3])}, {"y": (FLOAT, ["n", 2])}, weights
    )
    made = onnx.load(emulate(source, tmp_path / "b.onnx"))
    assert [item.op_type for item in made.graph.node] == ["MatMul"]
    np.testing.assert_array_equal(numpy_helper.to_array(made.graph.initializer[0]), weights["w"])


def test_a_cast_behind_a_pair_keeps_the_type_it_states(tmp_path: Path) -> None:
    """Between two pairs the graph goes to 16 bits: what the second one reads there has to be widened."""
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("Cast", "d", "half", to=TensorProto.FLOAT16),
        node("QuantizeLinear", "half s16 z", "q2"),
        node("DequantizeLinear", "q2 s16 z", "h2"),
        node("Cast", "h2", "y", to=FLOAT),
    ]
    weights = {"s": np.float32(0.25), "s16": np.float16(0.5), "z": np.int8(0)}
    source = save(tmp_path / "net.onnx", nodes, {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 4])}, weights, opset=19)
    x = np.linspace(-3, 3, 8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(emulate(source, tmp_path / "e.onnx"), {"x": x})[0], run(source, {"x": x})[0])


@pytest.mark.parametrize("size", [64, 60], ids=["even", "uneven"])
@pytest.mark.parametrize("zero", [False, True])
def test_a_vector_stored_in_blocks_is_emulated_as_onnx_runtime_computes_it(
    tmp_path: Path, size: int, zero: bool
) -> None:
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {
        "w": rng.integers(-127, 128, size).astype(np.int8),
        "s": rng.random(4).astype(np.float32) + 0.5,
        "z": np.array([1, -2, 3, 0], np.int8),
    }
    nodes = [
        node("DequantizeLinear", "w s z" if zero else "w s", "d", axis=0, block_size=16), node("Add", "x d", "y"),
    ]  # fmt: skip
    sides = {"x": (FLOAT, [size])}, {"y": (FLOAT, [size])}
    path = save(tmp_path / "blocks.onnx", nodes, *sides, stored, opset=21)
    x = rng.normal(size=size).astype(np.float32)
    emulated = emulate(path, tmp_path / "emulated.onnx")
    np.testing.assert_allclose(run(emulated, {"x": x})[0], run(path, {"x": x}, "NONE")[0], rtol=1e-6)
