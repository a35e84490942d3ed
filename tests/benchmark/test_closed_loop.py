"""The closed loop: what is counted, what is left out, and what a record may say."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trt_engine import errors
from trt_engine.backend import get_backend
from trt_engine.benchmark import closed_loop as loop_module
from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.closed_loop import measure
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Stream
from trt_engine.device.host import HostDevice
from trt_engine.engine import Engine
from trt_engine.protocols import Session
from trt_engine.tensors import Signature, TensorSpec

Made = Callable[[str], Engine]
SHORT = BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=25)


class Clock:
    """A clock that moves when somebody works or sleeps, and not otherwise."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.slept_s = 0.0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_ns += round(seconds * 1e9)


class Direct(Session):
    """A session that takes host arrays; each query takes the next of the times given, the last one for ever."""

    runs_host_arrays = True

    def __init__(self, engine: Engine, clock: Clock, *times_ms: float) -> None:
        self.signature = engine.signature
        self.device = HostDevice()
        self._clock = clock
        self._times_ms = list(times_ms)
        self.fed: list[Any] = []
        self.at: Callable[[int], None] = lambda count: None
        self.collecting: list[bool] = []

    def run(self, feeds: Any) -> dict[str, Any]:
        self.fed.append(feeds)
        self.collecting.append(gc.isenabled())
        self.at(len(self.fed))
        took_ms = self._times_ms[min(len(self.fed), len(self._times_ms)) - 1]
        self._clock.now_ns += round(took_ms * 1e6)
        return {}

    def create_context(self, profile: int = 0) -> Any:
        raise AssertionError("a session that takes host arrays is not asked for contexts")

    def runtime_info(self) -> dict[str, str]:
        return {"library": "in-test"}

    def close(self) -> None:
        return


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop_module, "time", made)
    return made


@pytest.fixture
def engine(made: Made) -> Engine:
    return made("onnxruntime")


# ------------------------------------------------------------------------------------------------ the host's clock


def test_every_query_is_kept_in_the_order_measured(engine: Engine, clock: Clock) -> None:
    times_ms = [float(n) for n in range(1, 26)]
    record = measure(Direct(engine, clock, *times_ms), engine, SHORT)
    assert record.compute_ms == pytest.approx(times_ms)
    assert record.queries == 25
    assert record.complete
    assert record.wall_s == pytest.approx(sum(times_ms) / 1000)


def test_both_the_iterations_and_the_duration_are_minimums(engine: Engine, clock: Clock) -> None:
    by_time = measure(Direct(engine, clock, 10.0), engine, BenchConfig(duration_s=1.0, warmup_s=0.0, iterations=10))
    by_count = measure(Direct(engine, clock, 10.0), engine, BenchConfig(duration_s=0.01, warmup_s=0.0, iterations=10))
    assert (by_time.queries, by_count.queries) == (100, 10)


def test_queries_that_start_during_the_warm_up_are_counted_and_left_out(engine: Engine, clock: Clock) -> None:
    session = Direct(engine, clock, 300.0, 300.0, 300.0, 300.0, 100.0)
    record = measure(session, engine, BenchConfig(duration_s=1.0, warmup_s=1.0, iterations=3))
    assert record.warmup_queries == 4  # starts at 0, 0.3, 0.6 and 0.9 s; the last of them ends after the warm-up
    assert record.compute_ms == pytest.approx((100.0,) * 8)


def test_a_pause_comes_after_each_measured_query_and_is_not_computing(engine: Engine, clock: Clock) -> None:
    config = BenchConfig(duration_s=0.0, warmup_s=0.1, iterations=5, idle_s=0.5)
    record = measure(Direct(engine, clock, 10.0), engine, config)
    assert record.compute_ms == pytest.approx((10.0,) * 5)
    assert clock.slept_s == pytest.approx(2.0)  # between five queries, and not during the warm-up
    assert record.wall_s == pytest.approx(5 * 0.01 + 4 * 0.5)


def test_nothing_is_collected_while_it_measures(engine: Engine, clock: Clock) -> None:
    session = Direct(engine, clock, 1.0)
    assert gc.isenabled()
    measure(session, engine, SHORT)
    assert not any(session.collecting)
    assert gc.isenabled()


