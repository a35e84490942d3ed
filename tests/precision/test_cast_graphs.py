"""The cast graph is valid, typed consistently, and computes what the FP32 one does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import onnx_models
from graph import models
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import typed_graph, walk
from trt_engine.graph.emulate_half import emulate_half_precision
from trt_engine.graph.typing_rules import check_strong_typing
from trt_engine.precision.cast_model import cast
from trt_engine.records.precision import CastReport

FLOAT, HALF, BRAIN, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model.onnx"
node, value, weight = models.node, models.value, models.weight


def const(name: str, numbers: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(numbers, np.float32), name)


def run(model: Path | ModelProto, feeds: dict[str, Any]) -> list[np.ndarray]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.fixture
def casting(tmp_path: Path) -> Callable[..., tuple[CastReport, ModelProto]]:
    """Cast a graph, see it pass ONNX's full check and our rules, and hand it back with the report."""

    def do(proto: ModelProto, to: str = "fp16", **asked: Any) -> tuple[CastReport, ModelProto]:
        source = models.save(proto, tmp_path)
        report = cast(source, to, out=tmp_path / "cast.onnx", overwrite=True, **asked)
        made = onnx.load(tmp_path / "cast.onnx")
        onnx.checker.check_model(made, full_check=True)
        assert check_strong_typing(made) == report.findings
        assert not [item for item in report.findings if item.code in ("types-differ", "type-not-taken")]
        return report, made

    return do


Casting = Callable[..., tuple[CastReport, ModelProto]]


def kept(report: CastReport) -> dict[str, str]:
    return {item.node: item.code for item in report.fp32_nodes}


def close(source: ModelProto, made: ModelProto, feeds: dict[str, Any], tolerance: float = 1e-2) -> None:
    for want, got in zip(run(source, feeds), run(made, feeds), strict=True):
        assert got.dtype == want.dtype
        scale = max(float(np.abs(want).max(initial=0)), 1e-3)
        np.testing.assert_allclose(got.astype(np.float64), want, atol=tolerance * scale)


def casts(proto: ModelProto) -> list[NodeProto]:
    return [place.node for place in walk.nodes(proto) if place.node.op_type == "Cast"]


# ------------------------------------------------------------------------------------------------ the whole graph


@pytest.mark.parametrize("opset", range(13, 24))
def test_every_opset_from_13_to_23_casts_to_fp16_and_runs(opset: int, casting: Casting) -> None:
    proto = models.detector()
    proto.opset_import[0].version = opset
    report, made = casting(proto)
    assert report.opset == (opset, opset) and report.nodes_cast == report.nodes == 5
    assert {item.data_type for item in made.graph.initializer} == {HALF}
    assert report.casts_added == 2 == len(casts(made))
    close(proto, made, {"images": np.random.default_rng(0).random((2, 3, 32, 32), np.float32)})


@pytest.mark.parametrize("opset", [13, 17, 20, 22])
def test_bf16_raises_the_opset_to_where_convolutions_take_it(opset: int, casting: Casting) -> None:
    proto = models.detector()
    proto.opset_import[0].version = opset
    report, made = casting(proto, "bf16")
    assert report.opset == (opset, 22) and report.nodes_cast == 5
    assert bool(report.notes) == (opset < 22)
    feeds = {"images": np.random.default_rng(0).random((2, 3, 32, 32), np.float32)}
    close(proto, emulate_half_precision(made, Path()), feeds, 3e-2)


def test_what_no_raise_can_bring_to_bf16_is_refused_with_the_reason(tmp_path: Path) -> None:
    proto = models.model(
        [
            node("BatchNormalization", ["x", "s", "s", "s", "s"], ["n", "m", "v", "sm", "sv"]),
            node("Conv", ["n", "w"], ["y"], kernel_shape=[1, 1]),
        ],
        [value("x", [1, 4, 8, 8])], [value("y", [1, 4, 8, 8])], [weight("s", 4), weight("w", 4, 4, 1, 1)], opset=13,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"opset 13.*cannot be raised to opset 22.*training outputs") as caught:
        cast(models.save(proto, tmp_path), "bf16", out=tmp_path / "x.onnx")
    assert "fp16" in (caught.value.hint or "")
    assert not (tmp_path / "x.onnx").exists()


def test_the_digits_detector_agrees_and_its_class_numbers_stay_exact(tmp_path: Path) -> None:
    report = cast(DIGITS, "fp16", out=tmp_path / "d.onnx")
    assert kept(report) == {"Cast_0": "index", "Concat_16": "index"} and not report.findings
    assert report.nbytes_after is not None and report.nbytes_after < 0.51 * report.nbytes_before
    x = {"images": np.random.default_rng(3).random((2, 3, 160, 160), np.float32)}
    want, got = run(DIGITS, x)[0], run(tmp_path / "d.onnx", x)[0]
    assert got.dtype == np.float32
    assert np.abs(want[..., 4] - got[..., 4]).max() < 1e-3
    assert set(np.unique(got[..., 5])) <= set(range(10))


