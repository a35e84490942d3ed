"""What only a GPU can show of the inductor backend: kernels in the package, capture, quantized layers on tensor cores."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import trt_engine as te
from trt_engine.errors import PrecisionError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:::(torch|onnx|copyreg)"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed here"),
]

CLASSIFIERS = Path(__file__).resolve().parents[2] / "examples" / "classifiers"
VIT, VALIDATION = CLASSIFIERS / "vit.onnx", CLASSIFIERS / "val.npz"


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU here")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> te.Store:
    return te.Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half") / "vit.onnx"
    te.cast(VIT, "fp16", out=path, parity=False)
    return path


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    path = tmp_path_factory.mktemp("calibration") / "images.npz"
    command = [
        sys.executable,
        str(CLASSIFIERS / "data.py"),
        "--split",
        "train",
        "--count",
        "256",
        "--inputs",
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, timeout=120)
    return path


def build(model: Path, store: te.Store, **settings: object) -> te.Engine:
    given = {
        "backend": "inductor",
        "device": "cuda:0",
        "batch": (1, 64, 64),
        "store": store,
        "time_budget_s": 0.0,
    }
    return te.build(model, **(given | settings))  # type: ignore[arg-type]


def test_a_package_is_captured_and_gives_the_same(store: te.Store, half: Path) -> None:
    engine = build(half, store)
    assert engine.passport.parity is not None and engine.passport.parity.passed
    assert engine.passport.build.notes["kernels"]
    images = (np.load(VALIDATION)["images"][:64, None] / 255).astype(engine.signature.inputs[0].dtype)
    with te.load(engine) as plain, te.load(engine, graphs=True) as captured:
        wanted = plain.infer({"images": images})["logits"]
        for _ in range(4):
            found = captured.infer({"images": images})["logits"]
        assert captured.is_captured({"images": images})
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("graphs", [False, True])
def test_arrays_of_the_caller_are_read_and_written_where_they_are(
    graphs: bool, store: te.Store, half: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Graphs are captured on them when they come again, in a thread that never ran; those of before stay right."""
    import torch

    engine = build(half, store)
    images = (np.load(VALIDATION)["images"][:64, None] / 255).astype(engine.signature.inputs[0].dtype)
    given = [torch.from_numpy(np.roll(images, at, 0)).cuda() for at in range(3)]
    with te.load(engine) as plain, te.load(engine, graphs=graphs) as runner, ThreadPoolExecutor(1) as other:
        wanted = [plain.infer({"images": item.cpu().numpy()})["logits"] for item in given]
        runner.infer({"images": given[0]}, on_device=True)
        for turn in (0, 1, 0, 0, 2, 1, 0, 2, 2, 1):
            found = other.submit(runner.infer, {"images": given[turn]}, on_device=True).result()["logits"]
            assert np.array_equal(torch.from_dlpack(found).cpu().numpy(), wanted[turn])
    assert "aoti_torch" not in capfd.readouterr().err, "a capture in a thread that never ran would fail"


