"""What made one cell of a run faster than another: factors along measured cells that differ in one aspect, and the section.

Each intermediate cell gives one factor, and the factors multiply to the total. Without an intermediate cell, two changes
share one factor, which is reported. Changes in kernels, copies and idle time come from the profiles of both cells, if any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from trt_engine.format import format_or_dash, format_percent, join_names
from trt_engine.records.profile import Category, ProfileReport
from trt_engine.records.sweep import CellResult
from trt_engine.reporting import tables
from trt_engine.reporting.document import Block, Notice, Paragraph, Section, Table

Aspect = Literal["batch", "backend", "precision", "settings"]
ASPECTS: dict[Aspect, str] = {
    "batch": "batch",
    "backend": "backend (fusion, kernels)",
    "precision": "precision",
    "settings": "settings",
}
"""The aspects with their column headings, in the order in which equally long paths change them."""
_MAX_EXPLAINED = 4  # speed-ups explained in text
_CATEGORY_GROUPS: dict[str, tuple[Category, ...]] = {
    "matrix work (precision, kernels)": ("matrix", "attention"),
    "element-wise, normalisation, reduction, control (fusion)": (
        "element-wise", "normalisation", "reduction", "control",
    ),
    "copies and reformats (memory)": ("copy", "reformat"),
    "other kernels": ("other",),
}  # fmt: skip


def unreliable_reason(cell: CellResult) -> str | None:
    """Why a cell's speed is unreliable, `ran in fp32` or `not stable`; None if reliable."""
    if cell.compute_dtype is not None:
        return f"ran in {cell.compute_dtype}"
    return None if is_stable(cell) else "not stable"


def is_stable(cell: CellResult) -> bool:
    """False for a cell whose measurement is unstable: no factor is worked out from it."""
    return cell.bench is None or cell.bench.stable


@dataclass(frozen=True, slots=True)
class Speedup:
    """One cell against another: against its baseline, or one step on the way from there."""

    base: CellResult
    other: CellResult
    aspects: tuple[Aspect, ...]
    """Changed aspects; several in a step where no intermediate cell was measured."""
    factor: float
    """Time per image of `base` / `other`."""
    steps: tuple[Speedup, ...] = ()
    """From cell to cell; none in a step itself."""

    @property
    def unreliable(self) -> bool:
        return any(unreliable_reason(cell) for cell in (self.base, self.other))

    @property
    def attributable(self) -> bool:
        """False for a change of precision with an unreliable cell."""
        return "precision" not in self.aspects or not self.unreliable


class Speedups:
    """Compares every cell of a run with the baseline of its model; pairs with an unstable cell have no factor."""

    def __init__(self, cells: Iterable[CellResult], baseline: str | None = None) -> None:
        self.cells = tuple(cells)
        self._ms = {id(cell): ms for cell in self.cells if (ms := _ms_per_image(cell)) is not None}
        groups = tables.group_by((cell for cell in self.cells if id(cell) in self._ms), lambda cell: cell.spec.model)
        self.baselines = tuple(
            next((cell for cell in group if cell.spec.label == baseline), group[0]) for group in groups.values()
        )
        self.unstable: list[tuple[CellResult, CellResult]] = []  # baseline and cell of the pairs without a factor
        self.explanations = tuple(
            found for base in self.baselines for found in self._explain_group(base, groups[base.spec.model])
        )

    def ms(self, cell: CellResult) -> float | None:
        """Mean compute time per image in ms; None without a complete measurement."""
        return self._ms.get(id(cell))

    def _explain_group(self, base: CellResult, group: Iterable[CellResult]) -> Iterator[Speedup]:
        """Explain each cell of the model measured under the baseline's protocol."""
        comparable = [
            cell for cell in group if cell.bench and base.bench and cell.bench.protocol == base.bench.protocol
        ]
        places = _aspect_values(comparable)
        reliable: dict[tuple[str, ...], CellResult] = {}
        for cell in comparable:
            if not unreliable_reason(cell):  # an unreliable intermediate cell would falsify two factors
                reliable.setdefault(tuple(places[id(cell)].values()), cell)
        for other in comparable:
            if other is base:
                continue
            if not (is_stable(base) and is_stable(other)):
                self.unstable.append((base, other))
                continue
            start, goal = places[id(base)], places[id(other)]
            cells = reliable | {tuple(start.values()): base, tuple(goal.values()): other}
            changed = tuple(name for name in ASPECTS if start[name] != goal[name])
            ways = (self._path(order, start, goal, cells) for order in permutations(changed))
            yield self._pair(base, other, changed, max(ways, key=len))

    def _path(
        self,
        order: Iterable[Aspect],
        start: Mapping[Aspect, str],
        goal: Mapping[Aspect, str],
        cells: Mapping[tuple[str, ...], CellResult],
    ) -> tuple[Speedup, ...]:
        """Steps that change the aspects in this order, by way of each cell that was measured."""
        at, before = dict(start), cells[tuple(start.values())]
        changed: list[Aspect] = []
        steps = []
        for name in order:
            at[name] = goal[name]
            changed.append(name)
            if (cell := cells.get(tuple(at.values()))) is not None:
                steps.append(self._pair(before, cell, tuple(one for one in ASPECTS if one in changed)))
                before, changed = cell, []
        return tuple(steps)

    def _pair(
        self, base: CellResult, other: CellResult, aspects: tuple[Aspect, ...], steps: tuple[Speedup, ...] = ()
    ) -> Speedup:
        return Speedup(base, other, aspects, self._ms[id(base)] / self._ms[id(other)], steps)


