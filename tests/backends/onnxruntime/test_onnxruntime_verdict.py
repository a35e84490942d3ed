"""Whether an engine can be used here, without loading it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.backends.onnxruntime.compatibility import check_compatibility
from trt_engine.backends.onnxruntime.run import OnnxRuntime
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info
from trt_engine.engine import Engine
from trt_engine.errors import EngineError
from trt_engine.records.passport import DtypeShare


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return te.build(models.conv_net(tmp_path / "net.onnx"), store=te.Store(tmp_path / "store"))


def changed(engine: Engine, *, notes: dict[str, str] | None = None, backend: str | None = None, **needs: Any) -> Engine:
    """The engine as if another machine had made it."""
    passport = engine.passport
    build = replace(passport.build, notes=passport.build.notes | (notes or {}))
    return Engine(
        engine.path,
        replace(
            passport,
            build=build,
            requirements=replace(passport.requirements, **needs),
            backend=backend or passport.backend,
        ),
    )


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
    found = check_compatibility(changed(engine, notes=notes, **needs), RuntimeConfig())
    assert found.status == expected
    assert reason in found.reason
    if expected == "rebuild":
        assert found.command == engine.passport.build.command


@pytest.mark.parametrize("what", [name for name, case in CASES.items() if case[2] in ("rebuild", "refuse")])
def test_what_must_be_rebuilt_or_is_refused_does_not_load(what: str, engine: Engine):
    needs, notes, _, reason = CASES[what]
    with pytest.raises(EngineError, match=reason) as caught:
        OnnxRuntime().load(changed(engine, notes=notes, **needs), RuntimeConfig())
    assert caught.value.exit_code == 10 and caught.value.hint


@pytest.mark.parametrize("asked", [{"providers": ("cuda",)}, {"device": "cuda:0"}])
def test_a_provider_somebody_asks_for_is_not_called_the_engines_need(asked: dict[str, Any], engine: Engine):
    found = check_compatibility(engine, RuntimeConfig(**asked), available=("CPUExecutionProvider",))
    assert found.status == "refuse" and "it needs" not in found.reason
    assert found.reason.startswith("requested is the provider `cuda`")
    assert found.reason.endswith("; the engine was built for cpu")
    needed = check_compatibility(
        changed(engine, providers=("cuda",)), RuntimeConfig(), available=("CPUExecutionProvider",)
    )
    assert needed.reason.startswith("it needs the provider `cuda`")


def test_a_missing_weights_file_is_refused(tmp_path: Path):
    engine = te.build(
        models.conv_net(tmp_path / "net.onnx"), store=te.Store(tmp_path / "s"), options={"external_weights": True}
    )
    engine.files[1].unlink()
    assert te.inspect(engine.path).compatibility.status == "refuse"
    with pytest.raises(EngineError, match="missing"):
        te.load(engine)


GPU_BUILD = ("CUDAExecutionProvider", "CPUExecutionProvider")
HERE = {
    "the same architecture": ("9.0", (), "loads", "built with the installed onnxruntime"),
    "another architecture": ("8.0", (), "penalty", "verified on compute capability 9.0"),
    "TF32 where there is none": ("7.5", ("tf32",), "rebuild", "computes in TF32"),
}


def on_gpu(engine: Engine, *kinds: str) -> Engine:
    """The engine as if an H200 had made it."""
    made = changed(engine, providers=("cuda",), cpu_features=(), compute_capability="9.0", gpu="NVIDIA H200")
    precision = replace(made.passport.precision, shares={kind: DtypeShare(1, 1, 1) for kind in kinds or ("fp32",)})
    notes = {name: text for name, text in made.passport.build.notes.items() if name != "layout"}
    build = replace(made.passport.build, notes=notes)
    return Engine(engine.path, replace(made.passport, precision=precision, build=build, device="cuda:0"))


@pytest.mark.parametrize("what", HERE)
def test_a_gpus_engine_is_judged_by_the_gpu_that_is_here(what: str, engine: Engine):
    capability, kinds, expected, reason = HERE[what]
    board = info.Gpu(0, "NVIDIA Another", "GPU-1", 1 << 14, capability, "580.1")
    found = check_compatibility(on_gpu(engine, *kinds), RuntimeConfig(), available=GPU_BUILD, gpus=(board,))
    assert (found.status, reason in found.reason) == (expected, True)
    assert expected == "loads" or found.command


def test_asking_for_another_provider_than_the_build_had_means_building_again(engine: Engine):
    found = check_compatibility(changed(engine, providers=("cuda", "cpu")), RuntimeConfig(providers=("cpu",)))
    assert found.status == "rebuild"
    assert (found.command or "").endswith("--providers cpu")
