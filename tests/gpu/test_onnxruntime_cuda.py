"""What only a GPU can show of the onnxruntime backend: that FP32 is FP32, that TF32 is said, that copies are left out."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import trt_engine as te
from trt_engine.backend import get_backend
from trt_engine.backends.onnxruntime import providers
from trt_engine.backends.onnxruntime.providers import select_providers
from trt_engine.benchmark.bench_inputs import feeds_for
from trt_engine.benchmark.closed_loop import measure
from trt_engine.benchmark.speed_difference import MIN_RESTARTS
from trt_engine.benchmark.trtexec_style_log import render_log
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info
from trt_engine.engine import Engine
from trt_engine.errors import PrecisionError, SetupError, TrtEngineError, UsageError

pytestmark = pytest.mark.gpu

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "model.onnx"
SHORT = BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=20, batch=4)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Digits engines on `cuda:0`, each built once; skipped where the CUDA provider does not start."""
    try:
        choice = select_providers((), "cuda:0")
        if (dead := providers.start_error(choice)) is not None:
            raise dead
    except TrtEngineError as error:
        pytest.skip(f"no GPU for ONNX Runtime here: {error.message}")
    store = te.Store(tmp_path_factory.mktemp("store"))
    made: dict[str | None, Engine] = {}

    def engine(precision: str | None = None) -> Engine:
        if precision not in made:
            made[precision] = te.build(
                DIGITS, device="cuda:0", precision=precision, batch=(1, 4, 8), store=store, time_budget_s=0
            )
        return made[precision]

    return engine


