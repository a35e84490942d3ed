"""How far an export may be from its source, by channel; names of sizes; examples at other shapes. No PyTorch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.conversion.axes import Axis
from trt_engine.conversion.exported import Exported
from trt_engine.conversion.reference_runs import batch_dependent_outputs, compared_sizes, run_references
from trt_engine.conversion.simplify import clean_export, name_outputs, simplify
from trt_engine.conversion.verify_export import ExportVerification, check_deterministic, verify
from trt_engine.errors import AccuracyError, ModelError, UsageError
from trt_engine.graph import external_data
from trt_engine.graph.load import open_model

ROOT = Path(__file__).parents[2]
HAS_ONNXSLIM = importlib.util.find_spec("onnxslim") is not None
PIXELS = np.array([640, 640, 640, 640, 1], np.float32)


def detector(folder: Path, scales: Array) -> Path:
    """x (batch x 5 or batch x 5 x 7) times what makes pixels of four channels and a score of the fifth."""
    shape = ["batch", 5, *([7] if scales.ndim > 1 else [])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scales"], ["y"])], "g", values[:1], values[1:],
        [numpy_helper.from_array(scales, "scales")],
    )  # fmt: skip
    path = folder / "raw.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def compared(folder: Path, scales: Array, change: Callable[[Array], Array]) -> ExportVerification:
    """The graph against a source that answers as it does, but for `change`."""

    def source(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": change(feeds["x"] * scales)}

    example = {"x": np.random.default_rng(0).random((2, 5, *scales.shape[1:]), dtype=np.float32) + 0.1}
    exported = Exported(detector(folder, scales), source, "dynamo", example, {"x": {0: "batch"}})
    return verify(exported.path, exported, run_references(exported))


# ------------------------------------------------------------------------------------------------ the comparison


def wrong_scores(axis: int) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        factor = np.ones(5, np.float32)
        factor[4] = 1.01
        return array * factor.reshape([-1 if at == axis else 1 for at in range(array.ndim)])

    return change


@pytest.mark.parametrize("scales", [PIXELS, np.repeat(PIXELS[:, None], 7, axis=1)], ids=["columns", "rows of anchors"])
def test_scores_beside_pixels_are_compared_at_their_own_scale(tmp_path: Path, scales: Array) -> None:
    """One hundredth of a score is 16 millionths of 640 pixels."""
    right = compared(tmp_path, scales, lambda array: array)
    assert right.max_error == 0
    with pytest.raises(AccuracyError, match=r"channel 4 \(axis 1\) of output `y` differs by 0\.0\d+ of its largest"):
        compared(tmp_path, scales, wrong_scores(1))


def test_rounding_in_a_channel_of_next_to_nothing_is_not_a_difference(tmp_path: Path) -> None:
    """A sum of large numbers that ends near zero has their rounding; far more than theirs is a difference."""
    tiny = np.array([1, 1, 1, 1, 1e-7], np.float32)
    noise = np.array([3e-5, 0, 0, 0, 5e-5], np.float32)
    assert compared(tmp_path, tiny, lambda array: array + noise).max_error < 1e-4
    alone = np.array([0, 0, 0, 0, 5e-5], np.float32)
    with pytest.raises(AccuracyError, match="channel 4"):
        compared(tmp_path, tiny, lambda array: array + alone)


def test_a_single_value_near_zero_is_no_channel_of_another_scale(tmp_path: Path) -> None:
    """At a batch of 1 each class of a classifier is one number, and some of a thousand are nearly nothing."""
    rng = np.random.default_rng(1)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1000]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "a.onnx")
    rounding = rng.standard_normal((4, 1000)).astype(np.float32) * 2e-5

    def source(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": -feeds["x"] + rounding[: len(feeds["x"])]}

    example = {"x": rng.standard_normal((2, 1000), dtype=np.float32)}
    exported = Exported(tmp_path / "a.onnx", source, "dynamo", example, {"x": {0: "batch"}})
    agreement = verify(exported.path, exported, run_references(exported))
    assert [item.sizes["batch"] for item in agreement.shapes] == [2, 4, 1]
    assert 1e-5 < agreement.max_error <= 1e-4


def test_an_output_without_a_finite_value_is_said_to_be_compared_with_nothing(tmp_path: Path) -> None:
    scales = np.array([1, 1, 1, 1, np.nan], np.float32)
    assert compared(tmp_path, scales, lambda array: array).notes == ()
    nothing = compared(tmp_path, np.full(5, np.nan, np.float32), lambda array: array)
    assert nothing.notes[0] == "`y` has no finite value at batch 2: nothing of it was compared"


@pytest.mark.parametrize(("scale", "noted"), [(0.0, "0"), (1e-6, "the same in every row"), (1e-2, None)])
def test_an_output_that_does_not_follow_the_input_is_noted(tmp_path: Path, scale: float, noted: str | None) -> None:
    """Of untrained networks, whose last layer starts at 0 or whose statistics are unfitted: agreement shows nothing."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in ("x", "y")]
    stored = {"scale": np.float32(scale), "bias": np.float32(bool(scale)) * np.arange(8, dtype=np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["z"]), helper.make_node("Add", ["z", "bias"], ["y"])],
        "g", values[:1], values[1:], [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "a.onnx")
    example = {"x": np.random.default_rng(0).standard_normal((2, 8), dtype=np.float32)}
    source = lambda feeds: {"y": feeds["x"] * stored["scale"] + stored["bias"]}  # noqa: E731
    exported = Exported(tmp_path / "a.onnx", source, "dynamo", example, {"x": {0: "batch"}})
    notes = verify(exported.path, exported, run_references(exported)).notes
    assert any(f"`y` is {noted} at batch 2, whatever the input is" in note for note in notes) == (noted is not None)
    assert bool(notes) == (noted is not None)


