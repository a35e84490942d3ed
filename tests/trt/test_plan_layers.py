"""What an engine tells of its layers is read the same way for every TensorRT, and counted by what computes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trt_engine.errors import EngineError
from trt_engine.records.passport import DtypeShare
from trt_engine.trt.layers import UNKNOWN, dtype_shares, read_layers

DYNAMIC = "N/A due to dynamic shapes"


def ten(name: str, text: str = "Half", dims: tuple[int, ...] = (1, 64, 80, 80)) -> dict[str, Any]:
    """A tensor as TensorRT 10 writes it."""
    return {"Name": name, "Location": "Device", "Dimensions": list(dims), "Format/Datatype": text}


def nodes(*names: str, between: str = "\x1e") -> str:
    return between.join(f"[ONNX Layer: {name}]" for name in names)


CONV = {
    "Name": "/model.0/conv/Conv + PWN(/model.0/act/Sigmoid, /model.0/act/Mul)",
    "LayerType": "CaskConvolution",
    "Inputs": [ten("images", "Channel major FP16 format where channel % 8 == 0", (1, 3, 640, 640))],
    "Outputs": [ten("/model.0/act/Mul_output_0", "Channel major FP16 format where channel % 8 == 0")],
    "ParameterType": "Convolution",
    "Kernel": [3, 3],
    "Weights": {"Type": "Half", "Count": 432},
    "Bias": {"Type": "Half", "Count": 16},
    "TacticName": "sm80_xmma_fprop_implicit_gemm_indexed_f16f16_f16f32_f16_nhwckrsc_nhwc_tilesize128x64x64_stage1",
    "TacticValue": "0x3f6d1a2e4e9bcd35",
    "StreamId": 0,
    "Metadata": nodes("/model.0/conv/Conv", "/model.0/act/Sigmoid", "/model.0/act/Mul"),
}
REFORMAT = {
    "Name": "Reformatting CopyNode for Input Tensor 0 to /model.0/conv/Conv",
    "LayerType": "Reformat",
    "Inputs": [ten("images", "Row major linear FP32", (1, 3, 640, 640))],
    "Outputs": [ten("images", "Channel major FP16 format where channel % 8 == 0", (1, 3, 640, 640))],
    "ParameterType": "Reformat",
    "Origin": "REFORMAT",
    "TacticValue": "0x00000000000003ea",
    "StreamId": 0,
    "Metadata": "",
}
GEMM = {
    "Name": "__myl_FcAdd_myl0_4",
    "LayerType": "gemm",
    "Inputs": [ten("tokens", "Half", (1, 196, 768)), ten("__mye_const_17", "Half", (768, 768))],
    "Outputs": [ten("__myln_k_arg__bb1_3", "Float", (1, 196, 768))],
    "TacticName": "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4",
    "StreamId": 0,
    "Metadata": nodes("/blocks.0/attn/q/MatMul", "/blocks.0/attn/q/Add", between="\x1f"),
}
SOFTMAX = {
    "Name": "__myl_CastMaxrSubExpSumDivMul_myl0_7",
    "LayerType": "kgen",
    "Inputs": [ten("__myln_k_arg__bb1_3", "Float")],
    "Outputs": [ten("__myln_k_arg__bb1_5", "Half")],
    "TacticName": "__myl_CastMaxrSubExpSumDivMul_0x1e",
    "StreamId": 0,
    "Metadata": nodes("/blocks.0/attn/Softmax"),
}
MOVE = {
    "Name": "__myl_TranResh_myl0_9",
    "LayerType": "kgen",
    "Inputs": [ten("a", "Float")],
    "Outputs": [ten("b", "Float")],
    "Metadata": nodes("/blocks.0/attn/Transpose"),
}


def document(*layers: Any) -> dict[str, Any]:
    return {"Layers": list(layers), "Bindings": ["images", "output0"]}


def to_eleven(layer: dict[str, Any], key: str = "DataType") -> dict[str, Any]:
    """The same layer in TensorRT 11's words."""

    def tensor(old: dict[str, Any]) -> dict[str, Any]:
        new = {name: value for name, value in old.items() if name != "Format/Datatype"}
        text = old["Format/Datatype"]
        words = {"FP16": "Half", "FP32": "Float", "Half": "Half", "Float": "Float", "Int8": "Int8"}
        return new | {"Format": "Row major linear", key: next(to for word, to in words.items() if word in text)}

    return layer | {side: [tensor(old) for old in layer[side]] for side in ("Inputs", "Outputs")}


