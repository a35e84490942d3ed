"""Whole reports against kept ones. `TRT_ENGINE_UPDATE_GOLDEN=1 pytest ...` writes them anew: read the difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sample_runs

from trt_engine.reporting.report import Format, report

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("run", "format", "name"),
    [
        ("gpu", "text", "report_gpu.txt"),
        ("cpu", "md", "report_cpu.md"),
        ("partial", "text", "report_partial.txt"),
        ("bench", "md", "report_bench.md"),
    ],
)
def test_a_report_reads_as_it_was_approved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, format: Format, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = report(sample_runs.RUNS[run](Path(run)), format)
    kept = GOLDEN / name
    if os.environ.get("TRT_ENGINE_UPDATE_GOLDEN"):
        kept.write_text(made, encoding="utf-8")
    assert made == kept.read_text(encoding="utf-8")
