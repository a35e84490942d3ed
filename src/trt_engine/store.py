"""Engine cache by key: built once, stored atomically, shared between processes.

A key is the digest of everything that makes two engines different: the model, the settings (all but those excluded by
name), the builder's identity, the sources of this package that write graphs, and the schema of this store. A key is a
folder with payload and passport that was filled aside and renamed into place; a lock per key makes two builds of the
same engine one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from trt_engine.atomic_io import ensure_folder, file_lock, os_error, os_errors, staging_folder, sweep_staged
from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine
from trt_engine.environment import source_digest
from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.public_function import public_method

_SCHEMA = 1
_RULES = ("backends", "graph", "precision")
"""The parts of this package that write what an engine is compiled from."""
_STORE_VARIABLE = "TRT_ENGINE_STORE"
"""What names another place for the store."""
_SHARED_VARIABLE = "TRT_ENGINE_STORE_SHARED"
"""`1` allows a store that other users may write to."""
_KEY = re.compile(r"[0-9a-f]{32}")
log = logging.getLogger(__name__)


def _canonical(value: Any) -> Any:
    """A value that JSON encodes identically in every process; `UsageError` for unknown types."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _canonical(value[name]) for name in sorted(value, key=str)}
    if is_dataclass(value) and not isinstance(value, type):
        return _canonical(asdict(value))
    raise UsageError(f"a {type(value).__name__} cannot be part of an engine's key", hint="use plain values")


