"""What only a GPU shows of the CUDA device: real time, copies behind real work, the card's end, other libraries' arrays.

The promises all devices share are in tests/device/test_device_promises.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.ptx import SPIN
from programs import run_python
from trt_engine.device import Stream, open_device
from trt_engine.errors import MemoryExhausted, SetupError, UsageError

pytestmark = pytest.mark.gpu

PTX = (
    SPIN
    + rb""".visible .entry poke(.param .u64 address, .param .u32 value)
{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [address];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""
)

MIB = 1 << 20


@pytest.fixture
def stream(device: Any) -> Iterator[Any]:
    made = device.stream()
    yield made
    made.close()


class Kernels:
    """The two kernels, in the device's context."""

    def __init__(self, device: Any) -> None:
        from cuda.bindings import driver

        self.driver, self.device = driver, device
        with device.activate():
            (module,) = device.check_status(driver.cuModuleLoadData(PTX + b"\0"))
            (self._spin,) = device.check_status(driver.cuModuleGetFunction(module, b"spin"))
            (self._poke,) = device.check_status(driver.cuModuleGetFunction(module, b"poke"))

    def _launch(self, function: Any, stream: Any, values: tuple[int, ...], types: tuple[Any, ...]) -> None:
        with self.device.activate():
            self.device.check_status(
                self.driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.handle, (values, types), 0)
            )

    def spin(self, stream: Any, ms: float) -> None:
        self._launch(self._spin, stream, (int(ms * 1e6),), (ctypes.c_uint64,))

    def poke(self, stream: Any, address: int, value: int) -> None:
        self._launch(self._poke, stream, (address, value), (ctypes.c_uint64, ctypes.c_uint32))


@pytest.fixture
def kernels(device: Any) -> Kernels:
    return Kernels(device)


def test_an_event_measures_a_kernel_of_known_length(kernels: Kernels, stream: Any) -> None:
    kernels.spin(stream, 1)
    stream.synchronize()
    found = []
    for ms in (2.0, 20.0):
        before = stream.record()
        kernels.spin(stream, ms)
        after = stream.record()
        assert not after.done()
        found.append(after.elapsed_ms(before))
        assert after.done()
    print(f"\nspin of 2 and 20 ms by events: {found[0]:.3f} and {found[1]:.3f} ms")
    assert found[0] >= 2.0 and found[1] >= 20.0


def test_enqueueing_returns_before_the_device_is_done(device: Any, kernels: Kernels, stream: Any) -> None:
    pinned, buffer = device.pinned(MIB), device.allocate(MIB)
    kernels.spin(stream, 200)
    device.upload(pinned.array(), buffer, stream)
    device.download(buffer, pinned.array(), stream)
    event = stream.record()
    assert not event.done()
    event.synchronize()
    for item in (pinned, buffer):
        item.close()


@pytest.mark.parametrize("nbytes", [64, 64 << 10, 64 * MIB])
def test_an_ordinary_array_is_free_again_behind_a_long_kernel(
    device: Any, kernels: Kernels, stream: Any, nbytes: int
) -> None:
    buffer, x, out = device.allocate(nbytes), np.full(nbytes, 1, np.uint8), np.zeros(nbytes, np.uint8)
    kernels.spin(stream, 100)
    started = time.perf_counter()
    device.upload(x, buffer, stream)
    took_ms = (time.perf_counter() - started) * 1e3
    x[:] = 2
    device.download(buffer, out, stream)
    stream.synchronize()
    print(f"\nupload of {nbytes} pageable bytes behind a kernel of 100 ms returned after {took_ms:.2f} ms")
    assert (out == 1).all()
    buffer.close()


def test_a_pinned_array_is_read_when_its_turn_comes(device: Any, kernels: Kernels, stream: Any) -> None:
    pinned, buffer, out = device.pinned(MIB), device.allocate(MIB), np.zeros(MIB, np.uint8)
    pinned.array()[:] = 1
    kernels.spin(stream, 100)
    device.upload(pinned.array(), buffer, stream)
    pinned.array()[:] = 2
    device.download(buffer, out, stream)
    stream.synchronize()
    assert (out == 2).all()
    pinned.close()
    buffer.close()


