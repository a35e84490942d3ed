"""Which providers run: asked for, found, or refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnx_models as models
import trt_engine as te
from trt_engine.atomic_io import file_digest
from trt_engine.backends.onnxruntime import providers, session
from trt_engine.backends.onnxruntime.build import _slow_convolutions
from trt_engine.backends.onnxruntime.providers import (
    ProviderSelection,
    compile_lock,
    install_hint,
    select_providers,
    verify_active,
)
from trt_engine.backends.onnxruntime.run import session_settings
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info
from trt_engine.errors import MemoryExhausted, SetupError, UsageError
from trt_engine.graph.dtype_breakdown import compute_layers
from trt_engine.records.passport import FP32_PRODUCTS

GPU_BUILD = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
CPU_BUILD = ("AzureExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize(
    ("providers", "device", "names", "on", "strict"),
    [
        ((), "cpu", ("cpu",), "cpu", False),
        ((), "cuda:1", ("cuda",), "cuda:1", True),
        (("cuda",), "cpu", ("cuda",), "cuda:0", True),
        (("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda:0", ("cuda", "cpu"), "cuda:0", False),
        (("trt", "cuda", "cpu"), "cuda:2", ("tensorrt", "cuda", "cpu"), "cuda:2", False),
    ],
)
def test_names_and_aliases_become_providers_in_order(providers, device, names, on, strict):
    choice = select_providers(providers, device, available=GPU_BUILD)
    assert (choice.names, choice.device, choice.strict) == (names, on, strict)
    number = on.partition(":")[2]
    assert [options.get("device_id", "") for options in choice.options] == [
        "" if name == "cpu" else number for name in names
    ]
    assert choice.fallback is None


def test_settings_with_a_dot_go_to_their_provider():
    options = {"cuda.gpu_mem_limit": "1000", "tensorrt.trt_engine_cache_enable": "1", "intra_op_threads": "2"}
    choice = select_providers(("tensorrt", "cuda", "cpu"), "cuda:0", options=options, available=GPU_BUILD)
    assert choice.options == (
        {"device_id": "0", "trt_engine_cache_enable": "1"},
        {"device_id": "0", "use_tf32": "0", "gpu_mem_limit": "1000"}, {},
    )  # fmt: skip
    assert choice.compiles


TENSORRT = "TensorrtExecutionProvider"


def given(choice: ProviderSelection) -> dict[str, str]:
    """What the TensorRT provider would be given."""
    return dict(choice.to_ort_providers())[TENSORRT]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    return tmp_path / "store" / "tensorrt-provider"


def test_what_the_tensorrt_provider_compiles_is_kept_in_the_store_for_that_engine_alone(store: Path):
    choice = select_providers(("tensorrt", "cuda"), "cuda:0", available=GPU_BUILD, gpus=())
    kept = choice.with_cache("sha256:a", "sha256:model")
    options = given(kept)
    assert options == {
        "device_id": "0", "trt_engine_cache_enable": "True", "trt_engine_cache_path": str(kept.cache),
    }  # fmt: skip
    assert kept.cache is not None and kept.cache.parent == store and kept.cache.is_absolute()
    assert dict(kept.to_ort_providers())["CUDAExecutionProvider"] == choice.options[1]
    assert kept.options == choice.options, "what nobody asked for is no fact of the measurement"
    assert kept == choice.with_cache("sha256:a", "sha256:model"), "the next process finds it"
    half = select_providers(
        ("tensorrt",), "cuda:0", options={"tensorrt.trt_fp16_enable": "on"}, available=GPU_BUILD, gpus=()
    )
    others = [choice.with_cache(*made_of) for made_of in (("sha256:b", "sha256:model"), ("sha256:a", "sha256:other"))]
    others.append(half.with_cache("sha256:a", "sha256:model"))
    assert len({kept.cache, *(one.cache for one in others)}) == 4
    same = select_providers(("trt",), "cuda:1", available=GPU_BUILD, gpus=()).with_cache("sha256:a", "sha256:model")
    assert same.cache == kept.cache, "which of equal GPUs it is makes no difference"
    assert given(kept.with_cuda_graphs())["trt_engine_cache_path"] == str(kept.cache)
    assert given(kept.with_cuda_graphs())["trt_cuda_graph_enable"] == "True"


def test_an_engine_is_loaded_with_the_cache_of_its_own_bytes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = te.build(models.two_inputs(tmp_path / "net.onnx"))
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(GPU_BUILD))  # as where `onnxruntime-gpu` is
    monkeypatch.setattr(info, "gpus", lambda: ())
    monkeypatch.setattr(providers, "_usability_error", lambda name, number: None)  # as where CUDA's libraries are
    _, _, choice = session_settings(engine, RuntimeConfig(providers=("tensorrt",), device="cuda:0"))
    passport = engine.passport
    assert choice.cache is not None and choice.cache.parent == store
    assert choice == choice.with_cache(passport.payload[0].digest, passport.model.digest)
    assert passport.payload[0].digest == file_digest(engine.path), "as it is named while it is built"


def test_the_users_word_on_the_tensorrt_providers_cache_wins(store: Path):
    def made(**options: str) -> ProviderSelection:
        named = {f"tensorrt.{name}": value for name, value in options.items()}
        return select_providers(("tensorrt",), "cuda:0", options=named, available=GPU_BUILD, gpus=()).with_cache(
            "sha256:a"
        )

    off = made(trt_engine_cache_enable="0")
    assert off.cache is None and given(off) == {"device_id": "0", "trt_engine_cache_enable": "False"}
    theirs = made(trt_engine_cache_path="here")
    assert theirs.cache is None
    assert given(theirs) == {"device_id": "0", "trt_engine_cache_enable": "True", "trt_engine_cache_path": "here"}
    on = made(trt_engine_cache_enable="1")
    assert on.cache == made().cache and given(on) == given(made())
    for names in (("cuda",), ("cpu",)):
        other = select_providers(names, "cpu", available=GPU_BUILD, gpus=())
        assert other.with_cache("sha256:a") is other


def test_one_session_at_a_time_compiles_an_engine_and_a_store_nobody_may_write_to_keeps_nothing(
    store: Path, caplog: pytest.LogCaptureFixture
):
    choice = select_providers(("tensorrt",), "cuda:0", available=GPU_BUILD, gpus=()).with_cache("sha256:a")
    assert choice.cache is not None and not choice.cache.exists(), "a dry run writes nothing"
    with compile_lock(choice) as settled:
        assert settled is choice and choice.cache.is_dir()
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(choice.cache / ".lock").acquire(timeout=0)
    with filelock.FileLock(choice.cache / ".lock").acquire(timeout=0):
        pass
    other = select_providers(("tensorrt",), "cuda:0", available=GPU_BUILD, gpus=()).with_cache("sha256:b")
    assert other.cache is not None
    other.cache.write_text("in the way of a folder")
    with caplog.at_level("WARNING"), compile_lock(other) as settled:
        assert settled.cache is None and "trt_engine_cache_enable" not in given(settled)
    assert "compiled subgraphs are not cached" in caplog.text


H200 = info.Gpu(0, "NVIDIA H200", "GPU-1", 143771, "9.0", "580.1")
T4 = info.Gpu(0, "Tesla T4", "GPU-2", 15360, "7.5", "580.1")


@pytest.mark.parametrize(
    ("precision", "options", "boards", "value", "tf32"),
    [
        (None, {}, (H200,), "0", False),
        ("fp32", {}, (H200,), "0", False),
        ("fp16", {}, (H200,), "0", False),
        ("tf32", {}, (H200,), "1", True),
        ("tf32", {}, (), "1", True),
        ("tf32", {}, (T4,), "1", False),
        ("fp32", {"cuda.use_tf32": "1"}, (H200,), "1", True),
        ("tf32", {"cuda.use_tf32": "False"}, (H200,), "False", False),
    ],
)
def test_only_tf32_asked_for_lets_fp32_run_in_tf32(precision, options, boards, value, tf32):
    choice = select_providers((), "cuda:0", options=options, precision=precision, available=GPU_BUILD, gpus=boards)
    assert (choice.options[0]["use_tf32"], choice.tf32) == (value, tf32)


@pytest.mark.parametrize(
    ("products", "options", "value"),
    [("0", {}, "1"), ("2", {}, "0"), (None, {}, "0"), ("0", {"cuda.use_tf32": "0"}, "0")],
)
def test_only_a_graph_without_products_in_fp32_is_loaded_with_tensor_cores_for_all(
    products: str | None,
    options: dict[str, str],
    value: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Off, `use_tf32` takes tensor cores from FP16 convolutions too; on, FP32 is computed in TF32."""
    engine = te.build(models.two_inputs(tmp_path / "net.onnx"))
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(GPU_BUILD))
    monkeypatch.setattr(providers, "_usability_error", lambda name, number: None)
    monkeypatch.setattr(info, "gpus", lambda: (H200,))
    build = replace(engine.passport.build, notes={} if products is None else {FP32_PRODUCTS: products})
    engine = replace(engine, passport=replace(engine.passport, build=build))
    config = RuntimeConfig(providers=("cuda",), device="cuda:0", options=options)
    assert session_settings(engine, config)[2].options[0]["use_tf32"] == value


