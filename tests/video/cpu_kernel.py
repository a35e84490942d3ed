"""The kernel that prepares frames on a GPU, compiled for the CPU: the very source, one thread after the other."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.resampling import kernel_settings

_SHIM = """
struct Index { int x, y, z; };
static Index blockIdx, threadIdx;
static const Index blockDim = {1, 1, 1};
#define __global__
#define __device__
"""
_LOOP = """
extern "C" void run(const Frame *frames, const VALUE *levels, VALUE *rows, int count) {
    for (blockIdx.z = 0; blockIdx.z < count; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < TALL; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < WIDE; ++blockIdx.x) prepare_frames(frames, levels, rows);
}
"""


def compile_kernel(preprocessor: Preprocessor, folder: Path) -> Any:
    """The kernel's source as a function of this machine."""
    source = resources.files("trt_engine.video").joinpath("prepare_frames.cu").read_text()
    macros = "".join(f"#define {name} {value}\n" for name, value in kernel_settings(preprocessor).items())
    (folder / "kernel.cpp").write_text(_SHIM + macros + source + _LOOP)
    library = folder / "kernel.so"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", "-o", library, folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(library)).run
