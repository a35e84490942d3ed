"""Atomic file writes (staged, then renamed; several together), bounded reads, and actionable OS errors."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import fcntl
import functools
import gc
import hashlib
import itertools
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, overload

from trt_engine.errors import ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.limits import RECORD_SIZE, RECORD_VALUES, Limit

if TYPE_CHECKING:
    import filelock

_CHUNK = 1 << 20
_T = TypeVar("_T")


def file_digest(*paths: Path, before: bytes = b"") -> str:
    """SHA-256 over the bytes of the files in the order given, after those `before` them, as `sha256:<hex>`."""
    total = hashlib.sha256(before)
    for path in paths:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def replace_surrogates(text: str) -> str:
    """The text with what cannot be written as UTF-8 (bytes of a file name in another encoding) replaced."""
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


def encode_json(value: Any) -> bytes:
    """The value as JSON on one line, whatever bytes the file names in it are made of."""
    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_replace_surrogates_in(msgspec.to_builtins(value)))


def _replace_surrogates_in(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {_replace_surrogates_in(name): _replace_surrogates_in(item) for name, item in value.items()}
    return [_replace_surrogates_in(item) for item in value] if isinstance(value, list | tuple) else value


_HUGE = re.compile(rb"(?<![0-9.])[0-9]{100}")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@overload
def decode_json(raw: bytes | str) -> Any: ...
@overload
def decode_json(raw: bytes | str, type: type[_T]) -> _T: ...
def decode_json(raw: bytes | str, type: Any = Any) -> Any:
    """The JSON document as that type; `msgspec.DecodeError` for any that cannot be read, whatever the reason.

    Nesting without end, texts that are not UTF-8, numbers of a hundred digits and values by the million are such reasons.
    Every JSON file from elsewhere is decoded by this function.
    """
    import msgspec

    raw = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
    most = RECORD_VALUES.value
    if len(raw) > most and raw.count(b",") + raw.count(b"[") + raw.count(b"{") > most:
        raise msgspec.ValidationError(f"it has more than {most} values; {RECORD_VALUES.hint}")
    if _HUGE.search(raw) and _HUGE.search(_TEXT.sub(b'""', raw)):
        raise msgspec.ValidationError("a number in it has a hundred digits or more")
    try:
        return msgspec.json.decode(raw, type=type)
    except RecursionError as error:
        raise msgspec.ValidationError("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError("a text in it is not UTF-8") from error


def as_path(path: object, what: str) -> Path:
    """A caller's value as a path; `UsageError` if it is not one."""
    if isinstance(path, str | os.PathLike) and isinstance(text := os.fspath(path), str):
        return Path(text)
    raise UsageError(f"{what} is {found_instead(path)}, expected a path", hint="give it as `str` or `pathlib.Path`")


def as_list(value: Any, what: str) -> list[Any]:
    """A caller's list of paths, or the one that is given; `UsageError` for what is neither."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    as_path(value, what)
    return [value]


def found_instead(value: object) -> str:
    """A caller's value in a few words, for errors: `None`, `a list of 2`, `an object of torch.nn.Linear`."""
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 40):
        return repr(value)
    if isinstance(value, type):
        return f"the class `{value.__qualname__}`"
    kind = type(value)
    if isinstance(value, Sized) and kind.__module__ == "builtins":
        return f"a {kind.__name__} of {len(value)}"
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"an array `{kind.__name__}` of {'x'.join(map(str, shape)) or 'one number'}"
    return (
        f"a{'n' * (kind.__name__[0] in 'aeio')} {kind.__name__}"
        if kind.__module__ == "builtins"
        else f"an object of `{kind.__module__}.{kind.__qualname__}`"
    )