def test_inputs_and_outputs_stay_fp32_unless_told(casting: Casting) -> None:
    _, made = casting(models.detector())
    assert made.graph.input[0].type.tensor_type.elem_type == made.graph.output[0].type.tensor_type.elem_type == FLOAT
    report, made = casting(models.detector(), keep_io=False)
    assert made.graph.input[0].type.tensor_type.elem_type == made.graph.output[0].type.tensor_type.elem_type == HALF
    assert not casts(made) and report.casts_added == 0
    assert [item.name for item in (*made.graph.input, *made.graph.output)] == ["images", "scores"]


# ------------------------------------------------------------------------------------------------ islands


def test_an_excluded_island_has_casts_at_its_borders_alone(casting: Casting) -> None:
    proto = models.model(
        [
            node("Relu", ["x"], ["a"], name="first"),
            node("Exp", ["a"], ["b"], name="in1"),
            node("Reshape", ["b", "flat"], ["c"], name="moves"),
            node("Log", ["c"], ["d"], name="in2"),
            node("Mul", ["d", "w"], ["e"], name="in3"),
            node("Add", ["d", "e"], ["f"], name="back"),
            node("Sub", ["f", "d"], ["y"], name="last"),
        ],
        [value("x", [2, 6])], [value("y", [12])], [models.ints("flat", 12), weight("w", 12)],
    )  # fmt: skip
    report, made = casting(proto, exclude_nodes=["in1"], exclude_types=["Log"], exclude_patterns=["in3*"])
    assert kept(report) == {"in1": "excluded", "moves": "between", "in2": "excluded", "in3": "excluded"}
    assert report.casts_added == 5  # the input, a, then d and e once each, the output
    sources = [item.input[0] for item in casts(made)]
    assert len(sources) == len(set(sources)), "one Cast for all readers"
    makers = {name: item for item in made.graph.node for name in item.output}
    assert not [item for item in casts(made) if makers.get(item.input[0], item).op_type == "Cast" and
                makers.get(item.input[0]) is not None], "no Cast reads a Cast"  # fmt: skip
    assert [item.data_type for item in made.graph.initializer if item.name == "w"] == [FLOAT]
    close(proto, made, {"x": np.random.default_rng(0).random((2, 6), np.float32)})


