"""`run`: runs the cells of a plan in sequence, stores each result, and resumes after an interruption."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.atomic_io import as_path
from trt_engine.config.settings import replace_values, to_argv
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, MemoryExhausted, SetupError, TrtEngineError
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records import sweep
from trt_engine.records.sweep import CellResult, RunSummary
from trt_engine.reporting.report import write_reports
from trt_engine.reporting.sweep import cell_summary
from trt_engine.units import parse_duration
from trt_engine.verbs.run import container, sweep_folder
from trt_engine.verbs.run.cell_runner import CellJob, check_accuracy, failure_reason, missing_requirements
from trt_engine.verbs.run.cell_worker import CellInterrupted, run_in_worker
from trt_engine.verbs.run.cells import PATH_SETTINGS, expand, is_path, parse_modes, select
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.run.plan_file import MODES, ParsedPlan, check_trust, read_plan

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import RunSettings

log = logging.getLogger(__name__)

_SHARED_STEPS = ("cast", "quantize")
"""Steps shared by all cells of a model, precision and target: a failure fails all of them."""


@public_function
def run(
    plan: Path | str,
    out: Path | str | None = None,
    *,
    config: RunConfig | None = None,
    overwrite: bool = False,
    command: str = "",
    on_result: Callable[[CellResult], None] = lambda result: None,
    progress: ProgressOption = False,
    **settings: Unpack[RunSettings],
) -> RunSummary:
    """Run the plan of a YAML file in the folder `out` (default: `runs/YYYYMMDD_HHMMSS`); returns the state of every cell.

    A failed cell is in the summary with its reason, and the run continues (`fail_fast` stops it). A run in an existing
    folder runs only missing or changed modes and adds new ones; `rerun` runs all requested modes again. `cells` are label
    globs, `modes` override the plan's, `in_container` is an image to run in (default: the plan's; `none` for none). A plan
    that runs code or accesses paths outside its folders, such as plugins, needs `trust_plan`. Raises `UsageError` with the
    location for an invalid plan, `SetupError` if another run uses the folder, and on Ctrl-C `Interrupted`, whose `partial`
    is the summary.
    """
    chosen = replace_values(config or RunConfig(), settings)
    return execute(prepare(plan, out, chosen, overwrite=overwrite), command=command, on_result=on_result)


@dataclass(frozen=True, slots=True)
class RunJob:
    """The validated inputs of a run."""

    plan: ParsedPlan
    config: RunConfig
    run_folder: sweep_folder.SweepFolder
    specs: tuple[sweep.CellSpec, ...]
    selected: frozenset[str]
    """Labels of the cells to run."""
    trusted: tuple[str, ...]
    container_facts: Mapping[str, str]
    """Inside a container: its image, engine and versions."""

    @property
    def image(self) -> str | None:
        """The image to run in; None for `none` or inside the container."""
        named = self.config.in_container
        if self.container_facts or named == "none":
            return None
        return named if named is not None or self.plan.container is None else self.plan.container.image

    def container_run(self, image: str, *, dry_run: bool = False) -> container.ContainerRun:
        return container.prepare(self.plan, self.specs, self.run_folder.folder, image, self.config, dry_run=dry_run)


def prepare(
    plan: Path | str,
    out: Path | str | None,
    config: RunConfig,
    *,
    overwrite: bool = False,
    container_facts: Mapping[str, str] | None = None,
) -> RunJob:
    """Read the plan and check it, the selection and the folder. Writes nothing."""
    read = read_plan(plan)
    trusted = check_trust(read, trust_plan=config.trust_plan)
    specs = expand(read, config.mode_names())
    return RunJob(
        plan=read,
        config=config,
        run_folder=sweep_folder.SweepFolder.prepare(
            as_path(out, "`out`") if out is not None else sweep_folder.default_folder(), overwrite=overwrite
        ),
        specs=specs,
        selected=frozenset(spec.label for spec in select(specs, config.cells)),
        trusted=trusted,
        container_facts=container_facts or {},
    )


def execute(
    job: RunJob, *, command: str = "", on_result: Callable[[CellResult], None] = lambda result: None
) -> RunSummary:
    """Run the job, here or in its container."""
    if (image := job.image) is not None:
        return container.run_container(job.container_run(image), job.specs, job.run_folder)
    with job.run_folder.lock():
        return _SweepRun(job, command, on_result).execute()


def exit_code(results: Sequence[CellResult]) -> int:
    """0 if every cell is done or skipped, 3 if all are skipped; the code of the failed cells if they agree, else 1."""
    codes = {result.exit_code or 1 for result in results if result.state == "failed"}
    if any(result.state == "interrupted" for result in results):
        return Interrupted.exit_code
    if results and all(result.state == "skipped" for result in results):
        return SetupError.exit_code
    return 0 if not codes else codes.pop() if len(codes) == 1 else 1


def preview(job: RunJob) -> sweep.RunPlan:
    """What `execute` would do. Writes nothing."""
    folder, rerun = job.run_folder, job.config.rerun
    there = folder.read_results()
    times = _DurationEstimator(sweep_folder.earlier_seconds(folder.folder), there.values())
    image = job.image
    planned = []
    for spec in job.specs:
        before = there.get(spec.label)
        left = folder.pending_modes(before, spec, rerun=rerun)
        if spec.label not in job.selected:
            planned.append(sweep.PlannedCell(spec, "leave", "excluded by `--cells`"))
        elif left is None:
            planned.append(sweep.PlannedCell(spec, "keep", "already done"))
        elif (image is None or not left) and (lacking := missing_requirements(spec)) is not None:
            planned.append(sweep.PlannedCell(spec, "skip", lacking.message))
        else:
            gone = before is not None and folder.engine_missing(before)
            why = _run_reason(before, spec, engine_missing=gone, rerun=rerun)
            planned.append(sweep.PlannedCell(replace(spec, modes=left), "run", why, times.estimate(spec)))
    known = [cell.seconds for cell in planned if cell.action == "run"]
    total = sum(one for one in known if one is not None) if all(one is not None for one in known) else None
    warnings = (
        *_skipped_mode_warnings(cell.spec for cell in planned if cell.action in ("run", "keep")),
        *_missing_file_warnings(job.plan, planned),
    )
    line = job.container_run(image, dry_run=True).command if image is not None else ()
    return sweep.RunPlan(
        str(folder.folder), str(job.plan.path), tuple(planned), total, container_command=line, warnings=warnings
    )


def _skipped_mode_warnings(specs: Iterable[sweep.CellSpec]) -> Iterator[str]:
    """A warning for each requested mode that does not apply to some cells."""
    found = Counter((mode, why) for spec in specs for mode, why in spec.skipped_modes.items())
    for (mode, why), count in found.items():
        yield f"`{mode}` is skipped in {count} cell{'s' if count > 1 else ''}: {why}"


def _missing_file_warnings(plan: ParsedPlan, cells: Sequence[sweep.PlannedCell]) -> Iterator[str]:
    """A warning for each missing file of the pending cells."""
    todo = [cell.spec for cell in cells if cell.action == "run"]
    named: list[str | None] = [spec.source for spec in todo]
    named += [spec.settings.get(one) for spec in todo for one in PATH_SETTINGS]
    for name in dict.fromkeys(name for name in named if name and is_path(name)):
        if not (plan.folder / name).exists():
            yield f"`{name}` does not exist: cells that need it will fail"


def _run_reason(before: CellResult | None, spec: sweep.CellSpec, *, engine_missing: bool, rerun: bool) -> str:
    if before is None:
        return "new"
    if rerun:
        return "`--rerun`"
    if before.state != "done":
        return f"was {before.state}"
    if before.spec.digest != spec.digest:
        return "the plan or one of its files has changed"
    if engine_missing:
        return "its engine is missing"
    changed = any(before.spec.mode_digests.get(mode, digest) != digest for mode, digest in spec.mode_digests.items())
    return "the plan or one of its files has changed" if changed else "some modes are missing"


# ------------------------------------------------------------------------------------------------ the run


@dataclass
class _SweepRun:
    """State of a run; the folder is locked."""

    job: RunJob
    command: str
    on_result: Callable[[CellResult], None]
    results: dict[str, CellResult] = field(default_factory=dict)
    reused: int = 0
    failed_variants: dict[tuple[str, str, str], CellResult] = field(default_factory=dict)
    """Result of the first cell of a model and precision whose cast or quantization failed."""
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False

    def execute(self) -> RunSummary:
        self.results = {
            label: one
            for label, one in self.job.run_folder.read_results().items()
            if label in {s.label for s in self.job.specs}
        }
        manifest = self._manifest()
        self._compare_machines(manifest)
        self.job.run_folder.begin(manifest, self.job.plan.yaml.raw, self.command)
        times = _DurationEstimator(sweep_folder.earlier_seconds(self.job.run_folder.folder), self.results.values())
        wanted = [spec for spec in self.job.specs if spec.label in self.job.selected]
        todo = [spec for spec in wanted if not self._is_complete(spec)]
        for text in _skipped_mode_warnings(spec for spec in wanted if spec.modes or spec not in todo):
            self._warn(text)
        if (named := self.job.plan.file.baseline) is not None:  # the baseline runs first
            todo.sort(key=lambda spec: not fnmatch.fnmatchcase(spec.label, named))
        self.reused = len(wanted) - len(todo)
        if self.reused:
            log.info("%d of %d cells are already done", self.reused, len(self.job.selected))
        for number, spec in enumerate(todo, 1):
            left = times.remaining(todo[number - 1 :])
            log.info("cell %d of %d: %s%s", number, len(todo), spec.label, f" (about {left} left)" if left else "")
            result = self._run_pending(spec, number, len(todo))
            self.results[spec.label] = result
            times.add(result)
            self._log_result(result)
            self.job.run_folder.write_result(result)
            self.on_result(result)
            if self.interrupted or (self.job.config.fail_fast and result.state == "failed"):
                break
        self._recheck_accuracy()
        summary = self._summary(manifest)
        if self.interrupted:
            raise Interrupted("interrupted", hint=f"`{self._resume_command()}` resumes the run", partial=summary)
        return summary

    def _resume_command(self) -> str:
        """The command line that resumes the run."""
        job = self.job
        labels = [spec.label for spec in job.specs if spec.label in job.selected]
        config = RunConfig(
            cells=tuple(labels) if len(labels) < len(job.specs) else (),
            modes=(",".join(job.config.mode_names()),) if job.config.modes else (),
            trust_plan=bool(job.trusted),
        )
        return shlex.join(["trt-engine", "run", str(job.plan.path), "-o", str(job.run_folder.folder), *to_argv(config)])

    def _is_complete(self, spec: sweep.CellSpec) -> bool:
        before = self.results.get(spec.label)
        if before is None or self.job.run_folder.pending_modes(before, spec, rerun=self.job.config.rerun) is not None:
            return False
        said = replace(sweep_folder.effective_spec(before, spec), skipped_modes=before.spec.skipped_modes)
        if before.spec != said and before.requested_batch is None:  # same work, for example with another path
            self.results[spec.label] = replace(before, spec=said)
            self.job.run_folder.write_result(self.results[spec.label])
        return True

    def _manifest(self) -> sweep.RunManifest:
        numbers = [parse_device(spec.device)[1] for spec in self.job.specs if spec.device.startswith("cuda")]
        gpu = numbers[0] if numbers and info.gpus() else None
        baseline = self.job.plan.file.baseline
        if baseline is not None:
            baseline = next(spec.label for spec in self.job.specs if fnmatch.fnmatchcase(spec.label, baseline))
        return sweep.RunManifest(
            name=self.job.plan.name,
            plan=self.job.plan.path.name,
            plan_digest=f"sha256:{hashlib.sha256(self.job.plan.yaml.raw).hexdigest()}",
            cells=self.job.specs,
            modes=parse_modes(self.job.config.mode_names() or self.job.plan.file.modes),
            environment=Environment.detect(gpu),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            title=self.job.plan.file.title,
            baseline=baseline,
            container=dict(self.job.container_facts),
            trusted=self.job.trusted,
        )

    def _compare_machines(self, manifest: sweep.RunManifest) -> None:
        """Warn about retained results from another machine or other versions."""
        now = manifest.environment
        for spec in self.job.specs:
            before = self.results.get(spec.label)
            record = before.bench if before is not None and before.state == "done" else None
            if record is None or before is None or before.spec.digest != spec.digest:
                continue
            if "bench" not in sweep_folder.retained(
                before, self.job.run_folder.pending_modes(before, spec, rerun=self.job.config.rerun) or ()
            ):
                continue  # measured again
            then = record.environment
            other = [name for name in ("cpu", "gpu", "driver", "libraries") if _differs(name, then, now)]
            if other:
                self._warn(
                    f"`{spec.label}` was measured on another machine or with other versions ({', '.join(other)}); "
                    "`--rerun` measures everything again"
                )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        log.warning("%s", text)

    # -------------------------------------------------------------------------------- one cell

    def _run_pending(self, spec: sweep.CellSpec, number: int, count: int) -> CellResult:
        """Run the missing modes; the result merged with the retained one."""
        before = self.results.get(spec.label)
        if not spec.modes:
            lacking = missing_requirements(spec)
            assert lacking is not None  # no applicable mode
            started = datetime.now(UTC).isoformat(timespec="seconds")
            return CellResult(spec, "skipped", reason=failure_reason(lacking, self._job(spec)), started=started)
        modes = self.job.run_folder.pending_modes(before, spec, rerun=self.job.config.rerun) or spec.modes
        parts = {mode: digest for mode, digest in spec.mode_digests.items() if mode in modes}
        beside = before is not None and before.spec.digest == spec.digest and bool(sweep_folder.retained(before, modes))
        batch = before.spec.batch if before is not None and beside else spec.batch
        earlier = _engine_digest(self.job.run_folder.folder, before)
        made = self._run_cell(replace(spec, modes=modes, mode_digests=parts), batch, number, count, halve=not beside)
        result = sweep_folder.merge(before, made)
        if beside and before is not None and earlier not in (None, _engine_digest(self.job.run_folder.folder, made)):
            kept = ", ".join(mode for mode in MODES if mode in sweep_folder.retained(before, modes))
            said = f"{kept}: measured with an earlier build of the engine; `--rerun` runs all requested modes again"
            result = replace(result, warnings=(*result.warnings, said))
        return result

    def _run_cell(self, spec: sweep.CellSpec, batch: int, number: int, count: int, *, halve: bool) -> CellResult:
        """Run the cell at `batch`; with `halve`, out of memory retries at half the batch."""
        shared = (spec.model, spec.precision, str(spec.settings.get("quantize", {}).get("target")))
        if not spec.prequantized and (first := self.failed_variants.get(shared)) is not None:
            return replace(first, spec=spec, steps=(), seconds=0.0, files={}, warnings=())
        asked = batch
        while True:
            try:
                result = run_in_worker(
                    self._job(replace(spec, batch=batch)),
                    timeout_s=parse_duration(timeout) if (timeout := self.job.plan.file.timeout) else None,
                    on_step=_step_logger(spec.label, number, count),
                )
            except CellInterrupted as ending:
                self.interrupted = True
                return _with_spec(spec, ending.result, batch)
            if result.exit_code != MemoryExhausted.exit_code or not halve or batch == 1:
                break
            if spec.settings.get("fixed_batch"):
                break
            log.warning("%s ran out of memory at batch %d; trying batch %d", spec.label, batch, batch // 2)
            batch //= 2
        if result.state == "failed" and result.steps and result.steps[-1].name in _SHARED_STEPS:
            self.failed_variants[shared] = result
        result = _with_spec(spec, result, batch)
        if batch != asked:
            said = f"out of memory at batch {asked}: {'measured' if result.state == 'done' else 'tried'} at {batch}"
            result = replace(result, requested_batch=asked, warnings=(*result.warnings, said))
        return result

    def _job(self, spec: sweep.CellSpec) -> CellJob:
        against = self._baseline_label(spec)
        before = self.results.get(against)
        return CellJob(
            spec=spec,
            plan_folder=str(self.job.plan.folder.absolute()),
            run_folder=str(self.job.run_folder.folder.absolute()),
            display_folder=str(self.job.run_folder.folder),
            baseline=against,
            baseline_metrics=dict(before.evaluation.metrics)
            if before is not None and before.evaluation is not None
            else {},
            log_level=log.getEffectiveLevel(),
        )

    def _baseline_label(self, spec: sweep.CellSpec) -> str:
        """Label of the baseline cell for `max_drop`: the plan's baseline for this model, or its first cell."""
        if "max_drop" not in spec.settings:
            return ""
        of_model = [one for one in self.job.specs if one.model == spec.model and "evaluate" in one.modes]
        named = self.job.plan.file.baseline
        first = next((one for one in of_model if named and fnmatch.fnmatchcase(one.label, named)), of_model[0])
        return "" if first.label == spec.label else first.label

    def _recheck_accuracy(self) -> None:
        """Check retained results against the current baseline metrics."""
        for spec in self.job.specs:
            before = self.results.get(spec.label)
            if before is None or before.state != "done":
                continue
            job = self._job(spec)
            after, error = check_accuracy(before, job.baseline, job.baseline_metrics)
            if error is not None:
                after = replace(after, state="failed", reason=failure_reason(error, job), exit_code=error.exit_code)
                self._log_result(after)
            if after != before:
                self.results[spec.label] = after
                self.job.run_folder.write_result(after)

    def _log_result(self, result: CellResult) -> None:
        label = result.spec.label
        if result.state == "done":
            log.info("%s: %s", label, cell_summary(result))
            return
        reason, _, hint = (result.reason or "").partition("\nhint: ")
        level = logging.WARNING if result.state == "failed" else logging.INFO
        log.log(level, "%s %s: %s%s", label, result.state, reason, f" ({hint})" if hint else "")

    # -------------------------------------------------------------------------------- the end

    def _summary(self, manifest: sweep.RunManifest) -> RunSummary:
        for text in sweep.quantized_slowdowns(
            self.results[spec.label] for spec in self.job.specs if spec.label in self.results
        ):
            self._warn(text)
        artifacts: dict[str, str] = {}
        try:
            artifacts = {name: str(path) for name, path in write_reports(self.job.run_folder.folder).items()}
        except TrtEngineError as error:
            self._warn(f"the report could not be written: {error.message}")
        return self.job.run_folder.summarize(
            manifest, self.job.specs, self.results, reused=self.reused, artifacts=artifacts, warnings=self.warnings
        )


