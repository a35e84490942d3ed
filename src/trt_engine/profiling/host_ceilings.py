"""What this machine's processor can do at most: matrix products, memory, and the price of a call and of a node."""

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

from trt_engine.backends.onnxruntime.providers import broken, long_name
from trt_engine.backends.onnxruntime.session import ERRORS, first_line
from trt_engine.benchmark.child import memory_available
from trt_engine.device import info
from trt_engine.errors import MemoryExhausted, SetupError
from trt_engine.profiling.gauge import Gauge, Work

__all__ = ["INSTRUMENT", "OnnxRuntimeMatrix", "busy_elsewhere", "measure"]

INSTRUMENT = f"onnxruntime {ort.__version__}, numpy {np.__version__}"

_GEMM = (512, 1024, 2048, 4096)
_CALLS, _NODES = 200, 256
_LEAST_BYTES = 256 << 20
"""Of memory that is read, where no cache is larger."""


def measure(gauge: Gauge) -> None:
    """Take every ceiling of the processor."""
    cores = info.cpu().cores
    onnx = OnnxRuntimeMatrix("cpu", cores)
    for name, dtype in (("fp32_matrix", "fp32"), ("int8_matrix", "int8"), ("int8_matrix_qdq", "int8-qdq")):
        gauge.rate(
            name,
            "TFLOP/s" if dtype == "fp32" else "TOP/s",
            _GEMM,
            lambda size, dtype=dtype: onnx.matrix(dtype, size),  # type: ignore[misc]
            lambda size: 2.0 * size**3,
            lambda size, dtype=dtype: onnx.how(dtype, size),  # type: ignore[misc]
        )
    gauge.rate(
        "fp32_matrix_blas", "TFLOP/s", _GEMM, _blas, lambda size: 2.0 * size**3,
        lambda size: f"numpy {np.__version__} matmul {size}x{size}x{size} float32",
    )  # fmt: skip
    sizes = _memory_sizes()
    for name, make, moved in (("memory_read", _read, 1), ("memory_copy", _copy, 2)):
        gauge.rate(
            name, "GB/s", sizes,
            lambda nbytes, make=make: make(nbytes, cores),  # type: ignore[misc]
            lambda nbytes, moved=moved: float(moved * nbytes),  # type: ignore[misc]
            lambda nbytes, make=make: f"numpy {_VERBS[make]} {nbytes >> 20} MiB, {cores} threads",  # type: ignore[misc]
        )  # fmt: skip
    gauge.cost("call", _CALLS, _call, f"onnxruntime {ort.__version__} session.run of one Identity of one number")
    gauge.cost(
        "node", _CALLS // 10 * _NODES, _node,
        f"onnxruntime {ort.__version__}, {_NODES} nodes of one number less an empty session, each",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ ONNX Runtime


class OnnxRuntimeMatrix:
    """Matrix products by ONNX Runtime's own kernels, on the CPU or on a GPU."""

    def __init__(self, device: str, threads: int | None = None) -> None:
        self.provider, _, number = device.partition(":")
        self.number, self.threads = int(number or 0), threads
        self.name = f"onnxruntime {ort.__version__}"

    def how(self, dtype: str, size: int) -> str:
        operator = {"int8": "MatMulInteger", "int8-qdq": "MatMul with Q/DQ"}.get(dtype, "MatMul")
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.name} {operator} {size}x{size}x{size} {dtype.partition('-')[0]}{threads}"

    def matrix(self, dtype: str, size: int) -> Work:
        """A product of two square matrices, the right one constant as weights are."""
        model, feed = _product(dtype, size)
        options = {"use_tf32": "1" if dtype == "tf32" else "0"} if self.provider == "cuda" else {}
        with _translated():
            session = self._session(model, options)
            binding = session.io_binding()
            place = (self.provider, self.number)
            if dtype == "bf16":  # numpy has no such numbers
                value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(feed, TensorProto.BFLOAT16)
                binding.bind_ortvalue_input("x", value)
            else:
                binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(feed, *place))
            binding.bind_output("y", *place)

        held = [(session, binding)]
        del session, binding  # `close` gives them back, with the session's threads

        def seconds(runs: int) -> Sequence[float]:
            session, binding = held[0]
            found = []
            with _translated():
                for _ in range(runs):
                    start = time.perf_counter()
                    session.run_with_iobinding(binding)
                    binding.synchronize_outputs()
                    found.append(time.perf_counter() - start)
            return found

        return Work(seconds, held.clear)

    def _session(self, model: bytes, options: dict[str, str]) -> ort.InferenceSession:
        name = long_name(self.provider)
        if name not in ort.get_available_providers():
            raise SetupError(f"onnxruntime {ort.__version__} has no provider `{self.provider}`")
        if (why := broken(self.provider)) is not None:
            raise SetupError(f"the provider `{self.provider}` does not run: {why}")
        if self.provider != "cpu":
            options = {"device_id": str(self.number)} | options
        session = ort.InferenceSession(
            model, _options(self.threads), providers=[(name, options)], enable_fallback=0
        )  # fmt: skip
        if session.get_providers()[0] != name:
            raise SetupError(f"onnxruntime {ort.__version__} does not start its provider `{self.provider}`")
        return session


def _options(threads: int | None = None, *, rewrite: bool = True) -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.log_severity_level = 4
    if threads:
        made.intra_op_num_threads = threads
    if not rewrite:
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return made


