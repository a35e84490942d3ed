"""What each library's kernels take of a quantised graph; ONNX Runtime's own optimised graphs are the judge."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic

import onnx_models
from trt_engine.graph.load import read_proto
from trt_engine.graph.quant_placement import QuantizedGraph
from trt_engine.graph.walk import index_of
from trt_engine.precision.quantize_model import quantize

RESNET = Path(__file__).parents[2] / "examples" / "classifiers" / "resnet.onnx"
FUSED = ("QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "MatMulNBits")
LINEAR = ("Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm")
U8, S8 = np.uint8, np.int8


class Net:
    """Nodes one after another, each named after its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[TensorProto] = []

    def const(self, value: Any) -> str:
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, *inputs: str, **given: Any) -> str:
        out = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, **given))
        return out

    def q(self, x: str, kind: type, zero: int, scale: float = 0.05) -> str:
        return self.node("QuantizeLinear", x, self.const(np.float32(scale)), self.const(kind(zero)))

    def dq(self, x: str, kind: type, zero: int, scale: float = 0.05) -> str:
        return self.node("DequantizeLinear", x, self.const(np.float32(scale)), self.const(kind(zero)))

    def pair(self, x: str, kind: type, zero: int, scale: float = 0.05) -> str:
        return self.dq(self.q(x, kind, zero, scale), kind, zero, scale)

    def weight(self, *shape: int, axis: int = 0) -> str:
        values = np.random.default_rng(0).integers(-100, 100, shape).astype(np.int8)
        scale, zero = np.full(shape[axis], 0.01, np.float32), np.zeros(shape[axis], np.int8)
        return self.node("DequantizeLinear", self.const(values), self.const(scale), self.const(zero), axis=axis)

    def conv(self, x: str, *bias: str) -> str:
        return self.node("Conv", x, self.weight(8, 8, 3, 3), *bias, pads=[1, 1, 1, 1])

    def model(self, *outputs: str, shape: tuple[int, ...] = (1, 8, 8, 8)) -> ModelProto:
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        outs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", inputs, outs, self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def residual(net: Net, kind: type, zero: int) -> str:
    start = net.pair("x", kind, zero)
    first = net.pair(net.conv(start), kind, zero)
    second = net.pair(net.conv(first), kind, zero)
    return net.pair(net.node("Add", second, first), kind, zero)


def relu_between(net: Net, kind: type, zero: int) -> str:
    return net.pair(net.node("Relu", net.conv(net.pair("x", kind, zero))), kind, zero)


def two_readers(net: Net, kind: type, zero: int) -> str:
    start = net.pair("x", kind, zero)
    sides = [net.node("MatMul", start, net.weight(8, 8, axis=1)) for _ in range(2)]
    return net.node("Add", *sides)


def clipped(net: Net, scale: float) -> str:
    clip = net.node("Clip", net.conv(net.pair("x", U8, 0)), net.const(np.float32(0)), net.const(np.float32(6)))
    return net.pair(clip, U8, 0, scale)


def through(net: Net, op: str, *more: Any, **given: Any) -> str:
    moved = net.node(op, net.conv(net.pair("x", U8, 128)), *map(net.const, more), **given)
    return net.pair(moved, U8, 128)


def clip_behind(net: Net, layer: str, clip: str, behind: str) -> str | tuple[str, ...]:
    """A layer with a result in float, a Relu or Clip, and what reads that."""
    made = net.node(layer, net.pair("x", U8, 128), net.weight(8, 8, axis=1))
    bounds = [net.const(np.float32(0)), net.const(np.float32(6))] if clip == "Clip" else []
    last = net.node(clip, made, *bounds)
    if behind == "nothing":
        return last
    if behind == "two":
        return net.node("Add", net.node("Tanh", last), net.node("Exp", last))
    if behind == "one of them a pair":
        return net.node("Add", net.pair(last, U8, 0), net.node("Exp", last))
    end = net.pair(last, U8, 0) if behind == "a pair" else net.node("Tanh", last)
    return {"and an end": (last, end), "and the layer an end": (made, end)}.get(behind, end)


NETS: dict[str, Callable[[Net], str | tuple[str, ...]]] = {
    **{
        f"{kind.__name__} {zero}: {name}": (lambda net, make=make, kind=kind, zero=zero: make(net, kind, zero))
        for kind, zero in ((U8, 128), (U8, 0), (S8, 0), (S8, -128))
        for name, make in {
            "result quantised": lambda net, kind, zero: net.pair(net.conv(net.pair("x", kind, zero)), kind, zero),
            "result in float": lambda net, kind, zero: net.conv(net.pair("x", kind, zero)),
            "Relu before the result": relu_between,
            "a residual": residual,
            "two readers": two_readers,
            "MatMul in float": lambda net, kind, zero: net.node(
                "MatMul", net.pair("x", kind, zero), net.weight(8, 8, axis=1)
            ),
        }.items()
    },
    "a bias in float": lambda net: net.pair(
        net.conv(net.pair("x", U8, 128), net.const(np.ones(8, np.float32))), U8, 128
    ),
    "Clip that the range makes superfluous": lambda net: clipped(net, 6 / 255),
    "Clip within the range": lambda net: clipped(net, 0.05),
    "Reshape": lambda net: through(net, "Reshape", np.int64([1, 8, 64])),
    "Transpose": lambda net: through(net, "Transpose", perm=[0, 1, 3, 2]),
    "MaxPool": lambda net: through(net, "MaxPool", kernel_shape=[2, 2]),
    "AveragePool": lambda net: through(net, "AveragePool", kernel_shape=[2, 2]),
    "Flatten": lambda net: through(net, "Flatten"),
    "LeakyRelu": lambda net: through(net, "LeakyRelu"),
    "ConvTranspose": lambda net: net.pair(
        net.node("ConvTranspose", net.pair("x", U8, 128), net.weight(8, 8, 3, 3, axis=1)), U8, 128
    ),
    "an output too": lambda net: (lambda y: (y, net.pair(y, U8, 128)))(net.conv(net.pair("x", U8, 128))),
    "weights alone": lambda net: net.conv("x"),
    **{
        f"{layer}, {clip}, {behind}": (
            lambda net, layer=layer, clip=clip, behind=behind: clip_behind(net, layer, clip, behind)
        )
        for layer in ("MatMul", "Gemm")
        for clip in ("Relu", "Clip", "LeakyRelu")
        for behind in (
            "another",
            "nothing",
            "two",
            "one of them a pair",
            "a pair",
            "and an end",
            "and the layer an end",
        )
    },
}