def test_a_weight_both_sides_read_is_stored_in_both_types(casting: Casting) -> None:
    proto = models.model(
        [node("Mul", ["x", "w"], ["a"], name="low"), node("Add", ["a", "w"], ["y"], name="high")],
        [value("x", [4])], [value("y", [4])], [weight("w", 4)],
    )  # fmt: skip
    report, made = casting(proto, exclude_nodes=["high"])
    assert report.duplicated_constants == ("w",)
    assert sorted(item.data_type for item in made.graph.initializer) == [FLOAT, HALF]
    close(proto, made, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"exclude_nodes": ["Conv_x"]}, "no node `Conv_x`"),
        ({"exclude_types": ["Convv"]}, "no operator `Convv`"),
        ({"exclude_patterns": ["/head/*"]}, "no node name matches the pattern"),
    ],
)
def test_an_exclusion_that_is_nowhere_is_an_error(asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        cast(models.save(models.detector(), tmp_path), "fp16", out=tmp_path / "x.onnx", **asked)


def test_reasons_of_a_ranges_report_are_kept_with_their_nodes(casting: Casting) -> None:
    report, _ = casting(models.detector(), ranges={"Gemm_scores": "reaches 1e6"})
    assert [(item.code, item.reason) for item in report.fp32_nodes] == [("range", "reaches 1e6")]


# ------------------------------------------------------------------------------------------------ constants


def masked(fill: float) -> ModelProto:
    return models.model(
        [
            node("Where", ["m", "x", "fill"], ["a"], name="where"),
            node("Unsqueeze", ["a", "axis"], ["b"], name="lay"),
            node("Softmax", ["b"], ["c"], axis=-1, name="soft"),
            node("Mul", ["c", "w"], ["y"], name="after"),
        ],
        [value("m", [2, 4], TensorProto.BOOL), value("x", [2, 4])], [value("y", [1, 2, 4])],
        [const("fill", fill), models.ints("axis", 0), weight("w", 4)],
    )  # fmt: skip


@pytest.mark.parametrize("fill", [-1e9, -3.4028235e38, 70000.0])
def test_a_mask_beyond_the_range_stays_fp32_with_all_that_reads_it(fill: float, casting: Casting) -> None:
    report, made = casting(masked(fill))
    assert set(kept(report)) == {"where", "lay", "soft"}
    feeds = {"m": np.eye(2, 4, dtype=bool), "x": np.random.default_rng(0).random((2, 4), np.float32)}
    close(masked(fill), made, feeds)


def test_a_mask_is_moved_when_the_user_agrees(casting: Casting) -> None:
    report, made = casting(masked(-1e9), clamp_masks=True)
    assert not report.fp32_nodes and report.constants_clamped == ("fill",)
    stored = next(item for item in made.graph.initializer if item.name == "fill")
    assert numpy_helper.to_array(stored) == np.float16(-65504)
    close(masked(-1e9), made, {"m": np.eye(2, 4, dtype=bool), "x": np.ones((2, 4), np.float32)})


_LAST = numpy_helper.from_array(np.array([-1], np.int64), "last")


def _normalization(norm: str, square: str, root: str, eps: float) -> tuple[list[NodeProto], list[TensorProto]]:
    """Nodes from `x` to `y`, as the exporters write a normalisation out; the gain `g` behind it is no part of it."""
    centred = norm in ("layer", "group", "late eps", "twice")
    shape = [node("Reshape", ["x", "groups"], ["h"])] if norm == "group" else [node("Identity", ["x"], ["h"])]
    mean = [node("ReduceMean", ["h", "last"], ["m"], name="mean"), node("Sub", ["h", "m"], ["c"], name="centre")]
    squares = {
        "Pow": node("Pow", ["c" if centred else "h", "two"], ["s"], name="square"),
        "Mul": node("Mul", ["c" if centred else "h"] * 2, ["s"], name="square"),
    }
    nodes = [*shape, *(mean if centred else ()), squares[square]]
    if norm == "variance":  # of E[x^2] - E[x]^2
        nodes += [
            mean[0],
            node("Mul", ["m", "m"], ["mm"], name="mean2"),
            node("ReduceMean", ["s", "last"], ["e"], name="sum"),
        ]
        nodes += [node("Sub", ["e", "mm"], ["v"], name="var")]
    else:
        nodes += [node("ReduceMean", ["s", "last"], ["v"], name="sum")]
    over = node("Add", ["v", "eps"], ["ve"], name="guard") if norm != "late eps" else node("Identity", ["v"], ["ve"])
    late = [node("Add", ["r", "eps"], ["rl"], name="guard")] if norm == "late eps" else []
    below = "rl" if late else "r"
    numerator = "c" if centred else "h"
    if norm == "twice":
        nodes += [node("Sub", ["h", "m"], ["c2"], name="centre2")]
        numerator = "c2"
    nodes.append(over)
    nodes += {
        "Sqrt": [node("Sqrt", ["ve"], ["r"], name="root"), *late, node("Div", [numerator, below], ["q"], name="div")],
        "Reciprocal": [node("Sqrt", ["ve"], ["r"], name="root"), *late, node("Reciprocal", [below], ["i"], name="inverse"),
                       node("Mul", [numerator, "i"], ["q"], name="div")],
        "1 / r": [node("Sqrt", ["ve"], ["r"], name="root"), *late, node("Div", ["one", below], ["i"], name="inverse"),
                  node("Mul", ["i", numerator], ["q"], name="div")],
        "Pow": [node("Pow", ["ve", "half"], ["r"], name="root"), *late, node("Div", [numerator, below], ["q"], name="div")],
        "Pow-": [node("Pow", ["ve", "minus"], ["r"], name="root"), node("Mul", [numerator, "r"], ["q"], name="div")],
    }[root]  # fmt: skip
    nodes += [node("Reshape", ["q", "shape"], ["b"]), node("Mul", ["b", "g"], ["y"], name="gain")]
    stored = [const("eps", eps), const("two", 2.0), const("one", 1.0), const("half", 0.5), const("minus", -0.5)]
    stored += [const("g", np.full(8, 0.5)), numpy_helper.from_array(np.array([2, 2, 4], np.int64), "groups"), _LAST]
    return nodes, [*stored, numpy_helper.from_array(np.array([2, 8], np.int64), "shape")]


@pytest.mark.parametrize(
    ("root", "eps"), [("Sqrt", 1e-12), ("Reciprocal", 1e-5), ("1 / r", 1e-12), ("Pow", 1e-5), ("Pow-", 1e-12)]
)
@pytest.mark.parametrize("norm", ["layer", "rms", "group", "variance", "late eps", "twice"])
def test_a_normalization_that_is_written_out_stays_in_fp32(norm: str, root: str, eps: float, casting: Casting) -> None:
    if (norm, root) == ("late eps", "Pow-"):
        return  # the guard stands behind the root, of which there is none
    for square in ("Pow", "Mul"):
        nodes, stored = _normalization(norm, square, root, eps)
        proto = models.model(nodes, [value("x", [2, 8])], [value("y", [2, 8])], stored)
        report, made = casting(proto)
        names = {item.name for item in nodes} & set(
            "mean centre centre2 square mean2 sum var guard root inverse div".split()
        )
        assert names <= set(kept(report)), names - set(kept(report))
        assert "gain" not in kept(report)
        x = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
        for feed in (x, x * 2000, np.zeros_like(x)):  # squares beyond FP16; a guard of 1e-12
            got = emulate_half_precision(made, Path())
            close(proto, got, {"x": feed})


def test_norms_and_magnitudes_of_squares_stay_in_fp32_and_other_roots_do_not(casting: Casting) -> None:
    proto = models.model(
        [
            node("ReduceL2", ["x", "last"], ["l"], name="l2"),
            node("Clip", ["l", "eps"], ["lc"], name="guard"),
            node("Div", ["x", "lc"], ["a"], name="unit"),
            node("Mul", ["x", "x"], ["re"], name="re"),
            node("Mul", ["a", "a"], ["im"], name="im"),
            node("Add", ["re", "im"], ["power"], name="power"),
            node("Sqrt", ["power"], ["b"], name="magnitude"),
            node("Abs", ["x"], ["p"], name="abs"),
            node("Sqrt", ["p"], ["c"], name="plain"),
        ],
        [value("x", [2, 4])], [value("a", [2, 4]), value("b", [2, 4]), value("c", [2, 4])],
        [const("eps", 1e-12), _LAST],
    )  # fmt: skip
    report, _ = casting(proto)
    assert set(kept(report)) == {"l2", "guard", "unit", "re", "im", "power", "magnitude"}


def test_weights_beyond_max_constant_keep_their_layer(casting: Casting) -> None:
    proto = models.detector()
    big = numpy_helper.to_array(proto.graph.initializer[0]).copy()
    big[0, 0, 0, 0] = 1000
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(big, "w"))
    assert kept(casting(proto, max_constant=500)[0]) == {"Conv_c": "constant"}
    assert not casting(proto)[0].fp32_nodes


