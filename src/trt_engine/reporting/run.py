"""The records of one run, read back from its folder or from an archive of it: what `size`, `bench`, `run`, `profile` and
`compare` wrote there, any mix of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trt_engine.cells import CellResult, RunManifest
from trt_engine.comparisons import CompareReport
from trt_engine.environment import Environment
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.files import path_of
from trt_engine.records import BenchRecord, SizeReport
from trt_engine.runfiles import COMPARE, PROFILE, RECORDS, RUN, SIZE, RunFiles, is_archive, no_run
from trt_engine.traces import ProfileReport

__all__ = ["RECORDS", "SIZE", "Run"]

_VERSION = 1
_LONGEST_MS = 1e12
"""Thirty years: what is longer, or below zero, was not measured."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Common(SizeReport):
    """`size.json` as the verb writes it: the common keys beside the report's own; keys not known here are passed over."""

    schema: str = "trt-engine/size"
    schema_version: int = _VERSION
    command: str = ""


@dataclass(frozen=True, slots=True)
class _Profiled(ProfileReport):
    """`profile.json` as the verb writes it, with the command line."""

    command: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run folder holds: what each verb said, if it ran there, and every measurement with its samples."""

    folder: Path
    """Of an archive, the folder it would unpack to."""
    size: SizeReport | None
    command: str | None
    """The command line the run was started with."""
    warnings: tuple[str, ...]
    measurements: tuple[BenchRecord, ...]
    """Those of `records.jsonl`."""
    skipped: tuple[str, ...] = ()
    """What could not be read and was left out, in words."""
    manifest: RunManifest | None = None
    cells: tuple[CellResult, ...] = ()
    """In the order of the plan; those that were never reached have the state `waiting`."""
    profile: ProfileReport | None = None
    comparison: CompareReport | None = None
    files: RunFiles | None = None

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """The run in `folder`, or in an archive; `UsageError` when it is no run or its records are damaged."""
        folder = path_of(folder, "`folder`")
        _refuse(folder)
        files = RunFiles.open(folder)
        names = [name for name in (SIZE, RECORDS, RUN, PROFILE, COMPARE) if files.has(name)]
        cell_names = files.cells()
        if not names and not cell_names:
            raise UsageError(no_run(folder), hint=_MAKE_ONE)
        said: list[str] = []
        size = _read_size(files) if SIZE in names else None
        measurements, skipped = _read_records(files) if RECORDS in names else ((), ())
        said += skipped
        manifest = _read(files, RUN, RunManifest, said) if RUN in names else None
        results = [_read(files, name, CellResult, said) for name in cell_names]
        profile = _read(files, PROFILE, _Profiled, said) if PROFILE in names else None
        if profile is not None and profile.batch < 1:
            said.append(f"{PROFILE} was left out: its batch is {profile.batch}")
            profile = None
        comparison = _read(files, COMPARE, CompareReport, said) if COMPARE in names else None
        whole: list[CellResult] = []
        for name, result in zip(cell_names, results, strict=True):
            if result is not None and (odd := _odd(result.bench)) is not None:
                said.append(f"the measurement in {name} was left out: {odd}")
                result = replace(result, bench=None)
            if result is not None and result.profile is not None and result.profile.batch < 1:
                said.append(f"the profile in {name} was left out: its batch is {result.profile.batch}")
                result = replace(result, profile=None)
            whole += [result] if result is not None else []
        cells = _ordered(manifest, whole)
        if not (size or measurements or manifest or cells or profile or comparison):
            where = files.shown(names[0] if names else cell_names[0])
            raise UsageError(
                f"`{where}` holds no complete record" + "".join(f": {reason}" for reason in said),
                hint=f"measure again: `trt-engine bench ENGINE -o {folder}`",
            )
        own = {(record.engine, record.started, record.compute_ms) for cell in cells if (record := cell.bench)}
        kept = tuple(r for r in measurements if (r.engine, r.started, r.compute_ms) not in own)
        told = [*(size.warnings if size else ()), *(profile.warnings if profile else ())]
        told += comparison.warnings if comparison else ()
        command = next((found.command for found in (size, manifest, profile) if found is not None), None) or None
        return cls(
            files.home, size, command, tuple(dict.fromkeys(told)), kept, tuple(said), manifest, cells, profile,
            comparison, files,
        )  # fmt: skip

    @property
    def complete(self) -> bool:
        """False when something was interrupted."""
        parts = (self.size, self.profile, self.comparison, *self.benches)
        reached = all(cell.state not in ("interrupted", "waiting") for cell in self.cells)
        return reached and all(part is None or part.complete for part in parts)

    @property
    def benches(self) -> tuple[BenchRecord, ...]:
        """Every measurement: of the cells, then the others."""
        return (*(cell.bench for cell in self.cells if cell.bench is not None), *self.measurements)

    @property
    def environment(self) -> Environment:
        """Of the first record that has one."""
        evaluated = next((cell.evaluated for cell in self.cells if cell.evaluated is not None), None)
        profiled = next((cell.profile for cell in self.cells if cell.profile is not None), None)
        first = (self.size, self.manifest, *self.benches, self.profile, self.comparison, evaluated, profiled)
        return next((record.environment for record in first if record is not None), _NOWHERE)


_NOWHERE = Environment("not recorded", "not recorded", "not recorded", "not recorded", 0, (), 0)
"""Of a run of which nothing but failures is left."""

_MAKE_ONE = (
    "a run folder comes from `trt-engine run PLAN`, or from `size`, `bench`, `profile` or `compare` with `-o DIR`"
)


def _refuse(folder: Path) -> None:
    """`UsageError` for what can be no run."""
    if is_archive(folder):
        return
    if not folder.exists():
        raise UsageError(f"no such folder `{folder}`", hint=_MAKE_ONE)
    if not folder.is_dir():
        whole = folder.name in (SIZE, RECORDS, RUN, PROFILE, COMPARE)
        raise UsageError(
            f"`{folder}` is a file, expected the folder of a run, or an archive of one (.tar.gz, .zip)",
            hint=f"`trt-engine report {folder.parent}`" if whole else _MAKE_ONE,
        )


def _ordered(manifest: RunManifest | None, results: list[CellResult]) -> tuple[CellResult, ...]:
    """The cells as the plan has them; those without a record wait."""
    found = {result.spec.label: result for result in results}
    if manifest is None:
        return tuple(found.values())
    planned = [found.get(spec.label) or CellResult(spec, "waiting") for spec in manifest.cells]
    labels = {spec.label for spec in manifest.cells}
    return (*planned, *(result for label, result in found.items() if label not in labels))


def _read_size(files: RunFiles) -> _Common:
    raw = files.read(SIZE)
    path = files.shown(SIZE)
    again = f"run `size` again, or move `{SIZE}` away to report from `{RECORDS}` alone"
    if not raw.strip():
        raise UsageError(f"`{path}` is empty, expected the JSON document of `trt-engine size`", hint=again)
    try:
        head: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise UsageError(f"`{path}` is damaged: {_lower(error)}", hint=again) from error
    schema = head.get("schema", "trt-engine/size") if isinstance(head, dict) else type(head).__name__
    if schema != "trt-engine/size":
        raise UsageError(f"`{path}` is `{schema}`, expected `trt-engine/size`", hint=again)
    _refuse_newer(head, path)
    try:
        return msgspec.convert(head, _Common)
    except msgspec.ValidationError as error:
        raise UsageError(f"`{path}` is not what `size` writes: {_lower(error)}", hint=again) from error


def _refuse_newer(head: dict[str, Any], path: str) -> None:
    version = head.get("schema_version", _VERSION)
    if isinstance(version, int) and version > _VERSION:
        raise UsageError(
            f"`{path}` has schema version {version}, this tool reads up to {_VERSION}",
            hint="install a newer trt-engine",
        )


def _read(files: RunFiles, name: str, kind: type[_T], skipped: list[str]) -> _T | None:
    """A record that is one of several: what cannot be read is said, and the others stand."""
    try:
        raw = files.read(name)
    except TrtEngineError as error:
        skipped.append(f"{name} was left out: {error.message}")
        return None
    if not raw.strip():
        skipped.append(f"{name} is empty and was left out")
        return None
    try:
        head: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        skipped.append(f"{name} is damaged and was left out: {_lower(error)}")
        return None
    if isinstance(head, dict):
        _refuse_newer(head, files.shown(name))
    try:
        return msgspec.convert(head, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        skipped.append(f"{name} is not what was expected there and was left out: {_lower(error)}")
        return None


def _read_records(files: RunFiles) -> tuple[tuple[BenchRecord, ...], tuple[str, ...]]:
    """The records, and what was left out: a line without an end is what an interruption leaves behind."""
    lines = files.read(RECORDS).split(b"\n")
    found: list[BenchRecord] = []
    skipped: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=BenchRecord)
            if (odd := _odd(record)) is not None:
                skipped.append(f"line {number} of {RECORDS} was left out: {odd}")
                continue
            found.append(record)
        except msgspec.DecodeError as error:
            if "truncated" not in str(error) and (number < len(lines) or isinstance(error, msgspec.ValidationError)):
                raise _damaged(files, number, error) from error
            skipped.append(f"line {number} of {RECORDS} is cut off and was skipped")
    return tuple(found), tuple(skipped)


def _odd(record: BenchRecord | None) -> str | None:
    """What no clock and no batch can be in a measurement; None for a sound one."""
    if record is None:
        return None
    if record.batch < 1:
        return f"its batch is {record.batch}"
    if not all(0 <= value < _LONGEST_MS for value in (*record.compute_ms, record.wall_s)):
        return "it has times that no clock gives"
    return None if all(0 <= percent <= 100 for percent in record.percentiles) else "it has percentiles beyond 100"


def _damaged(files: RunFiles, number: int, error: Exception) -> TrtEngineError:
    path = files.shown(RECORDS)
    return UsageError(
        f"line {number} of `{path}` is not a measurement: {_lower(error)}",
        hint="ask for the archive again, or measure again"
        if files.packed
        else f"remove that line (`sed -i {number}d {path}`), or measure again",
    )


def _lower(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]
