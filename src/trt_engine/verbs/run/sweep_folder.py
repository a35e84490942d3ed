"""The run folder: `run.json` first, then one atomically written file per finished cell; locked by one run at a time.

A resumed cell keeps the results of completed modes; pending modes are added. The engine and each mode have separate digests:
while the engine digest is unchanged, the results of a mode are retained until that mode runs again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from trt_engine import atomic_io
from trt_engine.errors import SetupError, UsageError
from trt_engine.records.base import write_document
from trt_engine.records.sweep import CellResult, CellSpec, RunManifest, RunSummary
from trt_engine.run_folder import CELLS, PLAN, REPORT, RUN
from trt_engine.verbs.run.plan_file import MODES, PROFILE_MODES

log = logging.getLogger(__name__)

_STALE_FOLDER = "old"
_LOCK = ".lock"
_MAX_EARLIER_RUNS = 8
"""Number of sibling runs used to estimate durations."""


def default_folder() -> Path:
    """`runs/YYYYMMDD_HHMMSS`, with a numeric suffix if it exists."""
    return atomic_io.unused_folder(Path("runs") / datetime.now().strftime("%Y%m%d_%H%M%S"))


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The folder of one run."""

    folder: Path

    @classmethod
    def prepare(cls, folder: Path, *, overwrite: bool = False) -> SweepFolder:
        """The folder to run in: new, empty, or a run to resume; `UsageError` for any other."""
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"`{folder}` is a file, expected a folder", hint="name another with `-o`")
        with atomic_io.os_errors(folder, "use"):
            there = (
                sorted(item.name for item in folder.iterdir() if not item.name.startswith("."))
                if folder.exists()
                else []
            )
        if there and RUN not in there and not overwrite:
            raise UsageError(
                f"`{folder}` contains other files (`{there[0]}`) and no run",
                hint="name a new folder with `-o`, or add `--overwrite` to write the run into it",
            )
        return cls(folder)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder; `SetupError` if another run has it."""
        atomic_io.ensure_folder(self.folder)
        busy = SetupError(
            f"another run is using `{self.folder}`", hint="wait for it to end, or name another folder with `-o`"
        )
        with atomic_io.file_lock(self.folder / _LOCK, busy=busy):
            for folder in (self.folder, *(item for item in self.folder.iterdir() if item.is_dir())):
                atomic_io.sweep_staged(folder)  # of a killed run
            yield

    # -------------------------------------------------------------------------------- results

    def begin(self, manifest: RunManifest, plan: bytes, command: str) -> None:
        """Write `run.json` and the plan; results of removed cells move to `cells/old`."""
        write_document(self.folder / RUN, "run-manifest", manifest, command=command, of="run")
        atomic_io.write_atomic(
            self.folder / PLAN, plan
        )  # after what makes the folder that of a run, whenever it is killed
        known = {f"{spec.label}.json" for spec in manifest.cells}
        for path in self._cell_files():
            if path.name not in known:
                old = atomic_io.ensure_folder(path.parent / _STALE_FOLDER) / path.name
                with contextlib.suppress(OSError):
                    path.replace(old)

    def write_result(self, result: CellResult) -> None:
        """Write a cell's result atomically."""
        atomic_io.write_json(self.folder / CELLS / f"{result.spec.label}.json", result)

    def read_manifest(self) -> RunManifest | None:
        """`run.json`; None if missing or damaged."""
        try:
            return atomic_io.decode_json(atomic_io.read_bounded(self.folder / RUN), RunManifest)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def summarize(
        self,
        manifest: RunManifest,
        specs: Sequence[CellSpec],
        by_label: Mapping[str, CellResult],
        *,
        reused: int,
        artifacts: Mapping[str, str] | None = None,
        warnings: Sequence[str] = (),
    ) -> RunSummary:
        """Summary of all cells; cells without a result are `waiting`."""
        if not artifacts:
            artifacts = {name: str(path) for name in ("report.html", REPORT) if (path := self.folder / name).exists()}
        results = tuple(by_label.get(spec.label) or CellResult(spec, "waiting") for spec in specs)
        states = [result.state for result in results]
        return RunSummary(
            folder=str(self.folder),
            manifest=manifest,
            results=results,
            done=states.count("done"),
            failed=states.count("failed"),
            skipped=states.count("skipped"),
            reused=reused,
            artifacts={"run": str(self.folder / RUN), **artifacts},
            complete=not {"waiting", "interrupted"} & set(states),
            warnings=tuple(warnings),
        )

    def read_results(self) -> dict[str, CellResult]:
        """Results by label; damaged ones are logged and omitted."""
        found = {}
        for path in self._cell_files():
            try:
                result = atomic_io.decode_json(atomic_io.read_bounded(path), CellResult)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("`%s` cannot be read and is ignored: %s", path, error)
                continue
            found[result.spec.label] = result
        return found

    def pending_modes(
        self, before: CellResult | None, spec: CellSpec, *, rerun: bool = False
    ) -> tuple[str, ...] | None:
        """Modes to run; None if the cell is complete.

        `rerun` runs all requested modes. A cell without applicable modes is left unchanged.
        """
        if before is None or before.spec.digest != spec.digest:
            return spec.modes
        if not spec.modes:
            return () if before.state == "skipped" else None
        if rerun or self.engine_missing(before):
            return spec.modes
        return pending(before, spec) or None

    def engine_missing(self, result: CellResult) -> bool:
        return result.engine is not None and not (self.folder / result.engine).is_file()

    def _cell_files(self) -> list[Path]:
        try:
            return sorted(path for path in (self.folder / CELLS).iterdir() if path.suffix == ".json" and path.is_file())
        except OSError:
            return []