# ------------------------------------------------------------------------------------------------ indices


def test_arithmetic_of_indices_stays_exact(casting: Casting) -> None:
    proto = models.model(
        [
            node("TopK", ["x", "k"], ["v", "i"], axis=-1),
            node("Cast", ["i"], ["f"], to=FLOAT, name="to_float"),
            node("Div", ["f", "ten"], ["d"], name="div"),
            node("Floor", ["d"], ["q"], name="floor"),
            node("Cast", ["q"], ["rows"], to=INT64, name="to_int"),
            node("Gather", ["table", "rows"], ["g"]),
            node("Add", ["g", "v"], ["y"]),
        ],
        [value("x", [5000])], [value("y", [3]), value("rows", [3], INT64)],
        [models.ints("k", 3), const("ten", 10.0), weight("table", 500)],
    )  # fmt: skip
    report, made = casting(proto)
    assert set(kept(report)) == {"to_float", "div", "floor"}
    x = np.zeros(5000, np.float32)
    x[[4999, 3117, 2049]] = [3, 2, 1]
    assert run(made, {"x": x})[1].tolist() == [499, 311, 204]


def test_positions_are_turned_to_angles_in_fp32(casting: Casting) -> None:
    proto = models.model(
        [
            node("Cast", ["p"], ["f"], to=FLOAT, name="to_float"),
            node("Mul", ["f", "freq"], ["a"], name="angle"),
            node("Sin", ["a"], ["s"], name="sin"),
            node("Mul", ["s", "x"], ["y"], name="rotate"),
        ],
        [value("p", [4], INT64), value("x", [4])], [value("y", [4])], [const("freq", [1.0, 0.1, 0.01, 0.001])],
    )  # fmt: skip
    report, made = casting(proto)
    assert set(kept(report)) == {"to_float", "angle", "sin"}
    close(proto, made, {"p": np.array([4001, 4002, 4003, 4004]), "x": np.ones(4, np.float32)}, 2e-3)


# ------------------------------------------------------------------------------------------------ single operators


def test_layer_normalization_keeps_its_statistics_in_the_type_its_attribute_says(casting: Casting) -> None:
    proto = models.model(
        [
            node("LayerNormalization", ["x", "s", "b"], ["n", "mean", "inv"]),
            node("Sub", ["n", "mean"], ["y"]),
        ],
        [value("x", [2, 4])], [value("y", [2, 4])], [weight("s", 4), weight("b", 4)],
    )  # fmt: skip
    report, made = casting(proto)
    assert not report.fp32_nodes and [item.name for item in casts(made)] and report.casts_added == 3
    close(proto, made, {"x": np.random.default_rng(0).random((2, 4), np.float32)})


@pytest.mark.parametrize("domain", ["", "trt"])
def test_operators_only_tensorrt_runs_pass_through(domain: str, casting: Casting, tmp_path: Path) -> None:
    proto = models.model(
        [
            node("Relu", ["x"], ["a"]),
            node("GroupNormalizationPlugin", ["a"], ["b"], domain=domain, name="plugin"),
            node("Relu", ["b"], ["y"]),
        ],
        [value("x", [4])], [value("y", [4])], domains={domain: 1} if domain else None,
    )  # fmt: skip
    proto.graph.value_info.append(value("b", [4]))
    report = cast(models.save(proto, tmp_path), "fp16", out=tmp_path / "cast.onnx")
    assert kept(report) == {"plugin": "type"} and report.casts_added == 4
    assert not report.findings


def test_operators_without_the_type_stay_fp32_and_say_so(casting: Casting) -> None:
    proto = models.model(
        [
            node("Relu", ["x"], ["a"]),
            node("Celu", ["a"], ["b"], name="celu"),
            node("ScatterElements", ["b", "at", "a"], ["s"], name="sums", reduction="add"),
            node("ScatterElements", ["s", "at", "a"], ["y"], name="moves", reduction="none"),
        ],
        [value("x", [4])], [value("y", [4])], [numpy_helper.from_array(np.array([0, 0, 1, 3]), "at")],
    )  # fmt: skip
    report, made = casting(proto)
    assert kept(report) == {"celu": "type", "sums": "type"} and "opset 20" in report.fp32_nodes[0].reason
    close(proto, made, {"x": np.array([-1, 0, 1, 2], np.float32)})


