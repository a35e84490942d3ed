"""Who runs which operator: the published lists, the release's kernels, and the rules that the attributes here break."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import trt_engine as te
from programs import run_python
from trt_engine.graph import operator_support, tensorrt_operators
from trt_engine.records.base import Finding
from trt_engine.records.lint import LintReport

from . import models
from .models import ints, model, node, value, weight

FLOAT, HALF, BF16, INT64, UINT8 = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.UINT8,
)  # fmt: skip
ROOT = Path(__file__).parents[2]
IMAGE: list[int | str | None] = ["batch", 4, 16, 16]


def linted(proto: onnx.ModelProto, folder: Path, **how: Any) -> LintReport:
    return te.lint(models.save(proto, folder), **({"support_from": "static"} | how))


def codes(report: LintReport) -> dict[str, Finding]:
    return {item.code: item for item in report.findings}


def one(
    op: str, stored: Sequence[TensorProto] = (), *, names: Sequence[str] | None = None, out: Sequence[str] = ("y",),
    kind: int = FLOAT, shape: list[int | str | None] | None = None, opset: int = 20, **given: Any,
) -> onnx.ModelProto:  # fmt: skip
    """One node of an operator on `x`, its outputs all the model's."""
    inputs = list(names) if names is not None else ["x", *(item.name for item in stored)]
    fed = [value("x", shape or IMAGE, kind)]
    return model(
        [node(op, inputs, out, name="the_node", **given)], fed,
        [value(name, None, kind if name == "y" else INT64) for name in out], stored, opset=opset,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the lists


def test_the_lists_name_operators_of_the_standard_alone() -> None:
    parser = tensorrt_operators._load_operator_list()
    standard = {item.name for item in onnx.defs.get_all_schemas_with_history() if item.domain == ""}
    before_the_standard = {"ImageScaler", "ParametricSoftplus", "ScaledTanh", "DynamicSlice", "Affine", "Crop",
                           "SimplifiedLayerNormalization"}  # fmt: skip
    assert set(parser.types) - standard <= before_the_standard
    assert parser.unsupported <= standard
    assert set(operator_support._cuda_type_table()) - standard <= before_the_standard
    assert not set(parser.types) & parser.unsupported
    assert set(parser.since) <= set(parser.types)
    assert set(parser.limits) <= set(parser.types) | parser.unsupported
    assert set(tensorrt_operators._LIMITS) <= set(parser.limits)
    assert set().union(*(ops for _, _, ops in parser.types_since)) <= set(parser.types)
    assert set(tensorrt_operators.RTX_ABSENT) <= set(parser.types)
    assert len(parser.types) > 150


def test_every_limit_is_judged_or_is_about_what_a_graph_does_not_say() -> None:
    not_in_the_graph = {
        "RandomNormal",
        "RandomUniform",
        "DynamicQuantizeLinear",
    }
    by_the_builder = {"Loop", "DeformConv", "Hardmax", "RotaryEmbedding"}
    rules = set(tensorrt_operators._LIMITS)
    assert set(tensorrt_operators._load_operator_list().limits) - rules == not_in_the_graph | by_the_builder


@pytest.mark.parametrize(
    ("release", "opsets"),
    [
        ("10.0", (9, 20)),
        ("10.14", (9, 20)),
        ("10.15", (9, 24)),
        ("11.0", (9, 24)),
        ("11.5", (9, 25)),
        ("12.0", (9, 25)),
    ],
)
def test_the_opsets_of_a_release(release: str, opsets: tuple[int, int]) -> None:
    assert tensorrt_operators.tensorrt_opsets(release) == opsets


def test_an_opset_beyond_the_release_is_said_with_its_limit(tmp_path: Path) -> None:
    proto = models.detector()
    proto.opset_import[0].version = 24
    proto.ir_version = 12
    assert "9 to 20" in codes(linted(proto, tmp_path, tensorrt="10.8"))["opset-beyond-tensorrt"].message
    assert "ir-beyond-tensorrt" in codes(linted(proto, tmp_path, tensorrt="10.8"))
    assert not {"opset-beyond-tensorrt", "ir-beyond-tensorrt"} & set(codes(linted(proto, tmp_path, tensorrt="10.15")))


def test_the_kernel_table_holds_what_the_installed_release_lists() -> None:
    """In a process of its own: the list is private and kills a build for GPUs whose libraries are missing."""
    asked = "import runpy, json; print(json.dumps(runpy.run_path('tools/onnxruntime_kernels.py')['list_kernels']()))"
    listed = run_python("-c", asked, cwd=ROOT)
    if listed.returncode < 0:
        pytest.skip(f"this build of ONNX Runtime dies of signal {-listed.returncode} when it is asked for its kernels")
    wanted = {(domain, op) for domain, op, *_ in json.loads(listed.stdout)["kernels"]}
    table = operator_support._cpu_kernel_table()
    assert set(table) == wanted
    rows = {(domain, op, low, text) for domain, op, low, _, text in json.loads(listed.stdout)["kernels"]}
    assert rows == {
        (*key, low, " ".join(f"{name}={','.join(kinds)}" for name, kinds in types.items()))
        for key, kernels in table.items()
        for low, _, types in kernels
    }


# ------------------------------------------------------------------------------------------------ TensorRT


@pytest.mark.parametrize("op", ["Det", "NonMaxSuppression"])
def test_what_the_parser_lacks_is_an_error_when_it_alone_is_asked(tmp_path: Path, op: str) -> None:
    if op == "Det":
        report = linted(one("Det", shape=["batch", 4, 4]), tmp_path, target="tensorrt")
        assert codes(report)["not-in-tensorrt"].severity == "error"
        assert codes(report)["not-in-tensorrt"].location == "the_node"
        assert "-O plugins=" in str(codes(report)["not-in-tensorrt"].hint)
        assert codes(linted(one("Det", shape=["batch", 4, 4]), tmp_path))["not-in-tensorrt"].severity == "warning"
        assert report.operators[0].tensorrt == "no"
    else:
        proto = model(
            [node("NonMaxSuppression", ["boxes", "scores"], ["y"])],
            [value("boxes", ["batch", 10, 4]), value("scores", ["batch", 2, 10])],
            [value("y", ["n", 3], INT64)],
        )
        assert "not-in-tensorrt" not in codes(linted(proto, tmp_path))


def test_equal_on_booleans_is_what_integer_division_was_and_the_hint_says_so(tmp_path: Path) -> None:
    proto = model(
        [node("Less", ["x", "zero"], ["a"]), node("Less", ["zero", "x"], ["b"]), node("Equal", ["a", "b"], ["y"])],
        [value("x", ["batch", 4])],
        [value("y", ["batch", 4], TensorProto.BOOL)],
        [weight("zero", 1)],
    )
    finding = codes(linted(proto, tmp_path, tensorrt="10.16"))["type-not-in-tensorrt"]
    assert "Equal" in finding.message and "rounding_mode='trunc'" in (finding.hint or "")
    assert "type-not-in-tensorrt" not in codes(linted(proto, tmp_path, tensorrt="11.4"))


def scalar(name: str, number: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(number), name)


LIMITED: list[tuple[str, onnx.ModelProto, onnx.ModelProto]] = [
    (
        "also gives the indices",
        one("MaxPool", out=["y", "indices"], kernel_shape=[2, 2]),
        one("MaxPool", kernel_shape=[2, 2]),
    ),
    (
        "dilations are [2, 2]",
        one("AveragePool", kernel_shape=[2, 2], dilations=[2, 2]),
        one("AveragePool", kernel_shape=[2, 2], dilations=[1, 1]),
    ),
    ("K is 4000", one("TopK", [ints("k", 4000)], out=["y", "i"], shape=["batch", 5000]),
     one("TopK", [ints("k", 40)], out=["y", "i"], shape=["batch", 5000])),
    (
        "K is 3841",
        one("TopK", [ints("k", 3841)], out=["y", "i"], shape=["batch", 5000]),
        one("TopK", [ints("k", 3840)], out=["y", "i"], shape=["batch", 5000], sorted=0),
    ),
    (
        "p is 3",
        one("LpPool", kernel_shape=[2, 2], p=3),
        one("LpPool", kernel_shape=[2, 2], p=1),
    ),
    (
        "its input has 6 dimensions",
        one("MaxPool", kernel_shape=[2, 2, 2, 2], shape=["batch", 4, 8, 8, 8, 8]),
        one("MaxPool", kernel_shape=[2], shape=["batch", 4, 8]),
    ),
    (
        "scales are for the axes [2, 3] only",
        one("Resize", [scalar("s", np.array([2, 2], np.float32))], names=["x", "", "s"], axes=[2, 3]),
        one("Resize", [scalar("s", np.array([1, 1, 2, 2], np.float32))], names=["x", "", "s"], mode="cubic"),
    ),
    (
        "reduction is max",
        one("ScatterElements", [ints("i", 0), weight("u")], names=["x", "i", "u"], shape=[4], reduction="max"),
        one("ScatterElements", [ints("i", 0), weight("u")], names=["x", "i", "u"], shape=[4]),
    ),
    (
        "mode is circular",
        one("TensorScatter", [weight("u", 1, 4, 1, 16), ints("w", 0)], shape=[1, 4, 16, 16], opset=24, mode="circular"),
        one("TensorScatter", [weight("u", 1, 4, 1, 16), ints("w", 0)], shape=[1, 4, 16, 16], opset=24),
    ),
    (
        "training mode",
        one("BatchNormalization", [weight(name, 4) for name in "abmv"], training_mode=1),
        one("BatchNormalization", [weight(name, 4) for name in "abmv"]),
    ),
    (
        "a vector by 3 dimensions",
        one("MatMul", [weight("w", 2, 4, 3)], shape=[4]),
        one("MatMul", [weight("w", 4, 3)], shape=[4]),
    ),
    (
        "a mask and is_causal",
        one("Attention", [weight("m", 16, 16)], names=["x", "x", "x", "m"], is_causal=1, opset=23),
        one("Attention", [weight("m", 16, 16)], names=["x", "x", "x", "m"], opset=23),
    ),
    (
        "keys have 16 channels, its values 8",
        one("Attention", [weight("v", 1, 4, 16, 8)], names=["x", "x", "v"], shape=[1, 4, 16, 16], opset=23),
        one("Attention", names=["x", "x", "x"], shape=[1, 4, 16, 16], opset=23),
    ),
    (
        "fmod is 0",
        one("Mod", [weight("w", 16)]),
        one("Mod", [weight("w", 16)], fmod=1),
    ),
    (
        "12 parts of 16 leave -6 for the last",
        one("Split", out=["y", "b", "c", *"defghijkl"], axis=3, num_outputs=12),
        one("Split", out=["y", "b"], axis=3, num_outputs=2),
    ),
    (
        "uses antialiasing",
        one("Resize", [scalar("s", np.array([1, 1, 0.5, 0.5], np.float32))], names=["x", "", "s"], mode="linear",
            antialias=1),
        one("Resize", [scalar("s", np.array([1, 1, 0.5, 0.5], np.float32))], names=["x", "", "s"], mode="linear"),
    ),
    (
        "reduction is add",
        one("ScatterND", [ints("i", 0), weight("u")], names=["x", "i", "u"], shape=[4], reduction="add"),
        one("ScatterND", [ints("i", 0), weight("u")], names=["x", "i", "u"], shape=[4]),
    ),
    (
        "more than its first output",
        one("LayerNormalization", [weight("s", 16)], out=["y", "mean"]),
        one("LayerNormalization", [weight("s", 16)]),
    ),
    (
        "zero point is not 0",
        one("QuantizeLinear", [scalar("s", np.float32(0.1)), scalar("z", np.uint8(128))], out=["q"]),
        one("QuantizeLinear", [scalar("s", np.float32(0.1)), scalar("z", np.int8(0))], out=["q"]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "bad", "clean"), LIMITED, ids=[item[0] for item in LIMITED])
def test_a_broken_rule_of_the_parser_is_said_and_a_kept_one_is_not(
    tmp_path: Path, words: str, bad: onnx.ModelProto, clean: onnx.ModelProto
) -> None:
    for proto in (bad, clean):
        for item in proto.graph.output:
            if item.name in ("q",):
                stored = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
                item.type.tensor_type.elem_type = stored["z"]
            if item.name == "mean" or (len(item.name) == 1 and item.name in "bcdefghijkl"):
                item.type.tensor_type.elem_type = FLOAT
    report = linted(bad, tmp_path)
    finding = codes(report)["limited-in-tensorrt"]
    assert words in finding.message
    assert finding.location == "the_node"
    assert next(row for row in report.operators if row.op == bad.graph.node[0].op_type).tensorrt == "limited"
    assert "limited-in-tensorrt" not in codes(linted(clean, tmp_path))


NOT_TYPES = {
    "its output is float8e5m2": one("Cast", to=TensorProto.FLOAT8E5M2),
    "the input `x` is uint16": one("Cast", kind=TensorProto.UINT16, to=FLOAT),
    "produces uint8 inside the graph": model(
        [node("Cast", ["x"], ["b"], name="the_node", to=UINT8), node("Cast", ["b"], ["y"], to=FLOAT)],
        [value("x", IMAGE)], [value("y", IMAGE)],
    ),
    "here it reads int32": one("Relu", kind=TensorProto.INT32),
}  # fmt: skip


@pytest.mark.parametrize("words", NOT_TYPES)
def test_a_type_tensorrt_lacks_is_found_at_casts_and_at_the_edges(tmp_path: Path, words: str) -> None:
    proto = NOT_TYPES[words]
    if proto.graph.node[0].op_type == "Cast" and len(proto.graph.node) == 1:
        proto.graph.output[0].type.tensor_type.elem_type = proto.graph.node[0].attribute[0].i
    finding = codes(linted(proto, tmp_path))["type-not-in-tensorrt"]
    assert words in finding.message and finding.location == "the_node"


@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.BOOL, UINT8])
def test_a_cast_to_a_type_of_tensorrt_at_an_output_is_taken(tmp_path: Path, kind: int) -> None:
    proto = one("Cast", to=kind)
    proto.graph.output[0].type.tensor_type.elem_type = kind
    assert "type-not-in-tensorrt" not in codes(linted(proto, tmp_path))


