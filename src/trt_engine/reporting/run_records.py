"""Read the records of a run (`size`, `bench`, `run`, `profile`, `compare`) from its folder or archive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from trt_engine import run_folder
from trt_engine.atomic_io import as_path, decode_json
from trt_engine.environment import Environment
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.format import quoted
from trt_engine.records.bench import BenchRecord
from trt_engine.records.compare import CompareReport
from trt_engine.records.loadtest import LoadtestRecord
from trt_engine.records.profile import ProfileReport
from trt_engine.records.size import SizeReport
from trt_engine.records.sweep import CellResult, RunManifest
from trt_engine.records.upgrade import UpgradeReport

_VERSION = 1
_MAX_MS = 1e12
"""Thirty years: longer or negative times are invalid."""
_T = TypeVar("_T")
_R = TypeVar("_R", BenchRecord, LoadtestRecord)


class RecordFile(NamedTuple):
    """A file (or the folder) of one kind of record in a run."""

    field: str
    """Field of `RunRecords`."""
    name: str
    verb: str
    title: str
    """In the list of files of a report."""


RECORD_FILES = (
    RecordFile("size", run_folder.SIZE, "size", "size document"),
    RecordFile("manifest", run_folder.RUN, "run", "run document"),
    RecordFile("cells", run_folder.CELLS, "run", "cells"),
    RecordFile("measurements", run_folder.RECORDS, "bench", "samples"),
    RecordFile("profile", run_folder.PROFILE, "profile", "profile document"),
    RecordFile("comparison", run_folder.COMPARE, "compare", "compare document"),
    RecordFile("upgrade", run_folder.UPGRADE, "upgrade-check", "upgrade document"),
    RecordFile("loads", run_folder.LOADTEST, "loadtest", "load tests"),
)


@dataclass(frozen=True, slots=True)
class _SizeDocument(SizeReport):
    """`size.json`: the common keys and the report's; unknown keys are ignored."""

    schema: str = "trt-engine/size"
    schema_version: int = _VERSION
    command: str = ""