def test_casts_in_the_middle_lead_nowhere_twice(casting: Casting) -> None:
    proto = models.model(
        [
            node("Cast", ["x"], ["h"], to=HALF, name="down"),
            node("Relu", ["h"], ["r"]),
            node("Cast", ["r"], ["f"], to=FLOAT, name="up"),
            node("Cast", ["f"], ["i"], to=TensorProto.INT32, name="whole"),
            node("Add", ["f", "f"], ["y"]),
        ],
        [value("x", [4])], [value("y", [4]), value("i", [4], TensorProto.INT32)],
    )  # fmt: skip
    report, made = casting(proto)
    kinds = [(item.op_type, item.attribute[0].i if item.op_type == "Cast" else 0) for item in made.graph.node]
    assert kinds.count(("Cast", HALF)) == 1 and kinds.count(("Cast", FLOAT)) == 1, "the input's and the output's"
    assert report.casts_removed >= 2
    close(proto, made, {"x": np.array([-1, 0.5, 1, 2], np.float32)})


def test_quantized_pairs_take_scales_of_the_type_from_opset_19(casting: Casting, tmp_path: Path) -> None:
    path = onnx_models.int8_qdq(tmp_path / "q.onnx")
    proto = onnx.load(path)
    proto.opset_import[0].version = 17
    report, made = casting(proto)
    assert report.opset == (17, 19)
    scales = {item.name: item.data_type for item in made.graph.initializer if item.name.startswith("s")}
    assert set(scales.values()) == {HALF} and not report.findings
    close(proto, made, {"x": np.random.default_rng(0).random((1, 3, 8, 8), np.float32)}, 3e-2)


def test_a_scale_too_small_for_fp16_keeps_its_pair(casting: Casting, tmp_path: Path) -> None:
    proto = onnx.load(onnx_models.int8_qdq(tmp_path / "q.onnx"))
    scale = next(item for item in proto.graph.initializer if item.name == "sw")
    scale.CopyFrom(numpy_helper.from_array(np.float32(2.1e-7), "sw"))
    report, _ = casting(proto)
    assert [(item.code, item.op) for item in report.fp32_nodes] == [("scale", "DequantizeLinear")]


def test_operators_of_other_domains_keep_their_types(casting: Casting) -> None:
    proto = models.model(
        [
            node("Relu", ["x"], ["a"]),
            node("Gelu", ["a"], ["b"], domain="com.microsoft", name="gelu"),
            node("Relu", ["b"], ["y"]),
        ],
        [value("x", [4])], [value("y", [4])], domains={"com.microsoft": 1},
    )  # fmt: skip
    report, made = casting(proto)
    assert kept(report) == {"gelu": "type"}
    close(proto, made, {"x": np.array([-1, 0, 1, 2], np.float32)})


# ------------------------------------------------------------------------------------------------ control flow, functions


def test_functions_are_written_out_and_cast(casting: Casting) -> None:
    function = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    proto = models.model(
        [
            helper.make_node("Twice", ["x"], ["t"], domain="mine"),
            helper.make_node("Twice", ["t"], ["y"], domain="mine"),
        ],
        [value("x", [4])], [value("y", [4])], domains={"mine": 1}, functions=[function],
    )  # fmt: skip
    report, made = casting(proto)
    assert report.nodes_cast == 2 and not made.functions and "local functions" in report.notes[0]
    close(proto, made, {"x": np.ones(4, np.float32)})


def test_sequences_keep_their_type(casting: Casting) -> None:
    proto = models.model(
        [
            node("Relu", ["x"], ["r"]),
            node("SplitToSequence", ["r"], ["s"], axis=0, name="split"),
            node("ConcatFromSequence", ["s"], ["c"], axis=0, name="join"),
            node("Relu", ["c"], ["y"]),
        ],
        [value("x", [4, 2])], [value("y", [4, 2])],
    )  # fmt: skip
    report, made = casting(proto)
    assert kept(report) == {"split": "type", "join": "type"}
    close(proto, made, {"x": np.ones((4, 2), np.float32)})


# ------------------------------------------------------------------------------------------------ names and files


@pytest.mark.parametrize("keep_io", [True, False])
def test_outputs_that_are_inputs_constants_or_read_inside_keep_their_names(keep_io: bool, casting: Casting) -> None:
    proto = models.model(
        [node("Mul", ["x", "w"], ["a"]), node("Relu", ["a"], ["x_fp16"]), node("Exp", ["a"], ["b"], name="kept")],
        [value("x", [4])],
        [value("a", [4]), value("x", [4]), value("w", [4]), value("x_fp16", [4]), value("b", [4])],
        [weight("w", 4)],
    )
    _, made = casting(proto, keep_io=keep_io, exclude_nodes=["kept"])
    assert [item.name for item in made.graph.output] == ["a", "x", "w", "x_fp16", "b"]
    kind = np.float32 if keep_io else np.float16
    outputs = run(made, {"x": np.ones(4, kind)})
    assert {item.dtype for item in outputs} == {np.dtype(kind)}


def test_initializers_listed_as_inputs_become_constants(casting: Casting) -> None:
    proto = models.detector()
    proto.graph.input.append(value("w", [8, 3, 3, 3]))
    report, made = casting(proto)
    assert [item.name for item in made.graph.input] == ["images"] and report.notes


