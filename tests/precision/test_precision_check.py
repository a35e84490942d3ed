"""Is it what was asked for: the share, the threshold, the nodes by name, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

import onnx_models
import trt_engine as te
from graph import models
from trt_engine.engine import Engine
from trt_engine.errors import PrecisionError
from trt_engine.precision.cast_model import cast
from trt_engine.precision.precision_check import MIN_SHARE, check_engine, check_graph, check_passport
from trt_engine.records.passport import DtypeShare, Precision
from trt_engine.store import Store

node, value, weight = models.node, models.value, models.weight


def layers(count: int) -> ModelProto:
    """Equal matrix products in a row."""
    nodes, name = [], "x"
    for index in range(count):
        nodes.append(node("MatMul", [name, f"w{index}"], [f"t{index}"], name=f"layer{index}"))
        name = f"t{index}"
    stored = [weight(f"w{index}", 8, 8, seed=index) for index in range(count)]
    return models.model(nodes, [value("x", [1, 8])], [value(name, [1, 8])], stored)


def half(proto: ModelProto, folder: Path, *exclude: str) -> ModelProto:
    cast(models.save(proto, folder), "fp16", out=folder / "half.onnx", exclude_nodes=exclude, overwrite=True)
    return onnx.load(folder / "half.onnx")


def optimised(proto: ModelProto, folder: Path, level: Any = ort.GraphOptimizationLevel.ORT_ENABLE_ALL) -> ModelProto:
    """What ONNX Runtime makes of a graph on the CPU."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


def test_one_fp32_island_in_an_fp16_graph_is_found_and_named(tmp_path: Path) -> None:
    proof = check_graph("fp16", half(layers(4), tmp_path, "layer2"))
    assert not proof.satisfied and proof.share == pytest.approx(0.75)
    assert [(miss.node, miss.format) for miss in proof.violations] == [("layer2", "fp32")]
    assert "`layer2` (MatMul)" in proof.describe() and "fp32 in the graph itself" in proof.describe()
    clean = check_graph("fp16", half(layers(4), tmp_path))
    assert clean.satisfied and clean.share == 1 and not clean.violations


@pytest.mark.parametrize(("count", "kept"), [(19, False), (20, True), (21, True)])
def test_the_threshold_is_what_is_written_down(count: int, kept: bool, tmp_path: Path) -> None:
    assert MIN_SHARE == 0.95
    proof = check_graph("fp16", half(layers(count), tmp_path, "layer0"))
    assert proof.satisfied is kept
    assert [miss.node for miss in proof.violations] == ["layer0"], "what is missing is told either way"


def test_quantised_is_judged_by_layers_with_weights(tmp_path: Path) -> None:
    quantised = onnx.load(onnx_models.int8_qdq(tmp_path / "q.onnx"))
    assert check_graph("int8", quantised).satisfied
    proof = check_graph("int8", layers(3))
    assert not proof.satisfied and len(proof.violations) == 3


# ------------------------------------------------------------------------------------------------ engines


def test_casts_that_onnx_runtime_puts_in_are_seen_through(tmp_path: Path) -> None:
    source = half(models.detector(), tmp_path)
    built = optimised(source, tmp_path)
    proof = check_engine("fp16", source, built, {}, providers=("cpu",))
    if proof.satisfied:
        pytest.skip("this ONNX Runtime has fp16 kernels on this processor")
    assert "cpu has no fp16 kernel for it and puts Casts around it" in proof.describe()
    assert "(Conv)" in proof.describe() and "`Gemm_scores` (Gemm)" in proof.describe()


def qdq(tmp_path: Path) -> ModelProto:
    return onnx.load(onnx_models.int8_qdq(tmp_path / "q.onnx"))


