"""Files that are whole or not there: staged writes, sealed by rename, and errors a person can act on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.errors import ModelError, SetupError, UsageError

__all__ = [
    "copy_whole",
    "digest",
    "end_of_links",
    "ensure_folder",
    "explain",
    "json_bytes",
    "path_of",
    "printable",
    "staged_copy",
    "staging_folder",
    "write_whole",
]

_CHUNK = 1 << 20


def digest(*paths: Path) -> str:
    """SHA-256 over the bytes of the files in the order given, as `sha256:<hex>`."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def printable(text: str) -> str:
    """The text with what cannot be written as UTF-8 (bytes of a file name in another encoding) replaced."""
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


def json_bytes(value: Any) -> bytes:
    """The value as JSON on one line, whatever bytes the file names in it are made of."""
    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_printable(msgspec.to_builtins(value)))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable(name): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value


def path_of(value: object, what: str) -> Path:
    """The path in a caller's value; `UsageError` for what is no path."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return Path(path)
    raise UsageError(f"{what} is {value!r}, expected a path", hint="give it as `str` or `pathlib.Path`")


def explain(error: OSError, path: Path, doing: str = "write", *, by: str = "-o") -> SetupError | ModelError:
    """The error a person can act on behind an `OSError` met while writing to `path`, which is chosen with `by`.

    A model that cannot be read (`doing="read"`) is a `ModelError` with hints for a file that is there already.
    """
    if doing == "read":
        what, hint = _reading(error)
        return ModelError(f"cannot read `{path}`: {what}", hint=hint)
    what, hint = _writing(error, by)
    return SetupError(f"cannot {doing} `{path}`: {what}", hint=hint, not_here=False)


_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def _writing(error: OSError, by: str) -> tuple[str, str]:
    if error.errno == errno.ENOSPC:
        return "the disk is full", f"free some space, or name another disk with `{by}`"
    if error.errno == errno.EDQUOT:
        return "the disk quota is used up", f"free some space, or name another disk with `{by}`"
    if error.errno == errno.EFBIG:
        return (
            "the file would be larger than this shell allows",
            "see `ulimit -f`, and raise it with `ulimit -f unlimited`",
        )
    if error.errno in _DENIED:
        return _reason(error), f"choose a folder you may write to with `{by}`"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file is in the way of a folder", f"name another place with `{by}`"
    if error.errno == errno.EISDIR:
        return "it is a folder, expected a file", f"add a file name to `{by}`"
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long for this disk", f"name a shorter one with `{by}`"
    if error.errno == errno.ELOOP:
        return "its links lead to each other", f"name another place with `{by}`, or mend the links"
    return _reason(error), f"name another place with `{by}`"


def _reading(error: OSError) -> tuple[str, str]:
    if error.errno in _DENIED:
        return _reason(error), "ask its owner, or `chmod +r` it; `ls -l` shows who may"
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long for this disk", "check the path: `ls -l` on its folder"
    if error.errno == errno.ELOOP:
        return "its links lead to each other", "give the path of the file itself; `ls -l` shows where a link leads"
    return _reason(error), "check the path: `ls -l` on its folder"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error)


def ensure_folder(path: Path, *, by: str = "-o") -> Path:
    """The folder, made with its parents if need be and tried for writing; `SetupError` if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise explain(error, path, by=by) from error
    return path


_OUR_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr")
_STREAM_FOLDERS = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")


def end_of_links(path: Path) -> Path:
    """The file that a write to `path` is for: a link stays a link, and what it names is written.

    `UsageError` for a device, a pipe, a socket or one of our own streams: a rename would put a file in its place.
    """
    whole = path.absolute()
    if str(whole) in _OUR_STREAMS or str(whole.parent) in _STREAM_FOLDERS:
        raise _no_file(path, "a stream")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # to be made; behind a link too
    kinds = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if kind := kinds.get(stat.S_IFMT(mode)):
        raise _no_file(path, kind)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _no_file(path: Path, kind: str) -> UsageError:
    return UsageError(f"`{path}` is {kind}, expected a file or a new name", hint="name a file with `-o`")


def _aside(path: Path) -> Path:
    """Where to write before the rename: hidden, on the same disk, no other thread's."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def write_whole(path: Path, data: bytes | str) -> Path:
    """Write all of `data` or nothing: aside first, to the disk, then renamed over `path`, or over what it links to."""
    raw = data.encode() if isinstance(data, str) else data
    try:
        target = end_of_links(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = _aside(target)
        try:
            with aside.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, path) from error
    return path


@contextlib.contextmanager
def staging_folder(beside: Path, *, by: str = "-o") -> Iterator[Path]:
    """A hidden folder next to `beside` (same disk, so a rename seals) that is gone afterwards, whatever happens."""
    try:
        end_of_links(beside)
        beside.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", suffix=".tmp", dir=beside.parent))
    except OSError as error:
        raise explain(error, beside, by=by) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def staged_copy(source: Path, target: Path) -> Iterator[Path]:
    """A whole copy of `source` beside `target`, to be renamed over it; gone afterwards if it was not.

    `target` is to be the end of its links (`end_of_links`).
    """
    try:
        aside = _aside(end_of_links(target))
        aside.parent.mkdir(parents=True, exist_ok=True)
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
    """Copy `source` to `target`, or to what it links to, whole or not at all."""
    try:
        goal = end_of_links(target)
    except OSError as error:
        raise explain(error, target) from error
    with staged_copy(source, goal) as copy:
        copy.replace(goal)
    return target
