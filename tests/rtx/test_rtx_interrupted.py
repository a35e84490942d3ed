"""Ctrl-C while a real builder works: TensorRT-RTX's, whose compiler is silent for seconds.

Fifty moments of a longer build: `python benchmarks/interrupted_builds.py MODEL -- --backend tensorrt-rtx --gpus sm89`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from interrupted_builds import build_length, interrupt_builds
from patience import HANG_S, PATIENT_COMMAND

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its builder is not interrupted")

VIT = Path(__file__).resolve().parents[2] / "examples" / "classifiers" / "vit.onnx"
OPTIONS = ["--backend", "tensorrt-rtx", "--gpus", "sm89"]
SLOWER = 40.0
"""A hang is found, no clock judges: `benchmarks/interrupted_builds.py` measures on a quiet machine."""


@pytest.mark.slow
def test_ctrl_c_at_random_moments_of_a_build_ends_it_in_order(tmp_path: Path) -> None:
    profiles = [
        word
        for low, best, high in ((1, 2, 4), (4, 8, 8), (8, 16, 16), (16, 32, 64))
        for word in ("--profile", f"images:{low}x1x32x32,{best}x1x32x32,{high}x1x32x32")
    ]
    command = [*PATIENT_COMMAND, "build", str(VIT), *OPTIONS, *profiles]
    results = list(interrupt_builds(command, build_length(command), 5))
    assert not {(one.at_s, one.gap_s): (one.faults(SLOWER), one.stderr) for one in results if one.faults(SLOWER)}
    assert any(one.gap_s is not None for one in results)


@pytest.mark.slow
def test_what_the_compiler_prints_on_stdout_is_not_part_of_the_document(tmp_path: Path) -> None:
    """A bound below the normal numbers of FP16 makes TensorRT's compiler print a warning with `printf`."""
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["batch", 4])] for name in "xy"]
    low = numpy_helper.from_array(np.float16(1e-5), "low")
    nodes = [helper.make_node("Clip", ["x", "low"], ["c"], name="clamp"), helper.make_node("Log", ["c"], ["y"])]
    graph = helper.make_graph(nodes, "clamp", *ends, [low])
    model = tmp_path / "clamp.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), model)
    command = [
        sys.executable,
        "-m",
        "trt_engine",
        "build",
        str(model),
        *OPTIONS,
        "--json",
        "-o",
        str(tmp_path / "net.engine"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert json.loads(done.stdout)["schema"] == "trt-engine/build"
    assert "payload type requires precision-lose casting" in done.stderr
