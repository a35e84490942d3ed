"""Why one cell of a run is faster than another: the factor split along cells that differ in one thing at a time.

Nothing is estimated. Where a cell between the two was measured, its step has a factor of its own, and the factors multiply
to the whole; where none was, two changes share one factor, and that is said. What a step did to kernels, copies and idle
time comes from profiles of both ends, where there are any.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trt_engine.cells import CellResult
from trt_engine.traces import Category, ProfileReport

__all__ = ["Aspect", "Explained", "Moved", "Speedups", "Stage", "doubt", "moved"]

Aspect = Literal["batch", "backend", "precision", "settings"]
ASPECTS: tuple[Aspect, ...] = ("batch", "backend", "precision", "settings")


def doubt(cell: CellResult) -> str | None:
    """Why nothing is concluded from how fast a cell is, `ran in fp32` or `not stable`; None where something can be."""
    if cell.ran_in is not None:
        return f"ran in {cell.ran_in}"
    return "not stable" if cell.bench is not None and not cell.bench.stable else None


@dataclass(frozen=True, slots=True)
class Stage:
    """One step from cell to cell."""

    aspects: tuple[Aspect, ...]
    """What changes in it; more than one where no cell lies between."""
    before: CellResult
    after: CellResult
    factor: float
    """How many times less time an image takes after it."""

    @property
    def doubtful(self) -> bool:
        return any(doubt(cell) for cell in (self.before, self.after))


@dataclass(frozen=True, slots=True)
class Explained:
    """One cell against the baseline."""

    base: CellResult
    other: CellResult
    factor: float
    stages: tuple[Stage, ...]

    @property
    def doubtful(self) -> bool:
        return any(doubt(cell) for cell in (self.base, self.other))


@dataclass(frozen=True, slots=True)
class Moved:
    """What profiles of both ends say a step did, per image."""

    wall_ms: tuple[float, float]
    categories: tuple[tuple[Category, float, float], ...]
    """Milliseconds before and after; empty where one end counts kernels and the other layers."""
    kernels: tuple[float, float] | None
    """Launched in one inference."""
    layers: tuple[int, int] | None
    transfers_ms: tuple[float, float] | None
    idle_ms: tuple[float, float] | None
    launch_ms: tuple[float, float] | None


class Speedups:
    """Every cell of a run against the baseline of its model, worked out once."""

    def __init__(self, cells: Iterable[CellResult], baseline: str | None = None) -> None:
        self.cells = tuple(cells)
        self._ms = {id(cell): ms for cell in self.cells if (ms := _ms_per_image(cell)) is not None}
        groups: dict[str, list[CellResult]] = {}
        for cell in self.cells:
            groups.setdefault(cell.spec.model, []).append(cell)
        self.baselines = tuple(
            base for group in groups.values() if (base := self.baseline_of(group, baseline)) is not None
        )
        self.explained = tuple(
            found for base in self.baselines for found in self._against(base, groups[base.spec.model])
        )

    def ms(self, cell: CellResult) -> float | None:
        """Mean compute time over the batch; None where nothing whole was measured."""
        return self._ms.get(id(cell))

    def baseline_of(self, group: Iterable[CellResult], named: str | None) -> CellResult | None:
        """The cell the others of its model are held against: the one named, if it was measured, else the first that was."""
        measured = [cell for cell in group if id(cell) in self._ms]
        return next((cell for cell in measured if cell.spec.label == named), measured[0] if measured else None)

    def _against(self, base: CellResult, group: Iterable[CellResult]) -> Iterator[Explained]:
        """How each of the model's cells came to its speed; those under another protocol do not compare."""
        assert base.bench is not None  # it was measured
        rules = base.bench.protocol
        comparable = [cell for cell in group if id(cell) in self._ms and cell.bench and cell.bench.protocol == rules]
        places = _places(comparable)
        by_place: dict[tuple[str, ...], CellResult] = {}
        for cell in comparable:
            if doubt(cell):
                continue  # a stop that is not what it says, or not known, would falsify two factors
            by_place.setdefault(_key(places[id(cell)]), cell)
        for other in comparable:
            if other is not base:
                yield self._explain(base, other, places, by_place)

    def _explain(
        self,
        base: CellResult,
        other: CellResult,
        places: Mapping[int, dict[Aspect, str]],
        by_place: dict[tuple[str, ...], CellResult],
    ) -> Explained:
        start, goal = places[id(base)], places[id(other)]
        ends = {_key(start): base, _key(goal): other}
        differing = tuple(name for name in ASPECTS if start[name] != goal[name])
        path = _longest(start, goal, differing, ChainMap(ends, by_place))
        stages = tuple(
            Stage(aspects, before, after, self._ms[id(before)] / self._ms[id(after)])
            for (before, after), aspects in path
        )
        return Explained(base, other, self._ms[id(base)] / self._ms[id(other)], stages)


