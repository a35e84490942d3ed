"""`te.compare`: engines side by side, their outputs, the rules, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine import errors
from trt_engine.config.bench import CompareConfig
from trt_engine.engine import Engine
from trt_engine.records.base import append_record
from trt_engine.records.bench import BenchRecord
from trt_engine.records.compare import CompareReport, CompareSide, Comparison, GateResult, Interval, MetricDifference
from trt_engine.verbs.compare import run as comparing
from trt_engine.verbs.compare.baseline import compare_with_base
from trt_engine.verbs.compare.report import _slowdown_note, evaluate_gates
from trt_engine.verbs.compare.request import parse_gates, parse_request
from trt_engine.verbs.compare.run import gate
from trt_engine.verbs.load import merge_run_settings

from .conftest import build_engine, write_model

pytestmark = pytest.mark.usefixtures("kept_engines")

Made = Callable[[str], Engine]
SHORT: dict[str, Any] = {"duration_s": 0.3, "restarts": 6}


def run(*engines: Any, command: str = "", **values: Any) -> CompareReport:
    settings = merge_run_settings(values, None, None, CompareConfig(), te.BenchConfig())
    return comparing.run(parse_request(engines, *settings), named=values, command=command)


@pytest.fixture
def engine(made: Made) -> Engine:
    return made("onnxruntime")


def other_engine(folder: Path, *, width: int = 8, scale: float = 1.0, rename: str | None = None) -> Engine:
    """An engine of the same network with other weights, another number of outputs, or another name of its input."""
    folder.mkdir(exist_ok=True)
    model = write_model(folder / "other.onnx", width=width)
    proto = onnx.load(model)
    weights = numpy_helper.to_array(proto.graph.initializer[0]) * np.float32(scale)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "w"))
    if rename is not None:
        proto.graph.input[0].name = proto.graph.node[0].input[0] = rename
    onnx.save(proto, model)
    return build_engine(model, folder / "built", "onnxruntime", device="cpu")


# ------------------------------------------------------------------------------------------------ engines


@pytest.mark.parametrize("name", ["onnxruntime", "fake"])
def test_an_engine_against_itself_has_all_its_samples_intervals_and_equal_outputs(made: Made, name: str) -> None:
    engine = made(name)
    report = te.compare(engine, engine, **SHORT)
    first, second = report.sides
    assert (second.label, second.engine) == (f"{first.label} #2", first.engine)
    for side in report.sides:
        assert side.record is not None
        assert side.record.compute_ms == tuple(value for block in side.blocks_ms for value in block)
        assert side.record.queries == len(side.record.compute_ms) > 0
        assert side.record.runtime_info["measured"] == "interleaved"
        assert len(side.restart_blocks) == 6 and sum(side.restart_blocks) == len(side.blocks_ms) == report.blocks
        assert side.engine_bytes == engine.path.stat().st_size
    (against,) = report.comparisons
    assert {"median", "mean", "throughput"} <= {item.metric for item in against.speed}
    assert all(item.slower_pct.low <= item.slower_pct.value <= item.slower_pct.high for item in against.speed)
    assert against.output_names == ("y",) and against.outputs[0].max_abs == 0
    assert against.top1_agreement == {"y": 1.0}
    assert against.size_ratio == 1
    assert report.protocol == first.record.protocol if first.record else False
    assert report.protocol.clock == ("device events" if name == "fake" else "host")


def test_an_engine_and_a_device_without_events_of_its_own_are_both_timed_by_the_hosts_clock(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_engine.backends.fake.run import FakeSession

    loaded = []
    whole = FakeSession.__init__

    def every_other_is_a_library(self: Any, *args: Any) -> None:
        whole(self, *args)
        loaded.append(self)
        if len(loaded) % 2:  # called with host arrays, as a library on a GPU is
            self.runs_host_arrays = self.binds_resident = True
            self.run = lambda feeds: {"y": np.zeros((2, 8), np.float32)}
            self.bind_resident = lambda feeds, graph=False: lambda: None

    monkeypatch.setattr(FakeSession, "__init__", every_other_is_a_library)
    report = run(made("fake"), made("fake"), **SHORT)
    assert report.protocol.clock == "host"
    assert any("all are timed by the host's clock" in text for text in report.warnings)


def test_other_outputs_are_told_by_output(engine: Engine, tmp_path: Path) -> None:
    report = run(engine, other_engine(tmp_path, scale=1.5), **SHORT)
    (against,) = report.comparisons
    (error,) = against.outputs
    assert error.max_rel == pytest.approx(0.5, rel=1e-4)
    assert error.cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_the_structure_is_compared_where_it_can_be_read(engine: Engine, made: Made, tmp_path: Path) -> None:
    (same,) = run(engine, engine, **SHORT).comparisons
    assert same.structure is not None and same.structure.changes == () and same.structure.unchanged > 0
    (wider,) = run(engine, other_engine(tmp_path, width=24), **SHORT).comparisons
    assert wider.structure is not None and wider.structure.changes
    (unread,) = run(made("fake"), made("fake"), **SHORT).comparisons
    assert unread.structure is None


def test_outputs_of_another_shape_have_no_figure_and_fail_every_rule_about_outputs(
    engine: Engine, tmp_path: Path
) -> None:
    (against,) = run(engine, other_engine(tmp_path / "one", width=5), **SHORT).comparisons
    assert against.outputs_differ and against.outputs == () and "2x8 against 2x5" in against.outputs_note
    with pytest.raises(errors.AccuracyError, match=r"`y` is 2x8 against 2x5"):
        te.compare(engine, other_engine(tmp_path, width=5), fail_if=["error:1e9"], **SHORT)


def test_engines_of_other_inputs_or_on_other_devices_are_refused(made: Made, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match=r"has the inputs 'z', .* has 'x'"):
        run(engine, other_engine(tmp_path, rename="z"), **SHORT)
    with pytest.raises(errors.UsageError, match=r"has the inputs 'z', .* has 'x'"):
        run(engine, tmp_path / "other.onnx", **SHORT)
    with pytest.raises(errors.UsageError, match=r"device \(`cpu` against `fake:0`\).*protocol.clock"):
        run(engine, made("fake"), **SHORT)


def test_an_engine_that_does_not_take_the_others_input_is_named(engine: Engine, tmp_path: Path) -> None:
    small = build_engine(write_model(tmp_path / "small.onnx"), tmp_path, "onnxruntime", device="cpu", batch=(1, 1, 1))
    with pytest.raises(
        errors.ProfileError, match=f"`{re.escape(str(small.path))}` does not take the input of"
    ) as caught:
        run(engine, small, **SHORT)
    assert "--batch" in (caught.value.hint or "")
    bare = write_model(tmp_path / "bare.onnx")
    run(engine, bare, **SHORT)  # which is built at the profile of the engine
    proto = onnx.load(bare)
    for one in (*proto.graph.input, *proto.graph.output):
        one.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, bare)
    run(bare, engine, **SHORT)  # of a fixed size, which the engine takes


def detections(
    folder: Path, scores: np.ndarray[Any, Any], boxes: np.ndarray[Any, Any], *, sorts: bool = True
) -> Engine:
    """An engine that answers 40 rows of box and score, the best first where it `sorts`."""
    folder.mkdir()
    rows = np.concatenate([boxes, scores[:, None]], axis=1).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["x", "all"], ["m"], keepdims=0),
        helper.make_node("Mul", ["m", "zero"], ["nothing"]),
        helper.make_node("Reshape", ["nothing", "shape"], ["nothings"]),
        helper.make_node("Add", ["rows", "nothings"], ["unsorted" if sorts else "y"]),
    ]
    held = {
        "all": np.array([0, 1, 2, 3]),
        "zero": np.zeros(1, np.float32),
        "shape": np.array([1, 1, 1]),
        "rows": rows[None],
    }
    if sorts:
        held |= {"column": np.array([4]), "k": np.array([40]), "flat": np.array([1, 40]), "last": np.array([40])}
        nodes += [
            helper.make_node("Gather", ["unsorted", "column"], ["score"], axis=2),
            helper.make_node("Reshape", ["score", "flat"], ["scores"]),
            helper.make_node("TopK", ["scores", "k"], ["best", "order"], axis=1),
            helper.make_node("Reshape", ["order", "last"], ["places"]),
            helper.make_node("Gather", ["unsorted", "places"], ["y"], axis=1),
        ]
    graph = helper.make_graph(
        nodes, "detections",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 40, 5])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, folder / "d.onnx")
    return build_engine(folder / "d.onnx", folder / "built", "onnxruntime", device="cpu", batch=(1, 1, 1))


def test_rows_that_change_places_among_near_equal_scores_are_no_difference_of_the_outputs(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scores, boxes = np.linspace(1, 0.2, 40), rng.random((40, 4)) * 100
    scores[11] = scores[10] - 1e-4
    swapped = scores.copy()
    swapped[[10, 11]] = (scores[10] + scores[11]) / 2 + np.array([-1e-5, 1e-5])  # the second comes first now
    one, two = detections(tmp_path / "one", scores, boxes), detections(tmp_path / "two", swapped, boxes)
    report = run(one, two, fail_if=["error:0.01"], **SHORT)
    (against,) = report.comparisons
    assert against.outputs[0].max_rel < 0.001 and not against.outputs_differ and not report.gates[0].failed
    assert against.outputs_note == (
        "`y` comes out of a sort: 2 rows are compared at another place, 0 of 40 at the cut are left out"
    )
    moved = boxes.copy()
    moved[3:8] += 30  # five of forty lie elsewhere: no order explains that
    report = run(one, detections(tmp_path / "moved", scores, moved), fail_if=["error:0.01"], **SHORT)
    assert report.gates[0].failed


def test_rows_that_nobody_sorted_stay_where_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scores, boxes = rng.random(40), rng.random((40, 4)) * 100
    order = rng.permutation(40)
    one = detections(tmp_path / "one", scores, boxes, sorts=False)
    other = detections(tmp_path / "two", scores[order], boxes[order], sorts=False)
    report = run(one, other, fail_if=["error:0.01"], **SHORT)
    assert report.gates[0].failed and "matched" not in report.comparisons[0].outputs_note


def test_an_interruption_keeps_what_can_be_said_and_says_that_it_is_not_all(engine: Engine, tmp_path: Path) -> None:
    looks = iter(range(100))

    def press(at: te.Progress) -> None:
        if at.done is not None and next(looks) == 7:
            raise KeyboardInterrupt

    with pytest.raises(errors.Interrupted) as caught:
        te.compare(
            engine, engine, duration_s=0.6, restarts=12, progress=press, out=tmp_path, save_baseline=tmp_path / "b.json"
        )
    partial: Any = caught.value.partial
    assert not partial.complete and len(partial.sides[0].restart_blocks) == 8
    assert not json.loads((tmp_path / "compare.json").read_text())["complete"]
    assert not (tmp_path / "b.json").exists()

    def at_once(at: te.Progress) -> None:
        if at.done is not None:
            raise KeyboardInterrupt

    with pytest.raises(errors.Interrupted, match="too few for a result") as caught:
        te.compare(engine, engine, progress=at_once, **SHORT)
    assert caught.value.partial is None


def test_a_comparison_that_would_miss_much_is_not_stable(made: Made, engine: Engine, tmp_path: Path) -> None:
    noisy = [record_file(tmp_path / name, engine, scatter=1.0, seed=seed) for seed, name in enumerate("ab")]
    report = run(*noisy)
    assert not report.stable and "would likely be missed" in report.instability[0]
    with pytest.raises(errors.UnstableError):
        gate(report, strict=True)
    assert run(*[record_file(tmp_path / name, engine, scatter=0.01, seed=ord(name)) for name in "cd"]).stable


# ------------------------------------------------------------------------------------------------ records


def record_of(
    engine: Engine, median_ms: float = 2.0, scatter: float = 0.05, seed: int = 0, **other: Any
) -> BenchRecord:
    """The record of a measurement with times that were made up."""
    times = median_ms * np.exp(scatter * np.random.default_rng(seed).standard_normal(1200))
    record = te.bench(engine, duration_s=0.0, warmup_s=0.0, iterations=10)
    other = {"stable": True} | other
    return dataclasses.replace(
        record, compute_ms=tuple(times.tolist()), queries=1200, wall_s=float(times.sum()) / 1e3, **other
    )


def record_file(folder: Path, engine: Engine, median_ms: float = 2.0, **other: Any) -> str:
    append_record(folder / "records.jsonl", record_of(engine, median_ms, **other))
    return str(folder / "records.jsonl")


@pytest.mark.parametrize(
    ("rule", "failed"),
    [
        ("slower:3%", True),
        ("slower:30%", False),
        ("mean-slower:10%", True),
        ("p99-slower:10%", True),
        ("p99-slower:40%", False),
        ("maybe-slower:19%", True),
        ("maybe-slower:30%", False),
    ],
)
def test_a_rule_fails_by_the_end_of_the_interval_that_it_asks_about(engine: Engine, rule: str, failed: bool) -> None:
    gate_result = judged(rule, *(loaded(record_of(engine, ms), name) for ms, name in ((2.0, "a"), (2.4, "b"))))
    assert gate_result.failed is failed


def loaded(record: BenchRecord, name: str, *, loads: int = 12) -> CompareSide:
    """A side whose times are those of the record, of an engine of its own."""
    times = np.array_split(np.array(record.compute_ms), loads)
    record = dataclasses.replace(record, engine_digest=name)
    blocks = tuple(tuple(part.tolist()) for part in times)
    several = {"blocks_ms": blocks, "restart_blocks": (1,) * loads} if loads > 1 else {}
    return CompareSide(name, name, "onnxruntime", "cpu", "fp32", 1, record=record, **several)


def judged(rule: str, base: CompareSide, side: CompareSide, *, by_turns: bool = True) -> GateResult:
    (found,) = evaluate_gates(parse_gates([rule]), [compare_with_base(base, side, by_turns=by_turns)])
    return found


@pytest.mark.parametrize("loads", [1, 12])
@pytest.mark.parametrize("same", [False, True])
def test_only_measurements_that_show_the_engine_itself_fail_a_rule_of_speed(
    engine: Engine, loads: int, same: bool
) -> None:
    """All pairs: stable or not, by turns or at other times, slower, equal, faster, on one machine or (no A/A) another."""
    plain, again = record_of(engine), record_of(engine, seed=1)
    cases = list(itertools.product((1.2, 1.0, 0.8), ("", "base", "side"), (False, True), (False, True)))[loads % 3 :: 3]
    for ratio, unstable, by_turns, other_machine in cases:
        other = dataclasses.replace(again, compute_ms=tuple(ratio * ms for ms in again.compute_ms))
        if other_machine:
            other = dataclasses.replace(other, environment=dataclasses.replace(other.environment, cpu="another"))
        base = loaded(dataclasses.replace(plain, stable=unstable != "base"), "a", loads=loads)
        side = loaded(dataclasses.replace(other, stable=unstable != "side"), "a" if same else "b", loads=loads)
        found = [judged(rule, base, side, by_turns=by_turns) for rule in ("slower:3%", "maybe-slower:3%")]
        one_engine = same and not other_machine
        shown = (by_turns and loads > 1) or (loads > 1 and not unstable)
        case = (ratio, unstable, by_turns, other_machine)
        assert [item.failed for item in found] == [
            ratio > 1 and shown and not one_engine,
            ratio > 1 and not one_engine,
        ], case
        assert found[0].evaluated == (ratio <= 1 or (shown and not one_engine)), case


def test_a_p99_that_cannot_be_judged_fails_only_where_doubt_does(engine: Engine, tmp_path: Path) -> None:
    short = []
    for name in "ab":
        record = record_of(engine)
        append_record(
            tmp_path / name / "records.jsonl", dataclasses.replace(record, compute_ms=record.compute_ms[:300])
        )
        short.append(str(tmp_path / name / "records.jsonl"))
    report = run(*short, fail_if=["p99-slower:5%", "maybe-p99-slower:5%"])
    assert [item.failed for item in report.gates] == [False, True]
    assert all("cannot be judged" in item.text and not item.evaluated for item in report.gates)
    assert [text for text in report.instability if "p99-slower" in text] == ["the rule `p99-slower:5%` was not judged"]
    assert any("too few queries for an interval of p99" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": 4}, r"batch \(`2` against `4`\)"),
        ({"shapes": {"x": (4, 3, 16, 16)}}, "shapes .*x 2x3x16x16 against x 4x3x16x16"),
        ({"device": "cuda:0"}, r"device \(`cpu` against `cuda:0`\)"),
        (
            {"protocol": {"transfers": True, "warmup_s": 3.0}},
            r"protocol.transfers \(off against on\); protocol.warmup_s",
        ),
        ({"environment": {"cpu": "Another"}}, "environment.cpu"),
        ({"environment": {"libraries": {"onnxruntime": "0.1"}}}, "environment.libraries"),
    ],
)
def test_records_that_were_measured_differently_are_refused_with_what_differs(
    engine: Engine, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    record = record_of(engine)
    append_record(tmp_path / "a.jsonl", record)
    inner = {
        name: dataclasses.replace(getattr(record, name), **value) if name in ("protocol", "environment") else value
        for name, value in change.items()
    }
    append_record(tmp_path / "b.jsonl", dataclasses.replace(record, **inner))
    with pytest.raises(errors.UsageError, match=named) as caught:
        run(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert caught.value.exit_code == 2


def test_one_of_several_records_is_named_by_its_number_and_the_last_is_meant_without(
    engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    for median_ms in (2.0, 3.0, 4.0):
        append_record(path, record_of(engine, median_ms))
    report = run(f"{path}:1", str(path))
    assert 90 < report.comparisons[0].speed[0].slower_pct.value < 110
    with pytest.raises(errors.UsageError, match="has 3 records, no number 4"):
        run(f"{path}:4", str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 records"),
        (b"{\n", "is not a record"),
        (b'{"a": 1}\n', "is not a record"),
        (b"\xff\xfe\n", "is not a record"),
    ],
)
def test_what_is_no_record_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(errors.UsageError, match=message):
        run(str(tmp_path / "a.jsonl"), str(tmp_path / "a.jsonl"))
    with pytest.raises(errors.UsageError, match="no such file"):
        run(str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl"))


# ------------------------------------------------------------------------------------------------ baselines


def test_a_baseline_is_compared_with_later_and_the_caveat_is_said(engine: Engine, tmp_path: Path) -> None:
    kept = tmp_path / "ci" / "base.json"
    alone = te.compare(engine, save_baseline=kept, **SHORT)
    assert alone.comparisons == () and alone.method == "nothing was compared"
    report = te.compare(engine, baseline=kept, fail_if=["slower:100000%"], **SHORT)
    assert report.baseline == str(kept)
    assert report.sides[0].record == alone.sides[0].record
    assert [item.metric for item in report.comparisons[0].speed][:2] == ["median", "mean"]
    assert report.method.startswith("not paired")
    assert any("measured at another time" in text for text in report.warnings)
    assert not any("of one load" in text for text in report.warnings)


@pytest.mark.parametrize("digest", ["its own", "another"])
def test_a_slower_baseline_fails_a_rule_unless_it_is_of_the_same_engine(
    engine: Engine, tmp_path: Path, digest: str
) -> None:
    kept = tmp_path / "base.json"
    te.compare(engine, save_baseline=kept, **SHORT)
    told = json.loads(kept.read_text())
    told["side"]["blocks_ms"] = [[ms / 20 for ms in block] for block in told["side"]["blocks_ms"]]
    if digest == "another":
        told["side"]["record"]["engine_digest"] = digest
    kept.write_text(json.dumps(told))
    report = run(engine, baseline=kept, fail_if=["slower:3%", "maybe-slower:3%"], **SHORT)
    certain, possible = (item.failed for item in report.gates)
    assert possible is (digest == "another") and (certain is possible or not report.stable)
    assert ("byte for byte" in " ".join(report.warnings)) is (digest == "its own")


def test_a_baseline_of_another_machine_batch_or_protocol_is_refused_before_measuring(
    engine: Engine, tmp_path: Path
) -> None:
    kept = tmp_path / "base.json"
    te.compare(engine, save_baseline=kept, **SHORT)
    with pytest.raises(errors.UsageError, match="batch"):
        te.compare(engine, baseline=kept, batch=1, duration_s=3600)
    told = json.loads(kept.read_text())
    told["side"]["record"]["environment"]["cpu"] = "Another"
    kept.write_text(json.dumps(told))
    with pytest.raises(errors.UsageError, match=r"environment.cpu \(`Another` against"):
        te.compare(engine, baseline=kept, duration_s=3600)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is not a baseline"), (b'{"schema": "x"}', "is not a baseline"), (b"\xff", "is not a baseline")],
)
def test_what_is_no_baseline_is_told(engine: Engine, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(errors.UsageError, match=message):
        te.compare(engine, baseline=tmp_path / "b.json", **SHORT)
    with pytest.raises(errors.UsageError, match="no such file"):
        te.compare(engine, baseline=tmp_path / "c.json", **SHORT)


# ------------------------------------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(
    "text",
    ["", "slower", "slower:3", "faster:3%", "slower:-3%", "p98-slower:3%", "error:3%", "error:-1", "error:1e999"],
)
def test_a_rule_that_cannot_be_read_is_refused_with_those_that_can(text: str) -> None:
    with pytest.raises(errors.UsageError, match="cannot read the rule") as caught:
        parse_gates([text])
    assert "slower:3%" in (caught.value.hint or "")


def test_what_cannot_be_asked_is_refused(engine: Engine, tmp_path: Path) -> None:
    for arguments, values, message in (
        ((), {}, "0 engines to compare"),
        ((engine,), {}, "1 engine to compare"),
        ((engine,), {"save_baseline": tmp_path / "b", "fail_if": ["slower:3%"]}, "one engine alone"),
        ((engine,), {"baseline": tmp_path / "b", "fail_if": ["error:1"]}, "holds no outputs"),
        ((engine, engine), {"restarts": 5}, "fewer than 6"),
        (("a.jsonl", "b.jsonl"), {"save_baseline": tmp_path / "b"}, "records make no baseline"),
        ((engine, engine), {"lods": 5}, "unknown setting `lods`"),
        ((engine, engine), {"save_baseline": tmp_path}, "is a folder"),
    ):
        with pytest.raises(errors.UsageError, match=message):
            run(*arguments, **values)


# ------------------------------------------------------------------------------------------------ quantised and slower


def side_of(label: str, precision: str, **given: Any) -> CompareSide:
    return CompareSide(label, f"{label}.engine.onnx", "onnxruntime", "cpu", precision, 1, **given)


def against(slower_pct: tuple[float, float, float]) -> Comparison:
    verdict = "slower" if slower_pct[0] > 0 else "faster" if slower_pct[2] < 0 else "no difference found"
    return Comparison("b", (MetricDifference("median", 10.0, 15.0, "ms", Interval(*slower_pct), verdict),), ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "other", "pct", "text"),
    [
        (
            side_of("a", "fp32"), side_of("b", "fp32", graph_dtype="int8", not_fused="fuses 0 of 20 convolutions"),
            (44.0, 45.3, 46.5), "int8 (`b`) is 45 % slower than fp32 (`a`): fuses 0 of 20 convolutions",
        ),
        (
            side_of("a", "fp32"), side_of("b", "fp32", graph_dtype="int8"), (44.0, 45.3, 46.5),
            "int8 (`b`) is 45 % slower than fp32 (`a`): its graph is int8, and it runs in fp32",
        ),
        (side_of("a", "fp16"), side_of("b", "int8"), (4.0, 5.0, 6.0), "int8 (`b`) is 5 % slower than fp16 (`a`)"),
        (
            side_of("a", "int8"), side_of("b", "fp32"), (-51.0, -50.0, -49.0),
            "int8 (`a`) is 100 % slower than fp32 (`b`)",
        ),
        (side_of("a", "fp32"), side_of("b", "int8"), (-46.0, -45.0, -44.0), ""),
        (side_of("a", "fp32"), side_of("b", "int8"), (-1.0, 4.0, 9.0), ""),
        (side_of("a", "int8"), side_of("b", "int8"), (4.0, 5.0, 6.0), ""),
        (side_of("a", "fp32"), side_of("b", "fp16"), (4.0, 5.0, 6.0), ""),
    ],
)  # fmt: skip
def test_a_quantised_engine_that_is_slower_is_named_with_the_reason(
    base: CompareSide, other: CompareSide, pct: tuple[float, float, float], text: str
) -> None:
    assert _slowdown_note(base, other, against(pct)) == text


def test_the_folder_has_the_pages_that_report_makes_again(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(engine, engine, out=out, **SHORT)
    written = {"compare": "compare.json", "report_md": "report.md", "report_html": "report.html"}
    assert report.artifacts == {name: str(out / file) for name, file in written.items()}
    assert (out / "report.html").read_text() == te.report(out, "html")
    assert (out / "report.md").read_text() == te.report(out, "md")
    page = (out / "report.html").read_text()
    assert "runs in" in page[page.index("The engines") :]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    with pytest.raises(errors.UsageError, match="was not written by trt-engine"):
        run(engine, engine, out=tmp_path / "mine", **SHORT)


def test_what_the_fewest_rounds_take_is_said_before_they_begin(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_min_duration_s", lambda items, schedule: 26.0)
    with caplog.at_level("INFO"):
        run(engine, engine, **SHORT)
    said = [record.getMessage() for record in caplog.records]
    (early,) = [text for text in said if text.startswith("this takes about 26 s, not")]
    assert said.index(early) == next(n for n, text in enumerate(said) if text.startswith("comparing `")) + 1


def test_records_and_engines_are_not_mixed(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="named together"):
        run(record_file(tmp_path, engine), engine)
    with pytest.raises(errors.UsageError, match="no outputs"):
        run(record_file(tmp_path, engine), record_file(tmp_path, engine), fail_if=["error:1"])
