"""Kernels, copies and launches of any library by PyTorch's profiler, which bundles CUPTI."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.profiling.instruments.capture import BUSY_HINT, PROBE_INFERENCES, Capture, ProfilerUnavailable
from trt_engine.profiling.instruments.kineto import INFERENCE_MARK, read_trace


def capture(run: Callable[[], None], inferences: int) -> Capture:
    """Device activity of `inferences` calls of `run`; `ProfilerUnavailable` if PyTorch does not see the GPU."""
    if not torch.cuda.is_available():
        raise ProfilerUnavailable(
            "PyTorch does not see a GPU", hint="its CUDA release and the driver have to fit: `trt-engine doctor`"
        )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler warns about its skipped first step
        path = Path(folder) / "trace.json"
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
                for _ in range(PROBE_INFERENCES):
                    run()
                for _ in range(inferences):
                    with record_function(INFERENCE_MARK):
                        run()
        except RuntimeError as error:
            if "profiler" not in str(error).lower() and "cupti" not in str(error).lower():
                raise  # raised by the inference
            raise ProfilerUnavailable(f"PyTorch's profiler does not start: {error}", hint=BUSY_HINT) from error
        watched.export_chrome_trace(str(path))
        trace = decode_json(read_bounded(path))
    made = read_trace(trace, f"torch.profiler {torch.__version__}")
    if not made.activities and len(made.inferences) == inferences:
        raise ProfilerUnavailable("PyTorch's profiler saw nothing of the GPU: another one holds CUPTI", hint=BUSY_HINT)
    return made
