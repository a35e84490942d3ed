"""The backend `inductor` with PyTorch: the importer beside ONNX's own tests, packages of the trained examples on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import trt_engine as te
from onnx_models import FLOAT, fp8_qdq, int8_qdq, node, save
from programs import load_program, needs
from trt_engine.backends.inductor.build import check_half
from trt_engine.device import info
from trt_engine.errors import BuildError, EngineError, FeedError, ModelError, PrecisionError, SetupError
from trt_engine.store import Store

pytestmark = needs("torch")

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One store, so that the compiler's cache is warm after the first build."""
    return Store(tmp_path_factory.mktemp("store"))


def build(model: Path, store: Store, **settings: Any) -> te.Engine:
    return te.build(model, backend="inductor", store=store, **{"batch": (1, 2, 4)} | settings)


def plain(model: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


# ------------------------------------------------------------------------------------------------ the importer


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    path = Path(__file__).parents[3] / "benchmarks" / "importer_fuzz.py"
    module = load_program(path, "importer_fuzz")
    yield module
    del sys.modules["importer_fuzz"]


def test_operators_give_what_onnx_says_or_are_refused(program: ModuleType) -> None:
    found = list(program.node_tests())
    states = Counter(record["state"] for record in found)
    assert not states["wrong"] + states["crash"], program.table(found, "kind")
    assert states["right"] >= 1350, states
    assert all("`" in record["why"] for record in found if record["state"] == "refused")


def test_drawn_graphs_give_what_onnx_runtime_says_or_are_refused(program: ModuleType) -> None:
    found = list(program.random_graphs(400, seed=33))
    states = Counter(record["state"] for record in found)
    assert not states["wrong"] + states["crash"], program.table(found, "kind")
    assert states["right"] > 350, states


def test_every_declared_operator_has_a_rule() -> None:
    from trt_engine.backends.inductor.operators import OPERATORS
    from trt_engine.backends.inductor.tensor_rules import RULES

    assert {name for name in RULES if not name.startswith("_")} | {"Shape", "Size"} == OPERATORS.keys()


def exported(
    model: Path, shapes: dict[str, tuple[tuple[int, ...], ...]], symbols: dict[str, tuple[str | None, ...]]
) -> Any:
    import torch

    from trt_engine.backends.inductor.compile_worker import CompileRequest, InputRange, export
    from trt_engine.backends.inductor.onnx_module import OnnxModule, load_graph
    from trt_engine.backends.inductor.tensor_rules import RULES

    inputs = tuple(InputRange(name, "float32", symbols[name], *spans) for name, spans in shapes.items())
    request = CompileRequest(str(model), "", "cpu", inputs, {}, False)
    return export(OnnxModule(load_graph(onnx.load(model)).proto, torch.device("cpu"), RULES).eval(), request)


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (
            RuntimeError("\nno kernel image\nmore"),
            "of PyTorch: fused ones cannot be compiled: RuntimeError: no kernel image",
        ),
        (
            BuildError("PyTorch cannot export the graph"),
            "of PyTorch: fused ones cannot be compiled: BuildError: PyTorch ",
        ),
        (None, "of PyTorch: no layer is fused"),
        (ModelError("`Loop` is not supported"), None),
    ],
)
@pytest.mark.parametrize("quantizes", [False, True])
def test_a_graph_whose_fused_kernels_fail_has_pytorchs_unless_it_computes_in_them(
    error: Exception | None, note: str | None, quantizes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_engine.backends.inductor import compile_worker

    def fused(*_: object) -> None:
        if error is not None:
            raise error

    written = list[Any]()
    monkeypatch.setattr(compile_worker, "_compile_fused", fused)
    monkeypatch.setattr(compile_worker, "_write_package", lambda *given, **_: written.append(given))
    model = save(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])})
    request = compile_worker.CompileRequest(str(model), "", "cpu", (), {}, False, fused=True, quantizes=quantizes)
    if note is None or (quantizes and error is not None):
        with pytest.raises(type(error)):
            compile_worker.compile_graph(request)
        assert not written
        return
    assert compile_worker.compile_graph(request).kernels.startswith(note) and len(written) == 1


