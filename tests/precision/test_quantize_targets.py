"""Q/DQ for its target: what ONNX Runtime's CPU kernels fuse, what stays in floating point, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models import FLOAT, node, save
from trt_engine.device import info
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph.quant_target import METADATA_KEY
from trt_engine.graph.shape_inference import trace
from trt_engine.precision import cpu_qdq
from trt_engine.precision.cpu_qdq import quantize_weight, weight_bits
from trt_engine.precision.quantize_model import quantize
from trt_engine.records.precision import QuantizeReport

Array = np.ndarray[Any, Any]
CPU = "onnxruntime-cpu"
RNG = np.random.default_rng(11)


def weight(*shape: int) -> Array:
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 100
    return (RNG.standard_normal(shape) / fan_in**0.5).astype(np.float32)


def images(count: int = 3) -> list[dict[str, Array]]:
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((2, 8, 16, 16)).astype(np.float32)} for _ in range(count)]


def network(
    path: Path, nodes: list[Any], weights: dict[str, Array], outputs: tuple[str, ...] = ("y",), **given: Any
) -> Path:
    """Nodes from `x` (batch x 8 x 16 x 16) to outputs whose shapes are inferred."""
    save(path, nodes, {"x": (FLOAT, ["batch", 8, 16, 16])}, dict.fromkeys(outputs, (FLOAT, None)), weights, **given)
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)
    return path


def conv(read: str, write: str, name: str, weights: dict[str, Array], *, bias: bool = True, size: int = 3) -> Any:
    """A convolution of 8 channels to 8."""
    weights[f"w_{name}"] = weight(8, 8, size, size)
    if bias:
        weights[f"b_{name}"] = weight(8)
    inputs = f"{read} w_{name} b_{name}" if bias else f"{read} w_{name}"
    return node("Conv", inputs, write, name=name, pads=[size // 2] * 4)


def residual(path: Path, **given: Any) -> Path:
    """Conv, Relu, Conv, Add, Relu, MaxPool, Conv, GlobalAveragePool, Flatten, Gemm."""
    weights: dict[str, Array] = {"w_head": weight(4, 8), "b_head": weight(4)}
    nodes = [
        conv("x", "c1", "first", weights),
        node("Relu", "c1", "r1"),
        conv("r1", "c2", "second", weights, bias=False),
        node("Add", "c2 r1", "sum", name="addition"),
        node("Relu", "sum", "r2"),
        node("MaxPool", "r2", "pooled", kernel_shape=[2, 2], strides=[2, 2], name="pool"),
        conv("pooled", "c3", "third", weights),
        node("GlobalAveragePool", "c3", "mean", name="mean"),
        node("Flatten", "mean", "flat", name="flatten"),
        node("Gemm", "flat w_head b_head", "y", name="head", transB=1),
    ]
    return network(path, nodes, weights, **given)


def detector(path: Path, **given: Any) -> Path:
    """SiLU, Split, Concat, Resize, Clip, HardSwish between convolutions, a HardSigmoid gate, and a float head."""
    weights: dict[str, Array] = {
        "halves": np.array([4, 4]), "w_half": weight(4, 4, 3, 3), "scales": np.array([1, 1, 2, 2], np.float32),
        "w_wide": weight(8, 12, 1, 1), "zero": np.float32(0), "six": np.float32(6),
    }  # fmt: skip
    nodes = [
        conv("x", "c1", "first", weights),
        node("Sigmoid", "c1", "s1"),
        node("Mul", "c1 s1", "a1", name="silu"),
        node("Split", "a1 halves", "h1 h2", axis=1, name="split"),
        node("Conv", "h2 w_half", "c2", name="half", pads=[1, 1, 1, 1]),
        node("LeakyRelu", "c2", "a2", alpha=0.1),
        node("Concat", "h1 h2 a2", "joined", axis=1, name="concat"),
        node("Conv", "joined w_wide", "c3", name="wide"),
        node("Clip", "c3 zero six", "a3", name="relu6"),
        node("Resize", "a3  scales", "big", mode="nearest", coordinate_transformation_mode="asymmetric",
             nearest_mode="floor", name="resize"),
        conv("big", "c4", "fourth", weights),
        node("HardSwish", "c4", "a4", name="hardswish"),
        node("GlobalAveragePool", "a4", "mean"),
        conv("mean", "few", "squeeze", weights, size=1),
        node("HardSigmoid", "few", "gate", alpha=1 / 6, beta=0.5, name="hardsigmoid"),
        node("Mul", "a4 gate", "gated", name="gating"),
        conv("gated", "c5", "fifth", weights),
        node("Relu", "c5", "a5"),
        conv("a5", "y", "head", weights, size=1),
    ]  # fmt: skip
    for item in nodes:
        if item.op_type == "Resize":
            item.input[:] = ["a3", "", "scales"]
    return network(path, nodes, weights, opset=18, **given)


def quantized(source: Path, **settings: Any) -> tuple[QuantizeReport, onnx.ModelProto]:
    out = source.with_name(f"{source.stem}.q.onnx")
    settings.setdefault("calib_data", images())
    settings.setdefault("calibrator", "minmax")
    report = quantize(source, "int8", out=out, target=CPU, overwrite=True, **settings)
    return report, onnx.load(out)


def optimized(path: Path) -> Counter[str]:
    """Operators of the graph that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(item.op_type for item in onnx.load(options.optimized_model_filepath).graph.node)