# ------------------------------------------------------------------------------------------------ reading


def test_a_layer_of_tensorrt_10_is_read_whole() -> None:
    (layer,) = read_layers(document(CONV))
    assert (layer.kind, layer.stream, layer.weights, layer.weight_count) == ("CaskConvolution", 0, "float16", 432)
    assert layer.tactic and layer.tactic.startswith("sm80_xmma_fprop")
    assert layer.onnx_nodes == ("/model.0/conv/Conv", "/model.0/act/Sigmoid", "/model.0/act/Mul")
    assert layer.inputs[0].dtype == "float16" and layer.inputs[0].dims == (1, 3, 640, 640)
    assert layer.inputs[0].format == "Channel major FP16 format where channel % 8 == 0"
    assert layer.is_matmul and not layer.is_data_movement


@pytest.mark.parametrize("key", ["DataType", "Datatype"])
def test_both_spellings_of_tensorrt_11_give_the_same_layer(key: str) -> None:
    old, new = read_layers(document(GEMM)), read_layers(json.dumps(document(to_eleven(GEMM, key))))
    assert [tensor.dtype for tensor in new[0].inputs] == [tensor.dtype for tensor in old[0].inputs] == ["float16"] * 2
    assert new[0].inputs[0].format == "Row major linear" and old[0].inputs[0].format is None
    assert dtype_shares(new) == dtype_shares(old) == {"fp16": DtypeShare(1.0, 0.0, None)}


def test_names_alone_are_layers_without_detail() -> None:
    layers = read_layers(document("/model.0/conv/Conv + /model.0/act/Relu", "out_add [ONNX Layer: Add]"))
    assert [layer.name for layer in layers] == ["/model.0/conv/Conv + /model.0/act/Relu", "out_add"]
    assert layers[1].onnx_nodes == ("Add",) and not any(layer.is_detailed for layer in layers)
    assert dtype_shares(layers) == {}


def test_nothing_unexpected_in_a_layer_stops_the_reader() -> None:
    odd = [
        {"Name": "a", "LayerType": "QuantumFold", "Inputs": [{"Name": "x", "DataType": "Half", "New": {}}]},
        {"Name": None, "LayerType": None, "Inputs": None, "Outputs": "x", "Weights": 3, "StreamId": "one"},
        {"LayerType": "kgen", "Inputs": [7, "y", {"Dimensions": ["N/A"]}], "Metadata": None, "TacticValue": 12},
        7, None, "plain",
    ]  # fmt: skip
    layers = read_layers({"Layers": odd})
    assert [layer.name for layer in layers] == ["a", "", "", "plain"] and layers[2].tactic == "12"
    assert dtype_shares(layers)["fp16"].layers == 0.5 and dtype_shares(layers)[UNKNOWN].layers == 0.5
    assert read_layers({}) == () and read_layers({"Layers": None}) == () and read_layers("[]") == ()


@pytest.mark.parametrize("text", ["", '{"Layers": [{"Na', "3", "\ud800"])
def test_a_text_that_is_no_layer_information_is_refused(text: str) -> None:
    with pytest.raises(EngineError) as caught:
        read_layers(text)
    assert caught.value.hint


@pytest.mark.parametrize("between", ["\x1e", "\x1f", "", " "])
def test_onnx_names_are_told_apart_however_they_are_joined(between: str) -> None:
    metadata = nodes("/a[0]/Conv", "node_of_y", "/a[0]/Conv", between=between)
    (layer,) = read_layers({"Layers": [{"Name": "l", "LayerType": "kgen", "Metadata": metadata}]})
    assert layer.onnx_nodes == ("/a[0]/Conv", "node_of_y")


# ------------------------------------------------------------------------------------------------ the census


def test_multiply_adds_are_matched_by_the_nodes_a_layer_was_made_of() -> None:
    layers = read_layers(document(CONV, GEMM, SOFTMAX))
    shares = dtype_shares(layers, {"/model.0/conv/Conv": 300, "/blocks.0/attn/q/MatMul": 700})
    assert shares["fp16"].macs == 1.0 and shares["fp32"].macs == 0.0 and shares["fp32"].layers == pytest.approx(1 / 3)
    assert dtype_shares(layers, {"/elsewhere/Conv": 900, "/model.0/conv/Conv": 100})["fp16"].macs is None


