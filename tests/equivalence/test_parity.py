"""How far two outputs lie apart, and what that is measured on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_models as models
import trt_engine as te
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.config.build import BuildConfig
from trt_engine.equivalence.output_error import compare_output
from trt_engine.equivalence.parity import measure_parity, parity_feeds, wider_feeds
from trt_engine.equivalence.sorted_outputs import compare_outputs, sorted_outputs
from trt_engine.equivalence.tolerance import TOLERANCES, Tolerance, coarsest_dtype, lost_text, select_tolerance
from trt_engine.errors import AccuracyError, ModelError
from trt_engine.graph.fusion import FusedModel
from trt_engine.graph.load import open_model, read_proto
from trt_engine.tensors import Signature, TensorSpec


def of(path: Path, run, **settings):
    model = open_model(path)
    profile = BuildConfig(**settings).resolve(model.signature)[0]
    drawn = parity_feeds(model, profile)
    feeds, described = drawn.feeds, drawn.described
    tolerance = select_tolerance(coarsest_dtype(model.graph))
    return measure_parity(model, run, feeds, described, tolerance)


def test_a_wrong_output_is_found_whichever_row_it_is_in(tmp_path: Path):
    path = models.conv_net(tmp_path / "net.onnx")
    right = reference_session(path, open_model(path).signature)

    def wrong(feeds):
        outputs = right.run(feeds)
        outputs["scores"][-1, 3] += 0.1
        return outputs

    assert not of(path, wrong, batch=(1, 4, 8)).passed


def test_an_engine_that_differs_on_large_inputs_alone_fails_with_what_it_was_fed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def clipped(proto: onnx.ModelProto, *given: object, **options: object) -> FusedModel:
        made = onnx.ModelProto()
        made.CopyFrom(proto)
        made.graph.initializer.extend(
            numpy_helper.from_array(np.float32(value), name) for name, value in (("low", -3), ("high", 3))
        )
        made.graph.node[0].input[0] = "clipped"
        made.graph.node.insert(0, helper.make_node("Clip", ["images", "low", "high"], ["clipped"]))
        return FusedModel(made, {"clip": 1})

    path = models.conv_net(tmp_path / "net.onnx")
    te.build(path, batch=(1, 4, 8), store=te.Store(tmp_path / "right"))
    monkeypatch.setattr("trt_engine.backends.onnxruntime.build.fuse_model", clipped)
    with pytest.raises(AccuracyError, match=r"on real inputs normal x5 alone"):
        te.build(path, batch=(1, 4, 8), store=te.Store(tmp_path / "wrong"))


@pytest.mark.parametrize(
    "spec", [TensorSpec("ids", "int64", (2, 4)), TensorSpec("sizes", "float32", (2,), role="size")]
)
def test_ids_and_sizes_keep_their_values(spec: TensorSpec):
    signature = Signature((spec, TensorSpec("x", "float32", (2, 4))), ())
    feeds = {"ids": np.ones((2, 4), np.int64), "sizes": np.ones(2, np.float32), "x": np.zeros((2, 4), np.float32)}
    drawn = list(wider_feeds(feeds, signature, TOLERANCES["fp32"]))
    assert all(np.array_equal(made[spec.name], feeds[spec.name]) for made, _ in drawn)
    assert [how for _, how in drawn] == ([] if spec.role else ["normal x5", "normal x100", "at edges", "normal x1"])


@pytest.mark.parametrize("kind", ["fp16", "tf32"])
def test_numbers_that_a_short_mantissa_amplifies_are_not_drawn(kind: str):
    signature = Signature((TensorSpec("x", "float32", (2, 4)),), ())
    drawn = wider_feeds({"x": np.zeros((2, 4), np.float32)}, signature, TOLERANCES[kind])
    assert [how for _, how in drawn] == ["normal x1"]


def test_what_plain_onnxruntime_does_not_run_is_not_judged(tmp_path: Path):
    row = (models.BF16, ["n", 3])
    path = models.save(tmp_path / "net.onnx", [models.node("Relu", "x", "y")], {"x": row}, {"y": row})
    with pytest.raises(ModelError):
        of(path, lambda feeds: {})


def stored_in_int8(path: Path) -> Path:
    """A matrix product whose weights alone are quantized."""
    nodes = [models.node("DequantizeLinear", "w s", "wd"), models.node("MatMul", "x wd", "y")]
    weights = {"w": np.arange(16, dtype=np.int8).reshape(4, 4), "s": np.float32(0.1)}
    row = (models.FLOAT, ["n", 4])
    return models.save(path, nodes, {"x": row}, {"y": row}, weights)


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (models.conv_net, "fp32"),
        (lambda p: models.conv_net(p, half=True), "fp16"),
        (models.int8_qdq, "quantized"),
        (stored_in_int8, "quantized"),
    ],
)
def test_a_model_that_rounds_coarsely_is_judged_by_its_own_rounding(make, form: str, tmp_path: Path):
    assert coarsest_dtype(open_model(make(tmp_path / "net.onnx")).graph) == form


@pytest.mark.parametrize(
    ("brought_to", "kind"),
    [(None, "fp32"), ("fp32", "fp32"), ("tf32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("int4", "quantized")],
)
def test_a_model_that_is_cast_or_quantised_first_is_judged_by_what_it_becomes(
    brought_to: str | None, kind: str, tmp_path: Path
):
    assert coarsest_dtype(open_model(models.conv_net(tmp_path / "net.onnx")).graph, brought_to) == kind
    assert coarsest_dtype(open_model(models.int8_qdq(tmp_path / "quantised.onnx")).graph, brought_to) == "quantized"
    assert select_tolerance(kind, tf32=True) == (TOLERANCES["tf32"] if kind == "fp32" else TOLERANCES[kind])


def test_a_chosen_limit_stands_alone():
    """Neither the noise of a format nor the sensitivity of a model changes it."""
    chosen, far = (
        select_tolerance("fp32", explicit=0.1),
        compare_output(np.array([1.0, 2.5, -4.0]), np.array([1.0, 2.0, -4.0])),
    )
    assert chosen.violation(far, sensitivity=replace(far, max_rel=9.0)) is not None
    assert TOLERANCES["fp32"].violation(far, sensitivity=replace(far, max_rel=9.0)) is None


# ------------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1.0], [1.0, 2.0]),
        ([0.5], [0.0]),
    ],
)
def test_what_cannot_be_equal_is_infinitely_far(got, want):
    assert compare_output(np.array(got), np.array(want)).max_rel == math.inf


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, -math.inf], [], [0.0, 0.0]])
def test_equal_values_are_equal_however_odd(values):
    found = compare_output(np.array(values), np.array(values))
    assert found.max_abs == 0 and found.max_rel == 0 and found.cosine == 1


def test_whole_numbers_and_strings_are_compared_too():
    assert compare_output(np.array([250], np.uint8), np.array([5], np.uint8)).max_abs == 245
    assert compare_output(np.array(["a"], object), np.array(["b"], object)).max_rel == math.inf
    assert compare_output(np.array([True]), np.array([False])).max_rel == math.inf


def test_one_value_alone_is_not_what_loses_an_output_of_few():
    want = np.arange(8)
    one, two = (compare_output(np.where(want < count, 7, want), want) for count in (1, 2))
    assert lost_text(one) is None and lost_text(two) is not None


# ------------------------------------------------------------------------------------------------ models that sort

STRICT = Tolerance(1e-3)


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    """The 100 largest of 128 scores, and where they stood: `[batch, 100, 2]`."""
    nodes = [
        models.node("TopK", "x k", "scores places", axis=1),
        models.node("Cast", "places", "p", to=1),
        models.node("Unsqueeze", "scores two", "s3"),
        models.node("Unsqueeze", "p two", "p3"),
        models.node("Concat", "s3 p3", "found", axis=2),
    ]
    sides = {"x": (models.FLOAT, ["batch", 128])}, {"found": (models.FLOAT, ["batch", 100, 2])}
    weights = {"k": np.array([100], np.int64), "two": np.array([2], np.int64)}
    return models.save(tmp_path / "detector.onnx", nodes, *sides, weights)


def test_near_equal_rows_may_change_places_in_a_model_that_sorts(detector: Path):
    assert sorted_outputs(read_proto(detector)) == ("found",)
    right = reference_session(detector, open_model(detector).signature)

    def swapped(feeds):
        found = right.run(feeds)["found"]
        found[:, [10, 11]] = found[:, [11, 10]]
        return {"found": found}

    found = of(detector, swapped)
    error = found.outputs["found"]
    assert found.passed and error.rows_moved == 2 and error.rows_skipped == 0


@pytest.mark.parametrize("spoil", ["one row stands for all", "many rows are others"])
def test_other_rows_are_not_excused_by_sorting(spoil: str, detector: Path):
    right = reference_session(detector, open_model(detector).signature)

    def wrong(feeds):
        found = right.run(feeds)["found"]
        if spoil == "one row stands for all":
            found[:] = found[:, :1]
        else:
            found[:, 50:60, 0] += 0.5
        return {"found": found}

    assert not of(detector, wrong).passed


@pytest.mark.parametrize("op", ["TopK", "NonMaxSuppression"])
@pytest.mark.parametrize("tied", [True, False])
def test_inputs_whose_scores_tie_do_not_tell_which_rows_are_right(op: str, tied: bool, tmp_path: Path):
    """The 8 best of 32 boxes apart from each other, where the last of equal scores come first: a library's own order."""
    corners = np.arange(32, dtype=np.float32)[:, None] * 10 + np.array([0, 0, 5, 5], np.float32)
    chosen = {
        "TopK": [models.node("TopK", "x k", "scores places", axis=2), models.node("Squeeze", "places ends", "at")],
        "NonMaxSuppression": [
            models.node("NonMaxSuppression", "boxes x k", "found"),
            models.node("Gather", "found two", "at", axis=1),
        ],
    }[op]
    model = models.save(
        tmp_path / "m.onnx",
        [*chosen, models.node("Gather", "corners at", "rows", axis=0), models.node("Unsqueeze", "rows first", "y")],
        {"x": (models.FLOAT, [1, 1, 32])},
        {"y": (models.FLOAT, [1, 8, 4])},
        {
            "k": np.array([8], np.int64), "two": np.array(2, np.int64), "first": np.array([0], np.int64),
            "ends": np.array([0, 1], np.int64), "corners": corners, "boxes": corners[None],
        },
    )  # fmt: skip
    scores = np.where(tied, 0.5, np.random.default_rng(0).permutation(32) / 32).astype(np.float32).reshape(1, 1, 32)

    def last_first(feeds):
        return {"y": corners[None, 31 - np.argsort(-feeds["x"][0, 0, ::-1], kind="stable")[:8]]}

    runs = (last_first, lambda _: {"y": 0.9 * corners[None, :8]})
    same, other = (measure_parity(open_model(model), run, {"x": scores}, "", STRICT) for run in runs)
    assert same.passed != tied and not other.passed
    assert STRICT.is_undecided(other.outputs["y"], other.sensitivity["y"]) == tied