@pytest.mark.parametrize(("opset", "found"), [(6, True), (7, False), (28, False)])
def test_before_opset_7_operators_of_two_inputs_are_refused(tmp_path: Path, opset: int, found: bool) -> None:
    report = codes(linted(one("Add", names=["x", "x"], opset=opset), tmp_path, target="tensorrt", tensorrt="11.4"))
    assert ("limited-in-tensorrt" in report) == found
    assert report["opset-beyond-tensorrt"].severity == "warning"


ABSENT = {
    "NonZero": ("not-in-tensorrt", one("NonZero")),
    "Attention": ("no-tensorrt-kernel", one("Attention", names=["x", "x", "x"], opset=23)),
}


@pytest.mark.parametrize("op", ABSENT)
def test_what_tensorrt_rtx_alone_lacks_is_said_for_it_alone(tmp_path: Path, op: str) -> None:
    code, proto = ABSENT[op]
    if op == "NonZero":
        proto.graph.output[0].type.tensor_type.elem_type = INT64
    assert "TensorRT-RTX" in codes(linted(proto, tmp_path, target="tensorrt-rtx"))[code].message
    assert code not in codes(linted(proto, tmp_path, target="tensorrt"))


def test_tensorrt_rtx_converts_narrow_types_in_qdq_pairs_alone(tmp_path: Path) -> None:
    proto = one("Cast", to=TensorProto.FLOAT8E4M3FN)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN
    found = codes(linted(proto, tmp_path, target="tensorrt-rtx"))
    assert "float8e4m3fn in Q/DQ pairs" in found["no-tensorrt-kernel"].message
    assert "type-not-in-tensorrt" not in found