@pytest.mark.slow
def test_two_gibibytes_of_weights_are_cast_a_piece_at_a_time(tmp_path: Path) -> None:
    rows = (2 << 30) // 4 // 1024 + 64
    with (tmp_path / "w.bin").open("wb") as file:
        file.write(bytes(32 << 20))
        file.truncate(rows * 1024 * 4)  # a hole behind 1 %: it takes little space
    held = TensorProto(name="w", data_type=FLOAT, dims=[1024, rows], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value="w.bin")
    proto = models.model([node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 1024])], [value("y", [1, rows])], [held])
    if shutil.disk_usage(tmp_path).free < 2 << 30:
        pytest.skip("less than 2 GiB free")
    report = cast(models.save(proto, tmp_path), "fp16", out=tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size == rows * 1024 * 2
    assert report.nodes_cast == 1


# ------------------------------------------------------------------------------------------------ any graph


UNARY = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Identity", "Softmax"]
BINARY = ["Add", "Mul", "Sub", "Max"]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[ModelProto, list[str]]:
    """A random graph of rank-2 tensors [3, 4] with constants, casts, branches; and names to exclude."""
    nodes: list[NodeProto] = []
    tensors = ["x0", "x1"]
    stored = [weight("w0", 3, 4), weight("w1", 4, seed=1), weight("sq", 4, 4, seed=2)]
    pool = ["w0", "w1"]
    names = []
    for index in range(draw(st.integers(1, 9))):
        out, name = f"t{index}", f"n{index}"
        kind = draw(st.sampled_from(["unary", "binary", "constant", "matmul", "concat", "cast", "if", "where", "node"]))
        one, two = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        if kind == "unary":
            nodes.append(node(draw(st.sampled_from(UNARY)), [one], [out], name=name))
        elif kind == "binary":
            nodes.append(node(draw(st.sampled_from(BINARY)), [one, two], [out], name=name))
        elif kind == "constant":
            nodes.append(node(draw(st.sampled_from(BINARY)), [one, draw(st.sampled_from(pool))], [out], name=name))
        elif kind == "matmul":
            nodes.append(node("MatMul", [one, "sq"], [out], name=name))
        elif kind == "concat":
            nodes.append(node("Concat", [one, two], [f"{out}c"], axis=0, name=f"{name}c"))
            nodes.append(node("Split", [f"{out}c"], [out, f"{out}r"], axis=0, num_outputs=2, name=name))
            tensors.append(f"{out}r")
        elif kind == "cast":
            middle = draw(st.sampled_from([HALF, BRAIN, TensorProto.INT32, TensorProto.DOUBLE]))
            nodes.append(node("Cast", [one], [f"{out}m"], to=middle, name=f"{name}m"))
            nodes.append(node("Cast", [f"{out}m"], [out], to=FLOAT, name=name))
        elif kind == "where":
            nodes.append(node("Greater", [one, two], [f"{out}b"], name=f"{name}b"))
            nodes.append(node("Where", [f"{out}b", one, two], [out], name=name))
        elif kind == "node":
            nodes.append(node("Constant", [], [f"{out}k"], value=const("k", [[0.5, -1, 2, 3]]), name=f"{name}k"))
            nodes.append(node("Add", [f"{out}k", one], [out], name=name))
        else:
            nodes.append(node("ReduceSum", [one], [f"{out}s"], keepdims=0, name=f"{name}s"))
            nodes.append(node("Cast", [f"{out}s"], [f"{out}b"], to=TensorProto.BOOL, name=f"{name}b"))
            then = models.graph([node("Add", [one, two], [f"{out}t"], name=f"{name}t")], [], [value(f"{out}t", None)])
            other = models.graph([node("Mul", [two, "w0"], [f"{out}e"], name=f"{name}e")], [], [value(f"{out}e", None)])
            nodes.append(node("If", [f"{out}b"], [out], then_branch=then, else_branch=other, name=name))
            names += [f"{name}t", f"{name}e"]
        tensors.append(out)
        names += [name]
    outputs = draw(st.lists(st.sampled_from(tensors[2:]), min_size=1, max_size=3, unique=True))
    last = tensors[-1]
    outputs = [*outputs, last] if last not in outputs else outputs
    proto = models.model(nodes, [value("x0", [3, 4]), value("x1", [3, 4])], [value(o, [3, 4]) for o in outputs], stored)
    return proto, draw(st.lists(st.sampled_from(names), max_size=3, unique=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=graphs(), keep_io=st.booleans(), to=st.sampled_from(["fp16", "bf16"]))
def test_any_graph_casts_to_a_valid_one_that_agrees(
    made: tuple[ModelProto, list[str]], keep_io: bool, to: str, casting: Casting
) -> None:
    source, exclude = made
    onnx.checker.check_model(source, full_check=True)
    report, result = casting(source, to, keep_io=keep_io, exclude_nodes=exclude)
    kinds = {tensor.name: tensor.type_str for tensor in typed_graph.build_typed_graph(result).tensors.values()}
    for item in (*result.graph.input, *result.graph.output):
        low = HALF if to == "fp16" else BRAIN
        assert item.type.tensor_type.elem_type == (FLOAT if keep_io else low)
    assert all(kinds.values()), "every type is known"
    assert report.nodes_cast + len(report.fp32_nodes) <= report.nodes
    if keep_io and not has_thresholds(source):
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal((3, 4)).astype(np.float32) for name in ("x0", "x1")}
        agree(
            source,
            result if to == "fp16" else emulate_half_precision(result, Path()),
            feeds,
            2e-2 if to == "fp16" else 2e-1,
        )


def has_thresholds(proto: ModelProto) -> bool:
    """A number near a threshold falls on the other side in another type: nothing to compare then."""
    return any(
        place.node.op_type in ("Greater", "If")
        or (place.node.op_type == "Cast" and place.node.attribute[0].i == TensorProto.INT32)
        for place in walk.nodes(proto)
    )


def agree(source: ModelProto, result: ModelProto, feeds: dict[str, Any], tolerance: float) -> None:
    wants = run(source, feeds)
    if not all(np.isfinite(want).all() and np.abs(want).max() < 1e3 for want in wants):
        return
    for want, got in zip(wants, run(result, feeds), strict=True):
        scale = max(float(np.abs(want).max()), 1.0)
        # subtraction of nearly equal numbers loses digits: absolute, at the size of what went in
        np.testing.assert_allclose(got, want, atol=tolerance * max(scale, 8))


def test_a_model_of_another_domain_alone_gets_the_standard_for_its_casts(tmp_path: Path) -> None:
    proto = models.model(
        [helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.5], scale=[2.0])],
        [value("x", ["n", 4])], [value("y", ["n", 4])], domains={"ai.onnx.ml": 3},
    )  # fmt: skip
    for at, item in reversed(list(enumerate(proto.opset_import))):
        if not item.domain:
            del proto.opset_import[at]
    proto.ir_version = 4
    made = tmp_path / "half.onnx"
    cast(models.save(proto, tmp_path), "fp16", out=made, keep_io=False)
    onnx.checker.check_model(str(made), full_check=True)
    x = np.linspace(0, 1, 8, dtype=np.float16).reshape(2, 4)
    np.testing.assert_allclose(run(made, {"x": x})[0], (x - 0.5) * 2, atol=2e-3)