@dataclass(frozen=True, slots=True)
class _ProfileDocument(ProfileReport):
    """`profile.json`, with the command line."""

    command: str = ""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records in a run folder: the report of each verb, and every measurement with its samples."""

    folder: Path
    """The run folder; for an archive, the folder it would unpack to."""
    size: SizeReport | None = None
    command: str | None = None
    """The command line of the run."""
    warnings: tuple[str, ...] = ()
    measurements: tuple[BenchRecord, ...] = ()
    """Measurements of `records.jsonl`."""
    skipped: tuple[str, ...] = ()
    """Descriptions of skipped records."""
    manifest: RunManifest | None = None
    cells: tuple[CellResult, ...] = ()
    """Cells in plan order; those not reached have the state `waiting`."""
    profile: ProfileReport | None = None
    comparison: CompareReport | None = None
    upgrade: UpgradeReport | None = None
    files: run_folder.RunFiles | None = None
    loads: tuple[LoadtestRecord, ...] = ()
    """Load tests of `loadtest.jsonl`; of a search the chosen rate, with all rates as its steps."""

    @classmethod
    def open(cls, folder: Path | str) -> RunRecords:
        """Read the run in `folder` or in an archive; raise `UsageError` if it is not a run or its records are damaged."""
        folder = as_path(folder, "`folder`")
        _check_folder(folder)
        files = run_folder.RunFiles.open(folder)
        names = [file.name for file in RECORD_FILES if file.name != run_folder.CELLS and files.contains(file.name)]
        names += files.cell_names()
        if not names:
            raise UsageError(run_folder.not_a_run_folder(folder), hint=_RUN_FOLDER_HINT)
        said: list[str] = []
        size = _read_size(files) if run_folder.SIZE in names else None
        measurements = _read_records(files, run_folder.RECORDS, BenchRecord, said)
        loads = _read_records(files, run_folder.LOADTEST, LoadtestRecord, said)
        manifest = _read_record(files, run_folder.RUN, RunManifest, said)
        results = {name: _read_record(files, name, CellResult, said) for name in files.cell_names()}
        profile = _read_record(files, run_folder.PROFILE, _ProfileDocument, said)
        if profile is not None and profile.batch < 1:
            said.append(f"{run_folder.PROFILE} was left out: its batch is {profile.batch}")
            profile = None
        comparison = _read_record(files, run_folder.COMPARE, CompareReport, said)
        for side in comparison.sides if comparison is not None else ():
            if odd := _invalid_reason(side.record) or _invalid_times(value for ms in side.blocks_ms for value in ms):
                said.append(f"{run_folder.COMPARE} was left out: of `{side.label}` {odd}")
                comparison = None
                break
        upgrade = _read_record(files, run_folder.UPGRADE, UpgradeReport, said)
        cells = _order_cells(manifest, [_sound_cell(name, cell, said) for name, cell in results.items() if cell])
        own = {(record.engine, record.started, record.compute_ms) for cell in cells if (record := cell.bench)}
        run = cls(
            files.folder, size,
            command=next((found.command for found in (size, manifest, profile) if found is not None), None) or None,
            warnings=tuple(
                dict.fromkeys(
                    text for part in (size, profile, comparison, upgrade) if part is not None for text in part.warnings
                )
            ),
            measurements=tuple(r for r in measurements if (r.engine, r.started, r.compute_ms) not in own),
            skipped=tuple(said), manifest=manifest, cells=cells, profile=profile, comparison=comparison,
            upgrade=upgrade, files=files, loads=_final_loads(loads),
        )  # fmt: skip
        if not (run.recorded or measurements):
            raise UsageError(
                f"`{files.display_path(names[0])}` holds no complete record"
                + "".join(f": {reason}" for reason in said),
                hint=f"measure again: `trt-engine bench ENGINE -o {quoted(folder)}`",
            )
        return run

    @property
    def recorded(self) -> list[RecordFile]:
        """The files that it has records of."""
        return [file for file in RECORD_FILES if getattr(self, file.field)]

    @property
    def complete(self) -> bool:
        """False if any part was interrupted."""
        parts = (self.size, self.profile, self.comparison, *self.benches, *self.loads)
        reached = all(cell.state not in ("interrupted", "waiting") for cell in self.cells)
        return reached and all(part is None or part.complete for part in parts)

    @property
    def benches(self) -> tuple[BenchRecord, ...]:
        """All measurements: of the cells, then the others."""
        return (*(cell.bench for cell in self.cells if cell.bench is not None), *self.measurements)

    @property
    def environment(self) -> Environment:
        """The environment of the first record that has one."""
        parts = (
            self.size, self.manifest, *self.benches, self.profile, self.comparison, self.upgrade,
            *(cell.evaluation for cell in self.cells), *(cell.profile for cell in self.cells), *self.loads,
        )  # fmt: skip
        return next((part.environment for part in parts if part is not None), _UNKNOWN_ENVIRONMENT)


_UNKNOWN_ENVIRONMENT = Environment("not recorded", "not recorded", "not recorded", "not recorded", 0, (), 0)
"""Environment of a run with only failures."""
_RUN_FOLDER_HINT = (
    "a run folder comes from `trt-engine run PLAN`, or from `size`, `bench`, `profile`, `compare` or `loadtest` "
    "with `-o DIR`"
)


def _check_folder(folder: Path) -> None:
    """Raise `UsageError` for a path that cannot be a run."""
    if run_folder.is_archive(folder):
        return
    if not folder.exists():
        raise UsageError(f"no such folder `{folder}`", hint=_RUN_FOLDER_HINT)
    if not folder.is_dir():
        whole = any(folder.name == file.name for file in RECORD_FILES)
        raise UsageError(
            f"`{folder}` is a file, expected the folder of a run, or an archive of one (.tar.gz, .zip)",
            hint=f"`trt-engine report {quoted(folder.parent)}`" if whole else _RUN_FOLDER_HINT,
        )


def _sound_cell(name: str, cell: CellResult, skipped: list[str]) -> CellResult:
    """The cell without a measurement or profile that cannot be true."""
    if (odd := _invalid_reason(cell.bench)) is not None:
        skipped.append(f"the measurement in {name} was left out: {odd}")
        cell = replace(cell, bench=None)
    if cell.profile is not None and cell.profile.batch < 1:
        skipped.append(f"the profile in {name} was left out: its batch is {cell.profile.batch}")
        cell = replace(cell, profile=None)
    return cell


def _order_cells(manifest: RunManifest | None, results: list[CellResult]) -> tuple[CellResult, ...]:
    """Order the cells as in the plan; those without a record get the state `waiting`."""
    found = {result.spec.label: result for result in results}
    planned = {spec.label: CellResult(spec, "waiting") for spec in manifest.cells} if manifest is not None else {}
    return tuple((planned | found).values())


def _read_size(files: run_folder.RunFiles) -> _SizeDocument:
    raw = files.read(run_folder.SIZE)
    path = files.display_path(run_folder.SIZE)
    again = f"run `size` again, or move `{run_folder.SIZE}` away to report from `{run_folder.RECORDS}` alone"
    if not raw.strip():
        raise UsageError(f"`{path}` is empty, expected the JSON document of `trt-engine size`", hint=again)
    try:
        head: Any = decode_json(raw)
    except msgspec.DecodeError as error:
        raise UsageError(f"`{path}` is damaged: {_lower_first(error)}", hint=again) from error
    schema = head.get("schema", "trt-engine/size") if isinstance(head, dict) else type(head).__name__
    if schema != "trt-engine/size":
        raise UsageError(f"`{path}` is `{schema}`, expected `trt-engine/size`", hint=again)
    _check_version(head, path)
    try:
        return msgspec.convert(head, _SizeDocument)
    except msgspec.ValidationError as error:
        raise UsageError(f"`{path}` is not what `size` writes: {_lower_first(error)}", hint=again) from error


def _check_version(head: dict[str, Any], path: str) -> None:
    version = head.get("schema_version", _VERSION)
    if isinstance(version, int) and version > _VERSION:
        raise UsageError(
            f"`{path}` has schema version {version}, this tool reads up to {_VERSION}",
            hint="install a newer trt-engine",
        )


def _read_record(files: run_folder.RunFiles, name: str, kind: type[_T], skipped: list[str]) -> _T | None:
    """Read an optional record; an unreadable one is reported in `skipped`."""
    if not files.contains(name):
        return None
    try:
        raw = files.read(name)
    except TrtEngineError as error:
        skipped.append(f"{name} was left out: {error.message}")
        return None
    if not raw.strip():
        skipped.append(f"{name} is empty and was left out")
        return None
    try:
        head: Any = decode_json(raw)
        if isinstance(head, dict):
            _check_version(head, files.display_path(name))
        return msgspec.convert(head, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        skipped.append(f"{name} is not what was expected there and was left out: {_lower_first(error)}")
    except msgspec.DecodeError as error:
        skipped.append(f"{name} is damaged and was left out: {_lower_first(error)}")
    return None


def _read_records(files: run_folder.RunFiles, name: str, kind: type[_R], skipped: list[str]) -> tuple[_R, ...]:
    """Read a file of records, one a line; skipped lines are reported. An interruption leaves a truncated last line."""
    lines = files.read(name).split(b"\n") if files.contains(name) else []
    found: list[_R] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decode_json(line, kind)
        except msgspec.DecodeError as error:
            if "truncated" not in str(error) and (number < len(lines) or isinstance(error, msgspec.ValidationError)):
                raise _damaged_line(files, name, number, error) from error
            skipped.append(f"line {number} of {name} is cut off and was skipped")
            continue
        if (odd := _invalid_reason(record)) is not None:
            skipped.append(f"line {number} of {name} was left out: {odd}")
        else:
            found.append(record)
    return tuple(found)


def _final_loads(records: tuple[LoadtestRecord, ...]) -> tuple[LoadtestRecord, ...]:
    """Without the steps of a search that ended: its result names them."""
    last = max((place for place, record in enumerate(records) if record.steps), default=-1)
    return tuple(record for place, record in enumerate(records) if record.steps or not record.bound or place > last)


def _invalid_reason(record: BenchRecord | LoadtestRecord | None) -> str | None:
    """Why a measurement is invalid, or None."""
    if record is None:
        return None
    if record.batch < 1:
        return f"its batch is {record.batch}"
    times = record.compute_ms if isinstance(record, BenchRecord) else (*record.latency_ms, *record.sent_s)
    if odd := _invalid_times((*times, record.wall_s)):
        return odd
    if isinstance(record, LoadtestRecord) and len(record.sent_s) != len(record.latency_ms):
        return "it has more times than answers"
    return None if all(0 <= percent <= 100 for percent in record.percentiles) else "it has percentiles beyond 100"


def _invalid_times(times: Iterable[float]) -> str | None:
    return None if all(0 <= value < _MAX_MS for value in times) else "it has times that no clock gives"


def _damaged_line(files: run_folder.RunFiles, name: str, number: int, error: Exception) -> TrtEngineError:
    path = files.display_path(name)
    again = f"remove that line (`sed -i {number}d {path}`), or measure again"
    return UsageError(
        f"line {number} of `{path}` is not a measurement: {_lower_first(error)}",
        hint="ask for the archive again, or measure again" if files.packed else again,
    )


def _lower_first(error: Exception) -> str:
    text = str(error)
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]