def run(path: Path, given: dict[str, Array], level: str = "ORT_ENABLE_ALL") -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(made.run(None, given)[0])


def initializers(model: onnx.ModelProto) -> dict[str, Array]:
    return {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}


def behind(model: onnx.ModelProto) -> set[str]:
    """The nodes of which QuantizeLinear reads the result, by name."""
    makers = {name: item for item in model.graph.node for name in item.output}
    reads = (item.input[0] for item in model.graph.node if item.op_type == "QuantizeLinear")
    return {makers[name].name for name in reads if name in makers}


# ------------------------------------------------------------------------------------------------ what is fused


def test_every_convolution_of_a_residual_network_becomes_an_integer_kernel(tmp_path: Path) -> None:
    source = residual(tmp_path / "net.onnx")
    report, _ = quantized(source)
    found = optimized(tmp_path / "net.q.onnx")
    assert found["QLinearConv"] == 3 and found["QLinearAdd"] == 1 and found["QLinearGlobalAveragePool"] == 1
    assert found["QuantizeLinear"] == found["DequantizeLinear"] == 1, "one pair on the way in, one on the way out"
    assert not {"Conv", "Relu", "Add"} & set(found)
    assert report.integer_kernels is not None and report.integer_kernels.layers == {"Conv": (3, 3), "Gemm": (0, 1)}


def test_every_operator_between_convolutions_that_has_an_integer_kernel_becomes_one(tmp_path: Path) -> None:
    source = detector(tmp_path / "net.onnx")
    report, _ = quantized(source)
    found = optimized(tmp_path / "net.q.onnx")
    assert found["QLinearConv"] == 6 and found["QLinearConcat"] == 1 and found["QLinearSigmoid"] == 1
    assert found["QLinearLeakyRelu"] == 1 and found["QLinearMul"] == 3 and found["QLinearAdd"] == 2
    assert not {"Sigmoid", "HardSigmoid", "HardSwish", "LeakyRelu", "Clip", "Mul", "Add", "Concat"} & set(found)
    assert found["QuantizeLinear"] == found["DequantizeLinear"] == 1
    assert report.integer_kernels is not None and report.integer_kernels.layers == {"Conv": (6, 7)}
    given = images(1)[0]
    want, got = run(source, given), run(tmp_path / "net.q.onnx", given)
    assert np.corrcoef(want.ravel(), got.ravel())[0, 1] > 0.99


HARD = {
    "HardSwish": [node("HardSwish", "c", "a", name="act")],
    "HardSigmoid": [node("HardSigmoid", "c", "a", name="act")],
    "divided last": [node("Add", "c three", "s"), node("Clip", "s zero six", "h"), node("Mul", "c h", "m"),
                     node("Div", "m six", "a")],
    "divided first": [node("Add", "three c", "s"), node("Clip", "s zero six", "h"), node("Div", "h six", "m"),
                      node("Mul", "m c", "a")],
    "a sixth": [node("Add", "c three", "s"), node("Clip", "s zero six", "h"), node("Mul", "sixth h", "m"),
                node("Mul", "m c", "a")],
    "gate alone": [node("Add", "c three", "s"), node("Clip", "s zero six", "h"), node("Div", "h six", "a")],
}  # fmt: skip
"""HardSwish and HardSigmoid, also as exporters write them out."""