def test_a_bottleneck_with_its_residual_is_computed_as_on_the_cpu(store: te.Store, tmp_path: Path) -> None:
    """1x1 convolutions with many positions, as products where those are faster."""
    drawn = np.random.default_rng(0)
    sizes = {"w0": (64, 256, 1, 1), "w1": (64, 64, 3, 3), "w2": (256, 64, 1, 1), "b0": (64,), "b1": (64,), "b2": (256,)}
    weights = {name: (drawn.standard_normal(size) * 0.1).astype(np.float16) for name, size in sizes.items()}
    nodes, x = [], "x"
    for block in range(2):
        y = x
        for at, pad in enumerate((0, 1, 0)):
            made = f"{block}{at}"
            nodes.append(helper.make_node("Conv", [y, f"w{at}", f"b{at}"], [f"c{made}"], pads=[pad] * 4))
            y = f"c{made}"
            if at == 2:
                nodes.append(helper.make_node("Add", [y, x], [f"a{made}"]))
                y = f"a{made}"
            nodes.append(helper.make_node("Relu", [y], [f"r{made}"]))
            y = f"r{made}"
        x = y
    half = onnx.TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", half, ["n", 256, 28, 28])],
        [helper.make_tensor_value_info(x, half, ["n", 256, 28, 28])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    given = drawn.standard_normal((16, 256, 28, 28)).astype(np.float16)
    plain = te.build(path, backend="onnxruntime", batch=(1, 16, 16), store=store, parity=False)
    with te.load(plain) as runner:
        wanted = runner.infer({"x": given})[x].astype(np.float32)
    engine = build(path, store, batch=(1, 16, 16), parity_rtol=4e-3)
    for made in (engine, build(path, store, batch=(1, 16, 16), parity_rtol=4e-3, options={"channels_last": "off"})):
        with te.load(made) as runner:
            found = runner.infer({"x": given})[x].astype(np.float32)
        assert np.abs(found - wanted).max() <= 6e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_quantized_layers_run_on_tensor_cores_and_keep_the_accuracy(
    precision: str, store: te.Store, calibration: Path
) -> None:
    try:
        engine = build(VIT, store, precision=precision, calib_data=str(calibration))
    except PrecisionError as error:  # FP8 needs compute capability 8.9
        pytest.skip(error.message)
    assert engine.passport.precision.main_dtype == precision
    assert "not_fused" not in engine.passport.build.notes
    wanted = te.evaluate(VIT, VALIDATION).metrics["top1"]
    assert te.evaluate(engine, VALIDATION).metrics["top1"] >= wanted - 0.005


def test_a_second_build_measures_no_kernel_again(store: te.Store, half: Path) -> None:
    first = build(half, store)
    again = build(half, store, rebuild=True)
    assert again.passport.build.notes["kernels"] == first.passport.build.notes["kernels"]
    assert again.passport.build.seconds < first.passport.build.seconds


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("activation", "residual", "out_scale"),
    [(1, False, 0.0), (0, True, 0.0), (2, False, 0.02), (3, True, 0.0), (4, True, 0.0)],
)
def test_the_kernel_computes_what_pytorch_s_operators_compute(
    kind: str, activation: int, residual: bool, out_scale: float
) -> None:
    import torch
    import triton

    from trt_engine.backends.inductor.fused_rules import plain_linear
    from trt_engine.backends.inductor.triton_linear import Tiles, run_linear

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    dtype, quantized = getattr(torch, kind), kind in ("int8", "float8_e4m3fn")
    capability = torch.cuda.get_device_capability()
    if kind == "float8_e4m3fn" and capability < (8, 9):
        pytest.skip("the GPU has no FP8")
    out = torch.float16 if quantized else dtype
    drawn = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(shape, device="cuda", generator=drawn) for shape in ((200, 256), (192, 256)))
    x, weight = ((item * 40).clamp(-127, 127).to(dtype) if quantized else item.to(dtype) for item in (x, weight))
    bias, rest = (torch.randn(shape, device="cuda", generator=drawn).to(out) for shape in ((192,), (200, 192)))
    factors = torch.linspace(1e-5, 4e-5, 192, device="cuda") if quantized else None
    more = (bias, factors, rest if residual else None, activation, out_scale if quantized else 0.0, out)
    wanted = plain_linear(x, weight.t(), *more).float()
    tiles = [Tiles(64, 64, 64, 4, 3), Tiles(128, 64, 64, 4, 3)]
    if capability[0] == 9:
        tiles += [Tiles(128, 128, 64, 4, 3, True), Tiles(128, 128, 64, 4, 3, True, True)]
    for item in tiles:
        found = run_linear(x, weight, *more, item.numbers).float()
        # a value between two of a quantized output may be rounded to either
        assert float((found - wanted).abs().max()) <= 0.07 * float(wanted.abs().max()), item
        assert float((found - wanted).abs().mean()) <= 0.003 * float(wanted.abs().max()), item


def test_a_layer_reads_a_part_of_its_input_and_fp32_stays_fp32(store: te.Store, tmp_path: Path) -> None:
    """Views of a Split are not contiguous; TF32 would differ by about 1e-3."""
    drawn = np.random.default_rng(0)
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2),
        helper.make_node("MatMul", ["a", "w"], ["m"]), helper.make_node("Add", ["m", "c"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]  # fmt: skip
    stored = {"w": drawn.standard_normal((512, 512)), "c": drawn.standard_normal(512)}
    shape = {"x": ["n", 64, 1024], "y": ["n", 64, 512]}
    for kind, limit in (("float32", 1e-5), ("float16", 5e-3)):
        elem = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        graph = helper.make_graph(
            nodes, "net", [helper.make_tensor_value_info("x", elem, shape["x"])],
            [helper.make_tensor_value_info("y", elem, shape["y"])],
            [numpy_helper.from_array(array.astype(kind), name) for name, array in stored.items()],
        )  # fmt: skip
        path = tmp_path / f"{kind}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        x = drawn.standard_normal((32, 64, 1024)).astype(kind)
        wanted = (
            x[..., :512].astype("f8") @ stored["w"].astype(kind).astype("f8") + stored["c"].astype(kind) + x[..., 512:]
        )
        with te.load(build(path, store, batch=(1, 32, 32))) as engine:
            found = engine.infer({"x": x})["y"]
        assert np.abs(found - wanted).max() < limit * np.abs(wanted).max()
