"""Planted defects: each is found and named where it stands, and its clean twin has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.errors import UsageError
from trt_engine.graph.load import open_graph
from trt_engine.records.base import Finding
from trt_engine.records.lint import LintReport

from . import models
from .models import graph, ints, model, node, value, weight
from .test_inspect_rules import mask

FLOAT, HALF, INT32, INT64, BOOL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL,
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def linted(proto: onnx.ModelProto, folder: Path, **how: object) -> LintReport:
    return te.lint(models.save(proto, folder), **how)  # type: ignore[arg-type]


def found(proto: onnx.ModelProto, folder: Path, **how: object) -> dict[str, Finding]:
    report = linted(proto, folder, **how)
    by_code: dict[str, Finding] = {}
    for item in report.findings:
        assert item.message
        assert item.hint or item.severity == "info", f"{item.code} says what to do"
        by_code.setdefault(item.code, item)
    return by_code


def warned(proto: onnx.ModelProto, folder: Path, **how: object) -> set[str]:
    return {code for code, item in found(proto, folder, **how).items() if item.severity != "info"}


# ------------------------------------------------------------------------------------------------ twins


def rows(target: tuple[int, ...]) -> onnx.ModelProto:
    """x (batch x 4 x 6) through a Reshape to `target` and a product, (batch x 24) to y (batch x 2)."""
    return model(
        [node("Relu", ["x"], ["r"]), node("Reshape", ["r", "target"], ["f"]), node("MatMul", ["f", "w"], ["y"])],
        [value("x", ["batch", 4, 6])],
        [value("y", ["batch", 2])],
        [ints("target", *target), weight("w", 24, 2)],
    )


def anchored(cells: int | None) -> onnx.ModelProto:
    """A head over images of any size whose anchors are baked for `cells`, or made of the feature map's own size."""
    nodes = [
        node("Conv", ["images", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[16, 16]),
        node("Reshape", ["c", "target"], ["flat"]),
    ]
    stored = [weight("w", 4, 3, 3, 3), ints("target", 0, 4, -1)]
    if cells is None:
        nodes += [node("Shape", ["flat"], ["s"]), node("ConstantOfShape", ["s"], ["anchors"])]
    else:
        stored.append(weight("anchors", 1, 4, cells))
    nodes.append(node("Add", ["flat", "anchors"], ["boxes"]))
    return model(
        nodes, [value("images", ["batch", 3, "height", "width"])], [value("boxes", ["batch", 4, "cells"])], stored
    )


def pooled(axes: tuple[int, ...]) -> onnx.ModelProto:
    """The mean over `axes`: with the batch among them the output has none."""
    return model(
        [node("ReduceMean", ["x", "axes"], ["m"], keepdims=0), node("Relu", ["m"], ["y"])],
        [value("x", ["batch", 3, 8])],
        [value("y", ["batch", 3] if 0 not in axes else [3])],
        [ints("axes", *axes)],
    )


def counted(kind: int) -> onnx.ModelProto:
    """The number of elements worked out in `kind` and multiplied, as a stride is; the result shapes nothing small."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Cast", ["s"], ["t"], to=kind),
        node("Gather", ["t", "first"], ["n"]),
        node("Mul", ["n", "big"], ["stride"]),
        node("Cast", ["stride"], ["wide"], to=INT64),
        node("Cast", ["wide"], ["f"], to=FLOAT),
        node("Mul", ["x", "f"], ["y"]),
    ]
    big = numpy_helper.from_array(np.array(1 << 28, np.int32 if kind == INT32 else np.int64), "big")
    first = numpy_helper.from_array(np.array(0, np.int64), "first")
    return model(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])], [big, first])


def noisy(random: bool) -> onnx.ModelProto:
    nodes = (
        [node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"])]
        if random
        else [node("Add", ["x", "x"], ["y"])]
    )
    return model(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])])


def normalised(training: bool) -> onnx.ModelProto:
    names = ["y", "mean", "var"] if training else ["y"]
    return model(
        [node("BatchNormalization", ["x", "s", "b", "m", "v"], names, training_mode=int(training))],
        [value("x", ["batch", 3, 8, 8])],
        [value("y", ["batch", 3, 8, 8])],
        [weight(name, 3) for name in ("s", "b", "m", "v")],
    )


def dropped(training: bool) -> onnx.ModelProto:
    return model(
        [node("Dropout", ["x", "ratio", "mode"], ["y"])],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4])],
        [numpy_helper.from_array(np.float32(0.5), "ratio"), numpy_helper.from_array(np.bool_(training), "mode")],
    )


def masked(used: bool) -> onnx.ModelProto:
    last = node("Add", ["x", "mask"], ["y"]) if used else node("Add", ["x", "x"], ["y"])
    return model([last], [value("x", ["batch", 4]), value("mask", ["batch", 4])], [value("y", ["batch", 4])])


def scattered(kind: int) -> onnx.ModelProto:
    """ScatterND takes INT64 indices alone."""
    return model(
        [node("ScatterND", ["x", "where", "new"], ["y"])],
        [value("x", ["batch", 4]), value("where", ["n", 2], kind), value("new", ["n"])],
        [value("y", ["batch", 4])],
    )


def gathered(kind: int) -> onnx.ModelProto:
    """Rows of a table by an index computed in `kind`."""
    return model(
        [node("Floor", ["x"], ["f"]), node("Cast", ["f"], ["i"], to=INT64), node("Gather", ["table", "i"], ["y"])],
        [value("x", ["batch"], kind)],
        [value("y", ["batch", 8])],
        [weight("table", 4000, 8)],
    )


def channels_last(turned: bool) -> onnx.ModelProto:
    """Two convolutions as tf2onnx leaves them, each between two Transposes, and as they should be."""
    nodes: list[onnx.NodeProto] = []
    name = "x"
    for index in range(2):
        if turned:
            nodes.append(node("Transpose", [name], [f"first{index}"], perm=[0, 3, 1, 2]))
            name = f"first{index}"
        nodes.append(node("Conv", [name, "w"], [f"c{index}"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
        name = f"c{index}"
        if turned:
            nodes.append(node("Transpose", [name], [f"last{index}"], perm=[0, 2, 3, 1]))
            name = f"last{index}"
    nodes.append(node("Relu", [name], ["y"]))
    shape: list[int | str | None] = ["batch", 8, 8, 3] if turned else ["batch", 3, 8, 8]
    return model(nodes, [value("x", shape)], [value("y", shape)], [weight("w", 3, 3, 3, 3)])


def indexed(last: int) -> onnx.ModelProto:
    return model(
        [node("Gather", ["table", "i"], ["rows"]), node("Add", ["x", "rows"], ["y"])],
        [value("x", ["batch", 3, 4])],
        [value("y", ["batch", 3, 4])],
        [weight("table", 5, 4), ints("i", 0, 2, last)],
    )


def stored_twice(twice: bool) -> onnx.ModelProto:
    second = weight("b", 64, 1024, seed=0 if twice else 1)
    return model(
        [node("MatMul", ["x", "a"], ["p"]), node("MatMul", ["x", "b"], ["q"]), node("Add", ["p", "q"], ["y"])],
        [value("x", ["batch", 64])],
        [value("y", ["batch", 1024])],
        [weight("a", 64, 1024), second],
    )


def sided(fed: bool) -> onnx.ModelProto:
    """A second output that is a table, and one that depends on the input."""
    made = node("Add", ["x", "t"], ["side"]) if fed else node("Neg", ["t"], ["side"])
    return model(
        [node("Relu", ["x"], ["y"]), made],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4]), value("side", ["batch" if fed else 1, 4])],
        [weight("t", 1, 4)],
    )


def named(first: str, second: str) -> onnx.ModelProto:
    return model(
        [node("Relu", [first], [second], name="n")], [value(first, ["batch", 4])], [value(second, ["batch", 4])]
    )


def twice_named(again: bool) -> onnx.ModelProto:
    return model(
        [node("Relu", ["x"], ["h"], name="act"), node("Relu", ["h"], ["y"], name="act" if again else "act2")],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4])],
    )


def selected(mixed: bool) -> onnx.ModelProto:
    """Sizes as a second input, one row for each image or one row at all."""
    return model(
        [node("Mul", ["x", "sizes"], ["y"])],
        [value("x", ["batch", 2]), value("sizes", [1 if mixed else "batch", 2])],
        [value("y", ["batch", 2])],
    )


def double(kind: int) -> onnx.ModelProto:
    return model([node("Relu", ["x"], ["y"])], [value("x", ["batch", 4], kind)], [value("y", ["batch", 4], kind)])


def suppressed(inside: bool) -> onnx.ModelProto:
    if not inside:
        return model(
            [node("TopK", ["scores", "k"], ["y", "where"])],
            [value("scores", ["batch", 20])],
            [value("y", ["batch", 5])],
            [ints("k", 5)],
        )
    return model(
        [node("NonMaxSuppression", ["boxes", "scores"], ["y"])],
        [value("boxes", ["batch", 10, 4]), value("scores", ["batch", 2, 10])],
        [value("y", ["n", 3], INT64)],
    )


def branched(control: bool) -> onnx.ModelProto:
    if not control:
        return double(FLOAT)
    then = graph([node("Relu", ["x"], ["a"])], [], [value("a", ["batch", 4])])
    other = graph([node("Neg", ["x"], ["b"])], [], [value("b", ["batch", 4])])
    return model(
        [node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [value("c", [], BOOL), value("x", ["batch", 4])],
        [value("y", ["batch", 4])],
    )


Planted = tuple[str, str, Callable[[], onnx.ModelProto], Callable[[], onnx.ModelProto], str | None]

PLANTED: list[Planted] = [  # code, defect, its twin, the node or tensor it is named at
    ("batch-lost", "batch frozen by a Python int", lambda: rows((1, -1)), lambda: rows((-1, 24)), "Reshape_f"),
    ("batch-lost", "batch of the example baked", lambda: rows((2, 24)), lambda: rows((0, 24)), "Reshape_f"),
    ("batch-lost", "output whose batch axis vanished", lambda: pooled((0, 2)), lambda: pooled((2,)), "ReduceMean_m"),
    ("frozen-batch", "batch frozen", lambda: models.detector(batch=1), models.detector, "images"),
    ("baked-size", "anchors baked", lambda: anchored(400), lambda: anchored(None), "Add_boxes"),
    ("shape-overflow", "overflow in shape arithmetic", lambda: counted(INT32), lambda: counted(INT64), "Mul_stride"),
    ("random-operator", "random operator", lambda: noisy(True), lambda: noisy(False), "RandomNormalLike_n"),
    ("training-mode", "BatchNormalization", lambda: normalised(True), lambda: normalised(False),
     "BatchNormalization_y"),
    ("training-mode", "Dropout", lambda: dropped(True), lambda: dropped(False), "Dropout_y"),
    ("unused-input", "input unused after export", lambda: masked(False), lambda: masked(True), "mask"),
    ("index-type", "wrong dtype of an index", lambda: scattered(INT32), lambda: scattered(INT64), "ScatterND_y"),
    ("index-through-half", "index computed in FP16", lambda: gathered(HALF), lambda: gathered(FLOAT), "Cast_i"),
    ("index-out-of-range", "index beyond its table", lambda: indexed(5), lambda: indexed(-5), "Gather_rows"),
    ("nhwc-layout", "NHWC leftovers", lambda: channels_last(True), lambda: channels_last(False), "Transpose_first0"),
    ("constant-output", "output of no input", lambda: sided(False), lambda: sided(True), "side"),
    ("awkward-name", "path in a name", lambda: named("../x", "y"), lambda: named("x", "y"), "../x"),
    ("names-differ-by-case", "capitals", lambda: named("Scores", "scores"), lambda: named("x", "scores"), "scores"),
    ("duplicate-node-name", "one name twice", lambda: twice_named(True), lambda: twice_named(False), "act"),
    ("batch-frozen-input", "one row of sizes", lambda: selected(True), lambda: selected(False), "sizes"),
    ("float64", "double precision", lambda: double(TensorProto.DOUBLE), lambda: double(FLOAT), "x"),
    ("nms-inside", "suppression", lambda: suppressed(True), lambda: suppressed(False), "NonMaxSuppression_y"),
    ("control-flow", "If", lambda: branched(True), lambda: branched(False), "If_y"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "planted", "bad", "clean", "where"), PLANTED, ids=[f"{p[0]}-{p[1]}" for p in PLANTED])
def test_a_planted_defect_is_found_and_named_and_its_clean_twin_has_none(
    tmp_path: Path, code: str, planted: str, bad: Callable[[], onnx.ModelProto],
    clean: Callable[[], onnx.ModelProto], where: str | None,
) -> None:  # fmt: skip
    one = found(bad(), tmp_path)
    assert code in one, f"{planted}: found {sorted(one)}"
    assert one[code].location == where
    expected = {"dynamic-height-width"} if code == "baked-size" else set()  # true of both
    assert warned(clean(), tmp_path) == expected


_OF_THE_WHOLE_GRAPH = {"constant-output", "unused-input"}
"""An output that an If makes depends on its condition."""


def in_branches(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all its nodes in both branches of an If on its first input."""
    graph = proto.graph
    branches = []
    for side in ("then", "else"):
        body = onnx.GraphProto(name=side, node=graph.node, initializer=graph.initializer, output=graph.output)
        made = {name for item in body.node for name in item.output} | {item.name for item in body.initializer}
        for item in body.node:
            item.input[:] = [f"{name}_{side}" if name in made else name for name in item.input]
            item.output[:] = [f"{name}_{side}" for name in item.output]
        for named in (*body.initializer, *body.output):
            named.name = f"{named.name}_{side}"
        branches.append(body)
    nodes = [
        node("Cast", [graph.input[0].name], ["as_float"], to=FLOAT), node("ReduceSum", ["as_float"], ["s"], keepdims=0),
        node("Cast", ["s"], ["chosen"], to=TensorProto.BOOL),
        node("If", ["chosen"], [item.name for item in graph.output], then_branch=branches[0], else_branch=branches[1]),
    ]  # fmt: skip
    return model(nodes, graph.input, graph.output, opset=proto.opset_import[0].version)


@pytest.mark.parametrize(
    ("code", "bad", "clean"), [(p[0], p[2], p[3]) for p in PLANTED], ids=[f"{p[0]}-{p[1]}" for p in PLANTED]
)
def test_a_defect_inside_a_branch_is_found_too(
    tmp_path: Path, code: str, bad: Callable[[], onnx.ModelProto], clean: Callable[[], onnx.ModelProto]
) -> None:
    proto = bad()
    if code in _OF_THE_WHOLE_GRAPH or any(item.HasField("g") for each in proto.graph.node for item in each.attribute):
        pytest.skip("of the whole graph, or in a body already")
    assert code in found(in_branches(proto), tmp_path)
    assert code not in found(in_branches(clean()), tmp_path)


def test_a_baked_batch_names_the_node_and_the_constant(tmp_path: Path) -> None:
    one = found(rows((1, -1)), tmp_path)
    assert set(one) == {"batch-lost"}, "the same Reshape is not said again as `batch-folded`"
    message = one["batch-lost"].message
    assert "`Reshape_f` (Reshape with the constant [1, -1])" in message


def mixing(target: tuple[int, ...]) -> onnx.ModelProto:
    """Rows of all images side by side under one Softmax, or each image's own."""
    return model(
        [
            node("Relu", ["x"], ["r"]),
            node("Reshape", ["r", "target"], ["f"]),
            node("Softmax", ["f"], ["s"], axis=1),
            node("Reshape", ["s", "back"], ["y"]),
        ],
        [value("x", ["batch", 4, 6])],
        [value("y", ["batch", 4, 6])],
        [ints("target", *target), ints("back", -1, 4, 6)],
    )


def test_images_laid_in_one_row_are_said_although_every_shape_fits(tmp_path: Path) -> None:
    one = found(mixing((1, -1, 6)), tmp_path)
    assert (one["batch-folded"].severity, one["batch-folded"].location) == ("info", "Reshape_f")
    assert "1x8x6 at 2" in one["batch-folded"].message
    assert found(mixing((-1, 4, 6)), tmp_path) == {}


def test_a_recurrent_state_has_its_batch_on_the_second_axis(tmp_path: Path) -> None:
    proto = model(
        [node("Squeeze", ["state", "first"], ["s"]), node("Add", ["x", "s"], ["y"])],
        [value("x", ["batch", 4]), value("state", [1, "batch", 4])],
        [value("y", ["batch", 4])],
        [ints("first", 0)],
    )
    assert warned(proto, tmp_path) == set()


@pytest.mark.parametrize(("first", "called"), [("time", "batch"), ("time", "B"), ("T", "N"), ("batch", "batch_size")])
def test_the_state_of_an_lstm_is_not_one_row(tmp_path: Path, first: str, called: str) -> None:
    """Time-major, or with a name of its own for the batch: the state is 1 x batch x 16 either way."""
    proto = model(
        [node("LSTM", ["x", "w", "r", "", "", "state", "cell"], ["y"], hidden_size=16)],
        [value("x", [first, called, 8]), value("state", [1, called, 16]), value("cell", [1, called, 16])],
        [value("y", [first, 1, called, 16])],
        [weight("w", 1, 64, 8), weight("r", 1, 64, 16)],
    )
    assert "batch-frozen-input" not in found(proto, tmp_path)


def test_anchors_of_one_size_name_it(tmp_path: Path) -> None:
    message = found(anchored(400), tmp_path)["baked-size"].message
    assert "fits 320 alone" in message, "20 x 20 cells of 16 pixels"
    assert "fits 640 alone" in found(anchored(1600), tmp_path)["baked-size"].message


def test_sizes_that_are_given_are_the_ones_looked_at(tmp_path: Path) -> None:
    report = linted(anchored(None), tmp_path, shapes="images:1x3x64x96")
    assert report.shapes == {"images": (1, 3, 64, 96)}
    assert not report.shapes_assumed
    conflict = found(anchored(400), tmp_path, shapes="images:1x3x64x96")["shape-conflict"]
    assert conflict.location == "Add_boxes"


def test_an_overflow_names_the_batch_it_begins_at(tmp_path: Path) -> None:
    assert "from batch 8 on (it fits at 4)" in found(counted(INT32), tmp_path)["shape-overflow"].message


def test_nhwc_leftovers_are_counted_in_elements(tmp_path: Path) -> None:
    one = found(channels_last(True), tmp_path)["nhwc-layout"]
    assert "4 Transposes" in one.message
    assert f"{4 * 3 * 8 * 8:,} elements" in one.message


def test_constants_stored_twice_are_counted(tmp_path: Path) -> None:
    one = found(stored_twice(True), tmp_path)["duplicate-constant"]
    assert f"{64 * 1024 * 4:,} bytes" in one.message
    assert "`a`, `b`" in one.message
    assert "duplicate-constant" not in found(stored_twice(False), tmp_path)


def test_what_leads_nowhere_is_counted(tmp_path: Path) -> None:
    proto = masked(True)
    proto.graph.node.append(node("MatMul", ["x", "left"], ["nowhere"]))
    proto.graph.initializer.append(weight("left", 4, 8))
    codes = found(proto, tmp_path)
    assert codes["dead-nodes"].location == "MatMul_nowhere"
    assert f"{4 * 8 * 4} bytes" in codes["unused-initializer"].message


def test_an_output_that_is_the_input_is_said(tmp_path: Path) -> None:
    proto = model(
        [node("Identity", ["x"], ["same"]), node("Relu", ["x"], ["y"])],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4]), value("same", ["batch", 4])],
    )
    assert found(proto, tmp_path)["passthrough-output"].location == "same"