def test_a_node_of_several_layers_weighs_once_and_where_it_is_multiplied() -> None:
    tail = {**SOFTMAX, "Metadata": nodes("/blocks.0/attn/q/MatMul", "/blocks.0/attn/Softmax")}
    second = {**GEMM, "Inputs": [ten("x", "Float")], "TacticName": "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n"}
    shares = dtype_shares(read_layers(document(GEMM, tail, second)), {"/blocks.0/attn/q/MatMul": 1000})
    assert shares["fp16"].macs == shares["fp32"].macs == 0.5, "two products share it, the Softmax beside them does not"


@pytest.mark.parametrize(
    ("tactic", "kind"),
    [
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x64_stage4", "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", "fp32"),
        ("sm80_xmma_gemm_f16f16_f16f16_f16_nn_n", "fp16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "bf16"),
        ("sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n", "fp8"),
        ("sm80_xmma_gemm_i8f32_i8i32_f32_by_fusion_tactic", "int8"),
        ("sm80_xmma_gemm_f16i4_f16f32_f16_tn_n", "int4"),
    ],
)
def test_a_kernels_name_says_what_it_multiplies_in(tactic: str, kind: str) -> None:
    layer = {"Name": "/fc/MatMul", "LayerType": "gemm", "Inputs": [ten("x", DYNAMIC)], "TacticName": tactic}
    assert set(dtype_shares(read_layers(document(layer)))) == {kind}


def quantised(**changes: Any) -> dict[str, Any]:
    return {
        "Name": "w + /q/QuantizeLinear + /conv/Conv + /relu/Relu", "LayerType": "CaskConvolution",
        "Inputs": [ten("x", "Thirty-two wide channel vectorized row major Int8 format")], "Outputs": [ten("y", "Int8")],
        "Weights": {"Type": "Int8", "Count": 9216}, "TacticValue": "0x1",
        "Metadata": nodes("/q/QuantizeLinear", "/conv/Conv"),
    } | changes  # fmt: skip


def test_a_quantised_layer_is_told_by_its_operands_and_not_by_what_it_reads_alone() -> None:
    assert set(dtype_shares(read_layers(document(quantised())))) == {"int8"}
    assert set(dtype_shares(read_layers(document(quantised(Outputs=[ten("y", "Half")]))))) == {"int8"}
    assert set(dtype_shares(read_layers(document(quantised(Inputs=[ten("x", "Int8"), ten("residual", "Half")]))))) == {
        "int8"
    }
    assert set(dtype_shares(read_layers(document(quantised(Inputs=[ten("x", DYNAMIC)]))))) == {"int8"}
    false = quantised(Weights={"Type": "Float", "Count": 9216})
    assert set(dtype_shares(read_layers(document(false)))) == {"fp32"}
    kernel = quantised(Weights={"Type": "Int8", "Count": 1}, TacticName="sm80_xmma_fprop_f32f32_tf32f32_f32_nhwc")
    assert set(dtype_shares(read_layers(document(kernel)))) == {"tf32"}


def test_weights_alone_make_a_layer_int4_even_where_they_are_unpacked_before() -> None:
    fused = {
        "Name": "__myl_Fc_myl0_2", "LayerType": "gemm", "Inputs": [ten("x", "Half"), ten("w", "Int4"), ten("s", "Half")],
        "Outputs": [ten("y", "Half")], "Metadata": nodes("/fc/MatMul"),
    }  # fmt: skip
    assert set(dtype_shares(read_layers(document(fused)))) == {"int4"}
    unpack = {
        "Name": "__myl_Dequ_myl0_1", "LayerType": "kgen", "Inputs": [ten("w", "Int4")], "Outputs": [ten("wf", "Half")],
    }  # fmt: skip
    apart = {**fused, "Inputs": [ten("x", "Half"), ten("wf", "Half")]}
    assert set(dtype_shares(read_layers(document(unpack, apart)))) == {"int4"}
    assert set(dtype_shares(read_layers(document(apart)))) == {"fp16"}, "folded into FP16 weights there is no INT4 left"
