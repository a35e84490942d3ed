"""What `quantize` writes: where Q/DQ stands, how weights lie, what is refused and what is left alone, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models import BF16, FLOAT, HALF, conv_net, node, save
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import unpack
from trt_engine.graph.opset import raise_opset
from trt_engine.precision.formats import emulate
from trt_engine.precision.quantize_model import quantize
from trt_engine.records.precision import QuantizeReport

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)


def weight(*shape: int, spread: float = 1.0) -> Array:
    return (RNG.standard_normal(shape) * spread / shape[0] ** 0.5).astype(np.float32)


def feeds(*shape: int, name: str = "x", count: int = 4) -> list[dict[str, Array]]:
    rng = np.random.default_rng(3)
    return [{name: rng.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def perceptron(path: Path, **given: Any) -> Path:
    """`x` (batch x 64) through MatMul, Relu, Gemm(transB=1), Relu, Gemm to `y` (batch x 8)."""
    weights = {
        "w0": weight(64, 96), "w1": weight(128, 96), "b1": weight(128), "w2": weight(128, 8), "b2": weight(8),
    }  # fmt: skip
    nodes = [
        node("MatMul", "x w0", "m0", name="first"),
        node("Relu", "m0", "r0"),
        node("Gemm", "r0 w1 b1", "m1", name="second", transB=1),
        node("Relu", "m1", "r1"),
        node("Gemm", "r1 w2 b2", "y", name="third"),
    ]
    sides = {"x": (FLOAT, ["batch", 64])}, {"y": (FLOAT, ["batch", 8])}
    return save(path, nodes, *sides, weights, **given)


def by_name(path: Path) -> tuple[onnx.ModelProto, dict[str, onnx.NodeProto], dict[str, onnx.TensorProto]]:
    model = onnx.load(path)
    makers = {name: item for item in model.graph.node for name in item.output}
    return model, makers, {item.name: item for item in model.graph.initializer}


def run(path: Path, given: dict[str, Array], level: str = "ALL") -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    kind = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = {"ALL": kind.ORT_ENABLE_ALL, "BASIC": kind.ORT_ENABLE_BASIC}[level]
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def cosine(a: Array, b: Array) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def reasons(report: QuantizeReport) -> dict[str, str]:
    return {item.node: item.reason for item in report.unquantized}


# ------------------------------------------------------------------------------------------------ INT8 and FP8


def test_int8_puts_a_pair_on_each_activation_and_stores_weights_with_one_scale_for_each_channel(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx", opset=13, ir_version=8)
    report = quantize(
        source, "int8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64), quantize_outputs=True, calibrator="minmax"
    )
    model, makers, stored = by_name(tmp_path / "q.onnx")
    assert report.opset == 13 and report.precision.main_dtype == "int8"
    for name, axis, channels in (("first", 1, 96), ("second", 0, 128), ("third", 1, 8)):
        layer = next(item for item in model.graph.node if item.name == name)
        dequantize = makers[layer.input[1]]
        assert dequantize.op_type == "DequantizeLinear" and walk.attributes(dequantize)["axis"] == axis
        assert stored[dequantize.input[0]].data_type == TensorProto.INT8
        assert list(stored[dequantize.input[1]].dims) == [channels]
        back = makers[layer.input[0]]
        there = makers[back.input[0]]
        assert (there.op_type, back.op_type) == ("QuantizeLinear", "DequantizeLinear")
        assert list(there.input[1:]) == list(back.input[1:])
    assert not {"w0", "w1", "w2"} & set(stored)
    biases = [item.input[2] for item in model.graph.node if item.op_type == "Gemm"]
    assert len(biases) == 2 and {stored[name].data_type for name in biases} == {FLOAT}


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("calibrator", ["mse", "entropy", "minmax", "percentile"])
def test_a_quantised_convolution_net_runs_in_onnx_runtime_and_stays_close(
    tmp_path: Path, to: str, calibrator: str
) -> None:
    source = conv_net(tmp_path / "net.onnx")
    data = feeds(4, 3, 8, 8, name="images")
    report = quantize(
        source, to, out=tmp_path / "q.onnx", calib_data=data, calibrator=calibrator, quantize_outputs=True
    )
    got = run(tmp_path / "q.onnx", data[0], "BASIC" if to == "fp8" else "ALL")[0]
    assert cosine(got, run(source, data[0])[0]) > 0.99
    assert report.parity is not None and report.parity["scores"].cosine > 0.99
    assert report.measured_on == "kernels" and report.calibration is not None
    assert report.calibration["calibrator"] == calibrator


def test_fp8_raises_the_opset_to_where_fp8_begins_and_has_one_scale_for_a_weight(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx", opset=13, ir_version=8)
    report = quantize(source, "fp8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64), quantize_outputs=True)
    _, makers, stored = by_name(tmp_path / "q.onnx")
    assert (report.opset_before, report.opset) == (13, 19)
    weights = [item for item in makers.values() if item.op_type == "DequantizeLinear" and item.input[0] in stored]
    assert len(weights) == 3
    assert all(not stored[item.input[1]].dims for item in weights)
    assert all(stored[item.input[0]].data_type == TensorProto.FLOAT8E4M3FN for item in weights)


def test_the_last_layer_before_an_output_stays_in_float_unless_asked_for(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(source, "int8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64))
    assert [item.node for item in report.quantized] == ["first", "second"]
    assert "last layer" in reasons(report)["third"]
    every = quantize(source, "int8", out=tmp_path / "all.onnx", calib_data=feeds(8, 64), quantize_outputs=True)
    assert [item.node for item in every.quantized] == ["first", "second", "third"]


def detector(path: Path) -> Path:
    """Boxes (0 to 480) and scores (0 to 1) of one trunk, joined at the end; boxes by expectation over a Softmax."""
    weights = {
        "w0": weight(16, 3, 3, 3), "wb": weight(16, 16, 1, 1, spread=3.0), "ws": weight(4, 16, 1, 1),
        "bins": np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1), "big": np.float32(32),
    }  # fmt: skip
    nodes = [
        node("Conv", "images w0", "c0", name="trunk", pads=[1, 1, 1, 1]),
        node("Relu", "c0", "r0"),
        node("Conv", "r0 wb", "raw", name="box_head"),
        node("Softmax", "raw", "shares", axis=1),
        node("Conv", "shares bins", "steps", name="expectation"),
        node("Mul", "steps big", "boxes"),
        node("Conv", "r0 ws", "logits", name="score_head"),
        node("Sigmoid", "logits", "scores"),
        node("Concat", "boxes scores", "out", axis=1),
    ]
    sides = {"images": (FLOAT, ["batch", 3, 8, 8])}, {"out": (FLOAT, ["batch", 5, 8, 8])}
    return save(path, nodes, *sides, weights)


@pytest.mark.parametrize("heads", [False, True])
def test_boxes_and_scores_never_share_a_scale_and_the_decoding_stays_in_float(tmp_path: Path, heads: bool) -> None:
    source = detector(tmp_path / "net.onnx")
    data = feeds(4, 3, 8, 8, name="images")
    report = quantize(source, "int8", out=tmp_path / "q.onnx", calib_data=data, quantize_outputs=heads)
    model, makers, _ = by_name(tmp_path / "q.onnx")
    join = next(item for item in model.graph.node if item.op_type == "Concat")
    assert [makers[name].op_type for name in join.input] == ["Mul", "Sigmoid"]
    assert "Softmax" in reasons(report)["expectation"]
    got, wanted = run(tmp_path / "q.onnx", data[0])[0], run(source, data[0])[0]
    assert cosine(got[:, 4:], wanted[:, 4:]) > 0.99  # under one scale with the boxes all scores would be one number
    assert len(np.unique(got[:, 4:])) > 50


def test_one_pair_serves_all_quantised_readers_and_float_readers_keep_the_tensor(tmp_path: Path) -> None:
    weights = {"w0": weight(64, 64), "wq": weight(64, 64), "wk": weight(64, 64), "we": weight(64, 4)}
    nodes = [
        node("MatMul", "x w0", "h"),
        node("MatMul", "h wq", "q", name="q"),
        node("MatMul", "h wk", "k", name="k"),
        node("Sigmoid", "h", "gate"),
        node("Mul", "q k", "qk"),
        node("Mul", "qk gate", "mixed"),
        node("MatMul", "mixed we", "y"),
    ]
    source = save(tmp_path / "net.onnx", nodes, {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 4])}, weights)
    quantize(source, "int8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64))
    model, makers, _ = by_name(tmp_path / "q.onnx")
    readers = [item for item in model.graph.node if item.op_type == "QuantizeLinear" and item.input[0] == "h"]
    assert len(readers) == 1
    q, k = (next(item for item in model.graph.node if item.name == name) for name in "qk")
    assert q.input[0] == k.input[0] and makers[q.input[0]].op_type == "DequantizeLinear"
    assert next(item for item in model.graph.node if item.op_type == "Sigmoid").input[0] == "h"


def residual(path: Path) -> Path:
    weights = {"w0": weight(8, 3, 1, 1), "w1": weight(8, 8, 1, 1), "w2": weight(8, 8, 1, 1), "w3": weight(4, 8, 1, 1)}
    nodes = [
        node("Conv", "images w0", "a"),
        node("Relu", "a", "ra"),
        node("Conv", "ra w1", "b"),
        node("Add", "b ra", "sum"),
        node("Relu", "sum", "rs"),
        node("Conv", "rs w2", "c"),
        node("Conv", "c w3", "y"),
    ]
    sides = {"images": (FLOAT, ["n", 3, 4, 4])}, {"y": (FLOAT, ["n", 4, 4, 4])}
    return save(path, nodes, *sides, weights)


def test_the_other_side_of_a_residual_addition_is_quantised_when_asked_for(tmp_path: Path) -> None:
    source = residual(tmp_path / "net.onnx")
    data = feeds(4, 3, 4, 4, name="images")
    for wanted in (False, True):
        quantize(source, "int8", out=tmp_path / "q.onnx", calib_data=data, quantize_residuals=wanted, overwrite=True)
        model, makers, _ = by_name(tmp_path / "q.onnx")
        addition = next(item for item in model.graph.node if item.op_type == "Add")
        assert addition.input[0] == "b"  # nothing stands between the convolution and what it is fused with
        assert (makers[addition.input[1]].op_type == "DequantizeLinear") == wanted


# ------------------------------------------------------------------------------------------------ INT4


def test_int4_blocks_lie_along_the_inputs_whichever_way_the_weight_lies(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(source, "int4", out=tmp_path / "q.onnx", quantize_outputs=True, block_size=32)
    model, makers, stored = by_name(tmp_path / "q.onnx")
    assert report.opset == 21 and report.weights_only and report.calibration is None
    original = {item.name: numpy_helper.to_array(item) for item in onnx.load(source).graph.initializer}
    for name, weight_name, axis in (("first", "w0", 0), ("second", "w1", 1), ("third", "w2", 0)):
        layer = next(item for item in model.graph.node if item.name == name)
        dequantize = makers[layer.input[1]]
        given = walk.attributes(dequantize)
        assert (given["axis"], given["block_size"]) == (axis, 32)
        values, scales = stored[dequantize.input[0]], stored[dequantize.input[1]]
        assert values.data_type == TensorProto.INT4
        shape = list(original[weight_name].shape)
        assert list(values.dims) == shape
        shape[axis] //= 32
        assert list(scales.dims) == shape
        whole = unpack(values.raw_data, tuple(values.dims), "int4").astype(np.float32)
        back = whole * np.repeat(numpy_helper.to_array(scales), 32, axis)
        np.testing.assert_array_equal(back, emulate(original[weight_name], "int4", axis=axis, block=32))


def test_the_largest_block_that_divides_is_taken_and_one_that_does_not_is_refused_for_that_layer(
    tmp_path: Path,
) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(source, "int4", out=tmp_path / "q.onnx", quantize_outputs=True)
    assert [item.weight.split(" of ")[1].split()[0] for item in report.quantized] == ["64", "32", "128"]
    forced = quantize(source, "int4", out=tmp_path / "f.onnx", quantize_outputs=True, block_size=128)
    assert [item.node for item in forced.quantized] == ["third"]
    assert "64 inputs are not divided by blocks of 128" in reasons(forced)["first"]
    assert "96 inputs" in reasons(forced)["second"]


def test_awq_is_nearer_than_rounding_where_a_few_inputs_carry_most(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    rng = np.random.default_rng(5)
    spread = np.where(np.arange(64) % 16 == 0, 20.0, 0.3).astype(np.float32)
    data = [{"x": (rng.standard_normal((32, 64)) * spread).astype(np.float32)} for _ in range(4)]
    quantize(
        source,
        "int4",
        out=tmp_path / "rtn.onnx",
        quantize_outputs=True,
        block_size=64,
        exclude_nodes=("second", "third"),
    )
    quantize(
        source, "int4", out=tmp_path / "awq.onnx", quantize_outputs=True, block_size=64, method="awq", calib_data=data,
        exclude_nodes=("second", "third"),
    )  # fmt: skip
    held_out = (rng.standard_normal((64, 64)) * spread).astype(np.float32)
    wanted = run(source, {"x": held_out})[0]
    errors = [np.square(run(tmp_path / f"{name}.onnx", {"x": held_out})[0] - wanted).mean() for name in ("rtn", "awq")]
    assert errors[1] < 0.6 * errors[0]


# ------------------------------------------------------------------------------------------------ NVFP4 and MXFP8


def test_nvfp4_weights_are_packed_with_two_levels_of_scales(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(source, "nvfp4", out=tmp_path / "q.onnx", calib_data=feeds(8, 64), quantize_outputs=True)
    model, makers, stored = by_name(tmp_path / "q.onnx")
    assert report.opset == 23 and report.measured_on == "emulation" and report.precision.main_dtype == "nvfp4"
    original = {item.name: numpy_helper.to_array(item) for item in onnx.load(source).graph.initializer}
    for name, weight_name, turned in (("first", "w0", True), ("second", "w1", False), ("third", "w2", True)):
        layer = next(item for item in model.graph.node if item.name == name)
        maker = makers[layer.input[1]]
        if layer.op_type == "Gemm":
            assert walk.attributes(layer)["transB"] == 1
        else:
            assert maker.op_type == "Transpose"
            maker = makers[maker.input[0]]
        assert walk.attributes(maker) == {"axis": -1, "block_size": 16}
        scales = makers[maker.input[1]]
        assert [stored[maker.input[0]].data_type, stored[scales.input[0]].data_type, stored[scales.input[1]].data_type] == [
            TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT,
        ]  # fmt: skip
        matrix = original[weight_name].T if turned else original[weight_name]
        whole = unpack(stored[maker.input[0]].raw_data, matrix.shape, "float4_e2m1fn").astype(np.float32)
        first = np.frombuffer(stored[scales.input[0]].raw_data, ml_dtypes.float8_e4m3fn).astype(np.float32)
        second = numpy_helper.to_array(stored[scales.input[1]])
        back = whole * np.repeat((first * second).reshape(matrix.shape[0], -1), 16, 1)
        np.testing.assert_array_equal(back, emulate(np.ascontiguousarray(matrix), "nvfp4", axis=1))


def test_nvfp4_activations_go_through_the_operator_tensorrt_knows(tmp_path: Path) -> None:
    quantize(perceptron(tmp_path / "net.onnx"), "nvfp4", out=tmp_path / "q.onnx", calib_data=feeds(8, 64))
    model, _, stored = by_name(tmp_path / "q.onnx")
    dynamic = [item for item in model.graph.node if item.op_type == "TRT_FP4DynamicQuantize"]
    assert len(dynamic) == 2
    for item in dynamic:
        assert item.domain == "trt" and len(item.output) == 2
        assert walk.attributes(item) == {"axis": -1, "block_size": 16, "scale_type": TensorProto.FLOAT8E4M3FN}
        scale = stored[item.input[1]]
        assert not scale.dims and scale.data_type == FLOAT  # an initializer and a scalar, or the parser refuses it
        first = next(other for other in model.graph.node if other.input and other.input[0] == item.output[1])
        assert (first.op_type, first.input[1]) == ("DequantizeLinear", item.input[1])
        second = next(other for other in model.graph.node if other.input and other.input[0] == item.output[0])
        assert second.input[1] == first.output[0] and walk.attributes(second) == {"axis": -1, "block_size": 16}
    assert {item.domain for item in model.opset_import} == {"", "trt"}


def test_mxfp8_writes_tensorrts_operators_with_scales_as_bytes_and_needs_no_data(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(source, "mxfp8", out=tmp_path / "q.onnx", quantize_outputs=True)
    model, _, stored = by_name(tmp_path / "q.onnx")
    assert report.opset == 21 and report.calibration is None and report.precision.main_dtype == "mxfp8"
    there = [item for item in model.graph.node if item.op_type == "TRT_MXFP8DynamicQuantize"]
    assert len(there) == 3 and all(len(item.input) == 1 and len(item.output) == 2 for item in there)
    back = [item for item in model.graph.node if item.op_type == "TRT_MXFP8DequantizeLinear"]
    assert len(back) == 6 and all(item.domain == "trt" for item in back)
    for item in back:
        assert walk.attributes(item) == {"axis": -1, "block_size": 32, "output_dtype": FLOAT}
        if item.input[0] in stored:
            values, scales = stored[item.input[0]], stored[item.input[1]]
            assert (values.data_type, scales.data_type) == (TensorProto.FLOAT8E4M3FN, TensorProto.UINT8)
            assert list(scales.dims) == [values.dims[0], values.dims[1] // 32]


def test_awq_clips_nvfp4_weights_by_what_their_inputs_carry(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    rng = np.random.default_rng(5)
    spread = np.where(np.arange(64) % 16 == 0, 20.0, 0.3).astype(np.float32)
    data = [{"x": (rng.standard_normal((32, 64)) * spread).astype(np.float32)} for _ in range(4)]
    errors = []
    for method in ("rtn", "awq"):
        report = quantize(
            source, "nvfp4", out=tmp_path / f"{method}.onnx", calib_data=data, weights_only=True, method=method,
            exclude_nodes=("second", "third"),
        )  # fmt: skip
        assert report.parity is not None
        errors.append(report.parity["y"].mean_abs)
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["conv", "grouped", "gemm", "added"])
def test_biases_take_up_what_rounding_takes_away_on_average(tmp_path: Path, to: str, kind: str) -> None:
    rng = np.random.default_rng(9)
    coarse = rng.standard_normal((8, 16)).astype(np.float32)
    coarse[:, 0] = 40  # one large weight leaves the others few levels
    weights: dict[str, Any] = {"w": coarse, "b": rng.standard_normal(8).astype(np.float32), "v": weight(8, 8)}
    nodes = [node("Gemm", "x w b", "h", transB=1), node("MatMul", "h v", "y")]
    shape: tuple[int, ...] = (64, 16)
    if kind == "added":
        weights["w"] = np.ascontiguousarray(coarse.T)
        nodes = [node("MatMul", "x w", "m"), node("Add", "b m", "h"), node("MatMul", "h v", "y")]
    elif kind in ("conv", "grouped"):
        groups = 2 if kind == "grouped" else 1
        weights["w"], weights["v"] = coarse[:, : 16 // groups, None, None], weight(8, 8, 1, 1)
        del weights["b"]
        nodes = [node("Conv", "x w", "h", group=groups), node("Conv", "h v", "y")]
        shape = (8, 16, 4, 4)
    rank = len(shape)
    sides = {"x": (FLOAT, ["n", *shape[1:]])}, {"y": (FLOAT, ["n", 8, *shape[2:]]), "h": (FLOAT, ["n", 8, *shape[2:]])}
    source = save(tmp_path / "net.onnx", nodes, *sides, weights)
    data = [{"x": (rng.standard_normal(shape) + 3).astype(np.float32)} for _ in range(4)]
    off = []
    for corrected in (False, True):
        quantize(
            source,
            to,
            out=tmp_path / "q.onnx",
            calib_data=data,
            bias_correction=corrected,
            overwrite=True,
            calibrator="minmax",
        )
        whole = [run(tmp_path / "q.onnx", item, "BASIC")[1] - run(source, item)[1] for item in data]
        means = np.concatenate(whole).mean(axis=tuple(at for at in range(rank) if at != 1))
        off.append(np.abs(means).max())
    assert off[1] < {"int8": 0.35, "fp8": 0.75}[to] * off[0]  # what rounding x shifts is not taken up


@pytest.mark.parametrize("to", ["int4", "nvfp4", "mxfp8"])
def test_a_convolution_net_has_nothing_for_a_block_format_and_that_is_said(tmp_path: Path, to: str) -> None:
    source = conv_net(tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="nothing to quantise") as raised:
        quantize(source, to, out=tmp_path / "q.onnx", calib_data=feeds(2, 3, 8, 8, name="images"))
    assert "no kernels for convolutions" in raised.value.message and "int8" in (raised.value.hint or "")
    assert not (tmp_path / "q.onnx").exists()


@pytest.mark.parametrize("to", ["int4", "nvfp4", "mxfp8"])
def test_an_emulation_can_show_what_a_block_format_would_cost_a_convolution_net(tmp_path: Path, to: str) -> None:
    source = conv_net(tmp_path / "net.onnx")
    data = feeds(2, 3, 8, 8, name="images")
    report = quantize(
        source, to, emulate=tmp_path / "e.onnx", calib_data=data, emulate_convs=True, quantize_outputs=True
    )
    assert report.out is None and report.measured_on == "emulation"
    assert all("emulation alone" in item.weight for item in report.quantized)
    closeness = cosine(run(tmp_path / "e.onnx", data[0])[0], run(source, data[0])[0])
    assert 0.9 < closeness < 0.999999


# ------------------------------------------------------------------------------------------------ refusals


def test_ranges_known_beforehand_take_the_place_of_data(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    quantize(source, "int8", out=tmp_path / "q.onnx", ranges={"x": 12.7, "r0": 25.4})
    _, makers, stored = by_name(tmp_path / "q.onnx")
    scale = next(item.input[1] for item in makers.values() if item.op_type == "QuantizeLinear" and item.input[0] == "x")
    assert numpy_helper.to_array(stored[scale]) == np.float32(np.float32(12.7) / np.float32(127))


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        ("fp16", {}, "a cast"),
        ("int2", {}, "unknown format"),
        ("int8", {"block_size": 32}, "no blocks"),
        ("nvfp4", {"block_size": 32}, "blocks of 16"),
        ("int4", {"block_size": 48}, "not a power of two"),
        ("int8", {"weights_only": True}, "is not faster"),
        ("fp8", {"method": "awq"}, "AWQ"),
        ("int4", {"quantize_residuals": True}, "INT8 and FP8"),
        ("int8", {"emulate_convs": True}, "anyway"),
        ("int4", {"emulate_convs": True}, "emulation"),
        ("int8", {"exclude_nodes": ("frist",)}, "no node `frist`"),
        ("int8", {"exclude_types": ("Convolution",)}, "no operator `Convolution`"),
        ("int8", {"exclude_patterns": ("/head/*",)}, "matches the pattern"),
        ("int4", {"method": "awq"}, "no data is given"),
        ("int8", {}, "no calibration data is given"),
        ("int8", {"ranges": {"x": 1.0}}, "lack 1 of 2"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_any_work(
    tmp_path: Path, to: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        quantize(perceptron(tmp_path / "net.onnx"), to, out=tmp_path / "q.onnx", **settings)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["net.onnx"]


def test_exclusions_are_by_name_by_type_and_by_pattern(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(
        source, "int8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64), quantize_outputs=True,
        exclude_nodes=("first",), exclude_patterns=("thi*",),
    )  # fmt: skip
    assert [item.node for item in report.quantized] == ["second"]
    assert reasons(report) == {"first": "excluded by name", "third": "excluded by `thi*`"}
    typed = quantize(source, "int8", out=tmp_path / "t.onnx", calib_data=feeds(8, 64), exclude_types=("Gemm",))
    assert [item.node for item in typed.quantized] == ["first"]


def test_a_quantised_model_is_not_quantised_again(tmp_path: Path) -> None:
    quantize(perceptron(tmp_path / "net.onnx"), "int8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64))
    with pytest.raises(ModelError, match="quantised already"):
        quantize(tmp_path / "q.onnx", "int8", calib_data="random", shapes={"none": (1,)})


# ------------------------------------------------------------------------------------------------ graphs as they come


def test_weights_behind_a_transpose_or_a_constant_node_are_found(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(weight(64, 32), "v")),
        node("Transpose", "w", "wt", perm=[1, 0]),
        node("MatMul", "x wt", "a"),
        node("MatMul", "a v", "y"),
    ]
    sides = {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 32])}
    source = save(tmp_path / "net.onnx", nodes, *sides, {"w": weight(64, 64)})
    report = quantize(source, "int4", out=tmp_path / "q.onnx", quantize_outputs=True)
    model, _, stored = by_name(tmp_path / "q.onnx")
    assert len(report.quantized) == 2
    assert [item.op_type for item in model.graph.node] == ["DequantizeLinear", "MatMul"] * 2
    assert "w" not in stored


SIDES = {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 64])}
COMPUTED: dict[str, tuple[list[onnx.NodeProto], dict[str, Array]]] = {
    "cast": ([node("Cast", "v", "w", to=FLOAT)], {"v": weight(64, 64).astype(np.float16)}),
    "joined": ([node("Concat", "a b", "w", axis=1)], {"a": weight(64, 32), "b": weight(64, 32)}),
    "scaled": (
        [node("Div", "v n", "u"), node("Mul", "u g", "w")],
        {"v": weight(64, 64), "n": weight(64, 1), "g": weight(64, 1)},
    ),
    "one part of a Split": (
        [node("Split", "v sizes", "w rest", axis=0)],
        {"v": weight(128, 64), "sizes": np.array([64, 64])},
    ),
    "filled": ([node("ConstantOfShape", "s", "w")], {"s": np.array([64, 64])}),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_weight_that_is_computed_from_constants_alone_is_quantised(tmp_path: Path, kind: str) -> None:
    made, stored = COMPUTED[kind]
    source = save(tmp_path / "net.onnx", [*made, node("MatMul", "x w", "y")], *SIDES, stored)
    quantize(source, "int4", out=tmp_path / "q.onnx", quantize_outputs=True)
    assert [item.op_type for item in onnx.load(tmp_path / "q.onnx").graph.node] == ["DequantizeLinear", "MatMul"]


def test_a_computed_weight_of_a_layer_that_stays_in_float_is_not_stored(tmp_path: Path) -> None:
    made = [node("ConstantOfShape", "s", "w"), node("MatMul", "x w", "a"), node("MatMul", "a w", "y")]
    source = save(tmp_path / "net.onnx", made, *SIDES, {"s": np.array([64, 64])})
    quantize(source, "int8", out=tmp_path / "q.onnx", calib_data="random")
    assert 64 * 64 < (tmp_path / "q.onnx").stat().st_size < 2 * 64 * 64, "of the first layer alone, in INT8"


def test_what_goes_into_a_log_stays_in_float_in_int8(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x w", "bands"), node("Clip", "bands least", "some"), node("Log", "some", "decibels"),
        node("MatMul", "decibels v", "y", name="after"),
    ]  # fmt: skip
    sides = {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 8])}
    stored = {"w": np.abs(weight(64, 32)), "v": weight(32, 8), "least": np.float32(1e-9)}
    source = save(tmp_path / "net.onnx", nodes, *sides, stored)
    report = quantize(
        source, "int8", out=tmp_path / "q.onnx", ranges={"decibels": 20.0, "x": 1.0}, quantize_outputs=True
    )
    assert [item.node for item in report.quantized] == ["after"] and "Log" in next(iter(reasons(report).values()))


def test_layers_in_bodies_stay_in_float_and_it_is_said(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        inner = helper.make_node("MatMul", ["h", "w"], [name], name=f"inner_{name}")
        return helper.make_graph([inner], name, [], [helper.make_tensor_value_info(name, FLOAT, None)])

    nodes = [
        node("MatMul", "x v", "h", name="outer"),
        node("ReduceSum", "h", "s", keepdims=0),
        node("Greater", "s zero", "test"),
        helper.make_node("If", ["test"], ["z"], then_branch=branch("yes"), else_branch=branch("no")),
        node("MatMul", "z u", "y", name="last"),
    ]
    weights = {"v": weight(64, 64), "w": weight(64, 64), "u": weight(64, 64), "zero": np.float32(0)}
    source = save(tmp_path / "net.onnx", nodes, {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 64])}, weights)
    report = quantize(source, "int8", out=tmp_path / "q.onnx", calib_data=feeds(4, 64), quantize_outputs=True)
    assert [item.node for item in report.quantized] == ["outer", "last"]
    assert all("body" in reasons(report)[name] for name in ("inner_yes", "inner_no"))
    assert cosine(run(tmp_path / "q.onnx", feeds(4, 64)[0])[0], run(source, feeds(4, 64)[0])[0]) > 0.99


@pytest.mark.parametrize("to", ["int8", "int4", "nvfp4", "mxfp8"])
def test_weights_outside_the_file_stay_outside(tmp_path: Path, to: str) -> None:
    source = perceptron(tmp_path / "net.onnx", location="net.data")
    plain = perceptron(tmp_path / "plain.onnx")
    model, other = onnx.load(source), onnx.load(plain)  # the same weights for both
    other.graph.CopyFrom(model.graph)
    onnx.save(other, plain)
    report = quantize(source, to, out=tmp_path / "q.onnx", calib_data=feeds(8, 64))
    quantize(plain, to, out=tmp_path / "p.onnx", calib_data=feeds(8, 64))
    raw = onnx.load(tmp_path / "q.onnx", load_external_data=False)
    outside = [item for item in raw.graph.initializer if item.data_location == TensorProto.EXTERNAL]
    assert outside and report.artifacts["weights"].endswith("q.onnx.data")
    assert sorted(item.name for item in tmp_path.iterdir() if item.name.startswith(".")) == []
    whole, inline = onnx.load(tmp_path / "q.onnx"), onnx.load(tmp_path / "p.onnx")
    for mine, theirs in zip(whole.graph.initializer, inline.graph.initializer, strict=True):
        assert mine.name == theirs.name and mine.raw_data == theirs.raw_data


@pytest.mark.parametrize(("elem", "kind"), [(HALF, np.float16), (BF16, ml_dtypes.bfloat16)])
@pytest.mark.parametrize("to", ["int8", "fp8", "int4", "nvfp4", "mxfp8"])
def test_a_16_bit_graph_gets_scales_of_its_own_type(tmp_path: Path, elem: int, kind: Any, to: str) -> None:
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")]
    weights = {"w": weight(64, 64).astype(kind), "v": weight(64, 64).astype(kind)}
    source = save(tmp_path / "net.onnx", nodes, {"x": (elem, ["n", 64])}, {"y": (elem, ["n", 64])}, weights, opset=14)
    quantize(source, to, out=tmp_path / "q.onnx", ranges={"x": 4.0, "r": 8.0}, quantize_outputs=True, parity=False)
    model, _, stored = by_name(tmp_path / "q.onnx")
    if to in ("int8", "fp8", "int4"):
        pairs = [item for item in model.graph.node if item.op_type in ("QuantizeLinear", "DequantizeLinear")]
        assert {stored[item.input[1]].data_type for item in pairs} == {elem}


@pytest.mark.parametrize("rest", ["fp16", "bf16"])
@pytest.mark.parametrize("to", ["int8", "fp8", "int4", "nvfp4", "mxfp8"])
def test_what_is_not_quantised_can_be_16_bit(tmp_path: Path, to: str, rest: str) -> None:
    source = perceptron(tmp_path / "net.onnx")
    report = quantize(source, to, out=tmp_path / "q.onnx", calib_data=feeds(8, 64), high_precision=rest)
    _, _, stored = by_name(tmp_path / "q.onnx")
    assert stored["w2"].data_type == {"fp16": HALF, "bf16": BF16}[rest]
    assert report.measured_on == "emulation" and report.parity is not None and report.parity["y"].cosine > 0.95


# ------------------------------------------------------------------------------------------------ opsets


FORMATS_WITH_OPSETS = ["int8", "fp8", "int4", "nvfp4", "mxfp8"]


@pytest.mark.parametrize(
    ("opset", "to"),
    [(opset, FORMATS_WITH_OPSETS[(opset + shift) % 5]) for opset in range(13, 24) for shift in (0, 2)],
)
def test_every_opset_from_13_to_23_is_taken(tmp_path: Path, opset: int, to: str) -> None:
    source = perceptron(tmp_path / "net.onnx", opset=opset, ir_version=8 if opset < 19 else 10)
    report = quantize(source, to, out=tmp_path / "q.onnx", calib_data=feeds(4, 64, count=1), calibrator="minmax")
    assert report.opset >= opset and report.parity is not None
    assert report.parity["y"].cosine > 0.95


CHANGED: list[tuple[str, list[Any], list[Any], int]] = [
    ("ReduceMean", [node("ReduceMean", "x", "y", axes=[1], keepdims=1)], ["n", 1, 6, 8], 13),
    ("ReduceMax of all", [node("ReduceMax", "x", "y", keepdims=0)], [], 13),
    ("Split", [node("Split", "x", "a b", axis=1), node("Sub", "a b", "y")], ["n", 2, 6, 8], 13),
    ("GridSample", [node("GridSample", "x grid", "y", mode="bicubic")], ["n", 4, 3, 3], 16),
    ("RoiAlign", [node("RoiAlign", "x rois of", "y", output_height=2, output_width=2)], [2, 4, 2, 2], 13),
    ("DFT", [node("DFT", "x", "y", axis=2)], None, 17),
    ("Resize", [node("Resize", "x none scales", "y", mode="linear")], ["n", 4, 12, 16], 13),
]


@pytest.mark.parametrize(("name", "nodes", "shape", "opset"), CHANGED, ids=[item[0] for item in CHANGED])
def test_operators_that_changed_compute_the_same_after_the_raise(
    tmp_path: Path, name: str, nodes: list[Any], shape: list[Any] | None, opset: int
) -> None:
    rng = np.random.default_rng(1)
    weights = {
        "grid": rng.uniform(-1, 1, (2, 3, 3, 2)).astype(np.float32),
        "rois": np.array([[0, 0, 5, 5], [1, 1, 4, 6]], np.float32), "of": np.array([0, 1], np.int64),
        "none": np.zeros(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32),
    }  # fmt: skip
    read = {item for made in nodes for item in made.input}
    weights = {key: value for key, value in weights.items() if key in read}
    last = 1 if name == "DFT" else 8
    sides = {"x": (FLOAT, ["n", 4, 6, last])}, {"y": (FLOAT, shape if shape is not None else ["n", 4, 6, 2])}
    source = save(tmp_path / "net.onnx", nodes, *sides, weights, opset=opset, ir_version=8)
    raised = onnx.load(source)
    raise_opset(raised, 20 if name == "RoiAlign" else 23)  # ONNX Runtime has no kernel for the one of 22
    onnx.checker.check_model(raised, full_check=True)
    onnx.save(raised, tmp_path / "raised.onnx")
    given = {"x": rng.standard_normal((2, 4, 6, last)).astype(np.float32)}
    np.testing.assert_allclose(run(tmp_path / "raised.onnx", given)[0], run(source, given)[0], rtol=1e-6, atol=1e-6)


def test_an_operator_that_means_something_else_later_is_refused(tmp_path: Path) -> None:
    weights = {"s": np.ones(2, np.float32), "b": np.zeros(2, np.float32), "w": weight(8, 4, 1, 1)}
    nodes = [
        node("GroupNormalization", "images s b", "g", name="norm", num_groups=2),
        node("Conv", "g w", "y"),
    ]
    sides = {"images": (FLOAT, ["n", 4, 4, 4])}, {"y": (FLOAT, ["n", 8, 4, 4])}
    source = save(tmp_path / "net.onnx", nodes, *sides, weights, opset=18)
    with pytest.raises(ModelError, match="`norm`"):
        raise_opset(onnx.load(source), 23)
    assert raise_opset(onnx.load(source), 19) == ("opset raised from 18 to 19",)


@pytest.mark.slow
def test_weights_of_more_than_two_gigabytes_are_neither_loaded_nor_moved_into_the_file(tmp_path: Path) -> None:
    rows = 580_000
    table = TensorProto(name="table", data_type=FLOAT, dims=[rows, 1024], data_location=TensorProto.EXTERNAL)
    size = rows * 1024 * 4
    for key, value in (("location", "table.bin"), ("offset", "0"), ("length", str(size))):
        table.external_data.add(key=key, value=value)
    with (tmp_path / "table.bin").open("wb") as file:
        file.write(bytes(32 << 20))
        file.truncate(size)  # a hole behind 1 %: it takes little space
    nodes = [node("Gather", "table at", "g"), node("Add", "g x", "h"), node("MatMul", "h w", "y")]
    sides = {"at": (TensorProto.INT64, ["n"]), "x": (FLOAT, ["n", 1024])}, {"y": (FLOAT, ["n", 64])}
    source = save(tmp_path / "net.onnx", nodes, *sides, {"w": weight(1024, 64)})
    model = onnx.load(source)
    model.graph.initializer.append(table)
    onnx.save(model, source)
    report = quantize(source, "int4", out=tmp_path / "q.onnx", quantize_outputs=True, parity=False)
    raw = onnx.load(tmp_path / "q.onnx", load_external_data=False)
    kept = next(item for item in raw.graph.initializer if item.name == "table")
    assert kept.data_location == TensorProto.EXTERNAL and (tmp_path / "q.onnx").stat().st_size < 1 << 20
    assert report.nbytes is not None and report.nbytes > size


# ------------------------------------------------------------------------------------------------ layers that share


def two_that_share(path: Path, first: str, second: str) -> Path:
    """Two layers of one square weight, neither of them transposed."""
    nodes = [node(first, "x w", "a", name="first"), node(second, "a w", "y", name="second")]
    return save(path, nodes, {"x": (FLOAT, ["n", 64])}, {"y": (FLOAT, ["n", 64])}, {"w": weight(64, 64)})


@pytest.mark.parametrize("to", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize(("first", "second"), [("Gemm", "Gemm"), ("Gemm", "MatMul"), ("MatMul", "Gemm")])
def test_layers_that_share_a_weight_read_it_the_way_it_lies(tmp_path: Path, to: str, first: str, second: str) -> None:
    source, x = two_that_share(tmp_path / "net.onnx", first, second), feeds(64, 64)
    quantize(source, to, out=tmp_path / "q.onnx", emulate=tmp_path / "e.onnx", calib_data=x, quantize_outputs=True)
    assert cosine(run(source, x[0])[0], run(tmp_path / "e.onnx", x[0])[0]) > 0.97


def test_awq_scales_a_shared_weight_for_the_layer_whose_input_it_scales_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lift = np.ones(64, np.float32)
    lift[:4] = 60
    weights = {
        "w": (rng.standard_normal((64, 64)) / 8).astype(np.float32),
        "v": rng.standard_normal((64, 64)).astype(np.float32), "lift": lift,
    }  # fmt: skip
    nodes = [
        node("Mul", "x lift", "lifted"),
        node("MatMul", "lifted w", "a", name="scaled"),
        node("MatMul", "x v", "z"),
        node("Sign", "z", "even"),
        node("MatMul", "even w", "y", name="plain"),
    ]
    sides = {"x": (FLOAT, ["n", 64])}, {"a": (FLOAT, ["n", 64]), "y": (FLOAT, ["n", 64])}
    source, x = save(tmp_path / "net.onnx", nodes, *sides, weights), feeds(64, 64)
    quantize(
        source, "int4", out=tmp_path / "q.onnx", calib_data=x, method="awq", quantize_outputs=True, exclude_nodes=("z",)
    )
    pairs = zip(run(source, x[0]), run(tmp_path / "q.onnx", x[0]), strict=True)
    assert [cosine(before, after) > 0.95 for before, after in pairs] == [True, True]


def test_nodes_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    model = onnx.load(source)
    model.graph.node[2].name = "first"
    onnx.save(model, source)
    report = quantize(source, "int8", out=tmp_path / "q.onnx", calib_data=feeds(8, 64))
    assert any("1 nodes had the name of another" in item for item in report.warnings)
    assert report.parity is not None and report.parity["y"].cosine > 0.99
    names = [item.name for item in onnx.load(tmp_path / "q.onnx").graph.node if item.name]
    assert len(names) == len(set(names))


HEADS = {
    "classes": ([("ArgMax", "z", "y", {"axis": 1})], 7),
    "values of classes": ([("ArgMax", "z", "i", {"axis": 1}), ("Gather", "table i", "y", {})], 1),
    "yes or no": ([("Greater", "z zero", "y", {})], 9),
    "picture": ([("Clip", "z zero", "m", {}), ("Cast", "m", "y", {"to": 2})], 2),
}


@pytest.mark.parametrize("head", HEADS)
def test_an_output_that_int8_destroys_is_a_warning_whatever_its_values_mean(tmp_path: Path, head: str) -> None:
    random, (last, elem) = np.random.default_rng(0), HEADS[head]
    nodes = [node("Conv", "x w1", "a"), node("Relu", "a", "b"), node("Conv", "b w2", "c"), node("Conv", "c w3", "z")]
    w1, w2, w3 = (
        random.normal(0, 0.3, shape).astype(np.float32) for shape in ((16, 3, 3, 3), (8, 16, 3, 3), (8, 8, 3, 3))
    )
    fixed = {"w3": 10 * w3, "zero": np.float32(0), "table": np.exp(np.arange(8)).astype(np.float32)}
    x = [{"x": row} for row in random.random((8, 1, 3, 16, 16), np.float32)]
    for spread, warned in ((1.0, False), (1000.0, True)):  # one channel takes the range of all
        scale = np.array([spread] + 15 * [1], np.float32)
        weights = fixed | {"w1": w1 * scale[:, None, None, None], "w2": w2 / (scale**2)[:, None, None]}
        tail = [node(op, ins, out, **attributes) for op, ins, out, attributes in last]
        source = save(
            tmp_path / "net.onnx", [*nodes, *tail], {"x": (FLOAT, [1, 3, 16, 16])}, {"y": (elem, None)}, weights
        )
        report = quantize(source, "int8", out=tmp_path / f"{warned}.onnx", calib_data=x, target="onnxruntime-cpu")
        assert any("`y` no longer matches the model" in item for item in report.warnings) == warned
        assert report.parity_inputs is not None and report.parity_inputs.startswith("8 rows")


def test_batches_are_compared_each_for_itself_where_one_model_has_other_sizes(tmp_path: Path) -> None:
    """One outlier leaves nothing of the other rows: the quantised model finds no place in any."""
    nodes = [node("MatMul", "x w", "z"), node("Greater", "z least", "b"), node("NonZero", "b", "y")]
    weights = {"w": np.abs(weight(64, 64)) * np.linspace(1, 9, 64, dtype=np.float32), "least": np.float32(20)}
    source = save(tmp_path / "net.onnx", nodes, {"x": (FLOAT, [1, 64])}, {"y": (7, [2, None])}, weights)
    data = [{"x": np.full((1, 64), value, np.float32)} for value in (-1e6, *np.linspace(1, 9, 7))]
    report = quantize(
        source, "int8", out=tmp_path / "q.onnx", calib_data=data, calibrator="minmax", target="onnxruntime-cpu"
    )
    assert any("`y` no longer matches the model" in item for item in report.warnings)


@pytest.mark.parametrize("shape", [(2, 64, 32), (2, 4, 64, 32)])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_batched_weights_have_one_scale_which_every_kernel_takes(
    tmp_path: Path, shape: tuple[int, ...], form: str
) -> None:
    nodes = [node("MatMul", "x w0", "h"), node("Relu", "h", "r"), node("MatMul", "r w1", "y")]
    last = (*shape[:-2], shape[-1], 16)
    rows = (3, 2, 4, 64) if len(shape) == 3 else (2, 4, 4, 64)
    path = save(
        tmp_path / "batched.onnx", nodes, {"x": (FLOAT, list(rows))}, {"y": (FLOAT, [*rows[:-1], 16])},
        {"w0": weight(*shape), "w1": weight(*last)}, opset=21,
    )  # fmt: skip
    made = tmp_path / "q.onnx"
    data = feeds(*rows)
    report = quantize(path, form, out=made, calib_data=data, quantize_outputs=True)
    assert len(report.quantized) == 2
    assert all(item.weight == f"{form}, one scale" for item in report.quantized)
    _, by_output, stored = by_name(made)
    scales = [stored[item.input[1]] for item in by_output.values() if item.op_type == "DequantizeLinear"]
    assert all(not list(scale.dims) for scale in scales)
    if form == "int8":
        for level in ("BASIC", "ALL"):
            assert cosine(run(path, data[0])[0], run(made, data[0], level)[0]) > 0.995


@pytest.mark.parametrize("shape", [(1, 8), (), (5,)], ids=["2-D", "scalar", "too short"])
@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime-cpu"])
def test_a_convolution_with_a_bias_of_another_shape_is_a_model_error(
    tmp_path: Path, shape: tuple[int, ...], target: str
) -> None:
    weights = {"w": weight(8, 3, 3, 3), "b": np.ones(shape, np.float32)}
    sides = {"x": (FLOAT, [1, 3, 8, 8])}, {"y": (FLOAT, [1, 8, 6, 6])}
    path = save(tmp_path / "model.onnx", [node("Conv", "x w b", "y", name="first")], *sides, weights)
    with pytest.raises(ModelError, match="bias `b` of node `first`"):
        quantize(path, "int8", out=tmp_path / "out.onnx", target=target, ranges={"x": 1.0, "y": 3.0})


@pytest.mark.parametrize("to", ["nvfp4", "mxfp8"])
def test_the_size_that_blocks_go_along_is_stated_where_a_reshape_leaves_it_open(to: str, tmp_path: Path) -> None:
    """TensorRT's parser refuses such an operator along a size that is to be worked out."""
    nodes = [
        node("Shape", "x", "s", start=0, end=2), node("Concat", "s rest", "sizes", axis=0),
        node("Reshape", "x sizes", "flat"), node("MatMul", "flat w", "y", name="product"),
    ]  # fmt: skip
    given = {"w": weight(64, 32), "rest": np.array([-1], np.int64)}
    source = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["b", "s", 4, 16])}, {"y": (FLOAT, ["b", "s", 32])}, given)
    emulated = tmp_path / "e.onnx"
    quantize(
        source, to, out=tmp_path / "q.onnx", calib_data=feeds(2, 3, 4, 16), emulate=emulated, quantize_outputs=True
    )
    model, makers, stored = by_name(tmp_path / "q.onnx")
    (made,) = [item for item in model.graph.node if item.op_type.endswith("DynamicQuantize")]
    sized = makers[made.input[0]]
    assert sized.op_type == "Reshape" and sized.input[0] == "flat"
    assert numpy_helper.to_array(stored[sized.input[1]]).tolist() == [0, 0, 64]
    x = feeds(1, 5, 4, 16)[0]
    assert run(emulated, x)[0].shape == (1, 5, 32)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    source = perceptron(tmp_path / "net.onnx")
    model = onnx.load(source)
    broken = weight(64, 96)
    broken[3, 4] = np.inf
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(broken, "w0"))
    onnx.save(model, source)
    with pytest.raises(ModelError, match="`w0` of `first`"):
        quantize(source, "int4", out=tmp_path / "q.onnx")
