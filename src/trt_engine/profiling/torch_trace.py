"""Kernels, copies and launches by PyTorch's profiler, which carries a CUPTI of its own: for any library's kernels."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trt_engine.profiling.capture import BUSY, PROBING, Capture, ProfilerUnavailable
from trt_engine.profiling.kineto import INFERENCE, read_trace

__all__ = ["record"]


def record(run: Callable[[], None], inferences: int) -> Capture:
    """What the device does in so many calls of `run`; `ProfilerUnavailable` where PyTorch does not see the GPU."""
    if not torch.cuda.is_available():
        raise ProfilerUnavailable(
            "PyTorch does not see a GPU", hint="its CUDA release and the driver have to fit: `trt-engine doctor`"
        )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler warns of what it skips in its own first step
        path = Path(folder) / "trace.json"
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
                for _ in range(PROBING):
                    run()
                for _ in range(inferences):
                    with record_function(INFERENCE):
                        run()
        except RuntimeError as error:
            if "profiler" not in str(error).lower() and "cupti" not in str(error).lower():
                raise  # the inference's own
            raise ProfilerUnavailable(f"PyTorch's profiler does not start: {error}", hint=BUSY) from error
        watched.export_chrome_trace(str(path))
        trace = msgspec.json.decode(path.read_bytes(), strict=False)
    made = read_trace(trace, f"torch.profiler {torch.__version__}")
    if not made.activities and len(made.inferences) == inferences:
        raise ProfilerUnavailable("PyTorch's profiler saw nothing of the GPU: another one holds CUPTI", hint=BUSY)
    return made
