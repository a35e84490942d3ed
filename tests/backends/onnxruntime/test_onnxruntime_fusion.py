"""Builds with fused attention: recorded, switched off, counted as what they compute, and read by this backend alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import trt_engine as te
from graph.fusion.attention_graphs import HEADS, SIZE, TOKENS, WIDTH, Builder, self_attention, tokens
from graph.fusion.test_layer_norm import layer_norm, rms_norm
from graph.fusion.test_rotary import heads, rotate, tables
from trt_engine.backend import list_backends
from trt_engine.backends.onnxruntime.node_mapping import map_nodes
from trt_engine.engine import Engine
from trt_engine.errors import AccuracyError
from trt_engine.graph import walk
from trt_engine.graph.cost import model_cost
from trt_engine.graph.dtype_breakdown import dtype_shares
from trt_engine.graph.fusion import attention, fuse_model
from trt_engine.graph.fusion.fusion_graph import FusionGraph
from trt_engine.graph.load import read_proto

BATCH = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of attention, norms and activations."""
    path = tmp_path_factory.mktemp("models") / "encoder.onnx"
    onnx.save(encoder(), path)
    return path


def encoder(half: bool = False) -> onnx.ModelProto:
    b = Builder(half)
    x = tokens(b)
    for _ in range(2):
        x = b.add("Add", x, b.linear(self_attention(b, x), WIDTH, WIDTH))
        y = b.add("LayerNormalization", x, b.weight(WIDTH), b.weight(WIDTH), axis=-1)
        x = b.add("Add", x, b.linear(b.add("Gelu", b.linear(y, WIDTH, 2 * WIDTH)), 2 * WIDTH, WIDTH))
    return b.model(x)


def decoder(half: bool = False, opset: int = 20) -> onnx.ModelProto:
    """A layer with rotated queries and keys, two norms in primitive operators and a gate."""
    b = Builder(half, opset)
    x = tokens(b)
    y, (cos, sin) = layer_norm(b, x), tables(b)
    q, k = (rotate(b, heads(b, y), cos, sin) for _ in range(2))
    context = b.merged(b.core(q, b.add("Transpose", k, perm=[0, 1, 3, 2]), heads(b, y)))
    y = rms_norm(b, b.add("Add", x, b.linear(context, WIDTH, WIDTH)), "Reciprocal")
    gate = b.add("Sigmoid", b.add("Mul", y, b.number(1.702)))
    return b.model(b.add("Mul", y, gate))


def build(model: Path, folder: Path, **settings: object) -> Engine:
    shapes = {"x": (BATCH, TOKENS, WIDTH)}
    return te.build(model, store=te.Store(folder / "store"), shapes=shapes, **settings)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder = tmp_path_factory.mktemp("engines")
    return build(model, folder), build(model, folder, fuse=False)


def test_a_build_records_what_it_fused_and_no_fuse_leaves_the_graph_as_it_is(engines: tuple[Engine, Engine]) -> None:
    fused, plain = engines
    assert fused.passport.build.fusions == "multi_head_attention 2"
    assert plain.passport.build.fusions is None
    assert fused.passport.key != plain.passport.key
    assert "--no-fuse" in plain.passport.build.command and "fuse" not in fused.passport.build.command
    kinds = [[node.op_type for node in read_proto(engine.path).graph.node] for engine in engines]
    assert kinds[0].count("MultiHeadAttention") == 2 and "Softmax" not in kinds[0]
    assert kinds[1].count("Softmax") == 2
    for engine in engines:
        assert engine.passport.parity is not None and engine.passport.parity.passed


def test_an_engine_that_does_not_run_is_built_without_the_fusion_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = attention.replace_attention

    def refused(graph: FusionGraph, match: attention.AttentionMatch, *, pack: bool) -> str:
        found = replace(graph, match, pack=pack)
        for node in graph.nodes.values():
            if node.op_type == "MultiHeadAttention":  # with heads that do not divide its width
                next(item for item in node.attribute if item.name == "num_heads").i = 5
        return found

    monkeypatch.setattr(attention, "replace_attention", refused)
    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(), path)
    shapes = {"x": (BATCH, TOKENS, WIDTH), "positions": (1, TOKENS, 1)}
    engine = te.build(path, store=te.Store(tmp_path / "store"), shapes=shapes)
    assert engine.passport.build.fusions == "layer_norm 1, rms_norm 1, rotary_embedding 2"
    assert engine.passport.build.notes["retry"] == "no fusion multi_head_attention"
    assert "does not run" in engine.passport.build.warnings[-1]
    assert engine.passport.parity is not None and engine.passport.parity.passed


