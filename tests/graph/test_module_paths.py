"""A node keeps the path of the PyTorch module it computes, whoever exported it and whatever is done to the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, helper

import onnx_models as models
import trt_engine as te
from trt_engine.backend import get_backend
from trt_engine.cli.main import run
from trt_engine.config.precision import QuantizeConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.conversion.change_opset import change_opset
from trt_engine.conversion.simplify import simplify
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.module_paths import KEY, module_of
from trt_engine.graph.static_shapes import set_static_shapes
from trt_engine.precision.emulate import emulate
from trt_engine.precision.quantize_model import quantize
from trt_engine.profiling.attribution import profile_layers
from trt_engine.verbs.diff.run import diff

LAYERS = ["layer1.0.conv1", "layer1.0.conv2", "head.proj", "fc"]
"""What multiplies, in the order of the graph."""
TRACE = 'File "/home/anna/net.py", line 7, in forward'


def by_dynamo(node: NodeProto, module: str) -> NodeProto:
    """The node as the dynamo exporter writes it: six entries, the innermost scope is the operation's own name."""
    parts = module.split(".") if module else []
    scopes = ["", *(".".join(parts[: at + 1]) for at in range(len(parts))), f"{node.output[0]}_1"]
    for key, value in (
        ("namespace", f": net.Net/{module}"),
        ("pkg.torch.onnx.class_hierarchy", str(["net.Net", *["torch.nn.Module"] * len(parts), "aten.op.default"])),
        ("pkg.torch.onnx.fx_node", f"%{node.output[0]} : [num_users=1] = call_function[target=torch.ops.aten.op]"),
        ("pkg.torch.onnx.name_scopes", str(scopes)),
        ("pkg.torch.onnx.stack_trace", TRACE),
        ("pkg.onnxscript.rewriter.rule_name", "FoldTranspose"),
    ):
        node.metadata_props.add(key=key, value=value)
    return node


