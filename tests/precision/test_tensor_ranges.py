"""The overflow forecast finds planted failures, says nothing of their clean twins, and keeps the right nodes in FP32."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_nets import convnet, images, save

from onnx_models import FLOAT, node
from onnx_models import save as save_model
from trt_engine.cli.main import run
from trt_engine.errors import UsageError
from trt_engine.precision.tensor_ranges import ranges
from trt_engine.records.precision import RangesReport


def codes(report: RangesReport) -> dict[str, str]:
    """Finding by place, notes left out."""
    return {item.location or "": item.code for item in report.findings if item.severity != "info"}


def kept(report: RangesReport) -> set[str]:
    return {item.node for item in report.exclude}


def test_a_model_whose_layers_stand_in_a_branch_is_not_cleared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])]
    branches = {
        name: helper.make_graph([helper.make_node(op, ["x"], ["y"])], name, [], y)
        for name, op in (("then_branch", "Exp"), ("else_branch", "Neg"))
    }
    path = tmp_path / "net.onnx"
    save_model(
        path,
        [node("If", "yes", "z", **branches)],
        {"x": (FLOAT, [2, 4])},
        {"z": (FLOAT, [2, 4])},
        {"yes": np.array(True)},
    )
    assert run(["ranges", str(path)]) == 0
    assert "not known: FP16 holds the tensors that were seen" in capsys.readouterr().out


def scaled_to(path: Path, largest: float) -> Path:
    """A net whose tensor `scaled` reaches `largest` on `images()`, and whose other tensors stay small."""
    reached = {item.name: item.absmax for item in ranges(convnet(path), images()).tensors}["r1"]
    return convnet(path, gain=largest / reached)


# ------------------------------------------------------------------------------------------------ activations


@pytest.mark.parametrize("times", [1.01, 3.0, 1000.0])
def test_a_layer_beyond_fp16_is_found_with_the_nodes_on_both_sides_of_it(tmp_path: Path, times: float) -> None:
    report = ranges(scaled_to(tmp_path / "m.onnx", 65504 * times), images())
    found = codes(report)
    assert found.pop("scaled") == "fp16-overflow"
    assert set(found) <= {"gain"}  # the factor itself may be beyond FP16 as well
    assert kept(report) == {"scaling", "unscaling"}
    reason = next(item for item in report.exclude if item.node == "scaling").reason
    assert f"{times:.3g} times FP16's largest number" in reason or "gain" in reason
    by_name = {item.name: item for item in report.tensors}
    assert by_name["scaled"].absmax == pytest.approx(65504 * times, rel=1e-5) and by_name["scaled"].fp16_overflow > 0
    assert by_name["back"].fp16_overflow == 0


def test_what_comes_within_the_margin_is_kept_out_and_called_a_warning(tmp_path: Path) -> None:
    net = scaled_to(tmp_path / "m.onnx", 65504 * 0.6)
    assert codes(ranges(net, images())) == {"scaled": "fp16-near-overflow"}
    assert kept(ranges(net, images())) == {"scaling", "unscaling"}
    assert codes(ranges(net, images(), headroom=1)) == {}
    assert codes(ranges(scaled_to(net, 65504 * 0.3), images(), headroom=4)) == {"scaled": "fp16-near-overflow"}


def test_a_tensor_that_stays_among_fp16s_subnormals_is_kept_out(tmp_path: Path) -> None:
    report = ranges(scaled_to(tmp_path / "m.onnx", 5e-5), images())
    assert codes(report)["scaled"] == "fp16-underflow" and "scaling" in kept(report)


def test_shares_are_those_of_counting(tmp_path: Path) -> None:
    net = save(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], {}, inputs={"x": ["N", 1000]})
    rng = np.random.default_rng(0)
    data = (10.0 ** rng.uniform(-12, 6, size=(4, 1000)) * rng.choice([-1, 1], size=(4, 1000))).astype(np.float32)
    data[:, :50] = 0
    found = ranges(net, [data[:2], data[2:]]).tensors[0]
    size = np.abs(data)
    scale = size.max() / 448
    assert (found.min, found.max, found.absmax) == (data.min(), data.max(), size.max())
    assert found.elements == 4000 and found.zero_share == pytest.approx(0.05)
    assert found.fp16_overflow == np.mean(size > 65504)
    assert found.fp16_subnormal == pytest.approx(np.mean((size < 2.0**-14) & (size > 0)))
    assert found.fp16_underflow == pytest.approx(np.mean((size < 2.0**-25) & (size > 0)))
    assert found.fp8_subnormal == pytest.approx(np.mean((size < scale * 2.0**-6) & (size > 0)), abs=0.005)
    assert found.fp8_underflow == pytest.approx(np.mean((size < scale * 2.0**-10) & (size > 0)), abs=0.005)
    assert found.bf16_subnormal == 0


# ------------------------------------------------------------------------------------------------ sums of squares


def normalised(path: Path, op: str, opset: int = 21) -> Path:
    """A model of one node (or two) that adds up squares over 64 values."""
    axes = {"axes": np.array([-1], np.int64)}
    weights = {"w": np.ones(64, np.float32), "b": np.zeros(64, np.float32)}
    nodes, stored = {
        "LayerNormalization": ([helper.make_node(op, ["x", "w", "b"], ["y"], name="sum", axis=-1)], weights),
        "RMSNormalization": ([helper.make_node(op, ["x", "w"], ["y"], name="sum")], weights),
        "ReduceSumSquare": ([helper.make_node(op, ["x", "axes"], ["y"], name="sum")], axes),
        "ReduceL2": ([helper.make_node(op, ["x", "axes"], ["y"], name="sum")], axes),
        "LpNormalization": ([helper.make_node(op, ["x"], ["y"], name="sum", axis=-1)], {}),
        "Pow": (
            [
                helper.make_node("Pow", ["x", "two"], ["sq"], name="square"),
                helper.make_node("ReduceMean", ["sq", "axes"], ["y"], name="sum"),
            ],
            axes | {"two": np.float32(2)},
        ),
        "Mul": (
            [
                helper.make_node("Mul", ["x", "x"], ["sq"], name="square"),
                helper.make_node("ReduceSum", ["sq", "axes"], ["s"], name="sum"),
                helper.make_node("Sqrt", ["s"], ["y"]),
            ],
            axes,
        ),
    }[op]
    return save(path, nodes, stored, inputs={"x": ["N", 64]}, opset=23 if op == "RMSNormalization" else opset)


SQUARES = ["LayerNormalization", "RMSNormalization", "ReduceSumSquare", "ReduceL2", "LpNormalization", "Pow", "Mul"]


@pytest.mark.parametrize("op", SQUARES)
def test_squares_whose_sum_overflows_are_found_though_every_tensor_fits(tmp_path: Path, op: str) -> None:
    net = normalised(tmp_path / "m.onnx", op)
    row = np.where(np.arange(64) % 2, 1.0, -1.0)[None].astype(
        np.float32
    )  # without a mean: the sum of squares is 64 s^2
    loud = ranges(net, [row * np.float32(np.sqrt(1.01 * 65504 / 64))], headroom=1)
    assert "fp16-square-sum" in codes(loud).values() and "sum" in kept(loud)
    near = ranges(net, [row * np.float32(np.sqrt(0.6 * 65504 / 64))])
    assert codes(near).get("sum") == "fp16-near-square-sum"
    assert codes(ranges(net, [row * np.float32(np.sqrt(0.4 * 65504 / 64))])) == {}


def test_a_layer_norm_takes_its_mean_off_first(tmp_path: Path) -> None:
    net = normalised(tmp_path / "m.onnx", "LayerNormalization")
    assert codes(ranges(net, [np.full((1, 64), 1000, np.float32)])) == {}


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (helper.make_node("InstanceNormalization", ["x", "w", "b"], ["y"], name="sum"), ["N", 4, 8, 8]),
        (helper.make_node("GroupNormalization", ["x", "w", "b"], ["y"], name="sum", num_groups=2), ["N", 4, 8, 8]),
        (helper.make_node("MeanVarianceNormalization", ["x"], ["y"], name="sum"), ["N", 4, 8, 8]),
    ],
)
def test_normalisations_over_planes_are_looked_into(tmp_path: Path, node: Any, shape: list[Any]) -> None:
    stored = {"w": np.ones(4, np.float32), "b": np.zeros(4, np.float32)} if len(node.input) > 1 else {}
    net = save(tmp_path / "m.onnx", [node], stored, inputs={"x": shape}, opset=21)
    rows = np.random.default_rng(0).normal(size=(2, 4, 8, 8)).astype(np.float32)
    assert codes(ranges(net, [rows])) == {}
    assert codes(ranges(net, [rows * 200])) == {"sum": "fp16-square-sum"}


# ------------------------------------------------------------------------------------------------ constants


def masked(path: Path, value: Any, *, op: str = "Add", as_node: bool = False, dtype: Any = np.float32) -> Path:
    nodes = [helper.make_node(op, ["x", "mask"], ["m"], name="masking"), helper.make_node("Softmax", ["m"], ["y"])]
    stored = {} if as_node else {"mask": np.asarray(value, dtype)}
    if as_node:
        constant = numpy_helper.from_array(np.asarray(value, dtype), "c")
        nodes.insert(0, helper.make_node("Constant", [], ["mask"], value=constant))
    return save(path, nodes, stored)


@pytest.mark.parametrize("as_node", [False, True])
@pytest.mark.parametrize("value", [-1e9, -3.4e38, 65520.0])
def test_a_constant_beyond_fp16_is_found_with_its_readers(tmp_path: Path, value: float, as_node: bool) -> None:
    report = ranges(masked(tmp_path / "m.onnx", [0.0] * 7 + [value], as_node=as_node), images(2))
    assert codes(report)["mask"] == "constant-overflow" and "masking" in kept(report)
    assert "infinite in FP16" in next(item for item in report.findings if item.location == "mask").message


def test_an_infinite_mask_is_named_and_excludes_nothing_by_itself(tmp_path: Path) -> None:
    report = ranges(masked(tmp_path / "m.onnx", [0.0] * 7 + [-np.inf]), images(2))
    assert codes(report) == {"mask": "constant-infinite"} and report.exclude == ()
    assert [item.location for item in report.findings if item.code == "infinite"] == ["m"]


@pytest.mark.parametrize(("value", "found"), [(1e-8, True), (1e-12, True), (1e-5, False), (0.0, False)])
def test_an_epsilon_that_fp16_turns_into_zero_is_found(tmp_path: Path, value: float, found: bool) -> None:
    report = ranges(
        masked(tmp_path / "m.onnx", value, op="Div" if value else "Add"), [image * 1e-9 for image in images(2)]
    )
    assert (codes(report).get("mask") == "constant-vanishes") is found


def test_a_bound_of_clip_beyond_fp16_changes_nothing(tmp_path: Path) -> None:
    nodes = [helper.make_node("Clip", ["x", "low", "high"], ["y"], name="clip")]
    net = save(tmp_path / "m.onnx", nodes, {"low": np.float32(0), "high": np.float32(3.4e38)})
    report = ranges(net, images(2))
    assert codes(report) == {} and report.exclude == ()


def test_constants_inside_bodies_are_looked_at_and_tensors_there_are_said_not_to_be(tmp_path: Path) -> None:
    inner = helper.make_node("Add", ["x", "big"], ["b"], name="inner")
    body = helper.make_graph(
        [inner], "then", [], [helper.make_tensor_value_info("b", 1, None)],
        [numpy_helper.from_array(np.float32(1e6), "big")],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Less", ["top", "zero"], ["go"]),
        helper.make_node("If", ["go"], ["y"], then_branch=body, else_branch=other),
    ]
    report = ranges(save(tmp_path / "m.onnx", nodes, {"zero": np.float32(0)}), images(1))
    assert codes(report) == {"big": "constant-overflow"} and kept(report) == {"inner"}
    assert report.warnings == ("2 tensors inside If, Loop, Scan or local functions are not checked",)


# ------------------------------------------------------------------------------------------------ data


def test_nan_that_begins_inside_is_an_error_of_the_tensor(tmp_path: Path) -> None:
    nodes = [helper.make_node("Sqrt", ["x"], ["root"], name="root"), helper.make_node("Relu", ["root"], ["y"])]
    report = ranges(save(tmp_path / "m.onnx", nodes, {}), images(2))
    assert codes(report)["root"] == "not-a-number"


def test_without_data_random_inputs_run_and_that_is_said_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = ranges(convnet(tmp_path / "m.onnx"), batch=2)
    assert report.random and report.rows == 8 and "random inputs" in report.warnings[0]
    assert any(item.levelno == logging.WARNING and "random" in item.message for item in caplog.records)


def test_a_headroom_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`--headroom` is 0.5, expected 1 or more"):
        ranges(convnet(tmp_path / "m.onnx"), images(1), headroom=0.5)


# ------------------------------------------------------------------------------------------------ the verb


def test_the_verb_gives_one_document_and_writes_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    net, folder = scaled_to(tmp_path / "m.onnx", 1e5), tmp_path / "data"
    folder.mkdir()
    for index, image in enumerate(images(3)):
        np.save(folder / f"{index}.npy", image)
    out = tmp_path / "ranges.json"
    capfd.readouterr()
    assert run(["ranges", str(net), "--calib-data", str(folder), "--json", "-o", str(out)]) == 0
    doc = json.loads(capfd.readouterr().out)
    assert doc["schema"] == "trt-engine/ranges" and doc == json.loads(out.read_text())
    assert {item["node"] for item in doc["exclude"]} == {"scaling", "unscaling"} and not doc["random"]
    assert run(["ranges", str(net), "--calib-data", str(folder), "-o", str(out)]) == 2
    assert run(["ranges", str(net), "--calib-data", str(folder), "-o", str(out), "--overwrite", "-q"]) == 0
    shown = capfd.readouterr().out
    assert "fp16-overflow: `scaled` reaches" in shown and "keep FP32: 2 nodes" in shown


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere.onnx"], 4),
        (["MODEL", "--calib-data", "nowhere"], 2),
        (["nowhere.onnx", "--dry-run"], 4),
        (["MODEL", "--calib-data", "nowhere", "--dry-run"], 2),
        (["MODEL", "--calib-data", "x", "--shapes", "x:1x3x8x8"], 2),
        (["MODEL", "--headroom", "0"], 2),
        (["MODEL", "--memory-limit", "lots"], 2),
    ],
)
def test_what_the_verb_cannot_do_ends_with_its_code(
    tmp_path: Path, arguments: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    net = convnet(tmp_path / "m.onnx")
    assert run(["ranges", *(str(net) if item == "MODEL" else item for item in arguments)]) == code
    assert "hint: " in capfd.readouterr().err


def test_an_fp16_model_says_that_overflow_shows_as_infinities(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Exp", ["x"], ["y"])], {})
    proto = onnx.load(str(path))
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(proto, str(path))
    report = ranges(path, [np.full((1, 3, 8, 8), 20, np.float16)])
    assert "are in 16 bits: overflows" in report.warnings[0]
    assert [item.code for item in report.findings] == ["infinite"]
