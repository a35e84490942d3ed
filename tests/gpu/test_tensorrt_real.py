"""What only a machine with TensorRT can show: real tactics, real plans, real memory. The checklist of docs/tensorrt.md.

`make test-tensorrt` runs it. That these tests are right themselves is shown on stand-ins (tests/bindings).
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models
import trt_engine as te
from onnx_models import reference_outputs
from programs import run_python
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, TrtEngineError

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"
SPAN = "images:1x3x8x8,2x3x8x8,4x3x8x8"


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    """A GPU, and TensorRT's bindings with their libraries; the skip says what lacks."""
    from trt_engine.backends.tensorrt.cuda_driver import find_gpu
    from trt_engine.device import open_device

    try:
        find_gpu(DEVICE)
        open_device(DEVICE).close()  # our own CUDA calls need a package of their own
    except TrtEngineError as error:
        pytest.skip(f"no GPU for TensorRT here: {error.message} ({error.hint})")
    try:
        import tensorrt
    except Exception as error:  # bindings without their libraries raise what the loader says
        pytest.skip(f"TensorRT is not installed here: {error}")
    assert tensorrt.__version__


def built(folder: Path, model: Path | None = None, out: str = "net.engine", **settings: Any) -> Engine:
    given: dict[str, Any] = {"backend": "tensorrt", "device": DEVICE, "out": folder / out}
    if model is None:
        model = onnx_models.conv_net(folder / "net.onnx")
        given["profiles"] = (SPAN,)
    return te.build(model, **(given | settings))


def images(rows: int) -> dict[str, Any]:
    return {"images": np.random.default_rng(rows).random((rows, 3, 8, 8), np.float32)}


def agrees(engine: Engine, model: Path, rows: int = 3, tolerance: float = 1e-3, **settings: Any) -> None:
    with te.load(engine, **settings) as runner:
        feeds = images(rows)
        np.testing.assert_allclose(
            runner.infer(feeds)["scores"], reference_outputs(model, feeds)["scores"], rtol=tolerance, atol=tolerance
        )


# ------------------------------------------------------------------------------------------------ building


def test_real_the_example_is_built_proved_and_agrees_with_onnx_runtime(tmp_path: Path) -> None:
    engine = built(tmp_path, DIGITS, batch=(1, 4, 8))
    passport = engine.passport
    assert passport.parity is not None and passport.parity.passed
    assert set(passport.precision.shares) <= {"fp32", "tf32"} and passport.precision.shares
    assert passport.build.notes["typing"] == "strong" and int(passport.build.notes["layers"]) > 0
    seen = te.inspect(engine.path)
    assert seen.compatibility is not None and seen.compatibility.status == "loads"


def test_real_fp16_is_found_in_the_layers_and_not_only_asked_for(tmp_path: Path) -> None:
    engine = built(tmp_path, precision="fp16")
    assert engine.passport.precision.main_dtype == "fp16"
    assert engine.passport.parity is not None and engine.passport.parity.passed


def test_real_int8_of_the_graph_is_int8_in_the_engine(tmp_path: Path) -> None:
    engine = built(tmp_path, onnx_models.int8_qdq(tmp_path / "q.onnx"), precision="int8")
    assert engine.passport.precision.main_dtype == "int8"


def test_real_a_second_build_reads_the_timings_of_the_first(tmp_path: Path) -> None:
    first = built(tmp_path)
    second = built(tmp_path, out="second.engine", rebuild=True)
    assert first.passport.build.notes["timing_cache"].startswith("new, kept")
    assert second.passport.build.notes["timing_cache"].startswith("read")
    assert not any("timing cache" in text for text in second.passport.build.warnings)


def test_real_the_memory_tensorrt_takes_is_counted(tmp_path: Path) -> None:
    assert "in 0 allocations" not in built(tmp_path).passport.build.notes["allocations"]


