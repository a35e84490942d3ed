"""What the real parser and builder of TensorRT-RTX log and refuse, as users read it. No GPU and no driver is needed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: `pip install 'trt-engine[rtx]'`")

import trt_engine as te
from trt_engine.backends.tensorrt import configure, parser_check
from trt_engine.backends.tensorrt.binding import TENSORRT_RTX, lifecycle_lock
from trt_engine.backends.tensorrt.build import TimingCache
from trt_engine.backends.tensorrt.build_progress import BuildProgress
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.config.build import BuildConfig
from trt_engine.errors import ModelError, ProfileError, SetupError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.trt.failure_causes import find_cause
from trt_engine.trt.settings import parse as settings_of

EXAMPLES = Path(__file__).parents[2] / "examples"
_FLOAT = TensorProto.FLOAT
Model = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Writes a graph of nodes, inputs and initializers, whose last node's outputs are its outputs."""

    def write(
        nodes: list[onnx.NodeProto],
        inputs: dict[str, tuple[int, list[Any]]],
        constants: dict[str, Any] | None = None,
        out: int = _FLOAT,
        opset: int = 19,
        functions: tuple[onnx.FunctionProto, ...] = (),
    ) -> Path:
        values = [
            item if isinstance(item, onnx.TensorProto) else numpy_helper.from_array(np.asarray(item), name)
            for name, item in (constants or {}).items()
        ]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, out, None) for name in nodes[-1].output],
            values,
        )
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(item.domain, 1) for item in functions)]
        path = tmp_path / "net.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9), path)
        return path

    return write


@dataclass
class Builder:
    """The real library's builder, driven by our modules as a build drives it."""

    logger: TensorRtLogger
    progress: BuildProgress

    def build(
        self,
        path: Path,
        target: str = "SM89",
        options: dict[str, str] | None = None,
        cache: TimingCache | None = None,
        warned: list[str] | None = None,
        **settings: Any,
    ) -> bytes:
        trt, settings_ = TENSORRT_RTX.trt, settings_of(options or {})
        build = BuildConfig(**settings)
        with lifecycle_lock():
            native = trt.Builder(self.logger.native)
        network, config = native.create_network(TENSORRT_RTX.strongly_typed_flags()), native.create_builder_config()
        with configure.add_logged_reason(self.logger):
            made = configure.configure(TENSORRT_RTX, native, config, build, settings_)
        if warned is not None:
            warned.extend(made)
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, target), 0)
        monitor = TENSORRT_RTX.wrap_callback(self.progress)
        config.progress_monitor = monitor
        parser = parser_check.parse_model(network, path, self.logger)
        profiles = build.resolve(open_model(path).signature) if build.batch else ()
        configure.add_profiles(native, network, config, profiles, settings_, self.logger)
        if cache is not None:
            cache.attach(config)
        said = self.logger.problem_count
        plan = native.build_serialized_network(network, config)
        del parser
        if plan is None:
            raise self.logger.make_error(f"the build of `{path.name}`", since=said)
        if cache is not None:
            cache.save(config)
        return bytes(plan)

    def refusal(self, kind: type[TrtEngineError], path: Path, **given: Any) -> TrtEngineError:
        with pytest.raises(TrtEngineError) as caught:
            self.build(path, **given)
        assert type(caught.value) is kind, caught.value
        assert not re.search(r"/_src/|::|\.cpp|Error Code|node -1|\n", caught.value.message), caught.value.message
        assert "nvidia-smi" not in (caught.value.hint or ""), "the missing driver is not the reason"
        return caught.value


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Builder]:
    with TensorRtLogger(tmp_path / "raw.log", binding=TENSORRT_RTX) as logger:
        yield Builder(logger, BuildProgress())


def square(kind: int = _FLOAT) -> dict[str, tuple[int, list[Any]]]:
    return {"x": (kind, [2, 2])}


def convolution(model: Model, fp8: bool = False) -> Path:
    constants: dict[str, Any] = {"w": np.full((8, 3, 3, 3), 0.1, np.float32)}
    nodes, operands = [], ["x", "w"]
    if fp8:
        constants |= {"scale": np.float32(0.1), "zero": helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0])}
        for at, name in enumerate(operands):
            nodes.append(helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}_q"], f"q{at}"))
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", "scale", "zero"], [f"{name}_d"], f"d{at}"))
            operands[at] = f"{name}_d"
    nodes.append(helper.make_node("Conv", operands, ["y"], "conv"))
    return model(nodes, {"x": (_FLOAT, ["n", 3, 16, 16])}, constants)