def sorting(folder: Path, rows: int = 6) -> Path:
    """x (batch x 8) to its best values, and the boxes (batch x rows x 4) at their places."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("TopK", ["x", "k"], ["scores", "places"]),
        helper.make_node("Unsqueeze", ["places", "last"], ["u"]),
        helper.make_node("Expand", ["u", "four"], ["indices"]),
        helper.make_node("GatherElements", ["boxes", "indices"], ["best"], axis=1),
    ]
    stored = [np.array([rows]), np.array([2]), np.array([1, 1, 4])]
    graph = helper.make_graph(
        nodes, "g",
        [value("x", TensorProto.FLOAT, ["batch", 8]), value("boxes", TensorProto.FLOAT, ["batch", 8, 4])],
        [value("scores", TensorProto.FLOAT, ["batch", rows]), value("best", TensorProto.FLOAT, ["batch", rows, 4])],
        [numpy_helper.from_array(array, name) for array, name in zip(stored, ("k", "last", "four"), strict=True)],
    )  # fmt: skip
    path = folder / "raw.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def ranked_otherwise(folder: Path, scores: Array, nudge: float, *, largest: bool = True) -> ExportVerification:
    """The graph against a source whose second score is higher by `nudge`, as another order of sums would make it."""

    def source(feeds: Mapping[str, Array]) -> dict[str, Array]:
        x = feeds["x"].copy()
        x[:, 1] += np.float32(nudge)
        places = np.argsort(-x if largest else x, axis=1, kind="stable")[:, :6]
        best = np.take_along_axis(feeds["boxes"], places[..., None], axis=1)
        return {"scores": np.take_along_axis(x, places, axis=1), "best": best}

    rng = np.random.default_rng(0)

    def feeds(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
        drawn = np.random.default_rng(seed)
        return {name: drawn.random(shape, dtype=np.float32) for name, shape in shapes.items()}

    example = {"x": np.tile(scores, (2, 1)), "boxes": rng.random((2, 8, 4), dtype=np.float32)}
    symbols = {"x": {0: "batch"}, "boxes": {0: "batch"}}
    exported = Exported(sorting(folder), source, "dynamo", example, symbols, feeds=feeds)
    return verify(exported.path, exported, run_references(exported))


TIED = np.array([0.5, 0.5, 0.9, 0.8, 0.7, 0.6, 0.2, 0.1], np.float32)


def test_near_equal_scores_may_change_places_and_their_boxes_go_with_them(tmp_path: Path) -> None:
    agreement = ranked_otherwise(tmp_path, TIED, 1e-6)
    assert agreement.max_error <= 1e-5
    assert agreement.notes[0] == (
        "4 rows of `scores`, `best` changed places at batch 2: the graph sorts, and near-equal scores have no order"
    )


def test_where_near_equal_scores_contend_for_the_last_place_other_inputs_are_drawn(tmp_path: Path) -> None:
    contend = np.array([0.5, 0.5, 0.9, 0.8, 0.7, 0.6, 0.55, 0.1], np.float32)
    agreement = ranked_otherwise(tmp_path, contend, 1e-6)
    assert agreement.max_error <= 1e-5 and len(agreement.shapes) == 3
    assert any(note.startswith("other inputs were drawn at batch 2") for note in agreement.notes)


def test_scores_that_tie_are_said_to_be_the_reason(tmp_path: Path) -> None:
    """As untrained detectors have it: which rows are best is chance, and no other inputs help."""
    flat = np.full(8, 0.5, np.float32) + np.linspace(0, 1e-6, 8, dtype=np.float32)
    raw = sorting(tmp_path)
    rng = np.random.default_rng(0)
    example = {"x": np.tile(flat, (2, 1)), "boxes": rng.random((2, 8, 4), dtype=np.float32)}

    def source(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {"scores": np.sort(feeds["x"])[:, :6], "best": feeds["boxes"][:, :6] * 3}

    exported = Exported(raw, source, "dynamo", example, {"x": {0: "batch"}, "boxes": {0: "batch"}})
    with pytest.raises(AccuracyError, match="scores that it sorts are equal but for rounding") as refused:
        verify(raw, exported, run_references(exported))
    assert "trained" in str(refused.value.hint)
    assert [item.name for item in tmp_path.iterdir()] == ["raw.onnx"]


@pytest.mark.parametrize(("nudge", "largest"), [(0.3, True), (0.0, False)], ids=["another score", "another order"])
def test_a_sort_that_is_wrong_is_refused_all_the_same(tmp_path: Path, nudge: float, largest: bool) -> None:
    with pytest.raises(AccuracyError, match=r"output `(scores|best)` differs"):
        ranked_otherwise(tmp_path, TIED, nudge, largest=largest)


@pytest.mark.parametrize("kind", ["random", "dropout", "batch norm"])
def test_what_trains_or_rolls_dice_is_refused_whatever_exporter_wrote_it(tmp_path: Path, kind: str) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(np.ones(3, np.float32), name) for name in "sbmv"]
    nodes = {
        "random": helper.make_node("RandomNormalLike", ["x"], ["y"], "dice"),
        "dropout": helper.make_node("Dropout", ["x", "ratio", "train"], ["y"], "dice"),
        "batch norm": helper.make_node(
            "BatchNormalization", ["x", *"sbmv"], ["y", "m2", "v2"], "dice", training_mode=1
        ),
    }
    stored = [numpy_helper.from_array(np.float32(0.5), "ratio"), numpy_helper.from_array(np.array(True), "train")]
    graph = helper.make_graph([nodes[kind]], "g", values[:1], values[1:], [*weights, *stored])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "a.onnx")
    with pytest.raises(ModelError, match="`dice`"):
        check_deterministic(tmp_path / "a.onnx")


# ------------------------------------------------------------------------------------------------ sizes that were tried


def source_of(
    answer: Callable[[Array], Array],
    rows: int = 2,
    limits: dict[str, Axis] | None = None,
    refuses: set[int] | None = None,
) -> Exported:
    """A source of one input, `batch` rows of three numbers, that raises at the batches in `refuses`."""

    def reference(feeds: Mapping[str, Array]) -> dict[str, Array]:
        if len(feeds["x"]) in (refuses or ()):
            raise ModelError(f"more than {len(feeds['x'])} rows are needed")
        return {"y": answer(feeds["x"])}

    def feeds(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
        return {"x": np.random.default_rng(seed).random(shapes["x"], dtype=np.float32)}

    example = {"x": np.random.default_rng(9).random((rows, 3), dtype=np.float32)}
    return Exported(
        Path("unused.onnx"), reference, "dynamo", example, {"x": {0: "batch"}}, limits=limits or {}, feeds=feeds
    )


@pytest.mark.parametrize(
    ("rows", "refuses", "tried", "failed"),
    [
        (2, set(), (1, 2, 4), []),
        (2, {1}, (2, 4, 6), [1]),
        (8, {1, 2, 3}, (4, 8, 16), [1, 2, 3]),
        (4, {1, 2, 3, 12}, (4, 8), [1, 2, 3, 12]),
    ],
    ids=["all", "not at 1", "the smallest that works", "no third size"],
)
def test_a_size_is_compared_once_and_those_the_source_fails_at_are_named(
    rows: int, refuses: set[int], tried: tuple[int, ...], failed: list[int]
) -> None:
    given = run_references(source_of(lambda x: x * 2, rows, refuses=refuses))
    assert compared_sizes(given, "batch") == tried
    assert len({answer.sizes["batch"] for answer in given}) == len(given), "no size stands for another"
    assert sorted(size for answer in given for _, size, _ in answer.failed) == failed


def test_a_range_that_was_named_is_refused_where_the_source_fails_at_its_end() -> None:
    with pytest.raises(ModelError, match="runs at batch 2 and not at batch 1: more than 1 rows are needed") as refused:
        run_references(source_of(lambda x: x, limits={"batch": Axis("batch", 1, 64)}, refuses={1}))
    assert "`batch@2..`" in str(refused.value.hint)


def test_rows_that_depend_on_each_other_are_found_by_the_numbers_alone() -> None:
    def mixed(answer: Callable[[Array], Array]) -> tuple[str, ...]:
        source = source_of(answer, 4)
        return batch_dependent_outputs(source, run_references(source))

    assert mixed(lambda x: x * 3 + 1) == ()
    assert mixed(lambda x: x / len(x)) == (), "the size of a batch is not what the other rows hold"
    assert mixed(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3)) == ("y",)
    assert mixed(lambda x: x - x.mean(1, keepdims=True)) == (), "statistics of one row"


# ------------------------------------------------------------------------------------------------ names of sizes


def test_sizes_in_steps_carry_the_name_asked_for_wherever_they_stand(tmp_path: Path) -> None:
    """As the dynamo exporter writes axes in steps: inputs by its helper symbol, everything behind them by another."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], "g",
        [value("x", TensorProto.FLOAT, ["batch", 3, "32*_height", "32*_width"])],
        [value("y", TensorProto.FLOAT, ["batch", "16*s56", "256*s34*s56", "s34 + 1", "Min(batch, TruncToInt(zuf0))"])],
        value_info=[value("h", TensorProto.FLOAT, ["batch", "32*s56", "Min(batch, TruncToInt(zuf0))", "u7", "s34"])],
    )  # fmt: skip
    path = tmp_path / "a.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    clean_export(path, {"x": {0: "batch", 2: "height", 3: "width"}}, {"s56": ("height", 32), "s34": ("width", 32)})
    found = onnx.load(path).graph

    def sizes(value: onnx.ValueInfoProto) -> list[str | int]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert sizes(found.input[0]) == ["batch", 3, "height", "width"]
    assert sizes(found.output[0]) == ["batch", "height//2", "width*height//4", "(width//32) + 1", "y_4"]
    assert sizes(found.value_info[0]) == ["batch", "height", "y_4", 0, "width//32"], "no name but the users' is left"


