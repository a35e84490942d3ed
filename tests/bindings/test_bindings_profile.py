"""Layer times over the real bindings: what a row says, what is kept, and that nothing stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bindings.test_bindings_run import built, images

BOTH = pytest.mark.releases("10.16.1", "11.4.0")


def profiled(folder: Path, feeds: dict[str, Any], **settings: Any) -> Any:
    from trt_engine.backends.tensorrt.profile import profile
    from trt_engine.config.runtime import RuntimeConfig

    wanted = {"inferences": 3, "warmup": 1, "keep": None} | settings
    return profile(built(folder), feeds, RuntimeConfig(device="fake:0"), **wanted)


@BOTH
def test_every_layer_of_the_engine_has_its_time_by_the_devices_clock(world: Any, tmp_path: Path) -> None:
    import json

    found = profiled(tmp_path, images(2), keep=tmp_path / "kept")
    assert found.clock == "device" and found.inferences == 3 and (found.wall_ms or 0) > 0
    assert found.instrument.startswith("tensorrt IProfiler ")
    assert found.rows and all(row.mean_ms == row.median_ms == 0.5 for row in found.rows)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    assert any(row.category == "matrix" and row.onnx_nodes and row.precision == "fp32" for row in found.rows)
    raw = json.loads(Path(found.raw).read_text())
    assert len(raw) == 3 and [name for name, _ in raw[0]] == [row.name for row in found.rows]


@BOTH
def test_sizes_are_told_at_the_shapes_the_inspector_saw_and_not_at_others(world: Any, tmp_path: Path) -> None:
    at_optimum = profiled(tmp_path / "a", images(2))
    beside = profiled(tmp_path / "b", images(3))
    assert any(row.nbytes for row in at_optimum.rows)
    assert all(row.nbytes is None and not row.shapes for row in beside.rows)


@BOTH
def test_profiling_gives_everything_back_also_when_it_fails(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import TrtEngineError

    profiled(tmp_path / "a", images(2))
    (key,) = [key for key, name in world.names.items() if name.endswith("ExecutionContext.report_to_profiler")]
    world.puppet.rules[key] = lambda call: 0
    with pytest.raises(TrtEngineError, match="no layer times"):
        profiled(tmp_path / "b", images(2))
    del world.puppet.rules[key]
    assert not [item for item in world.alive() if item.kind in ("IExecutionContext", "ICudaEngine")]