def test_shape_arithmetic_stays_symbolic(tmp_path: Path) -> None:
    model = save(
        tmp_path / "m.onnx",
        [
            node("Shape", "x", "s"), node("Gather", "s zero", "b"), node("Unsqueeze", "b axis", "b1"),
            node("Gather", "s one", "t"), node("Mul", "t two", "t2"), node("Unsqueeze", "t2 axis", "t1"),
            node("Concat", "b1 t1 rest", "into", axis=0), node("Reshape", "x into", "y"),
        ],
        {"x": (FLOAT, ["batch", "tokens", 4])},
        {"y": (FLOAT, ["batch", None, 2])},
        {"zero": np.int64(0), "one": np.int64(1), "two": np.int64(2), "axis": np.array([0]), "rest": np.array([2])},
    )  # fmt: skip
    program = exported(model, {"x": ((1, 1, 4), (2, 8, 4), (64, 512, 4))}, {"x": ("batch", "tokens", None)})
    import torch

    for rows, tokens in ((2, 3), (64, 512), (1, 1)):
        assert program.module()(torch.zeros(rows, tokens, 4))[0].shape == (rows, 2 * tokens, 2)


@pytest.mark.parametrize("fixed", [True, False])
def test_if_is_folded_where_its_sizes_are_known_and_refused_where_pytorch_would_guess(
    fixed: bool, tmp_path: Path
) -> None:
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["x"], [f"{op}_of_x"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{op}_of_x", FLOAT, None)],
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Relu"))
    }
    model = save(
        tmp_path / "m.onnx",
        [
            node("Shape", "x", "s"), node("Gather", "s axis", "n"), node("Equal", "n one", "is_one"),
            node("If", "is_one", "y", **branches),
        ],
        {"x": (FLOAT, ["batch", 3])},
        {"y": (FLOAT, None)},
        {"axis": np.int64(1 if fixed else 0), "one": np.int64(1)},
    )  # fmt: skip
    if not fixed:
        with pytest.raises(ModelError, match=r"If.*whether a size that varies is 1"):
            exported(model, {"x": ((1, 3), (2, 3), (8, 3))}, {"x": ("batch", None)})
        return
    import torch

    program = exported(model, {"x": ((1, 3), (2, 3), (8, 3))}, {"x": ("batch", None)})
    assert float(program.module()(torch.full((1, 3), -2.0))[0].max()) == 0.0


def test_a_dimension_that_the_graph_fixes_is_refused_not_narrowed(tmp_path: Path) -> None:
    model = save(
        tmp_path / "m.onnx",
        [node("Reshape", "x into", "y")],
        {"x": (FLOAT, ["batch", 6])},
        {"y": (FLOAT, [2, 2, 3])},
        {"into": np.array([2, 2, 3])},
    )
    with pytest.raises(BuildError, match=r"`batch`|dimension 0 of `x`") as refused:
        exported(model, {"x": ((1, 6), (2, 6), (8, 6))}, {"x": ("batch", None)})
    assert refused.value.exit_code == 5 and "--shapes" in (refused.value.hint or "")


def test_a_shape_that_depends_on_the_data_is_refused_with_its_node(tmp_path: Path) -> None:
    model = save(
        tmp_path / "m.onnx",
        [node("Cast", "x", "n", to=onnx.TensorProto.INT64), node("Reshape", "x n", "y", name="moving")],
        {"x": (FLOAT, [2])},
        {"y": (FLOAT, [None, None])},
    )
    with pytest.raises(ModelError, match=r"moving.*depends on the data") as refused:
        exported(model, {"x": ((2,), (2,), (2,))}, {"x": (None,)})
    assert refused.value.exit_code == 4


# ------------------------------------------------------------------------------------------------ packages