def test_an_engine_of_a_slow_builder_that_differs_is_built_again_with_less_rewriting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(list_backends()["onnxruntime"], fast_build=False)
    monkeypatch.setitem(list_backends(), "onnxruntime", slow)
    run = attention.replace_attention

    def wrong(graph: FusionGraph, match: attention.AttentionMatch, *, pack: bool) -> str:
        return run(graph, dataclasses.replace(match, scale=3.0), pack=pack)

    monkeypatch.setattr(attention, "replace_attention", wrong)
    made = build(model, tmp_path).passport
    assert made.build.notes["retry"] == "`-O graph_optimization=basic`" and made.build.fusions is None
    assert "differs from plain ONNX Runtime" in made.build.warnings[-1]
    assert made.parity is not None and made.parity.passed
    with pytest.raises(AccuracyError):
        build(model, tmp_path / "once", retry=False)


def test_an_fp16_graph_is_fused_within_the_tolerance_of_its_format(tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(encoder(half=True), path)
    engine = build(path, tmp_path)
    assert engine.passport.build.fusions == "multi_head_attention 2"
    assert engine.passport.parity is not None and engine.passport.parity.passed


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_fused_attention_counts_as_its_matrix_products_in_its_type(half: bool, on_gpu: bool) -> None:
    model = encoder(half)
    fused = fuse_model(model, Path(), on_gpu=on_gpu).proto
    shapes = {"x": (BATCH, TOKENS, WIDTH)}
    plain, counted = (model_cost(proto, shapes) for proto in (model, fused))
    assert counted.exact and counted.macs == plain.macs
    assert abs(counted.flops - plain.flops) < 0.1 * plain.flops  # the scale of the scores is counted as it is written
    attention = next(node for node in fused.graph.node if "Attention" in node.op_type)
    own = 2 * BATCH * HEADS * TOKENS * TOKENS * SIZE
    packed = 3 * BATCH * TOKENS * WIDTH * WIDTH if on_gpu else 0
    assert counted.macs_by_node()[attention.name] == own + packed
    kind = "fp16" if half else "fp32"
    assert dtype_shares(walk.index_of(fused), counted)[kind].macs == 1.0


@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("half", [False, True])
def test_rotary_embeddings_norms_and_gates_are_known_to_the_cost_and_the_types(half: bool, opset: int) -> None:
    """On a GPU: all that the fusions add, with as many multiply-adds as before and no operator without a cost."""
    model = decoder(half, opset)
    fused = fuse_model(model, Path(), on_gpu=True)
    assert fused.counts == {
        "rotary_embedding": 2, "multi_head_attention": 1, "layer_norm": 1, "rms_norm": 1, "skip_layer_norm": 1,
        "quick_gelu": 1,
    }  # fmt: skip
    shapes = {"x": (BATCH, TOKENS, WIDTH), "positions": (1, TOKENS, 1)}
    plain, counted = (model_cost(proto, shapes) for proto in (model, fused.proto))
    assert plain.exact and counted.exact and counted.macs == plain.macs
    assert dtype_shares(walk.index_of(fused.proto), counted)["fp16" if half else "fp32"].macs == 1.0
    assert counted.trace is not None
    costs = {step.node.op_type: counted.per_node.get(step.key, (0, 0))[1] for step in counted.trace.nodes}
    values = BATCH * TOKENS * WIDTH
    assert [costs[name] // values for name in ("RotaryEmbedding", "LayerNormalization", "QuickGelu")] == [4, 7, 5]
    assert costs["SkipSimplifiedLayerNormalization"] >= 6 * values


@pytest.mark.parametrize("opset", [13, 20])
def test_a_build_with_rotary_embeddings_and_norms_in_primitive_operators(tmp_path: Path, opset: int) -> None:
    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(opset=opset), path)
    shapes = {"x": (BATCH, TOKENS, WIDTH), "positions": (1, TOKENS, 1)}
    engine = te.build(path, store=te.Store(tmp_path / "store"), shapes=shapes)
    assert engine.passport.build.fusions == "layer_norm 1, multi_head_attention 1, rms_norm 1, rotary_embedding 2"
    assert engine.passport.parity is not None and engine.passport.parity.passed
    operators = {node.op_type for node in read_proto(engine.path).graph.node}
    assert operators >= {"RotaryEmbedding", "MultiHeadAttention", "LayerNormalization"} and "Cos" in operators
    plain = te.build(path, store=te.Store(tmp_path / "store"), shapes=shapes, fuse=False)
    report = te.diff(plain.path, engine.path, model=path)
    assert "rotary_embedding 2" in str(report)
    made = [change for change in report.changes if change.change == "fused" and "RotaryEmbedding" in change.text]
    assert len(made) == 2 and all(any("Neg" in name for name in change.onnx_nodes) for change in made)


def test_layers_of_a_fused_engine_name_the_nodes_of_the_model(model: Path, engines: tuple[Engine, Engine]) -> None:
    source = read_proto(model)
    found = map_nodes(read_proto(engines[0].path), source)
    operators = {node.name: node.op_type for node in source.graph.node}
    attention = next(node for node in read_proto(engines[0].path).graph.node if node.op_type == "MultiHeadAttention")
    assert {operators[name] for name in found[attention.output[0]]} >= {
        "MatMul",
        "Mul",
        "Softmax",
        "Transpose",
        "Reshape",
    }
    assert sum(operators[name] == "Softmax" for names in found.values() for name in names) == 2


@pytest.mark.parametrize(
    ("activation", "form"),
    [(name, form) for name in ("Relu", "Sigmoid", "LeakyRelu") for form in ("bias", "added bias")] + [("Relu", "sum")],
)
def test_a_convolution_its_bias_a_sum_and_the_activation_are_fused_by_onnxruntime_itself(
    activation: str, form: str, tmp_path: Path
) -> None:
    """Why there is no fusion of ours."""
    b = Builder()
    x = b.add("Conv", b.given("x", [1, 16, 8, 8]), b.weight(16, 16, 1, 1))
    biases = [] if form == "added bias" else [b.weight(16)]
    y = b.add("Conv", x, b.weight(16, 16, 3, 3), *biases, pads=[1, 1, 1, 1])
    if form != "bias":
        y = b.add("Add", y, b.weight(1, 16, 1, 1) if form == "added bias" else x)
    path = tmp_path / "conv.onnx"
    onnx.save(b.model(b.add(activation, y)), path)
    engine = te.build(path, store=te.Store(tmp_path / "store"))
    assert engine.passport.build.fusions is None
    operators = [node.op_type for node in read_proto(engine.path).graph.node]
    assert operators.count("Conv") + operators.count("FusedConv") == 2 and not {"Add", activation} & set(operators)


@pytest.mark.parametrize("sides", [(0, 1), (1, 0)])
def test_a_product_with_a_scaled_sigmoid_is_fused_by_onnxruntime_itself(sides: tuple[int, int], tmp_path: Path) -> None:
    b = Builder()
    x = b.given("x", [1, 5, WIDTH])
    gate = b.add("Sigmoid", b.add("Mul", x, b.number(1.702)))
    path = tmp_path / "gate.onnx"
    onnx.save(b.model(b.add("Mul", *((x, gate)[at] for at in sides))), path)
    engine = te.build(path, store=te.Store(tmp_path / "store"))
    assert [node.op_type for node in read_proto(engine.path).graph.node] == ["QuickGelu"]


def test_the_model_and_other_backends_never_see_a_fused_graph(model: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    build(model, tmp_path)
    assert model.read_bytes() == before
    assert "com.microsoft" not in {item.domain for item in read_proto(model).opset_import}


def test_quantized_products_are_not_fused_in_a_build(tmp_path: Path) -> None:
    path = tmp_path / "quantized.onnx"
    proto = encoder()
    scale = numpy_helper.from_array(np.array(0.05, np.float32), "scale")
    zero = numpy_helper.from_array(np.array(0, np.int8), "zero")
    proto.graph.initializer.extend([scale, zero])
    nodes = []
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            out = node.output[0]
            node.output[0] = f"{out}_plain"
            nodes.append(node)
            nodes.append(helper.make_node("QuantizeLinear", [f"{out}_plain", "scale", "zero"], [f"{out}_q"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"{out}_q", "scale", "zero"], [out]))
        else:
            nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    onnx.save(proto, path)
    assert build(path, tmp_path).passport.build.fusions is None
