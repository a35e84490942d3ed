"""Report section: what made one cell faster than another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trt_engine.format import format_or_dash, format_percent, join_names
from trt_engine.records.profile import Category
from trt_engine.records.sweep import CellResult
from trt_engine.reporting.document import Block, Notice, Paragraph, Section, Table
from trt_engine.reporting.sections.report_context import ReportContext
from trt_engine.reporting.sections.section_helpers import (
    Columns,
    backend_label,
    format_factor,
    make_table,
    precision_label,
    shorten_label,
    varying_columns,
)
from trt_engine.reporting.speedup import (
    Aspect,
    ProfileDelta,
    SpeedupExplanation,
    SpeedupStep,
    is_stable,
    profile_delta,
    unreliable_reason,
)

_MAX_EXPLAINED = 4  # speed-ups explained in text
_FUSION_CATEGORIES: tuple[Category, ...] = ("element-wise", "normalisation", "reduction", "control")
_MEMORY_CATEGORIES: tuple[Category, ...] = ("copy", "reformat")
_ASPECT_LABELS: dict[Aspect, str] = {
    "batch": "batch",
    "backend": "backend (fusion, kernels)",
    "precision": "precision",
    "settings": "settings",
}


def speedups_section(context: ReportContext) -> Section | None:
    """Each cell's speed-up over the baseline, split by batch, backend and precision, with profile changes."""
    found = context.speedups.explanations
    left_out = _left_out(context.speedups.unstable)
    if not found:
        return Section("speedup", "The speed-up explained", left_out) if left_out else None
    stages = [stage for item in found for stage in item.steps]
    columns: Columns = [
        ("cell", [item.other.spec.label for item in found]),
        *varying_columns([("against", [item.base.spec.label for item in found])]),
    ]
    lead = len(columns)
    columns.append(("faster", [format_factor(item.factor) for item in found]))
    for name, label in _ASPECT_LABELS.items():
        if any(stage.aspects == (name,) for stage in stages):
            columns.append((f"by {label}", [format_factor(_aspect_factor(item, (name,))) for item in found]))
    if any(len(stage.aspects) > 1 for stage in stages):
        columns.append(("not separable", [_mixed_factors(item) or "–" for item in found]))
    sizes = [(item.base.engine_bytes, item.other.engine_bytes) for item in found]
    if any(base and other for base, other in sizes):
        smaller = [format_factor(base / other if base and other else None) for base, other in sizes]
        columns.append(("engine smaller", smaller))
    caption = "How many times less time an image takes, split where a cell in between was measured"
    blocks: list[Block] = [make_table(caption, columns, words=lead)]
    ordered = sorted(found, key=lambda item: (item.unreliable, -abs(item.factor - 1)))
    blocks += [Paragraph(_explain_speedup(context, item)) for item in ordered[:_MAX_EXPLAINED]]
    steps = {(stage.before.spec.label, stage.after.spec.label): stage for item in ordered for stage in item.steps}
    blocks += [shown for stage in steps.values() if (shown := _delta_table(stage)) is not None][:_MAX_EXPLAINED]
    blocks += left_out
    if missing := _unexplained(found):
        blocks.append(Notice(("Not determined: " + "; ".join(missing) + "."), "info"))
    blocks.append(
        Paragraph(
            "Cells are measured one after another, not interleaved: a difference of a few per cent may be the machine's. "
            "`trt-engine compare A B` gives it an interval."
        )
    )
    return Section("speedup", "The speed-up explained", tuple(blocks))


def _left_out(pairs: Sequence[tuple[CellResult, CellResult]]) -> tuple[Notice, ...]:
    """The unstable cells whose pairs have no factor."""
    cells = dict.fromkeys(
        shorten_label(cell.spec.label) + (" (baseline)" if cell is base else "")
        for base, other in pairs
        for cell in (base, other)
        if not is_stable(cell)
    )
    text = f"No factor is given where one of the two is not stable: {join_names(list(cells), _MAX_EXPLAINED)}."
    return (Notice(text, "info"),) if cells else ()


def _mixed_factors(item: SpeedupExplanation) -> str:
    mixed = (stage for stage in item.steps if len(stage.aspects) > 1 and _is_attributable(stage))
    return ", ".join(f"{format_factor(stage.factor)} {' and '.join(stage.aspects)}" for stage in mixed)


def _aspect_factor(item: SpeedupExplanation, aspects: tuple[Aspect, ...]) -> float | None:
    return next((stage.factor for stage in item.steps if stage.aspects == aspects and _is_attributable(stage)), None)


def _is_attributable(stage: SpeedupStep) -> bool:
    """False for a precision step with an unreliable cell."""
    return "precision" not in stage.aspects or not stage.unreliable


