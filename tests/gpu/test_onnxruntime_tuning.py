"""What only a GPU can show of the CUDA provider's settings: NHWC and separate biases give the CPU's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import trt_engine as te
from trt_engine.backends.onnxruntime import providers
from trt_engine.backends.onnxruntime.providers import select_providers
from trt_engine.errors import TrtEngineError

pytestmark = pytest.mark.gpu

NHWC = {"cuda.prefer_nhwc": "1"}
SEPARATE = NHWC | {"separate_conv_bias": "on"}
CHANNEL = NHWC | {"separate_conv_bias": "channel"}


@pytest.fixture(autouse=True)
def cuda() -> None:
    try:
        if (error := providers.start_error(select_providers((), "cuda:0"))) is not None:
            raise error
    except TrtEngineError as error:
        pytest.skip(f"no GPU for ONNX Runtime here: {error.message}")


def network(path: Path, size: int | str, *, half: bool) -> Path:
    """A stem, two residual blocks and a classifier, with biases as large as the activations."""
    random, dtype = np.random.default_rng(0), np.float16 if half else np.float32
    nodes: list[onnx.NodeProto] = []
    stored: list[onnx.TensorProto] = []

    def constant(array: np.ndarray) -> str:
        stored.append(numpy_helper.from_array(array.astype(dtype), f"w{len(stored)}"))
        return stored[-1].name

    def op(kind: str, *inputs: str, **given: object) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [f"t{len(nodes)}"], **given))
        return str(nodes[-1].output[0])

    def conv(x: str, before: int, after: int, kernel: int, stride: int = 1) -> str:
        weight = random.standard_normal((after, before, kernel, kernel)) / np.sqrt(before * kernel**2)
        return op(
            "Conv", x, constant(weight), constant(random.standard_normal(after)), kernel_shape=[kernel] * 2,
            pads=[kernel // 2] * 4, strides=[stride] * 2,
        )  # fmt: skip

    x = op("MaxPool", op("Relu", conv("x", 3, 32, 7, 2)), kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stride in (1, 2):
        y = conv(op("Relu", conv(op("Relu", conv(x, 32, 16, 1)), 16, 16, 3, stride)), 16, 32, 1)
        x = op("Relu", op("Add", y, x if stride == 1 else conv(x, 32, 32, 1, 2)))
    x = op("Mul", x, op("Sigmoid", conv(x, 32, 32, 3)))
    x = op("Gemm", op("Flatten", op("GlobalAveragePool", x)), constant(random.standard_normal((32, 10))))
    nodes[-1].output[0] = "y"
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", kind, ["N", 3, size, size])],
        [helper.make_tensor_value_info("y", kind, ["N", 10])], stored,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("size", [64, "S"])
@pytest.mark.parametrize("options", [NHWC, SEPARATE, CHANNEL], ids=["nhwc", "separate", "channel"])
def test_numbers_are_those_of_the_cpu(tmp_path: Path, size: int | str, half: bool, options: dict[str, str]) -> None:
    model = network(tmp_path / "net.onnx", size, half=half)
    profile = {} if isinstance(size, int) else {"shapes": {"x": (2, 3, 64, 64)}}
    engine = te.build(
        model, device="cuda:0", options=options, store=te.Store(tmp_path / "store"), parity_rtol=4e-3 if half else 1e-5,
        time_budget_s=0, **({"batch": (1, 2, 4)} | profile if isinstance(size, int) else profile),
    )  # fmt: skip
    assert ("conv_biases" in engine.passport.build.notes) == ("separate_conv_bias" in options)
    x = np.random.default_rng(1).standard_normal((2, 3, 64, 64)).astype(np.float16 if half else np.float32)
    plain = te.build(
        model, store=te.Store(tmp_path / "cpu"), **({"batch": (1, 2, 4)} if isinstance(size, int) else profile)
    )
    with te.load(engine) as there, te.load(plain) as here:
        got, want = there.infer({"x": x})["y"], here.infer({"x": x})["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=(6e-3 if half else 1e-5) * np.abs(want).max())


def test_a_build_tries_the_layouts_and_keeps_the_table(tmp_path: Path) -> None:
    model = network(tmp_path / "net.onnx", 64, half=True)
    engine = te.build(model, device="cuda:0", batch=(1, 32, 32), store=te.Store(tmp_path / "store"), parity_rtol=4e-3)
    found = engine.passport.build.tuning
    assert found is not None
    assert [item.options for item in found.candidates] == [{}, SEPARATE, CHANNEL, NHWC]
    assert all(item.median_ms for item in found.candidates), found.candidates
    assert engine.passport.build.config["options"] == found.candidates[found.chosen].options
