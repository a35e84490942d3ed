"""`te.pack`: one archive of a run, to be read by a colleague who has the core package and nothing else.

The same run makes the same bytes: names sorted, times and owners left out, reports written anew from the records.
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
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from trt_engine.environment import version_of
from trt_engine.errors import SetupError, UsageError
from trt_engine.files import digest, end_of_links, explain, path_of, printable, staging_folder
from trt_engine.reporting.run import Run
from trt_engine.reporting.write import render
from trt_engine.runfiles import (
    CELLS,
    COMPARE,
    MANIFEST,
    PLAN,
    PROFILE,
    RECORDS,
    REPORT,
    RUN,
    SIZE,
    LeftOut,
    PackedFile,
    PackManifest,
    RunFiles,
    is_archive,
    without_homes,
)

__all__ = ["PackReport", "default_target", "is_ours", "pack", "pack_run"]

_REPORTS = {REPORT: "text", "report.md": "md", "report.html": "html"}
_ENGINES = (".engine", ".plan", ".trt", ".onnx", ".data", ".pt", ".pt2", ".pth", ".safetensors", ".so", ".cache")
_RAW = (".nsys-rep", ".ncu-rep", ".qdrep", ".qdstrm", ".sqlite", ".pftrace")
_RAW_FOLDERS = ("nsight-systems", "nsight-compute", "profile", "profiles")
_TEXT = (".json", ".jsonl", ".txt", ".md", ".html", ".log", ".yaml", ".yml", ".csv", ".out", ".err")
_ALWAYS = (1980, 1, 1, 0, 0, 0)
"""The date of every member: the oldest a zip can state."""
_ALWAYS_S = 315532800
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackReport:
    """What `pack` says: the archive, what is in it and what is not. Of a dry run: what would be."""

    archive: str
    run: str
    nbytes: int | None
    """Of the archive; None of a dry run."""
    digest: str | None
    """SHA-256 of the archive; None of a dry run."""
    holds: tuple[str, ...]
    """The records in it, by the verbs that wrote them."""
    files: tuple[PackedFile, ...]
    left_out: tuple[LeftOut, ...]
    redacted: tuple[str, ...]
    """Text files in which names of home folders were replaced by `~`."""
    artifacts: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Member:
    """One file to pack: bytes that were made or read here, or a file to be copied as it is."""

    path: str
    kind: str
    data: bytes | Path
    nbytes: int
    digest: str
    redacted: bool = False


def pack(folder: Path | str, out: Path | str | None = None, *, raw: bool = True, engines: bool = False) -> Path:
    """The path of one archive of the run in `folder`: `.tar.gz`, or `.zip` by the name of `out`.

    `raw` keeps raw profiles, `engines` adds the engines and models. Links, hidden files and archives stay out; names of
    home folders in text files become `~`. `report` and `inspect` read the archive as they read the folder.
    """
    return Path(pack_run(folder, out, raw=raw, engines=engines).archive)


def default_target(folder: Path) -> Path:
    """Beside the run's folder, by its name."""
    whole = folder.resolve()
    beside = folder.parent if folder.name not in ("", "..") else whole.parent
    return beside / f"{printable(whole.name) or 'run'}.tar.gz"


def is_ours(path: Path) -> bool:
    """True for an archive that `pack` wrote, which may be made anew without asking."""
    try:
        return is_archive(path) and RunFiles.open(path).manifest is not None
    except (UsageError, SetupError):
        return False


