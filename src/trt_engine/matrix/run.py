"""`run_plan`: every cell of a plan, one after another, kept as it ends, gone on with after whatever stopped it."""

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
from typing import Any

from trt_engine.cells import (
    CellResult,
    CellSpec,
    PlannedCell,
    RunManifest,
    RunOutlook,
    RunSummary,
    slower_than_float,
)
from trt_engine.config import parse_duration
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, MemoryExhausted, TrtEngineError, UsageError
from trt_engine.figures import figure, in_ms, size
from trt_engine.files import path_of
from trt_engine.matrix import container
from trt_engine.matrix.cells import PLACES, cells_of, chosen, is_place, modes_of
from trt_engine.matrix.child import Ending, in_child
from trt_engine.matrix.parts import described, joined, standing
from trt_engine.matrix.plan import MODES, Plan, read_plan
from trt_engine.matrix.tree import Tree, default_folder, earlier_seconds
from trt_engine.matrix.work import Job, judged, lacking_here, reason_of
from trt_engine.records import MAIN_FIGURE
from trt_engine.reporting.write import write_reports

__all__ = ["exit_code", "outlook", "run_plan", "told_of"]

log = logging.getLogger(__name__)

_SHARED = ("cast", "quantize")
"""Steps whose result all cells of a model, precision and target share: what failed once fails for all of them."""


def run_plan(
    plan: Path | str,
    out: Path | str | None = None,
    *,
    only: Sequence[str] = (),
    modes: Sequence[str] = (),
    fail_fast: bool = False,
    force: bool = False,
    yes: bool = False,
    in_container: str | None = None,
    command: str = "",
    facts: Mapping[str, str] | None = None,
    on_end: Callable[[CellResult], None] | None = None,
) -> RunSummary:
    """Carry out the plan of a YAML file in the folder `out` (default: `runs/YYYYMMDD_HHMMSS`); what became of every cell.

    A cell that fails is in the summary with its reason, and the others go on (`fail_fast` stops there). Started again in the
    same folder it does only what is missing or has changed, and adds other modes to what is there; `force` does again all
    that is asked for. `only` are labels with wildcards, `modes` stand in place of the plan's, `in_container` is an image to
    run in (default: the plan's; `none` for none). Raises `UsageError` for a plan that cannot be meant, naming the place,
    `SetupError` when another run is at work in the folder, and on Ctrl-C `Interrupted`, whose `partial` is the summary.
    """
    only, modes = _texts(only, "`only`"), [word for text in _texts(modes, "`modes`") for word in text.split(",")]
    read = read_plan(plan)
    specs = cells_of(read, modes)
    wanted = {spec.label for spec in chosen(specs, only)}
    folder = path_of(out, "`out`") if out is not None else default_folder()
    tree = Tree.at(folder, yes=yes)
    if (image := _image(read, in_container, facts)) is not None:
        made = container.prepare(read, specs, folder, image, only=only, modes=modes, fail_fast=fail_fast, force=force)
        return container.carry_out(made, specs, tree)
    with tree.alone():
        work = _Run(read, specs, wanted, tree, fail_fast, force, command, dict(facts or {}), modes, on_end)
        return work.done()


def _texts(given: Any, what: str) -> list[str]:
    """One text, or several."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError(
            f"{what} is {given!r}, expected a text or a list of texts", hint='`["digits-*-b8"]`, `["bench"]`'
        )
    return list(texts)


def _image(plan: Plan, named: str | None, facts: Mapping[str, str] | None) -> str | None:
    """The image to run in: the one named, else the plan's; None for `none`, and where we are in it already."""
    if facts or named == "none":
        return None
    return named if named is not None or plan.container is None else plan.container.image


def exit_code(results: Sequence[CellResult]) -> int:
    """0 when every cell is done or was skipped with a reason; the failed cells' own code where they agree, else 1."""
    codes = {result.exit_code or 1 for result in results if result.state == "failed"}
    if any(result.state == "interrupted" for result in results):
        return Interrupted.exit_code
    return 0 if not codes else codes.pop() if len(codes) == 1 else 1


