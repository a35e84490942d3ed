"""The driver's own calls against a stand-in driver of host memory that keeps the rules (`cuda_driver.c`).

It plants the rates, refuses addresses that are not allocated, and counts what is left open. Each test runs in a process of
its own: a stand-in keeps its state as the real one does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from patience import HANG_S
from programs import run_python

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the stand-in driver")

MEASURE = """
import ctypes, json, sys
from trt_engine.errors import SetupError
from trt_engine.profiling.peaks import gpu
from trt_engine.profiling.peaks.probe import PeakProbe
probe, said = PeakProbe(600.0, slot_s=0.1), None
try:
    gpu.measure_gpu(probe, int(sys.argv[2]), "no library", sys.argv[1:2])
except SetupError as error:
    said = [type(error).__name__, error.message]
print(json.dumps({
    "items": {item.name: [item.value, item.unit, item.method] for item in probe.peaks},
    "skipped": probe.skipped, "error": said, "open": ctypes.CDLL(sys.argv[1]).stub_open(),
}))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("cuda_driver.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-w", "-o", str(made), str(source)], check=True)
    return made


def measured(driver: Path, number: int = 0, **planted: float) -> dict[str, Any]:
    told = {name: str(value) for name, value in planted.items()}
    done = run_python(
        "-X", "faulthandler", "-c", MEASURE, str(driver), str(number), timeout=HANG_S, env=os.environ | told
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_planted_rates_are_found_and_nothing_is_left_open(driver: Path) -> None:
    found = measured(
        driver, STUB_COPY_GBS=3900, STUB_READ_GBS=4300, STUB_PINNED_GBS=40, STUB_PAGEABLE_GBS=8, STUB_LAUNCH_US=60,
        STUB_NODE_US=30,
    )  # fmt: skip
    items = {name: value for name, (value, _, _) in found["items"].items()}
    assert items["memory_copy"] == pytest.approx(3900, rel=0.01)
    assert items["memory_read"] == pytest.approx(4300, rel=0.01)
    assert items["h2d_pinned"] == items["d2h_pinned"] == pytest.approx(40, rel=0.01)
    assert 0 < items["h2d_pageable"] <= 8.1 and 0 < items["d2h_pageable"] <= 8.1  # by the host's clock
    assert items["launch"] >= 60 and items["launch_graph"] >= 30
    assert found["open"] == 0
    assert found["error"] is None


@pytest.mark.slow
def test_types_nothing_multiplies_are_skipped_with_the_reason(driver: Path) -> None:
    assert [text for text in measured(driver)["skipped"] if "_matrix" in text] == [
        f"{dtype}_matrix: no library" for dtype in ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
    ]


@pytest.mark.slow
def test_on_a_small_gpu_smaller_memory_is_measured(driver: Path) -> None:
    found = measured(driver, STUB_MEMORY_MIB=300)
    assert "256 MiB" in found["items"]["memory_read"][2]
    assert "64 MiB" in found["items"]["memory_copy"][2]  # two of them at once
    assert found["open"] == 0


def test_a_driver_without_a_device_and_a_number_too_many_are_errors(driver: Path) -> None:
    kind, message = measured(driver, STUB_NO_DEVICE=1)["error"]
    assert kind == "SetupError" and "CUDA_ERROR_NO_DEVICE" in message
    assert measured(driver, number=3)["error"][0] == "SetupError"


def test_without_a_driver_the_reason_is_told() -> None:
    from trt_engine.errors import SetupError
    from trt_engine.profiling.peaks.gpu import CudaDriverProbe

    with pytest.raises(SetupError, match="no NVIDIA driver"):
        CudaDriverProbe(0, ["libcuda-that-is-not-there.so.1"])
