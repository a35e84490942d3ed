"""`doctor --peaks`: which devices it asks about, and how it shows what they can do."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from trt_engine.cli.main import run
from trt_engine.command_line.output import result_text as text
from trt_engine.environment import Environment
from trt_engine.records.diagnosis import Diagnosis, DoctorReport
from trt_engine.records.profile import DevicePeak, DevicePeaks

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(capfd: pytest.CaptureFixture[str]) -> Doctor:
    """The verb in this process: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return (run(["doctor", *words]), *capfd.readouterr())

    return call


@pytest.mark.parametrize("words", [("--remeasure",), ("--device", "cpu")])
def test_its_options_alone_are_refused_with_what_is_missing(doctor: Doctor, words: tuple[str, ...]) -> None:
    code, _, err = doctor(*words)
    assert code == 2
    assert err == f"error: `{words[0]}` belongs to `--peaks`\nhint: `trt-engine doctor --peaks`\n"


@pytest.mark.slow
def test_a_device_nobody_knows_is_a_wrong_call_and_one_without_ceilings_too(doctor: Doctor) -> None:
    assert doctor("--peaks", "--device", "tpu:0")[0] == 2
    code, out, err = doctor("--peaks", "--device", "fake:0")
    assert (code, out) == (2, "")
    assert "the device `fake` has no peaks" in err


@pytest.mark.slow
def test_a_gpu_that_is_not_there_costs_its_ceilings_and_not_the_report(doctor: Doctor) -> None:
    code, out, err = doctor("--peaks", "--device", "cuda:77", "--json")
    assert code == 3, err
    told = json.loads(out)
    by_name = {item["name"]: item for item in told["diagnoses"]}
    assert by_name["peaks-cuda:77"]["status"] == "problem" and by_name["peaks-cuda:77"]["fix"]
    assert "python" in by_name and told["backends"] and told["problems"] >= 1 and told["peaks"] == []


def report() -> DoctorReport:
    items = (
        DevicePeak("fp16_matrix", 764.2, "TFLOP/s", "measured", "torch.mm 8192x8192x8192 fp16, best of 30"),
        DevicePeak("fp8_matrix", 1979.0, "TFLOP/s", "datasheet", "H200 data sheet"),
        DevicePeak("launch", 2.53, "us", "measured", "empty kernel"),
        DevicePeak("fp32_matrix", 0.1042, "TFLOP/s", "measured", "MatMul"),
    )
    found = DevicePeaks(
        "NVIDIA H200",
        "key",
        items,
        "2026-01-01T00:00:00Z",
        Environment.detect(),
        ("int8_matrix: too old",),
        ("it was busy",),
    )
    return DoctorReport((Diagnosis("python", "ok", "fine"),), (), Environment.detect(), 0, 0, (found,))


def test_figures_stand_with_unit_and_source_and_what_is_missing_or_doubtful() -> None:
    lines = text(report()).splitlines()
    start = lines.index("NVIDIA H200 can do at most (measured 2026-01-01T00:00:00Z):")
    assert [line.split() for line in lines[start + 2 : start + 6]] == [
        ["fp16_matrix", "764", "TFLOP/s", "torch.mm", "8192x8192x8192", "fp16,", "best", "of", "30"],
        ["fp8_matrix", "1979", "TFLOP/s", "not", "measured:", "H200", "data", "sheet"],
        ["launch", "2.53", "us", "empty", "kernel"],
        ["fp32_matrix", "104", "GFLOP/s", "MatMul"],
    ]
    assert lines[start + 6 : start + 8] == ["  skipped: int8_matrix: too old", "  note: it was busy"]