def _ms_per_image(cell: CellResult) -> float | None:
    if cell.bench is None or not cell.bench.complete or cell.bench.batch < 1:
        return None
    summary = cell.bench.compute_summary()
    return summary.mean / cell.bench.batch if summary is not None and summary.mean > 0 else None


def _aspect_values(cells: Iterable[CellResult]) -> dict[int, dict[Aspect, str]]:
    """The aspect values of each cell. Settings determined by the precision or the backend (a calibration, a workspace)
    count as part of it."""
    places: dict[int, dict[Aspect, str]] = {}
    for cell in cells:
        spec = cell.spec
        assert cell.bench is not None
        places[id(cell)] = {
            "batch": str(cell.bench.batch),
            "backend": json.dumps([spec.backend, cell.bench.device, list(spec.providers)]),
            "precision": json.dumps([spec.precision, spec.source if spec.prequantized else ""]),
            "settings": json.dumps(spec.settings, sort_keys=True, default=str),
        }
    owners: tuple[Aspect, ...] = ("precision", "backend")
    for owner in owners:
        pairs = {(place[owner], place["settings"]) for place in places.values()}
        if len(pairs) == len({value for value, _ in pairs}):
            return {which: place | {"settings": ""} for which, place in places.items()}
    return places


# ------------------------------------------------------------------------------------------------ the section


def speedups_section(speedups: Speedups) -> Section | None:
    """Each cell's speed-up over the baseline, split by batch, backend and precision, with profile changes."""
    found = speedups.explanations
    left_out = _left_out(speedups.unstable)
    if not found:
        return Section("speedup", "The speed-up explained", left_out) if left_out else None
    stages = [stage for item in found for stage in item.steps]
    columns: tables.Columns = [
        ("cell", [item.other.spec.label for item in found]),
        *tables.varying_columns([("against", [item.base.spec.label for item in found])]),
    ]
    lead = len(columns)
    columns.append(("faster", [tables.format_factor(item.factor) for item in found]))
    for name, label in ASPECTS.items():
        if any(stage.aspects == (name,) for stage in stages):
            columns.append((f"by {label}", [tables.format_factor(_aspect_factor(item, name)) for item in found]))
    if any(len(stage.aspects) > 1 for stage in stages):
        columns.append(("not separable", [_mixed_factors(item) or "–" for item in found]))
    sizes = [(item.base.engine_bytes, item.other.engine_bytes) for item in found]
    if any(base and other for base, other in sizes):
        smaller = [tables.format_factor(base / other if base and other else None) for base, other in sizes]
        columns.append(("engine smaller", smaller))
    caption = "How many times less time an image takes, split where a cell in between was measured"
    ordered = sorted(found, key=lambda item: (item.unreliable, -abs(item.factor - 1)))
    steps = {(stage.base.spec.label, stage.other.spec.label): stage for item in ordered for stage in item.steps}
    moved = [table for stage in steps.values() if (table := _delta_table(stage)) is not None]
    blocks: list[Block] = [
        tables.make_table(caption, columns, words=lead),
        *(Paragraph(_explain_speedup(speedups, item)) for item in ordered[:_MAX_EXPLAINED]),
        *moved[:_MAX_EXPLAINED],
        *left_out,
    ]
    if missing := _unexplained(stages):
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
        tables.shorten_label(cell.spec.label) + (" (baseline)" if cell is base else "")
        for base, other in pairs
        for cell in (base, other)
        if not is_stable(cell)
    )
    text = f"No factor is given where one of the two is not stable: {join_names(list(cells), _MAX_EXPLAINED)}."
    return (Notice(text, "info"),) if cells else ()


def _mixed_factors(item: Speedup) -> str:
    mixed = (stage for stage in item.steps if len(stage.aspects) > 1 and stage.attributable)
    return ", ".join(f"{tables.format_factor(stage.factor)} {' and '.join(stage.aspects)}" for stage in mixed)


def _aspect_factor(item: Speedup, aspect: Aspect) -> float | None:
    return next((stage.factor for stage in item.steps if stage.aspects == (aspect,) and stage.attributable), None)


