"""Engines by key: built once, whole or not there, shared between processes.

A key is the digest of everything that makes two engines different: the model, the settings (all but those excluded by
name), the builder's identity, and the schema of this store. Under a key lies a folder with payload and passport that was
filled aside and renamed into place; a lock per key makes two builds of the same engine one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from trt_engine.config import BuildConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.files import ensure_folder, explain, staging_folder

__all__ = ["Entry", "Store", "engine_key"]

_SCHEMA = 1
_BY = "TRT_ENGINE_STORE"
"""What names another place for the store."""
log = logging.getLogger(__name__)


def _canonical(value: Any) -> Any:
    """A value json writes the same way in every process; unknown types are refused, not printed."""
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
    """The key of the engine that `identity` builds of this model with these (resolved) settings: 32 hex digits."""
    facts = {"schema": _SCHEMA, "model": model_digest, "config": config.key(), "builder": identity}
    text = json.dumps(_canonical(facts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine of the store."""

    key: str
    path: Path
    backend: str
    model: str
    nbytes: int
    used: float
    """Time of last use, seconds since the epoch."""


class Store:
    """A folder of engines. The default is the user's cache folder, or `$TRT_ENGINE_STORE`."""

    def __init__(self, folder: Path | str | None = None) -> None:
        chosen = folder or os.environ.get(_BY) or platformdirs.user_cache_path("trt-engine") / "store"
        self.folder = Path(chosen)

    def get(self, key: str) -> Engine | None:
        """The engine under this key if it is there and whole; a damaged one is said, and built again by whoever builds."""
        for passport in (self.folder / "engines" / key).glob("*.json"):
            try:
                engine = Engine.open(passport)
                engine.verify()
            except (EngineError, OSError) as error:
                log.warning("a damaged engine in the store is left out: %s", getattr(error, "message", error))
                return None
            with contextlib.suppress(OSError):
                os.utime(passport)  # last use, for `prune`
            return engine
        return None

    def timing_cache(self, identity: str) -> Path:
        """Where the timings of the builder `identity` (library version, GPU) are kept; shared between engines."""
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return self.folder / "timing" / f"{digest}.cache"

    def build_log(self, key: str) -> Path:
        """Where the raw log of the latest build of this engine lies, failed or not."""
        return self.folder / "logs" / f"{key}.log"

    def get_or_build(
        self,
        key: str,
        build: Callable[[Path], Engine],
        *,
        again: bool = False,
        fits: Callable[[Engine], bool] = lambda engine: True,
    ) -> tuple[Engine, bool]:
        """The engine under `key`, made by `build(folder)` if it is not there; True when it was built now.

        `build` fills the folder it is given and seals the engine in it. Whoever comes second for the same key waits and
        takes what the first one made. An engine that is there and does not fit (it was never proved, say) is built
        again. When `build` raises, or the process dies, nothing is left under the key but what was there before.
        """
        before = _identity(self.folder / "engines" / key)  # before we look: what appears after the look is new to us
        if not again and (engine := self.get(key)) is not None and fits(engine):
            return engine, False  # without the lock, so that a store on a read-only disk serves
        target = ensure_folder(self.folder / "engines", by=_BY) / key
        with self._lock(key):
            # an engine that appeared while we waited is as new as the one we would build
            new = _identity(target) != before
            if new and (engine := self.get(key)) is not None and fits(engine):
                return engine, False
            self._sweep(key)
            with staging_folder(target, by=_BY) as folder:
                try:
                    engine = build(folder)
                except SetupError as error:  # a write in here: `-o` would not help
                    if isinstance(error.__cause__, OSError) and str(folder) in error.message:
                        raise explain(error.__cause__, self.folder, by=_BY) from error
                    raise
                folder.chmod(0o777 & ~_umask())  # a staging folder is for its owner alone, a store may be shared
                _swap(folder, target)
            return Engine(target / engine.path.name, engine.passport), True

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        path = ensure_folder(self.folder / "locks", by=_BY) / f"{key}.lock"
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            log.info("another process builds this engine; waiting for it")
            lock.acquire()
        except OSError as error:
            raise explain(error, path, by=_BY) from error
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """The engines of the store, last used first; a folder without a readable passport has the backend `damaged`."""
        found = []
        for folder in self._folders():
            if not folder.name.startswith("."):
                with contextlib.suppress(OSError):  # removed while we look
                    found.append(_entry(folder))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def _folders(self) -> list[Path]:
        """What lies under `engines/`; a store that is not there yet has nothing, one that cannot be read is an error."""
        try:
            return [folder for folder in (self.folder / "engines").iterdir() if folder.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise explain(error, self.folder, "use", by=_BY) from error

    def prune(
        self, *, max_bytes: int | None = None, older_than_s: float | None = None, dry_run: bool = False
    ) -> list[Entry]:
        """Remove engines least recently used first until the store fits, and leftovers of dead builds; what was removed.

        An engine that somebody builds anew at this moment is left alone.
        """
        now = time.time()
        entries = self.entries()
        total, chosen = sum(entry.nbytes for entry in entries), []
        for entry in reversed(entries):
            too_old = older_than_s is not None and now - entry.used > older_than_s
            too_much = max_bytes is not None and total > max_bytes
            if too_old or too_much:
                total -= entry.nbytes
                chosen.append(entry)
        if dry_run:
            return chosen
        removed = [entry for entry in chosen if self._remove_idle(self.folder / "engines" / entry.key, entry.key)]
        for leftover in (self.folder / "engines").glob(".*.tmp"):
            self._remove_idle(leftover, leftover.name.lstrip(".").partition(".")[0])
        return removed

    def _sweep(self, key: str) -> None:
        """Remove what dead builds of this key left; called under its lock, so no living one is met."""
        for leftover in (self.folder / "engines").glob(f".{key}.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove_idle(self, folder: Path, key: str) -> bool:
        """Remove a folder unless a build of its key lives (it would hold the lock); whether it is gone."""
        with contextlib.suppress(filelock.Timeout, OSError):
            lock = filelock.FileLock(ensure_folder(self.folder / "locks", by=_BY) / f"{key}.lock")
            with lock.acquire(timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()


def _entry(folder: Path) -> Entry:
    for passport in folder.glob("*.json"):
        with contextlib.suppress(EngineError):
            engine = Engine.open(passport)
            return Entry(
                key=folder.name,
                path=engine.path,
                backend=engine.passport.backend,
                model=engine.passport.model.name,
                nbytes=sum(item.nbytes for item in engine.passport.payload),
                used=passport.stat().st_mtime,
            )
    files = [file.stat() for file in folder.iterdir()]
    used = max((file.st_mtime for file in files), default=folder.stat().st_mtime)
    return Entry(folder.name, folder, "damaged", "?", sum(file.st_size for file in files), used)


def _umask() -> int:
    """The process's mask; it can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _identity(folder: Path) -> int | None:
    """Which folder this is, whatever its name; None where there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _swap(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; what was there is put aside first and comes back if that fails."""
    aside = folder.with_name(f"{folder.name}.old.tmp")
    try:
        had = target.exists()
        if had:
            target.rename(aside)
        try:
            folder.rename(target)
        except BaseException:  # Ctrl-C too: what was there stays
            if had and not target.exists():
                aside.rename(target)
            raise
    except OSError as error:
        raise explain(error, target, by=_BY) from error
    shutil.rmtree(aside, ignore_errors=True)