def earlier_seconds(folder: Path) -> dict[str, float]:
    """Seconds per cell label in the latest sibling runs."""
    found: dict[str, float] = {}
    try:
        beside = [
            item for item in folder.absolute().parent.iterdir() if (item / RUN).is_file() and item.name != folder.name
        ]
        latest = sorted(beside, key=lambda item: (item / RUN).stat().st_mtime, reverse=True)[:_MAX_EARLIER_RUNS]
    except OSError:
        return {}
    for run in latest:
        for path in (run / CELLS).glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                stated = atomic_io.decode_json(atomic_io.read_bounded(path), _CellDuration)
                if stated.state == "done":
                    found.setdefault(path.stem, stated.seconds)
    return found


@dataclass(frozen=True, slots=True)
class _CellDuration:
    state: str
    seconds: float


MODE_SETTINGS: dict[str, tuple[str, ...]] = {
    "bench": ("bench",),
    "evaluate": ("dataset", "max_samples", "seed", "max_drop", "preprocess"),
    **dict.fromkeys(sorted(PROFILE_MODES), ("inferences",)),
}
"""Cell settings of one mode; changing them does not change the engine."""
_RESULT_FIELDS = {"bench": "bench", "evaluate": "evaluation", **dict.fromkeys(PROFILE_MODES, "profile")}
"""Field of `CellResult` with the results of a mode."""
_ENGINE_FIELDS = "engine engine_bytes build_seconds dtype_shares compute_dtype not_fused parity validation".split()


def skip_warning(mode: str, reason: str) -> str:
    """Warning for a mode that was not run."""
    return f"{mode} was left out: {reason}"


def measured_modes(result: CellResult) -> frozenset[str]:
    """Modes with complete results."""
    found = {mode: getattr(result, _RESULT_FIELDS[mode]) for mode in result.spec.mode_digests}
    return frozenset(mode for mode, figures in found.items() if getattr(figures, "complete", figures is not None))


def pending(before: CellResult | None, spec: CellSpec) -> tuple[str, ...]:
    """Modes of `spec` still to run, given the earlier result `before`."""
    if before is None or before.spec.digest != spec.digest or not spec.modes:
        return spec.modes
    if before.state != "done":
        return spec.modes
    missing = {mode for mode, digest in spec.mode_digests.items() if before.spec.mode_digests.get(mode) != digest}
    if missing & PROFILE_MODES:  # one profiling pass and record serves all three
        missing |= PROFILE_MODES & {*spec.modes, *measured_modes(before)}
    return tuple(mode for mode in MODES if mode == "build" or mode in missing) if missing else ()


def retained(before: CellResult, modes: tuple[str, ...]) -> frozenset[str]:
    """Modes of `before` whose results are retained when `modes` run."""
    had = frozenset(before.spec.mode_digests) if before.state == "done" else measured_modes(before)
    return had - {*modes, *(PROFILE_MODES if PROFILE_MODES & {*modes} else ())}


def merge(before: CellResult | None, now: CellResult) -> CellResult:
    """`now` merged with the results of `before` that were not measured again.

    Modes skipped on this machine remove nothing. A failure becomes the cell's state; retained results stay.
    """
    if before is None or before.spec.digest != now.spec.digest or before.spec.batch != now.spec.batch:
        return now
    kept = retained(before, now.spec.modes)
    if now.state == "skipped":
        if not measured_modes(before):
            return now
        reason = (now.reason or "").partition("\nhint: ")[0]
        left = [skip_warning(mode, reason) for mode in now.spec.modes if mode != "build"]
        return replace(before, warnings=tuple(dict.fromkeys((*before.warnings, *left))))
    if not kept:
        return now
    fields: dict[str, Any] = {_RESULT_FIELDS[mode]: getattr(before, _RESULT_FIELDS[mode]) for mode in kept}
    if "evaluate" in kept:
        fields["images_digest"] = before.images_digest
        if now.state == "done" and before.evaluation is not None and before.evaluation.passed is False:
            fields |= {"state": "failed", "reason": before.reason, "exit_code": before.exit_code}
    if now.engine is None:  # failed before the build
        fields |= {name: getattr(before, name) for name in _ENGINE_FIELDS}
    steps = tuple(step for step in before.steps if step.name in ({"profile"} if PROFILE_MODES & kept else set()) | kept)
    again = {*now.spec.modes, *before.spec.skipped_modes, *({"profile"} if PROFILE_MODES & {*now.spec.modes} else ())}
    old = [text for text in before.warnings if text.partition(" was left out: ")[0] not in again]
    return replace(
        now,
        spec=effective_spec(before, now.spec),
        requested_batch=before.requested_batch,
        steps=(*steps, *now.steps),
        seconds=round(sum(step.seconds for step in steps) + now.seconds, 3),
        files={**before.files, **now.files},
        open_commands={**before.open_commands, **now.open_commands},
        warnings=tuple(dict.fromkeys((*old, *now.warnings))),
        **fields,
    )


def effective_spec(before: CellResult, spec: CellSpec) -> CellSpec:
    """Spec of a merged result: the modes of `spec` and the retained modes of `before`."""
    kept = retained(before, spec.modes)
    own = {name for mode in kept for name in MODE_SETTINGS[mode]}
    return replace(
        spec,
        modes=tuple(mode for mode in MODES if mode in ("build", *kept, *spec.modes)),
        mode_digests={mode: before.spec.mode_digests[mode] for mode in kept} | spec.mode_digests,
        settings=spec.settings | {name: value for name, value in before.spec.settings.items() if name in own},
    )
