"""Troublemakers: each is found where it is, and nowhere else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_engine.graph.inspect import inspect_model
from trt_engine.records.base import Finding
from trt_engine.records.inspect import ModelReport
from trt_engine.trt.settings import PlanSettings

from . import models
from .models import graph, model, node, value, weight

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def report(proto: onnx.ModelProto, folder: Path, **shapes: tuple[int, ...]) -> ModelReport:
    return inspect_model(models.save(proto, folder), shapes)


def found(proto: onnx.ModelProto, folder: Path, **shapes: tuple[int, ...]) -> dict[str, Finding]:
    findings = {item.code: item for item in report(proto, folder, **shapes).findings}
    assert all(item.message and (item.hint or item.severity == "info") for item in findings.values())
    return findings


def flow(
    *nodes: onnx.NodeProto, stored: tuple[TensorProto, ...] = (), out: list[int | str] | None = None
) -> onnx.ModelProto:
    """Nodes from `x` (batch x 4) to `y`."""
    return model(nodes, [value("x", ["batch", 4])], [value("y", out or ["batch", 4])], stored)


def test_tensorrts_operators_are_findings_and_not_errors(tmp_path: Path) -> None:
    one = found(models.unpicked("EfficientNMS_TRT"), tmp_path)["tensorrt-only-operator"]
    assert (one.severity, one.location) == ("warning", "the_node")
    assert one.hint and "`-O plugins=" in one.hint and "plugins" in {item.name for item in fields(PlanSettings)}


def test_deformable_attention_asks_for_its_workspace(tmp_path: Path) -> None:
    one = found(models.unpicked("MultiscaleDeformableAttnPlugin_TRT"), tmp_path)["deformable-attention"]
    assert "32 GiB" in one.message
    assert "--workspace 32GiB" in (one.hint or "")


def test_deformable_attention_written_out_is_recognised(tmp_path: Path) -> None:
    proto = model(
        [
            node("Softmax", ["x"], ["a"]),
            node("GridSample", ["a", "g"], ["b"]),
            node("GridSample", ["x", "g"], ["c"]),
            node("Add", ["b", "c"], ["y"]),
        ],
        [value("x", ["batch", 3, 8, 8]), value("g", ["batch", 8, 8, 2])],
        [value("y", ["batch", 3, 8, 8])],
    )
    assert "deformable-attention" in found(proto, tmp_path)


def mask(*, source: int = BOOL, after: str = "bool") -> onnx.ModelProto:
    """A mask is resized to the feature map's size, as DETR's backbone does."""
    scales = numpy_helper.from_array(np.array([1, 1, 0.5, 0.5], np.float32), "s")
    end = {
        "bool": [node("Cast", ["r"], ["y"], to=BOOL)],
        "sigmoid": [node("Mul", ["r", "r"], ["m"]), node("Sigmoid", ["m"], ["y"])],
        "neither": [node("Relu", ["r"], ["y"])],
    }[after]
    return model(
        [
            node("Cast", ["mask"], ["c"], to=FLOAT),
            node("Unsqueeze", ["c", "one"], ["u"]),
            node("Resize", ["u", "", "s"], ["r"], mode="nearest"),
            *end,
        ],
        [value("mask", ["batch", 8, 8], source)],
        [value("y", ["batch", 1, 4, 4], BOOL if after == "bool" else FLOAT)],
        [scales, models.ints("one", 1)],
    )


@pytest.mark.parametrize("after", ["bool", "sigmoid"])
def test_the_detr_mask_path_is_found_with_its_remedies_in_order(tmp_path: Path, after: str) -> None:
    hint = found(mask(after=after), tmp_path)["detr-mask-path"].hint or ""
    assert 0 <= hint.index("dynamo") < hint.index("fixed shapes") < hint.index("level 2")
    assert "`trt-engine build`" in hint and "onnxsim" not in hint, "every remedy is one we ship"


def test_open_height_and_width_name_the_option(tmp_path: Path) -> None:
    one = found(models.detector(height=None, width=None), tmp_path)["dynamic-height-width"]
    assert "--shapes images:1x3x640x640" in (one.hint or "")


def test_a_batch_baked_into_a_reshape_is_found_although_the_output_claims_to_move(tmp_path: Path) -> None:
    proto = flow(node("Reshape", ["x", "target"], ["y"]), stored=(models.ints("target", 1, -1),), out=["batch", "wide"])
    assert "batch-lost" in found(proto, tmp_path)
    good = flow(node("Reshape", ["x", "target"], ["y"]), stored=(models.ints("target", -1, 4),))
    assert "batch-lost" not in found(good, tmp_path)


@pytest.mark.parametrize(
    ("opset", "ir", "code"), [(40, 13, "opset-beyond-onnxruntime"), (20, 30, "ir-beyond-onnxruntime")]
)
def test_what_onnxruntime_is_too_old_for_is_said(tmp_path: Path, opset: int, ir: int, code: str) -> None:
    proto = models.detector()
    proto.opset_import[0].version, proto.ir_version = opset, ir
    assert set(found(proto, tmp_path)) == {code}


def test_control_flow_and_shapes_from_data_are_said(tmp_path: Path) -> None:
    then = graph([node("Relu", ["x"], ["a"])], [], [value("a", ["batch", 4])])
    other = graph([node("Neg", ["x"], ["b"])], [], [value("b", ["batch", 4])])
    proto = model(
        [node("If", ["c"], ["y"], then_branch=then, else_branch=other), node("NonZero", ["x"], ["z"])],
        [value("c", [], BOOL), value("x", ["batch", 4])],
        [value("y", ["batch", 4]), value("z", [2, "n"], INT64)],
    )
    assert {"control-flow", "data-dependent-shape"} <= set(found(proto, tmp_path))


def test_suppression_inside_is_said(tmp_path: Path) -> None:
    proto = model(
        [node("NonMaxSuppression", ["boxes", "scores"], ["y"])],
        [value("boxes", ["batch", 10, 4]), value("scores", ["batch", 2, 10])],
        [value("y", ["n", 3], INT64)],
    )
    assert "nms-inside" in found(proto, tmp_path)


def test_attention_is_recognised_and_points_to_the_scan(tmp_path: Path) -> None:
    proto = model(
        [
            node("MatMul", ["q", "k"], ["s"]),
            node("Div", ["s", "root"], ["d"]),
            node("Softmax", ["d"], ["p"]),
            node("MatMul", ["p", "v"], ["y"]),
        ],
        [value("q", ["batch", 5, 8]), value("k", ["batch", 8, 5]), value("v", ["batch", 5, 8])],
        [value("y", ["batch", 5, 8])],
        [weight("root", 1)],
    )
    one = found(proto, tmp_path)["transformer"]
    assert one.severity == "info"
    assert "--scan" in (one.hint or "")


def test_double_precision_is_said(tmp_path: Path) -> None:
    proto = flow(
        node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        node("Exp", ["d"], ["e"]),
        node("Cast", ["e"], ["y"], to=FLOAT),
    )
    assert "float64" in found(proto, tmp_path)


def test_int64_inputs_are_said_and_int64_shapes_are_not(tmp_path: Path) -> None:
    proto = model(
        [node("Gather", ["table", "ids"], ["y"])],
        [value("ids", ["batch", 7], INT64)], [value("y", ["batch", 7, 4])], [weight("table", 30, 4)],
    )  # fmt: skip
    assert found(proto, tmp_path)["int64"].location == "ids"


@pytest.mark.parametrize("op", ["RandomNormalLike", "Bernoulli"])
def test_random_numbers_are_said(tmp_path: Path, op: str) -> None:
    assert "random-operator" in found(flow(node(op, ["x"], ["y"])), tmp_path)


def test_training_mode_is_said_and_evaluation_mode_is_not(tmp_path: Path) -> None:
    on = numpy_helper.from_array(np.array(True), "on")
    off = numpy_helper.from_array(np.array(False), "on")
    ratio = numpy_helper.from_array(np.array(0.5, np.float32), "ratio")
    drop = node("Dropout", ["x", "ratio", "on"], ["y"])
    assert "training-mode" in found(flow(drop, stored=(on, ratio)), tmp_path)
    assert found(flow(drop, stored=(off, ratio)), tmp_path) == {}
    assert found(flow(node("Dropout", ["x"], ["y"])), tmp_path) == {}


@pytest.mark.parametrize(
    ("elem", "code"),
    [(TensorProto.FLOAT8E4M3FN, "fp8-type"), (TensorProto.INT4, "int4-type"), (TensorProto.FLOAT4E2M1, "fp4-type")],
)
def test_narrow_types_say_where_they_run(tmp_path: Path, elem: int, code: str) -> None:
    nbytes = 8 if elem != TensorProto.FLOAT8E4M3FN else 16
    proto = model(
        [node("DequantizeLinear", ["w", "s"], ["wd"]), node("MatMul", ["x", "wd"], ["y"])],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4])],
        [helper.make_tensor("w", elem, [4, 4], bytes(nbytes), raw=True), weight("s")],
        opset=23,
    )
    assert found(proto, tmp_path)[code].location == "w"


# ------------------------------------------------------------------------------------------------ the report


def test_the_report_counts_bodies_and_domains(tmp_path: Path) -> None:
    proto = models.unpicked("Gelu", "com.microsoft")
    made = report(proto, tmp_path)
    assert (made.operators, made.domains, made.nodes) == ({"com.microsoft::Gelu": 1}, {"com.microsoft": 1}, 1)
    assert made.flops_exact


def test_a_report_without_its_shapes_has_no_count_and_with_them_has(tmp_path: Path) -> None:
    proto = models.detector(height=None, width=None)
    without = report(proto, tmp_path)
    assert (without.macs, without.flops, without.flops_exact) == (None, None, False)
    given = report(proto, tmp_path, images=(2, 3, 32, 32))
    assert given.macs == 2 * (8 * 32 * 32 * 27 + 80)
    assert given.flops_shapes == {"images": (2, 3, 32, 32)}


def test_constants_beyond_fp16_are_said(tmp_path: Path) -> None:
    huge = numpy_helper.from_array(np.array(-1e9, np.float32), "huge")
    assert "-1e+09" in found(flow(node("Add", ["x", "huge"], ["y"]), stored=(huge,)), tmp_path)["beyond-fp16"].message
