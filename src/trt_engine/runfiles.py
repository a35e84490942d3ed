"""The files of a run, in its folder or in an archive of it: read where they lie, never unpacked.

An archive is somebody else's file. It is read as a stream with bounds on members, sizes and names; a path that leads out of
it, a link, a device or a second file of the same name refuses the whole. Nothing of it is ever written to a disk.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from trt_engine.errors import SetupError, UsageError

__all__ = [
    "CELLS",
    "COMPARE",
    "MANIFEST",
    "PLAN",
    "PROFILE",
    "RECORDS",
    "REPORT",
    "RUN",
    "SIZE",
    "LeftOut",
    "PackManifest",
    "PackedFile",
    "RunFiles",
    "is_archive",
    "no_run",
    "without_homes",
]

SIZE = "size.json"
RECORDS = "records.jsonl"
RUN = "run.json"
CELLS = "cells"
PROFILE = "profile.json"
COMPARE = "compare.json"
MANIFEST = "pack.json"
PLAN, REPORT = "plan.yaml", "REPORT.txt"

SUFFIXES = (".tar.gz", ".tgz", ".zip")
_MANIFEST_VERSION = 1
_MAX_MEMBERS = 100_000
_MAX_READ = 512 << 20
"""Bytes of records held in memory at once; thousands of cells with all their samples are a tenth of it."""
_MAX_RATIO, _SMALL = 300, 64 << 20
"""Text of logs packs 1:30 at best; what unpacks to much more than that was made to fill a disk."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of an archive."""

    path: str
    """From the run's folder, with `/`."""
    nbytes: int
    digest: str
    """`sha256:<hex>` of the bytes in the archive."""
    kind: str
    """`record`, `report`, `raw`, `engine` or `other`."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One file of the run that is not in its archive."""

    path: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class PackManifest:
    """`pack.json`: what an archive holds, what it leaves out, and how to read it."""

    schema: str
    schema_version: int
    tool: dict[str, str]
    name: str
    """Of the folder it unpacks to."""
    holds: tuple[str, ...]
    """The records in it, by the verbs that wrote them."""
    how_to_read: tuple[str, ...]
    versions: dict[str, str]
    """Of the machine it was measured on: libraries, Python, driver."""
    files: tuple[PackedFile, ...]
    left_out: tuple[LeftOut, ...] = ()
    redacted: tuple[str, ...] = ()
    """Text files in which names of home folders were replaced by `~`."""


def no_run(path: Path) -> str:
    """What is said of a folder, or an archive, in which nothing of a run lies."""
    names = ", ".join(f"`{name}`" for name in (SIZE, RECORDS, RUN, PROFILE, COMPARE))
    what = "an archive of a run" if is_archive(path) else "a run folder"
    return f"`{path}` is not {what}: it has none of {names} and `{CELLS}/`"


def is_archive(path: Path) -> bool:
    """True for a file by the name of an archive: `.tar.gz`, `.tgz` or `.zip`."""
    return path.name.lower().endswith(SUFFIXES) and not path.is_dir()


_HOMES = rb"(?<![\w.~-])/(?:home|Users)/[^/\s\"'\\<>:;,|&()\[\]`]+|(?<![\w.~/-])/root(?![\w.-])"


@cache
def _homes(own: str) -> re.Pattern[bytes]:
    mine = rb"|(?<![\w.~-])" + re.escape(os.fsencode(own)) + rb"(?![\w.-])" if own.count("/") > 1 else b""
    return re.compile(_HOMES + mine)


def without_homes(raw: bytes) -> bytes:
    """The text with `~` for the path of any home folder, so that it names nobody. Once is as good as twice."""
    return _homes(str(Path.home())).sub(b"~", raw)


