"""TensorRT-RTX's own parser and builder on graphs of a few nodes: what `te.build` makes of them without a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from programs import run_python

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its builder is not tried")

import trt_engine as te
from trt_engine.backends.tensorrt import cuda_driver
from trt_engine.backends.tensorrt.binding import TENSORRT_RTX, lifecycle_lock
from trt_engine.backends.tensorrt.build import BuildJob
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.backends.tensorrt_rtx import build as building
from trt_engine.backends.tensorrt_rtx.build import build_targets, load_blocker, parity_options
from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine
from trt_engine.errors import BuildError, SetupError, UsageError
from trt_engine.graph.dtype_breakdown import data_types, first_float32_matmul
from trt_engine.graph.load import open_model, read_proto
from trt_engine.plan_header import plan_header
from trt_engine.protocols import BuildPaths
from trt_engine.store import Store
from trt_engine.trt.gpu_targets import RTX_TARGETS, sm_label
from trt_engine.trt.versions import RTX_COMPUTE_CAPABILITY, parse_capability

FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
INT8, FP8, INT4, FP4 = TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1
SIZE = 32


def tensor(name: str, kind: int, dims: list[int], value: float = 0.1) -> onnx.TensorProto:
    return helper.make_tensor(name, kind, dims, [value] * int(np.prod(dims)))


def save(path: Path, nodes: list[Any], stored: list[Any], kind: int = FLOAT, rows: int | str = 4) -> Path:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, [rows, SIZE])],
        [helper.make_tensor_value_info("y", kind, [rows, SIZE])], stored,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    model.ir_version = 11
    onnx.save(model, path)
    return path


def product(path: Path, kind: int = FLOAT, rows: int | str = 4) -> Path:
    return save(path, [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
                [tensor("w", kind, [SIZE, SIZE])], kind, rows)  # fmt: skip


def quantised(path: Path, quantised_kind: int) -> Path:
    """A product whose two sides go through Q/DQ of that type."""
    nodes = []
    for name in ("x", "w"):
        nodes.append(helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}q"], name=f"quantize_{name}"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}d"]))
    nodes.append(helper.make_node("MatMul", ["xd", "wd"], ["y"], name="product"))
    stored = [tensor("s", HALF, []), tensor("z", quantised_kind, [], 0), tensor("w", HALF, [SIZE, SIZE])]
    return save(path, nodes, stored, HALF)


def packed(path: Path, kind: int) -> Path:
    """A product with weights of four bits, in blocks of 16."""
    nodes = [helper.make_node("DequantizeLinear", ["wq", "s"], ["wd"], axis=0, block_size=16),
             helper.make_node("MatMul", ["x", "wd"], ["y"], name="product")]  # fmt: skip
    return save(path, nodes, [tensor("wq", kind, [SIZE, SIZE], 1), tensor("s", HALF, [SIZE // 16, SIZE])], HALF)


FORMATS: dict[str, Callable[[Path], Path]] = {
    "fp32": lambda path: save(path, [helper.make_node("Relu", ["x"], ["y"])], []),
    "fp16": lambda path: product(path, HALF),
    "bf16": lambda path: product(path, BF16),
    "int8": lambda path: quantised(path, INT8),
    "fp8": lambda path: quantised(path, FP8),
    "int4": lambda path: packed(path, INT4),
    "nvfp4": lambda path: packed(path, FP4),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / f"{name}.onnx") for name, make in FORMATS.items()} | {
        "product": product(folder / "product.onnx", rows="rows")
    }


Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def build(store: Store, models: dict[str, Path]) -> Build:
    def made(model: str, *gpus: str, **settings: Any) -> Engine:
        return te.build(models[model], backend="tensorrt-rtx", gpus=gpus, store=store, **settings)

    return made


@pytest.fixture(scope="module")
def pair(build: Build) -> Engine:
    """One plan for two GPUs, of a product whose rows are open."""
    return build("product", "sm89", "sm120", batch=(1, 4, 8))


# ------------------------------------------------------------------------------------------------ the plan


def test_one_plan_is_built_for_both_gpus_and_states_them(pair: Engine) -> None:
    header = plan_header(pair.path)
    assert header is not None and header.product == "TensorRT-RTX" and header.compute_capabilities == ("8.9", "12.0")
    assert header.file_nbytes == pair.path.stat().st_size and header.tensorrt[:3] == TENSORRT_RTX.version[:3]
    needs, built = pair.passport.requirements, pair.passport.build
    assert (needs.library, needs.version, needs.compute_capabilities) == (
        "tensorrt-rtx",
        header.version,
        ("8.9", "12.0"),
    )
    assert needs.gpu is None and needs.compute_capability is None
    assert (
        built.identity == f"tensorrt-rtx {TENSORRT_RTX.version_text} sm89,sm120" and built.notes["gpus"] == "8.9, 12.0"
    )


def test_the_memory_of_weights_and_activations_is_noted_from_header_and_log(pair: Engine) -> None:
    header = plan_header(pair.path)
    assert header is not None and pair.passport.build.notes["weights"] == f"{header.weight_nbytes} bytes"
    assert (header.weight_nbytes or 0) >= 4 * SIZE * SIZE
    assert pair.passport.build.notes["activation_memory"].endswith(" bytes")


def test_layers_are_counted_by_type_without_a_gpu(pair: Engine) -> None:
    assert {kind: share.macs for kind, share in pair.passport.precision.shares.items()} == {"fp32": 1.0}
    assert pair.passport.build.notes["layers_from"] == "the builder's log"


@pytest.mark.parametrize(("model", "gpu"), [("bf16", "sm80"), ("int8", "sm80"), ("fp8", "sm89"), ("int4", "sm80")])
def test_a_product_is_counted_in_the_format_it_is_computed_in(build: Build, model: str, gpu: str) -> None:
    found = build(model, gpu).passport.precision.shares
    assert found[model].macs == 1.0, "int4 by its weights, the others by what they multiply"


def test_a_precision_that_was_asked_for_is_proved_from_the_builders_log(build: Build) -> None:
    passport = build("product", "sm89", precision="fp16", batch=(4, 4, 4)).passport
    assert passport.precision.main_dtype == "fp16" and passport.precision.requested == "fp16"
    assert not any("could not be proved" in text for text in passport.build.warnings)


def test_the_raw_log_and_the_phases_are_kept(pair: Engine, store: Store) -> None:
    assert pair.passport.key is not None and pair.passport.build.notes["phases"]
    assert "Total Weights Memory" in store.build_log(pair.passport.key).read_text()


# ------------------------------------------------------------------------------------------------ which GPUs


def test_without_gpu_and_without_for_the_plan_is_for_all_of_them(build: Build) -> None:
    if isinstance(driver_here(), cuda_driver.TargetGpu):
        pytest.skip("a GPU is here, and the plan would be for it")
    engine = build("fp16")
    header = plan_header(engine.path)
    assert header is not None and header.has_ptx and header.compute_capabilities == RTX_TARGETS[1:]
    assert engine.passport.build.identity.endswith(" all")


def driver_here() -> cuda_driver.TargetGpu | SetupError:
    try:
        return cuda_driver.find_gpu("cuda:0")
    except SetupError as error:
        return error


def test_without_for_gpus_that_lack_the_format_are_left_out_and_named(build: Build, monkeypatch: Any) -> None:
    monkeypatch.setattr(building, "local_gpu", lambda device: SetupError("no driver"))
    engine = build("fp8")
    assert engine.passport.requirements.compute_capabilities == ("8.9", "12.0", "12.1")
    assert any("8.0, 8.6 have no fp8" in text for text in engine.passport.build.warnings)


def test_this_machines_gpu_is_the_default_where_the_library_builds_for_it() -> None:
    ada, hopper = cuda_driver.TargetGpu(0, "RTX 4090", "8.9", 1), cuda_driver.TargetGpu(0, "H100", "9.0", 1)
    missing = SetupError("NVIDIA's driver is not here")
    assert [build_targets(BuildConfig(), here) for here in (ada, hopper, missing)] == [("8.9",), (), ()]
    assert build_targets(BuildConfig(gpus=("RTX 5090",)), ada) == ("12.0",)
    assert load_blocker(("8.9",), ada) is None and load_blocker((), ada) is None
    assert load_blocker((), hopper) == "the plan is for 8.0, 8.6, 8.9, 12.0, 12.1, and this machine has H100 (9.0)"
    assert "driver is not here" in (load_blocker((), missing) or "")


def test_where_the_plan_cannot_be_loaded_the_reason_is_given_and_the_build_stands(
    pair: Engine, models: dict[str, Path], monkeypatch: Any
) -> None:
    from trt_engine.backends.tensorrt_rtx import build

    config = BuildConfig(backend="tensorrt-rtx", device="cuda:0", gpus=("sm89",), options={"strip_weights": "on"})
    monkeypatch.setattr(build, "local_gpu", lambda device: cuda_driver.TargetGpu(0, "RTX 4090", "8.9", 1))
    assert parity_options(models["product"], config) == {"refit_from": str(models["product"])}
    monkeypatch.setattr(build, "local_gpu", lambda device: cuda_driver.TargetGpu(0, "RTX 3090", "8.6", 1))
    assert parity_options(models["product"], config) == "the plan is for 8.9, and this machine has RTX 3090 (8.6)"


# ------------------------------------------------------------------------------------------------ formats and GPUs


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "fp32"])
def test_the_table_of_formats_is_what_the_builder_takes(
    kind: str, models: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """The real builder just below and at the first GPU of each format, with our own check left out."""
    monkeypatch.setattr(building._FORMATS.__class__, "check", lambda *_: None)
    first = next(
        index
        for index, gpu in enumerate(RTX_TARGETS)
        if (parse_capability(gpu) or (0, 0)) >= RTX_COMPUTE_CAPABILITY[kind]
    )
    for index in {max(first - 1, 0), first}:
        config = BuildConfig(backend="tensorrt-rtx", device="cuda:0", gpus=(RTX_TARGETS[index],))
        config = BuildConfig(
            backend="tensorrt-rtx", device="cuda:0", gpus=(RTX_TARGETS[index],),
            profiles=config.resolve(open_model(models[kind]).signature),
        )  # fmt: skip
        places = BuildPaths(tmp_path / f"{index}.engine")
        if index >= first:
            building.TensorRtRtxBuilder().build(open_model(models[kind]), config, places)
            assert places.payload.stat().st_size
        else:
            with pytest.raises(SetupError, match="HW-specific datatypes"):
                building.TensorRtRtxBuilder().build(open_model(models[kind]), config, places)
            assert not places.payload.exists()


@pytest.mark.parametrize(
    ("kind", "gpu", "others"), [("fp8", "8.6", "8.9"), ("nvfp4", "8.9", "12.0"), ("bf16", "7.5", "8.0")]
)
def test_a_format_a_gpu_lacks_is_refused_before_the_builder_starts(
    build: Build, models: dict[str, Path], kind: str, gpu: str, others: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(building._RtxBuildJob, "run", lambda job: pytest.fail("the builder was started"))
    with pytest.raises(
        SetupError, match=f"holds {kind} .*which {gpu} .*does not have: TensorRT-RTX takes it on {others}"
    ) as caught:
        build(kind, sm_label(gpu), "sm121")
    assert caught.value.machine_specific and "--gpus sm121" in (caught.value.hint or "")
    assert kind in data_types(read_proto(models[kind]))


def test_a_precision_a_gpu_lacks_is_refused_before_anything_is_quantised(build: Build) -> None:
    with pytest.raises(SetupError, match=r"has no nvfp4 for 8\.9, it has it for 12\.0, 12\.1") as caught:
        build("product", "sm89", "sm120", precision="nvfp4", calib_data="random")
    assert "--gpus sm120,sm121" in (caught.value.hint or "")


def test_turing_multiplies_no_matrices_in_fp32(build: Build, models: dict[str, Path], tmp_path: Path) -> None:
    assert (
        first_float32_matmul(read_proto(models["product"])) == "product"
        and first_float32_matmul(read_proto(models["fp32"])) is None
    )
    with pytest.raises(SetupError, match=r"multiplies matrices in FP32 \(first in `product`\)") as caught:
        build("product", "sm75", "sm89")
    assert "--gpus sm89" in (caught.value.hint or "")
    assert build("fp32", "sm75").passport.requirements.compute_capabilities == ("7.5",)


# ------------------------------------------------------------------------------------------------ settings


def test_a_setting_of_tensorrt_alone_is_refused_as_such_and_an_unknown_one_with_the_right_ones(build: Build) -> None:
    with pytest.raises(
        UsageError, match="`optimization_level` is a setting of TensorRT, TensorRT-RTX does not have it"
    ):
        build("fp32", options={"optimization_level": "3"})
    with pytest.raises(UsageError, match="`version_compatible` is a setting of TensorRT") as caught:
        build("fp32", options={"version_compatible": "on"})
    assert "takes seconds" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="unknown setting `weight_steaming`") as caught:
        build("fp32", options={"weight_steaming": "on"})
    assert "weight_streaming" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["weight_streaming", "require_user_allocation"])
def test_a_setting_reaches_the_builder(build: Build, pair: Engine, name: str) -> None:
    made = build("product", "sm89", "sm120", batch=(1, 4, 8), options={name: "on"})
    assert made.path.read_bytes() != pair.path.read_bytes() and made.passport.key != pair.passport.key


def test_weights_that_can_be_replaced_need_a_driver_and_that_is_known_before(build: Build) -> None:
    if isinstance(driver_here(), cuda_driver.TargetGpu):
        pytest.skip("a driver is here")
    for options in ({"refit": "all"}, {"strip_weights": "on"}):
        with pytest.raises(
            SetupError,
            match="compiles kernels as it builds, which needs a GPU that the plan is for: no GPU can be used here",
        ):
            build("product", "sm89", options=options)


# ------------------------------------------------------------------------------------------------ failures


def test_a_callback_that_fails_ends_the_build_and_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    def doing(text: str) -> None:
        raise RuntimeError("from a callback")

    model = open_model(models["fp16"])
    config = BuildConfig(backend="tensorrt-rtx", device="cuda:0", gpus=("sm89",))
    places = BuildPaths(tmp_path / "x.engine", on_status=doing)
    with pytest.raises(RuntimeError, match="from a callback"):
        building.TensorRtRtxBuilder().build(model, config, places)
    assert not places.payload.exists()


def test_a_build_that_is_cancelled_stops_at_the_librarys_next_step(models: dict[str, Path], tmp_path: Path) -> None:
    from trt_engine.backends.tensorrt.build_progress import BuildProgress

    class Cancelled(BuildProgress):
        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            super().phase_start(phase_name, parent_phase, num_steps)
            self.cancel()

    monitor = Cancelled()
    config = BuildConfig(backend="tensorrt-rtx", device="cuda:0", gpus=("sm89",))
    places = BuildPaths(tmp_path / "x.engine")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BuildError, match="was stopped"):
        patch.setattr(building, "BuildProgress", lambda doing: monitor)
        building.TensorRtRtxBuilder().build(open_model(models["fp16"]), config, places)
    assert not places.payload.exists() and monitor.steps <= 1, "the first step's answer ends it"


def test_every_layer_and_tensor_of_the_builders_log_is_read(build: Build, monkeypatch: Any) -> None:
    messages = []
    read = building.parse_layer_list
    monkeypatch.setattr(building, "parse_layer_list", lambda message: messages.append(message) or read(message))
    for model, gpu in (("int8", "sm86"), ("fp8", "sm121"), ("nvfp4", "sm121")):
        build(model, gpu)
    assert len(messages) == 3
    for message in messages:
        listed = message.partition("\nI/O Tensors:")[0]
        layers = read(message)["Layers"]
        tensors = [item for layer in layers for side in ("Inputs", "Outputs", "Constants") for item in layer[side]]
        assert (len(layers), len(tensors)) == (listed.count(", LayerType: "), listed.count("{ Name: "))


# ------------------------------------------------------------------------------------------------ making and dropping


def test_a_failed_build_drops_its_builder_at_once_and_nothing_is_collected_while_one_is_made(
    models: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """The library may log as it makes a builder, with a lock held that another one needs as it ends, collected there."""
    with lifecycle_lock():
        other = TENSORRT_RTX.trt.Builder(TensorRtLogger(binding=TENSORRT_RTX).native)  # so that it logs
    alive, collecting, starting = [], [], [True]
    run, take = BuildJob._build_with, TensorRtLogger._record

    def watched(job: BuildJob, builder: Any, allocator: Any) -> Any:
        alive.append(weakref.ref(builder))
        starting.clear()
        return run(job, builder, allocator)

    def heard(logger: TensorRtLogger, severity: str, text: str) -> None:
        if starting:
            collecting.append(gc.isenabled())
        take(logger, severity, text)

    monkeypatch.setattr(BuildJob, "_build_with", watched)
    monkeypatch.setattr(TensorRtLogger, "_record", heard)
    monkeypatch.setattr(building._FORMATS.__class__, "check", lambda *_: None)
    config = BuildConfig(backend="tensorrt-rtx", device="cuda:0", gpus=("sm89",))
    with pytest.raises(SetupError, match="HW-specific datatypes") as caught:
        building.TensorRtRtxBuilder().build(open_model(models["nvfp4"]), config, BuildPaths(tmp_path / "x.engine"))
    assert caught.value.__traceback__ is not None and [item() for item in alive] == [None]
    assert collecting and not any(collecting) and gc.isenabled() and other is not None


@pytest.mark.slow
def test_builds_in_several_threads_do_not_wait_for_each_other_for_ever(models: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own: where they do, it never ends."""
    code = """
import sys, threading
from pathlib import Path
from trt_engine.backends.tensorrt_rtx.build import TensorRtRtxBuilder
from trt_engine.config.build import BuildConfig
from trt_engine.graph.load import open_model
from trt_engine.protocols import BuildPaths
sys.setswitchinterval(1e-5)
model, folder = open_model(Path(sys.argv[1])), Path(sys.argv[2])
config = BuildConfig(backend="tensorrt-rtx", device="cuda:0", gpus=("sm89",))
def build(number):
    for at in range(8):
        TensorRtRtxBuilder().build(model, config, BuildPaths(folder / f"{number}.{at}.engine"))
threads = [threading.Thread(target=build, args=(number,), daemon=True) for number in range(5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(300)
print(len(list(folder.glob("*.engine"))), flush=True)
"""
    done = run_python("-c", code, str(models["fp32"]), str(tmp_path), timeout=400)
    assert done.stdout.strip() == "40", done.stderr[-2000:]


@pytest.mark.parametrize("name", ["?", "size"])
def test_names_that_bind_no_sizes_do_not_bind_them_in_the_builder(name: str, store: Store, tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(side, FLOAT, ["batch", 3, name, name]) for side in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", values[:1], values[1:])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    engine = te.build(path, backend="tensorrt-rtx", shapes={"x": (1, 3, 48, 192)}, store=store)
    assert engine.passport.profiles[0].ranges["x"].opt == (1, 3, 48, 192)