# ------------------------------------------------------------------------------------------------ ONNX Runtime


def runs(path: Path) -> bool:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # its errors share no other base
        return False
    return True


def convolved(kind: int) -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.zeros((3, 4, 1, 1), np.float32), "w")
    if kind != FLOAT:
        weights = onnx.helper.make_tensor("w", kind, [3, 4, 1, 1], [0.0] * 12)
    return one("Conv", [weights], kind=kind, opset=22, kernel_shape=[1, 1])


@pytest.mark.parametrize(
    "proto",
    [
        convolved(FLOAT), convolved(HALF), convolved(BF16), one("Relu"), one("Relu", kind=BF16), one("Gelu"),
        one("Mish"), one("Det", shape=["batch", 4, 4]), one("MaxPool", kind=UINT8, kernel_shape=[2, 2]),
        one("Col2Im", [ints("a", 4, 4), ints("b", 1, 1)], shape=[1, 4, 16]), one("GlobalLpPool"),
        one("Sin", kind=TensorProto.DOUBLE), one("Selu", kind=TensorProto.DOUBLE), one("HardSwish"),
        one("HardSwish", kind=TensorProto.DOUBLE), one("Clip", kind=BF16), one("Erf", kind=TensorProto.DOUBLE),
        one("BitShift", names=["x", "x"], kind=UINT8, direction="LEFT"), one("Softsign", kind=HALF),
    ],
    ids=lambda proto: f"{proto.graph.node[0].op_type}-{proto.graph.input[0].type.tensor_type.elem_type}",
)  # fmt: skip
def test_what_is_said_of_the_cpu_provider_is_what_it_does(tmp_path: Path, proto: onnx.ModelProto) -> None:
    path = models.save(proto, tmp_path)
    report = te.lint(path)
    said = "no-cpu-kernel" not in codes(report)
    assert said == runs(path), list(report.operators)
    errors = {item.severity for item in te.lint(path, target="onnxruntime").findings if item.code == "no-cpu-kernel"}
    assert errors == (set() if said else {"error"})