# ------------------------------------------------------------------------------------------------ the parser


def test_an_unsupported_operator_is_reported_once_and_in_english(
    model: Model, builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    path = model([helper.make_node("Det", ["x"], ["y"], "determinant")], square())
    error = builder.refusal(ModelError, path)
    assert error.message.endswith("node 0 `determinant` (Det): TensorRT-RTX's parser does not have this operator")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    raw = (builder.logger.path or path).read_text()
    assert "In function checkDet:" in raw and "] [E] [TRT] [8] false" in raw, "every line has its time and severity"


def test_errors_of_a_graph_that_is_taken_all_the_same_are_shown(
    builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    severity = TENSORRT_RTX.trt.ILogger.Severity.ERROR
    with builder.logger.suppress_errors():
        builder.logger.log(severity, "something is odd")
        assert not caplog.messages
    assert caplog.messages == ["something is odd"]
    builder.logger.log(severity, "and again")
    assert caplog.messages[1:] == ["and again"]


def test_mixed_types_are_explained_by_the_parser_and_not_by_other_lines_of_the_log(
    model: Model, builder: Builder
) -> None:
    builder.logger.log(TENSORRT_RTX.trt.ILogger.Severity.ERROR, "User allocator error allocating 99-byte buffer")
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], "cast", to=TensorProto.FLOAT16),
        helper.make_node("Add", ["x", "c"], ["y"], "mixed"),
    ]
    error = builder.refusal(ModelError, model(nodes, square()))
    assert "(Add): ElementWiseOperation SUM must have same input types" in error.message
    assert "put a Cast between them" in (error.hint or "")
    assert any("cudaError 35" in text for text in builder.logger.errors()), "which stands in the same log"


def test_an_input_of_an_unknown_type_is_named_without_a_node(model: Model, builder: Builder) -> None:
    path = model([helper.make_node("Add", ["x", "x"], ["y"])], square(TensorProto.INT16), out=TensorProto.INT16)
    error = builder.refusal(ModelError, path)
    assert error.message.endswith("input `x`: TensorRT-RTX does not have this ONNX data type")


def test_a_node_in_local_functions_is_named_with_them(model: Model, builder: Builder) -> None:
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("local", 1)]
    inner = helper.make_function(
        "local", "Inner", ["a"], ["b"], [helper.make_node("Det", ["a"], ["b"], "deep")], opsets
    )
    calls = [helper.make_node("Inner", ["a"], ["b"], "mid", domain="local")]
    outer = helper.make_function("local", "Outer", ["a"], ["b"], calls, opsets)
    path = model([helper.make_node("Outer", ["x"], ["y"], "top", domain="local")], square(), functions=(inner, outer))
    assert "`deep` (Det) in `mid (Inner)` in `top (Outer)`: " in builder.refusal(ModelError, path).message


def test_a_custom_operator_gets_a_hint_that_this_library_can_follow(model: Model, builder: Builder) -> None:
    function = helper.make_function("mine", "Other", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [])
    path = model([helper.make_node("Scale", ["x"], ["y"], "s", domain="mine")], square(), functions=(function,))
    error = builder.refusal(ModelError, path)
    assert "`s` (Scale): TensorRT-RTX's parser does not have this operator, and no plugin provides it" in error.message
    assert "brings no plugins" in (error.hint or "") and "-O plugins" not in (error.hint or "")


