"""Peaks of this machine's CPU: matrix products, memory, and the cost of a call and of a node."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
from onnx import TensorProto, helper

from trt_engine.backends.onnxruntime.session import ERRORS, error_summary
from trt_engine.device import info
from trt_engine.device.host import available_memory
from trt_engine.errors import MemoryExhausted, SetupError
from trt_engine.profiling.peaks.probe import PeakProbe, TimedWork, time_calls

LIBRARIES = f"onnxruntime {ort.__version__}, numpy {np.__version__}"
_GEMM = (512, 1024, 2048, 4096)
_CALLS, _NODES = 200, 256
_MIN_BYTES = 256 << 20
"""Minimum bytes of memory tests, unless a cache is larger."""


def measure_cpu(probe: PeakProbe) -> None:
    """Measure every peak of the CPU."""
    cores = info.cpu().cores
    onnx = OnnxRuntimeMatmul(cores)
    for name, dtype in (("fp32_matrix", "fp32"), ("int8_matrix", "int8"), ("int8_matrix_qdq", "int8-qdq")):
        probe.measure_rate(
            name,
            "TFLOP/s" if dtype == "fp32" else "TOP/s",
            _GEMM,
            lambda size, dtype=dtype: onnx.matmul(dtype, size),  # type: ignore[misc]
            lambda size: 2.0 * size**3,
            lambda size, dtype=dtype: onnx.describe(dtype, size),  # type: ignore[misc]
        )
    probe.measure_rate(
        "fp32_matrix_blas", "TFLOP/s", _GEMM, _blas_matmul, lambda size: 2.0 * size**3,
        lambda size: f"numpy {np.__version__} matmul {size}x{size}x{size} float32",
    )  # fmt: skip
    sizes = _memory_sizes()
    for name, make, moved in (("memory_read", _memory_read, 1), ("memory_copy", _memory_copy, 2)):
        probe.measure_rate(
            name, "GB/s", sizes,
            lambda nbytes, make=make: make(nbytes, cores),  # type: ignore[misc]
            lambda nbytes, moved=moved: float(moved * nbytes),  # type: ignore[misc]
            lambda nbytes, make=make: f"numpy {_OPERATION_TEXTS[make]} {nbytes >> 20} MiB, {cores} threads",  # type: ignore[misc]
        )  # fmt: skip
    probe.measure_cost(
        "call", _CALLS, _call_cost, f"onnxruntime {ort.__version__} session.run of one Identity of one number"
    )
    probe.measure_cost(
        "node", _CALLS // 10 * _NODES, _node_cost,
        f"onnxruntime {ort.__version__}, {_NODES} nodes of one number less an empty session, each",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ ONNX Runtime


class OnnxRuntimeMatmul:
    """Matrix products by ONNX Runtime on the CPU."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def describe(self, dtype: str, size: int) -> str:
        operator = {"int8": "MatMulInteger", "int8-qdq": "MatMul with Q/DQ"}.get(dtype, "MatMul")
        shape = f"{size}x{size}x{size}"
        return f"onnxruntime {ort.__version__} {operator} {shape} {dtype.partition('-')[0]}, {self.threads} threads"

    def matmul(self, dtype: str, size: int) -> TimedWork:
        """A product of two square matrices, the right one constant, like weights."""
        model, feed = _matmul_model(dtype, size)
        with _translate_errors():
            session = ort.InferenceSession(model, _options(self.threads), providers=["CPUExecutionProvider"])
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(feed))
            binding.bind_output("y")
        held = [(session, binding)]
        del session, binding  # `close` frees them, with the session's threads

        def seconds(runs: int) -> Sequence[float]:
            session, binding = held[0]
            with _translate_errors():
                return time_calls(lambda: session.run_with_iobinding(binding), runs)

        return TimedWork(seconds, held.clear)


def _options(threads: int | None = None, *, rewrite: bool = True) -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.log_severity_level = 4
    if threads:
        made.intra_op_num_threads = threads
    if not rewrite:
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return made


def _matmul_model(dtype: str, size: int) -> tuple[bytes, Any]:
    """A model of one matrix product, and its random feeds: zeros take less power."""
    draw = np.random.default_rng(0)
    shape = (size, size)
    left: Any
    right: Any
    if dtype in ("int8", "int8-qdq"):
        left = draw.integers(0, 256, shape, dtype=np.uint8)
        right = draw.integers(-127, 128, shape, dtype=np.int8)
    else:
        left, right = (draw.standard_normal(shape, dtype=np.float32) for _ in range(2))
    into, out = {
        "int8": (TensorProto.UINT8, TensorProto.INT32),
        "int8-qdq": (TensorProto.UINT8, TensorProto.UINT8),
    }.get(dtype, (TensorProto.FLOAT, TensorProto.FLOAT))
    held = TensorProto.INT8 if dtype.startswith("int8") else into
    constants = [helper.make_tensor("w", held, shape, right.tobytes(), raw=True)]
    if dtype == "int8":
        nodes = [helper.make_node("MatMulInteger", ["x", "w"], ["y"])]
    elif dtype == "int8-qdq":
        constants += [
            helper.make_tensor("scale", TensorProto.FLOAT, (), [0.02]),
            helper.make_tensor("wide", TensorProto.FLOAT, (), [0.02 * size]),
            helper.make_tensor("middle", TensorProto.UINT8, (), [128]),
            helper.make_tensor("zero", TensorProto.INT8, (), [0]),
        ]
        nodes = [
            helper.make_node("DequantizeLinear", ["x", "scale", "middle"], ["left"]),
            helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["right"]),
            helper.make_node("MatMul", ["left", "right"], ["product"]),
            helper.make_node("QuantizeLinear", ["product", "wide", "middle"], ["y"]),
        ]
    else:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return _model(nodes, into, out, shape, constants), left


