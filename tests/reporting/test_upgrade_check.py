"""`upgrade-check`: engines of two library versions, one verdict, the exit code of the worst gate."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_matrix import done, evaluated, profile, spec, write
from sample_runs import CPU, record

import trt_engine as te
from documents import document
from onnx_models import conv_net
from trt_engine.cli.main import run
from trt_engine.errors import AccuracyError, EngineError, PrecisionError, SpeedError, UnstableError, UsageError
from trt_engine.records.base import append_record
from trt_engine.records.parity import OutputError, Parity
from trt_engine.records.sweep import CellResult

CLASSIFIER = Path(__file__).resolve().parents[2] / "examples" / "classifiers" / "resnet.onnx"
OLD = replace(CPU, libraries={"onnxruntime": "1.24.4", "numpy": "2.3.1"})
NEW = replace(CPU, libraries={"onnxruntime": "1.31.1", "numpy": "2.3.1"})
FP32, INT8 = (spec("digits", precision, "onnxruntime", 8) for precision in ("fp32", "int8"))
FAILED = {"state": "failed", "bench": None, "evaluation": None, "parity": None, "engine": None, "dtype_shares": {}}


def version(folder: Path, environment: Any, *cells: CellResult) -> Path:
    """A run folder of one version."""
    placed = [
        replace(cell, bench=replace(cell.bench, environment=environment) if cell.bench is not None else None)
        for cell in cells
    ]
    return write(folder, placed, environment=environment)


def fp32(mean_ms: float = 12.0, seed: int = 1, **changes: Any) -> CellResult:
    return done(FP32, mean_ms, ap=changes.pop("ap", 0.61), bench_changes={"seed": seed}, **changes)


def int8(mean_ms: float = 6.0, seed: int = 3, noise: float = 0.0, **changes: Any) -> CellResult:
    cell = done(INT8, mean_ms, ap=changes.pop("ap", 0.60), bench_changes={"seed": seed}, **changes)
    if noise and cell.bench is not None:
        draw = random.Random(seed)
        times = tuple(mean_ms * draw.uniform(1 - noise, 1 + noise) for _ in range(60))
        cell = replace(cell, bench=replace(cell.bench, compute_ms=times))
    return cell


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return version(tmp_path / "old", OLD, fp32(), int8())


def test_nothing_worse_is_an_upgrade(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = version(tmp_path / "new", NEW, fp32(11.0, 2), int8(6.0, 4))
    assert run(["upgrade-check", str(old), str(new), "-o", str(tmp_path / "page")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Upgrade: every gate passed.") and "1.24.4" in text and "1.31.1" in text
    found = document((tmp_path / "page" / "upgrade.json").read_text())
    assert found["versions"] == {"onnxruntime": ["1.24.4", "1.31.1"]}
    speed = found["items"][0]["comparison"]["speed"][0]
    assert speed["slower_pct"]["high"] < -5 and speed["verdict"] == "faster"
    for name in ("report.html", "report.md"):
        page = (tmp_path / "page" / name).read_text()
        assert "every gate passed" in page and "digits-int8-onnxruntime-b8" in page


WORSE = {
    "plan": (EngineError, 10, int8(**FAILED, reason="no kernel for `Conv_3`", exit_code=5)),
    "accuracy": (AccuracyError, 7, int8(ap=0.58)),
    "precision": (PrecisionError, 6, int8(dtype_shares={"float32": 0.9, "int8": 0.1})),
    "maybe-slower:3%": (SpeedError, 8, int8(6.6, 4)),  # a difference of single loads proves no more
}


@pytest.mark.parametrize("gate", WORSE)
def test_each_gate_fails_with_its_own_exit_code(
    gate: str, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, code, cell = WORSE[gate]
    new = version(tmp_path / "new", NEW, fp32(12.0, 2), cell)
    rules = [gate] if "slower" in gate else []
    assert run(["upgrade-check", str(old), str(new), "--json", *(f"--fail-if={rule}" for rule in rules)]) == code
    out, err = capsys.readouterr()
    found = document(out)
    assert [item["rule"] for item in found["gates"] if item["failed"]] == [gate]
    assert found["verdict"] == "do not upgrade" and found["exit_code"] == code
    assert "`digits-int8-onnxruntime-b8`" in err and "do not upgrade" in err
    with pytest.raises(kind):
        te.upgrade_check(old, new, fail_if=rules or ["slower:3%"])


def test_the_worst_gate_decides_and_all_are_named(old: Path, tmp_path: Path) -> None:
    new = version(tmp_path / "new", NEW, fp32(15.0, 2, ap=0.5), int8(6.0, 4, dtype_shares={"float32": 1.0}))
    with pytest.raises(AccuracyError) as error:
        te.upgrade_check(old, new, fail_if=["maybe-slower:3%"])
    parts = ["accuracy: ", "AP 0.6100 -> 0.5000", "precision: ", "int8 92 % -> 0", "slower:3%: "]
    places = [error.value.message.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("code, kind", [(6, PrecisionError), (7, AccuracyError), (5, EngineError), (11, EngineError)])
def test_a_build_that_fails_is_the_gate_of_its_error(old: Path, tmp_path: Path, code: int, kind: type) -> None:
    new = version(tmp_path / "new", NEW, fp32(12.0, 2), int8(**FAILED, reason="worse", exit_code=code))
    with pytest.raises(kind, match="NEW has no engine, failed: worse"):
        te.upgrade_check(old, new)


def test_small_changes_are_within_the_limits_and_limits_can_be_changed(old: Path, tmp_path: Path) -> None:
    cell = int8(6.1, 4, ap=0.596, dtype_shares={"int8": 0.89, "float32": 0.11})
    new = version(tmp_path / "new", NEW, fp32(12.0, 2), cell)
    assert te.upgrade_check(old, new).verdict == "upgrade"
    with pytest.raises(AccuracyError):
        te.upgrade_check(old, new, max_drop=0.003)
    with pytest.raises(SpeedError):
        te.upgrade_check(old, new, fail_if=["maybe-slower:0.5%"])
    with pytest.raises(UsageError, match="no outputs"):
        te.upgrade_check(old, new, fail_if=["error:1e-3"])


UNDECIDED: dict[str, tuple[list[CellResult], str]] = {
    "a cell is missing": ([fp32(12.0, 2)], "is in OLD alone"),
    "a cell was not reached": ([fp32(12.0, 2), int8(**(FAILED | {"state": "interrupted"}))], "NEW has no engine"),
    "other images": (
        [
            fp32(12.0, 2),
            int8(6.0, 4, evaluation=replace(evaluated("x", {"AP": 0.6}), dataset_digest="sha256:00")),
        ],
        "different images",
    ),
    "not evaluated": ([fp32(12.0, 2), int8(6.0, 4, evaluation=None)], "NEW was not evaluated"),
    "not measured": ([fp32(12.0, 2), int8(bench=None)], "cannot be judged without an interval of median"),
    "too noisy": ([fp32(12.0, 2), int8(6.0, 4, noise=0.9)], "would likely be missed"),
    "no layers": ([fp32(12.0, 2), int8(6.0, 4, dtype_shares={})], "dtypes of the layers are not known"),
}


@pytest.mark.parametrize("case", UNDECIDED)
def test_what_cannot_be_judged_has_not_passed(case: str, old: Path, tmp_path: Path) -> None:
    cells, reason = UNDECIDED[case]
    new = version(tmp_path / "new", NEW, *cells)
    report = te.upgrade_check(old, new)
    assert (report.verdict, report.exit_code) == ("undecided", 0) and reason in report.reason
    with pytest.raises(UnstableError, match="undecided"):
        te.upgrade_check(old, new, strict=True)


@pytest.mark.parametrize("unstable", ["old", "new"])
def test_an_unstable_measurement_fails_no_gate_and_the_text_names_only_what_it_is_about(
    unstable: str, tmp_path: Path
) -> None:
    def cell(mean_ms: float, seed: int, name: str) -> CellResult:
        made = int8(mean_ms, seed)
        assert made.bench is not None
        return replace(made, bench=replace(made.bench, stable=name != unstable))

    old = version(tmp_path / "old", OLD, fp32(), cell(6.0, 3, "old"))
    report = te.upgrade_check(old, version(tmp_path / "new", NEW, fp32(10.0, 2), cell(9.0, 4, "new")))
    assert (report.verdict, report.exit_code) == ("undecided", 0) and "by turns" in report.reason
    assert "digits-int8" in report.reason and "digits-fp32" not in report.reason


def test_without_images_each_version_is_compared_with_plain_onnxruntime(tmp_path: Path) -> None:
    bad = Parity("onnxruntime", "seeded random", 0.05, False, {"y": OutputError(0.9, 0.1, 0.31, 0.9)})
    old = version(tmp_path / "old", OLD, fp32(evaluation=None))
    good = version(tmp_path / "good", NEW, fp32(12.0, 2, evaluation=None))
    assert te.upgrade_check(old, good).verdict == "upgrade"
    with pytest.raises(AccuracyError, match=r"0\.004 -> 0\.31"):
        te.upgrade_check(old, version(tmp_path / "bad", NEW, fp32(12.0, 2, evaluation=None, parity=bad)))


def write_turns(folder: Path, engines: dict[str, str], *, stable: bool = False) -> None:
    """Six measurements of OLD and of NEW, 20 % slower, by turns."""
    for name, environment, mean_ms in (("old", OLD, 10.0), ("new", NEW, 12.0)):
        for turn in range(6):
            second = 2 * turn + (name == "new")
            bench = record(8, mean_ms, 200, seed=turn, environment=environment, engine=engines[name])
            started = f"2026-03-04T05:06:{second:02}+00:00"
            append_record(folder / name / "records.jsonl", replace(bench, started=started, stable=stable))


@pytest.mark.parametrize("width", [16, 8])
def test_a_slowdown_fails_a_gate_where_both_engines_are_of_one_model(tmp_path: Path, width: int) -> None:
    engines = {}
    for name, wide in (("old", 16), ("new", width)):
        (tmp_path / name).mkdir()
        engine = te.build(conv_net(tmp_path / name / "net.onnx", width=wide), out=tmp_path / name / "net.engine.onnx")
        engines[name] = str(engine.path)
    write_turns(tmp_path, engines)
    try:
        verdict = te.upgrade_check(tmp_path / "old", tmp_path / "new").verdict
    except SpeedError:
        verdict = "do not upgrade"
    assert verdict == ("do not upgrade" if width == 16 else "undecided")


def test_repeated_measurements_are_restarts_and_turns_are_recognised(tmp_path: Path) -> None:
    write_turns(tmp_path, {"old": "old.onnx", "new": "new.onnx"})
    with pytest.raises(SpeedError, match="slower by median"):
        te.upgrade_check(tmp_path / "old", tmp_path / "new")
    report = te.upgrade_check(tmp_path / "old", tmp_path / "new", fail_if=["slower:40%"])
    assert report.items[0].new.restarts == 6 and report.method.endswith("interleaved")
    assert not any("at another time" in text for text in report.warnings)
    assert report.items[0].comparison.speed[0].slower_pct.value == pytest.approx(20, abs=2)


def test_layers_come_from_profiles_where_the_engines_are_not_there(tmp_path: Path) -> None:
    profiled = profile("digits", device="cpu")
    assert profiled.layers is not None
    fewer = replace(profiled, layers=replace(profiled.layers, rows=profiled.layers.rows[1:]))
    old = version(tmp_path / "old", OLD, fp32(profiled=profiled))
    new = version(tmp_path / "new", NEW, fp32(12.0, 2, profiled=fewer))
    structure = te.upgrade_check(old, new).items[0].comparison.structure
    assert structure is not None and [change.change for change in structure.changes] == ["removed"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> te.Engine:
    folder = tmp_path_factory.mktemp("engine")
    return te.build(CLASSIFIER, precision="fp32", batch=(1, 2, 2), out=folder / "new.engine.onnx")


def other_version(engine: te.Engine, path: Path, library: str, built: str, **requirements: Any) -> te.Engine:
    """The engine as another version would have made it, by its passport."""
    made = engine.copy_to(path)
    needs = replace(made.passport.requirements, library=library, version=built, **requirements)
    environment = replace(made.passport.environment, libraries={library: built})
    return te.Engine.seal(made.path, replace(made.passport, requirements=needs, environment=environment))


def test_two_engine_files_are_compared_but_for_their_speed(engine: te.Engine, tmp_path: Path) -> None:
    old = other_version(engine, tmp_path / "old.engine.onnx", "onnxruntime", "1.24.4")
    report = te.upgrade_check(old.path, engine.path)
    (item,) = report.items
    assert report.verdict == "undecided" and report.reason.startswith("slower:3%: ")
    assert [gate.rule for gate in report.gates if gate.evaluated] == ["plan", "accuracy", "precision"]
    assert item.comparison.structure is not None and not item.comparison.structure.changes
    assert item.compatibility.status == "penalty" and item.old.library == "onnxruntime 1.24.4"
    engine_bytes = old.path.read_bytes()
    old.path.write_bytes(engine_bytes[:-1])
    te.upgrade_check(old.path, engine.path)  # the old one is no longer needed
    with pytest.raises(EngineError, match="was changed after it was sealed"):
        te.upgrade_check(engine.path, old.path)


@pytest.mark.parametrize(
    "library, old, new, requirements, status",
    [
        ("tensorrt", "10.16.1.11", "11.4.0.106", {}, "rebuild"),
        ("tensorrt", "10.16.1.11", "11.4.0.106", {"version_compatible": True}, "loads"),
        ("tensorrt", "8.6.1.6", "11.4.0.106", {"version_compatible": True}, "rebuild"),
        ("tensorrt", "11.4.0.106", "11.4.0.106", {}, "loads"),
        ("tensorrt-rtx", "1.6.0.1", "1.7.1.116", {"version_compatible": True}, "rebuild"),
        ("onnxruntime", "1.31.1", "1.24.4", {}, "rebuild"),
        ("torch", "2.13.0", "2.14.0", {}, "unknown"),
    ],
)
def test_whether_old_plans_load_and_the_gate_that_wants_them_to(
    engine: te.Engine, tmp_path: Path, library: str, old: str, new: str, requirements: dict[str, Any], status: str
) -> None:
    sides = [
        other_version(engine, tmp_path / name, library, version, **requirements).path
        for name, version in (("old.engine.onnx", old), ("new.engine.onnx", new))
    ]
    report = te.upgrade_check(*sides)
    assert report.items[0].compatibility.status == status and not report.exit_code
    if status == "rebuild":
        with pytest.raises(EngineError, match="plan: "):
            te.upgrade_check(*sides, keep_plans=True)
    else:
        assert te.upgrade_check(*sides, keep_plans=True).gates[0].evaluated == (status == "loads")


@pytest.mark.parametrize("path, reason", [("nothing", "no such folder"), ("model.onnx", "is a model")])
def test_what_is_neither_a_run_nor_an_engine_is_refused(path: str, reason: str, old: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07")
    with pytest.raises(UsageError, match=reason):
        te.upgrade_check(old, tmp_path / path)


OTHER_PYTHON = os.environ.get("TRT_ENGINE_TEST_OLD_ONNXRUNTIME_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_PYTHON, reason="needs an environment with an older ONNX Runtime (make test-full)")
@pytest.mark.timeout(900)
def test_two_releases_of_onnxruntime_in_two_environments(tmp_path: Path) -> None:
    """One plan, run by each version; speed on a busy machine may end either way, everything else is the same."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"models: [{{name: resnet, path: {CLASSIFIER}, precisions: [fp32, int8]}}]\n"
        f"batches: [2]\nmodes: [build, bench]\nwarmup: 2\niterations: 20\ncalib_data: random\n"
    )
    versions = {}
    for name, python in (("old", str(OTHER_PYTHON)), ("new", sys.executable)):
        ask = [python, "-c", "import onnxruntime; print(onnxruntime.__version__)"]
        versions[name] = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
        command = [python, "-c", "import sys; from trt_engine.cli.main import main; sys.exit(main())"]
        made = subprocess.run(
            [*command, "run", str(plan), "-o", str(tmp_path / name)], capture_output=True, text=True, timeout=400
        )
        assert made.returncode == 0, made.stderr
    report = te.upgrade_check(tmp_path / "old", tmp_path / "new", fail_if=["slower:1000000%"], out=tmp_path / "page")
    assert report.versions["onnxruntime"] == (versions["old"], versions["new"]) and versions["old"] != versions["new"]
    assert not report.unmatched and [item.compatibility.status for item in report.items] == ["penalty"] * 2
    assert [gate.rule for gate in report.gates if gate.evaluated][:3] == ["plan", "accuracy", "precision"]
    for item in report.items:
        assert item.comparison.structure is not None and item.comparison.speed[0].metric == "median"
    with pytest.raises(EngineError, match="is the older"):  # plans of the new version do not go back
        te.upgrade_check(tmp_path / "new", tmp_path / "old", keep_plans=True)