def pack_run(
    folder: Path | str,
    out: Path | str | None = None,
    *,
    raw: bool = True,
    engines: bool = False,
    dry_run: bool = False,
) -> PackReport:
    """Pack the run, and say what is in the archive and what is not."""
    folder = path_of(folder, "`folder`")
    if "\0" in str(folder):
        raise UsageError(f"no such folder `{printable(str(folder))}`", hint="`trt-engine run PLAN -o DIR` makes one")
    named = path_of(out, "`out`") if out is not None else default_target(folder)
    try:
        target = end_of_links(named)
    except OSError as error:
        raise explain(error, named) from error
    if not is_archive(target):
        raise UsageError(f"`{target}` is no name of an archive, expected .tar.gz, .tgz or .zip",
                         hint=f"`-o {target.name or 'run'}.tar.gz`")  # fmt: skip
    if is_archive(folder):
        raise UsageError(f"`{folder}` is an archive already", hint=f"read it with `trt-engine report {folder}`")
    run = Run.open(folder)
    name = printable(folder.resolve().name) or "run"
    members, left_out = _chosen(run, folder, target, raw=raw, engines=engines)
    manifest = PackManifest(
        schema="trt-engine/pack",
        schema_version=1,
        tool={"name": "trt-engine", "version": version_of("trt-engine") or "unknown"},
        name=name,
        holds=_holds(run),
        how_to_read=_how_to_read(name),
        versions=_versions(run),
        files=tuple(PackedFile(m.path, m.nbytes, m.digest, m.kind) for m in members),
        left_out=left_out,
        redacted=tuple(m.path for m in members if m.redacted),
    )
    made = PackReport(
        archive=str(target),
        run=str(folder),
        nbytes=None,
        digest=None,
        holds=manifest.holds,
        files=manifest.files,
        left_out=left_out,
        redacted=manifest.redacted,
        artifacts={"archive": str(target)},
        warnings=run.skipped,
    )
    if dry_run:
        return made
    head = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    first = _Member(MANIFEST, "record", head, len(head), _digest(head))
    _write(target, name, [first, *members])
    return replace(made, nbytes=target.stat().st_size, digest=digest(target))


def _holds(run: Run) -> tuple[str, ...]:
    parts = (
        ("size", run.size),
        ("run", run.manifest or run.cells),
        ("bench", run.measurements),
        ("profile", run.profile),
        ("compare", run.comparison),
    )
    return tuple(verb for verb, there in parts if there)


def _how_to_read(name: str) -> tuple[str, ...]:
    return (
        "trt-engine report ARCHIVE",
        "trt-engine inspect ARCHIVE",
        f"or unpack it and open {name}/report.html in any browser; no network and no other package is needed",
        "digests are SHA-256 of the files as they lie in the archive",
    )


def _versions(run: Run) -> dict[str, str]:
    here = run.environment
    told = {"trt-engine": here.tool, "python": here.python, "platform": here.platform, **here.libraries}
    more = {"gpu": here.gpu, "driver": here.driver, "cuda": here.cuda, "container": here.container}
    return told | {name: value for name, value in more.items() if value}


# ------------------------------------------------------------------------------------------------ what goes in


def _chosen(
    run: Run, folder: Path, target: Path, *, raw: bool, engines: bool
) -> tuple[list[_Member], tuple[LeftOut, ...]]:
    """The members, records first and large files last, and what stays out."""
    members: list[_Member] = []
    left: list[LeftOut] = []
    for name, form in _REPORTS.items():
        data = render(run, form).encode()  # type: ignore[arg-type]
        members.append(_Member(name, "report", data, len(data), _digest(data)))
    for path in sorted(_walk(folder)):
        name = printable(path.relative_to(folder).as_posix())
        if name in _REPORTS or name == MANIFEST or _same(path, target):
            continue
        try:
            nbytes = path.lstat().st_size
            kind = _kind(name)
            reason = _reason(path, name, kind, raw, engines)
            if reason is not None:
                left.append(LeftOut(name, nbytes, reason))
            else:
                members.append(_member(path, name, kind))
        except OSError as error:
            raise explain(error, path, "pack") from error
    order = ("record", "report", "other", "raw", "engine")
    return sorted(members, key=lambda m: (order.index(m.kind), m.path)), tuple(left)


def _walk(folder: Path) -> Iterator[Path]:
    """Every file, and every link as itself: none is followed."""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise explain(error, folder, "pack") from error
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _walk(entry)
            if not any(entry.iterdir()):
                yield entry
        elif not entry.is_dir() or entry.is_symlink():
            yield entry


