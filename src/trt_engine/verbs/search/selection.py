"""Select the largest set of layers within an accuracy budget, given a function that measures a set.

Sorts layers by individual cost, bisects the longest prefix within the budget, tries the rest one by one, and verifies on
the whole dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

log = logging.getLogger(__name__)

DataPart = Literal["subset", "whole"]
Stage = Literal["baseline", "all", "alone", "prefix", "one more", "verified"]
_MAX_REJECTIONS = 4
"""Consecutive layers that exceed the budget before the search stops."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are quantized together."""

    nodes: tuple[str, ...]
    macs: float
    """Fraction of the model's MACs, 0 to 1."""


class MeasureGroups(Protocol):
    """Measures the metric (larger is better) with only these groups quantized."""

    def __call__(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> float: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups to quantize, and the cost of each."""

    chosen: tuple[LayerGroup, ...]
    drops: dict[LayerGroup, float]
    """Metric drop of each group alone, on the subset; empty if all groups fit together."""


def select(groups: Sequence[LayerGroup], measure: MeasureGroups, budget: float) -> Selection:
    """Find the largest set of groups within `budget` on the whole dataset; may be empty."""
    everything = tuple(groups)
    whole = measure((), "whole", "baseline")
    limit = whole - budget - _TOLERANCE
    if measure(everything, "whole", "all") >= limit:
        return Selection(everything, {})
    base = measure((), "subset", "baseline")
    on_subset = base - budget - _TOLERANCE
    drops = {group: base - measure((group,), "subset", "alone") for group in groups}
    order = sorted(groups, key=lambda group: (drops[group], -group.macs))
    count = _longest_prefix(len(order), lambda n: measure(order[:n], "subset", "prefix") >= on_subset)
    chosen, refused = order[:count], 0
    for group in order[count + 1 :]:  # the group at `count` exceeded the budget
        if refused == _MAX_REJECTIONS:
            break
        if measure([*chosen, group], "subset", "one more") >= on_subset:
            chosen, refused = [*chosen, group], 0
        else:
            refused += 1
    count = _longest_prefix(len(chosen), lambda n: measure(chosen[:n], "whole", "verified") >= limit)
    if count < len(chosen):
        log.info("%d groups keep the budget on the subset, %d of them on everything", len(chosen), count)
    return Selection(tuple(chosen[:count]), drops)


def _longest_prefix(count: int, fits: Callable[[int], bool]) -> int:
    """Bisect the largest n up to `count` that fits; 0 always fits."""
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


def max_trials(groups: int) -> int:
    """Approximate maximum number of measurements of `select`."""
    return 3 + groups + 2 * (groups.bit_length() + 1) + _MAX_REJECTIONS


def group_layers(layers: Sequence[tuple[str, float]], max_groups: int | None = None) -> list[LayerGroup]:
    """One group per layer, or at most `most` groups of neighbours with similar MACs."""
    if max_groups is None or max_groups >= len(layers):
        return [LayerGroup((name,), macs) for name, macs in layers]
    total = sum(macs for _, macs in layers) or float(len(layers))
    even = not any(macs for _, macs in layers)
    made: list[list[tuple[str, float]]] = [[]]
    done = 0.0
    for index, (name, macs) in enumerate(layers):
        if made[-1] and len(made) < max_groups:
            full = done >= total * len(made) / max_groups
            needed = len(layers) - index <= max_groups - len(made)  # as many layers left as groups
            if full or needed:
                made.append([])
        made[-1].append((name, macs))
        done += 1.0 if even else macs
    return [LayerGroup(tuple(name for name, _ in part), sum(macs for _, macs in part)) for part in made]
