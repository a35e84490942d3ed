"""What only a GPU shows of its ceilings: that they can be measured at all, fit together, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_engine.device import info
from trt_engine.profiling.peaks.cache import PeakCache, datasheet_peaks, device_peaks

pytestmark = pytest.mark.gpu


def test_a_gpu_has_ceilings_that_fit_together_and_its_memory_back_afterwards(tmp_path: Path) -> None:
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = device_peaks("cuda:0", measure=True, cache=PeakCache(tmp_path))
    assert found is not None
    figures = {item.name: item.value for item in found.peaks if item.source == "measured"}
    names = {
        "memory_read",
        "memory_copy",
        "h2d_pinned",
        "d2h_pinned",
        "h2d_pageable",
        "d2h_pageable",
        "launch",
        "launch_graph",
    }
    assert names <= set(figures), found.skipped
    assert figures["launch_graph"] < figures["launch"] < 50  # us
    assert figures["h2d_pageable"] < 1.1 * figures["h2d_pinned"] < figures["memory_copy"]
    for item in datasheet_peaks(info.gpus()[0].name):  # no measurement beats the maker
        assert figures.get(item.name, 0.0) <= 1.02 * item.value, item.name
    if "fp16_matrix" in figures:
        assert figures["fp32_matrix"] < figures["tf32_matrix"] < figures["fp16_matrix"]
    again = device_peaks("cuda:0", cache=PeakCache(tmp_path))
    assert again == found
    used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    device_peaks("cuda:0", measure=True, remeasure=True, cache=PeakCache(tmp_path))
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used < used + (64 << 20)