def test_a_stream_waits_for_the_other_streams_kernel_and_only_if_told(device: Any, kernels: Kernels) -> None:
    one, other = device.stream(), device.stream()
    buffer, out = device.allocate(4), np.zeros(1, np.uint32)
    for told, expected in ((False, 1), (True, 2)):
        device.upload(np.array([1], np.uint32), buffer, one)
        one.synchronize()
        kernels.spin(one, 50)
        kernels.poke(one, buffer.pointer, 2)
        if told:
            other.wait(one.record())
        device.download(buffer, out, other)
        other.synchronize()
        assert out[0] == expected
        one.synchronize()
    for item in (buffer, one, other):
        item.close()


def test_a_graph_replays_kernels_and_copies(device: Any, kernels: Kernels, stream: Any) -> None:
    source, target, buffer = device.pinned(4), device.pinned(4), device.allocate(8)

    def work(stream: Stream) -> None:
        device.upload(source.array("uint32"), buffer.view(0, 4), stream)
        kernels.poke(stream, buffer.pointer + 4, 77)
        device.download(buffer.view(4, 4), target.array("uint32"), stream)

    target.array()[:] = 0
    graph = stream.capture(work)
    stream.synchronize()
    assert target.array("uint32")[0] == 0
    graph.replay(stream)
    stream.synchronize()
    assert target.array("uint32")[0] == 77
    before = stream.record()
    for _ in range(100):
        graph.replay(stream)
    print(f"\nreplay of a graph of three nodes: {stream.record().elapsed_ms(before) * 10:.1f} us")
    for item in (graph, source, target, buffer):
        item.close()


def test_a_capture_broken_by_the_driver_is_said_and_the_stream_goes_on(device: Any, stream: Any) -> None:
    from cuda.bindings import driver

    def work(stream: Any) -> None:
        driver.cuStreamSynchronize(stream.handle)  # not allowed: it invalidates the capture without an exception

    with pytest.raises(UsageError, match="cannot be captured in a graph"):
        stream.capture(work)
    buffer, out = device.allocate(4), np.zeros(4, np.uint8)
    device.upload(np.arange(4, dtype=np.uint8), buffer, stream)
    device.download(buffer, out, stream)
    stream.synchronize()
    assert out.tolist() == [0, 1, 2, 3]
    graph = stream.capture(lambda stream: device.copy(buffer, buffer.view(2, 2), 2, stream))
    graph.close()
    buffer.close()


def test_the_card_ends_somewhere_and_the_device_goes_on(device: Any, stream: Any) -> None:
    before = device.memory()
    print(f"\n{device.properties()}\n{before}")
    with pytest.raises(MemoryExhausted, match=f"cannot allocate {200 << 30} bytes: [0-9]+ of {before.total_bytes}"):
        device.allocate(200 << 30)
    held, size = [], 8 << 30
    with pytest.raises(MemoryExhausted) as caught:
        while True:
            held.append(device.allocate(size))
    print(f"after {len(held)} x 8 GiB: {caught.value}")
    assert device.memory().allocated_bytes == len(held) * size
    assert device.memory().free_bytes < size
    for item in held:
        item.close()
    again = device.allocate(size)
    device.upload(np.arange(10), again, stream)
    stream.synchronize()
    again.close()
    after = device.memory()
    assert (after.allocated_bytes, after.allocated_count) == (0, 0)
    assert after.free_bytes > before.free_bytes - 512 * MIB