# ------------------------------------------------------------------------------------------------ two at once


def test_weights_of_another_convert_into_the_same_place_are_not_written_over(tmp_path: Path) -> None:
    """Two graphs and one side file: one of them would read the other's weights."""
    model = open_model(detector(tmp_path, PIXELS))
    target = tmp_path / "out.onnx"

    def meanwhile(draft: Path) -> None:
        (tmp_path / "out.onnx.data").write_bytes(b"theirs")

    proto = onnx.load(model.path)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(100_000, np.float32), "large"))
    with pytest.raises(UsageError, match="by another process meanwhile"):
        external_data.save_model(proto, target, model, external=True, check=meanwhile)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out.onnx.data", "raw.onnx"]
    assert (tmp_path / "out.onnx.data").read_bytes() == b"theirs"
    proto = onnx.load(model.path)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(100_000, np.float32), "large"))
    _, beside = external_data.save_model(proto, target, model, external=True, check=lambda draft: None)
    assert beside == tmp_path / "out.onnx.2.data" and beside.stat().st_size == 400_000


# ------------------------------------------------------------------------------------------------ processes, the Makefile


@pytest.mark.full
@pytest.mark.skipif(not HAS_ONNXSLIM, reason="onnxslim is not installed here: the full environment has it")
def test_onnxslim_reads_a_model_that_is_named_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector(tmp_path, PIXELS)
    monkeypatch.chdir(tmp_path)
    report = simplify("raw.onnx", "out.onnx")
    assert not [note for note in report.notes if "onnxslim" in note]


