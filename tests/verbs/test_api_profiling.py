"""`te.profile`: a plain measurement, then the instruments with their reasons; a partial report after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import onnx_models as models
import trt_engine as te
from nsight_tools.stand_in import write_tool
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, SetupError, UsageError
from trt_engine.records.bench import BenchRecord
from trt_engine.records.percentiles import summarize
from trt_engine.records.profile import DevicePeak, DevicePeaks, InstrumentStatus, ProfileReport
from trt_engine.verbs.profile import profile_run
from trt_engine.verbs.profile.run import _runs_in_process

pytestmark = pytest.mark.usefixtures("kept_engines")

QUICK: dict[str, Any] = {"duration_s": 0, "warmup_s": 0, "iterations": 12, "inferences": 5, "warmup": 2}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.conv_net(tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture(scope="module")
def engine(net: Path) -> te.Engine:
    store = te.Store(net.with_name("store"))
    return te.build(net, batch=(1, 4, 8), out=net.with_name("net.engine.onnx"), parity=False, store=store)


@pytest.fixture(scope="module")
def fake(net: Path) -> te.Engine:
    store = te.Store(net.with_name("store"))
    return te.build(
        net, backend="fake", device="fake:0", batch=(1, 4, 8), out=net.with_name("net.fake"), parity=False, store=store
    )


def instrument(report: ProfileReport, name: str) -> InstrumentStatus:
    return next(item for item in report.instruments if item.name == name)


def test_on_a_cpu_the_layers_tell_and_every_rung_above_says_why_not(engine: te.Engine, tmp_path: Path) -> None:
    report = te.profile(engine, out=tmp_path / "out", **QUICK)
    assert [item.name for item in report.instruments] == ["nsys", "cupti", "torch", "layers", "host"]
    assert [item.name for item in report.instruments if item.used] == ["layers"]
    assert all("no GPU" in instrument(report, name).reason for name in ("nsys", "cupti", "torch"))
    assert report.layers is not None and report.inferences == 5 and not report.kernels
    assert sum(item.share for item in report.categories) == pytest.approx(1.0)
    assert report.categories[0].ms == max(item.ms for item in report.categories)
    assert report.precisions and sum(report.precisions.values()) == pytest.approx(1.0)
    assert report.batch == 4 and report.precision == "fp32" and report.complete
    assert int(report.runtime_info["flops"]) > 0 and int(report.runtime_info["nbytes"]) > 0


def test_a_device_with_events_has_its_copies_apart(fake: te.Engine, tmp_path: Path) -> None:
    report = te.profile(fake, out=tmp_path / "out", **QUICK)
    assert (
        report.time_breakdown.gpu_ms is not None
        and report.time_breakdown.h2d_ms is not None
        and report.time_breakdown.d2h_ms is not None
    )
    assert report.time_breakdown.compute_ms == report.time_breakdown.gpu_ms
    assert all(
        not instrument(report, name).used and instrument(report, name).fix for name in ("nsys", "cupti", "torch")
    )


@pytest.mark.parametrize("wanted", ["nsys", "cupti", "torch"])
def test_an_instrument_that_was_asked_for_and_is_not_to_be_had_is_an_error_before_anything_is_spent(
    wanted: Any, engine: te.Engine, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match=f"the profiler `{wanted}` is not available here: no GPU") as told:
        te.profile(engine, out=tmp_path / "out", profiler=wanted, **QUICK)
    assert told.value.exit_code == 3 and told.value.hint
    assert not (tmp_path / "out").exists()


def test_the_next_command_repeats_the_settings_that_were_given(net: Path, tmp_path: Path) -> None:
    report = te.profile(net, out=tmp_path / "out", batch=2, options={"intra_op_threads": "1"}, **QUICK)
    command = str(report.bottleneck.command)
    assert f" {net} " in command and command.endswith(" -O intra_op_threads=1")
    assert command.count("intra_op_threads") == 1


# ------------------------------------------------------------------------------------------------ when it does not fit


def test_out_of_memory_halves_the_batch_and_says_so(fake: te.Engine, tmp_path: Path) -> None:
    nbytes = 8 * 3 * 8 * 8 * 4  # the inputs of batch 8; its outputs do not fit beside them
    report = te.profile(fake, out=tmp_path / "out", batch=8, options={"memory": f"{nbytes}B"}, **QUICK)
    assert report.batch == 4 and report.shapes["images"][0] == 4
    assert [text for text in report.warnings if text.startswith("out of memory at batch 8")]


# ------------------------------------------------------------------------------------------------ when it ends early


def test_an_interruption_leaves_the_report_of_what_was_found(engine: te.Engine, tmp_path: Path) -> None:
    def stop(at: te.Progress) -> None:
        if "layer times" in at.text:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as told:
        te.profile(engine, out=tmp_path / "out", progress=stop, **QUICK)
    partial = told.value.partial
    assert isinstance(partial, ProfileReport) and not partial.complete and partial.compute_ms is not None
    assert "interrupted" in instrument(partial, "layers").reason
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["complete"] is False
    assert told.value.exit_code == 130


def test_nothing_of_an_earlier_profile_is_taken_for_this_ones(engine: te.Engine, tmp_path: Path) -> None:
    te.profile(engine, out=tmp_path / "out", **QUICK)
    old = tmp_path / "out" / "profile.nsys-rep"
    old.write_bytes(b"of yesterday")
    os.utime(old, (1_700_000_000, 1_700_000_000))
    report = te.profile(engine, out=tmp_path / "out", profiler="host", overwrite=True, **QUICK)
    assert not {"nsys", "timeline"} & set(report.files) and not (tmp_path / "out" / "timeline.json").exists()
    assert old.exists(), "and nothing is thrown away that is not ours to write"


def test_without_a_folder_a_run_of_its_own_is_made(
    engine: te.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = te.profile(engine, profiler="host", **QUICK)
    second = te.profile(engine, profiler="host", **QUICK)
    folders = {Path(report.files["profile"]).parent for report in (first, second)}
    assert len(folders) == 2 and all(folder.parent == Path("runs") for folder in folders)


# ------------------------------------------------------------------------------------------------ Nsight, by a stand-in


Tools = Callable[..., None]


@pytest.fixture
def nsight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Programs that behave as nsys or ncu, where ours finds them."""

    def put(name: str, **behaviour: Any) -> None:
        path = write_tool(tmp_path / name, name, **behaviour)
        monkeypatch.setenv(f"TRT_ENGINE_{name.upper()}", str(path))

    return put