def test_ten_thousand_allocations_do_not_grow_the_process_on_the_card(device: Any, stream: Any) -> None:
    from cuda.bindings import driver

    def used() -> int:
        with device.activate():
            free, total = device.check_status(driver.cuMemGetInfo())
        return int(total) - int(free)

    def churn(count: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            device.allocate(1 + number * 131 % (4 * MIB)).close()
        return (time.perf_counter() - started) / count * 1e6

    churn(500)
    before = used()
    took_us = churn(10_000)
    for _ in range(500):
        item = device.allocate(MIB, stream)
        item.close()
    stream.synchronize()
    print(f"\nallocate and close: {took_us:.1f} us; the card's used memory went from {before} to {used()} bytes")
    assert used() - before <= 8 * MIB


def test_dropped_buffers_come_back_when_the_device_is_synchronized(
    device: Any, stream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            device.upload(np.ones(MIB, np.uint8), device.allocate(MIB), stream)
            device.upload(device.pinned(MIB).array(), device.allocate(MIB, stream), stream)
        gc.collect()
    assert caplog.text.count("dropped without `close`") == 1
    assert 2 * MIB <= device.memory().allocated_bytes <= 10 * MIB
    device.synchronize()
    now = device.memory()
    assert (now.allocated_bytes, now.allocated_count, now.pinned_bytes) == (0, 0, 0)


def test_dropped_arrays_come_back_while_streams_are_busy_and_not_before_their_work_is_done(
    device: Any, kernels: Kernels, stream: Any
) -> None:
    other, out = device.stream(), np.zeros(1, np.uint32)
    waited = 0.0
    for value in range(100):
        buffer = device.allocate(512 * MIB)
        kernels.spin(stream, 2)
        kernels.poke(stream, buffer.pointer, value)
        other.wait(stream.record())
        device.download(buffer, out, other)
        array = buffer.array()
        del buffer, array
        started = time.perf_counter()
        device.allocate(1).close()
        waited += time.perf_counter() - started
        other.synchronize()
        assert out[0] == value
    print(
        f"\n100 x 512 MiB dropped: at most {device.memory().peak_bytes / (512 * MIB):.1f} at once, "
        f"{waited:.4f} s in 100 allocations"
    )
    assert device.memory().peak_bytes < 8 * 512 * MIB
    event = device.allocate(4)
    kernels.spin(stream, 100)
    kernels.poke(stream, event.pointer, 1)
    held = event.pointer
    event.array()
    del event
    gc.collect()
    others = [device.allocate(4) for _ in range(64)]
    assert held not in {item.pointer for item in others}
    for item in (*others, other):
        item.close()
    device.synchronize()
    assert device.memory().allocated_bytes == 0


def test_memory_freed_in_a_streams_order_is_waited_for_before_an_error(device: Any, kernels: Kernels) -> None:
    one, other = device.stream(), device.stream()
    size = int(device.memory().free_bytes * 0.6)
    first = device.allocate(size, one)
    kernels.spin(one, 100)
    first.close()
    second = device.allocate(size, other)
    second.close()
    for item in (one, other):
        item.close()


def test_a_capture_of_another_library_in_another_thread_is_not_broken(device: Any, stream: Any) -> None:
    """torch and ONNX Runtime capture in "global" mode: there most of what another thread asks of the driver is an error."""
    torch = pytest.importorskip("torch")
    from cuda.bindings import driver

    x, made = torch.ones(1000, device="cuda"), {}
    inside, done, failed = threading.Event(), threading.Event(), []

    def refused() -> None:
        with pytest.raises(MemoryExhausted):
            device.allocate(200 << 30)

    def opened() -> None:
        another = open_device("cuda:0")
        another.allocate(1 << 20).close()
        made["another"] = another

    def dropped() -> None:
        made["another"].close()
        made.clear()
        gc.collect()

    steps: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "stream": lambda: made.update(stream=device.stream()),
        "allocate": lambda: made.update(mine=device.allocate(5000)),
        "pinned": lambda: made.update(fixed=device.pinned(100_000)),
        "upload": lambda: device.upload(np.ones(5000, np.uint8), made["mine"], made["stream"]),
        "record": lambda: made.update(event=made["stream"].record()),
        "done": lambda: made["event"].done(),
        "wait": lambda: stream.wait(made["event"]),
        "event.synchronize": lambda: made["event"].synchronize(),
        "memory": device.memory,
        "capture": lambda: made.update(
            graph=made["stream"].capture(lambda stream: device.copy(made["mine"], made["fixed"], 5000, stream))
        ),
        "replay": lambda: made["graph"].replay(made["stream"]),
        "copy": lambda: device.copy(made["mine"], made["fixed"], 5000, made["stream"]),
        "stream.synchronize": lambda: made["stream"].synchronize(),
        "borrow": lambda: device.borrow(x, made["stream"]).close(),
        "wait_for_external": lambda: made["stream"].wait_for_external({1}),
        "dropped array": lambda: device.allocate(100).array() and None,
        "reap": lambda: device.allocate(100).close(),
        "stream's memory": lambda: device.allocate(100, made["stream"]).close(),
        "elapsed": lambda: made["stream"].record().elapsed_ms(made["event"]),
        "synchronize": device.synchronize,
        "refused": refused,
        "graph.close": lambda: made["graph"].close(),
        "pinned.close": lambda: made["fixed"].close(),
        "close": lambda: made["mine"].close(),
        "stream.close": lambda: made["stream"].close(),
        "open": opened,
        "drop": dropped,
    }

    def neighbour(handle: int) -> None:
        try:
            assert inside.wait(30)
            for name, step in steps.items():
                step()
                status, state = driver.cuStreamIsCapturing(handle)
                if state != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
                    failed.append(f"`{name}` broke the capture: {status}, {state}")
                    break
        except BaseException as error:
            failed.append(f"{name}: {error!r}")
        finally:
            done.set()

    lent = torch.cuda.Stream()
    thread = threading.Thread(target=neighbour, args=(lent.cuda_stream,))
    thread.start()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=lent, capture_error_mode="global"):
            y = x + 1
            inside.set()
            assert done.wait(30)
            y += 1
    except RuntimeError as error:
        failed.append(str(error).partition("\n")[0])
    thread.join()
    assert failed == []
    graph.replay()
    torch.cuda.synchronize()
    assert y.sum().item() == 3000


