"""What only a machine with an RTX GPU can show of TensorRT-RTX: compiled kernels, their cache, graphs. A checklist of
docs/tensorrt.md.

`make test-tensorrt` runs it. That these tests are right themselves is shown on stand-ins (tests/bindings).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models
import trt_engine as te
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, TrtEngineError
from trt_engine.records.passport import NOT_VALIDATED

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
SPAN = "images:1x3x8x8,2x3x8x8,4x3x8x8"


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    """An RTX GPU, and TensorRT-RTX with its library; the skip says what is missing."""
    from trt_engine.backends.tensorrt.cuda_driver import find_gpu
    from trt_engine.device import open_device
    from trt_engine.trt.gpu_targets import RTX_TARGETS

    try:
        found = find_gpu(DEVICE)
        open_device(DEVICE).close()  # our own CUDA calls need a package of their own
    except TrtEngineError as error:
        pytest.skip(f"no GPU for TensorRT-RTX here: {error.message} ({error.hint})")
    if found.compute_capability not in RTX_TARGETS:
        pytest.skip(f"{found.name} ({found.compute_capability}) is not a GPU of TensorRT-RTX")
    try:
        import tensorrt_rtx
    except Exception as error:  # bindings without their libraries raise what the loader says
        pytest.skip(f"TensorRT-RTX is not installed here: {error}")
    assert tensorrt_rtx.__version__


def built(folder: Path, out: str = "net.engine", **settings: Any) -> Engine:
    model = onnx_models.conv_net(folder / "net.onnx")
    given = {"backend": "tensorrt-rtx", "device": DEVICE, "out": folder / out, "profiles": (SPAN,)}
    return te.build(model, **(given | settings))


def images(rows: int) -> dict[str, Any]:
    return {"images": np.random.default_rng(rows).random((rows, 3, 8, 8), np.float32)}


def scores(engine: Engine, rows: int = 3, times: int = 3, **settings: Any) -> tuple[Any, dict[str, str]]:
    """The outputs of the last of several inferences, and the facts."""
    with te.load(engine, **settings) as runner:
        for _ in range(times):
            found = runner.infer(images(rows))["scores"]
        return found, runner.runtime_info


def agrees(found: Any, folder: Path, rows: int = 3) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    wanted = ReferenceEvaluator(onnx.load(folder / "net.onnx")).run(None, images(rows))[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("net.engine.*.runtime_cache"))


# ------------------------------------------------------------------------------------------------ what is compiled


def test_real_an_engine_is_built_proved_and_agrees_at_every_shape(tmp_path: Path) -> None:
    engine = built(tmp_path)
    assert engine.passport.parity is not None and engine.passport.parity.passed
    for rows in (1, 2, 3, 4):
        agrees(scores(engine, rows)[0], tmp_path, rows)
    if DEVICE.startswith("cuda"):
        seen = te.inspect(engine.path)
        assert seen.compatibility is not None and seen.compatibility.status == "loads"


def test_real_an_engine_that_was_built_elsewhere_is_validated_on_its_gpu(tmp_path: Path) -> None:
    """Built as on a machine without this GPU; then loaded, run and judged by the file beside it, without its model."""
    from trt_engine.backends.tensorrt_rtx import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "parity_options", lambda model, config: "it is built as if its GPU were elsewhere")
        engine = built(tmp_path, precision="fp16")
    assert engine.passport.parity is None and engine.validation == NOT_VALIDATED and engine.reference is not None
    (tmp_path / "net.onnx").unlink()
    report = te.validate(engine.path)
    assert (
        report.state == "passed" and report.checks == ("precision", "parity") and report.precision.main_dtype == "fp16"
    )
    passport = Engine.open(engine.path).passport
    assert passport.parity is not None and passport.parity.passed and passport.validation is not None
    assert passport.validation.state == "passed" and passport.validation.environment is not None
    assert passport.validation.environment.gpu or not DEVICE.startswith("cuda")


def test_real_compiled_kernels_are_kept_beside_the_engine_and_read_again(tmp_path: Path) -> None:
    engine = built(tmp_path)
    _, first = scores(engine)
    assert first["runtime_cache"] == "new" and len(kept(tmp_path)) == 1
    found, second = scores(engine)
    assert second["runtime_cache"].startswith("read ")
    agrees(found, tmp_path)


def test_real_a_damaged_cache_is_refused_reported_and_replaced(tmp_path: Path) -> None:
    engine = built(tmp_path)
    scores(engine)
    (cache,) = kept(tmp_path)
    whole = cache.read_bytes()
    cache.write_bytes(whole[: len(whole) // 2] + b"damaged")
    found, facts = scores(engine)
    assert facts["runtime_cache"] == "refused"
    agrees(found, tmp_path)
    assert scores(engine)[1]["runtime_cache"].startswith("read ")


def test_real_every_strategy_gives_the_same_numbers(tmp_path: Path) -> None:
    engine = built(tmp_path)
    for kernels in ("eager", "lazy", "none"):
        for graphs in ("disabled", "whole_graph_capture"):
            options = {"kernel_specialization": kernels, "cuda_graph_strategy": graphs}
            found, facts = scores(engine, options=options)
            agrees(found, tmp_path)
            assert facts["kernel_specialization"] == kernels and facts["cuda_graph_strategy"] == graphs


def test_real_the_time_of_compiling_is_no_part_of_a_measurement(tmp_path: Path) -> None:
    engine = built(tmp_path)
    protocol = {"batch": 2, "duration_s": 0.0, "warmup_s": 0.0, "iterations": 20}
    record = te.bench(engine, options={"runtime_cache": "off"}, **protocol)
    assert max(record.compute_ms) < 1e3 * float(record.runtime_info["jit_s"].split()[0]) or record.device.startswith(
        "fake"
    )
    again = te.bench(engine, **protocol)
    assert again.runtime_info["runtime_cache"] in ("new", "off") or again.runtime_info["runtime_cache"].startswith(
        "read "
    )


# ------------------------------------------------------------------------------------------------ graphs and weights


def test_real_a_graph_of_ours_is_captured_or_the_reason_is_given(tmp_path: Path) -> None:
    engine = built(tmp_path, options={"require_user_allocation": "on"})
    found, facts = scores(engine, times=5, graphs=True, options={"memory_strategy": "user_managed"})
    agrees(found, tmp_path)
    assert facts.get("graphs")


def test_real_deferred_weights_give_the_same_numbers(tmp_path: Path) -> None:
    engine = built(tmp_path)
    agrees(scores(engine, options={"deferred_weights": "on"})[0], tmp_path)


def test_real_a_stripped_plan_is_small_and_gets_its_weights_back(tmp_path: Path) -> None:
    whole = built(tmp_path)
    stripped = built(tmp_path, out="stripped.engine", options={"strip_weights": "on", "refit": "identical"})
    assert stripped.path.stat().st_size < whole.path.stat().st_size
    agrees(scores(stripped)[0], tmp_path)


def test_real_a_cut_plan_is_refused(tmp_path: Path) -> None:
    engine = built(tmp_path)
    raw = engine.path.read_bytes()
    engine.path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(EngineError):
        te.load(engine).close()