def test_what_the_cuda_provider_lacks_is_told_and_no_warning(tmp_path: Path) -> None:
    finding = codes(linted(one("Det", shape=["batch", 4, 4]), tmp_path))["no-cuda-kernel"]
    assert finding.severity == "info"
    half = one("GridSample", names=["x", "x"], kind=HALF, shape=["batch", 2, 2, 2])
    assert "float16" in codes(linted(half, tmp_path))["no-cuda-kernel"].message


# ------------------------------------------------------------------------------------------------ targets


def test_a_target_leaves_out_what_concerns_the_other_one_alone(tmp_path: Path) -> None:
    proto = one("Det", shape=["batch", 4, 4])
    ours = codes(linted(proto, tmp_path, target="onnxruntime"))
    theirs = codes(linted(proto, tmp_path, target="tensorrt"))
    assert "not-in-tensorrt" not in ours
    assert "no-cuda-kernel" in ours
    assert "no-cuda-kernel" not in theirs


def test_tensorrts_operators_are_errors_for_onnxruntime_and_nothing_for_tensorrt(tmp_path: Path) -> None:
    proto = models.unpicked("EfficientNMS_TRT")
    assert codes(linted(proto, tmp_path))["tensorrt-only-operator"].severity == "warning"
    assert codes(linted(proto, tmp_path, target="onnxruntime"))["tensorrt-only-operator"].severity == "error"
    assert "tensorrt-only-operator" not in codes(linted(proto, tmp_path, target="tensorrt"))


def test_attention_in_16_bits_has_kernels_in_tensorrt_rtx(tmp_path: Path) -> None:
    half = one("Attention", names=["x", "x", "x"], kind=HALF, opset=23)
    assert "no-tensorrt-kernel" not in codes(linted(half, tmp_path, target="tensorrt-rtx"))
    narrow = one("Attention", names=["x", "x", "x"], kind=HALF, opset=23, shape=[1, 4, 16, 8])
    found = codes(linted(narrow, tmp_path, target="tensorrt-rtx"))
    assert "8 channels" in found["no-tensorrt-kernel"].message
