"""`run`: its plan and its result, and the sections of many cells: results, accuracy against speed, failures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from trt_engine.format import (
    MIB,
    format_bytes,
    format_column,
    format_difference,
    format_int,
    format_ms,
    format_number,
    format_or_dash,
    join_names,
)
from trt_engine.records.bench import BenchRecord
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.size import BatchResult
from trt_engine.records.sweep import CellResult, RunPlan, RunSummary, quantized_slowdowns
from trt_engine.reporting import tables
from trt_engine.reporting.bench import points_line
from trt_engine.reporting.charts import Bars, Chart, Line, LineChart, Point, Scatter
from trt_engine.reporting.context import ReportContext
from trt_engine.reporting.document import Block, Fact, KeyFigure, Notice, Paragraph, Section, make_facts
from trt_engine.reporting.speedup import unreliable_reason

_MAX_BARS = 20  # in one chart
_MAX_LINES = 8  # in one chart
_MAX_LISTED = 8  # cells named in a notice
_STATE_LABELS = {"failed": "failed", "skipped": "skipped", "interrupted": "interrupted", "waiting": "not reached"}


def run_plan(plan: RunPlan) -> Iterator[Block]:
    actions = {"keep": "kept", "leave": "left out", "skip": "skipped"}
    rows: list[Fact] = []
    for cell in plan.cells:
        took = f", about {cell.seconds:.0f} s" if cell.seconds is not None else ""
        target = cell.spec.settings.get("quantize", {}).get("target")
        placed = f", quantised for {target}" if target is not None else ""
        does = actions.get(cell.action) or ", ".join(cell.spec.modes)
        rows.append((cell.spec.label, f"{does} ({cell.reason}{placed}{took})"))
    yield Paragraph(f"would run {plan.plan} in {plan.folder}")
    yield make_facts(*rows)
    if plan.seconds is not None:
        yield Paragraph(f"about {plan.seconds:.0f} s in all, by earlier records")
    yield from (Paragraph(f"warning: {text}") for text in plan.warnings)
    if plan.container_command:
        yield Paragraph(f"would start {shlex.join(plan.container_command)}")


def run_summary(summary: RunSummary) -> Iterator[Block]:
    """One row per cell, the counts, the output files."""
    manifest = summary.manifest
    box = manifest.container
    counts = {
        "done": summary.done,
        "FAILED": summary.failed,
        "skipped": summary.skipped,
        "not done": sum(result.state in ("waiting", "interrupted") for result in summary.results),
        "of them reused": summary.reused,
    }
    opens = list(dict.fromkeys(text for result in summary.results for text in result.open_commands.values()))
    yield make_facts(
        ("run", manifest.title or manifest.name),
        ("container", f"{box.get('image')} ({box.get('digest')})" if box else None),
    )
    yield make_facts(*((result.spec.label, _cell_text(result)) for result in summary.results))
    yield make_facts(
        ("cells", ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "done")),
        ("folder", summary.folder),
        *(("report" if name != "run" else "manifest", place) for name, place in summary.artifacts.items()),
        ("open", opens[:4]),
        ("warning", summary.warnings),
        ("next", f"trt-engine report {shlex.quote(summary.folder)}"),
    )


def _cell_text(result: CellResult) -> str:
    if result.state == "done":
        return cell_summary(result)
    reason, _, hint = (result.reason or "").partition("\nhint: ")
    state = {"failed": "FAILED", "waiting": "not done"}.get(result.state, result.state)
    return f"{state}{f': {reason}' if reason and reason != state else ''}{f' ({hint})' if hint else ''}"


def cell_summary(result: CellResult) -> str:
    """The main results of a cell on one line."""
    parts: list[str] = []
    if result.bench is not None and (times := result.bench.compute_summary()) is not None:
        speed = f"{format_number(result.bench.images_per_s)} images/s"
        parts.append(f"median {format_ms(times.median)}, p95 {format_ms(times.p95)}, {speed}")
    parts += [f"{name} {tables.metric_text(value)}" for name, value in _main_metric(result).items()]
    parts += [format_bytes(result.engine_bytes)] if result.engine_bytes is not None else []
    return ", ".join(filter(None, [*parts, result.validation, f"{result.seconds:.1f} s"]))


# ------------------------------------------------------------------------------------------------ the report


def key_figures(context: ReportContext) -> Iterator[KeyFigure]:
    found = context.run.cells
    done = [cell for cell in found if cell.state == "done"]
    counts = {word: sum(cell.state == state for cell in found) for state, word in _STATE_LABELS.items()}
    wrong = [f"{format_int(count)} {word}" for word, count in counts.items() if count]
    yield KeyFigure("cells", f"{len(done)} of {len(found)}", ", ".join(wrong) or "all done")
    timed = [(ms, cell) for cell in found if (ms := context.speedups.ms(cell)) is not None]
    if not timed:
        return
    known = [(ms, cell) for ms, cell in timed if unreliable_reason(cell) is None] or timed
    one_model = len({cell.spec.model for _, cell in timed}) == 1  # figures of different networks have no highest
    if one_model:
        best = max((cell.bench.images_per_s, _label_with_doubt(cell)) for _, cell in known if cell.bench is not None)
        yield KeyFigure("images/s", format_or_dash(best[0]), f"highest: {best[1]}")
    faster = [item for item in context.speedups.explanations if item.factor > 1 and not item.unreliable]
    if faster:
        most = max(faster, key=lambda item: item.factor)
        pair = f"{tables.shorten_label(most.other.spec.label)} against {tables.shorten_label(most.base.spec.label)}"
        yield KeyFigure("speed-up", tables.format_factor(most.factor), pair)
    if one_model:
        latency = min((ms * cell.bench.batch, _label_with_doubt(cell)) for ms, cell in known if cell.bench is not None)
        yield KeyFigure("ms per query", format_or_dash(latency[0]), f"shortest mean: {latency[1]}")


def _label_with_doubt(cell: CellResult) -> str:
    """The label, with the reason if its speed is unreliable."""
    why = unreliable_reason(cell)
    return tables.shorten_label(cell.spec.label) + (f" ({why})" if why else "")


def notices(context: ReportContext) -> Iterator[Notice]:
    found = context.run.cells
    for state, word in _STATE_LABELS.items():
        named = [tables.shorten_label(cell.spec.label) for cell in found if cell.state == state]
        if named:
            why = "; the reasons stand below" if state in ("failed", "skipped") else ""
            yield Notice(f"{tables.plural(len(named), 'cell')} {word}: {join_names(named, 4)}{why}.")
    explained = context.speedups.explanations
    if explained and all(item.factor < 1 for item in explained):
        nearest = max(explained, key=lambda item: item.factor)
        label, slower = tables.shorten_label(nearest.other.spec.label), tables.format_factor(1 / nearest.factor)
        which = "the nearest" if len(explained) > 1 else "the other"
        which_cells = "stable cell" if context.speedups.unstable else "cell"
        none = f"No {which_cells} is faster than the baseline of its model"
        yield Notice(f"{none}: {which}, {label}, is {slower} slower.")
    yield from (Notice(tables.to_sentence(text)) for text in quantized_slowdowns(found))
    for cell in found:
        ran = cell.bench.batch if cell.bench else cell.spec.batch
        if cell.requested_batch not in (None, ran):
            large = f"batch {cell.requested_batch} did not fit into memory"
            yield Notice(f"{cell.spec.label}: {large}, {ran} was measured.")
    doubtful = [cell for cell in found if unreliable_reason(cell) and context.speedups.ms(cell) is not None]
    if doubtful and len(found) > 1:
        shown = join_names([_label_with_doubt(cell) for cell in doubtful], _MAX_LISTED)
        left = "“by precision” and the marks in accuracy against speed"
        if any(unreliable_reason(cell) is None for cell in found if context.speedups.ms(cell) is not None):
            yield Notice(f"Left out of the figures above, of {left}: {shown}.")
        else:
            why = f"No cell is both stable and in its own precision, so no speed-up is claimed, and {left} are left out"
            yield Notice(f"{why}: {shown}.")
    said: list[tuple[str, str]] = []
    for cell in found:
        known = {*cell.bench.instability} if cell.bench else set()
        of_bench = cell.bench.warnings if cell.bench else ()
        told_once = dict.fromkeys((*cell.warnings, *of_bench))
        said += [(cell.spec.label, tables.flatten_warning(text)) for text in told_once if text not in known]
        if cell.bench is not None and (not cell.bench.stable or cell.bench.instability):
            said.append((cell.spec.label, f"not stable: {instability_text(cell.bench)}"))
    yield from (Notice(text, summary=tables.warning_summary(what)) for text, what in _merge_warnings(said))
    for _, model, _, group in _by_model(context):
        digests = {cell.images_digest for cell in group if cell.images_digest}
        if len(digests) > 1:
            yield Notice(f"{model}: the cells saw different lists of images, so their accuracy does not compare.")


def instability_text(result: BenchRecord | BatchResult) -> str:
    return "; ".join(result.instability) or "the samples moved too much to be trusted"


def _merge_warnings(warnings: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Merge warnings of cells that differ only in numbers; yield the text with and without the cells."""
    groups = tables.group_by(warnings, lambda warning: _warning_kind(warning[1]))
    for group in groups.values():
        labels = list(dict.fromkeys(tables.shorten_label(label) for label, _ in group))
        first = group[0][1]
        if len(labels) == 1:
            yield from ((f"{labels[0]}: {text}", text) for text in dict.fromkeys(text for _, text in group))
            continue
        alike = "" if all(text == first for _, text in group) else " (the first; the others alike)"
        yield f"{len(labels)} cells ({join_names(labels, 3)}): {first}{alike}", first