@pytest.mark.parametrize("form", HARD)
def test_hardswish_and_hardsigmoid_in_integers_are_exact_to_a_step_at_both_ends_and_between(
    form: str, tmp_path: Path
) -> None:
    weights = {"w": np.eye(8, dtype=np.float32)[:, :, None, None], "w2": np.eye(8, dtype=np.float32)[:, :, None, None]}
    weights |= {"zero": np.float32(0), "three": np.float32(3), "six": np.float32(6), "sixth": np.float32(1 / 6)}
    spread = {"x": np.linspace(-8, 8, 8 * 256, dtype=np.float32).reshape(1, 8, 16, 16)}
    nodes = [
        node("Conv", "x w", "c", name="in"), *HARD[form], node("Conv", "a w2", "o", name="out"),
        node("Identity", "o", "y"),
    ]  # fmt: skip
    source = network(tmp_path / "net.onnx", nodes, weights, opset=18)
    quantized(source, calib_data=[spread], quantize_outputs=True)
    want, got = run(source, spread), run(tmp_path / "net.q.onnx", spread)
    assert not {"HardSwish", "HardSigmoid", "Add", "Clip", "Mul", "Div"} & set(optimized(tmp_path / "net.q.onnx"))
    step = 1.5 * 16 / 255 / (5 if form == "HardSigmoid" else 6) if form in ("HardSigmoid", "gate alone") else 16 / 255
    assert np.abs(want - got).max() < 1.6 * step, form


def test_a_relu_or_clip_whose_work_the_rounding_does_is_left_out(tmp_path: Path) -> None:
    _, model = quantized(residual(tmp_path / "net.onnx"))
    assert not [item for item in model.graph.node if item.op_type == "Relu"]
    _, model = quantized(detector(tmp_path / "clip.onnx"))
    assert not [item for item in model.graph.node if item.op_type == "Clip"]


def test_only_what_has_an_integer_neighbour_gets_a_pair(tmp_path: Path) -> None:
    weights: dict[str, Array] = {}
    nodes = [
        conv("x", "c1", "first", weights),
        node("Tanh", "c1", "t1", name="tanh"),
        node("Add", "t1 x", "sum", name="addition"),
        conv("sum", "c2", "second", weights),
        node("Softmax", "c2", "p", name="softmax", axis=1),
        node("Mul", "p p", "y", name="square"),
    ]
    _, model = quantized(network(tmp_path / "net.onnx", nodes, weights), quantize_outputs=True)
    assert behind(model) == {"first", "addition", "second"}
    kinds = Counter(item.op_type for item in model.graph.node)
    assert kinds["QuantizeLinear"] == 4, "the input of the first layer, two results, what the addition gives"
    makers = {name: item for item in model.graph.node for name in item.output}
    addition = next(item for item in model.graph.node if item.name == "addition")
    assert makers[addition.input[0]].op_type == "Tanh" and addition.input[1] == "x"


def test_a_batch_norm_behind_a_convolution_is_folded_into_it(tmp_path: Path) -> None:
    weights: dict[str, Array] = {
        "s": weight(8) + 1, "t": weight(8), "m": weight(8), "v": np.abs(weight(8)) + 0.5,
    }  # fmt: skip
    nodes = [
        conv("x", "c1", "first", weights, bias=False),
        node("BatchNormalization", "c1 s t m v", "n1"),
        node("Relu", "n1", "r1"),
        conv("r1", "y", "second", weights),
    ]
    source = network(tmp_path / "net.onnx", nodes, weights)
    report, _ = quantized(source, quantize_outputs=True)
    assert optimized(tmp_path / "net.q.onnx")["QLinearConv"] == 2
    assert report.parity is not None and report.parity["y"].cosine > 0.999


def test_layers_of_transformers_read_integers_and_give_floats(tmp_path: Path) -> None:
    source = transformer(tmp_path / "net.onnx")
    report, model = quantized(source, calib_data=tokens())
    assert behind(model) == {"norm", "gelu"}, "inputs of layers alone: no result of a MatMul is rounded"
    assert optimized(tmp_path / "net.q.onnx")["MatMulIntegerToFloat"] == 2
    assert report.integer_kernels is not None and report.integer_kernels.layers["MatMul"] == (2, 4)


