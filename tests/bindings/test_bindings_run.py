"""Plans are loaded and run over the real bindings: shapes, memory, order of the end, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_models import reference_outputs

BOTH = pytest.mark.releases("10.16.1", "11.4.0")
ALL = pytest.mark.releases("10.0.1", "10.16.1", "11.0.0", "11.4.0")
SPAN = "images:1x3x8x8,2x3x8x8,4x3x8x8"


def built(folder: Path, model: Path | None = None, profiles: tuple[str, ...] = (SPAN,), **options: str) -> Any:
    """An engine on disk, built by the backend itself on the fake device."""
    import onnx_models
    import trt_engine as te

    folder.mkdir(exist_ok=True)
    return te.build(
        model or onnx_models.conv_net(folder / "net.onnx"), backend="tensorrt", device="fake:0", profiles=profiles,
        parity=False, options=options, out=folder / "net.engine",
    )  # fmt: skip


def load(engine: Any, device: Any = None, **options: str) -> Any:
    from trt_engine.backends.tensorrt.run import TensorRtRuntime
    from trt_engine.config.runtime import RuntimeConfig
    from trt_engine.device.fake import FakeDevice

    return TensorRtRuntime().load(engine, RuntimeConfig(options=options), device=device or FakeDevice(0))


@contextlib.contextmanager
def running(engine: Any, profile: int = 0, device: Any = None, **options: str) -> Iterator[tuple[Any, Any]]:
    """A session with one context; everything is given back at the end."""
    session = load(engine, device, **options)
    context = session.create_context(profile)
    try:
        yield session, context
    finally:
        context.close()
        session.close()
        assert session.device.memory().allocated_bytes == 0, "TensorRT's memory, and ours, is given back"


def answers(session: Any, context: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """One inference by the steps a pool takes."""
    import ml_dtypes

    device, stream, buffers = session.device, session.device.stream(), {}
    shapes = {name: array.shape for name, array in feeds.items()}
    outputs = context.prepare(shapes)
    sized = {name: shape for name, shape in outputs.items() if -1 not in shape}
    kinds = {spec.name: np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype)) for spec in session.signature}
    for name, shape in (shapes | sized).items():
        buffers[name] = device.allocate(max(int(np.prod(shape)) * kinds[name].itemsize, 1))
    try:
        context.bind(buffers)
        for name, array in feeds.items():
            device.upload(array, buffers[name], stream)
        context.enqueue(stream)
        found = {name: np.empty(shape, kinds[name]) for name, shape in sized.items()}
        for name, array in found.items():
            device.download(buffers[name], array, stream)
        stream.synchronize()
        return found | {name: array.copy() for name, array in context.outputs().items()}  # whole as they are given
    finally:
        stream.synchronize()
        for buffer in buffers.values():
            buffer.close()
        stream.close()


def images(batch: int) -> dict[str, Any]:
    return {"images": np.random.default_rng(batch).random((batch, 3, 8, 8), np.float32)}


# ------------------------------------------------------------------------------------------------ inference


@ALL
def test_a_plan_gives_what_its_graph_gives_at_every_shape(world: Any, tmp_path: Path) -> None:
    with running(built(tmp_path)) as (session, context):
        for batch in (1, 4, 2):
            feeds = images(batch)
            wanted = reference_outputs(tmp_path / "net.onnx", feeds)["scores"]
            np.testing.assert_allclose(answers(session, context, feeds)["scores"], wanted, rtol=1e-5)
        facts = session.runtime_info()
    assert facts["library"].startswith("tensorrt ") and facts["memory_strategy"] == "static"
    assert int(facts["scratch_bytes"]) > 0 and "allocations" in facts["allocated"]


def test_memory_that_is_not_to_be_counted_is_left_to_tensorrts_own_allocator(world: Any, tmp_path: Path) -> None:
    engine = built(tmp_path)
    with running(engine, count_allocations="off") as (session, context):
        assert answers(session, context, images(2))["scores"].shape == (2, 16)
        assert "allocated" not in session.runtime_info() and session.failed_allocations() == 0
        assert [item.values["gpu_allocator"] for item in world.alive() if item.kind == "Runtime"] == [None]


def test_a_captured_inference_is_replayed_and_ends_with_its_shapes(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import UsageError

    with running(built(tmp_path)) as (session, context):
        assert context.no_graph is None
        device, stream = session.device, session.device.stream()
        context.prepare({"images": (1, 3, 8, 8)})
        buffers = {"images": device.allocate(768), "scores": device.allocate(64)}
        context.bind(buffers)
        context.enqueue(stream)
        stream.synchronize()
        graph, calls = stream.capture(context.enqueue), len(world.enqueued_on)
        feeds, scores = images(1), np.empty((1, 16), np.float32)
        device.upload(feeds["images"], buffers["images"], stream)
        graph.replay(stream)
        device.download(buffers["scores"], scores, stream)
        stream.synchronize()
        np.testing.assert_allclose(scores, reference_outputs(tmp_path / "net.onnx", feeds)["scores"], rtol=1e-5)
        assert len(world.enqueued_on) == calls, "a replay calls TensorRT no more"
        context.prepare({"images": (2, 3, 8, 8)})
        with pytest.raises(UsageError, match="out of date"):
            graph.replay(stream)
        for item in (graph, stream, *buffers.values()):
            item.close()


@BOTH
def test_outputs_that_only_the_data_sizes_come_in_memory_that_grows(world: Any, tmp_path: Path) -> None:
    import onnx_models

    model = onnx_models.positions(tmp_path / "net.onnx")
    with running(built(tmp_path, model, ("x:1x3,2x3,300x3",))) as (session, context):
        for rows in (1, 300, 2):
            feeds = {"x": np.tile(np.array([[1.0, 0.0, 2.0]], np.float32), (rows, 1))}
            found = answers(session, context, feeds)
            wanted = reference_outputs(model, feeds)
            np.testing.assert_array_equal(found["where"], wanted["where"])
            np.testing.assert_array_equal(found["minus"], wanted["minus"])
            assert found["where"].shape == (2, 2 * rows)
        assert "`where` depends on the data" in context.no_graph


def test_no_memory_for_a_data_sized_output_is_said_as_such(world: Any, tmp_path: Path) -> None:
    import onnx_models
    from trt_engine.device.fake import FakeDevice
    from trt_engine.errors import MemoryExhausted

    model = onnx_models.positions(tmp_path / "net.onnx")
    small = FakeDevice(0, memory_bytes=1 << 20)  # what is free is filled
    with running(built(tmp_path, model, ("x:1x3,2x3,300x3",)), device=small) as (session, context):
        device, stream = session.device, session.device.stream()
        outputs = context.prepare({"x": (300, 3)})
        buffers = {"x": device.allocate(3600), "minus": device.allocate(3600)}
        assert outputs["where"] == (2, -1)
        context.bind(buffers)
        device.upload(np.ones((300, 3), np.float32), buffers["x"], stream)
        stream.synchronize()
        filler = device.allocate(device.memory().free_bytes)
        world.puppet.broken.clear()
        with pytest.raises(MemoryExhausted):
            context.enqueue(stream)
            stream.synchronize()
            context.outputs()
        world.puppet.broken.clear()  # the scripted library writes to the address it was refused
        filler.close()
        context.prepare({"x": (300, 3)})
        context.bind(buffers)
        context.enqueue(stream)
        stream.synchronize()
        assert context.outputs()["where"].shape == (2, 900), "what went wrong is forgotten"
        for item in (filler, stream, *buffers.values()):
            item.close()


@BOTH
def test_each_profile_has_its_context_and_its_range(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import ProfileError, UsageError

    engine = built(tmp_path, profiles=("images:1x3x8x8,1x3x8x8,2x3x8x8", "images:3x3x8x8,4x3x8x8,4x3x8x8"))
    with running(engine, profile=1) as (session, context):
        np.testing.assert_allclose(
            answers(session, context, images(4))["scores"],
            reference_outputs(tmp_path / "net.onnx", images(4))["scores"], rtol=1e-5,
        )  # fmt: skip
        with pytest.raises(ProfileError, match="profile 1 spans"):
            context.prepare({"images": (1, 3, 8, 8)})
        first = session.create_context(0)
        first.prepare({"images": (1, 3, 8, 8)})
        first.close()
        with pytest.raises(UsageError, match="profile 2 does not exist"):
            session.create_context(2)


def test_a_profile_that_tensorrt_does_not_switch_to_is_an_error(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import EngineError

    session = load(built(tmp_path, profiles=(SPAN, SPAN)))
    world.faults.refused.add("IExecutionContext.set_optimization_profile_async")
    with pytest.raises(EngineError, match="choosing profile 1 failed"):
        session.create_context(1)
    session.close()


# ------------------------------------------------------------------------------------------------ what is refused


def test_buffers_must_be_there_large_enough_and_aligned(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import UsageError

    with running(built(tmp_path)) as (session, context):
        device, stream = session.device, session.device.stream()
        with pytest.raises(UsageError, match="before the shapes"):
            context.bind({})
        context.prepare({"images": (1, 3, 8, 8)})
        whole, scores = device.allocate(2048), device.allocate(64)
        small = device.allocate(64)
        for buffers, reason in (
            ({"images": whole}, "no buffer is bound to `scores`"),
            ({"images": small, "scores": scores}, "`images` needs 768 bytes"),
            ({"images": whole.view(4, 1024), "scores": scores}, "multiples of 256"),
            ({"images": whole, "scores": scores, "score": small}, "no tensor `score`"),
        ):
            with pytest.raises(UsageError, match=reason):
                context.bind(buffers)
            with pytest.raises(UsageError, match="before `prepare` and `bind`"):
                context.enqueue(stream)
        context.bind({"images": whole, "scores": scores})
        context.prepare({"images": (2, 3, 8, 8)})
        with pytest.raises(UsageError, match="before `prepare` and `bind`"):
            context.enqueue(stream)
        context.prepare({"images": (1, 3, 8, 8)})
        world.faults.refused.add("IExecutionContext.set_tensor_address")
        with pytest.raises(UsageError, match="giving `images` the address"):
            context.bind({"images": whole, "scores": scores})
        for item in (whole, scores, small, stream):
            item.close()


@BOTH
def test_an_inference_tensorrt_does_not_take_is_an_error_with_its_reason(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import TrtEngineError, UsageError

    with running(built(tmp_path)) as (session, context):
        device, stream = session.device, session.device.stream()
        context.prepare({"images": (1, 3, 8, 8)})
        buffers = {"images": device.allocate(768), "scores": device.allocate(64)}
        context.bind(buffers)
        world.faults.refused.add("IExecutionContext.execute_async_v3")
        world.faults.says["IExecutionContext.execute_async_v3"] = [("ERROR", "enqueueV3: the moon is full")]
        with pytest.raises(TrtEngineError, match="the moon is full"):
            context.enqueue(stream)
        context.close()
        with pytest.raises(UsageError, match="the context is closed"):
            context.enqueue(stream)
        for item in (stream, *buffers.values()):
            item.close()


@BOTH
def test_values_that_decide_shapes_are_asked_for_and_held_on_the_host(world: Any, tmp_path: Path) -> None:
    import ctypes

    from trt_engine.errors import FeedError

    engine = built(tmp_path)
    world.shape_tensors.add("images")
    with running(engine) as (session, context):
        assert session.value_inputs == ("images",)
        with pytest.raises(FeedError, match=r"values of input `images` decide shapes"):
            context.prepare({"images": (1, 3, 8, 8)})
        with pytest.raises(FeedError, match="decide no shapes"):
            context.set_values("scores", np.zeros(1))
        given = images(1)["images"]
        context.set_values("images", given)
        with pytest.raises(FeedError, match="its shape is 2x3x8x8"):
            context.prepare({"images": (2, 3, 8, 8)})
        callers_own = given.copy()
        context.set_values("images", callers_own)
        callers_own[:] = 7  # is the caller's again
        context.prepare({"images": (1, 3, 8, 8)})
        scores = session.device.allocate(64)
        context.bind({"scores": scores})
        (native,) = [item for item in world.alive() if item.kind == "IExecutionContext"]
        held = np.frombuffer(ctypes.string_at(native.addresses["images"], given.nbytes), np.float32)
        np.testing.assert_array_equal(held.reshape(given.shape), given)
        scores.close()


def test_what_tensorrt_finds_missing_or_wrong_as_it_works_out_shapes_is_said(world: Any, tmp_path: Path) -> None:
    import ctypes

    from trt_engine.errors import FeedError, UsageError

    (key,) = (key for key, name in world.names.items() if name == "IExecutionContext.infer_shapes")

    def missing(call: Any) -> int:
        ctypes.c_uint64.from_address(call.address(1)).value = world.puppet.keep(b"images")
        return 1

    with running(built(tmp_path)) as (_, context):
        for answer, words in ((missing, "misses shapes or values of `images`"), (lambda call: -1, "the output shapes")):
            world.puppet.rules[key] = answer
            with pytest.raises(FeedError, match=words):
                context.prepare({"images": (1, 3, 8, 8)})
            with pytest.raises(UsageError, match="before the shapes were prepared"):
                context.bind({})


def test_outputs_that_hold_sizes_are_read_on_the_host(world: Any, tmp_path: Path) -> None:
    import onnx_models

    engine = built(tmp_path, onnx_models.measured(tmp_path / "net.onnx"), ("x:1x3,2x3,9x3",))
    world.shape_tensors.add("size")
    with running(engine) as (session, context):
        assert session.host_outputs == {"size"} and not session.value_inputs
        for rows in (2, 9, 1):
            found = answers(session, context, {"x": np.ones((rows, 3), np.float32)})
            assert found["size"].tolist() == [rows, 3] and found["minus"].shape == (rows, 3)


def test_memory_for_a_tensor_is_refused_before_anything_runs(world: Any, tmp_path: Path) -> None:
    import onnx_models
    from trt_engine.errors import FeedError, UsageError

    engine = built(tmp_path, onnx_models.positions(tmp_path / "net.onnx"), ("x:1x3,2x3,9x3",))
    with running(engine) as (_, context):
        world.faults.refused.add("IExecutionContext.set_output_allocator")
        with pytest.raises(UsageError, match="taking the output `where` as it comes failed"):
            context.prepare({"x": (2, 3)})
    world.faults.refused = {"IExecutionContext.set_tensor_address"}
    world.shape_tensors.add("x")
    with running(engine) as (_, context):
        context.set_values("x", np.ones((2, 3), np.float32))
        with pytest.raises(FeedError, match="giving `x` its values failed"):
            context.prepare({"x": (2, 3)})


# ------------------------------------------------------------------------------------------------ memory


@ALL
def test_scratch_memory_of_ours_fits_the_shapes_in_use(world: Any, tmp_path: Path) -> None:
    with running(built(tmp_path), memory_strategy="user_managed") as (session, context):
        small = answers(session, context, images(1))
        at_first = context.scratch_bytes
        large = answers(session, context, images(4))
        assert 0 < at_first < context.scratch_bytes == int(session.runtime_info()["scratch_bytes"])
        for batch, found in ((1, small), (4, large)):
            np.testing.assert_allclose(
                found["scores"], reference_outputs(tmp_path / "net.onnx", images(batch))["scores"], rtol=1e-5
            )


def test_no_scratch_size_is_an_error_where_tensorrt_says_so_and_no_need_where_it_does_not(
    world: Any, tmp_path: Path
) -> None:
    from trt_engine.errors import BuildError

    (key,) = (key for key, name in world.names.items() if name.endswith("update_device_memory_size_for_shapes"))
    with running(built(tmp_path), memory_strategy="user_managed") as (_, context):
        world.puppet.rules[key] = lambda call: 0
        context.prepare({"images": (1, 3, 8, 8)})
        assert context.scratch_bytes > 0, "an address all the same: a null one is refused"

        def refuses(call: Any) -> int:
            world.objects[call.id].say("ERROR", "updateDeviceMemorySizeForShapes: the moon is full")
            return 0

        world.puppet.rules[key] = refuses
        with pytest.raises(BuildError, match=r"the scratch memory failed: .*the moon is full"):
            context.prepare({"images": (2, 3, 8, 8)})


def test_memory_refused_once_is_not_the_reason_of_everything_after(world: Any, tmp_path: Path) -> None:
    from trt_engine.device.fake import FakeDevice
    from trt_engine.errors import EngineError, MemoryExhausted, TrtEngineError

    tight = FakeDevice(0, memory_bytes=30 << 10)
    session, contexts = load(built(tmp_path), tight), []
    with pytest.raises(MemoryExhausted):
        for _ in range(64):
            contexts.append(session.create_context())
    contexts.pop().close()
    world.faults.nothing_from.add("ICudaEngine.create_execution_context")
    with pytest.raises(EngineError, match="gave no reason"):
        session.create_context()
    stream, context = tight.stream(), contexts[0]
    context.prepare({"images": (1, 3, 8, 8)})
    buffers = {"images": tight.allocate(768), "scores": tight.allocate(64)}
    context.bind(buffers)
    world.faults.refused.add("IExecutionContext.execute_async_v3")
    with pytest.raises(TrtEngineError, match="gave no reason") as caught:
        context.enqueue(stream)
    assert not isinstance(caught.value, MemoryExhausted)
    for item in (*contexts, stream, *buffers.values(), session):
        item.close()


@ALL
def test_tensorrts_own_memory_is_counted_and_refused_as_out_of_memory(world: Any, tmp_path: Path) -> None:
    from trt_engine.device.fake import FakeDevice
    from trt_engine.errors import MemoryExhausted

    engine = built(tmp_path)
    with pytest.raises(MemoryExhausted):
        load(engine, FakeDevice(0, memory_bytes=1024))
    tight = FakeDevice(0, memory_bytes=20 << 10)
    session = load(engine, tight)
    assert tight.memory().allocated_bytes > 0
    contexts = []
    with pytest.raises(MemoryExhausted):
        for _ in range(64):
            contexts.append(session.create_context())
    assert contexts, "one fits"
    for context in contexts:
        context.close()
    session.close()
    assert tight.memory().allocated_bytes == 0


@ALL
def test_weights_on_the_device_are_bounded_and_read_back(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import SetupError, TrtEngineError, UsageError

    engine = built(tmp_path, weight_streaming="on")
    if world.version < (10, 1):
        with pytest.raises(UsageError, match=r"needs TensorRT 10\.1"):
            load(engine, weight_streaming_budget="50%")
        return
    for asked, share in (("off", 1.0), ("50%", 0.5), ("auto", 0.5), ("0", 0.0)):
        with running(engine, weight_streaming_budget=asked) as (session, context):
            streamable = int(session.runtime_info()["weights_on_device"].split()[2])
            assert session.budget_bytes == int(streamable * share)
            assert (context.no_graph is None) == (share == 1.0)
    world.faults.stubborn |= {"ICudaEngine.weight_streaming_budget_v2="}
    with pytest.raises((SetupError, TrtEngineError), match="TensorRT kept"):
        load(engine, weight_streaming_budget="1024B")
    with pytest.raises(UsageError, match="cannot be streamed"):
        load(built(tmp_path / "plain"), weight_streaming_budget="50%")


def test_the_end_comes_in_order_and_not_under_an_open_context(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import UsageError

    session = load(built(tmp_path))
    contexts = [session.create_context(), session.create_context()]
    with pytest.raises(UsageError, match="2 open context"):
        session.close()
    for context in contexts:
        context.close()
        context.close()
    session.close()
    session.close()
    left = {item.kind for item in world.alive()} & {"IExecutionContext", "ICudaEngine", "Runtime"}
    assert not left and not world.violations
    with pytest.raises(UsageError, match="the session is closed"):
        session.create_context()


# ------------------------------------------------------------------------------------------------ loading


@ALL
def test_host_code_runs_only_after_an_explicit_yes(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import EngineError

    engine = built(tmp_path, version_compatible="on")
    with pytest.raises(EngineError, match="holds code for the host") as caught:
        load(engine)
    assert "allow_host_code" in (caught.value.hint or "") and caught.value.exit_code == 10
    silent = replace(
        engine,
        passport=replace(engine.passport, requirements=replace(engine.passport.requirements, version_compatible=False)),
    )
    with pytest.raises(EngineError, match="holds code for the host") as caught:
        load(silent)
    assert "allow_host_code" in (caught.value.hint or ""), "a passport that does not know is no way around it"
    with running(engine, allow_host_code="on") as (session, context):
        assert answers(session, context, images(1))["scores"].shape == (1, 16)


def test_a_plan_without_its_lean_runtime_says_which_one_to_bring(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import EngineError, SetupError

    engine = built(tmp_path, version_compatible="on", exclude_lean_runtime="on")
    with pytest.raises(EngineError, match="needs the lean runtime of TensorRT") as caught:
        load(engine)
    assert "lean_runtime=" in (caught.value.hint or "")
    with pytest.raises(SetupError, match=r"the lean runtime .* does not exist"):
        load(engine, lean_runtime=str(tmp_path / "nowhere.so"))
    library = tmp_path / "libnvinfer_lean.so"
    library.write_text(world.version_text)
    with running(engine, lean_runtime=str(library)) as (session, context):
        assert answers(session, context, images(2))["scores"].shape == (2, 16)
    world.faults.nothing_from.add("Runtime.load_runtime")
    with pytest.raises(SetupError, match=r"loading the lean runtime `libnvinfer_lean\.so` failed"):
        load(engine, lean_runtime=str(library))


@BOTH
def test_a_stripped_plan_gets_its_weights_back_before_it_runs(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import EngineError, ModelError

    engine = built(tmp_path, strip_weights="on", refit="identical")
    model = tmp_path / "net.onnx"
    with running(engine) as (session, context):
        np.testing.assert_allclose(
            answers(session, context, images(2))["scores"], reference_outputs(model, images(2))["scores"], rtol=1e-5
        )
    elsewhere = model.rename(tmp_path / "moved.onnx")
    with pytest.raises(EngineError, match="stripped of its weights"):
        load(engine)
    with pytest.raises(ModelError, match=r"the model .* does not exist"):
        load(engine, refit_from=str(model))
    with running(engine, refit_from=str(elsewhere)) as (session, context):
        assert answers(session, context, images(1))["scores"].shape == (1, 16)


def test_an_engine_that_is_not_whole_after_its_weights_came_back_is_not_run(world: Any, tmp_path: Path) -> None:
    import onnx

    from trt_engine.errors import EngineError, ModelError

    engine = built(tmp_path, strip_weights="on")
    model = tmp_path / "net.onnx"
    proto = onnx.load(model)
    taken = proto.graph.initializer.pop(0)
    onnx.save(proto, tmp_path / "less.onnx")
    with pytest.raises(EngineError, match=f"has no weights for `{taken.name}`") as caught:
        load(engine, refit_from=str(tmp_path / "less.onnx"))
    assert "refit_from=" in (caught.value.hint or "")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), taken.name))
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match=r"cannot take the weights of .* another type or shape"):
        load(engine, refit_from=str(tmp_path / "other.onnx"))
    with pytest.raises(EngineError, match="weights cannot be replaced"):
        load(built(tmp_path / "plain"), refit_from=str(model))
    world.faults.refused.add("Refitter.refit_cuda_engine")
    with pytest.raises(EngineError, match="refitting the engine failed"):
        load(engine)
    world.faults.nothing_from.add("Refitter.__init__")
    with pytest.raises(EngineError, match="preparing to put weights back failed"):
        load(engine)
    assert not [item for item in world.alive() if item.kind == "ICudaEngine"], "none is left behind"


@ALL
def test_damaged_and_foreign_plans_are_refused_with_tensorrts_reason(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import EngineError

    engine = built(tmp_path)
    whole = engine.path.read_bytes()
    older = bytearray(whole)
    older[24:27] = bytes((9, 9, 9))
    for raw, reason in (
        (b"", "is empty"), (b"PK\x03\x04" * 20, "Magic tag"), (whole[:-9], "cut in its weights"),
        (whole[:36], "cut in its header"), (bytes(older), "Version tag does not match"),
    ):  # fmt: skip
        engine.path.write_bytes(raw)
        with pytest.raises(EngineError, match=reason) as caught:
            load(engine)
        assert caught.value.hint and caught.value.exit_code == 10


@ALL
def test_no_runtime_is_made_where_there_is_no_driver(world: Any, tmp_path: Path) -> None:
    import ctypes

    from trt_engine.backends.tensorrt.run import TensorRtRuntime
    from trt_engine.config.runtime import RuntimeConfig
    from trt_engine.errors import SetupError

    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return  # a machine with a driver shows nothing here
    engine = built(tmp_path)
    before = [item.kind for item in world.objects.values()].count("Runtime")
    with pytest.raises(SetupError, match="driver"):
        TensorRtRuntime().load(engine, RuntimeConfig(device="cuda:0"))
    assert [item.kind for item in world.objects.values()].count("Runtime") == before


def test_a_library_of_another_release_than_its_bindings_is_refused_before_it_is_called(
    world: Any, tmp_path: Path
) -> None:
    from trt_engine.backends.tensorrt.binding import TENSORRT
    from trt_engine.errors import SetupError

    engine = built(tmp_path)
    major, minor, patch, *_ = TENSORRT.version
    assert TENSORRT.library_version() == (major, minor, patch)
    TENSORRT.__dict__["version"] = (major, minor, patch + 1)
    for act in (lambda: load(engine), lambda: built(tmp_path / "another")):
        with pytest.raises(SetupError, match=r"the library they found is \d+") as caught:
            act()
        assert "one loader path" in (caught.value.hint or "")


def test_an_error_logged_while_the_runtime_is_made_is_a_failure(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import SetupError

    engine = built(tmp_path)
    world.faults.nothing_from.add("Runtime.__init__")
    with pytest.raises(SetupError, match=r"loading `net\.engine` failed"):
        load(engine)
    world.faults.nothing_from.clear()
    made = world.puppet.entries["create_runtime"]

    def complaining(call: Any) -> Any:
        world.say(call.address(0), "ERROR", "CUDA initialization failure with error: 35")
        return made(call)

    world.puppet.entries["create_runtime"] = complaining
    with pytest.raises(SetupError, match="CUDA initialization failure"):
        load(engine)


# ------------------------------------------------------------------------------------------------ layers


@ALL
def test_layers_are_read_at_shapes_and_cost_no_device_memory(world: Any, tmp_path: Path) -> None:
    from trt_engine.device.fake import FakeDevice

    device = FakeDevice(0)
    session = load(built(tmp_path), device)
    before = device.memory().peak_bytes
    found = session.layers()
    assert any(layer.kind and layer.is_matmul for layer in found) and all(layer.name for layer in found)
    assert device.memory().peak_bytes == before
    session.close()


@BOTH
def test_layer_times_are_asked_for_after_the_inference(world: Any, tmp_path: Path) -> None:
    from trt_engine.backends.tensorrt.context import LayerProfiler
    from trt_engine.errors import UsageError

    with running(built(tmp_path)) as (session, context):
        times = LayerProfiler()
        with pytest.raises(UsageError, match="no layer times"):
            times.report()
        context.profile_layers(times)
        answers(session, context, images(1))
        (native,) = [item for item in world.alive() if item.kind == "IExecutionContext"]
        assert native.values["enqueue_emits_profile"] is False, (
            "an inference waits for nothing, the report is asked for"
        )
        names = [name for name, _ in times.report()]
        assert names == [layer.name for layer in session.layers()] and all(ms == 0.5 for _, ms in times.report())
        assert len(times.report()) == len(names), "each report stands for itself"
        context.profile_layers(None)
        (native,) = [item for item in world.alive() if item.kind == "IExecutionContext"]
        assert native.values["profiler"] in (0, None) and native.values["enqueue_emits_profile"] is True


def test_a_profiler_somebody_keeps_does_not_keep_the_context(world: Any, tmp_path: Path) -> None:
    import gc

    from trt_engine.backends.tensorrt.context import LayerProfiler
    from trt_engine.errors import UsageError

    times = LayerProfiler()
    for _ in range(2):
        with running(built(tmp_path)) as (_, context):
            context.profile_layers(times)
    gc.collect()
    assert not [item for item in world.alive() if item.kind in ("IExecutionContext", "ICudaEngine")]
    with pytest.raises(UsageError, match="no layer times"):
        times.report()


def test_the_cards_layers_load_and_close_the_engine(world: Any, tmp_path: Path) -> None:
    from trt_engine.backends.tensorrt.run import layers

    assert any(layer.is_matmul for layer in layers(built(tmp_path)))
    assert not [item for item in world.alive() if item.kind == "ICudaEngine"]