def test_dropping_waits_while_another_library_captures_our_stream(device: Any, stream: Any) -> None:
    torch = pytest.importorskip("torch")
    x, lent = torch.ones(1000, device="cuda"), torch.cuda.ExternalStream(stream.handle)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    failed = []

    def neighbour() -> None:
        try:
            device.allocate(100).array()
            device.allocate(100).close()
            device.allocate(100).close()
            device.synchronize()
        except BaseException as error:
            failed.append(error)

    with torch.cuda.graph(graph, stream=lent, capture_error_mode="thread_local"):
        y = x + 2
        thread = threading.Thread(target=neighbour)
        thread.start()
        thread.join()
    assert failed == []
    graph.replay()
    torch.cuda.synchronize()
    assert y.sum().item() == 3000
    del y, graph
    device.synchronize()
    assert device.memory().allocated_count == 0


def test_an_array_that_outlives_its_device_gives_its_memory_back(device: Any, kernels: Kernels) -> None:
    other = open_device("cuda:0")
    array, pinned = other.allocate(64 * MIB).array(), other.pinned(MIB).array()
    stream = other.stream()
    other.close()
    kernels.poke(stream, array.buffer.pointer, 7)
    assert (other.memory().allocated_count, other.memory().pinned_count) == (1, 1)
    del array, pinned
    gc.collect()
    assert (other.memory().allocated_count, other.memory().pinned_count) == (0, 0)
    stream.close()


def test_a_limit_counts_dropped_buffers_as_free_again() -> None:
    try:
        device = open_device("cuda:0", limit_bytes=10 * MIB)
    except SetupError as error:
        pytest.skip(f"no GPU here: {error.message}")
    for _ in range(5):
        device.allocate(8 * MIB)
    assert device.memory().total_allocations == 5
    device.synchronize()
    device.close()