def transformer(path: Path) -> Path:
    """LayerNormalization, two layers and a product of activations between, Gelu, a layer, the head."""
    weights = {
        "ones": np.ones(16, np.float32), "none": np.zeros(16, np.float32), "w1": weight(16, 32), "b1": weight(32),
        "w2": weight(32, 16), "w3": weight(16, 4), "b3": weight(4),
    }  # fmt: skip
    nodes = [
        node("LayerNormalization", "x ones none", "n", name="norm"),
        node("MatMul", "n w1", "m1", name="up"),
        node("Add", "m1 b1", "u", name="bias"),
        node("Gelu", "u", "g", name="gelu"),
        node("MatMul", "g w2", "d", name="down"),
        node("Transpose", "d", "t", perm=[0, 2, 1]),
        node("MatMul", "d t", "scores", name="scores"),
        node("MatMul", "scores d", "mixed", name="mixed"),
        node("Gemm", "first w3 b3", "y", name="head"),
    ]
    nodes.insert(8, node("ReduceMean", "mixed axes", "first", keepdims=0))
    weights["axes"] = np.array([1])
    return save(path, nodes, {"x": (FLOAT, ["batch", 5, 16])}, {"y": (FLOAT, ["batch", 4])}, weights, opset=20)


def tokens() -> list[dict[str, Array]]:
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((2, 5, 16)).astype(np.float32)} for _ in range(3)]


def dense(
    path: Path, sizes: list[int], layer: str, bias: tuple[int, ...] | None, behind: str | None, batch: Any = "batch"
) -> Path:
    """A layer of 16 inputs and outputs, its bias, an activation behind it, and a head."""
    drawn = np.random.default_rng(3)
    weights = {
        name: drawn.normal(0, 0.25, shape).astype(np.float32) for name, shape in (("w", (16, 16)), ("v", (16, 4)))
    }
    weights |= {"low": np.float32(-0.5), "high": np.float32(0.5)}
    nodes, last = [node(layer, "x w", "t0", name="layer")], "t0"
    if bias is not None:
        weights["b"] = drawn.normal(0, 0.1, bias).astype(np.float32)
        if layer == "Gemm":
            nodes[0].input.append("b")
        else:
            nodes, last = [*nodes, node("Add", "b t0", "t1")], "t1"
    if behind is not None:
        nodes, last = [*nodes, node(behind, f"{last} low high" if behind == "Clip" else last, "t2")], "t2"
    nodes.append(node("MatMul", f"{last} v", "y", name="head"))
    ends = {"x": (FLOAT, [batch, *sizes])}, {"y": (FLOAT, [batch, *sizes[:-1], 4])}
    return save(path, nodes, *ends, weights, opset=17)


@pytest.mark.parametrize("behind", [None, "Relu", "Clip", "Tanh"])
@pytest.mark.parametrize(
    ("layer", "sizes", "bias"),
    [("MatMul", [16], None), ("MatMul", [16], (16,)), ("MatMul", [16], (1, 16)), ("MatMul", [5, 16], None),
     ("MatMul", [5, 16], (16,)), ("Gemm", [16], None), ("Gemm", [16], (16,))],
)  # fmt: skip
def test_a_dense_layer_that_gives_floats_has_an_integer_kernel_whatever_its_bias_and_what_follows(
    layer: str, sizes: list[int], bias: tuple[int, ...] | None, behind: str | None, tmp_path: Path
) -> None:
    source = dense(tmp_path / "net.onnx", sizes, layer, bias, behind)
    given = {"x": np.random.default_rng(5).standard_normal((8, *sizes)).astype(np.float32)}
    report, _ = quantized(source, calib_data=[given])
    assert report.integer_kernels is not None and report.integer_kernels.layers[layer][0] == 1
    want, got = run(source, given), run(tmp_path / "net.q.onnx", given)
    assert np.std(want - got) < 0.05 * np.std(want)


