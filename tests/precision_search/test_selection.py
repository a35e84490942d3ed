"""The largest set of layers within a budget, found with as few measurements as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.verbs.search.selection import DataPart, LayerGroup, Stage, group_layers, max_trials, select


def layers(count: int) -> list[LayerGroup]:
    return [LayerGroup((f"layer{index}",), 1 / count) for index in range(count)]


class Planted:
    """A model whose metric is 0.9 less what its quantised layers cost; the whole data may cost more."""

    def __init__(self, costs: Mapping[str, float], *, whole: float = 1.0) -> None:
        self.costs, self.whole = costs, whole
        self.asked: list[tuple[frozenset[str], DataPart, Stage]] = []

    def __call__(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> float:
        names = frozenset(name for group in groups for name in group.nodes)
        self.asked.append((names, part, stage))
        cost = sum(self.costs.get(name, 0.0) for name in names)
        return 0.9 - cost * (self.whole if part == "whole" else 1.0)


def names(groups: Sequence[LayerGroup]) -> set[str]:
    return {name for group in groups for name in group.nodes}


@pytest.mark.parametrize("bad", range(12))
def test_the_one_layer_that_ruins_accuracy_is_found_wherever_it_stands_and_only_it_stays(bad: int) -> None:
    found = select(layers(12), Planted({f"layer{bad}": 0.5}), 0.01)
    assert names(found.chosen) == {f"layer{index}" for index in range(12)} - {f"layer{bad}"}
    assert max(found.drops, key=lambda group: found.drops[group]).nodes == (f"layer{bad}",)


def test_many_small_costs_are_added_up_and_the_cheapest_taken() -> None:
    costs = {f"layer{index}": 0.001 * (index + 1) for index in range(8)}
    found = select(layers(8), Planted(costs), 0.0101)
    assert names(found.chosen) == {"layer0", "layer1", "layer2", "layer3"}  # 1 + 2 + 3 + 4 thousandths


def test_a_layer_that_harms_only_beside_others_does_not_stop_the_ones_after_it() -> None:
    class Together(Planted):
        def __call__(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> float:
            loss = 0.5 if {"layer2", "layer0"} <= names(groups) else 0.0
            return super().__call__(groups, part, stage) - loss

    costs = {f"layer{index}": 1e-5 * index for index in range(10)}
    found = select(layers(10), Together(costs), 0.01)
    assert names(found.chosen) == {f"layer{index}" for index in range(10)} - {"layer2"}


def test_what_only_the_subset_forgives_is_taken_back_on_the_whole_data() -> None:
    costs = {f"layer{index}": 0.001 * (index + 1) for index in range(8)}
    planted = Planted(costs, whole=2.0)
    found = select(layers(8), planted, 0.0101)
    assert names(found.chosen) == {"layer0", "layer1"}  # 2 x (1 + 2 + 3) thousandths would be too much
    assert (frozenset(names(found.chosen)), "whole", "verified") in planted.asked


@given(
    costs=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.02, 0.3]), min_size=1, max_size=24),
    budget=st.sampled_from([0.0, 0.001, 0.01, 0.1, 10.0]),
    whole=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_the_answer_keeps_the_budget_and_the_count_of_measurements(
    costs: list[float], budget: float, whole: float
) -> None:
    planted = Planted({f"layer{index}": cost for index, cost in enumerate(costs)}, whole=whole)
    found = select(layers(len(costs)), planted, budget)
    assert sum(costs[int(name[5:])] for name in names(found.chosen)) * whole <= budget + 1e-8
    free = {f"layer{index}" for index, cost in enumerate(costs) if not cost}
    assert free <= names(found.chosen)
    asked = {(which, part) for which, part, _ in planted.asked}
    assert len(asked) <= max_trials(len(costs)) + len(costs)  # the last pass tries on while layers fit


def test_of_layers_that_cost_the_same_the_one_with_more_work_comes_first() -> None:
    both = [LayerGroup(("small",), 0.1), LayerGroup(("large",), 0.9)]
    found = select(both, Planted({"small": 0.006, "large": 0.006}), 0.01)
    assert names(found.chosen) == {"large"}


def test_layers_are_told_apart_unless_fewer_groups_are_asked_for() -> None:
    weights = [("a", 0.4), ("b", 0.1), ("c", 0.1), ("d", 0.2), ("e", 0.2)]
    assert [group.nodes for group in group_layers(weights)] == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert [group.nodes for group in group_layers(weights, 2)] == [("a", "b"), ("c", "d", "e")]
    assert [group.nodes for group in group_layers(weights, 1)] == [("a", "b", "c", "d", "e")]


@given(
    macs=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    most=st.integers(1, 30),
)
def test_groups_hold_every_layer_once_in_order_and_are_as_many_as_asked(macs: list[float], most: int) -> None:
    made = group_layers([(str(index), share) for index, share in enumerate(macs)], most)
    assert [name for group in made for name in group.nodes] == [str(index) for index in range(len(macs))]
    assert len(made) == min(most, len(macs))
