"""A detector's scores stand beside boxes in pixels: what is wrong with them is seen all the same;
a sample of `benchmarks/parity_check.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trt_engine.arrayfiles import Array
from trt_engine.equivalence.output_error import compare_output
from trt_engine.equivalence.tolerance import TOLERANCES


def detections(low: float = 0.05, high: float = 0.95, *, items: int = 2, anchors: int = 84) -> Array:
    """`[N, 84, anchors]`: boxes up to 480 pixels, 80 scores."""
    rng = np.random.default_rng(0)
    boxes = rng.uniform(5, 480, (items, 4, anchors))
    return np.concatenate([boxes, rng.uniform(low, high, (items, 80, anchors))], axis=1).astype(np.float32)


def higher(out: Array) -> None:
    out[:, 4:] += 0.3


def dead(out: Array) -> None:
    out[:, 4:] = 0.30


def zero(out: Array) -> None:
    out[:, 4:] = 0


def equal(out: Array) -> None:
    out[:, 4:] = out[:, 4:].mean()


def others(out: Array) -> None:
    out[:, 4:] = np.random.default_rng(1).uniform(0.05, 0.95, out[:, 4:].shape)


def one_wrong(out: Array) -> None:
    out[:, 20] = out[:, 20, ::-1]


def swapped(out: Array) -> None:
    out[:, [10, 11]] = out[:, [11, 10]]


DEFECTS = [higher, dead, zero, equal, others, one_wrong, swapped]


@pytest.mark.parametrize("transposed", [False, True], ids=["84 x N", "N x 84"])
@pytest.mark.parametrize("plant", DEFECTS, ids=lambda item: item.__name__)
@pytest.mark.parametrize("scores", [(0.05, 0.95), (0.4, 0.6), (0.005, 0.02)], ids=str)
def test_a_defect_in_the_scores_fails_in_every_format(
    plant: Callable[[Array], None], transposed: bool, scores: tuple[float, float]
) -> None:
    want = detections(*scores)
    got = want.copy()
    plant(got)
    if transposed:
        got, want = got.transpose(0, 2, 1), want.transpose(0, 2, 1)
    error = compare_output(got, want)
    assert not [form for form, tolerance in TOLERANCES.items() if tolerance.accepts(error)]


def test_the_worst_channel_is_named_with_its_difference() -> None:
    want = detections()
    got = want.copy()
    got[0, 17, 3] += 0.31
    error = compare_output(got, want)
    assert error.channel is not None and (error.channel.axis, error.channel.index, error.channel.size) == (1, 17, 84)
    assert error.max_abs == error.channel.max_abs == pytest.approx(0.31) and error.max_rel == pytest.approx(0.326, 0.01)
    assert error.summary == "channel 17 of 84 (axis 1): difference 0.31 (0.33 of the channel's scale)"


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_what_a_16_bit_format_rounds_is_within_its_tolerance(form: str) -> None:
    import ml_dtypes

    kind = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[form]
    want = detections()
    error = compare_output(want.astype(kind).astype(np.float32), want)
    assert TOLERANCES[form].accepts(error) and error.noise is not None and error.noise < 0.01


def test_denormal_numbers_that_another_library_flushes_are_no_difference() -> None:
    reference = np.random.default_rng(0).normal(size=(2, 640, 2, 2)).astype(np.float32) * np.float32(1e-40)
    assert reference.any()
    assert compare_output(np.zeros_like(reference), reference).max_rel == 0
    assert compare_output(np.float32(0), np.float32(1e-40)).max_rel == 0
    normal = reference * np.float32(1e10)
    assert compare_output(np.zeros_like(normal), normal).max_rel == 1


def test_the_tail_of_a_softmax_is_dead_where_it_is_constant_not_where_its_logits_moved() -> None:
    logits = np.random.default_rng(0).normal(-4, 1.2, (4, 80, 73))
    logits[..., 0] += 10
    moved = logits.copy()
    moved[..., 0] += 3
    want, got = (np.exp(x[..., 1:]) / np.exp(x).sum(-1, keepdims=True) for x in (logits, moved))
    assert want.max() < 0.05 and compare_output(got, want).std_ratio > 0.5
    constant, worst = want.copy(), int(want.std((0, 1)).argmax())
    constant[..., worst] = constant[..., worst].mean()
    assert compare_output(constant, want).std_ratio == pytest.approx(0, abs=1e-6)


def test_features_cut_off_at_zero_have_the_scale_of_those_that_are_not() -> None:
    before, noise = np.random.default_rng(0).normal(0, (0.2, 0.004), (3456, 2)).T
    want, got = np.maximum(before, 0)[None], np.maximum(before + noise, 0)[None]
    assert TOLERANCES["quantized"].accepts(compare_output(got, want))
    for wrong in (got[:, ::-1], np.where(want > 0.3, 0, got), np.where(np.arange(3456) == want.argmax(), 0, got)):
        assert not TOLERANCES["quantized"].accepts(compare_output(wrong, want))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("net", ["digits", "resnet-trained", "vit-trained"])
def test_right_outputs_pass_and_planted_defects_fail(net: str, seed: int) -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "parity_check.py"), "--only", net, "--seeds", str(seed)]
    done = subprocess.run(
        [*program, "--formats", "fp32", "fp16", "int8"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 false alarms" in done.stdout and ", 0 missed" in done.stdout