def outlook(
    plan: Path | str,
    out: Path | str | None = None,
    *,
    only: Sequence[str] = (),
    modes: Sequence[str] = (),
    fail_fast: bool = False,
    force: bool = False,
    yes: bool = False,
    in_container: str | None = None,
) -> RunOutlook:
    """What `run_plan` would do with the same arguments. Writes nothing."""
    only, modes = _texts(only, "`only`"), [word for text in _texts(modes, "`modes`") for word in text.split(",")]
    read = read_plan(plan)
    specs = cells_of(read, modes)
    wanted = {spec.label for spec in chosen(specs, only)}
    folder = path_of(out, "`out`") if out is not None else default_folder()
    tree = Tree.at(folder, yes=yes)
    there = tree.results()
    times = _Times(earlier_seconds(folder), there.values())
    image = _image(read, in_container, None)
    cells = []
    for spec in specs:
        before = there.get(spec.label)
        left = tree.missing(before, spec, force=force)
        if spec.label not in wanted:
            cells.append(PlannedCell(spec, "leave", "`--only` leaves it out"))
        elif left is None:
            cells.append(PlannedCell(spec, "keep", "done already"))
        elif (image is None or not left) and (lacking := lacking_here(spec)) is not None:
            cells.append(PlannedCell(spec, "skip", lacking.message))
        else:
            gone = before is not None and tree.lost_engine(before)
            why = _why(before, spec, gone=gone, force=force)
            cells.append(PlannedCell(replace(spec, modes=left), "run", why, times.of(spec)))
    known = [cell.seconds for cell in cells if cell.does == "run"]
    total = sum(one for one in known if one is not None) if all(one is not None for one in known) else None
    line: tuple[str, ...] = ()
    if image is not None:
        line = container.prepare(
            read, specs, folder, image, only=only, modes=modes, fail_fast=fail_fast, force=force, dry_run=True
        ).command
    told = (*_idle_modes([cell.spec for cell in cells if cell.does in ("run", "keep")]), *_not_there(read, cells))
    return RunOutlook(str(folder), str(plan), tuple(cells), total, starts=line, warnings=told)


def _idle_modes(specs: Iterable[CellSpec]) -> Iterator[str]:
    """One sentence for each mode that was asked for by name and has nothing to do in some of these cells."""
    found = Counter((mode, why) for spec in specs for mode, why in spec.left_out.items())
    for (mode, why), count in found.items():
        yield f"`{mode}` is left out of {count} cell{'s' if count > 1 else ''}: {why}"