def os_error(
    error: OSError, path: Path, doing: str = "write", *, by: str = "-o"
) -> SetupError | ModelError | UsageError:
    """The error a person can act on behind an `OSError` met while writing to `path`, which is chosen with `by`.

    A model that cannot be read (`doing="read"`) is a `ModelError` with hints for a file that is there already. A name that
    is too long is a `UsageError`, whatever was done.
    """
    if error.errno == errno.ENAMETOOLONG:
        longest = max(path.parts or ("",), key=len)
        what, whole = ("name", longest) if len(os.fsencode(longest)) > 100 else ("path", str(path))
        return UsageError(
            f"the {what} `{whole[:40]}{'...' if len(whole) > 40 else ''}` is too long for this disk",
            hint="a name has at most 255 bytes on most disks, a path 4,096",
        )
    reads = doing == "read"
    texts, hint = (_READ_ERRORS, _CHECK_PATH) if reads else (_WRITE_ERRORS, "name another place with `{by}`")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = (
            "`chmod +r` it, or see its owner and mode with `ls -l`"
            if reads
            else "choose a folder you may write to with `{by}`"
        )
    number = errno.EISDIR if error.errno == errno.EBUSY and path.is_dir() else error.errno or 0  # `.` is busy
    what, hint = texts.get(number, (os.strerror(error.errno).lower() if error.errno else str(error), hint))
    if reads:
        return ModelError(f"cannot read `{path}`: {what}", hint=hint)
    return SetupError(f"cannot {doing} `{path}`: {what}", hint=hint.format(by=by), machine_specific=False)


@contextlib.contextmanager
def os_errors(path: Path, doing: str = "write", *, by: str = "-o") -> Iterator[None]:
    """Convert an `OSError` to `os_error` with these arguments."""
    try:
        yield
    except OSError as error:
        raise os_error(error, path, doing, by=by) from error


_CHECK_PATH = "check the path: `ls -l` on its folder"
_READ_ERRORS: dict[int, tuple[str, str]] = {
    errno.ELOOP: ("its links lead to each other", "give the path of the file itself; `ls -l` shows where a link leads"),
}
_WRITE_ERRORS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", "free some space, or name another disk with `{by}`"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or name another disk with `{by}`"),
    errno.EFBIG: (
        "the file would be larger than this shell allows",
        "see `ulimit -f`, and raise it with `ulimit -f unlimited`",
    ),
    errno.ENOTDIR: ("a file is in the way of a folder", "name another place with `{by}`"),
    errno.EEXIST: ("a file is in the way of a folder", "name another place with `{by}`"),
    errno.EISDIR: ("it is a folder, expected a file", "add a file name to `{by}`"),
    errno.ELOOP: ("its links lead to each other", "name another place with `{by}`, or mend the links"),
}


