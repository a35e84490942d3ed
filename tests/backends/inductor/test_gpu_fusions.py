"""What the importer puts together for a GPU, computed on the CPU: linear layers with what surrounds them, convolutions."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnx_models import FLOAT, FP8, node, save
from trt_engine.backends.inductor import convolution, linear
from trt_engine.backends.inductor.attention import ATTENTION
from trt_engine.graph import walk

BOTH = ("int8", "fp8")
HALF = onnx.TensorProto.FLOAT16
pytestmark = pytest.mark.filterwarnings("ignore:::(torch|onnx|copyreg)")


def needs_torch(test: Any) -> Any:
    missing = importlib.util.find_spec("torch") is None
    return pytest.mark.full(pytest.mark.skipif(missing, reason="PyTorch is not installed here")(test))


RNG = np.random.default_rng(0)


def mlp(path: Path, kind: str = "int8", **change: Any) -> Path:
    """Two quantized layers with Gelu between and a residual behind; `change` replaces weights or attributes."""
    number = onnx.TensorProto.INT8 if kind == "int8" else FP8
    zero = onnx.helper.make_tensor("z", number, [], [0])
    one = RNG.integers(-127, 128, (32, 64)) if kind == "int8" else np.round(RNG.standard_normal((32, 64)), 1)
    two = RNG.integers(-127, 128, (64, 32)) if kind == "int8" else np.round(RNG.standard_normal((64, 32)), 1)
    scales = np.linspace(0.001, 0.002, 64, dtype=np.float32) if kind == "int8" else np.float32(0.1)
    weights: dict[str, Any] = {
        "w1": onnx.helper.make_tensor("w1", number, [32, 64], one.reshape(-1).tolist()),
        "w2": onnx.helper.make_tensor("w2", number, [64, 32], two.reshape(-1).tolist()),
        "z": zero, "z1": onnx.helper.make_tensor("z1", number, list(np.shape(scales)), [0] * np.size(scales)),
        "s1": scales, "s2": np.float32(0.0015), "sx": np.float32(0.02), "sh": np.float32(0.03), "sd": np.float32(0.02),
        "b1": RNG.standard_normal(64).astype(np.float32), "b2": RNG.standard_normal(32).astype(np.float32),
    }  # fmt: skip
    weights |= {name: value for name, value in change.items() if name in weights}
    nodes = [
        node("DequantizeLinear", "w1 s1 z1", "w1d", **({"axis": change.get("axis", 1)} if np.ndim(weights["s1"]) else {})),
        node("DequantizeLinear", "w2 s2 z", "w2d"),
        node("QuantizeLinear", "x sx z", "xq"), node("DequantizeLinear", f"xq {change.get('dequantized_by', 'sx')} z", "xd"),
        node("MatMul", "xd w1d", "h"), node("Add", "h b1", "hb"), node("Gelu", "hb", "g"),
        node("QuantizeLinear", "g sh z", "gq"), node("DequantizeLinear", "gq sh z", "gd"),
        node("MatMul", "gd w2d", "o"), node("Add", "o b2", "ob"), node("Add", "x ob", "y"),
    ]  # fmt: skip
    return save(path, nodes, {"x": (FLOAT, ["batch", 4, 32])}, {"y": (FLOAT, ["batch", 4, 32])}, weights, opset=20)


def linears(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [item for item in proto.graph.node if item.op_type == linear.LINEAR]


@pytest.mark.parametrize("kind", BOTH)
def test_quantized_layers_with_gelu_and_a_residual_are_two_nodes(kind: str, tmp_path: Path) -> None:
    proto = onnx.load(mlp(tmp_path / "m.onnx", kind))
    assert linear.quantized_layers(proto, BOTH) == {"h", "o"}
    assert linear.fuse_linear(proto.graph, on_gpu=True, quantized_types=BOTH) == 2
    assert [item.op_type for item in proto.graph.node] == [linear.LINEAR, linear.LINEAR]
    first, second = proto.graph.node
    # the values between are stored quantized: the first layer quantizes, the second does not
    assert first.input[linear.X_SCALE] == "sx" and first.input[linear.OUT_SCALE] == "sh"
    assert walk.attributes(first)["activation"] == b"gelu"
    assert not second.input[linear.X_SCALE] and second.input[linear.RESIDUAL] == "x"
    factors = {item.name: onnx.numpy_helper.to_array(item) for item in proto.graph.initializer}[
        first.input[linear.FACTORS]
    ]
    assert factors.shape == (64,) and factors.dtype == np.float32


def fused(path: Path, feeds: dict[str, Any]) -> tuple[list[str], Any, Any]:
    """The operators of a graph fused for a GPU, its one output on the CPU, and ONNX Runtime's."""
    import torch

    from trt_engine.backends.inductor.onnx_module import OnnxModule, load_graph
    from trt_engine.backends.inductor.tensor_rules import RULES

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    (wanted,) = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    graph = load_graph(onnx.load(path), on_gpu=True, quantized_types=BOTH)
    with torch.no_grad():
        (found,) = OnnxModule(graph.proto, torch.device("cpu"), RULES)(*map(torch.from_numpy, feeds.values()))
    return [item.op_type for item in graph.proto.graph.node], found.float().numpy(), wanted.astype(np.float32)


