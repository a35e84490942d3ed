"""Whether an engine can be used here, without loading it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.backends.onnxruntime.run import OnnxRuntime
from trt_engine.backends.onnxruntime.verdict import verdict
from trt_engine.config import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return te.build(models.conv_net(tmp_path / "net.onnx"), store=te.Store(tmp_path / "store"))


def changed(engine: Engine, *, notes: dict[str, str] | None = None, backend: str | None = None, **needs: Any) -> Engine:
    """The engine as if another machine had made it."""
    passport = engine.passport
    build = replace(passport.build, notes=passport.build.notes | (notes or {}))
    return Engine(
        engine.path,
        replace(passport, build=build, needs=replace(passport.needs, **needs), backend=backend or passport.backend),
    )


def test_an_engine_loads_where_it_was_built(engine: Engine):
    assert verdict(engine, RuntimeConfig()).verdict == "loads"


CASES = {
    "newer runtime than here": ({"version": "99.0.0"}, {}, "rebuild", "older"),
    "older runtime, inner operators": ({"version": "1.2.3"}, {"operators": "onnxruntime"}, "penalty", "1.2.3"),
    "older runtime, standard operators": ({"version": "1.2.3"}, {"operators": "standard"}, "loads", "standard"),
    "instructions this processor lacks": ({"cpu_features": ("avx9000",)}, {}, "rebuild", "avx9000"),
    "weights in other blocks": ({}, {"layout": "nchwc4"}, "rebuild", "nchwc4"),
    "a provider that is not here": ({"providers": ("migraphx",)}, {}, "refuse", "migraphx"),
}


@pytest.mark.parametrize("what", CASES)
def test_an_engine_of_another_machine_is_judged_with_a_reason(what: str, engine: Engine):
    needs, notes, expected, reason = CASES[what]
    found = verdict(changed(engine, notes=notes, **needs), RuntimeConfig())
    assert found.verdict == expected
    assert reason in found.reason
    if expected == "rebuild":
        assert found.command == engine.passport.build.command


@pytest.mark.parametrize("what", [name for name, case in CASES.items() if case[2] in ("rebuild", "refuse")])
def test_what_must_be_rebuilt_or_is_refused_does_not_load(what: str, engine: Engine):
    needs, notes, _, reason = CASES[what]
    with pytest.raises(EngineError, match=reason) as caught:
        OnnxRuntime().load(changed(engine, notes=notes, **needs), RuntimeConfig())
    assert caught.value.exit_code == 10 and caught.value.hint


def test_a_changed_payload_is_refused(engine: Engine):
    raw = bytearray(engine.path.read_bytes())
    raw[len(raw) // 2] ^= 1
    engine.path.write_bytes(raw)
    found = te.inspect(engine.path).verdict
    assert found.verdict == "refuse" and "digest" in found.reason and found.command
    with pytest.raises(EngineError, match="digest"):
        te.load(engine)


def test_a_missing_weights_file_is_refused(tmp_path: Path):
    engine = te.build(
        models.conv_net(tmp_path / "net.onnx"), store=te.Store(tmp_path / "s"), options={"external_weights": True}
    )
    engine.files[1].unlink()
    assert te.inspect(engine.path).verdict.verdict == "refuse"
    with pytest.raises(EngineError, match="missing"):
        te.load(engine)


def test_a_fallback_that_was_allowed_is_a_penalty(engine: Engine):
    other = changed(engine, providers=("migraphx",))
    assert verdict(other, RuntimeConfig(allow_fallback=True)).verdict == "penalty"


def test_asking_for_another_provider_than_the_build_had_means_building_again(engine: Engine):
    found = verdict(changed(engine, providers=("cuda", "cpu")), RuntimeConfig(providers=("cpu",)))
    assert found.verdict == "rebuild"
    assert (found.command or "").endswith("--providers cpu")
