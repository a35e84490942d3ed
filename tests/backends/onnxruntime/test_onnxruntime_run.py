"""Sessions and contexts of ONNX Runtime."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import ml_dtypes
import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from patience import HANG_S
from programs import run_python
from trt_engine.backends.onnxruntime.host_session import OnnxRuntimeSession
from trt_engine.backends.onnxruntime.run import OnnxRuntime
from trt_engine.backends.onnxruntime.session import _run_in_thread
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import FeedError, UsageError

Open = Callable[..., OnnxRuntimeSession]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Engine]:
    return lambda path, **settings: te.build(path, store=te.Store(tmp_path / "store"), **settings)


@pytest.fixture
def opened(build: Callable[..., Engine], tmp_path: Path) -> Iterator[Open]:
    """`opened(models.two_inputs, batch=(1, 2, 4))`: the model's session, closed afterwards."""
    sessions: list[OnnxRuntimeSession] = []

    def make(model: Callable[[Path], Path], **settings: object) -> OnnxRuntimeSession:
        engine = build(model(tmp_path / "net.onnx"), **settings)
        sessions.append(OnnxRuntime().load(engine, RuntimeConfig()))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def test_element_types_numpy_lacks_go_in_and_come_out(opened: Open):
    x = np.array([[1.0, -2.0, 3.0], [4.0, 7.0, 2.0]], ml_dtypes.bfloat16)
    outputs = opened(models.casts, batch=2).run({"x": x})
    assert [array.dtype.name for array in outputs.values()] == ["bfloat16", "float8_e4m3fn", "int4"]
    want = np.maximum(x.astype(np.float32), 0)
    np.testing.assert_array_equal(outputs["brain"].astype(np.float32), want)
    np.testing.assert_array_equal(outputs["eight"].astype(np.float32), want)
    np.testing.assert_array_equal(outputs["four"].astype(np.int32), want)


def test_strings_go_in_and_come_out_beside_types_numpy_lacks(opened: Open):
    def identity(path: Path) -> Path:
        inputs = {"text": (models.STRING, ["n", 2]), "x": (models.BF16, ["n", 2])}
        nodes = [models.node("Identity", name, f"{name}_out") for name in inputs]
        return models.save(path, nodes, inputs, {f"{name}_out": spec for name, spec in inputs.items()})

    feeds = {"text": np.array([["a\0b", "é"], ["", "c"]], object), "x": np.array([[1, 2], [3, 4]], ml_dtypes.bfloat16)}
    outputs = opened(identity, batch=2).run(feeds)
    for name, array in feeds.items():
        np.testing.assert_array_equal(outputs[f"{name}_out"], array)


def test_four_bit_feeds_of_odd_length_are_packed_and_unpacked(opened: Open):
    def identity(path: Path) -> Path:
        four = (models.INT4, ["n"])
        return models.save(
            path, [models.node("Cast", "x", "f", to=1), models.node("Cast", "f", "y", to=models.INT4)],
            {"x": four}, {"y": four}, opset=21,
        )  # fmt: skip

    x = np.array([-8, 7, -1, 0, 3], ml_dtypes.int4)
    assert opened(identity, batch=5).run({"x": x})["y"].astype(int).tolist() == [-8, 7, -1, 0, 3]


SMALL_TYPES = {
    "int2": (26, [-2, 1, -1, 0, 1]),
    "uint2": (25, [3, 1, 2, 0, 3]),
    "int4": (22, [-8, 7, -1, 0, 3]),
    "uint4": (21, [15, 7, 1, 0, 3]),
    "float8_e4m3fn": (17, [448, -0.5, 1.5, 0, 3]),
    "float8_e4m3fnuz": (18, [240, -0.5, 1.5, 0, 3]),
    "float8_e5m2": (19, [57344, -0.5, 1.5, 0, 3]),
    "float8_e5m2fnuz": (20, [57344, -0.5, 1.5, 0, 3]),
}


@pytest.mark.parametrize("name", SMALL_TYPES)
def test_a_type_of_a_byte_or_less_goes_in_and_comes_out_of_an_engine(name: str, tmp_path: Path):
    number, values = SMALL_TYPES[name]
    path = models.save(
        tmp_path / "net.onnx", [models.node("Cast", "x", "f", to=1), models.node("Cast", "f", "y", to=number)],
        {"x": (number, [5])}, {"f": (1, [5]), "y": (number, [5])}, opset=25,
    )  # fmt: skip
    engine = te.build(path, store=te.Store(tmp_path / "store"))
    x = np.array(values, getattr(ml_dtypes, name))
    with te.load(engine) as runner:
        outputs = runner.infer({"x": x})
    assert outputs["f"].tolist() == values
    assert outputs["y"].dtype == x.dtype
    assert outputs["y"].astype(np.float32).tolist() == values


@pytest.mark.parametrize(
    "feeds",
    [
        {"a": np.ones((1, 4), np.float32)},
        {"a": np.ones((1, 4), np.float64), "b": np.ones((1, 4), np.float32)},
        {"a": np.ones((1, 5), np.float32), "b": np.ones((1, 5), np.float32)},
        {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)},
    ],
)
def test_feeds_nobody_checked_are_still_our_error(feeds: dict, opened: Open):
    with pytest.raises(FeedError, match="refuses the feeds"):
        opened(models.two_inputs).run(feeds)