@pytest.mark.parametrize(
    ("convolution", "product", "tf32", "warned"),
    [("fp16", "fp32", False, True), ("fp16", "fp16", False, False), ("fp32", "fp32", False, False),
     ("fp16", "fp32", True, False)],
)  # fmt: skip
def test_fp16_convolutions_without_tensor_cores_are_a_warning(convolution: str, product: str, tf32: bool, warned: bool):
    kinds = {"fp16": 10, "fp32": 1}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Cast", ["c"], ["d"], to=kinds[product]),
        helper.make_node("MatMul", ["d", "m"], ["y"]),
    ]  # fmt: skip
    arrays = {"w": (np.ones((4, 3, 3, 3)), convolution), "m": (np.ones((6, 5)), product)}
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", kinds[convolution], [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", kinds[product], None)],
        [numpy_helper.from_array(array.astype({"fp16": "f2", "fp32": "f4"}[kind]), name)
         for name, (array, kind) in arrays.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    choice = select_providers((), "cuda:0", precision="tf32" if tf32 else None, available=GPU_BUILD, gpus=(H200,))
    found = _slow_convolutions(tuple(compute_layers(proto, tf32=tf32, literal=True)), choice)
    assert len(found) == warned
    assert not warned or "1 FP16 convolutions run without tensor cores, because 1 other" in found[0]


def test_a_gpu_that_is_not_there_is_a_usage_error_that_names_those_that_are():
    with pytest.raises(UsageError, match=r"no device `cuda:9`, available: `cuda:0` \(NVIDIA H200\)") as caught:
        select_providers((), "cuda:9", available=GPU_BUILD, gpus=(H200,))
    assert caught.value.exit_code == 2 and caught.value.hint == "`--device cuda:0`"
    assert select_providers((), "cuda:9", available=GPU_BUILD, gpus=()).device == "cuda:9"  # nobody can tell


def test_a_capturing_session_is_the_same_with_graphs_on():
    choice = select_providers(("cuda", "cpu"), "cuda:0", available=GPU_BUILD, gpus=(H200,))
    made = choice.with_cuda_graphs()
    assert made.options == ({**choice.options[0], "enable_cuda_graph": "1"}, {})
    assert "enable_cuda_graph" not in choice.options[0]


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("libnvinfer.so.10: cannot open shared object file: No such file or directory", "TensorRT 10"),
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "NVIDIA driver"),
        ("libcublasLt.so.13: cannot open shared object file: No such file or directory", "onnxruntime-gpu[cuda,cudnn]"),
        ("something else", "trt-engine doctor"),
    ],
)
def test_a_missing_library_has_its_own_fix(why: str, fix: str):
    assert fix in install_hint(why)


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("Please install TensorRT libraries as mentioned in the GPU requirements page", SetupError, 3),
        ("Failed to load library /x/libonnxruntime_providers_cuda.so with error: libcudart.so.13: ...", SetupError, 3),
        ("CUDA failure 100: no CUDA-capable device is detected ; GPU=-1", SetupError, 3),
        ("CUDA failure 101: invalid device ordinal ; GPU=9 ; expr=cudaSetDevice(info_.device_id)", UsageError, 2),
        ("CUDA failure 2: out of memory ; GPU=0", MemoryExhausted, 11),
    ],
)
def test_what_a_gpu_refuses_is_never_called_the_models_fault(text: str, kind: type[Exception], code: int):
    found = session.translate_load_error(RuntimeError(text), Path("net.onnx"))
    assert type(found) is kind and found.exit_code == code and found.hint