def fused_by_onnxruntime(proto: ModelProto, folder: Path) -> tuple[int, int]:
    """Layers in integer kernels and all layers, in the graph that ONNX Runtime's CPU provider runs."""
    onnx.save(proto, folder / "net.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "made.onnx")
    ort.InferenceSession(folder / "net.onnx", options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(folder / "made.onnx").graph.node]
    return sum(op in FUSED for op in ops), sum(op in (*FUSED, *LINEAR) for op in ops)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="which signed pairs are taken differs on ARM")
@pytest.mark.parametrize("name", NETS)
def test_what_the_cpu_takes_is_what_onnx_runtime_fuses(name: str, tmp_path: Path) -> None:
    net = Net()
    outputs = NETS[name](net)
    sizes = {"shape": (4, 8)} if name.startswith("Gemm") else {}
    proto = net.model(*((outputs,) if isinstance(outputs, str) else outputs), **sizes)

    fit = QuantizedGraph(index_of(proto)).coverage("onnxruntime-cpu")

    assert (fit.supported_layers, fit.layers) == fused_by_onnxruntime(proto, tmp_path)
    assert sum(fit.reasons.values()) == fit.layers - fit.supported_layers


# ------------------------------------------------------------------------------------------------ whole models


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelProto]:
    folder = tmp_path_factory.mktemp("quantised")
    static = {
        "u8s8": (QuantType.QUInt8, QuantFormat.QDQ),
        "s8s8": (QuantType.QInt8, QuantFormat.QDQ),
        "qoperator": (QuantType.QUInt8, QuantFormat.QOperator),
    }

    def make(name: str) -> ModelProto:
        path = folder / f"{name}.onnx"
        if path.exists():
            pass
        elif name in static:
            kind, form = static[name]
            onnx_models.quantize_statically(RESNET, path, quant_format=form, activation_type=kind, per_channel=True)
        elif name == "dynamic":
            quantize_dynamic(RESNET, path)
        elif name == "plain":
            return read_proto(RESNET)
        else:
            model = RESNET.with_name("vit.onnx") if name == "int4" else RESNET
            quantize(model, name, out=path, calib_data="random", target="tensorrt", parity=False)
        return read_proto(path)

    return make


TENSORRT = ("tensorrt", "tensorrt-rtx", "onnxruntime-tensorrt")


@pytest.mark.parametrize(
    ("name", "targets", "style"),
    [
        ("int8", TENSORRT, "S8 symmetric, results in float"),
        ("u8s8", ("onnxruntime-cpu",), "U8, results quantised"),
        ("qoperator", ("onnxruntime-cpu",), "QLinear operators"),
        ("dynamic", ("onnxruntime-cpu",), "dynamic: activations quantised at run time"),
        ("fp8", TENSORRT, "FP8, results in float"),
    ],
)
def test_a_graph_is_known_by_its_pairs_whatever_tool_quantised_it(
    name: str, targets: tuple[str, ...], style: str, made: Callable[[str], ModelProto]
) -> None:
    proto = made(name)
    del proto.metadata_props[:]

    report = QuantizedGraph(index_of(proto)).report()

    assert (report.targets, report.style, report.declared_target) == (targets, style, None)


def test_signed_pairs_with_quantised_results_suit_neither_whole(made: Callable[[str], ModelProto]) -> None:
    placed = QuantizedGraph(index_of(made("s8s8")))

    assert placed.coverage("tensorrt").reasons == {"zero points other than 0": 16}
    assert placed.report().style == "S8 asymmetric, results quantised"


def test_the_sentence_names_both_libraries_and_every_reason(made: Callable[[str], ModelProto]) -> None:
    said = QuantizedGraph(index_of(made("int8"))).mismatch("onnxruntime-cpu")

    assert said is not None
    assert said.startswith(
        "these Q/DQ pairs are placed for TensorRT (S8 symmetric, results in float): ONNX Runtime's CPU provider fuses 0 of "
        "15 convolutions and runs them in FP32: result not quantised (6: "
    )
    assert QuantizedGraph(index_of(made("u8s8"))).mismatch("tensorrt") == (
        "these Q/DQ pairs are placed for ONNX Runtime's CPU provider (U8, results quantised): TensorRT takes 0 of 16 "
        "layers: UINT8 pairs (16: Conv_0, Conv_1, Conv_2 and 13 more)"
    )


def test_what_the_file_states_is_told(made: Callable[[str], ModelProto]) -> None:
    proto = made("u8s8")
    proto.metadata_props.add(key="trt_engine.quant_target", value="onnxruntime-cpu")

    assert QuantizedGraph(index_of(proto)).report().declared_target == "onnxruntime-cpu"
