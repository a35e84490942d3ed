"""The tests for machines with TensorRT or an RTX GPU, run on the stand-ins: their first real run shall not debug them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "gpu/test_tensorrt_real.py"
RTX_FILE = FILE.with_name("test_tensorrt_rtx_real.py")
REAL_ONLY = {
    "test_real_the_example_is_built_proved_and_agrees_with_onnx_runtime",  # too large for onnx's reference evaluator
    "test_real_damaged_plans_are_refused_and_crash_nobody",  # other processes, which have no stand-ins
    "test_real_trtexec_loads_our_plan_and_both_times_are_read_from_its_log",
}


def names_in(file: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names_in(FILE) if name not in REAL_ONLY])
def test_a_test_for_a_real_machine_passes_on_the_stand_in(world: Any, tmp_path: Path, name: str) -> None:
    run_on_the_stand_in(FILE, name, tmp_path)


@pytest.mark.slow
@pytest.mark.releases("rtx-1.7.1")
@pytest.mark.parametrize("name", names_in(RTX_FILE))
def test_a_test_for_an_rtx_gpu_passes_on_the_stand_in(world: Any, tmp_path: Path, name: str) -> None:
    run_on_the_stand_in(RTX_FILE, name, tmp_path)


def run_on_the_stand_in(file: Path, name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "fake:0"
    getattr(module, name)(folder)


@pytest.mark.parametrize(("file", "least"), [(FILE, 13), (RTX_FILE, 9)])
def test_the_checklist_names_every_test_for_a_real_machine(file: Path, least: int) -> None:
    page = (Path(__file__).parents[2] / "docs/tensorrt.md").read_text()
    everything = names_in(file)
    assert len(everything) >= least
    assert [name for name in everything if f"\n{name.removeprefix('test_real_')}\n" not in page] == []
