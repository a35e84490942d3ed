"""Measurements as text logs in the format of trtexec: written, and read back (trtexec 8.5 to 11.x, and our own).

The first line names device and clock. Scripts that grep trtexec's logs find their lines; CPU times are labelled as such.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import read_bounded
from trt_engine.device import parse_device
from trt_engine.errors import UsageError
from trt_engine.limits import LOG_LINES
from trt_engine.records.bench import BenchRecord, LogReport
from trt_engine.records.percentiles import percentile, summarize
from trt_engine.tensors import format_shape
from trt_engine.trt import trtexec_log


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


_OURS = re.compile(r"^# device: (?P<device>\S+) \((?P<what>.*)\) · times are ")
_HOST_TIMES = re.compile(r"^[A-Z][A-Za-z0-9 ]* \([^()]*host clock[^()]*\): (?P<items>min = .*)$")
_ENDS = b"\n\r\v\f\x1c\x1d\x1e"


def read_log(path: Path) -> LogReport:
    """Parse the log at `path`. Raises `UsageError` when it is unreadable or of neither tool."""
    try:
        raw = read_bounded(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot read the log `{path}`: {reason}", hint="give a log of trtexec or of `bench`"
        ) from error
    if (lines := len(raw) - len(raw.translate(None, _ENDS))) > LOG_LINES.value:
        raise UsageError(f"`{path}` has more than {lines} lines", hint=LOG_LINES.hint)
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"  # PowerShell's `>` writes UTF-16
    report = parse_log(raw.decode(encoding, errors="replace"), str(path))
    if report.producer is None:
        raise UsageError(
            f"`{path}` is not a log of trtexec or trt-engine: no banner and no `[I]` line",
            hint="capture stdout and stderr: `trtexec ... 2>&1 | tee trtexec.log`",
        )
    return report


def parse_log(text: str, name: str = "log") -> LogReport:
    """Parse a log; the last value wins where a run reports twice."""
    lines = text.splitlines()
    ours = next((match for line in lines[:5] if (match := _OURS.match(line))), None)
    return trtexec_log.parse(text, name).report if ours is None else _parse_own_log(lines, name, ours["device"])


def _parse_own_log(raw: list[str], name: str, device: str) -> LogReport:
    """Parse a log of `bench`, which has its own end marker."""
    lines = [trtexec_log.parse_line(line) for line in raw]
    found: dict[str, Any] = {}
    for line in lines:
        if line.severity == "I":
            found.update(trtexec_log.parse_fields(line.text))
            found.update(_own_fields(line.text))
    whole = found.pop("whole", False)
    return LogReport(
        log=name,
        producer="trt-engine",
        status="passed" if whole and found.get("throughput_qps") is not None else "failed",
        end_marker="complete" if whole else None,
        device=device,
        warning_lines=sum(line.severity == "W" and line.stamped for line in lines),
        error_lines=sum(line.severity in ("E", "F") for line in lines),
        **found,
    )


def _own_fields(text: str) -> Iterator[tuple[str, Any]]:
    """Fields that only logs of `bench` have."""
    if (match := _HOST_TIMES.match(text)) and (times := trtexec_log.parse_times(match["items"])):
        yield "compute_ms", times
    name, colon, value = text.partition(": ")
    if name == "Protocol" and colon:
        yield "protocol", value.strip().partition(" ")[0]
    elif name == "End of measurement":
        yield "whole", value.strip() == "complete"
    elif name == "Batch" and value.strip().isdecimal() and len(value) < 19:
        yield "batch", int(value)
