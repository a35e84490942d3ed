"""`size` runs as the source of a deployment's settings: each engine takes the run that measured it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from trt_engine.engine import Engine
from trt_engine.errors import EngineError, ModelError, UsageError
from trt_engine.records.size import SizeReport
from trt_engine.records.streams import StreamCapacity
from trt_engine.reporting.run_records import RunRecords


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The results of a `size` run, and the engines it built and measured."""

    folder: Path
    report: SizeReport
    digests: frozenset[str]

    @property
    def capacity(self) -> StreamCapacity | None:
        """Streams within a deadline, where the run measured the latency curve."""
        capacity = self.report.capacity
        return capacity if isinstance(capacity, StreamCapacity) else None

    @property
    def best_batch(self) -> int:
        """The measured batch with the most images/s."""
        best = self.report.best
        return best.batch if best is not None else 1


def read_runs(folders: Iterable[Path]) -> list[MeasuredRun]:
    """The runs; `UsageError` for a folder that is not a finished run of `size`."""
    return [_read_run(folder) for folder in folders]


def _read_run(folder: Path) -> MeasuredRun:
    records = RunRecords.open(folder)
    if records.size is None or records.size.best is None:
        raise UsageError(f"`{folder}` has no result of `size`", hint="`trt-engine size MODEL -o DIR` writes one")
    named = (path for name, path in records.size.artifacts.items() if name.startswith("engine"))
    digests = set()
    for path in {PurePath(path).name for path in (*named, records.size.engine or "")}:
        try:
            digests.add(Engine.open(records.folder / "engines" / path).passport.payload[0].digest)
        except (EngineError, ModelError, OSError):  # removed since, or an archive
            continue
    return MeasuredRun(folder, records.size, frozenset(digests))


def match_runs(folders: Iterable[Path], engines: Mapping[str, Engine]) -> dict[str, MeasuredRun]:
    """The run that measured each engine, by model name; `UsageError` for a run that measured none of them."""
    matched: dict[str, MeasuredRun] = {}
    for run in read_runs(folders):
        names = [name for name, engine in engines.items() if engine.passport.payload[0].digest in run.digests]
        if not names:
            listed = ", ".join(f"`{engine.path.name}`" for engine in engines.values())
            raise UsageError(
                f"the `size` run in `{run.folder}` did not measure {listed}",
                hint=f"deploy the engine it built: `{run.folder / 'engines'}`",
            )
        matched |= dict.fromkeys(names, run)
    return matched