def _ms_per_image(cell: CellResult) -> float | None:
    if cell.bench is None or not cell.bench.complete or cell.bench.batch < 1:
        return None
    summary = cell.bench.compute()
    return summary.mean / cell.bench.batch if summary is not None and summary.mean > 0 else None


def _place(cell: CellResult) -> dict[Aspect, str]:
    """Where a cell stands in the matrix."""
    spec = cell.spec
    assert cell.bench is not None
    return {
        "batch": str(cell.bench.batch),
        "backend": json.dumps([spec.backend, cell.bench.device, list(spec.providers)]),
        "precision": json.dumps([spec.precision, spec.source if spec.own_file else ""]),
        "settings": json.dumps(spec.settings, sort_keys=True, default=str),
    }


def _places(cells: Iterable[CellResult]) -> dict[int, dict[Aspect, str]]:
    """Where each cell stands. Settings that go with the precision or the backend (a calibration, a workspace) are no
    choice of their own and count as part of it."""
    places = {id(cell): _place(cell) for cell in cells}
    owners: tuple[Aspect, ...] = ("precision", "backend")
    for owner in owners:
        pairs = {(place[owner], place["settings"]) for place in places.values()}
        if len(pairs) == len({value for value, _ in pairs}):
            return {which: place | {"settings": ""} for which, place in places.items()}
    return places


def _key(place: Mapping[Aspect, str]) -> tuple[str, ...]:
    return tuple(place[name] for name in ASPECTS)


_Path = tuple[tuple[tuple[CellResult, CellResult], tuple[Aspect, ...]], ...]


def _longest(
    at: dict[Aspect, str],
    goal: dict[Aspect, str],
    left: tuple[Aspect, ...],
    cells: Mapping[tuple[str, ...], CellResult],
) -> _Path:
    """The way with most stops; of equally long ones, the one that changes the batch first and the precision late."""
    if not left:
        return ()
    best: _Path = (((cells[_key(at)], cells[_key(goal)]), left),)
    for many in range(1, len(left)):
        for chosen in _choices(left, many):
            stop = at | {name: goal[name] for name in chosen}
            if _key(stop) not in cells:
                continue
            rest = _longest(stop, goal, tuple(name for name in left if name not in chosen), cells)
            way: _Path = (((cells[_key(at)], cells[_key(stop)]), chosen), *rest)
            if len(way) > len(best):
                best = way
    return best


def _choices(names: tuple[Aspect, ...], many: int) -> Iterable[tuple[Aspect, ...]]:
    if many == 1:
        return ((name,) for name in names)
    return ((names[i], *rest) for i in range(len(names)) for rest in _choices(names[i + 1 :], many - 1))


def moved(before: ProfileReport | None, after: ProfileReport | None) -> Moved | None:
    """What two profiles say changed between them; None where one is missing."""
    if before is None or after is None:
        return None
    a, b = before.split, after.split
    same = bool(before.kernels) == bool(after.kernels)

    def pair(one: float | None, two: float | None) -> tuple[float, float] | None:
        return None if one is None or two is None else (one / before.batch, two / after.batch)

    shares = {item.category: item.ms for item in before.categories}
    later = {item.category: item.ms for item in after.categories}
    names = [name for name in dict.fromkeys([*shares, *later]) if shares.get(name) or later.get(name)]
    layers = (before.layers, after.layers)
    transfers = pair(_sum(a.h2d_ms, a.d2h_ms), _sum(b.h2d_ms, b.d2h_ms))
    return Moved(
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


def _sum(one: float | None, two: float | None) -> float | None:
    return None if one is None and two is None else (one or 0.0) + (two or 0.0)