def test_a_layer_whose_pairs_are_not_fused_goes_without_and_says_so(tmp_path: Path) -> None:
    # the bias of a batch becomes that of a Gemm, in FP32
    source = dense(tmp_path / "net.onnx", [16], "MatMul", (8, 16), "Relu", batch=8)
    given = {"x": np.random.default_rng(5).standard_normal((8, 16)).astype(np.float32)}
    report, model = quantized(source, calib_data=[given], quantize_outputs=True)
    left = {item.node: item.reason for item in report.unquantized}
    assert [item.node for item in report.quantized] == ["head"] and "no integer kernel" in left["layer"]
    assert next(item for item in model.graph.node if item.name == "layer").input[1] == "w"
    with pytest.raises(ModelError, match=r"nothing to quantise to int8: .*no integer kernel") as error:
        quantized(source, calib_data=[given])
    assert "--dynamic" in (error.value.hint or "")


def test_the_shape_of_whatever_onnxruntime_writes_for_integers_is_known(tmp_path: Path) -> None:
    pool = [node("AveragePool", "r1", "y", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[1, 1, 1, 1])]
    weights: dict[str, Array] = {}
    pooled = [conv("x", "c1", "first", weights), node("Relu", "c1", "r1"), *pool, conv("y", "z", "last", weights)]
    given = images(1)[0]
    sources = [
        residual(tmp_path / "residual.onnx"), detector(tmp_path / "detector.onnx"),
        network(tmp_path / "pooled.onnx", pooled, weights, ("z",)),
    ]  # fmt: skip
    kinds: set[str] = set()
    for source in sources:
        _, _ = quantized(source, quantize_outputs=True)
        kinds |= set(optimized(source.with_name(f"{source.stem}.q.onnx")))
        model = onnx.load(tmp_path / "optimized.onnx")
        facts = trace(model, {name: array.shape for name, array in given.items()}).tensors
        names = [name for item in model.graph.node for name in item.output]
        model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in "yz")
        onnx.save(model, tmp_path / "all.onnx")
        session = onnxruntime.InferenceSession(str(tmp_path / "all.onnx"), providers=["CPUExecutionProvider"])
        for item, array in zip(session.get_outputs(), session.run(None, given), strict=True):
            assert facts[item.name].shape == array.shape, item.name
    assert {
        "QGemm",
        "NhwcMaxPool",
        "QLinearConcat",
        "QLinearAveragePool",
        "QLinearGlobalAveragePool",
        "QLinearConv",
    } <= kinds


# ------------------------------------------------------------------------------------------------ scales


def test_weights_are_signed_with_a_scale_for_each_output_channel_and_biases_are_int32(tmp_path: Path) -> None:
    source = residual(tmp_path / "net.onnx")
    _, model = quantized(source, bias_correction=False)
    stored, before = initializers(model), initializers(onnx.load(source))
    makers = {name: item for item in model.graph.node for name in item.output}
    first = next(item for item in model.graph.node if item.name == "first")
    values, scales, zeros = (stored[name] for name in makers[first.input[1]].input)
    assert values.dtype == np.int8 and scales.shape == (8,) and not zeros.any()
    assert np.abs(values * scales[:, None, None, None] - before["w_first"]).max() <= scales.max() / 2 * 1.001
    bias, steps = (stored[name] for name in makers[first.input[2]].input)
    step = stored[makers[makers[first.input[0]].input[0]].input[1]]
    assert bias.dtype == np.int32
    np.testing.assert_allclose(steps, scales * step, rtol=1e-6)
    np.testing.assert_allclose(bias * steps, before["b_first"], atol=float(steps.max()))


def test_a_large_bias_of_a_channel_without_weights_fits_into_int32(tmp_path: Path) -> None:
    weights: dict[str, Array] = {}
    nodes = [conv("x", "c1", "first", weights), node("Relu", "c1", "r"), conv("r", "y", "second", weights)]
    weights["w_first"][3] *= np.float32(1e-12)
    weights["b_first"][3] = 5.0
    source = network(tmp_path / "net.onnx", nodes, weights)
    report, _ = quantized(source, quantize_outputs=True)
    assert report.parity is not None and report.parity["y"].cosine > 0.999