@needs_torch
@pytest.mark.parametrize("kind", BOTH)
def test_the_fused_layers_compute_what_onnx_runtime_computes(kind: str, tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 4, 32)).astype(np.float32)
    _, found, wanted = fused(mlp(tmp_path / "m.onnx", kind), {"x": x})
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("why", "change", "taken"),
    [
        ("a zero point", {"z1": onnx.helper.make_tensor("z1", 3, [64], [0] * 63 + [1])}, {"o"}),
        ("scales of the inputs", {"s1": np.full(32, 0.001, np.float32), "axis": 0,
                                  "z1": onnx.helper.make_tensor("z1", 3, [32], [0] * 32)}, {"o"}),
        ("another scale behind", {"dequantized_by": "sh"}, {"o"}),
    ],
)  # fmt: skip
def test_a_pair_that_is_not_symmetric_per_output_stays(
    why: str, change: dict[str, Any], taken: set[str], tmp_path: Path
) -> None:
    assert linear.quantized_layers(onnx.load(mlp(tmp_path / "m.onnx", **change)), BOTH) == taken, why


def test_two_scales_of_one_value_are_one(tmp_path: Path) -> None:
    model = onnx.load(mlp(tmp_path / "m.onnx", dequantized_by="sd"))
    assert linear.quantized_layers(model, BOTH) == {"h", "o"}


def test_only_types_that_the_gpu_multiplies_are_taken(tmp_path: Path) -> None:
    proto = onnx.load(mlp(tmp_path / "m.onnx", "fp8"))
    assert linear.quantized_layers(proto, ("int8",)) == set()
    assert linear.fuse_linear(proto.graph, on_gpu=True, quantized_types=("int8",)) == 0
    assert Counter(item.op_type for item in proto.graph.node)["DequantizeLinear"] == 4


def test_sizes_that_tensor_cores_do_not_take_stay(tmp_path: Path) -> None:
    weights = {
        "w": RNG.integers(-9, 9, (20, 64), dtype=np.int8), "s": np.float32(0.1), "sx": np.float32(0.1), "z": np.int8(0)
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x sx z", "xq"), node("DequantizeLinear", "xq sx z", "xd"),
        node("DequantizeLinear", "w s z", "wd"), node("MatMul", "xd wd", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [2, 20])}, {"y": (FLOAT, [2, 64])}, weights)
    assert linear.quantized_layers(onnx.load(path), BOTH) == set()


