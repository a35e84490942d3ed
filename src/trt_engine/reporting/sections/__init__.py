"""Build the report of a run: content, order and numbers.

Text from records is cleaned once (`clean`); each output format escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trt_engine.benchmark.stability import advice
from trt_engine.format import join_names
from trt_engine.reporting.document import Commands, KeyFigure, Links, Notice, ReportDocument, Section, clean
from trt_engine.reporting.run_records import RunRecords
from trt_engine.reporting.sections import (
    bench_sections,
    compare_sections,
    loadtest_sections,
    profile_sections,
    size_sections,
    speedup_section,
    stream_sections,
    sweep_sections,
    upgrade_sections,
)
from trt_engine.reporting.sections.report_context import ReportContext
from trt_engine.reporting.sections.section_helpers import (
    flatten_warning,
    format_time,
    group_by,
    pluralize,
    to_sentence,
    warning_summary,
)
from trt_engine.run_folder import CELLS, COMPARE, LOADTEST, PLAN, PROFILE, RECORDS, REPORT, RUN, SIZE, UPGRADE

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
    files = (
        (SIZE, run.size),
        (RUN, run.manifest),
        (CELLS, run.cells),
        (RECORDS, run.measurements),
        (PROFILE, run.profile),
        (COMPARE, run.comparison),
        (UPGRADE, run.upgrade),
        (LOADTEST, run.loads),
    )
    said = list({notice.text: notice for notice in _notices(scene)}.values())
    version = "" if scene.environment.tool == "unknown" else f" {scene.environment.tool}"
    sources = [name for name, there in files if there]
    listed = " and ".join(filter(None, [", ".join(sources[:-1]), sources[-1]]))
    document = ReportDocument(
        title=_title(scene),
        subtitle=_subtitle(scene),
        device=scene.device_line(),
        figures=tuple(_key_figures(scene)),
        claim=size_sections.explain_count(scene)
        or compare_sections.summarize(scene.run.comparison)
        or upgrade_sections.summarize(scene.run.upgrade),
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
        named = list(_warning_summaries(counted))
        more = f"; and {len(named) - _MAX_SUMMARIES} more" if len(named) > _MAX_SUMMARIES else ""
        yield Notice(
            f"{pluralize(len(counted), 'warning')}, explained under “Warnings”: {'; '.join(named[:_MAX_SUMMARIES])}{more}."
        )


def _warning_summaries(warnings: Sequence[Notice]) -> Iterator[str]:
    """Summaries of the warnings, merging those that differ only in numbers."""
    said = [notice.summary or warning_summary(notice.text) for notice in warnings]
    alike = group_by(said, lambda text: re.sub(r"\d+", "#", text))
    for first, *more in alike.values():
        yield first + (f" and {len(more)} more alike" if more else "")


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
    run, named = context.run, profile_sections.named_profiles(context)
    if run.cells:
        yield sweep_sections.cells_section(context)
        yield speedup_section.speedups_section(context)
        yield sweep_sections.failures_section(context)
        yield sweep_sections.throughput_section(context)
        yield sweep_sections.accuracy_section(context)
    if run.loads:
        yield loadtest_sections.load_section(run.loads)
        yield loadtest_sections.load_charts_section(run.loads)
    if run.comparison is not None:
        yield compare_sections.compare_section(context, run.comparison)
        yield compare_sections.structure_section(run.comparison.comparisons)
    if run.upgrade is not None:
        yield upgrade_sections.upgrade_section(run.upgrade)
        yield compare_sections.structure_section([item.comparison for item in run.upgrade.items])
    if not run.cells:  # the main content of a profile
        yield profile_sections.layers_section(named)
        yield profile_sections.kernels_section(named)
    yield profile_sections.bottleneck_section(named)
    yield profile_sections.breakdown_section(named)
    if run.size is not None:
        yield size_sections.measurements_section(context, run.size)
    elif run.measurements:
        yield bench_sections.measurements_section(context, run.measurements)
    yield bench_sections.distribution_section(context)
    if run.cells:
        yield profile_sections.kernels_section(named)
        yield profile_sections.layers_section(named)
    yield profile_sections.instruments_section(context, named)
    if run.size is not None:
        yield stream_sections.streams_section(run.size)
        yield size_sections.cliffs_section(run.size)
        yield size_sections.nvinfer_section(run.size)
        yield size_sections.steps_section(run.size)
        yield size_sections.checks_section(run.size)
    yield bench_sections.protocol_section(context)
    yield bench_sections.environment_section(context)
    yield bench_sections.runtime_section(context)
    yield sweep_sections.images_section(context)
    yield bench_sections.repeat_section(context)
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
    if run.loads:
        return run.loads[-1].model
    return run.folder.name


def _subtitle(context: ReportContext) -> str:
    run = context.run
    holds = [
        ("stream count", run.size is not None),
        ("run of " + pluralize(len(run.cells), "cell"), bool(run.cells) or run.manifest is not None),
        ("comparison", run.comparison is not None),
        ("upgrade check", run.upgrade is not None),
        ("profile", run.profile is not None),
        ("measurements", bool(run.measurements) and run.size is None),
        ("load test", bool(run.loads)),
    ]
    parts = [" and ".join(word for word, there in holds if there)]
    backends = context.backends
    if backends:
        parts.append(f"backend{'' if len(backends) == 1 else 's'} {', '.join(backends)}")
    if run.size is not None:
        parts.append(run.size.precision.upper())
    started = [record.started for record in context.records if record.started]
    started += [run.manifest.started] if run.manifest is not None else []
    started += [
        found.started
        for found in (run.profile, run.comparison, run.upgrade, *run.loads)
        if found is not None and found.started
    ]
    if started:
        parts.append(format_time(min(started)))
    return " · ".join(parts)


def _key_figures(context: ReportContext) -> Iterator[KeyFigure]:
    run = context.run
    if run.size is not None:
        yield from size_sections.key_figures(context, run.size)
    elif run.cells:
        yield from sweep_sections.key_figures(context)
    elif run.comparison is not None and run.comparison.comparisons:
        yield from compare_sections.key_figures(run.comparison)
    elif run.upgrade is not None:
        yield from upgrade_sections.key_figures(run.upgrade)
    elif run.profile is not None and len(run.measurements) <= 1:  # the one is the profile's own
        yield from profile_sections.key_figures(run.profile)
        if run.measurements:
            yield bench_sections.best_throughput(run.measurements)
    elif run.measurements:
        yield from bench_sections.key_figures(run.measurements)
    elif run.loads:
        yield from loadtest_sections.key_figures(run.loads)


def _notices(context: ReportContext) -> Iterator[Notice]:
    run = context.run
    yield from loadtest_sections.notices(run.loads)
    if context.only_loads:
        pass
    elif context.devices == ["cpu"]:
        yield Notice("Measured on a CPU. This report contains no GPU figures.", "info")
    elif not context.on_gpu:
        where = ", ".join(context.devices)
        yield Notice(f"Measured on {where}, which is not a GPU. This report contains no GPU figures.", "info")
    elif "cpu" in context.devices:
        yield Notice("Some measurements ran on a CPU and are not GPU figures; the tables show which.", "info")
    if not run.complete:
        ended = run.size.error if run.size is not None and run.size.error else "the run was interrupted"
        yield Notice(f"Incomplete: {ended}. What had been measured until then stands below.")
    for reason in run.skipped:
        yield Notice(to_sentence(reason))
    if run.size is not None:
        yield from size_sections.notices(run.size)
    if run.cells:
        yield from sweep_sections.notices(context)
    if run.comparison is not None:
        yield from compare_sections.notices(run.comparison)
    yield from profile_sections.notices(profile_sections.named_profiles(context))
    for result in (*(size_sections.merge_results(run.size) if run.size else ()), *run.measurements):
        if not result.stable or result.instability:
            reasons = "; ".join(result.instability) or "the samples moved too much to be trusted"
            yield Notice(f"Not stable, batch {result.batch}: {reasons}")
    moved = next((record for record in context.records if record.instability), None)
    how = f"for a stable measurement: {advice(moved)}" if moved is not None else ""
    if how:
        yield Notice(to_sentence(how), summary=_ADVICE_SUMMARY)
    yield from bench_sections.notices(context)
    known = {other.slowdown_note for other in run.comparison.comparisons} if run.comparison is not None else set()
    known |= {how} | {text for record in context.records for text in (*record.warnings, *record.instability)}
    yield from (Notice(to_sentence(flatten_warning(warning))) for warning in run.warnings if warning not in known)


# ------------------------------------------------------------------------------------------------ files


def _files_section(context: ReportContext) -> Section | None:
    """All known files, each path once, and the commands that open them."""
    run = context.run
    first: dict[str, tuple[str, str, str | None]] = {}
    for name, path in _recorded_files(context):
        row = (name, *context.display_path(path))
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
        ("upgrade document", UPGRADE),
        ("load tests", LOADTEST),
    ):
        if context.has_file(name) and context.display_run_path(name)[0] not in known:
            rows.append((what, *context.display_run_path(name)))
    several = run.size is not None or run.cells or run.profile is not None or run.comparison is not None
    if not rows or not several:
        return None
    lines = [line for _, found, _ in context.profiles for line in found.open_commands.values()]
    lines += [line for cell in run.cells for line in cell.open_commands.values()]
    opens = [context.localize_command(line) for line in lines]
    more = len(rows) - _MAX_FILES
    shown = [*rows[:_MAX_FILES], *([(f"and {more} more", "in the run's folder", None)] if more > 0 else [])]
    commands = (Commands(tuple(dict.fromkeys(opens))[:_MAX_OPEN_COMMANDS]),) if opens else ()
    return Section("artifacts", "Files", (Links(tuple(shown)), *commands))


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
