"""Measure an engine with trtexec under our protocol, with every sample.

Defaults differ between trtexec 10 and 11, so every option is passed explicitly and verified against the banner. Times come
from `--exportTimes`, the enqueue time from the log.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trt_engine.backends.trtexec.build import run_checked
from trt_engine.backends.trtexec.command_line import CommandLine
from trt_engine.backends.trtexec.program import Program, find_program
from trt_engine.backends.trtexec.run import engine_command
from trt_engine.benchmark.measured_engine import MeasuredEngine
from trt_engine.benchmark.measurement_protocols import PROTOCOL_RULES, resolve_protocol
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import Interrupted, SetupError, UsageError
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.trt.trtexec_exports import read_times
from trt_engine.trt.trtexec_log import TrtexecLog

_BOUND_WARNINGS = {
    "enqueue_bound": "the host needs more than 80 % of the compute time to enqueue: the device waits for it (try `--graph`)",
    "h2d_bound": "copying inputs takes longer than computing (try `--no-transfers`)",
    "d2h_bound": "copying outputs takes longer than computing (try `--no-transfers`)",
}


def measure(engine: Engine, config: BenchConfig, runtime: RuntimeConfig) -> BenchRecord:
    """Measure an engine in a process of trtexec; the record has every sample.

    Raises `SetupError` where trtexec's banner contradicts the options, `Interrupted` after Ctrl-C, and otherwise the error
    of the failure cause.
    """
    program = find_program()
    device = runtime.device or engine.passport.device
    protocol = _protocol(config, device)
    measured = MeasuredEngine(engine, config, device, protocol, by=f" with trtexec {program.version_text}")
    with tempfile.TemporaryDirectory(prefix="trt-engine-trtexec-") as place:
        folder = Path(place)
        made = engine_command(program, engine, runtime, measured.feeds, folder)
        measured.feeds.clear()
        _add_protocol_options(made, protocol, config)
        made.add("exportTimes", folder / "times.json")
        try:
            ran, said = run_checked(made, folder, f"the measurement of `{engine.path.name}`", measured=True)
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted before trtexec reported times", hint="the same command measures again"
            ) from None
        _verify_protocol(said, protocol, program)
        times = read_times(folder / "times.json")
    measured.finish()
    protocol, graph_lost = _effective_protocol(protocol, said)
    throttled = measured.before.throttled
    record = measured.record(
        protocol,
        times.compute_ms,
        latency_ms=times.latency_ms,
        h2d_ms=times.h2d_ms if protocol.transfers else (),
        d2h_ms=times.d2h_ms if protocol.transfers else (),
        wall_s=said.report.total_host_walltime_s or sum(times.compute_ms) / 1e3,
        warmup_queries=said.report.warmup_queries or 0,
        runtime_info=_runtime_info(engine, program, said, ran.command),
        warnings=(*made.warnings, *graph_lost, *_warnings(said, protocol, len(times.compute_ms), throttled)),
    )
    if record.environment.gpu is not None:
        return record
    machine = dataclasses.replace(  # without NVML, trtexec reports the GPU
        record.environment, gpu=said.report.gpu, compute_capability=said.report.compute_capability
    )
    return dataclasses.replace(record, environment=machine)


# ------------------------------------------------------------------------------------------------ protocol


def _protocol(config: BenchConfig, device: str) -> Protocol:
    """The effective protocol: trtexec can spin and overlap copies, unlike our loop."""
    base = resolve_protocol(config, device, events=True)
    if base.clock != "device events":
        raise UsageError(f"trtexec measures on a GPU, not on `{device}`", hint="`--device cuda:0`")
    return dataclasses.replace(
        base,
        spin=PROTOCOL_RULES[config.protocol].spin if config.spin is None else config.spin,
        not_applicable=(
            *(item for item in base.not_applicable if item not in ("spin", "overlapped copies")),
            *(("warm-up by queries",) if config.warmup_iterations else ()),  # trtexec has a warm-up time only
        ),
        min_warmup=0,
    )


def _add_protocol_options(arguments: CommandLine, protocol: Protocol, config: BenchConfig) -> None:
    """Add every protocol option in the spelling of this version: 11 inverted four defaults."""
    if arguments.program.version >= (11, 0, 0):
        switches = (
            ("noCudaGraph", not protocol.graph), ("noSpinWait", not protocol.spin),
            ("includeDataTransfers", protocol.transfers),
        )  # fmt: skip
    else:
        switches = (
            ("useCudaGraph", protocol.graph), ("useSpinWait", protocol.spin), ("noDataTransfers", not protocol.transfers),
        )  # fmt: skip
    for option, wanted in switches:
        if wanted:
            arguments.add(option)
    arguments.add("warmUp", f"{protocol.warmup_s * 1000:g}")
    arguments.add("duration", f"{protocol.duration_s:g}")
    arguments.add("iterations", protocol.min_iterations)
    arguments.add("percentile", ",".join(f"{percent:g}" for percent in config.percentiles))
    arguments.add("infStreams" if arguments.program.has("infStreams") else "streams", protocol.streams)
    arguments.add("avgRuns", 10)
    if protocol.idle_s:
        arguments.add("idleTime", f"{protocol.idle_s * 1000:g}")


_DURATION = re.compile(r"(?P<duration>[\d.e+-]+)s \(\+ (?P<warmup>[\d.e+-]+)ms warm up\)")


def _verify_protocol(trtexec_log: TrtexecLog, protocol: Protocol, program: Program) -> None:
    """Raise `SetupError` where the banner contradicts the protocol."""
    wrong = [
        f"{name} {_on(found)}, requested {_on(wanted)}"
        for name, found, wanted in (
            ("CUDA graph", trtexec_log.report.cuda_graph, protocol.graph),
            ("spin-wait", trtexec_log.report.spin_wait, protocol.spin),
            ("data transfers", trtexec_log.report.data_transfers, protocol.transfers),
        )
        if found is not None and found != wanted
    ]
    numbers: list[tuple[str, str | None, float]] = [
        ("iterations", trtexec_log.banner.get("Iterations"), protocol.min_iterations),
        ("streams", trtexec_log.banner.get("Inference Streams", trtexec_log.banner.get("Streams")), protocol.streams),
    ]
    if match := _DURATION.fullmatch(trtexec_log.banner.get("Duration", "")):
        numbers.append(("duration", match["duration"], protocol.duration_s))
        numbers.append(("warm-up", match["warmup"], protocol.warmup_s * 1000))
    wrong += [
        f"{name} {found}, requested {wanted:g}"
        for name, found, wanted in numbers
        if found is not None and abs(float(found) - wanted) > 1e-4 * max(1.0, abs(wanted))
    ]
    if wrong:
        raise SetupError(
            f"trtexec {program.version_text} did not measure as requested: {'; '.join(wrong)}",
            hint="the times are discarded; measure with `--backend tensorrt`",
        )


def _on(value: bool | None) -> str:
    return "on" if value else "off"


def _effective_protocol(protocol: Protocol, trtexec_log: TrtexecLog) -> tuple[Protocol, tuple[str, ...]]:
    """The protocol without graph where capture failed, whatever the banner shows."""
    if not (protocol.graph and trtexec_log.cuda_graph_failed):
        return protocol, ()
    lacking = (*protocol.not_applicable, "graph")
    return (
        dataclasses.replace(protocol, graph=False, not_applicable=lacking),
        ("the graph could not be captured (reported by trtexec); measured without one",),
    )


# ------------------------------------------------------------------------------------------------ report


def _runtime_info(engine: Engine, program: Program, trtexec_log: TrtexecLog, command: str) -> dict[str, str]:
    facts = {
        "measured_by": f"trtexec {program.version_text}",
        "trtexec": str(program.path),
        "command": command,
        "precision": engine.passport.precision.main_dtype or "unknown",
    }
    if trtexec_log.report.enqueue_ms is not None:
        facts["enqueue_median_ms"] = f"{trtexec_log.report.enqueue_ms.median:g}"
    return facts


def _warnings(trtexec_log: TrtexecLog, protocol: Protocol, count: int, throttled: tuple[str, ...]) -> Iterator[str]:
    yield from (_BOUND_WARNINGS[label] for label in trtexec_log.report.perf_warnings if label in _BOUND_WARNINGS)
    if throttled:
        yield f"GPU clocks were held down: {', '.join(sorted(throttled))}"
    if trtexec_log.report.timed_queries is not None and trtexec_log.report.timed_queries != count:
        yield f"trtexec timed {trtexec_log.report.timed_queries} queries and exported {count}"
    if protocol.streams > 1:
        yield "several streams run side by side: throughput counts, the times of single queries overlap"
