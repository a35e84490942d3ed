"""`te.pack`: one archive of a run, readable with the core package alone.

Archives are reproducible: sorted names, no times or owners, reports rendered again from the records.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from trt_engine import atomic_io, run_folder
from trt_engine.display import RichDisplay
from trt_engine.environment import distribution_version
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import quoted
from trt_engine.public_function import public_function
from trt_engine.reporting.report import render
from trt_engine.reporting.run_records import RECORD_FILES, RunRecords

_REPORT_FORMATS = {run_folder.REPORT: "text", "report.md": "md", "report.html": "html"}
_ENGINE_SUFFIXES = (
    ".engine", ".plan", ".trt", ".onnx", ".data", ".pt", ".pt2", ".pth", ".safetensors", ".so", ".cache", ".runtime_cache",
    ".npz",  # reference inputs and outputs of an engine, possibly private data
)  # fmt: skip
_RAW_SUFFIXES = (".nsys-rep", ".ncu-rep", ".qdrep", ".qdstrm", ".sqlite", ".pftrace")
_RAW_FOLDERS = ("nsight-systems", "nsight-compute", "profile", "profiles")
_TEXT_SUFFIXES = (".json", ".jsonl", ".txt", ".md", ".html", ".log", ".yaml", ".yml", ".csv", ".out", ".err")
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every member: the oldest in the zip format."""
_FIXED_TIME_S = 315532800
_CHUNK = 1 << 20
_RECORDS = {file.name for file in RECORD_FILES}


@dataclass(frozen=True, slots=True)
class PackReport(RichDisplay):
    """Result of `pack`, or of its dry run: the archive, its files and the omitted files."""

    archive: str
    run: str
    nbytes: int | None
    """Size of the archive; None for a dry run."""
    digest: str | None
    """SHA-256 of the archive; None for a dry run."""
    holds: tuple[str, ...]
    """Verbs whose records it contains."""
    files: tuple[run_folder.PackedFile, ...]
    left_out: tuple[run_folder.OmittedFile, ...]
    redacted: tuple[str, ...]
    """Text files with home folders replaced by `~`."""
    artifacts: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Member:
    """One file to pack: bytes, or the path of a file to copy."""

    path: str
    kind: str
    data: bytes | Path
    nbytes: int
    digest: str
    redacted: bool = False


@public_function
def pack(folder: Path | str, out: Path | str | None = None, *, raw: bool = True, engines: bool = False) -> Path:
    """Pack the run in `folder` into one archive, `.tar.gz` or `.zip` by the suffix of `out`; return its path.

    `raw` keeps raw profiles, `engines` adds engines and models. Links, hidden files and archives are omitted; home folders
    in text files become `~`. `report` and `inspect` read the archive like the folder. Raises `UsageError` for a folder that
    does not exist, is an archive already, or an `out` with another suffix.
    """
    return Path(pack_run(folder, out, raw=raw, engines=engines).archive)


def default_archive(folder: Path) -> Path:
    """The default archive path, beside the run folder."""
    whole = folder.resolve()
    beside = folder.parent if folder.name not in ("", "..") else whole.parent
    return beside / f"{atomic_io.replace_surrogates(whole.name) or 'run'}.tar.gz"


def is_own_archive(path: Path) -> bool:
    """True for an archive written by `pack`, which may be overwritten."""
    try:
        return run_folder.is_archive(path) and run_folder.RunFiles.open(path).manifest is not None
    except (UsageError, SetupError):
        return False


