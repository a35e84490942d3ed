"""Kernels compiled when they are needed, for the GPU they run on: NVRTC through cuda.core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cuda.core import LaunchConfig, Program, ProgramOptions, launch

from trt_engine.device.cuda.driver_calls import RelaxedCapture
from trt_engine.errors import SetupError
from trt_engine.format import library_reason

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice
    from trt_engine.device.cuda.stream import CudaStream


class CudaKernel:
    """A function of CUDA C++ on one GPU, whose arguments are addresses. Thread-safe."""

    def __init__(self, device: CudaDevice, source: str, name: str, macros: Mapping[str, str]) -> None:
        """Compiles `source`, in which `name` is `extern "C"`. Raises `SetupError` where NVRTC is missing or refuses."""
        self._device = device
        major, minor = device.properties().compute_capability or (0, 0)
        defined = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
        try:
            with device.activate(), RelaxedCapture():
                options = ProgramOptions(arch=f"sm_{major}{minor}")
                self._kernel = Program(defined + source, "c++", options).compile("cubin").get_kernel(name)
        except Exception as error:  # NVRTC's and its loader's errors have no public class
            raise SetupError(
                f"a kernel for `{device.name}` cannot be compiled: {library_reason(error)}",
                hint="`pip install nvidia-cuda-nvrtc` (on CUDA 12: `nvidia-cuda-nvrtc-cu12`)",
            ) from error

    def launch(
        self, stream: CudaStream, grid: tuple[int, int, int], block: tuple[int, int, int], *addresses: int
    ) -> None:
        """Enqueue one run."""
        with self._device.activate():
            launch(stream._stream, LaunchConfig(grid=grid, block=block), self._kernel, *addresses)
