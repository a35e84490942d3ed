"""The trained examples through `convert`, the backends `inductor` and `auto`, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import trt_engine as te
from programs import needs

pytestmark = needs("torch")

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("example", ["digits/model", "classifiers/vit"])
def test_an_example_is_converted_compiled_and_chosen(example: str, tmp_path: Path) -> None:
    model, store, batch = tmp_path / "model.onnx", te.Store(tmp_path / "store"), (1, 2, 2)
    te.convert(EXAMPLES / f"{example}.onnx", out=model)
    compiled = te.build(model, backend="inductor", batch=batch, store=store)
    engine = te.build(
        model, backend="auto", batch=batch, store=store, time_budget_s=3600.0, out=tmp_path / "model.engine"
    )
    found = engine.passport.build.tuning
    assert found is not None and found.complete
    measured = {item.label: item for item in found.candidates if item.rounds}
    assert {"onnxruntime", "onnxruntime spinning=off", "inductor"} <= measured.keys(), found.candidates
    assert measured["inductor"].build_s is not None and measured["inductor"].build_s < compiled.passport.build.seconds
    assert found.margin_pct is not None and found.margin_interval_pct is not None
    low, high = found.margin_interval_pct
    assert low <= found.margin_pct <= high and (low > 0 or found.chosen < found.runner_up or found.margin_pct >= 0)
    assert engine.passport.backend == found.candidates[found.chosen].backend
    assert engine.passport.parity is not None and engine.passport.parity.passed
    # whatever the backend, `-o` may have any name
    compiled.copy_to(tmp_path / "compiled.engine")
    for path in (tmp_path / "model.engine", tmp_path / "compiled.engine"):
        with te.load(path) as runner:
            assert runner.engine.passport.model.digest == engine.passport.model.digest
