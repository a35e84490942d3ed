"""Explain the speed-up between two cells of a run by factors along cells that differ in one aspect.

Only measured cells are used: each intermediate cell gives one factor, and the factors multiply to the total. Without an
intermediate cell, two changes share one factor, which is reported. Changes in kernels, copies and idle time come from the
profiles of both cells, if any.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trt_engine.records.profile import Category, ProfileReport
from trt_engine.records.sweep import CellResult

Aspect = Literal["batch", "backend", "precision", "settings"]
ASPECTS: tuple[Aspect, ...] = ("batch", "backend", "precision", "settings")


def unreliable_reason(cell: CellResult) -> str | None:
    """Why a cell's speed is unreliable, `ran in fp32` or `not stable`; None if reliable."""
    if cell.compute_dtype is not None:
        return f"ran in {cell.compute_dtype}"
    return None if is_stable(cell) else "not stable"


def is_stable(cell: CellResult) -> bool:
    """False for a cell whose measurement is unstable: no factor is worked out from it."""
    return cell.bench is None or cell.bench.stable


@dataclass(frozen=True, slots=True)
class SpeedupStep:
    """One step from cell to cell."""

    aspects: tuple[Aspect, ...]
    """Changed aspects; several if no intermediate cell was measured."""
    before: CellResult
    after: CellResult
    factor: float
    """Time per image before / after."""

    @property
    def unreliable(self) -> bool:
        return any(unreliable_reason(cell) for cell in (self.before, self.after))


@dataclass(frozen=True, slots=True)
class SpeedupExplanation:
    """One cell against the baseline."""

    base: CellResult
    other: CellResult
    factor: float
    steps: tuple[SpeedupStep, ...]

    @property
    def unreliable(self) -> bool:
        return any(unreliable_reason(cell) for cell in (self.base, self.other))


@dataclass(frozen=True, slots=True)
class ProfileDelta:
    """Profile differences of a step, per image."""

    wall_ms: tuple[float, float]
    categories: tuple[tuple[Category, float, float], ...]
    """Milliseconds before and after; empty if one profile has kernels and the other layers."""
    kernels: tuple[float, float] | None
    """Kernel launches per inference."""
    layers: tuple[int, int] | None
    transfers_ms: tuple[float, float] | None
    idle_ms: tuple[float, float] | None
    launch_ms: tuple[float, float] | None


class Speedups:
    """Compares every cell of a run with the baseline of its model; pairs with an unstable cell have no factor."""

    def __init__(self, cells: Iterable[CellResult], baseline: str | None = None) -> None:
        self.cells = tuple(cells)
        self._ms = {id(cell): ms for cell in self.cells if (ms := _ms_per_image(cell)) is not None}
        groups: dict[str, list[CellResult]] = {}
        for cell in self.cells:
            groups.setdefault(cell.spec.model, []).append(cell)
        self.baselines = tuple(
            base for group in groups.values() if (base := self.pick_baseline(group, baseline)) is not None
        )
        self.unstable: list[tuple[CellResult, CellResult]] = []  # baseline and cell of the pairs without a factor
        self.explanations = tuple(
            found for base in self.baselines for found in self._explain_group(base, groups[base.spec.model])
        )

    def ms(self, cell: CellResult) -> float | None:
        """Mean compute time per image in ms; None without a complete measurement."""
        return self._ms.get(id(cell))

    def pick_baseline(self, group: Iterable[CellResult], named: str | None) -> CellResult | None:
        """The baseline cell: the named one if measured, else the first measured one."""
        measured = [cell for cell in group if id(cell) in self._ms]
        return next((cell for cell in measured if cell.spec.label == named), measured[0] if measured else None)

    def _explain_group(self, base: CellResult, group: Iterable[CellResult]) -> Iterator[SpeedupExplanation]:
        """Explain each cell of the model measured under the baseline's protocol."""
        assert base.bench is not None  # it was measured
        rules = base.bench.protocol
        comparable = [cell for cell in group if id(cell) in self._ms and cell.bench and cell.bench.protocol == rules]
        places = _all_aspect_values(comparable)
        by_place: dict[tuple[str, ...], CellResult] = {}
        for cell in comparable:
            if unreliable_reason(cell):
                continue  # an unreliable intermediate cell would falsify two factors
            by_place.setdefault(_aspect_key(places[id(cell)]), cell)
        for other in comparable:
            if other is base:
                continue
            if is_stable(base) and is_stable(other):
                yield self._explain(base, other, places, by_place)
            else:
                self.unstable.append((base, other))

    def _explain(
        self,
        base: CellResult,
        other: CellResult,
        places: Mapping[int, dict[Aspect, str]],
        by_place: dict[tuple[str, ...], CellResult],
    ) -> SpeedupExplanation:
        start, goal = places[id(base)], places[id(other)]
        ends = {_aspect_key(start): base, _aspect_key(goal): other}
        differing = tuple(name for name in ASPECTS if start[name] != goal[name])
        path = _longest_path(start, goal, differing, ChainMap(ends, by_place))
        stages = tuple(
            SpeedupStep(aspects, before, after, self._ms[id(before)] / self._ms[id(after)])
            for (before, after), aspects in path
        )
        return SpeedupExplanation(base, other, self._ms[id(base)] / self._ms[id(other)], stages)


