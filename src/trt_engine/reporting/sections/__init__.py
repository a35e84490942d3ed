"""A run turned into the contents of its report: what is said, in which order, with which numbers.

Text from records is cleaned here (`clean`); each form escapes it in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trt_engine.reporting.contents import Commands, Contents, Figure, Links, Notice, Section, clean
from trt_engine.reporting.run import Run
from trt_engine.reporting.sections import compare, matrix, measured, profile, size
from trt_engine.reporting.sections.parts import moment, one_line, plural, sentence
from trt_engine.reporting.sections.scene import Scene
from trt_engine.runfiles import CELLS, COMPARE, PLAN, PROFILE, RECORDS, REPORT, RUN, SIZE

__all__ = ["contents_of"]

_FILES = 60  # rows in the list of files
_OPENS = 12
_REPORTS = ("report.md", "report.html", "report.txt", REPORT)


def contents_of(run: Run, base: Path | None = None) -> Contents:
    """The report of a run; links and paths lead from `base` (the run's folder, unless the report goes elsewhere)."""
    scene = Scene(run, base)
    files = (
        (SIZE, run.size),
        (RUN, run.manifest),
        (CELLS, run.cells),
        (RECORDS, run.measurements),
        (PROFILE, run.profile),
        (COMPARE, run.comparison),
    )
    sources = [name for name, there in files if there]
    listed = " and ".join(filter(None, [", ".join(sources[:-1]), sources[-1]]))
    return Contents(
        title=_title(scene),
        subtitle=_subtitle(scene),
        device=scene.device_line(),
        figures=tuple(_figures(scene)),
        claim=size.claim(scene),
        notices=tuple(_notices(scene)),
        sections=tuple(section for section in _sections(scene) if section is not None),
        footer=f"Written by trt-engine{_version(scene)} from {listed}. "
        f"Every number follows from the samples and settings recorded there.",
    )


def _version(scene: Scene) -> str:
    tool = clean(scene.environment.tool)
    return "" if tool == "unknown" else f" {tool}"


def _sections(scene: Scene) -> Iterator[Section | None]:
    """In the order of reading: what came out, why, what went wrong, and how it was measured."""
    run, named = scene.run, profile.profiled(scene)
    if run.cells:
        yield matrix.cells(scene)
        yield matrix.speedups(scene)
        yield matrix.failures(scene)
        yield matrix.throughput(scene)
        yield matrix.accuracy(scene)
    if run.comparison is not None:
        yield compare.compared(scene, run.comparison)
        yield compare.structure(run.comparison)
    yield profile.verdicts(named)
    yield profile.breakdown(named)
    if run.size is not None:
        yield size.measurements(scene, run.size)
    elif run.measurements:
        yield measured.benched(scene, run.measurements)
    yield measured.distribution(scene)
    yield profile.kernels(named)
    yield profile.layers(named)
    yield profile.rungs(scene, named)
    if run.size is not None:
        yield size.cliffs(run.size)
        yield size.following(scene, run.size)
        yield size.steps(run.size)
        yield size.findings(run.size)
    yield measured.protocols(scene)
    yield measured.environment(scene)
    yield measured.what_ran(scene)
    yield matrix.images(scene)
    yield measured.repeat(scene)
    yield _artifacts(scene)


# ------------------------------------------------------------------------------------------------ the first screen


def _title(scene: Scene) -> str:
    run = scene.run
    if run.size is not None:
        return clean(run.size.model_name or Path(run.size.model).name or run.size.model)
    if run.manifest is not None:
        return clean(run.manifest.title or run.manifest.name)
    if run.cells:
        return clean(run.folder.name)
    if run.comparison is not None and run.comparison.sides:
        base, *others = (side.label for side in run.comparison.sides)
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        return clean(f"{shown} against {base}" if others else base)
    if run.measurements:
        names = list(dict.fromkeys(Path(record.engine).name or record.engine for record in run.measurements))
        return clean(names[0]) if len(names) == 1 else f"{len(names)} engines"
    if run.profile is not None:
        return clean(Path(run.profile.engine).name or run.profile.model)
    return clean(run.folder.name)


def _subtitle(scene: Scene) -> str:
    run = scene.run
    holds = [
        ("stream count", run.size is not None),
        ("run of " + plural(len(run.cells), "cell"), bool(run.cells) or run.manifest is not None),
        ("comparison", run.comparison is not None),
        ("profile", run.profile is not None),
        ("measurements", bool(run.measurements) and run.size is None),
    ]
    parts = [" and ".join(word for word, there in holds if there)]
    backends = scene.backends
    if backends:
        parts.append(f"backend{'' if len(backends) == 1 else 's'} {', '.join(backends)}")
    if run.size is not None:
        parts.append(run.size.precision.upper())
    started = [record.started for record in scene.records if record.started]
    started += [run.manifest.started] if run.manifest is not None else []
    started += [found.started for found in (run.profile, run.comparison) if found is not None and found.started]
    if started:
        parts.append(moment(min(started)))
    return clean(" · ".join(parts))


def _figures(scene: Scene) -> Iterator[Figure]:
    run = scene.run
    if run.size is not None:
        yield from size.figures(scene, run.size)
    elif run.cells:
        yield from matrix.figures(scene)
    elif run.comparison is not None and run.comparison.against:
        yield from compare.figures(run.comparison)
    elif run.profile is not None and len(run.measurements) <= 1:  # the one is the profile's own
        yield from profile.figures(run.profile)
        if run.measurements:
            yield measured.best(run.measurements)
    elif run.measurements:
        yield from measured.figures(run.measurements)


def _notices(scene: Scene) -> Iterator[Notice]:
    told = list(_said(scene))
    for index, notice in enumerate(told):
        if not any(notice.text == other.text for other in told[:index]):
            yield notice


def _said(scene: Scene) -> Iterator[Notice]:
    run = scene.run
    if scene.devices == ["cpu"]:
        yield Notice("Measured on a CPU. Nothing in this report is a GPU figure.", "info")
    elif not scene.on_gpu:
        yield Notice(
            clean(f"Measured on {', '.join(scene.devices)}, which is no GPU. Nothing in this report is a GPU figure."),
            "info",
        )
    elif "cpu" in scene.devices:
        yield Notice("Some of this was measured on a CPU and is no GPU figure; the tables say which.", "info")
    if not run.complete:
        ended = run.size.error if run.size is not None and run.size.error else "the run was interrupted"
        yield Notice(clean(f"Incomplete: {ended}. What had been measured until then stands below."))
    for reason in run.skipped:
        yield Notice(clean(sentence(reason)))
    if run.size is not None:
        yield from size.notices(run.size)
    if run.cells:
        yield from matrix.notices(scene)
    if run.comparison is not None:
        yield from compare.notices(run.comparison)
    yield from profile.notices(profile.profiled(scene))
    for result in (*(size.merged(run.size) if run.size else ()), *run.measurements):
        if not result.stable or result.instability:
            reasons = "; ".join(result.instability) or "the samples moved too much to be trusted"
            yield Notice(clean(f"Not stable, batch {result.batch}: {reasons}"))
    yield from measured.notices(scene)
    known = {warning for record in scene.records for warning in record.warnings}
    yield from (Notice(clean(sentence(one_line(warning)))) for warning in run.warnings if warning not in known)


# ------------------------------------------------------------------------------------------------ files


def _artifacts(scene: Scene) -> Section | None:
    """Every file that is known of, each place once, and the commands that open what a browser cannot."""
    run = scene.run
    first: dict[str, tuple[str, str, str | None]] = {}
    for name, path in _named(scene):
        row = (clean(name), *scene.path(path))
        first.setdefault(row[1], row)
    own = {".", *_REPORTS}
    rows = [row for row in first.values() if row[1] not in own and row[1].rpartition("/")[2] not in _REPORTS]
    known = {shown for _, shown, _ in rows}
    for what, name in (
        ("size document", SIZE),
        ("run document", RUN),
        ("cells", CELLS),
        ("samples", RECORDS),
        ("profile document", PROFILE),
        ("compare document", COMPARE),
    ):
        if scene.has(name) and scene.own(name)[0] not in known:
            rows.append((what, *scene.own(name)))
    several = run.size is not None or run.cells or run.profile is not None or run.comparison is not None
    if not rows or not several:
        return None
    lines = [line for _, found, _ in scene.profiles for line in found.opens.values()]
    lines += [line for cell in run.cells for line in cell.opens.values()]
    opens = [clean(scene.relative(line)) for line in lines]
    more = len(rows) - _FILES
    shown = [*rows[:_FILES], *([(f"and {more} more", "in the run's folder", None)] if more > 0 else [])]
    commands = (Commands(tuple(dict.fromkeys(opens))[:_OPENS]),) if opens else ()
    return Section("artifacts", "Files", (Links(tuple(shown)), *commands))


def _named(scene: Scene) -> Iterator[tuple[str, str]]:
    """What each file is, and its path as it was recorded."""
    run = scene.run
    if run.size is not None:
        yield ("model", run.size.model)
        if run.size.engine:
            yield ("engine", run.size.engine)
        for name, path in run.size.artifacts.items():
            if name not in ("model", "engine"):
                yield (name.replace("_", " "), path)
    if scene.has(PLAN):
        yield ("plan", PLAN)
    for cell in run.cells:
        if cell.engine:
            yield (f"engine, {cell.spec.label}", cell.engine)
        for name, path in cell.files.items():
            yield (f"{name}, {cell.spec.label}", path)
    for label, found, owner in scene.profiles:
        for name, path in found.files.items():
            yield (name + (f", {label}" if owner is not None else ""), path)
    if run.comparison is not None and run.comparison.baseline:
        yield ("baseline", run.comparison.baseline)