def test_a_thread_keeps_the_context_it_had(device: Any, stream: Any) -> None:
    from cuda.bindings import driver

    found: list[int] = []

    def look() -> None:
        found.append(int(driver.cuCtxGetCurrent()[1]))
        buffer, other = device.allocate(100), device.stream()
        device.upload(np.ones(100, np.uint8), buffer, other)
        other.record().synchronize()
        other.capture(lambda stream: device.copy(buffer, buffer.view(50, 50), 50, stream)).replay(other)
        other.synchronize()
        buffer.close()
        other.close()
        found.append(int(driver.cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [0, 0]


# ------------------------------------------------------------------------------------------------ other libraries


def test_a_buffer_is_a_torch_tensor_without_a_copy_and_back(device: Any, kernels: Kernels, stream: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer = device.allocate(24)
    device.upload(np.arange(6, dtype=np.float32), buffer, stream)
    stream.synchronize()
    tensor = torch.from_dlpack(buffer.array("float32", (2, 3)))
    assert (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) == (buffer.pointer, (2, 3), torch.float32)
    assert tensor.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.as_tensor(buffer.array("float32"), device="cuda").data_ptr() == buffer.pointer
    half = torch.from_dlpack(buffer.array("bfloat16", (12,)))
    assert half.dtype == torch.bfloat16
    del half
    out = np.zeros(6, np.float32)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(2e8))  # some 100 ms: the borrowing stream must wait for it
        made = torch.full((6,), 3.0, device="cuda")
        made += 4
        borrowed = device.borrow(made, stream)
    device.download(borrowed, out, stream)
    stream.synchronize()
    assert out.tolist() == [7.0] * 6
    borrowed.close()
    with pytest.raises(UsageError, match="strided"):
        device.borrow(torch.zeros(4, 4, device="cuda").t(), stream)
    with pytest.raises(UsageError, match="another device"):
        device.borrow(torch.zeros(4), stream)
    del tensor
    gc.collect()
    buffer.close()


def test_a_tensor_keeps_the_buffer_it_came_from(device: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(device.allocate(MIB).array("uint8"))
    tensor.fill_(5)
    torch.cuda.synchronize()
    gc.collect()
    assert device.memory().allocated_count == 1
    others = [device.allocate(MIB) for _ in range(16)]
    assert tensor.data_ptr() not in {item.pointer for item in others}
    for item in others:
        item.close()
    del tensor
    gc.collect()
    device.synchronize()
    assert device.memory().allocated_count == 0


@pytest.mark.parametrize("handle", [1, 2])
def test_a_stream_follows_what_is_on_the_default_stream(device: Any, stream: Any, handle: int) -> None:
    torch = pytest.importorskip("torch")
    made, out = torch.full((6,), 3.0, device="cuda"), np.zeros(6, np.float32)
    made += 0  # its kernel is loaded now, which may wait for the GPU
    borrowed = device.borrow(made, stream)
    stream.synchronize()
    torch.cuda._sleep(int(2e8))  # some 100 ms
    made += 4
    assert stream.wait_for_external({handle})
    device.download(borrowed, out, stream)
    stream.synchronize()
    assert out.tolist() == [7.0] * 6
    borrowed.close()


def test_what_torch_writes_in_its_place_is_seen_when_our_array_is_borrowed(device: Any, stream: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer, out = device.allocate(24), np.zeros(6, np.float32)
    device.upload(np.full(6, 3, np.float32), buffer, stream)
    stream.synchronize()
    array = buffer.array("float32")
    tensor = torch.from_dlpack(array)
    tensor += 0  # its kernel is loaded now, which may wait for the GPU
    torch.cuda._sleep(int(2e8))  # some 100 ms
    tensor += 4
    borrowed = device.borrow(array, stream)
    device.download(borrowed, out, stream)
    stream.synchronize()
    assert out.tolist() == [7.0] * 6
    borrowed.close()
    buffer.close()


def test_memory_that_torch_still_reads_is_nobody_elses(device: Any, stream: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer, zeros = device.allocate(64 * MIB), device.pinned(64 * MIB)
    zeros.array()[:] = 0
    device.upload(np.ones(16 * MIB, np.float32), buffer, stream)
    stream.synchronize()
    tensor = torch.from_dlpack(buffer.array("float32"))
    del buffer
    assert tensor.sum().item() == 16 * MIB  # its kernels are loaded now, which may wait for the GPU
    torch.cuda._sleep(int(2e8))  # some 100 ms, and then it is read
    total = tensor.sum()
    del tensor
    gc.collect()
    others = [device.allocate(64 * MIB) for _ in range(4)]
    for item in others:
        device.upload(zeros.array(), item, stream)
    stream.synchronize()
    assert total.item() == 16 * MIB
    for item in (*others, zeros):
        item.close()
    device.synchronize()
    assert device.memory().allocated_count == 0


def test_a_cupy_array_comes_in_by_its_interface_and_its_stream(device: Any, stream: Any) -> None:
    cupy = pytest.importorskip("cupy")

    class Interface:
        """The array by `__cuda_array_interface__` alone."""

        def __init__(self, array: Any) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    with cupy.cuda.Stream(non_blocking=True):
        made = cupy.arange(1_000_000, dtype=cupy.int32) * 2
        lent = Interface(made)
        borrowed = device.borrow(lent, stream)
    out = np.zeros(1_000_000, np.int32)
    device.download(borrowed, out, stream)
    stream.synchronize()
    assert np.array_equal(out, np.arange(1_000_000, dtype=np.int32) * 2)
    borrowed.close()
    nowhere = Interface(made)
    nowhere.__cuda_array_interface__ = {"shape": (4,), "typestr": "|u1", "data": (0x10, False), "version": 3}
    with pytest.raises(UsageError, match="another device"):
        device.borrow(nowhere, stream)
    buffer = device.allocate(16)
    assert cupy.asarray(buffer.array("int32")).data.ptr == buffer.pointer
    buffer.close()


# ------------------------------------------------------------------------------------------------ faults


FAULT = """
import json, logging, sys
sys.path.insert(0, {folder!r})
logging.basicConfig(stream=sys.stderr)
from gpu.test_cuda_device import Kernels
from trt_engine.device import open_device
from trt_engine.errors import DeviceLost
import numpy as np

device = open_device("cuda:0")
stream, other, buffer, pinned = device.stream(), device.stream(), device.allocate(100), device.pinned(100)
graph = stream.capture(lambda stream: device.copy(buffer, pinned, 100, stream))
Kernels(device).poke(stream, 0x10, 1)
said = []
for call in (
    stream.synchronize, other.synchronize, device.synchronize, lambda: device.allocate(1), device.stream, device.memory,
    lambda: device.pinned(1), lambda: device.upload(np.zeros(1), buffer, other), lambda: graph.replay(other), other.record,
):
    try:
        call()
        said.append("nothing")
    except DeviceLost as error:
        said.append(error.message)
    except BaseException as error:
        said.append(repr(error))
for item in (graph, buffer, pinned, stream, other, device):
    item.close()
print(json.dumps(said))
"""


def test_an_illegal_access_is_said_by_synchronize_and_by_everything_after_it(device: Any) -> None:
    from pathlib import Path

    program = FAULT.format(folder=str(Path(__file__).parents[1]))
    done = run_python("-c", program, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"\n{said[0]}")
    assert len(set(said)) == 1 and "`cuda:0` is lost" in said[0] and "ILLEGAL_ADDRESS" in said[0], said
    assert "Traceback" not in done.stderr


def test_a_gpu_that_is_not_there_is_a_usage_error(device: Any) -> None:
    with pytest.raises(UsageError, match="no device `cuda:63`, available: `cuda:0`"):
        open_device("cuda:63")
    assert device.memory().total_bytes > 0