def test_a_detector_is_closed_without_a_crash(cuda: Callable[..., Engine], tmp_path: Path) -> None:
    """Its joins of many tensors leave work on the stream until the session ends; the stream was destroyed before it."""
    program = (
        "import sys, pathlib\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import networks, trt_engine as te\n"
        "path = networks.yolo(pathlib.Path(sys.argv[2]) / 'yolo.onnx', size=128, divide=4)\n"
        "engine = te.build(path, device='cuda:0', batch=1, parity=False, time_budget_s=0, store=te.Store(sys.argv[2]))\n"
        "for graphs in (False, True):\n"
        "    with te.load(engine, graphs=graphs) as runner:\n"
        "        runner.warmup(3)\n"
    )
    cuda()
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    command = [sys.executable, "-c", program, str(benchmarks), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def worst(engine: Engine) -> float:
    assert engine.passport.parity is not None
    return max(item.max_rel for item in engine.passport.parity.outputs.values())


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_an_fp32_graph_runs_in_fp32_on_a_gpu(cuda: Callable[..., Engine], precision: str | None) -> None:
    engine = cuda(precision)
    assert engine.passport.precision.main_dtype == "fp32"
    assert "tf32" not in engine.passport.precision.shares
    assert engine.passport.build.notes["tf32"] == "off"
    assert worst(engine) <= 1e-3
    with te.load(engine) as runner:
        assert (runner.runtime_info["precision"], runner.runtime_info["tf32"], runner.runtime_info["device"]) == (
            "fp32",
            "off",
            "cuda:0",
        )


def test_tf32_is_asked_for_found_and_told(cuda: Callable[..., Engine]) -> None:
    engine = cuda("tf32")
    assert engine.passport.precision.main_dtype == "tf32"
    assert engine.passport.parity is not None and engine.passport.parity.tolerance == 32 * 2**-11
    assert worst(engine) > worst(cuda("fp32"))  # it did cut mantissas
    with te.load(engine) as runner:
        assert (runner.runtime_info["precision"], runner.runtime_info["tf32"]) == ("tf32", "on")
    with te.load(engine, options={"cuda.use_tf32": "0"}) as runner:
        assert runner.runtime_info["precision"] == "fp32"


def test_tf32_by_an_option_breaks_a_contract_on_fp32(cuda: Callable[..., Engine], tmp_path: Path) -> None:
    cuda()
    store, options = te.Store(tmp_path / "store"), {"cuda.use_tf32": "1"}
    with pytest.raises(PrecisionError, match="found tf32"):
        te.build(DIGITS, device="cuda:0", precision="fp32", options=options, store=store, time_budget_s=0)
    free = te.build(DIGITS, device="cuda:0", options=options, store=store, time_budget_s=0)
    assert free.passport.precision.main_dtype == "tf32"


def test_the_passport_names_the_gpu_and_not_the_processor(cuda: Callable[..., Engine]) -> None:
    passport, board = cuda().passport, info.gpus()[0]
    assert f"sm_{board.compute_capability.replace('.', '')}" in passport.build.identity
    assert not any(feature in passport.build.identity for feature in info.cpu().features)
    assert (passport.requirements.gpu, passport.requirements.compute_capability) == (
        board.name,
        board.compute_capability,
    )
    assert passport.requirements.cpu_features == ()
    assert te.inspect(cuda().path).compatibility.status == "loads"


@pytest.mark.parametrize("graph", [False, True])
def test_a_resident_run_gives_what_a_run_with_copies_gives(cuda: Callable[..., Engine], graph: bool) -> None:
    engine = cuda()
    session = get_backend("onnxruntime").load_component("runtime")().load(engine, RuntimeConfig())
    feeds, _ = feeds_for(engine, SHORT)
    expected = session.run(feeds)
    run = session.bind_resident(feeds, graph=graph)
    for _ in range(3):
        run()
        for name, value in run.outputs().items():
            np.testing.assert_allclose(np.sort(value, axis=1), np.sort(expected[name], axis=1), rtol=1e-3, atol=1e-3)
    session.close()


@pytest.mark.parametrize(("config", "transfers", "graph"), [
    ({}, False, True), ({"graph": False}, False, False), ({"transfers": True}, True, False),
    ({"protocol": "trtexec10"}, True, False), ({"protocol": "trtexec11"}, False, True),
])  # fmt: skip
def test_a_record_of_a_gpu_says_what_was_inside(
    cuda: Callable[..., Engine], config: dict[str, object], transfers: bool, graph: bool
) -> None:
    engine = cuda()
    session = get_backend("onnxruntime").load_component("runtime")().load(engine, RuntimeConfig())
    record = measure(session, engine, dataclasses.replace(SHORT, **config))  # type: ignore[arg-type]
    session.close()
    assert (record.device, record.protocol.clock, record.queries) == ("cuda:0", "host", 20)
    assert (record.protocol.transfers, record.protocol.graph) == (transfers, graph)
    assert record.environment.gpu == info.gpus()[0].name
    first = render_log(record).splitlines()[0]
    assert record.environment.gpu in first and ("no copies" in first) is not transfers


def test_a_graph_that_cannot_be_captured_is_said(cuda: Callable[..., Engine], tmp_path: Path) -> None:
    cuda()
    x, y = (helper.make_tensor_value_info(*item) for item in (("x", 1, ["n", 3, 3]), ("y", 1, ["n"])))
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Det", ["r"], ["y"])]  # Det has no kernel on CUDA
    proto = helper.make_model(
        helper.make_graph(nodes, "det", [x], [y]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save(proto, tmp_path / "det.onnx")
    store = te.Store(tmp_path / "store")
    with pytest.raises(SetupError, match="would fall back to the CPU"):
        te.build(tmp_path / "det.onnx", device="cuda:0", store=store)
    engine = te.build(tmp_path / "det.onnx", device="cuda:0", providers=("cuda", "cpu"), store=store, time_budget_s=0)
    session = get_backend("onnxruntime").load_component("runtime")().load(engine, RuntimeConfig())
    record = measure(session, engine, dataclasses.replace(SHORT, batch=None))
    session.close()
    assert not record.protocol.graph and "graph" in record.protocol.not_applicable
    assert any("could not be captured" in text for text in record.warnings)


def test_a_gpu_that_is_not_there_is_a_usage_error_that_names_those_that_are(cuda: Callable[..., Engine]) -> None:
    with pytest.raises(UsageError, match="no device `cuda:63`, available: `cuda:0`"):
        te.build(DIGITS, device="cuda:63")
    with pytest.raises(UsageError, match="no device `cuda:63`"):
        te.load(cuda(), device="cuda:63")


def test_a_provider_whose_libraries_are_missing_is_an_error_of_the_machine(cuda: Callable[..., Engine]) -> None:
    cuda()
    if providers.load_error("tensorrt") is None:
        pytest.skip("TensorRT's libraries are here")
    with pytest.raises(SetupError, match=r"`tensorrt` was asked for and does not run: lib\S+"):
        te.build(DIGITS, device="cuda:0", providers=("tensorrt",))


# ------------------------------------------------------------------------------------------------ contexts, streams, graphs


@pytest.fixture(scope="module")
def conv(cuda: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A network of convolutions for batches of 1 to 64, on `cuda:0`."""
    import onnx_models as models

    folder = tmp_path_factory.mktemp("conv")
    path = models.conv_net(folder / "conv.onnx", width=64, size=32)
    return te.build(path, device="cuda:0", batch=(1, 8, 64), store=te.Store(folder / "store"), time_budget_s=0)


def images(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"images": np.random.default_rng(seed).random((count, 3, 32, 32), np.float32)}


@pytest.fixture(scope="module")
def expected(conv: Engine) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """ONNX Runtime's own answer on the same provider."""
    session = get_backend("onnxruntime").load_component("runtime")().load(conv, RuntimeConfig())
    return lambda feeds: session.run(feeds)["scores"]


def on_host(array: object) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return torch.from_dlpack(array).cpu().numpy()


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("contexts", "streams"), [(1, 1), (4, 4), (3, 2)])
def test_many_callers_get_their_own_rows_from_contexts_on_streams(
    conv: Engine, expected: Callable[..., np.ndarray], contexts: int, streams: int, graphs: bool
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    asked = [images(1 + number % 9, number) for number in range(24)]
    wanted = [expected(feeds) for feeds in asked]
    with te.load(conv, contexts=contexts, streams=streams, graphs=graphs) as runner:
        runner.warmup(2, batch=8)
        with ThreadPoolExecutor(8) as crowd:
            for _ in range(6):
                for found, right in zip(crowd.map(runner.infer, asked), wanted, strict=True):
                    close(found["scores"], right)
        graphed = runner.stats().pool.graphs
        if graphs and contexts == streams:
            assert graphed.disabled_reason is None and graphed.captured and graphed.replayed
        elif graphs:
            assert "stream" in (graphed.disabled_reason or "")


def test_a_graph_gives_what_a_run_gives_whatever_ran_in_between(
    conv: Engine, expected: Callable[..., np.ndarray]
) -> None:
    with te.load(conv, graphs=(1, 8, 64)) as runner:
        for turn in range(4):
            for count in (64, 8, 1, 33, 5):  # the largest first: buffers that grow forget graphs
                feeds = images(count, 10 * turn + count)
                close(runner.infer(feeds)["scores"], expected(feeds))
        graphs = runner.stats().pool.graphs
    assert (graphs.captured, graphs.disabled_reason) == (3, None) and graphs.replayed >= 15


@pytest.mark.parametrize("graphs", [False, True])
def test_arrays_on_the_gpu_go_in_and_stay_there_and_are_the_callers(
    conv: Engine, expected: Callable[..., np.ndarray], graphs: bool
) -> None:
    torch = pytest.importorskip("torch")
    with te.load(conv, graphs=graphs) as runner:
        runner.warmup(2, batch=4)
        kept = []
        for seed in range(5):
            feeds = images(4, seed)
            lying = torch.from_numpy(feeds["images"]).cuda()
            outputs = runner.infer({"images": lying}, on_device=True)
            assert outputs["scores"].__dlpack_device__() == (2, 0)
            kept.append((outputs["scores"], expected(feeds)))
            lying.zero_()
        for found, right in kept:
            close(on_host(found), right)
        assert len({torch.from_dlpack(found).data_ptr() for found, _ in kept}) == 5
    close(on_host(kept[0][0]), kept[0][1])  # they outlive the engine


@pytest.mark.parametrize("graphs", [False, True])
def test_an_output_dropped_while_torch_still_reads_it_is_not_written_before(
    conv: Engine, expected: Callable[..., np.ndarray], graphs: bool
) -> None:
    torch = pytest.importorskip("torch")
    with te.load(conv, graphs=graphs) as runner:
        runner.warmup(2, batch=4)
        lying = [torch.from_numpy(images(4, seed)["images"]).cuda() for seed in range(4)]
        copies = []
        for array in lying:
            runner.infer({"images": array}, on_device=True)  # the next goes the short way
            tensor = torch.from_dlpack(runner.infer({"images": array}, on_device=True)["scores"])
            torch.cuda._sleep(int(1e8))
            copies.append(tensor.clone())  # launched, and not done when the tensor is dropped
            del tensor
        runner.infer({"images": lying[0]}, on_device=True)
        torch.cuda.synchronize()
        for seed, copy in enumerate(copies):
            close(copy.cpu().numpy(), expected(images(4, seed)))


def test_the_memory_an_engine_has_on_the_gpu_is_in_a_comparison(cuda: Callable[..., Engine]) -> None:
    if info.memory_used(0) is None:
        pytest.skip("NVML does not tell how much memory is taken")
    report = te.compare(cuda(), cuda("fp16"), config=dataclasses.replace(SHORT, duration_s=0.2), restarts=MIN_RESTARTS)
    for side in report.sides:
        assert side.memory_bytes is not None and side.weights_bytes is not None
        assert side.memory_bytes >= side.weights_bytes


def test_a_session_on_a_stream_really_launches_there(conv: Engine) -> None:
    session = get_backend("onnxruntime").load_component("runtime")().load(conv, RuntimeConfig())
    stream = session.stream()
    options = session.session_for_stream(stream).loaded.get_provider_options()["CUDAExecutionProvider"]
    assert (options["has_user_compute_stream"], int(options["user_compute_stream"])) == ("1", stream.handle)
    stream.close()
    session.close()


def test_enqueue_returns_before_the_gpu_is_done(conv: Engine) -> None:
    import time

    session = get_backend("onnxruntime").load_component("runtime")().load(conv, RuntimeConfig())
    torch = pytest.importorskip("torch")
    stream, context = session.stream(), session.create_context()
    sized = {"images": (64, 3, 32, 32)} | dict(context.prepare({"images": (64, 3, 32, 32)}))
    held = {name: session.device.allocate(4 * int(np.prod(shape))) for name, shape in sized.items()}
    context.bind(held)
    context.enqueue(stream)
    stream.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
        torch.cuda._sleep(int(4e8))  # some 200 ms
    before = time.perf_counter()
    context.enqueue(stream)
    launched_s = time.perf_counter() - before
    stream.synchronize()
    assert launched_s < 0.1 < time.perf_counter() - before
    context.close()
    for buffer in held.values():
        buffer.close()
    stream.close()
    session.close()


def test_a_limit_on_the_arena_is_an_error_that_names_what_was_asked_and_smaller_batches_go_on(
    conv: Engine, expected: Callable[..., np.ndarray]
) -> None:
    with te.load(conv, options={"cuda.gpu_mem_limit": str(8 << 20)}) as runner:
        close(runner.infer(images(1))["scores"], expected(images(1)))
        with pytest.raises(te.errors.MemoryExhausted, match=r"could not allocate \d+ bytes of `cuda:0`") as caught:
            runner.infer(images(64))
        print(f"\n{caught.value}")
        close(runner.infer(images(1))["scores"], expected(images(1)))
        assert runner.runtime_info["provider_options"] == f"cuda.gpu_mem_limit={8 << 20}"


@pytest.mark.parametrize("options", [
    {"cuda.prefer_nhwc": "1"}, {"cuda.cudnn_conv_algo_search": "HEURISTIC"}, {"cuda.use_tf32": "0"},
    {"cuda.arena_extend_strategy": "kSameAsRequested", "cuda.cudnn_conv_use_max_workspace": "0"},
])  # fmt: skip
def test_settings_of_the_provider_reach_it_and_change_no_answer(
    conv: Engine, expected: Callable[..., np.ndarray], options: dict[str, str]
) -> None:
    with te.load(conv, options=options, graphs=True) as runner:
        for _ in range(3):
            close(runner.infer(images(8))["scores"], expected(images(8)))
        session = runner.runner._session
        found = session._stream_sessions[0].loaded.get_provider_options()["CUDAExecutionProvider"]
        assert {name: found[name.removeprefix("cuda.")] for name in options} == options
        assert runner.is_captured(images(8))


def test_an_operator_on_the_cpu_refuses_graphs_by_its_name_and_inference_goes_on(
    cuda: Callable[..., Engine], tmp_path: Path
) -> None:
    cuda()
    x, y = (helper.make_tensor_value_info(*item) for item in (("x", 1, ["n", 3, 3]), ("y", 1, ["n"])))
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Det", ["r"], ["y"])]
    graph = helper.make_graph(nodes, "det", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "d.onnx")
    engine = te.build(
        tmp_path / "d.onnx", device="cuda:0", providers=("cuda", "cpu"), batch=2, store=te.Store(tmp_path / "store")
    )
    with te.load(engine, graphs=True) as runner:
        for value in (1.0, 2.0, 3.0):
            found = runner.infer(np.stack([np.eye(3, dtype=np.float32) * value] * 2))["y"]
            np.testing.assert_allclose(found, [value**3] * 2, rtol=1e-5)
        print(f"\n{runner.runtime_info['graphs']}")
        assert "the CPU runs `Det`" in runner.runtime_info["graphs"]


def test_a_bad_request_on_a_gpu_breaks_nobody_elses(conv: Engine, expected: Callable[..., np.ndarray]) -> None:
    with te.load(conv, contexts=2) as runner:
        with pytest.raises(te.errors.TrtEngineError):
            runner.infer({"images": np.zeros((1, 3, 31, 32), np.float32)})
        with pytest.raises(te.errors.TrtEngineError):
            runner.infer(images(65))
        close(runner.infer(images(2))["scores"], expected(images(2)))