def _warning_kind(text: str) -> str:
    unstable = text.startswith("not stable: ")
    return "not stable" if unstable else re.sub(r"\d+([.,]\d+)*|faster|slower", "#", text)


def cells_section(context: ReportContext) -> Section:
    found, speedups = context.run.cells, context.speedups
    baselines = {id(base) for base in speedups.baselines}
    factors = {id(item.other): item.factor for item in speedups.explanations}
    named: tables.Columns = [("cell", [cell.spec.label for cell in found])]
    if any(state := [_state_label(cell) for cell in found]):
        named.append(("", state))  # visible on a phone, unlike the end of a wide table
    if any(cell.compute_dtype for cell in found):
        named += tables.varying_columns([("ran in", [cell.compute_dtype or cell.spec.precision for cell in found])])
    faster = ["1×" if id(c) in baselines else tables.format_factor(factors.get(id(c))) for c in found]
    summaries = [context.summaries[id(cell.bench)] if cell.bench else None for cell in found]
    metrics = [_main_metric(cell) for cell in found]
    sizes = [None if cell.engine_bytes is None else cell.engine_bytes / MIB for cell in found]
    several = (("engine MiB", sizes), ("build s", [cell.build_seconds for cell in found]))
    worst = tables.varying_columns([("max rel. diff.", list(map(_max_rel_error, found)))])
    columns = [
        *named,
        *tables.number_columns(summaries, {"mean ms": "mean", "p95 ms": "p95", "p99 ms": "p99"}),
        *tables.number_columns([cell.bench for cell in found], {"images/s": "images_per_s"}),
        *([("faster", faster)] if factors else []),
        *(
            (name, format_column([one.get(name) for one in metrics]))
            for name in dict.fromkeys(n for m in metrics for n in m)
        ),
        *(
            (title, format_column(values))
            for title, values in several
            if len(set(values)) > 1 or (len(found) == 1 and values[0])
        ),
        *worst,
    ]
    scope = f"; times in ms per query, {context.timing_scope()}" if context.records else ""
    marked = [index for index, cell in enumerate(found) if id(cell) in baselines and factors]
    renamed = [whole for cell, whole in zip(found, context.full_labels, strict=True) if cell.spec.label != whole]
    said = []
    if renamed:
        said.append(f"Cells are named by what differs; their files and `--cells` use whole names, as `{renamed[0]}`.")
    if factors:
        said.append(
            "The marked row is the baseline of its model; the column “faster” holds the time per image against it."
        )
    if worst:
        said.append("The largest relative difference is against plain ONNX Runtime on the same input.")
        said += _row_matching(found)
    charts = tuple(_time_charts(context))
    blocks: list[Block] = [tables.make_table(f"One row for each cell{scope}", columns, words=len(named), marked=marked)]
    return Section(
        "cells",
        "Cells",
        (*([charts] if charts else []), *blocks, *([Paragraph(" ".join(said))] if said else [])),
    )


