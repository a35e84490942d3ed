"""Peaks of a GPU: matrix products by dtype, memory, transfers, launches.

Memory, transfers and launches use driver calls (libcuda, on every machine with a GPU); matrix products use PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from trt_engine.device.cuda.libcuda import CONTEXT_LOST, LIBRARIES, Driver
from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError
from trt_engine.format import library_reason
from trt_engine.profiling.peaks.probe import PeakProbe, TimedWork, time_calls

_MATRIX = (2048, 4096, 8192)
_MEMORY = tuple(mib << 20 for mib in (64, 256, 1024, 4096))
_TRANSFER = tuple(mib << 20 for mib in (16, 64, 256))
_LAUNCHES = 500
"""Fewer than the driver's launch queue holds."""
_TYPES = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")


def measure_gpu(probe: PeakProbe, number: int, library: TorchMatmul | str, drivers: Sequence[str] = LIBRARIES) -> None:
    """Measure every peak of `cuda:<number>`. `library` has its matrix products, or is the reason why nothing has them;
    `drivers` are names of the CUDA driver's library."""
    with contextlib.closing(CudaDriverProbe(number, drivers)) as gpu:
        probe.measure_cost(
            "launch", _LAUNCHES, lambda count: gpu.launches(count, graph=False),
            f"cuLaunchKernelEx of an empty kernel, {_LAUNCHES} in a row to the end of the last",
        )  # fmt: skip
        probe.measure_cost(
            "launch_graph", _LAUNCHES, lambda count: gpu.launches(count, graph=True),
            f"an empty kernel in a graph of {_LAUNCHES}, to the end of the last",
        )  # fmt: skip
        probe.measure_rate(
            "memory_read", "GB/s", _MEMORY, gpu.read, float,
            lambda nbytes: f"a kernel that reads {nbytes >> 20} MiB in 16-byte loads",
        )  # fmt: skip
        probe.measure_rate(
            "memory_copy", "GB/s", _MEMORY, gpu.copy, lambda nbytes: 2.0 * nbytes,
            lambda nbytes: f"cuMemcpyDtoDAsync of {nbytes >> 20} MiB, read and written",
        )  # fmt: skip
        for way in ("h2d", "d2h"):
            for kind in ("pinned", "pageable"):
                probe.measure_rate(
                    f"{way}_{kind}", "GB/s", _TRANSFER,
                    lambda nbytes, way=way, kind=kind: gpu.transfer(way, kind, nbytes),  # type: ignore[misc]
                    float,
                    lambda nbytes, way=way, kind=kind: (  # type: ignore[misc]
                        f"cuMemcpy{'HtoD' if way == 'h2d' else 'DtoH'} of {nbytes >> 20} MiB, {kind}"
                    ),
                )  # fmt: skip
        for dtype in _TYPES:
            if isinstance(library, str):
                probe.skip(f"{dtype}_matrix", library)
                continue
            probe.measure_rate(
                f"{dtype}_matrix", "TOP/s" if dtype == "int8" else "TFLOP/s", _MATRIX,
                lambda size, dtype=dtype: library.matmul(dtype, size),  # type: ignore[misc]
                lambda size: 2.0 * size**3,
                lambda size, dtype=dtype: library.describe(dtype, size),  # type: ignore[misc]
            )  # fmt: skip


