"""The tests for a machine with TensorRT, run on the stand-ins: whoever runs them first shall not debug them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "gpu/test_tensorrt_real.py"
REAL_ONLY = {
    "test_real_the_example_is_built_proved_and_agrees_with_onnx_runtime",  # too large for onnx's reference evaluator
    "test_real_damaged_plans_are_refused_and_crash_nobody",  # other processes, which have no stand-ins
    "test_real_trtexec_loads_our_plan_and_both_times_are_read_from_its_log",
}
TESTS = [name for name in re.findall(r"^def (test_\w+)", FILE.read_text(), re.MULTILINE) if name not in REAL_ONLY]


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
def test_a_test_for_a_real_machine_passes_on_the_stand_in(world: Any, tmp_path: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location("test_tensorrt_real", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "fake:0"
    getattr(module, name)(tmp_path)


def test_the_checklist_names_every_test_for_a_real_machine() -> None:
    page = (Path(__file__).parents[2] / "docs/tensorrt.md").read_text()
    everything = re.findall(r"^def (test_\w+)", FILE.read_text(), re.MULTILINE)
    assert len(everything) > 12
    assert [name for name in everything if f"`{name.removeprefix('test_real_')}`" not in page] == []