def test_a_tensor_in_an_attribute_keeps_what_reads_it_in_fp32(casting: Any) -> None:
    numbers = helper.make_tensor("v", FLOAT, [2], [1.5, 2.5])
    proto = models.model(
        [
            helper.make_node("Mul", ["x", "x"], ["m"]),
            helper.make_node("TreeEnsemble", ["m"], ["t"], name="trees", domain="ai.onnx.ml", tree_roots=[0],
                             n_targets=1, nodes_splits=helper.make_tensor("s", FLOAT, [1], [1.25]),
                             nodes_featureids=[0], nodes_modes=helper.make_tensor("m", TensorProto.UINT8, [1], [0]),
                             nodes_truenodeids=[0], nodes_falsenodeids=[1], nodes_trueleafs=[1], nodes_falseleafs=[1],
                             leaf_targetids=[0, 0], leaf_weights=numbers),
            helper.make_node("Mul", ["t", "t"], ["y"]),
        ],
        [value("x", ["n", 1])], [value("y", ["n", 1])], domains={"ai.onnx.ml": 5},
    )  # fmt: skip
    report, made = casting(proto)
    assert {item.node: item.reason for item in report.fp32_nodes}["trees"].startswith("its attribute `")
    x = np.array([[1.0], [2.0]], np.float32)
    np.testing.assert_allclose(run(made, {"x": x})[0], [[2.25], [6.25]], rtol=1e-3)


@pytest.mark.parametrize("back", [False, True])
def test_bits_read_as_another_type_are_those_of_fp32(back: bool, casting: Any) -> None:
    proto = models.model(
        [
            helper.make_node("Mul", ["x", "x"], ["m"]),
            helper.make_node("BitCast", ["m"], ["bits"], name="bits", to=TensorProto.INT32),
            *([helper.make_node("BitCast", ["bits"], ["f"], to=FLOAT), helper.make_node("Add", ["f", "f"], ["y"])]
              if back else [helper.make_node("Identity", ["bits"], ["y"])]),
        ],
        [value("x", ["n", 4])], [value("y", ["n", 4], FLOAT if back else TensorProto.INT32)], opset=26,
    )  # fmt: skip
    report, made = casting(proto)
    assert {item.node: item.reason for item in report.fp32_nodes}["bits"] == "`BitCast`: it reads the bits of its input"
    x = np.array([[1.0, 2.0, 0.5, 4.0]], np.float32)
    expected = (x * x * 2) if back else (x * x).view(np.int32)
    np.testing.assert_array_equal(run(made, {"x": x})[0], expected)