def _product(dtype: str, size: int) -> tuple[bytes, Any]:
    """A model of one matrix product, and what to feed it: random numbers, as zeros take less power."""
    draw = np.random.default_rng(0)
    shape = (size, size)
    left: Any
    right: Any
    if dtype in ("int8", "int8-qdq"):
        left = draw.integers(0, 256, shape, dtype=np.uint8)
        right = draw.integers(-127, 128, shape, dtype=np.int8)
    else:
        kind = np.float16 if dtype == "fp16" else np.float32
        left, right = (draw.standard_normal(shape, dtype=np.float32).astype(kind) for _ in range(2))
    if dtype == "bf16":
        left, right = (np.asarray(value.view(np.uint32) >> 16, np.uint16) for value in (left, right))
    into, out = {
        "int8": (TensorProto.UINT8, TensorProto.INT32),
        "int8-qdq": (TensorProto.UINT8, TensorProto.UINT8),
        "fp16": (TensorProto.FLOAT16, TensorProto.FLOAT16),
        "bf16": (TensorProto.BFLOAT16, TensorProto.BFLOAT16),
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
def _translated() -> Iterator[None]:
    """ONNX Runtime's errors, and numpy's for want of memory, as ours."""
    try:
        yield
    except MemoryError as error:
        raise MemoryExhausted("not enough memory") from error
    except ERRORS as error:
        text = first_line(error)
        if "alloc" in text.lower() or "out of memory" in text.lower():
            raise MemoryExhausted(text) from error
        raise SetupError(text) from error


def _runs(session: ort.InferenceSession, calls: int) -> float:
    feeds = {"x": np.ones(1, np.float32)}
    names = ["y"]
    start = time.perf_counter()
    for _ in range(calls):
        session.run(names, feeds)
    return time.perf_counter() - start


def _chain(length: int) -> ort.InferenceSession:
    """So many operators one after another, on one number."""
    if length == 1:
        nodes = [helper.make_node("Identity", ["x"], ["y"])]
    else:
        names = ["x", *(f"t{index}" for index in range(1, length)), "y"]
        nodes = [
            helper.make_node("Neg" if index % 2 else "Abs", [names[index]], [names[index + 1]])
            for index in range(length)
        ]
    with _translated():
        return ort.InferenceSession(
            _model(nodes, TensorProto.FLOAT, TensorProto.FLOAT, (1,)), _options(1, rewrite=False),
            providers=["CPUExecutionProvider"],
        )  # fmt: skip


def _call(calls: int) -> Work:
    session = _chain(1)
    return Work(lambda runs: [_runs(session, calls) for _ in range(runs)])


def _node(count: int) -> Work:
    """The runs of a chain, less those of an empty session."""
    calls = count // _NODES
    chain, empty = _chain(_NODES + 1), _chain(1)

    def seconds(runs: int) -> Sequence[float]:
        runs = max(runs, 5)  # a difference of two small times: an interruption of one run must not show
        return [min(_runs(chain, calls) for _ in range(runs)) - min(_runs(empty, calls) for _ in range(runs))]

    return Work(seconds)


# ------------------------------------------------------------------------------------------------ numpy and memory


def _blas(size: int) -> Work:
    with _translated():
        draw = np.random.default_rng(0)
        left, right = (draw.standard_normal((size, size), dtype=np.float32) for _ in range(2))
        out = np.empty_like(left)
    return Work(lambda runs: [_timed(lambda: np.matmul(left, right, out=out)) for _ in range(runs)])


def last_cache_bytes() -> int:
    """The largest cache of this processor; 0 where nothing tells."""
    found = 0
    for place in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = place.read_text().strip()
            found = max(found, int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0))
    return found


def _memory_sizes() -> tuple[int, ...]:
    """Twice the largest cache, where a third of what is free holds two such arrays."""
    wanted = max(_LEAST_BYTES, 2 * last_cache_bytes())
    return (wanted,) if 2 * wanted <= memory_available() // 3 else ()


def _parts(array: Any, threads: int) -> list[Any]:
    return list(np.array_split(array, 4 * threads))


def _read(nbytes: int, threads: int) -> Work:
    with _translated():
        array = np.ones(nbytes // 8, np.uint64)
    return _threaded(np.bitwise_or.reduce, threads, _parts(array, threads))


def _copy(nbytes: int, threads: int) -> Work:
    with _translated():
        source, target = np.ones(nbytes // 8, np.uint64), np.zeros(nbytes // 8, np.uint64)
        target.fill(1)  # its pages are there from now on
    return _threaded(np.copyto, threads, _parts(target, threads), _parts(source, threads))


_VERBS = {_read: "bitwise_or.reduce over", _copy: "copyto, read and written, of"}


def _threaded(do: Callable[..., Any], threads: int, *arguments: Sequence[Any]) -> Work:
    pool = ThreadPoolExecutor(threads)
    return Work(
        lambda runs: [_timed(lambda: list(pool.map(do, *arguments))) for _ in range(runs)],
        lambda: pool.shutdown(wait=True, cancel_futures=True),
    )


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ other work


@dataclass(frozen=True, slots=True)
class Worked:
    """Seconds of all processors since the machine began: in all, by anybody, and by this process."""

    total_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> Worked:
        every, own = psutil.cpu_times(), os.times()
        total = sum(every) - getattr(every, "guest", 0.0) - getattr(every, "guest_nice", 0.0)
        return cls(total, total - every.idle - getattr(every, "iowait", 0.0), own.user + own.system)


def busy_elsewhere(look: Callable[[], Worked] = Worked.now) -> Callable[[], float]:
    """Starts watching; called later, the share of the processors that other processes had in between."""
    before = look()

    def share() -> float:
        after = look()
        others = (after.busy_s - after.own_s) - (before.busy_s - before.own_s)
        return max(0.0, others / max(after.total_s - before.total_s, 1e-9))

    return share
