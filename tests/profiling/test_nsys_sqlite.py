"""Exports of nsys in the real schema: read by column name, of any version, whole or damaged."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from nsight_samples import SAMPLES

from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.nsys import read_sqlite
from trt_engine.profiling.instruments.target import TargetOutcome
from trt_engine.profiling.kernel_categories import split_by_inference

SCHEMA = (SAMPLES / "nsys-sqlite-schema-2024.6.2.sql").read_text()
TID = 0x1000000
PID, THREAD = 77 * TID, 77 * TID + 5


class Export:
    """An export being made: rows by table, what is empty in the end does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self.strings: dict[str, int] = {}

    def text(self, value: str) -> int:
        key = self.strings.setdefault(value, len(self.strings) + 1)
        self.database.execute("INSERT OR IGNORE INTO StringIds VALUES (?, ?)", (key, value))
        return key

    def put(self, table: str, **values: Any) -> None:
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(values.values()))

    def kernel(self, start: int, end: int, correlation: int, name: str = "f", pid: int = PID, **more: Any) -> None:
        whole = {
            "deviceId": 0, "contextId": 1, "streamId": 7, "shortName": 1, "registersPerThread": 32, "gridX": 2, "gridY": 1,
            "gridZ": 1, "blockX": 64, "blockY": 1, "blockZ": 1, "staticSharedMemory": 0, "dynamicSharedMemory": 512,
            "localMemoryPerThread": 0, "localMemoryTotal": 0, "gridId": 1,
        } | more  # fmt: skip
        self.put("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, correlationId=correlation, globalPid=pid,
                 demangledName=self.text(name), **whole)  # fmt: skip

    def call(
        self, start: int, end: int, correlation: int, name: str = "cudaLaunchKernel_v7000", thread: int = THREAD
    ) -> None:
        self.put("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=thread,
                 correlationId=correlation, nameId=self.text(name), returnValue=0)  # fmt: skip

    def range(self, start: int, end: int | None, text: str, *, kind: int = 59, thread: int = THREAD) -> None:
        self.put("NVTX_EVENTS", start=start, end=end, eventType=kind, text=text, globalTid=thread, domainId=0)

    def done(self, *, outcome: TargetOutcome | None = None) -> Any:
        tables = [row[0] for row in self.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if not next(self.database.execute(f"SELECT COUNT(*) FROM {table}"))[0]:
                self.database.execute(f"DROP TABLE {table}")
        self.database.commit()
        self.database.close()
        return read_sqlite(self.path, outcome)


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "x.sqlite")


# ------------------------------------------------------------------------------------------------ what is in it


def test_kernels_copies_and_fills_come_with_all_that_is_told_of_them(export: Export) -> None:
    export.kernel(300, 400, 12, "void f<1>(int)", graphNodeId=9)
    export.put("CUPTI_ACTIVITY_KIND_MEMCPY", start=100, end=150, deviceId=1, contextId=1, streamId=13, correlationId=11,
               globalPid=PID, bytes=64, copyKind=2)  # fmt: skip
    export.put("CUPTI_ACTIVITY_KIND_MEMSET", start=500, end=510, deviceId=0, contextId=1, streamId=7, correlationId=13,
               globalPid=PID, value=0, bytes=32)  # fmt: skip
    for correlation, start in ((11, 50), (12, 200), (13, 410)):
        export.call(start, start + 30, correlation)
    export.range(10, 600, "trt_engine inference 0")
    found = export.done()
    copy, kernel, fill = found.activities
    assert (copy.kind, copy.name, copy.nbytes, copy.device, copy.stream) == ("copy", "Device-to-Host", 64, 1, 13)
    assert (kernel.kind, kernel.name, kernel.start_ns, kernel.end_ns) == ("kernel", "void f<1>(int)", 300, 400)
    assert (kernel.grid, kernel.block, kernel.registers, kernel.shared_bytes) == ((2, 1, 1), (64, 1, 1), 32, 512)
    assert (kernel.graph_node, kernel.correlation) == (9, 12)
    assert (fill.kind, fill.nbytes) == ("memset", 32)
    assert found.inferences == ((10, 600),) and found.instrument == "nsys 2024.6.2"
    assert [item.name for item in found.launches] == ["cudaLaunchKernel"] * 3 and found.launch_ns == 90


def test_the_innermost_range_of_others_names_a_kernel(export: Export) -> None:
    export.range(0, 1000, "trt_engine inference 0")
    export.range(100, 500, "block")
    export.range(200, 300, "layer")
    export.range(210, None, "mark", kind=34)
    export.range(200, 900, "of another thread", thread=THREAD + 1)
    for number, at in enumerate((150, 250, 350, 600), start=1):
        export.call(at, at + 5, number)
        export.kernel(at + 1000, at + 1001, number)
    assert [item.range for item in export.done().activities] == ["block", "layer", "block", None]


