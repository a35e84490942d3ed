"""No fusion fails or spoils a build: one that raises is left out with its name, and random graphs keep their numbers."""

from __future__ import annotations

import pytest

import trt_engine.graph.fusion as fusion

from .attention_graphs import Builder, check_same, fuse, operators, self_attention, tokens
from .fuzz_oracle import FAULTS, judge
from .random_graphs import FAMILIES
from .test_layer_norm import rms_norm


def test_a_fusion_that_fails_leaves_its_part_of_the_graph_with_a_warning_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: fusion.FusionGraph, node: object, *, pack: bool) -> str:
        graph.builder.add("Neg", ["x"], "half_written")
        raise ValueError("cannot reshape array of size 8 into shape (16)")

    monkeypatch.setattr(fusion, "fuse_attention", broken)
    b = Builder()
    model = b.model(rms_norm(b, self_attention(b, tokens(b))))
    fused = fuse(model)
    assert fused.counts == {"rms_norm": 1}
    (warning,) = fused.warnings
    assert "Softmax" in warning and "attention" in warning and "cannot reshape" in warning
    assert "Softmax" in operators(fused) and "Neg" not in operators(fused)
    check_same(model, fused)


def test_a_fusion_that_is_left_out_stays_and_others_are_made() -> None:
    b = Builder()
    model = b.model(rms_norm(b, self_attention(b, tokens(b))))
    left = fusion.fuse_model(model, fusion.Path(), on_gpu=True, left_out=["attention"])
    assert left.counts == {"rms_norm": 1} and "left out" in next(iter(left.unfused.values()))
    check_same(model, left)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_graphs_give_the_same_numbers_fused(family: str) -> None:
    verdicts = [(seed, judge(family, seed, on_gpu=on_gpu)) for seed in range(5000, 5007) for on_gpu in (False, True)]
    assert not [(seed, found) for seed, found in verdicts if found.verdict in FAULTS]
    assert any(found.counts for _, found in verdicts)