def _model(nodes: Sequence[Any], into: int, out: int, shape: tuple[int, ...], constants: Sequence[Any] = ()) -> bytes:
    graph = helper.make_graph(
        list(nodes),
        "ceiling",
        [helper.make_tensor_value_info("x", into, shape)],
        [helper.make_tensor_value_info("y", out, shape)],
        list(constants),
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    raw: bytes = made.SerializeToString()
    return raw


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Translates ONNX Runtime's errors, and numpy's memory errors."""
    try:
        yield
    except MemoryError as error:
        raise MemoryExhausted("not enough memory") from error
    except ERRORS as error:
        text = error_summary(error)
        if "alloc" in text.lower() or "out of memory" in text.lower():
            raise MemoryExhausted(text) from error
        raise SetupError(text) from error


def _time_runs(session: ort.InferenceSession, calls: int) -> float:
    feeds = {"x": np.ones(1, np.float32)}
    names = ["y"]
    start = time.perf_counter()
    for _ in range(calls):
        session.run(names, feeds)
    return time.perf_counter() - start


def _identity_chain(length: int) -> ort.InferenceSession:
    """A model of `length` operators in sequence, on one number."""
    if length == 1:
        nodes = [helper.make_node("Identity", ["x"], ["y"])]
    else:
        names = ["x", *(f"t{index}" for index in range(1, length)), "y"]
        nodes = [
            helper.make_node("Neg" if index % 2 else "Abs", [names[index]], [names[index + 1]])
            for index in range(length)
        ]
    with _translate_errors():
        return ort.InferenceSession(
            _model(nodes, TensorProto.FLOAT, TensorProto.FLOAT, (1,)), _options(1, rewrite=False),
            providers=["CPUExecutionProvider"],
        )  # fmt: skip


def _call_cost(calls: int) -> TimedWork:
    session = _identity_chain(1)
    return TimedWork(lambda runs: [_time_runs(session, calls) for _ in range(runs)])


def _node_cost(count: int) -> TimedWork:
    """Run times of a chain, minus those of an empty session."""
    calls = count // _NODES
    chain, empty = _identity_chain(_NODES + 1), _identity_chain(1)

    def seconds(runs: int) -> Sequence[float]:
        runs = max(runs, 5)  # a difference of two small times: one interrupted run must not affect it
        return [min(_time_runs(chain, calls) for _ in range(runs)) - min(_time_runs(empty, calls) for _ in range(runs))]

    return TimedWork(seconds)


# ------------------------------------------------------------------------------------------------ numpy and memory


def _blas_matmul(size: int) -> TimedWork:
    with _translate_errors():
        draw = np.random.default_rng(0)
        left, right = (draw.standard_normal((size, size), dtype=np.float32) for _ in range(2))
        out = np.empty_like(left)
    return TimedWork(lambda runs: time_calls(lambda: np.matmul(left, right, out=out), runs))


def last_cache_bytes() -> int:
    """Bytes of this CPU's largest cache; 0 if unknown."""
    found = 0
    for place in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = place.read_text().strip()
            found = max(found, int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0))
    return found


def _memory_sizes() -> tuple[int, ...]:
    """Sizes up to twice the largest cache, if a third of the free memory holds two such arrays."""
    wanted = max(_MIN_BYTES, 2 * last_cache_bytes())
    return (wanted,) if 2 * wanted <= available_memory() // 3 else ()


def _split_array(array: Any, threads: int) -> list[Any]:
    return list(np.array_split(array, 4 * threads))


def _memory_read(nbytes: int, threads: int) -> TimedWork:
    with _translate_errors():
        array = np.ones(nbytes // 8, np.uint64)
    return _run_threaded(np.bitwise_or.reduce, threads, _split_array(array, threads))


def _memory_copy(nbytes: int, threads: int) -> TimedWork:
    with _translate_errors():
        source, target = np.ones(nbytes // 8, np.uint64), np.zeros(nbytes // 8, np.uint64)
        target.fill(1)  # its pages are mapped from now on
    return _run_threaded(np.copyto, threads, _split_array(target, threads), _split_array(source, threads))


_OPERATION_TEXTS = {_memory_read: "bitwise_or.reduce over", _memory_copy: "copyto, read and written, of"}


def _run_threaded(do: Callable[..., Any], threads: int, *arguments: Sequence[Any]) -> TimedWork:
    pool = ThreadPoolExecutor(threads)
    return TimedWork(
        lambda runs: time_calls(lambda: list(pool.map(do, *arguments)), runs),
        lambda: pool.shutdown(wait=True, cancel_futures=True),
    )


# ------------------------------------------------------------------------------------------------ other work


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds of all cores since boot: total, busy, and of this process."""

    total_s: float
    busy_s: float
    process_s: float

    @classmethod
    def now(cls) -> CpuTime:
        every, own = psutil.cpu_times(), os.times()
        total = sum(every) - getattr(every, "guest", 0.0) - getattr(every, "guest_nice", 0.0)
        return cls(total, total - every.idle - getattr(every, "iowait", 0.0), own.user + own.system)


def watch_other_load(sample: Callable[[], CpuTime] = CpuTime.now) -> Callable[[], float]:
    """Start watching; the returned function gives the CPU share of other processes since then."""
    before = sample()

    def share() -> float:
        after = sample()
        others = (after.busy_s - after.process_s) - (before.busy_s - before.process_s)
        return max(0.0, others / max(after.total_s - before.total_s, 1e-9))

    return share