def _explain_speedup(context: ReportContext, item: SpeedupExplanation) -> str:
    """One sentence for the total, then its steps."""
    before, after = context.speedups.ms(item.base), context.speedups.ms(item.other)
    base, other = shorten_label(item.base.spec.label), shorten_label(item.other.spec.label)
    faster = (
        f"{format_factor(item.factor)} the speed of"
        if item.factor >= 1
        else f"{format_factor(1 / item.factor)} slower than"
    )
    said = f"{other}: {faster} {base}"
    said += f" ({format_or_dash(before)} to {format_or_dash(after)} ms per image)."
    if why := [
        f"{shorten_label(cell.spec.label)} {_unreliable_phrase(cell)}"
        for cell in (item.base, item.other)
        if unreliable_reason(cell)
    ]:
        said += f" But {' and '.join(why)}."
    if len(item.steps) > 1:
        said += " " + ", then ".join(_step_phrase(stage) for stage in item.steps) + "."
    return said


def _unreliable_phrase(cell: CellResult) -> str:
    return f"ran in {cell.compute_dtype}, not in {cell.spec.precision}" if cell.compute_dtype else "is not stable"


def _step_phrase(stage: SpeedupStep) -> str:
    what = " and ".join(stage.aspects)
    if stage.aspects == ("batch",) and stage.before.bench and stage.after.bench:
        what = f"batch {stage.before.bench.batch} to {stage.after.bench.batch}"
    if stage.aspects == ("precision",):
        what = f"{precision_label(stage.before)} to {precision_label(stage.after)}"
    if stage.aspects == ("backend",):
        what = f"{backend_label(stage.before)} to {backend_label(stage.after)}"
    return f"{format_factor(stage.factor)} by {what}"


def _delta_table(stage: SpeedupStep) -> Table | None:
    """Table of profile changes of a step."""
    found = profile_delta(stage.before.profile, stage.after.profile)
    if found is None:
        return None
    caption = f"What moved from {stage.before.spec.label} to {stage.after.spec.label}; times in ms per image"
    return Table(caption, ("", "before", "after", ""), tuple(_delta_rows(found)), frozenset((0, 3)))


def _delta_rows(delta: ProfileDelta) -> Iterator[tuple[str, str, str, str]]:
    saved = delta.wall_ms[0] - delta.wall_ms[1]

    def share(before: float, after: float) -> str:
        if abs(saved) < 0.01 * delta.wall_ms[0]:
            return ""
        part = (before - after) / saved
        return f"{format_percent(part)} of the difference".replace("-", "−") if abs(part) >= 0.005 else ""

    if delta.kernels is not None:
        fewer = round(delta.kernels[0] - delta.kernels[1])
        said = f"{abs(fewer):,} {'fewer' if fewer > 0 else 'more'}" if fewer else "as many"
        yield (
            "kernels in one inference (fusion)",
            format_or_dash(delta.kernels[0]),
            format_or_dash(delta.kernels[1]),
            said,
        )
    if delta.layers is not None:
        yield ("layers (fusion)", f"{delta.layers[0]:,}", f"{delta.layers[1]:,}", "")
    for what, names in (
        ("matrix work (precision, kernels)", ("matrix", "attention")),
        ("element-wise, normalisation, reduction, control (fusion)", _FUSION_CATEGORIES),
        ("copies and reformats (memory)", _MEMORY_CATEGORIES),
        ("other kernels", ("other",)),
    ):
        parts = [(before, after) for name, before, after in delta.categories if name in names]
        if parts:
            before, after = sum(b for b, _ in parts), sum(a for _, a in parts)
            yield (what, format_or_dash(before), format_or_dash(after), share(before, after))
    if delta.categories:
        before = delta.wall_ms[0] - sum(ms for _, ms, _ in delta.categories)
        after = delta.wall_ms[1] - sum(ms for _, _, ms in delta.categories)
        if before >= 0 and after >= 0:
            yield ("outside of them", format_or_dash(before), format_or_dash(after), share(before, after))
    for what, pair in (
        ("copies to and from the device", delta.transfers_ms),
        ("device idle, profiled", delta.idle_ms),
        ("launching on the host, profiled", delta.launch_ms),
    ):
        if pair is not None:
            yield (what, format_or_dash(pair[0]), format_or_dash(pair[1]), "")
    yield ("wall time", format_or_dash(delta.wall_ms[0]), format_or_dash(delta.wall_ms[1]), "")


def _unexplained(explanations: Sequence[SpeedupExplanation]) -> list[str]:
    """What the figures do not show."""
    reasons: dict[str, None] = {}
    lacking: dict[str, None] = {}
    for item in explanations:
        for stage in item.steps:
            if len(stage.aspects) > 1:
                both = " and ".join(stage.aspects)
                ends = f"{shorten_label(stage.before.spec.label)} and {shorten_label(stage.after.spec.label)}"
                reasons[f"{both} apart between {ends}, since no cell in between was measured"] = None
            if stage.aspects != ("batch",):
                lacking |= {
                    shorten_label(cell.spec.label): None for cell in (stage.before, stage.after) if cell.profile is None
                }
    if lacking:
        shown = join_names(list(lacking), _MAX_EXPLAINED)
        reasons[f"how much of a step is fusion, kernels or memory where a profile is missing: {shown}"] = None
    listed = list(reasons)
    return listed[-_MAX_EXPLAINED:] if len(listed) <= _MAX_EXPLAINED else [*listed[: _MAX_EXPLAINED - 1], listed[-1]]