def _ms_per_image(cell: CellResult) -> float | None:
    if cell.bench is None or not cell.bench.complete or cell.bench.batch < 1:
        return None
    summary = cell.bench.compute_summary()
    return summary.mean / cell.bench.batch if summary is not None and summary.mean > 0 else None


def _aspect_values(cell: CellResult) -> dict[Aspect, str]:
    """The aspect values of a cell."""
    spec = cell.spec
    assert cell.bench is not None
    return {
        "batch": str(cell.bench.batch),
        "backend": json.dumps([spec.backend, cell.bench.device, list(spec.providers)]),
        "precision": json.dumps([spec.precision, spec.source if spec.prequantized else ""]),
        "settings": json.dumps(spec.settings, sort_keys=True, default=str),
    }


def _all_aspect_values(cells: Iterable[CellResult]) -> dict[int, dict[Aspect, str]]:
    """The aspect values of each cell. Settings determined by the precision or the backend (a calibration, a workspace)
    count as part of it."""
    places = {id(cell): _aspect_values(cell) for cell in cells}
    owners: tuple[Aspect, ...] = ("precision", "backend")
    for owner in owners:
        pairs = {(place[owner], place["settings"]) for place in places.values()}
        if len(pairs) == len({value for value, _ in pairs}):
            return {which: place | {"settings": ""} for which, place in places.items()}
    return places


def _aspect_key(place: Mapping[Aspect, str]) -> tuple[str, ...]:
    return tuple(place[name] for name in ASPECTS)


_Path = tuple[tuple[tuple[CellResult, CellResult], tuple[Aspect, ...]], ...]


def _longest_path(
    at: dict[Aspect, str],
    goal: dict[Aspect, str],
    left: tuple[Aspect, ...],
    cells: Mapping[tuple[str, ...], CellResult],
) -> _Path:
    """The longest path of cells; ties change the batch first and the precision late."""
    if not left:
        return ()
    best: _Path = (((cells[_aspect_key(at)], cells[_aspect_key(goal)]), left),)
    for many in range(1, len(left)):
        for chosen in _combinations(left, many):
            stop = at | {name: goal[name] for name in chosen}
            if _aspect_key(stop) not in cells:
                continue
            rest = _longest_path(stop, goal, tuple(name for name in left if name not in chosen), cells)
            way: _Path = (((cells[_aspect_key(at)], cells[_aspect_key(stop)]), chosen), *rest)
            if len(way) > len(best):
                best = way
    return best


def _combinations(names: tuple[Aspect, ...], many: int) -> Iterable[tuple[Aspect, ...]]:
    if many == 1:
        return ((name,) for name in names)
    return ((names[i], *rest) for i in range(len(names)) for rest in _combinations(names[i + 1 :], many - 1))


def profile_delta(before: ProfileReport | None, after: ProfileReport | None) -> ProfileDelta | None:
    """Differences between two profiles; None if one is missing."""
    if before is None or after is None:
        return None
    a, b = before.time_breakdown, after.time_breakdown
    same = bool(before.kernels) == bool(after.kernels)

    def pair(one: float | None, two: float | None) -> tuple[float, float] | None:
        return None if one is None or two is None else (one / before.batch, two / after.batch)

    shares = {item.category: item.ms for item in before.categories}
    later = {item.category: item.ms for item in after.categories}
    names = [name for name in dict.fromkeys([*shares, *later]) if shares.get(name) or later.get(name)]
    layers = (before.layers, after.layers)
    transfers = pair(_add_optional(a.h2d_ms, a.d2h_ms), _add_optional(b.h2d_ms, b.d2h_ms))
    return ProfileDelta(
        wall_ms=(a.wall_ms / before.batch, b.wall_ms / after.batch),
        categories=tuple(
            (name, shares.get(name, 0.0) / before.batch, later.get(name, 0.0) / after.batch) for name in names
        )
        if same
        else (),
        kernels=(a.kernels, b.kernels) if a.kernels is not None and b.kernels is not None else None,
        layers=(len(layers[0].rows), len(layers[1].rows)) if layers[0] and layers[1] else None,
        transfers_ms=transfers,
        idle_ms=pair(a.idle_ms, b.idle_ms),
        launch_ms=pair(a.launch_ms, b.launch_ms),
    )


def _add_optional(one: float | None, two: float | None) -> float | None:
    return None if one is None and two is None else (one or 0.0) + (two or 0.0)
