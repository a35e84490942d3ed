"""Plans of TensorRT-RTX are run over its real bindings: what is compiled, kept, captured, and left out of measurements."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.releases("rtx-1.7.1")

SPAN = "images:1x3x8x8,2x3x8x8,4x3x8x8"
CACHE = "net.engine.1.7.1.116-fake.runtime_cache"


def sealed(world: Any, folder: Path, *flags: str, gpu_bits: int = 0x08) -> Any:
    """An engine of a small network for GPUs of those bits, as a build would leave it."""
    import onnx

    import onnx_models
    import tensorrt_machines
    from bindings.scripted import plan_bytes
    from trt_engine.atomic_io import file_digest
    from trt_engine.config.profiles import parse_profile
    from trt_engine.engine import Engine
    from trt_engine.graph.load import open_model
    from trt_engine.records.passport import Payload, Requirements, Source

    path = onnx_models.conv_net(folder / "net.onnx")
    model, opened = onnx.load(path), open_model(path)
    stripped = "STRIP_PLAN" in flags
    for item in model.graph.initializer if stripped else ():
        item.CopyFrom(onnx.TensorProto(name=item.name, data_type=item.data_type, dims=item.dims))
    raw = model.SerializeToString()
    span = parse_profile(SPAN)
    shapes = {"images": [(batch, 3, 8, 8) for batch in (1, 2, 4)]}
    facts = {
        "flags": list(flags), "profiles": [shapes], "shape_values": [{}], "hardware_compatibility": "NONE",
        "verbosity": "DETAILED", "host_code": False, "version_compatible": False, "lean_outside": False,
        "stripped": stripped, "windows": False, "plugins": [], "settings": {}, "computes_in": {}, "aux_streams": 0,
        "model_bytes": len(raw), "gpu_bits": gpu_bits, "strongly_typed": True,
    }  # fmt: skip
    payload = folder / "net.engine"
    payload.write_bytes(plan_bytes(world.version, facts, raw))
    passport = tensorrt_machines.passport("1.7.1.116", backend="tensorrt-rtx", payload=(
        Payload(payload.name, payload.stat().st_size, file_digest(payload)),
    ))  # fmt: skip
    import dataclasses

    needs = Requirements("tensorrt-rtx", "1.7.1.116", compute_capabilities=("8.9",), stripped=stripped)
    source = Source("net", opened.digest, path.stat().st_size, str(path))
    passport = dataclasses.replace(
        passport, requirements=needs, signature=opened.signature, profiles=(span,), model=source, device="fake:0"
    )
    return Engine.seal(payload, passport)


@contextlib.contextmanager
def loaded(engine: Any, device: Any = None, **options: str) -> Iterator[Any]:
    from trt_engine.backends.tensorrt_rtx.run import TensorRtRtxRuntime
    from trt_engine.config.runtime import RuntimeConfig
    from trt_engine.device.fake import FakeDevice

    device = device or FakeDevice(0)
    session = TensorRtRtxRuntime().load(engine, RuntimeConfig(options=options), device=device)
    try:
        yield session
    finally:
        session.close()
        assert device.memory().allocated_bytes == 0, "memory is given back"


@contextlib.contextmanager
def ready(session: Any, batch: int = 2) -> Iterator[tuple[Any, Any]]:
    """A context with memory bound for that many images, and a stream."""
    device, buffers = session.device, {}
    with contextlib.ExitStack() as stack:
        context, stream = session.create_context(), device.stream()
        stack.callback(stream.close)
        stack.callback(context.close)
        shapes = {"images": (batch, 3, 8, 8)}
        for name in (*shapes, *context.prepare(shapes)):
            buffers[name] = device.allocate(4096)
            stack.callback(buffers[name].close)
        context.bind(buffers)
        stack.callback(stream.synchronize)
        yield context, stream


def infer(session: Any, batch: int = 2) -> None:
    with ready(session, batch) as (context, stream):
        context.enqueue(stream)
        context.enqueue(stream)
        stream.synchronize()


def configs(world: Any) -> list[Any]:
    from bindings.scripted_rtx import IRuntimeConfig

    return [item for item in world.objects.values() if isinstance(item, IRuntimeConfig)]


# ------------------------------------------------------------------------------------------------ what is compiled


def test_kernels_are_compiled_once_and_kept_beside_the_engine(world: Any, tmp_path: Path) -> None:
    engine = sealed(world, tmp_path)
    with loaded(engine) as session:
        for batch in (2, 4, 2):
            infer(session, batch)
        first = session.runtime_info()
    assert first["runtime_cache"] == "new" and first["kernel_specialization"] == "eager"
    assert len(world.kernels_compiled) == 3, "those for any shape, and for two shapes"
    assert (tmp_path / CACHE).is_file()
    with loaded(engine) as session:
        infer(session, 4)
        again = session.runtime_info()
    assert again["runtime_cache"].startswith("read ") and len(world.kernels_compiled) == 3
    before = (tmp_path / CACHE).stat().st_mtime_ns
    with loaded(engine) as session:
        infer(session, 4)
    assert (tmp_path / CACHE).stat().st_mtime_ns == before, "what is known already is not written again"


def test_the_time_of_compiling_is_reported_and_is_no_part_of_a_measurement(world: Any, tmp_path: Path) -> None:
    from trt_engine.benchmark.closed_loop import measure
    from trt_engine.config.bench import BenchConfig

    engine = sealed(world, tmp_path)
    world.compile_s = 1.0
    with loaded(engine) as session:
        config = BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=5, batch=2, graph=False)
        record = measure(session, engine, config)
    total, contexts, inferences = map(float, re.findall(r"[0-9.]+", record.runtime_info["jit_s"]))
    assert contexts >= 1.0 and inferences >= 1.0 and total == pytest.approx(contexts + inferences, abs=0.002)
    assert max(record.compute_ms) < 1000.0 and record.warmup_queries == 0


@pytest.mark.parametrize(("strategy", "compiled"), [("eager", 2), ("lazy", 1), ("none", 1)])
def test_strategies_reach_every_context_and_are_read_back(
    world: Any, tmp_path: Path, strategy: str, compiled: int
) -> None:
    engine = sealed(world, tmp_path)
    options = {"kernel_specialization": strategy, "cuda_graph_strategy": "whole_graph_capture"}
    with loaded(engine, **options) as session:
        infer(session)
        facts = session.runtime_info()
    used = [item.values for item in configs(world) if item.cache is not None]
    numbers = {"lazy": 0, "eager": 1, "none": 2}
    wanted = {"cuda_graph_strategy": 1, "dynamic_shapes_kernel_specialization_strategy": numbers[strategy]}
    assert used == [wanted] and len(world.kernels_compiled) == compiled
    assert facts["kernel_specialization"] == strategy and facts["cuda_graph_strategy"] == "whole_graph_capture"


def test_a_strategy_that_is_not_taken_is_an_error(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import SetupError

    world.faults.stubborn = {"IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy="}
    with (
        loaded(sealed(world, tmp_path)) as session,
        pytest.raises(SetupError, match=r"specialization_strategy` eager, it keeps lazy"),
    ):
        session.create_context()
    assert json.loads((tmp_path / CACHE).read_bytes())["kernels"] == []


# ------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize("content", ["garbage", '{"environment": ["1.7.1.116", "another GPU"], "kernels": ["x"]}'])
def test_a_cache_that_is_refused_is_reported_and_replaced(world: Any, tmp_path: Path, content: str) -> None:
    engine = sealed(world, tmp_path)
    (tmp_path / CACHE).write_text(content)
    with warned() as texts, loaded(engine) as session:
        infer(session)
        assert session.runtime_info()["runtime_cache"] == "refused"
    assert any("damaged, or of another GPU" in text for text in texts)
    assert len(json.loads((tmp_path / CACHE).read_bytes())["kernels"]) == 2


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    import logging

    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    keep = Keep(logging.WARNING)
    logger = logging.getLogger("trt_engine.backends.tensorrt_rtx.run")
    logger.addHandler(keep)
    try:
        yield texts
    finally:
        logger.removeHandler(keep)


def test_a_cache_over_the_limit_of_files_is_not_read(world: Any, tmp_path: Path) -> None:
    import os

    engine = sealed(world, tmp_path)
    (tmp_path / CACHE).write_bytes(b"x" * 2000)
    os.environ["TRT_ENGINE_MAX_RECORD_SIZE"] = "1KiB"
    with warned() as texts, loaded(engine) as session:
        infer(session)
        os.environ.pop("TRT_ENGINE_MAX_RECORD_SIZE")
    assert any("2000 bytes, more than the 1KiB" in text for text in texts)


@pytest.mark.parametrize("where", ["off", "chosen", "in the way"])
def test_the_file_is_where_the_user_says_and_a_place_that_cannot_be_written_costs_nothing(
    world: Any, tmp_path: Path, where: str
) -> None:
    engine = sealed(world, tmp_path)
    (tmp_path / "file").touch()
    chosen = {"chosen": "kernels.bin", "in the way": "file/kernels.bin", "off": "off"}[where]
    given = chosen if where == "off" else str(tmp_path / chosen)
    with warned() as texts, loaded(engine, runtime_cache=given) as session:
        infer(session)
        state = session.runtime_info()["runtime_cache"]
    assert not (tmp_path / CACHE).exists() and len(world.kernels_compiled) == 2
    assert state == ("off" if where == "off" else "new")
    assert (tmp_path / "kernels.bin").exists() == (where == "chosen")
    assert bool(texts) == (where == "in the way"), texts


def test_another_process_that_writes_is_not_waited_for_long(world: Any, tmp_path: Path) -> None:
    from filelock import FileLock

    from trt_engine.backends.tensorrt_rtx import run

    engine = sealed(world, tmp_path)
    run._LOCK_S = 0.05
    with warned() as texts, FileLock(tmp_path / f".{CACHE}.lock"), loaded(engine) as session:
        infer(session)
    assert any("locked by another process" in text for text in texts) and not (tmp_path / CACHE).exists()


@pytest.mark.parametrize("fault", ["ICudaEngine.create_runtime_config", "IRuntimeConfig.create_runtime_cache"])
def test_a_library_without_the_object_is_an_error_or_costs_the_cache_alone(
    world: Any, tmp_path: Path, fault: str
) -> None:
    from trt_engine.errors import EngineError

    world.faults.nothing_from = {fault}
    with loaded(sealed(world, tmp_path)) as session:
        if "config" in fault.rpartition(".")[2]:
            with pytest.raises(EngineError, match="making a context"):
                session.create_context()
            return
        infer(session)
        assert session.runtime_info()["runtime_cache"] == "not taken"


# ------------------------------------------------------------------------------------------------ graphs


@pytest.mark.parametrize(
    ("options", "capturable", "reason"),
    [
        ({}, True, None),
        ({"kernel_specialization": "none"}, True, None),
        ({"kernel_specialization": "lazy"}, True, "kernel_specialization=lazy"),
        ({"cuda_graph_strategy": "whole_graph_capture"}, True, "captures its own"),
        ({}, False, "require_user_allocation=on"),
    ],
)
def test_a_graph_is_captured_where_it_holds_the_right_kernels(
    world: Any, tmp_path: Path, options: dict[str, str], capturable: bool, reason: str | None
) -> None:
    from trt_engine.benchmark.closed_loop import measure
    from trt_engine.config.bench import BenchConfig

    engine = sealed(world, tmp_path)
    world.capturable = capturable
    with loaded(engine, **options) as session:
        with ready(session) as (context, stream):
            context.enqueue(stream)
            assert (context.no_graph or "").find(reason or "") >= 0 and (context.no_graph is None) == (reason is None)
        record = measure(session, engine, BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=3, batch=2, graph=True))
    assert record.protocol.graph is (reason is None)
    told = [text for text in record.warnings if "graph could not be captured" in text]
    assert len(told) == bool(reason) and all(str(reason) in text for text in told)


# ------------------------------------------------------------------------------------------------ weights


def test_deferred_weights_come_with_the_first_context(world: Any, tmp_path: Path) -> None:
    from trt_engine.device.fake import FakeDevice

    device = FakeDevice(0)
    with loaded(sealed(world, tmp_path), device, deferred_weights="on") as session:
        assert device.memory().allocated_bytes == 0, "nothing but the plan was read"
        infer(session)
        infer(session)


def test_weights_that_are_not_taken_are_an_error(world: Any, tmp_path: Path) -> None:
    from trt_engine.errors import EngineError

    world.faults.refused = {"ICudaEngine.load_weights"}
    with (
        loaded(sealed(world, tmp_path), deferred_weights="on") as session,
        pytest.raises(EngineError, match="loading the weights"),
    ):
        session.create_context()


# ------------------------------------------------------------------------------------------------ through the verbs


def images(batch: int) -> dict[str, Any]:
    import numpy as np

    return {"images": np.random.default_rng(batch).random((batch, 3, 8, 8), np.float32)}


def test_contexts_of_a_loaded_engine_share_the_kernels_and_capture_graphs(world: Any, tmp_path: Path) -> None:
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    import trt_engine as te

    engine = sealed(world, tmp_path)
    evaluator = ReferenceEvaluator(onnx.load(tmp_path / "net.onnx"))
    with te.load(engine, contexts=2, graphs=True) as runner:
        for batch in (2, 4, 2, 4):
            found = runner.infer(images(batch))
            np.testing.assert_allclose(found["scores"], evaluator.run(None, images(batch))[0], rtol=1e-5)
        facts = runner.runtime_info
    assert len(world.kernels_compiled) == 3 and float(facts["jit_s"].split()[0]) >= 0.0
    assert not facts.get("graphs", "").startswith("none"), facts


def test_bench_and_profile_take_its_engines(world: Any, tmp_path: Path) -> None:
    import trt_engine as te
    from trt_engine.backends.tensorrt_rtx.run import layers, profile
    from trt_engine.config.runtime import RuntimeConfig

    engine = sealed(world, tmp_path)
    record = te.bench(engine, batch=2, duration_s=0.0, warmup_s=0.0, iterations=5)
    assert record.backend == "tensorrt-rtx" and record.protocol.graph and len(record.compute_ms) >= 5
    assert "library" in record.runtime_info and record.runtime_info["library"].startswith("tensorrt_rtx 1.7.1")
    found = profile(engine, images(2), RuntimeConfig(device="fake:0"), inferences=2, warmup=1, keep=None)
    assert found.rows and len(layers(engine, RuntimeConfig(device="fake:0"))) == len(found.rows)
