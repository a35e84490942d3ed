"""The largest set of layers within a budget, from what each costs alone: no file, no model, only a way to measure.

Sorted by cost, then the longest prefix that keeps the budget (bisection), then the rest one by one, then the whole dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Group", "Measure", "Part", "Selection", "Stage", "grouped", "most_trials", "select"]

log = logging.getLogger(__name__)

Part = Literal["subset", "whole"]
Stage = Literal["baseline", "all", "alone", "prefix", "one more", "verified"]
_REFUSED_IN_A_ROW = 4
"""After so many layers that would break the budget, the costlier ones are not tried."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are quantised together or not at all."""

    nodes: tuple[str, ...]
    macs: float
    """Their share of the model's multiply-adds, 0 to 1."""


class Measure(Protocol):
    """The metric, larger is better, with these groups quantised and nothing else."""

    def __call__(self, groups: Sequence[Group], part: Part, stage: Stage) -> float: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """What may be quantised, and what each group costs."""

    chosen: tuple[Group, ...]
    drops: dict[Group, float]
    """Loss of the metric with this group alone, on the subset; empty when everything fits at once."""


def select(groups: Sequence[Group], measure: Measure, budget: float) -> Selection:
    """The largest set of groups found that costs no more than `budget` on the whole data; maybe none."""
    everything = tuple(groups)
    whole = measure((), "whole", "baseline")
    limit = whole - budget - _ROUNDING
    if measure(everything, "whole", "all") >= limit:
        return Selection(everything, {})
    base = measure((), "subset", "baseline")
    on_subset = base - budget - _ROUNDING
    drops = {group: base - measure((group,), "subset", "alone") for group in groups}
    order = sorted(groups, key=lambda group: (drops[group], -group.macs))
    count = _longest(len(order), lambda n: measure(order[:n], "subset", "prefix") >= on_subset)
    chosen, refused = order[:count], 0
    for group in order[count + 1 :]:  # the one at `count` broke the budget just now
        if refused == _REFUSED_IN_A_ROW:
            break
        if measure([*chosen, group], "subset", "one more") >= on_subset:
            chosen, refused = [*chosen, group], 0
        else:
            refused += 1
    count = _longest(len(chosen), lambda n: measure(chosen[:n], "whole", "verified") >= limit)
    if count < len(chosen):
        log.info("%d groups keep the budget on the subset, %d of them on everything", len(chosen), count)
    return Selection(tuple(chosen[:count]), drops)


def _longest(count: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `count` that fits, as far as bisection can tell; 0 fits without being asked."""
    if count and fits(count):
        return count
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def most_trials(groups: int) -> int:
    """How many measurements `select` needs at most, about."""
    return 3 + groups + 2 * (groups.bit_length() + 1) + _REFUSED_IN_A_ROW


def grouped(layers: Sequence[tuple[str, float]], most: int | None = None) -> list[Group]:
    """One group for each layer, or at most `most` groups of neighbours with about equal shares of the multiply-adds."""
    if most is None or most >= len(layers):
        return [Group((name,), macs) for name, macs in layers]
    total = sum(macs for _, macs in layers) or float(len(layers))
    even = not any(macs for _, macs in layers)
    made: list[list[tuple[str, float]]] = [[]]
    done = 0.0
    for index, (name, macs) in enumerate(layers):
        if made[-1] and len(made) < most:
            full = done >= total * len(made) / most
            needed = len(layers) - index <= most - len(made)  # as many layers left as groups
            if full or needed:
                made.append([])
        made[-1].append((name, macs))
        done += 1.0 if even else macs
    return [Group(tuple(name for name, _ in part), sum(macs for _, macs in part)) for part in made]