def _same(path: Path, target: Path) -> bool:
    return target.exists() and path.exists() and path.samefile(target)


def _kind(name: str) -> str:
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    first = path.parts[0]
    if name in (SIZE, RECORDS, RUN, PROFILE, COMPARE, PLAN) or (first == CELLS and suffix == ".json"):
        return "record"
    if suffix in _ENGINES:
        return "engine"
    if path.name in (RECORDS, PROFILE, COMPARE):
        return "record"
    traced = suffix == ".json" and path.stem.startswith(("timeline", "onnxruntime"))
    if suffix in _RAW or traced or (first in _RAW_FOLDERS and suffix not in (".log", ".txt")):
        return "raw"
    return "other"


def _reason(path: Path, name: str, kind: str, raw: bool, engines: bool) -> str | None:
    """Why a file stays out; None for one that goes in."""
    if path.is_symlink():
        return "a link"
    if path.is_dir():
        return "an empty folder"
    if not path.is_file():
        return "not a plain file"
    if any(part.startswith(".") for part in PurePosixPath(name).parts):
        return "hidden"
    if is_archive(path):
        return "an archive itself"
    if kind == "raw" and not raw:
        return "a raw profile: left out with `--no-raw`"
    if kind == "engine" and not engines:
        return "an engine or model: added with `--engines`"
    return None


def _member(path: Path, name: str, kind: str) -> _Member:
    if path.suffix.lower() in _TEXT:
        data = path.read_bytes()
        clear = without_homes(data)
        return _Member(name, kind, clear, len(clear), _digest(clear), clear != data)
    return _Member(name, kind, path, path.stat().st_size, digest(path))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


# ------------------------------------------------------------------------------------------------ writing


def _write(target: Path, name: str, members: Sequence[_Member]) -> None:
    """The archive, whole or not at all."""
    writer = _zip if target.name.lower().endswith(".zip") else _tar
    with staging_folder(target) as aside:
        try:
            made = aside / "archive"
            with made.open("wb") as file:
                writer(file, name, members)
                file.flush()
                os.fsync(file.fileno())
            made.replace(target)
        except OSError as error:
            raise explain(error, target) from error


def _tar(file: IO[bytes], name: str, members: Sequence[_Member]) -> None:
    with ExitStack() as closing:
        packed = closing.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0))
        tar = closing.enter_context(tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT))
        for member in members:
            info = tarfile.TarInfo(f"{name}/{member.path}")
            info.size, info.mtime, info.mode = member.nbytes, _ALWAYS_S, 0o644
            with _opened(member) as source:
                tar.addfile(info, source)


def _zip(file: IO[bytes], name: str, members: Sequence[_Member]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for member in members:
            info = zipfile.ZipInfo(f"{name}/{member.path}", _ALWAYS)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o100644 << 16
            info.file_size = member.nbytes
            with _opened(member) as source, archive.open(info, "w") as into:
                while chunk := source.read(_CHUNK):
                    into.write(chunk)


class _Checked(io.RawIOBase):
    """A file as it was when its digest was taken; one that changed since cannot be packed."""

    def __init__(self, member: _Member, source: IO[bytes]) -> None:
        super().__init__()
        self._member, self._source = member, source
        self._seen = hashlib.sha256()
        self._left = member.nbytes

    def read(self, size: int = -1) -> bytes:
        chunk = self._source.read(_CHUNK if size < 0 else size)
        self._seen.update(chunk)
        self._left -= len(chunk)
        ended = not chunk or not self._left
        if self._left < 0 or (ended and f"sha256:{self._seen.hexdigest()}" != self._member.digest):
            raise SetupError(
                f"`{self._member.path}` changed while it was packed", hint="wait for what writes there, then pack again"
            )
        return chunk

    def close(self) -> None:
        self._source.close()
        super().close()


def _opened(member: _Member) -> IO[bytes]:
    if isinstance(member.data, bytes):
        return io.BytesIO(member.data)
    return _Checked(member, member.data.open("rb"))  # type: ignore[return-value]