def test_what_needs_the_full_environment_is_what_make_test_full_runs_in_it() -> None:
    """Every test that is skipped for a missing PyTorch, TensorFlow or onnxslim, and nothing that runs without them."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pytest" in line and "$(FULL)" in line]
    (wanted,) = re.findall(r"-m '([^']+)'", line)
    asked = ["-m", wanted, "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests/conversion"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *asked], cwd=ROOT, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    found = {line.partition("::")[0].rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line}
    assert {"test_convert_torch.py", "test_convert_tensorflow.py", "test_recipes.py", "test_simplify.py"} <= found
    assert "[own]" not in done.stdout and "::test_the_report_goes_to_json_and_back" not in done.stdout
    folder = ROOT / "tests" / "conversion"
    needing = {
        path.name
        for path in folder.glob("test_*.py")
        if re.search(r'skipif\(\s*not |find_spec\("\w+"\) is None', path.read_text())
    }
    assert needing <= found


@pytest.mark.parametrize(
    "declared, named", [("2*((h - 1)//2) + 2", "2*((h - 1)//2) + 2"), ("unk__7", "h"), ("2*unk__7", "h"), ("h", "h")]
)
def test_an_output_axis_keeps_the_exporters_expression_of_input_sizes(declared: str, named: str) -> None:
    """Observed sizes that share a divisor also fit the plain symbol, which is wrong one size further."""
    sides = [onnx.helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", "h"), ("y", declared))]
    proto = onnx.helper.make_model(onnx.helper.make_graph([], "g", sides[:1], sides[1:]))
    name_outputs(proto, {"y": {0: "n", 1: "h"}}, {})
    assert [dim.dim_param for dim in proto.graph.output[0].type.tensor_type.shape.dim] == ["n", named]