def engine_key(model_digest: str, config: BuildConfig, identity: str) -> str:
    """The key of the engine that `identity` builds of this model with these (resolved) settings: 32 hex digits.

    What the package writes into a graph (fusions, casts, Q/DQ pairs, rounded weights, imports) counts by its sources."""
    rules = source_digest(*_RULES)
    facts = {"schema": _SCHEMA, "model": model_digest, "config": config.key(), "builder": identity, "rules": rules}
    text = json.dumps(_canonical(facts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One engine of the store."""

    key: str
    path: Path
    backend: str
    model: str
    nbytes: int
    last_used: float
    """Time of last use, seconds since the epoch."""


class Store:
    """A folder of engines. The default is the user's cache folder, or `$TRT_ENGINE_STORE`."""

    @public_method
    def __init__(self, folder: Path | str | None = None) -> None:
        chosen = folder or os.environ.get(_STORE_VARIABLE) or platformdirs.user_cache_path("trt-engine") / "store"
        self.folder = Path(chosen)

    @public_method
    def get(self, key: str, model_digest: str | None = None) -> Engine | None:
        """The engine under this key if it exists and is intact and of this model; otherwise None with a warning.

        `SetupError` for a store that other users may write to.
        """
        folder = self.folder / "engines" / key
        if not self._exists() or not _is_own_folder(folder):
            return None
        for passport in folder.glob("*.json"):
            try:
                engine = _open_sealed(passport, key)
                engine.verify()
                if engine.reference is not None:
                    engine.verify_reference()
            except (EngineError, OSError) as error:
                log.warning("a damaged engine in the store is left out: %s", getattr(error, "message", error))
                return None
            if model_digest not in (None, engine.passport.model.digest):
                log.warning("an engine of another model in the store is left out: `%s`", engine.path)
                return None
            with contextlib.suppress(OSError):
                os.utime(passport)  # last use, for `prune`
            return engine
        return None

    def _exists(self) -> bool:
        """Whether there is a store; `SetupError` where other users may write to it, or its folders are links."""
        for folder in (self.folder, self.folder / "engines"):
            try:
                _check_owner(folder, folder.stat() if folder == self.folder else folder.lstat())
            except FileNotFoundError:
                if folder == self.folder:
                    return False
            except OSError as error:
                raise os_error(error, self.folder, "use", by=_STORE_VARIABLE) from error
        return True

    def timing_cache(self, identity: str) -> Path:
        """Timing cache of the builder `identity` (library version, GPU), shared between engines."""
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return self.folder / "timing" / f"{digest}.cache"

    def compiler_cache(self, identity: str) -> Path:
        """Folder of what the compiler of the builder `identity` keeps between builds; made where it is missing."""
        return self._ensure_folder("compilers") / hashlib.sha256(identity.encode()).hexdigest()[:16]

    def build_log(self, key: str) -> Path:
        """Path of the raw log of the latest build of this engine, failed or not."""
        return self.folder / "logs" / f"{key}.log"

    def get_or_build(
        self,
        key: str,
        build: Callable[[Path], Engine],
        *,
        model_digest: str | None = None,
        rebuild: bool = False,
        accept: Callable[[Engine], bool] = lambda engine: True,
    ) -> tuple[Engine, bool]:
        """The engine under `key`, made by `build(folder)` if it is not there; True when it was built now.

        `build` fills the folder it is given and seals the engine in it. A second process with the same key waits and
        uses the first one's engine. An engine that is there and does not fit (it was never checked, for example) is built
        again. When `build` raises, or the process dies, nothing is left under the key but what was there before.
        """
        before = _folder_id(self.folder / "engines" / key)  # before we look: what appears after the look is new to us
        if not rebuild and (engine := self.get(key, model_digest)) is not None and accept(engine):
            return engine, False  # without the lock, so that a store on a read-only disk serves
        target = self._ensure_folder("engines") / key
        lock = self._ensure_folder("locks") / f"{key}.lock"
        with file_lock(lock, busy="another process builds this engine; waiting for it", by=_STORE_VARIABLE):
            if not _is_shared():
                _close_to_others(lock)
            # an engine that appeared while we waited is as new as the one we would build
            new = _folder_id(target) != before
            if new and (engine := self.get(key, model_digest)) is not None and accept(engine):
                return engine, False
            with staging_folder(target, by=_STORE_VARIABLE) as folder:
                try:
                    engine = build(folder)
                except SetupError as error:  # a write in here: `-o` would not help
                    if isinstance(error.__cause__, OSError) and str(folder) in error.message:
                        raise os_error(error.__cause__, self.folder, by=_STORE_VARIABLE) from error
                    raise
                for made in () if _is_shared() else folder.rglob("*"):
                    _close_to_others(made)
                folder.chmod(
                    0o777 & ~_umask() & ~(0 if _is_shared() else 0o022)
                )  # a staging folder is its owner's alone
                _replace_folder(folder, target)
            return Engine(target / engine.path.name, engine.passport), True

    def entries(self) -> list[StoreEntry]:
        """The engines of the store, last used first; a folder without a readable passport has the backend `damaged`."""
        found = []
        for folder in self._folders():
            with contextlib.suppress(OSError):  # removed while we look
                found.append(_read_entry(folder))
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def _ensure_folder(self, name: str) -> Path:
        """One of the store's folders, made if need be; a new store is writable by its owner alone, whatever the umask."""
        new = [path for path in (self.folder, self.folder / name) if not path.exists()]
        folder = ensure_folder(self.folder / name, by=_STORE_VARIABLE)
        for made in () if _is_shared() else new:
            _close_to_others(made)
        for made in (self.folder, folder):
            _check_owner(made, made.stat() if made == self.folder else made.lstat())
        return folder

    def _folders(self) -> list[Path]:
        """The folders of engines: real ones, named by a key; all else under `engines/` is not ours."""
        if not self._exists():
            return []
        try:
            found = [*(self.folder / "engines").iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise os_error(error, self.folder, "use", by=_STORE_VARIABLE) from error
        return [folder for folder in found if _KEY.fullmatch(folder.name) and _is_own_folder(folder)]

    @public_method
    def prune(
        self, *, max_bytes: int | None = None, older_than_s: float | None = None, dry_run: bool = False
    ) -> list[StoreEntry]:
        """Remove engines least recently used first until the store fits, and leftovers of dead builds; what was removed.

        An engine that another process is rebuilding is left alone.
        """
        now = time.time()
        entries = self.entries()
        total, chosen = sum(entry.nbytes for entry in entries), []
        for entry in reversed(entries):
            too_old = older_than_s is not None and now - entry.last_used > older_than_s
            too_much = max_bytes is not None and total > max_bytes
            if too_old or too_much:
                total -= entry.nbytes
                chosen.append(entry)
        if dry_run:
            return chosen
        removed = [entry for entry in chosen if self._remove_idle(self.folder / "engines" / entry.key, entry.key)]
        if entries or self._exists():
            sweep_staged(self.folder / "engines")
        return removed

    def _remove_idle(self, folder: Path, key: str) -> bool:
        """Remove a folder unless a build of its key runs (it would hold the lock); whether it is gone."""
        with contextlib.suppress(filelock.Timeout, OSError):
            lock = filelock.FileLock(self._ensure_folder("locks") / f"{key}.lock")
            with lock.acquire(timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()


def _is_shared() -> bool:
    return os.environ.get(_SHARED_VARIABLE, "") not in ("", "0")


def _check_owner(folder: Path, found: os.stat_result) -> None:
    """`SetupError` for a folder whose engines another user may have put there: an engine is a program that is run."""
    if not stat.S_ISDIR(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise SetupError(
            f"`{folder}` in the store is {what}, expected a folder",
            hint=f"name another place with `{_STORE_VARIABLE}`",
        )
    if _is_shared():
        return
    fix = f"or set `{_SHARED_VARIABLE}=1` if you trust everyone who may write there"
    if found.st_uid not in (os.geteuid(), 0):
        raise SetupError(
            f"the store `{folder}` belongs to another user (uid {found.st_uid})",
            hint=f"name one you own with `{_STORE_VARIABLE}`, {fix}",
        )
    if found.st_mode & 0o022:
        raise SetupError(
            f"others may write to the store `{folder}` (mode {stat.S_IMODE(found.st_mode):o})",
            hint=f"{shlex.join(['chmod', 'go-w', str(folder)])}, {fix}",
        )


def _is_own_folder(folder: Path) -> bool:
    """Whether it is a real folder, and by its owner and mode no other user's work."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and not _others_work(found)


def _others_work(found: os.stat_result) -> str:
    """Why another user may have written a file or folder of the store; empty where none may have."""
    if _is_shared():
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {found.st_uid})"
    return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})" if found.st_mode & 0o022 else ""


def _close_to_others(path: Path) -> None:
    """Take other users' right to write, whatever the umask was."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode) & ~0o022)


def _open_sealed(passport: Path, key: str) -> Engine:
    """The engine of a passport in the store; `EngineError` for another key's, or where a file of it is a link."""
    if passport.is_symlink():
        raise EngineError(f"`{passport}` is a link")
    if reason := _others_work(passport.lstat()):
        raise EngineError(f"`{passport}` {reason}")
    engine = Engine.open(passport)
    if engine.passport.key != key:
        raise EngineError(f"`{passport}` is the passport of the key `{engine.passport.key}`")
    for file in (*engine.files, *([engine.reference] if engine.reference is not None else [])):
        if file.is_symlink() or file.parent != passport.parent:
            raise EngineError(f"`{file}` is a link")
        if file.exists() and (reason := _others_work(file.lstat())):
            raise EngineError(f"`{file}` {reason}")
    return engine


def _read_entry(folder: Path) -> StoreEntry:
    for passport in folder.glob("*.json"):
        with contextlib.suppress(EngineError):
            engine = _open_sealed(passport, folder.name)
            reference = engine.passport.validation and engine.passport.validation.reference
            return StoreEntry(
                key=folder.name,
                path=engine.path,
                backend=engine.passport.backend,
                model=engine.passport.model.name,
                nbytes=sum(item.nbytes for item in (*engine.passport.payload, *([reference] if reference else []))),
                last_used=passport.stat().st_mtime,
            )
    files = [file.lstat() for file in folder.iterdir()]
    used = max((file.st_mtime for file in files), default=folder.stat().st_mtime)
    return StoreEntry(folder.name, folder, "damaged", "?", sum(file.st_size for file in files), used)


def _umask() -> int:
    """The process's mask; it can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _folder_id(folder: Path) -> int | None:
    """Inode of the folder; None where it does not exist."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _replace_folder(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; what was there is put aside first and comes back if that fails."""
    with staging_folder(target, by=_STORE_VARIABLE) as aside:
        before = aside / "before"
        with os_errors(target, by=_STORE_VARIABLE):
            had = target.exists()
            if had:
                target.rename(before)
            try:
                folder.rename(target)
            except BaseException:  # Ctrl-C too: what was there stays
                if had and not target.exists():
                    before.rename(target)
                raise
