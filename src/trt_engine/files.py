"""Files that are whole or not there: staged writes, sealed by rename, and errors a person can act on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from trt_engine.errors import SetupError

__all__ = ["copy_whole", "digest", "ensure_folder", "explain", "staged_copy", "staging_folder", "write_whole"]

_CHUNK = 1 << 20


def digest(*paths: Path) -> str:
    """SHA-256 over the bytes of the files in the order given, as `sha256:<hex>`."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def explain(error: OSError, path: Path, doing: str = "write") -> SetupError:
    """The error a person can act on behind an `OSError` met while writing to `path`."""
    where = f"`{path}`"
    if error.errno == errno.ENOSPC:
        return SetupError(f"cannot {doing} {where}: the disk is full", hint="free some space, or `-o` another disk")
    if error.errno == errno.EDQUOT:
        return SetupError(
            f"cannot {doing} {where}: the disk quota is used up", hint="free some space, or `-o` elsewhere"
        )
    if error.errno == errno.EFBIG:
        return SetupError(
            f"cannot {doing} {where}: the file would be larger than this shell allows",
            hint="see `ulimit -f`, and raise it with `ulimit -f unlimited`",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SetupError(
            f"cannot {doing} {where}: {os.strerror(error.errno).lower()}",
            hint="choose a folder you may write to with `-o`",
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return SetupError(
            f"cannot {doing} {where}: a file is in the way of a folder", hint="name another place with `-o`"
        )
    if error.errno == errno.EISDIR:
        return SetupError(f"cannot {doing} {where}: it is a folder, expected a file", hint="add a file name to `-o`")
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return SetupError(f"cannot {doing} {where}: {reason}", hint="name another place with `-o`")


def ensure_folder(path: Path) -> Path:
    """The folder, made with its parents if need be and tried for writing; `SetupError` if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise explain(error, path) from error
    return path


def _aside(path: Path) -> Path:
    """Where to write before the rename: hidden, on the same disk, no other thread's."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def write_whole(path: Path, data: bytes | str) -> Path:
    """Write all of `data` or nothing: aside first, to the disk, then renamed over `path`."""
    raw = data.encode() if isinstance(data, str) else data
    aside = _aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, path) from error
    return path


@contextlib.contextmanager
def staging_folder(beside: Path) -> Iterator[Path]:
    """A hidden folder next to `beside` (same disk, so a rename seals) that is gone afterwards, whatever happens."""
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", suffix=".tmp", dir=beside.parent))
    except OSError as error:
        raise explain(error, beside) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def staged_copy(source: Path, target: Path) -> Iterator[Path]:
    """A whole copy of `source` beside `target`, to be renamed over it; gone afterwards if it was not."""
    aside = _aside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, aside)
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
            yield aside
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, target) from error


def copy_whole(source: Path, target: Path) -> Path:
    """Copy `source` to `target` whole or not at all."""
    with staged_copy(source, target) as copy:
        copy.replace(target)
    return target