def test_nsight_systems_is_taken_first_and_the_instruments_below_are_not_needed(
    nsight: Tools, fake: te.Engine, tmp_path: Path
) -> None:
    nsight("nsys")
    report = te.profile(fake, out=tmp_path / "out", **QUICK)
    assert [item.name for item in report.instruments if item.used] == ["nsys", "layers"]
    assert instrument(report, "cupti").reason == "not needed: a preferred profiler was available"
    assert report.kernels and report.inferences == 5 and report.time_breakdown.busy_ms is not None
    assert sum(item.share for item in report.categories) == pytest.approx(1.0)
    assert report.open_commands["nsys"].startswith("nsys-ui ") and Path(report.files["nsys"]).is_file()
    (line,) = (tmp_path / "out" / "records.jsonl").read_bytes().splitlines()
    record = msgspec.json.decode(line, type=BenchRecord)
    assert report.compute_ms == summarize(record.compute_ms), "profiled times are not among the benchmark's"


def test_a_capture_gives_the_kernels_their_categories_layers_and_the_split(
    nsight: Tools, fake: te.Engine, tmp_path: Path
) -> None:
    asked = te.profile(fake, out=tmp_path / "layers", profiler="layers", **QUICK)
    assert asked.layers is not None
    first, second = (row.name for row in asked.layers.rows[:2])
    nsight("nsys", layer_ranges=[first, second, first, second])  # gemm, relu, gemm, softmax
    report = te.profile(fake, out=tmp_path / "out", **QUICK)
    gemm = next(row for row in report.kernels if "gemm" in row.name)
    assert (gemm.calls, gemm.per_inference, gemm.category, gemm.layers) == (10, 2.0, "matrix", (first,))
    assert [item.category for item in report.categories] == ["matrix", "element-wise", "normalisation"]
    assert report.categories[0].ms == pytest.approx(gemm.ms_per_inference)
    split = report.time_breakdown
    assert split.kernels == 4.0 and split.working_ms == pytest.approx(
        sum(row.ms_per_inference for row in report.kernels)
    )
    assert split.busy_ms is not None and split.working_ms <= split.busy_ms, "copies are busy as well"
    assert split.compute_ms == split.gpu_ms, "what was measured without a profiler goes first"
    events = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    assert any("gemm" in str(event.get("args", {})) + event["name"] for event in events)


@pytest.mark.slow
def test_an_instrument_that_fails_is_passed_over_with_its_reason_and_fix(
    nsight: Tools, fake: te.Engine, tmp_path: Path
) -> None:
    nsight("nsys", fails="no_report")
    report = te.profile(fake, out=tmp_path / "out", **QUICK)
    assert not instrument(report, "nsys").used and instrument(report, "nsys").fix
    assert instrument(report, "layers").used and not report.kernels
    with pytest.raises(SetupError, match="the profiler `nsys` is not available here"):
        te.profile(fake, out=tmp_path / "asked", profiler="nsys", **QUICK)