def test_one_processor_without_vnni_gets_weights_of_seven_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def features(*names: str) -> None:
        monkeypatch.setattr(info, "cpu", lambda: info.Cpu(name="test", cores=1, features=names))

    monkeypatch.setattr(cpu_qdq, "_kernels_saturate", lambda: False)
    features("avx2")
    assert weight_bits("auto") == 7 and weight_bits("off") == 8
    _, model = quantized(residual(tmp_path / "net.onnx"))
    assert max(np.abs(array).max() for array in initializers(model).values() if array.dtype == np.int8) == 63
    for exact in ("avx512_vnni", "avx_vnni", "amx_int8"):
        features("avx2", exact)
        assert weight_bits("auto") == 8
    features("asimd")
    assert weight_bits("auto") == 8 and weight_bits("on") == 7
    features("avx2", "avx_vnni")
    monkeypatch.setattr(cpu_qdq, "_kernels_saturate", lambda: True)  # an emulator, which states its host's features
    assert weight_bits("auto") == 7 and weight_bits("off") == 8
    values, scales = quantize_weight(weight(4, 9), 0, 7)
    assert np.abs(values).max() == 63 and scales.shape == (4,)


def test_ranges_of_an_earlier_cache_without_smallest_values_are_refused(tmp_path: Path) -> None:
    source, cache = residual(tmp_path / "net.onnx"), tmp_path / "ranges.json"
    quantized(source, cache=cache)
    text = cache.read_text()
    at = text.index('"min_max"')
    cache.write_text(text[:at] + '"min_max": {}' + text[text.index("}", at) + 1 :])
    with pytest.raises(UsageError, match="lack the minimum") as refused:
        quantized(source, cache=cache)
    assert "delete the cache" in str(refused.value.hint)


# ------------------------------------------------------------------------------------------------ what stays


def test_a_quantised_result_may_be_an_output_and_be_read_by_a_body(tmp_path: Path) -> None:
    weights: dict[str, Array] = {"yes": np.array(True)}
    inside = helper.make_graph(
        [node("Neg", "r", "negative")], "then", [], [helper.make_tensor_value_info("negative", FLOAT, None)]
    )
    other = helper.make_graph(
        [node("Abs", "r", "positive")], "else", [], [helper.make_tensor_value_info("positive", FLOAT, None)]
    )
    nodes = [
        conv("x", "c1", "first", weights),
        node("Relu", "c1", "r"),
        conv("r", "c2", "second", weights),
        helper.make_node("If", ["yes"], ["z"], name="if", then_branch=inside, else_branch=other),
    ]
    source = network(tmp_path / "net.onnx", nodes, weights, outputs=("c2", "r", "z"))
    report, _ = quantized(source, quantize_outputs=True)
    assert report.parity is not None and all(error.cosine > 0.999 for error in report.parity.values())
    assert optimized(tmp_path / "net.q.onnx")["QLinearConv"] == 2


def test_layers_without_integer_kernels_are_named_with_the_reason(tmp_path: Path) -> None:
    weights: dict[str, Array] = {"w_up": weight(8, 8, 2, 2), "w_gemm": weight(16, 16), "b_gemm": weight(16)}
    nodes = [
        conv("x", "c1", "first", weights),
        node("ConvTranspose", "c1 w_up", "up", name="up", strides=[2, 2]),
        node("Relu", "up", "r"),
        conv("r", "c2", "second", weights),
        conv("c2", "y", "third", weights),
    ]
    report, _ = quantized(network(tmp_path / "net.onnx", nodes, weights))
    assert report.integer_kernels is not None
    reasons = {item.node: item.reason for item in report.integer_kernels.not_fused}
    assert "no integer kernel for ConvTranspose" in reasons["up"] and "last layer" in reasons["third"]


# ------------------------------------------------------------------------------------------------ dynamic


def test_dynamic_quantisation_needs_no_data(tmp_path: Path) -> None:
    source = transformer(tmp_path / "net.onnx")
    report, model = quantized(source, calib_data=None, dynamic=True, calibrator=None)
    assert report.method == "dynamic" and report.calibration is None
    kinds = Counter(item.op_type for item in model.graph.node)
    assert kinds["DynamicQuantizeLinear"] == kinds["MatMulInteger"] == 2 and not kinds["QuantizeLinear"]
    found = optimized(tmp_path / "net.q.onnx")
    assert found["DynamicQuantizeMatMul"] == 2
    assert report.integer_kernels is not None and report.integer_kernels.layers["MatMul"] == (2, 4)
    assert report.parity is not None and report.parity["y"].cosine > 0.99


