"""The files of a run, in its folder or an archive of it: read in place, never unpacked.

An archive is untrusted. It is read as a stream with bounds on members, sizes and names; a path that leads out of
it, a link, a device or a second file of the same name refuses the whole. Nothing of it is ever written to a disk.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import lzma
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

from trt_engine.atomic_io import decode_json, open_regular, read_bounded
from trt_engine.errors import SetupError, UsageError
from trt_engine.limits import PACKED_RECORDS, UNPACKED_SIZE

SIZE = "size.json"
RECORDS = "records.jsonl"
RUN = "run.json"
CELLS = "cells"
PROFILE = "profile.json"
COMPARE = "compare.json"
UPGRADE = "upgrade.json"
LOADTEST = "loadtest.jsonl"
MANIFEST = "pack.json"
PLAN, REPORT = "plan.yaml", "REPORT.txt"
SUFFIXES = (".tar.gz", ".tgz", ".zip")
_MANIFEST_VERSION = 1
_MAX_MEMBERS = 100_000
_MAX_RATIO = 300
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
class OmittedFile:
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
    """Name of the folder it unpacks to."""
    holds: tuple[str, ...]
    """The records in it, by the verbs that wrote them."""
    how_to_read: tuple[str, ...]
    versions: dict[str, str]
    """Versions on the measured machine: libraries, Python, driver."""
    files: tuple[PackedFile, ...]
    omitted: tuple[OmittedFile, ...] = ()
    redacted: tuple[str, ...] = ()
    """Text files in which names of home folders were replaced by `~`."""


def not_a_run_folder(path: Path) -> str:
    """Error for a folder or archive without files of a run."""
    names = ", ".join(f"`{name}`" for name in (SIZE, RECORDS, RUN, PROFILE, COMPARE, LOADTEST))
    what = "an archive of a run" if is_archive(path) else "a run folder"
    return f"`{path}` is not {what}: it has none of {names} and `{CELLS}/`"


def is_archive(path: Path) -> bool:
    """True for a file by the name of an archive: `.tar.gz`, `.tgz` or `.zip`."""
    return path.name.lower().endswith(SUFFIXES) and not path.is_dir()


_HOME_FOLDERS = rb"(?<![\w.~-])/(?:home|Users)/[^/\s\0\"'\\<>:;,|&()\[\]`]+|(?<![\w.~/-])/root(?![\w.-])"
_HOME_ROOTS = (b"/home/", b"/Users/", b"/root")
_PATH_END = re.compile(rb"[\s\0\"'<>;,|&()\[\]`]")
_CHUNK_BYTES = 1 << 20


@cache
def _home_pattern(own: str) -> re.Pattern[bytes]:
    mine = rb"|(?<![\w.~-])" + re.escape(os.fsencode(own)) + rb"(?![\w.-])" if own.count("/") > 1 else b""
    return re.compile(_HOME_FOLDERS + mine)


def redact_home(raw: bytes) -> bytes:
    """The text with `~` for the path of any home folder, so that it names no person. Idempotent."""
    own = str(Path.home())
    if not any(root in raw for root in (*_HOME_ROOTS, os.fsencode(own))):
        return raw
    return _home_pattern(own).sub(b"~", raw)


def redact_home_chunks(text: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The same of a file of any length, piece by piece, and whether the piece was changed.

    A piece ends with a line, or, in a line of a MiB and more, before a letter that no path has.
    """
    left = b""
    while chunk := text.read(_CHUNK_BYTES):
        whole = left + chunk
        end = whole.rfind(b"\n") + 1 or _split_position(whole)
        left, whole = whole[end:], whole[:end]
        clear = redact_home(whole)
        yield clear, clear != whole
    if left:
        clear = redact_home(left)
        yield clear, clear != left


def _split_position(text: bytes) -> int:
    """Where to split a text without a line break so that no path is split; its end where it is one word."""
    return max((found.start() for found in _PATH_END.finditer(text, max(0, len(text) - 4096))), default=len(text))


