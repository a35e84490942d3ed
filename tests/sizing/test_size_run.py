"""What a run promises: the tree, the records, the partial record, the gates. Builds are real, throughputs are planted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from planted import at, record

from trt_engine import errors
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.graph.load import open_model
from trt_engine.records.bench import BenchRecord
from trt_engine.verbs.size import size_plan, size_run
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.run import size

pytestmark = pytest.mark.usefixtures("kept_engines")

Planted = Callable[[Engine, BenchConfig], BenchRecord]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Planted], list[tuple[str, BenchConfig]]]:
    """Puts a planted measurement where the child process is asked; what was asked for is kept."""

    def plant(answer: Planted) -> list[tuple[str, BenchConfig]]:
        asked: list[tuple[str, BenchConfig]] = []

        def measure(
            engine: Engine,
            config: BenchConfig,
            runtime: RuntimeConfig,
            *,
            memory_limit: int | None = None,
            on_progress: Any = None,
        ) -> BenchRecord:
            engine.verify()
            asked.append((engine.path.name, config))
            return replace(answer(engine, config), engine=str(engine.path))

        monkeypatch.setattr(size_run, "measure_isolated", measure)
        return asked

    return plant


def flat(images: int) -> Planted:
    """The same throughput at every batch."""
    return lambda engine, config: at(images, config.batch or engine.signature.inputs[0].shape[0])


def document(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "size.json").read_text())
    return made


def test_the_tree_of_two_engines_is_the_sources(make_model, measured, tmp_path: Path) -> None:
    path = make_model("models/yolo/model/net.onnx")
    asked = measured(flat(100 * 30))
    report = size(path, start_batch=64, max_batch=1024)
    root = tmp_path / "models" / "yolo" / "benchmarks"
    found = {str(item.relative_to(root)) for item in root.rglob("*") if item.is_file()}
    stamped = {name for name in found if name.endswith(".log") and name.startswith("engines/")}
    assert found - stamped == {
        "engines/net_dynamic_b64.onnx",
        "engines/net_dynamic_b64.onnx.json",
        "engines/net_dynamic_b128.onnx",
        "engines/net_dynamic_b128.onnx.json",
        "b1/trtexec_b1.log",
        "b64/trtexec_b64.log",
        "b128/trtexec_b128.log",
        "size.json",
        "records.jsonl",
        "report.md",
        "report.html",
        "benchmark_data.json",
    }
    assert sorted(re.sub(r"\d{8}_\d{6}", "TIME", name) for name in stamped) == [
        "engines/net_dynamic_build_TIME.log",
        "engines/net_dynamic_build_b128_TIME.log",
    ]
    assert (report.engines_built, report.measurements, report.peak_streams) == (2, 3, 100)
    assert report.stop_reason == "peak_within_batch"
    assert report.model_name == "yolo"
    assert [(name, config.batch) for name, config in asked] == [
        ("net_dynamic_b64.onnx", 1),
        ("net_dynamic_b64.onnx", 64),
        ("net_dynamic_b128.onnx", 128),
    ]
    assert all(Path(path).exists() for path in report.artifacts.values())


def test_the_document_on_disk_is_the_report_and_the_records_have_every_sample(
    make_model, measured, tmp_path: Path
) -> None:
    measured(flat(90))
    report = size(make_model(), out=tmp_path / "out", max_batch=8)
    made = document(tmp_path / "out")
    assert (made["schema"], made["schema_version"], made["complete"]) == ("trt-engine/size", 1, True)
    assert made["command"].startswith("trt-engine size ")
    own = msgspec.to_builtins(report)
    assert {name: made[name] for name in own if name != "warnings"} == {
        name: value for name, value in json.loads(json.dumps(own)).items() if name != "warnings"
    }
    assert [batch["batch"] for batch in made["batches"]] == [1, 8]
    lines = (tmp_path / "out" / "records.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=BenchRecord) for line in lines]
    assert [one.batch for one in records] == [1, 8]
    assert all(one.compute_ms for one in records)
    assert [step["name"] for step in made["steps"]] == [
        "preflight", "inspect", "build b8", "measure b1", "measure b8", "report",
    ]  # fmt: skip


def test_open_height_and_width_stop_with_the_option_to_add(make_model, measured, tmp_path: Path) -> None:
    path = make_model(height="height", width="width")
    with pytest.raises(errors.ShapeError, match=r"dimension 2 \(height\) and 3 \(width\) must be given") as refused:
        size(path, out=tmp_path / "out")
    assert "--shapes images:1x3x640x640" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()
    measured(flat(30))
    report = size(path, out=tmp_path / "out", max_batch=2, shapes={"images": (1, 3, 16, 24)})
    assert report.nvinfer.get("batch-size") == "2"
    assert Engine.open(str(report.engine)).passport.profiles[0].ranges["images"].max == (2, 3, 16, 24)


def test_a_model_that_changes_under_the_run_is_not_sized_as_it_was(make_model, measured, tmp_path: Path) -> None:
    path = make_model()
    made = size_plan.plan(path, SizeConfig(out=tmp_path / "out"), BuildConfig())
    with path.open("ab") as file:
        file.write(onnx.ModelProto(doc_string="another").SerializeToString())
    with pytest.raises(errors.ModelError, match="changed during the run"):
        size_run.execute(made)


def test_a_fixed_batch_is_measured_once_at_its_own_size(make_model, measured, tmp_path: Path) -> None:
    asked = measured(flat(900))
    report = size(make_model(batch=4), out=tmp_path / "out", scan=True)
    assert [config.batch for _, config in asked] == [None]
    assert (report.engines_built, report.measurements, report.peak_streams) == (1, 1, 30)
    assert report.stop_reason == "static_batch"
    assert [result.batch for result in report.batches] == [4]
    assert (tmp_path / "out" / "engines" / "net_static_b4.onnx").exists()
    assert any("batch is fixed at 4" in note for note in report.notes)


def test_out_of_memory_leaves_the_last_good_answer(make_model, measured, tmp_path: Path) -> None:
    def answer(engine: Engine, config: BenchConfig) -> BenchRecord:
        if config.batch is not None and config.batch > 8:
            raise errors.MemoryExhausted("out of memory", hint="less")
        return at(10_000, config.batch or 1)

    measured(answer)
    report = size(make_model(), out=tmp_path / "out", start_batch=4, max_batch=64)
    assert (report.stop_reason, report.out_of_memory, report.batches[-1].batch) == ("out_of_memory", (16,), 8)
    assert str(report.engine).endswith("b8.onnx")
    assert report.artifacts["engine"] == report.engine
    assert report.complete


def test_nothing_fits_is_out_of_memory_with_a_partial_record(make_model, measured, tmp_path: Path) -> None:
    def answer(engine: Engine, config: BenchConfig) -> BenchRecord:
        raise errors.MemoryExhausted("out of memory", hint="less")

    measured(answer)
    with pytest.raises(errors.MemoryExhausted):
        size(make_model(), out=tmp_path / "out", max_batch=4)
    made = document(tmp_path / "out")
    assert (made["complete"], made["stop_reason"], made["out_of_memory"]) == (False, "failed", [4, 2, 1])
    assert made["peak_streams"] is None
    assert made["error"] == "out of memory"


@pytest.mark.parametrize(
    ("phase", "batches", "peak"),
    [("build b2", 0, None), ("measure b1", 0, None), ("measure b2", 1, None), ("measure b4", 2, 300), ("scan", 2, 300),
     ("report", 2, 300)],
)  # fmt: skip
def test_ctrl_c_in_any_phase_leaves_what_is_known_and_no_half_engine(
    make_model, measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str, batches: int, peak: int | None
) -> None:
    def answer(engine: Engine, config: BenchConfig) -> BenchRecord:
        if phase == f"measure b{config.batch}" or (phase == "scan" and (config.duration_s or 0) < 10):
            raise errors.Interrupted("interrupted", partial=replace(at(9000, config.batch or 1), complete=False))
        return at(9000, config.batch or 1)

    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    measured(answer)
    if phase == "build b2":
        monkeypatch.setattr(size_run.build_module, "execute", interrupted)
    if phase == "report":
        monkeypatch.setattr(size_run, "write_reports", interrupted)
    out = tmp_path / "out"
    with pytest.raises(errors.Interrupted, match=f"interrupted during {phase}") as stopped:
        size(make_model(), out=out, start_batch=2, max_batch=4, scan=True)
    assert stopped.value.exit_code == 130
    assert "size.json" in str(stopped.value.hint)
    made = document(out)
    assert (made["complete"], made["stop_reason"]) == (False, "interrupted")
    assert len(made["batches"]) == batches
    assert made["peak_streams"] == peak
    lines = [line for path in out.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    incomplete = [line for line in lines if not msgspec.json.decode(line, type=BenchRecord).complete]
    assert len(incomplete) == (phase.startswith("measure") or phase == "scan")
    for passport in (out / "engines").glob("*.onnx.json"):
        Engine.open(passport).verify()
    assert not list(out.rglob("*.tmp"))


def test_ctrl_c_in_the_preflight_keeps_the_results_of_an_earlier_run(
    make_model, measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured(flat(30))
    path, out = make_model(), tmp_path / "out"
    size(path, out=out, max_batch=2)
    before = {item: item.read_bytes() for item in out.iterdir() if item.is_file()}

    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(size_run.Preflight, "run", interrupted)
    with pytest.raises(errors.Interrupted, match="interrupted during preflight"):
        size(path, out=out, max_batch=2)
    assert {item: item.read_bytes() for item in out.iterdir() if item.is_file()} == before
    with pytest.raises(errors.Interrupted):
        size(path, out=tmp_path / "fresh", max_batch=2)
    assert document(tmp_path / "fresh")["complete"] is False


def test_a_failed_build_leaves_its_log_and_what_was_measured(
    make_model, measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    execute = size_run.build_module.execute

    def build(plan: Any) -> Any:
        if "b4" in plan.out.name:
            raise errors.BuildError("no implementation for node `x`", hint="lower the level")
        return execute(plan)

    monkeypatch.setattr(size_run.build_module, "execute", build)
    measured(flat(9000))
    out = tmp_path / "out"
    with pytest.raises(errors.BuildError, match="no implementation"):
        size(make_model(), out=out, start_batch=2, max_batch=8)
    made = document(out)
    assert (made["complete"], made["stop_reason"], made["peak_streams"]) == (False, "failed", 300)
    (log,) = (out / "engines").glob("*_build_b4_*.log")
    assert "error: no implementation for node `x`" in log.read_text()


def test_a_scan_measures_sizes_above_n_on_an_engine_built_for_them(make_model, measured, tmp_path: Path) -> None:
    asked = measured(lambda engine, config: at(300 if config.batch in (5, 6) else 3000, config.batch or 1))
    report = size(make_model(), out=tmp_path / "out", max_batch=4, scan=True, scan_width=3)
    assert [point.batch for point in report.cliffs] == [1, 2, 3, 4, 5, 6, 7]
    assert report.slow_batches == (5, 6)
    assert [(point.batch, point.engine) for point in report.cliffs if point.batch in (4, 5)] == [
        (4, "net_dynamic_b4.onnx"),
        (5, "net_dynamic_b7.onnx"),
    ]
    assert (report.engines_built, report.scan_engines) == (2, 1)
    assert (report.measurements, report.scan_measurements) == (11, 9)
    assert {config.duration_s for _, config in asked[2:]} == {1.0}
    assert any("avoid batch 5-6" in warning for warning in report.warnings)
    assert [step.name for step in report.steps][-2:] == ["scan", "report"]
    assert report.batches[-1].batch == 4, "the scan does not change the answer"
    assert len((tmp_path / "out" / "records.jsonl").read_bytes().splitlines()) == 2, "the scan's are kept apart"
    assert len((tmp_path / "out" / "scan.jsonl").read_bytes().splitlines()) == 9


def test_gates_speak_after_everything_is_written(make_model, measured, tmp_path: Path) -> None:
    measured(lambda engine, config: record(config.batch or 1, queries=30, stable=False))
    path = make_model()
    with pytest.raises(errors.UnstableError, match=r"batch 1: the mean drifts by 9 %"):
        size(path, out=tmp_path / "a", max_batch=2, strict=True)
    with pytest.raises(errors.CapacityError, match="2 streams at 30 fps, 3 required"):
        size(path, out=tmp_path / "b", max_batch=2, min_streams=3)
    for folder in ("a", "b"):
        assert document(tmp_path / folder)["complete"] is True
        assert (tmp_path / folder / "report.html").exists()
    size(path, out=tmp_path / "c", max_batch=2, min_streams=2)


def test_a_second_run_replaces_the_results_of_the_first_and_reuses_its_engine(
    make_model, measured, tmp_path: Path
) -> None:
    measured(flat(60))
    path, out = make_model(), tmp_path / "out"
    size(path, out=out, max_batch=2)
    (out / "mine.txt").write_text("x")
    again = size(path, out=out, max_batch=2)
    assert len((out / "records.jsonl").read_bytes().splitlines()) == 2
    assert any("from the store" in note for note in again.notes)
    assert (out / "mine.txt").exists()


def test_two_runs_do_not_write_into_one_folder(make_model, measured, tmp_path: Path) -> None:
    path, out = make_model(), tmp_path / "out"
    plan = size_plan.plan(path, SizeConfig(out=out, max_batch=2), BuildConfig())

    def second(engine: Engine, config: BenchConfig) -> BenchRecord:
        with pytest.raises(errors.SetupError, match="another `size` is writing"):
            size_run.execute(plan)
        return at(30, config.batch or 1)

    measured(second)
    size(path, out=out, max_batch=2)
    assert document(out)["complete"] is True
    assert not (out / ".size.lock").exists()


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"fps": 0}, errors.UsageError, "fps"),
        ({"fps": -1.0}, errors.UsageError, "fps"),
        ({"max_batch": 0}, errors.UsageError, "max-batch"),
        ({"start_batch": 0}, errors.UsageError, "start-batch"),
        ({"duration_s": 0}, errors.UsageError, "duration"),
        ({"scan_width": 0}, errors.UsageError, "scan-width"),
        ({"batch": "1:2:4"}, errors.UsageError, "sets the batch"),
        ({"max_bach": 4}, errors.UsageError, "no argument `max_bach`"),
        ({"options": {"no_such": "1"}}, errors.UsageError, "no_such"),
        ({"backend": "no-such"}, errors.UsageError, "unknown backend"),
        ({"device": "cuda:99"}, errors.TrtEngineError, "cuda"),
        ({"shapes": {"image": (1, 3, 8, 8)}}, errors.UsageError, "unknown input `image`"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_written(
    make_model, tmp_path: Path, settings: dict[str, Any], kind: type[errors.TrtEngineError], match: str
) -> None:
    path = make_model()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(kind, match=match):
        size(path, out=tmp_path / "out", **settings)
    assert set(tmp_path.rglob("*")) == before


def test_the_command_of_a_python_call_can_be_pasted(make_model, tmp_path: Path) -> None:
    plan = size_plan.plan(
        make_model(),
        SizeConfig(out=tmp_path / "out", max_batch=8, duration_s=0.5, scan=True, memory_limit=1 << 30),
        BuildConfig(parity=False, shapes={"images": (1, 3, 8, 8)}, options={"arena": "off"}),
    )
    words = plan.command.split()
    assert words[:3] == ["trt-engine", "size", str(tmp_path / "net.onnx")]
    text = " ".join(words[3:])
    for part in (
        "--max-batch 8", "--duration 0.5", "--scan", "--no-parity", "--shapes images:1x3x8x8", "-O arena=off",
        "--memory-limit 1073741824B",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("build", "precision", "chosen"),
    [
        (BuildConfig(device="cuda:0"), "fp16", True),
        (BuildConfig(device="cuda:0", precision="fp32"), "fp32", False),
        (BuildConfig(device="cuda:0", precision="tf32"), "tf32", False),
        (BuildConfig(device="cpu"), None, False),
    ],
)
def test_an_fp32_graph_is_sized_in_fp16_on_a_gpu_unless_told_otherwise(
    make_model, build: BuildConfig, precision: str | None, chosen: bool
) -> None:
    found, said = size_plan._default_precision(open_model(make_model()), build)
    assert (found.precision, said) == (precision, chosen)


def test_a_smaller_batch_that_delivered_more_is_said(make_model, measured, tmp_path: Path) -> None:
    rates = {1: 100, 4: 9000, 8: 6000}
    measured(lambda engine, config: at(rates[config.batch or 1], config.batch or 1))
    report = size(make_model(), out=tmp_path / "out", start_batch=4, max_batch=8)
    assert report.peak_streams == 200
    assert any("batch 4 delivered more: 9000.0 images/s, 300 streams" in note for note in report.notes)


@pytest.mark.parametrize(("device", "mode"), [("cuda:0", "0"), ("cpu", "2")])
def test_the_network_mode_is_what_the_engine_of_a_gpu_is(
    make_model, measured, tmp_path: Path, device: str, mode: str
) -> None:
    measured(lambda engine, config: replace(at(60, config.batch or 1), device=device))
    report = size(make_model(), out=tmp_path / "out", start_batch=2, max_batch=2)
    assert report.nvinfer["network-mode"] == mode  # the engine is fp32; TensorRT would make one for a GPU in fp16
