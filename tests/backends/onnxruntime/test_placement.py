"""Which nodes on the CPU, beside a GPU, are a fallback: a graph and a placement, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto, helper

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import ProviderSelection
from trt_engine.backends.onnxruntime.session import Placed, describe_fallback, fallback_nodes
from trt_engine.errors import SetupError

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits" / "model.onnx"
IMAGES = {"x": ("images", TensorProto.FLOAT), "ids": ("ids", TensorProto.INT64)}


def graph(*nodes: str, constants: tuple[str, ...] = ("zero", "axes", "some")) -> ModelProto:
    """Of lines as `Concat size,some target`: operator, inputs, outputs; a node is named after its first output."""
    made = []
    for line in nodes:
        kind, inputs, outputs = line.split(" ")
        made.append(helper.make_node(kind, inputs.split(","), outputs.split(","), outputs.partition(",")[0]))
    inputs = [helper.make_tensor_value_info(name, kind, ["N", 8]) for name, kind in IMAGES.values()]
    weights = [helper.make_tensor(name, TensorProto.INT64, [1], [0]) for name in constants]
    output = helper.make_tensor_value_info(made[-1].output[0], TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(made, "g", inputs, [output], weights))


def fallbacks(model: ModelProto, *on_cpu: str) -> list[str]:
    placed: list[Placed] = [
        (node.name, node.op_type, ("CPU" if node.name in on_cpu else "CUDA") + "ExecutionProvider")
        for node in model.graph.node
    ]
    return [name for name, _ in fallback_nodes(lambda: model, placed)]


EXPORTS = {
    "convnext: the size of a batch, squeezed": (
        ["Shape images shape", "Gather shape,zero one", "Squeeze one,axes batch", "Concat one,some target",
         "Reshape images,target y"], ["one", "batch", "target"]),
    "deeplab: the size that Resize takes": (
        ["Shape images shape", "Slice shape,zero,some tail", "Concat some,tail sizes", "Resize images,,,sizes y"],
        ["tail", "sizes"]),
    "dinov2: positions from both sizes": (
        ["Shape images shape", "Slice shape,zero,some tail", "Cast tail float", "Div float,some scale", "Floor scale grid",
         "Cast grid whole", "Concat some,whole target", "Expand images,target y"],
        ["tail", "float", "scale", "grid", "whole", "target"]),
    "distilbert: a mask's shape from ids": (
        ["Shape ids shape", "Gather shape,zero batch", "Concat batch,some target", "ConstantOfShape target blank",
         "Equal target,some same", "Where same,blank,target chosen", "Expand images,chosen y"],
        ["batch", "target", "blank", "same", "chosen"]),
    "sizes of what a size made": (["Shape images s", "Range zero,s,some r", "Shape r t", "Expand images,t y"], ["r", "t"]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_arithmetic_of_sizes_on_the_cpu_is_no_fallback(name: str) -> None:
    nodes, on_cpu = EXPORTS[name]
    assert fallbacks(graph(*nodes), *on_cpu) == []


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        (["Relu images r", "Det r y"], ["r", "y"]),
        (["Shape images s", "Gather images,s g", "Relu g y"], ["g", "y"]),
        (["Cast ids c", "Add c,some y"], ["c", "y"]),  # of int64, and data all the same
        (["NonZero images n", "Shape n s", "Gather n,s y"], ["n", "y"]),
        (["Shape images s", "RandomUniformLike s u", "Add u,some y"], ["u", "y"]),
    ],
)
def test_what_computes_on_data_is_a_fallback_whatever_its_type(nodes: list[str], named: list[str]) -> None:
    model = graph(*nodes)
    assert fallbacks(model, *(node.name for node in model.graph.node)) == named


def test_a_constant_that_the_caller_may_replace_and_a_node_that_is_not_found_count_as_data() -> None:
    replaceable = graph("Add images,zero y", "Mul zero,some z", constants=("zero", "some", "images"))
    assert fallbacks(replaceable, "y", "z") == ["y"]
    assert fallback_nodes(lambda: replaceable, [("gone", "Mul", "CPUExecutionProvider")]) == [("gone", "Mul")]
    assert fallback_nodes(lambda: pytest.fail("nothing is on the CPU"), [("z", "Mul", "CUDAExecutionProvider")]) == []


def test_the_refusal_names_the_nodes_their_operators_and_how_many() -> None:
    options = session.session_options(OnnxRuntimeOptions(), level="none")
    with pytest.raises(SetupError, match=r"fall back to the CPU: 227 nodes \(Conv 59, .*`Conv_0`, .* and 223 more"):
        session.create_session(DIGITS, options, ProviderSelection(("cpu",), ({},), "cpu", strict=True))
    assert describe_fallback([("a", "Det")]) == "1 node (Det 1): `a`"