def _with_spec(spec: sweep.CellSpec, result: CellResult, batch: int) -> CellResult:
    """The result with the plan's spec and the measured batch."""
    return replace(result, spec=replace(spec, batch=batch))


def _engine_digest(folder: Path, result: CellResult | None) -> str | None:
    """Digest of the engine in the folder; None if missing."""
    if result is None or result.engine is None:
        return None
    try:
        return Engine.open(folder / result.engine).passport.payload[0].digest
    except TrtEngineError:  # missing or damaged
        return None


def _differs(name: str, then: Environment, now: Environment) -> bool:
    before, after = getattr(then, name), getattr(now, name)
    return bool(before is not None and after is not None and before != after)


def _step_logger(label: str, number: int, count: int) -> Callable[[str, float], None]:
    def stated(step: str, seconds: float) -> None:
        if seconds:
            log.info("cell %d of %d: %s is still in step `%s` (%.0f s)", number, count, label, step, seconds)
        else:
            log.debug("%s: %s", label, step)

    return stated


class _DurationEstimator:
    """Estimates cell durations from earlier results of the same label, else of similar cells."""

    def __init__(self, earlier: Mapping[str, float], results: Any) -> None:
        self.by_label = dict(earlier)
        self.known: list[tuple[sweep.CellSpec, float]] = []
        for result in results:
            self.add(result)

    def add(self, result: CellResult) -> None:
        if result.state == "done" and result.seconds:
            self.by_label[result.spec.label] = result.seconds
            self.known.append((result.spec, result.seconds))

    def estimate(self, spec: sweep.CellSpec) -> float | None:
        """Estimated seconds; None without a similar result."""
        if spec.label in self.by_label:
            return self.by_label[spec.label]
        for names in (("model", "backend", "precision"), ("model", "backend"), ("model",), ()):
            if found := [
                s for one, s in self.known if all(getattr(one, name) == getattr(spec, name) for name in names)
            ]:
                return statistics.fmean(found)
        return None

    def remaining(self, specs: Sequence[sweep.CellSpec]) -> str:
        """Estimated total time as text; empty if unknown."""
        found = [self.estimate(spec) for spec in specs]
        if any(one is None for one in found):
            return ""
        seconds = sum(one for one in found if one is not None)
        if seconds < 90:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