class TorchMatmul:
    """PyTorch's matrix products: cuBLAS and cuBLASLt."""

    def __init__(self, number: int) -> None:
        try:
            import torch
        except (ImportError, OSError) as error:
            raise SetupError(f"`import torch` fails: {error}") from error
        if not torch.cuda.is_available():
            raise SetupError(f"torch {torch.__version__} sees no GPU")
        self.torch, self.device = torch, torch.device("cuda", number)
        self.name = f"torch {torch.__version__}"

    def describe(self, dtype: str, size: int) -> str:
        call = {"int8": "torch._int_mm", "fp8": "torch._scaled_mm"}.get(dtype, "torch.mm")
        return f"{self.name} {call} {size}x{size}x{size} {dtype}"

    def matmul(self, dtype: str, size: int) -> TimedWork:
        torch = self.torch
        with self._translate_errors():
            multiply = self._multiply(dtype, size)
        before = torch.get_float32_matmul_precision()

        def seconds(runs: int) -> Sequence[float]:
            torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
            try:
                with self._translate_errors(), torch.cuda.device(self.device):
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
                    marks[0].record()
                    for mark in marks[1:]:
                        multiply()
                        mark.record()
                    marks[-1].synchronize()
                    return [first.elapsed_time(then) / 1e3 for first, then in itertools.pairwise(marks)]
            finally:
                torch.set_float32_matmul_precision(before)

        def close() -> None:
            nonlocal multiply
            del multiply
            torch.cuda.empty_cache()

        return TimedWork(seconds, close)

    def _multiply(self, dtype: str, size: int) -> Callable[[], object]:
        torch, shape, device = self.torch, (size, size), self.device
        if dtype == "int8":
            left, right = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for _ in range(2))
            return lambda: torch._int_mm(left, right.t())
        if dtype == "fp8":
            if torch.cuda.get_device_capability(device) < (8, 9):
                raise SetupError("this GPU has no FP8 (compute capability 8.9 and above has)")
            one = torch.ones((), device=device)
            left, right = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
            return lambda: torch._scaled_mm(
                left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        if dtype in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < (8, 0):
            raise SetupError(f"this GPU has no {dtype.upper()} (compute capability 8.0 and above has)")
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
        left, right = (torch.randn(shape, device=device, dtype=kind) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except self.torch.cuda.OutOfMemoryError as error:
            raise MemoryExhausted(library_reason(error)) from error
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
            if CONTEXT_LOST.search(str(error)):
                raise DeviceLost(f"the GPU is lost: {library_reason(error)}", hint="start the process again") from error
            # `_int_mm` and `_scaled_mm` are private: other releases may lack or change them
            raise SetupError(library_reason(error)) from error


# ------------------------------------------------------------------------------------------------ the driver

# PTX of the oldest version that current drivers compile: the loop reads four 16-byte vectors per round
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry empty() { ret; }
.visible .entry read(.param .u64 source, .param .u64 vectors, .param .u64 target)
{
    .reg .pred %p<3>;
    .reg .b32 %r<24>;
    .reg .b64 %d<12>;
    ld.param.u64 %d1, [source];
    ld.param.u64 %d2, [vectors];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d3, %r1, %r2;
    cvt.u64.u32 %d4, %r3;
    add.u64 %d3, %d3, %d4;
    mul.wide.u32 %d5, %r4, %r2;
    shl.b64 %d6, %d5, 4;
    shl.b64 %d7, %d5, 2;
    shl.b64 %d4, %d3, 4;
    add.u64 %d1, %d1, %d4;
    mov.u32 %r5, 0;
again:
    setp.ge.u64 %p1, %d3, %d2;
    @%p1 bra done;
    ld.global.nc.v4.u32 {%r6, %r7, %r8, %r9}, [%d1];
    add.u64 %d8, %d1, %d6;
    ld.global.nc.v4.u32 {%r10, %r11, %r12, %r13}, [%d8];
    add.u64 %d9, %d8, %d6;
    ld.global.nc.v4.u32 {%r14, %r15, %r16, %r17}, [%d9];
    add.u64 %d10, %d9, %d6;
    ld.global.nc.v4.u32 {%r18, %r19, %r20, %r21}, [%d10];
    add.u64 %d1, %d10, %d6;
    xor.b32 %r6, %r6, %r7;
    xor.b32 %r8, %r8, %r9;
    xor.b32 %r10, %r10, %r11;
    xor.b32 %r12, %r12, %r13;
    xor.b32 %r14, %r14, %r15;
    xor.b32 %r16, %r16, %r17;
    xor.b32 %r18, %r18, %r19;
    xor.b32 %r20, %r20, %r21;
    xor.b32 %r6, %r6, %r8;
    xor.b32 %r10, %r10, %r12;
    xor.b32 %r14, %r14, %r16;
    xor.b32 %r18, %r18, %r20;
    xor.b32 %r6, %r6, %r10;
    xor.b32 %r14, %r14, %r18;
    xor.b32 %r6, %r6, %r14;
    xor.b32 %r5, %r5, %r6;
    add.u64 %d3, %d3, %d7;
    bra again;
done:
    setp.ne.u32 %p2, %r5, 305419896;
    @%p2 bra end;
    ld.param.u64 %d11, [target];
    st.global.u32 [%d11], %r5;
end:
    ret;
}
\0"""
_BLOCKS, _THREADS = 4096, 256
"""The loop reads 64 bytes per thread and round: the sizes of `_MEMORY` are multiples of that."""


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h: one argument instead of eight, which ctypes passes slowly."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


class CudaDriverProbe:
    """The CUDA driver on one GPU, in its primary context: times memory, transfers and launches."""

    def __init__(self, number: int, libraries: Sequence[str] = LIBRARIES) -> None:
        self._driver = Driver(libraries)
        self._cuda, self._call = self._driver.library, self._driver.call
        self._device, self._context = self._driver.device(number), self._driver.primary_context(number)
        self._stream, self._module = c_void_p(), c_void_p()
        with self._make_current():
            self._call("cuStreamCreate", byref(self._stream), c_uint(1))  # does not wait for the default stream

    def close(self) -> None:
        if not self._context:
            return
        with contextlib.suppress(SetupError, MemoryExhausted), self._make_current():
            if self._module:
                self._call("cuModuleUnload", self._module)
            self._call("cuStreamDestroy_v2", self._stream)
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)
        self._context = c_void_p()

    def read(self, nbytes: int) -> TimedWork:
        """A kernel that reads `nbytes` and writes nothing."""
        kernel = self._kernel(b"read")
        memory = self._memory(nbytes)
        source, vectors, target = c_ulonglong(memory.value), c_ulonglong(nbytes // 16), c_ulonglong(memory.value)
        held = (source, vectors, target)
        pointers = (c_void_p * 3)(*map(ctypes.addressof, held))

        def once() -> None:
            assert held  # each launch reads the arguments through their addresses
            self._launch(kernel, _BLOCKS, _THREADS, pointers)

        return TimedWork(lambda runs: self._time_by_events(once, runs), lambda: self._free(memory))

    def copy(self, nbytes: int) -> TimedWork:
        """A copy within the device's memory."""
        source = self._memory(nbytes)
        try:
            target = self._memory(nbytes)
        except MemoryExhausted:
            self._free(source)
            raise

        def once() -> None:
            self._call("cuMemcpyDtoDAsync_v2", target, source, c_size_t(nbytes), self._stream)

        return TimedWork(lambda runs: self._time_by_events(once, runs), lambda: self._free(source, target))

    def transfer(self, direction: str, kind: str, nbytes: int) -> TimedWork:
        """A copy between the host's memory, `pinned` or `pageable`, and the device's; `direction` is `h2d` or `d2h`."""
        memory = self._memory(nbytes)
        pinned = c_void_p()
        paged: Any = None
        try:
            if kind == "pinned":
                with self._make_current():
                    self._call("cuMemHostAlloc", byref(pinned), c_size_t(nbytes), c_uint(0))
                place = pinned
            else:
                paged = ctypes.create_string_buffer(nbytes)
                place = c_void_p(ctypes.addressof(paged))
            ctypes.memset(place, 1, nbytes)  # its pages are mapped from now on
        except (MemoryExhausted, MemoryError) as error:
            self._free(memory)
            raise MemoryExhausted(f"{nbytes >> 20} MiB of host memory are unavailable") from error

        def once() -> None:
            if direction == "h2d":
                self._call("cuMemcpyHtoDAsync_v2", memory, place, c_size_t(nbytes), self._stream)
            else:
                self._call("cuMemcpyDtoHAsync_v2", place, memory, c_size_t(nbytes), self._stream)

        def by_clock(runs: int) -> Sequence[float]:
            """The driver copies pageable memory in chunks, some of them before the call returns."""

            def synchronized() -> None:
                once()
                self._call("cuStreamSynchronize", self._stream)

            with self._make_current():
                return time_calls(synchronized, runs)

        def close() -> None:
            nonlocal paged
            paged = None  # keeps it alive: the copies have its address alone
            self._free(memory)
            if pinned:
                with self._make_current():
                    self._call("cuMemFreeHost", pinned)

        return TimedWork(by_clock if kind == "pageable" else lambda runs: self._time_by_events(once, runs), close)

    def launches(self, count: int, *, graph: bool) -> TimedWork:
        """`count` launches of an empty kernel, one by one or as one graph, timed on the host to the end of the last."""
        kernel = self._kernel(b"empty")
        nothing = (c_void_p * 1)()
        made, ready = c_void_p(), c_void_p()

        shape = _LaunchConfig(1, 1, 1, 1, 1, 1, 0, self._stream.value, None, 0)
        launch, stated = self._cuda.cuLaunchKernelEx, (byref(shape), kernel, nothing, None)

        def each() -> None:
            for _ in range(count):
                launch(*stated)

        def whole() -> None:
            self._call("cuGraphLaunch", ready, self._stream)

        with self._make_current():
            if (status := launch(*stated)) != 0:
                raise SetupError(f"`cuLaunchKernelEx` fails with error {status}")
            self._launch(kernel, 1, 1, nothing)  # the first launch loads the kernel, which no capture allows
            self._call("cuStreamSynchronize", self._stream)
            if graph:
                self._call("cuStreamBeginCapture_v2", self._stream, c_int(1))
                each()
                self._call("cuStreamEndCapture", self._stream, byref(made))
                self._call("cuGraphInstantiateWithFlags", byref(ready), made, c_ulonglong(0))
                whole()
                self._call("cuStreamSynchronize", self._stream)

        def synchronized() -> None:
            (whole if graph else each)()
            self._call("cuStreamSynchronize", self._stream)

        def seconds(runs: int) -> Sequence[float]:
            with self._make_current():
                return time_calls(synchronized, runs)

        def close() -> None:
            with self._make_current():
                if ready:
                    self._call("cuGraphExecDestroy", ready)
                if made:
                    self._call("cuGraphDestroy", made)

        return TimedWork(seconds, close)

    def _time_by_events(self, once: Callable[[], None], runs: int) -> Sequence[float]:
        """Device time of each run, in s; runs follow each other without synchronization."""
        marks = [c_void_p() for _ in range(runs + 1)]
        with self._make_current():
            for mark in marks:
                self._call("cuEventCreate", byref(mark), c_uint(0))
            try:
                self._call("cuEventRecord", marks[0], self._stream)
                for mark in marks[1:]:
                    once()
                    self._call("cuEventRecord", mark, self._stream)
                self._call("cuEventSynchronize", marks[-1])
                found, took_ms = [], c_float()
                for first, then in itertools.pairwise(marks):
                    self._call("cuEventElapsedTime", byref(took_ms), first, then)
                    found.append(took_ms.value / 1e3)
            finally:
                for mark in marks:
                    self._call("cuEventDestroy_v2", mark)
        return found

    def _kernel(self, name: bytes) -> c_void_p:
        kernel = c_void_p()
        with self._make_current():
            if not self._module:
                self._call("cuModuleLoadData", byref(self._module), c_char_p(_PTX))
            self._call("cuModuleGetFunction", byref(kernel), self._module, c_char_p(name))
        return kernel

    def _launch(self, kernel: c_void_p, blocks: int, threads: int, arguments: Any) -> None:
        one = c_uint(1)
        self._call(
            "cuLaunchKernel", kernel, c_uint(blocks), one, one, c_uint(threads), one, one, c_uint(0), self._stream,
            arguments, None,
        )  # fmt: skip

    def _memory(self, nbytes: int) -> c_ulonglong:
        made = c_ulonglong()
        with self._make_current():
            self._call("cuMemAlloc_v2", byref(made), c_size_t(nbytes))
            self._call("cuMemsetD8_v2", made, ctypes.c_ubyte(0x5A), c_size_t(nbytes))
        return made

    def _free(self, *memory: c_ulonglong) -> None:
        with self._make_current():
            for one in memory:
                self._call("cuMemFree_v2", one)

    def _make_current(self) -> contextlib.AbstractContextManager[None]:
        return self._driver.current(self._context)