@pytest.mark.parametrize("name", ["a b", "-x", "..", "x\ny", "x" * 200, "a,b", "dir/x"])
def test_names_that_break_commands_and_files_are_said(tmp_path: Path, name: str) -> None:
    assert "awkward-name" in warned(named("x", name), tmp_path)


def test_a_node_name_with_a_line_break_is_said_and_slashes_in_node_names_are_not(tmp_path: Path) -> None:
    proto = named("x", "y")
    proto.graph.node[0].name = "/model/0/relu"
    assert warned(proto, tmp_path) == set()
    proto.graph.node[0].name = "relu\n[TRT] fake log line"
    assert "unprintable-name" in warned(proto, tmp_path)


# ------------------------------------------------------------------------------------------------ lint and inspect


def newer(opset: int, ir: int) -> onnx.ModelProto:
    proto = models.detector()
    proto.opset_import[0].version, proto.ir_version = opset, ir
    return proto


def positions(kind: str) -> onnx.ModelProto:
    return model([node(kind, ["x"], ["y"])], [value("x", ["batch", 4])], [value("y", None, INT64)])


@pytest.mark.parametrize(
    ("code", "bad", "clean"),
    [
        ("detr-mask-path", mask(), mask(source=TensorProto.UINT8, after="neither")),
        ("deformable-attention", models.unpicked("MultiscaleDeformableAttnPlugin_TRT"), models.unpicked("Relu")),
        ("tensorrt-only-operator", models.unpicked("EfficientNMS_TRT", "TRT"), models.unpicked("Relu")),
        ("unknown-operator", models.unpicked("Magic", "my.company"), models.unpicked("Relu")),
        ("opset-beyond-onnxruntime", newer(40, 13), newer(20, 10)),
        ("opset-beyond-tensorrt", newer(26, 13), newer(24, 11)),
        ("ir-beyond-onnxruntime", newer(20, 30), newer(20, 13)),
        ("data-dependent-shape", positions("NonZero"), positions("ArgMax")),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)  # fmt: skip
def test_what_the_shared_rules_know_is_found_by_lint_too(
    tmp_path: Path, code: str, bad: onnx.ModelProto, clean: onnx.ModelProto
) -> None:
    assert code in found(bad, tmp_path)
    assert code not in found(clean, tmp_path)


def test_no_code_is_said_twice_of_one_place(tmp_path: Path) -> None:
    for _, _, bad, clean, _ in PLANTED:
        for proto in (bad(), clean()):
            said = [(item.code, item.location) for item in linted(proto, tmp_path).findings]
            assert len(said) == len(set(said))


def test_a_node_against_its_operators_rules_is_an_error_and_the_only_one(tmp_path: Path) -> None:
    proto = channels_last(True)
    proto.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("permute", 1.5))
    one = found(proto, tmp_path)
    assert one["broken-node"].severity == "error"
    assert "Transpose" in one["broken-node"].message
    assert "nhwc-layout" not in one


