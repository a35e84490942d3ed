"""A quantised model is built for the library that runs it: the target follows from backend, device and providers, a graph
placed for another one is named before anything is built, and an INT8 engine slower than FP32 is reported."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.backend import resolve_quant_target
from trt_engine.benchmark.speed_check import measure_alternating, median_interval, slowdown_text
from trt_engine.cli import main
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import QuantizeConfig
from trt_engine.engine import Engine
from trt_engine.errors import BuildError, PrecisionError
from trt_engine.graph.load import open_model
from trt_engine.graph.quant_placement import QuantizedGraph
from trt_engine.graph.quant_target import METADATA_KEY
from trt_engine.graph.walk import index_of
from trt_engine.precision.quantize_model import quantize
from trt_engine.verbs.build import precision as build_precision
from trt_engine.verbs.build import run as build_module
from trt_engine.verbs.build.precision import plan_placement
from trt_engine.verbs.build.run import plan
from trt_engine.verbs.quantize import run as quantize_module

pytestmark = pytest.mark.usefixtures("kept_engines")

RESNET = Path(__file__).parents[2] / "examples" / "classifiers" / "resnet.onnx"


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        ({"backend": "tensorrt"}, "tensorrt"),
        ({"backend": "trtexec"}, "tensorrt"),
        ({}, "onnxruntime-cpu"),
        ({"device": "cpu"}, "onnxruntime-cpu"),
        ({"device": "cuda:1"}, "onnxruntime-cuda"),
        ({"device": "cuda:0", "providers": ("tensorrt", "cuda")}, "onnxruntime-tensorrt"),
        ({"device": "cuda:0", "providers": ("TensorrtExecutionProvider",)}, "onnxruntime-tensorrt"),
        ({"device": "cuda:0", "providers": ("cuda", "cpu")}, "onnxruntime-cuda"),
        ({"backend": "fake", "device": "fake"}, None),
    ],
)
def test_the_target_follows_from_backend_device_and_providers(settings: dict[str, Any], target: str | None) -> None:
    assert resolve_quant_target(BuildConfig(**settings)) == target


# ------------------------------------------------------------------------------------------------ what build passes on


@pytest.fixture
def asked_targets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that `quantize` is called with; it places for TensorRT all the same."""
    seen: list[str] = []
    from trt_engine.precision import quantize_model as module

    def spy(*given: Any, config: QuantizeConfig | None = None, **values: Any) -> Any:
        seen.append(values.pop("target", None) or (config or QuantizeConfig()).target)
        return quantize(*given, config=config, **values)

    monkeypatch.setattr(module, "quantize", spy)
    return seen


def rows(path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in ("w0", "w1", "w2")}
    row = (models.FLOAT, ["batch", 8])
    nodes = [models.node("MatMul", *side) for side in (("x w0", "t0"), ("t0 w1", "t1"), ("t1 w2", "y"))]
    return models.save(path, nodes, {"x": row}, {"y": row}, weights)