def _not_there(plan: Plan, cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Files of the cells to be done that are missing: better known now than after hours."""
    todo = [cell.spec for cell in cells if cell.does == "run"]
    named: list[str | None] = [spec.source for spec in todo]
    named += [spec.settings.get(one) for spec in todo for one in PLACES]
    for name in dict.fromkeys(name for name in named if name and is_place(name)):
        if not (plan.folder / name).exists():
            yield f"`{name}` is not there: cells that need it will fail"


def _why(before: CellResult | None, spec: CellSpec, *, gone: bool, force: bool) -> str:
    if before is None:
        return "new"
    if force:
        return "`--force`"
    if before.state != "done":
        return f"was {before.state}"
    if before.spec.digest != spec.digest:
        return "the plan or a file of it has changed"
    if gone:
        return "its engine is gone"
    changed = any(before.spec.parts.get(mode, digest) != digest for mode, digest in spec.parts.items())
    return "the plan or a file of it has changed" if changed else "the rest is there"


# ------------------------------------------------------------------------------------------------ the run


@dataclass
class _Run:
    """A plan on its way through its cells; nobody else is in the folder."""

    plan: Plan
    specs: tuple[CellSpec, ...]
    wanted: set[str]
    tree: Tree
    fail_fast: bool
    force: bool
    command: str
    facts: dict[str, str]
    modes: Sequence[str]
    on_end: Callable[[CellResult], None] | None
    results: dict[str, CellResult] = field(default_factory=dict)
    reused: int = 0
    broken: dict[tuple[str, str, str], CellResult] = field(default_factory=dict)
    """What the first cell of a model and precision said, whose cast or quantisation failed."""
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False

    def done(self) -> RunSummary:
        self.results = {
            label: one for label, one in self.tree.results().items() if label in {s.label for s in self.specs}
        }
        manifest = self._manifest()
        self._compare_machines(manifest)
        self.tree.begin(manifest, self.plan.read.raw, self.command)
        times = _Times(earlier_seconds(self.tree.folder), self.results.values())
        wanted = [spec for spec in self.specs if spec.label in self.wanted]
        todo = [spec for spec in wanted if not self._is_there(spec)]
        for text in _idle_modes(spec for spec in wanted if spec.modes or spec not in todo):
            self._warn(text)
        if (named := self.plan.file.baseline) is not None:  # what others are held against comes first
            todo.sort(key=lambda spec: not fnmatch.fnmatchcase(spec.label, named))
        self.reused = len(wanted) - len(todo)
        if self.reused:
            log.info("%d of %d cells are done already", self.reused, len(self.wanted))
        for number, spec in enumerate(todo, 1):
            left = times.left(todo[number - 1 :])
            log.info("cell %d of %d: %s%s", number, len(todo), spec.label, f" (about {left} left)" if left else "")
            result = self._added(spec, number, len(todo))
            self.results[spec.label] = result
            times.learn(result)
            self._told(result)
            self.tree.keep(result)
            if self.on_end is not None:
                self.on_end(result)
            if self.interrupted or (self.fail_fast and result.state == "failed"):
                break
        self._judge_again()
        summary = self._summary(manifest)
        if self.interrupted:
            again = _again(self.plan.path, self.tree.folder, self.modes, self._only())
            raise Interrupted("interrupted", hint=f"`{again}` goes on", partial=summary)
        return summary

    def _only(self) -> list[str]:
        """Labels for `--only`; none where all cells are wanted."""
        return [] if len(self.wanted) == len(self.specs) else [s.label for s in self.specs if s.label in self.wanted]

    def _is_there(self, spec: CellSpec) -> bool:
        before = self.results.get(spec.label)
        if before is None or self.tree.missing(before, spec, force=self.force) is not None:
            return False
        said = replace(described(before, spec), left_out=before.spec.left_out)
        if before.spec != said and before.asked_batch is None:  # the same work, said in other words: a path, say
            self.results[spec.label] = replace(before, spec=said)
            self.tree.keep(self.results[spec.label])
        return True

    def _manifest(self) -> RunManifest:
        numbers = [parse_device(spec.device)[1] for spec in self.specs if spec.device.startswith("cuda")]
        gpu = numbers[0] if numbers and info.gpus() else None
        baseline = self.plan.file.baseline
        if baseline is not None:
            baseline = next(spec.label for spec in self.specs if fnmatch.fnmatchcase(spec.label, baseline))
        return RunManifest(
            name=self.plan.name,
            plan=self.plan.path.name,
            plan_digest=f"sha256:{hashlib.sha256(self.plan.read.raw).hexdigest()}",
            cells=self.specs,
            modes=modes_of(self.modes or self.plan.file.modes),
            environment=Environment.here(gpu),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            title=self.plan.file.title,
            baseline=baseline,
            container=self.facts,
        )

    def _compare_machines(self, manifest: RunManifest) -> None:
        """Cells that are kept from another machine, or from other versions, are said."""
        now = manifest.environment
        for spec in self.specs:
            before = self.results.get(spec.label)
            record = before.bench if before is not None and before.state == "done" else None
            if record is None or before is None or before.spec.digest != spec.digest:
                continue
            if "bench" not in standing(before, self.tree.missing(before, spec, force=self.force) or ()):
                continue  # it is measured again
            then = record.environment
            other = [name for name in ("cpu", "gpu", "driver", "libraries") if _differs(name, then, now)]
            if other:
                self._warn(
                    f"`{spec.label}` is kept, and was measured elsewhere or with other versions ({', '.join(other)}); "
                    "`--force` measures everything again"
                )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        log.warning("%s", text)

    # -------------------------------------------------------------------------------- one cell

    def _added(self, spec: CellSpec, number: int, count: int) -> CellResult:
        """The cell's result: what was missing, beside what was there."""
        before = self.results.get(spec.label)
        if not spec.modes:
            lacking = lacking_here(spec)
            assert lacking is not None  # nothing to do, and why
            started = datetime.now(UTC).isoformat(timespec="seconds")
            return CellResult(spec, "skipped", reason=reason_of(lacking, self._job(spec)), started=started)
        modes = self.tree.missing(before, spec, force=self.force) or spec.modes
        parts = {mode: digest for mode, digest in spec.parts.items() if mode in modes}
        beside = before is not None and before.spec.digest == spec.digest and bool(standing(before, modes))
        batch = before.spec.batch if before is not None and beside else spec.batch
        earlier = _digest_of_engine(self.tree.folder, before)
        made = self._cell(replace(spec, modes=modes, parts=parts), batch, number, count, halve=not beside)
        result = joined(before, made)
        if beside and before is not None and earlier not in (None, _digest_of_engine(self.tree.folder, made)):
            kept = ", ".join(mode for mode in MODES if mode in standing(before, modes))
            said = f"{kept}: of an earlier build of the engine; `--force` does what is asked for again"
            result = replace(result, warnings=(*result.warnings, said))
        return result

    def _cell(self, spec: CellSpec, batch: int, number: int, count: int, *, halve: bool) -> CellResult:
        """The cell's result at that batch; where memory ran out and `halve` lets it, of half of it."""
        shared = (spec.model, spec.precision, str(spec.settings.get("quantize", {}).get("target")))
        if not spec.own_file and (first := self.broken.get(shared)) is not None:
            return replace(first, spec=spec, steps=(), seconds=0.0, files={}, warnings=())
        asked = batch
        while True:
            try:
                result = in_child(
                    self._job(replace(spec, batch=batch)),
                    timeout_s=self._timeout_s(),
                    on_step=_said(spec.label, number, count),
                )
            except Ending as ending:
                self.interrupted = True
                return _of(spec, ending.result, batch)
            if result.exit_code != MemoryExhausted.exit_code or not halve or batch == 1:
                break
            if spec.settings.get("fixed_batch"):
                break
            log.warning("%s ran out of memory at batch %d; half of it is tried", spec.label, batch)
            batch //= 2
        if result.state == "failed" and result.steps and result.steps[-1].name in _SHARED:
            self.broken[shared] = result
        result = _of(spec, result, batch)
        if batch != asked:
            said = f"out of memory at batch {asked}: {'measured' if result.state == 'done' else 'tried'} at {batch}"
            result = replace(result, asked_batch=asked, warnings=(*result.warnings, said))
        return result

    def _job(self, spec: CellSpec) -> Job:
        against = self._held_against(spec)
        before = self.results.get(against)
        return Job(
            spec=spec,
            base=str(self.plan.folder.absolute()),
            run=str(self.tree.folder.absolute()),
            shown=str(self.tree.folder),
            held_against=against,
            reference=dict(before.evaluated.metrics) if before is not None and before.evaluated is not None else {},
            log_level=log.getEffectiveLevel(),
        )

    def _timeout_s(self) -> float | None:
        return parse_duration(self.plan.file.timeout) if self.plan.file.timeout else None

    def _held_against(self, spec: CellSpec) -> str:
        """The cell whose figures gate this one: the plan's baseline of the same model, or its first cell."""
        if "max_drop" not in spec.settings:
            return ""
        of_model = [one for one in self.specs if one.model == spec.model and "evaluate" in one.modes]
        named = self.plan.file.baseline
        first = next((one for one in of_model if named and fnmatch.fnmatchcase(one.label, named)), of_model[0])
        return "" if first.label == spec.label else first.label

    def _judge_again(self) -> None:
        """Hold what was kept against the baseline's figures of now: those it was judged by may be others, or none."""
        for spec in self.specs:
            before = self.results.get(spec.label)
            if before is None or before.state != "done":
                continue
            job = self._job(spec)
            after, error = judged(before, job.held_against, job.reference)
            if error is not None:
                after = replace(after, state="failed", reason=reason_of(error, job), exit_code=error.exit_code)
                self._told(after)
            if after != before:
                self.results[spec.label] = after
                self.tree.keep(after)

    def _told(self, result: CellResult) -> None:
        label = result.spec.label
        if result.state == "done":
            log.info("%s: %s", label, told_of(result))
            return
        reason, _, hint = (result.reason or "").partition("\nhint: ")
        level = logging.WARNING if result.state == "failed" else logging.INFO
        log.log(level, "%s %s: %s%s", label, result.state, reason, f" ({hint})" if hint else "")

    # -------------------------------------------------------------------------------- the end

    def _summary(self, manifest: RunManifest) -> RunSummary:
        for text in slower_than_float(self.results[spec.label] for spec in self.specs if spec.label in self.results):
            self._warn(text)
        artifacts: dict[str, str] = {}
        try:
            artifacts = {name: str(path) for name, path in write_reports(self.tree.folder).items()}
        except TrtEngineError as error:
            self._warn(f"the report could not be written: {error.message}")
        return self.tree.summary(
            manifest, self.specs, self.results, reused=self.reused, artifacts=artifacts, warnings=self.warnings
        )


def _of(spec: CellSpec, result: CellResult, batch: int) -> CellResult:
    """The result with the plan's spec, so that it is found again; of another batch where that was measured."""
    return replace(result, spec=replace(spec, batch=batch))


def _digest_of_engine(folder: Path, result: CellResult | None) -> str | None:
    """Of the engine that lies there now; None where none does."""
    if result is None or result.engine is None:
        return None
    try:
        return Engine.open(folder / result.engine).passport.payload[0].digest
    except TrtEngineError:  # gone, or damaged
        return None


def _differs(name: str, then: Environment, now: Environment) -> bool:
    before, after = getattr(then, name), getattr(now, name)
    return bool(before is not None and after is not None and before != after)


def _again(plan: Path, folder: Path, modes: Sequence[str], only: Sequence[str]) -> str:
    """The command that does what is missing and nothing else."""
    more = ["--modes", ",".join(modes)] if modes else []
    more += [word for label in only for word in ("--only", label)]
    return shlex.join(["trt-engine", "run", str(plan), "-o", str(folder), *more])


def _said(label: str, number: int, count: int) -> Callable[[str, float], None]:
    def told(step: str, seconds: float) -> None:
        if seconds:
            log.info("cell %d of %d: %s is still at `%s` (%.0f s)", number, count, label, step, seconds)
        else:
            log.debug("%s: %s", label, step)

    return told


def told_of(result: CellResult) -> str:
    """The main figures of a cell that is done, on one line."""
    parts: list[str] = []
    if result.bench is not None and (times := result.bench.compute()) is not None:
        speed = f"{figure(result.bench.images_per_s)} images/s"
        parts.append(f"median {in_ms(times.median)}, p95 {in_ms(times.p95)}, {speed}")
    if result.evaluated is not None:
        main = MAIN_FIGURE[result.evaluated.task]
        if (value := result.evaluated.metrics.get(main)) is not None:
            parts.append(f"{main} {value:.4f}" if value >= 0 else f"{main} -")
    if result.engine_bytes is not None:
        parts.append(size(result.engine_bytes))
    return ", ".join([*parts, f"{result.seconds:.1f} s"])


class _Times:
    """How long cells take, by those that are known: the same label, else the like of it."""

    def __init__(self, earlier: Mapping[str, float], results: Any) -> None:
        self.by_label = dict(earlier)
        self.known: list[tuple[CellSpec, float]] = []
        for result in results:
            self.learn(result)

    def learn(self, result: CellResult) -> None:
        if result.state == "done" and result.seconds:
            self.by_label[result.spec.label] = result.seconds
            self.known.append((result.spec, result.seconds))

    def of(self, spec: CellSpec) -> float | None:
        """Seconds, about; None while nothing like it was done."""
        if spec.label in self.by_label:
            return self.by_label[spec.label]
        for like in self._likes(spec):
            if found := [seconds for one, seconds in self.known if like(one)]:
                return statistics.fmean(found)
        return None

    def _likes(self, spec: CellSpec) -> Iterator[Callable[[CellSpec], bool]]:
        yield lambda one: (one.model, one.backend, one.precision) == (spec.model, spec.backend, spec.precision)
        yield lambda one: (one.model, one.backend) == (spec.model, spec.backend)
        yield lambda one: one.model == spec.model
        yield lambda one: True

    def left(self, specs: Sequence[CellSpec]) -> str:
        """The time the cells take together, in words; nothing while it is not known."""
        found = [self.of(spec) for spec in specs]
        if any(one is None for one in found):
            return ""
        seconds = sum(one for one in found if one is not None)
        return (
            f"{seconds:.0f} s"
            if seconds < 90
            else f"{seconds / 60:.0f} min"
            if seconds < 5400
            else f"{seconds / 3600:.1f} h"
        )