def net(path: Path, *, opset: int = 20, ir_version: int = 10, told: bool = True, location: str | None = None) -> Path:
    """A residual block, a projection and a classifier, named as the dynamo exporter names things."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return (rng.standard_normal(shape) / 6).astype(np.float32)

    weights = {
        "layer1.0.conv1.weight": weight(8, 8, 3, 3), "layer1.0.conv2.weight": weight(8, 8, 3, 3),
        "scale": weight(8) + 1, "shift": weight(8), "mean": weight(8), "var": np.abs(weight(8)) + 1,
        "head.proj.weight": weight(16, 8), "fc.weight": weight(4, 16), "fc.bias": weight(4),
    }  # fmt: skip
    nodes = [
        ("layer1.0.conv1", models.node("Conv", "x layer1.0.conv1.weight", "getitem", pads=[1, 1, 1, 1])),
        ("layer1.0.relu", models.node("Relu", "getitem", "relu")),
        ("layer1.0.conv2", models.node("Conv", "relu layer1.0.conv2.weight", "conv2d_1", pads=[1, 1, 1, 1])),
        ("layer1.0.bn2", models.node("BatchNormalization", "conv2d_1 scale shift mean var", "getitem_3")),
        ("layer1.0", models.node("Add", "getitem_3 x", "add_4")),
        ("layer1.0.relu", models.node("Relu", "add_4", "relu_1")),
        ("", models.node("GlobalAveragePool", "relu_1", "pooled")),
        ("", models.node("Flatten", "pooled", "view")),
        ("head.proj", models.node("Transpose", "head.proj.weight", "val_7", perm=[1, 0])),
        ("head.proj", models.node("MatMul", "view val_7", "linear")),
        ("head.act", models.node("Sigmoid", "linear", "sigmoid")),
        ("fc", models.node("Gemm", "sigmoid fc.weight fc.bias", "y", transB=1)),
    ]
    for index, (module, node) in enumerate(nodes):
        node.name = f"node_{node.op_type}_{index}"
        if told:
            by_dynamo(node, module)
    sides = {"x": (models.FLOAT, ["batch", 8, 8, 8])}, {"y": (models.FLOAT, ["batch", 4])}
    return models.save(
        path, [node for _, node in nodes], *sides, weights, opset=opset, ir_version=ir_version, location=location
    )


def with_function(path: Path, **more: Any) -> Path:
    """The same, its last layer a call of a local function."""
    proto = onnx.load(net(path, **more))
    call = proto.graph.node[-1]
    body = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "t"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["o"]),
    ]
    opsets = list(proto.opset_import)
    proto.functions.append(helper.make_function("local", "Linear", ["a", "w", "b"], ["o"], body, opsets))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    call.op_type, call.domain = "Linear", "local"
    del call.attribute[:]
    onnx.save(proto, path)
    return path


def multiplying(path: Path) -> list[str]:
    """The modules of what multiplies, in the order of the graph; a function that is still called among them."""
    nodes = read_proto(path).graph.node
    return [module_of(node) for node in nodes if node.op_type in ("Conv", "Gemm", "MatMul", "Linear")]


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/conv1/Conv", "conv1"),
        ("/layer2/layer2.0/conv1/Conv", "layer2.0.conv1"),
        ("/layer2/layer2.0/down/down.0/Conv", "layer2.0.down.0"),
        ("/features/features.0/features.0.1/Conv", "features.0.1"),
        ("/down/down.0/down.0.1/Conv", "down.0.1"),
        ("/layer1/layer1.0/down/down.0/down.0.1/Conv", "layer1.0.down.0.1"),
        ("/model.2/m.0/cv1/conv/Conv", "model.2.m.0.cv1.conv"),
        ("/encoder/layer.0/attention/self/query/MatMul", "encoder.layer.0.attention.self.query"),
        ("/ReduceMean", ""),
        ("node_Conv_157", ""),
        ("model/conv1/Conv2D", ""),  # TensorFlow's: a path already
        ("", ""),
    ],
)
def test_the_names_of_the_torchscript_exporter_are_paths(name: str, module: str) -> None:
    assert module_of(NodeProto(op_type="Conv", name=name)) == module


@pytest.mark.parametrize(
    ("scopes", "module"),
    [
        ("['', 'layer2', 'layer2.0', 'layer2.0.bn1', 'relu_5']", "layer2.0.bn1"),
        ("['', 'layer2', 'layer2.0', 'layer2.0.relu@1', 'relu_6']", "layer2.0.relu"),
        ("['', 'mean']", ""),
        ("['mean']", ""),
        ("[]", ""),
        ("[1, 2]", ""),
        ("{", ""),
        ("[" * 9000, ""),
        ("__import__('os')", ""),
    ],
)
def test_the_scopes_of_the_dynamo_exporter_end_in_the_operation(scopes: str, module: str) -> None:
    node = NodeProto(op_type="Relu", name="node_relu")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    assert module_of(node) == module


def test_a_convolution_that_the_exporter_fused_with_its_normalisation_has_the_path_of_the_convolution() -> None:
    node = by_dynamo(
        models.node("Conv", "x layer2.0.conv1.weight layer2.0.conv1.weight_bias", "getitem"), "layer2.0.bn1"
    )
    assert module_of(node) == "layer2.0.bn1"  # `F.conv2d` with a weight of another module
    node.metadata_props[5].value = "FuseBatchNormIntoConv, RemoveOptionalBiasFromConv"
    assert module_of(node) == "layer2.0.conv1"


# ------------------------------------------------------------------------------------------------ rewrites


def quantized(path: Path, out: Path, to: str, **more: Any) -> None:
    given = QuantizeConfig(parity=False, quantize_outputs=True, **more)
    quantize(path, to, out=out, calib_data=None if more.get("weights_only") else {"x": np.ones((2, 8, 8, 8), np.float32)},
             config=given)  # fmt: skip


def emulation(path: Path, out: Path) -> None:
    quantized(path, out.with_name("q.onnx"), "fp8")
    emulate(out.with_name("q.onnx"), out)


REWRITES: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda path, out: te.convert(path, out=out, opset=20),
    "convert, not simplified": lambda path, out: te.convert(path, out=out, simplify=False),
    "convert, weights outside": lambda path, out: te.convert(path, out=out, external_data=True),
    "simplify": simplify,
    "a newer opset": lambda path, out: change_opset(path, out, 23),
    "an older opset": lambda path, out: change_opset(path, out, 14),
    "cast to fp16": lambda path, out: te.cast(path, "fp16", out=out),
    "cast to bf16": lambda path, out: te.cast(path, "bf16", out=out),
    "quantize to int8": lambda path, out: quantized(path, out, "int8"),
    "quantize to fp8": lambda path, out: quantized(path, out, "fp8"),
    "quantize, the rest in fp16": lambda path, out: quantized(path, out, "fp8", high_precision="fp16"),
    "emulate": emulation,
    "fixed shapes": lambda path, out: set_static_shapes(open_model(path), {"x": (2, 8, 8, 8)}, out),
}
"""Every rewrite of ours, from a model to a file."""


@pytest.mark.parametrize(
    ("rewrite", "make"),
    [(name, net) for name in REWRITES] + [(name, with_function) for name in REWRITES if name != "emulate"],
)
def test_a_rewrite_keeps_the_paths(rewrite: str, make: Callable[..., Path], tmp_path: Path) -> None:
    model = make(tmp_path / "net.onnx")
    REWRITES[rewrite](model, tmp_path / "out.onnx")
    assert multiplying(tmp_path / "out.onnx") == LAYERS
    if rewrite.startswith("convert"):
        raw = (tmp_path / "out.onnx").read_bytes()
        assert b"anna" not in raw and b"pkg." not in raw
        nodes = list(read_proto(tmp_path / "out.onnx").graph.node)
        assert {item.key for node in nodes for item in node.metadata_props} == {KEY}
        assert sum(item.ByteSize() for node in nodes for item in node.metadata_props) < 48 * len(nodes)


@pytest.mark.full
@pytest.mark.skipif(find_spec("onnxslim") is None, reason="onnxslim is in the full environment")
def test_a_normalisation_that_onnxslim_fuses_leaves_the_path_of_the_convolution(tmp_path: Path) -> None:
    report = simplify(net(tmp_path / "net.onnx"), tmp_path / "out.onnx")
    assert report.simplifier == "onnxslim" and "BatchNormalization" in report.operators_removed
    assert multiplying(tmp_path / "out.onnx") == LAYERS


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_cast_from_an_old_opset_keeps_the_paths(to: str, tmp_path: Path) -> None:
    te.cast(net(tmp_path / "net.onnx", opset=11, ir_version=6), to, out=tmp_path / "out.onnx")
    assert multiplying(tmp_path / "out.onnx") == LAYERS


@pytest.mark.parametrize(("ir_version", "opset"), [(6, 11), (8, 17), (9, 20), (10, 21), (11, 23)])
def test_a_file_with_paths_loads_at_every_ir_version(ir_version: int, opset: int, tmp_path: Path) -> None:
    path = net(tmp_path / "net.onnx", ir_version=ir_version, opset=opset)
    onnx.checker.check_model(str(path))
    ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert multiplying(path) == LAYERS


# ------------------------------------------------------------------------------------------------ reports


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("modules")
    te.build(net(folder / "net.onnx"), out=folder / "net.engine.onnx", parity=False, store=te.Store(folder / "store"))
    return Engine.open(folder / "net.engine.onnx")


def test_a_profile_names_the_modules_of_onnx_runtimes_layers(built: Engine) -> None:
    feeds = {"x": np.zeros((1, 8, 8, 8), np.float32)}
    found = profile_layers(
        get_backend("onnxruntime"), built, feeds, RuntimeConfig(), inferences=2, warmup=1, keep=None
    )  # fmt: skip
    known = {row.module: row for row in found.rows}
    assert set(LAYERS) <= set(known)
    assert found.layer_label(known["layer1.0.conv2"].name).startswith("layer1.0.conv2 [")


def test_a_difference_names_its_module(built: Engine, tmp_path: Path) -> None:
    model = Path(built.passport.model.file)
    changed = {change.onnx_nodes: change.module for change in diff(model, built.path).changes}
    fused = {module for nodes, module in changed.items() if any(name.startswith("node_Conv") for name in nodes)}
    assert fused == {"layer1.0.conv1", "layer1.0.conv2"}


def test_tensorrts_layers_are_named_by_the_model_they_were_made_of(tmp_path: Path) -> None:
    tensor = {"Name": "t", "Dimensions": [1, 8, 8, 8], "Format": "Row major linear", "DataType": "Float"}
    layer = {
        "Name": "node_Conv_2 + node_Relu_5", "LayerType": "CaskConvolution", "Inputs": [tensor], "Outputs": [tensor],
        "Metadata": "[ONNX Layer: node_Conv_2]\x1e[ONNX Layer: node_Add_4]\x1e[ONNX Layer: node_Relu_5]",
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"Layers": [layer | {"TacticName": "sm80_a"}]}))
    (tmp_path / "b.json").write_text(json.dumps({"Layers": [layer | {"TacticName": "sm80_b"}]}))
    found = diff(tmp_path / "a.json", tmp_path / "b.json", model=net(tmp_path / "net.onnx"))
    assert [change.module for change in found.changes] == ["layer1.0.conv2"]


def cli(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    run([str(word) for word in words])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "lists"),
    [
        (("ranges",), ("tensors", "constants")),
        (("quantize", "--to", "int8", "--dry-run", "--exclude-type", "Gemm"), ("quantized", "unquantized")),
        (("cast", "--to", "fp16", "--dry-run", "--exclude-node", "node_Conv_0"), ("fp32_nodes",)),
    ],
    ids=lambda value: value[0],
)
def test_reports_name_modules(
    words: tuple[str, ...], lists: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(net(tmp_path / "net.onnx"))
    verb, *options = words
    told = json.loads(cli(capsys, verb, model, *options, "--json"))
    for name in lists:
        assert {item["module"] for item in told[name]} & set(LAYERS), name
    assert "layer1.0.conv1 [" in cli(capsys, verb, model, *options) or verb == "quantize"


def test_findings_name_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = onnx.load(net(tmp_path / "net.onnx"))
    added = by_dynamo(models.node("NonMaxSuppressionOfMars", "y", "z"), "head.nms")
    added.name, added.domain = "node_nms", "mars"
    proto.graph.node.append(added)
    proto.opset_import.append(helper.make_opsetid("mars", 1))
    onnx.save(proto, tmp_path / "odd.onnx")
    for verb in ("lint", "inspect"):
        told = json.loads(cli(capsys, verb, str(tmp_path / "odd.onnx"), "--json"))
        assert "head.nms" in {item["module"] for item in told["findings"]}, verb
        assert "head.nms" in cli(capsys, verb, str(tmp_path / "odd.onnx"))


def test_a_record_written_before_there_were_modules_is_read(tmp_path: Path) -> None:
    import msgspec

    from trt_engine.records.profile import LayerRow

    old = dataclasses.asdict(LayerRow("conv", "Conv", "matrix", 1.0, 1.0, 1.0, 1.0))
    del old["module"]
    assert msgspec.convert(json.loads(json.dumps(old)), LayerRow).module is None


# ------------------------------------------------------------------------------------------------ naming modules


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ({"exclude_nodes": ("layer1.0.conv2",)}, {"layer1.0.conv2"}),
        ({"exclude_nodes": ("layer1",)}, {"layer1.0.conv1", "layer1.0.conv2"}),
        ({"exclude_patterns": ("layer1.*.conv1",)}, {"layer1.0.conv1"}),
        ({"exclude_nodes": ("node_Conv_0",)}, {"layer1.0.conv1"}),
    ],
)
def test_what_is_left_out_can_be_called_by_its_module(
    exclude: dict[str, tuple[str, ...]], left: set[str], tmp_path: Path
) -> None:
    model = net(tmp_path / "net.onnx")
    report = quantize(model, "int8", config=QuantizeConfig(quantize_outputs=True, **exclude), dry_run=True)  # type: ignore[arg-type]
    assert {item.module for item in report.unquantized} == left
    cast = te.cast(model, "fp16", **exclude)  # type: ignore[arg-type]
    kept = {item.module for item in cast.fp32_nodes if item.code == "excluded"}
    assert left <= kept and kept <= {*left, "layer1.0", "layer1.0.relu", "layer1.0.bn2"}


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = net(tmp_path / "net.onnx")
    with pytest.raises(UsageError) as told:
        quantize(model, "int8", config=QuantizeConfig(exclude_nodes=("layer1.0.conv3",)), dry_run=True)
    assert "layer1.0.conv" in str(told.value.hint)
    with pytest.raises(UsageError):
        te.cast(model, "fp16", exclude_nodes=("layer1.0.conv3",))
