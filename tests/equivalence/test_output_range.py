"""Parity knows what a function rounds: tails of bounded functions pass, and defects above the rounding do not."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnx_models as models
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.equivalence.parity import measure_parity, open_with_outputs
from trt_engine.equivalence.tolerance import TOLERANCES
from trt_engine.graph.load import open_model

SHAPES = {"map": (1, 1, 64, 48), "masks": (1, 4, 16, 16), "scores": (2, 80, 84), "vad": (4, 1)}
AFTER: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "as it is": ([], {}),
    "scaled": ([models.node("Mul", "y factor", "z")], {"factor": np.float32(0.5)}),
    "moved": ([models.node("Transpose", "y", "z")], {}),
    "one minus": ([models.node("Sub", "one y", "z")], {"one": np.float32(1)}),
}
BRANCH = helper.make_graph(
    [models.node("Identity", "s", "b")], "branch", [], [helper.make_tensor_value_info("b", models.FLOAT, None)]
)
WRITTEN_OUT: dict[str, list[Any]] = {
    "sigmoid": [models.node("Neg", "moved", "n"), models.node("Exp", "n", "e"), models.node("Add", "e one", "b"),
                models.node("Div", "one b", "{}")],
    "softmax": [models.node("Exp", "moved", "e"), models.node("ReduceSum", "e last", "b"), models.node("Div", "e b", "{}")],
    "branch": [models.node("Sigmoid", "moved", "s"), models.node("ReduceSum", "s", "t", keepdims=0),
               models.node("Greater", "t one", "g"),
               models.node("If", "g", "{}", then_branch=BRANCH, else_branch=BRANCH)],
    "quotient": [models.node("Constant", "", "k", value_float=3.0), models.node("Softsign", "moved", "d"),
                 models.node("Div", "d k", "{}")],
    "normalize": [models.node("ReduceL2", "moved last", "b"), models.node("Max", "b one", "c"),
                  models.node("Div", "moved c", "{}")],
    "normalise": [models.node("Mul", "moved moved", "q"), models.node("ReduceSum", "q last", "b"),
                  models.node("Add", "b one", "c"), models.node("Sqrt", "c", "d"), models.node("Div", "moved d", "{}")],
}  # fmt: skip


def bounded(path: Path, function: str, shift: float, after: str, shape: tuple[int, ...]) -> Path:
    nodes, weights = AFTER[after]
    end_name = "y" if nodes else "z"
    made = deepcopy(WRITTEN_OUT.get(function, [models.node(function, "moved", "{}")]))
    made[-1].output[0] = end_name
    made = [models.node("Add", "x shift", "moved"), *made, *nodes]
    given = {"x": (models.FLOAT, list(shape))}
    end = list(reversed(shape)) if after == "moved" else list(shape)
    return models.save(
        path,
        made,
        given,
        {"z": (models.FLOAT, end)},
        {"shift": np.float32(shift), "one": np.float32(1), "last": np.array([-1]), **weights},
    )


FUNCTIONS = ["Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf", "Softplus", "Elu", *WRITTEN_OUT]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rounding_of_a_bounded_function_is_in_parity_and_a_defect_of_its_range_is_not(function: str, tmp_path: Path):
    shapes = list(SHAPES.values())
    cases = list(enumerate(product((-60.0, -20.0, -9.0, 0.0), AFTER)))
    for at, (shift, after) in cases[FUNCTIONS.index(function) % 4 :: 4]:  # four functions have all cases
        shape = shapes[(at + at // 4) % 4]
        path = bounded(tmp_path / f"{at}.onnx", function, shift, after, shape)
        model, rng = open_model(path), np.random.default_rng(at)
        feeds = {"x": rng.normal(size=shape).astype(np.float32)}
        right = reference_session(path, model.signature).run(feeds)["z"]
        rounded = right + rng.uniform(-1.8e-7, 1.8e-7, right.shape).astype(np.float32)
        for got, passes in ((rounded, True), (right + np.float32(0.3), False)):
            found = measure_parity(model, lambda _, got=got: {"z": got}, feeds, "", TOLERANCES["fp32"])
            assert found.passed == passes, (shift, after, shape, found.outputs)
        optimised = open_with_outputs(path, ["z"], "all").run(["z"], feeds)[0]
        assert measure_parity(model, lambda _, o=optimised: {"z": o}, feeds, "", TOLERANCES["fp32"]).passed


def test_values_as_small_as_a_tail_are_judged_where_no_bounded_function_made_them(tmp_path: Path):
    row = (models.FLOAT, [2, 32])
    path = models.save(
        tmp_path / "n.onnx", [models.node("Mul", "x s", "z")], {"x": row}, {"z": row}, {"s": np.float32(1e-9)}
    )
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)}
    assert not measure_parity(
        open_model(path), lambda _: {"z": np.zeros((2, 32), np.float32)}, feeds, "", TOLERANCES["fp32"]
    ).passed


def test_rounded_logits_in_fp16_are_rounding_in_the_probabilities_too(tmp_path: Path):
    """The last digit of 250 is 0.125 in FP16, and so is the share of the sigmoid's value behind it: over 32 units."""
    rng, row = np.random.default_rng(0), [4, 64]
    made = [models.node("Add", "x up", "h"), models.node("Sub", "h down", "l"), models.node("Sigmoid", "l", "z")]
    stored = {"up": np.full(1, 250, np.float16), "down": np.full(1, 259.5, np.float16)}
    path = models.save(tmp_path / "n.onnx", made, {"x": (models.HALF, row)}, {"z": (models.HALF, row)}, stored)
    model, feeds = open_model(path), {"x": rng.normal(size=row).astype(np.float16)}
    logits = (feeds["x"] + stored["up"] - stored["down"]).astype(np.float64)
    right = (1 / (1 + np.exp(-logits))).astype(np.float16)
    for got, passes in ((right, True), (right * np.float16(1.5), False)):
        found = measure_parity(model, lambda _, got=got: {"z": got}, feeds, "", TOLERANCES["fp16"])
        assert found.passed == passes, found.outputs
        assert not TOLERANCES["fp16"].for_graph(model.proto).accepts(found.outputs["z"])