def _time_charts(context: ReportContext) -> Iterator[Chart]:
    """Bars of the time per image, for each model with several timed cells."""
    for place, _, which, group in _by_model(context):
        timed = [(c.spec.label, ms) for c in group if (ms := context.speedups.ms(c)) is not None]
        timed = timed[:_MAX_BARS]
        if len(timed) < 2:
            continue
        title = f"Time per image{which}" + (f", the first {_MAX_BARS}" if len(timed) == _MAX_BARS else "")
        yield Bars(f"per-image-{place}", title, "ms per image", tuple(timed))


def _row_matching(cells: Sequence[CellResult]) -> Iterator[str]:
    """How sorted rows were matched before comparison, with the cells."""
    moved = [
        (f"{error.rows_moved} rows of {name} matched by value, {error.rows_skipped} left out", cell.spec.label)
        for cell in cells
        for name, error in (cell.parity.outputs.items() if cell.parity is not None else ())
        if error.rows_moved or error.rows_skipped
    ]
    for how, group in tables.group_by(moved, lambda item: item[0]).items():
        yield f"Of {', '.join(tables.shorten_label(label) for _, label in group)}: {how}."


def _by_model(context: ReportContext) -> Iterator[tuple[int, str, str, list[CellResult]]]:
    """Number, model, ` of MODEL` if there are several, and cells of each model."""
    groups = tables.group_by(context.run.cells, lambda cell: cell.spec.model)
    for place, (model, group) in enumerate(groups.items()):
        yield place, model, f" of {model}" if len(groups) > 1 else "", group


