"""Contexts on streams: what they promise wherever the memory is. Here it is the host's, and ONNX Runtime runs on the CPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.backends.onnxruntime import run, session, stream_session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import ProviderSelection, select_providers
from trt_engine.backends.onnxruntime.stream_session import OnnxRuntimeMultiStreamSession, StreamSession, cpu_operators
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Buffer, Stream
from trt_engine.device.host import HostDevice, HostStream
from trt_engine.errors import DeviceLost, FeedError, MemoryExhausted, TrtEngineError, UsageError
from trt_engine.runtime.assemble import runner_for_session
from trt_engine.runtime.context_pool import ContextPool

Open = Callable[..., OnnxRuntimeMultiStreamSession]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """`opened(models.two_inputs, batch=(1, 2, 8))`: its session with streams, over the host's memory."""
    made: list[OnnxRuntimeMultiStreamSession] = []

    def make(model: Callable[[Path], Path], **settings: object) -> OnnxRuntimeMultiStreamSession:
        engine = te.build(model(tmp_path / "net.onnx"), store=te.Store(tmp_path / "store"), **settings)
        device = HostDevice()

        def loaded() -> ort.InferenceSession:
            made_of = session.session_options(OnnxRuntimeOptions(), level="none")
            return session.create_session(engine.path, made_of, ProviderSelection(("cpu",), ({},), "cpu", strict=False))

        def on(stream: Stream) -> StreamSession:
            return StreamSession(loaded(), stream, no_graph_reason="the CPU has no graphs")

        made.append(
            OnnxRuntimeMultiStreamSession(
                on(device.stream()), engine.signature, engine.passport.profiles, {"device": "cpu"}, device, on,
                loaded, loaded, device_spec=("cpu", 0),
            )
        )  # fmt: skip
        return made[-1]

    yield make
    for item in made:
        item.close()