def test_a_provider_this_build_lacks_is_an_error_that_names_what_it_has():
    with pytest.raises(SetupError, match=r"`cuda` was asked for, and onnxruntime .* has `cpu`") as caught:
        select_providers(("cuda", "cpu"), "cpu", available=CPU_BUILD)
    assert "onnxruntime-gpu" in (caught.value.hint or "") and "--allow-fallback" in (caught.value.hint or "")
    assert "`allow_fallback: true` in a plan" in (caught.value.hint or "")  # `run` has no such option


def test_a_fallback_happens_only_when_allowed_and_is_told():
    choice = select_providers(("cuda",), "cuda:0", allow_fallback=True, available=CPU_BUILD)
    assert choice.names == ("cpu",) and choice.device == "cpu"
    assert "`cuda` was asked for" in (choice.fallback or "") and "`cpu` runs instead" in (choice.fallback or "")


@pytest.mark.parametrize(
    ("providers", "device", "options", "text"),
    [
        (("cpux",), "cpu", {}, "unknown provider `cpux`"),
        (("cuda", "gpu"), "cuda:0", {}, "named twice"),
        (("cpu",), "cuda:0", {}, "do not use it"),
        (("cpu",), "cpu", {"cuda.device_id": "1"}, "not requested"),
        ((), "fake", {}, "no device `fake`"),
    ],
)
def test_contradictions_are_usage_errors(providers, device, options, text):
    with pytest.raises(UsageError, match=text) as caught:
        select_providers(providers, device, options=options, available=GPU_BUILD)
    assert caught.value.hint


