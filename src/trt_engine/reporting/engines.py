"""What Python users hold between two verbs: engines on disk, loaded engines, bound calls, outputs, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trt_engine.engine import Engine
from trt_engine.format import format_ms, format_percent
from trt_engine.records.passport import Passport
from trt_engine.reporting.document import Block, Fact, Table, make_facts
from trt_engine.reporting.inspection import passport_facts
from trt_engine.reporting.tables import signature_facts, sized
from trt_engine.runtime.bound_call import BoundCall
from trt_engine.runtime.inference_engine import InferenceEngine, InferenceResult, Stats
from trt_engine.runtime.stats import LatencySummary
from trt_engine.tensors import Signature, dtype_name, format_shape


def engine(engine: Engine) -> Iterator[Block]:
    nbytes = sum(item.nbytes for item in engine.passport.payload)
    yield make_facts(("engine", sized(engine.path, nbytes)), *passport_facts(engine.passport))


def passport(passport: Passport) -> Iterator[Block]:
    yield make_facts(*passport_facts(passport))


def signature(signature: Signature) -> Iterator[Block]:
    yield make_facts(*signature_facts(signature))


def inference_engine(runner: InferenceEngine) -> Iterator[Block]:
    shares = runner.engine.passport.precision.shares_text
    info = runner.runtime_info | {"engine": str(runner.engine.path)} | ({"precision": shares} if shares else {})
    counts = runner.stats()
    yield make_facts(
        *info.items(),
        *signature_facts(runner.signature, runner.profiles),
        ("requests", _counts(counts)),
        ("state", "closed" if runner.closed else "loaded"),
    )


def bound_call(call: BoundCall) -> Iterator[Block]:
    owner = call.engine
    yield make_facts(
        ("engine", str(owner.path) if owner is not None else None),
        ("device", call.device),
        ("precision", (owner.passport.precision.shares_text or None) if owner is not None else None),
        ("CUDA graph", "replayed" if call.is_captured else "none"),
        ("state", "closed" if call.closed else "bound"),
    )
    rows = tuple(
        (name, "input" if name in call.inputs else "output", *_array_cells(array), call.placement(name))
        for name, array in (call.inputs | call.outputs).items()
    )
    if rows:
        yield Table("", ("tensor", "kind", "dtype", "shape", "memory"), rows, frozenset((0, 1, 2, 3, 4)))


def inference_result(result: InferenceResult) -> Iterator[Block]:
    state = "success" if result.success else "failed"
    yield make_facts(("result", state), ("latency", format_ms(result.latency_ms)), ("message", result.message or None))
    rows = tuple((name, *_array_cells(array)) for name, array in result.outputs.items())
    if rows:
        yield Table("", ("output", "dtype", "shape"), rows, frozenset((0, 1, 2)))


def stats(stats: Stats) -> Iterator[Block]:
    pool, batching = stats.pool, stats.batching
    mean = f"mean {format_ms(stats.seconds / stats.requests * 1e3)}" if stats.requests else None
    rows: list[Fact] = [
        ("requests", _counts(stats)),
        ("latency", mean),
    ]
    if pool is not None:
        rows += [
            ("contexts", f"{pool.contexts}, {pool.busy} busy"),
            ("wait", f"{pool.waiting} waiting, {pool.rejected} rejected, {pool.timeouts} timeouts"),
            ("wait time", _latency(pool.wait)),
            ("graphs", f"{pool.graphs.captured} captured, {pool.graphs.replayed} replayed"),
        ]
    if batching is not None:
        rows += [
            ("batches", f"{batching.batches} of {batching.mean_batch:.1f} rows on average, {batching.rows} rows"),
            ("queue", f"{batching.waiting} waiting, {batching.expired} expired, {batching.rejected} rejected"),
            ("queue time", _latency(batching.queue)),
            ("batch time", _latency(batching.run)),
        ]
    yield make_facts(*rows)
    if stats.replicas:
        columns = ("device", "requests", "failed", "in flight", "utilization", "state")
        replicas = (
            (
                one.device, str(one.requests), str(one.failures), str(one.in_flight),
                "" if one.utilization is None else format_percent(one.utilization),
                "serving" if one.serving else one.message or "suspended",
            )
            for one in stats.replicas
        )  # fmt: skip
        yield Table("", columns, tuple(replicas), frozenset((0, 5)))


def _counts(stats: Stats) -> str:
    return f"{stats.requests} finished, {stats.failures} failed, {stats.in_flight} in flight"


def _latency(summary: LatencySummary) -> str | None:
    if not summary.count:
        return None
    parts: Mapping[str, float] = {
        "mean": summary.mean_ms, "p50": summary.p50_ms, "p99": summary.p99_ms, "max": summary.max_ms,
    }  # fmt: skip
    return ", ".join(f"{name} {format_ms(value)}" for name, value in parts.items())


def _array_cells(array: Any) -> tuple[str, str]:
    """Dtype and shape of an array of any library."""
    return dtype_name(array), format_shape(tuple(array.shape))
