"""What the report of a run of many cells, of a profile and of a comparison must say, in every form."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import sample_matrix
from sample_matrix import done, spec
from test_report_claims import _Text, words

from trt_engine.atomic_io import encode_json
from trt_engine.records.base import verb_document
from trt_engine.records.compare import GateResult, Interval
from trt_engine.records.parity import OutputError
from trt_engine.records.sweep import CellResult
from trt_engine.reporting.charts import GateLimit
from trt_engine.reporting.compare import interval_charts
from trt_engine.reporting.report import FORMATS, report, summarize_run, write_reports
from trt_engine.reporting.run_records import RunRecords
from trt_engine.reporting.speedup import Speedups


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(folder: Path, format: str = "text") -> str:
    return words(report(folder, format), format)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ cells


@pytest.mark.parametrize("format", FORMATS)
def test_failed_and_skipped_cells_stand_in_the_report_with_reason_and_remedy(tmp_path: Path, format: str) -> None:
    told = said(sample_matrix.matrix(tmp_path / "run"), format)
    assert "1 cell failed: missing · fp32 · onnxruntime · cpu · batch 1; the reasons stand below." in told
    if format == "text":  # tables are wrapped
        assert max(map(len, report(tmp_path / "run", format).splitlines())) <= 100
    else:
        assert "There is no file `models/missing/model/missing.onnx`." in told
        assert "check the path in the plan, line 12" in told
        assert "Needs an NVIDIA GPU with MXFP8, found none." in told
        assert "run it on a machine with compute capability 10.0" in told
    assert "6 of 8" in told[:400] and "hint:" not in told
    if format == "md":  # what became of a cell stands beside its name: the end of a wide table is out of sight
        assert "| missing-fp32-onnxruntime-b1 | failed |" in told


@pytest.mark.parametrize("format", FORMATS)
def test_one_image_list_is_named_and_different_ones_are_warned_of(tmp_path: Path, format: str) -> None:
    folder = sample_matrix.matrix(tmp_path / "run")
    assert sample_matrix.IMAGES in said(folder, format)
    assert "different lists of images" not in said(folder, format)
    other = done(spec("digits", "int8", "onnxruntime", 16), 9.0, ap=0.5, images_digest="sha256:" + "00" * 32)
    (folder / "cells" / "other.json").write_bytes(encode_json(verb_document("cell", other, command="x")))
    assert "digits: the cells saw different lists of images, so their accuracy does not compare." in said(
        folder, format
    )


def test_a_plan_that_was_killed_says_which_cells_were_not_reached(tmp_path: Path) -> None:
    folder = sample_matrix.everything(tmp_path / "run")
    told = said(folder)
    assert "1 cell not reached: int8 · batch 64." in told
    assert "run the same command again" in told and "Incomplete: the run was interrupted" in told
    assert not RunRecords.open(folder).complete


@pytest.mark.parametrize(
    "rules, warmup, measured",
    [
        ({"warmup_s": 0.0, "min_warmup": 50, "duration_s": 0.0, "min_iterations": 100}, "50 queries", "100 queries"),
        ({"warmup_s": 0.0, "min_warmup": 1, "duration_s": 2.0, "min_iterations": 1}, "1 query", "2 s and 1 query"),
        (
            {"warmup_s": 1.0, "min_warmup": 50, "duration_s": 2.0, "min_iterations": 9},
            "1 s and 50 queries",
            "2 s and 9 queries",
        ),
        ({"warmup_s": 0.0, "min_warmup": 0, "duration_s": 2.0, "min_iterations": 0}, "0 s", "2 s"),
    ],
)  # fmt: skip
def test_a_protocol_that_counts_queries_is_not_said_to_last_no_time(
    tmp_path: Path, rules: dict[str, float], warmup: str, measured: str
) -> None:
    cell = done(spec("net", "fp32", "onnxruntime", 1), 2.0)
    assert cell.bench is not None
    timed = replace(cell, bench=replace(cell.bench, protocol=replace(cell.bench.protocol, **rules)))  # type: ignore[arg-type]
    page = report(sample_matrix.write(tmp_path / "run", (timed,)), "md")
    assert f"| warm-up | {warmup} |" in page
    assert f"| measured | at least {measured} |" in page


def test_warnings_of_many_cells_that_differ_in_a_figure_are_said_once(tmp_path: Path) -> None:
    cells = [
        done(spec("digits", "fp32", "onnxruntime", 2**n), 2.0, warnings=(f"load average {n}.5 on 2 cores",))
        for n in range(6)
    ]
    told = said(sample_matrix.write(tmp_path / "run", cells))
    assert told.count("load average") == 1 and "6 cells (" in told and "the others alike" in told


def test_a_difference_of_rows_that_were_matched_first_is_said_to_be_that(tmp_path: Path) -> None:
    cells = [done(spec("m", "fp32", "fake", 8), 8.0), done(spec("m", "int8", "fake", 8), 7.0)]
    assert cells[1].parity is not None
    how = "6 rows of y matched by value, 2 left out"
    parity = replace(cells[1].parity, outputs={"y": OutputError(1.0, 0.1, 0.034, 0.99, rows_moved=6, rows_skipped=2)})
    told = said(sample_matrix.write(tmp_path / "run", [cells[0], replace(cells[1], parity=parity)]))
    assert f"on the same input. Of int8: {how}." in told


def test_a_hint_stands_behind_its_warning_and_not_as_a_word_in_it(tmp_path: Path) -> None:
    left_out = "evaluate was left out: pillow is not installed\nhint: `pip install pillow`"
    told = said(sample_matrix.write(tmp_path / "run", [done(spec("m", "fp32", "fake", 1), 2.0, warnings=(left_out,))]))
    assert "evaluate was left out: pillow is not installed; `pip install pillow`" in told and "hint:" not in told


def test_clocks_that_were_held_down_are_said_once(tmp_path: Path) -> None:
    cell = done(spec("m", "fp32", "onnxruntime", 1, "cuda:0"), 2.0)
    assert cell.bench is not None
    held = replace(cell.bench.clocks[-1], throttled=("sw_power_cap",))
    bench = replace(cell.bench, clocks=(*cell.bench.clocks[:-1], held))
    silent = said(sample_matrix.write(tmp_path / "silent", [replace(cell, bench=bench)]))
    warned = replace(bench, warnings=("GPU clocks were held down: sw_power_cap",))
    told = said(sample_matrix.write(tmp_path / "warned", [replace(cell, bench=warned)]))
    assert silent.count("sw_power_cap") == told.count("sw_power_cap") == 1


# ------------------------------------------------------------------------------------------------ the speed-up


def test_where_no_cell_is_faster_than_the_baseline_the_report_begins_with_that(tmp_path: Path) -> None:
    slower = [done(spec("m", "fp32", "fake", 8), 8.0), done(spec("m", "fp16", "fake", 8), 9.6)]
    slower += [done(spec("m", "int8", "fake", 8), 16.0)]
    told = said(sample_matrix.write(tmp_path / "slower", slower))
    assert "No cell is faster than the baseline of its model: the nearest, fp16, is 1.2" in told
    assert told.index("No cell is faster than the baseline of its model") < told.index("Cells")
    faster = [*slower, done(spec("m", "bf16", "fake", 8), 7.0)]
    assert "No cell is faster" not in said(sample_matrix.write(tmp_path / "faster", faster))


def ladder() -> list[CellResult]:
    """fp32 at 1 and 8, fp16 at 1 and 8: one thing changes at a time."""
    return [
        done(spec("m", "fp32", "onnxruntime", 1), 8.0),
        done(spec("m", "fp32", "onnxruntime", 8), 32.0),
        done(spec("m", "fp16", "onnxruntime", 8), 16.0),
        done(spec("m", "fp16", "onnxruntime", 1), 5.0),
    ]


def test_factors_of_the_steps_multiply_to_the_whole() -> None:
    cells = ladder()
    for item in Speedups(cells).explanations:
        product = 1.0
        for stage in item.steps:
            product *= stage.factor
        assert product == pytest.approx(item.factor)


def test_each_step_changes_one_thing_where_a_cell_in_between_was_measured() -> None:
    cells = ladder()
    whole = next(item for item in Speedups(cells).explanations if item.other is cells[2])
    assert [stage.aspects for stage in whole.steps] == [("batch",), ("precision",)]
    assert whole.steps[0].factor == pytest.approx(2.0, rel=0.02)
    assert whole.steps[1].factor == pytest.approx(2.0, rel=0.02)


def test_two_changes_without_a_cell_in_between_share_one_factor_and_that_is_said(tmp_path: Path) -> None:
    cells = [ladder()[0], ladder()[2]]
    (only,) = Speedups(cells).explanations
    assert [stage.aspects for stage in only.steps] == [("batch", "precision")]
    told = said(sample_matrix.write(tmp_path / "run", cells))
    assert "Not determined: batch and precision apart" in told


def test_the_named_baseline_is_held_to_if_it_was_measured() -> None:
    cells = ladder()
    assert Speedups(cells, cells[1].spec.label).baselines == (cells[1],)
    failed = replace(cells[1], bench=None, state="failed")
    assert Speedups([cells[0], failed], failed.spec.label).baselines == (cells[0],)


def test_profiles_of_both_ends_say_what_moved_and_a_missing_one_is_named(tmp_path: Path) -> None:
    told = said(sample_matrix.gpu_matrix(tmp_path / "run"))
    assert "What moved from fp32 · onnxruntime (CUDAExecutionProvider) · batch 64 to fp32 · tensorrt · batch 64" in told
    assert "kernels in one inference (fusion) 187 112 75 fewer" in told
    assert "where a profile is missing: fp" in told


def test_the_best_trade_offs_are_marked(tmp_path: Path) -> None:
    text = report(sample_matrix.gpu_matrix(tmp_path / "run"))
    part = text.partition("Accuracy against speed")[2].partition("\n\n")[0]
    marked = re.findall(r"^\* +\d+ +(\S+ · \S+ · batch \d+)", part, re.MULTILINE)
    assert marked == ["fp32 · tensorrt · batch 64", "fp16 · tensorrt · batch 64", "int8 · tensorrt · batch 64"]


def doubted() -> list[CellResult]:
    """FP16 that ran in FP32, INT8 that is not stable, both said to be fast; and one BF16 that is what it says."""
    fast = {"stable": False, "instability": ("the mean is known to ±108 % only",)}
    return [
        done(spec("m", "fp32", "onnxruntime", 1), 10.0, ap=0.9),
        done(spec("m", "fp16", "onnxruntime", 1), 2.0, ap=0.91, compute_dtype="fp32"),
        done(spec("m", "int8", "onnxruntime", 1), 1.0, ap=0.92, bench_changes=fast),
        done(spec("m", "bf16", "onnxruntime", 1), 8.0, ap=0.89),
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_a_cell_that_ran_in_another_precision_or_is_not_stable_heads_nothing(tmp_path: Path, format: str) -> None:
    told = said(sample_matrix.write(tmp_path / "run", doubted()), format)
    head = told[: told.index("Left out")]
    assert re.search(r"1\.25× \(?bf16 against fp32", head)
    assert "highest: bf16" in head and "shortest mean: bf16" in head
    assert (
        "Left out of the figures above, of “by precision” and the marks in accuracy against speed: "
        "fp16 (ran in fp32), int8 (not stable)." in told
    )
    assert "But fp16 ran in fp32, not in fp16." in told
    assert "ran in" in told and "use whole names, as `m-fp32-onnxruntime-b1`" in told


@pytest.mark.parametrize("format", FORMATS)
def test_no_figure_heads_the_report_of_several_models(tmp_path: Path, format: str) -> None:
    cells = [
        done(spec(model, precision, "onnxruntime", 4), ms)
        for model, ms in (("enc", 2.4), ("det", 12.1))
        for precision, ms in (("fp32", ms), ("int8", ms / 2))
    ]
    told = said(sample_matrix.write(tmp_path / "run", cells), format)
    assert "highest" not in told and "shortest mean" not in told
    assert "2.0" in told[: told.index("Cells")]  # the speed-up against the baseline of its own model


@pytest.mark.parametrize("unstable", ["fp32", "int8"])
def test_no_speed_up_is_given_where_one_of_the_pair_is_not_stable(tmp_path: Path, unstable: str) -> None:
    cells = [
        done(spec("m", name, "onnxruntime", 4), ms, bench_changes={"stable": name != unstable})
        for name, ms in (("fp32", 8.0), ("int8", 4.0))
    ]
    folder = sample_matrix.write(tmp_path / "run", cells)
    for format in FORMATS:
        told = said(folder, format)
        assert (
            "No factor is given where one of the two is not stable: " in told
            and "×" not in told
            and "No cell is faster" not in told
        )
    assert summarize_run(RunRecords.open(folder))["speedups"] == []


# ------------------------------------------------------------------------------------------------ profiles


@pytest.mark.parametrize("format", FORMATS)
def test_a_profile_says_verdict_ladder_kernels_and_how_to_open_its_files(tmp_path: Path, format: str) -> None:
    told = said(sample_matrix.profiled(tmp_path / "run"), format)
    assert "is compute-bound: matrix kernels take 61 % of the time" in told
    assert "nsys is not installed; install Nsight Systems" in told
    assert "sm90_xmma_gemm" in told and "open profile/timeline.json at ui.perfetto.dev" in told
    assert "512 TFLOP/s" in told and "NVIDIA H200 can do at most" in told


def test_a_verdict_that_many_cells_share_is_said_once_with_one_command(tmp_path: Path) -> None:
    folder = sample_matrix.gpu_matrix(tmp_path / "run")
    cells = [cell for cell in RunRecords.open(folder).cells if cell.profile is not None]
    assert len(cells) > 1 and cells[0].profile is not None
    shared = replace(cells[0].profile.bottleneck, summary="shared by all of them", next_step="one more look")
    same = [
        replace(cell, profile=replace(cell.profile, bottleneck=replace(shared, command=f"look {cell.spec.label}")))  # type: ignore[type-var]
        for cell in cells
    ]
    told = said(sample_matrix.write(tmp_path / "same", same))
    assert told.count("shared by all of them") == 1 and f"all {len(cells)}" in told
    assert told.count("look " + cells[0].spec.label) == 1 and "look " + cells[1].spec.label not in told
    apart = replace(same[0].profile.bottleneck, summary="its own") if same[0].profile else None
    different = [replace(same[0], profile=replace(same[0].profile, bottleneck=apart)), *same[1:]]  # type: ignore[type-var]
    told = said(sample_matrix.write(tmp_path / "apart", different))
    assert "look " + cells[0].spec.label in told and "look " + cells[1].spec.label in told


def test_what_a_rung_does_not_measure_is_a_dash_and_no_number(tmp_path: Path) -> None:
    bare = sample_matrix.profile("x")
    unknown = dict.fromkeys(("idle_ms", "launch_ms", "h2d_ms", "d2h_ms", "kernels"))
    bare = replace(bare, time_breakdown=replace(bare.time_breakdown, **unknown))
    other = done(spec("m", "fp32", "onnxruntime", 1), 3.0, profile=sample_matrix.profile("y"))
    text = report(sample_matrix.write(tmp_path / "run", [other], profiled=bare))
    rows = [line for line in text.splitlines() if re.match(r" +vit_b16 ", line)]
    assert "".join(rows).count("–") == 5


def test_a_profile_alone_begins_with_what_holds_it_back_and_names_the_command_that_made_it(tmp_path: Path) -> None:
    lines = report(sample_matrix.profiled(tmp_path / "run")).splitlines()
    assert lines[4].split()[:2] == ["bottleneck", "compute-bound"]
    assert "  trt-engine profile x" in lines, "under `Repeat it`"
    assert "Files" in lines and any(line.startswith("  timeline ") for line in lines)


def test_kernels_of_one_name_are_told_apart_by_what_a_template_made_of_them(tmp_path: Path) -> None:
    made = sample_matrix.profile("x")
    twins = tuple(
        replace(
            row, name=f"void implicit_convolve_sgemm<__half, {size}>(int, int)", short_name="implicit_convolve_sgemm"
        )
        for row, size in zip(made.kernels, (128, 1024), strict=False)
    )
    text = report(sample_matrix.write(tmp_path / "run", profiled=replace(made, kernels=(*twins, *made.kernels[2:]))))
    for size in (128, 1024):
        assert f"  implicit_convolve_sgemm<__half, {size}>  " in text
    assert "  cuApplyLayerNorm  " in text, "a name that is one alone stays short"
    seen = replace(made.kernels[2], layers=tuple(f"/norm_{index}" for index in range(24)))
    text = report(sample_matrix.write(tmp_path / "layers", profiled=replace(made, kernels=(seen,))), "md")
    assert "/norm_0, /norm_1 and 22 more" in text


def test_what_ran_is_told_once_and_the_work_of_an_inference_in_its_units(tmp_path: Path) -> None:
    facts = {"flops": "2256174845440", "nbytes": "16629227018", "flops_from": "layers", "providers": "cuda,cpu"}
    cell = done(
        spec("m", "fp16", "onnxruntime", 64, "cuda:0"), 10.0, bench_changes={"runtime_info": {"providers": "cuda,cpu"}}
    )
    cell = replace(cell, profile=sample_matrix.profile("x", runtime_info=facts))
    text = report(sample_matrix.write(tmp_path / "run", [cell]))
    assert "2.256 TFLOP" in text and "15.5 GiB" in text and "2256174845440" not in text
    assert text.count("cuda,cpu") == 1


# ------------------------------------------------------------------------------------------------ comparisons


@pytest.mark.parametrize("format", FORMATS)
def test_a_comparison_says_intervals_gates_and_what_it_would_have_found(tmp_path: Path, format: str) -> None:
    told = said(sample_matrix.compared(tmp_path / "run"), format)
    assert "digits_int8 against digits_fp32: median: 51.7 % (50.4 to 52.9 %) faster" in told
    assert "median: no difference found, where one of 0.900 % would be" in told
    assert "Gate p99-slower:3%: p99 of digits_again is 4.2 % slower (1.4 to 7.7 %), 3 % allowed" in told
    assert "bootstrap over blocks" in told and "float32 -> int8" in html.unescape(told)


def test_a_gate_is_drawn_where_its_limit_is_and_beside_what_it_judges(tmp_path: Path) -> None:
    gates = (
        GateResult("p99-slower:.5%", False, "fine", "p99", 0.5),
        GateResult("error:1e-3", False, "fine", "error", 1e-3),
    )
    made = sample_matrix.compare_report(gates=gates)
    (chart,) = interval_charts("digits_fp32", made.comparisons, made.gates)
    assert chart.limits == (GateLimit("p99-slower:.5%", 0.5, (1, 3)),), "the points of p99 alone; outputs have no axis"


# ------------------------------------------------------------------------------------------------ damage


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def _foreign(path: Path) -> None:
    path.write_text('{"hello": [1]}')


def _list(path: Path) -> None:
    path.write_text("[]")


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


RECORDS = ["run.json", "profile.json", "compare.json", "cells/digits-int8-onnxruntime-b8.json"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [(RECORDS[at % 4], damage) for at, damage in enumerate((_empty, _half, _foreign, _list, _deep, _binary))],
)
def test_a_damaged_record_is_said_and_the_others_stand(tmp_path: Path, name: str, damage) -> None:  # type: ignore[no-untyped-def]
    folder = sample_matrix.everything(tmp_path / "run")
    damage(folder / name)
    for format in FORMATS:
        told = said(folder, format)
        assert f"{name} " in told and "was left out" in told
        assert "29" in told  # the stream count of size.json still stands


def test_a_folder_of_failures_alone_still_makes_a_report(tmp_path: Path) -> None:
    failed = CellResult(spec("m", "fp32", "tensorrt", 1, "cuda:0"), "failed", "it broke\nhint: mend it")
    folder = sample_matrix.write(tmp_path / "run", [failed])
    for format in FORMATS:
        told = said(folder, format)
        assert "Nothing was measured; planned for cuda:0" in told and "It broke." in told and "mend it" in told
    (folder / "run.json").unlink()
    assert "not recorded" in said(folder)


# ------------------------------------------------------------------------------------------------ every page


@pytest.mark.parametrize("name", list(sample_matrix.MATRICES))
def test_every_chart_has_words_of_its_own_and_a_table_in_its_section(tmp_path: Path, name: str) -> None:
    made = report(sample_matrix.MATRICES[name](tmp_path / "run"), "html")
    sections = [part for part in re.findall(r"<section.*?</section>", made, re.DOTALL) if 'role="img"' in part]
    assert sections
    for section in sections:
        assert "<table>" in section
        for svg in re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', section, re.DOTALL):
            assert re.search(r"<title id=[^>]*>\S.*?</title><desc id=[^>]*>\S.*?</desc>", svg, re.DOTALL)
    names = re.findall(r' id="([^"]+)"', made)
    assert len(names) == len(set(names))
    page = _Text(made)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "iframe", "object", "embed")]
    assert not [attrs for _, attrs in page.tags if any(key.startswith("on") or key == "src" for key in attrs)]


@pytest.mark.slow
def test_hundreds_of_cells_with_thousands_of_samples_make_a_page_below_one_megabyte(tmp_path: Path) -> None:
    folder = sample_matrix.many(tmp_path / "run", 200, 1500)
    assert write_reports(folder)["report.html"].stat().st_size < 1_000_000


def test_the_summary_for_programs_has_cells_speed_ups_profile_and_comparison(tmp_path: Path) -> None:
    told = json.loads(encode_json(summarize_run(RunRecords.open(sample_matrix.everything(tmp_path / "run")))))
    assert [cell["state"] for cell in told["cells"]] == ["done", "done", "waiting"]
    assert told["speedups"][0]["cell"] == "digits-int8-onnxruntime-b8"
    assert told["profile"]["bottleneck"]["bound"] == "compute"
    assert told["compare"]["gates"][0]["failed"] is True and told["complete"] is False
    assert told["peak_streams"] == 29  # what was there before


HOME, ROOTS = "/".join(("", "home", "alice")), "/" + "root"


def test_a_run_of_cells_gets_its_text_report_by_the_name_of_the_run_tree(tmp_path: Path) -> None:
    folder = sample_matrix.matrix(tmp_path / "run")
    assert set(write_reports(folder)) == {"report.md", "report.html", "REPORT.txt"}
    assert (folder / "REPORT.txt").read_text() == report(folder)


@pytest.mark.parametrize("changes", [{"batch": 0}, {"compute_ms": (1.0, 1e308)}, {"percentiles": (1e308,)}])
def test_a_measurement_that_cannot_be_is_left_out_and_said(tmp_path: Path, changes: dict[str, object]) -> None:
    sound, odd = done(spec("m", "fp32", "onnxruntime", 1), 3.0), done(spec("m", "int8", "onnxruntime", 1), 2.0)
    assert odd.bench is not None
    folder = sample_matrix.write(tmp_path / "run", [sound, replace(odd, bench=replace(odd.bench, **changes))])  # type: ignore[arg-type]
    assert "The measurement in cells/m-int8-onnxruntime-b1.json was left out" in said(folder)


# ------------------------------------------------------------------------------------------------ quantised and slower

WHY = "ONNX Runtime's CPU provider fuses 0 of 20 convolutions and runs them in FP32"


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_cell_slower_than_its_fp32_one_is_named_with_the_reason(tmp_path: Path, format: str) -> None:
    cells = [
        done(spec("m", "fp32", "onnxruntime", 8), 10.0),
        done(spec("m", "int8", "onnxruntime", 8), 15.0, not_fused=WHY),
        done(spec("m", "int8", "onnxruntime", 1), 9.0),
        done(spec("other", "int8", "onnxruntime", 8), 20.0),
    ]
    told = said(sample_matrix.write(tmp_path / "run", cells), format)

    assert re.search(
        rf"m · int8 · batch 8`? is (49|50|51) % slower than `?m · fp32 · batch 8`?: {re.escape(WHY)}", told
    )
    assert told.count("% slower than") == 1 + ("warnings, explained under" in told)


@pytest.mark.parametrize("format", FORMATS)
def test_a_comparison_says_that_the_quantised_engine_is_slower_and_why(tmp_path: Path, format: str) -> None:
    text = f"int8 (`digits_int8`) is 45 % slower than fp32 (`digits_fp32`): {WHY}"
    made = sample_matrix.compare_report()
    sides = (made.sides[0], replace(made.sides[1], precision="fp32", graph_dtype="int8", not_fused=WHY), made.sides[2])
    slower = replace(made.comparisons[0].speed[0], slower_pct=Interval(40.0, 45.0, 50.0), verdict="slower")
    against = (replace(made.comparisons[0], speed=(slower,), slowdown_note=text), made.comparisons[1])
    told = said(sample_matrix.write(tmp_path / "run", compare=replace(made, sides=sides, comparisons=against)), format)

    reason = "slower than digits_fp32: it runs in FP32, its graph is int8; ONNX Runtime's CPU provider fuses 0 of 20"
    assert re.search(rf"digits_int8 is 1\.45x {reason}", told), "the headline, with the reason"
    assert "runs in" in told[told.index("The engines") :][:200], "beside each engine of the table"