def until_stopped() -> None:
    """Send ourselves Ctrl-C, and come back once the build under way has heard of it."""
    from trt_engine.backends.tensorrt.build_progress import BuildProgress

    os.kill(os.getpid(), signal.SIGINT)
    builds = [item for item in gc.get_objects() if isinstance(item, BuildProgress)]
    for _ in range(6000):
        if any(build.cancelled for build in builds):
            return
        threading.Event().wait(0.01)


def test_real_ctrl_c_stops_a_build(tmp_path: Path) -> None:
    """The first phase TensorRT reports is answered with a signal to ourselves."""
    from trt_engine.backends.tensorrt.build import TensorRtBuilder
    from trt_engine.config.build import BuildConfig
    from trt_engine.graph.load import open_model
    from trt_engine.protocols import BuildPaths

    told: list[str] = []

    def interrupt(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            until_stopped()

    model = open_model(onnx_models.conv_net(tmp_path / "net.onnx"))
    profiles = BuildConfig(batch=(1, 2, 4)).resolve(model.signature)
    config = BuildConfig(backend="tensorrt", device=DEVICE, profiles=profiles)
    with pytest.raises(KeyboardInterrupt):
        TensorRtBuilder().build(model, config, BuildPaths(tmp_path / "net.engine", on_status=interrupt))
    assert told and not (tmp_path / "net.engine").exists()


def test_real_the_parser_names_the_node_it_cannot_take(tmp_path: Path) -> None:
    import onnx

    proto = onnx.load(onnx_models.conv_net(tmp_path / "net.onnx"))
    proto.graph.node[2].name, proto.graph.node[2].op_type = "second", "NobodyKnowsThis"
    proto.graph.node[2].domain = "nobody"
    proto.opset_import.append(onnx.helper.make_opsetid("nobody", 1))
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(TrtEngineError, match=r"second|NobodyKnowsThis"):
        built(tmp_path, tmp_path / "net.onnx", batch=(1, 2, 4), parity=False)


# ------------------------------------------------------------------------------------------------ running


def test_real_every_shape_of_the_profile_agrees(tmp_path: Path) -> None:
    engine = built(tmp_path)
    for strategy in ("static", "on_profile_change", "user_managed"):
        for rows in (1, 4, 2):
            agrees(engine, tmp_path / "net.onnx", rows, options={"memory_strategy": strategy})


def test_real_a_captured_graph_gives_what_the_plain_call_gives(tmp_path: Path) -> None:
    engine = built(tmp_path)
    with te.load(engine, graphs=True) as captured, te.load(engine) as plain:
        for rows in (1, 4, 1, 2):
            for _ in range(3):
                feeds = images(rows)
                np.testing.assert_array_equal(captured.infer(feeds)["scores"], plain.infer(feeds)["scores"])


def test_real_two_threads_on_two_contexts_get_their_own_answers(tmp_path: Path) -> None:
    engine = built(tmp_path)
    with te.load(engine, contexts=2) as runner, ThreadPoolExecutor(4) as threads:
        feeds = [images(1 + number % 4) for number in range(64)]
        found = list(threads.map(lambda item: runner.infer(item)["scores"], feeds))
    for item, scores in zip(feeds, found, strict=True):
        wanted = reference_outputs(tmp_path / "net.onnx", item)["scores"]
        np.testing.assert_allclose(scores, wanted, rtol=1e-3, atol=1e-3)


def test_real_outputs_that_only_the_data_sizes_come_whole(tmp_path: Path) -> None:
    model = onnx_models.positions(tmp_path / "p.onnx")
    engine = built(tmp_path, model, profiles=("x:1x3,2x3,300x3",), parity=False)
    with te.load(engine) as runner:
        for rows in (1, 300, 2):
            x = np.tile(np.array([[1.0, 0.0, 2.0]], np.float32), (rows, 1))
            assert runner.infer({"x": x})["where"].shape == (2, 2 * rows)


def test_real_a_model_that_is_told_sizes_takes_them_from_the_host(tmp_path: Path) -> None:
    model = onnx_models.reshaped(tmp_path / "r.onnx")
    engine = built(
        tmp_path, model, profiles=("x:1x6,4x6,8x6;sizes:2,2,2",), options={"shape_values": "sizes:1x6,2x12,4x12"}
    )
    assert engine.passport.parity is not None and engine.passport.parity.passed
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    with te.load(engine) as runner:
        for sizes in ((1, 12), (2, 6), (1, 12)):
            found = runner.infer({"x": x, "sizes": np.array(sizes, np.int64)})["y"]
            np.testing.assert_array_equal(found, (2 * x).reshape(sizes))


def test_real_layers_are_told_by_both_majors_inspectors(tmp_path: Path) -> None:
    from trt_engine.backend import get_backend
    from trt_engine.config.runtime import RuntimeConfig

    session = get_backend("tensorrt").load_component("runtime")().load(built(tmp_path), RuntimeConfig())
    try:
        found = session.layers()
    finally:
        session.close()
    assert any(layer.is_matmul for layer in found) and all(layer.name for layer in found)


# ------------------------------------------------------------------------------------------------ kinds of plans


def test_real_a_stripped_plan_is_small_and_gets_its_weights_back(tmp_path: Path) -> None:
    whole = built(tmp_path, onnx_models.conv_net(tmp_path / "net.onnx", width=256), profiles=(SPAN,))
    engine = built(tmp_path, tmp_path / "net.onnx", out="stripped.engine", profiles=(SPAN,),
                   options={"strip_weights": "on"})  # fmt: skip
    assert engine.path.stat().st_size < whole.path.stat().st_size
    agrees(engine, tmp_path / "net.onnx")


def test_real_streamed_weights_give_the_same_answers(tmp_path: Path) -> None:
    model = onnx_models.conv_net(tmp_path / "net.onnx", width=256)
    engine = built(tmp_path, model, profiles=(SPAN,), options={"weight_streaming": "on"}, parity=False)
    if engine.passport.build.notes["streamable_weights"] == "0 bytes":
        pytest.skip("this TensorRT streams none of so small a network's weights")
    for budget in ("off", "50%", "0"):
        agrees(engine, tmp_path / "net.onnx", options={"weight_streaming_budget": budget})


def test_real_a_version_compatible_plan_needs_an_explicit_yes(tmp_path: Path) -> None:
    engine = built(tmp_path, options={"version_compatible": "on"}, parity=False)
    with pytest.raises(EngineError, match="carries host code"):
        te.load(engine)
    agrees(engine, tmp_path / "net.onnx", options={"allow_host_code": "on"})


def test_real_damaged_plans_are_refused_and_crash_nobody(tmp_path: Path) -> None:
    """In processes of their own: what is shown is that they end with 10 and not with a signal."""
    engine = built(tmp_path, parity=False)
    whole = engine.path.read_bytes()
    for cut in (30, len(whole) // 2, len(whole) - 1):
        engine.path.write_bytes(whole[:cut])
        done = refused(engine.path)
        assert done.returncode == 10, f"cut at {cut}: {done.returncode}\n{done.stderr}"
        assert "Traceback" not in done.stderr


def refused(path: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "trt_engine", "inspect", str(path), "--run", timeout=120)


# ------------------------------------------------------------------------------------------------ beside trtexec


def test_real_trtexec_loads_our_plan_and_both_times_are_read_from_its_log(tmp_path: Path) -> None:
    program = shutil.which("trtexec") or shutil.which("/usr/src/tensorrt/bin/trtexec")
    if program is None:
        pytest.skip("`trtexec` is not on the PATH")
    engine = built(tmp_path)
    done = subprocess.run(
        [program, f"--loadEngine={engine.path}", "--shapes=images:2x3x8x8", "--duration=1"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    log = tmp_path / "trtexec.log"
    log.write_text(done.stdout + done.stderr)
    said = run_python("-m", "trt_engine", "bench", "--parse-log", str(log), "--json", timeout=60, check=True)
    assert json.loads(said.stdout), "one object"
    assert done.returncode == 0, done.stderr[-2000:]
