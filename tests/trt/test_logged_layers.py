"""Layers as the builder of TensorRT-RTX 1.7.1 logs them: lines in the form of its log, with some of their tensors."""

from __future__ import annotations

from trt_engine.trt.layers import LayerInfo, dtype_shares, is_layer_list, parse_layer_list, read_layers


def tensor(name: str, dims: str, kind: str = "Float", layout: str = "(Linear) Row major linear format") -> str:
    strides = ",".join("1" for _ in dims.split(","))
    return (
        f"{{ Name: {name}, Dimensions: [{dims}], Strides: [{strides}], StrideOrder: [{strides}], Datatype: {kind}, "
        f"Format: {layout} }}"
    )


def line(
    name: str, kind: str, inputs: list[str], constants: list[str], outputs: list[str], tactic: str = "", *nodes: str
) -> str:
    def side(tensors: list[str]) -> str:
        return f"[ {', '.join(tensors)}]" if tensors else "[]"

    return (
        f"Name: {name}, LayerType: {kind}, Inputs: {side(inputs)}, Constants: {side(constants)}, Outputs: {side(outputs)}, "
        f"TacticName: {tactic}, StreamId: 0, Metadata: {''.join(f'[ONNX Layer: {node}]' for node in nodes)}"
    )


NHWC = "(NHWC) Channel major format"
SHAPES = line("__mye1434_0_myl0_0", "shape_call", [], [], [])
CONV = line(
    "Conv_0_U0_myl0_2", "correlation", [tensor("Conv_0.1_8_myl0", "-1,1,32,32", layout=NHWC)],
    [tensor("__mye53829dconst_myl0", "64,1,4,4", layout=NHWC), tensor("__mye60517_const_myl0", "1")],
    [tensor("Conv_0.1_myl0", "-1,64,8,8", layout=NHWC)], "__myelin_CASK_STUB", "Conv_0",
)  # fmt: skip
UNPACK = line(
    "__myl_CastMulCast_myl0_4", "kgen", [], [tensor("s", "1,192"), tensor("w", "64,192", "Int4")],
    [tensor("wf", "64,192")], "__myl_CastMulCast_0x13", "w_DequantizeLinear_node",
)  # fmt: skip
PRODUCT = line(
    "__myl_FcAdd_myl0_5", "runtime_fusion", [tensor("x", "-1,64"), tensor("wf", "64,192")], [],
    [tensor("y", "-1,192")], "", "MatMul_0", "Add_1",
)  # fmt: skip
FUSED = line(
    "__myl_ReplCastMulCastFc_myl0_16", "runtime_fusion", [tensor("x", "-1,256")],
    [tensor("w", "256,64", "Int4"), tensor("s", "2,64")], [tensor("y", "-1,64")], "", "w_DequantizeLinear_node", "MatMul_5",
)  # fmt: skip
ONE_ROW = line(
    "__myl_CastMulCastReshMulSum_myl0_17", "kgen", [tensor("x", "1,64")], [tensor("w", "64,10", "Int4")],
    [tensor("y", "1,10")], "__myl_CastMulCastReshMulSum_0xf5", "Gemm_0",
)  # fmt: skip
END = "\nI/O Tensors:\n Name: images, IOMode: Input, DataType: Float, Dimensions: [-1,1,32,32]\n"


def logged(*layers: str) -> tuple[LayerInfo, ...]:
    message = "Layers:\n" + "\n".join(layers) + "\n" + END
    assert is_layer_list(message)
    return read_layers(parse_layer_list(message))


def test_a_line_is_read_as_the_inspector_would_tell_the_layer() -> None:
    shapes, conv = logged(SHAPES, CONV)
    assert (shapes.kind, shapes.inputs, shapes.onnx_nodes) == ("shape_call", (), ())
    assert (conv.name, conv.kind, conv.tactic, conv.stream) == (
        "Conv_0_U0_myl0_2",
        "correlation",
        "__myelin_CASK_STUB",
        0,
    )
    assert [(item.name, item.dtype, item.dims) for item in conv.inputs] == [
        ("Conv_0.1_8_myl0", "float32", (-1, 1, 32, 32))
    ]
    assert [item.dims for item in conv.constants] == [(64, 1, 4, 4), (1,)] and conv.onnx_nodes == ("Conv_0",)
    assert conv.outputs[0].format == "(NHWC) Channel major format" and conv.is_matmul


def test_weights_of_four_bits_name_their_product_unpacked_before_within_it_or_for_one_row() -> None:
    assert set(dtype_shares(logged(UNPACK, PRODUCT))) == {"int4"}, "what unpacks them is no layer of its own"
    assert set(dtype_shares(logged(FUSED))) == {"int4"}
    assert set(dtype_shares(logged(ONE_ROW))) == {"int4"} and logged(ONE_ROW)[0].is_matmul
    assert set(dtype_shares(logged(PRODUCT))) == {"fp32"}


def test_multiply_adds_are_found_by_the_nodes_in_the_log() -> None:
    found = dtype_shares(logged(CONV, UNPACK, PRODUCT), {"Conv_0": 100, "MatMul_0": 300})
    assert found["int4"].macs == 0.75 and found["fp32"].macs == 0.25
