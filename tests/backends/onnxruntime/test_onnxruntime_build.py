"""From models to optimised graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnx_models as models
import trt_engine as te
from onnx_models import save
from trt_engine.backends.onnxruntime import optimizer_trial
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.engine import Engine
from trt_engine.errors import ModelError, PrecisionError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.runtime.feeds import random_feeds
from trt_engine.verbs.doctor.machine import requirement_holds

Build = Callable[..., Engine]

NETS = {
    "conv": (models.conv_net, {"batch": (1, 2, 4)}),
    "half": (lambda path: models.conv_net(path, half=True), {"batch": (1, 2, 4)}),
    "outside": (lambda path: models.conv_net(path, location="weights.bin"), {}),
    "two-inputs": (models.two_inputs, {"batch": (1, 2, 4)}),
    "empty-input": (models.empty_input, {}),
    "int8": (models.int8_qdq, {}),
    "fp8": (models.fp8_qdq, {}),
    "casts": (models.casts, {}),
    "words": (models.words, {}),
    "positions": (models.positions, {}),
}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return lambda path, **settings: te.build(path, store=te.Store(tmp_path / "store"), **settings)


@pytest.mark.parametrize("name", NETS)
def test_a_reloaded_engine_computes_what_its_model_computes(name: str, tmp_path: Path, build: Build):
    make, settings = NETS[name]
    path = make(tmp_path / f"{name}.onnx")
    engine = build(path, **settings)
    assert engine.passport.parity is not None and engine.passport.parity.passed
    signature = open_model(path).signature
    feeds = random_feeds(signature, {s.name: tuple(2 if d < 0 else d for d in s.shape) for s in signature.inputs}, 7)
    if not settings:  # built for a batch of one
        feeds = random_feeds(
            signature, {s.name: tuple(1 if d < 0 else d for d in s.shape) for s in signature.inputs}, 7
        )
    want = reference_session(path, signature).run(feeds)
    with te.load(engine) as runner:
        got = runner.infer(feeds)
    assert list(got) == [spec.name for spec in signature.outputs]
    for spec in signature.outputs:
        assert got[spec.name].dtype.name.replace("str", "object") == spec.dtype.replace("string", "object")
        if spec.dtype == "string":
            assert got[spec.name].tolist() == want[spec.name].tolist()
        else:
            np.testing.assert_allclose(
                got[spec.name].astype(np.float64), want[spec.name].astype(np.float64), rtol=1e-2, atol=1e-5
            )


@pytest.mark.parametrize("level", ["none", "basic", "extended", "all"])
@pytest.mark.parametrize("location", [None, "weights.bin"])
def test_every_optimisation_level_gives_an_engine_that_stands_alone(
    level: str, location: str | None, tmp_path: Path, build: Build
):
    folder = tmp_path / "model"
    folder.mkdir()
    engine = build(
        models.conv_net(folder / "net.onnx", location=location),
        options={"graph_optimization": level},
        out=tmp_path / "out" / "net.engine.onnx",
    )
    shutil.rmtree(folder)  # neither the model nor its weights are needed any more
    shutil.rmtree(tmp_path / "store")
    with te.load(engine) as runner:
        assert runner.infer({"images": np.ones((1, 3, 8, 8), np.float32)})["scores"].shape == (1, 16)
    assert engine.passport.build.notes["graph_optimization"] == level


def test_two_engines_of_one_model_with_weights_outside_share_a_folder(tmp_path: Path, build: Build):
    path = models.conv_net(tmp_path / "net.onnx")
    engines = [
        build(path, batch=(1, 1, top), options={"external_weights": True}, out=tmp_path / "out" / f"b{top}.onnx")
        for top in (2, 4)
    ]
    assert len({file for engine in engines for file in engine.files}) == 4
    for engine in engines:
        engine.verify()


def test_a_graph_with_fp8_is_optimised_no_further_than_basic(tmp_path: Path, build: Build):
    path = models.fp8_qdq(tmp_path / "net.onnx")
    assert build(path).passport.build.notes["graph_optimization"] == "basic"


@pytest.mark.skipif(
    requirement_holds(ort.__version__, ">=1.32"), reason="ONNX Runtime 1.32 loads FP8 graphs at `all` too"
)
def test_a_level_that_onnxruntime_cannot_run_fp8_at_is_refused_with_the_one_it_can(tmp_path: Path, build: Build):
    path = models.fp8_qdq(tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="FP8") as caught:
        build(path, options={"graph_optimization": "all"})
    assert "graph_optimization=basic" in (caught.value.hint or "")


def test_the_passport_says_what_a_loader_needs(tmp_path: Path, build: Build):
    passport = build(models.conv_net(tmp_path / "net.onnx")).passport
    assert passport.requirements.library == "onnxruntime" and passport.requirements.version
    assert passport.requirements.providers == ("cpu",)
    blocked = any(
        item.domain == "com.microsoft.nchwc"
        for item in onnx.load(tmp_path / "store" / "engines" / (passport.key or "") / "net.engine.onnx").graph.node
    )
    assert ("layout" in passport.build.notes) == blocked
    assert passport.build.notes["nodes"].startswith("CPUExecutionProvider ")


# ------------------------------------------------------------------------------------------------ the precision contract


@pytest.mark.parametrize(("make", "asked"), [(models.conv_net, "fp32"), (models.int8_qdq, "int8")])
def test_an_engine_in_the_precision_asked_for_is_built(make: Callable, asked: str, tmp_path: Path, build: Build):
    precision = build(make(tmp_path / "net.onnx"), precision=asked).passport.precision
    assert precision.requested == asked == precision.main_dtype


@pytest.mark.parametrize("asked", ["fp16", "int8"])
def test_an_engine_in_another_precision_than_asked_for_is_an_error(asked: str, tmp_path: Path, build: Build):
    with pytest.raises(PrecisionError, match=f"requested {asked}, found fp32 100 % of multiply-adds"):
        build(models.conv_net(tmp_path / "net.onnx"), precision=asked)
    assert te.Store(tmp_path / "store").entries() == []


def test_half_precision_that_the_cpu_widens_is_an_error_when_it_was_asked_for(tmp_path: Path, build: Build):
    path = models.conv_net(tmp_path / "net.onnx", half=True)
    if build(path).passport.precision.main_dtype == "fp16":
        pytest.skip("this processor computes FP16 itself")
    with pytest.raises(PrecisionError, match="runs in fp32: cpu has no fp16 kernel"):
        build(path, precision="fp16")


def test_an_engine_that_only_dequantizes_is_told_as_fp32_and_its_graph_as_what_it_is(tmp_path: Path, build: Build):
    passport = build(models.fp8_qdq(tmp_path / "net.onnx")).passport
    assert passport.precision.main_dtype == "fp32" and list(passport.precision.compute_shares) == ["fp32"]
    assert passport.build.graph_dtype == "fp8"


def test_a_convolution_that_no_kernel_takes_in_is_not_int8(tmp_path: Path, build: Build):
    """As every exporter writes SiLU: no QuantizeLinear stands right behind the convolution, so nothing fuses."""
    path = models.int8_qdq(tmp_path / "net.onnx")
    proto = onnx.load(path)
    convolution = next(place for place, node in enumerate(proto.graph.node) if node.op_type == "Conv")
    proto.graph.node[convolution].output[0] = "raw"
    proto.graph.node.insert(convolution + 1, onnx.helper.make_node("Sigmoid", ["raw"], ["gate"]))
    proto.graph.node.insert(convolution + 2, onnx.helper.make_node("Mul", ["raw", "gate"], ["c"]))
    onnx.save(proto, path)
    engine = build(path)
    operators = {node.op_type for node in onnx.load(engine.path).graph.node}
    assert "QLinearConv" not in operators and operators & {"Conv", "FusedConv"}
    assert engine.passport.precision.main_dtype == "fp32" and engine.passport.precision.shares["fp32"].macs == 1
    assert engine.passport.build.graph_dtype == "int8"


def test_pairs_that_the_cpu_only_dequantizes_are_an_error_when_their_type_was_asked_for(tmp_path: Path, build: Build):
    path = models.fp8_qdq(tmp_path / "net.onnx")
    assert build(path).passport.precision.requested is None
    with pytest.raises(PrecisionError, match="fuses 0 of 1 convolution and runs them in FP32: no FP8 kernels"):
        build(path, precision="fp8")


# ------------------------------------------------------------------------------------------------ what is refused

ROW = (models.FLOAT, ["n", 3])
BRAIN = (models.BF16, ["n", 3])
BAD = {
    "operator of nobody": ([models.node("Foo", "x", "y")], ROW, {}, "Foo"),
    "operator of another domain": ([models.node("Foo", "x", "y", domain="x.y")], ROW, {"domains": {"x.y": 1}}, "x.y"),
    "operator of TensorRT": (
        [models.node("TRT_FP4QDQ", "x", "y", domain="trt")], ROW, {"domains": {"trt": 1}}, "only TensorRT runs",
    ),
    "no kernel for bfloat16": ([models.node("Relu", "x", "y")], BRAIN, {}, "no kernel for `Relu`"),
    "opset too new": ([models.node("Relu", "x", "y")], ROW, {"opset": 40}, "opset 40"),
    "IR too new": ([models.node("Relu", "x", "y")], ROW, {"ir_version": 30}, "IR version 30"),
    "shapes that contradict": (
        [models.node("MatMul", "x w", "y")], ROW, {"weights": {"w": np.ones((5, 5), np.float32)}}, "cannot load",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_model_onnxruntime_cannot_run_is_a_model_error_with_a_hint(what: str, tmp_path: Path, build: Build):
    nodes, row, settings, text = BAD[what]
    path = models.save(tmp_path / "bad.onnx", nodes, {"x": row}, {"y": row}, **settings)
    with pytest.raises(ModelError, match=text) as caught:
        build(path)
    assert caught.value.hint
    assert "\n" not in caught.value.message and "onnxruntime_src" not in caught.value.message
    assert te.Store(tmp_path / "store").entries() == []


@pytest.mark.parametrize(
    ("options", "text", "hint"),
    [
        ({"foo": "1"}, "unknown setting `foo`", "intra_op_threads"),
        ({"graph_optimisation": "all"}, "unknown setting `graph_optimisation`", "graph_optimization"),
        ({"graph_optimization": "most"}, "cannot be `most`", "basic"),
        ({"intra_op_threads": "many"}, "number of threads", "0"),
        ({"intra_op_threads": "-1"}, "number of threads", "0"),
        ({"intra_op_threads": "9999"}, "9999 threads exceed the limit", "one for each core"),
        ({"inter_op_threads": "1025"}, "1025 threads exceed the limit", "0 is ONNX Runtime's own"),
        ({"intra_op_threads": "1" + "0" * 30}, "threads exceed the limit", "0"),
        ({"arena": "perhaps"}, "expected `true` or `false`", "freed memory"),
        ({"execution_mode": "wild"}, "cannot be `wild`", "sequential"),
        ({"cuda.gpu_mem_limit": "1"}, "a provider that was not requested", "--providers cuda,cpu"),
    ],
)
def test_a_wrong_setting_lists_the_right_ones(options: dict, text: str, hint: str, tmp_path: Path, build: Build):
    with pytest.raises(UsageError, match=text) as caught:
        build(models.two_inputs(tmp_path / "net.onnx"), options=options)
    assert hint in (caught.value.hint or "")


def test_every_setting_reaches_onnxruntime_and_the_engine_still_answers(tmp_path: Path, build: Build):
    options = {
        "intra_op_threads": 1, "inter_op_threads": 1, "execution_mode": "parallel", "spinning": "off", "arena": "off",
        "memory_pattern": "off", "denormals_as_zero": "on", "deterministic": "on",
    }  # fmt: skip
    engine = build(models.conv_net(tmp_path / "net.onnx"), options=options)
    with te.load(engine) as runner:
        assert runner.infer({"images": np.ones((1, 3, 8, 8), np.float32)})["scores"].shape == (1, 16)
    assert engine.passport.build.config["options"]["spinning"] == "off"


def equal_defaults(path: Path, *, ir: int, location: str | None = None) -> Path:
    """Convolutions whose weights are made of initializers that are inputs too, two of them equal."""
    rng = np.random.default_rng(0)
    nodes = []
    inputs = {"x": [1, 8, 8]}
    stored: dict[str, np.ndarray] = {"w": rng.normal(size=(16, 8, 3)).astype(np.float32)}
    for number in (1, 2):
        stored[f"s{number}"] = np.array([8, 8], np.int64)
        nodes += [
            helper.make_node("ConstantOfShape", [f"s{number}"], [f"m{number}"],
                             value=helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [0.5])),
            helper.make_node("MatMul", ["x" if number == 1 else "h1", f"m{number}"], [f"h{number}"]),
        ]  # fmt: skip
    nodes.append(helper.make_node("Conv", ["h2", "w"], ["y"], pads=[1, 1]))
    values = [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()]
    values += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(item.dtype), item.shape)
        for name, item in stored.items()
    ]
    graph = helper.make_graph(
        nodes, "g", values, [helper.make_tensor_value_info("y", 1, [1, 16, 8])],
        [onnx.numpy_helper.from_array(item, name) for name, item in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=ir)
    outside = {"save_as_external_data": True, "location": location, "size_threshold": 100} if location else {}
    onnx.save(model, path, **outside)
    return path


@pytest.mark.parametrize("level", ["all", "basic", "none"])
@pytest.mark.parametrize(("ir", "location"), [(3, None), (8, None), (8, "weights.bin")])
def test_initializers_that_are_inputs_too_are_constants_of_the_engine(
    ir: int, location: str | None, level: str, tmp_path: Path, build: Build
):
    path = equal_defaults(tmp_path / "defaults.onnx", ir=ir, location=location)
    engine = build(path, options={"graph_optimization": level})
    assert [spec.name for spec in engine.signature] == ["x", "y"]
    assert engine.passport.parity is not None and engine.passport.parity.passed
    graph = onnx.load(engine.path, load_external_data=False).graph
    assert [value.name for value in graph.input] == ["x"]
    if level != "none":
        assert "ConstantOfShape" not in {node.op_type for node in graph.node}, "constants are folded"
    x = np.random.default_rng(1).normal(size=(1, 8, 8)).astype(np.float32)
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    with te.load(engine) as runner:
        np.testing.assert_allclose(runner.infer({"x": x})["y"], expected, rtol=1e-5, atol=1e-5)


def _half_transposed_matmul(path: Path, middle: str) -> Path:
    """FP16, a transpose before a product of constants: ONNX Runtime 1.31 dies of each at its highest level."""
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2])]
    if middle == "Cast":
        nodes += [helper.make_node("Cast", ["t"], ["f"], to=1), helper.make_node("Cast", ["f"], ["t2"], to=10)]
    elif middle == "Identity":
        nodes += [helper.make_node("Identity", ["t"], ["t2"])]
    nodes += [helper.make_node("MatMul", ["t" if middle == "none" else "t2", "w"], ["y"])]
    return save(path, nodes, {"x": (10, [5, 2, 8])}, {"y": (10, None)}, {"w": np.ones((8, 4), np.float16)}, opset=17)


@pytest.mark.parametrize("middle", ["none", "Cast", "Identity"])
def test_a_graph_that_ends_the_optimiser_is_built_at_the_level_that_was_asked(
    tmp_path: Path, build: Build, middle: str
) -> None:
    made = build(_half_transposed_matmul(tmp_path / "m.onnx", middle))
    assert made.passport.build.notes["graph_optimization"] == "all" and not made.passport.build.retries


def test_a_crash_of_the_optimiser_costs_one_level_and_is_in_the_passport(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_trial, "_exit_code", lambda request: -11 if request.level == "all" else 0)
    made = build(_half_transposed_matmul(tmp_path / "m.onnx", "none")).passport.build
    assert made.notes["graph_optimization"] == "extended"
    assert made.retries == ("graph_optimization=all: ONNX Runtime crashed (SIGSEGV)",)


def test_weights_that_are_inputs_too_are_cast_and_quantised(tmp_path: Path):
    path = equal_defaults(tmp_path / "defaults.onnx", ir=3)
    x = np.random.default_rng(1).normal(size=(1, 8, 8)).astype(np.float32)
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    te.cast(path, "fp16", out=tmp_path / "half.onnx")
    half = ort.InferenceSession(tmp_path / "half.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    assert np.abs(half - expected).max() < 0.01 * np.abs(expected).max()