def ensure_folder(path: Path, *, by: str = "-o", dry: bool = False) -> Path:
    """The folder, made with its parents if need be (not if `dry`) and tried for writing; `SetupError` if it cannot be."""
    with os_errors(path, by=by):
        if dry:
            there = next(place for place in (path, *path.absolute().parents) if place.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise OSError(errno.EACCES if there.is_dir() else errno.ENOTDIR, "")
            return path
        _make_folder(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    return path


_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


_LARGEST_POINTER = 1024
"""The bytes a Git LFS pointer has at most, by its specification."""
_POINTERS = (
    (re.compile(rb"(\xef\xbb\xbf)?version https?://(git-lfs|hawser|git-media)\b"), "a Git LFS pointer", "git lfs pull"),
    (re.compile(rb"[/.\w]*/annex/objects/"), "a git-annex pointer", "git annex get ."),
)
"""How small files of version control begin that stand where the file itself should be, and the command that fetches it."""


_LARGEST_HOLES = 1 << 30
"""Bytes of a file up to which it is read although hardly any of them were written."""


def open_regular(path: Path, *, error: type[TrtEngineError] = UsageError) -> BinaryIO:
    """The file opened for reading; `error` for a device, pipe, socket or folder, which is neither read nor waited for, for
    a large file that is nearly all holes, and for a pointer of Git LFS or git-annex where the file should be.

    An `OSError` of the path itself (missing, not permitted) passes: the caller knows what the file is for.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except OSError as failed:
        if failed.errno == errno.ENXIO:  # a socket
            raise error(f"`{path}` is a socket, expected a file", hint="name a file") from failed
        if failed.errno == errno.ENAMETOOLONG:
            raise os_error(failed, path) from failed
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
            raise error(f"`{path}` is {kind}, expected a file", hint="name a file; `ls -l` shows what it is")
        if found.st_size > _LARGEST_HOLES and found.st_blocks * 512 < (least := found.st_size // 100):
            if os.lseek(handle, 0, os.SEEK_HOLE) < least:  # else the file system stores it in fewer bytes
                raise error(f"`{path}` has {found.st_size} bytes, hardly any written", hint="copy or download it again")
            os.lseek(handle, 0, os.SEEK_SET)
        if 0 < found.st_size <= _LARGEST_POINTER:
            head = os.pread(handle, 64, 0)
            for pattern, what, command in _POINTERS:
                if pattern.match(head):
                    raise error(f"`{path}` is {what}, not the file itself", hint=f"fetch it: `{command}`")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


_RAW_FILE = "download the raw file, not the page that shows it"
_LOGIN = "download it again, signed in where the server demands it, and check the address"
_FAILED_DOWNLOADS = tuple(
    (re.compile(pattern, re.IGNORECASE), what, remedy)
    for pattern, what, remedy in (
        (rb"\s*(<!doctype html|<html)", "a web page", _RAW_FILE),
        (rb"\s*(404\b|not found|entry not found|repository not found|invalid username|unauthorized|access denied)",
         "a server's refusal", _LOGIN),
        (rb"\s*(<\?xml[^>]*>\s*)?<error>", "a server's refusal", _LOGIN),
        (rb"\s*\{\s*\"(error|errors|message|detail)\"", "a server's refusal", _LOGIN),
        (rb"\x1f\x8b", "a gzip archive", "unpack it: `gunzip`"),
        (rb"\xfd7zXZ\x00", "an xz archive", "unpack it: `unxz`"),
        (rb"BZh[1-9]1AY", "a bzip2 archive", "unpack it: `bunzip2`"),
        (rb"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it: `unzstd`"),
        (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it: `7z x`"),
        (rb"Rar!\x1a\x07", "a RAR archive", "unpack it: `unrar x`"),
    )
)  # fmt: skip


def failed_download(head: bytes) -> tuple[str, str] | None:
    """What the file that begins with these bytes is in place of the one that was to be downloaded, and the remedy."""
    return next(((what, remedy) for pattern, what, remedy in _FAILED_DOWNLOADS if pattern.match(head)), None)


def read_bounded(path: Path, limit: Limit = RECORD_SIZE, *, error: type[TrtEngineError] = UsageError) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; `error` for any other, before it is read.

    Every record, log, passport, plan file and declaration is read by this function.
    """
    most = limit.value
    with open_regular(path, error=error) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            raw = file.read(size + 1) or b""  # None of what has a regular file's mode and would block: /proc/kmsg
            size = max(size, len(raw))
            if len(raw) <= most:
                return raw
    raise error(f"`{path}` has {size} bytes, more than the {limit.format_value(most)} that are read", hint=limit.hint)


_STANDARD_STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr")
_STREAM_FOLDERS = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")


def resolve_link(path: Path) -> Path:
    """The file that a write to `path` is for: a link stays a link, and what it names is written.

    `UsageError` for a device, a pipe, a socket or a standard stream: a rename would put a file in its place.
    """
    whole = path.absolute()
    if str(whole) in _STANDARD_STREAMS or str(whole.parent) in _STREAM_FOLDERS:
        raise _not_a_file_error(path, "a stream")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # to be made; behind a link too
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind and not stat.S_ISDIR(mode):
        raise _not_a_file_error(path, kind)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _not_a_file_error(path: Path, kind: str) -> UsageError:
    return UsageError(f"`{path}` is {kind}, expected a file or a new name", hint="name a file with `-o`")


# ------------------------------------------------------------------------------------------------ staging

_STAGED = re.compile(r"\..+\.([0-9a-f]{8})-\d+-\d+\.tmp")
"""`.NAME.BOOT-PID-NUMBER.tmp`."""
_OTHER_HOST_AGE_S = 86400.0
"""What was staged on another machine, or before a reboot, is left alone for a day: its locks may not show here."""
_staged_paths: set[Path] = set()
"""What this process stages now."""
_swept: set[Path] = set()
_counter = itertools.count(1)


@functools.cache
def _boot_id() -> str:
    """Eight hex digits for this boot of this machine, the same in all of its containers."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # no Linux
        name = platform.node()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def remove_staged() -> None:
    """Remove what this process staged and did not finish, and its temporary folders: it is about to end."""
    for path in [*_staged_paths]:
        _remove(path)
    for found in gc.get_objects():
        if type(found) is tempfile.TemporaryDirectory:
            _remove(Path(found.name))


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it; links in it are not followed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def sweep_staged(folder: Path) -> None:
    """Remove what killed processes left staged in a folder: ours by name and owner, and locked by no process.

    A process holds a lock on what it stages for as long as it lives, so another process's work is never removed.
    """
    try:
        found = [entry.name for entry in os.scandir(folder) if _STAGED.fullmatch(entry.name)]
    except OSError:
        return
    for name in found:
        with contextlib.suppress(OSError):
            _remove_dead(folder / name)


def _remove_dead(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        named = _STAGED.fullmatch(path.name)
        recent = time.time() - found.st_mtime < _OTHER_HOST_AGE_S
        if found.st_uid != os.geteuid() or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            return
        if named is None or (named[1] != _boot_id() and recent):
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(handle)


def _stage(target: Path, create: Callable[[Path], int]) -> tuple[Path, int]:
    """A new path beside `target` that `create` made, and its handle, locked for as long as it is open."""
    if target.parent not in _swept:
        _swept.add(target.parent)
        sweep_staged(target.parent)
    while True:
        path = target.parent / f".{target.name}.{_boot_id()}-{os.getpid()}-{next(_counter)}.tmp"
        try:
            handle = create(path)
        except FileExistsError:  # a process of that number in another container
            continue
        _staged_paths.add(path)
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.lexists(path):
            return path, handle
        os.close(handle)  # swept between the two steps
        _staged_paths.discard(path)


def _create_file(path: Path) -> int:
    """Where the folder is closed to other users' writes, so is the file, whatever the umask."""
    mode = 0o666 if path.parent.stat().st_mode & 0o022 else 0o644
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def _create_folder(path: Path) -> int:
    path.mkdir(mode=0o700)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_atomic(path: Path, data: bytes | str, *, by: str = "-o") -> Path:
    """Write all of `data` or nothing: aside first, to the disk, then renamed over `path`, or over what it links to. `by` is
    the option that chose the path, for the error's hint."""
    raw = data.encode() if isinstance(data, str) else data
    with os_errors(path, by=by):
        target = resolve_link(path)
        _make_folder(target.parent)
        with _staged(target, _create_file) as (aside, handle):
            with open(handle, "wb", closefd=False) as file:
                file.write(raw)
                file.flush()
                os.fsync(handle)
            move_into_place(aside, target)
    return path


@contextlib.contextmanager
def _staged(target: Path, create: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """A new file or folder on the same disk and its handle; removed afterwards if it was not renamed."""
    aside, handle = _stage(target, create)
    try:
        yield aside, handle
    finally:
        _remove(aside)
        _staged_paths.discard(aside)
        os.close(handle)


@contextlib.contextmanager
def staging_folder(beside: Path, *, by: str = "-o") -> Iterator[Path]:
    """A hidden folder next to `beside` (same disk, so a rename seals) that is always removed afterwards."""
    with contextlib.ExitStack() as stack:
        with os_errors(beside, by=by):
            resolve_link(beside)
            _make_folder(beside.parent)
            folder, _ = stack.enter_context(_staged(beside, _create_folder))
        yield folder


@contextlib.contextmanager
def staged_copy(source: Path, target: Path) -> Iterator[Path]:
    """A complete copy of `source` beside `target`, to be renamed over it; removed afterwards if it was not.

    `target` has its links resolved already (`resolve_link`).
    """
    try:
        goal = resolve_link(target)
        _make_folder(goal.parent)
        with _staged(goal, _create_file) as (aside, handle):
            shutil.copyfile(source, aside)
            os.fsync(handle)
            yield aside
    except OSError as error:
        raise os_error(error, target) from error


def copy_atomic(source: Path, target: Path) -> Path:
    """Copy `source` to `target` (or its link target) atomically."""
    with os_errors(target):
        goal = resolve_link(target)
    with staged_copy(source, goal) as copy:
        move_into_place(copy, goal)
    return target


# ------------------------------------------------------------------------------------------------ several files


class _Journal(list[tuple[Path, Path | None, int]]):
    """What a block of `all_or_nothing` put in place or removed: the path, what was there before, and that file's handle."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: list[Path] = []

    def keep(self, path: Path) -> None:
        """Remember what is at `path` now, under a staged name; a folder is there alone until the next one comes."""
        if not os.path.lexists(path):
            self.append((path, None, -1))
            return
        kept = path.with_name(f".{path.name}.{_boot_id()}-{os.getpid()}-{next(_counter)}.tmp")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a lock is the file's: `sweep_staged` of others leaves it
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _staged_paths.add(kept)
        self.append((path, kept, handle))
        if path.is_dir():
            path.rename(kept)
            return
        try:
            os.link(path, kept)
        except OSError:  # no hard links on this file system
            shutil.copy2(path, kept)

    def undo(self) -> None:
        for path, kept, _ in reversed(self):
            if kept is not None and not kept.exists():  # it failed before it was there
                continue
            with contextlib.suppress(OSError):
                if kept is None or kept.is_dir():
                    _remove(path)
                if kept is not None:
                    kept.replace(path)
        for folder in reversed(self.folders):
            with contextlib.suppress(OSError):  # not empty: something else is in it
                folder.rmdir()

    def close(self) -> None:
        for _, kept, handle in self:
            if kept is not None:
                _remove(kept)
                _staged_paths.discard(kept)
                os.close(handle)


_journal: contextvars.ContextVar[_Journal | None] = contextvars.ContextVar("journal", default=None)


@contextlib.contextmanager
def all_or_nothing() -> Iterator[None]:
    """If the block raises, the files that it put in place are gone again, those that it replaced are back, and folders that
    it made are removed. For verbs whose files are one result; a verb that keeps finished work does without."""
    if _journal.get() is not None:  # the outer block has it all
        yield
        return
    journal = _Journal()
    token = _journal.set(journal)
    try:
        yield
    except BaseException:
        journal.undo()
        raise
    finally:
        _journal.reset(token)
        journal.close()


def _journal_of(path: Path) -> _Journal | None:
    """What records a change at `path`: nothing does inside a staged folder, which is removed or renamed as a whole."""
    return None if any(folder in _staged_paths for folder in path.parents) else _journal.get()


def move_into_place(made: Path, target: Path, *, new: bool = False) -> None:
    """Rename a finished file, or in `all_or_nothing` a folder, over `target`; that undoes it.

    `FileExistsError` where it is to be `new`, and is not.
    """
    journal = _journal_of(target)
    if new:
        try:
            os.link(made, target)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this file system
            pass
        else:
            if journal is not None:
                journal.append((target, None, -1))
            made.unlink()
            return
    if journal is not None and (made.is_dir() or not target.is_dir()):  # else it fails, and the folder stays
        journal.keep(target)
    made.replace(target)


def remove_replaced(path: Path) -> None:
    """Remove a file, if it is there, that belongs to one that is replaced; `all_or_nothing` undoes it."""
    if (journal := _journal_of(path)) is not None and path.exists():
        journal.keep(path)
    path.unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    missing = [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    if (journal := _journal.get()) is not None:
        journal.folders += missing


def unused_folder(folder: Path) -> Path:
    """The folder, or with suffix `_2`, `_3`, ... if it exists."""
    candidate, number = folder, 1
    with contextlib.suppress(OSError):  # a name that is too long does not exist
        while candidate.exists():
            number += 1
            candidate = folder.with_name(f"{folder.name}_{number}")
    return candidate


def write_json(path: Path, value: Any, *, by: str = "-o") -> Path:
    """Write the value atomically as indented JSON, with a final newline; `by` as in `write_atomic`."""
    import msgspec

    return write_atomic(path, msgspec.json.format(encode_json(value), indent=2) + b"\n", by=by)


_FIRST_WAIT_S = 10.0


def _wait_for(lock: filelock.BaseFileLock, path: Path, busy: str) -> None:
    import logging  # not needed by the light modules

    import filelock

    began_s, pause_s = time.monotonic(), _FIRST_WAIT_S
    while True:
        holder, waited_s = _lock_holder(path), time.monotonic() - began_s
        named = f"process {holder}" if holder else "the process is not known"
        since = f"; {waited_s:.0f} s so far" if waited_s >= 1 else ""
        logging.getLogger(__name__).info("%s (%s, lock `%s`%s)", busy, named, path, since)
        try:
            lock.acquire(timeout=pause_s)
            return
        except filelock.Timeout:
            pause_s *= 2


def _lock_holder(path: Path) -> int | None:
    """The process that holds a lock on the file, as the kernel lists them; None where it does not."""
    with contextlib.suppress(OSError, ValueError):
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if (
                len(fields) > 5
                and fields[1] != "->"
                and int(fields[5].rpartition(":")[2]) == inode
                and int(fields[4]) > 0
            ):
                return int(fields[4])
    return None


@contextlib.contextmanager
def file_lock(path: Path, *, busy: SetupError | str, by: str = "-o") -> Iterator[None]:
    """Hold the lock file at `path`. Where another process has it, raise `busy`, or log that text with the process and wait;
    the text comes again after 10 s, 20 s, 40 s and so on.
    """
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if isinstance(busy, SetupError):
            raise busy from None
        _wait_for(lock, path, busy)
    except OSError as error:
        raise os_error(error, path.parent, by=by) from error
    try:
        yield
    finally:
        lock.release()
