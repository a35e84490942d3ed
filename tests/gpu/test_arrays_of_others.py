"""Arrays of torch and CuPy on a GPU: read without a capsule, ordered after their streams, read anew when they changed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.errors import SetupError, TrtEngineError, UsageError

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
SLEEP = 200_000_000
"""Cycles of a delay kernel: some 100 ms."""


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> te.Engine:
    """y = x + x on `cuda:0`, rows of three floats."""
    folder = tmp_path_factory.mktemp("double")
    path = models.save(
        folder / "double.onnx",
        [models.node("Add", "x x", "y")],
        {"x": (models.FLOAT, ["batch", 3])},
        {"y": (models.FLOAT, ["batch", 3])},
    )
    try:
        return te.build(path, device="cuda:0", batch=(1, 4, 64), store=te.Store(folder / "store"))
    except SetupError as error:
        pytest.skip(f"no GPU for ONNX Runtime here: {error.message}")


@pytest.fixture(params=[False, True], ids=["launches", "graphs"])
def runner(request: pytest.FixtureRequest, double: te.Engine) -> Iterator[te.InferenceEngine]:
    with te.load(double, graphs=request.param) as loaded:
        yield loaded


def ask(runner: te.InferenceEngine, x: Any) -> np.ndarray:
    return torch.from_dlpack(runner.infer({"x": x}, on_device=True)["y"]).cpu().numpy()


def ones(rows: int = 2, value: float = 1.0) -> Any:
    return torch.full((rows, 3), float(value), device="cuda:0")


def cupy() -> Any:
    return pytest.importorskip("cupy")


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("side", [False, True], ids=["default", "side"])
def test_an_inference_comes_after_what_torchs_current_stream_holds(runner: te.InferenceEngine, side: bool) -> None:
    x = ones()
    for _ in range(3):
        ask(runner, x)  # the plan is made, the graph is captured
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for value in (3, 5, 7):
            torch.cuda._sleep(SLEEP)
            x.fill_(value)
            assert (ask(runner, x) == 2 * value).all()


def test_a_tensor_made_on_another_stream_is_read_where_that_stream_is_current(runner: te.InferenceEngine) -> None:
    stream = torch.cuda.Stream()
    for value in range(1, 6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP // 4)
            x = ones(2, value)
            assert (ask(runner, x) == 2 * value).all()


def test_an_inference_comes_after_streams_that_the_default_stream_waits_for(runner: te.InferenceEngine) -> None:
    blocking = cupy().cuda.Stream(non_blocking=False)
    stream = torch.cuda.ExternalStream(blocking.ptr)
    x = ones()
    for _ in range(3):
        ask(runner, x)
    with runner.bind({"x": x}) as call:
        for value in (3, 5, 7):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                x.fill_(value)
            assert (ask(runner, x) == 2 * value).all()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                x.fill_(value + 1)
            assert (torch.from_dlpack(call()["y"]).cpu().numpy() == 2 * value + 2).all()


def test_an_inference_on_one_gpu_does_not_take_the_default_stream_of_another_for_its_own(
    runner: te.InferenceEngine,
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = ones()
    for _ in range(3):
        ask(runner, x)
    for value in (3, 5, 7):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        x.fill_(value)
        with torch.cuda.device(1):
            assert (ask(runner, x) == 2 * value).all()


def test_replays_go_on_while_another_thread_captures_a_graph(double: te.Engine) -> None:
    """ONNX Runtime's own launches, and our captures of them, would break its capture."""
    x, y = ones(), ones()
    inside, over, failed = threading.Event(), threading.Event(), list[BaseException]()
    with te.load(double, graphs=True) as runner:
        for _ in range(5):
            wanted = ask(runner, x)

        def infer() -> None:
            inside.wait(30)
            try:
                for _ in range(20):
                    runner.infer({"x": x}, on_device=True)
            except BaseException as error:
                failed.append(error)
            over.set()

        thread = threading.Thread(target=infer)
        thread.start()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in "global" mode, which forbids other threads unsafe calls
            y.add_(1)
            inside.set()
            over.wait(30)
            y.add_(1)
        thread.join()
        assert not failed, failed
        graph.replay()
        assert (y.cpu().numpy() == 3).all() and np.array_equal(ask(runner, x), wanted)


def test_an_inference_comes_after_what_cupys_current_stream_holds(runner: te.InferenceEngine) -> None:
    cp = cupy()
    x = cp.ones((2, 3), np.float32)
    for _ in range(3):
        runner.infer({"x": x})
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    for value in (3, 5, 7):
        with stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(SLEEP)
            x.fill(value)
            assert (runner.infer({"x": x})["y"] == 2 * value).all()
            assert (cp.asnumpy(cp.from_dlpack(runner.infer({"x": x}, on_device=True)["y"])) == 2 * value).all()


