"""The records of a GPU that are kept with the project: whole, in today's form, and read by what reads a user's."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from patience import HANG_S
from programs import run_python
from trt_engine.profiling.instruments import ncu
from trt_engine.records.profile import ProfileReport
from trt_engine.reporting.report import report
from trt_engine.reporting.run_records import RunRecords

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import judge_again  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PROFILE, THREE_WAY = RESULTS / "profile-vit-b64-h200", RESULTS / "three-way-h200"
RUNS = pytest.mark.parametrize("folder", [PROFILE, THREE_WAY], ids=lambda folder: folder.name)


def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((PROFILE / "profile.json").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def kept() -> ProfileReport:
    return msgspec.convert(recorded(), ProfileReport)


def test_the_profile_of_a_gpu_fits_the_published_schema() -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "profile.json").read_text(encoding="utf-8"))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(recorded())) == []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(recorded() | {"kernels": 3}, schema)


@pytest.mark.parametrize(
    "file",
    [PROFILE / "profile.json", *sorted((THREE_WAY / "cells").glob("*-ort-cuda-b8.json"))],
    ids=lambda file: file.stem,
)
def test_verdict_and_categories_follow_from_the_facts_by_the_rules_of_today(file: Path) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    assert judge_again.judged_in(document)
    assert document == json.loads(file.read_text(encoding="utf-8")), (
        "the rules have changed: `python tools/judge_again.py` on its folder, and read the difference"
    )


def test_the_union_of_kernels_is_within_a_twentieth_of_the_time_measured_without_a_profiler(
    kept: ProfileReport,
) -> None:
    assert kept.time_breakdown.working_ms is not None and kept.time_breakdown.gpu_ms is not None
    assert 0.95 <= kept.time_breakdown.working_ms / kept.time_breakdown.gpu_ms <= 1.05
    for line in (RESULTS / "gpu-profile-h200.jsonl").read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["met"] is True


def test_what_nsight_compute_printed_there_is_read_and_is_what_the_profile_says(kept: ProfileReport) -> None:
    launches = ncu.parse_output((PROFILE / "ncu.csv").read_text(encoding="utf-8"))
    found = ncu.kernel_counters(launches, [item.kernel for item in kept.counters])
    assert len(found) == 3 and {item.kernel for item in found} == {row.name for row in kept.kernels[:3]}
    for read, said in zip(found, kept.counters, strict=True):
        for name in ("duration_us", "compute_pct", "memory_pct", "dram_pct", "occupancy_pct"):
            assert getattr(read, name) == pytest.approx(getattr(said, name)), name
        assert read.launches == said.launches == 2


def test_the_timeline_has_every_kernel_the_profile_counts(kept: ProfileReport) -> None:
    with gzip.open(PROFILE / "timeline.json.gz") as file:
        events = json.load(file)["traceEvents"]
    shown = [event for event in events if event.get("cat") in {item.category for item in kept.categories}]
    assert len(shown) == sum(row.calls for row in kept.kernels) == 14100
    assert sum(event["dur"] for event in shown) / 1e3 == pytest.approx(
        sum(row.total_ms for row in kept.kernels), rel=1e-3
    )


def test_the_report_of_the_run_says_that_fewer_bits_were_slower_there_and_what_int8_ran_in() -> None:
    text = " ".join(report(THREE_WAY).split())
    assert (
        "No cell is faster than the baseline of its model: the nearest, fp16 · onnxruntime (cuda), is 1.19× slower."
        in text
    )
    assert "int8 · onnxruntime (cuda): 1.28× slower than fp32 · onnxruntime (cuda)" in text
    assert "ran in fp32, not in int8" in text and "has no kernels for it: found fp32 100 % of multiply-adds" in text
    assert "6 cells skipped" in text and "the backend `tensorrt` needs `tensorrt`" in report(THREE_WAY, "md").lower()
    medians = [
        cell.bench.compute_summary().median for cell in RunRecords.open(THREE_WAY).cells if cell.bench is not None
    ]  # type: ignore[union-attr]
    assert medians == pytest.approx([1.06, 1.27, 1.36], abs=0.01)


def test_the_report_of_the_profile_says_that_the_clocks_were_held_down_and_why_a_rung_was_passed_over() -> None:
    text = " ".join(report(PROFILE).split())
    assert "GPU clocks were held down: sw_power_cap" in text and "nsys is not installed" in text
    assert "compute-bound" in text and "by host spans: 100 % of the kernels' time" in text


@RUNS
def test_reports_are_made_of_the_records_without_any_backend(folder: Path) -> None:
    code = (
        "import sys, trt_engine as te; page = te.report(sys.argv[1], format='html'); assert '<h1' in page; "
        "print(sorted({'onnx', 'onnxruntime', 'torch', 'tensorrt'} & set(sys.modules)))"
    )
    done = run_python("-c", code, str(folder), timeout=HANG_S, check=True)
    assert done.stdout.strip() == "[]"


@RUNS
def test_no_record_names_a_folder_of_somebody(folder: Path) -> None:
    own = re.compile(r"(?<![\w.~/-])/(?!tmp/|usr/)[a-z]\w*/[\w./-]+\.(?:onnx|engine|json|yaml|py|txt|log)\b")
    for file in folder.rglob("*.*"):
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        assert own.findall(raw.decode()) == [], file.name
