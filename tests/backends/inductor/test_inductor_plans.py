"""What the backend `inductor` promises before PyTorch is needed: refusals, verdicts, what a package is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_models
import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.backend import code_options, list_backends
from trt_engine.backends.inductor import build as building
from trt_engine.backends.inductor.compatibility import check_compatibility, required_features, torch_version
from trt_engine.backends.inductor.operators import OPERATORS, check_model, write_out
from trt_engine.backends.inductor.options import InductorOptions
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import from_values
from trt_engine.device import info
from trt_engine.doc_pages import find_page
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, ModelError, SetupError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.plan_header import is_native_package
from trt_engine.records.passport import Requirements


def test_an_operator_that_is_lacking_is_named_before_anything_is_built(tmp_path: Path) -> None:
    model = save(
        tmp_path / "m.onnx",
        [node("Det", "x", "y"), node("Hardmax", "y", "z")],
        {"x": (FLOAT, ["batch", 3, 3])},
        {"z": (FLOAT, ["batch"])},
    )
    with pytest.raises(ModelError, match="does not import: `Det`, `Hardmax`") as refused:
        check_model(open_model(model))
    assert refused.value.exit_code == 4
    assert "onnxruntime" in (refused.value.hint or "")


def test_an_operator_that_onnx_defines_by_others_is_imported_as_these(tmp_path: Path) -> None:
    heads = np.zeros((2, 3, 4, 8), np.float32)
    model = save(
        tmp_path / "m.onnx",
        [node("Attention", "x keys keys", "y", scale=0.5)],
        {"x": (FLOAT, ["batch", 3, 4, 8])}, {"y": (FLOAT, ["batch", 3, 4, 8])}, {"keys": heads}, opset=23,
    )  # fmt: skip
    check_model(open_model(model))
    proto = onnx.load(model)
    write_out(proto)
    assert {"MatMul", "Softmax"} <= {item.op_type for item in proto.graph.node} <= OPERATORS.keys()


def test_an_attribute_that_no_rule_honours_is_named_with_its_node_before_anything_is_built(tmp_path: Path) -> None:
    def resize(opset: int, **given: object) -> Path:
        return save(
            tmp_path / f"m{opset}.onnx",
            [helper.make_node("Resize", ["x", "roi", "scales"], ["y"], name="wider", mode="linear", **given)],
            {"x": (FLOAT, [1, 1, 4, 4])},
            {"y": (FLOAT, [1, 1, None, None])},
            {"scales": np.array([1, 1, 0.5, 0.5], np.float32), "roi": np.zeros(8, np.float32)},
            opset=opset,
        )

    with pytest.raises(ModelError, match=r"`wider` \(Resize\).*`antialias=1`") as refused:
        check_model(open_model(resize(18, antialias=1)))
    assert refused.value.exit_code == 4 and refused.value.hint
    check_model(open_model(resize(18, antialias=0, extrapolation_value=0.0)))  # at their defaults
    check_model(open_model(resize(11)))  # raised first


def test_a_page_lists_the_operators_with_the_attributes_that_are_honoured() -> None:
    page = find_page("reference/inductor").text
    assert "AveragePool (auto_pad," in page and all(name in page for name in OPERATORS)


def test_strings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        check_model(open_model(onnx_models.words(tmp_path / "words.onnx")))


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("value", ["-1", "soon", "86401", "1.5"])
def test_seconds_of_autotuning_are_seconds(value: str) -> None:
    with pytest.raises(UsageError, match="as seconds"):
        from_values(InductorOptions, {"autotune_s": value})


def test_trusting_a_package_is_not_for_a_file_to_set() -> None:
    assert code_options({"trust_source": "on", "autotune_s": "3"}) == ["trust_source"]


# ------------------------------------------------------------------------------------------------ the compiler


def test_a_missing_compiler_is_a_thing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match="`no-such-compiler` is not here") as refused:
        building.find_compiler()
    assert refused.value.exit_code == 3
    assert "CXX=" in (refused.value.hint or "")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'probe.cpp:1: fatal error: no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(SetupError, match="fatal error: no headers"):
        building.find_compiler()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_compiler_that_links_its_library_statically_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = tmp_path / "static-g++"
    static.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    static.chmod(0o755)
    monkeypatch.setenv("CXX", str(static))
    with pytest.raises(SetupError, match="links the C\\+\\+ library statically"):
        building.find_compiler()
    monkeypatch.setenv("CXX", "g++")
    assert Path(building.find_compiler()).name == "g++"


# ------------------------------------------------------------------------------------------------ packages


def package(path: Path, member: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr(member, "bytes")
    return path


def test_a_package_and_a_program_of_one_suffix_are_told_apart_by_content(tmp_path: Path) -> None:
    native = package(tmp_path / "native.pt2", "m/data/aotinductor/model/x.wrapper.so")
    program = package(tmp_path / "program.pt2", "m/models/model.json")
    text = tmp_path / "text.pt2"
    text.write_text("PK no archive")
    assert is_native_package(native)
    assert not is_native_package(program) and not is_native_package(text)
    for use in (te.inspect, lambda path: te.convert(path, out=tmp_path / "m.onnx")):
        with pytest.raises(ModelError, match="package of compiled code") as refused:
            use(native)
        assert "passport" in (refused.value.hint or "")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """An engine of ONNX Runtime's whose passport states the needs of a package: a verdict reads the passport alone."""
    model = save(
        tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["batch", 2])}, {"y": (FLOAT, ["batch", 2])}
    )
    made = te.build(model, out=tmp_path / "m.engine.onnx", batch=(1, 2, 4))
    needs = Requirements("torch", torch_version() or "2.13.0")
    return Engine(made.path, replace(made.passport, backend="inductor", requirements=needs))