def test_dynamic_quantisation_takes_gemm_either_way_round_with_its_bias(tmp_path: Path) -> None:
    weights = {"w1": weight(24, 16), "b1": weight(24), "w2": weight(24, 8), "b2": weight(1, 8)}
    nodes = [
        node("Gemm", "x w1 b1", "h", name="first", transB=1),
        node("Relu", "h", "r"),
        node("Gemm", "r w2 b2", "y", name="second"),
    ]
    source = save(tmp_path / "net.onnx", nodes, {"x": (FLOAT, ["n", 16])}, {"y": (FLOAT, ["n", 8])}, weights)
    report, _ = quantized(source, calib_data=None, dynamic=True, quantize_outputs=True)
    assert report.parity is not None and report.parity["y"].cosine > 0.999
    assert report.integer_kernels is not None and report.integer_kernels.layers == {"Gemm": (2, 2)}


# ------------------------------------------------------------------------------------------------ the file and the report


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx", "onnxruntime-tensorrt"])
def test_other_targets_have_signed_symmetric_pairs_at_inputs_alone(tmp_path: Path, target: str) -> None:
    source = residual(tmp_path / "net.onnx")
    report = quantize(source, "int8", out=tmp_path / "q.onnx", target=target, calib_data=images(), calibrator="minmax")
    model = onnx.load(tmp_path / "q.onnx")
    stored = initializers(model)
    pairs = [item for item in model.graph.node if item.op_type == "QuantizeLinear"]
    assert len(pairs) == 3 and all(stored[item.input[2]].dtype == np.int8 for item in pairs)
    assert report.target == target and report.integer_kernels is None
    assert {item.key: item.value for item in model.metadata_props}[METADATA_KEY] == target


def test_the_file_and_the_report_name_the_target_and_metadata_stays(tmp_path: Path) -> None:
    source = residual(tmp_path / "net.onnx")
    model = onnx.load(source)
    model.metadata_props.add(key="names", value="a,b")
    onnx.save(model, source)
    report, made = quantized(source, emulate=tmp_path / "e.onnx")
    assert {item.key: item.value for item in made.metadata_props} == {"names": "a,b", METADATA_KEY: CPU}
    assert [item.key for item in onnx.load(tmp_path / "e.onnx").metadata_props] == ["names"], "nothing is placed there"
    assert report.target == CPU and report.method == "rtn"
    assert list(made.graph.input) == list(model.graph.input) and list(made.graph.output) == list(model.graph.output)


@pytest.mark.parametrize(
    ("to", "settings", "words", "hint"),
    [
        ("int8", {"target": "onnxruntime-cuda"}, "no kernels for Q/DQ", "onnxruntime-tensorrt"),
        ("fp8", {"target": "onnxruntime-cuda"}, "no kernels for Q/DQ", "fp16"),
        ("fp8", {"target": CPU}, "no kernels for `fp8`", "int8"),
        ("nvfp4", {"target": "onnxruntime-tensorrt"}, "no kernels for `nvfp4`", "fp8"),
        ("int8", {"dynamic": True}, "not for int8 on `tensorrt`", "onnxruntime-cpu"),
        ("int4", {"dynamic": True, "target": CPU}, "not for int4", "onnxruntime-cpu"),
        ("int8", {"reduce_range": "on"}, "for INT8 on `onnxruntime-cpu`", "leave it out"),
        ("int8", {"target": CPU, "high_precision": "fp16"}, "no integer kernels between layers in fp16", "leave"),
        ("int8", {"target": CPU, "dynamic": True, "emulate": "e.onnx"}, "runs on any CPU as it is", "leave"),
        ("int8", {"target": "openvino"}, "openvino", "onnxruntime-cpu"),
    ],
)  # fmt: skip
def test_what_a_target_does_not_run_is_refused_with_what_to_do(
    tmp_path: Path, to: str, settings: dict[str, Any], words: str, hint: str
) -> None:
    source = residual(tmp_path / "net.onnx")
    settings = {**settings, "emulate": tmp_path / settings["emulate"]} if "emulate" in settings else settings
    with pytest.raises(UsageError, match=words) as refused:
        quantize(source, to, out=tmp_path / "q.onnx", calib_data=images(), **settings)
    assert hint in f"{refused.value.hint} {refused.value.message}"
    assert not list(tmp_path.glob("[qe].onnx"))