def _state_label(cell: CellResult) -> str:
    if cell.state != "done":
        return _STATE_LABELS[cell.state]
    return "not stable" if cell.bench is not None and not cell.bench.stable else ""


def _main_metric(cell: CellResult) -> dict[str, float]:
    """The main metric of its evaluation, by name."""
    found = cell.evaluation
    return {name: found.metrics[name] for name in [MAIN_METRIC[found.task]] if name in found.metrics} if found else {}


def _max_rel_error(cell: CellResult) -> str:
    outputs = cell.parity.outputs if cell.parity is not None else {}
    return f"{max(error.max_rel for error in outputs.values()):.2g}" if outputs else "–"


def throughput_section(context: ReportContext) -> Section | None:
    """Images per second by batch, one line per precision and backend."""
    charts: list[Chart] = []
    blocks: list[Block] = []
    for place, _, which, group in _by_model(context):
        several = len({(c.spec.backend, c.spec.providers, c.spec.device) for c in group}) > 1
        series = tables.group_by(
            ((c, c.bench) for c in group if c.bench is not None and context.speedups.ms(c) is not None),
            lambda pair: (
                tables.precision_label(pair[0]) + (f", {tables.backend_label(pair[0].spec)}" if several else "")  # noqa: B023
            ),
        )
        if not any(len({bench.batch for _, bench in line}) > 1 for line in series.values()):
            continue
        lines = [
            points_line(name, [(bench.batch, bench.images_per_s, bench.stable) for _, bench in line])
            for name, line in list(series.items())[:_MAX_LINES]
        ]
        title, axis = f"Throughput by batch size{which}", "batch size (log scale)"
        charts.append(LineChart(f"throughput-{place}", title, axis, "images/s", tuple(lines), log_x=True))
        batches = sorted({p.x for line in lines for p in line.points})
        rates = [{p.x: p.y for p in reversed(line.points)} for line in lines]
        columns: tables.Columns = [("", [line.name for line in lines])]
        columns += [(f"batch {x:g}", format_column([rate.get(x) for rate in rates])) for x in batches]
        blocks.append(
            tables.make_table(
                f"Images per second by batch size{which}{tables.more_note(_MAX_LINES, len(series))}", columns, words=1
            )
        )
    return Section("throughput", "Throughput against batch", (tuple(charts), *blocks)) if charts else None