def test_64_bit_integers_leave_no_warning_behind(
    model: Model, builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    path = model([helper.make_node("Add", ["x", "x"], ["y"])], square(TensorProto.INT64), out=TensorProto.INT64)
    assert builder.build(path)
    assert "has Int64 binding" in (builder.logger.path or path).read_text()
    assert builder.logger.warnings() == () and not [item for item in caplog.records if item.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------ the builder


def test_a_data_type_the_gpu_lacks_is_named_with_the_gpus_that_have_it(model: Model, builder: Builder) -> None:
    path = convolution(model, fp8=True)
    error = builder.refusal(SetupError, path, target="SM80", batch=(1, 2, 4))
    assert "sm80" in error.message and "fp8_e4m3" in error.message
    assert (error.hint or "").startswith("FP8 needs compute capability 8.9 or later")
    assert builder.build(path, target="SM89", batch=(1, 2, 4))


def test_a_profile_the_graph_cannot_have_is_a_profile_error(model: Model, builder: Builder) -> None:
    path = model([helper.make_node("Reshape", ["x", "s"], ["y"], "rs")], {"x": (_FLOAT, ["n", 6])}, {"s": [4, 4]})
    error = builder.refusal(ProfileError, path, batch=(1, 2, 4))
    assert "reshape would change volume 12 to 16" in error.message and error.exit_code == 2
    assert (error.hint or "").startswith("the usual sizes of profile 0 do not fit the graph at layer `rs`")


def test_operators_the_builder_has_in_another_form_are_the_models_fault(model: Model, builder: Builder) -> None:
    inputs = {name: (_FLOAT, [1, 2, 8, 16]) for name in "qkv"}
    attention = model([helper.make_node("Attention", [*"qkv"], ["y"], "attention")], inputs, opset=23)
    assert "`trt-engine cast --to fp16`" in (builder.refusal(ModelError, attention).hint or "")
    nodes = [helper.make_node("TopK", ["x", "k"], ["v", "at"], "top"), helper.make_node("Relu", ["v"], ["y"])]
    topk = model(nodes, {"x": (_FLOAT, [1, 8000])}, {"k": [4000]})
    assert "layer `top` (TopK): K exceeds the maximum" in builder.refusal(ModelError, topk).message


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_that_is_refused_is_not_taken_for_a_used_one(
    model: Model, builder: Builder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`create_timing_cache` gives an object and `set_timing_cache` and `combine` True: the log alone has the refusal."""
    cache = TimingCache(tmp_path / "timing.cache", builder.logger)
    cache.path.write_bytes(b"garbage" * 30)
    with caplog.at_level(logging.INFO):
        builder.build(convolution(model), batch=(1, 2, 4), cache=cache)
    assert cache.read_bytes == 0 and cache.summary().startswith("new, kept")
    assert ["is damaged, or of another TensorRT or GPU" in text for text in cache.warnings] == [True]
    assert any("is not of this TensorRT and GPU: replaced" in text for text in caplog.messages)
    assert not cache.path.read_bytes().startswith(b"garbage")
    assert builder.logger.warnings() == (), "ours says it once"


def test_a_build_that_succeeds_has_no_cause_and_phases_by_their_own_time(
    builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        builder.build(EXAMPLES / "classifiers" / "resnet.onnx", batch=(1, 2, 4))
    raw = (builder.logger.path or EXAMPLES).read_text().splitlines()
    assert len(raw) > 500 and find_cause(raw) is None and find_cause(builder.logger.problems()) is None
    seconds = builder.progress.seconds
    assert {"Building engine", "Building engine from subgraph", "Computing profile costs"} <= set(seconds)
    assert builder.progress.slowest_phases().count(" s") <= 4


def test_a_setting_that_is_refused_comes_with_the_librarys_reason(model: Model, builder: Builder) -> None:
    error = builder.refusal(UsageError, convolution(model), options={"runtime_platform": "windows_amd64"})
    assert "TensorRT set SAME_AS_BUILD: This version of TensorRT does not support building engines" in error.message
    assert "cudaError" not in error.message and "leave `-O runtime_platform` out" in (error.hint or "")


# ------------------------------------------------------------------------------------------------ the workspace


def test_too_little_workspace_is_tried_again_with_more(model: Model, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    path = model(nodes, {"x": (_FLOAT, [64, 64])}, {"w": np.ones((64, 64), np.float32)})
    given: dict[str, Any] = {
        "backend": "tensorrt-rtx",
        "gpus": ("8.9",),
        "workspace_mib": 1,
        "out": tmp_path / "x.engine",
    }
    first, second = te.build(path, **given).passport.build.retries
    assert "(insufficient_workspace): Tactic Selection: no tactics to implement the operation within workspace" in first
    assert second.startswith("workspace 32768 MiB (was 1 MiB): built (")