def test_pairs_that_a_provider_ignores_break_it(tmp_path: Path) -> None:
    built = optimised(qdq(tmp_path), tmp_path, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    proof = check_engine("int8", qdq(tmp_path), built, {}, providers=("cpu",))
    assert not proof.satisfied and "runs in fp32: cpu did not fuse its Q/DQ pairs: `c` (Conv)" in proof.describe()
    told = check_engine("int8", qdq(tmp_path), built, {}, not_fused={"c": "result not quantised"})
    assert "did not fuse its Q/DQ pairs, result not quantised: `c` (Conv)" in told.describe()
    assert check_engine("int8", qdq(tmp_path), built, {}, compiled=True).satisfied, "a compiler still gets the pairs"


def half_quantised(which: str) -> ModelProto:
    """A MatMul of 64 x 64 whose weights alone, whose activations alone, or whose activations before a Sigmoid are INT8."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(64, 64)).astype(np.float32)
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("Sigmoid", ["xd"], ["after"]),
        node("DequantizeLinear", ["wq", "ws"], ["wd"], axis=1),
    ]
    factors = {"weights": ["x", "wd"], "activations": ["xd", "w"], "before a Sigmoid": ["after", "wd"]}[which]
    used = {"weights": nodes[3:], "activations": nodes[:2], "before a Sigmoid": nodes}[which]
    return models.model(
        [*used, node("MatMul", factors, ["y"])],
        [value("x", ["batch", 64])], [value("y", ["batch", 64])],
        [numpy_helper.from_array(item, name) for name, item in {
            "w": weights, "wq": np.clip(np.round(weights * 30), -127, 127).astype(np.int8),
            "ws": np.full(64, 1 / 30, np.float32), "s": np.array(0.05, np.float32), "z": np.array(0, np.int8),
        }.items()], opset=21,
    )  # fmt: skip


@pytest.mark.parametrize("which", ["weights", "activations", "before a Sigmoid"])
def test_a_layer_with_one_quantised_input_breaks_it_at_the_graph(which: str, tmp_path: Path) -> None:
    proof = check_graph("int8", half_quantised(which))
    assert not proof.satisfied and proof.shares == {"fp32": 1.0}
    place = "first" if which == "activations" else "second"
    assert f"fp32 in the graph itself, where only its {place} input is int8" in proof.describe()
    source = half_quantised(which)
    assert not check_engine("int8", source, source, {}, compiled=True).satisfied, "nor for a compiler that fuses pairs"


@pytest.mark.parametrize("which", ["weights", "activations", "before a Sigmoid"])
def test_build_says_that_half_a_layer_is_not_int8(which: str, tmp_path: Path, build: Build) -> None:
    onnx.save(half_quantised(which), tmp_path / "m.onnx")
    with pytest.raises(PrecisionError, match="where only"):
        build(tmp_path / "m.onnx", precision="int8")


def test_pairs_that_were_folded_away_break_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = models.model(
        [node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
        [value("x", ["batch", 3, 8, 8])], [value("y", ["batch", 8, 8, 8])],
        [numpy_helper.from_array(rng.random((8, 3, 3, 3), np.float32), "w")],
    )  # fmt: skip
    proof = check_engine("int8", qdq(tmp_path), plain, {}, providers=("cuda",))
    assert not proof.satisfied and "cuda folded the Q/DQ pairs away" in proof.describe()


def test_an_engine_whose_graph_cannot_be_read_is_judged_by_its_backends_count(tmp_path: Path) -> None:
    source = half(layers(4), tmp_path)
    assert check_engine(
        "fp16", source, None, {"fp16": DtypeShare(1, 1, 0.97), "fp32": DtypeShare(0, 0, 0.03)}
    ).satisfied
    assert not check_engine(
        "fp16", source, None, {"fp16": DtypeShare(1, 1, 0.5), "fp32": DtypeShare(0, 0, 0.5)}
    ).satisfied


# ------------------------------------------------------------------------------------------------ build


Build = Callable[..., Engine]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    store = Store(tmp_path / "store")
    return lambda path, **given: te.build(path, store=store, **given)


def test_build_casts_first_and_then_tells_what_the_cpu_made_of_it(tmp_path: Path, build: Build) -> None:
    path = onnx_models.conv_net(tmp_path / "net.onnx")
    with pytest.raises(PrecisionError, match="requested fp16, found fp32 100 % of multiply-adds") as caught:
        build(path, precision="fp16")
    assert caught.value.exit_code == 6 and "trt-engine cast" in (caught.value.hint or "")
    assert not list((tmp_path / "store").rglob("*.engine.onnx"))


def test_build_says_the_exact_command_when_calibration_data_is_missing(tmp_path: Path, build: Build) -> None:
    path = onnx_models.conv_net(tmp_path / "net.onnx")
    with pytest.raises(PrecisionError) as caught:
        build(path, precision="int8")
    assert f"trt-engine quantize {path} --to int8 --target onnxruntime-cpu --calib-data DATA -o" in (
        caught.value.hint or ""
    )
    assert "`--calib-data DATA`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("found", "asked", "kept", "judged"),
    [
        ({"fp32": 1.0}, "fp16", False, True),
        ({"fp16": 0.97, "fp32": 0.03}, "fp16", True, True),
        ({"fp16": 0.9, "fp32": 0.1}, "fp16", False, True),
        ({"int8": 0.6, "fp32": 0.4}, "int8", True, True),
        ({"int8": 0.4, "fp32": 0.6}, "int8", False, True),
        ({"fp16": 0.6, "unknown": 0.4}, "fp16", True, False),
        ({"fp32": 0.6, "unknown": 0.4}, "fp16", False, True),
        ({}, "fp16", True, False),
    ],
)
def test_a_sealed_engine_is_judged_by_its_passport(
    tmp_path: Path, build: Build, found: dict[str, float], asked: str, kept: bool, judged: bool
) -> None:
    passport = build(onnx_models.conv_net(tmp_path / "net.onnx")).passport
    shares = {name: DtypeShare(share, share, share) for name, share in found.items()}
    proof = check_passport(asked, replace(passport, precision=Precision(None, shares)))
    assert (proof.satisfied, proof.conclusive) == (kept, judged)
    assert check_passport(
        asked, replace(passport, precision=Precision(asked, shares))
    ).satisfied  # proved when it was built


def test_a_builders_switch_for_tf32_is_told_by_no_layer(tmp_path: Path, build: Build) -> None:
    passport = build(onnx_models.conv_net(tmp_path / "net.onnx")).passport
    assert check_passport("fp32", passport).satisfied and not check_passport("tf32", passport).satisfied
    switched = replace(passport, build=replace(passport.build, notes={"tf32": "on"}))
    assert check_passport("tf32", switched).satisfied and not check_passport("fp32", switched).satisfied


def products() -> ModelProto:
    """Three matrix products of a batch, which ONNX Runtime's CPU provider has INT8 kernels for."""
    proto = layers(3)
    for item in (*proto.graph.input, *proto.graph.output):
        item.type.tensor_type.shape.dim[0].dim_param = "batch"
    return proto


def test_what_was_prepared_is_in_the_passport_and_the_copy_is_gone(tmp_path: Path, build: Build) -> None:
    path = models.save(products(), tmp_path)
    data = tmp_path / "data.npz"
    np.savez(data, x=np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    passport = build(path, precision="int8", calib_data=str(data)).passport
    assert passport.model.file == str(path) and passport.build.retries[0].startswith("quantised to int8")
    assert passport.build.notes["prepared_digest"] != passport.model.digest
    assert not [item for item in (tmp_path / "store").rglob("*") if ".prepared" in item.parts]