def ranked(*, tied: int = 4, replace: slice = slice(0), rows: int = 40) -> np.ndarray:
    """One item of rows of box and score, the last ones with equal scores; the rows `replace` have other boxes."""
    found = np.zeros((1, rows, 5))
    found[0, :, :4] = np.random.default_rng(0).uniform(0, 300, (rows, 4))
    found[0, :, 4] = np.linspace(1.0, 0.1, rows)
    found[0, -tied:, 4] = 0.1
    found[0, replace, :4] += 7
    return found


def matched(got: np.ndarray, want: np.ndarray, tolerance: Tolerance = STRICT):
    return compare_outputs({"y": got}, {"y": want}, ["y"], tolerance)["y"]


def test_which_of_the_rows_tied_with_the_last_were_cut_off_is_not_an_error_and_is_counted():
    assert matched(ranked(replace=slice(-4, None)), ranked(), replace(STRICT, allow_ties=False)).max_rel > 1e-2
    error = matched(ranked(replace=slice(-4, None)), ranked())
    assert error.max_rel == 0 and error.rows_skipped == 4


def test_scores_that_rounding_moved_widen_the_tie_by_so_much():
    moved = ranked(replace=slice(-4, None))
    moved[0, -4:, 4] += [3e-4, 2e-4, 1e-4, 0]
    assert matched(moved, ranked()).max_rel < 1e-5