def test_a_cpu_record_has_no_figure_of_a_gpu(engine: Engine, clock: Clock) -> None:
    config = dataclasses.replace(SHORT, protocol="trtexec10")
    record = measure(Direct(engine, clock, 1.0), engine, config)
    assert record.device == "cpu"
    assert record.latency_ms == record.enqueue_ms == record.h2d_ms == record.d2h_ms == ()
    assert record.protocol.clock == "host"
    assert not record.protocol.transfers


def test_an_option_that_has_no_effect_is_said(engine: Engine, clock: Clock) -> None:
    config = dataclasses.replace(SHORT, graph=True, spin=True, transfers=True, streams=2)
    said = " ".join(measure(Direct(engine, clock, 1.0), engine, config).warnings)
    for flag in ("--graph", "--spin", "--transfers", "--streams 2"):
        assert flag in said


def test_too_few_queries_for_a_percentile_are_said(engine: Engine, clock: Clock) -> None:
    few = measure(Direct(engine, clock, 1.0), engine, dataclasses.replace(SHORT, iterations=100))
    enough = measure(Direct(engine, clock, 1.0), engine, dataclasses.replace(SHORT, iterations=1000))
    assert any("too few for the 99 % percentile" in text for text in few.warnings)
    assert not any("too few" in text for text in enough.warnings)


# ------------------------------------------------------------------------------------------------ feeds that stay


class OnGpu(Direct):
    """A session whose library runs on a GPU: a call with copies takes 5 ms, a resident one 1 ms, a graph's half that."""

    binds_resident = True

    def __init__(self, engine: Engine, clock: Clock, *, refuses: errors.TrtEngineError | None = None) -> None:
        super().__init__(engine, clock, 5.0)
        self._refuses = refuses
        self.made: list[bool] = []

    def runtime_info(self) -> dict[str, str]:
        return {"device": "cuda:0"}

    def bind_resident(self, feeds: Any, *, graph: bool = False) -> Callable[[], None]:
        if graph and self._refuses is not None:
            raise self._refuses
        self.made.append(graph)

        def run() -> None:
            self._clock.now_ns += 500_000 if graph else 1_000_000

        return run


@pytest.mark.parametrize(
    ("config", "took_ms", "transfers", "graph"),
    [({}, 0.5, False, True), ({"graph": False}, 1.0, False, False), ({"transfers": True}, 5.0, True, False)],
)
def test_a_gpus_library_is_measured_on_feeds_that_stay_there(
    engine: Engine, clock: Clock, config: dict[str, Any], took_ms: float, transfers: bool, graph: bool
) -> None:
    session = OnGpu(engine, clock)
    record = measure(session, engine, dataclasses.replace(SHORT, **config))
    assert record.compute_ms == pytest.approx((took_ms,) * 25)
    assert (record.device, record.protocol.clock) == ("cuda:0", "host")
    assert (record.protocol.transfers, record.protocol.graph) == (transfers, graph)
    assert len(session.fed) == (25 if transfers else 0)
    assert record.h2d_ms == record.d2h_ms == record.enqueue_ms == ()


def test_a_graph_the_library_refuses_is_said_and_left_out(engine: Engine, clock: Clock) -> None:
    session = OnGpu(engine, clock, refuses=errors.BuildError("a node is on the CPU"))
    record = measure(session, engine, SHORT)
    assert record.compute_ms == pytest.approx((1.0,) * 25)
    assert not record.protocol.graph and "graph" in record.protocol.not_applicable
    assert any("a node is on the CPU" in text for text in record.warnings)


# ------------------------------------------------------------------------------------------------ stopping


def test_ctrl_c_gives_back_what_was_measured(engine: Engine, clock: Clock) -> None:
    session = Direct(engine, clock, 1.0)

    def press(count: int) -> None:
        if count == 18:
            raise KeyboardInterrupt

    session.at = press
    with pytest.raises(errors.Interrupted) as caught:
        measure(session, engine, BenchConfig(duration_s=3600.0, warmup_s=0.0))
    partial: Any = caught.value.partial
    assert partial.queries == 17
    assert not partial.complete
    assert caught.value.exit_code == 130
    assert gc.isenabled()


def test_who_asks_to_stop_gets_an_incomplete_record(engine: Engine, clock: Clock) -> None:
    session = Direct(engine, clock, 50.0)
    config = BenchConfig(duration_s=3600.0, warmup_s=0.0)
    record = measure(session, engine, config, should_stop=lambda: len(session.fed) >= 12)
    assert not record.complete
    assert 12 <= record.queries <= 14


