"""The contract over TensorRT's own layer information: kept, broken, or said to be unprovable, for both majors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

import onnx_models
from graph import models
from trt_engine.errors import PrecisionError
from trt_engine.graph.cost import model_cost
from trt_engine.precision.cast_model import cast
from trt_engine.precision.precision_check import PrecisionCheck, check_engine
from trt_engine.records.passport import DtypeShare
from trt_engine.trt.layers import dtype_shares, read_layers

node, value, weight = models.node, models.value, models.weight
Major = Literal[10, 11]
BOTH = pytest.mark.parametrize("major", [10, 11])


def products(size: int) -> ModelProto:
    """`size` equal matrix products with weights, then one of two activations, which nothing quantises."""
    nodes, name = [], "x"
    for index in range(size):
        nodes.append(node("MatMul", [name, f"w{index}"], [f"t{index}"], name=f"fc{index}"))
        name = f"t{index}"
    nodes.append(node("MatMul", [name, name], ["y"], name="attention"))
    stored = [weight(f"w{index}", 8, 8, seed=index) for index in range(size)]
    return models.model(nodes, [value("x", [8, 8])], [value("y", [8, 8])], stored)


def half(size: int, folder: Path) -> ModelProto:
    cast(models.save(products(size), folder), "fp16", out=folder / "half.onnx", overwrite=True)
    return onnx.load(folder / "half.onnx")


def tensor(name: str, kind: str, major: Major) -> dict[str, Any]:
    base = {"Name": name, "Location": "Device", "Dimensions": [8, 8]}
    return base | ({"Format/Datatype": kind} if major == 10 else {"Format": "Row major linear", "DataType": kind})


def gemm(name: str, reads: str, writes: str, major: Major, **more: Any) -> dict[str, Any]:
    """One product as the compiler back end fuses it: its weights are no input of the layer."""
    return {
        "Name": f"__myl_Fc_myl0_{name}", "LayerType": "gemm", "Inputs": [tensor("a", reads, major)],
        "Outputs": [tensor("b", writes, major)], "TacticName": "0x1", "StreamId": 0,
        "Metadata": f"[ONNX Layer: {name}]",
    } | more  # fmt: skip


def engine(layers: list[Any], major: Major) -> dict[str, Any]:
    if major == 10:
        return {"Layers": layers, "Bindings": ["x", "y"]}
    return {"Layers": layers, "I/O Tensors": [{"Name": "x", "IOMode": "Input", "DataType": "Float"}]}


def judged(asked: str, source: ModelProto, document: dict[str, Any], **more: Any) -> PrecisionCheck:
    sizes = {
        item.name: tuple(dim.dim_value or 1 for dim in item.type.tensor_type.shape.dim) for item in source.graph.input
    }
    found = dtype_shares(read_layers(document), model_cost(source, sizes).macs_by_node())
    return check_engine(asked, source, None, found, **more)


@BOTH
def test_fp16_that_was_built_as_fp32_is_found(major: Major, tmp_path: Path) -> None:
    """What wrappers around TensorRT 11 shipped: the flag is gone, the engine FP32, and everything exits 0."""
    source = half(4, tmp_path)
    names = [*(f"fc{index}" for index in range(4)), "attention"]
    proof = judged("fp16", source, engine([gemm(name, "Float", "Float", major) for name in names], major))
    assert proof.conclusive and not proof.satisfied and proof.shares == {"fp32": 1.0}
    with pytest.raises(
        PrecisionError, match="requested fp16, found fp32 100 % of multiply-adds: the graph is fp16"
    ) as no:
        proof.require("build again")
    assert no.value.exit_code == 6
    right = judged("fp16", source, engine([gemm(name, "Half", "Half", major) for name in names], major))
    assert right.satisfied and right.conclusive and right.remark is None


@BOTH
def test_an_fp32_graph_that_was_never_cast_is_found_with_its_nodes(major: Major) -> None:
    names = ["fc0", "attention"]
    proof = judged("fp16", products(1), engine([gemm(name, "Float", "Float", major) for name in names], major))
    assert not proof.satisfied and "fp32 in the graph itself: `fc0` (MatMul)" in proof.describe()


def qdq(folder: Path) -> ModelProto:
    """INT8 products, and the product of two activations that stays FP32."""
    proto = products(2)
    nodes = []
    zero = numpy_helper.from_array(np.int8(0), "zero")
    scale = numpy_helper.from_array(np.float32(0.1), "scale")
    for item in proto.graph.node:
        if item.name.startswith("fc"):
            for position, name in enumerate(list(item.input)):
                nodes.append(node("QuantizeLinear", [name, "scale", "zero"], [f"{item.name}q{position}"]))
                nodes.append(
                    node("DequantizeLinear", [f"{item.name}q{position}", "scale", "zero"], [f"{item.name}d{position}"])
                )
                item.input[position] = f"{item.name}d{position}"
        nodes.append(item)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend([zero, scale])
    return proto


@BOTH
def test_int8_holds_what_the_graph_quantises_and_not_the_whole(major: Major, tmp_path: Path) -> None:
    """Q/DQ are gone from the engine, and a third of the work has no weights to quantise."""
    fused = [
        gemm("fc0", "Int8", "Int8", major),
        gemm("fc1", "Int8", "Float", major),
        gemm("attention", "Float", "Float", major),
    ]
    proof = judged("int8", qdq(tmp_path), engine(fused, major))
    assert proof.satisfied and proof.conclusive and proof.share == pytest.approx(2 / 3)


@BOTH
def test_int8_pairs_that_no_kernel_took_in_are_found(major: Major, tmp_path: Path) -> None:
    apart = [
        gemm("fc0", "Int8", "Int8", major),
        gemm("fc1", "Float", "Float", major),
        gemm("attention", "Float", "Float", major),
    ]
    proof = judged("int8", qdq(tmp_path), engine(apart, major))
    assert not proof.satisfied and proof.conclusive and "found fp32 67 %, int8 33 %" in proof.describe()


@BOTH
def test_int8_of_a_graph_without_pairs_is_the_graphs_fault(major: Major) -> None:
    proof = judged("int8", products(1), engine([gemm("fc0", "Float", "Float", major)], major))
    assert not proof.satisfied and "fp32 in the graph itself" in proof.describe()


@BOTH
def test_int4_weights_are_found_in_the_layer_or_before_it_and_missed_where_they_were_unfolded(major: Major) -> None:
    source = int4_products()
    rest = gemm("attention", "Half", "Half", major)
    two = [tensor("x", "Half", major), tensor("w", "Int4", major)]
    fused = [gemm("fc0", "Half", "Half", major, Inputs=two), gemm("fc1", "Half", "Half", major, Inputs=two), rest]
    assert judged("int4", source, engine(fused, major)).satisfied
    folded = [gemm("fc0", "Half", "Half", major), gemm("fc1", "Half", "Half", major), rest]
    proof = judged("int4", source, engine(folded, major))
    assert not proof.satisfied and proof.conclusive and proof.shares == {"fp16": 1.0}


def int4_products() -> ModelProto:
    """Two products of FP16 activations with INT4 weights, as blocks along their columns, and one of activations."""
    nodes, name, stored = [], "x", []
    for index in range(2):
        packed = onnx.helper.make_tensor(f"w{index}", onnx.TensorProto.INT4, [8, 8], [1] * 64)
        scale = numpy_helper.from_array(np.full((2, 8), 0.1, np.float16), f"s{index}")
        stored += [packed, scale]
        nodes.append(node("DequantizeLinear", [f"w{index}", f"s{index}"], [f"d{index}"], axis=0, block_size=4))
        nodes.append(node("MatMul", [name, f"d{index}"], [f"t{index}"], name=f"fc{index}"))
        name = f"t{index}"
    nodes.append(node("MatMul", [name, name], ["y"], name="attention"))
    kind = onnx.TensorProto.FLOAT16
    return models.model(nodes, [value("x", [8, 8], kind)], [value("y", [8, 8], kind)], stored, opset=21)


@BOTH
def test_names_alone_prove_nothing_and_that_is_said(major: Major, tmp_path: Path) -> None:
    source = half(2, tmp_path)
    proof = judged("fp16", source, engine(["fc0", "fc1", "attention"], major))
    assert proof.satisfied and not proof.conclusive, "the graph is FP16, the engine tells nothing"
    assert "does not report the types of its layers; judged by its source graph" in (proof.remark or "")
    no = judged("fp16", products(2), engine(["fc0", "fc1", "attention"], major))
    assert not no.satisfied and not no.conclusive, "nor does silence turn an FP32 graph into FP16"


def test_types_hidden_by_dynamic_shapes_are_no_proof_either_way(tmp_path: Path) -> None:
    source = half(3, tmp_path)
    hidden = "N/A due to dynamic shapes"
    told = [gemm(f"fc{index}", "Half", "Half", 10) for index in range(3)]
    proof = judged("fp16", source, engine([*told, gemm("attention", hidden, hidden, 10)], 10))
    assert (
        proof.satisfied
        and not proof.conclusive
        and "reports the types of only 75 % of its multiply-adds" in (proof.remark or "")
    )
    worse = [gemm("fc0", "Float", "Float", 10), *told[1:], gemm("attention", hidden, hidden, 10)]
    assert not judged("fp16", source, engine(worse, 10)).satisfied, (
        "too little is left even if all hidden ones were FP16"
    )


def test_layers_that_match_no_node_are_counted_and_a_middling_count_is_no_proof(tmp_path: Path) -> None:
    source = half(3, tmp_path)

    def by_layers(halves: int, floats: int) -> PrecisionCheck:
        layers = [gemm("?", "Half", "Half", 10)] * halves + [gemm("?", "Float", "Float", 10)] * floats
        return judged("fp16", source, engine(layers, 10))

    assert by_layers(20, 0).satisfied and by_layers(20, 0).conclusive and by_layers(20, 0).weighted_by == "layers"
    assert not by_layers(15, 5).conclusive and by_layers(15, 5).satisfied
    assert by_layers(5, 15).conclusive and not by_layers(5, 15).satisfied


def test_tf32_is_what_a_kernels_name_shows_and_fp32_may_be_it(tmp_path: Path) -> None:
    kernel = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32"
    layers = [gemm("fc0", "Float", "Float", 11, TacticName=kernel), gemm("attention", "Float", "Float", 11)]
    source, document = products(1), engine(layers, 11)
    assert judged("tf32", source, document).satisfied
    proof = judged("fp32", source, document)
    assert not proof.satisfied and "found fp32 50 %, tf32 50 %" in proof.describe(), (
        "asked for FP32, half of it is TF32"
    )


def test_nodes_left_in_fp32_on_purpose_do_not_break_it(tmp_path: Path) -> None:
    cast(models.save(products(3), tmp_path), "fp16", out=tmp_path / "h.onnx", exclude_nodes=("fc1",), overwrite=True)
    source = onnx.load(tmp_path / "h.onnx")
    kinds = {"fc0": "Half", "fc1": "Float", "fc2": "Half", "attention": "Half"}
    document = engine([gemm(name, kind, kind, 11) for name, kind in kinds.items()], 11)
    assert judged("fp16", source, document, excluded=["fc1"]).satisfied
    assert not judged("fp16", source, document).satisfied
    worse = engine([gemm(name, "Float", "Float", 11) for name in kinds], 11)
    assert not judged("fp16", source, worse, excluded=["fc1"]).satisfied


def test_block_scaled_fp8_is_accepted_where_the_scales_are_not_told() -> None:
    found = {"fp8": DtypeShare(1.0, 0.0, 1.0)}
    assert not check_engine("mxfp8", products(1), None, found).satisfied, "the graph has no block scales at all"


def test_a_quantised_convolution_is_matched_by_its_node(tmp_path: Path) -> None:
    source = onnx.load(onnx_models.int8_qdq(tmp_path / "q.onnx"))
    (conv,) = [item for item in source.graph.node if item.op_type == "Conv"]
    name = conv.name or f"node_of_{conv.output[0]}"
    layer = {
        "Name": f"w + {name}", "LayerType": "CaskConvolution", "Inputs": [{"Name": "x", "Format/Datatype": "Int8"}],
        "Outputs": [{"Name": "y", "Format/Datatype": "Float"}], "Weights": {"Type": "Int8", "Count": 216},
        "TacticName": "sm80_xmma_fprop_implicit_gemm_i8i8_i8i32_f32_nhwckrsc_nhwc", "Metadata": f"[ONNX Layer: {name}]",
    }  # fmt: skip
    quantise = {
        "Name": "x_QuantizeLinear", "LayerType": "Reformat", "Origin": "QDQ", "ParameterType": "Reformat",
        "Inputs": [{"Name": "x", "Format/Datatype": "Float"}], "Outputs": [{"Name": "xq", "Format/Datatype": "Int8"}],
    }  # fmt: skip
    proof = judged("int8", source, engine([quantise, layer], 10))
    assert (
        proof.satisfied and proof.conclusive and proof.shares == {"int8": 1.0} and proof.weighted_by == "multiply-adds"
    )