def accuracy_section(context: ReportContext) -> Section | None:
    """Accuracy against speed, with the Pareto-optimal cells."""
    charts: list[Chart] = []
    blocks: list[Block] = []
    for place, model, which, group in _by_model(context):
        rated = [(cell, name, value) for cell in group if cell.bench for name, value in _main_metric(cell).items()]
        names = {name for _, name, _ in rated}
        if len(rated) < 2 or len(names) > 1:
            continue
        metric = names.pop()
        points = [
            (cell, Point(cell.bench.images_per_s, value, str(index)))
            for index, (cell, _, value) in enumerate(rated, 1)
            if cell.bench is not None
        ]
        known = [p for cell, p in points if unreliable_reason(cell) is None]
        front = [p for p in known if not any(q.x >= p.x and q.y >= p.y and (q.x, q.y) != (p.x, p.y) for q in known)]
        series = tables.group_by(points, lambda pair: tables.precision_label(pair[0]))
        lines = tuple(Line(name, tuple(p for _, p in found), "points") for name, found in series.items())
        title = f"{metric} against throughput{which}"
        charts.append(Scatter(f"accuracy-{place}", title, "images/s", metric, lines, tuple(front)))
        base = next((cell for cell in context.speedups.baselines if cell.spec.model == model), None)
        reference = next((p.y for cell, p in points if cell is base), None)
        differences = [None if reference is None else p.y - reference for _, p in points]
        table = tables.make_table(
            f"{metric} and speed{which}; marked: no other is better in both",
            [
                ("", [p.label for _, p in points]),
                ("cell", [cell.spec.label for cell, _ in points]),
                (metric, [f"{p.y:.4f}" for _, p in points]),
                ("difference", [format_difference(value, 4) for value in differences]),
                ("images/s", [format_or_dash(p.x) for _, p in points]),
                ("images", [f"{cell.evaluation.images:,}" if cell.evaluation else "–" for cell, _ in points]),
            ],
            words=2,
            marked=[index for index, (_, p) in enumerate(points) if p in front],
        )
        blocks.append(table)
    return Section("accuracy", "Accuracy against speed", (tuple(charts), *blocks)) if charts else None


def failures_section(context: ReportContext) -> Section | None:
    """Cells without a measurement, with reason and remedy."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for cell, whole in zip(context.run.cells, context.full_labels, strict=True):
        if cell.state == "done":
            continue
        reason, _, remedy = (cell.reason or "").partition("hint: ")
        if cell.state == "waiting":
            reason, remedy = reason or "the run ended before it", remedy or "run the same command again"
        alike.setdefault((_STATE_LABELS[cell.state], _reason_sentence(reason), remedy.strip() or "–"), []).append(whole)
    cells = [(", ".join(labels), *why) for why, labels in alike.items()]
    table = tables.text_table("Why, and what to do", ("cell", "", "reason", "remedy"), cells)
    return Section("failures", "Cells without a result", (table,)) if cells else None


def _reason_sentence(reason: str) -> str:
    text = " ".join(reason.split()).rstrip(";, ")
    return tables.to_sentence(text) if text else "–"


def images_section(context: ReportContext) -> Section | None:
    """Digest of each cell's image list."""
    lists = tables.group_by(
        (cell for cell in context.run.cells if cell.images_digest), lambda cell: cell.images_digest or ""
    )
    everything = len(lists) == 1 and len(next(iter(lists.values()))) == len(context.run.cells)
    rows = [
        (digest, "all cells" if everything else ", ".join(cell.spec.label for cell in cells))
        for digest, cells in lists.items()
    ]
    table = tables.text_table("Digest of the list of images, and the cells that saw it", ("digest", "cells"), rows)
    return Section("images", "Images", (table,)) if rows else None