def test_errors_come_first(tmp_path: Path) -> None:
    proto = scattered(INT32)
    proto.graph.input.append(value("left", ["batch", 4]))
    severities = [item.severity for item in linted(proto, tmp_path).findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert severities[0] == "error"


@pytest.mark.parametrize("path", ["examples/digits/model.onnx", "examples/classifiers/resnet.onnx"])
def test_an_exported_model_that_is_sound_has_no_findings(path: str) -> None:
    report = te.lint(ROOT / path)
    assert report.findings == ()
    assert {(row.tensorrt, row.cpu, row.cuda) for row in report.operators} == {("yes", "yes", "yes")}


def test_an_unknown_target_and_an_old_tensorrt_are_usage_errors(tmp_path: Path) -> None:
    path = models.save(models.detector(), tmp_path)
    with pytest.raises(UsageError, match="target"):
        te.lint(path, target="tensorflow")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"8\.6"):
        te.lint(path, tensorrt="8.6")
    with pytest.raises(UsageError):
        te.lint(path, shapes="pictures:1x3x32x32")
    with pytest.raises(UsageError):
        te.lint(path, shapes="images:1x3x33x33")


def test_the_graph_is_the_same_afterwards(tmp_path: Path) -> None:
    path = models.save(channels_last(True), tmp_path)
    opened = open_graph(path)
    before = opened.model.proto.SerializeToString(deterministic=True)
    from trt_engine.graph.lint import lint_model

    lint_model(opened)
    assert opened.model.proto.SerializeToString(deterministic=True) == before