def test_a_layer_whose_output_others_read_keeps_its_activation_apart(tmp_path: Path) -> None:
    weights = {"w": RNG.standard_normal((32, 32)).astype(np.float32), "b": RNG.standard_normal(32).astype(np.float32)}
    nodes = [node("MatMul", "x w", "h"), node("Add", "h b", "hb"), node("Gelu", "hb", "g"), node("Add", "g hb", "y")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [2, 32])}, {"y": (FLOAT, [2, 32])}, weights)
    proto = onnx.load(path)
    linear.fuse_linear(proto.graph, on_gpu=True)
    assert [item.op_type for item in proto.graph.node] == [linear.LINEAR, "Gelu", "Add"]


@needs_torch
def test_gelu_that_is_written_out_is_found() -> None:
    from trt_engine.backends.inductor.onnx_module import load_graph

    proto = onnx.load(Path(__file__).parents[3] / "examples" / "classifiers" / "vit.onnx")
    graph = load_graph(proto, on_gpu=True)
    activations = [walk.attributes(item).get("activation") for item in linears(graph.proto)]
    assert activations.count(b"gelu") == 4 and graph.attentions == 4
    assert (
        sum(len(item.input) > linear.RESIDUAL and bool(item.input[linear.RESIDUAL]) for item in linears(graph.proto))
        == 8
    )


def half_attention(path: Path, hidden: float) -> Path:
    """Attention of a network cast to FP16, whose mask and Softmax stay in FP32; the last two keys of four are masked."""
    mask = np.array([0, 0, hidden, hidden], np.float32)
    nodes = [
        node("MatMul", "q k", "s"), node("Cast", "s", "wide", to=FLOAT), node("Add", "wide mask", "masked"),
        node("Softmax", "masked", "p", axis=-1), node("Cast", "p", "half", to=HALF), node("IsNaN", "half", "test"),
        node("Where", "test zero half", "kept"), node("MatMul", "kept v", "y"),
    ]  # fmt: skip
    rows = (HALF, [2, 3, 4, 8])
    inputs = {"q": rows, "k": (HALF, [2, 3, 8, 4]), "v": rows}
    return save(path, nodes, inputs, {"y": rows}, {"mask": mask, "zero": np.float16(0)})


@needs_torch
@pytest.mark.parametrize("hidden", [np.finfo(np.float32).min, -1e9, -np.inf])
def test_attention_whose_mask_half_precision_cannot_hold_is_one_kernel(tmp_path: Path, hidden: float) -> None:
    feeds = {name: RNG.standard_normal(shape).astype(np.float16) for name, shape in
             {"q": (2, 3, 4, 8), "k": (2, 3, 8, 4), "v": (2, 3, 4, 8)}.items()}  # fmt: skip
    operators, found, wanted = fused(half_attention(tmp_path / "m.onnx", hidden), feeds)
    assert [item for item in operators if "ttention" in item] == [ATTENTION]
    np.testing.assert_allclose(found, wanted, atol=2e-2)


# ------------------------------------------------------------------------------------------------ convolutions


