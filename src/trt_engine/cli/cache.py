"""`trt-engine cache list|prune`: the store of engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.errors import UsageError
from trt_engine.figures import size

if TYPE_CHECKING:
    from trt_engine.records import CachedEngine, CacheReport
    from trt_engine.store import Entry

__all__ = ["command"]


@click.group(short_help="The store of engines.")
def command() -> None:
    """The store of engines: what `size` and `bench` built and keep for the next time.

    It is the user's cache folder, or the folder `TRT_ENGINE_STORE` names. Removing an engine costs the time to build it
    again, nothing else.
    """


@command.command("list")
@options.common
def list_engines(talk: Talk) -> None:
    """The engines in the store, last used first, with their size and where they lie."""
    from trt_engine.store import Store

    store = Store()
    report = _report("list", store.folder, store.entries())
    emit(talk, document("cache", report, command=options.spelled_command()), _listed(report))


@command.command("prune")
@click.option("--max-size", metavar="SIZE", help="Remove the least recently used until the rest fits, as 10GiB.")
@click.option("--older-than", metavar="TIME", help="Remove what was not used for this long, as 30d or 12h.")
@click.option("--all", "everything", is_flag=True, help="Remove every engine.")
@options.dry_run_option
@options.common
def prune(talk: Talk, max_size: str | None, older_than: str | None, everything: bool, dry_run: bool) -> None:
    """Remove engines from the store, and what builds that died left behind."""
    import math

    from trt_engine.config import parse_duration, parse_size
    from trt_engine.store import Store

    if everything and (max_size or older_than):
        raise UsageError("`--all` leaves nothing for `--max-size` or `--older-than`", hint="give one of them")
    if not (everything or max_size or older_than):
        raise UsageError(
            "nothing says which engines to remove",
            hint="`trt-engine cache prune --max-size 10GiB`, `--older-than 30d` or `--all`; "
            "`--dry-run` shows what would go",
        )
    store = Store()
    removed = store.prune(
        max_bytes=parse_size(max_size) if max_size else None,
        older_than_s=-math.inf if everything else parse_duration(older_than) if older_than else None,
        dry_run=dry_run,
    )
    gone = {entry.key for entry in removed}
    left = [entry for entry in store.entries() if entry.key not in gone]
    report = _report("prune", store.folder, left, removed, dry_run)
    emit(talk, document("cache", report, command=options.spelled_command()), _pruned(report))


def _report(
    action: Any, folder: Any, left: Sequence[Entry], removed: Sequence[Entry] = (), dry_run: bool = False
) -> CacheReport:
    from trt_engine.records import CacheReport

    return CacheReport(
        action=action,
        folder=str(folder),
        engines=tuple(map(_engine, left)),
        nbytes=sum(entry.nbytes for entry in left),
        removed=tuple(map(_engine, removed)),
        removed_bytes=sum(entry.nbytes for entry in removed),
        dry_run=dry_run,
    )


def _engine(entry: Entry) -> CachedEngine:
    from trt_engine.records import CachedEngine

    used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used))
    return CachedEngine(entry.key, str(entry.path), entry.backend, entry.model, entry.nbytes, used)


def _listed(report: CacheReport) -> str:
    where = f"store: {report.folder} (`TRT_ENGINE_STORE` names another)"
    if not report.engines:
        return f"{where}\nno engines"
    return "\n".join([where, *_table(report.engines), _total(len(report.engines), report.nbytes)])


def _pruned(report: CacheReport) -> str:
    verb = "would remove" if report.dry_run else "removed"
    if not report.removed:
        return f"store: {report.folder}\nnothing to remove; {_total(len(report.engines), report.nbytes)} in the store"
    return "\n".join(
        [
            f"store: {report.folder}",
            *_table(report.removed),
            f"{verb} {_total(len(report.removed), report.removed_bytes)}; "
            f"{_total(len(report.engines), report.nbytes)} {'would be' if report.dry_run else 'are'} left",
        ]
    )


def _total(count: int, nbytes: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}, {size(nbytes)}"


def _table(engines: Sequence[CachedEngine]) -> list[str]:
    rows = [("key", "model", "backend", "size", "last used", "file")]
    for item in engines:
        name = item.path.rpartition("/")[2]
        rows.append((item.key[:12], item.model, item.backend, size(item.nbytes), item.used, name))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = 3  # the sizes
    return [
        "  ".join(
            cell.rjust(width) if column == right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