# ------------------------------------------------------------------------------------------------ inputs


def test_shapes_outside_the_profile_are_refused_before_anything_runs(engine: Engine, clock: Clock) -> None:
    session = Direct(engine, clock, 1.0)
    with pytest.raises(errors.ProfileError, match="profile 0 spans 1x3x16x16 to 4x3x16x16") as caught:
        measure(session, engine, dataclasses.replace(SHORT, batch=5))
    assert caught.value.exit_code == 2
    assert not session.fed


def test_the_default_batch_is_the_profiles_optimum(engine: Engine) -> None:
    feeds, said = feeds_for(engine, BenchConfig())
    assert feeds["x"].shape == (2, 3, 16, 16)
    assert said == "seeded random, seed 0"


def test_inputs_come_from_a_file(engine: Engine, tmp_path: Any) -> None:
    path = tmp_path / "three.npy"
    np.save(path, np.full((3, 3, 16, 16), 0.5, np.float32))
    feeds, said = feeds_for(engine, BenchConfig(inputs=path))
    assert feeds["x"].shape == (3, 3, 16, 16)
    assert said == "three.npy"


def test_the_batch_is_what_all_inputs_share() -> None:
    def signature(*shapes: tuple[int, ...]) -> Signature:
        return Signature(tuple(TensorSpec(f"i{n}", "float32", shape) for n, shape in enumerate(shapes)), ())

    assert batch_of(signature((-1, 3), (-1, 4)), {"i0": (8, 3), "i1": (8, 4)}) == 8
    assert batch_of(signature((4, 3)), {"i0": (4, 3)}) == 4
    assert batch_of(signature((128,)), {"i0": (128,)}) == 1
    assert batch_of(signature((4, 3), (2, 3)), {"i0": (4, 3), "i1": (2, 3)}) == 1


# ------------------------------------------------------------------------------------------------ device events


@pytest.fixture
def fake(made: Made) -> Iterator[Any]:
    engine = made("fake")
    session = get_backend("fake").load_component("runtime")().load(engine, RuntimeConfig())
    yield SimpleNamespace(engine=engine, session=session)
    session.close()


def test_everything_taken_from_the_device_is_given_back(fake: Any) -> None:
    for protocol in ("trt-engine", "trtexec10"):
        measure(fake.session, fake.engine, dataclasses.replace(SHORT, protocol=protocol, streams=3))
    assert fake.session.device.allocated_count == 0


def test_streams_side_by_side_are_all_counted(fake: Any) -> None:
    record = measure(fake.session, fake.engine, dataclasses.replace(SHORT, streams=3))
    assert record.protocol.streams == 3
    assert record.queries >= 3 * 25
    assert any("streams" in text for text in record.warnings)


def test_a_graph_that_cannot_be_captured_is_said_and_not_claimed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(type(fake.session.device.stream())):  # type: ignore[misc]
        def capture(self, work: Callable[[Stream], None]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fake.session.device, "stream", lambda: Stubborn(fake.session.device))
    record = measure(fake.session, fake.engine, dataclasses.replace(SHORT, graph=True))
    assert not record.protocol.graph
    assert "graph" in record.protocol.not_applicable
    assert any("not permitted" in text for text in record.warnings)
    assert record.queries == 26


def test_a_device_without_memory_keeps_nothing(made: Made) -> None:
    from trt_engine.errors import MemoryExhausted

    engine = made("fake")
    session = get_backend("fake").load_component("runtime")().load(engine, RuntimeConfig(options={"memory": "2KiB"}))
    with pytest.raises(MemoryExhausted):
        measure(session, engine, SHORT)
    assert session.device.allocated_count == 0
    session.close()


# ------------------------------------------------------------------------------------------------ ONNX Runtime


@pytest.mark.parametrize("protocol", ["trt-engine", "trtexec10", "trtexec11"])
def test_onnx_runtime_is_measured_by_the_hosts_clock(engine: Engine, protocol: str) -> None:
    session = get_backend("onnxruntime").load_component("runtime")().load(engine, RuntimeConfig())
    record = measure(session, engine, dataclasses.replace(SHORT, protocol=protocol, batch=4))
    session.close()
    assert (record.queries, record.batch, record.device, record.backend) == (25, 4, "cpu", "onnxruntime")
    assert min(record.compute_ms) > 0
    assert record.runtime_info
    assert record.wall_s >= sum(record.compute_ms) / 1000