def _explain_speedup(speedups: Speedups, item: Speedup) -> str:
    """One sentence for the total, then its steps."""
    before, after = speedups.ms(item.base), speedups.ms(item.other)
    slower = f"{tables.format_factor(1 / item.factor)} slower than"
    faster = f"{tables.format_factor(item.factor)} the speed of" if item.factor >= 1 else slower
    said = f"{tables.shorten_label(item.other.spec.label)}: {faster} {tables.shorten_label(item.base.spec.label)}"
    said += f" ({format_or_dash(before)} to {format_or_dash(after)} ms per image)."
    why = []
    for cell in (item.base, item.other):
        ran = f"ran in {cell.compute_dtype}, not in {cell.spec.precision}" if cell.compute_dtype else "is not stable"
        why += [f"{tables.shorten_label(cell.spec.label)} {ran}"] if unreliable_reason(cell) else []
    if why:
        said += f" But {' and '.join(why)}."
    if len(item.steps) > 1:
        said += " " + ", then ".join(_step_phrase(stage) for stage in item.steps) + "."
    return said


def _step_phrase(stage: Speedup) -> str:
    what = " and ".join(stage.aspects)
    if stage.aspects == ("batch",) and stage.base.bench and stage.other.bench:
        what = f"batch {stage.base.bench.batch} to {stage.other.bench.batch}"
    if stage.aspects == ("precision",):
        what = f"{tables.precision_label(stage.base)} to {tables.precision_label(stage.other)}"
    if stage.aspects == ("backend",):
        what = f"{tables.backend_label(stage.base.spec)} to {tables.backend_label(stage.other.spec)}"
    return f"{tables.format_factor(stage.factor)} by {what}"


def _delta_table(stage: Speedup) -> Table | None:
    """Profile changes of a step; None where one profile is missing."""
    if stage.base.profile is None or stage.other.profile is None:
        return None
    caption = f"What moved from {stage.base.spec.label} to {stage.other.spec.label}; times in ms per image"
    rows = tuple(profile_changes(stage.base.profile, stage.other.profile))
    return Table(caption, ("", "before", "after", ""), rows, frozenset((0, 3)))


def profile_changes(before: ProfileReport, after: ProfileReport) -> Iterator[tuple[str, str, str, str]]:
    """Rows of name, before, after and share of the difference; times per image. Categories are compared where both profiles
    have kernels, or neither has."""
    a, b = before.time_breakdown, after.time_breakdown
    wall = (a.wall_ms / before.batch, b.wall_ms / after.batch)
    saved = wall[0] - wall[1]

    def row(what: str, pair: tuple[float, float]) -> tuple[str, str, str, str]:
        """With the share of the difference, where there is one."""
        part = (pair[0] - pair[1]) / saved if abs(saved) >= 0.01 * wall[0] else 0.0
        share = f"{format_percent(part)} of the difference".replace("-", "−") if abs(part) >= 0.005 else ""
        return (what, format_or_dash(pair[0]), format_or_dash(pair[1]), share)

    if a.kernels is not None and b.kernels is not None:
        fewer = round(a.kernels - b.kernels)
        said = f"{abs(fewer):,} {'fewer' if fewer > 0 else 'more'}" if fewer else "as many"
        yield ("kernels in one inference (fusion)", format_or_dash(a.kernels), format_or_dash(b.kernels), said)
    if before.layers and after.layers:
        yield ("layers (fusion)", f"{len(before.layers.rows):,}", f"{len(after.layers.rows):,}", "")
    if bool(before.kernels) == bool(after.kernels):
        times = [{one.category: one.ms / side.batch for one in side.categories if one.ms} for side in (before, after)]
        for what, names in _CATEGORY_GROUPS.items():
            if any(name in side for side in times for name in names):
                one, other = (sum(side.get(name, 0.0) for name in names) for side in times)
                yield row(what, (one, other))
        rest = wall[0] - sum(times[0].values()), wall[1] - sum(times[1].values())
        if any(times) and min(rest) >= 0:
            yield row("outside of them", rest)
    for what, fields in (
        ("copies to and from the device", ("h2d_ms", "d2h_ms")),
        ("device idle, profiled", ("idle_ms",)),
        ("launching on the host, profiled", ("launch_ms",)),
    ):
        values = [[ms for name in fields if (ms := getattr(side, name)) is not None] for side in (a, b)]
        if all(values):
            yield (
                what,
                format_or_dash(sum(values[0]) / before.batch),
                format_or_dash(sum(values[1]) / after.batch),
                "",
            )
    yield ("wall time", format_or_dash(wall[0]), format_or_dash(wall[1]), "")


def _unexplained(stages: Iterable[Speedup]) -> list[str]:
    """What the figures do not show."""
    reasons: dict[str, None] = {}
    lacking: dict[str, None] = {}
    for stage in stages:
        names = [tables.shorten_label(cell.spec.label) for cell in (stage.base, stage.other)]
        if len(stage.aspects) > 1:
            both = " and ".join(stage.aspects)
            reasons[f"{both} apart between {' and '.join(names)}, since no cell in between was measured"] = None
        if stage.aspects != ("batch",):
            lacking |= {
                name: None for name, cell in zip(names, (stage.base, stage.other), strict=True) if cell.profile is None
            }
    listed = list(reasons)
    if lacking:
        shown = join_names(list(lacking), _MAX_EXPLAINED)
        listed.append(f"how much of a step is fusion, kernels or memory where a profile is missing: {shown}")
    return listed if len(listed) <= _MAX_EXPLAINED else [*listed[: _MAX_EXPLAINED - 1], listed[-1]]