@atomic_io.all_or_nothing()
def pack_run(
    folder: Path | str,
    out: Path | str | None = None,
    *,
    raw: bool = True,
    engines: bool = False,
    dry_run: bool = False,
) -> PackReport:
    """Pack the run; report the packed and the omitted files."""
    folder = atomic_io.as_path(folder, "`folder`")
    if "\0" in str(folder):
        raise UsageError(
            f"no such folder `{atomic_io.replace_surrogates(str(folder))}`",
            hint="`trt-engine run PLAN -o DIR` makes one",
        )
    named = atomic_io.as_path(out, "`out`") if out is not None else default_archive(folder)
    with atomic_io.os_errors(named):
        target = atomic_io.resolve_link(named)
    if not run_folder.is_archive(target):
        raise UsageError(f"`{target}` is not an archive name, expected .tar.gz, .tgz or .zip",
                         hint=f"`-o {target.name or 'run'}.tar.gz`")  # fmt: skip
    if run_folder.is_archive(folder):
        raise UsageError(f"`{folder}` is an archive already", hint=f"read it with `trt-engine report {quoted(folder)}`")
    run = RunRecords.open(folder)
    name = atomic_io.replace_surrogates(folder.resolve().name) or "run"
    members, left_out = _select_files(run, folder, target, raw=raw, engines=engines)
    manifest = _manifest(run, name, members, left_out)
    made = PackReport(
        str(target), str(folder), None, None, manifest.holds, manifest.files, left_out, manifest.redacted,
        {"archive": str(target)}, run.skipped,
    )  # fmt: skip
    if dry_run:
        return made
    head = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    first = _Member(run_folder.MANIFEST, "record", head, len(head), _sha256(head))
    _write_archive(target, name, [first, *members])
    return replace(made, nbytes=target.stat().st_size, digest=atomic_io.file_digest(target))


def _manifest(
    run: RunRecords, name: str, members: Sequence[_Member], left_out: tuple[run_folder.OmittedFile, ...]
) -> run_folder.PackManifest:
    return run_folder.PackManifest(
        schema="trt-engine/pack",
        schema_version=1,
        tool={"name": "trt-engine", "version": distribution_version("trt-engine") or "unknown"},
        name=name,
        holds=tuple(dict.fromkeys(file.verb for file in run.recorded)),
        how_to_read=(
            "trt-engine report ARCHIVE",
            "trt-engine inspect ARCHIVE",
            f"or unpack it and open {name}/report.html in any browser; no network and no other package is needed",
            "digests are SHA-256 of the files in the archive",
        ),
        versions=_versions(run),
        files=tuple(run_folder.PackedFile(m.path, m.nbytes, m.digest, m.kind) for m in members),
        omitted=left_out,
        redacted=tuple(m.path for m in members if m.redacted),
    )


def _versions(run: RunRecords) -> dict[str, str]:
    here = run.environment
    stated = {"trt-engine": here.tool, "python": here.python, "platform": here.platform, **here.libraries}
    more = {"gpu": here.gpu, "driver": here.driver, "cuda": here.cuda, "container": here.container}
    return stated | {name: value for name, value in more.items() if value}


# ------------------------------------------------------------------------------------------------ what goes in