def test_what_no_kernel_computes_in_16_bits_stays_in_fp32_and_loads(tmp_path: Path) -> None:
    proto = models.model(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("MeanVarianceNormalization", ["r"], ["m"], name="mvn"),
         helper.make_node("HannWindow", ["four"], ["w"], name="window"), helper.make_node("Mul", ["m", "w"], ["y"])],
        [value("x", [2, 3, 4, 4])], [value("y", [2, 3, 4, 4])], [numpy_helper.from_array(np.array(4), "four")], opset=17,
    )  # fmt: skip
    source, made = models.save(proto, tmp_path), tmp_path / "half.onnx"
    assert [item.node for item in cast(source, "fp16", out=made).fp32_nodes] == ["mvn", "window"]
    x = {"x": np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)}
    np.testing.assert_allclose(run(made, x)[0], run(source, x)[0], atol=5e-3)


def branching() -> ModelProto:
    then = models.graph(
        [node("Mul", ["x", "w"], ["t1"], name="then_mul"), node("Add", ["t1", "c"], ["t2"])], [], [value("t2", None)],
        [const("c", [1, 2, 3, 4])],
    )  # fmt: skip
    other = models.graph([node("Exp", ["x"], ["e"], name="else_exp")], [], [value("e", None)])
    return models.model(
        [
            node("ReduceSum", ["x"], ["s"], keepdims=0),
            node("Greater", ["s", "zero"], ["cond"]),
            node("If", ["cond"], ["z"], then_branch=then, else_branch=other, name="if"),
            node("Relu", ["z"], ["y"]),
        ],
        [value("x", [4])], [value("y", [4])], [weight("w", 4), const("zero", 0.0)],
    )  # fmt: skip


def looping() -> ModelProto:
    body = models.graph(
        [
            node("Identity", ["go"], ["go_on"]),
            node("Mul", ["state", "w"], ["m"], name="inner"),
            node("Add", ["m", "x"], ["next"]),
            node("ReduceSum", ["next"], ["seen"], keepdims=0),
        ],
        [value("i", [], INT64), value("go", [], TensorProto.BOOL), value("state", None)],
        [value("go_on", [], TensorProto.BOOL), value("next", None), value("seen", None)],
    )
    return models.model(
        [node("Loop", ["trips", "", "start"], ["last", "all"], body=body, name="loop"), node("Relu", ["last"], ["y"])],
        [value("x", [4])], [value("y", [4]), value("all", [3])],
        [const("start", [0, 0, 0, 0]), weight("w", 4), numpy_helper.from_array(np.int64(3), "trips")],
    )  # fmt: skip


@pytest.mark.parametrize("exclude", [[], ["inner"], ["loop"]])
def test_what_a_loop_carries_keeps_one_type(exclude: list[str], casting: Casting) -> None:
    report, made = casting(looping(), exclude_nodes=exclude)
    assert not report.findings
    close(looping(), made, {"x": np.random.default_rng(0).random(4, np.float32)})


def test_a_scan_is_cast_with_its_body(casting: Casting) -> None:
    body = models.graph(
        [node("Add", ["sum", "row"], ["sum2"]), node("Relu", ["sum2"], ["out"])],
        [value("sum", [3]), value("row", [3])], [value("sum2", [3]), value("out", [3])],
    )  # fmt: skip
    proto = models.model(
        [node("Scan", ["zero", "x"], ["total", "y"], body=body, num_scan_inputs=1)],
        [value("x", [5, 3])], [value("total", [3]), value("y", [5, 3])], [const("zero", [0, 0, 0])],
    )  # fmt: skip
    report, made = casting(proto)
    assert not report.fp32_nodes and not report.findings
    close(proto, made, {"x": np.random.default_rng(0).random((5, 3), np.float32)})


def test_attributes_that_say_a_type_say_the_new_one(casting: Casting) -> None:
    proto = models.model(
        [
            node("Shape", ["x"], ["shape"]),
            node("ConstantOfShape", ["shape"], ["fill"], value=helper.make_tensor("v", FLOAT, [1], [0.5])),
            node("Constant", [], ["c"], value_float=2.0),
            node("Constant", [], ["cs"], value_floats=[1.0, 2.0, 3.0, 4.0]),
            node("EyeLike", ["x"], ["eye"], dtype=FLOAT),
            node("Cast", ["flag"], ["f"], to=FLOAT),
            node("CastLike", ["flag", "x"], ["g"]),
            node("Sum", ["x", "fill", "eye", "f", "g"], ["s"]),
            node("Mul", ["s", "c"], ["m"]),
            node("Mul", ["m", "cs"], ["y"]),
        ],
        [value("x", [4, 4]), value("flag", [4, 4], TensorProto.BOOL)], [value("y", [4, 4])],
    )  # fmt: skip
    report, made = casting(proto)
    assert not report.fp32_nodes and report.casts_added == 2
    close(proto, made, {"x": np.ones((4, 4), np.float32), "flag": np.eye(4, dtype=bool)})


@pytest.mark.parametrize("exclude", [[], ["then_mul"], ["else_exp"], ["if"]])
@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_both_branches_of_if_give_one_type(exclude: list[str], to: str, casting: Casting) -> None:
    proto = branching()
    report, made = casting(proto, to, exclude_nodes=exclude)
    assert not report.findings
    made = made if to == "fp16" else emulate_half_precision(made, Path())
    for sign in (1, -1):
        x = sign * np.random.default_rng(0).random(4, np.float32)
        close(proto, made, {"x": x}, 1e-2 if to == "fp16" else 5e-2)
