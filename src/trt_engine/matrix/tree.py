"""The folder of a run: `run.json` first, a file for each cell written whole when it ends, one run at a time in it."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import filelock
import msgspec

from trt_engine.cells import CellResult, CellSpec, RunManifest, RunSummary
from trt_engine.errors import SetupError, UsageError
from trt_engine.files import ensure_folder, explain, write_whole
from trt_engine.matrix.parts import to_do
from trt_engine.records import document, encode
from trt_engine.runfiles import CELLS, PLAN, REPORT, RUN

__all__ = ["Tree", "default_folder", "earlier_seconds"]

log = logging.getLogger(__name__)

_OLD = "old"
_LOCK = ".lock"
_EARLIER = 8
"""Runs beside this one whose times are looked at for an estimate."""
_STAGED = re.compile(r"\..+\.(\d+\.\d+|[a-z0-9_]{8})\.tmp")
"""Files and folders by the names `files.write_whole` and `files.staging_folder` give them."""


def default_folder() -> Path:
    """`runs/YYYYMMDD_HHMMSS`, with a number behind it where that is taken."""
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    folder, number = Path("runs") / stamp, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{stamp}_{number}"
    return folder


@dataclass(frozen=True, slots=True)
class Tree:
    """A run's folder."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, *, yes: bool = False) -> Tree:
        """The folder to run in: new, empty, or with a run in it that is gone on with; `UsageError` for any other."""
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"`{folder}` is a file, expected a folder", hint="name another with `-o`")
        try:
            there = (
                sorted(item.name for item in folder.iterdir() if not item.name.startswith("."))
                if folder.exists()
                else []
            )
        except OSError as error:
            raise explain(error, folder, "use") from error
        if there and RUN not in there and not yes:
            raise UsageError(
                f"`{folder}` holds other files (`{there[0]}`) and no run",
                hint="name a new folder with `-o`; `--yes` writes the run beside them",
            )
        return cls(folder)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One run at a time in a folder: a second is refused, not made to wait."""
        ensure_folder(self.folder)
        lock = filelock.FileLock(self.folder / _LOCK)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise SetupError(
                f"another run is at work in `{self.folder}`",
                hint="wait for it to end, or name another folder with `-o`",
            ) from None
        except OSError as error:
            raise explain(error, self.folder) from error
        try:
            self._sweep()
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Take away what a killed run left half-written; nobody else is here."""
        for folder in (self.folder, *(item for item in self.folder.iterdir() if item.is_dir())):
            for path in folder.iterdir():
                if not _STAGED.fullmatch(path.name) or path.is_symlink():
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                with contextlib.suppress(OSError):
                    path.unlink()

    # -------------------------------------------------------------------------------- what is kept

    def begin(self, manifest: RunManifest, plan: bytes, command: str) -> None:
        """Write what the run is; results of cells it no longer has are put into `cells/old`."""
        write_whole(self.folder / PLAN, plan)
        raw = msgspec.json.format(encode(document("run-manifest", manifest, command=command)), indent=2)
        write_whole(self.folder / RUN, raw + b"\n")
        known = {f"{spec.label}.json" for spec in manifest.cells}
        for path in self._cell_files():
            if path.name not in known:
                old = ensure_folder(path.parent / _OLD) / path.name
                with contextlib.suppress(OSError):
                    path.replace(old)

    def keep(self, result: CellResult) -> None:
        """Write a cell's result, whole."""
        write_whole(
            self.folder / CELLS / f"{result.spec.label}.json", msgspec.json.format(encode(result), indent=2) + b"\n"
        )

    def manifest(self) -> RunManifest | None:
        """`run.json`; None where it is not there or damaged."""
        try:
            return msgspec.json.decode((self.folder / RUN).read_bytes(), type=RunManifest)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def summary(
        self,
        manifest: RunManifest,
        specs: Sequence[CellSpec],
        found: Mapping[str, CellResult],
        *,
        reused: int,
        artifacts: Mapping[str, str] | None = None,
        warnings: Sequence[str] = (),
    ) -> RunSummary:
        """What became of every cell of the plan; one nobody came to waits."""
        results = tuple(found.get(spec.label) or CellResult(spec, "waiting") for spec in specs)
        states = [result.state for result in results]
        return RunSummary(
            folder=str(self.folder),
            manifest=manifest,
            results=results,
            done=states.count("done"),
            failed=states.count("failed"),
            skipped=states.count("skipped"),
            reused=reused,
            artifacts={"run": str(self.folder / RUN), **(artifacts or self._reports())},
            complete=not {"waiting", "interrupted"} & set(states),
            warnings=tuple(warnings),
        )

    def _reports(self) -> dict[str, str]:
        return {path.name: str(path) for path in (self.folder / "report.html", self.folder / REPORT) if path.exists()}

    def results(self) -> dict[str, CellResult]:
        """The results that are there, by label; a damaged one is said, and is as if it were not there."""
        found = {}
        for path in self._cell_files():
            try:
                result = msgspec.json.decode(path.read_bytes(), type=CellResult)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("`%s` cannot be read and is left out: %s", path, error)
                continue
            found[result.spec.label] = result
        return found

    def missing(self, before: CellResult | None, spec: CellSpec, *, force: bool = False) -> tuple[str, ...] | None:
        """The modes that are still to be carried out; None where the cell need not be touched.

        `force` carries out all that are asked for. A cell that nothing can be done for is left as it was found.
        """
        if before is None or before.spec.digest != spec.digest:
            return spec.modes
        if not spec.modes:
            return () if before.state == "skipped" else None
        if force or self.lost_engine(before):
            return spec.modes
        return to_do(before, spec) or None

    def lost_engine(self, result: CellResult) -> bool:
        return result.engine is not None and not (self.folder / result.engine).is_file()

    def _cell_files(self) -> list[Path]:
        try:
            return sorted(path for path in (self.folder / CELLS).iterdir() if path.suffix == ".json" and path.is_file())
        except OSError:
            return []


def earlier_seconds(folder: Path) -> dict[str, float]:
    """Seconds by label that cells took in the latest runs beside this one, for an estimate."""
    found: dict[str, float] = {}
    try:
        beside = [
            item for item in folder.absolute().parent.iterdir() if (item / RUN).is_file() and item.name != folder.name
        ]
        latest = sorted(beside, key=lambda item: (item / RUN).stat().st_mtime, reverse=True)[:_EARLIER]
    except OSError:
        return {}
    for run in latest:
        for path in (run / CELLS).glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                told = msgspec.json.decode(path.read_bytes(), type=_Took)
                if told.state == "done":
                    found.setdefault(path.stem, told.seconds)
    return found


@dataclass(frozen=True, slots=True)
class _Took:
    state: str
    seconds: float
