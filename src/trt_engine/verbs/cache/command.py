"""`trt-engine cache list|prune`: the store of engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.errors import UsageError

if TYPE_CHECKING:
    from trt_engine.records.build import CachedEngine, CacheReport
    from trt_engine.store import StoreEntry


@click.group(short_help="The store of engines.")
def command() -> None:
    """The store of engines built by `size`, `bench` and other verbs.

    It is in the user's cache folder, or in `TRT_ENGINE_STORE`. A removed engine is rebuilt when needed.
    """


@options.verb("list", group=command)
def list_engines() -> CacheReport:
    """List the engines in the store, last used first, with size and path."""
    from trt_engine.store import Store

    store = Store()
    return _report("list", store.folder, store.entries())


@options.verb("prune", group=command, dry_run=True)
@click.option("--max-size", metavar="SIZE", help="Remove the least recently used until the rest fits, e.g. 10GiB.")
@click.option("--older-than", metavar="TIME", help="Remove engines not used for this long, e.g. 30d or 12h.")
@click.option("--all", "everything", is_flag=True, help="Remove every engine.")
def prune(max_size: str | None, older_than: str | None, everything: bool, dry_run: bool) -> CacheReport:
    """Remove engines and leftovers of interrupted builds from the store."""
    import math

    from trt_engine.store import Store
    from trt_engine.units import parse_duration, parse_size

    if everything and (max_size or older_than):
        raise UsageError("`--all` leaves nothing for `--max-size` or `--older-than`", hint="give one of them")
    if not (everything or max_size or older_than):
        raise UsageError(
            "no engines to remove are selected",
            hint="`trt-engine cache prune --max-size 10GiB`, `--older-than 30d` or `--all`; `--dry-run` lists them",
        )
    store = Store()
    removed = store.prune(
        max_bytes=parse_size(max_size) if max_size else None,
        older_than_s=-math.inf if everything else parse_duration(older_than) if older_than else None,
        dry_run=dry_run,
    )
    gone = {entry.key for entry in removed}
    left = [entry for entry in store.entries() if entry.key not in gone]
    return _report("prune", store.folder, left, removed, dry_run)


def _report(
    action: Any, folder: Any, left: Sequence[StoreEntry], removed: Sequence[StoreEntry] = (), dry_run: bool = False
) -> CacheReport:
    from trt_engine.records.build import CacheReport

    return CacheReport(
        action=action,
        folder=str(folder),
        engines=tuple(map(_engine, left)),
        nbytes=sum(entry.nbytes for entry in left),
        removed=tuple(map(_engine, removed)),
        removed_bytes=sum(entry.nbytes for entry in removed),
        dry_run=dry_run,
    )


def _engine(entry: StoreEntry) -> CachedEngine:
    from trt_engine.records.build import CachedEngine

    used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.last_used))
    return CachedEngine(entry.key, str(entry.path), entry.backend, entry.model, entry.nbytes, used)