def test_a_call_of_the_runtime_and_the_driver_s_under_it_count_once(export: Export) -> None:
    export.range(0, 1000, "trt_engine inference 0")
    export.call(100, 200, 1)
    export.call(120, 180, 1, "cuLaunchKernel")
    export.call(300, 400, 2, thread=THREAD + 1)
    export.kernel(210, 220, 1)
    export.kernel(410, 420, 2)
    assert export.done().launch_ns == 200


def test_what_lies_outside_every_inference_is_left_out(export: Export) -> None:
    for index, start in enumerate((100, 300)):
        export.range(start, start + 100, f"trt_engine inference {index}")
    for number, at in enumerate((50, 120, 220, 350), start=1):
        export.call(at, at + 5, number)
        export.kernel(at + 6, at + 8, number, f"k{number}")
    found = export.done()
    assert [item.name for item in found.activities] == ["k2", "k4"] and len(found.inferences) == 2


def test_an_export_of_somebody_else_s_program_is_read_whole(export: Export) -> None:
    export.call(100, 105, 1)
    export.kernel(120, 130, 1)
    found = export.done()
    assert len(found.activities) == 1 and found.inferences == () and found.warnings == ()


def test_tables_without_rows_do_not_exist_and_are_empty(export: Export) -> None:
    found = export.done()
    assert found.activities == () and found.launch_ns is None and found.inferences == ()


def test_columns_a_version_lacks_are_none_and_those_it_adds_do_no_harm(export: Export) -> None:
    export.kernel(120, 130, 1)
    for column in (
        "registersPerThread",
        "graphNodeId",
        "demangledName",
        "dynamicSharedMemory",
        "staticSharedMemory",
        "gridZ",
    ):
        export.database.execute(f'ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN "{column}"')
    export.database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN brandNew TEXT DEFAULT 'x'")
    (found,) = export.done().activities
    assert (found.name, found.registers, found.grid, found.shared_bytes) == ("f", None, None, None)


def test_graph_launches_recorded_as_wholes_are_a_warning_that_says_what_to_type(export: Export) -> None:
    for start in (100, 200):
        export.put(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=start, end=start + 50, deviceId=0, correlationId=start, graphId=1
        )
    (warning,) = export.done().warnings
    assert (
        "2 CUDA graph launches as a whole, and none of the kernels" in warning and "--cuda-graph-trace=node" in warning
    )


def test_loud_diagnostics_are_warnings_where_no_severities_are_listed(export: Export) -> None:
    export.database.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INT, severity INT, text TEXT)")
    for text in ("Process was launched by the profiler.", "Number of events lost: 4", "Number of events lost: 4"):
        export.put("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=text)
    assert export.done().warnings == ("nsys: Number of events lost: 4",)


def test_times_of_the_process_that_fit_no_inference_are_not_used(export: Export) -> None:
    for number, at in enumerate((100, 5_000, 9_000), start=1):
        export.call(at, at + 5, number)
        export.kernel(at + 6, at + 8, number)
    found = export.done(
        outcome=TargetOutcome(pid=1, inferences=2, windows=((10**15, 10**15 + 20), (10**15 + 30, 10**15 + 50)))
    )
    assert found.inferences == () and len(found.activities) == 3
    assert "do not fit its clock" in found.warnings[0]


@pytest.mark.parametrize("held_up", [0, 1, 2])
def test_an_inference_that_was_held_up_costs_the_others_nothing(export: Export, held_up: int) -> None:
    """There are neither ranges nor a start of the session: two launches in each window are all that tells the clock."""
    at, ahead, windows = 0, 10**15, []
    for number, us in enumerate((100, 80, 120)):
        wide = 5_000_000 if number == held_up else us
        for place in (0.1, 0.2):
            correlation = 2 * number + round(10 * place)
            launched = at + int(wide * 1000 * place)
            export.call(launched, launched + 9, correlation)
            export.kernel(launched + 10, launched + 20, correlation)
        windows.append((at + ahead, at + ahead + wide * 1000))
        at += wide * 1000 + 5_000
    found = export.done(outcome=TargetOutcome(pid=1, inferences=3, windows=tuple(windows)))
    assert [len(items) for items in split_by_inference(found)] == [2, 2, 2]


def test_an_export_older_than_its_report_is_said(export: Export) -> None:
    export.kernel(120, 130, 1)
    export.done()
    report = export.path.with_suffix(".nsys-rep")
    report.touch()
    os.utime(report, ns=(2 * 10**18, 2 * 10**18))
    assert "is older than its report" in read_sqlite(export.path).warnings[0]


# ------------------------------------------------------------------------------------------------ damaged


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty, expected an export"),
        (b"not a database at all" * 100, "is not a complete SQLite export of nsys: file is not a database"),
        (b"SQLite format 3\0", "is not a complete SQLite export"),
    ],
)
def test_what_is_no_export_is_refused_with_what_was_found(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(ProfilerUnavailable, match=reason):
        read_sqlite(path)
