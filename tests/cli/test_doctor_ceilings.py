"""`doctor --ceilings`: which devices it asks about, and how it shows what they can do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from patience import HANG_S
from trt_engine.cli.doctor import text
from trt_engine.environment import Environment
from trt_engine.figures import quantity
from trt_engine.records import Ceiling, Ceilings, Diagnosis, DoctorReport, document


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trt_engine", "doctor", *words], capture_output=True, text=True, timeout=HANG_S
    )


@pytest.mark.parametrize("words", [("--again",), ("--device", "cpu")])
def test_its_options_alone_are_refused_with_what_is_missing(words: tuple[str, ...]) -> None:
    done = doctor(*words)
    assert done.returncode == 2
    assert done.stderr == f"error: `{words[0]}` belongs to `--ceilings`\nhint: `trt-engine doctor --ceilings`\n"


def test_a_device_nobody_knows_is_a_wrong_call_and_one_without_ceilings_too() -> None:
    assert doctor("--ceilings", "--device", "tpu:0").returncode == 2
    done = doctor("--ceilings", "--device", "fake:0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the device `fake` has no ceilings" in done.stderr


def test_a_gpu_that_is_not_there_costs_its_ceilings_and_not_the_report() -> None:
    done = doctor("--ceilings", "--device", "cuda:77", "--json")
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    by_name = {item["name"]: item for item in told["diagnoses"]}
    assert by_name["ceilings-cuda:77"]["status"] == "problem" and by_name["ceilings-cuda:77"]["fix"]
    assert "python" in by_name and told["backends"] and told["problems"] >= 1 and told["ceilings"] == []


def report() -> DoctorReport:
    items = (
        Ceiling("fp16_matrix", 764.2, "TFLOP/s", "measured", "torch.mm 8192x8192x8192 fp16, best of 30"),
        Ceiling("fp8_matrix", 1979.0, "TFLOP/s", "datasheet", "H200 data sheet"),
        Ceiling("launch", 2.53, "us", "measured", "empty kernel"),
        Ceiling("fp32_matrix", 0.1042, "TFLOP/s", "measured", "MatMul"),
    )
    found = Ceilings(
        "NVIDIA H200",
        "key",
        items,
        "2026-01-01T00:00:00Z",
        Environment.here(),
        ("int8_matrix: too old",),
        ("it was busy",),
    )
    return DoctorReport((Diagnosis("python", "ok", "fine"),), (), Environment.here(), 0, 0, (found,))


def test_figures_stand_with_unit_and_source_and_what_is_missing_or_doubtful() -> None:
    lines = text(report()).splitlines()
    start = lines.index("NVIDIA H200 can do at most (measured 2026-01-01T00:00:00Z):")
    assert [line.split() for line in lines[start + 1 : start + 5]] == [
        ["fp16_matrix", "764", "TFLOP/s", "torch.mm", "8192x8192x8192", "fp16,", "best", "of", "30"],
        ["fp8_matrix", "1979", "TFLOP/s", "not", "measured:", "H200", "data", "sheet"],
        ["launch", "2.53", "us", "empty", "kernel"],
        ["fp32_matrix", "104", "GFLOP/s", "MatMul"],
    ]
    assert lines[start + 5 : start + 7] == ["  skipped: int8_matrix: too old", "  note: it was busy"]


def test_a_ceiling_reads_as_it_does_in_a_verdict() -> None:
    for item in report().ceilings[0].items:
        assert quantity(item.value, item.unit).split() == next(
            line.split()[1:3] for line in text(report()).splitlines() if line.split()[:1] == [item.name]
        )


def test_the_document_has_them_by_name_and_none_unasked() -> None:
    doc = document("doctor", report(), command="trt-engine doctor --ceilings")
    assert doc["ceilings"][0]["items"][0]["name"] == "fp16_matrix"
    bare = DoctorReport((), (), Environment.here(), 0, 0)
    assert list(document("doctor", bare, command="trt-engine doctor")["ceilings"]) == []
