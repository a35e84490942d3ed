"""Layer times by trtexec: its own profile run, the layers it wrote beside it, and what is said when it does not tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models as models
from trt_engine.backends.trtexec.profile import profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError
from trt_engine.records.profile import LayerProfile
from trtexec.conftest import Tool, Verb
from trtexec.stand_in import V10, V11

BOTH = pytest.mark.parametrize("version", [V10, V11], ids=["10.16", "11.1"])
ONE = pytest.mark.parametrize("version", [V10, pytest.param(V11, marks=pytest.mark.slow)], ids=["10.16", "11.1"])
"""The same code for both: one with every test run, the other with what is slow."""


@pytest.fixture
def engine(verb: Verb, tool: Tool, tmp_path: Path) -> Any:
    def call(version: Any, *options: str, **behaviour: Any) -> Engine:
        net = models.conv_net(tmp_path / "net.onnx")
        tool(version)
        done = verb("build", net, "--backend", "trtexec", "--batch", "1:2:4", "-o", "net.engine", "--no-parity",
                    "--overwrite", *options)  # fmt: skip
        assert done.code == 0, done.err
        tool(version, **behaviour)
        return Engine.open(tmp_path / "net.engine")

    return call


def profiled(engine: Engine, keep: Path | None = None) -> LayerProfile:
    feeds = {"images": np.zeros((2, 3, 8, 8), np.float32)}
    return profile(engine, feeds, RuntimeConfig(), inferences=20, warmup=5, keep=keep)


@ONE
def test_the_layers_of_the_profile_run_are_joined_with_what_the_inspector_says(
    version: Any, engine: Any, tmp_path: Path
) -> None:
    found = profiled(engine(version), tmp_path / "kept")
    assert found.inferences == 20 and found.clock == "device" and "trtexec" in found.instrument
    kinds = {row.name: (row.kind, row.category, row.precision) for row in found.rows}
    assert list(kinds.values()).count(("CaskConvolution", "matrix", "fp32")) == 2
    assert all(row.mean_ms == row.median_ms == 0.1 for row in found.rows)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "trtexec-layers.json", "trtexec-profile.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_command_asks_for_a_profile_run_of_its_own(
    engine: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    made = engine(V10)
    caplog.set_level("DEBUG", logger="trt_engine")
    capfd.readouterr()
    profiled(made)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "] running: " in line]
    for word in ("--separateProfileRun", "--dumpProfile", "--exportProfile=", "--exportLayerInfo=", "--iterations=20"):
        assert word in line


@pytest.mark.slow
def test_a_tool_that_fails_says_why_and_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    made = engine(V10)
    (tmp_path / "net.engine").write_bytes(b"ftrt" + bytes(60))
    with pytest.raises(TrtEngineError):
        profiled(made, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
@ONE
def test_a_program_of_its_own_is_profiled_by_its_own_layer_times(
    version: Any, engine: Any, verb: Verb, tmp_path: Path
) -> None:
    engine(version)
    done = verb("profile", "net.engine", "--duration", "50ms", "--inferences", "20", "-o", "out", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    instruments = {item["name"]: item for item in said["instruments"]}
    assert [name for name, item in instruments.items() if item["used"]] == ["layers"]
    assert "runs in another program (`trtexec`)" in instruments["nsys"]["reason"]
    assert "in a separate process" in instruments["cupti"]["reason"]
    assert said["time_breakdown"]["gpu_ms"] == said["compute_ms"]["median"], (
        "by the device's events, as trtexec tells them"
    )
    assert said["layers"]["clock"] == "device" and (tmp_path / "out" / "trtexec-profile.json").is_file()
    assert said["categories"] and said["bottleneck"]["summary"]
