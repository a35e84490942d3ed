"""No fusion fails or spoils a build: one that raises is left out with its name, and random graphs keep their numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import trt_engine.graph.fusion as fusion

from . import test_attention as attention
from . import test_layer_norm as layer_norm
from . import test_norms_and_activations as norms
from . import test_patch_embedding as patches
from . import test_rotary as rotary
from .attention_graphs import HEADS, SIZE, WIDTH, Builder, check_same, fuse, operators, self_attention, tokens
from .fuzz_oracle import FAULTS, judge
from .random_graphs import FAMILIES


def test_a_fusion_that_fails_leaves_its_part_of_the_graph_with_a_warning_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: fusion.FusionGraph, node: object, *, pack: bool) -> None:
        graph.builder.add("Neg", ["x"], "half_written")
        raise ValueError("cannot reshape array of size 8 into shape (16)")

    monkeypatch.setattr(fusion, "fuse_attention", broken)
    b = Builder()
    model = b.model(layer_norm.rms_norm(b, self_attention(b, tokens(b))))
    fused = fuse(model)
    assert fused.counts == {"rms_norm": 1}
    (warning,) = fused.warnings
    assert "Softmax" in warning and "attention" in warning and "cannot reshape" in warning
    assert "Softmax" in operators(fused) and "Neg" not in operators(fused)
    check_same(model, fused)


def test_a_fusion_that_is_left_out_stays_and_others_are_made() -> None:
    b = Builder()
    model = b.model(layer_norm.rms_norm(b, self_attention(b, tokens(b))))
    left = fusion.fuse_model(model, fusion.Path(), on_gpu=True, left_out=["attention"])
    assert left.counts == {"rms_norm": 1} and "left out" in left.unfused[0].reason
    check_same(model, left)


def standard_with_shared_keys(b: Builder) -> tuple[str, ...]:
    x = tokens(b)
    query, key, value = b.linear(x, WIDTH, WIDTH), b.linear(x, WIDTH, SIZE), b.linear(x, WIDTH, SIZE)
    return (b.add("Attention", query, key, value, q_num_heads=HEADS, kv_num_heads=1),)


def wide_bias(b: Builder) -> tuple[str, ...]:
    return (norms.erf(b, b.add("Add", tokens(b), b.weight(1, 1, WIDTH))),)


NEAR_MISSES = [
    ("attention", attention.weak_mask, "Softmax", "become -3, expected -10000 or less"),
    ("attention", attention.wrong_axis, "Softmax", "over dimension 2 of rank 4"),
    ("attention", attention.capped_scores, "Softmax", "pass through Tanh"),
    ("attention", standard_with_shared_keys, "Attention", "queries share keys"),
    ("rotary_embedding", rotary.no_sign, "Add", "no rotation"),
    ("rotary_embedding", rotary.tables_of_each_head, "Add", "['batch', 3, 'tokens', 4]"),
    ("rotary_embedding", rotary.stored_halves_differ, "Add", "the same for both columns of a pair"),
    ("layer_norm", layer_norm.two_axes, "Add", "over the axes [1, 2] of rank 3"),
    ("layer_norm", layer_norm.epsilon_of_each_column, "Add", "no scalar constant"),
    ("layer_norm", layer_norm.variance_is_an_output, "Add", "read elsewhere"),
    ("patch_embedding", patches.left_over, "Conv", "8 x 19, expected known multiples of 4 x 6"),
    ("patch_embedding", patches.channels_first, "Conv", "channels last"),
    ("gelu", norms.other_root, "Erf", "x times 0.5"),
    ("fast_gelu", lambda b: (norms.tanh_before(b, tokens(b), cube=0.05),), "Tanh", "0.05, expected 0.797885 and 0.044715"),
    ("quick_gelu", norms.shared_gate, "Sigmoid", "read elsewhere"),
    ("bias_gelu", wide_bias, "Gelu", "[1, 1, 12], expected [12]"),
    ("skip_layer_norm", norms.computed_scale, "LayerNormalization", "not constants of 12 elements"),
]  # fmt: skip
"""Name of the fusion, what is nearly it, its anchor, words of the reason."""


@pytest.mark.parametrize(("name", "form", "operator", "words"), NEAR_MISSES)
def test_a_near_miss_of_each_fusion_has_its_node_and_what_was_found(
    name: str, form: Callable[[Builder], tuple[str, ...]], operator: str, words: str
) -> None:
    b = Builder(opset=23 if operator == "Attention" else 20)
    (miss,) = fuse(b.model(*form(b))).unfused
    assert (miss.fusion, miss.operator) == (name, operator)
    assert words in miss.reason and miss.node


def test_a_pair_of_columns_is_fused_by_tables_of_halves_and_of_neighbours() -> None:
    found = [judge("rotary", seed, on_gpu=False) for seed in (100001, 100161, 100165, 100175)]
    assert [(item.verdict, item.counts) for item in found] == [("right", {"rotary_embedding": 1})] * 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_graphs_give_the_same_numbers_fused(family: str) -> None:
    verdicts = [(seed, judge(family, seed, on_gpu=on_gpu)) for seed in range(5000, 5007) for on_gpu in (False, True)]
    assert not [(seed, found) for seed, found in verdicts if found.verdict in FAULTS]
    assert any(found.counts for _, found in verdicts)