@dataclass
class Dropped:
    """A session as ONNX Runtime leaves it when a provider's library does not load: made, and without the provider."""

    running: tuple[str, ...] = ("CPUExecutionProvider",)

    def get_providers(self) -> list[str]:
        return list(self.running)


def test_a_provider_that_was_dropped_in_silence_is_found_by_asking_the_session():
    choice = select_providers(("cuda", "cpu"), "cuda:0", precision="tf32", available=GPU_BUILD, gpus=(H200,))
    with pytest.raises(SetupError, match=r"`cuda` was asked for and does not run: .") as caught:
        verify_active(Dropped(), choice, allow_fallback=False)  # type: ignore[arg-type]
    assert re.search("trt-engine doctor|onnxruntime-gpu.cuda", caught.value.hint or "")
    told = verify_active(Dropped(), choice, allow_fallback=True)  # type: ignore[arg-type]
    assert "`CPU` runs".lower() in (told.fallback or "")
    assert (told.names, told.device, told.on_gpu, told.tf32) == (("cpu",), "cpu", False, False)
    assert verify_active(Dropped(GPU_BUILD), choice, allow_fallback=False) == choice  # type: ignore[arg-type]


def test_a_provider_that_does_not_start_is_told_from_a_model_that_needs_the_cpu():
    choice = select_providers(("cuda",), "cuda:0", available=GPU_BUILD, gpus=())
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("the CUDA provider may start here")
    found = providers.start_error(choice)
    assert found is not None and "`cuda` was asked for and does not run" in found.message


@pytest.mark.parametrize("kind", ["f4", "f2"])
@pytest.mark.parametrize("op", ["LSTM", "MultiHeadAttention", "MatMulNBits", "DequantizeLinear", "QAttention"])
def test_products_inside_of_operators_count_as_fp32_at_open_sizes(op: str, kind: str):
    elem, drawn = helper.np_dtype_to_tensor_dtype(np.dtype(kind)), np.ones
    scale = drawn((), kind)
    weights, given = {
        "LSTM": ({"w": drawn((1, 32, 4), kind), "r": drawn((1, 32, 8), kind)}, {"hidden_size": 8}),
        "MultiHeadAttention": ({}, {"num_heads": 2}),
        "MatMulNBits": ({"w": drawn((16, 1, 16), "u1"), "s": drawn(16, kind)},
                        {"K": 32, "N": 16, "bits": 4, "block_size": 32}),
        "DequantizeLinear": ({"w": helper.make_tensor("w", 22, [32, 16], [0] * 512), "s": scale}, {}),
        "QAttention": ({"w": drawn((16, 48), "i1"), "b": drawn(48, kind), "s": scale, "t": scale}, {"num_heads": 2}),
    }[op]  # fmt: skip
    names, domain = [*weights], "com.microsoft" if op in ("MultiHeadAttention", "MatMulNBits", "QAttention") else ""
    inputs = names if op == "DequantizeLinear" else ["x", "x", "x"] if op == "MultiHeadAttention" else ["x", *names]
    nodes = [helper.make_node(op, inputs, ["y"], domain=domain, **given)]
    if op == "DequantizeLinear":
        nodes = [helper.make_node(op, inputs, ["d"]), helper.make_node("MatMul", ["x", "d"], ["y"])]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", 3 if op == "QAttention" else elem, ["a", "b", "c"])],
        [helper.make_tensor_value_info("y", elem, None)],
        [item if hasattr(item, "dims") else numpy_helper.from_array(item, name) for name, item in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    (layer,) = compute_layers(helper.make_model(graph, opset_imports=opsets), literal=True)
    assert layer.is_fp32_product == (kind == "f4")