@dataclass(frozen=True)
class RunFiles:
    """What lies in a run's folder, or in an archive of it. Names are relative, with `/`."""

    place: Path
    """As it was given."""
    home: Path
    """The folder; of an archive the one it would unpack to, beside it."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by name, of an archive; a folder is asked when something is wanted (`listed`)."""
    manifest: PackManifest | None = None
    kept: dict[str, bytes] | None = None
    """The records of an archive; None of a folder."""

    @classmethod
    def open(cls, place: Path) -> RunFiles:
        """The files at a folder, or in an archive; `UsageError` for an archive that is damaged or not to be trusted."""
        return _archive(place) if is_archive(place) else cls(place, place)

    @property
    def packed(self) -> bool:
        return self.kept is not None

    def shown(self, name: str) -> str:
        """The file as a person finds it."""
        return f"{self.place}:{name}" if self.packed else str(self.place / name)

    def has(self, name: str) -> bool:
        """Whether a file or folder of that name is in the run; what an archive left out was in it."""
        if name.startswith(("../", "/")) or name == "..":
            return False
        if not self.packed:
            try:
                return (self.place / name).exists()
            except (OSError, ValueError):  # too long for the file system, or with a null byte
                return False
        return name in self._known

    @cached_property
    def _known(self) -> set[str]:
        left = (item.path for item in self.manifest.left_out) if self.manifest else ()
        files = {*self.sizes, *left}
        return files | {str(parent) for path in files for parent in PurePosixPath(path).parents}

    def cells(self) -> list[str]:
        """The names of the cells' records, sorted."""
        if self.kept is not None:
            return sorted(name for name in self.kept if name.startswith(f"{CELLS}/"))
        try:
            found = [path.name for path in (self.place / CELLS).iterdir() if path.suffix == ".json"]
        except OSError:
            return []
        return sorted(f"{CELLS}/{name}" for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes:
        """A record's bytes, names of home folders left out; `SetupError` when the machine does not let us."""
        if self.kept is not None:
            return self.kept[name]
        path = self.place / name
        try:
            return without_homes(path.read_bytes())
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise SetupError(f"cannot read `{path}`: {reason}", hint="check the file and its permissions") from error

    def listed(self) -> dict[str, int]:
        """Bytes by name of all files."""
        if self.packed:
            return dict(sorted(self.sizes.items()))
        return {
            path.relative_to(self.place).as_posix(): path.stat().st_size
            for path in sorted(self.place.rglob("*"))
            if path.is_file()
        }


# ------------------------------------------------------------------------------------------------ archives


def _archive(path: Path) -> RunFiles:
    try:
        packed = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(2)
        if (zipped := head == b"PK") and not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("its list of files, at the end, is missing: it was cut off")
        members = list(_unzipped(path, packed) if zipped else _untarred(path, packed))
    except OSError as error:
        if not isinstance(error, gzip.BadGzipFile):
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            if isinstance(error, FileNotFoundError):
                raise UsageError(f"no such file `{path}`", hint="`trt-engine pack RUN` makes one") from error
            raise SetupError(f"cannot read `{path}`: {reason}", hint="check the file and its permissions") from error
        raise _damaged(path, error) from error
    except (
        tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RecursionError, NotImplementedError,
        RuntimeError, OverflowError,
    ) as error:  # fmt: skip
        raise _damaged(path, error) from error
    top = _top(path, [name for name, _, _ in members])
    sizes = {name[len(top) :]: nbytes for name, nbytes, _ in members}
    kept = {name[len(top) :]: raw for name, _, raw in members if raw is not None and _is_record(name[len(top) :])}
    manifest = _manifest(path, kept.pop(MANIFEST)) if MANIFEST in kept else None
    for item in manifest.files if manifest else ():
        if item.path in kept and f"sha256:{hashlib.sha256(kept[item.path]).hexdigest()}" != item.digest:
            raise UsageError(
                f"`{item.path}` in `{path}` is not what was packed",
                hint="ask for the archive again: its digest differs",
            )
    kept = {name: without_homes(raw) for name, raw in kept.items()}
    home = path.parent / (top.rstrip("/") or _stem(path))
    return RunFiles(path, home, sizes, manifest, kept)


def _damaged(path: Path, error: BaseException) -> UsageError:
    text = str(error) or type(error).__name__
    return UsageError(
        f"`{path}` is damaged, or no archive: {text[:1].lower()}{text[1:]}",
        hint="get it again, or pack the run once more: `trt-engine pack RUN`",
    )


def _stem(path: Path) -> str:
    return next(path.name[: -len(end)] for end in SUFFIXES if path.name.lower().endswith(end)) or "run"


def _is_record(name: str) -> bool:
    return name in (SIZE, RECORDS, RUN, PROFILE, COMPARE, MANIFEST) or (
        name.startswith(f"{CELLS}/") and name.endswith(".json") and name.count("/") == 1
    )


def _top(path: Path, names: list[str]) -> str:
    """The folder all members lie in, with its slash; empty where they lie at the top."""
    firsts = {name.partition("/")[0] for name in names}
    if len(firsts) == 1 and all("/" in name for name in names):
        return firsts.pop() + "/"
    if not any(_is_record(name) for name in names):
        raise UsageError(f"`{path}` holds no run", hint="`trt-engine pack RUN` makes an archive of a run's folder")
    return ""


class _Watch:
    """Counts what an archive holds and refuses what no pack of ours has."""

    def __init__(self, path: Path, packed: int) -> None:
        self.path = path
        self.most = max(_SMALL, packed * _MAX_RATIO)
        self.names: set[str] = set()
        self.total = self.held = self.members = 0

    def member(self, name: str, nbytes: int, plain: bool) -> str:
        """The checked name of a file."""
        self.members += 1
        self.total += nbytes
        parts = name.split("/")
        if nbytes < 0:
            raise self._refused(f"the size of `{_short(name)}` in it is below zero")
        if not plain:
            raise self._refused(f"`{_short(name)}` in it is a link or a device")
        if not name or name.startswith("/") or "\\" in name or "\0" in name or {"..", ".", ""} & set(parts):
            raise self._refused(f"the name `{_short(name)}` in it leads out of the archive, or nowhere")
        if name in self.names:
            raise self._refused(f"`{_short(name)}` is in it twice")
        if self.members > _MAX_MEMBERS:
            raise self._refused(f"it has more than {_MAX_MEMBERS:,} members")
        if self.total > self.most:
            raise self._refused(f"it unpacks to more than {_MAX_RATIO} times its size")
        self.names.add(name)
        return name

    def wanted(self, name: str, nbytes: int) -> bool:
        """Whether to read the file; its bytes are counted."""
        if not (_is_record(name) or _is_record(name.partition("/")[2])):
            return False
        self.held += nbytes
        if self.held > _MAX_READ:
            raise self._refused(f"its records are larger than {_MAX_READ >> 20} MiB")
        return True

    def _refused(self, why: str) -> UsageError:
        return UsageError(f"`{self.path}` is refused: {why}", hint="an archive of `trt-engine pack` never is like that")


def _short(name: str) -> str:
    text = name.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."


class _Bounded(gzip.GzipFile):
    """A stream that never gives more at once than we would hold: headers of a tar may ask for any number of bytes."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or size > _MAX_READ:
            raise ValueError("a header asks for more than an archive of ours has")
        return super().read(size)


def _untarred(path: Path, packed: int) -> Iterator[tuple[str, int, bytes | None]]:
    watch = _Watch(path, packed)
    with contextlib.ExitStack() as closing:
        stream = closing.enter_context(_Bounded(path, "rb"))
        tar = closing.enter_context(tarfile.open(fileobj=stream, mode="r:"))
        for member in tar:
            if member.isdir():
                watch.member(member.name.rstrip("/"), 0, True)
                continue
            name = watch.member(member.name, member.size, member.isreg() and not member.issparse())
            file: IO[bytes] | None = tar.extractfile(member) if watch.wanted(name, member.size) else None
            yield name, member.size, _whole(file, member.size) if file is not None else None


def _unzipped(path: Path, packed: int) -> Iterator[tuple[str, int, bytes | None]]:
    watch = _Watch(path, packed)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            name = watch.member(info.filename.rstrip("/"), info.file_size, kind in (0, stat.S_IFREG, stat.S_IFDIR))
            if info.is_dir():
                continue
            raw = None
            if watch.wanted(name, info.file_size):
                with archive.open(info) as file:
                    raw = _whole(file, info.file_size)
            yield name, info.file_size, raw


def _whole(file: IO[bytes], nbytes: int) -> bytes:
    """All of the file, and no more than it said it has."""
    made = io.BytesIO()
    while chunk := file.read(min(1 << 20, nbytes - made.tell() + 1)):
        made.write(chunk)
        if made.tell() > nbytes:
            raise ValueError("a member is longer than it says")
    if made.tell() < nbytes:
        raise EOFError("a member is cut off")
    return made.getvalue()


def _manifest(path: Path, raw: bytes) -> PackManifest:
    try:
        found = msgspec.json.decode(raw, type=PackManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error
    if found.schema_version > _MANIFEST_VERSION:
        raise UsageError(
            f"`{path}` has schema version {found.schema_version}, this tool reads up to {_MANIFEST_VERSION}",
            hint="install a newer trt-engine",
        )
    return found