def data(folder: Path) -> str:
    np.savez(folder / "data.npz", x=np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    return str(folder / "data.npz")


def test_build_quantises_for_the_library_that_runs_the_engine_and_says_so(
    tmp_path: Path, asked_targets: list[str]
) -> None:
    engine = te.build(rows(tmp_path / "net.onnx"), precision="int8", calib_data=data(tmp_path))

    build = engine.passport.build
    assert asked_targets == ["onnxruntime-cpu"]
    assert build.retries[0] == "quantised to int8 for ONNX Runtime's CPU provider: 2 nodes, 1 left as they were"
    assert build.quant_target == "onnxruntime-cpu"


def test_a_format_that_the_library_has_no_kernels_for_is_refused_before_calibration(tmp_path: Path) -> None:
    net, given = rows(tmp_path / "net.onnx"), data(tmp_path)
    for precision, settings, title in (
        ("fp8", {}, "CPU"),
        ("int8", {"device": "cuda:0"}, "CUDA"),
    ):
        with pytest.raises(PrecisionError, match=f"{title} provider has no {precision} kernels to quantise it for"):
            build_precision.require_calibration_data(
                open_model(net), BuildConfig(precision=precision, calib_data=given, **settings)
            )


def test_a_model_without_quantised_layers_has_no_target(tmp_path: Path) -> None:
    assert plan(rows(tmp_path / "net.onnx")).target is None


# ------------------------------------------------------------------------------------------------ graphs placed elsewhere


@pytest.fixture(scope="module")
def for_tensorrt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tensorrt") / "resnet.int8.onnx"
    quantize(RESNET, "int8", out=path, calib_data="random", parity=False)
    return path


@pytest.fixture(scope="module")
def for_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpu") / "resnet.u8s8.onnx"
    models.quantize_statically(RESNET, path, per_channel=True, reduce_range=True)
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_int8_pairs_placed_for_tensorrt_are_refused_before_anything_is_built_for_the_cpu(
    for_tensorrt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "execute", None)
    with pytest.raises(PrecisionError) as caught:
        plan(for_tensorrt, precision="int8")

    error = caught.value
    assert error.exit_code == 6
    assert error.message.startswith(
        "requested int8: these Q/DQ pairs are placed for TensorRT (S8 symmetric, results in float): ONNX Runtime's CPU "
        "provider fuses 0 of 15 convolutions and runs them in FP32: result not quantised ("
    )
    assert "trt-engine quantize MODEL.onnx --to int8 --target onnxruntime-cpu" in (error.hint or "")


def test_without_a_precision_the_same_graph_is_built_with_that_warning(
    for_tensorrt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trt_engine"):
        engine = te.build(for_tensorrt)

    said = [text for text in warnings_of(caplog) if "fuses 0 of 15 convolutions" in text]
    assert len(said) == 1 and "--target onnxruntime-cpu" in said[0]
    assert "fuses 0 of 15 convolutions" in (engine.passport.build.not_fused or "")
    assert "kernel" not in " ".join(warnings_of(caplog))


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_quantize_leaves_out_are_no_fault_of_the_graph(tmp_path: Path, seed: int) -> None:
    """Any part of a network, quantised for a library, is placed for it."""
    rng, nodes, weights, given = np.random.default_rng(seed), [], {}, "images"
    for index in range(6):
        op = "ConvTranspose" if index == 3 else "Conv"
        weights[f"w{index}"] = (rng.standard_normal((8, 8, 1, 1)) / 3).astype(np.float32)
        nodes += [models.node(op, f"{given} w{index}", f"c{index}", name=f"layer{index}")]
        nodes += [models.node(*("Relu" if rng.random() < 0.5 else "HardSwish", f"c{index}", f"a{index}"))]
        given = f"a{index}"
    shapes = {"images": (models.FLOAT, ["batch", 8, 6, 6])}, {given: (models.FLOAT, ["batch", 8, 6, 6])}
    net = models.save(tmp_path / "net.onnx", nodes, *shapes, weights)
    excluded = [f"layer{index}" for index in range(6) if rng.random() < 0.4]
    for target in ("onnxruntime-cpu", "tensorrt"):
        made = tmp_path / f"{target}.onnx"
        quantize(net, "int8", out=made, calib_data="random", target=target, exclude_nodes=excluded, parity=False)
        assert QuantizedGraph(open_model(made).graph).mismatch(target) is None


def test_layers_that_a_library_does_not_fuse_are_named_and_the_file_is_not_to_be_quantised_for_it_again(
    for_tensorrt: Path,
) -> None:
    proto = onnx.load(for_tensorrt)
    next(item for item in proto.metadata_props if item.key == METADATA_KEY).value = "onnxruntime-cpu"
    placed = QuantizedGraph(index_of(proto))
    assert re.match(
        r"ONNX Runtime's CPU provider runs 15 of 15 quantised convolutions in FP32: .* \(\d+: \S+, ",
        placed.mismatch("onnxruntime-cpu") or "",
    )
    assert "--exclude-node" in placed.remedy("onnxruntime-cpu")


@pytest.mark.parametrize("backend", ["tensorrt", "trtexec"])
def test_pairs_placed_for_the_cpu_are_refused_for_tensorrt(for_the_cpu: Path, backend: str) -> None:
    with pytest.raises(PrecisionError, match="TensorRT takes 0 of 16 layers: UINT8 pairs") as caught:
        plan_placement(open_model(for_the_cpu), BuildConfig(precision="int8", backend=backend))

    assert "--target tensorrt " in (caught.value.hint or "")


# ------------------------------------------------------------------------------------------------ beside FP32


def clock_of(times: Sequence[float]) -> tuple[Callable[[], float], list[Callable[[], None]]]:
    """A clock that the runs move: each takes as long as its number says, in turn."""
    now = [0.0]

    def run(seconds: float) -> Callable[[], None]:
        def step() -> None:
            now[0] += seconds

        return step

    return lambda: now[0], [run(seconds) for seconds in times]


def test_a_quantised_engine_that_takes_longer_is_slower() -> None:
    clock, (quantised, plain) = clock_of([0.024, 0.016])
    check = measure_alternating(quantised, plain, baseline_name="fp32", shapes={}, clock=clock)

    assert check is not None and check.is_slower
    assert (check.ratio, check.low, check.high) == pytest.approx((1.5, 1.5, 1.5))
    assert check.pairs == 25  # a second of both
    assert slowdown_text("int8", check, "why") == (
        "int8 is 50 % slower than fp32 here (24.0 ms and 16.0 ms in 25 alternating runs): why"
    )


def test_the_interval_holds_the_median_of_95_in_100_samples() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        low, high = median_interval(list(rng.lognormal(size=15)))
        held += low <= 1.0 <= high

    assert 940 <= held <= 995


@pytest.fixture
def slow_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock sees the quantised engine take twice as long, whatever the machine does."""

    def planted(quantised: Callable[[], Any], plain: Callable[[], Any], **given: Any) -> Any:
        for run in (quantised, plain):
            run()  # both run
        clock, runs = clock_of([0.002, 0.001])
        return measure_alternating(*runs, **given, clock=clock)

    monkeypatch.setattr(build_module, "measure_alternating", planted)


@pytest.mark.parametrize(
    "times, lost, says, following",
    [
        (0.5, False, "", {"quantize": "build q.onnx", "build": "bench q.engine.onnx"}),
        (1.0, False, "int8 is no faster than fp32 here", {"quantize": "build net.onnx", "build": "build net.onnx"}),
        (2.0, False, "int8 is 100 % slower than fp32 here", {"quantize": "build net.onnx", "build": "build net.onnx"}),
        (0.5, True, "no longer matches the model", {"quantize": "build net.onnx"}),
        (2.0, True, "no longer matches the model", {"quantize": "build net.onnx"}),
    ],
)
@pytest.mark.usefixtures("empty_store")
def test_what_is_no_faster_or_no_longer_the_model_is_not_what_comes_next(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: float,
    lost: bool,
    says: str,
    following: dict[str, str],
) -> None:
    def planted(*runs: Callable[[], Any], **given: Any) -> Any:
        for run in runs:
            run()
        clock, made = clock_of([0.001 * times, 0.001])
        return measure_alternating(*made, **given, clock=clock)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build_module, "measure_alternating", planted)
    monkeypatch.setattr(quantize_module, "measure_alternating", planted)
    net = rows(tmp_path / "net.onnx")
    if lost:  # one channel of 1000 beside small ones
        proto = onnx.load(net)
        spread = np.diag([1.0] * 7 + [3000.0]).astype(np.float32)
        for name, factor in (("w0", spread), ("w1", np.linalg.inv(spread))):
            place = next(item for item in proto.graph.initializer if item.name == name)
            value = onnx.numpy_helper.to_array(place)
            value = value @ factor if name == "w0" else factor @ value
            place.CopyFrom(onnx.numpy_helper.from_array(value.astype(np.float32), name))
        onnx.save(proto, net)
    data(tmp_path)
    words = {
        "quantize": ["--to", "int8", "--target", "onnxruntime-cpu", "-o", "q.onnx"],
        "build": ["--precision", "int8", "-o", "q.engine.onnx"],
    }
    for verb, command in following.items():
        assert main.run([verb, "net.onnx", "--calib-data", "data.npz", *words[verb]]) == 0
        out, err = capsys.readouterr()
        assert re.search(r"^next: +trt-engine (.*)$", out, re.MULTILINE)[1].startswith(command), out  # type: ignore[index]
        assert says in err if says else "than fp32" not in err and "no longer" not in err, err


@pytest.mark.usefixtures("empty_store")
def test_a_build_that_quantised_says_when_its_engine_is_slower_than_fp32(
    tmp_path: Path, slow_int8: None, caplog: pytest.LogCaptureFixture
) -> None:
    net, given = rows(tmp_path / "net.onnx"), data(tmp_path)
    with caplog.at_level(logging.WARNING, "trt_engine"):
        engine = te.build(net, precision="int8", calib_data=given)

    said = "int8 is 100 % slower than fp32 here (2.00 ms and 1.00 ms in 334 alternating runs)"
    assert any(text.startswith(said) for text in warnings_of(caplog))
    assert any(text.startswith(said) for text in engine.passport.build.warnings)
    again = Engine.open(engine.path).passport.speed
    assert again == engine.passport.speed is not None and "alternately" in again.protocol


@pytest.mark.usefixtures("empty_store")
def test_a_large_model_is_not_built_twice_to_be_timed(
    tmp_path: Path, slow_int8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_FAST_BUILD_MAX_BYTES", 100)

    assert te.build(rows(tmp_path / "net.onnx"), precision="int8", calib_data=data(tmp_path)).passport.speed is None


@pytest.mark.usefixtures("empty_store")
def test_an_fp32_engine_that_cannot_be_built_costs_the_timing_alone(
    tmp_path: Path, slow_int8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_module._make_passport

    def broken(plan: Any, config: BuildConfig, *given: Any) -> Any:
        if config.precision is None:
            raise BuildError("planted")
        return whole(plan, config, *given)

    monkeypatch.setattr(build_module, "_make_passport", broken)
    engine = te.build(rows(tmp_path / "net.onnx"), precision="int8", calib_data=data(tmp_path))

    assert engine.passport.speed is None and engine.passport.parity is not None