@dataclass(frozen=True)
class RunFiles:
    """The files of a run folder or of an archive of one. Names are relative, with `/`."""

    path: Path
    """As it was given."""
    folder: Path
    """The folder; for an archive, the one beside it that it would unpack to."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by name, of an archive; a folder is listed on demand (`listed`)."""
    manifest: PackManifest | None = None
    records: dict[str, bytes] | None = None
    """The records of an archive; None of a folder."""

    @classmethod
    def open(cls, path: Path) -> RunFiles:
        """The files at a folder, or in an archive; `UsageError` for an archive that is damaged or not to be trusted."""
        return _read_archive(path) if is_archive(path) else cls(path, path)

    @property
    def packed(self) -> bool:
        return self.records is not None

    def display_path(self, name: str) -> str:
        """The file as a person finds it."""
        return f"{self.path}:{name}" if self.packed else str(self.path / name)

    def contains(self, name: str) -> bool:
        """Whether a file or folder of that name is in the run; what an archive left out was in it."""
        if name.startswith(("../", "/")) or name == "..":
            return False
        if not self.packed:
            try:
                return (self.path / name).exists()
            except (OSError, ValueError):  # too long for the file system, or with a null byte
                return False
        return name in self._names

    @cached_property
    def _names(self) -> set[str]:
        left = (item.path for item in self.manifest.omitted) if self.manifest else ()
        files = {*self.sizes, *left}
        return files | {str(parent) for path in files for parent in PurePosixPath(path).parents}

    def cell_names(self) -> list[str]:
        """The names of the cells' records, sorted."""
        if self.records is not None:
            return sorted(name for name in self.records if name.startswith(f"{CELLS}/"))
        try:
            found = [path.name for path in (self.path / CELLS).iterdir() if path.suffix == ".json"]
        except OSError:
            return []
        return sorted(f"{CELLS}/{name}" for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes:
        """A record's bytes, names of home folders left out.

        `UsageError` for a file that is not regular or too large, `SetupError` without permission.
        """
        if self.records is not None:
            return self.records[name]
        path = self.path / name
        try:
            return redact_home(read_bounded(path))
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise SetupError(f"cannot read `{path}`: {reason}", hint="check the file and its permissions") from error

    def file_sizes(self) -> dict[str, int]:
        """Bytes by name of all files."""
        if self.packed:
            return dict(sorted(self.sizes.items()))
        return {
            path.relative_to(self.path).as_posix(): path.stat().st_size
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }


# ------------------------------------------------------------------------------------------------ archives


def _read_archive(path: Path) -> RunFiles:
    try:
        with open_regular(path) as file:
            packed = os.fstat(file.fileno()).st_size
            zipped = file.read(2) == b"PK"
            file.seek(0)
            if zipped and not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("its list of files, at the end, is missing: it was cut off")
            file.seek(0)
            members = list(_read_zip(path, file, packed) if zipped else _read_tar(path, file, packed))
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # a place that is not in the file is the archive's fault
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            if isinstance(error, FileNotFoundError):
                raise UsageError(f"no such file `{path}`", hint="`trt-engine pack RUN` makes one") from error
            raise SetupError(f"cannot read `{path}`: {reason}", hint="check the file and its permissions") from error
        raise _damaged_error(path, error) from error
    except (
        tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RecursionError, NotImplementedError,
        RuntimeError, OverflowError, lzma.LZMAError,
    ) as error:  # fmt: skip
        raise _damaged_error(path, error) from error
    top = _common_root(path, [name for name, _, _ in members])
    sizes = {name[len(top) :]: nbytes for name, nbytes, _ in members}
    kept = {name[len(top) :]: raw for name, _, raw in members if raw is not None and _is_record(name[len(top) :])}
    manifest = _parse_manifest(path, kept.pop(MANIFEST)) if MANIFEST in kept else None
    for item in manifest.files if manifest else ():
        if item.path in kept and f"sha256:{hashlib.sha256(kept[item.path]).hexdigest()}" != item.digest:
            raise UsageError(
                f"`{item.path}` in `{path}` is not what was packed",
                hint="transfer the archive again: its digest differs",
            )
    kept = {name: redact_home(raw) for name, raw in kept.items()}
    home = path.parent / (top.rstrip("/") or _archive_stem(path))
    return RunFiles(path, home, sizes, manifest, kept)


def _damaged_error(path: Path, error: BaseException) -> UsageError:
    text = str(error) or type(error).__name__
    return UsageError(
        f"`{path}` is damaged, or no archive: {text[:1].lower()}{text[1:]}",
        hint="get it again, or pack the run once more: `trt-engine pack RUN`",
    )


def _archive_stem(path: Path) -> str:
    return next(path.name[: -len(end)] for end in SUFFIXES if path.name.lower().endswith(end)) or "run"


def _is_record(name: str) -> bool:
    return name in (SIZE, RECORDS, RUN, PROFILE, COMPARE, UPGRADE, LOADTEST, MANIFEST) or (
        name.startswith(f"{CELLS}/") and name.endswith(".json") and name.count("/") == 1
    )


def _common_root(path: Path, names: list[str]) -> str:
    """The folder all members share, with its slash; empty where they are at the top."""
    firsts = {name.partition("/")[0] for name in names}
    if len(firsts) == 1 and all("/" in name for name in names):
        return firsts.pop() + "/"
    if not any(_is_record(name) for name in names):
        raise UsageError(f"`{path}` holds no run", hint="`trt-engine pack RUN` makes an archive of a run's folder")
    return ""


class _ArchiveGuard:
    """Counts the members of an archive and rejects those that `pack` never writes."""

    def __init__(self, path: Path, packed: int) -> None:
        self.path = path
        self.most = max(UNPACKED_SIZE.value, packed * _MAX_RATIO)
        self.names: set[str] = set()
        self.total = self.held = self.members = 0

    def check_member(self, name: str, nbytes: int, plain: bool) -> str:
        """The checked name of a file."""
        self.members += 1
        self.total += nbytes
        parts = name.split("/")
        if nbytes < 0:
            raise self._rejected(f"the size of `{_shorten(name)}` in it is below zero")
        if not plain:
            raise self._rejected(f"`{_shorten(name)}` in it is a link or a device")
        if not name or name.startswith("/") or "\\" in name or "\0" in name or {"..", ".", ""} & set(parts):
            raise self._rejected(f"the name `{_shorten(name)}` in it leads out of the archive, or nowhere")
        if name in self.names:
            raise self._rejected(f"`{_shorten(name)}` is in it twice")
        if self.members > _MAX_MEMBERS:
            raise self._rejected(f"it has more than {_MAX_MEMBERS:,} members")
        if self.total > self.most:
            raise self._rejected(f"it unpacks to more than {_MAX_RATIO} times its size", UNPACKED_SIZE.hint)
        self.names.add(name)
        return name

    def should_read(self, name: str, nbytes: int) -> bool:
        """Whether to read the file; its bytes are counted."""
        if not (_is_record(name) or _is_record(name.partition("/")[2])):
            return False
        self.held += nbytes
        if self.held > (most := PACKED_RECORDS.value):
            raise self._rejected(
                f"its records are larger than {PACKED_RECORDS.format_value(most)}", PACKED_RECORDS.hint
            )
        return True

    def _rejected(self, why: str, hint: str = "an archive of `trt-engine pack` never is like that") -> UsageError:
        return UsageError(f"`{self.path}` is refused: {why}", hint=hint)


def _shorten(name: str) -> str:
    text = name.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."


class _BoundedGzip(gzip.GzipFile):
    """A stream with bounded reads: tar headers may request any number of bytes."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or size > PACKED_RECORDS.value:
            raise ValueError("a header is longer than in archives of `pack`")
        return super().read(size)


def _read_tar(path: Path, archived: IO[bytes], packed: int) -> Iterator[tuple[str, int, bytes | None]]:
    watch = _ArchiveGuard(path, packed)
    with contextlib.ExitStack() as closing:
        stream = closing.enter_context(_BoundedGzip(fileobj=archived, mode="rb"))
        tar = closing.enter_context(tarfile.open(fileobj=stream, mode="r:"))
        for member in tar:
            if member.isdir():
                watch.check_member(member.name.rstrip("/"), 0, True)
                continue
            name = watch.check_member(member.name, member.size, member.isreg() and not member.issparse())
            file: IO[bytes] | None = tar.extractfile(member) if watch.should_read(name, member.size) else None
            yield name, member.size, _read_exact(file, member.size) if file is not None else None


def _read_zip(path: Path, archived: IO[bytes], packed: int) -> Iterator[tuple[str, int, bytes | None]]:
    watch = _ArchiveGuard(path, packed)
    with zipfile.ZipFile(archived) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            name = watch.check_member(
                info.filename.rstrip("/"), info.file_size, kind in (0, stat.S_IFREG, stat.S_IFDIR)
            )
            if info.is_dir():
                continue
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(
                    f"`{_shorten(name)}` in it is packed in a way that `trt-engine pack` does not use"
                )
            raw = None
            if watch.should_read(name, info.file_size):
                with archive.open(info) as file:
                    raw = _read_exact(file, info.file_size)
            yield name, info.file_size, raw


def _read_exact(file: IO[bytes], nbytes: int) -> bytes:
    """All of the file, at most the size it declares."""
    made = io.BytesIO()
    while chunk := file.read(min(1 << 20, nbytes - made.tell() + 1)):
        made.write(chunk)
        if made.tell() > nbytes:
            raise ValueError("a member is longer than its declared size")
    if made.tell() < nbytes:
        raise EOFError("a member is cut off")
    return made.getvalue()


def _parse_manifest(path: Path, raw: bytes) -> PackManifest:
    try:
        found = decode_json(raw, PackManifest)
    except msgspec.DecodeError as error:
        raise _damaged_error(path, error) from error
    if found.schema_version > _MANIFEST_VERSION:
        raise UsageError(
            f"`{path}` has schema version {found.schema_version}, this tool reads up to {_MANIFEST_VERSION}",
            hint="install a newer trt-engine",
        )
    return found
