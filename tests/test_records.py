"""The arithmetic of records: trtexec's percentiles, summaries, and lines that are whole or not there."""

from __future__ import annotations

import json
import math
import resource
import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.atomic_io import encode_json
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, SetupError
from trt_engine.records.base import append_record
from trt_engine.records.bench import BenchRecord, BenchReport, Protocol
from trt_engine.records.percentiles import percentile, summarize

PROTOCOL = Protocol("trt-engine", "closed", "host", False, False, False, 1, 1.0, 10.0, 10, 0.0, "trtexec")
TIMES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=300)


def record(samples_ms: tuple[float, ...], **changes: object) -> BenchRecord:
    facts = {
        "engine": "m.engine.onnx", "backend": "onnxruntime", "device": "cpu", "batch": 8, "shapes": {"x": (8, 3)},
        "protocol": PROTOCOL, "environment": Environment.detect(), "compute_ms": samples_ms, "wall_s": 2.0,
        "started": "2026-01-02T03:04:05+00:00", "queries": len(samples_ms), "warmup_queries": 3,
    }  # fmt: skip
    return BenchRecord(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "percent", "index"),
    [
        (100, 99, 99),
        (1000, 99, 990),
        (1000, 99.9, 999),
        (10, 90, 8),
        (10, 100, 9),
        (10, 0, 0),
        (1, 50, 0),
        (594, 99, 588),
    ],
)
def test_percentiles_are_trtexecs_to_the_index(count: int, percent: float, index: int) -> None:
    assert percentile(range(count), percent) == index


def test_the_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 99))


@given(TIMES)
def test_a_summary_agrees_with_the_statistics_of_its_samples(values: list[float]) -> None:
    found = summarize(values)
    assert found is not None
    assert (found.min, found.max) == (min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-9)
    assert found.median == pytest.approx(statistics.median(values), rel=1e-12)
    assert found.cv_pct == pytest.approx(100 * statistics.pstdev(values) / statistics.fmean(values), rel=1e-6, abs=1e-6)
    assert found.min <= found.p90 <= found.p95 <= found.p99 <= found.max


def test_a_record_comes_back_from_json_as_it_was() -> None:
    found = record((1.25, 2.5), percentiles=(50.0, 99.9), stable=False, instability=("moved",))
    assert msgspec.json.decode(encode_json(found), type=BenchRecord) == found


def test_a_report_on_a_cpu_has_no_key_for_what_a_cpu_does_not_have() -> None:
    keys = set(json.loads(encode_json(BenchReport.of(record((1.0,) * 20)))))
    assert not keys & {"latency_ms", "enqueue_ms", "h2d_ms", "d2h_ms"}
    assert not any("gpu" in key for key in keys)
    assert {"device", "compute_ms", "qps", "images_per_s", "per_image_ms", "samples_ms", "protocol", "stable"} <= keys


def test_a_report_gives_the_percentiles_asked_for() -> None:
    found = BenchReport.of(record(tuple(float(n) for n in range(1000)), percentiles=(50.0, 99.9)))
    assert found.percentiles_ms == {"50": 499.0, "99.9": 999.0}
    assert found.per_image_ms == pytest.approx(499.5 / 8)


def test_records_are_added_one_a_line(tmp_path: Path) -> None:
    for count in (1, 2):
        append_record(tmp_path / "deep" / "records.jsonl", record((1.0,) * count))
    lines = (tmp_path / "deep" / "records.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["compute_ms"]) for line in lines] == [1, 2]


def test_a_record_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, record((1.0,)))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(SetupError, match="larger than this shell allows"):
            append_record(path, record((1.0,) * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before


def test_an_interruption_carries_what_was_finished() -> None:
    assert Interrupted("stopped", partial="half").partial == "half"
    assert Interrupted("stopped").partial is None


def test_a_record_after_a_torn_line_starts_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"engine": "cut o')
    append_record(path, {"whole": 1})
    append_record(path, {"whole": 2})
    assert path.read_bytes().splitlines() == [b'{"engine": "cut o', b'{"whole":1}', b'{"whole":2}']