def rows(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


def buffers(streams: OnnxRuntimeMultiStreamSession, shapes: dict[str, tuple[int, ...]]) -> dict[str, Buffer]:
    return {name: streams.device.allocate(4 * int(np.prod(shape))) for name, shape in shapes.items()}


def fill(streams: OnnxRuntimeMultiStreamSession, held: dict[str, Buffer], stream: Stream, **values: np.ndarray) -> None:
    for name, array in values.items():
        streams.device.upload(array, held[name], stream)


def read(
    streams: OnnxRuntimeMultiStreamSession, buffer: Buffer, shape: tuple[int, ...], stream: Stream
) -> list[list[float]]:
    array = np.empty(shape, np.float32)
    streams.device.download(buffer, array, stream)
    stream.synchronize()
    return array.tolist()


def test_a_native_stream_is_kept_until_the_session_on_it_has_ended(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(HostStream, "retain", lambda self: events.append("retained"), raising=False)
    session = opened(models.two_inputs, batch=(1, 2, 8))
    loaded = weakref.ref(session._stream_sessions[0].loaded)
    monkeypatch.setattr(
        HostStream, "release", lambda self: events.append("in use" if loaded() else "released"), raising=False
    )
    pool = ContextPool(session, (), RuntimeConfig())
    pool.run({spec.name: rows(2) for spec in session.signature.inputs})
    pool.close()  # closes its stream, then the session
    assert events == ["retained", "released"]


@pytest.mark.parametrize("captures", [False, True])
def test_some_launches_and_the_last_inference_are_synchronized(
    opened: Open, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """What the others leave on the stream is freed by them; a graph needs what its capture has left."""
    monkeypatch.setattr(stream_session, "_CLEAN_UP_EVERY", 4)
    session = opened(models.two_inputs, batch=(1, 2, 8))
    found = session._stream_sessions[0]
    found._captures = captures
    plain, runs = found._inner, []

    def run(binding: object, options: ort.RunOptions) -> None:
        runs.append(options is found._sync_options)
        plain(binding, options)

    found._inner = run
    last: list[tuple[dict[str, np.ndarray], bool]] = []
    whole = found.loaded.run

    def final(names: object, feeds: dict[str, np.ndarray], options: ort.RunOptions) -> object:
        last.append((feeds, options is found._sync_options))
        return whole(names, feeds, options)

    monkeypatch.setattr(found.loaded, "run", final)
    pool = ContextPool(session, (), RuntimeConfig())
    for _ in range(9):
        pool.run({spec.name: rows(2) for spec in session.signature.inputs})
    pool.close()
    assert runs == ([False] * 9 if captures else [False, False, False, True] * 2 + [False])
    ((feeds, synchronized),) = last
    assert synchronized and {name: array.shape for name, array in feeds.items()} == {
        spec.name: (1, 4) for spec in session.signature.inputs
    }


def test_a_session_that_cannot_run_any_more_ends_all_the_same(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(models.two_inputs, batch=(1, 2, 8))

    def refused(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(session._stream_sessions[0].loaded, "run", refused)
    pool = ContextPool(session, (), RuntimeConfig())
    pool.run({spec.name: rows(2) for spec in session.signature.inputs})
    pool.close()
    assert not session._stream_sessions


def test_a_context_runs_what_is_bound_and_follows_buffers_and_shapes_that_change(opened: Open):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    stream, context = streams.stream(), streams.create_context()
    for count in (2, 5, 1):
        shapes = {"a": (count, 4), "b": (count, 4)}
        assert context.prepare(shapes) == {"total": (count, 4)}
        for value in (1.0, 7.0):  # new memory without a new `prepare`
            held = buffers(streams, shapes | {"total": (count, 4)})
            context.bind(held)
            fill(streams, held, stream, a=rows(count, value), b=rows(count, 1.0))
            context.enqueue(stream)
            assert read(streams, held["total"], (count, 4), stream) == [[value + 1] * 4] * count
    context.close()
    stream.close()


def test_a_context_runs_on_a_stream_from_elsewhere_too(opened: Open):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    context, elsewhere = streams.create_context(), streams.device.stream()
    held = buffers(streams, context.prepare({"a": (1, 4), "b": (1, 4)}) | {"a": (1, 4), "b": (1, 4)})
    context.bind(held)
    for stream in (elsewhere, streams.stream(), streams.stream(), elsewhere):
        fill(streams, held, stream, a=rows(1, float(stream.handle)), b=rows(1, 0.5))
        context.enqueue(stream)
        assert read(streams, held["total"], (1, 4), stream) == [[stream.handle + 0.5] * 4]
    context.close()


def test_outputs_whose_size_the_data_decides_come_when_the_stream_is_done(opened: Open):
    streams = opened(models.positions, batch=(1, 2, 8))
    name = streams.signature.inputs[0].name
    shape = tuple(size if size > 0 else 4 for size in streams.signature.inputs[0].shape)
    stream, context = streams.stream(), streams.create_context()
    sized = context.prepare({name: shape})
    late = [output for output, size in sized.items() if -1 in size]
    assert late
    held = buffers(streams, {name: shape} | {key: size for key, size in sized.items() if -1 not in size})
    context.bind(held)
    with pytest.raises(UsageError, match="not there yet"):
        context.outputs()
    for count in (1, 2):
        array = np.zeros(shape, np.float32)
        array.reshape(-1)[:count] = 1
        streams.device.upload(array, held[name], stream)
        context.enqueue(stream)
        stream.synchronize()
        assert context.outputs()[late[0]].shape[-1] == count
    context.close()


def test_what_cannot_be_run_is_refused_before_onnxruntime_sees_an_address(opened: Open):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    stream, context = streams.stream(), streams.create_context()
    with pytest.raises(UsageError, match="before the shapes"):
        context.bind({})
    shapes = {"a": (2, 4), "b": (2, 4)}
    sized = dict(context.prepare(shapes)) | shapes
    held = buffers(streams, sized)
    with pytest.raises(UsageError, match="no buffer is bound to `total`"):
        context.bind({name: held[name] for name in "ab"})
    with pytest.raises(UsageError, match="before `prepare` and `bind`"):
        context.enqueue(stream)
    with pytest.raises(UsageError, match="there is no tensor `c`"):
        context.bind(held | {"c": held["a"]})
    with pytest.raises(UsageError, match="needs 32 bytes, its buffer has 16"):
        context.bind(held | {"a": streams.device.allocate(16)})
    with pytest.raises(UsageError, match="is not on `cpu`"):
        context.bind(held | {"a": HostDevice().allocate(32)})
    context.bind(held)
    held["a"].close()
    with pytest.raises(UsageError, match="closed buffer"):
        context.enqueue(stream)
    with pytest.raises(UsageError, match="open context"):
        streams.close()
    context.close()
    with pytest.raises(UsageError, match="closed"):
        context.enqueue(stream)


def test_a_capture_that_cannot_be_says_why_and_inference_goes_on(opened: Open):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    pool = ContextPool(streams, streams._profiles, RuntimeConfig(graphs=True))
    for value in (1.0, 2.0, 3.0):
        assert pool.run({"a": rows(1, value), "b": rows(1)})["total"].tolist() == [[value + 1] * 4]
    assert pool.runtime_info()["graphs"] == "none: the CPU has no graphs"
    assert pool.stats().graphs.captured == 0
    pool.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_pool_of_contexts_answers_every_caller_with_its_own_rows(opened: Open, count: int):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    pool = runner_for_session(streams, streams._profiles, RuntimeConfig(contexts=3, streams=count))
    assert isinstance(pool, ContextPool)
    wrong: list[int] = []

    def ask(number: int) -> None:
        for turn in range(30):
            many = 1 + (number + turn) % 8
            found = pool.run({"a": rows(many, number), "b": rows(many, turn)})["total"]
            if not (found.shape == (many, 4) and (found == number + turn).all()):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.close()


def test_the_direct_way_is_still_there_and_gives_the_same(opened: Open):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    feeds = {"a": rows(3, 2.0), "b": rows(3)}
    assert streams.run(feeds)["total"].tolist() == [[3.0] * 4] * 3
    context, stream = (
        streams.create_context(),
        streams.device.stream(),
    )  # after `run`, which had given the first session up
    held = buffers(streams, context.prepare({"a": (3, 4), "b": (3, 4)}) | {"a": (3, 4), "b": (3, 4)})
    context.bind(held)
    fill(streams, held, stream, **feeds)
    context.enqueue(stream)
    assert read(streams, held["total"], (3, 4), stream) == [[3.0] * 4] * 3
    context.close()
    streams.close()
    with pytest.raises(UsageError, match="closed"):
        streams.run(feeds)
    with pytest.raises(UsageError, match="closed"):
        streams.stream()


def test_the_operators_on_the_cpu_are_named(opened: Open):
    streams = opened(models.two_inputs, batch=(1, 2, 8))
    assert streams._loaded is not None
    assert cpu_operators(streams._loaded) == ["Add"]


# ------------------------------------------------------------------------------------------------ settings and errors

GPU_BUILD = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


def test_a_session_on_a_stream_is_told_which_and_the_choice_stays_as_it_was():
    choice = select_providers(
        ("cuda", "cpu"), "cuda:0", options={"cuda.prefer_nhwc": "1"}, available=GPU_BUILD, gpus=()
    )
    made = choice.with_stream(4711).with_cuda_graphs()
    assert made.options[0] == choice.options[0] | {"user_compute_stream": "4711", "enable_cuda_graph": "1"}
    assert made.options[1] == {}
    assert choice.options[0] == {"device_id": "0", "use_tf32": "0", "prefer_nhwc": "1"}


@pytest.mark.parametrize(
    ("setting", "found", "hint"),
    [
        ("gpu_mem_limt", "has no setting `gpu_mem_limt`", "did you mean `gpu_mem_limit`"),
        ("enable_cuda_graph", "is set by trt-engine itself", "graphs=True"),
        ("user_compute_stream", "is set by trt-engine itself", "streams="),
        ("fuse_conv_bias", "is not offered: a network of two convolutions", "leave it out"),
    ],
)
def test_a_setting_the_cuda_provider_does_not_have_is_named_before_anything_is_loaded(setting, found, hint):
    with pytest.raises(UsageError, match=found) as caught:
        select_providers((), "cuda:0", options={f"cuda.{setting}": "1"}, available=GPU_BUILD, gpus=())
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 268435456",
            MemoryExhausted, "could not allocate 268435456 bytes of `cuda:0`",
        ),
        (
            "Available memory of 1048576 is smaller than requested bytes of 9437184",
            MemoryExhausted, "could not allocate 9437184 bytes of `cuda:0` while running: 1048576 are left below its limit",
        ),
        ("CUDA failure 2: out of memory ; GPU=0", MemoryExhausted, "out of memory of `cuda:0`"),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", DeviceLost, "`cuda:0` is lost"),
        ("Got invalid dimensions for input: x", FeedError, "refuses the feeds"),
        (
            "Error in execution: CUDA failure 900: operation not permitted when stream is capturing ; GPU=0 ; hostname=h",
            TrtEngineError, "another thread captures a CUDA graph",
        ),
        (
            "Error in execution: [with ERRTYPE = cublasStatus_t; bool THRW = true] CUBLAS failure 14: "
            "CUBLAS_STATUS_INTERNAL_ERROR ; GPU=0",
            TrtEngineError, "failed on `cuda:0`: CUBLAS failure 14: CUBLAS_STATUS_INTERNAL_ERROR",
        ),
    ],
)  # fmt: skip
def test_what_goes_wrong_on_a_gpu_becomes_an_error_of_ours_that_names_it(text, kind, said):
    found = session.translate_run_error(RuntimeError(text), "cuda:0")
    assert type(found) is kind
    assert said in found.message


def test_what_refuses_our_own_capture_is_not_laid_on_another_threads():
    error = RuntimeError(
        "Error in execution: CUDA failure 900: operation not permitted when stream is capturing ; GPU=0"
    )
    found = session.translate_run_error(error, "cuda:0", captured=True)
    assert "cannot be captured on `cuda:0`: CUDA failure 900: operation" in found.message
    assert "another thread" not in found.message


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"batching": te.Batching(max_batch=4)}, True),
        ({"batching": te.Batching()}, True),
        ({"batching": te.Batching(max_batch=1)}, False),
        ({"batching": te.Batching(buckets=(4,))}, False),
        ({"batching": te.Batching(buckets=(2, 4))}, True),
        ({"batching": te.Batching(max_batch=4), "graphs": True}, False),
        ({"batching": te.Batching(max_batch=4), "graphs": False}, False),
        ({}, False),
    ],
)
def test_batches_of_changing_size_without_graphs_are_warned_of_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    warned: bool,
):
    engine = te.build(models.two_inputs(tmp_path / "sum.onnx"), batch=(1, 2, 4), parity=False, backend="onnxruntime")
    monkeypatch.setattr(run, "_warned_engines", set())
    for _ in range(2):
        run._warn_of_changing_batches(engine, te.RuntimeConfig(**settings))
    assert [record.message for record in caplog.records if "plans each convolution again" in record.message] == [
        f"`{engine.path.name}`: ONNX Runtime plans each convolution again, about 1 ms each, whenever the size of a batch "
        "changes; `te.load(engine, graphs=True, batching=...)` captures each size once, `graphs=False` accepts it"
    ] * warned


@pytest.mark.parametrize("batch", [1, 4])
def test_an_engine_of_one_batch_size_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, batch: int
):
    """The batcher pads to it."""
    engine = te.build(models.two_inputs(tmp_path / "sum.onnx"), batch=batch, parity=False, backend="onnxruntime")
    monkeypatch.setattr(run, "_warned_engines", set())
    run._warn_of_changing_batches(engine, te.RuntimeConfig(batching=te.Batching()))
    assert "plans each convolution again" not in caplog.text
