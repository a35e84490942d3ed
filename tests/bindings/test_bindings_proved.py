"""What meets at the backend's edges, over the real bindings: the proof of every kind of plan, the pool, the ladder's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorrt_machines import plan_bytes, ultralytics_bytes

BOTH = pytest.mark.releases("10.16.1", "11.4.0")
SPAN = "images:1x3x8x8,2x3x8x8,4x3x8x8"


def built(folder: Path, out: str = "net.engine", *, parity: bool = True, **settings: Any) -> Any:
    import onnx_models
    import trt_engine as te

    model = folder / "net.onnx"
    if not model.exists():
        onnx_models.conv_net(model)
    return te.build(
        model,
        backend="tensorrt",
        device="fake:0",
        profiles=(SPAN,),
        parity=parity,
        out=folder / out,
        rebuild=True,
        **settings,
    )


def test_plans_that_hold_host_code_are_proved_by_their_own_build_and_by_no_other(world: Any, tmp_path: Path) -> None:
    import trt_engine as te
    from trt_engine.errors import EngineError

    engine = built(tmp_path, options={"version_compatible": "on"})
    assert engine.passport.parity is not None and engine.passport.parity.passed
    with pytest.raises(EngineError, match="host"):
        te.load(engine)


def test_a_plan_that_cannot_be_loaded_here_is_built_and_its_check_is_deferred(world: Any, tmp_path: Path) -> None:
    import trt_engine as te
    from trt_engine.engine import Engine
    from trt_engine.errors import EngineError
    from trt_engine.records.passport import NOT_VALIDATED

    lean = built(tmp_path, options={"version_compatible": "on", "exclude_lean_runtime": "on"})
    windows = built(tmp_path, "windows.engine", options={"runtime_platform": "windows_amd64"})
    for engine, words in ((lean, "without its lean runtime"), (windows, "windows_amd64")):
        assert engine.passport.parity is None and words in engine.passport.build.notes["parity"]
        assert any(NOT_VALIDATED in text for text in engine.passport.build.warnings)
        assert engine.validation == NOT_VALIDATED and engine.verify_reference()
        with pytest.raises(EngineError):
            te.validate(engine)
        assert Engine.open(engine.path).validation == NOT_VALIDATED
    library = tmp_path / "libnvinfer_lean.so.10"
    library.write_bytes(b"")
    report = te.validate(lean, options={"allow_host_code": "on", "lean_runtime": str(library)})
    assert report.state == "passed" and report.precision.main_dtype == "fp32" and report.checks == ("parity",)
    assert Engine.open(lean.path).passport.parity == report.parity
    asked = built(tmp_path, precision="fp32", options={"version_compatible": "on", "exclude_lean_runtime": "on"})
    assert asked.passport.validation is not None and asked.passport.validation.checks == ("precision", "parity")
    assert (
        te.validate(asked, options={"allow_host_code": "on", "lean_runtime": str(library)}).precision.main_dtype
        == "fp32"
    )


def test_tf32_is_allowed_its_own_rounding_though_no_kernels_name_tells_it(world: Any, tmp_path: Path) -> None:
    import onnx_models
    import trt_engine as te

    model = onnx_models.conv_net(tmp_path / "net.onnx")
    limits = {}
    for precision in ("fp32", "tf32"):
        engine = te.build(
            model, backend="tensorrt", device="fake:0", profiles=(SPAN,), precision=precision,
            out=tmp_path / f"{precision}.engine",
        )  # fmt: skip
        assert "tf32" not in engine.passport.precision.shares
        limits[precision] = engine.passport.parity.tolerance
    assert limits == {"fp32": 1e-3, "tf32": 2.0**-6}


def test_the_log_holds_every_attempt_of_this_build_and_none_of_the_last(world: Any, tmp_path: Path) -> None:
    import onnx_models
    import trt_engine as te

    model = onnx_models.conv_net(tmp_path / "net.onnx")
    world.scratch_bytes = 64 << 20
    counts = []
    for _ in range(2):
        engine = te.build(
            model, backend="tensorrt", device="fake:0", profiles=(SPAN,), parity=False, workspace_mib=1, rebuild=True,
            out=tmp_path / "net.engine",
        )  # fmt: skip
        assert engine.passport.build.retries
        (log,) = (tmp_path / "store/logs").iterdir()
        said = log.read_text()
        assert "insufficient workspace" in said and "engine generation completed" in said
        counts.append(said.count("insufficient workspace"))
    assert counts[0] == counts[1], "the second build begins its log anew"


def test_weights_that_are_streamed_are_run_without_a_graph_and_the_reason_is_told(world: Any, tmp_path: Path) -> None:
    import trt_engine as te

    engine = built(tmp_path, parity=False, options={"weight_streaming": "on"})
    feeds = {"images": np.ones((2, 3, 8, 8), np.float32)}
    for budget, captured in (("50%", False), ("off", True)):
        with te.load(engine, graphs=True, options={"weight_streaming_budget": budget}) as runner:
            first = runner.infer(feeds)["scores"]
            np.testing.assert_array_equal(runner.infer(feeds)["scores"], first)
            graphs = runner.stats().pool.graphs
            assert bool(graphs.captured) == captured
            assert captured or "weights are streamed" in graphs.disabled_reason


def test_values_that_decide_shapes_go_through_a_pool(world: Any, tmp_path: Path) -> None:
    import ctypes

    import trt_engine as te

    engine = built(tmp_path, parity=False)
    world.shape_tensors.add("images")
    held = []
    with te.load(engine) as runner:
        for seed in (1, 2):
            given = np.random.default_rng(seed).random((1, 3, 8, 8), np.float32)
            runner.infer({"images": given})
            (native,) = [item for item in world.alive() if item.kind == "IExecutionContext"]
            raw = ctypes.string_at(native.addresses["images"], given.nbytes)
            held.append(np.array_equal(np.frombuffer(raw, np.float32).reshape(given.shape), given))
    assert held == [True, True], "other values are other shapes: TensorRT is given them anew"


@BOTH
def test_a_model_that_is_told_sizes_is_proved_with_the_sizes_of_its_profile(world: Any, tmp_path: Path) -> None:
    import onnx_models
    import trt_engine as te

    model = onnx_models.reshaped(tmp_path / "net.onnx")
    world.shape_tensors.add("sizes")
    engine = te.build(
        model, backend="tensorrt", device="fake:0", profiles=("x:1x6,4x6,8x6;sizes:2,2,2",), out=tmp_path / "net.engine",
        options={"shape_values": "sizes:1x6,2x12,4x12"},
    )  # fmt: skip
    parity = engine.passport.parity
    assert parity is not None and parity.passed, engine.passport.build.notes
    looked = [item for item in world.objects.values() if item.kind == "EngineInspector"]
    assert looked and all(item.values["execution_context"] for item in looked), "layers are read at shapes and values"
    assert "x:4x6,sizes:2, `sizes` is 2x12" in parity.inputs, "the optimum of the profile, shapes and values together"
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    with te.load(engine) as runner:
        for sizes in ((4, 3), (2, 6), (3, 4)):
            found = runner.infer({"x": x, "sizes": np.array(sizes, np.int64)})["y"]
            np.testing.assert_array_equal(found, (2 * x).reshape(sizes))


def test_a_mapped_plan_is_read_in_pieces_as_the_bindings_ask_for_them(world: Any, tmp_path: Path) -> None:
    """The reader opens the driver's library, so one is put in its place; the calls go through NVIDIA's own trampolines."""
    import ctypes
    import subprocess

    from trt_engine.backends.tensorrt.binding import TENSORRT
    from trt_engine.backends.tensorrt.deserialize import _StreamReader, map_plan

    driver = tmp_path / "libcuda.so.1"
    source = "int cuPointerGetAttribute(void) { return 1; } int cuMemcpyHtoD_v2(void) { return 1; }"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(driver)],
        input=source, text=True, check=True,
    )  # fmt: skip
    ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    content = plan_bytes() + bytes(range(256)) * 20
    (tmp_path / "plan").write_bytes(ultralytics_bytes(content))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    into = ctypes.create_string_buffer(len(content))
    there = capsule(ctypes.addressof(into), None, None)
    base, where = world.trt.IStreamReaderV2, world.trt.SeekPosition
    with map_plan(tmp_path / "plan") as plan:
        ours = _StreamReader(plan)
        reader = TENSORRT.wrap_callback(ours)
        assert base.read(reader, there, 1000, 0) == 1000 and into.raw[:1000] == content[:1000]
        assert base.read(reader, there, 24, 0) == 24 and into.raw[:24] == content[1000:1024]
        assert (
            base.seek(reader, 512, where.SET)
            and base.read(reader, there, 8, 0) == 8
            and into.raw[:8] == content[512:520]
        )
        assert base.seek(reader, -4, where.END) and base.read(reader, there, 4, 0) == 4 and into.raw[:4] == content[-4:]
        assert base.seek(reader, -8, where.CUR) and not base.seek(reader, 1, where.END)
        ours.plan = None
        assert ours.error is None


def test_memory_is_freed_behind_the_work_that_uses_it(world: Any, tmp_path: Path) -> None:
    from trt_engine.backends.tensorrt.allocator import CountingAllocator
    from trt_engine.device.fake import FakeDevice

    device, waited = FakeDevice(0), []

    def wait(stream: int) -> None:
        waited.append((stream, device.memory().allocated_count))
        if stream == 9:
            raise RuntimeError("a stream that failed")

    allocator = CountingAllocator(device, wait)
    first, second, third = (allocator.allocate(1024, 256, 0) for _ in range(3))
    assert (
        allocator.deallocate(first) and allocator.deallocate_async(second, 7) and allocator.deallocate_async(third, 9)
    )
    assert waited == [(0, 3), (7, 2), (9, 1)], "everything is waited for, or the stream; then it is freed"
    assert device.memory().allocated_count == 0 and "a stream that failed" in str(allocator.error)
    assert not allocator.deallocate(first), "nothing is freed twice"
    assert allocator.stats.count == 3 and allocator.stats.current_bytes == 0
    allocator.close()
    device.close()