def _select_files(
    run: RunRecords, folder: Path, target: Path, *, raw: bool, engines: bool
) -> tuple[list[_Member], tuple[run_folder.OmittedFile, ...]]:
    """The members, records first and large files last, and the omitted files."""
    members: list[_Member] = []
    left: list[run_folder.OmittedFile] = []
    for name, form in _REPORT_FORMATS.items():
        data = render(run, form).encode()  # type: ignore[arg-type]
        members.append(_Member(name, "report", data, len(data), _sha256(data)))
    for path in sorted(_list_files(folder)):
        name = atomic_io.replace_surrogates(path.relative_to(folder).as_posix())
        if (
            name in _REPORT_FORMATS
            or name == run_folder.MANIFEST
            or (target.exists() and path.exists() and path.samefile(target))
        ):
            continue
        with atomic_io.os_errors(path, "pack"):
            nbytes = path.lstat().st_size
            kind = _file_kind(name)
            reason = _omission_reason(path, name, kind, raw, engines)
            if reason is not None:
                left.append(run_folder.OmittedFile(name, nbytes, reason))
            else:
                members.append(_make_member(path, name, kind))
    order = ("record", "report", "other", "raw", "engine")
    return sorted(members, key=lambda m: (order.index(m.kind), m.path)), tuple(left)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield every file; links are yielded, not followed."""
    with atomic_io.os_errors(folder, "pack"):
        entries = list(folder.iterdir())
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _list_files(entry)
            if not any(entry.iterdir()):
                yield entry
        elif not entry.is_dir() or entry.is_symlink():
            yield entry


def _file_kind(name: str) -> str:
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    first = path.parts[0]
    if path.name in _RECORDS or name == run_folder.PLAN or (first == run_folder.CELLS and suffix == ".json"):
        return "record"
    if suffix in _ENGINE_SUFFIXES:
        return "engine"
    traced = suffix == ".json" and path.stem.startswith(("timeline", "onnxruntime"))
    if suffix in _RAW_SUFFIXES or traced or (first in _RAW_FOLDERS and suffix not in (".log", ".txt")):
        return "raw"
    return "other"


def _omission_reason(path: Path, name: str, kind: str, raw: bool, engines: bool) -> str | None:
    """Why a file is omitted, or None."""
    reasons = {
        "a link": path.is_symlink(),
        "an empty folder": path.is_dir(),
        "not a plain file": not path.is_file(),
        "hidden": any(part.startswith(".") for part in PurePosixPath(name).parts),
        "an archive itself": run_folder.is_archive(path),
        "a raw profile: left out with `--no-raw`": kind == "raw" and not raw,
        "an engine or model: added with `--engines`": kind == "engine" and not engines,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _make_member(path: Path, name: str, kind: str) -> _Member:
    """A file as it will stand in the archive: hashed now, read again when written."""
    total, nbytes, redacted = hashlib.sha256(), 0, False
    with atomic_io.open_regular(path) as file:
        for piece, changed in _pieces(file, path.suffix.lower() in _TEXT_SUFFIXES):
            total.update(piece)
            nbytes += len(piece)
            redacted |= changed
    return _Member(name, kind, path, nbytes, f"sha256:{total.hexdigest()}", redacted)


def _pieces(file: IO[bytes], is_text: bool) -> Iterator[tuple[bytes, bool]]:
    """The pieces of a file, home folders in a text redacted, and whether a piece was changed."""
    return (
        run_folder.redact_home_chunks(file)
        if is_text
        else ((piece, False) for piece in iter(partial(file.read, _CHUNK), b""))
    )


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


# ------------------------------------------------------------------------------------------------ writing


def _write_archive(target: Path, name: str, members: Sequence[_Member]) -> None:
    """Write the archive atomically."""
    writer = _write_zip if target.name.lower().endswith(".zip") else _write_tar
    with atomic_io.staging_folder(target) as aside, atomic_io.os_errors(target):
        made = aside / "archive"
        with made.open("wb") as file:
            writer(file, name, members)
            file.flush()
            os.fsync(file.fileno())
        atomic_io.move_into_place(made, target)


def _write_tar(file: IO[bytes], name: str, members: Sequence[_Member]) -> None:
    with ExitStack() as closing:
        packed = closing.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0))
        tar = closing.enter_context(tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT))
        for member in members:
            info = tarfile.TarInfo(f"{name}/{member.path}")
            info.size, info.mtime, info.mode = member.nbytes, _FIXED_TIME_S, 0o644
            with _open_member(member) as source:
                tar.addfile(info, source)


def _write_zip(file: IO[bytes], name: str, members: Sequence[_Member]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for member in members:
            info = zipfile.ZipInfo(f"{name}/{member.path}", _FIXED_DATE)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o100644 << 16
            info.file_size = member.nbytes
            with _open_member(member) as source, archive.open(info, "w") as into:
                while chunk := source.read(_CHUNK):
                    into.write(chunk)


class _VerifiedFile(io.RawIOBase):
    """The bytes of a member, home folders redacted where it says so; raises `SetupError` where they are not its digest's."""

    def __init__(self, member: _Member, source: IO[bytes]) -> None:
        super().__init__()
        self._member, self._source = member, source
        self._pieces = (piece for piece, _ in _pieces(source, member.redacted))
        self._buffer = b""
        self._seen = hashlib.sha256()
        self._remaining = member.nbytes

    def read(self, size: int = -1) -> bytes:
        """Read exactly `size` bytes unless at the end: archive writers treat a short read as the end."""
        size = _CHUNK if size < 0 else size
        while len(self._buffer) < size and (more := next(self._pieces, None)) is not None:
            self._buffer += more
        chunk, self._buffer = self._buffer[:size], self._buffer[size:]
        self._seen.update(chunk)
        self._remaining -= len(chunk)
        ended = not chunk or not self._remaining
        if self._remaining < 0 or (ended and f"sha256:{self._seen.hexdigest()}" != self._member.digest):
            raise SetupError(
                f"`{self._member.path}` changed while it was packed", hint="wait for what writes there, then pack again"
            )
        return chunk

    def close(self) -> None:
        self._source.close()
        super().close()


def _open_member(member: _Member) -> IO[bytes]:
    if isinstance(member.data, bytes):
        return io.BytesIO(member.data)
    return _VerifiedFile(member, atomic_io.open_regular(member.data))  # type: ignore[return-value]
