"""What only an RTX GPU can show of the TensorRT-RTX provider: its nodes, its agreement, its kernels kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import trt_engine as te
from trt_engine.backends.onnxruntime import providers
from trt_engine.backends.onnxruntime.providers import select_providers
from trt_engine.backends.onnxruntime.run import session_settings
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError

pytestmark = pytest.mark.gpu

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"
NAME, PROVIDER = "tensorrt-rtx", "NvTensorRTRTXExecutionProvider"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The digits engine of the provider on `cuda:0`; skipped where the provider does not start."""
    folder = tmp_path_factory.mktemp("store")
    patch = pytest.MonkeyPatch()
    patch.setenv("TRT_ENGINE_STORE", str(folder))
    try:
        if (dead := providers.start_error(select_providers((NAME,), "cuda:0"))) is not None:
            raise dead
        yield te.build(DIGITS, providers=(NAME,), device="cuda:0", batch=(1, 4, 8))
    except TrtEngineError as error:
        pytest.skip(f"no RTX GPU for ONNX Runtime here: {error.message}")
    finally:
        patch.undo()


def test_every_node_runs_on_the_provider_and_the_outputs_agree(engine: Engine) -> None:
    with te.load(engine) as runner:
        facts = runner.runtime_info
    assert facts["nodes"].startswith(PROVIDER) and "CPUExecutionProvider" not in facts["nodes"]
    assert engine.passport.parity is not None
    assert max(item.max_rel for item in engine.passport.parity.outputs.values()) < 0.0156, "TF32 at most"


def test_compiled_kernels_are_written_to_the_store_and_read_by_the_next_session(engine: Engine) -> None:
    _, _, choice = session_settings(engine, RuntimeConfig())
    assert choice.cache is not None
    with te.load(engine):
        pass
    kept = [path for path in choice.cache.iterdir() if path.name != ".lock"]
    assert kept and all(path.stat().st_size for path in kept)


@pytest.mark.parametrize("graph", [False, True])
def test_inputs_on_the_gpu_are_measured_with_and_without_a_graph(engine: Engine, graph: bool) -> None:
    rule = BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=20, batch=4, graph=graph)
    record = te.bench(engine, config=rule)
    assert len(record.compute_ms) >= 20 and record.protocol.graph is graph