# ------------------------------------------------------------------------------------------------ contexts


def test_a_freed_buffer_is_refused_and_not_read(opened: Open):
    session = opened(models.two_inputs)
    device, context = session.device, session.create_context()
    context.prepare({"a": (1, 4), "b": (1, 4)})
    buffers = {name: device.allocate(16) for name in ("a", "b", "total")}
    context.bind(buffers)
    buffers["a"].close()
    with pytest.raises(UsageError, match="closed buffer"):
        context.enqueue(device.stream())
    context.close()


# ------------------------------------------------------------------------------------------------ loading


def test_the_settings_of_the_build_hold_at_load_unless_others_are_given(build, tmp_path: Path):
    engine = build(models.two_inputs(tmp_path / "net.onnx"), options={"intra_op_threads": 1})
    assert OnnxRuntime().load(engine, RuntimeConfig()).runtime_info()["threads"] == "1"
    assert OnnxRuntime().load(engine, RuntimeConfig(options={"intra_op_threads": "2"})).runtime_info()["threads"] == "2"


SMALL = """
import os, sys
from dataclasses import replace
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from trt_engine.backends.onnxruntime.options import parse
from trt_engine.backends.onnxruntime.run import OnnxRuntime
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import UsageError

engine = Engine.open(sys.argv[1])
built = replace(engine.passport.build, config={"options": {"intra_op_threads": "17"}})
engine = Engine(engine.path, replace(engine.passport, build=built))
print(parse({"intra_op_threads": "16"}).intra_op_threads)
try:
    OnnxRuntime().load(engine, RuntimeConfig())
except UsageError as error:
    print(error.message)
print(OnnxRuntime().load(engine, RuntimeConfig(options={"intra_op_threads": "1"})).runtime_info()["threads"])
"""


def test_how_many_threads_are_too_many_follows_the_cores_and_an_engine_of_a_larger_machine_takes_fewer(
    build, tmp_path: Path
):
    engine = build(models.two_inputs(tmp_path / "net.onnx"))
    done = run_python("-c", SMALL, str(engine.path), timeout=HANG_S)
    assert done.stdout.splitlines() == [
        "16", "17 threads exceed the limit of 16 with 1 available core", "1"
    ], done.stderr  # fmt: skip


def test_what_was_decided_at_build_cannot_be_changed_at_load(build, tmp_path: Path):
    engine = build(models.two_inputs(tmp_path / "net.onnx"))
    with pytest.raises(UsageError, match="fixed when an engine is built") as caught:
        OnnxRuntime().load(engine, RuntimeConfig(options={"graph_optimization": "basic"}))
    assert "-O graph_optimization=basic" in (caught.value.hint or "")


# ------------------------------------------------------------------------------------------------ a hostile machine

HUNGRY = """
import resource, sys
from pathlib import Path
import numpy as np, psutil
import trt_engine as te
from trt_engine.errors import MemoryExhausted

with te.load(Path(sys.argv[1])) as runner:
    x = {"images": np.ones((1, 3, 8, 8), np.float32)}
    runner.infer(x)
    limit = psutil.Process().memory_info().vms + (64 << 20)
    many = {"images": np.ones((65536, 3, 8, 8), np.float32)}  # 256 MiB for each of its inner tensors
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        runner.infer(many)
    except MemoryExhausted as error:
        print("exhausted:", error.message)
    print("answers again:", runner.infer(x)["scores"].shape)
"""


def test_running_out_of_memory_is_told_and_the_session_lives_on(build, tmp_path: Path):
    engine = build(models.conv_net(tmp_path / "net.onnx"), batch=(1, 1, 65536))
    done = run_python("-c", HUNGRY, str(engine.path), timeout=HANG_S)
    assert done.stdout.splitlines() == [
        "exhausted: ONNX Runtime could not allocate 268435456 bytes while running", "answers again: (1, 16)"
    ], done.stderr  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_load_returns_when_onnxruntime_is_through_and_not_before():
    cancelled, through = threading.Event(), []

    def make() -> object:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        assert cancelled.wait(HANG_S)
        threading.Event().wait(0.1)  # what is left of the step that was under way
        through.append(True)
        return object()

    with pytest.raises(KeyboardInterrupt):
        _run_in_thread(make, cancelled.set)  # type: ignore[arg-type, return-value]
    assert through == [True]


def interrupted_at(step: int, call: Callable[[], object]) -> bool:
    """Call with an interruption at that line of all the main thread passes; False where the call has fewer."""
    passed = 0

    def at_line(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal passed
        passed += event == "line"
        if event == "line" and passed == step:
            raise KeyboardInterrupt
        return at_line

    before = sys.gettrace()
    sys.settrace(at_line)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_signal_at_any_step_of_a_wait_is_an_interruption_and_no_error_of_its_locks():
    for step in itertools.count(1):
        begun, through = [], []

        def make() -> object:
            begun.append(True)  # noqa: B023
            time.sleep(0.001)
            through.append(True)  # noqa: B023
            return object()

        reached = interrupted_at(step, lambda: _run_in_thread(make, lambda: None))
        assert len(through) == len(begun), step
        if not reached:
            break
    assert step > 10