class Interface:
    """An array of the third kind: nothing but `__cuda_array_interface__`, version 3, with the stream it is written on."""

    def __init__(self, tensor: Any, stream: int | None) -> None:
        self._tensor, self._stream, self.shape, self.dtype = tensor, stream, tuple(tensor.shape), np.dtype(np.float32)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._tensor.__cuda_array_interface__, "version": 3, "stream": self._stream}


def test_the_stream_of_the_cuda_array_interface_is_waited_for(runner: te.InferenceEngine) -> None:
    x, stream = ones(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for value in (3, 5, 7):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            x.fill_(value)
        assert (ask(runner, Interface(x, stream.cuda_stream)) == 2 * value).all()


# ------------------------------------------------------------------------------------------------ changed in place


def test_a_tensor_that_was_resized_is_read_as_it_is(runner: te.InferenceEngine) -> None:
    x = ones()
    for rows in (2, 2, 2, 40, 3, 64, 2):
        x.resize_(rows, 3).fill_(rows)
        assert (ask(runner, x) == np.full((rows, 3), 2 * rows)).all()


def test_a_tensor_that_was_set_to_other_memory_is_read_there(runner: te.InferenceEngine) -> None:
    x = ones()
    for value in range(2, 8):
        assert (ask(runner, x) == 2 * (value - 1)).all()
        x.set_(ones(2, value))
    for value in range(8, 12):
        x.data = ones(2, value)
        assert (ask(runner, x) == 2 * value).all()
    x.data = ones(5, 1)
    assert ask(runner, x).shape == (5, 3)


def test_tensors_that_come_and_go_with_the_same_ids_and_addresses(runner: te.InferenceEngine) -> None:
    ids, places = set(), set()
    for number in range(200):
        x = ones(1 + number % 5, number)
        ids.add(id(x))
        places.add(x.data_ptr())
        assert (ask(runner, x) == np.full((1 + number % 5, 3), 2 * number)).all()
        del x
    gc.collect()
    assert len(ids) < 200 and len(places) < 200  # some came again


def test_another_dtype_strides_and_gradients_are_refused_in_a_tensor_that_was_known(
    runner: te.InferenceEngine,
) -> None:
    x = ones()
    for _ in range(3):
        ask(runner, x)
    with pytest.raises(TrtEngineError, match="float64"):
        ask(runner, x.double())
    with pytest.raises(TrtEngineError, match="strided"):
        ask(runner, torch.ones(3, 2, device="cuda:0").t())
    with pytest.raises(TrtEngineError):
        ask(runner, ones().requires_grad_())
    part = torch.arange(12, dtype=torch.float32, device="cuda:0").reshape(4, 3)[1:3]
    assert (ask(runner, part) == 2 * part.cpu().numpy()).all()
    assert (ask(runner, x) == 2).all()


def test_tensors_of_the_host_and_of_the_gpu_in_turns(runner: te.InferenceEngine) -> None:
    for value in range(1, 7):
        x = ones(2, value)
        assert (ask(runner, x.cpu() if value % 2 else x) == 2 * value).all()
        assert (ask(runner, np.full((2, 3), value, np.float32)) == 2 * value).all()


def test_a_tensor_of_another_gpu_is_refused(runner: te.InferenceEngine) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    ask(runner, ones())
    with pytest.raises(TrtEngineError, match="another device"):
        ask(runner, torch.ones(2, 3, device="cuda:1"))


# ------------------------------------------------------------------------------------------------ graphs


@pytest.mark.parametrize("kind", ["torch", "cupy", "numpy"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_graph_is_captured_by_the_first_calls_whatever_the_arrays_are(
    double: te.Engine, kind: str, stays: bool
) -> None:
    x = {"torch": ones, "cupy": lambda: cupy().ones((2, 3), np.float32), "numpy": lambda: np.ones((2, 3), np.float32)}
    with te.load(double, graphs=True) as runner:
        for _ in range(2):
            runner.infer({"x": x[kind]()}, on_device=stays)
        assert runner.is_captured({"x": np.ones((2, 3), np.float32)})
        assert runner.runtime_info["graphs"] == "on"
        runner.infer({"x": ones()}, on_device=True)
        runner.infer({"x": np.ones((2, 3), np.float32)})
        assert runner.stats().pool.graphs.captured == 1
        assert (ask(runner, ones(3, 4)) == np.full((3, 3), 8)).all()  # padded to four rows on the GPU


# ------------------------------------------------------------------------------------------------ bound calls


def makers() -> dict[str, Callable[[], Any]]:
    return {
        "torch": ones,
        "cupy": lambda: cupy().ones((2, 3), np.float32),
        "interface": lambda: Interface(ones(), 1),
        "pinned": lambda: torch.ones(2, 3).pin_memory().numpy(),
        "numpy": lambda: np.ones((2, 3), np.float32),
    }


def put(array: Any, value: float) -> None:
    """On the current stream of the array's library, or at once."""
    if isinstance(array, np.ndarray):
        array[...] = value
    elif isinstance(array, Interface):
        array._tensor.fill_(value)
    elif isinstance(array, torch.Tensor):
        array.fill_(value)
    else:
        array.fill(value)


def got(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    array = array._tensor if isinstance(array, Interface) else array
    return (array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)).cpu().numpy()


@pytest.mark.parametrize("given", ["torch", "cupy", "interface", "pinned", "numpy"])
@pytest.mark.parametrize("taken", ["torch", "cupy", "pinned", "numpy", None])
def test_a_bound_call_reads_and_writes_where_it_was_bound(
    runner: te.InferenceEngine, given: str, taken: str | None
) -> None:
    x, y = makers()[given](), None if taken is None else makers()[taken]()
    with runner.bind({"x": x}, None if y is None else {"y": y}) as call:
        assert call.is_captured == (runner.runtime_info.get("graphs") == "on")
        for value in (2, 3, 4):
            put(x, value)
            outputs = call()
            assert y is None or outputs["y"] is y
            assert (got(outputs["y"]) == 2 * value).all()
            assert (ask(runner, ones(3, value)) == 2 * value).all()


@pytest.mark.parametrize("given", ["torch", "pinned", "numpy"])
@pytest.mark.parametrize("taken", ["torch", "pinned"])
@pytest.mark.parametrize("as_integer", [False, True])
def test_an_enqueued_call_is_ordered_on_the_callers_stream_and_does_not_wait(
    runner: te.InferenceEngine, given: str, taken: str, as_integer: bool
) -> None:
    x, y, stream = makers()[given](), makers()[taken](), torch.cuda.Stream()
    seen = [torch.zeros(2, 3, device="cuda:0") for _ in range(3)]
    torch.cuda.synchronize()
    with runner.bind({"x": x}, {"y": y}) as call, torch.cuda.stream(stream):
        target = y if isinstance(y, torch.Tensor) else torch.from_numpy(y)
        for number, copy in enumerate(seen):
            if number and given == "pinned":
                stream.synchronize()  # pinned memory is read in the order of the stream
            torch.cuda._sleep(SLEEP)
            put(x, number + 2)
            call.enqueue(stream.cuda_stream if as_integer else stream)
            assert not stream.query(), "it waited"
            copy.copy_(target, non_blocking=True)
        stream.synchronize()
    for number, copy in enumerate(seen):
        assert (copy.cpu().numpy() == 2 * (number + 2)).all()


def test_a_bound_call_comes_after_what_torchs_current_stream_holds(runner: te.InferenceEngine) -> None:
    x, y, stream = ones(), ones(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with runner.bind({"x": x}, {"y": y}) as call, torch.cuda.stream(stream):
        for value in (3, 5, 7):
            torch.cuda._sleep(SLEEP)
            x.fill_(value)
            call()
            assert (y.cpu().numpy() == 2 * value).all()


@pytest.mark.parametrize("how", ["resize_", "set_", "data"])
def test_a_bound_tensor_whose_memory_was_replaced_is_refused(runner: te.InferenceEngine, how: str) -> None:
    x, y = ones(), ones()
    with runner.bind({"x": x}, {"y": y}) as call:
        call()
        if how == "resize_":
            x.resize_(4096, 3)
        elif how == "set_":
            x.set_(ones())
        else:
            x.data = ones()
        with pytest.raises(UsageError, match="other memory"):
            call()
        with pytest.raises(UsageError, match="other memory"):
            call.enqueue(torch.cuda.current_stream())


def test_a_bound_call_keeps_its_tensors_and_refuses_what_does_not_fit(runner: te.InferenceEngine) -> None:
    call = runner.bind({"x": ones(2, 4)}, {"y": ones()})
    others = [ones(2, 9) for _ in range(50)]  # would take freed memory
    assert (call()["y"].cpu().numpy() == 8).all()
    del others
    call.close()
    with pytest.raises(UsageError, match="closed"):
        call()
    x = ones()
    for output, match in (
        (ones(3), "expected 2x3"),
        (ones().half(), "float16"),
        (torch.ones(3, 2, device="cuda:0").t(), "strided"),
        (x, "share memory"),
    ):
        with pytest.raises(UsageError, match=match):
            runner.bind({"x": x}, {"y": output})


def test_large_host_arrays_are_staged_whole(tmp_path: Path) -> None:
    """Chunks of a copy meet each other exactly, and outputs of any size come back whole."""
    path = models.save(
        tmp_path / "wide.onnx",
        [models.node("Add", "x x", "y")],
        {"x": (models.FLOAT, ["batch", 1_000_003])},
        {"y": (models.FLOAT, ["batch", 1_000_003])},
    )
    engine = te.build(path, device="cuda:0", batch=(1, 4, 8), store=te.Store(tmp_path / "store"))
    draw = np.random.default_rng(0)
    with te.load(engine) as runner:
        for rows in (1, 3, 8, 8, 8, 3, 3):
            x = draw.random((rows, 1_000_003), np.float32)
            assert np.array_equal(runner.infer(x)["y"], x + x)
            strided = x[:, ::-1]
            assert np.array_equal(runner.infer(strided)["y"], strided + strided)