def test_the_opset_is_raised_where_scales_by_channel_need_it_and_half_precision_is_left(tmp_path: Path) -> None:
    weights = {"w": weight(16, 8).astype(np.float16), "w2": weight(8, 8).astype(np.float16)}
    half = TensorProto.FLOAT16
    nodes = [node("MatMul", "x w", "h", name="first"), node("MatMul", "h w2", "y", name="second")]
    source = save(tmp_path / "half.onnx", nodes, {"x": (half, ["n", 16])}, {"y": (half, ["n", 8])}, weights)
    with pytest.raises(ModelError, match="computes in 16 bits"):
        quantized(source, calib_data=[{"x": np.ones((1, 16), np.float16)}], quantize_outputs=True)


def test_the_emulation_computes_what_the_kernels_compute(tmp_path: Path) -> None:
    source = detector(tmp_path / "net.onnx")
    quantized(source, emulate=tmp_path / "emulated.onnx")
    given = images(1)[0]
    want, got = run(tmp_path / "emulated.onnx", given), run(tmp_path / "net.q.onnx", given)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {
        item.op_type for item in onnx.load(tmp_path / "emulated.onnx").graph.node
    }
    # kernels round sums at ties where FP32 lies just beside them: a step in a few places, not more
    assert np.abs(want - got).max() < 0.1 * np.abs(want).max()
    assert np.corrcoef(want.ravel(), got.ravel())[0, 1] > 0.9995


def test_a_part_that_a_concat_alone_reads_has_its_scale_and_others_keep_their_own(tmp_path: Path) -> None:
    weights: dict[str, Array] = {"w_wide": weight(8, 24, 1, 1), "w_end": weight(8, 8, 1, 1)}
    nodes = [
        conv("x", "alone", "first", weights),
        conv("x", "shared", "second", weights),
        conv("x", "c3", "third", weights),
        node("Relu", "c3", "clipped"),
        node("Concat", "alone shared clipped", "joined", axis=1),
        node("Conv", "joined w_wide", "wide", name="wide"),
        node("Conv", "shared w_end", "end", name="end"),
        node("Add", "wide end", "sum"),
        conv("sum", "y", "last", weights),
    ]
    _, model = quantized(network(tmp_path / "net.onnx", nodes, weights), quantize_outputs=True)
    stored, makers = initializers(model), {name: item for item in model.graph.node for name in item.output}
    scales = {name: float(stored[makers[name].input[1]]) for name in ("alone", "shared", "clipped", "joined")}
    assert scales["alone"] == scales["joined"] and scales["shared"] != scales["joined"] != scales["clipped"]
    assert int(stored[makers["clipped"].input[2]]) == 0, "what a Relu gave keeps the zero point that replaces the Relu"


@pytest.mark.parametrize("opset", [13, 18])
def test_a_softmax_over_few_channels_is_written_as_its_parts_and_computes_the_same(tmp_path: Path, opset: int) -> None:
    weights: dict[str, Array] = {}
    nodes = [
        conv("x", "c1", "first", weights),
        conv("c1", "c2", "second", weights),
        node("Softmax", "c2", "y", name="softmax", axis=1),
    ]
    source = network(tmp_path / "net.onnx", nodes, weights, opset=opset, ir_version=8)
    data = [{"x": 50 * images(1)[0]["x"]}]
    report, model = quantized(source, calib_data=data)
    assert "Softmax" not in {item.op_type for item in model.graph.node}
    assert report.parity is not None and report.parity["y"].cosine > 0.99  # weights of 7 bits without VNNI included
    np.testing.assert_allclose(run(tmp_path / "net.q.onnx", data[0]).sum(axis=1), 1, rtol=1e-5)
    _, model = quantized(source, calib_data=data, exclude_types=("Softmax",))
    assert "Softmax" in {item.op_type for item in model.graph.node}


def test_probabilities_and_anything_else_are_never_joined_in_integers(tmp_path: Path) -> None:
    weights: dict[str, Array] = {"w_wide": weight(8, 16, 1, 1)}
    nodes = [
        conv("x", "boxes", "first", weights),
        conv("x", "c2", "second", weights),
        node("Sigmoid", "c2", "scores", name="sigmoid"),
        node("Concat", "boxes scores", "joined", name="concat", axis=1),
        node("Conv", "joined w_wide", "wide", name="wide"),
        conv("wide", "y", "last", weights),
    ]
    quantized(network(tmp_path / "net.onnx", nodes, weights), quantize_outputs=True)
    assert "QLinearConcat" not in optimized(tmp_path / "net.q.onnx")