def test_one_box_of_a_quantised_model_has_no_rms_of_its_own():
    """One small box beside a large one that is off by less than rows are matched by; and all boxes off as much."""
    tolerance, want = TOLERANCES["quantized"], ranked()
    want[0, :, :4] = want[0, :, :4] / 10 + 70
    want[0, 0, :4] = 300
    for off, accepted in ((slice(30, 31), True), (slice(None), False)):
        got = want.copy()
        got[0, [10, 11]] = got[0, [11, 10]]
        got[0, off, :4] += 29
        assert tolerance.accepts(matched(got, want, tolerance)) == accepted


def test_rows_are_matched_only_behind_a_sort(detector: Path):
    """All scores 0.95 against all 0.30: every row ties with the last, and nothing sorted them."""
    want = np.full((1, 84, 40), 0.30)
    want[:, :4] = np.sort(np.random.default_rng(0).uniform(5, 480, (1, 4, 40)), axis=1)[:, ::-1]
    got = want.copy()
    got[:, 4:] = 0.95
    for names in ([], ["y"]):
        error = compare_outputs({"y": got}, {"y": want}, names, TOLERANCES["quantized"])["y"]
        assert not TOLERANCES["quantized"].accepts(error)
    assert sorted_outputs(read_proto(detector)) == ("found",)
