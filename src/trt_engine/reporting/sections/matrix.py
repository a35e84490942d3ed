"""A run of many cells: the table of all, what made the fast ones fast, accuracy against speed, what failed and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trt_engine.cells import CellResult, slower_than_float
from trt_engine.figures import MIB, percent
from trt_engine.reporting.charts import Bars, Chart, Line, LineChart, Point, Scatter
from trt_engine.reporting.contents import Block, Figure, Notice, Paragraph, Section, Table, clean
from trt_engine.reporting.figures import column, count, number
from trt_engine.reporting.sections.parts import (
    brief,
    difference,
    one_line,
    plural,
    sentence,
    table,
    times,
    told,
    varying,
    words,
)
from trt_engine.reporting.sections.scene import Scene
from trt_engine.reporting.speedup import Aspect, Explained, Moved, Stage, doubt, moved
from trt_engine.traces import Category

__all__ = ["accuracy", "cells", "failures", "figures", "images", "notices", "speedups", "throughput"]

_BARS = 20  # in one chart
_LINES = 8  # in one chart
_LISTED = 8  # cells named in a notice
_TOLD = 4  # cells whose steps are told in words
_STATES = {"failed": "failed", "skipped": "skipped", "interrupted": "interrupted", "waiting": "not reached"}
_FUSED: tuple[Category, ...] = ("element-wise", "normalisation", "reduction", "control")
_MOVES: tuple[Category, ...] = ("copy", "reformat")


def figures(scene: Scene) -> Iterator[Figure]:
    found = scene.run.cells
    done = [cell for cell in found if cell.state == "done"]
    wrong = [f"{count(n)} {word}" for state, word in _STATES.items() if (n := sum(c.state == state for c in found))]
    yield Figure("cells", f"{len(done)} of {len(found)}", ", ".join(wrong) or "all done")
    timed = [(ms, cell) for cell in found if (ms := scene.speedups.ms(cell)) is not None]
    if not timed:
        return
    known = [(ms, cell) for ms, cell in timed if doubt(cell) is None] or timed
    best = max(((cell.bench.images_per_s, _named(cell)) for _, cell in known if cell.bench is not None))
    yield Figure("images/s", number(best[0]), clean(f"highest: {best[1]}"))
    faster = [item for item in scene.speedups.explained if item.factor > 1 and not item.doubtful]
    if faster:
        most = max(faster, key=lambda item: item.factor)
        yield Figure(
            "speed-up",
            times(most.factor),
            clean(f"{brief(most.other.spec.label)} against {brief(most.base.spec.label)}"),
        )
    latency = min((ms * cell.bench.batch, _named(cell)) for ms, cell in known if cell.bench is not None)
    yield Figure("ms per query", number(latency[0]), clean(f"shortest mean: {latency[1]}"))


def _named(cell: CellResult) -> str:
    """Its label, with what makes its speed doubtful."""
    why = doubt(cell)
    return brief(cell.spec.label) + (f" ({why})" if why else "")


def _precision(cell: CellResult) -> str:
    """What was asked for, and what ran where that is another."""
    return cell.spec.precision + (f" (ran in {cell.ran_in})" if cell.ran_in else "")


def notices(scene: Scene) -> Iterator[Notice]:
    found = scene.run.cells
    for state, word in _STATES.items():
        named = [brief(cell.spec.label) for cell in found if cell.state == state]
        if named:
            shown = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
            why = "; the reasons stand below" if state in ("failed", "skipped") else ""
            yield Notice(clean(f"{plural(len(named), 'cell')} {word}: {shown}{why}."))
    explained = scene.speedups.explained
    if explained and all(item.factor < 1 for item in explained):
        nearest = max(explained, key=lambda item: item.factor)
        label, slower = brief(nearest.other.spec.label), times(1 / nearest.factor)
        which = "the nearest" if len(explained) > 1 else "the other"
        yield Notice(clean(f"No cell is faster than the baseline of its model: {which}, {label}, is {slower} slower."))
    yield from (Notice(clean(sentence(text))) for text in slower_than_float(found))
    for cell in found:
        ran = cell.bench.batch if cell.bench else cell.spec.batch
        if cell.asked_batch not in (None, ran):
            yield Notice(
                clean(f"{cell.spec.label}: batch {cell.asked_batch} did not fit into memory, {ran} was measured.")
            )
    doubtful = [cell for cell in found if doubt(cell) and scene.speedups.ms(cell) is not None]
    if doubtful and len(found) > 1:
        shown = ", ".join(map(_named, doubtful[:_LISTED]))
        shown += f" and {len(doubtful) - _LISTED} more" if len(doubtful) > _LISTED else ""
        left = "“by precision” and the marks in accuracy against speed"
        if any(doubt(cell) is None for cell in found if scene.speedups.ms(cell) is not None):
            yield Notice(clean(f"Left out of the figures above, of {left}: {shown}."))
        else:
            why = f"No cell is both stable and in its own precision, so no speed-up is claimed, and {left} are left out"
            yield Notice(clean(f"{why}: {shown}."))
    said: list[tuple[str, str]] = []
    for cell in found:
        known = {*cell.bench.instability} if cell.bench else set()
        of_bench = cell.bench.warnings if cell.bench else ()
        told_once = dict.fromkeys((*cell.warnings, *of_bench))
        said += [(cell.spec.label, one_line(text)) for text in told_once if text not in known]
        if cell.bench is not None and (not cell.bench.stable or cell.bench.instability):
            reasons = "; ".join(cell.bench.instability) or "the samples moved too much to be trusted"
            said.append((cell.spec.label, f"not stable: {reasons}"))
    yield from (Notice(clean(text)) for text in _alike(said))
    for model, group in _models(found).items():
        digests = {cell.images_digest for cell in group if cell.images_digest}
        if len(digests) > 1:
            yield Notice(
                clean(f"{model}: the cells saw different lists of images, so their accuracy does not compare.")
            )


def _alike(said: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What cells warn of, once for all that differ in their figures alone."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for label, text in said:
        kind = (
            text.partition(":")[0]
            if text.startswith("not stable: ")
            else re.sub(r"\d+([.,]\d+)*|faster|slower", "#", text)
        )
        groups.setdefault(kind, []).append((brief(label), text))
    for group in groups.values():
        labels = list(dict.fromkeys(label for label, _ in group))
        first = group[0][1]
        if len(labels) == 1:
            yield from (f"{labels[0]}: {text}" for text in dict.fromkeys(text for _, text in group))
            continue
        shown = ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
        alike = "" if all(text == first for _, text in group) else " (the first; the others alike)"
        yield f"{len(labels)} cells ({shown}): {first}{alike}"


# ------------------------------------------------------------------------------------------------ the table of all


def cells(scene: Scene) -> Section:
    found = scene.run.cells
    blocks: list[Block] = []
    bases = {id(item.other): item.factor for item in scene.speedups.explained}
    baselines = {id(base) for base in scene.speedups.baselines}
    charts: list[Chart] = []
    for number_of, (model, group) in enumerate(_models(found).items()):
        timed = [(cell, ms) for cell in group if (ms := scene.speedups.ms(cell)) is not None][:_BARS]
        if len(timed) > 1:
            which = f" of {clean(model)}" if len(_models(found)) > 1 else ""
            charts.append(
                Bars(
                    f"per-image-{number_of}",
                    f"Time per image{which}" + (f", the first {_BARS}" if len(timed) == _BARS else ""),
                    told(f"{clean(cell.spec.label)}: {number(ms)} ms per image" for cell, ms in timed),
                    "ms",
                    tuple((clean(cell.spec.label), ms) for cell, ms in timed),
                )
            )
    if charts:
        blocks.append(tuple(charts))
    summaries = [scene.summaries[id(cell.bench)] if cell.bench else None for cell in found]
    columns: list[tuple[str, Sequence[str]]] = [
        ("cell", [clean(cell.spec.label) for cell in found]),
        *varying(
            [
                ("model", [clean(cell.spec.model) for cell in found]),
                ("precision", [clean(_precision(cell)) for cell in found]),
                ("backend", [clean(cell.spec.backend) for cell in found]),
                ("device", [clean(cell.spec.device) for cell in found]),
                ("batch", [str(cell.bench.batch if cell.bench else cell.spec.batch) for cell in found]),
            ]
        ),
    ]
    if any(state := [_state(cell) for cell in found]):
        columns.insert(1, ("", state))  # at the end of a wide table a phone would not show it
    lead = len([title for title, _ in columns if title != "batch"])
    numbers: list[tuple[str, Sequence[float | None]]] = [
        ("mean ms", [s.mean if s else None for s in summaries]),
        ("p95 ms", [s.p95 if s else None for s in summaries]),
        ("p99 ms", [s.p99 if s else None for s in summaries]),
        ("images/s", [cell.bench.images_per_s if cell.bench else None for cell in found]),
    ]
    columns += [(title, column(values)) for title, values in numbers if any(v is not None for v in values)]
    if bases:
        against = ["1×" if id(cell) in baselines else times(bases.get(id(cell))) for cell in found]
        columns.append(("faster", against))
    metrics = list(dict.fromkeys(name for cell in found for name in _metrics(cell)))
    columns += [(name, column([_metrics(cell).get(name) for cell in found])) for name in metrics]
    rest: list[tuple[str, Sequence[float | None]]] = [
        ("engine MiB", [None if c.engine_bytes is None else c.engine_bytes / MIB for c in found]),
        ("build s", [cell.build_seconds for cell in found]),
    ]
    columns += [
        (title, column(values)) for title, values in rest if len(set(values)) > 1 or (len(found) == 1 and values[0])
    ]
    parity = ["–" if (worst := _parity(cell)) is None else f"{worst:.2g}" for cell in found]
    columns += varying([("max rel. diff.", parity)])
    caption = "One row for each cell" + (f"; times in ms per query, {scene.scope()}" if scene.records else "")
    marked = [index for index, cell in enumerate(found) if id(cell) in baselines and bases]
    blocks.append(table(caption, columns, words=lead, marked=marked))
    said = []
    if bases:
        said.append(
            "The marked row is the baseline of its model; the column “faster” holds the time per image against it."
        )
    if any(title == "max rel. diff." for title, _ in columns):
        said.append("The largest relative difference is against plain ONNX Runtime on the same input.")
        said += [f"Of {', '.join(labels)}: {how}." for how, labels in _matched(found).items()]
    if said:
        blocks.append(Paragraph(clean(" ".join(said))))
    return Section("cells", "Cells", tuple(blocks))


def _matched(found: Sequence[CellResult]) -> dict[str, list[str]]:
    """How rows that a model sorts were matched before they were held against each other, and of which cells."""
    ways: dict[str, list[str]] = {}
    for cell in found:
        for name, error in cell.parity.outputs.items() if cell.parity is not None else ():
            if error.rows_moved or error.rows_left_out:
                how = f"{error.rows_moved} rows of {name} matched by value, {error.rows_left_out} left out"
                ways.setdefault(how, []).append(brief(cell.spec.label))
    return ways


def _models(found: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    groups: dict[str, list[CellResult]] = {}
    for cell in found:
        groups.setdefault(cell.spec.model, []).append(cell)
    return groups


def _state(cell: CellResult) -> str:
    if cell.state != "done":
        return _STATES[cell.state]
    return "not stable" if cell.bench is not None and not cell.bench.stable else ""


def _metrics(cell: CellResult) -> dict[str, float]:
    """The main figure of its evaluation, by name."""
    if cell.evaluated is None:
        return {}
    name = "AP" if cell.evaluated.task == "detect" else "top1"
    return {name: cell.evaluated.metrics[name]} if name in cell.evaluated.metrics else {}


def _parity(cell: CellResult) -> float | None:
    if cell.parity is None or not cell.parity.outputs:
        return None
    return max(error.max_rel for error in cell.parity.outputs.values())


# ------------------------------------------------------------------------------------------------ the speed-up


_NAMES: dict[Aspect, str] = {
    "batch": "batch",
    "backend": "backend (fusion, kernels)",
    "precision": "precision",
    "settings": "settings",
}


def speedups(scene: Scene) -> Section | None:
    """The baseline against each cell: how much of the factor is batch, backend and precision, and what moved."""
    found = scene.speedups.explained
    if not found:
        return None
    aspects = [name for name in _NAMES if any(stage.aspects == (name,) for item in found for stage in item.stages)]
    mixed = any(len(stage.aspects) > 1 for item in found for stage in item.stages)
    columns: list[tuple[str, Sequence[str]]] = [
        ("cell", [clean(item.other.spec.label) for item in found]),
        *varying([("against", [clean(item.base.spec.label) for item in found])]),
    ]
    lead = len(columns)
    columns.append(("faster", [times(item.factor) for item in found]))
    columns += [(f"by {_NAMES[name]}", [times(_factor(item, (name,))) for item in found]) for name in aspects]
    if mixed:
        columns.append(
            (
                "not told apart",
                [
                    ", ".join(
                        f"{times(s.factor)} {' and '.join(s.aspects)}"
                        for s in item.stages
                        if len(s.aspects) > 1 and _told_by(s)
                    )
                    or "–"
                    for item in found
                ],
            )
        )
    smaller = [
        item.base.engine_bytes / item.other.engine_bytes if item.base.engine_bytes and item.other.engine_bytes else None
        for item in found
    ]
    if any(value is not None for value in smaller):
        columns.append(("engine smaller", [times(value) for value in smaller]))
    blocks: list[Block] = [
        table(
            "How many times less time an image takes, split where a cell in between was measured", columns, words=lead
        )
    ]
    ordered = sorted(found, key=lambda item: (item.doubtful, -abs(item.factor - 1)))
    blocks += [Paragraph(clean(_story(scene, item))) for item in ordered[:_TOLD]]
    steps = {(stage.before.spec.label, stage.after.spec.label): stage for item in ordered for stage in item.stages}
    blocks += [shown for stage in steps.values() if (shown := _moves(stage)) is not None][:_TOLD]
    missing = _untold(found)
    if missing:
        blocks.append(Notice(clean("What cannot be told: " + "; ".join(missing) + "."), "info"))
    blocks.append(
        Paragraph(
            "Cells are measured one after another, not in turns: a difference of a few per cent may be the machine's. "
            "`trt-engine compare A B` gives it an interval."
        )
    )
    return Section("speedup", "The speed-up explained", tuple(blocks))


def _factor(item: Explained, aspects: tuple[Aspect, ...]) -> float | None:
    return next((stage.factor for stage in item.stages if stage.aspects == aspects and _told_by(stage)), None)


def _told_by(stage: Stage) -> bool:
    """False for a step to or from another precision of which one end did not run in its own, or is not stable."""
    return "precision" not in stage.aspects or not stage.doubtful


def _story(scene: Scene, item: Explained) -> str:
    """The whole in a sentence, then its steps."""
    before, after = scene.speedups.ms(item.base), scene.speedups.ms(item.other)
    faster = f"{times(item.factor)} the speed" if item.factor >= 1 else f"{times(1 / item.factor)} slower"
    said = (
        f"{brief(item.other.spec.label)}: {faster} {'of' if item.factor >= 1 else 'than'} {brief(item.base.spec.label)}"
    )
    said += f" ({number(before)} to {number(after)} ms per image)."
    if why := [f"{brief(cell.spec.label)} {_was(cell)}" for cell in (item.base, item.other) if doubt(cell)]:
        said += f" But {' and '.join(why)}."
    if len(item.stages) > 1:
        said += " " + ", then ".join(_step(stage) for stage in item.stages) + "."
    return said


def _was(cell: CellResult) -> str:
    return f"ran in {cell.ran_in}, not in {cell.spec.precision}" if cell.ran_in else "is not stable"


def _step(stage: Stage) -> str:
    what = " and ".join(stage.aspects)
    if stage.aspects == ("batch",) and stage.before.bench and stage.after.bench:
        what = f"batch {stage.before.bench.batch} to {stage.after.bench.batch}"
    if stage.aspects == ("precision",):
        what = f"{_precision(stage.before)} to {_precision(stage.after)}"
    if stage.aspects == ("backend",):
        what = f"{_where(stage.before)} to {_where(stage.after)}"
    return f"{times(stage.factor)} by {what}"


def _where(cell: CellResult) -> str:
    return cell.spec.backend + (f" ({', '.join(cell.spec.providers)})" if cell.spec.providers else "")


def _moves(stage: Stage) -> Table | None:
    """What the profiles at both ends of a step say moved."""
    found = moved(stage.before.profile, stage.after.profile)
    if found is None:
        return None
    caption = f"What moved from {stage.before.spec.label} to {stage.after.spec.label}; times in ms per image"
    return Table(clean(caption), ("", "before", "after", ""), tuple(_moved_rows(found)), frozenset((0, 3)))


def _moved_rows(found: Moved) -> Iterator[tuple[str, str, str, str]]:
    saved = found.wall_ms[0] - found.wall_ms[1]

    def share(before: float, after: float) -> str:
        if abs(saved) < 0.01 * found.wall_ms[0]:
            return ""
        part = (before - after) / saved
        return f"{percent(part)} of the difference".replace("-", "−") if abs(part) >= 0.005 else ""

    if found.kernels is not None:
        fewer = round(found.kernels[0] - found.kernels[1])
        said = f"{abs(fewer):,} {'fewer' if fewer > 0 else 'more'}" if fewer else "as many"
        yield ("kernels in one inference (fusion)", number(found.kernels[0]), number(found.kernels[1]), said)
    if found.layers is not None:
        yield ("layers (fusion)", f"{found.layers[0]:,}", f"{found.layers[1]:,}", "")
    for what, names in (
        ("matrix work (precision, kernels)", ("matrix", "attention")),
        ("element-wise, normalisation, reduction, control (fusion)", _FUSED),
        ("copies and reformats (memory)", _MOVES),
        ("other kernels", ("other",)),
    ):
        parts = [(before, after) for name, before, after in found.categories if name in names]
        if parts:
            before, after = sum(b for b, _ in parts), sum(a for _, a in parts)
            yield (what, number(before), number(after), share(before, after))
    if found.categories:
        before = found.wall_ms[0] - sum(ms for _, ms, _ in found.categories)
        after = found.wall_ms[1] - sum(ms for _, _, ms in found.categories)
        if before >= 0 and after >= 0:
            yield ("outside of them", number(before), number(after), share(before, after))
    for what, pair in (
        ("copies to and from the device", found.transfers_ms),
        ("device idle, profiled", found.idle_ms),
        ("launching on the host, profiled", found.launch_ms),
    ):
        if pair is not None:
            yield (what, number(pair[0]), number(pair[1]), "")
    yield ("wall time", number(found.wall_ms[0]), number(found.wall_ms[1]), "")


def _untold(found: Sequence[Explained]) -> list[str]:
    """What the figures do not show, each once."""
    reasons: dict[str, None] = {}
    lacking: dict[str, None] = {}
    for item in found:
        for stage in item.stages:
            if len(stage.aspects) > 1:
                both = " and ".join(stage.aspects)
                ends = f"{brief(stage.before.spec.label)} and {brief(stage.after.spec.label)}"
                reasons[f"{both} apart between {ends}, since no cell in between was measured"] = None
            if stage.aspects != ("batch",):
                lacking |= {
                    brief(cell.spec.label): None for cell in (stage.before, stage.after) if cell.profile is None
                }
    if lacking:
        shown = ", ".join(list(lacking)[:_TOLD]) + (f" and {len(lacking) - _TOLD} more" if len(lacking) > _TOLD else "")
        reasons[f"how much of a step is fusion, kernels or memory where a profile is missing: {shown}"] = None
    listed = list(reasons)
    return listed[-_TOLD:] if len(listed) <= _TOLD else [*listed[: _TOLD - 1], listed[-1]]


# ------------------------------------------------------------------------------------------------ speed and accuracy


def throughput(scene: Scene) -> Section | None:
    """Images per second against the batch, a line for each precision on each backend."""
    charts: list[Chart] = []
    blocks: list[Block] = []
    groups = _models(scene.run.cells)
    for place, (model, group) in enumerate(groups.items()):
        series: dict[str, list[CellResult]] = {}
        several = len({(c.spec.backend, c.spec.providers, c.spec.device) for c in group}) > 1
        for cell in group:
            if cell.bench is not None and scene.speedups.ms(cell) is not None:
                name = _precision(cell) + (f", {_where(cell)}" if several else "")
                series.setdefault(clean(name), []).append(cell)
        if not any(len({c.bench.batch for c in line if c.bench}) > 1 for line in series.values()):
            continue
        which = f" of {clean(model)}" if len(groups) > 1 else ""
        lines = []
        for name, line in list(series.items())[:_LINES]:
            points = [
                Point(c.bench.batch, c.bench.images_per_s, "", "" if c.bench.stable else "unstable")
                for c in line
                if c.bench is not None
            ]
            once = len({p.x for p in points}) == len(points)
            lines.append(Line(name, tuple(points), "solid" if once else "points"))
        said = told(f"{line.name}, batch {p.x:g}: {number(p.y)} images/s" for line in lines for p in line.points)
        title = f"Throughput by batch size{which}"
        axis = "batch size (log scale)"
        charts.append(LineChart(f"throughput-{place}", title, said, axis, "images/s", tuple(lines), log_x=True))
        batches = sorted({p.x for line in lines for p in line.points})
        blocks.append(
            table(
                f"Images per second by batch size{which}"
                + (f", the first {_LINES} of {len(series)}" if len(series) > _LINES else ""),
                [
                    ("", [line.name for line in lines]),
                    *(
                        (
                            f"batch {batch:g}",
                            column([next((p.y for p in line.points if p.x == batch), None) for line in lines]),
                        )
                        for batch in batches
                    ),
                ],
                words=1,
            )
        )
    return Section("throughput", "Throughput against batch", (tuple(charts), *blocks)) if charts else None


def accuracy(scene: Scene) -> Section | None:
    """Accuracy against speed: which cells no other beats in both."""
    charts: list[Chart] = []
    blocks: list[Block] = []
    groups = _models(scene.run.cells)
    for place, (model, group) in enumerate(groups.items()):
        rated = [(cell, name, value) for cell in group if cell.bench for name, value in _metrics(cell).items()]
        names = {name for _, name, _ in rated}
        if len(rated) < 2 or len(names) > 1:
            continue
        metric = names.pop()
        which = f" of {clean(model)}" if len(groups) > 1 else ""
        points = [
            (cell, Point(cell.bench.images_per_s, value, str(index)))
            for index, (cell, _, value) in enumerate(rated, 1)
            if cell.bench is not None
        ]
        known = [p for cell, p in points if doubt(cell) is None]
        front = [p for p in known if not any(_beats(q, p) for q in known)]
        series: dict[str, list[Point]] = {}
        for cell, p in points:
            series.setdefault(clean(_precision(cell)), []).append(p)
        lines = tuple(Line(name, tuple(found), "points") for name, found in series.items())
        charts.append(
            Scatter(
                f"accuracy-{place}",
                f"{metric} against throughput{which}",
                told(
                    f"{p.label}, {clean(c.spec.label)}: {metric} {p.y:.4f} at {number(p.x)} images/s" for c, p in points
                ),
                "images/s",
                metric,
                lines,
                tuple(front),
            )
        )
        base = next((cell for cell in scene.speedups.baselines if cell.spec.model == model), None)
        reference = next((p.y for cell, p in points if cell is base), None)
        blocks.append(
            table(
                f"{metric} and speed{which}; marked: no other is better in both",
                [
                    ("", [p.label for _, p in points]),
                    ("cell", [clean(cell.spec.label) for cell, _ in points]),
                    (metric, [f"{p.y:.4f}" for _, p in points]),
                    (
                        "difference",
                        [difference(None if reference is None else p.y - reference, 4) for _, p in points],
                    ),
                    ("images/s", column([p.x for _, p in points])),
                    ("pictures", [f"{c.evaluated.images:,}" if c.evaluated else "–" for c, _ in points]),
                ],
                words=2,
                marked=[index for index, (_, p) in enumerate(points) if p in front],
            )
        )
    return Section("accuracy", "Accuracy against speed", (tuple(charts), *blocks)) if charts else None


def _beats(one: Point, other: Point) -> bool:
    return one.x >= other.x and one.y >= other.y and (one.x > other.x or one.y > other.y)


# ------------------------------------------------------------------------------------------------ the rest


def failures(scene: Scene) -> Section | None:
    """Cells that were not measured, with the reason and what to do."""
    rows = []
    for cell in scene.run.cells:
        if cell.state == "done":
            continue
        reason, _, remedy = (cell.reason or "").partition("hint: ")
        if cell.state == "waiting":
            reason, remedy = reason or "the run ended before it", remedy or "run the same command again"
        rows.append((cell.spec.label, _STATES[cell.state], _one(reason), remedy.strip() or "–"))
    if not rows:
        return None
    return Section(
        "failures",
        "Cells without a result",
        (words("Why, and what to do", ("cell", "", "reason", "remedy"), rows),),
    )


def _one(reason: str) -> str:
    text = " ".join(reason.split()).rstrip(";, ")
    return sentence(text) if text else "–"


def images(scene: Scene) -> Section | None:
    """Which list of images each cell saw."""
    lists: dict[str, list[str]] = {}
    for cell in scene.run.cells:
        if cell.images_digest:
            lists.setdefault(cell.images_digest, []).append(cell.spec.label)
    if not lists:
        return None
    everything = len(lists) == 1 and len(next(iter(lists.values()))) == len(scene.run.cells)
    rows = [(digest, "all cells" if everything else ", ".join(labels)) for digest, labels in lists.items()]
    return Section(
        "images",
        "Images",
        (words("Digest of the list of images, and the cells that saw it", ("digest", "cells"), rows),),
    )
