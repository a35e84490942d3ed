"""Build the report of a run: content, order and numbers.

Text from records is cleaned once (`clean`); each output format escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trt_engine.benchmark.stability import advice
from trt_engine.format import join_names
from trt_engine.reporting import bench, compare, loadtest, profile, size, streams, sweep
from trt_engine.reporting.context import ReportContext
from trt_engine.reporting.document import Commands, KeyFigure, Links, Notice, ReportDocument, Section, clean
from trt_engine.reporting.run_records import RECORD_FILES, RunRecords
from trt_engine.reporting.speedup import speedups_section
from trt_engine.reporting.tables import flatten_warning, format_time, group_by, plural, to_sentence, warning_summary
from trt_engine.run_folder import PLAN, REPORT

_MAX_FILES = 60  # rows in the list of files
_MAX_OPEN_COMMANDS = 12
_ADVICE_SUMMARY = "advice"
"""Summary of a notice that advises on a warning and is not counted."""
_MAX_SUMMARIES = 6  # warnings named in the summary of all
_REPORTS = ("report.md", "report.html", "report.txt", REPORT)


def page_warnings(run: RunRecords) -> tuple[str, ...]:
    """What was skipped, the warnings of the run, and those that the page gives beside them."""
    known = (*run.skipped, *run.warnings)
    sentences = {to_sentence(flatten_warning(text)) for text in known}
    page = (notice.text for notice in _notices(ReportContext(run)) if notice.kind == "warning")
    return (*known, *dict.fromkeys(text for text in page if text not in sentences))


def build_document(run: RunRecords, base: Path | None = None) -> ReportDocument:
    """Build the report of a run; links and paths are relative to `base` (default: the run folder)."""
    scene = ReportContext(run, base)
    said = list({notice.text: notice for notice in _notices(scene)}.values())
    version = "" if scene.environment.tool == "unknown" else f" {scene.environment.tool}"
    *others, last = [file.name for file in run.recorded]
    listed = " and ".join(filter(None, [", ".join(others), last]))
    document = ReportDocument(
        title=_title(scene),
        subtitle=_subtitle(scene),
        device=scene.device_line(),
        figures=tuple(_key_figures(scene)),
        claim=size.explain_count(scene) or compare.summarize(run.comparison) or compare.summarize_upgrade(run.upgrade),
        notices=tuple(_leading_notices(said)),
        sections=tuple(_with_warnings([one for one in _sections(scene) if one is not None], said)),
        footer=f"Written by trt-engine{version} from {listed}. "
        f"Every number follows from the samples and settings recorded there.",
    )
    cleaned: ReportDocument = clean(document)
    return cleaned


def _leading_notices(notices: Sequence[Notice]) -> Iterator[Notice]:
    """Notices before the first figure: information, and one summary of all warnings."""
    warnings = [notice for notice in notices if notice.kind == "warning"]
    yield from (notice for notice in notices if notice.kind != "warning")
    if len(warnings) == 1:
        yield warnings[0]
    elif warnings:
        counted = [notice for notice in warnings if notice.summary != _ADVICE_SUMMARY]
        named = "; ".join(_first_summaries(counted))
        yield Notice(f"{plural(len(counted), 'warning')}, explained under “Warnings”: {named}.")


def _first_summaries(warnings: Sequence[Notice]) -> list[str]:
    """The first summaries of the warnings, those that differ only in numbers merged."""
    said = [notice.summary or warning_summary(notice.text) for notice in warnings]
    alike = group_by(said, lambda text: re.sub(r"\d+", "#", text)).values()
    named = [first + (f" and {len(more)} more alike" if more else "") for first, *more in alike]
    left = len(named) - _MAX_SUMMARIES
    return [*named[:_MAX_SUMMARIES], *([f"and {left} more"] if left > 0 else [])]


def _with_warnings(sections: list[Section], notices: Sequence[Notice]) -> list[Section]:
    """Add a section with all warnings after the first section with a chart."""
    warnings = tuple(notice for notice in notices if notice.kind == "warning")
    if len(warnings) < 2:
        return sections
    charted = (place for place, one in enumerate(sections, 1) if any(isinstance(block, tuple) for block in one.blocks))
    place = next(charted, 1)
    return [*sections[:place], Section("warnings", "Warnings", warnings), *sections[place:]]


def _sections(context: ReportContext) -> Iterator[Section | None]:
    """The sections in order: results, explanations, failures, measurement conditions."""
    run, named = context.run, profile.named_profiles(context)
    inside = (profile.layers_section(named), profile.kernels_section(named))
    if run.cells:
        yield sweep.cells_section(context)
        yield speedups_section(context.speedups)
        yield sweep.failures_section(context)
        yield sweep.throughput_section(context)
        yield sweep.accuracy_section(context)
    if run.loads:
        yield loadtest.load_section(run.loads)
        yield loadtest.load_charts_section(run.loads)
    if run.comparison is not None:
        yield compare.compare_section(context, run.comparison)
        yield compare.structure_section(run.comparison.comparisons)
    if run.upgrade is not None:
        yield compare.upgrade_section(run.upgrade)
        yield compare.structure_section([item.comparison for item in run.upgrade.items])
    if not run.cells:  # the main content of a profile
        yield from inside
    yield profile.bottleneck_section(named)
    yield profile.breakdown_section(named)
    if run.size is not None:
        yield size.measurements_section(context, run.size)
    elif run.measurements:
        yield bench.measurements_section(context, run.measurements)
    yield bench.distribution_section(context)
    if run.cells:
        yield from reversed(inside)
    yield profile.instruments_section(context, named)
    if run.size is not None:
        yield streams.cameras_section(run.size)
        yield streams.streams_section(run.size)
        yield size.cliffs_section(run.size)
        yield size.nvinfer_section(run.size)
        yield size.steps_section(run.size)
        yield size.checks_section(run.size)
    yield bench.protocol_section(context)
    yield bench.environment_section(context)
    yield bench.runtime_section(context)
    yield sweep.images_section(context)
    yield bench.repeat_section(context)
    yield _files_section(context)


# ------------------------------------------------------------------------------------------------ the first screen


def _title(context: ReportContext) -> str:
    run = context.run
    if run.size is not None:
        return run.size.model_name or Path(run.size.model).name or run.size.model
    if run.manifest is not None:
        return run.manifest.title or run.manifest.name
    if run.cells:
        return run.folder.name
    if run.comparison is not None and run.comparison.sides:
        base, *others = (side.label for side in run.comparison.sides)
        return f"{join_names(others, 3)} against {base}" if others else base
    if run.upgrade is not None:
        return f"{run.upgrade.new} against {run.upgrade.old}"
    if run.measurements:
        names = list(dict.fromkeys(Path(record.engine).name or record.engine for record in run.measurements))
        return names[0] if len(names) == 1 else f"{len(names)} engines"
    if run.profile is not None:
        return Path(run.profile.engine).name or run.profile.model
    return run.loads[-1].model if run.loads else run.folder.name


def _subtitle(context: ReportContext) -> str:
    run = context.run
    holds = [
        ("stream count", run.size is not None),
        ("run of " + plural(len(run.cells), "cell"), bool(run.cells) or run.manifest is not None),
        ("comparison", run.comparison is not None),
        ("upgrade check", run.upgrade is not None),
        ("profile", run.profile is not None),
        ("measurements", bool(run.measurements) and run.size is None),
        ("load test", bool(run.loads)),
    ]
    backends = context.backends
    dated = (*context.records, run.manifest, run.profile, run.comparison, run.upgrade, *run.loads)
    started = min((one.started for one in dated if one is not None and one.started), default="")
    parts = (
        " and ".join(word for word, there in holds if there),
        f"backend{'' if len(backends) == 1 else 's'} {', '.join(backends)}" if backends else "",
        run.size.precision.upper() if run.size is not None else "",
        format_time(started),
    )
    return " · ".join(filter(None, parts))


def _key_figures(context: ReportContext) -> Iterator[KeyFigure]:
    run = context.run
    if run.size is not None:
        yield from size.key_figures(context, run.size)
    elif run.cells:
        yield from sweep.key_figures(context)
    elif run.comparison is not None and run.comparison.comparisons:
        yield from compare.key_figures(run.comparison)
    elif run.upgrade is not None:
        yield from compare.upgrade_figures(run.upgrade)
    elif run.profile is not None and len(run.measurements) <= 1:  # the one is the profile's own
        yield from profile.key_figures(run.profile)
        if run.measurements:
            yield bench.best_throughput(run.measurements)
    elif run.measurements:
        yield from bench.key_figures(run.measurements)
    elif run.loads:
        yield from loadtest.key_figures(run.loads)


def _notices(context: ReportContext) -> Iterator[Notice]:
    run = context.run
    yield from loadtest.notices(run.loads)
    if context.only_loads:
        pass
    elif not context.on_gpu:
        where = "a CPU" if context.devices == ["cpu"] else f"{', '.join(context.devices)}, which is not a GPU"
        yield Notice(f"Measured on {where}. This report contains no GPU figures.", "info")
    elif "cpu" in context.devices:
        yield Notice("Some measurements ran on a CPU and are not GPU figures; the tables show which.", "info")
    if not run.complete:
        ended = run.size.error if run.size is not None and run.size.error else "the run was interrupted"
        yield Notice(f"Incomplete: {ended}. What had been measured until then stands below.")
    for reason in run.skipped:
        yield Notice(to_sentence(reason))
    if run.size is not None:
        yield from size.notices(run.size)
    if run.cells:
        yield from sweep.notices(context)
    if run.comparison is not None:
        yield from compare.notices(run.comparison)
    yield from profile.notices(profile.named_profiles(context))
    for result in (*(size.merge_results(run.size) if run.size else ()), *run.measurements):
        if not result.stable or result.instability:
            yield Notice(f"Not stable, batch {result.batch}: {sweep.instability_text(result)}")
    moved = next((record for record in context.records if record.instability), None)
    how = f"for a stable measurement: {advice(moved)}" if moved is not None else ""
    if how:
        yield Notice(to_sentence(how), summary=_ADVICE_SUMMARY)
    yield from bench.notices(context)
    known = {other.slowdown_note for other in run.comparison.comparisons} if run.comparison is not None else set()
    known |= {how} | {text for record in context.records for text in (*record.warnings, *record.instability)}
    yield from (Notice(to_sentence(flatten_warning(warning))) for warning in run.warnings if warning not in known)


# ------------------------------------------------------------------------------------------------ files


def _files_section(context: ReportContext) -> Section | None:
    """All known files, each path once, and the commands that open them."""
    run = context.run
    if not (run.size or run.cells or run.profile or run.comparison):
        return None
    rows: dict[str, tuple[str, str, str | None]] = {}
    for name, (shown, link) in (
        *((name, context.display_path(path)) for name, path in _recorded_files(context)),
        *((file.title, context.display_run_path(file.name)) for file in RECORD_FILES if context.has_file(file.name)),
    ):
        if shown != "." and shown.rpartition("/")[2] not in _REPORTS:
            rows.setdefault(shown, (name, shown, link))
    if not rows:
        return None
    lines = [line for _, found, _ in context.profiles for line in found.open_commands.values()]
    lines += [line for cell in run.cells for line in cell.open_commands.values()]
    opens = dict.fromkeys(map(context.localize_command, lines))
    more = len(rows) - _MAX_FILES
    links = [
        *list(rows.values())[:_MAX_FILES],
        *([(f"and {more} more", "in the run's folder", None)] if more > 0 else []),
    ]
    commands = (Commands(tuple(opens)[:_MAX_OPEN_COMMANDS]),) if opens else ()
    return Section("artifacts", "Files", (Links(tuple(links)), *commands))


def _recorded_files(context: ReportContext) -> Iterator[tuple[str, str]]:
    """Description and recorded path of each file."""
    run = context.run
    if run.size is not None:
        yield ("model", run.size.model)
        if run.size.engine:
            yield ("engine", run.size.engine)
        for name, path in run.size.artifacts.items():
            if name not in ("model", "engine"):
                yield (name.replace("_", " "), path)
    if context.has_file(PLAN):
        yield ("plan", PLAN)
    for cell in run.cells:
        if cell.engine:
            yield (f"engine, {cell.spec.label}", cell.engine)
        for name, path in cell.files.items():
            yield (f"{name}, {cell.spec.label}", path)
    for label, found, owner in context.profiles:
        for name, path in found.files.items():
            yield (name + (f", {label}" if owner is not None else ""), path)
    if run.comparison is not None and run.comparison.baseline:
        yield ("baseline", run.comparison.baseline)