@pytest.mark.slow
def test_missing_permission_is_explained_with_the_fixes_and_costs_the_counters_alone(
    nsight: Tools, fake: te.Engine, tmp_path: Path
) -> None:
    nsight("nsys")
    nsight("ncu", fails="permission")
    report = te.profile(fake, out=tmp_path / "out", ncu=2, **QUICK)
    refused = instrument(report, "ncu")
    assert not refused.used and "ERR_NVGPUCTRPERM" in refused.reason and refused.fix
    assert report.kernels and report.complete and not report.counters


@pytest.mark.slow
def test_the_counters_of_the_top_kernels_stand_beside_the_table(nsight: Tools, fake: te.Engine, tmp_path: Path) -> None:
    nsight("nsys")
    nsight("ncu")
    report = te.profile(fake, out=tmp_path / "out", ncu=1, **QUICK)
    assert instrument(report, "ncu").used, instrument(report, "ncu")
    assert [item.kernel for item in report.counters] == [report.kernels[0].name]
    for name in ("nsys", "ncu"):
        asked = json.loads((tmp_path / "out" / f"{name}.request.json").read_text())
        assert asked["warmup"] == QUICK["warmup"] and asked["config"]["iterations"] == QUICK["iterations"]


def test_a_listener_for_ranges_is_set_only_where_this_process_is_watched(
    nsight: Tools, engine: te.Engine, fake: te.Engine, net: Path
) -> None:
    def here(given: te.Engine | Path, profiler: str | None = None, **build: Any) -> bool:
        return _runs_in_process(given, RuntimeConfig(), BuildConfig(**build), profiler)

    assert here(fake) and here(fake, "cupti") and here(net, backend="onnxruntime", device="cuda:0")
    assert not here(engine) and not here(net), "a processor"
    assert not here(net, backend="trtexec"), "a program of its own"
    nsight("nsys")
    assert not here(fake), "Nsight watches a process of its own"
    assert here(fake, "cupti")


def test_the_folder_has_the_pages_that_report_makes_again_with_the_layers_first(
    engine: te.Engine, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    te.profile(engine, out=out, **QUICK)
    page = (out / "report.html").read_text()
    assert page == te.report(out, "html") and (out / "report.md").read_text() == te.report(out, "md")
    assert page.index("Slowest layers") < page.index("Time by layer type") < page.index('id="verdict"')
    assert "slowest layer" in page[: page.index("<nav")] and "FLOP/s" in page

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    with pytest.raises(UsageError, match="was not written by trt-engine"):
        te.profile(engine, out=tmp_path / "mine", **QUICK)


@pytest.mark.parametrize("peak", [1e-6, 1e6])
def test_a_kept_peak_that_a_layer_exceeds_is_measured_again_once(
    engine: te.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: float
) -> None:
    calls: list[dict[str, Any]] = []

    def kept(device: str, **how: Any) -> DevicePeaks:
        calls.append(how)
        value = 1e6 if how.get("remeasure") else peak
        items = (DevicePeak("fp32_matrix", value, "TFLOP/s", "measured", "planted"),)
        return DevicePeaks("planted", "key", items, "", Environment.detect())

    monkeypatch.setattr(profile_run, "device_peaks", kept)
    report = te.profile(engine, out=tmp_path / "out", **QUICK)
    again = [how for how in calls if how.get("remeasure")]
    assert len(again) == (peak < 1) and len(calls) == 1 + (peak < 1)
    assert report.peaks is not None and report.peaks.peaks[0].value == 1e6


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C is heard: a shell starts what runs in its background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_an_interrupted_instrument_saw_is_put_down_to_it(
    nsight: Tools, listening: None, fake: te.Engine, tmp_path: Path
) -> None:
    nsight("nsys", ctrl_c_after=2)
    with pytest.raises(Interrupted) as told:
        te.profile(fake, out=tmp_path / "out", **QUICK)
    report = told.value.partial
    assert isinstance(report, ProfileReport) and not report.complete
    assert [(row.calls, row.per_inference) for row in report.kernels if "gemm" in row.name] == [(4, 2.0)]
    assert instrument(report, "nsys").used and "interrupted after 2 inferences" in instrument(report, "nsys").reason
    assert not instrument(report, "cupti").used and "the run was stopped after 2 inferences" in report.warnings
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["complete"] is False
