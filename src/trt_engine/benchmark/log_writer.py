"""Write a measurement as a text log in the format of trtexec.

The first line names device and clock. Scripts that grep trtexec's logs find their lines; CPU times are labelled as such.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal

from trt_engine.device import parse_device
from trt_engine.records.bench import BenchRecord
from trt_engine.records.percentiles import percentile, summarize
from trt_engine.tensors import format_shape


def format_float(value: float) -> str:
    """Format with six significant digits and without exponent: `0.00152588`, `46580`."""
    return f"{Decimal(f'{value:.6g}'):f}" if math.isfinite(value) else str(value)


def first_line(record: BenchRecord) -> str:
    """The header line: device and clock."""
    here = record.environment
    kind = parse_device(record.device)[0]
    if kind == "cpu":
        cores = f"{here.cpu_cores} core{'s' if here.cpu_cores != 1 else ''}"
        return (
            f"# device: cpu ({here.cpu}, {cores}) · times are host-clock compute times on the CPU, no GPU was involved"
        )
    if kind == "fake":
        return f"# device: {record.device} (no real device) · times are events of a device that does not exist"
    board = here.gpu or "unknown GPU"
    if record.uses_device_events:
        return f"# device: {record.device} ({board}) · times are device events on the GPU"
    if not record.protocol.transfers:
        return (
            f"# device: {record.device} ({board}) · times are the host's clock around a synchronised run, "
            "inputs and outputs on the GPU, no copies"
        )
    return f"# device: {record.device} ({board}) · times are the host's clock around a call, its copies included"


def render_log(record: BenchRecord) -> str:
    """Render the log of one measurement."""
    return first_line(record) + "\n" + "\n".join(_lines(record)) + "\n"


def _lines(record: BenchRecord) -> Iterator[str]:
    stamp = _timestamp(record.started)

    def info(text: str) -> str:
        return f"[{stamp}] [I] {text}"

    def warning(text: str) -> str:
        return f"[{stamp}] [W] {text}"

    yield from map(info, _settings(record))
    if not record.complete:
        yield warning("The measurement was interrupted: what follows is what was measured until then.")
    if record.validation:
        yield warning(f"The engine's validation: {record.validation}")
    rule = record.protocol
    stamp = _timestamp(record.started, rule.warmup_s)
    yield info(f"Warmup completed {record.warmup_queries} queries over {format_float(rule.warmup_s * 1000)} ms")
    stamp = _timestamp(record.started, rule.warmup_s + record.wall_s)
    yield info(f"Timing trace has {record.queries} queries over {format_float(record.wall_s)} s")
    yield info("")
    yield info("=== Performance summary ===")
    yield info(f"Throughput: {format_float(record.qps)} qps")
    yield info(f"Images per second: {format_float(record.images_per_s)} (throughput x batch {record.batch})")
    if record.uses_device_events:
        for name, samples in (
            ("Latency", record.latency_ms),
            ("Enqueue Time", record.enqueue_ms),
            ("H2D Latency", record.h2d_ms),
            ("GPU Compute Time", record.compute_ms),
            ("D2H Latency", record.d2h_ms),
        ):
            if samples:
                yield info(f"{name}: {_times(record, samples)}")
    elif record.compute_ms:
        on_cpu, copies = record.device == "cpu", record.protocol.transfers
        what = "CPU Compute Time" if on_cpu else "Query Time" if copies else "Synchronised Run Time"
        yield info(
            f"{what} (host clock; it stands where scripts look for GPU Compute Time: no event of a GPU was read): "
            f"{_times(record, record.compute_ms)}"
        )
    yield info(f"Total Host Walltime: {format_float(record.wall_s)} s")
    total_s = math.fsum(record.compute_ms) / 1000
    if record.uses_device_events:
        yield info(f"Total GPU Compute Time: {format_float(total_s)} s")
    else:
        yield info(f"Total Compute Time (host clock): {format_float(total_s)} s")
    for reason in record.instability:
        yield warning(f"* Measurement is unstable: {reason}.")
    for text in record.warnings:
        yield warning(f"* {text}")
    yield info("End of measurement: " + ("complete" if record.complete else "interrupted"))


def _settings(record: BenchRecord) -> Iterator[str]:
    rule = record.protocol

    yield "=== Measurement ==="
    yield f"Tool: trt-engine {record.environment.tool}, backend {record.backend}"
    yield f"Device: {record.device}"
    if record.environment.gpu and parse_device(record.device)[0] == "cuda":
        yield f"Selected Device: {record.environment.gpu}"
        yield f"Compute Capability: {record.environment.compute_capability}"
    yield f"Engine: {record.engine}"
    for name, value in sorted(record.runtime_info.items()):
        yield f"Fact: {name} = {value}"
    yield "Shapes: " + ", ".join(f"{name}:{format_shape(shape)}" for name, shape in record.shapes.items())
    yield f"Batch: {record.batch}"
    yield f"Inputs: {record.inputs or 'unknown'}"
    yield "=== Inference Options ==="
    yield f"Protocol: {rule.name} ({rule.loop} loop, {rule.clock} clock, {rule.percentile_rule} percentiles)"
    yield f"Iterations: {rule.min_iterations}"
    yield f"Duration: {format_float(rule.duration_s)}s (+ {format_float(rule.warmup_s * 1000)}ms warm up)"
    yield f"Idle time: {format_float(rule.idle_s * 1000)}ms"
    yield f"Inference Streams: {rule.streams}"
    for name, on in (("Data transfers", rule.transfers), ("Spin-wait", rule.spin), ("CUDA Graph", rule.graph)):
        yield f"{name}: {'Enabled' if on else 'Disabled'}"
    if rule.not_applicable:
        yield f"Not on this device: {', '.join(rule.not_applicable)}"
    yield "Percentiles: " + ",".join(f"{percent:g}" for percent in record.percentiles)
    for when, state in zip(("before", "after"), record.clocks, strict=False):
        known = [
            f"{label} {value}"
            for label, value in (
                ("CPU MHz", state.cpu_mhz),
                ("load average", state.load_average),
                ("SM MHz", state.sm_mhz),
                ("memory MHz", state.memory_mhz),
                ("temperature C", state.temperature_c),
                ("power W", state.power_w),
                ("held down by", ", ".join(state.throttled) or None),
            )
            if value is not None
        ]
        if known:
            yield f"Clocks {when}: {', '.join(known)}"


def _times(record: BenchRecord, samples: Sequence[float]) -> str:
    """`min = 1.1 ms, max = ...` in trtexec's order."""
    rule = record.protocol.percentile_rule
    summary = summarize(samples, rule)
    if summary is None:
        return ""
    ascending = sorted(samples)
    named = [("min", summary.min), ("max", summary.max), ("mean", summary.mean), ("median", summary.median)]
    named += [(f"percentile({percent:g}%)", percentile(ascending, percent, rule)) for percent in record.percentiles]
    return ", ".join(f"{name} = {format_float(value)} ms" for name, value in named)


def _timestamp(started: str, after_s: float = 0.0) -> str:
    """trtexec's timestamp of an ISO time plus `after_s`."""
    try:
        return (datetime.datetime.fromisoformat(started) + datetime.timedelta(seconds=after_s)).strftime(
            "%m/%d/%Y-%H:%M:%S"
        )
    except (ValueError, OverflowError):
        return "01/01/1970-00:00:00"