def with_needs(engine: Engine, *, device: str = "cpu", **values: object) -> Engine:
    needs = replace(engine.passport.requirements, **values)
    return Engine(engine.path, replace(engine.passport, requirements=needs, device=device))


def here(monkeypatch: pytest.MonkeyPatch, version: str = "2.13.0+cpu", gpus: tuple[info.Gpu, ...] = ()) -> None:
    monkeypatch.setattr("trt_engine.backends.inductor.compatibility.torch_version", lambda: version)
    monkeypatch.setattr(info, "gpus", lambda: gpus)


H200 = info.Gpu(0, "NVIDIA H200", "GPU-1", 143771, "9.0", "580")


def test_a_package_needs_its_release_of_pytorch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "2.13.0+cu130")
    assert check_compatibility(with_needs(engine, version="2.13.0+cpu"), RuntimeConfig()).status == "loads"
    found = check_compatibility(with_needs(engine, version="2.11.0"), RuntimeConfig())
    assert found.status == "rebuild" and "2.11.0" in found.reason and found.command == engine.passport.build.command
    here(monkeypatch, "")
    assert check_compatibility(with_needs(engine, version="2.13.0"), RuntimeConfig()).status == "rebuild"


def test_a_package_needs_its_instruction_set(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch)
    assert required_features("AVX512 AVX512_VNNI") == ("avx512_vnni", "avx512bw", "avx512dq", "avx512f", "avx512vl")
    found = check_compatibility(with_needs(engine, version="2.13.0", cpu_features=("sve9",)), RuntimeConfig())
    assert found.status == "rebuild" and "sve9" in found.reason


def test_a_package_needs_its_kind_of_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_needs(engine, device="cuda:0", version="2.13.0", compute_capability="9.0", gpu="NVIDIA H200")
    here(monkeypatch)
    assert check_compatibility(made, RuntimeConfig()).status == "refuse"
    here(monkeypatch, gpus=(H200,))
    assert check_compatibility(made, RuntimeConfig()).status == "loads"
    here(monkeypatch, gpus=(replace(H200, compute_capability="8.9", name="NVIDIA L4"),))
    assert check_compatibility(made, RuntimeConfig()).status == "rebuild"
    assert check_compatibility(made, RuntimeConfig(device="cpu")).status == "rebuild"


def test_loading_says_what_to_install_or_to_build_again(engine: Engine) -> None:
    with pytest.raises((EngineError, SetupError)) as refused:
        te.load(with_needs(engine, version="1.0"))
    if torch_version():
        assert "built with PyTorch 1.0" in refused.value.message
    else:
        assert refused.value.hint == list_backends()["inductor"].install


def test_it_is_listed_with_its_install_command() -> None:
    spec = list_backends()["inductor"]
    assert spec.payload_suffix == ".pt2" and "torch" in spec.install


def test_its_description_imports_no_pytorch() -> None:
    code = (
        "import sys; from trt_engine.backend import list_backends; spec = list_backends()['inductor'];"
        "from trt_engine.backends.inductor import build, compatibility, operators; print('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("features", "refused"),
    [
        (("avx2", "avx512_vnni"), {"fp16", "bf16"}), (("avx2", "avx512_bf16"), {"fp16"}),
        (("avx2", "amx_bf16", "avx512_fp16"), set()), (("neon", "asimd"), set()),
    ],
)  # fmt: skip
def test_a_half_type_that_the_processor_has_no_instructions_for_is_refused(
    features: tuple[str, ...], refused: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "cpu", lambda: info.Cpu(name="a processor", cores=2, features=features))
    for dtype in ("fp32", "fp16", "bf16", None):
        if dtype in refused:
            with pytest.raises(SetupError, match=f"has no {dtype} instructions"):
                building.check_half(dtype)
        else:
            building.check_half(dtype)
        if dtype in ("fp16", "bf16") and dtype not in refused and "avx2" in features:
            with pytest.raises(SetupError, match="where a size varies"):
                building.check_half(dtype, varies=True)
        elif dtype not in refused:
            building.check_half(dtype, varies=True)


# ------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("capability", "types"), [("7.5", ()), ("8.6", ("int8",)), ("9.0", ("int8", "fp8")), ("10.0", ("int8", "fp8"))]
)
def test_quantized_types_are_those_of_the_tensor_cores(capability: str, types: tuple[str, ...]) -> None:
    assert building.quantized_types(replace(H200, compute_capability=capability)) == types


def test_a_cpu_computes_no_layer_in_a_quantized_type() -> None:
    assert building.quantized_types(None) == ()


def test_shares_are_of_what_layers_compute_in(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.integers(-9, 9, (32, 32), dtype=np.int8), "v": rng.integers(-9, 9, (32, 20), dtype=np.int8),
        "s": np.float32(0.1), "z": np.int8(0),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "xq"), node("DequantizeLinear", "xq s z", "xd"),
        node("DequantizeLinear", "w s z", "wd"), node("MatMul", "xd wd", "h"), node("QuantizeLinear", "h s z", "hq"),
        node("DequantizeLinear", "hq s z", "hd"), node("DequantizeLinear", "v s z", "vd"), node("MatMul", "hd vd", "y"),
    ]  # fmt: skip
    model = open_model(save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [4, 32])}, {"y": (FLOAT, [4, 20])}, weights))
    assert {kind: share.macs for kind, share in building.shares(model, (), tf32=False).items() if share.macs} == {
        "fp32": 1.0
    }
    # 20 outputs are not a multiple of 16: that layer stays in floating point
    found = {kind: share.macs for kind, share in building.shares(model, ("int8",), tf32=False).items()}
    assert found["int8"] == pytest.approx(32 / 52) and found["fp32"] == pytest.approx(20 / 52)
