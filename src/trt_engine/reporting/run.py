"""The records of one run, read back from its folder: `size.json` and `records.jsonl`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.errors import SetupError, TrtEngineError, UsageError
from trt_engine.records import BenchRecord, SizeReport

__all__ = ["RECORDS", "SIZE", "Run"]

SIZE = "size.json"
RECORDS = "records.jsonl"
_SIZE_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Common(SizeReport):
    """`size.json` as the verb writes it: the common keys beside the report's own; keys not known here are passed over."""

    schema: str = "trt-engine/size"
    schema_version: int = _SIZE_VERSION
    command: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run folder holds: what `size` said, if it ran there, and every measurement with its samples."""

    folder: Path
    size: SizeReport | None
    command: str | None
    """The command line `size` was started with."""
    warnings: tuple[str, ...]
    measurements: tuple[BenchRecord, ...]
    skipped: tuple[str, ...] = ()
    """What could not be read and was left out, in words."""

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """The run in `folder`; `UsageError` when it is no run folder or its records are damaged."""
        folder = Path(folder)
        if not folder.exists():
            raise UsageError(f"no such folder `{folder}`", hint=_MAKE_ONE)
        if not folder.is_dir():
            raise UsageError(
                f"`{folder}` is a file, expected the folder of a run",
                hint=f"`trt-engine report {folder.parent}`" if folder.name in (SIZE, RECORDS) else _MAKE_ONE,
            )
        said, records = folder / SIZE, folder / RECORDS
        if not said.exists() and not records.exists():
            raise UsageError(f"`{folder}` is not a run folder: it has neither `{SIZE}` nor `{RECORDS}`", hint=_MAKE_ONE)
        size = _read_size(said) if said.exists() else None
        measurements, skipped = _read_records(records) if records.exists() else ((), ())
        if size is None and not measurements:
            raise UsageError(
                f"`{records}` holds no complete record" + "".join(f": {reason}" for reason in skipped),
                hint=f"measure again: `trt-engine bench ENGINE -o {folder}`",
            )
        return cls(
            folder,
            size,
            (size.command or None) if size else None,
            size.warnings if size else (),
            measurements,
            skipped,
        )

    @property
    def complete(self) -> bool:
        """False when something was interrupted."""
        return (self.size is None or self.size.complete) and all(record.complete for record in self.measurements)


_MAKE_ONE = "a run folder comes from `trt-engine size MODEL -o DIR` or `trt-engine bench ENGINE -o DIR`"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise SetupError(f"cannot read `{path}`: {reason}", hint="check the file and its permissions") from error


def _read_size(path: Path) -> _Common:
    raw = _read(path)
    again = f"run `size` again, or move `{path.name}` away to report from `{RECORDS}` alone"
    if not raw.strip():
        raise UsageError(f"`{path}` is empty, expected the JSON document of `trt-engine size`", hint=again)
    try:
        head: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise UsageError(f"`{path}` is damaged: {_lower(error)}", hint=again) from error
    schema = head.get("schema", "trt-engine/size") if isinstance(head, dict) else type(head).__name__
    if schema != "trt-engine/size":
        raise UsageError(f"`{path}` is `{schema}`, expected `trt-engine/size`", hint=again)
    version = head.get("schema_version", _SIZE_VERSION)
    if isinstance(version, int) and version > _SIZE_VERSION:
        raise UsageError(
            f"`{path}` has schema version {version}, this tool reads up to {_SIZE_VERSION}",
            hint="install a newer trt-engine",
        )
    try:
        return msgspec.convert(head, _Common)
    except msgspec.ValidationError as error:
        raise UsageError(f"`{path}` is not what `size` writes: {_lower(error)}", hint=again) from error


def _read_records(path: Path) -> tuple[tuple[BenchRecord, ...], tuple[str, ...]]:
    """The records, and what was left out: a line without an end is what an interruption leaves behind."""
    lines = _read(path).split(b"\n")
    found: list[BenchRecord] = []
    skipped: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=BenchRecord))
        except msgspec.DecodeError as error:
            if "truncated" not in str(error) and (number < len(lines) or isinstance(error, msgspec.ValidationError)):
                raise _damaged(path, number, error) from error
            skipped.append(f"line {number} of {path.name} is cut off and was skipped")
    return tuple(found), tuple(skipped)


def _damaged(path: Path, number: int, error: Exception) -> TrtEngineError:
    return UsageError(
        f"line {number} of `{path}` is not a measurement: {_lower(error)}",
        hint=f"remove that line (`sed -i {number}d {path}`), or measure again",
    )


def _lower(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]
