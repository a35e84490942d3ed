"""Named protocols, and what becomes of them on a device: nothing is claimed that did not happen;
warm-ups counted in queries.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import trt_engine as te
from onnx_models import conv_net
from trt_engine.benchmark.measurement_protocols import PROTOCOL_RULES, resolve_protocol
from trt_engine.config.bench import PROTOCOLS, BenchConfig
from trt_engine.errors import UsageError


def test_every_protocol_that_can_be_asked_for_has_its_rules() -> None:
    assert set(PROTOCOL_RULES) == set(PROTOCOLS)


@pytest.mark.parametrize(
    ("name", "transfers", "graph", "warmup_s", "duration_s"),
    [
        ("trt-engine", False, True, 1.0, 10.0),
        ("trtexec10", True, False, 0.2, 3.0),
        ("trtexec11", False, True, 0.2, 3.0),
    ],
)
def test_a_device_with_events_measures_by_the_named_rules(
    name: str, transfers: bool, graph: bool, warmup_s: float, duration_s: float
) -> None:
    found = resolve_protocol(BenchConfig(protocol=name), "fake:0")
    assert (found.transfers, found.graph, found.warmup_s, found.duration_s) == (transfers, graph, warmup_s, duration_s)
    assert (found.clock, found.percentile_rule, found.min_iterations) == ("device events", "trtexec", 10)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_cpu_never_claims_transfers_graphs_or_spinning(name: str) -> None:
    config = BenchConfig(protocol=name, transfers=True, graph=True, spin=True, streams=4)
    found = resolve_protocol(config, "cpu")
    assert (found.transfers, found.graph, found.spin, found.streams, found.clock) == (False, False, False, 1, "host")
    assert {"transfers", "graph", "spin", "streams"} == set(found.not_applicable)


def test_a_gpu_called_with_host_arrays_owns_up_to_the_copies_inside() -> None:
    found = resolve_protocol(BenchConfig(protocol="trt-engine", transfers=False), "cuda:0", events=False)
    assert (found.transfers, found.clock, found.graph) == (True, "host", False)
    assert "compute only" in found.not_applicable


@pytest.mark.parametrize(
    ("config", "transfers", "graph", "lacking"),
    [
        ({}, False, True, {"spin"}),
        ({"graph": False}, False, False, {"spin"}),
        ({"transfers": True}, True, False, {"spin", "graph", "overlapped copies"}),
        ({"protocol": "trtexec10"}, True, False, {"spin", "overlapped copies"}),
        ({"protocol": "trtexec11", "streams": 2}, False, True, {"spin", "streams"}),
    ],
)
def test_a_gpu_whose_feeds_can_stay_there_is_timed_without_copies(
    config: dict[str, object], transfers: bool, graph: bool, lacking: set[str]
) -> None:
    found = resolve_protocol(BenchConfig(**config), "cuda:0", events=False, resident=True)  # type: ignore[arg-type]
    assert (found.transfers, found.graph, found.clock, found.streams) == (transfers, graph, "host", 1)
    assert set(found.not_applicable) == lacking


def test_copies_in_one_streams_order_are_not_said_to_overlap() -> None:
    assert "overlapped copies" in resolve_protocol(BenchConfig(protocol="trtexec10"), "fake:0").not_applicable


def test_what_is_asked_for_wins_over_the_protocol() -> None:
    config = BenchConfig(protocol="trtexec10", duration_s=0.5, warmup_s=0.0, iterations=7, transfers=False, graph=True)
    found = resolve_protocol(config, "fake:0")
    assert (found.duration_s, found.warmup_s, found.min_iterations) == (0.5, 0.0, 7)
    assert (found.transfers, found.graph, found.name) == (False, True, "trtexec10")


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": "trtexec12"},
        {"iterations": 0},
        {"streams": 0},
        {"duration_s": -1.0},
        {"warmup_s": float("nan")},
        {"idle_s": float("inf")},
    ],
)
def test_rules_nobody_could_keep_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_protocol(BenchConfig(**wrong), "cpu")  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize("backend", ["onnxruntime", "fake"])
def test_as_many_queries_are_left_out_as_were_asked_for(tmp_path: Path, backend: str) -> None:
    engine = te.build(conv_net(tmp_path / "net.onnx"), backend=backend, batch=2, out=tmp_path / "net.engine")
    record = te.bench(engine, warmup_s=0, duration_s=0, warmup_iterations=7, iterations=11)
    assert record.warmup_queries == 7
    assert len(record.compute_ms) == record.queries >= 11
    assert record.queries <= 12, "one more is in flight when the last is counted by events"
    assert record.protocol.min_warmup == 7
    assert record.wall_s >= sum(record.compute_ms[:1]) / 1e3


def test_a_duration_counts_from_the_first_query_that_is_kept(tmp_path: Path) -> None:
    engine = te.build(conv_net(tmp_path / "net.onnx"), batch=2, out=tmp_path / "net.engine.onnx")
    record = te.bench(engine, warmup_s=0, duration_s=0.05, warmup_iterations=50, iterations=1)
    assert record.warmup_queries == 50
    assert record.wall_s >= 0.05


def test_a_warm_up_below_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="warmup-iterations"):
        te.bench(conv_net(tmp_path / "net.onnx"), warmup_iterations=-1)