@pytest.mark.parametrize("name", ["classifiers/vit", "digits/model"])
def test_a_trained_example_computes_as_plain_onnx_runtime(name: str, store: Store, tmp_path: Path) -> None:
    model = EXAMPLES / f"{name}.onnx"
    engine = build(model, store, out=tmp_path / "m.pt2")
    passport = engine.passport
    assert passport.parity is not None and passport.parity.passed
    assert passport.requirements.library == "torch" and passport.precision.main_dtype == "fp32"
    assert te.inspect(engine.path).compatibility.status == "loads"
    assert build(model, store).passport.build.seconds == passport.build.seconds  # the store has it
    if name == "classifiers/vit":
        assert passport.build.notes["attention"] == "4 fused"
        images = np.random.default_rng(0).random((3, 1, 32, 32), np.float32)
        with te.load(engine, contexts=2) as runner:
            assert np.allclose(
                runner.infer({"images": images})["logits"], plain(model, {"images": images})["logits"], atol=1e-4
            )
            with pytest.raises(FeedError):
                runner.infer({"images": images.astype(np.float16)})


def test_a_package_runs_only_as_it_was_sealed(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(EXAMPLES / "classifiers" / "vit.onnx", store).copy_to(tmp_path / "m.pt2")
    with engine.path.open("ab") as file:
        file.write(b"\0")
    for verify in (True, False):
        with pytest.raises(EngineError, match="changed after it was sealed"):
            te.load(engine, verify=verify)
    monkeypatch.setattr(
        "torch._inductor.cpu_vec_isa.valid_vec_isa_list", None
    )  # a load compiles nothing to look at the CPU
    with te.load(engine, verify=False, options={"trust_source": "on"}) as runner:
        assert runner.infer({"images": np.zeros((1, 1, 32, 32), np.float32)})["logits"].shape == (1, 10)


@pytest.mark.parametrize(("make", "dtype"), [(int8_qdq, "int8"), (fp8_qdq, "fp8")])
def test_quantised_layers_are_computed_right_and_stated_as_what_they_run_in(
    make: Any, dtype: str, store: Store, tmp_path: Path
) -> None:
    model = make(tmp_path / "q.onnx")
    engine = build(model, store)
    assert engine.passport.precision.main_dtype == "fp32"
    assert engine.passport.build.graph_dtype == dtype
    assert engine.passport.parity is not None and engine.passport.parity.passed
    with pytest.raises(PrecisionError, match="on dequantised values") as refused:
        build(model, store, precision=dtype)
    assert refused.value.exit_code == 6


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_is_the_graphs(precision: str, store: Store) -> None:
    model = EXAMPLES / "classifiers" / "vit.onnx"
    try:
        check_half(precision)
    except SetupError as error:  # this processor computes it wrongly: nothing is built
        with pytest.raises(SetupError, match=f"has no {precision} instructions"):
            build(model, store, precision=precision)
        pytest.skip(error.message)
    if "avx2" in info.cpu().features:
        with pytest.raises(SetupError, match="a size varies"):
            build(model, store, precision=precision)
    engine = build(model, store, precision=precision, batch=(4, 4, 4))
    assert engine.passport.precision.main_dtype == precision
    images = np.random.default_rng(0).random((4, 1, 32, 32), np.float32)
    wanted = plain(model, {"images": images})["logits"]
    with te.load(engine) as runner:  # plain ONNX Runtime has no BF16 on a CPU to compare with
        found = runner.infer({"images": images.astype(engine.signature.inputs[0].dtype)})["logits"]
    assert (
        np.abs(found.astype(np.float32) - wanted).max() < (0.02 if precision == "fp16" else 0.1) * np.abs(wanted).max()
    )


def test_tf32_is_not_of_a_cpu(store: Store) -> None:
    with pytest.raises(PrecisionError, match="tf32"):
        build(EXAMPLES / "classifiers" / "vit.onnx", store, precision="tf32")


def test_autotuning_that_takes_too_long_is_left_out(store: Store) -> None:
    engine = build(EXAMPLES / "classifiers" / "resnet.onnx", store, options={"autotune_s": "1"})
    assert engine.passport.build.notes["autotune"] == "stopped after 1 s"
    assert engine.passport.parity is not None and engine.passport.parity.passed