def test_a_node_of_a_function_counts_by_what_it_is_made_of(tmp_path: Path) -> None:
    twice = helper.make_function(
        "my.company", "Twice", ["x"], ["y"], [node("MatMul", ["x", "x"], ["y"])], [helper.make_opsetid("", 20)]
    )
    proto = model(
        [helper.make_node("Twice", ["x"], ["y"], domain="my.company", name="call")],
        [value("x", ["batch", 4, 4])],
        [value("y", ["batch", 4, 4])],
        domains={"my.company": 1},
        functions=[twice],
    )
    report = linted(proto, tmp_path)
    assert [(row.op, row.nodes) for row in report.operators] == [("MatMul", 1)]
    assert report.findings == ()


# ------------------------------------------------------------------------------------------------ damage


def test_lint_finds_all_that_inspect_finds(tmp_path: Path) -> None:
    for _, _, bad, _, _ in PLANTED:
        path = models.save(bad(), tmp_path)
        inspected = {item.code for item in te.inspect(path).findings}  # type: ignore[union-attr]
        assert inspected <= {item.code for item in te.lint(path).findings}


def test_nodes_out_of_order_are_said(tmp_path: Path) -> None:
    proto = twice_named(False)
    first, second = proto.graph.node[1], proto.graph.node[0]
    turned = [onnx.NodeProto.FromString(item.SerializeToString()) for item in (first, second)]
    del proto.graph.node[:]
    proto.graph.node.extend(turned)
    assert found(proto, tmp_path)["not-sorted"].location == "act2"