def residual_block(
    path: Path, *, half: bool = True, pads: tuple[int, ...] = (1, 1, 1, 1), group: int = 1, channels: int = 8
) -> Path:
    kind, number = (np.float16, onnx.TensorProto.FLOAT16) if half else (np.float32, FLOAT)
    weights = {
        "w": RNG.standard_normal((8, channels // group, 3, 3)).astype(kind), "b": RNG.standard_normal(8).astype(kind),
        "v": RNG.standard_normal((8, 8, 3, 3)).astype(kind),
    }  # fmt: skip
    nodes = [
        node("Conv", "x w b", "c", pads=list(pads), group=group), node("Relu", "c", "r"),
        node("Conv", "r v b", "d", pads=[1, 1, 1, 1]), node("Add", "d x", "a"), node("Relu", "a", "y"),
    ]  # fmt: skip
    return save(path, nodes, {"x": (number, ["n", channels, 8, 8])}, {"y": (number, ["n", 8, 8, 8])}, weights)


def test_a_residual_block_is_two_convolutions(tmp_path: Path) -> None:
    proto = onnx.load(residual_block(tmp_path / "m.onnx"))
    assert convolution.fuse_convolution(proto.graph) == 2
    assert [(item.op_type, list(item.input)) for item in proto.graph.node] == [
        (convolution.CONVOLUTION, ["x", "w", "b", ""]), (convolution.CONVOLUTION, ["r", "v", "b", "x"])
    ]  # fmt: skip


@needs_torch
@pytest.mark.parametrize("block", ["residual_block", "downsampling_block"])
def test_fused_convolutions_compute_what_onnx_runtime_computes(block: str, tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 8, 8, 8)).astype(np.float16)
    _, found, wanted = fused(globals()[block](tmp_path / "m.onnx"), {"x": x})
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


@needs_torch
def test_a_pointwise_convolution_as_a_product_adds_its_residual_before_the_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from trt_engine.backends.inductor import fused_rules, onnx_module
    from trt_engine.backends.inductor.tensor_rules import RULES

    def of_cudnn(x: Any, weight: Any, bias: Any, residual: Any, strides: Any, pads: Any, dilations: Any) -> Any:
        assert residual is None
        return torch.relu(torch.conv2d(x, weight, bias, strides, pads, dilations))

    class Products(onnx_module.Kernels):
        activations: ClassVar[list[int]] = []

        def pointwise(self, name: str, x: Any, weight: Any, bias: Any, residual: Any, activation: int) -> Any:
            self.activations.append(activation)
            return fused_rules.plain_linear

    monkeypatch.setattr(onnx_module, "on_gpu", lambda device: True)
    monkeypatch.setattr(fused_rules, "cudnn_conv_relu", of_cudnn)
    half = onnx.TensorProto.FLOAT16
    weights = {
        name: RNG.standard_normal(shape).astype(np.float16)
        for name, shape in (("w", (8, 16, 1, 1)), ("v", (8, 8, 1, 1)), ("u", (16, 8, 1, 1)), ("b", (8,)), ("d", (16,)))
    }
    nodes = [
        node("Conv", "x w b", "c"), node("Relu", "c", "r"), node("Conv", "r v b", "e"), node("Relu", "e", "s"),
        node("Conv", "s u d", "f"), node("Add", "f x", "a"), node("Relu", "a", "y"),
    ]  # fmt: skip
    sizes = ["n", 16, 5, 3]
    path = save(tmp_path / "m.onnx", nodes, {"x": (half, sizes)}, {"y": (half, sizes)}, weights)
    x = RNG.standard_normal((2, 16, 5, 3)).astype(np.float16)
    (wanted,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    graph = onnx_module.load_graph(onnx.load(path), on_gpu=True)
    module = onnx_module.OnnxModule(graph.proto, torch.device("cpu"), RULES, Products(), fused=True)
    with torch.no_grad():
        (found,) = module(torch.from_numpy(x))
    assert [linear.ACTIVATIONS[item] for item in Products.activations] == ["relu", "relu_of_sum"]
    assert (wanted == 0).any() and np.abs(found.float().numpy() - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("change", [{"half": False}, {"pads": (0, 0, 2, 2)}, {"group": 2}, {"channels": 1}])
def test_convolutions_that_cudnn_does_not_fuse_stay(change: dict[str, Any], tmp_path: Path) -> None:
    proto = onnx.load(residual_block(tmp_path / "m.onnx", **change))
    fused = convolution.fuse_convolution(proto.graph)
    assert fused == (0 if change == {"half": False} else 1)


def embedding(path: Path, stride: int = 4) -> Path:
    weights = {
        "w": RNG.standard_normal((16, 3, 4, 4)).astype(np.float16),
        "b": RNG.standard_normal(16).astype(np.float16),
    }
    nodes = [node("Conv", "x w b", "y", strides=[stride, stride])]
    half = onnx.TensorProto.FLOAT16
    return save(path, nodes, {"x": (half, ["n", 3, 14, 12])}, {"y": (half, ["n", 16, "h", "w"])}, weights)


@needs_torch
def test_a_patch_embedding_is_a_linear_layer(tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 3, 14, 12)).astype(np.float16)
    operators, found, wanted = fused(embedding(tmp_path / "m.onnx"), {"x": x})
    assert operators == [convolution.PATCHES, linear.LINEAR, "Transpose"]
    assert found.shape == wanted.shape == (2, 16, 3, 3)
    assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


@needs_torch
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantized_patch_embedding_is_a_linear_layer_on_dequantised_values(kind: str, tmp_path: Path) -> None:
    import torch

    from trt_engine.backends.inductor.onnx_module import OnnxModule, load_graph
    from trt_engine.backends.inductor.tensor_rules import RULES

    scales = RNG.uniform(0.01, 0.02, 16).astype(np.float16)
    stored = RNG.integers(-100, 100, (16, 3, 4, 4)).astype(np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn)
    weights = {"q": stored, "s": scales, "b": RNG.standard_normal(16).astype(np.float16)}
    nodes = [node("DequantizeLinear", "q s", "w", axis=0), node("Conv", "x w b", "y", strides=[4, 4])]
    half = onnx.TensorProto.FLOAT16
    path = save(tmp_path / "m.onnx", nodes, {"x": (half, ["n", 3, 8, 8])}, {"y": (half, ["n", 16, 2, 2])}, weights)
    x = RNG.standard_normal((2, 3, 8, 8)).astype(np.float16)
    plain = stored.astype(np.float32) * scales.astype(np.float32).reshape(-1, 1, 1, 1)
    wanted = torch.conv2d(
        torch.from_numpy(x).float(), torch.from_numpy(plain.astype(np.float16)).float(),
        torch.from_numpy(weights["b"]).float(), stride=4,
    )  # fmt: skip
    graph = load_graph(onnx.load(path), on_gpu=True, quantized_types=BOTH)
    assert [item.op_type for item in graph.proto.graph.node] == [convolution.PATCHES, linear.LINEAR, "Transpose"]
    with torch.no_grad():
        (found,) = OnnxModule(graph.proto, torch.device("cpu"), RULES)(torch.from_numpy(x))
    assert float((found.float() - wanted).abs().max()) < 0.01 * float(wanted.abs().max())


def test_weights_that_others_read_or_in_blocks_stay_quantized() -> None:
    stored = {"q": RNG.integers(-9, 9, (16, 16, 1, 1)).astype(np.int8), "s": np.ones(16, np.float16)}

    def graph(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> onnx.GraphProto:
        half = onnx.TensorProto.FLOAT16
        return onnx.helper.make_graph(
            list(nodes), "g", [onnx.helper.make_tensor_value_info("x", half, ["n", 16, 4, 4])],
            [onnx.helper.make_tensor_value_info(name, half, None) for name in outputs],
            [onnx.numpy_helper.from_array(value, name) for name, value in stored.items()],
        )  # fmt: skip

    weight, conv = node("DequantizeLinear", "q s", "w", axis=0), node("Conv", "x w", "y")
    assert convolution.store_weights(graph(weight, conv)) == 1
    assert convolution.store_weights(graph(weight, conv, outputs=("y", "w"))) == 0
    assert convolution.store_weights(graph(weight, conv, node("Relu", "w", "r"), outputs=("y", "r"))) == 0
    assert convolution.store_weights(graph(node("DequantizeLinear", "q s", "w", axis=0, block_size=1), conv)) == 0
    assert convolution.store_weights(graph(weight, node("Conv", "w w", "y"))) == 0


def test_windows_that_overlap_stay_a_convolution(tmp_path: Path) -> None:
    assert convolution.fuse_patches(onnx.load(embedding(tmp_path / "m.onnx", stride=3)).graph) == 0


@needs_torch
def test_a_residual_network_stays_channels_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one change of layout is that of the input: every other one would read and write a whole tensor."""
    import torch

    from trt_engine.backends.inductor import onnx_module
    from trt_engine.backends.inductor.fused_rules import register_shapes
    from trt_engine.backends.inductor.tensor_rules import RULES

    monkeypatch.setattr(onnx_module, "on_gpu", lambda device: True)
    register_shapes()
    proto = onnx.load(downsampling_block(tmp_path / "m.onnx"))
    graph = onnx_module.load_graph(proto, on_gpu=True)
    assert [walk.attributes(item)["activation"] for item in graph.proto.graph.node] == [b"relu", b"none", b"relu"]
    module = onnx_module.OnnxModule(graph.proto, torch.device("cpu"), RULES, fused=True).eval()
    program = torch.export.export(
        module, (torch.zeros(2, 8, 8, 8, dtype=torch.float16),), strict=False
    ).run_decompositions()
    changed = [
        (item.all_input_nodes[0].op, item.meta["val"].stride())
        for item in program.graph.nodes
        if "clone" in str(item.target)
    ]
    # the input's, which two convolutions read, and the output's for the caller
    assert changed == [("placeholder", (512, 1, 64, 8))] * 2 + [("call_function", (256, 16, 4, 1))]


def downsampling_block(path: Path) -> Path:
    """Two convolutions, and a 1x1 one of stride 2 as their shortcut."""
    half = onnx.TensorProto.FLOAT16
    weights = {
        "w": RNG.standard_normal((16, 8, 3, 3)).astype(np.float16),
        "v": RNG.standard_normal((16, 16, 3, 3)).astype(np.float16),
        "u": RNG.standard_normal((16, 8, 1, 1)).astype(np.float16), "b": RNG.standard_normal(16).astype(np.float16),
        "d": RNG.standard_normal(16).astype(np.float16),
    }  # fmt: skip
    nodes = [
        node("Conv", "x w b", "c", pads=[1, 1, 1, 1], strides=[2, 2]), node("Relu", "c", "r"),
        node("Conv", "r v b", "e", pads=[1, 1, 1, 1]), node("Conv", "x u d", "s", strides=[2, 2]),
        node("Add", "e s", "a"), node("Relu", "a", "y"),
    ]  # fmt: skip
    return save(path, nodes, {"x": (half, ["n", 8, 8, 8])}, {"y": (half, ["n", 16, 4, 4])}, weights)


@needs_torch
def test_code_for_a_gpu_is_built_without_looking_at_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    from trt_engine.backends.inductor.compile_worker import _describe_no_cpu

    def probe(*args: object) -> bool:
        raise AssertionError("a program was compiled to find the processor's instructions")

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cpu_vec_isa.valid_vec_isa_list)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", probe)
    _describe_no_cpu()
    assert str(cpu_vec_isa.pick_vec_isa()) == str(cpu_vec_isa.invalid_vec_isa)


@needs_torch
@pytest.mark.parametrize("residual", [["n", 16, 1, 1], ["n", 16, 6, 6]])
def test_cudnn_adds_only_a_residual_of_the_output_s_shape(
    residual: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from trt_engine.backends.inductor import fused_rules, onnx_module

    def cudnn(x: Any, weight: Any, bias: Any, more: Any, *sizes: Any) -> Any:
        found = torch.conv2d(x, weight, bias, *sizes)
        assert more.shape == found.shape
        return torch.relu(found + more)

    monkeypatch.setattr(fused_rules, "cudnn_conv_relu", cudnn)
    monkeypatch.setattr(onnx_module, "on_gpu", lambda device: True)
    half, wide = onnx.TensorProto.FLOAT16, residual[2] == 6
    given = {"x": (half, ["n", 8, *(1, 1) * wide, *(6, 6) * (not wide)]), "r": (half, residual)}
    weights = {"w": RNG.standard_normal((16, 8, 1, 1)).astype("f2"), "b": RNG.standard_normal(16).astype("f2")}
    nodes = [node("Conv", "x w b", "c"), node("Add", "c r", "a"), node("Relu", "a", "y")]
    path = save(tmp_path / "m.onnx", nodes, given, {"y": (half, ["n", 16, 6, 6])}, weights)
    feeds = {name: RNG.standard_normal([2, *shape[1:]]).astype("f2") for name, (_, shape) in given.items()}
    (wanted,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)
    graph = onnx_module.load_graph(onnx.load(path), on_gpu=True)
    assert [item.op_type for item in graph.proto.graph.node] == [convolution.CONVOLUTION]
    from trt_engine.backends.inductor.tensor_rules import RULES

    module = onnx_module.OnnxModule(graph.proto, torch.device("cpu"), RULES)
    with torch.no_grad():
        (found,) = module(*map(torch.from_numpy, feeds.values()))
    assert np.abs(found.float().numpy() - wanted).max() < 0.01 * np.abs(wanted).max()


def test_a_shortcut_of_one_channel_keeps_its_bias(tmp_path: Path) -> None:
    graph = onnx.load(downsampling_block(tmp_path / "m.onnx")).graph
    for item in graph.initializer:
        if item.name in "ud":
            item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item)[:1], item.name))
    convolution.fuse_convolution(graph)
    assert Counter(item.op_type for item in graph.node) == {convolution.CONVOLUTION: 2, "Conv": 1}


def test_patches_with_a_computed_bias_stay_a_convolution() -> None:
    weight = onnx.numpy_helper.from_array(np.ones((16, 3, 4, 4), "f2"), "w")
    nodes = [node("Cast", "c", "b", to=10), node("Conv", "x w b", "y", strides=[4, 4])]
    graph = onnx.helper.make_graph(nodes, "net", [], [], [weight])
    assert convolution.fuse_patches(graph) == 0
    linear.fuse_linear(graph, on_gpu=True)


def test_values_between_layers_of_two_quantized_types_are_not_stored_in_the_first(tmp_path: Path) -> None:
    model = onnx.load(mlp(tmp_path / "m.onnx"))
    other = onnx.load(mlp(tmp_path / "n.onnx", "fp8"))
    stored = {item.name: item for item in other.graph.initializer}
    fp8 = onnx.helper.make_tensor("z8", FP8, [], [0])
    for item in model.graph.initializer:
        if item.name == "w2":
            item.CopyFrom(stored["w2"])
    model.graph.initializer.append(fp8)
    second = next(item for item in model.graph.node if "w2" in item.input)
    second.input[2] = "z8"
    product = next(item for item in model.graph.node if second.output[0] in item.input)
    makers = {name: item for item in model.graph.node for name in item.output}
    back = makers[product.input[0]]
    back.input[2] = makers[back.input[0]].input[2] = "z8"
    assert linear.fuse_linear(model.graph, on_gpu=True, quantized_types=BOTH) == 2
    first, last = linears(model)
    assert len(first.input) <= linear.OUT_SCALE or not first.input[linear.OUT_SCALE]
    assert last.input[linear.X_SCALE]


def test_constants_of_a_quantized_layer_may_be_nodes(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx")
    model = onnx.load(path)
    wanted = linear.quantized_layers(model, BOTH)
    stored = list(model.graph.initializer)
    del model.graph.initializer[:]
    for at, item in enumerate(stored):
        model.graph.node.insert(at, onnx.helper.make_node("Constant", [], [item.name], value=item))
    assert linear.quantized_layers(model, BOTH) == wanted != set()


def test_a_quantization_that_does_not_saturate_stays(tmp_path: Path) -> None:
    model = onnx.load(mlp(tmp_path / "m.onnx", "fp8"))
    for item in model.graph.node:
        if item.op_type == "QuantizeLinear":
            item.attribute.append(onnx.helper.make_attribute("saturate", 0))
    assert linear.quantized_layers(model, BOTH) == set()


@needs_torch
def test_gelu_for_narrow_outputs_is_close_to_the_exact_one() -> None:
    import torch

    from trt_engine.backends.inductor import fused_rules
    from trt_engine.backends.inductor.fused_rules import _GELU_TERMS, close_gelu

    x = torch.cat([torch.linspace(-50, 50, 1_000_001), -torch.logspace(1, 38, 100)])
    exact = torch.nn.functional.gelu(x.double())
    assert (close_gelu(x) - exact).abs().max() < 9e-5
    x = x.clamp(min=-6e4)
    assert (close_gelu(x.half()) - torch.nn.functional.gelu(x.half().double())).abs().max() < 9e-5
    assert torch.isnan(close_gelu(torch.tensor(float("nan"))))
    assert abs(float(close_gelu(torch.tensor(float("-inf"))))) < 9e-5
    assert float(close_gelu(torch.tensor(6e4))) == pytest.approx(6e4, rel=1e-6)
    kernel = Path(fused_rules.__file__).with_name("triton_linear.py").read_text(encoding="utf-8")
    body = kernel[kernel.index("`fused_rules.close_gelu`") : kernel.index("elif ACTIVATION == 2")]
    written = re.findall(r"([-+(]) ?(-?\d\.\d+e-\d\d)", body)
    assert [float(number) * (-1 if sign == "-" else 1) for sign, number in written] == [*_GELU_TERMS]


@needs_torch
def test_every_convolution_of_a_fused_graph_states_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`conv2d` is exported as channels first, which cuDNN gives of no input with the channels last."""
    import torch

    from trt_engine.backends.inductor import onnx_module
    from trt_engine.backends.inductor.fused_rules import register_shapes
    from trt_engine.backends.inductor.tensor_rules import RULES

    monkeypatch.setattr(onnx_module, "on_gpu", lambda device: True)
    register_shapes()
    half = onnx.TensorProto.FLOAT16
    shapes = {"w": (16, 8, 3, 3), "v": (16, 1, 3, 3), "u": (8, 16, 2, 2), "t": (8, 4, 2, 2), "b": (16,)}
    weights = {name: RNG.standard_normal(shape).astype("f2") for name, shape in shapes.items()}
    nodes = [
        node("Conv", "x w b", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"),
        node("Conv", "r v b", "d", pads=[1, 1, 1, 1], group=16), node("Sigmoid", "d", "s"),
        node("Conv", "s u", "e", pads=[0, 0, 1, 1]), node("ConvTranspose", "e t", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, {"x": (half, [2, 8, 6, 6])}, {"y": (half, [2, 4, 7, 7])}, weights)
    graph = onnx_module.load_graph(onnx.load(path), on_gpu=True)
    assert convolution.CONVOLUTION in [item.op_type for item in graph.proto.graph.node]
    module = onnx_module.OnnxModule(graph.proto, torch.device("cpu"), RULES, fused=True).eval()
    program = torch.export.export(module, (torch.zeros(2, 8, 6, 6, dtype=torch.float16),), strict=False)
    made = {str(item.target).split(".")[1]: item for item in program.graph.nodes if "conv" in str(item.target)}
    assert list(made) == ["cudnn_convolution_relu", "cudnn_convolution", "conv_transpose2d"]
    for name, item in made.items():
        read = [one.meta["val"] for one in item.all_input_nodes if one.meta["val"].ndim == 4]
        layout = torch.contiguous_format if name == "conv_transpose2d" else torch.channels_last
        assert all(one.is_contiguous(memory_format=layout) for one in (item.meta["val"], *read)), name
